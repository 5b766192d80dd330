//! The common part of the variants with a TPM: the issuer of their document. The crate `verifier` has its
//! validator.
//!
//! ```text
//! extra data = SHA-256(user data ‖ verifier's nonce)        TPM's nonce = SHA-256(instance info ‖ extra data)
//! document   = { attestation key, a quote of each bank over the TPM's nonce with the values, event log, instance info, user data }
//! machine    = SHA-256(attestation key): the Name of the key without its nameAlg (TPM 2.0 part 1 §16). The TPM derives the
//!              key from its own seed: the key is the same after each reboot and differs from that of any other TPM
//! ```
//!
//! The file of each variant has the differences: the source of its attestation key, and the
//! instance info that [`VariantData`] adds to a document.

use base::sync::lock;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::document::{Attestation, Base64, Document, Pcrs, Quote};
use super::{DocumentRequest, IssueError, KeyName, MachineIdentity, Oid, excerpt, sha256};
use tpm::{Bank, KeySource, Tpm};

/// The file in which the kernel provides the event log of the firmware.
pub const EVENT_LOG: &str = "/sys/kernel/security/tpm0/binary_bios_measurements";
/// Maximum size of the event log in bytes. If the log is longer, events are omitted: the
/// certificate must fit a TLS handshake message of 64 KiB, and base64 adds a third.
const MAX_EVENT_LOG: usize = 24 << 10;
/// Pause before a TPM is asked again for its certificates after a failure.
const ASK_AGAIN: Duration = Duration::from_secs(10);
/// Shortens an event log to at most this many bytes.
type Shorten = fn(&[u8], usize) -> Vec<u8>;

/// What a variant adds to the documents of its machines.
pub trait VariantData: Send + Sync {
    /// Returns the OID of the variant.
    fn oid(&self) -> Oid;
    /// Returns the source of the attestation key.
    fn key_source(&self) -> KeySource {
        KeySource::Own
    }
    /// Gets the data that the machine needs from services of its host. They may be slow, so this is
    /// called while the TPM at `location` is closed.
    fn prepare(&self, _location: &tpm::Location) -> Result<(), IssueError> {
        Ok(())
    }
    /// Returns the instance info of a document with this extra data: the evidence that endorses the
    /// attestation key of the open TPM.
    fn instance_info(
        &self,
        _tpm: &mut Tpm,
        _extra_data: &[u8; 32],
    ) -> Result<Option<Vec<u8>>, IssueError> {
        Ok(None)
    }
    /// Returns the certificate of the attestation key (DER) that the TPM has, if it is not in the
    /// instance info.
    fn key_certificate(&self, _tpm: &mut Tpm) -> Result<Option<Vec<u8>>, IssueError> {
        Ok(None)
    }
}

/// Makes documents with the TPM of this machine.
pub struct TpmIssuer {
    machine: Arc<dyn VariantData>,
    location: tpm::Location,
    event_log: Option<PathBuf>,
    identity: Mutex<Option<Known>>,
}

/// The keys of this machine, which never change, as far as the TPM has returned them.
struct Known {
    identity: MachineIdentity,
    /// When to ask the TPM again for certificates that it failed to return.
    ask_again: Option<Instant>,
}

impl TpmIssuer {
    /// Makes an issuer for the TPM at `location`, with the event log in the given file if it
    /// exists.
    pub fn new(
        location: tpm::Location,
        event_log: Option<PathBuf>,
        machine: Arc<dyn VariantData>,
    ) -> TpmIssuer {
        TpmIssuer {
            machine,
            location,
            event_log,
            identity: Mutex::default(),
        }
    }

    /// Makes an issuer for the TPM at `location` with the event log of this machine.
    pub fn of_this_machine(location: &tpm::Location, machine: Arc<dyn VariantData>) -> TpmIssuer {
        TpmIssuer::new(location.clone(), Some(EVENT_LOG.into()), machine)
    }

    /// Returns the event log, or the part that `shorten` keeps: a validator does not need it.
    fn read_event_log(&self, shorten: Shorten) -> Vec<u8> {
        let Some(path) = &self.event_log else {
            return vec![];
        };
        match std::fs::read(path) {
            Ok(log) => shorten(&log, MAX_EVENT_LOG),
            Err(error) => {
                log::debug!("cannot read the event log {}: {error}", path.display());
                vec![]
            }
        }
    }

