//! Non-volatile indices: what the maker of a TPM has stored in it, and what this machine leaves for the maker.

use tss_esapi::abstraction::nv;
use tss_esapi::attributes::NvIndexAttributesBuilder;
use tss_esapi::constants::CapabilityType;
use tss_esapi::handles::{NvIndexHandle, NvIndexTpmHandle, TpmHandle};
use tss_esapi::interface_types::algorithm::HashingAlgorithm;
use tss_esapi::interface_types::resource_handles::{NvAuth, Provision};
use tss_esapi::interface_types::session_handles::AuthSession;
use tss_esapi::structures::{CapabilityData, MaxNvBuffer, NvPublicBuilder};
use tss_esapi::{Context, Result};

use super::{Error, Tpm};

impl Tpm {
    /// Returns the content of an NV index; `None` if the TPM has no such index.
    pub fn nv(&mut self, index: u32) -> std::result::Result<Option<Vec<u8>>, Error> {
        self.run("reading an NV index", |context| {
            match exists(context, index)? {
                true => read(context, index).map(Some),
                false => Ok(None),
            }
        })
    }

    /// Writes an NV index with exactly this size; creates it for the owner if the TPM does not have it.
    pub fn write_nv(&mut self, index: u32, data: &[u8]) -> std::result::Result<(), Error> {
        self.run("writing an NV index", |context| {
            if !exists(context, index)? {
                define(context, index, data.len())?;
            }
            write(context, index, data)
        })
    }
}

/// Returns whether the TPM has an index. Reading it directly would log an error if it does not exist.
pub fn exists(context: &mut Context, index: u32) -> Result<bool> {
    let handle = TpmHandle::NvIndex(NvIndexTpmHandle::new(index)?);
    let (CapabilityData::Handles(handles), _) =
        context.get_capability(CapabilityType::Handles, index, 1)?
    else {
        return Ok(false);
    };
    Ok(handles.into_inner().contains(&handle))
}

/// Reads an NV index in as many commands as it needs. The owner reads it if its attributes allow that: the password of an index of
/// Azure is a secret of the paravisor. Else the empty password of the index authorizes it ("TCG EK Credential Profile", §2.2.1.4).
pub fn read(context: &mut Context, index: u32) -> Result<Vec<u8>> {
    let index = NvIndexTpmHandle::new(index)?;
    let object = NvIndexHandle::from(context.tr_from_tpm_public(TpmHandle::NvIndex(index))?);
    let (public, _) = context.nv_read_public(object)?;
    let reader = match public.attributes().owner_read() {
        true => NvAuth::Owner,
        false => NvAuth::NvIndex(object),
    };
    context.execute_with_nullauth_session(|context| nv::read_full(context, reader, index))
}

fn define(context: &mut Context, index: u32, size: usize) -> Result<()> {
    let attributes = NvIndexAttributesBuilder::new()
        .with_owner_write(true)
        .with_owner_read(true)
        .build()?;
    let public = NvPublicBuilder::new()
        .with_nv_index(NvIndexTpmHandle::new(index)?)
        .with_index_name_algorithm(HashingAlgorithm::Sha256)
        .with_index_attributes(attributes)
        .with_data_area_size(size)
        .build()?;
    context
        .execute_with_session(Some(AuthSession::Password), |context| {
            context.nv_define_space(Provision::Owner, None, public)
        })
        .map(|_| ())
}

fn write(context: &mut Context, index: u32, data: &[u8]) -> Result<()> {
    let handle = TpmHandle::NvIndex(NvIndexTpmHandle::new(index)?);
    let object = NvIndexHandle::from(context.tr_from_tpm_public(handle)?);
    let data = MaxNvBuffer::try_from(data.to_vec())?;
    context.execute_with_session(Some(AuthSession::Password), |context| {
        context.nv_write(NvAuth::Owner, object, data, 0)
    })
}
