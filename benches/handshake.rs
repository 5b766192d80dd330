//! Measures attested handshakes per second and their processor time on both sides, with the Go peer
//! of the tests for comparison.
//!
//! `cargo bench --bench handshake [-- COUNT]`. The attestation documents are of the dummy variant,
//! so that the bench measures TLS; a real one adds the time of its TPM quote. Each connection is a
//! TCP connection over loopback, the handshake, and one line in each direction; two are open at a
//! time. Client and server share this machine, so compare the processor times.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use attest::atls::{Client, Server};
use attest::attestation;
use attest::attestation::{Issuer, Validator};

#[path = "../src/attest/atls/dummy.rs"]
mod dummy;
use dummy::{Dummy, OID};

const PARALLEL: usize = 2;
/// The first argument of a process that is a server.
const SERVE: &str = "serve";
/// Unit of the times in /proc/PID/stat (proc(5)): 1/100 s on every Linux that Rust supports.
const TICK: Duration = Duration::from_millis(10);

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

    floor(count as u32);
    println!("{count} connections a row, {PARALLEL} at a time; processor time in µs a connection");
    println!("| attested | TLS | client -> server | a second | server µs | client µs |");
    println!("|---|---|---|---:|---:|---:|");
    for mode in ["server", "mutual"] {
        let strong = Row {
            mode,
            client: "ours, strong",
            server: "ours, strong",
            tls: "1.3",
        };
        let (server, begin) = (Peer::start(our_server(mode)), Instant::now());
        let before = server.cpu();
        let client_cpu = call(server.address, mode, "strong", count);
        strong.print(count, begin.elapsed(), server.cpu() - before, client_cpu);
        for tls in ["1.3", "1.2"] {
            for (client_is_go, server_is_go) in
                [(false, false), (true, false), (false, true), (true, true)]
            {
                let needs_go = client_is_go || server_is_go;
                // Two peers of our own always agree on TLS 1.3.
                if (needs_go && go.is_none()) || (!needs_go && tls == "1.2") {
                    continue;
                }
                let server = Peer::start(match &go {
                    Some(binary) if server_is_go => go_peer(binary, "server", mode, tls),
                    _ => our_server(mode),
                });
                let before = server.cpu();
                let begin = Instant::now();
                let client_cpu = match &go {
                    Some(binary) if client_is_go => {
                        call_with_go(binary, server.address, mode, tls, count)
                    }
                    _ => call(server.address, mode, "old", count),
                };
                let row = Row {
                    mode,
                    client: if client_is_go { "Go" } else { "ours" },
                    server: if server_is_go { "Go" } else { "ours" },
                    tls,
                };
                row.print(count, begin.elapsed(), server.cpu() - before, client_cpu);
            }
        }
    }
}

struct Row<'a> {
    mode: &'a str,
    tls: &'a str,
    client: &'a str,
    server: &'a str,
}

impl Row<'_> {
    fn print(&self, count: usize, wall: Duration, server_cpu: Duration, client_cpu: Duration) {
        let each = |time: Duration| time.as_micros() / count as u128;
        println!(
            "| {} | {} | {} -> {} | {:.0} | {} | {} |",
            self.mode,
            self.tls,
            self.client,
            self.server,
            count as f64 / wall.as_secs_f64(),
            each(server_cpu),
            each(client_cpu),
        );
    }
}

