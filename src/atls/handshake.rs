//! The blocking handshake: one deadline for all reads and writes, and an orderly close if it fails.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use rustls::{Connection, ProtocolVersion};

use super::Error;
use super::forms::Forms;
use super::hello::{HelloError, HelloFilter};
use attest::{Accepted, Form};
use proto::attested::ALPN as ALPN_STRONG;
use transport::Transport;
use transport::half_open::PeersTurn;
use transport::timed::left;

/// How long to wait after an alert for the peer to close. Without this wait the kernel may send a
/// reset because of unread data, and the peer loses the alert.
const DRAIN_TIME: Duration = Duration::from_secs(1);
/// Maximum number of bytes that are read and discarded during this wait: more than the socket
/// buffers hold.
const DRAIN_BYTES: usize = 1 << 20;

/// A socket whose calls fail at the deadline, even if the peer still makes progress.
pub struct Timed<'a> {
    /// The connected socket.
    pub socket: &'a TcpStream,
    /// The end of the handshake.
    pub deadline: Instant,
    /// Records the times in which we wait for the peer.
    pub turn: &'a PeersTurn,
}

impl Timed<'_> {
    fn wait<T>(&self, call: impl FnOnce(&TcpStream) -> io::Result<T>) -> io::Result<T> {
        self.turn.begin();
        let result = call(self.socket);
        self.turn.end();
        result
    }

    /// Reads available bytes into `buffer`; returns 0 at the end of the stream.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            self.socket.set_read_timeout(left(self.deadline)?)?;
            match self.wait(|mut socket| socket.read(buffer)) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }

    /// Writes all of `bytes`.
    pub fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.socket.set_write_timeout(left(self.deadline)?)?;
            match self.wait(|mut socket| socket.write(bytes)) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Ends a failed connection: sends `alert` and waits up to [`DRAIN_TIME`] for the peer to
    /// close.
    pub fn give_up(&mut self, alert: &[u8]) {
        self.deadline = self.deadline.min(Instant::now() + DRAIN_TIME);
        // the connection has already failed: errors have no consequence
        let _ = self.write_all(alert);
        let _ = self.socket.shutdown(Shutdown::Write);
        let mut rest = [0; 4096];
        let mut drained = 0;
        while drained < DRAIN_BYTES {
            match self.read(&mut rest) {
                Ok(0) | Err(_) => break,
                Ok(len) => drained += len,
            }
        }
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

/// Reads the first ClientHello of a client into `filter`; returns the bytes for rustls.
pub fn read_hello(peer: &mut Timed<'_>, filter: &mut HelloFilter) -> Result<Vec<u8>, Error> {
    let mut received = [0; 4096];
    let mut output = Vec::new();
    while !filter.has_hello() {
        let len = match peer.read(&mut received)? {
            0 => return Err(Error::Closed),
            len => len,
        };
        filter.push(&received[..len], &mut output)?;
    }
    Ok(output)
}

/// Refuses a client before a TLS connection exists.
pub fn refuse_hello(peer: &mut Timed<'_>, error: &Error) {
    // RFC 8446 §6: a plaintext alert record; fatal; illegal_parameter
    const ALERT: [u8; 7] = [21, 3, 3, 0, 2, 2, 47];
    match error {
        Error::TimedOut | Error::Closed | Error::Socket(_) => {}
        _ => peer.give_up(&ALERT),
    }
}

/// Completes the handshake. In the strong form, the first flush of the exchange sends a client's last
/// message of the handshake. A server passes its `filter` and the bytes that the filter has already
/// returned.
pub fn complete(
    connection: &mut Connection,
    peer: &mut Timed<'_>,
    mut filter: Option<(&mut HelloFilter, Vec<u8>)>,
) -> Result<(), Error> {
    let result = run(connection, peer, &mut filter);
    if let Err(error) = &result
        && !matches!(error, Error::TimedOut | Error::Closed | Error::Socket(_))
    {
        peer.give_up(&take_output(connection).unwrap_or_default());
    }
    result
}

fn run(
    connection: &mut Connection,
    peer: &mut Timed<'_>,
    filter: &mut Option<(&mut HelloFilter, Vec<u8>)>,
) -> Result<(), Error> {
    if let Some((_, hello)) = filter {
        feed(connection, &std::mem::take(hello))?;
    }
    let mut received = [0; 4096];
    let mut filtered = Vec::new();
    while connection.is_handshaking() {
        peer.write_all(&take_output(connection)?)?;
        let len = match peer.read(&mut received)? {
            0 => return Err(Error::Closed),
            len => len,
        };
        match filter {
            None => feed(connection, &received[..len])?,
            Some((filter, _)) => {
                filtered.clear();
                filter.push(&received[..len], &mut filtered)?;
                feed(connection, &filtered)?;
            }
        }
    }
    if connection.alpn_protocol() != Some(ALPN_STRONG) {
        peer.write_all(&take_output(connection)?)?;
    }
    Ok(())
}

/// Passes all of `bytes` to rustls. Application data directly behind the handshake stays in the
/// buffer of rustls.
pub fn feed(connection: &mut Connection, mut bytes: &[u8]) -> Result<(), Error> {
    while !bytes.is_empty() {
        connection.read_tls(&mut bytes)?;
        connection.process_new_packets()?;
    }
    Ok(())
}

pub fn take_output(connection: &mut Connection) -> io::Result<Vec<u8>> {
    let mut output = Vec::new();
    while connection.wants_write() {
        connection.write_tls(&mut output)?;
    }
    Ok(output)
}

/// Returns the form that both ends selected.
pub fn form(connection: &Connection, forms: Forms) -> Result<Form, Error> {
    if connection.alpn_protocol() != Some(ALPN_STRONG) {
        return match forms {
            Forms::OnlyStrong => Err(Error::Incompatible(
                "it does not know the strong form of attested TLS, which this side requires".into(),
            )),
            _ => Ok(Form::Old),
        };
    }
    match connection.protocol_version() {
        Some(ProtocolVersion::TLSv1_3) => Ok(Form::Strong),
        _ => Err(Error::Misbehaved(
            "it selects the strong form without TLS 1.3".into(),
        )),
    }
}

/// Converts an established connection to a transport and removes the socket time-outs of the
/// handshake.
pub fn finish(
    connection: Connection,
    socket: TcpStream,
    accepted: Option<Accepted>,
) -> Result<Transport, Error> {
    socket.set_read_timeout(None)?;
    socket.set_write_timeout(None)?;
    let transport = super::split(connection, socket)?;
    Ok(match accepted {
        None => transport,
        Some(Accepted { machine, claims }) => Transport {
            identity: machine,
            claims: Some(claims),
            ..transport
        },
    })
}

impl From<HelloError> for Error {
    fn from(error: HelloError) -> Self {
        match error {
            HelloError::NotTls(what) => Error::NotTls(what),
            HelloError::Malformed(what) => Error::Misbehaved(what.into()),
        }
    }
}
