//! The state disk: [`luks`] is the LUKS2 header, [`device_mapper`] the kernel's mapping, [`state_disk`] what a node keeps on it.

pub mod device_mapper;
pub mod luks;
pub mod state_disk;
