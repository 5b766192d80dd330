//! The self-signed certificates that carry attestation documents (X.509 version 3, RFC 5280).
//!
//! Issuing and verifying are two halves of one rule: the certificate has the document in an extension whose OID names the
//! variant, and the document's user data is SHA-256 of the certificate's SubjectPublicKeyInfo.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use ring::digest;
use rustls::SignatureScheme;
use rustls::crypto::ring::sign::any_ecdsa_type;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, UnixTime};
use rustls::sign::CertifiedKey;
use zeroize::Zeroizing;

use super::der::{self, Malformed, Reader};
use super::{Error, nonce, provider};
use crate::attestation::{IssueError, Issuer, ValidateError, Validator};

/// Longest attestation document that fits: rustls and webpki read certificates of up to 64 KiB, of which some 300 bytes
/// are not the document's.
pub const MAX_DOCUMENT: usize = 65_000;

/// What rustls is told about a refused certificate: the alert is access_denied (RFC 8446 §6.2), and nothing else.
pub const REFUSED: rustls::Error =
    rustls::Error::InvalidCertificate(rustls::CertificateError::ApplicationVerificationFailure);

/// Seconds that a certificate is valid before and after now, as the old system has it.
const VALIDITY: u64 = 2 * 60 * 60;
/// Common name of issuer and subject; nobody checks it, it is the old system's.
const NAME: &[u8] = b"Constellation";
/// AlgorithmIdentifier of ecdsa-with-SHA256, 1.2.840.10045.4.3.2 (RFC 5758 §3.2).
const ECDSA_WITH_SHA256: &[u8] = &[0x30, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02];

/// A fresh P-256 key with a certificate that says, if there is an `issuer`, what this machine runs, to a peer that
/// chose `nonce`.
pub fn issue(issuer: Option<&dyn Issuer>, nonce: &[u8]) -> Result<Arc<CertifiedKey>, Error> {
    let key = generate_key()?;
    let internal = |what: &str| Error::Internal(format!("the certificate's key {what}"));
    let public_key = key.public_key().ok_or_else(|| internal("has no public half"))?;
    let extension = match issuer {
        None => Vec::new(),
        Some(issuer) => {
            let document = issuer.issue(&user_data(&public_key), nonce).map_err(Error::Issuer)?;
            if document.len() > MAX_DOCUMENT {
                return Err(Error::Issuer(IssueError(format!(
                    "the document has {} bytes, more than the {MAX_DOCUMENT} that fit into a certificate",
                    document.len()
                ))));
            }
            extensions(issuer.oid(), &document)
        }
    };
    let body = to_be_signed(&public_key, &extension, SystemTime::now());
    let signer = key.choose_scheme(&[SignatureScheme::ECDSA_NISTP256_SHA256]).ok_or_else(|| internal("cannot sign"))?;
    let signature = signer.sign(&body).map_err(|error| internal(&format!("cannot sign: {error}")))?;
    let certificate =
        der::element(der::SEQUENCE, &[&body, ECDSA_WITH_SHA256, &der::element(der::BIT_STRING, &[&[0], &signature])]);
    drop(public_key);
    Ok(Arc::new(CertifiedKey::new(vec![certificate.into()], key)))
}

fn generate_key() -> Result<Arc<dyn rustls::sign::SigningKey>, Error> {
    use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};
    let failed = || Error::Internal("no P-256 key could be generated".into());
    let document = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &ring::rand::SystemRandom::new())
        .map_err(|_| failed())?;
    let pkcs8 = Zeroizing::new(document.as_ref().to_vec());
    any_ecdsa_type(&PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(&pkcs8[..]))).map_err(|_| failed())
}

/// What a document binds: SHA-256 of the DER SubjectPublicKeyInfo.
fn user_data(public_key: &[u8]) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(digest::digest(&digest::SHA256, public_key).as_ref());
    hash
}

/// The TBSCertificate (RFC 5280 §4.1).
fn to_be_signed(public_key: &[u8], extensions: &[u8], now: SystemTime) -> Vec<u8> {
    let now = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let mut serial = crate::crypto::random::<16>();
    serial[0] = serial[0] & 0x7f | 0x40; // positive, and the shortest form
    let name = nonce::common_name(NAME);
    der::element(
        der::SEQUENCE,
        &[
            &der::element(der::context(0), &[&der::element(der::INTEGER, &[&[2]])]), // v3
            &der::element(der::INTEGER, &[&serial]),
            ECDSA_WITH_SHA256,
            &name,
            &der::element(der::SEQUENCE, &[&time(now.saturating_sub(VALIDITY)), &time(now.saturating_add(VALIDITY))]),
            &name,
            public_key,
            extensions,
        ],
    )
}

/// The one extension, not critical; its value is the bare document, whatever its format.
fn extensions(oid: &[u8], document: &[u8]) -> Vec<u8> {
    let extension = der::element(der::SEQUENCE, &[oid, &der::element(der::OCTET_STRING, &[document])]);
    der::element(der::context(3), &[&der::element(der::SEQUENCE, &[&extension])])
}

/// Seconds since 1970 as RFC 5280 §4.1.2.5 wants them: UTCTime until 2049, GeneralizedTime from 2050.
fn time(seconds: u64) -> Vec<u8> {
    let (year, month, day) = civil_date(seconds / 86_400);
    let second = seconds % 86_400;
    let rest = format!("{month:02}{day:02}{:02}{:02}{:02}Z", second / 3600, second / 60 % 60, second % 60);
    if year < 2050 {
        der::element(der::UTC_TIME, &[format!("{:02}", year % 100).as_bytes(), rest.as_bytes()])
    } else {
        der::element(der::GENERALIZED_TIME, &[format!("{year:04}").as_bytes(), rest.as_bytes()])
    }
}

