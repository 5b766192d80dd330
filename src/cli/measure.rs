//! `firstlight measure`: the attestation policy that this machine meets, of what its TPM holds now.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::{connect, say};
use crate::attestation::{Measurement, Policy, qemu_vtpm};
use crate::program::Failure;
use crate::tpm::{CLUSTER_ID_PCR, Location};

/// What the command line says.
#[derive(Debug)]
pub struct Options {
    /// Where the TPM is; the machine's own unless given.
    pub tpm: Option<Location>,
    /// The registers to put into the policy; those of the policy that it is added to unless given.
    pub pcrs: Option<Vec<u32>>,
    /// What to call the image.
    pub name: Option<String>,
    /// A policy that is to accept this machine's image too.
    pub add_to: Option<PathBuf>,
}

/// The command.
pub fn run(options: &Options) -> Result<(), Failure> {
    let present = match &options.add_to {
        Some(_) if options.name.is_none() => {
            return Err(Failure::Usage("--add-to: say what to call the image: --name is missing".into()));
        }
        Some(path) => Some(connect::read_policy(path)?),
        None => None,
    };
    let location = match &options.tpm {
        Some(location) => location.clone(),
        None => Location::default_device().map_err(Failure::failed)?,
    };
    let values = qemu_vtpm::measure(&location).map_err(Failure::failed)?;
    let pcrs = match (&options.pcrs, &present) {
        (Some(pcrs), _) => pcrs.clone(),
        (None, present) => present.iter().flat_map(registers).collect(),
    };
    let policy = policy(values, &pcrs).map_err(|error| Failure::failed(format!("{location}: {error}")))?;
    let name = options.name.as_deref().unwrap_or_default();
    let policy = match present {
        Some(present) => add(present, name, &policy).map_err(Failure::failed)?,
        None => policy.named(name).map_err(Failure::failed)?,
    };
    say(policy.to_json())
}

/// Those of a policy's first image.
fn registers(policy: &Policy) -> Vec<u32> {
    policy.images()[0].measurements().keys().copied().collect()
}

/// A policy that accepts what it did, and what `new` does under this name.
fn add(present: Policy, name: &str, new: &Policy) -> Result<Policy, String> {
    let measurements = new.images()[0].measurements();
    if let Some(same) = present.images().iter().find(|image| image.measurements() == measurements) {
        return Err(format!("the policy accepts this machine already: {same}"));
    }
    if registers(new) != registers(&present) {
        log::warn!("the registers are others than those of {}", present.images()[0]);
    }
    present.and_also(name, measurements.clone()).map_err(|error| error.to_string())
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
    fn an_image_is_added_beside_the_others_unless_it_is_there() {
        let present = policy(values(), &[4, 15]).unwrap();
        assert!(add(present.clone(), "same", &present).unwrap_err().contains("already: the first image"));
        let newer = BTreeMap::from([(4, Measurement { expected: [9; 32], warn_only: false })]);
        let newer = policy(newer, &[4, 15]).unwrap();
        let both = add(present.clone(), "newer", &newer).unwrap();
        assert_eq!(both.images()[0], present.images()[0]);
        assert_eq!((both.images()[1].name(), both.images()[1].measurements()[&4].expected), ("newer", [9; 32]));
        assert!(both.demands_fresh());
        assert!(add(both, "newer", &policy(values(), &[4, 9, 15]).unwrap()).unwrap_err().contains("two images"));
    }

    #[test]
    fn a_register_that_is_not_there_is_named() {
        assert_eq!(policy(values(), &[4, 30]).unwrap_err(), "it has no PCR 30");
        assert!(policy(values(), &[]).is_err());
    }
}
