//! A cloud's instance: the statements about it in the cloud's certificates, and the requirements of
//! a policy.
//!
//! ```json
//! {"measurements":{..},"cloud":{"roots":["azure-2023"],"projects":["project"],"zones":["europe-west3-b"],"instances":["42"]}}
//! {"measurements":{..},"cloud":{"accounts":["123456789012"],"sha384":{"4":"96 hex digits"}}}
//! ```
//!
//! An absent list has no requirement; an empty list is an error. `"sha384":{"4":"96 hex digits"}`
//! has PCRs of another bank, which AWS signs. A list of such objects accepts the values of any one
//! of them, for machines with several images. Without `roots`, the variant's roots are trusted;
//! with `roots`, only the named ones (or certificates in PEM, the root first).

use super::error::{Fault, PolicyError};
use crate::refusal::{Kind, Refusal};
use std::collections::BTreeMap;

use base::text;
use hardware::claims::Property;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Maximum number of entries of a list.
const MAX_ENTRIES: usize = 10_000;

/// The name of the ID among [`CloudInstance::properties`].
pub const ID: &str = "instance";

/// PCRs of the SHA-384 bank.
pub type Sha384 = BTreeMap<u32, String>;

/// A policy's requirements for the cloud's statements about a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CloudRequirements {
    /// The roots of the cloud's certificates: names, or certificates in PEM.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub roots: Vec<String>,
    /// The accepted projects of Google Compute Engine, by name or number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub projects: Vec<String>,
    /// The accepted accounts of Amazon Web Services: 12 digits each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accounts: Vec<String>,
    /// The accepted zones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub zones: Vec<String>,
    /// The accepted instances, by the ID that the cloud gave them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub instances: Vec<String>,
    /// Sets of SHA-384 PCRs, of which the cloud must have signed one (AWS): 96 lower-case
    /// hexadecimal digits each.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        serialize_with = "one_or_several",
        deserialize_with = "from_one_or_several"
    )]
    pub sha384: Vec<Sha384>,
}

/// An instance, by the cloud's own names. Members that the cloud neither signs nor returns are
/// absent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CloudInstance {
    /// The ID, which the cloud gives to no other instance.
    pub id: Option<String>,
    /// The name and the number of the project.
    pub project: Option<(String, String)>,
    /// The account that owns the instance.
    pub account: Option<String>,
    /// The zone.
    pub zone: Option<String>,
    /// The name.
    pub name: Option<String>,
    /// The image from which the cloud started it.
    pub image: Option<String>,
}

impl CloudRequirements {
    /// Returns a clause that says what is wrong with the lists.
    pub fn check(&self) -> Result<(), PolicyError> {
        let lists = [
            &self.roots,
            &self.projects,
            &self.accounts,
            &self.zones,
            &self.instances,
        ];
        for list in lists {
            if list.len() > MAX_ENTRIES {
                let count = list.len();
                return Err(Fault::TooMany.because(format!(
                    "a list has {count} entries, more than {MAX_ENTRIES}"
                )));
            }
        }
        let is_account =
            |text: &&String| text.len() == 12 && text.bytes().all(|b| b.is_ascii_digit());
        if let Some(other) = self.accounts.iter().find(|one| !is_account(one)) {
            return Err(Fault::Requirement.because(format!(
                "accounts: expected 12 digits, got {}",
                text::quoted(other, 80)
            )));
        }
        if self.sha384.len() > MAX_ENTRIES {
            return Err(Fault::TooMany.because(format!(
                "sha384: expected at most {MAX_ENTRIES} sets of PCRs"
            )));
        }
        for (index, value) in self.sha384.iter().flatten() {
            let is_digit = |digit: u8| digit.is_ascii_digit() || (b'a'..=b'f').contains(&digit);
            if value.len() != 96 || !value.bytes().all(is_digit) {
                return Err(Fault::Requirement.because(format!(
                    "sha384: PCR {index}: expected 96 hex digits, got {}",
                    text::quoted(value, 120)
                )));
            }
        }
        Ok(())
    }

    /// Refuses an instance that the policy does not list.
    pub fn judge(&self, instance: &CloudInstance) -> Result<(), Refusal> {
        let project = instance.project.as_ref();
        let projects: Vec<_> = project
            .into_iter()
            .flat_map(|(name, number)| [name.as_str(), number])
            .collect();
        listed("project", &self.projects, &projects)?;
        let account = instance.account.as_deref();
        listed("account", &self.accounts, account.as_slice())?;
        listed("zone", &self.zones, instance.zone.as_deref().as_slice())?;
        listed(
            "instance",
            &self.instances,
            instance.id.as_deref().as_slice(),
        )
    }
}

fn one_or_several<S: Serializer>(sets: &[Sha384], serializer: S) -> Result<S::Ok, S::Error> {
    match sets {
        [one] => one.serialize(serializer),
        several => several.serialize(serializer),
    }
}

