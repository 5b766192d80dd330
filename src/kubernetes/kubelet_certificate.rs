//! The serving certificate of a kubelet: a P-256 key, signed by the cluster's CA (X.509 version 3,
//! RFC 5280).
//!
//! On the first control plane, the node signs the certificate itself, because it has the CA. For
//! all other nodes, the join service on a control plane signs it. The API server requires it from
//! the kubelet (`kubelet-certificate-authority`). It differs from Constellation's in two points. It
//! also contains the node's DNS names. It is valid for serving only, like those of Kubernetes'
//! signer `kubernetes.io/kubelet-serving`: a client certificate with this subject would
//! authenticate as the node.

use std::fmt;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair};
use rustls::SignatureScheme;
use rustls::crypto::ring::sign::{any_ecdsa_type, any_supported_type};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::SigningKey;
use zeroize::{Zeroize, Zeroizing};

use super::parameters::NodeName;
use base::der::{self, DerReader};
use base::file;
use base::time as instant;
use base::x509;

/// The accepted clock difference between nodes.
const BACKDATED: Duration = Duration::from_secs(2 * 60 * 60);
/// The validity of a certificate, as in Constellation. It ends with the CA's validity at the
/// latest, because clients do not accept it after that.
const VALIDITY: Duration = Duration::from_secs(365 * 24 * 60 * 60);

// Object identifiers in DER, with tag and length.
pub(super) const ORGANIZATION: &[u8] = &[0x06, 0x03, 0x55, 0x04, 0x0a];
pub(super) const COMMON_NAME: &[u8] = &[0x06, 0x03, 0x55, 0x04, 0x03];
const SUBJECT_KEY_IDENTIFIER: &[u8] = &[0x06, 0x03, 0x55, 0x1d, 0x0e];
const KEY_USAGE: &[u8] = &[0x06, 0x03, 0x55, 0x1d, 0x0f];
pub(super) const SUBJECT_ALT_NAME: &[u8] = &[0x06, 0x03, 0x55, 0x1d, 0x11];
const BASIC_CONSTRAINTS: &[u8] = &[0x06, 0x03, 0x55, 0x1d, 0x13];
const AUTHORITY_KEY_IDENTIFIER: &[u8] = &[0x06, 0x03, 0x55, 0x1d, 0x23];
const EXTENDED_KEY_USAGE: &[u8] = &[0x06, 0x03, 0x55, 0x1d, 0x25];
const SERVER_AUTH: &[u8] = &[0x06, 0x08, 0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x01];
const CLIENT_AUTH: &[u8] = &[0x06, 0x08, 0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x02];

/// The name of a client certificate that did not come by a request of the kubelet. A kubelet expects a link as the name of the present
/// one.
const CLIENT_FILE: &str = "kubelet-client-firstlight.pem";

/// DER BOOLEAN TRUE, for a critical extension.
const CRITICAL: &[u8] = &[der::BOOLEAN, 1, 0xff];
/// The key usage digitalSignature, the first bit of eight (RFC 5280 §4.2.1.3). An ECDSA key cannot
/// encipher.
const DIGITAL_SIGNATURE: &[u8] = &[der::BIT_STRING, 2, 7, 0x80];

/// Signature algorithms of a CA, in order of preference: the TLS signature scheme, and the
/// AlgorithmIdentifier (RFC 4055 §5, RFC 5758 §3.2).
const ALGORITHMS: [(SignatureScheme, &[u8]); 3] = [
    (
        SignatureScheme::RSA_PKCS1_SHA256,
        &[
            0x30, 0x0d, 0x06, 0x09, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x0b, 0x05,
            0x00,
        ],
    ),
    (
        SignatureScheme::ECDSA_NISTP256_SHA256,
        &[
            0x30, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02,
        ],
    ),
    (
        SignatureScheme::ECDSA_NISTP384_SHA384,
        &[
            0x30, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x03,
        ],
    ),
];

/// Why no certificate was issued.
#[derive(Debug)]
pub enum Error {
    /// The CA's certificate or key cannot be used; a clause.
    Authority(String),
    /// The key generation failed.
    Key,
    /// A file could not be written.
    Io(PathBuf, io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Authority(why) => write!(f, "the cluster's CA cannot sign a certificate: {why}"),
            Error::Key => f.write_str("cannot generate a P-256 key for a certificate"),
            Error::Io(path, error) => write!(f, "cannot write {}: {error}", path.display()),
        }
    }
}

