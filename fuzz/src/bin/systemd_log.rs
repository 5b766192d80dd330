//! systemd's own event log: the explanation of a value stays short, and has no control characters for a terminal.
#![no_main]

use libfuzzer_sys::fuzz_target;
use verifier::systemd_log::{explain, parse};

fuzz_target!(|log: &[u8]| {
    // the shortest record is longer than 40 bytes
    let records = parse(log);
    assert!(records.len() <= log.len() / 40);
    for pcr in records.iter().map(|record| record.pcr).take(8) {
        let text = explain(log, pcr, &[1; 32]).unwrap_or_default();
        assert!(
            text.len() < 2048
                && text
                    .bytes()
                    .all(|byte| byte == b' ' || byte.is_ascii_graphic()),
            "{text}"
        );
    }
});
