//! The data types of SSH (RFC 4251 §5): big-endian numbers, and byte strings preceded by their length.

use zeroize::Zeroizing;

/// Writes values one after the other. Wiped on drop, because it also writes private keys.
#[derive(Default)]
pub struct Writer(Zeroizing<Vec<u8>>);

impl Writer {
    pub fn u32(mut self, number: u32) -> Self {
        self.0.extend_from_slice(&number.to_be_bytes());
        self
    }

    pub fn u64(mut self, number: u64) -> Self {
        self.0.extend_from_slice(&number.to_be_bytes());
        self
    }

    /// Writes a string, preceded by its length, which must fit 32 bits.
    pub fn string(self, bytes: &[u8]) -> Self {
        let len = u32::try_from(bytes.len()).expect("nothing of ours has 4 GiB");
        self.u32(len).raw(bytes)
    }

    /// Writes bytes without a length.
    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// The input is too short or has extra bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WireError;

/// Reads values one after the other.
pub struct WireReader<'a>(&'a [u8]);

impl<'a> WireReader<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        WireReader(bytes)
    }

    pub fn u32(&mut self) -> Result<u32, WireError> {
        let (number, rest) = self.0.split_first_chunk().ok_or(WireError)?;
        self.0 = rest;
        Ok(u32::from_be_bytes(*number))
    }

    pub fn u64(&mut self) -> Result<u64, WireError> {
        let (number, rest) = self.0.split_first_chunk().ok_or(WireError)?;
        self.0 = rest;
        Ok(u64::from_be_bytes(*number))
    }

    pub fn byte(&mut self) -> Result<u8, WireError> {
        let (byte, rest) = self.0.split_first().ok_or(WireError)?;
        self.0 = rest;
        Ok(*byte)
    }

    /// Returns the bytes that are not read yet.
    pub fn rest(&self) -> &'a [u8] {
        self.0
    }

    pub fn string(&mut self) -> Result<&'a [u8], WireError> {
        let len = usize::try_from(self.u32()?).map_err(|_| WireError)?;
        let (bytes, rest) = self.0.split_at_checked(len).ok_or(WireError)?;
        self.0 = rest;
        Ok(bytes)
    }

    /// Returns an error if bytes follow.
    pub fn end(self) -> Result<(), WireError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(WireError)
        }
    }
}