impl std::error::Error for Error {}

/// A certificate and its key, as PEM.
pub struct KubeletCertificate {
    /// The `CERTIFICATE`, without the CA's.
    pub certificate: String,
    /// The `PRIVATE KEY` (PKCS#8).
    pub key: Zeroizing<String>,
}

/// Creates a key and a certificate for the kubelet of `node` with its name, `names` and
/// `addresses`. The CA's certificate and key are PEM in kubeadm's format: RSA, or ECDSA on P-256 or
/// P-384.
pub fn issue(
    ca_certificate: &[u8],
    ca_key: &[u8],
    node: &NodeName,
    names: &[String],
    addresses: &[IpAddr],
    now: SystemTime,
) -> Result<KubeletCertificate, Error> {
    let authority = ClusterCa::new(ca_certificate, ca_key)?;
    let key = NewKey::generate()?;
    let certificate = authority.certify(&key.public, node, names, addresses, now)?;
    Ok(KubeletCertificate {
        certificate,
        key: key.pem,
    })
}

/// A new P-256 key.
pub(super) struct NewKey {
    /// The `PRIVATE KEY` (PKCS#8), PEM.
    pub pem: Zeroizing<String>,
    /// The SubjectPublicKeyInfo, DER.
    pub public: Vec<u8>,
}

impl NewKey {
    pub(super) fn generate() -> Result<NewKey, Error> {
        let pkcs8 =
            EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &SystemRandom::new());
        let pkcs8 = Zeroizing::new(pkcs8.map_err(|_| Error::Key)?.as_ref().to_vec());
        let key = any_ecdsa_type(&PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(&pkcs8[..])))
            .map_err(|_| Error::Key)?;
        Ok(NewKey {
            public: key.public_key().ok_or(Error::Key)?.to_vec(),
            pem: pem("PRIVATE KEY", &pkcs8),
        })
    }
}

/// Creates a key and a client certificate for the kubelet of `node`. Returns both in one PEM text.
pub fn issue_client(
    ca_certificate: &[u8],
    ca_key: &[u8],
    node: &NodeName,
    now: SystemTime,
) -> Result<Zeroizing<String>, Error> {
    let key = NewKey::generate()?;
    let authority = ClusterCa::new(ca_certificate, ca_key)?;
    let made = KubeletCertificate {
        certificate: authority.certify_client(&key.public, node, now)?,
        key: key.pem,
    };
    Ok(made.in_one())
}

/// Gives a kubelet its client certificate with the key, both PEM, as the present one: `link` names the file with them.
pub fn place_client(link: &Path, certificate: &str) -> Result<(), Error> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |error| Error::Io(path, error)
    };
    let new = link.with_file_name(CLIENT_FILE);
    write_private(&new, certificate.as_bytes())?;
    let next = link.with_extension("next");
    match fs::remove_file(&next) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(&next)(error)),
        _ => {}
    }
    symlink(&new, &next).map_err(failed(&next))?;
    fs::rename(&next, link).map_err(failed(link))?;
    let folder = link.parent().unwrap_or(Path::new("/"));
    file::sync_directory(folder).map_err(failed(folder))
}

impl KubeletCertificate {
    /// Returns certificate and key in one PEM text, as a kubelet keeps its client certificate (k8s.io/client-go, util/certificate:
    /// certificate_store.go).
    pub fn in_one(&self) -> Zeroizing<String> {
        Zeroizing::new([&self.certificate[..], &self.key].concat())
    }

    /// Writes both files with mode 0600, the key first. Each is written as a whole or not at all.
    pub fn write(&self, certificate: &Path, key: &Path) -> Result<(), Error> {
        write_private(key, self.key.as_bytes())?;
        write_private(certificate, self.certificate.as_bytes())
    }
}

fn write_private(path: &Path, content: &[u8]) -> Result<(), Error> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(directory)
        .and_then(|()| file::replace(path, content, 0o600))
        .map_err(|error| Error::Io(path.to_owned(), error))
}

