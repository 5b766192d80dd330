//! Both roles against each other, over loopback sockets.

mod alterations;
mod attacks;
mod collateral;
mod second_hello;

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::dummy::{Dummy, OID, OTHER_OID};
use super::*;
use support::mutation::mutations;
use transport::Transport;
use transport::half_open::PeersTurn;
use verifier::refusal::Kind;
use verifier::{
    CredentialChallenge, Evidence, Identified, IssueError, Issuer, MachineIdentity, Oid,
    Properties, Refusal, Validator, judge, judge_of_any,
};

pub type Issuers = Option<Arc<dyn Issuer>>;
pub type Validators = Vec<Arc<dyn Validator>>;

const TIME: Duration = Duration::from_secs(20);

/// Completes the handshake of a server; returns the TLS connection.
fn established(server: &Server, socket: &TcpStream) -> rustls::Connection {
    let established = server.establish(socket, soon(), &PeersTurn::default());
    established.unwrap().0
}

pub fn soon() -> Instant {
    Instant::now() + TIME
}

pub fn issuer() -> Issuers {
    Some(Arc::new(Dummy(OID)))
}

pub fn validators() -> Validators {
    vec![Arc::new(Dummy(OID))]
}

/// Returns two connected sockets; the second one is the accepted one.
pub fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

/// Connects client and server, and returns the result of each side.
pub fn meet(
    client: Client,
    server: Server,
) -> (Result<Transport, Error>, Result<Transport, Error>) {
    let (near, far) = sockets();
    let server = thread::spawn(move || server.handshake(far, soon()));
    let client = client.connect(near, soon());
    (client, server.join().unwrap())
}

/// Connects a client and a server of which one refuses the other, and returns the error of each
/// side.
fn part(client: Client, server: Server) -> (Error, Error) {
    let (near, far) = sockets();
    let server = thread::spawn(move || server.handshake(far, soon()));
    let client = outcome(client.connect(near, soon()));
    let server = server.join().unwrap().map(|_| ());
    (client.unwrap_err(), server.unwrap_err())
}

/// Sends a line in each direction.
fn greet(client: &mut Transport, server: &mut Transport) -> io::Result<()> {
    for (from, to) in [
        (&mut client.writer, &mut server.reader),
        (&mut server.writer, &mut client.reader),
    ] {
        from.write_all(b"hello\n")?;
        from.flush()?;
        let mut line = [0; 6];
        to.read_exact(&mut line)?;
        assert_eq!(&line, b"hello\n");
    }
    Ok(())
}

#[test]
fn every_mode_carries_data_both_ways() {
    for (server_attests, client_attests) in
        [(true, true), (true, false), (false, true), (false, false)]
    {
        let client = Client::new(
            if client_attests { issuer() } else { None },
            judge_of_any(if server_attests { validators() } else { vec![] }),
        );
        let server = Server::new(
            if server_attests { issuer() } else { None },
            judge_of_any(if client_attests { validators() } else { vec![] }),
        );
        let (client, server) = meet(client, server);
        greet(&mut client.unwrap(), &mut server.unwrap()).unwrap();
    }
}

/// Refuses every document, with a reason.
struct Picky;

impl Validator for Picky {
    fn properties(&self) -> Properties {
        Dummy(OID).properties()
    }

    fn challenge(&self, _: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
        Ok(None)
    }

    fn judge(&self, _: &Evidence<'_>) -> Result<Identified, Refusal> {
        Err(Kind::Unproven.because("PCR 4 is 00, not 11"))
    }

    fn of_connection(&self) -> Option<Arc<dyn Validator>> {
        None
    }
}

/// Gives strangers another document than [`Issuer::issue`] does.
struct TwoDocuments;

impl Issuer for TwoDocuments {
    fn oid(&self) -> Oid {
        OID
    }

    fn issue(&self, _: &[u8], _: &[u8]) -> Result<Vec<u8>, IssueError> {
        Ok(b"not for strangers".to_vec())
    }

    fn issue_for_stranger(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        Dummy(OID).issue(user_data, nonce)
    }
}

