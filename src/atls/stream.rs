//! Two independent halves of an established TLS connection.
//!
//! rustls' connection is one state machine, but a gRPC connection reads and writes at the same time. So the machine stands
//! behind a lock that is held only while records are decrypted or encrypted in memory, never over a system call:
//!
//! ```text
//! Reader:  socket read (no lock)  -> engine lock: records in, plaintext out to the caller's buffer
//! Writer:  outgoing lock {  engine lock: plaintext in, records into a buffer  -> socket write  }
//! ```
//!
//! The outgoing lock keeps the records in the order of their encryption. The reader never waits for it, so a writer that is
//! blocked because the peer does not read does not keep us from reading, and two peers that both send cannot block
//! each other. What the engine itself wants to send (an alert) goes out with whoever holds the outgoing lock: see
//! [`Shared::flush_engine`]. Answers to key updates wait in the engine for the next write, as RFC 8446 §4.6.3 allows.
//!
//! Received plaintext goes straight from rustls to the caller's buffer; none is kept here. (rustls frees its own copies without
//! wiping them.)

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use rustls::Connection;

use super::Error;
use crate::grpc::Transport;

/// Bytes read from the socket at once: one record of the largest size (RFC 8446 §5.2, 2^14 + 256, with its header).
const READ_SIZE: usize = (1 << 14) + 256 + 5;
/// Plaintext encrypted at once: four records of the largest size, so that a large write is few system calls.
const WRITE_SIZE: usize = 4 << 14;
/// How long the end of the writer waits for a peer that does not read.
const CLOSE_TIME: Duration = Duration::from_secs(1);

/// Makes a transport of a TLS connection whose handshake is complete, attested or not.
///
/// `connection` may already hold received application data. `socket` must be blocking; its time-outs apply to both halves.
/// A write that fails or times out is final, since part of a record may have been sent: all later writes fail too.
/// Dropping the writer tells the peer that no more data comes (close_notify); the reader goes on until the peer ends
/// its half.
///
/// The reader returns 0 after the peer's close_notify, and the error [`io::ErrorKind::UnexpectedEof`] if the connection
/// ended without one: then data may have been cut off.
///
/// # Errors
/// If the socket handle cannot be duplicated.
pub fn split(connection: Connection, socket: TcpStream) -> io::Result<Transport> {
    let shared = Arc::new(Shared {
        engine: Mutex::new(connection),
        outgoing: Mutex::new(Outgoing { socket: socket.try_clone()?, records: Vec::new(), broken: None }),
    });
    Ok(Transport {
        reader: Box::new(Reader {
            shared: shared.clone(),
            socket: socket.try_clone()?,
            received: vec![0; READ_SIZE].into_boxed_slice(),
            unread: 0..0,
            ended: None,
        }),
        writer: Box::new(Writer { shared }),
        socket,
        scheme: "https",
    })
}

/// Lock order: `outgoing`, then `engine`.
struct Shared {
    engine: Mutex<Connection>,
    outgoing: Mutex<Outgoing>,
}

/// The way to the socket.
struct Outgoing {
    socket: TcpStream,
    /// Encrypted, not sent yet; empty between calls.
    records: Vec<u8>,
    /// Why nothing can be sent any more.
    broken: Option<io::ErrorKind>,
}

impl Shared {
    fn engine(&self) -> MutexGuard<'_, Connection> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outgoing(&self) -> MutexGuard<'_, Outgoing> {
        self.outgoing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Encrypts and sends the front of `data`; returns how much that was.
    fn send(&self, data: &[u8]) -> io::Result<usize> {
        let mut outgoing = self.outgoing();
        outgoing.check()?;
        let accepted = {
            let mut engine = self.engine();
            outgoing.take_from(&mut engine)?;
            let accepted = engine.writer().write(&data[..data.len().min(WRITE_SIZE)])?;
            outgoing.take_from(&mut engine)?;
            accepted
        };
        outgoing.send()?;
        drop(outgoing);
        self.flush_engine()?;
        Ok(accepted)
    }

    /// Sends what the engine wants to send by itself, if nobody else is sending.
    ///
    /// Nothing is left behind: who finds the lock taken has put its bytes into the engine before, and who holds it looks into
    /// the engine again after it released the lock.
    fn flush_engine(&self) -> io::Result<()> {
        loop {
            if !self.engine().wants_write() {
                return Ok(());
            }
            let mut outgoing = match self.outgoing.try_lock() {
                Ok(outgoing) => outgoing,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return Ok(()),
            };
            outgoing.check()?;
            outgoing.take_from(&mut self.engine())?;
            outgoing.send()?;
        }
    }

    /// Tells the peer that no more data comes.
    fn close(&self) -> io::Result<()> {
        let mut outgoing = self.outgoing();
        outgoing.check()?;
        {
            let mut engine = self.engine();
            engine.send_close_notify();
            outgoing.take_from(&mut engine)?;
        }
        outgoing.socket.set_write_timeout(Some(CLOSE_TIME))?;
        outgoing.send()
    }
}

impl Outgoing {
    fn check(&self) -> io::Result<()> {
        match self.broken {
            Some(kind) => Err(io::Error::new(kind, "an earlier write to this TLS connection failed")),
            None => Ok(()),
        }
    }

    fn take_from(&mut self, engine: &mut Connection) -> io::Result<()> {
        while engine.wants_write() {
            engine.write_tls(&mut self.records)?;
        }
        Ok(())
    }

    fn send(&mut self) -> io::Result<()> {
        let result = self.socket.write_all(&self.records);
        self.records.clear();
        if let Err(error) = &result {
            self.broken = Some(error.kind());
        }
        result
    }
}

struct Reader {
    shared: Arc<Shared>,
    socket: TcpStream,
    /// Records as they came from the socket.
    received: Box<[u8]>,
    /// The part of `received` that the engine has not taken yet.
    unread: std::ops::Range<usize>,
    /// Why no more data comes; returned once all data before it was.
    ended: Option<rustls::Error>,
}

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            match self.take_plaintext(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(io::Error::new(error.kind(), "the peer closed the connection without ending TLS"));
                }
                result => return result,
            }
            if let Some(error) = &self.ended {
                return Err(Error::from(error.clone()).into());
            }
            if self.unread.is_empty() {
                let len = read_socket(&mut self.socket, &mut self.received)?;
                self.unread = 0..len;
            }
            self.process()?;
        }
    }
}

impl Reader {
    fn take_plaintext(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.shared.engine().reader().read(buffer)
    }

    /// Lets the engine take received bytes (none: the end) and decrypt them.
    fn process(&mut self) -> io::Result<()> {
        let mut engine = self.shared.engine();
        let taken = engine.read_tls(&mut &self.received[self.unread.clone()])?;
        self.unread.start += taken;
        let result = engine.process_new_packets();
        let wants_write = engine.wants_write();
        drop(engine);
        if wants_write {
            // whether the alert can be sent changes nothing for the reader
            let _ = self.shared.flush_engine();
        }
        if let Err(error) = result {
            self.unread = 0..0;
            self.ended = Some(error);
        }
        Ok(())
    }
}

fn read_socket(socket: &mut TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match socket.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

struct Writer {
    shared: Arc<Shared>,
}

impl Write for Writer {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if data.is_empty() { Ok(0) } else { self.shared.send(data) }
    }

    /// Every write has sent what it accepted.
    fn flush(&mut self) -> io::Result<()> {
        self.shared.flush_engine()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // the peer may be gone already, which is as good an end
        let _ = self.shared.close();
    }
}
