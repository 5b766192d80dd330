//! The launch digest of an SEV-SNP machine (MEASUREMENT in its report), computed from its firmware
//! and from the hypervisor's settings. Each page that the hypervisor puts into the machine before
//! it starts extends the digest (AMD 56860 §8.17.2).

use ring::digest::{SHA256, SHA384, digest};

use super::error::Error;
use super::firmware::{Firmware, Guid, SevSection, SevSectionKind};

const PAGE: usize = 4096;
/// The address of the pages with the state of the processors: all bits of an address above 51 are 0
/// (AMD 56860 §8.17.2).
const VMSA_ADDRESS: u64 = 0xffff_ffff_f000;
/// The end of the firmware in the machine's memory.
const END_OF_FIRMWARE: u64 = 1 << 32;
/// The first instruction of the first processor (AMD 24593 §14.1.3).
const RESET_VECTOR: u32 = 0xffff_fff0;
/// 9438d606-4f22-4cc9-b479-a793d411fd21: the table with the hashes of the kernel (QEMU,
/// target/i386/sev.c).
const HASH_TABLE: Guid = *b"\x06\xd6\x38\x94\x22\x4f\xc9\x4c\xb4\x79\xa7\x93\xd4\x11\xfd\x21";
/// 97d02dd8-bd20-4c94-aa78-e7714d36ab2a
const COMMAND_LINE: Guid = *b"\xd8\x2d\xd0\x97\x20\xbd\x94\x4c\xaa\x78\xe7\x71\x4d\x36\xab\x2a";
/// 44baf731-3a2f-4bd7-9af1-41e29169781d
const INITRD: Guid = *b"\x31\xf7\xba\x44\x2f\x3a\xd7\x4b\x9a\xf1\x41\xe2\x91\x69\x78\x1d";
/// 4de79437-abd2-427f-b835-d5b172d2045b
const KERNEL: Guid = *b"\x37\x94\xe7\x4d\xd2\xab\x7f\x42\xb8\x35\xd5\xb1\x72\xd2\x04\x5b";

/// The launch digest.
pub type PredictedDigest = [u8; 48];

/// A hypervisor: each prepares the memory and the processors in its own way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hypervisor {
    /// QEMU with KVM.
    Qemu,
    /// That of Amazon EC2.
    Ec2,
    /// Google Compute Engine's hypervisor.
    Gce,
}

impl Hypervisor {
    /// All of them.
    pub const ALL: [Hypervisor; 3] = [Hypervisor::Qemu, Hypervisor::Ec2, Hypervisor::Gce];

    /// Returns its keyword on a command line.
    pub fn word(self) -> &'static str {
        match self {
            Hypervisor::Qemu => "kvm",
            Hypervisor::Ec2 => "ec2",
            Hypervisor::Gce => "gce",
        }
    }
}

/// The processor that a machine sees, as the function 1 of CPUID names it in EAX (AMD 25481).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cpu(pub u32);

impl Cpu {
    /// QEMU's processor models that have SEV-SNP, or whose names are used for it: family, model,
    /// stepping (QEMU, target/i386/cpu.c). All versions of a model (`-v2`) have the same values.
    const MODELS: [(&str, [u32; 3]); 5] = [
        ("EPYC", [0x17, 0x01, 2]),
        ("EPYC-Rome", [0x17, 0x31, 0]),
        ("EPYC-Milan", [0x19, 0x01, 1]),
        ("EPYC-Genoa", [0x19, 0x11, 0]),
        ("EPYC-Turin", [0x1a, 0x00, 0]),
    ];

    /// Returns the names of QEMU's models.
    pub fn names() -> impl Iterator<Item = &'static str> {
        Self::MODELS.iter().map(|(name, _)| *name)
    }

    /// Returns the processor that QEMU shows for this model: `EPYC-Milan`, `EPYC-Milan-v2`.
    pub fn named(name: &str) -> Option<Cpu> {
        let model = match name.rsplit_once("-v") {
            Some((model, version)) if version.parse::<u8>().is_ok() => model,
            _ => name,
        };
        let found = Self::MODELS.iter().find(|(known, _)| *known == model);
        let (_, [family, model, stepping]) = *found?;
        Some(Cpu::new(family, model, stepping))
    }

    /// Returns the processor with this family, model and stepping; AMD's have a family of at least
    /// 15.
    pub fn new(family: u32, model: u32, stepping: u32) -> Cpu {
        let extended = family.saturating_sub(0xf) & 0xff;
        let (high, low) = (model >> 4 & 0xf, model & 0xf);
        Cpu(extended << 20 | high << 16 | family.min(0xf) << 8 | low << 4 | stepping & 0xf)
    }
}

