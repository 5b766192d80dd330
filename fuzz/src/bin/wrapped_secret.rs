//! The file of a wrapped master secret, the key URI in it, and the URI of a store: these decide which server gets a request.
#![no_main]

use keywrap::{Wrapped, is_wrapped, store};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    if let Some(uri) = store::uri(input)
        && let Err(error) = store::check(uri)
    {
        assert!(error.to_string().len() < 64 + 2 * uri.len() + 1024);
    }
    match Wrapped::parse(input) {
        Ok(wrapped) => {
            assert!(is_wrapped(input));
            assert!(Wrapped::parse(wrapped.text().as_bytes()).as_ref() == Ok(&wrapped));
            if let Err(error) = keywrap::open(wrapped.kms()) {
                assert!(error.to_string().len() < 64 + 2 * wrapped.kms().len() + 1024);
            }
        }
        Err(error) => assert!(error.to_string().len() < 4096),
    }
});
