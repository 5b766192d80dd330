//! The input of `explain`: an event log, and quoted values if the log came with them.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{Algorithm, Context};
use serde::Deserialize;

use super::decode;
use crate::shell::error::Error;
use verifier::event_log::{self, DYNAMIC, EV_NO_ACTION, EventLog, SHA1, SHA256};
use verifier::{phases, systemd_log, variant};

/// TPM_ALG_ID of SHA-384.
const SHA384: u16 = 0x000c;
/// The banks with their names, the best first.
const BANKS: [(u16, &str); 3] = [(SHA256, "SHA-256"), (SHA384, "SHA-384"), (SHA1, "SHA-1")];

/// A log and quoted values, as they were read.
pub struct LogAndQuotes {
    /// Where it came from.
    pub name: String,
    log: Vec<u8>,
    /// systemd's own log.
    systemd: Vec<systemd_log::Record>,
    /// The quoted values by bank and register.
    quoted: BTreeMap<u16, BTreeMap<u32, Vec<u8>>>,
    /// Whether it is a document of a TDX machine without a TPM.
    is_tdx: bool,
}

/// A bank of registers with the events that gave them their values.
pub struct ReplayedBank {
    /// The bank's name.
    pub bank: &'static str,
    /// Whether these are the measurement registers of a TDX guest instead of the PCRs of a TPM.
    pub is_tdx: bool,
    /// The registers by number.
    pub by_number: BTreeMap<u32, ReplayedRegister>,
    /// The length of a register in bytes.
    len: usize,
}

/// A register.
#[derive(Default)]
pub struct ReplayedRegister {
    /// The events that extended it, in order.
    pub events: Vec<Entry>,
    /// The value after a replay of the events; `None` if an event has no digest of this bank.
    pub replayed: Option<Vec<u8>>,
    /// The value that was quoted.
    pub quoted: Option<Vec<u8>>,
}

/// An event that extended a register.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name of its type.
    pub kind: String,
    /// A description of the measured data.
    pub what: String,
    /// The digest with which the register was extended.
    pub digest: Vec<u8>,
}

impl ReplayedRegister {
    /// Returns the register's value: the quoted one, or that of the log.
    pub fn value(&self) -> Option<&[u8]> {
        self.quoted.as_deref().or(self.replayed.as_deref())
    }

    /// Returns whether the events give the value.
    pub fn is_explained(&self) -> bool {
        self.replayed.is_some() && self.value() == self.replayed.as_deref()
    }

    /// Adds systemd's texts that lead from the value after the events to another value, if there
    /// are such texts.
    pub fn add_words_up_to(&mut self, number: u32, value: &[u8]) {
        let replayed = self.replayed.as_deref();
        let Some(start) = replayed.and_then(|value| value.try_into().ok()) else {
            return;
        };
        for word in phases::between(number, start, value).unwrap_or_default() {
            let digest = sha256(word.as_bytes());
            self.extend(Entry {
                kind: "systemd".into(),
                what: format!("phase of the boot: {word}"),
                digest,
            });
        }
    }

    /// Sets the locality at which the register starts, unless an event has already extended it.
    fn start_at(&mut self, locality: u8) {
        let last = self.replayed.as_mut().and_then(|it| it.last_mut());
        if let Some(last) = last.filter(|_| self.events.is_empty()) {
            *last = locality;
        }
    }

    fn extend(&mut self, entry: Entry) {
        let algorithm = match entry.digest.len() {
            20 => &ring::digest::SHA1_FOR_LEGACY_USE_ONLY,
            48 => &ring::digest::SHA384,
            _ => &ring::digest::SHA256,
        };
        let value = self.replayed.take();
        self.replayed = value.map(|value| digest(algorithm, &[&value, &entry.digest]));
        self.events.push(entry);
    }
}

/// The file of `firstlight verify --save`.
#[derive(Deserialize)]
struct Saved {
    document: String,
}

/// The attestation document, as sent in attested TLS.
#[derive(Deserialize)]
struct Document {
    #[serde(rename = "Attestation")]
    attestation: Attestation,
}

#[derive(Deserialize)]
struct Attestation {
    quotes: Vec<Quote>,
    #[serde(default)]
    event_log: String,
}

#[derive(Deserialize)]
struct Quote {
    pcrs: Pcrs,
}

