//! The measurement policy: which value each register must have. The JSON is that of the old system's `join-config`:
//!
//! ```json
//! {"measurements":{"4":{"expected":"5198fd..","warnOnly":false},"15":{"expected":"0000..","warnOnly":false}}}
//! ```

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;

use super::{hex, pcr15_after};
use crate::crypto::CLUSTER_ID_LEN;
use crate::tpm::CLUSTER_ID_PCR;

/// Length in bytes of a SHA-256 PCR.
const PCR_LEN: usize = 32;
/// The old system's configurations have this, over and over, where a value has to be filled in.
const PLACEHOLDER: [u8; 2] = [0x12, 0x34];
/// TPMs for PCs have PCRs 0 to 23; the format leaves room for 32.
const MAX_INDEX: u32 = 31;

/// The value that a register must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Measurement {
    /// The value.
    pub expected: [u8; PCR_LEN],
    /// Another value is logged and accepted.
    pub warn_only: bool,
}

/// The accepted values by register. At least one is enforced: a policy that accepts everything is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    measurements: BTreeMap<u32, Measurement>,
}

/// Why a text is no policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PolicyError(String);

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "measurement policy: {}", self.0)
    }
}

impl std::error::Error for PolicyError {}

#[derive(Deserialize)]
struct Json {
    measurements: BTreeMap<String, JsonMeasurement>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum JsonMeasurement {
    /// Of old clusters: a bare value, always enforced.
    Bare(String),
    Full {
        expected: String,
        #[serde(default, rename = "warnOnly")]
        warn_only: bool,
    },
}

impl Policy {
    /// A policy of these values.
    pub fn new(measurements: BTreeMap<u32, Measurement>) -> Result<Policy, PolicyError> {
        if measurements.values().all(|measurement| measurement.warn_only) {
            return Err(PolicyError("no register is enforced: it would accept any machine".into()));
        }
        Ok(Policy { measurements })
    }

    /// Reads the JSON; unknown fields are passed over.
    pub fn from_json(text: &str) -> Result<Policy, PolicyError> {
        let json: Json = serde_json::from_str(text).map_err(|error| PolicyError(error.to_string()))?;
        let mut measurements = BTreeMap::new();
        for (name, measurement) in json.measurements {
            let index = name.parse().ok().filter(|index| *index <= MAX_INDEX);
            let index = index.ok_or_else(|| PolicyError(format!("{name:?} is no PCR: expected 0 to {MAX_INDEX}")))?;
            let (expected, warn_only) = match measurement {
                JsonMeasurement::Bare(expected) => (expected, false),
                JsonMeasurement::Full { expected, warn_only } => (expected, warn_only),
            };
            let expected = parse_value(&expected)
                .ok_or_else(|| PolicyError(format!("PCR {index}: expected 64 hex digits, got {:.80?}", expected)))?;
            if !warn_only && expected.chunks(2).all(|pair| pair == PLACEHOLDER) {
                return Err(PolicyError(format!(
                    "PCR {index} has the placeholder 1234..: measure a machine that is right"
                )));
            }
            if measurements.insert(index, Measurement { expected, warn_only }).is_some() {
                return Err(PolicyError(format!("PCR {index} is there twice")));
            }
        }
        Policy::new(measurements)
    }

    /// The JSON, to the letter as the old system writes it.
    pub fn to_json(&self) -> String {
        // Go sorts the keys of a map as texts
        let by_name: BTreeMap<_, _> = self.measurements.iter().map(|(index, m)| (index.to_string(), m)).collect();
        let entry = |(name, m): (&String, &&Measurement)| {
            format!("\"{name}\":{{\"expected\":\"{}\",\"warnOnly\":{}}}", hex(&m.expected), m.warn_only)
        };
        format!("{{\"measurements\":{{{}}}}}", by_name.iter().map(entry).collect::<Vec<_>>().join(","))
    }

    /// Whether it lets in only machines that have joined no cluster since they started, which is what PCR 15 being zero says.
    pub fn demands_fresh(&self) -> bool {
        self.measurements.get(&CLUSTER_ID_PCR) == Some(&Measurement { expected: [0; PCR_LEN], warn_only: false })
    }

    /// The same policy for a member of this cluster: its ID measured into PCR 15.
    pub fn expecting_cluster(mut self, cluster_id: &[u8; CLUSTER_ID_LEN]) -> Policy {
        let expected = pcr15_after(cluster_id);
        self.measurements.insert(CLUSTER_ID_PCR, Measurement { expected, warn_only: false });
        self
    }

