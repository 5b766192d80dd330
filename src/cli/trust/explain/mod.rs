//! `firstlight explain`: shows why registers have their values, and the first event that differs
//! from a good machine's, or from the prediction of `firstlight measure`.
//!
//! The input is an event log, saved evidence, or a node that the command asks. Files: `evidence`
//! reads and replays it; `decode` describes an event, with `device_path` and `reader` below it;
//! `compare` finds the differences; `report` prints them; `node` asks a node.

mod compare;
mod decode;
mod device_path;
mod evidence;
mod node;
mod report;
mod text;

use std::collections::BTreeMap;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::shell::{
    error::Error,
    files,
    output::{Output, print, say_all},
};
use crate::trust::measure_image;
use crate::workspace::{
    connect::{NodeOption, read_policy},
    options::{VariantOption, time},
    sources::SourceOptions,
    state::cluster_id,
};
use base::crypto::CLUSTER_ID_LEN;
use clap::Args;
use compare::{ExpectedRegisters, Finding};
use evidence::LogAndQuotes;
use report::Pen;
use verifier::Variant;

/// Explain the registers of a machine by its event log
///
/// For each register it shows the value, and the events that made it: what firmware, boot loader, kernel and systemd
/// measured, in words. FILE is an event log (/sys/kernel/security/tpm0/binary_bios_measurements, the CCEL of a TDX
/// guest, systemd's /run/log/systemd/tpm2-measure.log), or evidence: an attestation document (JSON). Nothing proves
/// the values in a file. A NODE proves its values over attested TLS.
///
/// With --against or --against-image it also shows the first event that differs, and with --policy which register has
/// another value than the policy requires.
///
/// The exit code is 0 if all registers are explained and as expected, and 1 if not.
#[derive(Debug, Args)]
#[command(
    mut_arg("host", |it| it.value_name("FILE|NODE").help(SOURCE_MEANS)),
    after_help = "Examples:
  firstlight explain 10.42.1.100 --policy policy.json
  firstlight explain refused.json --against good.json --pcrs 4,9,11
  firstlight explain binary_bios_measurements --against-image image.raw
  firstlight explain 10.42.1.100 --policy policy.json -o json",
)]
pub(crate) struct CommandLine {
    #[command(flatten)]
    node: NodeOption,
    /// The event log, or the evidence, of a good machine
    #[arg(long, value_name = "FILE", conflicts_with = "against_image")]
    against: Option<PathBuf>,
    /// The image that the machine should have booted, as for `firstlight measure`: a raw disk or a unified kernel
    /// image
    #[arg(long, value_name = "FILE")]
    against_image: Option<PathBuf>,
    /// The unified kernel image that boots, on the disk of --against-image; needed if there are several
    #[arg(long, value_name = "PATH", requires = "against_image")]
    uki: Option<String>,
    /// The profile of the unified kernel image that boots: its ID, or its number from 0; without it the first
    #[arg(long, value_name = "ID", requires = "against_image")]
    profile: Option<String>,
    /// The attestation policy that the machine should meet (JSON)
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// The ID of the cluster to which the machine should belong
    #[arg(long, value_name = "HEX", value_parser = cluster_id)]
    cluster_id: Option<[u8; CLUSTER_ID_LEN]>,
    /// The log of systemd on the same machine, if FILE has only that of the firmware
    #[arg(long, value_name = "FILE")]
    systemd_log: Option<PathBuf>,
    /// Only these registers, as 4,9,11
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pcrs: Option<Vec<u32>>,
    #[command(flatten)]
    variant: VariantOption,
    #[command(flatten)]
    pub sources: SourceOptions,
    #[command(flatten)]
    output: Output,
    /// The limit until the node answers, as 90s, 10m or 1h
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "30s")]
    timeout: Duration,
}

/// The help text of the operand.
const SOURCE_MEANS: &str =
    "An event log or evidence (- is standard input), or the address of a node: HOST[:PORT]";

