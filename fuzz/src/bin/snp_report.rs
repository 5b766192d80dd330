//! Reports of SEV-SNP: their parser, and the check of a policy's requirements. The seeds are reports of version 2 and 5.
#![no_main]

use hardware::snp::report::{LEN, Report};
use hardware::snp::tcb::Product;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(report) = Report::parse(bytes) else {
        return;
    };
    assert_eq!(bytes.len(), LEN);
    assert_eq!(report.signed(), &bytes[..0x2a0]);
    assert!((2..=5).contains(&report.version) && report.vmpl <= 3);
    assert_eq!(report.cpuid.is_some(), report.version >= 3);
    assert_eq!(report.mitigations.is_some(), report.version >= 5);
    let _ = (report.signer(), report.signature());
    for product in Product::ALL {
        if let Ok(tcbs) = report.tcbs(product) {
            // a version with the maximum of each part is below neither of the two
            let highest = tcbs.current.max(&tcbs.launch);
            assert!(highest.below(&tcbs.current).is_empty());
            assert!(highest.below(&tcbs.launch).is_empty());
        }
    }
});
