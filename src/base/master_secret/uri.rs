//! The URIs of key and storage back ends (RFC 3986 with a query of `name=value` pairs).
//!
//! ```text
//! kms://cluster-kms?key=<base64url>&salt=<base64url>
//! storage://no-store
//! ```
//!
//! Constellation does not percent-encode the base64 padding `=`, which a query allows. Its parser
//! decodes percent signs twice, which corrupts values that contain a percent sign. This module
//! decodes exactly once; base64url contains no percent sign.

use base64::alphabet::URL_SAFE;
use base64::engine::{DecodePaddingMode, Engine, GeneralPurpose, GeneralPurposeConfig};
use zeroize::Zeroizing;

use super::error::{Error, MAX_LEN, NO_STORE};
use crate::crypto::Secret;

const KMS: &str = "kms";
const STORAGE: &str = "storage";
const CLUSTER_KMS: &str = "cluster-kms";
/// Other back ends of Constellation.
const CLOUDS: [&str; 3] = ["aws", "azure", "gcp"];

/// Base64url: written with padding, which Constellation's parser requires; read with and without
/// padding.
const BASE64URL: GeneralPurpose = GeneralPurpose::new(
    &URL_SAFE,
    GeneralPurposeConfig::new()
        .with_encode_padding(true)
        .with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

pub(super) fn write_cluster_kms(key: &[u8], salt: &[u8]) -> Zeroizing<String> {
    let encoded = |bytes: &[u8]| Zeroizing::new(BASE64URL.encode(bytes));
    let (key, salt) = (encoded(key), encoded(salt));
    // allocates the full capacity first: a string that grows leaves copies of the secret in freed
    // memory
    let mut uri = Zeroizing::new(String::with_capacity(
        MAX_LEN.max(key.len() + salt.len() + 64),
    ));
    for part in [KMS, "://", CLUSTER_KMS, "?key=", &key, "&salt=", &salt] {
        uri.push_str(part);
    }
    uri
}

/// Returns the master secret and its salt. Either may be empty.
pub(super) fn parse_kms(uri: &str) -> Result<(Secret, Secret), Error> {
    let (name, query) = split(uri, KMS)?;
    if name != CLUSTER_KMS {
        return Err(not_supported(KMS, name));
    }
    let secret = |name| secret_parameter(query, name);
    Ok((secret("key")?, secret("salt")?))
}

pub(super) fn check_storage(uri: &str) -> Result<(), Error> {
    if uri.is_empty() || uri == NO_STORE {
        return Ok(());
    }
    let (name, _) = split(uri, STORAGE)?;
    Err(not_supported(STORAGE, name))
}

/// Returns the name of the back end and the query.
fn split<'a>(uri: &'a str, scheme: &'static str) -> Result<(&'a str, &'a str), Error> {
    if uri.len() > MAX_LEN {
        return Err(Error::TooLong(uri.len()));
    }
    let rest = uri
        .strip_prefix(scheme)
        .and_then(|rest| rest.strip_prefix("://"))
        .ok_or(Error::Scheme(scheme))?;
    Ok(rest.split_once('?').unwrap_or((rest, "")))
}

fn not_supported(scheme: &'static str, name: &str) -> Error {
    if let Some(cloud) = CLOUDS.iter().find(|cloud| **cloud == name) {
        return Error::Unsupported(scheme, cloud);
    }
    // without the question mark, the name contains the secret
    let harmless = name.len() <= 16 && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'-');
    Error::Unknown(scheme, harmless.then(|| name.to_owned()))
}

/// Returns the value of a parameter. Parameters with other names are ignored, as in Constellation.
fn secret_parameter(query: &str, name: &'static str) -> Result<Secret, Error> {
    let mut values = query
        .split('&')
        .filter_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
    let value = values.next().ok_or(Error::Missing(name))?;
    if values.next().is_some() {
        return Err(Error::Twice(name));
    }
    let text = percent_decoded(value).ok_or(Error::Encoding(name))?;
    BASE64URL
        .decode(text.as_slice())
        .map(Secret::new)
        .map_err(|_| Error::Encoding(name))
}

/// Decodes percent-encoding (RFC 3986 §2.1); `None` for a percent sign without two hexadecimal
/// digits.
fn percent_decoded(text: &str) -> Option<Zeroizing<Vec<u8>>> {
    let mut out = Zeroizing::new(Vec::with_capacity(text.len()));
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'%' => (hex_digit(bytes.next()?)? << 4) | hex_digit(bytes.next()?)?,
            other => other,
        });
    }
    Some(out)
}

fn hex_digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).map(|digit| digit as u8)
}

#[cfg(test)]
mod tests {
    use super::super::MasterSecret;
    use super::*;
    use support::mutation::mutations;

    /// The example of Constellation's documentation: `masterkey` and `somesalt`.
    const EXAMPLE: &str = "kms://cluster-kms?key=bWFzdGVya2V5&salt=c29tZXNhbHQ=";

    fn parse(uri: &str) -> Result<MasterSecret, Error> {
        MasterSecret::from_uris(uri, NO_STORE)
    }

