//! The answers of Microsoft's attestation service, or the claims of its token: no answer confirms a report that it does not
//! contain, and errors are short.
#![no_main]

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use collateral::parsers::token;
use firstlight_fuzz::short;
use hardware::Refusal;
use hardware::snp::report::{LEN, Report};
use serde_json::Value;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // a report of version 2 whose signature algorithm and policy are valid
    let mut report = [0; LEN];
    (report[0], report[0xa], report[0x34]) = (2, 2, 1);
    report[0x50..0x90].fill(0xdd);
    let report = Report::parse(&report).unwrap();
    let judge = |answer: &[u8]| {
        let word = token(answer).map_err(Refusal::from)?;
        word.check("https://x.attest.azure.net", &report)
    };
    if let Err(why) = judge(bytes) {
        short(&why);
    }
    let claims = URL_SAFE_NO_PAD.encode(bytes);
    match judge(format!("{{\"token\":\"e30.{claims}.c2ln\"}}").as_bytes()) {
        Err(why) => short(&why),
        Ok(()) => {
            // claims that are not used may have numbers that other parsers refuse
            let Ok(claims) = serde_json::from_slice::<Value>(bytes) else {
                return;
            };
            for (claim, expected) in [
                ("x-ms-sevsnpvm-reportdata", &*"dd".repeat(64)),
                ("x-ms-compliance-status", "azure-compliant-cvm"),
            ] {
                let said = claims[claim].as_str().unwrap();
                assert!(said.eq_ignore_ascii_case(expected), "{claim}: {said}");
            }
        }
    }
});
