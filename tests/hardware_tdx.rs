//! Quotes of genuine TDX machines. They are in packages of others, which Cargo and the Go tool chain download once and check. Their
//! collateral has ended, so each is verified at a fixed time at which it was valid.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use hardware::tdx::demands::{Demands, Number};
use hardware::tdx::quote::Quote;
use hardware::tdx::tcb::Status;
use hardware::tdx::{Collateral, Verified, Verifier};
use support::mutation::mutations;

/// A time at which the collateral of `tdx_quote` was valid: 2025-07-01.
const JULY_2025: u64 = 1_751_328_000;
/// A time at which the collateral of `tdx_quote_outdated` was valid: 2026-03-01.
const MARCH_2026: u64 = 1_772_323_200;
/// A time at which the collateral of `tdx_quote_td15ex` was valid: 2026-10-20.
const OCTOBER_2026: u64 = 1_792_454_400;

/// Returns the folder of a crate that `tests/dcap_qvl/Cargo.lock` names.
fn samples() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let output = Command::new(env!("CARGO"))
            .args([
                "metadata",
                "--format-version=1",
                "--locked",
                "--manifest-path",
            ])
            .arg(Path::new(support::ROOT).join("tests/dcap_qvl/Cargo.toml"))
            .output()
            .unwrap();
        assert!(output.status.success(), "cargo metadata: {output:?}");
        let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let packages = metadata["packages"].as_array().unwrap();
        let package = packages
            .iter()
            .find(|package| package["name"] == "dcap-qvl")
            .unwrap();
        let manifest = Path::new(package["manifest_path"].as_str().unwrap());
        manifest.parent().unwrap().join("sample")
    })
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
        let claims = Demands::default().judge(&parsed, &verified).unwrap();
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
    let usual = Demands::default;
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
            refused(demands(r#"{"minimumEvaluation":18}"#), same, &verified),
            "evaluation 17, expected at least 18",
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
