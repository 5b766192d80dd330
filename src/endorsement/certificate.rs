//! The certificate of an endorsement key ("TCG EK Credential Profile", §3), and its chain to a root.

use rustls::pki_types::{CertificateDer, SignatureVerificationAlgorithm, UnixTime};
use webpki::{EndEntityCert, ring as algorithms};

use base::der::{BIT_STRING, BOOLEAN, OBJECT_IDENTIFIER, OCTET_STRING, Reader, SEQUENCE, context};
use base::text;
use base::x509::may_certify;
use tpm::{Endorsement, EndorsementKind};

use crate::credential::EndorsementKey;
use crate::roots::Root;

/// tcg-kp-EKCertificate, 2.23.133.8.1: the content of the OID.
const EK_CERTIFICATE: &[u8] = &[0x67, 0x81, 0x05, 0x08, 0x01];
/// The extension key usage, 2.5.29.15 (RFC 5280 §4.2.1.3): the content of its OID.
const KEY_USAGE: &[u8] = &[0x55, 0x1d, 0x0f];
/// The extensions of a certificate (RFC 5280 §4.1): \[3\].
const EXTENSIONS: u8 = context(3);
/// Bits of the key usage: keyEncipherment (2) and keyAgreement (4), counted from the highest bit.
const KEY_ENCIPHERMENT: u8 = 0x80 >> 2;
const KEY_AGREEMENT: u8 = 0x80 >> 4;
/// Maximum number of certificates above that of the key that a peer may send.
const MAX_CHAIN: usize = 6;
/// Maximum size of a certificate in bytes: twice the size of the largest genuine ones.
const MAX_CERTIFICATE: usize = 4 << 10;
/// What vendors sign with.
const SIGNATURES: &[&dyn SignatureVerificationAlgorithm] = &[
    algorithms::RSA_PKCS1_2048_8192_SHA256,
    algorithms::RSA_PKCS1_2048_8192_SHA384,
    algorithms::RSA_PKCS1_2048_8192_SHA512,
    algorithms::ECDSA_P256_SHA256,
    algorithms::ECDSA_P256_SHA384,
    algorithms::ECDSA_P384_SHA256,
    algorithms::ECDSA_P384_SHA384,
];

/// Verifies the certificate of an endorsement key at a time; returns the key and the name of the root.
pub fn verify<'a>(
    endorsement: &Endorsement,
    roots: &'a [Root],
    time: UnixTime,
) -> Result<(EndorsementKey, &'a str), String> {
    let certificates = || endorsement.chain.iter().chain([&endorsement.certificate]);
    if endorsement.chain.len() > MAX_CHAIN {
        let count = endorsement.chain.len();
        return Err(format!(
            "it has a chain of {count} certificates, expected at most {MAX_CHAIN}"
        ));
    }
    if let Some(long) = certificates().find(|one| one.len() > MAX_CERTIFICATE) {
        let length = long.len();
        return Err(format!(
            "a certificate has {length} bytes, expected at most {MAX_CERTIFICATE}"
        ));
    }
    let certificate = CertificateDer::from(endorsement.certificate.as_slice());
    let certificate = EndEntityCert::try_from(&certificate)
        .map_err(|error| format!("it cannot be read: {}", text::of_error(error)))?;
    let root = find_root(&certificate, &endorsement.chain, roots, time)?;
    check_usage(endorsement)?;
    let info = certificate.subject_public_key_info();
    Ok((EndorsementKey::parse(endorsement.kind, &info)?, root))
}

