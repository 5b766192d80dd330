//! Debian 13's dracut, the newest that Debian has, its initramfs-tools, and Ubuntu's with Ubuntu's kernel; NetworkManager in the initrd.

use super::pairs::first_boot_and_rejoin;
use super::{
    CLOUD, DRACUT_13, INITRAMFS_TOOLS_13, INITRAMFS_TOOLS_UBUNTU, Maker, NETWORK_MANAGER, setting,
};
use machine::initramfs::Overlay;
use machine::{Result, flow};

#[test]
#[ignore = "boots a machine: make test-images"]
fn an_initrd_of_debian_13s_dracut_opens_the_disk_at_each_boot() -> Result<()> {
    opens_at_each_boot("dracut-13", DRACUT_13)
}

#[test]
#[ignore = "boots a machine: make test-images"]
fn an_initrd_of_debian_13s_initramfs_tools_opens_the_disk_at_each_boot() -> Result<()> {
    opens_at_each_boot("initramfs-tools-13", INITRAMFS_TOOLS_13)
}

#[test]
#[ignore = "boots a machine: make test-images"]
fn an_initrd_of_ubuntus_initramfs_tools_opens_the_disk_at_each_boot() -> Result<()> {
    opens_at_each_boot("initramfs-tools-ubuntu", INITRAMFS_TOOLS_UBUNTU)
}

/// A system without systemd-networkd, such as a Fedora, has NetworkManager in its initrd.
#[test]
#[ignore = "boots a machine: make test-images"]
fn an_initrd_of_dracut_with_network_manager_opens_the_disk_at_each_boot() -> Result<()> {
    opens_at_each_boot("dracut-network-manager", NETWORK_MANAGER)
}

/// The first boot, one by rejoin, and one by recovery.
fn opens_at_each_boot(name: &str, maker: Maker) -> Result<()> {
    let mut setting = setting(name, maker, CLOUD, &Overlay::default())?;
    let cluster = first_boot_and_rejoin(&mut setting)?;
    flow::recovered(&mut setting, &cluster).map(drop)
}
