//! The JSON of the commands, against its description in docs/cli.md.

use std::fs;

use serde_json::Value;

/// Returns the example in docs/cli.md below the heading of a command.
fn documented(heading: &str) -> Value {
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/cli.md")).unwrap();
    let (_, below) = page
        .split_once(&format!("\n### {heading}\n"))
        .unwrap_or_else(|| panic!("docs/cli.md has no {heading}"));
    let (_, example) = below.split_once("```json\n").unwrap();
    let (example, _) = example.split_once("```").unwrap();
    serde_json::from_str(example).unwrap()
}

/// Asserts that the output has the fields and types that docs/cli.md shows; a field that can be missing is null.
pub fn assert_documented(heading: &str, output: &str) -> Value {
    let output = serde_json::from_str(output).unwrap_or_else(|error| panic!("{error}: {output}"));
    assert_shape(heading, &documented(heading), &output);
    output
}

fn assert_shape(place: &str, expected: &Value, got: &Value) {
    match (expected, got) {
        (Value::Null, _) | (_, Value::Null) => {}
        (Value::Object(expected), Value::Object(got)) => {
            let names =
                |of: &serde_json::Map<String, Value>| of.keys().cloned().collect::<Vec<_>>();
            assert_eq!(names(expected), names(got), "{place}");
            for (name, expected) in expected {
                assert_shape(&format!("{place}.{name}"), expected, &got[name]);
            }
        }
        (Value::Array(expected), Value::Array(got)) => {
            for (expected, got) in expected
                .iter()
                .take(1)
                .flat_map(|one| got.iter().map(move |got| (one, got)))
            {
                assert_shape(&format!("{place}[]"), expected, got);
            }
        }
        _ => assert_eq!(
            std::mem::discriminant(expected),
            std::mem::discriminant(got),
            "{place}: documented {expected}, got {got}"
        ),
    }
}
