//! The join service's end of the key service: one connection that all calls share, made anew when it fails.

use std::net::{TcpStream, ToSocketAddrs};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::crypto::Secret;
use crate::grpc::{CallOptions, Channel, Code, Status, Transport};
use crate::key_service::GET_DATA_KEY;
use crate::proto::kms::{GetDataKeyRequest, GetDataKeyResponse};

/// A key takes microseconds: who does not answer within this will not.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// A SYN that is lost is sent again after 1 second (RFC 6298 §2.1).
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// After a connection failed, calls fail at once for this long instead of trying again one after the other.
const PAUSE: Duration = Duration::from_secs(1);

/// Why there is no key; the text is for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// It may work in a while: the service is down, slow or busy.
    Passing(String),
    /// It will not: the service refused, or answered nonsense.
    Lasting(String),
}

/// Asks the key service at one address.
pub struct KeyClient {
    endpoint: String,
    connection: Mutex<Connection>,
}

#[derive(Default)]
struct Connection {
    channel: Option<Channel>,
    /// Counts the channels, so that a call gives up the one that it used and no newer one.
    number: u64,
    failed: Option<(Instant, String)>,
}

impl KeyClient {
    /// Of the service at `host:port`. Connects with the first call.
    pub fn new(endpoint: &str) -> KeyClient {
        KeyClient { endpoint: endpoint.to_owned(), connection: Mutex::default() }
    }

    /// The key of this id, `len` bytes. Ends before `deadline`, and in any case within a few seconds.
    pub fn data_key(&self, id: &str, len: usize, deadline: Option<Instant>) -> Result<Secret, Error> {
        let request = GetDataKeyRequest { data_key_id: id.to_owned(), length: len as u32 };
        let own = Instant::now() + CALL_TIMEOUT;
        let deadline = deadline.map_or(own, |deadline| deadline.min(own));
        let mut response = match self.call(&request, deadline) {
            // the connection may have been dead for long; that the key was asked for twice changes nothing
            Called { reused: true, result: Err(status) } if status.code() == Code::Unavailable => {
                self.call(&request, deadline).result
            }
            called => called.result,
        }
        .map_err(|status| self.error(id, &status))?;
        let key = Secret::new(std::mem::take(&mut response.data_key));
        if key.len() != len {
            return Err(Error::Lasting(format!(
                "key service {}: key {id}: expected {len} bytes, got {}",
                self.endpoint,
                key.len()
            )));
        }
        Ok(key)
    }

    fn call(&self, request: &GetDataKeyRequest, deadline: Instant) -> Called {
        let (channel, number, reused) = match self.channel() {
            Ok(found) => found,
            Err(status) => return Called { reused: false, result: Err(status) },
        };
        let timeout = Some(deadline.saturating_duration_since(Instant::now()));
        let result = channel.unary(GET_DATA_KEY, request, &CallOptions { timeout, ..CallOptions::default() });
        // after a call that timed out nobody knows whether the connection still works
        if let Err(Code::Unavailable | Code::DeadlineExceeded) = result.as_ref().map_err(Status::code) {
            self.give_up(number);
        }
        Called { reused, result }
    }

    /// A channel, its number, and whether it has been there before.
    fn channel(&self) -> Result<(Channel, u64, bool), Status> {
        let unavailable = |text: &str| Status::new(Code::Unavailable, text);
        // those who wait here for a connection that fails find that it has failed
        let mut connection = self.lock();
        if let Some(channel) = &connection.channel {
            return Ok((channel.clone(), connection.number, true));
        }
        if let Some((at, error)) = &connection.failed
            && at.elapsed() < PAUSE
        {
            return Err(unavailable(error));
        }
        let channel = self.connect().map_err(|error| {
            connection.failed = Some((Instant::now(), error.clone()));
            unavailable(&error)
        })?;
        connection.failed = None;
        connection.channel = Some(channel.clone());
        connection.number += 1;
        Ok((channel, connection.number, false))
    }

    fn connect(&self) -> Result<Channel, String> {
        let addresses = self.endpoint.to_socket_addrs().map_err(|error| error.to_string())?;
        let mut failure = "the name has no address".to_owned();
        for address in addresses {
            let channel = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)
                .and_then(Transport::plain)
                .map_err(|error| format!("{address}: {error}"))
                .and_then(|transport| Channel::new(transport, &self.endpoint).map_err(|status| status.to_string()));
            match channel {
                Ok(channel) => return Ok(channel),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    fn give_up(&self, number: u64) {
        let mut connection = self.lock();
        if connection.number == number {
            connection.channel = None;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        // what is behind it is replaced whole, so a panic elsewhere leaves nothing half done
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self, id: &str, status: &Status) -> Error {
        let text = format!("key service {}: key {id}: {status}", self.endpoint);
        match status.code() {
            Code::Unavailable | Code::DeadlineExceeded | Code::ResourceExhausted | Code::Cancelled | Code::Aborted => {
                Error::Passing(text)
            }
            _ => Error::Lasting(text),
        }
    }
}

struct Called {
    /// Whether the connection had carried a call before.
    reused: bool,
    result: Result<GetDataKeyResponse, Status>,
}