fn from_one_or_several<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<Sha384>, D::Error> {
    // serde has the names of an untagged object as text
    #[derive(Deserialize)]
    #[serde(
        untagged,
        expecting = "sha384: expected an object of PCRs, or a list of such objects"
    )]
    enum Sets {
        One(BTreeMap<String, String>),
        Several(Vec<BTreeMap<String, String>>),
    }
    let sets = match Sets::deserialize(deserializer)? {
        Sets::One(one) => vec![one],
        Sets::Several(several) => several,
    };
    let pcr = |(name, value): (String, String)| match name.parse() {
        Ok(pcr) => Ok((pcr, value)),
        Err(_) => Err(D::Error::custom(format!(
            "sha384: expected the number of a PCR, got {}",
            text::quoted(name, 80)
        ))),
    };
    sets.into_iter()
        .map(|set| set.into_iter().map(pcr).collect())
        .collect()
}

fn listed(what: &str, accepted: &[String], got: &[&str]) -> Result<(), Refusal> {
    if accepted.is_empty() || got.iter().any(|got| accepted.iter().any(|one| one == got)) {
        return Ok(());
    }
    let field = format!("cloud.{what}s");
    Err(match got.first() {
        Some(got) => {
            let text = format!(
                "the {what} of the machine is {}, which the policy does not name",
                text::quoted(got, 80)
            );
            Kind::Machine.because(text).of(field).got(got)
        }
        None => {
            let text = format!(
                "the policy names the accepted {what}s, but the cloud signed none for the machine"
            );
            Kind::Unproven.because(text).of(field)
        }
    })
}

impl CloudInstance {
    /// Returns the properties of the instance that are shown to people.
    pub fn properties(&self) -> Vec<Property> {
        let project = self.project.as_ref();
        let number = project.map(|(_, number)| number);
        [
            (ID, self.id.as_ref()),
            ("project", project.map(|(name, _)| name)),
            ("project number", number),
            ("account", self.account.as_ref()),
            ("zone", self.zone.as_ref()),
            ("instance name", self.name.as_ref()),
            ("image", self.image.as_ref()),
        ]
        .into_iter()
        .filter_map(|(name, value)| {
            let value = crate::printable(value?, 80);
            Some(Property { name, value })
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pcrs_that_aws_signs_are_one_set_or_several() {
        let value = "0a".repeat(48);
        let one = format!(r#"{{"sha384":{{"4":"{value}"}}}}"#);
        let several =
            format!(r#"{{"sha384":[{{"4":"{value}"}},{{"4":"{value}","12":"{value}"}}]}}"#);
        for (json, count) in [(&one, 1), (&several, 2)] {
            let demands: CloudRequirements = serde_json::from_str(json).unwrap();
            assert_eq!((demands.sha384.len(), demands.check()), (count, Ok(())));
            assert_eq!(serde_json::to_string(&demands).unwrap(), *json);
        }
        let demands: CloudRequirements = serde_json::from_str("{}").unwrap();
        assert_eq!(demands, CloudRequirements::default());
        let demands: CloudRequirements =
            serde_json::from_str(r#"{"sha384":[{"4":"0A"}]}"#).unwrap();
        let error = demands.check().unwrap_err();
        assert!(
            error.to_string().contains("PCR 4: expected 96 hex digits"),
            "{error}"
        );
        let error =
            serde_json::from_str::<CloudRequirements>(r#"{"sha384":{"four":""}}"#).unwrap_err();
        assert!(error.to_string().contains("number of a PCR"), "{error}");
        let error = serde_json::from_str::<CloudRequirements>(r#"{"sha384":"4"}"#).unwrap_err();
        assert!(
            error.to_string().contains("or a list of such objects"),
            "{error}"
        );
    }

    #[test]
    fn an_instance_is_one_of_those_that_the_policy_names() {
        let named = CloudInstance {
            id: Some("42".into()),
            project: Some(("p".into(), "7".into())),
            account: Some("123456789012".into()),
            zone: Some("z".into()),
            ..CloudInstance::default()
        };
        let judge = |json: &str, instance: &CloudInstance| {
            serde_json::from_str::<CloudRequirements>(json)
                .unwrap()
                .judge(instance)
        };
        for json in [
            "{}",
            r#"{"projects":["p"]}"#,
            r#"{"projects":["q","7"],"zones":["z"],"instances":["42"]}"#,
            r#"{"accounts":["210987654321","123456789012"]}"#,
        ] {
            assert_eq!(judge(json, &named), Ok(()), "{json}");
        }
        for (json, why) in [
            (r#"{"projects":["q"]}"#, "project of the machine is \"p\""),
            (r#"{"zones":["y"]}"#, "zone of the machine is \"z\""),
            (
                r#"{"accounts":["210987654321"]}"#,
                "account of the machine is \"123456789012\"",
            ),
            (
                r#"{"instances":["4"]}"#,
                "instance of the machine is \"42\"",
            ),
        ] {
            let error = judge(json, &named).unwrap_err();
            assert_eq!(error.kind, Kind::Machine);
            assert!(error.text.contains(why), "{json}: {error}");
            let error = judge(json, &CloudInstance::default()).unwrap_err();
            assert_eq!(error.kind, Kind::Unproven, "{error}");
        }
        for other in ["", "12345678901", "123456789012 ", "12345678901a"] {
            let demands = format!(r#"{{"accounts":["{other}"]}}"#);
            let demands: CloudRequirements = serde_json::from_str(&demands).unwrap();
            let error = demands.check().unwrap_err();
            assert!(error.to_string().contains("expected 12 digits"), "{error}");
        }
        // a requirement that a later version added is an error, not ignored
        assert!(serde_json::from_str::<CloudRequirements>(r#"{"project":["p"]}"#).is_err());
    }
}
