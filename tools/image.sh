#!/usr/bin/env bash
# Makes a container image, with no registry and no container tool: an archive of one layer. It is an image layout of OCI, whose
# manifest has the same digest in each registry, and a `docker save` archive: `skopeo`, `ctr images import`, `docker load` and every
# other runtime reads it. The same files give the same bytes.
#
#   tools/image.sh ARCHIVE NAME ENTRYPOINT TREE      TREE: the folder that becomes /
#   tools/image.sh                                   that of our services, with a compressed layer: target/dist/firstlight-image.tar
#   tools/image.sh --digest ARCHIVE                  prints the digest of its manifest
. "$(dirname "$0")/lib.sh"

if [ "${1:-}" = --digest ]; then
  tar xOf "$2" ./index.json | sed -n 's/.*"manifests":\[{"mediaType":"[^"]*","digest":"\(sha256:[0-9a-f]*\)".*/\1/p' | grep .
  exit
fi

work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
compress=cat layer_type=layer.v1.tar
if [ $# = 0 ]; then
  dist=$ROOT/target/dist
  mkdir "$work/tree"
  install -m755 "$dist"/{join-service,key-service,member-controller} "$work/tree/"
  version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$ROOT/Cargo.toml" | head -1)
  set -- "$dist/firstlight-image.tar" "${IMAGE:-firstlight.local/services:$version}" /join-service "$work/tree"
  # a tool that pushes an image compresses a layer that is not, and its digest is another one then
  compress="gzip -9n" layer_type=layer.v1.tar+gzip
  say "the services' image $2: $1"
fi
archive=$1 name=$2 entrypoint=$3 tree=$4
pack() { tar c --sort=name --mtime=@1 --owner=0 --group=0 --numeric-owner -C "$1" .; }

blobs=$work/archive/blobs/sha256
mkdir -p "$blobs"
# Adds the file $1 to the blobs, and prints its hash.
blob() {
  local hash
  hash=$(sha256sum <"$1" | cut -d' ' -f1)
  mv "$1" "$blobs/$hash"
  echo "$hash"
}
# Prints how a manifest describes the blob $1 of the media type $2, with the fields $3.
described() {
  printf '{"mediaType":"application/vnd.oci.image.%s","digest":"sha256:%s","size":%s%s}' "$2" "$1" "$(stat -c %s "$blobs/$1")" "${3:-}"
}

pack "$tree" >"$work/layer.tar"
printf '{"architecture":"amd64","os":"linux","config":{"Entrypoint":["%s"],"WorkingDir":"/","Env":["PATH=%s"]},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
  "$entrypoint" /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  "$(sha256sum <"$work/layer.tar" | cut -d' ' -f1)" >"$work/config.json"
$compress <"$work/layer.tar" >"$work/layer"
layer=$(blob "$work/layer") config=$(blob "$work/config.json")
printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","config":%s,"layers":[%s]}' \
  "$(described "$config" config.v1+json)" "$(described "$layer" "$layer_type")" >"$work/manifest"
manifest=$(blob "$work/manifest")
printf '{"imageLayoutVersion":"1.0.0"}' >"$work/archive/oci-layout"
printf '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[%s]}' \
  "$(described "$manifest" manifest.v1+json ",\"annotations\":{\"io.containerd.image.name\":\"$name\",\"org.opencontainers.image.ref.name\":\"${name##*:}\"}")" \
  >"$work/archive/index.json"
printf '[{"Config":"blobs/sha256/%s","RepoTags":["%s"],"Layers":["blobs/sha256/%s"]}]' "$config" "$name" "$layer" >"$work/archive/manifest.json"
pack "$work/archive" >"$archive.new"
mv "$archive.new" "$archive"
