//! The binary header (LUKS2 specification §2.1), and the two copies of it that a [`Header`]
//! represents.

use std::ops::RangeInclusive;

use ring::digest;
use serde_json::Value;

use super::error::HeaderFault;
use super::json;
use super::layout::BINARY_LEN;
use base::crypto;
use base::text::hex;

/// Magic of the primary header; LUKS1 has the same magic and version 1.
const MAGIC_PRIMARY: &[u8; 6] = b"LUKS\xba\xbe";
/// Magic of the secondary header. It differs, so that no program takes this header for the start of
/// a disk.
const MAGIC_SECONDARY: &[u8; 6] = b"SKUL\xba\xbe";
/// The allowed sizes of one copy (binary header and JSON area) in bytes (specification, table 1):
/// powers of two.
const HDR_SIZES: RangeInclusive<u64> = 16 << 10..=4 << 20;

// Field offsets within the binary header; all numbers are big-endian.
const VERSION: usize = 6;
const SIZE: usize = 8;
const SEQID: usize = 16;
const LABEL: usize = 24;
const CHECKSUM_ALG: usize = 72;
const SALT: usize = 104;
const UUID: usize = 168;
const SUBSYSTEM: usize = 208;
const HDR_OFFSET: usize = 256;
const CHECKSUM: usize = 448;
const CHECKSUM_LEN: usize = 64;
const SHA256_LEN: usize = 32;

/// One of the two copies of the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Copy {
    Primary = 0,
    Secondary = 1,
}

impl Copy {
    pub fn name(self) -> &'static str {
        match self {
            Copy::Primary => "primary",
            Copy::Secondary => "secondary",
        }
    }
}

/// A LUKS2 header in memory whose checksum was valid. Later changes of the disk do not affect it.
///
/// The metadata is stored as it was read, so that a write preserves fields that this program does
/// not know.
#[derive(Clone)]
pub struct Header {
    pub(super) binary: Binary,
    pub(super) metadata: Value,
    /// Whether the copy on disk (primary, secondary) equals this header. A write starts with a copy
    /// that does not.
    pub(super) good: [bool; 2],
    /// Whether a write failed: then no copy may be written before the disk is probed again.
    pub(super) failed: bool,
}

/// The fields of the binary header that are equal in both copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Binary {
    /// Size in bytes of one copy.
    pub hdr_size: u64,
    /// The copy with the higher sequence id is the newer one.
    pub seqid: u64,
    pub label: [u8; 48],
    pub uuid: [u8; 40],
    pub subsystem: [u8; 48],
}

impl Header {
    /// Returns the UUID in lower case, as key derivation and kernel names require it.
    pub fn uuid(&self) -> String {
        text(&self.binary.uuid).to_lowercase()
    }

    /// Returns the sequence id, which counts the writes of this header.
    pub fn sequence_id(&self) -> u64 {
        self.binary.seqid
    }

    /// Returns SHA-256 over the content of the header. It does not depend on the copy that was
    /// read; different headers have different fingerprints.
    pub fn fingerprint(&self) -> [u8; SHA256_LEN] {
        let Binary {
            hdr_size,
            seqid,
            label,
            uuid,
            subsystem,
        } = &self.binary;
        let mut hash = digest::Context::new(&digest::SHA256);
        for field in [
            &hdr_size.to_be_bytes()[..],
            &seqid.to_be_bytes(),
            label,
            uuid,
            subsystem,
        ] {
            hash.update(field);
        }
        hash.update(json::to_text(&self.metadata).as_bytes());
        hash.finish()
            .as_ref()
            .try_into()
            .expect("SHA-256 has 32 bytes")
    }

    /// Returns the JSON metadata as it is on the disk.
    pub fn metadata(&self) -> &Value {
        &self.metadata
    }

    /// Returns whether both copies on disk are valid and current; if not, [`Header::repair`]
    /// rewrites them.
    pub fn copies_agree(&self) -> bool {
        self.good == [true; 2]
    }
}

impl Binary {
    /// Parses the fields of the binary header `bytes` from byte `at` of the device. Does not verify
    /// the checksum.
    ///
    /// The error says what is wrong with this copy.
    pub fn parse(bytes: &[u8; BINARY_LEN], copy: Copy, at: u64) -> Result<Self, HeaderFault> {
        let wrong = |why: String| Err(HeaderFault::Malformed(why));
        if !has_magic(bytes, copy) {
            return wrong("no LUKS magic".into());
        }
        let version = u16::from_be_bytes(field(bytes, VERSION));
        if version != 2 {
            return wrong(format!("LUKS version {version}, expected 2"));
        }
        let hdr_size = u64::from_be_bytes(field(bytes, SIZE));
        if !HDR_SIZES.contains(&hdr_size) || !hdr_size.is_power_of_two() {
            return wrong(format!(
                "header size {hdr_size}, expected a power of two from 16 KiB to 4 MiB"
            ));
        }
        let hdr_offset = u64::from_be_bytes(field(bytes, HDR_OFFSET));
        if hdr_offset != at {
            return wrong(format!("header offset {hdr_offset}, expected {at}"));
        }
        if copy == Copy::Secondary && hdr_size != at {
            return wrong(format!(
                "header size {hdr_size}, but the secondary header is at byte {at}"
            ));
        }
        let algorithm: [u8; 32] = field(bytes, CHECKSUM_ALG);
        if text(&algorithm) != "sha256" {
            return wrong(format!(
                "checksum algorithm {:?}, expected \"sha256\"",
                text(&algorithm)
            ));
        }
        Ok(Binary {
            hdr_size,
            seqid: u64::from_be_bytes(field(bytes, SEQID)),
            label: field(bytes, LABEL),
            uuid: field(bytes, UUID),
            subsystem: field(bytes, SUBSYSTEM),
        })
    }

