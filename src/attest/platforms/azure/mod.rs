//! The variants of Azure.

pub mod azure_sev_snp;
pub mod azure_tdx;
pub mod azure_trustedlaunch;
pub mod hcl;
pub mod prepared;
