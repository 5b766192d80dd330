//! Determines what is on a device: nothing, LUKS2, an interrupted format of ours, or something
//! else.

use std::fmt;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;

use serde_json::Value;

use super::device::read_at;
use super::error::{Error, HeaderFault, io_error};
use super::header::{Binary, Copy, Header, checksum_holds, has_magic, secondary_offsets};
use super::json;
use super::layout::{BINARY_LEN, DATA_OFFSET, FIRST_AREA, MARKER, MARKER_OFFSET, UNFINISHED_AREAS};

/// A device is blank if its first 17 MiB (the header area of a LUKS2 disk and the start of its
/// data) contain only zeros,
const HEAD: u64 = DATA_OFFSET + (1 << 20);
/// and its last MiB, where GPT and Linux RAID store metadata, contains only zeros.
const TAIL: u64 = 1 << 20;
/// Bytes per read in the search for a byte that is not zero.
const CHUNK: usize = 256 << 10;
/// Bytes at the start of the device that contain the known signatures of other formats.
const SIGNATURES_LEN: u64 = 256 << 10;

/// The result of [`probe`].
#[derive(Debug)]
pub enum Probe {
    /// The first 17 MiB and the last MiB are zeros.
    Blank,
    /// A [`format`](super::format) of a blank disk was interrupted. The disk holds no data.
    Unfinished,
    /// A LUKS2 header with at least one valid copy; [`Header::check_ours`] decides whether it is
    /// that of a state disk.
    Luks(Header),
    /// Something else: the text names it, e.g. "an ext2, ext3 or ext4 file system", or says how a
    /// LUKS2 header is damaged.
    Unknown(String),
}

/// Determines what is on `dev`. Reads at most 26 MiB; the only error is [`Error::Io`].
///
/// A copy is valid if its checksum is correct and its metadata is valid LUKS2. Of two valid copies,
/// the copy with the higher sequence id is used. If only one copy is valid, it is used, unless the
/// signature of another format in the place of the primary header shows that the disk has a new
/// purpose.
pub fn probe(dev: &mut (impl Read + Seek)) -> Result<Probe, Error> {
    probe_io(dev).map_err(io_error("read the disk to determine its content"))
}

fn probe_io(dev: &mut (impl Read + Seek)) -> io::Result<Probe> {
    let size = dev.seek(SeekFrom::End(0))?;
    let primary = read_copy(dev, size, Copy::Primary, 0);
    let secondary = read_secondary(dev, size, &primary);
    if !primary.is_whole() {
        // only in the area of the headers: the random bytes of a keyslot may contain any signature
        let head = match head(dev, size, FIRST_AREA) {
            // what can be read of the primary header is LUKS, or nothing can
            Err(_) if !primary.is_absent() && secondary.is_whole() => vec![],
            head => head?,
        };
        if let Some(what) = signature(&head) {
            return Ok(Probe::Unknown(what.into()));
        }
    }
    if let Some(header) = newer(&primary, &secondary) {
        return Ok(Probe::Luks(header));
    }
    if is_unfinished(dev, size)? {
        return Ok(Probe::Unfinished);
    }
    if let Some(what) = signature(&head(dev, size, SIGNATURES_LEN)?) {
        return Ok(Probe::Unknown(what.into()));
    }
    if !(primary.is_absent() && secondary.is_absent()) {
        let what = format!(
            "an unusable LUKS header (primary copy: {primary}; secondary copy: {secondary}): the data is lost unless you restore \
             the header (cryptsetup luksHeaderRestore)"
        );
        return Ok(Probe::Unknown(what));
    }
    Ok(match first_nonzero_outside(dev, size, &[])? {
        None => Probe::Blank,
        Some(at) => Probe::Unknown(format!(
            "data of an unknown kind (the first byte that is not zero is byte {at})"
        )),
    })
}

/// Reads the first `len` bytes of the device, or fewer if the device is shorter.
fn head(dev: &mut (impl Read + Seek), size: u64, len: u64) -> io::Result<Vec<u8>> {
    let mut head = vec![0; len.min(size) as usize];
    read_at(dev, 0, &mut head)?;
    Ok(head)
}

/// One copy of the header, as found on the device.
enum Found {
    /// No LUKS magic.
    Absent,
    /// The magic is present, or cannot be read; the text says what is wrong with the rest.
    Damaged(HeaderFault),
    /// The checksum is correct, but the metadata is invalid; the text gives the reason.
    Invalid(Binary, HeaderFault),
    Whole(Binary, Value),
}

impl Found {
    fn is_absent(&self) -> bool {
        matches!(self, Found::Absent)
    }

    fn is_whole(&self) -> bool {
        matches!(self, Found::Whole(..))
    }

