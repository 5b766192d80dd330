//! Parses the JSON of the clouds' APIs and metadata services.

use base::machines::Error;
use cloud::http::excerpt;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// Parses the JSON of an answer. An error shows the beginning of the answer, so a caller must not pass one that begins with a secret.
pub fn parsed<T: DeserializeOwned>(
    request: &str,
    expected: &'static str,
    body: &[u8],
) -> Result<T, Error> {
    serde_json::from_slice(body).map_err(|error| {
        let error = excerpt(error.to_string().as_bytes());
        nonsense(request, expected, format!("{:?} ({error})", excerpt(body)))
    })
}

/// Returns the error for an answer that is not the expected one.
pub fn nonsense(request: &str, expected: &'static str, got: String) -> Error {
    Error::Nonsense {
        request: request.to_owned(),
        expected,
        got,
    }
}

/// Reads `null` as an absent value: some APIs write it in place of an empty object or list.
pub fn nullable<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    value: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(value)?.unwrap_or_default())
}

/// The entries of a list. One that cannot be read does not make the others unreadable.
pub struct Entries<T>(pub Vec<Result<T, Unread>>);

/// An entry that cannot be read.
pub struct Unread {
    /// Its name, else its ID, else its beginning.
    name: String,
    /// Its ID, if it has one.
    pub id: Option<String>,
    why: String,
}

/// What happens to an entry that cannot be read.
#[derive(Clone, Copy)]
pub enum Lost {
    /// It is left out with a warning.
    LeftOut,
    /// The list is refused: the caller concludes something from an entry that is missing.
    Refused,
}

impl<T> Default for Entries<T> {
    fn default() -> Entries<T> {
        Entries(vec![])
    }
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Entries<T> {
    fn deserialize<D: Deserializer<'de>>(list: D) -> Result<Entries<T>, D::Error> {
        let values = Vec::<Value>::deserialize(list)?;
        let read = |value: Value| {
            T::deserialize(&value).map_err(|error| {
                let text = |field: &str| value[field].as_str().map(str::to_owned);
                let id = text("id");
                Unread {
                    name: text("name")
                        .or(id.clone())
                        .unwrap_or_else(|| value.to_string()),
                    id,
                    why: error.to_string(),
                }
            })
        };
        Ok(Entries(values.into_iter().map(read).collect()))
    }
}

impl<T> Entries<T> {
    /// Returns the entries of the answer to a request.
    pub fn read(self, request: &str, lost: Lost) -> Result<Vec<T>, Error> {
        let mut entries = vec![];
        for entry in self.0 {
            match (entry, lost) {
                (Ok(entry), _) => entries.push(entry),
                (Err(unread), Lost::LeftOut) => log::warn!("metadata: ignoring {unread}"),
                (Err(unread), Lost::Refused) => {
                    return Err(Error::Nonsense {
                        request: request.to_owned(),
                        expected: "a list whose entries can be read",
                        got: unread.to_string(),
                    });
                }
            }
        }
        Ok(entries)
    }
}

impl std::fmt::Display for Unread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [name, why] = [&self.name, &self.why].map(|text| excerpt(text.as_bytes()));
        write!(f, "{name:?}, which cannot be read: {why}")
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns the list with each member of the entry at this JSON pointer missing, null, and of other types.
    pub fn with_wrong_fields(list: &str, entry: &str) -> Vec<String> {
        let list: Value = serde_json::from_str(list).unwrap();
        let mut paths = vec![];
        collect(list.pointer(entry).unwrap(), entry.to_owned(), &mut paths);
        let others = [
            "null",
            "7",
            "[]",
            "{}",
            "true",
            r#""x""#,
            r#"[null]"#,
            r#"{"a":null}"#,
        ];
        let mut all = vec![];
        for path in paths {
            let (parent, name) = path.rsplit_once('/').unwrap();
            for other in others {
                let mut changed = list.clone();
                *changed.pointer_mut(&path).unwrap() = serde_json::from_str(other).unwrap();
                all.push(changed.to_string());
            }
            let mut changed = list.clone();
            if let Some(parent) = changed.pointer_mut(parent).unwrap().as_object_mut() {
                parent.remove(name).unwrap();
                all.push(changed.to_string());
            }
        }
        assert!(all.len() > 20);
        all
    }

    fn collect(value: &Value, path: String, paths: &mut Vec<String>) {
        let below: Vec<(String, &Value)> = match value {
            Value::Object(all) => all.iter().map(|(at, it)| (at.clone(), it)).collect(),
            Value::Array(all) => (all.iter().enumerate())
                .map(|(at, it)| (at.to_string(), it))
                .collect(),
            _ => vec![],
        };
        for (at, value) in below {
            collect(value, format!("{path}/{at}"), paths);
        }
        paths.push(path);
    }
}
