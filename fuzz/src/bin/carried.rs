//! The collateral that a join service brings to a node: whatever it is, nothing but the signatures of AMD and Intel is believed.
#![no_main]

use std::time::Duration;

use attest::attestation::carried::Carried;
use attest::attestation::sources::Sources;
use hardware::snp::chain::check_list;
use hardware::snp::report::Signer;
use hardware::snp::tcb::Product;
use hardware::tdx::Verifier;
use hardware::tdx::quote::{Attributes, Body, Quote};
use libfuzzer_sys::fuzz_target;
use prost::Message;
use proto::attested::Proof;
use rustls::pki_types::UnixTime;

/// 2025-07-01: the collateral of the seed was valid then.
const NOW: u64 = 1_751_328_000;

fuzz_target!(|bytes: &[u8]| {
    let Ok(proof) = Proof::decode(bytes) else {
        return;
    };
    let carried = Carried::default();
    if let Some(collateral) = &proof.collateral {
        carried.take(collateral);
    }
    let now = UnixTime::since_unix_epoch(Duration::from_secs(NOW));
    if let Ok(fetched) = carried.snp_authority(Product::Milan, Signer::Vcek)
        && let Ok(list) = &fetched.revoked
    {
        short(&check_list(list, roots::AMD_MILAN.root.der, now).unwrap_err());
    }
    match carried.tdx_collateral(&quote()) {
        Ok(collateral) => {
            let verifier = Verifier::of_intel().unwrap();
            short(&verifier.verify(quote(), &collateral, NOW).unwrap_err());
        }
        Err(why) => short(&why),
    }
});

/// It goes to a log.
fn short(error: &str) {
    assert!(!error.is_empty() && error.len() < 1000, "{error}");
}

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
