//! The wrapping key: a file on the encrypted state disk of each control plane, and nowhere else in the
//! cluster. The Secret of the key service is encrypted with it, so a copy of that Secret opens nothing:
//! neither for a reader of the Kubernetes API, nor for a worker that gets a pod of the key service, nor
//! for a thief of an etcd snapshot.
//!
//! ```text
//! master secret ─► HKDF ─► wrapping key ─┬─ the first node derives it at init
//!                                        ├─ a further control plane gets it in its join ticket
//!                                        └─ firstlight apply has the key service write it, where a cluster
//!                                           of an earlier version has none
//! ```
//!
//! The encrypted form is JSON:
//!
//! ```json
//! {"version": 1, "encryptedFor": "control-planes", "nonce": "..", "ciphertext": ".."}
//! ```
//!
//! `nonce` (12 bytes) and `ciphertext` (with the tag of 16 bytes) are base64 (RFC 4648 §4). The cipher is
//! AES-256-GCM, and its additional data [`CONTEXT`]. The nonce is a MAC of the content, so the same
//! content always has the same form, and two contents have different nonces.
//!
//! The keys that sign attestation results have the same form, with a key that is derived from the wrapping
//! key: [`for_attestation_keys`].

use std::fmt;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, chown};
use std::path::Path;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::hmac;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use base::crypto::{KEY_LEN, Secret, derive_key};
use base::file;
use base::master_secret::MasterSecret;

/// The directory of the key on a control plane, and in the pods of the services. kubeadm's reset does
/// not empty it.
pub const DIRECTORY: &str = "/etc/kubernetes/firstlight";
/// The file in the directory: the raw bytes.
pub const FILE: &str = "wrapping-key";
/// The group that may read it: the key service's pod is in it (`supplementalGroups` in the chart). It is not the
/// group 65532 of that pod, which is also that of many other images that do not run as root.
pub const GROUP: u32 = 65471;
/// Readable by root and the group.
const MODE: u32 = 0o440;

/// The HKDF info of the key. Each data key of the key service has an info that begins with `key-`, so no
/// client can ask for this one.
const INFO: &str = "firstlight: key that wraps the master secret in the Kubernetes API";
/// The HKDF info of the key for the Secret with the keys of attestation results.
const ATTESTATION_KEYS_INFO: &str =
    "firstlight: key that wraps the keys of attestation results in the Kubernetes API";
/// The HKDF info of the key of the MAC that makes nonces.
const NONCE_INFO: &str = "firstlight: nonces of the wrapped master secret";
/// The additional data of the cipher.
const CONTEXT: &[u8] = b"firstlight master secret for control planes\0";
/// The version of the format.
const VERSION: u32 = 1;
/// The reader that the format names.
const READER: &str = "control-planes";
/// Maximum bytes of the encrypted form. The content is at most a wrapped master secret of 32 KiB.
pub const MAX_LEN: usize = 64 << 10;

/// Derives the wrapping key of a master secret. It does not reveal the master secret.
pub fn of(kms: &MasterSecret) -> Secret {
    derived(kms.key(), kms.salt().expose(), INFO)
}

/// Derives the key with which the keys of attestation results are encrypted.
pub fn for_attestation_keys(wrapping_key: &Secret) -> Secret {
    derived(wrapping_key, &[], ATTESTATION_KEYS_INFO)
}

fn derived(secret: &Secret, salt: &[u8], info: &str) -> Secret {
    let key = derive_key(secret.expose(), salt, info, KEY_LEN);
    key.expect("the length is a constant within HKDF's bounds")
}

/// Reads the key below this directory; `None` if there is none.
pub fn read(directory: &Path) -> io::Result<Option<Secret>> {
    let path = directory.join(FILE);
    let key = match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => Secret::new(read.map_err(|error| named(&path, &error))?),
    };
    match key.len() {
        KEY_LEN => Ok(Some(key)),
        len => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{}: {len} bytes, expected {KEY_LEN}", path.display()),
        )),
    }
}

