//! Reads fields of JSON objects that may be absent.

use serde_json::Value;

/// Returns a text; empty if there is none.
pub fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    let found = object.pointer(pointer).and_then(Value::as_str);
    found.unwrap_or("")
}

/// Returns the elements of a list; none if there is no list.
pub fn list<'a>(object: &'a Value, pointer: &str) -> &'a [Value] {
    let found = object.pointer(pointer).and_then(Value::as_array);
    found.map_or(&[], Vec::as_slice)
}
