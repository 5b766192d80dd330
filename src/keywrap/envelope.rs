//! The file of a wrapped master secret.
//!
//! ```json
//! {
//!   "version": 1,
//!   "kms": "kms://vault?address=https://vault:8200&keyName=firstlight",
//!   "wrappedKey": "..",
//!   "nonce": "..",
//!   "ciphertext": ".."
//! }
//! ```
//!
//! The last three are base64 (RFC 4648 §4). `wrappedKey` is a random key of 32 bytes, wrapped by the service. `nonce` has 12 bytes.
//! `ciphertext` is the URI `kms://cluster-kms?key=..&salt=..`, encrypted with that key by AES-256-GCM, followed by the tag of 16
//! bytes. Its additional data is [`CONTEXT`] and the value of `kms`, so the file no longer opens if somebody changes `kms`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use base::crypto::{Secret, random};
use base::master_secret::{MasterSecret, NO_STORE};

use super::error::Error;
use super::service::KeyEncryptionKey;

/// The version of the format.
const VERSION: u32 = 1;
/// Bytes of the key that the service wraps.
const KEY_LEN: usize = 32;
/// The beginning of the additional data.
const CONTEXT: &[u8] = b"firstlight wrapped master secret\0";
/// Maximum bytes of the file. It has room for two URIs of 4 KiB, one of them in base64, and a wrapped key.
pub const MAX_LEN: usize = 32 << 10;

/// A master secret that only the service can open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct Wrapped {
    version: u32,
    kms: String,
    wrapped_key: String,
    nonce: String,
    ciphertext: String,
}

/// Returns whether this content of a file claims to be a wrapped master secret, and not a plain one.
pub fn is_wrapped(content: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Claim {
        #[serde(rename = "wrappedKey")]
        _wrapped_key: serde::de::IgnoredAny,
    }
    content.len() <= MAX_LEN && serde_json::from_slice::<Claim>(content).is_ok()
}

impl Wrapped {
    /// Wraps the master secret with the key that `uri` names and `kek` uses. Before it returns, the service unwraps the result
    /// again and the secret is compared, because the operator may delete the plain secret next.
    pub fn wrap(
        secret: &MasterSecret,
        uri: &str,
        kek: &dyn KeyEncryptionKey,
    ) -> Result<Wrapped, Error> {
        let (key, nonce) = (Secret::random(KEY_LEN), random::<NONCE_LEN>());
        let plain = secret.uri();
        // with room for the tag: a vector that grows leaves copies of the secret in freed memory
        let mut buffer = Zeroizing::new(Vec::with_capacity(plain.len() + AES_256_GCM.tag_len()));
        buffer.extend_from_slice(plain.as_bytes());
        let (cipher, aad) = (cipher(&key)?, aad(uri));
        cipher
            .seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), aad, &mut *buffer)
            .map_err(|_| Error::Sealed)?;
        let wrapped = Wrapped {
            version: VERSION,
            kms: uri.to_owned(),
            wrapped_key: STANDARD.encode(kek.wrap(&key)?),
            nonce: STANDARD.encode(nonce),
            ciphertext: STANDARD.encode(&*buffer),
        };
        if wrapped.unwrap(kek)? == *secret {
            Ok(wrapped)
        } else {
            Err(Error::Sealed)
        }
    }

    /// Reads the file's content.
    pub fn parse(content: &[u8]) -> Result<Wrapped, Error> {
        if content.len() > MAX_LEN {
            let len = content.len();
            return Err(Error::Format(format!(
                "it has {len} bytes, expected at most {MAX_LEN}"
            )));
        }
        let wrapped: Wrapped =
            serde_json::from_slice(content).map_err(|error| Error::Format(error.to_string()))?;
        match wrapped.version {
            VERSION => Ok(wrapped),
            other => Err(Error::Format(format!(
                "its version is {other}, this program knows {VERSION}: use a newer one"
            ))),
        }
    }

    /// Returns the content of the file.
    pub fn text(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).unwrap_or_default();
        text.push('\n');
        text
    }

    /// Returns the key URI, which contains no secret.
    pub fn kms(&self) -> &str {
        &self.kms
    }

    /// Has the service unwrap the key, and opens the master secret with it.
    pub fn unwrap(&self, kek: &dyn KeyEncryptionKey) -> Result<MasterSecret, Error> {
        let field = |name: &str, text: &str| {
            STANDARD
                .decode(text)
                .map_err(|_| Error::Format(format!("{name} is not base64")))
        };
        let nonce = field("nonce", &self.nonce)?;
        let nonce = <[u8; NONCE_LEN]>::try_from(nonce)
            .map_err(|_| Error::Format(format!("nonce does not have {NONCE_LEN} bytes")))?;
        let mut buffer = Zeroizing::new(field("ciphertext", &self.ciphertext)?);
        let key = kek.unwrap(&field("wrappedKey", &self.wrapped_key)?)?;
        let plain = cipher(&key)?
            .open_in_place(
                Nonce::assume_unique_for_key(nonce),
                aad(&self.kms),
                &mut buffer,
            )
            .map_err(|_| Error::Sealed)?;
        let uri = std::str::from_utf8(plain).map_err(|_| Error::Sealed)?;
        MasterSecret::from_uris(uri, NO_STORE).map_err(|_| Error::Sealed)
    }
}

