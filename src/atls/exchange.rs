//! The strong form: both ends prove themselves inside the TLS connection, after its handshake.
//!
//! ```text
//! client                                                       server
//!   | Offer { nonce C, demand, identity }                        |
//!   | ---------------------------------------------------------> |
//!   | Offer { nonce S, demand, identity }                        |
//!   | <--------------------------------------------------------- |
//!   |        session = digest(exporter, certificate, both offers)
//!   | Proof { challenge }, only if the demand announced it       |
//!   | ---------------------------------------------------------> |
//!   | Proof { document(server, session, C), collateral }         |
//!   | <--------------------------------------------------------- |
//!   |  validates it, before it proves itself or makes a call     |
//!   | Proof { document(client, session, S) }                     |
//!   | ---------------------------------------------------------> |  validates it
//!   | Proof { }, only if the server demanded a document          |
//!   | <--------------------------------------------------------- |
//! ```
//!
//! A challenge is a credential for the TPM of the peer. The document then also covers what the TPM
//! decrypts, so only a TPM that has both the attestation key and a certified endorsement key can
//! make it. The server's challenge is in its offer.
//!
//! A client that cannot fetch the collateral for a document requests it from the server, too. AMD
//! or Intel signed it, so the document does not cover it.
//!
//! An end that requests nothing gets a proof without a document. An alert in a message ends the
//! exchange.
//!
//! The session contains the exporter of TLS (RFC 8446 §7.5), which covers the key exchange and the
//! server's certificate. So a document is worthless in another connection, even for somebody with
//! the private key of the certificate.

use std::io::{Read, Write};

use prost::Message;
use rustls::{AlertDescription, Connection};
use zeroize::Zeroizing;

use super::Error;
use super::handshake::{self, Timed};
use attest::session::{self, DocumentRequest};
use attest::{Accepted, ConnectionJudge, Issuer, MAX_COLLATERAL, PeerRole, Presented, wire};
use base::network::semaphore::Permit;
use proto::attested::{Challenge, Collateral, Demand, Offer, Proof};
use tpm::Bank;

/// Label of the exporter (RFC 8446 §7.5). The context is empty.
const EXPORTER: &[u8] = b"EXPORTER-firstlight-attested-1";
/// Length of a nonce in bytes.
const NONCE: usize = 32;
/// Maximum size of an offer in bytes: a key, and the certificates of two endorsement keys with
/// their chains.
const MAX_OFFER: usize = 16 << 10;
/// Maximum number of banks and of endorsement keys in an offer, and of CA certificates for each of
/// these keys.
const MAX_PARTS: usize = 8;
/// Maximum size of a proof in bytes, as of a certificate in the old form.
const MAX_PROOF: usize = 64 << 10;
/// Maximum size of a proof with collateral, for the end that demanded it.
const MAX_PROOF_WITH_COLLATERAL: usize = MAX_PROOF + MAX_COLLATERAL;
/// Maximum size of a proof without a document.
const MAX_EMPTY_PROOF: usize = 4 << 10;
/// Maximum number of bytes in a buffer of rustls after the exchange, as it is by default.
const BUFFER: usize = 64 << 10;

/// Takes a turn at the TPM, if the machine has turns.
type TakeTurn<'a> = &'a dyn Fn() -> Result<Option<Permit<'a>>, Error>;

/// One end of an exchange.
pub struct End<'a> {
    pub role: PeerRole,
    /// Proves this machine.
    pub issuer: Option<&'a dyn Issuer>,
    /// Judges the peer in this connection. Without a judge the peer need not prove anything. A changed
    /// policy applies to the next connection: challenge and document are judged by the same policy.
    pub judge: Option<Box<dyn ConnectionJudge>>,
    /// The certificate of the server.
    pub certificate: &'a [u8],
}

/// The values that both ends know after the offers.
struct Session {
    digest: [u8; 32],
    own: Offer,
    peers: Offer,
}

