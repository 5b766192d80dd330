//! The variant `gcp-sev-es`: a shielded VM of Google Compute Engine with AMD SEV. Google certifies
//! the attestation key of the virtual TPM, and the certificate names the instance. `attest`
//! describes its document.
//!
//! The certificate contains the URL of its issuer. A verifier fetches an issuer that is not built
//! in from that URL: Google replaces its issuers from time to time. No list of revoked certificates
//! is consulted: the certificates of attestation keys have no URL of one.

use std::sync::Arc;

use attest::document::Document;
pub use attest::gcp_sev_es::*;
use base::der::{self, context};
use base::x509::Certificate;
use proto::attested::Collateral;
use webpki::KeyUsage;

use crate::ak_certificate::{self, AkRoot};
use crate::event_log::{self, EV_NO_ACTION, LogEntry};
use crate::instance::{CloudInstance, CloudRequirements};
use crate::judged::{CLOUD, FLOORS, KEYS, OF_GOOGLE};
use crate::refusal::{Kind, Refusal};
use crate::sources::Sources;
use crate::vtpm::{self, PlatformVerifier, Quoted};
use crate::{Oid, PlatformClaims, Policy, PolicyError, Variant, sha256};

/// The variant's line in the table.
pub const VARIANT: Variant = Variant {
    attester: &attest::gcp_sev_es::VARIANT,
    judges: &[KEYS, FLOORS, CLOUD, OF_GOOGLE],
    key: Some(KEY),
    launch: None,
    validator: |policy, sources| Ok(Arc::new(validator(Arc::new(policy), sources)?)),
    collateral: Some(collateral),
    measure: vtpm::measure,
};

/// Google's older certificates of attestation keys have the usage of endorsement keys,
/// 2.23.133.8.1; newer ones have no extended key usage.
const ENDORSEMENT_KEY: &[u8] = &[0x67, 0x81, 0x05, 0x08, 0x01];
/// The content of the OID of the extension with the instance, 1.3.6.1.4.1.11129.2.1.21.
const INSTANCE: &[u8] = &[0x2b, 0x06, 0x01, 0x04, 0x01, 0xd6, 0x79, 0x02, 0x01, 0x15];
/// Google's roots, with the CAs below them.
pub const ROOTS: &[&roots::Root] = &[&roots::GOOGLE_2018, &roots::GOOGLE_2022];
/// The type of the event that ends the firmware's part of a PCR, and its possible data; the last
/// one means that the firmware failed (PC Client Platform Firmware Profile, §10.4.1).
const EV_SEPARATOR: u32 = 0x4;
const SEPARATORS: [[u8; 4]; 3] = [[0; 4], [0xff; 4], [1, 0, 0, 0]];
/// Technologies with which a host encrypts the memory, as Google's firmware numbers them.
pub(crate) const TDX: u8 = 3;
pub(crate) const SEV_SNP: u8 = 4;
/// The name of Google's firmware, which precedes its decimal version, and the name of its event
/// about the host.
const FIRMWARE: &str = "GCE Virtual Firmware v";
const NONHOST_INFO: &[u8] = b"GCE NonHostInfo\0";

/// Returns the collateral for a document, or `None` if these sources do not have it.
fn collateral(document: &[u8], sources: &dyn Sources) -> Option<Collateral> {
    let key_authority = key_authority(document, sources)?;
    Some(Collateral {
        key_authority,
        ..Collateral::default()
    })
}

/// Returns the certificate of the authority that certified the attestation key of a document: its
/// machine does not send it.
pub(crate) fn key_authority(document: &[u8], sources: &dyn Sources) -> Option<Vec<u8>> {
    let document: Document = serde_json::from_slice(document).ok()?;
    sources.issuer(&document.attestation.ak_cert.0).ok()?
}

/// Makes a validator that accepts documents that meet `policy`.
fn validator(
    policy: Arc<Policy>,
    sources: &Arc<dyn Sources>,
) -> Result<vtpm::VtpmValidator, PolicyError> {
    let verifier = GoogleAuthority::new(&policy, sources)?;
    Ok(vtpm::VtpmValidator::new(policy, Arc::new(verifier)))
}

