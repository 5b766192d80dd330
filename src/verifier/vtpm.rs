//! The validator that all variants with a TPM share. `attest` describes the document and makes it.
//!
//! The file of each variant has the difference: the evidence that endorses the attestation key.
//! [`PlatformVerifier`] judges it.

use std::collections::BTreeMap;
use std::sync::Arc;

use rustls::pki_types::UnixTime;
use serde::de::DeserializeOwned;

use attest::vtpm::{EVENT_LOG, extra_data, tpm_nonce};
pub use attest::vtpm::{TpmIssuer, VariantData};
use hardware::json::Number;

use super::document::{Document, Pcrs};
use super::judged::Measured;
use super::policy::tpm::TpmClaims;
use super::quote::{Attest, Key, Signed};
use super::refusal::Kind;
use super::secure_boot::{self, SecureBoot};
use super::{
    ClusterRegister, CredentialChallenge, Evidence, Identified, KeyName, MachineIdentity,
    Measurement, Oid, PlatformClaims, Policy, Properties, Refusal, Stage, event_log, hex, json,
    role_of,
};
use tpm::{Bank, CLUSTER_ID_PCR, Tpm};

/// Maximum size of the user data in bytes; attested TLS uses 32 bytes.
const MAX_USER_DATA: usize = 1024;

/// Judges the evidence that endorses a machine's attestation key.
pub trait PlatformVerifier: Send + Sync {
    /// Returns the OID of the variant.
    fn oid(&self) -> Oid;
    /// Returns whether evidence that [`PlatformVerifier::verify`] accepts proves that the attestation
    /// key is in the TPM that measured the machine. If not, anybody with such a platform can get a
    /// self-made key endorsed and claim any register values.
    fn endorses_keys(&self) -> bool;
    /// Returns what the evidence proves about the platform of the machine; `None` if nothing
    /// endorses the attestation key. The quote, its nonce and the registers are already verified.
    /// An error says why the evidence is refused.
    fn verify(&self, quoted: &Quoted<'_>) -> Result<Option<PlatformClaims>, Refusal>;
    /// Asks the cloud for claims that the evidence does not contain. It comes last: only a machine
    /// that passed all other checks causes a request.
    fn confirm(
        &self,
        _quoted: &Quoted<'_>,
        platform: PlatformClaims,
    ) -> Result<PlatformClaims, Refusal> {
        Ok(platform)
    }
}

/// A document whose quote is verified.
pub struct Quoted<'a> {
    /// The attestation key (TPMT_PUBLIC).
    pub key: &'a [u8],
    /// The attestation key as certificates contain it: SubjectPublicKeyInfo, DER.
    pub spki: Vec<u8>,
    /// SHA-256 over user data and nonce.
    pub extra_data: [u8; 32],
    /// The instance info, which the quote covers.
    pub instance_info: &'a [u8],
    /// The certificate of the attestation key (DER), signed only by its issuer; empty if the
    /// document has none.
    pub key_certificate: &'a [u8],
    /// The quoted SHA-256 PCRs.
    pub pcrs: &'a BTreeMap<u32, Vec<u8>>,
    /// The event log, which is not signed.
    pub event_log: &'a [u8],
    /// The time at which the document is judged.
    pub now: UnixTime,
    document: &'a Document,
    nonce: &'a [u8],
}

impl Quoted<'_> {
    /// Reads the instance info, which is JSON in most variants.
    pub fn info<T: DeserializeOwned>(&self) -> Result<T, Refusal> {
        json::read("instance info", self.instance_info)
    }

    /// Returns PCR 0, into which firmware measures itself.
    pub fn pcr_0(&self) -> Result<&[u8], Refusal> {
        let value = self.pcrs.get(&0).map(Vec::as_slice);
        value.ok_or_else(|| Kind::Unproven.because("PCR 0 was not quoted").of("PCR 0"))
    }

    /// Returns the quoted PCRs of another bank; `None` if the document has no quote of it.
    pub fn pcrs_of(&self, bank: Bank) -> Result<Option<BTreeMap<u32, Vec<u8>>>, Refusal> {
        let quotes = &self.document.attestation.quotes;
        if quotes.iter().any(|quote| quote.pcrs.hash == bank as u16) {
            let quote = verified_quote(self.document, self.nonce, bank)?;
            Ok(Some(quote.pcrs))
        } else {
            Ok(None)
        }
    }
}

