//go:build !go1.24

package main

import "crypto/tls"

const unusualCurve = tls.CurveP521
