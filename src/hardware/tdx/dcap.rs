//! Verification of TDX quotes with Intel's collateral, as Intel's quote verification library does
//! it (DCAP).
//!
//! ```text
//! Intel SGX Root CA ─► PCK CA ─► PCK ─► report of the quoting enclave ─► attestation key ─► quote
//!                   └► TCB signing ─► TCB information (levels of the platform), identity of the quoting enclave
//! ```
//!
//! Collateral is valid for at most 30 days, so a verifier fetches it, or the machine adds it to its
//! evidence. It is public and signed: its sender can only choose an older one. The policy has a
//! minimum for its evaluation number and a maximum for its age.

use std::time::Duration;

use base::text;
use ring::digest::{SHA256, digest};
use ring::signature::{ECDSA_P256_SHA256_FIXED, UnparsedPublicKey};
use roots::chain;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, SignatureVerificationAlgorithm, TrustAnchor, UnixTime};
use serde::Deserialize;
pub use tee::collateral::{Hex, TdxCollateral};
use webpki::{
    CertRevocationList, EndEntityCert, ExpirationPolicy, KeyUsage, RevocationOptionsBuilder,
};

use super::certificate::{Certificate, Role};
use super::quote::{Body, Enclave, TdxQuote};
use super::tcb::{Identity, Judged, PckPlatform, TcbInfo, TcbStatus, earliest, merged};
use crate::list::List;
use crate::refusal::{Kind, Refusal};

/// All signatures are ECDSA P-256 with SHA-256.
const SIGNATURES: &[&dyn SignatureVerificationAlgorithm] = &[webpki::ring::ECDSA_P256_SHA256];
/// The first bytes of a SubjectPublicKeyInfo with an uncompressed point of P-256.
const P256: &[u8] = &[
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
/// The offset of REPORTDATA in the report of an enclave, which ends with it.
const REPORT_DATA: usize = 320;
/// Maximum size of the parts of collateral in bytes: genuine TCB information has about 20 KiB.
const MAX_PART: usize = 256 << 10;

/// A genuine quote, and what is proved in addition to its body. Only [`Verifier::verify`] makes it,
/// so the verdict on one quote cannot be used for another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified<'q> {
    quote: TdxQuote<'q>,
    root: &'static str,
    status: TcbStatus,
    status_if_updated: TcbStatus,
    out_of_date_for: Option<Duration>,
    advisories: Vec<String>,
    lacks: Vec<String>,
    evaluation: u32,
    platform: PckPlatform,
    collateral_issued: u64,
    collateral_age: Duration,
}

impl<'q> Verified<'q> {
    /// Returns the quote.
    pub fn quote(&self) -> &TdxQuote<'q> {
        &self.quote
    }

    /// Returns the name of the root.
    pub fn root(&self) -> &'static str {
        self.root
    }

    /// Returns how the platform compares with Intel's reference levels. It is not
    /// [`TcbStatus::Revoked`].
    pub fn status(&self) -> TcbStatus {
        self.status
    }

    /// Returns the status after Intel's updates; the same if there are none.
    pub fn status_if_updated(&self) -> TcbStatus {
        self.status_if_updated
    }

    /// Returns the time since the date of the TCB level of the platform, or of the earliest of its
    /// parts that are out of date; `None` if none is.
    pub fn out_of_date_for(&self) -> Option<Duration> {
        self.out_of_date_for
    }

    /// Returns Intel's names for the problems of a platform that is not up to date.
    pub fn advisories(&self) -> &[String] {
        &self.advisories
    }

    /// Returns the parts of the platform that are too old; empty if it is up to date.
    pub fn lacks(&self) -> &[String] {
        &self.lacks
    }

    /// Returns the evaluation number that both the TCB levels and the enclave identity have.
    pub fn evaluation(&self) -> u32 {
        self.evaluation
    }

    /// Returns the platform.
    pub fn platform(&self) -> &PckPlatform {
        &self.platform
    }

    /// Returns when the oldest part of the collateral was issued, in seconds since 1970, as
    /// [`Verified::collateral_age`].
    pub fn collateral_issued(&self) -> u64 {
        self.collateral_issued
    }

    /// Returns the age of the oldest part of the collateral, except the list of revoked CAs: Intel
    /// issues that list once a year.
    pub fn collateral_age(&self) -> Duration {
        self.collateral_age
    }
}

