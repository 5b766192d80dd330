//! Certificates of the old form of attested TLS, with one field altered, and then signed again, or not signed again. A client with
//! a policy meets a server that presents them.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use atls::hello::hide_server_name;
use atls::{Client, Error};
use base::der;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{SHA256, digest};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair};
use rustls::crypto::ring::sign::any_ecdsa_type;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ServerConfig, ServerConnection};
use verifier::{Issuer, qemu_vtpm};

use crate::{FORGER, policy};

const ECDSA_WITH_SHA256: &[u8] = b"\x30\x0a\x06\x08\x2a\x86\x48\xce\x3d\x04\x03\x02";
const ECDSA_WITH_SHA384: &[u8] = b"\x30\x0a\x06\x08\x2a\x86\x48\xce\x3d\x04\x03\x03";
/// Another variant's object identifier.
const OTHER_OID: &[u8] = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x01, 0x01];
/// keyUsage, which has no meaning here; extKeyUsage with only clientAuth (RFC 5280 §4.2.1).
const UNKNOWN: &[u8] = b"\x30\x0b\x06\x03\x2a\x03\x04\x01\x01\xff\x04\x01\x00";
const CLIENT_AUTH: &[u8] =
    b"\x30\x13\x06\x03\x55\x1d\x25\x04\x0c\x30\x0a\x06\x08\x2b\x06\x01\x05\x05\x07\x03\x02";

struct Key {
    pkcs8: Vec<u8>,
    pair: EcdsaKeyPair,
}

impl Key {
    fn new() -> Key {
        let (kind, random) = (&ECDSA_P256_SHA256_ASN1_SIGNING, SystemRandom::new());
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(kind, &random).unwrap();
        let pair = EcdsaKeyPair::from_pkcs8(kind, pkcs8.as_ref(), &random).unwrap();
        let pkcs8 = pkcs8.as_ref().to_vec();
        Key { pkcs8, pair }
    }

    /// Returns the SubjectPublicKeyInfo (RFC 5480 §2).
    fn public(&self) -> Vec<u8> {
        let p256 = b"\x30\x59\x30\x13\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07\x03\x42\0";
        [&p256[..], self.pair.public_key().as_ref()].concat()
    }

    fn sign(&self, body: &[u8]) -> Vec<u8> {
        let signature = self.pair.sign(&SystemRandom::new(), body).unwrap();
        signature.as_ref().to_vec()
    }
}

fn common_name(name: &[u8]) -> Vec<u8> {
    let name = der::element(der::UTF8_STRING, &[name]);
    let attribute = der::element(der::SEQUENCE, &[b"\x06\x03\x55\x04\x03", &name]);
    der::element(der::SEQUENCE, &[&der::element(der::SET, &[&attribute])])
}

fn extension(oid: &[u8], value: &[u8]) -> Vec<u8> {
    let value = der::element(der::OCTET_STRING, &[value]);
    der::element(der::SEQUENCE, &[oid, &value])
}

fn extensions(list: &[&[u8]]) -> Vec<u8> {
    der::element(der::context(3), &[&der::element(der::SEQUENCE, list)])
}

/// A certificate (RFC 5280 §4.1), field by field.
pub struct Certificate {
    /// The key of the TLS connection.
    key: Key,
    /// The key that signs the certificate.
    signer: Option<Key>,
    body: Vec<(&'static str, Vec<u8>)>,
    algorithm: Vec<u8>,
    document: Vec<u8>,
    /// The change of the signature.
    signature: fn(Vec<u8>) -> Vec<u8>,
    /// The change of the whole certificate.
    whole: Box<dyn Fn(Vec<u8>) -> Vec<u8> + Send>,
}

impl Certificate {
    /// Returns a genuine one, with a document for this nonce.
    fn new(nonce: &[u8]) -> Certificate {
        let key = Key::new();
        let user_data = digest(&SHA256, &key.public());
        let document = FORGER.issue(user_data.as_ref(), nonce).unwrap();
        Certificate {
            body: vec![
                ("version", b"\xa0\x03\x02\x01\x02".to_vec()),
                ("serial", b"\x02\x01\x01".to_vec()),
                ("algorithm", ECDSA_WITH_SHA256.to_vec()),
                ("issuer", common_name(b"Constellation")),
                (
                    "validity",
                    b"\x30\x1e\x17\x0d200101000000Z\x17\x0d400101000000Z".to_vec(),
                ),
                ("subject", common_name(b"Constellation")),
                ("key", key.public()),
                ("extensions", vec![]),
            ],
            key,
            signer: None,
            algorithm: ECDSA_WITH_SHA256.to_vec(),
            document,
            signature: |signature| signature,
            whole: Box::new(|whole| whole),
        }
        .extended(|document| vec![extension(qemu_vtpm::OID, document)])
    }

