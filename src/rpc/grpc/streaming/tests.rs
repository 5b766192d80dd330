//! Tests of our client against our server. `tests/grpc_interop.rs` has other implementations.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use transport::{Accept, Transport};

use crate::grpc::*;
use crate::h2;

#[derive(Clone, PartialEq, prost::Message)]
struct Blob {
    #[prost(bytes = "vec", tag = "1")]
    data: Vec<u8>,
    #[prost(uint32, tag = "2")]
    count: u32,
}

fn blob(data: &[u8], count: u32) -> Blob {
    Blob {
        data: data.to_vec(),
        count,
    }
}

/// A server, the number of its handlers that have begun to wait for something, and the
/// number of those that saw it.
struct TestServer {
    server: Server,
    begun: Arc<AtomicUsize>,
    cancelled: Arc<AtomicUsize>,
}

impl TestServer {
    fn begun(&self) -> usize {
        self.begun.load(Ordering::SeqCst)
    }

    fn cancelled(&self) -> usize {
        self.cancelled.load(Ordering::SeqCst)
    }
}

impl std::ops::Deref for TestServer {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.server
    }
}

fn router(begun: &Arc<AtomicUsize>, cancelled: &Arc<AtomicUsize>) -> Router {
    let (begun, blocked, woken) = (begun.clone(), begun.clone(), cancelled.clone());
    let asleep = begun.clone();
    let (until_cancelled, endless) = (cancelled.clone(), cancelled.clone());
    Router::new()
        .unary("/t.T/Echo", |_: &Call, request: Blob| Ok(request))
        .unary("/t.T/Sleep", move |_: &Call, request: Blob| {
            asleep.fetch_add(1, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(request.count.into()));
            Ok(request)
        })
        .unary("/t.T/Fail", |_: &Call, _: Blob| -> Result<Blob, _> {
            Err(Status::new(Code::NotFound, "schlüssel 100 %\n").with_details(vec![1, 2, 3]))
        })
        .unary("/t.T/Panic", |_: &Call, _: Blob| -> Result<Blob, _> {
            panic!("on purpose")
        })
        .unary("/t.T/UntilCancelled", move |call: &Call, request: Blob| {
            begun.fetch_add(1, Ordering::SeqCst);
            while !call.is_cancelled() {
                thread::sleep(Duration::from_millis(1));
            }
            until_cancelled.fetch_add(1, Ordering::SeqCst);
            Ok(request)
        })
        .unary("/t.T/Metadata", |call: &Call, request: Blob| {
            let mut headers = Metadata::new();
            headers.insert("x-echo", call.metadata().get("x-ascii").unwrap_or("none"))?;
            call.set_headers(headers);
            let mut trailers = Metadata::new();
            trailers.insert("x-trailing-bin", "q6ur")?;
            call.set_trailers(trailers);
            assert_eq!(call.metadata().get("x-data-bin"), Some("AP8"));
            assert!(call.deadline().is_some() && call.peer().is_some());
            Ok(request)
        })
        .server_streaming(
            "/t.T/Many",
            |_: &Call, request: Blob, responses: &mut Sender<Blob>| {
                (0..request.count).try_for_each(|count| responses.send(&blob(&request.data, count)))
            },
        )
        .server_streaming(
            "/t.T/Endless",
            move |_: &Call, request: Blob, responses: &mut Sender<Blob>| {
                loop {
                    if let Err(status) = responses.send(&request) {
                        endless.fetch_add(1, Ordering::SeqCst);
                        return Err(status);
                    }
                }
            },
        )
        .client_streaming("/t.T/Sum", |_: &Call, requests: &mut Receiver<Blob>| {
            requests
                .try_fold(0, |sum, request| Ok(sum + request?.count))
                .map(|sum| blob(b"", sum))
        })
        .client_streaming(
            "/t.T/UntilWoken",
            move |call: &Call, requests: &mut Receiver<Blob>| {
                blocked.fetch_add(1, Ordering::SeqCst);
                assert!(matches!(requests.next(), Some(Err(_))) && call.is_cancelled());
                woken.fetch_add(1, Ordering::SeqCst);
                Ok(blob(b"", 0))
            },
        )
        .client_streaming(
            "/t.T/HangAtFirst",
            |call: &Call, requests: &mut Receiver<Blob>| {
                let first = requests.next();
                while !call.is_cancelled() {
                    thread::sleep(Duration::from_millis(5));
                }
                first.unwrap_or(Ok(blob(b"", 0)))
            },
        )
        .streaming(
            "/t.T/PingPong",
            |_: &Call, requests: &mut Receiver<Blob>, responses: &mut Sender<Blob>| {
                for request in requests {
                    responses.send(&request?)?;
                }
                Ok(())
            },
        )
}

fn start(limits: Limits) -> TestServer {
    let (begun, cancelled) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let accept: Arc<dyn Accept> =
        Arc::new(|socket: TcpStream, _: Instant| transport::plain::transport(socket));
    let server =
        Server::start("test", listener, accept, router(&begun, &cancelled), limits).unwrap();
    TestServer {
        server,
        begun,
        cancelled,
    }
}

fn connect(server: &Server) -> Channel {
    let socket = TcpStream::connect(server.local_addr()).unwrap();
    Channel::new(transport::plain::transport(socket).unwrap(), "localhost").unwrap()
}

fn within(timeout: Duration) -> CallOptions {
    CallOptions {
        timeout: Some(timeout),
        ..CallOptions::default()
    }
}

fn soon() -> CallOptions {
    within(Duration::from_secs(20))
}

fn echo(channel: &Channel, request: &Blob) -> Result<Blob, Status> {
    channel.unary("/t.T/Echo", request, &soon())
}

/// Returns the number of connections that hold a thread or may get one.
fn attended(server: &Server) -> usize {
    server.statistics()().unwrap().attended
}

