//! The software TPM of a node. Each node has its own attestation key, by which the service distinguishes machines. It is an ECC
//! key, because creating ten thousand RSA keys takes minutes.

use std::collections::BTreeMap;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ring::digest::{SHA256, digest};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
use serde_json::json;
use verifier::{IssueError, Issuer, KeyName, Oid};

/// TPMT_PUBLIC before the point: an ECC key of nameAlg SHA-256 with the attributes of an attestation key, without policy, for ECDSA
/// with SHA-256 on P-256 (TCG, part 2, §12.2.4).
const TEMPLATE: &[u8] = b"\0\x23\0\x0b\0\x05\0\x72\0\0\0\x10\0\x18\0\x0b\0\x03\0\x10";
/// TPM_RH_OWNER: the parent of an attestation key.
const OWNER: &[u8] = b"\x40\0\0\x01";

/// The policy of the storm: the machine belongs to no cluster.
pub const POLICY: &str = r#"{"exceptions":["any-image"],"measurements":{"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false}}}"#;

/// A TPM of one machine: its firmware has extended PCR 4 and 7, which a verifier demands of any firmware, and all
/// other PCRs are zero, unless it belongs to a cluster.
pub struct Tpm {
    key: EcdsaKeyPair,
    /// PCR 15.
    cluster: [u8; 32],
}

impl Tpm {
    /// The TPM of a machine that belongs to no cluster.
    pub fn new() -> Tpm {
        Tpm::of_member([0; 32])
    }

    /// The TPM of a member, with this value of PCR 15.
    pub fn of_member(cluster: [u8; 32]) -> Tpm {
        let (algorithm, random) = (&ECDSA_P256_SHA256_FIXED_SIGNING, SystemRandom::new());
        let made = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
        let key = EcdsaKeyPair::from_pkcs8(algorithm, made.as_ref(), &random).unwrap();
        Tpm { key, cluster }
    }

    /// Returns the name of the machine in a record.
    #[allow(dead_code)] // not used by every test
    pub fn machine(&self) -> String {
        KeyName::of(&self.public()).digest()
    }

    fn public(&self) -> Vec<u8> {
        // the uncompressed point: a 4, then both coordinates
        let (x, y) = self.key.public_key().as_ref()[1..].split_at(32);
        [TEMPLATE, &sized(x), &sized(y)].concat()
    }
}

/// Encodes a TPM2B structure: the length, then the bytes.
fn sized(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_be_bytes()[..], bytes].concat()
}

fn sha256(parts: &[&[u8]]) -> Vec<u8> {
    digest(&SHA256, &parts.concat()).as_ref().to_vec()
}

impl Issuer for Tpm {
    fn oid(&self) -> Oid {
        verifier::qemu_vtpm::OID
    }

    /// Returns TPMS_ATTEST, TPMT_SIGNATURE and TPMT_PUBLIC (TCG, "Trusted Platform Module Library",
    /// part 2, §§10.12, 11.3.4, 12.2.4).
    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        let mut values = [[0; 32]; 24];
        (values[4], values[7], values[15]) = ([4; 32], [7; 32], self.cluster);
        let public = self.public();
        let name = [&b"\0\x0b"[..], &sha256(&[&public])].concat();
        let signer = [&b"\0\x0b"[..], &sha256(&[OWNER, &name])].concat();
        let mut attest = b"\xffTCG\x80\x18".to_vec();
        attest.extend(sized(&signer));
        attest.extend(sized(&sha256(&[&sha256(&[user_data, nonce])])));
        attest.extend([0; 17 + 8]);
        attest.extend(b"\0\0\0\x01\0\x0b\x03\xff\xff\xff");
        attest.extend(sized(&sha256(&[values.as_flattened()])));
        let signature = self.key.sign(&SystemRandom::new(), &attest);
        let signature = signature.map_err(|e| IssueError::new(e.to_string()))?;
        let (r, s) = signature.as_ref().split_at(32);
        let signature = [&b"\0\x18\0\x0b"[..], &sized(r), &sized(s)].concat();
        let base64 = |bytes: &[u8]| BASE64_STANDARD.encode(bytes);
        let pcrs: BTreeMap<String, String> = values
            .iter()
            .enumerate()
            .map(|(index, value)| (index.to_string(), base64(value)))
            .collect();
        let document = json!({
            "Attestation": {
                "ak_pub": base64(&public),
                "quotes": [{"quote": base64(&attest), "raw_sig": base64(&signature), "pcrs": {"hash": 11, "pcrs": pcrs}}],
            },
            "InstanceInfo": null,
            "UserData": base64(user_data),
        });
        Ok(document.to_string().into_bytes())
    }
}
