//! Two HTTP/2 connections that talk to each other. The input is a sequence of actions: send, deliver, corrupt bytes, let time pass.
#![no_main]

#[path = "../../../src/rpc/h2/mod.rs"]
#[allow(dead_code, unused_imports)] // this fuzzer does not use everything in the module
mod h2;
#[path = "../../../src/rpc/h2/tests/interleavings.rs"]
mod interleavings;

libfuzzer_sys::fuzz_target!(|input: &[u8]| interleavings::run(input));
