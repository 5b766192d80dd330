//! Quotes of genuine TDX machines. They are in packages of others, which Cargo and the Go tool chain download once and check. Their
//! collateral has ended, so each is verified at a fixed time at which it was valid.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::UnixTime;
use serde_json::json;
use support::foreign::{rust_crate, rust_program};
use support::mutation::mutations;
use verifier::sources::offline;
use verifier::{Policy, td};

use super::*;

/// A time at which the collateral of `tdx_quote_outdated` was valid: 2026-03-01.
const MARCH_2026: u64 = 1_772_323_200;
/// A time at which the collateral of `tdx_quote_td15ex` was valid: 2026-10-20.
const OCTOBER_2026: u64 = 1_792_454_400;

/// Returns the folder of the genuine quotes.
fn samples() -> PathBuf {
    rust_crate("dcap_qvl", "dcap-qvl").join("sample")
}

fn sample(name: &str) -> (Vec<u8>, TdxCollateral) {
    let quote = fs::read(samples().join(name)).unwrap();
    let collateral = fs::read_to_string(samples().join(format!("{name}_collateral.json"))).unwrap();
    (quote, serde_json::from_str(&collateral).unwrap())
}

#[test]
fn genuine_quotes_are_verified() {
    for (name, now, version, evaluation, days) in [
        ("tdx_quote", JULY_2025, 4, 17, 11),
        ("tdx_quote_td15ex", OCTOBER_2026, 5, 20, 12),
    ] {
        let (quote, collateral) = sample(name);
        let verified = verify(&quote, &collateral, now).unwrap();
        assert_eq!(verified.status(), TcbStatus::UpToDate, "{name}");
        assert_eq!(verified.advisories(), Vec::<String>::new(), "{name}");
        assert_eq!(verified.evaluation(), evaluation, "{name}");
        let platform = verified.platform();
        assert_eq!(platform.fmspc, [0xb0, 0xc0, 0x6f, 0, 0, 0], "{name}");
        assert!(platform.instance.is_some());
        assert_eq!(verified.collateral_age().as_secs() / 86_400, days, "{name}");
        assert_eq!(verified.quote().version, version);
        let demands = TdxRequirements {
            minimum_evaluation: evaluation,
            ..TdxRequirements::default()
        };
        let claims = demands.judge(&verified).unwrap();
        assert_eq!(claims.technology, "Intel TDX");
        assert_eq!(claims.tcb[0].got, u64::from(evaluation));
    }
}

#[test]
fn intels_own_root_has_its_name_in_claims_also_if_the_policy_names_it() {
    let (quote, collateral) = sample("tdx_quote_td15ex");
    let chain = &collateral.tcb_info_issuer_chain;
    let root = &chain[chain.rfind("-----BEGIN").unwrap()..];
    for root in ["", root] {
        let policy = json!({"measurements": {"1": "00".repeat(48)}, "intelRootKey": root});
        let policy = Policy::from_json(&policy.to_string()).unwrap();
        let hardware = td::QuoteJudge::new(&Arc::new(policy), &offline()).unwrap();
        let now = UnixTime::since_unix_epoch(Duration::from_secs(OCTOBER_2026));
        let quote = TdxQuote::parse(&quote).unwrap();
        let claims = hardware.judge(quote, Some(&collateral), now).unwrap();
        assert_eq!(claims.signed_by, "Intel SGX Root CA, PCK, quoting enclave");
    }
}

#[test]
fn a_genuine_quote_of_an_outdated_platform_is_refused_by_name() {
    let (quote, collateral) = sample("tdx_quote_outdated");
    let error = verify(&quote, &collateral, MARCH_2026).unwrap_err();
    assert!(
        error
            .text
            .contains("older than every TCB level that Intel lists: CPUSVN["),
        "{error}"
    );
}

