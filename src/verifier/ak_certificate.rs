//! The certificate of an attestation key: with it, a cloud certifies that the key is in the TPM of
//! one of its machines.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, SignatureVerificationAlgorithm, TrustAnchor, UnixTime};
use webpki::{EndEntityCert, KeyUsage, ring as algorithms};

/// Returns the URL at which the certificate of a certificate's issuer is published.
pub use attest::azure_trustedlaunch::places_of_issuer;
use base::text;
use base::x509::{Certificate, DIGITAL_SIGNATURE};
use roots::chain::{authorities_certify, in_words};

use super::hex;
use super::instance::CloudRequirements;
use super::policy::{Fault, PolicyError};
use super::refusal::{Kind, Refusal};

/// Maximum number of certificates between that of the key and the root.
const MAX_CHAIN: usize = 8;
/// Maximum size of a certificate in bytes: twice the size of the largest genuine ones.
const MAX_CERTIFICATE: usize = 4 << 10;
/// How the PEM form starts.
const PEM: &str = "-----BEGIN CERTIFICATE-----";
/// What clouds sign with.
const SIGNATURES: &[&dyn SignatureVerificationAlgorithm] = &[
    algorithms::RSA_PKCS1_2048_8192_SHA256,
    algorithms::RSA_PKCS1_2048_8192_SHA384,
    algorithms::RSA_PKCS1_2048_8192_SHA512,
    algorithms::ECDSA_P256_SHA256,
    algorithms::ECDSA_P384_SHA384,
];

/// A root, with the intermediate certificates that machines do not send.
#[derive(Debug)]
pub struct AkRoot {
    name: String,
    anchor: TrustAnchor<'static>,
    between: Vec<CertificateDer<'static>>,
}

impl AkRoot {
    /// Returns the root in a list of certificates, which starts with it. Without a name, its
    /// fingerprint becomes the name.
    fn of(
        name: Option<&str>,
        certificates: Vec<CertificateDer<'static>>,
    ) -> Result<AkRoot, PolicyError> {
        let (root, between) = certificates
            .split_first()
            .ok_or_else(|| wrong("it contains no certificate"))?;
        let anchor = webpki::anchor_from_trusted_cert(root);
        let anchor = anchor.map_err(|error| wrong(&in_words(&error)))?;
        let fingerprint = || hex(&super::sha256(&[root]));
        Ok(AkRoot {
            name: name.map_or_else(fingerprint, str::to_owned),
            anchor: anchor.to_owned(),
            between: between.to_vec(),
        })
    }

    /// Returns a root that the programs have built in.
    fn known(root: &roots::Root) -> Result<AkRoot, PolicyError> {
        let certificates = root.certificates().map(|one| CertificateDer::from(one.der));
        AkRoot::of(Some(root.name), certificates.collect())
    }

    /// Returns the roots that a policy names; without names, all of `known`.
    pub fn demanded(
        demands: &CloudRequirements,
        known: &[&roots::Root],
    ) -> Result<Vec<AkRoot>, PolicyError> {
        if demands.roots.is_empty() {
            let all = known.iter().map(|root| AkRoot::known(root));
            return all.collect();
        }
        let one = |entry: &String| {
            if entry.trim_start().starts_with(PEM) {
                let read = CertificateDer::pem_slice_iter(entry.as_bytes());
                let certificates = read.collect::<Result<_, _>>();
                return AkRoot::of(None, certificates.map_err(|_| wrong("it is not PEM"))?);
            }
            let named = known.iter().find(|root| root.name == entry);
            let root = named.ok_or_else(|| {
                let names: Vec<_> = known.iter().map(|root| root.name).collect();
                let names = names.join(", ");
                wrong(&format!(
                    "{} is neither a certificate in PEM nor one of {names}",
                    text::quoted(entry, 80)
                ))
            })?;
            AkRoot::known(root)
        };
        let roots = demands
            .roots
            .iter()
            .map(one)
            .collect::<Result<_, PolicyError>>();
        roots.map_err(|error| error.within("cloud: roots"))
    }
}

