//! What is measured in one boot, in the order of the boot, and the values of the registers that follow.

use std::collections::BTreeMap;

/// A SHA-256 digest.
pub type Digest = [u8; 32];

/// The registers that tell of the image: boot loader and image; GRUB's commands; command line and initrd; sections of a unified
/// kernel image; its parameters; its extensions; the cluster.
pub const REGISTERS: [u32; 7] = [4, 8, 9, 11, 12, 13, 15];
/// The register with the partition table, which is known only as long as the table is as in the image.
pub const PARTITION_TABLE: u32 = 5;

/// An entry of the event log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The register that is extended.
    pub pcr: u32,
    /// What is measured, for a person.
    pub what: String,
    /// The digest with which the register is extended.
    pub digest: Digest,
}

/// Why the value of a register cannot be known, and what to pin instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    /// The reason.
    pub why: String,
    /// What to pin instead.
    pub instead: String,
}

/// What is measured in one boot.
#[derive(Debug, Default)]
pub struct Log {
    events: Vec<Event>,
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

impl Log {
    /// Returns the events of a register, in order.
    pub fn events(&self, pcr: u32) -> impl Iterator<Item = &Event> {
        self.events.iter().filter(move |event| event.pcr == pcr)
    }

    /// Returns the value of a register after this boot, or why it cannot be known.
    pub fn value(&self, pcr: u32) -> Result<Digest, Missing> {
        match self.missing.get(&pcr) {
            Some(missing) => Err(missing.clone()),
            None if pcr != PARTITION_TABLE && !REGISTERS.contains(&pcr) => Err(Missing::new(
                "it depends on the machine, and not only on the image",
                "measure a booted machine (firstlight measure, there)",
            )),
            None => Ok(self
                .events(pcr)
                .fold([0; 32], |value, event| sha256(&[&value, &event.digest]))),
        }
    }

    pub(crate) fn extend(&mut self, pcr: u32, what: impl Into<String>, digest: Digest) {
        let what = what.into();
        self.events.push(Event { pcr, what, digest });
    }

    /// Extends a register with the digest of a word.
    pub(crate) fn word(&mut self, pcr: u32, word: &str) {
        self.extend(pcr, format!("{word:?}"), sha256(&[word.as_bytes()]));
    }

    /// Notes that a register cannot be known. The first reason counts.
    pub(crate) fn unknown(&mut self, pcr: u32, why: &str, instead: &str) {
        self.missing(pcr, Missing::new(why, instead));
    }

    pub(crate) fn missing(&mut self, pcr: u32, missing: Missing) {
        self.missing.entry(pcr).or_insert(missing);
    }
}

/// SHA-256 over bytes that come in parts.
pub struct Sha256(ring::digest::Context);

impl Sha256 {
    pub fn new() -> Sha256 {
        Sha256(ring::digest::Context::new(&ring::digest::SHA256))
    }

    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub fn finish(self) -> Digest {
        let mut digest = [0; 32];
        digest.copy_from_slice(self.0.finish().as_ref());
        digest
    }
}

pub fn sha256(parts: &[&[u8]]) -> Digest {
    let mut sha256 = Sha256::new();
    parts.iter().for_each(|part| sha256.update(part));
    sha256.finish()
}

/// Returns the text as UTF-16 with a zero at the end, as EFI programs get it.
pub fn utf16(text: &str) -> Vec<u8> {
    let units = text.encode_utf16().chain([0]);
    units.flat_map(u16::to_le_bytes).collect()
}
