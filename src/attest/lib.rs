//! Attestation: documents that prove to a peer what software a machine runs.
//!
//! An [`Issuer`] makes a document on the machine itself. A [`Validator`] judges the document of a peer; the crate `verifier` has all of them.
//! Attested TLS (the crate `atls`) transports a document in a certificate extension whose OID names the variant.
//!
//! Files: [`variant`] is the table of variants; [`qemu_vtpm`] and [`qemu_tdx`] are two of them; [`vtpm`] is what the variants with a TPM
//! have in common; [`prepared`] keeps what a machine sends; [`session`] binds a document to one connection, and [`wire`] has its messages;
//! [`key`] is an attestation key, and `key_name` its name; [`td`] reads the registers of a machine without a TPM; `composite` is the evidence
//! of a peer, and validators that are made of others; [`document`] is the JSON document; [`hcl`] is the report of Azure's paravisor;
//! `self_signed` verifies the certificate around a document; [`event_log`] parses an event log, and [`excerpt`] shortens it; [`systemd_log`] says what systemd has measured;
//! [`cbor`] reads what AWS's hypervisor writes.

pub mod aws_hypervisor;
pub mod aws_nitro_tpm;
pub mod aws_sev_snp;
pub mod azure_sev_snp;
pub mod azure_tdx;
pub mod azure_trustedlaunch;
pub mod cbor;
pub mod composite;
pub mod document;
pub mod event_log;
pub mod excerpt;
pub mod gcp_sev_es;
pub mod gcp_sev_snp;
pub mod hcl;
pub mod key;
mod key_name;
pub mod nsm;
pub mod prepared;
pub mod qemu_tdx;
pub mod qemu_vtpm;
pub mod registers;
mod self_signed;
pub mod session;
pub mod snp;
pub mod systemd_log;
pub mod td;
pub mod variant;
pub mod vtpm;
pub mod wire;

use std::sync::Arc;

use rustls_pki_types::CertificateDer;

pub use base::boot::Stage;
pub use composite::{Composite, Evidence};
pub use key_name::KeyName;
pub use registers::{ClusterRegister, Registers};
pub use session::{Identity, Request, Role};
pub use tee::claims::{PlatformClaims, Property, TcbPart};
pub use variant::Variant;

use zeroize::Zeroizing;

use base::crypto::CLUSTER_ID_LEN;
use base::text::{hex, printable};
use proto::attested::Collateral;

use tpm::{Bank, CLUSTER_ID_PCR, Credential, Endorsement, EndorsementKind, Tpm};

/// The OID of an attestation variant in a certificate: DER with tag and length, e.g. `06 05 2b cd 2c 05 01`.
pub type Oid = &'static [u8];

/// Makes attestation documents of one variant for the machine on which it runs.
pub trait Issuer: Send + Sync {
    /// Returns the OID of the variant.
    fn oid(&self) -> Oid;
    /// Makes a document that binds `user_data` (attested TLS: SHA-256 of the public key of the certificate) and the `nonce` of the
    /// peer to the state of the machine.
    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError>;
    /// Makes a document for a peer that called this machine and has proved nothing. Documents for peers that this machine calls
    /// come first.
    fn issue_for_stranger(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        self.issue(user_data, nonce)
    }
    /// Returns what a peer learns about this machine before it demands a proof.
    fn identity(&self) -> Result<Identity, IssueError> {
        Ok(Identity::default())
    }
    /// Returns the identity if the TPM need not be asked for it.
    fn known_identity(&self) -> Option<Identity> {
        None
    }
    /// Makes the document for one connection of the strong form of attested TLS.
    fn prove(&self, request: &Request<'_>) -> Result<Vec<u8>, IssueError> {
        if request.challenge.is_some() {
            return Err(IssueError(
                "the peer demands a certified attestation key, and this variant has none".into(),
            ));
        }
        let user_data = request.user_data(&[]);
        match request.for_stranger {
            true => self.issue_for_stranger(&user_data, request.nonce),
            false => self.issue(&user_data, request.nonce),
        }
    }
    /// Returns what validators of a document of this machine need beside it, as far as it is at hand: it waits for no server.
    fn collateral(&self, _document: &[u8]) -> Option<Collateral> {
        None
    }
    /// Returns the name of this machine as validators report it ([`Identified::machine`]); `None` if the variant has no names.
    fn machine(&self) -> Result<Option<Arc<str>>, IssueError> {
        Ok(None)
    }
}