/// Waits until `what` returns true, which must happen soon.
fn eventually(what: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !what() {
        assert!(Instant::now() < deadline, "it did not happen in time");
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn unary_calls_are_answered() {
    let server = start(Limits::default());
    let channel = connect(&server);
    for count in 0..200 {
        assert_eq!(
            echo(&channel, &blob(b"abc", count)).unwrap(),
            blob(b"abc", count)
        );
    }
    assert_eq!(echo(&channel, &Blob::default()).unwrap(), Blob::default());
}

#[test]
fn large_messages_pass_both_windows_both_ways() {
    let server = start(Limits {
        message_bytes: 20 << 20,
        buffered_bytes: 64 << 20,
        ..Limits::default()
    });
    let channel = connect(&server).with_message_bytes(20 << 20);
    let large = blob(&vec![0xa5; 16 << 20], 1);
    for _ in 0..2 {
        assert!(echo(&channel, &large).unwrap() == large);
    }
}

#[test]
fn messages_above_the_limit_are_refused_on_either_side() {
    let server = start(Limits::default());
    let channel = connect(&server);
    let large = blob(&vec![1; 5 << 20], 0);
    assert_eq!(
        echo(&channel, &large).unwrap_err().code(),
        Code::ResourceExhausted
    );
    let small = connect(&server).with_message_bytes(1000);
    assert_eq!(
        echo(&small, &blob(&[1; 1001], 0)).unwrap_err().code(),
        Code::ResourceExhausted
    );
    assert_eq!(
        echo(&channel, &blob(b"", 1)).unwrap().count,
        1,
        "the connection continues"
    );
}

#[test]
fn streams_of_responses_arrive_in_order() {
    let server = start(Limits::default());
    let channel = connect(&server);
    for (size, count) in [(0, 0), (10, 1000), (100_000, 100)] {
        let request = blob(&vec![3; size], count);
        let responses = channel
            .server_streaming("/t.T/Many", &request, &soon())
            .unwrap();
        let counts: Vec<u32> = responses
            .map(|response: Result<Blob, _>| response.unwrap().count)
            .collect();
        assert_eq!(counts, (0..count).collect::<Vec<_>>());
    }
}

#[test]
fn a_slow_reader_blocks_its_sender_and_no_other_call() {
    let server = start(Limits::default());
    let channel = connect(&server);
    let endless = |request: &Blob| {
        channel
            .server_streaming("/t.T/Endless", request, &soon())
            .unwrap()
    };
    let mut streams: Vec<Responses<Blob>> =
        (0..10).map(|_| endless(&blob(&[9; 50_000], 7))).collect();
    for _ in 0..3 {
        thread::sleep(Duration::from_millis(30));
        assert_eq!(echo(&channel, &blob(b"", 1)).unwrap().count, 1);
        streams
            .iter_mut()
            .for_each(|stream| assert_eq!(stream.next().unwrap().unwrap().count, 7));
    }
    drop(streams);
    eventually(|| server.cancelled() == 10);
    assert_eq!(echo(&channel, &blob(b"", 2)).unwrap().count, 2);
}

#[test]
fn requests_and_responses_stream_together() {
    let server = start(Limits::default());
    let channel = connect(&server);
    let (mut requests, mut responses) = channel
        .streaming::<Blob, Blob>("/t.T/PingPong", &soon())
        .unwrap();
    for size in [0, 10, 300_000, 1] {
        requests.send(&blob(&vec![1; size], size as u32)).unwrap();
        assert_eq!(responses.next().unwrap().unwrap().count, size as u32);
        // A unary call succeeds at the same time, although the thread of the streaming handler
        // reads.
        assert_eq!(echo(&channel, &blob(b"", 5)).unwrap().count, 5);
    }
    requests.finish().unwrap();
    assert!(responses.next().is_none());
}

#[test]
fn requests_stream_to_one_response() {
    let server = start(Limits::default());
    let channel = connect(&server);
    for count in [0, 1, 100] {
        let (mut requests, mut response) = channel
            .streaming::<Blob, Blob>("/t.T/Sum", &soon())
            .unwrap();
        (0..count).for_each(|count| requests.send(&blob(&[1; 1000], count)).unwrap());
        requests.finish().unwrap();
        assert_eq!(response.one().unwrap().count, (0..count).sum::<u32>());
    }
    let (requests, mut none) = channel
        .streaming::<Blob, Blob>("/t.T/PingPong", &soon())
        .unwrap();
    requests.finish().unwrap();
    assert_eq!(
        none.one().unwrap_err().code(),
        Code::Internal,
        "no response"
    );
}

#[test]
fn unfinished_requests_cancel_the_call_and_wake_its_handler() {
    let server = start(Limits::default());
    let channel = connect(&server);
    let (requests, mut response) = channel
        .streaming::<Blob, Blob>("/t.T/UntilWoken", &soon())
        .unwrap();
    eventually(|| server.begun() == 1);
    drop(requests);
    assert_eq!(response.one().unwrap_err().code(), Code::Cancelled);
    eventually(|| server.cancelled() == 1);
    let short = within(Duration::from_millis(1000));
    let (_requests, mut response) = channel
        .streaming::<Blob, Blob>("/t.T/UntilWoken", &short)
        .unwrap();
    assert_eq!(response.one().unwrap_err().code(), Code::DeadlineExceeded);
    eventually(|| server.cancelled() == 2);
    let (mut requests, mut responses) = channel
        .streaming::<Blob, Blob>("/t.T/PingPong", &soon())
        .unwrap();
    requests.send(&blob(b"", 1)).unwrap();
    assert_eq!(responses.next().unwrap().unwrap().count, 1);
    drop(requests);
    assert_eq!(
        responses.next().unwrap().unwrap_err().code(),
        Code::Cancelled
    );
}

#[test]
fn errors_carry_code_message_and_details() {
    let server = start(Limits::default());
    let channel = connect(&server);
    let status = channel
        .unary::<_, Blob>("/t.T/Fail", &Blob::default(), &soon())
        .unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (Code::NotFound, "schlüssel 100 %\n")
    );
    assert_eq!(status.details(), [1, 2, 3]);
    for (path, message) in [
        ("/t.T/Nope", "unknown method /t.T/Nope"),
        ("/x.X/Echo", "unknown service /x.X/Echo"),
    ] {
        let status = channel
            .unary::<_, Blob>(path, &Blob::default(), &soon())
            .unwrap_err();
        assert_eq!(
            (status.code(), status.message()),
            (Code::Unimplemented, message)
        );
    }
}

#[test]
fn a_panicking_handler_answers_internal_and_the_server_lives() {
    let server = start(Limits::default());
    let channel = connect(&server);
    for _ in 0..3 {
        let status = channel
            .unary::<_, Blob>("/t.T/Panic", &Blob::default(), &soon())
            .unwrap_err();
        assert_eq!(status.code(), Code::Internal);
    }
    assert_eq!(echo(&channel, &blob(b"", 1)).unwrap().count, 1);
}

#[test]
fn metadata_reaches_the_handler_and_comes_back() {
    let server = start(Limits::default());
    let channel = connect(&server);
    let mut options = soon();
    options.metadata.insert("x-ascii", "value").unwrap();
    options.metadata.insert("x-data-bin", "AP8").unwrap();
    let mut responses = channel
        .server_streaming::<_, Blob>("/t.T/Metadata", &blob(b"", 4), &options)
        .unwrap();
    assert_eq!(
        responses.headers().unwrap().unwrap().get("x-echo"),
        Some("value")
    );
    assert_eq!(responses.next().unwrap().unwrap().count, 4);
    assert!(responses.next().is_none());
    assert_eq!(responses.trailers().get("x-trailing-bin"), Some("q6ur"));
}

#[test]
fn a_deadline_ends_the_call_on_both_sides() {
    let server = start(Limits::default());
    let channel = connect(&server);
    let started = Instant::now();
    // Long enough for the handler to begin on a busy machine.
    let options = within(Duration::from_millis(1000));
    let status = channel
        .unary::<_, Blob>("/t.T/UntilCancelled", &Blob::default(), &options)
        .unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded);
    support::promptly::assert_no_wait(started, Duration::from_secs(1));
    eventually(|| server.cancelled() == 1);
}

