//! The certificate signing request of a kubelet's certificate: PKCS#10 (RFC 2986) in DER, in one
//! form only.
//!
//! ```text
//! subject      O=system:nodes, CN=system:node:NAME, nothing else      key   ECDSA P-256
//! attributes   at most one extensionRequest (RFC 2985 §5.4.2) with one subjectAltName: addresses only, or
//!              also names if a kubelet itself makes the request
//! signature    ecdsa-with-SHA256, by that key
//! ```
//!
//! Any other content is refused instead of ignored, so that a client learns that it does not get a
//! name that it requested.

pub mod kubelet_request;

use std::fmt;
use std::net::IpAddr;

use ring::digest::SHA256;
use ring::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};

use crate::kubelet_certificate::{
    COMMON_NAME, ORGANIZATION as ORGANIZATION_NAME, SUBJECT_ALT_NAME,
};
use crate::parameters::NodeName;
use base::der::{self, DerReader, Malformed};
use base::text::hex;

/// The maximum length of a request. A usual one has about 300 bytes.
pub const MAX_LEN: usize = 4096;
/// The maximum number of addresses and names. A node has one or two addresses, and one name.
const MAX_ADDRESSES: usize = 16;
const MAX_NAMES: usize = 16;
/// The subject of every node's certificate.
const ORGANIZATION: &str = "system:nodes";
const COMMON_NAME_PREFIX: &str = "system:node:";

// Object identifiers in DER, with tag and length.
pub(super) const EXTENSION_REQUEST: &[u8] = &[
    0x06, 0x09, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x09, 0x0e,
];
/// The AlgorithmIdentifier of ecdsa-with-SHA256, without parameters (RFC 5758 §3.2).
pub(super) const ECDSA_WITH_SHA256: &[u8] = &[
    0x30, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02,
];
/// A SubjectPublicKeyInfo of P-256 up to its uncompressed point (RFC 5480 §2).
pub(super) const P256: &[u8] =
    b"\x30\x59\x30\x13\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07\x03\x42\0";
const POINT_LEN: usize = 65;
/// The tags of dNSName and iPAddress in a GeneralName: `[2]` and `[7] IMPLICIT` (RFC 5280
/// §4.2.1.6).
const DNS_NAME: u8 = 0x82;
const IP_ADDRESS: u8 = 0x87;

/// A validated request. Its signature proves that the requester has the private key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateRequest {
    /// The node name in the common name, in Kubernetes' spelling.
    pub node: NodeName,
    /// The common name as written in the request.
    pub common_name: String,
    /// DNS names of the subjectAltName, ASCII. Empty in the result of
    /// [`CertificateRequest::parse`].
    pub names: Vec<String>,
    /// IP addresses of the subjectAltName.
    pub addresses: Vec<IpAddr>,
    /// SubjectPublicKeyInfo, DER.
    pub public_key: Vec<u8>,
}

/// Why a request is refused, as a clause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidRequest(String);

impl fmt::Display for InvalidRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for InvalidRequest {}

impl From<Malformed> for InvalidRequest {
    fn from(_: Malformed) -> InvalidRequest {
        InvalidRequest("it is not a PKCS#10 request in DER".into())
    }
}

fn invalid<T>(why: impl Into<String>) -> Result<T, InvalidRequest> {
    Err(InvalidRequest(why.into()))
}

impl CertificateRequest {
    /// Parses the request of a joining machine, and verifies its signature. Refuses DNS names.
    pub fn parse(der: &[u8]) -> Result<CertificateRequest, InvalidRequest> {
        let request = CertificateRequest::parse_with_names(der)?;
        // The signer chooses the names of the certificate.
        if request.names.is_empty() {
            Ok(request)
        } else {
            invalid("its subjectAltName has other entries than addresses")
        }
    }

