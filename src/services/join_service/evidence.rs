//! How the service proves its machine to nodes: its pod has no TPM, so the host makes the evidence,
//! through a unix socket (`bootstrapper --serve-evidence`).

use std::fmt::Display;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::admission_queue::AdmissionQueue;
use crate::metrics::{Counter, Labelled, Registry};
use atls::FIRST_PAUSE_ALERT;
use base::crypto::random;
use base::sync::lock;
use collateral::Fetching;
use prost::Message;
use proto::attested::Collateral;
use proto::evidence::{EvidenceRequest, EvidenceResponse};
use transport::half_open::PeersTurn;
use transport::{Accept, Transport};
use verifier::refusal::Kind;
use verifier::sources::Sources;
use verifier::{
    DocumentRequest, IssueError, Issuer, MachineIdentity, Oid, PeerRole, Refusal, Validator,
    Variant, wire,
};

/// Where the host listens.
pub const SOCKET: &str = "/run/firstlight/evidence/socket";
/// Time limit for one response. The TPM takes less than a second and serves one caller at a time.
const LIMIT: Duration = Duration::from_secs(20);
/// Maximum size of a response in bytes, as of a proof in attested TLS.
const MAX_RESPONSE: u64 = 128 << 10;
/// Pause before a host that gave no evidence is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(10);
/// How long an identity without certificates is cached: the host may have failed to read them.
const MAX_AGE: Duration = Duration::from_secs(60);

/// Proves this machine by the evidence of its host.
pub struct RemoteIssuer {
    variant: &'static Variant,
    socket: PathBuf,
    /// The keys, which do not change while the machine runs, and when the host returned them.
    identity: Mutex<Option<(MachineIdentity, Instant)>>,
    /// Whether the last response of the host was evidence. If not, the service requests the host's
    /// identity again before the next proof.
    works: AtomicBool,
    /// The collateral for nodes; getting it never waits for a server. `None`: they get nothing.
    sources: Option<Arc<dyn Sources>>,
}

impl RemoteIssuer {
    /// Makes an issuer of this variant's documents, which the host makes at this socket.
    pub fn new(variant: &'static Variant, socket: PathBuf) -> RemoteIssuer {
        RemoteIssuer {
            variant,
            socket,
            identity: Mutex::default(),
            works: AtomicBool::new(false),
            sources: None,
        }
    }

    /// Also sends nodes the collateral of the documents that these sources have cached.
    pub fn with_collateral(mut self, fetching: &Fetching) -> RemoteIssuer {
        self.sources = Some(fetching.at_hand());
        self
    }

    /// Fetches the collateral of this machine in advance, so that the first node gets it: the
    /// host's document says which collateral is needed.
    fn prepare_collateral(&self) {
        let (Some(_), Some(_)) = (&self.sources, self.variant.collateral) else {
            return;
        };
        // this document is not sent to anybody; without it, the first node's document would have
        // the same effect
        if let Ok(document) = self.verification(&random::<32>()) {
            let _ = self.collateral(&document);
        }
    }

    /// Asks the host, and stores its identity and whether it gave evidence. Returns the document.
    fn ask(&self, request: &EvidenceRequest) -> Result<(MachineIdentity, Vec<u8>), IssueError> {
        let response = self.try_to_ask(request);
        self.works.store(response.is_ok(), Ordering::Relaxed);
        let EvidenceResponse {
            identity, document, ..
        } = response?;
        let identity = wire::read_identity(&identity.unwrap_or_default());
        *self.known() = Some((identity.clone(), Instant::now()));
        Ok((identity, document))
    }

    /// Adds the issuers of the certificates of endorsement keys that the TPM does not hold. A node
    /// fetches none.
    fn with_issuers(&self, mut identity: MachineIdentity) -> MachineIdentity {
        let Some(sources) = &self.sources else {
            return identity;
        };
        for endorsement in &mut identity.endorsements {
            if endorsement.chain.is_empty()
                && let Ok(Some(issuer)) = sources.issuer(&endorsement.certificate)
            {
                endorsement.chain.push(issuer);
            }
        }
        identity
    }

    /// Returns a document of Constellation's verification service for a nonce of 16 to 32 bytes.
    pub fn verification(&self, nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        let request = EvidenceRequest {
            nonce: nonce.into(),
            verification: true,
            ..EvidenceRequest::default()
        };
        Ok(self.ask(&request)?.1)
    }

