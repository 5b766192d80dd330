// A relying party of OpenID Connect that verifies an attestation result.
//
//	oidc ISSUER AUDIENCE SECONDS    reads a token; the clock is SECONDS ahead
//
// It gets the keys from the issuer, and prints the claims as JSON.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
)

func main() {
	ctx := context.Background()
	provider, err := oidc.NewProvider(ctx, os.Args[1])
	check(err)
	ahead, err := strconv.Atoi(os.Args[3])
	check(err)
	token, err := io.ReadAll(os.Stdin)
	check(err)
	now := func() time.Time { return time.Now().Add(time.Duration(ahead) * time.Second) }
	verifier := provider.Verifier(&oidc.Config{ClientID: os.Args[2], Now: now})
	verified, err := verifier.Verify(ctx, strings.TrimSpace(string(token)))
	check(err)
	var claims map[string]any
	check(verified.Claims(&claims))
	// what the library has understood by itself
	if claims["sub"] != verified.Subject || claims["iss"] != verified.Issuer {
		check(fmt.Errorf("subject %q, issuer %q", verified.Subject, verified.Issuer))
	}
	check(json.NewEncoder(os.Stdout).Encode(claims))
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