#[test]
fn a_dropped_call_and_a_lost_peer_cancel_the_handler() {
    let server = start(Limits::default());
    let channel = connect(&server);
    let call = channel
        .server_streaming::<_, Blob>("/t.T/UntilCancelled", &Blob::default(), &soon())
        .unwrap();
    eventually(|| server.begun() == 1);
    drop(call);
    eventually(|| server.cancelled() == 1);
    let _call = channel
        .server_streaming::<_, Blob>("/t.T/UntilCancelled", &Blob::default(), &soon())
        .unwrap();
    eventually(|| server.begun() == 2);
    channel.close();
    eventually(|| server.cancelled() == 2);
}

#[test]
fn a_slow_handler_delays_no_other_call() {
    let server = start(Limits::default());
    let channel = connect(&server);
    let call = || {
        channel
            .server_streaming::<_, Blob>("/t.T/UntilCancelled", &Blob::default(), &soon())
            .unwrap()
    };
    let _endless = [(); 8].map(|()| call());
    eventually(|| server.begun() == 8);
    for _ in 0..20 {
        echo(&channel, &blob(b"", 1)).unwrap();
    }
    assert_eq!(server.cancelled(), 0);
}

/// The thread of the handler reads while it waits for a request. When it has one, another thread
/// must read.
#[test]
fn a_handler_that_has_its_request_delays_no_other_call() {
    let server = start(Limits::default());
    for _ in 0..6 {
        let channel = connect(&server);
        let (mut requests, _response) = channel
            .streaming::<Blob, Blob>("/t.T/HangAtFirst", &soon())
            .unwrap();
        // Long enough for the server to see that the connection has a reader.
        thread::sleep(Duration::from_millis(150));
        requests.send(&blob(b"", 1)).unwrap();
        thread::sleep(Duration::from_millis(20));
        echo(&channel, &blob(b"", 1)).unwrap();
    }
}

#[test]
fn many_threads_share_a_channel() {
    let server = start(Limits {
        streams: 10,
        ..Limits::default()
    });
    let channel = connect(&server);
    thread::scope(|scope| {
        for thread in 0..32 {
            let channel = &channel;
            scope.spawn(move || {
                for count in 0..100 {
                    let request = blob(&vec![1; 10 * count], thread * 1000 + count as u32);
                    // The server's limit of streams may be unknown at first.
                    match echo(channel, &request) {
                        Ok(response) => assert_eq!(response, request),
                        Err(status) => assert_eq!(status.code(), Code::Unavailable, "{status}"),
                    }
                }
            });
        }
    });
}

#[test]
fn closing_a_channel_wakes_a_blocked_call() {
    let server = start(Limits::default());
    let channel = connect(&server);
    let (send, receive) = mpsc::channel();
    let other = channel.clone();
    let caller = thread::spawn(move || {
        send.send(()).unwrap();
        other.unary::<_, Blob>("/t.T/UntilCancelled", &Blob::default(), &soon())
    });
    receive.recv().unwrap();
    thread::sleep(Duration::from_millis(30));
    channel.close();
    let status = caller.join().unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(
        echo(&channel, &Blob::default()).unwrap_err().code(),
        Code::Unavailable
    );
}

#[test]
fn stop_lets_running_calls_end_and_takes_no_new_ones() {
    let server = start(Limits::default());
    let channel = connect(&server);
    let idle = connect(&server);
    echo(&idle, &Blob::default()).unwrap();
    let stopped = AtomicBool::new(false);
    thread::scope(|scope| {
        let call =
            scope.spawn(|| channel.unary::<_, Blob>("/t.T/Sleep", &blob(b"", 3000), &soon()));
        eventually(|| server.begun() == 1);
        scope.spawn(|| {
            server.stop(Duration::from_secs(3600));
            stopped.store(true, Ordering::SeqCst);
        });
        eventually(|| match echo(&channel, &Blob::default()) {
            Ok(_) => false,
            Err(status) => status.code() == Code::Unavailable,
        });
        assert!(!stopped.load(Ordering::SeqCst));
        assert_eq!(call.join().unwrap().unwrap().count, 3000);
        eventually(|| stopped.load(Ordering::SeqCst));
    });
    assert!(TcpStream::connect(server.local_addr()).is_err());
    server.stop(Duration::ZERO);
}