    fn known(&self) -> MutexGuard<'_, Option<(MachineIdentity, Instant)>> {
        lock(&self.identity)
    }

    fn try_to_ask(&self, request: &EvidenceRequest) -> Result<EvidenceResponse, IssueError> {
        let failed = |error: &dyn Display| {
            IssueError::new(format!(
                "cannot get evidence of the host at {}: {error}",
                self.socket.display()
            ))
        };
        let bytes = self.exchange(&request.encode_to_vec());
        let bytes = bytes.map_err(|error| failed(&error))?;
        let response = rpc::grpc::decode::<EvidenceResponse>(&bytes, "response")
            .map_err(|status| failed(&status.message()))?;
        if !response.error.is_empty() {
            return Err(failed(&response.error));
        }
        match &response.identity {
            Some(identity) if identity.variant == self.variant.oid => Ok(response),
            Some(_) => Err(failed(&"it is of another attestation variant")),
            None => Err(failed(&"the response is not complete")),
        }
    }

    fn exchange(&self, request: &[u8]) -> io::Result<Vec<u8>> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_write_timeout(Some(LIMIT))?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.write_all(request)?;
        stream.shutdown(Shutdown::Write)?;
        let mut response = vec![];
        stream.take(MAX_RESPONSE).read_to_end(&mut response)?;
        Ok(response)
    }
}

impl Issuer for RemoteIssuer {
    fn oid(&self) -> Oid {
        self.variant.oid
    }

    /// Fails: the host makes no documents of the old form.
    fn issue(&self, _user_data: &[u8], _nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        Err(IssueError::new(
            "the host gives evidence only for the strong form of attested TLS",
        ))
    }

    fn identity(&self) -> Result<MachineIdentity, IssueError> {
        match self.known_identity() {
            Some(identity) => Ok(identity),
            None => Ok(self.with_issuers(self.ask(&EvidenceRequest::default())?.0)),
        }
    }

    fn known_identity(&self) -> Option<MachineIdentity> {
        let (identity, told) = self.known().clone()?;
        let holds = !identity.endorsements.is_empty() || told.elapsed() < MAX_AGE;
        holds.then(|| self.with_issuers(identity))
    }

    fn prove(&self, request: &DocumentRequest<'_>) -> Result<Vec<u8>, IssueError> {
        if request.role != PeerRole::Server {
            return Err(IssueError::new("the host gives evidence only for servers"));
        }
        let (_, document) = self.ask(&EvidenceRequest {
            session: request.session.to_vec(),
            nonce: request.nonce.to_vec(),
            banks: request.banks.iter().map(|bank| *bank as u32).collect(),
            challenge: request
                .challenge
                .map(|(kind, credential)| wire::credential(kind, credential)),
            verification: false,
        })?;
        Ok(document)
    }

    fn collateral(&self, document: &[u8]) -> Option<Collateral> {
        let find = self.variant.collateral?;
        find(document, &**self.sources.as_ref()?)
    }
}

/// Accepts nodes, and proves this machine to them if the host gives evidence.
pub struct NodeAcceptor {
    issuer: Option<Arc<RemoteIssuer>>,
    validator: Arc<dyn Validator>,
    require_strong: bool,
    proving: atls::Server,
    /// Sends no proof in the strong form. Nodes refuse that, and report it.
    without_proof: atls::Server,
    /// The same, but selects the old form if a node offers it: in that form fresh nodes accept a service
    /// without evidence.
    without_proof_old: atls::Server,
    /// The callers of IssueJoinTicket.
    queue: Arc<AdmissionQueue>,
    /// When the host last gave no evidence.
    refused: Mutex<Option<Instant>>,
    /// The nodes whose evidence was refused, by the kind of the reason.
    refusals: Labelled<Counter, 1>,
}

impl NodeAcceptor {
    /// Makes the server's TLS end, which accepts the nodes that `validator` accepts. With
    /// `require_strong`, nodes of the old form are refused.
    pub fn new(
        validator: &Arc<impl Validator + 'static>,
        issuer: Option<RemoteIssuer>,
        require_strong: bool,
        registry: &Registry,
    ) -> NodeAcceptor {
        let issuer = issuer.map(Arc::new);
        let server = || {
            if require_strong {
                atls::Server::new(None, Some(verifier::judge(validator.clone()))).require_strong()
            } else {
                atls::Server::new(None, Some(verifier::judge(validator.clone())))
            }
        };
        let mut proving = server();
        if let Some(issuer) = &issuer {
            proving = proving.attest_strong(issuer.clone());
        }
        if issuer.is_none() {
            log::warn!(
                "this service sends no evidence to nodes (--evidence is not set): nodes with the setting require=strong refuse its tickets"
            );
        }
        NodeAcceptor {
            issuer,
            validator: validator.clone(),
            require_strong,
            proving,
            without_proof: server(),
            without_proof_old: server().old_first(),
            queue: Arc::default(),
            refused: Mutex::default(),
            refusals: registry.labelled(
                "firstlight_join_refused_evidence_total",
                "Number of nodes whose evidence was refused, by the kind of the reason.",
                ["kind"],
            ),
        }
    }

    /// Tells the peers of connections that are closed before their handshake when their turn comes
    /// among these callers.
    pub fn with_queue(self, queue: Arc<AdmissionQueue>) -> NodeAcceptor {
        NodeAcceptor { queue, ..self }
    }

