//! Quotes that a hierarchy of the tests signs, each with one fault: each is refused, and the error names the fault.

use common::long_certificate::with_long_algorithm;
use hardware::Refusal;
use hardware::refusal::Kind;
use hardware::tdx::dcap::named_platform;
use rcgen::{
    CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose, date_time_ymd,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use super::forged::{AUTHORITY, PCK, Parts, ROOT, SIGNER, Signed, revoked};
use super::*;

type Change<'a> = &'a dyn Fn(&mut Parts);

/// Returns the verdict on a signed quote under these requirements: the status, and how long the collateral has been valid in days.
fn verdict(signed: &Signed, demands: &TdxRequirements) -> Result<(TcbStatus, u64), Refusal> {
    let quote = TdxQuote::parse(&signed.quote)?;
    let verified = signed
        .verifier()
        .verify(quote, &signed.collateral, JULY_2025)?;
    demands.judge(&verified)?;
    let age = verified.collateral_age().as_secs() / 86_400;
    Ok((verified.status(), age))
}

fn judged_by(demands: &str, change: Change<'_>) -> Result<(TcbStatus, u64), Refusal> {
    let mut parts = Parts::default();
    change(&mut parts);
    verdict(
        &parts.sign(&[7; 64]),
        &serde_json::from_str(demands).unwrap(),
    )
}

fn judged(change: Change<'_>) -> Result<(TcbStatus, u64), Refusal> {
    judged_by("{}", change)
}

/// Checks that each change is refused, with one of these kinds and these words.
fn all_refused(kinds: &[Kind], cases: &[(Change<'_>, &str)]) {
    for (change, why) in cases {
        let refusal = judged(*change).expect_err(why);
        assert!(refusal.text.contains(why), "expected {why:?}: {refusal}");
        assert!(kinds.contains(&refusal.kind), "{refusal:?}");
    }
}

#[test]
fn a_machine_with_nothing_wrong_is_accepted() {
    assert_eq!(judged(&|_| {}), Ok((TcbStatus::UpToDate, 11)));
    let processor = |it: &mut Parts| name(&mut it.authority, "Intel SGX PCK Processor CA");
    judged(&processor).unwrap();
    for kind in [3, 4] {
        let now = [4, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3];
        judged(&|it| it.version_5(kind, now)).unwrap();
    }
}

fn name(params: &mut CertificateParams, name: &str) {
    params.distinguished_name.push(DnType::CommonName, name);
}

#[test]
fn a_certificate_that_a_list_revokes_is_refused() {
    let is_revoked = "it, or its authority, is revoked";
    let no_list = "no list of revoked certificates (CRL) is from its authority";
    all_refused(
        &[Kind::Revoked],
        &[
            (
                &|it| it.pck_list.revoked_certs = vec![revoked(PCK)],
                "the PCK certificate: it, or its authority, is revoked",
            ),
            (
                &|it| it.pck_list.revoked_certs = vec![revoked(99), revoked(PCK)],
                is_revoked,
            ),
            (
                &|it| it.root_list.revoked_certs = vec![revoked(AUTHORITY)],
                "the PCK certificate: it, or its authority, is revoked",
            ),
            (
                &|it| it.root_list.revoked_certs = vec![revoked(SIGNER)],
                "the TCB information signer's certificate: it, or its authority, is revoked",
            ),
            (
                &|it| it.root_list.revoked_certs = vec![revoked(ROOT)],
                "the root is revoked",
            ),
        ],
    );
    // other numbers, and those of another list, have no effect
    judged(&|it| it.pck_list.revoked_certs = vec![revoked(99), revoked(AUTHORITY)]).unwrap();
    judged(&|it| it.root_list.revoked_certs = vec![revoked(99), revoked(PCK)]).unwrap();

    let lists = |change: fn(&mut Signed)| {
        let mut signed = Parts::default().sign(&[7; 64]);
        change(&mut signed);
        verdict(&signed, &TdxRequirements::default()).unwrap_err()
    };
    let other = || Parts::default().sign(&[7; 64]).collateral;
    for (error, why) in [
        (
            lists(|it| it.collateral.pck_crl = it.collateral.root_ca_crl.clone()),
            no_list,
        ),
        (
            lists(|it| it.collateral.root_ca_crl = it.collateral.pck_crl.clone()),
            no_list,
        ),
        (
            lists(|it| it.collateral.pck_crl.0.clear()),
            "the PCK CRL cannot be read",
        ),
        (
            lists(|it| it.collateral.root_ca_crl.0.clear()),
            "the root CRL cannot be read",
        ),
        (
            lists(|it| std::mem::swap(&mut it.collateral.pck_crl, &mut it.collateral.root_ca_crl)),
            "the root CRL was not issued by the root",
        ),
        (
            lists(|it| it.collateral.pck_crl.0.resize(300 << 10, 0)),
            "the PCK CRL has 307200 bytes, expected at most 262144",
        ),
    ] {
        assert!(error.text.contains(why), "expected {why:?}: {error}");
    }
    // lists of the same names, signed by other keys
    for change in [
        |it: &mut Signed, other: TdxCollateral| it.collateral.pck_crl = other.pck_crl,
        |it: &mut Signed, other: TdxCollateral| it.collateral.root_ca_crl = other.root_ca_crl,
    ] {
        let mut signed = Parts::default().sign(&[7; 64]);
        change(&mut signed, other());
        let error = verdict(&signed, &TdxRequirements::default()).unwrap_err();
        assert!(error.text.contains("certificate: "), "{error}");
    }
}

/// Returns a text of one letter that lives as long as the tests.
fn long(len: usize) -> &'static str {
    Box::leak("A".repeat(len).into_boxed_str())
}

fn pem(der: &[u8]) -> String {
    let base64 = base64::Engine::encode(&base64::engine::general_purpose::STANDARD, der);
    format!("-----BEGIN CERTIFICATE-----\n{base64}\n-----END CERTIFICATE-----\n")
}

/// Each refusal goes to a log, and any peer that can reach a service can cause one.
#[test]
fn a_refusal_is_short_whatever_a_machine_sends() {
    const TEXT: usize = 30 << 10;
    let check = |what: &str, why: Refusal| assert!(why.text.len() < 1000, "{what}: {why}");
    let usages = || {
        let usages = 0..2000;
        usages.map(|it| ExtendedKeyUsagePurpose::Other(vec![1, 3, 6, 1, 4, 1, 99999, it]))
    };
    let quoted = |start: &str, end: &str| -> &'static str {
        Box::leak(format!("{start}{}{end}", long(TEXT)).into_boxed_str())
    };
    let wrong_type = quoted("\"version\":\"", "\"");
    let wrong_id = quoted("\"id\":\"", "\"");
    let wrong_fmspc = quoted("\"fmspc\":\"", "\"");
    let cases: [(&str, Change<'_>); 10] = [
        ("PCK", &|it| it.pck.extended_key_usages = usages().collect()),
        ("signer", &|it| {
            it.signer.extended_key_usages = usages().collect()
        }),
        ("name of the PCK", &|it| name(&mut it.pck, long(TEXT))),
        ("name of the signer", &|it| name(&mut it.signer, long(TEXT))),
        ("status", &|it| it.status = long(TEXT)),
        ("status of the enclave", &|it| it.qe_status = long(TEXT)),
        ("type", &|it| it.info = vec![("\"version\":3", wrong_type)]),
        ("TCB information", &|it| {
            it.info = vec![("\"id\":\"TDX\"", wrong_id)]
        }),
        ("platforms", &|it| {
            it.info = vec![("\"fmspc\":\"ABABABABABAB\"", wrong_fmspc)]
        }),
        ("identity", &|it| {
            it.identity = vec![("\"id\":\"TD_QE\"", wrong_id)]
        }),
    ];
    for (what, change) in cases {
        check(what, judged(change).expect_err(what));
    }

    let good = Parts::default().sign(&[7; 64]);
    let chain = TdxQuote::parse(&good.quote).unwrap().pck_chain;
    let chain: Vec<_> = CertificateDer::pem_slice_iter(chain)
        .map(Result::unwrap)
        .collect();
    let mut algorithm = pem(&with_long_algorithm(&chain[0], TEXT));
    chain[1..].iter().for_each(|it| algorithm += &pem(it));
    let letters = long(TEXT);
    for text in [
        format!("-----BEGIN {letters}"),
        format!("-----BEGIN {letters}-----\n"),
        format!("-----BEGIN CERTIFICATE-----\n{letters}!\n-----END CERTIFICATE-----\n"),
        pem(letters.as_bytes()),
        algorithm,
    ] {
        let start = &text[..text.len().min(40)];
        let mut quote = TdxQuote::parse(&good.quote).unwrap();
        quote.pck_chain = text.as_bytes();
        // the algorithm is not read
        if let Err(why) = named_platform(&quote) {
            check(start, why);
        }
        let error = good.verifier().verify(quote, &good.collateral, JULY_2025);
        check(start, error.unwrap_err());
        for change in [
            |it: &mut TdxCollateral, text: String| it.tcb_info_issuer_chain = text,
            |it: &mut TdxCollateral, text: String| it.qe_identity_issuer_chain = text,
            |it: &mut TdxCollateral, text: String| it.root_ca_crl.0 = text.into(),
            |it: &mut TdxCollateral, text: String| it.pck_crl.0 = text.into(),
        ] {
            let mut collateral = good.collateral.clone();
            change(&mut collateral, text.clone());
            let quote = TdxQuote::parse(&good.quote).unwrap();
            let error = good.verifier().verify(quote, &collateral, JULY_2025);
            check(start, error.unwrap_err());
        }
    }
}

#[test]
fn what_has_ended_or_not_begun_is_refused() {
    let (june, july) = (date_time_ymd(2025, 6, 30), date_time_ymd(2025, 7, 2));
    all_refused(
        &[Kind::Expired],
        &[
            (
                &|it| it.pck_list.next_update = june,
                "the PCK certificate: a list of revoked certificates (CRL) has expired",
            ),
            (
                &|it| it.root_list.next_update = june,
                "signer's certificate: a list of revoked certificates (CRL) has expired",
            ),
            (
                &|it| it.pck_list.this_update = july,
                "the PCK CRL is not valid yet",
            ),
            (
                &|it| it.root_list.this_update = july,
                "the root CRL is not valid yet",
            ),
            (
                &|it| it.pck.not_after = june,
                "the PCK certificate: it, or its authority, has expired",
            ),
            (
                &|it| it.pck.not_before = july,
                "the PCK certificate: it is not valid yet",
            ),
            (
                &|it| it.authority.not_after = june,
                "the PCK certificate: it, or its authority, has expired",
            ),
            (
                &|it| it.authority.not_before = july,
                "the PCK certificate: it is not valid yet",
            ),
            (
                &|it| it.signer.not_after = june,
                "signer's certificate: it, or its authority, has expired",
            ),
            (
                &|it| it.signer.not_before = july,
                "signer's certificate: it is not valid yet",
            ),
            (
                &|it| it.info = vec![("2025-07-20", "2025-06-30")],
                "the TCB information has expired",
            ),
            (
                &|it| it.info = vec![("2025-06-20", "2025-07-02")],
                "the TCB information is not valid yet",
            ),
            (
                &|it| it.identity = vec![("2025-07-20", "2025-06-30")],
                "the QE identity has expired",
            ),
            (
                &|it| it.identity = vec![("2025-06-20", "2025-07-02")],
                "the QE identity is not valid yet",
            ),
        ],
    );
    let change: Change<'_> = &|it| it.info = vec![("2025-06-20", "2025-13-02")];
    all_refused(
        &[Kind::Malformed],
        &[(change, "the TCB information cannot be read")],
    );
}

#[test]
fn the_oldest_part_of_the_collateral_has_its_age() {
    let may = date_time_ymd(2025, 5, 20);
    let changes: [Change<'_>; 3] = [
        &|it| it.info = vec![("2025-06-20", "2025-05-20")],
        &|it| it.identity = vec![("2025-06-20", "2025-05-20")],
        &|it| it.pck_list.this_update = may,
    ];
    for change in changes {
        let error = judged(change).unwrap_err();
        let why = "the collateral is 42 days old, expected at most 15: fetch it again";
        assert_eq!(error.text, why);
        let age = judged_by(r#"{"maximumCollateralDays":42}"#, change);
        assert_eq!(age, Ok((TcbStatus::UpToDate, 42)));
        assert!(judged_by(r#"{"maximumCollateralDays":41}"#, change).is_err());
    }
    // Intel issues the list of revoked authorities once a year
    let year = date_time_ymd(2024, 7, 2);
    assert_eq!(
        judged(&|it| it.root_list.this_update = year),
        Ok((TcbStatus::UpToDate, 11))
    );
}

#[test]
fn a_certificate_in_the_place_of_another_is_refused() {
    let other_place = "is at a wrong place in the chain";
    all_refused(
        &[
            Kind::Chain,
            Kind::Certificate,
            Kind::Malformed,
            Kind::Signature,
        ],
        &[
            (
                &|it| it.chain = vec!["authority", "pck", "root"],
                "the PCK certificate: ",
            ),
            (
                &|it| it.chain = vec!["root", "authority", "pck"],
                "the PCK certificate",
            ),
            (
                &|it| it.chain = vec!["pck", "root", "authority"],
                "the PCK certificate: it does not lead to the root",
            ),
            (
                &|it| it.chain = vec!["pck"],
                "has no certificate of the PCK's authority",
            ),
            (
                &|it| it.chain = vec![],
                "has 0 certificates, expected 1 to 4",
            ),
            (
                &|it| it.chain = vec!["pck", "authority", "root", "root", "root"],
                "has 5 certificates, expected 1 to 4",
            ),
            (
                &|it| it.chain = vec!["signer", "authority", "root"],
                other_place,
            ),
            (&|it| it.issuer_of_pck = "root", other_place),
            (
                &|it| it.issuer_of_signer = "authority",
                "the TCB information signer's certificate",
            ),
            (
                &|it| it.chain_of_signer = vec!["pck", "authority"],
                "the TCB information signer's certificate: it does not lead to the root",
            ),
            (
                &|it| it.chain_of_signer = vec!["authority", "root"],
                "the TCB information signer's certificate",
            ),
            (
                &|it| it.chain_of_signer = vec!["root", "signer"],
                "the TCB information signer's certificate",
            ),
            (&|it| it.chain_of_signer = vec![], "has 0 certificates"),
        ],
    );
}

#[test]
fn a_certificate_with_another_name_or_use_is_refused() {
    all_refused(
        &[Kind::Certificate],
        &[
            (
                &|it| name(&mut it.pck, "Intel SGX TCB Signing"),
                r#"the PCK certificate is of "Intel SGX TCB Signing", expected Intel SGX PCK Certificate of Intel Corporation"#,
            ),
            (
                &|it| name(&mut it.signer, "Intel SGX PCK Certificate"),
                "expected Intel SGX TCB Signing",
            ),
            (
                &|it| name(&mut it.authority, "Intel SGX Other CA"),
                "expected Intel SGX PCK Platform CA or Intel SGX PCK Processor CA",
            ),
            (
                &|it| {
                    it.pck
                        .distinguished_name
                        .push(DnType::OrganizationName, "Intel")
                },
                "of Intel Corporation",
            ),
            (
                &|it| {
                    it.signer
                        .distinguished_name
                        .remove(DnType::OrganizationName);
                },
                "of Intel Corporation",
            ),
            (
                &|it| {
                    it.authority.distinguished_name.remove(DnType::CommonName);
                },
                "the PCK authority's certificate is of \"\"",
            ),
            (
                &|it| it.pck.key_usages = vec![KeyUsagePurpose::KeyAgreement],
                "the key usage of the PCK certificate",
            ),
            (
                &|it| it.pck.key_usages.clear(),
                "the key usage of the PCK certificate",
            ),
            (
                &|it| it.signer.key_usages = vec![KeyUsagePurpose::ContentCommitment],
                "the key usage of the TCB information signer's certificate",
            ),
            (
                &|it| it.authority.key_usages = vec![KeyUsagePurpose::CrlSign],
                "the key usage of the PCK authority's certificate",
            ),
            (
                &|it| it.authority.is_ca = IsCa::ExplicitNoCa,
                "the PCK certificate: ",
            ),
            (
                &|it| it.pck.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained),
                "the PCK certificate: ",
            ),
            (
                &|it| it.signer.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained),
                "signer's certificate: ",
            ),
        ],
    );
    let unnamed = "the PCK certificate does not name its platform";
    all_refused(&[Kind::Malformed], &[(&|it| it.svns = None, unnamed)]);
}

#[test]
fn a_wrong_signature_is_refused() {
    all_refused(
        &[Kind::Signature],
        &[
            (
                &|it| it.other_attestation_key = true,
                "the quote is not signed by its attestation key",
            ),
            (
                &|it| it.other_pck = true,
                "the report of the quoting enclave is not signed by the platform's key",
            ),
            (
                &|it| it.other_signer = true,
                "the signature of the TCB information is wrong",
            ),
        ],
    );
    let not_named = "the attestation key is not the one that the quoting enclave names";
    all_refused(
        &[Kind::Binding],
        &[(&|it| it.qe_report[320] = 1, not_named)],
    );
    // the second half of the enclave's REPORTDATA must stay zero
    let mut parts = Parts::default();
    let named = parts.sign(&[7; 64]);
    parts.qe_report[352] = 1;
    assert!(verdict(&named, &TdxRequirements::default()).is_ok());
    let error = verdict(&parts.sign(&[7; 64]), &TdxRequirements::default()).unwrap_err();
    assert_eq!(error.text, not_named);
}

#[test]
fn another_header_or_form_is_refused() {
    all_refused(
        &[Kind::Malformed],
        &[
            (
                &|it| it.header[0] = 3,
                "the quote has version 3, expected 4 or 5",
            ),
            (
                &|it| it.header[0] = 6,
                "the quote has version 6, expected 4 or 5",
            ),
            (
                &|it| it.header[1] = 1,
                "the quote has version 260, expected 4 or 5",
            ),
            (
                &|it| it.header[2] = 3,
                "the attestation key of the quote has the type 3",
            ),
            (
                &|it| it.header[4] = 0,
                "the quote is of the technology 0x0, expected TDX",
            ),
            (
                &|it| it.header[7] = 1,
                "the quote is of the technology 0x1000081",
            ),
            (
                &|it| it.header[12] = 0,
                "the quoting enclave is not Intel's",
            ),
            (
                &|it| it.header[27] = 0,
                "the quoting enclave is not Intel's",
            ),
            (
                &|it| {
                    it.version_5(3, [0; 16]);
                    it.body.push(0)
                },
                "the body of the quote has 649 bytes, expected 584",
            ),
            (
                &|it| it.certification[0] = 5,
                "certification data of the type 5, expected 6",
            ),
            (
                &|it| it.certification[1] = 6,
                "certification data of the type 6, expected 5",
            ),
            (
                &|it| it.authentication.push(0),
                "authentication data of the quoting enclave has 33 bytes, expected 32",
            ),
            (
                &|it| it.authentication.clear(),
                "authentication data of the quoting enclave has 0 bytes, expected 32",
            ),
        ],
    );
}

#[test]
fn another_quoting_enclave_is_refused() {
    let not_the_one = "the quoting enclave is not the one that Intel names";
    all_refused(
        &[Kind::Signature, Kind::Outdated, Kind::Malformed],
        &[
            (&|it| it.qe_report[128] = 0xab, not_the_one), // MRSIGNER
            (&|it| it.qe_report[159] = 0xab, not_the_one),
            (&|it| it.qe_report[256] = 1, not_the_one), // ISVPRODID
            (&|it| it.qe_report[257] = 1, not_the_one),
            (&|it| it.qe_report[16] = 1, not_the_one), // MISCSELECT
            (&|it| it.qe_report[48] = 0x10, not_the_one), // ATTRIBUTES
            (&|it| it.qe_report[48] = 0x13, not_the_one), // with DEBUG
            (&|it| it.qe_report[63] = 1, not_the_one), // XFRM
            (
                &|it| it.qe_report[258] = 3,
                "is OutOfDate (INTEL-SA-00002), expected UpToDate",
            ), // ISVSVN
            (
                &|it| it.qe_report[258] = 2,
                "the quoting enclave is older than every version that Intel lists: SVN 2",
            ),
            (
                &|it| it.identity = vec![("TD_QE", "QE")],
                "the QE identity is \"QE\" 2, expected \"TD_QE\"",
            ),
            (
                &|it| it.identity = vec![("\"version\":2", "\"version\":4")],
                "the QE identity is \"TD_QE\" 4",
            ),
            (
                &|it| it.identity = vec![("FFFFFFFF\"", "FFFFFF\"")],
                not_the_one,
            ),
        ],
    );
    // an enclave whose owner can read its memory is refused, whatever the identity permits
    let error = judged(&|it| {
        it.qe_report[48] = 0x13;
        it.identity = vec![("\"FBFF", "\"F9FF")];
    });
    assert!(error.unwrap_err().text.contains(not_the_one));
    // a bit outside the mask has no effect
    judged(&|it| it.qe_report[48] = 0x15).unwrap();
    judged(&|it| it.qe_report[258] = 5).unwrap();
}

#[test]
fn each_part_of_the_platform_counts() {
    let outdated = "is OutOfDate (INTEL-SA-00001), expected UpToDate";
    let too_old = "the platform is older than every TCB level";
    for part in 0..16 {
        let below = |by: u8| {
            let error = judged(&move |it: &mut Parts| it.svns.as_mut().unwrap().0[part] -= by);
            error.unwrap_err().to_string()
        };
        assert_eq!(
            below(1),
            format!(
                "the TCB status of the platform {outdated}: CPUSVN[{part}] is 4, expected at least 5"
            )
        );
        assert_eq!(
            below(2),
            format!("{too_old} that Intel lists: CPUSVN[{part}] is 3, expected at least 4")
        );
        judged(&move |it| it.svns.as_mut().unwrap().0[part] += 1).unwrap();
    }
    // the first two are the module's, which has an identity of its own
    for part in 2..16 {
        let below = |by: u8| {
            let error = judged(&move |it: &mut Parts| it.body[part] -= by);
            error.unwrap_err().to_string()
        };
        let named = |svn: u8| {
            format!(
                ": TEE_TCB_SVN[{part}] is {svn}, expected at least {}",
                svn + 1
            )
        };
        assert!(
            below(1).ends_with(&format!("{outdated}{}", named(2))),
            "{}",
            below(1)
        );
        assert!(below(2).ends_with(&named(1)), "{part}: {}", below(2));
        // the module now is as old as the one at the start
        let now = |it: &mut Parts| {
            let mut now = [4, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3];
            now[part] -= 1;
            it.version_5(3, now);
        };
        let error = judged(&now).unwrap_err();
        assert!(error.text.contains(outdated), "{part}: {error}");
    }
    // a module without an identity of its own is judged by the levels
    for part in 0..2 {
        let change = move |it: &mut Parts| {
            it.body[..2].copy_from_slice(&[3, 0]);
            it.body[part] = 0;
        };
        let error = judged(&change).unwrap_err();
        assert!(error.text.contains(too_old), "{part}: {error}");
    }
    all_refused(
        &[
            Kind::Outdated,
            Kind::Unproven,
            Kind::Signature,
            Kind::Protection,
            Kind::Binding,
            Kind::Malformed,
            Kind::Expired,
        ],
        &[
            (
                &|it| it.svns.as_mut().unwrap().1 = 10,
                "expected UpToDate: PCESVN is 10, expected at least 11",
            ),
            (
                &|it| it.svns.as_mut().unwrap().1 = 9,
                "every TCB level that Intel lists: PCESVN is 9, expected at least 10",
            ),
            (
                &|it| it.svns = Some(([3; 16], 9)),
                "CPUSVN[3] is 3, expected at least 4, and 13 more",
            ),
            (
                &|it| it.body[0] = 3,
                "is OutOfDate (INTEL-SA-00002), expected UpToDate: the SVN of the TDX module is 3, expected at least 4",
            ),
            (
                &|it| it.qe_report[258] = 3,
                "is OutOfDate (INTEL-SA-00002), expected UpToDate: the SVN of the quoting enclave is 3, expected at least 4",
            ),
            (
                &|it| it.body[0] = 2,
                "the TDX module is older than every version that Intel lists: SVN 2",
            ),
            (&|it| it.body[1] = 2, "Intel names no TDX module TDX_02"),
            (&|it| it.body[64] = 1, "not signed by Intel (MRSIGNERSEAM)"),
            (
                &|it| it.body[112] = 1,
                "the TDX module has the attributes 0x1",
            ),
            (
                &|it| it.info = vec![("ABABABABABAB", "ABABABABABAC")],
                "is of platforms with FMSPC ABABABABABAC",
            ),
            (
                &|it| it.info = vec![("\"pceId\":\"0000\"", "\"pceId\":\"0001\"")],
                "the TCB information is of platforms",
            ),
            (
                &|it| it.info = vec![("\"id\":\"TDX\"", "\"id\":\"SGX\"")],
                "the TCB information is \"SGX\" 3",
            ),
            (
                &|it| it.info = vec![("\"version\":3", "\"version\":2")],
                "the TCB information is \"TDX\" 2",
            ),
            (
                &|it| it.info = vec![("\"tcbType\":0", "\"tcbType\":1")],
                "of the type 1, expected \"TDX\" 3 of the type 0",
            ),
            (
                &|it| it.info = vec![("\"tcbType\":0,", "")],
                "missing field `tcbType`",
            ),
            (
                &|it| it.info = vec![("DataNumber\":20", "DataNumber\":19")],
                "evaluation 19, expected at least 20",
            ),
            (
                &|it| it.identity = vec![("DataNumber\":20", "DataNumber\":19")],
                "evaluation 19, expected at least 20",
            ),
        ],
    );
}

#[test]
fn the_status_of_each_part_is_judged_by_the_same_list() {
    let set: [fn(&mut Parts, &'static str); 3] = [
        |it, status| it.status = status,
        |it, status| it.module_status = status,
        |it, status| it.qe_status = status,
    ];
    for set in set {
        for status in [
            "OutOfDate",
            "SWHardeningNeeded",
            "ConfigurationNeeded",
            "ConfigurationAndSWHardeningNeeded",
            "OutOfDateConfigurationNeeded",
        ] {
            let error = judged(&|it| set(it, status)).unwrap_err();
            assert_eq!(
                error.text,
                format!("the TCB status of the platform is {status}, expected UpToDate")
            );
            assert_eq!(error.kind, Kind::Outdated);
            let named = format!(r#"{{"tcbStatuses":["UpToDate","{status}"]}}"#);
            let (got, _) = judged_by(&named, &|it| set(it, status)).unwrap();
            assert_eq!(got.to_string(), status);
        }
        let error = judged(&|it| set(it, "Revoked")).unwrap_err();
        assert_eq!(error.kind, Kind::Revoked, "{error}");
        let error = judged(&|it| set(it, "TDRelaunchAdvised")).unwrap_err();
        assert!(
            error.text.contains("no level of Intel has the status"),
            "{error}"
        );
    }
    let both = |it: &mut Parts| {
        it.status = "ConfigurationNeeded";
        it.qe_status = "OutOfDate";
    };
    let error = judged(&both).unwrap_err();
    assert!(
        error.text.contains("is OutOfDateConfigurationNeeded, "),
        "{error}"
    );
    // a module that was updated while the machine ran
    let relaunch = |it: &mut Parts| {
        it.body[0] = 3;
        it.version_5(3, [4, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]);
    };
    let error = judged(&relaunch).unwrap_err();
    assert!(
        error
            .text
            .contains("is TDRelaunchAdvised (INTEL-SA-00002), "),
        "{error}"
    );
    // a revoked module, at the start or now
    let revoked = |svn2: u8| {
        judged(&move |it: &mut Parts| {
            it.info = vec![(
                r#""tcbStatus":"OutOfDate","advisoryIDs":["INTEL-SA-00002"]"#,
                r#""tcbStatus":"Revoked""#,
            )];
            it.body[0] = 7 - svn2;
            it.version_5(3, [svn2, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]);
        })
    };
    for svn2 in [3, 4] {
        assert!(revoked(svn2).unwrap_err().text.contains("is Revoked"));
    }
}

#[test]
fn an_out_of_date_platform_is_accepted_for_the_days_that_the_policy_permits() {
    let permits = |days: u32, change: Change<'_>| {
        judged_by(&format!(r#"{{"platformGraceDays":{days}}}"#), change)
    };
    let old_platform = |it: &mut Parts| it.svns = Some(([4; 16], 11));
    let old_module = |it: &mut Parts| it.body[0] = 3;
    let old_enclave = |it: &mut Parts| it.qe_report[258] = 3;
    let changes: [Change<'_>; 3] = [&old_platform, &old_module, &old_enclave];
    for change in changes {
        // the level of 2023-03-13
        let error = permits(841, change).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("tcbStatuses"), "{error}");
        let why = "its TCB level is 841 days old, the policy's platformGraceDays permits 841";
        assert!(error.text.contains(why), "{error}");
        permits(842, change).unwrap();
    }
    // the older of two parts counts
    let older = |it: &mut Parts| {
        old_platform(it);
        let last = r#""advisoryIDs":["INTEL-SA-00002"]}"#;
        let more = r#""advisoryIDs":["INTEL-SA-00002"]},{"tcb":{"isvsvn":2},"tcbDate":"2022-03-13T00:00:00Z","tcbStatus":"OutOfDate"}"#;
        it.identity = vec![(last, more)];
        it.qe_report[258] = 2;
    };
    assert!(permits(1206, &older).is_err());
    permits(1207, &older).unwrap();
    // what is wrong besides stays wrong, and what an updated platform has
    let statuses: [fn(&mut Parts, &'static str); 2] = [
        |it, status| it.qe_status = status,
        |it, status| it.status = status,
    ];
    for set in statuses {
        for status in ["ConfigurationNeeded", "SWHardeningNeeded"] {
            let error = permits(842, &|it| {
                old_platform(it);
                set(it, status);
            });
            let error = error.unwrap_err();
            assert!(error.text.contains(&format!("is {status}")), "{error}");
        }
    }
    // there is no update
    assert!(permits(u32::MAX, &|it| it.status = "OutOfDate").is_err());
    // a module that was updated while the machine ran is another status
    let relaunch = |it: &mut Parts| {
        it.body[0] = 3;
        it.version_5(3, [4, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]);
    };
    let error = permits(u32::MAX, &relaunch).unwrap_err();
    assert!(error.text.contains("is TDRelaunchAdvised"), "{error}");
}

#[test]
fn a_policy_accepts_or_rejects_advisories() {
    let old = |it: &mut Parts| it.svns = Some(([4; 16], 11));
    for (lists, why) in [
        (r#""rejectedAdvisories":["INTEL-SA-00002"]"#, None),
        (
            r#""acceptedAdvisories":["INTEL-SA-00002","INTEL-SA-00001"]"#,
            None,
        ),
        (
            r#""rejectedAdvisories":["INTEL-SA-00002","INTEL-SA-00001"]"#,
            Some("rejects"),
        ),
        (
            r#""acceptedAdvisories":["INTEL-SA-00002"]"#,
            Some("does not accept"),
        ),
    ] {
        let demands = format!(r#"{{"tcbStatuses":["UpToDate","OutOfDate"],{lists}}}"#);
        judged_by(&demands, &|_| {}).unwrap();
        match (judged_by(&demands, &old), why) {
            (Ok(_), None) => {}
            (Err(error), Some(why)) => {
                let text = format!(
                    "Intel's advisory INTEL-SA-00001 applies to the platform, which the policy {why}"
                );
                assert_eq!(error.text, text);
                assert!(lists.contains(error.field.as_deref().unwrap()));
                assert_eq!(error.kind, Kind::Outdated);
            }
            (got, _) => panic!("{lists}: {got:?}"),
        }
    }
}

#[test]
fn what_the_machine_may_do_is_judged() {
    all_refused(
        &[Kind::Protection],
        &[
            (
                &|it| it.body[120] = 1,
                "got 0x0000000010000001 (DEBUG, SEPT_VE_DISABLE): the host can look into a machine with DEBUG",
            ),
            (&|it| it.body[123] = 0x30, "MIGRATABLE"),
            (&|it| it.body[122] = 2, "SERVTD_EXT"),
            (&|it| it.body[125] = 0x20, "reserved bit 45"),
            (
                &|it| it.body[123] = 0,
                "TDATTRIBUTES: expected 0x0000000010000000 (SEPT_VE_DISABLE), got 0x0000000000000000",
            ),
            (
                &|it| it.body[129] = 0x40,
                "XFAM 0x40e7: user interrupts (bit 14) on; the policy's xfam can accept it",
            ),
            (
                &|it| it.body[130] = 0x08,
                "XFAM 0x800e7: unknown (bit 19) on",
            ),
            (
                &|it| it.body[135] = 0x80,
                "XFAM 0x80000000000000e7: unknown (bit 63) on",
            ),
            (&|it| it.body[128] = 0xe6, "XFAM 0xe6: x87 (bit 0) off"),
        ],
    );
    // the error names only the bits that are wrong
    let error = judged(&|it| it.body[129] = 0x40).unwrap_err();
    for other in ["x87", "SSE", "processor trace", "branch records", "unknown"] {
        assert!(!error.text.contains(other), "{error}");
    }
    for bit in (0..64).filter(|bit| *bit != 28) {
        let set = move |it: &mut Parts| it.body[120 + bit / 8] |= 1 << (bit % 8);
        let error = judged(&set).unwrap_err();
        assert!(
            error.text.contains("TDATTRIBUTES: expected"),
            "{bit}: {error}"
        );
    }
    let debug = r#"{"tdAttributes":"0x10000001"}"#;
    judged_by(debug, &|it| it.body[120] = 1).unwrap();
    assert!(judged_by(debug, &|_| {}).is_err(), "attributes are exact");
    // two generations of machines in one policy
    let both = r#"{"tdAttributes":["0x10000000","0x0"]}"#;
    judged_by(both, &|_| {}).unwrap();
    judged_by(both, &|it| it.body[123] = 0).unwrap();
    let error = judged_by(both, &|it| it.body[120] = 1).unwrap_err();
    assert!(
        error.text.contains(
            "expected 0x0000000010000000 (SEPT_VE_DISABLE) or 0x0000000000000000, got \
             0x0000000010000001 (DEBUG, SEPT_VE_DISABLE): the host can look into"
        ),
        "{error}"
    );
    for interrupts in [r#"{"xfam":"0x40e7"}"#, r#"{"xfam":["0xe7","0x40e7"]}"#] {
        judged_by(interrupts, &|it| it.body[129] = 0x40).unwrap();
    }

    // hash and attributes of service TDs, at the creation of the machine and now
    let now = [4, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3];
    for (kind, at) in [(3, 600), (4, 600), (4, 729), (4, 777), (4, 829), (4, 884)] {
        let error = judged(&move |it: &mut Parts| {
            it.version_5(kind, now);
            it.body[at] = 1;
        });
        let error = error.unwrap_err();
        assert!(
            error.text.contains("another TD serves the machine"),
            "{at}: {error}"
        );
    }
    // a service TD that the policy names, in each place of its hash; its attributes are in MRSERVICETD
    let named = format!(
        r#"{{"mrServiceTd":["{}","01{}"]}}"#,
        "aa".repeat(48),
        "00".repeat(47)
    );
    for (kind, at) in [(3, 600), (4, 600), (4, 729), (4, 785 + 44)] {
        judged_by(&named, &move |it: &mut Parts| {
            it.version_5(kind, now);
            it.body[at] = 1;
        })
        .unwrap();
        let other = judged_by(&named, &move |it: &mut Parts| {
            it.version_5(kind, now);
            it.body[at] = 2;
        });
        let error = other.unwrap_err();
        let value = format!("02{}", "00".repeat(47));
        assert!(error.text.contains(&value), "{at}: {error}");
        assert!(error.text.contains("mrServiceTd"), "{at}: {error}");
    }
    // attributes without a hash name no service TD, and a machine need not have the service TD that the policy names
    let error = judged_by(&named, &move |it: &mut Parts| {
        it.version_5(4, now);
        it.body[777] = 1;
    });
    assert!(
        error
            .unwrap_err()
            .text
            .contains("another TD serves the machine")
    );
    judged_by(&named, &|_| {}).unwrap();
    // the ID of the machine, its devices and where it was created are not judged
    for at in [648, 649, 681, 728, 785, 828] {
        judged(&move |it: &mut Parts| {
            it.version_5(4, now);
            it.body[at] = 1;
        })
        .unwrap();
    }
}
