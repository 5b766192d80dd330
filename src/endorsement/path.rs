//! The path from the certificate of an endorsement key to a root, for certificates that the library
//! that verifies chains (webpki) refuses: those with the critical extension certificatePolicies, as
//! STM, Infineon and Intel issue them, and those whose issuer's name is encoded differently in its own
//! certificate ([`name`]).
//!
//! This program requires no certificate policy: it starts with any-policy and without
//! require-explicit-policy (RFC 5280 §6.1.1). Then a certificate's policies have no effect (§6.1.3
//! d, §6.1.5 g). A certificate is refused if an extension requires a policy, limits names or is
//! unknown. Signatures, dates, CA flags, path length and extended key usage are checked as in the
//! library.

use base::der::{
    BIT_STRING, BOOLEAN, DerReader, INTEGER, Malformed, OBJECT_IDENTIFIER, OCTET_STRING, SEQUENCE,
    context,
};
use base::x509::{Certificate, KEY_CERT_SIGN};
use rustls::pki_types::{CertificateDer, SignatureVerificationAlgorithm, TrustAnchor};

use crate::name;
use verifier::refusal::{Kind, Refusal};
use webpki::ring as algorithms;

/// tcg-kp-EKCertificate, 2.23.133.8.1: the content of the OID.
pub(crate) const EK_CERTIFICATE: &[u8] = &[0x67, 0x81, 0x05, 0x08, 0x01];
/// Maximum number of CA certificates that a peer may send.
pub(crate) const MAX_CHAIN: usize = 6;
/// The signature algorithms that vendors use. SHA-1 is missing because it is not safe, and P-521
/// because the library for signatures lacks it.
pub(crate) const SIGNATURES: &[&dyn SignatureVerificationAlgorithm] = &[
    algorithms::RSA_PKCS1_2048_8192_SHA256,
    algorithms::RSA_PKCS1_2048_8192_SHA384,
    algorithms::RSA_PKCS1_2048_8192_SHA512,
    algorithms::RSA_PSS_2048_8192_SHA256_LEGACY_KEY,
    algorithms::RSA_PSS_2048_8192_SHA384_LEGACY_KEY,
    algorithms::RSA_PSS_2048_8192_SHA512_LEGACY_KEY,
    algorithms::ECDSA_P256_SHA256,
    algorithms::ECDSA_P256_SHA384,
    algorithms::ECDSA_P384_SHA256,
    algorithms::ECDSA_P384_SHA384,
];
/// Extensions (RFC 5280 §4.2.1): the contents of their OIDs.
const KEY_USAGE: &[u8] = &[0x55, 0x1d, 0x0f];
const ALTERNATIVE_NAME: &[u8] = &[0x55, 0x1d, 0x11];
const BASIC_CONSTRAINTS: &[u8] = &[0x55, 0x1d, 0x13];
const NAME_CONSTRAINTS: &[u8] = &[0x55, 0x1d, 0x1e];
const POLICIES: &[u8] = &[0x55, 0x1d, 0x20];
const EXTENDED_KEY_USAGE: &[u8] = &[0x55, 0x1d, 0x25];
/// The extensions that a certificate may mark as critical.
const UNDERSTOOD: [&[u8]; 5] = [
    KEY_USAGE,
    ALTERNATIVE_NAME,
    BASIC_CONSTRAINTS,
    POLICIES,
    EXTENDED_KEY_USAGE,
];
/// Maximum number of extensions of a certificate.
const MAX_EXTENSIONS: usize = 32;
/// Maximum number of signatures that are verified for one certificate: a peer can send several CAs
/// of the same name.
const MAX_SIGNATURES: usize = 32;

/// Why there is no path.
#[derive(Debug, PartialEq, Eq)]
pub enum NoPath {
    /// The issuer's certificate is neither in the chain nor among the roots.
    UnknownIssuer,
    /// A certificate is refused.
    Refused(Refusal),
}