    fn document(
        &self,
        opened: Result<Tpm, tpm::Error>,
        user_data: &[u8],
        nonce: &[u8],
        banks: &[Bank],
        shorten: Shorten,
    ) -> Result<Vec<u8>, IssueError> {
        let mut tpm = opened?;
        let extra_data = extra_data(user_data, nonce);
        let instance_info = self.machine.instance_info(&mut tpm, &extra_data)?;
        let key_certificate = self.machine.key_certificate(&mut tpm)?;
        let tpm_nonce = tpm_nonce(instance_info.as_deref().unwrap_or_default(), &extra_data);
        let (ak_pub, quotes) = tpm.quotes(self.machine.key_source(), &tpm_nonce, banks)?;
        drop(tpm);
        let document = Document {
            attestation: Attestation {
                ak_pub: Base64(ak_pub),
                quotes: quotes.into_iter().map(wire_quote).collect(),
                event_log: Base64(self.read_event_log(shorten)),
                ak_cert: Base64(key_certificate.unwrap_or_default()),
                tee_attestation: (),
            },
            instance_info: instance_info.map(Base64),
            user_data: Base64(user_data.into()),
        };
        Ok(serde_json::to_vec(&document)?)
    }
}

impl super::Issuer for TpmIssuer {
    fn oid(&self) -> Oid {
        self.machine.oid()
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        self.machine.prepare(&self.location)?;
        let opened = Tpm::open(&self.location);
        self.document(opened, user_data, nonce, &[], excerpt::of_whole_registers)
    }

    fn issue_for_stranger(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        self.machine.prepare(&self.location)?;
        let opened = Tpm::open_for_stranger(&self.location);
        self.document(opened, user_data, nonce, &[], excerpt::of_whole_registers)
    }

    fn identity(&self) -> Result<MachineIdentity, IssueError> {
        if let Some(identity) = self.known_identity() {
            return Ok(identity);
        }
        let mut tpm = Tpm::open(&self.location)?;
        let key = tpm.attestation_key(self.machine.key_source())?;
        let (endorsements, ask_again) = match tpm.endorsements() {
            Ok(endorsements) => (endorsements, None),
            // without certificates the machine can still prove itself to peers that do not demand
            // them
            Err(error) => {
                log::warn!("{error}");
                (vec![], Some(Instant::now() + ASK_AGAIN))
            }
        };
        let identity = MachineIdentity { key, endorsements };
        *lock(&self.identity) = Some(Known {
            identity: identity.clone(),
            ask_again,
        });
        Ok(identity)
    }

    fn known_identity(&self) -> Option<MachineIdentity> {
        let known = lock(&self.identity);
        let known = known.as_ref()?;
        let is_due = known.ask_again.is_some_and(|at| at <= Instant::now());
        (!is_due).then(|| known.identity.clone())
    }

    fn prove(&self, request: &DocumentRequest<'_>) -> Result<Vec<u8>, IssueError> {
        self.machine.prepare(&self.location)?;
        let open = if request.for_stranger {
            Tpm::open_for_stranger
        } else {
            Tpm::open
        };
        let secret = match request.challenge {
            None => None,
            Some((kind, credential)) => {
                let mut tpm = open(&self.location)?;
                Some(tpm.activate(self.machine.key_source(), kind, credential)?)
            }
        };
        let secret = secret.as_ref().map_or(&[][..], |secret| secret.expose());
        let user_data = request.user_data(secret);
        self.document(
            open(&self.location),
            &user_data,
            request.nonce,
            request.banks,
            excerpt::excerpt,
        )
    }

    fn machine(&self) -> Result<Option<Arc<str>>, IssueError> {
        let name = KeyName::of(&super::Issuer::identity(self)?.key);
        Ok(Some(name.digest().into()))
    }
}

fn wire_quote(quote: tpm::TpmQuote) -> Quote {
    let pcrs = quote
        .pcrs
        .into_iter()
        .map(|(index, value)| (index.to_string(), Base64(value)))
        .collect();
    Quote {
        quote: Base64(quote.attest),
        raw_sig: Base64(quote.signature),
        pcrs: Pcrs {
            hash: quote.bank as u16,
            pcrs,
        },
    }
}

/// Returns the hash that binds the user data and the verifier's nonce.
pub fn extra_data(user_data: &[u8], nonce: &[u8]) -> [u8; 32] {
    sha256(&[user_data, nonce])
}

/// Returns the nonce of the quotes.
pub fn tpm_nonce(instance_info: &[u8], extra_data: &[u8; 32]) -> [u8; 32] {
    sha256(&[instance_info, extra_data])
}
