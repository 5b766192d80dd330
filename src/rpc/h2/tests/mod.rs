//! Tests of two connected connections, of floods, and of arbitrary bytes. `rules` breaks each rule
//! once. `hostile` and `interleavings` do what the fuzzers do with their inputs.

use std::time::{Duration, Instant};

use super::connection::{Connection, Error, Event, H2Limits, SendError};
use super::frame::{self, ErrorCode, MAX_31_BITS, MAX_FRAME, PREFACE, flag, kind, setting};
use super::{Allowance, Indexing};
use support::mutation::{corpus, mutations};
use support::random::Random;

mod hostile;
mod interleavings;
mod rules;

/// An event of `receive`, with its data copied.
#[derive(Debug, PartialEq, Eq)]
enum Seen {
    Headers(u32, bool),
    Trailers(u32),
    Data(u32, Vec<u8>, bool),
    Reset(u32, ErrorCode, bool),
    Window(u32),
    GoAway(u32, ErrorCode),
    Pong,
}

fn feed_at(
    connection: &mut Connection,
    mut bytes: &[u8],
    now: Instant,
) -> Result<Vec<Seen>, Error> {
    let mut seen = Vec::new();
    loop {
        let (length, event) = connection.receive(bytes, now)?;
        if length == 0 {
            assert!(
                bytes.len() < 9 + MAX_FRAME,
                "a complete frame was not taken"
            );
            return Ok(seen);
        }
        bytes = &bytes[length..];
        seen.extend(event.map(|event| match event {
            Event::Headers { stream, end } => Seen::Headers(stream, end),
            Event::Trailers { stream } => Seen::Trailers(stream),
            Event::Data { stream, data, end } => Seen::Data(stream, data.to_vec(), end),
            Event::Reset {
                stream,
                code,
                by_peer,
            } => Seen::Reset(stream, code, by_peer),
            Event::Window { stream } => Seen::Window(stream),
            Event::GoAway { last, code, .. } => Seen::GoAway(last, code),
            Event::Pong => Seen::Pong,
        }));
    }
}

fn feed(connection: &mut Connection, bytes: &[u8]) -> Result<Vec<Seen>, Error> {
    feed_at(connection, bytes, Instant::now())
}

fn output(connection: &mut Connection) -> Vec<u8> {
    std::mem::take(connection.output())
}

/// Splits output into frames: (type, flags, stream, payload).
fn frames(mut bytes: &[u8]) -> Vec<(u8, u8, u32, Vec<u8>)> {
    let mut frames = Vec::new();
    while let Some(head) = frame::Head::parse(bytes) {
        frames.push((
            head.kind,
            head.flags,
            head.stream,
            bytes[9..9 + head.length].to_vec(),
        ));
        bytes = &bytes[9 + head.length..];
    }
    assert!(bytes.is_empty());
    frames
}

fn raw(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::head(&mut bytes, payload.len(), kind, flags, stream);
    bytes.extend_from_slice(payload);
    bytes
}

fn settings(settings: &[(u16, u32)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::settings(&mut bytes, settings);
    bytes
}

fn word(value: u32) -> [u8; 4] {
    value.to_be_bytes()
}

/// `:method POST`, `:scheme http`, `:path /` as indexes.
const REQUEST: [u8; 3] = [0x83, 0x86, 0x84];
const END_HEADERS: u8 = flag::END_HEADERS;
const END: u8 = flag::END_HEADERS | flag::END_STREAM;

fn request(stream: u32, flags: u8) -> Vec<u8> {
    raw(kind::HEADERS, flags, stream, &REQUEST)
}

fn server_with(limits: H2Limits) -> Connection {
    let mut server = Connection::server(limits);
    feed(&mut server, &[PREFACE.as_slice(), &settings(&[])].concat()).unwrap();
    output(&mut server);
    server
}

fn server() -> Connection {
    server_with(H2Limits::default())
}

fn fields<'a>(
    fields: &'a [(&'a str, &'a str)],
) -> impl Iterator<Item = (&'a [u8], &'a [u8], Indexing)> + Clone {
    fields
        .iter()
        .map(|(name, value)| (name.as_bytes(), value.as_bytes(), Indexing::Yes))
}

