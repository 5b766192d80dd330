//! Measures calls over loopback: ours, tonic, grpcio and h2load, in plaintext and TLS. The floor
//! for comparison is a blocking ping-pong of as many bytes over the same kind of connection.
//!
//!     cargo bench --bench rpc              everything, three rounds; prints the tables of docs/benchmarks.md
//!     cargo bench --bench rpc -- 2 1       seconds a measurement, rounds
//!
//! Each client and each server is a process of its own, so that its CPU time can be measured:
//!
//! ```text
//!   PEER serve [CERTIFICATE KEY]                                        prints its port, serves until its input closes
//!   PEER call unary|stream PORT CONNECTIONS SECONDS [CERTIFICATE]       prints "ready"; a line of input makes it begin;
//!                                                                       prints how many ns each of its calls took
//! ```
//!
//! PEER is this program (`floor` or `firstlight` before the arguments), benches/tonic or tests/interop/bench.py. The measurements
//! alternate between the peers in each round, and ratios are taken within a round, so that other load on the machine affects all of
//! them. Each connection has one call at a time. `unary` echoes 16 bytes; `stream` receives 64 MiB from the server in messages of 1
//! MiB.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use rpc::grpc::{Call, CallOptions, Channel, Limits, Router, Sender, Server};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
};
use sys::keeping::WipingAllocator;
use transport::{Accept, Transport};

/// The message of all calls. In `unary` it has 18 bytes on the wire.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Blob {
    /// 16 bytes, or 1 MiB.
    #[prost(bytes = "vec", tag = "1")]
    pub data: Vec<u8>,
}

/// Bytes of a unary call on the wire once tables and settings are known, including headers and trailers. The floor sends as many.
const REQUEST: usize = 9 + 8 + 9 + 5 + 18;
const RESPONSE: usize = 9 + 2 + 9 + 5 + 18 + 9 + 1;
const MIB: usize = 1 << 20;
/// Number of messages of 1 MiB in a stream.
const STREAM: usize = 64;
/// Number of connections in the measurement of idle connections.
const IDLE: usize = 1000;

const LOADS: [Load; 3] = [("unary", 1), ("unary", 64), ("stream", 1)];
/// The method, and the number of connections.
type Load = (&'static str, usize);

/// Client and server. If one of the two is replaced, the difference is the cost of the client, or of the server.
const PAIRS: [Pair; 10] = [
    ("floor", "floor"),
    ("firstlight", "firstlight"),
    ("tonic", "tonic"),
    ("grpcio", "grpcio"),
    ("h2load", "firstlight"),
    ("h2load", "tonic"),
    ("h2load", "grpcio"),
    ("tonic", "firstlight"),
    ("grpcio", "firstlight"),
    ("firstlight", "tonic"),
];
/// Client and server.
type Pair = (&'static str, &'static str);
const SERVERS: [&str; 4] = ["floor", "firstlight", "tonic", "grpcio"];

/// That of the shipped programs.
#[global_allocator]
static ALLOCATOR: WipingAllocator = WipingAllocator::new();

fn main() {
    let arguments: Vec<String> = env::args()
        .skip(1)
        .filter(|argument| argument != "--bench")
        .collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        [who, "serve", ref files @ ..] => serve(who, files),
        [
            who,
            "call",
            method,
            port,
            connections,
            seconds,
            ref certificate @ ..,
        ] => {
            let seconds = Duration::from_secs_f64(seconds.parse().expect("seconds"));
            let connect = Connect::new(port.parse().expect("a port"), certificate.first().copied());
            call(
                who,
                method,
                &connect,
                connections.parse().expect("a number of connections"),
                seconds,
            );
        }
        [] => compare(Duration::from_millis(400), 3),
        [seconds, rounds] => compare(
            Duration::from_secs_f64(seconds.parse().expect("seconds")),
            rounds.parse().expect("a number of rounds"),
        ),
        _ => panic!("usage: cargo bench --bench rpc [-- SECONDS ROUNDS]"),
    }
}

// ---- the comparison ----

/// The result of one measurement.
#[derive(Clone, Copy)]
struct Sample {
    /// Calls per second; for a stream, MB per second.
    rate: f64,
    /// Latencies and CPU time per call in microseconds.
    p50: f64,
    p99: f64,
    server: f64,
    client: f64,
}

