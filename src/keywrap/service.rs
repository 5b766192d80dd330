//! The interface of a service: a key that encrypts other keys, and an entry in the table of all services.

use base::crypto::Secret;

use super::error::Error;
use super::uri::Query;

/// A key-encryption key in an external service. A call repeats its request for some seconds if the service is overloaded, and
/// otherwise not.
pub trait KeyEncryptionKey {
    /// Checks that the key exists and can be used. Makes the key if it is missing and `create` is set.
    fn prepare(&self, create: bool) -> Result<(), Error>;
    /// Encrypts a key.
    fn wrap(&self, key: &Secret) -> Result<Vec<u8>, Error>;
    /// Decrypts a result of `wrap`.
    fn unwrap(&self, wrapped: &[u8]) -> Result<Secret, Error>;
}

/// A kind of service.
pub struct KmsKind {
    /// The name in key URIs: `kms://NAME?..`.
    pub name: &'static str,
    /// The parameters of the URI, for help and errors.
    pub parameters: &'static str,
    /// Makes a client. Sends no request.
    pub open: fn(Query) -> Result<Box<dyn KeyEncryptionKey>, Error>,
}