const POST: [(&str, &str); 4] = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/a.B/C"),
    (":authority", "localhost"),
];

/// Creates a client and a server that know each other's settings.
fn pair(client: H2Limits, server: H2Limits) -> (Connection, Connection) {
    let (mut client, mut server) = (Connection::client(client), Connection::server(server));
    exchange(&mut client, &mut server);
    (client, server)
}

/// Moves bytes in both directions until there are none left. Returns the events of each side.
fn exchange(client: &mut Connection, server: &mut Connection) -> (Vec<Seen>, Vec<Seen>) {
    let (mut client_saw, mut server_saw) = (Vec::new(), Vec::new());
    while !client.output().is_empty() || !server.output().is_empty() {
        server_saw.extend(feed(server, &output(client)).unwrap());
        client_saw.extend(feed(client, &output(server)).unwrap());
    }
    (client_saw, server_saw)
}

/// Asserts that `bytes` cause a connection error of `code` at a server with these streams: 1 is
/// open, 3 is half-closed (remote), 5 has ended, the peer reset 7, and we reset 9.
#[track_caller]
fn connection_error(bytes: &[u8], code: ErrorCode) {
    let mut server = prepared();
    let error = feed(&mut server, bytes).expect_err("the rule is broken");
    assert_eq!(error.code, code, "{error}");
    let (kind, _, _, payload) = frames(&output(&mut server)).pop().unwrap();
    assert_eq!((kind, &payload[4..8]), (kind::GOAWAY, &word(code.0)[..]));
}

/// Asserts that `bytes` cause only an error of `stream`; see [`connection_error`].
#[track_caller]
fn stream_error(stream: u32, bytes: &[u8], code: ErrorCode) {
    let mut server = prepared();
    feed(&mut server, bytes).expect("only a stream error");
    let resets: Vec<_> = frames(&output(&mut server))
        .into_iter()
        .filter(|frame| frame.0 == kind::RST_STREAM)
        .collect();
    assert_eq!(
        resets,
        [(kind::RST_STREAM, 0, stream, word(code.0).to_vec())]
    );
}

fn prepared() -> Connection {
    let mut server = server();
    let streams = [
        request(1, END_HEADERS),
        request(3, END),
        request(5, END),
        request(7, END),
        request(9, END_HEADERS),
    ];
    feed(&mut server, &streams.concat()).unwrap();
    server
        .send_headers(5, fields(&[(":status", "200")]), true)
        .unwrap();
    feed(&mut server, &raw(kind::RST_STREAM, 0, 7, &word(8))).unwrap();
    server.reset(9, ErrorCode::CANCEL);
    output(&mut server);
    server
}

// ---- two sides ----

#[test]
fn a_call_runs_through_both_connections() {
    let (mut client, mut server) = pair(H2Limits::default(), H2Limits::default());
    for round in 0..3 {
        let stream = client.open(fields(&POST), false).unwrap();
        assert_eq!(stream, 1 + 2 * round);
        assert_eq!(client.send_data(stream, b"hello", true), Ok(5));
        let (_, seen) = exchange(&mut client, &mut server);
        assert_eq!(
            seen,
            [
                Seen::Headers(stream, false),
                Seen::Data(stream, b"hello".to_vec(), true)
            ]
        );
        assert_eq!(server.headers().get(b":path"), Some(&b"/a.B/C"[..]));
        server
            .send_headers(stream, fields(&[(":status", "200")]), false)
            .unwrap();
        server.send_data(stream, b"world", false).unwrap();
        server
            .send_headers(stream, fields(&[("grpc-status", "0")]), true)
            .unwrap();
        let (seen, _) = exchange(&mut client, &mut server);
        let expected = [
            Seen::Headers(stream, false),
            Seen::Data(stream, b"world".to_vec(), false),
            Seen::Trailers(stream),
        ];
        assert_eq!(seen, expected);
        assert_eq!(client.headers().get(b"grpc-status"), Some(&b"0"[..]));
    }
}

