//! Tests of the key service's program and of the join service over real connections, with our
//! client and with tonic and grpcio as independent clients.

use common::attested;
use common::join_setup::{address, lone_config};
use support::foreign::python;
use support::program;
use support::swtpm;

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use attested::{Anybody, attested, attested_channel, plain_channel, within};
use base::crypto;
use base::text::hex;
use kubernetes::certificate_request::kubelet_request::KubeletRequest;
use kubernetes::parameters::NodeName;
use program::Program;
use proto::join::ISSUE_JOIN_TICKET;
use proto::join::ISSUE_REJOIN_TICKET;
use proto::join::{IssueJoinTicketRequest, IssueJoinTicketResponse};
use proto::join::{IssueRejoinTicketRequest, IssueRejoinTicketResponse};
use proto::kms::GET_DATA_KEY;
use proto::kms::{GetDataKeyRequest, GetDataKeyResponse};
use rpc::grpc::{Call, Code, Limits, Router, Server, Status};
use services::cluster::keys::{Auth, KeyClient};
use services::join_service::{self};
use socket2::{Domain, Socket, Type};
use swtpm::Swtpm;
use tempfile::TempDir;

const UUID: &str = "00000000-0000-0000-0000-000000000000";
/// The key of [`UUID`] with a master secret and a salt of 32 zeros each.
const DISK_KEY: &str = "2b5c829f691bfd4232f8aac464bccc07e605c7c8e82cbca09837e86d0b6d0665";
const MEASUREMENT_SECRET: &str = "54d67b1d917d3464757d9b699f3ee416c209a2270e3876da90535e4108898cdd";

fn key_request(id: &str, length: u32) -> GetDataKeyRequest {
    GetDataKeyRequest {
        data_key_id: id.into(),
        length,
        ..GetDataKeyRequest::default()
    }
}

struct KeyService {
    program: Program,
    address: SocketAddr,
    _dir: TempDir,
}

/// Starts the program with a master secret of zeros, for any client.
fn key_service(listen: &str) -> KeyService {
    key_service_for(&["--clients", "any", "--listen", listen])
}

fn key_service_for(args: &[&str]) -> KeyService {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("mastersecret"), [0; 32]).unwrap();
    fs::write(dir.path().join("salt"), [0; 32]).unwrap();
    let mut command = Command::new(support::program::built("key-service"));
    command
        .args(["--master-secret", "mastersecret", "--salt=salt", "-v", "-1"])
        .args(args);
    let program = Program::start(command.current_dir(dir.path()));
    let address = address(&program.expect("serving data keys"));
    KeyService {
        program,
        address,
        _dir: dir,
    }
}

fn ask(address: SocketAddr, id: &str, length: u32) -> Result<GetDataKeyResponse, Status> {
    plain_channel(address).unary(GET_DATA_KEY, &key_request(id, length), &within(5))
}

#[test]
fn key_service_issues_keys_and_explains_invalid_requests() {
    let service = key_service("127.0.0.1:0");
    let channel = plain_channel(service.address);
    let ask = |id: &str, length| -> Result<GetDataKeyResponse, Status> {
        channel.unary(GET_DATA_KEY, &key_request(id, length), &within(5))
    };
    assert_eq!(hex(&ask(UUID, 32).unwrap().data_key), DISK_KEY);
    assert_eq!(
        hex(&ask("measurementSecret", 32).unwrap().data_key),
        MEASUREMENT_SECRET
    );
    for (id, length) in [
        ("", 32),
        ("a b", 32),
        (UUID, 0),
        (UUID, 65),
        (UUID, u32::MAX),
        (&UUID.replace('0', "A"), 32),
    ] {
        assert_eq!(
            ask(id, length).err().unwrap().code(),
            Code::InvalidArgument,
            "{id} {length}"
        );
    }
    // Larger than any id.
    assert_eq!(
        ask(&"x".repeat(1 << 20), 32).err().unwrap().code(),
        Code::ResourceExhausted
    );
    let other: Result<GetDataKeyResponse, _> =
        channel.unary("/kms.API/Other", &key_request(UUID, 32), &within(5));
    assert_eq!(other.err().unwrap().code(), Code::Unimplemented);
}

