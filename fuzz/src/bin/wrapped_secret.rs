//! The file of a wrapped master secret, and the key URI in it, which decides where a request goes.
#![no_main]

use keywrap::{Wrapped, is_wrapped};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
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