#[test]
fn a_server_makes_the_document_of_its_certificate_for_a_stranger() {
    let issuer: Issuers = Some(Arc::new(TwoDocuments));
    let (client, server) = meet(
        Client::new(None, judge_of_any(validators())),
        Server::new(issuer, None).only_old(),
    );
    greet(&mut client.unwrap(), &mut server.unwrap()).unwrap();
}

/// Issues documents slowly, and counts how many are issued at the same time.
struct Slow {
    now: AtomicUsize,
    most: AtomicUsize,
    time: Duration,
}

impl Slow {
    fn new(time: Duration) -> Arc<Slow> {
        Arc::new(Slow {
            now: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
            time,
        })
    }
}

impl Issuer for Slow {
    fn oid(&self) -> Oid {
        OID
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        self.most.fetch_max(
            self.now.fetch_add(1, Ordering::SeqCst) + 1,
            Ordering::SeqCst,
        );
        thread::sleep(self.time);
        self.now.fetch_sub(1, Ordering::SeqCst);
        Dummy(OID).issue(user_data, nonce)
    }
}

struct Broken;

impl Issuer for Broken {
    fn oid(&self) -> Oid {
        OID
    }

    fn issue(&self, _: &[u8], _: &[u8]) -> Result<Vec<u8>, IssueError> {
        Err(IssueError::new("the TPM does not answer"))
    }
}

/// Returns whether the server accepts the client. In TLS 1.3 the client may learn that only from
/// its first read.
fn outcome(client: Result<Transport, Error>) -> Result<(), Error> {
    let mut transport = client?;
    transport.socket.set_read_timeout(Some(TIME)).unwrap();
    match transport.reader.read_exact(&mut [0]) {
        Ok(()) => Ok(()),
        Err(error) => Err(match error.downcast::<Error>() {
            Ok(error) => error,
            Err(error) => error.into(),
        }),
    }
}

#[test]
fn any_of_several_validators_may_know_the_variant() {
    let several = || -> Validators { vec![Arc::new(Dummy(OTHER_OID)), Arc::new(Dummy(OID))] };
    let (client, server) = meet(
        Client::new(issuer(), judge_of_any(several())),
        Server::new(issuer(), judge_of_any(several())),
    );
    greet(&mut client.unwrap(), &mut server.unwrap()).unwrap();
}

#[test]
fn a_refused_server_does_not_learn_the_validator_s_reason() {
    let (client, server) = meet(
        Client::new(None, Some(judge(Arc::new(Picky)))),
        Server::new(issuer(), None),
    );
    let error = client.err().unwrap();
    assert_eq!(error.refused().unwrap().to_string(), "PCR 4 is 00, not 11");
    assert_eq!(
        error.to_string(),
        "the peer's attestation was refused: PCR 4 is 00, not 11"
    );
    assert!(matches!(
        server,
        Err(Error::PeerRefused(rustls::AlertDescription::AccessDenied))
    ));
}

#[test]
fn a_refused_client_does_not_learn_the_validator_s_reason() {
    // each of forty connections must receive the alert, not a reset
    for _ in 0..40 {
        let (client, server) = part(
            Client::new(issuer(), None),
            Server::new(None, Some(judge(Arc::new(Picky)))),
        );
        assert!(
            matches!(
                client,
                Error::PeerRefused(rustls::AlertDescription::AccessDenied)
            ),
            "{client}"
        );
        assert_eq!(server.refused().unwrap().to_string(), "PCR 4 is 00, not 11");
    }
}

#[test]
fn an_unknown_variant_is_refused_on_either_side() {
    let other = || -> Issuers { Some(Arc::new(Dummy(OTHER_OID))) };
    let (client, server) = part(
        Client::new(None, judge_of_any(validators())),
        Server::new(other(), None),
    );
    assert!(
        client.refused().is_some() && matches!(server, Error::PeerRefused(_)),
        "{client}; {server}"
    );
    let (client, server) = part(
        Client::new(other(), None),
        Server::new(None, judge_of_any(validators())),
    );
    assert!(
        server.refused().is_some() && matches!(client, Error::PeerRefused(_)),
        "{client}; {server}"
    );
}

