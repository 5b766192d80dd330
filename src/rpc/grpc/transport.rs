//! What gRPC runs over: a connection whose two directions can be used from two threads at once.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use crate::half_open::PeersTurn;

/// One established connection: plain TCP, or TLS over it.
pub struct Transport {
    /// Bytes from the peer. One thread blocks in it.
    pub reader: Box<dyn Read + Send>,
    /// Bytes to the peer, usable while another thread blocks in `reader`.
    pub writer: Box<dyn Write + Send>,
    /// The socket beneath: time-outs, the peer's address, and `shutdown`, which wakes both halves.
    pub socket: Arc<TcpStream>,
    /// The `:scheme` of requests: `http` or `https`.
    pub scheme: &'static str,
    /// Who the peer proved to be beneath gRPC, as a name to compare with others of the same layer; none where nothing was.
    pub identity: Option<Arc<str>>,
}

impl Transport {
    /// Plain TCP.
    pub fn plain(socket: TcpStream) -> io::Result<Transport> {
        socket.set_nodelay(true)?;
        let socket = Arc::new(socket);
        let half = || Box::new(Plain(socket.clone()));
        Ok(Transport {
            reader: half(),
            writer: half(),
            socket: socket.clone(),
            scheme: "http",
            identity: None,
        })
    }
}

/// One direction of plain TCP. All share a descriptor.
struct Plain(Arc<TcpStream>);

impl Read for Plain {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&*self.0).read(buffer)
    }
}

impl Write for Plain {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&*self.0).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// How a server makes a [`Transport`] of an accepted socket; runs on the connection's own thread.
pub trait Accept: Send + Sync {
    /// Completes before `deadline` or fails. The error's text is for the server's log. Tells `turn` whenever it waits for the
    /// peer: one that lets us wait may lose its place to another.
    fn accept(
        &self,
        socket: TcpStream,
        deadline: Instant,
        turn: &PeersTurn,
    ) -> io::Result<Transport>;
}

impl<F> Accept for F
where
    F: Fn(TcpStream, Instant) -> io::Result<Transport> + Send + Sync,
{
    fn accept(&self, socket: TcpStream, deadline: Instant, _: &PeersTurn) -> io::Result<Transport> {
        self(socket, deadline)
    }
}
