//! The ext4 file system on a newly mapped disk, made in the same time on a small disk and on a big one.
//!
//! On a mapping with integrity a block that was never written cannot be read, and mke2fs reads before it writes. Writing the whole
//! disk first would help and takes minutes. Instead mke2fs works on a sparse file in memory of the mapping's exact size; what it
//! wrote (a few MiB: superblocks, group descriptors, bitmaps, directories) is copied to the disk, and of the rest only
//! what somebody may read before it is written:
//!
//! | blocks | on the disk | why that is enough |
//! |---|---|---|
//! | all that mke2fs wrote | copied | |
//! | journal | zeroes | after a power failure, recovery reads on behind the last commit until it finds something that is none |
//! | start and end of the disk | zeroes where nothing else is | programs that look for signatures (blkid, udev) read there |
//! | bitmaps and inode tables of unused groups | never written | the group descriptors mark them uninitialised: kernel and e2fsck make them up; the kernel zeroes the tables in the background after the first mount |
//! | free data blocks | never written | ext4 reads a data block only after it wrote it; holes and preallocated blocks read as zeroes without the disk |
//!
//! So whoever reads the disk through the file system never meets a block that was not written, nor does e2fsck. Whoever reads free
//! blocks of the mapped device directly (`dd`, an imaging program) gets `EIO` for them, and the kernel logs `INTEGRITY AEAD ERROR`.
//! It also logs that, and nobody gets an error, when a program reads the device through the page cache (e2fsck, blkid) and the
//! kernel's read-ahead runs into such blocks; `blockdev --setra 0` before it keeps the log clean.
//!
//! The first block, with the superblock, is written last, after everything else is durable: a power failure leaves either no
//! file system or a whole one.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sys::block::{self, PageBuffer};
use sys::mount::{self as sys_mount, Flags};

/// File system block, and granularity of everything that is copied: a sector of the encryption, a page.
const BLOCK: u64 = 4096;
/// Smallest mapping that is formatted, with a journal and room behind it.
const SMALLEST: u64 = 32 << 20;
/// Largest journal. mke2fs would take up to 1 GiB on a big disk, all of which would have to be written here (see above).
const JOURNAL_MAX_MIB: u64 = 32;
/// A journal takes at most this part of the disk.
const JOURNAL_PART: u64 = 16;
/// mke2fs's smallest journal: 1024 blocks.
const JOURNAL_MIN_MIB: u64 = 4;
/// How much at the start of the disk libblkid 2.38 looks at: up to a sector at 4 MiB, whatever the disk's size.
const PROBED_START: u64 = (4 << 20) + BLOCK;
/// The same at the end: it starts 3087 sectors of 512 bytes before (Promise RAID).
const PROBED_END: u64 = 2 << 20;
/// Bytes a write; one such buffer is all the memory that copying takes.
const CHUNK: usize = 1 << 20;
/// Of what mke2fs prints, this many characters go into an error.
const OUTPUT_MAX: usize = 500;

/// Makes an ext4 file system on the device at `mapped`, whatever it holds, with the program `mke2fs` (e2fsprogs 1.45 or later).
/// Durable on return. Takes memory while it runs: 5 MiB for a disk of 64 GiB, 29 MiB for 2 TiB.
pub fn create(mapped: &Path, mke2fs: &Path) -> Result<(), Error> {
    let failed = |doing| {
        move |error| Error::Device {
            device: mapped.into(),
            doing,
            error,
        }
    };
    let device = block::open_direct(mapped).map_err(failed("open it for writing"))?;
    let size = block::size(&device).map_err(failed("ask for its size"))? / BLOCK * BLOCK;
    if size < SMALLEST {
        return Err(Error::TooSmall {
            device: mapped.into(),
            size,
        });
    }
    let image = block::memory_file(c"ext4").map_err(failed("make a file in memory for mke2fs"))?;
    image
        .set_len(size)
        .map_err(failed("make a file in memory for mke2fs"))?;
    run_mke2fs(mke2fs, &image, size)?;

    let mut extents = data_extents(&image).map_err(failed("read what mke2fs made"))?;
    let superblock = read_superblock(&image).map_err(failed("read what mke2fs made"))?;
    extents.extend(journal(&superblock).map_err(|reason| Error::Unexpected { reason })?);
    extents.push(0..PROBED_START);
    extents.push(size - PROBED_END..size);
    copy(&image, &device, union(extents, size)).map_err(failed("write the file system"))
}

