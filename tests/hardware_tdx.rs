//! Quotes of genuine TDX machines. They are in packages of others, which Cargo and the Go tool chain download once and check. Their
//! collateral has ended, so each is verified at a fixed time at which it was valid.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use attest::attestation::sources::offline;
use attest::attestation::{self, Identified, Issuer, Policy, Stage, Validator, qemu_tdx};
use attest::tpm::Location;
use forged::Faults;
use hardware::tdx::demands::{Demands, Number};
use hardware::tdx::quote::Quote;
use hardware::tdx::tcb::Status;
use hardware::tdx::{Collateral, Verified, Verifier};
use support::foreign::rust_crate;
use support::mutation::mutations;

/// A time at which the collateral of `tdx_quote` was valid: 2025-07-01.
const JULY_2025: u64 = 1_751_328_000;
/// A time at which the collateral of `tdx_quote_outdated` was valid: 2026-03-01.
const MARCH_2026: u64 = 1_772_323_200;
/// A time at which the collateral of `tdx_quote_td15ex` was valid: 2026-10-20.
const OCTOBER_2026: u64 = 1_792_454_400;

/// Returns the folder of the genuine quotes.
fn samples() -> PathBuf {
    rust_crate("dcap_qvl", "dcap-qvl").join("sample")
}

fn sample(name: &str) -> (Vec<u8>, Collateral) {
    let quote = fs::read(samples().join(name)).unwrap();
    let collateral = fs::read_to_string(samples().join(format!("{name}_collateral.json"))).unwrap();
    (quote, serde_json::from_str(&collateral).unwrap())
}

fn verify(quote: &[u8], collateral: &Collateral, now: u64) -> Result<Verified, String> {
    let quote = Quote::parse(quote).map_err(|error| error.to_string())?;
    Verifier::of_intel()
        .unwrap()
        .verify(&quote, collateral, now)
}

#[test]
fn genuine_quotes_are_verified() {
    for (name, now, version, evaluation) in [
        ("tdx_quote", JULY_2025, 4, 17),
        ("tdx_quote_td15ex", OCTOBER_2026, 5, 20),
    ] {
        let (quote, collateral) = sample(name);
        let verified = verify(&quote, &collateral, now).unwrap();
        assert_eq!(verified.status, Status::UpToDate, "{name}");
        assert_eq!(verified.advisories, Vec::<String>::new(), "{name}");
        assert_eq!(verified.evaluation, evaluation, "{name}");
        assert_eq!(
            verified.platform.fmspc,
            [0xb0, 0xc0, 0x6f, 0, 0, 0],
            "{name}"
        );
        assert!(verified.platform.instance.is_some() && verified.until > now);
        let parsed = Quote::parse(&quote).unwrap();
        assert_eq!(parsed.version, version);
        let demands = Demands {
            minimum_evaluation: evaluation,
            ..Demands::default()
        };
        let claims = demands.judge(&parsed, &verified).unwrap();
        assert_eq!(claims.technology, "Intel TDX");
        assert_eq!(claims.tcb[0].got, u64::from(evaluation));
    }
}

#[test]
fn a_genuine_quote_of_an_outdated_platform_is_refused_by_name() {
    let (quote, collateral) = sample("tdx_quote_outdated");
    let error = verify(&quote, &collateral, MARCH_2026).unwrap_err();
    assert!(
        error.contains("older than each level that Intel knows: TEE_TCB_SVN 070103"),
        "{error}"
    );
}

