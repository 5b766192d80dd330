//! Our gRPC with other implementations as peers, over TCP and TLS: grpcio (Python, C core), tonic, and nghttp2's tools.
//! `tests/interop/peer.py` is the peer of grpcio; `tools/python.sh` installs grpcio.
//!
//! Each peer runs the cases of gRPC's interoperability specification (`tests/interop/testing.rs`),
//! and the cases here, which the specification lacks.

mod interop {
    pub mod testing;
    pub mod tls;
    pub mod tonic;
    pub mod tonic_testing;
}

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use interop::testing::{self, Seen, wait_for};
use interop::tls;
use rpc::grpc::{
    Call, CallOptions, Channel, Code, Limits, Metadata, Receiver, Router, Sender, Server, Status,
};
use support::foreign::python;
use transport::Accept;

const MIB: usize = 1 << 20;
const TEXT: &str = "schlüssel 🔑 100 %\n";

/// The only message of `test.Interop`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Blob {
    #[prost(bytes = "vec", tag = "1")]
    /// Any bytes.
    pub data: Vec<u8>,
    #[prost(uint32, tag = "2")]
    /// A number, milliseconds, or a count.
    pub count: u32,
}

fn blob(data: &[u8], count: u32) -> Blob {
    Blob {
        data: data.to_vec(),
        count,
    }
}

// ---- our side ----

fn router() -> Router {
    let cancelled = Arc::new(AtomicBool::new(false));
    let seen = cancelled.clone();
    Router::new()
        .unary("/test.Interop/Echo", |_: &Call, request: Blob| Ok(request))
        .unary(
            "/test.Interop/Fail",
            |_: &Call, _: Blob| -> Result<Blob, _> { Err(Status::new(Code::NotFound, TEXT)) },
        )
        .unary(
            "/test.Interop/Panic",
            |_: &Call, _: Blob| -> Result<Blob, _> { panic!("on purpose") },
        )
        .unary("/test.Interop/Sleep", |_: &Call, request: Blob| {
            thread::sleep(Duration::from_millis(request.count.into()));
            Ok(request)
        })
        .unary("/test.Interop/Metadata", |call: &Call, request: Blob| {
            let mut headers = Metadata::new();
            headers.insert("x-echo", call.metadata().get("x-ascii").unwrap_or_default())?;
            let data = call.metadata().get("x-data-bin").unwrap_or_default();
            headers.insert("x-echo-bin", data)?;
            call.set_headers(headers);
            Ok(request)
        })
        .server_streaming(
            "/test.Interop/Many",
            |_: &Call, request: Blob, responses: &mut Sender<Blob>| {
                (0..request.count).try_for_each(|count| responses.send(&blob(&request.data, count)))
            },
        )
        .server_streaming(
            "/test.Interop/Endless",
            move |_: &Call, request: Blob, responses: &mut Sender<Blob>| {
                while responses.send(&request).is_ok() {}
                cancelled.store(true, Ordering::SeqCst);
                Err(Status::new(Code::Cancelled, ""))
            },
        )
        .unary("/test.Interop/WasCancelled", move |_: &Call, _: Blob| {
            let deadline = Instant::now() + Duration::from_secs(10);
            while !seen.load(Ordering::SeqCst) && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(5));
            }
            Ok(blob(b"", seen.load(Ordering::SeqCst).into()))
        })
        .streaming(
            "/test.Interop/PingPong",
            |_: &Call, requests: &mut Receiver<Blob>, responses: &mut Sender<Blob>| {
                for request in requests {
                    responses.send(&request?)?;
                }
                Ok(())
            },
        )
}

/// Our server, and the events that its test service saw.
struct OurServer {
    server: Server,
    seen: mpsc::Receiver<Seen>,
}

impl OurServer {
    fn port(&self) -> u16 {
        self.server.local_addr().port()
    }
}

fn start(accept: Arc<dyn Accept>) -> OurServer {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let limits = Limits {
        message_bytes: 16 * MIB,
        buffered_bytes: 256 * MIB,
        ..Limits::default()
    };
    let (sender, seen) = mpsc::channel();
    let router = testing::add(router(), sender);
    OurServer {
        server: Server::start("interop", listener, accept, router, limits).unwrap(),
        seen,
    }
}