/// Validates documents against a policy.
pub struct VtpmValidator {
    policy: Arc<Policy>,
    verifier: Arc<dyn PlatformVerifier>,
}

impl VtpmValidator {
    /// Makes a validator that accepts documents that meet `policy`.
    pub fn new(policy: Arc<Policy>, verifier: Arc<dyn PlatformVerifier>) -> VtpmValidator {
        VtpmValidator { policy, verifier }
    }

    /// Judges evidence. A refusal of what the machine has signed for this connection names the machine. In the old form of
    /// attested TLS it names none, and neither does one of a document that may have been passed on.
    fn check(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        let document: Document = json::document(evidence.document)?;
        if document.user_data.0.len() > MAX_USER_DATA {
            let len = document.user_data.0.len();
            return Err(Kind::Malformed.because(format!(
                "the user data of the document has {len} bytes, expected at most {MAX_USER_DATA}"
            )));
        }
        let quote = verified_quote(&document, evidence.nonce, Bank::Sha256)?;
        let is_of_peer = evidence.session.is_some_and(|session| {
            role_of(&document.user_data.0, session.digest, session.secret).is_some()
        });
        let key = KeyName::of(&document.attestation.ak_pub.0);
        let judged = self.check_quoted(&document, evidence, &key, &quote);
        judged.map_err(|refusal| {
            if is_of_peer {
                refusal.by(key.digest().into())
            } else {
                refusal
            }
        })
    }

    /// Judges a document with this quote, which its key has signed.
    fn check_quoted(
        &self,
        document: &Document,
        evidence: &Evidence<'_>,
        key: &KeyName,
        quote: &VerifiedQuote,
    ) -> Result<Identified, Refusal> {
        let (nonce, values) = (evidence.nonce, &quote.pcrs);
        // evidence that is only shown to a person is never refused, whatever the policy says
        if !self.policy.without_cloud_statements {
            check_bank(values)?;
        }
        let log = &document.attestation.event_log.0;
        let image = self.policy.check(values, |index, measurement, got| {
            mismatch(index, measurement, got, log)
        })?;
        if let Some(required) = self.policy.secure_boot() {
            let pcr_7 = values.get(&secure_boot::PCR).map(Vec::as_slice);
            required.judge(&SecureBoot::read(log, pcr_7)?)?;
        }
        let quoted = Quoted {
            key: &document.attestation.ak_pub.0,
            spki: key_of(document)?.spki(),
            extra_data: extra_data(&document.user_data.0, nonce),
            instance_info: instance_info(document),
            key_certificate: &document.attestation.ak_cert.0,
            pcrs: values,
            event_log: &document.attestation.event_log.0,
            now: evidence.now,
            document,
            nonce,
        };
        let platform = self.verifier.verify(&quoted)?;
        let endorsed = platform.is_some() && self.verifier.endorses_keys();
        let certified = evidence.certified.filter(|it| it.name == *key);
        self.check_key(key, certified.is_some(), endorsed)?;
        let tpm = certified.and_then(|it| it.tpm.as_ref());
        self.policy.tpm().judge(tpm, quote.firmware)?;
        let confirmed = platform
            .clone()
            .map(|claims| self.verifier.confirm(&quoted, claims));
        let (platform, endorsed) = match confirmed.transpose() {
            Ok(confirmed) => (confirmed, endorsed),
            Err(_) if self.policy.without_cloud_statements => (platform, false),
            Err(why) => return Err(why),
        };
        Ok(Identified {
            user_data: document.user_data.0.clone(),
            machine: Some(key.digest().into()),
            stage: None,
            image: Some(image.id().clone()),
            platform: platform.map(|claims| Arc::new(hardware::claims::printable(claims))),
            is_endorsed: endorsed,
            tpm: tpm.map(|tpm| {
                Arc::new(TpmClaims {
                    vendor: tpm.vendor,
                    model: tpm.name.clone(),
                    firmware: quote.firmware.map(Number),
                })
            }),
            cluster: values
                .get(&CLUSTER_ID_PCR)
                .and_then(|value| ClusterRegister::new(value)),
        })
    }

