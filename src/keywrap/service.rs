//! What each service has: a key that encrypts other keys, and a line in the table.

use base::crypto::Secret;

use super::error::Error;
use super::uri::Query;

/// A key-encryption key in an external service. A call repeats a request only if the service is busy, for some
/// seconds.
pub trait KeyEncryptionKey {
    /// Checks that the key is there and can be used; makes it if it is missing and `create` is set.
    fn prepare(&self, create: bool) -> Result<(), Error>;
    /// Encrypts a key.
    fn wrap(&self, key: &Secret) -> Result<Vec<u8>, Error>;
    /// Decrypts what `wrap` returned.
    fn unwrap(&self, wrapped: &[u8]) -> Result<Secret, Error>;
}

/// A kind of service.
pub struct Service {
    /// The name in key URIs: `kms://NAME?..`.
    pub name: &'static str,
    /// The parameters of the URI, for help and errors.
    pub parameters: &'static str,
    /// Makes a client. Sends no request.
    pub open: fn(Query) -> Result<Box<dyn KeyEncryptionKey>, Error>,
}
