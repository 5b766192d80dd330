//! A policy's requirements for the TPM of a machine: its vendor and model, which the certificate of its endorsement key names, and
//! the version of its firmware, which its quotes name.
//!
//! ```json
//! {"measurements":{..},"endorsementRoots":[..],"tpm":{"vendors":["IFX","GOOG"],"floors":[{"vendor":"GOOG","model":"vTPM","minimum":"0x2016051100162800"}]}}
//! ```
//!
//! Each vendor numbers its firmware in its own way, and often each product line separately. So a minimum is for one vendor, or for
//! one of its models.

use std::fmt;

use base::text::quoted;
use hardware::json::{Number, is_default};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::error::{Fault, PolicyError};
use crate::refusal::{Kind, Refusal};
use crate::{hex, unhex};

/// Maximum number of entries of a list.
const MAX_ENTRIES: usize = 1000;
/// How an ID starts in certificates.
const ID: &str = "id:";

/// A vendor of TPMs, by its ID in TCG's registry ("TCG Vendor ID Registry", CAP_VID). The registry fills short names with zeros or
/// with spaces; here the rest is zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TpmVendor([u8; 4]);

/// The TPM that the certificate of an endorsement key names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TpmModel {
    /// The vendor.
    pub vendor: TpmVendor,
    /// The vendor's name of the model, printable.
    pub name: String,
}

/// What a machine has proved about its TPM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TpmClaims {
    /// The vendor.
    pub vendor: TpmVendor,
    /// The vendor's name of the model.
    pub model: String,
    /// The version of the firmware; `None` if the TPM hides it from the holder of this attestation key.
    pub firmware: Option<Number>,
}

/// A policy's requirements for the TPM of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TpmRequirements {
    /// The accepted vendors; empty for every one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub vendors: Vec<TpmVendor>,
    /// Minimums for particular TPMs. Each one that matches a TPM applies; if this list is not empty, a TPM that matches none is
    /// refused.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub floors: Vec<TpmFloor>,
}

/// A minimum version of the firmware of some TPMs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TpmFloor {
    /// The vendor.
    pub vendor: TpmVendor,
    /// The model; `None` for all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The minimum version.
    pub minimum: Number,
}

impl TpmVendor {
    /// Returns the vendor with this ID in the registry.
    pub fn new(mut id: [u8; 4]) -> TpmVendor {
        let filling = id
            .iter_mut()
            .rev()
            .take_while(|byte| **byte == b' ' || **byte == 0);
        filling.for_each(|byte| *byte = 0);
        TpmVendor(id)
    }

    /// Parses the ID as certificates have it: `id:` and eight hexadecimal digits.
    pub fn of_certificate(text: &str) -> Option<TpmVendor> {
        unhex(text.strip_prefix(ID)?).map(TpmVendor::new)
    }

    /// Parses the letters of a vendor, or its ID.
    fn parse(text: &str) -> Option<TpmVendor> {
        let of_letters = || {
            let mut id = [0; 4];
            id.get_mut(..text.len())?.copy_from_slice(text.as_bytes());
            Some(TpmVendor(id)).filter(|vendor| vendor.letters() == Some(text))
        };
        TpmVendor::of_certificate(text).or_else(of_letters)
    }

    /// Returns the letters, if the ID consists of some.
    fn letters(&self) -> Option<&str> {
        let end = self.0.iter().position(|byte| *byte == 0);
        let (letters, filling) = self.0.split_at(end.unwrap_or(self.0.len()));
        let is_letter = |byte: &u8| byte.is_ascii_uppercase() || byte.is_ascii_digit();
        let is_plain = !letters.is_empty()
            && letters.iter().all(is_letter)
            && filling.iter().all(|byte| *byte == 0);
        std::str::from_utf8(letters).ok().filter(|_| is_plain)
    }
}

impl fmt::Display for TpmVendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.letters() {
            Some(letters) => f.write_str(letters),
            None => write!(f, "{ID}{}", hex(&self.0)),
        }
    }
}

