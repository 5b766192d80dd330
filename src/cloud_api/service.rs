//! What a metadata service says: to each boot of a fresh node, for an init, and for the certificates of
//! kubelets.

use std::net::IpAddr;
use std::sync::Arc;

use base::machines::{Error, Instance};
use cloud::http::MAX_BODY;
use cloud::qemu;

use crate::range::Range;

/// A client of a metadata service, if the service's location is valid.
pub type Made = Result<Arc<dyn Service>, Error>;

/// The metadata service of the cloud in which this machine runs, as each boot asks it. Each call
/// makes its requests without retries; the caller decides about retries.
pub trait CloudMetadata: Send + Sync {
    /// Returns this machine.
    fn own_instance(&self) -> Result<Instance, Error>;
    /// Returns all machines of the cluster with a valid description, including this one.
    fn peers(&self) -> Result<Vec<Instance>, Error>;
    /// Returns the host name or address under which all control planes are reached.
    fn load_balancer_endpoint(&self) -> Result<String, Error>;
}

/// A metadata service with all its answers. Each call makes its requests without retries.
pub trait Service: CloudMetadata {
    /// Returns the bcrypt hash (`$2a$10$..`, 60 characters) of the init secret.
    fn init_secret_hash(&self) -> Result<String, Error>;
    /// Returns additional names and addresses of all machines of the cluster, as far as the service
    /// knows them.
    fn aliases(&self) -> Result<Vec<Alias>, Error> {
        Ok(vec![])
    }
    /// Returns the time servers that the service names, in the form of the setting `time-servers`, not
    /// checked.
    fn time_servers(&self) -> Result<Option<String>, Error> {
        Ok(None)
    }
    /// Returns the address ranges of the cluster's network; empty if the service does not know
    /// them.
    fn ranges(&self) -> Result<Vec<Range>, Error> {
        Ok(vec![])
    }
}

/// Names and addresses of a machine in addition to those in its [`Instance`]; the cloud's
/// controller writes them into its Node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Alias {
    /// The name of its [`Instance`].
    pub machine: String,
    /// DNS names, internal and external.
    pub names: Vec<String>,
    /// Addresses, internal and external.
    pub addresses: Vec<IpAddr>,
}

/// Returns whether `text` is a bcrypt hash: `$2a$10$` and 53 characters; 2b and 2y are later names
/// of the same format.
pub(crate) fn is_bcrypt(text: &str) -> bool {
    let of_hash = |b: u8| b.is_ascii_alphanumeric() || b"./$".contains(&b);
    text.len() == 60 && text.starts_with("$2") && text.bytes().all(of_hash)
}

/// Returns the bcrypt hash in an answer, without a line break at its end.
pub fn bcrypt_hash(request: &str, body: &[u8]) -> Result<String, Error> {
    match std::str::from_utf8(body).map(str::trim_ascii_end) {
        Ok(hash) if is_bcrypt(hash) => Ok(hash.to_owned()),
        // the error does not repeat the answer, which may be the init secret itself
        _ => Err(Error::Nonsense {
            request: request.to_owned(),
            expected: "a bcrypt hash of 60 characters",
            got: format!("{} bytes that are not a bcrypt hash", body.len()),
        }),
    }
}

impl CloudMetadata for qemu::QemuMetadata {
    fn own_instance(&self) -> Result<Instance, Error> {
        let (url, body) = self.get("self", MAX_BODY)?;
        qemu::parse_self(&url, &body)
    }

    fn peers(&self) -> Result<Vec<Instance>, Error> {
        qemu::QemuMetadata::peers(self)
    }

    fn load_balancer_endpoint(&self) -> Result<String, Error> {
        self.endpoint()
    }
}

impl Service for qemu::QemuMetadata {
    fn init_secret_hash(&self) -> Result<String, Error> {
        let (url, body) = self.get("initsecrethash", MAX_BODY)?;
        bcrypt_hash(&format!("GET {url}"), &body)
    }

    fn time_servers(&self) -> Result<Option<String>, Error> {
        match self.get("timeservers", MAX_BODY) {
            Ok((_, body)) => Ok(Some(String::from_utf8_lossy(&body).trim_end().into())),
            // the list has none, or the server is that of Constellation
            Err(Error::Status { status: 404, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: &str = "$2a$10$N9qo8uLOickgx2ZMRZoMyeIjZAgcfl7p92ldGxad68LJZdL17lhWy";

    #[test]
    fn a_hash_is_read_without_its_line_break_and_nothing_else_is_a_hash() {
        let body = format!("{HASH}\n");
        assert_eq!(bcrypt_hash("GET url", body.as_bytes()).unwrap(), HASH);
        for body in [&b"not found"[..], b"", &HASH.as_bytes()[1..], &[0xff; 60]] {
            let error = bcrypt_hash("GET url", body).unwrap_err();
            assert!(matches!(error, Error::Nonsense { .. }), "{error}");
        }
    }
}
