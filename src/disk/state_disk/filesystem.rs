//! Makes the ext4 file system on a newly mapped disk. The time does not depend on the size of the
//! disk.
//!
//! On a mapping with integrity, a block that was never written cannot be read, and mke2fs reads
//! before it writes. Writing the whole disk first would take minutes. Instead mke2fs works on a
//! sparse file in memory that has the exact size of the mapping. What it wrote (a few MiB:
//! superblocks, group descriptors, bitmaps, directories) is copied to the disk. Of the other
//! blocks, only those are written that a program may read before it writes them:
//!
//! | blocks | on the disk | reason |
//! |---|---|---|
//! | all that mke2fs wrote | copied | |
//! | journal | zeros | after a power failure, recovery reads behind the last commit until it finds a block that is no commit |
//! | start and end of the disk | zeros where mke2fs wrote nothing | programs that search for signatures (blkid, udev) read there |
//! | bitmaps and inode tables of unused groups | never written | the group descriptors mark them as uninitialized: kernel and e2fsck do not read them; the kernel zeros the tables in the background after the first mount |
//! | free data blocks | never written | ext4 reads a data block only after it wrote the block; holes and preallocated blocks read as zeros without access to the disk |
//!
//! So neither the file system nor e2fsck reads a block that was not written. A program that reads
//! free blocks of the mapped device directly (`dd`, an imaging program) gets `EIO`, and the kernel
//! logs `INTEGRITY AEAD ERROR`. The kernel logs the same, without an error for the program, when a
//! program reads the device through the page cache (e2fsck, blkid) and read-ahead reaches such
//! blocks; `blockdev --setra 0` prevents these messages.
//!
//! The first block, which contains the superblock, is written last, after all other blocks are
//! durable: after a power failure there is no file system or a complete one.

use std::ffi::OsStr;
use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use base::child_process::{self, ChildFailure};
use base::stop::Stop;
use sys::block::{self, PageBuffer};
use sys::mount as sys_mount;

/// Block size of the file system in bytes. All copies are multiples of it; it is also the
/// encryption sector and the page size.
const BLOCK: u64 = 4096;
/// Minimum size of the mapping in bytes: a journal and some space for data.
pub(super) const MIN_SIZE: u64 = 32 << 20;
/// Maximum size of the journal. mke2fs uses up to 1 GiB on a large disk, and all of it would have
/// to be written (see above).
const JOURNAL_MAX_MIB: u64 = 32;
/// The journal takes at most one part in this many of the disk.
const JOURNAL_PART: u64 = 16;
/// Minimum size of a journal that mke2fs makes: 1024 blocks.
const JOURNAL_MIN_MIB: u64 = 4;
/// Bytes at the start of the disk that libblkid 2.38 reads: up to a sector at 4 MiB, for every size
/// of disk.
const PROBED_START: u64 = (4 << 20) + BLOCK;
/// Bytes at the end of the disk that libblkid reads: at most 3087 sectors of 512 bytes (Promise
/// RAID).
const PROBED_END: u64 = 2 << 20;
/// Bytes per write. Copying needs one buffer of this size.
const CHUNK: usize = 1 << 20;
/// Time limit for mke2fs, which works in memory: it needs less than a second, for 2 TiB some
/// seconds.
const MKE2FS_LIMIT: Duration = Duration::from_secs(5 * 60);

/// Makes an ext4 file system on the device `mapped` with the program `mke2fs` (e2fsprogs 1.45 or
/// later), and overwrites what the device holds. The file system is durable on return. Needs 5 MiB
/// of memory for a disk of 64 GiB, 29 MiB for 2 TiB. The stop ends mke2fs.
pub fn create(mapped: &Path, mke2fs: &Path, stop: &Stop) -> Result<(), Error> {
    let failed = |doing| {
        move |error: io::Error| Error(format!("{}: cannot {doing}: {error}", mapped.display()))
    };
    let device = block::open_direct(mapped).map_err(failed("open the device for writing"))?;
    let size = block::size(&device).map_err(failed("read the size of the device"))? / BLOCK * BLOCK;
    if size < MIN_SIZE {
        return Err(Error(format!(
            "{}: the device has {size} bytes, but a file system needs at least {MIN_SIZE}",
            mapped.display()
        )));
    }
    let image =
        block::memory_file(c"ext4").map_err(failed("create a file in memory for mke2fs"))?;
    image
        .set_len(size)
        .map_err(failed("create a file in memory for mke2fs"))?;
    let input = image
        .try_clone()
        .map_err(failed("create a file in memory for mke2fs"))?;
    run_mke2fs(mke2fs, input, size, stop)?;

    let mut extents =
        data_extents(&image).map_err(failed("read the file system that mke2fs made"))?;
    let superblock =
        read_superblock(&image).map_err(failed("read the file system that mke2fs made"))?;
    extents.extend(journal(&superblock)?);
    extents.push(0..PROBED_START);
    extents.push(size - PROBED_END..size);
    copy(&image, &device, union(extents, size)).map_err(failed("write the file system"))
}

/// Mounts the file system at the directory `at`, and creates the directory if necessary. Device
/// nodes and set-user-ID programs are allowed.
pub fn mount(mapped: &Path, at: &Path, read_only: bool) -> Result<(), Error> {
    std::fs::create_dir_all(at)
        .and_then(|()| sys_mount::mount(mapped, at, c"ext4", read_only))
        .map_err(|error| {
            Error(format!(
                "cannot mount the ext4 file system on {} at {}: {error}; the kernel log (dmesg) gives the reason",
                mapped.display(),
                at.display()
            ))
        })
}

/// Unmounts the file system at `at`. All written data is durable afterwards.
pub fn unmount(at: &Path) -> Result<(), Error> {
    sys_mount::unmount(at)
        .map_err(|error| Error(format!("cannot unmount {}: {error}", at.display())))
}

