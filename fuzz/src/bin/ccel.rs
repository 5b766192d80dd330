//! The event log of a TDX machine (CCEL): an excerpt has a size that a document allows, and gives the same registers. The report
//! about the log has a limited size and no control characters for a terminal.
#![no_main]

use cli::trust::explain::explained;
use libfuzzer_sys::fuzz_target;
use verifier::event_log::{EventLog, LogEntry, digest_of, parse};
use verifier::excerpt::excerpt;

/// TPM_ALG_ID.
const SHA_384: u16 = 0x000c;

fuzz_target!(|log: &[u8]| {
    let whole = parse(log);
    for max in [200, 2000, 8000] {
        let bytes = excerpt(log, max);
        assert!(bytes.len() <= max);
        if !bytes.is_empty() && whole.banks == [(SHA_384, 48)] {
            let short = parse(&bytes);
            assert!(digests(&short).eq(digests(&whole)));
        }
    }
    if let Ok(text) = explained(log) {
        let is_shown = |c: char| c == '\n' || !c.is_control();
        assert!(text.chars().all(is_shown), "{text}");
        assert!(text.len() <= 10_000 + 300 * log.len());
    }
});

/// Returns register and digest of each event except the header.
fn digests<'a>(log: &'a EventLog<'a>) -> impl Iterator<Item = (u32, Option<&'a [u8]>)> {
    let events = log.events.iter().skip(1);
    events.map(|event: &LogEntry| (event.pcr, digest_of(log, event, SHA_384)))
}
