//! The client role of attested TLS.

use std::fmt;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ResolvesClientCert, Resumption};
use rustls::crypto::verify_tls13_signature;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, ClientConnection, Connection, DigitallySignedStruct, SignatureScheme};

use super::exchange::End;
use super::forms::Forms;
use super::handshake::{self, Timed};
use super::provider::{SIGNATURES, VERSIONS, verify_signatures};
use super::verdict::Verdict;
use super::{Error, certificate, nonce, provider};
use attest::{Accepted, Form, Issuer, Judge, PeerRole};
use transport::Transport;
use transport::half_open::PeersTurn;

/// Establishes attested connections to servers. It offers both forms; the server selects the strong
/// form if it knows it.
pub struct Client {
    issuer: Option<Arc<dyn Issuer>>,
    /// Of the old form.
    judge: Option<Arc<dyn Judge>>,
    strong_judge: Option<Arc<dyn Judge>>,
    /// The roles in which a server may prove itself in the strong form.
    peers: &'static [PeerRole],
    forms: Forms,
}

impl Client {
    /// Makes a client that attests itself with `issuer` if the server requests it, and accepts a
    /// server that the `judge` accepts. **Without a judge every server is accepted**, as by joining
    /// nodes of Constellation.
    pub fn new(issuer: Option<Arc<dyn Issuer>>, judge: Option<Arc<dyn Judge>>) -> Self {
        Client {
            issuer,
            strong_judge: judge.clone(),
            judge,
            peers: &[PeerRole::Server],
            forms: Forms::Both,
        }
    }

    /// Accepts only a join service in the strong form, and no other server of a machine that meets
    /// the policy.
    pub fn to_join_service(mut self) -> Self {
        self.peers = &[PeerRole::JoinService];
        self
    }

    /// Accepts every server of a machine, in any role. Only a client that sends no secret to the
    /// server may use this.
    pub fn to_any_server(mut self) -> Self {
        self.peers = &[PeerRole::Server, PeerRole::JoinService];
        self
    }

    /// In the strong form, verifies the server by `judge`; in the old form the server proves nothing.
    pub fn verify_strong(mut self, judge: Option<Arc<dyn Judge>>) -> Self {
        self.strong_judge = judge;
        self
    }

    /// Refuses the old form.
    pub fn require_strong(mut self) -> Self {
        self.forms = Forms::OnlyStrong;
        self
    }

    /// Offers only the old form, as a client of Constellation.
    pub fn only_old(mut self) -> Self {
        self.forms = Forms::OnlyOld;
        self
    }

    /// Completes the handshake on a connected socket before `deadline`, or fails and closes it.
    ///
    /// The issuer and the judge run during the handshake; the deadline does not interrupt
    /// them. In the old form with TLS 1.3 a server validates the client after the client's
    /// handshake is complete: then the first read returns the refusal, an [`std::io::Error`] that
    /// contains [`Error::PeerRefused`]. The connection has no socket time-outs.
    pub fn connect(&self, socket: TcpStream, deadline: Instant) -> Result<Transport, Error> {
        let (connection, accepted) = self.establish(&socket, deadline)?;
        handshake::finish(connection, socket, accepted)
    }

    /// As [`Self::connect`]; also returns the form that the server selected.
    pub fn connect_by_form(
        &self,
        socket: TcpStream,
        deadline: Instant,
    ) -> Result<(Transport, Form), Error> {
        let (connection, accepted) = self.establish(&socket, deadline)?;
        let form = handshake::form(&connection, self.forms)?;
        Ok((handshake::finish(connection, socket, accepted)?, form))
    }

    /// Returns a connection without a socket, before its handshake, for a caller with an event
    /// loop. `write_tls`, `read_tls` and `process_new_packets` drive it. The reason for a failure
    /// of issuer or judge is not available. Offers only the old form, because here nothing runs
    /// the exchange of the strong form.
    pub fn begin(&self) -> Result<ClientConnection, Error> {
        let old = Client {
            issuer: self.issuer.clone(),
            judge: self.judge.clone(),
            strong_judge: None,
            peers: &[],
            forms: Forms::OnlyOld,
        };
        old.session().map(|(connection, _)| connection)
    }

    fn session(&self) -> Result<(ClientConnection, Arc<Session>), Error> {
        let (nonce, server_name) = nonce::client();
        let session = Arc::new(Session {
            issuer: self.issuer.clone(),
            judge: self.judge.clone(),
            offers_strong: self.forms != Forms::OnlyOld,
            nonce,
            is_asked: AtomicBool::new(false),
            verdict: Verdict::default(),
        });
        let config = self.config(&session)?;
        Ok((
            ClientConnection::new(Arc::new(config), server_name)?,
            session,
        ))
    }