fn start_plain() -> OurServer {
    start(Arc::new(|socket: TcpStream, _: Instant| {
        transport::plain::transport(socket)
    }))
}

fn connect_plain(port: u16) -> Channel {
    let socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
    Channel::new(
        transport::plain::transport(socket).unwrap(),
        &format!("127.0.0.1:{port}"),
    )
    .unwrap()
    .with_message_bytes(64 * MIB)
}

fn connect_tls(port: u16, identity: &tls::Identity) -> Channel {
    let socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let transport = tls::connect(socket, identity).unwrap();
    Channel::new(transport, &format!("localhost:{port}"))
        .unwrap()
        .with_message_bytes(64 * MIB)
}

fn within(timeout: Duration) -> CallOptions {
    CallOptions {
        timeout: Some(timeout),
        ..CallOptions::default()
    }
}

fn soon() -> CallOptions {
    within(Duration::from_secs(30))
}

fn unary(channel: &Channel, method: &str, request: &Blob) -> Result<Blob, Status> {
    channel.unary(&format!("/test.Interop/{method}"), request, &soon())
}

/// Runs the cases that every server supports.
fn basic_cases(channel: &Channel) {
    assert_eq!(
        unary(channel, "Echo", &Blob::default()).unwrap(),
        Blob::default()
    );
    for count in 0..300 {
        let request = blob(&vec![b'x'; count as usize], count);
        assert_eq!(unary(channel, "Echo", &request).unwrap(), request);
    }
    for (size, count) in [(0, 0), (1000, 1000), (MIB, 24)] {
        let request = blob(&vec![1; size], count);
        let responses = channel
            .server_streaming("/test.Interop/Many", &request, &soon())
            .unwrap();
        let counts: Vec<u32> = responses
            .map(|response: Result<Blob, _>| response.unwrap().count)
            .collect();
        assert_eq!(counts, (0..count).collect::<Vec<_>>());
    }
}

/// Runs the cases that grpcio's server and ours support.
fn all_cases(channel: &Channel) {
    testing::client_cases(channel);
    basic_cases(channel);
    let large = blob(&[1, 2, 3, 4].repeat(3 * MIB), 7);
    assert!(
        unary(channel, "Echo", &large).unwrap() == large,
        "large_unary"
    );

    thread::scope(|scope| {
        for thread in 0..8 {
            scope.spawn(move || {
                for count in 0..50 {
                    assert_eq!(
                        unary(channel, "Echo", &blob(b"", 100 * thread + count))
                            .unwrap()
                            .count
                            % 100,
                        count
                    );
                }
            });
        }
    });

    let (mut requests, mut responses) = channel
        .streaming::<Blob, Blob>("/test.Interop/PingPong", &soon())
        .unwrap();
    for size in [0, 1, 100_000, 5] {
        requests.send(&blob(&vec![2; size], size as u32)).unwrap();
        assert_eq!(
            responses.next().unwrap().unwrap(),
            blob(&vec![2; size], size as u32)
        );
    }
    requests.finish().unwrap();
    assert!(responses.next().is_none());

    let slept = channel.unary::<_, Blob>(
        "/test.Interop/Sleep",
        &blob(b"", 2000),
        &within(Duration::from_millis(100)),
    );
    assert_eq!(slept.unwrap_err().code(), Code::DeadlineExceeded);

    let mut endless = channel
        .server_streaming::<_, Blob>("/test.Interop/Endless", &blob(&[5; 1000], 1), &soon())
        .unwrap();
    assert_eq!(endless.next().unwrap().unwrap().count, 1);
    drop(endless);
    assert_eq!(
        unary(channel, "WasCancelled", &Blob::default())
            .unwrap()
            .count,
        1,
        "cancel_after_first_response"
    );

    let status = unary(channel, "Fail", &Blob::default()).unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::NotFound, TEXT));
    assert_eq!(
        unary(channel, "Nope", &Blob::default()).unwrap_err().code(),
        Code::Unimplemented
    );
    let nowhere = channel.unary::<_, Blob>("/test.Nope/Echo", &Blob::default(), &soon());
    assert_eq!(nowhere.unwrap_err().code(), Code::Unimplemented);

    let mut options = soon();
    options.metadata.insert("x-ascii", "value").unwrap();
    // 00 ff 01 in base64
    options.metadata.insert("x-data-bin", "AP8B").unwrap();
    let request = Blob::default();
    let mut responses = channel
        .server_streaming::<_, Blob>("/test.Interop/Metadata", &request, &options)
        .unwrap();
    let headers = responses.headers().unwrap().unwrap();
    assert_eq!(headers.get("x-echo"), Some("value"));
    assert_eq!(headers.get("x-echo-bin"), Some("AP8B"));
    assert_eq!(responses.next().unwrap().unwrap(), Blob::default());
    assert!(responses.next().is_none());
}

