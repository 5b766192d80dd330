//! Each rule of RFC 9113 that a peer can break, by its section: what is broken, by which side, and
//! which error follows. The receiver is in the state of [`prepared`]. The rules for lists of fields
//! are in `headers.rs`, those of RFC 7541 in `hpack.rs`.

use super::*;
use Outcome::{Dead, Fine, Reset};
use Role::{Both, Client, Server};

const PROTOCOL: ErrorCode = ErrorCode::PROTOCOL_ERROR;
const SIZE: ErrorCode = ErrorCode::FRAME_SIZE_ERROR;
const FLOW: ErrorCode = ErrorCode::FLOW_CONTROL_ERROR;
const CLOSED: ErrorCode = ErrorCode::STREAM_CLOSED;
const COMPRESSION: ErrorCode = ErrorCode::COMPRESSION_ERROR;

/// The receiver whose peer breaks the rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Server,
    Client,
    Both,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// A connection error (§5.4.1).
    Dead(ErrorCode),
    /// A stream error (§5.4.2).
    Reset(u32, ErrorCode),
    /// Allowed, or ignored.
    Fine,
}

/// `:status 200`.
const RESPONSE: [u8; 1] = [0x88];

/// Creates a connection with these streams: 1 is open in both directions (the client has the
/// response's headers), 3 has a complete request and no answer, 5 has ended, the peer reset 7, and
/// we reset 9. Streams from 11 on are idle.
fn prepared_as(role: Role) -> Connection {
    if role == Server {
        return prepared();
    }
    let mut client = Connection::client(H2Limits::default());
    feed(&mut client, &settings(&[])).unwrap();
    for (stream, end) in [(1, false), (3, true), (5, true), (7, true), (9, true)] {
        assert_eq!(client.open(fields(&POST), end), Ok(stream));
    }
    let answers = [
        raw(kind::HEADERS, END_HEADERS, 1, &RESPONSE),
        raw(kind::HEADERS, END, 5, &RESPONSE),
        raw(kind::RST_STREAM, 0, 7, &word(8)),
    ];
    feed(&mut client, &answers.concat()).unwrap();
    client.reset(9, ErrorCode::CANCEL);
    output(&mut client);
    client
}

#[track_caller]
fn check(rules: &[(Role, &str, Vec<u8>, Outcome)]) {
    for (who, rule, bytes, outcome) in rules {
        for role in [Server, Client] {
            if *who != Both && *who != role {
                continue;
            }
            let mut connection = prepared_as(role);
            let result = feed(&mut connection, bytes)
                .map(drop)
                .map_err(|error| error.code);
            let sent = frames(&output(&mut connection));
            if let Dead(code) = outcome {
                assert_eq!(result, Err(*code), "{role:?}: {rule}");
                // §5.4.1: GOAWAY has the last stream that the peer opened.
                let (kind, _, stream, payload) = sent.last().expect("GOAWAY");
                assert_eq!(
                    (*kind, *stream, &payload[4..8]),
                    (kind::GOAWAY, 0, &word(code.0)[..]),
                    "{role:?}: {rule}"
                );
                let last = u32::from_be_bytes(payload[..4].try_into().unwrap());
                assert!(
                    if role == Server { last >= 9 } else { last == 0 },
                    "{role:?}: {rule}: {last}"
                );
                continue;
            }
            assert_eq!(result, Ok(()), "{role:?}: {rule}");
            let resets: Vec<_> = sent
                .into_iter()
                .filter(|frame| frame.0 == kind::RST_STREAM)
                .collect();
            match outcome {
                Reset(id, code) => {
                    assert_eq!(
                        resets,
                        [(kind::RST_STREAM, 0, *id, word(code.0).to_vec())],
                        "{role:?}: {rule}"
                    );
                }
                _ => assert!(resets.is_empty(), "{role:?}: {rule}: {resets:?}"),
            }
            // The connection continues.
            feed(&mut connection, &raw(kind::PING, 0, 0, &[5; 8])).unwrap();
            let pong = (kind::PING, flag::ACK, 0, vec![5; 8]);
            assert_eq!(
                frames(&output(&mut connection)).last(),
                Some(&pong),
                "{role:?}: {rule}"
            );
        }
    }
}

/// Returns a request on stream 11 with additional fields.
fn request_with(more: &[u8]) -> Vec<u8> {
    raw(kind::HEADERS, END, 11, &[&REQUEST[..], more].concat())
}

