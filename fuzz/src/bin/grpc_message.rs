//! gRPC's message framing, the limit of a message's fields, and the parsers of its headers.
#![no_main]

#[path = "../../../src/rpc/h2/mod.rs"]
#[allow(dead_code, unused_imports)] // the other modules use its types
mod h2;

#[path = "../../../src/base/crypto"]
#[allow(dead_code)]
mod crypto {
    pub mod buffer;
}

#[path = "../../../src/rpc/grpc"]
#[allow(dead_code, unused_imports)] // this fuzzer does not use everything in the modules
mod grpc {
    mod header_values;
    mod message;
    mod metadata;
    mod status;
    pub mod testing;
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    grpc::testing::messages(input);
    grpc::testing::fields(input);
});
