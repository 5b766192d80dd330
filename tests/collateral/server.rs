//! An HTTPS server whose answers a test sets, and which keeps the requests. Its certificate is self-signed.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::thread;

use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use tempfile::TempDir;

/// An answer.
#[derive(Clone)]
pub struct Answer {
    pub status: &'static str,
    pub fields: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// The fault of the answer.
    pub fault: Fault,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// The body never ends.
    Endless,
    /// The connection ends in the middle of the body.
    Cut,
}

impl Answer {
    pub fn ok(media: &str, body: impl Into<Vec<u8>>) -> Answer {
        let answer = Answer::status("200 OK").with("Content-Type", media);
        Answer {
            body: body.into(),
            ..answer
        }
    }

    pub fn status(status: &'static str) -> Answer {
        Answer {
            status,
            fields: vec![],
            body: vec![],
            fault: Fault::None,
        }
    }

    pub fn with(mut self, name: &'static str, value: &str) -> Answer {
        self.fields.push((name, value.into()));
        self
    }

    fn send(&self, stream: &mut impl Write) -> std::io::Result<()> {
        let mut head = format!("HTTP/1.1 {}\r\nConnection: close\r\n", self.status);
        for (name, value) in &self.fields {
            head += &format!("{name}: {value}\r\n");
        }
        let len = match self.fault {
            Fault::None => self.body.len(),
            Fault::Endless => usize::MAX / 2,
            Fault::Cut => self.body.len() + 1,
        };
        write!(stream, "{head}Content-Length: {len}\r\n\r\n")?;
        stream.write_all(&self.body)?;
        if self.fault == Fault::Endless {
            loop {
                stream.write_all(&[b'a'; 4096])?;
            }
        }
        stream.flush()
    }
}

/// A server, until it is dropped.
pub struct Server {
    address: SocketAddr,
    folder: TempDir,
    shared: Arc<Shared>,
}

type Answers = Box<dyn Fn(&str) -> Answer + Send + Sync>;

struct Shared {
    /// The head of each request.
    heads: Mutex<Vec<String>>,
    /// The content of each POST.
    contents: Mutex<Vec<Vec<u8>>>,
    answers: Answers,
}

impl Server {
    /// Starts a server that answers requests by their target.
    pub fn start(answers: impl Fn(&str) -> Answer + Send + Sync + 'static) -> Server {
        let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("ca.pem"), own.cert.pem()).unwrap();
        let key = PrivateKeyDer::Pkcs8(own.signing_key.serialize_der().into());
        let tls = ServerConfig::builder_with_provider(tls::provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![own.cert.der().clone()], key)
            .unwrap();
        let (tls, listener) = (Arc::new(tls), TcpListener::bind("127.0.0.1:0").unwrap());
        let shared = Arc::new(Shared {
            heads: Mutex::default(),
            contents: Mutex::default(),
            answers: Box::new(answers),
        });
        let (address, serving) = (listener.local_addr().unwrap(), Arc::downgrade(&shared));
        thread::spawn(move || {
            for socket in listener.incoming() {
                let Some(shared) = serving.upgrade() else {
                    return;
                };
                let (socket, tls) = (socket.unwrap(), tls.clone());
                thread::spawn(move || serve(socket, tls, &shared));
            }
        });
        Server {
            address,
            folder,
            shared,
        }
    }

    pub fn url(&self) -> String {
        format!("https://localhost:{}", self.address.port())
    }

    /// Returns the file with the certificate.
    pub fn ca(&self) -> PathBuf {
        self.folder.path().join("ca.pem")
    }

    /// Returns the heads of all requests.
    pub fn heads(&self) -> Vec<String> {
        self.shared.heads.lock().unwrap().clone()
    }

    /// Returns the contents of all POST requests.
    pub fn contents(&self) -> Vec<Vec<u8>> {
        self.shared.contents.lock().unwrap().clone()
    }

    /// Returns the targets of all requests.
    pub fn targets(&self) -> Vec<String> {
        let target = |head: String| head.split(' ').nth(1).unwrap_or_default().to_owned();
        self.heads().into_iter().map(target).collect()
    }

    /// Returns the number of requests whose target contains this text.
    pub fn count(&self, text: &str) -> usize {
        self.targets()
            .iter()
            .filter(|target| target.contains(text))
            .count()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // when the listener is gone, the thread ends at the next connection
        self.shared = Arc::new(Shared {
            heads: Mutex::default(),
            contents: Mutex::default(),
            answers: Box::new(|_| Answer::status("503 Service Unavailable")),
        });
        let _ = TcpStream::connect(self.address);
    }
}

fn serve(socket: TcpStream, tls: Arc<ServerConfig>, shared: &Shared) {
    let mut stream = StreamOwned::new(ServerConnection::new(tls).unwrap(), socket);
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut byte) {
            Ok(1) => head.push(byte[0]),
            // a client that does not trust the server closes the connection
            _ => return,
        }
    }
    let head = String::from_utf8(head).unwrap();
    let target = head.split(' ').nth(1).unwrap().to_owned();
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        let is_length = name.eq_ignore_ascii_case("content-length");
        is_length.then(|| value.trim().parse().unwrap())
    });
    if let Some(length) = length {
        let mut content = vec![0; length];
        if stream.read_exact(&mut content).is_err() {
            return;
        }
        shared.contents.lock().unwrap().push(content);
    }
    shared.heads.lock().unwrap().push(head);
    let answer = (shared.answers)(&target);
    // a client that has read enough closes the connection
    if answer.send(&mut stream).is_ok() && answer.fault == Fault::None {
        stream.conn.send_close_notify();
        let _ = stream.flush();
    }
}
