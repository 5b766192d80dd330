//! Verification of TDX quotes with Intel's collateral, as Intel's quote verification library does it (DCAP).
//!
//! ```text
//! Intel SGX Root CA ─► PCK CA ─► PCK ─► report of the quoting enclave ─► attestation key ─► quote
//!                   └► TCB signing ─► TCB information (levels of the platform), identity of the quoting enclave
//! ```
//!
//! The collateral has at most 30 days, so a verifier fetches it, or the machine adds it to its evidence. It is public and signed:
//! who brings it can only choose an older one: the policy has a minimum for its evaluation number, and the dates bound its age.

use std::time::Duration;

use ring::digest::{SHA256, digest};
use ring::signature::{ECDSA_P256_SHA256_FIXED, UnparsedPublicKey};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, SignatureVerificationAlgorithm, TrustAnchor, UnixTime};
use serde::{Deserialize, Serialize};
use webpki::{
    BorrowedCertRevocationList, CertRevocationList, EndEntityCert, ExpirationPolicy, KeyUsage,
    RevocationOptionsBuilder,
};

use super::der;
use super::quote::{Body, Enclave, Quote};
use super::tcb::{Identity, Platform, Status, TcbInfo, merged};

/// The root of Intel, "Intel SGX Root CA": SHA-256
/// 44a0196b2b99f889b8e149e95b807a350e7424964399e885a7cbb8ccfab674d3, until 2049-12-31. From
/// https://certificates.trustedservices.intel.com/Intel_SGX_Provisioning_Certification_RootCA.cer
pub const INTEL_ROOT: &[u8] = include_bytes!("intel-sgx-root.der");

/// All signatures are ECDSA P-256 with SHA-256.
const SIGNATURES: &[&dyn SignatureVerificationAlgorithm] = &[webpki::ring::ECDSA_P256_SHA256];
/// 1.2.840.113741.1.13.1: the extension of a PCK certificate that names the platform (Intel PCK Certificate and CRL Specification).
const SGX_EXTENSION: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf8, 0x4d, 0x01, 0x0d, 0x01];
/// The first bytes of a SubjectPublicKeyInfo with an uncompressed point of P-256.
const P256: &[u8] = &[
    0x30, 0x59, 0x30, 0x13, 0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x08, 0x2a,
    0x86, 0x48, 0xce, 0x3d, 0x03, 0x01, 0x07, 0x03, 0x42, 0x00,
];
/// Maximum size of the parts of collateral in bytes: genuine TCB information has about 20 KiB.
const MAX_PART: usize = 256 << 10;

/// What Intel publishes about a platform. The JSON is that of the crate `dcap-qvl`, whose tools and others' write it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collateral {
    /// The levels of the platform: the exact bytes that Intel signed.
    pub tcb_info: String,
    /// The signature, r ‖ s, in hexadecimal digits.
    pub tcb_info_signature: Hex,
    /// The certificates of the signer in PEM.
    pub tcb_info_issuer_chain: String,
    /// The identity of the quoting enclave: the exact bytes that Intel signed.
    pub qe_identity: String,
    /// As of the TCB information.
    pub qe_identity_signature: Hex,
    /// As of the TCB information.
    pub qe_identity_issuer_chain: String,
    /// The list of revoked authorities, in DER.
    pub root_ca_crl: Hex,
    /// The list of revoked platforms, in DER.
    pub pck_crl: Hex,
    /// The certificates of the authority that signed the list of platforms, in PEM. The quote has them too.
    #[serde(default)]
    pub pck_crl_issuer_chain: String,
}

/// Bytes, in JSON as hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hex(pub Vec<u8>);

/// What a verified quote proves beside its body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verified {
    /// How the platform compares with what Intel knows.
    pub status: Status,
    /// Intel's names of what is wrong with a platform that is not up to date.
    pub advisories: Vec<String>,
    /// The number of Intel's evaluation of which both the levels and the identity are.
    pub evaluation: u32,
    /// The platform.
    pub platform: Platform,
    /// The time at which the collateral ends, in seconds since 1970.
    pub until: u64,
}

