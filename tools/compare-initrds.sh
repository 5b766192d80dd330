#!/usr/bin/env bash
# Compares what unlocks a disk by its share of an initrd: Firstlight, clevis with tang, systemd's token for a TPM. All initrds are made
# in one run, by the same dracut, of the same Debian and for the same kernel, and prints a table for docs/benchmarks.md.
#
#   tools/compare-initrds.sh UNLOCK      UNLOCK: the program
. "$(dirname "$0")/lib.sh"

unlock=${1:?the program unlock}
debian=$("$ROOT/tools/debian.sh" bookworm others)
kernel=$("$ROOT/tools/kernel.sh")
version=$(ls "$kernel/lib/modules")
work=$(mktemp -d -p "$CACHE"); trap 'rm -rf "$work"' EXIT
root=$work/root

root_with_kernel "$debian" "$kernel" "$root"
"$ROOT/initramfs/install.sh" "$unlock" "$root"

# what a machine in a cloud does not need, as in tools/initrd.sh
OMITTED="network-legacy network-manager connman ifcfg cifs nbd fcoe fcoe-uefi plymouth rngd kernel-modules-extra hwdb lunmask virtfs virtiofs resume lvm mdraid btrfs multipath nfs iscsi nvmf"

# Prints the bytes of an initrd with these modules, without those; the last lines of dracut if it fails.
size() {
  local added=$1 omitted=$2
  chroot_into "$root" dracut --force --no-hostonly --no-hostonly-cmdline --reproducible --no-early-microcode --kver "$version" \
    --compress "zstd -9" --add "$added" --omit "$OMITTED $omitted" /boot/initrd >"$work/log" 2>&1 || { tail -3 "$work/log" >&2; exit 1; }
  stat -c %s "$root/boot/initrd"
}

# Prints a row: what, its bytes, and what it adds to `from` beside what Firstlight adds to `network`.
row() {
  awk -v what="$1" -v size="$2" -v from="$3" -v ours="$((firstlight - network))" 'BEGIN {
    printf "| %s | %.2f MB |", what, size / 1e6
    if (size == from) print " | |"; else printf " +%.2f MB | %.1fx |\n", (size - from) / 1e6, (size - from) / ours }'
}

say "making five initrds, about half a minute each"
bare=$(size systemd-initrd "systemd-networkd network crypt dm clevis tpm2-tss firstlight")
network=$(size "systemd-initrd systemd-networkd" "crypt dm clevis tpm2-tss firstlight")
firstlight=$(size firstlight "crypt dm clevis tpm2-tss")
clevis=$(size "systemd-networkd clevis clevis-pin-tang" "clevis-pin-tpm2 tpm2-tss firstlight")
token=$(size "systemd-initrd crypt tpm2-tss" "systemd-networkd network clevis firstlight")

echo "| initrd of dracut | size | share of what unlocks | ratio |"
echo "|---|---:|---:|---:|"
row "without network" "$bare" "$bare"
row "with systemd-networkd" "$network" "$network"
row "… and Firstlight" "$firstlight" "$network"
row "… and clevis with tang" "$clevis" "$network"
row "without network, with systemd-cryptsetup and its TPM2 token" "$token" "$bare"
