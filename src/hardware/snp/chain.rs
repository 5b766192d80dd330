//! The certificates from the key that signs reports up to AMD's root key (ARK).

use std::time::{Duration, UNIX_EPOCH};

use base::der::{BIT_STRING, DerReader, SEQUENCE};
use base::text;
use roots::chain::{authorities_certify, in_words};
use rustls_pki_types::{
    AlgorithmIdentifier, CertificateDer, InvalidSignature, SignatureVerificationAlgorithm,
    TrustAnchor, UnixTime, alg_id,
};
use webpki::ring::RSA_PSS_2048_8192_SHA384_LEGACY_KEY;
use webpki::{CertRevocationList, EndEntityCert, KeyUsage};

use super::certificate::ChipCertificate;
use super::report::ReportSigner;
use super::tcb::Product;
use crate::Unavailable;
use crate::list::List;
use crate::refusal::{Kind, Refusal};

/// The name of the list in messages.
const LIST: &str = "list of AMD's revoked certificates";

/// The identifier of RSASSA-PSS with SHA-384 as AMD writes it: with the field trailerField, which
/// DER omits because it has its default value. webpki compares identifiers byte for byte.
const AMD_PSS_SHA384: &[u8] = &[
    0x06, 0x09, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x0a, 0x30, 0x39, 0xa0, 0x0f, 0x30,
    0x0d, 0x06, 0x09, 0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x02, 0x02, 0x05, 0x00, 0xa1, 0x1c,
    0x30, 0x1a, 0x06, 0x09, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x08, 0x30, 0x0d, 0x06,
    0x09, 0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x02, 0x02, 0x05, 0x00, 0xa2, 0x03, 0x02, 0x01,
    0x30, 0xa3, 0x03, 0x02, 0x01, 0x01,
];

/// The algorithms of AMD's certificates: its own form, and the form of DER, which the VCEK of a
/// Turin has.
static ALGORITHMS: &[&dyn SignatureVerificationAlgorithm] =
    &[&AmdPss, RSA_PSS_2048_8192_SHA384_LEGACY_KEY];

/// The certificates with which a report is verified, each as DER.
#[derive(Debug, Clone, Copy)]
pub struct Chain<'a> {
    /// VCEK or VLEK.
    pub leaf: &'a [u8],
    /// ASK or ASVK.
    pub intermediate: &'a [u8],
    /// The root, which the caller trusts.
    pub root: &'a [u8],
    /// AMD's revocation list, which the root signed.
    pub revoked: Option<&'a [u8]>,
}

/// The data of AMD's key distribution service about a chip, each as DER; the cached form of a
/// [`Chain`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// The VCEK; absent if the report's signer is a VLEK, which only the cloud has.
    pub leaf: Option<Vec<u8>>,
    /// ASK or ASVK.
    pub intermediate: Vec<u8>,
    /// AMD's revocation list, or why it is missing.
    pub revoked: Result<Vec<u8>, Unavailable>,
}

/// Returns AMD's CA certificate between the root of a product and this key; it is built in.
pub fn authority(product: Product, signer: ReportSigner) -> Option<&'static [u8]> {
    let root = match product {
        Product::Milan => &roots::AMD_MILAN,
        Product::Genoa => &roots::AMD_GENOA,
        Product::Turin => &roots::AMD_TURIN,
    };
    let subject = authority_name(product, signer);
    let found = root.between.iter().find(|one| one.subject == subject);
    found.map(|one| one.der)
}

/// Returns the common name of the CA that certifies a key.
fn authority_name(product: Product, signer: ReportSigner) -> String {
    match signer {
        ReportSigner::Vcek => format!("SEV-{product}"),
        ReportSigner::Vlek => format!("SEV-VLEK-{product}"),
    }
}