/// One thread sends the GOAWAY of a stopping server while the handler answers in another.
#[test]
fn stop_never_cuts_off_an_answer() {
    struct Slow(TcpStream);
    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            thread::sleep(Duration::from_millis(20));
            self.0.write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let slow = |socket: TcpStream, _: Instant| {
        let writer = Box::new(Slow(socket.try_clone()?));
        transport::plain::transport(socket).map(|transport| Transport {
            writer,
            ..transport
        })
    };
    thread::scope(|scope| {
        for answered_after in 0..20 {
            scope.spawn(move || {
                let (begun, cancelled) = <(Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
                let listener = TcpListener::bind("127.0.0.1:0").unwrap();
                let router = router(&begun, &cancelled);
                let server =
                    Server::start("test", listener, Arc::new(slow), router, Limits::default())
                        .unwrap();
                let channel = connect(&server);
                echo(&channel, &blob(b"", 0)).unwrap();
                let call = thread::spawn(move || {
                    let request = blob(b"", 30 + 4 * answered_after);
                    channel.unary::<_, Blob>("/t.T/Sleep", &request, &soon())
                });
                eventually(|| begun.load(Ordering::SeqCst) == 1);
                server.stop(Duration::from_secs(10));
                assert_eq!(
                    call.join().unwrap().map(|answer| answer.count),
                    Ok(30 + 4 * answered_after)
                );
            });
        }
    });
}

#[test]
fn stop_without_grace_ends_running_calls() {
    let server = start(Limits::default());
    let channel = connect(&server);
    let mut call = channel
        .server_streaming::<_, Blob>("/t.T/UntilCancelled", &Blob::default(), &soon())
        .unwrap();
    eventually(|| server.begun() == 1);
    let _half_open = TcpStream::connect(server.local_addr()).unwrap();
    let started = Instant::now();
    server.stop(Duration::ZERO);
    support::promptly::assert_no_wait(started, Duration::from_millis(400));
    assert_eq!(call.next().unwrap().unwrap_err().code(), Code::Unavailable);
    assert!(server.cancelled() == 1);
}

#[test]
fn a_connection_at_its_maximum_age_refuses_new_calls_and_lets_running_ones_end() {
    let (age, grace) = (Duration::from_secs(2), Duration::from_secs(8));
    let server = start(Limits {
        max_age: Some(age),
        max_age_grace: grace,
        ..Limits::default()
    });
    let channel = connect(&server);
    thread::scope(|scope| {
        let begun = Instant::now();
        let answered =
            scope.spawn(|| channel.unary::<_, Blob>("/t.T/Sleep", &blob(b"", 6000), &soon()));
        let endless = scope
            .spawn(|| channel.unary::<_, Blob>("/t.T/UntilCancelled", &Blob::default(), &soon()));
        let refused = loop {
            match echo(&channel, &Blob::default()) {
                Ok(_) => assert!(begun.elapsed() < 20 * age, "the connection does not age"),
                Err(status) => break status,
            }
            thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(refused.code(), Code::Unavailable);
        assert!(begun.elapsed() >= age && !answered.is_finished() && !endless.is_finished());
        echo(&connect(&server), &Blob::default()).unwrap();
        assert_eq!(
            answered.join().unwrap().map(|answer| answer.count),
            Ok(6000)
        );
        assert_eq!(
            endless.join().unwrap().unwrap_err().code(),
            Code::Unavailable
        );
        assert!(begun.elapsed() >= grace);
        eventually(|| server.cancelled() == 1);
    });
}

#[test]
fn close_connections_lets_running_calls_end_and_accepts_new_connections() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let slow = Arc::new(AtomicBool::new(false));
    let is_slow = slow.clone();
    let accept = move |socket: TcpStream, _: Instant| {
        if is_slow.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_secs(3));
        }
        transport::plain::transport(socket)
    };
    let (begun, cancelled) = <(Arc<AtomicUsize>, Arc<AtomicUsize>)>::default();
    let server = Server::start(
        "test",
        listener,
        Arc::new(accept),
        router(&begun, &cancelled),
        Limits::default(),
    )
    .unwrap();
    let (idle, busy) = (connect(&server), connect(&server));
    for channel in [&idle, &busy] {
        echo(channel, &Blob::default()).unwrap();
    }
    slow.store(true, Ordering::SeqCst);
    thread::scope(|scope| {
        let running =
            scope.spawn(|| busy.unary::<_, Blob>("/t.T/Sleep", &blob(b"", 3000), &soon()));
        let in_handshake = connect(&server);
        eventually(|| begun.load(Ordering::SeqCst) == 1);
        thread::sleep(Duration::from_secs(1));
        server.close_connections("the policy has changed");
        slow.store(false, Ordering::SeqCst);
        assert_eq!(running.join().unwrap().map(|answer| answer.count), Ok(3000));
        for closed in [&idle, &busy, &in_handshake] {
            assert_eq!(
                echo(closed, &Blob::default()).unwrap_err().code(),
                Code::Unavailable
            );
        }
        echo(&connect(&server), &Blob::default()).unwrap();
    });
}

// ---- answers as they are on the wire ----

/// Sends a request without our client and returns the answer: the fields of its headers, and of its
/// trailers if there are any.
fn answers(server: &Server, fields: &[(&str, &str)], body: &[u8]) -> Vec<Vec<(String, String)>> {
    let (mut socket, mut client) = by_hand(server);
    socket
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let fields = fields
        .iter()
        .map(|(name, value)| (name.as_bytes(), value.as_bytes(), h2::Indexing::No));
    let stream = client.open(fields, false).unwrap();
    client.send_data(stream, body, true).unwrap();
    socket.write_all(&std::mem::take(client.output())).unwrap();
    let (mut received, mut lists) = (Vec::new(), Vec::new());
    loop {
        let mut piece = [0; 4096];
        let length = socket.read(&mut piece).unwrap();
        assert!(length > 0, "no answer");
        received.extend_from_slice(&piece[..length]);
        let mut ended = false;
        while let (taken @ 1.., event) = client.receive(&received, Instant::now()).unwrap() {
            let has_fields = matches!(
                event,
                Some(h2::Event::Headers { .. } | h2::Event::Trailers { .. })
            );
            ended |= matches!(
                event,
                Some(
                    h2::Event::Headers { end: true, .. }
                        | h2::Event::Data { end: true, .. }
                        | h2::Event::Trailers { .. }
                )
            );
            received.drain(..taken);
            if has_fields {
                let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
                lists.push(
                    client
                        .headers()
                        .iter()
                        .map(|(name, value)| (text(name), text(value)))
                        .collect(),
                );
            }
        }
        if ended {
            return lists;
        }
    }
}

/// Returns the fields of a call with `more`.
fn call_with<'a>(path: &'a str, more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let fixed = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        ("content-type", "application/grpc"),
    ];
    [&fixed, more].concat()
}

fn field<'a>(list: &'a [(String, String)], name: &str) -> Option<&'a str> {
    list.iter()
        .find(|(field, _)| field == name)
        .map(|(_, value)| value.as_str())
}

#[test]
fn an_error_without_a_response_is_trailers_only_with_an_encoded_message_and_details() {
    let server = start(Limits::default());
    let answer = answers(&server, &call_with("/t.T/Fail", &[]), &[0; 5]);
    assert_eq!(answer.len(), 1, "one block of fields");
    assert_eq!(field(&answer[0], ":status"), Some("200"));
    assert_eq!(field(&answer[0], "content-type"), Some("application/grpc"));
    assert_eq!(field(&answer[0], "grpc-status"), Some("5"));
    assert_eq!(
        field(&answer[0], "grpc-message"),
        Some("schl%C3%BCssel 100 %25%0A")
    );
    assert_eq!(field(&answer[0], "grpc-status-details-bin"), Some("AQID"));
    let answer = answers(&server, &call_with("/t.T/Echo", &[]), &[0; 5]);
    assert_eq!(answer.len(), 2, "headers and trailers");
    assert_eq!(
        (
            field(&answer[0], ":status"),
            field(&answer[0], "grpc-status")
        ),
        (Some("200"), None)
    );
    assert_eq!(answer[1], [("grpc-status".to_owned(), "0".to_owned())]);
}

#[test]
fn a_refusal_of_compression_names_the_accepted_encodings() {
    let server = start(Limits::default());
    let answer = |encoding: &[(&str, &str)], body: &[u8]| {
        let answer = answers(&server, &call_with("/t.T/Echo", encoding), body);
        let last = answer.last().unwrap();
        (
            field(last, "grpc-status").map(str::to_owned),
            field(last, "grpc-accept-encoding").map(str::to_owned),
        )
    };
    let (gzip, identity) = ([("grpc-encoding", "gzip")], [("grpc-encoding", "identity")]);
    let unimplemented = (Some("12".to_owned()), Some("identity".to_owned()));
    assert_eq!(answer(&gzip, &[1, 0, 0, 0, 1, 0]), unimplemented);
    assert_eq!(
        answer(&gzip, &[0; 5]).0.unwrap(),
        "0",
        "a message without compression is still allowed"
    );
    assert_eq!(answer(&identity, &[0; 5]).0.unwrap(), "0");
    assert_eq!(
        answer(&identity, &[1, 0, 0, 0, 1, 0]).0.unwrap(),
        "13",
        "the flag without a compression"
    );
    assert_eq!(answer(&[], &[1, 0, 0, 0, 1, 0]).0.unwrap(), "13");
}

