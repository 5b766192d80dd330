//! What PCR 7 shows about Secure Boot, by the event log ("TCG PC Client Platform Firmware Profile Specification", §3.3.4.8; UEFI
//! 2.11, §32.4.1).
//!
//! ```text
//! SecureBoot  PK  KEK  db  dbx  ..   what verified drivers of devices   separator   what verified boot loaders, shim's variables
//! ```
//!
//! The log is not signed, and no register covers the types of its events. So a machine is believed only if
//!
//! * the log gives the quoted value of PCR 7;
//! * the data of each event have the event's digest. Only those of dbx may be cut, which are often longer than a document may be;
//!   and old versions of shim have logged one byte more than they measured;
//! * the first variables are those five. Firmware measures them before it starts any driver of a device, so no program can come
//!   before them. It measures a variable again when the variable changes during the boot: such a machine is refused;
//! * the firmware measures nothing else but these and a known text before it starts a boot loader.
//!
//! The data and their place say what an event is, and never its type.

use std::fmt;

use base::bytes::Reader;
use base::der::{DerReader, SEQUENCE};
use base::text::{hex, quoted};
use base::x509::Certificate;

use crate::event_log::{self, LogEntry};
use crate::refusal::{Kind, Refusal};
use crate::sha256;

/// The register.
pub const PCR: u32 = 7;
/// EFI_GLOBAL_VARIABLE (§3.3) and EFI_IMAGE_SECURITY_DATABASE_GUID (§32.6.1), as they are in memory.
const GLOBAL: [u8; 16] = *b"\x61\xdf\xe4\x8b\xca\x93\xd2\x11\xaa\x0d\x00\xe0\x98\x03\x2b\x8c";
const DATABASE: [u8; 16] = *b"\xcb\xb2\x19\xd7\x3a\x3d\x96\x45\xa3\xbc\xda\xd0\x0e\x67\x65\x6f";
/// The first variables, in their order.
const FIRST: [(&str, [u8; 16]); 5] = [
    ("SecureBoot", GLOBAL),
    ("PK", GLOBAL),
    ("KEK", GLOBAL),
    ("db", DATABASE),
    ("dbx", DATABASE),
];
/// Variables that verify no program: what is revoked or old, the mode, and the state of shim.
const NO_SIGNERS: [&str; 11] = [
    "dbx",
    "SBAT",
    "MokListX",
    "dbt",
    "dbr",
    "SetupMode",
    "AuditMode",
    "DeployedMode",
    "SbatLevel",
    "MokListTrusted",
    "MokDBState",
];
/// The variable by which shim verifies nothing.
const SHIM_OFF: &str = "MokSBState";
/// The data of a separator, and those of one after an error of the firmware (§10.4.1).
const SEPARATORS: [[u8; 4]; 2] = [[0; 4], [0xff; 4]];
const FAILED: [u8; 4] = [1, 0, 0, 0];
/// The text of an event by which a firmware lets a debugger in (§10.4.1).
const DEBUGGER: &[u8] = b"UEFI Debug Mode";
/// The text of firmware without protection against devices that read the memory.
const NO_DMA_PROTECTION: &[u8] = b"DMA Protection Disabled";
/// EFI_CERT_X509_GUID and EFI_CERT_SHA256_GUID (UEFI 2.11, §32.4.1), as they are in memory.
const X509: [u8; 16] = *b"\xa1\x59\xc0\xa5\xe4\x94\xa7\x4a\x87\xb5\xab\x15\x5c\x2b\xf0\x72";
const HASH: [u8; 16] = *b"\x26\x16\xc4\xc1\x4c\x50\x92\x40\xac\xa9\x41\xf9\x36\x93\x43\x28";
/// The length of the owner before a signature (EFI_SIGNATURE_DATA), and of the head of a list of them.
const OWNER: usize = 16;
const LIST_HEAD: usize = 28;

/// Secure Boot of a machine on which it is on.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct SecureBoot {
    /// The platform key.
    pub pk: Vec<KeyEntry>,
    /// The key exchange keys.
    pub kek: Vec<KeyEntry>,
    /// What programs are verified by.
    pub db: Vec<KeyEntry>,
    /// What drivers and boot loaders were verified by in this boot.
    pub signers: Vec<KeyEntry>,
}

