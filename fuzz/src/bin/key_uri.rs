//! Key URIs: an accepted URI parses to the same value after it was written, and gives keys.
#![no_main]

use base::crypto::Dek;
use base::master_secret::MasterSecret;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let (kms_uri, storage_uri) = text.split_once('\n').unwrap_or((text, ""));
    match MasterSecret::from_uris(kms_uri, storage_uri) {
        Ok(kms) => {
            assert!(MasterSecret::from_uris(&kms.uri(), "").as_ref() == Ok(&kms));
            assert_eq!(kms.dek(&Dek::named("x"), 32).map(|key| key.len()), Ok(32));
        }
        Err(error) => assert!(error.to_string().len() < 200),
    }
});
