//! The self-signed certificates that contain attestation documents (X.509 version 3, RFC 5280).
//!
//! The certificate contains the document in an extension whose OID names the variant. The user data
//! of the document is SHA-256 of the SubjectPublicKeyInfo of the certificate.
//!
//! Neither side depends on a clock: a machine in its initramfs may have a wrong one. The peer
//! itself writes the validity of its certificate, so the validity proves nothing. The nonce shows
//! that a document is fresh. The verifier chose it at random for this connection, the TPM signed it
//! together with the certificate's key, and TLS proves that the peer has that key. So our
//! certificates are valid at any time, which Constellation's peers accept, and the validity of the
//! peer's certificate is not compared with a clock.

use std::sync::Arc;

use rustls::SignatureScheme;
use rustls::crypto::ring::sign::any_ecdsa_type;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;
use zeroize::Zeroizing;

use super::{Error, nonce};
use attest::{IssueError, Issuer};
use base::{der, x509};

/// Maximum size of an attestation document in bytes: rustls and webpki read certificates of up to
/// 64 KiB, of which about 300 bytes are not part of the document.
pub const MAX_DOCUMENT: usize = 65_000;

/// The error for rustls if a certificate is refused. It causes the alert access_denied (RFC 8446
/// §6.2).
pub const REFUSED: rustls::Error =
    rustls::Error::InvalidCertificate(rustls::CertificateError::ApplicationVerificationFailure);

/// The validity of a certificate (Validity, DER): from the first second that a clock can have to
/// 9999-12-31 23:59:59, which stands for "no end" (RFC 5280 §4.1.2.5).
const VALIDITY: &[u8] = b"\x30\x20\x17\x0d700101000000Z\x18\x0f99991231235959Z";
/// Common name of issuer and subject, as in Constellation. It is not checked.
const NAME: &[u8] = b"Constellation";
/// AlgorithmIdentifier of ecdsa-with-SHA256, 1.2.840.10045.4.3.2 (RFC 5758 §3.2).
const ECDSA_WITH_SHA256: &[u8] = &[
    0x30, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02,
];

/// Makes a new P-256 key and a certificate for it. If there is an `issuer`, the certificate
/// contains a document for the peer that chose `nonce`; `for_stranger` as in
/// [`attest::Request::for_stranger`].
pub fn issue(
    issuer: Option<&dyn Issuer>,
    nonce: &[u8],
    for_stranger: bool,
) -> Result<Arc<CertifiedKey>, Error> {
    let key = generate_key()?;
    let internal = |what: &str| Error::Internal(format!("the certificate's key {what}"));
    let public_key = key
        .public_key()
        .ok_or_else(|| internal("has no public half"))?;
    let extension = match issuer {
        None => Vec::new(),
        Some(issuer) => {
            let user_data = user_data(&public_key);
            let document = if for_stranger {
                issuer.issue_for_stranger(&user_data, nonce)
            } else {
                issuer.issue(&user_data, nonce)
            };
            let document = document.map_err(Error::Issuer)?;
            if document.len() > MAX_DOCUMENT {
                return Err(Error::Issuer(IssueError::new(format!(
                    "the document has {} bytes, more than the {MAX_DOCUMENT} that fit into a certificate",
                    document.len()
                ))));
            }
            extensions(issuer.oid(), &document)
        }
    };
    let body = to_be_signed(&public_key, &extension, VALIDITY);
    let signer = key
        .choose_scheme(&[SignatureScheme::ECDSA_NISTP256_SHA256])
        .ok_or_else(|| internal("cannot sign"))?;
    let signature = signer
        .sign(&body)
        .map_err(|error| internal(&format!("cannot sign: {error}")))?;
    let certificate = der::element(
        der::SEQUENCE,
        &[
            &body,
            ECDSA_WITH_SHA256,
            &der::element(der::BIT_STRING, &[&[0], &signature]),
        ],
    );
    drop(public_key);
    Ok(Arc::new(CertifiedKey::new(vec![certificate.into()], key)))
}

fn generate_key() -> Result<Arc<dyn rustls::sign::SigningKey>, Error> {
    use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};
    let failed = || Error::Internal("no P-256 key could be generated".into());
    let document = EcdsaKeyPair::generate_pkcs8(
        &ECDSA_P256_SHA256_ASN1_SIGNING,
        &ring::rand::SystemRandom::new(),
    )
    .map_err(|_| failed())?;
    let pkcs8 = Zeroizing::new(document.as_ref().to_vec());
    any_ecdsa_type(&PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(&pkcs8[..])))
        .map_err(|_| failed())
}

/// Returns the user data of a document: SHA-256 of the DER SubjectPublicKeyInfo.
fn user_data(public_key: &[u8]) -> [u8; 32] {
    attest::sha256(&[public_key])
}

