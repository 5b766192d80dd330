//! What the variants with a TPM have in common: the issuer and the validator of their document.
//!
//! ```text
//! extra data = SHA-256(user data ‖ verifier's nonce)        TPM's nonce = SHA-256(instance info ‖ extra data)
//! document   = { attestation key, a quote of each bank over the TPM's nonce with the values, event log, instance info, user data }
//! machine    = SHA-256(attestation key): the Name of the key without its nameAlg (TPM 2.0 part 1 §16). The TPM derives the
//!              key from its own seed: the key is the same after each reboot and differs from that of any other TPM
//! ```
//!
//! What differs is in the file of the variant: where its attestation key comes from and what endorses the key. [`Machine`] adds
//! this to a document, as the instance info; [`Endorser`] judges it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use super::document::{Attestation, Base64, Document, MAX_DOCUMENT, Pcrs, Quote};
use super::quote::{Attest, Key};
use super::registers::check_bank;
use super::variant::Measured;
use super::{
    Challenge, ClusterRegister, Identified, Identity, IssueError, KeyName, Measurement, Oid,
    PlatformClaims, Policy, Request, Stage, ValidateError, event_log, excerpt, hex, printable,
    sha256,
};
use tpm::{self, Bank, CLUSTER_ID_PCR, Endorsement, KeySource, Tpm};

/// The file in which the kernel provides the event log of the firmware.
const EVENT_LOG: &str = "/sys/kernel/security/tpm0/binary_bios_measurements";
/// Maximum size of the event log in bytes. Of a longer log, events are omitted: the certificate must fit a TLS handshake message of 64 KiB,
/// and base64 adds a third.
const MAX_EVENT_LOG: usize = 24 << 10;
/// Pause before a TPM that failed to tell its certificates is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(10);
/// Maximum size of the user data in bytes; attested TLS uses 32 bytes.
const MAX_USER_DATA: usize = 1024;
/// Maximum length of an error of serde_json in a log line: it repeats unexpected input of any length.
const SHOWN_ERROR: usize = 160;

/// Returns at most as many bytes of an event log.
type Shorten = fn(&[u8], usize) -> Vec<u8>;

/// What a variant adds to the documents of its machines.
pub trait Machine: Send + Sync {
    /// Returns the OID of the variant.
    fn oid(&self) -> Oid;
    /// Returns where the attestation key comes from.
    fn key_source(&self) -> KeySource {
        KeySource::Own
    }
    /// Gets what the machine needs from services of its host. They may be slow, so this is called while the TPM at `location` is closed.
    fn prepare(&self, _location: &tpm::Location) -> Result<(), IssueError> {
        Ok(())
    }
    /// Returns the instance info of a document with this extra data: what endorses the attestation key of the open TPM.
    fn instance_info(
        &self,
        _tpm: &mut Tpm,
        _extra_data: &[u8; 32],
    ) -> Result<Option<Vec<u8>>, IssueError> {
        Ok(None)
    }
    /// Returns the certificate of the attestation key (DER) that the TPM has, if it is not in the instance info.
    fn key_certificate(&self, _tpm: &mut Tpm) -> Result<Option<Vec<u8>>, IssueError> {
        Ok(None)
    }
}

/// Judges what endorses the attestation key of a machine.
pub trait Endorser: Send + Sync {
    /// Returns the OID of the variant.
    fn oid(&self) -> Oid;
    /// Returns whether evidence that [`Endorser::endorse`] accepts proves that the attestation key is in the TPM that measured the machine.
    /// If not, whoever has such a platform can have a key of his own endorsed, and claim any register.
    fn endorses_keys(&self) -> bool;
    /// Returns what the evidence proves about the platform of the machine; `None` if nothing endorses the attestation key. The
    /// quote, its nonce and the registers are already verified. An error says why the evidence is refused.
    fn endorse(&self, evidence: &Evidence<'_>) -> Result<Option<PlatformClaims>, String>;
    /// Asks the cloud for what the evidence does not prove, and adds it to the claims. It comes last: only a machine that is accepted
    /// by all else causes a request.
    fn confirm(
        &self,
        _evidence: &Evidence<'_>,
        platform: PlatformClaims,
    ) -> Result<PlatformClaims, String> {
        Ok(platform)
    }
}

/// A document whose quote is verified.
pub struct Evidence<'a> {
    /// The attestation key (TPMT_PUBLIC).
    pub key: &'a [u8],
    /// The attestation key as certificates contain it: SubjectPublicKeyInfo, DER.
    pub spki: Vec<u8>,
    /// SHA-256 over user data and nonce.
    pub extra_data: [u8; 32],
    /// What [`Machine::instance_info`] returned; the quote covers it.
    pub instance_info: &'a [u8],
    /// The certificate of the attestation key (DER), which nothing signs but its issuer; empty if the document has none.
    pub key_certificate: &'a [u8],
    /// The quoted SHA-256 PCRs.
    pub pcrs: &'a BTreeMap<u32, Vec<u8>>,
    /// The event log, which nothing signs.
    pub event_log: &'a [u8],
    document: &'a Document,
    nonce: &'a [u8],
}

