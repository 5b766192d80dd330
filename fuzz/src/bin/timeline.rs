//! The record of a boot from a node: its chart and its picture are printable, in lines of limited length.
#![no_main]

use cli::cluster::chart;
use cli::cluster::timeline::{events, steps};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|record: &[u8]| {
    let steps = steps(&events(&String::from_utf8_lossy(record)));
    assert!(steps.iter().all(|step| step.took() >= 0.0));
    let is_plain = |byte: u8| matches!(byte, b' '..=b'~' | b'\n');
    let text = chart::text(&steps, 80);
    assert!(text.bytes().all(is_plain) && text.lines().all(|line| line.len() <= 80));
    assert!(chart::svg(&steps).bytes().all(is_plain));
});
