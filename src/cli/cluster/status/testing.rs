//! Servers for tests.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::CertificateDer;
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};

use crate::workspace::connect::Endpoint;

/// What a server does after it has read a request.
#[derive(Debug, Clone, Copy)]
pub enum Act {
    /// Sends this answer.
    Answer(&'static [u8]),
    /// Sends the beginning of an answer, and then one byte after the other.
    Drip(&'static [u8]),
    /// Sends the beginning of a handshake, and then one byte after the other.
    DripHandshake,
}

/// The answers of a server that drips: in the handshake, in the head, in the body.
pub const DRIPS: [Act; 3] = [
    Act::DripHandshake,
    Act::Drip(b"HTTP/1.1 200 OK\r\nX: "),
    Act::Drip(b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n"),
];

/// A server on a port of this machine.
pub struct Server {
    /// Its address.
    pub endpoint: Endpoint,
    /// The authority of its certificate.
    pub root: CertificateDer<'static>,
    /// The same in PEM.
    pub pem: String,
}

impl Server {
    /// Starts a server. It may demand a certificate of its client, as etcd does.
    pub fn start(
        make: impl FnOnce(&mut CertificateParams),
        wants_client: bool,
        act: Act,
    ) -> Server {
        let mut ca = CertificateParams::default();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca_key = KeyPair::generate().unwrap();
        let authority = ca.self_signed(&ca_key).unwrap();
        let root = authority.der().clone();
        let mut params = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        make(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &Issuer::from_params(&ca, &ca_key));
        let mut roots = RootCertStore::empty();
        roots.add(root.clone()).unwrap();
        let builder = ServerConfig::builder_with_provider(tls::provider())
            .with_safe_default_protocol_versions()
            .unwrap();
        let builder = if wants_client {
            builder.with_client_cert_verifier(
                WebPkiClientVerifier::builder_with_provider(Arc::new(roots), tls::provider())
                    .build()
                    .unwrap(),
            )
        } else {
            builder.with_no_client_auth()
        };
        let key = key.serialize_der().try_into().unwrap();
        let certificate = certificate.unwrap().der().clone();
        let config = Arc::new(builder.with_single_cert(vec![certificate], key).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || {
            for mut socket in listener.incoming().flatten() {
                let connection = ServerConnection::new(config.clone()).unwrap();
                thread::spawn(move || {
                    if matches!(act, Act::DripHandshake) {
                        // a long record
                        let _ = socket.write_all(&[22, 3, 3, 64, 0]);
                        return drip(&mut socket);
                    }
                    let mut stream = StreamOwned::new(connection, socket);
                    // the client may be refused, or end the connection
                    if stream.read(&mut [0; 1024]).is_ok() {
                        match act {
                            Act::Answer(answer) => drop(stream.write_all(answer)),
                            Act::Drip(head) => {
                                let _ = stream.write_all(head);
                                drip(&mut stream);
                            }
                            Act::DripHandshake => {}
                        }
                    }
                });
            }
        });
        Server {
            endpoint: Endpoint::parse("127.0.0.1", port).unwrap(),
            root,
            pem: authority.pem(),
        }
    }
}

/// Sends one byte after the other until the peer has enough.
fn drip(to: &mut impl Write) {
    while to.write_all(b"a").and_then(|()| to.flush()).is_ok() {
        thread::sleep(Duration::from_millis(50));
    }
}
