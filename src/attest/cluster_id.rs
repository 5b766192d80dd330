//! The register of the cluster ID of this machine: PCR 15, or what a machine without a TPM has in
//! its place.

use base::crypto::CLUSTER_ID_LEN;
use tpm::{Bank, CLUSTER_ID_PCR, Tpm};

use super::{ClusterRegister, Registers, qemu_snp, systemd_log, td};

/// Extends this machine's register of the cluster ID, which must be zero, with a cluster ID, and
/// reads it back.
pub fn mark(location: &tpm::Location, cluster_id: &[u8; CLUSTER_ID_LEN]) -> Result<(), tpm::Error> {
    match location {
        tpm::Location::Tdx(_) => td::mark(location, cluster_id),
        tpm::Location::Snp(file) => qemu_snp::mark(file, &Registers::Pcrs.after(cluster_id)),
        _ => Tpm::open(location)?.measure_cluster_id(cluster_id),
    }
}

/// Says which part of systemd has measured into PCR 15 of this machine, and what to do; `None` if
/// PCR 15 is zero or cannot be read, or if systemd's log has no such record. If the TPM is not this
/// machine's, there is no log.
pub fn foreign_writer(location: &tpm::Location) -> Option<String> {
    let log = match location {
        tpm::Location::Device(_) => systemd_log::read(),
        _ => vec![],
    };
    if log.is_empty() {
        return None;
    }
    systemd_log::explain(
        &log,
        CLUSTER_ID_PCR,
        cluster_register(location).ok()?.as_ref(),
    )
}

/// Returns the register of the cluster ID of this machine.
pub fn cluster_register(location: &tpm::Location) -> Result<ClusterRegister, tpm::Error> {
    match location {
        tpm::Location::Tdx(_) => return td::cluster_register(location),
        tpm::Location::Snp(file) => return qemu_snp::register(file),
        _ => {}
    }
    let pcrs = Tpm::open(location)?.pcrs(Bank::Sha256)?;
    // every TPM for PCs has PCRs 0 to 23 (TCG PC Client Platform TPM Profile)
    let value = pcrs.get(&CLUSTER_ID_PCR);
    let value = value.and_then(|value| ClusterRegister::new(value));
    value.ok_or(tpm::Error::NoBank(Bank::Sha256))
}
