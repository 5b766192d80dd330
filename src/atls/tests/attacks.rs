//! The attacks on attested TLS that are known from the literature, each against both forms: relay
//! by somebody with the private key of the certificate, replay of a document within its
//! connection's lifetime, reflection, and downgrade.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use prost::Message;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{
    ClientConfig, ClientConnection, Connection, ServerConfig, ServerConnection,
    SupportedProtocolVersion,
};

use super::dummy::{Dummy, OID};
use super::exchange::Pipe;
use super::handshake::{self, Timed};
use super::*;
use super::{issuer, sockets, soon, validators};
use attest::{IssueError, Issuer, Oid};
use proto::attested::{Offer, Proof};
use transport::half_open::PeersTurn;

/// The attacker's end of a TLS connection.
struct Taken {
    connection: Connection,
    socket: TcpStream,
    turn: PeersTurn,
}

impl Taken {
    fn handshake(connection: impl Into<Connection>, socket: TcpStream) -> Result<Taken, Error> {
        let mut taken = Taken {
            connection: connection.into(),
            socket,
            turn: PeersTurn::default(),
        };
        let mut peer = Timed {
            socket: &taken.socket,
            deadline: soon(),
            turn: &taken.turn,
        };
        handshake::complete(&mut taken.connection, &mut peer, None)?;
        Ok(taken)
    }

    /// Completes the handshake with a victim that connected, with the private key of `certified`.
    fn server(socket: TcpStream, certified: Arc<CertifiedKey>, alpn: &[u8]) -> Taken {
        Taken::try_server(socket, certified, alpn).unwrap()
    }

    fn try_server(
        socket: TcpStream,
        certified: Arc<CertifiedKey>,
        alpn: &[u8],
    ) -> Result<Taken, Error> {
        let mut config = ServerConfig::builder_with_provider(tls::provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(Stolen(certified)));
        config.alpn_protocols = vec![alpn.to_vec()];
        Taken::handshake(ServerConnection::new(Arc::new(config)).unwrap(), socket)
    }

    /// Completes the handshake with the genuine server, whose certificate is believed.
    fn client(socket: TcpStream, alpn: &[u8]) -> Taken {
        // each ClientHello has a nonce for servers of the old form
        Taken::client_with(socket, alpn, nonce::client().1)
    }

    fn client_with(socket: TcpStream, alpn: &[u8], name: ServerName<'static>) -> Taken {
        Taken::try_client(socket, &rustls::version::TLS13, alpn, name).unwrap()
    }

    fn try_client(
        socket: TcpStream,
        version: &'static SupportedProtocolVersion,
        alpn: &[u8],
        name: ServerName<'static>,
    ) -> Result<Taken, Error> {
        let mut config = ClientConfig::builder_with_provider(tls::provider())
            .with_protocol_versions(&[version])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Believing))
            .with_no_client_auth();
        config.alpn_protocols = vec![alpn.to_vec()];
        let connection = ClientConnection::new(Arc::new(config), name).unwrap();
        Taken::handshake(connection, socket)
    }

    fn pipe<T>(
        &mut self,
        work: impl FnOnce(&mut Pipe<'_, '_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut peer = Timed {
            socket: &self.socket,
            deadline: soon(),
            turn: &self.turn,
        };
        work(&mut Pipe {
            connection: &mut self.connection,
            peer: &mut peer,
        })
    }

    fn receive<M: super::exchange::Ending>(&mut self) -> Result<M, Error> {
        self.pipe(|pipe| pipe.receive(64 << 10))
            .map(|(message, _)| message)
    }

    fn send(&mut self, message: &impl Message) -> Result<(), Error> {
        self.pipe(|pipe| pipe.send(message).and_then(|_| pipe.flush()))
    }
}

/// Uses a key that the attacker took from the server's memory.
#[derive(Debug)]
struct Stolen(Arc<CertifiedKey>);

impl ResolvesServerCert for Stolen {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.clone())
    }
}

/// Believes every certificate.
#[derive(Debug)]
pub struct Believing;

impl rustls::client::danger::ServerCertVerifier for Believing {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        tls::provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}

/// Connects a client to an attacker; returns what the client gets, and what the attacker's work
/// returns.
fn attack<T: Send + 'static>(
    client: Client,
    attacker: impl FnOnce(TcpStream) -> T + Send + 'static,
) -> (Result<(), Error>, T) {
    let (near, far) = sockets();
    let attacker = thread::spawn(move || attacker(far));
    let client = client.connect(near, soon()).map(drop);
    (client, attacker.join().unwrap())
}

