//! Our verdicts on certificates and reports against those of the crate `sev`, of virtee.

use std::fs;
use std::process::Command;
use std::time::Duration;

use hardware::snp::chain::Chain;
use hardware::snp::report::Report;
use hardware::snp::requirements::SnpRequirements;
use hardware::snp::tcb::Product;
use hardware::snp::verify;
use rustls_pki_types::UnixTime;
use support::foreign::rust_program;
use support::mutation::mutations;

use crate::forged::{Hierarchy, correct_report};
use crate::{amd, evidence, milan_report};

/// Report, VCEK, ASK, ARK.
type Case = [Vec<u8>; 4];

/// Faults that we refuse and the peer does not check: dates, names, extensions, versions of the TCB, and properties that no operator wants.
const STRICTER: [&str; 18] = [
    // the unused bytes of its numbers are not zero
    "the signature is malformed",
    "a certificate is not valid yet",
    "a certificate has expired",
    "does not lead to the root",
    "certificate of the chip's key",
    "cannot be read",
    "is issued by",
    "that of a",
    "but the certificate",
    "of another chip",
    "the root",
    "guest policy",
    "reserved",
    "VMPL",
    "CURRENT_TCB",
    "runs below the committed",
    "signature algorithm",
    "no known product",
];

/// 2029-01-01: the genuine certificates are valid, and those of the tests too.
fn in_2029() -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(1_861_920_000))
}

fn verdicts_of_sev(cases: &[Case]) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let mut lines = String::new();
    for (number, case) in cases.iter().enumerate() {
        let write = |(part, content): (usize, &Vec<u8>)| {
            let path = folder.path().join(format!("{number}.{part}"));
            fs::write(&path, content).unwrap();
            path.display().to_string()
        };
        let paths: Vec<_> = case.iter().enumerate().map(write).collect();
        lines += &(paths.join(" ") + "\n");
    }
    let list = folder.path().join("list");
    fs::write(&list, lines).unwrap();
    let output = Command::new(rust_program("sev_peer", "sev-peer"))
        .stdin(fs::File::open(list).unwrap())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(String::from).collect()
}

/// The case without the reserved bytes of the four TCBs: the peer encodes the report again without them before it verifies the signature,
/// so it accepts each value there.
fn as_sev_signs(case: &Case) -> Case {
    let mut case = case.clone();
    for tcb in [0x38, 0x180, 0x1e0, 0x1f0] {
        case[0][tcb + 2..tcb + 6].fill(0);
    }
    case
}

fn our_verdict([report, vcek, ask, ark]: &Case) -> Result<(), String> {
    let chain = Chain {
        leaf: vcek,
        intermediate: ask,
        root: ark,
        revoked: None,
    };
    let report = Report::parse(report)?;
    let verified = verify(&report, &chain, &SnpRequirements::default(), in_2029()).map(drop);
    verified.map_err(|refusal| refusal.to_string())
}

#[test]
#[ignore = "it builds the packages of the peer"]
fn we_accept_nothing_that_sev_refuses() {
    let [milan_ask, milan_ark] = ["ask", "ark"].map(|name| amd(Product::Milan, name).to_vec());
    let genuine = [
        milan_report(),
        evidence("vcek_milan.der"),
        milan_ask,
        milan_ark,
    ];
    let mut forged = correct_report();
    Hierarchy::get().sign(&mut forged);
    let of_tests = |name| Hierarchy::get().certificate(name).to_vec();
    let ours = [forged, of_tests("vcek"), of_tests("ask"), of_tests("ark")];
    let mut cases = vec![];
    for valid in [&genuine, &ours] {
        cases.push(valid.clone());
        for part in 0..4 {
            for changed in mutations(&valid[part], 400) {
                let mut case = valid.clone();
                case[part] = changed;
                cases.push(case);
            }
        }
        // each byte that the chip signs, and the signature
        for at in 0..0x330 {
            let mut case = valid.clone();
            case[0][at] ^= 1;
            cases.push(case);
        }
    }
    // certificates of other products and of the other hierarchy
    for product in Product::ALL {
        for (part, name) in [(2, "ask"), (3, "ark")] {
            for valid in [&genuine, &ours] {
                let mut case = valid.clone();
                case[part] = amd(product, name).to_vec();
                cases.push(case);
            }
        }
    }
    let verdicts = verdicts_of_sev(&cases);
    assert_eq!(verdicts.len(), cases.len());
    let (mut both, mut stricter, mut unexplained) = (0, 0, vec![]);
    for (case, theirs) in cases.iter().zip(&verdicts) {
        match (our_verdict(case), theirs == "accepted") {
            (Ok(()), true) => both += 1,
            (Err(_), false) => {}
            // the peer also checks that the root signed itself, which a root that we are given need not have
            (Ok(()), false) if case[3] != genuine[3] && case[3] != ours[3] => {}
            (Ok(()), false) => unexplained.push(format!("only we accept it: {theirs}")),
            (Err(why), true) => {
                stricter += 1;
                if why.contains("is not signed by") && our_verdict(&as_sev_signs(case)).is_ok() {
                    continue;
                }
                if !STRICTER.iter().any(|reason| why.contains(reason)) {
                    unexplained.push(format!("only sev accepts it: {why}"));
                }
            }
        }
    }
    println!(
        "{} cases: both accept {both}, only sev {stricter}",
        cases.len()
    );
    assert!(unexplained.is_empty(), "{unexplained:#?}");
    assert!(both >= 2 && both < cases.len() / 2);
}
