//! The verifier (RFC 9334): judges the evidence of other machines. A policy has the reference
//! values; a variant's validator compares a machine's evidence with them and checks the signatures.
//! The crate `attest` makes evidence and transports it. Programs that only prove themselves do not
//! link this crate: `unlock` does not (`tools/check-deps.sh`).
//!
//! This crate re-exports the names of [`attest`], because validators use the types for evidence.
//!
//! Files: [`variant`] is the table of variants; [`qemu_vtpm`] and [`qemu_tdx`] are two of them;
//! [`vtpm`], [`td`] and [`snp`] are common to several of them; [`policy`] defines which register
//! values and keys are accepted, `policy_error` why a policy is invalid, and `words` which names it may
//! contain; [`sources`] gets
//! collateral, and [`carried`] has the collateral that a peer sends; [`stage`] distinguishes an
//! initramfs from a booted system; [`quote`] verifies what a TPM signed; [`hcl`] reads the
//! paravisor's statements about an Azure machine, and [`maa`] the tokens of Microsoft's attestation
//! service; [`event_log`] and [`phases`] explain the value of a register to a person.

pub mod ak_certificate;
pub mod aws_hypervisor;
pub mod aws_nitro_tpm;
pub mod aws_sev_snp;
pub mod azure_sev_snp;
pub mod azure_tdx;
pub mod azure_trustedlaunch;
pub mod carried;
pub mod event_log;
pub mod gcp_sev_es;
pub mod gcp_sev_snp;
pub mod hcl;
pub mod instance;
pub mod judged;
pub mod maa;
pub mod nitro_document;
pub mod old_snp;
pub mod old_tdx;
pub mod phases;
pub mod policy;
mod policy_error;
pub mod qemu_tdx;
pub mod qemu_vtpm;
pub mod quote;
pub mod self_signed;
pub mod snp;
pub mod sources;
pub mod stage;
pub mod td;
pub mod variant;
pub mod vtpm;
mod words;

pub use attest::*;
pub use judged::{Measured, Variant};
pub use policy::{Image, Measurement, Policy, PolicyError};

use base::text::{hex, printable};