    /// Checks the attestation key against the policy. A key that a platform endorses need not be
    /// listed; but if the policy lists keys or roots, it requires both.
    fn check_key(&self, key: &KeyName, is_certified: bool, endorsed: bool) -> Result<(), Refusal> {
        let has_roots = !self.policy.endorsement_roots().is_empty();
        let names_none = self.policy.keys().is_empty() && !has_roots;
        if self.policy.believes(key) || has_roots && is_certified || endorsed && names_none {
            return Ok(());
        }
        let refused = |text| Err(Kind::Machine.because(text).of("attestationKeys").got(key));
        if has_roots {
            return refused(format!(
                "its attestation key is {key}: the policy does not name it (attestationKeys), and no root of the policy certifies its TPM \
                 (endorsementRoots), which only the strong form of attested TLS can prove"
            ));
        }
        refused(format!(
            "its attestation key is {key}, {}: a program without a TPM could claim the same register values. If the \
             console of the machine shows this name, add the name to the policy",
            self.policy.names_others()
        ))
    }
}

impl super::Validator for VtpmValidator {
    fn properties(&self) -> Properties {
        Properties {
            oid: self.verifier.oid(),
            challenges: !self.policy.endorsement_roots().is_empty(),
            takes_collateral: false,
            requires_strong: self.policy.requires_strong(),
            believes_any_tpm: self.policy.believes_any_key() && !self.verifier.endorses_keys(),
        }
    }

    /// If the policy names roots, refuses every key that it does not list, and with requirements for
    /// TPMs these too: the crate `endorsement` verifies certificates, and not every program has it.
    fn challenge(&self, peer: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
        let needs_none = self.policy.endorsement_roots().is_empty()
            || self.policy.tpm().is_empty() && self.policy.believes(&KeyName::of(&peer.key));
        if needs_none {
            Ok(None)
        } else {
            Err(Kind::Machine.because(
            "the policy requires a certified attestation key (endorsementRoots), but this program does not verify certificates of \
             TPMs: name the accepted keys (attestationKeys) instead",
        ))
        }
    }

    fn judge(&self, evidence: &crate::Evidence<'_>) -> Result<Identified, Refusal> {
        self.check(evidence)
    }

    fn of_connection(&self) -> Option<Arc<dyn super::Validator>> {
        None
    }
}

/// Returns the instance info, which the nonce of the quote includes.
fn instance_info(document: &Document) -> &[u8] {
    document.instance_info.as_ref().map_or(&[], |info| &info.0)
}

fn key_of(document: &Document) -> Result<Key<'_>, Refusal> {
    Key::parse(&document.attestation.ak_pub.0).map_err(|why| Kind::Malformed.because(why))
}

/// A quote whose signature, nonce and digest were verified.
struct VerifiedQuote {
    /// The quoted values.
    pcrs: BTreeMap<u32, Vec<u8>>,
    /// The version of the TPM's firmware, if the quote shows it.
    firmware: Option<u64>,
}