impl CommandLine {
    /// Returns the options that the command line gives.
    pub fn options(self) -> Result<Options, Error> {
        let source = self.node.host().map(str::to_owned);
        let (uki, profile) = (self.uki, self.profile);
        let image = self.against_image;
        Ok(Options {
            source: source.ok_or_else(|| Error::Usage("FILE|NODE is missing".into()))?,
            against: self.against,
            image: image.map(|image| measure_image::of_image(image, uki, profile)),
            variant: self.variant.of(self.policy.as_deref())?,
            policy: self.policy,
            cluster_id: self.cluster_id,
            systemd_log: self.systemd_log,
            pcrs: self.pcrs,
            output: self.output,
            timeout: self.timeout,
        })
    }
}

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// A file, or the address of a node.
    pub source: String,
    /// The log or the evidence of a good machine.
    pub against: Option<PathBuf>,
    /// The image that the machine should have booted.
    pub image: Option<measure_image::Options>,
    /// The policy that the machine should meet.
    pub policy: Option<PathBuf>,
    /// The cluster to which the machine should belong.
    pub cluster_id: Option<[u8; CLUSTER_ID_LEN]>,
    /// The log of systemd on the same machine.
    pub systemd_log: Option<PathBuf>,
    /// The registers to explain; `None`: all.
    pub pcrs: Option<Vec<u32>>,
    /// The attestation variant of the node.
    pub variant: &'static Variant,
    /// Whether the output is for a program.
    pub output: Output,
    /// The limit for the whole command.
    pub timeout: Duration,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    let mut evidence = read(options)?;
    if let Some(path) = &options.systemd_log {
        evidence.and_systemd(&files::read(path)?);
    }
    let other = match &options.against {
        Some(path) => Some(read_file(path)?),
        None => None,
    };
    for evidence in [Some(&evidence), other.as_ref()].into_iter().flatten() {
        if let Some((rest, all)) = evidence.cut() {
            log::warn!(
                "{}: the log is cut within an event, or damaged: its last {rest} of {all} bytes are not a whole event; \
                 later events are missing",
                evidence.name
            );
        }
    }
    let registers = evidence.registers(other.as_ref()).map_err(Error::content)?;
    let bank = registers.bank;
    let mut against = vec![];
    let mut expected = ExpectedRegisters::default();
    if let Some(other) = &other {
        let good = other.registers(Some(&evidence)).map_err(Error::content)?;
        expected = ExpectedRegisters::of_machine(&good);
        against.push(other.name.clone());
    }
    if let Some(source) = &options.image {
        expected = ExpectedRegisters::of_image(&measure_image::read(source)?, &registers);
        against.push(source.name());
    }
    if let Some(path) = &options.policy {
        let policy = read_policy(path)?;
        expected = expected.with_values_of(ExpectedRegisters::of_policy(&policy, &registers));
        against.push(path.display().to_string());
    }
    if let Some(id) = &options.cluster_id {
        expected.and_cluster(id, registers.kind());
    }
    let mut findings = compare::compare(registers, &expected, options.cluster_id.is_some());
    if let Some(pcrs) = &options.pcrs {
        findings.retain(|finding| pcrs.contains(&finding.number));
    }
    let name = &evidence.name;
    if options.output == Output::Json {
        say_all(&report::json(name, &against, bank, &findings))
    } else {
        let title = if against.is_empty() {
            format!("{name} ({bank})")
        } else {
            format!("{name} against {} ({bank})", against.join(" and "))
        };
        let has_colour = has_colour();
        // colours are control characters; texts from the log no longer contain any
        print(&report::text(&title, &findings, &Pen { has_colour }))
    }?;
    verdict(name, &findings)
}

/// Reads the file, or asks the node.
fn read(options: &Options) -> Result<LogAndQuotes, Error> {
    let source = &options.source;
    let path = Path::new(source);
    if source == "-" || source.contains('/') || path.exists() {
        return read_file(path);
    }
    let deadline = Instant::now() + options.timeout;
    let document = node::ask(source, options.variant, deadline)?;
    LogAndQuotes::parse(source, &document)
}

fn read_file(path: &Path) -> Result<LogAndQuotes, Error> {
    let bytes = if path.as_os_str() == "-" {
        files::read_open(path, io::stdin())
    } else {
        files::read(path)
    };
    LogAndQuotes::parse(&path.display().to_string(), &bytes?)
}

/// Returns the registers of the SHA-256 bank in an attestation document. Nothing in it is verified.
pub fn quoted(document: &[u8]) -> Option<BTreeMap<u32, Vec<u8>>> {
    let evidence = LogAndQuotes::parse("document", document).ok()?;
    evidence.quoted().cloned()
}

/// Returns whether standard output shows colours (<https://no-color.org>).
fn has_colour() -> bool {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    io::stdout().is_terminal() && !is_set("NO_COLOR") && !is_dumb
}

/// Returns the result of the whole command.
fn verdict(name: &str, findings: &[Finding]) -> Result<(), Error> {
    let bad = findings.iter().filter(|finding| finding.verdict.is_bad());
    let bad: Vec<_> = bad
        .map(|finding| format!("{} {}", finding.name, finding.verdict.words()))
        .collect();
    if bad.is_empty() {
        Ok(())
    } else {
        Err(Error::content(format!("{name}: {}", bad.join(", "))))
    }
}