fn refusal(result: Result<(), Error>) -> String {
    result
        .unwrap_err()
        .refused()
        .expect("a refusal")
        .to_string()
}

/// The old form falls to this attack: a document is bound to the key of the certificate, and the
/// attacker has this key.
#[test]
fn somebody_with_the_certificate_s_key_relays_in_the_old_form_but_not_in_the_strong_form() {
    // the genuine server made a certificate with a document for the nonce of the victim, which the
    // attacker passed on
    let (near, mut far) = sockets();
    let victim = thread::spawn(move || {
        Client::new(None, judge_of_any(validators()))
            .only_old()
            .connect(near, soon())
    });
    let name = server_name(&peek(&mut far));
    let nonce = nonce::from_server_name(Some(&name)).unwrap();
    let stolen = certificate::issue(Some(&Dummy(OID)), &nonce, false).unwrap();
    let _taken = Taken::server(far, stolen, ALPN_H2);
    assert!(victim.join().unwrap().is_ok());

    // in the strong form, with that key or with his own
    for is_stolen in [true, false] {
        let (near, far) = sockets();
        let server = Server::new(issuer(), None);
        let certified = if is_stolen {
            server.bare().unwrap().0.clone()
        } else {
            certificate::issue(None, &[], false).unwrap()
        };
        let genuine = thread::spawn(move || server.handshake(far, soon()));
        let (victim, ()) = attack(
            Client::new(None, judge_of_any(validators())),
            move |socket| {
                let mut victim = Taken::server(socket, certified, proto::attested::ALPN);
                let mut server = Taken::client(near, proto::attested::ALPN);
                let offer: Offer = victim.receive().unwrap();
                server.send(&offer).unwrap();
                let offer: Offer = server.receive().unwrap();
                victim.send(&offer).unwrap();
                let proof: Proof = server.receive().unwrap();
                assert!(!proof.document.is_empty());
                victim.send(&proof).unwrap();
                assert!(matches!(
                    victim.receive::<Proof>(),
                    Err(Error::PeerRefused(rustls::AlertDescription::AccessDenied))
                ));
            },
        );
        assert_eq!(
            refusal(victim),
            "its attestation document is for another connection"
        );
        drop(genuine.join().unwrap());
    }
}

/// The same relay between a client that proves itself and a server that believes it.
#[test]
fn a_client_s_proof_cannot_be_relayed_to_a_server_either() {
    let (near, far) = sockets();
    let genuine = thread::spawn(move || {
        Server::new(None, judge_of_any(validators()))
            .handshake(far, soon())
            .map(drop)
    });
    let (_, refused) = attack(Client::new(issuer(), None), move |socket| {
        let bare = certificate::issue(None, &[], false).unwrap();
        let mut victim = Taken::server(socket, bare, proto::attested::ALPN);
        let mut server = Taken::client(near, proto::attested::ALPN);
        server.send(&victim.receive::<Offer>().unwrap()).unwrap();
        victim.send(&server.receive::<Offer>().unwrap()).unwrap();
        victim.send(&server.receive::<Proof>().unwrap()).unwrap();
        server.send(&victim.receive::<Proof>().unwrap()).unwrap();
        server.receive::<Proof>().map(drop)
    });
    assert!(matches!(
        refused,
        Err(Error::PeerRefused(rustls::AlertDescription::AccessDenied))
    ));
    assert_eq!(
        refusal(genuine.join().unwrap()),
        "its attestation document is for another connection"
    );
}

/// Keeps the documents that it makes, as an attacker who watched them would.
struct Kept(Mutex<Vec<Vec<u8>>>);

impl Issuer for Kept {
    fn oid(&self) -> Oid {
        OID
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        let document = Dummy(OID).issue(user_data, nonce)?;
        self.0.lock().unwrap().push(document.clone());
        Ok(document)
    }
}

