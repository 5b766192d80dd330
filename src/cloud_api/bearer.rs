//! Requests to APIs with a token that expires: Google Cloud, Azure, OpenStack.

use base::sync::lock;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::Value;
use zeroize::Zeroizing;

use base::machines::Error;
use cloud::http::{Fields, Http, PlainResponse};

/// How long before it expires a token is renewed. A metadata service gives a new one at least four minutes before.
const EARLY: Duration = Duration::from_secs(200);
/// How long a token is used at most, even if it is valid for longer.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// Maximum length of an API's message in an error.
const MAX_MESSAGE: usize = 300;
/// Maximum depth in the JSON at which the message is searched.
const MAX_DEPTH: usize = 4;

/// A token.
#[derive(Clone)]
pub struct Token {
    value: Zeroizing<String>,
    until: Instant,
}

impl Token {
    /// Makes a token that expires in this number of seconds; `None` if the value cannot be in a header field.
    pub fn new(value: Zeroizing<String>, seconds: u64) -> Option<Token> {
        let is_visible = !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_graphic());
        let lifetime = Duration::from_secs(seconds).min(LONGEST);
        let until = Instant::now() + lifetime.saturating_sub(EARLY);
        is_visible.then_some(Token { value, until })
    }

    /// Returns the value of the header field of a request.
    pub fn value(&self) -> &str {
        &self.value
    }
}

/// An API, and the token for it.
pub struct Bearer {
    /// The header field of the token, and the text before the token.
    field: (&'static str, &'static str),
    /// What an operator can do if the API denies a request, as a clause.
    next: &'static str,
    token: Mutex<Option<Token>>,
}

impl Bearer {
    /// Makes an API without a token.
    pub fn new(field: (&'static str, &'static str), next: &'static str) -> Bearer {
        Bearer {
            field,
            next,
            token: Mutex::default(),
        }
    }

    /// Gets a new token.
    pub fn renew(&self, new: &dyn Fn() -> Result<Token, Error>) -> Result<(), Error> {
        let token = new()?;
        *lock(&self.token) = Some(token);
        Ok(())
    }

    /// Returns the answer to GET of this path and query. `new` gets a token; a token that the API refuses is renewed once.
    pub fn get(
        &self,
        api: &Http,
        path: &str,
        fields: Fields<'_>,
        limit: u64,
        new: &dyn Fn() -> Result<Token, Error>,
    ) -> Result<Vec<u8>, Error> {
        let answer = self.send(api, path, fields, limit, new)?;
        let answer = match answer.status {
            401 => {
                *lock(&self.token) = None;
                self.send(api, path, fields, limit, new)?
            }
            _ => answer,
        };
        match (answer.status, message(&answer.body)) {
            (200, _) => answer.content(),
            (status, Some(message)) => Err(Error::Denied {
                why: format!("status {status}: {message}"),
                request: answer.request,
                next: match status {
                    401 | 403 => self.next.into(),
                    _ => "this is an error of the cloud's API".into(),
                },
            }),
            _ => Err(answer.error()),
        }
    }

    fn send(
        &self,
        api: &Http,
        path: &str,
        fields: Fields<'_>,
        limit: u64,
        new: &dyn Fn() -> Result<Token, Error>,
    ) -> Result<PlainResponse, Error> {
        let token = self.token(new)?;
        let (name, prefix) = self.field;
        let value = Zeroizing::new(format!("{prefix}{}", *token.value));
        let all = [fields, &[("accept", "application/json"), (name, &value)]].concat();
        api.send("GET", path, &all, None, limit)
    }

    fn token(&self, new: &dyn Fn() -> Result<Token, Error>) -> Result<Token, Error> {
        let mut known = lock(&self.token);
        match known.as_ref().filter(|known| known.until > Instant::now()) {
            Some(known) => Ok(known.clone()),
            None => Ok(known.insert(new()?).clone()),
        }
    }
}

/// Returns the message of an API's error: `{"error": {"message": ".."}}`, whatever the name of the outer object is.
pub fn message(body: &[u8]) -> Option<String> {
    fn find(value: &Value, depth: usize) -> Option<&str> {
        let object = value.as_object()?;
        let own = object.get("message").and_then(Value::as_str);
        let inner = || object.values().find_map(|inner| find(inner, depth - 1));
        own.or_else(|| if depth == 0 { None } else { inner() })
    }
    let error: Value = serde_json::from_slice(body).ok()?;
    Some(find(&error, MAX_DEPTH)?.chars().take(MAX_MESSAGE).collect())
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    #[test]
    fn the_message_of_each_api_is_found() {
        for (body, expected) in [
            // Google Cloud
            (
                r#"{"error":{"code":403,"message":"Required 'compute.instances.list' permission","errors":[{"reason":"forbidden"}]}}"#,
                Some("Required 'compute.instances.list' permission"),
            ),
            // Azure Resource Manager
            (
                r#"{"error":{"code":"AuthorizationFailed","message":"The client has no authorization"}}"#,
                Some("The client has no authorization"),
            ),
            // Nova
            (
                r#"{"forbidden":{"message":"Policy","code":403}}"#,
                Some("Policy"),
            ),
            // Neutron
            (
                r#"{"NeutronError":{"type":"PolicyNotAuthorized","message":"disallowed","detail":""}}"#,
                Some("disallowed"),
            ),
            ("{}", None),
            ("[]", None),
            ("<html>", None),
            (r#"{"error":"message"}"#, None),
        ] {
            assert_eq!(message(body.as_bytes()).as_deref(), expected, "{body}");
        }
        let deep = r#"{"a":"#.repeat(100) + "1" + &"}".repeat(100);
        assert_eq!(message(deep.as_bytes()), None);
        for body in mutations(br#"{"error":{"code":403,"message":"x"}}"#, 5000) {
            let _ = message(&body);
        }
    }

    #[test]
    fn a_token_cannot_bring_another_field() {
        let token = |text: &str| Token::new(Zeroizing::new(text.into()), 3600);
        assert!(token("ya29.A-b_c==").is_some());
        for bad in ["", "a b", "a\r\nHost: b", "ä"] {
            assert!(token(bad).is_none(), "{bad}");
        }
    }
}
