//! Whole exchanges of the strong form in which an attacker with the keys of the TLS connection alters the messages (TLS itself
//! stops other attackers). Both ends are genuine, and no end that requires a proof accepts one.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use prost::Message;
use rustls::crypto::CryptoProvider;
use rustls::crypto::cipher::{
    AeadKey, Iv, MessageDecrypter, MessageEncrypter, OutboundOpaqueMessage, OutboundPlainMessage,
    Tls13AeadAlgorithm, UnsupportedOperationError,
};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{
    ClientConfig, ClientConnection, Connection, ConnectionTrafficSecrets, ContentType,
    ServerConfig, ServerConnection, SupportedCipherSuite, Tls13CipherSuite,
};

use super::attacks::Believing;
use super::sockets;
use crate::dummy::{Dummy, OID};
use crate::exchange::End;
use crate::handshake::{self, Timed};
use crate::{Error, certificate, nonce};
use proto::attested::{Demand, Offer, Proof};
use tpm::{Credential, EndorsementKind, KeyEndorsement};
use transport::half_open::PeersTurn;
use verifier::refusal::Kind;
use verifier::{
    CredentialChallenge, DocumentRequest, Evidence, Identified, IssueError, Issuer, KeyName,
    MachineIdentity, Oid, PeerRole, Properties, Refusal, Validator, judge_of_any,
};

/// Alters a message, which is behind its length, of this end with this number. It is called once
/// for each message.
type Alteration = Arc<Mutex<dyn FnMut(PeerRole, usize, &[u8]) -> Vec<u8> + Send>>;

/// A cipher that encrypts something else.
struct AlteringCipher {
    cipher: &'static dyn Tls13AeadAlgorithm,
    sender: PeerRole,
    alteration: Alteration,
}

impl Tls13AeadAlgorithm for AlteringCipher {
    fn encrypter(&self, key: AeadKey, iv: Iv) -> Box<dyn MessageEncrypter> {
        Box::new(AlteringEncrypter {
            encrypter: self.cipher.encrypter(key, iv),
            sender: self.sender,
            alteration: self.alteration.clone(),
            pending: vec![],
            messages: 0,
        })
    }

    fn decrypter(&self, key: AeadKey, iv: Iv) -> Box<dyn MessageDecrypter> {
        self.cipher.decrypter(key, iv)
    }

    fn key_len(&self) -> usize {
        self.cipher.key_len()
    }

    fn extract_keys(
        &self,
        key: AeadKey,
        iv: Iv,
    ) -> Result<ConnectionTrafficSecrets, UnsupportedOperationError> {
        self.cipher.extract_keys(key, iv)
    }
}

struct AlteringEncrypter {
    encrypter: Box<dyn MessageEncrypter>,
    sender: PeerRole,
    alteration: Alteration,
    /// The bytes that were sent of an incomplete message.
    pending: Vec<u8>,
    messages: usize,
}

impl MessageEncrypter for AlteringEncrypter {
    fn encrypt(
        &mut self,
        message: OutboundPlainMessage<'_>,
        sequence: u64,
    ) -> Result<OutboundOpaqueMessage, rustls::Error> {
        if message.typ != ContentType::ApplicationData {
            return self.encrypter.encrypt(message, sequence);
        }
        self.pending.extend(message.payload.to_vec());
        let mut altered = vec![];
        while let Some((length, rest)) = self.pending.split_first_chunk::<4>()
            && let Some((_, rest)) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)
        {
            let rest = rest.to_vec();
            let framed = &self.pending[..self.pending.len() - rest.len()];
            let mut alter = self.alteration.lock().unwrap();
            altered.extend(alter(self.sender, self.messages, framed));
            self.messages += 1;
            self.pending = rest;
        }
        let message = OutboundPlainMessage {
            payload: altered[..].into(),
            ..message
        };
        self.encrypter.encrypt(message, sequence)
    }

    fn encrypted_payload_len(&self, length: usize) -> usize {
        self.encrypter.encrypted_payload_len(length)
    }
}

