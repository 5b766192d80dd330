//! A program without a TPM that imitates one: it signs quotes with a key that it made itself.

use std::collections::BTreeMap;
use std::process::Command;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{SHA256, digest};
use ring::rand::SystemRandom;
use ring::rsa::KeyPair as RsaKeyPair;
use ring::signature::{KeyPair, RSA_PKCS1_SHA256, RsaPublicKeyComponents};
use serde_json::json;
use support::swtpm::PCR_4;
use verifier::{IssueError, Issuer, KeyName, Oid, qemu_vtpm};

pub struct Forger {
    key: RsaKeyPair,
}

impl Forger {
    #[allow(clippy::new_without_default)] // each forger has another key
    pub fn new() -> Forger {
        const MAKE: &str = "openssl genrsa 2048 | openssl pkcs8 -topk8 -nocrypt -outform DER";
        let made = Command::new("sh").args(["-c", MAKE]).output().unwrap();
        Forger {
            key: RsaKeyPair::from_pkcs8(&made.stdout).unwrap(),
        }
    }

    /// Returns the Name that the forger's key would have in a TPM.
    pub fn key_name(&self) -> KeyName {
        KeyName::of(&joined(&self.parts(&[], &[]).key))
    }

    /// Returns a forger for the document of a machine whose PCRs are zero, except for those that every firmware extends.
    pub fn parts(&self, user_data: &[u8], nonce: &[u8]) -> Parts<'_> {
        let components: RsaPublicKeyComponents<Vec<u8>> = self.key.public_key().into();
        let extra_data = sha256(&sha256(&[user_data, nonce].concat()));
        Parts {
            forger: self,
            user_data: user_data.to_vec(),
            // the key has the genuine template
            key: vec![
                ("type", b"\0\x01".to_vec()),
                ("nameAlg", b"\0\x0b".to_vec()),
                ("attributes", b"\0\x05\0\x72".to_vec()),
                ("policy", sized(&[])),
                ("symmetric", b"\0\x10".to_vec()),
                ("scheme", b"\0\x14".to_vec()),
                ("hash", b"\0\x0b".to_vec()),
                ("bits", b"\x08\0".to_vec()),
                ("exponent", b"\0\0\0\0".to_vec()),
                ("modulus", sized(&components.n)),
            ],
            attest: vec![
                ("magic", b"\xffTCG".to_vec()),
                ("type", b"\x80\x18".to_vec()),
                ("qualifiedSigner", vec![]),
                ("extraData", sized(&extra_data)),
                ("clockInfo", vec![0; 17]),
                ("firmwareVersion", vec![0; 8]),
                ("count", b"\0\0\0\x01".to_vec()),
                ("bank", b"\0\x0b".to_vec()),
                ("select", b"\x03\xff\xff\xff".to_vec()),
                ("digest", vec![]),
            ],
            signature: *b"\0\x14\0\x0b",
            values: (0..24)
                .map(|pcr| match pcr {
                    4 => (pcr, PCR_4.to_vec()),
                    7 => (pcr, vec![7; 32]),
                    _ => (pcr, vec![0; 32]),
                })
                .collect(),
            digest: None,
        }
    }
}

impl Issuer for Forger {
    fn oid(&self) -> Oid {
        qemu_vtpm::OID
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        Ok(self.parts(user_data, nonce).document())
    }
}

/// The fields of a structure, with their names, in their order.
pub type Fields = Vec<(&'static str, Vec<u8>)>;

/// The content of a document, field by field.
pub struct Parts<'a> {
    forger: &'a Forger,
    user_data: Vec<u8>,
    /// TPMT_PUBLIC (TCG, "Trusted Platform Module Library", part 2, §12.2.4).
    pub key: Fields,
    /// TPMS_ATTEST (§10.12). The digest is computed from the values. The signer is computed from the key, unless it is set.
    pub attest: Fields,
    /// The algorithms in TPMT_SIGNATURE (§11.3.4).
    pub signature: [u8; 4],
    pub values: BTreeMap<u32, Vec<u8>>,
    /// If it is set, it replaces the digest of the values.
    pub digest: Option<Vec<u8>>,
}

impl Parts<'_> {
    /// Returns the field with this name.
    pub fn part<'b>(fields: &'b mut Fields, name: &str) -> &'b mut Vec<u8> {
        &mut fields.iter_mut().find(|field| field.0 == name).unwrap().1
    }

    /// Replaces a field of the key.
    pub fn key(mut self, name: &str, bytes: &[u8]) -> Self {
        *Parts::part(&mut self.key, name) = bytes.to_vec();
        self
    }

    /// Replaces a field of TPMS_ATTEST.
    pub fn attest(mut self, name: &str, bytes: &[u8]) -> Self {
        *Parts::part(&mut self.attest, name) = bytes.to_vec();
        self
    }

    /// Returns the Qualified Name of the key as a primary key of the owner hierarchy (TPM2B_NAME; part 1 §16).
    pub fn signer(&self) -> Vec<u8> {
        let name = |bytes: &[u8]| [&b"\0\x0b"[..], &sha256(bytes)].concat();
        sized(&name(
            &[&b"\x40\0\0\x01"[..], &name(&joined(&self.key))].concat(),
        ))
    }

    /// Returns the document, with a valid signature over its content.
    pub fn document(mut self) -> Vec<u8> {
        let values: Vec<u8> = self.values.values().flatten().copied().collect();
        let digest = self.digest.take().unwrap_or_else(|| sha256(&values));
        *Parts::part(&mut self.attest, "digest") = sized(&digest);
        let signer = self.signer();
        let field = Parts::part(&mut self.attest, "qualifiedSigner");
        if field.is_empty() {
            *field = signer;
        }
        let attest = joined(&self.attest);
        let key = &self.forger.key;
        let mut signature = vec![0; key.public().modulus_len()];
        let random = SystemRandom::new();
        key.sign(&RSA_PKCS1_SHA256, &random, &attest, &mut signature)
            .unwrap();
        let signature = [&self.signature[..], &sized(&signature)].concat();
        let pcrs: BTreeMap<String, String> = self
            .values
            .iter()
            .map(|(pcr, value)| (pcr.to_string(), STANDARD.encode(value)))
            .collect();
        let document = json!({
            "Attestation": {
                "ak_pub": STANDARD.encode(joined(&self.key)),
                "quotes": [{
                    "quote": STANDARD.encode(attest), "raw_sig": STANDARD.encode(signature),
                    "pcrs": {"hash": 11, "pcrs": pcrs},
                }],
            },
            "InstanceInfo": null,
            "UserData": STANDARD.encode(&self.user_data),
        });
        document.to_string().into_bytes()
    }
}

fn joined(fields: &Fields) -> Vec<u8> {
    fields.iter().flat_map(|field| field.1.clone()).collect()
}

/// Returns a TPM2B: the length, then the bytes.
pub fn sized(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_be_bytes()[..], bytes].concat()
}

fn sha256(data: &[u8]) -> Vec<u8> {
    digest(&SHA256, data).as_ref().to_vec()
}