#[test]
fn a_side_without_attestation_is_refused_by_one_that_validates() {
    for mutual in [false, true] {
        let extra = || if mutual { validators() } else { vec![] };
        let (client, server) = part(
            Client::new(issuer(), judge_of_any(validators())),
            Server::new(None, judge_of_any(extra())),
        );
        assert!(
            client.refused().is_some() && matches!(server, Error::PeerRefused(_)),
            "{client}; {server}"
        );
        let (client, server) = part(
            Client::new(None, judge_of_any(extra())),
            Server::new(issuer(), judge_of_any(validators())),
        );
        assert!(
            server.refused().is_some() && matches!(client, Error::PeerRefused(_)),
            "{client}; {server}"
        );
    }
}

#[test]
fn a_client_is_not_validated_by_a_server_without_validators() {
    let (client, server) = meet(
        Client::new(Some(Arc::new(Broken)), judge_of_any(validators())),
        Server::new(issuer(), None),
    );
    greet(&mut client.unwrap(), &mut server.unwrap()).unwrap();
}

#[test]
fn a_join_service_that_asks_for_no_certificate_is_a_proxy() {
    let client = || Client::new(issuer(), None).only_old();
    let proxy = || Server::new(issuer(), None);
    let error = outcome(meet(client().to_join_service(), proxy()).0).unwrap_err();
    assert!(
        error.to_string().contains("a proxy that ends TLS"),
        "{error}"
    );
    // other servers need not ask, and a join service does
    assert!(meet(client(), proxy()).0.is_ok());
    let service = Server::new(issuer(), judge_of_any(validators()));
    assert!(meet(client().to_join_service(), service).0.is_ok());
}

#[test]
fn an_issuer_that_fails_is_an_error_of_this_machine() {
    let (client, server) = meet(
        Client::new(None, judge_of_any(validators())),
        Server::new(Some(Arc::new(Broken)), None),
    );
    let error = server.err().unwrap();
    assert!(matches!(error, Error::Issuer(_)));
    assert!(error.to_string().ends_with("the TPM does not answer"));
    assert!(matches!(client, Err(Error::PeerRefused(_))));

    let (client, server) = meet(
        Client::new(Some(Arc::new(Broken)), None),
        Server::new(None, judge_of_any(validators())),
    );
    assert!(matches!(client, Err(Error::Issuer(_))));
    assert!(server.is_err());
}

#[test]
fn one_client_serves_many_connections_at_once_and_so_does_one_server() {
    let client = Arc::new(Client::new(issuer(), judge_of_any(validators())));
    let server = Arc::new(Server::new(issuer(), judge_of_any(validators())));
    let threads: Vec<_> = (0..15)
        .map(|_| {
            let (near, far) = sockets();
            let (client, server) = (client.clone(), server.clone());
            let far = thread::spawn(move || server.handshake(far, soon()));
            thread::spawn(move || {
                let mut near = client.connect(near, soon()).unwrap();
                greet(&mut near, &mut far.join().unwrap().unwrap()).unwrap();
            })
        })
        .collect();
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
}

#[test]
fn connections_in_a_row_all_succeed() {
    for _ in 0..200 {
        let (client, server) = meet(
            Client::new(issuer(), judge_of_any(validators())),
            Server::new(issuer(), judge_of_any(validators())),
        );
        greet(&mut client.unwrap(), &mut server.unwrap()).unwrap();
    }
}

#[test]
fn a_server_issues_a_limited_number_of_documents_at_once() {
    let slow = Slow::new(Duration::from_millis(100));
    let server = Arc::new(Server::new(Some(slow.clone()), None));
    let threads: Vec<_> = (0..3 * server::MAX_ISSUING)
        .map(|_| {
            let (near, far) = sockets();
            let server = server.clone();
            thread::spawn(move || {
                let far = thread::spawn(move || server.handshake(far, soon()));
                Client::new(None, judge_of_any(validators()))
                    .connect(near, soon())
                    .unwrap();
                far.join().unwrap().unwrap();
            })
        })
        .collect();
    threads
        .into_iter()
        .for_each(|thread| thread.join().unwrap());
    // at least two: otherwise one document was issued after the other
    assert!((2..=server::MAX_ISSUING).contains(&slow.most.load(Ordering::SeqCst)));
}

