//! The attestation document of TPM variants: the JSON of the old system's Go structures, field for field.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A genuine one has about 30 KiB with four banks and a long event log.
pub const MAX_DOCUMENT: usize = 256 << 10;

/// The whole.
#[derive(Serialize, Deserialize)]
pub struct Document {
    #[serde(rename = "Attestation")]
    pub attestation: Attestation,
    /// Bytes of the cloud's own, hashed into the quote's nonce; none in QEMU.
    #[serde(rename = "InstanceInfo")]
    pub instance_info: Option<Base64>,
    #[serde(rename = "UserData")]
    pub user_data: Base64,
}

/// What the TPM says.
#[derive(Serialize, Deserialize)]
pub struct Attestation {
    /// TPMT_PUBLIC of the attestation key.
    pub ak_pub: Base64,
    /// One for each bank.
    pub quotes: Vec<Quote>,
    #[serde(default, skip_serializing_if = "Base64::is_empty")]
    pub event_log: Base64,
    /// Of confidential VMs; ignored here, and null from us.
    #[serde(rename = "TeeAttestation", default, skip_deserializing)]
    pub tee_attestation: (),
}

/// One bank's quote.
#[derive(Serialize, Deserialize)]
pub struct Quote {
    /// TPMS_ATTEST.
    pub quote: Base64,
    /// TPMT_SIGNATURE.
    pub raw_sig: Base64,
    pub pcrs: Pcrs,
}

/// The values that a quote is about, which it signs only by their digest.
#[derive(Serialize, Deserialize)]
pub struct Pcrs {
    /// TPM_ALG_ID of the bank.
    pub hash: u16,
    /// By the PCR's decimal number.
    pub pcrs: BTreeMap<String, Base64>,
}

impl Pcrs {
    /// By number; `None` if a name is not the number of a PCR in its one decimal form.
    pub fn by_number(&self) -> Option<BTreeMap<u32, Vec<u8>>> {
        let number = |name: &String| {
            name.parse::<u32>()
                .ok()
                .filter(|n| *n < 32 && n.to_string() == *name)
        };
        self.pcrs
            .iter()
            .map(|(name, value)| Some((number(name)?, value.0.clone())))
            .collect()
    }
}

/// Bytes that are standard base64 with padding in JSON.
#[derive(Default)]
pub struct Base64(pub Vec<u8>);

impl Base64 {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Serialize for Base64 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Base64, D::Error> {
        let text = String::deserialize(deserializer)?;
        STANDARD
            .decode(text)
            .map(Base64)
            .map_err(serde::de::Error::custom)
    }
}
