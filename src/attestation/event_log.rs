//! The TCG event log: what the firmware and the boot loader extended into which PCR ("TCG PC Client Platform Firmware
//! Profile Specification", §10). Not signed by itself; it counts as far as replaying it gives the quoted values. Here it is
//! read to explain a value to a person, and never to accept one.

use std::fmt::Write;

use super::{hex, sha256};

const SHA1: u16 = 0x0004;
const SHA256: u16 = 0x000b;
const EV_NO_ACTION: u32 = 3;
const STARTUP_LOCALITY: &[u8] = b"StartupLocality\0";
const SPEC_ID: &[u8] = b"Spec ID Event03\0";
/// No bank beyond these is known to any TPM.
const MAX_DIGESTS: u32 = 8;
/// Enough to see what is different; a log of hundreds of entries helps nobody.
const SHOWN_ENTRIES: usize = 12;
const SHOWN_TEXT: usize = 48;

/// One entry, borrowed from the log's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event<'a> {
    /// Which PCR it was extended into.
    pub pcr: u32,
    /// EV_..., §10.4.1.
    pub kind: u32,
    /// The digest that the SHA-256 bank was extended with, if the log has it.
    pub sha256: Option<&'a [u8; 32]>,
    /// What it says about itself.
    pub data: &'a [u8],
}

/// The log's entries up to the first that cannot be read.
pub fn parse(log: &[u8]) -> Vec<Event<'_>> {
    let mut reader = Reader(log);
    let mut events = vec![];
    // the header is an entry in the old, SHA-1-only form; it says whether the others are, too
    let Some((header, agile)) = reader.header() else { return events };
    events.push(header);
    while let Some(event) = if agile { reader.agile_event() } else { reader.old_event() } {
        events.push(event);
    }
    events
}

/// Which entries made the value of a PCR: a sentence for whoever refuses it.
pub fn explain(log: &[u8], pcr: u32, value: &[u8]) -> String {
    let events: Vec<_> = parse(log).into_iter().filter(|event| event.pcr == pcr).collect();
    if replay(&events).is_none_or(|replayed| replayed != value) {
        return "the event log does not explain it".into();
    }
    let measured: Vec<_> = events.iter().filter(|event| event.kind != EV_NO_ACTION).collect();
    let mut text = String::from("measured into it: ");
    if measured.is_empty() {
        text.push_str("nothing");
    }
    for (number, event) in measured.iter().take(SHOWN_ENTRIES).enumerate() {
        let digest = event.sha256.map_or("?".into(), |digest| hex(&digest[..4]));
        let separator = if number == 0 { "" } else { ", " };
        // writing to a String cannot fail
        let _ = write!(text, "{separator}{} {digest}..{}", kind_name(event.kind), describe(event.data));
    }
    if measured.len() > SHOWN_ENTRIES {
        let _ = write!(text, " and {} more", measured.len() - SHOWN_ENTRIES);
    }
    text
}

/// The SHA-256 value that a PCR's entries give; `None` if one lacks the digest.
fn replay(events: &[Event]) -> Option<[u8; 32]> {
    let mut value = [0; 32];
    for event in events {
        if event.kind == EV_NO_ACTION {
            if let Some([locality]) = event.data.strip_prefix(STARTUP_LOCALITY) {
                value[31] = *locality;
            }
            continue;
        }
        value = sha256(&[&value, event.sha256?]);
    }
    Some(value)
}

fn kind_name(kind: u32) -> &'static str {
    match kind {
        0x0 => "EV_PREBOOT_CERT",
        0x1 => "EV_POST_CODE",
        0x4 => "EV_SEPARATOR",
        0x5 => "EV_ACTION",
        0x6 => "EV_EVENT_TAG",
        0x7 => "EV_S_CRTM_CONTENTS",
        0x8 => "EV_S_CRTM_VERSION",
        0x9 => "EV_CPU_MICROCODE",
        0xa => "EV_PLATFORM_CONFIG_FLAGS",
        0xc => "EV_COMPACT_HASH",
        0xd => "EV_IPL",
        0x11 => "EV_NONHOST_INFO",
        0x8000_0001 => "EV_EFI_VARIABLE_DRIVER_CONFIG",
        0x8000_0002 => "EV_EFI_VARIABLE_BOOT",
        0x8000_0003 => "EV_EFI_BOOT_SERVICES_APPLICATION",
        0x8000_0004 => "EV_EFI_BOOT_SERVICES_DRIVER",
        0x8000_0006 => "EV_EFI_GPT_EVENT",
        0x8000_0007 => "EV_EFI_ACTION",
        0x8000_0008 => "EV_EFI_PLATFORM_FIRMWARE_BLOB",
        0x8000_0009 => "EV_EFI_HANDOFF_TABLES",
        0x8000_00e0 => "EV_EFI_VARIABLE_AUTHORITY",
        _ => "EV_OTHER",
    }
}