    /// Returns the binary header if the checksum is correct.
    fn binary(&self) -> Option<&Binary> {
        match self {
            Found::Invalid(binary, _) | Found::Whole(binary, _) => Some(binary),
            Found::Absent | Found::Damaged(_) => None,
        }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Found::Absent => f.write_str("no LUKS magic"),
            Found::Damaged(why) | Found::Invalid(_, why) => why.fmt(f),
            Found::Whole(..) => f.write_str("whole"),
        }
    }
}

/// Reads a copy. One that cannot be read is damaged: the other one may be whole.
fn read_copy(dev: &mut (impl Read + Seek), size: u64, copy: Copy, at: u64) -> Found {
    let read = try_copy(dev, size, copy, at);
    read.unwrap_or_else(|error| {
        Found::Damaged(HeaderFault::Malformed(format!(
            "it cannot be read: {error}"
        )))
    })
}

fn try_copy(dev: &mut (impl Read + Seek), size: u64, copy: Copy, at: u64) -> io::Result<Found> {
    if size < at + BINARY_LEN as u64 {
        return Ok(Found::Absent);
    }
    let mut bytes = [0; BINARY_LEN];
    read_at(dev, at, &mut bytes)?;
    if !has_magic(&bytes, copy) {
        return Ok(Found::Absent);
    }
    let binary = match Binary::parse(&bytes, copy, at) {
        Ok(binary) => binary,
        Err(why) => return Ok(Found::Damaged(why)),
    };
    if size < at + binary.hdr_size {
        return Ok(Found::Damaged(HeaderFault::Malformed(format!(
            "its {} bytes extend beyond the end of the device",
            binary.hdr_size
        ))));
    }
    // at most 4 MiB: Binary::parse limits the size
    let mut whole = vec![0; binary.hdr_size as usize];
    read_at(dev, at, &mut whole)?;
    if !checksum_holds(&whole) || whole[..BINARY_LEN] != bytes {
        return Ok(Found::Damaged(HeaderFault::Malformed(
            "its checksum is wrong".into(),
        )));
    }
    Ok(match json::parse(&whole[BINARY_LEN..]) {
        Ok(metadata) => Found::Whole(binary, metadata),
        Err(why) => Found::Invalid(binary, why),
    })
}

/// Finds the secondary header in the same way as libcryptsetup: at the offset that a primary header
/// with correct checksum gives; else the first one with correct checksum, or the first damaged one.
fn read_secondary(dev: &mut (impl Read + Seek), size: u64, primary: &Found) -> Found {
    if let Some(binary) = primary.binary() {
        return read_copy(dev, size, Copy::Secondary, binary.hdr_size);
    }
    let mut best = Found::Absent;
    for at in secondary_offsets() {
        let found = read_copy(dev, size, Copy::Secondary, at);
        if found.binary().is_some() {
            return found;
        }
        if best.is_absent() {
            best = found;
        }
    }
    best
}

/// Returns the header of the newer valid copy, or the primary header if both are equal, as in
/// libcryptsetup.
fn newer(primary: &Found, secondary: &Found) -> Option<Header> {
    let (binary, metadata, good) = match (primary, secondary) {
        (Found::Whole(first, json), Found::Whole(second, _)) if first.seqid > second.seqid => {
            log::warn!(
                "the secondary LUKS2 header is older than the primary header; the primary header is used"
            );
            (first, json, [true, false])
        }
        (Found::Whole(first, _), Found::Whole(second, json)) if first.seqid < second.seqid => {
            log::warn!(
                "the primary LUKS2 header is older than the secondary header; the secondary header is used"
            );
            (second, json, [false, true])
        }
        (Found::Whole(first, json), Found::Whole(second, other)) => {
            (first, json, [true, first == second && json == other])
        }
        (Found::Whole(binary, json), damaged) => {
            log::warn!(
                "the secondary LUKS2 header is unusable ({damaged}); the primary header is used"
            );
            (binary, json, [true, false])
        }
        (damaged, Found::Whole(binary, json)) => {
            log::warn!(
                "the primary LUKS2 header is unusable ({damaged}); the secondary header is used"
            );
            (binary, json, [false, true])
        }
        _ => return None,
    };
    Some(Header {
        binary: binary.clone(),
        metadata: metadata.clone(),
        good,
        failed: false,
    })
}

/// Returns whether the device contains only what an interrupted format of a blank disk has written.
/// The caller has checked that there is no valid header and no signature of another format within
/// the first [`FIRST_AREA`] bytes.
fn is_unfinished(dev: &mut (impl Read + Seek), size: u64) -> io::Result<bool> {
    if size < DATA_OFFSET {
        return Ok(false);
    }
    let mut marker = MARKER;
    marker.fill(0);
    read_at(dev, MARKER_OFFSET, &mut marker)?;
    Ok(marker == MARKER && first_nonzero_outside(dev, size, &UNFINISHED_AREAS)?.is_none())
}

