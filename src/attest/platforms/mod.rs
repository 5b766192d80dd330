//! What only the machines of one vendor have: a folder for each vendor, a file for each variant.

pub mod aws;
pub mod azure;
pub mod google;
pub mod qemu;