/// The rounds of each row of the tables.
type Results = HashMap<(bool, Load, Pair), Vec<Sample>>;

fn compare(time: Duration, rounds: usize) {
    let peers = Peers::new();
    let mut results = Results::new();
    for tls in [false, true] {
        let servers = SERVERS.map(|who| (who, ServerProcess::start(&peers, who, tls)));
        for _ in 0..rounds {
            for load in LOADS {
                for (client, server) in PAIRS {
                    let (_, process) = servers.iter().find(|(who, _)| *who == server).unwrap();
                    let sample = peers.measure(client, process, load, time);
                    results
                        .entry((tls, load, (client, server)))
                        .or_default()
                        .push(sample);
                }
            }
        }
    }
    for load in LOADS {
        print_load(&results, load);
    }
    let idle = |tls| ["firstlight", "tonic", "grpcio"].map(|who| idle_kib(&peers, who, tls));
    let idle = [idle(false), idle(true)];
    println!(
        "\n### {IDLE} idle connections\n\n| KiB resident a connection | firstlight | tonic | grpcio |\n|---|---:|---:|---:|"
    );
    for (name, [firstlight, tonic, grpcio]) in ["plaintext", "TLS"].into_iter().zip(idle) {
        println!("| {name} | {firstlight:.1} | {tonic:.1} | {grpcio:.1} |");
    }
    print_aims(&results, idle.map(|row| row[0]));
}

fn print_load(results: &Results, load: Load) {
    let (method, connections) = load;
    let rate = if method == "stream" {
        "MB/s"
    } else {
        "calls/s"
    };
    let plural = if connections == 1 { "" } else { "s" };
    println!("\n### {method}, {connections} connection{plural}\n");
    println!(
        "| | client → server | {rate} | × floor | × tonic | p50 µs | p99 µs | server µs/call | client µs/call |"
    );
    println!("|---|---|---:|---:|---:|---:|---:|---:|---:|");
    for tls in [false, true] {
        for pair in PAIRS {
            let row = &results[&(tls, load, pair)];
            let tonic = if pair.0 == "h2load" {
                ("h2load", "tonic")
            } else {
                ("tonic", "tonic")
            };
            println!(
                "| {} | {} → {} | {:.0} | {:.2} | {:.2} | {:.0} | {:.0} | {:.1} | {:.1} |",
                if tls { "TLS" } else { "plain" },
                pair.0,
                pair.1,
                median(row.iter().map(|sample| sample.rate)),
                ratio(results, tls, load, pair, ("floor", "floor"), |sample| {
                    sample.rate
                }),
                ratio(results, tls, load, pair, tonic, |sample| sample.rate),
                median(row.iter().map(|sample| sample.p50)),
                median(row.iter().map(|sample| sample.p99)),
                median(row.iter().map(|sample| sample.server)),
                median(row.iter().map(|sample| sample.client)),
            );
        }
    }
}

