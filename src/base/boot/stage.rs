//! The stages of a boot, in which a machine has different register values.

use std::fmt;

/// A stage of a boot. systemd measures when the boot leaves the initramfs, so that a booted system
/// cannot prove that it is an initramfs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The initramfs after its `sysinit.target`, which opens the state disk: rejoin and recovery.
    Initramfs,
    /// The booted system after systemd-pcrphase.service: init, join, and members.
    Booted,
}

impl Stage {
    /// All stages, in the order of a boot.
    pub const ALL: [Stage; 2] = [Stage::Initramfs, Stage::Booted];

    /// Returns the keyword for command lines and files: `initramfs`, `booted`.
    pub fn word(self) -> &'static str {
        match self {
            Stage::Initramfs => "initramfs",
            Stage::Booted => "booted",
        }
    }

    /// Returns the stage in words.
    pub fn words(self) -> &'static str {
        match self {
            Stage::Initramfs => "initramfs",
            Stage::Booted => "booted system",
        }
    }
}

/// Writes the stage for messages, with its article.
impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let article = match self {
            Stage::Initramfs => "an",
            Stage::Booted => "a",
        };
        write!(f, "{article} {}", self.words())
    }
}
