//! Certificates with one fault each, and the keys of clouds (VLEK).

use std::time::Duration;

use hardware::snp::chain::Chain;
use hardware::snp::report::ReportSigner;
use hardware::snp::requirements::SnpRequirements;
use rustls_pki_types::UnixTime;
use serde_json::{Value, json};

use crate::forged::{CLOUD, Hierarchy, sign_by_the_cloud};

const OF_CHIP: [&str; 3] = ["vcek", "ask", "ark"];
const OF_CLOUD: [&str; 3] = ["vlek", "asvk", "ark"];

/// Judges the report of a chip, or of a cloud, by these certificates.
fn refusal(names: [&str; 3]) -> String {
    let is_of_cloud = names[0].starts_with("vlek");
    let change = |report: &mut [u8]| {
        if is_of_cloud {
            sign_by_the_cloud(report);
        }
    };
    let judged = Hierarchy::get().judge_by(names, change, &SnpRequirements::default());
    judged
        .expect_err(&format!("accepted: {names:?}"))
        .to_string()
}

#[test]
fn each_fault_of_a_certificate_is_refused_by_its_name() {
    let leaf = |name: &'static str| [name, OF_CHIP[1], OF_CHIP[2]];
    let of_cloud = |name: &'static str| [name, OF_CLOUD[1], OF_CLOUD[2]];
    const NOT_LEADING: &str = "does not lead to the root";
    for (names, expected) in [
        (leaf("vcek-name"), "neither SEV-VCEK nor SEV-VLEK"),
        (leaf("vcek-p256"), "not on P-384"),
        (
            leaf("vcek-cloud"),
            "must name a chip of 64 bytes and no cloud",
        ),
        (leaf("vcek-no-chip"), "must name a chip of 64 bytes"),
        (leaf("vcek-short-chip"), "must name a chip of 64 bytes"),
        (leaf("vcek-rome"), "product \"Rome-B0\" is not known"),
        (leaf("vcek-no-product"), "it names no product"),
        (
            leaf("vcek-of-genoa"),
            "a VCEK of a Genoa is issued by SEV-Genoa",
        ),
        (leaf("vcek-no-tee"), "lacks the extension 3.2"),
        (
            leaf("vcek-large"),
            "extension 1.3.6.1.4.1.3704.1 [3, 1] is wrong",
        ),
        (leaf("vcek-unused"), "a TCB component that is reserved"),
        (leaf("vcek-fmc"), "a TCB component that only a Turin has"),
        (leaf("vcek-ca"), "the certificate is a CA certificate"),
        (
            leaf("vcek-pkcs1"),
            "with an algorithm that this program does not verify",
        ),
        (
            of_cloud("vlek-chip"),
            "a VLEK must name a cloud and no chip",
        ),
        (
            of_cloud("vlek-no-cloud"),
            "a VLEK must name a cloud and no chip",
        ),
        // the wrong authority signed
        (
            ["vcek-of-asvk", "asvk", "ark"],
            "a VCEK of a Milan is issued by SEV-Milan, not by",
        ),
        (
            ["vlek-of-ask", "ask", "ark"],
            "a VLEK of a Milan is issued by SEV-VLEK-Milan, not by",
        ),
        // the right name, and the certificates of another product, or of another root of the same name
        (["vcek", "ask-genoa", "ark-genoa"], NOT_LEADING),
        (["vcek", "ask", "ark-genoa"], NOT_LEADING),
        (["vcek", "ask", "other"], NOT_LEADING),
        (["vcek", "ask-of-other", "ark"], NOT_LEADING),
        (["vcek", "ark", "ark"], NOT_LEADING),
        (["vlek", "ask", "ark"], NOT_LEADING),
        // the authority may not sign
        (["vcek", "ask-no-ca", "ark"], "is not a CA certificate"),
        (["vcek", "ask-usage", "ark"], NOT_LEADING),
    ] {
        let why = refusal(names);
        assert!(
            why.contains(expected),
            "{names:?}, expected {expected}: {why}"
        );
    }
    // the same authority is accepted under its own root
    Hierarchy::get()
        .judge_by(
            ["vcek", "ask-of-other", "other"],
            |_| (),
            &SnpRequirements::default(),
        )
        .unwrap();
}