/// Checks that certificates of `chain` connect a certificate with a root, at a time in seconds
/// since 1970.
pub fn verify(
    certificate: &[u8],
    chain: &[CertificateDer<'_>],
    root: &TrustAnchor<'_>,
    time: u64,
) -> Result<(), NoPath> {
    let leaf = Link::parse(certificate);
    let leaf = leaf.map_err(|Malformed| refused("the certificate cannot be read"))?;
    if leaf.is_authority().is_ok() {
        return Err(refused("the certificate is a CA certificate"));
    }
    // a certificate that cannot be read is not the issuer
    let issuers: Vec<_> = chain.iter().flat_map(|one| Link::parse(one)).collect();
    let mut search = Search {
        issuers: &issuers,
        root,
        time,
        signatures: MAX_SIGNATURES,
    };
    search.issued(&leaf, 0)
}

fn refused(why: &str) -> NoPath {
    NoPath::Refused(Kind::Certificate.because(why))
}

struct Search<'a> {
    issuers: &'a [Link<'a>],
    root: &'a TrustAnchor<'a>,
    time: u64,
    /// How many more signatures may be verified.
    signatures: usize,
}

impl Search<'_> {
    /// Checks that a certificate, with this many CAs between it and the leaf, leads to the root.
    fn issued(&mut self, link: &Link<'_>, below: usize) -> Result<(), NoPath> {
        let is_by_root = name::equal(link.issuer, self.root.subject.as_ref());
        let issuers = self.issuers;
        let mut issuers = issuers
            .iter()
            .filter(|one| name::equal(one.subject, link.issuer))
            .peekable();
        if !is_by_root && issuers.peek().is_none() {
            return Err(NoPath::UnknownIssuer);
        }
        link.check(self.time)?;
        let mut why = NoPath::UnknownIssuer;
        if is_by_root {
            match (
                &self.root.name_constraints,
                self.signed(link, &self.root.subject_public_key_info),
            ) {
                (None, Ok(())) => return Ok(()),
                (None, Err(error)) => why = error,
                (Some(_), _) => {
                    why = refused("the root has name constraints, which are not supported")
                }
            }
        }
        for issuer in issuers {
            if below == MAX_CHAIN {
                return Err(refused("the chain is too long"));
            }
            let tried = self.signed(link, issuer.key);
            let tried = tried.and_then(|()| issuer.may_issue(below));
            match tried.and_then(|()| self.issued(issuer, below + 1)) {
                Ok(()) => return Ok(()),
                // another CA of the same name may be the right one
                Err(NoPath::UnknownIssuer) => {}
                Err(error) => why = error,
            }
        }
        Err(why)
    }

    /// Checks that a key signed a certificate.
    fn signed(&mut self, link: &Link<'_>, key: &[u8]) -> Result<(), NoPath> {
        let left = self.signatures.checked_sub(1);
        self.signatures = left.ok_or_else(|| refused("too many authorities have the same name"))?;
        let (algorithm, key) =
            key_of(key).map_err(|Malformed| refused("the key of an authority cannot be read"))?;
        let of_key = |one: &&&dyn SignatureVerificationAlgorithm| {
            one.signature_alg_id().as_ref() == link.algorithm
                && one.public_key_alg_id().as_ref() == algorithm
        };
        let method = SIGNATURES
            .iter()
            .find(of_key)
            .ok_or_else(|| refused(&roots::chain::unsupported(link.algorithm, algorithm)))?;
        let verified = method.verify_signature(key, link.signed, link.signature);
        verified.map_err(|_| {
            let why = "a signature is wrong: the certificate is altered, or from another authority with the same name";
            NoPath::Refused(Kind::Signature.because(why))
        })
    }
}

/// Returns algorithm and key of the content of a SubjectPublicKeyInfo.
fn key_of(info: &[u8]) -> Result<(&[u8], &[u8]), Malformed> {
    let mut parts = DerReader::new(info);
    let algorithm = parts.expect(SEQUENCE)?;
    let key = parts.expect(BIT_STRING)?.strip_prefix(&[0]);
    parts.end()?;
    Ok((algorithm, key.ok_or(Malformed)?))
}

/// A certificate, as its issuer signed it. Names and keys are the contents of their SEQUENCE.
struct Link<'a> {
    signed: &'a [u8],
    algorithm: &'a [u8],
    signature: &'a [u8],
    issuer: &'a [u8],
    subject: &'a [u8],
    key: &'a [u8],
    extensions: Vec<Extension<'a>>,
    fields: Certificate<'a>,
}

struct Extension<'a> {
    oid: &'a [u8],
    is_critical: bool,
    value: &'a [u8],
}

