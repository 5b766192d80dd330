//! Attested TLS with peers of another implementation: a Go program (`tests/atls_go`) that follows Constellation's rules with
//! Go's own TLS, in both roles.
//!
//! The program is built once for each run. It uses only the standard library, so it needs only a Go toolchain (1.19 or newer).
//! Go peers offer the post-quantum key exchange X25519MLKEM768 besides X25519 if their version supports it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

// the included file uses this name
use atls::{Client, Error, Server};
use support::foreign::go_program;
use support::program::Peer;
use transport::Transport;
use verifier::{DocumentRequest, IssueError, Issuer, Oid, PeerRole, Validator};

#[path = "../src/atls/tests/dummy.rs"]
mod dummy;
use dummy::{Dummy, OID, OTHER_OID};

const TIME: Duration = Duration::from_secs(30);

/// The modes: which sides attest themselves.
const MODES: [&str; 4] = ["server", "client", "mutual", "none"];

fn go_peer() -> PathBuf {
    go_program("atls_go", env!("CARGO_TARGET_TMPDIR"))
}

fn go(role: &str, args: &[&str]) -> Command {
    let mut command = Command::new(go_peer());
    // the default since Go 1.24, which an older version in go.mod turns off
    command
        .arg(role)
        .args(args)
        .env("GODEBUG", "tlsmlkem=1")
        .stdout(Stdio::piped());
    command
}

/// Starts a Go server. It ends when dropped.
fn go_server(args: &[&str]) -> Peer {
    Peer::start(&mut go("server", args))
}

/// Runs a Go client. Returns whether it succeeded, and its output.
fn go_client(address: SocketAddr, args: &[&str]) -> (bool, String) {
    let output = go("client", args)
        .arg(format!("-addr={address}"))
        .output()
        .unwrap();
    (
        output.status.success(),
        String::from_utf8_lossy(&output.stdout).into_owned(),
    )
}

fn issuer(is_there: bool) -> Option<Arc<dyn Issuer>> {
    is_there.then(|| Arc::new(Dummy(OID)) as _)
}

fn validators(are_there: bool) -> Vec<Arc<dyn Validator>> {
    let all: Option<Arc<dyn Validator>> = are_there.then(|| Arc::new(Dummy(OID)) as _);
    all.into_iter().collect()
}

fn server_for(mode: &str) -> Server {
    let issuer = issuer(matches!(mode, "server" | "mutual"));
    let validators = validators(matches!(mode, "client" | "mutual"));
    Server::new(issuer, verifier::judge_of_any(validators))
}

fn client_for(mode: &str) -> Client {
    let issuer = issuer(matches!(mode, "client" | "mutual"));
    let validators = validators(matches!(mode, "server" | "mutual"));
    Client::new(issuer, verifier::judge_of_any(validators))
}

/// Serves `count` connections one after the other, as the Go server does. Returns the result of each.
fn serve(server: Server, count: usize) -> (SocketAddr, JoinHandle<Vec<Result<(), Error>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let thread = thread::spawn(move || {
        let mut ends = Vec::new();
        for _ in 0..count {
            let (socket, _) = listener.accept().unwrap();
            ends.push(server.handshake(socket, Instant::now() + TIME).map(echo));
        }
        ends
    });
    (address, thread)
}

/// Sends back a line. The client checks whether it receives the line.
fn echo(mut transport: Transport) {
    transport.socket.set_read_timeout(Some(TIME)).unwrap();
    let mut line = String::new();
    let mut reader = BufReader::new(&mut transport.reader);
    if reader.read_line(&mut line).is_ok() {
        let _ = transport
            .writer
            .write_all(format!("echo {line}").as_bytes());
    }
}

/// Sends a line and reads the answer.
fn ask(transport: &mut Transport) -> std::io::Result<()> {
    transport.socket.set_read_timeout(Some(TIME)).unwrap();
    transport.writer.write_all(b"hello\n")?;
    let mut line = String::new();
    BufReader::new(&mut transport.reader).read_line(&mut line)?;
    assert_eq!(line, "echo hello\n");
    Ok(())
}

