//! A machine with the Debian packages of `make deb`: an initrd that Debian 12's dracut makes when firstlight-initramfs is installed, and
//! a booted system whose units the installation of firstlight-node has enabled.

use super::pairs::first_boot_and_rejoin;
use super::{SYSTEMD_252, stages};
use machine::{Result, root, script};
use std::path::Path;

#[test]
#[ignore = "boots a machine: make test-images"]
fn a_machine_with_the_packages_becomes_a_node_and_comes_back_by_rejoin() -> Result<()> {
    let folder = script("tools/deb.sh", &[])?;
    let package = |name: &str| {
        let version = env!("CARGO_PKG_VERSION");
        Path::new(&folder).join(format!("{name}_{version}_amd64.deb"))
    };
    let initrd = SYSTEMD_252.initrd_with(&package("firstlight-initramfs"), "packages.initrd")?;
    let os = root().join("target/images/packages.disk");
    let node = package("firstlight-node");
    let mut setting = stages::node_of("packages", SYSTEMD_252, &initrd, &os, &node)?;
    first_boot_and_rejoin(&mut setting).map(drop)
}
