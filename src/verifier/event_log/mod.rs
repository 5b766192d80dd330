//! Explains a register by the event log of a machine ([`attest::event_log`]). The log is not
//! signed. It is trustworthy only if a replay gives the quoted values, and even then nothing proves
//! the types of its events, or data that has no digest in its event. It explains a value to a
//! person, and never decides whether a value is accepted. Only [`crate::gcp_sev_es`] and
//! [`secure_boot`] read from it what a register contains.

use std::borrow::Cow;
pub mod secure_boot;

use std::fmt::Write;

pub use attest::event_log::*;

use crate::{hex, phases, sha256};
use base::bytes::Reader;

const STARTUP_LOCALITY: &[u8] = b"StartupLocality\0";
/// PCRs of the dynamic root of trust, whose initial value is all ones ("TCG PC Client Platform TPM
/// Profile", §4.6.2).
pub const DYNAMIC: std::ops::RangeInclusive<u32> = 17..=22;
/// Maximum number of entries in an explanation.
const SHOWN_ENTRIES: usize = 12;
const SHOWN_TEXT: usize = 48;

/// Returns the digest with which an event of a log extended a bank; `None` if the log does not have
/// it.
pub fn digest_of<'a>(log: &EventLog<'a>, event: &LogEntry<'a>, bank: u16) -> Option<&'a [u8]> {
    if !log.is_agile {
        return (bank == SHA1).then_some(event.digests);
    }
    // the number of digests; then each TPMT_HA: the bank and the digest
    let mut reader = Reader(event.digests.get(4..)?);
    loop {
        let of = reader.u16_le()?;
        let (_, len) = log.banks.iter().find(|(known, _)| *known == of)?;
        let digest = reader.take(*len)?;
        if of == bank {
            return Some(digest);
        }
    }
}

/// Returns the name of a bank by its TPM_ALG_ID ("TCG Algorithm Registry", §5.2).
pub fn bank_name(bank: u16) -> Cow<'static, str> {
    match bank {
        SHA1 => "SHA-1".into(),
        SHA256 => "SHA-256".into(),
        0x0c => "SHA-384".into(),
        0x0d => "SHA-512".into(),
        0x12 => "SM3-256".into(),
        0x27 => "SHA3-256".into(),
        0x28 => "SHA3-384".into(),
        0x29 => "SHA3-512".into(),
        other => format!("algorithm {other:#x}").into(),
    }
}

/// Returns the names of a log's banks.
pub fn bank_names(log: &[u8]) -> String {
    let names = parse(log)
        .banks
        .into_iter()
        .map(|(bank, _)| bank_name(bank));
    names.collect::<Vec<_>>().join(", ")
}

/// Explains the value of a PCR: returns the log entries and systemd's texts that give it, or says
/// that the log does not explain it. Then compares with systemd's texts that give the expected
/// value.
pub fn explain(log: &[u8], pcr: u32, value: &[u8], expected: &[u8]) -> String {
    let events = events_of(log, pcr);
    let has_sha256 = parse(log).banks.iter().any(|(bank, _)| *bank == SHA256);
    if !events.is_empty() && !has_sha256 {
        let banks = bank_names(log);
        return format!(
            "the event log does not explain it: it has digests of {banks}, and none of SHA-256"
        );
    }
    let start = replay(pcr, &events);
    let words_to = |value: &[u8]| phases::between(pcr, start.as_ref()?, value);
    let (got, wanted) = (words_to(value), words_to(expected));
    let measured = explain_entries(&events, got.is_some());
    match (got, wanted) {
        (Some(got), Some(wanted)) => format!(
            "{measured}; then by systemd: {}; the policy expects {} of systemd",
            list_words(&got),
            list_words(&wanted)
        ),
        (Some(got), None) if !got.is_empty() => {
            format!("{measured}; then by systemd: {}", list_words(&got))
        }
        (Some(_), None) => measured,
        (None, _) => match compare(pcr, value, expected) {
            Some(difference) => format!("{measured}; {difference}"),
            None => measured,
        },
    }
}

/// Returns the difference of two values as texts that systemd measures; `None` if the difference
/// has another cause.
fn compare(pcr: u32, value: &[u8], expected: &[u8]) -> Option<String> {
    if let Some(more) = phases::between(pcr, expected.try_into().ok()?, value) {
        let more = list_words(&more);
        return Some(format!(
            "systemd has measured {more}, which the policy does not expect"
        ));
    }
    let less = phases::between(pcr, value.try_into().ok()?, expected)?;
    let less = list_words(&less);
    Some(format!(
        "systemd has not measured {less}, which the policy expects"
    ))
}

