//go:build !go1.24

package main

import "crypto/tls"

const (
	unusualCurve = tls.CurveP521
	// This version does not know X25519MLKEM768.
	hybrid tls.CurveID = 0
)