#[test]
fn requests_that_are_not_grpc_get_an_http_status() {
    let server = start(Limits::default());
    let status = |method: &str, kind: &str| {
        let fields = [
            (":method", method),
            (":scheme", "http"),
            (":path", "/t.T/Echo"),
            ("content-type", kind),
        ];
        let answer = answers(&server, &fields, b"x");
        assert_eq!(field(&answer[0], "grpc-status"), None);
        field(&answer[0], ":status").unwrap().to_owned()
    };
    assert_eq!(status("POST", "application/json"), "415");
    assert_eq!(status("POST", "application/grpc-web"), "415");
    assert_eq!(status("GET", "application/grpc"), "405");
    assert_eq!(status("HEAD", "text/html"), "405");
    let get = [(":method", "GET"), (":scheme", "http"), (":path", "/")];
    let answer = answers(&server, &get, b"");
    assert_eq!(
        (answer.len(), field(&answer[0], "allow")),
        (1, Some("POST"))
    );
}

#[test]
fn the_answer_to_an_unknown_path_is_not_larger_than_the_path() {
    let server = start(Limits::default());
    for path in [
        "/\u{e9}".repeat(67),
        "/%".repeat(100),
        format!("/{}", "x".repeat(199)),
    ] {
        let answer = answers(&server, &call_with(&path, &[]), &[0; 5]);
        let size = answer[0]
            .iter()
            .map(|(name, value)| name.len() + value.len() + 2)
            .sum::<usize>();
        assert!(size < 340, "{size} bytes of headers: {answer:?}");
    }
}

#[test]
fn malformed_requests_are_answered_with_a_status() {
    let server = start(Limits::default());
    let status = |path: &str, more: &[(&str, &str)], body: &[u8]| {
        field(
            answers(&server, &call_with(path, more), body)
                .last()
                .unwrap(),
            "grpc-status",
        )
        .unwrap()
        .to_owned()
    };
    assert_eq!(
        status("/t.T/Echo", &[("grpc-timeout", "soon")], &[0; 5]),
        "13"
    );
    assert_eq!(status("/t.T/Echo", &[("grpc-timeout", "0n")], &[0; 5]), "4");
    assert_eq!(status("/t.T/Echo", &[], &[]), "13", "no message");
    assert_eq!(status("/t.T/Echo", &[], &[0; 4]), "13", "half a prefix");
    assert_eq!(status("/t.T/Echo", &[], &[0; 10]), "13", "two messages");
    assert_eq!(
        status("/t.T/Echo", &[], &[0, 0, 0, 0, 1, 0xff]),
        "13",
        "no Blob"
    );
    assert_eq!(
        status("/t.T/Echo", &[], &[0, 0x7f, 0, 0, 0]),
        "8",
        "too large, by its announcement alone"
    );
    assert_eq!(status("/t.T/Nope", &[], &[0; 5]), "12");
    assert_eq!(status("nonsense", &[], &[0; 5]), "12");
}

// ---- peers that misbehave ----

/// Waits until the server has closed `socket`, and returns what it sent before.
fn until_closed(mut socket: TcpStream) -> Vec<u8> {
    let within = Duration::from_secs(20);
    socket.set_read_timeout(Some(within)).unwrap();
    let (mut said, started) = (Vec::new(), Instant::now());
    let result = socket.read_to_end(&mut said);
    assert!(
        started.elapsed() < within,
        "the connection stayed open: {result:?}"
    );
    said
}

/// Creates a client from our HTTP/2 state machine, without gRPC.
fn by_hand(server: &Server) -> (TcpStream, h2::Connection) {
    let mut client = h2::Connection::client(h2::H2Limits::default());
    let mut socket = TcpStream::connect(server.local_addr()).unwrap();
    let mut received = Vec::new();
    while !client.is_established() {
        socket.write_all(&std::mem::take(client.output())).unwrap();
        let mut piece = [0; 256];
        let length = socket.read(&mut piece).unwrap();
        received.extend_from_slice(&piece[..length]);
        while let (taken @ 1.., _) = client.receive(&received, Instant::now()).unwrap() {
            received.drain(..taken);
        }
    }
    socket.write_all(&std::mem::take(client.output())).unwrap();
    (socket, client)
}

fn open(client: &mut h2::Connection, path: &'static str) -> u32 {
    let fields: [(&[u8], &[u8], h2::Indexing); 4] = [
        (b":method", b"POST", h2::Indexing::Yes),
        (b":scheme", b"http", h2::Indexing::Yes),
        (b":path", path.as_bytes(), h2::Indexing::Yes),
        (b"content-type", b"application/grpc", h2::Indexing::Yes),
    ];
    client.open(fields.into_iter(), false).unwrap()
}

fn hurried() -> Limits {
    Limits {
        handshake: Duration::from_millis(500),
        idle: Duration::from_millis(1500),
        keepalive: Duration::from_millis(1000),
        keepalive_timeout: Duration::from_millis(1000),
        stall: Duration::from_millis(1000),
        ..Limits::default()
    }
}

#[test]
fn garbage_and_half_open_connections_end_without_harm() {
    let server = start(hurried());
    let channel = connect(&server);
    let mut garbage = TcpStream::connect(server.local_addr()).unwrap();
    garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    until_closed(garbage);
    // One client sends nothing; another sends only the preface.
    let silent = TcpStream::connect(server.local_addr()).unwrap();
    let mut begun = TcpStream::connect(server.local_addr()).unwrap();
    begun
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        .unwrap();
    assert_eq!(echo(&channel, &blob(b"", 1)).unwrap().count, 1);
    until_closed(silent);
    until_closed(begun);
}

#[test]
fn a_client_that_never_acknowledges_our_settings_is_dropped() {
    let server = start(hurried());
    let mut socket = TcpStream::connect(server.local_addr()).unwrap();
    // The client sends its preface, SETTINGS and a request, which is answered.
    let mut client = h2::Connection::client(h2::H2Limits::default());
    open(&mut client, "/t.T/None");
    socket.write_all(client.output()).unwrap();
    let said = until_closed(socket);
    // The debug data of GOAWAY.
    assert!(String::from_utf8_lossy(&said).ends_with("\0\0\0\u{4}HTTP/2 did not start in time"));
}