    /// Returns whether the host gives evidence: its last response says so. A host that gives none
    /// is asked again after some time; this is logged once.
    pub fn can_prove(&self) -> bool {
        let Some(issuer) = &self.issuer else {
            return false;
        };
        if issuer.works.load(Ordering::Relaxed) {
            return true;
        }
        let mut refused = lock(&self.refused);
        if refused.is_some_and(|at| at.elapsed() < ASK_AGAIN) {
            return false;
        }
        let is_news = refused.is_some() || issuer.known().is_none();
        match issuer.ask(&EvidenceRequest::default()) {
            Ok(_) => {
                issuer.prepare_collateral();
                if is_news {
                    log::info!("this service sends the host's evidence to nodes");
                }
                *refused = None;
                true
            }
            Err(error) => {
                if refused.is_none() {
                    log::warn!(
                        "this service sends no evidence to nodes until the host gives it some: {error}; \
                         nodes with the setting require=strong refuse its tickets"
                    );
                }
                *refused = Some(Instant::now());
                false
            }
        }
    }
}

impl NodeAcceptor {
    /// Returns why a node can be accepted only in the strong form, if that is so. In that form a node
    /// that rejoins requires no proof of this service, but a fresh node does.
    fn reason_for_strong(&self) -> Option<&'static str> {
        let policy = self.validator.properties();
        if self.require_strong || policy.requires_strong {
            Some(
                "the policy or --require requires the strong form of attested TLS, so nodes require evidence",
            )
        } else if policy.challenges {
            Some(
                "the policy's endorsementRoots require the strong form of attested TLS, so fresh nodes require evidence",
            )
        } else {
            None
        }
    }

    /// Counts a refusal of a node's evidence.
    fn count(&self, result: &io::Result<Transport>) {
        let error = result.as_ref().err().and_then(attested);
        if let Some(refused) = error.and_then(atls::Error::refused) {
            let refusal = refused.downcast_ref::<Refusal>();
            let kind = refusal.map_or(Kind::Unproven, |it| it.kind);
            self.refusals.with([kind.name()]).inc();
        }
    }
}

impl Accept for NodeAcceptor {
    fn accept(
        &self,
        socket: TcpStream,
        deadline: Instant,
        turn: &PeersTurn,
    ) -> io::Result<Transport> {
        if self.can_prove() {
            let result = self.proving.accept(socket, deadline, turn);
            self.count(&result);
            return result;
        }
        let reason = self.reason_for_strong();
        let server = match reason {
            Some(_) => &self.without_proof,
            None => &self.without_proof_old,
        };
        let peer = socket.peer_addr();
        let result = server.accept(socket, deadline, turn);
        self.count(&result);
        if let (Err(error), Ok(peer)) = (&result, peer)
            && is_refusal(error)
        {
            log::warn!(
                "node {peer} refuses this service, because its host gives it no evidence: {}",
                reason.unwrap_or("the node has the setting require=strong")
            );
        }
        result
    }

    /// Sends a TLS alert in place of a handshake, which would cost much more. The empty send buffer
    /// of a new connection takes it at once.
    fn turn_away(&self, mut socket: &TcpStream) {
        let _ = socket.write(&alert_for(self.queue.turn_away(Instant::now())));
    }
}

/// Returns the TLS record (RFC 8446 §5.1, §6) with the alert that asks for this pause. Nodes add an
/// eighth to a quarter of the pause.
fn alert_for(pause: Duration) -> [u8; 7] {
    let fits = |alert: &u8| {
        let asked = atls::pause_of((*alert).into());
        asked.is_some_and(|asked| asked.mul_f64(1.1875) <= pause)
    };
    let alert = (FIRST_PAUSE_ALERT..=u8::MAX).rev().find(fits);
    [21, 3, 3, 0, 2, 2, alert.unwrap_or(FIRST_PAUSE_ALERT)]
}

/// Returns whether the peer refused the evidence of this service.
fn is_refusal(error: &io::Error) -> bool {
    attested(error).is_some_and(atls::Error::is_attestation_refused_by_peer)
}

fn attested(error: &io::Error) -> Option<&atls::Error> {
    error.get_ref()?.downcast_ref()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_waits_as_the_alert_asks_comes_near_its_turn() {
        for seconds in [0, 1, 4, 5, 10, 30, 60, 119, 120, 1000] {
            let pause = Duration::from_secs(seconds);
            let asked = atls::pause_of(alert_for(pause)[6].into()).unwrap();
            let wanted = pause.clamp(Duration::from_secs(5), Duration::from_secs(180));
            let range = wanted.mul_f64(0.75)..=wanted.mul_f64(1.06);
            let comes = asked.mul_f64(1.1875);
            assert!(range.contains(&comes), "{pause:?}: {comes:?}");
        }
        assert_eq!(atls::pause_of(223.into()), None);
        // an alert record of two bytes, fatal: what a node is tested with (src/node/ticket_client.rs)
        assert_eq!(alert_for(Duration::ZERO)[..6], [21, 3, 3, 0, 2, 2]);
    }
}
