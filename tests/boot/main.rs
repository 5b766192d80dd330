//! Boot tests: real machines under QEMU with a TPM by swtpm. The console of every boot is kept in target/boot/.
//!
//! They need `make build`'s programs and take minutes, so `cargo test` skips them; `make boot` runs them.

mod faults;
mod growth;
mod power_cuts;
mod secrets;
mod volume;

use base::crypto::{Dek, KEY_LEN, Secret};
use base::master_secret::MasterSecret;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use machine::case::{self, Case};
use machine::flow::{self, Setting};
use machine::initramfs::Overlay;
use machine::story::Story;
use machine::timeline;
use machine::vm::Firmware;
use machine::{Context, Result};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;
use support::metadata::MetadataServer;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// SPECIFICATION.md's promise for `unlock`.
const MEMORY_MAX_KIB: u64 = 16 << 10;

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
        files: vec![(
            "/usr/bin/dm_guest".to_owned(),
            machine::example("dm_guest")?,
        )],
        disks: &[("disk1", GIB), ("disk8", 8 * GIB), ("disk64", 64 * GIB)],
        memory: 1024,
        limit: Duration::from_secs(300),
        ..Case::default()
    };
    passed(case.run()?)
}

#[test]
#[ignore = "boots a machine: make boot"]
fn an_initialized_machine_opens_its_disk_by_itself_and_by_the_operator() -> Result<()> {
    let mut setting = Setting::new("flow", GIB)?;
    for (title, events) in flow::demo(&mut setting, &Story::silent())? {
        println!("{title}");
        events.iter().for_each(|event| println!("  {event}"));
        if title.starts_with("tampered") {
            continue;
        }
        let peak = peak_memory(&events);
        assert!(
            (1..=MEMORY_MAX_KIB).contains(&peak),
            "{title}: unlock had {peak} KiB resident"
        );
    }
    Ok(())
}

#[test]
#[ignore = "boots a machine: make boot"]
fn without_a_tpm_the_disk_stays_closed() -> Result<()> {
    let mut setting = Setting::new("no-tpm", GIB)?;
    setting.machine.tpm = false;
    let mut vm = setting.machine.boot()?;
    let why = vm.console.wait_for("unlock: ", flow::PATIENCE)?;
    assert!(why.text.contains("TPM"), "{}", why.text);
    vm.wait_off(flow::PATIENCE)?;
    assert!(
        vm.console
            .lines()
            .iter()
            .any(|line| line.text.contains("the state disk stays closed"))
    );
    let disk = std::fs::File::open(setting.machine.disk("state")).context("open the disk")?;
    let used =
        std::os::unix::fs::MetadataExt::blocks(&disk.metadata().context("look at the disk")?);
    assert_eq!(used, 0, "the disk was written to");
    Ok(())
}

/// In one machine: cryptsetup reads the disk that we made, and we open by a ticket the disk that cryptsetup made with Constellation's
/// parameters.
#[test]
#[ignore = "boots a machine: make boot"]
fn state_disks_are_exchanged_with_cryptsetup() -> Result<()> {
    const UUID: &str = "c1f5a0e6-2f0b-4d53-9c53-3f1f0a2b7c11";
    let kms = MasterSecret::new(Secret::new(vec![1; 32]), Secret::new(vec![2; 32]))
        .context("make a master secret")?;
    let passphrase = kms
        .dek(&Dek::disk(UUID), KEY_LEN)
        .context("derive the disk's key")?;
    let mut overlay = Overlay::default();
    case::add_script(&mut overlay, "cryptsetup.sh")?;
    overlay.host_program("cryptsetup")?.host_program("e2fsck")?;
    overlay
        .file("/etc/passphrase", 0o600, passphrase.expose())
        .file("/etc/uuid", 0o600, UUID);
    let mut setting = Setting::with("cryptsetup.sh", 64 * MIB, &overlay)?;
    let [key, salt] = [[1; 32], [2; 32]].map(|bytes| STANDARD.encode(bytes));
    setting.write(
        flow::MASTER_SECRET,
        format!(r#"{{"key": "{key}", "salt": "{salt}"}}"#).as_bytes(),
    )?;
    // the same salt as in the node state that the script writes
    setting.write("config/measurementSalt", &[3; 32])?;
    setting.start_services_with(&["--migrate-until", "2099-12-31"])?;
    passed(case::judge(&mut setting.machine.boot()?, flow::PATIENCE)?)
}

/// Returns the peak of `unlock`'s resident memory in a boot, in KiB, from its own event.
fn peak_memory(events: &[timeline::Event]) -> u64 {
    let event = events
        .iter()
        .find(|event| event.stage == "unlock" && event.name == "memory");
    let words = event.iter().flat_map(|event| event.text.split(' '));
    words
        .filter_map(|word| word.parse().ok())
        .next()
        .unwrap_or(0)
}

fn passed(names: Vec<String>) -> Result<()> {
    println!("passed:\n  {}", names.join("\n  "));
    Ok(())
}
