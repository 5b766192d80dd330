//! Programs of operations on two connected connections: a client, a server, and the wire between
//! them.
//!
//! A program is a string of bytes from the fuzzer `h2_interleavings` or from the tests. Its steps
//! are possible actions of the layer above, of the network and of the clock: open, send, reset,
//! release, ping, shut down; deliver some bytes in pieces, or change them; let time pass. Each
//! connection has a [`Side`], a model that follows the frames on the wire and knows what RFC 9113
//! allows. After each step, events, windows, streams and output are compared with the model. As
//! long as no byte was changed (the pair is "honest"), everything sent must also arrive, and
//! everything begun must end.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::h2::{
    Allowance, Connection, Error, ErrorCode, Event, Field, H2Limits, Indexing, SendError,
};

const HEAD: usize = 9;
const PREFACE: usize = 24;
const MAX_FRAME: usize = 1 << 14;
const MAX_31_BITS: i64 = (1 << 31) - 1;
/// More bytes than any answer to one frame: two WINDOW_UPDATE or SETTINGS, RST_STREAM, GOAWAY with
/// a reason.
const ANSWERS: usize = 160;
/// A side with more unread output than this gets nothing more to send.
const OUTPUT: usize = 1 << 20;

// Frame types and flags are repeated here, so that a wrong number in `frame` is noticed.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

type Fields = Vec<(Vec<u8>, Vec<u8>, Indexing)>;

/// Runs a program; panics if an invariant does not hold.
pub fn run(program: &[u8]) {
    let mut program = Program(program);
    let mut pair = Pair::new(&mut program);
    while let Some(operation) = program.byte() {
        pair.step(operation, &mut program);
    }
    pair.finish();
}

/// The remaining bytes of a program; zeros follow their end.
struct Program<'a>(&'a [u8]);

impl<'a> Program<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    fn small(&mut self) -> usize {
        usize::from(self.byte().unwrap_or(0))
    }

    /// Returns mostly small lengths, up to 130 050, which is beyond the initial size of each
    /// window.
    fn length(&mut self) -> usize {
        match self.small() {
            small @ 0..128 => small,
            large => 2 * (large - 127) * (large - 127) + 8 * self.small() * (large - 127),
        }
    }

    fn word(&mut self) -> u32 {
        (0..4).fold(0, |word, _| word << 8 | self.small() as u32)
    }

    fn bytes(&mut self, length: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        taken
    }
}

/// The two sides of a connection.
struct Pair {
    sides: [Side; 2],
    now: Instant,
    /// Whether no byte on the wire was changed and no side sent anything that HTTP forbids.
    is_honest: bool,
    /// Number of operations for which an honest side may get ENHANCE_YOUR_CALM.
    provocations: usize,
}

impl Pair {
    fn new(program: &mut Program<'_>) -> Pair {
        let mut limits = || {
            let choice = program.small();
            H2Limits {
                streams: [1, 3, 20, 100][choice & 3],
                header_list: [200, 2000, 16 << 10, 100 << 10][choice >> 2 & 3],
                stream_window: [65_535, 65_536, 100_000, 256 << 10][choice >> 4 & 3],
                connection_window: [65_535, 200_000][choice >> 6 & 1],
                resets: Allowance {
                    burst: [1000, 20][choice >> 7],
                    per_second: 33,
                },
                control: Allowance {
                    burst: [1000, 40][choice >> 7],
                    per_second: 100,
                },
            }
        };
        let (client, server) = (limits(), limits());
        Pair {
            sides: [Side::new(false, client), Side::new(true, server)],
            now: Instant::now(),
            is_honest: true,
            provocations: 0,
        }
    }

    fn step(&mut self, operation: u8, program: &mut Program<'_>) {
        let side = usize::from(operation & 1);
        let is_server = side == 1;
        match operation >> 1 & 31 {
            0 => self.carry(side, program.length()),
            1 => self.carry(side, usize::MAX),
            2..4 => self.receive(side, 1),
            4 => self.receive(side, usize::MAX),
            5 => self.settle(),
            6 => self.spoil(side, program),
            7..9 => self.inject(side, program),
            9 if is_server => self.respond(program),
            9..11 => self.open(program),
            11 => self.send_trailers(side, program),
            12..15 => {
                let (stream, length) = (self.sides[side].pick(program.small()), program.length());
                self.send_data(side, stream, length & 0x3_ffff, length & 1 == 1);
            }
            15 => {
                let stream = self.sides[side].pick(program.small());
                self.provocations += 1;
                self.act(side, 0, |connection| {
                    connection.reset(stream, ErrorCode::CANCEL)
                });
            }
            16..19 => {
                let (stream, share) = (self.sides[side].pick(program.small()), program.small());
                self.release(side, stream, share);
            }
            19 => {
                self.provocations += 1;
                self.sides[side].pings += usize::from(self.sides[side].dead.is_none());
                self.act(side, 0, Connection::ping);
            }
            20 if is_server => self.act(side, 0, |h2| h2.shutdown("")),
            21 if program.small() < 32 => self.act(side, 0, |connection| {
                connection.goaway(ErrorCode::NO_ERROR, "")
            }),
            22 => self.now += Duration::from_millis(program.small() as u64),
            23 => self.now += Duration::from_secs(program.small() as u64),
            24 => self.anything(side, program),
            _ => self.receive(side, 4),
        }
    }

