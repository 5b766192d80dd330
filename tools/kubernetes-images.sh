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

recipe=$(cat "$0" "$ROOT"/tools/{etcd-tools,image,lib}.sh <(cd "$kubernetes/bin" && stat -c '%n %s %Y' ./*) | sha256sum | cut -c1-12)
images=$kubernetes/images-$recipe
if [ -e "$images/names" ]; then echo "$images"; exit; fi
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
rm -rf "$kubernetes"/images-*; mkdir -p "$images"

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
  # the released image has etcdctl, too, and not etcdutl (cluster/images/etcd/Makefile of Kubernetes v1.34 and v1.35)
  [ "$program" != etcd ] || cp "$("$ROOT/tools/etcd-tools.sh")/etcdctl" "$work/tree/usr/local/bin/"
  if [ "$program" = kube-proxy ]; then
    with_netfilter "$debian" "$work/tree"
  fi
  "$ROOT/tools/image.sh" "$images/$program.tar" "$name" "$entrypoint" "$work/tree"
  rm -rf "$work/tree"
  echo "$name" >>"$images/names.new"
done
mv "$images/names.new" "$images/names"
echo "$images"
