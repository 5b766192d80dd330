//! Block devices: their size, direct reads and writes that bypass the page cache, and the holes of
//! sparse files.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use super::check;

/// Alignment in bytes of address, offset and length that satisfies O_DIRECT on every device with
/// sectors of up to 4096 bytes (open(2), NOTES).
pub const DIRECT_ALIGNMENT: usize = 4096;

// _IOR(0x12, 114, size_t) of linux/fs.h; libc lacks it for musl.
const BLKGETSIZE64: u32 = 0x8008_1272;
// _IO(0x12, 94) of linux/fs.h
const BLKROGET: u32 = 0x125e;

/// Returns the size in bytes of a block device or regular file.
pub fn size(file: &File) -> io::Result<u64> {
    let metadata = file.metadata()?;
    if !metadata.file_type().is_block_device() {
        return Ok(metadata.len());
    }
    let mut bytes = 0_u64;
    // SAFETY: BLKGETSIZE64 writes one u64 to the given pointer (blkdev_ioctl does so on every
    // architecture).
    check(unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64 as _, &mut bytes) })?;
    Ok(bytes)
}

/// Returns whether the kernel refuses to write to a block device. A write would fail with `EPERM` only.
pub fn is_read_only(file: &File) -> bool {
    let mut read_only: libc::c_int = 0;
    // SAFETY: BLKROGET writes one int to the given pointer.
    let asked = check(unsafe { libc::ioctl(file.as_raw_fd(), BLKROGET as _, &mut read_only) });
    // the ioctl fails for a file that is no block device
    asked.is_ok() && read_only != 0
}

/// Returns `(major, minor)` of the block device at `path`; `InvalidInput` for any other kind of
/// file.
pub fn number(path: &Path) -> io::Result<(u32, u32)> {
    let metadata = path.metadata()?;
    if !metadata.file_type().is_block_device() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a block device",
        ));
    }
    Ok((libc::major(metadata.rdev()), libc::minor(metadata.rdev())))
}

/// Opens a device for reads and writes that bypass the page cache; they need a [`PageBuffer`].
pub fn open_direct(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)
}

/// Returns where the next data at or after `offset` starts in a sparse file (lseek(2), SEEK_DATA);
/// `None` after the last data.
pub fn next_data(file: &File, offset: u64) -> io::Result<Option<u64>> {
    match seek(file, offset, libc::SEEK_DATA) {
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        other => other.map(Some),
    }
}

/// Returns where the next hole at or after `offset` starts (lseek(2), SEEK_HOLE). The end of the
/// file counts as a hole.
pub fn next_hole(file: &File, offset: u64) -> io::Result<u64> {
    seek(file, offset, libc::SEEK_HOLE)
}

fn seek(file: &File, offset: u64, whence: i32) -> io::Result<u64> {
    let offset = i64::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: the call uses no memory, and the descriptor is open while `file` is borrowed.
    let found = check(unsafe { libc::lseek(file.as_raw_fd(), offset, whence) })?;
    Ok(found as u64)
}

/// Attaches a file to a free loop device (loop(4)), and returns the open device and its `(major, minor)`. The
/// kernel detaches it at the last close. Needs the module `loop`, and Linux 5.8 or later.
pub fn attach(file: &File) -> io::Result<(File, (u32, u32))> {
    // linux/loop.h
    const LOOP_CTL_GET_FREE: u32 = 0x4c82;
    const LOOP_CONFIGURE: u32 = 0x4c0a;
    const LO_FLAGS_AUTOCLEAR: u32 = 4;
    let open = |path: &str| OpenOptions::new().read(true).write(true).open(path);
    let control = open("/dev/loop-control")?;
    // struct loop_config: the file, the size of a sector by default, and struct loop_info64 from byte 8 on
    let mut config = [0_u32; 304 / 4];
    config[0] = file.as_raw_fd() as u32;
    config[(8 + 52) / 4] = LO_FLAGS_AUTOCLEAR;
    let mut attempts = 10;
    loop {
        // SAFETY: the ioctl takes no argument.
        let free = check(unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as _) })?;
        let device = open(&format!("/dev/loop{free}"))?;
        // SAFETY: the kernel reads a struct loop_config, whose 304 bytes `config` has. It keeps a reference
        // of its own to the file.
        let set = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE as _, config.as_ptr()) };
        match check(set) {
            // another program has taken the device
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && attempts > 0 => {
                attempts -= 1;
            }
            Err(error) => return Err(error),
            Ok(_) => {
                let number = device.metadata()?.rdev();
                return Ok((device, (libc::major(number), libc::minor(number))));
            }
        }
    }
}

/// Creates an empty file in memory, without a name, sparse as on tmpfs (memfd_create(2)). It is
/// gone when its last descriptor is closed.
pub fn memory_file(label: &'static std::ffi::CStr) -> io::Result<File> {
    // SAFETY: `label` is a valid C string; the returned descriptor is new and has no other owner.
    unsafe {
        let descriptor = check(libc::memfd_create(label.as_ptr(), libc::MFD_CLOEXEC))?;
        Ok(OwnedFd::from_raw_fd(descriptor).into())
    }
}

#[repr(C, align(4096))]
#[derive(Clone, Copy)]
struct Page([u8; DIRECT_ALIGNMENT]);

/// Zeroed memory with the alignment of O_DIRECT; a whole number of pages.
pub struct PageBuffer(Vec<Page>);

impl PageBuffer {
    /// Allocates at least `len` bytes, rounded up to whole pages.
    pub fn new(len: usize) -> Self {
        PageBuffer(vec![
            Page([0; DIRECT_ALIGNMENT]);
            len.div_ceil(DIRECT_ALIGNMENT)
        ])
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        let len = self.0.len() * DIRECT_ALIGNMENT;
        // SAFETY: a Page is exactly 4096 initialized bytes without padding, so n of them are n *
        // 4096 bytes.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), len) }
    }

    /// Returns the bytes for writing.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        let len = self.0.len() * DIRECT_ALIGNMENT;
        // SAFETY: as in `bytes`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), len) }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn data_and_holes_of_a_memory_file_are_found() {
        let file = memory_file(c"test").unwrap();
        file.set_len(1 << 36).unwrap();
        assert_eq!(next_data(&file, 0).unwrap(), None);
        file.write_all_at(&[1; 4096], 1 << 30).unwrap();
        assert_eq!(next_data(&file, 0).unwrap(), Some(1 << 30));
        assert_eq!(next_hole(&file, 1 << 30).unwrap(), (1 << 30) + 4096);
        assert_eq!(next_data(&file, (1 << 30) + 4096).unwrap(), None);
        assert_eq!(size(&file).unwrap(), 1 << 36);
    }

    #[test]
    fn page_buffers_are_aligned_and_whole_pages() {
        let mut buffer = PageBuffer::new(5000);
        assert_eq!(buffer.bytes().len(), 8192);
        assert_eq!(buffer.bytes().as_ptr() as usize % DIRECT_ALIGNMENT, 0);
        buffer.bytes_mut()[8191] = 7;
        assert_eq!(buffer.bytes()[8191], 7);
    }

    #[test]
    fn only_block_devices_have_a_device_number() {
        assert_eq!(
            number(Path::new("/dev/null")).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    }
}