    // ---- the wire ----

    /// Delivers `length` bytes of the other side's output to the inbox.
    fn carry(&mut self, side: usize, length: usize) {
        let output = self.sides[1 - side].connection.output();
        let arrived: Vec<u8> = output.drain(..length.min(output.len())).collect();
        self.sides[side].inbox.extend(arrived);
    }

    /// Makes a side receive up to `count` of the delivered frames.
    fn receive(&mut self, side: usize, count: usize) {
        for _ in 0..count {
            let (other, this) = pick_two(&mut self.sides, side);
            let expected = self.is_honest.then_some(&mut other.sent);
            if !this.receive(self.now, expected) {
                break;
            }
        }
        if let Some(error) = self.sides[side].dead.filter(|_| self.is_honest) {
            assert_eq!(error.code, ErrorCode::ENHANCE_YOUR_CALM, "{error}");
            assert!(self.provocations >= 10, "{error}");
        }
    }

    /// Delivers everything in both directions until both outputs are empty.
    fn settle(&mut self) {
        for _ in 0..100 {
            for side in [0, 1] {
                self.carry(side, usize::MAX);
                self.receive(side, usize::MAX);
            }
            if self
                .sides
                .iter_mut()
                .all(|side| side.connection.output().is_empty())
            {
                return;
            }
        }
        panic!("the two sides answer each other without end");
    }

    /// Changes some of the next bytes on the wire.
    fn spoil(&mut self, side: usize, program: &mut Program<'_>) {
        self.is_honest = false;
        let (how, at, value) = (program.small(), program.length(), program.small());
        let inbox = &mut self.sides[side].inbox;
        let at = at.min(inbox.len());
        match how % 4 {
            0 if at < inbox.len() => inbox[at] ^= value as u8,
            1 => drop(inbox.drain(at..(at + value).min(inbox.len()))),
            2 => drop(inbox.splice(at..at, program.bytes(value).to_vec())),
            _ => {
                let again = inbox[at..(at + value).min(inbox.len())].to_vec();
                inbox.splice(at..at, again);
            }
        }
    }

    /// Inserts a frame that the other side did not write, with a consistent length.
    fn inject(&mut self, side: usize, program: &mut Program<'_>) {
        self.is_honest = false;
        let (kind, stream) = (program.small() as u8, program.small() as u32);
        let flags = match kind >> 4 {
            0 => 0,
            _ => program.small() as u8,
        };
        let kind = kind & 15;
        let payload = match kind {
            PRIORITY if flags == 0 => [program.word().to_be_bytes().as_slice(), &[0]].concat(),
            RST_STREAM | WINDOW_UPDATE if flags == 0 => program.word().to_be_bytes().to_vec(),
            SETTINGS if flags == 0 => [
                &[0, program.small() as u8][..],
                &program.word().to_be_bytes(),
            ]
            .concat(),
            PING if flags == 0 => b"draining".to_vec(),
            DATA if flags == 0 => vec![0; program.length().min(MAX_FRAME)],
            _ => {
                let length = program.small();
                program.bytes(length).to_vec()
            }
        };
        let stream = if matches!(kind, SETTINGS | PING | GOAWAY) {
            stream >> 7
        } else {
            stream & 0x7f
        };
        // Insert it at the border of a frame.
        let missing = self.sides[side].missing();
        self.carry(side, missing);
        let inbox = &mut self.sides[side].inbox;
        inbox.extend(&(payload.len() as u32).to_be_bytes()[1..]);
        inbox.extend([kind, if kind == PING { flags | ACK } else { flags }]);
        inbox.extend(stream.to_be_bytes());
        inbox.extend(payload);
    }

    // ---- the layers above ----

    /// Does something to a connection that writes at most `most` bytes, not counting one or two
    /// small frames.
    fn act<T>(&mut self, side: usize, most: usize, action: impl FnOnce(&mut Connection) -> T) -> T {
        self.sides[side].act(most, action)
    }

