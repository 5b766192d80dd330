//! A small HTTP server: it answers `GET` and `HEAD`, one request per connection (RFC 9112).
//!
//! Anyone who reaches the port may ask, so a hostile peer can use up resources: [`ServerLimits`],
//! [`MAX_HEAD`] and [`TIME`] limit them, and the program's own threads are separate.
//!
//! There is no crate for this: `tiny_http` has no time-outs and starts threads without a limit.
//! `httparse`, which the HTTP client needs anyway, parses the request's head.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{AddrParseError, IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ::transport::timed::Timed;
use base::network::{Network, any_address};
use base::sync::lock;
use base::sync::pool::Pool;
use sys::poll::Poller;

/// Maximum time from accept to the end of the request's head.
pub const TIME: Duration = Duration::from_secs(5);
/// Maximum size of a request's head in bytes.
pub const MAX_HEAD: usize = 8 << 10;
/// Maximum number of header fields of a request.
const MAX_HEADERS: usize = 64;
/// Time and bytes for which a refused peer may still send, so that it can read the reason (RFC 9112
/// §9.6).
const LINGER: Duration = Duration::from_millis(500);
const MAX_LINGER: u64 = 64 << 10;
/// The poller's number for the listening socket.
const LISTENER: u64 = 0;
/// Pause before the next accept when no file descriptor is free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How many connections a server has.
#[derive(Debug, Clone, Copy)]
pub struct ServerLimits {
    /// Maximum number of connections, each with a thread; a further one is closed.
    pub connections: usize,
    /// Maximum number of connections from one address, so that one peer cannot block the others. An answered one makes room for
    /// the next.
    pub of_peer: usize,
    /// Maximum time from accept to the last byte of the answer.
    pub time: Duration,
}

/// Answers the `GET` of a target (path and query) by a peer.
pub type Pages = dyn Fn(&str, IpAddr) -> ServedResponse + Send + Sync;

/// A running server; dropping it stops it.
pub struct HttpServer {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    name: &'static str,
    limits: ServerLimits,
    pages: Box<Pages>,
    poller: Poller,
    pool: Arc<Pool>,
    stopping: AtomicBool,
    /// Open connections, to count them and to interrupt them.
    open: Mutex<Vec<Connection>>,
}

struct Connection {
    number: u64,
    network: Network,
    socket: TcpStream,
    /// Only the peer's end of the connection is awaited.
    is_answered: bool,
}

/// Parses the address of a server: `ADDRESS:PORT`, or `*:PORT` for all addresses of this machine.
pub fn parse_listen(text: &str) -> Result<SocketAddr, AddrParseError> {
    match text.strip_prefix("*:").and_then(|port| port.parse().ok()) {
        Some(port) => Ok(SocketAddr::new(any_address(), port)),
        None => text.parse(),
    }
}

impl HttpServer {
    /// Serves pages at this address; port 0 picks a free port. `name` is for threads and the log.
    pub fn start(
        name: &'static str,
        listen: SocketAddr,
        limits: ServerLimits,
        pages: impl Fn(&str, IpAddr) -> ServedResponse + Send + Sync + 'static,
    ) -> io::Result<HttpServer> {
        let listener = TcpListener::bind(listen)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            name,
            limits,
            pages: Box::new(pages),
            poller: Poller::new()?,
            pool: Arc::new(Pool::new(name, limits.connections)),
            stopping: AtomicBool::new(false),
            open: Mutex::default(),
        });
        let serving = shared.clone();
        let thread = thread::Builder::new()
            .name(format!("{name}-watch"))
            .spawn(move || serving.watch(&listener))?;
        Ok(HttpServer {
            address,
            shared,
            thread: Some(thread),
        })
    }

    /// Returns the address of the listening socket.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        self.shared.poller.wake();
        if let Some(thread) = self.thread.take() {
            // The thread runs no foreign code, so it cannot panic there.
            let _ = thread.join();
        }
        for connection in self.shared.open().iter() {
            // This fails if the peer has closed the socket already, which is fine.
            let _ = connection.socket.shutdown(Shutdown::Both);
        }
        self.shared.pool.stop();
    }
}

