//! Items as KMIP encodes them (OASIS, "Key Management Interoperability Protocol Specification Version 1.4", §9.1): tag (3 bytes), type
//! (1), length (4), and the value, with zeros up to a multiple of 8 bytes.

use zeroize::Zeroizing;

/// Types of items (§9.1.1.2).
const STRUCTURE: u8 = 0x01;
const INTEGER: u8 = 0x02;
const ENUMERATION: u8 = 0x05;
const BOOLEAN: u8 = 0x06;
const TEXT: u8 = 0x07;
const BYTES: u8 = 0x08;

/// Bytes of an item before its value.
pub const HEADER: usize = 8;

/// An encoded item. It may contain a key.
pub type Encoded = Zeroizing<Vec<u8>>;

fn encode(tag: u32, kind: u8, values: &[&[u8]]) -> Encoded {
    let length: usize = values.iter().map(|value| value.len()).sum();
    // as large as needed: a buffer that grows would leave copies of the key in freed memory
    let mut item = Zeroizing::new(Vec::with_capacity(HEADER + length.next_multiple_of(8)));
    item.extend_from_slice(&(tag << 8 | u32::from(kind)).to_be_bytes());
    item.extend_from_slice(&(length as u32).to_be_bytes());
    values
        .iter()
        .for_each(|value| item.extend_from_slice(value));
    let padded = item.len().next_multiple_of(8);
    item.resize(padded, 0);
    item
}

/// Encodes a structure.
pub fn structure(tag: u32, items: &[Encoded]) -> Encoded {
    let items: Vec<&[u8]> = items.iter().map(|item| item.as_slice()).collect();
    encode(tag, STRUCTURE, &items)
}

/// Encodes an integer.
pub fn integer(tag: u32, value: u32) -> Encoded {
    encode(tag, INTEGER, &[&value.to_be_bytes()])
}

/// Encodes a value of an enumeration.
pub fn enumeration(tag: u32, value: u32) -> Encoded {
    encode(tag, ENUMERATION, &[&value.to_be_bytes()])
}

/// Encodes a truth value.
pub fn boolean(tag: u32, value: bool) -> Encoded {
    encode(tag, BOOLEAN, &[&u64::from(value).to_be_bytes()])
}

/// Encodes a text.
pub fn text(tag: u32, value: &str) -> Encoded {
    encode(tag, TEXT, &[value.as_bytes()])
}

/// Encodes a byte string.
pub fn bytes(tag: u32, value: &[u8]) -> Encoded {
    encode(tag, BYTES, &[value])
}

/// An item in a message.
#[derive(Clone, Copy)]
pub struct TtlvItem<'a> {
    tag: u32,
    kind: u8,
    value: &'a [u8],
}

/// The items one after the other. It ends at the first that is malformed.
pub struct Items<'a>(pub &'a [u8]);

impl<'a> Iterator for Items<'a> {
    type Item = TtlvItem<'a>;

    fn next(&mut self) -> Option<TtlvItem<'a>> {
        let (head, rest) = self.0.split_first_chunk::<HEADER>()?;
        let [t0, t1, t2, kind, length @ ..] = *head;
        let length = usize::try_from(u32::from_be_bytes(length)).ok()?;
        let value = rest.get(..length)?;
        // the zeros after the last item may be cut off
        self.0 = rest
            .get(length.checked_next_multiple_of(8)?..)
            .unwrap_or_default();
        let tag = u32::from_be_bytes([0, t0, t1, t2]);
        Some(TtlvItem { tag, kind, value })
    }
}

/// Returns the first item with the tag.
pub fn find(items: &[u8], tag: u32) -> Option<TtlvItem<'_>> {
    Items(items).find(|item| item.tag == tag)
}

/// Returns the length of a message, including its header, whose tag must be this one.
pub fn message_length(header: [u8; HEADER], tag: u32) -> Option<u64> {
    let [t0, t1, t2, kind, length @ ..] = header;
    let is_message = kind == STRUCTURE && u32::from_be_bytes([0, t0, t1, t2]) == tag;
    is_message.then(|| u64::from(u32::from_be_bytes(length)) + HEADER as u64)
}

impl<'a> TtlvItem<'a> {
    /// Returns whether the item has the tag.
    pub fn is(&self, tag: u32) -> bool {
        self.tag == tag
    }

    /// Returns the items of a structure.
    pub fn items(&self) -> Option<&'a [u8]> {
        (self.kind == STRUCTURE).then_some(self.value)
    }

    /// Returns an integer or a value of an enumeration.
    pub fn number(&self) -> Option<u32> {
        let value = self.value.try_into().ok().map(u32::from_be_bytes);
        value.filter(|_| matches!(self.kind, INTEGER | ENUMERATION))
    }

    /// Returns a text.
    pub fn text(&self) -> Option<&'a str> {
        let text = std::str::from_utf8(self.value).ok();
        text.filter(|_| self.kind == TEXT)
    }

    /// Returns a byte string.
    pub fn bytes(&self) -> Option<&'a [u8]> {
        (self.kind == BYTES).then_some(self.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of the specification (§9.1.2).
    #[test]
    fn items_are_encoded_as_the_specification_shows() {
        let hex = |text: &str| -> Vec<u8> {
            let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(16)).collect();
            digits
                .chunks(2)
                .map(|two| (two[0] * 16 + two[1]) as u8)
                .collect()
        };
        const TAG: u32 = 0x42_00_20;
        for (item, expected) in [
            (integer(TAG, 8), "42002002 00000004 00000008 00000000"),
            (enumeration(TAG, 255), "42002005 00000004 000000FF 00000000"),
            (boolean(TAG, true), "42002006 00000008 00000000 00000001"),
            (
                text(TAG, "Hello World"),
                "42002007 0000000B 48656C6C 6F20576F 726C6400 00000000",
            ),
            (
                bytes(TAG, &[1, 2, 3]),
                "42002008 00000003 01020300 00000000",
            ),
            (
                structure(
                    TAG,
                    &[enumeration(0x42_00_04, 254), integer(0x42_00_05, 255)],
                ),
                "42002001 00000020 42000405 00000004 000000FE 00000000 42000502 00000004 000000FF 00000000",
            ),
        ] {
            assert_eq!(*item, hex(expected));
        }
    }

    #[test]
    fn a_length_beyond_the_input_ends_the_items() {
        let mut both = [integer(1, 7).to_vec(), text(2, "a").to_vec()].concat();
        assert_eq!(find(&both, 2).unwrap().text(), Some("a"));
        both[20..24].fill(0xff);
        assert_eq!(Items(&both).count(), 1);
        assert_eq!(find(&both, 1).unwrap().number(), Some(7));
    }
}
