//! Intel's published data about a TDX platform. A machine can send it with its quote; the crate
//! `hardware` verifies it.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Intel's published data about a platform. The JSON has the form of the crate `dcap-qvl`, which
/// other tools write, too. A derived parser would be 4 KB of `unlock`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Value")]
pub struct TdxCollateral {
    /// The levels of the platform: the exact bytes that Intel signed.
    pub tcb_info: String,
    /// The signature, r ‖ s, in hexadecimal digits.
    pub tcb_info_signature: Hex,
    /// The certificates of the signer in PEM.
    pub tcb_info_issuer_chain: String,
    /// The identity of the quoting enclave: the exact bytes that Intel signed.
    pub qe_identity: String,
    /// The signature of the identity.
    pub qe_identity_signature: Hex,
    /// The certificates of the signer of the identity in PEM.
    pub qe_identity_issuer_chain: String,
    /// The list of revoked CAs, in DER.
    pub root_ca_crl: Hex,
    /// The list of revoked platforms, in DER.
    pub pck_crl: Hex,
    /// The certificates of the CA that signed the list of platforms, in PEM. The quote contains
    /// them, too.
    pub pck_crl_issuer_chain: String,
}

/// Bytes, in JSON as hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hex(pub Vec<u8>);

impl Serialize for Hex {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&crate::hex(&self.0))
    }
}

impl TryFrom<Value> for TdxCollateral {
    type Error = String;

    fn try_from(json: Value) -> Result<Self, Self::Error> {
        let text = |name: &str| {
            String::deserialize(&json[name]).map_err(|error| format!("{name}: {error}"))
        };
        let bytes =
            |name: &str| Hex::deserialize(&json[name]).map_err(|error| format!("{name}: {error}"));
        Ok(TdxCollateral {
            tcb_info: text("tcb_info")?,
            tcb_info_signature: bytes("tcb_info_signature")?,
            tcb_info_issuer_chain: text("tcb_info_issuer_chain")?,
            qe_identity: text("qe_identity")?,
            qe_identity_signature: bytes("qe_identity_signature")?,
            qe_identity_issuer_chain: text("qe_identity_issuer_chain")?,
            root_ca_crl: bytes("root_ca_crl")?,
            pck_crl: bytes("pck_crl")?,
            pck_crl_issuer_chain: match &json["pck_crl_issuer_chain"] {
                Value::Null => String::new(),
                _ => text("pck_crl_issuer_chain")?,
            },
        })
    }
}

impl<'de> Deserialize<'de> for Hex {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Hex, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = crate::unhex(&text).map(Hex);
        bytes.ok_or_else(|| serde::de::Error::custom("expected hexadecimal digits"))
    }
}