#[test]
fn collateral_is_valid_for_its_time_and_its_platform_only() {
    let (quote, collateral) = sample("tdx_quote");
    let (_, other) = sample("tdx_quote_outdated");
    for (collateral, now, why) in [
        (&collateral, 1_750_000_000, "not valid yet"),
        (&collateral, OCTOBER_2026, "expired"),
        (
            &other,
            MARCH_2026,
            "the TCB information is of platforms with FMSPC 90C06F000000",
        ),
    ] {
        let error = verify(&quote, collateral, now).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
    let swap = |change: fn(&mut Collateral, Collateral)| {
        let mut changed = collateral.clone();
        change(&mut changed, collateral.clone());
        verify(&quote, &changed, JULY_2025).unwrap_err()
    };
    for (error, why) in [
        (
            swap(|a, b| a.tcb_info = b.tcb_info + " "),
            "the TCB information is not signed",
        ),
        (
            swap(|a, b| a.tcb_info_signature = b.qe_identity_signature),
            "the TCB information is not signed",
        ),
        (
            swap(|a, b| a.qe_identity = b.tcb_info),
            "the QE identity is not signed",
        ),
        (
            swap(|a, b| a.tcb_info_issuer_chain = b.pck_crl_issuer_chain),
            "the TCB information signer's certificate",
        ),
        (
            swap(|a, b| a.pck_crl = b.root_ca_crl),
            "no list of revoked certificates",
        ),
        (
            swap(|a, b| a.root_ca_crl = b.pck_crl),
            "no list of revoked certificates",
        ),
        (
            swap(|a, _| a.pck_crl.0.clear()),
            "the PCK CRL cannot be read",
        ),
        (
            swap(|a, _| a.tcb_info_issuer_chain.clear()),
            "has 0 certificates",
        ),
    ] {
        assert!(error.contains(why), "{why}: {error}");
    }
}

#[test]
fn each_changed_byte_of_a_genuine_quote_is_refused() {
    let (quote, collateral) = sample("tdx_quote");
    let verifier = Verifier::of_intel().unwrap();
    let good = Quote::parse(&quote).unwrap();
    // the padding of the sample is not a part of the quote
    let end = quote.iter().rposition(|byte| *byte != 0).unwrap();
    // nobody reads the copy of the root, which is the third certificate: the built-in one counts
    let begin = b"-----BEGIN CERTIFICATE-----";
    let mut begins = (0..end).filter(|at| quote[*at..].starts_with(begin));
    let root = begins.nth(2).unwrap();
    let mut of_text = 0;
    for at in 0..root {
        let mut changed = quote.clone();
        changed[at] ^= 0x20;
        let Ok(parsed) = Quote::parse(&changed) else {
            continue;
        };
        if let Ok(verified) = verifier.verify(&parsed, &collateral, JULY_2025) {
            assert_eq!(parsed.body, good.body, "byte {at}");
            assert_eq!(verified.status, Status::UpToDate, "byte {at}");
            of_text += 1;
        }
    }
    assert!(of_text < 20, "{of_text} changes are not noticed");
}

#[test]
fn junk_after_a_quote_is_refused_and_padding_is_not() {
    let (mut quote, _) = sample("tdx_quote");
    assert!(quote.ends_with(&[0; 16]));
    assert!(Quote::parse(&quote).is_ok());
    quote.push(1);
    let error = Quote::parse(&quote).unwrap_err().to_string();
    assert!(error.contains("follow the quote"), "{error}");
    let sgx = fs::read(samples().join("sgx_quote")).unwrap();
    let error = Quote::parse(&sgx).unwrap_err().to_string();
    assert!(error.contains("version 3, expected 4 or 5"), "{error}");
}

#[test]
fn mutated_quotes_and_collateral_end_without_a_panic() {
    for name in ["tdx_quote", "tdx_quote_td15ex"] {
        let (quote, collateral) = sample(name);
        for changed in mutations(&quote, 3000) {
            if let Ok(parsed) = Quote::parse(&changed) {
                let _ = Verifier::of_intel()
                    .unwrap()
                    .verify(&parsed, &collateral, JULY_2025);
            }
        }
        let text = serde_json::to_vec(&collateral).unwrap();
        for changed in mutations(&text, 1000) {
            if let Ok(changed) = serde_json::from_slice::<Collateral>(&changed)
                && verify(&quote, &changed, JULY_2025).is_ok()
            {
                assert_eq!(changed.tcb_info, collateral.tcb_info);
                assert_eq!(changed.qe_identity, collateral.qe_identity);
            }
        }
    }
}

#[test]
fn what_a_policy_demands_is_refused_by_name() {
    let (quote, collateral) = sample("tdx_quote");
    let verified = verify(&quote, &collateral, JULY_2025).unwrap();
    let refused = |demands: Demands, change: fn(&mut Quote<'_>), verified: &Verified| {
        let mut quote = Quote::parse(&quote).unwrap();
        change(&mut quote);
        demands.judge(&quote, verified).unwrap_err()
    };
    let demands = |json: &str| serde_json::from_str::<Demands>(json).unwrap();
    let usual = || Demands {
        minimum_evaluation: 17,
        ..Demands::default()
    };
    let same: fn(&mut Quote<'_>) = |_| {};
    for (error, why) in [
        (
            refused(usual(), |it| it.body.td_attributes.0 |= 1, &verified),
            "got 0x0000000010000001 (DEBUG, SEPT_VE_DISABLE): the host can look",
        ),
        (
            refused(usual(), |it| it.body.td_attributes.0 |= 1 << 29, &verified),
            "MIGRATABLE",
        ),
        (
            refused(usual(), |it| it.body.td_attributes.0 |= 1 << 45, &verified),
            "TDATTRIBUTES: expected",
        ),
        (
            refused(usual(), |it| it.body.td_attributes.0 = 0, &verified),
            "TDATTRIBUTES: expected",
        ),
        (
            refused(usual(), |it| it.body.xfam |= 1 << 14, &verified),
            "XFAM 0x642e7",
        ),
        (
            refused(usual(), |it| it.body.xfam &= !1, &verified),
            "x87 and SSE",
        ),
        (
            refused(demands(r#"{"xfam":"0xe7"}"#), same, &verified),
            "XFAM: expected 0xe7, got 0x602e7",
        ),
        (
            refused(demands(r#"{"mrSeam":["00"]}"#), same, &verified),
            "(MRSEAM): expected 00, got ",
        ),
        (
            refused(demands(r#"{"mrConfigId":"AA"}"#), same, &verified),
            "MRCONFIGID: expected aa, got 0000",
        ),
        (
            refused(demands(r#"{"mrOwner":"aa"}"#), same, &verified),
            "MROWNER: expected",
        ),
        (
            refused(demands(r#"{"mrOwnerConfig":"aa"}"#), same, &verified),
            "MROWNERCONFIG: expected",
        ),
        (
            refused(demands(r#"{"platforms":["aa","bb"]}"#), same, &verified),
            "(PPID, platform instance): expected aa or bb, got ",
        ),
        (
            refused(Demands::default(), same, &verified),
            "evaluation 17, expected at least 20",
        ),
        (
            refused(
                demands(r#"{"tcbStatuses":["Revoked"]}"#),
                same,
                &Verified {
                    status: Status::Revoked,
                    ..verified.clone()
                },
            ),
            "status of the platform is Revoked",
        ),
        (
            refused(
                usual(),
                same,
                &Verified {
                    status: Status::OutOfDate,
                    advisories: vec!["INTEL-SA-01036".into()],
                    ..verified.clone()
                },
            ),
            "is OutOfDate (INTEL-SA-01036), expected UpToDate",
        ),
    ] {
        assert!(error.contains(why), "{why}: {error}");
    }
    let parsed = Quote::parse(&quote).unwrap();
    let also = Demands {
        tcb_statuses: vec![Status::UpToDate, Status::OutOfDate],
        ..usual()
    };
    let outdated = Verified {
        status: Status::OutOfDate,
        ..verified.clone()
    };
    assert!(also.judge(&parsed, &outdated).is_ok());
    let debug = Demands {
        td_attributes: Number(0x1000_0001),
        ..usual()
    };
    assert!(
        debug.judge(&parsed, &verified).is_err(),
        "attributes are exact"
    );
    let text = serde_json::to_string(&also).unwrap();
    assert_eq!(demands(&text), also);
    assert!(serde_json::from_str::<Demands>(r#"{"mrSeams":[]}"#).is_err());
}

/// Why we may refuse what the peer accepts: it ignores a type, what follows a quote and its parts, certificates behind those that it needs, some
/// attributes of the TD, and the PCE ID.
const STRICTER: [&str; 8] = [
    "certification data of the type",
    "follow the quote",
    "follow the signature",
    "follow the certificates",
    "the chain of the",
    "TDATTRIBUTES",
    "XFAM",
    "FMSPC",
];

/// Returns the verdicts of the peer on files of quotes and collateral.
fn verdicts_of_dcap_qvl(folder: &Path, cases: &[(Vec<u8>, Vec<u8>, u64)]) -> Vec<String> {
    let target = Path::new(support::ROOT).join("target/dcap-qvl");
    let built = Command::new(env!("CARGO"))
        .args(["build", "--locked", "--quiet", "--manifest-path"])
        .arg(Path::new(support::ROOT).join("tests/dcap_qvl/Cargo.toml"))
        .env("CARGO_TARGET_DIR", &target)
        .status()
        .unwrap();
    assert!(built.success());
    let mut lines = String::new();
    for (number, (quote, collateral, now)) in cases.iter().enumerate() {
        let file = |kind: &str| folder.join(format!("{number}.{kind}"));
        fs::write(file("quote"), quote).unwrap();
        fs::write(file("json"), collateral).unwrap();
        let (quote, collateral) = (file("quote"), file("json"));
        lines += &format!("{} {} {now}\n", quote.display(), collateral.display());
    }
    let list = folder.join("list");
    fs::write(&list, lines).unwrap();
    let output = Command::new(target.join("x86_64-unknown-linux-musl/debug/dcap-qvl-peer"))
        .stdin(fs::File::open(list).unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(String::from).collect()
}

/// Returns our verdict on what the peer judges, in its words.
fn our_verdict(quote: &[u8], collateral: &[u8], now: u64) -> Result<Status, String> {
    let collateral = serde_json::from_slice(collateral).map_err(|error| error.to_string())?;
    let verified = verify(quote, &collateral, now)?;
    let any = Demands {
        tcb_statuses: vec![verified.status],
        ..Demands::default()
    };
    any.judge(&Quote::parse(quote).unwrap(), &verified)?;
    Ok(verified.status)
}

#[test]
#[ignore = "it builds the 95 packages of the peer"]
fn we_accept_nothing_that_dcap_qvl_refuses() {
    let mut cases = vec![];
    for (name, now) in [
        ("tdx_quote", JULY_2025),
        ("tdx_quote_td15ex", OCTOBER_2026),
        ("tdx_quote_outdated", MARCH_2026),
    ] {
        let (quote, collateral) = sample(name);
        let collateral = serde_json::to_vec(&collateral).unwrap();
        // the last second of each part of the collateral, and the one after it, are near these
        for days in 0..120 {
            cases.push((
                quote.clone(),
                collateral.clone(),
                now + days * 86_400 - 60 * 86_400,
            ));
        }
        for changed in mutations(&quote, 1500) {
            cases.push((changed, collateral.clone(), now));
        }
        for changed in mutations(&collateral, 1500) {
            cases.push((quote.clone(), changed, now));
        }
        for at in 0..1300 {
            let mut changed = quote.clone();
            changed[at] ^= 1;
            cases.push((changed, collateral.clone(), now));
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let verdicts = verdicts_of_dcap_qvl(folder.path(), &cases);
    assert_eq!(verdicts.len(), cases.len());
    let (mut both, mut stricter, mut unexplained) = (0, 0, vec![]);
    // the only part that we do not read: the quote has these certificates too
    let without_issuers = |text: &[u8]| {
        let mut collateral: Collateral = serde_json::from_slice(text).unwrap();
        collateral.pck_crl_issuer_chain.clear();
        collateral
    };
    let genuine: Vec<_> = cases.iter().map(|(_, text, _)| text).collect();
    let genuine = [0, cases.len() / 3, 2 * cases.len() / 3].map(|at| without_issuers(genuine[at]));
    for ((quote, collateral, now), theirs) in cases.iter().zip(&verdicts) {
        match (our_verdict(quote, collateral, *now), theirs) {
            (Ok(ours), theirs) if *theirs == ours.to_string() => both += 1,
            (Ok(ours), theirs) => {
                if !genuine.contains(&without_issuers(collateral)) {
                    unexplained.push(format!("{theirs}, ours: {ours}"));
                }
            }
            (Err(_), theirs) if theirs.starts_with("refused") => {}
            (Err(why), _) => {
                stricter += 1;
                if !STRICTER.iter().any(|reason| why.contains(reason)) {
                    unexplained.push(format!("accepted, ours: {why}"));
                }
            }
        }
    }
    println!(
        "{} cases: both accept {both}, only dcap-qvl {stricter}",
        cases.len()
    );
    assert!(unexplained.is_empty(), "{unexplained:#?}");
    assert!(both > 50 && both < cases.len() / 2);
}

/// Quotes of a hierarchy of our own, which has the shape of Intel's.
mod forged {
    use hardware::tdx::dcap::Hex;
    use rcgen::{
        BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer,
        CustomExtension, DnType, IsCa, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams,
        SerialNumber, date_time_ymd,
    };
    use ring::digest::{SHA256, digest};
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};
    use rustls::pki_types::CertificateDer;

    use super::*;

    type Authority = CertifiedIssuer<'static, KeyPair>;

    /// What differs from a genuine machine.
    #[derive(Default)]
    pub struct Faults {
        pub is_revoked: bool,
        pub pck_under_root: bool,
        pub wrong_extension: bool,
        pub status: Option<&'static str>,
        pub qe_signer: bool,
        pub other_key: bool,
        pub change: Option<fn(&mut Vec<u8>)>,
    }

    pub struct Hierarchy {
        root: Authority,
        platforms: Authority,
        signer: (KeyPair, String),
        attestation_key: EcdsaKeyPair,
    }

    fn names(name: &str) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(2049, 1, 1);
        params
    }

    fn authority(name: &str) -> CertificateParams {
        let mut params = names(name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params
    }

    fn fixed(key: &KeyPair) -> EcdsaKeyPair {
        let document = key.serialize_der();
        let random = SystemRandom::new();
        EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &document, &random).unwrap()
    }

    fn sign(key: &EcdsaKeyPair, text: &[u8]) -> Vec<u8> {
        key.sign(&SystemRandom::new(), text)
            .unwrap()
            .as_ref()
            .into()
    }

    /// Returns DER of a value.
    fn der(tag: u8, content: &[u8]) -> Vec<u8> {
        let len = content.len();
        let mut all = vec![tag];
        match len {
            0..=0x7f => all.push(len as u8),
            _ => all.extend([0x82, (len >> 8) as u8, len as u8]),
        }
        all.extend(content);
        all
    }

    /// Returns the extension of a PCK: each SVN of the processor is 5, that of the PCE 11.
    fn extension() -> Vec<u8> {
        let oid = |arcs: &[u8]| {
            let base = [0x2a, 0x86, 0x48, 0x86, 0xf8, 0x4d, 0x01, 0x0d, 0x01];
            der(0x06, &[&base, arcs].concat())
        };
        let pair = |arcs: &[u8], value: Vec<u8>| der(0x30, &[oid(arcs), value].concat());
        let mut tcb: Vec<u8> = (1..=16).flat_map(|n| pair(&[2, n], der(2, &[5]))).collect();
        tcb.extend(pair(&[2, 17], der(2, &[11])));
        tcb.extend(pair(&[2, 18], der(4, &[5; 16])));
        let entries = [
            pair(&[1], der(4, &[0xee; 16])),
            pair(&[2], der(0x30, &tcb)),
            pair(&[3], der(4, &[0; 2])),
            pair(&[4], der(4, &[0xab; 6])),
            pair(&[5], der(10, &[1])),
            pair(&[6], der(4, &[0xdd; 16])),
        ];
        der(0x30, &entries.concat())
    }

    impl Hierarchy {
        pub fn new() -> Hierarchy {
            let key = || KeyPair::generate().unwrap();
            let root = CertifiedIssuer::self_signed(authority("root"), key()).unwrap();
            let platforms =
                CertifiedIssuer::signed_by(authority("PCK authority"), key(), &root).unwrap();
            let signing = key();
            let signer = names("TCB signing")
                .signed_by(&signing, &root)
                .unwrap()
                .pem();
            Hierarchy {
                root,
                platforms,
                signer: (signing, signer),
                attestation_key: fixed(&key()),
            }
        }

        pub fn verifier(&self) -> Verifier<'static> {
            let root: &CertificateDer<'static> = Box::leak(Box::new(self.root.der().clone()));
            Verifier::under(root).unwrap()
        }

        fn crl(&self, issuer: &Authority, revoked: Option<u64>) -> Hex {
            let revoked = revoked.map(|serial| RevokedCertParams {
                serial_number: SerialNumber::from(serial),
                revocation_time: date_time_ymd(2025, 1, 1),
                reason_code: None,
                invalidity_date: None,
            });
            let list = CertificateRevocationListParams {
                this_update: date_time_ymd(2025, 6, 1),
                next_update: date_time_ymd(2025, 12, 1),
                crl_number: SerialNumber::from(1),
                issuing_distribution_point: None,
                revoked_certs: revoked.into_iter().collect(),
                key_identifier_method: KeyIdMethod::Sha256,
            };
            Hex(list.signed_by(issuer).unwrap().der().to_vec())
        }

        fn signed(&self, text: &str) -> Hex {
            Hex(sign(&fixed(&self.signer.0), text.as_bytes()))
        }

        /// Returns a quote over these bytes with its collateral.
        pub fn quote(&self, report_data: &[u8; 64], faults: &Faults) -> (Vec<u8>, Collateral) {
            let dates = r#""issueDate":"2025-06-20T00:00:00Z","nextUpdate":"2025-07-20T00:00:00Z","tcbEvaluationDataNumber":20"#;
            let svns = |svn: u8| [format!(r#"{{"svn":{svn}}}"#).as_str(); 16].join(",");
            let status = faults.status.unwrap_or("UpToDate");
            let (zero, none) = ("00".repeat(48), "00".repeat(8));
            let module = format!(
                r#""mrsigner":"{zero}","attributes":"{none}","attributesMask":"{}""#,
                "ff".repeat(8)
            );
            let info = format!(
                r#"{{"id":"TDX","version":3,{dates},"fmspc":"ABABABABABAB","pceId":"0000","tcbType":0,"tdxModule":{{{module}}},"tcbLevels":[{{"tcb":{{"sgxtcbcomponents":[{}],"tdxtcbcomponents":[{}],"pcesvn":11}},"tcbDate":"2024-03-13T00:00:00Z","tcbStatus":"{status}"}}],"tdxModuleIdentities":[{{"id":"TDX_01",{module},"tcbLevels":[{{"tcb":{{"isvsvn":4}},"tcbDate":"2024-03-13T00:00:00Z","tcbStatus":"UpToDate"}}]}}]}}"#,
                svns(5),
                svns(3)
            );
            let identity = format!(
                r#"{{"id":"TD_QE","version":2,{dates},"miscselect":"00000000","miscselectMask":"FFFFFFFF","attributes":"{0}","attributesMask":"{0}","mrsigner":"{1}","isvprodid":2,"tcbLevels":[{{"tcb":{{"isvsvn":4}},"tcbDate":"2024-03-13T00:00:00Z","tcbStatus":"UpToDate"}}]}}"#,
                "00".repeat(16),
                "aa".repeat(32)
            );
            let mut params = names("PCK");
            params.serial_number = Some(SerialNumber::from(7_u64));
            let content = match faults.wrong_extension {
                true => vec![0x30, 0],
                false => extension(),
            };
            let oid = [1, 2, 840, 113741, 1, 13, 1];
            params.custom_extensions = vec![CustomExtension::from_oid_content(&oid, content)];
            let pck = KeyPair::generate().unwrap();
            let issuer = match faults.pck_under_root {
                true => &self.root,
                false => &self.platforms,
            };
            let certificate = params.signed_by(&pck, issuer).unwrap().pem();
            let chain = certificate + &self.platforms.pem() + &self.root.pem();

            let (zeros, key) = (vec![0; 584], self.attestation_key.public_key().as_ref());
            let mut body: Vec<u8> = zeros;
            body[..16].copy_from_slice(&[4, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3]);
            body[120..128].copy_from_slice(&0x1000_0000_u64.to_le_bytes());
            body[128..136].copy_from_slice(&0xe7_u64.to_le_bytes());
            body[136..184].fill(0xa0);
            for rtmr in 0..4 {
                let value = if rtmr == 3 { 0 } else { 0xb0 + rtmr as u8 };
                body[328 + 48 * rtmr..376 + 48 * rtmr].fill(value);
            }
            body[520..].copy_from_slice(report_data);
            if let Some(change) = faults.change {
                change(&mut body);
            }
            let vendor = [
                0x93, 0x9a, 0x72, 0x33, 0xf7, 0x9c, 0x4c, 0xa9, 0x94, 0x0a, 0x0d, 0xb3, 0x95, 0x7f,
                0x06, 0x07,
            ];
            let signed = [
                &[4, 0, 2, 0, 0x81, 0, 0, 0, 0, 0, 0, 0][..],
                &vendor,
                &[0; 20],
                &body,
            ]
            .concat();
            let authentication = [0x55; 32];
            let mut report = vec![0; 384];
            report[128..160].fill(if faults.qe_signer { 0xbb } else { 0xaa });
            report[256..260].copy_from_slice(&[2, 0, 4, 0]);
            let named = [&key[1..], &authentication].concat();
            report[320..352].copy_from_slice(digest(&SHA256, &named).as_ref());
            let certification = [
                &report[..],
                &sign(&fixed(&pck), &report),
                &32_u16.to_le_bytes(),
                &authentication,
                &5_u16.to_le_bytes(),
                &(chain.len() as u32).to_le_bytes(),
                chain.as_bytes(),
            ]
            .concat();
            let other = fixed(&KeyPair::generate().unwrap());
            let signing = if faults.other_key {
                &other
            } else {
                &self.attestation_key
            };
            let signature = [
                &sign(signing, &signed)[..],
                &key[1..],
                &6_u16.to_le_bytes(),
                &(certification.len() as u32).to_le_bytes(),
                &certification,
            ]
            .concat();
            let len = (signature.len() as u32).to_le_bytes();
            let collateral = Collateral {
                tcb_info_signature: self.signed(&info),
                tcb_info: info,
                tcb_info_issuer_chain: self.signer.1.clone(),
                qe_identity_signature: self.signed(&identity),
                qe_identity: identity,
                qe_identity_issuer_chain: self.signer.1.clone(),
                root_ca_crl: self.crl(&self.root, None),
                pck_crl: self.crl(&self.platforms, faults.is_revoked.then_some(7)),
                pck_crl_issuer_chain: String::new(),
            };
            ([&signed[..], &len, &signature].concat(), collateral)
        }
    }
}

/// A machine whose quotes the test hierarchy signs.
struct Machine(forged::Hierarchy, forged::Faults);

impl qemu_tdx::Quoter for Machine {
    fn quote(&self, report_data: &[u8; 64]) -> Result<Vec<u8>, String> {
        Ok(self.0.quote(report_data, &self.1).0)
    }
}

/// Returns what the policy with these registers says of a machine.
fn judged(faults: forged::Faults, policy: &str, nonce: &[u8]) -> Result<Identified, String> {
    let hierarchy = forged::Hierarchy::new();
    let verifier = hierarchy.verifier();
    let file = tempfile::NamedTempFile::new().unwrap();
    let (_, collateral) = hierarchy.quote(&[0; 64], &faults);
    fs::write(file.path(), serde_json::to_vec(&collateral).unwrap()).unwrap();
    let machine = Arc::new(Machine(hierarchy, faults));
    let issuer = qemu_tdx::Issuer::new(machine, Some(file.path().into()));
    let document = issuer.issue(b"key", b"nonce").unwrap();
    let policy = Policy::from_json(policy).unwrap();
    let validator = qemu_tdx::Validator::under(verifier, || JULY_2025, policy, offline()).unwrap();
    let identified = validator.identify(&document, nonce);
    identified.map_err(|error| error.to_string())
}

/// Returns a policy with the registers of the test machine.
fn policy(change: &str) -> String {
    let entries: Vec<_> = [(0, "a0"), (1, "b0"), (2, "b1"), (3, "b2"), (4, "00")]
        .map(|(index, byte)| format!("\"{index}\":\"{}\"", byte.repeat(48)))
        .into();
    format!("{{\"measurements\":{{{}}}{change}}}", entries.join(","))
}

#[test]
fn a_machine_that_meets_the_policy_is_identified() {
    let identified = judged(Faults::default(), &policy(""), b"nonce").unwrap();
    assert_eq!(identified.user_data, b"key");
    assert!(identified.cluster.unwrap().is_fresh());
    let platform = identified.platform.unwrap();
    assert_eq!(platform.chip.as_deref(), Some(&*"dd".repeat(16)));
    assert_eq!(
        platform.bound,
        ["key and nonce of the connection: REPORTDATA"]
    );
}

#[test]
fn a_machine_that_is_wrong_in_one_thing_is_refused_by_its_name() {
    let refused =
        |faults, change: &str, nonce: &[u8]| judged(faults, &policy(change), nonce).unwrap_err();
    let usual = Faults::default;
    let with = |change| Faults {
        change: Some(change),
        ..usual()
    };
    let other = policy("").replace(&"b1".repeat(48), &"b7".repeat(48));
    let error = judged(usual(), &other, b"nonce").unwrap_err();
    assert!(
        error.starts_with("RTMR 1: expected b7b7") && error.contains("got b1b1"),
        "{error}"
    );
    for (error, why) in [
        (
            refused(usual(), "", b"other"),
            "another connection: its nonce does not match",
        ),
        (
            refused(
                Faults {
                    is_revoked: true,
                    ..usual()
                },
                "",
                b"nonce",
            ),
            "the PCK certificate: it, or its authority, is revoked",
        ),
        (
            refused(
                Faults {
                    pck_under_root: true,
                    ..usual()
                },
                "",
                b"nonce",
            ),
            "the PCK certificate",
        ),
        (
            refused(
                Faults {
                    wrong_extension: true,
                    ..usual()
                },
                "",
                b"nonce",
            ),
            "does not name its platform",
        ),
        (
            refused(
                Faults {
                    status: Some("OutOfDate"),
                    ..usual()
                },
                "",
                b"nonce",
            ),
            "is OutOfDate, expected UpToDate",
        ),
        (
            refused(
                Faults {
                    status: Some("Revoked"),
                    ..usual()
                },
                "",
                b"nonce",
            ),
            "is Revoked",
        ),
        (
            refused(
                Faults {
                    qe_signer: true,
                    ..usual()
                },
                "",
                b"nonce",
            ),
            "the quoting enclave is not the one",
        ),
        (
            refused(
                Faults {
                    other_key: true,
                    ..usual()
                },
                "",
                b"nonce",
            ),
            "not signed by its attestation key",
        ),
        (
            refused(with(|body| body[0] = 3), "", b"nonce"),
            "the TDX module is older than each",
        ),
        (
            refused(with(|body| body[1] = 2), "", b"nonce"),
            "Intel names no TDX module TDX_02",
        ),
        (
            refused(with(|body| body[2] = 2), "", b"nonce"),
            "the platform is older than each level",
        ),
        (
            refused(with(|body| body[64] = 1), "", b"nonce"),
            "not signed by Intel (MRSIGNERSEAM)",
        ),
        (
            refused(with(|body| body[112] = 1), "", b"nonce"),
            "the TDX module has the attributes 0x1",
        ),
        (
            refused(with(|body| body[120] = 1), "", b"nonce"),
            "the host can look into a machine with DEBUG",
        ),
        (
            refused(with(|body| body[123] = 0x30), "", b"nonce"),
            "MIGRATABLE",
        ),
        (refused(with(|body| body[129] = 0x40), "", b"nonce"), "XFAM"),
        (
            refused(with(|body| body[472] = 1), "", b"nonce"),
            "RTMR 3: expected 0000",
        ),
        (
            refused(usual(), r#","tdx":{"minimumEvaluation":21}"#, b"nonce"),
            "evaluation 20, expected at least 21",
        ),
        (
            refused(usual(), r#","tdx":{"platforms":["00"]}"#, b"nonce"),
            "(PPID, platform instance): expected 00",
        ),
    ] {
        assert!(error.contains(why), "{why}: {error}");
    }
    let accepted = policy(
        r#","tdx":{"tcbStatuses":["UpToDate","OutOfDate"],"platforms":["DDDDDDDDDDDDDDDDDDDDDDDDDDDDDDDD"]}"#,
    );
    let outdated = Faults {
        status: Some("OutOfDate"),
        ..usual()
    };
    assert!(judged(outdated, &accepted, b"nonce").is_ok());
}

#[test]
fn a_policy_of_a_tpm_is_none_of_a_tdx_machine() {
    let text = format!(r#"{{"measurements":{{"4":"{}"}}}}"#, "00".repeat(32));
    let error = qemu_tdx::Validator::new(Policy::from_json(&text).unwrap(), offline());
    let error = error.err().unwrap().to_string();
    assert!(error.contains("have registers of 48 bytes"), "{error}");
}

/// Returns a folder as the kernel shows it, with these RTMRs and with MRTD.
fn kernels_folder(rtmr: [u8; 4]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, byte| fs::write(folder.path().join(name), [byte; 48]).unwrap();
    write("mrtd:sha384", 0xa0);
    for (number, byte) in rtmr.into_iter().enumerate() {
        write(&format!("rtmr{number}:sha384"), byte);
    }
    folder
}

#[test]
fn the_registers_of_a_machine_are_read_and_a_wrong_one_is_noticed() {
    let folder = kernels_folder([1, 2, 4, 0]);
    let location: Location = format!("tdx:{}", folder.path().display()).parse().unwrap();
    let measured = (qemu_tdx::VARIANT.measure)(&location, Stage::Booted).unwrap();
    let first: Vec<_> = measured.booted.values().map(|it| it.expected[0]).collect();
    assert_eq!(first, [0xa0, 1, 2, 4, 0]);
    assert!(!attestation::is_marked(&location).unwrap());
    // a plain file keeps what is written to it, unlike a register: the machine notices that it was not extended
    let error = attestation::mark(&location, &[7; 32])
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("something else has measured into it"),
        "{error}"
    );
    assert!(attestation::is_marked(&location).unwrap());
    let written = fs::read(folder.path().join("rtmr3:sha384")).unwrap();
    assert_eq!(
        written,
        ring::digest::digest(&ring::digest::SHA384, &[7; 32]).as_ref()
    );
    fs::write(folder.path().join("rtmr3:sha384"), [0; 47]).unwrap();
    let error = attestation::cluster_register(&location)
        .unwrap_err()
        .to_string();
    assert!(error.contains("47 bytes, expected 48"), "{error}");
    let tpm: Location = "device:/dev/null".parse().unwrap();
    let error = (qemu_tdx::VARIANT.measure)(&tpm, Stage::Booted)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("expected tdx:/sys/class/misc/tdx_guest/measurements"),
        "{error}"
    );
    let error = attest::tpm::Tpm::open(&location).err().unwrap().to_string();
    assert!(error.contains("has no TPM"), "{error}");
}
