//! The response codes of a TPM (TPM 2.0 part 2 §6.6), in words.

use std::fmt;

pub const INITIALIZE: u32 = 0x100;
const FAILURE: u32 = 0x101;
pub const COMMAND_CODE: u32 = 0x143;
pub const HANDLE: u32 = 0x08b;
const AUTH_FAIL: u32 = 0x08e;
pub const SIZE: u32 = 0x095;
const BAD_AUTH: u32 = 0x0a2;
const OBJECT_MEMORY: u32 = 0x902;
const SESSION_MEMORY: u32 = 0x903;
const YIELDED: u32 = 0x908;
const TESTING: u32 = 0x90a;
const NV_RATE: u32 = 0x920;
const LOCKOUT: u32 = 0x921;
const RETRY: u32 = 0x922;
const NV_UNAVAILABLE: u32 = 0x923;

/// A response code that is not success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResponseCode(pub u32);

impl ResponseCode {
    /// Returns the code without the number of the handle, session or parameter in it, and without
    /// the layer of the resource manager.
    pub fn kind(self) -> u32 {
        // bit 7 distinguishes the two formats of codes
        match self.0 & 0x080 {
            0 => self.0 & 0xfff,
            _ => self.0 & 0x0bf,
        }
    }

    /// Returns whether the TPM did not run a command only because it is busy.
    pub fn is_busy(self) -> bool {
        [NV_RATE, NV_UNAVAILABLE, RETRY, TESTING, YIELDED].contains(&self.kind())
    }

    /// Returns what the code means, and what to do.
    fn meaning(self) -> (&'static str, &'static str) {
        match self.kind() {
            _ if self.is_busy() => (
                "the TPM is busy",
                ". It stayed busy for seconds: it tests itself, or another program uses it. Restart the machine if it stays so",
            ),
            INITIALIZE => (
                "the TPM is not started",
                ". It was reset and not started again, or the firmware did not start it: restart the machine",
            ),
            FAILURE => ("the TPM is in failure mode", ": restart the machine"),
            COMMAND_CODE => ("the TPM does not know the command", ""),
            HANDLE => ("the TPM has no such key, index or session", ""),
            AUTH_FAIL | BAD_AUTH => (
                "the authorization failed",
                ". Its owner or endorsement hierarchy has a password: clear the TPM",
            ),
            OBJECT_MEMORY | SESSION_MEMORY => (
                "the TPM's memory is full",
                ": flush objects of other programs, or use /dev/tpmrm0",
            ),
            // do not advise to clear the TPM: it would get another attestation key
            LOCKOUT => (
                "the TPM is in DA lockout mode",
                ". A program tried wrong passwords too often. The TPM accepts its keys again after some time \
                 (TPM2_PT_LOCKOUT_INTERVAL); tpm2_dictionarylockout --clear-lockout ends the lockout at once, from a system that boots",
            ),
            _ => ("the TPM refused the command", ""),
        }
    }
}

impl fmt::Display for ResponseCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (meaning, advice) = self.meaning();
        write!(f, "{meaning} (response code {:#x}){advice}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_known_whatever_it_names_and_whoever_returned_it() {
        // TPM_RC_HANDLE for handle 1, and TPM_RC_SIZE for parameter 2
        assert_eq!(ResponseCode(0x18b).kind(), HANDLE);
        assert_eq!(ResponseCode(0x2d5).kind(), SIZE);
        // the kernel's resource manager does not support a command (TSS2_RESMGR_TPM_RC_LAYER)
        assert_eq!(ResponseCode(0x000b_0143).kind(), COMMAND_CODE);
        for busy in [0x920, 0x922, 0x90a] {
            assert!(ResponseCode(busy).is_busy());
        }
        assert!(!ResponseCode(0x921).is_busy());
    }
}