impl<'a> Link<'a> {
    fn parse(der: &'a [u8]) -> Result<Link<'a>, Malformed> {
        // nothing follows the certificate
        let fields = Certificate::parse(der)?;
        let mut parts = DerReader::new(DerReader::new(der).expect(SEQUENCE)?);
        let signed = parts.expect_whole(SEQUENCE)?;
        let algorithm = parts.expect(SEQUENCE)?;
        let signature = parts.expect(BIT_STRING)?.strip_prefix(&[0]);
        parts.end()?;
        let mut inner = DerReader::new(DerReader::new(signed).expect(SEQUENCE)?);
        // version 3
        if inner.expect(context(0))? != [INTEGER, 1, 2] {
            return Err(Malformed);
        }
        inner.expect(INTEGER)?;
        if inner.expect(SEQUENCE)? != algorithm {
            return Err(Malformed);
        }
        let issuer = inner.expect(SEQUENCE)?;
        inner.expect(SEQUENCE)?; // validity
        let (subject, key) = (inner.expect(SEQUENCE)?, inner.expect(SEQUENCE)?);
        let extensions = inner.expect(context(3))?;
        inner.end()?;
        Ok(Link {
            signed,
            algorithm,
            signature: signature.ok_or(Malformed)?,
            issuer,
            subject,
            key,
            extensions: extensions_of(extensions)?,
            fields,
        })
    }

    fn extension(&self, oid: &[u8]) -> Option<&'a [u8]> {
        let found = self.extensions.iter().find(|one| one.oid == oid);
        found.map(|one| one.value)
    }

    /// Checks the dates, and all extensions that do not depend on the position in the path.
    fn check(&self, time: u64) -> Result<(), NoPath> {
        match self.fields.validity() {
            Ok((from, _)) if time < from => Err(NoPath::Refused(
                Kind::Expired
                    .because("a certificate is not valid yet: is the clock of this machine right?"),
            )),
            Ok((_, until)) if time <= until => Ok(()),
            Ok(_) => Err(NoPath::Refused(
                Kind::Expired.because("a certificate has expired"),
            )),
            Err(Malformed) => Err(refused("the dates of a certificate cannot be read")),
        }?;
        if self.extension(NAME_CONSTRAINTS).is_some() {
            return Err(refused(
                "an authority has name constraints, which are not supported",
            ));
        }
        let is_unknown = |one: &&Extension<'_>| one.is_critical && !UNDERSTOOD.contains(&one.oid);
        if let Some(unknown) = self.extensions.iter().find(is_unknown) {
            let oid = base::text::hex(&unknown.oid[..unknown.oid.len().min(20)]);
            return Err(refused(&format!(
                "a certificate has a critical extension that this program does not know (OID {oid} in DER)"
            )));
        }
        match self.extension(EXTENDED_KEY_USAGE) {
            Some(usages) if !has_usage(usages, EK_CERTIFICATE) => Err(refused(
                "a certificate is for another use than an endorsement key (extended key usage)",
            )),
            _ => Ok(()),
        }
    }

    /// Returns the maximum number of CAs between this CA and a leaf, `None` without a limit; an
    /// error if it is not a CA.
    fn is_authority(&self) -> Result<Option<usize>, Malformed> {
        let constraints = self.extension(BASIC_CONSTRAINTS).ok_or(Malformed)?;
        let mut outer = DerReader::new(constraints);
        let mut fields = DerReader::new(outer.expect(SEQUENCE)?);
        outer.end()?;
        if fields.expect(BOOLEAN)? != [0xff] {
            return Err(Malformed);
        }
        if fields.is_empty() {
            return Ok(None);
        }
        let limit = match fields.expect(INTEGER)? {
            [limit @ ..0x80] => usize::from(*limit),
            _ => return Err(Malformed),
        };
        fields.end()?;
        Ok(Some(limit))
    }

    /// Checks that this is a CA that may have this many CAs below it.
    fn may_issue(&self, below: usize) -> Result<(), NoPath> {
        let usage = self.fields.key_usage();
        let signs = match self.extension(KEY_USAGE) {
            Some(_) => usage.is_some_and(|usage| usage & KEY_CERT_SIGN != 0),
            None => true,
        };
        match self.is_authority() {
            Ok(limit) if signs => {
                if limit.is_none_or(|limit| below <= limit) {
                    Ok(())
                } else {
                    Err(refused(
                        "the chain is longer than one of its authorities allows",
                    ))
                }
            }
            _ => Err(refused(
                "a certificate of the chain is not a CA certificate",
            )),
        }
    }
}

