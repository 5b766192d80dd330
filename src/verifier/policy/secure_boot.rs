//! A policy's requirements for Secure Boot, which the events of PCR 7 show whatever the firmware is:
//!
//! ```json
//! {"measurements":{..},"secureBoot":{"enabled":true,"db":["48e99b99.."],"signers":["48e99b99.."]}}
//! ```
//!
//! An entry is SHA-256 of a certificate (DER), or the hash of a program that a variable names itself.

use hardware::json::Digits;
use serde::{Deserialize, Serialize};

use super::error::{Fault, PolicyError};
use crate::hex;
use crate::refusal::{Kind, Refusal};
use crate::secure_boot::{KeyEntry, SecureBoot};

/// Maximum number of entries of a list.
const MAX_ENTRIES: usize = 10_000;
/// Maximum number of entries of a variable that a refusal names.
const SHOWN: usize = 8;

/// A policy's requirements for Secure Boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SecureBootRequirements {
    /// Whether the firmware verifies programs: always true.
    pub enabled: bool,
    /// The accepted platform keys (PK); empty for every one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pk: Vec<Digits<32>>,
    /// The accepted key exchange keys (KEK); empty for every one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kek: Vec<Digits<32>>,
    /// The accepted entries of the database of keys (db); empty for every one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub db: Vec<Digits<32>>,
    /// The accepted keys and hashes that verified drivers and boot loaders in this boot; empty for every one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub signers: Vec<Digits<32>>,
}

impl SecureBootRequirements {
    /// Fails if they require no Secure Boot, or a list is too long.
    pub(super) fn check(&self) -> Result<(), PolicyError> {
        if !self.enabled {
            return Err(Fault::Requirement.because(
                "enabled: expected true: without Secure Boot nothing is verified by these keys; omit secureBoot to accept both",
            ));
        }
        let lists = [&self.pk, &self.kek, &self.db, &self.signers];
        if lists.into_iter().any(|list| list.len() > MAX_ENTRIES) {
            let why = format!("a list has more than {MAX_ENTRIES} entries");
            return Err(Fault::TooMany.because(why));
        }
        Ok(())
    }

    /// Refuses a machine with a key that the policy does not name. That Secure Boot is on is already known.
    pub(crate) fn judge(&self, got: &SecureBoot) -> Result<(), Refusal> {
        let mut refused = vec![];
        for (field, accepted, present) in [
            ("pk", &self.pk, &got.pk),
            ("kek", &self.kek, &got.kek),
            ("db", &self.db, &got.db),
            ("signers", &self.signers, &got.signers),
        ] {
            if !accepted.is_empty() && present.is_empty() {
                let text = match field {
                    "signers" => "nothing was verified before the boot loader ran".to_owned(),
                    variable => format!("the variable {variable} of its firmware is empty"),
                };
                let refusal = Kind::Measurement.because(text + " (PCR 7)");
                refused.push(refusal.of(format!("secureBoot.{field}")));
            }
            let is_other = |entry: &&KeyEntry| !accepted.contains(&Digits(entry.id));
            let others = present.iter().filter(is_other);
            for other in others.filter(|_| !accepted.is_empty()).take(SHOWN) {
                let what = match field {
                    "signers" => "a driver or boot loader was verified by".to_owned(),
                    variable => format!("the variable {variable} of its firmware has"),
                };
                let text = format!("{what} {other}, which the policy does not name");
                let refusal = Kind::Measurement.because(text);
                refused.push(
                    refusal
                        .of(format!("secureBoot.{field}"))
                        .got(hex(&other.id)),
                );
            }
        }
        Refusal::join(refused)
    }
}
