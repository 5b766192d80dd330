//! The registers of a TDX machine without a TPM, which the kernel reads and extends.

use std::path::Path;

use base::crypto::CLUSTER_ID_LEN;
use hardware::tdx::guest;
use hardware::tdx::quote::Register;

use super::{ClusterRegister, Registers};
use crate::tpm::{Error, Location};

/// The RTMR that a machine extends with the ID of its cluster: the only one that firmware, boot loaders and kernels leave alone (UEFI 2.11
/// chapter 38). The old system named RTMR 2, into which boot loaders measure; its variant could not be selected, so no cluster has it.
const OF_CLUSTER_ID: u32 = 3;

/// Returns MRTD and the RTMRs at a location.
pub(super) fn read(location: &Location) -> Result<[Register; 5], Error> {
    guest::registers(folder(location)?)
        .map_err(|error| Error::Registers(format!("the registers at {location}: {error}")))
}

/// Returns the register of the cluster ID at a location.
pub(super) fn cluster_register(location: &Location) -> Result<ClusterRegister, Error> {
    let [.., value] = read(location)?;
    ClusterRegister::new(&value).ok_or_else(|| Error::Registers("RTMR 3 has no value".into()))
}

/// Extends RTMR 3 with a cluster ID, and reads it back.
pub(super) fn mark(location: &Location, cluster_id: &[u8; CLUSTER_ID_LEN]) -> Result<(), Error> {
    let register = Registers::Rtmrs.after(cluster_id);
    guest::extend(
        folder(location)?,
        OF_CLUSTER_ID,
        &Registers::Rtmrs.digest(cluster_id),
    )
    .map_err(|error| Error::Registers(format!("RTMR 3 at {location}: {error}")))?;
    let got = cluster_register(location)?;
    match got == register {
        true => Ok(()),
        false => Err(Error::Registers(format!(
            "RTMR 3 is {got} after the cluster ID was measured, expected {register}: something else has measured into it. Reboot \
             the machine"
        ))),
    }
}

fn folder(location: &Location) -> Result<&Path, Error> {
    match location {
        Location::Tdx(folder) => Ok(folder),
        other => Err(Error::Registers(format!(
            "{other} has no registers of a TDX machine; expected tdx:{}",
            guest::MEASUREMENTS
        ))),
    }
}