/// The document is that of a genuine server for the victim's nonce. It does not matter whether that
/// server is another machine, or the victim itself, whose proof comes back.
#[test]
fn a_document_in_the_certificate_of_a_man_in_the_middle_is_for_another_key() {
    let (near, far) = sockets();
    let kept = Arc::new(Kept(Mutex::default()));
    let server = Server::new(Some(kept.clone()), None);
    let genuine = thread::spawn(move || server.handshake(far, soon()).map(drop));
    let client = Client::new(None, judge_of_any(validators())).only_old();
    let (victim, ()) = attack(client, move |mut socket| {
        let name = String::from_utf8(server_name(&peek(&mut socket))).unwrap();
        let _server = Taken::client_with(near, ALPN_H2, name.try_into().unwrap());
        let document = kept.0.lock().unwrap()[0].clone();
        let own = certificate::issue(Some(&Replayed(document)), &[], false).unwrap();
        assert!(Taken::try_server(socket, own, ALPN_H2).is_err());
    });
    genuine.join().unwrap().unwrap();
    assert_eq!(
        refusal(victim),
        "its attestation document is for another key than its certificate's"
    );
}

/// Always gives the same document.
struct Replayed(Vec<u8>);

impl Issuer for Replayed {
    fn oid(&self) -> Oid {
        OID
    }

    fn issue(&self, _: &[u8], _: &[u8]) -> Result<Vec<u8>, IssueError> {
        Ok(self.0.clone())
    }
}

#[test]
fn a_document_of_an_earlier_connection_is_refused_in_both_forms() {
    for old in [false, true] {
        let client = |issuer: Arc<dyn Issuer>| {
            if old {
                Client::new(Some(issuer), None).only_old()
            } else {
                Client::new(Some(issuer), None)
            }
        };
        let server = || Server::new(None, judge_of_any(validators()));
        let kept = Arc::new(Kept(Mutex::default()));
        let (first, accepted) = meet(client(kept.clone()), server());
        assert!(first.is_ok() && accepted.is_ok());
        let document = kept.0.lock().unwrap()[0].clone();
        let (_, refused) = meet(client(Arc::new(Replayed(document))), server());
        let refused = refusal(refused.map(drop));
        assert_eq!(refused, "the document is for another nonce");
    }
}

/// A server that has nothing to prove itself sends the client's own proof back.
#[test]
fn a_proof_cannot_be_reflected() {
    let (victim, ()) = attack(
        Client::new(issuer(), judge_of_any(validators())),
        |socket| {
            let bare = certificate::issue(None, &[], false).unwrap();
            let mut victim = Taken::server(socket, bare, proto::attested::ALPN);
            let offer: Offer = victim.receive().unwrap();
            // the same nonce, so that the document fits it
            victim.send(&offer).unwrap();
            // the client proves nothing before it has seen a proof
            victim.send(&Proof::default()).unwrap();
            assert!(victim.receive::<Proof>().is_err());
        },
    );
    assert!(refusal(victim).starts_with("not JSON"));
    // and the roles differ in the user data
    let session = [1; 32];
    use attest::{PeerRole, session::user_data};
    assert_ne!(
        user_data(PeerRole::Client, &session, b""),
        user_data(PeerRole::Server, &session, b"")
    );
}

/// Returns the first bytes that arrive, and leaves them in the socket.
fn peek(socket: &mut TcpStream) -> Vec<u8> {
    let mut hello = vec![0; 4096];
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let len = socket.peek(&mut hello).unwrap();
        // the length of the record (RFC 8446 §5.1)
        if len > 5 && len >= 5 + usize::from(u16::from_be_bytes([hello[3], hello[4]])) {
            hello.truncate(len);
            return hello;
        }
        assert!(Instant::now() < end);
        thread::sleep(Duration::from_millis(5));
    }
}

fn server_name(hello: &[u8]) -> Vec<u8> {
    let mut hello = hello[5..].to_vec();
    hello::hide_server_name(&mut hello).unwrap().unwrap()
}

/// Carries bytes between a client and a server, and changes the first flight of the client or of
/// the server.
fn between(client: TcpStream, server: TcpStream, change_hello: impl FnOnce(&mut Vec<u8>)) {
    let mut hello = vec![];
    (&client)
        .take(peek(&mut client.try_clone().unwrap()).len() as u64)
        .read_to_end(&mut hello)
        .unwrap();
    change_hello(&mut hello);
    (&server).write_all(&hello).unwrap();
    let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
    let back = thread::spawn(move || std::io::copy(&mut &back.0, &mut &back.1));
    let _ = std::io::copy(&mut &client, &mut &server);
    let _ = server.shutdown(std::net::Shutdown::Both);
    let _ = back.join().unwrap();
    let _ = client.shutdown(std::net::Shutdown::Both);
}