impl Shared {
    fn open(&self) -> MutexGuard<'_, Vec<Connection>> {
        lock(&self.open)
    }

    /// Runs the thread that accepts connections.
    fn watch(self: &Arc<Self>, listener: &TcpListener) {
        let mut ready = Vec::new();
        let mut number = 0;
        while !self.stopping.load(Ordering::SeqCst) {
            let waited = self.poller.watch_once(listener, LISTENER);
            if let Err(error) =
                waited.and_then(|()| self.poller.wait(&mut ready, Duration::from_secs(3600)))
            {
                log::error!("{}: cannot wait for connections: {error}", self.name);
                thread::sleep(ACCEPT_PAUSE);
            }
            while let Some((socket, peer)) = self.accept(listener) {
                number += 1;
                self.admit(number, socket, peer.ip());
            }
        }
    }

    fn admit(self: &Arc<Self>, number: u64, socket: TcpStream, ip: IpAddr) {
        let (mut open, network) = (self.open(), Network::from(ip));
        let Ok(handle) = socket.try_clone() else {
            return;
        };
        let (name, limits) = (self.name, self.limits);
        let is_full = |open: &[Connection]| {
            let of_peer = open.iter().filter(|it| it.network == network);
            open.len() >= limits.connections || of_peer.count() >= limits.of_peer
        };
        if is_full(&open) {
            // the next request of a network ends a connection that only waits for the peer to close it
            let answered = open
                .iter()
                .position(|it| it.network == network && it.is_answered);
            if let Some(at) = answered {
                let _ = open.remove(at).socket.shutdown(Shutdown::Read);
            }
        }
        if is_full(&open) {
            return log::debug!("{name}: refused {ip}: too many connections");
        }
        open.push(Connection {
            number,
            network,
            socket: handle,
            is_answered: false,
        });
        drop(open);
        let shared = self.clone();
        // The pool has as many threads as there may be connections, so the job starts at once, or when the job of an ended
        // connection has left its thread.
        self.pool.submit(move || {
            let served = serve(socket, ip, limits.time, &*shared.pages, || {
                let mut open = shared.open();
                if let Some(this) = open.iter_mut().find(|it| it.number == number) {
                    this.is_answered = true;
                }
            });
            if let Err(error) = served {
                log::debug!("{name}: {ip}: {error}");
            }
            shared.open().retain(|it| it.number != number);
        });
    }

    /// Accepts the next waiting connection, if any.
    fn accept(&self, listener: &TcpListener) -> Option<(TcpStream, SocketAddr)> {
        loop {
            match listener.accept() {
                Ok((socket, peer)) => match socket.set_nonblocking(false) {
                    Ok(()) => return Some((socket, peer)),
                    Err(_) => continue,
                },
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                Err(error) => {
                    log::warn!("{}: cannot accept a connection: {error}", self.name);
                    thread::sleep(ACCEPT_PAUSE);
                    return None;
                }
            }
        }
    }
}

/// Handles one request. Calls `answered` when the answer is sent.
fn serve(
    socket: TcpStream,
    peer: IpAddr,
    time: Duration,
    pages: &Pages,
    answered: impl FnOnce(),
) -> io::Result<()> {
    let now = Instant::now();
    let mut timed = Timed {
        socket,
        deadline: now + time.min(TIME),
    };
    let answer = match read_head(&mut timed)? {
        Some(head) => answer(&head, peer, pages),
        None => ServedResponse::status("431 Request Header Fields Too Large"),
    };
    timed.deadline = now + time;
    timed.write_all(&answer.bytes())?;
    answered();
    timed.socket.shutdown(Shutdown::Write)?;
    timed.deadline = Instant::now() + LINGER;
    // The remaining bytes of the peer are ignored.
    let _ = io::copy(&mut timed.take(MAX_LINGER), &mut io::sink());
    Ok(())
}

