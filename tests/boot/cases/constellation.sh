#!/bin/busybox sh
# Makes the state disk of a member as Constellation makes it: cryptsetup formats it with Constellation's parameters. /etc/passphrase
# is the key that the cluster derives for the disk /etc/uuid, and /etc/salt the measurement salt of the cluster in base64.
disk=/dev/disk/by-id/virtio-state
check() { what=$1; shift; if out=$("$@" 2>&1); then echo "PASS $what"; else echo "FAIL $what: $out"; fi; }

check "cryptsetup formats the disk" cryptsetup luksFormat --batch-mode --type luks2 --uuid "$(cat /etc/uuid)" \
  --cipher aes-xts-plain64 --key-size 512 --integrity hmac-sha256 --integrity-no-wipe --sector-size 4096 \
  --pbkdf argon2id --pbkdf-memory 65536 --pbkdf-parallel 4 --pbkdf-force-iterations 4 $disk /etc/passphrase
echo '{"type":"constellation-state-disk","keyslots":[],"diskIsInitialized":true}' >/tmp/token
check "it is marked as initialized" cryptsetup token import --token-id 0 --json-file /tmp/token $disk
check "cryptsetup opens it" cryptsetup open --key-file /etc/passphrase $disk state
# Constellation writes zeros to the whole disk: a sector that was never written cannot be read
dd if=/dev/zero of=/dev/mapper/state bs=1M oflag=direct 2>/dev/null
/sbin/mke2fs -q -t ext4 /dev/mapper/state
check "it is mounted" mount -t ext4 /dev/mapper/state /mnt
mkdir /mnt/constellation /mnt/firstlight
echo "{\"Role\":\"ControlPlane\",\"MeasurementSalt\":\"$(cat /etc/salt)\"}" >/mnt/constellation/node_state.json
echo "of Constellation" >/mnt/file
# without Kubernetes: a complete node has this file or a kubelet
: >/mnt/firstlight/complete
umount /mnt
cryptsetup close state
