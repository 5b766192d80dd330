//! Evidence of confidential hardware: reports and quotes of AMD SEV-SNP and Intel TDX, the certificates that sign them, and what
//! an operator can demand of them. Everything takes bytes and a time and returns values. The crate `tee` reads the evidence of this machine
//! from its kernel.

pub mod json;
mod list;
pub mod snp;
pub mod tdx;

pub use tee::claims::{self, PlatformClaims};

use base::text::{hex, unhex};
