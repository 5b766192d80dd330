//! Asks services for their health, as a kubelet does: the test of an installation (`helm test`).

use std::fmt;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use base::network::resolver::Unresolved;
use rpc::grpc::Status;
use transport::dial;

use crate::probe;

/// How long one server may take to answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How long name servers may take.
const TIME_OF_NAME: Duration = Duration::from_secs(10);
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_secs(1);

/// Why a service is not healthy.
#[derive(Debug)]
pub enum Error {
    /// The name has no address.
    Name(String, Unresolved),
    /// A server of the name does not tell its health.
    Server(String, SocketAddr, Status),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Name(name, error) => write!(f, "{name}: {error}; see whether the pods run"),
            Error::Server(name, address, status) => write!(
                f,
                "{name}: {address} does not answer whether it is healthy: {status}; see the log of its pod"
            ),
        }
    }
}

impl std::error::Error for Error {}

/// Asks all servers at the addresses of `name`, which is `HOST:PORT`. Asks again until each of them
/// is healthy, for at most `patience`. Returns the addresses.
pub fn health(name: &str, patience: Duration) -> Result<Vec<SocketAddr>, Error> {
    let started = Instant::now();
    loop {
        match ask(name) {
            // A name and its addresses need a moment after their Service was made.
            Err(error) if started.elapsed() + PAUSE < patience => {
                log::debug!("{error}");
                thread::sleep(PAUSE);
            }
            outcome => return outcome,
        }
    }
}

fn ask(name: &str) -> Result<Vec<SocketAddr>, Error> {
    let addresses = dial::resolve_server(name, Instant::now() + TIME_OF_NAME);
    let addresses = addresses.map_err(|error| Error::Name(name.into(), error))?;
    for address in &addresses {
        probe::check_health(*address, TIMEOUT)
            .map_err(|status| Error::Server(name.into(), *address, status))?;
    }
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_answers_is_healthy_and_others_are_not() {
        let server = probe::serve_health("127.0.0.1:0".parse().unwrap(), || true).unwrap();
        let address = server.local_addr();
        let found = health(&address.to_string(), Duration::ZERO).unwrap();
        assert_eq!(found, [address]);
        // no server listens there
        let error = health("127.0.0.1:1", Duration::ZERO)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("does not answer whether it is healthy"),
            "{error}"
        );
        let error = health("nobody.invalid:1", Duration::ZERO).unwrap_err();
        assert!(matches!(error, Error::Name(..)), "{error}");
    }
}