/// A certificate, or the hash of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyEntry {
    /// SHA-256 of the certificate, or the hash.
    pub id: [u8; 32],
    /// The name in the certificate.
    name: Option<String>,
}

impl fmt::Display for KeyEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let id = hex(&self.id);
        match &self.name {
            Some(name) => write!(f, "the certificate {} (SHA-256 {id})", quoted(name, 80)),
            None => write!(f, "the entry {id}"),
        }
    }
}

impl SecureBoot {
    /// Returns what the log shows about a machine with this value of PCR 7. Refuses one whose Secure Boot is not on, or cannot be
    /// seen.
    pub fn read(log: &[u8], pcr_7: Option<&[u8]>) -> Result<SecureBoot, Refusal> {
        let events = pcr_7.and_then(|value| event_log::explaining(log, PCR, value));
        let events = events.ok_or_else(|| {
            unproven(
                "the event log does not explain PCR 7, so it is unknown whether Secure Boot is on; in the old form of attested TLS a \
                 machine sends no events of PCR 7",
            )
        })?;
        let mut reading = Reading::default();
        for event in &events {
            reading.take(event)?;
        }
        if reading.is_separated {
            Ok(reading.found)
        } else {
            Err(unproven(
                "PCR 7 has no separator, so it is unknown where the part of the firmware ends",
            ))
        }
    }
}

fn unproven(why: impl Into<String>) -> Refusal {
    Kind::Unproven.because(why).of("secureBoot")
}

/// Returns the data that an event has measured, if the log has them.
fn measured<'a>(event: &LogEntry<'a>) -> Option<&'a [u8]> {
    let (_, before) = event.data.split_last().unwrap_or((&0, &[]));
    let mut both = [event.data, before].into_iter();
    both.find(|data| event.sha256 == Some(&sha256(&[data])))
}

/// A state between two events.
#[derive(Default)]
struct Reading {
    found: SecureBoot,
    /// How many of the [`FIRST`] variables have come.
    first: usize,
    is_dbx_cut: bool,
    is_separated: bool,
}

impl Reading {
    fn take(&mut self, event: &LogEntry<'_>) -> Result<(), Refusal> {
        let Some(data) = measured(event) else {
            return self.take_without_data(event);
        };
        // some firmware measures the end of a text, too
        let end = data.iter().rposition(|byte| *byte != 0);
        let text = &data[..end.map_or(0, |last| last + 1)];
        if data == FAILED || text == DEBUGGER {
            return Err(Kind::Protection
                .because("its firmware has measured an error, or lets a debugger in (PCR 7)")
                .of("secureBoot"));
        }
        if SEPARATORS.iter().any(|separator| data == separator) {
            if self.first < FIRST.len() || self.is_separated {
                return Err(unproven(
                    "PCR 7 has a separator before the variables of Secure Boot, or two separators",
                ));
            }
            self.is_separated = true;
            return Ok(());
        }
        match Variable::parse(data) {
            Some(variable) if self.first < FIRST.len() => self.take_first(&variable),
            Some(variable) => self.take_later(&variable),
            // a boot loader that was verified may measure what it likes
            None if self.is_separated || text == NO_DMA_PROTECTION => Ok(()),
            None => Err(unproven(
                "PCR 7 has an event of the firmware that says nothing about Secure Boot as the specification has it",
            )),
        }
    }

    /// Takes an event whose data are not those that were measured.
    fn take_without_data(&mut self, event: &LogEntry<'_>) -> Result<(), Refusal> {
        let (data, len) = event.uncut();
        let is_cut = len > data.len();
        if is_cut && self.first == FIRST.len() - 1 && is_of_dbx(data) {
            self.first += 1;
            self.is_dbx_cut = true;
            return Ok(());
        }
        Err(if is_cut {
            unproven(
                "the event log is too long for its document, which has only a part of an event of PCR 7",
            )
        } else {
            let why = "the event log has other data for an event of PCR 7 than were measured";
            Kind::Binding.because(why).of("secureBoot")
        })
    }

