//! Credentials in the environment, as the services' own programs have them.

use std::env;

use zeroize::Zeroizing;

use super::error::Error;

/// Returns the value of a variable; an empty one is as none.
pub fn variable(name: &str) -> Result<Option<Zeroizing<String>>, Error> {
    let value = env::var(name).ok().filter(|value| !value.is_empty());
    let Some(value) = value.map(Zeroizing::new) else {
        return Ok(None);
    };
    match is_word(&value) {
        true => Ok(Some(value)),
        false => Err(Error::Credentials(format!(
            "{name} has a character that no such value has"
        ))),
    }
}

/// Returns whether text can be a credential and a part of a header field.
pub fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic())
}
