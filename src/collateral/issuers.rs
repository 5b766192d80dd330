//! The authorities of Google's machines. The certificate of an attestation key names where the certificate of its issuer is
//! published (RFC 5280 §4.2.2.1): in a bucket of Google's storage service. The certificate authority service makes one bucket for
//! each authority. Google has replaced such an authority before, so the built-in authorities do not suffice; their root stays the
//! same.
//!
//! ```text
//! http://privateca-content-ID.storage.googleapis.com/ID/ca.crt  ─►  https://storage.googleapis.com/privateca-content-ID/ID/ca.crt
//! ```
//!
//! An unauthenticated peer can name any bucket and any key. So the requests are limited like those for the certificates of chips,
//! they are sent only to this host, and an answer counts only for this bucket and this key. The validator verifies that a root
//! certifies the certificate.

use std::time::{Duration, Instant};

use base::der::{DerReader, SEQUENCE};
use base::text;
use base::x509::Certificate;
use hardware::{Cause, Unavailable};
use http::Roots;
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use verifier::ak_certificate::places_of_issuer;

use crate::https::{CollateralServer, FetchFailure, FetchRequest};
use crate::item::{Item, MAX_CERTIFICATE, subject_key};

/// Google's storage service.
pub const GOOGLE: &str = "https://storage.googleapis.com";

/// authorityKeyIdentifier, 2.5.29.35 (RFC 5280 §4.2.1): the content of the OID.
const AUTHORITY_KEY: &[u8] = &[0x55, 0x1d, 0x23];
/// keyIdentifier [0], primitive.
const KEY_IDENTIFIER: u8 = 0x80;
/// Maximum length in bytes of a key identifier and of a path.
const MAX_KEY: usize = 64;
const MAX_PLACE: usize = 256;
/// The beginning of the names of the buckets with certificates of authorities.
const BUCKET: &str = "privateca-content-";
/// The end of the host of a bucket.
const HOST: &str = ".storage.googleapis.com";
/// The media types of a certificate in DER or PEM.
const TYPES: &[&str] = &[
    "application/pkix-cert",
    "application/x-x509-ca-cert",
    "application/octet-stream",
    "application/x-pem-file",
    "application/pem-certificate-chain",
    "text/plain",
];
/// How many authorities are requested at once, and the pause for each further one.
const AT_ONCE: u32 = 8;
const PAUSE: Duration = Duration::from_secs(2);

/// A client of the storage service.
pub struct Issuers(CollateralServer);

impl Issuers {
    /// Makes a client of the service at this URL.
    pub fn new(url: &str, roots: &Roots) -> Result<Issuers, Unavailable> {
        Ok(Issuers(
            CollateralServer::new(url, roots)?.with_limit(AT_ONCE, PAUSE),
        ))
    }

    /// Returns the certificate at this path, DER.
    pub fn certificate(&self, path: &str, deadline: Instant) -> Result<Vec<u8>, FetchFailure> {
        let request = FetchRequest {
            path,
            types: TYPES,
            limit: MAX_CERTIFICATE,
            content: None,
        };
        let body = self.0.send(&request, deadline)?.body;
        // the service publishes some certificates as DER and others as PEM
        Ok(match CertificateDer::from_pem_slice(&body) {
            Ok(der) => der.to_vec(),
            Err(_) => body,
        })
    }
}

/// Returns the issuer of a certificate, if it is built in.
pub fn known(certificate: &[u8]) -> Option<&'static [u8]> {
    let key = authority_key(certificate)?;
    let all = roots::ALL.iter().flat_map(|root| root.certificates());
    all.map(|one| one.der)
        .find(|der| subject_key(der) == Some(key))
}

