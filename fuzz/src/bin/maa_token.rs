//! What Microsoft's attestation service answers: whatever it is, it vouches for no report that it does not repeat, and its errors are short.
#![no_main]

use collateral::parsers::token;
use hardware::snp::report::{LEN, Report};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    // a report of version 2 whose signature algorithm and policy are valid
    let mut report = [0; LEN];
    (report[0], report[0xa], report[0x34]) = (2, 2, 1);
    report[0x50..0x90].fill(0xdd);
    let report = Report::parse(&report).unwrap();
    let judged = token(bytes).and_then(|word| word.check("https://x.attest.azure.net", &report));
    match judged {
        Ok(()) => assert!(bytes.len() > 500),
        Err(why) => assert!(!why.is_empty() && why.len() < 1000, "{why}"),
    }
});
