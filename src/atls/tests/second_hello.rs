//! Clients whose second ClientHello is not the first one again. A server asks for a second one if the first has no key share of a
//! group that it knows (HelloRetryRequest). The client may then change only its key shares (RFC 8446 §4.1.2). An attacker changes
//! more: a server that decides by one hello what it demands, and by the other one what it does, serves a client that proved
//! nothing.

use std::net::TcpStream;
use std::sync::Arc;
use std::thread;

use rustls::crypto::ring::kx_group::X25519;
use rustls::crypto::{ActiveKeyExchange, SharedSecret, SupportedKxGroup};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Connection, NamedGroup};

use super::attacks::Believing;
use super::exchange::End;
use super::handshake::{self, Timed};
use super::*;
use super::{issuer, sockets, soon, validators};
use attest::{Form, Issuer, PeerRole};
use base::network::Network;
use proto::attested::ALPN as ALPN_STRONG;
use transport::half_open::PeersTurn;

/// X25519 by a number that no server knows, so that every server sends a HelloRetryRequest.
#[derive(Debug)]
struct UnknownGroup;

/// Reserved for private use (RFC 8446 §4.2.7).
const UNKNOWN: NamedGroup = NamedGroup::Unknown(0xfe42);

impl SupportedKxGroup for UnknownGroup {
    fn start(&self) -> Result<Box<dyn ActiveKeyExchange>, rustls::Error> {
        Ok(Box::new(UnknownShare(X25519.start()?)))
    }

    fn name(&self) -> NamedGroup {
        UNKNOWN
    }
}

struct UnknownShare(Box<dyn ActiveKeyExchange>);

impl ActiveKeyExchange for UnknownShare {
    fn complete(self: Box<Self>, peers: &[u8]) -> Result<SharedSecret, rustls::Error> {
        self.0.complete(peers)
    }

    fn pub_key(&self) -> &[u8] {
        self.0.pub_key()
    }

    fn group(&self) -> NamedGroup {
        UNKNOWN
    }
}

const SERVER_NAME: u16 = 0;
const ALPN: u16 = 16;

/// The content of a client's hello that replaces rustls' own.
#[derive(Clone, Default)]
struct Said {
    /// The protocols that it offers; none: no extension.
    protocols: Vec<&'static [u8]>,
    /// Another nonce.
    name: Option<&'static [u8]>,
}

impl Said {
    fn offering(protocols: &[&'static [u8]]) -> Said {
        Said {
            protocols: protocols.to_vec(),
            name: None,
        }
    }

    /// Returns a ClientHello (with its header) that says this.
    fn change(&self, hello: &[u8]) -> Vec<u8> {
        let (body, mut rest) = hello[4..].split_at(2 + 32);
        let mut changed = body.to_vec();
        // legacy_session_id, cipher_suites, legacy_compression_methods
        for width in [1, 2, 1] {
            let (length, after) = rest.split_at(width);
            let (vector, after) = after.split_at(number(length));
            changed.extend([length, vector].concat());
            rest = after;
        }
        let mut extensions = vec![];
        rest = &rest[2..];
        while !rest.is_empty() {
            let (kind, after) = (number(&rest[..2]) as u16, &rest[4..]);
            let (value, after) = after.split_at(number(&rest[2..4]));
            rest = after;
            let value = match (kind, self.name) {
                (ALPN, _) => continue,
                (SERVER_NAME, Some(name)) => sized(&[&[0], &sized(name)[..]].concat()),
                _ => value.to_vec(),
            };
            extensions.extend([&kind.to_be_bytes()[..], &sized(&value)].concat());
        }
        if !self.protocols.is_empty() {
            let name = |name: &&[u8]| [&[name.len() as u8][..], name].concat();
            let names: Vec<u8> = self.protocols.iter().flat_map(name).collect();
            extensions.extend([&ALPN.to_be_bytes()[..], &sized(&sized(&names))].concat());
        }
        changed.extend(sized(&extensions));
        [&[1, 0], &sized(&changed)[..]].concat()
    }
}

fn number(bytes: &[u8]) -> usize {
    bytes
        .iter()
        .fold(0, |number, byte| number << 8 | usize::from(*byte))
}

/// Returns the bytes behind their length in two bytes.
fn sized(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_be_bytes()[..], bytes].concat()
}

