//! The machine whose registers are computed: one with a TPM, or a TDX machine.
//!
//! A TDX machine without a TPM has the same events in fewer registers (UEFI specification 2.10,
//! §38.4.1):
//!
//! | PCR | register of a TDX machine | number in a policy |
//! |---|---|---|
//! | 0 | MRTD, which the TDX module measures before the machine starts | 0 |
//! | 1, 7 | RTMR 0 | 1 |
//! | 2 to 6 | RTMR 1 | 2 |
//! | 8 to 15 | RTMR 2 | 3 |
//!
//! But not every program that measures into a TPM also measures into TDX registers. The firmware is
//! OVMF as edk2 publishes it (OvmfPkg/Tcg/TdTcg2Dxe), which measures one separator into RTMR 1.
//! This crate describes the other programs next to their code. systemd's units measure only into a
//! TPM.

use super::digest::RegisterBank;

/// The PCRs that depend on the image. Drivers from devices and disks before the image, and their
/// data: none are allowed; boot loader and image; GRUB's commands; command line and initrd;
/// sections of a unified kernel image; its parameters; its extensions; the cluster.
pub const REGISTERS: [u32; 9] = [2, 3, 4, 8, 9, 11, 12, 13, 15];
/// The PCR with the partition table, which is predictable only as long as the table is unchanged.
pub const PARTITION_TABLE: u32 = 5;

/// The numbers of RTMR 1 and 2 in a policy.
pub const RTMR_1: u32 = 2;
/// As [`RTMR_1`].
pub const RTMR_2: u32 = 3;

/// Whose registers are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Platform {
    /// A machine with a TPM: the PCRs of this bank.
    Tpm(RegisterBank),
    /// A TDX machine without a TPM: RTMR 1 and 2, by their numbers in a policy.
    Tdx,
}

impl Platform {
    /// Returns the bank whose digests extend the registers.
    pub fn bank(self) -> RegisterBank {
        match self {
            Platform::Tpm(bank) => bank,
            Platform::Tdx => RegisterBank::Sha384,
        }
    }

    /// Returns the register into which the firmware measures the programs that it starts. Without
    /// it, any program could run first, and measure the same values as the image into the other
    /// registers.
    pub fn boot_loader(self) -> u32 {
        match self {
            Platform::Tpm(_) => 4,
            Platform::Tdx => RTMR_1,
        }
    }

    /// Returns the registers that depend on the image.
    pub fn registers(self) -> &'static [u32] {
        match self {
            Platform::Tpm(_) => &REGISTERS,
            Platform::Tdx => &[RTMR_1, RTMR_2],
        }
    }

    /// Returns all registers that can be predicted.
    pub fn known(self) -> Vec<u32> {
        let further = match self {
            Platform::Tpm(_) => Some(PARTITION_TABLE),
            Platform::Tdx => None,
        };
        let mut all: Vec<u32> = self.registers().to_vec();
        all.extend(further);
        all
    }

    /// Returns the name of a register.
    pub fn name(self, register: u32) -> String {
        match (self, register) {
            (Platform::Tpm(_), pcr) => format!("PCR {pcr}"),
            (Platform::Tdx, 0) => "MRTD".into(),
            (Platform::Tdx, number) => format!("RTMR {}", number - 1),
        }
    }

    /// Returns the register that gets the events of a PCR; `None` if this crate does not compute
    /// it.
    pub(crate) fn register_of(self, pcr: u32) -> Option<u32> {
        match (self, pcr) {
            (Platform::Tpm(_), pcr) => Some(pcr),
            (Platform::Tdx, 2..=6) => Some(RTMR_1),
            (Platform::Tdx, 8..=15) => Some(RTMR_2),
            (Platform::Tdx, _) => None,
        }
    }
}
