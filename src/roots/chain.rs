//! Chains of certificates to a root: the checks that the library that verifies them (webpki) does
//! not do, and the meaning of its errors. Its own error texts are names of Rust values.

use base::text;
use base::x509::may_certify;
use refusal::Kind;
use webpki::{Error, VerifiedPath};

/// Refuses a path with a certificate that is not a CA's according to its key usage, which the
/// library does not check.
pub fn authorities_certify(path: &VerifiedPath<'_>) -> Result<(), Error> {
    let mut between = path.intermediate_certificates();
    if between.all(|one| may_certify(&one.der())) {
        Ok(())
    } else {
        Err(Error::EndEntityUsedAsCa)
    }
}

/// Returns the kind of the refusal when the library that verifies chains refuses certificates.
pub fn kind(error: &Error) -> Kind {
    use webpki::Error::*;
    match error {
        UnknownIssuer => Kind::Chain,
        UnknownRevocationStatus => Kind::Collateral,
        CertRevoked => Kind::Revoked,
        CertExpired { .. } | CertNotValidYet { .. } | CrlExpired { .. } => Kind::Expired,
        InvalidSignatureForPublicKey | InvalidCrlSignatureForPublicKey => Kind::Signature,
        BadDer | BadDerTime => Kind::Malformed,
        _ => Kind::Certificate,
    }
}

/// Returns a clause that says why the library that verifies chains refuses certificates.
pub fn in_words(error: &Error) -> String {
    use webpki::Error::*;
    match error {
        CertExpired { .. } => "a certificate has expired".into(),
        CertNotValidYet { .. } => {
            "a certificate is not valid yet: is the clock of this machine right?".into()
        }
        RequiredEkuNotFoundContext(_) => {
            "a certificate is for another use (extended key usage)".into()
        }
        PathLenConstraintViolated => {
            "the chain is longer than one of its authorities allows".into()
        }
        CaUsedAsEndEntity => "the certificate is a CA certificate".into(),
        UnsupportedCriticalExtension => {
            "a certificate has a critical extension that this program does not know".into()
        }
        UnsupportedSignatureAlgorithmContext(context) => {
            unsupported(&context.signature_algorithm_id, &[])
        }
        UnsupportedSignatureAlgorithmForPublicKeyContext(context) => {
            let key = &context.public_key_algorithm_id;
            unsupported(&context.signature_algorithm_id, key)
        }
        EndEntityUsedAsCa => "a certificate of the chain is not a CA certificate".into(),
        UnknownIssuer => "a certificate's issuer is missing in the chain".into(),
        MaximumPathDepthExceeded | MaximumPathBuildCallsExceeded | MaximumSignatureChecksExceeded => {
            "the chain is too long, or too many of its authorities have the same name".into()
        }
        CertRevoked => "a certificate is revoked".into(),
        CrlExpired { .. } => "a list of revoked certificates (CRL) has expired".into(),
        UnknownRevocationStatus => {
            "no list of revoked certificates (CRL) is from its authority".into()
        }
        InvalidCrlSignatureForPublicKey
        | IssuerNotCrlSigner
        | UnsupportedCrlSignatureAlgorithmContext(_)
        | UnsupportedCrlSignatureAlgorithmForPublicKeyContext(_) => {
            "a list of revoked certificates (CRL) is not signed by its authority".into()
        }
        InvalidSignatureForPublicKey => {
            "a signature is wrong: the certificate is altered, or from another authority with the same name".into()
        }
        _ => "a certificate is malformed, or breaks a rule of X.509 (RFC 5280)".into(),
    }
}

/// Returns the error that this program does not support the signature algorithm of a certificate.
/// Both algorithms are the content of their AlgorithmIdentifier (DER).
pub fn unsupported(signature: &[u8], key: &[u8]) -> String {
    // sha1WithRSAEncryption and ecdsa-with-SHA1
    const SHA_1: [&[u8]; 2] = [
        b"\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x01\x05",
        b"\x06\x07\x2a\x86\x48\xce\x3d\x04\x01",
    ];
    // secp521r1
    const P521: &[u8] = b"\x06\x05\x2b\x81\x04\x00\x23";
    if SHA_1.iter().any(|known| signature.starts_with(known)) {
        return "a certificate is signed with SHA-1, which is not safe: ask its vendor for a newer one".into();
    }
    if key.ends_with(P521) {
        return "a certificate is signed by a key on the curve P-521, which this program does not verify".into();
    }
    let start = text::hex(&signature[..signature.len().min(24)]);
    format!(
        "a certificate is signed with an algorithm that this program does not verify (DER {start})"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each sentence is for people: it contains no Rust value, and no clause contains the end of a
    /// sentence.
    #[test]
    fn each_refusal_is_in_words() {
        let all = [
            (Error::UnknownIssuer, "issuer is missing"),
            (Error::CaUsedAsEndEntity, "is a CA certificate"),
            (Error::EndEntityUsedAsCa, "not a CA certificate"),
            (Error::InvalidSignatureForPublicKey, "a signature is wrong"),
            (Error::UnsupportedCriticalExtension, "critical extension"),
            (Error::PathLenConstraintViolated, "longer than"),
            (Error::MaximumPathDepthExceeded, "too long"),
            (Error::MaximumSignatureChecksExceeded, "the same name"),
            (Error::CertRevoked, "is revoked"),
            (Error::UnknownRevocationStatus, "is from its authority"),
            (Error::InvalidCrlSignatureForPublicKey, "is not signed"),
            (Error::BadDer, "malformed"),
            (Error::NameConstraintViolation, "rule of X.509"),
        ];
        for (error, expected) in all {
            let words = in_words(&error);
            assert!(words.contains(expected), "{words}, expected {expected}");
            let name = error.to_string();
            assert!(!words.contains(&name) && !words.contains('{'), "{words}");
        }
        let sha_1 = b"\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x01\x05\x05\x00";
        assert!(unsupported(sha_1, &[]).contains("SHA-1"));
        let p521 = b"\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x05\x2b\x81\x04\x00\x23";
        assert!(unsupported(&[6, 1, 1], p521).contains("P-521"));
        let long = unsupported(&[0xab; 4096], &[]);
        assert!(long.len() < 200 && long.contains("abab"), "{long}");
    }
}
