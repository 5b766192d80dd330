#!/usr/bin/env bash
# Makes the root disk of the tests of stages: a small Debian whose systemd starts `bootstrapper` by the units of systemd/, and a service
# that runs commands from the serial line.
#
#   tools/systemd-disk.sh SUITE OUT BOOTSTRAPPER [KERNEL]     BOOTSTRAPPER: the program, or the package firstlight-node, which enables the
#                                                             units, or "-" for a system without Firstlight
#
# With KERNEL, a suite of tools/kernel.sh, the system has that kernel's modules. Does nothing if OUT is newer than all of its
# inputs. SUITE is a suite of tools/debian.sh.
. "$(dirname "$0")/lib.sh"

suite=${1:?bookworm, trixie or sid} out=${2:?where to} bootstrapper=${3:?the program bootstrapper, or the package firstlight-node} kernel=${4:-}
debian=$("$ROOT/tools/debian.sh" "$suite" measuring)
inputs=("$ROOT/systemd" "$ROOT/initramfs/modprobe.conf" "$0" "$debian/done")
[ "$bootstrapper" = - ] || inputs+=("$bootstrapper")
if [ -e "$out" ] && [ -z "$(find "${inputs[@]}" -newer "$out" -print -quit)" ]; then exit; fi
work=$(mktemp -d -p "$CACHE"); trap 'rm -rf "$work"' EXIT
root=$work/root

# the copy has hard links, so it must be beside the cached folder; the commands below write into no existing file
if [ -n "$kernel" ]; then
  root_with_kernel "$debian" "$("$ROOT/tools/kernel.sh" "$kernel")" "$root"
else
  cp -al "$debian/root" "$root"
fi
units=(test-console.service)
case $bootstrapper in
-) ;;
*.deb) install_package "$root" "$bootstrapper" ;;
*)
  "$ROOT/systemd/install.sh" "$bootstrapper" "$root"
  # from the package firstlight-initramfs, which firstlight-node needs
  install -D -m 644 "$ROOT/initramfs/modprobe.conf" "$root/usr/lib/modprobe.d/firstlight.conf"
  while read -r word unit; do [ "$word" != enable ] || units+=("$unit"); done <"$ROOT/systemd/80-firstlight.preset"
  ;;
esac
# the user that the installation of tpm-udev makes; the package's udev rule gives the TPM to this user
chroot_into "$root" systemd-sysusers --inline 'u tss - "TPM software stack"' 2>/dev/null
rm "$root/etc/machine-id"
echo 5ec1e7a0000040008000000000000001 >"$root/etc/machine-id"
# the first boot has nothing to update
touch "$root/etc/.updated"

mkdir -p "$root/usr/lib/firstlight-test" "$root/run/state"
cat >"$root/usr/lib/firstlight-test/console" <<'CONSOLE'
#!/bin/bash
# Runs commands from the serial line, as initramfs/os-init does.
set -o pipefail
stty -echo
while read -r id command; do
  if [ "$command" = shut_down ]; then systemctl poweroff; sleep infinity; fi
  (eval "$command") </dev/null 2>&1 | sed "s/^/$id| /"
  echo "$id done $?"
done
CONSOLE
chmod 755 "$root/usr/lib/firstlight-test/console"
cat >"$root/usr/lib/systemd/system/test-console.service" <<'UNIT'
[Unit]
Description=Commands from the serial line

[Service]
ExecStart=/usr/lib/firstlight-test/console
StandardInput=tty
StandardOutput=tty
TTYPath=/dev/ttyS0

[Install]
WantedBy=multi-user.target
UNIT
say "making a root disk with systemd of Debian ($suite)"
chroot_into "$root" sh -c 'systemctl --quiet enable "$@"; systemctl --quiet mask serial-getty@ttyS0.service getty@tty1.service' sh "${units[@]}"

mkdir -p "$(dirname "$out")"
rm -f "$out.$$"; truncate -s 512M "$out.$$"
PATH=$PATH:/usr/sbin:/sbin mke2fs -q -t ext4 -O ^has_journal -E root_owner=0:0 -L root -d "$root" "$out.$$"
mv "$out.$$" "$out"
