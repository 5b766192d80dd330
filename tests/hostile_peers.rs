//! Hostile peers against a server in a process of its own: how much memory and how many threads they cost the server, and whether
//! it serves other clients at the same time. `src/rpc/h2/tests` breaks the rules of HTTP/2 one by one.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rpc::grpc::{
    Call, CallOptions, Channel, Code, Limits, Receiver, Router, Sender, Server, Status,
};
use rpc::h2::{self, Connection, Indexing};
use socket2::{Domain, Socket, Type};
use sys::keeping::WipingAllocator;
use sys::process::raise_descriptor_limit;
use transport::{Accept, Transport};
use unlock::recovery;

/// That of the services, whose memory the tests measure.
#[global_allocator]
static ALLOCATOR: WipingAllocator = WipingAllocator::new();

const MIB: usize = 1 << 20;
/// Maximum memory in bytes, beyond the idle server's, that an attack may cost a server with the
/// default limits, and a server with the limits of a machine in its initramfs.
const MOST_MEMORY: usize = 64 * MIB;
const MOST_MEMORY_IN_INITRAMFS: usize = 16 * MIB;
/// Maximum number of bytes that the kernel may hold for a connection whose peer does not read.
const MOST_IN_KERNEL: usize = 128 << 10;
/// Maximum number of threads. A connection holds a thread only while bytes arrive, or for a second
/// while it ends.
const MOST_THREADS: usize = CONNECTIONS - 20;

/// Number of connections that the target of an attack allows.
const CONNECTIONS: usize = 200;

#[derive(Clone, PartialEq, prost::Message)]
struct Blob {
    #[prost(bytes = "vec", tag = "1")]
    data: Vec<u8>,
    #[prost(uint32, tag = "2")]
    count: u32,
}

/// A message like a list of the components of Kubernetes.
#[derive(Clone, PartialEq, prost::Message)]
struct List {
    #[prost(message, repeated, tag = "1")]
    entries: Vec<Entry>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Entry {
    #[prost(string, repeated, tag = "1")]
    texts: Vec<String>,
    #[prost(message, optional, tag = "2")]
    blob: Option<Blob>,
}

// ---- the server ----

/// The main function of the child process. The parent ends it by closing its standard input.
#[test]
#[ignore = "the server of the other tests, which start it"]
fn child_server() {
    let Ok(connections) = std::env::var("HOSTILE_PEERS_CONNECTIONS") else {
        return;
    };
    let connections: usize = connections.parse().unwrap();
    let _ = raise_descriptor_limit();
    // On a busy machine a client may get no processor time for a while. The server must not take it for a lost client.
    let is_tls = std::env::var_os("HOSTILE_PEERS_TLS").is_some();
    let limits = match std::env::var_os("HOSTILE_PEERS_INITRAMFS") {
        Some(_) => recovery::limits(),
        None if std::env::var_os("HOSTILE_PEERS_DEFAULT").is_some() => Limits::default(),
        None => {
            let half_open = Limits::default().half_open.max(connections / 2);
            Limits {
                connections,
                connections_per_peer: connections,
                half_open,
                ..Limits::default()
            }
        }
    };
    // Refusals are the fastest way to fill the output of a server.
    let resets = match std::env::var_os("HOSTILE_PEERS_REFUSE_ALL") {
        Some(_) => h2::Allowance {
            burst: u32::MAX,
            per_second: 1,
        },
        None => limits.resets,
    };
    let limits = Limits {
        resets,
        handshake: Duration::from_secs(if connections > CONNECTIONS || is_tls {
            60
        } else {
            3
        }),
        keepalive_timeout: Duration::from_secs(60),
        stall: Duration::from_secs(if connections == Limits::default().connections {
            60
        } else {
            3
        }),
        ..limits
    };
    let router = Router::new()
        .unary("/t.T/Echo", |_: &Call, request: Blob| Ok(request))
        .unary("/t.T/Large", |_: &Call, _: Blob| {
            Ok(Blob {
                data: vec![7; MIB],
                count: 0,
            })
        })
        .unary("/t.T/List", |_: &Call, _: List| Ok(Blob::default()))
        .unary("/t.T/Panic", |_: &Call, _: Blob| -> Result<Blob, Status> {
            panic!("on purpose")
        })
        .unary("/t.T/Wait", |call: &Call, request: Blob| {
            wait_cancelled(call, Duration::from_millis(request.count.into()));
            Ok(request)
        })
        .server_streaming(
            "/t.T/Endless",
            |_: &Call, request: Blob, responses: &mut Sender<Blob>| {
                loop {
                    responses.send(&request)?;
                }
            },
        )
        .client_streaming("/t.T/Ignore", |call: &Call, _: &mut Receiver<Blob>| {
            wait_cancelled(call, Duration::from_secs(60));
            Ok(Blob::default())
        });
    let plain = |socket: TcpStream, _: Instant| transport::plain::transport(socket);
    let accept: Arc<dyn Accept> = if is_tls {
        Arc::new(atls::Server::new(None, None))
    } else {
        Arc::new(plain)
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = Server::start("target", listener, accept, router, limits).unwrap();
    println!("\nlistening on {}", server.local_addr());
    let _ = std::io::stdin().read(&mut [0]);
    server.stop(Duration::ZERO);
}

/// Waits for `time`, or until the caller no longer waits.
fn wait_cancelled(call: &Call, time: Duration) {
    let until = Instant::now() + time;
    while !call.is_cancelled() && Instant::now() < until {
        thread::sleep(Duration::from_millis(50));
    }
}

struct Target {
    process: Child,
    /// Kept open as long as the process, because the test harness prints a line after one minute.
    _output: BufReader<ChildStdout>,
    address: SocketAddr,
    is_tls: bool,
    /// Resident bytes before any request.
    idle: usize,
}

impl Target {
    fn start(connections: usize) -> Target {
        Target::run(
            connections,
            &mut Command::new(std::env::current_exe().unwrap()),
        )
    }

    /// Starts a server that refuses any number of calls; `more` are variables of its environment.
    fn that_refuses_all(more: &[&str]) -> Target {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let variables = more.iter().chain(&["HOSTILE_PEERS_REFUSE_ALL"]);
        Target::run(CONNECTIONS, command.envs(variables.map(|name| (name, "1"))))
    }

    fn run(connections: usize, command: &mut Command) -> Target {
        let is_tls = command
            .get_envs()
            .any(|(name, _)| name == "HOSTILE_PEERS_TLS");
        let mut process = command
            .args(["--exact", "child_server", "--ignored", "--nocapture"])
            .env("HOSTILE_PEERS_CONNECTIONS", connections.to_string())
            // A backtrace would take more memory than anything else here.
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // The handlers panic on purpose.
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let lines = output.by_ref().lines().map(Result::unwrap);
        let address = lines
            .into_iter()
            .find_map(|line| line.strip_prefix("listening on ").map(str::to_owned));
        let address = address.unwrap().parse().unwrap();
        let mut target = Target {
            process,
            _output: output,
            address,
            is_tls,
            idle: 0,
        };
        target.idle = target.status("VmRSS") << 10;
        target
    }

    fn connect(&self) -> TcpStream {
        let socket = TcpStream::connect(self.address).unwrap();
        socket.set_nodelay(true).unwrap();
        socket
            .set_write_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        socket
    }

    /// Connects from another address of this machine, 127.0.0.`host`, with small buffers in the
    /// kernel.
    fn connect_from(&self, host: u8) -> TcpStream {
        self.connect_from_address(Ipv4Addr::new(127, 0, 0, host))
    }

    fn connect_from_address(&self, source: Ipv4Addr) -> TcpStream {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_recv_buffer_size(4 << 10).unwrap();
        socket.set_send_buffer_size(4 << 10).unwrap();
        socket.bind(&SocketAddr::from((source, 0)).into()).unwrap();
        socket.connect(&self.address.into()).unwrap();
        let socket = TcpStream::from(socket);
        socket
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        socket
    }

    fn transport(&self, socket: TcpStream) -> Transport {
        let deadline = Instant::now() + Duration::from_secs(60);
        if self.is_tls {
            atls::Client::new(None, None)
                .connect(socket, deadline)
                .unwrap()
        } else {
            transport::plain::transport(socket).unwrap()
        }
    }

    fn channel(&self) -> Channel {
        Channel::new(self.transport(self.connect()), "localhost").unwrap()
    }

    /// Returns a number of /proc/PID/status; kilobytes where the unit is kB.
    fn status(&self, name: &str) -> usize {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap()
            .split_whitespace()
            .next()
            .unwrap()
            .parse()
            .unwrap()
    }

    /// Asserts that another client is served, and that the peak memory is below `memory` bytes.
    #[track_caller]
    fn is_well(&self, other: &Channel, memory: usize) {
        let request = Blob {
            data: vec![7; 1000],
            count: 1,
        };
        let answer: Blob = other.unary("/t.T/Echo", &request, &within(60)).unwrap();
        assert!(answer == request);
        let (peak, threads) = (self.peak(), self.status("Threads"));
        assert!(peak < memory, "{} MiB at the peak, over idle", peak / MIB);
        assert!(threads < MOST_THREADS, "{threads} threads");
    }

    /// Returns the peak of resident bytes beyond those of the idle server.
    fn peak(&self) -> usize {
        (self.status("VmHWM") << 10).saturating_sub(self.idle)
    }

    /// Returns how many bytes the kernel holds at most for one connection, because the peer does not read them.
    fn most_in_kernel(&self) -> usize {
        let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
        let own_port = format!(":{:04X}", self.address.port());
        let sizes = table.lines().skip(1).filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (to_send, _received) = fields[4].split_once(':')?;
            let size = usize::from_str_radix(to_send, 16).unwrap();
            fields[1].ends_with(&own_port).then_some(size)
        });
        sizes.max().unwrap()
    }

