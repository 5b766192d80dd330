//! The attestation report (ATTESTATION_REPORT, 56860 §7.3), versions 2 to 5.

use std::fmt;

use super::tcb::{Cpuid, Product, Tcb, Tcbs};
use crate::refusal::{Kind, Refusal};
pub use tee::snp::{LEN, ReportSigner};

/// The bytes that the chip signs.
const SIGNED: std::ops::Range<usize> = 0..0x2a0;
/// ECDSA with P-384 and SHA-384.
const ECDSA_P384_SHA384: u32 = 1;
/// The VMPL of a report that the host requested, which binds no data of the guest.
const HOST: u32 = u32::MAX;

/// The names of the bits of the guest policy (56860 §4.3); bit 17 is always 1.
const POLICY_BITS: [(u32, &str); 9] = [
    (16, "SMT"),
    (18, "MIGRATE_MA"),
    (19, "DEBUG"),
    (20, "SINGLE_SOCKET"),
    (21, "CXL_ALLOW"),
    (22, "MEM_AES_256_XTS"),
    (23, "RAPL_DIS"),
    (24, "CIPHERTEXT_HIDING"),
    (25, "PAGE_SWAP_DISABLE"),
];
/// The names of the bits of the platform info (56860 §7.3).
const PLATFORM_BITS: [(u32, &str); 8] = [
    (0, "SMT_EN"),
    (1, "TSME_EN"),
    (2, "ECC_EN"),
    (3, "RAPL_DIS"),
    (4, "CIPHERTEXT_HIDING_DRAM_EN"),
    (5, "ALIAS_CHECK_COMPLETE"),
    (6, "IOMMU_WRITE_SAFE"),
    (7, "TIO_EN"),
];

/// A well-formed report. Its signer is not verified yet.
#[derive(Clone)]
pub struct Report {
    /// The received bytes: the signature covers reserved bits, too.
    bytes: Box<[u8; LEN]>,
    /// 2 to 5.
    pub version: u32,
    /// The version of the guest, from its ID block.
    pub guest_svn: u32,
    /// The guest policy: what the guest allowed at its launch.
    pub policy: GuestPolicy,
    /// The family of the guest, from its ID block.
    pub family_id: [u8; 16],
    /// The image of the guest, from its ID block.
    pub image_id: [u8; 16],
    /// The privilege level of the software that requested the report: 0 to 3.
    pub vmpl: u32,
    /// The properties of the platform as bits.
    pub platform_info: u64,
    signer_info: u32,
    /// The data that the guest bound to the report.
    pub report_data: [u8; 64],
    /// The launch digest.
    pub measurement: [u8; 48],
    /// The data that the host bound at the launch.
    pub host_data: [u8; 32],
    /// SHA-384 of the key that signed the ID block; zero without one.
    pub id_key_digest: [u8; 48],
    /// SHA-384 of the key that certified the ID key; zero without one.
    pub author_key_digest: [u8; 48],
    /// The chip's family, model and stepping; since version 3.
    pub cpuid: Option<Cpuid>,
    /// The chip; zero if it is masked.
    pub chip_id: [u8; 64],
    /// The version of the running firmware.
    pub current_firmware: FirmwareVersion,
    /// The version below which the firmware never goes.
    pub committed_firmware: FirmwareVersion,
    /// The mitigations at the launch and now, as bits; since version 5.
    pub mitigations: Option<Mitigations>,
}

/// The guest policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestPolicy(pub u64);

/// The version of the firmware, in the order in which versions are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct FirmwareVersion {
    /// The major version of the ABI.
    pub major: u8,
    /// The minor version of the ABI.
    pub minor: u8,
    /// The build.
    pub build: u8,
}

/// The mitigation vectors. AMD's bulletins define the bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mitigations {
    /// At the launch of the guest.
    pub launch: u64,
    /// When the report was made.
    pub current: u64,
}

