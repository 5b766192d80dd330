//! Boot tests: real machines under QEMU with a TPM by swtpm. The console of every boot is kept in target/boot/.
//!
//! They need `make build`'s programs and take minutes, so `cargo test` passes them by; `make boot` runs them.

mod faults;
mod harness;

use harness::case::Case;
use harness::flow::{self, Setting};
use harness::metadata::MetadataServer;
use harness::vm::Firmware;
use harness::{Result, timeline};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

#[test]
#[ignore = "boots a machine: make boot"]
fn a_machine_boots_with_tpm_disk_and_network() -> Result<()> {
    let metadata = MetadataServer::start(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    metadata.set_self(r#"{"Name":"control-plane-0"}"#);
    metadata.set_peers("[]");
    let case = Case {
        script: "machine.sh",
        disks: &[("state", 64 * MIB)],
        host_ports: &[(8080, metadata.address.port())],
        firmware: Firmware::Uefi,
        ..Case::default()
    };
    passed(case.run()?)
}

#[test]
#[ignore = "boots a machine: make boot"]
fn disk_mapping_and_first_file_system_agree_with_cryptsetup() -> Result<()> {
    let case = Case {
        script: "dm.sh",
        host_programs: &["cryptsetup", "dmsetup", "e2fsck", "blkid"],
        files: vec![("/usr/bin/dm_guest".to_owned(), harness::example("dm_guest")?)],
        disks: &[("disk1", GIB), ("disk8", 8 * GIB), ("disk64", 64 * GIB)],
        memory: 1024,
        limit: Duration::from_secs(300),
        ..Case::default()
    };
    passed(case.run()?)
}

#[test]
#[ignore = "boots a machine: make boot"]
fn an_initialised_machine_opens_its_disk_by_itself_and_by_the_operator() -> Result<()> {
    let mut setting = Setting::new("flow", GIB)?;
    for (title, events) in flow::demo(&mut setting, &|_| ())? {
        println!("{}", timeline::table(&title, &events));
    }
    Ok(())
}

fn passed(names: Vec<String>) -> Result<()> {
    println!("passed:\n  {}", names.join("\n  "));
    Ok(())
}
