//go:build pinned

// This file imports the program that tools/h2spec.sh builds, so that `go mod tidy` keeps its pinned
// version.
package h2spec

import _ "github.com/summerwind/h2spec/cmd/h2spec"
