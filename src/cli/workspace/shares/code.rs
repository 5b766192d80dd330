//! A share as text that people can copy, print and type.
//!
//! The code is base32 in Crockford's alphabet: upper case, without I, L, O and U. A reader also
//! accepts lower case, reads I and L as 1 and O as 0, and ignores hyphens and white space. Lines
//! with a colon are for people only. The code's bytes:
//!
//! | bytes | |
//! |---|---|
//! | 1 | the version, 1 |
//! | 1 | the threshold |
//! | 4 | the fingerprint of the master secret |
//! | 4 | the set: random, the same in all shares of a run of `firstlight share` |
//! | n | the share as Vault writes it: a byte for each byte of the secret, then the share's number |
//! | 4 | the check: the begin of the SHA-256 hash of all bytes before it |

use data_encoding::{Encoding, Specification};
use ring::digest::{SHA256, digest};
use std::sync::LazyLock;
use zeroize::Zeroizing;

use super::scheme::{Error, Share};

const VERSION: u8 = 1;
const HEADER_LEN: usize = 10;
const CHECK_LEN: usize = 4;
/// Maximum characters of a share's text; a secret of 600 bytes has fewer.
const MAX_TEXT: usize = 4096;

static CROCKFORD: LazyLock<Encoding> = LazyLock::new(|| {
    let mut specification = Specification::new();
    specification
        .symbols
        .push_str("0123456789ABCDEFGHJKMNPQRSTVWXYZ");
    specification
        .translate
        .from
        .push_str("abcdefghjkmnpqrstvwxyzILOilo");
    specification
        .translate
        .to
        .push_str("ABCDEFGHJKMNPQRSTVWXYZ110110");
    specification.ignore.push_str("- \t\r\n");
    // the unused bits at the end are zero, or the code was mistyped
    specification.check_trailing_bits = true;
    specification.encoding().expect("the alphabet is valid")
});

/// Returns the code in one line, as in a QR code.
pub fn code(share: &Share) -> Zeroizing<String> {
    let points = share.vault();
    let len = HEADER_LEN + points.len() + CHECK_LEN;
    let mut bytes = Zeroizing::new(Vec::with_capacity(len));
    bytes.extend([VERSION, share.threshold]);
    bytes.extend(share.fingerprint);
    bytes.extend(share.set);
    bytes.extend(points.expose());
    let check = check(&bytes);
    bytes.extend(check);
    Zeroizing::new(CROCKFORD.encode(&bytes))
}

/// Returns the code in groups of four characters, four groups a line.
pub fn lines(share: &Share) -> Zeroizing<String> {
    let code = code(share);
    // allocates the full length, since a string that grows leaves copies behind
    let mut text = Zeroizing::new(String::with_capacity(code.len() * 2));
    for (index, letter) in code.chars().enumerate() {
        match index {
            0 => {}
            _ if index % 16 == 0 => text.push('\n'),
            _ if index % 4 == 0 => text.push('-'),
            _ => {}
        }
        text.push(letter);
    }
    text
}

/// Parses the text of a share. The error contains no part of the text.
pub fn parse(text: &[u8]) -> Result<Share, Error> {
    let not = |why: String| Err(Error::NotAShare(why));
    if text.len() > MAX_TEXT {
        return not(format!(
            "it has {} bytes, expected at most {MAX_TEXT}",
            text.len()
        ));
    }
    let mut code = Zeroizing::new(Vec::with_capacity(text.len()));
    for line in text.split(|byte| *byte == b'\n') {
        if !line.contains(&b':') {
            code.extend(line);
        }
    }
    let mut bytes = Zeroizing::new(vec![0; code.len()]);
    let len = CROCKFORD
        .decode_len(code.len())
        .and_then(|room| {
            CROCKFORD
                .decode_mut(&code, &mut bytes[..room])
                .map_err(|partial| partial.error)
        })
        .map_err(|error| match error.kind {
            data_encoding::DecodeKind::Symbol => {
                "it has a character that no code has: expected digits and letters without U"
                    .to_owned()
            }
            _ => damaged(),
        })
        .map_err(Error::NotAShare)?;
    let bytes = &bytes[..len];
    // the version comes first, so that a share of a later version is not reported as damaged
    match bytes.first() {
        None => return not("it has no code".into()),
        Some(&VERSION) => {}
        Some(version) => {
            return not(format!(
                "it has version {version}, and this program knows version {VERSION}, or its first group is mistyped"
            ));
        }
    }
    // a share has at least one point, for one byte
    if bytes.len() < HEADER_LEN + 2 + CHECK_LEN {
        return not(damaged());
    }
    let (body, sum) = bytes.split_at(bytes.len() - CHECK_LEN);
    if check(body) != *sum {
        return not(damaged());
    }
    let (header, share) = body.split_at(HEADER_LEN);
    Share::from_vault(share, header[1], four(&header[2..6]), four(&header[6..10]))
}

fn damaged() -> String {
    "its check is wrong: a character is mistyped, or a part is missing".into()
}

fn check(bytes: &[u8]) -> [u8; CHECK_LEN] {
    four(digest(&SHA256, bytes).as_ref())
}

fn four(bytes: &[u8]) -> [u8; 4] {
    [bytes[0], bytes[1], bytes[2], bytes[3]]
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    fn share() -> Share {
        let mut points = vec![7; 65];
        points.push(3);
        Share::from_vault(&points, 2, [1, 2, 3, 4], [5, 6, 7, 8]).unwrap()
    }

    #[test]
    fn a_share_of_a_usual_secret_has_eight_lines() {
        let text = lines(&share());
        assert_eq!(text.lines().count(), 8);
        assert!(text.lines().all(|line| line.len() == 19), "{}", *text);
        assert_eq!(parse(text.as_bytes()), Ok(share()));
    }

    #[test]
    fn people_may_type_it_in_their_way() {
        let code = code(&share());
        let typed = code.to_lowercase().replace('0', "o").replace('1', "l");
        assert_eq!(parse(typed.as_bytes()), Ok(share()));
        let spaced: String = code.chars().flat_map(|letter| [letter, ' ']).collect();
        let with_facts = format!("Share: 3\r\n{spaced}\r\n\r\nNote: keep\n");
        assert_eq!(parse(with_facts.as_bytes()), Ok(share()));
    }

    #[test]
    fn each_fault_has_its_text() {
        let code = code(&share());
        let changed = |at: usize, with: &str| {
            let mut text = code.to_string();
            text.replace_range(at..at + 1, with);
            parse(text.as_bytes()).unwrap_err()
        };
        for (error, expected) in [
            (parse(b"").unwrap_err(), "no code"),
            (parse(b"Share: 1\n").unwrap_err(), "no code"),
            (changed(50, "!"), "a character that no code has"),
            (changed(50, "u"), "a character that no code has"),
            (changed(50, "Z"), "its check is wrong"),
            (changed(0, "5"), "version"),
            (
                parse(&code.as_bytes()[..60]).unwrap_err(),
                "its check is wrong",
            ),
            (parse(&[b'0'; MAX_TEXT + 1]).unwrap_err(), "4097 bytes"),
        ] {
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn mutated_texts_give_the_share_or_an_error() {
        let text = lines(&share());
        for bytes in mutations(text.as_bytes(), 20_000) {
            if let Ok(parsed) = parse(&bytes) {
                assert_eq!(parsed, share());
            }
        }
    }
}
