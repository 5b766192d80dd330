#!/usr/bin/env bash
# Installs the services of a key broker without Kubernetes. docs/standalone.md
#
#   systemd/broker/install.sh FOLDER [ROOT]    FOLDER: has the programs join-service and key-service, such as target/dist after `make build`;
#                                              ROOT: the root file system [/]
#
# The units are not enabled: the services need a master secret and a policy first.
set -euo pipefail
unset CDPATH
programs=${1:?the folder of the programs, which is target/dist after make build}
root=${2:-}
here=$(cd "$(dirname "$0")" && pwd)

for program in join-service key-service; do install -D -m 755 "$programs/$program" "$root/usr/bin/$program"; done
for unit in "$here"/*.service; do install -D -m 644 "$unit" "$root/usr/lib/systemd/system/$(basename "$unit")"; done
install -d -m 755 "$root/etc/firstlight/broker"