/// Mounts the file system at the directory `at`, made if it is not there; devices and set-user-ID programs in it count.
pub fn mount(mapped: &Path, at: &Path, read_only: bool) -> Result<(), Error> {
    let flags = Flags {
        read_only,
        ..Flags::default()
    };
    std::fs::create_dir_all(at)
        .and_then(|()| sys_mount::mount(mapped, at, "ext4", flags, ""))
        .map_err(|error| Error::Mount {
            device: mapped.into(),
            at: at.into(),
            error,
        })
}

/// Unmounts what is mounted at `at`; what was written is on the disk afterwards.
pub fn unmount(at: &Path) -> Result<(), Error> {
    sys_mount::unmount(at).map_err(|error| Error::Unmount {
        at: at.into(),
        error,
    })
}

/// mke2fs opens its standard input anew, as a file: no name in a file system, no descriptor number to agree on.
fn run_mke2fs(mke2fs: &Path, image: &File, size: u64) -> Result<(), Error> {
    let failed = |reason: String| Error::Mke2fs {
        program: mke2fs.into(),
        reason,
    };
    let journal = ((size / JOURNAL_PART) >> 20).clamp(JOURNAL_MIN_MIB, JOURNAL_MAX_MIB);
    let output = Command::new(mke2fs)
        .args(["-q", "-F", "-t", "ext4", "-b", "4096"])
        .args(["-J".as_ref(), OsStr::new(&format!("size={journal}"))])
        .args([
            "-E",
            "nodiscard,lazy_itable_init=1,lazy_journal_init=1",
            "/proc/self/fd/0",
        ])
        .env("LC_ALL", "C")
        .stdin(
            image
                .try_clone()
                .map_err(|error| failed(error.to_string()))?,
        )
        .stdout(Stdio::null())
        .output()
        .map_err(|error| {
            failed(format!(
                "cannot be started: {error}; is e2fsprogs in the image?"
            ))
        })?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr)
        .trim()
        .replace('\n', "; ");
    let text: String = text.chars().take(OUTPUT_MAX).collect();
    Err(failed(format!("ended with {}: {text}", output.status)))
}

/// Everything that is not a hole.
fn data_extents(image: &File) -> io::Result<Vec<Range<u64>>> {
    let mut extents = Vec::new();
    let mut at = 0;
    while let Some(start) = block::next_data(image, at)? {
        at = block::next_hole(image, start)?;
        extents.push(start..at);
    }
    Ok(extents)
}

/// The ext4 superblock: 1024 bytes at offset 1024.
fn read_superblock(image: &File) -> io::Result<[u8; 1024]> {
    let mut bytes = [0; 1024];
    image.read_exact_at(&mut bytes, 1024)?;
    Ok(bytes)
}

