//! The signature of a snapshot of etcd, in a file beside it. It says which cluster and control plane the
//! snapshot is of, and that somebody with the cluster's master secret has saved it.
//!
//! ```text
//! snapshot.db             as etcd wrote it
//! snapshot.db.signature   first line: the statement, JSON
//!                         second line: hmac-sha256, a space, HMAC-SHA-256 of the first line in hexadecimal digits
//! ```
//!
//! The key follows by HKDF from the [`wrapping key`](super::wrapping_key). So the operator can sign, who
//! has the master secret, and each control plane can verify, which has only the wrapping key. Root on a
//! control plane can sign, too: it can also change etcd itself.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use ring::hmac;
use serde::{Deserialize, Serialize};

use base::crypto::{KEY_LEN, Secret, derive_key};
use base::text::{hex, unhex};

/// The end of the file's name.
const ENDING: &str = ".signature";
/// The name of the algorithm.
const ALGORITHM: &str = "hmac-sha256";
/// The HKDF info of the key.
const INFO: &str = "firstlight: signatures of etcd snapshots";
/// The version of the format.
const VERSION: u32 = 1;
/// Maximum bytes of the file.
pub const MAX_LEN: usize = 8 << 10;

/// The signed statement about a snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Statement {
    /// The version of the format; [`Statement::sign`] sets it.
    pub version: u32,
    /// The ID of the cluster, in hexadecimal digits.
    #[serde(rename = "clusterID")]
    pub cluster: String,
    /// The control plane whose etcd has saved the snapshot.
    pub node: String,
    /// The machine of the control plane by its record; empty if it is unknown.
    pub machine: String,
    /// A revision of etcd; the snapshot has this one or a later one.
    pub revision: u64,
    /// The SHA-256 that etcd added to the snapshot, in hexadecimal digits.
    pub sha256: String,
    /// The version of etcd.
    pub etcd: String,
    /// When the snapshot was saved (RFC 3339).
    pub saved: String,
    /// The version of the program that signed.
    pub firstlight: String,
}

/// Why a signature is not accepted; `Display` is a clause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InvalidSignature {
    /// It is not of this format: the reason.
    Format(String),
    /// It is of another key, or the statement was changed.
    Key,
}

impl fmt::Display for InvalidSignature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            InvalidSignature::Format(why) => write!(f, "not a signature of this version: {why}"),
            InvalidSignature::Key => f.write_str(
                "the signature is wrong: it was made with another master secret, or the statement was changed",
            ),
        }
    }
}

impl std::error::Error for InvalidSignature {}

/// Returns the path of the signature of a snapshot.
pub fn file_of(snapshot: &Path) -> PathBuf {
    let mut path = OsString::from(snapshot);
    path.push(ENDING);
    path.into()
}

fn key_of(wrapping_key: &Secret) -> hmac::Key {
    let key = derive_key(wrapping_key.expose(), &[], INFO, KEY_LEN);
    let key = key.expect("the length is a constant within HKDF's bounds");
    hmac::Key::new(hmac::HMAC_SHA256, key.expose())
}

impl Statement {
    /// Returns the content of the file.
    pub fn sign(&self, wrapping_key: &Secret) -> String {
        let statement = Statement {
            version: VERSION,
            ..self.clone()
        };
        let line = serde_json::to_string(&statement).expect("it has only texts and numbers");
        let mac = hmac::sign(&key_of(wrapping_key), line.as_bytes());
        format!("{line}\n{ALGORITHM} {}\n", hex(mac.as_ref()))
    }

    /// Verifies the content of a file, and returns the statement.
    pub fn verified(content: &[u8], wrapping_key: &Secret) -> Result<Statement, InvalidSignature> {
        let format = |why: &str| InvalidSignature::Format(why.to_owned());
        if content.len() > MAX_LEN {
            return Err(format("it is too long"));
        }
        let text = str::from_utf8(content).map_err(|_| format("it is not UTF-8"))?;
        let (line, rest) = text
            .split_once('\n')
            .ok_or_else(|| format("it has one line"))?;
        let mac = rest.strip_suffix('\n').unwrap_or(rest);
        let mac = mac
            .strip_prefix(ALGORITHM)
            .and_then(|it| it.strip_prefix(' '));
        let mac = mac.ok_or_else(|| format("its second line does not begin with hmac-sha256"))?;
        let mac = unhex(mac).ok_or_else(|| format("expected 64 hexadecimal digits"))?;
        hmac::verify(&key_of(wrapping_key), line.as_bytes(), &mac)
            .map_err(|_| InvalidSignature::Key)?;
        let statement: Statement = serde_json::from_str(line)
            .map_err(|error| InvalidSignature::Format(error.to_string()))?;
        match statement.version {
            VERSION => Ok(statement),
            other => Err(InvalidSignature::Format(format!(
                "expected version {VERSION}, got {other}"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    fn statement() -> Statement {
        Statement {
            cluster: "07".repeat(32),
            node: "a".into(),
            machine: "m".into(),
            revision: 4711,
            sha256: "ab".repeat(32),
            etcd: "3.6.5".into(),
            saved: "2026-11-28T12:00:00Z".into(),
            firstlight: "1.0.0".into(),
            ..Statement::default()
        }
    }

    fn key(byte: u8) -> Secret {
        Secret::new(vec![byte; KEY_LEN])
    }

    #[test]
    fn the_format_stays_as_it_is() {
        // Python: hmac.new(HKDF(SHA256, 32, salt=b"", info=b"firstlight: signatures of etcd snapshots").derive(bytes([1] * 32)), line, "sha256")
        let signed = statement().sign(&key(1));
        let (line, mac) = signed.split_once('\n').unwrap();
        assert_eq!(
            line,
            format!(
                r#"{{"version":1,"clusterID":"{}","node":"a","machine":"m","revision":4711,"sha256":"{}","etcd":"3.6.5","saved":"2026-11-28T12:00:00Z","firstlight":"1.0.0"}}"#,
                "07".repeat(32),
                "ab".repeat(32)
            )
        );
        assert_eq!(
            mac,
            "hmac-sha256 4bd803cf1a33a0394b3e793207f6f752c0350dd18f68b9ced695f253030c934a\n"
        );
    }

    #[test]
    fn only_what_was_signed_with_the_key_is_accepted() {
        let signed = statement().sign(&key(1));
        let verified = Statement::verified(signed.as_bytes(), &key(1)).unwrap();
        assert_eq!(
            verified,
            Statement {
                version: VERSION,
                ..statement()
            }
        );
        assert_eq!(
            Statement::verified(signed.as_bytes(), &key(2)),
            Err(InvalidSignature::Key)
        );
        for content in mutations(signed.as_bytes(), 10_000) {
            if let Ok(read) = Statement::verified(&content, &key(1)) {
                assert_eq!(read, verified, "{}", String::from_utf8_lossy(&content));
            }
        }
    }

    #[test]
    fn the_file_is_beside_the_snapshot() {
        let file = file_of(Path::new("/a/snapshot.db"));
        assert_eq!(file, Path::new("/a/snapshot.db.signature"));
    }
}