// ---- grpcio ----

fn peer() -> Command {
    let mut command = python();
    command
        .arg("-B")
        .arg(Path::new(support::ROOT).join("tests/interop/peer.py"));
    command
}

/// Runs all cases of `peer.py client`, and shows its output if one failed.
fn run_grpcio_client(server: &OurServer, certificate: Option<&str>) {
    let output = peer()
        .arg("client")
        .arg(server.port().to_string())
        .args(certificate)
        .output()
        .unwrap();
    let (said, complained) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{said}\n{complained}");
    assert_eq!(said.lines().count(), 18 + 14, "{said}");
    wait_for(&server.seen, Seen::BrokenAfterResponse(Code::Cancelled));
}

/// A process that ends when it is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start_grpcio_server(files: &[&str]) -> (Running, u16) {
    let mut command = peer();
    command
        .arg("server")
        .args(files)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    (Running(child), line.trim().parse().unwrap())
}

#[test]
fn grpcio_client_against_our_server() {
    let server = start_plain();
    run_grpcio_client(&server, None);
}

#[test]
fn grpcio_client_against_our_server_over_tls() {
    let identity = tls::Identity::new();
    let server = start(identity.accept());
    run_grpcio_client(&server, identity.certificate_file().to_str());
}

#[test]
fn our_client_against_grpcio_server() {
    let (_process, port) = start_grpcio_server(&[]);
    all_cases(&connect_plain(port));
}

#[test]
fn our_client_against_grpcio_server_over_tls() {
    let identity = tls::Identity::new();
    let files = [identity.certificate_file(), identity.key_file()];
    let (_process, port) =
        start_grpcio_server(&files.each_ref().map(|file| file.to_str().unwrap()));
    all_cases(&connect_tls(port, &identity));
}

#[test]
fn our_client_against_our_server() {
    let server = start_plain();
    all_cases(&connect_plain(server.port()));
    let identity = tls::Identity::new();
    let server = start(identity.accept());
    all_cases(&connect_tls(server.port(), &identity));
}

// ---- tonic ----

#[test]
fn tonic_client_against_our_server() {
    interop::tonic::client_cases(&start_plain(), None);
}

#[test]
fn tonic_client_against_our_server_over_tls() {
    let identity = tls::Identity::new();
    interop::tonic::client_cases(&start(identity.accept()), Some(&identity));
}

#[test]
fn our_client_against_tonic_server() {
    let server = interop::tonic::start_server(None);
    tonic_cases(&connect_plain(server.port));
}

#[test]
fn our_client_against_tonic_server_over_tls() {
    let identity = tls::Identity::new();
    let server = interop::tonic::start_server(Some(&identity));
    tonic_cases(&connect_tls(server.port, &identity));
}

fn tonic_cases(channel: &Channel) {
    testing::client_cases(channel);
    basic_cases(channel);
}

// ---- nghttp2's tools and curl ----

#[test]
fn h2load_sees_no_failed_request() {
    let server = start_plain();
    let mut message = tempfile::NamedTempFile::new().unwrap();
    // A message of five bytes: count 300 and one letter.
    message
        .write_all(b"\0\0\0\0\x06\x0a\x01x\x10\xac\x02")
        .unwrap();
    let url = format!("http://127.0.0.1:{}/test.Interop/Echo", server.port());
    for concurrency in [["-c1", "-m1"], ["-c4", "-m50"]] {
        let output = Command::new("h2load")
            .args([
                "-n4000",
                "-t1",
                "-H",
                "content-type: application/grpc",
                "-H",
                "te: trailers",
                "-d",
            ])
            .arg(message.path())
            .args(concurrency)
            .arg(&url)
            .output()
            .expect("h2load is installed (nghttp2-client)");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            said.contains("4000 succeeded, 0 failed, 0 errored, 0 timeout"),
            "{said}"
        );
        assert!(said.contains("status codes: 4000 2xx"), "{said}");
    }
}

