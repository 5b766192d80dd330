//! Parses the answers of key services: JSON with values in base64.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::DeserializeOwned;

use super::error::Error;

/// Parses the JSON of an answer. An error has only the position of the fault, because the answer may contain a key.
pub fn parsed<T: DeserializeOwned>(host: &str, operation: &str, body: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(body).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        Error::Answer(format!(
            "{host}: the answer to {operation} is not what this API publishes (line {line}, column {column})"
        ))
    })
}

/// Decodes base64 in an answer.
pub fn decoded(host: &str, operation: &str, text: &str) -> Result<Vec<u8>, Error> {
    STANDARD.decode(text).map_err(|_| {
        Error::Answer(format!(
            "{host}: the answer to {operation} has a value that is not base64"
        ))
    })
}