impl End<'_> {
    /// Makes the exchange. `turn` returns a guard that is held while this machine uses its TPM.
    /// Returns the peer if this end judges it.
    pub fn run(
        mut self,
        connection: &mut Connection,
        peer: &mut Timed<'_>,
        turn: TakeTurn<'_>,
    ) -> Result<Option<Accepted>, Error> {
        let mut pipe = Pipe { connection, peer };
        let result = match self.role {
            PeerRole::Client => self.as_client(&mut pipe, turn),
            PeerRole::Server | PeerRole::JoinService => self.as_server(&mut pipe, turn),
        };
        let result = result.and_then(|accepted| pipe.flush().map(|()| accepted));
        pipe.connection.set_buffer_limit(Some(BUFFER));
        if let Err(error) = &result {
            pipe.refuse(error);
        }
        result
    }

    fn as_client(
        &mut self,
        pipe: &mut Pipe<'_, '_>,
        turn: TakeTurn<'_>,
    ) -> Result<Option<Accepted>, Error> {
        if (self.issuer).is_some_and(|issuer| issuer.known_identity().is_none()) {
            pipe.flush()?; // before the TPM makes keys
        }
        // the server may demand a proof
        let own = self.offer(true, turn)?;
        let sent = pipe.send(&own)?;
        let (peers, received) = pipe.receive_offer()?;
        let mut session = self.session(pipe, [&sent, &received], own, peers)?;
        let demand = session.own.demand.as_ref();
        if demand.is_some_and(|demand| demand.challenges) {
            pipe.send(&Proof {
                challenge: self.challenge(&session.peers)?,
                ..Proof::default()
            })?;
        }
        let accepted = self.verify(pipe, &session)?;
        let challenge = session.peers.challenge.take();
        pipe.send(&self.prove(&session, challenge, turn)?)?;
        if session.peers.demand.is_some() {
            pipe.receive_empty()?;
        }
        Ok(accepted)
    }

    fn as_server(
        &mut self,
        pipe: &mut Pipe<'_, '_>,
        turn: TakeTurn<'_>,
    ) -> Result<Option<Accepted>, Error> {
        let (peers, received) = pipe.receive_offer()?;
        let mut own = self.offer(peers.demand.is_some(), turn)?;
        own.challenge = self.challenge(&peers)?;
        let sent = pipe.send(&own)?;
        let session = self.session(pipe, [&received, &sent], own, peers)?;
        let demand = session.peers.demand.as_ref();
        let challenge = if demand.is_some_and(|demand| demand.challenges) {
            pipe.receive_challenge()?
        } else {
            None
        };
        pipe.send(&self.prove(&session, challenge, turn)?)?;
        let accepted = self.verify(pipe, &session)?;
        if session.own.demand.is_some() {
            pipe.send(&Proof::default())?;
        }
        Ok(accepted)
    }

    /// Makes a challenge for the peer, if its judge requires a certified key.
    fn challenge(&mut self, peers: &Offer) -> Result<Option<Challenge>, Error> {
        match (&mut self.judge, &peers.identity) {
            (Some(judge), Some(identity)) => judge.challenge(identity).map_err(Error::Refused),
            _ => Ok(None),
        }
    }

    /// Makes this end's offer. It contains an identity only if that is needed, because the TPM may
    /// have to return it.
    fn offer(&self, with_identity: bool, turn: TakeTurn<'_>) -> Result<Offer, Error> {
        let identity = match self.issuer.filter(|_| with_identity) {
            None => None,
            Some(issuer) => {
                let identity = match issuer.known_identity() {
                    Some(identity) => identity,
                    None => {
                        let _turn = turn()?;
                        issuer.identity().map_err(Error::Issuer)?
                    }
                };
                Some(wire::identity(issuer.oid(), identity))
            }
        };
        let demand = self.judge.as_ref().map(|judge| judge.demand());
        Ok(Offer {
            nonce: base::crypto::random::<NONCE>().to_vec(),
            demand: demand.map(|demand| Demand {
                // a server sends its challenge with its offer
                challenges: demand.challenges && self.role == PeerRole::Client,
                ..demand
            }),
            identity,
            challenge: None,
            alert: 0,
        })
    }

    /// Computes the digest that binds documents to this connection. `offers` are the messages of
    /// client and server, in this order.
    fn session(
        &self,
        pipe: &Pipe<'_, '_>,
        offers: [&[u8]; 2],
        own: Offer,
        peers: Offer,
    ) -> Result<Session, Error> {
        let exporter = Zeroizing::new([0; 32]);
        let exporter = pipe
            .connection
            .export_keying_material(exporter, EXPORTER, None)?;
        let [client, server] = offers;
        let digest = session::digest(&[&exporter[..], self.certificate, client, server]);
        Ok(Session { digest, own, peers })
    }

    /// Makes the proof that the peer demands; `challenge` is the peer's.
    fn prove(
        &self,
        session: &Session,
        challenge: Option<Challenge>,
        turn: TakeTurn<'_>,
    ) -> Result<Proof, Error> {
        let (Some(demand), Some(issuer)) = (&session.peers.demand, self.issuer) else {
            return Ok(Proof::default());
        };
        let banks: Vec<Bank> = demand
            .banks
            .iter()
            .filter_map(|id| Bank::with_id(*id))
            .collect();
        let challenge = challenge
            .map(wire::read_credential)
            .transpose()
            .map_err(Error::Misbehaved)?;
        let turn = turn()?;
        let document = issuer
            .prove(&DocumentRequest {
                role: self.role,
                session: &session.digest,
                nonce: &session.peers.nonce,
                banks: &banks,
                challenge: challenge
                    .as_ref()
                    .map(|(kind, credential)| (*kind, credential)),
                for_stranger: self.role != PeerRole::Client,
            })
            .map_err(Error::Issuer)?;
        drop(turn);
        let collateral = demand.collateral.then(|| issuer.collateral(&document));
        let fits = |collateral: &Collateral| collateral.encoded_len() < MAX_COLLATERAL;
        Ok(Proof {
            document,
            collateral: collateral.flatten().filter(fits),
            ..Proof::default()
        })
    }

    /// Receives the peer's proof and verifies it with the judge.
    fn verify(
        &self,
        pipe: &mut Pipe<'_, '_>,
        session: &Session,
    ) -> Result<Option<Accepted>, Error> {
        let Some(judge) = &self.judge else {
            pipe.receive_empty()?;
            return Ok(None);
        };
        let demand = session.own.demand.as_ref();
        let max = if demand.is_some_and(|demand| demand.collateral) {
            MAX_PROOF_WITH_COLLATERAL
        } else {
            MAX_PROOF
        };
        let (proof, _) = pipe.receive::<Proof>(max)?;
        let judged = judge.proof(&Presented {
            identity: session.peers.identity.as_ref(),
            proof: &proof,
            nonce: &session.own.nonce,
            session: &session.digest,
        });
        judged.map(Some).map_err(Error::Refused)
    }
}

