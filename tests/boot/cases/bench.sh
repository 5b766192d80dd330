#!/bin/busybox sh
# Times of benches/unlock.rs. A line a comparison: PASS WHAT: ours MS,MS,… KIB theirs MS,MS,… KIB
T=/tmp/bench
FLAGS="--perf-no_read_workqueue --perf-no_write_workqueue"
RUNS="1 2 3 4 5"
OURS=/dev/disk/by-id/virtio-ours THEIRS=/dev/disk/by-id/virtio-theirs NEW=/dev/disk/by-id/virtio-new
mkdir -p $T
head -c 32 /dev/urandom >$T/pass

must() { "$@" >$T/out 2>&1 || { echo "FAIL $*: $(tail -n 3 $T/out | tr '\n' ' ')"; exit 1; }; }
# side COMMAND...: its times, and the peak of its resident memory. busybox 1.35 takes ru_maxrss, KiB, for pages of 4 KiB
side() {
  times=
  for _ in $RUNS; do
    time=$(unlock time "$@" 2>$T/out) || { echo "FAIL $*: $(cat $T/out)" >&2; exit 1; }
    times=$times,$time
    unlock close || exit 1
  done
  busybox time -v "$@" >$T/out 2>$T/time || { echo "FAIL $*: $(cat $T/time)" >&2; exit 1; }
  unlock close || exit 1
  echo "${times#,} $(($(grep 'Maximum resident' $T/time | grep -o '[0-9]*$') / 4))"
}
# compare WHAT OUR-COMMAND THEIR-COMMAND
compare() {
  ours=$(side $2) && theirs=$(side $3) || exit 1
  echo "PASS $1: ours $ours theirs $theirs"
}

cat >$T/first-boot <<END
#!/bin/busybox sh
# the first boot of Constellation: the whole disk is written, then mke2fs
set -e
cryptsetup luksFormat -q --type luks2 --cipher aes-xts-plain64 --key-size 512 --integrity hmac-sha256 --sector-size 4096 \
  --pbkdf argon2id --pbkdf-memory 65536 --pbkdf-force-iterations 4 --pbkdf-parallel 1 $NEW $T/pass
cryptsetup open $FLAGS --key-file $T/pass $NEW state
/sbin/mke2fs -q -F -t ext4 -b 4096 /dev/mapper/state
END
chmod +x $T/first-boot

# one by us, one with the parameters of Constellation's disks; each was mapped once
must unlock new $OURS $T/pass
must unlock close
must cryptsetup luksFormat -q --type luks2 --cipher aes-xts-plain64 --key-size 512 --integrity hmac-sha256 --integrity-no-wipe \
  --sector-size 4096 --pbkdf argon2id --pbkdf-memory 65536 --pbkdf-force-iterations 4 --pbkdf-parallel 1 $THEIRS $T/pass
must cryptsetup open $FLAGS --key-file $T/pass $THEIRS state
must cryptsetup close state

# where the time goes; an empty program for the start of a process
unlock open $OURS $T/pass >/dev/null && unlock close
for _ in 1 2 3; do
  echo "PASS parts of opening our disk: $(unlock open $OURS $T/pass); a process that does nothing: $(unlock time unlock nothing) ms"
  unlock close
done

compare "open a disk that firstlight formatted" "unlock open $OURS $T/pass" "cryptsetup open $FLAGS --key-file $T/pass $OURS state"
compare "open a disk of Constellation (argon2id, 64 MiB, 4 passes)" "unlock open $THEIRS $T/pass" \
  "cryptsetup open $FLAGS --key-file $T/pass $THEIRS state"
RUNS="1 2 3"
compare "first boot on 64 MiB (format, map, ext4)" "unlock new $NEW $T/pass" $T/first-boot