/// The report of a TD in Azure, with a paravisor: TDREPORT_STRUCT after 32 bytes of Azure's. It has no quote, so a quote of our own
/// hierarchy carries its attributes and features.
#[test]
fn both_generations_of_azures_machines_meet_one_policy() {
    let file = rust_crate("az_cvm_vtpm", "az-cvm-vtpm").join("test/hcl-report-tdx.bin");
    let report = fs::read(file).unwrap();
    let of_td = report[32 + 512..][..16].to_vec();
    let parts = forged::Parts::default();
    let mut of_azure = parts.clone();
    of_azure.body[120..136].copy_from_slice(&of_td);
    let judged = |parts: &forged::Parts, demands: &str| {
        let signed = parts.sign(&[7; 64]);
        let quote = TdxQuote::parse(&signed.quote).unwrap();
        let verifier = signed.verifier();
        let verified = verifier.verify(quote, &signed.collateral, JULY_2025);
        let demands: TdxRequirements = serde_json::from_str(demands).unwrap();
        demands.judge(&verified.unwrap()).map(drop)
    };
    let refused = judged(&of_azure, "{}").unwrap_err();
    assert_eq!(
        refused.text,
        "TDATTRIBUTES: expected 0x0000000010000000 (SEPT_VE_DISABLE), got 0x0000000000000000"
    );
    let both = r#"{"tdAttributes":["0x10000000","0x0"]}"#;
    for parts in [&parts, &of_azure] {
        judged(parts, both).unwrap();
    }
}

#[test]
fn collateral_is_valid_for_its_time_and_its_platform_only() {
    let (quote, collateral) = sample("tdx_quote");
    let (_, other) = sample("tdx_quote_outdated");
    let (_, of_sgx) = sample("sgx_quote");
    for (collateral, now, why) in [
        (&collateral, 1_750_000_000, "not valid yet"),
        (&collateral, OCTOBER_2026, "expired"),
        (
            &other,
            MARCH_2026,
            "the TCB information is of platforms with FMSPC 90C06F000000",
        ),
        (
            &of_sgx,
            JULY_2025,
            "the TCB information cannot be read: it is that of SGX, expected that of TDX",
        ),
    ] {
        let error = verify(&quote, collateral, now).unwrap_err();
        assert!(error.text.contains(why), "{error}");
    }
    let swap = |change: fn(&mut TdxCollateral, TdxCollateral)| {
        let mut changed = collateral.clone();
        change(&mut changed, collateral.clone());
        verify(&quote, &changed, JULY_2025).unwrap_err()
    };
    for (error, why) in [
        (
            swap(|a, b| a.tcb_info = b.tcb_info + " "),
            "the signature of the TCB information is wrong",
        ),
        (
            swap(|a, b| a.tcb_info_signature = b.qe_identity_signature),
            "the signature of the TCB information is wrong",
        ),
        (
            swap(|a, b| a.qe_identity = b.tcb_info),
            "the signature of the QE identity is wrong",
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
        assert!(error.text.contains(why), "{why}: {error}");
    }
}

#[test]
fn each_changed_byte_of_a_genuine_quote_is_refused() {
    for (name, now) in [("tdx_quote", JULY_2025), ("tdx_quote_td15ex", OCTOBER_2026)] {
        let (quote, collateral) = sample(name);
        let good = verify(&quote, &collateral, now).unwrap();
        // the padding of a sample is not a part of the quote
        let end = quote.iter().rposition(|byte| *byte != 0).unwrap();
        // the third certificate, a copy of the root, is not read: the built-in root is used
        let begin = b"-----BEGIN CERTIFICATE-----";
        let mut begins = (0..end).filter(|at| quote[*at..].starts_with(begin));
        let root = begins.nth(2).unwrap();
        let mut of_text = 0;
        for at in 0..root {
            let mut changed = quote.clone();
            changed[at] ^= 0x20;
            if let Ok(verified) = verify(&changed, &collateral, now) {
                assert_eq!(
                    verified.quote().body,
                    good.quote().body,
                    "{name}: byte {at}"
                );
                assert_eq!(verified.status(), good.status(), "{name}: byte {at}");
                of_text += 1;
            }
        }
        assert!(of_text < 20, "{name}: {of_text} changes are not noticed");
    }
}

#[test]
fn junk_after_a_quote_is_refused_and_padding_is_not() {
    let (mut quote, _) = sample("tdx_quote");
    assert!(quote.ends_with(&[0; 16]));
    assert!(TdxQuote::parse(&quote).is_ok());
    quote.push(1);
    let error = TdxQuote::parse(&quote).unwrap_err();
    assert!(error.text.contains("follow the quote"), "{error}");
    let sgx = fs::read(samples().join("sgx_quote")).unwrap();
    let error = TdxQuote::parse(&sgx).unwrap_err();
    assert!(error.text.contains("version 3, expected 4 or 5"), "{error}");
}

#[test]
fn mutated_quotes_and_collateral_prove_nothing_else_and_end_without_a_panic() {
    for (name, now) in [("tdx_quote", JULY_2025), ("tdx_quote_td15ex", OCTOBER_2026)] {
        let (quote, collateral) = sample(name);
        let good = verify(&quote, &collateral, now).unwrap();
        let is_same = |verified: Verified<'_>| {
            assert_eq!(verified.quote().body, good.quote().body, "{name}");
            assert_eq!(verified.status(), good.status(), "{name}");
            assert_eq!(verified.platform(), good.platform(), "{name}");
            assert_eq!(verified.evaluation(), good.evaluation(), "{name}");
            assert_eq!(verified.collateral_age(), good.collateral_age(), "{name}");
        };
        for changed in mutations(&quote, 3000) {
            if let Ok(verified) = verify(&changed, &collateral, now) {
                is_same(verified);
            }
        }
        let text = serde_json::to_vec(&collateral).unwrap();
        for changed in mutations(&text, 1000) {
            if let Ok(changed) = serde_json::from_slice::<TdxCollateral>(&changed)
                && let Ok(verified) = verify(&quote, &changed, now)
            {
                is_same(verified);
            }
        }
    }
}

