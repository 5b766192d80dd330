//! A server of HTTPS in the place of an API server, which always gives the same answers.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use rustls::crypto::ring;
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use rustls_pki_types::PrivateKeyDer;

/// The server. It asks for no certificate.
pub struct SimpleServer {
    /// Its name, or its address.
    pub host: &'static str,
    /// Returns the status and the content of the answer to a request, whose first line it gets.
    pub answer: fn(&str) -> (u16, &'static str),
    /// The years in which the certificates of the server and of its client end.
    pub server_end: i32,
    pub client_end: i32,
}

impl SimpleServer {
    /// Starts the server on 127.0.0.1; returns a kubeconfig.
    pub fn start(self) -> String {
        let mut ca = CertificateParams::default();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca_key = KeyPair::generate().unwrap();
        let ca_pem = ca.self_signed(&ca_key).unwrap().pem();
        let issuer = Issuer::from_params(&ca, &ca_key);
        let issue = |end| {
            let mut params = CertificateParams::new([self.host.to_owned()]).unwrap();
            params.not_after = date_time_ymd(end, 7, 31);
            let key = KeyPair::generate().unwrap();
            (params.signed_by(&key, &issuer).unwrap(), key)
        };
        let (certificate, key) = issue(self.server_end);
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.der().clone()], key)
            .unwrap();
        let (config, listener) = (Arc::new(config), TcpListener::bind("127.0.0.1:0").unwrap());
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let tls = ServerConnection::new(config.clone()).unwrap();
                thread::spawn(move || answer(StreamOwned::new(tls, socket), self.answer));
            }
        });
        let (client, key) = issue(self.client_end);
        let data = |pem: String| BASE64_STANDARD.encode(pem);
        format!(
            "current-context: x\ncontexts:\n- name: x\n  context: {{cluster: c, user: u}}\nclusters:\n- name: c\n  cluster: \
             {{server: 'https://{}:{port}', certificate-authority-data: {}}}\nusers:\n- name: u\n  user: \
             {{client-certificate-data: {}, client-key-data: {}}}\n",
            self.host,
            data(ca_pem),
            data(client.pem()),
            data(key.serialize_pem()),
        )
    }
}

/// Answers one request for each connection.
fn answer(
    mut stream: StreamOwned<ServerConnection, TcpStream>,
    answer: fn(&str) -> (u16, &'static str),
) -> std::io::Result<()> {
    let mut lines = BufReader::new(&mut stream).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    for line in lines {
        if line?.is_empty() {
            break;
        }
    }
    let (status, body) = answer(&request);
    let head = format!(
        "HTTP/1.1 {status} -\r\nConnection: close\r\nContent-Length: {}",
        body.len()
    );
    write!(stream, "{head}\r\n\r\n{body}")?;
    stream.conn.send_close_notify();
    stream.flush()
}
