#!/usr/bin/env bash
# Makes a machine of the tests from a Debian 12 as its own tools install it, with systemd, cryptsetup, its kernel and initrd. It has a
# service that runs commands from the serial line, and packages of ours as files in /root.
#
#   tools/stock-disk.sh OUT DEB...     writes OUT/root.disk, OUT/vmlinuz and OUT/initrd.img
#
# Needs root (mmdebstrap). The Debian is kept in the cache until the recipe changes. Does nothing if OUT is newer than all of its inputs.
. "$(dirname "$0")/lib.sh"

out=${1:?where to}
shift
PACKAGES=(
  systemd-sysv udev dbus iproute2 zstd initramfs-tools linux-image-cloud-amd64
  # what docs/standalone.md needs of Debian: the machines of the tests have no network to its archive
  cryptsetup e2fsprogs
)
recipe=$(printf '%s ' "${PACKAGES[@]}" | sha256sum | cut -c1-12)
debian=$CACHE/debian-stock-$recipe
if [ ! -e "$debian/done" ]; then
  say "installing a Debian 12, about 400 MB"
  rm -rf "$debian" "$debian.$$"; mkdir -p "$debian.$$"
  mmdebstrap --quiet --mode=root --variant=minbase --include="$(IFS=,; echo "${PACKAGES[*]}")" \
    bookworm "$debian.$$/root" "deb $(mirror) bookworm main" >&2
  rm -rf "$debian.$$"/root/var/cache/apt/archives/*.deb
  touch "$debian.$$/done"
  rm -rf "$CACHE"/debian-stock-????????????; mv "$debian.$$" "$debian"
fi
if [ -e "$out/root.disk" ] && [ -z "$(find "$0" "$debian/done" "$@" -newer "$out/root.disk" -print -quit)" ]; then exit; fi

work=$(mktemp -d -p "$CACHE"); trap 'rm -rf "$work"' EXIT
cp -a "$debian/root" "$work/root"
root=$work/root
cp "$@" "$root/root/"
printf '[Match]\nName=en*\n[Network]\nDHCP=yes\n' >"$root/etc/systemd/network/lan.network"
echo 'LABEL=root / ext4 defaults 0 1' >"$root/etc/fstab"
echo machine >"$root/etc/hostname"
install -D -m 755 /dev/stdin "$root/usr/lib/firstlight-test/console" <<'CONSOLE'
#!/bin/bash
# Runs commands from the serial line, as initramfs/os-init does.
set -o pipefail
stty -echo
echo "the console is ready"
while read -r id command; do
  if [ "$command" = shut_down ]; then systemctl poweroff; sleep infinity; fi
  (eval "$command") </dev/null 2>&1 | sed "s/^/$id| /"
  echo "$id done $?"
done
CONSOLE
cat >"$root/etc/systemd/system/test-console.service" <<'UNIT'
[Unit]
Description=Commands from the serial line
After=multi-user.target

[Service]
ExecStart=/usr/lib/firstlight-test/console
Environment=HOME=/root
WorkingDirectory=/root
StandardInput=tty
StandardOutput=tty
TTYPath=/dev/ttyS0

[Install]
WantedBy=graphical.target
UNIT
chroot_into "$root" sh -c 'systemctl --quiet enable systemd-networkd test-console
  systemctl --quiet mask serial-getty@ttyS0 getty@tty1 apt-daily.timer apt-daily-upgrade.timer'
mkdir -p "$out"
cp -L "$root/vmlinuz" "$root/initrd.img" "$out/"
rm -f "$out/.root.disk"; truncate -s 2G "$out/.root.disk"
PATH=$PATH:/usr/sbin:/sbin mke2fs -q -t ext4 -E root_owner=0:0 -L root -d "$root" "$out/.root.disk"
mv "$out/.root.disk" "$out/root.disk"