/// Returns the first byte in head and tail of the device that is not zero and not in the sorted
/// ranges `except`.
fn first_nonzero_outside(
    dev: &mut (impl Read + Seek),
    size: u64,
    except: &[Range<u64>],
) -> io::Result<Option<u64>> {
    let mut from = 0;
    for hole in except {
        if let Some(at) = first_nonzero(dev, from..hole.start.min(size))? {
            return Ok(Some(at));
        }
        from = hole.end;
    }
    let head_end = HEAD.min(size);
    if let Some(at) = first_nonzero(dev, from..head_end)? {
        return Ok(Some(at));
    }
    first_nonzero(dev, size.saturating_sub(TAIL).max(head_end)..size)
}

/// Returns the first byte in `range` that is not zero.
fn first_nonzero(dev: &mut (impl Read + Seek), range: Range<u64>) -> io::Result<Option<u64>> {
    let zeros = vec![0u8; CHUNK];
    let mut buf = vec![0u8; CHUNK];
    let mut at = range.start;
    while at < range.end {
        let len = (range.end - at).min(CHUNK as u64) as usize;
        read_at(dev, at, &mut buf[..len])?;
        // comparing slices is a memcmp, which is faster than a loop over bytes
        if buf[..len] != zeros[..len] {
            let offset = buf[..len].iter().position(|b| *b != 0).unwrap_or_default();
            return Ok(Some(at + offset as u64));
        }
        at += len as u64;
    }
    Ok(None)
}

/// Signatures of other formats: offset, bytes, name. The offsets are from the documentation of each
/// format (UEFI specification for GPT; kernel headers for Linux file systems). More specific
/// signatures come first.
const SIGNATURES: &[(usize, &[u8], &str)] = &[
    (512, b"EFI PART", "a GPT partition table"),
    (4096, b"EFI PART", "a GPT partition table"),
    (0, b"XFSB", "an XFS file system"),
    (1080, b"\x53\xef", "an ext2, ext3 or ext4 file system"),
    (65600, b"_BHRfS_M", "a btrfs file system"),
    (1024, b"\x10\x20\xf5\xf2", "an F2FS file system"),
    (1024, b"\xe2\xe1\xf5\xe0", "an EROFS file system"),
    (0, b"hsqs", "a squashfs file system"),
    (65588, b"ReIsEr", "a ReiserFS file system"),
    (32768, b"JFS1", "a JFS file system"),
    (32769, b"CD001", "an ISO 9660 file system"),
    (
        4120,
        b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81",
        "a bcache or bcachefs disk",
    ),
    (0, b"LABELONE", "an LVM physical volume"),
    (512, b"LABELONE", "an LVM physical volume"),
    (1024, b"LABELONE", "an LVM physical volume"),
    (1536, b"LABELONE", "an LVM physical volume"),
    (4086, b"SWAPSPACE2", "swap space"),
    (4086, b"SWAP-SPACE", "swap space"),
    (0, b"\xfc\x4e\x2b\xa9", "a member of a Linux RAID"),
    (4096, b"\xfc\x4e\x2b\xa9", "a member of a Linux RAID"),
    (0, b"integrt\0", "a dm-integrity device without LUKS"),
    (0, b"verity\0\0", "a dm-verity hash device"),
    (0, b"bluestore block device", "a Ceph BlueStore device"),
    (0, b"QFI\xfb", "a qcow2 image given as a raw disk"),
    (3, b"-FVE-FS-", "a BitLocker volume"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (
        0,
        b"LUKS\xba\xbe\x00\x01",
        "a LUKS1 header; state disks are LUKS2",
    ),
    (510, b"\x55\xaa", "an MBR partition table or a boot sector"),
];
/// ZFS: uberblocks of the first label, from 128 to 256 KiB, at least 1 KiB apart, in either byte
/// order.
const ZFS_UBERBLOCKS: Range<usize> = 128 << 10..256 << 10;
const ZFS_MAGIC: [[u8; 8]; 2] = [0x00ba_b10c_u64.to_le_bytes(), 0x00ba_b10c_u64.to_be_bytes()];

/// Returns the name of another format whose signature is in `head`, the start of the disk.
fn signature(head: &[u8]) -> Option<&'static str> {
    let has = |offset: usize, bytes: &[u8]| {
        head.get(offset..)
            .is_some_and(|rest| rest.starts_with(bytes))
    };
    let plain = SIGNATURES
        .iter()
        .find(|(offset, bytes, _)| has(*offset, bytes))
        .map(|(_, _, name)| *name);
    let zfs = || {
        ZFS_UBERBLOCKS
            .step_by(1024)
            .any(|offset| ZFS_MAGIC.iter().any(|magic| has(offset, magic)))
            .then_some("a ZFS disk")
    };
    plain.or_else(zfs)
}
