//! Intel's collateral as a machine sends it: whatever it is, it ends in a refusal, as nothing but Intel's signatures is believed.
#![no_main]

use hardware::tdx::quote::{Attributes, Body, Quote};
use hardware::tdx::{Collateral, Verifier};
use libfuzzer_sys::fuzz_target;

/// 2025-07-01: the collateral of the seeds, of a hierarchy of the tests, was valid then.
const NOW: u64 = 1_751_328_000;

fuzz_target!(|bytes: &[u8]| {
    let Ok(collateral) = serde_json::from_slice::<Collateral>(bytes) else {
        return;
    };
    let verifier = Verifier::of_intel().unwrap();
    let error = verifier.verify(quote(), &collateral, NOW).unwrap_err();
    // it goes to a log
    assert!(!error.is_empty() && error.len() < 1000, "{error}");
});

/// Returns a quote that nothing signs.
fn quote() -> Quote<'static> {
    let body = Body {
        tee_tcb_svn: [0; 16],
        mr_seam: [0; 48],
        mr_signer_seam: [0; 48],
        seam_attributes: 0,
        td_attributes: Attributes::USUAL,
        xfam: 3,
        mr_td: [0; 48],
        mr_config_id: [0; 48],
        mr_owner: [0; 48],
        mr_owner_config: [0; 48],
        rtmr: [[0; 48]; 4],
        report_data: [0; 64],
        td15: None,
        service_tds: None,
    };
    Quote {
        version: 4,
        body,
        signed: &[],
        signature: &[0; 64],
        attestation_key: &[0; 64],
        qe_report: &[0; 384],
        qe_signature: &[0; 64],
        authentication: &[0; 32],
        pck_chain: &[],
    }
}
