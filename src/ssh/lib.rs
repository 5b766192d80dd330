//! Emergency SSH: an operator who holds the master secret reaches every node of the cluster, without a password or a key
//! that anybody put there before.
//!
//! The cluster has two certificate authorities, Ed25519 keys whose seeds are derived from the master secret. Nodes trust the
//! one for users; their own host keys are certified by the one for hosts, which join services have, too, and which lets nobody
//! log in anywhere. The operator derives both again, certifies a key of theirs for a day, and knows every node by its
//! certificate. The format is OpenSSH's (PROTOCOL.certkeys of its sources); the names of the files, and the authority for users,
//! are the old system's, which has it certify hosts, too.
//!
//! Files: [`key`], public keys; [`host`], what a node keeps on its state disk; `wire`, the data types.

pub mod host;
pub mod key;
mod wire;

use std::fmt;
use std::time::{Duration, SystemTime};

use ring::signature::{Ed25519KeyPair, KeyPair};

use base::crypto::{self, Secret};
pub use key::PublicKey;
use key::{ED25519, ED25519_LEN};
use wire::Writer;

/// The user that an operator becomes.
pub const USER: &str = "root";
/// How long a user certificate is valid.
pub const USER_VALIDITY: Duration = Duration::from_secs(24 * 3600);
/// How long a host certificate is valid. Nodes get a new one at each rejoin, so the longest time between two boots.
pub const HOST_VALIDITY: Duration = Duration::from_secs(90 * 24 * 3600);
/// A node's clock may be so much behind the operator's.
const CLOCK_SKEW: Duration = Duration::from_secs(5 * 60);
/// PROTOCOL.certkeys: SSH2_CERT_TYPE_USER, SSH2_CERT_TYPE_HOST.
const TYPE_USER: u32 = 1;
const TYPE_HOST: u32 = 2;
/// In the order of their names, as the format demands: what a rescue needs, and no agent or X11 forwarding.
const USER_EXTENSIONS: [&str; 2] = ["permit-port-forwarding", "permit-pty"];
const NONCE_LEN: usize = 32;

/// A certificate authority of a cluster: for users, or for hosts.
pub struct Authority {
    pair: Ed25519KeyPair,
    public: PublicKey,
}

/// What a certificate says of a key.
struct Statement<'a> {
    kind: u32,
    /// Who it is, for sshd's log.
    id: &'a str,
    principals: &'a [String],
    /// Seconds since 1970.
    valid_after: u64,
    valid_before: u64,
    extensions: &'a [&'a str],
}

impl Authority {
    /// Of the seed, 32 bytes: the data key [`crypto::SSH_USER_CA_SEED_ID`] or [`crypto::SSH_HOST_CA_SEED_ID`].
    pub fn from_seed(seed: &Secret) -> Result<Authority, Error> {
        let pair = Ed25519KeyPair::from_seed_unchecked(seed.expose())
            .map_err(|_| Error::Seed(seed.len()))?;
        let public = PublicKey::ed25519(pair.public_key().as_ref());
        Ok(Authority { pair, public })
    }

    /// Its public key.
    pub fn public(&self) -> &PublicKey {
        &self.public
    }

    /// The same as a line: for `TrustedUserCAKeys` of sshd_config(5) and, after a `@cert-authority` mark, known_hosts. Without
    /// line break.
    pub fn public_line(&self) -> String {
        self.public.line()
    }

    /// Certifies a node's key for these host names and addresses, from `now` on for [`HOST_VALIDITY`]: a line of a `.pub` file,
    /// without line break. Valid since ever, too: an operator's clock may be behind that of who certifies.
    pub fn host_certificate(
        &self,
        key: &PublicKey,
        principals: &[String],
        now: SystemTime,
    ) -> Result<String, Error> {
        // one without principals would be valid for every name
        let id = principals.first().ok_or(Error::NoPrincipals)?;
        if let Some(bad) = principals.iter().find(|name| !is_principal(name)) {
            return Err(Error::Principal(bad.clone()));
        }
        let (valid_after, valid_before) =
            (0, seconds(now.checked_add(HOST_VALIDITY).unwrap_or(now)));
        let statement = Statement {
            kind: TYPE_HOST,
            id,
            principals,
            valid_after,
            valid_before,
            extensions: &[],
        };
        Ok(self.certify(key, &statement, crypto::random()))
    }

    /// Certifies an operator's key for [`USER`], from `now` on for [`USER_VALIDITY`]; in the form of
    /// [`Authority::host_certificate`].
    pub fn user_certificate(&self, key: &PublicKey, now: SystemTime) -> String {
        let statement = Statement {
            kind: TYPE_USER,
            id: if key.comment().is_empty() {
                USER
            } else {
                key.comment()
            },
            principals: &[USER.to_owned()],
            valid_after: seconds(now.checked_sub(CLOCK_SKEW).unwrap_or(now)),
            valid_before: seconds(now.checked_add(USER_VALIDITY).unwrap_or(now)),
            extensions: &USER_EXTENSIONS,
        };
        self.certify(key, &statement, crypto::random())
    }