#[test]
fn a_peer_that_breaks_a_rule_while_it_sends_much_still_gets_the_reason() {
    let server = start(Limits::default());
    let (mut socket, _) = by_hand(&server);
    // PING on a stream, and more bytes than any of our buffers holds.
    let breach = [
        b"\0\0\x08\x06\0\0\0\0\x01........".as_slice(),
        &[0; 256 << 10],
    ]
    .concat();
    socket.write_all(&breach).unwrap();
    thread::sleep(Duration::from_millis(100));
    socket
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    let mut said = Vec::new();
    socket
        .read_to_end(&mut said)
        .expect("no reset of the connection");
    assert!(said.ends_with("a connection frame on a stream (§6)".as_bytes()));
}

#[test]
fn metadata_beyond_the_peers_limit_fails_only_its_call() {
    let server = start(Limits {
        header_bytes: 500,
        ..Limits::default()
    });
    let channel = connect(&server);
    assert!(echo(&channel, &blob(b"", 1)).is_ok());
    let mut metadata = Metadata::new();
    metadata.insert("x-ascii", &"a".repeat(500)).unwrap();
    let options = CallOptions { metadata, ..soon() };
    let result: Result<Blob, _> = channel.unary("/t.T/Echo", &blob(b"", 1), &options);
    assert_eq!(result.unwrap_err().code(), Code::ResourceExhausted);
    assert!(echo(&channel, &blob(b"", 1)).is_ok());

    // The other direction: the handler's answer exceeds the limit of this client.
    let mut socket = TcpStream::connect(server.local_addr()).unwrap();
    let mut client = h2::Connection::client(h2::H2Limits {
        header_list: 150,
        ..h2::H2Limits::default()
    });
    let stream = open(&mut client, "/t.T/Fail");
    client.send_data(stream, &[0; 5], true).unwrap();
    socket.write_all(&std::mem::take(client.output())).unwrap();
    socket
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    let mut buffer = Vec::new();
    let status = loop {
        let mut piece = [0; 4096];
        let length = socket.read(&mut piece).unwrap();
        buffer.extend_from_slice(&piece[..length]);
        let mut ended = false;
        while let (taken @ 1.., event) = client.receive(&buffer, Instant::now()).unwrap() {
            ended |= matches!(event, Some(h2::Event::Headers { end: true, .. }));
            buffer.drain(..taken);
        }
        if ended {
            break client.headers().get(b"grpc-status").map(<[u8]>::to_vec);
        }
    };
    assert_eq!(status, Some(b"8".to_vec()));
}

#[test]
fn a_client_that_answers_no_ping_is_dropped_and_its_call_cancelled() {
    let server = start(Limits {
        keepalive: Duration::from_millis(500),
        ..hurried()
    });
    let (mut socket, mut client) = by_hand(&server);
    let stream = open(&mut client, "/t.T/UntilCancelled");
    client.send_data(stream, &[0; 5], true).unwrap();
    socket.write_all(client.output()).unwrap();
    eventually(|| server.begun() == 1);
    let said = until_closed(socket);
    assert!(said.windows(8).any(|bytes| bytes == b"keepaliv"));
    eventually(|| server.cancelled() == 1);
}

#[test]
fn a_server_is_lost_only_if_it_answers_no_ping() {
    let quick = Keepalive {
        every: Duration::from_millis(200),
        timeout: Duration::from_secs(3),
    };
    let open = |address| {
        let transport = transport::plain::transport(TcpStream::connect(address).unwrap()).unwrap();
        Channel::with_keepalive(transport, "localhost", quick).unwrap()
    };
    // This server accepts connections and sends nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let status = echo(&open(silent.local_addr().unwrap()), &Blob::default()).unwrap_err();
    assert_eq!(
        (status.code(), status.message()),
        (
            Code::Unavailable,
            "the server did not answer a PING in time"
        )
    );
    let server = start(Limits::default());
    let request = blob(b"", 5000);
    assert_eq!(
        open(server.local_addr()).unary("/t.T/Sleep", &request, &soon()),
        Ok(request)
    );
}

#[test]
fn idle_connections_hold_no_thread_and_are_served_on_the_next_call() {
    let server = start(Limits::default());
    let channels: Vec<Channel> = (0..50).map(|_| connect(&server)).collect();
    for _ in 0..2 {
        channels
            .iter()
            .for_each(|channel| assert_eq!(echo(channel, &blob(b"", 1)).unwrap().count, 1));
        eventually(|| attended(&server) == 0);
    }
    // Calls whose requests are incomplete hold no thread either.
    let held: Vec<_> = (0..3).map(|_| by_hand(&server)).collect();
    let begun = held.into_iter().map(|(mut socket, mut client)| {
        open(&mut client, "/t.T/Echo");
        socket.write_all(client.output()).unwrap();
        socket
    });
    let begun: Vec<TcpStream> = begun.collect();
    eventually(|| attended(&server) == 0);
    drop(begun);
}

#[test]
fn a_client_that_answers_pings_stays_while_it_has_a_call() {
    let server = start(Limits {
        keepalive: Duration::from_millis(300),
        keepalive_timeout: Duration::from_secs(3),
        ..hurried()
    });
    let channel = connect(&server);
    assert_eq!(
        channel
            .unary::<_, Blob>("/t.T/Sleep", &blob(b"", 4000), &soon())
            .unwrap()
            .count,
        4000
    );
    // It is closed when it has no call.
    eventually(|| echo(&channel, &Blob::default()).is_ok());
    thread::sleep(Duration::from_millis(3500));
    assert_eq!(
        echo(&channel, &Blob::default()).unwrap_err().code(),
        Code::Unavailable
    );
}

#[test]
fn a_connection_without_a_call_ends_even_if_its_peer_answers_pings() {
    let server = start(hurried());
    let (mut socket, mut client) = by_hand(&server);
    socket
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    let (mut received, mut parsed, mut piece) = (Vec::new(), 0, [0; 1024]);
    // The server may close the connection before our last answer.
    while let Ok(length @ 1..) = socket.read(&mut piece) {
        received.extend_from_slice(&piece[..length]);
        while let Ok((taken @ 1.., _)) = client.receive(&received[parsed..], Instant::now()) {
            parsed += taken;
        }
        let _ = socket.write_all(&std::mem::take(client.output()));
    }
    assert!(
        received.ends_with(b"it was idle"),
        "{}",
        received.escape_ascii()
    );
}

#[test]
fn a_request_that_does_not_end_is_refused() {
    let server = start(hurried());
    let (mut socket, mut client) = by_hand(&server);
    open(&mut client, "/t.T/Echo");
    socket.write_all(&std::mem::take(client.output())).unwrap();
    // The peer keeps the connection busy at the same time.
    for _ in 0..50 {
        thread::sleep(Duration::from_millis(50));
        client.ping();
        socket.write_all(&std::mem::take(client.output())).unwrap();
    }
    let mut said = vec![0; 4096];
    let length = socket.read(&mut said).unwrap();
    let (mut rest, mut refused) = (&said[..length], false);
    while let Ok((taken, event)) = client.receive(rest, Instant::now())
        && taken > 0
    {
        rest = &rest[taken..];
        refused |= matches!(event, Some(h2::Event::Headers { end: true, .. }));
    }
    assert!(refused);
}

