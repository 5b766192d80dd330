//! AMD SEV-SNP: the report that the firmware of a chip signs about a guest, and the certificates
//! that lead from the chip to AMD.
//!
//! In the order of a judgement: [`report`] and [`certificate_table`] read what the machine sends,
//! [`certificate`] and [`chain`] verify who signed it, [`tcb`] compares versions, [`requirements`]
//! has what the operator requires. [`verify`] does all of it.
//!
//! Structures: AMD 56860 "SEV Secure Nested Paging Firmware ABI" and 57230 "VCEK Certificate and
//! KDS Interface".

pub mod certificate;
pub mod chain;
pub mod report;
pub mod requirements;
pub mod tcb;

use rustls_pki_types::UnixTime;
pub use tee::certificate_table;

use crate::PlatformClaims;
use crate::refusal::{Kind, Refusal};
use certificate::ChipCertificate;
use chain::Chain;
use report::{Report, ReportSigner};
use requirements::SnpRequirements;
use tcb::Product;

/// Returns what a report proves, if its chip's certificate leads to AMD and the report meets the
/// requirements. The caller checks [`Report::report_data`], and adds the name of the root to the
/// signers.
pub fn verify(
    report: &Report,
    chain: &Chain<'_>,
    requirements: &SnpRequirements,
    now: UnixTime,
) -> Result<PlatformClaims, Refusal> {
    let certificate = chain.verify(report.signer()?, now)?;
    certificate.verify_signature(report)?;
    let product = product(report, &certificate)?;
    check_chip(report, &certificate, product)?;
    let tcbs = report.tcbs(product)?;
    if tcbs.reported != certificate.tcb {
        let text = format!(
            "the report has the TCB {}, but the certificate of its chip is for {}",
            tcbs.reported, certificate.tcb
        );
        let refusal = Kind::Binding.because(text).of("REPORTED_TCB");
        return Err(refusal.values(certificate.tcb, tcbs.reported));
    }
    let (chip, cloud) = (certificate.chip.as_deref(), certificate.csp.as_deref());
    let minimum = requirements.check(report, chip, cloud, product, &tcbs)?;
    Ok(claims(report, &certificate, product, &tcbs, minimum))
}

/// Checks the content of a report against the requirements, before the certificate of its chip
/// (VCEK) is available. Nothing in the report is verified. A program that fetches the certificate
/// for a stranger calls this first: then no report causes a request if it would be refused anyway.
pub fn check_claims(
    report: &Report,
    product: Product,
    requirements: &SnpRequirements,
) -> Result<(), Refusal> {
    let tcbs = report.tcbs(product)?;
    let chip = report.chip(product)?;
    requirements
        .check(report, Some(chip), None, product, &tcbs)
        .map(drop)
}

/// Returns the product. The report names it since version 3 and must agree with the certificate.
fn product(report: &Report, certificate: &ChipCertificate) -> Result<Product, Refusal> {
    let Some(cpuid) = report.cpuid else {
        return Ok(certificate.product);
    };
    match Product::of(cpuid)? {
        product if product == certificate.product => Ok(product),
        product => Err(Kind::Binding.because(format!(
            "the report is of a {product}, but the certificate of its chip is of a {}",
            certificate.product
        ))),
    }
}

/// Checks that the certificate belongs to the chip in the report. A VLEK belongs to no chip.
fn check_chip(
    report: &Report,
    certificate: &ChipCertificate,
    product: Product,
) -> Result<(), Refusal> {
    let masked = report.chip_id == [0; 64];
    let Some(chip) = &certificate.chip else {
        return if masked {
            Ok(())
        } else {
            let text = "a report signed by a VLEK must not name a chip (CHIP_ID)";
            Err(Kind::Binding.because(text).of("CHIP_ID"))
        };
    };
    let is_same = report.chip(product).is_ok_and(|named| named == chip);
    if is_same || masked {
        Ok(())
    } else {
        let text = "the certificate is of another chip than the report";
        let refusal = Kind::Binding.because(text).of("CHIP_ID");
        Err(refusal.values(crate::hex(chip), crate::hex(&report.chip_id)))
    }
}

fn claims(
    report: &Report,
    certificate: &ChipCertificate,
    product: Product,
    tcbs: &tcb::Tcbs,
    minimum: tcb::Tcb,
) -> PlatformClaims {
    let (authority, signer) = match certificate.signer {
        ReportSigner::Vcek => (format!("SEV-{product}"), "SEV-VCEK"),
        ReportSigner::Vlek => (format!("SEV-VLEK-{product}"), "SEV-VLEK"),
    };
    let mut properties = vec![
        ("MEASUREMENT", crate::hex(&report.measurement)),
        ("POLICY", report.policy.to_string()),
        ("PLATFORM_INFO", report.platform_info()),
        ("VMPL", report.vmpl.to_string()),
        ("GUEST_SVN", report.guest_svn.to_string()),
        ("FAMILY_ID", crate::hex(&report.family_id)),
        ("IMAGE_ID", crate::hex(&report.image_id)),
        ("HOST_DATA", crate::hex(&report.host_data)),
        ("ID_KEY_DIGEST", crate::hex(&report.id_key_digest)),
        ("AUTHOR_KEY_DIGEST", crate::hex(&report.author_key_digest)),
        ("CURRENT_TCB", tcbs.current.to_string()),
        ("COMMITTED_TCB", tcbs.committed.to_string()),
        ("LAUNCH_TCB", tcbs.launch.to_string()),
        ("firmware", report.current_firmware.to_string()),
        ("committed firmware", report.committed_firmware.to_string()),
        ("report version", report.version.to_string()),
    ];
    if let Some(mitigations) = report.mitigations {
        properties.push(("LAUNCH_MIT_VECTOR", format!("{:#x}", mitigations.launch)));
        properties.push(("CURRENT_MIT_VECTOR", format!("{:#x}", mitigations.current)));
    }
    if let Some(csp) = &certificate.csp {
        properties.push(("CSP_ID", csp.clone()));
    }
    // a VCEK certificate names the chip even if the report masks it
    let chip = certificate.chip.as_deref().map(crate::hex);
    PlatformClaims {
        technology: format!("AMD SEV-SNP ({product})"),
        signed_by: format!("{authority}, {signer}"),
        chip,
        tcb: tcbs.reported.parts(product, &minimum),
        properties: properties
            .into_iter()
            .map(|(name, value)| crate::claims::Property { name, value })
            .collect(),
        bound: vec![],
    }
}
