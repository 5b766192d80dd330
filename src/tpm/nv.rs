//! NV indices: memory in the TPM, where clouds store certificates and key templates.

use super::response_code;
use super::{Error, Tpm, endorsement_key};

impl Tpm {
    /// Returns the content of an NV index; `None` if it does not exist.
    pub fn nv(&mut self, index: u32) -> Result<Option<Vec<u8>>, Error> {
        self.run("reading an NV index", |tpm| match tpm.nv_read(index, &[]) {
            Err(error) if error.is(response_code::HANDLE) => Ok(None),
            content => content.map(Some),
        })
    }

    /// Returns the certificates (DER) at the start of an NV index; none if it does not exist.
    pub fn certificates(&mut self, index: u32) -> Result<Vec<Vec<u8>>, Error> {
        let stored = self.nv(index)?.unwrap_or_default();
        Ok(endorsement_key::split(&stored))
    }
}
