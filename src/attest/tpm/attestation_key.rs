//! The attestation key: a restricted key, which signs only structures that the TPM generated. A cloud may have prepared it
//! ([`KeySource`]). A machine makes its own as an RSA primary key in the owner hierarchy, at a persistent handle. Handle and template are those of the old system, so the name of a machine does not
//! change with the system.
//!
//! The template does not set noDA, which has a drawback: a TPM counts each power failure after the use of such a key as a wrong
//! password (part 1 §19.8.6). After a few of them it refuses the key, so the machine gets no quotes and cannot open its disk.
//! [`used`] prevents this: it tells the TPM that the power may fail.
//!
//! An earlier version made its key with noDA. Such a key is kept if it is persistent, because it names the machine.

use tss_esapi::attributes::ObjectAttributesBuilder;
use tss_esapi::constants::{CapabilityType, StartupType};
use tss_esapi::handles::{KeyHandle, ObjectHandle, PersistentTpmHandle, TpmHandle};
use tss_esapi::interface_types::algorithm::{HashingAlgorithm, PublicAlgorithm};
use tss_esapi::interface_types::dynamic_handles::Persistent;
use tss_esapi::interface_types::key_bits::RsaKeyBits;
use tss_esapi::interface_types::resource_handles::{Hierarchy, Provision};
use tss_esapi::interface_types::session_handles::AuthSession;
use tss_esapi::structures::{
    CapabilityData, HashScheme, Public, PublicBuilder, PublicKeyRsa, PublicRsaParametersBuilder,
    RsaExponent, RsaScheme,
};
use tss_esapi::traits::UnMarshall;
use tss_esapi::{Context, Result};

use super::error::in_words;
use super::nv;

/// The default handle of go-tpm-tools for an RSA attestation key.
const HANDLE: u32 = 0x8100_8f01;

/// Where the attestation key of a machine comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeySource {
    /// The machine makes it, in the owner hierarchy.
    Own,
    /// The cloud has stored it at this persistent handle.
    Persistent(u32),
    /// The cloud has stored its template (TPMT_PUBLIC) at this NV index: a primary key of the endorsement hierarchy.
    Template(u32),
}

/// Returns the attestation key of this source. The returned handle is valid until the context is closed.
pub fn load(context: &mut Context, source: KeySource) -> Result<(KeyHandle, Public)> {
    match source {
        KeySource::Own => load_own(context),
        KeySource::Persistent(handle) => load_persistent(context, handle),
        KeySource::Template(index) => load_from_template(context, index),
    }
}

fn load_persistent(context: &mut Context, handle: u32) -> Result<(KeyHandle, Public)> {
    let key = persistent(context, handle)?.ok_or(tss_esapi::Error::WrapperError(
        tss_esapi::WrapperErrorKind::InvalidHandleState,
    ))?;
    let (public, _, _) = context.read_public(key.into())?;
    Ok((key.into(), public))
}

/// Creates the key again, which is the same each time. Closing the context flushes it.
fn load_from_template(context: &mut Context, index: u32) -> Result<(KeyHandle, Public)> {
    let template = Public::unmarshall(&nv::read(context, index)?)?;
    let made = context.execute_with_session(Some(AuthSession::Password), |context| {
        context.create_primary(Hierarchy::Endorsement, template, None, None, None, None)
    })?;
    Ok((made.key_handle, made.out_public))
}

/// Returns the key at its handle if it matches the template; else creates the key and makes it persistent. The returned handle is
/// valid until the context is closed.
fn load_own(context: &mut Context) -> Result<(KeyHandle, Public)> {
    if let Some(handle) = persistent(context, HANDLE)? {
        let (public, _, _) = context.read_public(handle.into())?;
        if fits(&public, &template(false)?) || fits(&public, &template(true)?) {
            return Ok((handle.into(), public));
        }
        log::warn!(
            "the TPM has another key at {HANDLE:#x}; it is replaced with the attestation key"
        );
        evict(context, handle)?;
    }
    let made = with_owner(context, |context| {
        context.create_primary(Hierarchy::Owner, template(false)?, None, None, None, None)
    })?;
    match evict(context, made.key_handle.into()) {
        Ok(kept) => {
            context.flush_context(made.key_handle.into())?;
            Ok((kept.into(), made.out_public))
        }
        Err(error) => {
            // a full TPM must not prevent the machine from opening its disk: the seed of the hierarchy and the template always
            // give the same key, only more slowly; closing the context flushes the key
            log::warn!(
                "the TPM cannot store the attestation key, so each quote creates it again: {}",
                in_words(error)
            );
            Ok((made.key_handle, made.out_public))
        }
    }
}