/// Judges by Google's certificates.
pub struct GoogleAuthority {
    roots: Vec<AkRoot>,
    demands: CloudRequirements,
    sources: Arc<dyn Sources>,
}

impl GoogleAuthority {
    /// Makes a judge by a policy.
    pub fn new(
        policy: &Policy,
        sources: &Arc<dyn Sources>,
    ) -> Result<GoogleAuthority, PolicyError> {
        Ok(GoogleAuthority {
            roots: AkRoot::demanded(policy.cloud(), ROOTS)?,
            demands: policy.cloud().clone(),
            sources: sources.clone(),
        })
    }

    /// Returns the root that certifies the attestation key, and the instance, which must be the one
    /// that the document names.
    pub fn certified<'a>(
        &'a self,
        quoted: &'a Quoted<'_>,
        names: &Names,
    ) -> Result<(&'a str, CloudInstance), Refusal> {
        if quoted.key_certificate.is_empty() {
            return Err(Kind::Unproven.because(format!(
                "the document has no certificate of the attestation key (ak_cert): machines have it at the NV index {CERTIFICATE_INDEX:#x}"
            )));
        }
        let certificate = quoted.key_certificate;
        let fields = ak_certificate::of_key(certificate, &quoted.spki)?;
        let verify = |chain: &[Vec<u8>]| {
            ak_certificate::verify(certificate, chain, &self.roots, usage(), quoted.now)
        };
        let demanded = |certificate: &Certificate<'_>| -> Result<CloudInstance, Refusal> {
            let instance = instance(certificate)?;
            check_named(&instance, names)?;
            self.demands.judge(&instance)?;
            Ok(instance)
        };
        // another issuer's certificate may help: a CA can have several keys under one name
        let root = verify(&[]).or_else(|refused| {
            // anybody can make such a certificate: send no request for one that is refused anyway
            if let Err(other) = demanded(&fields) {
                return Err(refused.reworded(|why| format!("{why}; besides, {other}")));
            }
            match self.sources.issuer(certificate) {
                Ok(None) => Err(refused),
                Ok(Some(issuer)) => {
                    let verified = verify(&[issuer])?;
                    self.sources.keep_issuer(certificate);
                    Ok(verified)
                }
                Err(missing) => Err(refused.reworded(|why| format!("{why}; {missing}"))),
            }
        })?;
        Ok((root, demanded(&fields)?))
    }
}

impl PlatformVerifier for GoogleAuthority {
    fn oid(&self) -> Oid {
        OID
    }

    // Google certifies only keys in its own TPMs
    fn endorses_keys(&self) -> bool {
        true
    }

    fn verify(&self, quoted: &Quoted<'_>) -> Result<Option<PlatformClaims>, Refusal> {
        let names: Names = quoted.info()?;
        let (root, instance) = self.certified(quoted, &names)?;
        let firmware = GoogleFirmware::measured(quoted.event_log, quoted.pcr_0()?)?;
        firmware.check()?;
        let mut properties = instance.properties();
        properties.push(hardware::claims::Property {
            name: "firmware",
            value: format!("{FIRMWARE}{}", firmware.version),
        });
        Ok(Some(PlatformClaims {
            technology: format!("Google shielded VM with {}", firmware.technology()),
            signed_by: root.into(),
            chip: instance.id,
            tcb: vec![],
            properties,
            bound: vec!["attestation key: its certificate".into()],
        }))
    }
}

/// Returns the extended key usage that Google's certificate may have.
pub fn usage() -> KeyUsage {
    KeyUsage::required_if_present(ENDORSEMENT_KEY)
}

