//! The runtime data of Azure's paravisor: JSON with the attestation key of the TPM. `attest`
//! describes the report that contains the runtime data. The hardware signed its hash.

use std::collections::BTreeMap;

pub use attest::hcl::*;
use base::text::unhex;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hardware::claims::Property;
use serde::Deserialize;
use serde_json::Value;

use crate::refusal::{Kind, Refusal};
use crate::spki::rsa_spki;
use crate::{printable, sha256};

/// Maximum size of runtime data in bytes. Genuine data has about 1200.
const MAX_RUNTIME_DATA: usize = 16 << 10;
/// The name of the attestation key among the keys of the runtime data.
const ATTESTATION_KEY: &str = "HCLAkPub";
/// Maximum length of a text of the runtime data that is shown.
const SHOWN: usize = 160;

/// The paravisor's statements about a machine.
#[derive(Debug, PartialEq)]
pub struct RuntimeData {
    /// The attestation key as certificates contain it: SubjectPublicKeyInfo, DER.
    pub attestation_key: Vec<u8>,
    /// The configuration of the machine by name: `secure-boot`, `vmUniqueId`. Values that are not
    /// strings, numbers or booleans are omitted.
    pub configuration: BTreeMap<String, String>,
    /// The data that the machine wrote to the NV index 0x1400002 before the report was made.
    pub user_data: Option<Vec<u8>>,
}

/// The members that are read; a member that occurs twice is an error.
#[derive(Deserialize)]
struct Members {
    keys: Vec<Key>,
    #[serde(rename = "vm-configuration", default)]
    configuration: BTreeMap<String, Value>,
    #[serde(rename = "user-data")]
    user_data: Option<String>,
}

/// A JSON Web Key (RFC 7517).
#[derive(Deserialize)]
struct Key {
    kid: String,
    kty: String,
    n: Option<String>,
    e: Option<String>,
}

impl RuntimeData {
    /// Parses runtime data.
    pub fn parse(json: &[u8]) -> Result<RuntimeData, Refusal> {
        if json.len() > MAX_RUNTIME_DATA {
            let len = json.len();
            return malformed(format!(
                "the runtime data has {len} bytes, expected at most {MAX_RUNTIME_DATA}"
            ));
        }
        let members: Members = crate::json::read("runtime data", json)?;
        let mut keys = members.keys.iter().filter(|key| key.kid == ATTESTATION_KEY);
        let (Some(key), None) = (keys.next(), keys.next()) else {
            return malformed(format!(
                "the runtime data does not have exactly one key with the kid {ATTESTATION_KEY}"
            ));
        };
        let user_data = match members.user_data {
            Some(text) => match unhex(&text) {
                Some(bytes) => Some(bytes),
                None => return malformed("the user-data of the runtime data is not hex"),
            },
            None => None,
        };
        let configuration = members.configuration.into_iter();
        Ok(RuntimeData {
            attestation_key: key.spki()?,
            configuration: configuration
                .filter_map(|(name, value)| Some((name, plain(&value)?)))
                .collect(),
            user_data,
        })
    }

    /// Returns the parts of the configuration that are shown to people.
    pub fn properties(&self) -> Vec<Property> {
        const SHOWN: [&str; 3] = ["vmUniqueId", "secure-boot", "console-enabled"];
        let shown = SHOWN.into_iter().filter_map(|name| {
            let value = self.configuration.get(name)?.clone();
            Some(Property { name, value })
        });
        shown.collect()
    }

    /// Parses runtime data whose hash the hardware has signed: `report_data` is SHA-256 of it and
    /// 32 zeros. Its attestation key must be `spki`.
    pub fn verify(json: &[u8], report_data: &[u8], spki: &[u8]) -> Result<RuntimeData, Refusal> {
        let Some((hash, zeros)) = report_data.split_at_checked(32) else {
            return malformed("the report of the hardware has no report data");
        };
        if hash != sha256(&[json]) || zeros != [0; 32] {
            return Err(Kind::Binding
                .because("the hardware has signed other runtime data than that of the document"));
        }
        let data = RuntimeData::parse(json)?;
        if data.attestation_key == spki {
            Ok(data)
        } else {
            Err(Kind::Binding.because(format!(
                "the attestation key is not the {ATTESTATION_KEY} of the runtime data"
            )))
        }
    }
}

impl Key {
    fn spki(&self) -> Result<Vec<u8>, Refusal> {
        let number = |text: &Option<String>| {
            let text = text.as_deref().unwrap_or_default();
            URL_SAFE_NO_PAD
                .decode(text)
                .or_else(|_| malformed(format!("{ATTESTATION_KEY} is not in base64url")))
        };
        let (modulus, exponent) = (number(&self.n)?, number(&self.e)?);
        if self.kty != "RSA" || exponent != [1, 0, 1] {
            return malformed(format!(
                "{ATTESTATION_KEY} is not an RSA key with the exponent 65537"
            ));
        }
        // the sizes that TPMs support; a number without leading zeros has one form (RFC 7518
        // §6.3.1.1)
        if !matches!(modulus.len(), 256 | 384 | 512) || modulus[0] >> 7 == 0 {
            return malformed(format!("the modulus of {ATTESTATION_KEY} has a wrong size"));
        }
        Ok(rsa_spki(&modulus))
    }
}