#[test]
fn sending_stops_at_the_windows_and_continues_after_a_release() {
    let limits = H2Limits {
        stream_window: 65_535,
        connection_window: 65_535,
        ..H2Limits::default()
    };
    let (mut client, mut server) = pair(H2Limits::default(), limits);
    let data = vec![7; 200_000];
    let stream = client.open(fields(&POST), false).unwrap();
    let mut sent = 0;
    while sent < data.len() {
        let now = client.send_data(stream, &data[sent..], true).unwrap();
        assert!(now > 0 && now <= 65_535);
        assert!(sent + now == data.len() || !client.may_send(stream));
        sent += now;
        for seen in exchange(&mut client, &mut server).1 {
            if let Seen::Data(stream, data, _) = seen {
                server.release(stream, data.len() as u32);
            }
        }
        exchange(&mut client, &mut server);
    }
    assert!(sent == data.len());
}

#[test]
fn unreleased_data_blocks_only_its_stream() {
    let limits = H2Limits {
        stream_window: 65_535,
        connection_window: 100_000,
        ..H2Limits::default()
    };
    let (mut client, mut server) = pair(H2Limits::default(), limits);
    for _ in 0..5 {
        let stream = client.open(fields(&POST), false).unwrap();
        assert_eq!(client.send_data(stream, &[0; 80_000], false), Ok(65_535));
        exchange(&mut client, &mut server);
        assert!(!client.may_send(stream));
    }
}

#[test]
fn a_changed_initial_window_moves_open_streams_even_below_zero() {
    let mut server = server();
    feed(&mut server, &request(1, END)).unwrap();
    server
        .send_headers(1, fields(&[(":status", "200")]), false)
        .unwrap();
    assert_eq!(server.send_data(1, &[0; 1000], false), Ok(1000));
    feed(
        &mut server,
        &settings(&[(setting::INITIAL_WINDOW_SIZE, 500)]),
    )
    .unwrap();
    assert_eq!(
        server.send_data(1, &[0; 1000], false),
        Ok(0),
        "the window is -500"
    );
    feed(&mut server, &raw(kind::WINDOW_UPDATE, 0, 1, &word(501))).unwrap();
    assert_eq!(server.send_data(1, &[0; 1000], false), Ok(1));
    feed(
        &mut server,
        &settings(&[(setting::INITIAL_WINDOW_SIZE, 1500)]),
    )
    .unwrap();
    assert_eq!(server.send_data(1, &[0; 5000], false), Ok(1000));
}

#[test]
fn long_header_blocks_are_continued() {
    let limits = H2Limits {
        header_list: 60_000,
        ..H2Limits::default()
    };
    let (mut client, mut server) = pair(limits, limits);
    let long = "v".repeat(50_000);
    let stream = client
        .open(fields(&[&POST[..], &[("x", &long)]].concat()), true)
        .unwrap();
    let sent = output(&mut client);
    assert!(
        frames(&sent)
            .iter()
            .filter(|frame| frame.0 == kind::CONTINUATION)
            .count()
            > 0
    );
    assert_eq!(
        feed(&mut server, &sent).unwrap(),
        [Seen::Headers(stream, true)]
    );
    assert_eq!(server.headers().get(b"x"), Some(long.as_bytes()));
}

#[test]
fn the_peers_limit_of_streams_is_kept() {
    let (mut client, mut server) = pair(
        H2Limits::default(),
        H2Limits {
            streams: 2,
            ..H2Limits::default()
        },
    );
    let first = client.open(fields(&POST), true).unwrap();
    client.open(fields(&POST), true).unwrap();
    assert_eq!(client.open(fields(&POST), true), Err(SendError::TooMany));
    exchange(&mut client, &mut server);
    server
        .send_headers(first, fields(&[(":status", "200")]), true)
        .unwrap();
    exchange(&mut client, &mut server);
    client.open(fields(&POST), true).unwrap();
}

#[test]
fn the_peers_limit_of_header_lists_is_kept() {
    // Names and values, and 32 bytes for each field (§6.5.2).
    let exactly = H2Limits {
        header_list: 11 + 11 + 11 + 19 + 4 * 32,
        ..H2Limits::default()
    };
    let (mut client, mut server) = pair(
        H2Limits {
            header_list: 41,
            ..H2Limits::default()
        },
        exactly,
    );
    let with_path = |path| [POST[0], POST[1], (":path", path), POST[3]];
    assert_eq!(
        client.open(fields(&with_path("/a.B/CD")), true),
        Err(SendError::TooLarge)
    );
    let stream = client.open(fields(&POST), true).unwrap();
    assert_eq!(stream, 1, "the refused one took no identifier");
    exchange(&mut client, &mut server);
    assert_eq!(
        server.send_headers(stream, fields(&[(":status", "200")]), true),
        Err(SendError::TooLarge)
    );
}