/// Returns the locality at which PCR 0 starts, if an event contains it
/// (TCG_EfiStartupLocalityEvent). It counts only before the first extension of PCR 0.
pub fn startup_locality(event: &LogEntry<'_>) -> Option<u8> {
    let is_of_start = event.kind == EV_NO_ACTION && event.pcr == 0;
    match event.data.strip_prefix(STARTUP_LOCALITY) {
        Some([locality]) if is_of_start => Some(*locality),
        _ => None,
    }
}

/// Returns the value that a PCR of this boot had in the initramfs; `None` if the log and systemd's
/// texts do not explain its present value.
pub fn value_in_initramfs(log: &[u8], pcr: u32, value: &[u8]) -> Option<[u8; 32]> {
    let start = replay(pcr, &events_of(log, pcr))?;
    let words = phases::between(pcr, &start, value)?;
    Some(phases::in_initramfs(&start, &words))
}

/// Returns the value that a PCR with this value in the initramfs has in the booted system of the
/// same boot; `None` if the log and systemd's texts do not explain its present value.
pub fn value_when_booted(log: &[u8], pcr: u32, value: &[u8]) -> Option<[u8; 32]> {
    let now = value.try_into().ok()?;
    phases::when_booted(pcr, &now, || {
        let start = replay(pcr, &events_of(log, pcr))?;
        phases::between(pcr, &start, value)
    })
}

fn list_words(words: &[&str]) -> String {
    match words {
        [] => "nothing".into(),
        words => words.join(", "),
    }
}

fn events_of(log: &[u8], pcr: u32) -> Vec<LogEntry<'_>> {
    let mut events = parse(log).events;
    events.retain(|event| event.pcr == pcr);
    events
}

/// Returns the events of a PCR if their replay gives this SHA-256 value.
pub fn replayed<'a>(log: &'a [u8], pcr: u32, value: &[u8]) -> Option<Vec<LogEntry<'a>>> {
    let events = events_of(log, pcr);
    let is_value = replay(pcr, &events).is_some_and(|replayed| replayed == value);
    is_value.then_some(events)
}

/// Returns the events with which a PCR was extended, if their replay, and texts of systemd after them, give this SHA-256 value.
pub fn explaining<'a>(log: &'a [u8], pcr: u32, value: &[u8]) -> Option<Vec<LogEntry<'a>>> {
    let mut events = events_of(log, pcr);
    phases::between(pcr, &replay(pcr, &events)?, value)?;
    events.retain(|event| event.kind != EV_NO_ACTION);
    Some(events)
}

fn explain_entries(events: &[LogEntry<'_>], explained: bool) -> String {
    let measured: Vec<_> = events
        .iter()
        .filter(|event| event.kind != EV_NO_ACTION && !is_only_name(event))
        .collect();
    match (explained, measured.is_empty()) {
        (true, true) => "measured into it: nothing".into(),
        (true, false) => format!("measured into it: {}", list(&measured)),
        (false, true) => "the event log does not explain it".into(),
        (false, false) => format!(
            "the event log does not explain it, but has {}",
            list(&measured)
        ),
    }
}

/// Returns whether an entry only announces another one: systemd-stub measures the name of a section
/// before its content.
fn is_only_name(event: &LogEntry) -> bool {
    let name: Vec<u8> = event.data.iter().step_by(2).copied().collect();
    name.len() > 1 && event.sha256 == Some(&sha256(&[&name]))
}

fn list(events: &[&LogEntry]) -> String {
    let mut text = String::new();
    for (number, event) in events.iter().take(SHOWN_ENTRIES).enumerate() {
        let digest = event.sha256.map_or("?".into(), |digest| hex(&digest[..4]));
        let separator = if number == 0 { "" } else { ", " };
        // writing to a String cannot fail
        let _ = write!(
            text,
            "{separator}{} {digest}..{}",
            kind_name(event.kind),
            describe(event)
        );
    }
    if events.len() > SHOWN_ENTRIES {
        let _ = write!(text, " and {} more", events.len() - SHOWN_ENTRIES);
    }
    text
}

/// Returns the SHA-256 value after a replay of the entries of a PCR; `None` if an entry lacks the
/// digest.
fn replay(pcr: u32, events: &[LogEntry]) -> Option<[u8; 32]> {
    let mut value = if DYNAMIC.contains(&pcr) {
        [0xff; 32]
    } else {
        [0; 32]
    };
    let mut is_extended = false;
    for event in events {
        if event.kind != EV_NO_ACTION {
            value = sha256(&[&value, event.sha256?]);
            is_extended = true;
        } else if let Some(locality) = startup_locality(event).filter(|_| !is_extended) {
            value[31] = locality;
        }
    }
    Some(value)
}

/// Returns the name of an event's type.
pub fn kind_name(kind: u32) -> Cow<'static, str> {
    let name = match kind {
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
        _ => return format!("type {kind:#x}").into(),
    };
    name.into()
}