fn connect(client: &Client, server: &Peer) -> Result<Transport, Error> {
    let socket = TcpStream::connect(server.address).unwrap();
    client.connect(socket, Instant::now() + TIME)
}

// A Go client and our server

#[test]
fn a_go_client_is_served_in_every_mode() {
    for mode in MODES {
        let (address, served) = serve(server_for(mode), 1);
        let (content, said) = go_client(address, &[&format!("-mode={mode}")]);
        assert!(content, "{mode}: {said}");
        assert!(said.contains("alpn h2\n"), "{mode}: {said}");
        assert!(served.join().unwrap()[0].is_ok());
    }
}

#[test]
fn a_go_client_is_served_whatever_its_key_exchange() {
    for curve in ["x25519", "p256", "p384", "retry"] {
        for mode in ["server", "mutual"] {
            let (address, served) = serve(server_for(mode), 1);
            let args = [format!("-mode={mode}"), format!("-curve={curve}")];
            let (content, said) = go_client(address, &args.each_ref().map(String::as_str));
            assert!(content, "{args:?}: {said}; {:?}", served.join());
            assert!(served.join().unwrap()[0].is_ok());
        }
    }
}

/// Returns whether this machine's Go, of 1.24 or newer, has the key exchange X25519MLKEM768.
fn go_has_ml_kem() -> bool {
    let output = go("client", &["-curve=mlkem", "-addr=127.0.0.1:1"]).output();
    let has = output.unwrap().status.code() != Some(3);
    if !has {
        println!("not tested: this machine's Go has no X25519MLKEM768");
    }
    has
}

#[test]
fn x25519mlkem768_works_with_go_in_both_directions() {
    if !go_has_ml_kem() {
        return;
    }
    for mode in ["server", "mutual"] {
        let mode = format!("-mode={mode}");
        for _ in 0..20 {
            let (address, served) = serve(server_for(&mode[6..]), 1);
            let (content, said) = go_client(address, &[&mode, "-curve=mlkem"]);
            assert!(content, "{mode}: {said}; {:?}", served.join());
            let server = go_server(&[&mode, "-curve=mlkem"]);
            ask(&mut connect(&client_for(&mode[6..]), &server).unwrap()).unwrap();
        }
    }
    // Our client sends both shares, the hybrid one first.
    let server = go_server(&["-mode=mutual"]);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = seen.clone();
    let between = tamper(server.address, move |hello| {
        sink.lock().unwrap().extend_from_slice(hello)
    });
    drop(client_for("mutual").connect(TcpStream::connect(between).unwrap(), Instant::now() + TIME));
    let hello = seen.lock().unwrap();
    // key_share: X25519MLKEM768 with 1216 bytes, then X25519 with 32.
    assert!(
        hello
            .windows(4)
            .any(|bytes| bytes == [0x11, 0xec, 0x04, 0xc0])
    );
    assert!(
        hello
            .windows(4)
            .any(|bytes| bytes == [0x00, 0x1d, 0x00, 0x20])
    );
}

#[test]
fn a_go_client_is_served_however_its_client_hello_is_split() {
    for size in [100, 7, 1, 4, 5] {
        let (address, served) = serve(server_for("mutual"), 1);
        let args = ["-mode=mutual".into(), format!("-fragment={size}")];
        let (content, said) = go_client(address, &args.each_ref().map(String::as_str));
        assert!(content, "{args:?}: {said}");
        assert!(served.join().unwrap()[0].is_ok());
    }
}

#[test]
fn a_go_client_is_served_whatever_protocols_it_offers() {
    for (offer, chosen) in [
        ("http/1.1,h2", "alpn h2\n"),
        ("h2", "alpn h2\n"),
        ("http/1.1", "alpn http/1.1\n"),
        ("", "alpn \n"),
    ] {
        let (address, served) = serve(server_for("mutual"), 1);
        let (content, said) = go_client(address, &["-mode=mutual", &format!("-alpn={offer}")]);
        assert!(content && said.contains(chosen), "{offer}: {said}");
        assert!(served.join().unwrap()[0].is_ok());
    }
    let (address, served) = serve(server_for("mutual"), 1);
    assert!(!go_client(address, &["-mode=mutual", "-alpn=spdy/3"]).0);
    assert!(matches!(
        served.join().unwrap()[0],
        Err(Error::Incompatible(_))
    ));
}

