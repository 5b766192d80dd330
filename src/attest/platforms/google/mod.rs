//! The variants of Google Compute Engine.

pub mod gcp_sev_es;
pub mod gcp_sev_snp;
pub mod gcp_tdx;
