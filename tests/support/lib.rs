//! What tests need that our own crates do not have: a software TPM, a cloud's metadata service, programs that run, hostile inputs.

pub mod cut_off;
pub mod metadata;
pub mod mutation;
pub mod openssl;
pub mod program;
pub mod swtpm;

/// The project's folder.
pub const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