#[test]
fn goaway_drains_in_two_steps() {
    let (mut client, mut server) = pair(H2Limits::default(), H2Limits::default());
    let early = client.open(fields(&POST), true).unwrap();
    let late = output(&mut client);
    server.shutdown("");
    let (goaway_and_ping, mut on_the_way) = (output(&mut server), late);
    // The client sends another request before it sees the GOAWAY; that one is still served.
    let second = client.open(fields(&POST), true).unwrap();
    on_the_way.extend(output(&mut client));
    assert_eq!(
        feed(&mut server, &on_the_way).unwrap(),
        [Seen::Headers(early, true), Seen::Headers(second, true)]
    );
    assert!(!server.is_drained());
    assert_eq!(
        feed(&mut client, &goaway_and_ping).unwrap(),
        [Seen::GoAway(MAX_31_BITS, ErrorCode::NO_ERROR)]
    );
    assert_eq!(client.open(fields(&POST), true), Err(SendError::GoingAway));
    assert_eq!(
        exchange(&mut client, &mut server).0,
        [Seen::GoAway(second, ErrorCode::NO_ERROR)]
    );
    assert!(server.is_drained());
    // Streams above the last stream of the GOAWAY are ignored.
    assert_eq!(feed(&mut server, &request(99, END)).unwrap(), []);
    assert!(output(&mut server).is_empty());
}

#[test]
fn pings_are_answered_and_ours_come_back() {
    let (mut client, mut server) = pair(H2Limits::default(), H2Limits::default());
    server.ping();
    assert_eq!(
        exchange(&mut client, &mut server),
        (vec![], vec![Seen::Pong])
    );
    feed(&mut server, &raw(kind::PING, 0, 0, b"12345678")).unwrap();
    assert_eq!(
        frames(&output(&mut server)),
        [(kind::PING, flag::ACK, 0, b"12345678".to_vec())]
    );
}

#[test]
fn padding_counts_against_the_window_but_is_not_data() {
    let mut server = server();
    let padded = raw(
        kind::HEADERS,
        END_HEADERS | flag::PADDED | flag::PRIORITY,
        1,
        &[&[2][..], &word(0), &[16], &REQUEST, &[0, 0]].concat(),
    );
    let data = raw(
        kind::DATA,
        flag::PADDED | flag::END_STREAM,
        1,
        &[3, b'x', 0, 0, 0],
    );
    let seen = feed(&mut server, &[padded, data].concat()).unwrap();
    assert_eq!(
        seen,
        [Seen::Headers(1, false), Seen::Data(1, b"x".to_vec(), true)]
    );
}

#[test]
fn trailers_of_a_request_end_it() {
    let trailers = raw(kind::HEADERS, END, 1, b"\x00\x01x\x01y");
    assert_eq!(
        feed(&mut prepared(), &trailers).unwrap(),
        [Seen::Trailers(1)]
    );
}

// ---- limits ----

#[test]
fn a_connection_is_established_once_settings_came_and_ours_are_acknowledged() {
    // One byte at a time.
    let mut server = Connection::server(H2Limits::default());
    let hello = [PREFACE.as_slice(), &settings(&[])].concat();
    for at in 0..PREFACE.len() {
        assert_eq!(feed(&mut server, &hello[at..=at]).unwrap(), []);
    }
    assert!(!server.is_established());
    feed(&mut server, &hello[PREFACE.len()..]).unwrap();
    assert!(
        !server.is_established(),
        "our SETTINGS are not acknowledged"
    );
    feed(&mut server, &raw(kind::SETTINGS, flag::ACK, 0, &[])).unwrap();
    assert!(server.is_established());
}