#[derive(Deserialize)]
struct Pcrs {
    hash: u16,
    pcrs: BTreeMap<u32, String>,
}

impl LogAndQuotes {
    /// Reads an event log of firmware or of systemd, or an attestation document. `name` is used in
    /// errors and in the report.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<LogAndQuotes, Error> {
        let mut evidence = LogAndQuotes {
            name: name.into(),
            log: vec![],
            systemd: vec![],
            quoted: BTreeMap::new(),
            is_tdx: false,
        };
        match bytes.trim_ascii_start().first() {
            Some(b'{') => evidence.read_document(bytes)?,
            Some(0x1e) => evidence.systemd = systemd_log::parse(bytes),
            _ => evidence.log = bytes.into(),
        }
        let log = event_log::parse(&evidence.log);
        // a log with only a header explains nothing
        if log.events.len() < 2 && evidence.systemd.is_empty() && evidence.quoted.is_empty() {
            return Err(Error::Content(format!(
                "{name}: it has no events: expected an event log (binary_bios_measurements, CCEL, systemd's \
                 tpm2-measure.log) or an attestation document (JSON)"
            )));
        }
        Ok(evidence)
    }

    fn read_document(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let name = &self.name;
        let decoded = |text: &str| {
            let bytes = STANDARD.decode(text);
            bytes.map_err(|error| format!("{name}: it has wrong base64: {error}"))
        };
        let saved = serde_json::from_slice::<Saved>(bytes);
        let document = saved
            .ok()
            .map(|saved| decoded(&saved.document))
            .transpose()?;
        let bytes = document.as_deref().unwrap_or(bytes);
        if let Some(said) = variant::said(bytes) {
            self.is_tdx = said.registers.values().any(|value| value.len() == 48);
            let bank = if self.is_tdx { SHA384 } else { SHA256 };
            self.quoted.insert(bank, said.registers);
            self.log = said.event_log;
            return Ok(());
        }
        let document: Document = serde_json::from_slice(bytes)
            .map_err(|error| format!("{name}: it is not an attestation document: {error}"))?;
        for Quote { pcrs } in &document.attestation.quotes {
            let values = pcrs.pcrs.iter();
            let values = values.map(|(number, value)| Ok((*number, decoded(value)?)));
            let values: Result<_, Error> = values.collect();
            self.quoted.insert(pcrs.hash, values?);
        }
        self.log = decoded(&document.attestation.event_log)?;
        Ok(())
    }

    /// Returns the number of bytes after the last event and of all bytes, unless the log ends with
    /// an event or with padding.
    pub fn cut(&self) -> Option<(usize, usize)> {
        let rest = event_log::parse(&self.log).rest;
        let is_all = |padding: u8| rest.iter().all(|byte| *byte == padding);
        (!is_all(0) && !is_all(0xff)).then_some((rest.len(), self.log.len()))
    }

    /// Adds the log of systemd on the same machine.
    pub fn and_systemd(&mut self, log: &[u8]) {
        self.systemd.extend(systemd_log::parse(log));
    }

    /// Returns the quoted values of the SHA-256 bank; those of a TDX machine without a TPM are
    /// SHA-384.
    pub fn quoted(&self) -> Option<&BTreeMap<u32, Vec<u8>>> {
        let bank = if self.is_tdx { SHA384 } else { SHA256 };
        self.quoted.get(&bank)
    }

    /// Returns the registers of the best bank that both this evidence and the other have.
    pub fn registers(&self, other: Option<&LogAndQuotes>) -> Result<ReplayedBank, Error> {
        let both = |bank: &u16| self.has(*bank) && other.is_none_or(|other| other.has(*bank));
        let (bank, name) =
            BANKS
                .into_iter()
                .find(|(bank, _)| both(bank))
                .ok_or_else(|| match other {
                    Some(other) => {
                        format!("{} and {} have no bank in common", self.name, other.name)
                    }
                    None => format!(
                        "{}: it has digests of {}, and none of SHA-256, SHA-384 or SHA-1: activate the SHA-256 bank in the settings \
                         of the machine's firmware",
                        self.name,
                        event_log::bank_names(&self.log)
                    ),
                })?;
        Ok(self.of_bank(bank, name))
    }

    fn has(&self, bank: u16) -> bool {
        let log = event_log::parse(&self.log);
        let in_log = log.events.len() > 1 && log.banks.iter().any(|(it, _)| *it == bank);
        in_log || self.quoted.contains_key(&bank) || bank == SHA256 && !self.systemd.is_empty()
    }

    fn of_bank(&self, bank: u16, name: &'static str) -> ReplayedBank {
        let log = event_log::parse(&self.log);
        let is_tdx = self.is_tdx || is_tdx(&log);
        let mut by_number: BTreeMap<u32, ReplayedRegister> = BTreeMap::new();
        for (number, value) in self.quoted.get(&bank).into_iter().flatten() {
            let register = new(*number, value.len());
            let quoted = Some(value.clone());
            by_number.insert(*number, ReplayedRegister { quoted, ..register });
        }
        let len = log.banks.iter().find(|(it, _)| *it == bank);
        let len = len.map_or(32, |(_, len)| *len);
        for event in &log.events {
            if event.kind == EV_NO_ACTION {
                if let Some(locality) = event_log::startup_locality(event) {
                    let register = by_number.entry(event.pcr);
                    let register = register.or_insert_with(|| new(event.pcr, len));
                    register.start_at(locality);
                }
                continue;
            }
            let register = by_number.entry(event.pcr);
            let register = register.or_insert_with(|| new(event.pcr, len));
            let digest = event_log::digest_of(&log, event, bank);
            if digest.is_none() {
                register.replayed = None;
            }
            register.extend(Entry {
                kind: decode::type_name(event.kind),
                what: decode::describe(event),
                digest: digest.unwrap_or_default().into(),
            });
        }
        for record in self.systemd.iter().filter(|_| bank == SHA256) {
            let register = by_number.entry(record.pcr);
            let register = register.or_insert_with(|| new(record.pcr, len));
            register.extend(Entry {
                kind: "systemd".into(),
                what: super::text::plain(&format!("{}: {}", record.kind, record.text)),
                digest: record.sha256.unwrap_or_default().into(),
            });
        }
        for (number, register) in &mut by_number {
            if let Some(quoted) = register.quoted.clone() {
                register.add_words_up_to(*number, &quoted);
            }
        }
        ReplayedBank {
            bank: name,
            is_tdx,
            by_number,
            len,
        }
    }
}