#[test]
fn many_go_clients_are_served_with_nonces_of_every_form() {
    let (address, served) = serve(server_for("mutual"), 200);
    let (content, said) = go_client(address, &["-mode=mutual", "-n=200"]);
    assert!(content, "{said}");
    assert!(served.join().unwrap().iter().all(Result::is_ok));
}

/// Faults of the Go peer, each with the reason that our side gets.
const FAULTS: [(&str, &str); 5] = [
    ("-bad-nonce", "for another nonce"),
    ("-bad-key", "for another key"),
    ("-no-issuer", "got no document"),
    (
        "-issue-oid=1.3.9900.1.2",
        "expected OID 06052bcd2c0101, got 06052bcd2c0102",
    ),
    ("-critical", "a critical extension that is not known"),
];

/// The client must receive an alert and nothing else.
#[test]
fn a_go_client_that_does_not_prove_itself_is_refused() {
    let of_clients = [
        ("-client-eku", "for another use (extended key usage)"),
        ("-first-oid=1.3.9900.1.1", "no Nonce"),
    ];
    for (flag, expected) in FAULTS.into_iter().chain(of_clients) {
        // Go cannot make a certificate with two extensions of one OID
        let mode = if flag.starts_with("-first-oid") {
            "-no-issuer"
        } else {
            "-mode=client"
        };
        let (address, served) = serve(server_for("client"), 1);
        let (content, said) = go_client(address, &["-mode=client", mode, flag]);
        assert!(
            !content && said.contains("remote error: tls: access denied"),
            "{flag}: {said}"
        );
        let end = served.join().unwrap().remove(0).unwrap_err();
        let reason = end.refused().unwrap_or_else(|| panic!("{flag}: {end}"));
        assert!(reason.to_string().contains(expected), "{flag}: {reason}");
    }
}

/// If the server closed the connection at once, the client's data would cause a reset, and the client would not receive the alert.
#[test]
fn a_refused_go_client_receives_the_alert_even_if_it_writes_before_it_reads() {
    for _ in 0..5 {
        let (address, served) = serve(server_for("client"), 1);
        let (_, said) = go_client(
            address,
            &["-mode=client", "-tls=1.3", "-bad-nonce", "-chatty"],
        );
        assert!(said.contains("remote error: tls: access denied"), "{said}");
        assert!(served.join().unwrap()[0].is_err());
    }
}

#[test]
fn a_go_client_without_a_certificate_is_refused() {
    // mode none: the Go client answers with an empty certificate, as Constellation's client without issuer does
    let (address, served) = serve(server_for("client"), 1);
    assert!(!go_client(address, &["-mode=none"]).0);
    let end = served.join().unwrap().remove(0).unwrap_err();
    assert!(end.refused().is_some(), "{end}");
}

#[test]
fn a_go_client_without_a_usable_nonce_is_refused_by_an_issuer_and_accepted_by_a_server_without() {
    for flag in [
        "-no-sni",
        "-sni=node.example.com",
        "-sni=QUJD",
        "-sni=not base64!",
    ] {
        let (address, served) = serve(server_for("mutual"), 1);
        let (content, said) = go_client(address, &["-mode=mutual", flag]);
        assert!(
            !content && said.contains("remote error: tls: illegal parameter"),
            "{flag}: {said}"
        );
        assert!(
            matches!(served.join().unwrap()[0], Err(Error::Misbehaved(_))),
            "{flag}"
        );

        let (address, served) = serve(server_for("client"), 1);
        let (content, said) = go_client(address, &["-mode=client", flag]);
        assert!(content, "{flag}: {said}");
        assert!(served.join().unwrap()[0].is_ok());
    }
}

