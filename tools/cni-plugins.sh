#!/usr/bin/env bash
# Builds the CNI plugins that a network plugin calls, from the Go module proxy, and prints the path of their archive: the part of
# the released cni-plugins-linux-amd64-VERSION.tgz that the tests need. Go checks every module against the checksum database.
. "$(dirname "$0")/lib.sh"

VERSION=v1.8.0 # as in src/cli/trust/components/list.rs
PLUGINS=(main/bridge main/loopback ipam/host-local meta/portmap)
folder=$CACHE/cni-plugins-$VERSION
archive=$folder/cni-plugins-linux-amd64-$VERSION.tgz

if [ ! -e "$archive" ]; then
  command -v go >/dev/null || die "go is missing: run tools/setup.sh"
  mkdir -p "$folder"
  exec 9>"$folder/lock"; flock 9
  say "building the CNI plugins $VERSION"
  set -- "${PLUGINS[@]/#/github.com/containernetworking/plugins/plugins/}"
  CGO_ENABLED=0 GOWORK=off GOFLAGS='' GOBIN=$folder/bin nice -n 10 go install -p "${JOBS:-2}" -trimpath -ldflags "-s -w" \
    "${@/%/@$VERSION}" >&2 || die "the CNI plugins cannot be built"
  tar cz --sort=name --owner=0 --group=0 -C "$folder/bin" -f "$archive.new" .
  mv "$archive.new" "$archive"
fi
echo "$archive"