/// Returns the name of the root that certifies a key.
fn find_root<'a>(
    certificate: &EndEntityCert<'_>,
    chain: &[Vec<u8>],
    roots: &'a [Root],
    time: UnixTime,
) -> Result<&'a str, String> {
    let mut why = None;
    for root in roots {
        let chain = chain.iter().map(|one| CertificateDer::from(one.as_slice()));
        let between: Vec<_> = root.between.iter().cloned().chain(chain).collect();
        let usage = webpki::KeyUsage::required_if_present(EK_CERTIFICATE);
        let anchors = std::slice::from_ref(&root.anchor);
        let verified = certificate.verify_for_usage(
            SIGNATURES,
            anchors,
            &between,
            time,
            usage,
            None,
            Some(&authorities_certify),
        );
        match verified {
            Ok(_) => return Ok(&root.name),
            // another root may be the right one; what is wrong under the right one says more
            Err(webpki::Error::UnknownIssuer) => {}
            Err(error) => why = why.or(Some((root, error))),
        }
    }
    Err(match why {
        Some((root, error)) => format!("under the root {:?}: {}", root.name, in_words(&error)),
        None => "it leads to none of the roots that the policy names".into(),
    })
}

fn authorities_certify(path: &webpki::VerifiedPath<'_>) -> Result<(), webpki::Error> {
    let mut between = path.intermediate_certificates();
    match between.all(|one| may_certify(&one.der())) {
        true => Ok(()),
        false => Err(webpki::Error::EndEntityUsedAsCa),
    }
}

fn in_words(error: &webpki::Error) -> String {
    use webpki::Error::*;
    match error {
        CertExpired { .. } => "a certificate has expired".into(),
        CertNotValidYet { .. } => {
            "a certificate is not valid yet: is the clock of this machine right?".into()
        }
        RequiredEkuNotFoundContext(_) => {
            "a certificate is for another use than an endorsement key (extended key usage)".into()
        }
        PathLenConstraintViolated => "the chain is longer than one of its authorities allows".into(),
        EndEntityUsedAsCa => "a certificate of the chain is not that of an authority".into(),
        InvalidSignatureForPublicKey => {
            "a signature is wrong: the certificate is altered, or from another authority with the same name".into()
        }
        error => text::of_error(error),
    }
}

/// Checks that the key usage is that of an endorsement key: the certificate of an attestation key differs only in this.
fn check_usage(endorsement: &Endorsement) -> Result<(), String> {
    let expected = match endorsement.kind {
        EndorsementKind::Rsa2048 => KEY_ENCIPHERMENT,
        EndorsementKind::P256 | EndorsementKind::P384 => KEY_AGREEMENT,
    };
    match key_usage(&endorsement.certificate) {
        Some(bits) if bits & expected != 0 => Ok(()),
        _ => Err("it is for another use than an endorsement key (key usage)".into()),
    }
}

