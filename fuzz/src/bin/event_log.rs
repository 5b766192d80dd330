//! The TCG event log: every entry lies within the log, and the explanation of a value stays short.
#![no_main]

use attest::attestation::event_log::{explain, parse};
use libfuzzer_sys::fuzz_target;
use ring::digest::{SHA256, digest};

/// Of an entry that is not extended.
const EV_NO_ACTION: u32 = 3;

fuzz_target!(|log: &[u8]| {
    let events = parse(log);
    let size: usize = events.iter().map(|event| event.data.len() + 12).sum();
    assert!(size <= log.len());
    for pcr in 0..24 {
        // the value that the log gives, unless it begins with a locality: so that there is something to explain
        let mut value = [0; 32];
        for event in events
            .iter()
            .filter(|event| event.pcr == pcr && event.kind != EV_NO_ACTION)
        {
            let both = [value, event.sha256.copied().unwrap_or_default()].concat();
            value.copy_from_slice(digest(&SHA256, &both).as_ref());
        }
        let text = explain(log, pcr, &value, &[1; 32]);
        // it goes to a terminal, and says what a peer sent
        assert!(
            text.len() < 4096
                && text
                    .bytes()
                    .all(|byte| byte == b' ' || byte.is_ascii_graphic()),
            "{text}"
        );
    }
});
