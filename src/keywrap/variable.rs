//! Credentials in environment variables, which the services' own programs read too.

use cloud_api::aws::credentials;
use zeroize::Zeroizing;

use super::error::Error;

/// Returns the value of a variable; an empty variable counts as not set.
pub fn variable(name: &str) -> Result<Option<Zeroizing<String>>, Error> {
    Ok(credentials::variable(credentials::environment, name)?)
}

/// Returns whether text can be a credential in a header field.
pub fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic())
}