/// Returns a provider with one cipher suite. ML-KEM would take most of the time.
fn altering(sender: PeerRole, alteration: &Alteration) -> Arc<CryptoProvider> {
    let mut provider = rustls::crypto::ring::default_provider();
    provider.cipher_suites.truncate(1);
    for suite in &mut provider.cipher_suites {
        let SupportedCipherSuite::Tls13(genuine) = *suite else {
            panic!("ring prefers TLS 1.3");
        };
        *suite = SupportedCipherSuite::Tls13(Box::leak(Box::new(Tls13CipherSuite {
            common: rustls::CipherSuiteCommon { ..genuine.common },
            aead_alg: Box::leak(Box::new(AlteringCipher {
                cipher: genuine.aead_alg,
                sender,
                alteration: alteration.clone(),
            })),
            quic: None,
            ..*genuine
        })));
    }
    Arc::new(provider)
}

const SECRET: [u8; 32] = [3; 32];
const ROLES: [PeerRole; 3] = [PeerRole::Client, PeerRole::Server, PeerRole::JoinService];
const ENDORSEMENT: EndorsementKind = EndorsementKind::P256;

fn credential() -> Credential {
    Credential {
        blob: b"a blob".to_vec(),
        secret: b"a seed".to_vec(),
    }
}

/// A variant with a TPM that has this attestation key, and one certified endorsement key.
struct Certified;

impl Certified {
    const KEY: &[u8] = b"a key";

    fn endorsement() -> KeyEndorsement {
        KeyEndorsement {
            kind: ENDORSEMENT,
            certificate: b"a leaf".to_vec(),
            chain: vec![b"above".to_vec()],
        }
    }
}

impl Issuer for Certified {
    fn oid(&self) -> Oid {
        OID
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        Dummy(OID).issue(user_data, nonce)
    }

    fn identity(&self) -> Result<MachineIdentity, IssueError> {
        Ok(MachineIdentity {
            key: Certified::KEY.to_vec(),
            endorsements: vec![Certified::endorsement()],
        })
    }

    fn prove(&self, request: &DocumentRequest<'_>) -> Result<Vec<u8>, IssueError> {
        let genuine = credential();
        let secret = match request.challenge {
            Some((kind, credential))
                if kind == ENDORSEMENT
                    && credential.blob == genuine.blob
                    && credential.secret == genuine.secret =>
            {
                &SECRET[..]
            }
            Some(_) => return Err(IssueError::new("the TPM cannot decrypt it")),
            None => &[],
        };
        self.issue(&request.user_data(secret), request.nonce)
    }
}

impl Validator for Certified {
    fn properties(&self) -> Properties {
        Properties {
            challenges: true,
            ..Dummy(OID).properties()
        }
    }

    fn challenge(&self, peer: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
        if peer.key != Certified::KEY || peer.endorsements != [Certified::endorsement()] {
            return Err(Kind::Unproven.because("no certified key"));
        }
        Ok(Some(CredentialChallenge {
            kind: ENDORSEMENT,
            credential: credential(),
            secret: SECRET.into(),
            certified_by: String::new(),
            tpm: None,
        }))
    }

    fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
        let name = evidence.certified.map(|it| it.name);
        assert_eq!(name, Some(KeyName::of(Certified::KEY)));
        Dummy(OID).judge(evidence)
    }

    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        None
    }
}

/// Who proves itself to the other end: both challenge, or one end proves itself by a variant
/// without keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Proving {
    Both,
    Server,
    Client,
}

impl Proving {
    const ALL: [Proving; 3] = [Proving::Both, Proving::Server, Proving::Client];

    fn issuer(self, role: PeerRole) -> Option<Box<dyn Issuer>> {
        match (self, role) {
            (Proving::Both, _) => Some(Box::new(Certified)),
            (Proving::Server, PeerRole::Server) | (Proving::Client, PeerRole::Client) => {
                Some(Box::new(Dummy(OID)))
            }
            _ => None,
        }
    }

    fn validators(self, role: PeerRole) -> Vec<Arc<dyn Validator>> {
        match (self, role) {
            (Proving::Both, _) => vec![Arc::new(Certified)],
            (Proving::Server, PeerRole::Client) | (Proving::Client, PeerRole::Server) => {
                vec![Arc::new(Dummy(OID))]
            }
            _ => vec![],
        }
    }

