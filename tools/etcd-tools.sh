#!/usr/bin/env bash
# Builds etcdctl and etcdutl, which save and restore etcd, from the Go module proxy, in the version of the etcd that tools/kubernetes.sh
# builds. Prints their folder. Go checks every module against the checksum database. If they are built already, it only prints the folder.
. "$(dirname "$0")/lib.sh"

PATH=$PATH:/usr/local/go/bin
command -v go >/dev/null || die "go is missing: run tools/setup.sh"
version=$("$("$ROOT/tools/kubernetes.sh" etcd)/bin/etcd" --version | sed -n 's/^etcd Version: /v/p')
folder=$CACHE/etcd-tools-$version
mkdir -p "$folder/source"
exec 9>"$folder/lock"; flock 9
for tool in etcdctl etcdutl; do
  [ ! -x "$folder/$tool" ] || continue
  say "building $tool $version"
  cd "$folder/source"
  # a module of our own, because the tools' go.mod replaces modules by folders that a published module lacks
  published=$(go mod download -json "go.etcd.io/etcd/$tool/v3@$version" | sed -n 's/^\t"Dir": "\(.*\)".*/\1/p')
  [ -n "$published" ] || die "$tool $version is not to be had from the Go module proxy"
  install -m 644 "$published/go.mod" "$published/go.sum" .
  sed -i "s|^module .*|module firstlight.test/$tool|; /=> \.\.\?\//d; /^replace (\s*)\$/d" go.mod
  go mod edit -require="go.etcd.io/etcd/$tool/v3@$version"
  # build under another name, then rename: a file with the final name is complete
  CGO_ENABLED=0 GOWORK=off GOFLAGS='' nice -n 10 go build -mod=mod -p "${JOBS:-2}" -trimpath -buildvcs=false -ldflags "-s -w" \
    -o "$folder/$tool.new" "go.etcd.io/etcd/$tool/v3" >&2 || die "$tool cannot be built"
  mv "$folder/$tool.new" "$folder/$tool"
done
echo "$folder"
