//! A client's session against a server's session in memory: no socket, no thread, and a clock that
//! the test sets.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::grpc::limits::Limits;
use crate::grpc::message::{decode, encode};
use crate::grpc::metadata::Metadata;
use crate::grpc::methods::{Method, Methods};
use crate::share::{LimitShare, SharedLimit};

/// A method whose handler starts with the complete request, and one that starts with the headers.
const ONE: &str = "/t.T/One";
const MANY: &str = "/t.T/Many";

struct Pair {
    client: Session<ClientSide>,
    server: Session<ServerSide>,
    methods: Arc<Methods>,
    memory: Arc<SharedLimit>,
    now: Instant,
}

impl Pair {
    /// Returns two sessions that know each other's settings.
    fn new(limits: Limits) -> Pair {
        let now = Instant::now();
        let mut methods = Methods::default();
        for (handler, (path, takes_one)) in [(ONE, true), (MANY, false)].into_iter().enumerate() {
            methods.add(path, Method { handler, takes_one });
        }
        let memory = SharedLimit::new(limits.buffered_bytes, 0);
        let share = Arc::new(PeerShare {
            handlers: LimitShare::of(&SharedLimit::new(limits.handlers, 0)),
            memory: LimitShare::of(&memory),
        });
        let by = now + limits.handshake;
        let (limits, methods) = (Arc::new(limits), Arc::new(methods));
        let mut pair = Pair {
            client: Session::client(&Limits::default(), now),
            server: Session::server(limits, methods.clone(), share, by, now),
            methods,
            memory,
            now,
        };
        pair.exchange();
        assert!(pair.client.has_settings());
        pair
    }

    /// Carries the output of each side to the other, until there is none.
    fn exchange(&mut self) {
        while self.carry_to_server() | self.carry_to_client() {}
    }

    fn carry_to_server(&mut self) -> bool {
        carry(&mut self.client, &mut self.server, self.now)
    }

    fn carry_to_client(&mut self) -> bool {
        carry(&mut self.server, &mut self.client, self.now)
    }

    fn open(&mut self, path: &str) -> Result<Option<u32>, Status> {
        let metadata = Metadata::new();
        let head = RequestHead {
            scheme: "http",
            authority: "localhost",
            path,
            timeout: None,
            metadata: &metadata,
        };
        self.client.open(&head, 4 << 20, None)
    }

    /// Begins a call and sends its request.
    fn call(&mut self, path: &str, request: &[u8]) -> u32 {
        let stream = self.open(path).unwrap().unwrap();
        let message = encode(&request.to_vec()).unwrap();
        let mut sent = 0;
        while sent < message.len() {
            sent += self.client.send(stream, &message[sent..], true).unwrap();
            self.exchange();
        }
        stream
    }

    /// Answers the next request with the length of its message, in so many bytes.
    fn answer(&mut self) -> u32 {
        let (stream, _) = self.server.next_request().expect("a request");
        let message = self.server.next_message(stream).unwrap().unwrap().unwrap();
        let length = decode::<Vec<u8>>(&message, "request").unwrap().len();
        let response = encode(&vec![7_u8; length]).unwrap();
        self.server.answer(stream, Ok(response), Default::default());
        stream
    }

    fn response(&mut self, stream: u32) -> Result<usize, Status> {
        let message = self.client.only_message(stream).expect("the end")?;
        self.client.close_call(stream);
        Ok(decode::<Vec<u8>>(&message, "response").unwrap().len())
    }

    /// Lets the time pass, with a check of the server's timers in each second and without a byte.
    fn pass(&mut self, seconds: u64) -> Option<&'static str> {
        (0..seconds).find_map(|_| {
            self.now += Duration::from_secs(1);
            self.server.check_timers(self.now)
        })
    }
}

fn carry<A: Side, B: Side>(from: &mut Session<A>, to: &mut Session<B>, now: Instant) -> bool {
    from.fill_output();
    let bytes = mem::take(from.output());
    let mut taken = 0;
    while taken < bytes.len() && to.ended().is_none() {
        let more = to.receive(&bytes[taken..], now);
        assert!(more > 0, "all frames are complete");
        taken += more;
    }
    !bytes.is_empty()
}

