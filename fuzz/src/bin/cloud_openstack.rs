//! The answers of OpenStack. The first byte chooses the kind of answer, and the rest is the answer.
#![no_main]

use cloud_api::Range;
use cloud_api::openstack::{
    parse_address, parse_aliases, parse_description, parse_load_balancers, parse_servers,
    parse_token, parse_user_data,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((kind, body)) = input.split_first() else {
        return;
    };
    let error = match kind % 6 {
        0 => parse_description("GET x", body).err(),
        1 => parse_user_data("GET x", body).err(),
        2 => parse_token("POST x", Some("RegionOne"), body).err(),
        3 => {
            let subnet = Range::parse("192.168.0.0/16").unwrap();
            let _ = parse_aliases("GET x", "constellation-uid-u", body);
            parse_servers("GET x", "constellation-uid-u", &subnet, body)
                .inspect(|(machines, _)| {
                    let is_in = |address| subnet.contains(address);
                    assert!(machines.iter().all(|one| one.vpc_ip.is_some_and(is_in)));
                })
                .err()
        }
        4 => parse_load_balancers("GET x", body).err(),
        _ => parse_address("GET x", body).err(),
    };
    // an error repeats the beginning of an answer, and never all of it
    assert!(error.is_none_or(|error| error.to_string().len() < 4096));
});
