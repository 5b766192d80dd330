//! Boot tests: real machines under QEMU with a TPM by swtpm. The console of every boot is kept in target/boot/.

mod harness;

use harness::Result;
use harness::case::Case;
use harness::metadata::{Answers, Instance, Metadata};
use harness::vm::{GUEST, HOST};
use std::time::Duration;

const MIB: u64 = 1 << 20;

#[test]
fn a_machine_boots_with_tpm_disk_and_network() -> Result<()> {
    let this = Instance::control_plane("control-plane-0", GUEST);
    let peers = vec![this.clone(), Instance::control_plane("control-plane-1", HOST)];
    let metadata = Metadata::start(Answers { this, peers, ..Answers::default() })?;
    let case = Case {
        script: "machine.sh",
        disks: &[("state", 64 * MIB)],
        host_ports: &[(8080, metadata.address.port())],
        ..Case::default()
    };
    case.run().map(|passed| println!("passed:\n  {}", passed.join("\n  ")))
}

#[test]
fn disk_mapping_and_first_file_system_agree_with_cryptsetup() -> Result<()> {
    let case = Case {
        script: "dm.sh",
        host_programs: &["cryptsetup", "dmsetup", "e2fsck", "blkid"],
        files: vec![("/usr/bin/dm_guest".to_owned(), harness::example("dm_guest")?)],
        disks: &[("disk1", 1 << 30), ("disk8", 8 << 30), ("disk64", 64 << 30)],
        memory: 1024,
        limit: Duration::from_secs(300),
        ..Case::default()
    };
    case.run().map(|passed| println!("passed:\n  {}", passed.join("\n  ")))
}
