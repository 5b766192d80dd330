//! Measures attested handshakes per second and their processor time on both sides, and compares them with the Go peer of the tests
//! and with the minimum: the cost of only the cryptography and the TCP connection.
//!
//! `cargo bench --bench handshake [-- COUNT]`. The attestation documents are of the dummy variant, so that the bench measures TLS;
//! a real one adds the time of its TPM quote. Each connection is a TCP connection over loopback, the handshake, and one line in
//! each direction; two are open at a time. Client and server share this machine, so compare the processor times.

use std::fs;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use atls::{Client, Server};
use base::sync::pool::Pool;
use support::program::Peer;
use sys::keeping::WipingAllocator;
use verifier::{Issuer, Validator};

#[path = "../src/atls/tests/dummy.rs"]
mod dummy;
use dummy::{Dummy, OID};

const PARALLEL: usize = 2;
/// The first argument of a process that is a server.
const SERVE: &str = "serve";
/// The mode of a server without TLS.
const TCP: &str = "tcp";
/// Groups of the key exchange.
const MLKEM: &str = "mlkem";
const X25519: &str = "x25519";
/// Unit of the times in /proc/PID/stat (proc(5)): 1/100 s on every Linux that Rust supports.
const TICK: Duration = Duration::from_millis(10);

/// That of the shipped programs.
#[global_allocator]
static ALLOCATOR: WipingAllocator = WipingAllocator::new();

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, role, mode] = &arguments[..]
        && role == SERVE
    {
        return serve(mode);
    }
    let number = arguments.iter().find_map(|argument| argument.parse().ok());
    // `cargo test --all-targets` also calls benches, without this argument, to check that they run.
    let count = number.unwrap_or(if arguments.iter().any(|argument| argument == "--bench") {
        1000
    } else {
        10
    });
    let go = build_go();
    if go.is_none() {
        println!("(no Go tool chain: without the Go peer's rows)");
    }

    let floor = Floor::measure(count);
    floor.print();
    println!("{count} connections a row, {PARALLEL} at a time; processor time in µs a connection");
    println!(
        "| attested | form | key exchange | client -> server | a second | server µs | × floor | × Go | client µs | × floor | × Go |"
    );
    println!("|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|");
    for attested in ["server", "mutual"] {
        for (form, group) in [("strong", MLKEM), ("old", MLKEM), ("old", X25519)] {
            let kind = Kind {
                attested,
                form,
                group,
            };
            let mut of_go = None;
            for (client_is_go, server_is_go) in
                [(true, true), (false, false), (true, false), (false, true)]
            {
                // Two of our own peers always agree on the stronger group.
                let is_impossible = !client_is_go && !server_is_go && group == X25519;
                if is_impossible || (go.is_none() && (client_is_go || server_is_go)) {
                    continue;
                }
                let peer_of = |is_go: bool| go.as_deref().filter(|_| is_go);
                let row = kind.measure(peer_of(client_is_go), peer_of(server_is_go), count);
                if client_is_go && server_is_go {
                    of_go = Some(row);
                }
                kind.print(&row, client_is_go, server_is_go, &floor, of_go.as_ref());
            }
        }
    }
}

/// The kind of a row.
#[derive(Clone, Copy)]
struct Kind<'a> {
    attested: &'a str,
    form: &'a str,
    /// The group of the key exchange, as the Go peer calls it.
    group: &'a str,
}

/// The values of a row.
#[derive(Clone, Copy)]
struct Row {
    /// Connections a second.
    rate: f64,
    /// Processor time of a connection in µs.
    server: f64,
    client: f64,
}

impl Kind<'_> {
    fn measure(&self, client: Option<&Path>, server: Option<&Path>, count: usize) -> Row {
        let server = Peer::start(&mut match server {
            Some(binary) => go_peer(binary, "server", self),
            None => our_server(self.attested),
        });
        let (before, begin) = (cpu_of(&server), Instant::now());
        let client = match client {
            Some(binary) => call_with_go(binary, server.address, self, count),
            None => call(server.address, self, count),
        };
        let took = begin.elapsed();
        let each = |time: Duration| time.as_secs_f64() * 1e6 / count as f64;
        Row {
            rate: count as f64 / took.as_secs_f64(),
            server: each(cpu_of(&server) - before),
            client: each(client),
        }
    }

    fn print(
        &self,
        row: &Row,
        client_is_go: bool,
        server_is_go: bool,
        floor: &Floor,
        of_go: Option<&Row>,
    ) {
        let name = |is_go| if is_go { "Go" } else { "ours" };
        let ratio = |ours: f64, peer: Option<f64>| match peer {
            Some(peer) => format!("{:.2}", ours / peer),
            None => "-".to_owned(),
        };
        println!(
            "| {} | {} | {} | {} -> {} | {:.0} | {:.0} | {} | {} | {:.0} | {} | {} |",
            self.attested,
            self.form,
            if self.group == MLKEM {
                "X25519MLKEM768"
            } else {
                "X25519"
            },
            name(client_is_go),
            name(server_is_go),
            row.rate,
            row.server,
            ratio(row.server, Some(floor.of_server(self))),
            ratio(row.server, of_go.map(|row| row.server)),
            row.client,
            ratio(row.client, Some(floor.of_client(self))),
            ratio(row.client, of_go.map(|row| row.client)),
        );
    }
}

