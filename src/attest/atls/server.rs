//! The server's role.

use std::fmt;
use std::io;
use std::net::TcpStream;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use log::{debug, warn};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{
    Connection, DigitallySignedStruct, DistinguishedName, ServerConfig, ServerConnection,
    SignatureScheme,
};

use super::handshake::{self, Timed};
use super::hello::{self, HelloFilter};
use super::{ALPN_H2, ALPN_HTTP11, Error, certificate, nonce, provider};
use crate::attestation::{IssueError, Issuer, Oid, Validator};
use base::network::Network;
use base::turns::Turns;
use rpc::grpc::{Accept, Transport};
use rpc::half_open::PeersTurn;

/// How many handshakes of one server make an attestation document at the same time; the others wait within their deadlines.
///
/// A client costs a document before it has proven anything. A TPM serves one command at a time, so more would only queue
/// there, and keep the machine's other uses of the TPM waiting; some documents also need the network, during which
/// another one can be made.
pub const MAX_ISSUING: usize = 4;
/// How many handshakes wait for theirs; networks take turns, so that who floods waits for himself.
const MAX_WAITING: usize = 128;

/// Makes attested connections of accepted sockets.
pub struct Server {
    issuer: Option<Arc<dyn Issuer>>,
    validators: Vec<Arc<dyn Validator>>,
    only_tls13: bool,
    issuing: Arc<Turns>,
}

impl Server {
    /// Attests itself by `issuer`, and accepts only clients whose document one of the `validators` accepts. **Without
    /// validators any client is accepted.**
    pub fn new(issuer: Option<Arc<dyn Issuer>>, validators: Vec<Arc<dyn Validator>>) -> Self {
        let issuer = issuer.map(|issuer| Arc::new(ForStrangers(issuer)) as Arc<dyn Issuer>);
        Server {
            issuer,
            validators,
            only_tls13: false,
            issuing: Arc::new(Turns::new(MAX_ISSUING, MAX_WAITING)),
        }
    }

    /// Refuses TLS 1.2.
    pub fn require_tls13(mut self) -> Self {
        self.only_tls13 = true;
        self
    }

    /// Completes the handshake on an accepted socket before `deadline`, or fails and closes it.
    ///
    /// A server with an issuer refuses clients that send no nonce of 16 to 64 bytes; one without does not look at it. The
    /// issuer and the validators run within; their own time is only bounded by themselves. The connection has no
    /// socket time-outs.
    pub fn handshake(&self, socket: TcpStream, deadline: Instant) -> Result<Transport, Error> {
        self.handshake_watched(socket, deadline, &PeersTurn::default())
    }

    fn handshake_watched(
        &self,
        socket: TcpStream,
        deadline: Instant,
        turn: &PeersTurn,
    ) -> Result<Transport, Error> {
        let (connection, session) = self.establish_session(&socket, deadline, turn)?;
        let identity = session.machine.get().cloned();
        Ok(Transport {
            identity,
            ..handshake::finish(connection, socket)?
        })
    }

    #[cfg(test)]
    pub(super) fn establish(
        &self,
        socket: &TcpStream,
        deadline: Instant,
    ) -> Result<Connection, Error> {
        self.establish_session(socket, deadline, &PeersTurn::default())
            .map(|(connection, _)| connection)
    }

