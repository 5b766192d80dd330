//! `firstlight measure`: the attestation policy that this machine meets, of what its TPM holds now.

use std::collections::BTreeMap;

use super::say;
use crate::attestation::{Measurement, Policy, qemu_vtpm};
use crate::program::Failure;
use crate::tpm::{CLUSTER_ID_PCR, Location};

/// What the command line says.
#[derive(Debug)]
pub struct Options {
    /// Where the TPM is; the machine's own unless given.
    pub tpm: Option<Location>,
    /// The registers to put into the policy.
    pub pcrs: Vec<u32>,
}

/// The command.
pub fn run(options: &Options) -> Result<(), Failure> {
    let location = match &options.tpm {
        Some(location) => location.clone(),
        None => Location::default_device().map_err(Failure::failed)?,
    };
    let values = qemu_vtpm::measure(&location).map_err(Failure::failed)?;
    let policy = policy(values, &options.pcrs).map_err(|error| Failure::failed(format!("{location}: {error}")))?;
    say(policy.to_json())
}

/// Of these registers; that of the cluster ID must be zero, as it is in a machine that belongs to none yet.
fn policy(mut values: BTreeMap<u32, Measurement>, pcrs: &[u32]) -> Result<Policy, String> {
    let zero = Measurement { expected: [0; 32], warn_only: false };
    if values.insert(CLUSTER_ID_PCR, zero.clone()).is_some_and(|value| value != zero) {
        log::warn!("this machine belongs to a cluster already: the policy is for one that does not");
    }
    let entry = |pcr: &u32| values.get(pcr).map(|value| (*pcr, value.clone())).ok_or(format!("it has no PCR {pcr}"));
    Policy::new(pcrs.iter().map(entry).collect::<Result<_, _>>()?).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values() -> BTreeMap<u32, Measurement> {
        (0..24).map(|pcr| (pcr, Measurement { expected: [pcr as u8; 32], warn_only: false })).collect()
    }

    #[test]
    fn the_policy_has_the_registers_asked_for_and_wants_no_cluster_yet() {
        let policy = policy(values(), &[4, 15]).unwrap().to_json();
        let expected = |byte: &str| byte.repeat(32);
        assert_eq!(
            policy,
            format!(
                "{{\"measurements\":{{\"15\":{{\"expected\":\"{}\",\"warnOnly\":false}},\
                 \"4\":{{\"expected\":\"{}\",\"warnOnly\":false}}}}}}",
                expected("00"),
                expected("04")
            )
        );
    }

    #[test]
    fn a_register_that_is_not_there_is_named() {
        assert_eq!(policy(values(), &[4, 30]).unwrap_err(), "it has no PCR 30");
        assert!(policy(values(), &[]).is_err());
    }
}