    /// Returns how many messages each end sends: of the client, and of the server.
    fn messages(self) -> [usize; 2] {
        match self {
            Proving::Both => [3, 3],
            Proving::Server => [2, 2],
            Proving::Client => [2, 3],
        }
    }
}

type Accepted = Result<Option<verifier::Accepted>, Error>;

/// Makes an exchange between two genuine ends. Returns what the client and the server accept.
fn exchange(proving: Proving, alteration: Alteration, time: Duration) -> [Accepted; 2] {
    let own = certificate::issue(None, &[], false).unwrap();
    let server = ServerConfig::builder_with_provider(altering(PeerRole::Server, &alteration))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(CertifiedKey::clone(&own))));
    let client = ClientConfig::builder_with_provider(altering(PeerRole::Client, &alteration))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Believing))
        .with_no_client_auth();
    let client = ClientConnection::new(Arc::new(client), nonce::client().1).unwrap();
    let server = ServerConnection::new(Arc::new(server)).unwrap();
    let ends = [
        (PeerRole::Client, Connection::from(client)),
        (PeerRole::Server, server.into()),
    ];
    let (near, far) = sockets();
    let threads = ends
        .into_iter()
        .zip([near, far])
        .map(|((role, mut connection), socket)| {
            let certificate = own.cert[0].clone();
            thread::spawn(move || {
                let mut peer = Timed {
                    socket: &socket,
                    deadline: Instant::now() + time,
                    turn: &PeersTurn::default(),
                };
                handshake::complete(&mut connection, &mut peer, None)?;
                let issuer = proving.issuer(role);
                let end = End {
                    role,
                    issuer: issuer.as_deref(),
                    judge: judge_of_any(proving.validators(role)).map(|it| it.connection(&ROLES)),
                    certificate: &certificate,
                };
                end.run(&mut connection, &mut peer, &|| Ok(None))
            })
        });
    let threads: Vec<_> = threads.collect();
    let ends: Vec<Accepted> = threads
        .into_iter()
        .map(|thread| thread.join().expect("no panic"))
        .collect();
    ends.try_into().unwrap()
}

/// Long enough for an exchange in which no end waits for the other one in vain.
const AMPLE: Duration = Duration::from_secs(20);
/// For an exchange in which the ends may wait for each other until their deadline.
const SHORT: Duration = Duration::from_millis(200);

/// Returns all messages of an exchange that nobody alters, in their order.
fn genuine(proving: Proving) -> Vec<(PeerRole, usize, Vec<u8>)> {
    let messages = Arc::new(Mutex::new(vec![]));
    let seen = messages.clone();
    let record = move |role, number, message: &[u8]| {
        seen.lock().unwrap().push((role, number, message.to_vec()));
        message.to_vec()
    };
    for accepted in exchange(proving, Arc::new(Mutex::new(record)), AMPLE) {
        accepted.unwrap();
    }
    std::mem::take(&mut *messages.lock().unwrap())
}

/// Alters one message, and checks that no end that requires a proof accepts one. Returns whether the message was altered: an
/// alteration that returns `None` changes nothing.
fn refused(
    what: &str,
    proving: Proving,
    sender: PeerRole,
    number: usize,
    time: Duration,
    mut alter: impl FnMut(&[u8], &[Vec<u8>]) -> Option<Vec<u8>> + Send + 'static,
) -> bool {
    let is_last = match proving {
        Proving::Server => (sender, number) == (PeerRole::Client, 1),
        _ => (sender, number) == (PeerRole::Server, 2),
    };
    let is_altered = Arc::new(Mutex::new(false));
    let (done, mut earlier) = (is_altered.clone(), vec![]);
    let alteration = move |role, at, message: &[u8]| {
        let mut sent = message.to_vec();
        if (role, at) == (sender, number)
            && let Some(altered) = alter(message, &earlier)
        {
            *done.lock().unwrap() = altered != message;
            sent = altered;
        }
        earlier.push(message.to_vec());
        sent
    };
    let [client, server] = exchange(proving, Arc::new(Mutex::new(alteration)), time);
    let is_altered = *is_altered.lock().unwrap();
    for (role, accepted) in [(PeerRole::Client, client), (PeerRole::Server, server)] {
        // the sender of the last message does not learn whether the peer accepted it, nor does the sender of a complete message
        let is_done = role == sender && (is_last || what == "twice");
        let validates = !proving.validators(role).is_empty();
        assert!(
            accepted.is_err() || !is_altered || is_done || !validates,
            "{proving:?}, message {number} of the {sender:?}, {what}: accepted by the {role:?}",
        );
    }
    is_altered
}