#[test]
fn a_call_passes_both_sessions_and_leaves_nothing_behind() {
    let mut pair = Pair::new(Limits::default());
    let stream = pair.call(ONE, b"hello");
    assert_eq!(pair.server.requests(), 1);
    assert!(pair.memory.used() >= 5);
    assert!(pair.client.only_message(stream).is_none());
    pair.answer();
    pair.exchange();
    assert_eq!(pair.client.changes().calls, [stream]);
    assert_eq!(pair.response(stream), Ok(5));
    assert!(pair.client.is_idle() && pair.server.is_idle());
    assert_eq!(pair.memory.used(), 0);
}

#[test]
fn messages_beyond_the_windows_pass_as_the_peer_takes_them() {
    let mut pair = Pair::new(Limits::default());
    let stream = pair.call(ONE, &[1; 2 << 20]);
    pair.answer();
    pair.exchange();
    assert_eq!(pair.response(stream), Ok(2 << 20));
    assert_eq!(pair.memory.used(), 0);
}

#[test]
fn a_streaming_method_starts_before_its_requests_and_sees_their_end() {
    let mut pair = Pair::new(Limits::default());
    let stream = pair.open(MANY).unwrap().unwrap();
    pair.exchange();
    let (at_server, request) = pair.server.next_request().unwrap();
    assert_eq!((at_server, request.method.handler), (stream, 1));
    assert!(pair.server.next_message(stream).is_none());
    for end in [false, true] {
        let message = encode(&b"one".to_vec()).unwrap();
        pair.client.send(stream, &message, end).unwrap();
    }
    pair.exchange();
    assert_eq!(pair.server.changes().calls, [stream]);
    for _ in 0..2 {
        let message = pair.server.next_message(stream).unwrap().unwrap();
        assert_eq!(message.unwrap()[2..], *b"one");
    }
    assert!(matches!(pair.server.next_message(stream), Some(Ok(None))));
    pair.server
        .answer(stream, Ok(Bytes::default()), Default::default());
    pair.exchange();
    let error = pair.response(stream).unwrap_err();
    assert_eq!(error.code(), Code::Internal, "OK without a message");
}

#[test]
fn a_cancelled_call_is_known_to_its_handler() {
    let mut pair = Pair::new(Limits::default());
    let stream = pair.call(ONE, b"");
    pair.server.next_request().unwrap();
    pair.client.close_call(stream);
    pair.exchange();
    assert!(pair.server.is_cancelled(stream));
    assert_eq!(pair.server.changes().calls, [stream]);
    pair.server
        .answer(stream, Ok(Bytes::default()), Default::default());
    assert!(pair.server.is_idle());
}

#[test]
fn a_cancelled_request_needs_no_handler() {
    let mut pair = Pair::new(Limits::default());
    let stream = pair.call(ONE, b"");
    pair.client.close_call(stream);
    pair.exchange();
    assert!(pair.server.next_request().is_none() && pair.server.is_idle());
}

#[test]
fn a_call_beyond_the_limit_of_streams_waits_for_a_slot() {
    let mut pair = Pair::new(Limits {
        streams: 1,
        ..Limits::default()
    });
    let stream = pair.call(ONE, b"");
    assert_eq!(pair.open(ONE), Ok(None));
    pair.client.changes().clear();
    pair.answer();
    pair.exchange();
    assert!(pair.client.changes().slot);
    pair.response(stream).unwrap();
    assert!(pair.open(ONE).unwrap().is_some());
}

#[test]
fn requests_beyond_the_memory_are_refused_and_give_it_back() {
    let mut pair = Pair::new(Limits {
        buffered_bytes: 64 << 10,
        ..Limits::default()
    });
    let streams: Vec<u32> = (0..8).map(|_| pair.call(ONE, &[0; 10 << 10])).collect();
    let kept = pair.server.requests();
    assert!((1..8).contains(&kept), "{kept}");
    for &stream in &streams[kept..] {
        let error = pair.response(stream).unwrap_err();
        assert_eq!(error.code(), Code::ResourceExhausted);
    }
    for &stream in &streams[..kept] {
        pair.answer();
        pair.exchange();
        assert_eq!(pair.response(stream), Ok(10 << 10));
    }
    assert_eq!(pair.memory.used(), 0);
}

