//! The requirements of a fresh node with `require=strong` on a join service, in addition to its image: proof that the registers
//! come from a real machine.
//!
//! Anybody can sign register values with a self-made key. So the registers of a join service count
//! only if the key that signed them is named in `service-policy` or endorsed by a platform. A
//! platform endorses the attestation key of each of its machines. By default the node demands the
//! endorsement that its own platform gives to itself; `service-policy` can override this:
//!
//! | variant | demanded | read from |
//! |---|---|---|
//! | `aws-nitro-tpm`, `aws-sev-snp` | the SHA-384 PCRs of the image, which AWS's hypervisor signs (`cloud.sha384`) | the TPM |
//! | `azure-sev-snp` | who signed the paravisor (`snp.idKeys`) | the paravisor's report in the TPM |
//! | `azure-tdx` | the measurement of the paravisor (`tdx.mrTd`) | the same |
//! | `gcp-sev-es`, `gcp-sev-snp`, `gcp-tdx` | the project (`cloud.projects`) | the certificate of the attestation key in the TPM |
//! | `azure-trustedlaunch`, `qemu-tdx` | nothing further: Azure certifies each key, and Intel signs the registers, among them that of the firmware | |
//! | `qemu-snp` | nothing further: its image always has `cluster-id` | |
//! | `qemu-vtpm` | there is nothing, so the setting is refused | |
//!
//! With the setting `cluster-id` the node demands none of this: the ticket contains the secrets
//! from which that ID is derived ([`Ticket::cluster`](crate::trust::ticket::Ticket::cluster)), so its
//! sender has been a member of the cluster, on whatever machine.
//!
//! Only a joining node needs this. A rejoining node receives a key, and accepts it only if it opens
//! the disk and if the disk's header has a MAC under the measurement secret that came with it. An
//! operator can also send the key without any proof (`firstlight recover`).

use std::collections::BTreeMap;
use std::fmt;

use base::text::hex;
use base::x509::Certificate;
use cloud::http::GOOGLE;
use hcl::{HardwareReport, HclReport};
use tpm::{Bank, Location, Tpm};
use verifier::sources::offline;
use verifier::vtpm::VariantData;
use verifier::{
    Policy, PolicyError, Variant, aws_nitro_tpm, aws_sev_snp, azure_sev_snp, azure_tdx, gcp_sev_es,
    gcp_sev_snp, gcp_tdx, hcl,
};

use crate::trust::service_trust::{self, ServiceTrust};

/// The PCR of the boot loader, which is never zero in a bank that the firmware extends.
const BOOT_LOADER: u32 = 4;
/// The PCR that systemd extends during the boot. It is compared in the SHA-256 bank.
const PHASES: u32 = 11;
/// ID_KEY_DIGEST in a report of SEV-SNP (AMD, "SEV Secure Nested Paging Firmware ABI", table
/// "ATTESTATION_REPORT").
const ID_KEY_DIGEST: usize = 0xe0;
/// MRTD in a TDREPORT: TDINFO_STRUCT is at 512, and has ATTRIBUTES and XFAM before it (Intel, "TDX
/// Module ABI", TDREPORT_STRUCT).
const MRTD: usize = 512 + 16;
/// The length of both.
const DIGEST: usize = 48;

/// What the operator can do if a platform pins no key.
const ADVICE: &str = "set cluster-id, or name in service-policy the attestation keys of the machines with join services (attestationKeys)";

/// Returns what a fresh node with the TPM at this location demands of join services. With
/// `require=strong` it refuses evidence that any machine of the variant, or a program without a
/// TPM, could make.
pub fn demanding(mut trust: ServiceTrust, tpm: &Location) -> Result<ServiceTrust, Error> {
    if !trust.settings.require_strong || trust.settings.cluster.is_some() {
        return Ok(trust);
    }
    let (variant, images) = (trust.variant, trust.images().map_err(Error::Trust)?);
    let demanded = if images.keys().is_empty() {
        and_own(variant, tpm, images)?
    } else {
        images
    };
    if believes_any_tpm(variant, &demanded)? {
        let why = "a program without a TPM can claim the registers of this machine";
        return Err(Error::PinsNothing(variant.name, why.into()));
    } else {
        trust.demand(demanded)
    }
    Ok(trust)
}

/// Why `require=strong` cannot guarantee that a join service is a real machine.
#[derive(Debug)]
pub enum Error {
    /// This machine's image, or the setting `service-policy`, cannot be used.
    Trust(service_trust::Error),
    /// Nothing pins the key of a join service: the variant, and why.
    PinsNothing(&'static str, Unknown),
}

/// Why this machine's platform does not give a value that join services must have; a clause for people.
type Unknown = Box<dyn std::error::Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Trust(error) => error.fmt(f),
            Error::PinsNothing(variant, why) => write!(
                f,
                "the setting require=strong cannot pin the join services: with the variant {variant}, {why}; {ADVICE}"
            ),
        }
    }
}

impl std::error::Error for Error {}

impl From<PolicyError> for Error {
    fn from(error: PolicyError) -> Error {
        Error::Trust(service_trust::Error::Setting(error))
    }
}

