//! Proves that the attestation key of a peer is in a TPM of a known vendor: the verifier's side of
//! TPM2_MakeCredential and TPM2_ActivateCredential (TPM 2.0 part 1 §24). Only verifiers link this
//! crate; the programs of a node do not.
//!
//! ```text
//! peer: attestation key, certificates of its endorsement keys     what the verifier accepts
//!   attestation_key   is it restricted to structures of a TPM?    its Name
//!   certificate, path does a root of the policy certify it?       the endorsement key
//!   model             which TPM does the certificate name?        vendor and model
//!   credential        a secret, encrypted for both                who knows it has both keys in one TPM
//! ```
//!
//! [`validator`] combines the three; [`roots`] are the vendors' roots that a policy can name.

pub mod attestation_key;
pub mod certificate;
pub mod credential;
pub mod model;
mod name;
mod path;
pub mod roots;
mod validator;

pub use validator::{certifying, validator};
