//! The interface of a store.

use super::super::error::Error;
use super::super::https::KmsResponse;
use super::super::uri::Query;

/// The address of one file in a store.
pub trait FileStore {
    /// Returns the content.
    fn read(&self) -> Result<KmsResponse, Error>;
    /// Writes the content if there is no file yet. Otherwise returns [`Error::Exists`].
    fn create(&self, content: &[u8]) -> Result<(), Error>;
}

/// A kind of store.
pub struct StoreKind {
    /// The name in URIs: `storage://NAME?..`.
    pub name: &'static str,
    /// The parameters of the URI, for help and errors.
    pub parameters: &'static str,
    /// Makes a client. Sends no request.
    pub open: fn(Query) -> Result<Box<dyn FileStore>, Error>,
}