/// Returns the response on stream 3 with additional fields.
fn response_with(more: &[u8]) -> Vec<u8> {
    raw(kind::HEADERS, END, 3, &[&RESPONSE[..], more].concat())
}

#[test]
fn rfc9113_3_4_connections_begin_with_preface_and_settings() {
    let ping = raw(kind::PING, 0, 0, &[0; 8]);
    let acknowledgement = raw(kind::SETTINGS, flag::ACK, 0, &[]);
    let starts = [
        (Server, b"GET / HTTP/1.1\r\n".to_vec()),
        (Server, [&PREFACE[..23], b"x"].concat()),
        (Server, settings(&[])),
        (Server, [PREFACE.as_slice(), &ping].concat()),
        (Server, [PREFACE.as_slice(), &acknowledgement].concat()),
        (Server, [PREFACE.as_slice(), &request(1, END)].concat()),
        (Client, PREFACE.to_vec()),
        (Client, ping),
        (Client, acknowledgement),
        (Client, b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()),
    ];
    for (role, bytes) in starts {
        let mut connection = match role {
            Server => Connection::server(H2Limits::default()),
            _ => Connection::client(H2Limits::default()),
        };
        let code = feed(&mut connection, &bytes)
            .expect_err("the rule is broken")
            .code;
        // A client reads "PRI * HT" and "HTTP/1.1" as heads of frames of 5 MB.
        assert!(
            code == PROTOCOL || role == Client && code == SIZE,
            "{role:?} {bytes:?}"
        );
    }
}

#[test]
fn rfc9113_4_1_undefined_types_flags_and_the_reserved_bit_are_ignored() {
    let mut reserved = raw(kind::PING, 0, 0, &[0; 8]);
    reserved[5] = 0x80;
    check(&[
        (Both, "an unknown type", raw(0x77, 0xff, 1, &[1; 100]), Fine),
        (
            Both,
            "an unknown type on an idle stream",
            raw(0x77, 0, 99, &[]),
            Fine,
        ),
        (
            Both,
            "undefined flags",
            raw(kind::PING, 0xfe, 0, &[0; 8]),
            Fine,
        ),
        (Both, "the reserved bit", reserved, Fine),
    ]);
}

#[test]
fn rfc9113_4_2_frames_keep_to_their_size() {
    let too_large = raw(kind::DATA, 0, 1, &[0; MAX_FRAME + 1]);
    check(&[
        (
            Both,
            "above MAX_FRAME_SIZE",
            too_large[..9].to_vec(),
            Dead(SIZE),
        ),
        (
            Both,
            "at MAX_FRAME_SIZE",
            raw(kind::DATA, 0, 1, &[0; MAX_FRAME]),
            Fine,
        ),
        (
            Both,
            "an unknown frame above MAX_FRAME_SIZE",
            raw(0x77, 0, 0, &[0; MAX_FRAME + 1])[..9].to_vec(),
            Dead(SIZE),
        ),
    ]);
}

#[test]
fn rfc9113_4_3_header_blocks_decode_and_are_not_interrupted() {
    let open = raw(kind::HEADERS, 0, 3, &RESPONSE);
    let interrupted = |frame: Vec<u8>| [request(11, 0), frame].concat();
    let interrupted_answer = |frame: Vec<u8>| [open.clone(), frame].concat();
    check(&[
        (
            Server,
            "a block that does not decode",
            raw(kind::HEADERS, END, 11, &[0x80]),
            Dead(COMPRESSION),
        ),
        (
            Client,
            "a block that does not decode",
            raw(kind::HEADERS, END, 3, &[0x80]),
            Dead(COMPRESSION),
        ),
        (
            Both,
            "a block that does not decode on a stream that we reset",
            raw(kind::HEADERS, END, 9, &[0x80]),
            Dead(COMPRESSION),
        ),
        (
            Server,
            "trailers that do not decode",
            raw(kind::HEADERS, END, 1, &[0xff]),
            Dead(COMPRESSION),
        ),
        (
            Server,
            "PING within a block",
            interrupted(raw(kind::PING, 0, 0, &[0; 8])),
            Dead(PROTOCOL),
        ),
        (
            Server,
            "DATA within a block",
            interrupted(raw(kind::DATA, 0, 11, &[])),
            Dead(PROTOCOL),
        ),
        (
            Server,
            "HEADERS within a block",
            interrupted(request(11, END)),
            Dead(PROTOCOL),
        ),
        (
            Client,
            "PING within a block",
            interrupted_answer(raw(kind::PING, 0, 0, &[0; 8])),
            Dead(PROTOCOL),
        ),
        (
            Client,
            "HEADERS within a block",
            interrupted_answer(open.clone()),
            Dead(PROTOCOL),
        ),
    ]);
}

