#!/bin/busybox sh
# The basis of the boot tests: a machine with a TPM, a disk by its serial number, and a network in which the host answers.
check() { what=$1; shift; if out=$("$@" 2>&1); then echo "PASS $what"; else echo "FAIL $what: $out"; fi; }

check "the TPM's resource manager is there" test -c /dev/tpmrm0
check "the firmware wrote an event log" test "$(wc -c </sys/kernel/security/tpm0/binary_bios_measurements)" -gt 100
check "the firmware measured itself" grep -qv '^0*$' /sys/class/tpm/tpm0/pcr-sha256/0
check "the state disk has its name" test "$(blockdev --getsize64 /dev/disk/by-id/virtio-state)" = 67108864
check "mke2fs runs" /sbin/mke2fs -q -t ext4 /dev/disk/by-id/virtio-state
check "the disk can be mounted" mount -t ext4 /dev/disk/by-id/virtio-state /mnt
check "localhost is known" grep -q localhost /etc/hosts
check "the address is the one that the tests count on" sh -c 'ip addr show eth0 | grep -q "inet 10.42.0.15/"'
check "every module was loaded" test "$(wc -l </proc/modules)" -ge "$(grep -c ' $' /lib/modules/load-order)"
check "the metadata service answers at its address" sh -c 'wget -q -O - http://10.42.0.1:8080/self | grep -q control-plane-0'
for i in 1 2 3 4; do wget -q -O - http://10.42.0.1:8080/peers | md5sum; done >/tmp/a &
for i in 1 2 3 4; do wget -q -O - http://10.42.0.1:8080/peers | md5sum; done >/tmp/b
wait
check "many connections to the host at once are well" test "$(sort -u /tmp/a /tmp/b | wc -l) $(cat /tmp/a /tmp/b | wc -l)" = "1 8"
for i in 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do echo "PCR $i $(cat /sys/class/tpm/tpm0/pcr-sha256/$i)"; done
