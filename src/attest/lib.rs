//! Attestation: documents that prove to a peer what software a machine runs.
//!
//! An [`Issuer`] makes a document on the machine itself. [`Judge`] is the interface of the
//! verifier, which the crate `verifier` implements. Attested TLS (the crate `atls`) transports a document in a
//! certificate extension whose OID names the variant.
//!
//! Files: [`variant`] is the table of variants; the folder `platforms` has a folder for each vendor,
//! with a file for each variant; [`vtpm`] is common to the variants with a TPM; [`prepared`] caches
//! what a machine sends; [`session`] binds a document to one connection, and [`wire`] has its
//! messages; `key_name` is the Name of an attestation key, and [`spki`] its form in certificates;
//! [`td`] reads the registers of a machine without a TPM; [`document`] is the JSON document; [`hcl`] is the report of Azure's
//! paravisor; [`event_log`] parses an event log, and [`excerpt`] shortens it; [`systemd_log`] reads
//! what systemd has measured; [`cbor`] reads the documents of AWS's hypervisor.

pub mod cbor;
mod cluster_id;
pub mod document;
pub mod event_log;
pub mod excerpt;
mod hash;
mod issuer;
mod judge;
mod key_name;
mod platforms;
pub mod registers;
pub mod session;
pub mod snp;
pub mod spki;
pub mod systemd_log;
pub mod td;
pub mod variant;
pub mod vtpm;
pub mod wire;

use base::text::{hex, printable};
pub use cluster_id::{cluster_register, foreign_writer, mark};
pub use hash::{sha256, unhex};
pub use issuer::{AttesterVariant, IssueError, Issuer};
pub use judge::{Accepted, ConnectionJudge, Form, Judge, MAX_COLLATERAL, Presented, Refused};
pub use key_name::KeyName;
pub use platforms::aws::{aws_hypervisor, aws_nitro_tpm, aws_sev_snp, nsm};
pub use platforms::azure::{azure_sev_snp, azure_tdx, azure_trustedlaunch, hcl, prepared};
pub use platforms::google::{gcp_sev_es, gcp_sev_snp, gcp_tdx};
pub use platforms::qemu::{qemu_snp, qemu_tdx, qemu_vtpm};
pub use registers::{ClusterRegister, Registers};
pub use session::{DocumentRequest, MachineIdentity, PeerRole};

/// The OID of an attestation variant in a certificate: DER with tag and length, e.g. `06 05 2b cd
/// 2c 05 01`.
pub type Oid = &'static [u8];
