//! Binds a document to one connection of the strong form of attested TLS (the crate `atls`).
//!
//! The user data of a document in the strong form is a digest over the role of the machine that
//! proves itself, the connection, and the secret that only this machine's TPM could decrypt. Each
//! part is preceded by its length, and a label comes first, so no other kind of document has the
//! same user data.

use super::sha256;
use tpm::{Bank, Credential, EndorsementKind, KeyEndorsement};

/// The label of the user data: no other use of an attestation key hashes this label.
const LABEL: &[u8] = b"firstlight attested TLS, version 1";

/// The role in which a machine proves itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerRole {
    /// The end that connected.
    Client,
    /// The called end with direct access to its TPM: init server, recovery server, key service.
    Server,
    /// The join service, as the called end. Its pod has no TPM: the host makes the evidence and
    /// sets this role.
    JoinService,
}

impl PeerRole {
    /// Returns the name of the role, as hashed into the user data.
    pub fn name(self) -> &'static str {
        match self {
            PeerRole::Client => "client",
            PeerRole::Server => "server",
            PeerRole::JoinService => "join service",
        }
    }
}

/// What a machine says about itself before it sends evidence.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachineIdentity {
    /// The attestation key (TPMT_PUBLIC); empty if the variant has none.
    pub key: Vec<u8>,
    /// The certified endorsement keys of the same TPM.
    pub endorsements: Vec<KeyEndorsement>,
}

/// A request for a document of the strong form.
#[derive(Debug, Clone, Copy)]
pub struct DocumentRequest<'a> {
    /// The role of this machine in the connection.
    pub role: PeerRole,
    /// The digest of the connection: both ends compute it, and neither can choose it.
    pub session: &'a [u8; 32],
    /// The nonce of the peer.
    pub nonce: &'a [u8],
    /// The banks that the peer's policy compares; empty means all.
    pub banks: &'a [Bank],
    /// The credential challenge, and the kind of endorsement key it is for.
    pub challenge: Option<(EndorsementKind, &'a Credential)>,
    /// Whether the peer called this machine and is not authenticated.
    pub for_stranger: bool,
}

impl DocumentRequest<'_> {
    /// Returns the user data of the document. `secret` is what the TPM decrypted for the peer, or
    /// empty.
    pub fn user_data(&self, secret: &[u8]) -> [u8; 32] {
        user_data(self.role, self.session, secret)
    }
}

/// Returns the user data that a document must have: SHA-256 over label, role, session and secret,
/// each preceded by its length.
pub fn user_data(role: PeerRole, session: &[u8; 32], secret: &[u8]) -> [u8; 32] {
    digest(&[LABEL, role.name().as_bytes(), session, secret])
}

/// Returns SHA-256 over the parts, each preceded by its length (four bytes, big endian).
pub fn digest(parts: &[&[u8]]) -> [u8; 32] {
    let mut framed = Vec::new();
    for part in parts {
        // a part is a message of at most 128 KiB
        framed.extend((part.len() as u32).to_be_bytes());
        framed.extend_from_slice(part);
    }
    sha256(&[&framed])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_data_differs_with_each_part_and_with_where_one_part_ends() {
        let (session, other) = ([1; 32], [2; 32]);
        let all = [
            user_data(PeerRole::Client, &session, b""),
            user_data(PeerRole::Server, &session, b""),
            user_data(PeerRole::JoinService, &session, b""),
            user_data(PeerRole::Client, &other, b""),
            user_data(PeerRole::Client, &session, b"secret"),
        ];
        for (index, one) in all.iter().enumerate() {
            assert!(all[..index].iter().all(|earlier| earlier != one));
        }
        assert_ne!(digest(&[b"ab", b"c"]), digest(&[b"a", b"bc"]));
        assert_ne!(digest(&[b"ab"]), digest(&[b"ab", b""]));
    }

    /// Computed with Python's hashlib from docs/protocol.md.
    #[test]
    fn user_data_is_as_documented() {
        for (role, expected) in [
            (
                PeerRole::Client,
                "3e9e717fd3dde2d32e358813fe6fe8c1c5bcf8db5e79d11a36bf9489791fbb1f",
            ),
            (
                PeerRole::JoinService,
                "956f15a5ddcf20c9eb303b11a3c4f45f396951cfe2f0c1cd7e7b91d18ee6fa5e",
            ),
        ] {
            assert_eq!(super::super::hex(&user_data(role, &[7; 32], b"")), expected);
        }
    }
}
