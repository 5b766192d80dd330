//! Remote attestation: [`attestation`] makes documents and validates them against a policy, [`atls`]
//! transports them in TLS certificates.

pub mod atls;
pub mod attestation;
