//! The member names and keywords (words) of a policy. They are checked before any value is read, at
//! every depth. An unknown word, a word that appears twice, and `null` or an empty list in place of
//! a requirement are errors: otherwise a requirement that the author meant would not be in force.
//!
//! Every word of Constellation's policies is known and enforced. None is ignored.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use base::text::quoted;

/// All words. The word "" stands for any name, such as the number of a register. A list allows the
/// words of its entries. `[]` may be empty: then `Equal` accepts no signer, and `MAAFallback` asks
/// about each.
const FIELDS: &str = r#"{
"variant":0,"name":0,"require":0,"exceptions":0,"acpiTables":0,"requireConfinedAcpi":0,"attestationKeys":0,"endorsementRoots":0,
"measurements":{"":{"expected":0,"warnOnly":0}},"initramfs":{"":{"expected":0,"warnOnly":0}},
"alsoAccepted":{"name":0,"acpiTables":0,"measurements":{"":{"expected":0,"warnOnly":0}},"initramfs":{"":{"expected":0,"warnOnly":0}}},
"secureBoot":{"enabled":0,"pk":0,"kek":0,"db":0,"signers":0},
"tpm":{"vendors":0,"floors":{"vendor":0,"model":0,"minimum":0}},
"cloud":{"roots":0,"projects":0,"accounts":0,"zones":0,"instances":0,"sha384":{"":0}},
"tdx":{"tcbStatuses":0,"platformGraceDays":0,"acceptedAdvisories":0,"rejectedAdvisories":0,"minimumEvaluation":0,"maximumCollateralDays":0,"tdAttributes":0,"xfam":0,"mrTd":0,"mrSeam":0,"mrConfigId":0,
"mrOwner":0,"mrOwnerConfig":0,"mrServiceTd":0,"platforms":0},
"qeSVN":0,"pceSVN":0,"teeTCBSVN":0,"qeVendorID":0,"mrSeam":0,"xfam":0,"intelRootKey":0,
"snp":{"floors":{"product":0,"model":0,"stepping":0,"minimum":{"fmc":0,"bootloader":0,"tee":0,"snp":0,"microcode":0}},"minimumAbi":0,
"minimumGuestSvn":0,"minimumFirmware":0,"maximumVmpl":0,"allowMigration":0,"refuseSmt":0,"policyBits":0,"platformBits":0,
"forbiddenPlatformBits":0,"mitigationBits":0,"chips":0,"clouds":0,"launchMeasurements":0,"hostData":0,"familyIds":0,"imageIds":0,"idKeys":0,"authorKeys":0,"revocationList":0},
"bootloaderVersion":0,"teeVersion":0,"snpVersion":0,"microcodeVersion":0,
"firmwareSignerConfig":{"acceptedKeyDigests":[],"enforcementPolicy":0,"maaURL":0},"amdRootKey":0,"amdSigningKey":0}"#;

/// Checks the words of a policy. An error names the paths of all unknown words, such as
/// `snp.floors[0].minimum.bootloder`, or that of the first other error.
pub fn check(policy: &str) -> Result<(), serde_json::Error> {
    let words = serde_json::from_str(FIELDS)?;
    let unknown = RefCell::default();
    let check = |unknown| {
        let (words, path) = (&words, "");
        let mut json = serde_json::Deserializer::from_str(policy);
        let place = Place {
            words,
            path,
            unknown,
        };
        place.deserialize(&mut json)
    };
    let checked = check(Some(&unknown));
    match unknown.take() {
        all if all.is_empty() => checked,
        // the error about a single word says its line
        all if all.len() == 1 => check(None),
        all => Err(Error::custom(all.join("; also "))),
    }
}

/// Returns the path of the member that has another type than its requirement, such as a list in
/// place of a number: without it, the error is another one or none. `read` reads a policy, and fails for this
/// one.
pub fn of_other_type(policy: &str, read: impl Fn(&Value) -> Option<String>) -> Option<String> {
    let policy: Value = serde_json::from_str(policy).ok()?;
    let why = read(&policy)?;
    let mut places = vec![];
    members(&policy, String::new(), &mut places);
    places.into_iter().find_map(|place| {
        let (parent, name) = place.rsplit_once('/')?;
        let mut without = policy.clone();
        without.pointer_mut(parent)?.as_object_mut()?.remove(name)?;
        let is_changed = match read(&without) {
            Some(error) => error != why && !error.starts_with("missing field"),
            None => true,
        };
        is_changed.then(|| place.trim_start_matches('/').replace('/', "."))
    })
}

