//! Helpers that several targets share.

use hardware::tdx::quote::{Attributes, Body, TdxQuote};

/// 2025-07-01: the collateral of the seeds, from a hierarchy of the tests, is valid at this time.
pub const NOW: u64 = 1_751_328_000;

/// Checks an error, which goes to a log.
pub fn short(error: &(impl std::fmt::Display + ?Sized)) {
    let error = error.to_string();
    assert!(!error.is_empty() && error.len() < 1000, "{error}");
}

/// Returns a quote that nothing signs.
pub fn quote() -> TdxQuote<'static> {
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
    TdxQuote {
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
