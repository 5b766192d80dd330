//! Certificates of operators, as a node reads them (PROTOCOL.certkeys of OpenSSH's sources).

use std::fmt;
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::signature::{ED25519, UnparsedPublicKey};

use base::time;

use super::key::{self, PublicKey};
use super::wire::{WireError, WireReader};
use super::{TYPE_USER, seconds};

/// Maximum length in bytes of a certificate: one of an RSA key with 16 384 bits has less than 4 KiB.
pub const MAX_CERTIFICATE: usize = 8 << 10;
/// Maximum number of principals of a certificate.
const MAX_PRINCIPALS: usize = 16;

/// A certificate that an authority has signed for the key of a person, and that is valid now.
#[derive(Debug)]
pub struct UserCertificate {
    /// The key that it certifies.
    pub key: PublicKey,
    /// The name of its owner, which the authority chose.
    pub id: String,
    /// From its first second to its last one.
    pub validity: Duration,
    principals: Vec<String>,
}

impl UserCertificate {
    /// Parses the line of a `.pub` file with a certificate: its name, base64, and a comment. Returns the bytes that SSH sends.
    pub fn blob_of_line(line: &str) -> Result<Vec<u8>, Error> {
        let mut words = line.split_ascii_whitespace();
        match (words.next(), words.next()) {
            (Some(name), Some(base64)) if name.ends_with("-cert-v01@openssh.com") => {
                STANDARD.decode(base64).map_err(|_| Error::Malformed)
            }
            _ => Err(Error::Malformed),
        }
    }

    /// Parses a certificate in the bytes that SSH sends. Refuses one that another authority has signed, or that is not valid at
    /// `now`. `authority` is an Ed25519 key.
    pub fn verify(
        blob: &[u8],
        authority: &PublicKey,
        now: SystemTime,
    ) -> Result<UserCertificate, Error> {
        if blob.len() > MAX_CERTIFICATE {
            return Err(Error::Malformed);
        }
        let mut reader = WireReader::new(blob);
        let name = reader.string()?;
        let _nonce = reader.string()?;
        let key = PublicKey::from_certificate(name, &mut reader)?;
        let _serial = reader.u64()?;
        let kind = reader.u32()?;
        let id = reader.string()?;
        let principals = principals(reader.string()?)?;
        let (after, before) = (reader.u64()?, reader.u64()?);
        let critical_options = reader.string()?;
        let (_extensions, _reserved) = (reader.string()?, reader.string()?);
        let signer = reader.string()?;
        let signed = &blob[..blob.len() - reader.rest().len()];
        let signature = reader.string()?;
        reader.end()?;

        if signer != authority.blob() {
            return Err(Error::OtherAuthority);
        }
        verify_signature(authority, signed, signature)?;
        if kind != TYPE_USER {
            return Err(Error::NotOfUser);
        }
        // an option that we do not know may limit what the certificate is for
        if !critical_options.is_empty() {
            return Err(Error::CriticalOption);
        }
        let now = seconds(now);
        if now < after || now >= before {
            return Err(Error::Time { after, before, now });
        }
        Ok(UserCertificate {
            key,
            id: String::from_utf8_lossy(id).into_owned(),
            validity: Duration::from_secs(before - after),
            principals,
        })
    }

    /// Returns whether the certificate is for this principal. One without principals, which is for all in OpenSSH, is for none.
    pub fn is_for(&self, principal: &str) -> bool {
        self.principals.iter().any(|it| it == principal)
    }
}

fn principals(list: &[u8]) -> Result<Vec<String>, Error> {
    let (mut reader, mut all) = (WireReader::new(list), vec![]);
    while !reader.rest().is_empty() {
        if all.len() == MAX_PRINCIPALS {
            return Err(Error::Malformed);
        }
        all.push(String::from_utf8_lossy(reader.string()?).into_owned());
    }
    Ok(all)
}

fn verify_signature(authority: &PublicKey, signed: &[u8], signature: &[u8]) -> Result<(), Error> {
    let (mut key, mut signature) = (
        WireReader::new(authority.fields()),
        WireReader::new(signature),
    );
    if authority.kind() != key::ED25519 || signature.string()? != key::ED25519.as_bytes() {
        return Err(Error::Signature);
    }
    let (key, bytes) = (key.string()?, signature.string()?);
    signature.end()?;
    UnparsedPublicKey::new(&ED25519, key)
        .verify(signed, bytes)
        .map_err(|_| Error::Signature)
}

