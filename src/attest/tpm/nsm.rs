//! Requests to the Nitro Security Module (NSM): what AWS's hypervisor answers to the TPM that it emulates, a NitroTPM. There is no
//! standard for it. AWS publishes a program (aws/NitroTPM-Tools, nitro-tpm-attest 1.0.3), and this file does the same:
//!
//! ```text
//! NV_DefineSpace      an index of 8192 bytes with a random authorization value: nameAlg SHA-512, AUTHREAD, AUTHWRITE
//! NV_Write            the request, from the first byte on
//! StartAuthSession    HMAC, SHA-512
//! 0x20000001          handles = the index, as the object that authorizes and as the buffer; no parameters
//! NV_Read             the answer, from the first byte on; nothing says where it ends but itself
//! NV_UndefineSpace
//! ```
//!
//! Two things differ. AWS's program salts its sessions with the endorsement key. A salt protects a weak authorization value from whoever
//! sees the bus; ours is as random as a salt, and on the bus of a NitroTPM is only the hypervisor, which answers the request. And its
//! index is the first that is free, so a run that was killed leaves one for ever. Ours is always the same: the next run removes it.
//! Programs take turns, by a lock on the device.

use std::fs::File;
use std::thread;
use std::time::{Duration, Instant};

use base::crypto::Secret;
use tss_esapi::abstraction::nv;
use tss_esapi::attributes::NvIndexAttributesBuilder;
use tss_esapi::constants::response_code::{Tss2ResponseCode, Tss2ResponseCodeKind};
use tss_esapi::handles::{NvIndexHandle, NvIndexTpmHandle, ObjectHandle, TpmHandle};
use tss_esapi::interface_types::algorithm::HashingAlgorithm;
use tss_esapi::interface_types::resource_handles::{NvAuth, Provision};
use tss_esapi::interface_types::session_handles::AuthSession;
use tss_esapi::structures::{Auth, MaxNvBuffer, NvPublicBuilder};
use tss_esapi::{Context, Result};

use super::nv::exists;
use super::raw::{Channel, Failure, NONCE, Session, ways, without_manager};
use super::{Error, Location, PAUSES, Tpm, error, open_device, watch};

/// TPM2_VENDOR_AWS_NSM_REQUEST
const NSM_REQUEST: u32 = 0x2000_0001;
/// What is asked, for the log.
const WHAT: &str = "AWS's command for attestation documents (0x20000001)";
/// The NV index, of those that belong to the owner (TCG, "Registry of Reserved TPM 2.0 Handles and Localities").
const INDEX: u32 = 0x0180_464c;
/// The size of the index, and the maximum size of a request or answer, in bytes.
pub const MESSAGE_SIZE: usize = 8192;
/// What every TPM writes in one command, in bytes ("TCG PC Client Platform TPM Profile", TPM_PT_NV_BUFFER_MAX).
const CHUNK: usize = 512;
/// How long another program may have the lock, and the pause between two looks.
const PATIENCE: Duration = Duration::from_secs(20);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

impl Tpm {
    /// Has AWS's hypervisor answer a request. Returns the answer, which is followed by bytes without a meaning.
    /// [`Error::NoDocuments`] if the TPM does not know such requests.
    pub fn nsm_request(&mut self, request: &[u8]) -> std::result::Result<Vec<u8>, Error> {
        let _lock = self.lock()?;
        let auth = Secret::random(NONCE);
        self.run("NV_DefineSpace", |context| {
            if exists(context, INDEX)? {
                log::debug!(
                    "removing the NV index {INDEX:#x}, which a run that was killed has left"
                );
                undefine(context)?;
            }
            define(context, &auth)
        })
        .map_err(|error| match error {
            Error::Command(location, what, error) if is(error, Tss2ResponseCodeKind::Size) => {
                Error::NoDocuments(location, what, error)
            }
            error => error,
        })?;
        let answer = self.exchange(request, &auth);
        // the next request removes it, too
        if let Err(error) = self.run("NV_UndefineSpace", undefine) {
            log::warn!("the NV index {INDEX:#x} is still there: {error}");
        }
        answer
    }

    fn exchange(&mut self, request: &[u8], auth: &Secret) -> std::result::Result<Vec<u8>, Error> {
        let name = self.run("NV_Write", |context| write(context, request, auth))?;
        // a device without a resource manager, and a software TPM, serve one connection at a time
        self.context = None;
        let mut result = Ok(());
        for way in ways(&self.location) {
            result = ask(&way, &name, auth);
            if !matches!(result, Err(Error::NoDocuments(..))) {
                break;
            }
        }
        result?;
        self.run("NV_Read", |context| {
            let object = object(context, auth)?;
            let index = NvIndexTpmHandle::new(INDEX)?;
            context.execute_with_nullauth_session(|context| {
                nv::read_full(context, NvAuth::NvIndex(object.into()), index)
            })
        })
    }

