//! The errors of a TPM, as sentences for the console of the machine.

use std::fmt;
use std::io;

use base::text::hex;

use super::bank::Bank;
use super::channel::CommandError;
use super::location::Location;

/// Why a TPM operation failed.
#[derive(Debug, Clone)]
pub enum Error {
    /// None of these devices exists.
    None([&'static str; 2]),
    /// The TPM at this location cannot be opened: the reason.
    Open(Location, String),
    /// A command failed: the location, the command, and the response of the TPM.
    Command(Location, &'static str, CommandError),
    /// The TPM does not answer requests for documents of AWS's hypervisor: the location, the
    /// command, and the response of the TPM.
    NoDocuments(Location, &'static str, CommandError),
    /// The registers of a TDX machine cannot be read or extended: a sentence.
    Registers(String),
    /// The bank is not allocated.
    NoBank(Bank),
    /// The TPM returned fewer PCRs than requested.
    ShortRead {
        /// Number of requested PCRs.
        asked: usize,
        /// Number of returned PCRs.
        got: usize,
    },
    /// A PCR changed during each of several quotes.
    Changing,
    /// A credential is not for this TPM's endorsement key and attestation key.
    Credential,
    /// PCR 15 does not have the value after one measurement of the cluster ID.
    Measured {
        /// The bank.
        bank: Bank,
        /// The value after one measurement from zero.
        expected: Vec<u8>,
        /// The value that was read back.
        got: Vec<u8>,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::None(devices) => write!(
                f,
                "this machine has no TPM: neither {} nor {} exists. Add a TPM 2.0 to the VM, or load its driver",
                devices[0], devices[1]
            ),
            Error::Open(location, why) => write!(f, "cannot open the TPM at {location}: {why}"),
            Error::Command(location, what, error) => {
                write!(f, "the TPM at {location} failed: {what}: {error}")
            }
            Error::NoDocuments(location, what, error) => write!(
                f,
                "the TPM at {location} is no NitroTPM, or it makes no attestation documents: {what}: {error}"
            ),
            Error::Registers(why) => f.write_str(why),
            Error::NoBank(bank) => {
                write!(
                    f,
                    "the TPM has no {bank:?} bank of PCRs: allocate the bank in the firmware settings"
                )
            }
            Error::ShortRead { asked, got } => write!(f, "the TPM returned {got} of {asked} PCRs"),
            Error::Changing => f.write_str(
                "a PCR changed during each quote: another program extends PCRs continuously",
            ),
            Error::Credential => f.write_str(
                "the TPM cannot decrypt the peer's credential: it was made for another TPM, for another attestation key, or was \
                 altered on its way",
            ),
            Error::Measured {
                bank,
                expected,
                got,
            } => write!(
                f,
                "PCR 15 of the {bank:?} bank is wrong after the cluster ID was measured: expected {}, got {}; another program \
                 extended it, and no cluster admits such a machine. Reboot the machine",
                hex(expected),
                hex(got)
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