fn wrong(why: &str) -> PolicyError {
    Fault::Requirement.because(why)
}

/// What an error about the certificate of an attestation key starts with.
const OF_KEY: &str = "the certificate of the attestation key";

/// Returns the fields of a certificate that is one of the attestation key `spki`
/// (SubjectPublicKeyInfo, DER) and usable for signatures. Who signed it is not verified.
pub fn of_key<'a>(certificate: &'a [u8], spki: &[u8]) -> Result<Certificate<'a>, Refusal> {
    let wrong = |kind: Kind, why: &str| kind.because(format!("{OF_KEY} {why}"));
    let fields = Certificate::parse(certificate);
    let fields = fields.map_err(|_| wrong(Kind::Malformed, "cannot be read"))?;
    if fields.key() != spki {
        let why = "is of another key than the one that signed the quote";
        return Err(wrong(Kind::Binding, why));
    }
    match fields.key_usage() {
        Some(bits) if bits & DIGITAL_SIGNATURE != 0 => Ok(fields),
        _ => Err(wrong(
            Kind::Certificate,
            "is not for signatures (key usage)",
        )),
    }
}

/// Returns the name of the root that certifies an attestation key: its certificate must lead to one
/// of the roots at this time; `usage` is the extended key usage that the cloud's certificates have.
pub fn verify<'a>(
    certificate: &[u8],
    chain: &[Vec<u8>],
    roots: &'a [AkRoot],
    usage: KeyUsage,
    now: UnixTime,
) -> Result<&'a str, Refusal> {
    root_of(certificate, chain, roots, usage, now)
        .map_err(|refusal| refusal.reworded(|why| format!("{OF_KEY} {why}")))
}

/// Returns the name of the root to which a certificate leads at this time, for this use. An error
/// is a clause about the certificate.
pub fn root_of<'a>(
    certificate: &[u8],
    chain: &[Vec<u8>],
    roots: &'a [AkRoot],
    usage: KeyUsage,
    now: UnixTime,
) -> Result<&'a str, Refusal> {
    if chain.len() > MAX_CHAIN {
        let count = chain.len();
        return Err(Kind::Malformed.because(format!(
            "has a chain of {count} certificates, expected at most {MAX_CHAIN}"
        )));
    }
    let mut all = chain.iter().map(Vec::as_slice).chain([certificate]);
    if all.any(|one| one.len() > MAX_CERTIFICATE) {
        return Err(Kind::Malformed.because(format!(
            "or one above it is longer than {MAX_CERTIFICATE} bytes"
        )));
    }
    let leaf = CertificateDer::from(certificate);
    let leaf = EndEntityCert::try_from(&leaf).map_err(|error| {
        roots::chain::kind(&error).because(format!("is refused: {}", in_words(&error)))
    })?;
    let mut why = None;
    for root in roots {
        let chain = chain.iter().map(|one| CertificateDer::from(one.as_slice()));
        let between: Vec<_> = root.between.iter().cloned().chain(chain).collect();
        let anchors = std::slice::from_ref(&root.anchor);
        match leaf.verify_for_usage(
            SIGNATURES,
            anchors,
            &between,
            now,
            usage,
            None,
            Some(&authorities_certify),
        ) {
            Ok(_) => return Ok(&root.name),
            // Keep trying. Remember other errors: if the root issued the certificate, they are the
            // useful ones.
            Err(webpki::Error::UnknownIssuer) => {}
            Err(error) => why = why.or(Some((root, error))),
        }
    }
    Err(match why {
        Some((root, error)) => roots::chain::kind(&error).because(format!(
            "is refused under the root {:?}: {}",
            root.name,
            in_words(&error)
        )),
        None => Kind::Chain.because("leads to none of the accepted roots"),
    })
}
