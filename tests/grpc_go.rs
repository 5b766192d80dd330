//! Our client against grpc-go servers with different options: deadlines that they enforce themselves, a maximum connection age,
//! small limits, and GOAWAY to a client that sends too many PINGs. `tests/grpc_go` is the peer.

use std::net::TcpStream;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use rpc::grpc::{CallOptions, Channel, Code, Keepalive, Status};
use support::foreign::go_program;
use support::program::Peer;

#[derive(Clone, PartialEq, prost::Message)]
struct Blob {
    #[prost(bytes = "vec", tag = "1")]
    data: Vec<u8>,
}

fn start(args: &[&str]) -> Peer {
    let program = go_program("grpc_go", env!("CARGO_TARGET_TMPDIR"));
    Peer::start(Command::new(program).args(args))
}

fn connect(peer: &Peer) -> Channel {
    let socket = TcpStream::connect(peer.address).unwrap();
    let transport = transport::plain::transport(socket).unwrap();
    Channel::new(transport, &peer.address.to_string()).unwrap()
}

fn within(timeout: Duration) -> CallOptions {
    CallOptions {
        timeout: Some(timeout),
        ..CallOptions::default()
    }
}

fn echo(channel: &Channel, options: &CallOptions) -> Result<(), Status> {
    let request = Blob {
        data: b"hello".to_vec(),
    };
    channel
        .unary("/test.Go/Echo", &request, options)
        .map(|answer: Blob| assert_eq!(answer, request))
}

fn soon() -> CallOptions {
    within(Duration::from_secs(30))
}

/// The server ends such a call with RST_STREAM (CANCEL) at about the same time as the client gives
/// up.
#[test]
fn a_late_call_is_deadline_exceeded_on_whichever_side_it_ends() {
    let peer = start(&[]);
    let channel = connect(&peer);
    for round in 0..60 {
        let options = within(Duration::from_millis(10 + round % 7));
        let status = channel
            .unary::<_, Blob>("/test.Go/Wait", &Blob::default(), &options)
            .unwrap_err();
        assert_eq!(status.code(), Code::DeadlineExceeded, "{round}: {status}");
    }
    echo(&channel, &soon()).unwrap();
}

#[test]
fn at_the_maximum_connection_age_a_call_is_answered_or_can_be_retried() {
    let peer = start(&["-age=200ms"]);
    let mut channel = connect(&peer);
    let (mut connections, begun) = (1, Instant::now());
    while connections < 4 {
        assert!(
            begun.elapsed() < Duration::from_secs(30),
            "no connection ends"
        );
        if let Err(status) = echo(&channel, &soon()) {
            assert!(status.is_unprocessed(), "{status}");
            assert!(status.message().contains("NO_ERROR"), "{status}");
            channel = connect(&peer);
            echo(&channel, &soon()).unwrap();
            connections += 1;
        }
    }
}

#[test]
fn the_first_call_already_respects_the_servers_limits() {
    let peer = start(&["-headers=600", "-streams=1"]);
    for _ in 0..5 {
        let channel = connect(&peer);
        let mut large = soon();
        large.metadata.insert("x-large", &"x".repeat(1000)).unwrap();
        let status = echo(&channel, &large).unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(
            status.message().contains("exceeds the server's limit"),
            "{status}"
        );
        let channel = connect(&peer);
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| echo(&channel, &soon()).unwrap());
            }
        });
    }
}

#[test]
fn the_error_has_the_text_of_the_servers_goaway() {
    let peer = start(&[]);
    let socket = transport::plain::transport(TcpStream::connect(peer.address).unwrap()).unwrap();
    // The server's enforcement policy allows one PING in five minutes.
    let hasty = Keepalive {
        every: Duration::from_millis(50),
        timeout: Duration::from_secs(20),
    };
    let channel = Channel::with_keepalive(socket, &peer.address.to_string(), hasty).unwrap();
    let status = channel
        .unary::<_, Blob>("/test.Go/Wait", &Blob::default(), &soon())
        .unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(
        status
            .message()
            .contains("GOAWAY (ENHANCE_YOUR_CALM, \"too_many_pings\")"),
        "{status}"
    );
}