    fn open(&mut self, program: &mut Program<'_>) {
        let (kind, end) = (program.small(), program.small() & 1 == 1);
        let mut fields = fields(&[
            (":method", "POST"),
            (":scheme", "http"),
            (":path", "/a.B/C"),
            (":authority", "x"),
        ]);
        fields.extend(self.more_fields(kind, program));
        let side = &mut self.sides[0];
        if side.connection.output().len() > OUTPUT {
            return;
        }
        let live = side
            .streams
            .values()
            .filter(|stream| stream.is_live())
            .count();
        let result = side.act(4 * size(&fields), |connection| {
            connection.open(borrowed(&fields), end)
        });
        let expected = match side {
            _ if side.goes_away || side.dead.is_some() => Err(SendError::GoingAway),
            _ if live >= side.peer_streams as usize => Err(SendError::TooMany),
            _ if size(&fields) > side.peer_header_list => Err(SendError::TooLarge),
            _ => Ok(side.last_own),
        };
        assert_eq!(result, expected);
        if let Ok(stream) = result {
            // The server may refuse streams or fields if its SETTINGS have not arrived yet.
            side.streams
                .get_mut(&stream)
                .expect("its HEADERS were seen")
                .is_early = !side.has_settings;
            self.provocations += side.too_early(size(&fields));
            side.sent.entry(stream).or_default().push_back(fields);
        }
    }

    /// Sends the server's headers for a request, final or interim.
    fn respond(&mut self, program: &mut Program<'_>) {
        let (stream, kind) = (self.sides[1].pick(program.small()), program.small());
        let is_interim = kind & 0x60 == 0x60;
        let end = kind & 0x60 == 0x20;
        let mut fields = fields(&[(":status", if is_interim { "103" } else { "200" })]);
        fields.extend(self.more_fields(kind & 31, program));
        if self.sides[1]
            .streams
            .get(&stream)
            .is_some_and(|stream| stream.sent_headers)
        {
            return;
        }
        self.provocations += usize::from(is_interim);
        self.send_headers(1, stream, fields, end, is_interim);
    }

    fn send_trailers(&mut self, side: usize, program: &mut Program<'_>) {
        let (stream, kind) = (self.sides[side].pick(program.small()), program.small());
        let fields = self.more_fields(kind, program);
        if self.sides[side]
            .streams
            .get(&stream)
            .is_none_or(|stream| stream.sent_headers)
        {
            self.send_headers(side, stream, fields, true, false);
        }
    }

    fn send_headers(
        &mut self,
        side: usize,
        stream: u32,
        fields: Fields,
        end: bool,
        is_interim: bool,
    ) {
        let side = &mut self.sides[side];
        if side.connection.output().len() > OUTPUT {
            return;
        }
        let is_open = side.is_open(stream);
        let result = side.act(4 * size(&fields), |connection| {
            connection.send_headers(stream, borrowed(&fields), end)
        });
        let expected = match () {
            _ if !is_open => Err(SendError::Closed),
            _ if size(&fields) > side.peer_header_list => Err(SendError::TooLarge),
            _ => Ok(()),
        };
        assert_eq!(result, expected);
        if result.is_ok() && !is_interim {
            let state = side.streams.get_mut(&stream).expect("it is open");
            state.sent_headers = true;
            state.is_early |= !side.has_settings;
            self.provocations += side.too_early(size(&fields));
            side.sent.entry(stream).or_default().push_back(fields);
        }
    }

    /// Returns fields that a layer above may add. The kinds 24 to 31 break the rules, or may break
    /// them.
    fn more_fields(&mut self, kind: usize, program: &mut Program<'_>) -> Fields {
        match kind & 31 {
            0..4 => fields(&[("te", "trailers"), ("content-type", "application/grpc")]),
            4..10 => fields(&[("grpc-status", "0"), ("x", &program.small().to_string())]),
            10..14 => {
                let secret = vec![b's'; program.length() & 0xfff];
                vec![(b"authorization".to_vec(), secret, Indexing::Never)]
            }
            14..18 => {
                // Up to several frames of legal bytes that the Huffman code cannot shorten.
                let long = vec![b'~'; program.length()];
                vec![(b"x-long".to_vec(), long, Indexing::No)]
            }
            18..24 => {
                let name = format!("x-{}", program.small());
                (0..program.small() & 15)
                    .map(|_| (name.clone().into_bytes(), vec![b'v'; 7], Indexing::Yes))
                    .collect()
            }
            24..26 => {
                self.is_honest = false;
                fields(&[("content-length", &(program.small() & 15).to_string())])
            }
            26 => {
                self.is_honest = false;
                fields(&[("connection", "close")])
            }
            _ => {
                self.is_honest = false;
                let (name, value) = (program.small() & 15, program.small());
                vec![(
                    program.bytes(name).to_vec(),
                    program.bytes(value).to_vec(),
                    Indexing::Yes,
                )]
            }
        }
    }

    fn send_data(&mut self, side: usize, stream: u32, length: usize, end: bool) {
        let side = &mut self.sides[side];
        let has_no_headers = side
            .streams
            .get(&stream)
            .is_some_and(|stream| !stream.sent_headers);
        if side.connection.output().len() > OUTPUT || has_no_headers {
            return;
        }
        // Each frame may be late, on a stream that was reset.
        self.provocations += 1;
        let from = side.streams.get(&stream).map_or(0, |stream| stream.sent);
        let data: Vec<u8> = (from..from + length)
            .map(|at| pattern(stream, at))
            .collect();
        let room = side.room(stream);
        let most = length + HEAD * (length / MAX_FRAME + 1);
        let result = side.act(most, |connection| connection.send_data(stream, &data, end));
        assert_eq!(
            result,
            room.map(|room| room.min(length)).ok_or(SendError::Closed)
        );
        if let Ok(sent) = result {
            side.streams.get_mut(&stream).expect("it is open").sent += sent;
            assert_eq!(
                side.is_open(stream),
                !(end && sent == length),
                "END_STREAM goes with the last byte"
            );
        }
    }

