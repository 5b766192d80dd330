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

    println!("{count} connections a row, {PARALLEL} at a time; processor time in µs a connection");
    println!("| attested | TLS | client -> server | a second | server µs | client µs |");
    println!("|---|---|---|---:|---:|---:|");
    for mode in ["server", "mutual"] {
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
                    _ => call(server.address, mode, count),
                };
                let wall = begin.elapsed();
                let each = |time: Duration| time.as_micros() / count as u128;
                println!(
                    "| {mode} | {tls} | {} -> {} | {:.0} | {} | {} |",
                    if client_is_go { "Go" } else { "ours" },
                    if server_is_go { "Go" } else { "ours" },
                    count as f64 / wall.as_secs_f64(),
                    each(server.cpu() - before),
                    each(client_cpu),
                );
            }
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
fn call(address: SocketAddr, mode: &str, count: usize) -> Duration {
    let client = Arc::new(Client::new(issuer(mode == "mutual"), validators(true)));
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
    // All rows use one key exchange, because ours has no post-quantum one.
    command.args([
        role,
        "-curve=x25519",
        &format!("-mode={mode}"),
        &format!("-tls={tls}"),
    ]);
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