    fn kms(key: &[u8], salt: &[u8]) -> MasterSecret {
        MasterSecret::new(Secret::new(key.to_vec()), Secret::new(salt.to_vec())).unwrap()
    }

    #[test]
    fn writes_what_the_old_system_writes() {
        assert_eq!(
            write_cluster_kms(b"masterkey", b"somesalt").as_str(),
            EXAMPLE
        );
    }

    #[test]
    fn reads_what_the_old_system_writes() {
        assert_eq!(parse(EXAMPLE).unwrap(), kms(b"masterkey", b"somesalt"));
    }

    #[test]
    fn order_padding_and_percent_encoding_of_the_padding_do_not_matter() {
        for uri in [
            "kms://cluster-kms?salt=c29tZXNhbHQ=&key=bWFzdGVya2V5",
            "kms://cluster-kms?key=bWFzdGVya2V5&salt=c29tZXNhbHQ",
            "kms://cluster-kms?key=bWFzdGVya2V5&salt=c29tZXNhbHQ%3D",
            "kms://cluster-kms?key=bWFzdGVya2V5&salt=c29tZXNhbHQ%3d&future=1",
        ] {
            assert_eq!(parse(uri).unwrap(), kms(b"masterkey", b"somesalt"), "{uri}");
        }
    }

    #[test]
    fn percent_signs_are_decoded_once() {
        assert_eq!(
            parse("kms://cluster-kms?key=bWFzdGVya2V5&salt=c29tZXNhbHQ%253D"),
            Err(Error::Encoding("salt"))
        );
    }

    #[test]
    fn every_byte_survives_writing_and_reading() {
        let all: Vec<u8> = (0..=255).collect();
        let kms = kms(&all, &all[128..]);
        assert_eq!(parse(&kms.uri()).unwrap(), kms);
    }

    #[test]
    fn broken_uris_are_refused_for_what_is_wrong_with_them() {
        let cases = [
            ("", Error::Scheme("kms")),
            ("storage://no-store", Error::Scheme("kms")),
            ("kms://aws?region=eu", Error::Unsupported("kms", "aws")),
            ("kms://azure", Error::Unsupported("kms", "azure")),
            ("kms://gcp?x", Error::Unsupported("kms", "gcp")),
            (
                "kms://other?key=a",
                Error::Unknown("kms", Some("other".into())),
            ),
            (
                "kms://key=bWFzdGVya2V5&salt=c29tZXNhbHQ=",
                Error::Unknown("kms", None),
            ),
            ("kms://cluster-kms", Error::Missing("key")),
            ("kms://cluster-kms?key=bWFzdGVya2V5", Error::Missing("salt")),
            ("kms://cluster-kms?key=&salt=c29t", Error::Empty("key")),
            ("kms://cluster-kms?key=c29t&salt=", Error::Empty("salt")),
            (
                "kms://cluster-kms?key=c29t&salt=c29t&key=c29t",
                Error::Twice("key"),
            ),
            (
                "kms://cluster-kms?key=c29+&salt=c29t",
                Error::Encoding("key"),
            ),
            (
                "kms://cluster-kms?key=c29%2&salt=c29t",
                Error::Encoding("key"),
            ),
            (
                "kms://cluster-kms?key=c29%zz&salt=c29t",
                Error::Encoding("key"),
            ),
        ];
        for (uri, expected) in cases {
            assert_eq!(parse(uri), Err(expected), "{uri}");
        }
        assert_eq!(
            parse(&format!("kms://{}", "x".repeat(MAX_LEN))),
            Err(Error::TooLong(MAX_LEN + 6))
        );
    }

    #[test]
    fn storage_is_none_or_refused() {
        assert_eq!(check_storage(NO_STORE), Ok(()));
        assert_eq!(check_storage(""), Ok(()));
        assert_eq!(
            check_storage("storage://aws?bucket=b"),
            Err(Error::Unsupported("storage", "aws"))
        );
        assert_eq!(
            check_storage("storage://disk"),
            Err(Error::Unknown("storage", Some("disk".into())))
        );
        assert_eq!(check_storage("file:///x"), Err(Error::Scheme("storage")));
    }

    #[test]
    fn no_error_repeats_a_secret() {
        for uri in [
            "kms://bWFzdGVya2V5",
            "kms://cluster-kms?key=bWFzdGVya2V5!&salt=c29t",
            "bWFzdGVya2V5",
        ] {
            let error = parse(uri).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("bWFz"), "{error}");
        }
    }

    #[test]
    fn mutated_uris_give_a_key_or_an_error() {
        let mut good = 0;
        for bytes in mutations(EXAMPLE.as_bytes(), 20_000) {
            let text = String::from_utf8_lossy(&bytes);
            if let Ok(kms) = parse(&text) {
                good += 1;
                assert_eq!(parse(&kms.uri()).unwrap(), kms);
            }
            let _ = check_storage(&text);
        }
        assert!((100..20_000).contains(&good), "{good}");
    }
}
