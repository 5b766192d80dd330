//! What the fuzzers in `fuzz/` do with their input for a single connection; `interleavings` has two
//! connections. The tests of the library repeat it with the inputs that the fuzzers kept.

use std::time::{Duration, Instant};

use crate::h2::{Connection, ErrorCode, Field, H2Limits, Indexing};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Feeds arbitrary bytes from the peer in arbitrary pieces, with arbitrary actions in between,
/// sensible or not. The output must stay in proportion to the input and the actions.
pub fn bytes(input: &[u8]) {
    let Some((&mode, mut input)) = input.split_first() else {
        return;
    };
    let is_server = mode & 1 == 0;
    let mut connection = if is_server {
        Connection::server(H2Limits::default())
    } else {
        Connection::client(H2Limits::default())
    };
    let now = Instant::now();
    let mut received = if mode & 2 == 0 {
        PREFACE[if is_server { 0 } else { 24 }..].to_vec()
    } else {
        Vec::new()
    };
    let mut asked = 0;
    // Each step has an action, a stream, a length, and that many bytes from the peer.
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
        let fields: [Field<'_>; 2] = [
            (b":status", b"200", Indexing::Yes),
            (b"x", &[*action], Indexing::Yes),
        ];
        match action % 8 {
            0 => drop(connection.send_headers(stream, fields.into_iter(), end)),
            1 => drop(connection.send_data(stream, &[0; 20_000], end)),
            2 => connection.reset(stream, ErrorCode::CANCEL),
            3 => connection.release(stream, u32::from(*length)),
            4 if !is_server => drop(connection.open(fields.into_iter(), end)),
            5 => connection.shutdown(""),
            6 => connection.output().clear(),
            _ => drop(connection.may_send(stream)),
        }
        asked += 1;
        assert!(
            connection.output().len() < 4096 + 21_000 * asked + 32 * received.len().max(40_000)
        );
    }
}

/// Feeds arbitrary header blocks to one connection, to test HPACK and the rules for header fields.
/// Accepted fields must come out unchanged after they are sent over another connection.
pub fn header_blocks(input: &[u8]) {
    let limits = H2Limits {
        resets: crate::h2::Allowance {
            burst: 1 << 20,
            per_second: 1,
        },
        ..H2Limits::default()
    };
    let (mut server, mut client, mut next) = (
        Connection::server(limits),
        Connection::client(limits),
        Connection::server(limits),
    );
    let now = Instant::now();
    server.receive(PREFACE, now).expect("the preface");
    server.receive(&PREFACE[24..], now).expect("SETTINGS");
    carry(&mut client, &mut next, now);
    carry(&mut next, &mut client, now);
    for (index, block) in input.split(|&byte| byte == 0xfe).enumerate().take(200) {
        let block = &block[..block.len().min(16_384)];
        let mut frame = (block.len() as u32).to_be_bytes()[1..].to_vec();
        // HEADERS with END_STREAM and END_HEADERS.
        frame.extend([1, 5]);
        frame.extend((1 + 2 * index as u32).to_be_bytes());
        frame.extend_from_slice(block);
        let Ok((_, event)) = server.receive(&frame, now) else {
            return;
        };
        let is_accepted = event.is_some();
        let size: usize = server
            .headers()
            .iter()
            .map(|(name, value)| name.len() + value.len() + 32)
            .sum();
        assert!(size <= limits.header_list as usize);
        if !is_accepted {
            continue;
        }
        let indexing = [Indexing::Yes, Indexing::No, Indexing::Never];
        let fields = server
            .headers()
            .iter()
            .enumerate()
            .map(|(at, (name, value))| (name, value, indexing[at % 3]));
        let fields: Vec<_> = fields.collect();
        let stream = client
            .open(fields.iter().copied(), true)
            .expect("no more than the peer allows");
        carry(&mut client, &mut next, now);
        assert!(next.headers().iter().eq(server.headers().iter()));
        next.reset(stream, ErrorCode::CANCEL);
        carry(&mut next, &mut client, now);
        server.reset(1 + 2 * index as u32, ErrorCode::CANCEL);
    }
}

/// Moves all output of one side to the other.
fn carry(from: &mut Connection, to: &mut Connection, now: Instant) {
    let bytes = std::mem::take(from.output());
    let mut rest = bytes.as_slice();
    while !rest.is_empty() {
        let (taken, _) = to
            .receive(rest, now)
            .expect("what we write keeps the rules");
        assert!(taken > 0, "we write whole frames");
        rest = &rest[taken..];
    }
}
