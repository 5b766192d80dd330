#!/usr/bin/env bash
# Installs what opens volumes of a machine without Kubernetes. docs/standalone.md
#
#   systemd/volume/install.sh PROGRAM [ROOT]    PROGRAM: firstlight-volume, such as target/dist/firstlight-volume after `make build`;
#                                               ROOT: the root file system [/]
#
# `systemctl enable --now firstlight-volume.socket` starts it.
set -euo pipefail
unset CDPATH
program=${1:?the program firstlight-volume, which is in target/dist after make build}
root=${2:-}
here=$(cd "$(dirname "$0")" && pwd)

install -D -m 755 "$program" "$root/usr/bin/firstlight-volume"
for unit in "$here"/*.service "$here"/*.socket; do install -D -m 644 "$unit" "$root/usr/lib/systemd/system/$(basename "$unit")"; done
install -D -m 644 "$here/systemd-cryptsetup.conf" "$root/usr/lib/systemd/system/systemd-cryptsetup@.service.d/firstlight.conf"
install -d -m 755 "$root/etc/firstlight/volumes"
