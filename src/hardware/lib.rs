//! Evidence of confidential hardware: reports and quotes of AMD SEV-SNP and Intel TDX, the certificates that sign them, and what
//! an operator can demand of them. Everything takes bytes and a time and returns values; only the files named `guest.rs` talk to
//! the kernel of a confidential machine.

pub mod claims;
pub mod snp;
pub mod tdx;
pub mod tsm;

pub use claims::PlatformClaims;

use serde::de::Error;
use serde::{Deserialize, Deserializer};

/// Returns bytes in lower-case hexadecimal.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Reads a list that has an entry: an empty one could be meant to accept nothing, but it would accept everything.
pub fn some<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    let list = Vec::deserialize(deserializer)?;
    match list.is_empty() {
        true => Err(D::Error::custom(
            "a list is empty: name what is accepted, or leave the field out",
        )),
        false => Ok(list),
    }
}