/// The cluster's CA, ready to sign.
pub struct ClusterCa {
    key: std::sync::Arc<dyn SigningKey>,
    scheme: SignatureScheme,
    algorithm: &'static [u8],
    /// The CA's subject, the issuer of its certificates.
    name: Vec<u8>,
    key_identifier: Option<Vec<u8>>,
    /// The end of the CA certificate's validity.
    end: SystemTime,
}

/// The refusal of a private key. The error of the library shows a line of the file, which can be
/// the key.
pub const NO_KEY: &str = "expected a private key in PEM (PKCS #8, PKCS #1 or SEC 1), with its first and last lines on lines of their own";

impl ClusterCa {
    /// Loads a CA from its certificate and key, PEM in kubeadm's format: RSA, or ECDSA on P-256 or
    /// P-384.
    pub fn new(certificate: &[u8], key: &[u8]) -> Result<ClusterCa, Error> {
        let refuse = |why: String| Error::Authority(why);
        let certificate = CertificateDer::from_pem_slice(certificate)
            .map_err(|_| refuse("its certificate is not PEM".into()))?;
        // webpki checks the certificate, but does not return its end and its extensions
        let anchor = webpki::anchor_from_trusted_cert(&certificate)
            .map_err(|_| refuse("its certificate is not an X.509 certificate".into()))?;
        let read = x509::Certificate::parse(&certificate)
            .map_err(|_| refuse("its certificate is not an X.509 certificate".into()))?;
        let mut der =
            PrivateKeyDer::from_pem_slice(key).map_err(|_| refuse(format!("its key: {NO_KEY}")))?;
        let key = any_supported_type(&der);
        der.zeroize();
        let key = key.map_err(|error| refuse(format!("its key cannot be used: {error}")))?;
        if key.public_key().is_none_or(|own| *own != *read.key()) {
            return Err(refuse("its key does not belong to its certificate".into()));
        }
        let usable = ALGORITHMS
            .iter()
            .find(|(scheme, _)| key.choose_scheme(&[*scheme]).is_some());
        let (scheme, algorithm) =
            *usable.ok_or_else(|| refuse("its key is neither RSA nor P-256 nor P-384".into()))?;
        let name = der::element(der::SEQUENCE, &[anchor.subject.as_ref()]);
        let (_, end) = read
            .validity()
            .map_err(|_| refuse("its certificate has no valid end of its validity".into()))?;
        Ok(ClusterCa {
            key,
            scheme,
            algorithm,
            name,
            key_identifier: key_identifier(&read),
            end: UNIX_EPOCH + Duration::from_secs(end),
        })
    }

    /// Issues a certificate for the kubelet of `node` and this key (SubjectPublicKeyInfo, DER) with
    /// its name, `names` and `addresses`. Returns PEM without the CA's certificate. It ends with
    /// the CA's certificate at the latest.
    pub fn certify(
        &self,
        public_key: &[u8],
        node: &NodeName,
        names: &[String],
        addresses: &[IpAddr],
        now: SystemTime,
    ) -> Result<String, Error> {
        let end = self.end_of(now, VALIDITY)?;
        let extensions = extensions(self, node, names, addresses);
        self.certificate(&subject(node), public_key, &extensions, now, end)
    }

    /// Issues a client certificate for the kubelet of `node` and this key. Returns PEM without the CA's certificate.
    pub fn certify_client(
        &self,
        public_key: &[u8],
        node: &NodeName,
        now: SystemTime,
    ) -> Result<String, Error> {
        let (subject, extensions) = (subject(node), client_extensions());
        let end = self.end_of(now, VALIDITY)?;
        self.certificate(&subject, public_key, &extensions, now, end)
    }

    /// Returns the end of a certificate with this validity: that of the CA's certificate at the latest.
    pub(super) fn end_of(&self, now: SystemTime, validity: Duration) -> Result<SystemTime, Error> {
        if self.end <= now {
            Err(Error::Authority(format!(
                "its certificate expired on {}",
                instant::seconds(self.end)
            )))
        } else {
            Ok((now + validity).min(self.end))
        }
    }

