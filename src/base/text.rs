//! Limits and escapes untrusted text for a log or a terminal. The precision of a format limits `{}`
//! of a text, but neither `{:?}` nor most errors of libraries, and some of these repeat their whole
//! input.

use std::fmt::Display;

/// Maximum length in characters of a library's error.
const MAX_ERROR: usize = 160;

/// Returns at most `max` characters of a text, without control characters that could affect a
/// terminal.
pub fn printable(text: &str, max: usize) -> String {
    let plain = |c: char| {
        if c == ' ' || c.is_ascii_graphic() {
            c
        } else {
            '?'
        }
    };
    let shown = text.chars().take(max).map(plain);
    shown.chain(end(text, max).chars()).collect()
}

/// Returns whether a terminal shows a character as it is. Control and format characters are
/// excluded, because they change other characters, their order or the line; so are characters
/// without a shape.
pub fn is_visible(c: char) -> bool {
    // `{:?}` also escapes quotes and backslashes, but only because of Rust's syntax
    matches!(c, '"' | '\'' | '\\') || c.escape_debug().len() == 1
}

/// Appends a character to a line, or its escape as in JSON (RFC 8259 §7) if it is not visible.
pub fn push(line: &mut String, c: char) {
    if is_visible(c) {
        return line.push(c);
    }
    for unit in c.encode_utf16(&mut [0; 2]) {
        line.push_str(&format!("\\u{unit:04x}"));
    }
}

/// Returns at most `max` characters of a text in quotes, with escapes for control characters.
pub fn quoted(text: impl AsRef<str>, max: usize) -> String {
    let text = text.as_ref();
    let shown: String = text.chars().take(max).collect();
    format!("{shown:?}{}", end(text, max))
}

/// Returns the text of a library's error about untrusted bytes.
pub fn of_error(error: impl Display) -> String {
    printable(&error.to_string(), MAX_ERROR)
}

/// Returns bytes as hexadecimal digits in lower case.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Decodes hexadecimal digits.
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let byte = |pair: &[u8]| match pair {
        [high, low] => Some((digit(*high)? << 4 | digit(*low)?) as u8),
        _ => None,
    };
    text.as_bytes().chunks(2).map(byte).collect()
}

/// Returns the text after the first characters.
fn end(text: &str, max: usize) -> &'static str {
    match text.chars().nth(max) {
        Some(_) => "..",
        None => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_that_a_terminal_does_not_show_is_escaped() {
        let shown = |text: &str| {
            let mut line = String::new();
            text.chars().for_each(|c| push(&mut line, c));
            line
        };
        for plain in ["a \"b\" 'c' \\", "é ñ 漢字 Ж א", "→ ✓ 😀"] {
            assert_eq!(shown(plain), plain);
        }
        for hidden in [
            '\0', '\n', '\r', '\t', '\x1b', '\x7f', '\u{85}', '\u{9b}', '\u{a0}', '\u{ad}',
            '\u{61c}', '\u{180e}', '\u{200b}', '\u{200d}', '\u{200e}', '\u{2028}', '\u{2029}',
            '\u{202e}', '\u{2060}', '\u{2066}', '\u{2069}', '\u{e000}', '\u{feff}', '\u{fff9}',
            '\u{ffff}',
        ] {
            let expected = format!("\\u{:04x}", u32::from(hidden));
            assert_eq!(shown(&hidden.to_string()), expected);
        }
        // a surrogate pair: U+E0041 TAG LATIN CAPITAL LETTER A
        assert_eq!(shown("\u{e0041}"), "\\udb40\\udc41");
    }

    #[test]
    fn hexadecimal_digits_are_pairs() {
        assert_eq!(unhex(&hex(&[0, 0x1f, 0xff])).unwrap(), [0, 0x1f, 0xff]);
        assert_eq!(unhex("aB").unwrap(), [0xab]);
        for bad in ["a", "abc", "+f", "g0", "é"] {
            assert_eq!(unhex(bad), None, "{bad}");
        }
    }

    #[test]
    fn text_of_a_peer_is_short_and_does_nothing_to_a_terminal() {
        assert_eq!(printable("a\x1b[2Jb\u{202e}c\n", 60), "a?[2Jb?c?");
        assert_eq!(printable("12345", 5), "12345");
        assert_eq!(printable("123456", 5), "12345..");
        assert_eq!(quoted("a\x1b\"b", 4), r#""a\u{1b}\"b""#);
        assert_eq!(quoted(String::from("12345"), 5), "\"12345\"");
        assert_eq!(quoted("123456", 5), "\"12345\"..");
        assert_eq!(of_error("x".repeat(9000)).len(), MAX_ERROR + 2);
    }
}
