#!/bin/busybox sh
# The cost of a mapped disk (benches/unlock/throughput.rs), with each option of dm-crypt and dm-integrity. A line a mapping:
# PASS MAPPING: numbers, or PASS MAPPING: why the kernel does not accept it
T=/tmp/bench
BOTH="--perf-no_read_workqueue --perf-no_write_workqueue"
DISK=/dev/loop0
mkdir -p $T/mnt $T/memory
head -c 32 /dev/urandom >$T/pass
head -c 96 /dev/zero >$T/key

insmod /lib/modules/loop.ko
mount -t tmpfs none $T/memory
truncate -s 64M $T/memory/disk
losetup $DISK $T/memory/disk || { echo "FAIL no loop device"; exit 1; }
must() { "$@" >$T/out 2>&1 || { echo "FAIL $*: $(tail -n 3 $T/out | tr '\n' ' ')"; exit 1; }; }
# measure MAPPING DEVICE
measure() {
  raw=$(unlock raw $2) || { echo "FAIL $1: raw"; exit 1; }
  # with a journal of its own: the part of the disk behind the span was never written
  must unlock mkfs $2
  must mount -t ext4 $2 $T/mnt
  log=$(unlock log $T/mnt/log loop0) || { echo "FAIL $1: log"; exit 1; }
  must umount $T/mnt
  echo "PASS $1: $raw $log"
}
format() { must cryptsetup luksFormat -q --type luks2 --cipher aes-xts-plain64 "$@" --pbkdf argon2id --pbkdf-memory 32 \
  --pbkdf-force-iterations 4 --pbkdf-parallel 1 $DISK $T/pass; }
integrity() { format --key-size 512 --integrity hmac-sha256 --integrity-no-wipe --sector-size ${1:-4096}; }
# with MAPPING OPTIONS...: by cryptsetup
with() {
  name=$1; shift
  must cryptsetup open "$@" --key-file $T/pass $DISK state
  measure "$name" /dev/mapper/state
  must cryptsetup close state
}
# table MAPPING SED: our table of dm-integrity with a change; dm-crypt over it with a key of zeros
table() {
  must cryptsetup open $BOTH --key-file $T/pass $DISK state
  lower=$(dmsetup table state_dif); upper=$(dmsetup table state)
  must cryptsetup close state
  dmsetup create state_dif --table "$(echo "$lower" | sed "$2")" 2>$T/out || { echo "PASS $1: $(dmesg | tail -n 1)"; return; }
  number=$(dmsetup info -c --noheadings -o major,minor state_dif)
  upper=$(echo "$upper" | sed "s/ [^ ]* 0 [0-9]*:[0-9]* / $(od -An -v -tx1 $T/key | tr -d ' \n') 0 $number /")
  must dmsetup create state --table "$upper"
  must dmsetup mknodes
  measure "$1" /dev/mapper/state
  must dmsetup remove state
  must dmsetup remove state_dif
}

measure "the disk itself" $DISK
format --key-size 512 --sector-size 4096
with "dm-crypt without integrity" $BOTH
# unlock formats no disk of another program
must dd if=/dev/zero of=$DISK bs=1M count=64 conv=fsync
must unlock new $DISK $T/pass; must unlock close
must unlock open $DISK $T/pass
measure "**firstlight**" /dev/mapper/state
must unlock close
integrity
with "cryptsetup, no_read_workqueue and no_write_workqueue" $BOTH
with "cryptsetup's default, with work queues"
with "no_read_workqueue" --perf-no_read_workqueue
with "no_write_workqueue" --perf-no_write_workqueue
with "work queues, same_cpu_crypt" --perf-same_cpu_crypt
with "work queues, submit_from_crypt_cpus" --perf-submit_from_crypt_cpus
with "ours, dm-integrity without a journal" $BOTH --integrity-no-journal
table "ours, dm-integrity with a bitmap" 's/ J / B /'
table "ours, buffer_sectors:8" 's/buffer_sectors:[0-9]*/buffer_sectors:8/'
integrity 512
with "ours, sectors of 512 bytes" $BOTH