/// The longest run of printable ASCII in an entry's data, in single bytes or UTF-16; empty if there is none worth showing.
fn describe(data: &[u8]) -> String {
    let wide: Vec<u8> = data.iter().step_by(2).copied().collect();
    let longest = |bytes: &[u8]| -> String {
        let runs = bytes.split(|byte| !(0x20..0x7f).contains(byte));
        let run = runs.max_by_key(|run| run.len()).unwrap_or_default();
        run.iter().take(SHOWN_TEXT).map(|byte| char::from(*byte)).collect()
    };
    let (narrow, wide) = (longest(data), longest(&wide));
    let best = if wide.len() > narrow.len() { wide } else { narrow };
    if best.len() < 4 { String::new() } else { format!(" {best:?}") }
}

/// Little endian, as the whole log is. Every length is one of bytes that are there.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take(2)?.try_into().ok().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4)?.try_into().ok().map(u32::from_le_bytes)
    }

    fn data(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.take(len as usize)
    }

    /// TCG_PCClientPCREvent, and whether it announces crypto-agile entries.
    fn header(&mut self) -> Option<(Event<'a>, bool)> {
        let event = self.old_event()?;
        let agile = event.kind == EV_NO_ACTION && event.data.starts_with(SPEC_ID);
        Some((event, agile))
    }

    fn old_event(&mut self) -> Option<Event<'a>> {
        let (pcr, kind) = (self.u32()?, self.u32()?);
        self.take(20)?;
        Some(Event { pcr, kind, sha256: None, data: self.data()? })
    }

    /// TCG_PCR_EVENT2.
    fn agile_event(&mut self) -> Option<Event<'a>> {
        let (pcr, kind) = (self.u32()?, self.u32()?);
        let count = self.u32().filter(|count| *count <= MAX_DIGESTS)?;
        let mut sha256 = None;
        for _ in 0..count {
            let algorithm = self.u16()?;
            let len = match algorithm {
                SHA1 => 20,
                SHA256 => 32,
                0x000c => 48,
                0x000d => 64,
                0x0012 => 32, // SM3
                _ => return None,
            };
            let digest = self.take(len)?;
            if algorithm == SHA256 {
                sha256 = digest.try_into().ok();
            }
        }
        Some(Event { pcr, kind, sha256, data: self.data()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutation::mutations;

    /// From OVMF and the EFI stub of Linux 6.1 in QEMU: kernel, command line and initrd given by `-kernel` and friends.
    const LOG: &[u8] = include_bytes!("../../tests/data/event-log-ovmf.bin");

    #[test]
    fn a_firmware_log_replays_to_the_value_that_it_explains() {
        let events = parse(LOG);
        let of_9: Vec<_> = events.iter().filter(|event| event.pcr == 9).cloned().collect();
        let value = replay(&of_9).unwrap();
        let text = explain(LOG, 9, &value);
        assert!(
            text.contains("EV_EVENT_TAG") && text.contains("Linux initrd") && text.contains("LoadOptions"),
            "{text}"
        );
        let of_4: Vec<_> = events.iter().filter(|event| event.pcr == 4).cloned().collect();
        let text = explain(LOG, 4, &replay(&of_4).unwrap());
        assert!(text.contains("Calling EFI Application from Boot Option") && text.contains("kernel"), "{text}");
    }

    #[test]
    fn a_value_that_the_log_does_not_give_is_not_explained() {
        assert_eq!(explain(LOG, 9, &[1; 32]), "the event log does not explain it");
        assert_eq!(explain(b"", 9, &[1; 32]), "the event log does not explain it");
        assert_eq!(explain(LOG, 14, &[0; 32]), "measured into it: nothing");
    }

    #[test]
    fn hostile_logs_end_without_a_panic() {
        for log in mutations(LOG, 2000) {
            for pcr in [0, 4, 9] {
                let _ = explain(&log, pcr, &[0; 32]);
            }
        }
    }
}
