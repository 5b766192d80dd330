//! Measures a rejoin without emulation: `unlock`, a join service, a key service and a TPM (swtpm) on loopback, until the keyslot of
//! the disk is open. The next steps, the mapping and the mount, need device-mapper: the demo and `cargo bench --bench unlock`
//! measure them in a guest.
//!
//! The programs are those of the tests, compiled with opt-level 1, and each runs once per boot. The shipped programs are faster.

use common::setting::{MASTER_KEY, Setting};
use support::program::Program;

const BOOTS: usize = 9;
/// The events of docs/boot.md, in their order.
const EVENTS: [(&str, &str); 5] = [
    ("disk:", "the disk was found"),
    ("attestation-key:", "the attestation key was known"),
    ("quote:", "the quote was made"),
    ("ticket:", "the ticket was there"),
    ("key-slot:", "the key slot was open"),
];

fn main() {
    // `cargo test --all-targets` also calls benches, without --bench
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let setting = Setting::new();
    setting.set_control_planes(&[3]);
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let _join = setting.join_service(3, keys, &setting.policy());
    let disk = setting.initialized_disk();
    let boots: Vec<_> = (0..BOOTS).map(|_| boot(&setting, &disk)).collect();
    println!("| from the start of `unlock` until … | median | slowest of {BOOTS} |");
    println!("|---|---:|---:|");
    for (event, (_, title)) in EVENTS.iter().enumerate() {
        let mut times: Vec<u64> = boots.iter().map(|boot| boot[event]).collect();
        times.sort_unstable();
        println!(
            "| {title} | {} ms | {} ms |",
            times[BOOTS / 2],
            times[BOOTS - 1]
        );
    }
}

/// Returns the milliseconds from the start of `unlock` to each event.
fn boot(setting: &Setting, disk: &std::path::Path) -> [u64; EVENTS.len()] {
    let mut unlock = Program::start(&mut setting.unlock(disk));
    let started = time(&unlock.expect(" start:"));
    let times = EVENTS.map(|(event, _)| time(&unlock.expect(&format!(" {event}"))) - started);
    // there is no device-mapper, or it does not accept a disk in a file
    unlock.exit();
    times
}

/// Returns the milliseconds of `firstlight[unlock] 12.345s start: ..`.
fn time(event: &str) -> u64 {
    let seconds = event
        .split_whitespace()
        .find_map(|word| word.strip_suffix('s')?.parse::<f64>().ok())
        .unwrap_or_else(|| panic!("no time in: {event}"));
    (seconds * 1000.0).round() as u64
}