    fn establish_session(
        &self,
        socket: &TcpStream,
        deadline: Instant,
        turn: &PeersTurn,
    ) -> Result<(Connection, Arc<Session>), Error> {
        socket.set_nodelay(true)?;
        let mut peer = Timed {
            socket,
            deadline,
            turn,
        };
        let mut filter = HelloFilter::new();
        let network = socket
            .peer_addr()
            .map_or(Network::UNKNOWN, |peer| peer.ip().into());
        let opened = handshake::read_hello(&mut peer, &mut filter).and_then(|hello| {
            Ok((
                hello,
                self.session(network, filter.server_name(), deadline)?,
            ))
        });
        let (hello, session) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                handshake::refuse_hello(&mut peer, &error);
                return Err(error);
            }
        };

        let config = self.config(&session)?;
        let mut connection = Connection::Server(ServerConnection::new(Arc::new(config))?);
        let result = handshake::complete(&mut connection, &mut peer, Some((&mut filter, hello)));
        // our own reason says more than what rustls makes of it
        if let Some(failure) = session.take_failure() {
            return Err(failure);
        }
        result.map(|()| (connection, session))
    }

    fn session(
        &self,
        network: Network,
        server_name: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<Arc<Session>, Error> {
        let client_nonce = match self.issuer {
            Some(_) => nonce::from_server_name(server_name).map_err(Error::Misbehaved)?,
            None => Vec::new(),
        };
        let server_nonce = nonce::server();
        Ok(Arc::new(Session {
            issuer: self.issuer.clone(),
            validators: self.validators.clone(),
            issuing: self.issuing.clone(),
            network,
            deadline,
            client_nonce,
            server_nonce,
            authorities: [DistinguishedName::from(nonce::to_distinguished_name(
                &server_nonce,
            ))],
            certified: OnceLock::new(),
            machine: OnceLock::new(),
            failure: Mutex::new(None),
        }))
    }

    fn config(&self, session: &Arc<Session>) -> Result<ServerConfig, Error> {
        let versions = if self.only_tls13 {
            &[&rustls::version::TLS13][..]
        } else {
            rustls::ALL_VERSIONS
        };
        let mut config = ServerConfig::builder_with_provider(provider::server())
            .with_protocol_versions(versions)?
            .with_client_cert_verifier(session.clone())
            .with_cert_resolver(session.clone());
        config.alpn_protocols = vec![ALPN_H2.to_vec(), ALPN_HTTP11.to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }
}

impl Accept for Server {
    /// [`Server::handshake`], with what the operator should know in the log, beside the peer's address.
    fn accept(
        &self,
        socket: TcpStream,
        deadline: Instant,
        turn: &PeersTurn,
    ) -> io::Result<Transport> {
        let peer = socket.peer_addr().map_or_else(
            |_| "a peer that is gone".into(),
            |address| address.to_string(),
        );
        self.handshake_watched(socket, deadline, turn)
            .map_err(|error| {
                match &error {
                    Error::Refused(_) | Error::Issuer(_) | Error::Internal(_) => {
                        warn!("attested TLS with {peer}: {error}")
                    }
                    // what any port scan causes
                    _ => debug!("attested TLS with {peer}: {error}"),
                }
                error.into()
            })
    }
}

/// What one connection's hooks need and leave behind.
struct Session {
    issuer: Option<Arc<dyn Issuer>>,
    validators: Vec<Arc<dyn Validator>>,
    issuing: Arc<Turns>,
    network: Network,
    deadline: Instant,
    client_nonce: Vec<u8>,
    server_nonce: [u8; 32],
    /// The server nonce in the form of a CertificateRequest.
    authorities: [DistinguishedName; 1],
    /// rustls asks again after a HelloRetryRequest; one document is enough.
    certified: OnceLock<Option<Arc<CertifiedKey>>>,
    /// Which machine the client is, once it was validated, where its variant can tell.
    machine: OnceLock<Arc<str>>,
    /// Why a hook failed; rustls passes on less than this.
    failure: Mutex<Option<Error>>,
}

impl Session {
    fn fail(&self, error: Error) {
        *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
    }

    fn take_failure(&self) -> Option<Error> {
        self.failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    fn certify(&self) -> Result<Arc<CertifiedKey>, Error> {
        let _slot = match self.issuer {
            Some(_) => Some(
                self.issuing
                    .take(self.network, self.deadline, || false)
                    .map_err(|_| Error::TimedOut)?,
            ),
            None => None,
        };
        certificate::issue(self.issuer.as_deref(), &self.client_nonce)
    }
}

impl ResolvesServerCert for Session {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.certified
            .get_or_init(|| self.certify().map_err(|error| self.fail(error)).ok())
            .clone()
    }
}

impl ClientCertVerifier for Session {
    fn offer_client_auth(&self) -> bool {
        !self.validators.is_empty()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.authorities
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        match certificate::verify(leaf, &self.validators, &self.server_nonce, now) {
            Ok(machine) => {
                if let Some(machine) = machine {
                    // a handshake has one certificate of the client
                    let _ = self.machine.set(machine);
                }
                Ok(ClientCertVerified::assertion())
            }
            Err(reason) => {
                self.fail(Error::Refused(reason));
                Err(certificate::REFUSED)
            }
        }
    }

    /// `message` is rustls' raw transcript (RFC 5246 §7.4.8), which the hashes of `provider.rs` have no part in.
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let original = hello::reveal_server_name(message);
        let message = original.as_deref().unwrap_or(message);
        verify_tls12_signature(
            message,
            leaf,
            signature,
            &provider::server().signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        leaf: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            leaf,
            signature,
            &provider::server().signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider::server()
            .signature_verification_algorithms
            .supported_schemes()
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("attested TLS server")
    }
}

/// An issuer whose every document is for a peer that called.
struct ForStrangers(Arc<dyn Issuer>);

impl Issuer for ForStrangers {
    fn oid(&self) -> Oid {
        self.0.oid()
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        self.0.issue_for_stranger(user_data, nonce)
    }
}