/// Four hours are more than the two for which Constellation's certificates are valid.
#[test]
fn a_go_peer_is_accepted_whatever_its_clock_says() {
    for age in ["-age=4h", "-age=-4h", "-age=490000h"] {
        let (address, served) = serve(server_for("client"), 1);
        let (content, said) = go_client(address, &["-mode=client", age]);
        assert!(content, "{age}: {said}");
        assert!(served.join().unwrap()[0].is_ok());
        let server = go_server(&["-mode=server", age]);
        ask(&mut connect(&client_for("server"), &server).unwrap()).unwrap();
    }
}

#[test]
fn an_unrelated_extension_before_the_document_is_ignored() {
    let (address, served) = serve(server_for("client"), 1);
    let (content, said) = go_client(address, &["-mode=client", "-first-oid=1.3.9900.77.1"]);
    assert!(content, "{said}");
    assert!(served.join().unwrap()[0].is_ok());
}

#[test]
fn a_go_client_with_only_tls12_is_refused() {
    let (address, served) = serve(server_for("server"), 1);
    let (content, said) = go_client(address, &["-mode=server", "-tls=1.2"]);
    assert!(!content && said.contains("protocol version"), "{said}");
    assert!(matches!(
        served.join().unwrap()[0],
        Err(Error::Incompatible(_))
    ));
}

#[test]
fn a_go_client_and_our_server_exchange_megabytes_in_both_directions_at_once() {
    const SIZE: usize = 16 << 20;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let served = thread::spawn(move || {
        let transport = server_for("mutual")
            .handshake(listener.accept().unwrap().0, Instant::now() + TIME)
            .unwrap();
        transport.socket.set_read_timeout(Some(TIME)).unwrap();
        let Transport {
            mut reader,
            mut writer,
            ..
        } = transport;
        std::io::copy(&mut reader, &mut writer)
    });
    let args = ["-mode=mutual".into(), format!("-bytes={SIZE}")];
    let (content, said) = go_client(address, &args.each_ref().map(String::as_str));
    assert!(content, "{said}");
    // the Go client ends with close_notify, which the reader sees as the end, not as an error
    assert_eq!(served.join().unwrap().unwrap(), SIZE as u64);
}

// Our client and a Go server

#[test]
fn a_go_server_is_reached_in_every_mode() {
    for mode in MODES {
        let server = go_server(&[&format!("-mode={mode}")]);
        let mut transport =
            connect(&client_for(mode), &server).unwrap_or_else(|e| panic!("{mode}: {e}"));
        ask(&mut transport).unwrap_or_else(|e| panic!("{mode}: {e}"));
    }
}

#[test]
fn a_go_server_is_reached_after_a_hello_retry_request_and_with_other_protocols() {
    for args in [
        ["-mode=mutual", "-curve=p384"],
        ["-mode=mutual", "-alpn=h2"],
        ["-mode=mutual", "-alpn="],
    ] {
        let server = go_server(&args);
        ask(&mut connect(&client_for("mutual"), &server).unwrap()).unwrap();
    }
}

#[test]
fn a_go_server_is_reached_many_times() {
    let server = go_server(&["-mode=mutual"]);
    let client = client_for("mutual");
    for _ in 0..100 {
        ask(&mut connect(&client, &server).unwrap()).unwrap();
    }
}

#[test]
fn a_go_server_that_does_not_prove_itself_is_refused() {
    for (flag, text) in FAULTS {
        let server = go_server(&["-mode=server", flag]);
        let error = connect(&client_for("server"), &server).err().expect(flag);
        let reason = error.refused().unwrap_or_else(|| panic!("{flag}: {error}"));
        assert!(reason.to_string().contains(text), "{flag}: {reason}");
    }
}

#[test]
fn a_client_without_validators_ignores_the_server_s_clock() {
    let server = go_server(&["-mode=client", "-age=1000h"]);
    ask(&mut connect(&client_for("client"), &server).unwrap()).unwrap();
}

#[test]
fn a_refusal_by_a_go_server_is_reported() {
    let wrong: Client = Client::new(Some(Arc::new(Dummy(OTHER_OID))), None);
    // the first read fails
    let server = go_server(&["-mode=client"]);
    for client in [&wrong, &client_for("none")] {
        let error = ask(&mut connect(client, &server).unwrap()).unwrap_err();
        let error = error
            .get_ref()
            .and_then(|error| error.downcast_ref::<Error>())
            .expect("an error of attested TLS");
        assert!(matches!(error, Error::PeerRefused(_)), "{error}");
        assert!(error.to_string().contains("attestation"), "{error}");
    }
}