fn cipher(key: &Secret) -> Result<LessSafeKey, Error> {
    let key = UnboundKey::new(&AES_256_GCM, key.expose()).map_err(|_| Error::Sealed)?;
    Ok(LessSafeKey::new(key))
}

fn aad(uri: &str) -> Aad<Vec<u8>> {
    Aad::from([CONTEXT, uri.as_bytes()].concat())
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    /// A service whose key is an XOR mask, to test only the format.
    struct Mask(u8);

    impl KeyEncryptionKey for Mask {
        fn prepare(&self, _: bool) -> Result<(), Error> {
            Ok(())
        }

        fn wrap(&self, key: &Secret) -> Result<Vec<u8>, Error> {
            Ok(key.expose().iter().map(|byte| byte ^ self.0).collect())
        }

        fn unwrap(&self, wrapped: &[u8]) -> Result<Secret, Error> {
            self.wrap(&Secret::new(wrapped.to_vec())).map(Secret::new)
        }
    }

    const URI: &str = "kms://vault?address=https://vault:8200&keyName=firstlight";

    fn secret() -> MasterSecret {
        MasterSecret::new(Secret::new(vec![1; 32]), Secret::new(vec![2; 32])).unwrap()
    }

    #[test]
    fn a_wrapped_secret_opens_with_its_key_and_with_no_other() {
        let wrapped = Wrapped::wrap(&secret(), URI, &Mask(7)).unwrap();
        let text = wrapped.text();
        assert!(is_wrapped(text.as_bytes()) && !text.contains("AQEBAQ"));
        let read = Wrapped::parse(text.as_bytes()).unwrap();
        assert_eq!(read.kms(), URI);
        assert_eq!(read.unwrap(&Mask(7)).unwrap(), secret());
        assert_eq!(read.unwrap(&Mask(8)), Err(Error::Sealed));
    }

    #[test]
    fn two_wraps_of_one_secret_share_nothing() {
        let [a, b] = [(); 2].map(|()| Wrapped::wrap(&secret(), URI, &Mask(7)).unwrap());
        assert!(a.nonce != b.nonce && a.wrapped_key != b.wrapped_key);
        assert_ne!(a.ciphertext, b.ciphertext);
    }

    #[test]
    fn a_changed_field_does_not_open() {
        let wrapped = Wrapped::wrap(&secret(), URI, &Mask(7)).unwrap();
        let other = Wrapped::wrap(&secret(), URI, &Mask(7)).unwrap();
        let changed = [
            Wrapped {
                kms: URI.replace("vault:", "other:"),
                ..wrapped.clone()
            },
            Wrapped {
                wrapped_key: other.wrapped_key,
                ..wrapped.clone()
            },
            Wrapped {
                nonce: other.nonce,
                ..wrapped.clone()
            },
            Wrapped {
                ciphertext: other.ciphertext,
                ..wrapped
            },
        ];
        for changed in changed {
            assert_eq!(changed.unwrap(&Mask(7)), Err(Error::Sealed));
        }
    }

    #[test]
    fn a_newer_version_and_an_unknown_field_are_refused() {
        let text = Wrapped::wrap(&secret(), URI, &Mask(7)).unwrap().text();
        let newer = text.replace("\"version\": 1", "\"version\": 2");
        let error = Wrapped::parse(newer.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("its version is 2"), "{error}");
        let more = text.replace("\"version\": 1", "\"version\": 1, \"more\": 1");
        assert!(Wrapped::parse(more.as_bytes()).is_err());
    }

    #[test]
    fn mutated_files_open_to_the_secret_or_not_at_all() {
        let text = Wrapped::wrap(&secret(), URI, &Mask(7)).unwrap().text();
        for bytes in mutations(text.as_bytes(), 20_000) {
            is_wrapped(&bytes);
            let opened = Wrapped::parse(&bytes).and_then(|wrapped| wrapped.unwrap(&Mask(7)));
            if let Ok(opened) = opened {
                assert_eq!(opened, secret());
            }
        }
    }
}
