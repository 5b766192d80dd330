//! Stores for the file of a wrapped master secret, in place of a disk: a bucket or a container of a cloud.
//!
//! ```text
//! storage://NAME?parameter=value&..
//! ```
//!
//! A file is written once and never replaced: the store itself refuses a second one (a conditional request). Only a wrapped master
//! secret goes there. The credentials are those of the KMS of the same cloud.
//!
//! The URI for readers contains the file's digest. The reason: the file names the KMS that unwraps it. Without the digest, an
//! attacker who can write to the store could put another file there, and so choose the keys of all future disks.
//!
//! Each store has a file and an entry in [`ALL`].

mod aws;
mod azure;
mod gcp;
mod kind;

use cloud_api::aws::sigv4::sha256;

use super::envelope::{MAX_LEN, is_wrapped};
use super::error::Error;
use super::uri::{self, Author};
use kind::{FileStore, StoreKind};

/// The beginning of the URIs.
const SCHEME: &str = "storage://";
/// The parameter with the SHA-256 of the file, in hexadecimal digits.
const DIGEST: &str = "sha256";

/// All stores. To add one, write its file beside `aws.rs`, and add its constant here and its part to `docs/kms.md`.
const ALL: &[StoreKind] = &[aws::STORE, azure::STORE, gcp::STORE];

/// Returns the URI, if this name or content of a file is the URI of a file in a store.
pub fn uri(text: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(text).ok()?.trim();
    text.starts_with(SCHEME).then_some(text)
}

/// Returns whether `uri`, which has a digest, names the file at `place`, which is a URI without a digest.
pub fn is_at(uri: &str, place: &str) -> bool {
    uri.strip_prefix(place)
        .is_some_and(|rest| rest.starts_with(&format!("&{DIGEST}=")))
}

/// Returns the forms of the URIs, for help texts.
pub fn forms() -> String {
    let form = |kind: &StoreKind| format!("{SCHEME}{}?{}", kind.name, kind.parameters);
    ALL.iter().map(form).collect::<Vec<_>>().join(", ")
}

/// Returns the wrapped master secret in a store, whose digest must be that of the URI. `author` wrote the URI.
pub fn read(uri: &str, author: Author) -> Result<Vec<u8>, Error> {
    let (store, digest) = open(uri, author)?;
    let expected = digest.ok_or_else(|| {
        Error::Uri(format!(
            "the parameter {DIGEST} is missing: `firstlight wrap --out` prints the URI with it"
        ))
    })?;
    let content = store.read()?.body.to_vec();
    match (
        sha256(&content),
        content.len() <= MAX_LEN && is_wrapped(&content),
    ) {
        (got, _) if got != expected => Err(Error::Refused(format!(
            "the file has the digest {got}, expected {expected}: it was replaced; check who may write to this store"
        ))),
        (_, true) => Ok(content),
        (_, false) => Err(Error::Format(format!(
            "the {} bytes at {uri}",
            content.len()
        ))),
    }
}

/// Writes a wrapped master secret to a place in a store that has no file yet, and reads it back. Returns the URI for readers, which
/// has the digest.
pub fn write_once(uri: &str, content: &[u8]) -> Result<String, Error> {
    if !is_wrapped(content) {
        return Err(Error::Refused(
            "only a wrapped master secret may be written to a store: every reader of the store could read a plain one".into(),
        ));
    }
    let (store, None) = open(uri, Author::Operator)? else {
        return Err(Error::Uri(format!(
            "remove the parameter {DIGEST}: it is only for an existing file"
        )));
    };
    let is_new = match store.create(content) {
        Ok(()) => true,
        Err(Error::Exists) => false,
        Err(error) => return Err(error),
    };
    // the request was sent again, and the file of the first one is there
    match (store.read()?.body.as_slice() == content, is_new) {
        (true, _) => Ok(format!("{uri}&{DIGEST}={}", sha256(content))),
        (false, false) => Err(Error::Exists),
        (false, true) => Err(Error::Answer(
            "the file that was read back is not the one that was written: check who else can write to this store".into(),
        )),
    }
}

/// Returns whether this is the URI of a file in a store, or of a place for a file.
pub fn check(uri: &str) -> Result<(), Error> {
    open(uri, Author::Operator).map(|_| ())
}

/// Returns a client of the store, and the digest if the URI has one.
fn open(uri: &str, author: Author) -> Result<(Box<dyn FileStore>, Option<String>), Error> {
    let (name, mut query) = uri::parse(uri, SCHEME, author)?;
    let digest = query.take(DIGEST);
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    if digest
        .as_ref()
        .is_some_and(|digest| digest.len() != 64 || !digest.bytes().all(is_digit))
    {
        return Err(Error::Uri(format!("{DIGEST} is not 64 hexadecimal digits")));
    }
    let kind = ALL.iter().find(|kind| kind.name == name);
    let kind = kind.ok_or_else(|| {
        Error::Uri(format!(
            "the store {name:?} is unknown: expected one of {}",
            forms()
        ))
    })?;
    Ok(((kind.open)(query)?, digest))
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    #[test]
    fn uris_of_no_store_and_plain_secrets_are_refused() {
        let place = "storage://aws?bucket=a";
        assert!(uri(b"storage://aws?bucket=a\n") == Some(place) && uri(b"./storage").is_none());
        assert!(is_at("storage://aws?bucket=a&sha256=00", place) && !is_at(place, place));
        for (uri, expected) in [
            ("storage://ftp?bucket=a", "the store \"ftp\" is unknown"),
            (
                "storage://aws?bucket=abc",
                "the parameter region is missing",
            ),
            (
                "storage://aws?bucket=abc&region=b&key=../c",
                "key is not a path",
            ),
            (
                "storage://aws?bucket=A&region=b&key=c",
                "bucket=A is not the name of a bucket",
            ),
            (
                "storage://aws?bucket=abc&region=b&key=c&accessKey=d",
                "must not contain credentials",
            ),
            (
                "storage://azure?account=a-b&container=c&name=d",
                "account=a-b is not",
            ),
            (
                "storage://azure?account=ab&container=c&name=d&endpoint=https://evil.example",
                "the program sends its token only",
            ),
            (
                "storage://gcp?bucket=abc&name=b&endpoint=https://evil.example",
                "the program sends its token only",
            ),
            (
                "storage://aws?bucket=abc&region=b&key=c",
                "the parameter sha256 is missing",
            ),
            (
                "storage://aws?bucket=abc&region=b&key=c&endpoint=https://s3.b.amazonaws.com.evil.example",
                "set AWS_ENDPOINT_URL_S3=https://s3.b.amazonaws.com.evil.example",
            ),
            (
                "storage://aws?bucket=abc&region=b&key=c&sha256=0",
                "sha256 is not 64",
            ),
        ] {
            let error = read(uri, Author::File).unwrap_err().to_string();
            assert!(error.contains(expected), "{uri}: {error}");
        }
        let uri = "storage://azure?account=ab&container=c-d&name=e/f&caFile=%2Fnone";
        for uri in mutations(uri.as_bytes(), 20_000) {
            let _ = check(&String::from_utf8_lossy(&uri));
        }
        let error =
            write_once("storage://aws?bucket=abc&region=b&key=c", b"{\"key\":\"\"}").unwrap_err();
        assert!(error.to_string().contains("only a wrapped master secret"));
    }
}