/// The minimal cost of a handshake: processor time in µs of only the operations of ring and of ML-KEM, and of a TCP connection with
/// one line in each direction.
struct Floor {
    key: f64,
    signature: f64,
    verification: f64,
    /// One side of the key exchange.
    x25519: f64,
    hybrid_server: f64,
    hybrid_client: f64,
    tcp_server: f64,
    tcp_client: f64,
}

impl Floor {
    fn measure(count: usize) -> Floor {
        use ring::rand::SystemRandom;
        use ring::signature::{ECDSA_P256_SHA256_ASN1, KeyPair, UnparsedPublicKey};
        use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};
        let random = SystemRandom::new();
        let generate =
            || EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &random).unwrap();
        let pkcs8 = generate();
        let key =
            EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, pkcs8.as_ref(), &random)
                .unwrap();
        let signature = key.sign(&random, b"message").unwrap();
        let public = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, key.public_key());
        let provider = tls::provider();
        let group = |name| {
            let mut groups = provider.kx_groups.iter();
            *groups.find(|group| group.name() == name).unwrap()
        };
        let hybrid = group(rustls::NamedGroup::X25519MLKEM768);
        let plain = group(rustls::NamedGroup::X25519);
        let offered = hybrid.start().unwrap().pub_key().to_vec();
        let answered = hybrid.start_and_complete(&offered).unwrap().pub_key;
        let x25519 = plain.start().unwrap().pub_key().to_vec();
        fn time<T>(count: usize, work: impl Fn() -> T) -> f64 {
            let before = cpu("self");
            (0..count).for_each(|_| drop(black_box(work())));
            (cpu("self") - before).as_secs_f64() * 1e6 / count as f64
        }
        let server = Peer::start(&mut our_server(TCP));
        let before = (cpu_of(&server), cpu("self"));
        call_tcp(server.address, count);
        let each = |time: Duration| time.as_secs_f64() * 1e6 / count as f64;
        let tcp_server = each(cpu_of(&server) - before.0);
        let tcp_client = each(cpu("self") - before.1);
        Floor {
            key: time(count, generate),
            signature: time(count, || key.sign(&random, b"message").unwrap()),
            verification: time(count, || {
                public.verify(b"message", signature.as_ref()).unwrap()
            }),
            x25519: time(count, || plain.start_and_complete(&x25519).unwrap()),
            hybrid_server: time(count, || hybrid.start_and_complete(&offered).unwrap()),
            // The key pairs do not match, so the secret is wrong; its computation costs the same.
            hybrid_client: time(count, || {
                hybrid.start().unwrap().complete(&answered).unwrap()
            }),
            tcp_server,
            tcp_client,
        }
    }

    fn print(&self) {
        println!("the floor: processor time in µs");
        println!("| one operation | µs |\n|---|---:|");
        for (name, took) in [
            ("P-256: a key", self.key),
            ("P-256: a signature", self.signature),
            ("P-256: a verification", self.verification),
            ("X25519, one end", self.x25519),
            ("X25519MLKEM768, the server", self.hybrid_server),
            ("X25519MLKEM768, the client", self.hybrid_client),
            (
                "TCP connection and a line each way, the server",
                self.tcp_server,
            ),
            (
                "TCP connection and a line each way, the client",
                self.tcp_client,
            ),
        ] {
            println!("| {name} | {took:.0} |");
        }
    }

    fn of_server(&self, kind: &Kind<'_>) -> f64 {
        let exchange = match kind.group {
            MLKEM => self.hybrid_server,
            _ => self.x25519,
        };
        let mutual = if kind.attested == "mutual" {
            self.judge(kind)
        } else {
            0.0
        };
        self.tcp_server + exchange + self.prove(kind) + mutual
    }

    fn of_client(&self, kind: &Kind<'_>) -> f64 {
        let exchange = match kind.group {
            MLKEM => self.hybrid_client,
            _ => self.x25519,
        };
        let mutual = if kind.attested == "mutual" {
            self.prove(kind)
        } else {
            0.0
        };
        self.tcp_client + exchange + self.judge(kind) + mutual
    }

    /// In the old form each connection has a key and a certificate of its own.
    fn prove(&self, kind: &Kind<'_>) -> f64 {
        match kind.form {
            "old" => self.key + 2.0 * self.signature,
            _ => self.signature,
        }
    }

    /// In the old form the certificate's own signature is verified, too.
    fn judge(&self, kind: &Kind<'_>) -> f64 {
        match kind.form {
            "old" => 2.0 * self.verification,
            _ => self.verification,
        }
    }
}

