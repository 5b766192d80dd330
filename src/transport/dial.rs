//! The dialler: connects to one address of a host after the other, each a little later, until one of
//! them answers; the IP versions take turns (Happy Eyeballs, RFC 8305).
//!
//! Nothing is cached, except in a command of a person ([`remember`]).

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use base::network::resolver::{Lookup, Unresolved, addresses, literal};
use base::sync::{Mutex, lock};
use sys::net::{Connecting, Wait};

/// How long the addresses of one IP version wait for those of the other one (RFC 8305 §3).
const RESOLUTION_DELAY: Duration = Duration::from_millis(50);
/// How long an address may take before the next one is tried, too (RFC 8305 §5).
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// The names that this process has resolved, if it remembers them.
static KNOWN: Mutex<Option<Names>> = Mutex::new(None);

/// Names with their addresses.
type Names = Vec<(String, Vec<SocketAddr>)>;

/// Makes this process ask for each name once; it asks again after no address has answered. Only for
/// programs that end soon.
pub fn remember() {
    lock(&KNOWN).get_or_insert_default();
}

/// Connects to a host until `deadline`. An address has `time` to answer.
pub fn dial(
    host: &str,
    port: u16,
    deadline: Instant,
    time: Duration,
) -> Result<TcpStream, DialError> {
    let mut race = Race::default();
    let known = literal(host).map_or_else(|| known(host), |address| vec![address]);
    let lookup = known.is_empty().then(|| Lookup::begin(host));
    loop {
        let now = Instant::now();
        let (found, mut waits) = match &lookup {
            Some(lookup) => lookup.state(),
            None => (known.clone(), vec![]),
        };
        if lookup.is_some() && !found.is_empty() {
            learn(host, &found);
        }
        let is_over = waits.is_empty();
        race.add(found, port, is_over, now);
        if let Some(socket) = race.step(now, deadline.min(now + time)) {
            return Ok(socket);
        }
        if now >= deadline || is_over && race.is_lost() {
            forget(host);
            return Err(race.failure(lookup));
        }
        waits.extend(
            race.attempts
                .iter()
                .map(|attempt| Wait::ToWrite(attempt.socket.as_fd())),
        );
        let until = race.next(deadline);
        // after an error the loop tries its sockets again
        let _ = sys::net::wait(&waits, until.saturating_duration_since(now));
    }
}

/// Checks that a host has an address. [`dial`] then uses what [`remember`] keeps.
pub fn check(host: &str, deadline: Instant) -> Result<(), Unresolved> {
    if known(host).is_empty() {
        learn(host, &addresses(host, deadline)?);
    }
    Ok(())
}

/// Returns the address by which this machine reaches a host with these addresses: of IPv6 if there is
/// a route, but unique local ones come after IPv4 (RFC 6724 §2.1).
pub fn best(addresses: &[IpAddr]) -> Option<IpAddr> {
    let has_route = |address: IpAddr| {
        let socket = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0));
        // this sends nothing
        socket.is_ok_and(|socket| socket.connect((address, 9)).is_ok())
    };
    let is_good = |address: &&IpAddr| match address {
        IpAddr::V4(_) => true,
        IpAddr::V6(ip) => !ip.is_unique_local() && has_route(**address),
    };
    addresses
        .iter()
        .find(is_good)
        .or(addresses.first())
        .copied()
}

/// Returns the addresses of a server, `HOST:PORT`.
pub fn resolve_server(server: &str, deadline: Instant) -> Result<Vec<SocketAddr>, Unresolved> {
    let parts = server.rsplit_once(':');
    let Some((host, Ok(port))) = parts.map(|(host, port)| (host, port.parse())) else {
        return Err(Unresolved {
            host: server.to_owned(),
            why: "expected HOST:PORT".to_owned(),
        });
    };
    let host = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    let mut found = addresses(host, deadline)?;
    found.iter_mut().for_each(|address| address.set_port(port));
    Ok(found)
}

/// Why there is no connection.
#[derive(Debug)]
pub enum DialError {
    /// The name has no address.
    Name(Unresolved),
    /// No address answered.
    Addresses(Vec<(SocketAddr, io::Error)>),
}

