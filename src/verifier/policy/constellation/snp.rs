//! The requirements of a Constellation policy for SEV-SNP machines: these members are in the same
//! object as `measurements`.
//!
//! ```json
//! {"measurements":{..},"bootloaderVersion":4,"teeVersion":0,"snpVersion":24,"microcodeVersion":219,
//!  "firmwareSignerConfig":{"acceptedKeyDigests":["0356.."],"enforcementPolicy":"Equal","maaURL":""},"amdRootKey":"-----BEGIN ..","amdSigningKey":""}
//! ```
//!
//! `firmwareSignerConfig` is Azure's. Next to them, `"snp":{..}` has the requirements that only
//! Firstlight knows.

use super::super::error::{Fault, PolicyError};
use crate::refusal::{Kind, Refusal};
use base::text;
use hardware::json::{Digits, is_default};
use hardware::snp::requirements::SnpRequirements;
use hardware::snp::tcb::Tcb;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

/// The requirements. An absent one has no effect. `latest` as a version is refused: Constellation's
/// tool replaces it by a number.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OldSnpRequirements {
    /// The minimum version of the boot loader.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bootloader_version: Option<u8>,
    /// The minimum version of the TEE.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tee_version: Option<u8>,
    /// The minimum version of the SNP firmware.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snp_version: Option<u8>,
    /// The minimum version of the microcode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub microcode_version: Option<u8>,
    /// The accepted signers of the machine's firmware.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub firmware_signer_config: Option<FirmwareSigner>,
    /// AMD's root in PEM, or empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub amd_root_key: Option<String>,
    /// AMD's certificate below the root in PEM, or empty. It is tried in addition to the built-in
    /// ones and the machine's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub amd_signing_key: Option<String>,
    /// The requirements that Constellation does not have.
    #[serde(default, skip_serializing_if = "is_default")]
    pub snp: SnpRequirements,
}

/// The accepted signers of the firmware's ID block.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FirmwareSigner {
    /// SHA-384 of the accepted ID keys: a list; in old policies also a single value.
    #[serde(default, deserialize_with = "one_or_several")]
    pub accepted_key_digests: Vec<Digits<48>>,
    /// What happens if the machine has another key.
    pub enforcement_policy: Enforcement,
    /// The URL of Microsoft's attestation service, used with `MAAFallback`; or empty.
    #[serde(rename = "maaURL", default)]
    pub maa_url: String,
}

/// What happens if another key than the accepted ones signed the firmware. Case is ignored; old
/// policies have `true` for `Equal`, and `false` for `WarnOnly`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Enforcement {
    /// The machine is refused.
    Equal,
    /// Microsoft's attestation service is asked whether the firmware is Azure's.
    #[serde(rename = "MAAFallback")]
    MaaFallback,
    /// The machine is accepted with a warning.
    WarnOnly,
}

impl<'de> Deserialize<'de> for Enforcement {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Enforcement, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "expected Equal, MAAFallback or WarnOnly")]
        enum Form {
            Old(bool),
            Word(String),
        }
        let word = match Form::deserialize(deserializer)? {
            Form::Old(true) => return Ok(Enforcement::Equal),
            Form::Old(false) => return Ok(Enforcement::WarnOnly),
            Form::Word(word) => word,
        };
        match word.to_ascii_lowercase().as_str() {
            "equal" => Ok(Enforcement::Equal),
            "maafallback" => Ok(Enforcement::MaaFallback),
            "warnonly" => Ok(Enforcement::WarnOnly),
            _ => Err(D::Error::custom(format!(
                "enforcementPolicy: expected Equal, MAAFallback or WarnOnly, got {}",
                text::quoted(&word, 40)
            ))),
        }
    }
}

fn one_or_several<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Digits<48>>, D::Error> {
    #[derive(Deserialize)]
    #[serde(
        untagged,
        expecting = "acceptedKeyDigests: expected 96 hexadecimal digits, or a list of such"
    )]
    enum Form {
        One(Digits<48>),
        Several(Vec<Digits<48>>),
    }
    Ok(match Form::deserialize(deserializer)? {
        Form::One(one) => vec![one],
        Form::Several(several) => several,
    })
}

impl OldSnpRequirements {
    /// Returns the requirements as the crate `hardware` has them, without the firmware's signer.
    pub fn of_report(&self) -> SnpRequirements {
        SnpRequirements {
            minimum: Tcb {
                fmc: 0,
                bootloader: self.bootloader_version.unwrap_or(0),
                tee: self.tee_version.unwrap_or(0),
                snp: self.snp_version.unwrap_or(0),
                microcode: self.microcode_version.unwrap_or(0),
            },
            ..self.snp.clone()
        }
    }