/// Returns the longest run of printable ASCII in the data of an entry, or in the name of its
/// variable, as single bytes or UTF-16; empty if it is too short.
fn describe(event: &LogEntry) -> String {
    let (data, len) = event.uncut();
    let end = if len > data.len() { " (cut)" } else { "" };
    let variable = variable_name(event.kind, data);
    let (data, shortest) = variable.map_or((data, 4), |name| (name, 2));
    let wide: Vec<u8> = data.iter().step_by(2).copied().collect();
    let longest = |bytes: &[u8]| -> String {
        let runs = bytes.split(|byte| !(0x20..0x7f).contains(byte));
        let run = runs.max_by_key(|run| run.len()).unwrap_or_default();
        run.iter()
            .take(SHOWN_TEXT)
            .map(|byte| char::from(*byte))
            .collect()
    };
    let (narrow, wide) = (longest(data), longest(&wide));
    let best = if wide.len() > narrow.len() {
        wide
    } else {
        narrow
    };
    if best.len() < shortest {
        end.into()
    } else {
        format!(" {best:?}{end}")
    }
}

/// Returns the name in UEFI_VARIABLE_DATA (§10.2.6), in UTF-16.
fn variable_name(kind: u32, data: &[u8]) -> Option<&[u8]> {
    let is_variable = matches!(kind, 0x8000_0001 | 0x8000_0002 | 0x8000_00e0);
    let len = usize::from(*data.get(16).filter(|_| is_variable)?);
    data.get(32..)?.get(..len * 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{excerpt::excerpt, unhex};

    #[test]
    fn a_type_without_a_name_has_its_number() {
        for (kind, name) in [
            (0x4, "EV_SEPARATOR"),
            (0x8401, "type 0x8401"),
            (0x8000_00e2, "type 0x800000e2"),
        ] {
            assert_eq!(kind_name(kind), name);
        }
    }
    #[test]
    fn a_log_without_sha_256_names_its_banks() {
        let head = |pcr: u32, kind: u32| [pcr.to_le_bytes(), kind.to_le_bytes()].concat();
        for (bank, name) in [
            (0x12u16, "SM3-256"),
            (0x0c, "SHA-384"),
            (0x77, "algorithm 0x77"),
        ] {
            let id = [bank.to_le_bytes(), 32u16.to_le_bytes()].concat();
            let spec = [
                &b"Spec ID Event03\0"[..],
                &[0; 4],
                &[0, 2, 0, 2, 1, 0, 0, 0],
                &id,
                &[0],
            ]
            .concat();
            let len = (spec.len() as u32).to_le_bytes();
            let header = [&head(0, EV_NO_ACTION)[..], &[0; 20], &len, &spec].concat();
            let digest = [&1u32.to_le_bytes()[..], &bank.to_le_bytes(), &[7; 32]].concat();
            let event = [&head(4, 5)[..], &digest, &4u32.to_le_bytes(), b"text"].concat();
            let log = [header, event].concat();
            let expected = format!(
                "the event log does not explain it: it has digests of {name}, and none of SHA-256"
            );
            assert_eq!(explain(&log, 4, &[1; 32], &[2; 32]), expected);
            // a register without events has its value at the start
            assert_eq!(
                explain(&log, 8, &[0; 32], &[2; 32]),
                "measured into it: nothing"
            );
        }
    }

    use support::mutation::mutations;

    /// From OVMF and the EFI stub of Linux 6.1 in QEMU, with kernel, command line and initrd from
    /// `-kernel` and related options.
    const LOG: &[u8] = include_bytes!("../../../tests/data/event-log-ovmf.bin");
    /// From OVMF and systemd-stub 259.5 of Ubuntu 26.04, with loader/credentials/nvpcr-anchor.debian.cred
    /// on the EFI system partition.
    const WITH_CREDENTIAL: &[u8] = include_bytes!("../../../tests/data/event-log-stub-259.bin");

    #[test]
    fn a_credential_beside_the_image_is_named() {
        let events = events_of(WITH_CREDENTIAL, 12);
        let value = replay(12, &events).unwrap();
        let text = explain(WITH_CREDENTIAL, 12, &value, &[0; 32]);
        let expected = "measured into it: EV_IPL 2f473188.. \"Global credentials initrd\"";
        assert_eq!(text, expected);
        assert_eq!(
            explain(WITH_CREDENTIAL, 13, &[0; 32], &[1; 32]),
            "measured into it: nothing"
        );
    }
    /// From SeaBIOS in QEMU, with the values of PCRs 0 to 15 (`/sys/class/tpm/tpm0/pcr-sha256`) in
    /// the same boot.
    const SEABIOS: &[u8] = include_bytes!("../../../tests/data/event-log-seabios.bin");
    const SEABIOS_PCRS: &str = include_str!("../../../tests/data/event-log-seabios.pcrs");

    #[test]
    fn a_log_leads_to_the_registers_of_its_boot() {
        for line in SEABIOS_PCRS.lines() {
            let (pcr, value) = line.split_once(' ').unwrap();
            let pcr = pcr.parse().unwrap();
            let events = events_of(SEABIOS, pcr);
            // the kernel's IMA extends PCR 10 and has its own log
            if pcr != 10 {
                assert_eq!(hex(&replay(pcr, &events).unwrap()), value, "PCR {pcr}");
            }
        }
    }

    #[test]
    fn digests_are_as_long_as_the_header_says() {
        // SHA3-256 (0x0027), which this program does not know, and SHA-256
        let spec = b"Spec ID Event03\0\0\0\0\0\0\x02\0\x02\x02\0\0\0\x27\0\x20\0\x0b\0\x20\0\0";
        let header = [
            &[0, 0, 0, 0, 3, 0, 0, 0][..],
            &[0; 20],
            &[spec.len() as u8, 0, 0, 0],
            spec,
        ]
        .concat();
        let digests = [&[0x27, 0][..], &[7; 32], &[0x0b, 0], &[8; 32]].concat();
        let entry = [
            &[4, 0, 0, 0, 13, 0, 0, 0, 2, 0, 0, 0][..],
            &digests,
            &[5, 0, 0, 0],
            b"image",
        ]
        .concat();
        let log = [header, entry.clone(), entry].concat();
        assert_eq!(parse(&log).events.len(), 3);
        let value = sha256(&[&sha256(&[&[0; 32], &[8; 32]]), &[8; 32]]);
        let text = explain(&log, 4, &value, &[1; 32]);
        assert_eq!(
            text,
            "measured into it: EV_IPL 08080808.. \"image\", EV_IPL 08080808.. \"image\""
        );
    }

    #[test]
    fn registers_start_where_the_platform_starts_them() {
        assert_eq!(replay(17, &[]), Some([0xff; 32]));
        assert_eq!(replay(16, &[]), Some([0; 32]));
        let locality = LogEntry {
            pcr: 0,
            kind: EV_NO_ACTION,
            sha256: None,
            digests: &[],
            data: b"StartupLocality\0\x03",
        };
        assert_eq!(replay(0, std::slice::from_ref(&locality)).unwrap()[31], 3);
        // no other PCR starts with a locality, and it cannot change later
        let elsewhere = LogEntry {
            pcr: 9,
            ..locality.clone()
        };
        assert_eq!(replay(9, &[elsewhere]), Some([0; 32]));
        let extension = LogEntry {
            kind: 0xd,
            sha256: Some(&[7; 32]),
            ..locality.clone()
        };
        let extended = sha256(&[&[0; 32], &[7; 32]]);
        assert_eq!(replay(0, &[extension, locality]), Some(extended));
    }

    #[test]
    fn a_firmware_log_replays_to_the_value_that_it_explains() {
        let of_9 = events_of(LOG, 9);
        let value = replay(9, &of_9).unwrap();
        let text = explain(LOG, 9, &value, &[1; 32]);
        assert!(
            text.contains("EV_EVENT_TAG")
                && text.contains("Linux initrd")
                && text.contains("LoadOptions"),
            "{text}"
        );
        let of_4 = events_of(LOG, 4);
        let text = explain(LOG, 4, &replay(4, &of_4).unwrap(), &[1; 32]);
        assert!(
            text.contains("Calling EFI Application from Boot Option") && text.contains("kernel"),
            "{text}"
        );
    }

    #[test]
    fn a_value_that_the_log_does_not_give_is_not_explained() {
        let text = explain(LOG, 9, &[1; 32], &[2; 32]);
        assert!(
            text.starts_with("the event log does not explain it, but has EV_EVENT_TAG "),
            "{text}"
        );
        assert_eq!(
            explain(b"", 9, &[1; 32], &[2; 32]),
            "the event log does not explain it"
        );
        assert_eq!(
            explain(LOG, 14, &[0; 32], &[2; 32]),
            "measured into it: nothing"
        );
    }

    /// Returns the value of PCR 11 of `LOG` after systemd measured these texts.
    fn pcr_11_after(words: &[&str]) -> [u8; 32] {
        let start = replay(11, &events_of(LOG, 11)).unwrap();
        let digest = |word: &str| sha256(&[word.as_bytes()]);
        words
            .iter()
            .fold(start, |value, word| sha256(&[&value, &digest(word)]))
    }

    const BOOTED: &[&str] = &["enter-initrd", "leave-initrd", "sysinit", "ready"];

    #[test]
    fn the_phases_of_systemd_are_named_that_are_missing_or_too_many() {
        let (initramfs, booted) = (pcr_11_after(&BOOTED[..1]), pcr_11_after(BOOTED));
        assert_eq!(
            explain(LOG, 11, &booted, &initramfs),
            "measured into it: nothing; then by systemd: enter-initrd, leave-initrd, sysinit, ready; \
             the policy expects enter-initrd of systemd"
        );
        // a log that does not give the value, for example because the document had no room for all
        // of it
        let other = sha256(&[&[1; 32], &sha256(&[b"enter-initrd"])]);
        assert_eq!(
            explain(LOG, 11, &other, &[1; 32]),
            "the event log does not explain it; systemd has measured enter-initrd, which the policy does not expect"
        );
        assert_eq!(
            explain(LOG, 11, &[1; 32], &other),
            "the event log does not explain it; systemd has not measured enter-initrd, which the policy expects"
        );
    }

    #[test]
    fn a_booted_machine_knows_the_value_of_its_initramfs() {
        let initramfs = pcr_11_after(&BOOTED[..1]);
        for words in [&BOOTED[..1], &BOOTED[..3], BOOTED] {
            assert_eq!(
                value_in_initramfs(LOG, 11, &pcr_11_after(words)),
                Some(initramfs)
            );
        }
        assert_eq!(value_in_initramfs(LOG, 11, &[1; 32]), None);
    }

    #[test]
    fn an_initramfs_knows_the_value_of_its_booted_system() {
        let booted = pcr_11_after(BOOTED);
        assert_eq!(
            value_when_booted(LOG, 11, &pcr_11_after(&BOOTED[..1])),
            Some(booted)
        );
        // no phase of the initramfs was measured, so it is unknown whether later phases will be
        assert_eq!(value_when_booted(LOG, 11, &pcr_11_after(&[])), None);
        assert_eq!(value_when_booted(LOG, 11, &[1; 32]), None);
        // systemd no longer extends it
        assert_eq!(value_when_booted(b"", 4, &[1; 32]), Some([1; 32]));
    }

    #[test]
    fn a_register_is_explained_by_an_excerpt_too() {
        let mut excerpts = (0..LOG.len()).map(|max| excerpt(LOG, max));
        let shortest = excerpts.find(|excerpt| !excerpt.is_empty()).unwrap();
        let pcr_4 = "3158b022960960c9ad14ff0cdd54078f7a864752cf1df3ac7786eed7ff2d0471";
        assert_eq!(
            explain(&shortest, 4, &unhex::<32>(pcr_4).unwrap(), &[2; 32]),
            "measured into it: EV_EFI_BOOT_SERVICES_APPLICATION 19f1811d.. (cut), \
             EV_EFI_ACTION 3d6772b4.. (cut), EV_SEPARATOR df3f6198.."
        );
    }

    #[test]
    fn hostile_logs_end_without_a_panic() {
        for log in mutations(LOG, 2000) {
            for pcr in [0, 4, 9] {
                let _ = explain(&log, pcr, &[0; 32], &[2; 32]);
            }
        }
    }
}
