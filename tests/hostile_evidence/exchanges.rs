//! Messages that a server of the strong form sends in place of its offer and its proof, to a client that has not yet verified the server.

use std::io::Write;
use std::net::Shutdown;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use atls::{Client, Error};
use prost::Message;
use proto::attested::{ALPN, Challenge, Demand, Endorsement, Identity, Offer, Proof};
use verifier::qemu_vtpm;

use crate::certificates::{Certificate, handshake, sockets};
use crate::{FORGER, memory, policy};

/// Memory of a client for its handshake and the texts of errors, in bytes.
const BASE: usize = 512 << 10;

fn framed(message: &[u8]) -> Vec<u8> {
    [&(message.len() as u32).to_be_bytes()[..], message].concat()
}

fn endorsements(count: usize, chain: usize, size: usize) -> Vec<Endorsement> {
    let endorsement = Endorsement {
        template: 0x01c0_0002,
        certificate: vec![7; size],
        chain: vec![vec![7; size]; chain],
    };
    vec![endorsement; count]
}

/// Returns an offer that a client takes.
fn offer() -> Offer {
    Offer {
        nonce: vec![1; 32],
        identity: Some(Identity {
            variant: qemu_vtpm::OID.to_vec(),
            key: vec![7; 280],
            endorsements: endorsements(2, 2, 100),
        }),
        ..Offer::default()
    }
}

fn offering(change: impl FnOnce(&mut Offer)) -> Vec<u8> {
    let mut offer = offer();
    change(&mut offer);
    framed(&offer.encode_to_vec())
}

/// Returns an offer that the client takes, and this document.
fn proving(document: &[u8]) -> Vec<u8> {
    let proof = Proof {
        document: document.to_vec(),
        ..Proof::default()
    };
    [offering(|_| {}), framed(&proof.encode_to_vec())].concat()
}

/// Returns why a client refuses a server that sends these bytes and then nothing more.
fn refusal(what: &str, sent: &[u8]) -> String {
    let (near, mut far) = sockets();
    let bytes = sent.to_vec();
    let server = thread::spawn(move || {
        let mut connection = handshake(&mut far, &Certificate::bare(), ALPN).unwrap();
        for part in bytes.chunks(16 << 10) {
            connection.writer().write_all(part).unwrap();
            while connection.wants_write() {
                // the client may have refused what came before
                if connection.write_tls(&mut far).is_err() {
                    return;
                }
            }
        }
        let _ = far.shutdown(Shutdown::Write);
        while connection.read_tls(&mut far).is_ok_and(|read| read > 0) {
            let _ = connection.process_new_packets();
        }
    });
    let validator = qemu_vtpm::validator(Arc::new(policy()));
    let client = Client::new(None, None).verify_strong(Some(verifier::judge(Arc::new(validator))));
    let deadline = Instant::now() + Duration::from_secs(60);
    let (connected, held) = memory(|| client.connect(near, deadline).map(drop));
    server.join().unwrap();
    assert!(
        held <= BASE + 8 * sent.len(),
        "{what}: {held} bytes for {} received",
        sent.len()
    );
    match connected {
        Ok(()) => panic!("{what}: accepted"),
        Err(Error::Refused(why)) => why.to_string(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn a_client_refuses_what_is_no_exchange_by_its_name_with_little_memory() {
    let many = "more keys, certificates or banks than a TPM has";
    let unreadable = "the message cannot be decoded";
    let fields = "it has too many fields";
    let document = "the document cannot be read";
    let genuine = FORGER.parts(&[5; 32], &[6; 32]).document();
    let nested = |depth: usize| {
        let mut message = vec![];
        for _ in 0..depth {
            let len = message.len() as u64;
            let mut outer = vec![0x1a];
            prost::encoding::encode_varint(len, &mut outer);
            message = [outer, message].concat();
        }
        framed(&message)
    };
    let mut wrong = vec![];
    for (what, sent, reason) in [
        ("nothing", vec![], "closed the connection"),
        ("half a length", vec![0, 0], "closed the connection"),
        (
            "half an offer",
            offering(|_| {})[..100].to_vec(),
            "closed the connection",
        ),
        (
            "an endless message",
            vec![0xff; 32 << 10],
            "expected at most 16384",
        ),
        ("an empty offer", framed(b""), "its nonce has 0 bytes"),
        ("no message", framed(&[0xff; 100]), unreadable),
        (
            "a short nonce",
            offering(|it| it.nonce.truncate(31)),
            "its nonce has 31 bytes",
        ),
        ("deep nesting", nested(4000), "nonce has 0 bytes"),
        (
            "many banks",
            offering(|it| {
                it.demand = Some(Demand {
                    banks: vec![11; 1000],
                    challenges: false,
                    collateral: false,
                })
            }),
            many,
        ),
        (
            "far too many banks",
            offering(|it| {
                it.demand = Some(Demand {
                    banks: vec![11; 15_000],
                    challenges: false,
                    collateral: false,
                })
            }),
            fields,
        ),
        (
            "many endorsement keys",
            offering(|it| it.identity.as_mut().unwrap().endorsements = endorsements(400, 0, 0)),
            many,
        ),
        (
            "far too many endorsement keys",
            offering(|it| it.identity.as_mut().unwrap().endorsements = endorsements(1500, 0, 0)),
            fields,
        ),
        (
            "many certificates",
            offering(|it| it.identity.as_mut().unwrap().endorsements = endorsements(1, 900, 0)),
            many,
        ),
        (
            "far too many certificates",
            offering(|it| it.identity.as_mut().unwrap().endorsements = endorsements(1, 7000, 0)),
            fields,
        ),
        (
            "no identity",
            proving_without(),
            "it sent no attestation document",
        ),
        (
            "another variant",
            [
                offering(|it| it.identity.as_mut().unwrap().variant = vec![6, 1, 1]),
                framed(b""),
            ]
            .concat(),
            "no attestation document of an accepted variant",
        ),
        (
            "an offer in place of a proof",
            [offering(|_| {}), offering(|_| {})].concat(),
            document,
        ),
        (
            "a challenge that nobody can answer",
            [
                offering(|it| {
                    it.challenge = Some(Challenge {
                        template: 1,
                        credential_blob: vec![7; 5000],
                        secret: vec![7; 5000],
                    })
                }),
                framed(b""),
            ]
            .concat(),
            document,
        ),
        (
            "a long proof",
            [offering(|_| {}), vec![0, 1, 0, 1]].concat(),
            "expected at most 65536",
        ),
        ("an empty proof", proving(b""), document),
        ("deep lists", proving(&[b'['; 60_000]), document),
        ("spaces", proving(&[b' '; 60_000]), document),
        (
            "many fields",
            proving(format!("{{{}", r#""UserData":"","#.repeat(4000)).as_bytes()),
            document,
        ),
        (
            "a document for another connection",
            proving(&genuine),
            "another connection",
        ),
        (
            "an alert",
            offering(|it| it.alert = 49),
            "it refused this machine's attestation",
        ),
    ] {
        let why = refusal(what, &sent);
        if !why.contains(reason) || why.len() > 600 {
            wrong.push(format!("{what}: expected {reason:?}, got: {why:.600}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn proving_without() -> Vec<u8> {
    let offer = offering(|it| it.identity = None);
    [offer, framed(b"")].concat()
}
