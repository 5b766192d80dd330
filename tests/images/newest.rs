//! Debian 13's dracut, the newest that Debian has, its initramfs-tools, and Ubuntu's with Ubuntu's kernel.

use super::pairs::first_boot_and_rejoin;
use super::{CLOUD, DRACUT_13, INITRAMFS_TOOLS_13, INITRAMFS_TOOLS_UBUNTU, setting};
use machine::Result;
use machine::initramfs::Overlay;

#[test]
#[ignore = "boots a machine: make test-images"]
fn an_initrd_of_debian_13s_dracut_opens_the_disk_at_first_boot_and_by_rejoin() -> Result<()> {
    first_boot_and_rejoin(setting("dracut-13", DRACUT_13, CLOUD, &Overlay::default())?)
}

#[test]
#[ignore = "boots a machine: make test-images"]
fn an_initrd_of_debian_13s_initramfs_tools_opens_the_disk_at_first_boot_and_by_rejoin() -> Result<()>
{
    let overlay = Overlay::default();
    first_boot_and_rejoin(setting(
        "initramfs-tools-13",
        INITRAMFS_TOOLS_13,
        CLOUD,
        &overlay,
    )?)
}

#[test]
#[ignore = "boots a machine: make test-images"]
fn an_initrd_of_ubuntus_initramfs_tools_opens_the_disk_at_first_boot_and_by_rejoin() -> Result<()> {
    let overlay = Overlay::default();
    first_boot_and_rejoin(setting(
        "initramfs-tools-ubuntu",
        INITRAMFS_TOOLS_UBUNTU,
        CLOUD,
        &overlay,
    )?)
}
