//! The roots that certify endorsement keys: vendors' roots, which are built in, and roots in a
//! policy.

use base::text::{hex, quoted};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, TrustAnchor};

use verifier::policy::{Fault, PolicyError};

use ::roots::Purpose;
use ::roots::chain::in_words;

/// How the PEM form starts.
const PEM: &str = "-----BEGIN CERTIFICATE-----";

/// A root, with the intermediate certificates that TPMs do not hold themselves.
#[derive(Debug)]
pub struct TpmRoot {
    /// The name in the policy.
    pub name: String,
    pub(crate) anchor: TrustAnchor<'static>,
    pub(crate) between: Vec<CertificateDer<'static>>,
}

/// Returns the names of the vendors' roots.
pub fn names() -> impl Iterator<Item = &'static str> {
    ::roots::certifying(Purpose::TpmKeys).map(|root| root.name)
}

impl TpmRoot {
    /// Parses an entry of a policy: a name of [`names`], or certificates in PEM, of which the first
    /// one is the root.
    pub fn parse(entry: &str) -> Result<TpmRoot, PolicyError> {
        if let Some(root) = ::roots::named(entry, Purpose::TpmKeys) {
            let certificates = root.certificates().map(|one| CertificateDer::from(one.der));
            return TpmRoot::of(Some(root.name), certificates.collect());
        }
        if entry.trim_start().starts_with(PEM) {
            let read = CertificateDer::pem_slice_iter(entry.as_bytes());
            let certificates = read.collect::<Result<_, _>>();
            return TpmRoot::of(None, certificates.map_err(|_| wrong("it is not PEM"))?);
        }
        let known: Vec<_> = names().collect();
        Err(Fault::Root.because(format!(
            "the root {} is not known: expected a certificate in PEM, or one of {}",
            quoted(entry, 80),
            known.join(", ")
        )))
    }

    /// Returns the root in a list of certificates, which starts with it. Without a name, its
    /// fingerprint becomes the name.
    fn of(
        name: Option<&str>,
        mut certificates: Vec<CertificateDer<'static>>,
    ) -> Result<TpmRoot, PolicyError> {
        if certificates.is_empty() {
            return Err(wrong("it has no certificate"));
        }
        let between = certificates.split_off(1);
        let root = &certificates[0];
        let anchor =
            webpki::anchor_from_trusted_cert(root).map_err(|error| wrong(&in_words(&error)))?;
        Ok(TpmRoot {
            name: name.map_or_else(|| fingerprint(root), str::to_owned),
            anchor: anchor.to_owned(),
            between,
        })
    }
}

fn wrong(error: &str) -> PolicyError {
    Fault::Root.because(format!("a root in PEM cannot be read: {error}"))
}

/// Returns SHA-256 of a certificate in hexadecimal.
fn fingerprint(certificate: &[u8]) -> String {
    let hash = ring::digest::digest(&ring::digest::SHA256, certificate);
    hex(hash.as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine;

    #[test]
    fn a_root_has_a_name_or_is_pem() {
        for name in names() {
            let root = TpmRoot::parse(name).unwrap();
            assert!(root.name == name && !root.between.is_empty());
        }
        let root = &::roots::GOOGLE_2022.root;
        let base64 = base64::engine::general_purpose::STANDARD.encode(root.der);
        let pem = format!("{PEM}\n{base64}\n-----END CERTIFICATE-----\n");
        assert_eq!(TpmRoot::parse(&pem).unwrap().name, root.sha256);
        for (entry, why) in [
            ("", "is not known"),
            ("google", "one of google-2018, google-2022"),
            ("aws-nitro", "is not known"),
            (PEM, "cannot be read"),
            (&pem[..200], "cannot be read"),
        ] {
            let error = TpmRoot::parse(entry).unwrap_err();
            assert!(error.to_string().contains(why), "{entry}: {error}");
        }
    }
}