/// Verifies quotes under one root.
#[derive(Clone)]
pub struct Verifier {
    name: &'static str,
    root: TrustAnchor<'static>,
    /// The encoded serial number of the root.
    serial: Vec<u8>,
    /// The name of the root: the content of the SEQUENCE.
    subject: Vec<u8>,
}

impl Verifier {
    /// Verifies under Intel's root.
    pub fn of_intel() -> Result<Verifier, Refusal> {
        let root = &roots::INTEL_SGX.root;
        Verifier::under(root.subject, root.der)
    }

    /// Makes a verifier with the root in this certificate (DER); claims show this name.
    pub fn under(name: &'static str, root: &[u8]) -> Result<Verifier, Refusal> {
        let unreadable = |why| Kind::Malformed.because(format!("the root cannot be read{why}"));
        let certificate = Certificate::parse(root).ok_or_else(|| unreadable(String::new()))?;
        let (serial, subject) = (certificate.serial.into(), certificate.subject.into());
        let root = CertificateDer::from(root);
        let root = webpki::anchor_from_trusted_cert(&root);
        let root = root.map_err(|error| unreadable(format!(": {}", chain::in_words(&error))))?;
        Ok(Verifier {
            name,
            root: root.to_owned(),
            serial,
            subject,
        })
    }

    /// Returns the platform of a quote whose signatures lead to the root at the time `now`. It
    /// needs no collateral, so it does not detect revoked or outdated platforms. A program that
    /// fetches collateral for a stranger's quote calls this first: anybody can write a quote that
    /// names a platform, but only platforms can sign one.
    pub fn signed_platform(&self, quote: &TdxQuote<'_>, now: u64) -> Result<PckPlatform, Refusal> {
        let (key, platform) = self.chain(None, now).pck(quote.pck_chain)?;
        check_signatures(quote, &key)?;
        Ok(platform)
    }

    fn chain<'b>(&'b self, lists: Option<&'b Lists<'b>>, now: u64) -> Chain<'b> {
        Chain {
            verifier: self,
            lists,
            time: UnixTime::since_unix_epoch(Duration::from_secs(now)),
        }
    }

    /// Verifies a quote at the time `now`, in seconds since 1970. A quote of a platform whose
    /// status is `Revoked` is refused. The caller judges other statuses, the age of the collateral,
    /// and the content of the quote.
    pub fn verify<'q>(
        &self,
        quote: TdxQuote<'q>,
        collateral: &TdxCollateral,
        now: u64,
    ) -> Result<Verified<'q>, Refusal> {
        let lists = Lists::parse(collateral, now)?;
        let chain = self.chain(Some(&lists), now);
        let (info, identity) = ("TCB information", "QE identity");
        let chains = [
            &collateral.tcb_info_issuer_chain,
            &collateral.qe_identity_issuer_chain,
        ];
        let signer = chain.signer(info, chains[0])?;
        // Intel signs both with the same key today
        let other = if chains[0] == chains[1] {
            None
        } else {
            Some(chain.signer(identity, chains[1])?)
        };
        let text = &collateral.tcb_info;
        check_text(info, text, &collateral.tcb_info_signature, &signer)?;
        let info: TcbInfo = read(info, text)?;
        let text = &collateral.qe_identity;
        let signer = other.as_ref().unwrap_or(&signer);
        check_text(identity, text, &collateral.qe_identity_signature, signer)?;
        let identity: Identity = read(identity, text)?;
        let issued = [
            info.check_dates(now)?,
            identity.check_dates(now)?,
            lists.pck.issued,
        ];
        let collateral_issued = issued.into_iter().min().unwrap_or(now);
        let (key, platform) = chain.pck(quote.pck_chain)?;
        check_signatures(&quote, &key)?;

        let enclave = Enclave::parse(quote.qe_report).ok_or_else(|| {
            Kind::Malformed.because("the report of the quoting enclave is too short")
        })?;
        let enclave_level = identity.level_of(&enclave)?;
        let levels = levels(&info, &platform, &quote.body)?;
        let judged = || levels.iter().chain([&enclave_level]);
        let advisories = each_once(judged().flat_map(|level| &level.advisories));
        let lacks = each_once(judged().flat_map(|level| &level.lacks));
        let since = judged().fold(None, |since, level| {
            earliest(since, level.out_of_date_since)
        });
        let of_enclave = &enclave_level;
        let status_if_updated = status(&levels, of_enclave, |level| level.if_updated)?;
        let status = status(&levels, of_enclave, |level| level.status)?;
        if status == TcbStatus::Revoked {
            let text = format!(
                "the TCB status of the platform is {status}{}: no policy accepts it",
                in_brackets(&advisories)
            );
            return Err(Kind::Revoked.because(text).of("tcbStatuses"));
        }
        Ok(Verified {
            quote,
            root: self.name,
            status,
            status_if_updated,
            out_of_date_for: since
                .filter(|_| status.is_out_of_date())
                .map(|since| Duration::from_secs(now.saturating_sub(since))),
            advisories,
            lacks,
            evaluation: info.evaluation.min(identity.evaluation),
            platform,
            collateral_issued,
            collateral_age: Duration::from_secs(now - collateral_issued),
        })
    }
}

