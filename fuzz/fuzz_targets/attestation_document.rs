//! A peer's attestation document, and what a TPM is said to have signed in it.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../src/attestation/document.rs"]
#[allow(dead_code)] // of it, this fuzzer does not need all
mod document;
#[path = "../../src/attestation/quote.rs"]
mod quote;
use document::Document;
use quote::{Attest, Key};

fuzz_target!(|input: &[u8]| {
    if let Ok(document) = serde_json::from_slice::<Document>(input) {
        for quote in &document.attestation.quotes {
            if let Some(values) = quote.pcrs.by_number() {
                assert!(values.keys().all(|pcr| *pcr < 32) && values.len() == quote.pcrs.pcrs.len());
            }
            read(&document.attestation.ak_pub.0, &quote.quote.0, &quote.raw_sig.0);
        }
        let again = serde_json::to_vec(&document).expect("what was read can be written");
        assert!(serde_json::from_slice::<Document>(&again).is_ok());
    }
    // the structures themselves, without a way through base64
    read(input, input, input);
    let third = input.len() / 3;
    read(&input[..third], &input[third..2 * third], &input[2 * third..]);
});

fn read(key: &[u8], attest: &[u8], signature: &[u8]) {
    if let Some(attest) = Attest::parse(attest) {
        assert!(attest.pcrs.is_sorted() && attest.pcrs.iter().all(|pcr| *pcr < 32));
    }
    if let Ok(key) = Key::parse(key) {
        let _ = key.signed(attest, signature);
    }
}