/// Collects the JSON pointers of all members, each behind the members below it.
fn members(value: &Value, path: String, places: &mut Vec<String>) {
    match value {
        Value::Object(all) => {
            for (name, value) in all {
                members(value, format!("{path}/{name}"), places);
            }
        }
        Value::Array(all) => {
            for (index, value) in all.iter().enumerate() {
                members(value, format!("{path}/{index}"), places);
            }
        }
        _ => {}
    }
    places.push(path);
}

/// The texts about unknown words; `None` if the first one is an error.
type Unknown<'a> = Option<&'a RefCell<Vec<String>>>;

/// A position in a policy, and the words that are allowed there.
struct Place<'a> {
    words: &'a Value,
    path: &'a str,
    unknown: Unknown<'a>,
}

impl<'de> DeserializeSeed<'de> for Place<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        if self.words.is_object() {
            return json.deserialize_any(self);
        }
        let value: Value = serde::Deserialize::deserialize(json)?;
        let text = value.as_str().unwrap_or_default();
        if text.eq_ignore_ascii_case("latest") && !self.path.ends_with("name") {
            let text =
                "\"latest\" is not a version: write the value that `firstlight verify` shows";
            return Err(D::Error::custom(format!("{}: {text}", self.path)));
        }
        let is_empty = value.as_array().is_some_and(Vec::is_empty) && value != *self.words;
        if value.is_null() || is_empty {
            Err(self.requires_nothing())
        } else {
            Ok(())
        }
    }
}

impl<'de> Visitor<'de> for Place<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object or a list of objects: {:?}", self.path)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = BTreeSet::new();
        while let Some(word) = map.next_key::<String>()? {
            let path = format!("{}.{word}", self.path);
            let path = path.trim_start_matches('.');
            let known = self.words.get("").or_else(|| self.words.get(&word));
            let unknown = self.unknown;
            match (known, unknown) {
                (Some(words), _) => map.next_value_seed(Place {
                    words,
                    path,
                    unknown,
                })?,
                (None, None) => return Err(A::Error::custom(self.about_unknown(path, &word))),
                (None, Some(all)) => {
                    all.borrow_mut().push(self.about_unknown(path, &word));
                    let IgnoredAny = map.next_value()?;
                }
            }
            if !seen.insert(word) {
                let shown = quoted(path, 120);
                return Err(A::Error::custom(format!("{shown} appears twice")));
            }
        }
        if seen.is_empty() && !self.path.is_empty() {
            Err(self.requires_nothing())
        } else {
            Ok(())
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        for index in 0.. {
            let (words, path) = (self.words, &*format!("{}[{index}]", self.path));
            let place = Place {
                words,
                path,
                unknown: self.unknown,
            };
            match (list.next_element_seed(place)?, index) {
                (None, 0) => return Err(self.requires_nothing()),
                (None, _) => break,
                (Some(()), _) => {}
            }
        }
        Ok(())
    }

    /// A string may stand for an object, such as the value of a register: the code that reads the
    /// values checks it.
    fn visit_str<E: Error>(self, _text: &str) -> Result<(), E> {
        Ok(())
    }
}

