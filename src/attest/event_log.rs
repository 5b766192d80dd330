//! The TCG event log: the events with which firmware and boot loader extended the PCRs ("TCG PC
//! Client Platform Firmware Profile Specification", §10). The log is not signed. [`super::excerpt`]
//! shortens a log that has no room in a document; the crate `verifier` replays a log, and explains
//! registers by it.
//!
//! A log has one of two forms. In a crypto-agile log, the first event lists the banks for which the
//! other events have digests. In a legacy log, which has no such event, each event has a SHA-1
//! digest. The log of a TDX guest (ACPI table CCEL) is crypto-agile, with SHA-384 digests and the
//! number of a measurement register in place of the PCR: 0 is MRTD, 1 to 4 are RTMR0 to RTMR3 (UEFI
//! 2.11, §38.4.1).
//!
//! Linux returns the whole area that the firmware reserved for the log: bytes 0 or 0xff may follow
//! the last event.

use base::bytes::Reader;

/// TPM_ALG_ID of the digests in legacy logs.
pub const SHA1: u16 = 0x0004;
/// TPM_ALG_ID of the bank that policies name.
pub const SHA256: u16 = 0x000b;
/// The type of an event that extends no PCR.
pub const EV_NO_ACTION: u32 = 3;
/// The marker that an excerpt puts in place of the rest of an event's data; the length of the
/// original data follows (little-endian, 32 bits).
pub const CUT: &[u8] = b"\0Firstlight cut\0";
const SPEC_ID: &[u8] = b"Spec ID Event03\0";
/// Maximum number of algorithms; no TPM has this many banks.
const MAX_ALGORITHMS: u32 = 8;

/// A log, borrowed from its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventLog<'a> {
    /// The banks with their digest lengths in bytes, by TPM_ALG_ID.
    pub banks: Vec<(u16, usize)>,
    /// Whether the log is crypto-agile; else it is a legacy log.
    pub is_agile: bool,
    /// The events.
    pub events: Vec<LogEntry<'a>>,
    /// The bytes after the last event: padding, or a truncated event.
    pub rest: &'a [u8],
}

/// One entry, borrowed from the bytes of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogEntry<'a> {
    /// The PCR that was extended.
    pub pcr: u32,
    /// The type of the event (§10.4.1).
    pub kind: u32,
    /// The digest with which the SHA-256 bank was extended; `None` if the log does not have it.
    pub sha256: Option<&'a [u8; 32]>,
    /// The data of the event.
    pub data: &'a [u8],
    /// All digests as the log has them: TPML_DIGEST_VALUES, or one SHA-1 digest.
    pub digests: &'a [u8],
}

impl<'a> LogEntry<'a> {
    /// Returns the data without the marker of [`super::excerpt`], and the original length of the
    /// data in bytes.
    pub fn uncut(&self) -> (&'a [u8], usize) {
        let cut = || {
            let (data, len) = self.data.split_last_chunk::<4>()?;
            Some((data.strip_suffix(CUT)?, u32::from_le_bytes(*len) as usize))
        };
        cut().unwrap_or((self.data, self.data.len()))
    }
}

/// Returns the log with its entries up to the first entry that cannot be parsed, or to its padding.
pub fn parse(log: &[u8]) -> EventLog<'_> {
    let mut parsed = EventLog {
        banks: vec![(SHA1, 20)],
        is_agile: false,
        events: vec![],
        rest: log,
    };
    // zeros would parse as an event of PCR 0, so no entry may begin after the last byte that is not
    // zero
    let zeros = log.iter().rev().take_while(|byte| **byte == 0).count();
    while parsed.rest.len() > zeros {
        let mut reader = Reader(parsed.rest);
        let event = if parsed.is_agile {
            agile_event(&mut reader, &parsed.banks)
        } else {
            old_event(&mut reader)
        };
        let Some(event) = event else { break };
        parsed.rest = reader.0;
        // the header always has the legacy SHA-1 form, and says whether the other entries have this
        // form, too
        let spec = event.data.strip_prefix(SPEC_ID);
        if let (true, EV_NO_ACTION, Some(spec)) = (parsed.events.is_empty(), event.kind, spec) {
            parsed.is_agile = true;
            parsed.banks = algorithms(&mut Reader(spec)).unwrap_or_default();
        }
        parsed.events.push(event);
    }
    parsed
}

/// Reads the data of an event.
fn data<'a>(reader: &mut Reader<'a>) -> Option<&'a [u8]> {
    let len = reader.u32_le()?;
    reader.take(len as usize)
}

/// Reads a TCG_PCClientPCREvent.
fn old_event<'a>(reader: &mut Reader<'a>) -> Option<LogEntry<'a>> {
    let (pcr, kind) = (reader.u32_le()?, reader.u32_le()?);
    Some(LogEntry {
        pcr,
        kind,
        sha256: None,
        digests: reader.take(20)?,
        data: data(reader)?,
    })
}

/// Reads the digest lengths by TPM_ALG_ID: TCG_EfiSpecIDEvent after its signature.
fn algorithms(reader: &mut Reader<'_>) -> Option<Vec<(u16, usize)>> {
    reader.take(4 + 1 + 1 + 1 + 1)?; // class of platform, version, errata, size of a UINTN
    let count = reader.u32_le().filter(|count| *count <= MAX_ALGORITHMS)?;
    (0..count)
        .map(|_| Some((reader.u16_le()?, reader.u16_le()?.into())))
        .collect()
}

/// Reads a TPMT_HA.
fn digest<'a>(reader: &mut Reader<'a>, banks: &[(u16, usize)]) -> Option<(u16, &'a [u8])> {
    let bank = reader.u16_le()?;
    let (_, len) = banks.iter().find(|(known, _)| *known == bank)?;
    Some((bank, reader.take(*len)?))
}

/// Reads a TCG_PCR_EVENT2.
fn agile_event<'a>(reader: &mut Reader<'a>, banks: &[(u16, usize)]) -> Option<LogEntry<'a>> {
    let (pcr, kind) = (reader.u32_le()?, reader.u32_le()?);
    let start = reader.0;
    let count = reader
        .u32_le()
        .filter(|count| (1..=MAX_ALGORITHMS).contains(count))?;
    let mut sha256 = None;
    for _ in 0..count {
        let (bank, digest) = digest(reader, banks)?;
        if bank == SHA256 {
            sha256 = digest.try_into().ok();
        }
    }
    Some(LogEntry {
        pcr,
        kind,
        sha256,
        digests: &start[..start.len() - reader.0.len()],
        data: data(reader)?,
    })
}
