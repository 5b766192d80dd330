//! Compares registers with their expected values, and finds the first event that differs.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::evidence::{Entry, ReplayedBank, ReplayedRegister};
use base::crypto::CLUSTER_ID_LEN;
use image::{Case, Image, Platform, RegisterBank};
use verifier::{Policy, RegisterNames, phases};

/// The PCR of the kernel's IMA, which has its own log.
const IMA_PCR: u32 = 10;

/// The register into which a TDX machine's firmware is measured.
const MRTD: u32 = 0;

/// Who extends a register.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Writer {
    /// The logs of firmware and systemd contain these events.
    Logged,
    /// The kernel's IMA.
    Ima,
    /// The TDX module measures this before the machine starts.
    TdxModule,
    /// The node measures the ID of a cluster that the operator does not name.
    Cluster,
}

/// The expected state of registers.
#[derive(Default)]
pub struct ExpectedRegisters {
    /// The registers by number.
    pub by_number: BTreeMap<u32, ExpectedRegister>,
}

/// The expected state of a register.
#[derive(Default)]
pub struct ExpectedRegister {
    /// Its value; `None` if it is unknown.
    pub value: Option<Vec<u8>>,
    /// The events that give this value, if they are known.
    pub events: Option<Vec<Entry>>,
    /// A remark for the reader.
    pub note: String,
}

/// The state of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterState {
    /// It has the expected value.
    Matches,
    /// It has another value.
    Differs,
    /// Nothing was expected; the events give its value.
    Explained,
    /// Nothing was expected; the events do not give its value.
    Unexplained,
    /// Nothing was expected; neither the firmware's log nor systemd's has the events of this
    /// register.
    NotInLog,
}

impl RegisterState {
    /// Returns the verdict in words.
    pub fn words(self) -> &'static str {
        match self {
            RegisterState::Matches => "as expected",
            RegisterState::Differs => "differs",
            RegisterState::Explained => "explained",
            RegisterState::Unexplained => "not explained",
            RegisterState::NotInLog => "not in the log",
        }
    }

    /// Returns whether a person should look at it.
    pub fn is_bad(self) -> bool {
        matches!(self, RegisterState::Differs | RegisterState::Unexplained)
    }
}

/// The first event that differs.
pub struct Difference {
    /// Its position among the register's events, from 0.
    pub at: usize,
    /// What was expected there; `None` if there were no more events.
    pub expected: Option<Entry>,
}

/// A register with all known facts about it.
pub struct Finding {
    /// Its name.
    pub name: String,
    /// Its number.
    pub number: u32,
    /// Its state compared with the expectation.
    pub verdict: RegisterState,
    /// The expected value.
    pub expected: Option<Vec<u8>>,
    /// The present value.
    pub got: Option<Vec<u8>>,
    /// Whether the events give the present value.
    pub is_explained: bool,
    /// What extended it.
    pub events: Vec<Entry>,
    /// The first event that differs, if the expected events are known.
    pub difference: Option<Difference>,
    /// A remark for the reader.
    pub notes: Vec<String>,
}

impl ExpectedRegisters {
    /// Returns a policy's expectations for a machine, from the image and the stage of its boot with
    /// the fewest differences.
    pub fn of_policy(policy: &Policy, registers: &ReplayedBank) -> ExpectedRegisters {
        let images = policy.images().iter();
        let stages = images.flat_map(|image| {
            let booted = image.measurements().clone();
            let mut initramfs = booted.clone();
            initramfs.extend(image.initramfs().clone());
            [("booted system", booted), ("initramfs", initramfs)].map(|(stage, values)| {
                let has_stages = !image.initramfs().is_empty();
                let stage = has_stages.then_some(stage);
                (image.name(), stage, values)
            })
        });
        let differences = |values: &BTreeMap<u32, verifier::Measurement>| {
            let of = |number| {
                registers
                    .by_number
                    .get(&number)
                    .and_then(ReplayedRegister::value)
            };
            let differs = values
                .iter()
                .filter(|(number, it)| of(**number) != Some(&it.expected));
            differs.count()
        };
        let nearest = stages.min_by_key(|(.., values)| differences(values));
        let Some((name, stage, values)) = nearest else {
            return ExpectedRegisters::default();
        };
        let note = match (name, stage) {
            ("", None) => String::new(),
            ("", Some(stage)) => format!("expected in the {stage}"),
            (name, None) => format!("expected of {name:?}"),
            (name, Some(stage)) => format!("expected of {name:?} in the {stage}"),
        };
        let one = |(number, value): (u32, verifier::Measurement)| {
            let expected = ExpectedRegister {
                value: Some(value.expected.to_vec()),
                events: None,
                note: note.clone(),
            };
            (number, expected)
        };
        ExpectedRegisters {
            by_number: values.into_iter().map(one).collect(),
        }
    }