fn issuer(wanted: bool) -> Option<Arc<dyn Issuer>> {
    if wanted {
        Some(Arc::new(Dummy(OID)))
    } else {
        None
    }
}

fn validators(wanted: bool) -> Vec<Arc<dyn Validator>> {
    if wanted {
        vec![Arc::new(Dummy(OID))]
    } else {
        vec![]
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn cpu_of(peer: &Peer) -> Duration {
    cpu(&peer.id().to_string())
}

/// Returns the user and system time of a process.
fn cpu(process: &str) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    // Fields 14 and 15 (proc(5)), counted from the end of the name in parentheses, which is field 2.
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .collect();
    TICK * (fields[11].parse::<u32>().unwrap() + fields[12].parse::<u32>().unwrap())
}

/// Runs our server until its standard input ends.
fn serve(mode: &str) {
    let is_tcp = mode == TCP;
    let server = Arc::new(Server::new(
        issuer(true),
        verifier::judge_of_any(validators(mode == "mutual")),
    ));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("listening {}", listener.local_addr().unwrap());
    // as the services have it
    let pool = Arc::new(Pool::new("bench", 64));
    thread::spawn(move || {
        for socket in listener.incoming() {
            let (server, socket) = (server.clone(), socket.unwrap());
            pool.submit(move || {
                if is_tcp {
                    socket.set_nodelay(true).unwrap();
                    return echo(&socket, &socket);
                }
                let transport = server.handshake(socket, soon()).unwrap();
                echo(transport.reader, transport.writer);
            });
        }
    });
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
}

fn echo(reader: impl Read, mut writer: impl Write) {
    let mut line = String::new();
    BufReader::new(reader).read_line(&mut line).unwrap();
    writer.write_all(format!("echo {line}").as_bytes()).unwrap();
}

fn expect_echo(reader: impl Read, mut writer: impl Write) {
    writer.write_all(b"hello\n").unwrap();
    let mut line = String::new();
    BufReader::new(reader).read_line(&mut line).unwrap();
    assert_eq!(line, "echo hello\n");
}

/// Runs our clients and returns their processor time.
fn call(address: SocketAddr, kind: &Kind<'_>, count: usize) -> Duration {
    let client = Client::new(
        issuer(kind.attested == "mutual"),
        verifier::judge_of_any(validators(true)),
    );
    let client = match kind.form {
        "old" => client.only_old(),
        _ => client.require_strong(),
    };
    let before = cpu("self");
    call_each(count, || {
        let socket = TcpStream::connect(address).unwrap();
        let transport = client.connect(socket, soon()).unwrap();
        expect_echo(transport.reader, transport.writer);
    });
    cpu("self") - before
}

fn call_tcp(address: SocketAddr, count: usize) {
    call_each(count, || {
        let socket = TcpStream::connect(address).unwrap();
        socket.set_nodelay(true).unwrap();
        expect_echo(&socket, &socket);
    });
}

/// Makes `count` calls, `PARALLEL` at a time.
fn call_each(count: usize, call: impl Fn() + Sync) {
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..PARALLEL {
            scope.spawn(|| {
                while next.fetch_add(1, Ordering::Relaxed) < count {
                    call();
                }
            });
        }
    });
}

/// Runs the Go client and returns the processor time that it reports.
fn call_with_go(binary: &Path, address: SocketAddr, kind: &Kind<'_>, count: usize) -> Duration {
    let output = go_peer(binary, "client", kind)
        .args([
            format!("-addr={address}"),
            format!("-n={count}"),
            format!("-parallel={PARALLEL}"),
        ])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    let micros = text
        .split_whitespace()
        .skip_while(|word| *word != "cpu_us")
        .nth(1)
        .unwrap();
    Duration::from_micros(micros.parse().unwrap())
}

fn our_server(mode: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([SERVE, mode]);
    command
}

fn go_peer(binary: &Path, role: &str, kind: &Kind<'_>) -> Command {
    let mut command = Command::new(binary);
    // Go's own default since 1.24. The peer's go.mod names an older Go, so the default must be set.
    command.env("GODEBUG", "tlsmlkem=1");
    command.args([role, "-tls=1.3"]);
    command.arg(format!("-mode={}", kind.attested));
    command.arg(format!("-curve={}", kind.group));
    command.arg(format!("-strong={}", kind.form == "strong"));
    command
}

fn build_go() -> Option<PathBuf> {
    let binary = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("atls-go");
    let built = Command::new("go")
        .args(["build", "-o"])
        .arg(&binary)
        .arg(".")
        .current_dir(Path::new(support::ROOT).join("tests/atls_go"))
        .envs([
            ("GOFLAGS", "-mod=mod"),
            ("GOPROXY", "off"),
            ("GOTOOLCHAIN", "local"),
            ("CGO_ENABLED", "0"),
        ])
        .status();
    matches!(built, Ok(status) if status.success()).then_some(binary)
}