/// Runs mke2fs on `image`. The program opens its standard input as a file, so the image needs no
/// path in a file system.
fn run_mke2fs(mke2fs: &Path, image: File, size: u64, stop: &Stop) -> Result<(), Error> {
    let journal = ((size / JOURNAL_PART) >> 20).clamp(JOURNAL_MIN_MIB, JOURNAL_MAX_MIB);
    let mut command = Command::new(mke2fs);
    command
        .args(["-q", "-F", "-t", "ext4", "-b", "4096"])
        .args(["-J".as_ref(), OsStr::new(&format!("size={journal}"))])
        .args([
            "-E",
            "nodiscard,lazy_itable_init=1,lazy_journal_init=1",
            "/proc/self/fd/0",
        ])
        .env("LC_ALL", "C");
    let mut tell = |line: &str| log::info!("mke2fs: {line}");
    let run = child_process::run(&mut command, image.into(), MKE2FS_LIMIT, stop, &mut tell);
    run.map_err(|error| {
        let hint = match error.cause {
            ChildFailure::Start(_) => "; check that the image contains e2fsprogs",
            _ => "",
        };
        Error(format!("cannot make a file system: {error}{hint}"))
    })
}

/// Returns all extents of the file that are not holes.
fn data_extents(image: &File) -> io::Result<Vec<Range<u64>>> {
    let mut extents = Vec::new();
    let mut at = 0;
    while let Some(start) = block::next_data(image, at)? {
        at = block::next_hole(image, start)?;
        extents.push(start..at);
    }
    Ok(extents)
}

/// Reads the ext4 superblock: 1024 bytes at offset 1024.
fn read_superblock(image: &File) -> io::Result<[u8; 1024]> {
    let mut bytes = [0; 1024];
    image.read_exact_at(&mut bytes, 1024)?;
    Ok(bytes)
}

/// Returns the byte ranges of the journal. The superblock has a copy of the extent tree of the
/// journal's inode (s_jnl_blocks at 0x10c; the kernel's Documentation/filesystems/ext4, "Super
/// Block" and "Extent Tree"). The root of the tree holds up to 4 extents, and the journal of a new
/// file system is contiguous where possible.
fn journal(superblock: &[u8; 1024]) -> Result<Vec<Range<u64>>, Error> {
    let unexpected = |reason: String| {
        Err(Error(format!(
            "mke2fs made a file system with an unsupported layout: {reason}"
        )))
    };
    let u16_at = |at: usize| u16::from_le_bytes([superblock[at], superblock[at + 1]]);
    let u32_at = |at: usize| u32::from(u16_at(at)) | u32::from(u16_at(at + 2)) << 16;
    const S_MAGIC: usize = 0x38;
    const S_JNL_BLOCKS: usize = 0x10c;
    const ENTRY_LEN: usize = 12;
    if u16_at(S_MAGIC) != 0xef53 {
        return unexpected("it is not an ext4 file system".into());
    }
    let (magic, entries, depth) = (
        u16_at(S_JNL_BLOCKS),
        usize::from(u16_at(S_JNL_BLOCKS + 2)),
        u16_at(S_JNL_BLOCKS + 6),
    );
    if magic != 0xf30a || !(1..=4).contains(&entries) || depth != 0 {
        return unexpected(format!(
            "the superblock does not contain the extents of the journal (magic {magic:#x}, {entries} entries, depth {depth})"
        ));
    }
    Ok((1..=entries)
        .map(|entry| {
            let at = S_JNL_BLOCKS + ENTRY_LEN * entry;
            let start = (u64::from(u16_at(at + 6)) << 32 | u64::from(u32_at(at + 8))) * BLOCK;
            // a length above 32768 marks an extent that is allocated but not written
            let len = match u16_at(at + 4) {
                unwritten @ 32769.. => unwritten - 32768,
                written => written,
            };
            start..start + u64::from(len) * BLOCK
        })
        .collect())
}

/// Returns the extents aligned to blocks, sorted, merged and cut to `size` bytes.
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

/// Writes `extents` of the image to the device. The first block is written last, and only after the
/// others are durable.
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

/// Why the file system was not made, mounted or unmounted: a sentence for the console.
#[derive(Debug)]
pub struct Error(String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
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
        for len in [MIN_SIZE, 64 << 20, 1 << 30] {
            let disk = disk(len);
            create(disk.path(), Path::new(MKE2FS), &Stop::new()).unwrap();

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
        let disk = disk(MIN_SIZE);
        let error = create(disk.path(), Path::new("/bin/ls"), &Stop::new())
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(
                "cannot make a file system: /bin/ls failed with exit code 2; its last lines:\n/bin/ls: "
            ),
            "{error}"
        );
        let error = create(disk.path(), Path::new("/no/such/program"), &Stop::new())
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("cannot make a file system: /no/such/program could not be started: "),
            "{error}"
        );
        let error = create(disk.path(), Path::new("/bin/true"), &Stop::new())
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
        let error = create(disk(MIN_SIZE - 1).path(), Path::new(MKE2FS), &Stop::new()).unwrap_err();
        let expected = format!("the device has {} bytes", MIN_SIZE - BLOCK);
        assert!(error.to_string().contains(&expected), "{error}");
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
        run_mke2fs(
            Path::new(MKE2FS),
            disk.reopen().unwrap(),
            64 << 20,
            &Stop::new(),
        )
        .unwrap();
        let superblock = read_superblock(disk.as_file()).unwrap();
        let mut random = support::random::Random::new(1);
        for _ in 0..20_000 {
            let mut bytes = superblock;
            for _ in 0..=random.below(4) {
                bytes[0x10c + random.below(64)] = random.next() as u8;
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
