//! A program without a TPM that imitates one: it signs quotes with a key that it made itself.

use std::collections::BTreeMap;
use std::process::Command;

use attest::attestation::{IssueError, Issuer, KeyName, Oid, qemu_vtpm};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{SHA256, digest};
use ring::rand::SystemRandom;
use ring::rsa::KeyPair as RsaKeyPair;
use ring::signature::{KeyPair, RSA_PKCS1_SHA256, RsaPublicKeyComponents};
use serde_json::json;

pub struct Forger {
    key: RsaKeyPair,
}

impl Forger {
    pub fn new() -> Forger {
        const MAKE: &str = "openssl genrsa 2048 | openssl pkcs8 -topk8 -nocrypt -outform DER";
        let made = Command::new("sh").args(["-c", MAKE]).output().unwrap();
        Forger {
            key: RsaKeyPair::from_pkcs8(&made.stdout).unwrap(),
        }
    }

    /// Returns the Name that its key would have in a TPM.
    #[allow(dead_code)] // not by every test
    pub fn key_name(&self) -> KeyName {
        KeyName::of(&self.public())
    }

    /// Returns the TPMT_PUBLIC (TCG, "Trusted Platform Module Library", part 2, §12.2.4) of its key, by the genuine template.
    fn public(&self) -> Vec<u8> {
        let components: RsaPublicKeyComponents<Vec<u8>> = self.key.public_key().into();
        [
            b"\0\x01\0\x0b\0\x05\0\x72\0\0\0\x10\0\x14\0\x0b\x08\0\0\0\0\0",
            &sized(&components.n)[..],
        ]
        .concat()
    }
}

impl Issuer for Forger {
    fn oid(&self) -> Oid {
        qemu_vtpm::OID
    }

    /// Returns TPMS_ATTEST and TPMT_SIGNATURE (part 2, §§10.12, 11.3.4) of a machine whose PCRs are all zero.
    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        let values = [[0; 32]; 24];
        let mut attest = b"\xffTCG\x80\x18\0\0".to_vec();
        attest.extend(sized(&sha256(&sha256(&[user_data, nonce].concat()))));
        // clockInfo, firmwareVersion
        attest.extend([0; 17 + 8]);
        attest.extend(b"\0\0\0\x01\0\x0b\x03\xff\xff\xff");
        attest.extend(sized(&sha256(values.as_flattened())));
        let mut signature = vec![0; self.key.public().modulus_len()];
        self.key
            .sign(
                &RSA_PKCS1_SHA256,
                &SystemRandom::new(),
                &attest,
                &mut signature,
            )
            .unwrap();
        let signature = [&b"\0\x14\0\x0b"[..], &sized(&signature)].concat();
        let pcrs: BTreeMap<_, _> = values
            .iter()
            .enumerate()
            .map(|(pcr, value)| (pcr.to_string(), STANDARD.encode(value)))
            .collect();
        let document = json!({
            "Attestation": {
                "ak_pub": STANDARD.encode(self.public()),
                "quotes": [{
                    "quote": STANDARD.encode(&attest), "raw_sig": STANDARD.encode(&signature),
                    "pcrs": {"hash": 11, "pcrs": pcrs},
                }],
            },
            "InstanceInfo": null,
            "UserData": STANDARD.encode(user_data),
        });
        Ok(document.to_string().into_bytes())
    }
}

/// TPM2B_..
fn sized(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_be_bytes()[..], bytes].concat()
}

fn sha256(data: &[u8]) -> Vec<u8> {
    digest(&SHA256, data).as_ref().to_vec()
}