/// Reads the head of a request, including the empty line; `None` if it has no end within
/// [`MAX_HEAD`].
fn read_head(peer: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut head = Vec::with_capacity(1024);
    loop {
        if head.len() >= MAX_HEAD {
            return Ok(None);
        }
        let mut chunk = [0; 1024];
        let room = chunk.len().min(MAX_HEAD - head.len());
        match peer.read(&mut chunk[..room])? {
            0 => return Err(ErrorKind::UnexpectedEof.into()),
            read => head.extend_from_slice(&chunk[..read]),
        }
        if head.windows(4).any(|end| end == b"\r\n\r\n")
            || head.windows(2).any(|end| end == b"\n\n")
        {
            return Ok(Some(head));
        }
    }
}

/// An HTTP response.
pub struct ServedResponse {
    status: &'static str,
    /// Additional header lines.
    more: &'static str,
    content_type: &'static str,
    body: String,
    without_body: bool,
}

impl ServedResponse {
    /// Makes a response with content of this media type.
    pub fn ok(content_type: &'static str, body: String) -> ServedResponse {
        ServedResponse {
            content_type,
            body,
            ..ServedResponse::status("200 OK")
        }
    }

    /// Makes a response with this status, such as `404 Not Found`.
    pub fn status(status: &'static str) -> ServedResponse {
        let (content_type, body) = ("text/plain; charset=utf-8", format!("{status}\n"));
        ServedResponse {
            status,
            more: "",
            content_type,
            body,
            without_body: false,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let ServedResponse {
            status,
            more,
            content_type,
            body,
            ..
        } = self;
        let length = body.len();
        let mut bytes = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\nCache-Control: no-store\r\n\
             Connection: close\r\n{more}\r\n"
        );
        if !self.without_body {
            bytes.push_str(body);
        }
        bytes.into_bytes()
    }
}