impl DialError {
    /// Returns whether a machine answered that no program listens on the port.
    pub fn is_refused(&self) -> bool {
        let is_refused = |(_, error): &(_, io::Error)| error.kind() == ErrorKind::ConnectionRefused;
        matches!(self, DialError::Addresses(failures) if failures.iter().any(is_refused))
    }
}

impl fmt::Display for DialError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let failures = match self {
            DialError::Name(unresolved) => return unresolved.fmt(f),
            DialError::Addresses(failures) => failures,
        };
        f.write_str("cannot connect to ")?;
        for (at, (address, error)) in failures.iter().enumerate() {
            let comma = if at == 0 { "" } else { ", " };
            write!(f, "{comma}{address}: {error}")?;
        }
        Ok(())
    }
}

impl std::error::Error for DialError {}

fn known(host: &str) -> Vec<SocketAddr> {
    let known = lock(&KNOWN);
    let found = known.iter().flatten().find(|(name, _)| name == host);
    found
        .map(|(_, addresses)| addresses.clone())
        .unwrap_or_default()
}

fn learn(host: &str, addresses: &[SocketAddr]) {
    if let Some(known) = &mut *lock(&KNOWN) {
        known.retain(|(name, _)| name != host);
        known.push((host.to_owned(), addresses.to_vec()));
    }
}

fn forget(host: &str) {
    if let Some(known) = &mut *lock(&KNOWN) {
        known.retain(|(name, _)| name != host);
    }
}

/// The attempts to connect.
#[derive(Default)]
struct Race {
    /// The addresses that are not tried yet, in their order.
    waiting: Vec<SocketAddr>,
    tried: Vec<SocketAddr>,
    attempts: Vec<Attempt>,
    /// When the next address is tried; unknown before there is one.
    next: Option<Instant>,
    failures: Vec<(SocketAddr, io::Error)>,
}

struct Attempt {
    address: SocketAddr,
    until: Instant,
    socket: Connecting,
}

impl Race {
    /// Sets the addresses of the host. The IP versions take turns.
    fn add(&mut self, mut found: Vec<SocketAddr>, port: u16, are_all: bool, now: Instant) {
        found.iter_mut().for_each(|address| address.set_port(port));
        found.retain(|address| !self.tried.contains(address));
        let is_first_v6 = found.first().is_some_and(SocketAddr::is_ipv6);
        let (mut first, mut other): (Vec<_>, Vec<_>) = found
            .into_iter()
            .rev()
            .partition(|address| address.is_ipv6() == is_first_v6);
        self.waiting.clear();
        while let Some(address) = first.pop() {
            self.waiting.push(address);
            self.waiting.extend(other.pop());
        }
        self.waiting.extend(other.into_iter().rev());
        if !self.waiting.is_empty() {
            let begin = if are_all { now } else { now + RESOLUTION_DELAY };
            let next = self.next.get_or_insert(begin);
            if self.tried.is_empty() {
                *next = begin.min(*next);
            }
        }
    }

    /// Ends attempts and begins new ones, which may take until `until`. Returns the first connection.
    fn step(&mut self, now: Instant, until: Instant) -> Option<TcpStream> {
        for attempt in std::mem::take(&mut self.attempts) {
            let error =
                match sys::net::wait(&[Wait::ToWrite(attempt.socket.as_fd())], Duration::ZERO) {
                    Ok(ready) if ready[0] => match attempt.socket.finish() {
                        Ok(socket) => return Some(socket),
                        Err(error) => error,
                    },
                    Ok(_) if now < attempt.until => {
                        self.attempts.push(attempt);
                        continue;
                    }
                    Ok(_) => late(),
                    Err(error) => error,
                };
            self.failures.push((attempt.address, error));
            self.next = Some(now);
        }
        while self.next.is_some_and(|next| now >= next) && !self.waiting.is_empty() {
            let address = self.waiting.remove(0);
            self.tried.push(address);
            match Connecting::begin(address) {
                Ok(socket) => {
                    self.attempts.push(Attempt {
                        address,
                        until,
                        socket,
                    });
                    self.next = Some(now + ATTEMPT_DELAY);
                }
                Err(error) => self.failures.push((address, error)),
            }
        }
        None
    }

