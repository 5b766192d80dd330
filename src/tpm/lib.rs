//! The machine's TPM 2.0 (TCG, "Trusted Platform Module Library", parts 1 to 3): PCRs, the
//! attestation key, quotes.
//!
//! A [`Tpm`] is opened for each use and closed on drop. Only one is open at a time in the process,
//! because `/dev/tpm0` and a software TPM serve one client at a time. `channel` carries bytes,
//! `commands` encodes the commands, `answers` reads the responses. No C code is used, because the
//! host may emulate the TPM, and the disk's key is in the same process.

pub mod answers;
mod attestation_key;
mod bank;
mod channel;
mod commands;
mod endorsement_key;
mod error;
mod location;
mod nsm;
mod nv;
mod response_code;
mod turn;
mod watch;

pub use attestation_key::KeySource;
pub use bank::Bank;
pub use channel::parse_response;
pub use endorsement_key::{Credential, EndorsementKind, KeyEndorsement};
pub use error::Error;
pub use location::Location;
pub use nsm::MESSAGE_SIZE;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::thread;

use base::crypto::CLUSTER_ID_LEN;
use base::text::hex;
use channel::{CommandError, PAUSES, TpmChannel, open_when_free};
use ring::digest;
use turn::{For, TpmUse};

/// The PCR that a node extends with its cluster ID.
pub const CLUSTER_ID_PCR: u32 = 15;
/// Maximum number of values in one answer of TPM2_PCR_Read (TPML_DIGEST, part 2 §10.9.3).
const PCRS_A_READ: usize = 8;
/// Maximum number of quotes that are made because a PCR changed between the read and the quote.
const QUOTE_TRIES: u32 = 3;
/// Maximum number of times that a command is sent because its answer was lost.
const READ_TRIES: u32 = 4;

impl Location {
    /// Returns the kernel's resource manager `/dev/tpmrm0`, or else `/dev/tpm0` without one.
    pub fn default_device() -> Result<Location, Error> {
        const DEVICES: [&str; 2] = ["/dev/tpmrm0", "/dev/tpm0"];
        let present = DEVICES.iter().find(|device| Path::new(device).exists());
        present
            .map(|device| Location::Device(device.into()))
            .ok_or_else(|| {
                Error::Failed(format!(
                    "this machine has no TPM: neither {} nor {} exists. Add a TPM 2.0 to the VM, or load its driver",
                    DEVICES[0], DEVICES[1]
                ))
            })
    }
}

/// The quote of one bank.
pub struct TpmQuote {
    /// The bank.
    pub bank: Bank,
    /// The TPMS_ATTEST structure, big endian.
    pub attest: Vec<u8>,
    /// The TPMT_SIGNATURE over the attest structure.
    pub signature: Vec<u8>,
    /// The quoted values: all PCRs of the bank.
    pub pcrs: BTreeMap<u32, Vec<u8>>,
}

/// An open TPM.
pub struct Tpm {
    /// `None` after it was closed for another connection, until the next command.
    channel: Option<TpmChannel>,
    location: Location,
    _turn: TpmUse,
}

impl Tpm {
    /// Opens the TPM, and waits while another thread has it open. Errors: [`Error::Open`].
    pub fn open(location: &Location) -> Result<Tpm, Error> {
        Tpm::open_in_turn(location, turn::take(For::Own))
    }

    /// Opens the TPM for a peer that called this machine. Also waits while the machine itself waits
    /// for the TPM.
    pub fn open_for_stranger(location: &Location) -> Result<Tpm, Error> {
        Tpm::open_in_turn(location, turn::take(For::Stranger))
    }

    fn open_in_turn(location: &Location, turn: TpmUse) -> Result<Tpm, Error> {
        Ok(Tpm {
            channel: Some(open_channel(location)?),
            location: location.clone(),
            _turn: turn,
        })
    }

    /// Returns the channel; opens it again if it was closed.
    fn channel(&mut self) -> Result<&mut TpmChannel, Error> {
        match &mut self.channel {
            Some(channel) => Ok(channel),
            closed => Ok(closed.insert(open_channel(&self.location)?)),
        }
    }