/// The error goes to a log, and any peer that can reach a service can cause it.
#[test]
fn a_refusal_is_short_whatever_a_certificate_is_for() {
    let why = refusal(["vcek-usages", "ask", "ark"]);
    assert!(
        why.contains("for another use (extended key usage)"),
        "{why}"
    );
    assert!(why.len() < 1000, "{why}");
}

#[test]
fn each_certificate_counts_in_its_time_alone() {
    const DAY: i64 = 86_400;
    let at = |names: [&str; 3], days: i64| {
        let [leaf, ask, ark] = names.map(|name| Hierarchy::get().certificate(name));
        let chain = Chain {
            leaf: &leaf,
            intermediate: &ask,
            root: &ark,
            revoked: None,
        };
        let now = UnixTime::now().as_secs().checked_add_signed(days * DAY);
        let now = UnixTime::since_unix_epoch(Duration::from_secs(now.unwrap()));
        let verified = chain.verify(ReportSigner::Vcek, now).map(drop);
        verified.map_err(|refusal| refusal.to_string())
    };
    for names in [
        OF_CHIP,
        ["vcek-short", "ask", "ark"],
        ["vcek", "ask-short", "ark"],
    ] {
        at(names, 1).unwrap();
        let why = at(names, -1).unwrap_err();
        assert!(
            why.contains("not valid yet: is the clock"),
            "{names:?}: {why}"
        );
    }
    at(OF_CHIP, 31).unwrap();
    for names in [["vcek-short", "ask", "ark"], ["vcek", "ask-short", "ark"]] {
        let why = at(names, 31).unwrap_err();
        assert!(why.contains("has expired"), "{names:?}: {why}");
    }
}

#[test]
fn a_report_that_a_cloud_signed_names_the_cloud_and_no_chip() {
    let judge = |demands: Value, change: fn(&mut [u8])| {
        let demands: SnpRequirements = serde_json::from_value(demands).unwrap();
        let change = |report: &mut [u8]| {
            sign_by_the_cloud(report);
            change(report);
        };
        Hierarchy::get().judge_by(OF_CLOUD, change, &demands)
    };
    let claims = judge(json!({"clouds": [CLOUD]}), |_| ()).unwrap();
    assert_eq!(claims.signed_by, "SEV-VLEK-Milan, SEV-VLEK");
    assert_eq!(claims.chip, None);
    let cloud = claims.properties.iter().find(|one| one.name == "CSP_ID");
    assert_eq!(cloud.unwrap().value, CLOUD);

    for (demands, change, expected) in [
        (
            json!({}),
            (|report| report[0x1a0] = 0xc5) as fn(&mut [u8]),
            "must not name a chip (CHIP_ID)",
        ),
        (
            json!({"clouds": ["CN=elsewhere"]}),
            |_| (),
            "the cloud of the VLEK is",
        ),
        (
            json!({"chips": ["c5".repeat(64)]}),
            |_| (),
            "a VLEK names none",
        ),
        // the key of the chip signs the report, and the certificate of the cloud is sent with it
        (
            json!({}),
            |report| report[0x48] &= !(1 << 2),
            "signed by a VCEK, but the certificate is that of a VLEK",
        ),
        (
            json!({}),
            |report| report[0x180] = 3,
            "but the certificate of its chip is for",
        ),
    ] {
        let why = judge(demands, change).expect_err(expected);
        assert!(why.text.contains(expected), "expected {expected}: {why}");
    }
    // a report that the chip signed, as one of the cloud
    let by_chip =
        Hierarchy::get().judge_by(OF_CHIP, sign_by_the_cloud, &SnpRequirements::default());
    let why = by_chip.unwrap_err();
    assert!(
        why.text
            .contains("signed by a VLEK, but the certificate is that of a VCEK"),
        "{why}"
    );
}