/// Returns the first byte of the bits of the extension key usage, which webpki does not tell; `None` if the certificate has none.
fn key_usage(certificate: &[u8]) -> Option<u8> {
    let certificate = Reader::new(certificate).expect(SEQUENCE).ok()?;
    let mut fields = Reader::new(Reader::new(certificate).expect(SEQUENCE).ok()?);
    let extensions = loop {
        let (tag, content) = fields.read().ok()?;
        if tag == EXTENSIONS {
            break Reader::new(content).expect(SEQUENCE).ok()?;
        }
    };
    let mut extensions = Reader::new(extensions);
    loop {
        let mut extension = Reader::new(extensions.expect(SEQUENCE).ok()?);
        if extension.expect(OBJECT_IDENTIFIER).ok()? != KEY_USAGE {
            continue;
        }
        if extension.peek() == Some(BOOLEAN) {
            extension.read().ok()?; // critical
        }
        let bits = Reader::new(extension.expect(OCTET_STRING).ok()?).expect(BIT_STRING);
        // the first byte is the number of unused bits
        return bits.ok()?.get(1).copied();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    use rcgen::{
        BasicConstraints, Certificate, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa,
        Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P384_SHA384,
    };
    use support::mutation::mutations;

    const ENDORSEMENT: &[u64] = &[2, 23, 133, 8, 1];
    const ATTESTATION: &[u64] = &[2, 23, 133, 8, 3];

    /// 2030-01-01, within the validity of [`params`].
    fn now() -> UnixTime {
        UnixTime::since_unix_epoch(Duration::from_secs(1_893_456_000))
    }

    /// Returns what all certificates have in common.
    fn params(name: &str) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        params.not_after = rcgen::date_time_ymd(2040, 1, 1);
        params
    }

    fn authority_params(name: &str, path_length: BasicConstraints) -> CertificateParams {
        let mut params = params(name);
        params.is_ca = IsCa::Ca(path_length);
        params
    }

    /// Returns the parameters of a good certificate of an ECC endorsement key.
    fn endorsement_params() -> CertificateParams {
        let mut params = params("EK");
        params.key_usages = vec![KeyUsagePurpose::KeyAgreement];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::Other(ENDORSEMENT.to_vec())];
        params
    }

    struct Authority {
        certificate: Certificate,
        issuer: Issuer<'static, KeyPair>,
    }

    impl Authority {
        fn root() -> Authority {
            let params = authority_params("root", BasicConstraints::Unconstrained);
            let key = KeyPair::generate().unwrap();
            let certificate = params.self_signed(&key).unwrap();
            Authority {
                certificate,
                issuer: Issuer::new(params, key),
            }
        }

        fn below(&self, params: CertificateParams) -> Authority {
            let key = KeyPair::generate().unwrap();
            let certificate = params.signed_by(&key, &self.issuer).unwrap();
            Authority {
                certificate,
                issuer: Issuer::new(params, key),
            }
        }

        fn as_roots(&self) -> [Root; 1] {
            [Root::parse(&self.certificate.pem()).unwrap()]
        }

        fn endorse(&self, params: CertificateParams, above: &[&Authority]) -> Endorsement {
            let key = KeyPair::generate().unwrap();
            let certificate = params.signed_by(&key, &self.issuer).unwrap();
            let chain = above.iter().map(|one| one.certificate.der().to_vec());
            Endorsement {
                kind: EndorsementKind::P256,
                certificate: certificate.der().to_vec(),
                chain: chain.collect(),
            }
        }
    }

    fn refusal(endorsement: &Endorsement, roots: &[Root]) -> String {
        verify(endorsement, roots, now()).unwrap_err()
    }

    #[test]
    fn a_certificate_leads_to_its_root_also_over_others() {
        let (root, other) = (Authority::root(), Authority::root());
        let direct = root.endorse(endorsement_params(), &[]);
        let between = root.below(authority_params("CA", BasicConstraints::Constrained(0)));
        let longer = between.endorse(endorsement_params(), &[&between]);
        let [root, other] = [root, other].map(|one| one.as_roots().into_iter().next().unwrap());
        let roots = [other, root];
        for endorsement in [direct, longer] {
            let (key, found) = verify(&endorsement, &roots, now()).unwrap();
            assert!(matches!(key, EndorsementKey::P256(_)));
            assert_eq!(found, roots[1].name);
            assert_eq!(found.len(), 64, "a root without a name has its fingerprint");
        }
    }

    #[test]
    fn dates_are_compared_with_the_clock() {
        let root = Authority::root();
        let roots = root.as_roots();
        let mut expired = endorsement_params();
        expired.not_after = rcgen::date_time_ymd(2029, 12, 31);
        let mut early = endorsement_params();
        early.not_before = rcgen::date_time_ymd(2030, 1, 2);
        for (params, why) in [(expired, "has expired"), (early, "is not valid yet")] {
            let error = refusal(&root.endorse(params, &[]), &roots);
            assert!(error.contains(why), "{error}");
        }
        let mut last_year = authority_params("CA", BasicConstraints::Unconstrained);
        last_year.not_after = rcgen::date_time_ymd(2029, 1, 1);
        let between = root.below(last_year);
        let error = refusal(&between.endorse(endorsement_params(), &[&between]), &roots);
        assert!(error.contains("has expired"), "{error}");
        // what TPMs have whose certificate never ends
        let mut always = endorsement_params();
        always.not_after = rcgen::date_time_ymd(9999, 12, 31);
        assert!(verify(&root.endorse(always, &[]), &roots, now()).is_ok());
    }

    #[test]
    fn each_wrong_certificate_is_refused_by_its_own_text() {
        let (root, other) = (Authority::root(), Authority::root());
        let roots = root.as_roots();
        let none = refusal(&root.endorse(endorsement_params(), &[]), &[]);
        assert!(none.contains("none of the roots"), "{none}");
        let of_another = refusal(&other.endorse(endorsement_params(), &[]), &roots);
        assert!(of_another.contains("a signature is wrong"), "{of_another}");

        let mut signing = endorsement_params();
        signing.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let mut without_usage = endorsement_params();
        without_usage.key_usages.clear();
        let mut attesting = endorsement_params();
        attesting.extended_key_usages = vec![ExtendedKeyUsagePurpose::Other(ATTESTATION.to_vec())];
        let mut of_ca = endorsement_params();
        of_ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        for (params, why) in [
            (signing, "(key usage)"),
            (without_usage, "(key usage)"),
            (attesting, "(extended key usage)"),
            (of_ca, "CaUsedAsEndEntity"),
        ] {
            let error = refusal(&root.endorse(params, &[]), &roots);
            assert!(error.contains(why), "{error}, expected: {why}");
        }
        let mut other_kind = root.endorse(endorsement_params(), &[]);
        other_kind.kind = EndorsementKind::P384;
        let error = refusal(&other_kind, &roots);
        assert!(error.contains("not of the template P384"), "{error}");
    }

    #[test]
    fn chains_keep_to_what_their_authorities_allow() {
        let root = Authority::root();
        let roots = root.as_roots();
        let one = root.below(authority_params("1", BasicConstraints::Constrained(0)));
        let two = one.below(authority_params("2", BasicConstraints::Unconstrained));
        let error = refusal(&two.endorse(endorsement_params(), &[&two, &one]), &roots);
        assert!(error.contains("longer than one"), "{error}");
        // an endorsement key is no authority
        let leaf = root.below(endorsement_params());
        let error = refusal(&leaf.endorse(endorsement_params(), &[&leaf]), &roots);
        assert!(error.contains("not that of an authority"), "{error}");
        let mut many = root.endorse(endorsement_params(), &[]);
        many.chain = vec![vec![]; MAX_CHAIN + 1];
        let error = refusal(&many, &roots);
        assert!(error.contains("a chain of 7 certificates"), "{error}");
        many.chain = vec![vec![0; MAX_CERTIFICATE + 1]];
        let error = refusal(&many, &roots);
        assert!(error.contains("4097 bytes"), "{error}");
    }

    #[test]
    fn altered_certificates_are_refused_without_a_panic() {
        let root = Authority::root();
        let roots = root.as_roots();
        let between = root.below(authority_params("CA", BasicConstraints::Unconstrained));
        let good = between.endorse(endorsement_params(), &[&between]);
        for certificate in mutations(&good.certificate, 1500) {
            let altered = Endorsement {
                certificate,
                ..good.clone()
            };
            let _ = key_usage(&altered.certificate);
            if altered != good {
                assert!(verify(&altered, &roots, now()).is_err());
            }
        }
        for certificate in mutations(&good.chain[0], 500) {
            let altered = Endorsement {
                chain: vec![certificate],
                ..good.clone()
            };
            if altered != good {
                assert!(verify(&altered, &roots, now()).is_err());
            }
        }
    }

    #[test]
    fn a_key_on_the_curve_p384_is_of_its_template() {
        let root = Authority::root();
        let key = KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).unwrap();
        let certificate = endorsement_params().signed_by(&key, &root.issuer).unwrap();
        let endorsement = Endorsement {
            kind: EndorsementKind::P384,
            certificate: certificate.der().to_vec(),
            chain: vec![],
        };
        let roots = root.as_roots();
        let (key, _) = verify(&endorsement, &roots, now()).unwrap();
        assert!(matches!(key, EndorsementKey::P384(_)));
    }
}
