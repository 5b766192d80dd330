//! Two independent halves of an established TLS connection.
//!
//! A connection of rustls is one state machine (the engine), but a gRPC connection reads and writes
//! at the same time. So a lock protects the engine. It is held only while records are decrypted or
//! encrypted in memory, never during a system call:
//!
//! ```text
//! Reader:  socket read (no lock)  -> engine lock: records in, plaintext out to the caller's buffer
//! Writer:  outgoing lock {  engine lock: plaintext in, records into a buffer  -> socket write  }
//! ```
//!
//! The outgoing lock keeps the records in the order of their encryption. The reader never waits for
//! it. So a writer that is blocked by a peer that does not read does not block the reader, and two
//! peers that both send cannot block each other. Records of the engine itself (an alert) are sent
//! by the thread that holds the outgoing lock: see [`Shared::flush_engine`]. Answers to key updates
//! wait in the engine for the next write, as RFC 8446 §4.6.3 allows.
//!
//! Received plaintext is copied directly from rustls to the buffer of the caller. (rustls does not
//! wipe its own copies.)

use base::sync::lock;
use std::cell::Cell;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex, TryLockError};
use std::time::Duration;

use rustls::{Connection, ProtocolVersion};

use super::Error;
use transport::Transport;

/// Size in bytes of the first read from the socket. Every peer can occupy this much memory.
const READ_FIRST: usize = 4 << 10;
/// Size in bytes of a read while the peer sends faster: one record of maximum size (RFC 8446 §5.2,
/// 2^14 + 256) with its header.
const READ_RECORD: usize = (1 << 14) + 256 + HEADER;
/// Size in bytes of a record's header. Its last two bytes are the length of the rest.
const HEADER: usize = 5;
/// Number of reads of [`READ_FIRST`] bytes without a pause before larger ones: 256 KiB in total. A
/// peer that only wants to make us hold memory does not send that much.
const READS_FIRST: u8 = 64;
/// Maximum number of plaintext bytes that are encrypted at once: four records of maximum size, to
/// reduce system calls.
const WRITE_SIZE: usize = 4 << 14;
/// Label of the exporter of a channel binding (RFC 9266 §2). The context is empty.
const CHANNEL_BINDING: &[u8] = b"EXPORTER-Channel-Binding";
/// How long dropping the writer may wait for a peer that does not read.
const CLOSE_TIME: Duration = Duration::from_secs(1);

/// Converts a TLS connection with complete handshake, attested or not, to a transport.
///
/// `connection` may already hold received application data. `socket` must be blocking; its
/// time-outs apply to both halves. A write that fails or times out is final, since part of a record
/// may have been sent: all later writes fail too. Dropping the writer tells the peer that no more
/// data follows (close_notify); the reader continues until the peer closes its half.
///
/// The reader returns 0 after the peer's close_notify, and the error
/// [`io::ErrorKind::UnexpectedEof`] if the connection ended without one: then data may be missing.
///
/// # Errors
/// If the socket handle cannot be duplicated.
pub fn split(connection: Connection, socket: TcpStream) -> io::Result<Transport> {
    let socket = Arc::new(socket);
    let binding = match connection.protocol_version() {
        Some(ProtocolVersion::TLSv1_3) => connection
            .export_keying_material([0; 32], CHANNEL_BINDING, None)
            .ok(),
        _ => None, // RFC 9266 §4.2: TLS 1.2 has none if a session can be resumed
    };
    let shared = Arc::new(Shared {
        engine: Mutex::new(connection),
        outgoing: Mutex::new(Outgoing {
            socket: socket.clone(),
            records: Vec::new(),
            broken: None,
        }),
    });
    Ok(Transport {
        reader: Box::new(Reader {
            shared: shared.clone(),
            socket: socket.clone(),
            received: Vec::new(),
            unread: 0..0,
            full_reads: 0,
            until_length: HEADER,
            last: 0,
            ended: None,
        }),
        writer: Box::new(Writer { shared }),
        socket,
        scheme: "https",
        identity: None,
        claims: None,
        binding,
    })
}

