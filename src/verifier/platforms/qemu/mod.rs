//! The variants of QEMU, and other hypervisors without a cloud's firmware.

pub mod qemu_snp;
pub mod qemu_tdx;
pub mod qemu_vtpm;