    /// Returns the state of another machine as expectations.
    pub fn of_machine(registers: &ReplayedBank) -> ExpectedRegisters {
        let one = |(number, register): (&u32, &ReplayedRegister)| {
            let expected = ExpectedRegister {
                value: register.value().map(<[u8]>::to_vec),
                events: Some(register.events.clone()),
                note: String::new(),
            };
            (*number, expected)
        };
        ExpectedRegisters {
            by_number: registers.by_number.iter().map(one).collect(),
        }
    }

    /// Returns the expectations for a machine that boots an image. If several boots are possible,
    /// takes the one that gives the present value of a register, else the one with the most events
    /// in common.
    pub fn of_image(image: &Image, registers: &ReplayedBank) -> ExpectedRegisters {
        let platform = match (registers.is_tdx, registers.bank) {
            (true, _) => Platform::Tdx,
            (false, "SHA-384") => Platform::Tpm(RegisterBank::Sha384),
            (false, _) => Platform::Tpm(RegisterBank::Sha256),
        };
        let all = image.registers(platform, &image::KnownConditions::default());
        let one = |(number, cases): (u32, Vec<Case>)| {
            let nothing = ReplayedRegister::default();
            let register = registers.by_number.get(&number).unwrap_or(&nothing);
            let nearest = cases.into_iter().max_by_key(|case| {
                let value = case.value.as_ref().ok().map(|value| &value[..]);
                let events = entries(case);
                let common = in_common(&register.events, &events);
                let is_same = value.is_some() && value == register.value();
                let others = events.len().abs_diff(register.events.len());
                (is_same, common, Reverse(others))
            });
            let expected =
                nearest.map_or_else(ExpectedRegister::default, |case| ExpectedRegister {
                    events: Some(entries(&case)),
                    note: match &case.value {
                        Err(missing) => format!("not known: {}", missing.why),
                        Ok(_) => case.when.clone(),
                    },
                    value: case.value.ok(),
                });
            (number, expected)
        };
        ExpectedRegisters {
            by_number: all.into_iter().map(one).collect(),
        }
    }

    /// Replaces the expected value of the cluster ID's register.
    pub fn and_cluster(&mut self, id: &[u8; CLUSTER_ID_LEN], kind: verifier::Registers) {
        let register = self.by_number.entry(kind.of_cluster_id()).or_default();
        let value = kind.after(id);
        register.value = Some(value.as_ref().into());
        register.events = None;
    }

    /// Overrides values with those of another source, and keeps the events.
    pub fn with_values_of(mut self, other: ExpectedRegisters) -> ExpectedRegisters {
        for (number, register) in other.by_number {
            let present = self.by_number.entry(number).or_default();
            present.value = register.value;
            present.note = register.note;
        }
        self
    }
}

fn entries(case: &Case) -> Vec<Entry> {
    let entry = |event: &image::LoggedEvent| Entry {
        kind: "predicted".into(),
        what: event.what.clone(),
        digest: event.digest.clone(),
    };
    case.events.iter().map(entry).collect()
}

/// Returns how many events two registers have in common before the first one that differs.
fn in_common(got: &[Entry], expected: &[Entry]) -> usize {
    let pairs = got.iter().zip(expected);
    pairs.take_while(|(a, b)| a.digest == b.digest).count()
}