    /// Releases a share (in 255ths) of the bytes that the layer above holds.
    fn release(&mut self, side: usize, stream: u32, share: usize) {
        let this = &mut self.sides[side];
        let Some(state) = this.streams.get_mut(&stream) else {
            return;
        };
        let bytes = state.held * share / 255;
        state.held -= bytes;
        this.act(0, |connection| connection.release(stream, bytes as u32));
    }

    /// Acts like a layer above without sense. There must be no panic, and no frame that breaks the
    /// stream's state.
    fn anything(&mut self, side: usize, program: &mut Program<'_>) {
        self.is_honest = false;
        let (kind, stream, end) = (
            program.small(),
            program.small() as u32,
            program.small() & 1 == 1,
        );
        let fields = self.more_fields(kind, program);
        let this = &mut self.sides[side];
        if this.connection.output().len() > OUTPUT {
            return;
        }
        this.act(4 * size(&fields), |connection| {
            connection
                .send_headers(stream, borrowed(&fields), end)
                .is_ok()
        });
        this.act(20_000, |connection| {
            connection.send_data(stream, &[0; 10_000], end).is_ok()
        });
    }

    // ---- the end ----

    /// Lets each side send the rest; then everything must have ended.
    fn finish(&mut self) {
        self.settle();
        for _ in 0..2000 {
            let mut is_done = true;
            for side in [0, 1] {
                for stream in self.sides[side].streams.keys().copied().collect::<Vec<_>>() {
                    self.release(side, stream, 255);
                    is_done &= !self.sides[side].is_open(stream) || !self.end(side, stream);
                }
            }
            self.settle();
            if is_done {
                break;
            }
        }
        self.sides.iter_mut().for_each(Side::check);
        if self.is_honest && self.sides.iter().all(|side| side.dead.is_none()) {
            self.check_the_end();
        }
    }

    /// Ends our half of a stream; returns `false` if that is not possible.
    fn end(&mut self, side: usize, stream: u32) -> bool {
        if self.sides[side].streams[&stream].sent_headers {
            self.send_data(side, stream, 0, true);
        } else {
            self.send_headers(side, stream, fields(&[(":status", "200")]), true, false);
        }
        !self.sides[side].is_open(stream)
    }

    fn check_the_end(&mut self) {
        let [client, server] = &mut self.sides;
        for side in [&*client, &*server] {
            assert!(side.inbox.is_empty(), "a part of a frame is left");
            assert_eq!(side.pongs, side.pings);
            let live: Vec<_> = side
                .streams
                .iter()
                .filter(|(_, stream)| stream.is_live())
                .map(|(id, _)| id)
                .collect();
            assert!(
                live.is_empty(),
                "streams {live:?} have not ended (server: {})",
                side.is_server
            );
            assert!(side.connection.is_established());
        }
        assert_eq!(client.goes_away, server.promised_last.is_some());
        assert_eq!(server.connection.is_drained(), client.goes_away);
        // No stream leaked: there is room for exactly as many streams as the server allows.
        let limit = server.limits.streams;
        if client.goes_away || client.promised_last.is_some() {
            return;
        }
        for _ in 0..limit {
            let request = fields(&[(":method", "GET"), (":scheme", "http"), (":path", "/")]);
            client
                .act(100, |connection| connection.open(borrowed(&request), true))
                .expect("room");
            client
                .sent
                .entry(client.last_own)
                .or_default()
                .push_back(request);
        }
        let last = client.last_own;
        self.settle();
        let [client, server] = &self.sides;
        if server.dead.is_none() {
            assert!(
                client.is_live(last) && server.is_live(last),
                "the server refused what its SETTINGS allow"
            );
        }
    }
}

/// Returns (the other side, this side).
fn pick_two(sides: &mut [Side; 2], side: usize) -> (&mut Side, &mut Side) {
    let [client, server] = sides;
    if side == 0 {
        (server, client)
    } else {
        (client, server)
    }
}

/// A stream according to the frames on the wire.
struct Stream {
    is_reset: bool,
    local_open: bool,
    remote_open: bool,
    sent_headers: bool,
    got_headers: bool,
    is_early: bool,
    /// Number of bytes that the peer allows us to send.
    send_window: i64,
    /// Number of bytes that we allow the peer to send.
    receive_window: i64,
    /// Number of bytes received and not released.
    held: usize,
    sent: usize,
    received: usize,
}

impl Stream {
    fn is_live(&self) -> bool {
        !self.is_reset && (self.local_open || self.remote_open)
    }
}