    /// Returns the values of all PCRs of a bank. [`Error::NoBank`] if the bank is not allocated.
    pub fn pcrs(&mut self, bank: Bank) -> Result<BTreeMap<u32, Vec<u8>>, Error> {
        let allocated = self.banks()?;
        let slots = allocated
            .into_iter()
            .find(|(found, _)| *found == bank)
            .ok_or(Error::NoBank(bank))?
            .1;
        self.read(bank, &slots)
    }

    fn read(&mut self, bank: Bank, slots: &[u32]) -> Result<BTreeMap<u32, Vec<u8>>, Error> {
        let mut values = BTreeMap::new();
        for slots in slots.chunks(PCRS_A_READ) {
            let digests = self.ask("PCR_Read", |tpm| tpm.pcr_read(bank, slots))?;
            if digests.len() != slots.len() {
                let (got, asked) = (digests.len(), slots.len());
                return Err(Error::Failed(format!(
                    "the TPM returned {got} of {asked} PCRs"
                )));
            }
            values.extend(slots.iter().copied().zip(digests));
        }
        Ok(values)
    }

    /// Extends a PCR with the hash of `data` in every allocated bank, as TPM2_PCR_Event does.
    pub fn pcr_event(&mut self, pcr: u32, data: &[u8]) -> Result<(), Error> {
        let banks = self.banks()?.into_iter();
        let hash = |bank: Bank| (bank, digest::digest(bank.hash(), data).as_ref().to_vec());
        let digests: Vec<_> = banks.map(|(bank, _)| hash(bank)).collect();
        self.run("PCR_Extend", |tpm| tpm.pcr_extend(pcr, &digests))
    }

    /// Extends [`CLUSTER_ID_PCR`] with a cluster ID in every allocated bank, and reads the PCR
    /// back. [`Error::Failed`] if something had been measured before (the new value is not
    /// extend(0, ID)).
    pub fn measure_cluster_id(&mut self, id: &[u8; CLUSTER_ID_LEN]) -> Result<(), Error> {
        match self.pcr_event(CLUSTER_ID_PCR, id) {
            // the register shows whether the TPM has extended it
            Err(Error::Command(.., error)) if error.is_lost() => {
                let pcr = self.pcrs(Bank::Sha256)?.remove(&CLUSTER_ID_PCR);
                if pcr.is_none_or(|value| value.iter().all(|byte| *byte == 0)) {
                    self.pcr_event(CLUSTER_ID_PCR, id)?;
                }
            }
            extended => extended?,
        }
        for (bank, slots) in self.banks()? {
            if !slots.contains(&CLUSTER_ID_PCR) {
                continue;
            }
            let got = self.pcrs(bank)?.remove(&CLUSTER_ID_PCR).unwrap_or_default();
            let expected = bank.extended_from_zero(id);
            if got != expected {
                return Err(Error::Failed(format!(
                    "PCR 15 of the {bank:?} bank is wrong after the cluster ID was measured: expected {}, got {}; another program \
                     extended it, and no cluster admits such a machine. Reboot the machine",
                    hex(&expected),
                    hex(&got)
                )));
            }
        }
        Ok(())
    }

    /// Returns the attestation key (TPMT_PUBLIC) and a quote of each allocated bank, or of those in
    /// `wanted` unless it is empty, signed over `nonce` (at most 64 bytes).
    pub fn quotes(
        &mut self,
        source: KeySource,
        nonce: &[u8],
        wanted: &[Bank],
    ) -> Result<(Vec<u8>, Vec<TpmQuote>), Error> {
        let (key, public) = self.load_key(source)?;
        let quotes = self.banks().and_then(|banks| {
            banks
                .into_iter()
                .filter(|(bank, _)| wanted.is_empty() || wanted.contains(bank))
                .map(|(bank, slots)| self.quote(key, nonce, bank, &slots))
                .collect::<Result<Vec<_>, _>>()
        });
        attestation_key::used(self.channel()?, &public);
        Ok((public, quotes?))
    }

