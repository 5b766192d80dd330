#!/usr/bin/env bash
# Builds containerd from the Go module proxy: static, stripped, without plugins for file systems that the image does not have. Prints the
# folder, which has bin/containerd, bin/containerd-shim-runc-v2, bin/ctr and containerd.service. Go checks every module against the
# checksum database. If they are built already, it only prints the folder.
. "$(dirname "$0")/lib.sh"

# the line with long-term support, until 2028-04-30. An upgrade from Debian's 1.7 is supported by its project only to this line
VERSION=${CONTAINERD_VERSION:-v2.3.7}

module=github.com/containerd/containerd/v2
folder=$CACHE/containerd-$VERSION
mkdir -p "$folder/bin" "$folder/source"
exec 9>"$folder/lock"; flock 9
PATH=$PATH:/usr/local/go/bin
for program in containerd containerd-shim-runc-v2 ctr; do
  [ ! -x "$folder/bin/$program" ] || continue
  command -v go >/dev/null || die "go is missing: run tools/setup.sh"
  say "building $program $VERSION"
  cd "$folder/source"
  # a module of our own with exactly the dependencies of the release
  published=$(go mod download -json "$module@$VERSION" | sed -n 's/^\t"Dir": "\(.*\)".*/\1/p')
  [ -n "$published" ] || die "$module $VERSION is not to be had from the Go module proxy"
  install -m 644 "$published/go.mod" "$published/go.sum" .
  sed -i "s|^module .*|module firstlight.test/containerd|" go.mod
  go mod edit -require="$module@$VERSION"
  # as the project's Makefile has it for static programs
  tags=osusergo,netgo,static_build,urfave_cli_no_docs,no_btrfs,no_devmapper,no_zfs
  [ "$program" != containerd-shim-runc-v2 ] || tags+=,no_grpc
  # build under another name, then rename: a file in bin is complete
  CGO_ENABLED=0 GOOS=linux GOARCH=amd64 GOWORK=off GOFLAGS='' nice -n 10 go build -mod=mod -p "${JOBS:-2}" -trimpath -buildvcs=false -tags "$tags" \
    -ldflags "-s -w -X $module/version.Version=$VERSION -X $module/version.Revision=" -o "$folder/new" "$module/cmd/$program" >&2 ||
    die "$program cannot be built"
  sed 's|/usr/local/bin|/usr/bin|' "$published/containerd.service" >"$folder/containerd.service"
  mv "$folder/new" "$folder/bin/$program"
done
echo "$folder"
