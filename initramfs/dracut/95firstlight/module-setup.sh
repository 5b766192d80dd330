#!/bin/bash
# The dracut module `firstlight`: an initrd that opens the state disk with `unlock` before the operating system starts. docs/images/install.md

# shellcheck source=../../kernel-modules disable=SC1091
. "${BASH_SOURCE[0]%/*}/kernel-modules"

check() {
    require_binaries /usr/lib/firstlight/unlock mke2fs || return 1
    # only if it is asked for: --add firstlight, or add_dracutmodules+=" firstlight "
    return 255
}

depends() {
    local module
    # not dm: `unlock` needs neither dmsetup nor the drivers of RAID and bcache that come with it
    echo systemd systemd-initrd
    # the builder of the initrd may have chosen the module that brings the network up
    for module in network network-manager network-legacy connman; do
        if [[ " $add_dracutmodules $force_add_dracutmodules " == *" $module "* ]]; then
            echo "$module"
            return
        fi
    done
    # a system without systemd-networkd, such as Fedora's, has what dracut itself chooses
    # shellcheck disable=SC2154
    if [[ -x $dracutsysrootdir$systemdutildir/systemd-networkd ]]; then
        echo systemd-networkd
    else
        echo network
    fi
}

# Settings of dracut itself; an image overrides them on its kernel command line. A shell in the initrd could open the disk, so none
# opens after a failure. rd.neednet is for the modules that bring the network up only when asked; with networkd, which is enabled here,
# it would make dracut wait for the network.
cmdline() {
    echo -n "rd.shell=0 rd.emergency=reboot"
    dracut_module_included systemd-networkd || echo -n " rd.neednet=1"
}

installkernel() {
    # drivers for machines in a cloud, whatever machine builds the initrd
    # shellcheck disable=SC2086
    hostonly='' instmods $FIRSTLIGHT_CLOSING $FIRSTLIGHT_LOADED $FIRSTLIGHT_DEVICES
}

install() {
    inst_simple /usr/lib/firstlight/unlock
    inst_multiple mke2fs modprobe
    # the first program: it starts systemd, which was the first
    inst_simple /usr/lib/firstlight/close-host
    inst_multiple sh cat mkdir mount rmdir sleep umount
    rm -f "$initdir/init"
    inst_simple "$moddir/init" /init
    [[ -x $initdir/usr/lib/systemd/systemd ]] || { dfatal "firstlight: the initrd has no /usr/lib/systemd/systemd"; return 1; }
    inst_multiple -o /usr/lib/modprobe.d/firstlight.conf /etc/modprobe.d/firstlight.conf /etc/mke2fs.conf /etc/firstlight/node.conf /etc/firstlight/machines.json
    mkdir -p "$initdir"/etc/{cmdline.d,modules-load.d}
    cmdline >"$initdir/etc/cmdline.d/95-firstlight.conf"
    printf '%s\n' $FIRSTLIGHT_LOADED >"$initdir/etc/modules-load.d/firstlight.conf"
    inst_simple "$moddir/firstlight-unlock.service" "$systemdsystemunitdir/firstlight-unlock.service"
    $SYSTEMCTL -q --root "$initdir" enable firstlight-unlock.service

    if dracut_module_included systemd-networkd; then
        inst_simple "$moddir/zz-firstlight.network" "$systemdnetwork/zz-firstlight.network"
        $SYSTEMCTL -q --root "$initdir" add-wants initrd.target systemd-networkd.service
    fi
}