    fn take_first(&mut self, variable: &Variable<'_>) -> Result<(), Refusal> {
        let (name, vendor) = FIRST[self.first];
        if variable.name != name || variable.vendor != vendor {
            let got = quoted(&variable.name, 40);
            return Err(unproven(format!(
                "PCR 7 has the variable {got} where firmware measures {name}"
            )));
        }
        let list = match name {
            "SecureBoot" if variable.contents == [1] => None,
            "SecureBoot" => {
                let refusal = Kind::Measurement.because("Secure Boot is off (PCR 7)");
                let got = hex(&variable.contents[..variable.contents.len().min(8)]);
                return Err(refusal.of("secureBoot.enabled").values("01", got));
            }
            "PK" => Some(&mut self.found.pk),
            "KEK" => Some(&mut self.found.kek),
            "db" => Some(&mut self.found.db),
            _ => None,
        };
        if let Some(list) = list {
            *list = entries(variable.contents).ok_or_else(|| {
                let text = format!("the measured variable {name} is not a list of signatures");
                Kind::Malformed.because(text).of("secureBoot")
            })?;
        }
        self.first += 1;
        Ok(())
    }

    fn take_later(&mut self, variable: &Variable<'_>) -> Result<(), Refusal> {
        let name = variable.name.as_str();
        let is_first = FIRST[..3].iter().any(|(first, _)| *first == name);
        if is_first || name == "db" && variable.vendor != DATABASE {
            return Err(unproven(format!(
                "PCR 7 has the variable {name} where no firmware measures it"
            )));
        }
        // what verified a program is one signature, and no list
        let is_list = || entries(variable.contents).is_some();
        let is_changed = name == "db" || name == "dbx" && self.is_dbx_cut;
        if is_changed && variable.vendor == DATABASE && is_list() {
            return Err(unproven(format!(
                "the variable {name} has changed during this boot (PCR 7): restart the machine"
            )));
        }
        if name == SHIM_OFF && variable.contents.iter().any(|byte| *byte != 0) {
            return Err(Kind::Measurement
                .because(format!(
                    "shim verifies nothing on this machine ({SHIM_OFF} in PCR 7)"
                ))
                .of("secureBoot.enabled"));
        }
        let signer = signer(variable.contents);
        let is_signer = name != SHIM_OFF && !NO_SIGNERS.contains(&name);
        if is_signer && !self.found.signers.contains(&signer) {
            self.found.signers.push(signer);
        }
        Ok(())
    }
}

/// Returns whether the data begin as the variable dbx does.
fn is_of_dbx(data: &[u8]) -> bool {
    let head = [&DATABASE[..], &3_u64.to_le_bytes()].concat();
    let name = data.get(head.len() + 8..head.len() + 14);
    data.starts_with(&head) && name == Some(b"d\0b\0x\0")
}

/// A measured variable (UEFI_VARIABLE_DATA, §10.2.6).
struct Variable<'a> {
    vendor: [u8; 16],
    name: String,
    contents: &'a [u8],
}

