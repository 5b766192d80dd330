//! The keys of attestation results, which the API server keeps: those that are read have a public part, and can be renewed at any time.
#![no_main]

use services::member_controller::watch::signing::Keys;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(keys) = Keys::parse(bytes) else {
        return;
    };
    let read = Keys::parse(keys.to_json().expose()).unwrap();
    assert_eq!(read.public(), keys.public());
    for now in [0, 1_800_000_000, u64::MAX / 2] {
        if let Some(renewed) = keys.renewed(now, 900) {
            assert!(renewed.sign(&serde_json::Value::Null, now).is_some());
            Keys::parse(renewed.to_json().expose()).unwrap();
        }
    }
});
