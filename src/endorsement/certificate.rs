//! The certificate of an endorsement key ("TCG EK Credential Profile", §3), and its chain to a
//! root.

use rustls::pki_types::{CertificateDer, UnixTime};
use webpki::EndEntityCert;

use ::roots::chain::{authorities_certify, in_words};
use base::x509::{Certificate, KEY_AGREEMENT, KEY_ENCIPHERMENT};
use tpm::{EndorsementKind, KeyEndorsement};
use verifier::refusal::{Kind, Refusal};

use crate::credential::EndorsementKey;
use crate::path::{self, EK_CERTIFICATE, MAX_CHAIN, NoPath, SIGNATURES};
use crate::roots::TpmRoot;

/// Maximum size of a certificate in bytes: twice the size of the largest genuine ones.
const MAX_CERTIFICATE: usize = 4 << 10;

/// Verifies the certificate of an endorsement key at a time; returns the key and the name of the
/// root.
pub fn verify<'a>(
    endorsement: &KeyEndorsement,
    roots: &'a [TpmRoot],
    time: UnixTime,
) -> Result<(EndorsementKey, &'a str), Refusal> {
    let certificates = || endorsement.chain.iter().chain([&endorsement.certificate]);
    if endorsement.chain.len() > MAX_CHAIN {
        let count = endorsement.chain.len();
        return Err(Kind::Malformed.because(format!(
            "it has a chain of {count} certificates, expected at most {MAX_CHAIN}"
        )));
    }
    if let Some(long) = certificates().find(|one| one.len() > MAX_CERTIFICATE) {
        let length = long.len();
        return Err(Kind::Malformed.because(format!(
            "a certificate has {length} bytes, expected at most {MAX_CERTIFICATE}"
        )));
    }
    let fields = Certificate::parse(&endorsement.certificate);
    let fields = fields.map_err(|_| Kind::Malformed.because("it cannot be read"))?;
    let root = find_root(&endorsement.certificate, &endorsement.chain, roots, time)?;
    check_usage(endorsement.kind, &fields)?;
    let key = EndorsementKey::parse(endorsement.kind, fields.key())?;
    Ok((key, root))
}

/// Returns whether this is a certificate of an endorsement key, whoever signed it.
pub fn is_of_endorsement_key(endorsement: &KeyEndorsement) -> bool {
    let fields = Certificate::parse(&endorsement.certificate);
    endorsement.certificate.len() <= MAX_CERTIFICATE
        && fields.is_ok_and(|fields| check_usage(endorsement.kind, &fields).is_ok())
}

/// Returns the name of the root that certifies a key.
fn find_root<'a>(
    certificate: &[u8],
    chain: &[Vec<u8>],
    roots: &'a [TpmRoot],
    time: UnixTime,
) -> Result<&'a str, Refusal> {
    let der = CertificateDer::from(certificate);
    let leaf = EndEntityCert::try_from(&der);
    let mut why = None;
    for root in roots {
        let chain = chain.iter().map(|one| CertificateDer::from(one.as_slice()));
        let between: Vec<_> = root.between.iter().cloned().chain(chain).collect();
        let usage = webpki::KeyUsage::required_if_present(EK_CERTIFICATE);
        let anchors = std::slice::from_ref(&root.anchor);
        let check: Option<&dyn Fn(&webpki::VerifiedPath<'_>) -> _> = Some(&authorities_certify);
        let verified = leaf.as_ref().map_err(Clone::clone).and_then(|leaf| {
            let verified =
                leaf.verify_for_usage(SIGNATURES, anchors, &between, time, usage, None, check);
            verified.map(drop)
        });
        let refused = match verified {
            Ok(()) => return Ok(&root.name),
            Err(error)
                if error == webpki::Error::UnknownIssuer || is_of_policies(&error, &between) =>
            {
                match path::verify(certificate, &between, &root.anchor, time.as_secs()) {
                    Ok(()) => return Ok(&root.name),
                    // Keep trying. Remember other errors: if the root issued the certificate, they
                    // are the useful ones.
                    Err(NoPath::UnknownIssuer) => continue,
                    Err(NoPath::Refused(why)) => why,
                }
            }
            Err(error) => roots::chain::kind(&error).because(in_words(&error)),
        };
        why = why.or(Some((root, refused)));
    }
    Err(match why {
        Some((root, refused)) => {
            refused.reworded(|why| format!("under the root {:?}: {why}", root.name))
        }
        None => Kind::Chain.because("it leads to none of the roots that the policy names"),
    })
}