    /// Issues a certificate for this subject and key (both DER) with these extensions (the element
    /// of the certificate, DER), as PEM.
    pub(super) fn certificate(
        &self,
        subject: &[u8],
        public_key: &[u8],
        extensions: &[u8],
        now: SystemTime,
        end: SystemTime,
    ) -> Result<String, Error> {
        let mut serial = base::crypto::random::<16>();
        serial[0] = serial[0] & 0x7f | 0x40; // positive, in the shortest encoding
        let since_epoch = |at: SystemTime| at.duration_since(UNIX_EPOCH).unwrap_or_default();
        let begin = since_epoch(now).saturating_sub(BACKDATED);
        let validity = [begin, since_epoch(end)].map(|it| instant::to_der(it.as_secs()));
        let body = der::element(
            der::SEQUENCE,
            &[
                &der::element(der::context(0), &[&[der::INTEGER, 1, 2]]), // v3
                &der::element(der::INTEGER, &[&serial]),
                self.algorithm,
                &self.name,
                &der::element(der::SEQUENCE, &[&validity[0], &validity[1]]),
                subject,
                public_key,
                extensions,
            ],
        );
        let signature = der::element(der::BIT_STRING, &[&[0], &self.sign(&body)?]);
        let certificate = der::element(der::SEQUENCE, &[&body, self.algorithm, &signature]);
        Ok(pem("CERTIFICATE", &certificate).to_string())
    }

    /// Returns its name, DER.
    pub(super) fn name(&self) -> &[u8] {
        &self.name
    }

    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, Error> {
        let signer = self.key.choose_scheme(&[self.scheme]);
        let signature = signer.and_then(|signer| signer.sign(message).ok());
        signature.ok_or_else(|| Error::Authority("signing failed".into()))
    }
}

/// Returns the subject key identifier of a certificate.
fn key_identifier(certificate: &x509::Certificate<'_>) -> Option<Vec<u8>> {
    let value = certificate.extension(&SUBJECT_KEY_IDENTIFIER[2..])?;
    let identifier = DerReader::new(value).expect(der::OCTET_STRING);
    identifier.ok().map(<[u8]>::to_vec)
}

/// Returns the node of a kubelet's certificate in PEM, of the first one in it.
pub fn node_of(certificate: &[u8]) -> Option<String> {
    let der = CertificateDer::from_pem_slice(certificate).ok()?;
    let read = x509::Certificate::parse(&der).ok()?;
    let node = read.common_name()?.strip_prefix("system:node:")?;
    Some(node.to_owned())
}

/// Encodes `O=system:nodes, CN=system:node:<name>`, the subject of Kubernetes' kubelet
/// certificates.
pub(super) fn subject(node: &NodeName) -> Vec<u8> {
    let attribute = |kind: &[u8], value: &str| {
        let value = der::element(der::PRINTABLE_STRING, &[value.as_bytes()]);
        der::element(der::SET, &[&der::element(der::SEQUENCE, &[kind, &value])])
    };
    let common_name = format!("system:node:{}", node.as_str());
    der::element(
        der::SEQUENCE,
        &[
            &attribute(ORGANIZATION, "system:nodes"),
            &attribute(COMMON_NAME, &common_name),
        ],
    )
}

/// Encodes an extension with this value; `critical` is [`CRITICAL`] or empty.
fn extension(oid: &[u8], critical: &[u8], value: &[u8]) -> Vec<u8> {
    der::element(
        der::SEQUENCE,
        &[oid, critical, &der::element(der::OCTET_STRING, &[value])],
    )
}

/// Encodes the extensions of a client certificate.
pub(super) fn client_extensions() -> Vec<u8> {
    let purpose = der::element(der::SEQUENCE, &[CLIENT_AUTH]);
    let all = [
        extension(KEY_USAGE, CRITICAL, DIGITAL_SIGNATURE),
        extension(EXTENDED_KEY_USAGE, &[], &purpose),
        extension(
            BASIC_CONSTRAINTS,
            CRITICAL,
            &der::element(der::SEQUENCE, &[]),
        ),
    ];
    der::element(
        der::context(3),
        &[&der::element(der::SEQUENCE, &[&all.concat()])],
    )
}

