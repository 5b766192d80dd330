//! What a policy of the old system demands of machines with SEV-SNP: the members stand beside `measurements`.
//!
//! ```json
//! {"measurements":{..},"bootloaderVersion":4,"teeVersion":0,"snpVersion":24,"microcodeVersion":219,
//!  "firmwareSignerConfig":{"acceptedKeyDigests":["0356.."],"enforcementPolicy":"Equal","maaURL":""},"amdRootKey":"-----BEGIN ..","amdSigningKey":""}
//! ```
//!
//! `firmwareSignerConfig` is Azure's. Beside them, `"snp":{..}` has what only we demand.

use std::collections::BTreeSet;

use hardware::snp::demands;
use hardware::snp::tcb::Tcb;
use hardware::some;
use serde::{Deserialize, Serialize};

use super::unhex;

/// The demands. An absent one demands nothing. Versions that say `latest` are refused: the old system's tool replaces them by numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Demands {
    /// The minimum versions of the parts of the TCB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bootloader_version: Option<u8>,
    /// As before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tee_version: Option<u8>,
    /// As before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snp_version: Option<u8>,
    /// As before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub microcode_version: Option<u8>,
    /// Who may have signed the firmware of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub firmware_signer_config: Option<FirmwareSigner>,
    /// AMD's root in PEM, or empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub amd_root_key: Option<String>,
    /// AMD's certificate below the root in PEM, or empty. Only the built-in ones count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub amd_signing_key: Option<String>,
    /// What only we demand.
    #[serde(default, skip_serializing_if = "is_default")]
    pub snp: Further,
}

/// Who may have signed the ID block of the firmware.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FirmwareSigner {
    /// SHA-384 of the accepted ID keys in hexadecimal.
    #[serde(default)]
    pub accepted_key_digests: Vec<String>,
    /// What happens with another key.
    pub enforcement_policy: Enforcement,
    /// Where Microsoft's attestation service is: nobody asks it.
    #[serde(rename = "maaURL", default)]
    pub maa_url: String,
}

/// What happens if the firmware has another signer than the accepted ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Enforcement {
    /// The machine is refused.
    #[serde(alias = "equal")]
    Equal,
    /// The machine is refused, as nobody asks Microsoft's attestation service.
    #[serde(rename = "MAAFallback", alias = "maafallback")]
    MaaFallback,
    /// The machine is accepted with a warning.
    #[serde(alias = "warnonly")]
    WarnOnly,
}

/// What only we demand: each list names what is accepted, in hexadecimal; an absent one accepts everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Further {
    /// Launch digests: 48 bytes.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "some")]
    pub launch_measurements: Vec<String>,
    /// Chips: 64 bytes (Turin: 8).
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "some")]
    pub chips: Vec<String>,
    /// Host data: 32 bytes.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "some")]
    pub host_data: Vec<String>,
    /// The minimum version of the guest.
    #[serde(skip_serializing_if = "is_default")]
    pub minimum_guest_svn: u32,
    /// Whether simultaneous multithreading is refused.
    #[serde(skip_serializing_if = "is_default")]
    pub refuse_smt: bool,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl Demands {
    /// Returns the demands of the crate `hardware`, without the signer of the firmware. An error is a clause about one of them.
    pub fn of_report(&self) -> Result<demands::Demands, String> {
        let further = &self.snp;
        let chips = further.chips.iter().map(|chip| {
            let long = unhex::<64>(chip).map(|chip| chip.to_vec());
            let chip_of_turin = || unhex::<8>(chip).map(|chip| chip.to_vec());
            long.or_else(chip_of_turin).ok_or_else(|| {
                format!("snp: chips: expected 128 or 16 hex digits, got {chip:.140?}")
            })
        });
        Ok(demands::Demands {
            minimum: Tcb {
                fmc: 0,
                bootloader: self.bootloader_version.unwrap_or(0),
                tee: self.tee_version.unwrap_or(0),
                snp: self.snp_version.unwrap_or(0),
                microcode: self.microcode_version.unwrap_or(0),
            },
            minimum_guest_svn: further.minimum_guest_svn,
            refuse_smt: further.refuse_smt,
            chips: chips.collect::<Result<_, _>>()?,
            measurements: digits("snp: launchMeasurements", &further.launch_measurements)?,
            host_data: digits("snp: hostData", &further.host_data)?,
            ..demands::Demands::default()
        })
    }

    /// Checks the key that signed the ID block of a machine, whose digest this is.
    pub fn check_firmware_signer(&self, digest: &[u8; 48]) -> Result<(), String> {
        let Some(signer) = &self.firmware_signer_config else {
            return Ok(());
        };
        let accepted: BTreeSet<[u8; 48]> =
            digits("firmwareSignerConfig", &signer.accepted_key_digests)?;
        if accepted.contains(digest) {
            return Ok(());
        }
        let why = format!(
            "ID_KEY_DIGEST is {}, which firmwareSignerConfig does not name",
            super::hex(digest)
        );
        match signer.enforcement_policy {
            Enforcement::WarnOnly => {
                log::warn!("{why}");
                Ok(())
            }
            Enforcement::Equal => Err(why),
            Enforcement::MaaFallback => Err(format!(
                "{why}, and no program asks Microsoft's attestation service (MAAFallback)"
            )),
        }
    }

    /// Says as a clause what is wrong with a demand.
    pub fn check_form(&self) -> Result<(), String> {
        self.of_report()?;
        match &self.firmware_signer_config {
            Some(signer) => {
                digits::<48>("firmwareSignerConfig", &signer.accepted_key_digests).map(drop)
            }
            None => Ok(()),
        }
    }
}

fn digits<const N: usize>(name: &str, list: &[String]) -> Result<BTreeSet<[u8; N]>, String> {
    let one = |text: &String| {
        unhex(text).ok_or_else(|| {
            let digits = 2 * N;
            format!("{name}: expected {digits} hex digits, got {text:.140?}")
        })
    };
    list.iter().map(one).collect()
}