/// Verifies quotes under one root.
pub struct Verifier<'a> {
    root: TrustAnchor<'a>,
}

impl Verifier<'static> {
    /// Verifies under Intel's root.
    pub fn of_intel() -> Result<Verifier<'static>, String> {
        static ROOT: CertificateDer<'static> = CertificateDer::from_slice(INTEL_ROOT);
        Verifier::under(&ROOT)
    }
}

impl<'a> Verifier<'a> {
    /// Verifies under the root in this certificate.
    pub fn under(root: &'a CertificateDer<'a>) -> Result<Verifier<'a>, String> {
        let root = webpki::anchor_from_trusted_cert(root);
        let root = root.map_err(|error| format!("the root cannot be read: {error}"))?;
        Ok(Verifier { root })
    }

    /// Verifies a quote at the time `now`, in seconds since 1970. The caller judges the status, and what the quote contains.
    pub fn verify(
        &self,
        quote: &Quote<'_>,
        collateral: &Collateral,
        now: u64,
    ) -> Result<Verified, String> {
        let time = UnixTime::since_unix_epoch(Duration::from_secs(now));
        let crls = [
            revocations(&collateral.root_ca_crl, "root CRL")?,
            revocations(&collateral.pck_crl, "PCK CRL")?,
        ];
        let chain = Chain {
            root: &self.root,
            crls: &crls,
            time,
        };
        let info = chain.signed_by_intel(
            "TCB information",
            &collateral.tcb_info,
            &collateral.tcb_info_signature,
            &collateral.tcb_info_issuer_chain,
        )?;
        let info: TcbInfo = read("TCB information", info)?;
        let identity = chain.signed_by_intel(
            "QE identity",
            &collateral.qe_identity,
            &collateral.qe_identity_signature,
            &collateral.qe_identity_issuer_chain,
        )?;
        let identity: Identity = read("QE identity", identity)?;
        let until = info.check_dates(now)?.min(identity.check_dates(now)?);
        let (key, platform) = chain.pck(quote.pck_chain)?;

        verify(&key, quote.qe_report, quote.qe_signature)
            .ok_or("the report of the quoting enclave is not signed by the platform's key")?;
        let enclave =
            Enclave::parse(quote.qe_report).ok_or("the report of the quoting enclave is short")?;
        let named = digest(
            &SHA256,
            &[quote.attestation_key, quote.authentication].concat(),
        );
        if enclave.report_data[..32] != *named.as_ref() || enclave.report_data[32..] != [0; 32] {
            return Err("the attestation key is not the one that the quoting enclave names".into());
        }
        let mut attestation_key = vec![4];
        attestation_key.extend(quote.attestation_key);
        verify(&attestation_key, quote.signed, quote.signature)
            .ok_or("the quote is not signed by its attestation key")?;

        let enclave_level = identity.level_of(&enclave)?;
        let levels = levels(&info, &platform, &quote.body)?;
        let mut advisories = vec![];
        for advisory in levels
            .iter()
            .chain([&enclave_level])
            .flat_map(|level| &level.advisories)
        {
            if !advisories.contains(advisory) {
                advisories.push(advisory.clone());
            }
        }
        let mut statuses = levels
            .iter()
            .map(|level| level.status.with_part(enclave_level.status));
        let launched = statuses.next().ok_or("the quote has no level")?;
        Ok(Verified {
            status: merged(launched, statuses.next()),
            advisories,
            evaluation: info.evaluation.min(identity.evaluation),
            platform,
            until,
        })
    }
}

/// Returns the platform that a quote names: whoever fetches collateral needs its FMSPC. Nothing of it is verified.
pub fn named_platform(quote: &Quote<'_>) -> Result<Platform, String> {
    let chain = certificates("PCK", quote.pck_chain)?;
    let platform = der::extension(&chain[0], SGX_EXTENSION).and_then(Platform::parse);
    platform.ok_or_else(|| "the PCK certificate does not name its platform".into())
}

