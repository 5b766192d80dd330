//! The registers of a TDX machine without a TPM, which the kernel reads and extends; the quotes of
//! TDX machines, and the file with Intel's collateral for the machine's platform.

use std::path::Path;

use base::crypto::CLUSTER_ID_LEN;
use tee::collateral::TdxCollateral;
use tee::tdx::{self as guest, Register};

use super::{ClusterRegister, IssueError, Registers};
use tpm::{Error, Location};

/// The RTMR that a machine extends with the ID of its cluster: the only one that firmware, boot
/// loaders and kernels do not extend (UEFI 2.11 chapter 38). Constellation used RTMR 2, which boot
/// loaders extend; but its variant could not be selected, so no cluster uses it.
const OF_CLUSTER_ID: u32 = 3;
/// The file with Intel's collateral of this machine's platform, which the operator or the host
/// provides. It is public, and signed.
pub(super) const COLLATERAL: &str = "/etc/firstlight/tdx-collateral.json";

/// Makes the quotes of a machine.
pub trait Quoter: Send + Sync {
    /// Returns a quote over these bytes.
    fn quote(&self, report_data: &[u8; 64]) -> Result<Vec<u8>, IssueError>;
}

/// The kernel of this machine.
pub(super) struct Kernel;

impl Quoter for Kernel {
    fn quote(&self, report_data: &[u8; 64]) -> Result<Vec<u8>, IssueError> {
        Ok(guest::quote(report_data)?)
    }
}

/// Returns the collateral in a file. A validator that fetches collateral does not need it, so an
/// error is only logged.
pub(super) fn collateral(path: &Path) -> Option<TdxCollateral> {
    let text = std::fs::read(path).ok()?;
    let collateral = serde_json::from_slice(&text);
    collateral
        .map_err(|error| log::warn!("cannot read the collateral in {}: {error}", path.display()))
        .ok()
}

/// Returns MRTD and the RTMRs at a location.
pub fn read(location: &Location) -> Result<[Register; 5], Error> {
    guest::registers(folder(location)?)
        .map_err(|error| Error::Failed(format!("cannot read the registers at {location}: {error}")))
}

/// Returns the register of the cluster ID at a location.
pub(super) fn cluster_register(location: &Location) -> Result<ClusterRegister, Error> {
    let [.., value] = read(location)?;
    ClusterRegister::new(&value).ok_or_else(|| Error::Failed("RTMR 3 has no value".into()))
}

/// Extends RTMR 3 with a cluster ID, and reads it back.
pub(super) fn mark(location: &Location, cluster_id: &[u8; CLUSTER_ID_LEN]) -> Result<(), Error> {
    let register = Registers::Rtmrs.after(cluster_id);
    guest::extend(
        folder(location)?,
        OF_CLUSTER_ID,
        &Registers::Rtmrs.digest(cluster_id),
    )
    .map_err(|error| Error::Failed(format!("cannot extend RTMR 3 at {location}: {error}")))?;
    let got = cluster_register(location)?;
    if got == register {
        Ok(())
    } else {
        Err(Error::Failed(format!(
            "RTMR 3 is {got} after the cluster ID was measured, expected {register}: another program has measured into it. Reboot \
         the machine"
        )))
    }
}

fn folder(location: &Location) -> Result<&Path, Error> {
    match location {
        Location::Tdx(folder) => Ok(folder),
        other => Err(Error::Failed(format!(
            "{other} has no registers of a TDX machine; expected tdx:{}",
            guest::MEASUREMENTS
        ))),
    }
}