impl Report {
    /// Reads a report of exactly [`LEN`] bytes.
    pub fn parse(bytes: &[u8]) -> Result<Report, Refusal> {
        let bytes: Box<[u8; LEN]> = match <[u8; LEN]>::try_from(bytes) {
            Ok(bytes) => Box::new(bytes),
            Err(_) => {
                let len = bytes.len();
                return malformed(format!("the report has {len} bytes, expected {LEN}"));
            }
        };
        let version = word(&bytes, 0);
        if !(2..=5).contains(&version) {
            return malformed(format!(
                "the report has the version {version}, expected 2 to 5"
            ));
        }
        check_reserved(&bytes, version)?;
        let algorithm = word(&bytes, 0x34);
        if algorithm != ECDSA_P384_SHA384 {
            return malformed(format!(
                "the report names the signature algorithm {algorithm}, expected 1 (ECDSA P-384 with SHA-384)"
            ));
        }
        Ok(Report {
            version,
            guest_svn: word(&bytes, 4),
            policy: GuestPolicy::parse(u64::from_le_bytes(at(&bytes, 8)))?,
            family_id: at(&bytes, 0x10),
            image_id: at(&bytes, 0x20),
            vmpl: vmpl(word(&bytes, 0x30))?,
            platform_info: u64::from_le_bytes(at(&bytes, 0x40)),
            signer_info: word(&bytes, 0x48),
            report_data: at(&bytes, 0x50),
            measurement: at(&bytes, 0x90),
            host_data: at(&bytes, 0xc0),
            id_key_digest: at(&bytes, 0xe0),
            author_key_digest: at(&bytes, 0x110),
            cpuid: (version >= 3).then(|| {
                let [family, model, stepping] = at(&bytes, 0x188);
                Cpuid {
                    family,
                    model,
                    stepping,
                }
            }),
            chip_id: at(&bytes, 0x1a0),
            current_firmware: FirmwareVersion::parse(at(&bytes, 0x1e8)),
            committed_firmware: FirmwareVersion::parse(at(&bytes, 0x1ec)),
            mitigations: (version >= 5).then(|| Mitigations {
                launch: u64::from_le_bytes(at(&bytes, 0x1f8)),
                current: u64::from_le_bytes(at(&bytes, 0x200)),
            }),
            bytes,
        })
    }

    /// Returns the bytes that the chip signed.
    pub fn signed(&self) -> &[u8] {
        &self.bytes[SIGNED]
    }

    /// Returns the signature as ring expects it: r ‖ s, each 48 bytes, big endian; `None` if a
    /// number is longer.
    pub fn signature(&self) -> Option<[u8; 96]> {
        let mut signature = [0; 96];
        for (half, offset) in signature.chunks_exact_mut(48).zip([0x2a0, 0x2e8]) {
            let number: [u8; 72] = at(&self.bytes, offset);
            let (low, high) = number.split_at(48);
            if high.iter().any(|byte| *byte != 0) {
                return None;
            }
            half.copy_from_slice(low);
            half.reverse();
        }
        Some(signature)
    }

    /// Returns the kind of key that signed the report.
    pub fn signer(&self) -> Result<ReportSigner, Refusal> {
        ReportSigner::of(self.signer_info)
            .map_err(|error| Kind::Signature.because(error.to_string()))
    }

    /// Returns whether a key certified the ID key.
    pub fn has_author_key(&self) -> bool {
        self.signer_info & 1 != 0
    }

    /// Returns the properties of the platform for a person: the value, and the names of the bits
    /// that are set.
    pub fn platform_info(&self) -> String {
        with_names(self.platform_info, &PLATFORM_BITS)
    }

    /// Returns the chip ID in the report, as long as in certificates of this product.
    pub fn chip(&self, product: Product) -> Result<&[u8], Refusal> {
        if self.chip_id == [0; 64] {
            let text = "the host masks the chip in the report, so the machine must send the chip's certificate";
            return Err(Kind::Collateral.because(text).of("CHIP_ID"));
        }
        let len = match product {
            Product::Milan | Product::Genoa => 64,
            Product::Turin => 8,
        };
        let (chip, rest) = self.chip_id.split_at(len);
        if rest.iter().all(|byte| *byte == 0) {
            Ok(chip)
        } else {
            malformed(format!(
                "CHIP_ID in the report is longer than that of a {product}: expected {len} bytes, then zeros"
            ))
        }
    }