    /// Asserts that the server refuses no call of a client while it is attacked, and that the client gets at least half the rate of
    /// a client whose server is not attacked. Both make calls in turns, so that other load on the machine affects both.
    #[track_caller]
    fn is_fair(&self, beside: &Channel, calm: &Channel) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let request = Blob {
            data: vec![7; 100],
            count: 1,
        };
        loop {
            let mut times = [vec![], vec![]];
            for _ in 0..100 {
                for (channel, times) in [calm, beside].into_iter().zip(&mut times) {
                    let asked = Instant::now();
                    assert_eq!(
                        channel.unary("/t.T/Echo", &request, &within(20)),
                        Ok(request.clone())
                    );
                    times.push(asked.elapsed());
                }
            }
            let [calm, beside] = times.map(|mut times| {
                times.sort();
                times[times.len() / 2]
            });
            println!(
                "a call takes {calm:?}, {beside:?} beside the attackers; {} KiB, {} threads",
                self.peak() >> 10,
                self.status("Threads")
            );
            if beside <= 2 * calm {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{beside:?} for a call, {calm:?} where nobody attacks"
            );
        }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // The process may be gone; the test that needed it has noticed that.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn within(seconds: u64) -> CallOptions {
    CallOptions {
        timeout: Some(Duration::from_secs(seconds)),
        ..CallOptions::default()
    }
}

// ---- idle connections ----

/// As many as the limit of descriptors allows, at most 10 000.
#[test]
fn ten_thousand_idle_connections_use_less_than_1_gib_and_few_threads() {
    let descriptors = raise_descriptor_limit().unwrap() as usize;
    let count = 10_000.min(descriptors.saturating_sub(200));
    let target = Target::start(count + 100);
    let other = target.channel();
    other
        .unary::<_, Blob>("/t.T/Echo", &Blob::default(), &within(20))
        .unwrap();
    let before = target.status("VmRSS") << 10;
    let hello = h2_client();
    let idle: Vec<TcpStream> = (0..count)
        .map(|_| {
            let mut socket = target.connect();
            socket.write_all(&hello).unwrap();
            socket
        })
        .collect();
    // Each connection gets an answer, so it is more than an accepted socket.
    for mut socket in &idle {
        socket.read_exact(&mut [0; 9]).unwrap();
        socket.write_all(SETTINGS_ACK).unwrap();
    }
    let served = Instant::now();
    other
        .unary::<_, Blob>("/t.T/Echo", &Blob::default(), &within(20))
        .unwrap();
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
    // Many connections at the same moment may need more threads than they use afterwards. The extra threads end, although other
    // clients are served at the same time.
    assert!(threads < count / 10, "{threads} threads");
    let deadline = Instant::now() + Duration::from_secs(50);
    while target.status("Threads") > 20 {
        assert!(
            Instant::now() < deadline,
            "{} threads are left",
            target.status("Threads")
        );
        thread::sleep(Duration::from_millis(100));
        other
            .unary::<_, Blob>("/t.T/Echo", &Blob::default(), &within(20))
            .unwrap();
    }
}

#[test]
fn an_idle_connection_over_tls_uses_less_than_64_kib() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let target = Target::run(500, command.env("HOSTILE_PEERS_TLS", "1"));
    let hello = h2_client();
    let connect = || {
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut transport = atls::Client::new(None, None)
            .connect(target.connect(), deadline)
            .unwrap();
        transport.writer.write_all(&hello).unwrap();
        transport.reader.read_exact(&mut [0; 9]).unwrap();
        transport.writer.write_all(SETTINGS_ACK).unwrap();
        transport
    };
    let _first = connect();
    let before = target.status("VmRSS") << 10;
    let idle: Vec<Transport> = (0..200).map(|_| connect()).collect();
    let each = ((target.status("VmRSS") << 10) - before) / idle.len();
    println!("{each} bytes for each connection");
    assert!(each < 64 << 10, "{each} bytes for each connection");
}

// ---- attacks ----

/// A client without gRPC: our HTTP/2 state machine. It reads only on request.
struct Attacker {
    socket: TcpStream,
    h2: Connection,
}

impl Attacker {
    fn new(target: &Target) -> Attacker {
        Attacker::with(target.connect())
    }

    fn with(socket: TcpStream) -> Attacker {
        let mut attacker = Attacker {
            socket,
            h2: Connection::client(h2::H2Limits::default()),
        };
        let (mut received, mut piece) = (Vec::new(), [0; 1024]);
        while !attacker.h2.is_established() {
            attacker.send().unwrap();
            let length = attacker.socket.read(&mut piece).unwrap();
            received.extend_from_slice(&piece[..length]);
            while let (taken @ 1.., _) = attacker.h2.receive(&received, Instant::now()).unwrap() {
                received.drain(..taken);
            }
        }
        attacker.send().unwrap();
        attacker
    }

