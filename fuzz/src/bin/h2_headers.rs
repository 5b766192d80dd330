//! HPACK and the rules for header fields: arbitrary header blocks, one after the other on one connection.
#![no_main]

#[path = "../../../src/rpc/h2/mod.rs"]
#[allow(dead_code, unused_imports)] // this fuzzer does not use everything in the module
mod h2;
#[path = "../../../src/rpc/h2/tests/hostile.rs"]
#[allow(dead_code)]
mod hostile;

libfuzzer_sys::fuzz_target!(|input: &[u8]| hostile::header_blocks(input));