    pub(super) fn establish(
        &self,
        socket: &TcpStream,
        deadline: Instant,
    ) -> Result<(Connection, Option<Accepted>), Error> {
        let (connection, session) = self.session()?;
        let mut connection = Connection::Client(connection);
        socket.set_nodelay(true)?;
        let mut peer = Timed {
            socket,
            deadline,
            turn: &PeersTurn::default(),
        };
        let result = handshake::complete(&mut connection, &mut peer, None);
        let accepted = session.verdict.after(result)?;
        let accepted = match (handshake::form(&connection, self.forms)?, &self.judge) {
            (Form::Strong, _) => self.exchange(&mut connection, &mut peer)?,
            (Form::Old, _) if self.must_be_asked() && !session.is_asked.load(Relaxed) => {
                let why = "it does not request this machine's certificate, as a join service does: it is a proxy that ends TLS. \
                           It must pass TCP through";
                return Err(Error::Misbehaved(why.into()));
            }
            (Form::Old, Some(judge)) if accepted.is_none() => {
                return Err(Error::Refused(judge.no_document()));
            }
            (Form::Old, _) => accepted,
        };
        Ok((connection, accepted))
    }

    /// Returns whether each right server asks for this machine's certificate.
    fn must_be_asked(&self) -> bool {
        self.issuer.is_some() && self.peers == [PeerRole::JoinService]
    }

    fn exchange(
        &self,
        connection: &mut Connection,
        peer: &mut Timed<'_>,
    ) -> Result<Option<Accepted>, Error> {
        let chain = connection.peer_certificates().map(<[_]>::to_vec);
        let certificate = chain.as_deref().and_then(<[_]>::first);
        let end = End {
            role: PeerRole::Client,
            issuer: self.issuer.as_deref(),
            judge: (self.strong_judge.as_ref()).map(|judge| judge.connection(self.peers)),
            certificate: certificate.ok_or(Error::Closed)?,
        };
        end.run(connection, peer, &|| Ok(None))
    }

    fn config(&self, session: &Arc<Session>) -> Result<ClientConfig, Error> {
        let mut config = ClientConfig::builder_with_provider(provider::client())
            .with_protocol_versions(VERSIONS)?
            .dangerous() // attestation replaces the public-key infrastructure
            .with_custom_certificate_verifier(session.clone())
            .with_client_cert_resolver(session.clone());
        config.alpn_protocols = self.forms.protocols();
        config.resumption = Resumption::disabled();
        Ok(config)
    }
}

/// Inputs and results of the issuer and the judge of the old form in one connection.
struct Session {
    issuer: Option<Arc<dyn Issuer>>,
    judge: Option<Arc<dyn Judge>>,
    /// Whether the server may select the strong form, in which its certificate has no document.
    offers_strong: bool,
    nonce: Vec<u8>,
    /// Whether the server has asked for a certificate.
    is_asked: AtomicBool,
    verdict: Verdict,
}

impl Session {
    fn certify(&self, authorities: &[&[u8]]) -> Result<Arc<CertifiedKey>, Error> {
        let nonce = nonce::from_distinguished_names(authorities)?;
        certificate::issue(self.issuer.as_deref(), &nonce, false)
    }
}

impl ServerCertVerifier for Session {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        // in the strong form the exchange proves the server; `Client::establish` refuses such a
        // certificate in the old form
        if self.offers_strong && certificate::is_bare(leaf) {
            return Ok(ServerCertVerified::assertion());
        }
        if let Some(judge) = &self.judge {
            self.verdict.ask(&**judge, leaf, &self.nonce)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    verify_signatures!();
}

impl ResolvesClientCert for Session {
    /// Runs when the server requests a certificate. In TLS 1.3 this is before the server is
    /// verified, so a document may be made for a server that is then refused. After a failure it
    /// returns `None`, which sends no certificate, and we end the connection.
    fn resolve(
        &self,
        authorities: &[&[u8]],
        _schemes: &[SignatureScheme],
    ) -> Option<Arc<CertifiedKey>> {
        self.is_asked.store(true, Relaxed);
        self.certify(authorities)
            .map_err(|error| self.verdict.fail(error))
            .ok()
    }

    /// Without an issuer the certificate has no document: the server's error is then clearer than
    /// for a missing certificate.
    fn has_certs(&self) -> bool {
        true
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("attested TLS client")
    }
}
