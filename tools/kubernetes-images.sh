#!/usr/bin/env bash
# Makes the container images that kubeadm asks for out of the programs of tools/kubernetes.sh, with no registry and no
# container tool: each is a `docker save` archive of one layer, which `ctr images import` and every other runtime reads.
#
#   tools/kubernetes-images.sh DEBIAN     DEBIAN: a root file system with nft and iptables, for kube-proxy's image
#
# Prints the folder of the archives, which has a file `names` with their names.
. "$(dirname "$0")/lib.sh"
[ -d "${1:-}/usr" ] || die "usage: tools/kubernetes-images.sh DEBIAN-ROOT"
debian=$1
kubernetes=$("$ROOT/tools/kubernetes.sh")
version=v${kubernetes##*-v}

recipe=$(cat "$0" <(cd "$kubernetes/bin" && stat -c '%n %s %Y' ./*) | sha256sum | cut -c1-12)
images=$kubernetes/images-$recipe
if [ -e "$images/names" ]; then echo "$images"; exit; fi
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
rm -rf "$kubernetes"/images-*; mkdir -p "$images"

# A program of the Debian tree and the libraries that it needs, at the same places of an image's tree.
with_libraries() {
  local tree=$1 path program=$2
  for path in $(readlink -f "$debian$program" | sed "s|^$debian||") \
    $(chroot "$debian" ldd "$program" | grep -o '/[^ ]*' | sort -u); do
    mkdir -p "$tree/$(dirname "$path")"
    cp -L "$debian$path" "$tree/$path"
  done
  [ -e "$tree$program" ] || cp -P "$debian$program" "$tree$program"
}

#   image NAME ENTRYPOINT: from the tree in $work/tree, which is used up
image() {
  local name=$1 entrypoint=$2 archive
  archive=$images/$(basename "${name%:*}").tar
  mkdir -p "$work/archive"
  tar c --sort=name --mtime=@1 --owner=0 --group=0 --numeric-owner -C "$work/tree" . >"$work/archive/layer.tar"
  printf '{"architecture":"amd64","os":"linux","config":{"Entrypoint":["%s"],"WorkingDir":"/","Env":["PATH=%s"]},"rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' \
    "$entrypoint" /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    "$(sha256sum <"$work/archive/layer.tar" | cut -d' ' -f1)" >"$work/archive/config.json"
  printf '[{"Config":"config.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$name" >"$work/archive/manifest.json"
  tar c --sort=name --mtime=@1 --owner=0 --group=0 --numeric-owner -C "$work/archive" . >"$archive"
  rm -rf "$work/archive" "$work/tree"
  echo "$name" >>"$images/names.new"
}

names=$("$kubernetes/bin/kubeadm" config images list --kubernetes-version "$version")
say "making the images of $(wc -w <<<"$names") programs"
for name in $names; do
  program=$(basename "${name%:*}")
  mkdir -p "$work/tree/usr/local/bin" "$work/tree/etc" "$work/tree/tmp"; chmod 1777 "$work/tree/tmp"
  case $program in
  # where the released images have theirs
  coredns | pause) entrypoint=/$program; rmdir "$work/tree/usr/local/bin" ;;
  *) entrypoint=/usr/local/bin/$program ;;
  esac
  cp "$kubernetes/bin/$program" "$work/tree$entrypoint"
  if [ "$program" = kube-proxy ]; then
    for link in bin sbin lib lib64; do mkdir -p "$work/tree/usr/$link"; ln -s "usr/$link" "$work/tree/$link"; done
    for tool in iptables ip6tables iptables-save ip6tables-save iptables-restore ip6tables-restore; do
      with_libraries "$work/tree" /usr/sbin/xtables-nft-multi
      ln -sf xtables-nft-multi "$work/tree/usr/sbin/$tool"
    done
    with_libraries "$work/tree" /usr/sbin/nft
    mkdir -p "$work/tree/usr/lib/x86_64-linux-gnu"
    cp -r "$debian/usr/lib/x86_64-linux-gnu/xtables" "$work/tree/usr/lib/x86_64-linux-gnu/"
  fi
  image "$name" "$entrypoint"
done
mv "$images/names.new" "$images/names"
echo "$images"
