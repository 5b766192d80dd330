//! TDX quotes: their parts, and the platform that their certificates name. The seed is a genuine quote.
#![no_main]

use hardware::tdx::TdxQuote;
use hardware::tdx::dcap::named_platform;
use hardware::tdx::quote::MAX_QUOTE;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(quote) = TdxQuote::parse(bytes) else {
        return;
    };
    assert!(bytes.len() <= MAX_QUOTE && quote.signed.len() < bytes.len());
    assert!(bytes.starts_with(quote.signed));
    let _ = named_platform(&quote);
});