fn extensions(
    authority: &ClusterCa,
    node: &NodeName,
    names: &[String],
    addresses: &[IpAddr],
) -> Vec<u8> {
    let mut all = vec![
        extension(KEY_USAGE, CRITICAL, DIGITAL_SIGNATURE),
        extension(
            EXTENDED_KEY_USAGE,
            &[],
            &der::element(der::SEQUENCE, &[SERVER_AUTH]),
        ),
        // The default of basicConstraints, not a CA, is omitted in DER.
        extension(
            BASIC_CONSTRAINTS,
            CRITICAL,
            &der::element(der::SEQUENCE, &[]),
        ),
        extension(
            SUBJECT_ALT_NAME,
            &[],
            &alternative_names(node, names, addresses),
        ),
    ];
    if let Some(identifier) = &authority.key_identifier {
        // keyIdentifier is `[0] IMPLICIT`.
        let value = der::element(der::SEQUENCE, &[&der::element(0x80, &[identifier])]);
        all.push(extension(AUTHORITY_KEY_IDENTIFIER, &[], &value));
    }
    der::element(
        der::context(3),
        &[&der::element(der::SEQUENCE, &[&all.concat()])],
    )
}

/// Encodes GeneralNames (RFC 5280 §4.2.1.6): dNSName is `[2]`, iPAddress `[7]`, both IMPLICIT.
fn alternative_names(node: &NodeName, names: &[String], addresses: &[IpAddr]) -> Vec<u8> {
    let others = names
        .iter()
        .map(String::as_str)
        .filter(|name| *name != node.as_str());
    let mut all: Vec<_> = std::iter::once(node.as_str())
        .chain(others)
        .map(|name| der::element(0x82, &[name.as_bytes()]))
        .collect();
    all.extend(addresses.iter().map(ip_name));
    der::element(der::SEQUENCE, &[&all.concat()])
}

/// Encodes the iPAddress of a GeneralName.
pub(super) fn ip_name(address: &IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => der::element(0x87, &[&address.octets()]),
        IpAddr::V6(address) => der::element(0x87, &[&address.octets()]),
    }
}

