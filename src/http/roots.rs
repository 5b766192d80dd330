//! The certificates of a connection: the authorities that certify servers, and the client's own certificate.

use std::path::{Path, PathBuf};
use std::{fmt, fs, io};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts};

/// Where images have the certificates of web servers' authorities: Debian and Arch, Fedora, Alpine.
pub const CA_BUNDLES: [&str; 3] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
];

/// Why certificates or a key cannot be used. The text is a clause, and shows nothing of a file.
#[derive(Debug)]
pub enum CertificateError {
    /// The file cannot be read.
    Unreadable(PathBuf, io::Error),
    /// The file contains no certificate.
    Absent(PathBuf),
    /// The key is not one in PEM.
    NoKey,
    /// The key is not that of the certificate, or either is not usable.
    Mismatch(rustls::Error),
}

impl fmt::Display for CertificateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CertificateError::Unreadable(path, error) => {
                write!(f, "cannot read {}: {error}", path.display())
            }
            CertificateError::Absent(path) => {
                write!(f, "{} contains no certificate", path.display())
            }
            CertificateError::NoKey => f.write_str("the key is no private key in PEM"),
            CertificateError::Mismatch(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for CertificateError {}

/// The authorities to which a server's certificate must lead. Without any, no server is trusted.
#[derive(Clone, Default)]
pub struct Roots(Vec<CertificateDer<'static>>);

impl Roots {
    /// Reads the authorities from a PEM file. Without a file, reads those of this machine's distribution, which may have none.
    pub fn load(file: Option<&Path>) -> Result<Roots, CertificateError> {
        match file {
            Some(file) => read(file),
            None => Ok(Roots::first(&CA_BUNDLES)),
        }
    }

    /// Reads the first of these files that has authorities.
    pub fn first(files: &[impl AsRef<Path>]) -> Roots {
        let found = files.iter().find_map(|file| read(file.as_ref()).ok());
        found.unwrap_or_default()
    }

    /// Returns whether no server is trusted.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the certificates.
    pub fn certificates(&self) -> &[CertificateDer<'static>] {
        &self.0
    }
}

impl From<Vec<CertificateDer<'static>>> for Roots {
    fn from(certificates: Vec<CertificateDer<'static>>) -> Roots {
        Roots(certificates)
    }
}

impl From<Roots> for RootCerts {
    fn from(roots: Roots) -> RootCerts {
        of_ureq(&roots.0).into()
    }
}

fn of_ureq(certificates: &[CertificateDer<'static>]) -> Vec<Certificate<'static>> {
    let certificates = certificates.iter();
    certificates
        .map(|der| Certificate::from_der(der).to_owned())
        .collect()
}

fn read(path: &Path) -> Result<Roots, CertificateError> {
    let pem = fs::read(path).map_err(|error| CertificateError::Unreadable(path.into(), error))?;
    let found: Vec<_> = CertificateDer::pem_slice_iter(&pem).flatten().collect();
    if found.is_empty() {
        Err(CertificateError::Absent(path.into()))
    } else {
        Ok(Roots(found))
    }
}

/// The client's own certificate and its key.
#[derive(Clone)]
pub struct ClientCertificate(ClientCert);

impl ClientCertificate {
    /// Takes a chain of certificates, and the key of the first one (PEM). The error shows nothing of the key.
    pub fn new(
        chain: Vec<CertificateDer<'static>>,
        key: &[u8],
    ) -> Result<ClientCertificate, CertificateError> {
        let own = PrivateKey::from_pem(key).map_err(|_| CertificateError::NoKey)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| CertificateError::NoKey)?;
        let certificates = of_ureq(&chain);
        // the library panics if the pair does not match
        CertifiedKey::from_der(chain, key, &tls::provider()).map_err(CertificateError::Mismatch)?;
        Ok(ClientCertificate(ClientCert::new_with_certs(
            &certificates,
            own,
        )))
    }

    /// Returns the certificate without its chain, DER.
    pub fn der(&self) -> &[u8] {
        self.0.certs().first().map_or(&[], Certificate::der)
    }
}

impl From<ClientCertificate> for ClientCert {
    fn from(identity: ClientCertificate) -> ClientCert {
        identity.0
    }
}