impl<'a> Variable<'a> {
    /// Parses a variable. Old versions of shim have measured some more bytes after its contents.
    fn parse(data: &'a [u8]) -> Option<Variable<'a>> {
        let mut reader = Reader(data);
        let vendor = *reader.array()?;
        let (name_len, len) = (reader.u64_le()?, reader.u64_le()?);
        let name = reader.take(usize::try_from(name_len).ok()?.checked_mul(2)?)?;
        let (units, _) = name.as_chunks::<2>();
        let units: Vec<u16> = units.iter().map(|unit| u16::from_le_bytes(*unit)).collect();
        Some(Variable {
            vendor,
            name: String::from_utf16_lossy(&units),
            contents: reader.take(usize::try_from(len).ok()?)?,
        })
    }
}

/// Returns the entries of a variable: EFI_SIGNATURE_LISTs.
pub fn entries(lists: &[u8]) -> Option<Vec<KeyEntry>> {
    let mut reader = Reader(lists);
    let mut all = vec![];
    while !reader.0.is_empty() {
        let kind: [u8; 16] = *reader.array()?;
        let len = reader.u32_le()? as usize;
        let (header, each) = (reader.u32_le()? as usize, reader.u32_le()? as usize);
        let list = reader.take(len.checked_sub(LIST_HEAD)?)?;
        let signatures = list
            .get(header..)?
            .chunks_exact(Some(each).filter(|it| *it > OWNER)?);
        if !signatures.remainder().is_empty() {
            return None;
        }
        all.extend(signatures.map(|signature| entry(&kind, &signature[OWNER..])));
    }
    Some(all)
}

fn entry(kind: &[u8; 16], signature: &[u8]) -> KeyEntry {
    match (*kind, <[u8; 32]>::try_from(signature)) {
        (HASH, Ok(id)) => KeyEntry { id, name: None },
        (X509, _) => certificate(signature),
        _ => other(signature),
    }
}

/// Returns an entry of another kind: its SHA-256.
fn other(bytes: &[u8]) -> KeyEntry {
    let id = sha256(&[bytes]);
    KeyEntry { id, name: None }
}

fn certificate(der: &[u8]) -> KeyEntry {
    let parsed = Certificate::parse(der).ok();
    KeyEntry {
        id: sha256(&[der]),
        name: parsed.and_then(|it| it.common_name().map(str::to_owned)),
    }
}

/// Returns what verified a program: firmware measures an EFI_SIGNATURE_DATA, shim a certificate without an owner.
fn signer(contents: &[u8]) -> KeyEntry {
    let is_certificate = |der: &[u8]| {
        let mut reader = DerReader::new(der);
        reader.expect(SEQUENCE).is_ok() && reader.is_empty()
    };
    let owned = contents.get(OWNER..).unwrap_or_default();
    if is_certificate(owned) {
        certificate(owned)
    } else if is_certificate(contents) {
        certificate(contents)
    } else if owned.len() == 32 {
        entry(&HASH, owned)
    } else {
        other(contents)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attest::excerpt::excerpt;
    use base::der::element;
    use support::mutation::mutations;

    use crate::policy::secure_boot::SecureBootRequirements;

    /// From OVMF in QEMU, which has no keys.
    const OVMF: &[u8] = include_bytes!("../../../tests/data/event-log-ovmf.bin");
    const DRIVER_CONFIG: u32 = 0x8000_0001;
    const AUTHORITY: u32 = 0x8000_00e0;
    const SHIM: [u8; 16] = [0x50; 16];

    /// An event of PCR 7: its type, its data, and what was measured.
    #[derive(Clone)]
    struct Event(u32, Vec<u8>, [u8; 32]);

    fn event(kind: u32, data: &[u8]) -> Event {
        Event(kind, data.into(), sha256(&[data]))
    }

    fn variable(kind: u32, vendor: [u8; 16], name: &str, contents: &[u8]) -> Event {
        let utf_16: Vec<u8> = name.encode_utf16().flat_map(u16::to_le_bytes).collect();
        let [name_len, len] = [name.len(), contents.len()].map(|len| (len as u64).to_le_bytes());
        let data = [&vendor[..], &name_len, &len, &utf_16, contents].concat();
        event(kind, &data)
    }

    fn certificate_of(name: &str) -> Vec<u8> {
        element(SEQUENCE, &[name.as_bytes()])
    }

    fn id(name: &str) -> [u8; 32] {
        sha256(&[&certificate_of(name)])
    }

    /// Returns an EFI_SIGNATURE_LIST with one signature.
    fn list(kind: [u8; 16], signature: &[u8]) -> Vec<u8> {
        let each = (OWNER + signature.len()) as u32;
        let lengths = [LIST_HEAD as u32 + each, 0, each].map(u32::to_le_bytes);
        [&kind[..], &lengths.concat(), &[9; OWNER], signature].concat()
    }

    fn authority(vendor: [u8; 16], name: &str, contents: &[&[u8]]) -> Event {
        variable(AUTHORITY, vendor, name, &contents.concat())
    }

    /// Returns the events of a machine with Secure Boot, an option ROM, and shim.
    fn good() -> Vec<Event> {
        let of_key = |name| list(X509, &certificate_of(name));
        let db = [of_key("db 1"), of_key("db 2"), list(HASH, &[7; 32])].concat();
        let config =
            |vendor, name, contents: &[u8]| variable(DRIVER_CONFIG, vendor, name, contents);
        vec![
            config(GLOBAL, "SecureBoot", &[1]),
            config(GLOBAL, "PK", &of_key("pk")),
            config(GLOBAL, "KEK", &of_key("kek")),
            config(DATABASE, "db", &db),
            config(DATABASE, "dbx", &list(HASH, &[8; 32]).repeat(200)),
            event(0x8000_0007, b"DMA Protection Disabled"),
            authority(DATABASE, "db", &[&[9; OWNER], &certificate_of("db 1")]),
            event(4, &[0; 4]),
            authority(DATABASE, "db", &[&[9; OWNER], &[7; 32]]),
            authority(SHIM, "SbatLevel", &[b"sbat,1,2021030218\n"]),
            authority(SHIM, "MokSBState", &[&[0]]),
            authority(SHIM, "Shim", &[&certificate_of("shim")]),
            authority(SHIM, "Shim", &[&certificate_of("shim")]),
        ]
    }

    /// Returns a log with these events, and the value of PCR 7 that they give.
    fn log(events: &[Event]) -> (Vec<u8>, [u8; 32]) {
        let head = |pcr: u32, kind: u32| [pcr.to_le_bytes(), kind.to_le_bytes()].concat();
        let sized = |data: &[u8]| [&(data.len() as u32).to_le_bytes()[..], data].concat();
        let spec = b"Spec ID Event03\0\0\0\0\0\0\x02\0\x02\x01\0\0\0\x0b\0\x20\0\0";
        let mut log = [&head(0, 3)[..], &[0; 20], &sized(spec)].concat();
        let mut value = [0; 32];
        for Event(kind, data, digest) in events {
            let digests = [&[1, 0, 0, 0, 0x0b, 0][..], digest].concat();
            log.extend([head(7, *kind), digests, sized(data)].concat());
            value = sha256(&[&value, digest]);
        }
        (log, value)
    }

    fn read(events: &[Event]) -> Result<SecureBoot, Refusal> {
        let (log, value) = log(events);
        SecureBoot::read(&log, Some(&value))
    }

    #[test]
    fn the_keys_and_what_verified_a_program_are_read() {
        let found = read(&good()).unwrap();
        let ids = |entries: &[KeyEntry]| entries.iter().map(|it| it.id).collect::<Vec<_>>();
        assert_eq!(ids(&found.pk), [id("pk")]);
        assert_eq!(ids(&found.kek), [id("kek")]);
        assert_eq!(ids(&found.db), [id("db 1"), id("db 2"), [7; 32]]);
        assert_eq!(ids(&found.signers), [id("db 1"), [7; 32], id("shim")]);
        // after a system with systemd-pcrosseparator has started
        let (log, value) = log(&good());
        let later = sha256(&[&value, &sha256(&[b"os-separator"])]);
        assert_eq!(SecureBoot::read(&log, Some(&later)).unwrap(), found);
        // no register covers the types
        let mut other = good();
        other.iter_mut().for_each(|event| event.0 = 5);
        assert_eq!(read(&other).unwrap(), found);
    }

    #[test]
    fn a_machine_is_refused_by_what_its_events_show() {
        type Change = fn(&mut Vec<Event>);
        let off = |contents: &[u8]| variable(DRIVER_CONFIG, GLOBAL, "SecureBoot", contents);
        assert!(read(&[]).is_err());
        for contents in [&[0][..], &[], &[1, 0]] {
            let mut events = good();
            events[0] = off(contents);
            let error = read(&events).unwrap_err();
            assert_eq!(error.kind, Kind::Measurement);
            assert!(error.text.contains("Secure Boot is off"), "{error}");
            // a program has extended the register with the events of a machine on which it is on
            events.extend(good());
            assert!(read(&events).unwrap_err().text.contains("is off"));
        }
        let cases: [(Change, Kind, &str); 19] = [
            (
                |it| drop(it.remove(0)),
                Kind::Unproven,
                "where firmware measures SecureBoot",
            ),
            (
                |it| it.swap(1, 2),
                Kind::Unproven,
                "the variable \"KEK\" where firmware measures PK",
            ),
            (
                |it| it.insert(0, good()[6].clone()),
                Kind::Unproven,
                "where firmware measures SecureBoot",
            ),
            (
                |it| it.push(it[0].clone()),
                Kind::Unproven,
                "variable SecureBoot where no firmware",
            ),
            (
                |it| it.push(it[2].clone()),
                Kind::Unproven,
                "variable KEK where no firmware",
            ),
            (
                |it| it[0] = variable(DRIVER_CONFIG, DATABASE, "SecureBoot", &[1]),
                Kind::Unproven,
                "where firmware measures SecureBoot",
            ),
            (
                |it| it[3] = variable(DRIVER_CONFIG, GLOBAL, "db", &list(X509, b"")),
                Kind::Unproven,
                "where firmware measures db",
            ),
            (
                |it| {
                    it.push(authority(
                        GLOBAL,
                        "db",
                        &[&[9; OWNER], &certificate_of("db 1")],
                    ))
                },
                Kind::Unproven,
                "variable db where no firmware",
            ),
            (|it| it[6].1[40] ^= 1, Kind::Binding, "other data"),
            (|it| it[0].1[52] ^= 1, Kind::Binding, "other data"),
            (|it| drop(it.remove(7)), Kind::Unproven, "no separator"),
            (
                |it| it.push(event(4, &[0; 4])),
                Kind::Unproven,
                "two separators",
            ),
            (
                |it| it[7] = event(4, &FAILED),
                Kind::Protection,
                "measured an error",
            ),
            (
                |it| it[5] = event(0x8000_0007, DEBUGGER),
                Kind::Protection,
                "lets a debugger in",
            ),
            (
                |it| it[5] = event(0x8000_0007, b"UEFI Debug Mode\0"),
                Kind::Protection,
                "lets a debugger in",
            ),
            (
                |it| it[5] = event(0x8000_0007, b"Another Mode"),
                Kind::Unproven,
                "says nothing about Secure Boot",
            ),
            (
                |it| {
                    let other = list(X509, &certificate_of("other"));
                    it[6] = variable(DRIVER_CONFIG, DATABASE, "db", &other);
                },
                Kind::Unproven,
                "db has changed during this boot",
            ),
            (
                |it| it.push(variable(DRIVER_CONFIG, DATABASE, "db", &[])),
                Kind::Unproven,
                "db has changed during this boot",
            ),
            (
                |it| it[10] = authority(SHIM, SHIM_OFF, &[&[1]]),
                Kind::Measurement,
                "shim verifies nothing",
            ),
        ];
        for (change, kind, why) in cases {
            let mut events = good();
            change(&mut events);
            let error = read(&events).unwrap_err();
            assert!(
                error.kind == kind && error.text.contains(why),
                "{error}, expected: {why}"
            );
        }
        let mut early = good();
        early.insert(3, event(4, &[0; 4]));
        assert!(
            read(&early)
                .unwrap_err()
                .text
                .contains("before the variables")
        );
        let (log, value) = log(&good());
        for value in [None, Some(&[0; 32][..]), Some(&value[..31])] {
            let error = SecureBoot::read(&log, value).unwrap_err();
            assert!(error.text.contains("does not explain PCR 7"), "{error}");
        }
        let error = SecureBoot::read(OVMF, Some(&pcr_7_of(OVMF))).unwrap_err();
        assert!(error.text.contains("Secure Boot is off"), "{error}");
    }

    fn pcr_7_of(log: &[u8]) -> [u8; 32] {
        let events = event_log::parse(log).events;
        let of_7 = events.iter().filter(|event| event.pcr == PCR);
        of_7.fold([0; 32], |value, event| {
            sha256(&[&value, event.sha256.unwrap()])
        })
    }

    #[test]
    fn a_variable_is_a_list_of_signatures() {
        let good_list = list(X509, b"certificate");
        for end in 1..good_list.len() {
            assert_eq!(entries(&good_list[..end]), None, "{end}");
        }
        let mut odd = list(HASH, &[1; 32]);
        odd[24] = 30;
        assert_eq!(entries(&odd), None);
        odd[24] = OWNER as u8;
        assert_eq!(entries(&odd), None);
        assert_eq!(entries(&[]), Some(vec![]));
        let mut events = good();
        events[1] = variable(DRIVER_CONFIG, GLOBAL, "PK", b"no list");
        assert_eq!(read(&events).unwrap_err().kind, Kind::Malformed);
        // a kind that no policy has a name for
        let of_other = entries(&list([1; 16], b"a key")).unwrap();
        assert_eq!(of_other[0].id, sha256(&[b"a key"]));
    }

    #[test]
    fn only_dbx_may_be_cut() {
        let (whole, value) = log(&good());
        let found = read(&good()).unwrap();
        let short = excerpt(&whole, 2500);
        assert!(short.len() < whole.len());
        assert_eq!(SecureBoot::read(&short, Some(&value)).unwrap(), found);
        let mut events = good();
        let large = list(X509, &[7; 5000]);
        events[3] = variable(DRIVER_CONFIG, DATABASE, "db", &large);
        let (whole, value) = log(&events);
        let error = SecureBoot::read(&excerpt(&whole, 2500), Some(&value)).unwrap_err();
        assert!(error.text.contains("too long for its document"), "{error}");
        // another event in its place, and dbx after a cut one
        let cut = |Event(kind, mut data, digest): Event| {
            let len = data.len() as u32;
            data.truncate(64);
            data.extend([event_log::CUT, &len.to_le_bytes()].concat());
            Event(kind, data, digest)
        };
        let mut events = good();
        events[4] = cut(variable(DRIVER_CONFIG, DATABASE, "db", &large));
        assert!(read(&events).is_err());
        let dbx = || {
            variable(
                DRIVER_CONFIG,
                DATABASE,
                "dbx",
                &list(HASH, &[8; 32]).repeat(200),
            )
        };
        events[4] = cut(dbx());
        assert!(read(&events).is_ok());
        events.push(dbx());
        let error = read(&events).unwrap_err();
        assert!(error.text.contains("dbx has changed"), "{error}");
    }

    #[test]
    fn the_policy_names_the_keys() {
        let found = read(&good()).unwrap();
        let judge = |lists: &str| {
            let json = format!(r#"{{"enabled":true{lists}}}"#);
            let required: SecureBootRequirements = serde_json::from_str(&json).unwrap();
            required.judge(&found)
        };
        let ids = |names: &[&str]| {
            let ids: Vec<_> = names
                .iter()
                .map(|name| format!("{:?}", hex(&id(name))))
                .collect();
            ids.join(",")
        };
        let program = hex(&[7; 32]);
        assert_eq!(judge(""), Ok(()));
        let all = format!(
            r#","pk":[{}],"kek":[{}],"db":[{},"{program}"],"signers":[{},"{program}"]"#,
            ids(&["other", "pk"]),
            ids(&["kek"]),
            ids(&["db 1", "db 2"]),
            ids(&["db 1", "shim"]),
        );
        assert_eq!(judge(&all), Ok(()));
        for (field, named, other) in [
            ("pk", &["kek"][..], "pk"),
            ("kek", &["pk"], "kek"),
            ("db", &["db 1"], "db 2"),
            ("signers", &["db 1"], "shim"),
        ] {
            let lists = format!(r#","{field}":[{},"{program}"]"#, ids(named));
            let error = judge(&lists).unwrap_err();
            assert_eq!(
                error.field.as_deref(),
                Some(&*format!("secureBoot.{field}"))
            );
            assert_eq!(error.got, Some(hex(&id(other))), "{error}");
            assert!(error.others.is_empty(), "{error}");
        }
    }

    /// Some firmware starts a kernel of the host without any signature.
    #[test]
    fn a_list_is_not_met_by_a_boot_that_verified_nothing() {
        let mut events = good();
        events.truncate(6);
        events.push(event(4, &[0; 4]));
        let found = read(&events).unwrap();
        assert_eq!(found.signers, []);
        let required = |lists: &str| {
            let json = format!(r#"{{"enabled":true{lists}}}"#);
            serde_json::from_str::<SecureBootRequirements>(&json).unwrap()
        };
        assert_eq!(required("").judge(&found), Ok(()));
        let signers = required(&format!(r#","signers":["{}"]"#, hex(&id("shim"))));
        let error = signers.judge(&found).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("secureBoot.signers"));
    }

    /// Each accepted log shows the same: only a log of the same events gives the register.
    #[test]
    fn an_altered_log_is_refused_or_shows_the_same() {
        let (whole, value) = log(&good());
        let found = read(&good()).unwrap();
        for log in mutations(&whole, 5000) {
            if let Ok(other) = SecureBoot::read(&log, Some(&value)) {
                assert_eq!(other, found);
            }
        }
        for contents in mutations(&list(X509, b"certificate"), 5000) {
            let _ = (entries(&contents), signer(&contents));
            let _ = Variable::parse(&contents);
        }
    }
}
