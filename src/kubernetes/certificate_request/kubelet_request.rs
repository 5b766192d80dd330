//! The request of a joining node for its kubelet's serving certificate (PKCS#10, RFC 2986), with a
//! new key. Also validates that the issued certificate belongs to that key and this node.

use std::fmt;
use std::net::IpAddr;

use ring::digest::{SHA256, digest};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use zeroize::Zeroizing;

use super::{ECDSA_WITH_SHA256, EXTENSION_REQUEST, P256};
use crate::kubelet_certificate::{
    COMMON_NAME, Error, KubeletCertificate, ORGANIZATION, SUBJECT_ALT_NAME, ip_name, pem, subject,
};
use crate::parameters::NodeName;
use base::der::{self, DerReader, Malformed};
use base::text::hex;

/// The maximum size of a certificate as PEM in bytes. A certificate with an RSA key of 4096 bits
/// has 2 KiB.
const MAX_CERTIFICATE: usize = 16 << 10;
/// The maximum number of certificates of a cluster's CA. During a renewal there are two.
const MAX_AUTHORITIES: usize = 16;

/// A key and its certificate signing request.
pub struct KubeletRequest {
    node: NodeName,
    /// The private key, PKCS#8, PEM.
    key: Zeroizing<String>,
    /// SubjectPublicKeyInfo of the key, DER.
    public_key: Vec<u8>,
    request: Vec<u8>,
}

/// Why a certificate is refused, as a clause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidCertificate(String);

impl fmt::Display for InvalidCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InvalidCertificate {}

fn invalid<T>(why: impl Into<String>) -> Result<T, InvalidCertificate> {
    Err(InvalidCertificate(why.into()))
}

impl KubeletRequest {
    /// Creates a new P-256 key, and the request for `O=system:nodes, CN=system:node:<node>` with
    /// this address.
    pub fn new(node: &NodeName, address: IpAddr) -> Result<KubeletRequest, Error> {
        let random = SystemRandom::new();
        let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &random);
        let pkcs8 = Zeroizing::new(pkcs8.map_err(|_| Error::Key)?.as_ref().to_vec());
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &pkcs8, &random)
            .map_err(|_| Error::Key)?;
        let public_key = [P256, pair.public_key().as_ref()].concat();

        let names = der::element(der::SEQUENCE, &[&ip_name(&address)]);
        let value = der::element(der::OCTET_STRING, &[&names]);
        let extension = der::element(der::SEQUENCE, &[SUBJECT_ALT_NAME, &value]);
        let extensions = der::element(der::SET, &[&der::element(der::SEQUENCE, &[&extension])]);
        let attribute = der::element(der::SEQUENCE, &[EXTENSION_REQUEST, &extensions]);
        let version = [der::INTEGER, 1, 0];
        let attributes = der::element(der::context(0), &[&attribute]);
        let body = der::element(
            der::SEQUENCE,
            &[&version, &subject(node), &public_key, &attributes],
        );
        let signature = pair.sign(&random, &body).map_err(|_| Error::Key)?;
        let signature = der::element(der::BIT_STRING, &[&[0], signature.as_ref()]);
        let request = der::element(der::SEQUENCE, &[&body, ECDSA_WITH_SHA256, &signature]);
        Ok(KubeletRequest {
            node: node.clone(),
            key: pem("PRIVATE KEY", &pkcs8),
            public_key,
            request,
        })
    }

    /// Returns the request, DER.
    pub fn der(&self) -> &[u8] {
        &self.request
    }

    /// Combines the issued certificate with the key. Fails unless it is exactly one certificate for
    /// this key and this node.
    pub fn complete(&self, certificate: &[u8]) -> Result<KubeletCertificate, InvalidCertificate> {
        if certificate.len() > MAX_CERTIFICATE {
            return invalid(format!(
                "it has {} bytes, expected at most {MAX_CERTIFICATE}",
                certificate.len()
            ));
        }
        let Ok(text) = std::str::from_utf8(certificate) else {
            return invalid("it is not PEM");
        };
        let mut found = CertificateDer::pem_slice_iter(certificate);
        let (Some(Ok(only)), None) = (found.next(), found.next()) else {
            return invalid("expected exactly one certificate as PEM");
        };
        let (name, public_key) = parts(&only)?;
        if public_key != self.public_key {
            return invalid("it is for another key, not for this node's");
        }
        let expected = format!("system:node:{}", self.node.as_str());
        match subject_of(&name) {
            Ok((organization, common_name))
                if organization == "system:nodes" && common_name == expected =>
            {
                Ok(KubeletCertificate {
                    certificate: text.to_owned(),
                    key: self.key.clone(),
                })
            }
            Ok((organization, common_name)) => invalid(format!(
                "it is for O={organization:?}, CN={common_name:?}, expected O=\"system:nodes\", CN={expected:?}"
            )),
            Err(Malformed) => invalid("its subject must be one organization and one common name"),
        }
    }
}