/// Connects a client and a server through somebody who changes the ClientHello. Returns what each
/// side gets.
fn meet_through(
    change: impl FnOnce(&mut Vec<u8>) + Send + 'static,
    client: Client,
) -> [Result<(), Error>; 2] {
    let (near, far) = sockets();
    let (server_near, server_far) = sockets();
    let server = thread::spawn(move || {
        Server::new(issuer(), None)
            .handshake(server_far, soon())
            .map(drop)
    });
    let middle = thread::spawn(move || between(far, server_near, change));
    let client = client.connect(near, soon()).map(drop);
    let server = server.join().unwrap();
    middle.join().unwrap();
    [client, server]
}

/// Each change of the ClientHello makes the server select the old form; the transcripts of the two
/// ends then differ.
#[test]
fn an_offer_of_the_strong_form_that_is_stripped_on_the_way_ends_the_handshake() {
    // an offer of another protocol, and of TLS 1.2 alone (supported_versions, RFC 8446 §4.2.1); no
    // length changes
    let protocol: fn(&mut Vec<u8>) = |hello| replace(hello, proto::attested::ALPN, 0, b'x');
    let version: fn(&mut Vec<u8>) = |hello| replace(hello, b"\x00\x2b\x00\x03\x02\x03\x04", 6, 3);
    for accepted in [validators(), vec![]] {
        let client = || Client::new(None, judge_of_any(accepted.clone()));
        for (change, client) in [
            (protocol, client()),
            (version, client()),
            (version, client().only_old()),
        ] {
            let ends = meet_through(change, client);
            assert!(ends.iter().all(Result::is_err), "{ends:?}");
        }
    }
    // the test itself: without a change the same way works
    for end in meet_through(|_| {}, Client::new(None, judge_of_any(validators()))) {
        end.unwrap();
    }
}

/// Replaces a byte in the only place that has these bytes.
fn replace(hello: &mut [u8], bytes: &[u8], at: usize, new: u8) {
    let place = hello.windows(bytes.len()).position(|it| it == bytes);
    hello[place.unwrap() + at] = new;
}

/// TLS 1.2 shows the certificates to everybody, and has no exporter that covers the handshake
/// without a further extension.
#[test]
fn a_server_with_only_tls_1_2_is_refused() {
    for accepted in [validators(), vec![]] {
        let (victim, ()) = attack(Client::new(None, judge_of_any(accepted)), |socket| {
            let mut config = ServerConfig::builder_with_provider(tls::provider())
                .with_protocol_versions(&[&rustls::version::TLS12])
                .unwrap()
                .with_no_client_auth()
                .with_cert_resolver(Arc::new(Stolen(
                    certificate::issue(None, &[], false).unwrap(),
                )));
            config.alpn_protocols = vec![proto::attested::ALPN.to_vec()];
            let server = ServerConnection::new(Arc::new(config)).unwrap();
            let _ = Taken::handshake(server, socket);
        });
        assert!(matches!(victim, Err(Error::PeerRefused(_))), "{victim:?}");
    }
}

#[test]
fn a_client_with_only_tls_1_2_is_refused() {
    for issuer in [issuer(), None] {
        let (near, far) = sockets();
        let server = thread::spawn(move || {
            Server::new(issuer, judge_of_any(validators()))
                .handshake(far, soon())
                .map(drop)
        });
        let (version, name) = (&rustls::version::TLS12, nonce::client().1);
        let attacker = Taken::try_client(near, version, proto::attested::ALPN, name);
        let refused = server.join().unwrap();
        assert!(
            matches!(refused, Err(Error::Incompatible(_))),
            "{refused:?}"
        );
        drop(attacker);
    }
}

#[test]
fn an_end_that_requires_the_strong_form_refuses_the_old_one() {
    let (client, server) = meet(
        Client::new(None, judge_of_any(validators())).require_strong(),
        Server::new(issuer(), None).only_old(),
    );
    assert!(client.is_err() && server.is_err());
    let (client, server) = meet(
        Client::new(None, judge_of_any(validators())).only_old(),
        Server::new(issuer(), None).require_strong(),
    );
    assert!(client.is_err() && server.is_err());
    // a server that ignores ALPN
    let (victim, ()) = attack(Client::new(None, None).require_strong(), |socket| {
        let mut config = ServerConfig::builder_with_provider(tls::provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(Stolen(
                certificate::issue(None, &[], false).unwrap(),
            )));
        config.alpn_protocols = vec![];
        Taken::handshake(ServerConnection::new(Arc::new(config)).unwrap(), socket).unwrap();
    });
    assert!(matches!(victim, Err(Error::Incompatible(_))), "{victim:?}");
}

