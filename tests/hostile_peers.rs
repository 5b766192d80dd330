//! Peers that mean harm, against a listening server in a process of its own: what they cost it in memory and threads, and
//! whether others are served meanwhile. The rules that they break one by one are in `src/h2/tests`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use firstlight::grpc::{Call, CallOptions, Channel, Code, Limits, Receiver, Router, Sender, Server, Status, Transport};
use firstlight::h2::{self, Connection, Indexing};
use firstlight::sys::process::raise_descriptor_limit;

const MIB: usize = 1 << 20;
/// What no attack on a server with the default limits may exceed: `buffered_bytes`, and as much again for all the rest.
const MOST_MEMORY: usize = 128 * MIB;
/// Far more than the attacks below need connections.
const MOST_THREADS: usize = 64;

#[derive(Clone, PartialEq, prost::Message)]
struct Blob {
    #[prost(bytes = "vec", tag = "1")]
    data: Vec<u8>,
    #[prost(uint32, tag = "2")]
    count: u32,
}

// ---- the server ----

/// The life of the child process; the parent ends it by closing its standard input.
#[test]
#[ignore = "the server of the other tests, which start it"]
fn child_server() {
    let Ok(connections) = std::env::var("HOSTILE_PEERS_CONNECTIONS") else { return };
    let connections: usize = connections.parse().unwrap();
    let _ = raise_descriptor_limit();
    let limits = Limits {
        connections,
        connections_per_peer: connections,
        handshake: Duration::from_secs(3),
        keepalive: Duration::from_secs(2),
        keepalive_timeout: Duration::from_secs(2),
        stall: Duration::from_secs(3),
        ..Limits::default()
    };
    let router = Router::new()
        .unary("/t.T/Echo", |_: &Call, request: Blob| Ok(request))
        .unary("/t.T/Panic", |_: &Call, _: Blob| -> Result<Blob, Status> { panic!("on purpose") })
        .unary("/t.T/Wait", |call: &Call, request: Blob| {
            call.wait_cancelled(Duration::from_millis(request.count.into()));
            Ok(request)
        })
        .server_streaming("/t.T/Endless", |_: &Call, request: Blob, responses: &mut Sender<Blob>| {
            loop {
                responses.send(&request)?;
            }
        })
        .client_streaming("/t.T/Ignore", |call: &Call, _: &mut Receiver<Blob>| {
            call.wait_cancelled(Duration::from_secs(60));
            Ok(Blob::default())
        });
    let accept = |socket: TcpStream, _: Instant| Transport::plain(socket);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = Server::start("target", listener, Arc::new(accept), router, limits).unwrap();
    println!("\nlistening on {}", server.local_addr());
    let _ = std::io::stdin().read(&mut [0]);
    server.stop(Duration::ZERO);
}

struct Target {
    process: Child,
    address: SocketAddr,
}

impl Target {
    fn start(connections: usize) -> Target {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_server", "--ignored", "--nocapture"])
            .env("HOSTILE_PEERS_CONNECTIONS", connections.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines().map(Result::unwrap);
        let address = lines.into_iter().find_map(|line| line.strip_prefix("listening on ").map(str::to_owned));
        Target { process, address: address.unwrap().parse().unwrap() }
    }

    fn connect(&self) -> TcpStream {
        let socket = TcpStream::connect(self.address).unwrap();
        socket.set_nodelay(true).unwrap();
        socket.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        socket
    }

    fn channel(&self) -> Channel {
        Channel::new(Transport::plain(self.connect()).unwrap(), "localhost").unwrap()
    }

    /// A number of /proc/PID/status; kilobytes where it says so.
    fn status(&self, name: &str) -> usize {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap().split_whitespace().next().unwrap().parse().unwrap()
    }

    /// Another client is served, and the server is of bounded size: at most `memory` bytes at any time so far.
    #[track_caller]
    fn is_well(&self, other: &Channel, memory: usize) {
        let request = Blob { data: vec![7; 1000], count: 1 };
        assert_eq!(other.unary("/t.T/Echo", &request, &within(20)), Ok(request));
        let (peak, threads) = (self.status("VmHWM") << 10, self.status("Threads"));
        assert!(peak < memory, "{} MiB resident at the peak", peak / MIB);
        assert!(threads < MOST_THREADS, "{threads} threads");
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // it may be gone, which the test that needed it has noticed
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn within(seconds: u64) -> CallOptions {
    CallOptions { timeout: Some(Duration::from_secs(seconds)), ..CallOptions::default() }
}

// ---- idle connections ----

/// As many as the limit of descriptors allows, 10 000 at most.
#[test]
fn ten_thousand_idle_connections_take_less_than_1_gib_and_no_thread_each() {
    let descriptors = raise_descriptor_limit().unwrap() as usize;
    let count = 10_000.min(descriptors.saturating_sub(200));
    let target = Target::start(count + 100);
    let other = target.channel();
    other.unary::<_, Blob>("/t.T/Echo", &Blob::default(), &within(20)).unwrap();
    let before = target.status("VmRSS") << 10;
    let hello = h2_client();
    let idle: Vec<TcpStream> = (0..count)
        .map(|_| {
            let mut socket = target.connect();
            socket.write_all(&hello).unwrap();
            socket
        })
        .collect();
    // each is answered: it is more than an accepted socket
    for mut socket in &idle {
        socket.read_exact(&mut [0; 9]).unwrap();
        socket.write_all(SETTINGS_ACK).unwrap();
    }
    let served = Instant::now();
    other.unary::<_, Blob>("/t.T/Echo", &Blob::default(), &within(20)).unwrap();
    let served = served.elapsed();
    let resident = target.status("VmRSS") << 10;
    let each = (resident - before) / count;
    let (peak, threads) = (target.status("VmHWM") << 10, target.status("Threads"));
    println!(
        "{count} connections: {each} bytes each, {} MiB at the peak, {threads} threads now, another client was served in {served:?}",
        peak / MIB
    );
    assert!(peak < 1 << 30, "{} MiB", peak / MIB);
    assert!(each < 64 << 10, "{each} bytes for each connection");
    assert!(threads < 1000, "{threads} threads");
}

const SETTINGS_ACK: &[u8] = &[0, 0, 0, 4, 1, 0, 0, 0, 0];

/// What a client says first.
fn h2_client() -> Vec<u8> {
    std::mem::take(Connection::client(h2::Limits::default()).output())
}
