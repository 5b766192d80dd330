//! The attestation key: an RSA primary key of the owner hierarchy that signs nothing but what the TPM itself says
//! (restricted), kept at a persistent handle. Handle and template are those of the old system, so a machine keeps its name when
//! it changes from one to the other.
//!
//! The template has a drawback: it does not say noDA. A TPM takes each power cut after the use of such a key for a wrong
//! password (part 1 §19.8.6), and after a few of them refuses the key, so the machine gets no quotes, and its disk stays
//! closed. [`used`] tells the TPM that the power may go from now on.
//!
//! An earlier version made its key with noDA. Where that key is persistent it stays, since others know the machine by it.

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
use tss_esapi::{Context, Result};

use super::error::in_words;

/// go-tpm-tools' default handle for an RSA attestation key.
const HANDLE: u32 = 0x8100_8f01;

/// The key, from its handle if it is there and of our template, else made and put there. The handle is good until the context
/// is closed.
pub fn load(context: &mut Context) -> Result<(KeyHandle, Public)> {
    if let Some(handle) = persistent(context)? {
        let (public, _, _) = context.read_public(handle.into())?;
        if fits(&public, &template(false)?) || fits(&public, &template(true)?) {
            return Ok((handle.into(), public));
        }
        log::warn!("the TPM holds another key at {HANDLE:#x}: replacing it by an attestation key");
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
            // a full TPM must not keep a machine from its disk: the hierarchy's seed and the template give the same key each
            // time, only later; closing the context flushes it
            log::warn!(
                "the TPM cannot keep the attestation key, so each quote makes it anew: {}",
                in_words(error)
            );
            Ok((made.key_handle, made.out_public))
        }
    }
}

fn persistent(context: &mut Context) -> Result<Option<ObjectHandle>> {
    let handle = TpmHandle::Persistent(PersistentTpmHandle::new(HANDLE)?);
    // asking for the object itself would log an error where it is not there yet
    let (CapabilityData::Handles(handles), _) =
        context.get_capability(CapabilityType::Handles, HANDLE, 1)?
    else {
        return Ok(None);
    };
    if !handles.into_inner().contains(&handle) {
        return Ok(None);
    }
    context.tr_from_tpm_public(handle).map(Some)
}

/// TPM2_EvictControl: makes a transient object persistent, removes a persistent one.
fn evict(context: &mut Context, object: ObjectHandle) -> Result<ObjectHandle> {
    let persistent = Persistent::Persistent(PersistentTpmHandle::new(HANDLE)?);
    with_owner(context, |context| {
        context.evict_control(Provision::Owner, object, persistent)
    })
}

/// Authorised by the owner hierarchy's empty password.
fn with_owner<T>(
    context: &mut Context,
    command: impl FnOnce(&mut Context) -> Result<T>,
) -> Result<T> {
    context.execute_with_session(Some(AuthSession::Password), command)
}

/// To be called after the last use of the key: an orderly shutdown (TPM2_Shutdown, part 3 §9.4), after which a power cut counts
/// for nothing. The TPM goes on working.
pub fn used(context: &mut Context, key: &Public) {
    if key.object_attributes().no_da() {
        return;
    }
    if let Err(error) = context.shutdown(StartupType::Clear) {
        // there is a quote; what may come of this later, the TPM says then
        log::warn!(
            "the TPM will take a power cut for a wrong password: {}",
            in_words(error)
        );
    }
}

/// Whether a key was made by this template: all but its modulus is the same.
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

/// RSA 2048, RSASSA with SHA-256, attributes 0x00050072; with noDA 0x00050472. Its password is empty: there is nothing to guess.
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
