//! An AES key of a server with KMIP (OASIS, "Key Management Interoperability Protocol", versions 1.4, 2.0 and 2.1).
//!
//! ```text
//! kms://kmip?address=HOST[:PORT]&keyId=IDENTIFIER[&caFile=FILE]
//! ```
//!
//! Server and client authenticate by certificates. The variables `KMIP_CLIENT_CERTIFICATE` and `KMIP_CLIENT_KEY` name the PEM files
//! with the client's certificate and key.
//!
//! Only the operations Discover Versions, Encrypt and Decrypt are used; all versions encode them alike. The stored value is the
//! server's answer to Encrypt in KMIP's encoding: the key's identifier, the ciphertext, the initialization vector, the tag.

use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, fs};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use zeroize::Zeroizing;

use base::crypto::Secret;
use transport::dial::dial;
use transport::timed::Timed;

use super::error::{Error, said};
use super::service::{KeyEncryptionKey, KmsKind};
use super::ttlv::{self, Encoded, HEADER, Items, find};
use super::uri::Query;

/// This service's entry in the table of all services.
pub const SERVICE: KmsKind = KmsKind {
    name: "kmip",
    parameters: PARAMETERS,
    open,
};

const PARAMETERS: &str = "address=HOST[:PORT]&keyId=IDENTIFIER[&caFile=FILE]";

/// Variables with the paths of the client's certificate and key.
const CERTIFICATE: &str = "KMIP_CLIENT_CERTIFICATE";
const KEY: &str = "KMIP_CLIENT_KEY";
/// The variable that names a file with the trusted authorities for all TLS clients, as in OpenSSL.
const CERT_FILE: &str = "SSL_CERT_FILE";
/// The port of KMIP (IANA).
pub const PORT: u16 = 5696;
/// Time limit of a request with all its steps, and of one try to connect.
const TIMEOUT: Duration = Duration::from_secs(20);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum bytes of an answer.
const MAX_ANSWER: u64 = 64 << 10;
/// Additional data of each encryption, so that a ciphertext that another program made with the same key is refused.
const CONTEXT: &[u8] = b"firstlight master secret";
/// Versions of the protocol, the newest first. The first request uses the oldest.
const VERSIONS: [Version; 3] = [(2, 1), (2, 0), OLDEST];
const OLDEST: Version = (1, 4);

type Version = (u32, u32);

/// Tags (specification 1.4, §9.1.3.1).
mod tag {
    pub const BATCH_COUNT: u32 = 0x42_00_0d;
    pub const BATCH_ITEM: u32 = 0x42_00_0f;
    pub const BLOCK_CIPHER_MODE: u32 = 0x42_00_11;
    pub const CRYPTOGRAPHIC_ALGORITHM: u32 = 0x42_00_28;
    pub const CRYPTOGRAPHIC_PARAMETERS: u32 = 0x42_00_2b;
    pub const IV: u32 = 0x42_00_3d;
    pub const OPERATION: u32 = 0x42_00_5c;
    pub const PROTOCOL_VERSION: u32 = 0x42_00_69;
    pub const PROTOCOL_VERSION_MAJOR: u32 = 0x42_00_6a;
    pub const PROTOCOL_VERSION_MINOR: u32 = 0x42_00_6b;
    pub const REQUEST_HEADER: u32 = 0x42_00_77;
    pub const REQUEST_MESSAGE: u32 = 0x42_00_78;
    pub const REQUEST_PAYLOAD: u32 = 0x42_00_79;
    pub const RESPONSE_MESSAGE: u32 = 0x42_00_7b;
    pub const RESPONSE_PAYLOAD: u32 = 0x42_00_7c;
    pub const RESULT_MESSAGE: u32 = 0x42_00_7d;
    pub const RESULT_REASON: u32 = 0x42_00_7e;
    pub const RESULT_STATUS: u32 = 0x42_00_7f;
    pub const UNIQUE_IDENTIFIER: u32 = 0x42_00_94;
    pub const DATA: u32 = 0x42_00_c2;
    pub const RANDOM_IV: u32 = 0x42_00_c5;
    pub const TAG_LENGTH: u32 = 0x42_00_ce;
    pub const ADDITIONAL_DATA: u32 = 0x42_00_fe;
    pub const AUTHENTICATION_TAG: u32 = 0x42_00_ff;
}

