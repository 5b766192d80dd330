//! The verifier (RFC 9334): judges the evidence of other machines. A policy has the reference
//! values; a variant's validator compares a machine's evidence with them and checks the signatures.
//! The crate `attest` makes evidence and transports it. Programs that only prove themselves do not
//! link this crate: `unlock` does not (`tools/check-deps.sh`).
//!
//! This crate re-exports the names of [`attest`], because validators use the types for evidence.
//!
//! Files: `validator.rs` has what a variant's validator implements, and `judge.rs` builds the judge
//! for attested TLS from validators; [`variant`] is the table of variants; the folder `platforms` has a folder for each vendor,
//! with a file for each variant; [`vtpm`], [`td`] and [`snp`] are common to several of them;
//! [`policy`] has what an operator requires: register values and keys, the requirements for clouds and
//! hardware, and the names that a policy may contain; [`sources`] gets collateral, and [`carried`] has
//! the collateral that a peer sends; `register_names.rs` has the registers' names in messages; [`stage`] distinguishes an initramfs from a booted system;
//! [`quote`] verifies what a TPM signed with a [`key`]; [`maa`] reads the tokens of Microsoft's attestation service;
//! [`event_log`] and [`phases`] explain the value of a register to a person, and [`secure_boot`] reads from the log what PCR 7 shows.

pub mod ak_certificate;
pub mod carried;
pub mod event_log;
mod json;
mod judge;
pub mod judged;
pub mod maa;
pub mod phases;
mod platforms;
pub mod policy;
pub mod quote;
mod register_names;
pub mod snp;
pub mod sources;
pub mod stage;
pub mod td;
mod validator;
pub mod variant;
pub mod vtpm;
pub mod worth;

pub use attest::*;
pub use base::boot::stage::Stage;
pub use event_log::secure_boot;
pub use hardware::claims::{PlatformClaims, Property, TcbPart};
pub use hardware::{Refusal, claims, refusal};
pub use judge::{
    OTHER_VARIANT, judge, judge_of_any, refusal as refusal_of, role_of, self_signed, wire,
};
pub use judged::{Measured, Variant};
pub use platforms::aws::{aws_hypervisor, aws_nitro_tpm, aws_sev_snp, nitro_document};
pub use platforms::azure::{azure_sev_snp, azure_tdx, azure_trustedlaunch, hcl};
pub use platforms::google::{gcp_sev_es, gcp_sev_snp, gcp_tdx};
pub use platforms::qemu::{qemu_snp, qemu_tdx, qemu_vtpm};
pub use policy::{Exception, Image, Measurement, Policy, PolicyError};
pub use policy::{constellation, instance};
pub use quote::key;
pub use register_names::{NamedRegister, RegisterNames};
pub use validator::{
    CertifiedKey, Changing, Claims, CredentialChallenge, Evidence, Identified, Properties, Session,
    Validator,
};

use base::text::{hex, printable};
