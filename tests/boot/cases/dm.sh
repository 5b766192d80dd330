#!/bin/sh
# The disk mapping and the first file system against the real kernel and the real cryptsetup. Runs as root in a test guest (busybox
# sh) that has: blank sparse disks of 1, 8 and 64 GiB with any names, the kernel modules of dm-crypt, dm-integrity and ext4,
# dm_guest (src/disk/examples/dm_guest.rs), and real cryptsetup, dmsetup, mke2fs, e2fsck, blkid in PATH or /sbin. A line a case:
# PASS name, or FAIL name: why. TIME lines are measurements.

FAILED=0
T=/tmp/dm-case
mkdir -p $T/mnt
UUID=6e3dd92b-087f-4aea-9f25-403a3d282404
FLAGS="--perf-no_read_workqueue --perf-no_write_workqueue"
MKE2FS=/sbin/mke2fs
E2FSCK=/sbin/e2fsck
BLKID=/sbin/blkid

pass() { echo "PASS $1"; }
fail() { echo "FAIL $1: $2"; FAILED=1; }
# verdict NAME WHY-IF-NOT COMMAND...: the command decides
verdict() { n=$1; w=$2; shift 2; if "$@" >$T/out 2>&1; then pass "$n"; else fail "$n" "$w; $(tail -n 3 $T/out | tr '\n' ' ')"; fi; }
# must COMMAND...: preparation; its failure fails the whole script
must() { "$@" >$T/out 2>&1 || { fail "preparation" "$*: $(tail -n 3 $T/out | tr '\n' ' ')"; exit 1; }; }
not() { ! "$@"; }
# disk GIB: the disk of that size
disk() { for s in /sys/block/[svx]*/size; do [ "$(cat $s)" = $(($1 * 2097152)) ] && { n=${s#/sys/block/}; echo /dev/${n%/size}; return; }; done; }
aead_errors() { dmesg | grep -c 'AEAD ERROR'; }
forget_log() { dmesg -c >/dev/null; }
pattern() { dd if=/dev/urandom of=$1 bs=1M count=$2 2>/dev/null; }
sum() { sha256sum <"$1"; }
table() { dmsetup table --showkeys "$1"; }
drop() { sync; echo 3 >/proc/sys/vm/drop_caches; }

format() { # format DISK: a LUKS2 header with our volume key, made by cryptsetup
  cryptsetup luksFormat -q --type luks2 --cipher aes-xts-plain64 --key-size 512 --integrity hmac-sha256 --integrity-no-wipe \
    --sector-size 4096 --pbkdf argon2id --pbkdf-force-iterations 4 --pbkdf-memory 32 --pbkdf-parallel 1 \
    --volume-key-file $T/vk --uuid $UUID "$1" $T/pass
}
ours() { dm_guest open state $UUID "$1" ${3:-$T/vk} integrity $2; }
theirs() { cryptsetup open $FLAGS --key-file $T/pass "$1" state; }

D1=$(disk 1) D8=$(disk 8) D64=$(disk 64)
for d in "$D1" "$D8" "$D64"; do [ -b "$d" ] || { fail preparation "no disk of 1, 8 or 64 GiB"; exit 1; }; done
dd if=/dev/urandom of=$T/vk bs=96 count=1 2>/dev/null
dd if=/dev/urandom of=$T/wrong bs=96 count=1 2>/dev/null
dd if=/dev/urandom of=$T/vk64 bs=64 count=1 2>/dev/null
printf 'passphrase' >$T/pass

# ---- the same tables, superblock and UUIDs as cryptsetup's
must format $D1
dd if=$D1 of=$T/sb.theirs bs=4096 skip=4096 count=1 2>/dev/null
must theirs $D1
tables() { table state; table state_dif | sed "s/ integrity [0-9]*:[0-9]* / integrity DISK /"; }
tables >$T/table.theirs
uuids() { dmsetup info -c --noheadings -o name,uuid | sed 's/CRYPT-INTEGRITY-/CRYPT-SUBDEV-/' | grep -v ^state_disk: | sort; }
uuids >$T/uuid.theirs
cryptsetup status state >$T/status.theirs
must cryptsetup close state

verdict create "a mapping with a new superblock" ours $D1 create
grep '^/dev/mapper/state ' $T/out | sed 's/^/TIME map 1 GiB first: /'
tables >$T/table.ours
uuids >$T/uuid.ours
cryptsetup status state >$T/status.ours
verdict same-tables "$(cat $T/table.ours | tr '\n' '|')" cmp $T/table.theirs $T/table.ours
verdict same-uuids "$(cat $T/uuid.ours | tr '\n' '|')" cmp $T/uuid.theirs $T/uuid.ours
verdict same-status "$(cat $T/status.ours | tr '\n' '|')" cmp $T/status.theirs $T/status.ours
verdict key-not-in-table "a key of type logon" grep -q ' :96:logon:cryptsetup:' $T/table.ours
verdict key-gone-from-keyring "nothing of cryptsetup in /proc/keys" not grep cryptsetup: /proc/keys
dd if=$D1 of=$T/sb.ours bs=4096 skip=4096 count=1 2>/dev/null iflag=direct
verdict same-superblock "byte for byte" cmp $T/sb.theirs $T/sb.ours
verdict node "a block device" [ -b /dev/mapper/state ]
verdict is-active "active" dm_guest is-active state

# ---- an active name is refused, and nothing happens to it
ours $D1 create >$T/refused 2>&1 && fail active-name-refused "opened twice" || {
  verdict active-name-refused "$(cat $T/refused)" grep -q 'already active' $T/refused
}
verdict active-mapping-untouched "$(dmsetup table)" [ "$(dmsetup ls | wc -l)" = 3 ]
# the same disk under another name: its superblock is in use
dm_guest open other $UUID $D1 $T/vk integrity create >$T/refused 2>&1 && fail busy-disk-refused "mapped twice" || {
  verdict busy-disk-refused "$(cat $T/refused)" grep -q 'busy' $T/refused
}
verdict refusal-leaves-nothing "$(dmsetup ls)" [ "$(dmsetup ls | wc -l)" = 3 ]

# ---- either reads what the other wrote
pattern $T/data 8
must dd if=$T/data of=/dev/mapper/state bs=1M seek=100 oflag=direct conv=fsync
verdict cryptsetup-closes-ours "cryptsetup close" cryptsetup close state
verdict cryptsetup-closed-both "$(dmsetup ls)" [ "$(dmsetup ls | grep -c state)" = 0 ]
must theirs $D1
must dd if=/dev/mapper/state of=$T/read bs=1M skip=100 count=8 iflag=direct
verdict cryptsetup-reads-ours "the same bytes" cmp $T/data $T/read
pattern $T/data 8
must dd if=$T/data of=/dev/mapper/state bs=1M seek=300 oflag=direct conv=fsync
verdict we-close-cryptsetups "dm_guest close" dm_guest close state
verdict close-removes-both "$(dmsetup ls)" [ "$(dmsetup ls | grep -c state)" = 0 ]
verdict close-removes-nodes "$(ls /dev/mapper)" [ "$(ls /dev/mapper)" = control ]
verdict second-close-says-so "not active" sh -c 'dm_guest close state 2>&1 | grep -q "is not active"'
verdict is-not-active "not active" not dm_guest is-active state
verdict existing "open again" ours $D1 existing
must dd if=/dev/mapper/state of=$T/read bs=1M skip=300 count=8 iflag=direct
verdict we-read-cryptsetups "the same bytes" cmp $T/data $T/read
must dm_guest close state

# ---- a wrong volume key maps (only the header can tell) and reads nothing
forget_log
must ours $D1 existing $T/wrong
verdict wrong-key-reads-nothing "a read with the wrong key" not dd if=/dev/mapper/state of=/dev/null bs=1M skip=300 count=1 iflag=direct
verdict wrong-key-is-in-the-log "no AEAD error" [ "$(aead_errors)" -gt 0 ]
must dm_guest close state

# ---- a superblock from an earlier life is refused where it must fit, and replaced at a first use
must dd if=/dev/urandom of=$D1 bs=4096 seek=4096 count=1 conv=fsync
ours $D1 existing >$T/refused 2>&1 && fail foreign-superblock-refused "mapped" || {
  verdict foreign-superblock-refused "$(cat $T/refused)" grep -q 'expected 0x' $T/refused
}
verdict foreign-superblock-replaced "a new superblock" ours $D1 create
must dm_guest close state

# ---- one byte of the superblock with which no format writes it: refused before the kernel obeys it. The flag 4 crashes Linux 6.1 and
# 6.12 in dm_integrity_resume, or has them throw the journal away
# put OCTAL-BYTE OFFSET: writes a byte of the superblock
put() { printf "\\$1" | dd of=$D1 bs=1 seek=$(((16 << 20) + $2)) conv=notrunc,fsync 2>/dev/null; }
for byte in '014 24' '012 24' '050 24' '005 8' '015 29' '001 32'; do
  put $byte
  ours $D1 existing >$T/refused 2>&1 && { fail "byte-$byte-refused" mapped; dm_guest close state; } || {
    verdict "byte-$byte-refused" "$(cat $T/refused)" grep -q "its byte ${byte#* } is 0x.*, expected 0x" $T/refused
  }
  for right in '010 24' '004 8' '014 29' '000 32'; do put $right; done
done
verdict right-superblock-opens "open" ours $D1 existing
must dd if=$T/data of=/dev/mapper/state bs=1M seek=500 oflag=direct conv=fsync
# the same while it is in use: the kernel reads the superblock again when the device is resumed, and gets the copy in memory
must dd if=$D1 of=$T/sb bs=4096 skip=4096 count=1 iflag=direct
refused=
for at in $(seq 0 40); do
  for byte in 001 014 377; do
    put $byte $at
    dmsetup suspend state_dif && dmsetup resume state_dif || refused="$refused $at:$byte"
  done
  must dd if=$T/sb of=$D1 bs=4096 seek=4096 count=1 oflag=direct conv=notrunc
done
verdict changes-later-are-not-seen "the kernel refused $refused" [ -z "$refused" ]
drop
must dd if=/dev/mapper/state of=$T/read bs=1M skip=500 count=8 iflag=direct
verdict changes-later-have-no-effect "the same bytes" cmp $T/data $T/read
must dm_guest close state

# ---- failures undo themselves
must dd if=/dev/zero of=$D1 bs=4096 seek=4096 count=1 conv=fsync
ours $D1 existing >$T/refused 2>&1 && fail zero-superblock-refused "mapped" || {
  verdict zero-superblock-refused "$(cat $T/refused)" grep -q 'only zeros' $T/refused
}
dm_guest open state $UUID $D1 $T/pass integrity create >$T/refused 2>&1 && fail short-key-refused "mapped" || {
  verdict short-key-refused "$(cat $T/refused)" grep -q 'the volume key has 10 bytes, expected 96' $T/refused
}
verdict failure-leaves-nothing "$(dmsetup ls)" [ "$(dmsetup ls | grep -c state)" = 0 ]

# ---- 1 002 changed superblocks on disks of three sizes: the kernel stays whole, and no other data is read
forget_log
changed() { # changed DISK
  must ours $1 create
  must dm_guest close state
  verdict "changed-superblocks-$1" "other data, or no end" dm_guest change-superblocks state $UUID $1 $T/vk 334
  sed "s|^|TIME changed superblocks of $1: |" $T/out | tail -n 1
}
changed $D1
changed $D8
must dmsetup create small --table "0 100352 linear $D1 0"
must dmsetup mknodes small
changed /dev/mapper/small
must dmsetup remove small
verdict changed-superblocks-no-oops "$(dmesg | grep -E 'BUG|Oops|WARNING' | head -3 | tr '\n' ' ')" not sh -c "dmesg | grep -qE 'BUG|Oops|WARNING'"

# ---- a killed process left only the integrity device: it is refused, and can be closed
must ours $D1 create
must dmsetup remove state
ours $D1 existing >$T/refused 2>&1 && fail leftover-refused "mapped" || {
  verdict leftover-refused "$(cat $T/refused)" grep -q 'state_dif is already active' $T/refused
}
verdict leftover-closes "$(dmsetup ls)" dm_guest close state
verdict leftover-is-gone "$(dmsetup ls)" [ "$(dmsetup ls | grep -c state)" = 0 ]

# ---- a mapping that is in use stays
must ours $D1 create
exec 3</dev/mapper/state
dm_guest close state >$T/refused 2>&1 && fail busy-not-closed "closed while open" || {
  verdict busy-not-closed "$(cat $T/refused)" grep -q 'still in use' $T/refused
}
exec 3<&-
verdict busy-closes-later "close" dm_guest close state

# ---- a kernel that takes no key from its keyring (simulated: no room for a key)
keys=$(cat /proc/sys/kernel/keys/root_maxkeys)
echo 1 >/proc/sys/kernel/keys/root_maxkeys
ours $D1 create >$T/warned 2>&1 || fail without-keyring "$(cat $T/warned)"
echo $keys >/proc/sys/kernel/keys/root_maxkeys
verdict without-keyring-maps "$(table state)" sh -c 'dmsetup table --showkeys state | grep -q " $(od -An -v -tx1 '$T/vk' | tr -d " \n") 0 "'
verdict without-keyring-warns-once "$(cat $T/warned)" [ "$(grep -c WARN $T/warned)" = 1 ]
must dm_guest close state

# ---- without integrity
must cryptsetup luksFormat -q --type luks2 --cipher aes-xts-plain64 --key-size 512 --sector-size 4096 --pbkdf argon2id \
  --pbkdf-force-iterations 4 --pbkdf-memory 32 --pbkdf-parallel 1 --volume-key-file $T/vk64 --uuid $UUID $D1 $T/pass
must theirs $D1
must dd if=$T/data of=/dev/mapper/state bs=1M oflag=direct conv=fsync
table state >$T/table.theirs
must cryptsetup close state
must dm_guest open state $UUID $D1 $T/vk64 plain existing
table state >$T/table.ours
verdict plain-same-table "$(cat $T/table.ours)" cmp $T/table.theirs $T/table.ours
must dd if=/dev/mapper/state of=$T/read bs=1M count=8 iflag=direct
verdict plain-reads-cryptsetups "the same bytes" cmp $T/data $T/read
verdict plain-closes "close" dm_guest close state

# ---- the first file system, on the smallest state disk (49 MiB) and on 1, 8 and 64 GiB
files() { for i in $(seq 400); do mkdir $1/d$i && echo "content $i" >$1/d$i/f || return 1; done; cp $T/big $1/big; sync; }
must dmsetup create small --table "0 100352 linear $D1 0"
must dmsetup mknodes small
for d in /dev/mapper/small $D1 $D8 $D64; do
  g=$(($(blockdev --getsize64 $d) / 1073741824))
  big=64; [ $d = /dev/mapper/small ] && big=8
  pattern $T/big $big
  must format $d
  forget_log
  start=$(cut -d' ' -f1 /proc/uptime)
  must ours $d create; m=$(grep -o '\[.*\]' $T/out)
  must dm_guest mkfs /dev/mapper/state $MKE2FS; f=$(grep -o '\[.*\]' $T/out)
  must dm_guest mount /dev/mapper/state $T/mnt rw; o=$(grep -o '\[.*\]' $T/out)
  took=$(awk "BEGIN{print $(cut -d' ' -f1 /proc/uptime)-$start}")
  echo "TIME $g GiB: map $m file system $f mount $o all $took s"
  # a program that writes the whole disk needs minutes
  case $g in
  1) took1=$took ;;
  64) verdict fs-64-takes-no-longer "$took s, $took1 s on 1 GiB" awk "BEGIN{exit !($took < 2 * $took1 + 5)}" ;;
  esac
  # without the page cache's read-ahead, the log shows what a program itself reads
  ahead=$(blockdev --getra /dev/mapper/state)
  must blockdev --setra 0 /dev/mapper/state
  verdict fs-$g-blkid-when-new "ext4 is found" sh -c "$BLKID -p /dev/mapper/state | grep -q 'TYPE=\"ext4\"'"
  must blockdev --setra $ahead /dev/mapper/state
  verdict fs-$g-files "400 files and a big one" files $T/mnt
  drop
  verdict fs-$g-read-back "the same bytes" cmp $T/big $T/mnt/big
  verdict fs-$g-all-files "400 files" [ "$(cat $T/mnt/d*/f | grep -c content)" = 400 ]
  must dm_guest unmount $T/mnt
  must dm_guest close state
  must ours $d existing
  must dm_guest mount /dev/mapper/state $T/mnt ro
  verdict fs-$g-after-remap "the same bytes" cmp $T/big $T/mnt/big
  must dm_guest unmount $T/mnt
  must blockdev --setra 0 /dev/mapper/state
  verdict fs-$g-e2fsck "clean" $E2FSCK -f -n /dev/mapper/state
  verdict fs-$g-blkid "ext4 is found" sh -c "$BLKID -p /dev/mapper/state | grep -q 'TYPE=\"ext4\"'"
  verdict fs-$g-no-error-in-log "$(dmesg | grep -E 'AEAD ERROR|EXT4-fs error|I/O error' | head -3 | tr '\n' ' ')" \
    not sh -c "dmesg | grep -E 'AEAD ERROR|EXT4-fs error|I/O error'"
  must dm_guest close state
  [ $g -gt 0 ] || must dmsetup remove small
done

# ---- power fails while the file system is in use: its journal is replayed, over blocks that only mkfs wrote
must format $D1
must ours $D1 create
must dm_guest mkfs /dev/mapper/state $MKE2FS
must dm_guest mount /dev/mapper/state $T/mnt rw
for i in $(seq 50); do mkdir $T/mnt/d$i; done; sync
must dmsetup wipe_table --noflush --nolockfs state
umount $T/mnt 2>/dev/null
must dm_guest close state
forget_log
must ours $D1 existing
verdict replay-mounts "$(dmesg | tail -n 3 | tr '\n' ' ')" dm_guest mount /dev/mapper/state $T/mnt rw
verdict replay-happened "$(dmesg | tail -n 3 | tr '\n' ' ')" sh -c "dmesg | grep -q 'recovery complete'"
verdict replay-no-error-in-log "$(dmesg | grep -E 'AEAD|EXT4-fs error' | head -3 | tr '\n' ' ')" [ "$(aead_errors)" = 0 ]
verdict replay-keeps-synced "50 directories" [ "$(ls -d $T/mnt/d* | wc -l)" = 50 ]
must dm_guest unmount $T/mnt

# ---- errors of the child process
dm_guest mkfs /dev/mapper/state /sbin/no-such-mke2fs >$T/refused 2>&1
verdict mke2fs-missing "$(cat $T/refused)" grep -q 'no-such-mke2fs could not be started' $T/refused
printf '#!/bin/sh\necho "no space" >&2\nexit 3\n' >$T/mke2fs; chmod +x $T/mke2fs
dm_guest mkfs /dev/mapper/state $T/mke2fs >$T/refused 2>&1
verdict mke2fs-fails "$(cat $T/refused)" test "$(grep -c -e 'failed with exit code 3' -e '^no space$' $T/refused)" = 2
printf '#!/bin/sh\nexit 0\n' >$T/mke2fs
dm_guest mkfs /dev/mapper/state $T/mke2fs >$T/refused 2>&1
verdict mke2fs-does-nothing "$(cat $T/refused)" grep -q 'not an ext4 file system' $T/refused
must dm_guest close state
exit $FAILED
