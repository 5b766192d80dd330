//! The firmware's event log: whatever a peer sends for one, its explanation is short and does nothing to a terminal.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../src/attestation/event_log.rs"]
#[allow(dead_code)] // of it, this fuzzer does not need all
mod event_log;

fuzz_target!(|input: &[u8]| {
    for event in event_log::parse(input) {
        assert!(event.data.len() <= input.len());
    }
    for pcr in [0, 4, 17] {
        let text = event_log::explain(input, pcr, &[0; 32]);
        assert!(text.len() < 4096 && text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic()), "{text}");
    }
});

// what the file takes from its parent module

fn sha256(parts: &[&[u8]]) -> [u8; 32] {
    let hash = ring::digest::digest(&ring::digest::SHA256, &parts.concat());
    hash.as_ref().try_into().expect("SHA-256 gives 32 bytes")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
