//! The newest dracut that Debian has.

use super::pairs::first_boot_and_rejoin;
use super::{CLOUD, DRACUT_13, setting};
use machine::Result;
use machine::initramfs::Overlay;

#[test]
#[ignore = "boots a machine: make test-images"]
fn an_initrd_of_debian_13s_dracut_opens_the_disk_at_first_boot_and_by_rejoin() -> Result<()> {
    first_boot_and_rejoin(setting("dracut-13", DRACUT_13, CLOUD, &Overlay::default())?)
}
