//! What can go wrong with a TPM, as sentences for the machine's own console.

use std::fmt;

use tss_esapi::constants::response_code::{Tss2ResponseCode, Tss2ResponseCodeKind};

use super::{Bank, Location};

/// Why the TPM did not do what was asked.
#[derive(Debug, Clone)]
pub enum Error {
    /// None of these devices is there.
    None([&'static str; 2]),
    /// It is not to be opened: where, why.
    Open(Location, String),
    /// A command failed: where, which, the TPM's response.
    Command(Location, &'static str, tss_esapi::Error),
    /// The bank is not allocated.
    NoBank(Bank),
    /// Fewer PCRs were read than asked for.
    ShortRead {
        /// Asked for.
        asked: usize,
        /// Read.
        got: usize,
    },
    /// PCRs were extended during each of several quotes.
    Changing,
    /// PCR 15 does not hold the one measurement of the cluster ID.
    Measured {
        /// In this bank.
        bank: Bank,
        /// The value after one measurement from zero.
        expected: Vec<u8>,
        /// Read back.
        got: Vec<u8>,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::None(devices) => write!(
                f,
                "this machine has no TPM: neither {} nor {} is there. Give the VM a TPM 2.0, or load its driver",
                devices[0], devices[1]
            ),
            Error::Open(location, why) => write!(f, "cannot open the TPM at {location}: {why}"),
            Error::Command(location, what, error) => {
                write!(
                    f,
                    "the TPM at {location} failed: {what}: {}",
                    in_words(*error)
                )
            }
            Error::NoBank(bank) => {
                write!(
                    f,
                    "the TPM has no {bank:?} bank of PCRs: allocate it in the firmware's settings"
                )
            }
            Error::ShortRead { asked, got } => write!(f, "the TPM gave {got} of {asked} PCRs"),
            Error::Changing => {
                f.write_str("PCRs changed during each quote: something keeps extending them")
            }
            Error::Measured {
                bank,
                expected,
                got,
            } => write!(
                f,
                "PCR 15 of the {bank:?} bank is wrong after the cluster ID was measured: expected {}, got {}; something else \
                 extended it, and no cluster lets such a machine in. Reboot it",
                hex(expected),
                hex(got)
            ),
        }
    }
}

impl std::error::Error for Error {}

/// An error of the bindings: what it means, its number, and what to do where that is known. Their own text calls whatever
/// was not said by the TPM itself "response code not recognized".
pub(super) fn in_words(error: tss_esapi::Error) -> String {
    let code = match error {
        tss_esapi::Error::Tss2Error(code) => code,
        tss_esapi::Error::WrapperError(kind) => return kind.to_string(),
    };
    let number = number(code);
    // TSS2_RC_LAYER: bits 16 to 23 say who speaks (tss2_common.h)
    match (number >> 16) & 0xff {
        // the TPM; the resource manager, in the TPM's words
        0 | 12 => format!("{code} (response code {number:#x}){}", advice(code)),
        10 => format!("it does not answer, or is no TPM 2.0 (transport error {number:#x})"),
        layer => format!("error {number:#x} of the TPM library's layer {layer}"),
    }
}

/// The bindings keep the number to themselves, but print it.
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
        Some(AuthFail | BadAuth) => ". Its owner hierarchy has a password: clear the TPM",
        Some(Initialize) => ". The firmware did not start it: restart the machine",
        Some(Failure) => ". It is in failure mode: restart the machine",
        Some(Lockout) => ". It is locked after wrong passwords: wait, or clear it",
        Some(ObjectMemory | SessionMemory) => {
            ". Others fill its memory: flush their objects, or use /dev/tpmrm0"
        }
        _ => "",
    }
}
