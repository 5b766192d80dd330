//! Connections without TLS, for peers on the same machine or behind another protection.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use crate::Transport;

/// Creates a transport of plain TCP.
pub fn transport(socket: TcpStream) -> io::Result<Transport> {
    socket.set_nodelay(true)?;
    let socket = Arc::new(socket);
    let half = || Box::new(Plain(socket.clone()));
    Ok(Transport {
        reader: half(),
        writer: half(),
        socket: socket.clone(),
        scheme: "http",
        identity: None,
        claims: None,
        binding: None,
    })
}

/// One direction of plain TCP. Both share a file descriptor.
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