    /// Returns the certificate of a server of the strong form, which has no document.
    pub fn bare() -> Certificate {
        Certificate::new(&[]).with("extensions", b"")
    }

    fn with(mut self, name: &str, bytes: &[u8]) -> Certificate {
        let field = self.body.iter_mut().find(|field| field.0 == name);
        field.unwrap().1 = bytes.to_vec();
        self
    }

    fn extended(self, list: impl Fn(&[u8]) -> Vec<Vec<u8>>) -> Certificate {
        let list = list(&self.document);
        let list: Vec<&[u8]> = list.iter().map(Vec::as_slice).collect();
        self.with("extensions", &extensions(&list))
    }

    fn der(&self) -> Vec<u8> {
        let fields: Vec<&[u8]> = self.body.iter().map(|field| &field.1[..]).collect();
        let body = der::element(der::SEQUENCE, &fields);
        let signature = self.signer.as_ref().unwrap_or(&self.key).sign(&body);
        let signature = der::element(der::BIT_STRING, &[&[0], &(self.signature)(signature)]);
        let whole = der::element(der::SEQUENCE, &[&body, &self.algorithm, &signature]);
        (self.whole)(whole)
    }
}

/// Returns the nonce in the ClientHello that arrives, and leaves it in the socket.
fn nonce(socket: &TcpStream) -> Vec<u8> {
    let mut hello = vec![0; 16 << 10];
    loop {
        let len = socket.peek(&mut hello).unwrap();
        // a record after its length (RFC 8446 §5.1)
        if len > 5 && len >= 5 + usize::from(u16::from_be_bytes([hello[3], hello[4]])) {
            let name = hide_server_name(&mut hello[5..len]).unwrap().unwrap();
            return STANDARD.decode(name).unwrap();
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Completes the handshake of a server that has this certificate. Returns the connection, if the client does not refuse it.
pub fn handshake(
    socket: &mut TcpStream,
    certificate: &Certificate,
    protocol: &[u8],
) -> Option<ServerConnection> {
    let pkcs8 = PrivatePkcs8KeyDer::from(certificate.key.pkcs8.clone());
    let key = any_ecdsa_type(&PrivateKeyDer::Pkcs8(pkcs8)).unwrap();
    let chain = vec![certificate.der().into()];
    let resolver = SingleCertAndKey::from(CertifiedKey::new(chain, key));
    let mut config = ServerConfig::builder_with_provider(tls::provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(resolver));
    config.alpn_protocols = vec![protocol.to_vec()];
    let mut connection = ServerConnection::new(Arc::new(config)).unwrap();
    while connection.is_handshaking() {
        connection.complete_io(socket).ok()?;
    }
    Some(connection)
}

fn serve(mut socket: TcpStream, make: impl FnOnce(&[u8]) -> Certificate) {
    let certificate = make(&nonce(&socket));
    if let Some(mut connection) = handshake(&mut socket, &certificate, b"h2") {
        // until the client closes the connection; a client that refuses the certificate closes it at once
        while connection
            .complete_io(&mut socket)
            .is_ok_and(|(read, _)| read > 0)
        {}
    }
}

/// Returns the two ends of a connection: of the client, and of the server.
pub fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (near, listener.accept().unwrap().0)
}

/// Returns why a client refuses the certificate; `None` if it accepts it.
fn refusal(make: impl FnOnce(&[u8]) -> Certificate + Send + 'static) -> Option<String> {
    let (near, far) = sockets();
    let server = thread::spawn(move || serve(far, make));
    let validator = qemu_vtpm::validator(Arc::new(policy()));
    let client = Client::new(None, Some(verifier::judge(Arc::new(validator))));
    let deadline = Instant::now() + Duration::from_secs(60);
    let refused = client.connect(near, deadline).err();
    server.join().unwrap();
    refused.map(|error| match error {
        Error::Refused(why) => why.to_string(),
        other => format!("no refusal: {other}"),
    })
}

#[test]
fn every_field_of_a_certificate_is_checked_by_itself() {
    assert_eq!(refusal(Certificate::new), None);
    const UNREADABLE: &str = "its certificate cannot be read";
    const UNSIGNED: &str = "its certificate is not properly self-signed";
    const NO_DOCUMENT: &str = "it has no attestation document of an accepted variant";
    const DOCUMENT: &str = "the document cannot be read";
    type Case = (&'static str, fn(Certificate) -> Certificate, &'static str);
    let cases: [Case; 38] = [
        (
            "version 1",
            |it| it.with("version", b"\xa0\x03\x02\x01\x00"),
            UNREADABLE,
        ),
        (
            "version 2",
            |it| it.with("version", b"\xa0\x03\x02\x01\x01"),
            UNREADABLE,
        ),
        ("no version", |it| it.with("version", b""), UNREADABLE),
        ("no serial number", |it| it.with("serial", b""), UNREADABLE),
        (
            "another algorithm inside",
            |it| it.with("algorithm", ECDSA_WITH_SHA384),
            UNREADABLE,
        ),
        (
            "no algorithm inside",
            |it| it.with("algorithm", b""),
            UNREADABLE,
        ),
        (
            "another issuer",
            |it| it.with("issuer", &common_name(b"Another")),
            UNSIGNED,
        ),
        ("no issuer", |it| it.with("issuer", b""), UNREADABLE),
        (
            "another subject",
            |it| it.with("subject", &common_name(b"Another")),
            UNSIGNED,
        ),
        ("no subject", |it| it.with("subject", b""), UNREADABLE),
        ("no validity", |it| it.with("validity", b""), UNREADABLE),
        (
            "a validity without times",
            |it| it.with("validity", b"\x30\x00"),
            UNSIGNED,
        ),
        (
            "a validity that ends before it begins",
            |it| {
                it.with(
                    "validity",
                    b"\x30\x1e\x17\x0d400101000000Z\x17\x0d200101000000Z",
                )
            },
            UNSIGNED,
        ),
        ("no key", |it| it.with("key", b""), UNREADABLE),
        (
            "another key",
            |it| it.with("key", &Key::new().public()),
            UNSIGNED,
        ),
        (
            "a key of which the signer knows nothing",
            |it| Certificate {
                signer: Some(Key::new()),
                ..it
            },
            UNSIGNED,
        ),
        (
            "another key that signs",
            |it| {
                let key = Key::new();
                Certificate { key, ..it }
            },
            UNSIGNED,
        ),
        (
            "another key that signs, certifies itself, and is in TLS",
            |it| {
                let key = Key::new();
                let public = key.public();
                Certificate { key, ..it }.with("key", &public)
            },
            "its attestation document is for another key than its certificate's",
        ),
        (
            "no extensions",
            |it| it.with("extensions", b""),
            NO_DOCUMENT,
        ),
        (
            "an empty list of extensions",
            |it| it.extended(|_| vec![]),
            NO_DOCUMENT,
        ),
        (
            "extensions that are no list",
            |it| it.with("extensions", b"\xa3\x02\x04\x00"),
            UNREADABLE,
        ),
        (
            "another variant",
            |it| it.extended(|document| vec![extension(OTHER_OID, document)]),
            NO_DOCUMENT,
        ),
        (
            "no variant",
            |it| it.extended(|document| vec![extension(b"", document)]),
            UNREADABLE,
        ),
        (
            "a critical document",
            |it| {
                it.extended(|document| {
                    let value = der::element(der::OCTET_STRING, &[document]);
                    let critical = [qemu_vtpm::OID, b"\x01\x01\xff"].concat();
                    vec![der::element(der::SEQUENCE, &[&critical, &value])]
                })
            },
            UNREADABLE,
        ),
        (
            "a critical extension beside it",
            |it| {
                it.extended(|document| vec![UNKNOWN.to_vec(), extension(qemu_vtpm::OID, document)])
            },
            UNREADABLE,
        ),
        (
            "for clients alone",
            |it| {
                it.extended(|document| {
                    vec![CLIENT_AUTH.to_vec(), extension(qemu_vtpm::OID, document)]
                })
            },
            UNSIGNED,
        ),
        (
            "an empty document",
            |it| it.extended(|_| vec![extension(qemu_vtpm::OID, b"")]),
            DOCUMENT,
        ),
        (
            "a document that is cut",
            |it| {
                it.extended(|document| {
                    vec![extension(qemu_vtpm::OID, &document[..document.len() - 1])]
                })
            },
            DOCUMENT,
        ),
        (
            "bytes after the document",
            |it| {
                it.extended(|document| vec![extension(qemu_vtpm::OID, &[document, b"x"].concat())])
            },
            DOCUMENT,
        ),
        (
            "a document in a further envelope",
            |it| {
                it.extended(|document| {
                    let inner = der::element(der::OCTET_STRING, &[document]);
                    vec![extension(qemu_vtpm::OID, &inner)]
                })
            },
            DOCUMENT,
        ),
        (
            "a bad document before the good one",
            |it| {
                it.extended(|document| {
                    vec![
                        extension(qemu_vtpm::OID, b"{}"),
                        extension(qemu_vtpm::OID, document),
                    ]
                })
            },
            DOCUMENT,
        ),
        (
            "a document for another nonce",
            |it| {
                let user_data = digest(&SHA256, &it.key.public());
                let document = FORGER.issue(user_data.as_ref(), &[7; 33]).unwrap();
                Certificate { document, ..it }
                    .extended(|document| vec![extension(qemu_vtpm::OID, document)])
            },
            "made for another connection",
        ),
        (
            "another algorithm outside",
            |mut it| {
                it.algorithm = ECDSA_WITH_SHA384.to_vec();
                it
            },
            UNREADABLE,
        ),
        (
            "no signature",
            |mut it| {
                it.signature = |_| vec![];
                it
            },
            UNSIGNED,
        ),
        (
            "half a signature",
            |mut it| {
                it.signature = |signature| signature[..30].to_vec();
                it
            },
            UNSIGNED,
        ),
        (
            "a byte after the signature",
            |mut it| {
                it.signature = |signature| [&signature[..], &[0]].concat();
                it
            },
            UNSIGNED,
        ),
        (
            "a byte after the certificate",
            |mut it| {
                it.whole = Box::new(|whole| [&whole[..], &[0]].concat());
                it
            },
            UNREADABLE,
        ),
        (
            "a certificate that is cut",
            |mut it| {
                it.whole = Box::new(|whole| whole[..whole.len() - 1].to_vec());
                it
            },
            UNREADABLE,
        ),
    ];
    let mut wrong = vec![];
    for (what, change, reason) in cases {
        match refusal(move |nonce| change(Certificate::new(nonce))) {
            None => wrong.push(format!("{what}: accepted")),
            Some(why) if !why.contains(reason) => wrong.push(format!("{what}: {why}")),
            Some(_) => {}
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Nothing signs the certificate again, so its own signature refuses each change, if it can still be read.
#[test]
fn no_byte_of_a_certificate_can_be_altered() {
    let length = Certificate::new(&[6; 33]).der().len();
    let mut cases = 0;
    // the length differs by some bytes with the signature
    for at in (0..length - 8).step_by(5) {
        let why = refusal(move |nonce| Certificate {
            whole: Box::new(move |mut whole| {
                whole[at] ^= 1 << (at % 8);
                whole
            }),
            ..Certificate::new(nonce)
        });
        let why = why.unwrap_or_else(|| panic!("byte {at}: accepted"));
        let reasons = ["its certificate cannot be read", "not properly self-signed"];
        assert!(
            reasons.iter().any(|it| why.contains(it)),
            "byte {at}: {why}"
        );
        cases += 1;
    }
    assert!(cases > 400, "{cases}");
}
