//! Faults of the API server and of etcd while nodes join: `cargo bench --bench storm -- faults 500`.
//!
//! ```text
//!   join-service ──► proxy (`Line`), which cuts connections ──► kube-apiserver, frozen ──► etcd, frozen
//! ```
//!
//! | fault | what the service sees |
//! |---|---|
//! | all connections to the API server are cut, as when it crashes | the result of a write is unknown; a repeated one meets its own object (409) |
//! | the API server is gone for some time | connections are refused |
//! | the API server is frozen | calls end by their time limit |
//! | etcd is frozen | errors (500, 504) and slow answers |

use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use base::stop::Stop;

use crate::kube_apiserver::Cluster;

/// The time between two faults.
const BETWEEN: Duration = Duration::from_millis(700);
/// How long the API server is gone, and how long a program is frozen: once longer than the service waits for a call.
const GONE: Duration = Duration::from_secs(2);
const FROZEN: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(12)];

/// A TCP proxy in front of the API server.
pub struct Line {
    pub address: SocketAddr,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    is_gone: AtomicBool,
    /// Both sockets of each connection.
    open: Mutex<Vec<[TcpStream; 2]>>,
}

impl Line {
    /// Its threads end with the program.
    pub fn to(server: SocketAddr) -> Line {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::<State>::default();
        let line = state.clone();
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if !line.is_gone.load(Ordering::SeqCst) {
                    // without the API server the connection is closed
                    let _ = line.connect(client, server);
                }
            }
        });
        Line { address, state }
    }

    fn cut(&self) {
        for socket in self.state.open.lock().unwrap().drain(..).flatten() {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl State {
    fn connect(&self, client: TcpStream, server: SocketAddr) -> io::Result<()> {
        let server = TcpStream::connect(server)?;
        let pair = [client.try_clone()?, server.try_clone()?];
        self.open.lock().unwrap().push(pair);
        let other = [server.try_clone()?, client.try_clone()?];
        for (mut from, mut to) in [
            (client, server),
            (other[0].try_clone()?, other[1].try_clone()?),
        ] {
            thread::spawn(move || {
                let _ = io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Write);
            });
        }
        Ok(())
    }
}

/// Injects all faults, again and again, until `over` or `end`. Returns how many there were, by kind: cut, gone, API server frozen, etcd frozen.
pub fn inject(cluster: &Cluster, line: &Line, over: &Stop, end: Instant) -> [usize; 4] {
    let mut counts = [0; 4];
    let mut round = 0;
    while !over.wait(BETWEEN) && Instant::now() < end {
        let kind = round % counts.len();
        // the long freezes come in the first two rounds of their kind only: a storm must end
        let frozen = FROZEN[usize::from(round / counts.len() == 1)];
        match kind {
            0 => line.cut(),
            1 => {
                line.state.is_gone.store(true, Ordering::SeqCst);
                line.cut();
                over.wait(GONE);
                line.state.is_gone.store(false, Ordering::SeqCst);
            }
            2 => {
                cluster.freeze_api_server(true);
                over.wait(frozen);
                cluster.freeze_api_server(false);
            }
            _ => {
                cluster.freeze_etcd(true);
                over.wait(frozen);
                cluster.freeze_etcd(false);
            }
        }
        counts[kind] += 1;
        round += 1;
    }
    counts
}

/// Waits until the API server answers again.
pub fn wait_until_well(cluster: &Cluster, end: Instant) {
    let left = end.saturating_duration_since(Instant::now());
    let client = cluster.client(&Stop::new());
    let _ = client.within(left.max(BETWEEN)).wait_ready(&mut |_| {});
}