/// Why a certificate is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The format is wrong.
    Malformed,
    /// The key is of a kind that cannot be certified, or malformed.
    Key(key::Error),
    /// Another authority has signed it.
    OtherAuthority,
    /// The signature is wrong.
    Signature,
    /// It is for a host.
    NotOfUser,
    /// It has a critical option.
    CriticalOption,
    /// It is not valid yet or no longer, in seconds since 1970.
    Time {
        /// The first second.
        after: u64,
        /// The second after the last one.
        before: u64,
        /// The clock of this machine.
        now: u64,
    },
}

impl From<WireError> for Error {
    fn from(_: WireError) -> Error {
        Error::Malformed
    }
}

impl From<key::Error> for Error {
    fn from(error: key::Error) -> Error {
        Error::Key(error)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Malformed => f.write_str("it is not a certificate in OpenSSH's format"),
            Error::Key(error) => write!(f, "its key: {error}"),
            Error::OtherAuthority => f.write_str("another cluster's authority has signed it"),
            Error::Signature => f.write_str("its signature is wrong"),
            Error::NotOfUser => f.write_str("it is for a host, not for a person"),
            Error::CriticalOption => {
                f.write_str("it has a critical option, and this program knows none")
            }
            Error::Time { after, before, now } => write!(
                f,
                "it is valid from {} to {}, and the clock of this machine says {}",
                utc(*after),
                utc(*before),
                utc(*now)
            ),
        }
    }
}

impl std::error::Error for Error {}

/// Returns a time of a certificate as text. The last number of 64 bits stands for no limit.
fn utc(seconds: u64) -> String {
    match SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds)) {
        Some(at) if seconds < 1 << 38 => time::seconds(at),
        _ => "no limit".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Authority, OPERATOR};
    use base::crypto::Secret;
    use support::mutation::mutations;

    const NOW: SystemTime = SystemTime::UNIX_EPOCH;

    fn authority(seed: u8) -> Authority {
        Authority::from_seed(&Secret::new(vec![seed; 32])).unwrap()
    }

    fn certificate(authority: &Authority, now: SystemTime) -> (PublicKey, Vec<u8>) {
        let key = key::generate().1;
        let line = authority.operator_certificate(&key, &[OPERATOR], Duration::from_secs(60), now);
        (key, UserCertificate::blob_of_line(&line).unwrap())
    }

    #[test]
    fn a_certificate_is_accepted_while_it_is_valid() {
        let authority = authority(1);
        let now = NOW + Duration::from_secs(1_000_000);
        let (key, blob) = certificate(&authority, now);
        let read = UserCertificate::verify(&blob, authority.public(), now).unwrap();
        assert_eq!(read.key, key);
        assert!(read.is_for(OPERATOR) && !read.is_for("root"));
        for (at, is_valid) in [
            (now - super::super::CLOCK_SKEW, true),
            (
                now - super::super::CLOCK_SKEW - Duration::from_secs(1),
                false,
            ),
            (now + Duration::from_secs(59), true),
            (now + Duration::from_secs(60), false),
        ] {
            let verified = UserCertificate::verify(&blob, authority.public(), at);
            assert_eq!(verified.is_ok(), is_valid, "{verified:?}");
        }
    }

    #[test]
    fn certificates_of_others_and_for_hosts_are_refused() {
        let now = NOW + Duration::from_secs(1_000_000);
        let (own, other) = (authority(1), authority(2));
        let (_, blob) = certificate(&other, now);
        let refused = UserCertificate::verify(&blob, own.public(), now);
        assert_eq!(refused.unwrap_err(), Error::OtherAuthority);
        let key = key::generate().1;
        let host = own.host_certificate(&key, &[OPERATOR.to_owned()], now);
        let blob = UserCertificate::blob_of_line(&host.unwrap()).unwrap();
        let refused = UserCertificate::verify(&blob, own.public(), now);
        assert_eq!(refused.unwrap_err(), Error::NotOfUser);
    }

    #[test]
    fn no_mutated_certificate_is_accepted() {
        let authority = authority(1);
        let now = NOW + Duration::from_secs(1_000_000);
        let (_, blob) = certificate(&authority, now);
        let accepted = mutations(&blob, 5_000)
            .filter(|it| {
                *it != blob && UserCertificate::verify(it, authority.public(), now).is_ok()
            })
            .count();
        assert_eq!(accepted, 0);
    }
}
