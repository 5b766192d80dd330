//! The variant `qemu-tdx`: a TDX machine without a TPM, whose own registers are the measurements.
//!
//! ```text
//! REPORTDATA = SHA-256(user data ‖ verifier's nonce) ‖ 32 zeros
//! document   = { quote over REPORTDATA, user data }, as in Constellation; beside it, Intel's collateral if the machine has it, and
//!              the event log of the firmware (ACPI table CCEL), which explains registers to a person and proves nothing
//! registers  = 0: MRTD, 1 to 4: RTMR 0 to 3; RTMR 3 names the cluster
//! ```
//!
//! The quote contains no machine ID that survives a reboot, so documents name no machine.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tee::collateral::TdxCollateral;
use tee::tdx as guest;

use crate::document::Base64;
use crate::td::Quoter;
use crate::{AttesterVariant, IssueError, Oid, Registers, excerpt, sha256, td};
use tpm::Location;

/// The variant's line in the table.
pub const VARIANT: AttesterVariant = AttesterVariant {
    name: "qemu-tdx",
    oid: OID,
    registers: Registers::Rtmrs,
    location: default_location,
    issuer: |_| {
        let (collateral, event_log) = (td::COLLATERAL.into(), EVENT_LOG.into());
        Arc::new(TdIssuer::new(
            Arc::new(td::Kernel),
            Some(collateral),
            Some(event_log),
        ))
    },
};

/// 1.3.9900.5.99
pub const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x05, 0x63];
/// The file in which the kernel provides the event log of the firmware, including padding after its
/// end.
const EVENT_LOG: &str = "/sys/firmware/acpi/tables/data/CCEL";
/// The greatest length of a document with an event log, in bytes: a document must fit a TLS
/// handshake message of 64 KiB. If the log is longer, its least informative data is removed.
const MAX_SENT: usize = 48 << 10;

/// The document, with Constellation's field names.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct TdxDocument {
    /// The quote.
    pub raw_quote: Base64,
    /// The user data that the quote covers.
    pub user_data: Base64,
    /// Intel's collateral of the platform.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collateral: Option<TdxCollateral>,
    /// The event log of the firmware.
    #[serde(default, skip_serializing_if = "Base64::is_empty")]
    pub event_log: Base64,
}

/// Makes documents of this machine.
pub struct TdIssuer {
    quoter: Arc<dyn Quoter>,
    collateral: Option<PathBuf>,
    event_log: Option<PathBuf>,
}

impl TdIssuer {
    /// Makes an issuer. It adds the collateral and the event log from these files if they exist.
    pub fn new(
        quoter: Arc<dyn Quoter>,
        collateral: Option<PathBuf>,
        event_log: Option<PathBuf>,
    ) -> TdIssuer {
        TdIssuer {
            quoter,
            collateral,
            event_log,
        }
    }

    /// Returns the event log in at most `max` bytes. A validator does not need it.
    fn event_log(&self, max: usize) -> Vec<u8> {
        let log = self.event_log.as_ref().map(std::fs::read);
        let log = log.and_then(Result::ok).unwrap_or_default();
        excerpt::excerpt(&log, max)
    }
}

impl crate::Issuer for TdIssuer {
    fn oid(&self) -> Oid {
        OID
    }

    fn issue(&self, user_data: &[u8], nonce: &[u8]) -> Result<Vec<u8>, IssueError> {
        let report_data = report_data(user_data, nonce);
        let mut document = TdxDocument {
            raw_quote: Base64(self.quoter.quote(&report_data)?),
            user_data: Base64(user_data.into()),
            collateral: self.collateral.as_deref().and_then(td::collateral),
            event_log: Base64::default(),
        };
        // base64 adds a third, and the field name needs bytes, too
        let room = MAX_SENT.saturating_sub(serde_json::to_vec(&document)?.len() + 32) / 4 * 3;
        document.event_log = Base64(self.event_log(room));
        Ok(serde_json::to_vec(&document)?)
    }
}

/// Returns the data that the quote of a document covers.
pub fn report_data(user_data: &[u8], nonce: &[u8]) -> [u8; 64] {
    let mut report_data = [0; 64];
    report_data[..32].copy_from_slice(&sha256(&[user_data, nonce]));
    report_data
}

/// Returns the location of the registers of this machine.
fn default_location() -> Result<Location, tpm::Error> {
    if Path::new(guest::MEASUREMENTS).is_dir() {
        Ok(Location::Tdx(guest::MEASUREMENTS.into()))
    } else {
        Err(tpm::Error::Failed(format!(
            "this machine is no TDX machine, or its Linux is older than 6.16: {} does not exist",
            guest::MEASUREMENTS
        )))
    }
}