/// Lock order: `outgoing`, then `engine`.
struct Shared {
    engine: Mutex<Connection>,
    outgoing: Mutex<Outgoing>,
}

thread_local! {
    /// A buffer for the records of the connection to which this thread writes. An idle connection
    /// keeps no buffer, and a busy connection does not allocate one for each write.
    static ROOM: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// The sending side of the socket.
struct Outgoing {
    socket: Arc<TcpStream>,
    /// Encrypted records that are not sent yet; empty between calls.
    records: Vec<u8>,
    /// Why sending has failed permanently.
    broken: Option<io::ErrorKind>,
}

impl Shared {
    /// Encrypts and sends the front of `data`; returns the number of bytes.
    fn send(&self, data: &[u8]) -> io::Result<usize> {
        let mut outgoing = lock(&self.outgoing);
        outgoing.check()?;
        let accepted = {
            let mut engine = lock(&self.engine);
            outgoing.take_from(&mut engine)?;
            let accepted = engine.writer().write(&data[..data.len().min(WRITE_SIZE)])?;
            outgoing.take_from(&mut engine)?;
            accepted
        };
        outgoing.send()?;
        drop(outgoing);
        self.flush_engine().map(|()| accepted)
    }

    /// Sends the records of the engine itself, unless another thread is sending.
    ///
    /// No record is missed: a thread that finds the lock taken has already put its bytes into the
    /// engine, and the holder of the lock checks the engine again after it releases the lock.
    fn flush_engine(&self) -> io::Result<()> {
        loop {
            if !lock(&self.engine).wants_write() {
                return Ok(());
            }
            let mut outgoing = match self.outgoing.try_lock() {
                Ok(outgoing) => outgoing,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return Ok(()),
            };
            outgoing.check()?;
            outgoing.take_from(&mut lock(&self.engine))?;
            outgoing.send()?;
        }
    }

    /// Tells the peer that no more data follows.
    fn close(&self) -> io::Result<()> {
        let mut outgoing = lock(&self.outgoing);
        outgoing.check()?;
        {
            let mut engine = lock(&self.engine);
            engine.send_close_notify();
            outgoing.take_from(&mut engine)?;
        }
        outgoing.socket.set_write_timeout(Some(CLOSE_TIME))?;
        outgoing.send()
    }
}

impl Outgoing {
    fn check(&self) -> io::Result<()> {
        let why = "an earlier write to this TLS connection failed";
        self.broken
            .map_or(Ok(()), |kind| Err(io::Error::new(kind, why)))
    }

    fn take_from(&mut self, engine: &mut Connection) -> io::Result<()> {
        if self.records.capacity() == 0 {
            self.records = ROOM.take();
        }
        while engine.wants_write() {
            engine.write_tls(&mut self.records)?;
        }
        Ok(())
    }

    fn send(&mut self) -> io::Result<()> {
        let mut records = std::mem::take(&mut self.records);
        let result = (&*self.socket).write_all(&records);
        records.clear();
        ROOM.set(records);
        if let Err(error) = &result {
            self.broken = Some(error.kind());
        }
        result
    }
}

struct Reader {
    shared: Arc<Shared>,
    socket: Arc<TcpStream>,
    /// Records from the socket. The buffer is freed while no data arrives, to save memory of idle
    /// connections.
    received: Vec<u8>,
    /// The part of `received` that the engine has not taken yet.
    unread: std::ops::Range<usize>,
    /// By how many the reads without a pause that gave [`READ_FIRST`] bytes or more exceed the smaller
    /// ones.
    full_reads: u8,
    /// The number of bytes until the end of the next header of a record, and the last two bytes. Only
    /// the sizes of reads depend on them: at first the engine may have a part of a record.
    until_length: usize,
    last: u16,
    /// The error that ended the stream; returned after all data before it.
    ended: Option<rustls::Error>,
}

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            match lock(&self.shared.engine).reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return Err(io::Error::new(
                        error.kind(),
                        "the peer closed the connection without ending TLS",
                    ));
                }
                result => return result,
            }
            if let Some(error) = &self.ended {
                return Err(Error::from(error.clone()).into());
            }
            if self.unread.is_empty() {
                let is_fast = self.full_reads >= READS_FIRST;
                let room = if is_fast { READ_RECORD } else { READ_FIRST };
                if self.received.len() != room {
                    self.received = vec![0; room];
                }
                let ends_record = (READ_FIRST..room).contains(&self.until_length);
                let size = if ends_record { self.until_length } else { room };
                let result = (&*self.socket).read(&mut self.received[..size]);
                self.full_reads = match result {
                    Ok(READ_FIRST..) => self.full_reads.saturating_add(1),
                    Ok(_) => self.full_reads.saturating_sub(1),
                    Err(_) => 0,
                };
                self.unread = 0..result.inspect_err(|_| self.received = Vec::new())?;
                self.follow();
            }
            self.process()?;
        }
    }
}

