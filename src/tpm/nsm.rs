//! Requests to the Nitro Security Module (NSM): AWS's hypervisor answers them through the TPM that
//! it emulates, a NitroTPM. There is no standard for it. AWS publishes a program
//! (aws/NitroTPM-Tools, nitro-tpm-attest 1.0.3), and this file does the same:
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
//! Two things differ. AWS's program salts its sessions with the endorsement key. A salt protects a
//! weak authorization value from observers of the bus. Our value is as random as a salt, and the
//! only observer on a NitroTPM's bus is the hypervisor, which answers the request. And AWS's
//! program uses the first free index, so a killed run leaves an index for ever. Ours is always the
//! same: the next run removes it. A lock on the device ensures that programs take turns.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use base::crypto::{Secret, random};
use ring::{digest, hmac};

use super::channel::{Result, TpmChannel};
use super::commands::Authorization;
use super::response_code;
use super::{Bank, Error, Location, Tpm, open_channel, open_device, repeat, watch};

/// TPM_SE_HMAC, and the attribute continueSession: the session outlives its command. The code that
/// started the session ends it, also after an error.
const SE_HMAC: u8 = 0;
const CONTINUE_SESSION: u8 = 1;
/// The length of nonces and authorization values in bytes: that of the session's hash.
const NONCE: usize = 64;
/// TPMA_NV_AUTHWRITE and TPMA_NV_AUTHREAD (part 2 §13.4).
const BY_PASSWORD: u32 = 1 << 2 | 1 << 18;
/// TPM2_VENDOR_AWS_NSM_REQUEST
const NSM_REQUEST: u32 = 0x2000_0001;
/// The name of the request, for the log.
const WHAT: &str = "AWS's command for attestation documents (0x20000001)";
/// The NV index, in the owner's range (TCG, "Registry of Reserved TPM 2.0 Handles and Localities").
const INDEX: u32 = 0x0180_464c;
/// The size of the index, and the maximum size of a request or answer, in bytes.
pub const MESSAGE_SIZE: usize = 8192;
/// How long to wait for another program's lock, and the pause between two tries.
const PATIENCE: Duration = Duration::from_secs(20);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

impl Tpm {
    /// Makes AWS's hypervisor answer a request. Returns the answer, followed by meaningless bytes.
    /// [`Error::NoDocuments`] if the TPM does not know such requests.
    pub fn nsm_request(&mut self, request: &[u8]) -> std::result::Result<Vec<u8>, Error> {
        let _lock = self.lock()?;
        let auth = Secret::random(NONCE);
        self.run("NV_DefineSpace", |tpm| {
            match tpm.nv_undefine(INDEX) {
                Ok(()) => log::debug!("removed the NV index {INDEX:#x} of a run that was killed"),
                Err(error) if error.is(response_code::HANDLE) => {}
                Err(error) => return Err(error),
            }
            tpm.nv_define(
                INDEX,
                Bank::Sha512,
                BY_PASSWORD,
                MESSAGE_SIZE,
                auth.expose(),
            )
        })
        .map_err(|error| match error {
            Error::Command(location, what, error) if error.is(response_code::SIZE) => {
                Error::NoDocuments(location, what, error)
            }
            error => error,
        })?;
        let answer = self.exchange(request, &auth);
        // the next request removes it, too
        if let Err(error) = self.run("NV_UndefineSpace", |tpm| tpm.nv_undefine(INDEX)) {
            log::warn!("cannot remove the NV index {INDEX:#x} from the TPM: {error}");
        }
        answer
    }

    fn exchange(&mut self, request: &[u8], auth: &Secret) -> std::result::Result<Vec<u8>, Error> {
        let name = self.run("NV_Write", |tpm| {
            tpm.nv_write(INDEX, auth.expose(), request)?;
            Ok(tpm.nv_public(INDEX)?.name)
        })?;
        // a device without a resource manager, and a software TPM, serve one connection at a time
        self.channel = None;
        let mut result = Ok(());
        for way in ways(&self.location) {
            result = ask(&way, &name, auth);
            if !matches!(result, Err(Error::NoDocuments(..))) {
                break;
            }
        }
        result?;
        self.run("NV_Read", |tpm| tpm.nv_read(INDEX, auth.expose()))
    }

