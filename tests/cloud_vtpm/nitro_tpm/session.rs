//! HMAC sessions as a TPM keeps them (TPM 2.0 part 1 §17 to §21): the proofs of commands and answers, and encrypted parameters.

use std::io::Write;
use std::process::{Command, Stdio};

use ring::{digest, hmac, rand};

use crate::cloud_tpm::unhex;

/// Attributes of sessions (part 2 §8.4).
pub const CONTINUE: u8 = 0x01;
pub const DECRYPT: u8 = 0x20;
pub const ENCRYPT: u8 = 0x40;
/// TPM_ALG_SHA256, TPM_ALG_SHA512.
const SHA256: u16 = 0x000b;
const SHA512: u16 = 0x000d;

pub struct Session {
    hash: u16,
    /// The session key: empty if the session is not salted.
    key: Vec<u8>,
    pub nonce_tpm: Vec<u8>,
    /// Whether parameters are encrypted with AES-128 in CFB mode.
    encrypts: bool,
}

/// The fields of a command for a session: handle, nonce, attributes, proof.
#[derive(Clone)]
pub struct Authorization {
    pub handle: u32,
    pub nonce: Vec<u8>,
    pub attributes: u8,
    pub proof: Vec<u8>,
}

pub fn hash(algorithm: u16, bytes: &[u8]) -> Vec<u8> {
    let algorithm = match algorithm {
        SHA256 => &digest::SHA256,
        SHA512 => &digest::SHA512,
        other => panic!("hash {other:#x}"),
    };
    digest::digest(algorithm, bytes).as_ref().to_vec()
}

fn hmac_key(algorithm: u16, key: &[u8]) -> hmac::Key {
    let algorithm = match algorithm {
        SHA256 => hmac::HMAC_SHA256,
        SHA512 => hmac::HMAC_SHA512,
        other => panic!("hash {other:#x}"),
    };
    hmac::Key::new(algorithm, key)
}

/// KDFa (part 1 §11.4.10.2), for at most as many bits as the hash has.
fn derive(hash: u16, key: &[u8], label: &str, newer: &[u8], older: &[u8], bits: u32) -> Vec<u8> {
    let message = [
        &1u32.to_be_bytes()[..],
        label.as_bytes(),
        &[0],
        newer,
        older,
        &bits.to_be_bytes(),
    ]
    .concat();
    let mut derived = hmac::sign(&hmac_key(hash, key), &message).as_ref().to_vec();
    derived.truncate(bits as usize / 8);
    derived
}

pub fn random(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    rand::SecureRandom::fill(&rand::SystemRandom::new(), &mut bytes).unwrap();
    bytes
}

impl Session {
    pub fn start(hash: u16, salt: Option<&[u8]>, nonce_caller: &[u8], encrypts: bool) -> Session {
        let bits = if hash == SHA256 { 256 } else { 512 };
        let nonce_tpm = random(bits as usize / 8);
        let key = salt.map(|salt| derive(hash, salt, "ATH", &nonce_tpm, nonce_caller, bits));
        Session {
            hash,
            key: key.unwrap_or_default(),
            nonce_tpm,
            encrypts,
        }
    }

    fn proof(&self, auth: &[u8], digest: &[u8], nonces: [&[u8]; 2], attributes: u8) -> Vec<u8> {
        let key = hmac_key(self.hash, &[&self.key, auth].concat());
        let message = [digest, nonces[0], nonces[1], &[attributes]].concat();
        hmac::sign(&key, &message).as_ref().to_vec()
    }

    /// Returns whether the caller knows the authorization value of the entity, and has sent this command.
    pub fn is_proved(
        &self,
        given: &Authorization,
        auth: &[u8],
        code: u32,
        names: &[Vec<u8>],
        parameters: &[u8],
    ) -> bool {
        let command = [&code.to_be_bytes()[..], &names.concat(), parameters].concat();
        let digest = hash(self.hash, &command);
        let nonces = [&given.nonce[..], &self.nonce_tpm];
        given.nonce.len() >= 16
            && given.proof == self.proof(auth, &digest, nonces, given.attributes)
    }