    /// Writes the output of the state machine.
    fn send(&mut self) -> std::io::Result<()> {
        self.socket.write_all(&std::mem::take(self.h2.output()))
    }

    /// Opens a call without sending its message.
    fn call(&mut self, path: &str) -> u32 {
        let fields: [h2::Field; 4] = [
            (b":method", b"POST", Indexing::Yes),
            (b":scheme", b"http", Indexing::Yes),
            (b":path", path.as_bytes(), Indexing::Yes),
            (b"content-type", b"application/grpc", Indexing::Yes),
        ];
        self.h2.open(fields.into_iter(), false).unwrap()
    }

    /// Writes `bytes` repeatedly until the server has closed the connection. Returns the code of
    /// its GOAWAY.
    #[track_caller]
    fn flood(self, bytes: impl FnMut(&mut Attacker) -> Vec<u8>) -> u32 {
        goaway_code(&self.flood_to_the_end(bytes))
    }

    /// Like [`Attacker::flood`], but returns everything that the server sent.
    #[track_caller]
    fn flood_to_the_end(mut self, mut bytes: impl FnMut(&mut Attacker) -> Vec<u8>) -> Vec<u8> {
        let mut reading = self.socket.try_clone().unwrap();
        let said = thread::spawn(move || {
            let mut said = Vec::new();
            // A reset of the connection may cut off the end.
            let _ = reading.read_to_end(&mut said);
            said
        });
        let deadline = Instant::now() + Duration::from_secs(20);
        while !said.is_finished() {
            assert!(Instant::now() < deadline, "the server endures the flood");
            let bytes = bytes(&mut self);
            // This fails once the server has closed the connection.
            let _ = self.socket.write_all(&bytes);
        }
        said.join().unwrap()
    }

    /// Reads until the server closes the connection.
    #[track_caller]
    fn await_drop(mut self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        let mut piece = [0; 4096];
        while !matches!(self.socket.read(&mut piece), Ok(0) | Err(_)) {
            assert!(Instant::now() < deadline, "the connection stays open");
        }
    }
}