#[test]
fn a_client_that_waits_too_long_for_a_document_times_out() {
    let slow = Slow::new(Duration::from_secs(10));
    let server = Arc::new(Server::new(Some(slow.clone()), None));
    let start = |deadline: Instant| {
        let (near, far) = sockets();
        let server = server.clone();
        thread::spawn(move || Client::new(None, judge_of_any(validators())).connect(near, soon()));
        thread::spawn(move || server.handshake(far, deadline))
    };
    let busy: Vec<_> = (0..server::MAX_ISSUING).map(|_| start(soon())).collect();
    let begin = Instant::now();
    while slow.now.load(Ordering::SeqCst) < server::MAX_ISSUING {
        assert!(begin.elapsed() < TIME, "not all documents are being issued");
        thread::sleep(Duration::from_millis(5));
    }
    let begin = Instant::now();
    let late = start(begin + Duration::from_millis(500)).join().unwrap();
    assert!(matches!(late, Err(Error::TimedOut)), "{:?}", late.err());
    let still = slow.now.load(Ordering::SeqCst);
    assert_eq!(still, server::MAX_ISSUING, "it waited for a document");
    busy.into_iter()
        .for_each(|thread| assert!(thread.join().unwrap().is_ok()));
}

#[test]
fn our_sides_select_the_strong_form_and_tls_13() {
    for (is_old, protocol) in [(true, ALPN_H2), (false, proto::attested::ALPN)] {
        let (near, far) = sockets();
        let server = thread::spawn(move || established(&Server::new(issuer(), None), &far));
        let client = Client::new(None, judge_of_any(validators()));
        let client = if is_old { client.only_old() } else { client };
        let (client, _) = client.establish(&near, soon()).unwrap();
        for connection in [client, server.join().unwrap()] {
            assert_eq!(
                connection.protocol_version(),
                Some(rustls::ProtocolVersion::TLSv1_3)
            );
            assert_eq!(connection.alpn_protocol(), Some(protocol));
        }
    }
}

/// Returns the bytes of a ClientHello of our own client.
fn client_hello() -> Vec<u8> {
    let (near, mut far) = sockets();
    thread::spawn(move || {
        Client::new(None, None).connect(near, Instant::now() + Duration::from_millis(500))
    });
    far.set_read_timeout(Some(Duration::from_millis(200)))
        .unwrap();
    let mut hello = Vec::new();
    let _ = far.read_to_end(&mut hello);
    assert!(hello.len() > 100);
    hello
}

#[test]
fn a_client_that_sends_a_byte_at_a_time_is_cut_off_at_the_deadline() {
    let hello = client_hello();
    // in the ClientHello, and after it
    for start in [0, hello.len()] {
        let (mut near, far) = sockets();
        let begin = Instant::now();
        let server = thread::spawn(move || {
            let end = Server::new(issuer(), None)
                .handshake(far, Instant::now() + Duration::from_millis(600));
            (end.err(), begin.elapsed())
        });
        near.write_all(&hello[..start]).unwrap();
        // an encrypted record that never ends
        let rest = [&hello[start..], &[23, 3, 3, 0x40, 0], &[0; 200]].concat();
        for byte in rest {
            if near.write_all(&[byte]).is_err() {
                break;
            }
            thread::sleep(Duration::from_millis(40));
        }
        let (error, time) = server.join().unwrap();
        assert!(matches!(error, Some(Error::TimedOut)), "{error:?}");
        assert!(time.as_millis() >= 590, "{time:?}");
    }
}

#[test]
fn the_client_gives_up_a_silent_or_slow_server_at_the_deadline() {
    for slow in [false, true] {
        let (near, mut far) = sockets();
        let trickle = thread::spawn(move || {
            // a ServerHello record that never ends
            for byte in [22, 3, 3, 0x40, 0].into_iter().chain([2; 200]) {
                if !slow || far.write_all(&[byte]).is_err() {
                    break;
                }
                thread::sleep(Duration::from_millis(10));
            }
            far
        });
        let begin = Instant::now();
        let error = Client::new(None, None)
            .connect(near, begin + Duration::from_millis(400))
            .err();
        assert!(matches!(error, Some(Error::TimedOut)), "{error:?}");
        assert!(begin.elapsed().as_millis() >= 390, "{:?}", begin.elapsed());
        drop(trickle.join().unwrap());
    }
}