/// Writes the key below this directory, unless it is there. Fails if another key is there, because the
/// cluster's Secret is encrypted with that one.
pub fn place(directory: &Path, key: &Secret) -> io::Result<()> {
    let path = directory.join(FILE);
    match read(directory)? {
        None => {
            let made = DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(directory);
            made.map_err(|error| named(directory, &error))?;
            file::replace(&path, key.expose(), MODE).map_err(|error| named(&path, &error))?;
        }
        Some(there) if there == *key => {}
        Some(_) => {
            let text = format!(
                "{}: it is the key of another master secret, and stays as it is",
                path.display()
            );
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        }
    }
    // also after a power failure between both steps
    chown(&path, None, Some(GROUP)).map_err(|error| named(&path, &error))
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Why an encrypted form cannot be used; `Display` is a clause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Undecipherable {
    /// It is not of this format: the reason.
    Format(String),
    /// The key does not fit, or the content was changed.
    Key,
}

impl fmt::Display for Undecipherable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Undecipherable::Format(why) => write!(f, "not encrypted for control planes: {why}"),
            Undecipherable::Key => f.write_str(
                "the wrapping key does not fit: it is of another master secret, or the content was changed",
            ),
        }
    }
}

impl std::error::Error for Undecipherable {}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
struct Encrypted {
    version: u32,
    encrypted_for: String,
    nonce: String,
    ciphertext: String,
}

/// Returns whether this content claims to be encrypted for control planes.
pub fn is_encrypted(content: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Claim {
        #[serde(rename = "encryptedFor")]
        _reader: serde::de::IgnoredAny,
    }
    content.len() <= MAX_LEN && serde_json::from_slice::<Claim>(content).is_ok()
}

/// Encrypts content of at most half of [`MAX_LEN`] with the wrapping key.
pub fn encrypt(content: &[u8], key: &Secret) -> Result<String, Undecipherable> {
    let mac = hmac::Key::new(hmac::HMAC_SHA256, derived(key, &[], NONCE_INFO).expose());
    let mac = hmac::sign(&mac, content);
    let mut nonce = [0; NONCE_LEN];
    nonce.copy_from_slice(&mac.as_ref()[..NONCE_LEN]);
    // with room for the tag: a vector that grows leaves copies of the secret in freed memory
    let mut buffer = Zeroizing::new(Vec::with_capacity(content.len() + AES_256_GCM.tag_len()));
    buffer.extend_from_slice(content);
    cipher(key)?
        .seal_in_place_append_tag(
            Nonce::assume_unique_for_key(nonce),
            Aad::from(CONTEXT),
            &mut *buffer,
        )
        .map_err(|_| Undecipherable::Key)?;
    let encrypted = Encrypted {
        version: VERSION,
        encrypted_for: READER.into(),
        nonce: BASE64_STANDARD.encode(nonce),
        ciphertext: BASE64_STANDARD.encode(&*buffer),
    };
    let mut text = serde_json::to_string_pretty(&encrypted).unwrap_or_default();
    text.push('\n');
    Ok(text)
}

/// Decrypts a result of [`encrypt`].
pub fn decrypt(text: &[u8], key: &Secret) -> Result<Zeroizing<Vec<u8>>, Undecipherable> {
    let format = |why: &str| Undecipherable::Format(why.to_owned());
    if text.len() > MAX_LEN {
        return Err(format("it is too long"));
    }
    let encrypted: Encrypted =
        serde_json::from_slice(text).map_err(|error| format(&error.to_string()))?;
    if (encrypted.version, &*encrypted.encrypted_for) != (VERSION, READER) {
        return Err(format("its version is unknown: use a newer program"));
    }
    let decoded = |field: &str, text: &str| {
        let decoded = BASE64_STANDARD.decode(text);
        decoded.map_err(|_| format(&format!("{field} is not base64")))
    };
    let nonce = <[u8; NONCE_LEN]>::try_from(decoded("nonce", &encrypted.nonce)?);
    let nonce = nonce.map_err(|_| format(&format!("nonce does not have {NONCE_LEN} bytes")))?;
    let mut buffer = Zeroizing::new(decoded("ciphertext", &encrypted.ciphertext)?);
    let len = cipher(key)?
        .open_in_place(
            Nonce::assume_unique_for_key(nonce),
            Aad::from(CONTEXT),
            &mut buffer,
        )
        .map_err(|_| Undecipherable::Key)?
        .len();
    buffer.truncate(len);
    Ok(buffer)
}