/// Checks that the platform's key signed the report of the quoting enclave, that this report names
/// the attestation key, and that the attestation key signed the quote.
fn check_signatures(quote: &TdxQuote<'_>, key: &[u8]) -> Result<(), Refusal> {
    if !verify(key, quote.qe_report, quote.qe_signature) {
        let text = "the report of the quoting enclave is not signed by the platform's key";
        return Err(Kind::Signature.because(text));
    }
    let named = digest(
        &SHA256,
        &[&quote.attestation_key[..], quote.authentication].concat(),
    );
    let (first, last) = quote.qe_report[REPORT_DATA..].split_at(32);
    if first != named.as_ref() || last != [0; 32] {
        let text = "the attestation key is not the one that the quoting enclave names";
        return Err(Kind::Binding.because(text));
    }
    let attestation_key = [&[4][..], quote.attestation_key].concat();
    if verify(&attestation_key, quote.signed, quote.signature) {
        Ok(())
    } else {
        Err(Kind::Signature.because("the quote is not signed by its attestation key"))
    }
}

/// Removes repeated texts.
fn each_once<'a>(texts: impl Iterator<Item = &'a String>) -> Vec<String> {
    let mut all = vec![];
    for text in texts {
        if !all.contains(text) {
            all.push(text.clone());
        }
    }
    all
}

/// Writes the names of advisories after a status.
pub(super) fn in_brackets(advisories: &[String]) -> String {
    if advisories.is_empty() {
        String::new()
    } else {
        format!(" ({})", advisories.join(", "))
    }
}

/// Returns the platform in a quote: a program that fetches collateral needs its FMSPC. Nothing in
/// the quote is verified.
pub fn named_platform(quote: &TdxQuote<'_>) -> Result<PckPlatform, Refusal> {
    let chain = certificates("PCK", quote.pck_chain)?;
    platform(&chain[0])
}

/// Returns the platform in a PCK certificate.
fn platform(pck: &[u8]) -> Result<PckPlatform, Refusal> {
    let platform = Certificate::parse(pck).and_then(|pck| pck.platform());
    let unnamed = "the PCK certificate does not name its platform";
    platform.ok_or_else(|| Kind::Malformed.because(unnamed))
}

/// Returns the level at the start of the machine, and the present level if the module was updated
/// since.
fn levels(info: &TcbInfo, platform: &PckPlatform, body: &Body) -> Result<Vec<Judged>, Refusal> {
    info.check_platform(platform)?;
    info.check_module(body)?;
    let svns = [
        Some(&body.tee_tcb_svn),
        body.td15.as_ref().map(|td15| &td15.tee_tcb_svn2),
    ];
    svns.into_iter()
        .flatten()
        .map(|svn| info.level_of(platform, svn))
        .collect()
}

