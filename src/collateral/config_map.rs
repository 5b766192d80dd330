//! A ConfigMap as a store, which the join services of all control planes share.
//!
//! ```text
//! binaryData:          data:
//!   vcek-milan.crl       fetched: {"vcek-milan.crl":1795406400,..}
//! ```

use std::collections::BTreeMap;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kubernetes::client::{CONFIG_MAPS, Client, Collection, Object};
use serde_json::{Value, json};

use crate::item::{Item, MAX_COLLATERAL, chip_of};
use crate::store::{Store, Stored};

/// Maximum size of all values together, in bytes of base64: an object has at most 1 MiB, and names and times need a part of it.
const MAX_LEN: usize = 768 << 10;
/// Maximum number of values.
const MAX_VALUES: usize = 512;
/// Maximum number of TCBs of one chip: a stranger who knows a chip can name many.
const MAX_TCBS: usize = 4;
/// Time limit of a call: a slow API server must not delay a validation for long.
const TIMEOUT: Duration = Duration::from_secs(5);
/// The key under which the ConfigMap has the times of the fetches, in seconds since 1970.
const FETCHED: &str = "fetched";

/// A store in a ConfigMap, which is created when the first value is written.
pub struct ConfigMapStore {
    client: Client,
    collection: Collection,
    object: Object,
    name: String,
}

impl ConfigMapStore {
    /// Uses the ConfigMap with this name.
    pub fn new(client: &Client, namespace: &str, name: &str) -> ConfigMapStore {
        let collection = CONFIG_MAPS.in_namespace(namespace);
        ConfigMapStore {
            client: client.within(TIMEOUT),
            object: collection.named(name),
            collection,
            name: name.into(),
        }
    }
}

impl Store for ConfigMapStore {
    fn load(&self, item: &Item) -> Option<Stored> {
        let found = self.client.find(&self.object);
        let found = found.map_err(|error| log::warn!("cannot read stored certificates: {error}"));
        stored(&found.ok()??, &item.name())
    }

    fn save(&self, item: &Item, bytes: &[u8]) {
        let empty = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": self.name, "labels": {"app.kubernetes.io/part-of": "firstlight"}},
        });
        let saved = self
            .client
            .create_if_absent(&self.collection, &empty)
            .and_then(|_| {
                self.client.modify(&self.object, |object| {
                    add(object, &item.name(), bytes, now());
                    true
                })
            });
        if let Err(error) = saved {
            log::warn!("cannot store {item}: {error}");
        }
    }
}

fn now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Returns a value of the object. Other fields of the object are not checked.
pub fn stored(object: &Value, name: &str) -> Option<Stored> {
    let text = object.get("binaryData")?.get(name)?.as_str()?;
    let bytes = BASE64_STANDARD.decode(text).ok()?;
    let fetched = times(object).get(name).copied().unwrap_or(0);
    (bytes.len() <= MAX_COLLATERAL).then_some(Stored { bytes, fetched })
}

/// Adds a value. If there are too many, removes the oldest ones, first of all certificates of chips, because strangers can name chips.
pub fn add(object: &mut Value, name: &str, bytes: &[u8], now: u64) {
    let mut times = times(object);
    let values = object.get("binaryData").and_then(Value::as_object);
    let mut values: BTreeMap<String, String> = values
        .into_iter()
        .flatten()
        .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())))
        .collect();
    values.insert(name.to_owned(), BASE64_STANDARD.encode(bytes));
    times.insert(name.to_owned(), now);
    let len = |values: &BTreeMap<String, String>| -> usize {
        values
            .iter()
            .map(|(name, value)| name.len() + value.len())
            .sum()
    };
    let age = |name: &String| times.get(name).copied().unwrap_or(0);
    if let Some(chip) = chip_of(name) {
        let of_chip = values.keys().filter(|other| chip_of(other) == Some(chip));
        let mut of_chip: Vec<_> = of_chip.cloned().collect();
        of_chip.sort_by_key(age);
        let surplus = of_chip.len().saturating_sub(MAX_TCBS);
        for oldest in &of_chip[..surplus] {
            values.remove(oldest);
        }
    }
    while values.len() > MAX_VALUES || len(&values) > MAX_LEN {
        let first = values
            .keys()
            .min_by_key(|name| (chip_of(name).is_none(), age(name)));
        let Some(first) = first.cloned() else {
            break;
        };
        values.remove(&first);
    }
    times.retain(|name, _| values.contains_key(name));
    object["binaryData"] = json!(values);
    object["data"] = json!({FETCHED: json!(times).to_string()});
}

fn times(object: &Value) -> BTreeMap<String, u64> {
    let text = object
        .get("data")
        .and_then(|data| data.get(FETCHED)?.as_str());
    text.and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    #[test]
    fn the_oldest_values_go_when_there_are_too_many() {
        let mut object =
            json!({"metadata": {"name": "x", "resourceVersion": "7"}, "binaryData": {"alien": 5}});
        let value = vec![7; 100 << 10];
        for second in 1..=20 {
            add(&mut object, &format!("tdx-{second}.json"), &value, second);
        }
        // five values of 100 KiB have 683 KiB in base64
        let kept = object["binaryData"].as_object().unwrap();
        let expected: Vec<String> = (16..=20)
            .map(|second| format!("tdx-{second}.json"))
            .collect();
        assert_eq!(kept.keys().cloned().collect::<Vec<_>>(), expected);
        let got = stored(&object, "tdx-20.json").unwrap();
        assert_eq!((got.bytes, got.fetched), (value, 20));
        assert!(stored(&object, "tdx-1.json").is_none() && stored(&object, "alien").is_none());
        assert_eq!(object["metadata"]["resourceVersion"], "7");
    }

    #[test]
    fn certificates_of_chips_remove_nothing_else() {
        let mut object = json!({});
        let shared = ["vcek-milan.crl", "tdx-b0c06f000000-platform.json"];
        for name in shared {
            add(&mut object, name, b"x", 1);
        }
        let name = |chip: u64, tcb: u64| format!("vcek-milan-{chip:0128x}-0.3.0.8.{tcb}.der");
        for tcb in 0..20 {
            add(&mut object, &name(7, tcb), b"x", 50 + tcb);
        }
        let of_chip: Vec<u64> = (0..20)
            .filter(|tcb| stored(&object, &name(7, *tcb)).is_some())
            .collect();
        assert_eq!(of_chip, [16, 17, 18, 19]);
        for chip in 100..700 {
            add(&mut object, &name(chip, 0), b"x", chip);
        }
        assert_eq!(object["binaryData"].as_object().unwrap().len(), MAX_VALUES);
        assert!(stored(&object, &name(699, 0)).is_some());
        assert!(stored(&object, &name(100, 0)).is_none());
        // large certificates
        for chip in 700..1000 {
            add(&mut object, &name(chip, 0), &[7; 6 << 10], chip);
        }
        for name in shared {
            assert!(stored(&object, name).is_some(), "{name}");
        }
        assert!(stored(&object, &name(999, 0)).is_some());
    }

    #[test]
    fn any_object_is_read_and_extended() {
        let mut seed = json!({});
        add(&mut seed, "vcek-milan.crl", b"abc", 5);
        for text in mutations(seed.to_string().as_bytes(), 5000) {
            let Ok(mut object) = serde_json::from_slice::<Value>(&text) else {
                continue;
            };
            let _ = stored(&object, "vcek-milan.crl");
            if object.is_object() {
                add(&mut object, "vcek-genoa.crl", b"def", 6);
                assert_eq!(stored(&object, "vcek-genoa.crl").unwrap().bytes, b"def");
            }
        }
    }
}