#[test]
fn a_response_that_nobody_reads_is_framed_no_further_and_ends() {
    let mut pair = Pair::new(Limits::default());
    let stream = pair.call(ONE, &[0; 1 << 20]);
    pair.answer();
    pair.server.fill_output();
    assert!(pair.server.output().len() <= OUTPUT + (1 << 10));
    assert!(pair.memory.used() >= 1 << 20);
    assert_eq!(pair.pass(14), None);
    assert!(!pair.server.is_idle());
    // It does not answer PINGs either, so it must not be taken for gone before.
    pair.server.last_received = pair.now + Duration::from_secs(60);
    assert_eq!(pair.pass(60), None);
    assert!(pair.server.is_idle());
    pair.server.discard_output();
    assert!(pair.memory.used() < 1 << 20);
    assert!(pair.client.only_message(stream).is_none());
}

#[test]
fn a_response_that_finds_no_room_in_the_output_counts_at_once() {
    let mut pair = Pair::new(Limits::default());
    let streams = [(); 3].map(|()| pair.call(ONE, &[0; 1 << 20]));
    let requests = streams.map(|_| pair.server.next_request().unwrap().0);
    for stream in requests {
        let before = pair.memory.used();
        pair.server.next_message(stream);
        let response = encode(&vec![7_u8; 3 << 19]).unwrap();
        pair.server.answer(stream, Ok(response), Default::default());
        assert!(pair.server.output().len() <= OUTPUT + (1 << 10));
        assert!(pair.memory.used() >= before + (1 << 18));
    }
}

#[test]
fn refused_calls_end_the_connection_unless_they_are_few() {
    let mut pair = Pair::new(Limits::default());
    let nope = |pair: &mut Pair| {
        let stream = pair.open("/t.T/Nope")?.expect("a slot");
        pair.client.send(stream, &[], true)?;
        pair.exchange();
        let refused = pair.response(stream).unwrap_err();
        assert_eq!(refused.code(), Code::Unimplemented);
        Ok::<_, Status>(())
    };
    // A tool that probes for services again and again.
    for _ in 0..60 {
        (0..10).for_each(|_| nope(&mut pair).unwrap());
        assert_eq!(pair.pass(1), None);
    }
    let mut refused = 0;
    let end = loop {
        match nope(&mut pair) {
            Ok(()) => refused += 1,
            Err(status) => break status,
        }
    };
    assert!((900..=2000).contains(&refused), "{refused}");
    assert!(end.message().contains("ENHANCE_YOUR_CALM"), "{end}");
    assert!(pair.server.ended().is_some());
}

#[test]
fn a_peer_that_takes_no_output_is_not_received() {
    let mut pair = Pair::new(Limits {
        resets: h2::Allowance {
            burst: u32::MAX,
            per_second: 1,
        },
        ..Limits::default()
    });
    for _ in 0..20_000 {
        pair.client.h2.ping();
    }
    let bytes = mem::take(pair.client.output());
    let mut taken = 0;
    while !pair.server.is_output_full() && pair.server.ended().is_none() {
        // 100 PINGs a second are allowed.
        pair.now += Duration::from_secs(1);
        taken += pair.server.receive(&bytes[taken..][..1700], pair.now);
    }
    assert!(pair.server.ended().is_none() && taken < bytes.len());
    assert_eq!(pair.server.receive(&bytes[taken..], pair.now), 0);
    pair.server.discard_output();
    assert!(pair.server.receive(&bytes[taken..], pair.now) > 0);
}

#[test]
fn timers_end_a_connection_that_does_not_start() {
    let now = Instant::now();
    let mut server = Pair::new(Limits::default()).server;
    server = Session::server(
        Arc::default(),
        Arc::default(),
        server.buffers.share.clone(),
        now + Duration::from_secs(20),
        now,
    );
    assert_eq!(server.check_timers(now + Duration::from_secs(19)), None);
    let why = server.check_timers(now + Duration::from_secs(20));
    assert_eq!(why, Some("HTTP/2 did not start in time"));
    assert!(server.ended().is_some());
    assert_eq!(server.check_timers(now + Duration::from_secs(21)), None);
}