/// Returns the hashes of the public keys of a cluster's CAs, in the format of kubeadm's
/// `caCertHashes`: `sha256:` and hexadecimal digits. `certificates` is PEM with one or more
/// certificates.
pub fn authority_hashes(certificates: &[u8]) -> Result<Vec<String>, InvalidCertificate> {
    let mut hashes = Vec::new();
    for certificate in CertificateDer::pem_slice_iter(certificates).take(MAX_AUTHORITIES + 1) {
        let Ok(certificate) = certificate else {
            return invalid("it is not PEM");
        };
        let (_, public_key) = parts(&certificate)?;
        let hash = digest(&SHA256, &public_key);
        hashes.push(format!("sha256:{}", hex(hash.as_ref())));
    }
    match hashes.len() {
        0 => invalid("it contains no certificate"),
        len if len > MAX_AUTHORITIES => {
            invalid(format!("it has more than {MAX_AUTHORITIES} certificates"))
        }
        _ => Ok(hashes),
    }
}

/// Returns the contents of the subject's SEQUENCE, and SubjectPublicKeyInfo.
fn parts(certificate: &CertificateDer<'_>) -> Result<(Vec<u8>, Vec<u8>), InvalidCertificate> {
    match webpki::anchor_from_trusted_cert(certificate) {
        Ok(anchor) => {
            let public_key =
                der::element(der::SEQUENCE, &[anchor.subject_public_key_info.as_ref()]);
            Ok((anchor.subject.as_ref().to_vec(), public_key))
        }
        Err(_) => invalid("it is not an X.509 certificate"),
    }
}

