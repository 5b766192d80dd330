#!/usr/bin/env bash
# Installs what the booted system of a node runs. docs/images/install.md
#
#   systemd/install.sh BOOTSTRAPPER [ROOT]    BOOTSTRAPPER: the program of `make build`, or "-" for the units alone; ROOT: the image's
#                                             root file system [/]
#
# `systemctl --root ROOT preset-all` enables the units, or `systemctl enable` those of 80-firstlight.preset.
set -euo pipefail
unset CDPATH
bootstrapper=${1:?the program bootstrapper, which is target/dist/bootstrapper after make build}
root=${2:-}
here=$(cd "$(dirname "$0")" && pwd)

[ "$bootstrapper" = - ] || install -D -m 755 "$bootstrapper" "$root/usr/bin/bootstrapper"

units=$root/usr/lib/systemd/system
install -d -m 755 "$units"
install -m 644 "$here"/*.service "$here"/*.socket "$here"/*.timer "$here"/*.mount "$units/"
install -D -m 644 "$here/80-firstlight.preset" "$root/usr/lib/systemd/system-preset/80-firstlight.preset"
install -D -m 644 "$here/54-firstlight.rules" "$root/usr/lib/udev/rules.d/54-firstlight.rules"
install -D -m 644 "$here/sysctl.conf" "$root/usr/lib/sysctl.d/60-firstlight.conf"
install -D -m 644 "$here/modules.conf" "$root/usr/lib/modules-load.d/firstlight-node.conf"
# the root file system may be read-only, so the folders that the units mount on have to be there
install -d -m 755 "$root"/etc/{cni,kubernetes} "$root"/{opt,var}
# systemd-pcrfs@.service has instances for other file systems
for unit in systemd-pcrmachine systemd-pcrfs-root systemd-pcrfs@ systemd-tpm2-setup; do
  install -D -m 644 "$here/pcrs.conf" "$units/$unit.service.d/firstlight.conf"
done
grep -v '^#' "$here/host-agents" | tr ' ' '\n' | while read -r unit; do
  install -D -m 644 "$here/host-agent.conf" "$units/$unit.service.d/firstlight.conf"
done
