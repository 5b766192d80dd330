//! Two HTTP/2 connections back to back, and a program of sends, arrivals, spoilt bytes and passing time.
#![no_main]

#[path = "../../../src/rpc/h2/mod.rs"]
#[allow(dead_code, unused_imports)] // of it, this fuzzer does not need all
mod h2;
#[path = "../../../src/rpc/h2/tests/interleavings.rs"]
mod interleavings;

libfuzzer_sys::fuzz_target!(|input: &[u8]| interleavings::run(input));