/// Returns the organization and common name of a subject that has no other attribute. Accepts every
/// string type.
fn subject_of(name: &[u8]) -> Result<(String, String), Malformed> {
    let mut sets = DerReader::new(name);
    let (mut organization, mut common_name) = (None, None);
    while !sets.is_empty() {
        let mut set = DerReader::new(sets.expect(der::SET)?);
        while !set.is_empty() {
            let mut attribute = DerReader::new(set.expect(der::SEQUENCE)?);
            let place = match attribute.expect_whole(der::OBJECT_IDENTIFIER)? {
                ORGANIZATION => &mut organization,
                COMMON_NAME => &mut common_name,
                _ => return Err(Malformed),
            };
            let (_, text) = attribute.read()?;
            attribute.end()?;
            let text = std::str::from_utf8(text).map_err(|_| Malformed)?;
            if place.replace(text.to_owned()).is_some() {
                return Err(Malformed);
            }
        }
    }
    organization.zip(common_name).ok_or(Malformed)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;
    use support::mutation::mutations;
    use support::openssl::{authority, openssl, sign};

    fn request() -> KubeletRequest {
        let node = NodeName::from_machine("Worker_1").unwrap();
        KubeletRequest::new(&node, "10.42.1.7".parse().unwrap()).unwrap()
    }

    #[test]
    fn openssl_verifies_the_request_and_its_certificate_is_accepted() {
        let authority = authority();
        for address in ["10.42.1.7", "fd00::7"] {
            let node = NodeName::from_machine("Worker_1").unwrap();
            let request = KubeletRequest::new(&node, address.parse().unwrap()).unwrap();
            fs::write(authority.path().join("request"), request.der()).unwrap();
            let text = openssl(
                authority.path(),
                "req -inform der -in request -noout -verify -text",
            );
            for part in [
                "O = system:nodes, CN = system:node:worker-1",
                "prime256v1",
                "IP Address:",
            ] {
                assert!(text.contains(part), "{part} is not in {text}");
            }
            let certificate = sign(authority.path(), request.der());
            let issued = request.complete(&certificate).unwrap();
            assert_eq!(issued.certificate.as_bytes(), certificate);
            fs::write(authority.path().join("key"), issued.key.as_bytes()).unwrap();
            let public = |command: &str| openssl(authority.path(), command);
            assert_eq!(
                public("pkey -in key -pubout"),
                public("x509 -in crt -noout -pubkey")
            );
        }
    }

    #[test]
    fn a_certificate_of_another_key_or_name_or_shape_is_refused() {
        let (authority, request) = (authority(), request());
        let refused = |certificate: &[u8]| {
            request
                .complete(certificate)
                .err()
                .expect("refused")
                .to_string()
        };
        assert!(refused(&sign(authority.path(), self::request().der())).contains("another key"));
        let other = NodeName::from_machine("worker-2").unwrap();
        let certificate = sign(authority.path(), request.der());
        let renamed = KubeletRequest {
            node: other,
            ..self::request()
        };
        let renamed = KubeletRequest {
            public_key: request.public_key.clone(),
            ..renamed
        };
        assert!(
            renamed
                .complete(&certificate)
                .err()
                .unwrap()
                .to_string()
                .contains("CN=\"system:node:worker-1\"")
        );
        assert!(refused(b"").contains("exactly one certificate"));
        assert!(
            refused(&[&certificate[..], &certificate].concat()).contains("exactly one certificate")
        );
        assert!(refused(&vec![b' '; MAX_CERTIFICATE + 1]).contains("bytes"));
        assert!(refused(b"\xff").contains("not PEM"));
        let key = fs::read(authority.path().join("ca.key")).unwrap();
        assert!(refused(&key).contains("exactly one certificate"));
    }

    #[test]
    fn the_hash_of_an_authority_is_kubeadms() {
        let authority = authority();
        let certificate = fs::read(authority.path().join("ca.crt")).unwrap();
        // The command in kubeadm's documentation.
        let script =
            "openssl x509 -pubkey -in ca.crt | openssl pkey -pubin -outform der | sha256sum";
        let output = Command::new("sh")
            .args(["-c", script])
            .current_dir(authority.path())
            .output()
            .unwrap();
        let expected = String::from_utf8(output.stdout).unwrap();
        let expected = format!("sha256:{}", expected.split(' ').next().unwrap());
        assert_eq!(authority_hashes(&certificate).unwrap().join(" "), expected);
        assert_eq!(
            authority_hashes(&certificate.repeat(2)).unwrap().join(" "),
            format!("{expected} {expected}")
        );
        assert!(
            authority_hashes(b"").is_err() && authority_hashes(&certificate.repeat(17)).is_err()
        );
    }

    #[test]
    fn mutated_certificates_are_refused_or_still_ours() {
        let (authority, request) = (authority(), request());
        let certificate = sign(authority.path(), request.der());
        let only = CertificateDer::from_pem_slice(&certificate).unwrap();
        for mutant in mutations(&only, 20_000) {
            if let Ok((name, _)) = parts(&CertificateDer::from(mutant)) {
                let _ = subject_of(&name);
            }
        }
        for mutant in mutations(&certificate, 5000) {
            let _ = request.complete(&mutant);
            let _ = authority_hashes(&mutant);
        }
    }
}
