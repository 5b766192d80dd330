//! The state disk: [`luks`] reads and writes the LUKS2 header, [`device_mapper`] maps the disk in
//! the kernel, [`state_disk`] manages what a node stores on it.

pub mod device_mapper;
pub mod luks;
pub mod state_disk;