    /// Returns whether Microsoft's attestation service is asked about a signer that is not in the
    /// policy.
    pub fn asks_microsoft(&self) -> bool {
        let signer = self.firmware_signer_config.as_ref();
        signer.is_some_and(|it| it.enforcement_policy == Enforcement::MaaFallback)
    }

    /// Checks the form of the URL of Microsoft's attestation service, if it is used:
    /// `https://HOST[:PORT]`. The service repeats the URL in its tokens.
    pub fn check_maa_url(&self) -> Result<(), PolicyError> {
        let signer = self.firmware_signer_config.as_ref();
        let url = signer.map_or("", |signer| signer.maa_url.trim_end_matches('/'));
        let (scheme, host) = url.split_at_checked("https://".len()).unwrap_or_default();
        let (name, port) = host.split_once(':').unwrap_or((host, "443"));
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-');
        let is_url = scheme.eq_ignore_ascii_case("https://")
            && !name.is_empty()
            && name.bytes().all(is_name)
            && port.parse::<u16>().is_ok();
        if is_url || url.is_empty() || !self.asks_microsoft() {
            return Ok(());
        }
        // the URL may contain a password
        Err(Fault::Requirement.because("maaURL: expected https://HOST[:PORT], such as https://sharedweu.weu.attest.azure.net, or nothing"))
    }

    /// Checks the digest of the key that signed a machine's ID block. Returns the URL of the service that must be asked about it;
    /// `None` if none must be asked.
    pub fn check_firmware_signer(&self, digest: &[u8; 48]) -> Result<Option<&str>, Refusal> {
        let Some(signer) = &self.firmware_signer_config else {
            return Ok(None);
        };
        if signer.accepted_key_digests.contains(&Digits(*digest)) {
            return Ok(None);
        }
        let why = format!(
            "ID_KEY_DIGEST is {}, which firmwareSignerConfig does not name",
            crate::hex(digest)
        );
        let refused = |text: String| {
            let refusal = Kind::Measurement.because(text).of("firmwareSignerConfig");
            refusal.got(crate::hex(digest))
        };
        match signer.enforcement_policy {
            Enforcement::WarnOnly => {
                log::warn!("{why}");
                Ok(None)
            }
            Enforcement::Equal => Err(refused(why)),
            Enforcement::MaaFallback if signer.maa_url.is_empty() => Err(refused(format!(
                "{why}, and maaURL does not name the service to ask about it (MAAFallback)"
            ))),
            Enforcement::MaaFallback => Ok(Some(&signer.maa_url)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signer_of_the_firmware_is_read_in_each_form_of_the_old_system() {
        let digest = "0a".repeat(48);
        let read = |digests: &str, enforcement: &str| {
            serde_json::from_str::<FirmwareSigner>(&format!(
                r#"{{"acceptedKeyDigests":{digests},"enforcementPolicy":{enforcement},"maaURL":""}}"#
            ))
        };
        let list = format!("[\"{digest}\"]");
        for (given, expected) in [
            ("\"Equal\"", Enforcement::Equal),
            ("\"EQUAL\"", Enforcement::Equal),
            ("true", Enforcement::Equal),
            ("\"MAAFallback\"", Enforcement::MaaFallback),
            ("\"maafallback\"", Enforcement::MaaFallback),
            ("\"WarnOnly\"", Enforcement::WarnOnly),
            ("false", Enforcement::WarnOnly),
        ] {
            let signer = read(&list, given).unwrap();
            assert_eq!(signer.enforcement_policy, expected, "{given}");
            let same = read(&list, &serde_json::to_string(&expected).unwrap()).unwrap();
            assert_eq!(same, signer);
        }
        assert_eq!(
            serde_json::to_string(&Enforcement::MaaFallback).unwrap(),
            "\"MAAFallback\""
        );
        let alone = read(&format!("\"{digest}\""), "true").unwrap();
        assert_eq!(alone, read(&list, "true").unwrap());
        for (digests, enforcement, why) in [
            (&*list, "\"Never\"", "got \"Never\""),
            (&list, "1", "expected Equal"),
            ("[\"0a\"]", "true", "96 hexadecimal digits"),
            ("7", "true", "96 hexadecimal digits"),
        ] {
            let error = read(digests, enforcement).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
