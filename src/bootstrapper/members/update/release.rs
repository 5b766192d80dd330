//! The content of an update: a list of its parts, signed by the maker of the image, and the parts.

use std::io::{self, Read};

use ring::digest::{Context, SHA256};
use serde_json::Value;
use ssh::key::PublicKey;
use ssh::signature;

use super::error::Error;
use super::version::{ImageVersion, NAMESPACE};
use base::text::{hex, unhex};

/// Maximum size of the list in bytes: it has 500.
pub const MAX_LIST: usize = 4096;
/// Maximum size of a unified kernel image, which is in memory until it is written.
const MAX_IMAGE: u64 = 128 << 20;
/// Bytes that are read at once.
const PART: usize = 64 << 10;

/// A part of a release.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The name for messages, which is also its field in the list.
    name: &'static str,
    /// The size in bytes.
    pub size: u64,
    sha256: Vec<u8>,
}

/// The signed list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedRelease {
    /// The version.
    pub version: ImageVersion,
    /// The unified kernel image.
    pub image: Part,
    /// The root file system.
    pub root: Part,
    /// Its hashes.
    pub hashes: Part,
}

impl SignedRelease {
    /// Verifies the signature, and then reads the list. `signature` is the file that ssh-keygen writes. One of `keys` must have signed.
    pub fn verify(
        list: &[u8],
        signature: &str,
        keys: &[PublicKey],
    ) -> Result<SignedRelease, Error> {
        if keys.is_empty() {
            return Err(Error::NoKey);
        }
        if list.len() > MAX_LIST {
            return Err(Error::List(format!(
                "it has {} bytes, at most {MAX_LIST} are accepted",
                list.len()
            )));
        }
        let blob = signature::blob_of_file(signature).map_err(Error::Signature)?;
        let mut refused = signature::Error::OtherKey;
        for key in keys {
            match signature::verify(&blob, key, NAMESPACE, list) {
                Ok(()) => return SignedRelease::parse(list),
                Err(signature::Error::OtherKey) => {}
                Err(error) => refused = error,
            }
        }
        Err(Error::Signature(refused))
    }

    fn parse(list: &[u8]) -> Result<SignedRelease, Error> {
        let wrong = |what: &str| Error::List(what.to_owned());
        let json: Value =
            serde_json::from_slice(list).map_err(|error| Error::List(error.to_string()))?;
        let version = json["version"].as_str().and_then(ImageVersion::parse);
        let part = |name: &'static str| {
            let part = &json[name];
            let sha256 = part["sha256"].as_str().and_then(unhex);
            match (part["size"].as_u64(), sha256) {
                (Some(size), Some(sha256)) if size > 0 && sha256.len() == 32 => {
                    Ok(Part { name, size, sha256 })
                }
                _ => Err(wrong(&format!("{name} has no size and sha256"))),
            }
        };
        let release = SignedRelease {
            version: version.ok_or_else(|| wrong("version: expected one such as 0.2.0"))?,
            image: part("image")?,
            root: part("root")?,
            hashes: part("hashes")?,
        };
        if release.image.size <= MAX_IMAGE {
            Ok(release)
        } else {
            Err(wrong(&format!(
                "image has {} bytes, at most {MAX_IMAGE} are accepted",
                release.image.size
            )))
        }
    }
}

impl Part {
    /// Gives the bytes of the part to `take`. Fails if they do not have the digest.
    pub fn read(
        &self,
        content: &mut dyn Read,
        take: &mut dyn FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut buffer = vec![0; PART];
        let mut context = Context::new(&SHA256);
        let mut left = self.size;
        while left > 0 {
            let wanted = left.min(PART as u64) as usize;
            match content.read(&mut buffer[..wanted]) {
                Ok(0) => {
                    return Err(Error::Content(
                        self.name,
                        format!("it ends {left} bytes too early"),
                    ));
                }
                Ok(count) => {
                    context.update(&buffer[..count]);
                    take(&buffer[..count])?;
                    left -= count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::Content(self.name, error.to_string())),
            }
        }
        let got = context.finish();
        if got.as_ref() == self.sha256 {
            Ok(())
        } else {
            Err(Error::Content(
                self.name,
                format!(
                    "expected the SHA-256 {}, got {}",
                    hex(&self.sha256),
                    hex(got.as_ref())
                ),
            ))
        }
    }

    /// Returns the bytes of the part.
    pub fn read_all(&self, content: &mut dyn Read) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        self.read(content, &mut |part| {
            bytes.extend_from_slice(part);
            Ok(())
        })?;
        Ok(bytes)
    }
}