/// Returns the status of a machine: of its platform at its start and now, together with the quoting enclave. `of` chooses the status
/// of a level.
fn status(
    levels: &[Judged],
    enclave: &Judged,
    of: fn(&Judged) -> TcbStatus,
) -> Result<TcbStatus, Refusal> {
    let mut statuses = levels.iter().map(|level| of(level).with_part(of(enclave)));
    let launched = statuses.next().ok_or_else(|| {
        Kind::Malformed.because("the collateral gives no TCB level for the quote")
    })?;
    Ok(merged(launched, statuses.next()))
}

/// The lists of revoked certificates.
struct Lists<'a> {
    root: List<'a>,
    pck: List<'a>,
    /// Both lists in the form of the library for lookups.
    both: [CertRevocationList<'a>; 2],
}

impl<'a> Lists<'a> {
    /// Reads the lists, and checks that their validity has begun. The library checks their expiry
    /// and signatures.
    fn parse(collateral: &'a TdxCollateral, now: u64) -> Result<Lists<'a>, Refusal> {
        let (root, first) = List::read(&collateral.root_ca_crl.0, "root CRL", now)?;
        let (pck, second) = List::read(&collateral.pck_crl.0, "PCK CRL", now)?;
        let both = [first, second];
        Ok(Lists { root, pck, both })
    }
}

/// The root, and the lists of revoked certificates.
struct Chain<'a> {
    verifier: &'a Verifier,
    /// The lists of revoked certificates; `None` before there is collateral.
    lists: Option<&'a Lists<'a>>,
    time: UnixTime,
}

impl Chain<'_> {
    /// Verifies a certificate for a role, and returns its public key as an uncompressed point.
    fn key(
        &self,
        name: &str,
        role: &Role,
        certificate: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
    ) -> Result<Vec<u8>, Refusal> {
        let parsed = Certificate::parse(certificate);
        let certificate = EndEntityCert::try_from(certificate).map_err(|error| {
            let why = chain::in_words(&error);
            Kind::Malformed.because(format!("the {name} certificate cannot be read: {why}"))
        })?;
        let crls: Vec<_> = self.lists.iter().flat_map(|lists| &lists.both).collect();
        let revocation = self.lists.map(|_| {
            RevocationOptionsBuilder::new(&crls)
                .map(|options| options.with_expiration_policy(ExpirationPolicy::Enforce))
                .map(RevocationOptionsBuilder::build)
        });
        let revocation = revocation.transpose();
        let revocation =
            revocation.map_err(|_| Kind::Collateral.because("the collateral has no CRL"))?;
        let path = certificate
            .verify_for_usage(
                SIGNATURES,
                std::slice::from_ref(&self.verifier.root),
                between,
                self.time,
                // Intel's certificates have no extended key usage
                KeyUsage::client_auth(),
                revocation,
                None,
            )
            .map_err(|error| {
                let text = format!("the {name} certificate: {}", in_words(&error));
                roots::chain::kind(&error).because(text)
            })?;
        let unfit = |text| Kind::Certificate.because(text);
        // Intel's own signer is directly under the root, a PCK under a CA: one cannot serve as the
        // other
        if path.intermediate_certificates().count() != between.len() {
            let text = format!("the {name} certificate is at a wrong place in the chain");
            return Err(unfit(text));
        }
        let parsed = parsed.ok_or_else(|| {
            Kind::Malformed.because(format!("the {name} certificate cannot be read"))
        })?;
        role.check(name, &parsed)?;
        if let Some(lists) = self.lists {
            self.check_root(lists)?;
        }
        let info = certificate.subject_public_key_info();
        match info.as_ref().strip_prefix(P256) {
            Some(point) if point.len() == 65 => Ok(point.into()),
            _ => Err(unfit(format!(
                "the key of the {name} certificate is not of P-256"
            ))),
        }
    }

    /// Checks that the root has not revoked itself. The library has verified the list under the
    /// root, because each chain ends there.
    fn check_root(&self, lists: &Lists<'_>) -> Result<(), Refusal> {
        let root = self.verifier;
        if lists.root.issuer != root.subject {
            return Err(Kind::Binding.because("the root CRL was not issued by the root"));
        }
        match lists.both[0].find_serial(&root.serial) {
            Ok(None) => Ok(()),
            Ok(Some(_)) => {
                let text = "the root is revoked: it is on its own list (root CRL)";
                Err(Kind::Revoked.because(text))
            }
            Err(_) => Err(Kind::Malformed.because("the root CRL cannot be read")),
        }
    }

    /// Returns the key that signs Intel's JSON texts.
    fn signer(&self, name: &str, issuer: &str) -> Result<Vec<u8>, Refusal> {
        let chain = certificates(name, issuer.as_bytes())?;
        let name = format!("{name} signer's");
        self.key(&name, &Role::TCB_SIGNING, &chain[0], &[])
    }

    /// Returns the key of a PCK certificate, and the platform in it.
    fn pck(&self, pem: &[u8]) -> Result<(Vec<u8>, PckPlatform), Refusal> {
        let chain = certificates("PCK", pem)?;
        let [pck, authority, ..] = &chain[..] else {
            let text = "the quote has no certificate of the PCK's authority";
            return Err(Kind::Malformed.because(text));
        };
        let key = self.key("PCK", &Role::PCK, pck, std::slice::from_ref(authority))?;
        let authority = Certificate::parse(authority)
            .ok_or_else(|| Kind::Malformed.because("the PCK's authority cannot be read"))?;
        Role::PCK_AUTHORITY.check("PCK authority's", &authority)?;
        // the age of this list is judged, so it must be the list that was used for the PCK
        if self
            .lists
            .is_some_and(|lists| lists.pck.issuer != authority.subject)
        {
            let text = "the PCK CRL was not issued by the PCK's authority";
            return Err(Kind::Binding.because(text));
        }
        Ok((key, platform(pck)?))
    }
}