/// Returns the response to a request's head, which may be any bytes.
fn answer(head: &[u8], peer: IpAddr, pages: &Pages) -> ServedResponse {
    let mut fields = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(head) {
        Ok(httparse::Status::Complete(_)) => {}
        Err(httparse::Error::TooManyHeaders) => {
            return ServedResponse::status("431 Request Header Fields Too Large");
        }
        _ => return ServedResponse::status("400 Bad Request"),
    }
    let (method, target) = (
        request.method.unwrap_or_default(),
        request.path.unwrap_or_default(),
    );
    let mut answer = match method {
        "GET" | "HEAD" => pages(target, peer),
        _ => ServedResponse {
            more: "Allow: GET, HEAD\r\n",
            ..ServedResponse::status("405 Method Not Allowed")
        },
    };
    answer.without_body = method == "HEAD";
    answer
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    const REQUEST: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: localhost:9\r\nUser-Agent: Prometheus/2.42.0\r\nAccept: \
        application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5\r\nAccept-Encoding: gzip\r\n\r\n";

    const LIMITS: ServerLimits = ServerLimits {
        connections: 8,
        of_peer: 4,
        time: TIME,
    };

    fn page(target: &str, peer: IpAddr) -> ServedResponse {
        match target {
            "/metrics" | "/metrics?x=y" => {
                ServedResponse::ok("text/plain", format!("for {peer}\n"))
            }
            _ => ServedResponse::status("404 Not Found"),
        }
    }

    fn server() -> HttpServer {
        let any = "127.0.0.1:0".parse().unwrap();
        HttpServer::start("test", any, LIMITS, page).unwrap()
    }

    fn ask(server: &HttpServer, request: &[u8]) -> String {
        let mut socket = TcpStream::connect(server.local_addr()).unwrap();
        socket
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        // The server may answer and close the connection before it has read everything.
        let _ = socket.write_all(request);
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    }

    #[test]
    fn only_get_and_head_of_a_page_are_served() {
        // the server may count a connection for a moment after its client has closed it
        let limits = ServerLimits {
            connections: 64,
            of_peer: 64,
            ..LIMITS
        };
        let any = "127.0.0.1:0".parse().unwrap();
        let server = HttpServer::start("test", any, limits, page).unwrap();
        let got = ask(&server, REQUEST);
        assert!(
            got.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"),
            "{got}"
        );
        assert!(got.ends_with("\r\n\r\nfor 127.0.0.1\n"), "{got}");
        for (request, expected) in [
            (&b"GET /metrics?x=y HTTP/1.0\r\n\r\n"[..], "200"),
            (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "404"),
            (
                b"GET /metrics/../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
                "404",
            ),
            (
                b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc",
                "405",
            ),
            (b"\x16\x03\x01\x02\x00\x01\n\n", "400"),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "400"),
        ] {
            let got = ask(&server, request);
            assert!(
                got.starts_with(&format!("HTTP/1.1 {expected} ")),
                "{}: {got}",
                String::from_utf8_lossy(request)
            );
        }
        let head = ask(&server, b"HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(
            head.contains("Content-Length: 14\r\n") && head.ends_with("\r\n\r\n"),
            "{head}"
        );
    }

    #[test]
    fn a_head_without_end_is_refused_and_the_reason_arrives() {
        let server = server();
        for endless in [
            [&REQUEST[..REQUEST.len() - 2], &b"x: y\r\n".repeat(20_000)].concat(),
            [b"GET /".to_vec(), vec![b'x'; 100_000]].concat(),
            [
                b"GET /metrics HTTP/1.1\r\n".to_vec(),
                b"x: y\r\n".repeat(MAX_HEADERS + 1),
                b"\r\n".to_vec(),
            ]
            .concat(),
        ] {
            assert!(ask(&server, &endless).starts_with("HTTP/1.1 431 "));
        }
    }

    /// A busy server still waits for the end of connections whose answers the peer has read.
    #[test]
    fn a_peer_that_asks_again_is_not_refused_for_the_connections_of_its_last_answers() {
        let server = server();
        let _kept: Vec<_> = (0..4 * LIMITS.of_peer)
            .map(|_| {
                let mut socket = TcpStream::connect(server.local_addr()).unwrap();
                socket.write_all(REQUEST).unwrap();
                let mut answer = String::new();
                socket.read_to_string(&mut answer).unwrap();
                assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
                socket
            })
            .collect();
    }

    #[test]
    fn a_connection_without_an_answer_keeps_its_place() {
        let server = server();
        let connect = || TcpStream::connect(server.local_addr()).unwrap();
        let waiting: Vec<_> = (0..LIMITS.of_peer).map(|_| connect()).collect();
        let mut refused = connect();
        let _ = refused.write_all(REQUEST);
        assert_eq!(refused.read(&mut [0]).unwrap_or(0), 0);
        for mut socket in waiting {
            socket.write_all(REQUEST).unwrap();
            let mut answer = String::new();
            socket.read_to_string(&mut answer).unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        }
    }

    #[test]
    fn silent_peers_lose_their_place_and_do_not_delay_the_end() {
        let server = server();
        let silent: Vec<_> = (0..2 * LIMITS.connections)
            .map(|_| TcpStream::connect(server.local_addr()).unwrap())
            .collect();
        let until = Instant::now() + 4 * TIME;
        while !ask(&server, REQUEST).starts_with("HTTP/1.1 200") {
            assert!(Instant::now() < until);
            thread::sleep(Duration::from_millis(50));
        }
        assert!(server.shared.open().len() <= LIMITS.of_peer);
        let _more: Vec<_> = (0..3)
            .map(|_| TcpStream::connect(server.local_addr()).unwrap())
            .collect();
        thread::sleep(Duration::from_millis(50));
        let started = Instant::now();
        drop(server);
        // the peers would delay it for 5 seconds
        support::promptly::assert_no_wait(started, Duration::from_millis(200));
        drop(silent);
    }

    #[test]
    fn hostile_heads_are_answered_without_a_panic() {
        let peer = "127.0.0.1".parse().unwrap();
        for head in mutations(REQUEST, 5000) {
            assert!(!answer(&head, peer, &page).bytes().is_empty());
        }
    }
}