#[test]
fn a_go_server_with_only_tls12_is_refused() {
    let server = go_server(&["-mode=server", "-tls=1.2"]);
    let error = connect(&client_for("server"), &server).err().unwrap();
    assert!(matches!(error, Error::PeerRefused(_)), "{error}");
}

#[test]
fn a_long_document_is_transferred_in_both_directions() {
    let server = go_server(&["-mode=server", "-pad=60000"]);
    ask(&mut connect(&client_for("server"), &server).unwrap()).unwrap();
    let (address, served) = serve(server_for("client"), 1);
    let (content, said) = go_client(address, &["-mode=client", "-pad=60000"]);
    assert!(content, "{said}");
    assert!(served.join().unwrap()[0].is_ok());
}

// An attacker on the path

/// Forwards one connection, and applies `change` to the first bytes of the client (its ClientHello).
fn tamper(server: SocketAddr, change: impl Fn(&mut [u8]) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let mut client = listener.accept().unwrap().0;
        let mut server = TcpStream::connect(server).unwrap();
        let mut hello = vec![0; 16 << 10];
        let len = client.read(&mut hello).unwrap();
        hello.truncate(len);
        change(&mut hello);
        server.write_all(&hello).unwrap();
        let (mut from_server, mut to_client) =
            (server.try_clone().unwrap(), client.try_clone().unwrap());
        let back = thread::spawn(move || {
            let _ = std::io::copy(&mut from_server, &mut to_client);
            let _ = to_client.shutdown(Shutdown::Write);
        });
        let _ = std::io::copy(&mut client, &mut server);
        let _ = server.shutdown(Shutdown::Write);
        back.join().unwrap();
    });
    address
}

/// Returns the offset of the server_name extension in the ClientHello record. Its value is base64 of 44 characters.
fn server_name_at(hello: &[u8]) -> usize {
    let lengths = [0x00, 0x00, 0x00, 0x31, 0x00, 0x2f, 0x00, 0x00, 0x2c];
    hello
        .windows(lengths.len())
        .position(|window| window == lengths)
        .expect("a nonce of 44 characters")
}

fn flip_nonce(hello: &mut [u8]) {
    let at = server_name_at(hello) + 9 + 20;
    hello[at] = if hello[at] == b'A' { b'B' } else { b'A' };
}

fn rename_server_name(hello: &mut [u8]) {
    let at = server_name_at(hello);
    hello[at..at + 2].copy_from_slice(&[0xff, 0x53]);
}

/// Changes the extension's type to an unassigned one, so that the server sees no nonce.
fn hide_server_name(hello: &mut [u8]) {
    let at = server_name_at(hello);
    hello[at..at + 2].copy_from_slice(&[0xff, 0x54]);
}

#[test]
fn a_changed_client_hello_of_a_go_client_ends_the_handshake_at_our_server() {
    for (mode, change) in [
        ("none", flip_nonce as fn(&mut [u8])),
        ("none", rename_server_name),
        ("none", hide_server_name),
        ("client", flip_nonce),
        ("client", hide_server_name),
        ("mutual", flip_nonce),
    ] {
        let (address, served) = serve(server_for(mode), 1);
        let address = tamper(address, change);
        let (content, said) = go_client(address, &[&format!("-mode={mode}")]);
        assert!(!content, "{mode}: {said}");
        assert!(served.join().unwrap()[0].is_err(), "{mode}");
    }
}

#[test]
fn a_changed_client_hello_of_ours_ends_the_handshake_at_a_go_server() {
    for change in [flip_nonce as fn(&mut [u8]), hide_server_name] {
        let server = go_server(&["-mode=none"]);
        let socket = TcpStream::connect(tamper(server.address, change)).unwrap();
        assert!(
            client_for("none")
                .connect(socket, Instant::now() + TIME)
                .is_err()
        );
    }
}

// The strong form, with an implementation in Go that was written from docs/protocol.md