/// Operations (§9.1.3.2.27).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Operation {
    DiscoverVersions = 0x1e,
    Encrypt = 0x1f,
    Decrypt = 0x20,
}

/// Block cipher mode GCM (§9.1.3.2.14), cryptographic algorithm AES (§9.1.3.2.13).
const GCM: u32 = 0x09;
const AES: u32 = 0x03;
/// Bytes of the tag of AES-GCM.
const TAG: usize = 16;

/// Reasons of a failure (§9.1.3.2.29, and those that 2.0 added).
mod reason {
    pub const ITEM_NOT_FOUND: u32 = 0x01;
    pub const AUTHENTICATION_NOT_SUCCESSFUL: u32 = 0x03;
    pub const OPERATION_NOT_SUPPORTED: u32 = 0x05;
    pub const FEATURE_NOT_SUPPORTED: u32 = 0x08;
    pub const CRYPTOGRAPHIC_FAILURE: u32 = 0x0a;
    pub const ILLEGAL_OPERATION: u32 = 0x0b;
    pub const PERMISSION_DENIED: u32 = 0x0c;
    pub const INCOMPATIBLE_USAGE_MASK: u32 = 0x29;
    pub const OBJECT_NOT_FOUND: u32 = 0x37;
    pub const NOT_AUTHORISED: u32 = 0x39;
}

struct Kmip {
    host: String,
    port: u16,
    key: String,
    ca: Option<String>,
}

fn open(mut query: Query) -> Result<Box<dyn KeyEncryptionKey>, Error> {
    let address = query.need("address")?;
    let key = query.need("keyId")?;
    let ca = query.take("caFile");
    query.finish(PARAMETERS)?;
    let (host, port) = split_address(&address).ok_or_else(|| {
        Error::Uri(format!(
            "the address {address:?} is malformed: expected HOST or HOST:PORT"
        ))
    })?;
    Ok(Box::new(Kmip {
        host,
        port,
        key,
        ca,
    }))
}

/// Splits `HOST`, `HOST:PORT`, `[IPv6]` and `[IPv6]:PORT`.
fn split_address(address: &str) -> Option<(String, u16)> {
    let (host, port) = match address.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, port.parse().ok()?),
        _ => (address, PORT),
    };
    let bare = host
        .strip_prefix('[')
        .map_or(Some(host), |rest| rest.strip_suffix(']'))?;
    ServerName::try_from(bare).ok()?;
    Some((bare.to_owned(), port))
}

impl KeyEncryptionKey for Kmip {
    /// Makes a client. Sends no request: the first use of the key shows whether it can be used, and nothing is written before.
    fn prepare(&self, create: bool) -> Result<(), Error> {
        if create {
            Err(Error::Refused(format!(
                "{}: --create-key makes no keys by KMIP: make an AES key of 256 bits with the usages Encrypt and Decrypt there, activate \
             it, and name its identifier in keyId",
                self.host
            )))
        } else {
            Ok(())
        }
    }

    fn wrap(&self, key: &Secret) -> Result<Vec<u8>, Error> {
        let mut connection = Connection::open(self)?;
        let payload = [
            ttlv::text(tag::UNIQUE_IDENTIFIER, &self.key),
            parameters(true),
            ttlv::bytes(tag::DATA, key.expose()),
            ttlv::bytes(tag::ADDITIONAL_DATA, CONTEXT),
        ];
        let answer = connection.send(Operation::Encrypt, &payload)?;
        parse_encrypted(&self.host, &self.key, &answer)
    }

    fn unwrap(&self, wrapped: &[u8]) -> Result<Secret, Error> {
        let sealed = split(wrapped)?;
        let mut connection = Connection::open(self)?;
        let payload = [
            ttlv::text(tag::UNIQUE_IDENTIFIER, sealed.key),
            parameters(false),
            ttlv::bytes(tag::DATA, sealed.data),
            ttlv::bytes(tag::IV, sealed.iv),
            ttlv::bytes(tag::ADDITIONAL_DATA, CONTEXT),
            ttlv::bytes(tag::AUTHENTICATION_TAG, sealed.tag),
        ];
        let answer = connection.send(Operation::Decrypt, &payload)?;
        parse_decrypted(&self.host, sealed.key, &answer)
    }
}