/// Validates attestation documents of one variant.
pub trait Validator: Send + Sync {
    /// Returns the OID of the variant.
    fn oid(&self) -> Oid;
    /// Returns the user data of a document that is genuine, fresh for `nonce` and accepted by the policy.
    fn validate(&self, document: &[u8], nonce: &[u8]) -> Result<Vec<u8>, ValidateError>;
    /// Validates a document and also returns the name of the machine, if the variant has names.
    fn identify(&self, document: &[u8], nonce: &[u8]) -> Result<Identified, ValidateError> {
        Ok(Identified {
            user_data: self.validate(document, nonce)?,
            machine: None,
            stage: None,
            platform: None,
            is_endorsed: false,
            cluster: None,
        })
    }
    /// Returns what the TPM of a peer must decrypt to prove that its attestation key (TPMT_PUBLIC) is certified; `None` if the
    /// policy does not demand this of the key. Attested TLS then calls [`Validator::identify_certified`] instead of
    /// [`Validator::identify`]. Nothing of the peer's `endorsements` is verified yet.
    fn challenge(
        &self,
        _key: &[u8],
        _endorsements: &[Endorsement],
    ) -> Result<Option<Challenge>, ValidateError> {
        Ok(None)
    }
    /// Returns whether [`Validator::challenge`] may return a challenge.
    fn challenges(&self) -> bool {
        false
    }
    /// Validates a document as [`Validator::identify`] does, of a peer that knows the secret of a challenge. It made the document
    /// after it decrypted the secret, and the challenge was made by this validator for the attestation key with this Name.
    fn identify_certified(
        &self,
        document: &[u8],
        nonce: &[u8],
        _key: &KeyName,
    ) -> Result<Identified, ValidateError> {
        self.identify(document, nonce)
    }
    /// Judges what a peer presents in a connection: the only judgement for which attested TLS asks.
    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, ValidateError> {
        match evidence.certified {
            None => self.identify(evidence.document, evidence.nonce),
            Some(key) => self.identify_certified(evidence.document, evidence.nonce, key),
        }
    }
    /// Returns the public key (DER SubjectPublicKeyInfo) of a certificate that is signed by it. The error is a clause. No validator needs
    /// another implementation; a program without validators does not link this one.
    fn self_signed(&self, certificate: &CertificateDer<'_>) -> Result<Vec<u8>, String> {
        self_signed::verify(certificate)
    }
    /// Returns whether the peer shall bring the collateral of its document, because this program does not fetch it.
    fn takes_collateral(&self) -> bool {
        false
    }
    /// Returns the validator of one connection, if the policy of this one may change before the end of the handshake.
    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        None
    }
    /// Returns whether evidence of the old form of attested TLS is refused.
    fn requires_strong(&self) -> bool {
        false
    }
    /// Returns whether the quote of any TPM is accepted. Then a program without a TPM is accepted too.
    fn believes_any_tpm(&self) -> bool {
        false
    }
}

/// A secret that only a TPM with the given endorsement key and attestation key can decrypt.
pub struct Challenge {
    /// The template of the endorsement key.
    pub kind: EndorsementKind,
    /// What the TPM decrypts.
    pub credential: Credential,
    /// The secret. Who knows it has both keys in one TPM.
    pub secret: Zeroizing<[u8; 32]>,
    /// The root that certified the endorsement key: its name in the policy.
    pub certified_by: String,
}