/// Returns the item to fetch for the issuer of a certificate; `None` if the certificate names no URL or no key.
pub fn of(certificate: &[u8]) -> Result<Option<Item>, Unavailable> {
    let key = authority_key(certificate).filter(|key| key.len() <= MAX_KEY);
    let places = places_of_issuer(certificate);
    let (Some(key), Some(first)) = (key, places.first()) else {
        return Ok(None);
    };
    let path = places.iter().find_map(|place| path(place));
    let path = path.ok_or_else(|| {
        let why = format!(
            "its issuer is published at {}, but this program fetches only http://{BUCKET}*{HOST}/*. Verify that certificate yourself, and \
             add it behind its root to the policy (cloud.roots, PEM)",
            text::quoted(first, 120)
        );
        Cause::Unknown.because(why)
    })?;
    Ok(Some(Item::Issuer {
        path,
        key: key.to_vec(),
    }))
}

/// Returns the path at the storage service, if the URL is an allowed one.
fn path(place: &str) -> Option<String> {
    let rest = place.strip_prefix("http://");
    let rest = rest.or_else(|| place.strip_prefix("https://"))?;
    let (host, object) = rest.split_once('/')?;
    let bucket = host.strip_suffix(HOST)?;
    let id = bucket.strip_prefix(BUCKET)?;
    let is_plain = |text: &str, others: &[u8]| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || others.contains(&byte);
        !text.is_empty() && text.bytes().all(is_plain)
    };
    let is_allowed = place.len() <= MAX_PLACE
        && is_plain(id, b"-")
        && is_plain(object, b"-_./")
        && !object.contains("..");
    is_allowed.then(|| format!("/{bucket}/{object}"))
}

/// Returns the identifier of the key that signed a certificate.
fn authority_key(certificate: &[u8]) -> Option<&[u8]> {
    let extension = Certificate::parse(certificate)
        .ok()?
        .extension(AUTHORITY_KEY)?;
    let mut fields = DerReader::new(DerReader::new(extension).expect(SEQUENCE).ok()?);
    fields.expect(KEY_IDENTIFIER).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    #[test]
    fn only_buckets_of_authorities_are_places() {
        let google = "privateca-content-65d1688e-0000-2203-850e-30fd381456f8";
        let path_of = format!("/{google}/810af313406ad3e2079b/ca.crt");
        for scheme in ["http", "https"] {
            let place = format!("{scheme}://{google}{HOST}/810af313406ad3e2079b/ca.crt");
            assert_eq!(path(&place).as_deref(), Some(&*path_of));
        }
        for other in [
            String::new(),
            format!("ftp://{google}{HOST}/1/ca.crt"),
            format!("http://{google}{HOST}"),
            format!("http://{google}{HOST}/"),
            format!("http://{google}{HOST}/../other/ca.crt"),
            format!("http://{google}{HOST}/ca.crt?x=1"),
            format!("http://{google}{HOST}/ca.crt#x"),
            format!("http://{google}{HOST}/%2e%2e/ca.crt"),
            format!("http://{google}{HOST}:81/ca.crt"),
            format!("http://user@{google}{HOST}/ca.crt"),
            format!("http://{google}.example{HOST}/ca.crt"),
            format!("http://{google}{HOST}.example/ca.crt"),
            format!("http://privateca-content-{HOST}/ca.crt"),
            format!("http://other{HOST}/ca.crt"),
            format!("http://{google}{HOST}/{}", "a".repeat(MAX_PLACE)),
            "http://169.254.169.254/latest/meta-data".into(),
            "http://localhost/ca.crt".into(),
        ] {
            assert_eq!(path(&other), None, "{other}");
        }
    }

    #[test]
    fn an_authority_that_is_built_in_is_not_fetched() {
        let between = roots::GOOGLE_2022.between;
        assert_eq!(
            subject_key(between[1].der).unwrap()[..4],
            [0x0f, 0x21, 0x9d, 0x56]
        );
        for one in between {
            assert_eq!(known(one.der), Some(roots::GOOGLE_2022.root.der));
        }
        for altered in mutations(between[1].der, 5000) {
            if let Err(error) = of(&altered) {
                assert!(error.to_string().len() < 1000, "{error}");
            }
        }
    }
}
