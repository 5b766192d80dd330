//! The fields of a certificate signing request that are judged, and the decision.

use std::fmt;

use base::text::quoted;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rustls::pki_types::CertificateSigningRequestDer;
use rustls::pki_types::pem::PemObject;

use kubernetes::certificate_request::CertificateRequest;
use kubernetes::kubelet_certificate::pem;
use kubernetes::objects::CertificateSigningRequest;

/// The prefix of a kubelet's user name, before its node's name, and its group.
pub const USER_PREFIX: &str = "system:node:";
pub const GROUP: &str = "system:nodes";
/// The usages that a certificate may have in addition to its purpose. An ECDSA key cannot encipher,
/// but some clients ask for it.
pub const USAGES: [&str; 2] = ["digital signature", "key encipherment"];
/// The maximum number of usages: these and the purpose.
pub const MAX_USAGES: usize = USAGES.len() + 1;
/// The reason for a request of a user whose requests are not judged here.
pub const REQUESTER: &str = "requester";
/// The maximum length of a `spec.request`. A kubelet's has 800 characters, as PEM in base64, or
/// 1600 with a name of 253.
pub const MAX_ENCODED: usize = 4096;
/// The replacement of a longer request, in base64 as the API requires.
pub const TOO_LONG: &str = "dG9vIGxvbmc=";

/// The decision on a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Judgement {
    /// Approves it: the reason in one word, and as a sentence.
    Approve(&'static str, String),
    /// Denies it: the reason in one word, and as a sentence.
    Deny(&'static str, String),
    /// Leaves it undecided: the reason in one word, and as a sentence.
    Leave(&'static str, String),
}

use Judgement::Deny;

pub fn deny<T>(reason: &'static str, why: String) -> Result<T, Judgement> {
    Err(Deny(reason, why))
}

/// Parses the certificate signing request. Denies it if it has other usages than `purpose` and the
/// permitted ones, or is malformed.
pub fn read(
    request: &CertificateSigningRequest,
    purpose: &str,
) -> Result<CertificateRequest, Judgement> {
    let usages = &request.spec.usages;
    if usages.len() > MAX_USAGES {
        return deny(
            "usages",
            format!("its usages are more than {purpose:?} and {USAGES:?}"),
        );
    }
    let is_other = |usage: &&String| *usage != purpose && !USAGES.contains(&usage.as_str());
    if let Some(usage) = usages.iter().find(is_other) {
        return deny(
            "usages",
            format!("the usage {} is not permitted", quoted(usage, 40)),
        );
    }
    if !usages.iter().any(|usage| usage == purpose) {
        return deny("usages", format!("the usage {purpose:?} is missing"));
    }
    let der = decode(&request.spec.request)?;
    CertificateRequest::parse_with_names(&der).or_else(malformed)
}

fn malformed<T>(why: impl fmt::Display) -> Result<T, Judgement> {
    let why = format!("the request is not valid: {why}");
    deny("certificate-request", why)
}

/// Returns whether the requester is in this group.
pub fn is_of_group(request: &CertificateSigningRequest, group: &str) -> bool {
    request.spec.groups.iter().any(|one| one == group)
}

/// Decodes `spec.request` to DER. PEM permits many variants, and the signer must read exactly what
/// was judged. So only the form that Go and OpenSSL write is accepted.
pub fn decode(encoded: &str) -> Result<Vec<u8>, Judgement> {
    if encoded.len() > MAX_ENCODED || encoded == TOO_LONG {
        return malformed(format_args!("it has more than {MAX_ENCODED} characters"));
    }
    let text = BASE64_STANDARD
        .decode(encoded)
        .or_else(|_| malformed("it is not base64"))?;
    let der = CertificateSigningRequestDer::from_pem_slice(&text)
        .or_else(|_| malformed("it is not PEM"))?;
    if pem("CERTIFICATE REQUEST", &der).as_bytes() == text {
        Ok(der.to_vec())
    } else {
        malformed("expected exactly one request as PEM, in lines of 64 characters")
    }
}

/// Returns whether the request was approved, denied, signed, or has failed.
pub fn is_decided(request: &CertificateSigningRequest) -> bool {
    !request.status.conditions.is_empty() || !request.status.certificate.is_empty()
}

#[cfg(test)]
pub mod tests {
    use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair, SanType};
    use serde_json::{Value, from_value, json};

    use super::Judgement::{Approve, Leave};
    use super::*;

    pub const IP: &str = "10.0.0.7";

    /// Builds a `spec.request` as Go does: O and CN, names before addresses, in lines of 64
    /// characters.
    pub fn pkcs10(common_name: &str, names: &[&str], addresses: &[&str]) -> String {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::OrganizationName, GROUP);
        params
            .distinguished_name
            .push(DnType::CommonName, common_name);
        let names = names
            .iter()
            .map(|name| SanType::DnsName((*name).try_into().unwrap()));
        let addresses = addresses
            .iter()
            .map(|address| SanType::IpAddress(address.parse().unwrap()));
        params.subject_alt_names = names.chain(addresses).collect();
        let request = params
            .serialize_request(&KeyPair::generate().unwrap())
            .unwrap();
        BASE64_STANDARD.encode(pem("CERTIFICATE REQUEST", request.der()).as_bytes())
    }

    pub fn request(request: &str) -> CertificateSigningRequest {
        from_value(json_of(request)).unwrap()
    }

    /// Builds a request as the API server returns it.
    fn json_of(request: &str) -> Value {
        json!({
            "metadata": {"name": "csr-1", "resourceVersion": "1"},
            "spec": {
                "signerName": "kubernetes.io/kubelet-serving", "username": "system:node:n", "groups": [GROUP, "system:authenticated"],
                "usages": ["digital signature", "server auth"], "request": request,
            },
            "status": {},
        })
    }

    /// The JSON of a good request.
    pub fn good_json() -> Value {
        json_of(&pkcs10("system:node:n", &["n"], &[IP]))
    }

    pub fn good() -> CertificateSigningRequest {
        from_value(good_json()).unwrap()
    }

    pub fn reason(judgement: Judgement) -> &'static str {
        match judgement {
            Approve(reason, _) | Deny(reason, _) | Leave(reason, _) => reason,
        }
    }

    #[test]
    fn pem_is_accepted_in_one_form_only() {
        let good = pkcs10("system:node:n", &["n"], &[IP]);
        let text = String::from_utf8(BASE64_STANDARD.decode(&good).unwrap()).unwrap();
        let other = BASE64_STANDARD
            .decode(pkcs10("system:node:m", &["m"], &[]))
            .unwrap();
        let other = String::from_utf8(other).unwrap();
        assert!(decode(&good).is_ok());
        for changed in [
            format!("{text}{other}"),
            format!("{other}{text}"),
            format!("a: b\n{text}"),
            format!("{text}\n"),
            text.replace("CERTIFICATE REQUEST", "NEW CERTIFICATE REQUEST"),
            text.replace("REQUEST-----\n", "REQUEST-----\nProc-Type: a\n\n"),
            text.replace('\n', "\r\n"),
            String::new(),
        ] {
            assert!(
                decode(&BASE64_STANDARD.encode(&changed)).is_err(),
                "{changed}"
            );
        }
        assert!(decode("?").is_err() && decode(&"A".repeat(MAX_ENCODED + 1)).is_err());
    }
}