/// The content of an accepted document.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identified {
    /// The user data that the issuer bound.
    pub user_data: Vec<u8>,
    /// The name of the machine, which does not change with a reboot: at most 64 lower-case hexadecimal digits.
    pub machine: Option<Arc<str>>,
    /// The stage of the machine's boot; `None` if the validator does not distinguish stages.
    pub stage: Option<Stage>,
    /// What the evidence proves about the platform; `None` if it contains nothing that a platform signed.
    pub platform: Option<Arc<PlatformClaims>>,
    /// Whether a platform endorses the key that signed the registers, so that it needs no mention in the policy.
    pub is_endorsed: bool,
    /// The register of the cluster ID; `None` if it was not proved.
    pub cluster: Option<ClusterRegister>,
}

/// What is known about a connection beside the name of the peer. Attested TLS gives it to the handlers of the peer's calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claims {
    /// The form of attested TLS.
    pub form: Form,
    /// As [`Identified::stage`].
    pub stage: Option<Stage>,
    /// As [`Identified::platform`].
    pub platform: Option<Arc<PlatformClaims>>,
}

/// The two forms of attested TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Documents are in certificates and cover the keys of these, as in the old system.
    Old,
    /// Documents are exchanged inside the connection and cover its exporter.
    Strong,
}

/// Why a document could not be made: a sentence for the console of the machine.
#[derive(Debug, Clone)]
pub struct IssueError(pub String);

/// Why a document was refused. `Display` is for the validating side and names registers; the peer learns only that the document
/// was refused.
#[derive(Debug, Clone)]
pub struct ValidateError(pub Arc<str>);

impl std::fmt::Display for IssueError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::fmt::Display for ValidateError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns whether the node has measured a cluster ID in this boot.
pub fn is_marked(location: &tpm::Location) -> Result<bool, tpm::Error> {
    Ok(!cluster_register(location)?.is_fresh())
}

/// Extends the register of the cluster ID of this machine, which is zero, with a cluster ID, and reads it back.
pub fn mark(location: &tpm::Location, cluster_id: &[u8; CLUSTER_ID_LEN]) -> Result<(), tpm::Error> {
    match location {
        tpm::Location::Tdx(_) => td::mark(location, cluster_id),
        _ => Tpm::open(location)?.measure_cluster_id(cluster_id),
    }
}

/// Says which part of systemd has measured into PCR 15 of this machine, and what to do; `None` if PCR 15 is zero or cannot be read,
/// or if systemd's log has no such record. A TPM that is not this machine's has no log.
pub fn foreign_writer(location: &tpm::Location) -> Option<String> {
    let log = match location {
        tpm::Location::Device(_) => systemd_log::read(),
        tpm::Location::Swtpm(..) | tpm::Location::Tdx(_) => vec![],
    };
    if log.is_empty() {
        return None;
    }
    systemd_log::explain(
        &log,
        CLUSTER_ID_PCR,
        cluster_register(location).ok()?.as_ref(),
    )
}

/// Returns the register of the cluster ID of this machine.
pub fn cluster_register(location: &tpm::Location) -> Result<ClusterRegister, tpm::Error> {
    if let tpm::Location::Tdx(_) = location {
        return td::cluster_register(location);
    }
    let pcrs = Tpm::open(location)?.pcrs(Bank::Sha256)?;
    // every TPM for PCs has PCRs 0 to 23 (TCG PC Client Platform TPM Profile)
    let value = pcrs.get(&CLUSTER_ID_PCR);
    let value = value.and_then(|value| ClusterRegister::new(value));
    value.ok_or(tpm::Error::NoBank(Bank::Sha256))
}

/// Returns SHA-256 of the concatenated parts.
pub fn sha256(parts: &[&[u8]]) -> [u8; 32] {
    let mut context = ring::digest::Context::new(&ring::digest::SHA256);
    parts.iter().for_each(|part| context.update(part));
    let mut hash = [0; 32];
    hash.copy_from_slice(context.finish().as_ref());
    hash
}

/// Decodes `2 * N` hexadecimal digits.
pub fn unhex<const N: usize>(text: &str) -> Option<[u8; N]> {
    base::text::unhex(text)?.try_into().ok()
}

impl std::error::Error for IssueError {}
impl std::error::Error for ValidateError {}
