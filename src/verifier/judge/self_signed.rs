//! Certificates that are signed by their own key. They need no authority, because the attestation
//! document in a certificate binds its key.

use std::time::Duration;

use roots::chain;
use rustls::pki_types::{CertificateDer, UnixTime};

use crate::Refusal;

/// Verifies a self-signed certificate and returns its DER SubjectPublicKeyInfo. Its key must be on
/// P-256, as in the certificates of Firstlight and Constellation.
pub fn verify(certificate: &CertificateDer<'_>) -> Result<Vec<u8>, Refusal> {
    let refused = |what: &str, error: &webpki::Error| {
        chain::kind(error).because(format!("its certificate {what}: {}", in_words(error)))
    };
    let unreadable = |error| refused("cannot be read", &error);
    let root = webpki::anchor_from_trusted_cert(certificate).map_err(unreadable)?;
    let leaf = webpki::EndEntityCert::try_from(certificate).map_err(unreadable)?;
    let anchors = [root];
    let at = |time| {
        let usage = webpki::KeyUsage::server_auth();
        leaf.verify_for_usage(
            &[webpki::ring::ECDSA_P256_SHA256],
            &anchors,
            &[],
            time,
            usage,
            None,
            None,
        )
        .map(drop)
    };
    // webpki demands a time: the first at which the certificate is valid
    let verified = match at(UnixTime::since_unix_epoch(Duration::ZERO)) {
        Err(webpki::Error::CertNotValidYet { not_before, .. }) => at(not_before),
        verified => verified,
    };
    verified.map_err(|error| refused("is not properly self-signed", &error))?;
    Ok(leaf.subject_public_key_info().as_ref().to_vec())
}

fn in_words(error: &webpki::Error) -> &'static str {
    match error {
        webpki::Error::UnsupportedCriticalExtension => {
            "it has a critical extension that is not known"
        }
        webpki::Error::RequiredEkuNotFoundContext(_) => {
            "it is for another use (extended key usage)"
        }
        _ => "it is malformed, or its signature is wrong",
    }
}