/// Compares each register; `is_cluster_known` says whether the operator named the cluster.
pub fn compare(
    mut registers: ReplayedBank,
    expected: &ExpectedRegisters,
    is_cluster_known: bool,
) -> Vec<Finding> {
    let names: BTreeMap<u32, String> = registers
        .by_number
        .keys()
        .chain(expected.by_number.keys())
        .map(|number| (*number, registers.name(*number)))
        .collect();
    let (is_tdx, of_cluster) = (registers.is_tdx, registers.kind().of_cluster_id());
    let nothing = ExpectedRegister::default();
    let findings = names.into_iter().map(|(number, name)| {
        let register = registers.take(number);
        let expected = expected.by_number.get(&number).unwrap_or(&nothing);
        let writer = match number {
            MRTD if is_tdx => Writer::TdxModule,
            IMA_PCR if !is_tdx => Writer::Ima,
            _ if number == of_cluster && !is_cluster_known => Writer::Cluster,
            _ => Writer::Logged,
        };
        finding(name, number, register, expected, writer)
    });
    findings.filter(is_worth_it).collect()
}

/// Returns whether the report should show the register.
fn is_worth_it(finding: &Finding) -> bool {
    let is_as_at_start = |value: &Vec<u8>| value.iter().all(|byte| matches!(byte, 0 | 0xff));
    finding.expected.is_some()
        || !finding.events.is_empty()
        || !finding.got.as_ref().is_none_or(is_as_at_start)
}

fn finding(
    name: String,
    number: u32,
    mut register: ReplayedRegister,
    expected: &ExpectedRegister,
    writer: Writer,
) -> Finding {
    let mut notes: Vec<String> = Some(expected.note.clone())
        .filter(|note| !note.is_empty())
        .into_iter()
        .collect();
    let mut value = expected.value.clone();
    // the firmware's log was complete before systemd measured anything
    if let (None, Some(value)) = (&register.quoted, &value) {
        register.add_words_up_to(number, value);
    }
    let got = register.value().map(<[u8]>::to_vec);
    let is_set = got
        .as_ref()
        .is_some_and(|got| got.iter().any(|byte| *byte != 0));
    let is_elsewhere = register.events.is_empty() && is_set;
    if writer == Writer::Cluster && is_elsewhere && value != got {
        value = None;
        notes = vec![
            "the ID of a cluster: the machine belongs to one (--cluster-id checks which one)"
                .into(),
        ];
    }
    let is_explained = register.is_explained();
    let verdict = match (&value, &got) {
        (Some(value), Some(got)) if value == got => RegisterState::Matches,
        (Some(_), _) => RegisterState::Differs,
        (None, _) if is_explained => RegisterState::Explained,
        (None, _) if is_elsewhere && writer != Writer::Logged => RegisterState::NotInLog,
        (None, _) => RegisterState::Unexplained,
    };
    let events = expected.events.as_ref();
    let difference = events
        .filter(|_| verdict == RegisterState::Differs)
        .and_then(|events| {
            let at = in_common(&register.events, events);
            (at < events.len().max(register.events.len())).then(|| Difference {
                at,
                expected: events.get(at).cloned(),
            })
        });
    if let (RegisterState::Differs, Some(value), Some(got)) = (verdict, &value, &got) {
        notes.extend(difference_of_words(number, value, got));
    }
    if writer == Writer::Ima && is_elsewhere {
        notes.push("the kernel's IMA measures into it, and has a log of its own".into());
    } else if writer == Writer::TdxModule && is_elsewhere {
        notes
            .push("the TDX module measured the firmware into it before the machine started".into());
    } else if !is_explained && register.quoted.is_some() && verdict != RegisterState::NotInLog {
        notes.push(if register.events.is_empty() {
            "the log has no event of it".into()
        } else {
            "the events below do not give this value".into()
        });
    }
    Finding {
        name,
        number,
        verdict,
        expected: value,
        got,
        is_explained,
        events: register.events,
        difference,
        notes,
    }
}

/// Returns the difference of two values as texts that systemd measures.
fn difference_of_words(number: u32, expected: &[u8], got: &[u8]) -> Option<String> {
    let (expected, got): ([u8; 32], [u8; 32]) = (expected.try_into().ok()?, got.try_into().ok()?);
    if let Some(more) = phases::between(number, &expected, &got) {
        return Some(format!(
            "systemd has measured {} more than expected: the boot is in a later phase",
            more.join(", ")
        ));
    }
    let less = phases::between(number, &got, &expected)?;
    Some(format!("systemd has not yet measured {}", less.join(", ")))
}