    /// Parses the request of a kubelet (k8s.io/client-go, util/certificate), and verifies its
    /// signature. It may contain DNS names.
    pub fn parse_with_names(der: &[u8]) -> Result<CertificateRequest, InvalidRequest> {
        if der.len() > MAX_LEN {
            return invalid(format!("it has {} bytes, more than {MAX_LEN}", der.len()));
        }
        let mut whole = DerReader::new(der);
        let mut request = DerReader::new(whole.expect(der::SEQUENCE)?);
        whole.end()?;
        let signed = request.expect_whole(der::SEQUENCE)?;
        let algorithm = request.expect_whole(der::SEQUENCE)?;
        let signature = request.expect(der::BIT_STRING)?;
        request.end()?;

        let mut info = DerReader::new(DerReader::new(signed).expect(der::SEQUENCE)?);
        if info.expect(der::INTEGER)? != [0] {
            return invalid("its version is not 1");
        }
        let subject = info.expect(der::SEQUENCE)?;
        let public_key = info.expect_whole(der::SEQUENCE)?;
        let attributes = info.expect(der::context(0))?;
        info.end()?;

        let point = public_key
            .strip_prefix(P256)
            .filter(|point| point.len() == POINT_LEN && point[0] == 4);
        let Some(point) = point else {
            return invalid("its key is not ECDSA P-256");
        };
        if algorithm != ECDSA_WITH_SHA256 {
            return invalid("its signature is not ecdsa-with-SHA256");
        }
        let is_signed = |signature: &[u8]| {
            UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, point)
                .verify(signed, signature)
                .is_ok()
        };
        // The first byte is the number of unused bits in the last byte.
        if !signature.strip_prefix(&[0]).is_some_and(is_signed) {
            return invalid("it is not signed by its own key");
        }
        let ((node, common_name), alternative) =
            (read_subject(subject)?, read_attributes(attributes)?);
        let AlternativeNames { names, addresses } = alternative;
        Ok(CertificateRequest {
            node,
            common_name,
            names,
            addresses,
            public_key: public_key.to_vec(),
        })
    }

    /// Returns the SHA-256 of the SubjectPublicKeyInfo, hexadecimal.
    pub fn key_hash(&self) -> String {
        hex(ring::digest::digest(&SHA256, &self.public_key).as_ref())
    }
}

/// The contents of a subjectAltName.
#[derive(Default)]
struct AlternativeNames {
    names: Vec<String>,
    addresses: Vec<IpAddr>,
}

/// Parses the contents of a Name: one organization and one common name, each in its own set.
fn read_subject(subject: &[u8]) -> Result<(NodeName, String), InvalidRequest> {
    let (mut organization, mut common_name) = (None, None);
    let mut names = DerReader::new(subject);
    while !names.is_empty() {
        let mut set = DerReader::new(names.expect(der::SET)?);
        let mut attribute = DerReader::new(set.expect(der::SEQUENCE)?);
        let kind = attribute.expect_whole(der::OBJECT_IDENTIFIER)?;
        let (tag, value) = attribute.read()?;
        attribute.end()?;
        let slot = match kind {
            ORGANIZATION_NAME => &mut organization,
            COMMON_NAME => &mut common_name,
            _ => {
                return invalid(
                    "its subject has other attributes than an organization and a common name",
                );
            }
        };
        if !set.is_empty() || slot.is_some() {
            return invalid("its subject has more than one organization or common name");
        }
        if !matches!(tag, der::PRINTABLE_STRING | der::UTF8_STRING) || !value.is_ascii() {
            return invalid("its subject is not ASCII text");
        }
        *slot = std::str::from_utf8(value).ok();
    }
    if organization != Some(ORGANIZATION) {
        return invalid(format!(
            "the organization of its subject is not {ORGANIZATION}"
        ));
    }
    let whole = common_name.unwrap_or_default();
    let Some(name) = whole.strip_prefix(COMMON_NAME_PREFIX) else {
        return invalid(format!(
            "the common name of its subject is not {COMMON_NAME_PREFIX} and a name"
        ));
    };
    let node = NodeName::from_machine(name).map_err(|error| InvalidRequest(error.to_string()))?;
    Ok((node, whole.to_owned()))
}