#[test]
fn rfc9113_5_1_idle_streams_take_headers_and_priority_only() {
    for stream in [11, 2] {
        check(&[
            (
                Both,
                "DATA",
                raw(kind::DATA, 0, stream, &[0]),
                Dead(PROTOCOL),
            ),
            (
                Both,
                "RST_STREAM",
                raw(kind::RST_STREAM, 0, stream, &word(8)),
                Dead(PROTOCOL),
            ),
            (
                Both,
                "WINDOW_UPDATE",
                raw(kind::WINDOW_UPDATE, 0, stream, &word(1)),
                Dead(PROTOCOL),
            ),
            (
                Both,
                "PRIORITY",
                raw(kind::PRIORITY, 0, stream, &[0; 5]),
                Fine,
            ),
            (
                Client,
                "HEADERS",
                raw(kind::HEADERS, END, stream, &RESPONSE),
                Dead(PROTOCOL),
            ),
        ]);
    }
}

#[test]
fn rfc9113_5_1_half_closed_remote_streams_take_no_data_and_no_headers() {
    let answered = |frame: Vec<u8>| [raw(kind::HEADERS, END, 1, &RESPONSE), frame].concat();
    check(&[
        (
            Server,
            "DATA",
            raw(kind::DATA, 0, 3, &[0]),
            Reset(3, CLOSED),
        ),
        (Server, "HEADERS", request(3, END), Reset(3, CLOSED)),
        (
            Client,
            "DATA",
            [
                raw(kind::DATA, flag::END_STREAM, 1, &[]),
                raw(kind::DATA, 0, 1, &[0]),
            ]
            .concat(),
            Reset(1, CLOSED),
        ),
        (
            Server,
            "WINDOW_UPDATE",
            raw(kind::WINDOW_UPDATE, 0, 3, &word(1)),
            Fine,
        ),
        (Server, "PRIORITY", raw(kind::PRIORITY, 0, 3, &[0; 5]), Fine),
        (
            Server,
            "RST_STREAM",
            raw(kind::RST_STREAM, 0, 3, &word(8)),
            Fine,
        ),
        (
            Client,
            "RST_STREAM",
            answered(raw(kind::RST_STREAM, 0, 1, &word(8))),
            Reset(1, PROTOCOL),
        ),
    ]);
}

#[test]
fn rfc9113_5_1_closed_streams_take_no_more() {
    check(&[
        (
            Both,
            "DATA after the end",
            raw(kind::DATA, 0, 5, &[0]),
            Dead(CLOSED),
        ),
        (
            Server,
            "HEADERS after the end",
            request(5, END),
            Dead(CLOSED),
        ),
        (
            Client,
            "HEADERS after the end",
            raw(kind::HEADERS, END, 5, &RESPONSE),
            Dead(CLOSED),
        ),
        (
            Both,
            "DATA after the peer's RST_STREAM",
            raw(kind::DATA, 0, 7, &[0]),
            Reset(7, CLOSED),
        ),
        (
            Server,
            "HEADERS after the peer's RST_STREAM",
            request(7, END),
            Reset(7, CLOSED),
        ),
        (
            Client,
            "HEADERS after the peer's RST_STREAM",
            raw(kind::HEADERS, END, 7, &RESPONSE),
            Reset(7, CLOSED),
        ),
        (
            Both,
            "late DATA after our RST_STREAM",
            raw(kind::DATA, 0, 9, &[0]),
            Fine,
        ),
        (
            Both,
            "late HEADERS after our RST_STREAM",
            raw(kind::HEADERS, END, 9, &RESPONSE),
            Fine,
        ),
        (
            Both,
            "late RST_STREAM after the end",
            raw(kind::RST_STREAM, 0, 5, &word(8)),
            Fine,
        ),
        (
            Both,
            "late WINDOW_UPDATE after the end",
            raw(kind::WINDOW_UPDATE, 0, 5, &word(1)),
            Fine,
        ),
        (
            Both,
            "PRIORITY after the end",
            raw(kind::PRIORITY, 0, 5, &[0; 5]),
            Fine,
        ),
    ]);
}

