//! The errors of a TPM, as sentences for the console of the machine.

use std::fmt;
use std::io;

use super::bank::Bank;
use super::channel::CommandError;
use super::location::Location;

/// Why a TPM operation failed.
#[derive(Debug, Clone)]
pub enum Error {
    /// The TPM at this location cannot be opened: the reason.
    Open(Location, String),
    /// A command failed: the location, the command, and the response of the TPM.
    Command(Location, &'static str, CommandError),
    /// The TPM does not answer requests for documents of AWS's hypervisor: the location, the
    /// command, and the response of the TPM.
    NoDocuments(Location, &'static str, CommandError),
    /// There is no TPM, its registers or those of a TDX machine cannot be read or extended, or they
    /// have another value than expected: a sentence.
    Failed(String),
    /// The bank is not allocated.
    NoBank(Bank),
    /// A credential is not for this TPM's endorsement key and attestation key.
    Credential,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Open(location, why) => write!(f, "cannot open the TPM at {location}: {why}"),
            Error::Command(location, what, error) => {
                write!(f, "the TPM at {location} failed: {what}: {error}")
            }
            Error::NoDocuments(location, what, error) => write!(
                f,
                "the TPM at {location} is no NitroTPM, or it makes no attestation documents: {what}: {error}"
            ),
            Error::Failed(why) => f.write_str(why),
            Error::NoBank(bank) => {
                write!(
                    f,
                    "the TPM has no {bank:?} bank of PCRs: allocate the bank in the firmware settings"
                )
            }
            Error::Credential => f.write_str(
                "the TPM cannot decrypt the peer's credential: it was made for another TPM, for another attestation key, or was \
                 altered on its way",
            ),
        }
    }
}

impl std::error::Error for Error {}

/// Returns why the kernel does not open a device.
pub(super) fn of_device(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ResourceBusy => format!(
            "{error}: another program has had it open for seconds. /dev/tpmrm0 serves several programs"
        ),
        _ => error.to_string(),
    }
}
