#!/bin/busybox sh
# The state disk and the real cryptsetup, in both directions: cryptsetup reads what `unlock` formats; `unlock` opens, by a
# ticket of the join service, what cryptsetup formats with the parameters of Constellation.
# /etc/passphrase is the key that the cluster derives for the disk /etc/uuid.
disk=/dev/disk/by-id/virtio-state
check() { what=$1; shift; if out=$("$@" 2>&1); then echo "PASS $what"; else echo "FAIL $what: $out"; fi; }
says() { text=$1; shift; "$@" 2>&1 | grep "$text"; }

check "a blank disk is formatted" unlock
echo "from firstlight" >/run/state/file
umount /run/state
check "cryptsetup knows our mapping" says 'integrity: *hmac(sha256)' cryptsetup status state
check "cryptsetup closes it" cryptsetup close state
check "cryptsetup reads our header" says 'constellation-state-disk' cryptsetup luksDump $disk
check "cryptsetup finds nothing to repair" says 'No known problems detected' cryptsetup repair --batch-mode --verbose $disk
check "cryptsetup opens our disk" cryptsetup open --key-file /run/cryptsetup-keys.d/state.key $disk state
check "the file system is sound" e2fsck -f -n /dev/mapper/state
mount -t ext4 /dev/mapper/state /mnt
check "the file is there" grep -q "from firstlight" /mnt/file
umount /mnt
cryptsetup close state

check "cryptsetup formats the disk" cryptsetup luksFormat --batch-mode --type luks2 --uuid "$(cat /etc/uuid)" \
  --cipher aes-xts-plain64 --key-size 512 --integrity hmac-sha256 --sector-size 4096 \
  --pbkdf argon2id --pbkdf-memory 65536 --pbkdf-parallel 4 --pbkdf-force-iterations 4 $disk /etc/passphrase
echo '{"type":"constellation-state-disk","keyslots":[],"diskIsInitialized":true}' >/tmp/token
check "it is marked as initialized" cryptsetup token import --token-id 0 --json-file /tmp/token $disk
check "cryptsetup opens it" cryptsetup open --key-file /etc/passphrase $disk state
/sbin/mke2fs -q -t ext4 /dev/mapper/state
mount -t ext4 /dev/mapper/state /mnt
mkdir /mnt/constellation /mnt/kubernetes
echo '{"Role":"ControlPlane","MeasurementSalt":"AwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwM="}' >/mnt/constellation/node_state.json
echo "of Constellation" >/mnt/kubernetes/kubelet.conf
umount /mnt
cryptsetup close state

check "we open it by a ticket" unlock
check "its file is there" grep -q "of Constellation" /run/state/kubernetes/kubelet.conf
check "its cluster is measured" grep -qv '^0*$' /sys/class/tpm/tpm0/pcr-sha256/15
check "its header says from now on of which cluster it is" says "1: firstlight-cluster" cryptsetup luksDump $disk
check "nothing was mounted before PCR 15 was set" test "$(dmesg | grep -c "EXT4-fs (dm-.*): mounted")" = 4
check "the header is as cryptsetup likes it" says 'No known problems detected' cryptsetup repair --batch-mode --verbose $disk
