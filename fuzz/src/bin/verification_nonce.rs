//! The target of a request to the verification service of HTTP.
#![no_main]

use libfuzzer_sys::fuzz_target;
use services::join_service::constellation::nonce_of;

fuzz_target!(|input: &[u8]| {
    if let Ok(target) = std::str::from_utf8(input)
        && let Some(nonce) = nonce_of(target)
    {
        assert!(nonce.len() < target.len());
    }
});
