//! The roots that certify endorsement keys: those of vendors, which are in this program, and those that a policy contains.
//!
//! `roots/table.txt` lists the vendors' roots with their source, fingerprint and expiry.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, TrustAnchor};

/// The names under which a policy can demand the roots of a vendor, and their files.
const BUILT_IN: [(&str, &str); 2] = [
    ("google-2018", include_str!("roots/google-2018.pem")),
    ("google-2022", include_str!("roots/google-2022.pem")),
];
/// How the PEM form starts.
const PEM: &str = "-----BEGIN CERTIFICATE-----";

/// A root, with the certificates between it and endorsement keys that TPMs do not hold themselves.
#[derive(Debug)]
pub struct Root {
    /// The name in the policy.
    pub name: String,
    pub(crate) anchor: TrustAnchor<'static>,
    pub(crate) between: Vec<CertificateDer<'static>>,
}

/// Returns the names of the vendors' roots.
pub fn names() -> impl Iterator<Item = &'static str> {
    BUILT_IN.iter().map(|(name, _)| *name)
}

impl Root {
    /// Parses an entry of a policy: a name of [`names`], or certificates in PEM, of which the first one is the root.
    pub fn parse(entry: &str) -> Result<Root, String> {
        if let Some((name, pem)) = BUILT_IN.iter().find(|(name, _)| *name == entry) {
            return Root::from_pem(name, pem);
        }
        if entry.trim_start().starts_with(PEM) {
            return Root::from_pem("", entry);
        }
        let known: Vec<_> = names().collect();
        Err(format!(
            "the root {entry:.80?} is not known: expected a certificate in PEM, or one of {}",
            known.join(", ")
        ))
    }

    /// Parses certificates in PEM, of which the first one is the root. Without a name, its fingerprint becomes the name.
    fn from_pem(name: &str, pem: &str) -> Result<Root, String> {
        let wrong =
            |error: &dyn std::fmt::Display| format!("a root in PEM cannot be read: {error}");
        let mut certificates = CertificateDer::pem_slice_iter(pem.as_bytes());
        let root = certificates
            .next()
            .ok_or_else(|| wrong(&"it has no certificate"))?
            .map_err(|error| wrong(&error))?;
        let between = certificates
            .collect::<Result<Vec<_>, _>>()
            .map_err(|error| wrong(&error))?;
        let anchor = webpki::anchor_from_trusted_cert(&root).map_err(|error| wrong(&error))?;
        Ok(Root {
            name: match name {
                "" => fingerprint(&root),
                name => name.into(),
            },
            anchor: anchor.to_owned(),
            between,
        })
    }
}

/// Returns SHA-256 of a certificate in hexadecimal.
fn fingerprint(certificate: &[u8]) -> String {
    let hash = ring::digest::digest(&ring::digest::SHA256, certificate);
    hash.as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::openssl::openssl;

    const TABLE: &str = include_str!("roots/table.txt");

    /// Name, fingerprint and expiry of the certificates, by the table.
    fn table() -> Vec<[&'static str; 3]> {
        let lines = TABLE.lines().filter(|line| !line.starts_with('#'));
        lines
            .map(|line| {
                let mut columns = line.split_whitespace();
                std::array::from_fn(|_| columns.next().unwrap())
            })
            .collect()
    }

    /// Returns the certificates of a file.
    fn certificates(pem: &str) -> Vec<CertificateDer<'static>> {
        let read = CertificateDer::pem_slice_iter(pem.as_bytes());
        read.collect::<Result<_, _>>().unwrap()
    }

    #[test]
    fn the_table_lists_what_the_files_hold() {
        let folder = tempfile::tempdir().unwrap();
        let mut found = vec![];
        for (name, pem) in BUILT_IN {
            for certificate in certificates(pem) {
                std::fs::write(folder.path().join("one.der"), &certificate).unwrap();
                let end = "x509 -inform DER -in one.der -noout -enddate -dateopt iso_8601";
                let end = openssl(folder.path(), end);
                let end = end.trim().strip_prefix("notAfter=").unwrap()[..10].to_owned();
                found.push([name.to_owned(), fingerprint(&certificate), end]);
            }
        }
        assert_eq!(found, table());
    }

    /// Fails 90 days before the first of the certificates expires: then replace it, or remove it with its policies.
    #[test]
    fn no_root_expires_soon() {
        let folder = tempfile::tempdir().unwrap();
        for (name, pem) in BUILT_IN {
            for certificate in certificates(pem) {
                std::fs::write(folder.path().join("one.der"), &certificate).unwrap();
                let seconds = 90 * 24 * 3600;
                let check = format!("x509 -inform DER -in one.der -noout -checkend {seconds}");
                let said = openssl(folder.path(), &check);
                assert!(said.contains("will not expire"), "{name}: {said}");
            }
        }
    }

    #[test]
    fn a_root_has_a_name_or_is_pem() {
        for name in names() {
            let root = Root::parse(name).unwrap();
            assert!(root.name == name && !root.between.is_empty());
        }
        let pem = BUILT_IN[0].1;
        let root = Root::parse(pem).unwrap();
        assert_eq!(root.name, table()[0][1]);
        for (entry, why) in [
            ("", "is not known"),
            ("google", "one of google-2018, google-2022"),
            (PEM, "cannot be read"),
            (&pem[..200], "cannot be read"),
        ] {
            let error = Root::parse(entry).unwrap_err();
            assert!(error.contains(why), "{entry}: {error}");
        }
    }
}
