//! TLS to web servers: the authorities that certify them, and the cryptography. The state disk opens without it.

use std::fs;
use std::path::Path;

use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;
use ureq::tls::{Certificate, RootCerts, TlsConfig, TlsConfigBuilder};

/// Where images have the certificates of web servers' authorities: Debian and Arch, Fedora, Alpine.
pub const CA_BUNDLES: [&str; 3] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
];

/// Returns the certificates of the authorities in a file of PEM; without a file, those of this machine's distribution. A distribution may
/// have none: then no server is trusted.
pub fn authorities(file: Option<&Path>) -> Result<Vec<CertificateDer<'static>>, String> {
    let read = |path: &Path| {
        let pem =
            fs::read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        let found: Vec<_> = CertificateDer::pem_slice_iter(&pem).flatten().collect();
        match found.is_empty() {
            true => Err(format!("{} contains no certificate", path.display())),
            false => Ok(found),
        }
    };
    match file {
        Some(file) => read(file),
        None => Ok(CA_BUNDLES
            .iter()
            .find_map(|path| read(path.as_ref()).ok())
            .unwrap_or_default()),
    }
}

/// Returns the same authorities for [`config`].
pub fn roots(file: Option<&Path>) -> Result<RootCerts, String> {
    let authorities = authorities(file)?;
    let of_ureq = authorities
        .iter()
        .map(|der| Certificate::from_der(der).to_owned());
    Ok(of_ureq.collect::<Vec<_>>().into())
}

/// Begins the configuration of a client that trusts servers whose certificate leads to one of the roots.
pub fn config(roots: RootCerts) -> TlsConfigBuilder {
    TlsConfig::builder()
        .root_certs(roots)
        .unversioned_rustls_crypto_provider(tls::provider())
}