/// Reads bytes like `firstlight explain` reads a file, and returns the report; for tests of hostile
/// inputs.
pub fn explained(bytes: &[u8]) -> Result<String, Error> {
    let evidence = LogAndQuotes::parse("input", bytes)?;
    let registers = evidence.registers(None)?;
    let findings = compare::compare(registers, &ExpectedRegisters::default(), false);
    let has_colour = false;
    Ok(report::text("input", &findings, &Pen { has_colour }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::text::hex;
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;
    use compare::RegisterState;
    use evidence::ReplayedBank;
    use support::mutation::{corpus, mutations};
    use tpm::CLUSTER_ID_PCR;
    use verifier::{Measurement, Policy};

    /// From OVMF and the EFI stub of Linux 6.1 in QEMU.
    const OVMF: &[u8] = include_bytes!("../../../../tests/data/event-log-ovmf.bin");
    /// From SeaBIOS in QEMU, with the values of its PCRs.
    const SEABIOS: &[u8] = include_bytes!("../../../../tests/data/event-log-seabios.bin");
    const SEABIOS_PCRS: &str = include_str!("../../../../tests/data/event-log-seabios.pcrs");
    /// From systemd 257 in Debian 13.
    const SYSTEMD: &[u8] = include_bytes!("../../../../tests/data/systemd-log-257.json-seq");

    fn bytes(text: &str) -> Vec<u8> {
        let digits = text.as_bytes().chunks(2);
        let byte = |pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        digits.map(byte).collect()
    }

    /// Returns the registers of the machine with SeaBIOS, as a TPM would quote them, and with this
    /// value of one of them.
    fn quoted(number: u32, value: &[u8]) -> BTreeMap<u32, Vec<u8>> {
        let lines = SEABIOS_PCRS.lines();
        let values = lines.map(|line| {
            let (pcr, value) = line.split_once(' ').unwrap();
            (pcr.parse().unwrap(), bytes(value))
        });
        let mut values: BTreeMap<u32, Vec<u8>> = values.collect();
        values.insert(number, value.into());
        values
    }

    /// Returns an attestation document with these values.
    fn document(values: &BTreeMap<u32, Vec<u8>>) -> String {
        let pcrs = values
            .iter()
            .map(|(pcr, value)| (pcr.to_string(), STANDARD.encode(value).into()));
        let pcrs: serde_json::Map<String, serde_json::Value> = pcrs.collect();
        serde_json::json!({"Attestation": {
            "quotes": [{"pcrs": {"hash": 11, "pcrs": pcrs}}],
            "event_log": STANDARD.encode(SEABIOS),
        }})
        .to_string()
    }

    fn registers(input: &[u8]) -> ReplayedBank {
        let evidence = LogAndQuotes::parse("input", input).unwrap();
        evidence.registers(None).unwrap()
    }

    fn verdicts(findings: &[Finding]) -> BTreeMap<u32, RegisterState> {
        let one = |finding: &Finding| (finding.number, finding.verdict);
        findings.iter().map(one).collect()
    }

    #[test]
    fn evidence_is_explained_by_its_log() {
        let values = quoted(8, &[8; 32]);
        let registers = registers(document(&values).as_bytes());
        let findings = compare::compare(registers, &ExpectedRegisters::default(), false);
        let verdicts = verdicts(&findings);
        assert_eq!(verdicts[&4], RegisterState::Explained);
        assert_eq!(verdicts[&8], RegisterState::Unexplained);
        // the kernel's IMA extends this register
        assert_eq!(verdicts[&10], RegisterState::NotInLog);
        // nothing has extended it
        assert!(!verdicts.contains_key(&15));
    }

    #[test]
    fn a_policy_says_which_register_differs() {
        let expected = |byte| Measurement {
            expected: vec![byte; 32],
            warn_only: false,
        };
        let policy = [(8, expected(8)), (9, expected(9)), (15, expected(0))];
        let policy = Policy::new(policy.into()).unwrap();
        let of = |values: BTreeMap<u32, Vec<u8>>, is_cluster_known| {
            let registers = registers(document(&values).as_bytes());
            let mut expected = ExpectedRegisters::of_policy(&policy, &registers);
            if is_cluster_known {
                expected.and_cluster(&[0x11; 32], registers.kind());
            }
            compare::compare(registers, &expected, is_cluster_known)
        };
        let fresh = verdicts(&of(quoted(8, &[8; 32]), false));
        assert_eq!(fresh[&8], RegisterState::Matches);
        assert_eq!(fresh[&9], RegisterState::Differs);
        assert_eq!(fresh[&15], RegisterState::Matches);
        // a member of some cluster, and of the one that the operator names
        let member = verifier::Registers::Pcrs.after(&[0x11; 32]);
        let of_15 = |value: &[u8], is_known| {
            verdicts(&of(quoted(CLUSTER_ID_PCR, value), is_known))[&CLUSTER_ID_PCR]
        };
        assert_eq!(of_15(member.as_ref(), false), RegisterState::NotInLog);
        assert_eq!(of_15(member.as_ref(), true), RegisterState::Matches);
        assert_eq!(of_15(&[1; 32], true), RegisterState::Differs);
    }

    #[test]
    fn the_first_event_that_differs_is_shown() {
        let mut other = OVMF.to_vec();
        let at = OVMF
            .windows(6)
            .position(|bytes| bytes == b"Linux ")
            .unwrap();
        // the SHA-256 digest of this event is before its data: other bytes of that digest
        let digest = registers(OVMF).by_number[&9].events[1].digest.clone();
        let at = OVMF[..at]
            .windows(32)
            .position(|bytes| bytes == digest)
            .unwrap();
        other[at] ^= 1;
        let findings = compare::compare(
            registers(&other),
            &ExpectedRegisters::of_machine(&registers(OVMF)),
            false,
        );
        let bad: Vec<_> = findings.iter().filter(|it| it.verdict.is_bad()).collect();
        assert_eq!(bad.len(), 1);
        assert_eq!((bad[0].number, bad[0].verdict), (9, RegisterState::Differs));
        let difference = bad[0].difference.as_ref().unwrap();
        assert_eq!(difference.at, 1);
        let text = report::text("x", &findings, &Pen { has_colour: false });
        let marked: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("  ")?.split_once(' '))
            .filter(|(mark, _)| matches!(*mark, "-" | "+"))
            .map(|(_, rest)| rest.trim_start())
            .collect();
        let [expected, got] = marked[..] else {
            panic!("{text}")
        };
        assert!(expected.starts_with(&format!("1 {}..", &hex(&digest)[..8])));
        assert!(got.ends_with("initrd that the kernel loaded"), "{got}");
        let painted = report::text("x", &findings, &Pen { has_colour: true });
        assert!(painted.contains("\x1b[31mdiffers\x1b[0m"));
        let json = report::json("x", &["y".into()], "SHA-256", &findings);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let of_9 = json["registers"].as_array().unwrap().iter();
        let of_9 = of_9.filter(|it| it["index"] == 9).collect::<Vec<_>>();
        assert_eq!(of_9[0]["verdict"], "differs");
        assert_eq!(of_9[0]["firstDifference"]["index"], 1);
        assert_eq!(
            of_9[0]["firstDifference"]["expected"]["digest"],
            hex(&digest)
        );
    }

    #[test]
    fn the_phases_of_systemd_are_told_apart_from_the_image() {
        let start = registers(OVMF).by_number[&9].replayed.clone().unwrap();
        let mut after = LogAndQuotes::parse("x", OVMF).unwrap();
        after.and_systemd(SYSTEMD);
        let after = after.registers(None).unwrap();
        let kinds = after.by_number[&11].events.iter();
        assert!(kinds.clone().all(|entry| entry.kind == "systemd"));
        assert_eq!(kinds.count(), 4);
        assert_eq!(after.by_number[&9].replayed, Some(start));
        // the same phases, found by the value alone
        let value = after.by_number[&11].replayed.clone().unwrap();
        let policy = Measurement {
            expected: value.clone(),
            warn_only: false,
        };
        let policy = Policy::new([(11, policy)].into()).unwrap();
        let registers = registers(OVMF);
        let expected = ExpectedRegisters::of_policy(&policy, &registers);
        let findings = compare::compare(registers, &expected, false);
        let of_11 = findings.iter().find(|it| it.number == 11).unwrap();
        assert_eq!(of_11.verdict, RegisterState::Matches);
        assert_eq!(of_11.events[3].what, "phase of the boot: ready");
    }

    #[test]
    fn what_is_no_evidence_is_named() {
        for (input, why) in [
            (&b""[..], "it has no events"),
            (b"firstlight", "it has no events"),
            (b"{}", "it is not an attestation document"),
            (
                br#"{"Attestation":{"quotes":[],"event_log":"?"}}"#,
                "wrong base64",
            ),
            (br#"{"Attestation":{"quotes":[]}}"#, "it has no events"),
        ] {
            let error = LogAndQuotes::parse("file", input)
                .err()
                .unwrap()
                .to_string();
            assert!(
                error.starts_with("file: ") && error.contains(why),
                "{error}"
            );
        }
    }

    #[test]
    fn hostile_inputs_cannot_drive_the_terminal() {
        let document = document(&quoted(8, &[8; 32]));
        for input in [OVMF, SEABIOS, SYSTEMD, document.as_bytes()] {
            for variant in mutations(input, 500) {
                check(&variant);
            }
        }
        for (_, input) in corpus("event_log") {
            check(&input);
        }
    }

    fn check(input: &[u8]) {
        let Ok(text) = explained(input) else { return };
        let is_shown = |c: char| c == '\n' || base::text::is_visible(c);
        assert!(text.chars().all(is_shown), "{text}");
        assert!(text.len() <= 10_000 + 300 * input.len(), "{}", text.len());
    }
}