/// Returns the code of the last frame if that is GOAWAY.
fn goaway_code(mut said: &[u8]) -> u32 {
    let mut code = None;
    while let Some(&[l0, l1, l2, kind, ..]) = said.first_chunk::<9>() {
        let length = u32::from_be_bytes([0, l0, l1, l2]) as usize;
        let Some(payload) = said.get(9..9 + length) else {
            break;
        };
        code = (kind == 7).then(|| u32::from_be_bytes(payload[4..8].try_into().unwrap()));
        said = &said[9 + length..];
    }
    code.expect("GOAWAY")
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

const SETTINGS_ACK: &[u8] = &[0, 0, 0, 4, 1, 0, 0, 0, 0];
/// `:method POST`, `:scheme http`, `:path /` as indexes.
const REQUEST: [u8; 3] = [0x83, 0x86, 0x84];
/// RFC 9113 §7.
const ENHANCE_YOUR_CALM: u32 = 11;

/// Returns the header block of a call; none of its fields enter the dynamic table.
fn request_head(path: &[u8]) -> Vec<u8> {
    let kind = b"application/grpc";
    [
        &[0x83, 0x86, 4, path.len() as u8][..],
        path,
        &[0x0f, 0x10, kind.len() as u8],
        kind,
    ]
    .concat()
}

/// Returns the first bytes of a client.
fn h2_client() -> Vec<u8> {
    std::mem::take(Connection::client(h2::H2Limits::default()).output())
}

/// Floods of SETTINGS, PING, empty DATA, WINDOW_UPDATE with tiny increments, PRIORITY and unknown
/// frames.
#[test]
fn floods_of_frames_end_only_their_connection() {
    let target = Target::start(CONNECTIONS);
    let other = target.channel();
    for useless in [
        frame(4, 0, 0, &[0, 3, 0, 0, 0, 9]),
        frame(6, 0, 0, &[0; 8]),
        frame(0, 0, 1, &[]),
        frame(8, 0, 0, &[0, 0, 0, 1]),
        frame(2, 0, 1, &[0; 5]),
        frame(0x77, 0, 0, &[]),
    ] {
        let mut attacker = Attacker::new(&target);
        attacker.call("/t.T/Echo");
        attacker.send().unwrap();
        let bytes = useless.repeat(200);
        assert_eq!(
            attacker.flood(|_| bytes.clone()),
            ENHANCE_YOUR_CALM,
            "{useless:?}"
        );
        target.is_well(&other, MOST_MEMORY);
    }
}

/// CVE-2023-44487, and CVE-2025-8671, in which the server is made to reset.
#[test]
fn rapid_resets_end_only_their_connection() {
    let target = Target::start(CONNECTIONS);
    let other = target.channel();
    let mut stream = 1;
    let mut next = || {
        stream += 2;
        stream
    };
    let mut by_them = |attacker: Attacker| {
        attacker.flood(|_| {
            let pairs = (0..100)
                .map(|_| next())
                .map(|id| [frame(1, 4, id, &REQUEST), frame(3, 0, id, &[0, 0, 0, 8])].concat());
            pairs.collect::<Vec<_>>().concat()
        })
    };
    assert_eq!(by_them(Attacker::new(&target)), ENHANCE_YOUR_CALM);
    target.is_well(&other, MOST_MEMORY);
    let mut by_us = |attacker: Attacker| {
        attacker.flood(|_| {
            (0..100)
                .flat_map(|_| frame(1, 5, next(), &REQUEST[..2]))
                .collect()
        })
    };
    assert_eq!(by_us(Attacker::new(&target)), ENHANCE_YOUR_CALM);
    target.is_well(&other, MOST_MEMORY);
}

/// CVE-2024-27316 and similar attacks, and a block that grows slowly by small fragments.
#[test]
fn endless_header_blocks_end_only_their_connection() {
    let target = Target::start(CONNECTIONS);
    let other = target.channel();
    for fragment in [vec![], vec![0x40; 16_000]] {
        let mut attacker = Attacker::new(&target);
        attacker
            .socket
            .write_all(&frame(1, 0, 1, &REQUEST))
            .unwrap();
        let bytes = frame(9, 0, 1, &fragment);
        assert_eq!(attacker.flood(|_| bytes.clone()), ENHANCE_YOUR_CALM);
        target.is_well(&other, MOST_MEMORY);
    }
    let mut slow = Attacker::new(&target);
    slow.socket.write_all(&frame(1, 0, 1, &REQUEST)).unwrap();
    slow.await_drop();
    target.is_well(&other, MOST_MEMORY);
}

/// A header block of 16 KiB may name the largest entry of the table 16 000 times.
#[test]
fn a_hpack_bomb_takes_no_memory() {
    let target = Target::start(CONNECTIONS);
    let other = target.channel();
    let mut attacker = Attacker::new(&target);
    let long = [&REQUEST[..], b"\x40\x01x\x7f\xc1\x1e", &[b'v'; 4000]].concat();
    let mut bytes = frame(1, 5, 1, &long);
    for round in 0..50 {
        bytes.extend(frame(
            1,
            5,
            3 + 2 * round,
            &[&REQUEST[..], &[0xbe; 16_000]].concat(),
        ));
    }
    let _ = attacker.socket.write_all(&bytes);
    target.is_well(&other, MOST_MEMORY);
}

/// Peers that send nothing, half of the preface, or half of a SETTINGS frame.
#[test]
fn connections_that_never_begin_are_dropped_and_hold_no_thread() {
    let target = Target::start(CONNECTIONS);
    let other = target.channel();
    other
        .unary::<_, Blob>("/t.T/Echo", &Blob::default(), &within(20))
        .unwrap();
    let hello = h2_client();
    let mut half_open: Vec<TcpStream> = (0..150).map(|_| target.connect()).collect();
    for (index, socket) in half_open.iter_mut().enumerate() {
        // Connections beyond half of the limit take the places of the first ones.
        let _ = socket.write_all(&hello[..[0, 10, 24, 30][index % 4]]);
    }
    target.is_well(&other, MOST_MEMORY);
    for mut socket in half_open {
        let ended = socket.read_to_end(&mut Vec::new());
        assert!(
            !ended.is_err_and(|error| error.kind() == ErrorKind::WouldBlock),
            "the connection stays open"
        );
    }
    target.is_well(&other, MOST_MEMORY);
}

/// Slowloris: requests that do not end, on as many streams as allowed. A byte from time to time
/// changes nothing.
#[test]
fn endless_requests_hold_no_thread_and_are_refused() {
    let target = Target::start(CONNECTIONS);
    let other = target.channel();
    let mut attackers: Vec<Attacker> = (0..20).map(|_| Attacker::new(&target)).collect();
    for attacker in &mut attackers {
        for _ in 0..100 {
            let stream = attacker.call("/t.T/Echo");
            attacker
                .h2
                .send_data(stream, &[0, 0, 0, 100, 0], false)
                .unwrap();
        }
        attacker.send().unwrap();
    }
    for _ in 0..8 {
        target.is_well(&other, MOST_MEMORY);
        thread::sleep(Duration::from_millis(500));
        for attacker in &mut attackers {
            attacker.h2.send_data(1, &[0], false).unwrap();
            let _ = attacker.send();
        }
    }
    // All calls were answered with DEADLINE_EXCEEDED.
    let mut said = vec![0; 64 << 10];
    let length = attackers[0].socket.read(&mut said).unwrap();
    let (mut rest, mut refused) = (&said[..length], false);
    while let Ok((taken @ 1.., event)) = attackers[0].h2.receive(rest, Instant::now()) {
        rest = &rest[taken..];
        if let Some(h2::Event::Headers { end: true, .. }) = event {
            refused |= attackers[0].h2.headers().get(b"grpc-status") == Some(b"4");
        }
    }
    assert!(refused);
}

/// Slow reading: open windows with a socket that is not read, and windows that stay closed.
#[test]
fn clients_that_read_nothing_are_closed_and_use_bounded_memory() {
    let target = Target::start(CONNECTIONS);
    let other = target.channel();
    let request = prost::Message::encode_to_vec(&Blob {
        data: vec![7; 30_000],
        count: 0,
    });
    let message = [&[0][..], &(request.len() as u32).to_be_bytes(), &request].concat();
    let mut attackers: Vec<Attacker> = (0..10).map(|_| Attacker::new(&target)).collect();
    for (index, attacker) in attackers.iter_mut().enumerate() {
        for _ in 0..3 {
            let stream = attacker.call("/t.T/Endless");
            attacker.h2.send_data(stream, &message, true).unwrap();
            if index % 2 == 0 {
                for stream in [0, stream] {
                    attacker.h2.output().extend(frame(
                        8,
                        0,
                        stream,
                        &0x2000_0000_u32.to_be_bytes(),
                    ));
                }
            }
        }
        attacker.send().unwrap();
    }
    // Every second client did not read its socket and was closed. The others only kept their
    // windows closed: their calls end, but not their connections.
    let deadline = Instant::now() + Duration::from_secs(20);
    for attacker in attackers.iter_mut().step_by(2) {
        attacker.h2.ping();
        while attacker.send().is_ok() {
            assert!(Instant::now() < deadline, "the connection stays open");
            target.is_well(&other, MOST_MEMORY);
            thread::sleep(Duration::from_millis(200));
            attacker.h2.ping();
        }
    }
    target.is_well(&other, MOST_MEMORY);
}

/// As many messages as the windows allow, to handlers that never read them and to methods that wait
/// for the end.
#[test]
fn requests_that_no_handler_reads_do_not_fill_the_memory() {
    let target = Target::start(CONNECTIONS);
    let other = target.channel();
    let mut attackers: Vec<Attacker> = (0..8).map(|_| Attacker::new(&target)).collect();
    for attacker in &mut attackers {
        attacker
            .socket
            .set_write_timeout(Some(Duration::from_millis(200)))
            .unwrap();
        for path in ["/t.T/Ignore", "/t.T/Echo"].into_iter().cycle().take(100) {
            if path == "/t.T/Ignore" && attacker.h2.output().len() > MIB {
                continue;
            }
            let stream = attacker.call(path);
            // The message announces 3 MiB; the stream's window lets a part through.
            let _ = attacker.h2.send_data(
                stream,
                &[&[0, 0, 0x30, 0, 0][..], &vec![0; 250 << 10]].concat(),
                false,
            );
        }
        // The server may stop reading, or refuse.
        let _ = attacker.send();
    }
    // The handlers of /t.T/Ignore hold one thread each.
    assert!(target.peak() < MOST_MEMORY, "{} MiB", target.peak() / MIB);
    drop(attackers);
    let deadline = Instant::now() + Duration::from_secs(20);
    while other
        .unary::<_, Blob>("/t.T/Echo", &Blob::default(), &within(5))
        .is_err()
    {
        assert!(Instant::now() < deadline, "the server does not recover");
        thread::sleep(Duration::from_millis(50));
    }
}

/// Returns requests for an unknown method, as small as HPACK makes them; the first one fills the
/// dynamic table.
fn unknown(first: u32, count: u32) -> Vec<u8> {
    let request = |stream: u32| match stream {
        1 => {
            let path = [&b"/t.T/"[..], &[0xff; 195]].concat();
            let kind = b"application/grpc";
            frame(
                1,
                5,
                1,
                &[
                    &[0x83, 0x86, 0x44, 0x7f, 73],
                    &path[..],
                    &[0x5f, kind.len() as u8],
                    kind,
                ]
                .concat(),
            )
        }
        _ => frame(1, 5, stream, &[0x83, 0x86, 0xbf, 0xbe]),
    };
    (first..first + count)
        .flat_map(|number| request(2 * number + 1))
        .collect()
}

/// A client that sends requests and reads nothing until the server stops reading.
fn ask_until_held_back(target: &Target, host: u8) -> Transport {
    let mut transport = target.transport(target.connect_from(host));
    transport
        .socket
        .set_write_timeout(Some(Duration::from_secs(1)))
        .unwrap();
    transport
        .writer
        .write_all(&[&h2_client(), SETTINGS_ACK].concat())
        .unwrap();
    for first in 0.. {
        if let Err(error) = transport.writer.write_all(&unknown(first * 300, 300)) {
            // Among many such connections, the server ends those that have read nothing for the
            // longest time.
            let ends = [
                ErrorKind::WouldBlock,
                ErrorKind::TimedOut,
                ErrorKind::ConnectionReset,
                ErrorKind::BrokenPipe,
            ];
            assert!(ends.contains(&error.kind()), "{error}");
            break;
        }
        assert!(
            first < 10_000,
            "the server still reads although its answers are not read"
        );
    }
    transport
}

fn ask_and_read_nothing(target: &Target, calm: &Target, hosts: &[u8], each: usize, memory: usize) {
    let (other, calm) = (target.channel(), calm.channel());
    let attackers: Vec<Transport> = thread::scope(|scope| {
        let ask = |host| scope.spawn(move || ask_until_held_back(target, host));
        let threads: Vec<_> = hosts
            .iter()
            .flat_map(|host| (0..each).map(|_| ask(*host)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    let in_kernel = target.most_in_kernel();
    println!("{in_kernel} bytes in the kernel for one connection");
    assert!(
        (1..=MOST_IN_KERNEL).contains(&in_kernel),
        "{in_kernel} bytes in the kernel for one connection"
    );
    target.is_fair(&other, &calm);
    target.is_well(&other, memory);
    // The server closes them after they have read nothing for too long.
    let deadline = Instant::now() + Duration::from_secs(60);
    for Transport { socket, .. } in &attackers {
        socket.set_nonblocking(true).unwrap();
        while (&**socket)
            .write(&[0; 16 << 10])
            .err()
            .is_none_or(|error| error.kind() == ErrorKind::WouldBlock)
        {
            assert!(Instant::now() < deadline, "the connection stays open");
            thread::sleep(Duration::from_millis(50));
        }
    }
    target.is_well(&other, memory);
}

#[test]
fn unread_answers_stop_the_reading() {
    ask_and_read_nothing(
        &Target::that_refuses_all(&[]),
        &Target::that_refuses_all(&[]),
        &[2, 3],
        12,
        MOST_MEMORY,
    );
}

#[test]
fn unread_answers_stop_the_reading_over_tls() {
    ask_and_read_nothing(
        &Target::that_refuses_all(&["HOSTILE_PEERS_TLS"]),
        &Target::that_refuses_all(&["HOSTILE_PEERS_TLS"]),
        &[2],
        12,
        MOST_MEMORY,
    );
}

/// Most of the connections that the recovery server accepts from two addresses.
#[test]
fn unread_answers_fit_into_an_initramfs() {
    // a server over TLS with the limits of a machine in its initramfs
    let start = || Target::that_refuses_all(&["HOSTILE_PEERS_TLS", "HOSTILE_PEERS_INITRAMFS"]);
    let (target, calm) = (start(), start());
    ask_and_read_nothing(&target, &calm, &[2, 3], 24, MOST_MEMORY_IN_INITRAMFS);
}

/// CVE-2025-8671 through gRPC: a malformed message on a call with many requests, then more of it.
/// Six connections at a time do this, each followed by another.
#[test]
fn resets_that_the_peer_provokes_end_its_connection() {
    let (target, calm) = (Target::start(CONNECTIONS), Target::start(CONNECTIONS));
    let (other, calm) = (target.channel(), calm.channel());
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    let attacker = Attacker::new(&target);
                    let (block, mut stream) = (request_head(b"/t.T/Ignore"), 1);
                    let mut reset = || {
                        stream += 2;
                        let head = frame(1, 4, stream, &block);
                        [
                            head,
                            frame(0, 0, stream, &[9, 0, 0, 0, 0]),
                            frame(0, 0, stream, &[0]),
                        ]
                        .concat()
                    };
                    let said =
                        attacker.flood_to_the_end(|_| (0..100).flat_map(|_| reset()).collect());
                    assert!(said.len() < MIB, "{} bytes of resets", said.len());
                }
            });
        }
        target.is_well(&other, MOST_MEMORY);
        target.is_fair(&other, &calm);
        stop.store(true, Ordering::SeqCst);
    });
    target.is_well(&other, MOST_MEMORY);
}

