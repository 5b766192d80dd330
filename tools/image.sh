#!/usr/bin/env bash
# Makes a container image, with no registry and no container tool: a `docker save` archive of one layer, which `ctr images
# import`, `docker load` and every other runtime reads. The same files give the same bytes.
#
#   tools/image.sh ARCHIVE NAME ENTRYPOINT TREE      TREE: the folder that becomes /
#   tools/image.sh                                   that of our services: target/dist/firstlight-image.tar
. "$(dirname "$0")/lib.sh"

work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
if [ $# = 0 ]; then
  dist=$ROOT/target/dist
  mkdir "$work/tree"
  install -m755 "$dist"/{join,key}-service "$work/tree/"
  version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$ROOT/Cargo.toml" | head -1)
  set -- "$dist/firstlight-image.tar" "${IMAGE:-firstlight.local/services:$version}" /join-service "$work/tree"
  say "the services' image $2: $1"
fi
archive=$1 name=$2 entrypoint=$3 tree=$4
pack() { tar c --sort=name --mtime=@1 --owner=0 --group=0 --numeric-owner -C "$1" .; }

mkdir "$work/archive"
pack "$tree" >"$work/archive/layer.tar"
printf '{"architecture":"amd64","os":"linux","config":{"Entrypoint":["%s"],"WorkingDir":"/","Env":["PATH=%s"]},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
  "$entrypoint" /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  "$(sha256sum <"$work/archive/layer.tar" | cut -d' ' -f1)" >"$work/archive/config.json"
printf '[{"Config":"config.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$name" >"$work/archive/manifest.json"
pack "$work/archive" >"$archive.new"
mv "$archive.new" "$archive"