/// Year, month and day (from 1) of a day since 1970-01-01, in the Gregorian calendar.
fn civil_date(day: u64) -> (u64, u64, u64) {
    let is_leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    // 146097 days are 400 years exactly; what remains is a short walk
    let mut year = 1970 + day / 146_097 * 400;
    let mut day = day % 146_097;
    loop {
        let len = if is_leap(year) { 366 } else { 365 };
        if day < len {
            break;
        }
        day -= len;
        year += 1;
    }
    let february = if is_leap(year) { 29 } else { 28 };
    let mut month = 1;
    for len in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if day < len {
            break;
        }
        day -= len;
        month += 1;
    }
    (year, month, day + 1)
}

/// Judges a peer's certificate: `nonce` is the one that we sent to that peer.
///
/// It must be signed by its own key, be valid `now`, have no critical extension that is unknown and no extended key usage
/// without serverAuth (RFC 5280 §4.2.1.12; for clients too, as the old system). The first extension that any validator
/// knows decides: its document must be valid for the nonce and name this certificate's key. That the peer has the key's
/// private half is TLS' own check.
pub fn verify(
    certificate: &CertificateDer<'_>,
    validators: &[Arc<dyn Validator>],
    nonce: &[u8],
    now: UnixTime,
) -> Result<(), ValidateError> {
    let public_key = verify_self_signed(certificate, now).map_err(refusal)?;
    let extensions = read_extensions(certificate)
        .map_err(|Malformed| refusal("the extensions of its certificate are malformed".into()))?;

    let decisive = extensions.iter().find_map(|extension| {
        let validator = validators.iter().find(|validator| validator.oid() == extension.oid)?;
        Some((validator, extension.value))
    });
    let (validator, document) = decisive.ok_or_else(|| refusal(no_document(&extensions, validators)))?;

    if validator.validate(document, nonce)? != user_data(&public_key) {
        return Err(refusal("its attestation document is for another key than its certificate's".into()));
    }
    Ok(())
}

fn refusal(text: String) -> ValidateError {
    ValidateError(text.into())
}

/// The DER SubjectPublicKeyInfo of a certificate that passes as its own root. The error is a clause.
fn verify_self_signed(certificate: &CertificateDer<'_>, now: UnixTime) -> Result<Vec<u8>, String> {
    let unreadable = |error| format!("its certificate cannot be read: {error:?}");
    let root = webpki::anchor_from_trusted_cert(certificate).map_err(unreadable)?;
    let leaf = webpki::EndEntityCert::try_from(certificate).map_err(unreadable)?;
    let algorithms = provider::client().signature_verification_algorithms.all;
    leaf.verify_for_usage(algorithms, &[root], &[], now, webpki::KeyUsage::server_auth(), None, None).map_err(
        |error| match error {
            webpki::Error::CertExpired { time, not_after } => format!(
                "its certificate expired {} s ago by this machine's clock; compare the clocks",
                time.as_secs().saturating_sub(not_after.as_secs())
            ),
            webpki::Error::CertNotValidYet { time, not_before } => format!(
                "its certificate is valid only in {} s by this machine's clock; compare the clocks",
                not_before.as_secs().saturating_sub(time.as_secs())
            ),
            error => format!("its certificate is not properly self-signed: {error:?}"),
        },
    )?;
    Ok(leaf.subject_public_key_info().as_ref().to_vec())
}

struct Extension<'a> {
    /// With tag and length.
    oid: &'a [u8],
    value: &'a [u8],
}

/// The extensions of a certificate (RFC 5280 §4.1), in order.
fn read_extensions(certificate: &[u8]) -> Result<Vec<Extension<'_>>, Malformed> {
    let mut certificate = Reader::new(Reader::new(certificate).expect(der::SEQUENCE)?);
    let mut body = Reader::new(certificate.expect(der::SEQUENCE)?);
    let mut found = Vec::new();
    while !body.is_empty() {
        // all fields before the extensions are webpki's matter; none of them has this tag
        let (tag, content) = body.next()?;
        if tag != der::context(3) {
            continue;
        }
        let mut extensions = Reader::new(Reader::new(content).expect(der::SEQUENCE)?);
        while !extensions.is_empty() {
            let mut extension = Reader::new(extensions.expect(der::SEQUENCE)?);
            let oid = extension.expect_whole(der::OBJECT_IDENTIFIER)?;
            if extension.peek() == Some(der::BOOLEAN) {
                extension.expect(der::BOOLEAN)?;
            }
            let value = extension.expect(der::OCTET_STRING)?;
            extension.end()?;
            found.push(Extension { oid, value });
        }
        body.end()?;
    }
    Ok(found)
}

fn no_document(extensions: &[Extension<'_>], validators: &[Arc<dyn Validator>]) -> String {
    /// Enough to recognise any variant; the peer chooses how many there are.
    const SHOWN: usize = 4;
    let hex = |oid: &[u8]| oid.iter().take(32).map(|byte| format!("{byte:02x}")).collect::<String>();
    let expected: Vec<_> = validators.iter().map(|validator| hex(validator.oid())).collect();
    let got: Vec<_> = extensions.iter().take(SHOWN).map(|extension| hex(extension.oid)).collect();
    format!(
        "its certificate has no attestation document of an accepted variant (expected OID {}, got {})",
        expected.join(" or "),
        if got.is_empty() { "no extension".into() } else { got.join(", ") }
    )
}