/// Small answers whose windows stay closed, requests that are not gRPC, and streams of answers;
/// more of each than there are handlers.
#[test]
fn unread_answers_leave_handlers_to_others() {
    let (target, calm) = (Target::start(CONNECTIONS), Target::start(CONNECTIONS));
    let (other, calm) = (target.channel(), calm.channel());
    let message = [&[0, 0, 0, 0, 5][..], b"\x0a\x03abc"].concat();
    let attackers: Vec<Attacker> = [
        "/t.T/Echo",
        "/t.T/Endless",
        "GET",
        "/t.T/Endless",
        "/t.T/Echo",
    ]
    .into_iter()
    .map(|path| {
        let mut attacker = Attacker::with(target.connect_from(2));
        // INITIAL_WINDOW_SIZE 0
        attacker
            .h2
            .output()
            .extend(frame(4, 0, 0, &[0, 4, 0, 0, 0, 0]));
        for number in 0..100 {
            if path == "GET" {
                attacker
                    .h2
                    .output()
                    .extend(frame(1, 5, 2 * number + 1, &[0x82, 0x86, 0x84]));
                continue;
            }
            let stream = attacker.call(path);
            attacker.h2.send_data(stream, &message, true).unwrap();
        }
        attacker.send().unwrap();
        attacker
    })
    .collect();
    target.is_fair(&other, &calm);
    for _ in 0..20 {
        target.is_well(&other, MOST_MEMORY);
        thread::sleep(Duration::from_millis(100));
    }
    drop(attackers);
    target.is_well(&other, MOST_MEMORY);
}

/// Each call is answered with 1 MiB. The windows stay closed, are opened byte by byte, or are open while the client does not read;
/// from one address and from four.
#[test]
fn large_answers_that_nobody_takes_stay_within_the_memory() {
    let message = [&[0, 0, 0, 0, 5][..], b"\x0a\x03abc"].concat();
    for (window, hosts) in [
        (0_u32, 1),
        (0, 4),
        (1, 1),
        (1, 4),
        (0x7000_0000, 1),
        (0x7000_0000, 4),
    ] {
        let target = Target::start(CONNECTIONS);
        let other = target.channel();
        let mut attackers: Vec<Attacker> = (0..40)
            .map(|index| {
                let mut attacker = Attacker::with(target.connect_from(2 + index % hosts));
                let settings = [&[0, 4][..], &window.to_be_bytes()].concat();
                let output = attacker.h2.output();
                output.extend(frame(4, 0, 0, &settings));
                output.extend(frame(8, 0, 0, &0x7000_0000_u32.to_be_bytes()));
                for _ in 0..100 {
                    let stream = attacker.call("/t.T/Large");
                    attacker.h2.send_data(stream, &message, true).unwrap();
                }
                attacker.send().unwrap();
                attacker
            })
            .collect();
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(100));
            for attacker in attackers.iter_mut().filter(|_| window == 1) {
                let more = (0..100).flat_map(|call| frame(8, 0, 2 * call + 1, &[0, 0, 0, 1]));
                attacker.h2.output().extend(more.collect::<Vec<_>>());
                // too many of these end the connection
                let _ = attacker.send();
            }
            target.is_well(&other, MOST_MEMORY);
        }
        println!(
            "window {window}, {hosts} hosts: {} KiB",
            target.peak() >> 10
        );
        drop(attackers);
        target.is_well(&other, MOST_MEMORY);
    }
}

