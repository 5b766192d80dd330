//! What the evidence of a platform proves about a machine, in the terms of its operator.

use std::fmt;

use serde::Serialize;

/// What is proved about a machine beside the values of its registers. Validators return it, policies judge it, `firstlight verify`
/// and the audit records show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlatformClaims {
    /// What protects the machine, and the product: `AMD SEV-SNP (Milan)`.
    pub technology: String,
    /// Who signed the evidence, down from the root: `ARK-Milan, SEV-Milan, SEV-VCEK`.
    pub signed_by: String,
    /// The chip or the instance in lower-case hexadecimal or in the cloud's words; absent if the evidence masks it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chip: Option<String>,
    /// The version of each part of the trusted computing base, against the minimum of the policy.
    pub tcb: Vec<TcbPart>,
    /// The other properties by name, in the order in which they are shown: policy bits, launch measurement.
    pub properties: Vec<Property>,
    /// What is bound to what: `attestation key: REPORT_DATA`.
    pub bound: Vec<String>,
}

/// The version of a part of the trusted computing base.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TcbPart {
    /// The name as in the policy.
    pub name: &'static str,
    /// The version of the machine.
    pub got: u64,
    /// The minimum of the policy.
    pub minimum: u64,
}

/// A property of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Property {
    /// The name in the words of the vendor.
    pub name: &'static str,
    /// The value.
    pub value: String,
}

impl fmt::Display for PlatformClaims {
    /// Writes one line: the technology, the chip, the versions.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.technology)?;
        if let Some(chip) = &self.chip {
            write!(f, ", chip {chip:.16}")?;
        }
        for part in &self.tcb {
            write!(f, ", {} {} (minimum {})", part.name, part.got, part.minimum)?;
        }
        Ok(())
    }
}
