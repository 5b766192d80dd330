//! Ordinary TLS for the interop tests: a self-signed certificate, ALPN `h2`.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
};
use transport::{Accept, Transport};

/// A certificate for `localhost` and its key, as files.
pub struct Identity {
    folder: tempfile::TempDir,
}

impl Identity {
    pub fn new() -> Identity {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let identity = Identity {
            folder: tempfile::tempdir().unwrap(),
        };
        std::fs::write(identity.certificate_file(), made.cert.pem()).unwrap();
        std::fs::write(identity.key_file(), made.signing_key.serialize_pem()).unwrap();
        identity
    }

    pub fn certificate_file(&self) -> PathBuf {
        self.folder.path().join("certificate.pem")
    }

    pub fn key_file(&self) -> PathBuf {
        self.folder.path().join("key.pem")
    }

    fn certificate(&self) -> CertificateDer<'static> {
        CertificateDer::from_pem_file(self.certificate_file()).unwrap()
    }

    pub fn accept(&self) -> Arc<dyn Accept> {
        let key = PrivateKeyDer::from_pem_file(self.key_file()).unwrap();
        let mut config = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![self.certificate()], key)
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        let config = Arc::new(config);
        Arc::new(move |socket: TcpStream, deadline: Instant| {
            let connection = ServerConnection::new(config.clone()).map_err(io::Error::other)?;
            socket.set_read_timeout(Some(deadline.saturating_duration_since(Instant::now())))?;
            shake_hands(connection.into(), socket)
        })
    }
}

/// Connects as a client.
pub fn connect(socket: TcpStream, identity: &Identity) -> io::Result<Transport> {
    let mut roots = RootCertStore::empty();
    roots.add(identity.certificate()).unwrap();
    let mut config = ClientConfig::builder()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let name = ServerName::try_from("localhost").unwrap();
    let connection = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
    shake_hands(connection.into(), socket)
}

fn shake_hands(mut connection: Connection, mut socket: TcpStream) -> io::Result<Transport> {
    socket.set_nodelay(true)?;
    while connection.is_handshaking() {
        connection.complete_io(&mut socket)?;
    }
    let socket = Arc::new(socket);
    let half = Half {
        connection: Arc::new(Mutex::new(connection)),
        socket: socket.clone(),
    };
    let reader = Reader {
        half: half.clone(),
        records: vec![0; 16 << 10],
        taken: 0,
        filled: 0,
    };
    Ok(Transport {
        reader: Box::new(reader),
        writer: Box::new(half),
        socket,
        scheme: "https",
        identity: None,
        claims: None,
        binding: None,
    })
}

/// One direction of a TLS connection. The lock is never held during a read from the socket.
#[derive(Clone)]
struct Half {
    connection: Arc<Mutex<Connection>>,
    socket: Arc<TcpStream>,
}

impl Half {
    fn send_records(&self, connection: &mut Connection) -> io::Result<()> {
        while connection.wants_write() {
            connection.write_tls(&mut &*self.socket)?;
        }
        Ok(())
    }
}

/// The reading side, with bytes from the socket for which rustls has no room yet.
struct Reader {
    half: Half,
    records: Vec<u8>,
    taken: usize,
    filled: usize,
}

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut connection = self.half.connection.lock().unwrap();
            match connection.reader().read(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(0),
                result => return result,
            }
            if self.taken < self.filled {
                self.taken += connection.read_tls(&mut &self.records[self.taken..self.filled])?;
                connection.process_new_packets().map_err(io::Error::other)?;
                self.half.send_records(&mut connection)?;
                continue;
            }
            drop(connection);
            self.filled = (&*self.half.socket).read(&mut self.records)?;
            self.taken = 0;
            if self.filled == 0 {
                return Ok(0);
            }
        }
    }
}

impl Write for Half {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut connection = self.connection.lock().unwrap();
        let length = connection.writer().write(bytes)?;
        self.send_records(&mut connection)?;
        Ok(length)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