    /// Waits until no other program uses the index. Only the resource manager serves several programs at a time.
    fn lock(&self) -> std::result::Result<Option<File>, Error> {
        let Location::Device(path) = &self.location else {
            return Ok(None);
        };
        if without_manager(path).is_none() {
            return Ok(None);
        }
        let device = open_device(&self.location, path)?;
        let end = Instant::now() + PATIENCE;
        loop {
            let failed = |why| Error::Transport(self.location.clone(), WHAT, why);
            match sys::file::try_lock(&device) {
                Ok(true) => return Ok(Some(device)),
                Ok(false) if Instant::now() < end => thread::sleep(LOOK_AGAIN),
                Ok(false) => {
                    let seconds = PATIENCE.as_secs();
                    return Err(failed(format!(
                        "another program has used the NV index {INDEX:#x} for {seconds} s"
                    )));
                }
                Err(error) => return Err(failed(format!("cannot lock the device: {error}"))),
            }
        }
    }
}

/// Sends the request in the index.
fn ask(location: &Location, name: &[u8], auth: &Secret) -> std::result::Result<(), Error> {
    let _watch = watch::begin(location, WHAT);
    let mut channel = Channel::open(location)
        .map_err(|error| Error::Open(location.clone(), error::of_device(&error)))?;
    let mut pauses = PAUSES.into_iter();
    loop {
        let answered = Session::start(&mut channel)
            .and_then(|mut session| session.run(NSM_REQUEST, [INDEX; 2], [name; 2], auth));
        let error = match answered {
            Ok(()) => return Ok(()),
            Err(Failure::Transport(why)) => {
                return Err(Error::Transport(location.clone(), WHAT, why));
            }
            Err(Failure::Refused(code)) => {
                tss_esapi::Error::Tss2Error(Tss2ResponseCode::from(code))
            }
        };
        match pauses.next() {
            Some(pause) if error::is_busy(error) => thread::sleep(pause),
            _ if is(error, Tss2ResponseCodeKind::CommandCode) => {
                return Err(Error::NoDocuments(location.clone(), WHAT, error));
            }
            _ => return Err(Error::Command(location.clone(), WHAT, error)),
        }
    }
}

fn is(error: tss_esapi::Error, kind: Tss2ResponseCodeKind) -> bool {
    matches!(error, tss_esapi::Error::Tss2Error(code) if code.kind() == Some(kind))
}

/// Returns the index with its authorization value.
fn object(context: &mut Context, auth: &Secret) -> Result<ObjectHandle> {
    let object = context.tr_from_tpm_public(TpmHandle::NvIndex(NvIndexTpmHandle::new(INDEX)?))?;
    context.tr_set_auth(object, Auth::try_from(auth.expose().to_vec())?)?;
    Ok(object)
}

fn define(context: &mut Context, auth: &Secret) -> Result<()> {
    let attributes = NvIndexAttributesBuilder::new()
        .with_auth_read(true)
        .with_auth_write(true)
        .build()?;
    let public = NvPublicBuilder::new()
        .with_nv_index(NvIndexTpmHandle::new(INDEX)?)
        .with_index_name_algorithm(HashingAlgorithm::Sha512)
        .with_index_attributes(attributes)
        .with_data_area_size(MESSAGE_SIZE)
        .build()?;
    let auth = Auth::try_from(auth.expose().to_vec())?;
    context
        .execute_with_session(Some(AuthSession::Password), |context| {
            context.nv_define_space(Provision::Owner, Some(auth), public)
        })
        .map(|_| ())
}

/// Writes the request; returns the Name that the index then has.
fn write(context: &mut Context, request: &[u8], auth: &Secret) -> Result<Vec<u8>> {
    let index = NvIndexHandle::from(object(context, auth)?);
    for (number, chunk) in request.chunks(CHUNK).enumerate() {
        let data = MaxNvBuffer::try_from(chunk.to_vec())?;
        context.execute_with_session(Some(AuthSession::Password), |context| {
            context.nv_write(NvAuth::NvIndex(index), index, data, (number * CHUNK) as u16)
        })?;
    }
    let (_, name) = context.nv_read_public(index)?;
    Ok(name.value().to_vec())
}

fn undefine(context: &mut Context) -> Result<()> {
    let object = context.tr_from_tpm_public(TpmHandle::NvIndex(NvIndexTpmHandle::new(INDEX)?))?;
    context.execute_with_session(Some(AuthSession::Password), |context| {
        context.nv_undefine_space(Provision::Owner, object.into())
    })
}