    fn is_lost(&self) -> bool {
        self.waiting.is_empty() && self.attempts.is_empty()
    }

    /// Returns when there is something to do, if nothing happens before.
    fn next(&self, deadline: Instant) -> Instant {
        let begins = self.next.filter(|_| !self.waiting.is_empty());
        let ends = self.attempts.iter().map(|attempt| attempt.until);
        ends.chain(begins).fold(deadline, Instant::min)
    }

    fn failure(mut self, lookup: Option<Lookup>) -> DialError {
        let late = self
            .attempts
            .iter()
            .map(|attempt| (attempt.address, late()));
        self.failures.extend(late);
        match lookup {
            Some(lookup) if self.failures.is_empty() => DialError::Name(lookup.unresolved()),
            _ => DialError::Addresses(self.failures),
        }
    }
}

fn late() -> io::Error {
    io::Error::new(ErrorKind::TimedOut, "no answer in time")
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn an_address_that_does_not_answer_does_not_delay_the_next_one() {
        let good = TcpListener::bind("127.0.0.3:0").unwrap();
        let port = good.local_addr().unwrap().port();
        // a listener with a full backlog answers no SYN
        let silent = TcpListener::bind(("127.0.0.2", port)).unwrap();
        let silent = silent.local_addr().unwrap();
        let mut held = vec![];
        while let Ok(socket) = TcpStream::connect_timeout(&silent, Duration::from_millis(200)) {
            held.push(socket);
        }
        remember();
        learn(
            "two.test",
            &[address("127.0.0.2:0"), address("127.0.0.3:0")],
        );
        let socket = dial("two.test", port, Instant::now() + LONG, LONG).unwrap();
        assert_eq!(socket.peer_addr().unwrap(), good.local_addr().unwrap());
        // only one of them: at the end of its time
        learn("one.test", &[silent]);
        let error = dial(
            "one.test",
            port,
            Instant::now() + LONG,
            Duration::from_millis(100),
        );
        let error = error.unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("cannot connect to {silent}: no answer in time")
        );
        assert!(!error.is_refused());
    }

    #[test]
    fn each_address_is_named_and_a_name_is_asked_for_again_after_a_failure() {
        remember();
        let closed = ["127.0.0.1:0", "127.0.0.2:0"].map(address);
        learn("closed.test", &closed);
        let error = dial("closed.test", 1, Instant::now() + LONG, LONG).unwrap_err();
        let text = error.to_string();
        assert!(error.is_refused());
        assert!(
            text.contains("127.0.0.1:1: ") && text.contains("127.0.0.2:1: "),
            "{text}"
        );
        assert!(known("closed.test").is_empty());
    }

    #[test]
    fn the_ip_versions_take_turns_and_new_addresses_join() {
        let now = Instant::now();
        let mut race = Race::default();
        race.add(vec![address("10.0.0.1:0")], 1, false, now);
        assert_eq!(race.next, Some(now + RESOLUTION_DELAY));
        let all = ["[fd00::1]:0", "[fd00::2]:0", "[fd00::3]:0", "10.0.0.1:0"].map(address);
        race.add(all.to_vec(), 1, true, now);
        let turns = ["[fd00::1]:1", "10.0.0.1:1", "[fd00::2]:1", "[fd00::3]:1"];
        assert_eq!(race.waiting, turns.map(address));
        assert_eq!(race.next, Some(now));
        race.tried.push(address(turns[0]));
        race.add(all.to_vec(), 1, true, now);
        assert_eq!(race.waiting, [turns[2], turns[1], turns[3]].map(address));
    }

    #[test]
    fn a_server_is_an_address_or_a_name_with_its_port() {
        let resolved = |server| resolve_server(server, Instant::now() + LONG);
        assert_eq!(resolved("10.0.0.1:80").unwrap(), [address("10.0.0.1:80")]);
        assert_eq!(resolved("[fd00::1]:80").unwrap(), [address("[fd00::1]:80")]);
        assert!(
            resolved("localhost:80")
                .unwrap()
                .iter()
                .all(|it| it.port() == 80)
        );
        for wrong in ["", "10.0.0.1", "10.0.0.1:http", ":", "fd00::1"] {
            assert!(resolved(wrong).is_err(), "{wrong}");
        }
    }
}