#[test]
fn late_frames_on_streams_that_we_reset_are_ignored() {
    let mut server = prepared();
    let late = [
        raw(kind::DATA, 0, 9, &[0]),
        raw(kind::HEADERS, END, 9, b"\x40\x01x\x01y"),
        raw(kind::RST_STREAM, 0, 9, &word(8)),
        raw(kind::WINDOW_UPDATE, 0, 9, &word(1)),
        raw(kind::WINDOW_UPDATE, 0, 5, &word(1)),
        raw(kind::RST_STREAM, 0, 5, &word(8)),
    ];
    assert_eq!(feed(&mut server, &late.concat()).unwrap(), []);
    assert!(output(&mut server).is_empty());
    // Their fields are still in the dynamic table.
    let indexed = raw(kind::HEADERS, END, 11, &[&REQUEST[..], &[0xbe]].concat());
    feed(&mut server, &indexed).unwrap();
    assert_eq!(server.headers().get(b"x"), Some(&b"y"[..]));
}

#[test]
fn a_large_header_list_ends_its_stream_and_a_huge_one_the_connection() {
    let long = |length: usize| {
        let mut block = REQUEST.to_vec();
        block.extend(b"\x00\x01x\x7f");
        // RFC 7541 §5.1: length - 127 in four groups of seven bits.
        block.extend((0..4).map(|group| {
            ((length - 127) >> (7 * group)) as u8 & 0x7f | if group < 3 { 0x80 } else { 0 }
        }));
        block.resize(block.len() + length, b'v');
        let mut bytes = Vec::new();
        let last = block.len().div_ceil(MAX_FRAME) - 1;
        for (index, piece) in block.chunks(MAX_FRAME).enumerate() {
            let kind = if index == 0 {
                kind::HEADERS
            } else {
                kind::CONTINUATION
            };
            bytes.extend(raw(
                kind,
                if index == last { END_HEADERS } else { 0 },
                11,
                piece,
            ));
        }
        bytes
    };
    stream_error(11, &long(20_000), ErrorCode::ENHANCE_YOUR_CALM);
    stream_error(11, &long(60_000), ErrorCode::ENHANCE_YOUR_CALM);
    connection_error(&long(100_000), ErrorCode::ENHANCE_YOUR_CALM);
}

#[test]
fn after_a_connection_error_nothing_is_received_or_sent() {
    let mut server = prepared();
    let error = feed(&mut server, &raw(kind::PING, 0, 0, &[0; 7])).unwrap_err();
    let sent = output(&mut server);
    assert_eq!(
        frames(&sent).last().map(|frame| frame.0),
        Some(kind::GOAWAY)
    );
    for next in [
        raw(kind::PING, 0, 0, &[0; 8]),
        request(11, END),
        raw(kind::DATA, 0, 0, &[]),
    ] {
        assert_eq!(feed(&mut server, &next), Err(error));
    }
    assert_eq!(
        server.send_headers(3, fields(&[(":status", "200")]), true),
        Err(SendError::Closed)
    );
    assert_eq!(server.send_data(3, &[0], true), Err(SendError::Closed));
    server.reset(3, ErrorCode::CANCEL);
    server.ping();
    server.shutdown("");
    server.goaway(ErrorCode::NO_ERROR, "");
    assert!(output(&mut server).is_empty(), "GOAWAY is the last frame");

    let mut client = pair(H2Limits::default(), H2Limits::default()).0;
    feed(&mut client, &raw(kind::PING, 0, 0, &[0; 7])).unwrap_err();
    assert_eq!(client.open(fields(&POST), true), Err(SendError::GoingAway));
}

#[test]
fn goaway_with_an_error_does_not_raise_the_last_stream() {
    // §6.8: the peer may have retried requests above the last stream of an earlier GOAWAY on
    // another connection.
    let mut server = server();
    feed(&mut server, &request(1, END)).unwrap();
    server.goaway(ErrorCode::NO_ERROR, "");
    assert_eq!(feed(&mut server, &request(3, END)).unwrap(), []);
    output(&mut server);
    feed(&mut server, &raw(kind::PING, 0, 0, &[0; 7])).unwrap_err();
    let (kind, _, _, payload) = frames(&output(&mut server)).remove(0);
    assert_eq!((kind, &payload[..4]), (kind::GOAWAY, &word(1)[..]));
}

