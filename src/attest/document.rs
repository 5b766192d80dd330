//! The attestation document of TPM variants: JSON with the same fields as Constellation's Go
//! structures.

use std::collections::BTreeMap;
use std::fmt;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The document.
#[derive(Serialize, Deserialize)]
pub struct Document {
    /// The data from the TPM.
    #[serde(rename = "Attestation")]
    pub attestation: Attestation,
    /// Bytes that are specific to the cloud. The nonce of the quote includes them. Empty in QEMU.
    #[serde(rename = "InstanceInfo")]
    pub instance_info: Option<Base64>,
    /// The data that the issuer bound to the quote.
    #[serde(rename = "UserData")]
    pub user_data: Base64,
}

/// The part that comes from the TPM.
#[derive(Serialize, Deserialize)]
pub struct Attestation {
    /// The attestation key (TPMT_PUBLIC).
    pub ak_pub: Base64,
    /// One quote for each bank.
    pub quotes: Vec<Quote>,
    /// The event log of the firmware; empty if the machine has none.
    #[serde(default, skip_serializing_if = "Base64::is_empty")]
    pub event_log: Base64,
    /// The certificate of the attestation key, DER.
    #[serde(default, skip_serializing_if = "Base64::is_empty")]
    pub ak_cert: Base64,
    /// Constellation uses this field for confidential VMs. It is ignored when read, and null when
    /// written.
    #[serde(rename = "TeeAttestation", default, skip_deserializing)]
    pub tee_attestation: (),
}

/// The quote of one bank.
#[derive(Serialize, Deserialize)]
pub struct Quote {
    /// TPMS_ATTEST.
    pub quote: Base64,
    /// TPMT_SIGNATURE.
    pub raw_sig: Base64,
    /// The quoted values.
    pub pcrs: Pcrs,
}

/// The quoted values. The quote signs only their digest.
#[derive(Serialize, Deserialize)]
pub struct Pcrs {
    /// TPM_ALG_ID of the bank.
    pub hash: u16,
    /// The values by decimal number of the PCR.
    #[serde(deserialize_with = "without_repetition")]
    pub pcrs: BTreeMap<String, Base64>,
}

/// Reads an object and refuses duplicate names: otherwise two readers of one document could see
/// different values.
fn without_repetition<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, Base64>, D::Error> {
    struct Values;

    impl<'de> Visitor<'de> for Values {
        type Value = BTreeMap<String, Base64>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object with the values of registers")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut values = BTreeMap::new();
            while let Some((name, value)) = map.next_entry()? {
                if values.insert(name, value).is_some() {
                    return Err(serde::de::Error::custom("a register occurs twice"));
                }
            }
            Ok(values)
        }
    }

    deserializer.deserialize_map(Values)
}

/// Bytes that JSON represents as standard base64 with padding.
#[derive(Clone, Default)]
pub struct Base64(pub Vec<u8>);

impl Base64 {
    /// Returns whether there are no bytes.
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
