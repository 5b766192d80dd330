//! Reads texts from untrusted bytes.

use base::bytes::Reader;
use base::text::{hex, is_visible};

/// Maximum number of characters of a text. A kernel's command line has at most 2048 (Linux,
/// COMMAND_LINE_SIZE of x86).
const MAX_TEXT: usize = 2048;

/// Returns the first characters of a text on one line, with `?` for each character that could
/// affect a terminal.
pub fn plain(text: &str) -> String {
    let shown = |c: char| match c {
        ' '..='~' => c,
        '\n' | '\t' => ' ',
        c if c.is_alphanumeric() && is_visible(c) => c,
        _ => '?',
    };
    let text: String = text.chars().take(MAX_TEXT).map(shown).collect();
    text.trim_end().into()
}

/// Returns bytes that are a text in ASCII, with or without terminating zeros.
pub fn ascii(data: &[u8]) -> Option<String> {
    let end = data.iter().rposition(|byte| *byte != 0)? + 1;
    let is_text = |byte: &u8| matches!(byte, b' '..=b'~' | b'\n' | b'\t');
    data[..end]
        .iter()
        .all(is_text)
        .then(|| plain(&String::from_utf8_lossy(&data[..end])))
}

/// Returns bytes that are a text in UTF-16, with or without terminating zeros. At least half of it
/// must be ASCII, because any bytes are valid UTF-16 in some script.
pub fn utf16(data: &[u8]) -> Option<String> {
    // old versions of boot loaders measure one extra byte
    let units = data.chunks_exact(2);
    let units: Vec<u16> = units
        .map(|unit| u16::from_le_bytes([unit[0], unit[1]]))
        .collect();
    let end = units.iter().rposition(|unit| *unit != 0)? + 1;
    let text = String::from_utf16(&units[..end]).ok()?;
    let is_text = |c: char| c == '\n' || !c.is_control();
    let plain_characters = text.chars().filter(char::is_ascii).count();
    (text.chars().all(is_text) && plain_characters * 2 >= end).then(|| plain(&text))
}

/// Returns an EFI_GUID as text.
pub fn guid(data: &[u8]) -> Option<String> {
    let mut reader = Reader(data);
    let (a, b, c) = (reader.u32_le()?, reader.u16_le()?, reader.u16_le()?);
    let (d, e) = (reader.take(2)?, reader.take(6)?);
    Some(format!("{a:08x}-{b:04x}-{c:04x}-{}-{}", hex(d), hex(e)))
}