    /// Returns the TCB versions in the layout of the product.
    pub fn tcbs(&self, product: Product) -> Result<Tcbs, Refusal> {
        let tcb = |name, offset| {
            let tcb = Tcb::parse(at(&self.bytes, offset), product);
            tcb.map_err(|refusal| refusal.of(name).reworded(|why| format!("{name}: {why}")))
        };
        Ok(Tcbs {
            current: tcb("CURRENT_TCB", 0x38)?,
            reported: tcb("REPORTED_TCB", 0x180)?,
            committed: tcb("COMMITTED_TCB", 0x1e0)?,
            launch: tcb("LAUNCH_TCB", 0x1f0)?,
        })
    }
}

/// Refuses set bits in fields that the version does not define.
fn check_reserved(bytes: &[u8; LEN], version: u32) -> Result<(), Refusal> {
    let after_cpuid = if version == 2 { 0x188 } else { 0x18b };
    let before_signature = if version < 5 { 0x1f8 } else { 0x208 };
    for range in [
        0x4c..0x50,
        after_cpuid..0x1a0,
        0x1eb..0x1ec,
        0x1ef..0x1f0,
        before_signature..0x2a0,
        0x330..LEN,
    ] {
        if bytes[range.clone()].iter().any(|byte| *byte != 0) {
            return malformed(format!(
                "the reserved bytes {:#x} to {:#x} of the report are not zero",
                range.start,
                range.end - 1
            ));
        }
    }
    match word(bytes, 0x48) >> 5 {
        0 => Ok(()),
        _ => malformed("reserved bits of the signer info are set"),
    }
}

fn malformed<T>(text: impl Into<String>) -> Result<T, Refusal> {
    Err(Kind::Malformed.because(text))
}

fn vmpl(vmpl: u32) -> Result<u32, Refusal> {
    match vmpl {
        0..=3 => Ok(vmpl),
        HOST => {
            let text = "the host requested the report, so it proves nothing about the guest";
            Err(Kind::Binding.because(text).of("VMPL"))
        }
        _ => malformed(format!("the report has the VMPL {vmpl}, expected 0 to 3")),
    }
}

/// Returns the bytes at an offset of a report: each offset in this file is a constant and within
/// the report.
fn at<const N: usize>(bytes: &[u8; LEN], offset: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[offset..offset + N]);
    field
}

fn word(bytes: &[u8; LEN], offset: usize) -> u32 {
    u32::from_le_bytes(at(bytes, offset))
}

impl GuestPolicy {
    /// The bits that the ABI defines; of the bits above the ABI version, bit 17 is always 1.
    const DEFINED: u64 = (1 << 26) - 1;

    fn parse(bits: u64) -> Result<GuestPolicy, Refusal> {
        if bits & !GuestPolicy::DEFINED != 0 || bits >> 17 & 1 != 1 {
            return malformed(format!(
                "the guest policy {bits:#x} has wrong reserved bits"
            ));
        }
        Ok(GuestPolicy(bits))
    }

    /// Returns a bit.
    pub fn bit(self, bit: u32) -> bool {
        self.0 >> bit & 1 == 1
    }

    /// Returns the minimum version of the ABI that the guest demands: major, minor.
    pub fn abi(self) -> (u8, u8) {
        let [minor, major, ..] = self.0.to_le_bytes();
        (major, minor)
    }
}

impl FirmwareVersion {
    fn parse([build, minor, major]: [u8; 3]) -> FirmwareVersion {
        FirmwareVersion {
            major,
            minor,
            build,
        }
    }
}

impl fmt::Display for GuestPolicy {
    /// Writes the value, the minimum version of the ABI, and the names of the bits that are set.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = self.abi();
        let bits = with_names(self.0, &POLICY_BITS);
        write!(f, "{bits}, ABI {major}.{minor}")
    }
}

/// Returns a value and the names of its bits that are set.
fn with_names(value: u64, names: &[(u32, &str)]) -> String {
    let set = names.iter().filter(|(bit, _)| value >> bit & 1 == 1);
    let set: Vec<_> = set.map(|(_, name)| *name).collect();
    if set.is_empty() {
        format!("{value:#x}")
    } else {
        format!("{value:#x} ({})", set.join(", "))
    }
}

impl fmt::Display for FirmwareVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.build)
    }
}
