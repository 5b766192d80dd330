//! Tokens of OAuth 2.0: an endpoint gives a token in exchange for a secret (RFC 6749 §4.4) or a signature (RFC 7523 §2.1).

use http::encoded;
use serde::Deserialize;
use zeroize::{Zeroize, Zeroizing};

use super::error::{Error, said};
use super::https::KmsServer;
use super::patience::patiently;
use super::variable::is_word;

#[derive(Deserialize, Zeroize)]
#[zeroize(drop)]
struct Given {
    access_token: String,
}

/// Gets a token from the endpoint at this path. `origin` names its owner.
pub fn token(
    server: &KmsServer,
    path: &str,
    form: &[(&str, &str)],
    origin: &str,
) -> Result<Zeroizing<String>, Error> {
    let mut body = Zeroizing::new(String::with_capacity(16 << 10));
    for (name, value) in form {
        if !body.is_empty() {
            body.push('&');
        }
        body.push_str(name);
        body.push('=');
        body.push_str(&Zeroizing::new(encoded(value)));
    }
    let fields = [
        ("accept", "application/json"),
        ("content-type", "application/x-www-form-urlencoded"),
    ];
    let host = server.host();
    patiently(|| {
        let answer = server.send("POST", path, &fields, body.as_bytes())?;
        if answer.status == 200 {
            return parse_token(host, &answer.body);
        }
        let (status, said) = (answer.status, words(&answer.body));
        let text = format!("{host}: it gives no token for {origin}: status {status}{said}");
        Err(match status {
            429 | 500.. => Error::Busy(text),
            _ => Error::Credentials(text),
        })
    })
}

/// Parses a token; the error does not repeat it.
pub fn parse_token(host: &str, body: &[u8]) -> Result<Zeroizing<String>, Error> {
    let given: Option<Given> = serde_json::from_slice(body).ok();
    given
        .filter(|given| is_word(&given.access_token))
        .map(|mut given| Zeroizing::new(std::mem::take(&mut given.access_token)))
        .ok_or_else(|| {
            Error::Answer(format!(
                "{host}: its token is not valid: {} bytes",
                body.len()
            ))
        })
}

/// Returns the endpoint's reason for a refusal (RFC 6749 §5.2).
fn words(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Refusal {
        error: String,
        #[serde(default)]
        error_description: String,
    }
    match serde_json::from_slice::<Refusal>(body) {
        Ok(refusal) => said(&format!("{}: {}", refusal.error, refusal.error_description)),
        Err(_) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    #[test]
    fn a_token_is_read_or_refused_and_never_shown() {
        let body = br#"{"token_type":"Bearer","expires_in":3599,"access_token":"eyJ0.abc-_"}"#;
        assert_eq!(&**parse_token("h", body).unwrap(), "eyJ0.abc-_");
        for body in mutations(body, 10_000) {
            match parse_token("h", &body) {
                Ok(token) => assert!(is_word(&token)),
                Err(error) => assert!(!error.to_string().contains("eyJ0"), "{error}"),
            }
        }
        let refusal = br#"{"error":"invalid_client","error_description":"AADSTS7000215:\r\nInvalid client secret"}"#;
        assert_eq!(
            words(refusal),
            " (invalid_client: AADSTS7000215: Invalid client secret)"
        );
        assert_eq!(words(b"<html>"), "");
    }
}