/// A connection, the bytes that arrived for it, and what is known about it from outside.
struct Side {
    connection: Connection,
    is_server: bool,
    limits: H2Limits,
    inbox: Vec<u8>,
    dead: Option<Error>,
    streams: BTreeMap<u32, Stream>,
    /// The last stream that this side opened.
    last_own: u32,
    /// The fields of our header blocks that the other side has not received yet, by stream.
    sent: BTreeMap<u32, VecDeque<Fields>>,
    preface_left: usize,
    has_settings: bool,
    send_window: i64,
    receive_window: i64,
    peer_stream_window: i64,
    peer_streams: u32,
    peer_header_list: usize,
    goes_away: bool,
    /// The last stream of our last GOAWAY, unless it was the first of two.
    promised_last: Option<u32>,
    /// Number of bytes since the current header block began.
    within_headers: usize,
    /// The stream whose header block is incomplete in our output.
    writes_block: Option<u32>,
    /// Number of the peer's DATA and other frames that still explain answers.
    pings: usize,
    pongs: usize,
}

impl Side {
    fn new(is_server: bool, limits: H2Limits) -> Side {
        let mut side = Side {
            connection: if is_server {
                Connection::server(limits)
            } else {
                Connection::client(limits)
            },
            is_server,
            limits,
            inbox: Vec::new(),
            dead: None,
            streams: BTreeMap::new(),
            last_own: 0,
            sent: BTreeMap::new(),
            preface_left: if is_server { PREFACE } else { 0 },
            has_settings: false,
            send_window: 65_535,
            receive_window: 65_535,
            peer_stream_window: 65_535,
            peer_streams: u32::MAX,
            peer_header_list: usize::MAX,
            goes_away: false,
            promised_last: None,
            within_headers: 0,
            writes_block: None,
            pings: 0,
            pongs: 0,
        };
        side.wrote(if is_server { 0 } else { PREFACE });
        side.check();
        side
    }

    /// Returns how much a header list counts as a provocation before the peer's limit is known.
    fn too_early(&self, size: usize) -> usize {
        match self.has_settings {
            true => 0,
            false if size < 60_000 => 1,
            false => 10,
        }
    }

    /// Returns a stream, which mostly exists.
    fn pick(&self, choice: usize) -> u32 {
        match choice {
            // The newest stream.
            0..200 => self
                .streams
                .keys()
                .rev()
                .nth(choice % 8)
                .copied()
                .unwrap_or(1),
            _ => choice as u32 - 200,
        }
    }

    fn is_open(&self, stream: u32) -> bool {
        self.dead.is_none()
            && self
                .streams
                .get(&stream)
                .is_some_and(|stream| !stream.is_reset && stream.local_open)
    }

    fn is_live(&self, stream: u32) -> bool {
        self.streams.get(&stream).is_some_and(Stream::is_live)
    }

    /// Returns how many bytes may be sent, if the stream is open.
    fn room(&self, stream: u32) -> Option<usize> {
        let is_open = self.is_open(stream);
        is_open.then(|| {
            self.streams[&stream]
                .send_window
                .min(self.send_window)
                .max(0) as usize
        })
    }

    /// Returns how many bytes the arriving frame still needs.
    fn missing(&self) -> usize {
        let mut rest = &self.inbox[self.preface_left.min(self.inbox.len())..];
        while let Some(head) = Head::parse(rest) {
            match rest.get(HEAD + head.length..) {
                Some(behind) => rest = behind,
                None => return HEAD + head.length - rest.len(),
            }
        }
        0
    }

    /// Does something to the connection and checks what it wrote.
    fn act<T>(&mut self, most: usize, action: impl FnOnce(&mut Connection) -> T) -> T {
        let before = self.connection.output().len();
        let result = action(&mut self.connection);
        let written = self.connection.output().len() - before;
        assert!(
            written <= most + ANSWERS,
            "{written} bytes of output, {most} asked for"
        );
        if self.dead.is_some() {
            assert_eq!(written, 0, "GOAWAY is the last frame");
        }
        self.wrote(before);
        self.check();
        result
    }

