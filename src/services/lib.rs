//! The services of a control plane: [`join_service`] admits nodes to the cluster, and
//! [`key_service`] derives keys. [`check`] asks them for their health, by a [`probe`].

pub mod check;
pub mod join_service;
pub mod key_service;
mod observed;
mod policy_file;
pub mod probe;
mod serving;

use std::ffi::OsString;
use std::net::SocketAddr;

use base::program::{self, Failure};

/// Parses the option `name`: `ADDRESS:PORT`, or `*:PORT`.
pub fn listen(name: &str, value: OsString) -> Result<SocketAddr, Failure> {
    let text = program::text(value)?;
    web::parse_listen(&text).map_err(|error| Failure::Usage(format!("--{name} {text:?}: {error}")))
}
