//! The HTTP/2 state machine: arbitrary bytes from the peer, in arbitrary pieces, with arbitrary actions in between.
#![no_main]

#[path = "../../../src/rpc/h2/mod.rs"]
#[allow(dead_code, unused_imports)] // this fuzzer does not use everything in the module
mod h2;
#[path = "../../../src/rpc/h2/tests/hostile.rs"]
#[allow(dead_code)]
mod hostile;

libfuzzer_sys::fuzz_target!(|input: &[u8]| hostile::bytes(input));
