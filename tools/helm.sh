#!/usr/bin/env bash
# Builds Helm from the Go module proxy, and prints the program's path. Go checks every module against the checksum database. If Helm
# is built already, it only prints the path.
. "$(dirname "$0")/lib.sh"

# the newest version whose go.mod names a Go version that Debian's Go can fetch by itself
VERSION=v3.18.6
program=$CACHE/helm-$VERSION/helm

if [ ! -x "$program" ]; then
  command -v go >/dev/null || die "go is missing: run tools/setup.sh"
  mkdir -p "$CACHE/helm-$VERSION"
  exec 9>"$CACHE/helm-$VERSION/lock"; flock 9
  say "building Helm $VERSION"
  start=$SECONDS
  # build under another name, then rename: a file with the final name is complete
  CGO_ENABLED=0 GOWORK=off GOFLAGS='' GOBIN=$CACHE/helm-$VERSION/new nice -n 10 \
    go install -p "${JOBS:-2}" -trimpath -ldflags "-s -w" "helm.sh/helm/v3/cmd/helm@$VERSION" >&2 || die "Helm cannot be built"
  mv "$CACHE/helm-$VERSION/new/helm" "$program"
  say "helm: $(($(stat -c %s "$program") >> 20)) MiB, $((SECONDS - start)) s"
fi
echo "$program"
