//! NV indices: memory in the TPM, where clouds store certificates and key templates.

use super::commands::OWNER;
use super::response_code;
use super::{Bank, Error, Tpm};

/// TPMA_NV_OWNERWRITE and TPMA_NV_OWNERREAD (part 2 §13.4).
const OF_OWNER: u32 = 1 << 1 | 1 << 17;

impl Tpm {
    /// Returns the content of an NV index; `None` if it does not exist.
    pub fn nv(&mut self, index: u32) -> Result<Option<Vec<u8>>, Error> {
        self.run("reading an NV index", |tpm| match tpm.nv_read(index, &[]) {
            Err(error) if error.is(response_code::HANDLE) => Ok(None),
            content => content.map(Some),
        })
    }

    /// Writes an NV index of the owner; defines it if it does not exist.
    pub fn write_nv(&mut self, index: u32, data: &[u8]) -> Result<(), Error> {
        self.run("writing an NV index", |tpm| {
            match tpm.nv_public(index) {
                Err(error) if error.is(response_code::HANDLE) => {
                    tpm.nv_define(index, Bank::Sha256, OF_OWNER, data.len(), &[])?
                }
                exists => drop(exists?),
            }
            tpm.nv_write(OWNER, index, &[], data)
        })
    }
}