fn cipher(key: &Secret) -> Result<LessSafeKey, Undecipherable> {
    let key = UnboundKey::new(&AES_256_GCM, key.expose()).map_err(|_| Undecipherable::Key)?;
    Ok(LessSafeKey::new(key))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use support::mutation::mutations;

    use super::*;

    fn key(byte: u8) -> Secret {
        Secret::new(vec![byte; KEY_LEN])
    }

    /// Computed with Python's `cryptography`: HKDF(SHA256(), 32, salt, info).derive(key).
    #[test]
    fn the_key_is_hkdf_of_the_master_secret_under_an_info_of_no_data_key() {
        let kms = MasterSecret::new(key(1), key(2)).unwrap();
        assert_eq!(
            base::text::hex(of(&kms).expose()),
            "dab4e8cef915b70fa9d3a1249f539ff461f650919e00a73939b192f96a72f388"
        );
        assert!(!INFO.starts_with(base::crypto::Dek::named("").info()));
    }

    #[test]
    fn only_the_same_key_decrypts_and_equal_contents_have_equal_forms() {
        let text = encrypt(b"a secret", &key(1)).unwrap();
        assert!(is_encrypted(text.as_bytes()) && !text.contains("a secret"));
        assert_eq!(*decrypt(text.as_bytes(), &key(1)).unwrap(), b"a secret");
        assert_eq!(decrypt(text.as_bytes(), &key(2)), Err(Undecipherable::Key));
        assert_eq!(encrypt(b"a secret", &key(1)).unwrap(), text);
        let nonce = |text: &str| {
            let read: Encrypted = serde_json::from_str(text).unwrap();
            read.nonce
        };
        let other = encrypt(b"a secres", &key(1)).unwrap();
        assert_ne!(nonce(&other), nonce(&text));
        for plain in [
            "0123456789abcdef",
            r#"{"version":1,"wrappedKey":""}"#,
            "storage://aws?bucket=a",
        ] {
            assert!(!is_encrypted(plain.as_bytes()), "{plain}");
        }
    }

    #[test]
    fn a_mutated_form_gives_the_content_or_an_error() {
        let text = encrypt(b"a secret", &key(1)).unwrap();
        for mutant in mutations(text.as_bytes(), 20_000) {
            match decrypt(&mutant, &key(1)) {
                Ok(content) => assert_eq!(*content, b"a secret"),
                Err(error) => assert!(!error.to_string().contains("a secret")),
            }
        }
    }

    #[test]
    fn a_key_is_written_once_for_root_and_the_group_of_the_pod() {
        if !support::is_root("give a file to a group") {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("firstlight");
        assert_eq!(read(&directory).unwrap(), None);
        place(&directory, &key(1)).unwrap();
        place(&directory, &key(1)).unwrap();
        assert_eq!(read(&directory).unwrap(), Some(key(1)));
        let path = directory.join(FILE);
        let owner = || {
            let file = fs::metadata(&path).unwrap();
            (file.mode() & 0o777, file.uid(), file.gid())
        };
        assert_eq!(owner(), (0o440, 0, GROUP));
        // a key that was written for another group
        chown(&path, None, Some(65532)).unwrap();
        place(&directory, &key(1)).unwrap();
        assert_eq!(owner(), (0o440, 0, GROUP));
        let error = place(&directory, &key(2)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(read(&directory).unwrap(), Some(key(1)));
    }

    #[test]
    fn a_file_that_is_no_key_is_refused_with_its_path() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(FILE), [0; 31]).unwrap();
        let error = read(dir.path()).unwrap_err().to_string();
        assert!(
            error.ends_with("wrapping-key: 31 bytes, expected 32"),
            "{error}"
        );
    }
}