fn malformed<T>(why: impl Into<String>) -> Result<T, Refusal> {
    Err(Kind::Malformed.because(why))
}

fn plain(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(printable(text, SHOWN)),
        Value::Bool(_) | Value::Number(_) => Some(value.to_string()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    const MODULUS: [u8; 256] = [0xab; 256];

    fn json() -> String {
        let n = URL_SAFE_NO_PAD.encode(MODULUS);
        // order and form of genuine data; older firmware labels the key with "encrypt"
        format!(
            r#"{{"keys":[{{"kid":"HCLEkPub","key_ops":["encrypt"],"kty":"RSA","e":"AQAB","n":"AAAA"}},{{"kid":"HCLAkPub","key_ops":["sign"],"kty":"RSA","e":"AQAB","n":"{n}"}}],"vm-configuration":{{"console-enabled":false,"secure-boot":true,"vmUniqueId":"A-1"}},"user-data":"00Ff"}}"#
        )
    }

    fn report_data(json: &str) -> Vec<u8> {
        [sha256(&[json.as_bytes()]), [0; 32]].concat()
    }

    #[test]
    fn the_key_is_chosen_by_its_name_and_the_configuration_is_read() {
        let json = json();
        let data =
            RuntimeData::verify(json.as_bytes(), &report_data(&json), &rsa_spki(&MODULUS)).unwrap();
        assert_eq!(data.configuration["secure-boot"], "true");
        assert_eq!(data.configuration["vmUniqueId"], "A-1");
        assert_eq!(data.user_data.as_deref(), Some(&[0, 0xff][..]));
    }

    #[test]
    fn what_the_hardware_did_not_sign_is_refused() {
        let (json, spki) = (json(), rsa_spki(&MODULUS));
        let signed = report_data(&json);
        let refusal = |json: &str, signed: &[u8], spki: &[u8]| {
            RuntimeData::verify(json.as_bytes(), signed, spki)
                .unwrap_err()
                .to_string()
        };
        let altered = json.replace("\"secure-boot\":true", "\"secure-boot\":null");
        assert!(refusal(&altered, &signed, &spki).contains("other runtime data"));
        let mut nonzero = signed.clone();
        nonzero[63] = 1;
        assert!(refusal(&json, &nonzero, &spki).contains("other runtime data"));
        assert!(refusal(&json, &signed[..31], &spki).contains("no report data"));
        assert!(refusal(&json, &signed[..32], &spki).contains("other runtime data"));
        assert!(refusal(&json, &signed, &rsa_spki(&[0xac; 256])).contains("not the HCLAkPub"));
    }

    #[test]
    fn tricks_with_json_are_refused() {
        let good = json();
        let replaced = |from: &str, to: &str| good.replace(from, to);
        for (bad, why) in [
            (replaced("HCLAkPub", "HclAkPub"), "exactly one"),
            (replaced("HCLEkPub", "HCLAkPub"), "exactly one"),
            (replaced("\"keys\"", "\"keys\":[],\"keys\""), "duplicate"),
            (
                replaced("\"kid\":\"HCLAkPub\"", "\"kid\":\"x\",\"kid\":\"HCLAkPub\""),
                "duplicate",
            ),
            (
                replaced(
                    "\"kty\":\"RSA\",\"e\":\"AQAB\",\"n\":\"q",
                    "\"kty\":\"EC\",\"e\":\"AQAB\",\"n\":\"q",
                ),
                "not an RSA key",
            ),
            (good.replacen("AQAB", "AAEAAQ", 2), "not an RSA key"),
            (replaced("\"n\":\"q", "\"n\":\"Kq"), "wrong size"),
            (replaced("\"n\":\"q", "\"n\":\"+"), "base64url"),
            (replaced("\"n\":\"q", "\"n\":\"K"), "wrong size"),
            (replaced("00Ff", "00F"), "not hex"),
            (format!("{good}{{}}"), "cannot be read"),
            (" ".repeat(MAX_RUNTIME_DATA + 1), "at most"),
        ] {
            let error = RuntimeData::parse(bad.as_bytes()).unwrap_err();
            assert_eq!(error.kind, Kind::Malformed);
            assert!(error.text.contains(why), "{error}, expected {why}");
        }
    }

    #[test]
    fn no_altered_byte_of_the_runtime_data_is_accepted() {
        let (json, spki) = (json(), rsa_spki(&MODULUS));
        let signed = report_data(&json);
        for bytes in mutations(json.as_bytes(), 10_000) {
            let _ = RuntimeData::parse(&bytes);
            let accepted = RuntimeData::verify(&bytes, &signed, &spki);
            assert_eq!(accepted.is_ok(), bytes == json.as_bytes());
        }
    }
}
