//go:build go1.26

package main

import "crypto/tls"

const (
	// First in Go's own order of preference.
	unusualCurve = tls.SecP256r1MLKEM768
	hybrid       = tls.X25519MLKEM768
)
