#!/usr/bin/env bash
# Installs what an initrd of dracut or of initramfs-tools needs to open the state disk.
#
#   initramfs/install.sh UNLOCK [ROOT]      UNLOCK: the program of `make build`; ROOT: the image's root file system [/]
set -euo pipefail
unset CDPATH
unlock=${1:?the program unlock, which is target/dist/unlock after make build}
root=${2:-}
here=$(cd "$(dirname "$0")" && pwd)

install -D -m 755 "$unlock" "$root/usr/lib/firstlight/unlock"
install -m 755 "$here/close-host" "$root/usr/lib/firstlight/close-host"
install -D -m 644 "$here/modprobe.conf" "$root/usr/lib/modprobe.d/firstlight.conf"

module=$root/usr/lib/dracut/modules.d/95firstlight
install -D -m 755 "$here/dracut/95firstlight/module-setup.sh" "$module/module-setup.sh"
install -m 755 "$here/dracut/95firstlight/init" "$module/init"
install -m 644 "$here/kernel-modules" "$here"/dracut/95firstlight/{firstlight-unlock.service,zz-firstlight.network} "$module/"
install -D -m 644 "$here/dracut/95firstlight/dracut.conf" "$root/usr/lib/dracut/dracut.conf.d/95-firstlight.conf"

tools=$root/usr/share/initramfs-tools
install -D -m 644 "$here/kernel-modules" "$root/usr/lib/firstlight/kernel-modules"
for script in hooks/firstlight scripts/init-top/firstlight scripts/init-premount/firstlight; do
  install -D -m 755 "$here/initramfs-tools/$script" "$tools/$script"
done

# an existing file belongs to the image and stays
[ -e "$root/etc/firstlight/node.conf" ] || install -D -m 644 "$here/node.conf" "$root/etc/firstlight/node.conf"
