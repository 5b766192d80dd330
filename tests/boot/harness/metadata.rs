//! The metadata service of QEMU machines, which tells a machine who it is and who its peers are: `/self`, `/peers`,
//! `/endpoint`, `/initsecrethash` over plain HTTP. The machine reaches it at http://10.42.0.1:8080.
//!
//! It stands for what a cloud's own service does, so a test can make it slow, silent, or talk nonsense.

use super::{Context, Result};
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// A machine as the service describes it.
#[derive(Clone, Debug, Default)]
pub struct Instance {
    /// Its host name.
    pub name: String,
    /// `ControlPlane` or `Worker`.
    pub role: String,
    /// Its address.
    pub ip: String,
}

impl Instance {
    /// A control-plane machine.
    pub fn control_plane(name: &str, ip: &str) -> Instance {
        Instance { name: name.to_owned(), role: "ControlPlane".to_owned(), ip: ip.to_owned() }
    }

    fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "Name": self.name, "ProviderID": format!("qemu:///hostname/{}", self.name), "Role": self.role,
            "VPCIP": self.ip, "SecondaryIPRange": "", "AliasIPRanges": null,
        })
    }
}

/// How the service answers.
#[derive(Clone, Debug, Default)]
pub enum Mood {
    /// As it should.
    #[default]
    Well,
    /// As it should, but only after this time.
    Slow(Duration),
    /// It takes the request and never answers.
    Silent,
    /// With these bytes as the body, status 200.
    Nonsense(Vec<u8>),
    /// With status 500.
    Broken,
}

/// What the service knows; a test may change it while it runs.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    /// The machine that asks.
    pub this: Instance,
    /// All machines of the cluster.
    pub peers: Vec<Instance>,
    /// The cluster's address; without one `/endpoint` is answered with 404.
    pub endpoint: Option<String>,
    /// The bcrypt hash of the init secret.
    pub init_secret_hash: Vec<u8>,
    /// How it answers.
    pub mood: Mood,
}

/// The running service; it ends with this value.
pub struct Metadata {
    /// Where it listens on the host.
    pub address: SocketAddr,
    answers: Arc<Mutex<Answers>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Metadata {
    /// Starts it on a free loopback port.
    pub fn start(answers: Answers) -> Result<Metadata> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("listen for the metadata service")?;
        let address = listener.local_addr().context("listen for the metadata service")?;
        let answers = Arc::new(Mutex::new(answers));
        let stop = Arc::new(AtomicBool::new(false));
        let (shared, stopped) = (answers.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    break;
                }
                let Ok(stream) = stream else { continue };
                let (answers, stopped) = (shared.clone(), stopped.clone());
                std::thread::spawn(move || answer(stream, &answers, &stopped));
            }
        });
        Ok(Metadata { address, answers, stop, thread: Some(thread) })
    }

    /// What it knows, to be changed.
    pub fn answers(&self) -> MutexGuard<'_, Answers> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Metadata {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // the accepting thread looks at `stop` when somebody comes
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Answers the requests of one connection, one after the other.
fn answer(stream: TcpStream, answers: &Mutex<Answers>, stop: &AtomicBool) {
    let _ = stream.set_read_timeout(Some(Duration::from_secs(30)));
    let Ok(mut writer) = stream.try_clone() else { return };
    let mut reader = BufReader::new(stream);
    while let Some((method, path)) = request(&mut reader) {
        let known = answers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match &known.mood {
            Mood::Slow(time) => std::thread::sleep(*time),
            Mood::Silent => {
                while !stop.load(Ordering::SeqCst) {
                    std::thread::sleep(Duration::from_millis(100));
                }
                return;
            }
            Mood::Well | Mood::Nonsense(_) | Mood::Broken => {}
        }
        let (status, body) = response(&known, &method, &path);
        let head = format!("HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\r\n", body.len());
        if writer.write_all(&[head.as_bytes(), &body].concat()).is_err() {
            return;
        }
    }
}

/// Method and path; `None` at the end of the connection. The header fields mean nothing here, nor has a request a body.
fn request(reader: &mut impl BufRead) -> Option<(String, String)> {
    let mut first = String::new();
    reader.read_line(&mut first).ok()?;
    let mut words = first.split_whitespace().map(str::to_owned);
    let request = (words.next()?, words.next()?);
    let mut field = String::new();
    while reader.read_line(&mut field).ok()? > 2 {
        field.clear();
    }
    Some(request)
}

fn response(known: &Answers, method: &str, path: &str) -> (&'static str, Vec<u8>) {
    match &known.mood {
        Mood::Nonsense(body) => return ("200 OK", body.clone()),
        Mood::Broken => return ("500 Internal Server Error", b"the service is broken\n".to_vec()),
        Mood::Well | Mood::Slow(_) | Mood::Silent => {}
    }
    let json = |value: serde_json::Value| ("200 OK", format!("{value}\n").into_bytes());
    match (method, path) {
        ("GET", "/self") => json(known.this.to_json()),
        ("GET", "/peers") => json(known.peers.iter().map(Instance::to_json).collect()),
        ("GET", "/endpoint") => match &known.endpoint {
            Some(address) => json(serde_json::json!(address)),
            None => ("404 Not Found", b"No matching peer found\n".to_vec()),
        },
        ("GET", "/initsecrethash") => ("200 OK", known.init_secret_hash.clone()),
        ("GET", _) => ("404 Not Found", b"404 page not found\n".to_vec()),
        _ => ("405 Method Not Allowed", b"Method not allowed\n".to_vec()),
    }
}

#[test]
fn the_service_answers_who_the_machine_is() {
    let this = Instance::control_plane("control-plane-0", "10.42.0.15");
    let answers = Answers { this, init_secret_hash: b"$2a$10$x".to_vec(), ..Answers::default() };
    let service = Metadata::start(answers).unwrap();
    let get = |path: &str| -> String {
        use std::io::Read;
        let mut stream = TcpStream::connect(service.address).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut all = String::new();
        stream.read_to_string(&mut all).unwrap();
        all
    };
    let this = get("/self");
    assert!(this.starts_with("HTTP/1.1 200") && this.contains(r#""VPCIP":"10.42.0.15""#), "{this}");
    assert!(get("/initsecrethash").ends_with("\r\n\r\n$2a$10$x"));
    assert!(get("/endpoint").starts_with("HTTP/1.1 404"));
    service.answers().mood = Mood::Nonsense(b"<html>".to_vec());
    assert!(get("/self").ends_with("<html>"));
}
