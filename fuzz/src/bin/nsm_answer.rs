//! A NitroTPM's answer to a request for an attestation document, which is in the NV index.
#![no_main]

use tpm::MESSAGE_SIZE;
use verifier::nsm::NsmResponse;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let bytes = &bytes[..bytes.len().min(MESSAGE_SIZE)];
    match NsmResponse::parse(bytes) {
        Ok(NsmResponse::Document(document)) => assert!(document.len() < bytes.len()),
        Ok(NsmResponse::Error(name)) => assert!(name.len() <= 40),
        Err(why) => assert!(why.to_string().len() < 450),
    }
});
