//! A kernel that QEMU passes to OVMF (`-kernel`, `-initrd`, `-append`), without systemd-stub.

use super::bytes::u32_at;
use super::digest::Digest;
use super::error::Error;
use super::event_log::{BootLog, Missing, utf16};
use super::host::Contents;
use super::pe::Pe;
use base::boot;

/// QEMU (hw/i386/x86.c, as of 7.2) writes these values into the kernel's setup header before it
/// passes it to the firmware, so they are measured, too. Offsets: Linux boot protocol,
/// Documentation/arch/x86/boot.rst.
const QEMU_LOADER: u8 = 0xb0;
const CAN_USE_HEAP: u8 = 0x80;
const REAL_ADDR: u32 = 0x10000;
const CMDLINE_ADDR: u32 = 0x20000;
/// The memory that QEMU keeps free of an initrd at the end of low memory, for ACPI tables
/// (pc_q35_7_x: 0x20000 + 0x8000).
const ACPI_DATA_SIZE: u64 = 0x28000;
/// A q35 machine with at least this much memory has this much below 4 GiB; with less, all of it is
/// there.
const LARGE_MEMORY: u64 = 0xb000_0000;
const LOW_MEMORY: u64 = 0x8000_0000;
/// The end of the setup header.
const SETUP_HEADER_END: usize = 0x230;
/// Maximum length of a kernel's version: release, builder and build, of at most 64 bytes each, with
/// what is between them.
const MAX_VERSION: usize = 256;
/// The position of the magic number in the setup header.
const MAGIC: usize = 0x202;

/// Which file of the kernel the firmware loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loader {
    /// QEMU 10 or newer with an OVMF of edk2-stable202505 or newer: the unchanged file.
    AsIs,
    /// Older versions: the file with the fields that QEMU writes into its header; one of them
    /// depends on the machine's memory in bytes.
    Patched(u64),
    /// One of the two: the kernel's digest cannot be predicted.
    Unknown,
}

/// One of the two: the kernel's digest cannot be predicted. `None` if it has no version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Release(Option<(u32, u32)>);

/// The first release whose EFI stub measures the command line and the initrd on TDX machines.
const MEASURES_ON_TDX: (u32, u32) = (6, 9);

/// Returns the version in a kernel's file, as /proc/version has it (Linux boot protocol,
/// kernel_version); empty if it has none.
pub fn version(kernel: &[u8]) -> &str {
    let read = || {
        let header = kernel.get(MAGIC..)?;
        let at = header.strip_prefix(b"HdrS")?.get(8..)?.first_chunk()?;
        let at = 0x200 + usize::from(u16::from_le_bytes(*at));
        let text = kernel.get(at..)?.split(|byte| *byte == 0).next()?;
        str::from_utf8(&text[..text.len().min(MAX_VERSION)]).ok()
    };
    read().unwrap_or_default()
}

impl Release {
    /// Reads the release from the kernel's file.
    pub fn of(kernel: &[u8]) -> Release {
        let mut numbers = version(kernel).split(|c: char| !c.is_ascii_digit());
        let mut number = || numbers.next()?.parse().ok();
        Release(number().zip(number()))
    }

    /// Returns whether the kernel measures its command line and initrd, or why that is unknown.
    pub fn measures(self, on_tdx: bool) -> Result<(), Missing> {
        let name = match self.0 {
            _ if !on_tdx => return Ok(()),
            Some(release) if release >= MEASURES_ON_TDX => return Ok(()),
            Some((major, minor)) => format!("the kernel is Linux {major}.{minor}"),
            None => "the file of the kernel does not contain its version".to_owned(),
        };
        Err(Missing::new(
            format!(
                "{name}: Linux measures its command line and initrd on TDX machines from 6.9 on, or where a distribution added that"
            ),
            "take a newer kernel, or measure a booted machine",
        ))
    }
}

/// A kernel with its initrd and command line, reduced to the measured parts.
pub struct Linux {
    kernel: Result<Digest, Missing>,
    command_line: Digest,
    initrd: Option<Digest>,
    release: Release,
    /// The known facts about how it treats the host.
    pub contents: Contents,
    /// Warnings for the operator.
    pub warnings: Vec<String>,
}

