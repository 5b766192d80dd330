//! Converts YAML 1.2 of Kubernetes to JSON values: kubeconfigs, and manifests of several documents.
//!
//! Plain scalars have the types of the core schema (§10.3.2). Further types of YAML 1.1 (`yes`,
//! `0777`) are text or decimal numbers. These features are refused, because Kubernetes' files do
//! not need them, and they make a small text large or ambiguous: aliases, keys that are not
//! scalars, duplicate keys, and tags other than `!!str` and `!!binary`. The value of `!!binary` is
//! the text that its base64 encodes, as for kubectl.

use std::fmt;

use base::text::quoted;
use base64::prelude::{BASE64_STANDARD, Engine};
use saphyr_parser::{Event, Parser, ScalarStyle, Span, Tag};
use serde_json::{Map, Number, Value};
use zeroize::Zeroizing;

/// The maximum length of a text in bytes. A Kubernetes object has at most 1.5 MiB by etcd's limit.
pub const MAX_LEN: usize = 2 << 20;
/// The maximum depth of nesting, equal to that of [`serde_json`].
const MAX_DEPTH: usize = 128;

/// A syntax error and its line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    line: usize,
    problem: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}", self.line, self.problem)
    }
}

impl std::error::Error for Error {}

/// A collection that is not closed yet.
enum Open {
    Sequence(Vec<Value>),
    /// With the key of the next value.
    Mapping(Map<String, Value>, Option<String>),
}

/// Decodes base64 as Go does: line breaks within it have no meaning.
pub fn base64(text: &str) -> Result<Zeroizing<Vec<u8>>, base64::DecodeError> {
    let is_line_break = |c: char| c == '\n' || c == '\r';
    if !text.contains(is_line_break) {
        return BASE64_STANDARD.decode(text).map(Zeroizing::new);
    }
    // The text may be a key. The capacity is sufficient, because a growing text would leave copies
    // behind.
    let mut whole = Zeroizing::new(String::with_capacity(text.len()));
    text.split(is_line_break)
        .for_each(|line| whole.push_str(line));
    BASE64_STANDARD.decode(whole.as_str()).map(Zeroizing::new)
}

/// Parses the documents of a text. Omits empty documents.
pub fn documents(text: &str) -> Result<Vec<Value>, Error> {
    if text.len() > MAX_LEN {
        return Err(Error {
            line: 1,
            problem: format!("{} bytes, expected at most {MAX_LEN}", text.len()),
        });
    }
    let mut documents = Vec::new();
    let mut open: Vec<Open> = Vec::new();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| Error {
            line: error.marker().line(),
            problem: error.info().into(),
        })?;
        let closed = match event {
            Event::Alias(_) => return Err(at(span, "an alias (*), which is not supported")),
            Event::Scalar(text, style, _, tag) => {
                if let Some(Open::Mapping(map, key @ None)) = open.last_mut() {
                    if map.contains_key(text.as_ref()) {
                        return Err(at(
                            span,
                            format!("the key {} occurs twice", quoted(text, 80)),
                        ));
                    }
                    *key = Some(text.into_owned());
                    continue;
                }
                scalar(&text, style, tag.as_deref(), span)?
            }
            Event::SequenceStart(_, tag) | Event::MappingStart(_, tag) if tag.is_some() => {
                return Err(at(span, "a tag, which is not supported"));
            }
            Event::SequenceStart(..) | Event::MappingStart(..)
                if matches!(open.last(), Some(Open::Mapping(_, None))) =>
            {
                return Err(at(span, "a key that is not a scalar"));
            }
            Event::SequenceStart(..) | Event::MappingStart(..) if open.len() == MAX_DEPTH => {
                return Err(at(span, format!("nested deeper than {MAX_DEPTH}")));
            }
            Event::SequenceStart(..) => {
                open.push(Open::Sequence(Vec::new()));
                continue;
            }
            Event::MappingStart(..) => {
                open.push(Open::Mapping(Map::new(), None));
                continue;
            }
            Event::SequenceEnd | Event::MappingEnd => match open.pop() {
                Some(Open::Sequence(items)) => Value::Array(items),
                Some(Open::Mapping(map, _)) => Value::Object(map),
                None => return Err(at(span, "closes a bracket that was not opened")),
            },
            _ => continue,
        };
        match open.last_mut() {
            None if closed.is_null() => {}
            None => documents.push(closed),
            Some(Open::Sequence(items)) => items.push(closed),
            Some(Open::Mapping(map, key)) => {
                let key = key
                    .take()
                    .ok_or_else(|| at(span, "a key that is not a scalar"))?;
                map.insert(key, closed);
            }
        }
    }
    Ok(documents)
}

/// Parses the only document of a text. Fails if there is none or more than one.
pub fn document(text: &str) -> Result<Value, Error> {
    let mut documents = documents(text)?;
    match (documents.pop(), documents.is_empty()) {
        (Some(document), true) => Ok(document),
        (None, _) => Err(Error {
            line: 1,
            problem: "it has no content".into(),
        }),
        _ => Err(Error {
            line: 1,
            problem: "several documents, expected one".into(),
        }),
    }
}

fn at(span: Span, problem: impl Into<String>) -> Error {
    Error {
        line: span.start.line(),
        problem: problem.into(),
    }
}

