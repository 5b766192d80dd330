//! Whether the join services will give the key to this machine with another image.

use image::{Case, Image, KnownConditions, Platform, RegisterBank, Stage, Units};
use verifier::{Measurement, Policy, RegisterNames, Registers};

use super::error::Error;
use base::text::hex;
use std::collections::BTreeMap;

/// Fails if the policy accepts no machine that boots this image. The message names the registers that differ from the nearest image of
/// the policy. A register that cannot be predicted is no reason, and neither is one that does not depend on the image.
pub fn check(booted: &Image, policy: &Policy) -> Result<(), Error> {
    let kind = policy.registers();
    let platform = match kind {
        Registers::Pcrs => Platform::Tpm(RegisterBank::Sha256),
        Registers::Rtmrs => Platform::Tdx,
    };
    // the image has all units of systemd that measure
    let given = KnownConditions {
        units: Some(Units::All),
        ..KnownConditions::default()
    };
    let possible = booted.registers(platform, &given);
    let differences = |image: &verifier::Image| {
        let at = |stage, expected: &BTreeMap<u32, Measurement>| -> Vec<String> {
            let enforced = expected.iter().filter(|(register, it)| {
                !it.warn_only
                    && **register != kind.of_cluster_id()
                    && platform.registers().contains(register)
            });
            let differing = enforced.filter(|(register, it)| {
                let cases = possible.get(register).map_or(&[][..], Vec::as_slice);
                !may_be(cases, stage, &it.expected)
            });
            differing
                .map(|(register, it)| {
                    let got = possible.get(register).map_or(&[][..], Vec::as_slice);
                    let got = got.iter().find(|case| is_at(case, stage));
                    let got = got.and_then(|case| case.value.as_ref().ok());
                    format!(
                        "{}: expected {}, the image gives {}",
                        kind.name(*register),
                        hex(&it.expected),
                        got.map_or_else(|| "no value".into(), |it| hex(it))
                    )
                })
                .collect()
        };
        let mut all = at(Stage::Booted, image.measurements());
        all.extend(at(Stage::Initramfs, image.initramfs()));
        all
    };
    let nearest = policy.images().iter().map(differences);
    match nearest.min_by_key(Vec::len) {
        Some(differences) if differences.is_empty() => Ok(()),
        nearest => Err(Error::Policy(nearest.unwrap_or_default())),
    }
}

fn is_at(case: &Case, stage: Stage) -> bool {
    case.stage.is_none_or(|it| it == stage)
}

fn may_be(cases: &[Case], stage: Stage, expected: &[u8]) -> bool {
    let mut at = cases.iter().filter(|case| is_at(case, stage));
    at.any(|case| match &case.value {
        Ok(value) => value == expected,
        Err(_) => true,
    })
}
