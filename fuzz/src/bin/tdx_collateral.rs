//! Intel's collateral as a machine sends it: a mutated input is always refused, because Intel has not signed it.
#![no_main]

use firstlight_fuzz::{NOW, quote, short};
use hardware::tdx::{TdxCollateral, Verifier};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(collateral) = serde_json::from_slice::<TdxCollateral>(bytes) else {
        return;
    };
    let verifier = Verifier::of_intel().unwrap();
    short(&verifier.verify(quote(), &collateral, NOW).unwrap_err());
});
