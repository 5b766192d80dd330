//! The text form of policies: each register on a line, registers in the order of their numbers.

use std::collections::BTreeMap;

use base::text::hex;
use serde_json::{Map, Value, json};
use verifier::{Measurement, Policy};

/// The fields that say for which machines the policy is. They come first, in this order.
pub const MACHINES: [&str; 8] = [
    "variant",
    "name",
    "measurements",
    "initramfs",
    "acpiTables",
    "alsoAccepted",
    "attestationKeys",
    "endorsementRoots",
];
/// The fields that follow. Other fields follow in alphabetical order.
const NEXT: [&str; 3] = ["require", "requireConfinedAcpi", "exceptions"];
/// Maximum columns of an object or a list on one line: the value of a TDX machine's register fits.
const WIDTH: usize = 150;

/// Returns the JSON of a policy for people, without a line break at its end.
pub fn text(policy: &Policy) -> String {
    let mut text = String::new();
    write(&mut text, &value(policy), 0);
    text
}

/// Returns the JSON of a policy.
pub fn value(policy: &Policy) -> Value {
    let mut all = Map::new();
    let mut add = |name: &str, value: Value| all.insert(name.to_owned(), value);
    if let Some(variant) = policy.variant() {
        add("variant", variant.into());
    }
    let images = policy.images().iter().map(|image| {
        let mut members = json!({"measurements": registers(image.measurements())});
        if !image.name().is_empty() {
            members["name"] = image.name().into();
        }
        if !image.initramfs().is_empty() {
            members["initramfs"] = registers(image.initramfs());
        }
        if image.has_confined_kernel() {
            members["acpiTables"] = "confined".into();
        }
        members
    });
    let mut images: Vec<Value> = images.collect();
    let first = images.remove(0);
    if !images.is_empty() {
        add("alsoAccepted", images.into());
    }
    let keys: Vec<_> = policy.keys().iter().map(ToString::to_string).collect();
    if !keys.is_empty() {
        add("attestationKeys", keys.into());
    }
    if !policy.endorsement_roots().is_empty() {
        add("endorsementRoots", policy.endorsement_roots().into());
    }
    if policy.requires_strong() {
        add("require", "strong".into());
    }
    if policy.requires_confined_acpi() {
        add("requireConfinedAcpi", true.into());
    }
    let exceptions: Vec<_> = policy
        .exceptions()
        .iter()
        .map(ToString::to_string)
        .collect();
    if !exceptions.is_empty() {
        add("exceptions", exceptions.into());
    }
    if let Some(required) = policy.secure_boot() {
        add("secureBoot", json!(required));
    }
    if !policy.tpm().is_empty() {
        add("tpm", json!(policy.tpm()));
    }
    if *policy.tdx() != Default::default() {
        add("tdx", json!(policy.tdx()));
    }
    if *policy.cloud() != Default::default() {
        add("cloud", json!(policy.cloud()));
    }
    // Constellation's fields are in the same object as its measurements
    for members in [first, json!(policy.old_tdx()), json!(policy.snp())] {
        if let Value::Object(members) = members {
            all.extend(members);
        }
    }
    all.into()
}

/// Returns the JSON of registers.
pub fn registers(registers: &BTreeMap<u32, Measurement>) -> Value {
    let one = |(index, it): (&u32, &Measurement)| {
        let expected = hex(&it.expected);
        (
            index.to_string(),
            json!({"expected": expected, "warnOnly": it.warn_only}),
        )
    };
    registers.iter().map(one).collect()
}

/// Returns the fields of an object in the order in which they are written.
pub fn in_order(object: &Map<String, Value>) -> Vec<(&String, &Value)> {
    let mut all: Vec<_> = object.iter().collect();
    all.sort_by_key(|(name, _)| {
        let rank = MACHINES.iter().chain(&NEXT).position(|it| it == name);
        let number: u32 = name.parse().unwrap_or(u32::MAX);
        (rank.unwrap_or(usize::MAX), number, *name)
    });
    all
}

fn write(text: &mut String, value: &Value, depth: usize) {
    let is_simple = |value: &Value| !value.is_object() && !value.is_array();
    // a quoted name has the same form as in JSON
    let (open, close, entries): (_, _, Vec<(String, &Value)>) = match value {
        Value::Object(object) => {
            let named = |(name, value)| (format!("{}: ", json!(name)), value);
            let entries = in_order(object).into_iter().map(named);
            ('{', '}', entries.collect())
        }
        Value::Array(list) => {
            let entries = list.iter().map(|value| (String::new(), value));
            ('[', ']', entries.collect())
        }
        simple => return text.push_str(&simple.to_string()),
    };
    if entries.iter().all(|(_, value)| is_simple(value)) {
        let line: Vec<_> = entries
            .iter()
            .map(|(name, it)| format!("{name}{it}"))
            .collect();
        let line = line.join(", ");
        if line.len() <= WIDTH {
            return text.push_str(&format!("{open}{line}{close}"));
        }
    }
    text.push(open);
    for (at, (name, value)) in entries.iter().enumerate() {
        let end = if at == 0 { "" } else { "," };
        text.push_str(&format!("{end}\n{:1$}{name}", "", 2 * depth + 2));
        write(text, value, depth + 1);
    }
    text.push_str(&format!("\n{:1$}{close}", "", 2 * depth));
}
