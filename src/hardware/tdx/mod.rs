//! Intel TDX: what a quote contains, who signed it, and what an operator can demand of it.
//!
//! `quote` parses quotes; `dcap` verifies them with Intel's collateral and `certificate`s, and `tcb` judges the platform by it;
//! `demands` is what a policy can demand beside the registers.

mod certificate;
pub mod dcap;
pub mod demands;
pub mod quote;
pub mod tcb;

pub use dcap::{Collateral, Verified, Verifier};
pub use demands::Demands;
pub use quote::Quote;