impl Evidence<'_> {
    /// Reads the instance info, which is JSON in most variants.
    pub fn info<T: DeserializeOwned>(&self) -> Result<T, String> {
        serde_json::from_slice(self.instance_info).map_err(|error| {
            let error = printable(&error.to_string(), SHOWN_ERROR);
            format!("the instance info cannot be read: {error}")
        })
    }

    /// Returns the quoted PCRs of another bank; `None` if the document has no quote of it.
    pub fn pcrs_of(&self, bank: Bank) -> Result<Option<BTreeMap<u32, Vec<u8>>>, String> {
        let quotes = &self.document.attestation.quotes;
        match quotes.iter().any(|quote| quote.pcrs.hash == bank as u16) {
            true => quoted_values(self.document, self.nonce, bank).map(Some),
            false => Ok(None),
        }
    }
}

/// Makes documents with the TPM of this machine.
pub struct Issuer {
    machine: Arc<dyn Machine>,
    location: tpm::Location,
    event_log: Option<PathBuf>,
    identity: Mutex<Option<Known>>,
}

/// The keys of this machine, which never change, as far as the TPM has told them.
struct Known {
    identity: Identity,
    /// When the TPM is asked again for certificates that it failed to tell.
    ask_again: Option<Instant>,
}

impl Issuer {
    /// Makes an issuer for the TPM at `location`, with the event log in the given file if it exists.
    pub fn new(
        location: tpm::Location,
        event_log: Option<PathBuf>,
        machine: Arc<dyn Machine>,
    ) -> Issuer {
        Issuer {
            machine,
            location,
            event_log,
            identity: Mutex::default(),
        }
    }

    /// Makes an issuer for the TPM at `location` with the event log of this machine.
    pub fn of_this_machine(location: &tpm::Location, machine: Arc<dyn Machine>) -> Issuer {
        Issuer::new(location.clone(), Some(EVENT_LOG.into()), machine)
    }

    /// Returns the event log, or what `shorten` leaves of it: a validator does not need it.
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
        let mut tpm = opened.map_err(failed)?;
        let extra_data = extra_data(user_data, nonce);
        let instance_info = self.machine.instance_info(&mut tpm, &extra_data)?;
        let key_certificate = self.machine.key_certificate(&mut tpm)?;
        let tpm_nonce = tpm_nonce(instance_info.as_deref().unwrap_or_default(), &extra_data);
        let (ak_pub, quotes) = tpm
            .quotes(self.machine.key_source(), &tpm_nonce, banks)
            .map_err(failed)?;
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
        serde_json::to_vec(&document).map_err(|error| IssueError(error.to_string()))
    }
}

impl super::Issuer for Issuer {
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

    fn identity(&self) -> Result<Identity, IssueError> {
        if let Some(identity) = self.known_identity() {
            return Ok(identity);
        }
        let mut tpm = Tpm::open(&self.location).map_err(failed)?;
        let key = tpm
            .attestation_key(self.machine.key_source())
            .map_err(failed)?;
        let (endorsements, ask_again) = match tpm.endorsements() {
            Ok(endorsements) => (endorsements, None),
            // without certificates the machine can still prove itself to peers that do not demand them
            Err(error) => {
                log::warn!("{error}");
                (vec![], Some(Instant::now() + ASK_AGAIN))
            }
        };
        let identity = Identity { key, endorsements };
        *self.identity.lock().unwrap_or_else(PoisonError::into_inner) = Some(Known {
            identity: identity.clone(),
            ask_again,
        });
        Ok(identity)
    }

    fn known_identity(&self) -> Option<Identity> {
        let known = self.identity.lock().unwrap_or_else(PoisonError::into_inner);
        let known = known.as_ref()?;
        let is_due = known.ask_again.is_some_and(|at| at <= Instant::now());
        (!is_due).then(|| known.identity.clone())
    }

