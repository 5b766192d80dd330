//! The registers of a TDX machine without a TPM, which the kernel reads and extends.

use std::path::Path;

use base::crypto::CLUSTER_ID_LEN;
use hardware::tdx::guest;
use hardware::tdx::quote::Register;

use super::{ClusterRegister, Registers};
use crate::tpm::{Error, Location};

/// The RTMR that a machine extends with the ID of its cluster, as in the old system.
const OF_CLUSTER_ID: u32 = 2;

/// Returns MRTD and the RTMRs at a location.
pub(super) fn read(location: &Location) -> Result<[Register; 5], Error> {
    guest::registers(folder(location)?)
        .map_err(|error| Error::Registers(format!("the registers at {location}: {error}")))
}

/// Returns the register of the cluster ID at a location.
pub(super) fn cluster_register(location: &Location) -> Result<ClusterRegister, Error> {
    let [.., value, _] = read(location)?;
    ClusterRegister::new(&value).ok_or_else(|| Error::Registers("RTMR 2 has no value".into()))
}

/// Extends RTMR 2 with a cluster ID, and reads it back.
pub(super) fn mark(location: &Location, cluster_id: &[u8; CLUSTER_ID_LEN]) -> Result<(), Error> {
    let register = Registers::Rtmrs.after(cluster_id);
    guest::extend(
        folder(location)?,
        OF_CLUSTER_ID,
        &Registers::Rtmrs.digest(cluster_id),
    )
    .map_err(|error| Error::Registers(format!("RTMR 2 at {location}: {error}")))?;
    let got = cluster_register(location)?;
    match got == register {
        true => Ok(()),
        false => Err(Error::Registers(format!(
            "RTMR 2 is {got} after the cluster ID was measured, expected {register}: something else has measured into it. Reboot \
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
