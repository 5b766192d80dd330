//! Flaws of a valid policy: it does not say what its machines run. Each program that judges machines by a policy refuses one with a
//! flaw, unless the policy itself names the flaw:
//!
//! ```json
//! {"measurements":{"15":{..}},"exceptions":["any-image"]}
//! ```

use crate::judged::Variant;
use crate::policy::{Exception, Fault, Image, Policy, PolicyError};
use crate::{RegisterNames, Registers};

/// A flaw of a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flaw {
    /// The exception that permits it.
    pub permitted_by: Exception,
    /// What is wrong, as a clause.
    pub why: String,
}

impl Variant {
    /// Fails if the policy does not say what machines of this variant run, and does not name this as an exception.
    pub fn check_worth(&self, policy: &Policy) -> Result<(), PolicyError> {
        for Flaw { permitted_by, why } in self.flaws(policy) {
            if !policy.permits(permitted_by) {
                return Err(Fault::Worthless.because(format!(
                    "{why}; measure the image again: only a policy with \"exceptions\":[\"{permitted_by}\"] may accept this"
                )));
            }
        }
        Ok(())
    }

    /// Returns the flaws of a policy for machines of this variant, also those that it permits.
    pub fn flaws(&self, policy: &Policy) -> Vec<Flaw> {
        let mut flaws = vec![];
        if let Some(why) = zero_register(policy) {
            let permitted_by = Exception::ZeroRegisters;
            flaws.push(Flaw { permitted_by, why });
        }
        if let Some(why) = self.accepts_any_image(policy) {
            let permitted_by = Exception::AnyImage;
            flaws.push(Flaw { permitted_by, why });
        }
        flaws
    }

    /// Returns the exceptions of a policy that permit none of its flaws: only a later image would have these flaws.
    pub fn useless_exceptions(&self, policy: &Policy) -> Vec<Exception> {
        let flaws = self.flaws(policy);
        let is_useless = |one: &&Exception| flaws.iter().all(|flaw| flaw.permitted_by != **one);
        policy
            .exceptions()
            .iter()
            .filter(is_useless)
            .copied()
            .collect()
    }

    /// Returns why a policy accepts unknown software, as a clause; `None` if the policy pins what
    /// machines of this variant boot. It does not say whether any TPM is accepted:
    /// [`Properties::believes_any_tpm`](crate::Properties) does.
    fn accepts_any_image(&self, policy: &Policy) -> Option<String> {
        // their launch digest shows what boots, and the validator demands it
        if self.launch.is_some() {
            return None;
        }
        let kind = policy.registers();
        let (loader, firmware) = match kind {
            Registers::Pcrs => (4, None),
            Registers::Rtmrs => (2, (!policy.tdx().pins_firmware()).then_some(0)),
        };
        let mut needed = firmware.into_iter().chain([loader]);
        needed.find_map(|index| {
            let mut images = policy.images().iter();
            let open = images.find(|image| !is_enforced(image, index))?;
            Some(format!(
                "{open} does not enforce {}, so any image is accepted: software that this register does not measure can set the later \
                 registers",
                kind.name(index)
            ))
        })
    }
}

/// Returns whether a register is enforced at each stage of the boot.
fn is_enforced(image: &Image, index: u32) -> bool {
    let booted = image.measurements().get(&index);
    booted.is_some_and(|it| !it.warn_only)
        && image.initramfs().get(&index).is_none_or(|it| !it.warn_only)
}