/// Prints the goals of the project and whether they are met.
fn print_aims(results: &Results, idle: [f64; 2]) {
    println!("\n### Aims\n\n| | wanted | plaintext | TLS |\n|---|---:|---:|---:|");
    let ours = ("firstlight", "firstlight");
    let theirs = ("tonic", "tonic");
    let (neutral, neutral_tonic) = (("h2load", "firstlight"), ("h2load", "tonic"));
    let rate: fn(&Sample) -> f64 = |sample| sample.rate;
    let p99: fn(&Sample) -> f64 = |sample| sample.p99;
    let cpu: fn(&Sample) -> f64 = |sample| sample.server;
    let [one, many, _] = LOADS;
    let print = |what: &str, least: Option<f64>, most: Option<f64>, got: [f64; 2]| {
        let limit = least
            .map(|least| format!("≥ {least}"))
            .or(most.map(|most| format!("≤ {most}")))
            .unwrap_or_default();
        let cells = got.map(|got| {
            let met = least.is_none_or(|least| got >= least) && most.is_none_or(|most| got <= most);
            format!("{got:.2} {}", if met { "pass" } else { "**fail**" })
        });
        println!("| {what} | {limit} | {} | {} |", cells[0], cells[1]);
    };
    let both =
        |load, pair, base, of| [false, true].map(|tls| ratio(results, tls, load, pair, base, of));
    print(
        "rate of the floor's, 1 connection",
        Some(0.85),
        None,
        both(one, ours, ("floor", "floor"), rate),
    );
    print(
        "rate of tonic's, 1 connection",
        Some(1.2),
        None,
        both(one, ours, theirs, rate),
    );
    print(
        "the same under h2load",
        Some(1.2),
        None,
        both(one, neutral, neutral_tonic, rate),
    );
    print(
        "rate of tonic's, 64 connections",
        Some(1.5),
        None,
        both(many, ours, theirs, rate),
    );
    print(
        "the same under h2load",
        Some(1.5),
        None,
        both(many, neutral, neutral_tonic, rate),
    );
    for (name, load) in [("1 connection", one), ("64 connections", many)] {
        print(
            &format!("p99 of tonic's, {name}"),
            None,
            Some(1.0),
            both(load, ours, theirs, p99),
        );
        print(
            "the same under h2load",
            None,
            Some(1.0),
            both(load, neutral, neutral_tonic, p99),
        );
    }
    for (name, load) in [("1 connection", one), ("64 connections", many)] {
        print(
            &format!("server CPU a call of tonic's, {name}"),
            None,
            Some(0.5),
            both(load, ours, theirs, cpu),
        );
        print(
            "the same under h2load",
            None,
            Some(0.5),
            both(load, neutral, neutral_tonic, cpu),
        );
    }
    print("KiB resident an idle connection", None, Some(64.0), idle);
}

/// Returns the median over all rounds of the ratio between the value of `pair` and that of `base`.
fn ratio(
    results: &Results,
    tls: bool,
    load: Load,
    pair: Pair,
    base: Pair,
    of: fn(&Sample) -> f64,
) -> f64 {
    let (row, base) = (&results[&(tls, load, pair)], &results[&(tls, load, base)]);
    median(
        row.iter()
            .zip(base)
            .map(|(sample, base)| of(sample) / of(base)),
    )
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        (values[middle - 1] + values[middle]) / 2.0
    }
}

// ---- processes ----

/// How the peers are started, and the certificate of the servers.
struct Peers {
    python: PathBuf,
    tonic: PathBuf,
    folder: tempfile::TempDir,
}

