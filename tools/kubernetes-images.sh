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

recipe=$(cat "$0" "$ROOT/tools/image.sh" <(cd "$kubernetes/bin" && stat -c '%n %s %Y' ./*) | sha256sum | cut -c1-12)
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
    # its extensions, and what those need in turn: without libm there are no rules as soon as a Service has two endpoints
    for extension in "$debian"/usr/lib/x86_64-linux-gnu/xtables/*.so; do
      with_libraries "$work/tree" "${extension#"$debian"}"
    done
  fi
  "$ROOT/tools/image.sh" "$images/$program.tar" "$name" "$entrypoint" "$work/tree"
  rm -rf "$work/tree"
  echo "$name" >>"$images/names.new"
done
mv "$images/names.new" "$images/names"
echo "$images"