/// A client whose two hellos differ. Its transcript contains both as it sent them.
struct TwoFaced {
    first: Said,
    second: Said,
    /// Proves this machine in the strong form, if it is honest.
    issuer: Option<Arc<dyn Issuer>>,
    /// What it sends before the second hello.
    between: &'static [u8],
}

impl TwoFaced {
    fn said(&self, is_second: bool) -> &Said {
        if is_second { &self.second } else { &self.first }
    }

    /// Returns the messages of a transcript as they were sent, if a ClientHello is among them.
    fn sent(&self, mut messages: &[u8]) -> Option<Vec<u8>> {
        // after a HelloRetryRequest a transcript begins with the message message_hash (RFC 8446
        // §4.4.1)
        let is_second = messages.first() == Some(&254);
        let (mut sent, mut is_changed) = (vec![], false);
        while messages.len() >= 4 {
            let (message, rest) = messages.split_at_checked(4 + number(&messages[1..4]))?;
            if message[0] == 1 {
                sent.extend(self.said(is_second).change(message));
                is_changed = true;
            } else {
                sent.extend(message);
            }
            messages = rest;
        }
        is_changed.then_some(sent)
    }

    /// Completes a handshake, and the exchange if the server selected the strong form. Returns that
    /// form.
    fn connect(
        self: Arc<Self>,
        socket: &TcpStream,
        name: ServerName<'static>,
    ) -> Result<Form, Error> {
        let this = self.clone();
        let mut provider =
            provider::with_sent(Some(Box::leak(Box::new(move |messages: &[u8]| {
                this.sent(messages)
            }))));
        provider.kx_groups = vec![&UnknownGroup, X25519];
        let mut config = ClientConfig::builder_with_provider(Arc::new(provider))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Believing))
            .with_no_client_auth();
        // the server may select each of these; what the hellos offer is changed on the way
        config.alpn_protocols = vec![ALPN_STRONG.to_vec(), ALPN_H2.to_vec()];
        let connection = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut connection = Connection::Client(connection);
        let mut peer = Timed {
            socket,
            deadline: soon(),
            turn: &PeersTurn::default(),
        };
        let (mut hellos, mut received) = (0, [0; 4096]);
        loop {
            let output = handshake::take_output(&mut connection)?;
            let mut records = &output[..];
            while !records.is_empty() {
                let (record, rest) = records.split_at(5 + number(&records[3..5]));
                records = rest;
                // a plaintext ClientHello
                if record[0] == 22 && record[5] == 1 {
                    let hello = self.said(hellos > 0).change(&record[5..]);
                    if hellos > 0 {
                        peer.write_all(self.between)?;
                    }
                    peer.write_all(&[&record[..3], &sized(&hello)].concat())?;
                    hellos += 1;
                } else {
                    peer.write_all(record)?;
                }
            }
            if !connection.is_handshaking() {
                break;
            }
            match peer.read(&mut received)? {
                0 => return Err(Error::Closed),
                len => handshake::feed(&mut connection, &received[..len])?,
            }
        }
        assert_eq!(hellos, 2);
        let form = handshake::form(&connection, forms::Forms::Both)?;
        if form == Form::Strong {
            let certificate = connection.peer_certificates().unwrap()[0].clone();
            let end = End {
                role: PeerRole::Client,
                issuer: self.issuer.as_deref(),
                judge: None,
                certificate: &certificate,
            };
            end.run(&mut connection, &mut peer, &|| Ok(None))?;
        }
        Ok(form)
    }

    /// Connects to the server. Returns what each side got. `is_filtered` tells whether the server
    /// compares the hellos at all: what the rest of the server does with them has to be right by
    /// itself.
    fn meet(
        first: Said,
        second: Said,
        issuer: Option<Arc<dyn Issuer>>,
        server: Server,
        is_filtered: bool,
    ) -> (Result<Form, Error>, Result<(), Error>) {
        let client = TwoFaced {
            first,
            second,
            issuer,
            between: &[],
        };
        client.meet_server(server, is_filtered)
    }

    fn meet_server(
        self,
        server: Server,
        is_filtered: bool,
    ) -> (Result<Form, Error>, Result<(), Error>) {
        let (near, far) = sockets();
        let (_, name) = nonce::client();
        let sent = name.to_str().into_owned();
        let offered = self.first.protocols.clone();
        let server = thread::spawn(move || {
            if is_filtered {
                return server.handshake(far, soon()).map(drop);
            }
            let offers = |protocol: &[u8]| offered.contains(&protocol);
            let session =
                server.session(Network::UNKNOWN, Some(sent.as_bytes()), offers, soon())?;
            let mut peer = Timed {
                socket: &far,
                deadline: soon(),
                turn: &PeersTurn::default(),
            };
            server.complete(&mut peer, &session, None).map(drop)
        });
        let client = Arc::new(self).connect(&near, name);
        drop(near);
        (client, server.join().unwrap())
    }
}