/// Where the journal lies: the superblock has a copy of the journal inode's extent tree (s_jnl_blocks at 0x10c; the kernel's
/// Documentation/filesystems/ext4, "Super Block" and "Extent Tree"). Its root holds up to 4 extents, and a new file system has the
/// journal in one piece wherever that is possible.
fn journal(superblock: &[u8; 1024]) -> Result<Vec<Range<u64>>, String> {
    let u16_at = |at: usize| u16::from_le_bytes([superblock[at], superblock[at + 1]]);
    let u32_at = |at: usize| u32::from(u16_at(at)) | u32::from(u16_at(at + 2)) << 16;
    const S_MAGIC: usize = 0x38;
    const S_JNL_BLOCKS: usize = 0x10c;
    const ENTRY_LEN: usize = 12;
    if u16_at(S_MAGIC) != 0xef53 {
        return Err("it is not an ext4 file system".into());
    }
    let (magic, entries, depth) = (
        u16_at(S_JNL_BLOCKS),
        usize::from(u16_at(S_JNL_BLOCKS + 2)),
        u16_at(S_JNL_BLOCKS + 6),
    );
    if magic != 0xf30a || !(1..=4).contains(&entries) || depth != 0 {
        return Err(format!(
            "its journal's extents are not in the superblock (magic {magic:#x}, {entries}, depth {depth})"
        ));
    }
    Ok((1..=entries)
        .map(|entry| {
            let at = S_JNL_BLOCKS + ENTRY_LEN * entry;
            let start = (u64::from(u16_at(at + 6)) << 32 | u64::from(u32_at(at + 8))) * BLOCK;
            // more than 32768 means allocated and not written, length less 32768
            let len = match u16_at(at + 4) {
                unwritten @ 32769.. => unwritten - 32768,
                written => written,
            };
            start..start + u64::from(len) * BLOCK
        })
        .collect())
}

/// The same blocks in order, each once, within the device.
fn union(mut extents: Vec<Range<u64>>, size: u64) -> Vec<Range<u64>> {
    let mut merged: Vec<Range<u64>> = Vec::new();
    for extent in &mut extents {
        *extent = extent.start / BLOCK * BLOCK
            ..extent.end.div_ceil(BLOCK).saturating_mul(BLOCK).min(size);
    }
    extents.sort_by_key(|extent| extent.start);
    for extent in extents.into_iter().filter(|extent| !extent.is_empty()) {
        match merged.last_mut() {
            Some(last) if extent.start <= last.end => last.end = last.end.max(extent.end),
            _ => merged.push(extent),
        }
    }
    merged
}

/// Writes `extents` of the image to the device: the first block last, and each side of it durable.
fn copy(image: &File, device: &File, extents: Vec<Range<u64>>) -> io::Result<()> {
    let mut buffer = PageBuffer::new(CHUNK);
    for extent in extents {
        let mut at = extent.start.max(BLOCK);
        while at < extent.end {
            let len = (extent.end - at).min(CHUNK as u64);
            copy_piece(image, device, at, &mut buffer.bytes_mut()[..len as usize])?;
            at += len;
        }
    }
    device.sync_all()?;
    copy_piece(image, device, 0, &mut buffer.bytes_mut()[..BLOCK as usize])?;
    device.sync_all()
}

fn copy_piece(image: &File, device: &File, at: u64, buffer: &mut [u8]) -> io::Result<()> {
    image.read_exact_at(buffer, at)?;
    device.write_all_at(buffer, at)
}

/// Why there is no file system, or it is not mounted.
#[derive(Debug)]
pub enum Error {
    /// The mapped device does not do what it should
    Device {
        /// the mapped device
        device: PathBuf,
        /// what was attempted
        doing: &'static str,
        /// the system's answer
        error: io::Error,
    },
    /// No room for a file system
    TooSmall {
        /// the mapped device
        device: PathBuf,
        /// its bytes
        size: u64,
    },
    /// The child process failed
    Mke2fs {
        /// its path
        program: PathBuf,
        /// how it failed, with what it printed
        reason: String,
    },
    /// mke2fs made something that we do not understand
    Unexpected {
        /// what is different
        reason: String,
    },
    /// mount(2) failed
    Mount {
        /// the mapped device
        device: PathBuf,
        /// the mount point
        at: PathBuf,
        /// the kernel's answer
        error: io::Error,
    },
    /// umount(2) failed
    Unmount {
        /// the mount point
        at: PathBuf,
        /// the kernel's answer
        error: io::Error,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Device {
                device,
                doing,
                error,
            } => write!(f, "{}: cannot {doing}: {error}", device.display()),
            Error::TooSmall { device, size } => {
                write!(
                    f,
                    "{}: {size} bytes are too few for a file system, it takes {SMALLEST}",
                    device.display()
                )
            }
            Error::Mke2fs { program, reason } => {
                write!(f, "no file system: {} {reason}", program.display())
            }
            Error::Unexpected { reason } => {
                write!(
                    f,
                    "mke2fs made a file system that cannot be copied to the disk: {reason}"
                )
            }
            Error::Mount { device, at, error } => {
                write!(
                    f,
                    "cannot mount the ext4 of {} at {}: {error}; the kernel's log (dmesg) has the reason",
                    device.display(),
                    at.display()
                )
            }
            Error::Unmount { at, error } => write!(f, "cannot unmount {}: {error}", at.display()),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    const MKE2FS: &str = "/sbin/mke2fs";

    fn disk(len: u64) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(len).unwrap();
        file
    }