/// Each field has 2 bytes on the wire and 80 in memory.
#[test]
fn messages_of_many_empty_fields_take_no_memory() {
    let target = Target::start(CONNECTIONS);
    let other = target.channel();
    #[derive(Clone, PartialEq, prost::Message)]
    struct Empty {
        #[prost(message, repeated, tag = "1")]
        entries: Vec<()>,
    }
    let empty = Empty {
        entries: vec![(); 2 * MIB - 1],
    };
    for _ in 0..3 {
        let refused = other.unary::<_, Blob>("/t.T/List", &empty, &within(20));
        let refused = refused.unwrap_err();
        assert_eq!(refused.code(), Code::Internal, "{refused}");
        assert!(refused.message().contains("too many fields"), "{refused}");
        target.is_well(&other, 16 * MIB);
    }
}

/// Ends the attackers also if the test fails.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Calls that the server refuses without a handler, and messages that it cannot decode.
fn refused(kind: usize, first: u32) -> Vec<u8> {
    let call = |path: &[u8], data: &[u8]| {
        let streams = (first..first + 100).map(|number| 2 * number + 1);
        let calls = streams.map(|stream| {
            let head = request_head(path);
            [frame(1, 4, stream, &head), frame(0, 1, stream, data)].concat()
        });
        calls.collect::<Vec<_>>().concat()
    };
    match kind {
        0 => unknown(first, 100),
        1 => (first..first + 100)
            .flat_map(|number| frame(1, 5, 2 * number + 1, &[0x82, 0x86, 0x84]))
            .collect(),
        2 => call(b"/t.T/Echo", &[9, 0, 0, 0, 0]),
        3 => call(b"/t.T/Echo", &[0, 0, 0, 0, 9]),
        4 => call(b"/t.T/Echo", &[0, 0x70, 0, 0, 0]),
        _ => call(b"/t.T/Echo", &[0, 0, 0, 0, 1, 0xff]),
    }
}

#[test]
fn calls_that_are_refused_end_their_connection() {
    let (target, calm) = (Target::start(CONNECTIONS), Target::start(CONNECTIONS));
    let (other, calm) = (target.channel(), calm.channel());
    let flood = |kind: usize| {
        let mut first = 0;
        let said = Attacker::new(&target).flood_to_the_end(|_| {
            first += 100;
            refused(kind, first - 100)
        });
        assert!(said.len() < MIB, "{} bytes of answers", said.len());
        said
    };
    for kind in 0..6 {
        let code = goaway_code(&flood(kind));
        assert_eq!(code, ENHANCE_YOUR_CALM, "kind {kind}");
        target.is_well(&other, MOST_MEMORY);
    }
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    flood(0);
                }
            });
        }
        let _stop = StopOnDrop(&stop);
        target.is_fair(&other, &calm);
    });
    target.is_well(&other, MOST_MEMORY);
}

/// These connections get a GOAWAY and do not close.
#[test]
fn connections_that_linger_after_goaway_hold_no_threads() {
    let (target, calm) = (Target::start(CONNECTIONS), Target::start(CONNECTIONS));
    let (other, calm) = (target.channel(), calm.channel());
    let mut attackers: Vec<Attacker> = (0..20)
        .map(|_| Attacker::with(target.connect_from(2)))
        .collect();
    let mut most = 0;
    for attacker in &mut attackers {
        // PING on a stream
        attacker.socket.write_all(&frame(6, 0, 1, &[0; 8])).unwrap();
    }
    let until = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until {
        most = most.max(target.status("Threads"));
        target.is_well(&other, MOST_MEMORY);
    }
    println!("{most} threads at most");
    // One thread each for a moment, and as many threads as before.
    assert!(most < 100, "{most} threads");
    target.is_fair(&other, &calm);
    attackers.into_iter().for_each(Attacker::await_drop);
}

/// A few bytes on the wire become 16 KiB of metadata, which wait with their call for its message.
#[test]
fn incomplete_calls_with_large_metadata_do_not_fill_the_memory() {
    let target = Target::start(CONNECTIONS);
    let other = target.channel();
    let head = request_head(b"/t.T/Echo");
    let first = [&head[..], b"\x40\x01x\x7f\xd9\x1c", &[b'v'; 3800]].concat();
    let attackers: Vec<Attacker> = (0..150)
        .map(|index| {
            let mut attacker = Attacker::with(target.connect_from(2 + index % 4));
            let mut bytes = frame(1, 4, 1, &first);
            for number in 1..100 {
                bytes.extend(frame(
                    1,
                    4,
                    2 * number + 1,
                    &[&head[..], &[0xbe; 4]].concat(),
                ));
            }
            attacker.socket.write_all(&bytes).unwrap();
            attacker
        })
        .collect();
    for _ in 0..10 {
        target.is_well(&other, MOST_MEMORY);
        thread::sleep(Duration::from_millis(100));
    }
    println!("{} KiB", target.peak() >> 10);
    drop(attackers);
}

// ---- attacks over all connections that there may be ----

/// Maximum memory in bytes for all these connections together, without TLS and with TLS.
const MOST_MEMORY_OF_ALL: [usize; 2] = [MOST_MEMORY, 96 * MIB];

/// Opens all connections but one of a server with the default limits, each from an address of its
/// own. All stay open until another client was served and the memory was measured.
fn besiege(is_tls: bool, attack: impl Fn(&Target, Transport) -> Transport + Sync) {
    raise_descriptor_limit().unwrap();
    let limits = Limits::default();
    let mut command = Command::new(std::env::current_exe().unwrap());
    if is_tls {
        command.env("HOSTILE_PEERS_TLS", "1");
    }
    let target = &Target::run(
        limits.connections,
        command.envs([
            ("HOSTILE_PEERS_DEFAULT", "1"),
            ("HOSTILE_PEERS_REFUSE_ALL", "1"),
        ]),
    );
    let other = target.channel();
    let enter = |number: usize| {
        let source = Ipv4Addr::from_bits(Ipv4Addr::new(127, 8, 0, 1).to_bits() + number as u32);
        let socket = target.connect_from_address(source);
        socket.set_nodelay(true).unwrap();
        let mut transport = target.transport(socket);
        transport
            .writer
            .write_all(&[&h2_client(), SETTINGS_ACK].concat())
            .unwrap();
        attack(target, transport)
    };
    const WORKERS: usize = 32;
    let numbers = |worker: usize| (worker..limits.connections - 1).step_by(WORKERS);
    let attackers: Vec<Transport> = thread::scope(|scope| {
        let threads: Vec<_> = (0..WORKERS)
            .map(|worker| scope.spawn(move || numbers(worker).map(enter).collect::<Vec<_>>()))
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    });
    let request = Blob {
        data: vec![7; 1000],
        count: 1,
    };
    for _ in 0..10 {
        assert_eq!(
            other.unary("/t.T/Echo", &request, &within(60)),
            Ok(request.clone())
        );
        thread::sleep(Duration::from_millis(50));
    }
    let (peak, threads) = (target.peak(), target.status("Threads"));
    println!(
        "{} MiB at the peak, over idle, {threads} threads; TLS: {is_tls}",
        peak / MIB
    );
    assert!(
        peak < MOST_MEMORY_OF_ALL[usize::from(is_tls)],
        "{} MiB at the peak, over idle",
        peak / MIB
    );
    // At most a quarter of the connections wait with a thread each. Others have one for the moment in which they run a handler or
    // end, on a busy machine for longer.
    let most_threads = limits.connections / 4 + 2 * limits.handlers;
    assert!(threads < most_threads, "{threads} threads");
    drop(attackers);
}

