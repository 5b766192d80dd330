//! The report of Azure's paravisor, as a TPM stores it.
#![no_main]

use verifier::hcl::HclReport;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(report) = HclReport::parse(bytes) {
        assert!(report.runtime_data.len() < bytes.len());
    }
});