impl Linux {
    /// Reads the files.
    pub fn new(
        kernel: &[u8],
        initrd: Option<&[u8]>,
        command_line: &str,
        loader: Loader,
    ) -> Result<Linux, Error> {
        if !kernel
            .get(MAGIC..)
            .is_some_and(|rest| rest.starts_with(b"HdrS"))
        {
            let text = "not a Linux kernel for x86: it has no setup header";
            return Err(Error::Foreign(text.into()));
        }
        let image = match loader {
            Loader::AsIs => Ok(Pe::parse(kernel)?.authenticode()?),
            Loader::Patched(memory) => {
                let loaded = loaded(kernel, initrd.map_or(0, <[u8]>::len), memory)?;
                Ok(Pe::parse(&loaded)?.authenticode()?)
            }
            Loader::Unknown => Err(Missing::new(
                "QEMU before 10, or with an OVMF before edk2-stable202505, writes the initrd's address into the kernel before the \
                 firmware measures it, and the address depends on the machine's memory",
                "give the machine's memory (--memory), or --kernel-as-is with newer ones",
            )),
        };
        // OVMF adds the initrd's name to the command line
        let options = match initrd {
            Some(_) => format!("{command_line} initrd=initrd"),
            None => command_line.to_owned(),
        };
        Ok(Linux {
            kernel: image,
            command_line: Digest::of(&[&utf16(&options)]),
            initrd: initrd.map(|initrd| Digest::of(&[initrd])),
            release: Release::of(kernel),
            contents: Contents::new(
                Some(command_line),
                version(kernel),
                initrd.unwrap_or_default(),
                None,
            ),
            warnings: boot::unverified_root(command_line)
                .map(str::to_owned)
                .into_iter()
                .collect(),
        })
    }

    /// Adds the event of the firmware for loading the kernel.
    pub fn measure_image(&self, log: &mut BootLog) {
        match &self.kernel {
            Ok(digest) => log.extend(4, "the kernel", *digest),
            Err(missing) => log.missing(4, missing.clone()),
        }
    }

    /// Adds the kernel's measurements.
    pub fn measure(&self, log: &mut BootLog) {
        if let Some(missing) = self.release.measures(log.is_tdx()).err() {
            log.missing(9, missing);
        }
        log.extend(9, "the kernel's command line", self.command_line);
        if let Some(initrd) = self.initrd {
            log.extend(9, "the initramfs", initrd);
        }
    }
}

/// Returns the kernel as QEMU passes it to the firmware.
fn loaded(kernel: &[u8], initrd_size: usize, memory: u64) -> Result<Vec<u8>, Error> {
    if kernel.len() < SETUP_HEADER_END {
        let text = "not a Linux kernel for x86: it is cut off";
        return Err(Error::Malformed(text.into()));
    }
    let mut kernel = kernel.to_vec();
    let low_memory = if memory < LARGE_MEMORY {
        memory
    } else {
        LOW_MEMORY
    };
    let initrd_max = u32_at(&kernel, 0x22c).map_or(0, u64::from);
    let end = low_memory
        .saturating_sub(ACPI_DATA_SIZE + 1)
        .min(initrd_max);
    let fits = end.checked_sub(initrd_size as u64);
    let too_large = "the initrd does not fit into the machine's memory";
    let address = fits.ok_or_else(|| Error::Unsupported(too_large.into()))? & !4095;
    let mut put = |at: usize, bytes: &[u8]| kernel[at..at + bytes.len()].copy_from_slice(bytes);
    // without an initrd QEMU does not change its fields
    if initrd_size > 0 {
        // both are below 4 GiB, as initrd_max is
        put(0x218, &(address as u32).to_le_bytes());
        put(0x21c, &(initrd_size as u32).to_le_bytes());
    }
    put(0x210, &[QEMU_LOADER]);
    put(
        0x224,
        &((CMDLINE_ADDR - REAL_ADDR - 0x200) as u16).to_le_bytes(),
    );
    put(0x228, &CMDLINE_ADDR.to_le_bytes());
    kernel[0x211] |= CAN_USE_HEAP;
    Ok(kernel)
}