/// Returns the instance that a certificate contains.
pub fn instance(certificate: &Certificate<'_>) -> Result<CloudInstance, Refusal> {
    let wrong = |why| Kind::Certificate.because(why);
    let extension = certificate
        .extension(INSTANCE)
        .ok_or_else(|| wrong("the certificate of the attestation key names no instance"))?;
    let (instance, is_production) = read_instance(extension).map_err(|_| {
        wrong("the instance in the certificate of the attestation key cannot be read")
    })?;
    if is_production {
        Ok(instance)
    } else {
        Err(wrong(
            "the certificate of the attestation key is not of Google's production",
        ))
    }
}

/// Reads zone, project number, project ID, instance ID, instance name, and the security properties,
/// of which \[1\] says whether the certificate is from production. Further properties may follow.
fn read_instance(extension: &[u8]) -> Result<(CloudInstance, bool), der::Malformed> {
    let mut outer = der::DerReader::new(extension);
    let mut fields = der::DerReader::new(outer.expect(der::SEQUENCE)?);
    outer.end()?;
    let zone = text(&mut fields)?;
    let project_number = number(&mut fields)?;
    let project = text(&mut fields)?;
    let id = number(&mut fields)?;
    let name = text(&mut fields)?;
    let properties = fields.expect(context(0))?;
    fields.end()?;
    let mut properties =
        der::DerReader::new(der::DerReader::new(properties).expect(der::SEQUENCE)?);
    let mut is_production = false;
    while !properties.is_empty() {
        if let (tag, value) = properties.read()?
            && tag == context(1)
        {
            is_production = der::DerReader::new(value).expect(der::BOOLEAN)? == [0xff];
        }
    }
    let instance = CloudInstance {
        id: Some(id),
        project: Some((project, project_number)),
        zone: Some(zone),
        name: Some(name),
        ..CloudInstance::default()
    };
    Ok((instance, is_production))
}

fn text(fields: &mut der::DerReader<'_>) -> Result<String, der::Malformed> {
    let bytes = fields.expect(der::UTF8_STRING)?;
    String::from_utf8(bytes.to_vec()).map_err(|_| der::Malformed)
}

/// Reads an INTEGER of at most 64 bits that is not negative.
fn number(fields: &mut der::DerReader<'_>) -> Result<String, der::Malformed> {
    let bytes = fields.expect(der::INTEGER)?;
    let digits = bytes.strip_prefix(&[0]).unwrap_or(bytes);
    if bytes.is_empty() || bytes[0] >= 0x80 || digits.len() > 8 {
        return Err(der::Malformed);
    }
    let value = digits
        .iter()
        .fold(0, |value, byte| value << 8 | u64::from(*byte));
    Ok(value.to_string())
}

/// Checks that the document names the same instance as the certificate, because other code uses the
/// document's names.
fn check_named(instance: &CloudInstance, info: &Names) -> Result<(), Refusal> {
    let project = instance.project.as_ref().map(|(name, _)| name);
    let is_same = instance.zone.as_ref() == Some(&info.zone)
        && project == Some(&info.project_id)
        && instance.name.as_ref() == Some(&info.instance_name);
    if is_same {
        Ok(())
    } else {
        Err(Kind::Binding.because(
            "the document names another instance than the certificate of its attestation key",
        ))
    }
}

/// What Google's firmware measures into PCR 0 about itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GoogleFirmware {
    /// The version.
    pub version: u32,
    /// The technology with which the host encrypts the memory: 0 none, 1 SEV, 2 SEV-ES, 3 TDX, 4
    /// SEV-SNP.
    pub technology: u8,
}

impl GoogleFirmware {
    /// Returns what the events before the separator contain, if a replay of the log gives this
    /// value of PCR 0.
    ///
    /// The types of events are not measured. So each event is recognized by its data, whose hash
    /// must be the event's digest.
    pub fn measured(log: &[u8], pcr_0: &[u8]) -> Result<GoogleFirmware, Refusal> {
        let unproven = |why| Kind::Unproven.because(why).of("PCR 0");
        let events = event_log::replayed(log, 0, pcr_0).ok_or_else(|| unproven(
            "the event log does not explain PCR 0, so it is unknown how the host encrypts the memory",
        ))?;
        let own = before_separator(&events)?;
        let only = |start: &[u8]| {
            let mut found = own.iter().filter_map(|data| data.strip_prefix(start));
            found.next().filter(|_| found.next().is_none())
        };
        let version = only(&utf_16(FIRMWARE)).and_then(version);
        let technology = only(NONHOST_INFO).and_then(technology);
        Ok(GoogleFirmware {
            version: version.ok_or_else(|| unproven("PCR 0 is not that of Google's firmware"))?,
            technology: technology
                .ok_or_else(|| unproven("PCR 0 does not show how the host encrypts the memory"))?,
        })
    }