/// Returns the TBSCertificate (RFC 5280 §4.1).
fn to_be_signed(public_key: &[u8], extensions: &[u8], validity: &[u8]) -> Vec<u8> {
    let mut serial = base::crypto::random::<16>();
    serial[0] = serial[0] & 0x7f | 0x40; // positive, in the shortest encoding
    let name = nonce::common_name(NAME);
    der::element(
        der::SEQUENCE,
        &[
            &der::element(der::context(0), &[&der::element(der::INTEGER, &[&[2]])]), // v3
            &der::element(der::INTEGER, &[&serial]),
            ECDSA_WITH_SHA256,
            &name,
            validity,
            &name,
            public_key,
            extensions,
        ],
    )
}

/// Returns the extension: not critical, its value is the document without further encoding.
fn extensions(oid: &[u8], document: &[u8]) -> Vec<u8> {
    let extension = der::element(
        der::SEQUENCE,
        &[oid, &der::element(der::OCTET_STRING, &[document])],
    );
    der::element(
        der::context(3),
        &[&der::element(der::SEQUENCE, &[&extension])],
    )
}

/// Returns whether a certificate has no extension and so no document.
pub fn is_bare(certificate: &CertificateDer<'_>) -> bool {
    x509::extensions(certificate).is_ok_and(|extensions| extensions.is_empty())
}

#[cfg(test)]
mod tests {

    use base::der::DerReader;

    use super::*;
    use crate::dummy::{Dummy, OID, OTHER_OID};
    use base::time::to_der;
    use support::mutation::mutations;

    const NONCE: &[u8] = &[9; 32];

