//! The server role of attested TLS.

use std::fmt;
use std::io;
use std::net::TcpStream;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use log::warn;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::verify_tls13_signature;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ClientHello, NoServerSessionStorage, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{
    Connection, DigitallySignedStruct, DistinguishedName, ServerConfig, ServerConnection,
    SignatureScheme,
};

use super::exchange::End;
use super::forms::Forms;
use super::handshake::{self, Timed};
use super::hello::HelloFilter;
use super::provider::{SIGNATURES, VERSIONS, verify_signatures};
use super::verdict::Verdict;
use super::{ALPN_H2, ALPN_HTTP11, Error, certificate, nonce, provider};
use attest::{Accepted, Form, Issuer, Judge, PeerRole};
use base::network::semaphore::{self, Semaphore};
use base::network::{Network, canonical};
use proto::attested::ALPN as ALPN_STRONG;
use transport::half_open::PeersTurn;
use transport::{Accept, Transport};

/// Maximum number of handshakes of one server that make an attestation document at the same time.
/// Others wait within their deadlines.
///
/// The server makes a document before the client has proven anything. A TPM serves one command at a
/// time, so a higher number would only delay other uses of the TPM. It is more than one because
/// some documents need the network.
pub const MAX_ISSUING: usize = 4;
/// Maximum number of handshakes that wait to make a document. Networks take turns, so a flood
/// delays only its own network.
const MAX_WAITING: usize = 128;

/// The protocols in a connection of the old form.
const OLD_PROTOCOLS: [&[u8]; 2] = [ALPN_H2, ALPN_HTTP11];

/// Establishes attested connections on accepted sockets. It selects the strong form if the client
/// offers it.
pub struct Server {
    /// Of the old form.
    issuer: Option<Arc<dyn Issuer>>,
    strong_issuer: Option<Arc<dyn Issuer>>,
    judge: Option<Arc<dyn Judge>>,
    forms: Forms,
    issuing: Arc<Semaphore>,
    /// The certificate of the strong form, and the configuration with it. It has no document, so
    /// both serve all connections.
    bare: OnceLock<(Arc<CertifiedKey>, Arc<ServerConfig>)>,
}

impl Server {
    /// Makes a server that attests itself with `issuer`, and accepts only clients that the `judge`
    /// accepts. **Without a judge every client is accepted.**
    pub fn new(issuer: Option<Arc<dyn Issuer>>, judge: Option<Arc<dyn Judge>>) -> Self {
        Server {
            strong_issuer: issuer.clone(),
            issuer,
            judge,
            forms: Forms::Both,
            issuing: Arc::new(Semaphore::new(MAX_ISSUING, MAX_WAITING)),
            bare: OnceLock::new(),
        }
    }

    /// Attests itself with `issuer` in the strong form. For a server without evidence in the old
    /// form.
    pub fn attest_strong(mut self, issuer: Arc<dyn Issuer>) -> Self {
        self.strong_issuer = Some(issuer);
        self
    }

    /// Refuses the old form.
    pub fn require_strong(mut self) -> Self {
        self.forms = Forms::OnlyStrong;
        self
    }

    /// Selects the old form if the client offers it. A server that cannot prove itself uses this:
    /// in the strong form, a client that requires evidence would refuse it.
    pub fn old_first(mut self) -> Self {
        self.forms = Forms::OldFirst;
        self
    }

    /// Knows only the old form, like a server of Constellation.
    pub fn only_old(mut self) -> Self {
        self.forms = Forms::OnlyOld;
        self
    }

    /// Completes the handshake on an accepted socket before `deadline`, or fails and closes it.
    ///
    /// In the old form a server with an issuer refuses clients that send no nonce of 16 to 64
    /// bytes; else the nonce is ignored. The issuer and the judge run during the handshake;
    /// the deadline does not interrupt them. The connection has no socket time-outs.
    pub fn handshake(&self, socket: TcpStream, deadline: Instant) -> Result<Transport, Error> {
        self.handshake_watched(socket, deadline, &PeersTurn::default())
    }