/// Returns the parameters of AES-GCM. For encryption the server chooses the initialization vector, because no two may be equal under one key.
fn parameters(to_encrypt: bool) -> Encoded {
    let mut items = vec![
        ttlv::enumeration(tag::BLOCK_CIPHER_MODE, GCM),
        ttlv::enumeration(tag::CRYPTOGRAPHIC_ALGORITHM, AES),
    ];
    if to_encrypt {
        items.push(ttlv::boolean(tag::RANDOM_IV, true));
    }
    items.push(ttlv::integer(tag::TAG_LENGTH, TAG as u32));
    ttlv::structure(tag::CRYPTOGRAPHIC_PARAMETERS, &items)
}

/// A connection of a few requests.
struct Connection<'a> {
    service: &'a Kmip,
    stream: StreamOwned<ClientConnection, Timed>,
    version: Version,
}

impl<'a> Connection<'a> {
    /// Connects, and agrees on a version.
    fn open(service: &'a Kmip) -> Result<Self, Error> {
        let deadline = Instant::now() + TIMEOUT;
        let config = service.config()?;
        let host = &service.host;
        let name = ServerName::try_from(host.clone()).expect("checked by split_address");
        let session = ClientConnection::new(Arc::new(config), name)
            .map_err(|error| Error::Credentials(format!("{host}: {error}")))?;
        let socket = dial(host, service.port, deadline, CONNECT_TIMEOUT)
            .map_err(|error| Error::Away(format!("{host}:{}: {error}", service.port)))?;
        let mut connection = Connection {
            service,
            stream: StreamOwned::new(session, Timed { socket, deadline }),
            version: OLDEST,
        };
        let answer = connection.send(Operation::DiscoverVersions, &VERSIONS.map(version))?;
        connection.version = parse_versions(host, &answer)?;
        Ok(connection)
    }

    /// Sends a request and returns the answer.
    fn send(&mut self, operation: Operation, payload: &[Encoded]) -> Result<Encoded, Error> {
        let host = &self.service.host;
        let request = request(self.version, operation, payload);
        let failed = |error: io::Error| {
            use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
            let text = format!("{host}:{}: {operation:?}: {error}", self.service.port);
            let hint = format!(
                "{CERTIFICATE} and {KEY} name the client's certificate and key, caFile the server's authorities"
            );
            // the message of rustls says which side refuses which certificate
            if error
                .get_ref()
                .is_some_and(|inner| inner.is::<rustls::Error>())
            {
                return Error::Refused(format!("{text}; {hint}"));
            }
            // a TLS 1.3 server refuses a client only after the handshake, and its alert may be lost with the connection
            match error.kind() {
                BrokenPipe | ConnectionReset | UnexpectedEof => {
                    Error::Away(format!("{text}; if the server refuses the client: {hint}"))
                }
                _ => Error::Away(text),
            }
        };
        while self.stream.conn.is_handshaking() {
            let StreamOwned { conn, sock } = &mut self.stream;
            conn.complete_io(sock).map_err(failed)?;
        }
        self.stream.write_all(&request).map_err(failed)?;
        self.stream.flush().map_err(failed)?;
        let mut header = [0; HEADER];
        self.stream.read_exact(&mut header).map_err(failed)?;
        let length = ttlv::message_length(header, tag::RESPONSE_MESSAGE)
            .filter(|length| *length <= MAX_ANSWER)
            .ok_or_else(|| unusable(host))?;
        // No buffer grows while it receives the key: a buffer that grows leaves copies of the key in freed memory.
        let mut answer = Zeroizing::new(Vec::with_capacity(MAX_ANSWER as usize));
        answer.extend_from_slice(&header);
        let rest = length - HEADER as u64;
        let read = (&mut self.stream).take(rest).read_to_end(&mut answer);
        if read.map_err(failed)? as u64 == rest {
            Ok(answer)
        } else {
            Err(failed(io::ErrorKind::UnexpectedEof.into()))
        }
    }
}