/// The files that QEMU passes to the firmware (`-kernel`, with `kernel-hashes=on`).
#[derive(Debug, Clone, Copy)]
pub struct KernelFiles<'a> {
    /// The file of the kernel.
    pub kernel: &'a [u8],
    /// The initrd; empty without one.
    pub initrd: &'a [u8],
    /// The command line, without a final zero.
    pub command_line: &'a str,
}

/// The parameters with which a machine is started.
pub struct Launch<'a> {
    /// The firmware.
    pub firmware: &'a Firmware<'a>,
    /// The hypervisor.
    pub hypervisor: Hypervisor,
    /// The number of virtual processors, from 1.
    pub processors: u32,
    /// The processor; only QEMU's machines depend on it.
    pub cpu: Cpu,
    /// SEV_FEATURES of the processors (AMD 24593 appendix B): bit 0 SEV-SNP, 5 debug swap, 9 secure
    /// TSC.
    pub features: u64,
    /// What the hypervisor boots; `None` if the firmware finds it on a disk.
    pub kernel: Option<KernelFiles<'a>>,
}

impl Launch<'_> {
    /// Returns the launch digest.
    pub fn digest(&self) -> Result<PredictedDigest, Error> {
        let mut digest = Digest([0; 48]);
        let firmware = self.firmware.bytes();
        if !firmware.len().is_multiple_of(PAGE) {
            let text = "the firmware does not consist of whole pages of 4096 bytes";
            return Err(Error::Malformed(text.into()));
        }
        let start = END_OF_FIRMWARE - firmware.len() as u64;
        for (index, page) in firmware.chunks_exact(PAGE).enumerate() {
            digest.extend(PageType::Normal, start + (index * PAGE) as u64, page);
        }
        let sections = self.firmware.sev_sections()?;
        let has_hashes = sections
            .iter()
            .any(|section| section.kind == SevSectionKind::KernelHashes);
        if self.kernel.is_some() && !has_hashes {
            let text = "the firmware has no table for the hashes of a kernel, so evidence does not show which --kernel boots; OVMF built \
                from AmdSevX64.dsc has one";
            return Err(Error::Unsupported(text.into()));
        }
        // EC2 adds the CPUID page after all others
        let is_late = |section: &&SevSection| {
            self.hypervisor == Hypervisor::Ec2 && section.kind == SevSectionKind::Cpuid
        };
        let early = sections.iter().filter(|section| !is_late(section));
        for section in early.chain(sections.iter().filter(is_late)) {
            self.extend_by(section, &mut digest)?;
        }
        let first = self.processor(RESET_VECTOR);
        digest.extend(PageType::Vmsa, VMSA_ADDRESS, &first);
        if self.processors > 1 {
            let unsaid =
                "the firmware does not say where the processors other than the first one start";
            let address = self.firmware.sev_es_reset();
            let address = address.ok_or_else(|| Error::Unsupported(unsaid.into()))?;
            let other = self.processor(address);
            for _ in 1..self.processors {
                digest.extend(PageType::Vmsa, VMSA_ADDRESS, &other);
            }
        }
        Ok(digest.0)
    }

    fn extend_by(&self, section: &SevSection, digest: &mut Digest) -> Result<(), Error> {
        let address = u64::from(section.address);
        let page_type = match section.kind {
            SevSectionKind::Memory if self.hypervisor == Hypervisor::Gce => PageType::Unmeasured,
            SevSectionKind::Memory | SevSectionKind::CallingArea => PageType::Zero,
            SevSectionKind::Secrets => PageType::Secrets,
            SevSectionKind::Cpuid => PageType::Cpuid,
            SevSectionKind::KernelHashes => match &self.kernel {
                None => PageType::Zero,
                Some(kernel) => {
                    let page = self.hashes(kernel)?;
                    digest.extend(PageType::Normal, address, &page);
                    return Ok(());
                }
            },
        };
        // in fact each has one page
        let len = match page_type {
            PageType::Secrets | PageType::Cpuid => PAGE as u32,
            _ => section.len,
        };
        for offset in (0..len).step_by(PAGE) {
            digest.extend(page_type, address + u64::from(offset), &[]);
        }
        Ok(())
    }

    /// Returns the page with the hashes of the files that the hypervisor boots.
    fn hashes(&self, kernel: &KernelFiles<'_>) -> Result<Vec<u8>, Error> {
        let unsaid = "the firmware does not say where the hashes of a kernel are";
        let address = self.firmware.sev_hash_table();
        let address = address.ok_or_else(|| Error::Unsupported(unsaid.into()))?;
        let command_line = [kernel.command_line.as_bytes(), b"\0"].concat();
        let mut table = vec![];
        for (guid, content) in [
            (COMMAND_LINE, &command_line[..]),
            (INITRD, kernel.initrd),
            (KERNEL, kernel.kernel),
        ] {
            let hash = digest(&SHA256, content);
            table.extend(entry(guid, hash.as_ref()));
        }
        let table = entry(HASH_TABLE, &table);
        let mut page = vec![0; PAGE];
        let too_long = "the table of hashes of the firmware does not fit its page";
        page.get_mut(address as usize % PAGE..)
            .and_then(|rest| rest.get_mut(..table.len()))
            .ok_or_else(|| Error::Malformed(too_long.into()))?
            .copy_from_slice(&table);
        Ok(page)
    }

    /// Returns the page with the state in which a processor starts at this address: the save area
    /// of SEV-ES (AMD 24593 table B-4).
    fn processor(&self, start: u32) -> Vec<u8> {
        let (mut stack, mut task, mut code) = (0x93_u16, 0x8b_u16, 0x9b_u16);
        let (mut pat, mut rdx) = (0x0007_0406_0007_0406_u64, u64::from(self.cpu.0));
        let (mut mxcsr, mut fcw) = (0x1f80_u32, 0x037f_u16);
        match self.hypervisor {
            Hypervisor::Qemu => {}
            Hypervisor::Ec2 => {
                (stack, task) = (0x92, 0x83);
                if start == RESET_VECTOR {
                    code = 0x9a;
                }
                (rdx, mxcsr, fcw) = (0x600, 0, 0);
            }
            Hypervisor::Gce => {
                pat = 0x0007_0106;
                (rdx, mxcsr, fcw) = (0x600, 0, 0);
            }
        }
        let mut page = Page(vec![0; PAGE]);
        let segments = [
            (0x00, 0, 0x93, 0), // ES
            (0x10, 0xf000, code, start & 0xffff_0000),
            (0x20, 0, stack, 0),
            (0x30, 0, 0x93, 0), // DS
            (0x40, 0, 0x93, 0), // FS
            (0x50, 0, 0x93, 0), // GS
            (0x60, 0, 0x00, 0), // GDTR
            (0x70, 0, 0x82, 0), // LDTR
            (0x80, 0, 0x00, 0), // IDTR
            (0x90, 0, task, 0),
        ];
        for (at, selector, attributes, base) in segments {
            page.put(at, &u16::to_le_bytes(selector));
            page.put(at + 2, &u16::to_le_bytes(attributes));
            page.put(at + 4, &0xffff_u32.to_le_bytes());
            page.put(at + 8, &u64::from(base).to_le_bytes());
        }
        let registers = [
            (0x0d0, 0x1000), // EFER: SVME
            (0x148, 0x40),   // CR4: MCE
            (0x158, 0x10),   // CR0: ET
            (0x160, 0x400),  // DR7
            (0x168, 0xffff_0ff0),
            (0x170, 0x2), // RFLAGS
            (0x178, u64::from(start & 0xffff)),
            (0x268, pat),
            (0x310, rdx),
            (0x3b0, self.features),
            (0x3e8, 0x1), // XCR0
        ];
        for (at, value) in registers {
            page.put(at, &u64::to_le_bytes(value));
        }
        page.put(0x408, &mxcsr.to_le_bytes());
        page.put(0x410, &fcw.to_le_bytes());
        page.0
    }
}