impl Peers {
    fn new() -> Peers {
        let root = Path::new(support::ROOT);
        let output = Command::new(root.join("tools/python.sh"))
            .stderr(Stdio::inherit())
            .output()
            .unwrap();
        let python = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim());
        let target = "x86_64-unknown-linux-gnu";
        let folder = root.join("target/bench-tonic");
        let mut build = Command::new(env!("CARGO"));
        build.current_dir(root.join("benches/tonic")).args([
            "build",
            "--locked",
            "--quiet",
            "--release",
        ]);
        let built = build
            .args(["--target", target, "--target-dir"])
            .arg(&folder)
            .status()
            .unwrap();
        assert!(built.success(), "benches/tonic cannot be built");
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let peers = Peers {
            python,
            tonic: folder.join(target).join("release/bench-tonic"),
            folder: tempfile::tempdir().unwrap(),
        };
        fs::write(peers.certificate(), made.cert.pem()).unwrap();
        fs::write(peers.key(), made.signing_key.serialize_pem()).unwrap();
        fs::write(
            peers.request(),
            [&[0, 0, 0, 0, 18, 10, 16][..], &[b'x'; 16]].concat(),
        )
        .unwrap();
        peers
    }

    fn certificate(&self) -> PathBuf {
        self.folder.path().join("certificate.pem")
    }

    fn key(&self) -> PathBuf {
        self.folder.path().join("key.pem")
    }

    /// The framed request of all calls, for h2load.
    fn request(&self) -> PathBuf {
        self.folder.path().join("request")
    }

    fn command(&self, who: &str) -> Command {
        let mut command = match who {
            "tonic" => Command::new(&self.tonic),
            "grpcio" => Command::new(&self.python),
            _ => Command::new(env::current_exe().unwrap()),
        };
        match who {
            "tonic" => &mut command,
            "grpcio" => command.arg(Path::new(support::ROOT).join("tests/interop/bench.py")),
            _ => command.arg(who),
        };
        command
    }

    fn measure(&self, client: &str, server: &ServerProcess, load: Load, time: Duration) -> Sample {
        let (mut times, server_cpu, client_cpu) = match client {
            "h2load" => self.h2load(server, load, time),
            _ => self.client(client, server, load, time),
        };
        assert!(!times.is_empty(), "no call of {client} succeeded");
        times.sort_by(f64::total_cmp);
        let calls = times.len() as f64;
        let rate = match load.0 {
            // The last call may end long after the time.
            "stream" => calls * (STREAM * MIB) as f64 / times.iter().sum::<f64>(),
            _ => calls / time.as_secs_f64(),
        };
        Sample {
            rate,
            p50: times[times.len() / 2],
            p99: times[times.len() * 99 / 100],
            server: server_cpu.as_secs_f64() * 1e6 / calls,
            client: client_cpu.as_secs_f64() * 1e6 / calls,
        }
    }

    /// Runs a client. Returns the times of its calls in microseconds, and the CPU times of server and client.
    fn client(
        &self,
        who: &str,
        server: &ServerProcess,
        load: Load,
        time: Duration,
    ) -> (Vec<f64>, Duration, Duration) {
        let mut command = self.command(who);
        command.args([
            "call",
            load.0,
            &server.port.to_string(),
            &load.1.to_string(),
            &time.as_secs_f64().to_string(),
        ]);
        if server.tls {
            command.arg(self.certificate());
        }
        let mut client = Process::start(&mut command);
        assert_eq!(client.line(), "ready");
        let before = (server.process.cpu(), client.cpu());
        client.input.write_all(b"\n").unwrap();
        // The client prints everything at its end.
        client.output.fill_buf().unwrap();
        let after = (server.process.cpu(), client.cpu());
        let times = client
            .line()
            .split(' ')
            .map(|time| time.parse::<f64>().unwrap() / 1e3)
            .collect();
        (times, after.0 - before.0, after.1 - before.1)
    }

    /// Runs h2load, whose single thread drives all connections; its times include the handshakes.
    fn h2load(
        &self,
        server: &ServerProcess,
        load: Load,
        time: Duration,
    ) -> (Vec<f64>, Duration, Duration) {
        let (method, scheme) = (
            if load.0 == "stream" { "Stream" } else { "Echo" },
            if server.tls { "https" } else { "http" },
        );
        let log = self.folder.path().join("h2load");
        let _ = fs::remove_file(&log);
        let mut command = Command::new("h2load");
        command.args([
            "--connection-window-bits=24",
            "--window-bits=24",
            "--header=te: trailers",
        ]);
        command
            .arg("--header=content-type: application/grpc")
            .arg("--data")
            .arg(self.request());
        command.args([
            "--clients",
            &load.1.to_string(),
            "--duration",
            &format!("{}ms", time.as_millis()),
        ]);
        command.arg("--log-file").arg(&log);
        command.arg(format!(
            "{scheme}://127.0.0.1:{}/bench.Bench/{method}",
            server.port
        ));
        let before = (server.process.cpu(), Duration::ZERO);
        let mut client = Process::start(&mut command);
        let mut rest = String::new();
        client.output.read_to_string(&mut rest).unwrap();
        let after = (server.process.cpu(), client.cpu());
        // The columns are start, HTTP status, and microseconds.
        let log = fs::read_to_string(log).unwrap();
        let times = log.lines().map(|line| line.split('\t').collect::<Vec<_>>());
        let times = times
            .filter(|line| line[1] == "200")
            .map(|line| line[2].parse().unwrap())
            .collect();
        (times, after.0 - before.0, after.1)
    }
}

struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Process {
    fn start(command: &mut Command) -> Process {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (
            child.stdin.take().unwrap(),
            BufReader::new(child.stdout.take().unwrap()),
        );
        Process {
            child,
            input,
            output,
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Returns the user and system time so far (proc(5), fields 14 and 15 of stat, in ticks of 10 ms).
    fn cpu(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let behind_name = stat.rsplit(") ").next().unwrap();
        let ticks: u64 = behind_name
            .split(' ')
            .skip(11)
            .take(2)
            .map(|ticks| ticks.parse::<u64>().unwrap())
            .sum();
        Duration::from_millis(10 * ticks)
    }

    fn resident_kib(&self) -> f64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct ServerProcess {
    process: Process,
    port: u16,
    tls: bool,
}

impl ServerProcess {
    fn start(peers: &Peers, who: &str, tls: bool) -> ServerProcess {
        let mut command = peers.command(who);
        command.arg("serve");
        if tls {
            command.args([peers.certificate(), peers.key()]);
        }
        let mut process = Process::start(&mut command);
        let port = process.line().parse().unwrap();
        ServerProcess { process, port, tls }
    }
}

/// Returns how many KiB a new server grows per connection on which SETTINGS were exchanged.
fn idle_kib(peers: &Peers, who: &str, tls: bool) -> f64 {
    let server = ServerProcess::start(peers, who, tls);
    let certificate = peers.certificate();
    let connect = Connect::new(server.port, tls.then(|| certificate.to_str().unwrap()));
    let open = || {
        let mut transport = connect.transport();
        // The preface, an empty SETTINGS frame, and an acknowledgement, because the server's SETTINGS always come first.
        transport
            .writer
            .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0")
            .unwrap();
        transport.reader.read_exact(&mut [0; 9]).unwrap();
        transport
            .writer
            .write_all(b"\0\0\0\x04\x01\0\0\0\0")
            .unwrap();
        transport
    };
    // The memory that the first connection needs belongs to the server and not to a connection.
    let first = open();
    thread::sleep(Duration::from_millis(300));
    let before = server.process.resident_kib();
    let open: Vec<Transport> = (0..IDLE).map(|_| open()).collect();
    thread::sleep(Duration::from_secs(1));
    let after = server.process.resident_kib();
    drop((first, open));
    (after - before) / IDLE as f64
}

// ---- our servers ----

fn serve(who: &str, files: &[&str]) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", listener.local_addr().unwrap().port());
    let tls = match files {
        [certificate, key] => {
            let chain = vec![CertificateDer::from_pem_file(certificate).unwrap()];
            let key = PrivateKeyDer::from_pem_file(key).unwrap();
            let mut config = ServerConfig::builder()
                .with_no_client_auth()
                .with_single_cert(chain, key)
                .unwrap();
            config.alpn_protocols = vec![b"h2".to_vec()];
            Some(Arc::new(config))
        }
        _ => None,
    };
    let secure = move |socket: TcpStream| match &tls {
        None => transport::plain::transport(socket),
        Some(tls) => shake_hands(
            ServerConnection::new(tls.clone())
                .map_err(io::Error::other)?
                .into(),
            socket,
        ),
    };
    let until = || drop(io::stdin().read_to_end(&mut Vec::new()));
    if who == "floor" {
        thread::spawn(move || {
            while let Ok((socket, _)) = listener.accept() {
                let transport = secure(socket).unwrap();
                thread::spawn(move || serve_floor(transport));
            }
        });
        return until();
    }
    let accept: Arc<dyn Accept> = Arc::new(move |socket: TcpStream, _: Instant| secure(socket));
    let router = Router::new()
        .unary("/bench.Bench/Echo", |_: &Call, request: Blob| Ok(request))
        .server_streaming(
            "/bench.Bench/Stream",
            |_: &Call, _: Blob, responses: &mut Sender<Blob>| {
                let blob = Blob {
                    data: vec![b'x'; MIB],
                };
                (0..STREAM).try_for_each(|_| responses.send(&blob))
            },
        );
    let limits = Limits {
        connections: 2 * IDLE,
        connections_per_peer: 2 * IDLE,
        ..Limits::default()
    };
    let _server = Server::start("bench", listener, accept, router, limits).unwrap();
    until();
}

/// Answers a request that begins with 1 with the bytes of a stream, and others with those of a response.
fn serve_floor(mut transport: Transport) {
    let mut request = [0; REQUEST];
    let mebibyte = vec![0; MIB];
    while transport.reader.read_exact(&mut request).is_ok() {
        let answered = match request[0] {
            1 => (0..STREAM).try_for_each(|_| transport.writer.write_all(&mebibyte)),
            _ => transport.writer.write_all(&[0; RESPONSE]),
        };
        if answered.is_err() {
            return;
        }
    }
}

fn shake_hands(mut connection: Connection, mut socket: TcpStream) -> io::Result<Transport> {
    socket.set_nodelay(true)?;
    while connection.is_handshaking() {
        connection.complete_io(&mut socket)?;
    }
    atls::split(connection, socket)
}

// ---- our clients ----

/// The address, and the TLS configuration if any.
struct Connect {
    port: u16,
    tls: Option<Arc<ClientConfig>>,
}

impl Connect {
    fn new(port: u16, certificate: Option<&str>) -> Connect {
        let tls = certificate.map(|file| {
            let mut roots = RootCertStore::empty();
            roots
                .add(CertificateDer::from_pem_file(file).unwrap())
                .unwrap();
            let mut config = ClientConfig::builder()
                .with_root_certificates(roots)
                .with_no_client_auth();
            config.alpn_protocols = vec![b"h2".to_vec()];
            Arc::new(config)
        });
        Connect { port, tls }
    }

    fn transport(&self) -> Transport {
        let socket = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        match &self.tls {
            None => transport::plain::transport(socket).unwrap(),
            Some(config) => {
                let name = ServerName::try_from("localhost").unwrap();
                shake_hands(
                    ClientConnection::new(config.clone(), name).unwrap().into(),
                    socket,
                )
                .unwrap()
            }
        }
    }

    /// Returns a function that makes one call of `method`.
    fn caller(&self, who: &str, method: &str) -> Box<dyn FnMut() + Send> {
        let mut transport = self.transport();
        let is_stream = method == "stream";
        if who == "floor" {
            let (request, mut response) = ([u8::from(is_stream); REQUEST], vec![0; MIB]);
            return Box::new(move || {
                transport.writer.write_all(&request).unwrap();
                if !is_stream {
                    return transport
                        .reader
                        .read_exact(&mut response[..RESPONSE])
                        .unwrap();
                }
                (0..STREAM).for_each(|_| transport.reader.read_exact(&mut response).unwrap());
            });
        }
        let channel = Channel::new(transport, "localhost").unwrap();
        let (request, options) = (
            Blob {
                data: vec![b'x'; 16],
            },
            CallOptions::default(),
        );
        if is_stream {
            return Box::new(move || {
                let responses = channel
                    .server_streaming("/bench.Bench/Stream", &request, &options)
                    .unwrap();
                assert_eq!(
                    responses
                        .map(|response: Result<Blob, _>| response.unwrap().data.len())
                        .sum::<usize>(),
                    STREAM * MIB
                );
            });
        }
        Box::new(move || {
            assert_eq!(
                channel
                    .unary::<_, Blob>("/bench.Bench/Echo", &request, &options)
                    .unwrap(),
                request
            )
        })
    }
}

/// Makes calls over each connection in a thread of its own, and prints how long each call took.
fn call(who: &str, method: &str, connect: &Connect, connections: usize, time: Duration) {
    let (ready, go) = (Barrier::new(connections + 1), Barrier::new(connections + 1));
    let caller = || {
        let mut call = connect.caller(who, method);
        for _ in 0..if method == "stream" { 1 } else { 10 } {
            call();
        }
        ready.wait();
        go.wait();
        // Allocated in advance, because the C library's realloc is not part of the client's cost.
        let (mut times, mut now) = (Vec::with_capacity(1 << 16), Instant::now());
        let until = now + time;
        while now < until {
            call();
            let after = Instant::now();
            times.push((after - now).as_nanos() as u32);
            now = after;
        }
        times
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..connections).map(|_| scope.spawn(caller)).collect();
        ready.wait();
        println!("ready");
        io::stdin().lock().read_line(&mut String::new()).unwrap();
        go.wait();
        let mut output = String::new();
        for thread in threads {
            thread
                .join()
                .unwrap()
                .iter()
                .for_each(|time| output += &format!("{time} "));
        }
        println!("{}", output.trim());
    });
}