impl Kmip {
    fn config(&self) -> Result<ClientConfig, Error> {
        let file = |variable: &str| {
            let path = env::var(variable).ok().filter(|path| !path.is_empty());
            let path = path.ok_or_else(|| {
                Error::Credentials(format!(
                    "there are no credentials for {}: {CERTIFICATE} and {KEY} name the files of the client's certificate and key, in PEM",
                    self.host
                ))
            })?;
            let bytes = fs::read(&path).map(Zeroizing::new);
            let bytes = bytes.map_err(|error| Error::Credentials(format!("{path}: {error}")))?;
            Ok::<_, Error>((path, bytes))
        };
        let malformed =
            |path: &str, what: &str| Error::Credentials(format!("{path}: no {what} in PEM"));
        let (path, pem) = file(CERTIFICATE)?;
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&pem).flatten().collect();
        if chain.is_empty() {
            return Err(malformed(&path, "certificate"));
        }
        let (path, pem) = file(KEY)?;
        let key =
            PrivateKeyDer::from_pem_slice(&pem).map_err(|_| malformed(&path, "private key"))?;
        let of_environment = env::var(CERT_FILE).ok();
        let ca = self.ca.as_deref().or(of_environment.as_deref());
        let authorities = http::Roots::load(ca.map(Path::new))?;
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(authorities.certificates().iter().cloned());
        let unusable = |error: rustls::Error| Error::Credentials(format!("{path}: {error}"));
        ClientConfig::builder_with_provider(tls::provider())
            .with_safe_default_protocol_versions()
            .map_err(unusable)?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)
            .map_err(unusable)
    }
}

fn version((major, minor): Version) -> Encoded {
    ttlv::structure(
        tag::PROTOCOL_VERSION,
        &[
            ttlv::integer(tag::PROTOCOL_VERSION_MAJOR, major),
            ttlv::integer(tag::PROTOCOL_VERSION_MINOR, minor),
        ],
    )
}

/// Returns a request message with one operation (specification 1.4, §7.1).
fn request(of: Version, operation: Operation, payload: &[Encoded]) -> Encoded {
    let header = [version(of), ttlv::integer(tag::BATCH_COUNT, 1)];
    let item = [
        ttlv::enumeration(tag::OPERATION, operation as u32),
        ttlv::structure(tag::REQUEST_PAYLOAD, payload),
    ];
    ttlv::structure(
        tag::REQUEST_MESSAGE,
        &[
            ttlv::structure(tag::REQUEST_HEADER, &header),
            ttlv::structure(tag::BATCH_ITEM, &item),
        ],
    )
}

fn unusable(host: &str) -> Error {
    Error::Answer(format!(
        "{host}: the answer is not what KMIP's specification has; is this a KMIP server?"
    ))
}

/// Returns the payload of an answer, or the server's reason for a refusal.
fn payload<'a>(
    host: &str,
    key: &str,
    operation: Operation,
    message: &'a [u8],
) -> Result<&'a [u8], Error> {
    let malformed = || unusable(host);
    let message = find(message, tag::RESPONSE_MESSAGE).and_then(|message| message.items());
    let item = find(message.ok_or_else(malformed)?, tag::BATCH_ITEM);
    let item = item.and_then(|item| item.items()).ok_or_else(malformed)?;
    let number = |tag| find(item, tag).and_then(|item| item.number());
    if number(tag::RESULT_STATUS).ok_or_else(malformed)? == 0 {
        let is_other = number(tag::OPERATION).is_some_and(|other| other != operation as u32);
        let payload = find(item, tag::RESPONSE_PAYLOAD).and_then(|payload| payload.items());
        return payload.filter(|_| !is_other).ok_or_else(malformed);
    }
    let words = find(item, tag::RESULT_MESSAGE).and_then(|words| words.text());
    let reason = number(tag::RESULT_REASON).unwrap_or_default();
    let what = match reason {
        reason::ITEM_NOT_FOUND | reason::OBJECT_NOT_FOUND => {
            format!("there is no key {key}, or this client has no permission to see it")
        }
        reason::AUTHENTICATION_NOT_SUCCESSFUL
        | reason::PERMISSION_DENIED
        | reason::NOT_AUTHORISED => format!(
            "the server does not permit {operation:?} with the key {key}: it must be active and have this usage, and the client's certificate must be \
             one that may use it"
        ),
        reason::ILLEGAL_OPERATION | reason::INCOMPATIBLE_USAGE_MASK => {
            format!("the usages of the key {key} do not include {operation:?}")
        }
        reason::CRYPTOGRAPHIC_FAILURE if operation == Operation::Decrypt => {
            "this key did not wrap this file".to_owned()
        }
        reason::OPERATION_NOT_SUPPORTED | reason::FEATURE_NOT_SUPPORTED => {
            format!("the server does not support {operation:?} with AES-GCM")
        }
        other => format!("{operation:?} with the key {key} fails with reason {other:#x}"),
    };
    let said = said(words.unwrap_or_default());
    Err(Error::Refused(format!("{host}: {what}{said}")))
}

