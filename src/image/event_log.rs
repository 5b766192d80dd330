//! The measurements of one boot, in order, and the resulting values of the registers.

use std::collections::BTreeMap;

use super::digest::Digest;
use super::platform::Platform;

/// An entry of the event log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoggedEvent {
    /// The register that is extended.
    pub register: u32,
    /// A description of the measured data.
    pub what: String,
    /// The digest with which the register is extended.
    pub digest: Vec<u8>,
}

/// Why the value of a register cannot be predicted, and what to pin instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// The reason.
    pub why: String,
    /// Advice: the registers to pin instead.
    pub instead: String,
}

/// The measurements of one boot.
#[derive(Debug)]
pub struct BootLog {
    platform: Platform,
    events: Vec<LoggedEvent>,
    missing: BTreeMap<u32, Missing>,
}

impl Missing {
    pub(crate) fn new(why: impl Into<String>, instead: impl Into<String>) -> Missing {
        Missing {
            why: why.into(),
            instead: instead.into(),
        }
    }
}

impl BootLog {
    pub(crate) fn new(platform: Platform) -> BootLog {
        BootLog {
            platform,
            events: Vec::new(),
            missing: BTreeMap::new(),
        }
    }

    /// Returns whether this is the log of a TDX machine.
    pub(crate) fn is_tdx(&self) -> bool {
        self.platform == Platform::Tdx
    }

    /// Returns the events of a register, in order.
    pub fn events(&self, register: u32) -> impl Iterator<Item = &LoggedEvent> {
        self.events
            .iter()
            .filter(move |event| event.register == register)
    }

    /// Returns the value of a register after this boot, or why it cannot be predicted.
    pub fn value(&self, register: u32) -> Result<Vec<u8>, Missing> {
        match self.missing.get(&register) {
            Some(missing) => Err(missing.clone()),
            None if !self.platform.known().contains(&register) => Err(Missing::new(
                "it depends on the machine, and not only on the image",
                "measure a booted machine (firstlight measure, there)",
            )),
            None => {
                let bank = self.platform.bank();
                let events = self.events(register);
                Ok(events.fold(vec![0; bank.size()], |value, event| {
                    bank.extended(&value, &event.digest)
                }))
            }
        }
    }

    /// Extends the register that gets the events of this PCR.
    pub(crate) fn extend(&mut self, pcr: u32, what: impl Into<String>, digest: Digest) {
        if let Some(register) = self.platform.register_of(pcr) {
            self.events.push(LoggedEvent {
                register,
                what: what.into(),
                digest: digest.in_bank(self.platform.bank()).to_vec(),
            });
        }
    }

    /// Extends a register with the digest of a text.
    pub(crate) fn word(&mut self, pcr: u32, word: &str) {
        self.extend(pcr, format!("{word:?}"), Digest::of(&[word.as_bytes()]));
    }

    /// Extends a register with the digest of a text in UTF-16.
    pub(crate) fn utf16(&mut self, pcr: u32, what: &str, text: &str) {
        self.extend(pcr, what, Digest::of(&[&utf16(text)]));
    }

    /// Records that the register with the events of this PCR cannot be predicted. The first reason
    /// counts.
    pub(crate) fn unknown(&mut self, pcr: u32, why: &str, instead: &str) {
        self.missing(pcr, Missing::new(why, instead));
    }

    pub(crate) fn missing(&mut self, pcr: u32, missing: Missing) {
        if let Some(register) = self.platform.register_of(pcr) {
            self.missing.entry(register).or_insert(missing);
        }
    }
}

/// Returns the text as UTF-16 with a terminating zero, as EFI programs get it.
pub fn utf16(text: &str) -> Vec<u8> {
    let units = text.encode_utf16().chain([0]);
    units.flat_map(u16::to_le_bytes).collect()
}