impl Serialize for TpmVendor {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for TpmVendor {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<TpmVendor, D::Error> {
        let text = String::deserialize(deserializer)?;
        TpmVendor::parse(&text).ok_or_else(|| {
            D::Error::custom(format!(
                "{}: expected the capital letters of a vendor in TCG's registry, as IFX, or id: and 8 hex digits",
                quoted(&text, 40)
            ))
        })
    }
}

impl TpmFloor {
    fn fits(&self, tpm: &TpmModel) -> bool {
        let model = self.model.as_ref();
        self.vendor == tpm.vendor && model.is_none_or(|model| *model == tpm.name)
    }
}

impl TpmRequirements {
    /// Returns whether every TPM meets them.
    pub fn is_empty(&self) -> bool {
        is_default(self)
    }

    /// Fails if the lists contradict each other, or are too long.
    pub(super) fn check(&self) -> Result<(), PolicyError> {
        let (vendors, floors) = (&self.vendors, &self.floors);
        if vendors.len().max(floors.len()) > MAX_ENTRIES {
            let why = format!("a list has more than {MAX_ENTRIES} entries");
            return Err(Fault::TooMany.because(why));
        }
        let is_named = |vendor| vendors.is_empty() || vendors.contains(vendor);
        match floors.iter().find(|floor| !is_named(&floor.vendor)) {
            None => Ok(()),
            Some(TpmFloor { vendor, .. }) => {
                Err(Fault::Requirement
                    .because(format!("floors: {vendor} is not one of the vendors")))
            }
        }
    }

    /// Refuses a TPM that does not meet the requirements: `tpm` is `None` if no certificate names it, and `firmware` if its quote does
    /// not show the version.
    pub(crate) fn judge(
        &self,
        tpm: Option<&TpmModel>,
        firmware: Option<u64>,
    ) -> Result<(), Refusal> {
        if self.is_empty() {
            return Ok(());
        }
        let Some(tpm) = tpm else {
            return Err(Kind::Unproven
                .because(
                    "the policy requires a vendor of the TPM, and no verified certificate of its endorsement key names vendor and model: such a \
                     certificate, and the strong form of attested TLS, are needed; for other TPMs leave out `tpm` and list their keys \
                     (attestationKeys)",
                )
                .of("tpm.vendors"));
        };
        if !self.vendors.is_empty() && !self.vendors.contains(&tpm.vendor) {
            let text = format!(
                "the vendor of its TPM is {}, which the policy does not name",
                tpm.vendor
            );
            return Err(Kind::Machine
                .because(text)
                .of("tpm.vendors")
                .got(tpm.vendor));
        }
        if self.floors.is_empty() {
            return Ok(());
        }
        let fitting: Vec<_> = self.floors.iter().filter(|floor| floor.fits(tpm)).collect();
        if fitting.is_empty() {
            let text =
                format!("the policy has minimums for some TPMs (tpm.floors), but none for {tpm}");
            return Err(Kind::Machine.because(text).of("tpm.floors").got(tpm));
        }
        let Some(got) = firmware else {
            return Err(Kind::Unproven
                .because("the quote does not show the version of its TPM's firmware: its attestation key is in the owner hierarchy")
                .of("tpm.floors"));
        };
        let missed = fitting.into_iter().find(|floor| got < floor.minimum.0);
        match missed.map(|floor| floor.minimum.0) {
            None => Ok(()),
            Some(minimum) => {
                let (minimum, got) = (format!("{minimum:#x}"), format!("{got:#x}"));
                let text = format!(
                    "the firmware of its TPM, {tpm}, is too old: expected at least {minimum}, got {got}"
                );
                let refusal = Kind::Outdated.because(text);
                Err(refusal.of("tpm.floors").values(minimum, got))
            }
        }
    }
}

impl fmt::Display for TpmModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.vendor, self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requirements(json: &str) -> TpmRequirements {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn a_vendor_has_letters_or_an_id() {
        for (text, id, written) in [
            ("IFX", *b"IFX\0", "IFX"),
            ("id:49465800", *b"IFX\0", "IFX"),
            ("id:53544D20", *b"STM\0", "STM"),
            ("id:53544d20", *b"STM\0", "STM"),
            ("INTC", *b"INTC", "INTC"),
            // the ID of swtpm
            ("id:00001014", [0, 0, 0x10, 0x14], "id:00001014"),
        ] {
            let vendor = TpmVendor::parse(text).unwrap();
            assert_eq!((vendor.0, &*vendor.to_string()), (id, written), "{text}");
            assert_eq!(TpmVendor::parse(written), Some(vendor));
        }
        for text in [
            "",
            "ifx",
            "IFX ",
            "INTEL",
            "id:",
            "id:4946580",
            "id:4946580000",
            "é",
        ] {
            assert_eq!(TpmVendor::parse(text), None, "{text}");
        }
        assert_eq!(TpmVendor::of_certificate("IFX"), None);
    }