/// Returns the levels at the start of the machine, and now if the module was updated since.
fn levels(
    info: &TcbInfo,
    platform: &Platform,
    body: &Body,
) -> Result<Vec<super::tcb::Judged>, String> {
    info.check_platform(platform)?;
    info.check_module(body)?;
    let svns = [
        Some(&body.tee_tcb_svn),
        body.td15.as_ref().map(|td15| &td15.tee_tcb_svn2),
    ];
    svns.into_iter()
        .flatten()
        .map(|svn| info.level_of(platform, svn))
        .collect()
}

/// What a certificate must lead to.
struct Chain<'a> {
    root: &'a TrustAnchor<'a>,
    crls: &'a [CertRevocationList<'a>; 2],
    time: UnixTime,
}

impl Chain<'_> {
    /// Verifies a certificate, and returns its key: an uncompressed point.
    fn key(
        &self,
        name: &str,
        certificate: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
    ) -> Result<Vec<u8>, String> {
        let certificate = EndEntityCert::try_from(certificate)
            .map_err(|error| format!("the {name} certificate cannot be read: {error}"))?;
        let crls: Vec<_> = self.crls.iter().collect();
        let revocation = RevocationOptionsBuilder::new(&crls)
            .map_err(|_| "there is no CRL")?
            .with_expiration_policy(ExpirationPolicy::Enforce)
            .build();
        let path = certificate
            .verify_for_usage(
                SIGNATURES,
                std::slice::from_ref(self.root),
                between,
                self.time,
                // no certificate of Intel has an extended key usage
                KeyUsage::client_auth(),
                Some(revocation),
                None,
            )
            .map_err(|error| format!("the {name} certificate: {}", in_words(&error)))?;
        // Intel's own signer is directly under the root, a PCK under an authority: one cannot serve as the other
        if path.intermediate_certificates().count() != between.len() {
            return Err(format!(
                "the {name} certificate has another place in the chain"
            ));
        }
        let info = certificate.subject_public_key_info();
        match info.as_ref().strip_prefix(P256) {
            Some(point) if point.len() == 65 => Ok(point.into()),
            _ => Err(format!("the key of the {name} certificate is not of P-256")),
        }
    }

    /// Returns a text after it verified that Intel signed it.
    fn signed_by_intel<'t>(
        &self,
        name: &str,
        text: &'t str,
        signature: &Hex,
        issuer: &str,
    ) -> Result<&'t str, String> {
        if text.len() > MAX_PART {
            return Err(format!(
                "the {name} has {} bytes, expected at most {MAX_PART}",
                text.len()
            ));
        }
        let chain = certificates(name, issuer.as_bytes())?;
        let key = self.key(&format!("{name} signer's"), &chain[0], &[])?;
        verify(&key, text.as_bytes(), &signature.0)
            .ok_or_else(|| format!("the {name} is not signed by its signer"))?;
        Ok(text)
    }

    /// Returns the key of a PCK certificate, and the platform that it names.
    fn pck(&self, pem: &[u8]) -> Result<(Vec<u8>, Platform), String> {
        let chain = certificates("PCK", pem)?;
        let [pck, authority, ..] = &chain[..] else {
            return Err("the quote has no certificate of the PCK's authority".into());
        };
        let key = self.key("PCK", pck, std::slice::from_ref(authority))?;
        let platform = der::extension(pck, SGX_EXTENSION).and_then(Platform::parse);
        Ok((
            key,
            platform.ok_or("the PCK certificate does not name its platform")?,
        ))
    }
}