#[test]
fn the_strong_form_meets_another_implementation_in_every_mode_and_direction() {
    for mode in MODES {
        let (address, served) = serve(server_for(mode).require_strong(), 1);
        let (content, said) = go_client(address, &[&format!("-mode={mode}"), "-strong"]);
        assert!(content, "{mode}: {said}");
        assert!(
            said.contains("alpn firstlight-attested/1\n"),
            "{mode}: {said}"
        );
        served.join().unwrap().remove(0).unwrap();

        let server = go_server(&[&format!("-mode={mode}"), "-strong"]);
        let client = client_for(mode).require_strong();
        ask(&mut connect(&client, &server).unwrap()).unwrap();
    }
}

/// The evidence of a host for the pod of a join service.
struct OfHost;

impl Issuer for OfHost {
    fn oid(&self) -> Oid {
        OID
    }

    fn issue(&self, _: &[u8], _: &[u8]) -> Result<Vec<u8>, IssueError> {
        Err(IssueError::new("only the strong form"))
    }

    fn prove(&self, request: &DocumentRequest<'_>) -> Result<Vec<u8>, IssueError> {
        let role = PeerRole::JoinService;
        Dummy(OID).prove(&DocumentRequest { role, ..*request })
    }
}

#[test]
fn a_join_service_and_another_server_of_the_same_machine_are_told_apart() {
    let server = || Server::new(None, None).attest_strong(Arc::new(OfHost));
    let (address, served) = serve(server(), 1);
    let (content, said) = go_client(address, &["-mode=server", "-strong", "-join-service"]);
    assert!(content, "{said}");
    served.join().unwrap().remove(0).unwrap();
    let (address, served) = serve(server(), 1);
    let (content, said) = go_client(address, &["-mode=server", "-strong"]);
    assert!(!content && said.contains("another connection"), "{said}");
    drop(served.join());

    type Kind = fn(Client) -> Client;
    let kinds: [(Kind, [&str; 2]); 3] = [
        (
            |client| client,
            ["", "is that of a join service, expected that of a server"],
        ),
        (
            Client::to_join_service,
            ["is that of a server, expected that of a join service", ""],
        ),
        (Client::to_any_server, ["", ""]),
    ];
    for (kind, refusals) in kinds {
        for (flag, refusal) in ["-join-service=false", "-join-service"]
            .into_iter()
            .zip(refusals)
        {
            let go = go_server(&["-mode=server", "-strong", flag]);
            let client = kind(client_for("server")).require_strong();
            match (connect(&client, &go), refusal) {
                (Ok(mut transport), "") => ask(&mut transport).unwrap(),
                (Ok(_), _) => panic!("{flag}: accepted, expected: {refusal}"),
                (Err(error), _) => {
                    let why = error.refused().unwrap_or_else(|| panic!("{flag}: {error}"));
                    let is_expected = !refusal.is_empty() && why.to_string().ends_with(refusal);
                    assert!(is_expected, "{flag}: {why}");
                }
            }
        }
    }
}

#[test]
fn a_peer_that_proves_something_else_is_refused_in_the_strong_form() {
    for (flag, text) in [
        ("-bad-nonce", "for another nonce"),
        ("-bad-key", "for another connection"),
        ("-no-issuer", "it sent no"),
        (
            "-issue-oid=1.3.9900.1.2",
            "expected OID 06052bcd2c0101, got 06052bcd2c0102",
        ),
    ] {
        let server = go_server(&["-mode=server", "-strong", flag]);
        let error = connect(&client_for("server"), &server).err().expect(flag);
        let reason = error.refused().unwrap_or_else(|| panic!("{flag}: {error}"));
        assert!(reason.to_string().contains(text), "{flag}: {reason}");

        let (address, served) = serve(server_for("client"), 1);
        let (content, said) = go_client(address, &["-mode=client", "-strong", flag]);
        assert!(!content && said.contains("alert 49"), "{flag}: {said}");
        let error = served.join().unwrap().remove(0).unwrap_err();
        let reason = error.refused().unwrap_or_else(|| panic!("{flag}: {error}"));
        assert!(reason.to_string().contains(text), "{flag}: {reason}");
    }
}
