#!/usr/bin/env bash
# Makes an initrd with Firstlight as an image builder does: by a Debian's own dracut or initramfs-tools.
#
#   tools/initrd.sh SYSTEM SUITE OUT UNLOCK [KERNEL]     UNLOCK: the program, the package firstlight-initramfs, or "-" for an initrd
#                                                         without Firstlight
#
# SYSTEM is dracut, initramfs-tools, or dracut of one more kind: dracut-measuring with the units of systemd that measure the phases
# of the boot, dracut-network-manager with NetworkManager on a system without systemd-networkd, such as a Fedora. Does nothing if
# OUT is newer than all of its inputs. SUITE is a suite of tools/debian.sh. The variable SETTINGS has lines for the image's
# node.conf. AUTHORITIES is a file with the certificates that the image trusts; without the file, the image trusts none. KERNEL is a
# suite of tools/kernel.sh, whose kernel the initrd is for. The default is Debian 12's kernel for a suite of Debian, and Ubuntu's
# own for Ubuntu.
. "$(dirname "$0")/lib.sh"

system=${1:?dracut, dracut-measuring, dracut-network-manager or initramfs-tools} suite=${2:?bookworm or trixie} out=${3:?where to} unlock=${4:?the program unlock}
case $system in
dracut-*) kind=${system#dracut-} ;;
*) kind= ;;
esac
debian=$("$ROOT/tools/debian.sh" "$suite" $kind)
case $suite in
noble) kernel=noble ;;
*) kernel=${5:-bookworm} ;;
esac
kernel=$("$ROOT/tools/kernel.sh" "$kernel")
inputs=("$ROOT/initramfs" "$0" "$debian/done" "$kernel/done")
[ "$unlock" = - ] || inputs+=("$unlock")
if [ -e "$out" ] && [ -z "$(find "${inputs[@]}" -newer "$out" -print -quit)" ]; then exit; fi
version=$(ls "$kernel/lib/modules")
work=$(mktemp -d -p "$CACHE"); trap 'rm -rf "$work"' EXIT
root=$work/root

root_with_kernel "$debian" "$kernel" "$root"
case $unlock in
-) ;;
*.deb) install_package "$root" "$unlock" ;;
*) "$ROOT/initramfs/install.sh" "$unlock" "$root" ;;
esac
if [ -n "${SETTINGS:-}" ]; then printf '%s\n' "$SETTINGS" >"$root/etc/firstlight/node.conf"; fi
if [ -n "${AUTHORITIES:-}" ]; then install -D -m 644 "$AUTHORITIES" "$root/etc/ssl/certs/ca-certificates.crt"; fi
[ "$kind" != network-manager ] || rm "$root/usr/lib/systemd/systemd-networkd"

case $system in
dracut*)
  omitted="$NOT_IN_CLOUDS crypt"
  arguments=(--force --no-hostonly --no-hostonly-cmdline --reproducible --no-early-microcode --kver "$version" --compress "zstd -3")
  # systemd measures only if the EFI variables of systemd-stub exist
  if [ "$kind" = measuring ]; then
    modules=("$root"/usr/lib/dracut/modules.d/*systemd-pcr{phase,extend}) # dracut 106 has the first, 112 the second
    for module in "${modules[@]}"; do [ ! -d "$module" ] || name=${module##*/??}; done
    arguments+=(--add "$name tpm2-tss" --add-drivers efivarfs)
  else
    omitted+=" tpm2-tss"
  fi
  arguments+=(--omit "$omitted")
  command=(dracut "${arguments[@]}" /boot/initrd)
  ;;
initramfs-tools)
  command=(sh -c 'sed "s/^COMPRESS=.*/COMPRESS=zstd/" -i.old /etc/initramfs-tools/initramfs.conf; exec mkinitramfs -o /boot/initrd "$1"' sh "$version")
  ;;
*) die "unknown system $system: dracut, dracut-measuring, dracut-network-manager or initramfs-tools" ;;
esac
say "making an initrd with $system of $suite"
SOURCE_DATE_EPOCH=$(source_date)
export SOURCE_DATE_EPOCH
chroot_into "$root" "${command[@]}" >&2
mkdir -p "$(dirname "$out")"
# another cpio can be appended after a multiple of 4 bytes
cp "$root/boot/initrd" "$out.$$"
truncate -s %512 "$out.$$"
mv "$out.$$" "$out"