impl Reader {
    /// Follows the records in the received bytes.
    fn follow(&mut self) {
        let mut bytes = &self.received[self.unread.clone()];
        while !bytes.is_empty() {
            let part;
            (part, bytes) = bytes.split_at(self.until_length.min(bytes.len()));
            for byte in &part[part.len().saturating_sub(2)..] {
                self.last = self.last << 8 | u16::from(*byte);
            }
            self.until_length -= part.len();
            if self.until_length == 0 {
                self.until_length = usize::from(self.last) + HEADER;
            }
        }
    }

    /// Passes received bytes to the engine, which decrypts them. No bytes mean the end of the
    /// stream.
    fn process(&mut self) -> io::Result<()> {
        let mut engine = lock(&self.shared.engine);
        let mut rest = &self.received[self.unread.clone()];
        engine.read_tls(&mut rest)?;
        // rustls takes 4 KiB at a time. Fill its buffer before it looks for records, because each look
        // copies an incomplete one, and musl copies it byte by byte.
        while !rest.is_empty() && engine.read_tls(&mut rest).is_ok_and(|taken| taken > 0) {}
        self.unread.start = self.unread.end - rest.len();
        let result = engine.process_new_packets();
        let wants_write = engine.wants_write();
        drop(engine);
        if wants_write {
            // the reader continues even if the alert cannot be sent
            let _ = self.shared.flush_engine();
        }
        if let Err(error) = result {
            self.unread = 0..0;
            self.ended = Some(error);
        }
        Ok(())
    }
}

struct Writer {
    shared: Arc<Shared>,
}

