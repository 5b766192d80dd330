//! The variant `azure-trustedlaunch`: a virtual machine of Azure with a virtual TPM, which is not
//! confidential. Azure certifies the attestation key of the TPM.
//!
//! ```text
//! instance info = { certificate of the attestation key, its issuer }, as in Constellation; beside it, further certificates
//! ```
//!
//! Azure has two hierarchies of certificates below one root. In one of them the certificate
//! contains the URL of its issuer, and the machine fetches the chain from there. In the other it
//! does not; the verifiers have that issuer built in.

use std::sync::Arc;

use base::der;
use base::text::quoted;
use base::x509;
use cloud::http::{Http, MAX_BODY};
use serde::{Deserialize, Serialize};

use super::prepared::{Prepared, Source};
use crate::document::Base64;
use crate::{AttesterVariant, IssueError, Oid, Registers, vtpm};
use tpm::Tpm;

/// The variant's line in the table.
pub const VARIANT: AttesterVariant = AttesterVariant {
    name: "azure-trustedlaunch",
    oid: OID,
    registers: Registers::Pcrs,
    location: tpm::Location::default_device,
    issuer: |location| {
        let machine = Prepared::new(AzureMachine(is_of_microsoft));
        Arc::new(vtpm::TpmIssuer::of_this_machine(
            location,
            Arc::new(machine),
        ))
    },
};

/// 1.3.9900.4.2
pub const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x04, 0x02];
/// The NV index of the certificate of the attestation key: DER, then zeros.
pub const CERTIFICATE_INDEX: u32 = 0x01c1_01d0;
/// The extension authorityInfoAccess, 1.3.6.1.5.5.7.1.1, with tag and length, and its method
/// caIssuers, 1.3.6.1.5.5.7.48.2 (RFC 5280 §4.2.2.1).
const AUTHORITY_INFO: &[u8] = &[0x06, 8, 0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x01, 0x01];
const ISSUERS: &[u8] = &[0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x30, 0x02];
/// uniformResourceIdentifier [6] of a GeneralName.
const URI: u8 = 0x86;
/// The hosts where Microsoft publishes CA certificates: these, and every host below the domain.
const HOSTS: [&str; 2] = ["www.microsoft.com", "crl.microsoft.com"];
const DOMAIN: &str = ".pki.core.windows.net";
/// Maximum number of certificates that a machine fetches: a regional CA, and the CA above it, which
/// is also built in.
const MAX_FETCHED: usize = 2;

/// The names are those of Constellation; `Chain` is ours.
#[derive(Clone, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct TrustedLaunchInfo {
    /// The certificate of the attestation key, DER.
    pub ak_cert: Base64,
    /// Its issuer.
    #[serde(rename = "CA")]
    pub ca: Base64,
    /// The certificates above it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chain: Vec<Base64>,
}

/// An Azure machine, and the check of URLs before a fetch: the host provides the certificate that
/// contains the URL.
pub struct AzureMachine(pub fn(&str) -> bool);

impl Source for AzureMachine {
    type Info = TrustedLaunchInfo;
    const OID: Oid = OID;

    fn info(&self, location: &tpm::Location) -> Result<(TrustedLaunchInfo, bool), IssueError> {
        let certificate = certificate(location)?;
        let (issuers, is_complete) = issuers(&certificate, self.0);
        let mut issuers = issuers.into_iter().map(Base64);
        let info = TrustedLaunchInfo {
            ak_cert: Base64(certificate),
            ca: issuers.next().unwrap_or_default(),
            chain: issuers.collect(),
        };
        Ok((info, is_complete))
    }
}

/// Returns the certificate of the attestation key, which is stored in the TPM.
fn certificate(location: &tpm::Location) -> Result<Vec<u8>, IssueError> {
    let certificates = Tpm::open(location)?.certificates(CERTIFICATE_INDEX)?;
    certificates.into_iter().next().ok_or_else(|| {
        IssueError::new(format!(
            "the TPM has no certificate at the NV index {CERTIFICATE_INDEX:#x}: is this a machine of Azure with trusted launch?"
        ))
    })
}

/// Fetches the certificates above this one. Returns them, and whether the chain is complete. A
/// verifier may have the missing ones.
fn issuers(certificate: &[u8], is_allowed: fn(&str) -> bool) -> (Vec<Vec<u8>>, bool) {
    let mut issuers: Vec<Vec<u8>> = vec![];
    while issuers.len() < MAX_FETCHED {
        let places = places_of_issuer(issuers.last().map_or(certificate, Vec::as_slice));
        if places.is_empty() {
            break;
        }
        match fetch(&places, is_allowed) {
            Some(issuer) => issuers.push(issuer),
            None => return (issuers, false),
        }
    }
    (issuers, true)
}

