//! The facts that the evidence of a platform proves about a machine, in terms that its operator
//! knows.

use serde::Serialize;

/// The proven facts about a machine besides the values of its registers. Validators return it,
/// policies judge it, `firstlight verify` and the audit records show it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlatformClaims {
    /// What protects the machine, and the product: `AMD SEV-SNP (Milan)`.
    pub technology: String,
    /// Who signed the evidence, down from the root: `ARK-Milan, SEV-Milan, SEV-VCEK`.
    pub signed_by: String,
    /// The chip or the instance, in lower-case hexadecimal or as the cloud writes it; `None` if the
    /// evidence masks it.
    pub chip: Option<String>,
    /// The version of each part of the trusted computing base, with the minimum in the policy.
    pub tcb: Vec<TcbPart>,
    /// The other properties by name, in the order in which they are shown: policy bits, launch
    /// measurement.
    pub properties: Vec<Property>,
    /// Which values are bound to each other: `attestation key: REPORT_DATA`.
    pub bound: Vec<String>,
}

/// The version of a part of the trusted computing base.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TcbPart {
    /// The name as in the policy.
    pub name: &'static str,
    /// The version of the machine.
    pub got: u64,
    /// The minimum in the policy.
    pub minimum: u64,
}

/// A property of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Property {
    /// The name that the vendor uses.
    pub name: &'static str,
    /// The value.
    pub value: String,
}