/// Returns a header block in frames: one field of `length` bytes that is never indexed. The last
/// frame is missing if `is_cut`.
fn long_block(stream: u32, length: usize, is_cut: bool) -> Vec<u8> {
    let mut size = Vec::new();
    let mut rest = length - 127;
    while rest > 127 {
        size.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    size.push(rest as u8);
    let block = [&REQUEST[..], b"\x10\x01x\x7f", &size, &vec![b'v'; length]].concat();
    let mut pieces: Vec<&[u8]> = block.chunks(6000).collect();
    if is_cut {
        pieces.pop();
    }
    let last = pieces.len() - 1;
    let frames = pieces.into_iter().enumerate().map(|(index, piece)| {
        frame(
            if index == 0 { 1 } else { 9 },
            if index == last && !is_cut { 4 } else { 0 },
            stream,
            piece,
        )
    });
    frames.collect::<Vec<_>>().concat()
}

/// Large answers fill the socket's buffers and small ones the server's; the client reads nothing.
fn read_nothing(_: &Target, mut transport: Transport) -> Transport {
    let start = Instant::now();
    transport
        .socket
        .set_write_timeout(Some(Duration::from_millis(100)))
        .unwrap();
    let window = frame(8, 0, 0, &0x7000_0000_u32.to_be_bytes());
    let settings = frame(
        4,
        0,
        0,
        &[&[0, 4][..], &0x7000_0000_u32.to_be_bytes()].concat(),
    );
    let mut bytes = [settings, window, unknown(0, 1)].concat();
    let request = prost::Message::encode_to_vec(&Blob {
        data: vec![7; 60_000],
        count: 0,
    });
    let message = [&[0][..], &(request.len() as u32).to_be_bytes(), &request].concat();
    for number in 1..10_000 {
        if number < 60 {
            let stream = 2 * number + 1;
            bytes.extend(frame(1, 4, stream, &request_head(b"/t.T/Echo")));
            let last = message.chunks(16_000).count() - 1;
            let pieces = message.chunks(16_000).enumerate();
            bytes.extend(
                pieces.flat_map(|(index, piece)| frame(0, u8::from(index == last), stream, piece)),
            );
        } else {
            bytes.extend(unknown(number * 300, 300));
        }
        // If the server is this slow for one of a thousand connections, it has practically stopped.
        if transport
            .writer
            .write_all(&std::mem::take(&mut bytes))
            .is_err()
            || start.elapsed() > Duration::from_secs(1)
        {
            return transport;
        }
    }
    panic!("the server still reads although its answers are not read");
}

/// Sends incomplete calls with tiny metadata, and an incomplete message, frame and TLS record.
fn send_incomplete_calls(target: &Target, mut transport: Transport) -> Transport {
    let head = request_head(b"/t.T/Echo");
    let mut bytes = Vec::new();
    for number in 0..20 {
        // As many entries as the dynamic table can hold.
        let names = b"\x40\x01x\x00".repeat(if number == 0 { 120 } else { 0 });
        bytes.extend(frame(
            1,
            4,
            2 * number + 1,
            &[&head[..], &names, &[0xbe; 360]].concat(),
        ));
    }
    bytes.extend(&frame(
        0,
        0,
        1,
        &[&[0, 0, 0x30, 0, 0][..], &vec![0; 16_000]].concat(),
    ));
    bytes.extend(&frame(0, 0, 1, &vec![0; 16_384])[..16_384]);
    let _ = transport.writer.write_all(&bytes);
    if target.is_tls {
        let _ =
            (&*transport.socket).write_all(&[&[23, 3, 3, 0x40, 0xff][..], &[0; 0x40fe]].concat());
    }
    transport
}

/// Sends a header block that is far too long, and one that does not end.
fn send_incomplete_block(_: &Target, mut transport: Transport) -> Transport {
    let bytes = [long_block(1, 76_000, false), long_block(3, 80_000, true)].concat();
    let _ = transport.writer.write_all(&bytes);
    transport
}

#[test]
fn no_connection_reads_its_answers() {
    besiege(false, read_nothing);
}

#[test]
fn all_connections_send_incomplete_calls() {
    besiege(false, send_incomplete_calls);
}

#[test]
fn all_connections_send_incomplete_calls_over_tls() {
    besiege(true, send_incomplete_calls);
}

#[test]
fn all_connections_send_incomplete_header_blocks() {
    besiege(false, send_incomplete_block);
}

#[test]
fn all_connections_send_incomplete_header_blocks_over_tls() {
    besiege(true, send_incomplete_block);
}

#[test]
fn silent_connections_displace_only_silent_connections() {
    let target = Target::start(20);
    let other = target.channel();
    other
        .unary::<_, Blob>("/t.T/Echo", &Blob::default(), &within(20))
        .unwrap();
    let crowd: Vec<TcpStream> = (0..100).map(|_| target.connect()).collect();
    // Ten are half of the connections.
    assert!(
        crowd
            .iter()
            .take(90)
            .all(|socket| matches!((&*socket).read(&mut [0]), Ok(0) | Err(_)))
    );
    target.is_well(&other, MOST_MEMORY);
    let newcomer = target.channel();
    target.is_well(&newcomer, MOST_MEMORY);
}

/// Loopback addresses in the test's own network namespace: the server's, two of one /64, and one of
/// another /64.
const IPV6: [&str; 4] = ["fd00::1", "fd00:0:0:1::1", "fd00:0:0:1::2", "fd00:0:0:2::1"];

#[test]
fn two_addresses_of_one_ipv6_64_share_the_places_of_one_peer() {
    let add = IPV6
        .map(|address| format!("ip address add {address}/128 dev lo nodad"))
        .join(" && ");
    let output = Command::new("unshare")
        .args([
            "--net",
            "sh",
            "-c",
            &format!("ip link set lo up && {add} && exec \"$@\""),
            "sh",
        ])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "ipv6_peers", "--ignored", "--nocapture"])
        .env("HOSTILE_PEERS_IPV6", "1")
        .output()
        .expect("unshare, of util-linux");
    let told =
        [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    assert!(
        output.status.success() && told[0].contains("1 passed"),
        "{}",
        told.concat()
    );
}

