//! The paths of a server's methods. The [`Router`](super::Router) has their handlers.

use std::collections::HashMap;

use super::status::{Code, Status};

/// The methods by path, `/package.Service/Method`.
#[derive(Default)]
pub(super) struct Methods(HashMap<String, Method>);

/// The engine's description of a method.
#[derive(Clone, Copy)]
pub(super) struct Method {
    /// The place of its handler in the router.
    pub(super) handler: usize,
    /// Whether the handler starts when the whole request was received; otherwise it starts after
    /// the headers.
    pub(super) takes_one: bool,
}

impl Methods {
    /// Adds a method; it replaces an earlier one of the same path.
    pub(super) fn add(&mut self, path: &str, method: Method) {
        self.0.insert(path.to_owned(), method);
    }

    /// Returns the service name of each method, so names repeat.
    pub(super) fn services(&self) -> impl Iterator<Item = &str> {
        self.0.keys().filter_map(|path| service_of(path))
    }

    /// Returns the method at `path`, or the status for an unknown one.
    pub(super) fn find(&self, path: &[u8]) -> Result<Method, Status> {
        let text = std::str::from_utf8(path).unwrap_or_default();
        if let Some(method) = self.0.get(text) {
            return Ok(*method);
        }
        let is_known = self.services().any(|known| service_of(text) == Some(known));
        let what = if is_known { "method" } else { "service" };
        // the answer must not be larger than the request
        let shown: String = path.escape_ascii().take(64).map(char::from).collect();
        Err(Status::new(
            Code::Unimplemented,
            format!("unknown {what} {shown}"),
        ))
    }
}

/// Returns the service of a path `/service/method`.
fn service_of(path: &str) -> Option<&str> {
    Some(path.strip_prefix('/')?.rsplit_once('/')?.0)
}
