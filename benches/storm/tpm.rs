//! The software TPM of a node. Each attestation key has a public area of its own, by which the
//! service distinguishes machines. Its RSA key is one of a few, because creating ten thousand takes
//! minutes.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;

use attest::attestation::{self, IssueError, Issuer, Oid};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ring::digest::{SHA256, digest};
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;
use serde_json::json;

/// TPMA_OBJECT (TCG, part 2, §8.3): restricted, sign, userWithAuth, sensitiveDataOrigin, fixedParent, fixedTPM.
const SIGNING_KEY: u32 = 0x0005_0072;
/// The position of the first of the twelve reserved bits at the end.
const RESERVED: u32 = 20;

/// An RSA key.
pub struct Key {
    pair: RsaKeyPair,
    modulus: Vec<u8>,
}

impl Key {
    pub fn new() -> Key {
        let options = [
            "genpkey",
            "-algorithm",
            "RSA",
            "-pkeyopt",
            "rsa_keygen_bits:2048",
        ];
        let made = Command::new("openssl").args(options).output().unwrap();
        let pem = PrivatePkcs8KeyDer::from_pem_slice(&made.stdout).unwrap();
        let pair = RsaKeyPair::from_pkcs8(pem.secret_pkcs8_der()).unwrap();
        // RSAPublicKey (RFC 8017, appendix A.1.1) of 2048 bits: a header of 4 bytes, one of 4, a zero, the modulus
        let modulus = pair.public().as_ref()[9..][..256].to_vec();
        Key { pair, modulus }
    }
}

/// A fresh TPM of one machine: every PCR is zero.
pub struct Tpm {
    pub key: Arc<Key>,
    /// Distinguishes this TPM from others with the same key; below 4 096.
    pub number: u32,
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
        attestation::qemu_vtpm::OID
    }

    /// Returns TPMS_ATTEST, TPMT_SIGNATURE and TPMT_PUBLIC (TCG, "Trusted Platform Module Library",
    /// part 2, §§10.12, 11.3.4, 12.2.4).
    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        let values = [[0; 32]; 24];
        let mut attest = b"\xffTCG\x80\x18\0\0".to_vec();
        attest.extend(sized(&sha256(&[&sha256(&[user_data, nonce])])));
        attest.extend([0; 17 + 8]);
        attest.extend(b"\0\0\0\x01\0\x0b\x03\xff\xff\xff");
        attest.extend(sized(&sha256(&[values.as_flattened()])));
        let mut signature = vec![0; self.key.pair.public().modulus_len()];
        let random = SystemRandom::new();
        self.key
            .pair
            .sign(&RSA_PKCS1_SHA256, &random, &attest, &mut signature)
            .map_err(|e| IssueError(e.to_string()))?;
        let signature = [&b"\0\x14\0\x0b"[..], &sized(&signature)].concat();
        // Reserved bits of the attributes make the public area unique to this machine.
        let attributes = (SIGNING_KEY | self.number << RESERVED).to_be_bytes();
        let parameters = b"\0\0\0\x10\0\x14\0\x0b\x08\0\0\0\0\0";
        let public = [
            b"\0\x01\0\x0b",
            &attributes[..],
            parameters,
            &sized(&self.key.modulus),
        ]
        .concat();
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
