//! systemd's own event log: what its units measured after firmware and boot loader (from systemd
//! 255 on). It is a sequence of JSON objects with a byte 0x1e before each (RFC 7464):
//!
//! ```json
//! {"pcr":15,"digests":[{"hashAlg":"sha256","digest":"a1b2.."}],"content_type":"systemd",
//!  "content":{"eventType":"machine-id","string":"machine-id:0123..",..}}
//! ```
//!
//! The log is not signed; it is trustworthy only if a replay gives the register's value. It
//! explains a value to a person, and never decides whether a value is accepted.

use std::fmt;
use std::fs::File;
use std::io::Read;

use serde::Deserialize;

use super::{printable, sha256, unhex};

/// The file. It is below /run, so it has only the measurements since the machine started, including
/// those in the initramfs.
const FILE: &str = "/run/log/systemd/tpm2-measure.log";
/// Maximum number of bytes that are read. A boot has less than 100 records of less than 2000 bytes.
const MAX_LEN: u64 = 1 << 20;
/// RFC 7464's "record separator".
const SEPARATOR: u8 = 0x1e;
/// Maximum number of records in an explanation.
const SHOWN_RECORDS: usize = 4;
const SHOWN_TEXT: usize = 60;

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// The PCR that was extended.
    pub pcr: u32,
    /// The digest with which the SHA-256 bank was extended; `None` if the record does not have it.
    pub sha256: Option<[u8; 32]>,
    /// What was measured: `machine-id`, `filesystem`, `volume-key`, `phase` and others.
    pub kind: String,
    /// The text that was measured; for a `volume-key`, it names the key.
    pub text: String,
}

#[derive(Deserialize)]
struct Json {
    pcr: u32,
    digests: Vec<JsonDigest>,
    content: JsonContent,
}

#[derive(Deserialize)]
struct JsonDigest {
    #[serde(rename = "hashAlg")]
    algorithm: String,
    digest: String,
}

#[derive(Deserialize)]
struct JsonContent {
    #[serde(default, rename = "eventType")]
    kind: String,
    #[serde(default)]
    string: String,
}

/// Returns this machine's log; empty if there is none.
pub fn read() -> Vec<u8> {
    let mut log = vec![];
    let read = File::open(FILE).and_then(|file| file.take(MAX_LEN).read_to_end(&mut log));
    if let Err(error) = read {
        log::debug!("cannot read the event log {FILE}: {error}");
    }
    log
}

/// Returns the records of the log, without those that cannot be parsed or that extend no PCR.
pub fn parse(log: &[u8]) -> Vec<Record> {
    let records = log.split(|byte| *byte == SEPARATOR);
    let records = records.filter_map(|record| serde_json::from_slice::<Json>(record).ok());
    records.map(Record::from).collect()
}

/// Explains a value of the cluster ID's register that does not come from a cluster ID, and says
/// what to do. `None` if the value is zero, or if the log has no record of this register.
pub fn explain(log: &[u8], pcr: u32, value: &[u8]) -> Option<String> {
    let mut records = parse(log);
    records.retain(|record| record.pcr == pcr);
    if value.iter().all(|byte| *byte == 0) || records.is_empty() {
        return None;
    }
    let shown = records.iter().take(SHOWN_RECORDS);
    let mut wrote: Vec<_> = shown
        .clone()
        .map(|record| format!("{} measured {:?}", record.writer(), record.shown_text()))
        .collect();
    if records.len() > SHOWN_RECORDS {
        wrote.push(format!("{} more", records.len() - SHOWN_RECORDS));
    }
    let mut advice: Vec<_> = shown.map(|record| record.writer().advice()).collect();
    advice.dedup();
    let beside = if replay(&records).is_some_and(|replayed| replayed == value) {
        "although this machine belongs to no cluster"
    } else {
        "and contains more than the ID of a cluster"
    };
    Some(format!(
        "PCR {pcr} is not zero, {beside}: {}. Only a cluster ID may be measured into this register, so every cluster refuses \
         this node. {}; then reboot",
        wrote.join("; "),
        advice.join("; ")
    ))
}

/// Returns the SHA-256 value after a replay of the records of a PCR from zero; `None` if a record
/// lacks the digest.
fn replay(records: &[Record]) -> Option<[u8; 32]> {
    records.iter().try_fold([0; 32], |value, record| {
        Some(sha256(&[&value, &record.sha256?]))
    })
}

impl From<Json> for Record {
    fn from(json: Json) -> Record {
        let mut digests = json.digests.iter();
        let digest = digests.find(|digest| digest.algorithm == "sha256");
        Record {
            pcr: json.pcr,
            sha256: digest.and_then(|digest| unhex(&digest.digest)),
            kind: json.content.kind,
            text: json.content.string,
        }
    }
}

impl Record {
    fn writer(&self) -> Writer {
        match self.kind.as_str() {
            "machine-id" => Writer::Unit("systemd-pcrmachine.service"),
            "filesystem" if self.text.starts_with("file-system:/:") => {
                Writer::Unit("systemd-pcrfs-root.service")
            }
            "filesystem" => Writer::Unit("systemd-pcrfs@.service"),
            "volume-key" => Writer::Cryptsetup,
            kind => Writer::Other(printable(kind, SHOWN_TEXT)),
        }
    }

    fn shown_text(&self) -> String {
        printable(&self.text, SHOWN_TEXT)
    }
}

