//! The table of attestation variants, with the functions of the attester. The crate `verifier` has
//! the same table with the validators.

use std::fmt;

use super::{
    AttesterVariant, aws_nitro_tpm, aws_sev_snp, azure_sev_snp, azure_tdx, azure_trustedlaunch,
    gcp_sev_es, gcp_sev_snp, gcp_tdx, qemu_snp, qemu_tdx, qemu_vtpm,
};

/// All variants. To add one:
///
/// 1. write its file in the folder of its vendor in `platforms`, and name it as a module there and in
///    `lib.rs`; write its validator in a file of the same name in `src/verifier/platforms`;
/// 2. add its constant here, and in the table of `src/verifier/variant.rs`;
/// 3. add its name to `charts/firstlight/values.schema.json` (`tests/tables.rs` compares);
/// 4. add it to the table of options in `docs/images/settings.md`, write its page in `docs/platforms`, and
///    name that in `docs/attestation.md` and `docs/SUMMARY.md`.
///
/// A variant whose evidence is not a TPM quote also needs a field in `document.rs`, and its requirements in
/// `src/verifier/policy`.
pub const ALL: &[AttesterVariant] = &[
    qemu_vtpm::VARIANT,
    qemu_tdx::VARIANT,
    qemu_snp::VARIANT,
    azure_trustedlaunch::VARIANT,
    gcp_sev_es::VARIANT,
    aws_nitro_tpm::VARIANT,
    azure_tdx::VARIANT,
    azure_sev_snp::VARIANT,
    aws_sev_snp::VARIANT,
    gcp_sev_snp::VARIANT,
    gcp_tdx::VARIANT,
];

/// The names of [`ALL`].
pub const NAMES: [&str; ALL.len()] = base::names!(ALL);

/// The name of the variant that a program uses if its command line names none.
pub const DEFAULT: &str = qemu_vtpm::VARIANT.name;

/// No variant has this name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownVariant(pub String);

impl AttesterVariant {
    /// Returns the variant with this name.
    pub fn named(name: &str) -> Result<&'static AttesterVariant, UnknownVariant> {
        ALL.iter()
            .find(|variant| variant.name == name)
            .ok_or_else(|| UnknownVariant(name.to_owned()))
    }
}

impl fmt::Display for UnknownVariant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, supported) = (&self.0, NAMES.join(", "));
        write!(
            f,
            "the attestation variant {name:?} is not supported; supported: {supported}"
        )
    }
}

impl std::error::Error for UnknownVariant {}
