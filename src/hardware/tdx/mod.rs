//! Intel TDX: the content of a quote, its signers, and the requirements that an operator can have
//! for it.
//!
//! `quote` parses quotes; `dcap` verifies them with Intel's collateral and `certificate`s, and
//! `tcb` judges the platform with the collateral; `requirements` has what a policy requires besides
//! the registers.

mod certificate;
pub mod dcap;
pub mod quote;
pub mod requirements;
pub mod tcb;

pub use dcap::{TdxCollateral, Verified, Verifier};
pub use quote::TdxQuote;
pub use requirements::TdxRequirements;