    fn handshake_watched(
        &self,
        socket: TcpStream,
        deadline: Instant,
        turn: &PeersTurn,
    ) -> Result<Transport, Error> {
        let (connection, accepted) = self.establish(&socket, deadline, turn)?;
        handshake::finish(connection, socket, accepted)
    }

    pub(super) fn establish(
        &self,
        socket: &TcpStream,
        deadline: Instant,
        turn: &PeersTurn,
    ) -> Result<(Connection, Option<Accepted>), Error> {
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
            let offers = |protocol: &[u8]| filter.offers(protocol);
            let session = self.session(network, filter.server_name(), offers, deadline)?;
            Ok((hello, session))
        });
        let (hello, session) =
            opened.inspect_err(|error| handshake::refuse_hello(&mut peer, error))?;
        self.complete(&mut peer, &session, Some((&mut filter, hello)))
    }

    /// Completes a handshake whose first ClientHello is read, and proves and validates what its
    /// form demands. Without a filter, the server names must be legal.
    pub(super) fn complete(
        &self,
        peer: &mut Timed<'_>,
        session: &Arc<Session>,
        filter: Option<(&mut HelloFilter, Vec<u8>)>,
    ) -> Result<(Connection, Option<Accepted>), Error> {
        let config = if session.is_strong {
            self.bare()?.1.clone()
        } else {
            config(session, &OLD_PROTOCOLS)?
        };
        let mut connection = Connection::Server(ServerConnection::new(config)?);
        let result = handshake::complete(&mut connection, peer, filter);
        let accepted = session.verdict.after(result)?;
        let form = handshake::form(&connection, self.forms)?;
        if (form == Form::Strong) != session.is_strong {
            let what = "its second ClientHello is for the other form";
            return Err(Error::Misbehaved(what.into()));
        }
        let accepted = match form {
            Form::Strong => self.exchange(&mut connection, peer, session)?,
            Form::Old => accepted,
        };
        // Serve only peers that the judge accepted, whatever happened in the handshake.
        match &self.judge {
            Some(judge) if accepted.is_none() => Err(Error::Refused(judge.no_document())),
            _ => Ok((connection, accepted)),
        }
    }

    fn exchange(
        &self,
        connection: &mut Connection,
        peer: &mut Timed<'_>,
        session: &Session,
    ) -> Result<Option<Accepted>, Error> {
        let end = End {
            role: PeerRole::Server,
            issuer: self.strong_issuer.as_deref(),
            judge: (self.judge.as_ref()).map(|judge| judge.connection(&[PeerRole::Client])),
            certificate: &self.bare()?.0.cert[0],
        };
        end.run(connection, peer, &|| session.turn().map(Some))
    }

    /// Returns the certificate of the strong form, and the configuration with it. The end of the
    /// exchange requests what the client must prove, so rustls requests no certificate.
    pub(super) fn bare(&self) -> Result<&(Arc<CertifiedKey>, Arc<ServerConfig>), Error> {
        if let Some(bare) = self.bare.get() {
            return Ok(bare);
        }
        let made = certificate::issue(None, &[], true)?;
        let nobody = Server::new(None, None);
        let session = nobody.session(Network::UNKNOWN, None, |_| true, Instant::now())?;
        let _ = session.certified.set(Some(made.clone()));
        let bare = (made, config(&session, &[ALPN_STRONG])?);
        Ok(self.bare.get_or_init(|| bare))
    }

    pub(super) fn session(
        &self,
        network: Network,
        server_name: Option<&[u8]>,
        offers: impl Fn(&[u8]) -> bool,
        deadline: Instant,
    ) -> Result<Arc<Session>, Error> {
        let client_nonce = match self.issuer {
            Some(_) => nonce::from_server_name(server_name)?,
            None => Vec::new(),
        };
        let server_nonce = nonce::server();
        Ok(Arc::new(Session {
            issuer: self.issuer.clone(),
            judge: self.judge.clone(),
            issuing: self.issuing.clone(),
            network,
            deadline,
            is_strong: self.forms.selects_strong(offers, &OLD_PROTOCOLS),
            client_nonce,
            server_nonce,
            authorities: [DistinguishedName::from(nonce::to_distinguished_name(
                &server_nonce,
            ))],
            certified: OnceLock::new(),
            verdict: Verdict::default(),
        }))
    }
}

