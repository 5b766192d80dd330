//! The PE file format ("Microsoft PE and COFF Specification") of EFI programs: sections, and the
//! digest that a signature covers ("Windows Authenticode Portable Executable Signature Format"),
//! which the firmware measures into PCR 4.

use std::ops::Range;

use super::bytes::{u16_at, u32_at};
use super::digest::{Digest, Hasher};
use super::error::Error;

/// Size in bytes of the COFF header, of an entry of the section table.
const COFF_HEADER: usize = 20;
const SECTION_HEADER: usize = 40;
/// The optional header: offsets of SizeOfHeaders and CheckSum, the same in PE32 and PE32+.
const SIZE_OF_HEADERS: usize = 60;
const CHECK_SUM: usize = 64;
/// Index of the certificate table in the data directories.
const CERTIFICATES: usize = 4;
/// Maximum number of zero bytes that a section has in memory after its bytes in the file. Tools
/// that make unified kernel images add none.
const MAX_ZEROS: usize = 1 << 20;

/// A parsed file.
pub struct Pe<'a> {
    bytes: &'a [u8],
    check_sum: Range<usize>,
    /// The entry of the certificate table in the data directories, if there is one, and the table's
    /// size.
    certificates: Option<(Range<usize>, usize)>,
    size_of_headers: usize,
    sections: Vec<Section<'a>>,
}

/// A section.
#[derive(Clone, Copy)]
pub struct Section<'a> {
    /// The name without trailing zero bytes.
    pub name: &'a [u8],
    /// PointerToRawData and SizeOfRawData.
    raw: (usize, usize),
    /// VirtualSize: the size in memory.
    size: usize,
    /// The bytes of the file that are in memory.
    data: &'a [u8],
}

impl<'a> Pe<'a> {
    /// Parses the headers. The error says what is wrong with the file.
    pub fn parse(bytes: &'a [u8]) -> Result<Pe<'a>, Error> {
        if !bytes.starts_with(b"MZ") {
            let text = "not an EFI program: it does not begin with MZ";
            return Err(Error::Foreign(text.into()));
        }
        let cut = || Error::Malformed("the PE headers are cut off".into());
        let start = u32_at(bytes, 0x3c).ok_or_else(cut)? as usize;
        let header = bytes.get(start..).ok_or_else(cut)?;
        if !header.starts_with(b"PE\0\0") {
            let text = "not an EFI program: there is no PE header";
            return Err(Error::Foreign(text.into()));
        }
        let coff = start + 4;
        let optional = coff + COFF_HEADER;
        let field = |at| u32_at(bytes, optional + at).map(|value| value as usize);
        let directories = match u16_at(bytes, optional).ok_or_else(cut)? {
            0x10b => 96,
            0x20b => 112,
            other => {
                let text = format!("unknown kind of PE header {other:#x}");
                return Err(Error::Unsupported(text));
            }
        };
        let certificates = match field(directories - 4).ok_or_else(cut)? {
            0..=CERTIFICATES => None,
            _ => {
                let at = optional + directories + 8 * CERTIFICATES;
                Some((at..at + 8, u32_at(bytes, at + 4).ok_or_else(cut)? as usize))
            }
        };
        let count = u16_at(bytes, coff + 2).ok_or_else(cut)?;
        let table = optional + usize::from(u16_at(bytes, coff + 16).ok_or_else(cut)?);
        let sections = (0..usize::from(count))
            .map(|index| Section::parse(bytes, table + SECTION_HEADER * index))
            .collect::<Result<_, _>>()?;
        Ok(Pe {
            bytes,
            check_sum: optional + CHECK_SUM..optional + CHECK_SUM + 4,
            certificates,
            size_of_headers: field(SIZE_OF_HEADERS).ok_or_else(cut)?,
            sections,
        })
    }

    /// Returns the sections in the order of the section table.
    pub fn sections(&self) -> &[Section<'a>] {
        &self.sections
    }

    /// Returns the first section with this name.
    pub fn section(&self, name: &str) -> Option<&Section<'a>> {
        self.sections
            .iter()
            .find(|section| section.name == name.as_bytes())
    }

    /// Returns the Authenticode digest: it covers the file except the checksum and the signatures,
    /// so that it is the same before and after signing.
    pub fn authenticode(&self) -> Result<Digest, Error> {
        let part = |range: Range<usize>| {
            let wrong = || {
                let len = self.bytes.len();
                let text = format!("the PE headers name the bytes {range:?} of a file of {len}");
                Error::Malformed(text)
            };
            self.bytes.get(range.clone()).ok_or_else(wrong)
        };
        let mut hasher = Hasher::new();
        hasher.update(part(0..self.check_sum.start)?);
        let (after, certificates_size) = match &self.certificates {
            Some((entry, size)) => {
                hasher.update(part(self.check_sum.end..entry.start)?);
                (entry.end, *size)
            }
            None => (self.check_sum.end, 0),
        };
        hasher.update(part(after..self.size_of_headers)?);
        let mut sections: Vec<_> = self.sections.iter().map(|section| section.raw).collect();
        sections.sort_unstable();
        let mut hashed = self.size_of_headers;
        for (offset, size) in sections.into_iter().filter(|(_, size)| *size > 0) {
            hashed = hashed.saturating_add(size);
            // also limits the work: sections that overlap would be hashed repeatedly
            if hashed > self.bytes.len() {
                return Err(Error::Malformed(format!(
                    "the sections overlap, or are longer than the file of {} bytes",
                    self.bytes.len()
                )));
            }
            hasher.update(part(offset..offset.saturating_add(size))?);
        }
        let end = self.bytes.len().saturating_sub(certificates_size);
        if hashed < end {
            hasher.update(part(hashed..end)?);
        }
        Ok(hasher.finish())
    }
}

impl<'a> Section<'a> {
    fn parse(bytes: &'a [u8], at: usize) -> Result<Section<'a>, Error> {
        let header = bytes
            .get(at..)
            .and_then(|rest| rest.get(..SECTION_HEADER))
            .ok_or_else(|| Error::Malformed("the section table is cut off".into()))?;
        let name = header[..8].split(|byte| *byte == 0).next();
        let field = |at| u32_at(header, at).unwrap_or_default() as usize;
        let (size, raw) = (field(8), (field(20), field(16)));
        let data = bytes
            .get(raw.0..)
            .and_then(|rest| rest.get(..size.min(raw.1)))
            .ok_or_else(|| {
                Error::Malformed(format!(
                    "section {} lies outside the file of {} bytes",
                    String::from_utf8_lossy(name.unwrap_or_default()).escape_debug(),
                    bytes.len()
                ))
            })?;
        Ok(Section {
            name: name.unwrap_or_default(),
            raw,
            size,
            data,
        })
    }

    /// Returns whether the section has no bytes in memory.
    pub fn is_empty(&self) -> bool {
        self.size == 0
    }

    /// Returns the section as the loader puts it into memory: VirtualSize bytes, with zeros after
    /// those of the file.
    pub fn in_memory(&self) -> Result<Vec<u8>, Error> {
        let zeros = self.size - self.data.len();
        if zeros > MAX_ZEROS {
            return Err(Error::Malformed(format!(
                "section {} has {} bytes in memory, but only {} in the file",
                String::from_utf8_lossy(self.name).escape_debug(),
                self.size,
                self.data.len()
            )));
        }
        Ok([self.data, &vec![0; zeros]].concat())
    }
}