#[test]
fn rfc9113_5_1_1_stream_identifiers_are_odd_and_rise() {
    check(&[
        (Server, "an even request", request(2, END), Dead(PROTOCOL)),
        (
            Server,
            "an identifier that was skipped",
            [request(15, END), request(13, END)].concat(),
            Dead(PROTOCOL),
        ),
        (
            Client,
            "a stream of the server",
            raw(kind::HEADERS, END, 2, &RESPONSE),
            Dead(PROTOCOL),
        ),
        (
            Client,
            "a stream that was not opened",
            raw(kind::HEADERS, END, 11, &RESPONSE),
            Dead(PROTOCOL),
        ),
    ]);
}

#[test]
fn rfc9113_5_1_2_streams_above_the_limit_are_refused() {
    let mut server = server_with(H2Limits {
        streams: 1,
        ..H2Limits::default()
    });
    let seen = feed(&mut server, &[request(1, END), request(3, END)].concat()).unwrap();
    assert_eq!(seen, [Seen::Headers(1, true)]);
    let refused = (
        kind::RST_STREAM,
        0,
        3,
        word(ErrorCode::REFUSED_STREAM.0).to_vec(),
    );
    assert_eq!(frames(&output(&mut server)), [refused]);
}

#[test]
fn rfc9113_5_3_streams_do_not_depend_on_themselves() {
    let itself = |flags, stream: u32, block: &[u8]| {
        raw(
            kind::HEADERS,
            flags | flag::PRIORITY,
            stream,
            &[&word(stream), &[0][..], block].concat(),
        )
    };
    check(&[
        (
            Both,
            "PRIORITY",
            raw(kind::PRIORITY, 0, 1, &[0, 0, 0, 1, 0]),
            Reset(1, PROTOCOL),
        ),
        // RST_STREAM must not name this stream (§6.4).
        (
            Both,
            "PRIORITY of an idle stream",
            raw(kind::PRIORITY, 0, 21, &[0, 0, 0, 21, 0]),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "PRIORITY of our stream",
            raw(kind::PRIORITY, 0, 22, &[0, 0, 0, 22, 0]),
            Dead(PROTOCOL),
        ),
        (
            Server,
            "HEADERS",
            itself(END, 11, &REQUEST),
            Reset(11, PROTOCOL),
        ),
        (
            Client,
            "HEADERS",
            itself(END, 3, &RESPONSE),
            Reset(3, PROTOCOL),
        ),
    ]);
}

#[test]
fn rfc9113_5_5_extension_frames_are_ignored_but_not_within_a_header_block() {
    check(&[
        (
            Both,
            "between others",
            [raw(0xf0, 0, 1, &[1]), raw(0xf1, 0, 0, &[])].concat(),
            Fine,
        ),
        (
            Server,
            "within a block",
            [request(11, 0), raw(0xff, 0, 0, &[])].concat(),
            Dead(PROTOCOL),
        ),
        (
            Client,
            "within a block",
            [raw(kind::HEADERS, 0, 3, &RESPONSE), raw(0xff, 0, 3, &[])].concat(),
            Dead(PROTOCOL),
        ),
    ]);
}

#[test]
fn rfc9113_6_1_data_belongs_to_a_stream_and_has_less_padding_than_bytes() {
    check(&[
        (
            Both,
            "on stream 0",
            raw(kind::DATA, 0, 0, &[0]),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "padding as long as the frame",
            raw(kind::DATA, flag::PADDED, 1, &[4, 0, 0, 0]),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "padding that fills the frame",
            raw(kind::DATA, flag::PADDED, 1, &[3, 0, 0, 0]),
            Fine,
        ),
        (
            Both,
            "no padding length",
            raw(kind::DATA, flag::PADDED, 1, &[]),
            Dead(SIZE),
        ),
    ]);
}

#[test]
fn rfc9113_6_2_headers_belong_to_a_stream_and_are_as_long_as_their_flags_say() {
    let padded = |flags, payload: &[u8]| raw(kind::HEADERS, END | flags, 1, payload);
    check(&[
        (
            Both,
            "on stream 0",
            raw(kind::HEADERS, END, 0, &REQUEST),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "padding as long as the frame",
            padded(flag::PADDED, &[4, 0, 0, 0]),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "padding that covers the priority",
            padded(flag::PADDED | flag::PRIORITY, &[3, 0, 0, 0, 0, 0]),
            Dead(SIZE),
        ),
        (
            Both,
            "no padding length",
            padded(flag::PADDED, &[]),
            Dead(SIZE),
        ),
        (
            Both,
            "no room for the priority",
            padded(flag::PRIORITY, &[0; 4]),
            Dead(SIZE),
        ),
    ]);
}