    /// Receives one frame of the inbox; returns `false` if there is none. With `expected`, the
    /// fields must arrive as the peer sent them.
    fn receive(
        &mut self,
        now: Instant,
        expected: Option<&mut BTreeMap<u32, VecDeque<Fields>>>,
    ) -> bool {
        let inbox = std::mem::take(&mut self.inbox);
        let before = self.connection.output().len();
        let result = self.connection.receive(&inbox, now);
        let (taken, event) = match result {
            Err(error) => {
                assert!(
                    self.dead.is_none_or(|dead| dead == error),
                    "the first error is the only one"
                );
                let written = &self.connection.output()[before..];
                if self.dead.is_some() {
                    assert!(written.is_empty(), "GOAWAY is the last frame");
                } else {
                    assert!(!written.is_empty(), "GOAWAY reports an error");
                }
                self.dead = Some(error);
                // The connection's window may have been opened before the error.
                if let Some(head) = Head::parse(&inbox).filter(|head| head.kind == DATA) {
                    self.receive_window -= head.length as i64;
                }
                self.wrote(before);
                return false;
            }
            Ok((0, event)) => {
                assert_eq!(event, None);
                assert!(
                    inbox.len() < HEAD + MAX_FRAME,
                    "a complete frame was not taken"
                );
                self.inbox = inbox;
                return false;
            }
            Ok(result) => result,
        };
        assert!(self.dead.is_none(), "nothing is received after an error");
        let written = self.connection.output().len() - before;
        assert!(
            written <= ANSWERS,
            "{written} bytes of output for one frame"
        );
        // The event borrows only from the inbox.
        let event = event.map(|event| match event {
            Event::Data { stream, data, end } => Happened::Data(stream, data.to_vec(), end),
            Event::Headers { stream, end } => Happened::Headers(stream, end),
            Event::Trailers { stream } => Happened::Trailers(stream),
            Event::Reset {
                stream,
                code,
                by_peer,
            } => Happened::Reset(stream, code, by_peer),
            Event::Window { .. } => Happened::Window,
            Event::GoAway { last, .. } => Happened::GoAway(last),
            Event::Pong => Happened::Pong,
        });
        if self.preface_left > 0 {
            self.preface_left -= taken;
        } else {
            let head = Head::parse(&inbox).expect("a frame was taken");
            assert_eq!(taken, HEAD + head.length);
            self.read(head, &inbox[HEAD..taken], event.as_ref());
        }
        if let Some(event) = event {
            self.happened(event, expected);
        }
        self.inbox = inbox[taken..].to_vec();
        self.wrote(before);
        self.check();
        true
    }

    /// Applies what a received frame allows us.
    fn read(&mut self, head: Head, payload: &[u8], event: Option<&Happened>) {
        let number =
            |at: usize| u32::from_be_bytes(payload[at..at + 4].try_into().expect("four bytes"));
        match head.kind {
            DATA => {
                self.receive_window -= payload.len() as i64;
                assert!(
                    self.receive_window >= 0,
                    "more DATA was taken than the connection's window"
                );
                if let (Some(Happened::Data(..)), Some(stream)) =
                    (event, self.streams.get_mut(&head.stream))
                {
                    stream.receive_window -= payload.len() as i64;
                    assert!(
                        stream.receive_window >= 0,
                        "more DATA was taken than the stream's window"
                    );
                }
            }
            SETTINGS if head.flags & ACK == 0 => {
                self.has_settings = true;
                for at in (0..payload.len()).step_by(6) {
                    self.setting(
                        u16::from_be_bytes([payload[at], payload[at + 1]]),
                        number(at + 2),
                    );
                }
            }
            WINDOW_UPDATE if head.stream == 0 => {
                self.send_window += i64::from(number(0) & 0x7fff_ffff)
            }
            WINDOW_UPDATE => {
                if let Some(stream) = self
                    .streams
                    .get_mut(&head.stream)
                    .filter(|stream| stream.is_live())
                {
                    stream.send_window += i64::from(number(0) & 0x7fff_ffff);
                }
            }
            _ => {}
        }
        if self.connection.is_within_headers() {
            self.within_headers += payload.len()
        } else {
            self.within_headers = 0
        }
        // RFC 9113 sets no limit here, but the memory must have one.
        assert!(self.within_headers <= self.limits.header_list as usize + (64 << 10) + MAX_FRAME);
    }

    fn setting(&mut self, id: u16, value: u32) {
        match id {
            3 => self.peer_streams = value,
            4 => {
                let change = i64::from(value) - self.peer_stream_window;
                self.peer_stream_window = i64::from(value);
                for stream in self.streams.values_mut().filter(|stream| stream.is_live()) {
                    stream.send_window += change;
                }
            }
            6 => self.peer_header_list = value as usize,
            _ => {}
        }
    }

