//go:build go1.24 && !go1.26

package main

import "crypto/tls"

const (
	// Go's own order of preference puts no group first that our programs do not know.
	unusualCurve = tls.CurveP521
	hybrid       = tls.X25519MLKEM768
)
