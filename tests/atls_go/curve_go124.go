//go:build go1.24

package main

import "crypto/tls"

// Always first in Go's own order of preference.
const unusualCurve = tls.X25519MLKEM768
