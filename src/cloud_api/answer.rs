//! Parses the JSON of the clouds' APIs and metadata services.

use cloud::http::excerpt;
use machines::Error;
use serde::de::DeserializeOwned;

/// Parses the JSON of an answer. An error shows the beginning of the answer, so a caller must not pass one that begins with a secret.
pub fn parsed<T: DeserializeOwned>(
    request: &str,
    expected: &'static str,
    body: &[u8],
) -> Result<T, Error> {
    serde_json::from_slice(body).map_err(|error| {
        let error = excerpt(error.to_string().as_bytes());
        Error::Nonsense {
            request: request.to_owned(),
            expected,
            got: format!("{:?} ({error})", excerpt(body)),
        }
    })
}