#[test]
fn a_request_without_its_announced_body_is_never_reported() {
    let mut server = server();
    let lacking = raw(
        kind::HEADERS,
        END,
        1,
        &[&REQUEST[..], b"\x0f\x0d\x015"].concat(),
    );
    assert_eq!(
        feed(&mut server, &lacking).unwrap(),
        [],
        "the layer above knows no stream that could be reset"
    );
    let refused = (
        kind::RST_STREAM,
        0,
        1,
        word(ErrorCode::PROTOCOL_ERROR.0).to_vec(),
    );
    assert_eq!(frames(&output(&mut server)), [refused]);
}

// ---- floods ----

#[test]
fn floods_of_frames_without_request_data_end_the_connection() {
    let calm = Some(ErrorCode::ENHANCE_YOUR_CALM);
    let now = Instant::now();
    let flood = |server: &mut Connection, frame: &[u8], times: usize| {
        let result = feed_at(server, &frame.repeat(times), now);
        assert!(server.output().len() < 40_000);
        result.err().map(|error| error.code)
    };
    for frame in [
        settings(&[]),
        raw(kind::SETTINGS, flag::ACK, 0, &[]),
        raw(kind::PING, 0, 0, &[0; 8]),
        raw(kind::PING, flag::ACK, 0, &[0; 8]),
        raw(kind::PRIORITY, 0, 1, &[0; 5]),
        raw(kind::DATA, 0, 1, &[]),
        raw(kind::DATA, flag::PADDED, 1, &[1, 0]),
        raw(kind::WINDOW_UPDATE, 0, 0, &word(1)),
        raw(kind::WINDOW_UPDATE, 0, 1, &word(1)),
        raw(kind::DATA, 0, 9, &[]),
        raw(0xff, 0, 0, &[]),
    ] {
        let mut server = prepared();
        assert_eq!(flood(&mut server, &frame, 400), None, "{frame:?}");
        assert_eq!(flood(&mut server, &frame, 1000), calm, "{frame:?}");
    }
    let endless_block = [
        request(11, 0),
        raw(kind::CONTINUATION, 0, 11, &[]).repeat(100),
    ]
    .concat();
    assert_eq!(flood(&mut prepared(), &endless_block, 1), calm);
}

#[test]
fn rapid_resets_end_the_connection() {
    let now = Instant::now();
    // The peer resets streams itself, or makes us reset them (here: a stream that depends on
    // itself).
    let pairs = |make: fn(u32) -> Vec<u8>| {
        (0..1100)
            .flat_map(|n| make(11 + 2 * n))
            .collect::<Vec<u8>>()
    };
    let reset_by_peer =
        pairs(|id| [request(id, END), raw(kind::RST_STREAM, 0, id, &word(8))].concat());
    let reset_by_us = pairs(|id| raw(kind::HEADERS, END, id, &[0x83]));
    for attack in [reset_by_peer, reset_by_us] {
        let error = feed_at(&mut prepared(), &attack, now).unwrap_err();
        assert_eq!(error.code, ErrorCode::ENHANCE_YOUR_CALM);
    }
}

#[test]
fn a_peer_that_takes_our_data_may_answer_each_frame() {
    let mut server = server_with(H2Limits {
        control: Allowance {
            burst: 100,
            per_second: 1,
        },
        ..H2Limits::default()
    });
    let now = Instant::now();
    feed_at(&mut server, &request(1, END), now).unwrap();
    server
        .send_headers(1, fields(&[(":status", "200")]), false)
        .unwrap();
    for _ in 0..1000 {
        assert_eq!(server.send_data(1, &[0; 1000], false), Ok(1000));
        let updates = [0, 1]
            .map(|stream| raw(kind::WINDOW_UPDATE, 0, stream, &word(1000)))
            .concat();
        feed_at(&mut server, &updates, now).unwrap();
        feed_at(&mut server, &raw(kind::PING, 0, 0, &[0; 8]), now).unwrap();
        server.output().clear();
    }
}

#[test]
fn the_allowance_comes_back_with_time() {
    let mut server = server();
    let start = Instant::now();
    let pings = raw(kind::PING, 0, 0, &[0; 8]).repeat(90);
    for second in 0..60 {
        feed_at(&mut server, &pings, start + Duration::from_secs(second)).unwrap();
    }
}

// ---- arbitrary bytes ----