/// Returns the newest version that both sides have.
fn parse_versions(host: &str, message: &[u8]) -> Result<Version, Error> {
    let payload = payload(host, "", Operation::DiscoverVersions, message)?;
    let versions = Items(payload).filter(|item| item.is(tag::PROTOCOL_VERSION));
    let offered: Vec<Version> = versions
        .filter_map(|version| {
            let items = version.items()?;
            let number = |tag| find(items, tag)?.number();
            Some((
                number(tag::PROTOCOL_VERSION_MAJOR)?,
                number(tag::PROTOCOL_VERSION_MINOR)?,
            ))
        })
        .collect();
    let newest = VERSIONS.into_iter().find(|known| offered.contains(known));
    newest.ok_or_else(|| {
        Error::Refused(format!(
            "{host}: the server has none of the KMIP versions 2.1, 2.0 and 1.4"
        ))
    })
}

/// The stored value.
struct Sealed<'a> {
    key: &'a str,
    data: &'a [u8],
    iv: &'a [u8],
    tag: &'a [u8],
}

impl<'a> Sealed<'a> {
    fn find(items: &'a [u8]) -> Option<Sealed<'a>> {
        let sealed = Sealed {
            key: find(items, tag::UNIQUE_IDENTIFIER)?.text()?,
            data: find(items, tag::DATA)?.bytes()?,
            iv: find(items, tag::IV)?.bytes()?,
            tag: find(items, tag::AUTHENTICATION_TAG)?.bytes()?,
        };
        (sealed.tag.len() == TAG).then_some(sealed)
    }
}

/// Makes the stored value from an answer to Encrypt.
pub fn parse_encrypted(host: &str, key: &str, message: &[u8]) -> Result<Vec<u8>, Error> {
    let payload = payload(host, key, Operation::Encrypt, message)?;
    let sealed = Sealed::find(payload).ok_or_else(|| unusable(host))?;
    // only the needed items: the answer may contain others
    let items = [
        ttlv::text(tag::UNIQUE_IDENTIFIER, sealed.key),
        ttlv::bytes(tag::DATA, sealed.data),
        ttlv::bytes(tag::IV, sealed.iv),
        ttlv::bytes(tag::AUTHENTICATION_TAG, sealed.tag),
    ];
    Ok(items.iter().flat_map(|item| item.to_vec()).collect())
}

/// Returns the key of an answer to Decrypt.
pub fn parse_decrypted(host: &str, key: &str, message: &[u8]) -> Result<Secret, Error> {
    let payload = payload(host, key, Operation::Decrypt, message)?;
    let data = find(payload, tag::DATA).and_then(|data| data.bytes());
    data.map(|data| Secret::new(data.to_vec()))
        .ok_or_else(|| unusable(host))
}

/// Checks a stored value.
pub fn check_stored(wrapped: &[u8]) -> Result<(), Error> {
    split(wrapped).map(drop)
}

fn split(wrapped: &[u8]) -> Result<Sealed<'_>, Error> {
    let sealed = Sealed::find(wrapped).filter(|sealed| !sealed.key.is_empty());
    sealed.ok_or_else(|| Error::Format("wrappedKey was not made by a KMIP server".into()))
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    fn answer(operation: Operation, status: u32, rest: &[Encoded]) -> Encoded {
        let mut item = vec![
            ttlv::enumeration(tag::OPERATION, operation as u32),
            ttlv::enumeration(tag::RESULT_STATUS, status),
        ];
        item.extend_from_slice(rest);
        let item = ttlv::structure(tag::BATCH_ITEM, &item);
        ttlv::structure(tag::RESPONSE_MESSAGE, &[item])
    }

