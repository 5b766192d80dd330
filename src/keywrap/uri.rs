//! The URIs of keys and stores: `SCHEME://NAME?parameter=value&..` (RFC 3986).

use std::collections::BTreeMap;

use super::error::Error;

/// Maximum bytes of a URI.
const MAX_LEN: usize = 4096;
/// Parameters in Constellation's URIs that are credentials. They are refused, because a URI is visible: it is an argument, a value
/// of the chart and a line in logs.
const CREDENTIALS: [&str; 4] = [
    "accessKeyID",
    "accessKey",
    "clientSecret",
    "credentialsPath",
];

/// The parameters of a URI. The caller takes each parameter once; [`Query::finish`] refuses the rest as unknown.
#[derive(Debug)]
pub struct Query {
    parameters: BTreeMap<String, String>,
    /// Who wrote the URI.
    pub author: Author,
}

/// Who wrote a URI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Author {
    /// The operator, as an argument of this command or in its configuration.
    Operator,
    /// The unknown author of a file, or the cluster. Such a URI cannot choose the address that gets credentials.
    File,
}

/// Returns the name of the service or store and the parameters; the scheme includes its `://`.
pub fn parse<'a>(uri: &'a str, scheme: &str, author: Author) -> Result<(&'a str, Query), Error> {
    if uri.len() > MAX_LEN {
        let len = uri.len();
        return Err(Error::Uri(format!(
            "it has {len} bytes, expected at most {MAX_LEN}"
        )));
    }
    let rest = uri
        .strip_prefix(scheme)
        .ok_or_else(|| Error::Uri(format!("it does not begin with {scheme}")))?;
    let (name, query) = rest.split_once('?').unwrap_or((rest, ""));
    let mut parameters = BTreeMap::new();
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair
            .split_once('=')
            .ok_or_else(|| Error::Uri("a parameter has no value: expected name=value".into()))?;
        if CREDENTIALS.contains(&name) {
            return Err(Error::Uri(format!(
                "it has {name}: a URI must not contain credentials; docs/kms.md says where to put them"
            )));
        }
        let value = percent_decoded(value)
            .filter(|value| !value.is_empty() && value.chars().all(|c| c.is_ascii_graphic()))
            .ok_or_else(|| Error::Uri(format!("{name} is not a text without spaces")))?;
        if parameters.insert(name.to_owned(), value).is_some() {
            return Err(Error::Uri(format!("{name} is given twice")));
        }
    }
    Ok((name, Query { parameters, author }))
}

impl Query {
    /// Removes and returns a parameter.
    pub fn take(&mut self, name: &str) -> Option<String> {
        self.parameters.remove(name)
    }

    /// Removes and returns a required parameter.
    pub fn need(&mut self, name: &str) -> Result<String, Error> {
        let missing = || Error::Uri(format!("the parameter {name} is missing"));
        self.take(name).ok_or_else(missing)
    }

    /// Like [`Query::path`], for a required parameter.
    pub fn need_path(&mut self, name: &str) -> Result<String, Error> {
        let missing = || Error::Uri(format!("the parameter {name} is missing"));
        self.path(name)?.ok_or_else(missing)
    }

    /// Removes and returns a parameter that becomes a part of a path: letters, digits, `-`, `_`, `.`, and `/`
    /// between them.
    pub fn path(&mut self, name: &str) -> Result<Option<String>, Error> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let segment = |segment: &str| {
            !segment.is_empty()
                && !segment.trim_matches('.').is_empty()
                && segment
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        };
        if value.split('/').all(segment) {
            Ok(Some(value))
        } else {
            Err(Error::Uri(format!(
                "{name} is not a path of letters, digits, hyphens, dots and slashes"
            )))
        }
    }

    /// Refuses the remaining parameters as unknown.
    pub fn finish(self, known: &str) -> Result<(), Error> {
        match self.parameters.into_keys().next() {
            None => Ok(()),
            Some(name) => Err(Error::Uri(format!(
                "the parameter {name:?} is unknown: expected {known}"
            ))),
        }
    }
}

/// Decodes percent-encoding (RFC 3986 §2.1); `None` if it is invalid or the result is not UTF-8.
fn percent_decoded(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    let digit = |byte: u8| char::from(byte).to_digit(16);
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => (digit(bytes.next()?)? * 16 + digit(bytes.next()?)?) as u8,
            other => other,
        });
    }
    String::from_utf8(out).ok()
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    fn error(uri: &str) -> String {
        parse(uri, "kms://", Author::File).unwrap_err().to_string()
    }

    #[test]
    fn parameters_are_decoded_once_and_taken_once() {
        let (name, mut query) = parse(
            "kms://vault?address=https%3A%2F%2Fa:1&keyName=a%2525",
            "kms://",
            Author::File,
        )
        .unwrap();
        assert_eq!(name, "vault");
        assert_eq!(query.need("address").unwrap(), "https://a:1");
        assert_eq!(query.take("keyName").unwrap(), "a%25");
        assert_eq!(query.take("keyName"), None);
        query.finish("").unwrap();
    }

    #[test]
    fn wrong_uris_are_refused_by_what_is_wrong() {
        for (uri, expected) in [
            ("vault?a=b", "does not begin with kms://"),
            ("kms://vault?address", "has no value"),
            ("kms://vault?a=b&a=c", "a is given twice"),
            ("kms://vault?a=%4", "a is not a text"),
            ("kms://vault?a=%0a", "a is not a text"),
            ("kms://vault?a=", "a is not a text"),
            ("kms://aws?accessKey=hush", "must not contain credentials"),
        ] {
            let error = error(uri);
            assert!(
                error.contains(expected) && !error.contains("hush"),
                "{error}"
            );
        }
        let (_, mut query) = parse("kms://vault?keyNmae=a", "kms://", Author::File).unwrap();
        assert!(query.need("keyName").is_err());
        let error = query.finish("address, keyName").unwrap_err().to_string();
        assert!(error.contains("\"keyNmae\" is unknown: expected address, keyName"));
    }

    #[test]
    fn what_becomes_a_path_leads_nowhere_else() {
        for bad in ["..", "a/../b", "a//b", "/a", "a/", "a?b", "a#b", "%", "a/."] {
            let uri = format!("kms://vault?keyName={}", bad.replace('%', "%25"));
            let (_, mut query) = parse(&uri, "kms://", Author::File).unwrap();
            assert!(query.path("keyName").is_err(), "{bad}");
        }
        let (_, mut query) = parse(
            "kms://vault?keyName=team-a/first.light_1",
            "kms://",
            Author::File,
        )
        .unwrap();
        assert!(query.path("keyName").unwrap().is_some());
    }

    #[test]
    fn mutated_uris_never_panic() {
        for bytes in mutations(
            b"kms://vault?address=https%3A%2F%2Fa:1&keyName=a%25b",
            20_000,
        ) {
            let _ = parse(&String::from_utf8_lossy(&bytes), "kms://", Author::File);
        }
    }
}