    fn prove(&self, request: &Request<'_>) -> Result<Vec<u8>, IssueError> {
        self.machine.prepare(&self.location)?;
        let open = match request.for_stranger {
            true => Tpm::open_for_stranger,
            false => Tpm::open,
        };
        let secret = match request.challenge {
            None => None,
            Some((kind, credential)) => {
                let mut tpm = open(&self.location).map_err(failed)?;
                Some(
                    tpm.activate(self.machine.key_source(), kind, credential)
                        .map_err(failed)?,
                )
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

fn failed(error: tpm::Error) -> IssueError {
    IssueError(error.to_string())
}

/// Returns the Name of the attestation key of this machine; creates the key if it does not exist.
pub fn key_name(location: &tpm::Location, source: KeySource) -> Result<KeyName, tpm::Error> {
    Tpm::open(location)?
        .attestation_key(source)
        .map(|public| KeyName::of(&public))
}

fn wire_quote(quote: tpm::Quote) -> Quote {
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

fn extra_data(user_data: &[u8], nonce: &[u8]) -> [u8; 32] {
    sha256(&[user_data, nonce])
}

fn tpm_nonce(instance_info: &[u8], extra_data: &[u8; 32]) -> [u8; 32] {
    sha256(&[instance_info, extra_data])
}

/// Validates documents against a policy.
pub struct Validator {
    policy: Arc<Policy>,
    endorser: Arc<dyn Endorser>,
}

impl Validator {
    /// Makes a validator that accepts documents that meet `policy`.
    pub fn new(policy: Arc<Policy>, endorser: Arc<dyn Endorser>) -> Validator {
        Validator { policy, endorser }
    }

    /// Judges a document. `certified` is the Name of the peer's key, if a root of the policy certifies that it is in a TPM.
    fn check(
        &self,
        document: &[u8],
        nonce: &[u8],
        certified: Option<&KeyName>,
    ) -> Result<Identified, String> {
        if document.len() > MAX_DOCUMENT {
            return Err(format!(
                "the document has {} bytes, expected at most {MAX_DOCUMENT}",
                document.len()
            ));
        }
        let document: Document = serde_json::from_slice(document).map_err(|error| {
            format!(
                "the document cannot be read: {}",
                printable(&error.to_string(), SHOWN_ERROR)
            )
        })?;
        if document.user_data.0.len() > MAX_USER_DATA {
            let len = document.user_data.0.len();
            return Err(format!(
                "the user data of the document has {len} bytes, expected at most {MAX_USER_DATA}"
            ));
        }
        let values = quoted_values(&document, nonce, Bank::Sha256)?;
        // whatever the policy says; evidence that is only shown to a person is not refused
        if !self.policy.without_words {
            check_bank(&values)?;
        }
        let log = &document.attestation.event_log.0;
        self.policy.check(&values, |index, measurement, got| {
            mismatch(index, measurement, got, log)
        })?;
        let key = KeyName::of(&document.attestation.ak_pub.0);
        let evidence = Evidence {
            key: &document.attestation.ak_pub.0,
            spki: Key::parse(&document.attestation.ak_pub.0)?.spki(),
            extra_data: extra_data(&document.user_data.0, nonce),
            instance_info: document.instance_info(),
            key_certificate: &document.attestation.ak_cert.0,
            pcrs: &values,
            event_log: &document.attestation.event_log.0,
            document: &document,
            nonce,
        };
        let platform = self.endorser.endorse(&evidence)?;
        let endorsed = platform.is_some() && self.endorser.endorses_keys();
        self.check_key(&key, certified, endorsed)?;
        let confirmed = platform
            .clone()
            .map(|claims| self.endorser.confirm(&evidence, claims));
        let (platform, endorsed) = match confirmed.transpose() {
            Ok(confirmed) => (confirmed, endorsed),
            Err(_) if self.policy.without_words => (platform, false),
            Err(why) => return Err(why),
        };
        Ok(Identified {
            user_data: document.user_data.0,
            machine: Some(key.digest().into()),
            stage: None,
            platform: platform.map(|claims| Arc::new(claims.printable())),
            is_endorsed: endorsed,
            cluster: values
                .get(&CLUSTER_ID_PCR)
                .and_then(|value| ClusterRegister::new(value)),
        })
    }

    /// Checks the attestation key against the policy. A key that a platform endorses needs no mention; a policy that names keys or
    /// roots demands one of them beside the endorsement.
    fn check_key(
        &self,
        key: &KeyName,
        certified: Option<&KeyName>,
        endorsed: bool,
    ) -> Result<(), String> {
        let has_roots = !self.policy.endorsement_roots().is_empty();
        let names_none = self.policy.keys().is_empty() && !has_roots;
        if self.policy.believes(key)
            || has_roots && certified == Some(key)
            || endorsed && names_none
        {
            return Ok(());
        }
        if has_roots {
            return Err(format!(
                "its attestation key is {key}, which is neither named by the policy (attestationKeys) nor proved to be in a TPM that \
                 a root of the policy certifies (endorsementRoots): only the strong form of attested TLS can prove it"
            ));
        }
        let none = match self.policy.keys().len() {
            0 => "and the policy names no key".into(),
            1 => "not the one that the policy names".into(),
            count => format!("none of the {count} that the policy names"),
        };
        Err(format!(
            "its attestation key is {key}, {none}: a program without a TPM could claim the same register values. If the \
             console of the machine shows this name, add the name to the policy"
        ))
    }
}

impl super::Validator for Validator {
    fn oid(&self) -> Oid {
        self.endorser.oid()
    }

    fn validate(&self, document: &[u8], nonce: &[u8]) -> Result<Vec<u8>, ValidateError> {
        self.identify(document, nonce)
            .map(|identified| identified.user_data)
    }

    fn identify(&self, document: &[u8], nonce: &[u8]) -> Result<Identified, ValidateError> {
        self.check(document, nonce, None)
            .map_err(|why| ValidateError(why.into()))
    }

    /// Refuses every key that the policy does not name, if the policy names roots: the crate `endorsement` verifies certificates, and
    /// not every program has it.
    fn challenge(
        &self,
        key: &[u8],
        _endorsements: &[Endorsement],
    ) -> Result<Option<Challenge>, ValidateError> {
        let needs_none =
            self.policy.endorsement_roots().is_empty() || self.policy.believes(&KeyName::of(key));
        match needs_none {
            true => Ok(None),
            false => Err(ValidateError(
                "the policy demands a certified attestation key (endorsementRoots), but this program does not verify certificates of \
                 TPMs: name the accepted keys (attestationKeys) instead"
                    .into(),
            )),
        }
    }

    fn challenges(&self) -> bool {
        !self.policy.endorsement_roots().is_empty()
    }

    fn identify_certified(
        &self,
        document: &[u8],
        nonce: &[u8],
        key: &KeyName,
    ) -> Result<Identified, ValidateError> {
        self.check(document, nonce, Some(key))
            .map_err(|why| ValidateError(why.into()))
    }

    fn requires_strong(&self) -> bool {
        self.policy.requires_strong()
    }

    fn believes_any_tpm(&self) -> bool {
        self.policy.believes_any_key() && !self.endorser.endorses_keys()
    }
}

/// Returns the PCRs of a bank in a document: only the values of the quote whose signature, nonce and digest were verified. Quotes
/// of other banks are ignored.
fn quoted_values(
    document: &Document,
    nonce: &[u8],
    bank: Bank,
) -> Result<BTreeMap<u32, Vec<u8>>, String> {
    let (name, length) = match bank {
        Bank::Sha384 => ("SHA-384", 48),
        _ => ("SHA-256", 32),
    };
    let attestation = &document.attestation;
    let quotes = attestation.quotes.iter();
    let of_bank: Vec<_> = quotes
        .filter(|quote| quote.pcrs.hash == bank as u16)
        .collect();
    let [quote] = of_bank[..] else {
        let count = of_bank.len();
        return Err(format!(
            "the document has {count} quotes of the {name} bank, expected one"
        ));
    };
    let key = Key::parse(&attestation.ak_pub.0)?;
    if !key.signed(&quote.quote.0, &quote.raw_sig.0) {
        return Err("the quote is not signed by the attestation key".into());
    }
    let attest = Attest::parse(&quote.quote.0)
        .ok_or("the data that the TPM signed is not a quote of one bank")?;
    if !attest.is_signed_by(&attestation.ak_pub.0) {
        return Err("the TPM has its attestation key under another Name than the document, or made it below another key".into());
    }
    let instance_info = document.instance_info();
    if attest.extra_data != tpm_nonce(instance_info, &extra_data(&document.user_data.0, nonce)) {
        return Err("the quote was made for another connection: its nonce does not match".into());
    }
    let values = quote
        .pcrs
        .by_number()
        .ok_or("the document names a PCR that does not exist")?;
    let values_in_order: Vec<&[u8]> = values.values().map(Vec::as_slice).collect();
    // each value must have its length: else bytes could move between values without a change of the concatenation
    if attest.bank != bank as u16
        || !attest.pcrs.iter().eq(values.keys())
        || values_in_order.iter().any(|value| value.len() != length)
        || attest.pcr_digest != key.digest(&values_in_order).as_ref()
    {
        return Err(
            "the register values in the document are not the values that the TPM signed".into(),
        );
    }
    Ok(values)
}

fn mismatch(index: u32, measurement: &Measurement, got: Option<&[u8]>, log: &[u8]) -> String {
    let expected = hex(&measurement.expected);
    match got {
        Some(got) => {
            let why = if index == CLUSTER_ID_PCR
                && measurement.expected.iter().all(|byte| *byte == 0)
            {
                "the machine has joined a cluster since it started: reboot it to attest again. If it belongs to none, its \
                 console names the unit of systemd that measured into this register"
                    .into()
            } else {
                event_log::explain(log, index, got, &measurement.expected)
            };
            format!("PCR {index}: expected {expected}, got {}; {why}", hex(got))
        }
        None => format!("PCR {index}: expected {expected}, but it was not quoted"),
    }
}

/// Returns the SHA-256 PCRs of this machine, which is at `stage`. The event log explains which values they had in the initramfs, or will
/// have in the booted system.
pub fn measure(location: &tpm::Location, stage: Stage) -> Result<Measured, tpm::Error> {
    let pcrs = Tpm::open(location)?.pcrs(Bank::Sha256)?;
    // the log is that of this machine's own TPM
    let log = match location {
        tpm::Location::Device(_) => std::fs::read(EVENT_LOG).unwrap_or_default(),
        tpm::Location::Swtpm(..) | tpm::Location::Tdx(_) => vec![],
    };
    let enforced = |expected: [u8; 32]| Measurement {
        expected: expected.into(),
        warn_only: false,
    };
    let values_at = |other: Stage| {
        let values = pcrs.iter().filter_map(|(index, value)| {
            let value = match other {
                present if present == stage => value.as_slice().try_into().ok(),
                Stage::Initramfs => event_log::value_in_initramfs(&log, *index, value),
                Stage::Booted => event_log::value_when_booted(&log, *index, value),
            };
            Some((*index, enforced(value?)))
        });
        values.collect()
    };
    Ok(Measured {
        booted: values_at(Stage::Booted),
        initramfs: values_at(Stage::Initramfs),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonces_match_the_vectors_of_the_old_system() {
        let nonce: Vec<u8> = (0x20..0x40).collect();
        // SHA-256 of the public key that is the generator of P-256
        let spki = [
            0x5c, 0xd2, 0x52, 0xfb, 0x0c, 0xe8, 0x93, 0x24, 0x36, 0xfa, 0xf8, 0xcc, 0xd1, 0x04,
            0x09, 0x81, 0xb8, 0x9e, 0xe4, 0xad, 0x6b, 0x9f, 0xe9, 0xe2, 0xa2, 0xb7, 0xe7, 0x1a,
            0xac, 0xb2, 0x7c, 0xd3,
        ];
        for (instance_info, user_data, nonce, expected) in [
            (
                "",
                &spki[..],
                &nonce[..],
                "8c0b07128823fb38eba3f5436d086cc51b286743a37cb05f3cc69b92b9aeeea3",
            ),
            (
                "unit-test",
                &spki,
                &nonce,
                "d7cfb6815058cb8c8117e9443834e995f5aac9fa2155c97f9147488ea97f5ec3",
            ),
            (
                "",
                b"VerifyService",
                &nonce,
                "d6b14a5151a085d6c0431837d22b66f680349331256a120274fbbca3a57e53d2",
            ),
            (
                "unit-test",
                b"Constellation",
                &[1, 2, 3, 4],
                "bf0af9ec39350d01ea3017136c8ec47a14498bfdbe92a37d949c2c4fb61adcf7",
            ),
        ] {
            assert_eq!(
                hex(&tpm_nonce(
                    instance_info.as_bytes(),
                    &extra_data(user_data, nonce)
                )),
                expected
            );
        }
    }
}
