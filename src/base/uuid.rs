//! The UUID of a disk, which is an input of the derivation of its key.

use std::fmt;

/// A UUID in the format of RFC 9562 §4: 8-4-4-4-12 hexadecimal digits. Stored in lower case,
/// because key ids are compared byte by byte.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Uuid(String);

impl Uuid {
    /// Parses a UUID in upper or lower case without surrounding characters.
    pub fn parse(text: &str) -> Option<Uuid> {
        const HYPHENS: [usize; 4] = [8, 13, 18, 23];
        let fits = |(at, byte): (usize, u8)| {
            if HYPHENS.contains(&at) {
                byte == b'-'
            } else {
                byte.is_ascii_hexdigit()
            }
        };
        (text.len() == 36 && text.bytes().enumerate().all(fits))
            .then(|| Uuid(text.to_ascii_lowercase()))
    }

    /// Returns the UUID in lower case.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    const VALID: &str = "0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22";

    #[test]
    fn both_cases_are_one_uuid() {
        assert_eq!(Uuid::parse(&VALID.to_uppercase()), Uuid::parse(VALID));
        assert_eq!(Uuid::parse(VALID).unwrap().as_str(), VALID);
    }

    #[test]
    fn everything_else_is_none() {
        for text in [
            "",
            "measurementSecret",
            "0f5b7c1e93a44d2b8c6daa00bb11cc22",
            "{0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22}",
            "0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc2",
            "0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc2g",
            "0f5b7c1e-93a4-4d2b-8c6daa-00bb11cc22",
            " 0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22",
            "0f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc22\n",
            "０f5b7c1e-93a4-4d2b-8c6d-aa00bb11cc",
        ] {
            assert_eq!(Uuid::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn what_is_taken_of_mutated_text_is_of_the_canonical_form() {
        for bytes in mutations(VALID.as_bytes(), 20_000) {
            if let Some(uuid) = Uuid::parse(&String::from_utf8_lossy(&bytes)) {
                let lengths: Vec<usize> = uuid.as_str().split('-').map(str::len).collect();
                assert_eq!(lengths, [8, 4, 4, 4, 12]);
                assert!(
                    uuid.as_str()
                        .bytes()
                        .all(|b| b"0123456789abcdef-".contains(&b)),
                    "{uuid}"
                );
            }
        }
    }
}