    #[test]
    fn a_tpm_is_of_a_named_vendor_and_new_enough_for_its_model() {
        let tpm = |vendor: &str, name: &str| TpmModel {
            vendor: TpmVendor::parse(vendor).unwrap(),
            name: name.into(),
        };
        let judge = |json: &str, tpm: Option<&TpmModel>, firmware| {
            let judged = requirements(json).judge(tpm, firmware);
            judged.map_err(|refusal| (refusal.kind, refusal.field.clone().unwrap()))
        };
        let (ifx, stm) = (tpm("IFX", "SLB9670"), tpm("STM", "ST33"));
        let vendors = r#"{"vendors":["IFX","NTC"]}"#;
        let floors = r#"{"floors":[{"vendor":"IFX","minimum":"0x5"},{"vendor":"IFX","model":"SLB9670","minimum":"0x7003e00000000"}]}"#;
        let refused = |kind, field: &str| Err((kind, field.to_owned()));
        for (json, tpm, firmware, judged) in [
            ("{}", None, None, Ok(())),
            (vendors, Some(&ifx), None, Ok(())),
            (
                vendors,
                Some(&stm),
                None,
                refused(Kind::Machine, "tpm.vendors"),
            ),
            (vendors, None, None, refused(Kind::Unproven, "tpm.vendors")),
            (
                floors,
                None,
                Some(9),
                refused(Kind::Unproven, "tpm.vendors"),
            ),
            (
                floors,
                Some(&stm),
                Some(u64::MAX),
                refused(Kind::Machine, "tpm.floors"),
            ),
            (
                floors,
                Some(&ifx),
                None,
                refused(Kind::Unproven, "tpm.floors"),
            ),
            (
                floors,
                Some(&ifx),
                Some(0x7_003d_ffff_ffff),
                refused(Kind::Outdated, "tpm.floors"),
            ),
            (floors, Some(&ifx), Some(0x7_003e_0000_0000), Ok(())),
            (floors, Some(&tpm("IFX", "SLB9665")), Some(5), Ok(())),
            (
                floors,
                Some(&tpm("IFX", "SLB9665")),
                Some(4),
                refused(Kind::Outdated, "tpm.floors"),
            ),
        ] {
            assert_eq!(
                judge(json, tpm, firmware),
                judged,
                "{json} {tpm:?} {firmware:?}"
            );
        }
    }

    #[test]
    fn a_minimum_for_a_vendor_that_is_not_accepted_is_an_error() {
        let json = r#"{"vendors":["IFX"],"floors":[{"vendor":"STM","minimum":"0x1"}]}"#;
        let error = requirements(json).check().unwrap_err().to_string();
        assert!(
            error.contains("floors: STM is not one of the vendors"),
            "{error}"
        );
        for json in ["{}", r#"{"floors":[{"vendor":"STM","minimum":"0x1"}]}"#] {
            assert_eq!(requirements(json).check(), Ok(()));
        }
        assert!(serde_json::from_str::<TpmRequirements>(r#"{"vendors":["infineon"]}"#).is_err());
    }
}