    #[test]
    fn e2fsck_finds_nothing_wrong_and_what_must_be_readable_is_written() {
        for len in [SMALLEST, 64 << 20, 1 << 30] {
            let disk = disk(len);
            create(disk.path(), Path::new(MKE2FS)).unwrap();

            let check = Command::new("/sbin/e2fsck")
                .args(["-f", "-n"])
                .arg(disk.path())
                .output()
                .unwrap();
            assert!(
                check.status.success(),
                "{len}: {}",
                String::from_utf8_lossy(&check.stdout)
            );

            let written = data_extents(disk.as_file()).unwrap();
            let mut needed = journal(&read_superblock(disk.as_file()).unwrap()).unwrap();
            let journal_len: u64 = needed.iter().map(|extent| extent.end - extent.start).sum();
            assert!(
                (JOURNAL_MIN_MIB << 20..=JOURNAL_MAX_MIB << 20).contains(&journal_len),
                "{len}: {journal_len}"
            );
            needed.extend([0..PROBED_START, len - PROBED_END..len]);
            for extent in needed {
                assert!(
                    written
                        .iter()
                        .any(|data| data.start <= extent.start && extent.end <= data.end),
                    "{len}: {extent:?} is not in {written:?}"
                );
            }
        }
    }

    #[test]
    fn a_failing_mke2fs_is_named_with_what_it_printed() {
        let disk = disk(SMALLEST);
        let error = create(disk.path(), Path::new("/bin/ls"))
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("no file system: /bin/ls ended with exit status: 2: /bin/ls: "),
            "{error}"
        );
        let error = create(disk.path(), Path::new("/no/such/program"))
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("no file system: /no/such/program cannot be started: "),
            "{error}"
        );
        let error = create(disk.path(), Path::new("/bin/true"))
            .unwrap_err()
            .to_string();
        assert!(error.contains("it is not an ext4 file system"), "{error}");
        assert_eq!(
            data_extents(disk.as_file()).unwrap(),
            [],
            "the disk is untouched"
        );
    }

    #[test]
    fn a_disk_too_small_is_refused() {
        let error = create(disk(SMALLEST - 1).path(), Path::new(MKE2FS)).unwrap_err();
        assert!(
            matches!(error, Error::TooSmall { size, .. } if size == SMALLEST - BLOCK),
            "{error}"
        );
    }

    #[test]
    fn extents_are_merged_aligned_and_cut_to_the_device() {
        let extents = vec![
            8192..8200,
            0..1,
            4096..8192,
            20480..u64::MAX - 8192,
            16384..16384,
            1 << 60..1 << 61,
        ];
        assert_eq!(union(extents, 28672), [0..12288, 20480..28672]);
    }

    #[test]
    fn no_mutated_superblock_leads_outside_the_device() {
        let disk = disk(64 << 20);
        run_mke2fs(Path::new(MKE2FS), disk.as_file(), 64 << 20).unwrap();
        let superblock = read_superblock(disk.as_file()).unwrap();
        let mut next = support::mutation::numbers();
        for _ in 0..20_000 {
            let mut bytes = superblock;
            for _ in 0..=next() % 4 {
                bytes[0x10c + (next() % 64) as usize] = next() as u8;
            }
            if let Ok(extents) = journal(&bytes) {
                assert!(
                    union(extents, 64 << 20)
                        .iter()
                        .all(|extent| extent.end <= 64 << 20)
                );
            }
        }
    }
}
