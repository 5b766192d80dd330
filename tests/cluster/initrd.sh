#!/usr/bin/env bash
# The initramfs of a node in QEMU: finds the disk /dev/vda, mounts it, starts the systemd on it.
#
#   tests/cluster/initrd.sh KERNEL OUT      KERNEL: what tools/kernel.sh prints
set -euo pipefail
kernel=$1 out=$2
version=$(ls "$kernel/lib/modules")
tree=$(mktemp -d); trap 'rm -rf "$tree"' EXIT
mkdir "$tree"/{bin,dev,proc,sys,root,modules}
cp "$(command -v busybox)" "$tree/bin/busybox"
for module in virtio_pci virtio_blk ext4 crc32c_generic; do
  modprobe -d "$kernel" -S "$version" --show-depends "$module" 2>/dev/null | awk '$1=="insmod"{print $2}'
done | awk '!seen[$0]++' | while read -r file; do
  cp "$file" "$tree/modules/"
  echo "insmod /modules/$(basename "$file")" >>"$tree/load"
done
cat >"$tree/init" <<'X'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
. /load
until [ -b /dev/vda ]; do sleep 0.1; done
mount -t ext4 /dev/vda /root
mount --move /dev /root/dev; umount /proc /sys
exec switch_root /root /sbin/init
X
chmod +x "$tree/init"
(cd "$tree" && find . | LC_ALL=C sort | cpio --quiet -o -H newc -R 0:0) | gzip -1n >"$out"
