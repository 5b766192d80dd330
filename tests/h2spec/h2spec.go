//go:build pinned

// Names what tools/h2spec.sh builds, so that `go mod tidy` keeps its pins.
package h2spec

import _ "github.com/summerwind/h2spec/cmd/h2spec"
