//! Code for the machines of one vendor: a folder for each vendor, a file for each variant.

pub mod aws;
pub mod azure;
pub mod google;
pub mod qemu;