    /// Encrypts or decrypts the first parameter, which begins with its length.
    fn crypt(&self, parameters: &mut [u8], auth: &[u8], nonces: [&[u8]; 2], way: &str) {
        assert!(self.encrypts);
        let key = [&self.key, auth].concat();
        let keys = derive(self.hash, &key, "CFB", nonces[0], nonces[1], 256);
        let hex = |bytes: &[u8]| {
            bytes
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect::<String>()
        };
        let len = usize::from(u16::from_be_bytes([parameters[0], parameters[1]]));
        let first = &mut parameters[2..2 + len];
        let (key, iv) = (hex(&keys[..16]), hex(&keys[16..]));
        let arguments = ["enc", way, "-aes-128-cfb", "-K", &key, "-iv", &iv];
        first.copy_from_slice(&openssl(&arguments, first));
    }

    pub fn decrypt(&self, parameters: &mut [u8], auth: &[u8], given: &Authorization) {
        self.crypt(parameters, auth, [&given.nonce, &self.nonce_tpm], "-d");
    }

    /// Begins the answer: a new nonce, with which its parameters are encrypted if the caller wants that.
    pub fn answer(&mut self, given: &Authorization, auth: &[u8], parameters: &mut [u8]) {
        self.nonce_tpm = random(self.nonce_tpm.len());
        if given.attributes & ENCRYPT != 0 {
            self.crypt(parameters, auth, [&self.nonce_tpm, &given.nonce], "-e");
        }
    }

    /// Returns the fields for the session in the answer to a command with these parameters.
    pub fn proof_of_answer(
        &self,
        given: &Authorization,
        auth: &[u8],
        code: u32,
        parameters: &[u8],
    ) -> Vec<u8> {
        let answer = [&[0; 4], &code.to_be_bytes()[..], parameters].concat();
        let digest = hash(self.hash, &answer);
        let nonces = [&self.nonce_tpm[..], &given.nonce];
        let proof = self.proof(auth, &digest, nonces, given.attributes);
        let part = |bytes: &[u8]| [&(bytes.len() as u16).to_be_bytes(), bytes].concat();
        [part(&self.nonce_tpm), vec![given.attributes], part(&proof)].concat()
    }
}

/// An RSA key whose private part the tests have, in the place of an endorsement key.
pub struct SaltKey {
    folder: tempfile::TempDir,
    pub modulus: Vec<u8>,
}

impl SaltKey {
    pub fn generate() -> SaltKey {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("key.pem").display().to_string();
        openssl(&["genrsa", "-out", &file, "2048"], &[]);
        let modulus = openssl(&["rsa", "-in", &file, "-noout", "-modulus"], &[]);
        let modulus = String::from_utf8(modulus).unwrap();
        let modulus = unhex(modulus.trim().strip_prefix("Modulus=").unwrap());
        SaltKey { folder, modulus }
    }

    /// Decrypts a salt (part 1 annex B.10.2).
    pub fn decrypt(&self, encrypted: &[u8]) -> Vec<u8> {
        let file = self.folder.path().join("key.pem").display().to_string();
        let options = [
            "rsa_padding_mode:oaep",
            "rsa_oaep_md:sha256",
            "rsa_mgf1_md:sha256",
            "rsa_oaep_label:53454352455400", // "SECRET" and a zero byte
        ];
        let mut arguments = vec!["pkeyutl", "-decrypt", "-inkey", &file];
        arguments.extend(options.iter().flat_map(|option| ["-pkeyopt", option]));
        openssl(&arguments, encrypted)
    }
}

fn openssl(arguments: &[&str], input: &[u8]) -> Vec<u8> {
    let mut process = Command::new("openssl")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    process.stdin.take().unwrap().write_all(input).unwrap();
    let output = process.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "openssl {arguments:?}: {said}");
    output.stdout
}
