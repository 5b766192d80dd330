//! OVMF, the UEFI firmware of virtual machines, as a file: the table of GUIDs at its end, which
//! says how a hypervisor must prepare the memory of a confidential machine (edk2,
//! OvmfPkg/ResetVector/Ia16/ResetVectorVtf0.asm).

use super::bytes::{u16_at, u32_at, u64_at};
use super::error::Error;

/// Maximum size of a file in bytes. OVMF has 4 MiB at most.
const MAX_FILE: usize = 64 << 20;
/// The length of the reset vector after the table, in bytes.
const BEHIND_TABLE: usize = 32;
/// The length of an entry without its data: 16 bits with the total size, and a GUID, both after the
/// data.
const ENTRY_HEADER: usize = 18;
/// 96b582de-1fb2-45f7-baea-a366c55a082d: the end of the table; its size is that of the whole table.
const FOOTER: Guid = *b"\xde\x82\xb5\x96\xb2\x1f\xf7\x45\xba\xea\xa3\x66\xc5\x5a\x08\x2d";
/// dc886566-984a-4798-a75e-5585a7bf67cc: where the sections for SEV are, in bytes from the end of
/// the file.
const SEV_METADATA: Guid = *b"\x66\x65\x88\xdc\x4a\x98\x98\x47\xa7\x5e\x55\x85\xa7\xbf\x67\xcc";
/// 7255371f-3a3b-4b04-927b-1da6efa8d454: the address of the table with the hashes of the kernel.
const SEV_HASH_TABLE: Guid = *b"\x1f\x37\x55\x72\x3b\x3a\x04\x4b\x92\x7b\x1d\xa6\xef\xa8\xd4\x54";
/// 00f771de-1a7e-4fcb-890e-68c77e2fb44e: where the processors other than the first one start.
const SEV_ES_RESET_BLOCK: Guid =
    *b"\xde\x71\xf7\x00\x7e\x1a\xcb\x4f\x89\x0e\x68\xc7\x7e\x2f\xb4\x4e";
/// e47a6535-984a-4798-865e-4685a7bf8ec2: where the sections for TDX are, in bytes from the end of
/// the file.
const TDX_METADATA: Guid = *b"\x35\x65\x7a\xe4\x4a\x98\x98\x47\x86\x5e\x46\x85\xa7\xbf\x8e\xc2";
/// The size of a section's description for TDX: place and length in the file, 32 bits each, address
/// and length in memory, 64 bits each, type and attributes, 32 bits each (Intel TDX Virtual
/// Firmware Design Guide, "TDVF descriptor").
const TDX_SECTION: usize = 32;
/// Maximum length of all sections in bytes. Those of OVMF have 320 KiB together.
const MAX_SECTIONS: u64 = 64 << 20;
/// The size of a section's description: address, length, type, 32 bits each.
const SECTION: usize = 12;

/// A GUID as in memory: its first three parts are little endian.
pub type Guid = [u8; 16];

/// A firmware file.
pub struct Firmware<'a> {
    bytes: &'a [u8],
    entries: Vec<(Guid, &'a [u8])>,
}

/// A part of the memory that the hypervisor prepares for the firmware of an SEV machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SevSection {
    /// The address of its first byte.
    pub address: u32,
    /// The length in bytes.
    pub len: u32,
    /// Its purpose.
    pub kind: SevSectionKind,
}

/// A part of the memory that the hypervisor prepares for the firmware of a TDX machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TdxSection<'a> {
    /// The content from the file; the rest is zero.
    pub content: &'a [u8],
    /// The address of its first byte: that of a page.
    pub address: u64,
    /// The length in bytes: whole pages.
    pub len: u64,
    /// Whether its content is measured, and not only its address.
    pub is_measured: bool,
}

/// The purpose of a section (edk2, OvmfPkg/ResetVector/X64/OvmfSevMetadata.asm).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SevSectionKind {
    /// Memory that the firmware uses before it validates memory itself.
    Memory,
    /// The page with the keys for messages to the platform.
    Secrets,
    /// The page with the answers of CPUID.
    Cpuid,
    /// The calling area of a secure VM service module.
    CallingArea,
    /// The page with the hashes of the kernel.
    KernelHashes,
}

impl<'a> Firmware<'a> {
    /// Reads the file of a firmware.
    pub fn parse(bytes: &'a [u8]) -> Result<Firmware<'a>, Error> {
        if bytes.len() > MAX_FILE {
            let text = format!("the firmware has more than {MAX_FILE} bytes");
            return Err(Error::Foreign(text));
        }
        let no_table = || {
            let text = "the firmware has no table of GUIDs at its end, as OVMF has";
            Error::Foreign(text.into())
        };
        let end = bytes.len().checked_sub(BEHIND_TABLE).ok_or_else(no_table)?;
        let (footer, size) = last_entry(&bytes[..end]).ok_or_else(no_table)?;
        if footer != FOOTER {
            return Err(no_table());
        }
        let start = end.checked_sub(size).ok_or_else(no_table)?;
        let mut table = &bytes[start..end - ENTRY_HEADER];
        let mut entries = vec![];
        while !table.is_empty() {
            let damaged =
                || Error::Malformed("the table of GUIDs of the firmware is damaged".into());
            let (guid, size) = last_entry(table).ok_or_else(damaged)?;
            let start = table.len().checked_sub(size).ok_or_else(damaged)?;
            entries.push((guid, &table[start..table.len() - ENTRY_HEADER]));
            table = &table[..start];
        }
        Ok(Firmware { bytes, entries })
    }

    /// Returns the whole file.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the data of the entry with this GUID.
    pub fn entry(&self, guid: &Guid) -> Option<&'a [u8]> {
        let found = self.entries.iter().find(|(known, _)| known == guid);
        found.map(|(_, data)| *data)
    }

