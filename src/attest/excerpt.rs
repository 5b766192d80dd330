//! Shortens an event log so that it fits into a document and still explains registers to a person.

use super::event_log::{CUT, EV_NO_ACTION, EventLog, LogEntry, SHA256, parse};

/// The length of the TCG_EfiSpecIDEvent up to the number of its algorithms.
const SPEC_ID_LEN: usize = 24;
const CUT_LEN: usize = CUT.len() + 4;
/// The last level at which payloads are cut; see [`kept`].
const LAST_LEVEL: u32 = 6;
/// The length of the name in a measured variable dbx, and the name (UEFI_VARIABLE_DATA, §10.2.6).
const DBX: (&[u8], &[u8]) = (b"\x03\0\0\0\0\0\0\0", b"d\0b\0x\0");
/// The registers whose events are removed first, because peers that run Constellation need them
/// least: Secure Boot, boot options, partition table, devices; then those that policies usually
/// have. The first events of PCR 0 name the firmware.
const LEAST_MISSED: [u32; 14] = [7, 1, 5, 6, 2, 3, 10, 14, 13, 12, 8, 9, 11, 4];

/// Returns the log in at most `max` bytes, with all its events. A replay of the excerpt gives the
/// same SHA-256 values. If the log is too long, the excerpt omits the digests of other banks
/// (unless there is no SHA-256 bank), and then as much event data as necessary, the least
/// informative data first: [`LogEntry::uncut`] tells how much. Returns `None` if the digests are
/// already too long.
///
/// Constellation's verifiers refuse a log with a truncated Secure Boot variable:
/// [`of_whole_registers`] is for them.
pub fn excerpt(log: &[u8], max: usize) -> Vec<u8> {
    let (whole, log) = whole(log, max);
    if let Some(whole) = whole {
        return whole.into();
    }
    let mut events = log.events.iter().skip(1);
    let has_sha256 = log.is_agile && events.all(|event| event.sha256.is_some());
    (0..=LAST_LEVEL)
        .map(|level| written(&log, has_sha256, |event| kept(event, level)))
        .find(|excerpt| excerpt.len() <= max)
        .unwrap_or_default()
}

/// Returns the log in at most `max` bytes, by removing all events of as many registers as
/// necessary. Constellation's verifiers check the events that a log has for a register, but accept
/// a log without events of a register.
pub fn of_whole_registers(log: &[u8], max: usize) -> Vec<u8> {
    let (whole, mut log) = whole(log, max);
    if let Some(whole) = whole {
        return whole.into();
    }
    for pcr in LEAST_MISSED {
        // the first event is the header
        let mut number = 0;
        log.events.retain(|event| {
            number += 1;
            number == 1 || event.pcr != pcr
        });
        let excerpt = written(&log, false, |_| usize::MAX);
        if excerpt.len() <= max {
            return excerpt;
        }
    }
    vec![]
}

/// Returns the log as it is if it fits, or without its padding.
fn whole(log: &[u8], max: usize) -> (Option<&[u8]>, EventLog<'_>) {
    let parsed = parse(log);
    let used = &log[..log.len() - parsed.rest.len()];
    let whole = [log, used].into_iter().find(|it| it.len() <= max);
    (whole, parsed)
}

/// Returns how many bytes of an event's data are kept. Each level cuts more.
fn kept(event: &LogEntry<'_>, level: u32) -> usize {
    match (level, event.kind) {
        // tables of the firmware, certificates of a platform (EV_NO_ACTION)
        (1.., EV_NO_ACTION | 0x9..=0xb | 0x10 | 0x8000_0009..=0x8000_000c) => 128,
        // the list of revoked programs
        (1.., 0x8000_0001) if is_dbx(event.data) => 128,
        // the partition table, boot options
        (2.., 0x8000_0002 | 0x8000_0006) => 128,
        // the keys of Secure Boot, and those that verified a program
        (3.., 0x8000_0001 | 0x8000_00e0) => 128,
        (4, _) => 512,
        (5, _) => 64,
        (LAST_LEVEL.., _) => 0,
        _ => usize::MAX,
    }
}

fn is_dbx(data: &[u8]) -> bool {
    data.get(16..24) == Some(DBX.0) && data.get(32..38) == Some(DBX.1)
}

