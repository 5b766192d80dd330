//! The recovery key of a new volume: eight groups of five characters, for paper. The last group is a
//! check of the others, so that a mistake in a copy is seen before the key is needed.
//!
//! The passphrase of the keyslot is the whole text, as people type it at systemd's prompt.

use std::fmt;

use base::crypto::{Secret, derive_key};
use zeroize::Zeroizing;

/// Digits and letters that look different from each other (Crockford's base 32).
const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
const GROUP: usize = 5;
/// The number of groups of the key, without the check group: 35 characters of 5 bits, 175 random bits.
const GROUPS: usize = 7;
const CHECK: &str = "firstlight recovery key: check";

/// A mistake in a recovery key that was typed.
#[derive(Debug, PartialEq, Eq)]
pub enum Mistake {
    /// It has this number of groups.
    Groups(usize),
    /// The group with this number, from 1 on, has another character or length.
    Group(usize),
    /// The last group does not fit the others.
    Check,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mistake::Groups(got) => {
                let expected = GROUPS + 1;
                write!(
                    f,
                    "expected {expected} groups with '-' between them, got {got}"
                )
            }
            Mistake::Group(number) => write!(
                f,
                "group {number}: expected {GROUP} digits and letters without i, l, o and u"
            ),
            Mistake::Check => {
                f.write_str("the last group does not fit the others: a character is wrong")
            }
        }
    }
}

impl std::error::Error for Mistake {}

/// Makes a new recovery key.
pub fn new() -> Zeroizing<String> {
    let random = Secret::random(GROUP * GROUPS);
    let mut text = Zeroizing::new(String::with_capacity((GROUPS + 1) * (GROUP + 1)));
    for (at, byte) in random.expose().iter().enumerate() {
        if at > 0 && at % GROUP == 0 {
            text.push('-');
        }
        text.push(letter(*byte));
    }
    let check = check_group(&text);
    text.push('-');
    text.push_str(&check);
    text
}

/// Parses a recovery key as it was typed: in upper or lower case. Returns the passphrase. The error
/// says what is wrong.
pub fn parse(typed: &str) -> Result<Zeroizing<String>, Mistake> {
    let text = Zeroizing::new(typed.trim().to_ascii_lowercase());
    let is_letter = |c: char| c.is_ascii() && ALPHABET.contains(&(c as u8));
    let groups: Vec<&str> = text.split('-').collect();
    if groups.len() != GROUPS + 1 {
        return Err(Mistake::Groups(groups.len()));
    }
    let is_wrong = |group: &&str| group.chars().count() != GROUP || !group.chars().all(is_letter);
    if let Some(at) = groups.iter().position(is_wrong) {
        return Err(Mistake::Group(at + 1));
    }
    let (key, check) = text.split_at(text.len() - GROUP);
    if check_group(key.trim_end_matches('-')) == check {
        Ok(text)
    } else {
        Err(Mistake::Check)
    }
}

fn letter(byte: u8) -> char {
    char::from(ALPHABET[usize::from(byte & 31)])
}

fn check_group(key: &str) -> String {
    let bytes = derive_key(key.as_bytes(), &[], CHECK, GROUP);
    let bytes = bytes.expect("the length is a constant within HKDF's bounds");
    bytes.expose().iter().map(|byte| letter(*byte)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    #[test]
    fn a_mistake_in_a_copy_is_seen() {
        let key = new();
        assert_eq!(key.len(), 47);
        assert_eq!(parse(&key).as_ref(), Ok(&key));
        assert_eq!(
            parse(&format!(" {}\n", key.to_uppercase())).as_ref(),
            Ok(&key)
        );
        assert_ne!(new(), key);
        for at in 0..key.len() {
            let mut wrong = key.as_bytes().to_vec();
            wrong[at] = match wrong[at] {
                b'0' => b'1',
                _ => b'0',
            };
            assert!(parse(std::str::from_utf8(&wrong).unwrap()).is_err(), "{at}");
            // two characters in the wrong order
            let mut swapped = key.as_bytes().to_vec();
            swapped.swap(at, (at + 1).min(key.len() - 1));
            if swapped != key.as_bytes() {
                assert!(
                    parse(std::str::from_utf8(&swapped).unwrap()).is_err(),
                    "{at}"
                );
            }
        }
        for bytes in mutations(key.as_bytes(), 20_000) {
            let typed = String::from_utf8_lossy(&bytes);
            if let Ok(parsed) = parse(&typed) {
                assert_eq!(*parsed, *key, "{typed}");
            }
        }
        for text in ["", "-", "ü", &key[1..], &format!("{}-00000", &*key)] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
