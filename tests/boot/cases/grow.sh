#!/bin/sh
# A disk whose size changes, against the real dm-integrity. Runs as root in a test guest (busybox sh) that has: a blank disk of 1 GiB,
# the kernel modules of dm-crypt, dm-integrity and ext4, dm_guest (src/disk/examples/dm_guest.rs), dmsetup and mke2fs. A line a case:
# PASS name, or FAIL name: why.

FAILED=0
T=/tmp/grow-case
mkdir -p $T/mnt
UUID=6e3dd92b-087f-4aea-9f25-403a3d282404
DISK=/dev/mapper/small

# verdict NAME WHY-IF-NOT COMMAND...: the command decides
verdict() { n=$1; w=$2; shift 2; if "$@" >$T/out 2>&1; then echo "PASS $n"; else echo "FAIL $n: $w; $(tail -n 3 $T/out | tr '\n' ' ')"; FAILED=1; fi; }
# must COMMAND...: preparation; its failure fails the whole script
must() { "$@" >$T/out 2>&1 || { echo "FAIL preparation: $*: $(tail -n 3 $T/out | tr '\n' ' ')"; exit 1; }; }
ours() { dm_guest open state $UUID $DISK $T/vk integrity $1; }
# sized SECTORS: the disk has this size from here on
sized() { dmsetup remove small 2>/dev/null; dmsetup create small --table "0 $1 linear $D 0" && dmsetup mknodes small; }
size() { blockdev --getsize64 /dev/mapper/state | awk '{ print $1 / 512 }'; }
# the last but one word of the status is what the kernel provides (Documentation/admin-guide/device-mapper/dm-integrity.rst)
provides() { dmsetup status state_dif | awk '{ print $(NF - 1) }'; }
in_superblock() { dd if=$DISK bs=4096 skip=4096 count=1 iflag=direct 2>/dev/null | od -An -t u8 -j 16 -N 8 | tr -d ' '; }

D=$(readlink -f /dev/disk/by-id/virtio-disk1)
dd if=/dev/urandom of=$T/vk bs=96 count=1 2>/dev/null
must sized 131072
must ours create
must dm_guest mkfs /dev/mapper/state /sbin/mke2fs
first=$(size)
verdict first "$first sectors, the kernel provides $(provides)" [ "$first" = "$(provides)" ]
must dm_guest close state

for sectors in 131080 500000 1572864 2097144; do
  must sized $sectors
  verdict grown-$sectors-opens "open" ours existing
  verdict grown-$sectors-at-once "$(size) sectors, the kernel provides $(provides)" [ "$(size)" = "$(provides)" ]
  must dm_guest close state
done
verdict superblock-is-not-written "$(in_superblock), first $first" [ "$(in_superblock)" = "$first" ]

must sized 131072
verdict shown-larger-opens "open" ours existing
verdict shown-larger-has-its-size "$(size) sectors, first $first" [ "$(size)" = "$first" ]
verdict shown-larger-superblock "$(in_superblock), first $first" [ "$(in_superblock)" = "$first" ]
must dm_guest close state

printf '\1\0\0\0\1' | dd of=$DISK bs=1 seek=$(((16 << 20) + 16)) conv=notrunc 2>/dev/null
sync
verdict forged-size-is-there "$(in_superblock)" [ "$(in_superblock)" -gt $((10 * first)) ]
verdict forged-size-opens "open" ours existing
verdict forged-size-has-no-effect "$(size) sectors, first $first" [ "$(size)" = "$first" ]
verdict forged-size-mounts "mount" dm_guest mount /dev/mapper/state $T/mnt rw
must dm_guest unmount $T/mnt
must dm_guest close state
exit $FAILED