#[tokio::test]
async fn key_service_serves_a_client_of_another_make() {
    let service = key_service("127.0.0.1:0");
    let channel = tonic::transport::Endpoint::new(format!("http://{}", service.address)).unwrap();
    let mut client = tonic::client::Grpc::new(channel.connect().await.unwrap());
    for (id, length, expected) in [
        (UUID, 32, Ok(DISK_KEY)),
        (UUID, 0, Err(tonic::Code::InvalidArgument)),
    ] {
        client.ready().await.unwrap();
        let codec = tonic_prost::ProstCodec::<GetDataKeyRequest, GetDataKeyResponse>::default();
        let request = tonic::Request::new(key_request(id, length));
        let path = tonic::codegen::http::uri::PathAndQuery::from_static(GET_DATA_KEY);
        let answer = client.unary(request, path, codec).await;
        let answer = answer
            .map(|response| hex(&response.into_inner().data_key))
            .map_err(|status| status.code());
        assert_eq!(answer, expected.map(str::to_owned));
    }
}

#[test]
fn key_service_serves_grpcio_as_the_old_callers_ask() {
    let service = key_service("127.0.0.1:0");
    let root = Path::new(support::ROOT);
    let answers = python()
        .arg(root.join("tests/interop/key_client.py"))
        .arg(service.address.to_string())
        .args([
            UUID,
            "32",
            "measurementSecret",
            "32",
            "s3proxy-kek",
            "64",
            "",
            "32",
            UUID,
            "0",
            UUID,
            "4294967295",
        ])
        .output()
        .unwrap();
    let said = String::from_utf8(answers.stdout).unwrap();
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(
        lines.len(),
        6,
        "{said}\n{}",
        String::from_utf8_lossy(&answers.stderr)
    );
    assert_eq!(lines[0], format!("OK {DISK_KEY}"));
    assert_eq!(lines[1], format!("OK {MEASUREMENT_SECRET}"));
    assert_eq!(lines[2].len(), "OK ".len() + 128);
    assert_eq!(lines[3..], ["INVALID_ARGUMENT"; 3]);
}

/// The old chart starts the services with these options only. A comment marks a file or port that a
/// test has to change.
#[test]
fn programs_started_by_the_old_chart_serve_old_clients_and_warn() {
    let keys = key_service_for(&["--port=0"]);
    assert!(keys.address.ip().is_unspecified(), "{}", keys.address);
    keys.program.expect("PLAINTEXT");
    for id in [UUID, "measurementSecret", "ca_emergency_ssh", "s3proxy-kek"] {
        assert_eq!(ask(keys.address, id, 32).unwrap().data_key.len(), 32);
    }

    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("attestationConfig"), POLICY).unwrap();
    let endpoint = format!("--key-service-endpoint=127.0.0.1:{}", keys.address.port());
    let mut command = Command::new(support::program::built("join-service"));
    command.args([
        "--cloud-provider=QEMU",
        &endpoint,
        "--attestation-variant=qemu-vtpm",
    ]);
    let join = Program::start(
        command
            .args(["--listen=127.0.0.1:0", "--config=."])
            .current_dir(dir.path()),
    );
    let address = address(&join.expect("serving join requests"));
    join.expect("KEYS COME IN PLAINTEXT");
    assert_eq!(
        hex(&rejoin_from(&Swtpm::start(), address)
            .unwrap()
            .state_disk_key),
        DISK_KEY
    );
    // There is no cluster to check, and the log says so.
    join.expect("any machine that meets the policy gets the key of any disk");
    join.expect("the owner of this disk was not checked: no cluster");
}

#[test]
fn key_service_outlives_garbage_and_half_open_connections() {
    let service = key_service("127.0.0.1:0");
    let mut open = vec![];
    for garbage in [
        &b""[..],
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        &[0xff; 70_000],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        let mut stream = TcpStream::connect(service.address).unwrap();
        // The server may close the connection before it has read everything.
        let _ = stream.write_all(garbage);
        open.push(stream);
    }
    assert_eq!(
        hex(&ask(service.address, UUID, 32).unwrap().data_key),
        DISK_KEY
    );
}

/// The bytes of a load balancer's probe, whether it resets its connection, and the log lines of a server with TLS and of one without.
const PROBES: [(&[u8], bool, &str, &str); 5] = [
    (b"", false, "the peer closed the connection", ""),
    (b"", true, "", ""),
    (
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
        false,
        "the peer does not speak TLS: it sent an HTTP request",
        "it sent an HTTP request",
    ),
    (
        b"PROXY TCP4 192.0.2.1 192.0.2.2 5 6\r\n",
        false,
        "it speaks the PROXY protocol",
        "it speaks the PROXY protocol",
    ),
    (
        b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0",
        false,
        "it speaks the PROXY protocol: turn it off at the load balancer",
        "it speaks the PROXY protocol: turn it off at the load balancer",
    ),
];