#[test]
fn bytes_that_are_not_tls_are_reported_as_such_on_both_sides() {
    for garbage in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        &[0; 100],
        &[0xff; 5000],
    ] {
        let (mut near, far) = sockets();
        let server = thread::spawn(move || {
            Server::new(issuer(), judge_of_any(validators()))
                .handshake(far, soon())
                .err()
                .unwrap()
        });
        near.write_all(garbage).unwrap();
        // an alert, then the end
        let mut answer = Vec::new();
        let _ = near.read_to_end(&mut answer);
        assert_eq!(answer, [21, 3, 3, 0, 2, 2, 47]);
        drop(near);
        assert!(
            matches!(server.join().unwrap(), Error::NotTls(_)),
            "{garbage:02x?}"
        );

        let (near, mut far) = sockets();
        let client = thread::spawn(move || {
            Client::new(issuer(), judge_of_any(validators()))
                .connect(near, soon())
                .err()
                .unwrap()
        });
        far.write_all(garbage).unwrap();
        far.shutdown(Shutdown::Write).unwrap();
        let error = client.join().unwrap();
        assert!(
            matches!(error, Error::NotTls(_) | Error::Misbehaved(_)),
            "{garbage:02x?}: {error}"
        );
    }
}

#[test]
fn a_connection_that_ends_early_is_reported_as_closed() {
    let hello = client_hello();
    for sent in [0, 3, 50, hello.len()] {
        let (mut near, far) = sockets();
        let server = thread::spawn(move || {
            Server::new(issuer(), None)
                .handshake(far, soon())
                .err()
                .unwrap()
        });
        near.write_all(&hello[..sent]).unwrap();
        near.shutdown(Shutdown::Write).unwrap();
        let error = server.join().unwrap();
        assert!(matches!(error, Error::Closed), "{sent}: {error}");
    }
    let (near, far) = sockets();
    drop(far);
    assert!(matches!(
        Client::new(None, None).connect(near, soon()),
        Err(Error::Closed)
    ));
}

#[test]
fn mutated_client_hellos_end_with_an_error_or_wait_for_more_but_never_panic() {
    let seed = client_hello();
    let (mut refused, mut waiting) = (0, 0);
    for hello in mutations(&seed, 300) {
        let (mut near, far) = sockets();
        let server = thread::spawn(move || {
            Server::new(issuer(), judge_of_any(validators())).handshake(far, soon())
        });
        let _ = near.write_all(&hello);
        let _ = near.shutdown(Shutdown::Write);
        let _ = near.read_to_end(&mut Vec::new());
        match server
            .join()
            .expect("no panic")
            .err()
            .expect("no handshake")
        {
            Error::Closed => waiting += 1,
            _ => refused += 1,
        }
    }
    assert!(
        refused > 50 && waiting > 5,
        "{refused} refused, {waiting} waiting"
    );
}

#[test]
fn no_two_connections_of_the_old_form_share_a_nonce_or_a_key() {
    let ends = || {
        let (near, far) = sockets();
        let server = thread::spawn(move || {
            let server = Server::new(issuer(), judge_of_any(validators()));
            established(&server.only_old(), &far)
        });
        let (client, _) = Client::new(issuer(), judge_of_any(validators()))
            .establish(&near, soon())
            .unwrap();
        let certificate =
            |connection: &rustls::Connection| connection.peer_certificates().unwrap()[0].to_vec();
        (
            certificate(&client),
            certificate(&server.join().unwrap()),
            client,
        )
    };
    let (first, second) = (ends(), ends());
    // the public key is at the same offset in all certificates
    let key = |certificate: &[u8]| certificate[130..190].to_vec();
    let keys: std::collections::HashSet<_> = [&first.0, &first.1, &second.0, &second.1]
        .into_iter()
        .map(|certificate| key(certificate))
        .collect();
    assert_eq!(keys.len(), 4);
    assert_eq!(second.2.handshake_kind(), Some(rustls::HandshakeKind::Full));
}
