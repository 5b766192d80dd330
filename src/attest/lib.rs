//! Remote attestation: [`tpm`] speaks to the TPM, [`attestation`] makes documents and holds them against a policy, [`atls`] has
//! them in the certificates of TLS.

pub mod atls;
pub mod attestation;
pub mod tpm;