    /// PROTOCOL.certkeys: the fields are in this order for every kind of key.
    fn certify(&self, key: &PublicKey, statement: &Statement, nonce: [u8; NONCE_LEN]) -> String {
        let name = key.kind.certificate;
        let principals = statement
            .principals
            .iter()
            .fold(Writer::default(), |all, one| all.string(one.as_bytes()));
        let flag = |all: Writer, name: &&str| all.string(name.as_bytes()).string(b"");
        let extensions = statement.extensions.iter().fold(Writer::default(), flag);
        let body = Writer::default()
            .string(name.as_bytes())
            .string(&nonce)
            .raw(key.fields())
            .u64(0) // serial number: none
            .u32(statement.kind)
            .string(statement.id.as_bytes())
            .string(principals.bytes())
            .u64(statement.valid_after)
            .u64(statement.valid_before)
            .string(b"") // critical options
            .string(extensions.bytes())
            .string(b"") // reserved
            .string(self.public.blob());
        let signature = self.pair.sign(body.bytes());
        let signature = Writer::default()
            .string(ED25519.as_bytes())
            .string(signature.as_ref());
        key::line(name, body.string(signature.bytes()).bytes())
    }
}

/// As certificates have times: since 1970.
fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

/// A host name or an address; a pattern would be one for other hosts too.
pub fn is_principal(name: &str) -> bool {
    !name.is_empty()
        && name
            .chars()
            .all(|c| c.is_ascii_graphic() && !"*?!,".contains(c))
}

/// Why there is no authority or certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The seed has so many bytes.
    Seed(usize),
    /// A host without a name.
    NoPrincipals,
    /// This is no host name or address.
    Principal(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Seed(len) => {
                write!(
                    f,
                    "the seed of the SSH certificate authority has {len} bytes, expected {ED25519_LEN}"
                )
            }
            Error::NoPrincipals => {
                f.write_str("the SSH host certificate needs a host name or address to be for")
            }
            Error::Principal(name) => write!(
                f,
                "{name:?} is no host name or address for an SSH host certificate"
            ),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;
    use base::crypto::{Dek, KEY_LEN, SSH_USER_CA_SEED_ID};
    use kms::ClusterKms;
    use wire::Reader;

    /// Of the old system's vectors: master key 01.., salt 02...
    fn authority() -> Authority {
        let kms = ClusterKms::new(Secret::new(vec![1; 32]), Secret::new(vec![2; 32])).unwrap();
        Authority::from_seed(&kms.dek(&Dek::named(SSH_USER_CA_SEED_ID), KEY_LEN).unwrap()).unwrap()
    }

    #[test]
    fn the_authority_is_the_old_systems() {
        assert_eq!(
            authority().public_line(),
            "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILR0FseonmwTcSWFE0usA7Jhv/450JfmwMdC3i5wcbSI"
        );
    }

    #[test]
    fn a_seed_of_another_length_is_refused() {
        for len in [0, 31, 33] {
            assert_eq!(
                Authority::from_seed(&Secret::new(vec![1; len])).err(),
                Some(Error::Seed(len))
            );
        }
    }

    #[test]
    fn a_host_certificate_without_a_name_or_for_a_pattern_is_refused() {
        let key = key::generate().1;
        let certify = |names: &[&str]| {
            authority()
                .host_certificate(
                    &key,
                    &names.iter().map(|name| (*name).into()).collect::<Vec<_>>(),
                    SystemTime::now(),
                )
                .err()
        };
        assert_eq!(certify(&[]), Some(Error::NoPrincipals));
        for bad in ["", "*", "node-?", "a,b", "a b", "!a", "ü", "a\n"] {
            assert_eq!(
                certify(&["node", bad]),
                Some(Error::Principal(bad.into())),
                "{bad:?}"
            );
        }
        assert_eq!(certify(&["node", "10.0.0.1", "fd00::1"]), None);
    }

    #[test]
    fn the_signature_is_over_all_before_it_and_each_certificate_differs() {
        let (authority, key) = (authority(), key::generate().1);
        let statement = Statement {
            kind: TYPE_HOST,
            id: "a",
            principals: &["a".into(), "b".into()],
            valid_after: 0,
            valid_before: 1,
            extensions: &[],
        };
        let line = authority.certify(&key, &statement, [7; 32]);
        assert_eq!(authority.certify(&key, &statement, [7; 32]), line);
        let names = ["a".to_owned()];
        let certificate = || {
            authority
                .host_certificate(&key, &names, SystemTime::now())
                .unwrap()
        };
        assert_ne!(certificate(), certificate());

        use base64::Engine;
        let blob = base64::engine::general_purpose::STANDARD
            .decode(line.split_once(' ').unwrap().1)
            .unwrap();
        // "ssh-ed25519" and 64 bytes, each with its length, in a string
        let (body, signature) = blob.split_at(blob.len() - (4 + 4 + 11 + 4 + 64));
        let mut reader = Reader::new(Reader::new(signature).string().unwrap());
        assert_eq!(reader.string().unwrap(), ED25519.as_bytes());
        let public = &authority.public.fields()[4..];
        let public = ring::signature::UnparsedPublicKey::new(&ring::signature::ED25519, public);
        public.verify(body, reader.string().unwrap()).unwrap();
    }
}
