#!/usr/bin/env bash
# Serves container images as a registry, for machines that pull their images from one: `crane` of go-containerregistry, built from the
# Go module proxy. Go checks every module against the checksum database.
#
#   tools/registry.sh                               builds crane, and prints the program's path
#   tools/registry.sh ADDRESS:PORT ARCHIVE..        serves the images of these archives until it is killed
#
# ARCHIVE is one of tools/image.sh. The host is left out of an image's name, as containerd does for a mirror: the image
# registry.k8s.io/pause:3.10.2 is pause:3.10.2 here. The layers of most are not compressed: a machine without KVM would need long to unpack
# them.
. "$(dirname "$0")/lib.sh"

VERSION=v0.20.6
crane=$CACHE/crane-$VERSION/crane
if [ ! -x "$crane" ]; then
  command -v go >/dev/null || die "go is missing: run tools/setup.sh"
  mkdir -p "$CACHE/crane-$VERSION"
  exec 9>"$CACHE/crane-$VERSION/lock"; flock 9
  say "building crane $VERSION"
  # build under another name, then rename: a file with the final name is complete
  CGO_ENABLED=0 GOWORK=off GOFLAGS='' GOBIN=$CACHE/crane-$VERSION/new nice -n 10 \
    go install -p "${JOBS:-2}" -trimpath -ldflags "-s -w" "github.com/google/go-containerregistry/cmd/crane@$VERSION" >&2 ||
    die "crane cannot be built"
  mv "$CACHE/crane-$VERSION/new/crane" "$crane"
  exec 9>&-
fi
if [ $# = 0 ]; then echo "$crane"; exit; fi

address=$1; shift
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
trap exit TERM INT HUP
mkdir "$work/blobs"
# it ends with this script, in whichever way that ends
setpriv --pdeathsig KILL "$crane" registry serve --address "$address" --disk "$work/blobs" >"$work/log" 2>&1 & server=$!

for archive; do
  rm -rf "$work/image"; mkdir "$work/image"
  tar x -C "$work/image" -f "$archive"
  name=$(sed 's/.*"RepoTags":\["\([^"]*\)"\].*/\1/' "$work/image/manifest.json")
  "$crane" push --insecure "$work/image" "$address/${name#*/}" >/dev/null 2>"$work/error" ||
    { cat "$work/error" "$work/log" >&2; die "the registry at $address does not take $name"; }
  say "serving $name"
done
rm -rf "$work/image"
say "serving $# images on $address"
wait "$server"
