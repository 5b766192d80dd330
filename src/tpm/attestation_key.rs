//! The attestation key: a restricted key, which signs only structures that the TPM generated. A
//! cloud may have prepared it ([`KeySource`]). A machine makes its own as an RSA primary key in the
//! owner hierarchy, at a persistent handle. Handle and template are the same as Constellation's, so
//! a machine keeps its name when it changes between the two.
//!
//! The template does not set noDA, which has a disadvantage: after a use of such a key, a TPM
//! counts each power failure as a wrong password (part 1 §19.8.6). After a few of them it refuses
//! the key, so the machine gets no quotes and cannot open its disk. [`used`] prevents this: it
//! tells the TPM that the power may fail.
//!
//! An earlier version of this program made its key with noDA. Such a key is kept if it is
//! persistent, because it names the machine.

use super::channel::{Result, TpmChannel};
use super::commands::{ENDORSEMENT, OWNER, sized};
use super::response_code;

/// The default handle of go-tpm-tools for an RSA attestation key.
const HANDLE: u32 = 0x8100_8f01;
/// TPMA_OBJECT_NODA (part 2 §8.3).
const NO_DA: u32 = 1 << 10;
/// The attributes of the key: fixedTPM, fixedParent, sensitiveDataOrigin, userWithAuth, restricted,
/// sign.
const ATTRIBUTES: u32 = 0x0005_0072;

/// The source of a machine's attestation key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeySource {
    /// The machine makes it, in the owner hierarchy.
    Own,
    /// The cloud has stored it at this persistent handle.
    Persistent(u32),
    /// The cloud has stored its template (TPMT_PUBLIC) at this NV index: a primary key of the
    /// endorsement hierarchy.
    Template(u32),
}

/// Returns the attestation key of this source: its handle, which is valid until the channel is
/// closed, and TPMT_PUBLIC.
pub fn load(tpm: &mut TpmChannel, source: KeySource) -> Result<(u32, Vec<u8>)> {
    match source {
        KeySource::Own => load_own(tpm),
        KeySource::Persistent(handle) => Ok((handle, tpm.read_public(handle)?)),
        // the seed of the hierarchy and the template always give the same key
        KeySource::Template(index) => {
            let template = tpm.nv_read(index, &[])?;
            tpm.create_primary(ENDORSEMENT, &template)
        }
    }
}

/// Returns the key at its handle if it matches the template; else creates the key and makes it
/// persistent.
fn load_own(tpm: &mut TpmChannel) -> Result<(u32, Vec<u8>)> {
    match tpm.read_public(HANDLE) {
        Ok(public) if fits(&public, 0) || fits(&public, NO_DA) => return Ok((HANDLE, public)),
        Ok(_) => {
            log::warn!("replacing another key at {HANDLE:#x} in the TPM with the attestation key");
            tpm.evict(HANDLE, HANDLE)?;
        }
        Err(error) if error.is(response_code::HANDLE) => {}
        Err(error) => return Err(error),
    }
    let (made, public) = tpm.create_primary(OWNER, &template(0))?;
    match tpm.evict(made, HANDLE) {
        Ok(()) => {
            tpm.flush(made)?;
            Ok((HANDLE, public))
        }
        Err(error) => {
            // a full TPM must not prevent the machine from opening its disk: the seed of the
            // hierarchy and the template always give the same key, only more slowly; closing the
            // channel flushes the key
            log::warn!(
                "the TPM cannot store the attestation key, so each quote creates it again: {error}"
            );
            Ok((made, public))
        }
    }
}

/// Must be called after the last use of the key: an orderly shutdown (TPM2_Shutdown, part 3 §9.4).
/// A later power failure does not count as a wrong password. The TPM remains usable.
pub fn used(tpm: &mut TpmChannel, public: &[u8]) {
    let attributes = public.get(4..8).and_then(|four| four.try_into().ok());
    if attributes.is_some_and(|attributes| u32::from_be_bytes(attributes) & NO_DA != 0) {
        return;
    }
    if let Err(error) = tpm.shutdown() {
        // no error: the quote exists, and the TPM reports any later consequence
        log::warn!(
            "TPM2_Shutdown failed: the TPM will count the next power failure as a wrong password: {error}"
        );
    }
}

/// Returns whether a key was made with the template: everything except the modulus is equal.
fn fits(public: &[u8], no_da: u32) -> bool {
    let template = template(no_da);
    public.starts_with(&template[..template.len() - 2])
}

/// Returns the template (TPMT_PUBLIC): RSA 2048, RSASSA with SHA-256, attributes 0x00050072; with
/// noDA 0x00050472. The password is empty.
fn template(no_da: u32) -> Vec<u8> {
    let mut template = vec![0x00, 0x01, 0x00, 0x0b]; // TPM_ALG_RSA, TPM_ALG_SHA256
    template.extend((ATTRIBUTES | no_da).to_be_bytes());
    template.extend(sized(&[])); // no policy
    // TPM_ALG_NULL: not a key for storage; RSASSA with SHA-256; 2048 bits; exponent 65537, which is
    // written as 0
    template.extend([0x00, 0x10, 0x00, 0x14, 0x00, 0x0b, 0x08, 0x00, 0, 0, 0, 0]);
    template.extend(sized(&[])); // no modulus
    template
}
