//! Event logs of a program without a TPM. A log is not signed. So it decides nothing, and it explains a register only if a replay
//! gives the register's value.

use std::sync::LazyLock;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{SHA256, digest};
use serde_json::Value;
use support::mutation::mutations;
use verifier::event_log::{EV_NO_ACTION, SHA256 as BANK, digest_of, parse};

use crate::{FORGER, NONCE, USER_DATA, demanding, refusal_by};

/// From OVMF and the EFI stub of Linux 6.1 in QEMU, with four banks.
const OVMF: &[u8] = include_bytes!("../data/event-log-ovmf.bin");
/// The log of another machine.
const SEABIOS: &[u8] = include_bytes!("../data/event-log-seabios.bin");
const PCR: u32 = 4;

/// Returns the value of the register after a replay of a log; `None` if an event lacks the digest.
fn replayed(log: &[u8]) -> Option<[u8; 32]> {
    let log = parse(log);
    let mut value = [0; 32];
    for event in &log.events {
        if event.pcr == PCR && event.kind != EV_NO_ACTION {
            let digests = [&value, digest_of(&log, event, BANK)?].concat();
            value.copy_from_slice(digest(&SHA256, &digests).as_ref());
        }
    }
    Some(value)
}

/// The places of an event in the bytes of a crypto-agile log: its start, and its end.
fn places() -> Vec<(usize, usize)> {
    let log = parse(OVMF);
    let start = OVMF.as_ptr() as usize;
    let ends = log
        .events
        .iter()
        .map(|event| event.data.as_ptr() as usize - start + event.data.len());
    let ends: Vec<usize> = ends.collect();
    let starts = [0].into_iter().chain(ends.iter().copied());
    starts.zip(ends.clone()).collect()
}

/// A document of a machine whose register has the value of the genuine log.
static DOCUMENT: LazyLock<Value> = LazyLock::new(|| {
    let mut parts = FORGER.parts(USER_DATA, NONCE);
    parts.values.insert(PCR, replayed(OVMF).unwrap().to_vec());
    serde_json::from_slice(&parts.document()).unwrap()
});

/// Judges the machine with this log: by a policy that requires the value of its register, and by one that requires another value.
fn judge(what: &str, log: &[u8]) {
    let value = replayed(OVMF).unwrap();
    let mut document = DOCUMENT.clone();
    document["Attestation"]["event_log"] = STANDARD.encode(log).into();
    let document = document.to_string().into_bytes();
    assert_eq!(
        refusal_by(demanding(value), what, &document),
        None,
        "{what}"
    );
    let why = refusal_by(demanding([0; 32]), what, &document);
    let why = why.unwrap_or_else(|| panic!("{what}: accepted"));
    let expected = "PCR 4: expected 0000";
    assert!(why.starts_with(expected), "{what}: {why}");
    let is_shown = |byte: u8| byte == b' ' || byte.is_ascii_graphic();
    assert!(
        why.len() < 4096 && why.bytes().all(is_shown),
        "{what}: {why}"
    );
    let explains = replayed(log) == Some(value);
    // no message claims that a log explains the register, if events are missing or different
    let claims = why.contains("measured into it");
    assert_eq!(claims, explains, "{what}: {why}");
    assert!(
        explains || why.contains("the event log does not explain it"),
        "{what}: {why}"
    );
}

#[test]
fn a_log_explains_a_register_only_if_it_gives_its_value_and_never_decides() {
    judge("genuine", OVMF);
    judge("of another machine", SEABIOS);
    judge("two logs", &[OVMF, OVMF].concat());
    judge("no log of events", &OVMF[..places()[0].1]);
    judge("endless bytes", &vec![0xff; 64 << 10]);
    judge("zeros", &vec![0; 64 << 10]);

    // each event with each field altered
    let mut cases = 0;
    let places = places();
    assert!(places.len() > 20, "{}", places.len());
    for (number, (start, end)) in places.iter().copied().enumerate() {
        let event = &OVMF[start..end];
        let with = |event: &[u8]| [&OVMF[..start], event, &OVMF[end..]].concat();
        let field = |at: usize, bytes: &[u8]| {
            let mut altered = event.to_vec();
            altered[at..at + bytes.len()].copy_from_slice(bytes);
            with(&altered)
        };
        for (what, log) in [
            ("left out", with(&[])),
            ("twice", with(&event.repeat(2))),
            ("cut off", OVMF[..start].to_vec()),
            (
                "half of it, and nothing more",
                OVMF[..start + event.len() / 2].to_vec(),
            ),
            ("a byte less", with(&event[..event.len() - 1])),
            ("a byte more", with(&[event, &[0]].concat())),
            ("in another register", field(0, &[5, 0, 0, 0])),
            ("in the register", field(0, &[4, 0, 0, 0])),
            ("in no register", field(0, &[0xff; 4])),
            ("of a type that extends nothing", field(4, &[3, 0, 0, 0])),
            ("of another type", field(4, &[0xff; 4])),
            ("no digest", field(8, &[0; 4])),
            ("endless digests", field(8, &[0xff; 4])),
            ("a bank that does not exist", field(12, &[0xff, 0xff])),
            (
                "at the beginning",
                [event, &OVMF[..start], &OVMF[end..]].concat(),
            ),
        ] {
            judge(&format!("event {number}: {what}"), &log);
            cases += 1;
        }
    }
    // and each byte
    for at in 0..OVMF.len() {
        let mut log = OVMF.to_vec();
        log[at] ^= 1 << (at % 8);
        judge(&format!("byte {at}"), &log);
        cases += 1;
    }
    for (number, log) in mutations(OVMF, 500).enumerate() {
        judge(&format!("mutation {number}"), &log);
        cases += 1;
    }
    assert!(cases > 3000, "{cases}");
}