/// A whole conversation from the client to the server.
fn conversation() -> Vec<u8> {
    [
        PREFACE.to_vec(),
        settings(&[
            (setting::INITIAL_WINDOW_SIZE, 100_000),
            (setting::HEADER_TABLE_SIZE, 100),
        ]),
        raw(kind::WINDOW_UPDATE, 0, 0, &word(1 << 20)),
        raw(kind::SETTINGS, flag::ACK, 0, &[]),
        raw(
            kind::HEADERS,
            END_HEADERS,
            1,
            b"\x83\x86\x44\x07/a.B/C1\x40\x0ccontent-type\x10application/grpc",
        ),
        raw(kind::DATA, flag::PADDED, 1, &[2, 0, 0, 0, 0, 1, 7, 0, 0]),
        raw(kind::DATA, flag::END_STREAM, 1, &[]),
        raw(
            kind::HEADERS,
            flag::PRIORITY,
            3,
            &[&[0, 0, 0, 1, 9][..], &REQUEST[..2]].concat(),
        ),
        raw(kind::CONTINUATION, END_HEADERS, 3, &[0x84, 0xbe]),
        raw(kind::PING, 0, 0, &[7; 8]),
        raw(kind::WINDOW_UPDATE, 0, 3, &word(1000)),
        raw(kind::PRIORITY, 0, 5, &[0, 0, 0, 3, 1]),
        raw(kind::DATA, 0, 3, &[0; 300]),
        raw(kind::RST_STREAM, 0, 3, &word(8)),
        raw(kind::GOAWAY, 0, 0, &[0; 12]),
    ]
    .concat()
}

#[test]
fn mutated_conversations_cause_no_panic_and_little_output() {
    let seed = conversation();
    assert!(feed(&mut Connection::server(H2Limits::default()), &seed).is_ok());
    let mut random = Random::new(0x9113);
    let now = Instant::now();
    let to_servers = mutations(&seed, 15_000).map(|bytes| (true, bytes));
    let to_clients = mutations(&seed[PREFACE.len()..], 5000).map(|bytes| (false, bytes));
    for (is_server, bytes) in to_servers.chain(to_clients) {
        let mut connection = if is_server {
            Connection::server(H2Limits::default())
        } else {
            Connection::client(H2Limits::default())
        };
        let (mut taken, mut given) = (0, 0);
        loop {
            // Bytes come in pieces, and the layer above acts in between.
            given = bytes.len().min(given + 1 + random.below(200));
            match connection.receive(&bytes[taken..given], now) {
                Err(_) => break,
                Ok((0, _)) if given == bytes.len() => break,
                Ok((length, _)) => taken += length,
            }
            let stream = 1 + random.below(6) as u32;
            match random.below(8) {
                0 => drop(connection.send_headers(
                    stream,
                    fields(&[(":status", "200")]),
                    random.below(2) == 0,
                )),
                1 => drop(connection.send_data(stream, &[0; 5000], random.below(2) == 0)),
                2 => connection.reset(stream, ErrorCode::CANCEL),
                3 => connection.release(stream, random.below(100) as u32),
                4 if !is_server => drop(connection.open(fields(&POST), random.below(2) == 0)),
                5 => connection.shutdown(""),
                _ => {}
            }
        }
        assert!(connection.output().len() < 1 << 20);
    }
}

#[test]
fn arbitrary_interleavings_keep_the_invariants() {
    let mut random = Random::new(0x7540);
    for round in 0..4000 {
        let mut program: Vec<u8> = (0..10 + random.below(400))
            .map(|_| random.below(256) as u8)
            .collect();
        if round % 2 == 0 {
            // Replaces the operations that change bytes on the wire.
            program.iter_mut().for_each(|byte| {
                if matches!(*byte >> 1 & 31, 6..9 | 21 | 24) {
                    *byte -= 10
                }
            });
        }
        interleavings::run(&program);
    }
}

#[test]
fn inputs_kept_by_the_fuzzers_break_no_invariant() {
    type Fuzzer = fn(&[u8]);
    let fuzzers: [(&str, Fuzzer); 3] = [
        ("h2_connection", hostile::bytes),
        ("h2_headers", hostile::header_blocks),
        ("h2_interleavings", interleavings::run),
    ];
    for (target, run) in fuzzers {
        for (name, input) in corpus(target) {
            println!("{name}");
            run(&input);
        }
    }
}