/// Connects from an address of its own, sends this, and waits for the server to close the connection.
fn probe(from: [u8; 4], to: SocketAddr, bytes: &[u8], is_reset: bool) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((from, 0)).into()).unwrap();
    socket.connect(&to.into()).unwrap();
    if is_reset {
        return socket.set_linger(Some(Duration::ZERO)).unwrap();
    }
    let mut stream = TcpStream::from(socket);
    let _ = stream.write_all(bytes);
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let _ = stream.read_to_end(&mut vec![]);
}

/// Checks the log of a server after many probes: at most one line a minute and peer, which names what the probe sent.
fn survive_probes(program: &Program, address: SocketAddr, is_tls: bool) {
    let begun = Instant::now();
    for (host, (bytes, is_reset, ..)) in (11u8..).zip(PROBES) {
        for _ in 0..40 {
            probe([127, 0, 0, host], address, bytes, is_reset);
        }
    }
    if is_tls {
        // a ClientHello without a server name
        for _ in 0..3 {
            let mut client = Command::new("openssl");
            client.args([
                "s_client",
                "-noservername",
                "-bind",
                "127.0.0.10:0",
                "-connect",
            ]);
            client
                .arg(address.to_string())
                .stdin(std::process::Stdio::null());
            client.output().unwrap();
        }
    }
    for (host, (.., over_tls, plain)) in (11..).zip(PROBES) {
        let said = if is_tls { over_tls } else { plain };
        if !said.is_empty() {
            let line = program.expect(&format!("with 127.0.0.{host}:"));
            assert!(line.contains(said), "{line}");
        }
    }
    // a line of each peer, and one more for each minute that the test took
    let output = program.output();
    let most = 1 + begun.elapsed().as_secs() as usize / 60;
    for host in 10..16 {
        let peer = format!("127.0.0.{host}:");
        let lines = output
            .lines()
            .filter(|line| !line.contains("DEBUG") && line.contains(&peer));
        assert!(lines.count() <= most, "{output}");
    }
    let lines = output
        .lines()
        .filter(|line| line.contains("INFO") && line.contains("connection"));
    assert!(lines.count() <= 6 * most, "{output}");
}

#[test]
fn the_probes_of_a_load_balancer_do_not_fill_the_log() {
    let service = key_service("127.0.0.1:0");
    survive_probes(&service.program, service.address, false);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("attestationConfig"), POLICY).unwrap();
    let args = [
        "--cloud-provider=qemu",
        "--attestation-variant=qemu-vtpm",
        "-v=0",
    ];
    let program = Program::start(&mut join_program(&dir, &args));
    let at = address(&program.expect("serving join requests"));
    survive_probes(&program, at, true);
}

/// Every line is an object, also those that a caller causes.
#[test]
fn a_collector_of_logs_can_read_every_line() {
    let program = support::program::built("key-service");
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("mastersecret"), [0; 32]).unwrap();
    fs::write(dir.path().join("salt"), [0; 32]).unwrap();
    let args = "--clients any --listen 127.0.0.1:0 --master-secret mastersecret --salt salt -v -1 --log-format json";
    let mut command = Command::new(program);
    let command = command.args(args.split(' ')).current_dir(dir.path());
    let mut service = Program::start(command);
    let ready = service.expect("serving data keys");
    let ready: serde_json::Value = serde_json::from_str(&ready).unwrap();
    let said = address(ready["msg"].as_str().unwrap());
    assert!(ask(said, "a\n\"b", 32).is_err());
    service.terminate();
    assert!(service.exit().success());
    let output = service.output();
    assert!(output.lines().count() > 2, "{output}");
    for line in output.lines() {
        let record: serde_json::Value = serde_json::from_str(line).unwrap();
        let names: Vec<&String> = record.as_object().unwrap().keys().collect();
        assert_eq!(names, ["level", "logger", "msg", "ts", "uptime"], "{line}");
        assert!(record["ts"].as_f64().unwrap() > record["uptime"].as_f64().unwrap());
    }
}

#[test]
fn sigterm_ends_the_key_service_with_success_though_connections_are_open() {
    let mut service = key_service("127.0.0.1:0");
    let _half_open = TcpStream::connect(service.address).unwrap();
    let channel = plain_channel(service.address);
    let _: GetDataKeyResponse = channel
        .unary(GET_DATA_KEY, &key_request(UUID, 32), &within(5))
        .unwrap();
    service.program.terminate();
    assert!(service.program.exit().success());
    service.program.expect("SIGTERM");
    assert!(
        !service.program.output().contains("2b5c"),
        "{}",
        service.program.output()
    );
}

