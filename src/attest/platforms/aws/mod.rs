//! The variants of AWS.

pub mod aws_hypervisor;
pub mod aws_nitro_tpm;
pub mod aws_sev_snp;
pub mod nsm;