/// Returns the verified quote of a bank in a document. Quotes of other banks are ignored.
fn verified_quote(document: &Document, nonce: &[u8], bank: Bank) -> Result<VerifiedQuote, Refusal> {
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
        return Err(Kind::Malformed.because(format!(
            "the document has {count} quotes of the {name} bank, expected one"
        )));
    };
    let key = key_of(document)?;
    if !key.signed(&quote.quote.0, &quote.raw_sig.0) {
        return Err(Kind::Signature.because("the quote is not signed by the attestation key"));
    }
    let attest = Attest::parse(&quote.quote.0).ok_or_else(|| {
        Kind::Malformed.because("the data that the TPM signed is not a quote of one bank")
    })?;
    let Some(hierarchy) = attest.hierarchy_of(&attestation.ak_pub.0) else {
        return Err(Kind::Binding.because("the quote's signer is not the document's attestation key as a primary key (its Qualified Name \
            differs)"));
    };
    if attest.extra_data
        != tpm_nonce(
            instance_info(document),
            &extra_data(&document.user_data.0, nonce),
        )
    {
        return Err(Kind::Nonce
            .because("the quote was made for another connection: its nonce does not match"));
    }
    let values = by_number(&quote.pcrs)
        .ok_or_else(|| Kind::Malformed.because("the document names a PCR that does not exist"))?;
    let values_in_order: Vec<&[u8]> = values.values().map(Vec::as_slice).collect();
    // each value must have its length: otherwise bytes could move between values without changing
    // the concatenation
    if attest.bank != bank as u16
        || !attest.pcrs.iter().eq(values.keys())
        || values_in_order.iter().any(|value| value.len() != length)
        || attest.pcr_digest != key.digest(&values_in_order).as_ref()
    {
        return Err(Kind::Signature.because(
            "the register values in the document are not the values that the TPM signed",
        ));
    }
    Ok(VerifiedQuote {
        pcrs: values,
        firmware: attest.firmware_version(hierarchy),
    })
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

/// Returns the SHA-256 PCRs of this machine, which is at `stage`. The event log explains which
/// values they had in the initramfs, or will have in the booted system.
pub fn measure(location: &tpm::Location, stage: Stage) -> Result<Measured, tpm::Error> {
    let pcrs = Tpm::open(location)?.pcrs(Bank::Sha256)?;
    // the log is that of this machine's own TPM
    let log = match location {
        tpm::Location::Device(_) => std::fs::read(EVENT_LOG).unwrap_or_default(),
        _ => vec![],
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

/// Returns the quoted values by number; `None` if a name is not the canonical decimal number of a
/// PCR.
fn by_number(quoted: &Pcrs) -> Option<BTreeMap<u32, Vec<u8>>> {
    let number = |name: &String| {
        let number = name.parse::<u32>().ok();
        number.filter(|n| *n < 32 && n.to_string() == *name)
    };
    let values = quoted.pcrs.iter();
    values
        .map(|(name, value)| Some((number(name)?, value.0.clone())))
        .collect()
}

/// Fails if the firmware did not extend this bank of PCRs: then only later programs determined its
/// values. Firmware extends PCR 4 with the programs that it starts, PCR 7 with the state of Secure
/// Boot, and both with a separator (TCG PC Client Platform Firmware Profile, EV_SEPARATOR). So
/// neither is zero, and they differ, even after systemd-pcrosseparator has extended both with the
/// same text.
pub fn check_bank(pcrs: &BTreeMap<u32, Vec<u8>>) -> Result<(), Refusal> {
    let is_set = |value: &&Vec<u8>| value.iter().any(|byte| *byte != 0);
    match [4, 7].map(|pcr| pcrs.get(&pcr).filter(is_set)) {
        [Some(started), Some(secure_boot)] if started != secure_boot => Ok(()),
        _ => Err(Kind::Measurement.because("the firmware of the machine does not extend the SHA-256 bank of its TPM (PCR 4 and 7 are zero, equal or missing), so the \
                  values of this bank prove nothing about what booted: activate SHA-256 in the settings of the firmware, or run \
                  `tpm2_pcrallocate sha1:none+sha256:all`, and reboot"
        )),
    }
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

    #[test]
    fn a_bank_that_the_firmware_does_not_extend_is_refused() {
        let bank =
            |four: u8, seven: u8| BTreeMap::from([(4, vec![four; 32]), (7, vec![seven; 32])]);
        assert_eq!(check_bank(&bank(1, 2)), Ok(()));
        // zero; extended by a program with the same text; only one of them
        for (four, seven) in [(0, 0), (3, 3), (1, 0), (0, 1)] {
            let why = check_bank(&bank(four, seven)).unwrap_err().to_string();
            assert!(why.contains("tpm2_pcrallocate"), "{why}");
        }
        // a machine cannot leave out a PCR that would reveal this
        for pcr in [4, 7] {
            let mut values = bank(1, 2);
            values.remove(&pcr);
            assert!(check_bank(&values).is_err(), "{pcr}");
        }
    }
}