/// Returns the URLs at which a certificate says that its issuer is published.
pub fn places_of_issuer(certificate: &[u8]) -> Vec<String> {
    let read = || {
        let mut extensions = x509::extensions(certificate).ok()?.into_iter();
        let access = extensions.find(|one| one.oid == AUTHORITY_INFO)?.value;
        let mut descriptions =
            der::DerReader::new(der::DerReader::new(access).expect(der::SEQUENCE).ok()?);
        let mut places = vec![];
        while !descriptions.is_empty() {
            let mut description = der::DerReader::new(descriptions.expect(der::SEQUENCE).ok()?);
            let method = description.expect(der::OBJECT_IDENTIFIER).ok()?;
            if let (ISSUERS, (URI, place)) = (method, description.read().ok()?) {
                places.extend(std::str::from_utf8(place).map(str::to_owned));
            }
        }
        Some(places)
    };
    read().unwrap_or_default()
}

/// Returns whether Microsoft publishes certificates at this URL: plain HTTP at the usual port.
pub fn is_of_microsoft(url: &str) -> bool {
    let rest = url.strip_prefix("http://").unwrap_or_default();
    let host = rest.split('/').next().unwrap_or_default();
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-.".contains(&byte);
    host.bytes().all(is_name) && (HOSTS.contains(&host) || host.ends_with(DOMAIN))
}

/// Returns the certificate from the first URL that provides one.
fn fetch(places: &[String], is_allowed: fn(&str) -> bool) -> Option<Vec<u8>> {
    let why = |why: &dyn std::fmt::Display| {
        log::warn!("cannot fetch the issuer of the attestation key's certificate: {why}");
    };
    let mut allowed = places.iter().filter(|place| is_allowed(place)).peekable();
    if allowed.peek().is_none() {
        let place = quoted(&places[0], 120);
        why(&format!(
            "{place} is not allowed: expected http:// and *{DOMAIN} or {}",
            HOSTS.join(" or ")
        ));
    }
    allowed.find_map(|place| {
        let (base, path) = place.rsplit_once('/')?;
        match Http::new(base).get(path, &[], MAX_BODY) {
            Ok(body) if x509::extensions(&body).is_ok_and(|found| !found.is_empty()) => {
                return Some(body);
            }
            Ok(_) => why(&format!("{place} is no certificate")),
            Err(error) => why(&error),
        }
        None
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hosts_of_microsoft_are_asked_for_an_issuer() {
        const AUTHORITIES: [&[u8]; 2] = [
            include_bytes!("../../../roots/microsoft/azure-cloud-virtual-tpm-ca-2025.der"),
            include_bytes!("../../../roots/microsoft/global-virtual-tpm-ca-03.der"),
        ];
        for certificate in AUTHORITIES {
            let places = places_of_issuer(certificate);
            assert_eq!(places.len(), 1);
            assert!(is_of_microsoft(&places[0]), "{places:?}");
        }
        for place in [
            "http://primary-cdn.pki.core.windows.net/eastus/cacerts/cert.cer",
            "http://secondary-cdn.pki.core.windows.net/eastus/cacerts/cert.cer",
            "http://eastus.pki.core.windows.net/cert.cer",
            "http://crl.microsoft.com/eastus/cacerts/cert.cer",
        ] {
            assert!(is_of_microsoft(place), "{place}");
        }
        for other in [
            "",
            "http://",
            "crl.microsoft.com/ca.crt",
            "ldap://crl.microsoft.com/ca.crt",
            "https://crl.microsoft.com/ca.crt",
            "http://crl.microsoft.com:81/ca.crt",
            "http://user@crl.microsoft.com/ca.crt",
            "http://crl.microsoft.com.example/ca.crt",
            "http://crl.microsoft.com@10.0.0.1/ca.crt",
            "http://example/crl.microsoft.com/ca.crt",
            "http://example?.pki.core.windows.net/ca.crt",
            "http://example#.pki.core.windows.net/ca.crt",
            "http://example\\.pki.core.windows.net/ca.crt",
            "http://x@y.pki.core.windows.net/ca.crt",
            "http://pki.core.windows.net.example/ca.crt",
            "http://examplepki.core.windows.net/ca.crt",
            "http://example.windows.net/ca.crt",
            "http://example.microsoft.com/ca.crt",
            "http://169.254.169.254/metadata/identity/oauth2/token",
            "http://168.63.129.16/machine?comp=goalstate",
            "http://[fd00::1]/ca.crt",
            "http://localhost/ca.crt",
        ] {
            assert!(!is_of_microsoft(other), "{other}");
        }
    }
}
