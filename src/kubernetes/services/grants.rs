//! The syntax of grants, by which the operator says which client of the key service gets which keys:
//!
//! ```text
//! kube-system/join-service=disk,ssh,measurement;default/s3proxy=id:s3proxy-kek
//! ```
//!
//! The key service says what they mean. `firstlight apply` refuses a text that the service could not read.

use std::fmt;

/// A program of the key service's own machine.
pub const LOCAL: &str = "local";
/// Another machine of the cluster.
pub const MEMBER: &str = "member";
/// Any client, without authentication.
pub const ANYONE: &str = "anyone";

/// The names of the classes of keys.
pub const CLASSES: [&str; 6] = ["disk", "volume", "ssh", "ssh-users", "measurement", "other"];

/// A text that is not a list of grants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidGrants {
    part: String,
    why: &'static str,
}

impl InvalidGrants {
    /// Creates the error of this part of the text.
    pub fn new(part: &str, why: &'static str) -> InvalidGrants {
        let part = part.to_owned();
        InvalidGrants { part, why }
    }
}

impl fmt::Display for InvalidGrants {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.part, self.why)
    }
}

impl std::error::Error for InvalidGrants {}

/// Returns each caller and its items: names of [`CLASSES`], and ids of keys as `id:NAME`.
pub fn parse(text: &str) -> Result<Vec<(&str, Vec<&str>)>, InvalidGrants> {
    let mut grants: Vec<(&str, Vec<&str>)> = Vec::new();
    let parts = text.split(';').map(str::trim);
    for part in parts.filter(|part| !part.is_empty()) {
        let (caller, items) = part
            .split_once('=')
            .ok_or_else(|| InvalidGrants::new(part, "expected CALLER=CLASS,CLASS.."))?;
        let caller = caller.trim();
        if !is_caller(caller) {
            let why = "expected NAMESPACE/NAME, local, member or anyone as the caller";
            return Err(InvalidGrants::new(caller, why));
        }
        if grants.iter().any(|(other, _)| *other == caller) {
            return Err(InvalidGrants::new(caller, "this caller has two grants"));
        }
        let items: Vec<_> = items.split(',').map(str::trim).collect();
        if let Some(item) = items.iter().find(|item| !is_item(item)) {
            let why = "expected disk, volume, ssh, ssh-users, measurement, other or id:NAME";
            return Err(InvalidGrants::new(item, why));
        }
        grants.push((caller, items));
    }
    if grants.is_empty() {
        Err(InvalidGrants::new(
            text,
            "expected at least one grant, CALLER=CLASS,CLASS..",
        ))
    } else {
        Ok(grants)
    }
}

fn is_caller(text: &str) -> bool {
    // Names of Kubernetes objects consist of letters, digits, '-' and '.'.
    let is_name = |name: &str| {
        !name.is_empty()
            && name
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-.".contains(&b))
    };
    match text.split_once('/') {
        Some((namespace, name)) => is_name(namespace) && is_name(name),
        None => [LOCAL, MEMBER, ANYONE].contains(&text),
    }
}

fn is_item(text: &str) -> bool {
    CLASSES.contains(&text) || text.strip_prefix("id:").is_some_and(|id| !id.is_empty())
}