fn extensions_of(content: &[u8]) -> Result<Vec<Extension<'_>>, Malformed> {
    let mut outer = DerReader::new(content);
    let mut list = DerReader::new(outer.expect(SEQUENCE)?);
    outer.end()?;
    let mut extensions: Vec<Extension<'_>> = vec![];
    while !list.is_empty() {
        let mut fields = DerReader::new(list.expect(SEQUENCE)?);
        let oid = fields.expect(OBJECT_IDENTIFIER)?;
        let is_critical = fields.peek() == Some(BOOLEAN);
        if is_critical && fields.expect(BOOLEAN)? != [0xff] {
            return Err(Malformed);
        }
        let value = fields.expect(OCTET_STRING)?;
        fields.end()?;
        let is_second = extensions.iter().any(|one| one.oid == oid);
        if is_second || extensions.len() == MAX_EXTENSIONS {
            return Err(Malformed);
        }
        extensions.push(Extension {
            oid,
            is_critical,
            value,
        });
    }
    Ok(extensions)
}

/// Returns whether an extended key usage can be parsed and contains this use.
fn has_usage(value: &[u8], usage: &[u8]) -> bool {
    let read = || {
        let mut outer = DerReader::new(value);
        let mut list = DerReader::new(outer.expect(SEQUENCE)?);
        outer.end()?;
        let mut found = false;
        while !list.is_empty() {
            found |= list.expect(OBJECT_IDENTIFIER)? == usage;
        }
        Ok::<_, Malformed>(found)
    };
    read().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::pki_types::pem::PemObject;
    use support::mutation::mutations;

    /// Certificates that STMicroelectronics publishes (technical note TN1330): the roots of its RSA and
    /// of its ECC endorsement keys, and a CA below each.
    fn of_stm(name: &str) -> CertificateDer<'static> {
        let path = format!("{}/tests/data/{name}.pem", support::ROOT);
        CertificateDer::from_pem_file(path).unwrap()
    }

    /// The authority writes the name of its issuer as UTF8String, and the root its own as PrintableString.
    #[test]
    fn an_authority_of_stm_whose_issuer_is_encoded_differently_leads_to_its_root() {
        let (root, authority) = (of_stm("stm-ecc-root-01"), of_stm("stm-ecc-intermediate-02"));
        let anchor = webpki::anchor_from_trusted_cert(&root).unwrap();
        let link = Link::parse(&authority).unwrap();
        assert_ne!(link.issuer, anchor.subject.as_ref());
        let mut search = Search {
            issuers: &[],
            root: &anchor,
            time: TIME,
            signatures: MAX_SIGNATURES,
        };
        assert_eq!(search.issued(&link, 1), Ok(()));
    }

    /// 2030-01-01
    const TIME: u64 = 1_893_456_000;

    #[test]
    fn an_authority_of_stm_with_critical_policies_leads_to_its_root() {
        let (root, authority) = (of_stm("stm-ek-root"), of_stm("stm-ek-intermediate-05"));
        let anchor = webpki::anchor_from_trusted_cert(&root).unwrap();
        let link = Link::parse(&authority).unwrap();
        let policies = link.extensions.iter().find(|one| one.oid == POLICIES);
        assert!(policies.unwrap().is_critical);
        let error = webpki::EndEntityCert::try_from(&authority).err();
        assert_eq!(error, Some(webpki::Error::UnsupportedCriticalExtension));

        let issued = |link: &Link<'_>, time| {
            let mut search = Search {
                issuers: &[],
                root: &anchor,
                time,
                signatures: MAX_SIGNATURES,
            };
            search.issued(link, 1)
        };
        assert_eq!(issued(&link, TIME), Ok(()));
        assert_eq!(link.may_issue(0), Ok(()));
        assert!(link.may_issue(1).is_err());
        for (time, why) in [
            (
                TIME / 2,
                "a certificate is not valid yet: is the clock of this machine right?",
            ),
            (2 * TIME, "a certificate has expired"),
        ] {
            let expected = NoPath::Refused(Kind::Expired.because(why));
            assert_eq!(issued(&link, time), Err(expected));
        }
        // without its root, an expired certificate is one of an unknown issuer
        let ecc = of_stm("stm-ecc-root-01");
        let ecc = webpki::anchor_from_trusted_cert(&ecc).unwrap();
        let mut search = Search {
            issuers: &[],
            root: &ecc,
            time: 2 * TIME,
            signatures: MAX_SIGNATURES,
        };
        assert_eq!(search.issued(&link, 1), Err(NoPath::UnknownIssuer));
        for altered in mutations(&authority, 5000) {
            if let Ok(link) = Link::parse(&altered)
                && altered != *authority
            {
                assert!(issued(&link, TIME).is_err());
            }
        }
    }
}
