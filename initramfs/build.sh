#!/usr/bin/env bash
# Makes the small initramfs for the boot tests and the demo: busybox, mke2fs, the kernel's modules, our programs.
#
#   initramfs/build.sh OUT [PROGRAM...]      the programs go to /usr/bin; a second run gives the same bytes
#
# It is an uncompressed cpio; its length is a multiple of 512, so that another cpio can be appended.
. "$(dirname "$0")/../tools/lib.sh"

out=${1:?where to}; shift
here=$ROOT/initramfs
kernel=$("$ROOT/tools/kernel.sh")
version=$(ls "$kernel/lib/modules")
tree=$(mktemp -d); trap 'rm -rf "$tree"' EXIT

mkdir -p "$tree"/{bin,dev,etc,lib/modules,mnt,proc,root,run,sbin,sys,tmp,usr/bin}

# busybox's shell finds its own applets without links; only a program that is executed by path needs a link
install -m 755 "$(command -v busybox)" "$tree/bin/busybox"
ln -s busybox "$tree/bin/sh"
install -m 755 "$here/init" "$tree/init"
install -m 755 "$here/os-init" "$here/udhcpc.script" "$tree/etc/"
printf '127.0.0.1 localhost\n::1 localhost\n' >"$tree/etc/hosts"
: >"$tree/etc/resolv.conf"

# mke2fs with its libraries and its configuration; it is called by its path /sbin/mke2fs, since busybox has an applet of that name
install -m 755 "$(PATH=$PATH:/usr/sbin:/sbin command -v mke2fs)" "$tree/sbin/mke2fs"
[ ! -e /etc/mke2fs.conf ] || install -m 644 /etc/mke2fs.conf "$tree/etc/"
for library in $(ldd "$tree/sbin/mke2fs" | grep -o '/[^ ]*'); do install -D -m 755 "$library" "$tree$library"; done

declare -A packed
while read -r module flag; do
  while read -r insmod file _; do
    name=$(basename "${file%.xz}")
    if [ "$insmod" != insmod ] || [ -n "${packed[$name]:-}" ]; then continue; fi
    packed[$name]=yes
    case $file in *.xz) xz -dc "$file" ;; *) cat "$file" ;; esac >"$tree/lib/modules/$name"
    echo "$name $flag" >>"$tree/lib/modules/load-order"
  done < <(modprobe -d "$kernel" -S "$version" --show-depends "$module")
done < <(grep -v '^#' "$here/modules")

for program in "$@"; do install -m 755 "$program" "$tree/usr/bin/"; done

find "$tree" -exec touch -h -d @0 {} +
mkdir -p "$(dirname "$out")"
(cd "$tree" && find . -mindepth 1 | LC_ALL=C sort | cpio --quiet -o -H newc --reproducible -R 0:0 --block-size=1) >"$out.$$"
mv "$out.$$" "$out"
