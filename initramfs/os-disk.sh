#!/usr/bin/env bash
# Makes the root disk of the image tests: an ext4 file system with busybox, our programs, and os-init as its /sbin/init.
#
#   initramfs/os-disk.sh OUT [PROGRAM...]      the programs go to /usr/bin
. "$(dirname "$0")/../tools/lib.sh"

out=${1:?where to}; shift
here=$ROOT/initramfs
tree=$(mktemp -d); trap 'rm -rf "$tree"' EXIT

mkdir -p "$tree"/{bin,sbin,dev,etc/firstlight,lib,proc,root,run,sys,tmp,usr/bin}
install -m 755 "$(command -v busybox)" "$tree/bin/busybox"
ln -s busybox "$tree/bin/sh"
install -m 755 "$here/os-init" "$tree/sbin/init"
printf '127.0.0.1 localhost\n::1 localhost\n' >"$tree/etc/hosts"
: >"$tree/etc/resolv.conf"
printf '%s\n' csp=qemu variant=qemu-vtpm >"$tree/etc/firstlight/node.conf"
# systemd switches only to a root file system that has this file
echo 'ID=firstlight-test' >"$tree/etc/os-release"
for program in "$@"; do install -m 755 "$program" "$tree/usr/bin/"; done

mkdir -p "$(dirname "$out")"
truncate -s 32M "$out.$$"
PATH=$PATH:/usr/sbin:/sbin mke2fs -q -t ext4 -O ^has_journal -E root_owner=0:0 -L root -d "$tree" "$out.$$"
mv "$out.$$" "$out"