impl Write for Writer {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        match data {
            [] => Ok(0),
            _ => self.shared.send(data),
        }
    }

    /// Sends records of the engine; each write has already sent its data.
    fn flush(&mut self) -> io::Result<()> {
        self.shared.flush_engine()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // an error means that the connection has already ended
        let _ = self.shared.close();
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpListener};
    use std::thread;
    use std::time::Instant;

    use super::*;
    use crate::{Client, Server};
    use transport::half_open::PeersTurn;

    /// Returns two ends of a TLS connection over loopback after the handshake, before the split.
    fn ends() -> ((Connection, TcpStream), (Connection, TcpStream)) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        let deadline = Instant::now() + Duration::from_secs(20);
        let server = thread::spawn(move || {
            let server = Server::new(None, None);
            let established = server.establish(&far, deadline, &PeersTurn::default());
            (established.unwrap().0, far)
        });
        let established = Client::new(None, None).establish(&near, deadline);
        let client = established.unwrap().0;
        let (server, far) = server.join().unwrap();
        for socket in [&near, &far] {
            // a test that hangs fails after this time
            socket
                .set_read_timeout(Some(Duration::from_secs(60)))
                .unwrap();
            socket
                .set_write_timeout(Some(Duration::from_secs(60)))
                .unwrap();
        }
        ((client, near), (server, far))
    }

    fn pair() -> (Transport, Transport) {
        let ((client, near), (server, far)) = ends();
        (split(client, near).unwrap(), split(server, far).unwrap())
    }

    /// Returns bytes that depend on their position, to detect a wrong order.
    fn pattern(start: usize, len: usize) -> Vec<u8> {
        (start..start + len)
            .map(|i| (i ^ i >> 8 ^ i >> 16) as u8)
            .collect()
    }

    fn send(mut writer: Box<dyn Write + Send>, total: usize, piece: usize) {
        let mut sent = 0;
        while sent < total {
            let len = piece.min(total - sent);
            writer.write_all(&pattern(sent, len)).unwrap();
            sent += len;
        }
        writer.flush().unwrap();
    }

    /// Reads to the end and returns the number of bytes.
    fn check(mut reader: Box<dyn Read + Send>) -> usize {
        let mut buffer = vec![0; 50_000];
        let mut received = 0;
        loop {
            match reader.read(&mut buffer).unwrap() {
                0 => return received,
                len => {
                    assert!(
                        buffer[..len] == pattern(received, len),
                        "wrong bytes at {received}"
                    );
                    received += len;
                }
            }
        }
    }

    #[test]
    fn both_ends_send_32_mib_at_once_and_all_arrives_in_order() {
        const TOTAL: usize = 32 << 20;
        let (near, far) = pair();
        // writes that are larger than a record and the socket buffers, and small writes that share
        // no boundary with records
        let senders = [
            thread::spawn(move || send(near.writer, TOTAL, 3 << 20)),
            thread::spawn(move || send(far.writer, TOTAL, 10_007)),
        ];
        let receivers = [
            thread::spawn(move || check(near.reader)),
            thread::spawn(move || check(far.reader)),
        ];
        senders
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        receivers
            .into_iter()
            .for_each(|thread| assert_eq!(thread.join().unwrap(), TOTAL));
    }

    #[test]
    fn a_blocked_write_does_not_keep_the_reader_from_reading() {
        const TOTAL: usize = 8 << 20;
        let (near, far) = pair();
        let blocked = thread::spawn(move || send(near.writer, TOTAL, TOTAL));
        thread::sleep(Duration::from_millis(200));
        assert!(!blocked.is_finished(), "it fits into the buffers");
        // the far end does not read until all of its own data has arrived at the near end
        let reading = thread::spawn(move || check(near.reader));
        send(far.writer, TOTAL, TOTAL);
        assert_eq!(reading.join().unwrap(), TOTAL);
        assert!(!blocked.is_finished());
        assert_eq!(check(far.reader), TOTAL);
        blocked.join().unwrap();
    }

    #[test]
    fn dropping_the_writer_ends_one_direction_only() {
        let (mut near, mut far) = pair();
        near.writer.write_all(b"last words").unwrap();
        drop(near.writer);
        let mut received = Vec::new();
        far.reader.read_to_end(&mut received).unwrap();
        assert_eq!(received, b"last words");
        far.writer.write_all(b"an answer").unwrap();
        drop(far.writer);
        received.clear();
        near.reader.read_to_end(&mut received).unwrap();
        assert_eq!(received, b"an answer");
    }

    #[test]
    fn a_connection_cut_without_close_notify_is_an_error_after_the_data() {
        let (mut near, mut far) = pair();
        near.writer.write_all(b"half a mess").unwrap();
        near.socket.shutdown(Shutdown::Write).unwrap();
        let mut received = Vec::new();
        let error = far.reader.read_to_end(&mut received).unwrap_err();
        assert_eq!(
            (error.kind(), &received[..]),
            (io::ErrorKind::UnexpectedEof, &b"half a mess"[..])
        );
        assert_eq!(
            far.reader.read(&mut [0]).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }

    #[test]
    fn a_forged_record_is_an_error_after_the_data_and_the_peer_is_alerted() {
        let (mut near, mut far) = pair();
        near.writer.write_all(b"true").unwrap();
        (&*near.socket)
            .write_all(&[&[23, 3, 3, 0, 30][..], &[7; 30]].concat())
            .unwrap();
        let mut received = Vec::new();
        let error = far.reader.read_to_end(&mut received).unwrap_err();
        assert_eq!(
            (error.kind(), &received[..]),
            (io::ErrorKind::InvalidData, &b"true"[..])
        );
        assert_eq!(
            far.reader.read(&mut [0]).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        let error = near.reader.read(&mut [0]).unwrap_err();
        let error = error.downcast::<Error>().unwrap();
        assert!(
            matches!(
                error,
                Error::PeerRefused(rustls::AlertDescription::BadRecordMac)
            ),
            "{error}"
        );
    }

    #[test]
    fn shutting_the_socket_down_wakes_a_blocked_reader_and_a_blocked_writer() {
        let (near, far) = pair();
        let mut reader = near.reader;
        let reading = thread::spawn(move || reader.read(&mut [0]));
        let mut writer = near.writer;
        let writing = thread::spawn(move || writer.write_all(&vec![0; 32 << 20]));
        thread::sleep(Duration::from_millis(200));
        assert!(!reading.is_finished() && !writing.is_finished());
        near.socket.shutdown(Shutdown::Both).unwrap();
        assert_eq!(
            reading.join().unwrap().unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
        assert!(writing.join().unwrap().is_err());
        drop(far);
    }

    #[test]
    fn a_writer_is_dropped_in_bounded_time_though_the_peer_does_not_read() {
        let (near, far) = pair();
        near.socket
            .set_write_timeout(Some(Duration::from_millis(200)))
            .unwrap();
        let mut writer = near.writer;
        let error = writer.write_all(&vec![0; 32 << 20]).unwrap_err();
        assert!(
            matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
            ),
            "{error}"
        );
        // the error is permanent, because part of a record was sent
        assert!(writer.write(b"more").is_err());
        drop(writer);

        // the socket buffers are full, but no write has failed yet
        far.socket.set_nonblocking(true).unwrap();
        while (&*far.socket).write(&[0; 4096]).is_ok() {}
        far.socket.set_nonblocking(false).unwrap();
        let begin = Instant::now();
        drop(far.writer);
        assert!(begin.elapsed() >= CLOSE_TIME, "{:?}", begin.elapsed());
    }

    #[test]
    fn data_that_came_with_the_end_of_the_handshake_is_read_first() {
        let ((mut client, mut near), (mut server, far)) = ends();
        client.writer().write_all(b"early").unwrap();
        client.write_tls(&mut near).unwrap();
        server.read_tls(&mut &far).unwrap();
        server.process_new_packets().unwrap();
        let mut transport = split(server, far).unwrap();
        let mut received = [0; 5];
        transport.reader.read_exact(&mut received).unwrap();
        assert_eq!(&received, b"early");
    }

    #[test]
    fn key_updates_are_followed_and_answered() {
        let ((mut client, mut near), (server, far)) = ends();
        let mut transport = split(server, far).unwrap();
        for round in 0..3 {
            client.refresh_traffic_keys().unwrap();
            client.writer().write_all(&[round; 5]).unwrap();
            while client.wants_write() {
                client.write_tls(&mut near).unwrap();
            }
            let mut received = [0; 5];
            transport.reader.read_exact(&mut received).unwrap();
            transport.writer.write_all(&received).unwrap();
            let mut echo = Vec::new();
            while echo.len() < 5 {
                client.read_tls(&mut near).unwrap();
                client.process_new_packets().unwrap();
                let mut part = [0; 5];
                if let Ok(len) = client.reader().read(&mut part) {
                    echo.extend_from_slice(&part[..len]);
                }
            }
            assert_eq!(echo, [round; 5]);
        }
    }

    #[test]
    fn a_read_time_out_of_the_socket_ends_the_read_and_nothing_else() {
        let (mut near, mut far) = pair();
        far.socket
            .set_read_timeout(Some(Duration::from_millis(50)))
            .unwrap();
        let kind = far.reader.read(&mut [0]).unwrap_err().kind();
        assert!(
            matches!(kind, io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut),
            "{kind:?}"
        );
        near.writer.write_all(b"late").unwrap();
        far.socket
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        let mut received = [0; 4];
        far.reader.read_exact(&mut received).unwrap();
        assert_eq!(&received, b"late");
    }

    /// Returns the records with which `engine` sends `data`, in writes of `piece` bytes.
    fn records(engine: &mut Connection, data: &[u8], piece: usize) -> Vec<u8> {
        let mut records = Vec::new();
        for piece in data.chunks(piece.min(1 << 14)) {
            engine.writer().write_all(piece).unwrap();
            while engine.wants_write() {
                engine.write_tls(&mut records).unwrap();
            }
        }
        records
    }

    /// Reads what has arrived, without waiting.
    fn arrived(transport: &mut Transport) -> Vec<u8> {
        let (mut buffer, mut all) = ([0; 3000], Vec::new());
        loop {
            match transport.reader.read(&mut buffer) {
                Ok(0) => return all,
                Ok(len) => all.extend_from_slice(&buffer[..len]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return all,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// The sizes are around those of headers, records, and buffers.
    const PIECES: [usize; 13] = [
        1, 4, 5, 6, 23, 4095, 4096, 4097, 16_405, 16_406, 16_411, 18_437, 65_537,
    ];

    #[test]
    fn records_may_be_split_and_joined_anywhere() {
        let ((mut client, mut near), (server, far)) = ends();
        let mut transport = split(server, far).unwrap();
        near.set_nodelay(true).unwrap();
        let mut start = 0;
        for piece in PIECES {
            // short records, and more bytes than are read in small parts
            let total = if piece < 4095 { 40_000 } else { 700_000 };
            for write in [1000, total] {
                let data = pattern(start, total);
                start += total;
                transport.socket.set_nonblocking(true).unwrap();
                let mut received = Vec::new();
                for part in records(&mut client, &data, write).chunks(piece) {
                    near.write_all(part).unwrap();
                    received.append(&mut arrived(&mut transport));
                }
                // no further record must be necessary for the last one
                transport.socket.set_nonblocking(false).unwrap();
                while received.len() < total {
                    let mut buffer = [0; 3000];
                    let len = transport.reader.read(&mut buffer).unwrap();
                    assert!(len > 0);
                    received.extend_from_slice(&buffer[..len]);
                }
                assert!(received == data, "pieces of {piece}, writes of {write}");
            }
        }
    }

    #[test]
    fn what_is_written_in_any_size_arrives_at_another_implementation_of_the_stream() {
        let ((mut client, mut near), (server, far)) = ends();
        let mut transport = split(server, far).unwrap();
        let writing = thread::spawn(move || {
            let mut start = 0;
            for piece in PIECES {
                (transport.writer.write_all(&pattern(start, piece))).unwrap();
                start += piece;
            }
            transport
        });
        let total: usize = PIECES.iter().sum();
        let mut received = Vec::new();
        while received.len() < total {
            client.read_tls(&mut near).unwrap();
            client.process_new_packets().unwrap();
            let mut buffer = [0; 20_000];
            while let Ok(len) = client.reader().read(&mut buffer) {
                received.extend_from_slice(&buffer[..len]);
            }
        }
        assert!(received == pattern(0, total));
        writing.join().unwrap();
    }

    #[test]
    fn a_connection_cut_anywhere_in_a_record_is_an_error_after_the_data() {
        for cut in [1, 4, 5, 6, 24, 4096, 4101, 16_405] {
            let ((mut client, mut near), (server, far)) = ends();
            let mut transport = split(server, far).unwrap();
            let whole = records(&mut client, b"whole", 5);
            let part = records(&mut client, &pattern(0, 1 << 14), 1 << 14);
            near.write_all(&whole).unwrap();
            near.write_all(&part[..cut]).unwrap();
            near.shutdown(Shutdown::Write).unwrap();
            let mut received = Vec::new();
            let error = transport.reader.read_to_end(&mut received).unwrap_err();
            assert_eq!(
                (error.kind(), &received[..]),
                (io::ErrorKind::UnexpectedEof, &b"whole"[..]),
                "{cut}"
            );
        }
    }

    #[test]
    fn bytes_after_a_close_notify_are_ignored() {
        let ((mut client, mut near), (server, far)) = ends();
        let mut transport = split(server, far).unwrap();
        let mut sent = records(&mut client, &pattern(0, 30_000), 30_000);
        client.send_close_notify();
        client.write_tls(&mut sent).unwrap();
        sent.extend_from_slice(&[23; 60_000]);
        near.write_all(&sent).unwrap();
        let mut received = Vec::new();
        transport.reader.read_to_end(&mut received).unwrap();
        assert!(received == pattern(0, 30_000));
        assert_eq!(transport.reader.read(&mut [0]).unwrap(), 0);
    }
}
