//! The errors of a TPM, as sentences for the console of the machine.

use std::fmt;
use std::io;

use tss_esapi::constants::response_code::{Tss2ResponseCode, Tss2ResponseCodeKind};

use super::{Bank, Location};

/// The layer of the transport in a response code of tpm2-tss (TSS2_TCTI_RC_LAYER, tss2_common.h).
const LAYER_TCTI: u32 = 10;

/// Why a TPM operation failed.
#[derive(Debug, Clone)]
pub enum Error {
    /// None of these devices exists.
    None([&'static str; 2]),
    /// The TPM at this location cannot be opened: the reason.
    Open(Location, String),
    /// A command failed: the location, the command, and the response of the TPM.
    Command(Location, &'static str, tss_esapi::Error),
    /// The TPM does not answer requests for documents of AWS's hypervisor: the location, the command, and the response of the TPM.
    NoDocuments(Location, &'static str, tss_esapi::Error),
    /// A command that was sent without tpm2-tss failed on its way: the location, the command, a clause.
    Transport(Location, &'static str, String),
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
                let why = match of_transport(*error) {
                    // it has answered before
                    Some(number) => format!(
                        "it answers no more: it vanished, or its driver or its host gave up (transport error {number:#x})"
                    ),
                    None => in_words(*error),
                };
                write!(f, "the TPM at {location} failed: {what}: {why}")
            }
            Error::NoDocuments(location, what, error) => write!(
                f,
                "the TPM at {location} is no NitroTPM, or it makes no attestation documents: {what}: {}",
                in_words(*error)
            ),
            Error::Transport(location, what, why) => {
                write!(f, "the TPM at {location} failed: {what}: {why}")
            }
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

/// Returns whether the TPM has not run a command only because it is busy (part 2 §6.6.3, warnings).
pub(super) fn is_busy(error: tss_esapi::Error) -> bool {
    use Tss2ResponseCodeKind::{NvRate, NvUnavailable, Retry, Testing, Yielded};
    let tss_esapi::Error::Tss2Error(code) = error else {
        return false;
    };
    matches!(
        code.kind(),
        Some(NvRate | NvUnavailable | Retry | Testing | Yielded)
    )
}

/// Describes why the kernel does not open a device.
pub(super) fn of_device(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::ResourceBusy => format!(
            "{error}: another program has had it open for seconds. /dev/tpmrm0 serves several programs"
        ),
        _ => error.to_string(),
    }
}

/// Returns the number of an error of the transport (layer TCTI of tss2_common.h).
fn of_transport(error: tss_esapi::Error) -> Option<u32> {
    let tss_esapi::Error::Tss2Error(code) = error else {
        return None;
    };
    let number = number(code);
    ((number >> 16) & 0xff == LAYER_TCTI).then_some(number)
}

/// Describes an error of the bindings: its meaning, its number, and advice if it is known. The text of the bindings is "response
/// code not recognized" for every error that does not come from the TPM itself.
pub(super) fn in_words(error: tss_esapi::Error) -> String {
    let code = match error {
        tss_esapi::Error::Tss2Error(code) => code,
        tss_esapi::Error::WrapperError(kind) => return kind.to_string(),
    };
    let number = number(code);
    // TSS2_RC_LAYER: bits 16 to 23 name the layer (tss2_common.h)
    match (number >> 16) & 0xff {
        // the TPM, or the resource manager with codes of the TPM
        0 | 12 => format!("{code} (response code {number:#x}){}", advice(code)),
        LAYER_TCTI => {
            format!("it does not answer, or it is not a TPM 2.0 (transport error {number:#x})")
        }
        layer => format!("error {number:#x} of layer {layer} of the TPM library"),
    }
}

/// Extracts the number from the text of an error, because the bindings do not expose it.
fn number(code: Tss2ResponseCode) -> u32 {
    let text = match code {
        Tss2ResponseCode::Success => return 0,
        Tss2ResponseCode::FormatZero(code) => code.to_string(),
        Tss2ResponseCode::FormatOne(code) => code.to_string(),
    };
    text.rsplit("0x")
        .next()
        .and_then(|hex| u32::from_str_radix(hex, 16).ok())
        .unwrap_or(0)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn advice(code: Tss2ResponseCode) -> &'static str {
    use Tss2ResponseCodeKind::*;
    match code.kind() {
        Some(AuthFail | BadAuth) => {
            ". Its owner or endorsement hierarchy has a password: clear the TPM"
        }
        Some(Initialize) => {
            ". It was reset and not started again, or the firmware did not start it: restart the machine"
        }
        Some(NvRate | NvUnavailable | Retry | Testing | Yielded) => {
            ". It stayed busy for seconds: it tests itself, or another program uses it. Try again, and restart the machine if it stays so"
        }
        Some(Failure) => ". It is in failure mode: restart the machine",
        // not by clearing the TPM, which gives it another attestation key
        Some(Lockout) => {
            ". Some program tried wrong passwords too often. The TPM accepts its keys again after some time (TPM2_PT_LOCKOUT_INTERVAL); \
             tpm2_dictionarylockout --clear-lockout ends the lockout at once, from a system that boots"
        }
        Some(ObjectMemory | SessionMemory) => {
            ". Its memory is full: flush objects of other programs, or use /dev/tpmrm0"
        }
        _ => "",
    }
}