fn read_attributes(attributes: &[u8]) -> Result<AlternativeNames, InvalidRequest> {
    let mut attributes = DerReader::new(attributes);
    if attributes.is_empty() {
        return Ok(AlternativeNames::default());
    }
    let mut attribute = DerReader::new(attributes.expect(der::SEQUENCE)?);
    let kind = attribute.expect_whole(der::OBJECT_IDENTIFIER)?;
    let mut values = DerReader::new(attribute.expect(der::SET)?);
    attribute.end()?;
    if kind != EXTENSION_REQUEST || !attributes.is_empty() {
        return invalid("its only attribute must be one extensionRequest");
    }
    let extensions = values.expect(der::SEQUENCE)?;
    values.end()?;
    read_extensions(extensions)
}

fn read_extensions(extensions: &[u8]) -> Result<AlternativeNames, InvalidRequest> {
    let mut extensions = DerReader::new(extensions);
    if extensions.is_empty() {
        return Ok(AlternativeNames::default());
    }
    let mut extension = DerReader::new(extensions.expect(der::SEQUENCE)?);
    let kind = extension.expect_whole(der::OBJECT_IDENTIFIER)?;
    if extension.peek() == Some(der::BOOLEAN) {
        extension.expect(der::BOOLEAN)?;
    }
    let value = extension.expect(der::OCTET_STRING)?;
    extension.end()?;
    if kind != SUBJECT_ALT_NAME || !extensions.is_empty() {
        return invalid("it requests other extensions than a subjectAltName");
    }
    let mut whole = DerReader::new(value);
    let names = whole.expect(der::SEQUENCE)?;
    whole.end()?;
    read_names(names)
}

