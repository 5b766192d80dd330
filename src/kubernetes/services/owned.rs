//! Extracts the fields that a manager applied to an object. The API server records them in
//! `metadata.managedFields` as a trie of field names (Kubernetes' `FieldsV1`,
//! structured-merge-diff's fieldpath).
//!
//! ```text
//! f:NAME      a field                     v:VALUE   an element of a set
//! k:{KEYS}    the element with these keys i:NUMBER  the element at this index      .  the element itself
//! ```

use serde_json::{Map, Value, json};

/// The maximum depth of nesting. No object nests deeper.
const MAX_DEPTH: usize = 64;

/// Returns the object with the fields that `manager` applied; `None` if it applied none.
pub fn owned(object: &Value, manager: &str) -> Option<Value> {
    let entries = object.pointer("/metadata/managedFields")?.as_array()?;
    let fields = entries
        .iter()
        .find(|entry| {
            entry["manager"] == manager
                && entry["operation"] == "Apply"
                && entry.get("subresource").is_none()
        })
        .and_then(|entry| entry.get("fieldsV1")?.as_object())?;
    let Value::Object(mut out) = project(object, fields, MAX_DEPTH) else {
        return None;
    };
    // These fields identify the object, and no manager owns them.
    for field in ["apiVersion", "kind"] {
        out.insert(field.into(), object.get(field)?.clone());
    }
    let metadata = out
        .entry("metadata")
        .or_insert_with(|| json!({}))
        .as_object_mut()?;
    for field in ["name", "namespace"] {
        if let Some(value) = object["metadata"].get(field) {
            metadata.insert(field.into(), value.clone());
        }
    }
    Some(Value::Object(out))
}

fn project(value: &Value, fields: &Map<String, Value>, depth: usize) -> Value {
    // A leaf, or a map or list that is owned as a whole.
    if depth == 0 || fields.is_empty() {
        return value.clone();
    }
    let below = |value: &Value, fields: &Value| {
        project(value, fields.as_object().unwrap_or(&Map::new()), depth - 1)
    };
    match value {
        Value::Object(map) => {
            let mut out = Map::new();
            for (path, fields) in fields {
                if let Some((name, value)) = path
                    .strip_prefix("f:")
                    .and_then(|name| Some((name, map.get(name)?)))
                {
                    out.insert(name.into(), below(value, fields));
                }
            }
            Value::Object(out)
        }
        Value::Array(items) => {
            let mut out = Vec::new();
            for (place, item) in items.iter().enumerate() {
                if let Some((_, fields)) = fields.iter().find(|(path, _)| is_of(path, place, item))
                {
                    out.push(below(item, fields));
                }
            }
            Value::Array(out)
        }
        value => value.clone(),
    }
}

/// Returns whether the last part of a path names this element of a list.
fn is_of(path: &str, place: usize, item: &Value) -> bool {
    match path.split_once(':') {
        Some(("k", keys)) => match serde_json::from_str::<Map<String, Value>>(keys) {
            Ok(keys) => keys.iter().all(|(key, value)| item.get(key) == Some(value)),
            Err(_) => false,
        },
        Some(("v", value)) => {
            serde_json::from_str::<Value>(value).is_ok_and(|value| value == *item)
        }
        Some(("i", number)) => number.parse() == Ok(place),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    fn object() -> Value {
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": "a", "namespace": "b", "uid": "1", "labels": {"ours": "1", "theirs": "2"}, "finalizers": ["x", "y"],
                "managedFields": [
                    {"manager": "other", "operation": "Apply", "fieldsV1": {"f:metadata": {"f:labels": {"f:theirs": {}}}}},
                    {"manager": "us", "operation": "Update", "fieldsV1": {}},
                    {"manager": "us", "operation": "Apply", "subresource": "status", "fieldsV1": {}},
                    {"manager": "us", "operation": "Apply", "fieldsV1": {
                        "f:metadata": {"f:labels": {"f:ours": {}}, "f:finalizers": {"v:\"y\"": {}}},
                        "f:spec": {
                            "f:ports": {"k:{\"port\":1,\"protocol\":\"TCP\"}": {".": {}, "f:port": {}}},
                            "f:atomic": {}, "f:empty": {".": {}}, "f:list": {"i:1": {}}, "f:gone": {},
                        },
                    }},
                ],
            },
            "spec": {
                "ports": [{"port": 1, "protocol": "UDP"}, {"port": 1, "protocol": "TCP", "name": "theirs"}],
                "atomic": {"a": [1, {"b": 2}]}, "empty": {"theirs": 1}, "list": [1, 2, 3], "default": true,
            },
        })
    }

    #[test]
    fn applied_fields_are_found_without_those_of_other_managers() {
        let expected = json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "a", "namespace": "b", "labels": {"ours": "1"}, "finalizers": ["y"]},
            "spec": {"ports": [{"port": 1}], "atomic": {"a": [1, {"b": 2}]}, "empty": {}, "list": [2]},
        });
        assert_eq!(owned(&object(), "us"), Some(expected));
        assert_eq!(owned(&object(), "nobody"), None);
        assert_eq!(owned(&json!({"metadata": {}}), "us"), None);
    }

    #[test]
    fn no_mutation_of_an_object_makes_it_panic() {
        for bytes in mutations(object().to_string().as_bytes(), 20_000) {
            if let Ok(object) = serde_json::from_slice(&bytes) {
                owned(&object, "us");
            }
        }
    }
}
