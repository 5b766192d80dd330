//! The answers of the metadata service. The first byte chooses the kind of answer, and the rest is the answer.
#![no_main]

use cloud::qemu::{parse_endpoint, parse_peers, parse_self};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((kind, body)) = input.split_first() else {
        return;
    };
    let error = match kind % 4 {
        0 => parse_self("url", body)
            .inspect(|instance| assert!(!instance.name.is_empty()))
            .err(),
        1 => parse_peers("url", body)
            .inspect(|peers| assert!(peers.iter().all(|peer| !peer.name.is_empty())))
            .err(),
        2 => parse_endpoint("url", body)
            .inspect(|host| assert!(!host.is_empty() && host.len() <= 253))
            .err(),
        _ => cloud_api::bcrypt_hash("GET url", body)
            .inspect(|hash| assert_eq!(hash.len(), 60))
            .err(),
    };
    // an error repeats the beginning of an answer, and never all of it
    assert!(error.is_none_or(|error| error.to_string().len() < 4096));
});