#[test]
fn rfc9113_6_3_priority_has_five_bytes_and_a_stream() {
    check(&[
        (
            Both,
            "on stream 0",
            raw(kind::PRIORITY, 0, 0, &[0; 5]),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "too short",
            raw(kind::PRIORITY, 0, 1, &[0; 4]),
            Reset(1, SIZE),
        ),
        (
            Both,
            "too long",
            raw(kind::PRIORITY, 0, 1, &[0; 6]),
            Reset(1, SIZE),
        ),
    ]);
}

#[test]
fn rfc9113_6_4_rst_stream_has_four_bytes_and_a_stream_that_is_not_idle() {
    check(&[
        (
            Both,
            "on stream 0",
            raw(kind::RST_STREAM, 0, 0, &word(8)),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "idle",
            raw(kind::RST_STREAM, 0, 13, &word(8)),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "too short",
            raw(kind::RST_STREAM, 0, 1, &[0; 3]),
            Dead(SIZE),
        ),
        (
            Both,
            "too long",
            raw(kind::RST_STREAM, 0, 1, &[0; 5]),
            Dead(SIZE),
        ),
        (
            Both,
            "an unknown code",
            raw(kind::RST_STREAM, 0, 1, &word(0xffff)),
            Fine,
        ),
    ]);
}

#[test]
fn rfc9113_6_5_settings_are_the_connections_and_of_whole_entries() {
    check(&[
        (
            Both,
            "on a stream",
            raw(kind::SETTINGS, 0, 1, &[]),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "part of an entry",
            raw(kind::SETTINGS, 0, 0, &[0; 5]),
            Dead(SIZE),
        ),
        (
            Both,
            "an acknowledgement with entries",
            raw(kind::SETTINGS, flag::ACK, 0, &[0; 6]),
            Dead(SIZE),
        ),
        (
            Both,
            "an acknowledgement on a stream",
            raw(kind::SETTINGS, flag::ACK, 1, &[]),
            Dead(PROTOCOL),
        ),
    ]);
}

#[test]
fn rfc9113_6_5_2_settings_keep_to_their_values() {
    check(&[
        (
            Both,
            "ENABLE_PUSH 2",
            settings(&[(setting::ENABLE_PUSH, 2)]),
            Dead(PROTOCOL),
        ),
        (
            Server,
            "ENABLE_PUSH 1",
            settings(&[(setting::ENABLE_PUSH, 1)]),
            Fine,
        ),
        (
            Client,
            "ENABLE_PUSH 1 from a server",
            settings(&[(setting::ENABLE_PUSH, 1)]),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "INITIAL_WINDOW_SIZE 2^31",
            settings(&[(setting::INITIAL_WINDOW_SIZE, 1 << 31)]),
            Dead(FLOW),
        ),
        (
            Both,
            "INITIAL_WINDOW_SIZE 2^31-1",
            settings(&[(setting::INITIAL_WINDOW_SIZE, MAX_31_BITS)]),
            Fine,
        ),
        (
            Both,
            "MAX_FRAME_SIZE 2^14-1",
            settings(&[(setting::MAX_FRAME_SIZE, (1 << 14) - 1)]),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "MAX_FRAME_SIZE 2^24",
            settings(&[(setting::MAX_FRAME_SIZE, 1 << 24)]),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "MAX_FRAME_SIZE 2^24-1",
            settings(&[(setting::MAX_FRAME_SIZE, (1 << 24) - 1)]),
            Fine,
        ),
        (
            Both,
            "an unknown setting",
            settings(&[(99, u32::MAX)]),
            Fine,
        ),
    ]);
}

#[test]
fn rfc9113_6_5_3_settings_are_acknowledged_each_time() {
    for role in [Server, Client] {
        let mut connection = prepared_as(role);
        feed(
            &mut connection,
            &settings(&[(99, 99), (setting::MAX_CONCURRENT_STREAMS, 1)]).repeat(2),
        )
        .unwrap();
        let acknowledgement = (kind::SETTINGS, flag::ACK, 0, vec![]);
        assert_eq!(
            frames(&output(&mut connection)),
            [acknowledgement.clone(), acknowledgement]
        );
    }
}

#[test]
fn rfc9113_6_6_and_8_4_nobody_pushes() {
    check(&[
        (
            Both,
            "with END_HEADERS",
            raw(kind::PUSH_PROMISE, END_HEADERS, 1, &[0, 0, 0, 2, 0x82]),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "without",
            raw(kind::PUSH_PROMISE, 0, 1, &[0, 0, 0, 2]),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "on stream 0",
            raw(kind::PUSH_PROMISE, END_HEADERS, 0, &[0, 0, 0, 2, 0x82]),
            Dead(PROTOCOL),
        ),
    ]);
}