    fn attested() -> CertificateDer<'static> {
        issue(Some(&Dummy(OID)), NONCE, false).unwrap().cert[0].clone()
    }

    fn judge_for(certificate: &CertificateDer<'_>, nonce: &[u8]) -> Result<(), String> {
        let judge = verifier::judge(Arc::new(Dummy(OID)));
        let judged = judge.certificate(certificate, nonce);
        judged.map(drop).map_err(|refusal| refusal.to_string())
    }

    fn judge(certificate: &CertificateDer<'_>) -> Result<(), String> {
        judge_for(certificate, NONCE)
    }

    /// Returns a correctly signed certificate with other extensions and another subject.
    fn signed(
        change: impl FnOnce(Vec<u8>) -> Vec<u8>,
        extensions: &[u8],
    ) -> CertificateDer<'static> {
        let key = generate_key().unwrap();
        let public_key = key.public_key().unwrap();
        sign(
            key.as_ref(),
            change(to_be_signed(&public_key, extensions, VALIDITY)),
        )
    }

    fn sign(key: &dyn rustls::sign::SigningKey, body: Vec<u8>) -> CertificateDer<'static> {
        let signer = key
            .choose_scheme(&[SignatureScheme::ECDSA_NISTP256_SHA256])
            .unwrap();
        let signature = signer.sign(&body).unwrap();
        let signature = der::element(der::BIT_STRING, &[&[0], &signature]);
        der::element(der::SEQUENCE, &[&body, ECDSA_WITH_SHA256, &signature]).into()
    }

    #[test]
    fn an_issued_certificate_has_the_old_system_s_fields_and_is_valid_at_any_time() {
        let certificate = attested();
        let mut outer = DerReader::new(DerReader::new(&certificate).expect(der::SEQUENCE).unwrap());
        let mut body = DerReader::new(outer.expect(der::SEQUENCE).unwrap());
        assert_eq!(body.read().unwrap(), (0xa0, &[2, 1, 2][..]));
        assert_eq!(body.expect(der::INTEGER).unwrap().len(), 16);
        assert_eq!(body.expect_whole(der::SEQUENCE).unwrap(), ECDSA_WITH_SHA256);
        let name = b"\x30\x18\x31\x16\x30\x14\x06\x03\x55\x04\x03\x13\x0dConstellation";
        assert_eq!(body.expect_whole(der::SEQUENCE).unwrap(), name);
        let mut validity = DerReader::new(body.expect(der::SEQUENCE).unwrap());
        // UTCTime and GeneralizedTime
        assert_eq!(validity.read().unwrap(), (0x17, &b"700101000000Z"[..]));
        assert_eq!(validity.read().unwrap(), (0x18, &b"99991231235959Z"[..]));
        assert_eq!(body.expect_whole(der::SEQUENCE).unwrap(), name);
        let public_key = body.expect_whole(der::SEQUENCE).unwrap();
        assert_eq!((public_key.len(), public_key[26]), (91, 4));
        let extensions = body.expect(der::context(3)).unwrap();
        body.end().unwrap();
        let document = Dummy(OID).issue(&user_data(public_key), NONCE).unwrap();
        let value = der::element(der::OCTET_STRING, &[&document]);
        let extension = der::element(
            der::SEQUENCE,
            &[&der::element(der::SEQUENCE, &[OID, &value])],
        );
        assert_eq!(extensions, extension);
    }

    #[test]
    fn an_issued_certificate_is_accepted_for_its_nonce_only() {
        assert_eq!(judge(&attested()), Ok(()));
        let other = judge_for(&attested(), &[8; 32]);
        assert_eq!(other.unwrap_err(), "the document is for another nonce");
    }

    #[test]
    fn a_certificate_without_issuer_has_no_extension_and_is_refused() {
        let certificate = issue(None, NONCE, false).unwrap().cert[0].clone();
        assert!(x509::extensions(&certificate).unwrap().is_empty());
        assert!(judge(&certificate).unwrap_err().contains("got no document"));
    }

    #[test]
    fn the_first_extension_that_a_validator_knows_decides() {
        let extension = |oid: &[u8], value: &[u8]| {
            der::element(
                der::SEQUENCE,
                &[oid, &der::element(der::OCTET_STRING, &[value])],
            )
        };
        let list =
            |parts: &[&[u8]]| der::element(der::context(3), &[&der::element(der::SEQUENCE, parts)]);
        let good = Dummy(OID).issue(&[0; 32], NONCE).unwrap();

        let order = list(&[
            &extension(OTHER_OID, b"unknown"),
            &extension(OID, b"bad"),
            &extension(OID, &good),
        ]);
        assert!(
            judge(&signed(|body| body, &order))
                .unwrap_err()
                .starts_with("not JSON")
        );
        let order = list(&[
            &extension(OTHER_OID, b"unknown"),
            &extension(OID, &good),
            &extension(OID, b"bad"),
        ]);
        let only_the_key_is_wrong =
            "its attestation document is for another key than its certificate's";
        assert_eq!(
            judge(&signed(|body| body, &order)).unwrap_err(),
            only_the_key_is_wrong
        );
    }

    #[test]
    fn the_self_signature_is_checked() {
        let mut bytes = attested().to_vec();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        assert!(
            judge(&bytes.into())
                .unwrap_err()
                .contains("not properly self-signed")
        );
        // the subject differs from the issuer, so it is not self-signed
        let certificate = signed(
            |body| {
                let at = body.windows(13).rposition(|window| window == NAME).unwrap();
                [&body[..at], b"Konstellation", &body[at + 13..]].concat()
            },
            &[],
        );
        assert!(
            judge(&certificate)
                .unwrap_err()
                .contains("not properly self-signed")
        );
    }

    /// Constellation's certificates are valid for two hours before and after their issue.
    #[test]
    fn a_certificate_is_accepted_whatever_the_clocks_say() {
        const YEAR: u64 = 365 * 24 * 3600;
        for issued in [7200, 30 * YEAR, 200 * YEAR] {
            let key = generate_key().unwrap();
            let public_key = key.public_key().unwrap();
            let document = Dummy(OID).issue(&user_data(&public_key), NONCE).unwrap();
            let validity = [issued - 7200, issued + 7200].map(to_der).concat();
            let validity = der::element(der::SEQUENCE, &[&validity]);
            let body = to_be_signed(&public_key, &extensions(OID, &document), &validity);
            let mut certificate = sign(key.as_ref(), body).to_vec();
            assert_eq!(judge(&certificate.clone().into()), Ok(()));
            // the signature is verified all the same
            *certificate.last_mut().unwrap() ^= 1;
            let refused = judge(&certificate.into()).unwrap_err();
            assert!(refused.contains("not properly self-signed"), "{refused}");
        }
    }

    #[test]
    fn a_document_that_does_not_fit_is_the_issuer_s_fault() {
        struct Long(usize);
        impl Issuer for Long {
            fn oid(&self) -> attest::Oid {
                OID
            }
            fn issue(&self, _: &[u8], _: &[u8]) -> Result<Vec<u8>, IssueError> {
                Ok(vec![b' '; self.0])
            }
        }
        assert!(matches!(
            issue(Some(&Long(MAX_DOCUMENT + 1)), NONCE, false),
            Err(Error::Issuer(_))
        ));
        // webpki accepts the longest certificate, so the error is about the document
        let certificate = issue(Some(&Long(MAX_DOCUMENT)), NONCE, false).unwrap().cert[0].clone();
        assert!(judge(&certificate).unwrap_err().starts_with("not JSON"));
    }

    #[test]
    fn mutated_certificates_cause_no_panic_and_are_refused() {
        let original = attested();
        for (round, bytes) in mutations(&original, 20_000).enumerate() {
            let _ = x509::extensions(&bytes);
            // a complete validation includes a signature check, so there are fewer cases
            if round % 10 == 0 && bytes != *original {
                assert!(judge(&bytes.into()).is_err());
            }
        }
    }
}
