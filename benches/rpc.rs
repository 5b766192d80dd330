//! Unary round trips a second, plaintext over loopback, each connection with one call at a time: ours, tonic, grpcio, and
//! the floor, a blocking TCP ping-pong of as many bytes.
//!
//!     cargo bench --bench rpc              0.8 seconds a row, under 20 in all
//!     cargo bench --bench rpc -- 5         five seconds a row
//!
//! Servers run in a process of their own (this program again), so that their CPU time can be told: user and system, a call.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use firstlight::grpc::{Accept, Call, CallOptions, Channel, Limits, Router, Server, Transport};

#[path = "../tests/interop/bench_tonic.rs"]
mod bench_tonic;

/// The message of the bench: 18 bytes on the wire.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Blob {
    /// 16 bytes.
    #[prost(bytes = "vec", tag = "1")]
    pub data: Vec<u8>,
}

/// What a call costs on the wire once tables and settings are known, headers and trailers included: the floor's bytes.
const REQUEST: usize = 9 + 8 + 9 + 5 + 18;
const RESPONSE: usize = 9 + 2 + 9 + 5 + 18 + 9 + 1;

fn main() {
    let arguments: Vec<String> = env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["serve", what] => serve(what),
        [] => compare(Duration::from_millis(800)),
        [seconds] => compare(Duration::from_secs_f64(seconds.parse().expect("seconds"))),
        _ => panic!("usage: cargo bench --bench rpc [-- SECONDS]"),
    }
}

fn compare(time: Duration) {
    println!(
        "{:<28}{:>16}{:>10}{:>14}{:>14}",
        "client -> server", "connections", "calls/s", "of the floor", "server us/call"
    );
    for connections in [1, 64] {
        let mut floor = None;
        for (client, server) in [
            ("floor", "floor"),
            ("ours", "ours"),
            ("tonic", "tonic"),
            ("ours", "tonic"),
            ("tonic", "ours"),
            ("grpcio", "ours"),
            ("ours", "grpcio"),
            ("grpcio", "grpcio"),
        ] {
            let process = ServerProcess::start(server);
            let before = process.cpu();
            let rate = run(client, process.port, connections, time);
            let cpu = process.cpu().saturating_sub(before).as_secs_f64() * 1e6 / (rate * time.as_secs_f64());
            let floor = *floor.get_or_insert(rate);
            println!(
                "{:<28}{connections:>16}{rate:>10.0}{:>14.2}{cpu:>14.1}",
                format!("{client} -> {server}"),
                rate / floor
            );
        }
    }
}

// ---- servers ----

struct ServerProcess {
    child: Child,
    port: u16,
}

impl ServerProcess {
    fn start(what: &str) -> ServerProcess {
        let mut command = match what {
            "grpcio" => python(),
            _ => Command::new(env::current_exe().unwrap()),
        };
        match what {
            "grpcio" => command.arg("server"),
            _ => command.args(["serve", what]),
        };
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        ServerProcess { child, port: line.trim().parse().unwrap() }
    }

    /// User and system time so far (proc(5), fields 14 and 15 of stat, in ticks of 10 ms).
    fn cpu(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap();
        let behind_name = stat.rsplit(") ").next().unwrap();
        let ticks: u64 = behind_name.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap()).sum();
        Duration::from_millis(10 * ticks)
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn python() -> Command {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(root.join("tools/python.sh")).stderr(Stdio::inherit()).output().unwrap();
    let mut command = Command::new(String::from_utf8(output.stdout).unwrap().trim());
    command.arg(root.join("tests/interop/bench.py"));
    command
}

/// Prints the port and serves until the standard input closes.
fn serve(what: &str) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", listener.local_addr().unwrap().port());
    let wait = || drop(std::io::stdin().read_to_end(&mut Vec::new()));
    match what {
        "ours" => {
            let accept: Arc<dyn Accept> = Arc::new(|socket: TcpStream, _: Instant| Transport::plain(socket));
            let router = Router::new().unary("/bench.Bench/Echo", |_: &Call, request: Blob| Ok(request));
            let _server = Server::start("bench", listener, accept, router, Limits::default()).unwrap();
            wait();
        }
        "tonic" => bench_tonic::serve(listener, wait),
        "floor" => {
            thread::spawn(move || {
                while let Ok((mut socket, _)) = listener.accept() {
                    socket.set_nodelay(true).unwrap();
                    thread::spawn(move || {
                        while socket.read_exact(&mut [0; REQUEST]).is_ok() && socket.write_all(&[0; RESPONSE]).is_ok() {
                        }
                    });
                }
            });
            wait();
        }
        _ => panic!("no server {what}"),
    }
}

// ---- clients ----

/// Calls a second over all connections.
fn run(client: &str, port: u16, connections: usize, time: Duration) -> f64 {
    match client {
        "grpcio" => {
            let arguments = [port.to_string(), connections.to_string(), time.as_secs_f64().to_string()];
            let output = python().arg("client").args(arguments).output().unwrap();
            String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
        }
        "tonic" => bench_tonic::run(port, connections, time),
        "ours" => count(connections, time, || {
            let socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let channel = Channel::new(Transport::plain(socket).unwrap(), "localhost").unwrap();
            let (request, options) = (Blob { data: vec![b'x'; 16] }, CallOptions::default());
            move || assert_eq!(channel.unary::<_, Blob>("/bench.Bench/Echo", &request, &options).unwrap(), request)
        }),
        "floor" => count(connections, time, || {
            let mut socket = TcpStream::connect(("127.0.0.1", port)).unwrap();
            socket.set_nodelay(true).unwrap();
            move || {
                socket.write_all(&[0; REQUEST]).unwrap();
                socket.read_exact(&mut [0; RESPONSE]).unwrap();
            }
        }),
        _ => panic!("no client {client}"),
    }
}

/// Runs the calls of each connection in a thread of its own.
fn count<C: FnMut()>(connections: usize, time: Duration, connect: impl Fn() -> C + Sync) -> f64 {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let run = || {
            let mut call = connect();
            let mut calls = 0;
            while !stop.load(Ordering::Relaxed) {
                call();
                calls += 1;
            }
            calls
        };
        let threads: Vec<_> = (0..connections).map(|_| scope.spawn(run)).collect();
        thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
        let calls: u64 = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
        calls as f64 / time.as_secs_f64()
    })
}