    /// The registers that do not have the expected value, in ascending order: index, what was expected, and what was got
    /// (`None`: the register is not among `values`).
    pub fn mismatches<'a>(
        &'a self,
        values: &'a BTreeMap<u32, Vec<u8>>,
    ) -> impl Iterator<Item = (u32, &'a Measurement, Option<&'a [u8]>)> {
        self.measurements
            .iter()
            .map(|(index, measurement)| (*index, measurement, values.get(index).map(Vec::as_slice)))
            .filter(|(_, measurement, got)| *got != Some(measurement.expected.as_slice()))
    }
}

fn parse_value(text: &str) -> Option<[u8; PCR_LEN]> {
    if text.len() != 2 * PCR_LEN || !text.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    let mut value = [0; PCR_LEN];
    for (byte, digits) in value.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutation::mutations;

    const ZERO: &str = "0000000000000000000000000000000000000000000000000000000000000000";

    fn old_default() -> String {
        let entry = |index, value: &str| format!("\"{index}\":{{\"expected\":\"{value}\",\"warnOnly\":false}}");
        let value = "db794e9bc200e22550514674ca3494119b00b2db74ffe2f7c970bf6bf5bc1cae";
        let entries = [entry(11, value), entry(12, ZERO), entry(15, ZERO), entry(4, value), entry(8, ZERO)];
        format!("{{\"measurements\":{{{}}}}}", entries.join(","))
    }

    #[test]
    fn the_old_systems_json_is_read_and_written_to_the_letter() {
        assert_eq!(Policy::from_json(&old_default()).unwrap().to_json(), old_default());
    }

    #[test]
    fn a_bare_value_is_enforced() {
        let policy = Policy::from_json(&format!(r#"{{"measurements":{{"4":"{ZERO}"}},"other":1}}"#)).unwrap();
        assert_eq!(policy.measurements[&4], Measurement { expected: [0; 32], warn_only: false });
    }

    #[test]
    fn a_policy_that_enforces_nothing_is_refused() {
        let warn_only = format!(r#"{{"measurements":{{"4":{{"expected":"{ZERO}","warnOnly":true}}}}}}"#);
        for text in [r#"{"measurements":{}}"#, &warn_only] {
            assert!(Policy::from_json(text).unwrap_err().to_string().contains("any machine"), "{text}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let with = |name: &str, value: &str| format!(r#"{{"measurements":{{"{name}":{{"expected":"{value}"}}}}}}"#);
        for (text, why) in [
            (with("4", "12"), "PCR 4: expected 64 hex digits"),
            (with("4", &"+1".repeat(32)), "hex digits"),
            (with("4", &"1234".repeat(16)), "PCR 4 has the placeholder"),
            (with("x", ZERO), "\"x\" is no PCR"),
            (with("32", ZERO), "\"32\" is no PCR"),
            (format!(r#"{{"measurements":{{"4":"{ZERO}","04":"{ZERO}"}}}}"#), "twice"),
            ("{}".into(), "measurements"),
        ] {
            let error = Policy::from_json(&text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn mismatches_name_the_register_and_a_missing_one_too() {
        let policy = Policy::from_json(&old_default()).unwrap();
        let values = BTreeMap::from([(8, vec![0; 32]), (12, vec![1; 32]), (15, vec![0; 32]), (4, vec![0; 48])]);
        let found: Vec<_> = policy.mismatches(&values).map(|(index, _, got)| (index, got.is_some())).collect();
        assert_eq!(found, [(4, true), (11, false), (12, true)]);
    }

    #[test]
    fn only_an_enforced_zero_in_pcr_15_demands_a_fresh_machine() {
        let value = |byte, warn_only| Measurement { expected: [byte; 32], warn_only };
        let policy = |pcr_15| Policy::new(BTreeMap::from([(4, value(7, false)), (15, pcr_15)])).unwrap();
        assert!(policy(value(0, false)).demands_fresh());
        assert!(!policy(value(0, true)).demands_fresh());
        assert!(!policy(value(1, false)).demands_fresh());
        assert!(!Policy::new(BTreeMap::from([(4, value(7, false))])).unwrap().demands_fresh());
    }

    #[test]
    fn hostile_texts_are_refused_without_a_panic() {
        for text in mutations(old_default().as_bytes(), 3000) {
            let _ = Policy::from_json(&String::from_utf8_lossy(&text));
        }
    }
}