#[test]
fn a_client_that_reads_nothing_is_dropped() {
    let server = start(hurried());
    let (mut socket, mut client) = by_hand(&server);
    // Windows that never block; only the socket's buffers do.
    let stream = open(&mut client, "/t.T/Endless");
    let message = encode(&blob(&[7; 30_000], 0)).unwrap();
    client.send_data(stream, &message, true).unwrap();
    let mut bytes = std::mem::take(client.output());
    for stream in [0, stream] {
        bytes.extend([0, 0, 4, 8, 0]);
        bytes.extend(stream.to_be_bytes());
        bytes.extend(0x7000_0000_u32.to_be_bytes());
    }
    socket.write_all(&bytes).unwrap();
    eventually(|| server.cancelled() == 1);
    drop(socket);
}

#[test]
fn connections_above_the_limits_are_shed_and_places_come_back() {
    let server = start(Limits {
        connections_per_peer: 2,
        ..Limits::default()
    });
    let (first, second) = (connect(&server), connect(&server));
    assert!(echo(&first, &Blob::default()).is_ok() && echo(&second, &Blob::default()).is_ok());
    assert_eq!(
        until_closed(TcpStream::connect(server.local_addr()).unwrap()),
        b""
    );
    drop(first);
    eventually(|| echo(&connect(&server), &Blob::default()).is_ok());
}

#[test]
fn handlers_above_the_limit_are_refused() {
    let server = start(Limits {
        handlers: 2,
        ..Limits::default()
    });
    let channel = connect(&server);
    let hold = || {
        channel
            .server_streaming::<_, Blob>("/t.T/UntilCancelled", &Blob::default(), &soon())
            .unwrap()
    };
    let held = [hold(), hold()];
    eventually(|| server.begun() == 2);
    assert_eq!(
        echo(&channel, &Blob::default()).unwrap_err().code(),
        Code::ResourceExhausted
    );
    drop(held);
    eventually(|| echo(&channel, &Blob::default()).is_ok());
}

#[test]
fn waiting_requests_are_bounded_in_the_whole_server() {
    let server = start(Limits {
        buffered_bytes: 1 << 20,
        ..Limits::default()
    });
    let (mut socket, mut client) = by_hand(&server);
    // Ten incomplete requests of 200 KiB.
    let mut refused = 0;
    socket
        .set_read_timeout(Some(Duration::from_millis(200)))
        .unwrap();
    for _ in 0..10 {
        let stream = open(&mut client, "/t.T/Echo");
        let mut message = vec![0, 0, 4, 0, 0];
        message.resize(200 << 10, 0);
        let mut rest = &message[..];
        while let Ok(sent) = client.send_data(stream, rest, false) {
            rest = &rest[sent..];
            socket.write_all(&std::mem::take(client.output())).unwrap();
            if rest.is_empty() {
                break;
            }
            refused += refusals(&mut socket, &mut client);
        }
    }
    refused += refusals(&mut socket, &mut client);
    // One peer leaves the last quarter to others.
    assert!((6..=8).contains(&refused), "{refused}");
    drop(socket);
    let channel = connect(&server);
    eventually(|| echo(&channel, &blob(&[0; 700_000], 0)).is_ok());
}

/// The server's SETTINGS have its limits: windows, calls at once, headers.
#[test]
fn a_client_waits_for_the_servers_settings_and_respects_them() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let channel = {
        let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        Channel::new(transport::plain::transport(socket).unwrap(), "localhost").unwrap()
    };
    let mut socket = listener.accept().unwrap().0;
    let call = thread::spawn(move || echo(&channel, &blob(&[7; 100], 1)));
    socket
        .set_read_timeout(Some(Duration::from_millis(300)))
        .unwrap();
    let mut said = Vec::new();
    let _ = socket.read_to_end(&mut said);
    let kinds = |mut said: &[u8]| {
        let mut kinds = Vec::new();
        while let Some(&[_, l1, l2, kind, ..]) = said.first_chunk::<9>() {
            let length = usize::from(u16::from_be_bytes([l1, l2]));
            kinds.push((kind, length));
            said = &said[9 + length..];
        }
        kinds
    };
    assert!(
        kinds(&said[24..])
            .iter()
            .all(|(kind, _)| [4, 8].contains(kind)),
        "SETTINGS and WINDOW_UPDATE: {said:?}"
    );
    // INITIAL_WINDOW_SIZE 10
    socket
        .write_all(&[0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 10])
        .unwrap();
    said.clear();
    let _ = socket.read_to_end(&mut said);
    let data: Vec<_> = kinds(&said)
        .into_iter()
        .filter(|(kind, _)| *kind != 4)
        .collect();
    assert!(matches!(data[..], [(1, _), (0, 10)]), "{data:?}");
    // GOAWAY: no stream was processed.
    let words = b"too \"busy\"\n";
    let goaway = [
        &[0, 0, 8 + words.len() as u8, 7, 0, 0, 0, 0, 0][..],
        &[0; 4],
        &[0, 0, 0, 2],
        words,
    ]
    .concat();
    socket.write_all(&goaway).unwrap();
    let status = call.join().unwrap().unwrap_err();
    assert!(status.is_unprocessed() && status.code() == Code::Unavailable);
    assert!(
        status
            .message()
            .ends_with(r#"(INTERNAL_ERROR, "too \"busy\"\n")"#),
        "{status}"
    );
}

/// A server that refuses any number of calls, which is the fastest way to fill its output.
const ENDLESS: h2::Allowance = h2::Allowance {
    burst: u32::MAX,
    per_second: 1,
};

/// The server stops reading from a client that does not read. Once the client reads, it gets all
/// answers.
#[test]
fn a_peer_that_reads_no_answers_is_not_read_and_loses_none() {
    let server = start(Limits {
        resets: ENDLESS,
        ..Limits::default()
    });
    let (mut socket, mut client) = by_hand(&server);
    socket
        .set_write_timeout(Some(Duration::from_secs(1)))
        .unwrap();
    let (mut asked, mut unsent) = (0, Vec::new());
    let deadline = Instant::now() + Duration::from_secs(60);
    while unsent.is_empty() {
        assert!(Instant::now() < deadline, "the server still reads");
        // New streams in each round: the answers end them, and no rule forces the client to read
        // these.
        for _ in 0..50 {
            let stream = open(
                &mut client,
                "/t.T/Nope/a-long-name-that-is-answered-though-it-is-by-then-in-the-table",
            );
            client.send_data(stream, &[], true).unwrap();
            client.reset(stream, h2::ErrorCode::CANCEL);
            asked += 1;
        }
        let mut bytes = without_resets(&std::mem::take(client.output()));
        match socket.write(&bytes) {
            Ok(length) => unsent.extend(bytes.drain(length..)),
            Err(_) => unsent = bytes,
        }
    }
    let mut writing = socket.try_clone().unwrap();
    writing
        .set_write_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let written = thread::spawn(move || writing.write_all(&unsent));
    let (mut answered, mut said, mut filled) = (0, vec![0; 64 << 10], 0);
    while answered < asked {
        let length = socket.read(&mut said[filled..]).unwrap();
        assert!(length > 0, "{answered} of {asked}");
        filled += length;
        let mut at = 0;
        while let Some(&[0, l1, l2, kind, ..]) = said[at..filled].first_chunk::<9>()
            && filled - at >= 9 + usize::from(u16::from_be_bytes([l1, l2]))
        {
            assert_ne!(kind, 7, "GOAWAY");
            answered += usize::from(kind == 1);
            at += 9 + usize::from(u16::from_be_bytes([l1, l2]));
        }
        said.copy_within(at..filled, 0);
        filled -= at;
    }
    written.join().unwrap().unwrap();
    assert_eq!(echo(&connect(&server), &blob(b"", 1)).unwrap().count, 1);
}