    fn check(&self) -> Result<(), Refusal> {
        match self {
            GoogleFirmware { version: 0, .. } => {
                Err(Kind::Outdated.because("the firmware is older than version 1"))
            }
            GoogleFirmware {
                technology: 1 | 2, ..
            } => Ok(()),
            _ => Err(Kind::Protection.because(format!(
                "the host encrypts the memory with {}, expected SEV or SEV-ES",
                self.technology()
            ))),
        }
    }

    /// Checks that the host encrypts the memory with this technology.
    pub(crate) fn check_technology(&self, expected: u8) -> Result<(), Refusal> {
        if self.technology == expected {
            return Ok(());
        }
        let text = format!(
            "the host of the TPM encrypts the memory with {}, expected {}",
            self.technology(),
            technology_name(expected)
        );
        Err(Kind::Protection.because(text))
    }

    fn technology(&self) -> String {
        technology_name(self.technology)
    }
}

/// Returns the name of the technology with this number.
fn technology_name(technology: u8) -> String {
    match technology {
        0 => "nothing".into(),
        1 => "AMD SEV".into(),
        2 => "AMD SEV-ES".into(),
        TDX => "Intel TDX".into(),
        SEV_SNP => "AMD SEV-SNP".into(),
        other => format!("technology {other}"),
    }
}

/// Returns the data of the events of PCR 0 before the separator, if its hash is the event's digest.
/// Software can extend PCR 0 only after the separator, but could change the separator's type in the
/// log.
fn before_separator<'a>(events: &[LogEntry<'a>]) -> Result<Vec<&'a [u8]>, Refusal> {
    let separators = SEPARATORS.map(|data| sha256(&[&data]));
    let mut own = vec![];
    for event in events.iter().filter(|event| event.kind != EV_NO_ACTION) {
        let is_separator = event.sha256.is_some_and(|it| separators.contains(it));
        match (is_separator, event.kind == EV_SEPARATOR) {
            (true, true) => return Ok(own),
            (false, false) => {}
            _ => {
                return Err(Kind::Binding.because(format!(
                    "the event log gives an event of PCR 0 another type than its digest: expected {EV_SEPARATOR} (EV_SEPARATOR) with \
                     the digest of a separator, got type {}",
                    event.kind
                )));
            }
        }
        if event.sha256 == Some(&sha256(&[event.data])) {
            own.push(event.data);
        }
    }
    Err(Kind::Unproven
        .because("PCR 0 has no separator, so the end of the firmware's part is unknown"))
}

fn utf_16(text: &str) -> Vec<u8> {
    text.encode_utf16().flat_map(u16::to_le_bytes).collect()
}

/// Reads the version after [`FIRMWARE`]: UTF-16 digits with a terminating zero.
fn version(rest: &[u8]) -> Option<u32> {
    let (units, []) = rest.as_chunks::<2>() else {
        return None;
    };
    let units: Vec<u16> = units.iter().map(|unit| u16::from_le_bytes(*unit)).collect();
    let version = String::from_utf16(units.strip_suffix(&[0])?).ok()?;
    version
        .parse()
        .ok()
        .filter(|number: &u32| number.to_string() == version)
}

/// Reads the technology after [`NONHOST_INFO`]; 15 reserved bytes follow.
fn technology(rest: &[u8]) -> Option<u8> {
    rest.first().copied().filter(|_| rest.len() == 16)
}
