//! The answers of AWS. The first byte chooses the kind of answer, and the rest is the answer.
#![no_main]

use cloud_api::aws::credentials::parse_credentials;
use cloud_api::aws::{parse_aliases, parse_arn, parse_dns_name, parse_instances};
use cloud_api::aws::{parse_error, parse_identity};
use collateral::parsers::parse_described;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((kind, body)) = input.split_first() else {
        return;
    };
    let error = match kind % 7 {
        0 => parse_aliases("POST x", body)
            .err()
            .or(parse_instances("POST x", body)
                .inspect(|(machines, _)| assert!(machines.iter().all(|one| one.vpc_ip.is_some())))
                .err()),
        // the region becomes a part of a host's name
        1 => parse_identity("GET x", body)
            .inspect(|identity| assert!(!identity.region.contains(['.', '/', '@'])))
            .err(),
        2 => parse_credentials("GET x", body).err(),
        3 => parse_arn("POST x", body).err(),
        4 => parse_dns_name("POST x", body)
            .inspect(|name| assert!(name.len() <= 253))
            .err(),
        5 => {
            match parse_described("i-01", body) {
                Ok(described) => assert!(described.account.len() == 12),
                Err(error) => assert!(error.to_string().len() < 4096),
            }
            None
        }
        _ => {
            let (code, message) = parse_error(body);
            assert!(code.len() + message.len() < 4096);
            None
        }
    };
    // an error repeats the beginning of an answer, and never all of it
    assert!(error.is_none_or(|error| error.to_string().len() < 4096));
});
