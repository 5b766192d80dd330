#!/bin/busybox sh
# A machine without Kubernetes: it makes a volume with a key of the key broker at 10.42.0.1, and systemd-cryptsetup opens it as
# /etc/crypttab says. At the next boot the volume is there, and opens by attestation. /etc/broker is the broker's ID; with /etc/clone,
# the machine is another one with a copy of the disk.
disk=/dev/disk/by-id/virtio-data
check() { what=$1; shift; if out=$("$@" 2>&1); then echo "PASS $what"; else echo "FAIL $what: $out"; fi; }
says() { text=$1; shift; "$@" 2>&1 | grep "$text"; }
# what the drop-in of the unit does, and then the unit
attach() {
  firstlight-volume copy-header --name=data 2>>/tmp/copy
  # a host can show systemd-cryptsetup another header
  [ ! -e /tmp/swapped ] || dd if=/tmp/swapped of=$disk conv=notrunc,fsync 2>/dev/null
  /lib/systemd/systemd-cryptsetup attach data $disk /run/firstlight/volume $options,headless,tries=1
}
options=luks,_netdev,nofail,header=/run/firstlight/headers/data
refused() { ! attach; }

if ! cryptsetup isLuks $disk; then
  check "a volume is made" firstlight-volume enroll --name data --device $disk --broker 10.42.0.1 --cluster-id "$(cat /etc/broker)" --format
  check "the header has the token" says "firstlight-volume" cryptsetup luksDump $disk
  blank=1
else
  # this initramfs keeps no settings
  mkdir -p /etc/firstlight/volumes
  { echo "uuid=$(cryptsetup luksUUID $disk)"; echo broker=10.42.0.1; echo "cluster-id=$(cat /etc/broker)"; } >/etc/firstlight/volumes/data
fi
# without udev there is no link by the UUID
{ echo "device=$disk"; echo timeout=30; } >>/etc/firstlight/volumes/data
echo "data $disk /run/firstlight/volume $options" >/etc/crypttab
# what the units do: a program for each connection
mkdir -p /run/firstlight
systemd-socket-activate --accept --inetd --listen=/run/firstlight/volume firstlight-volume serve >/tmp/serve 2>&1 &
for _ in 1 2 3 4 5 6 7 8 9 10; do [ -S /run/firstlight/volume ] || sleep 1; done
if [ -e /etc/clone ]; then
  check "another machine does not open the copy" refused
  check "it says why" grep "this disk belongs to another machine" /tmp/serve
  check "nothing is mapped" test ! -e /dev/mapper/data
  exit 0
fi
check "systemd-cryptsetup opens the volume by attestation" attach
check "the mapping is dm-crypt" says "aes-xts" cryptsetup status data
if [ -n "$blank" ]; then
  check "the volume gets a file system" /sbin/mke2fs -q -t ext4 /dev/mapper/data
  check "it can be mounted" mount -t ext4 /dev/mapper/data /mnt
  echo "of the first boot" >/mnt/file
else
  check "the volume is mounted" mount -t ext4 /dev/mapper/data /mnt
  check "its file is there" grep -q "of the first boot" /mnt/file
fi
umount /mnt
check "it is closed" /lib/systemd/systemd-cryptsetup detach data
if [ -z "$blank" ]; then
  # a host can write any header
  dd if=$disk of=/tmp/good bs=1M count=16 2>/dev/null
  printf x | cryptsetup luksFormat --batch-mode --type luks2 --uuid "$(cryptsetup luksUUID $disk)" --cipher cipher_null-ecb \
    --pbkdf pbkdf2 --pbkdf-force-iterations 1000 --key-file - $disk
  dd if=$disk of=/tmp/swapped bs=1M count=16 2>/dev/null
  dd if=/tmp/good of=$disk conv=notrunc,fsync 2>/dev/null
  check "the volume opens although the host swaps the header after the check" attach
  check "it is the same volume" mount -t ext4 /dev/mapper/data /mnt
  check "its file is still there" grep -q "of the first boot" /mnt/file
  umount /mnt
  check "it is closed again" /lib/systemd/systemd-cryptsetup detach data
  check "systemd-cryptsetup gets no key for the header of the host" refused
  check "it says why not" grep "segment 0 is encrypted with" /tmp/copy
  sed 's/^/copy: /' /tmp/copy
fi
[ "$(wc -l </tmp/serve)" -gt 0 ] && sed 's/^/serve: /' /tmp/serve
sync
