//! The interface by which attested TLS verifies a peer. The crate `verifier` implements it. A program
//! that links no verifier, such as `unlock`, has no judge, and accepts every peer.

use std::any::Any;
use std::error::Error;
use std::sync::Arc;

use proto::attested::{Challenge, Demand, Identity, Proof};

use super::PeerRole;

/// Maximum size in bytes of the collateral that a peer sends: Intel's collateral for a platform has
/// about 25 KiB.
pub const MAX_COLLATERAL: usize = 128 << 10;

/// Why a judge refuses a peer: the `Refusal` of the crate `verifier`.
pub type Refused = Box<dyn Error + Send + Sync>;

/// The two forms of attested TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Documents are in certificates and bind the certificates' keys, as in Constellation.
    Old,
    /// Documents are exchanged inside the connection and bind its exporter.
    Strong,
}

/// Judges the peers of a client or server.
pub trait Judge: Send + Sync {
    /// Judges a peer in the old form by its certificate (DER). `nonce` is what we sent to the peer.
    fn certificate(&self, certificate: &[u8], nonce: &[u8]) -> Result<Accepted, Refused>;
    /// Returns why a peer without a document is refused.
    fn no_document(&self) -> Refused;
    /// Begins to judge one connection of the strong form. The peer may prove itself in one of the
    /// roles `peers`.
    fn connection(&self, peers: &'static [PeerRole]) -> Box<dyn ConnectionJudge>;
}

/// Judges the peer in one connection of the strong form.
pub trait ConnectionJudge {
    /// Returns what the peer must send.
    fn demand(&self) -> Demand;
    /// Returns the credential challenge, if the policy requires a certified attestation key.
    fn challenge(&mut self, peer: &Identity) -> Result<Option<Challenge>, Refused>;
    /// Judges the proof that the peer sent.
    fn proof(&self, presented: &Presented<'_>) -> Result<Accepted, Refused>;
}

/// What a peer sent in one connection of the strong form, and what its document must bind.
pub struct Presented<'a> {
    /// The identity in the peer's offer.
    pub identity: Option<&'a Identity>,
    /// The peer's proof.
    pub proof: &'a Proof,
    /// Our nonce.
    pub nonce: &'a [u8],
    /// The digest of the connection.
    pub session: &'a [u8; 32],
}

/// An accepted peer.
#[derive(Debug, Clone)]
pub struct Accepted {
    /// The name of the machine, if its evidence has one.
    pub machine: Option<Arc<str>>,
    /// Further facts for the handlers of the peer's calls: the `Claims` of the crate `verifier`.
    pub claims: Arc<dyn Any + Send + Sync>,
}