/// Runs a key service that must not start, with the files `good` and `short`. Returns its exit code and its errors.
fn refused_key_service(arguments: &str) -> (i32, String) {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("short"), [0; 15]).unwrap();
    fs::write(dir.path().join("good"), [0; 32]).unwrap();
    let output = Command::new(support::program::built("key-service"))
        .args(arguments.split(' '))
        .current_dir(dir.path())
        .output()
        .unwrap();
    (
        output.status.code().unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

#[test]
fn key_service_does_not_expose_keys_in_plaintext_without_the_option_for_it() {
    let (code, stderr) =
        refused_key_service("--clients=any --listen 0.0.0.0:0 --master-secret good --salt good");
    assert!(
        code == 1 && stderr.contains("--allow-plaintext"),
        "{code} {stderr}"
    );
}

#[test]
fn key_service_refuses_a_short_master_secret() {
    let (code, stderr) =
        refused_key_service("--clients=any --listen 127.0.0.1:0 --master-secret short --salt good");
    assert!(
        code == 1 && stderr.contains("short: expected 16"),
        "{code} {stderr}"
    );
}

#[test]
fn key_service_names_an_invalid_option() {
    for arguments in ["--listen here", "--clients everybody", "--grant a/b"] {
        let (code, stderr) = refused_key_service(arguments);
        let option = arguments.split(' ').next().unwrap();
        assert!(code == 2 && stderr.contains(option), "{code} {stderr}");
    }
}

#[test]
fn key_service_refuses_a_grant_to_a_caller_that_it_cannot_know() {
    let (code, stderr) =
        refused_key_service("--clients=any --grant=member=disk --master-secret=good --salt=good");
    assert!(
        code == 1 && stderr.contains("\"member\" cannot be a caller"),
        "{code} {stderr}"
    );
}

/// Starts the join service as its program does, but with an attestation variant that any client can
/// issue.
fn join_service(keys: &str) -> Server {
    let tls = atls::Server::new(None, Some(verifier::judge(Arc::new(Anybody))));
    let router = join_service::router(join_service::rejoin_only(KeyClient::new(keys, Auth::None)));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    Server::start(
        "join-service",
        listener,
        Arc::new(tls),
        router,
        Limits::default(),
    )
    .unwrap()
}

fn rejoin(address: SocketAddr, uuid: &str) -> Result<IssueRejoinTicketResponse, Status> {
    let request = IssueRejoinTicketRequest {
        disk_uuid: uuid.into(),
    };
    attested_channel(address).unary(ISSUE_REJOIN_TICKET, &request, &within(180))
}

#[test]
fn a_node_that_returns_gets_the_key_of_its_disk() {
    let keys = key_service("127.0.0.1:0");
    let join = join_service(&keys.address.to_string());
    for uuid in [UUID, &UUID.to_uppercase()] {
        let ticket = rejoin(join.local_addr(), uuid).unwrap();
        assert_eq!(hex(&ticket.state_disk_key), DISK_KEY);
        assert_eq!(hex(&ticket.measurement_secret), MEASUREMENT_SECRET);
    }
}

#[test]
fn a_disk_that_has_no_uuid_gets_no_key() {
    let keys = key_service("127.0.0.1:0");
    let join = join_service(&keys.address.to_string());
    for uuid in [
        "",
        "measurementSecret",
        "ca_emergency_ssh",
        &UUID[1..],
        "00000000-0000-0000-0000-00000000000g",
    ] {
        assert_eq!(
            rejoin(join.local_addr(), uuid).err().unwrap().code(),
            Code::InvalidArgument,
            "{uuid}"
        );
    }
}

#[test]
fn an_invalid_join_request_is_refused_with_its_reason() {
    let join = join_service("127.0.0.1:1");
    let request = IssueJoinTicketRequest {
        disk_uuid: UUID.into(),
        ..Default::default()
    };
    let answer: Result<IssueJoinTicketResponse, _> =
        attested_channel(join.local_addr()).unary(ISSUE_JOIN_TICKET, &request, &within(5));
    let refused = answer.err().unwrap();
    assert_eq!(
        (refused.code(), refused.retry_after()),
        (Code::InvalidArgument, None)
    );
    assert!(
        refused.message().starts_with("certificate_request: "),
        "{refused}"
    );
}

#[test]
fn a_client_without_attestation_cannot_call() {
    let keys = key_service("127.0.0.1:0");
    let join = join_service(&keys.address.to_string());
    let deadline = Instant::now() + Duration::from_secs(10);
    let socket = TcpStream::connect(join.local_addr()).unwrap();
    // A TLS 1.3 client finishes its handshake before the server has verified it: the refusal may
    // come with the first call.
    if let Ok(transport) = atls::Client::new(None, None).connect(socket, deadline) {
        let request = IssueRejoinTicketRequest {
            disk_uuid: UUID.into(),
        };
        let answer = rpc::grpc::Channel::new(transport, "x").and_then(|channel| {
            channel.unary::<_, IssueRejoinTicketResponse>(ISSUE_REJOIN_TICKET, &request, &within(5))
        });
        assert_eq!(answer.err().unwrap().code(), Code::Unavailable);
    }
    let plain = TcpStream::connect(join.local_addr()).unwrap();
    (&plain)
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
        .unwrap();
    let mut answer = vec![];
    plain
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    // An alert, a reset or nothing, but not HTTP/2.
    let _ = (&plain).read_to_end(&mut answer);
    assert!(answer.first().is_none_or(|byte| *byte == 21), "{answer:?}");
    assert!(rejoin(join.local_addr(), UUID).is_ok());
}

#[test]
fn a_key_service_that_is_down_is_a_passing_failure_and_its_return_is_noticed() {
    let mut keys = key_service("127.0.0.1:0");
    let join = join_service(&keys.address.to_string());
    assert!(rejoin(join.local_addr(), UUID).is_ok());
    keys.program.terminate();
    keys.program.exit();
    for _ in 0..3 {
        let status = rejoin(join.local_addr(), UUID).err().unwrap();
        assert_eq!(status.code(), Code::Unavailable);
        assert!(!status.message().contains("127.0.0.1"), "{status}");
    }
    let _keys = key_service(&keys.address.to_string());
    thread::sleep(Duration::from_millis(1100));
    assert!(rejoin(join.local_addr(), UUID).is_ok());
}

#[test]
fn a_restart_of_the_key_service_between_two_tickets_goes_unnoticed() {
    let mut keys = key_service("127.0.0.1:0");
    let join = join_service(&keys.address.to_string());
    assert!(rejoin(join.local_addr(), UUID).is_ok());
    keys.program.terminate();
    keys.program.exit();
    let _keys = key_service(&keys.address.to_string());
    assert!(rejoin(join.local_addr(), UUID).is_ok());
}

#[test]
fn a_key_service_that_hangs_is_given_up_in_seconds() {
    let hanging = TcpListener::bind("127.0.0.1:0").unwrap();
    let join = join_service(&hanging.local_addr().unwrap().to_string());
    // the service answers before the node's own limit has passed, which is another code
    assert_eq!(
        rejoin(join.local_addr(), UUID).err().unwrap().code(),
        Code::Unavailable
    );
}

/// Starts a key service in plaintext that answers each request with this key.
fn key_server(key: impl Fn() -> Vec<u8> + Send + Sync + 'static) -> Server {
    let router = Router::new().unary(GET_DATA_KEY, move |_: &Call, _: GetDataKeyRequest| {
        Ok(GetDataKeyResponse { data_key: key() })
    });
    let plain = |socket: TcpStream, _: Instant| transport::plain::transport(socket);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    Server::start("keys", listener, Arc::new(plain), router, Limits::default()).unwrap()
}

#[test]
fn a_key_of_the_wrong_length_is_a_permanent_failure_without_details() {
    let keys = key_server(|| crypto::random::<16>().to_vec());
    let join = join_service(&keys.local_addr().to_string());
    let status = rejoin(join.local_addr(), UUID).err().unwrap();
    assert_eq!(status.code(), Code::Internal);
    assert!(!status.message().contains("16"), "{status}");
}

#[test]
fn the_client_of_the_tests_is_refused_where_attestation_is_another() {
    // Checks that the client's check works: a server that accepts any client would pass the tests above.
    let tls = atls::Server::new(None, Some(verifier::judge(Arc::new(Never))));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = Server::start(
        "never",
        listener,
        Arc::new(tls),
        Router::new(),
        Limits::default(),
    )
    .unwrap();
    let socket = TcpStream::connect(server.local_addr()).unwrap();
    let answer = attested()
        .connect(socket, Instant::now() + Duration::from_secs(10))
        .map_err(|error| error.to_string())
        .and_then(|transport| {
            rpc::grpc::Channel::new(transport, "x").map_err(|status| status.to_string())
        })
        .and_then(|channel| {
            channel
                .unary::<_, IssueRejoinTicketResponse>(
                    "/x.Y/Z",
                    &IssueRejoinTicketRequest::default(),
                    &within(5),
                )
                .map_err(|status| format!("{:?}", status.code()))
        });
    assert_ne!(answer.err().unwrap(), "Unimplemented");
}

struct Never;

impl verifier::Validator for Never {
    fn properties(&self) -> verifier::Properties {
        verifier::Validator::properties(&Anybody)
    }

    fn challenge(
        &self,
        _: &verifier::MachineIdentity,
    ) -> Result<Option<verifier::CredentialChallenge>, verifier::Refusal> {
        Ok(None)
    }

    fn judge(&self, _: &verifier::Evidence<'_>) -> Result<verifier::Identified, verifier::Refusal> {
        Err(verifier::refusal::Kind::Unproven.because("never"))
    }

    fn of_connection(&self) -> Option<Arc<dyn verifier::Validator>> {
        None
    }
}

/// A policy in Constellation's format that any machine with 32 zeros in PCR 15 meets.
const POLICY: &str = r#"{"exceptions":["any-image"],"measurements":{"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false}}}"#;

fn join_program(dir: &TempDir, args: &[&str]) -> Command {
    let mut command = Command::new(support::program::built("join-service"));
    command.args([
        "--key-service-endpoint=127.0.0.1:1",
        "--key-service-auth=none",
    ]);
    command.args(["--listen", "127.0.0.1:0", "--config", "."]);
    command.args(args).current_dir(dir.path());
    command
}

#[test]
fn the_join_service_follows_its_policy_file_and_ends_on_sigterm() {
    let dir = tempfile::tempdir().unwrap();
    let policy = dir.path().join("attestationConfig");
    fs::write(&policy, POLICY).unwrap();
    // The old command line.
    let mut program = Program::start(&mut join_program(
        &dir,
        &[
            "--cloud-provider=qemu",
            "--attestation-variant=qemu-vtpm",
            "-v=0",
        ],
    ));
    let address = address(&program.expect("serving join requests"));
    let _half_open = TcpStream::connect(address).unwrap();
    fs::write(dir.path().join("new"), "{").unwrap();
    fs::rename(dir.path().join("new"), &policy).unwrap();
    program.expect("the old policy stays in force");
    fs::write(dir.path().join("new"), POLICY.replacen("00", "01", 1)).unwrap();
    fs::rename(dir.path().join("new"), &policy).unwrap();
    program.expect("a new policy is in force");
    let open = r#"{"measurements":{"4":{"expected":"VALUE"}}}"#.replace("VALUE", &"ab".repeat(32));
    fs::write(dir.path().join("new"), open).unwrap();
    fs::rename(dir.path().join("new"), &policy).unwrap();
    let taken = || program.output().matches("a new policy is in force").count();
    let end = Instant::now() + Duration::from_secs(20);
    while taken() < 2 {
        assert!(Instant::now() < end, "{}", program.output());
        std::thread::sleep(Duration::from_millis(50));
    }
    program.expect("any TPM is accepted");
    program.terminate();
    assert!(program.exit().success());
}

#[test]
fn a_join_service_that_cannot_work_does_not_start() {
    let dir = tempfile::tempdir().unwrap();
    let run = |command: &mut Command| {
        let output = command.output().unwrap();
        (
            output.status.code().unwrap(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    let (code, stderr) = run(&mut join_program(&dir, &[]));
    assert!(
        code == 1 && stderr.contains("attestationConfig"),
        "{code} {stderr}"
    );
    fs::write(dir.path().join("attestationConfig"), "nonsense").unwrap();
    let (code, stderr) = run(&mut join_program(&dir, &[]));
    assert!(
        code == 1 && stderr.contains("attestationConfig"),
        "{code} {stderr}"
    );
    let (code, stderr) = run(&mut join_program(
        &dir,
        &["--attestation-variant", "home-made"],
    ));
    assert!(code == 1 && stderr.contains("home-made"), "{code} {stderr}");
    let (code, stderr) = run(&mut Command::new(support::program::built("join-service")));
    assert!(
        code == 2 && stderr.contains("--key-service is missing"),
        "{code} {stderr}"
    );
}

/// Starts the join service's program with a key service at this address. Returns its own address, too.
fn join_program_with(dir: &TempDir, keys: SocketAddr) -> (Program, SocketAddr) {
    let keys = keys.to_string();
    let program = Program::start(&mut join_program(dir, &["--key-service", &keys]));
    let address = address(&program.expect("serving join requests"));
    (program, address)
}

/// Calls as a machine with this TPM.
fn rejoin_from(tpm: &Swtpm, address: SocketAddr) -> Result<IssueRejoinTicketResponse, Status> {
    rejoin_over(&channel_from(tpm, address)?)
}

fn rejoin_over(channel: &rpc::grpc::Channel) -> Result<IssueRejoinTicketResponse, Status> {
    let request = IssueRejoinTicketRequest {
        disk_uuid: UUID.into(),
    };
    channel.unary(ISSUE_REJOIN_TICKET, &request, &within(20))
}

/// Connects as a machine with this TPM.
fn channel_from(tpm: &Swtpm, address: SocketAddr) -> Result<rpc::grpc::Channel, Status> {
    let issuer = verifier::qemu_vtpm::issuer(tpm.location().parse().unwrap(), None);
    let client = atls::Client::new(Some(Arc::new(issuer)), None);
    let socket = TcpStream::connect(address).unwrap();
    let transport = client
        .connect(socket, Instant::now() + Duration::from_secs(20))
        .unwrap();
    rpc::grpc::Channel::new(transport, "x")
}

#[test]
fn sigterm_lets_a_ticket_that_is_being_made_come_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("attestationConfig"), POLICY).unwrap();
    let slow = TcpListener::bind("127.0.0.1:0").unwrap();
    let (mut program, join) = join_program_with(&dir, slow.local_addr().unwrap());
    let tpm = Swtpm::start();
    thread::scope(|scope| {
        let ticket = scope.spawn(|| rejoin_from(&tpm, join));
        // The call has reached the key service.
        let _held = slow.accept().unwrap();
        program.terminate();
        let status = ticket.join().unwrap().err().unwrap();
        assert_eq!(status.code(), Code::Unavailable);
        assert!(
            status.message().contains("try again"),
            "the service's own answer: {status}"
        );
        assert!(program.exit().success());
    });
}

/// The policy of an image whose PCR 11 has only the words of systemd.
fn policy_of_stages() -> String {
    let after = |words: &[&str]| {
        let value = words.iter().fold([0; 32], |value, word| {
            sha256(&[value, sha256(word.as_bytes())].concat())
        });
        value
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    let (initramfs, booted) = (after(&BOOT[..1]), after(BOOT));
    let zero = "00".repeat(32);
    format!(
        r#"{{"exceptions":["any-image"],"measurements":{{"11":"{booted}","15":"{zero}"}},"initramfs":{{"11":"{initramfs}"}}}}"#
    )
}

/// The words that systemd measures into PCR 11 during a boot.
const BOOT: &[&str] = &["enter-initrd", "leave-initrd", "sysinit", "ready"];

fn sha256(bytes: &[u8]) -> [u8; 32] {
    let digest = ring::digest::digest(&ring::digest::SHA256, bytes);
    digest.as_ref().try_into().unwrap()
}

#[test]
fn each_stage_of_a_boot_gets_its_own_ticket_only() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("attestationConfig"), policy_of_stages()).unwrap();
    let keys = key_server(|| vec![1; 32]);
    let (_join, address) = join_program_with(&dir, keys.local_addr());
    let tpm = Swtpm::start();
    // the measurements that systemd makes
    let measure = |words: &[&str]| {
        for word in words {
            let digest: String = sha256(word.as_bytes())
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect();
            tpm.tool("tpm2_pcrextend", &[&format!("11:sha256={digest}")]);
        }
    };
    let join_from = || -> Result<IssueJoinTicketResponse, Status> {
        let name = NodeName::from_machine("worker-0").unwrap();
        let kubelet = KubeletRequest::new(&name, "127.0.0.1".parse().unwrap()).unwrap();
        let request = IssueJoinTicketRequest {
            disk_uuid: UUID.into(),
            certificate_request: kubelet.der().to_vec(),
            host_public_key: ssh::host::host_key(dir.path()).unwrap().blob().to_vec(),
            ..IssueJoinTicketRequest::default()
        };
        channel_from(&tpm, address)?.unary(ISSUE_JOIN_TICKET, &request, &within(20))
    };

    measure(&BOOT[..1]);
    rejoin_from(&tpm, address).unwrap();
    let status = join_from().err().unwrap();
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    assert!(
        status.message().contains("attests itself as an initramfs"),
        "{status}"
    );

    measure(&BOOT[1..]);
    let status = rejoin_from(&tpm, address).err().unwrap();
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    assert!(
        status
            .message()
            .contains("attests itself as a booted system"),
        "{status}"
    );
    // the service has no cluster, so the ticket is refused later
    assert_eq!(join_from().err().unwrap().code(), Code::FailedPrecondition);
}

/// Two policies that the same machines meet.
const OTHER_POLICY: &str = r#"{"exceptions":["any-image"],"measurements":{"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false}},"name":"other"}"#;

#[test]
fn a_change_of_the_policy_ends_connections_and_calls_that_were_let_in_by_the_one_before() {
    let dir = tempfile::tempdir().unwrap();
    let set = |text: &str| {
        fs::write(dir.path().join("new"), text).unwrap();
        fs::rename(dir.path().join("new"), dir.path().join("attestationConfig")).unwrap();
    };
    set(POLICY);
    // The keys are available when the test says so.
    let (give, given) = std::sync::mpsc::channel::<()>();
    let (asked, is_asked) = std::sync::mpsc::channel::<()>();
    let (asked, given) = (std::sync::Mutex::new(asked), std::sync::Mutex::new(given));
    let keys = key_server(move || {
        asked.lock().unwrap().send(()).unwrap();
        given.lock().unwrap().recv().unwrap();
        vec![1; 32]
    });
    let (join, address) = join_program_with(&dir, keys.local_addr());
    let tpm = Swtpm::start();
    let channel = || channel_from(&tpm, address).unwrap();
    let (busy, idle) = (channel(), channel());
    // The keys of one ticket. The measurement secret is cached from then on.
    (0..2).for_each(|_| give.send(()).unwrap());
    assert!(rejoin_over(&idle).is_ok());
    (0..2).for_each(|_| is_asked.recv().unwrap());
    thread::scope(|scope| {
        let ticket = scope.spawn(|| rejoin_over(&busy));
        is_asked.recv_timeout(Duration::from_secs(10)).unwrap();
        set(OTHER_POLICY);
        join.expect("a new policy is in force");
        give.send(()).unwrap();
        let status = ticket.join().unwrap().err().unwrap();
        assert_eq!(
            (status.code(), status.retry_after()),
            (Code::Unavailable, Some(Duration::from_secs(1))),
            "{status}"
        );
        assert!(status.message().contains("policy changed"), "{status}");
    });
    join.expect("\"reason\":\"policy-changed\"");
    assert_eq!(
        rejoin_over(&idle).err().unwrap().code(),
        Code::Unavailable,
        "its machine has to prove itself anew"
    );
    give.send(()).unwrap();
    assert!(rejoin_over(&channel()).is_ok());
}

/// This takes as long as the limit; other tests of this program run at the same time.
#[test]
fn a_connection_to_the_join_service_stands_for_its_machine_for_a_minute() {
    let keys = key_service("127.0.0.1:0");
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("attestationConfig"), POLICY).unwrap();
    let (_join, address) = join_program_with(&dir, keys.address);
    let tpm = Swtpm::start();
    let channel = channel_from(&tpm, address).unwrap();
    let since = Instant::now();
    // This includes a client whose calls never pause for long.
    while rejoin_over(&channel).is_ok() {
        assert!(
            since.elapsed() < support::program::PATIENCE,
            "it stands for its machine for ever"
        );
        thread::sleep(Duration::from_secs(1));
    }
    assert!(
        since.elapsed() > Duration::from_secs(50),
        "{:?}",
        since.elapsed()
    );
    assert!(rejoin_from(&tpm, address).is_ok());
}