#[test]
fn what_a_policy_demands_of_a_genuine_machine_is_refused_by_name() {
    let (quote, collateral) = sample("tdx_quote");
    let verified = verify(&quote, &collateral, JULY_2025).unwrap();
    let judged = |json: &str| {
        let demands: TdxRequirements = serde_json::from_str(json).unwrap();
        demands.judge(&verified)
    };
    let (zero, aa) = ("00".repeat(48), "AA".repeat(48));
    for (json, why) in [
        (
            r#"{"xfam":"0xe7"}"#.into(),
            "XFAM: expected 0xe7, got 0x602e7: PKU (bit 9) on, AMX (bit 17) on, AMX (bit 18) on",
        ),
        (
            r#"{"xfam":["0xe7","0x2e7"]}"#.into(),
            "XFAM: expected 0xe7 or 0x2e7, got 0x602e7: PKU (bit 9) on",
        ),
        (
            format!(r#"{{"mrConfigId":["{aa}","{aa}"]}}"#),
            "MRCONFIGID: expected aaaa",
        ),
        (
            r#"{"tdAttributes":"0x10000001"}"#.into(),
            "TDATTRIBUTES: expected 0x0000000010000001 (DEBUG, SEPT_VE_DISABLE)",
        ),
        (
            format!(r#"{{"mrSeam":["{zero}"]}}"#),
            "(MRSEAM): expected 0000",
        ),
        (
            format!(r#"{{"mrConfigId":"{aa}"}}"#),
            "MRCONFIGID: expected aaaa",
        ),
        (format!(r#"{{"mrOwner":"{aa}"}}"#), "MROWNER: expected aaaa"),
        (
            format!(r#"{{"mrOwnerConfig":"{aa}"}}"#),
            "MROWNERCONFIG: expected aaaa",
        ),
        (
            format!(
                r#"{{"platforms":["{0}","{1}"]}}"#,
                "aa".repeat(16),
                "bb".repeat(16)
            ),
            "(PPID, platform instance): expected aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa or bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb, got ",
        ),
        ("{}".into(), "evaluation 17, expected at least 20"),
        (
            r#"{"maximumCollateralDays":11}"#.into(),
            "the collateral is 12 days old, expected at most 11",
        ),
        (
            r#"{"tcbStatuses":["OutOfDate"]}"#.into(),
            "is UpToDate, expected OutOfDate",
        ),
    ] {
        let error = judged(&json).unwrap_err();
        assert!(error.text.contains(why), "{why}: {error}");
        // a program finds the requirement by its name in the policy; without one the sample is old
        let mut fields = [&error].into_iter().chain(&error.others);
        let is_named = |it: &Refusal| json.contains(&format!("{:?}", it.field.as_ref().unwrap()));
        assert!(json == "{}" || fields.any(is_named), "{error:?}");
    }
    let seam: String = verified
        .quote()
        .body
        .mr_seam
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    for json in [
        r#"{"minimumEvaluation":17}"#.to_owned(),
        r#"{"minimumEvaluation":17,"maximumCollateralDays":12}"#.into(),
        // Intel names none for this platform
        r#"{"minimumEvaluation":17,"acceptedAdvisories":["INTEL-SA-00837"],"rejectedAdvisories":["INTEL-SA-00837"]}"#.into(),
        format!(
            r#"{{"minimumEvaluation":17,"xfam":["0xe7","0x602e7"],"mrConfigId":["{aa}","{zero}"],"mrOwner":["{aa}","{zero}"]}}"#
        ),
        format!(
            r#"{{"minimumEvaluation":17,"mrSeam":["{zero}","{seam}"],"mrConfigId":"{zero}","mrOwner":"{zero}"}}"#
        ),
    ] {
        judged(&json).unwrap();
    }
}

#[test]
fn a_policy_that_means_nothing_is_refused() {
    for (json, why) in [
        (r#"{"mrSeams":[]}"#, "unknown field `mrSeams`"),
        (
            r#"{"tcbStatuses":["Revoked"]}"#,
            "no policy can accept a platform that is Revoked",
        ),
        (
            r#"{"tcbStatuses":["uptodate"]}"#,
            "unknown variant `uptodate`",
        ),
        (
            r#"{"mrConfigId":"aa"}"#,
            r#""aa": expected 96 hexadecimal digits"#,
        ),
        (
            r#"{"platforms":["dddddddddddddddddddddddddddddddg"]}"#,
            "expected 32 hexadecimal digits",
        ),
        (r#"{"platforms":[""]}"#, "expected 32 hexadecimal digits"),
        (
            r#"{"tdAttributes":"0x30000000"}"#,
            "no policy can allow 0x0000000020000000 (MIGRATABLE)",
        ),
        (
            r#"{"tdAttributes":"0x10020000"}"#,
            "no policy can allow 0x0000000000020000 (SERVTD_EXT)",
        ),
        (
            r#"{"tdAttributes":"0x10000002"}"#,
            "no policy can allow 0x0000000000000002 (reserved bit 1)",
        ),
        (r#"{"tdAttributes":"0x10040000"}"#, "(reserved bit 18)"),
        (
            r#"{"tdAttributes":["0x0","0x30000000"]}"#,
            "no policy can allow 0x0000000020000000 (MIGRATABLE)",
        ),
        (r#"{"tdAttributes":["0x0",1]}"#, "expected a string"),
        (
            r#"{"mrServiceTd":["00"]}"#,
            "expected 96 hexadecimal digits",
        ),
        (
            r#"{"tdAttributes":"10000000"}"#,
            "expected 0x and at most 16 hexadecimal digits",
        ),
        (
            r#"{"xfam":"0x10000000000000000"}"#,
            "expected 0x and at most 16 hexadecimal digits",
        ),
        (r#"{"xfam":"0x800e7"}"#, "the features 0x80000 are unknown"),
        (r#"{"maximumCollateralDays":-1}"#, "invalid value"),
        (
            r#"{"xfam":["0xe7","0x800e7"]}"#,
            "the features 0x80000 are unknown",
        ),
        (
            r#"{"rejectedAdvisories":["SA-00837"]}"#,
            "expected a name like INTEL-SA-00837",
        ),
        (
            r#"{"acceptedAdvisories":["INTEL-SA-0837"]}"#,
            "is not an advisory",
        ),
    ] {
        let error = serde_json::from_str::<TdxRequirements>(json)
            .unwrap_err()
            .to_string();
        assert!(error.contains(why), "{json}: {error}");
    }
    let all = format!(
        r#"{{"tcbStatuses":["UpToDate","OutOfDate"],"minimumEvaluation":17,"maximumCollateralDays":3,"tdAttributes":"0x10000001","xfam":"0x642e7","mrSeam":["{0}"],"mrConfigId":"{0}","mrOwner":"{0}","mrOwnerConfig":"{0}","platforms":["{1}"]}}"#,
        "ab".repeat(48),
        "cd".repeat(16)
    );
    let demands: TdxRequirements = serde_json::from_str(&all).unwrap();
    assert_eq!(serde_json::to_string(&demands).unwrap(), all);
    let more = r#""tcbStatuses":["UpToDate","OutOfDate"],"platformGraceDays":30,"acceptedAdvisories":["INTEL-SA-00837"],"rejectedAdvisories":["INTEL-SA-00960"]"#;
    let all = all.replace(r#""tcbStatuses":["UpToDate","OutOfDate"]"#, more);
    let all = all.replace(r#""xfam":"0x642e7""#, r#""xfam":["0x642e7","0xe7"]"#);
    let more = r#""tdAttributes":["0x10000001","0x0"]"#;
    let all = all.replace(r#""tdAttributes":"0x10000001""#, more);
    let named = format!(r#""mrServiceTd":["{}"],"platforms""#, "ef".repeat(48));
    let all = all.replace(r#""platforms""#, &named);
    let demands: TdxRequirements = serde_json::from_str(&all).unwrap();
    assert_eq!(serde_json::to_string(&demands).unwrap(), all);
}

/// The reasons for which we may refuse a quote that the peer accepts: it ignores a type, bytes after a quote and its parts,
/// certificates that it does not need, some attributes of the TD, the PCE ID, and the date when a list was issued.
const STRICTER: [&str; 10] = [
    "certification data of the type",
    "follow the quote",
    "follow the signature",
    "follow the certificates",
    "the chain of the",
    "TDATTRIBUTES",
    "XFAM",
    "FMSPC",
    "authentication data",
    "CRL is not valid yet",
];

/// Returns the verdicts of the peer on files of quotes and collateral.
fn verdicts_of_dcap_qvl(folder: &Path, cases: &[(Vec<u8>, Vec<u8>, u64)]) -> Vec<String> {
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
    let output = Command::new(rust_program("dcap_qvl", "dcap-qvl-peer"))
        .stdin(fs::File::open(list).unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(String::from).collect()
}

/// Returns our verdict on the same files, in the peer's words.
fn our_verdict(quote: &[u8], collateral: &[u8], now: u64) -> Result<TcbStatus, String> {
    let collateral = serde_json::from_slice(collateral).map_err(|error| error.to_string())?;
    let verified = verify(quote, &collateral, now)?;
    let any = TdxRequirements {
        tcb_statuses: vec![verified.status()],
        minimum_evaluation: 0,
        maximum_collateral_days: 30,
        ..TdxRequirements::default()
    };
    any.judge(&verified)?;
    Ok(verified.status())
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
        let mut collateral: TdxCollateral = serde_json::from_slice(text).unwrap();
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