#[test]
fn rfc9113_6_7_ping_is_the_connections_and_has_eight_bytes() {
    check(&[
        (
            Both,
            "on a stream",
            raw(kind::PING, 0, 1, &[0; 8]),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "too short",
            raw(kind::PING, 0, 0, &[0; 7]),
            Dead(SIZE),
        ),
        (
            Both,
            "too long",
            raw(kind::PING, flag::ACK, 0, &[0; 9]),
            Dead(SIZE),
        ),
    ]);
    let mut server = prepared();
    feed(&mut server, &raw(kind::PING, flag::ACK, 0, &[0; 8])).unwrap();
    assert!(output(&mut server).is_empty(), "an answer is not answered");
}

#[test]
fn rfc9113_6_8_goaway_is_the_connections_and_has_eight_bytes_or_more() {
    check(&[
        (
            Both,
            "on a stream",
            raw(kind::GOAWAY, 0, 1, &[0; 8]),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "too short",
            raw(kind::GOAWAY, 0, 0, &[0; 7]),
            Dead(SIZE),
        ),
        (
            Both,
            "with debug data",
            raw(kind::GOAWAY, 0, 0, &[0; 30]),
            Fine,
        ),
    ]);
}

#[test]
fn rfc9113_6_9_window_updates_have_four_bytes_and_an_increment() {
    check(&[
        (
            Both,
            "increment 0 on the connection",
            raw(kind::WINDOW_UPDATE, 0, 0, &word(0)),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "increment 0 on a stream",
            raw(kind::WINDOW_UPDATE, 0, 1, &word(0)),
            Reset(1, PROTOCOL),
        ),
        (
            Both,
            "increment 0 with the reserved bit set",
            raw(kind::WINDOW_UPDATE, 0, 1, &word(1 << 31)),
            Reset(1, PROTOCOL),
        ),
        (
            Both,
            "too short",
            raw(kind::WINDOW_UPDATE, 0, 1, &[0; 3]),
            Dead(SIZE),
        ),
        (
            Both,
            "too long",
            raw(kind::WINDOW_UPDATE, 0, 0, &[0; 5]),
            Dead(SIZE),
        ),
    ]);
}

#[test]
fn rfc9113_6_9_1_windows_are_neither_overdrawn_nor_overfilled() {
    let most = word(MAX_31_BITS);
    check(&[
        (
            Both,
            "the connection's above 2^31-1",
            raw(kind::WINDOW_UPDATE, 0, 0, &most),
            Dead(FLOW),
        ),
        (
            Both,
            "a stream's above 2^31-1",
            raw(kind::WINDOW_UPDATE, 0, 1, &most),
            Reset(1, FLOW),
        ),
        // 256 KiB are allowed, and nothing was released.
        (
            Both,
            "more DATA than the window",
            raw(kind::DATA, 0, 1, &[0; MAX_FRAME]).repeat(17),
            Reset(1, FLOW),
        ),
        (
            Both,
            "as much DATA as the window",
            raw(kind::DATA, 0, 1, &[0; MAX_FRAME]).repeat(16),
            Fine,
        ),
    ]);
}

#[test]
fn rfc9113_6_9_2_a_changed_initial_window_overfills_no_stream() {
    let grown = raw(kind::WINDOW_UPDATE, 0, 1, &word(MAX_31_BITS - 65_535));
    let larger = settings(&[(setting::INITIAL_WINDOW_SIZE, 65_536)]);
    check(&[
        (
            Both,
            "above 2^31-1",
            [grown.clone(), larger].concat(),
            Dead(FLOW),
        ),
        (
            Both,
            "smaller",
            [grown, settings(&[(setting::INITIAL_WINDOW_SIZE, 0)])].concat(),
            Fine,
        ),
    ]);
}

