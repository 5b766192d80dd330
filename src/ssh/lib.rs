//! Emergency SSH: an operator with the master secret can log in to every node of the cluster,
//! without passwords or keys that were installed before.
//!
//! The cluster has two certificate authorities: Ed25519 keys whose seeds are derived from the master secret. Nodes trust the user
//! authority. The host authority certifies the host keys of the nodes; join services have it too, and it does not permit a login.
//! The operator derives both authorities, certifies a key for one day, and verifies each node by its host certificate. The format
//! is that of OpenSSH (PROTOCOL.certkeys of its sources). File names and the user authority are those of Constellation, whose user
//! authority also certifies hosts.
//!
//! Files: [`key`] has public keys; [`host`] the files of a node on its state disk; [`operators`] who must sign an attestation policy;
//! `wire` the data types.

pub mod certificate;
pub mod host;
pub mod key;
pub mod operators;
pub mod signature;
mod wire;

use std::fmt;
use std::time::{Duration, SystemTime};

use ring::signature::{Ed25519KeyPair, KeyPair};

use base::crypto::{self, Secret};
pub use key::PublicKey;
use key::{ED25519, ED25519_LEN};
use wire::Writer;

/// The user name with which an operator logs in.
pub const USER: &str = "root";
/// The principal of certificates with which an operator makes every call to a node's operator service. It is no user of sshd.
pub const OPERATOR: &str = "firstlight-operator";
/// The principal of certificates with which an operator reads the logs of a node, and changes nothing.
pub const READER: &str = "firstlight-reader";
/// The namespace of signatures by which an operator proves to own a certified key (PROTOCOL.sshsig).
pub const OPERATOR_NAMESPACE: &str = "operator@firstlight";
/// How long a user certificate is valid.
pub const USER_VALIDITY: Duration = Duration::from_secs(24 * 3600);
/// How long a host certificate is valid. A node gets a new one at each rejoin, so this is the longest time between two boots.
pub const HOST_VALIDITY: Duration = Duration::from_secs(90 * 24 * 3600);
/// Maximum time by which a node's clock may be behind the operator's.
const CLOCK_SKEW: Duration = Duration::from_secs(5 * 60);
/// PROTOCOL.certkeys: SSH2_CERT_TYPE_USER, SSH2_CERT_TYPE_HOST.
const TYPE_USER: u32 = 1;
const TYPE_HOST: u32 = 2;
/// The permissions in alphabetical order, which the format requires. Agent and X11 forwarding are not permitted.
const USER_EXTENSIONS: [&str; 2] = ["permit-port-forwarding", "permit-pty"];
const NONCE_LEN: usize = 32;

/// A certificate authority of a cluster: for users, or for hosts.
pub struct Authority {
    pair: Ed25519KeyPair,
    public: PublicKey,
}

/// The content of a certificate about a key.
struct Statement<'a> {
    kind: u32,
    /// The key id, which sshd logs.
    id: &'a str,
    principals: &'a [String],
    /// Seconds since 1970.
    valid_after: u64,
    valid_before: u64,
    extensions: &'a [&'a str],
}

impl Authority {
    /// Makes the authority from its seed of 32 bytes: the data key [`crypto::SSH_USER_CA_SEED_ID`]
    /// or [`crypto::SSH_HOST_CA_SEED_ID`].
    pub fn from_seed(seed: &Secret) -> Result<Authority, Error> {
        let pair = Ed25519KeyPair::from_seed_unchecked(seed.expose())
            .map_err(|_| Error::Seed(seed.len()))?;
        let public = PublicKey::ed25519(pair.public_key().as_ref());
        Ok(Authority { pair, public })
    }

    /// Returns the public key.
    pub fn public(&self) -> &PublicKey {
        &self.public
    }

    /// Returns the public key as a line without line break, for `TrustedUserCAKeys` of
    /// sshd_config(5) and, after `@cert-authority`, for known_hosts.
    pub fn public_line(&self) -> String {
        self.public.line()
    }

    /// Certifies the key of a node for these host names and addresses. Returns a line of a `.pub` file without line break. The
    /// certificate is valid until [`HOST_VALIDITY`] after `now`, without a start, because the operator's clock may be behind.
    pub fn host_certificate(
        &self,
        key: &PublicKey,
        principals: &[String],
        now: SystemTime,
    ) -> Result<String, Error> {
        // a certificate without principals would be valid for every name
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

    /// Certifies the key of an operator for [`USER`] until [`USER_VALIDITY`] after `now`. Returns a
    /// line as [`Authority::host_certificate`] does.
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

    /// Certifies the key of an operator for the operator service of nodes, with these principals: [`OPERATOR`] or [`READER`]. Returns a
    /// line as [`Authority::host_certificate`] does.
    pub fn operator_certificate(
        &self,
        key: &PublicKey,
        principals: &[&str],
        validity: Duration,
        now: SystemTime,
    ) -> String {
        let statement = Statement {
            kind: TYPE_USER,
            id: match key.comment() {
                "" => "an operator",
                comment => comment,
            },
            principals: &principals
                .iter()
                .map(|it| (*it).to_owned())
                .collect::<Vec<_>>(),
            valid_after: seconds(now.checked_sub(CLOCK_SKEW).unwrap_or(now)),
            valid_before: seconds(now.checked_add(validity).unwrap_or(now)),
            extensions: &[],
        };
        self.certify(key, &statement, crypto::random())
    }

    /// Makes a certificate. The order of fields is the same for every kind of key (PROTOCOL.certkeys).
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

/// Returns a time as in certificates: seconds since 1970.
fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs()
}

/// Returns whether `name` is a host name or an address. A pattern is refused, because it would match other hosts.
pub fn is_principal(name: &str) -> bool {
    !name.is_empty()
        && name
            .chars()
            .all(|c| c.is_ascii_graphic() && !"*?!,".contains(c))
}

/// Why an authority or a certificate could not be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The seed has the wrong length: its length in bytes.
    Seed(usize),
    /// The host has no name or address.
    NoPrincipals,
    /// The text is not a host name or address.
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
                f.write_str("the SSH host certificate needs at least one host name or address")
            }
            Error::Principal(name) => write!(
                f,
                "{name:?} is not a host name or address, which an SSH host certificate needs"
            ),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;
    use base::crypto::{Dek, KEY_LEN, SSH_USER_CA_SEED_ID};
    use base::master_secret::MasterSecret;
    use wire::WireReader;

    /// Returns the user authority of Constellation's test vectors: master key 01.., salt 02..
    fn authority() -> Authority {
        let kms = MasterSecret::new(Secret::new(vec![1; 32]), Secret::new(vec![2; 32])).unwrap();
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
        let mut reader = WireReader::new(WireReader::new(signature).string().unwrap());
        assert_eq!(reader.string().unwrap(), ED25519.as_bytes());
        let public = &authority.public.fields()[4..];
        let public = ring::signature::UnparsedPublicKey::new(&ring::signature::ED25519, public);
        public.verify(body, reader.string().unwrap()).unwrap();
    }
}