    /// Waits until no other program uses the index. Only the resource manager serves several
    /// programs at a time.
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
            let failed = |why| Error::Open(self.location.clone(), why);
            match device.try_lock() {
                Ok(()) => return Ok(Some(device)),
                Err(TryLockError::WouldBlock) if Instant::now() < end => thread::sleep(LOOK_AGAIN),
                Err(TryLockError::WouldBlock) => {
                    let seconds = PATIENCE.as_secs();
                    return Err(failed(format!(
                        "another program has used the NV index {INDEX:#x} for {seconds} s"
                    )));
                }
                Err(TryLockError::Error(error)) => {
                    return Err(failed(format!("cannot lock the device: {error}")));
                }
            }
        }
    }
}

/// Sends the request in the index.
fn ask(location: &Location, name: &[u8], auth: &Secret) -> std::result::Result<(), Error> {
    let _watch = watch::begin(location, WHAT);
    let mut channel = open_channel(location)?;
    let asked = repeat(WHAT, || Ok(request(&mut channel, name, auth)))?;
    asked.map_err(|error| {
        if error.is(response_code::COMMAND_CODE) {
            Error::NoDocuments(location.clone(), WHAT, error)
        } else {
            Error::Command(location.clone(), WHAT, error)
        }
    })
}

/// Makes the TPM answer the request in the index, whose Name is `name`. The session proves that the
/// caller knows the authorization value of the index.
fn request(channel: &mut TpmChannel, name: &[u8], auth: &Secret) -> Result<()> {
    let (session, nonce_tpm) = channel.start_session(SE_HMAC, Bank::Sha512, &random::<NONCE>())?;
    let nonce = random::<NONCE>();
    // part 1 §18.7 and §19.6.5
    let parameters = digest::digest(
        &digest::SHA512,
        &[&NSM_REQUEST.to_be_bytes()[..], name, name].concat(),
    );
    let mut proof = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA512, auth.expose()));
    for part in [parameters.as_ref(), &nonce, &nonce_tpm, &[CONTINUE_SESSION]] {
        proof.update(part);
    }
    let proof = proof.sign();
    let authorization = Authorization {
        session,
        nonce: &nonce,
        attributes: CONTINUE_SESSION,
        value: proof.as_ref(),
    };
    let done = channel.authorized(NSM_REQUEST, &[INDEX; 2], &[authorization], &[]);
    if let Err(why) = channel.flush(session) {
        log::debug!("cannot end session {session:#x} of the TPM: {why}");
    }
    done.map(drop)
}

/// The locations to which the command is sent, one after the other, until one accepts it: the
/// kernel's resource manager refuses commands that the TPM does not list (TPM_CAP_COMMANDS); the
/// device without it does not check.
fn ways(location: &Location) -> Vec<Location> {
    let mut ways = vec![location.clone()];
    if let Location::Device(path) = location {
        ways.extend(without_manager(path).map(Location::Device));
    }
    ways
}

/// Returns the device without a resource manager that belongs to `/dev/tpmrmN`: `/dev/tpmN`.
fn without_manager(path: &Path) -> Option<PathBuf> {
    let number = path.file_name()?.to_str()?.strip_prefix("tpmrm")?;
    Some(path.with_file_name(format!("tpm{number}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_without_the_resource_manager_is_asked_second() {
        let ways_of = |text: &str| {
            let ways = ways(&text.parse().unwrap());
            ways.iter().map(Location::to_string).collect::<Vec<_>>()
        };
        assert_eq!(
            ways_of("device:/dev/tpmrm1"),
            ["device:/dev/tpmrm1", "device:/dev/tpm1"]
        );
        for only in ["device:/dev/tpm0", "swtpm:host=127.0.0.1,port=1"] {
            assert_eq!(ways_of(only), [only]);
        }
    }
}
