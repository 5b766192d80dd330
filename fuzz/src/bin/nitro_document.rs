//! The attestation document of a NitroTPM.
#![no_main]

use verifier::nitro_document::NitroDocument;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(document) = NitroDocument::parse(bytes) {
        assert!(document.pcrs.values().all(|value| value.len() == 48));
    }
});
