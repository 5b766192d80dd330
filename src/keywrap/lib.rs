//! The master secret, wrapped with a key that an external key management service (KMS) keeps.
//!
//! The key-encryption key never leaves the service. [`Wrapped`] is an envelope: a random key of 32 bytes encrypts the master secret
//! by AES-256-GCM, and the service wraps that key. So every service wraps the same short value, and the secret is bound to each
//! service in the same way. A person who has the file and may use the key in the service can read the master secret; the file
//! without the service is useless.
//!
//! All keys of a cluster are still derived from the master secret. A cluster can therefore move from one service to another, or
//! back to none, without a change to any disk. The key service needs the KMS only when it starts, not for each key.
//!
//! Each service has a file and an entry in [`ALL`].

mod answer;
mod aws_credentials;
pub mod aws_kms;
mod azure_credentials;
pub mod azure_kms;
mod envelope;
mod error;
pub mod gcp_credentials;
pub mod gcp_kms;
mod https;
pub mod kmip;
mod named;
pub mod oauth;
mod patience;
mod service;
pub mod store;
mod ttlv;
mod uri;
mod variable;
mod vault;

pub use envelope::{MAX_LEN, Wrapped, is_wrapped};
pub use error::Error;
pub use service::KeyEncryptionKey;
pub use uri::Author;

use base::master_secret::MasterSecret;

use service::KmsKind;

/// The beginning of the key URIs.
const SCHEME: &str = "kms://";
/// All services. To add one, write its file beside `vault.rs`, and add its constant here and its chapter to `docs/kms.md`.
const ALL: &[KmsKind] = &[
    vault::SERVICE,
    aws_kms::SERVICE,
    azure_kms::SERVICE,
    gcp_kms::SERVICE,
    kmip::SERVICE,
];

/// Returns the wrapped master secret in this content of a file. If the content is the URI of a store, reads the wrapped secret from
/// there. Returns `None` if it is neither; the content may then be a plain master secret. `author` wrote the content.
pub fn find(content: &[u8], author: Author) -> Option<Result<Wrapped, Error>> {
    match store::uri(content) {
        Some(uri) => Some(store::read(uri, author).and_then(|file| Wrapped::parse(&file))),
        None => is_wrapped(content).then(|| Wrapped::parse(content)),
    }
}

/// Returns the master secret that [`find`] finds, unwrapped by the service that the file names. Credentials are sent to that
/// service only if the operator has named its address, or has given its whole key URI, `kms`.
pub fn unwrapped(
    content: &[u8],
    author: Author,
    kms: Option<&str>,
) -> Option<Result<MasterSecret, Error>> {
    let unwrap = |wrapped: Wrapped| {
        let author = if kms == Some(wrapped.kms()) {
            Author::Operator
        } else {
            Author::File
        };
        wrapped.unwrap(&*opened(wrapped.kms(), author)?)
    };
    find(content, author).map(|found| found.and_then(unwrap))
}

/// Makes a client of the key that this URI of the operator names, e.g. `kms://vault?address=https://vault:8200&keyName=firstlight`. The
/// URI contains no credentials: each service's file says where they come from. Sends no request.
pub fn open(uri: &str) -> Result<Box<dyn KeyEncryptionKey>, Error> {
    opened(uri, Author::Operator)
}

fn opened(uri: &str, author: Author) -> Result<Box<dyn KeyEncryptionKey>, Error> {
    let (name, query) = uri::parse(uri, SCHEME, author)?;
    let service = ALL.iter().find(|service| service.name == name);
    let service = service.ok_or_else(|| {
        Error::Uri(format!(
            "the service {name:?} is unknown: expected one of {}",
            forms()
        ))
    })?;
    (service.open)(query)
}

/// Returns the TCP port of the service that this URI names.
pub fn port(uri: &str) -> Result<u16, Error> {
    let (name, mut query) = uri::parse(uri, SCHEME, Author::Operator)?;
    let address = query.take("address").or_else(|| query.take("endpoint"));
    let address = address.unwrap_or_default();
    let authority = address.rsplit("://").next().unwrap_or_default();
    let authority = authority.split('/').next().unwrap_or_default();
    // the last colon of an IPv6 address without a port is in brackets
    let port = authority
        .rsplit_once(':')
        .and_then(|(_, port)| port.parse().ok());
    Ok(port.unwrap_or(match name {
        "kmip" => kmip::PORT,
        _ => 443,
    }))
}

/// Returns the environment variables by which the operator names the server of this URI (one of them is enough), and their value.
/// `None` if no variable is needed.
pub fn naming(uri: &str) -> Result<Option<(&'static [&'static str], String)>, Error> {
    let (name, mut query) = uri::parse(uri, SCHEME, Author::Operator)?;
    Ok(match name {
        "vault" => query.take("address").map(|url| (&vault::ADDRESS[..], url)),
        "aws-kms" => query
            .take("endpoint")
            .map(|url| (&aws_kms::ENDPOINT[..], url)),
        _ => None,
    })
}

/// Returns the forms of key URIs, for help texts.
pub fn forms() -> String {
    let form = |service: &KmsKind| format!("{SCHEME}{}?{}", service.name, service.parameters);
    ALL.iter().map(form).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uri_says_at_which_port_its_service_is() {
        for (uri, expected) in [
            ("kms://vault?address=https://vault:8200&keyName=a", 8200),
            ("kms://vault?address=https://[fd00::1]/v1&keyName=a", 443),
            ("kms://aws-kms?keyName=alias/a&region=eu-central-1", 443),
            ("kms://aws-kms?keyName=a&endpoint=https://127.0.0.1:99", 99),
            ("kms://kmip?address=hsm.example&keyId=1", 5696),
            ("kms://kmip?address=hsm.example:5697&keyId=1", 5697),
        ] {
            assert_eq!(port(uri), Ok(expected), "{uri}");
        }
    }

    #[test]
    fn an_unknown_service_is_refused_with_the_known_ones() {
        let error = open("kms://valut?keyName=a").err().unwrap().to_string();
        assert!(
            error.contains("\"valut\" is unknown") && error.contains("kms://vault?address="),
            "{error}"
        );
    }
}
