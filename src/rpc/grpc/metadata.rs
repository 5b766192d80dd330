//! Custom metadata of a call: headers and trailers that the protocol does not define itself.

use super::status::{Code, Status};
use crate::h2::{Field, HeaderList, Indexing};

/// Memory of an entry in addition to its bytes: its place in a vector that may have doubled, and
/// the overhead of two small allocations.
const ENTRY_BYTES: usize = 128;

/// Ordered key-value pairs. Keys are lower-case ASCII, values are printable ASCII. The value of a
/// key that ends in `-bin` must be base64: the caller encodes and decodes it, and nothing checks it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metadata {
    entries: Vec<(String, String)>,
}

impl Metadata {
    /// Creates empty metadata.
    pub fn new() -> Metadata {
        Metadata::default()
    }

    /// Returns the first value of `key`.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.entries
            .iter()
            .find(|(name, _)| name == key)
            .map(|(_, value)| value.as_str())
    }

    /// Appends an entry. Errors with [`Code::InvalidArgument`] if the protocol cannot carry
    /// it or reserves the key.
    pub fn insert(&mut self, key: &str, value: &str) -> Result<(), Status> {
        if !is_custom_key(key.as_bytes()) {
            return Err(Status::new(
                Code::InvalidArgument,
                format!("{key:?} cannot be the key of metadata"),
            ));
        }
        if !is_ascii_value(value.as_bytes()) {
            return Err(Status::new(
                Code::InvalidArgument,
                format!("the value of metadata {key:?} is not plain ASCII"),
            ));
        }
        self.entries.push((key.to_owned(), value.to_owned()));
        Ok(())
    }

    /// Returns all entries in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Returns the memory in bytes that the entries need.
    pub(super) fn size(&self) -> usize {
        self.entries
            .iter()
            .map(|(key, value)| key.len() + value.len() + ENTRY_BYTES)
            .sum()
    }

    /// Reads the custom metadata from received headers.
    pub(super) fn of(headers: &HeaderList) -> Metadata {
        let mut metadata = Metadata::new();
        headers
            .iter()
            .for_each(|(name, value)| metadata.receive(name, value));
        metadata
    }

    /// Returns the entries as header fields. A possible credential never enters a compression
    /// table.
    pub(super) fn fields(&self) -> impl Iterator<Item = Field<'_>> + Clone {
        self.entries.iter().map(|(key, value)| {
            let indexing = if key == "authorization" {
                Indexing::Never
            } else {
                Indexing::No
            };
            (key.as_bytes(), value.as_bytes(), indexing)
        })
    }

    /// Adds a received header if it is custom metadata with a legal value. Other headers belong to
    /// the protocol, or are not worth failing a call.
    fn receive(&mut self, name: &[u8], value: &[u8]) {
        if is_custom_key(name)
            && is_ascii_value(value)
            && let (Ok(name), Ok(value)) = (std::str::from_utf8(name), std::str::from_utf8(value))
        {
            self.entries.push((name.to_owned(), value.to_owned()));
        }
    }
}

/// Returns whether `key` is legal for `Custom-Metadata` of the protocol: not reserved (`grpc-`) and
/// not a header that HTTP or gRPC itself uses.
fn is_custom_key(key: &[u8]) -> bool {
    const PROTOCOL: [&[u8]; 4] = [b"content-type", b"te", b"user-agent", b"content-length"];
    let legal = |byte: &u8| {
        byte.is_ascii_lowercase() || byte.is_ascii_digit() || matches!(byte, b'_' | b'-' | b'.')
    };
    !key.is_empty()
        && key.iter().all(legal)
        && !key.starts_with(b"grpc-")
        && !PROTOCOL.contains(&key)
}

/// Returns whether `value` is printable ASCII without spaces at its ends, which HTTP would remove.
fn is_ascii_value(value: &[u8]) -> bool {
    value.iter().all(|byte| (0x20..0x7f).contains(byte)) && value.trim_ascii().len() == value.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_by_key_in_order() {
        let mut metadata = Metadata::new();
        metadata.insert("x-a", "1").unwrap();
        metadata.insert("x-a", "2").unwrap();
        metadata.insert("x-bin", "/wAB").unwrap();
        assert_eq!(metadata.get("x-a"), Some("1"));
        assert_eq!(metadata.get("x-bin"), Some("/wAB"));
        assert_eq!(metadata.iter().count(), 3);
    }

    #[test]
    fn entries_without_a_wire_format_are_refused() {
        let mut metadata = Metadata::new();
        for key in ["", "X-Upper", "grpc-status", ":path", "te", "a b"] {
            assert!(metadata.insert(key, "v").is_err(), "{key}");
        }
        for value in ["line\nbreak", "ü", " padded"] {
            assert!(metadata.insert("x-a", value).is_err(), "{value}");
        }
    }
}
