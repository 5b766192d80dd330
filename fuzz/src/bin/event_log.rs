//! The TCG event log: every entry lies within the log, and the explanation of a value stays short. An excerpt has a size that a
//! document allows, and the same digests.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ring::digest::{SHA256, digest};
use verifier::event_log::{SHA256 as BANK, explain, parse};
use verifier::excerpt::{excerpt, of_whole_registers};
use verifier::secure_boot::{self, SecureBoot};

/// The type of an entry that the firmware does not extend into a PCR.
const EV_NO_ACTION: u32 = 3;

fuzz_target!(|log: &[u8]| {
    // a variable, which in a log must have the digest of its event
    if let Some(entries) = secure_boot::entries(log) {
        assert!(entries.len() <= log.len());
    }
    let whole = parse(log);
    let events = &whole.events;
    let size: usize = events.iter().map(|event| event.data.len() + 12).sum();
    assert!(size <= log.len());
    for pcr in 0..24 {
        // the value that the log gives (another one if the log begins with a locality), so that there is something to explain
        let mut value = [0; 32];
        for event in events
            .iter()
            .filter(|event| event.pcr == pcr && event.kind != EV_NO_ACTION)
        {
            let both = [value, event.sha256.copied().unwrap_or_default()].concat();
            value.copy_from_slice(digest(&SHA256, &both).as_ref());
        }
        if pcr == secure_boot::PCR {
            let _ = SecureBoot::read(log, Some(&value));
        }
        let text = explain(log, pcr, &value, &[1; 32]);
        // the explanation is printed on a terminal, and contains texts from a peer
        assert!(
            text.len() < 4096
                && text
                    .bytes()
                    .all(|byte| byte == b' ' || byte.is_ascii_graphic()),
            "{text}"
        );
    }
    for max in [200, 2000] {
        let bytes = excerpt(log, max);
        let short = parse(&bytes);
        assert!(bytes.len() <= max && of_whole_registers(log, max).len() <= max);
        let digests = |log: &[verifier::event_log::LogEntry]| -> Vec<_> {
            let digests = log.iter().skip(1);
            digests
                .map(|event| (event.pcr, event.sha256.copied()))
                .collect()
        };
        if !bytes.is_empty() && whole.banks.contains(&(BANK, 32)) {
            assert_eq!(digests(&short.events), digests(events));
        }
    }
});