fn without_resets(mut bytes: &[u8]) -> Vec<u8> {
    let mut kept = Vec::new();
    while let Some(&[_, l1, l2, kind, ..]) = bytes.first_chunk::<9>() {
        let (frame, rest) = bytes.split_at(9 + usize::from(u16::from_be_bytes([l1, l2])));
        kept.extend_from_slice(if kind == 3 { &[] } else { frame });
        bytes = rest;
    }
    kept
}

/// CVE-2025-8671: the peer makes us send resets.
#[test]
fn resets_that_a_peer_makes_us_send_end_its_connection() {
    let server = start(Limits::default());
    let channel = connect(&server);
    let (mut socket, mut client) = by_hand(&server);
    let mut reading = socket.try_clone().unwrap();
    let said = thread::spawn(move || {
        let mut said = Vec::new();
        let _ = reading.read_to_end(&mut said);
        said
    });
    let deadline = Instant::now() + Duration::from_secs(20);
    while !said.is_finished() {
        assert!(Instant::now() < deadline, "the connection still lives");
        let stream = open(&mut client, "/t.T/PingPong");
        // A message with an unknown flag, and then more data.
        client.send_data(stream, &[9, 0, 0, 0, 0], false).unwrap();
        client.send_data(stream, &[0], false).unwrap();
        client.reset(stream, h2::ErrorCode::CANCEL);
        let _ = socket.write_all(&without_resets(&std::mem::take(client.output())));
    }
    let said = said.join().unwrap();
    let calm = said
        .windows(9)
        .any(|window| window[3..] == [7, 0, 0, 0, 0, 0])
        && said.windows(4).any(|code| code == [0, 0, 0, 11]);
    assert!(calm, "GOAWAY with ENHANCE_YOUR_CALM");
    assert_eq!(echo(&channel, &blob(b"", 1)).unwrap().count, 1);
}

/// Answers that wait for the peer's window hold no handler. They are sent when the window opens, or
/// dropped.
#[test]
fn answers_that_wait_for_their_window_hold_no_handler() {
    let server = start(Limits {
        handlers: 2,
        stall: Duration::from_secs(4),
        ..Limits::default()
    });
    let (mut socket, mut client) = by_hand(&server);
    // INITIAL_WINDOW_SIZE 0
    socket
        .write_all(&[0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0])
        .unwrap();
    let message = encode(&blob(b"abc", 5)).unwrap();
    let streams: Vec<u32> = (0..50)
        .map(|_| {
            let stream = open(&mut client, "/t.T/Echo");
            client.send_data(stream, &message, true).unwrap();
            stream
        })
        .collect();
    socket.write_all(&std::mem::take(client.output())).unwrap();
    let channel = connect(&server);
    for _ in 0..20 {
        echo(&channel, &Blob::default()).unwrap();
    }
    eventually(|| attended(&server) == 0);
    // The first half gets its window: first one byte, then the rest.
    for increment in [1u32, 1000] {
        for stream in &streams[..25] {
            let update = [
                &[0, 0, 4, 8, 0][..],
                &stream.to_be_bytes(),
                &increment.to_be_bytes(),
            ]
            .concat();
            socket.write_all(&update).unwrap();
        }
        thread::sleep(Duration::from_millis(100));
    }
    let (mut received, mut piece) = (Vec::new(), [0; 4096]);
    let (mut ended, mut reset, mut data) = (0, 0, 0);
    socket
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    while ended < 25 || reset < 25 {
        let length = socket.read(&mut piece).unwrap();
        assert!(length > 0, "{ended} ended, {reset} reset");
        received.extend_from_slice(&piece[..length]);
        while let Ok((taken @ 1.., event)) = client.receive(&received, Instant::now()) {
            match event {
                Some(h2::Event::Data { data: bytes, .. }) => data += bytes.len(),
                Some(h2::Event::Trailers { .. }) => ended += 1,
                Some(h2::Event::Reset {
                    code: h2::ErrorCode::CANCEL,
                    by_peer: true,
                    ..
                }) => reset += 1,
                _ => {}
            }
            received.drain(..taken);
        }
        socket.write_all(&std::mem::take(client.output())).unwrap();
    }
    assert_eq!((ended, reset, data), (25, 25, 25 * message.len()));
}

/// Reads the available bytes and counts answers that came before the end of their request.
fn refusals(socket: &mut TcpStream, client: &mut h2::Connection) -> usize {
    let (mut bytes, mut refused) = (vec![0; 64 << 10], 0);
    let mut filled = 0;
    while let Ok(length @ 1..) = socket.read(&mut bytes[filled..]) {
        filled += length;
    }
    let mut rest = &bytes[..filled];
    while let Ok((taken @ 1.., event)) = client.receive(rest, Instant::now()) {
        rest = &rest[taken..];
        refused += usize::from(matches!(event, Some(h2::Event::Headers { end: true, .. })));
    }
    refused
}

#[test]
fn a_flood_ends_its_connection_and_no_other() {
    let server = start(Limits::default());
    let channel = connect(&server);
    let (mut socket, _) = by_hand(&server);
    let ping = [&[0, 0, 8, 6, 0, 0, 0, 0, 0][..], &[0; 8]].concat();
    let _ = socket.write_all(&ping.repeat(5000));
    until_closed(socket);
    assert_eq!(echo(&channel, &blob(b"", 1)).unwrap().count, 1);
}

/// The default limits are those that SPECIFICATION.md promises.
#[test]
fn a_connection_without_a_call_ends_after_ten_minutes_and_a_dead_one_after_35_seconds() {
    let limits = Limits::default();
    assert_eq!(limits.idle, Duration::from_secs(600));
    let dead = limits.keepalive + limits.keepalive_timeout;
    assert_eq!(dead, Duration::from_secs(35));
    assert_eq!((limits.connections, limits.handshakes), (1024, 256));
}