/// Which part of systemd extended a register.
enum Writer {
    /// A unit that has no other purpose.
    Unit(&'static str),
    /// systemd-cryptsetup, which opened a volume.
    Cryptsetup,
    /// An unknown part: the type of its record.
    Other(String),
}

impl Writer {
    /// Says what ends it.
    fn advice(&self) -> String {
        match self {
            Writer::Unit(unit) => format!("Mask {unit} in the image"),
            Writer::Cryptsetup => "Remove the option tpm2-measure-pcr= from /etc/crypttab; name a root file system that systemd \
                                   finds by itself on the kernel command line"
                .into(),
            Writer::Other(_) => "Stop what calls systemd-pcrextend in the image".into(),
        }
    }
}

impl fmt::Display for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Writer::Unit(unit) => f.write_str(unit),
            Writer::Cryptsetup => f.write_str("systemd-cryptsetup"),
            Writer::Other(kind) => write!(f, "systemd (event type {kind:?})"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    /// From systemd 257 in Debian 13, with systemd-pcrmachine, and the value of PCR 15 in the same
    /// boot.
    const LOG: &[u8] = include_bytes!("../../tests/data/systemd-log-257.json-seq");
    const PCR_15: &str = "e9954d35f5c1cc3d9b63cbd19cf20f6b4b2b13d503974f5f9264e64679988ee7";

    fn record(pcr: u32, kind: &str, text: &str) -> Vec<u8> {
        let digest: String = sha256(&[text.as_bytes()])
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        format!(
            "\x1e{{\"pcr\":{pcr},\"digests\":[{{\"hashAlg\":\"sha1\",\"digest\":\"00\"}},{{\"hashAlg\":\"sha256\",\
             \"digest\":\"{digest}\"}}],\"content_type\":\"systemd\",\"content\":{{\"string\":{text:?},\"eventType\":{kind:?}}}}}\n"
        )
        .into_bytes()
    }

    fn replayed(log: &[u8]) -> [u8; 32] {
        let mut records = parse(log);
        records.retain(|record| record.pcr == 15);
        replay(&records).unwrap()
    }

    #[test]
    fn a_genuine_log_names_the_unit_that_wrote_the_register() {
        let records = parse(LOG);
        let phases: Vec<_> = records
            .iter()
            .filter(|record| record.pcr == 11)
            .map(|record| (record.kind.as_str(), record.text.as_str()))
            .collect();
        assert_eq!(
            phases,
            ["enter-initrd", "leave-initrd", "sysinit", "ready"].map(|word| ("phase", word))
        );
        // the digests are those of the texts
        for record in &records {
            assert_eq!(record.sha256, Some(sha256(&[record.text.as_bytes()])));
        }
        let value = unhex(PCR_15).unwrap();
        assert_eq!(replayed(LOG), value);
        assert_eq!(
            explain(LOG, 15, &value).unwrap(),
            "PCR 15 is not zero, although this machine belongs to no cluster: systemd-pcrmachine.service measured \
             \"machine-id:5ec1e7a0000040008000000000000001\". Only a cluster ID may be measured into this register, so every cluster \
             refuses this node. Mask systemd-pcrmachine.service in the image; then reboot"
        );
    }

    #[test]
    fn each_writer_has_its_own_advice() {
        for (kind, text, writer, advice) in [
            (
                "filesystem",
                "file-system:/:ext4:root:::",
                "systemd-pcrfs-root.service measured",
                "Mask systemd-pcrfs-root.service in",
            ),
            (
                "filesystem",
                "file-system:/home:ext4::::",
                "systemd-pcrfs@.service measured",
                "Mask systemd-pcrfs@.service in",
            ),
            (
                "volume-key",
                "cryptsetup:root:0123",
                "systemd-cryptsetup measured",
                "Remove the option tpm2-measure-pcr=",
            ),
            (
                "news",
                "a\x07b",
                "systemd (event type \"news\") measured \"a?b\"",
                "Stop what calls systemd-pcrextend",
            ),
        ] {
            let log = record(15, kind, &text.replace('\x07', "\\u0007"));
            let log = String::from_utf8(log).unwrap().replace("\\\\u", "\\u");
            let text = explain(log.as_bytes(), 15, &[1; 32]).unwrap();
            for part in [writer, advice, "and contains more than the ID of a cluster"] {
                assert!(text.contains(part), "{part}: {text}");
            }
        }
    }

    #[test]
    fn what_is_not_about_the_register_explains_nothing() {
        let log = record(11, "phase", "ready");
        assert_eq!(explain(&log, 15, &[1; 32]), None);
        assert_eq!(explain(b"", 15, &[1; 32]), None);
        let log = record(15, "machine-id", "machine-id:00");
        assert_eq!(explain(&log, 15, &[0; 32]), None);
        assert!(explain(&log, 15, &replayed(&log)).is_some());
        // a record of an NvPCR, a cut record, and no record at all
        for bytes in [
            &b"\x1e{\"nv_index\":30474752,\"digests\":[],\"content\":{}}"[..],
            &log[..log.len() / 2],
            b"\x1e\x1e[]",
        ] {
            assert_eq!(parse(bytes), []);
            let both = [bytes, &log].concat();
            assert_eq!(parse(&both).len(), 1);
        }
    }

    #[test]
    fn many_records_make_a_short_text() {
        let log = record(15, "machine-id", &"x".repeat(3000)).repeat(100);
        let text = explain(&log, 15, &replayed(&log)).unwrap();
        assert!(
            text.contains("; 96 more. ") && text.len() < 1000,
            "{}: {text}",
            text.len()
        );
    }

    #[test]
    fn hostile_logs_end_without_a_panic() {
        for log in mutations(LOG, 2000) {
            let _ = explain(&log, 15, &[1; 32]);
            let _ = explain(&log, 11, &[1; 32]);
        }
    }
}