/// Returns the servers that demand a proof.
fn servers() -> [fn() -> Server; 3] {
    [
        || Server::new(issuer(), judge_of_any(validators())),
        || Server::new(None, judge_of_any(validators())),
        || Server::new(issuer(), judge_of_any(validators())).require_strong(),
    ]
}

#[test]
fn a_client_that_changes_its_second_hello_is_not_accepted_without_a_proof() {
    let strong = || Said::offering(&[ALPN_STRONG, ALPN_H2]);
    let old = || Said::offering(&[ALPN_H2]);
    // of the same form as a nonce
    let renamed = |said: Said| Said {
        name: Some(b"QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFB"),
        ..said
    };
    let protocols = "its second ClientHello offers other protocols";
    let name = "its second ClientHello has another server name";
    for (first, second, reason) in [
        (strong(), old(), protocols),
        (Said::offering(&[ALPN_STRONG]), old(), protocols),
        (old(), strong(), protocols),
        (strong(), Said::default(), protocols),
        (old(), Said::default(), protocols),
        (Said::default(), strong(), protocols),
        (Said::default(), old(), protocols),
        (strong(), Said::offering(&[b"http/1.1"]), protocols),
        (strong(), renamed(strong()), name),
        (strong(), renamed(old()), name),
        (old(), renamed(old()), name),
    ] {
        for server in servers() {
            let meet = |is_filtered| {
                TwoFaced::meet(first.clone(), second.clone(), None, server(), is_filtered)
            };
            let (_, refused) = meet(true);
            match refused.unwrap_err() {
                Error::Misbehaved(why) => assert_eq!(why, reason),
                other => panic!("expected {reason:?}, got: {other}"),
            }
            let (_, refused) = meet(false);
            assert!(refused.is_err(), "{reason} is accepted without the filter");
        }
    }
}

/// rustls ignores this alert in TLS 1.3, and the filter compares no hello behind it.
#[test]
fn an_alert_between_the_hellos_does_not_let_the_second_one_choose_the_form() {
    const USER_CANCELED: &[u8] = &[21, 3, 3, 0, 2, 1, 90];
    let strong = Said::offering(&[ALPN_STRONG, ALPN_H2]);
    let old = Said::offering(&[ALPN_H2]);
    for (first, second) in [
        (&strong, &old),
        (&strong, &Said::default()),
        (&old, &strong),
        (&old, &Said::offering(&[ALPN_STRONG])),
    ] {
        for server in servers() {
            let client = TwoFaced {
                first: first.clone(),
                second: second.clone(),
                issuer: None,
                between: USER_CANCELED,
            };
            assert!(client.meet_server(server(), true).1.is_err());
        }
    }
    // a server that demands nothing does not mix the forms either, even if rustls compares no names
    let client = TwoFaced {
        first: strong,
        second: Said::default(),
        issuer: issuer(),
        between: USER_CANCELED,
    };
    let refused = client.meet_server(Server::new(issuer(), None), false).1;
    let refused = refused.unwrap_err().to_string();
    assert!(
        refused.contains("its second ClientHello is for the other form"),
        "{refused}"
    );
}

#[test]
fn a_client_that_changes_only_its_key_share_is_served_if_it_proves_itself() {
    for is_filtered in [true, false] {
        for server in servers() {
            let said = Said::offering(&[ALPN_STRONG, ALPN_H2]);
            let meet =
                |issuer| TwoFaced::meet(said.clone(), said.clone(), issuer, server(), is_filtered);
            let (client, accepted) = meet(issuer());
            assert_eq!(client.unwrap(), Form::Strong);
            accepted.unwrap();
            let (client, refused) = meet(None);
            assert!(client.is_err());
            assert!(refused.unwrap_err().refused().is_some());
        }
        // the old form, with a server that demands nothing
        let said = Said::offering(&[ALPN_H2]);
        let server = Server::new(issuer(), None);
        let (client, accepted) = TwoFaced::meet(said.clone(), said, None, server, is_filtered);
        assert_eq!(client.unwrap(), Form::Old);
        accepted.unwrap();
    }
}