impl ReplayedBank {
    /// Takes a register out. A register without events has its value at the machine's start, unless
    /// a quote omits it.
    pub fn take(&mut self, number: u32) -> ReplayedRegister {
        let is_quoted = self.by_number.values().any(|it| it.quoted.is_some());
        let other = || {
            if is_quoted {
                ReplayedRegister::default()
            } else {
                new(number, self.len)
            }
        };
        self.by_number.remove(&number).unwrap_or_else(other)
    }

    /// Returns the kind of the registers, by which policies number them.
    pub fn kind(&self) -> verifier::Registers {
        if self.is_tdx {
            verifier::Registers::Rtmrs
        } else {
            verifier::Registers::Pcrs
        }
    }

    /// Returns the name of a register.
    pub fn name(&self, number: u32) -> String {
        match (self.is_tdx, number) {
            (false, _) => format!("PCR {number}"),
            (true, 0) => "MRTD".into(),
            (true, _) => format!("RTMR{}", number - 1),
        }
    }
}

/// Returns a register of this length as it is when the machine starts.
fn new(number: u32, len: usize) -> ReplayedRegister {
    let byte = if DYNAMIC.contains(&number) { 0xff } else { 0 };
    ReplayedRegister {
        replayed: Some(vec![byte; len.min(64)]),
        ..ReplayedRegister::default()
    }
}

/// Returns whether a log is from a TDX guest: it has only SHA-384 digests, and extends no register
/// above RTMR3. The log of a TPM has events of PCR 7.
fn is_tdx(log: &EventLog) -> bool {
    let mut events = log.events.iter();
    log.banks == [(SHA384, 48)] && events.all(|event| event.kind == EV_NO_ACTION || event.pcr <= 4)
}

fn sha256(bytes: &[u8]) -> Vec<u8> {
    digest(&ring::digest::SHA256, &[bytes])
}

fn digest(algorithm: &'static Algorithm, parts: &[&[u8]]) -> Vec<u8> {
    let mut context = Context::new(algorithm);
    parts.iter().for_each(|part| context.update(part));
    context.finish().as_ref().into()
}
