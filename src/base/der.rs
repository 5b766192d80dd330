//! The part of DER (ITU-T X.690 §10) that certificates and names need: single-byte tags and
//! definite lengths.

/// SEQUENCE, constructed.
pub const SEQUENCE: u8 = 0x30;
/// SET, constructed.
pub const SET: u8 = 0x31;
/// BOOLEAN.
pub const BOOLEAN: u8 = 0x01;
/// INTEGER.
pub const INTEGER: u8 = 0x02;
/// BIT STRING, primitive.
pub const BIT_STRING: u8 = 0x03;
/// OCTET STRING, primitive.
pub const OCTET_STRING: u8 = 0x04;
/// OBJECT IDENTIFIER.
pub const OBJECT_IDENTIFIER: u8 = 0x06;
/// UTF8String.
pub const UTF8_STRING: u8 = 0x0c;
/// PrintableString.
pub const PRINTABLE_STRING: u8 = 0x13;

/// Returns the tag `[number]`, constructed, as in `TBSCertificate.version [0] EXPLICIT`.
pub const fn context(number: u8) -> u8 {
    0xa0 | number
}

/// Encodes one element: tag, length, and the concatenated parts as its content.
pub fn element(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let len: usize = parts.iter().map(|part| part.len()).sum();
    let mut out = Vec::with_capacity(len + 6);
    out.push(tag);
    if len < 0x80 {
        out.push(len as u8);
    } else {
        let bytes = len.to_be_bytes();
        let bytes = &bytes[bytes.iter().take_while(|byte| **byte == 0).count()..];
        out.push(0x80 | bytes.len() as u8);
        out.extend_from_slice(bytes);
    }
    for part in parts {
        out.extend_from_slice(part);
    }
    out
}

/// The input is not DER, or not the expected element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

/// Reads elements in order.
#[derive(Clone, Copy)]
pub struct DerReader<'a>(&'a [u8]);

impl<'a> DerReader<'a> {
    /// Creates a reader of `input`.
    pub fn new(input: &'a [u8]) -> Self {
        DerReader(input)
    }

    /// Returns whether all input is read.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the tag of the next element.
    pub fn peek(&self) -> Option<u8> {
        self.0.first().copied()
    }

    /// Reads the next element: its tag and content.
    pub fn read(&mut self) -> Result<(u8, &'a [u8]), Malformed> {
        let (&tag, rest) = self.0.split_first().ok_or(Malformed)?;
        if tag & 0x1f == 0x1f {
            return Err(Malformed); // the tag has several bytes
        }
        let (&first, rest) = rest.split_first().ok_or(Malformed)?;
        let (len, rest) = match first {
            0..=0x7f => (usize::from(first), rest),
            // 0x80 is the indefinite length of BER. A length of more than three bytes exceeds any
            // TLS message.
            0x81..=0x83 => {
                let (bytes, rest) = rest
                    .split_at_checked(usize::from(first & 0x7f))
                    .ok_or(Malformed)?;
                let len = bytes
                    .iter()
                    .fold(0, |len, byte| len << 8 | usize::from(*byte));
                if len < 0x80 || bytes[0] == 0 {
                    return Err(Malformed); // the length is not in its shortest form
                }
                (len, rest)
            }
            _ => return Err(Malformed),
        };
        let (content, rest) = rest.split_at_checked(len).ok_or(Malformed)?;
        self.0 = rest;
        Ok((tag, content))
    }

    /// Reads the next element, whose tag must be `tag`, and returns its content.
    pub fn expect(&mut self, tag: u8) -> Result<&'a [u8], Malformed> {
        match self.read()? {
            (found, content) if found == tag => Ok(content),
            _ => Err(Malformed),
        }
    }

    /// Reads the next element, whose tag must be `tag`, and returns it with tag and length.
    pub fn expect_whole(&mut self, tag: u8) -> Result<&'a [u8], Malformed> {
        let before = self.0;
        self.expect(tag)?;
        Ok(&before[..before.len() - self.0.len()])
    }

    /// Ends the reading; errors if input is left.
    pub fn end(self) -> Result<(), Malformed> {
        if self.is_empty() {
            Ok(())
        } else {
            Err(Malformed)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_every_length_form_read_back() {
        for len in [0, 1, 0x7f, 0x80, 0xff, 0x100, 0xffff, 0x1_0000] {
            let content = vec![7; len];
            let bytes = element(OCTET_STRING, &[&content[..len / 2], &content[len / 2..]]);
            let mut reader = DerReader::new(&bytes);
            assert_eq!(reader.expect(OCTET_STRING), Ok(&content[..]));
            assert_eq!(reader.end(), Ok(()));
        }
    }

    #[test]
    fn input_that_is_not_der_is_refused() {
        for bad in [
            &[][..],
            &[0x04],
            &[0x04, 0x02, 0x00],                         // too short
            &[0x04, 0x80, 0x00, 0x00],                   // indefinite
            &[0x04, 0x81, 0x01, 0x00],                   // not the shortest length
            &[0x04, 0x82, 0x00, 0x80],                   // not the shortest length
            &[0x04, 0x84, 0xff, 0xff, 0xff, 0xff, 0x00], // longer than any message
            &[0x1f, 0x20, 0x01, 0x00],                   // a tag of two bytes
        ] {
            assert_eq!(DerReader::new(bad).read(), Err(Malformed), "{bad:02x?}");
        }
    }
}
