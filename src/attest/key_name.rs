//! The Name of an attestation key (TPM 2.0 part 1 §16): nameAlg, followed by the hash of the public
//! area with that algorithm. Two TPMs never have the same Name, so it identifies the machine of a
//! quote.
//!
//! `tpm2_readpublic -c 0x81008f01` prints the Name, and the node prints it on its console. Records
//! of joined machines contain it without the nameAlg, which is SHA-256 for all keys here.

use std::fmt;
use std::str::FromStr;

use base::text::quoted;

use super::{hex, sha256, unhex};

/// TPM_ALG_SHA256 (TCG Algorithm Registry) in hexadecimal.
const SHA256: &str = "000b";

/// The Name of a key whose nameAlg is SHA-256.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyName([u8; 32]);

impl KeyName {
    /// Returns the Name of a public area (TPMT_PUBLIC).
    pub fn of(public: &[u8]) -> KeyName {
        KeyName(sha256(&[public]))
    }

    /// Returns the Name without the nameAlg, as in [`super::Identified::machine`]: 64 hexadecimal
    /// digits.
    pub fn digest(&self) -> String {
        hex(&self.0)
    }
}

impl fmt::Display for KeyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SHA256}{}", self.digest())
    }
}

/// Parses a Name with or without the nameAlg.
impl FromStr for KeyName {
    type Err = String;

    fn from_str(text: &str) -> Result<KeyName, String> {
        let digest = if text.len() > 64 {
            text.strip_prefix(SHA256)
        } else {
            Some(text)
        };
        let digest = digest.and_then(unhex).map(KeyName);
        digest.ok_or_else(|| {
            format!(
                "not a Name of an attestation key: {}; expected {SHA256} and 64 hexadecimal digits",
                quoted(text, 80)
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_as_tpm2_readpublic_prints_it_and_as_records_have_it() {
        let name = KeyName::of(b"");
        // SHA-256 of the empty input
        let digest = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(
            (name.to_string(), name.digest()),
            (format!("000b{digest}"), digest.into())
        );
        for text in [
            format!("000b{digest}"),
            digest.into(),
            format!("000B{digest}")
                .to_uppercase()
                .replace("000B", "000b"),
        ] {
            assert_eq!(text.parse(), Ok(name), "{text}");
        }
    }

    #[test]
    fn what_is_no_name_is_refused() {
        let digits = "ab".repeat(32);
        for text in [
            "",
            "000b",
            &digits[1..],
            &format!("0004{digits}"),
            &format!("000b{digits}ab"),
            &format!("+{}", &digits[1..]),
        ] {
            assert!(text.parse::<KeyName>().is_err(), "{text}");
        }
        assert!(
            format!("000b{}", "ü".repeat(32))
                .parse::<KeyName>()
                .is_err()
        );
    }
}
