//! Evidence of confidential hardware: reports and quotes of AMD SEV-SNP and Intel TDX, the
//! certificates that sign them, and the requirements that an operator can have for them. All
//! functions take bytes and a time, and return values. The crate `tee` gets the evidence of this
//! machine from its kernel.

pub mod claims;
pub mod json;
mod list;
mod unavailable;

pub mod snp;
pub mod tdx;

pub use claims::PlatformClaims;
pub use refusal::{self, Refusal};
pub use unavailable::{Cause, Unavailable};

use base::text::{hex, unhex};
