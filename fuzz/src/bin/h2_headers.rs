//! HPACK and the rules for header fields: arbitrary header blocks, one after the other on one connection.
#![no_main]

use std::time::Instant;

use libfuzzer_sys::fuzz_target;

#[path = "../../../src/h2/mod.rs"]
#[allow(dead_code, unused_imports)] // of it, this fuzzer does not need all
mod h2;
use h2::{Connection, Limits};

fuzz_target!(|input: &[u8]| {
    let mut server = Connection::server(Limits::default());
    let now = Instant::now();
    server.receive(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", now).expect("the preface");
    server.receive(b"\0\0\0\x04\0\0\0\0\0", now).expect("SETTINGS");
    for (index, block) in input.split(|&byte| byte == 0xfe).enumerate().take(200) {
        let block = &block[..block.len().min(16_384)];
        let mut frame = (block.len() as u32).to_be_bytes()[1..].to_vec();
        // HEADERS with END_STREAM and END_HEADERS
        frame.extend([1, 5]);
        frame.extend((1 + 2 * index as u32).to_be_bytes());
        frame.extend_from_slice(block);
        if server.receive(&frame, now).is_err() {
            return;
        }
        let size: usize = server.headers().iter().map(|(name, value)| name.len() + value.len() + 32).sum();
        assert!(size <= Limits::default().header_list as usize);
        server.reset(1 + 2 * index as u32, h2::ErrorCode::CANCEL);
    }
});
