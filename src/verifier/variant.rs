//! The table of attestation variants, with the validator of each.

pub use attest::variant::{DEFAULT, NAMES, UnknownVariant};

use super::{
    Variant, aws_nitro_tpm, aws_sev_snp, azure_sev_snp, azure_tdx, azure_trustedlaunch, gcp_sev_es,
    gcp_sev_snp, gcp_tdx, qemu_snp, qemu_tdx, qemu_vtpm,
};

/// Returns the content of a document of a machine without a TPM, for programs that read documents
/// from files; `None` if it is not one.
pub fn said(document: &[u8]) -> Option<qemu_tdx::Said> {
    let of_snp = || {
        Some(qemu_tdx::Said {
            registers: qemu_snp::said(document)?,
            event_log: vec![],
        })
    };
    qemu_tdx::said(document).or_else(of_snp)
}

/// All variants, in the order of [`attest::variant::ALL`], which says how to add one.
pub const ALL: &[Variant] = &[
    qemu_vtpm::VARIANT,
    qemu_tdx::VARIANT,
    qemu_snp::VARIANT,
    azure_trustedlaunch::VARIANT,
    gcp_sev_es::VARIANT,
    aws_nitro_tpm::VARIANT,
    azure_tdx::VARIANT,
    azure_sev_snp::VARIANT,
    aws_sev_snp::VARIANT,
    gcp_sev_snp::VARIANT,
    gcp_tdx::VARIANT,
];

impl Variant {
    /// Returns the variant with this name.
    pub fn named(name: &str) -> Result<&'static Variant, UnknownVariant> {
        ALL.iter()
            .find(|variant| variant.name == name)
            .ok_or_else(|| UnknownVariant(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RegisterNames;
    use std::collections::BTreeMap;

    use hardware::json::Digits;

    use crate::policy::{OLD_SNP, OLD_TDX};
    use crate::sources::offline;
    use crate::{KeyName, Registers};
    use crate::{Measurement, Policy};

    #[test]
    fn a_variant_is_found_by_its_name_and_others_are_refused() {
        for (variant, name) in ALL.iter().zip(NAMES) {
            assert_eq!(Variant::named(name).unwrap().oid, variant.oid);
        }
        let error = Variant::named("home").unwrap_err().to_string();
        assert!(
            error.contains("\"home\"") && error.ends_with(&NAMES.join(", ")),
            "{error}"
        );
    }

    #[test]
    fn each_variant_that_machines_prove_is_judged() {
        let attesters = attest::variant::ALL.iter();
        assert!(attesters.map(|it| it.oid).eq(ALL.iter().map(|it| it.oid)));
    }

    /// Each member of a policy with a requirement, with the variants that check it: a validator
    /// that ignored one would accept machines that the policy refuses.
    #[test]
    fn a_policy_that_demands_what_a_variant_does_not_judge_is_refused() {
        let key = KeyName::of(b"key");
        let members = [
            ("attestationKeys", format!(r#""attestationKeys":["{key}"]"#)),
            ("endorsementRoots", r#""endorsementRoots":["root"]"#.into()),
            (
                "tpm.vendors",
                r#""endorsementRoots":["root"],"tpm":{"vendors":["IFX"]}"#.into(),
            ),
            (
                "tpm.floors",
                r#""endorsementRoots":["root"],"tpm":{"floors":[{"vendor":"IFX","minimum":"0x1"}]}"#
                    .into(),
            ),
            ("secureBoot", r#""secureBoot":{"enabled":true}"#.into()),
            ("cloud.roots", r#""cloud":{"roots":["root"]}"#.into()),
            ("cloud.projects", r#""cloud":{"projects":["p"]}"#.into()),
            ("cloud.zones", r#""cloud":{"zones":["z"]}"#.into()),
            ("cloud.instances", r#""cloud":{"instances":["i"]}"#.into()),
            (
                "cloud.accounts",
                r#""cloud":{"accounts":["123456789012"]}"#.into(),
            ),
            (
                "cloud.sha384",
                format!(r#""cloud":{{"sha384":{{"4":"{}"}}}}"#, "0".repeat(96)),
            ),
            ("tdx", r#""tdx":{"minimumEvaluation":21}"#.into()),
            (OLD_TDX, r#""qeSVN":1"#.into()),
            ("snp", r#""snp":{"minimumGuestSvn":1}"#.into()),
            (OLD_SNP, r#""snpVersion":1"#.into()),
        ];
        for variant in ALL {
            let zeros = "00".repeat(if variant.registers == Registers::Pcrs {
                32
            } else {
                48
            });
            let of_cluster = variant.registers.of_cluster_id();
            let policy = |member: &str| {
                let json = format!(
                    r#"{{"measurements":{{"{of_cluster}":{{"expected":"{zeros}","warnOnly":false}}}},{member}}}"#
                );
                Policy::from_json(&json).unwrap()
            };
            for (name, member) in &members {
                let policy = policy(member);
                assert_eq!(policy.demanded().last(), Some(name));
                let made = variant.validator_for(policy, &offline());
                let refusal = made.err().map(|error| error.to_string());
                let is_ignored = refusal
                    .as_ref()
                    .is_some_and(|error| error.contains("cannot check this requirement"));
                assert_eq!(
                    is_ignored,
                    !variant.judges(name),
                    "{variant:?}: {name}: {refusal:?}"
                );
            }
            let launched = match variant.launch {
                Some(_) => format!(r#""snp":{{"launchMeasurements":["{}"]}},"#, "aa".repeat(48)),
                None => String::new(),
            };
            let strong = policy(&format!(r#"{launched}"require":"strong""#));
            let made = variant.validator_for(strong, &offline());
            assert!(made.unwrap().properties().requires_strong, "{variant:?}");
        }
    }

    /// A certificate identifies the variant only by the OID.
    #[test]
    fn no_two_variants_share_a_name_or_an_oid() {
        for (index, one) in ALL.iter().enumerate() {
            for other in &ALL[..index] {
                assert!(one.name != other.name && one.oid != other.oid);
            }
        }
    }

    #[test]
    fn the_validator_of_a_variant_has_its_oid() {
        for variant in ALL {
            let expected = variant.registers.fresh().as_ref().to_vec();
            let warn_only = false;
            let measurement = Measurement {
                expected,
                warn_only,
            };
            let registers = BTreeMap::from([(variant.registers.of_cluster_id(), measurement)]);
            let policy = Policy::new(registers).unwrap();
            let policy = policy.with_platform(|_, snp, _| {
                let launched = variant.launch.map(|_| Digits([0xaa; 48]));
                snp.snp.launch_measurements.extend(launched);
            });
            let validator = (variant.validator)(policy.unwrap(), &offline()).unwrap();
            assert_eq!(validator.properties().oid, variant.oid);
        }
    }
}