#[test]
fn h2load_and_curl_succeed_over_tls() {
    let server = start(tls::Identity::new().accept());
    let url = format!("https://127.0.0.1:{}/test.Interop/Echo", server.port());
    let mut message = tempfile::NamedTempFile::new().unwrap();
    message
        .write_all(b"\0\0\0\0\x06\x0a\x01x\x10\xac\x02")
        .unwrap();
    let grpc = ["-H", "content-type: application/grpc", "-H", "te: trailers"];
    let mut h2load = Command::new("h2load");
    h2load
        .args(["-n1000", "-c2", "-m10", "-d"])
        .arg(message.path())
        .args(grpc)
        .arg(&url);
    let output = h2load
        .output()
        .expect("h2load is installed (nghttp2-client)");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        said.contains("1000 succeeded, 0 failed, 0 errored, 0 timeout"),
        "{said}"
    );
    let data = format!("@{}", message.path().display());
    let curl = [
        "-sk",
        "--http2",
        "-o",
        "/dev/null",
        "-w",
        "%{http_version} %{http_code}",
        "--data-binary",
        &data,
    ];
    let output = Command::new("curl")
        .args(curl)
        .args(grpc)
        .arg(&url)
        .output()
        .expect("curl is installed");
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "2 200",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn our_client_understands_a_server_that_is_not_grpc() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("test.Interop")).unwrap();
    std::fs::write(folder.path().join("test.Interop/Page"), "a page").unwrap();
    let identity = tls::Identity::new();
    for over_tls in [false, true] {
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let mut command = Command::new("nghttpd");
        command.args(["-a", "127.0.0.1", "-d"]).arg(folder.path());
        if over_tls {
            command
                .arg(port.to_string())
                .arg(identity.key_file())
                .arg(identity.certificate_file())
        } else {
            command.arg("--no-tls").arg(port.to_string())
        };
        let _server = Running(
            command
                .stdout(Stdio::null())
                .spawn()
                .expect("nghttpd is installed (nghttp2-server)"),
        );
        let end = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(Instant::now() < end, "nghttpd does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        let channel = if over_tls {
            connect_tls(port, &identity)
        } else {
            connect_plain(port)
        };
        let ask = |path: &str| {
            let answer: Result<Blob, Status> =
                channel.unary(path, &Blob::default(), &CallOptions::default());
            answer.unwrap_err()
        };
        // http-grpc-status-mapping.md: 404 is UNIMPLEMENTED; 200 without gRPC's content-type is UNKNOWN
        let missing = ask("/test.Interop/Missing");
        assert_eq!(missing.code(), Code::Unimplemented, "{missing}");
        let page = ask("/test.Interop/Page");
        assert_eq!(page.code(), Code::Unknown, "{page}");
        assert_eq!(
            ask("/test.Interop/Missing").code(),
            Code::Unimplemented,
            "the connection still works"
        );
    }
}

#[test]
fn nghttp_and_curl_learn_that_the_server_is_grpc() {
    let server = start_plain();
    let url = format!("http://127.0.0.1:{}/", server.port());
    let output = Command::new("nghttp")
        .args(["-v", &url])
        .output()
        .expect("nghttp is installed (nghttp2-client)");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains(":status: 405"), "{said}");
    assert!(
        !said.contains(
            "GOAWAY frame <length=8, flags=0x00, stream_id=0>\n          (last_stream_id=0, error_code=PROTOCOL"
        ),
        "{said}"
    );
    let curl = [
        "-sv",
        "--http2-prior-knowledge",
        "-o",
        "/dev/null",
        "-w",
        "%{http_code}",
        "--data",
        "x",
    ];
    let output = Command::new("curl")
        .args(curl)
        .arg(&url)
        .output()
        .expect("curl is installed");
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "415",
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