/// Returns a configuration without resumption: each connection proves its peer.
fn config(session: &Arc<Session>, protocols: &[&[u8]]) -> Result<Arc<ServerConfig>, Error> {
    let mut config = ServerConfig::builder_with_provider(provider::server())
        .with_protocol_versions(VERSIONS)?
        .with_client_cert_verifier(session.clone())
        .with_cert_resolver(session.clone());
    config.alpn_protocols = protocols.iter().map(|it| it.to_vec()).collect();
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

impl Accept for Server {
    /// Runs [`Server::handshake`], and logs its refusals and its own errors with the address of the
    /// peer. The caller logs all other errors, but few lines for each peer, because a port scan
    /// causes such errors, too.
    fn accept(
        &self,
        socket: TcpStream,
        deadline: Instant,
        turn: &PeersTurn,
    ) -> io::Result<Transport> {
        let peer = socket.peer_addr().map_or_else(
            |_| "a disconnected peer".into(),
            |address| canonical(address).to_string(),
        );
        let result = self.handshake_watched(socket, deadline, turn);
        let result = result.inspect_err(|error| {
            if let Error::Refused(_) | Error::Issuer(_) | Error::Internal(_) = error {
                warn!("attested TLS with {peer} failed: {error}");
            }
        });
        result.map_err(Into::into)
    }
}

/// Inputs and results of the issuer and the judge in one connection.
pub(super) struct Session {
    issuer: Option<Arc<dyn Issuer>>,
    judge: Option<Arc<dyn Judge>>,
    issuing: Arc<Semaphore>,
    network: Network,
    deadline: Instant,
    /// Whether the server selects the strong form, by the first ClientHello.
    is_strong: bool,
    client_nonce: Vec<u8>,
    server_nonce: [u8; 32],
    /// The server nonce as an authority in the CertificateRequest.
    authorities: [DistinguishedName; 1],
    /// The certificate. It is stored because rustls asks again after a HelloRetryRequest, and one
    /// document is enough.
    certified: OnceLock<Option<Arc<CertifiedKey>>>,
    verdict: Verdict,
}

impl Session {
    /// Waits until this connection may make a document.
    fn turn(&self) -> Result<semaphore::Permit<'_>, Error> {
        self.issuing
            .take(self.network, self.deadline, || false)
            .map_err(|_| Error::TimedOut)
    }

    fn certify(&self) -> Result<Arc<CertifiedKey>, Error> {
        let _turn = self.issuer.as_ref().map(|_| self.turn()).transpose()?;
        certificate::issue(self.issuer.as_deref(), &self.client_nonce, true)
    }
}

impl ResolvesServerCert for Session {
    /// Runs before the server requests the client's certificate.
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.certified
            .get_or_init(|| {
                let certified = self.certify();
                certified.map_err(|error| self.verdict.fail(error)).ok()
            })
            .clone()
    }
}

impl ClientCertVerifier for Session {
    fn offer_client_auth(&self) -> bool {
        self.judge.is_some()
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.authorities
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        // no certificate is requested without a judge
        let judge = self.judge.as_ref().ok_or(certificate::REFUSED)?;
        self.verdict.ask(&**judge, leaf, &self.server_nonce)?;
        Ok(ClientCertVerified::assertion())
    }

    verify_signatures!();
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("attested TLS server")
    }
}
