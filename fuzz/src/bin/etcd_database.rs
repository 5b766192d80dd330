//! The database of etcd, in which `bootstrapper restore-etcd` looks for the members.
#![no_main]

use std::io::Cursor;

use bootstrapper::restore::database::members;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    if let Ok(members) = members(Cursor::new(input)) {
        assert!(members.iter().all(|it| !it.urls.is_empty()));
    }
});
