//! The metadata service of a QEMU machine: four paths over HTTP/1.1, with answers that a test can change, delay or corrupt.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// A running service. Its thread ends with the process.
pub struct MetadataServer {
    #[allow(dead_code)] // not used by every test
    pub address: SocketAddr,
    answers: Arc<Mutex<Answers>>,
}

#[derive(Default)]
struct Answers {
    bodies: HashMap<String, String>,
    delay: Duration,
    down: bool,
}

impl MetadataServer {
    pub fn start(address: SocketAddr) -> MetadataServer {
        let listener = TcpListener::bind(address)
            .unwrap_or_else(|error| panic!("metadata service on {address}: {error}"));
        let answers = Arc::new(Mutex::new(Answers::default()));
        let server = MetadataServer {
            address: listener.local_addr().unwrap(),
            answers: answers.clone(),
        };
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let answers = answers.clone();
                thread::spawn(move || answer(client, &answers));
            }
        });
        server
    }

    /// `/self`: a JSON object.
    pub fn set_self(&self, json: &str) {
        self.set("/self", json);
    }

    /// Sets the answer to `/self` for requests from this address.
    #[allow(dead_code)] // not used by every test
    pub fn set_self_at(&self, address: IpAddr, json: &str) {
        self.set(&format!("/self {address}"), json);
    }

    /// `/peers`: a JSON array.
    pub fn set_peers(&self, json: &str) {
        self.set("/peers", json);
    }

    /// `/endpoint`: an address, which is sent as a JSON string.
    pub fn set_endpoint(&self, host: &str) {
        self.set("/endpoint", &format!("{host:?}"));
    }

    /// `/initsecrethash`: sent unchanged.
    pub fn set_init_secret_hash(&self, hash: &str) {
        self.set("/initsecrethash", hash);
    }

    /// Sets the answer of a path.
    pub fn set(&self, path: &str, body: &str) {
        self.answers
            .lock()
            .unwrap()
            .bodies
            .insert(path.into(), body.into());
    }

    /// Delays each answer by this time.
    pub fn set_delay(&self, delay: Duration) {
        self.answers.lock().unwrap().delay = delay;
    }

    /// Closes each connection without an answer.
    pub fn set_down(&self, down: bool) {
        self.answers.lock().unwrap().down = down;
    }
}

/// Serves one request per connection. An invalid request gets no answer.
fn answer(mut client: TcpStream, answers: &Mutex<Answers>) -> Option<()> {
    let mut lines = BufReader::new(client.try_clone().ok()?).lines();
    let request = lines.next()?.ok()?;
    let path = request.split(' ').nth(1)?.to_owned();
    while !lines.next()?.ok()?.is_empty() {}
    let asker = client.peer_addr().ok()?.ip();
    let (body, delay, down) = {
        let answers = answers.lock().unwrap();
        let body = answers
            .bodies
            .get(&format!("{path} {asker}"))
            .or_else(|| answers.bodies.get(&path));
        (body.cloned(), answers.delay, answers.down)
    };
    thread::sleep(delay);
    if down {
        return None;
    }
    let (status, body) = match body {
        Some(body) => ("200 OK", body),
        None => ("404 Not Found", "No matching peer found".into()),
    };
    let length = body.len();
    write!(
        client,
        "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
    .ok()
}