/// Reads certificates in PEM: at least one, at most four.
fn certificates(name: &str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, Refusal> {
    let wrong = |why| Kind::Malformed.because(format!("the chain of the {name} {why}"));
    if pem.len() > MAX_PART {
        let len = pem.len();
        return Err(wrong(format!(
            "has {len} bytes, expected at most {MAX_PART}"
        )));
    }
    // a quoting service may append a NUL to the text
    let pem = pem.strip_suffix(&[0]).unwrap_or(pem);
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).take(5).collect();
    let certificates = certificates.map_err(|_| wrong("is not PEM".into()))?;
    match certificates.len() {
        1..=4 => Ok(certificates),
        count => Err(wrong(format!("has {count} certificates, expected 1 to 4"))),
    }
}

fn read<'a, T: Deserialize<'a>>(name: &str, text: &'a str) -> Result<T, Refusal> {
    /// The member that both have for SGX and for TDX.
    #[derive(Deserialize)]
    struct Of {
        id: String,
    }

    serde_json::from_str(text).map_err(|error| {
        let of = serde_json::from_str::<Of>(text).map_or(String::new(), |it| it.id);
        let why = match &*of {
            "SGX" | "QE" => "it is that of SGX, expected that of TDX".into(),
            _ => text::of_error(error),
        };
        Kind::Malformed.because(format!("the {name} cannot be read: {why}"))
    })
}

/// Verifies that this key signed a text.
fn check_text(name: &str, text: &str, signature: &Hex, key: &[u8]) -> Result<(), Refusal> {
    if text.len() > MAX_PART {
        let len = text.len();
        let text = format!("the {name} has {len} bytes, expected at most {MAX_PART}");
        return Err(Kind::Malformed.because(text));
    }
    if verify(key, text.as_bytes(), &signature.0) {
        Ok(())
    } else {
        Err(Kind::Signature.because(format!("the signature of the {name} is wrong")))
    }
}

/// Returns whether this is an ECDSA signature r ‖ s of the key.
fn verify(key: &[u8], text: &[u8], signature: &[u8]) -> bool {
    let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, key);
    key.verify(text, signature).is_ok()
}

/// Returns a clause that says why Intel's certificate is refused.
fn in_words(error: &webpki::Error) -> String {
    use webpki::Error::*;
    match error {
        CertRevoked => "it, or its authority, is revoked".into(),
        CertExpired { .. } => "it, or its authority, has expired".into(),
        CertNotValidYet { .. } => "it is not valid yet: is the clock of this machine right?".into(),
        UnknownIssuer | InvalidSignatureForPublicKey => "it does not lead to the root".into(),
        error => chain::in_words(error),
    }
}