    /// Returns the bytes of one copy: binary header with checksum, JSON, zeros; `None` if the JSON
    /// does not fit.
    pub fn encode(&self, copy: Copy, json: &str) -> Option<Vec<u8>> {
        let mut bytes = vec![0; self.hdr_size as usize];
        // the JSON ends with a zero byte
        if BINARY_LEN + json.len() >= bytes.len() {
            return None;
        }
        let (magic, at) = match copy {
            Copy::Primary => (MAGIC_PRIMARY, 0),
            Copy::Secondary => (MAGIC_SECONDARY, self.hdr_size),
        };
        let mut put = |offset: usize, field: &[u8]| {
            bytes[offset..offset + field.len()].copy_from_slice(field)
        };
        put(0, magic);
        put(VERSION, &2u16.to_be_bytes());
        put(SIZE, &self.hdr_size.to_be_bytes());
        put(SEQID, &self.seqid.to_be_bytes());
        put(LABEL, &self.label);
        put(CHECKSUM_ALG, b"sha256");
        // a random salt makes every written copy different
        put(SALT, &crypto::random::<64>());
        put(UUID, &self.uuid);
        put(SUBSYSTEM, &self.subsystem);
        put(HDR_OFFSET, &at.to_be_bytes());
        put(BINARY_LEN, json.as_bytes());
        let sum = checksum(&bytes);
        bytes[CHECKSUM..CHECKSUM + SHA256_LEN].copy_from_slice(&sum);
        Some(bytes)
    }
}

/// Returns whether `bytes` start with the magic of this copy of a LUKS header (of any version).
pub(super) fn has_magic(bytes: &[u8], copy: Copy) -> bool {
    bytes.starts_with(match copy {
        Copy::Primary => MAGIC_PRIMARY,
        Copy::Secondary => MAGIC_SECONDARY,
    })
}

/// Returns the possible offsets of the secondary header: one for each size of the primary header.
pub(super) fn secondary_offsets() -> impl Iterator<Item = u64> {
    std::iter::successors(Some(*HDR_SIZES.start()), |size| Some(size * 2))
        .take_while(|size| HDR_SIZES.contains(size))
}

/// Returns whether the checksum of a copy (binary header and JSON area) is valid.
pub(super) fn checksum_holds(whole: &[u8]) -> bool {
    // no comparison in constant time: the checksum is not secret
    whole.len() >= BINARY_LEN && whole[CHECKSUM..CHECKSUM + SHA256_LEN] == checksum(whole)
}

/// Returns SHA-256 over a copy whose checksum field is replaced with zeros (specification §2.1).
fn checksum(whole: &[u8]) -> [u8; SHA256_LEN] {
    let mut hash = digest::Context::new(&digest::SHA256);
    hash.update(&whole[..CHECKSUM]);
    hash.update(&[0; CHECKSUM_LEN]);
    hash.update(&whole[CHECKSUM + CHECKSUM_LEN..]);
    hash.finish()
        .as_ref()
        .try_into()
        .expect("SHA-256 has 32 bytes")
}

/// Returns the text of a field that is padded with zero bytes.
pub(super) fn text(field: &[u8]) -> String {
    let end = field.iter().position(|b| *b == 0).unwrap_or(field.len());
    String::from_utf8_lossy(&field[..end]).into_owned()
}

fn field<const N: usize>(bytes: &[u8; BINARY_LEN], offset: usize) -> [u8; N] {
    bytes[offset..offset + N]
        .try_into()
        .expect("every field lies within the binary header")
}

/// Returns a random (version 4) UUID as text (RFC 9562 §5.4).
pub(super) fn random_uuid() -> String {
    let mut bytes = crypto::random::<16>();
    bytes[6] = bytes[6] & 0x0f | 0x40;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex = hex(&bytes);
    [
        &hex[..8],
        &hex[8..12],
        &hex[12..16],
        &hex[16..20],
        &hex[20..],
    ]
    .join("-")
}

/// Returns whether `text` is a UUID: 8-4-4-4-12 hexadecimal digits.
pub(super) fn is_uuid(text: &str) -> bool {
    text.len() == 36
        && text.bytes().enumerate().all(|(i, b)| match i {
            8 | 13 | 18 | 23 => b == b'-',
            _ => b.is_ascii_hexdigit(),
        })
}
