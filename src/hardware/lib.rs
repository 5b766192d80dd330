//! Evidence of confidential hardware: reports and quotes of AMD SEV-SNP and Intel TDX, the certificates that sign them, and what
//! an operator can demand of them. Everything takes bytes and a time and returns values; only the files named `guest.rs` talk to
//! the kernel of a confidential machine.

pub mod claims;
pub mod json;
mod list;
pub mod snp;
pub mod tdx;
pub mod tsm;

pub use claims::PlatformClaims;

use base::text::{hex, unhex};
