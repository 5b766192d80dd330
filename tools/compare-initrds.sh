#!/usr/bin/env bash
# Compares how many bytes Firstlight, clevis with tang, and systemd-cryptsetup with its TPM token add to an initrd. Makes all
# initrds in one run, by the same dracut, of the same Debian and for the same kernel, and prints a table for docs/benchmarks.md.
# Fails if Firstlight adds more than 1.1 MB.
#
#   tools/compare-initrds.sh UNLOCK [FOLDER]      UNLOCK: the program
#
# FOLDER gets the files for `cargo bench --bench unlockers`: the initrds firstlight, clevis and token; the disks clevis.disk and
# token.disk, which the key in the file `key` opens; and the program `tangd`, a tang server on its standard input and output.
. "$(dirname "$0")/lib.sh"

unlock=${1:?the program unlock} folder=${2:-}
debian=$("$ROOT/tools/debian.sh" bookworm others)
kernel=$("$ROOT/tools/kernel.sh")
version=$(ls "$kernel/lib/modules")
work=$(mktemp -d -p "$CACHE"); trap 'rm -rf "$work"' EXIT
root=$work/root

root_with_kernel "$debian" "$kernel" "$root"
"$ROOT/initramfs/install.sh" "$unlock" "$root"

# Makes the initrd `name` with some modules and without others, and prints its size. If dracut fails, prints its last lines.
size() {
  local name=$1 added=$2 omitted=$3
  chroot_into "$root" dracut --force --no-hostonly --no-hostonly-cmdline --reproducible --no-early-microcode --kver "$version" \
    --compress "zstd -9" --add "$added" --omit "$NOT_IN_CLOUDS $OTHER_NETWORKS $omitted" /boot/initrd >"$work/log" 2>&1 ||
    { tail -3 "$work/log" >&2; exit 1; }
  stat -c %s "$root/boot/initrd"
  # another cpio can be appended after a multiple of 4 bytes
  if [ -n "$folder" ]; then cp "$root/boot/initrd" "$folder/$name"; truncate -s %512 "$folder/$name"; fi
}

# Prints a row: the name, the bytes, the bytes that it adds to `from`, and the ratio to the bytes that Firstlight adds to `network`.
row() {
  awk -v what="$1" -v size="$2" -v from="$3" -v ours="$((firstlight - network))" 'BEGIN {
    printf "| %s | %.2f MB |", what, size / 1e6
    if (size == from) print " | |"; else printf " +%.2f MB | %.1fx |\n", (size - from) / 1e6, (size - from) / ours }'
}

# Makes the disks, and binds the disk of clevis to the tang server that the machine reaches at $TANG.
disks() {
  local disk programs=$debian/root body
  mkdir -p "$folder/tang"
  chroot_into "$root" sh -c 'mkdir /tmp/tang && /usr/libexec/tangd-keygen /tmp/tang && tar c -C /tmp/tang .' | tar x -C "$folder/tang"
  cat >"$folder/tangd" <<TANGD
#!/bin/sh
exec $programs/lib64/ld-linux-x86-64.so.2 --library-path $programs/usr/lib/x86_64-linux-gnu $programs/usr/libexec/tangd $folder/tang
TANGD
  chmod 755 "$folder/tangd"
  body=$(printf 'GET /adv HTTP/1.1\r\nHost: tang\r\nConnection: close\r\n\r\n' | "$folder/tangd" | tail -n 1)
  head -c 32 /dev/urandom | base64 -w 0 >"$folder/key"
  printf '%s' "$body" >"$root/boot/advertisement"
  cp "$folder/key" "$root/boot/key"
  for disk in clevis token; do
    truncate -s 64M "$root/boot/$disk"
    # the minimum of iterations, as clevis itself uses: its key is random
    chroot_into "$root" cryptsetup luksFormat --batch-mode --type luks2 --uuid "$UUID" --pbkdf pbkdf2 --pbkdf-force-iterations 1000 \
      --key-file /boot/key "/boot/$disk"
  done
  # clevis lets a program generate a password, which needs a dictionary that this Debian lacks
  mkdir -p "$root/etc/security"; rm -f "$root/etc/security/pwquality.conf"; echo 'dictcheck = 0' >"$root/etc/security/pwquality.conf"
  chroot_into "$root" clevis luks bind -y -k /boot/key -d /boot/clevis tang "{\"url\":\"$TANG\",\"adv\":\"/boot/advertisement\"}" >&2
  for disk in clevis token; do mv "$root/boot/$disk" "$folder/$disk.disk"; done
}

# the same values as in benches/unlockers.rs
TANG=http://10.42.0.1:7500
UUID=5ec1e7a0-0000-4000-8000-000000000001
OTHER_NETWORKS="network-legacy network-manager connman ifcfg cifs nbd fcoe fcoe-uefi"
if [ -n "$folder" ]; then mkdir -p "$folder"; folder=$(cd "$folder" && pwd); disks; fi

say "making five initrds, about half a minute each"
bare=$(size bare systemd-initrd "systemd-networkd network crypt dm clevis tpm2-tss firstlight")
network=$(size network "systemd-initrd systemd-networkd" "crypt dm clevis tpm2-tss firstlight")
firstlight=$(size firstlight firstlight "crypt dm clevis tpm2-tss")
clevis=$(size clevis "systemd-networkd clevis clevis-pin-tang" "clevis-pin-tpm2 tpm2-tss firstlight")
token=$(size token "systemd-initrd crypt tpm2-tss" "systemd-networkd network clevis firstlight")

echo "| initrd of dracut | size | share of what unlocks | ratio |"
echo "|---|---:|---:|---:|"
row "without network" "$bare" "$bare"
row "with systemd-networkd" "$network" "$network"
row "… and Firstlight" "$firstlight" "$network"
row "… and clevis with tang" "$clevis" "$network"
row "without network, with systemd-cryptsetup and its TPM2 token" "$token" "$bare"
[ $((firstlight - network)) -le 1100000 ] || die "Firstlight adds $((firstlight - network)) bytes to an initrd, more than 1.1 MB"
