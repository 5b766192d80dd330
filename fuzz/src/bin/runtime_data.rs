//! The runtime data in a report of Azure's paravisor: JSON with the attestation key.
#![no_main]

use verifier::hcl::RuntimeData;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(data) = RuntimeData::parse(bytes) {
        // a SubjectPublicKeyInfo of an RSA key
        assert_eq!(data.attestation_key[..2], [0x30, 0x82]);
    }
});
