//! What a server of a cluster shows a caller without credentials: its certificate, its clock, and
//! the answer to one request. The API server, a kubelet and etcd do so. Nothing is sent that would
//! need a trusted peer, so any certificate is accepted, and the caller learns whether it is good.

use std::fmt;
use std::io::{self, BufReader, Read, Write};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base::network::request::Response;
use base::x509::Certificate;
use cloud::plain;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore, SignatureScheme,
    StreamOwned,
};
use transport::timed::Timed;

use crate::workspace::connect::Endpoint;

/// Time limit of a whole conversation with a server.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum size of an answer.
const MAX_ANSWER: u64 = 64 << 10;

/// What a server showed.
#[derive(Debug, Clone, Default)]
pub struct Served {
    /// When its certificate begins and ends; `None` if it is not a certificate.
    pub validity: Option<Validity>,
    /// Why the cluster's authority does not vouch for this server at this address.
    pub distrust: Option<String>,
    /// How many seconds its clock is ahead of the clock of this machine, if it says its time.
    pub ahead: Option<i64>,
    /// The status of the answer and its text, if the caller asked for one.
    pub answer: Option<(u16, String)>,
}

/// Why a server showed nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServedError {
    /// Its address is not one to which a connection can be made.
    Address(String),
    /// Nobody listens there, or the address cannot be reached.
    Unreachable(String),
    /// What listens there does not speak TLS.
    NoTls(String),
}

impl fmt::Display for ServedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServedError::Address(why) | ServedError::Unreachable(why) => f.write_str(why),
            ServedError::NoTls(why) => write!(f, "it does not speak TLS: {why}"),
        }
    }
}

impl std::error::Error for ServedError {}

/// The time in which a certificate is valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Validity {
    /// Its first second.
    pub from: SystemTime,
    /// Its last second.
    pub until: SystemTime,
}

impl Validity {
    /// Reads the validity of a certificate, DER.
    pub fn of(der: &[u8]) -> Option<Validity> {
        let (from, until) = Certificate::parse(der).ok()?.validity().ok()?;
        let at = |seconds| UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
        Some(Validity {
            from: at(from)?,
            until: at(until)?,
        })
    }
}

/// Asks servers of a cluster.
pub struct Asker {
    verifier: Option<Arc<WebPkiServerVerifier>>,
}

impl Asker {
    /// Creates an asker; `authorities` are those of the cluster.
    pub fn new(authorities: &[CertificateDer<'static>]) -> Asker {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(authorities.iter().cloned());
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), tls::provider()).build();
        Asker {
            verifier: verifier.ok(),
        }
    }

    /// Opens one connection and looks at the certificate. Sends a GET request if `path` is given.
    pub fn ask(
        &self,
        endpoint: &Endpoint,
        path: Option<&str>,
        deadline: Instant,
    ) -> Result<Served, ServedError> {
        let deadline = deadline.min(Instant::now() + TIMEOUT);
        let socket = endpoint.dial(deadline);
        let socket = socket.map_err(|why| ServedError::Unreachable(why.text))?;
        let name = ServerName::try_from(endpoint.host().to_owned());
        let name = name.map_err(|error| ServedError::Address(error.to_string()))?;
        let noting = Arc::new(Noting {
            verifier: self.verifier.clone(),
            seen: OnceLock::new(),
        });
        let socket = Timed { socket, deadline };
        let talked = talk(socket, name, noting.clone(), path);
        let (certificate, distrust) = match (noting.seen.get(), &talked) {
            (Some(seen), _) => seen,
            (None, Err(error)) => return Err(silent(error)),
            (None, Ok(_)) => return Err(ServedError::NoTls("it shows no certificate".into())),
        };
        let answer = talked.ok().flatten();
        let date = answer
            .as_ref()
            .and_then(|answer| http::date(plain::find(&answer.fields, "Date")?));
        Ok(Served {
            validity: Validity::of(certificate),
            distrust: distrust.clone(),
            ahead: date.map(|date| ahead(date, SystemTime::now())),
            answer: answer.map(|answer| (answer.status, text(&answer))),
        })
    }
}

/// Returns why a server has shown no certificate.
fn silent(error: &io::Error) -> ServedError {
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
            ServedError::Unreachable("it does not answer in time".into())
        }
        _ => ServedError::NoTls(error.to_string()),
    }
}

/// Returns how many seconds a clock is ahead of another one.
fn ahead(one: SystemTime, other: SystemTime) -> i64 {
    match one.duration_since(other) {
        Ok(ahead) => ahead.as_secs() as i64,
        Err(behind) => -(behind.duration().as_secs() as i64),
    }
}

fn text(answer: &Response) -> String {
    let body = answer.body.as_deref().unwrap_or_default();
    String::from_utf8_lossy(body).into_owned()
}