fn believes_any_tpm(variant: &Variant, policy: &Policy) -> Result<bool, Error> {
    let validator = variant.validator_for(policy.clone(), &offline())?;
    Ok(validator.properties().believes_any_tpm)
}

/// Returns the policy with further requirements: the values that this machine's platform signs for this machine.
fn and_own(variant: &'static Variant, tpm: &Location, images: Policy) -> Result<Policy, Error> {
    let wrong = |why| Error::PinsNothing(variant.name, why);
    let cloud = images.cloud();
    let demanding = match variant.oid {
        aws_nitro_tpm::OID | aws_sev_snp::OID => {
            let pcrs = own_sha384(tpm, &images).map_err(wrong)?;
            images.with_platform(|cloud, _, _| cloud.sha384.push(pcrs))
        }
        gcp_sev_es::OID | gcp_sev_snp::OID | gcp_tdx::OID
            if cloud.projects.is_empty() && cloud.instances.is_empty() =>
        {
            let project = own_project(tpm).map_err(wrong)?;
            announce("project", &project);
            images.with_platform(|cloud, _, _| cloud.projects = vec![project])
        }
        azure_sev_snp::OID if believes_any_tpm(variant, &images)? => {
            let key = own_id_key(tpm).map_err(wrong)?;
            announce("ID key", &hex(&key));
            images.with_platform(|_, snp, _| snp.snp.id_keys = vec![key.into()])
        }
        azure_tdx::OID if believes_any_tpm(variant, &images)? => {
            let mrtd = own_mrtd(tpm).map_err(wrong)?;
            announce("MRTD", &hex(&mrtd));
            images.with_platform(|_, _, tdx| tdx.mr_td = vec![mrtd.into()])
        }
        _ => return Ok(images),
    };
    Ok(demanding?)
}

/// Describes a value of this machine that a join service must have, too.
fn announce(requirement: &str, value: &str) {
    log::info!(
        "require=strong: accepting only join services with this machine's {requirement}: {value}"
    );
}

/// Returns this machine's SHA-384 PCRs, of the registers that its own image in the policy has.
fn own_sha384(tpm: &Location, images: &Policy) -> Result<BTreeMap<u32, String>, Unknown> {
    let mut pcrs = Tpm::open(tpm)?.pcrs(Bank::Sha384)?;
    let is_zero = |value: &Vec<u8>| value.iter().all(|byte| *byte == 0);
    if pcrs.get(&BOOT_LOADER).is_none_or(is_zero) {
        return Err("the firmware extends no SHA-384 PCR of this machine".into());
    }
    // this machine's own image is the last entry
    let own = images.images().last().map(|image| image.measurements());
    pcrs.retain(|pcr, _| *pcr != PHASES && own.is_some_and(|own| own.contains_key(pcr)));
    log::info!(
        "require=strong: accepting only join services with this machine's SHA-384 PCRs {:?}",
        pcrs.keys()
    );
    Ok(pcrs.iter().map(|(pcr, value)| (*pcr, hex(value))).collect())
}

fn own_project(tpm: &Location) -> Result<String, Unknown> {
    let machine = gcp_sev_es::GoogleMachine::new(GOOGLE);
    let certificate = machine
        .key_certificate(&mut Tpm::open(tpm)?)
        .map_err(|error| error.to_string())?
        .ok_or("the TPM has no certificate of its attestation key")?;
    let certificate = Certificate::parse(&certificate)
        .map_err(|_| "the certificate of the TPM's attestation key cannot be read")?;
    let instance = gcp_sev_es::instance(&certificate)?;
    let (name, _) = instance.project.ok_or("the certificate names no project")?;
    Ok(name)
}

fn own_id_key(tpm: &Location) -> Result<[u8; DIGEST], Unknown> {
    with_report(tpm, |report| match report {
        HardwareReport::Snp(report) => digest_at(report, ID_KEY_DIGEST),
        _ => None,
    })
}

fn own_mrtd(tpm: &Location) -> Result<[u8; DIGEST], Unknown> {
    with_report(tpm, |report| match report {
        HardwareReport::Tdx(report) => digest_at(report, MRTD),
        _ => None,
    })
}

/// Returns a digest of the hardware's report that the paravisor has stored. The paravisor is a part
/// of this machine, so this value needs no signature.
fn with_report(
    tpm: &Location,
    digest: fn(&HardwareReport<'_>) -> Option<[u8; DIGEST]>,
) -> Result<[u8; DIGEST], Unknown> {
    let stored = hcl::stored(tpm).map_err(|error| error.to_string())?;
    let report = HclReport::parse(&stored)?;
    digest(&report.hardware)
        .ok_or_else(|| "the report of the paravisor does not name its firmware".into())
}

/// Returns a digest; `None` if it is absent or zero.
fn digest_at(report: &[u8], at: usize) -> Option<[u8; DIGEST]> {
    let digest = report.get(at..)?.first_chunk().copied()?;
    (digest != [0; DIGEST]).then_some(digest)
}
