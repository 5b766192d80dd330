//! The logs of etcdctl, which `firstlight node remove` reads: the list of members, a zero byte, and what each says of its health.
#![no_main]

use cli::nodes::etcd_members::read;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let text = String::from_utf8_lossy(input);
    let (listed, health) = text.split_once('\0').unwrap_or((&text, ""));
    read(listed, health);
});
