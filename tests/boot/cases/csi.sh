#!/bin/busybox sh
# A node whose CSI driver opens an encrypted volume with the key of the key service on the host. /etc/csi has the driver's token, the key
# service's certificate, and the name of the node. On the first node the volume is new; on the second one it is first attached to the
# other node, and the test attaches it here when it reads WAITING.
device=/dev/disk/by-id/virtio-volume path=/mnt/staging volume=volumes/one
check() { what=$1; shift; if out=$("$@" 2>&1); then echo "PASS $what"; else echo "FAIL $what: $out"; fi; }
not() { ! "$@"; }
says() { text=$1; shift; "$@" 2>&1 | grep "$text"; }
stage() { csi_driver stage /run/csi.sock $volume $device $path; }
unstage() { csi_driver unstage /run/csi.sock $volume $path; }

csi_driver serve /run/csi.sock 10.42.0.1:9443 csi.test /etc/csi &
while ! [ -S /run/csi.sock ]; do sleep 1; done

case $(cat /etc/csi/node) in
node-a)
  check "the driver formats a new volume" stage
  check "it is mounted" grep -q " $path ext4 " /proc/mounts
  check "a second call changes nothing" stage
  echo "written on node-a" >$path/file
  check "it is encrypted" says 'cipher: *aes-xts-plain64' sh -c 'cryptsetup status $(ls /dev/mapper | grep csi-)'
  check "the driver closes it" unstage
  check "it is closed" not sh -c 'ls /dev/mapper | grep csi-'
  check "the driver opens it again" stage
  check "the file is there" grep -q "written on node-a" $path/file
  unstage
  ;;
node-b)
  check "another node gets no key" says "is not attached to the node node-b" stage
  check "nothing is open" not sh -c 'ls /dev/mapper | grep csi-'
  echo "WAITING"
  for _ in $(seq 60); do if stage; then break; fi; sleep 2; done
  check "the file comes back" grep -q "written on node-a" $path/file
  check "the driver closes it" unstage
  # The host presents other data.
  dd if=/dev/zero of=$device bs=1M count=17 conv=notrunc 2>/dev/null
  echo "of the host" | dd of=$device conv=notrunc 2>/dev/null
  check "other data are not formatted" says "it is not formatted" stage
  ;;
esac