fn scalar(text: &str, style: ScalarStyle, tag: Option<&Tag>, span: Span) -> Result<Value, Error> {
    match tag {
        None => {}
        Some(tag) if tag.is_yaml_core_schema() && tag.suffix == "str" => return Ok(text.into()),
        Some(tag) if tag.is_yaml_core_schema() && tag.suffix == "binary" => {
            let bytes = base64(text)
                .map_err(|error| at(span, format!("!!binary without base64: {error}")))?;
            let text = str::from_utf8(&bytes)
                .map_err(|_| at(span, "!!binary with bytes that are not UTF-8"))?;
            return Ok(text.into());
        }
        Some(tag) => {
            let problem = format!(
                "the tag {:.40}{:.40}, which is not supported",
                tag.handle, tag.suffix
            );
            return Err(at(span, problem));
        }
    }
    Ok(if style == ScalarStyle::Plain {
        plain(text)
    } else {
        text.into()
    })
}

/// Converts a plain scalar by the core schema (YAML 1.2.2 §10.3.2).
fn plain(text: &str) -> Value {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return Value::Null,
        "true" | "True" | "TRUE" => return true.into(),
        "false" | "False" | "FALSE" => return false.into(),
        _ => {}
    }
    number(text).map_or_else(|| text.into(), Value::Number)
}

fn number(text: &str) -> Option<Number> {
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    // `.inf` and `.nan` remain text, because JSON does not have them.
    let starts_as_number = unsigned
        .strip_prefix('.')
        .unwrap_or(unsigned)
        .starts_with(|c: char| c.is_ascii_digit());
    if !starts_as_number {
        return None;
    }
    if let Some(digits) = text.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16).ok().map(Number::from);
    }
    if let Some(digits) = text.strip_prefix("0o") {
        return u64::from_str_radix(digits, 8).ok().map(Number::from);
    }
    if let Ok(integer) = text.parse::<i64>() {
        return Some(integer.into());
    }
    if let Ok(integer) = text.parse::<u64>() {
        return Some(integer.into());
    }
    // Rust's syntax of a float is the schema's, except for words, which were excluded above.
    text.parse().ok().and_then(Number::from_f64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use support::mutation::mutations;

    const MANIFESTS: &str = r#"
apiVersion: v1
kind: ConfigMap
metadata:
  name: "a"   # a comment
  labels: {k8s-app: a, 'x': y}
data:
  number: "1"
  text: |
    first
      second
  folded: >-
    one
    line
list:
- 1
- -2.5
- true
- ~
- 0x10
- 1.1.1
- nested: [a, b]
  more: {}
---
# nothing
---
kind: Second
"#;

    #[test]
    fn documents_of_block_and_flow_style_become_json() {
        let expected = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": "a", "labels": {"k8s-app": "a", "x": "y"}},
            "data": {"number": "1", "text": "first\n  second\n", "folded": "one line"},
            "list": [1, -2.5, true, null, 16, "1.1.1", {"nested": ["a", "b"], "more": {}}],
        });
        assert_eq!(
            documents(MANIFESTS).unwrap(),
            [expected, json!({"kind": "Second"})]
        );
    }

    #[test]
    fn binary_is_the_text_that_its_base64_encodes() {
        let expected = json!({"a": "hello"});
        for text in [
            "a: !!binary aGVsbG8=",
            "a: !!binary |\n  aGVs\n  bG8=\n",
            "a: !!binary \"aGVs\\r\\nbG8=\"",
        ] {
            assert_eq!(document(text).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn json_is_yaml() {
        let value = json!({"a": [1, "2", null, {"b": "line\nbreak \u{e9} \""}], "c": false});
        assert_eq!(document(&value.to_string()).unwrap(), value);
        assert_eq!(
            document(&serde_json::to_string_pretty(&value).unwrap()).unwrap(),
            value
        );
    }

    #[test]
    fn what_looks_like_a_number_in_yaml_1_1_alone_is_text() {
        assert_eq!(
            document("[yes, 1_000, 12:30, .inf, +, 1e3, v1]").unwrap(),
            json!(["yes", "1_000", "12:30", ".inf", "+", 1000.0, "v1"])
        );
    }

    #[test]
    fn yaml_that_is_ambiguous_or_expands_is_refused() {
        let refused = |text: &str| documents(text).unwrap_err().to_string();
        assert_eq!(
            refused("a: &x 1\nb: *x"),
            "line 2: an alias (*), which is not supported"
        );
        assert_eq!(refused("a: 1\na: 2"), "line 2: the key \"a\" occurs twice");
        assert_eq!(
            refused("a: !!set {}"),
            "line 1: a tag, which is not supported"
        );
        assert_eq!(
            refused("a: !!float 1"),
            "line 1: the tag tag:yaml.org,2002:float, which is not supported"
        );
        assert!(refused("a: !!binary '!'").starts_with("line 1: !!binary without base64: "));
        assert_eq!(
            refused("a: !!binary /w=="),
            "line 1: !!binary with bytes that are not UTF-8"
        );
        assert_eq!(refused("? [a]\n: b"), "line 1: a key that is not a scalar");
        assert_eq!(
            refused(&"- ".repeat(1000)),
            "line 1: nested deeper than 128"
        );
        // Refused by the parser itself.
        assert_eq!(
            refused(&"[".repeat(1000)),
            "line 1: recursion limit exceeded"
        );
        assert!(refused(&" ".repeat(MAX_LEN + 1)).contains("bytes, expected at most"));
        assert!(refused("a: [1").starts_with("line "));
        assert!(document("").is_err() && document("--- 1\n--- 2").is_err());
    }

    #[test]
    fn no_mutation_of_a_text_makes_the_parser_panic_or_hang() {
        for bytes in mutations(MANIFESTS.as_bytes(), 20_000) {
            let _ = documents(&String::from_utf8_lossy(&bytes));
        }
    }
}
