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
        host_programs: &[],
        files: Vec::new(),
        programs: &[],
        disks: &[("state", 64 * MIB)],
        host_ports: &[(8080, metadata.address.port())],
        memory: 512,
        limit: Duration::from_secs(120),
    };
    case.run().map(|passed| println!("passed:\n  {}", passed.join("\n  ")))
}