    /// Returns the sections for SEV in the order of the file.
    pub fn sev_sections(&self) -> Result<Vec<SevSection>, Error> {
        let Some(entry) = self.entry(&SEV_METADATA) else {
            let text = "the firmware is not built for SEV-SNP: it has no metadata for it";
            return Err(Error::Unsupported(text.into()));
        };
        let read = || {
            let from_end = u32_at(entry, 0)?.try_into().ok()?;
            let metadata = &self.bytes[self.bytes.len().checked_sub(from_end)?..];
            let (header, sections) = metadata.split_at_checked(16)?;
            if header[..4] != *b"ASEV" || u32_at(header, 8)? != 1 {
                return None;
            }
            let count: usize = u32_at(header, 12)?.try_into().ok()?;
            let sections = sections.get(..count.checked_mul(SECTION)?)?;
            let sections = sections.chunks_exact(SECTION).map(section);
            let sections: Vec<SevSection> = sections.collect::<Option<_>>()?;
            let len: u64 = sections.iter().map(|section| u64::from(section.len)).sum();
            (len <= MAX_SECTIONS).then_some(sections)
        };
        let damaged = "the firmware's metadata for SEV is damaged or too new";
        read().ok_or_else(|| Error::Malformed(damaged.into()))
    }

    /// Returns the sections for TDX that are in the machine's memory when it starts, in the order
    /// of the file.
    pub fn tdx_sections(&self) -> Result<Vec<TdxSection<'a>>, Error> {
        let Some(entry) = self.entry(&TDX_METADATA) else {
            let text = "the firmware is not built for TDX: it has no metadata for it";
            return Err(Error::Unsupported(text.into()));
        };
        let descriptions = || {
            let from_end = u32_at(entry, 0)?.try_into().ok()?;
            let metadata = &self.bytes[self.bytes.len().checked_sub(from_end)?..];
            let (header, sections) = metadata.split_at_checked(16)?;
            if header[..4] != *b"TDVF" || u32_at(header, 8)? != 1 {
                return None;
            }
            let count: usize = u32_at(header, 12)?.try_into().ok()?;
            sections.get(..count.checked_mul(TDX_SECTION)?)
        };
        let mut sections = vec![];
        let mut all = 0_u64;
        for description in descriptions()
            .ok_or_else(damaged_tdx)?
            .chunks_exact(TDX_SECTION)
        {
            if let Some(section) = self.tdx_section(description)? {
                all = all.saturating_add(section.len);
                sections.push(section);
            }
        }
        if all <= MAX_SECTIONS {
            Ok(sections)
        } else {
            Err(damaged_tdx())
        }
    }

    /// Returns a section; `None` if the machine accepts its memory itself.
    fn tdx_section(&self, description: &[u8]) -> Result<Option<TdxSection<'a>>, Error> {
        let read = || {
            let number = |at| usize::try_from(u32_at(description, at)?).ok();
            let (start, len) = (number(0)?, number(4)?);
            let section = TdxSection {
                content: self.bytes.get(start..start.checked_add(len)?)?,
                address: u64_at(description, 8)?,
                len: u64_at(description, 16)?,
                is_measured: u32_at(description, 28)? & 1 == 1,
            };
            let is_fitting = len as u64 <= section.len;
            is_fitting.then_some((section, u32_at(description, 24)?, u32_at(description, 28)?))
        };
        let (section, kind, attributes) = read().ok_or_else(damaged_tdx)?;
        let is_whole = |number: u64| number.is_multiple_of(4096);
        if !is_whole(section.address)
            || !is_whole(section.len)
            || section.address.checked_add(section.len).is_none()
        {
            let text = "a section of the firmware for TDX does not consist of whole pages";
            return Err(Error::Malformed(text.into()));
        }
        match (kind, attributes) {
            // code, variables, the list of memory, stack and heap
            (0..=3, 0 | 1) => Ok(Some(section)),
            // memory that the firmware accepts when it starts
            (0..=4, 2) => Ok(None),
            (5 | 6, _) => {
                let text = "the host puts a kernel into the firmware's memory, so MRTD depends on more than the firmware";
                Err(Error::Unsupported(text.into()))
            }
            _ => Err(damaged_tdx()),
        }
    }

    /// Returns the address of the table with the hashes of the kernel.
    pub fn sev_hash_table(&self) -> Option<u32> {
        u32_at(self.entry(&SEV_HASH_TABLE)?, 0).filter(|address| *address != 0)
    }

    /// Returns the address at which the processors other than the first one start.
    pub fn sev_es_reset(&self) -> Option<u32> {
        u32_at(self.entry(&SEV_ES_RESET_BLOCK)?, 0)
    }
}

fn damaged_tdx() -> Error {
    Error::Malformed("the firmware's metadata for TDX is damaged or too new".into())
}

/// Returns the GUID and the total size of the entry that ends at the end of these bytes.
fn last_entry(bytes: &[u8]) -> Option<(Guid, usize)> {
    let header = &bytes[bytes.len().checked_sub(ENTRY_HEADER)?..];
    let size = usize::from(u16_at(header, 0)?);
    (size >= ENTRY_HEADER).then_some((*header[2..].first_chunk()?, size))
}

fn section(bytes: &[u8]) -> Option<SevSection> {
    Some(SevSection {
        address: u32_at(bytes, 0)?,
        len: u32_at(bytes, 4)?,
        kind: match u32_at(bytes, 8)? {
            1 => SevSectionKind::Memory,
            2 => SevSectionKind::Secrets,
            3 => SevSectionKind::Cpuid,
            4 => SevSectionKind::CallingArea,
            0x10 => SevSectionKind::KernelHashes,
            _ => return None,
        },
    })
}
