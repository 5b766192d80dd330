//! The HTTP/2 state machine: arbitrary bytes from the peer, in arbitrary pieces, with arbitrary actions in between. The
//! output stays in proportion to what came in and was asked for.
#![no_main]

use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;

#[path = "../../../src/h2/mod.rs"]
#[allow(dead_code, unused_imports)] // of it, this fuzzer does not need all
mod h2;
use h2::{Connection, ErrorCode, Indexing, Limits};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

fuzz_target!(|input: &[u8]| {
    let Some((&mode, mut input)) = input.split_first() else { return };
    let is_server = mode & 1 == 0;
    let mut connection = match is_server {
        true => Connection::server(Limits::default()),
        false => Connection::client(Limits::default()),
    };
    let now = Instant::now();
    let mut received = if mode & 2 == 0 { PREFACE[if is_server { 0 } else { 24 }..].to_vec() } else { Vec::new() };
    let mut asked = 0;
    // each step: an action, a stream, a length, and so many bytes of the peer
    while let [action, stream, length, rest @ ..] = input {
        let (piece, rest) = rest.split_at(usize::from(*length).min(rest.len()));
        input = rest;
        received.extend_from_slice(piece);
        loop {
            match connection.receive(&received, now + Duration::from_millis(asked as u64)) {
                Err(_) => return,
                Ok((0, event)) => {
                    assert!(event.is_none());
                    break;
                }
                Ok((taken, _)) => drop(received.drain(..taken)),
            }
        }
        let (stream, end) = (u32::from(stream & 15), stream & 16 != 0);
        let fields: [(&[u8], &[u8], Indexing); 2] =
            [(b":status", b"200", Indexing::Yes), (b"x", &[*action], Indexing::Yes)];
        match action % 8 {
            0 => drop(connection.send_headers(stream, fields.into_iter(), end)),
            1 => drop(connection.send_data(stream, &[0; 20_000], end)),
            2 => connection.reset(stream, ErrorCode::CANCEL),
            3 => connection.release(stream, u32::from(*length)),
            4 if !is_server => drop(connection.open(fields.into_iter(), end)),
            5 => connection.shutdown(),
            6 => connection.output().clear(),
            _ => drop(connection.may_send(stream)),
        }
        asked += 1;
        assert!(connection.output().len() < 4096 + 21_000 * asked + 32 * received.len().max(40_000));
    }
});