    fn encrypted() -> Encoded {
        let payload = [
            ttlv::text(tag::UNIQUE_IDENTIFIER, "7"),
            ttlv::bytes(tag::DATA, &[5; 32]),
            ttlv::bytes(tag::IV, &[6; 12]),
            ttlv::bytes(tag::AUTHENTICATION_TAG, &[7; TAG]),
        ];
        let payload = ttlv::structure(tag::RESPONSE_PAYLOAD, &payload);
        answer(Operation::Encrypt, 0, &[payload])
    }

    fn refused(operation: Operation, reason: u32) -> String {
        let why = [
            ttlv::enumeration(tag::RESULT_REASON, reason),
            ttlv::text(tag::RESULT_MESSAGE, "own\nwords"),
        ];
        let error = payload("a", "7", operation, &answer(operation, 1, &why)).unwrap_err();
        error.to_string()
    }

    #[test]
    fn an_answer_is_stored_as_what_decrypt_needs() {
        let stored = parse_encrypted("a", "7", &encrypted()).unwrap();
        let sealed = split(&stored).unwrap();
        assert_eq!((sealed.key, sealed.data), ("7", &[5; 32][..]));
        assert_eq!((sealed.iv, sealed.tag), (&[6; 12][..], &[7; TAG][..]));
        for length in [0, 7, 8, stored.len() - TAG] {
            assert!(check_stored(&stored[..length]).is_err(), "{length}");
        }
        assert!(
            parse_decrypted("a", "7", &encrypted()).is_err(),
            "of another operation"
        );
    }

    #[test]
    fn refusals_say_what_to_mend_and_keep_the_servers_words_in_a_line() {
        use Operation::{Decrypt, Encrypt};
        for (operation, reason, expected) in [
            (
                Encrypt,
                0x01,
                "a: there is no key 7, or this client has no permission to see it (own words)",
            ),
            (Encrypt, 0x0c, "does not permit Encrypt with the key 7"),
            (
                Encrypt,
                0x0b,
                "the usages of the key 7 do not include Encrypt",
            ),
            (Decrypt, 0x0a, "this key did not wrap this file"),
            (
                Encrypt,
                0x0a,
                "Encrypt with the key 7 fails with reason 0xa",
            ),
            (
                Encrypt,
                0x08,
                "the server does not support Encrypt with AES-GCM",
            ),
        ] {
            let text = refused(operation, reason);
            assert!(text.contains(expected), "{text}");
        }
    }

    #[test]
    fn the_newest_version_of_both_is_chosen() {
        let parse = |versions: &[Version]| {
            let versions: Vec<Encoded> = versions.iter().map(|of| version(*of)).collect();
            let payload = ttlv::structure(tag::RESPONSE_PAYLOAD, &versions);
            parse_versions("a", &answer(Operation::DiscoverVersions, 0, &[payload]))
        };
        assert_eq!(parse(&[(1, 4), (2, 1), (3, 0)]), Ok((2, 1)));
        assert_eq!(parse(&[(1, 4), (1, 3)]), Ok((1, 4)));
        let error = parse(&[(1, 2)]).unwrap_err().to_string();
        assert!(
            error.contains("none of the KMIP versions 2.1, 2.0 and 1.4"),
            "{error}"
        );
    }

    #[test]
    fn addresses_are_hosts_with_or_without_a_port() {
        for (address, expected) in [
            ("kmip.example", ("kmip.example", 5696)),
            ("kmip.example:1", ("kmip.example", 1)),
            ("[::1]", ("::1", 5696)),
            ("[::1]:2", ("::1", 2)),
        ] {
            let (host, port) = split_address(address).unwrap();
            assert_eq!((&*host, port), expected);
        }
        for bad in [
            "",
            ":1",
            "a:b",
            "a/b",
            "https://a",
            "[::1",
            "a:70000",
            "u@a",
        ] {
            assert!(split_address(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn mutated_answers_never_panic() {
        for bytes in mutations(&encrypted(), 20_000) {
            if let Ok(stored) = parse_encrypted("a", "7", &bytes) {
                check_stored(&stored).unwrap_or_default();
            }
            let _ = parse_decrypted("a", "7", &bytes);
            let _ = parse_versions("a", &bytes);
        }
    }
}