/// Reads certificates in PEM: at least one, at most four.
fn certificates(name: &str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    if pem.len() > MAX_PART {
        return Err(format!(
            "the chain of the {name} has {} bytes, expected at most {MAX_PART}",
            pem.len()
        ));
    }
    // a quoting service may end the text with a NUL
    let pem = pem.strip_suffix(&[0]).unwrap_or(pem);
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).take(5).collect();
    let certificates = certificates.map_err(|error| format!("the chain of the {name}: {error}"))?;
    match certificates.len() {
        1..=4 => Ok(certificates),
        count => Err(format!(
            "the chain of the {name} has {count} certificates, expected 1 to 4"
        )),
    }
}

fn revocations<'a>(der: &'a Hex, name: &str) -> Result<CertRevocationList<'a>, String> {
    if der.0.len() > MAX_PART {
        let len = der.0.len();
        return Err(format!(
            "the {name} has {len} bytes, expected at most {MAX_PART}"
        ));
    }
    let crl = BorrowedCertRevocationList::from_der(&der.0);
    let crl = crl.map_err(|error| format!("the {name} cannot be read: {error}"))?;
    Ok(CertRevocationList::Borrowed(crl))
}

fn read<'a, T: Deserialize<'a>>(name: &str, text: &'a str) -> Result<T, String> {
    serde_json::from_str(text).map_err(|error| format!("the {name} cannot be read: {error:.160}"))
}

/// Verifies an ECDSA signature r ‖ s.
fn verify(key: &[u8], text: &[u8], signature: &[u8]) -> Option<()> {
    let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, key);
    key.verify(text, signature).ok()
}

fn in_words(error: &webpki::Error) -> String {
    use webpki::Error::*;
    match error {
        CertRevoked => "it, or its authority, is revoked".into(),
        CertExpired { .. } => "it, or its authority, has expired".into(),
        CertNotValidYet { .. } => "it is not valid yet: is the clock of this machine right?".into(),
        CrlExpired { .. } => "a list of revoked certificates (CRL) has expired".into(),
        UnknownRevocationStatus => {
            "no list of revoked certificates (CRL) is of its authority".into()
        }
        UnknownIssuer => "it does not lead to the root".into(),
        error => error.to_string(),
    }
}

impl Platform {
    /// Parses the extension of a PCK certificate.
    fn parse(extension: &[u8]) -> Option<Platform> {
        let entries = || der::only(extension, der::SEQUENCE).map(der::by_oid);
        let entry = |id: u8| {
            entries()?
                .find(|(oid, _)| is_under(oid, &[id]))
                .map(|(_, value)| value)
        };
        fn octets<const N: usize>((tag, content): (u8, &[u8])) -> Option<[u8; N]> {
            (tag == der::OCTETS)
                .then(|| content.try_into().ok())
                .flatten()
        }
        let (tag, tcb) = entry(2)?;
        let svn = |id: u8| {
            let (_, value) = der::by_oid(tcb).find(|(oid, _)| is_under(oid, &[2, id]))?;
            der::small(value)
        };
        let mut cpu_svn = [0; 16];
        for (svn_id, component) in (1..).zip(&mut cpu_svn) {
            *component = svn(svn_id)?.try_into().ok()?;
        }
        (tag == der::SEQUENCE).then_some(Platform {
            cpu_svn,
            pce_svn: svn(17)?,
            ppid: octets(entry(1)?)?,
            pce_id: octets(entry(3)?)?,
            fmspc: octets(entry(4)?)?,
            instance: entry(6).and_then(octets),
        })
    }
}

/// Returns whether an OID is the one of the extension and these arcs.
fn is_under(oid: &[u8], arcs: &[u8]) -> bool {
    oid.strip_prefix(SGX_EXTENSION) == Some(arcs)
}

impl Serialize for Hex {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let digits: String = self.0.iter().map(|byte| format!("{byte:02x}")).collect();
        serializer.serialize_str(&digits)
    }
}

impl<'de> Deserialize<'de> for Hex {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Hex, D::Error> {
        let text = String::deserialize(deserializer)?;
        let bytes = super::tcb::unhex(&text).map(Hex);
        bytes.ok_or_else(|| serde::de::Error::custom("expected hexadecimal digits"))
    }
}
