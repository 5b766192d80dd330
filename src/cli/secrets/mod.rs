//! The master secret and its shares, hashes and certificates that come from it.

pub(crate) mod hash_secret;
pub(crate) mod share;
pub(crate) mod ssh;
pub(crate) mod wrap;
