//! What the TPM of a QEMU machine will hold when OVMF boots a kernel given by `-kernel`, computed from the files alone: the
//! policy that an operator would publish with an image.
//!
//! PCR 4 (TCG PC Client Platform Firmware Profile): the kernel's Authenticode digest, "Calling EFI Application from Boot
//! Option", separator; in OVMF's order, which loads the kernel before it calls the first boot option.
//! PCR 9 (the kernel's EFI stub): load options, then the initrd. OVMF appends ` initrd=initrd` to the command line.

use sha2::{Digest, Sha256};

/// QEMU (hw/i386/x86.c, as of 7.2) writes these into the kernel's setup header before it hands it to the firmware, so they
/// are part of what is measured. Offsets: Linux boot protocol, Documentation/arch/x86/boot.rst.
const QEMU_LOADER: u8 = 0xb0;
const CAN_USE_HEAP: u8 = 0x80;
const REAL_ADDR: u32 = 0x10000;
const CMDLINE_ADDR: u32 = 0x20000;
/// Kept free of an initrd at the end of low memory, for ACPI tables (pc_q35_7_x: 0x20000 + 0x8000).
const ACPI_DATA_SIZE: u32 = 0x28000;

/// An entry of the event log: what the firmware or the kernel extends a register with.
pub struct Entry {
    /// The register.
    pub pcr: u32,
    /// What was measured, for a person.
    pub what: &'static str,
    /// Its digest.
    pub digest: [u8; 32],
}

/// The measurement policy of a machine in whose event log there are these entries: their registers, and zero for those that
/// nothing may touch before the node belongs to a cluster.
pub fn policy(entries: &[Entry]) -> String {
    let registers = [4, 9, 8, 11, 12, 13, 15].map(|pcr| (pcr, value(entries, pcr)));
    let measurements = registers
        .map(|(pcr, value)| format!("\"{pcr}\":{{\"expected\":\"{value}\",\"warnOnly\":false}}"));
    format!("{{\"measurements\":{{{}}}}}", measurements.join(","))
}

/// What a register holds after these entries, in hexadecimal digits.
pub fn value(entries: &[Entry], pcr: u32) -> String {
    let of_pcr = entries.iter().filter(|entry| entry.pcr == pcr);
    hex(&of_pcr.fold([0; 32], |value, entry| {
        sha256(&[value, entry.digest].concat())
    }))
}

/// The entries of PCRs 4 and 9 of a machine with `memory` bytes.
pub fn entries(kernel: &[u8], initrd: &[u8], command_line: &str, memory: u32) -> Vec<Entry> {
    let initrd_size = u32::try_from(initrd.len()).unwrap();
    let options: Vec<u8> = format!("{command_line} initrd=initrd\0")
        .encode_utf16()
        .flat_map(u16::to_le_bytes)
        .collect();
    vec![
        Entry {
            pcr: 4,
            what: "the kernel",
            digest: authenticode(&loaded(kernel, initrd_size, memory)),
        },
        Entry {
            pcr: 4,
            what: "its call",
            digest: sha256(b"Calling EFI Application from Boot Option"),
        },
        Entry {
            pcr: 4,
            what: "a separator",
            digest: sha256(&[0; 4]),
        },
        Entry {
            pcr: 9,
            what: "the kernel's command line",
            digest: sha256(&options),
        },
        Entry {
            pcr: 9,
            what: "the initramfs",
            digest: sha256(initrd),
        },
    ]
}

/// The kernel as QEMU hands it to the firmware.
fn loaded(kernel: &[u8], initrd_size: u32, memory: u32) -> Vec<u8> {
    let mut kernel = kernel.to_vec();
    let initrd_max = u32_at(&kernel, 0x22c).min(memory - ACPI_DATA_SIZE - 1);
    kernel[0x210] = QEMU_LOADER;
    kernel[0x211] |= CAN_USE_HEAP;
    kernel[0x218..0x21c].copy_from_slice(&((initrd_max - initrd_size) & !4095).to_le_bytes());
    kernel[0x21c..0x220].copy_from_slice(&initrd_size.to_le_bytes());
    let heap_end = u16::try_from(CMDLINE_ADDR - REAL_ADDR - 0x200).unwrap();
    kernel[0x224..0x226].copy_from_slice(&heap_end.to_le_bytes());
    kernel[0x228..0x22c].copy_from_slice(&CMDLINE_ADDR.to_le_bytes());
    kernel
}

/// The digest of a PE file that a signature would cover ("Windows Authenticode Portable Executable Signature Format").
fn authenticode(pe: &[u8]) -> [u8; 32] {
    let coff = u32_at(pe, 0x3c) as usize + 4;
    let optional = coff + 20;
    let directories = optional
        + if u16_at(pe, optional) == 0x20b {
            112
        } else {
            96
        };
    let certificates = directories + 4 * 8;
    let headers_size = u32_at(pe, optional + 60) as usize;
    let mut context = Sha256::new();
    context.update(&pe[..optional + 64]); // up to the checksum
    context.update(&pe[optional + 68..certificates]);
    context.update(&pe[certificates + 8..headers_size]);
    let first_section = optional + usize::from(u16_at(pe, coff + 16));
    let mut sections: Vec<(usize, usize)> = (0..usize::from(u16_at(pe, coff + 2)))
        .map(|i| first_section + 40 * i)
        .map(|at| (u32_at(pe, at + 20) as usize, u32_at(pe, at + 16) as usize))
        .filter(|(_, size)| *size > 0)
        .collect();
    sections.sort_unstable();
    let mut hashed = headers_size;
    for (offset, size) in sections {
        context.update(&pe[offset..offset + size]);
        hashed += size;
    }
    let end = pe.len() - u32_at(pe, certificates + 4) as usize;
    context.update(&pe[hashed.min(end)..end]);
    context.finalize().into()
}

fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().unwrap())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
