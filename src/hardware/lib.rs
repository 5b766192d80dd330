//! Evidence of confidential hardware: reports and quotes of AMD SEV-SNP and Intel TDX, the certificates that sign them, and what
//! an operator can demand of them. Everything takes bytes and a time and returns values; only the files named `guest.rs` talk to
//! the kernel of a confidential machine.

pub mod claims;
pub mod json;
mod list;
pub mod snp;
pub mod tdx;
pub mod tsm;

pub use claims::PlatformClaims;

/// Returns bytes in lower-case hexadecimal.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Decodes hexadecimal digits.
fn unhex(text: &str) -> Option<Vec<u8>> {
    let pairs = text.as_bytes().chunks(2);
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let byte = |pair: &[u8]| match pair {
        [high, low] => Some((digit(*high)? << 4 | digit(*low)?) as u8),
        _ => None,
    };
    pairs.map(byte).collect()
}