/// Returns whether an offer has at most as many parts as a TPM may need. Many empty parts would
/// need forty times their size in memory, and an unauthenticated peer could occupy it until its
/// deadline.
fn is_modest(offer: &Offer) -> bool {
    let banks = offer.demand.as_ref().map_or(0, |demand| demand.banks.len());
    let endorsements = offer.identity.iter().flat_map(|it| &it.endorsements);
    let (mut keys, mut chain) = (0, 0);
    for endorsement in endorsements {
        keys += 1;
        chain += endorsement.chain.len();
    }
    banks <= MAX_PARTS && keys <= MAX_PARTS && chain <= MAX_PARTS * MAX_PARTS
}

/// A message that can end the exchange.
pub(super) trait Ending: Message + Default {
    fn alert(&self) -> u32;
}

impl Ending for Offer {
    fn alert(&self) -> u32 {
        self.alert
    }
}

impl Ending for Proof {
    fn alert(&self) -> u32 {
        self.alert
    }
}

/// Messages over an established TLS connection.
pub(super) struct Pipe<'a, 'b> {
    pub connection: &'a mut Connection,
    pub peer: &'a mut Timed<'b>,
}

impl Pipe<'_, '_> {
    /// Sends a message, at the latest when this end waits for the next one. Returns its bytes without
    /// the length.
    pub fn send(&mut self, message: &impl Message) -> Result<Vec<u8>, Error> {
        let bytes = message.encode_to_vec();
        // our own messages are shorter than 4 GiB
        let length = (bytes.len() as u32).to_be_bytes();
        self.connection.set_buffer_limit(None);
        (self.connection.writer()).write_all(&[&length[..], &bytes].concat())?;
        Ok(bytes)
    }

