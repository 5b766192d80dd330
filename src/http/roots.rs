//! The certificates of a connection: the authorities that certify servers, and the client's own certificate.

use std::fs;
use std::path::Path;

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

/// The authorities that may certify a server. Without any, no server is trusted.
#[derive(Clone, Default)]
pub struct Roots(Vec<CertificateDer<'static>>);

impl Roots {
    /// Reads the authorities from a PEM file. Without a file, reads those of this machine's distribution, which may have none.
    pub fn load(file: Option<&Path>) -> Result<Roots, String> {
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

fn read(path: &Path) -> Result<Roots, String> {
    let pem = fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let found: Vec<_> = CertificateDer::pem_slice_iter(&pem).flatten().collect();
    match found.is_empty() {
        true => Err(format!("{} contains no certificate", path.display())),
        false => Ok(Roots(found)),
    }
}

/// The client's own certificate and its key.
#[derive(Clone)]
pub struct Identity(ClientCert);

impl Identity {
    /// Takes a chain of certificates, and the key of the first one (PEM). The error shows nothing of the key.
    pub fn new(chain: Vec<CertificateDer<'static>>, key: &[u8]) -> Result<Identity, String> {
        let no_key = "the key is no private key in PEM";
        let own = PrivateKey::from_pem(key).map_err(|_| no_key)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| no_key)?;
        let certificates = of_ureq(&chain);
        // the library panics if the pair does not match
        CertifiedKey::from_der(chain, key, &tls::provider()).map_err(|error| error.to_string())?;
        Ok(Identity(ClientCert::new_with_certs(&certificates, own)))
    }
}

impl From<Identity> for ClientCert {
    fn from(identity: Identity) -> ClientCert {
        identity.0
    }
}