impl Chain<'_> {
    /// Returns the certificate of the key that signs reports if it leads to the root and is valid
    /// at this time.
    pub fn verify(&self, signer: ReportSigner, now: UnixTime) -> Result<ChipCertificate, Refusal> {
        let certificate = ChipCertificate::parse(self.leaf)?;
        if certificate.signer != signer {
            return Err(Kind::Binding.because(format!(
                "the report is signed by a {signer}, but the certificate is that of a {}",
                certificate.signer
            )));
        }
        let product = certificate.product;
        let authority = authority_name(product, signer);
        if certificate.issuer != authority {
            return Err(Kind::Certificate.because(format!(
                "a {signer} of a {product} is issued by {authority}, not by {}",
                text::quoted(&certificate.issuer, 40)
            )));
        }
        self.verify_signatures(now).map_err(|refusal| {
            refusal.reworded(|why| format!("the {signer} of a {product}: {why}"))
        })?;
        Ok(certificate)
    }

    fn verify_signatures(&self, now: UnixTime) -> Result<(), Refusal> {
        let (leaf, root) = (
            CertificateDer::from(self.leaf),
            CertificateDer::from(self.root),
        );
        let anchor = anchor(&root)?;
        let leaf = certificate("certificate", &leaf)?;
        let intermediate = CertificateDer::from(self.intermediate);
        leaf.verify_for_usage(
            ALGORITHMS,
            std::slice::from_ref(&anchor),
            std::slice::from_ref(&intermediate),
            now,
            KeyUsage::client_auth(),
            None,
            Some(&authorities_certify),
        )
        .map_err(|error| {
            let why = in_words(&error);
            roots::chain::kind(&error).because(format!("it does not lead to the root: {why}"))
        })?;
        let Some(list) = self.revoked else {
            return Ok(());
        };
        let list = read_list(list, &anchor, now)?;
        let authority = certificate("authority's certificate", &intermediate)?;
        let has = |serial: &[u8]| match list.find_serial(serial) {
            Ok(found) => Ok(found.is_some()),
            Err(_) => Err(Kind::Malformed.because(format!("the {LIST} cannot be read"))),
        };
        if has(authority.serial())? {
            return Err(Kind::Revoked.because(format!(
                "the authority that issued it is revoked: the {LIST} names it"
            )));
        }
        if has(leaf.serial())? {
            let number = crate::hex(leaf.serial());
            return Err(Kind::Revoked.because(format!(
                "it is revoked: the {LIST} contains its number {number}"
            )));
        }
        Ok(())
    }
}

/// Reads the root, which the caller trusts.
fn anchor<'a>(root: &'a CertificateDer<'_>) -> Result<TrustAnchor<'a>, Refusal> {
    webpki::anchor_from_trusted_cert(root).map_err(|error| unreadable("root", &error))
}

/// Reads a certificate; `name` is its name in messages.
fn certificate<'a>(name: &str, der: &'a CertificateDer<'_>) -> Result<EndEntityCert<'a>, Refusal> {
    EndEntityCert::try_from(der).map_err(|error| unreadable(name, &error))
}

fn unreadable(name: &str, error: &webpki::Error) -> Refusal {
    Kind::Malformed.because(format!("the {name} cannot be read: {}", in_words(error)))
}

/// Checks that a list of revoked certificates is in force at this time, and that the root in this
/// certificate signed it.
pub fn check_list(der: &[u8], root: &[u8], now: UnixTime) -> Result<(), Refusal> {
    let root = CertificateDer::from(root);
    read_list(der, &anchor(&root)?, now).map(drop)
}

/// Reads a list that is in force and that the root signed. The library would skip a list that says
/// that it is for other kinds of certificates, and would not check its signature.
fn read_list<'a>(
    der: &'a [u8],
    root: &TrustAnchor<'_>,
    now: UnixTime,
) -> Result<CertRevocationList<'a>, Refusal> {
    let (head, list) = List::read(der, LIST, now.as_secs())?;
    if head.issuer != &root.subject[..] {
        return Err(Kind::Binding.because(format!("the {LIST} was not issued by the root")));
    }
    if head.until < now.as_secs() {
        let end = UNIX_EPOCH + Duration::from_secs(head.until);
        let end = base::time::seconds(end);
        return Err(Kind::Expired.because(format!("the {LIST} has expired at {end}")));
    }
    match is_signed_by(&head, &root.subject_public_key_info) {
        Some(true) => Ok(list),
        _ => Err(Kind::Signature.because(format!("the {LIST} is not signed by the root"))),
    }
}

/// Returns whether a key signed a list; `None` if the key cannot be read. `key` is the content of a
/// SubjectPublicKeyInfo.
fn is_signed_by(list: &List<'_>, key: &[u8]) -> Option<bool> {
    let mut key = DerReader::new(key);
    let of_key = key.expect(SEQUENCE).ok()?;
    let key = key.expect(BIT_STRING).ok()?.strip_prefix(&[0])?;
    let verifies = |algorithm: &&dyn SignatureVerificationAlgorithm| {
        algorithm.public_key_alg_id().as_ref() == of_key
            && algorithm.signature_alg_id().as_ref() == list.algorithm
            && algorithm
                .verify_signature(key, list.signed, list.signature)
                .is_ok()
    };
    Some(ALGORITHMS.iter().any(verifies))
}

/// RSASSA-PSS with SHA-384, named as AMD names it.
#[derive(Debug)]
struct AmdPss;

impl SignatureVerificationAlgorithm for AmdPss {
    fn public_key_alg_id(&self) -> AlgorithmIdentifier {
        alg_id::RSA_ENCRYPTION
    }

    fn signature_alg_id(&self) -> AlgorithmIdentifier {
        AlgorithmIdentifier::from_slice(AMD_PSS_SHA384)
    }

    fn verify_signature(
        &self,
        public_key: &[u8],
        message: &[u8],
        signature: &[u8],
    ) -> Result<(), InvalidSignature> {
        RSA_PSS_2048_8192_SHA384_LEGACY_KEY.verify_signature(public_key, message, signature)
    }
}