    /// Sends what is not sent yet.
    pub fn flush(&mut self) -> Result<(), Error> {
        Ok((self.peer).write_all(&handshake::take_output(self.connection)?)?)
    }

    /// Receives a message of at most `max` bytes; returns its bytes too.
    pub fn receive<M: Ending>(&mut self, max: usize) -> Result<(M, Vec<u8>), Error> {
        let mut length = [0; 4];
        length.copy_from_slice(&self.read(4)?);
        let length = u32::from_be_bytes(length) as usize;
        if length > max {
            return Err(Error::Misbehaved(format!(
                "its message has {length} bytes, expected at most {max}"
            )));
        }
        let bytes = self.read(length)?;
        let message = transport::message::decode::<M>(&bytes)
            .map_err(|why| Error::Misbehaved(format!("the message cannot be decoded: {why}")))?;
        match u8::try_from(message.alert()) {
            Ok(0) => Ok((message, bytes)),
            Ok(alert) => Err(Error::PeerRefused(AlertDescription::from(alert))),
            Err(_) => Err(Error::Misbehaved("its alert is not one of TLS".into())),
        }
    }

    /// Receives a proof without a document; returns its challenge.
    fn receive_challenge(&mut self) -> Result<Option<Challenge>, Error> {
        let (proof, _) = self.receive::<Proof>(MAX_EMPTY_PROOF)?;
        if proof.document.is_empty() {
            Ok(proof.challenge)
        } else {
            Err(Error::Misbehaved(
                "it sends a proof that was not requested".into(),
            ))
        }
    }

    /// Receives a proof without a document and without a challenge.
    fn receive_empty(&mut self) -> Result<(), Error> {
        match self.receive_challenge()? {
            None => Ok(()),
            Some(_) => Err(Error::Misbehaved("it sends a challenge too late".into())),
        }
    }

    /// Receives the offer of the peer, and its bytes.
    fn receive_offer(&mut self) -> Result<(Offer, Vec<u8>), Error> {
        let (offer, bytes) = self.receive::<Offer>(MAX_OFFER)?;
        if !is_modest(&offer) {
            return Err(Error::Misbehaved(
                "its offer has more keys, certificates or banks than a TPM has".into(),
            ));
        }
        match offer.nonce.len() {
            NONCE => Ok((offer, bytes)),
            len => Err(Error::Misbehaved(format!(
                "its nonce has {len} bytes, expected {NONCE}"
            ))),
        }
    }

    /// Reads exactly `length` bytes. The memory grows with what arrives.
    fn read(&mut self, length: usize) -> Result<Vec<u8>, Error> {
        let mut bytes = Vec::new();
        let mut received = [0; 4096];
        while bytes.len() < length {
            let want = (length - bytes.len()).min(received.len());
            match self.connection.reader().read(&mut received[..want]) {
                Ok(0) => return Err(Error::Closed),
                Ok(len) => bytes.extend_from_slice(&received[..len]),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                    self.flush()?;
                    let len = match self.peer.read(&mut received)? {
                        0 => return Err(Error::Closed),
                        len => len,
                    };
                    handshake::feed(self.connection, &received[..len])?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(bytes)
    }

    /// Ends a failed exchange: tells the peer whose fault it is.
    fn refuse(&mut self, error: &Error) {
        let alert = match error {
            Error::TimedOut | Error::Closed | Error::Socket(_) | Error::PeerRefused(_) => return,
            Error::Refused(_) => u8::from(AlertDescription::AccessDenied),
            Error::Misbehaved(_) => u8::from(AlertDescription::DecodeError),
            _ => u8::from(AlertDescription::InternalError),
        };
        let refusal = Proof {
            alert: alert.into(),
            ..Proof::default()
        };
        // the connection has already failed: errors have no consequence
        let _ = self.send(&refusal);
        self.connection.send_close_notify();
        let rest = handshake::take_output(self.connection).unwrap_or_default();
        self.peer.give_up(&rest);
    }
}
