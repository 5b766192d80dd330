//! What a machine proves (RFC 9334: the attester): [`attestation`] makes documents, [`atls`] transports them in TLS certificates. A program that
//! judges documents gives attested TLS a validator of the crate `verifier`.

pub mod atls;
pub mod attestation;