/// Returns that a register is zero which the firmware extends in each boot (TCG PC Client Platform Firmware Profile: at least by a
/// separator; MRTD, RTMR 0 and 1 of a TDX machine), as a clause.
fn zero_register(policy: &Policy) -> Option<String> {
    let kind = policy.registers();
    let last = match kind {
        Registers::Pcrs => 7,
        Registers::Rtmrs => 2,
    };
    let why = |register: String| {
        Some(format!(
            "{register} is zero, but every firmware extends it: the firmware does not extend this bank of the TPM, so its registers prove \
             nothing about the machine"
        ))
    };
    for image in policy.images() {
        for registers in [image.measurements(), image.initramfs()] {
            for (index, it) in registers {
                let is_zero = it.expected.iter().all(|byte| *byte == 0);
                if *index <= last && !it.warn_only && is_zero {
                    return why(format!("{} of {image}", kind.name(*index)));
                }
            }
        }
    }
    for set in &policy.cloud().sha384 {
        for (index, value) in set {
            if *index <= 7 && value.bytes().all(|digit| digit == b'0') {
                return why(format!("cloud.sha384: PCR {index}"));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(measurements: &str, more: &str) -> Policy {
        let text = format!(r#"{{"measurements":{{{measurements}}}{more}}}"#);
        Policy::from_json(&text).unwrap()
    }

    fn of(index: u32, value: &str) -> String {
        format!(r#""{index}":"{value}""#)
    }

    #[test]
    fn a_policy_that_does_not_say_what_boots_accepts_any_image() {
        let why = |variant: &str, measurements: &str, more: &str| {
            let variant = Variant::named(variant).unwrap();
            variant.accepts_any_image(&policy(measurements, more))
        };
        let (pcr, zeros) = ("11".repeat(32), "00".repeat(32));
        let vtpm = |measurements: &str, more: &str| why("qemu-vtpm", measurements, more);
        assert_eq!(vtpm(&of(4, &pcr), ""), None);
        let only_warns = format!(
            r#"{},"4":{{"expected":"{pcr}","warnOnly":true}}"#,
            of(15, &zeros)
        );
        let warns_in_initramfs =
            format!(r#","initramfs":{{"4":{{"expected":"{pcr}","warnOnly":true}}}}"#);
        for (open, more) in [
            (of(15, &zeros), ""),
            (of(11, &pcr), ""),
            (only_warns, ""),
            (
                format!("{},{}", of(4, &pcr), of(15, &zeros)),
                &warns_in_initramfs,
            ),
        ] {
            let why = vtpm(&open, more).unwrap();
            assert!(why.contains("does not enforce PCR 4,"), "{why}");
        }
        // each image must say it
        let other = format!(
            r#","alsoAccepted":[{{"name":"other","measurements":{{{}}}}}]"#,
            of(7, &pcr)
        );
        let open = vtpm(&of(4, &pcr), &other).unwrap();
        assert!(open.starts_with("other does not enforce"), "{open}");

        let (rtmr, tdx) = ("22".repeat(48), |text: &str| why("qemu-tdx", text, ""));
        assert_eq!(tdx(&format!("{},{}", of(0, &rtmr), of(2, &rtmr))), None);
        assert!(
            tdx(&format!("{},{}", of(0, &rtmr), of(3, &rtmr)))
                .unwrap()
                .contains("RTMR 1")
        );
        assert!(tdx(&of(2, &rtmr)).unwrap().contains("MRTD"));
    }

    #[test]
    fn a_register_is_not_zero_if_every_firmware_extends_it() {
        let zeros = "00".repeat(32);
        let of_zero = |text: &str, more: &str| zero_register(&policy(text, more));
        for index in 0..8 {
            let why = of_zero(&of(index, &zeros), "").unwrap();
            let name = format!("PCR {index} of the first image is zero");
            assert!(why.starts_with(&name), "{why}");
        }
        assert_eq!(of_zero(&of(8, &zeros), ""), None);
        let warns = format!(
            r#"{},"0":{{"expected":"{zeros}","warnOnly":true}}"#,
            of(8, &zeros)
        );
        assert_eq!(of_zero(&warns, ""), None);
        let sha384 = |index: u32| {
            let cloud = format!(
                r#","cloud":{{"sha384":{{"{index}":"{}"}}}}"#,
                "0".repeat(96)
            );
            of_zero(&of(4, &"11".repeat(32)), &cloud)
        };
        assert!(sha384(4).unwrap().starts_with("cloud.sha384: PCR 4 is"));
        assert_eq!(sha384(8), None);
        let tdx = |index: u32| of_zero(&of(index, &"00".repeat(48)), "");
        assert!(tdx(2).unwrap().starts_with("RTMR 1 of"));
        assert_eq!(tdx(3), None);
    }

    #[test]
    fn only_a_policy_that_names_its_flaws_may_have_them() {
        let variant = Variant::named("qemu-vtpm").unwrap();
        let check = |exceptions: &str| {
            let flawed = of(0, &"00".repeat(32));
            variant.check_worth(&policy(&flawed, exceptions))
        };
        let permitting = |names: &str| check(&format!(r#","exceptions":[{names}]"#));
        let zero = check("").unwrap_err();
        assert_eq!(zero.fault, Fault::Worthless);
        assert!(
            zero.to_string()
                .ends_with(r#"only a policy with "exceptions":["zero-registers"] may accept this"#)
        );
        let any = permitting(r#""zero-registers""#).unwrap_err().to_string();
        assert!(any.contains(r#""exceptions":["any-image"]"#), "{any}");
        assert!(permitting(r#""any-image""#).is_err());
        assert_eq!(permitting(r#""any-image","zero-registers""#), Ok(()));
        let unknown = format!(
            r#"{{"measurements":{{{}}},"exceptions":["any-tpm"]}}"#,
            of(4, &"11".repeat(32))
        );
        let unknown = Policy::from_json(&unknown).unwrap_err().to_string();
        assert!(
            unknown.contains("any-tpm") && unknown.contains("any-image"),
            "{unknown}"
        );
    }
}
