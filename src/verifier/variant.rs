//! The table of attestation variants, with the validator of each.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use attest::Variant as Attester;
pub use attest::variant::{DEFAULT, NAMES, UnknownVariant};

use super::policy::{OLD_SNP, OLD_TDX, PolicyError};
use super::sources::Sources;
use super::{
    Measurement, Policy, Stage, Validator, aws_nitro_tpm, aws_sev_snp, azure_sev_snp, azure_tdx,
    azure_trustedlaunch, gcp_sev_es, gcp_sev_snp, qemu_tdx, qemu_vtpm,
};
use base::text::quoted;
use proto::attested::Collateral;

/// Returns what the document of a machine without a TPM says: for those who read documents from files.
pub use super::qemu_tdx::said;

/// An attestation variant: what a machine presents as evidence, and how a verifier judges it. The file of the variant defines it.
pub struct Variant {
    /// The attester's side of the variant. A variant derefs to it.
    pub attester: &'static Attester,
    /// What its validator judges beside the registers, by the names of a policy's members. A policy that demands more is refused: it
    /// would demand nothing.
    pub judges: &'static [&'static [&'static str]],
    /// Creates the validator of a policy, for [`Variant::validator_for`]. An error names what the policy lacks for this variant.
    pub(super) validator: fn(Policy, &Arc<dyn Sources>) -> MadeValidator,
    /// Returns what validators of a document of this variant need beside it, as the sources have it; `None` if nothing is needed.
    pub collateral: Option<FindCollateral>,
    /// Returns the registers of this machine, which is at this stage of its boot.
    pub measure: fn(&tpm::Location, Stage) -> Result<Measured, tpm::Error>,
}

/// Finds in the sources what validators of a document need beside it; `None` if the sources have nothing, or if it is no document of the
/// variant. Nothing of the document is verified.
pub type FindCollateral = fn(&[u8], &dyn Sources) -> Option<Collateral>;

/// The validator of a policy that has all that the variant needs.
pub type MadeValidator = Result<Arc<dyn Validator>, PolicyError>;

/// The registers of a machine, as measurements that are enforced. A register is missing if the machine cannot tell its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Measured {
    /// The values in the booted system.
    pub booted: BTreeMap<u32, Measurement>,
    /// The values in the initramfs of the same boot.
    pub initramfs: BTreeMap<u32, Measurement>,
}

/// What every variant with a TPM judges.
pub const KEYS: &[&str] = &["attestationKeys", "endorsementRoots"];
/// What a cloud's certificate or document says of a machine.
pub const CLOUD: &[&str] = &["cloud.roots", "cloud.zones", "cloud.instances"];
/// What Google's certificate says beside that.
pub const OF_GOOGLE: &[&str] = &["cloud.projects"];
/// The registers that AWS signs, and what EC2 says of the instance.
pub const OF_AWS: &[&str] = &["cloud.sha384", "cloud.accounts"];
/// What is demanded of SEV-SNP machines.
pub const SNP: &[&str] = &["snp", OLD_SNP];
/// What is demanded of TDX machines.
pub const TDX: &[&str] = &["tdx", OLD_TDX];

/// All variants, in the order of [`attest::variant::ALL`], which says how to add one.
pub const ALL: &[Variant] = &[
    qemu_vtpm::VARIANT,
    qemu_tdx::VARIANT,
    azure_trustedlaunch::VARIANT,
    gcp_sev_es::VARIANT,
    aws_nitro_tpm::VARIANT,
    azure_tdx::VARIANT,
    azure_sev_snp::VARIANT,
    aws_sev_snp::VARIANT,
    gcp_sev_snp::VARIANT,
];

impl Variant {
    /// Creates the validator of a policy. An error names what the policy lacks, or what it demands and no machine of this variant proves.
    pub fn validator_for(&self, policy: Policy, sources: &Arc<dyn Sources>) -> MadeValidator {
        if let Some(other) = policy.variant().filter(|it| *it != self.name) {
            let (other, own) = (quoted(other, 40), self.name);
            let why =
                format!("it is for the attestation variant {other}, and the machines have {own}");
            return Err(PolicyError(why));
        }
        let demanded = policy.demanded();
        match demanded.into_iter().find(|member| !self.judges(member)) {
            None => (self.validator)(policy, sources),
            Some(member) => Err(PolicyError(format!(
                "{member}: machines with the attestation variant {} prove nothing of it, so nothing would be demanded: remove it",
                self.name
            ))),
        }
    }

    /// Returns the variant with another validator, such as one with other roots.
    pub const fn judged_by(
        self,
        validator: fn(Policy, &Arc<dyn Sources>) -> MadeValidator,
    ) -> Variant {
        Variant { validator, ..self }
    }

    /// Returns whether the validator judges what this member of a policy demands.
    pub fn judges(&self, member: &str) -> bool {
        self.judges
            .iter()
            .flat_map(|group| *group)
            .any(|it| *it == member)
    }

    /// Returns the variant with this name.
    pub fn named(name: &str) -> Result<&'static Variant, UnknownVariant> {
        ALL.iter()
            .find(|variant| variant.name == name)
            .ok_or_else(|| UnknownVariant(name.to_owned()))
    }
}

impl Deref for Variant {
    type Target = Attester;

    fn deref(&self) -> &Attester {
        self.attester
    }
}

impl fmt::Debug for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::offline;
    use crate::{KeyName, Registers};

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

    /// Each member of a policy that demands something, with the variants that judge it: a validator that ignores a demand admits whom the
    /// policy would refuse.
    #[test]
    fn a_policy_that_demands_what_a_variant_does_not_judge_is_refused() {
        let key = KeyName::of(b"key");
        let members = [
            ("attestationKeys", format!(r#""attestationKeys":["{key}"]"#)),
            ("endorsementRoots", r#""endorsementRoots":["root"]"#.into()),
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
            let policy = |member: &str| {
                let json = format!(
                    r#"{{"measurements":{{"3":{{"expected":"{zeros}","warnOnly":false}}}},{member}}}"#
                );
                Policy::from_json(&json).unwrap()
            };
            for (name, member) in &members {
                let policy = policy(member);
                assert_eq!(policy.demanded(), [*name]);
                let made = variant.validator_for(policy, &offline());
                let refusal = made.err().map(|error| error.to_string());
                let is_ignored = refusal
                    .as_ref()
                    .is_some_and(|error| error.contains("prove nothing of it"));
                assert_eq!(
                    is_ignored,
                    !variant.judges(name),
                    "{variant:?}: {name}: {refusal:?}"
                );
            }
            let made = variant.validator_for(policy(r#""require":"strong""#), &offline());
            assert!(made.unwrap().requires_strong(), "{variant:?}");
        }
    }

    /// A certificate names the variant by the OID only.
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
        // a variant accepts policies of its kind of registers only
        let policy_of = |length| {
            let expected = vec![0; length];
            let warn_only = false;
            let measurement = Measurement {
                expected,
                warn_only,
            };
            Policy::new(BTreeMap::from([(3, measurement)])).unwrap()
        };
        for variant in ALL {
            let mut validators = [32, 48]
                .into_iter()
                .filter_map(|length| (variant.validator)(policy_of(length), &offline()).ok());
            let validator = validators.next().unwrap();
            assert_eq!(validator.oid(), variant.oid);
        }
    }
}
