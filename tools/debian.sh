#!/usr/bin/env bash
# Unpacks a small Debian in which dracut and initramfs-tools run, and prints its folder.
#
#   tools/debian.sh [bookworm|trixie|sid|noble|resolute] [measuring|others|network-manager]
#
# noble is Ubuntu 24.04, resolute 26.04.
#
# With `measuring` it has the libraries of tpm2-tss, with which systemd measures into the TPM. sid and resolute work only with
# `measuring`. sid is fetched once: for a newer sid, delete the folder. On some days sid's packages cannot be installed together;
# then the script says so. With `others` it has the programs with which Firstlight is compared: clevis with tang, and systemd's TPM tokens. With
# `network-manager` it has NetworkManager.
#
# The packages come through apt, so Debian's signature on the archive is checked; they are unpacked and not installed, which
# takes seconds and needs no root. The folder is kept in the cache until the recipe changes.
. "$(dirname "$0")/lib.sh"

suite=${1:-bookworm} kind=${2:-}
PACKAGES=(
  base-files base-passwd bash coreutils dash debianutils dmsetup e2fsprogs findutils grep gzip kmod libc-bin login mawk mount passwd
  procps sed util-linux zstd
  # programs that make an initrd
  dracut-core dracut-network initramfs-tools-core
  # programs in an initrd of dracut
  dbus dbus-daemon iproute2 systemd systemd-sysv udev
  # programs in an initrd of initramfs-tools
  busybox klibc-utils
)
case $suite in
bookworm) ;;
# networkd and DHCP for initramfs-tools are packages of their own since Debian 13
trixie) PACKAGES+=(dhcpcd-base) ;;
sid | resolute) ;;
noble) PACKAGES+=(dhcpcd-base diffutils) ;;
*) die "unknown suite $suite: bookworm, trixie, sid, noble or resolute" ;;
esac
name=debian-$suite
case $suite-$kind in
resolute-measuring) PACKAGES+=(tpm2-tools libtss2-tcti-device0t64 libcrypt1 libkmod2 libpam0g libseccomp2) name=ubuntu-measuring-$suite ;;
sid-measuring) PACKAGES+=(tpm2-tools systemd-tpm libcrypt1 libkmod2 libpam0g libseccomp2) name=debian-measuring-$suite ;;
*-measuring) PACKAGES+=(tpm2-tools) name=debian-measuring-$suite ;;
bookworm-others) PACKAGES+=(clevis-dracut clevis-luks cryptsetup-bin tang tpm2-tools libtss2-tcti-device0) name=debian-others-$suite ;;
*-network-manager) PACKAGES+=(network-manager) name=debian-network-manager-$suite ;;
bookworm- | trixie-) ;;
noble-) name=ubuntu-$suite ;;
*) die "unknown kind of $suite: ${kind:-none}" ;;
esac

recipe=$(printf '%s ' "$suite" "${PACKAGES[@]}" "$(sed -n '/^unpack/,/^}/p' "$0")" | sha256sum | cut -c1-12)
prefix=$CACHE/$name-$recipe
if [ -e "$prefix/done" ]; then echo "$prefix"; exit; fi

# Unpacks the packages in $1 into the root file system $2, and does for it what their installation would do.
unpack() {
  local archives=$1 root=$2 deb dir
  mkdir -p "$root"
  for dir in bin sbin lib lib64; do mkdir -p "$root/usr/$dir"; ln -s "usr/$dir" "$root/$dir"; done
  for deb in "$archives"/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar x -C "$root" --keep-directory-symlink --no-same-owner \
      --exclude='./usr/share/doc/*' --exclude='./usr/share/man/*' --exclude='./usr/share/locale/*'
  done
  ln -s mawk "$root/usr/bin/awk"
  cp "$root/usr/share/base-passwd/passwd.master" "$root/etc/passwd"
  cp "$root/usr/share/base-passwd/group.master" "$root/etc/group"
  : >"$root/etc/fstab"
  chroot_into "$root" sh -c 'ldconfig; systemd-sysusers 2>/dev/null; : >/etc/machine-id'
}

work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/archives/partial
: >"$work/status"
case $suite in
noble | resolute) source=$(ubuntu_source "$suite" "$work") ;;
*) source="deb $(mirror) $suite main" ;;
esac
say "fetching a small system of $suite, about 50 MB"
private_apt "$source" -- update >&2
# the list of installed packages is empty, so apt fetches all dependencies
private_apt "$source" -- -o Dir::State::status="$work/status" -o Dir::Cache::archives="$work/archives/" \
  --no-install-recommends --download-only --yes install "${PACKAGES[@]}" >&2 || case $suite in
sid) die "apt cannot install today's Debian sid, for the reason above: packages of sid do not always fit together. Try another day" ;;
*) die "apt cannot fetch the packages, for the reason above" ;;
esac
rm -rf "$prefix.$$"; mkdir -p "$prefix.$$"
unpack "$work/archives" "$prefix.$$/root"
(cd "$work/archives" && sha256sum ./*.deb) >"$prefix.$$/done"
rm -rf "$CACHE/$name"-????????????; mv "$prefix.$$" "$prefix"
echo "$prefix"
