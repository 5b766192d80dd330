//! The texts that systemd measures during a boot, after firmware and boot loader:
//! systemd-pcrphase.service(8). They are not in the firmware's event log.

/// The texts of PCR 11, in the order of a boot.
const PHASES: [&str; 6] = [
    "enter-initrd",
    "leave-initrd",
    "sysinit",
    "ready",
    "shutdown",
    "final",
];
/// The texts of PCR 11 that a booted system has measured: two in the initramfs, two after it.
pub const UNTIL_BOOTED: [&str; 4] = [PHASES[0], PHASES[1], PHASES[2], PHASES[3]];
/// The text that systemd-pcrosseparator measures at the end of the initramfs's start (systemd 261).
pub const OS_SEPARATOR: &str = "os-separator";
/// The text that systemd-pcrnvdone measures after the NvPCRs are set up (systemd 259).
const NV_PCR_SEPARATOR: &str = "nvpcr-separator";
/// The texts that systemd measures in the initramfs before the state disk is opened: the unit that
/// opens it is ordered after them.
pub const IN_INITRAMFS: [&str; 3] = [PHASES[0], NV_PCR_SEPARATOR, OS_SEPARATOR];

/// Returns the texts of a PCR in the order of a boot; a boot may leave some out.
pub fn words_of(pcr: u32) -> &'static [&'static str] {
    match pcr {
        11 => &PHASES,
        9 => &[NV_PCR_SEPARATOR, OS_SEPARATOR],
        0..=7 | 12..=14 => &[OS_SEPARATOR],
        _ => &[],
    }
}
