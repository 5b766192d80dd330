//! TLS for pods, with a certificate that they can verify.
//!
//! The certificate's key is derived from the wrapping key of the control planes. So every key service
//! of the cluster has the same certificate, also after a restart, and only control planes and the
//! operator know the key. The key signs the certificate, which does not expire. The join service
//! derives it too, and so sends its token to no other server, wherever the network leads it. Other
//! clients have the certificate from the ConfigMap [`CONFIG_MAP`], to which the service writes it: the
//! API server vouches for the key service, as it vouches for the pods by their tokens. Without
//! Kubernetes the key is derived from a secret that both services know ([`super::shared_secret`]).

use std::io;
use std::net::TcpStream;
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ring::digest::{SHA256, digest};
use ring::signature::{Ed25519KeyPair, KeyPair};
use rustls::client::Resumption;
use rustls::crypto::ring::sign::any_eddsa_type;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName};
use rustls::server::NoServerSessionStorage;
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{
    ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection,
};
use serde_json::json;
use zeroize::Zeroizing;

use atls::Timed;
use base::crypto::{KEY_LEN, Secret, derive_key};
use base::der;
use kubernetes::NAMESPACE;
use kubernetes::client::{CONFIG_MAPS, Client};
use kubernetes::kubelet_certificate::pem;
use transport::half_open::PeersTurn;
use transport::{Accept, Transport};

/// The ConfigMap with the certificate. The chart makes it.
pub const CONFIG_MAP: &str = "key-service-ca";
/// Its key in the ConfigMap.
pub const FILE: &str = "ca.crt";

/// The HKDF info of the certificate's key.
const INFO: &str = "firstlight key service: certificate for clients of control planes";
/// The name of the Service.
pub const NAME_OF_SERVICE: &str = "key-service";
/// Its forms.
const NAMES: [&str; 4] = [
    "key-service.kube-system.svc",
    "key-service.kube-system.svc.cluster.local",
    "key-service.kube-system",
    NAME_OF_SERVICE,
];
/// The validity: from the first second that a clock can have to 9999-12-31 23:59:59, which stands
/// for "no end" (RFC 5280 §4.1.2.5).
const VALIDITY: [u64; 2] = [0, 253_402_300_799];
/// AlgorithmIdentifier of Ed25519 (RFC 8410 §3).
const ED25519: &[u8] = &[0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70];
/// What precedes the seed in PKCS #8 (RFC 8410 §7).
const PKCS8: &[u8] = &[
    0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20,
];
/// RelativeDistinguishedName with the common name `key-service`.
const NAME: &[u8] = b"\x31\x14\x30\x12\x06\x03\x55\x04\x03\x0c\x0bkey-service";
/// The extensions keyUsage (digitalSignature, critical) and extKeyUsage (serverAuth), and the OID of
/// subjectAltName (RFC 5280 §4.2.1).
const USAGE: &[u8] = b"\x30\x0e\x06\x03\x55\x1d\x0f\x01\x01\xff\x04\x04\x03\x02\x07\x80\
                       \x30\x13\x06\x03\x55\x1d\x25\x04\x0c\x30\x0a\x06\x08\x2b\x06\x01\x05\x05\x07\x03\x01";
const ALTERNATIVE_NAMES: &[u8] = &[0x06, 0x03, 0x55, 0x1d, 0x11];
/// dNSName in GeneralName.
const DNS_NAME: u8 = 0x82;

/// How often the certificate is written again, in case that the ConfigMap was replaced, or that a pod of an
/// earlier version, whose certificate is another one, wrote its own at the end of a roll-out. Until then pods
/// on other nodes believe no server, and try again. The API server stores nothing if nothing changes.
const INTERVAL: Duration = Duration::from_secs(60);
/// After how long it is tried again if that failed.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Returns the seed of the certificate of the control planes with this wrapping key.
pub fn seed_of(wrapping_key: &Secret) -> Secret {
    let seed = derive_key(wrapping_key.expose(), &[], INFO, KEY_LEN);
    seed.expect("the length is a constant within HKDF's bounds")
}

