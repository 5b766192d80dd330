//! The services of a machine's host: an HTTP server. A test sets its answers, and sees the requests.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// A running service. Its thread ends with the process.
pub struct Host {
    url: String,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// The answers, by method and path.
    answers: BTreeMap<String, Vec<u8>>,
    requests: Vec<String>,
}

impl Host {
    pub fn start() -> Host {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = Host {
            url: format!("http://{}", listener.local_addr().unwrap()),
            state: Arc::default(),
        };
        let state = host.state.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let _ = answer(client, &state);
            }
        });
        host
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// Sets the answer to a request: `GET /path`.
    pub fn set(&self, request: &str, body: &[u8]) {
        let mut state = self.state.lock().unwrap();
        state.answers.insert(request.into(), body.into());
    }

    /// Returns the requests since the last call, with header fields in lower case and bodies.
    pub fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }
}

fn answer(stream: TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream);
    let (mut first, mut fields) = (String::new(), String::new());
    reader.read_line(&mut first)?;
    let mut length = 0;
    loop {
        let mut field = String::new();
        reader.read_line(&mut field)?;
        let field = field.trim_end().to_ascii_lowercase();
        if field.is_empty() {
            break;
        }
        if let Some(value) = field.strip_prefix("content-length: ") {
            length = value.parse().unwrap();
        }
        fields += &format!("{field}\n");
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let request = first.trim_end().trim_end_matches(" HTTP/1.1");
    let mut state = state.lock().unwrap();
    let seen = String::from_utf8_lossy(&body);
    state.requests.push(format!("{request}\n{fields}\n{seen}"));
    let (status, body) = match state.answers.get(request) {
        Some(body) => ("200 OK", body.as_slice()),
        None => ("404 Not Found", &b"not here"[..]),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    reader
        .get_mut()
        .write_all(&[head.as_bytes(), body].concat())
}