/// grpc.health.v1; 1 is SERVING. An empty request asks for the health of the server as a whole.
#[derive(Clone, PartialEq, prost::Message)]
struct HealthCheckResponse {
    #[prost(int32, tag = "1")]
    status: i32,
}

#[test]
fn join_service_tells_its_health_in_plaintext_and_gives_no_ticket_there() {
    let dir = tempfile::tempdir().unwrap();
    let policy = format!(
        r#"{{"exceptions":["any-image"],"measurements":{{"15":{{"expected":"{}"}}}}}}"#,
        "00".repeat(32)
    );
    fs::write(dir.path().join("attestationConfig"), policy).unwrap();
    let service = join_service::JoinService::start(join_service::Config {
        health: Some("127.0.0.1:0".parse().unwrap()),
        ..lone_config(dir.path())
    })
    .unwrap();
    let channel = plain_channel(service.health_addr().unwrap());
    let health: HealthCheckResponse = channel
        .unary(
            "/grpc.health.v1.Health/Check",
            &key_request("", 0),
            &within(5),
        )
        .unwrap();
    assert_eq!(health, HealthCheckResponse { status: 1 });
    let ticket: Result<IssueRejoinTicketResponse, _> = channel.unary(
        ISSUE_REJOIN_TICKET,
        &IssueRejoinTicketRequest {
            disk_uuid: UUID.into(),
        },
        &within(5),
    );
    assert_eq!(ticket.err().unwrap().code(), Code::Unimplemented);
    service.stop(Duration::from_secs(1));
    assert!(TcpStream::connect(service.health_addr().unwrap()).is_err());
}