/// Calls `case` for each message of each kind of exchange.
fn each_message(mut case: impl FnMut(Proving, PeerRole, usize, &[u8])) {
    for proving in Proving::ALL {
        for (sender, number, message) in genuine(proving) {
            case(proving, sender, number, &message);
        }
    }
}

#[test]
fn no_byte_of_a_message_can_be_altered() {
    let mut cases = 0;
    each_message(|proving, sender, number, message| {
        for at in 0..message.len() {
            // a longer message is awaited
            let time = if at < 4 { SHORT } else { AMPLE };
            let what = format!("byte {at}");
            let alter = move |message: &[u8], _: &[Vec<u8>]| {
                let mut altered = message.to_vec();
                altered[at] ^= 1 << (at % 8);
                Some(altered)
            };
            cases += usize::from(refused(&what, proving, sender, number, time, alter));
        }
    });
    assert!(cases > 700, "{cases}");
}

#[test]
fn no_message_can_be_dropped_repeated_or_taken_from_elsewhere() {
    let mut cases = 0;
    for proving in Proving::ALL {
        let before = genuine(proving);
        let [client, server] = proving.messages();
        assert_eq!(before.len(), client + server);
        for (sender, number, old) in before {
            let mut case = |what: &str, time, alter: fn(&[u8], &[Vec<u8>], &[u8]) -> _| {
                let old = old.clone();
                let alter =
                    move |message: &[u8], earlier: &[Vec<u8>]| alter(message, earlier, &old);
                cases += usize::from(refused(what, proving, sender, number, time, alter));
            };
            case("dropped", SHORT, |_, _, _| Some(vec![]));
            case("of another session", AMPLE, |_, _, old| Some(old.to_vec()));
            case("the first message again", AMPLE, |_, earlier, _| {
                earlier.first().cloned()
            });
            case("the previous message again", AMPLE, |_, earlier, _| {
                earlier.last().cloned()
            });
            case("the one before again", AMPLE, |_, earlier, _| {
                earlier.iter().nth_back(1).cloned()
            });
            case("of the other end's last turn", AMPLE, |_, earlier, _| {
                earlier.iter().nth_back(2).cloned()
            });
            // what follows the last message belongs to HTTP/2, and an empty message repeats as the
            // server's last one
            let last = match (proving, sender) {
                (Proving::Client, PeerRole::Server) => 1,
                (_, PeerRole::Client) => client - 1,
                _ => server - 1,
            };
            if number < last {
                case("twice", AMPLE, |message, _, _| Some(message.repeat(2)));
            }
        }
    }
    assert!(cases > 60, "{cases}");
}

