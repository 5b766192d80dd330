//! Asks a server for evidence.
//!
//! First tries the strong form of attested TLS, and then the old form if the peer does not know the
//! strong one. A join service proves itself and then refuses a caller that sends no evidence. In
//! the strong form this is a success: the proof is complete before the refusal.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::demand::MachineRequirements;
use super::presented::{AtlsForm, PresentedEvidence};
use crate::shell::error::Error;
use crate::workspace::connect::{Endpoint, Node};
use proto::verify::{GET_ATTESTATION, GetAttestationRequest, GetAttestationResponse, MAX_RESPONSE};
use rpc::grpc::{self, CallOptions};
use verifier::refusal::Kind;
use verifier::{
    CredentialChallenge, Evidence, Identified, MachineIdentity, Properties, Refusal, Validator,
};

/// The evidence that a server sent, if any, and the verdict on it. The outer error: it did not
/// answer.
type Asked = (
    Option<PresentedEvidence>,
    Result<Result<Identified, Refusal>, Error>,
);

/// Asks over attested TLS.
pub fn attested(
    endpoint: &Endpoint,
    demand: &MachineRequirements,
    timeout: Duration,
) -> Result<Asked, Error> {
    let deadline = Instant::now() + timeout;
    let observer = Arc::new(Observer {
        judge: demand.validator()?,
        seen: OnceLock::new(),
    });
    // only the exchange of the strong form calls the observer: a certificate by itself proves nothing
    let strong = atls::Client::new(None, None)
        .verify_strong(Some(verifier::judge(observer.clone())))
        .to_any_server()
        .require_strong();
    let result = match connect(endpoint, strong, deadline) {
        Err(Attempted::Made(error)) if error.is_other_form() => {
            let old = atls::Client::new(None, Some(verifier::judge(observer.clone()))).only_old();
            connect(endpoint, old, deadline)
        }
        result => result,
    };
    let (presented, judged) = match observer.seen.get() {
        Some((presented, judged)) => (Some(presented.clone()), Some(judged)),
        None => (None, None),
    };
    let is_strong = presented
        .as_ref()
        .is_some_and(|presented| presented.channel() == AtlsForm::Strong);
    let verdict = match (judged, result) {
        (Some(Ok(identified)), Ok(())) => Ok(Ok(identified.clone())),
        // the exchange first refuses evidence for another connection, so what the observer accepted
        // is proven
        (Some(Ok(identified)), Err(Attempted::Made(atls::Error::PeerRefused(_)))) if is_strong => {
            Ok(Ok(identified.clone()))
        }
        (_, Err(Attempted::Made(atls::Error::Refused(refused)))) => {
            Ok(Err(verifier::refusal_of(refused)))
        }
        (_, Err(Attempted::Made(error))) => Err(Error::Unreachable(error.to_string())),
        (_, Err(Attempted::Not(why))) => Err(Error::Unreachable(why)),
        (_, Ok(())) => Ok(Err(Kind::Unproven.because("it proves nothing"))),
    };
    Ok((presented, verdict))
}

/// Why there is no connection.
enum Attempted {
    /// The handshake failed.
    Made(atls::Error),
    /// No server answers.
    Not(String),
}

/// Makes one connection, and closes it.
fn connect(endpoint: &Endpoint, client: atls::Client, deadline: Instant) -> Result<(), Attempted> {
    let node = Node {
        endpoint: endpoint.clone(),
        client,
    };
    let socket = node.endpoint.dial(deadline);
    let socket = socket.map_err(|why| Attempted::Not(why.text))?;
    let connected = node.client.connect(socket, deadline);
    connected.map(drop).map_err(Attempted::Made)
}

/// Asks a verification service of Constellation.
pub fn plain(
    endpoint: &Endpoint,
    demand: &MachineRequirements,
    timeout: Duration,
) -> Result<Asked, Error> {
    let nonce = base::crypto::random::<32>();
    let document = match get_attestation(endpoint, &nonce, Instant::now() + timeout) {
        Ok(document) => document,
        Err(why) => return Ok((None, Err(why))),
    };
    let presented = PresentedEvidence::plain(document, nonce.to_vec());
    let verdict = presented.judged_by(&*demand.validator()?);
    Ok((Some(presented), Ok(verdict)))
}

fn get_attestation(endpoint: &Endpoint, nonce: &[u8], deadline: Instant) -> Result<Vec<u8>, Error> {
    let node = Node {
        endpoint: endpoint.clone(),
        client: atls::Client::new(None, None),
    };
    let socket = node.endpoint.dial(deadline);
    let socket = socket.map_err(|why| Error::Unreachable(why.text))?;
    let transport = transport::plain::transport(socket);
    let transport = transport.map_err(|error| Error::Unreachable(error.to_string()))?;
    let channel = grpc::Channel::new(transport, &endpoint.to_string());
    let channel = channel.map_err(|status| Error::Unreachable(status.to_string()))?;
    let request = GetAttestationRequest {
        nonce: nonce.into(),
    };
    let options = CallOptions {
        timeout: Some(deadline.saturating_duration_since(Instant::now())),
        ..CallOptions::default()
    };
    let answer: Result<GetAttestationResponse, _> =
        channel
            .with_message_bytes(MAX_RESPONSE)
            .unary(GET_ATTESTATION, &request, &options);
    answer
        .map(|answer| answer.attestation)
        .map_err(|status| Error::Unreachable(format!("it gives no evidence: {status}")))
}

/// Keeps the peer's evidence, and the verdict on it.
struct Observer {
    judge: Arc<dyn Validator>,
    seen: OnceLock<(PresentedEvidence, Result<Identified, Refusal>)>,
}

impl Validator for Observer {
    fn properties(&self) -> Properties {
        self.judge.properties()
    }

    fn challenge(&self, peer: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
        self.judge.challenge(peer)
    }

    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        let judged = self.judge.judge(evidence);
        // The observer is called at most once, and by one form of attested TLS.
        let seen = (PresentedEvidence::of(evidence), judged.clone());
        self.seen.get_or_init(|| seen);
        judged
    }

    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        None
    }
}