/// Parses GeneralNames.
fn read_names(names: &[u8]) -> Result<AlternativeNames, InvalidRequest> {
    let (mut names, mut read) = (DerReader::new(names), AlternativeNames::default());
    while !names.is_empty() {
        match names.read()? {
            (IP_ADDRESS, bytes) => match address(bytes) {
                Some(address) => read.addresses.push(address),
                None => return invalid("its subjectAltName has an invalid address"),
            },
            (DNS_NAME, bytes) => match std::str::from_utf8(bytes) {
                Ok(name) if name.is_ascii() => read.names.push(name.to_owned()),
                _ => return invalid("its subjectAltName has a name that is not ASCII text"),
            },
            _ => {
                return invalid(
                    "its subjectAltName has other entries than addresses and host names",
                );
            }
        }
        if read.addresses.len() > MAX_ADDRESSES || read.names.len() > MAX_NAMES {
            return invalid(format!(
                "its subjectAltName has more than {MAX_ADDRESSES} addresses or {MAX_NAMES} names"
            ));
        }
    }
    Ok(read)
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(IpAddr::from),
        16 => <[u8; 16]>::try_from(bytes).ok().map(IpAddr::from),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, IsCa, KeyPair, PKCS_ED25519, SanType};

    use super::*;
    use support::mutation::mutations;
    use support::openssl::openssl;

    fn params(organization: &str, common_name: &str, addresses: &[&str]) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params
            .distinguished_name
            .push(DnType::OrganizationName, organization);
        params
            .distinguished_name
            .push(DnType::CommonName, common_name);
        params.subject_alt_names = addresses
            .iter()
            .map(|address| SanType::IpAddress(address.parse().unwrap()))
            .collect();
        params
    }

    fn request(params: &CertificateParams) -> Vec<u8> {
        params
            .serialize_request(&KeyPair::generate().unwrap())
            .unwrap()
            .der()
            .to_vec()
    }

    fn refused(der: &[u8]) -> String {
        CertificateRequest::parse(der).unwrap_err().to_string()
    }

    #[test]
    fn a_kubelets_request_is_read_with_its_name_as_kubernetes_writes_it() {
        for (name, node) in [
            ("worker-1", "worker-1"),
            ("Worker_1.example", "worker-1.example"),
        ] {
            let key = KeyPair::generate().unwrap();
            let params = params(
                "system:nodes",
                &format!("system:node:{name}"),
                &["10.0.0.7", "fd00::7"],
            );
            let der = params.serialize_request(&key).unwrap();
            let read = CertificateRequest::parse(der.der()).unwrap();
            assert_eq!(read.node.as_str(), node);
            assert_eq!(
                read.addresses,
                [
                    "10.0.0.7".parse::<IpAddr>().unwrap(),
                    "fd00::7".parse().unwrap()
                ]
            );
            assert_eq!(read.public_key[P256.len()..], *key.public_key_raw());
        }
        let none = request(&params("system:nodes", "system:node:a", &[]));
        assert!(
            CertificateRequest::parse(&none)
                .unwrap()
                .addresses
                .is_empty()
        );
    }

    /// Makes a request with openssl(1) in the form of Go.
    fn by_openssl(options: &str) -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let config = "[req]\ndistinguished_name=dn\n[dn]\n[name]\nCN=a\n";
        std::fs::write(folder.path().join("config"), config).unwrap();
        let openssl = |arguments: &str| openssl(folder.path(), arguments);
        openssl("ecparam -name prime256v1 -genkey -noout -out key");
        let subject = "/O=system:nodes/CN=system:node:a.b";
        openssl(&format!(
            "req -new -sha256 -outform DER -config config -subj {subject} -key key {options} -out request"
        ));
        std::fs::read(folder.path().join("request")).unwrap()
    }

    #[test]
    fn a_request_of_openssl_with_an_address_is_read() {
        let der = by_openssl("-addext subjectAltName=IP:10.0.0.1");
        let read = CertificateRequest::parse(&der).unwrap();
        assert_eq!((read.node.as_str(), read.addresses.len()), ("a.b", 1));
    }

    #[test]
    fn a_host_name_is_read_only_where_it_is_permitted() {
        let der = by_openssl("-addext subjectAltName=DNS:a.b,IP:10.0.0.1");
        assert!(refused(&der).contains("other entries than addresses"));
        let read = CertificateRequest::parse_with_names(&der).unwrap();
        assert_eq!(
            (&read.names[..], read.common_name.as_str()),
            (&["a.b".to_owned()][..], "system:node:a.b")
        );
    }

    #[test]
    fn other_alternative_names_are_refused() {
        for other in ["URI:https://a.b", "email:a@a.b", "dirName:name"] {
            let der = by_openssl(&format!("-addext subjectAltName=DNS:a.b,{other}"));
            let refused = CertificateRequest::parse_with_names(&der)
                .unwrap_err()
                .to_string();
            assert!(
                refused.contains("other entries than addresses and host names"),
                "{refused}"
            );
        }
    }

    #[test]
    fn other_extensions_and_other_signatures_are_refused() {
        let more = "-addext subjectAltName=IP:10.0.0.1 -addext basicConstraints=CA:TRUE";
        assert!(refused(&by_openssl(more)).contains("other extensions"));
        assert!(refused(&by_openssl("-sha384")).contains("not ecdsa-with-SHA256"));
    }

    #[test]
    fn whatever_a_kubelet_does_not_ask_for_is_refused() {
        let good = params("system:nodes", "system:node:a", &["10.0.0.1"]);
        for (organization, name, why) in [
            ("system:masters", "system:node:a", "organization"),
            ("", "system:node:a", "organization"),
            ("system:nodes", "a", "common name"),
            ("system:nodes", "system:node:", "a node cannot be named"),
            ("system:nodes", "system:node:a/b", "a node cannot be named"),
            ("system:nodes", "kubernetes-admin", "common name"),
            ("system:nodes", "system:node:\u{e4}", "ASCII"),
        ] {
            assert!(
                refused(&request(&params(organization, name, &[]))).contains(why),
                "{organization} {name}"
            );
        }
        let mut more = good.clone();
        more.distinguished_name.push(DnType::CountryName, "DE");
        assert!(refused(&request(&more)).contains("other attributes than an organization"));
        let mut named = good.clone();
        named
            .subject_alt_names
            .push(SanType::DnsName("kubernetes".try_into().unwrap()));
        assert!(refused(&request(&named)).contains("other entries than addresses"));
        let mut many = good.clone();
        many.subject_alt_names =
            vec![SanType::IpAddress("10.0.0.1".parse().unwrap()); MAX_ADDRESSES + 1];
        assert!(refused(&request(&many)).contains("more than 16"));
        let mut ca = good.clone();
        ca.is_ca = IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        ca.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign];
        if let Ok(der) = ca.serialize_request(&KeyPair::generate().unwrap()) {
            assert!(refused(der.der()).contains("extensions"));
        }
        let other = good
            .serialize_request(&KeyPair::generate_for(&PKCS_ED25519).unwrap())
            .unwrap();
        assert!(refused(other.der()).contains("not ECDSA P-256"));
        assert!(refused(&vec![0x30; MAX_LEN + 1]).contains("more than 4096"));
        assert!(refused(b"").contains("not a PKCS#10"));
    }

    #[test]
    fn a_request_signed_by_another_key_is_refused() {
        let (first, second) = (request(&params("system:nodes", "system:node:a", &[])), {
            request(&params("system:nodes", "system:node:a", &[]))
        });
        let info = |der: &[u8]| {
            let mut request = DerReader::new(DerReader::new(der).expect(der::SEQUENCE).unwrap());
            let info = request.expect_whole(der::SEQUENCE).unwrap().to_vec();
            (
                info,
                request.expect_whole(der::SEQUENCE).unwrap().to_vec(),
                request.read().unwrap().1.to_vec(),
            )
        };
        let ((info, algorithm, _), (_, _, signature)) = (info(&first), info(&second));
        let mixed = der::element(
            der::SEQUENCE,
            &[
                &info,
                &algorithm,
                &der::element(der::BIT_STRING, &[&signature]),
            ],
        );
        assert_eq!(refused(&mixed), "it is not signed by its own key");
    }

    #[test]
    fn no_mutation_of_a_request_is_taken_or_makes_the_parser_panic() {
        let mut params = params(
            "system:nodes",
            "system:node:worker-1",
            &["10.0.0.7", "fd00::7"],
        );
        params
            .subject_alt_names
            .push(SanType::DnsName("worker-1".try_into().unwrap()));
        let valid = request(&params);
        let read = CertificateRequest::parse_with_names(&valid).unwrap();
        for mutant in mutations(&valid, 20_000) {
            // A mutated signature may still be valid in a second encoding. The rest is signed.
            if let Ok(other) = CertificateRequest::parse_with_names(&mutant) {
                assert_eq!(other, read);
            }
            let _ = (
                read_subject(&mutant),
                read_attributes(&mutant),
                read_extensions(&mutant),
            );
        }
        // Code after the signature check must not panic either.
        let mut info = DerReader::new(DerReader::new(&valid).expect(der::SEQUENCE).unwrap());
        let mut info = DerReader::new(info.expect(der::SEQUENCE).unwrap());
        info.read().unwrap();
        let subject = info.expect(der::SEQUENCE).unwrap();
        info.read().unwrap();
        let attributes = info.read().unwrap().1;
        for mutant in mutations(subject, 20_000) {
            let _ = read_subject(&mutant);
        }
        for mutant in mutations(attributes, 20_000) {
            let _ = read_attributes(&mutant);
        }
    }
}