/// The old form without a document where the client demands one: the certificate of the strong form
/// does not pass.
#[test]
fn a_bare_certificate_proves_nothing_in_the_old_form() {
    let (victim, _) = attack(Client::new(None, judge_of_any(validators())), |socket| {
        drop(Taken::server(
            socket,
            certificate::issue(None, &[], false).unwrap(),
            ALPN_H2,
        ));
    });
    assert!(refusal(victim).contains("got no document"));
}

/// Many empty parts need much more memory than the message has bytes.
#[test]
fn an_offer_with_more_parts_than_a_tpm_has_is_refused_before_anything_is_proved() {
    use proto::attested::{Demand, Endorsement, Identity};
    let identity = |endorsements| Identity {
        variant: OID.to_vec(),
        key: vec![],
        endorsements,
    };
    let endorsement = |chain: usize| Endorsement {
        template: 0x01c0_0002,
        certificate: vec![],
        chain: vec![vec![]; chain],
    };
    let many = [
        (identity(vec![endorsement(0); 9]), vec![]),
        (identity(vec![endorsement(65)]), vec![]),
        (identity(vec![]), vec![11; 9]),
    ];
    for (identity, banks) in many {
        let (near, far) = sockets();
        let genuine = thread::spawn(move || {
            Server::new(issuer(), judge_of_any(validators()))
                .handshake(far, soon())
                .map(drop)
        });
        let mut attacker = Taken::client(near, proto::attested::ALPN);
        let offer = Offer {
            nonce: vec![1; 32],
            demand: Some(Demand {
                banks,
                challenges: false,
                collateral: false,
            }),
            identity: Some(identity),
            ..Offer::default()
        };
        attacker.send(&offer).unwrap();
        let got = attacker.receive::<Offer>().map(drop);
        assert!(matches!(got, Err(Error::PeerRefused(_))), "{got:?}");
        let error = genuine.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Misbehaved(_)), "{error}");
    }
}

#[test]
fn messages_that_are_too_long_empty_or_out_of_order_end_the_exchange() {
    for message in [
        &b"\xff\xff\xff\xff"[..],
        b"\0\0\x40\x01",
        b"\0\0\0\0",
        b"\0\0\0\x01\xff",
        b"\0\0\0\x02\x0a\x20",
        // a proof where an offer is due
        b"\0\0\0\x03\x0a\x01x",
    ] {
        let (near, far) = sockets();
        let genuine = thread::spawn(move || {
            Server::new(issuer(), judge_of_any(validators()))
                .handshake(far, soon())
                .map(drop)
        });
        let mut attacker = Taken::client(near, proto::attested::ALPN);
        attacker
            .pipe(|pipe| {
                pipe.connection.writer().write_all(message)?;
                let records = handshake::take_output(pipe.connection)?;
                Ok(pipe.peer.write_all(&records)?)
            })
            .unwrap();
        let error = genuine.join().unwrap().unwrap_err();
        assert!(matches!(error, Error::Misbehaved(_)), "{error}");
    }
}

/// A client that demands collateral takes a longer proof than another one, up to a limit.
#[test]
fn a_proof_has_a_limit_with_and_without_collateral() {
    use super::collateral::Taking;
    for (takes, limit) in [(false, 64 << 10), (true, 192 << 10)] {
        let client = Client::new(None, Some(judge(Taking::new(takes))));
        let (victim, ()) = attack(client, move |socket| {
            let bare = certificate::issue(None, &[], false).unwrap();
            let mut victim = Taken::server(socket, bare, proto::attested::ALPN);
            let offer: Offer = victim.receive().unwrap();
            assert_eq!(offer.demand.as_ref().unwrap().collateral, takes);
            victim.send(&offer).unwrap();
            let length = (limit as u32 + 1).to_be_bytes();
            let sent = victim.pipe(|pipe| {
                pipe.connection.writer().write_all(&length)?;
                let records = handshake::take_output(pipe.connection)?;
                Ok(pipe.peer.write_all(&records)?)
            });
            sent.unwrap();
            assert!(victim.receive::<Proof>().is_err());
        });
        let error = victim.err().unwrap().to_string();
        let expected = format!("has {} bytes, expected at most {limit}", limit + 1);
        assert!(error.contains(&expected), "{error}");
    }
}