/// Does the handshake, and sends a GET request if `path` is given. A server that wants the caller's
/// certificate may end the connection after its own part of the handshake.
fn talk(
    mut socket: Timed,
    name: ServerName<'static>,
    noting: Arc<Noting>,
    path: Option<&str>,
) -> io::Result<Option<Response>> {
    let host = name.to_str().into_owned();
    let config = ClientConfig::builder_with_provider(tls::provider())
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .dangerous() // the certificate is looked at, and trusted with nothing
        .with_custom_certificate_verifier(noting)
        .with_no_client_auth();
    let mut connection = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
    while connection.is_handshaking() {
        connection.complete_io(&mut socket)?;
    }
    let Some(path) = path else {
        return Ok(None);
    };
    let mut stream = StreamOwned::new(connection, socket);
    // as one record: a server may close the connection after its answer to the first
    let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    stream.flush()?;
    let mut reader = BufReader::new(stream.take(MAX_ANSWER));
    Ok(plain::receive(&mut reader, MAX_ANSWER).ok())
}

/// Accepts any certificate, and notes it with the reason why it is not good.
#[derive(Debug)]
struct Noting {
    verifier: Option<Arc<WebPkiServerVerifier>>,
    seen: OnceLock<(Vec<u8>, Option<String>)>,
}

impl ServerCertVerifier for Noting {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let distrust = match &self.verifier {
            None => Some("the kubeconfig has no authority of the cluster".into()),
            Some(verifier) => verifier
                .verify_server_cert(end_entity, intermediates, name, ocsp, now)
                .err()
                .map(|error| error.to_string()),
        };
        self.seen.get_or_init(|| (end_entity.to_vec(), distrust));
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls12_signature(
            message,
            certificate,
            signature,
            &tls::provider().signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(
            message,
            certificate,
            signature,
            &tls::provider().signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        tls::provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use rcgen::CertificateParams;

    use super::super::testing::{Act, DRIPS, Server};
    use super::*;

    fn deadline() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn a_server_shows_its_certificate_its_clock_and_its_answer() {
        let answer = b"HTTP/1.1 500 Internal Server Error\r\nDate: Fri, 01 Jan 2100 00:00:00 GMT\r\nContent-Length: 4\r\n\r\n[-]a";
        let until = rcgen::date_time_ymd(2099, 1, 1);
        let server = Server::start(|it| it.not_after = until, false, Act::Answer(answer));
        let served = Asker::new(&[server.root])
            .ask(&server.endpoint, Some("/readyz"), deadline())
            .unwrap();
        assert_eq!(served.distrust, None);
        assert_eq!(served.answer, Some((500, "[-]a".into())));
        assert!(served.ahead.unwrap() > 365 * 24 * 60 * 60, "{served:?}");
        let until = served.validity.unwrap().until;
        assert_eq!(base::time::seconds(until), "2099-01-01T00:00:00Z");
    }

    #[test]
    fn a_certificate_that_is_not_good_is_seen_with_the_reason() {
        let ended = |it: &mut CertificateParams| it.not_after = rcgen::date_time_ymd(2020, 1, 1);
        let server = Server::start(ended, false, Act::Answer(b""));
        let served = Asker::new(&[server.root])
            .ask(&server.endpoint, None, deadline())
            .unwrap();
        let why = served.distrust.unwrap();
        assert!(why.contains("expired"), "{why}");
        assert_eq!((served.answer, served.ahead), (None, None));
        // of another cluster, or without any authority
        let server = Server::start(|_| {}, false, Act::Answer(b""));
        let other = Server::start(|_| {}, false, Act::Answer(b""));
        for authorities in [vec![other.root], vec![]] {
            let served = Asker::new(&authorities)
                .ask(&server.endpoint, None, deadline())
                .unwrap();
            assert!(served.distrust.is_some() && served.validity.is_some());
        }
    }

    #[test]
    fn a_server_that_wants_the_callers_certificate_has_shown_its_own_before() {
        let server = Server::start(|_| {}, true, Act::Answer(b""));
        let served = Asker::new(&[server.root])
            .ask(&server.endpoint, None, deadline())
            .unwrap();
        assert!(
            served.validity.is_some() && served.distrust.is_none(),
            "{served:?}"
        );
    }

    #[test]
    fn a_server_that_sends_byte_by_byte_is_given_up() {
        for act in DRIPS {
            let server = Server::start(|_| {}, false, act);
            let end = Instant::now() + Duration::from_millis(700);
            let asked = Asker::new(&[server.root]).ask(&server.endpoint, Some("/"), end);
            match act {
                Act::DripHandshake => {
                    let error = asked.unwrap_err();
                    assert!(matches!(error, ServedError::Unreachable(_)), "{error}");
                }
                // its certificate was seen before
                _ => assert!(asked.unwrap().validity.is_some()),
            }
            // otherwise it would take a quarter of an hour or more
            support::promptly::assert_no_wait(end, Duration::from_secs(3));
        }
    }

    #[test]
    fn what_does_not_speak_tls_is_told_from_what_does_not_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let endpoint = Endpoint::parse("127.0.0.1", port).unwrap();
        let answering = thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            let _ = socket
                .read(&mut [0; 1024])
                .and_then(|_| socket.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"));
        });
        let asker = Asker::new(&[]);
        let error = asker.ask(&endpoint, None, deadline()).unwrap_err();
        assert!(matches!(error, ServedError::NoTls(_)), "{error}");
        answering.join().unwrap();
        let error = asker.ask(&endpoint, None, deadline()).unwrap_err();
        assert!(matches!(error, ServedError::Unreachable(_)), "{error}");
    }
}