fn persistent(context: &mut Context, handle: u32) -> Result<Option<ObjectHandle>> {
    let object = TpmHandle::Persistent(PersistentTpmHandle::new(handle)?);
    // reading the object directly would log an error if it does not exist
    let (CapabilityData::Handles(handles), _) =
        context.get_capability(CapabilityType::Handles, handle, 1)?
    else {
        return Ok(None);
    };
    if !handles.into_inner().contains(&object) {
        return Ok(None);
    }
    context.tr_from_tpm_public(object).map(Some)
}

/// Calls TPM2_EvictControl, which makes a transient object persistent or removes a persistent object.
fn evict(context: &mut Context, object: ObjectHandle) -> Result<ObjectHandle> {
    let persistent = Persistent::Persistent(PersistentTpmHandle::new(HANDLE)?);
    with_owner(context, |context| {
        context.evict_control(Provision::Owner, object, persistent)
    })
}

/// Runs `command` authorized with the empty password of the owner hierarchy.
fn with_owner<T>(
    context: &mut Context,
    command: impl FnOnce(&mut Context) -> Result<T>,
) -> Result<T> {
    context.execute_with_session(Some(AuthSession::Password), command)
}

/// Must be called after the last use of the key: an orderly shutdown (TPM2_Shutdown, part 3 §9.4). A later power failure does not
/// count as a wrong password. The TPM remains usable.
pub fn used(context: &mut Context, key: &Public) {
    if key.object_attributes().no_da() {
        return;
    }
    if let Err(error) = context.shutdown(StartupType::Clear) {
        // no error: the quote exists, and a later consequence is reported by the TPM
        log::warn!(
            "the TPM will count a power failure as a wrong password: {}",
            in_words(error)
        );
    }
}

/// Returns whether a key was made with this template: everything except the modulus is equal.
fn fits(public: &Public, template: &Public) -> bool {
    match (public, template) {
        (
            Public::Rsa {
                object_attributes,
                name_hashing_algorithm,
                auth_policy,
                parameters,
                ..
            },
            Public::Rsa {
                object_attributes: our_attributes,
                name_hashing_algorithm: our_hash,
                auth_policy: our_policy,
                parameters: our_parameters,
                ..
            },
        ) => {
            (
                object_attributes,
                name_hashing_algorithm,
                auth_policy,
                parameters,
            ) == (our_attributes, our_hash, our_policy, our_parameters)
        }
        _ => false,
    }
}

/// Returns the template: RSA 2048, RSASSA with SHA-256, attributes 0x00050072; with noDA 0x00050472. The password is empty.
fn template(no_da: bool) -> Result<Public> {
    let attributes = ObjectAttributesBuilder::new()
        .with_fixed_tpm(true)
        .with_fixed_parent(true)
        .with_sensitive_data_origin(true)
        .with_user_with_auth(true)
        .with_no_da(no_da)
        .with_restricted(true)
        .with_sign_encrypt(true)
        .build()?;
    let scheme = RsaScheme::RsaSsa(HashScheme::new(HashingAlgorithm::Sha256));
    let parameters = PublicRsaParametersBuilder::new()
        .with_scheme(scheme)
        .with_key_bits(RsaKeyBits::Rsa2048)
        .with_exponent(RsaExponent::default())
        .with_is_signing_key(true)
        .with_is_decryption_key(false)
        .with_restricted(true);
    PublicBuilder::new()
        .with_public_algorithm(PublicAlgorithm::Rsa)
        .with_name_hashing_algorithm(HashingAlgorithm::Sha256)
        .with_object_attributes(attributes)
        .with_rsa_parameters(parameters.build()?)
        .with_rsa_unique_identifier(PublicKeyRsa::default())
        .build()
}