/// Connects to the key service, which must have the certificate of this seed.
pub fn connect(seed: &Secret, socket: TcpStream, deadline: Instant) -> io::Result<Transport> {
    let mut roots = RootCertStore::empty();
    roots.add(issue(seed).0).map_err(io::Error::other)?;
    let mut config = ClientConfig::builder_with_provider(tls::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.resumption = Resumption::disabled();
    let name = ServerName::try_from(NAME_OF_SERVICE).map_err(io::Error::other)?;
    socket.set_nodelay(true)?;
    let connection = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
    let mut connection = Connection::from(connection);
    let mut peer = Timed {
        socket: &socket,
        deadline,
        turn: &PeersTurn::default(),
    };
    atls::complete(&mut connection, &mut peer, None)?;
    socket.set_read_timeout(None)?;
    socket.set_write_timeout(None)?;
    atls::split(connection, socket)
}

/// Accepts connections with the certificate, as soon as its key is known.
#[derive(Default)]
pub struct Tls(OnceLock<Arc<ServerConfig>>);

impl Tls {
    /// Uses the certificate of this seed from now on. Returns it in PEM.
    pub fn provide(&self, seed: &Secret) -> Zeroizing<String> {
        let (tls, certificate) = Tls::of_seed(seed);
        // a second seed has no effect
        if let Some(config) = tls.0.into_inner() {
            let _ = self.0.set(config);
        }
        pem("CERTIFICATE", &certificate)
    }

    /// Creates an acceptor with the certificate of this seed. Also returns the certificate.
    pub fn of_seed(seed: &Secret) -> (Tls, CertificateDer<'static>) {
        let (certificate, key) = issue(seed);
        let resolver = SingleCertAndKey::from(CertifiedKey::new(vec![certificate.clone()], key));
        let mut config = ServerConfig::builder_with_provider(tls::provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("the provider has TLS 1.3")
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(resolver));
        config.alpn_protocols = vec![b"h2".to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        (Tls(OnceLock::from(Arc::new(config))), certificate)
    }
}

impl Accept for Tls {
    fn accept(
        &self,
        socket: TcpStream,
        deadline: Instant,
        turn: &PeersTurn,
    ) -> io::Result<Transport> {
        let config = self.0.get();
        let config = config.ok_or_else(|| io::Error::other("there is no wrapping key yet"))?;
        socket.set_nodelay(true)?;
        let connection = ServerConnection::new(config.clone()).map_err(io::Error::other)?;
        let mut connection = Connection::from(connection);
        let mut peer = Timed {
            socket: &socket,
            deadline,
            turn,
        };
        atls::complete(&mut connection, &mut peer, None)?;
        socket.set_read_timeout(None)?;
        socket.set_write_timeout(None)?;
        atls::split(connection, socket)
    }
}

/// Makes the certificate of the key with this seed.
fn issue(seed: &Secret) -> (CertificateDer<'static>, Arc<dyn rustls::sign::SigningKey>) {
    let pair = Ed25519KeyPair::from_seed_unchecked(seed.expose()).expect("a seed has 32 bytes");
    let public = pair.public_key().as_ref();
    let info = der::element(
        der::SEQUENCE,
        &[ED25519, &der::element(der::BIT_STRING, &[&[0], public])],
    );
    let mut serial = digest(&SHA256, public).as_ref()[..16].to_vec();
    serial[0] = serial[0] & 0x7f | 0x40; // positive, in the shortest encoding
    let names = NAMES.map(|name| der::element(DNS_NAME, &[name.as_bytes()]));
    let names = der::element(der::SEQUENCE, &[&names.concat()]);
    let names = der::element(
        der::SEQUENCE,
        &[
            ALTERNATIVE_NAMES,
            &der::element(der::OCTET_STRING, &[&names]),
        ],
    );
    let name = der::element(der::SEQUENCE, &[NAME]);
    let body = der::element(
        der::SEQUENCE,
        &[
            &der::element(der::context(0), &[&der::element(der::INTEGER, &[&[2]])]), // v3
            &der::element(der::INTEGER, &[&serial]),
            ED25519,
            &name,
            &der::element(
                der::SEQUENCE,
                &VALIDITY
                    .map(base::time::to_der)
                    .each_ref()
                    .map(Vec::as_slice),
            ),
            &name,
            &info,
            &der::element(
                der::context(3),
                &[&der::element(der::SEQUENCE, &[USAGE, &names])],
            ),
        ],
    );
    let signature = pair.sign(&body);
    let certificate = der::element(
        der::SEQUENCE,
        &[
            &body,
            ED25519,
            &der::element(der::BIT_STRING, &[&[0], signature.as_ref()]),
        ],
    );
    let pkcs8 = Zeroizing::new([PKCS8, seed.expose()].concat());
    let key =
        any_eddsa_type(&PrivatePkcs8KeyDer::from(&pkcs8[..])).expect("ring reads its own key");
    (certificate.into(), key)
}

/// Writes the certificate to the ConfigMap now and then, until the client's stop.
pub fn publish(client: &Client, pem: Zeroizing<String>) -> io::Result<JoinHandle<()>> {
    let client = client.clone();
    let write = move || {
        let at = CONFIG_MAPS.in_namespace(NAMESPACE).named(CONFIG_MAP);
        loop {
            let pause = match client.merge(&at, &json!({"data": {FILE: *pem}})) {
                Ok(_) => INTERVAL,
                Err(_) if client.is_stopped() => return,
                Err(error) => {
                    log::warn!(
                        "cannot write this service's certificate to {at}, so clients cannot verify it yet: {error}; `firstlight apply` or \
                         the chart creates that object"
                    );
                    RETRY_INTERVAL
                }
            };
            if client.stopped_within(pause) {
                return;
            }
        }
    };
    thread::Builder::new()
        .name("key-certificate".into())
        .spawn(write)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_verify_the_certificate_for_each_name_of_the_service_and_no_other_one() {
        let of = |byte| seed_of(&Secret::new(vec![byte; 32]));
        let (tls, other) = (Tls::default(), Tls::default());
        let pem = tls.provide(&of(1));
        assert_eq!(pem, Tls::default().provide(&of(1)));
        assert_ne!(pem, other.provide(&of(2)));
        assert!(pem.lines().all(|line| line.len() <= 64));
        let trusted = issue(&of(1)).0;
        let meets = |server: &Tls, name: &'static str| {
            let mut roots = RootCertStore::empty();
            roots.add(trusted.clone()).unwrap();
            let config = ClientConfig::builder_with_provider(tls::provider())
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots)
                .with_no_client_auth();
            let name = ServerName::try_from(name).unwrap();
            let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
            let mut server = ServerConnection::new(server.0.get().unwrap().clone()).unwrap();
            while client.is_handshaking() || server.is_handshaking() {
                let mut bytes = Vec::new();
                client.write_tls(&mut bytes).unwrap();
                server.read_tls(&mut &bytes[..]).unwrap();
                server.process_new_packets().unwrap();
                bytes.clear();
                server.write_tls(&mut bytes).unwrap();
                client.read_tls(&mut &bytes[..]).unwrap();
                client.process_new_packets()?;
            }
            Ok::<_, rustls::Error>(())
        };
        for name in NAMES {
            assert_eq!(meets(&tls, name), Ok(()));
        }
        assert!(meets(&tls, "join-service.kube-system.svc").is_err());
        assert!(meets(&other, NAMES[0]).is_err());
    }
}
