//! The resolver of all programs. It asks for the addresses of both IP versions apart, by the C
//! library and in threads of their own: a wrong answer for one version, or none, does not hide the
//! addresses of the other one. `transport::dial` connects to them.

use std::fmt;
use std::fs;
use std::io::{self, PipeReader};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use sys::net::{IpVersion, LookupError, Wait};

use crate::sync::{Arc, Mutex, lock};

/// How long the addresses of one IP version wait for those of the other one. The caller does not
/// learn of those that come later.
const OTHER_VERSION: Duration = Duration::from_secs(1);
/// Where the C library finds the name servers.
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// Returns the addresses of a host, IPv6 first.
pub fn resolve(host: &str, deadline: Instant) -> Result<Vec<IpAddr>, Unresolved> {
    let found = addresses(host, deadline)?;
    Ok(found.iter().map(SocketAddr::ip).collect())
}

/// Returns the addresses of a host with port 0, IPv6 first.
pub fn addresses(host: &str, mut until: Instant) -> Result<Vec<SocketAddr>, Unresolved> {
    if let Some(address) = literal(host) {
        return Ok(vec![address]);
    }
    let lookup = Lookup::begin(host);
    loop {
        let (now, (found, waits)) = (Instant::now(), lookup.state());
        if !found.is_empty() {
            until = until.min(now + OTHER_VERSION);
        }
        if waits.is_empty() || now >= until {
            return if found.is_empty() {
                Err(lookup.unresolved())
            } else {
                Ok(found)
            };
        }
        // after an error the loop looks again
        let _ = sys::net::wait(&waits, until.saturating_duration_since(now));
    }
}

/// Returns the address if the host is an IP address.
pub fn literal(host: &str) -> Option<SocketAddr> {
    let address: IpAddr = host.parse().ok()?;
    Some((address.to_canonical(), 0).into())
}

/// Why a name has no address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unresolved {
    /// The name.
    pub host: String,
    /// What went wrong with the name servers, as a clause.
    pub why: String,
}

impl fmt::Display for Unresolved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot resolve the name {}: {}", self.host, self.why)
    }
}

impl std::error::Error for Unresolved {}

/// The lookup of a host.
pub struct Lookup {
    host: String,
    started: Instant,
    /// For IPv6 and for IPv4.
    queries: Vec<Query>,
}

/// The lookup of the addresses of one IP version. Its thread ends by itself: nothing can cut
/// getaddrinfo(3) short.
struct Query {
    result: Arc<Mutex<Option<Found>>>,
    /// Its other end is closed when the thread ends.
    end: PipeReader,
}

type Found = Result<Vec<SocketAddr>, LookupError>;

impl Lookup {
    /// Begins to look up a host.
    pub fn begin(host: &str) -> Lookup {
        let mut queries = vec![];
        for version in [IpVersion::V6, IpVersion::V4] {
            // without a thread or a descriptor there is no answer
            queries.extend(Query::begin(host, version).ok());
        }
        Lookup {
            host: host.to_owned(),
            started: Instant::now(),
            queries,
        }
    }

    /// Returns the addresses that have been found so far, IPv6 first, and what to wait for: nothing if
    /// no more will be found. Both are read at one time, so an answer that comes later ends the wait.
    pub fn state(&self) -> (Vec<SocketAddr>, Vec<Wait<'_>>) {
        let (mut found, mut waits) = (vec![], vec![]);
        for query in &self.queries {
            match &*lock(&query.result) {
                Some(Ok(addresses)) => found.extend_from_slice(addresses),
                Some(Err(_)) => {}
                None => waits.push(Wait::ToRead(query.end.as_fd())),
            }
        }
        (found, waits)
    }

    /// Returns why no address has been found.
    pub fn unresolved(&self) -> Unresolved {
        let mut what = "it does not exist, or has no address";
        for query in &self.queries {
            what = match &*lock(&query.result) {
                Some(Err(LookupError::Nothing)) => what,
                Some(Err(LookupError::Invalid)) => "it is not a name",
                _ => "no usable answer",
            };
        }
        let mut why = format!("{what}: asked");
        let file = fs::read_to_string(RESOLV_CONF).unwrap_or_default();
        for server in name_servers(&file) {
            why.push_str(" name server ");
            why.push_str(server);
            why.push(',');
        }
        let seconds = self.started.elapsed().as_secs();
        Unresolved {
            host: self.host.clone(),
            why: format!("{why} waited {seconds} s"),
        }
    }
}

impl Query {
    fn begin(host: &str, version: IpVersion) -> io::Result<Query> {
        let (end, alive) = io::pipe()?;
        let result = Arc::new(Mutex::new(None));
        let (place, host) = (result.clone(), host.to_owned());
        thread::Builder::new().spawn(move || {
            *lock(&place) = Some(sys::net::lookup(&host, version));
            drop(alive);
        })?;
        Ok(Query { result, end })
    }
}

/// Returns the name servers of a resolv.conf(5).
fn name_servers(file: &str) -> impl Iterator<Item = &str> {
    file.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        words.next().filter(|word| *word == "nameserver")?;
        words.next()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_needs_no_name_server_and_a_failure_names_those_that_were_asked() {
        let soon = || Instant::now() + Duration::from_secs(60);
        for host in ["192.0.2.1", "::ffff:192.0.2.1"] {
            assert_eq!(
                resolve(host, soon()).unwrap(),
                [IpAddr::from([192, 0, 2, 1])]
            );
        }
        let error = resolve("no such name", soon()).unwrap_err().to_string();
        let begin = "cannot resolve the name no such name: ";
        assert!(
            error.starts_with(begin) && error.contains(": asked"),
            "{error}"
        );
        let file = "# nameserver 192.0.2.1\nsearch example\n nameserver\t192.0.2.2 x\nnameserver\nnameserver fd42::3\n";
        let servers: Vec<_> = name_servers(file).collect();
        assert_eq!(servers, ["192.0.2.2", "fd42::3"]);
    }

    #[test]
    fn a_lookup_ends_with_its_last_answer() {
        // for so long a name no server is asked
        let name = "x".repeat(300);
        let started = Instant::now();
        for _ in 0..20_000 {
            resolve(&name, started + Duration::from_secs(600)).unwrap_err();
        }
        support::promptly::assert_no_wait(started, Duration::from_secs(10));
    }
}
