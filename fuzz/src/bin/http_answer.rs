//! An answer of a metadata service by plain HTTP, or a list of hosts from such an answer. The first byte chooses one of the two,
//! and the rest is its content.
#![no_main]

use cloud::peers::parse_hosts;
use cloud::plain::{Url, receive};
use libfuzzer_sys::fuzz_target;

const LIMIT: u64 = 256;

fuzz_target!(|input: &[u8]| {
    let Some((kind, mut body)) = input.split_first() else {
        return;
    };
    match kind % 2 {
        0 => {
            if let Ok(answer) = receive(&mut body, LIMIT) {
                assert!((200..1000).contains(&answer.status));
                if let Ok(body) = answer.body {
                    assert!(body.len() as u64 <= LIMIT);
                }
            }
        }
        _ => {
            let text = String::from_utf8_lossy(body);
            let _ = (
                parse_hosts(&text),
                Url::parse(&text),
                Url::check_base(&text),
            );
        }
    }
});