#[test]
#[ignore = "needs the addresses that two_addresses_of_one_ipv6_64_share_the_places_of_one_peer gives it"]
fn ipv6_peers() {
    if std::env::var_os("HOSTILE_PEERS_IPV6").is_none() {
        return;
    }
    let router = Router::new().unary("/t.T/Echo", |_: &Call, request: Blob| Ok(request));
    let accept = Arc::new(|socket: TcpStream, _: Instant| transport::plain::transport(socket));
    let limits = Limits {
        connections_per_peer: 2,
        ..Limits::default()
    };
    let server = Server::start(
        "ipv6",
        TcpListener::bind("[::]:0").unwrap(),
        accept,
        router,
        limits,
    )
    .unwrap();
    let to = SocketAddr::new(IPV6[0].parse().unwrap(), server.local_addr().port());
    let connect = |from: &str| {
        let socket = Socket::new(Domain::IPV6, Type::STREAM, None).unwrap();
        socket
            .bind(&SocketAddr::new(from.parse().unwrap(), 0).into())
            .unwrap();
        socket.connect(&to.into()).unwrap();
        Channel::new(
            transport::plain::transport(socket.into()).unwrap(),
            "localhost",
        )
        .unwrap()
    };
    let request = Blob {
        data: vec![7; 100],
        count: 1,
    };
    let ask = |channel: &Channel| channel.unary::<_, Blob>("/t.T/Echo", &request, &within(20));
    let [_, first, second, stranger] = IPV6;
    let held = [connect(first), connect(second)];
    held.iter()
        .for_each(|channel| assert_eq!(ask(channel), Ok(request.clone())));
    for from in [first, second] {
        assert_eq!(
            ask(&connect(from)).unwrap_err().code(),
            Code::Unavailable,
            "a third one, from {from}"
        );
    }
    assert_eq!(ask(&connect(stranger)), Ok(request.clone()));
    held.iter()
        .for_each(|channel| assert_eq!(ask(channel), Ok(request.clone())));
}

/// Connections that stop between accept and the HTTP/2 preface, 51 per second, from one address and
/// from thousands. Each would hold its place for a minute if only the deadline ended it.
#[test]
fn half_open_connections_block_no_client() {
    const MOST_OVER_IDLE: usize = 64 * MIB;
    let mut command = Command::new(std::env::current_exe().unwrap());
    let target = Target::run(1024, command.env("HOSTILE_PEERS_TLS", "1"));
    let hello = client_hello();
    let call = || {
        let begun = Instant::now();
        let client = atls::Client::new(None, None);
        let transport = client
            .connect(target.connect(), begun + Duration::from_secs(20))
            .expect("it is accepted");
        let channel = Channel::new(transport, "localhost").unwrap();
        let request = Blob {
            data: vec![7; 100],
            count: 1,
        };
        assert_eq!(
            channel.unary("/t.T/Echo", &request, &within(20)),
            Ok(request)
        );
        begun.elapsed()
    };
    let median = || {
        let mut times: Vec<_> = (0..15).map(|_| call()).collect();
        times.sort();
        times[times.len() / 2]
    };
    call();
    let idle = target.status("VmRSS") << 10;
    for networks in [1, 60_000] {
        // Other load on the machine affects both rates, so a further round without it decides.
        let served = (0..6).any(|_| {
            let undisturbed = median();
            let over = AtomicBool::new(false);
            let disturbed = thread::scope(|scope| {
                scope.spawn(|| half_open(&target, &hello, networks, &over));
                // Long enough for the half-open connections to fill their places.
                thread::sleep(Duration::from_secs(4));
                let disturbed = median();
                over.store(true, Ordering::SeqCst);
                disturbed
            });
            println!(
                "from {networks} networks: {undisturbed:?} undisturbed, {disturbed:?} disturbed"
            );
            disturbed <= 2 * undisturbed
        });
        assert!(served, "a client is served at less than half its rate");
    }
    let (peak, threads) = (target.status("VmHWM") << 10, target.status("Threads"));
    println!("{} MiB over idle, {threads} threads", (peak - idle) / MIB);
    assert!(
        peak - idle < MOST_OVER_IDLE,
        "{} MiB over idle",
        (peak - idle) / MIB
    );
    assert!(
        threads < Limits::default().handshakes + 40,
        "{threads} threads"
    );
}

/// Opens half-open connections of each kind, 51 per second, until `over` is set. The last thousand
/// stay open.
fn half_open(target: &Target, hello: &[u8], networks: u32, over: &AtomicBool) {
    let mut open = VecDeque::new();
    for number in 0u32.. {
        if over.load(Ordering::SeqCst) {
            return;
        }
        let source = Ipv4Addr::from_bits(Ipv4Addr::new(127, 9, 0, 1).to_bits() + number % networks);
        // The system may have no free port at the moment.
        if let Ok(mut socket) = connect_from(source, target.address) {
            let _ = match number % 3 {
                0 => socket.write_all(&[]),
                1 => socket.write_all(&hello[..1]),
                _ => socket.write_all(hello),
            };
            open.push_back(socket);
        }
        if open.len() > 1000 {
            open.pop_front();
        }
        thread::sleep(Duration::from_millis(19));
    }
}

fn connect_from(source: Ipv4Addr, to: SocketAddr) -> std::io::Result<TcpStream> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((source, 0)).into())?;
    socket.connect_timeout(&to.into(), Duration::from_secs(5))?;
    Ok(socket.into())
}

/// Returns the first bytes of an attested client.
fn client_hello() -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let client = thread::spawn(move || {
        let _ =
            atls::Client::new(None, None).connect(socket, Instant::now() + Duration::from_secs(5));
    });
    let mut hello = vec![0; 4096];
    let length = listener.accept().unwrap().0.read(&mut hello).unwrap();
    client.join().unwrap();
    hello.truncate(length);
    hello
}

#[test]
fn a_panicking_handler_answers_internal_and_its_connection_continues() {
    let target = Target::start(CONNECTIONS);
    let channel = target.channel();
    for _ in 0..20 {
        let status = channel
            .unary::<_, Blob>("/t.T/Panic", &Blob::default(), &within(20))
            .unwrap_err();
        assert_eq!(status.code(), Code::Internal);
    }
    target.is_well(&channel, MOST_MEMORY);
}

/// When all handlers are busy, further calls are refused at once and not queued without a limit.
#[test]
fn calls_above_the_limit_of_handlers_are_refused_and_places_come_back() {
    let target = Target::start(CONNECTIONS);
    let channels = [target.channel(), target.channel()];
    let wait = Blob {
        data: vec![],
        count: 60_000,
    };
    let hold = |channel: &Channel| {
        (0..90)
            .map(|_| {
                channel
                    .server_streaming::<_, Blob>("/t.T/Wait", &wait, &within(60))
                    .unwrap()
            })
            .collect::<Vec<_>>()
    };
    let held: Vec<_> = channels.iter().flat_map(hold).collect();
    let other = target.channel();
    let deadline = Instant::now() + Duration::from_secs(50);
    loop {
        let result = other.unary::<_, Blob>("/t.T/Echo", &Blob::default(), &within(20));
        if result
            .as_ref()
            .is_err_and(|status| status.code() == Code::ResourceExhausted)
        {
            break;
        }
        let (threads, error) = (target.status("Threads"), result.err());
        assert!(
            Instant::now() < deadline,
            "it is never refused, but: {error:?}; {threads} threads"
        );
    }
    assert!(target.status("Threads") < Limits::default().handlers + MOST_THREADS);
    drop(held);
    while other
        .unary::<_, Blob>("/t.T/Echo", &Blob::default(), &within(20))
        .is_err()
    {
        assert!(Instant::now() < deadline, "the places do not become free");
        thread::sleep(Duration::from_millis(20));
    }
}
