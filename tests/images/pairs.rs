//! The first boot and the reboot by rejoin, once for each system that makes an initrd.

use super::{CLOUD, DRACUT, INITRAMFS_TOOLS, setting};
use machine::flow::{self, PATIENCE, Setting};
use machine::initramfs::Overlay;
use machine::timeline;
use machine::{Failure, Result};

/// With the settings of Constellation's images on the kernel command line.
#[test]
#[ignore = "boots a machine: make boot"]
fn an_initrd_of_dracut_opens_the_disk_at_first_boot_and_by_rejoin() -> Result<()> {
    let mut setting = setting("dracut", DRACUT, CLOUD, &Overlay::default())?;
    first_boot_and_rejoin(&mut setting).map(drop)
}

/// With the settings in the initrd's file.
#[test]
#[ignore = "boots a machine: make boot"]
fn an_initrd_of_initramfs_tools_opens_the_disk_at_first_boot_and_by_rejoin() -> Result<()> {
    let mut overlay = Overlay::default();
    let file = *b"# where this machine runs\ncsp = qemu\nvariant = qemu-vtpm\n";
    overlay.file("/etc/firstlight/node.conf", 0o644, file);
    let mut setting = setting("initramfs-tools", INITRAMFS_TOOLS, "", &overlay)?;
    first_boot_and_rejoin(&mut setting).map(drop)
}

/// Returns PCR 15 of the member, which is switched off.
pub fn first_boot_and_rejoin(setting: &mut Setting) -> Result<String> {
    let (mut vm, cluster) = flow::first_boot(setting)?;
    vm.shut_down(PATIENCE)?;
    drop(vm);
    setting.start_services()?;
    let mut vm = flow::member_again(setting.machine.boot()?, " ticket:", &cluster)?;
    let events = timeline::events(&vm.console.lines());
    events.iter().for_each(|event| println!("  {event}"));
    let opened = timeline::between(&events, "network", "mounted")
        .ok_or_else(|| Failure("no event says when the network came up".to_owned()))?;
    println!("from an address to the mounted disk: {opened:.2} s");
    // the booted system has the record of the initrd, and continues it
    let record = vm.command("cat /run/firstlight/timeline", PATIENCE)?;
    let parts = [
        "s start: firstlight",
        "s mounted: /run/state",
        "firstlight[run]",
    ];
    if let Some(missing) = parts.iter().find(|part| !record.contains(**part)) {
        return Err(Failure(format!(
            "the record of the boot has no {missing:?}:\n{record}"
        )));
    }
    vm.shut_down(PATIENCE)?;
    Ok(cluster)
}
