//! Requests to a cloud's API over HTTPS.

use base::machines::Error;
use cloud::http::Http;

/// Makes a client of the API at this base URL: `https://..`, or `http://` on an address of this machine.
pub fn api(base_url: &str) -> Result<Http, Error> {
    let client = http::api(base_url).map_err(|problem| Error::Url {
        url: http::shown(base_url),
        problem: format!("{problem}; expected https://HOST[:PORT][/PATH]"),
    })?;
    Ok(Http::by(base_url, client))
}