/// A page under construction.
struct Page(Vec<u8>);

impl Page {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.0[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

/// Returns an entry of the table with the hashes of the kernel: GUID, whole length, content.
fn entry(guid: Guid, content: &[u8]) -> Vec<u8> {
    let len = (guid.len() + 2 + content.len()) as u16;
    [&guid[..], &len.to_le_bytes(), content].concat()
}

/// The type of a page (AMD 56860 table 66).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PageType {
    Normal = 1,
    Vmsa = 2,
    Zero = 3,
    Unmeasured = 4,
    Secrets = 5,
    Cpuid = 6,
}

/// The digest of the pages so far.
struct Digest(PredictedDigest);

impl Digest {
    /// Extends the digest by a page (AMD 56860 table 67). The content is included only for normal
    /// pages and processor pages.
    fn extend(&mut self, page_type: PageType, address: u64, content: &[u8]) {
        const LEN: u16 = 0x70;
        let mut info = [0; LEN as usize];
        info[..48].copy_from_slice(&self.0);
        if matches!(page_type, PageType::Normal | PageType::Vmsa) {
            info[48..96].copy_from_slice(digest(&SHA384, content).as_ref());
        }
        info[96..98].copy_from_slice(&LEN.to_le_bytes());
        info[98] = page_type as u8;
        info[104..].copy_from_slice(&address.to_le_bytes());
        self.0.copy_from_slice(digest(&SHA384, &info).as_ref());
    }
}
