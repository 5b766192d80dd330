//! Reads JSON of peers.

use serde::de::DeserializeOwned;

use super::refusal::Kind;
use super::{Refusal, printable};

/// Maximum size of a document in bytes. A genuine one with four banks and a long event log has
/// about 30 KiB.
const MAX_DOCUMENT: usize = 256 << 10;
/// Maximum length of an error of serde_json in a log line: it repeats unexpected input of any
/// length.
const SHOWN_ERROR: usize = 160;

/// Reads an attestation document.
pub fn document<T: DeserializeOwned>(document: &[u8]) -> Result<T, Refusal> {
    if document.len() > MAX_DOCUMENT {
        let len = document.len();
        return Err(Kind::Malformed.because(format!(
            "the document has {len} bytes, expected at most {MAX_DOCUMENT}"
        )));
    }
    read("document", document)
}

/// Reads a part of a document; `what` names it in the refusal.
pub fn read<T: DeserializeOwned>(what: &str, bytes: &[u8]) -> Result<T, Refusal> {
    serde_json::from_slice(bytes).map_err(|error| {
        let error = printable(&error.to_string(), SHOWN_ERROR);
        Kind::Malformed.because(format!("the {what} cannot be read: {error}"))
    })
}