    fn happened(
        &mut self,
        event: Happened,
        expected: Option<&mut BTreeMap<u32, VecDeque<Fields>>>,
    ) {
        match event {
            Happened::Headers(id, end) => {
                if self.is_server {
                    let highest = self.streams.last_key_value().map_or(0, |(id, _)| *id);
                    assert!(id % 2 == 1 && id > highest, "request {id} after {highest}");
                    assert!(
                        self.promised_last.is_none_or(|last| id <= last),
                        "a request above the last stream of GOAWAY"
                    );
                    self.streams.insert(id, self.new_stream());
                    let live = self
                        .streams
                        .values()
                        .filter(|stream| stream.is_live())
                        .count();
                    assert!(live <= self.limits.streams as usize, "{live} streams");
                }
                let stream = self.speaking(id);
                assert!(
                    !std::mem::replace(&mut stream.got_headers, true),
                    "headers arrive twice"
                );
                stream.remote_open = !end;
                self.compare(id, expected);
            }
            Happened::Trailers(id) => {
                let stream = self.speaking(id);
                assert!(stream.got_headers, "trailers without headers");
                stream.remote_open = false;
                self.compare(id, expected);
            }
            Happened::Data(id, data, end) => {
                let stream = self.speaking(id);
                assert!(stream.got_headers, "data without headers");
                stream.remote_open = !end;
                stream.held += data.len();
                if expected.is_some() {
                    let mut sent = (stream.received..).map(|at| pattern(id, at));
                    assert!(
                        data.iter().all(|byte| sent.next() == Some(*byte)),
                        "the data differs from what was sent"
                    );
                }
                stream.received += data.len();
            }
            Happened::Reset(id, code, by_peer) => {
                let is_server = self.is_server;
                let stream = self
                    .streams
                    .get_mut(&id)
                    .expect("a reset of a stream that the layer above knows");
                assert!(stream.is_live(), "a reset of stream {id}, which has ended");
                stream.is_reset = true;
                if expected.is_some() {
                    // The request may be too much for a server whose SETTINGS have not arrived; the
                    // client's side knows whether they had.
                    let is_early = matches!(code.0, 7 | 11)
                        && if is_server { !by_peer } else { stream.is_early };
                    assert!(
                        is_early || by_peer && code == ErrorCode::CANCEL,
                        "reset of stream {id}: {code}"
                    );
                }
            }
            Happened::GoAway(last) => {
                self.goes_away = true;
                if !self.is_server {
                    self.streams
                        .range_mut(last + 1..)
                        .for_each(|(_, stream)| stream.is_reset = true);
                }
            }
            Happened::Pong => {
                self.pongs += 1;
                assert!(
                    expected.is_none() || self.pongs <= self.pings,
                    "more answers than PINGs"
                );
            }
            Happened::Window => {}
        }
    }

    /// Returns a stream on which the peer may still send.
    fn speaking(&mut self, id: u32) -> &mut Stream {
        let stream = self
            .streams
            .get_mut(&id)
            .expect("an event of a stream that exists");
        assert!(
            !stream.is_reset && stream.remote_open,
            "an event of stream {id}, on which nothing can follow"
        );
        stream
    }

    fn compare(&mut self, id: u32, expected: Option<&mut BTreeMap<u32, VecDeque<Fields>>>) {
        let size: usize = self
            .connection
            .headers()
            .iter()
            .map(|(name, value)| name.len() + value.len() + 32)
            .sum();
        assert!(size <= self.limits.header_list as usize);
        if let Some(expected) = expected {
            let sent = expected
                .get_mut(&id)
                .and_then(VecDeque::pop_front)
                .expect("headers that were sent");
            assert!(
                self.connection
                    .headers()
                    .iter()
                    .eq(borrowed(&sent).map(|(name, value, _)| (name, value)))
            );
        }
    }

    fn new_stream(&self) -> Stream {
        Stream {
            is_reset: false,
            local_open: true,
            remote_open: true,
            sent_headers: !self.is_server,
            got_headers: false,
            is_early: false,
            send_window: self.peer_stream_window,
            receive_window: i64::from(self.limits.stream_window),
            held: 0,
            sent: 0,
            received: 0,
        }
    }

    /// Follows the frames in the output behind `start`: they must be whole and allowed by the
    /// standard.
    fn wrote(&mut self, start: usize) {
        let output = self.connection.output()[start..].to_vec();
        let mut rest = output.as_slice();
        while !rest.is_empty() {
            let head = Head::parse(rest).expect("a whole head");
            let payload = rest.get(HEAD..HEAD + head.length).expect("a whole frame");
            rest = &rest[HEAD + head.length..];
            self.wrote_frame(head, payload);
        }
        assert_eq!(
            self.writes_block, None,
            "a header block is written in one piece"
        );
    }