    /// Returns the attestation key (TPMT_PUBLIC), which is the same in every boot.
    pub fn attestation_key(&mut self, source: KeySource) -> Result<Vec<u8>, Error> {
        self.load_key(source).map(|(_, public)| public)
    }

    fn load_key(&mut self, source: KeySource) -> Result<(u32, Vec<u8>), Error> {
        self.run("loading the attestation key", |tpm| {
            attestation_key::load(tpm, source)
        })
    }

    fn quote(
        &mut self,
        key: u32,
        nonce: &[u8],
        bank: Bank,
        slots: &[u32],
    ) -> Result<TpmQuote, Error> {
        for _ in 0..QUOTE_TRIES {
            let (attest, signature) =
                self.run("Quote", |tpm| tpm.quote(key, nonce, bank, slots))?;
            let pcrs = self.read(bank, slots)?;
            let values: Vec<u8> = pcrs.values().flatten().copied().collect();
            // TPMS_ATTEST ends with the digest of the values; its hash algorithm is that of the
            // key's scheme
            let is_of_these = [Bank::Sha256, Bank::Sha384, Bank::Sha512]
                .iter()
                .any(|bank| attest.ends_with(digest::digest(bank.hash(), &values).as_ref()));
            if is_of_these {
                return Ok(TpmQuote {
                    bank,
                    attest,
                    signature,
                    pcrs,
                });
            }
        }
        let why = "a PCR changed during each quote: another program extends PCRs continuously";
        Err(Error::Failed(why.into()))
    }

    /// Returns the allocated banks in the order of the TPM, with their PCRs.
    fn banks(&mut self) -> Result<Vec<(Bank, Vec<u32>)>, Error> {
        self.ask("GetCapability", TpmChannel::banks)
    }

    /// Runs a command, or several that may be repeated together. While the TPM is busy with
    /// something else, repeats them, for three seconds in total. Reports it if the TPM takes long
    /// to answer.
    fn run<T>(
        &mut self,
        what: &'static str,
        mut commands: impl FnMut(&mut TpmChannel) -> channel::Result<T>,
    ) -> Result<T, Error> {
        let _watch = watch::begin(&self.location, what);
        let result = repeat(what, || Ok(commands(self.channel()?)))?;
        result.map_err(|error| Error::Command(self.location.clone(), what, error))
    }

    /// Runs a command that changes nothing, as [`Tpm::run`] does. If its answer is lost, repeats it
    /// on a new connection, unless the TPM has keys of this one.
    fn ask<T>(
        &mut self,
        what: &'static str,
        mut command: impl FnMut(&mut TpmChannel) -> channel::Result<T>,
    ) -> Result<T, Error> {
        for _ in 1..READ_TRIES {
            let result = self.run(what, &mut command);
            let has_keys = !self.channel()?.created.is_empty();
            match result {
                Err(Error::Command(.., error)) if error.is_lost() && !has_keys => {
                    self.channel = None
                }
                result => return result,
            }
        }
        self.run(what, command)
    }
}

/// Runs commands, and repeats them while the TPM is busy, for three seconds in total. The outer error
/// ends it at once.
fn repeat<T>(
    what: &str,
    mut commands: impl FnMut() -> Result<channel::Result<T>, Error>,
) -> Result<channel::Result<T>, Error> {
    for pause in PAUSES {
        match commands()? {
            Err(CommandError::Refused(code)) if code.is_busy() => {
                log::debug!("the TPM is busy: trying {what} again in {pause:?}");
                thread::sleep(pause);
            }
            result => return Ok(result),
        }
    }
    commands()
}

fn open_channel(location: &Location) -> Result<TpmChannel, Error> {
    if let Location::Tdx(_) | Location::Snp(_) = location {
        let why = "a machine of this variant has no TPM";
        return Err(Error::Open(location.clone(), why.into()));
    }
    TpmChannel::open(location)
        .map_err(|error| Error::Open(location.clone(), error::of_device(&error)))
}

fn open_device(location: &Location, path: &Path) -> Result<fs::File, Error> {
    open_when_free(|| fs::File::options().read(true).write(true).open(path))
        .map_err(|error| Error::Open(location.clone(), error::of_device(&error)))
}