#[test]
fn rfc9113_6_10_continuation_follows_an_open_block_of_its_stream() {
    let answer = raw(kind::HEADERS, 0, 3, &RESPONSE);
    check(&[
        (
            Both,
            "without HEADERS",
            raw(kind::CONTINUATION, END_HEADERS, 1, &[]),
            Dead(PROTOCOL),
        ),
        (
            Both,
            "on stream 0",
            raw(kind::CONTINUATION, END_HEADERS, 0, &[]),
            Dead(PROTOCOL),
        ),
        (
            Server,
            "after END_HEADERS",
            [request(11, END), raw(kind::CONTINUATION, 4, 11, &[])].concat(),
            Dead(PROTOCOL),
        ),
        (
            Server,
            "of another stream",
            [request(11, 0), raw(kind::CONTINUATION, 4, 13, &[])].concat(),
            Dead(PROTOCOL),
        ),
        (
            Client,
            "of another stream",
            [answer.clone(), raw(kind::CONTINUATION, 4, 1, &[])].concat(),
            Dead(PROTOCOL),
        ),
        (
            Client,
            "a legal one",
            [answer, raw(kind::CONTINUATION, 4, 3, &[])].concat(),
            Fine,
        ),
        (
            Server,
            "a legal one",
            [request(11, 0), raw(kind::CONTINUATION, 4, 11, &[])].concat(),
            Fine,
        ),
    ]);
}

#[test]
fn rfc9113_8_1_messages_are_headers_data_and_trailers_in_this_order() {
    let field = b"\x00\x01x\x01y";
    let interim = b"\x08\x03103";
    check(&[
        (
            Server,
            "trailers that end nothing",
            raw(kind::HEADERS, END_HEADERS, 1, field),
            Reset(1, PROTOCOL),
        ),
        (
            Client,
            "trailers that end nothing",
            raw(kind::HEADERS, END_HEADERS, 1, field),
            Reset(1, PROTOCOL),
        ),
        (Both, "trailers", raw(kind::HEADERS, END, 1, field), Fine),
        (
            Client,
            "DATA before the response",
            raw(kind::DATA, 0, 3, b"x"),
            Reset(3, PROTOCOL),
        ),
        (
            Client,
            "an interim response that ends",
            raw(kind::HEADERS, END, 3, interim),
            Reset(3, PROTOCOL),
        ),
        (
            Client,
            "an interim response",
            raw(kind::HEADERS, END_HEADERS, 3, interim),
            Fine,
        ),
    ]);
}

#[test]
fn rfc9113_8_1_1_content_length_is_the_length_of_the_content() {
    let length = b"\x0f\x0d\x012";
    let open = raw(
        kind::HEADERS,
        END_HEADERS,
        11,
        &[&REQUEST[..], length].concat(),
    );
    let answer = raw(
        kind::HEADERS,
        END_HEADERS,
        3,
        &[&RESPONSE[..], length].concat(),
    );
    let data = |stream, length| raw(kind::DATA, flag::END_STREAM, stream, &vec![0; length]);
    check(&[
        (
            Server,
            "2 without a body",
            request_with(length),
            Reset(11, PROTOCOL),
        ),
        (
            Server,
            "2 with a body of 1",
            [open.clone(), data(11, 1)].concat(),
            Reset(11, PROTOCOL),
        ),
        (
            Server,
            "2 with a body of 3",
            [open.clone(), data(11, 3)].concat(),
            Reset(11, PROTOCOL),
        ),
        (
            Server,
            "2 with a body of 2",
            [open, data(11, 2)].concat(),
            Fine,
        ),
        (
            Server,
            "content-length is no number",
            request_with(b"\x0f\x0d\x01x"),
            Reset(11, PROTOCOL),
        ),
        (
            Server,
            "two numbers",
            request_with(b"\x0f\x0d\x010\x0f\x0d\x011"),
            Reset(11, PROTOCOL),
        ),
        (
            Client,
            "2 with a body of 1",
            [answer.clone(), data(3, 1)].concat(),
            Reset(3, PROTOCOL),
        ),
        (
            Client,
            "2 with a body of 3",
            [answer, data(3, 3)].concat(),
            Reset(3, PROTOCOL),
        ),
    ]);
}

