//! Access to the bytes of a device.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};

/// A device that can be formatted. Writes are durable after [`Device::sync`] has returned.
pub trait Device: Read + Write + Seek {
    /// Makes every write before this call durable.
    fn sync(&mut self) -> io::Result<()>;
}

impl Device for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_data()
    }
}

pub(super) fn read_at(dev: &mut (impl Read + Seek), offset: u64, buf: &mut [u8]) -> io::Result<()> {
    dev.seek(SeekFrom::Start(offset))?;
    dev.read_exact(buf)
}

pub(super) fn write_at(dev: &mut (impl Write + Seek), offset: u64, bytes: &[u8]) -> io::Result<()> {
    dev.seek(SeekFrom::Start(offset))?;
    dev.write_all(bytes)
}
