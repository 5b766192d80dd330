//! The database of etcd, in which `bootstrapper restore-etcd` looks for the members and for objects.
#![no_main]

use std::io::Cursor;

use bootstrapper::members::restore::database::{members, objects};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    if let Ok(members) = members(Cursor::new(input)) {
        assert!(members.iter().all(|it| !it.urls.is_empty()));
    }
    let is_wanted = |key: &str| key.starts_with("/registry/");
    if let Ok(objects) = objects(Cursor::new(input), &is_wanted) {
        assert!(objects.keys().all(|key| is_wanted(key)));
    }
});