    fn wrote_frame(&mut self, head: Head, payload: &[u8]) {
        assert!(head.length <= MAX_FRAME);
        assert!(
            head.stream == 0 || head.stream % 2 == 1,
            "only the client opens streams"
        );
        match self.writes_block {
            Some(stream) => assert_eq!((head.kind, head.stream), (CONTINUATION, stream)),
            None => assert_ne!(head.kind, CONTINUATION),
        }
        let increment = || i64::from(u32::from_be_bytes(payload.try_into().expect("four bytes")));
        match head.kind {
            DATA => {
                let stream = self
                    .streams
                    .get_mut(&head.stream)
                    .expect("DATA on a stream that exists");
                assert!(
                    !stream.is_reset && stream.local_open,
                    "DATA on a stream whose half is closed"
                );
                let length = payload.len() as i64;
                assert!(
                    length == 0 || length <= stream.send_window.min(self.send_window),
                    "more than the windows"
                );
                stream.send_window -= length;
                self.send_window -= length;
                stream.local_open = head.flags & END_STREAM == 0;
            }
            HEADERS => {
                if !self.is_server && !self.streams.contains_key(&head.stream) {
                    assert_eq!(
                        head.stream,
                        if self.last_own == 0 {
                            1
                        } else {
                            self.last_own + 2
                        }
                    );
                    self.last_own = head.stream;
                    self.streams.insert(head.stream, self.new_stream());
                }
                let stream = self
                    .streams
                    .get_mut(&head.stream)
                    .expect("HEADERS on a stream that exists");
                assert!(
                    !stream.is_reset && stream.local_open,
                    "HEADERS on a stream whose half is closed"
                );
                stream.local_open = head.flags & END_STREAM == 0;
                self.writes_block = (head.flags & END_HEADERS == 0).then_some(head.stream);
            }
            CONTINUATION => {
                self.writes_block = (head.flags & END_HEADERS == 0).then_some(head.stream)
            }
            RST_STREAM => {
                assert!(head.stream != 0 && payload.len() == 4);
                if let Some(stream) = self.streams.get_mut(&head.stream) {
                    stream.is_reset = true;
                }
            }
            SETTINGS => {
                assert!(
                    head.stream == 0
                        && payload.len().is_multiple_of(6)
                        && (head.flags == 0 || payload.is_empty())
                )
            }
            PING => assert!(head.stream == 0 && payload.len() == 8),
            GOAWAY => {
                assert_eq!(head.stream, 0);
                let last = u32::from_be_bytes(payload[..4].try_into().expect("four bytes"));
                assert!(
                    self.promised_last.is_none_or(|before| last <= before),
                    "GOAWAY takes back a promise (§6.8)"
                );
                if i64::from(last) < MAX_31_BITS {
                    self.promised_last = Some(last);
                }
            }
            WINDOW_UPDATE if head.stream == 0 => {
                self.receive_window += increment();
                assert!(
                    increment() > 0
                        && self.receive_window <= i64::from(self.limits.connection_window)
                );
            }
            WINDOW_UPDATE => {
                let stream = self
                    .streams
                    .get_mut(&head.stream)
                    .expect("WINDOW_UPDATE on a stream that exists");
                stream.receive_window += increment();
                assert!(
                    increment() > 0
                        && stream.receive_window <= i64::from(self.limits.stream_window)
                );
            }
            other => panic!("a frame of type {other}"),
        }
    }

    /// Checks the invariants between two steps.
    fn check(&mut self) {
        if self.dead.is_some() {
            return;
        }
        let whole = i64::from(self.limits.connection_window);
        assert!(
            self.receive_window > whole - whole / 2,
            "the connection's window does not open again"
        );
        let whole = i64::from(self.limits.stream_window);
        assert!(self.send_window <= MAX_31_BITS);
        for (&id, stream) in &self.streams {
            let may_send = !self.is_open(id) || self.room(id) > Some(0);
            assert_eq!(self.connection.may_send(id), may_send, "stream {id}");
            if stream.is_live() {
                assert!(stream.send_window <= MAX_31_BITS);
            }
            if stream.is_live() && stream.remote_open {
                let open = stream.receive_window + stream.held as i64;
                assert!(
                    open <= whole && open > whole - whole / 2,
                    "stream {id}: a window of {open} of {whole}"
                );
            }
        }
    }
}

/// An event without a borrow.
#[derive(Debug)]
enum Happened {
    Headers(u32, bool),
    Trailers(u32),
    Data(u32, Vec<u8>, bool),
    Reset(u32, ErrorCode, bool),
    Window,
    GoAway(u32),
    Pong,
}

/// A frame's head, parsed independently of `frame`.
#[derive(Clone, Copy, Debug)]
struct Head {
    length: usize,
    kind: u8,
    flags: u8,
    stream: u32,
}

impl Head {
    fn parse(bytes: &[u8]) -> Option<Head> {
        let &[l0, l1, l2, kind, flags, s0, s1, s2, s3] = bytes.first_chunk::<HEAD>()?;
        let length = u32::from_be_bytes([0, l0, l1, l2]) as usize;
        Some(Head {
            length,
            kind,
            flags,
            stream: u32::from_be_bytes([s0 & 0x7f, s1, s2, s3]),
        })
    }
}

/// Returns the byte of a stream's body at `at`.
fn pattern(stream: u32, at: usize) -> u8 {
    (at as u32)
        .wrapping_mul(0x9e37_79b1)
        .wrapping_add(stream)
        .to_be_bytes()[0]
}

fn fields(fields: &[(&str, &str)]) -> Fields {
    fields
        .iter()
        .map(|(name, value)| {
            (
                name.as_bytes().to_vec(),
                value.as_bytes().to_vec(),
                Indexing::Yes,
            )
        })
        .collect()
}

fn borrowed(fields: &Fields) -> impl Iterator<Item = Field<'_>> + Clone {
    fields
        .iter()
        .map(|(name, value, indexing)| (name.as_slice(), value.as_slice(), *indexing))
}

/// Returns the size of a list as SETTINGS_MAX_HEADER_LIST_SIZE counts it.
fn size(fields: &Fields) -> usize {
    fields
        .iter()
        .map(|(name, value, _)| name.len() + value.len() + 32)
        .sum()
}