/// Prints what the cryptography of a handshake takes at least: the operations of ring and of ML-KEM by themselves.
fn floor(count: u32) {
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_ASN1, KeyPair, UnparsedPublicKey};
    use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};
    let random = SystemRandom::new();
    let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &random).unwrap();
    let key =
        EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, pkcs8.as_ref(), &random).unwrap();
    let signature = key.sign(&random, b"message").unwrap();
    let public = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, key.public_key());
    let provider = tls::provider();
    let group = |name| {
        let mut groups = provider.kx_groups.iter();
        *groups.find(|group| group.name() == name).unwrap()
    };
    let hybrid = group(rustls::NamedGroup::X25519MLKEM768);
    let plain = group(rustls::NamedGroup::X25519);
    let time = |work: &dyn Fn()| {
        let begin = Instant::now();
        (0..count).for_each(|_| work());
        begin.elapsed().as_nanos() as f64 / f64::from(count) / 1000.0
    };
    let share = |group: &dyn rustls::crypto::SupportedKxGroup| group.start().unwrap();
    let offered = share(hybrid).pub_key().to_vec();
    let x25519 = share(plain).pub_key().to_vec();
    println!("the floor: processor time in µs of one operation");
    for (name, took) in [
        (
            "P-256 key",
            time(&|| {
                EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &random).unwrap();
            }),
        ),
        (
            "P-256 signature",
            time(&|| {
                key.sign(&random, b"message").unwrap();
            }),
        ),
        (
            "P-256 verification",
            time(&|| public.verify(b"message", signature.as_ref()).unwrap()),
        ),
        (
            "X25519, one end",
            time(&|| {
                plain.start_and_complete(&x25519).unwrap();
            }),
        ),
        (
            "X25519MLKEM768, the server",
            time(&|| {
                hybrid.start_and_complete(&offered).unwrap();
            }),
        ),
        (
            "X25519MLKEM768, the client's share",
            time(&|| drop(share(hybrid))),
        ),
    ] {
        println!("| {name} | {took:.0} |");
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

/// A server in a process of its own.
struct Peer {
    process: Child,
    address: SocketAddr,
}

impl Peer {
    fn start(mut command: Command) -> Peer {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let address = line
            .trim()
            .strip_prefix("listening ")
            .unwrap()
            .parse()
            .unwrap();
        Peer { process, address }
    }

    fn cpu(&self) -> Duration {
        cpu(&self.process.id().to_string())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.process.stdin.take()); // the end of its input ends it
        let _ = self.process.wait();
    }
}

/// Returns the user and system time of a process.
fn cpu(process: &str) -> Duration {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    // Fields 14 and 15 (proc(5)), counted from the end of the name in parentheses, which is field
    // 2.
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .unwrap()
        .split_whitespace()
        .collect();
    TICK * (fields[11].parse::<u32>().unwrap() + fields[12].parse::<u32>().unwrap())
}

/// Runs our server with one thread per connection until its standard input ends.
fn serve(mode: &str) {
    let server = Arc::new(Server::new(issuer(true), validators(mode == "mutual")));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("listening {}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for socket in listener.incoming() {
            let server = server.clone();
            thread::spawn(move || {
                let mut transport = server.handshake(socket.unwrap(), soon()).unwrap();
                let mut line = String::new();
                BufReader::new(&mut transport.reader)
                    .read_line(&mut line)
                    .unwrap();
                transport
                    .writer
                    .write_all(format!("echo {line}").as_bytes())
                    .unwrap();
            });
        }
    });
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
}

/// Runs our clients and returns their processor time.
fn call(address: SocketAddr, mode: &str, form: &str, count: usize) -> Duration {
    let client = Client::new(issuer(mode == "mutual"), validators(true));
    let client = Arc::new(match form {
        "old" => client.only_old(),
        _ => client.require_strong(),
    });
    let left = Arc::new(AtomicUsize::new(count));
    let before = cpu("self");
    let workers: Vec<_> = (0..PARALLEL)
        .map(|_| {
            let (client, left) = (client.clone(), left.clone());
            thread::spawn(move || {
                while left
                    .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| {
                        left.checked_sub(1)
                    })
                    .is_ok()
                {
                    let mut transport = client
                        .connect(TcpStream::connect(address).unwrap(), soon())
                        .unwrap();
                    transport.writer.write_all(b"hello\n").unwrap();
                    let mut line = String::new();
                    BufReader::new(&mut transport.reader)
                        .read_line(&mut line)
                        .unwrap();
                    assert_eq!(line, "echo hello\n");
                }
            })
        })
        .collect();
    workers
        .into_iter()
        .for_each(|worker| worker.join().unwrap());
    cpu("self") - before
}

/// Runs the Go client and returns the processor time that it reports.
fn call_with_go(
    binary: &Path,
    address: SocketAddr,
    mode: &str,
    tls: &str,
    count: usize,
) -> Duration {
    let output = go_peer(binary, "client", mode, tls)
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

fn go_peer(binary: &Path, role: &str, mode: &str, tls: &str) -> Command {
    let mut command = Command::new(binary);
    // Go's own default is X25519MLKEM768 from 1.24 on, as ours.
    command.args([role, &format!("-mode={mode}"), &format!("-tls={tls}")]);
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
