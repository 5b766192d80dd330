//! The answers of Google Cloud. The first byte chooses the kind of answer, and the rest is the answer.
#![no_main]

use cloud_api::gcp::{
    parse_aliases, parse_forwarding_rules, parse_instances, parse_member, parse_name, parse_token,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((kind, body)) = input.split_first() else {
        return;
    };
    let error = match kind % 5 {
        0 => parse_name("u", body)
            // the name becomes a part of a path
            .inspect(|name| assert!(!name.contains(['/', '?', '#', '%'])))
            .err(),
        1 => parse_token("u", body).err(),
        2 => parse_member("GET u", "p", "z", body)
            // the value becomes a part of a filter
            .inspect(|member| assert!(!member.uid.contains(['(', ')', ' '])))
            .err(),
        3 => parse_forwarding_rules("GET u", "constell1", body).err(),
        _ => {
            let own = br#"{"name":"a","labels":{"constellation-uid":"u"},"networkInterfaces":[{"name":"nic0","network":"n"}]}"#;
            let member = parse_member("GET u", "p", "r-a", own).unwrap();
            let _ = parse_aliases("GET u", "p", "r", &member, body);
            parse_instances("GET u", "p", "r", &member, body)
                .inspect(|(machines, _)| assert!(machines.iter().all(|one| !one.name.is_empty())))
                .err()
        }
    };
    // an error repeats the beginning of an answer, and never all of it
    assert!(error.is_none_or(|error| error.to_string().len() < 4096));
});