/// Returns whether the library may have refused a certificate because it cannot read it. Then its
/// error can be about another certificate.
fn is_of_policies(error: &webpki::Error, between: &[CertificateDer<'_>]) -> bool {
    let unreadable = webpki::Error::UnsupportedCriticalExtension;
    let cannot_be_read =
        |one: &CertificateDer<'_>| EndEntityCert::try_from(one).err().as_ref() == Some(&unreadable);
    *error == unreadable || between.iter().any(cannot_be_read)
}

/// Checks that the key usage is that of an endorsement key: an attestation key's certificate
/// differs only in this.
fn check_usage(kind: EndorsementKind, certificate: &Certificate<'_>) -> Result<(), Refusal> {
    let expected = match kind {
        EndorsementKind::Rsa2048 => KEY_ENCIPHERMENT,
        EndorsementKind::P256 | EndorsementKind::P384 => KEY_AGREEMENT,
    };
    match certificate.key_usage() {
        Some(bits) if bits & expected != 0 => Ok(()),
        _ => {
            let why = "it is for another use than an endorsement key (key usage)";
            Err(Kind::Certificate.because(why))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use rcgen::{
        BasicConstraints, Certificate, CertificateParams, CustomExtension, DistinguishedName,
        DnType, DnValue, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
        PKCS_ECDSA_P384_SHA384,
    };
    use rustls::pki_types::pem::PemObject;
    use support::mutation::mutations;
    use support::openssl::openssl;
    use verifier::sources::Sources;
    use verifier::sources::Unavailable;
    use verifier::{
        CredentialChallenge, Evidence, Identified, MachineIdentity, Policy, Properties, Validator,
    };

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

    /// Returns the parameters of a valid certificate of an ECC endorsement key.
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

        fn as_roots(&self) -> [TpmRoot; 1] {
            [TpmRoot::parse(&self.certificate.pem()).unwrap()]
        }

        fn endorse(&self, params: CertificateParams, above: &[&Authority]) -> KeyEndorsement {
            let key = KeyPair::generate().unwrap();
            let certificate = params.signed_by(&key, &self.issuer).unwrap();
            let chain = above.iter().map(|one| one.certificate.der().to_vec());
            KeyEndorsement {
                kind: EndorsementKind::P256,
                certificate: certificate.der().to_vec(),
                chain: chain.collect(),
            }
        }
    }

    fn refusal(endorsement: &KeyEndorsement, roots: &[TpmRoot]) -> String {
        verify(endorsement, roots, now()).unwrap_err().to_string()
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

    /// Sources with the certificate of one authority, which count the requests and what is kept.
    #[derive(Default)]
    struct Published(Option<Vec<u8>>, Mutex<(usize, usize)>);

    impl Sources for Published {
        fn issuer(&self, _: &[u8]) -> Result<Option<Vec<u8>>, Unavailable> {
            self.1.lock().unwrap().0 += 1;
            Ok(self.0.clone())
        }

        fn keep_issuer(&self, _: &[u8]) {
            self.1.lock().unwrap().1 += 1;
        }
    }

    struct Any;

    impl Validator for Any {
        fn properties(&self) -> Properties {
            unreachable!()
        }

        fn challenge(&self, _: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
            unreachable!()
        }

        fn of_connection(&self) -> Option<Arc<dyn Validator>> {
            None
        }

        fn judge(&self, _: &Evidence<'_>) -> Result<Identified, Refusal> {
            unreachable!()
        }
    }

    /// As machines of Google, whose authorities are replaced.
    #[test]
    fn an_authority_that_the_machine_does_not_send_is_fetched_for_an_endorsement_key_only() {
        let root = Authority::root();
        let between = root.below(authority_params("CA", BasicConstraints::Constrained(0)));
        let strange = root.below(authority_params("CA", BasicConstraints::Constrained(0)));
        let endorsed = between.endorse(endorsement_params(), &[]);
        let mut params = endorsement_params();
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let of_signing_key = between.endorse(params, &[]);
        let pem = root
            .certificate
            .pem()
            .replace('\n', "\\n")
            .replace('\r', "");
        let policy = format!(
            r#"{{"measurements": {{"15": {{"expected": "{}"}}}}, "endorsementRoots": ["{pem}"]}}"#,
            "00".repeat(32)
        );
        let policy = Policy::from_json(&policy).unwrap();
        let of = |one: &Authority| Some(one.certificate.der().to_vec());
        for (endorsement, published, expected, counts) in [
            (&endorsed, of(&between), Ok(()), (1, 1)),
            (&endorsed, of(&strange), Err("a signature is wrong"), (1, 0)),
            (&endorsed, None, Err("none of the roots"), (1, 0)),
            (
                &of_signing_key,
                of(&between),
                Err("none of the roots"),
                (0, 0),
            ),
        ] {
            let sources = Arc::new(Published(published, Mutex::default()));
            let shared: Arc<dyn Sources> = sources.clone();
            let judge = crate::validator::certifying(Arc::new(Any), &policy, &shared).unwrap();
            let made = judge.challenge(&MachineIdentity {
                key: crate::attestation_key::tests::rsa(0x0005_0072, 0x0b, 0x14, 0x0b),
                endorsements: vec![endorsement.clone()],
            });
            match (made, expected) {
                (Ok(Some(_)), Ok(())) => {}
                (Err(why), Err(expected)) => {
                    assert!(
                        why.to_string().contains(expected),
                        "{why}, expected {expected}"
                    )
                }
                (made, expected) => panic!("{:?}, expected {expected:?}", made.map(drop)),
            }
            assert_eq!(*sources.1.lock().unwrap(), counts);
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
        // TPMs whose certificate never expires have this value
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
            (of_ca, "is a CA certificate"),
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
        // an endorsement key is not a CA
        let leaf = root.below(endorsement_params());
        let error = refusal(&leaf.endorse(endorsement_params(), &[&leaf]), &roots);
        assert!(error.contains("not a CA certificate"), "{error}");
        let mut many = root.endorse(endorsement_params(), &[]);
        many.chain = vec![vec![]; MAX_CHAIN + 1];
        let error = refusal(&many, &roots);
        assert!(error.contains("a chain of 7 certificates"), "{error}");
        many.chain = vec![vec![0; MAX_CERTIFICATE + 1]];
        let error = refusal(&many, &roots);
        assert!(error.contains("4097 bytes"), "{error}");
    }

    /// Returns the authority that writes its name in this form as the issuer.
    fn renamed(authority: Authority, params: CertificateParams, name: DnValue) -> Authority {
        let mut params = params;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::from_pem(&authority.issuer.key().serialize_pem()).unwrap();
        Authority {
            certificate: authority.certificate,
            issuer: Issuer::new(params, key),
        }
    }

    #[test]
    fn the_encoding_of_an_issuers_name_does_not_matter() {
        let of = |name| authority_params(name, BasicConstraints::Unconstrained);
        let printable = |name: &str| DnValue::PrintableString(name.try_into().unwrap());
        let root = renamed(Authority::root(), of("root"), printable("Root"));
        let roots = root.as_roots();
        let direct = root.endorse(endorsement_params(), &[]);
        let between = renamed(root.below(of("CA 1")), of("CA 1"), printable("CA  1"));
        let longer = between.endorse(endorsement_params(), &[&between]);
        for endorsement in [direct, longer] {
            verify(&endorsement, &roots, now()).unwrap();
        }
        // what is checked of others is checked of these
        let mut expired = endorsement_params();
        expired.not_after = rcgen::date_time_ymd(2029, 12, 31);
        let mut attesting = endorsement_params();
        attesting.extended_key_usages = vec![ExtendedKeyUsagePurpose::Other(ATTESTATION.to_vec())];
        for (params, why) in [
            (expired, "has expired"),
            (attesting, "(extended key usage)"),
        ] {
            let error = refusal(&root.endorse(params, &[]), &roots);
            assert!(error.contains(why), "{error}, expected {why}");
        }
        let other = renamed(Authority::root(), of("root"), printable("Root 2"));
        let error = refusal(&other.endorse(endorsement_params(), &[]), &roots);
        assert!(error.contains("none of the roots"), "{error}");
        let same_name = renamed(Authority::root(), of("root"), printable("ROOT"));
        let error = refusal(&same_name.endorse(endorsement_params(), &[]), &roots);
        assert!(error.contains("a signature is wrong"), "{error}");
    }

    /// Marks the policies of a certificate as critical: any-policy, as STM writes them.
    fn with_policies(mut params: CertificateParams, oid: &[u64]) -> CertificateParams {
        // SEQUENCE { SEQUENCE { 2.5.29.32.0 } }
        let any = vec![0x30, 8, 0x30, 6, 6, 4, 0x55, 0x1d, 0x20, 0];
        let mut extension = CustomExtension::from_oid_content(oid, any);
        extension.set_criticality(true);
        params.custom_extensions = vec![extension];
        params
    }

    const POLICIES: &[u64] = &[2, 5, 29, 32];

    #[test]
    fn critical_policies_limit_nothing_and_all_else_is_checked() {
        let (root, other) = (Authority::root(), Authority::root());
        let roots = root.as_roots();
        let authority = |name, length| {
            let params = authority_params(name, BasicConstraints::Constrained(length));
            with_policies(params, POLICIES)
        };
        let one = root.below(authority("1", 1));
        let plain = one.below(authority_params("2", BasicConstraints::Constrained(0)));
        let two = one.below(authority("2", 0));
        let mut old = authority_params("2", BasicConstraints::Unconstrained);
        old.not_after = rcgen::date_time_ymd(2029, 1, 1);
        let old = root.below(old);
        let leaf = || with_policies(endorsement_params(), POLICIES);
        for endorsement in [
            one.endorse(endorsement_params(), &[&one]),
            one.endorse(leaf(), &[&one]),
            root.endorse(leaf(), &[]),
            two.endorse(leaf(), &[&two, &one]),
            plain.endorse(leaf(), &[&one, &plain]),
            // an older CA of the same name
            two.endorse(leaf(), &[&old, &two, &one]),
            two.endorse(endorsement_params(), &[&old, &two, &one]),
            // CAs of the same name, in any order
            plain.endorse(endorsement_params(), &[&two, &plain, &one]),
            two.endorse(endorsement_params(), &[&plain, &one, &two]),
        ] {
            let (_, found) = verify(&endorsement, &roots, now()).unwrap();
            assert_eq!(found, roots[0].name);
        }

        let three = two.below(authority("3", 0));
        let mut attesting = leaf();
        attesting.extended_key_usages = vec![ExtendedKeyUsagePurpose::Other(ATTESTATION.to_vec())];
        let mut signing = leaf();
        signing.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        let mut of_ca = leaf();
        of_ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let mut expired = authority("old", 1);
        expired.not_after = rcgen::date_time_ymd(2029, 1, 1);
        let expired = root.below(expired);
        let mut early = leaf();
        early.not_before = rcgen::date_time_ymd(2031, 1, 1);
        let mut without_signing = authority("no", 1);
        without_signing.key_usages = vec![KeyUsagePurpose::CrlSign];
        let without_signing = root.below(without_signing);
        let not_ca = root.below(leaf());
        let mut only_signing = leaf();
        only_signing.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let only_signing = root.below(only_signing);
        let mut limited = authority("names", 1);
        limited.name_constraints = Some(rcgen::NameConstraints {
            permitted_subtrees: vec![rcgen::GeneralSubtree::DnsName("example".into())],
            excluded_subtrees: vec![],
        });
        let limited = root.below(limited);
        // requireExplicitPolicy would require a policy
        let strict = root.below(with_policies(
            authority_params("strict", BasicConstraints::Unconstrained),
            &[2, 5, 29, 36],
        ));
        for (endorsement, why) in [
            (
                three.endorse(leaf(), &[&three, &two, &one]),
                "longer than one",
            ),
            (one.endorse(attesting, &[&one]), "(extended key usage)"),
            (one.endorse(signing, &[&one]), "(key usage)"),
            (one.endorse(of_ca, &[&one]), "is a CA certificate"),
            (expired.endorse(leaf(), &[&expired]), "has expired"),
            (one.endorse(early, &[&one]), "is not valid yet"),
            (
                without_signing.endorse(leaf(), &[&without_signing]),
                "not a CA certificate",
            ),
            (not_ca.endorse(leaf(), &[&not_ca]), "not a CA certificate"),
            (
                only_signing.endorse(leaf(), &[&only_signing]),
                "not a CA certificate",
            ),
            (limited.endorse(leaf(), &[&limited]), "name constraints"),
            (strict.endorse(leaf(), &[&strict]), "critical extension"),
            (other.endorse(leaf(), &[]), "a signature is wrong"),
            (two.endorse(leaf(), &[&two]), "none of the roots"),
        ] {
            let error = refusal(&endorsement, &roots);
            assert!(
                error.contains(why) && !error.contains('{'),
                "{error}, expected: {why}"
            );
        }
        // many CAs of one name cause no more than a few signature checks
        let many: Vec<_> = (0..MAX_CHAIN)
            .map(|_| other.below(authority("1", 1)))
            .collect();
        let many: Vec<_> = many.iter().collect();
        let error = refusal(&one.endorse(leaf(), &many), &roots);
        assert!(error.contains("a signature is wrong"), "{error}");
        // a CA that certifies itself: without a limit, each copy would be tried below each other
        // one
        let error = refusal(&other.endorse(leaf(), &[&other; MAX_CHAIN]), &roots);
        assert!(error.contains("too many authorities"), "{error}");

        let good = two.endorse(leaf(), &[&two, &one]);
        check_alterations(&good, &roots, 1500);
    }

    /// Checks that no altered certificate of a key or of its authority is accepted.
    fn check_alterations(good: &KeyEndorsement, roots: &[TpmRoot], of_authority: usize) {
        let keys = mutations(&good.certificate, 1500).map(|certificate| KeyEndorsement {
            certificate,
            ..good.clone()
        });
        let authorities = mutations(&good.chain[0], of_authority).map(|certificate| {
            let mut altered = good.clone();
            altered.chain[0] = certificate;
            altered
        });
        for altered in keys.chain(authorities) {
            if altered != *good {
                assert!(verify(&altered, roots, now()).is_err());
            }
        }
    }

    /// Certificates that OpenSSL signs with this algorithm: a root, and an endorsement key.
    fn signed_with(key: &str, options: &str) -> (TpmRoot, KeyEndorsement) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let ca = "basicConstraints=critical,CA:TRUE";
        openssl(
            path,
            &format!(
                "req -x509 -newkey {key} -noenc -keyout ca.key -out ca.pem -subj /CN=root -days 30 -addext {ca} {options}"
            ),
        );
        openssl(
            path,
            "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc -keyout ek.key -out ek.csr -subj /CN=EK",
        );
        std::fs::write(
            path.join("ext"),
            "keyUsage=keyAgreement\nextendedKeyUsage=2.23.133.8.1\n",
        )
        .unwrap();
        openssl(
            path,
            &format!(
                "x509 -req -in ek.csr -CA ca.pem -CAkey ca.key -out ek.pem -days 30 -extfile ext {options}"
            ),
        );
        let root = TpmRoot::parse(&std::fs::read_to_string(path.join("ca.pem")).unwrap()).unwrap();
        let certificate = CertificateDer::from_pem_file(path.join("ek.pem")).unwrap();
        let endorsement = KeyEndorsement {
            kind: EndorsementKind::P256,
            certificate: certificate.to_vec(),
            chain: vec![],
        };
        (root, endorsement)
    }

    #[test]
    fn each_signature_algorithm_is_accepted_or_refused_by_a_sentence() {
        let salt = "-sigopt rsa_padding_mode:pss -sigopt rsa_pss_saltlen:digest";
        for (key, options, why) in [
            ("rsa:2048", "-sha256".to_owned(), None),
            ("rsa:2048", format!("-sha256 {salt}"), None),
            ("rsa:2048", format!("-sha384 {salt}"), None),
            ("rsa:2048", format!("-sha512 {salt}"), None),
            (
                "rsa:2048",
                "-sha1".into(),
                Some("signed with SHA-1, which is not safe"),
            ),
            (
                "rsa:2048",
                format!("-sha1 {salt}"),
                Some("this program does not verify"),
            ),
            (
                "ec -pkeyopt ec_paramgen_curve:P-256",
                "-sha1".into(),
                Some("signed with SHA-1, which is not safe"),
            ),
            (
                "ec -pkeyopt ec_paramgen_curve:P-521",
                "-sha512".into(),
                Some("this program does not verify"),
            ),
            (
                "ec -pkeyopt ec_paramgen_curve:P-521",
                "-sha384".into(),
                Some("a key on the curve P-521, which this program does not verify"),
            ),
        ] {
            let (root, endorsement) = signed_with(key, &options);
            let verified = verify(&endorsement, &[root], UnixTime::now()).map(drop);
            match why {
                None => assert_eq!(verified, Ok(()), "{key} {options}"),
                Some(why) => {
                    let error = verified.unwrap_err();
                    assert!(
                        error.text.contains(why) && !error.text.contains('{'),
                        "{key} {options}: {error}"
                    );
                }
            }
        }
    }

    #[test]
    fn altered_certificates_are_refused_without_a_panic() {
        let root = Authority::root();
        let roots = root.as_roots();
        let between = root.below(authority_params("CA", BasicConstraints::Unconstrained));
        let good = between.endorse(endorsement_params(), &[&between]);
        check_alterations(&good, &roots, 500);
    }

    #[test]
    fn a_key_on_the_curve_p384_is_of_its_template() {
        let root = Authority::root();
        let key = KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).unwrap();
        let certificate = endorsement_params().signed_by(&key, &root.issuer).unwrap();
        let endorsement = KeyEndorsement {
            kind: EndorsementKind::P384,
            certificate: certificate.der().to_vec(),
            chain: vec![],
        };
        let roots = root.as_roots();
        let (key, _) = verify(&endorsement, &roots, now()).unwrap();
        assert!(matches!(key, EndorsementKey::P384(_)));
    }
}