#[test]
fn rfc9113_8_2_fields_are_lower_case_of_legal_bytes_and_not_of_the_connection() {
    for (what, field) in [
        ("upper case", &b"\x00\x01X\x01y"[..]),
        ("a space in a name", b"\x00\x03a b\x01y"),
        ("a colon in a name", b"\x00\x03a:b\x01y"),
        ("an empty name", b"\x00\x00\x01y"),
        ("a byte above ASCII in a name", b"\x00\x01\xff\x01y"),
        ("NUL in a value", b"\x00\x01x\x01\x00"),
        ("LF in a value", b"\x00\x01x\x03a\nb"),
        ("CR in a value", b"\x00\x01x\x03a\rb"),
        ("a value that begins with a space", b"\x00\x01x\x02 a"),
        ("a value that ends with a tab", b"\x00\x01x\x02a\t"),
        ("connection", b"\x00\x0aconnection\x01y"),
        ("keep-alive", b"\x00\x0akeep-alive\x01y"),
        ("proxy-connection", b"\x00\x10proxy-connection\x01y"),
        ("transfer-encoding", b"\x00\x11transfer-encoding\x01y"),
        ("upgrade", b"\x00\x07upgrade\x01y"),
        ("te other than trailers", b"\x00\x02te\x01y"),
    ] {
        check(&[
            (Server, what, request_with(field), Reset(11, PROTOCOL)),
            (Client, what, response_with(field), Reset(3, PROTOCOL)),
            (
                Both,
                what,
                raw(kind::HEADERS, END, 1, field),
                Reset(1, PROTOCOL),
            ),
        ]);
    }
}

#[test]
fn rfc9113_8_3_pseudo_header_fields_are_known_single_and_first() {
    let late = |all: &[u8]| [&b"\x00\x01x\x01y"[..], all].concat();
    check(&[
        (
            Server,
            "a repeated pseudo-header field",
            request_with(&[0x83]),
            Reset(11, PROTOCOL),
        ),
        (
            Server,
            "a pseudo-header field of responses",
            request_with(&[0x88]),
            Reset(11, PROTOCOL),
        ),
        (
            Server,
            "an unknown pseudo-header field",
            request_with(b"\x00\x02:x\x01y"),
            Reset(11, PROTOCOL),
        ),
        (
            Server,
            "behind a field",
            raw(kind::HEADERS, END, 11, &late(&REQUEST)),
            Reset(11, PROTOCOL),
        ),
        (
            Server,
            "in trailers",
            raw(kind::HEADERS, END, 1, &[0x83]),
            Reset(1, PROTOCOL),
        ),
        (
            Client,
            "a repeated pseudo-header field",
            response_with(&[0x88]),
            Reset(3, PROTOCOL),
        ),
        (
            Client,
            "a pseudo-header field of requests",
            response_with(&[0x83]),
            Reset(3, PROTOCOL),
        ),
        (
            Client,
            "an unknown pseudo-header field",
            response_with(b"\x00\x02:x\x01y"),
            Reset(3, PROTOCOL),
        ),
        (
            Client,
            "behind a field",
            raw(kind::HEADERS, END, 3, &late(&RESPONSE)),
            Reset(3, PROTOCOL),
        ),
        (
            Client,
            "in trailers",
            raw(kind::HEADERS, END, 1, &[0x88]),
            Reset(1, PROTOCOL),
        ),
    ]);
}

#[test]
fn rfc9113_8_3_1_and_8_5_requests_have_method_scheme_and_path() {
    let request = |block: &[u8]| raw(kind::HEADERS, END, 11, block);
    check(&[
        (
            Server,
            "no method",
            request(&[0x86, 0x84]),
            Reset(11, PROTOCOL),
        ),
        (
            Server,
            "no scheme",
            request(&[0x83, 0x84]),
            Reset(11, PROTOCOL),
        ),
        (
            Server,
            "no path",
            request(&[0x83, 0x86]),
            Reset(11, PROTOCOL),
        ),
        (
            Server,
            "an empty path",
            request(b"\x83\x86\x04\x00"),
            Reset(11, PROTOCOL),
        ),
        (
            Server,
            "CONNECT with a path",
            request(b"\x02\x07CONNECT\x84\x01\x01a"),
            Reset(11, PROTOCOL),
        ),
        (
            Server,
            "CONNECT without an authority",
            request(b"\x02\x07CONNECT"),
            Reset(11, PROTOCOL),
        ),
        (
            Server,
            "CONNECT",
            request(b"\x02\x07CONNECT\x01\x01a"),
            Fine,
        ),
    ]);
}

#[test]
fn rfc9113_8_3_2_responses_have_a_status() {
    check(&[
        (
            Client,
            "none",
            raw(kind::HEADERS, END, 3, &[]),
            Reset(3, PROTOCOL),
        ),
        (
            Client,
            "two digits",
            raw(kind::HEADERS, END, 3, b"\x08\x0220"),
            Reset(3, PROTOCOL),
        ),
        (
            Client,
            "no digits",
            raw(kind::HEADERS, END, 3, b"\x08\x03abc"),
            Reset(3, PROTOCOL),
        ),
        (
            Client,
            "an unknown status",
            raw(kind::HEADERS, END, 3, b"\x08\x03299"),
            Fine,
        ),
    ]);
}