/// Encodes DER as PEM (RFC 7468).
pub fn pem(label: &str, bytes: &[u8]) -> Zeroizing<String> {
    let text = Zeroizing::new(STANDARD.encode(bytes));
    let mut pem = Zeroizing::new(String::with_capacity(
        text.len() + text.len() / 64 + 2 * label.len() + 64,
    ));
    pem.push_str(&format!("-----BEGIN {label}-----\n"));
    for line in text.as_bytes().chunks(64) {
        pem.extend(line.iter().copied().map(char::from));
        pem.push('\n');
    }
    pem.push_str(&format!("-----END {label}-----\n"));
    pem
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::process::Command;
    use std::sync::Arc;

    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier;
    use rustls::pki_types::{ServerName, UnixTime};

    use super::*;
    use support::mutation::mutations;

    /// Creates a CA with openssl(1). Its key has the format that kubeadm writes.
    fn authority(kind: &str) -> (Vec<u8>, Vec<u8>) {
        authority_of_days(kind, "3650")
    }

    fn authority_of_days(kind: &str, days: &str) -> (Vec<u8>, Vec<u8>) {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
        let openssl = |arguments: &[&str]| {
            let output = Command::new("openssl").args(arguments).output().unwrap();
            assert!(
                output.status.success(),
                "{}",
                String::from_utf8_lossy(&output.stderr)
            );
        };
        match kind {
            "rsa" => openssl(&["genrsa", "-traditional", "-out", &path("key"), "2048"]),
            curve => openssl(&[
                "ecparam",
                "-name",
                curve,
                "-genkey",
                "-noout",
                "-out",
                &path("key"),
            ]),
        }
        // As in kubeadm's own certificates.
        let usage = "keyUsage=critical,digitalSignature,keyEncipherment,keyCertSign";
        let (key, certificate) = (path("key"), path("crt"));
        let common = [
            "req",
            "-x509",
            "-key",
            &key,
            "-subj",
            "/CN=kubernetes",
            "-addext",
            usage,
        ];
        openssl(&[&common[..], &["-days", days, "-out", &certificate]].concat());
        (
            fs::read(path("crt")).unwrap(),
            fs::read(path("key")).unwrap(),
        )
    }

    fn issue_by((certificate, key): &(Vec<u8>, Vec<u8>)) -> KubeletCertificate {
        let node = NodeName::from_machine("control-plane-0").unwrap();
        let names = ["control-plane-0".to_owned(), "node.example".to_owned()];
        let addresses = ["10.42.1.100".parse().unwrap(), "fd00::100".parse().unwrap()];
        issue(
            certificate,
            key,
            &node,
            &names,
            &addresses,
            SystemTime::now(),
        )
        .unwrap()
    }

    #[test]
    fn openssl_and_rustls_accept_it_for_its_names_from_each_kind_of_ca() {
        for kind in ["rsa", "prime256v1", "secp384r1"] {
            let ca = authority(kind);
            assert!(String::from_utf8_lossy(&ca.1).contains(if kind == "rsa" {
                "BEGIN RSA PRI"
            } else {
                "BEGIN EC PRI"
            }));
            let issued = issue_by(&ca);
            let directory = tempfile::tempdir().unwrap();
            let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
            fs::write(path("ca"), &ca.0).unwrap();
            issued
                .write(Path::new(&path("pki/crt")), Path::new(&path("pki/key")))
                .unwrap();
            for (option, name) in [
                ("-verify_hostname", "control-plane-0"),
                ("-verify_hostname", "node.example"),
                ("-verify_ip", "10.42.1.100"),
                ("-verify_ip", "fd00::100"),
            ] {
                let arguments = [
                    "verify",
                    "-x509_strict",
                    "-purpose",
                    "sslserver",
                    "-CAfile",
                    &path("ca"),
                    option,
                    name,
                ];
                let output = Command::new("openssl")
                    .args(arguments)
                    .arg(path("pki/crt"))
                    .output()
                    .unwrap();
                assert!(
                    output.status.success(),
                    "{kind} {name}: {}",
                    String::from_utf8_lossy(&output.stderr)
                );
            }
            let text = Command::new("openssl")
                .args(["x509", "-noout", "-text", "-in", &path("pki/crt")])
                .output()
                .unwrap();
            let text = String::from_utf8(text.stdout).unwrap();
            assert!(
                text.contains("Issuer: CN")
                    && text.contains("O = system:nodes, CN = system:node:control-plane-0"),
                "{text}"
            );
            assert!(
                text.contains("TLS Web Server Authentication")
                    && !text.contains("Client Authentication"),
                "{text}"
            );

            let certificate =
                CertificateDer::from_pem_slice(issued.certificate.as_bytes()).unwrap();
            let mut roots = rustls::RootCertStore::empty();
            roots
                .add(CertificateDer::from_pem_slice(&ca.0).unwrap())
                .unwrap();
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .unwrap();
            let verify = |name: &'static str, at: UnixTime| {
                verifier.verify_server_cert(
                    &certificate,
                    &[],
                    &ServerName::try_from(name).unwrap(),
                    &[],
                    at,
                )
            };
            let now = UnixTime::now();
            verify("10.42.1.100", now).unwrap();
            verify("10.42.1.101", now).unwrap_err();
            let day = |days: u64| {
                UnixTime::since_unix_epoch(Duration::from_secs(now.as_secs() + days * 86_400))
            };
            verify("node.example", day(364)).unwrap();
            verify("node.example", day(366)).unwrap_err();
        }
    }

    #[test]
    #[ignore = "needs FIRSTLIGHT_KUBEADM, the path of a kubeadm"]
    fn the_ca_of_a_real_kubeadm_signs() {
        let kubeadm =
            std::env::var_os("FIRSTLIGHT_KUBEADM").expect("FIRSTLIGHT_KUBEADM must name a kubeadm");
        let directory = tempfile::tempdir().unwrap();
        // Without a version, kubeadm would look up the newest one on the network.
        let version = Command::new(&kubeadm)
            .args(["version", "-o", "short"])
            .output()
            .unwrap();
        let version = String::from_utf8(version.stdout).unwrap();
        let mut command = Command::new(kubeadm);
        command.args([
            "init",
            "phase",
            "certs",
            "ca",
            "--kubernetes-version",
            version.trim(),
            "--cert-dir",
        ]);
        let output = command.arg(directory.path()).output().unwrap();
        let read = |name: &str| {
            fs::read(directory.path().join(name)).unwrap_or_else(|_| panic!("{output:?}"))
        };
        issue_by(&(read("ca.crt"), read("ca.key")));
    }

    #[test]
    fn it_is_written_for_its_owner_only_and_replaced_by_the_next() {
        let ca = authority("prime256v1");
        let directory = tempfile::tempdir().unwrap();
        let (certificate, key) = (
            directory.path().join("a/crt.pem"),
            directory.path().join("b/key.pem"),
        );
        issue_by(&ca).write(&certificate, &key).unwrap();
        let second = issue_by(&ca);
        second.write(&certificate, &key).unwrap();
        assert_eq!(
            fs::read_to_string(&certificate).unwrap(),
            second.certificate
        );
        assert_eq!(fs::read_to_string(&key).unwrap(), *second.key);
        for path in [&certificate, &key] {
            assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o600);
            assert_eq!(path.parent().unwrap().read_dir().unwrap().count(), 1);
        }
    }

    #[test]
    fn a_ca_that_does_not_fit_its_key_or_cannot_sign_is_refused() {
        let node = NodeName::from_machine("n").unwrap();
        let (ca, other) = (authority("prime256v1"), authority("prime256v1"));
        let refused = |certificate: &[u8], key: &[u8]| {
            issue(certificate, key, &node, &[], &[], SystemTime::now())
                .err()
                .expect("refused")
                .to_string()
        };
        assert!(refused(&ca.0, &other.1).contains("does not belong to its certificate"));
        assert!(refused(&ca.1, &ca.1).contains("certificate is not PEM"));
        assert!(refused(&ca.0, &ca.0).contains(NO_KEY));
        assert!(refused(&ca.0, b"").contains(NO_KEY));
        // the library would show the line, which is the key
        let line = String::from_utf8(ca.1.clone()).unwrap().replace('\n', "");
        let why = refused(&ca.0, line.as_bytes());
        assert!(
            why.contains(NO_KEY) && !why.contains(&line[40..60]),
            "{why}"
        );
        let curve = authority("secp521r1");
        assert!(refused(&curve.0, &curve.1).contains("its key"));
    }

    #[test]
    fn it_ends_with_its_ca_and_a_ca_that_has_ended_signs_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let (ca, key) = authority_of_days("prime256v1", "30");
        let end = ClusterCa::new(&ca, &key).unwrap().end;
        let node = NodeName::from_machine("n").unwrap();
        let day = Duration::from_secs(86_400);
        let left = end.duration_since(SystemTime::now()).unwrap();
        assert!(left > day * 29 && left <= day * 30, "{left:?}");
        let printed = |certificate: &[u8]| {
            fs::write(directory.path().join("crt"), certificate).unwrap();
            let mut command = Command::new("openssl");
            command
                .args(["x509", "-noout", "-enddate", "-in", "crt"])
                .current_dir(directory.path());
            String::from_utf8(command.output().unwrap().stdout).unwrap()
        };
        let issued = issue(&ca, &key, &node, &[], &[], SystemTime::now()).unwrap();
        assert_eq!(printed(issued.certificate.as_bytes()), printed(&ca));
        let late = issue(&ca, &key, &node, &[], &[], end)
            .err()
            .expect("refused")
            .to_string();
        assert!(
            late.contains(&format!("expired on {}", instant::seconds(end))),
            "{late}"
        );
    }

    #[test]
    fn mutated_cas_are_refused_or_sign_without_a_panic() {
        let ca = authority("prime256v1");
        let certificate = CertificateDer::from_pem_slice(&ca.0).unwrap();
        let identifier = key_identifier(&x509::Certificate::parse(&certificate).unwrap());
        assert!(identifier.is_some_and(|identifier| identifier.len() == 20));
        for mutant in mutations(&certificate, 20_000) {
            if let Ok(read) = x509::Certificate::parse(&mutant) {
                let _ = (key_identifier(&read), read.validity());
            }
        }
        for mutant in mutations(&ca.0, 2000) {
            let _ = ClusterCa::new(&mutant, &ca.1);
        }
        for mutant in mutations(&ca.1, 2000) {
            let _ = ClusterCa::new(&ca.0, &mutant);
        }
    }
}
