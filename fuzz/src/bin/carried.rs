//! The collateral that a join service sends to a node: the node trusts only what AMD and Intel signed.
#![no_main]

use std::time::Duration;

use firstlight_fuzz::{NOW, quote, short};
use hardware::snp::chain::check_list;
use hardware::snp::report::ReportSigner;
use hardware::snp::tcb::Product;
use hardware::tdx::Verifier;
use libfuzzer_sys::fuzz_target;
use prost::Message;
use proto::attested::Proof;
use rustls::pki_types::UnixTime;
use verifier::carried::Carried;
use verifier::sources::Sources;

fuzz_target!(|bytes: &[u8]| {
    let Ok(proof) = Proof::decode(bytes) else {
        return;
    };
    let carried = Carried::default();
    if let Some(collateral) = &proof.collateral {
        carried.take(collateral);
    }
    let now = UnixTime::since_unix_epoch(Duration::from_secs(NOW));
    if let Ok(fetched) = carried.snp_authority(Product::Milan, ReportSigner::Vcek)
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
