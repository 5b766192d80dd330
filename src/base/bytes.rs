//! Reads integers from an untrusted byte structure.

/// Reads from the front of bytes. Each method returns `None` if bytes are missing, so a length
/// field never exceeds the available bytes.
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// Reads this number of bytes.
    pub fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    /// Reads the number of bytes that the type has.
    pub fn array<const N: usize>(&mut self) -> Option<&'a [u8; N]> {
        let (array, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(array)
    }

    /// Reads a byte.
    pub fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| *byte)
    }

    /// Reads a big-endian integer.
    pub fn u16_be(&mut self) -> Option<u16> {
        self.array().copied().map(u16::from_be_bytes)
    }

    /// Reads a big-endian integer.
    pub fn u32_be(&mut self) -> Option<u32> {
        self.array().copied().map(u32::from_be_bytes)
    }

    /// Reads a little-endian integer.
    pub fn u16_le(&mut self) -> Option<u16> {
        self.array().copied().map(u16::from_le_bytes)
    }

    /// Reads a little-endian integer.
    pub fn u32_le(&mut self) -> Option<u32> {
        self.array().copied().map(u32::from_le_bytes)
    }

    /// Reads a little-endian integer.
    pub fn u64_le(&mut self) -> Option<u64> {
        self.array().copied().map(u64::from_le_bytes)
    }

    /// Reads bytes that are preceded by their length, 16 bits, big endian: a TPM2B (TPM 2.0 part 2
    /// §10.4).
    pub fn tpm2b(&mut self) -> Option<&'a [u8]> {
        let len = self.u16_be()?;
        self.take(len.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_read_beyond_the_end() {
        let mut reader = Reader(b"\x01\x02\x01\x02\0\0\0\x03\x04\0\0\0\0\x02ab\0\x02c");
        assert_eq!(reader.u16_be(), Some(0x0102));
        assert_eq!(reader.u16_le(), Some(0x0201));
        assert_eq!(reader.u32_be(), Some(3));
        assert_eq!(reader.u32_le(), Some(4));
        assert_eq!(reader.tpm2b(), Some(&b"ab"[..]));
        // the length was consumed, the bytes after it were not
        assert_eq!(reader.tpm2b(), None);
        assert_eq!(reader.0, b"c");
        assert_eq!(reader.u16_le(), None);
        assert_eq!(reader.take(2), None);
        assert_eq!(reader.take(1), Some(&b"c"[..]));
        assert_eq!(reader.take(0), Some(&b""[..]));
    }
}