#[test]
fn timers_end_an_idle_connection_but_none_with_a_call() {
    let mut pair = Pair::new(Limits {
        idle: Duration::from_secs(30),
        ..Limits::default()
    });
    let stream = pair.call(ONE, b"");
    for _ in 0..60 {
        assert_eq!(pair.pass(1), None);
        pair.exchange();
    }
    pair.answer();
    pair.exchange();
    pair.response(stream).unwrap();
    let mut seconds = 0;
    let why = loop {
        seconds += 1;
        match pair.pass(1) {
            Some(why) => break why,
            None => pair.exchange(),
        }
    };
    assert_eq!((why, seconds), ("it was idle", 31));
}

#[test]
fn timers_end_a_connection_that_answers_no_ping() {
    let mut pair = Pair::new(Limits::default());
    pair.call(ONE, b"");
    assert_eq!(pair.pass(34), None);
    assert_eq!(pair.pass(1), Some("a PING was not answered in time"));
}

#[test]
fn timers_refuse_a_request_that_does_not_end() {
    let mut pair = Pair::new(Limits::default());
    let stream = pair.open(ONE).unwrap().unwrap();
    pair.exchange();
    for _ in 0..60 {
        assert!(pair.client.only_message(stream).is_none());
        assert_eq!(pair.pass(1), None);
        pair.exchange();
    }
    let error = pair.response(stream).unwrap_err();
    assert_eq!(error.code(), Code::DeadlineExceeded);
    assert!(pair.server.is_idle());
}

#[test]
fn a_connection_at_its_maximum_age_drains() {
    let mut pair = Pair::new(Limits {
        max_age: Some(Duration::from_secs(5)),
        ..Limits::default()
    });
    let stream = pair.call(ONE, b"");
    assert_eq!(pair.pass(5), None);
    pair.exchange();
    let error = pair.open(ONE).unwrap_err();
    assert_eq!(
        (error.code(), error.is_unprocessed()),
        (Code::Unavailable, true)
    );
    assert!(!pair.server.is_drained());
    pair.answer();
    pair.exchange();
    assert_eq!(pair.response(stream), Ok(0));
    assert!(pair.server.is_drained());
}

#[test]
fn a_goaway_tells_which_calls_were_not_processed() {
    let mut pair = Pair::new(Limits::default());
    let known = pair.call(ONE, b"");
    pair.server.retire("new keys", pair.now);
    let unknown = pair.open(ONE).unwrap().unwrap();
    pair.carry_to_client();
    assert!(pair.client.only_message(known).is_none());
    let error = pair.response(unknown).unwrap_err();
    assert!(error.is_unprocessed());
    assert!(error.message().contains("new keys"), "{error}");
    assert_eq!(pair.pass(1), Some("its calls did not end in time"));
}

#[test]
fn mutated_bytes_of_a_client_never_panic_and_leave_no_memory_taken() {
    let mut pair = Pair::new(Limits::default());
    let mut bytes = mem::take(Session::client(&Limits::default(), pair.now).output());
    for path in [ONE, MANY, "/t.T/None"] {
        let stream = pair.open(path).unwrap().unwrap();
        let message = encode(&vec![1_u8; 100]).unwrap();
        pair.client.send(stream, &message, path == ONE).unwrap();
        bytes.append(pair.client.output());
    }
    for hostile in support::mutation::mutations(&bytes, 3000) {
        let (limits, share) = (Arc::<Limits>::default(), pair.server.buffers.share.clone());
        let methods = pair.methods.clone();
        let mut server = Session::server(limits, methods, share, pair.now, pair.now);
        let mut taken = 0;
        for end in (0..hostile.len()).step_by(50).chain([hostile.len()]) {
            taken += server.receive(&hostile[taken..end.max(taken)], pair.now);
        }
        while let Some((stream, _)) = server.next_request() {
            while let Some(Ok(Some(message))) = server.next_message(stream) {
                assert!(message.len() <= Limits::default().message_bytes);
            }
            server.answer(stream, Ok(Bytes::default()), Default::default());
        }
        server.fill_output();
        assert!(server.output().len() < 64 << 10);
    }
    drop(pair.server);
    assert_eq!(pair.memory.used(), 0);
}
