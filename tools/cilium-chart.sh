#!/usr/bin/env bash
# Prints the folder of Cilium's Helm chart, as its Go module has it. Cilium's images are not in it.
. "$(dirname "$0")/lib.sh"

# the chart that docs/addons.md has the values of
VERSION=v1.19.0

PATH=$PATH:/usr/local/go/bin
command -v go >/dev/null || die "go is missing: run tools/setup.sh"
# the checksum database of Go verifies the module
module=$(go mod download -json "github.com/cilium/cilium@$VERSION" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
[ -d "$module/install/kubernetes/cilium" ] || die "the Go module of Cilium $VERSION has no chart"
echo "$module/install/kubernetes/cilium"
