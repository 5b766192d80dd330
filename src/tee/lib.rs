//! Evidence from the confidential hardware of this machine (a trusted execution environment, TEE):
//! reports of AMD SEV-SNP and quotes of Intel TDX, as the kernel returns them. Nothing here
//! verifies evidence: the crate `hardware` does. [`collateral`] is Intel's published data about a
//! platform; a machine can send it with its quote.

pub mod certificate_table;
pub mod collateral;
mod error;
pub mod snp;
pub mod tdx;
pub mod tsm;

pub use error::Error;

use base::text::{hex, unhex};