impl Place<'_> {
    fn requires_nothing<E: Error>(&self) -> E {
        let shown = quoted(self.path, 120);
        E::custom(format!(
            "{shown} is empty or null, so it would require nothing: give a value, or omit the field"
        ))
    }

    fn about_unknown(&self, path: &str, word: &str) -> String {
        let shown = quoted(path, 120);
        format!("unknown field {shown}{}", self.nearest(word))
    }

    /// Returns the end of the error about an unknown word: the most similar known word.
    fn nearest(&self, unknown: &str) -> String {
        let same = |(a, b): &(char, char)| a.eq_ignore_ascii_case(b);
        let likeness = |known: &str| {
            let ends = unknown.chars().rev().zip(known.chars().rev());
            let starts = unknown.chars().zip(known.chars());
            starts.take_while(same).count() + ends.take_while(same).count()
        };
        let known = self.words.as_object().into_iter().flat_map(|it| it.keys());
        let nearest = known.max_by_key(|known| likeness(known));
        let nearest = nearest.filter(|known| 2 * likeness(known) > known.len());
        nearest.map_or(String::new(), |known| format!("; did you mean {known:?}?"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hardware::{snp, tdx};
    use support::mutation::mutations;

    use crate::sources::offline;
    use crate::variant::ALL;
    use crate::{Policy, Registers, Variant, instance};

    const ZERO: &str = "0000000000000000000000000000000000000000000000000000000000000000";

    fn policy(members: &str) -> String {
        format!(r#"{{"measurements":{{"4":"{ZERO}"}}{members}}}"#)
    }

    fn refusal(text: &str) -> String {
        match Policy::from_json(text) {
            Ok(_) => panic!("accepted: {text}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn an_unknown_word_is_refused_by_its_path_at_every_depth() {
        let value = format!(r#"{{"expected":"{ZERO}","warnOnly":false}}"#);
        for (members, why) in [
            (
                r#","atestationKeys":["000b"]"#.into(),
                r#"unknown field "atestationKeys"; did you mean "attestationKeys"?"#,
            ),
            (
                r#","attestationkeys":["000b"]"#.into(),
                r#"did you mean "attestationKeys"?"#,
            ),
            (
                r#","snp":{"floors":[{"product":"Milan","minimum":{"bootloder":4}}]}"#.into(),
                r#""snp.floors[0].minimum.bootloder"; did you mean "bootloader"?"#,
            ),
            (
                r#","snp":{"launchMeasurement":["00"]}"#.into(),
                r#""snp.launchMeasurement"; did you mean "launchMeasurements"?"#,
            ),
            (
                r#","tdx":{"mrTD":["00"],"mrtds":1}"#.into(),
                r#""tdx.mrTD"; did you mean "mrTd"?"#,
            ),
            (
                r#","cloud":{"project":["p"]}"#.into(),
                r#""cloud.project"; did you mean "projects"?"#,
            ),
            (
                r#","firmwareSignerConfig":{"acceptedKeyDigest":[]}"#.into(),
                r#""firmwareSignerConfig.acceptedKeyDigest"; did you mean "acceptedKeyDigests"?"#,
            ),
            (
                format!(r#","initramfs":{{"4":{{"expected":"{ZERO}","warnonly":true}}}}"#),
                r#""initramfs.4.warnonly"; did you mean "warnOnly"?"#,
            ),
            (
                format!(r#","alsoAccepted":[{{"name":"b","measurements":{{"4":{value}}},"x":1}}]"#),
                r#"unknown field "alsoAccepted[0].x" at line"#,
            ),
            (
                r#","a\u001b[2J":1"#.into(),
                r#"unknown field "a\u{1b}[2J" at line"#,
            ),
        ] {
            let error = refusal(&policy(&members));
            assert!(error.contains(why), "{members}: {error}");
        }
        let text = policy("").replace("measurements", "measurments");
        assert!(refusal(&text).contains(r#"did you mean "measurements"?"#));
    }

    #[test]
    fn all_unknown_words_are_named_at_once() {
        let error = refusal(&policy(
            r#","atestationKeys":["000b"],"snp":{"hostdata":["00"],"chip":[]},"alsoAccepted":[{"nam":"b"}]"#,
        ));
        for word in [
            r#""atestationKeys"; did you mean "attestationKeys"?"#,
            r#"; also unknown field "snp.hostdata"; did you mean "hostData"?"#,
            r#""snp.chip""#,
            r#""alsoAccepted[0].nam""#,
        ] {
            assert!(error.contains(word), "{word}: {error}");
        }
        // another error does not hide them
        let error = refusal(&policy(r#","snp":{"a":1,"b":2,"chips":[]}"#));
        assert!(
            error.contains(r#""snp.a""#) && error.contains(r#""snp.b""#),
            "{error}"
        );
    }

    #[test]
    fn a_value_of_another_type_is_named_by_its_field() {
        for (members, field) in [
            (r#","tdx":{"xfam":7}"#, "tdx.xfam"),
            (r#","snp":{"chips":"00","maximumVmpl":0}"#, "snp.chips"),
            (
                r#","snp":{"floors":[{"product":"Milan","minimum":{"fmc":"1"}}]}"#,
                "snp.floors.0.minimum.fmc",
            ),
            (r#","cloud":{"zones":{"a":1}}"#, "cloud.zones"),
            (
                r#","attestationKeys":"000b","qeSVN":"0""#,
                "attestationKeys",
            ),
        ] {
            let error = refusal(&policy(members));
            assert!(
                error.contains(&format!(": {field:?}: ")),
                "{members}: {error}"
            );
        }
        let error = refusal("[]");
        assert!(
            error.contains("invalid type: sequence") || error.contains("empty"),
            "{error}"
        );
    }

    #[test]
    fn a_word_that_appears_twice_is_refused() {
        let twice = format!(r#"{{"measurements":{{"4":"{ZERO}","4":"{ZERO}"}}}}"#);
        assert!(refusal(&twice).contains(r#""measurements.4" appears twice"#));
        for (members, path) in [
            (r#","name":"a","name":"b""#, "name"),
            (
                r#","attestationKeys":["a"],"attestationKeys":["b"]"#,
                "attestationKeys",
            ),
            (r#","cloud":{"zones":["a"],"zones":["b"]}"#, "cloud.zones"),
            (r#","cloud":{"sha384":{"4":"0","4":"1"}}"#, "cloud.sha384.4"),
            (r#","snpVersion":1,"snpVersion":0"#, "snpVersion"),
        ] {
            let error = refusal(&policy(members));
            assert!(
                error.contains(&format!("{path:?} appears twice")),
                "{error}"
            );
        }
    }

    #[test]
    fn a_null_or_an_empty_list_in_the_place_of_a_requirement_is_refused() {
        for (members, path) in [
            (r#","attestationKeys":null"#, "attestationKeys"),
            (r#","attestationKeys":[]"#, "attestationKeys"),
            (r#","endorsementRoots":null"#, "endorsementRoots"),
            (r#","endorsementRoots":[]"#, "endorsementRoots"),
            (r#","require":null"#, "require"),
            (r#","variant":null"#, "variant"),
            (r#","bootloaderVersion":null"#, "bootloaderVersion"),
            (r#","amdRootKey":null"#, "amdRootKey"),
            (r#","cloud":{}"#, "cloud"),
            (r#","cloud":{"zones":[]}"#, "cloud.zones"),
            (r#","cloud":{"sha384":{}}"#, "cloud.sha384"),
            (r#","cloud":{"sha384":[]}"#, "cloud.sha384"),
            (r#","cloud":{"sha384":[{}]}"#, "cloud.sha384[0]"),
            (r#","snp":{}"#, "snp"),
            (r#","snp":{"chips":[]}"#, "snp.chips"),
            (r#","snp":{"floors":[]}"#, "snp.floors"),
            (r#","tdx":{"mrTd":[]}"#, "tdx.mrTd"),
            (r#","tdx":{"mrOwner":null}"#, "tdx.mrOwner"),
            (r#","alsoAccepted":[]"#, "alsoAccepted"),
            (r#","initramfs":{}"#, "initramfs"),
        ] {
            let error = refusal(&policy(members));
            assert!(
                error.contains(&format!("{path:?} is empty or null")),
                "{members}: {error}"
            );
        }
        for members in [r#","snp":null"#, r#","firmwareSignerConfig":null"#] {
            assert!(
                refusal(&policy(members)).contains("null, expected an object"),
                "{members}"
            );
        }
        let null = r#"{"measurements":{"4":null}}"#;
        assert!(
            refusal(null).contains(r#"expected an object or a list of objects: "measurements.4""#)
        );
    }

    #[test]
    fn a_version_that_is_a_word_is_refused_by_its_field() {
        for (members, path) in [
            (r#","snpVersion":"latest""#, "snpVersion"),
            (r#","teeTCBSVN":"Latest""#, "teeTCBSVN"),
            (
                r#","snp":{"floors":[{"minimum":{"tee":"latest"}}]}"#,
                "snp.floors[0].minimum.tee",
            ),
        ] {
            let error = refusal(&policy(members));
            assert!(
                error.contains(&format!(
                    "{path}: \"latest\" is not a version: write the value"
                )),
                "{error}"
            );
        }
        // an image may have the same name as this field
        Policy::from_json(&policy(r#","name":"latest""#)).unwrap();
    }

    /// Policies as Constellation writes them for each variant.
    #[test]
    fn policies_of_the_reference_system_are_read_as_they_are() {
        let registers = |digits: usize| {
            let value = "ab".repeat(digits / 2);
            let one = |index| format!(r#""{index}":{{"expected":"{value}","warnOnly":false}}"#);
            format!(r#""measurements":{{{},{}}}"#, one(11), one(4))
        };
        let versions =
            r#","bootloaderVersion":4,"teeVersion":0,"snpVersion":24,"microcodeVersion":219"#;
        let roots = r#","amdRootKey":"","amdSigningKey":"""#;
        let signer = |digests: &str, policy: &str| {
            format!(
                r#","firmwareSignerConfig":{{"acceptedKeyDigests":{digests},"enforcementPolicy":{policy},"maaURL":""}}"#
            )
        };
        let digest = "0a".repeat(48);
        let tdx = format!(
            r#","qeSVN":0,"pceSVN":0,"teeTCBSVN":"{0}","qeVendorID":"{0}","mrSeam":"","xfam":"e702060000000000","intelRootKey":"""#,
            "05".repeat(16)
        );
        for (variant, further) in [
            ("qemu-vtpm", String::new()),
            ("qemu-tdx", String::new()),
            ("gcp-sev-es", String::new()),
            ("aws-nitro-tpm", String::new()),
            ("azure-trustedlaunch", String::new()),
            ("azure-tdx", tdx.clone()),
            ("azure-tdx", tdx.replace(r#""mrSeam":"","#, "")),
            ("aws-sev-snp", format!("{versions}{roots}")),
            ("gcp-sev-snp", format!("{versions}{roots}")),
            (
                "azure-sev-snp",
                format!(
                    "{versions}{}{roots}",
                    signer(&format!("[\"{digest}\"]"), "\"MAAFallback\"")
                ),
            ),
            (
                "azure-sev-snp",
                format!("{versions}{}{roots}", signer("[]", "\"WarnOnly\"")),
            ),
            (
                "azure-sev-snp",
                format!(
                    "{versions}{}{roots}",
                    signer(&format!("\"{digest}\""), "true")
                ),
            ),
        ] {
            let digits = if variant == "qemu-tdx" { 96 } else { 64 };
            let registers =
                registers(digits).replace("\"11\"", if digits == 96 { "\"1\"" } else { "\"11\"" });
            let text = format!("{{{registers}{further}}}");
            let policy = Policy::from_json(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
            let variant = Variant::named(variant).unwrap();
            let made = variant.validator_for(policy, &offline());
            assert!(made.is_ok(), "{text}: {:?}", made.err());
        }
    }

    #[test]
    fn a_policy_makes_validators_of_the_variant_that_it_names() {
        let named = |name: &str| policy(&format!(r#","variant":"{name}""#));
        let with_pcrs = |it: &&Variant| it.registers == Registers::Pcrs && it.launch.is_none();
        for variant in ALL.iter().filter(with_pcrs) {
            let own = Policy::from_json(&named(variant.name)).unwrap();
            assert_eq!(own.variant(), Some(variant.name));
            assert!(
                variant.validator_for(own, &offline()).is_ok(),
                "{variant:?}"
            );
            let other = Policy::from_json(&named("home")).unwrap();
            let error = variant
                .validator_for(other, &offline())
                .err()
                .unwrap()
                .to_string();
            let expected = format!(
                "it is for the attestation variant \"home\", but the machines have {}",
                variant.name
            );
            assert!(error.contains(&expected), "{error}");
        }
    }

    /// The table has exactly the words that the code that reads values knows.
    #[test]
    fn the_words_are_those_that_are_read() {
        fn known<T: serde::de::DeserializeOwned>() -> BTreeSet<String> {
            let error = serde_json::from_str::<T>(r#"{"?":0}"#)
                .err()
                .unwrap()
                .to_string();
            let (_, words) = error.split_once(", expected ").unwrap();
            words
                .split('`')
                .skip(1)
                .step_by(2)
                .map(str::to_owned)
                .collect()
        }
        let words: Value = serde_json::from_str(FIELDS).unwrap();
        let listed = |place: &str| -> BTreeSet<String> {
            let words = words.pointer(place).unwrap().as_object().unwrap();
            words.keys().cloned().collect()
        };
        assert_eq!(listed("/cloud"), known::<instance::CloudRequirements>());
        assert_eq!(
            listed("/secureBoot"),
            known::<crate::policy::secure_boot::SecureBootRequirements>()
        );
        assert_eq!(
            listed("/tpm"),
            known::<crate::policy::tpm::TpmRequirements>()
        );
        assert_eq!(
            listed("/tpm/floors"),
            known::<crate::policy::tpm::TpmFloor>()
        );
        assert_eq!(listed("/tdx"), known::<tdx::TdxRequirements>());
        assert_eq!(
            listed("/snp"),
            known::<snp::requirements::SnpRequirements>()
        );
        assert_eq!(listed("/snp/floors"), known::<snp::requirements::Floor>());
        assert_eq!(listed("/snp/floors/minimum"), known::<snp::tcb::Tcb>());
    }

    #[test]
    fn altered_texts_are_accepted_or_refused_and_end() {
        let valid = policy(
            r#","cloud":{"zones":["z"],"sha384":[{"4":"0"}]},"snp":{"floors":[{"minimum":{"fmc":1}}]},"tdx":{"xfam":"0x3"},"alsoAccepted":[{"name":"b"}]"#,
        );
        check(&valid).unwrap();
        for text in mutations(valid.as_bytes(), 3000) {
            let _ = check(&String::from_utf8_lossy(&text));
        }
        let deep = "[".repeat(100_000);
        assert!(check(&format!(r#"{{"cloud":{{"zones":{deep}"#)).is_err());
        assert!(check(&format!(r#"{{"alsoAccepted":{deep}"#)).is_err());
    }
}