/// Returns the bytes of a log with at most this much data of each event, and with only the SHA-256
/// digests if `is_sha256_only`.
fn written(log: &EventLog, is_sha256_only: bool, kept: impl Fn(&LogEntry<'_>) -> usize) -> Vec<u8> {
    let mut bytes = vec![];
    for (number, event) in log.events.iter().enumerate() {
        let (mut digests, mut data) = (event.digests.to_vec(), event.data.to_vec());
        match (is_sha256_only, number, event.sha256) {
            // one algorithm with its digest length, and no vendor bytes
            (true, 0, _) => {
                data.truncate(SPEC_ID_LEN);
                data.extend([1, 0, 0, 0, SHA256 as u8, 0, 32, 0, 0]);
            }
            (true, _, Some(digest)) => {
                digests = [&[1, 0, 0, 0, SHA256 as u8, 0], &digest[..]].concat()
            }
            _ => {}
        }
        // the first event is the header
        let kept = kept(event);
        if number > 0 && data.len() - CUT_LEN.min(data.len()) > kept {
            let (_, len) = event.uncut();
            data.truncate(kept);
            data.extend([CUT, &(len as u32).to_le_bytes()].concat());
        }
        let (pcr, kind, len) = (event.pcr, event.kind, data.len() as u32);
        let head = [pcr.to_le_bytes(), kind.to_le_bytes()].concat();
        bytes.extend([&head, &digests, &len.to_le_bytes()[..], &data].concat());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    /// From OVMF and the EFI stub of Linux 6.1 in QEMU, with four banks.
    const LOG: &[u8] = include_bytes!("../../tests/data/event-log-ovmf.bin");

    #[test]
    fn an_excerpt_has_the_same_events_and_says_what_was_cut() {
        assert_eq!(excerpt(LOG, LOG.len()), LOG);
        let whole = parse(LOG);
        let mut before = LOG.len();
        for max in [LOG.len() - 1, 3600, 3000, 2600] {
            let bytes = excerpt(LOG, max);
            assert!(
                bytes.len() <= max && bytes.len() <= before && !bytes.is_empty(),
                "{max}"
            );
            before = bytes.len();
            let excerpt = parse(&bytes);
            assert_eq!(excerpt.banks, [(SHA256, 32)]);
            assert_eq!(excerpt.events.len(), whole.events.len());
            for (short, long) in excerpt.events.iter().zip(&whole.events).skip(1) {
                assert_eq!(
                    (short.pcr, short.kind, short.sha256),
                    (long.pcr, long.kind, long.sha256)
                );
                let (kept, len) = short.uncut();
                assert_eq!(len, long.data.len());
                assert!(long.data.starts_with(kept));
            }
        }
        assert!(excerpt(LOG, 100).is_empty());
        assert!(excerpt(b"", 0).is_empty());
    }

    #[test]
    fn an_excerpt_of_an_excerpt_knows_the_first_length() {
        let once = excerpt(LOG, 3000);
        let twice = excerpt(&once, once.len() - 1);
        let lengths = |log: &[u8]| -> Vec<usize> {
            let events = parse(log).events;
            events.iter().skip(1).map(|event| event.uncut().1).collect()
        };
        assert!(twice.len() < once.len());
        assert_eq!(lengths(&twice), lengths(LOG));
    }

    #[test]
    fn a_log_for_peers_of_the_old_system_has_all_or_nothing_of_a_register() {
        let whole = parse(LOG);
        let bytes = of_whole_registers(LOG, LOG.len() - 1);
        assert!(bytes.len() < LOG.len());
        let mut expected = whole.events[1..].to_vec();
        expected.retain(|event| event.pcr != 7);
        let short = parse(&bytes);
        assert_eq!(short.events[0], whole.events[0]);
        assert_eq!(short.events[1..], expected);
        assert!(of_whole_registers(LOG, 10).is_empty());
    }

    #[test]
    fn hostile_logs_end_without_a_panic() {
        for log in mutations(LOG, 2000) {
            for max in [0, 100, 1000, 3000] {
                assert!(excerpt(&log, max).len() <= max);
                assert!(of_whole_registers(&log, max).len() <= max);
            }
        }
    }
}
