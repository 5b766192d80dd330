//! The answers of Azure. The first byte chooses the kind of answer, and the rest is the answer.
#![no_main]

use cloud_api::azure::{
    Frontend, parse_document, parse_load_balancers, parse_machines, parse_public_address,
    parse_token,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((kind, body)) = input.split_first() else {
        return;
    };
    let error = match kind % 5 {
        0 => parse_document("GET x", body).err(),
        1 => parse_token("GET x", body).err(),
        2 => {
            // the input is split into two lists: machines and interfaces
            let half = body.iter().position(|byte| *byte == 0);
            let (machines, interfaces) = body.split_at(half.unwrap_or(body.len() / 2));
            parse_machines("GET x", machines, interfaces)
                .inspect(|machines| assert!(machines.iter().all(|one| !one.name.is_empty())))
                .err()
        }
        3 => parse_load_balancers("GET x", "constell1", body)
            .inspect(|frontend| {
                if let Some(Frontend::Public(path)) = frontend {
                    assert!(path.starts_with("subscriptions/") && !path.contains(['?', '#']));
                }
            })
            .err(),
        _ => parse_public_address("GET x", body).err(),
    };
    // an error repeats the beginning of an answer, and never all of it
    assert!(error.is_none_or(|error| error.to_string().len() < 4096));
});
