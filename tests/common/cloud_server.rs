//! A server of a cloud, over HTTP/1.1, with TLS or without: a closure answers each request.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, TcpListener};
use std::sync::Arc;
use std::thread;

use rustls::crypto::ring;
use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};

/// A request.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: String,
    /// The path without its query.
    pub path: String,
    /// The query, decoded.
    pub query: Vec<(String, String)>,
    /// The header fields; names in lower case.
    fields: Vec<(String, String)>,
    pub body: String,
}

impl Request {
    /// Returns the value of a header field.
    pub fn field(&self, name: &str) -> Option<&str> {
        value(&self.fields, name)
    }

    /// Returns the value of a parameter of the query.
    pub fn parameter(&self, name: &str) -> Option<&str> {
        value(&self.query, name)
    }

    /// Returns the value of a field, if the body is a form.
    pub fn form(&self, name: &str) -> Option<String> {
        value(&parameters(&self.body), name).map(str::to_owned)
    }
}

fn value<'a>(pairs: &'a [(String, String)], name: &str) -> Option<&'a str> {
    let found = pairs.iter().find(|(other, _)| other == name)?;
    Some(&found.1)
}

/// An answer.
#[derive(Debug, Clone)]
pub struct Answer {
    status: u16,
    fields: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

impl Answer {
    pub fn new(status: u16, media_type: &str, body: impl Into<String>) -> Answer {
        Answer {
            status,
            fields: vec![("Content-Type", media_type.to_owned())],
            body: body.into().into_bytes(),
        }
    }

    pub fn bytes(body: Vec<u8>) -> Answer {
        Answer {
            body,
            ..Answer::new(200, "application/octet-stream", "")
        }
    }

    pub fn json(status: u16, body: impl ToString) -> Answer {
        Answer::new(status, "application/json; charset=utf-8", body.to_string())
    }

    pub fn text(status: u16, body: impl Into<String>) -> Answer {
        Answer::new(status, "text/plain", body)
    }

    pub fn with(mut self, name: &'static str, value: impl ToString) -> Answer {
        self.fields.push((name, value.to_string()));
        self
    }
}

/// Starts a server, whose thread ends with the process. Returns its URL.
pub fn start(answer: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let answer = Arc::new(answer);
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let answer = answer.clone();
            thread::spawn(move || serve(client, &*answer));
        }
    });
    url
}

/// Returns the settings of a server with a new certificate of its own, and the certificate in PEM.
pub fn own_certificate() -> (Arc<ServerConfig>, String) {
    let own = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
    let key = PrivateKeyDer::Pkcs8(own.signing_key.serialize_der().into());
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![own.cert.der().clone()], key)
        .unwrap();
    (Arc::new(config), own.cert.pem())
}

/// Starts a server with TLS and a new certificate. Returns its URL and the certificate in PEM.
pub fn start_tls(answer: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> (String, String) {
    start_tls_at("127.0.0.1".parse().unwrap(), answer)
}

/// Starts a server as [`start_tls`] does, at another address of this machine.
pub fn start_tls_at(
    address: IpAddr,
    answer: impl Fn(&Request) -> Answer + Send + Sync + 'static,
) -> (String, String) {
    let ((config, certificate), answer) = (own_certificate(), Arc::new(answer));
    let listener = TcpListener::bind((address, 0)).unwrap();
    let url = format!("https://{}", listener.local_addr().unwrap());
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let (config, answer) = (config.clone(), answer.clone());
            thread::spawn(move || {
                let connection = ServerConnection::new(config).unwrap();
                let mut stream = StreamOwned::new(connection, client);
                serve(&mut stream, &*answer);
                stream.conn.send_close_notify();
                let _ = stream.flush();
            });
        }
    });
    (url, certificate)
}

fn serve(client: impl Read + Write, answer: &dyn Fn(&Request) -> Answer) -> Option<()> {
    let mut client = BufReader::new(client);
    let request = read(&mut client)?;
    let client = client.get_mut();
    let answer = answer(&request);
    let mut head = format!(
        "HTTP/1.1 {} X\r\nContent-Length: {}\r\nConnection: close\r\n",
        answer.status,
        answer.body.len()
    );
    for (name, value) in &answer.fields {
        head += &format!("{name}: {value}\r\n");
    }
    client.write_all(format!("{head}\r\n").as_bytes()).ok()?;
    client.write_all(&answer.body).ok()
}

fn read(client: &mut impl BufRead) -> Option<Request> {
    let mut lines = vec![];
    loop {
        let mut line = String::new();
        if client.read_line(&mut line).ok()? == 0 {
            return None;
        }
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let mut words = lines.first()?.split(' ');
    let (method, target) = (words.next()?, words.next()?);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let fields = lines[1..].iter().filter_map(|line| line.split_once(':'));
    let fields: Vec<_> = fields
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let len = value(&fields, "content-length").and_then(|len| len.parse().ok());
    let mut body = vec![0; len.unwrap_or(0)];
    client.read_exact(&mut body).ok()?;
    Some(Request {
        method: method.to_owned(),
        path: path.to_owned(),
        query: parameters(query),
        fields,
        body: String::from_utf8(body).ok()?,
    })
}

/// Decodes parameters of a query or a form.
fn parameters(text: &str) -> Vec<(String, String)> {
    let pairs = text.split('&').filter(|pair| !pair.is_empty());
    let pair = |pair: &str| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (decoded(name), decoded(value))
    };
    pairs.map(pair).collect()
}

fn decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (vec![], text.as_bytes());
    while let Some((first, more)) = rest.split_first() {
        let digits = more
            .get(..2)
            .and_then(|digits| std::str::from_utf8(digits).ok());
        match (
            first,
            digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()),
        ) {
            (b'%', Some(byte)) => {
                bytes.push(byte);
                rest = &more[2..];
            }
            _ => {
                bytes.push(*first);
                rest = more;
            }
        }
    }
    String::from_utf8(bytes).unwrap()
}