/// The change, and the place.
type Change<M> = (&'static str, fn(&mut M));

/// Returns the message, behind its length, after a change of its fields.
fn changed<M: Message + Default>(message: &[u8], change: fn(&mut M)) -> Vec<u8> {
    let mut fields = M::decode(&message[4..]).unwrap();
    change(&mut fields);
    let bytes = fields.encode_to_vec();
    [&(bytes.len() as u32).to_be_bytes()[..], &bytes].concat()
}

#[test]
fn no_field_of_an_offer_can_be_left_out_or_changed() {
    let changes: [Change<Offer>; 22] = [
        ("no nonce", |it| it.nonce.clear()),
        ("a short nonce", |it| it.nonce.truncate(31)),
        ("a long nonce", |it| it.nonce.push(0)),
        ("no demand", |it| it.demand = None),
        ("another demand", |it| {
            it.demand = match &it.demand {
                None => Some(Demand::default()),
                Some(_) => None,
            }
        }),
        ("no banks", |it| demand(it).banks.clear()),
        ("SHA-1", |it| demand(it).banks = vec![4]),
        ("one bank more", |it| demand(it).banks.push(12)),
        ("no announcement", |it| demand(it).challenges ^= true),
        ("collateral", |it| demand(it).collateral ^= true),
        ("no identity", |it| it.identity = None),
        ("no variant", |it| identity(it).variant.clear()),
        ("another key", |it| {
            identity(it).key = b"another key".to_vec()
        }),
        ("no endorsements", |it| identity(it).endorsements.clear()),
        ("an endorsement twice", |it| {
            let endorsements = &mut identity(it).endorsements;
            endorsements.extend(endorsements.first().cloned());
        }),
        ("another template", |it| {
            if let Some(endorsement) = identity(it).endorsements.first_mut() {
                endorsement.template ^= 8;
            }
        }),
        ("no chain", |it| {
            if let Some(endorsement) = identity(it).endorsements.first_mut() {
                endorsement.chain.clear();
            }
        }),
        ("no challenge", |it| it.challenge = None),
        ("a challenge", |it| it.challenge = Some(Default::default())),
        ("an alert", |it| it.alert = 49),
        ("an alert that is none", |it| it.alert = 256),
        ("a large alert", |it| it.alert = u32::MAX),
    ];
    fn demand(offer: &mut Offer) -> &mut Demand {
        offer.demand.get_or_insert_default()
    }
    fn identity(offer: &mut Offer) -> &mut proto::attested::Identity {
        offer.identity.get_or_insert_default()
    }
    let mut cases = 0;
    each_message(|proving, sender, number, _| {
        if number > 0 {
            return;
        }
        for (what, change) in changes {
            // an end may await a message that the other one does not know of
            let alter =
                move |message: &[u8], _: &[Vec<u8>]| Some(changed::<Offer>(message, change));
            cases += usize::from(refused(what, proving, sender, 0, SHORT, alter));
        }
        // a field that no version knows
        let alter = |message: &[u8], _: &[Vec<u8>]| {
            let body = [&message[4..], b"\x78\x01"].concat();
            Some([&(body.len() as u32).to_be_bytes()[..], &body].concat())
        };
        cases += usize::from(refused(
            "an unknown field",
            proving,
            sender,
            0,
            AMPLE,
            alter,
        ));
    });
    assert!(cases > 80, "{cases}");
}

#[test]
fn no_field_of_a_proof_can_be_left_out_or_changed() {
    let changes: [Change<Proof>; 11] = [
        ("no document", |it| it.document.clear()),
        ("a document", |it| it.document.insert(0, b'{')),
        ("a long document", |it| it.document.resize(70 << 10, b' ')),
        ("no challenge", |it| it.challenge = None),
        ("another template", |it| {
            it.challenge.get_or_insert_default().template ^= 8
        }),
        ("another blob", |it| {
            it.challenge.get_or_insert_default().credential_blob.push(0)
        }),
        ("another secret", |it| {
            it.challenge.get_or_insert_default().secret.push(0)
        }),
        ("no secret", |it| {
            it.challenge.get_or_insert_default().secret.clear()
        }),
        ("an alert", |it| it.alert = 49),
        ("an alert that is none", |it| it.alert = 256),
        ("a large alert", |it| it.alert = u32::MAX),
    ];
    let mut cases = 0;
    each_message(|proving, sender, number, message| {
        let has_document = |message: &[u8]| !Proof::decode(message).unwrap().document.is_empty();
        if number == 0 {
            return;
        }
        let is_document = has_document(&message[4..]);
        for (what, change) in changes {
            // a challenge beside a document means nothing
            if is_document
                && what.contains("template") | what.contains("blob") | what.contains("secret")
            {
                continue;
            }
            let alter =
                move |message: &[u8], _: &[Vec<u8>]| Some(changed::<Proof>(message, change));
            cases += usize::from(refused(what, proving, sender, number, AMPLE, alter));
        }
    });
    assert!(cases > 50, "{cases}");
}
