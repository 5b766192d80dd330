#!/usr/bin/env bash
# Fetches the resource definitions of the Prometheus operator from the Go module proxy, and prints their folder. Go checks the module
# against the checksum database.
. "$(dirname "$0")/lib.sh"

VERSION=v0.85.0
command -v go >/dev/null || die "go is missing: run tools/setup.sh"
folder=$(cd / && GOWORK=off GOFLAGS='' go mod download -json "github.com/prometheus-operator/prometheus-operator@$VERSION" |
  sed -n 's/^\t"Dir": "\(.*\)".*/\1/p')
[ -n "$folder" ] || die "prometheus-operator $VERSION is not to be had from the Go module proxy"
echo "$folder/example/prometheus-operator-crd"
