#!/bin/busybox sh
# `unlock` that is stopped or killed, and then called again in the same boot; and a disk on which Constellation
# was interrupted.
DISK=/dev/disk/by-id/virtio-state
T=/tmp/unlock
mkdir -p $T

# this mke2fs is slow enough to be interrupted
printf '#!/bin/sh\nsleep 1\nexec /sbin/mke2fs "$@"\n' >$T/mke2fs
chmod +x $T/mke2fs

is_mounted() { grep -q '^/dev/mapper/state /run/state ' /proc/mounts && echo content >/run/state/file; }
blank() {
  umount /run/state 2>/dev/null
  dm_guest close state >/dev/null 2>&1
  dd if=/dev/zero of=$DISK bs=1M conv=fsync 2>/dev/null
}
# ends_mounted WHAT: a complete run of unlock
ends_mounted() {
  if unlock >$T/second 2>&1 && is_mounted; then echo "PASS $1$(sed -n 's/.* closed:.*/, which closed the old mapping/p' $T/second)"; else echo "FAIL $1: $(cat $T/second)"; fi
}
# interrupt SIGNAL EVENT EXIT-CODES: sends it when the console has the event
interrupt() {
  what="SIG$1 after \"$2\""
  unlock --mke2fs $T/mke2fs >$T/first 2>&1 &
  pid=$!
  while ! grep -q " $2" $T/first && kill -0 $pid; do usleep 2000; done 2>/dev/null
  kill -$1 $pid
  wait $pid
  code=$?
  case " $3 " in
  *" $code "*) echo "PASS $what: exit code $code" ;;
  *) echo "FAIL $what: exit code $code: $(cat $T/first)" ;;
  esac
}

for event in start: disk: formatted: mapped: file-system:; do
  for signal in TERM KILL; do
    blank
    # a signal after the last check, or after the end, comes too late: then the disk is mounted
    case $signal in TERM) codes="143 0" ;; KILL) codes="137 0" ;; esac
    interrupt $signal $event "$codes"
    case $signal-$code in
    TERM-143)
      if [ ! -e /dev/mapper/state ]; then echo "PASS $what: nothing stays mapped"; else echo "FAIL $what: mapped"; fi
      ends_mounted "$what, then unlock" ;;
    *-0) if is_mounted; then echo "PASS $what: too late"; else echo "FAIL $what: exit code 0, not mounted"; fi ;;
    *) is_mounted || ends_mounted "$what, then unlock" ;;
    esac
  done
done

# ---- a disk that nobody can write is refused by that name
blank
blockdev --setro $DISK
if unlock >$T/ro 2>&1; then echo "FAIL read-only disk: it ended well"
elif grep -q 'the disk is read-only' $T/ro; then echo "PASS a read-only disk is refused by that name"
else echo "FAIL read-only disk: $(cat $T/ro)"; fi
blockdev --setrw $DISK

# ---- unlock again while the disk is in use: it gives an error, and the disk does not change
blank
ends_mounted "first boot"
sync
dd if=$DISK of=$T/before bs=1M count=16 iflag=direct 2>/dev/null
if unlock >$T/third 2>&1; then echo "FAIL unlock of a mounted disk: it ended well"
elif ! grep -q 'still in use' $T/third; then echo "FAIL unlock of a mounted disk: $(cat $T/third)"
elif dd if=$DISK bs=1M count=16 iflag=direct 2>/dev/null | cmp - $T/before && is_mounted; then
  echo "PASS unlock of a mounted disk is refused, and changes nothing"
else echo "FAIL unlock of a mounted disk: its header changed"; fi

# ---- a format of Constellation that was interrupted
echo key >$T/key
# old_format OPTIONS: as Constellation formats
old_format() {
  umount /run/state 2>/dev/null
  blank
  cryptsetup luksFormat -q --type luks2 --cipher aes-xts-plain64 --key-size 512 --integrity hmac-sha256 "$@" \
    --sector-size 4096 --pbkdf argon2id --pbkdf-force-iterations 4 --pbkdf-memory 32 --pbkdf-parallel 1 $DISK $T/key &&
    return
  echo "FAIL preparation: cryptsetup luksFormat $*"
}
# write OPTIONS MIB: zeros through cryptsetup's mapping
write() {
  cryptsetup open $1 --key-file $T/key $DISK volume && dd if=/dev/zero of=/dev/mapper/volume bs=1M count=$2 conv=fsync 2>/dev/null &&
    cryptsetup close volume && return
  echo "FAIL preparation: writing with $1"
}
# starts_over WHAT WORDS: unlock formats the disk, and says these words
starts_over() {
  unlock >$T/second 2>&1
  code=$?
  if [ $code = 0 ] && is_mounted && grep -q "$2: formatting" $T/second; then echo "PASS $1 is formatted"
  else echo "FAIL $1: $code: $(cat $T/second)"; fi
}
# refused WHAT WORDS: unlock leaves the disk alone, and says these words
refused() {
  sum=$(dd if=$DISK bs=1M iflag=direct 2>/dev/null | md5sum)
  if unlock >$T/second 2>&1; then echo "FAIL $1: it ended well"
  elif ! grep -q "$2" $T/second; then echo "FAIL $1: $(cat $T/second)"
  elif [ "$sum" = "$(dd if=$DISK bs=1M iflag=direct 2>/dev/null | md5sum)" ]; then echo "PASS $1 is refused, and stays as it is"
  else echo "FAIL $1: it changed"; fi
}

old_format --integrity-no-wipe
cryptsetup luksErase -q $DISK || echo "FAIL preparation: luksErase"
starts_over "a header without keyslot and token" 'without a keyslot'

old_format --integrity-no-wipe
starts_over "a format that was cut off before its wipe" 'no data was written since'

old_format --integrity-no-wipe
write --integrity-no-journal 8
starts_over "a format that was cut off in its wipe" 'no data was written since'

# a volume of the storage driver whose wipe was interrupted, but which is in use
old_format --integrity-no-wipe
write --integrity-no-journal 8
write "" 1
refused "a volume that was written to" 'journal was written to'

old_format
refused "a format whose wipe was complete" 'the end of the disk was written to'
sed -n "s/.* mark it as new: //p" $T/second | head -n 1 >$T/command
sh $T/command || echo "FAIL the command: $(cat $T/command)"
starts_over "a disk that was marked by the command in the error" 'never part of a cluster'
umount /run/state
exit 0
