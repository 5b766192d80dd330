//! A key of Google Cloud Key Management Service.
//!
//! ```text
//! kms://gcp-kms?keyName=projects/PROJECT/locations/LOCATION/keyRings/RING/cryptoKeys/KEY[&endpoint=https://HOST[:PORT]][&caFile=FILE]
//! ```
//!
//! [`super::gcp_credentials`] says where the token comes from.
//!
//! API: Cloud KMS API v1, `cryptoKeys`, with the checksums of "Verifying end-to-end data integrity"; for tokens "Using OAuth 2.0 for
//! Server to Server Applications".

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::json;
use zeroize::Zeroizing;

use base::crypto::Secret;

use super::answer::{decoded, parsed};
use super::error::{Error, said};
use super::gcp_credentials::{GcpTokens, is_googles, message_of};
use super::https::{KmsResponse, KmsServer};
use super::patience::patiently;
use super::service::{KeyEncryptionKey, KmsKind};
use super::uri::Query;

/// This service's entry in the table of all services.
pub const SERVICE: KmsKind = KmsKind {
    name: "gcp-kms",
    parameters: PARAMETERS,
    open,
};

const PARAMETERS: &str = "keyName=projects/PROJECT/locations/LOCATION/keyRings/RING/cryptoKeys/KEY[&endpoint=https://HOST[:PORT]][&caFile=FILE]";

/// The host of the API: tokens are sent only to it.
const API: &str = "cloudkms.googleapis.com";
const SCOPE: &str = "https://www.googleapis.com/auth/cloudkms";
/// Additional data of each encryption, so that a ciphertext that another program made with the same key is refused.
const CONTEXT: &[u8] = b"firstlight master secret";

/// The purpose of a key that encrypts symmetrically.
const PURPOSE: &str = "ENCRYPT_DECRYPT";

struct Key {
    server: KmsServer,
    name: String,
    callers: GcpTokens,
}

fn open(mut query: Query) -> Result<Box<dyn KeyEncryptionKey>, Error> {
    let name = query.need("keyName")?;
    let endpoint = query.take("endpoint");
    let ca = query.take("caFile");
    query.finish(PARAMETERS)?;
    if !is_key(&name) {
        return Err(Error::Uri(format!(
            "keyName={name} is not the name of a key: expected projects/PROJECT/locations/LOCATION/keyRings/RING/cryptoKeys/KEY, without a version"
        )));
    }
    let endpoint = endpoint.unwrap_or_else(|| format!("https://{API}"));
    let server = KmsServer::new(&endpoint, ca.as_deref())?;
    if !is_googles(&server, API) {
        return Err(Error::Uri(format!(
            "the endpoint {endpoint:?} is not that of Cloud KMS, and the program sends its token only there: expected https://{API}"
        )));
    }
    let callers = GcpTokens { scope: SCOPE, ca };
    Ok(Box::new(Key {
        server,
        name,
        callers,
    }))
}

/// Returns whether text is the name of a key, which becomes a path.
fn is_key(name: &str) -> bool {
    let is_part = |part: &str| {
        // a project can belong to a domain: example.com:name
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
        (1..=100).contains(&part.len())
            && part.bytes().all(is_allowed)
            && !part.trim_matches('.').is_empty()
    };
    let parts: Vec<_> = name.split('/').collect();
    match &*parts {
        [
            "projects",
            a,
            "locations",
            b,
            "keyRings",
            c,
            "cryptoKeys",
            d,
        ] => [a, b, c, d].iter().all(|part| is_part(part)) && !d.contains(':'),
        _ => false,
    }
}

/// Returns the checksum of the API: CRC32C (RFC 3720 appendix B.4).
pub fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0, |crc, byte| {
        let step = |crc: u32, _| (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
        (0..8).fold(crc ^ u32::from(*byte), step)
    })
}

/// A key, as `get` describes it.
#[derive(Deserialize)]
struct Described {
    #[serde(default)]
    purpose: String,
    primary: Option<Version>,
}

#[derive(Deserialize)]
struct Version {
    #[serde(default)]
    state: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Encrypted {
    ciphertext: String,
    ciphertext_crc32c: Checksum,
    #[serde(default)]
    verified_plaintext_crc32c: bool,
    #[serde(default)]
    verified_additional_authenticated_data_crc32c: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Decrypted {
    plaintext: Zeroizing<String>,
    plaintext_crc32c: Checksum,
}

/// A checksum: a number of 64 bits, which JSON of these APIs has as text.
#[derive(Deserialize)]
#[serde(transparent)]
struct Checksum(String);

impl Checksum {
    fn check(&self, host: &str, operation: &str, data: &[u8]) -> Result<(), Error> {
        if self.0.parse() == Ok(crc32c(data)) {
            Ok(())
        } else {
            Err(damaged(host, operation))
        }
    }
}

fn damaged(host: &str, operation: &str) -> Error {
    Error::Busy(format!(
        "{host}: {operation}: a checksum is wrong, so data were damaged on the way"
    ))
}

/// Checks in the answer of `get` that the key encrypts.
pub fn check_key(host: &str, name: &str, body: &[u8]) -> Result<(), Error> {
    let Described { purpose, primary } = parsed(host, "get", body)?;
    let state = primary.map(|version| version.state);
    let refused = |what: &str, got: &str, next: &str| {
        let got = said(got);
        Err(Error::Refused(format!(
            "{host}: the key {name} {what}{got}: {next}"
        )))
    };
    match (&*purpose, state.as_deref()) {
        (PURPOSE, Some("ENABLED")) => Ok(()),
        (PURPOSE, state) => refused(
            "has no primary version that is enabled",
            state.unwrap_or_default(),
            "enable it, or make a new version the primary one",
        ),
        _ => refused(
            "does not encrypt symmetrically",
            &purpose,
            "expected one of the purpose ENCRYPT_DECRYPT",
        ),
    }
}

/// Parses the answer of `encrypt`: the encrypted key.
pub fn parse_encrypted(host: &str, body: &[u8]) -> Result<Vec<u8>, Error> {
    let encrypted: Encrypted = parsed(host, "encrypt", body)?;
    let ciphertext = decoded(host, "encrypt", &encrypted.ciphertext)?;
    encrypted
        .ciphertext_crc32c
        .check(host, "encrypt", &ciphertext)?;
    let is_verified = encrypted.verified_plaintext_crc32c
        && encrypted.verified_additional_authenticated_data_crc32c;
    if is_verified {
        Ok(ciphertext)
    } else {
        Err(damaged(host, "encrypt"))
    }
}

/// Parses the answer of `decrypt`: the key.
pub fn parse_decrypted(host: &str, body: &[u8]) -> Result<Secret, Error> {
    let decrypted: Decrypted = parsed(host, "decrypt", body)?;
    let key = Secret::new(decoded(host, "decrypt", &decrypted.plaintext)?);
    decrypted
        .plaintext_crc32c
        .check(host, "decrypt", key.expose())?;
    Ok(key)
}

impl KeyEncryptionKey for Key {
    fn prepare(&self, create: bool) -> Result<(), Error> {
        let checked =
            |answer: &KmsResponse| check_key(self.server.host(), &self.name, &answer.body);
        match self.call("get", "", &checked) {
            Err(Error::Missing(_)) if create => {
                let wanted = json!({"purpose": PURPOSE}).to_string();
                self.call("create", &wanted, &checked)
            }
            other => other,
        }
    }

    fn wrap(&self, key: &Secret) -> Result<Vec<u8>, Error> {
        let plaintext = Zeroizing::new(STANDARD.encode(key.expose()));
        let body = json!({
            "plaintext": *plaintext,
            "plaintextCrc32c": crc32c(key.expose()).to_string(),
            "additionalAuthenticatedData": STANDARD.encode(CONTEXT),
            "additionalAuthenticatedDataCrc32c": crc32c(CONTEXT).to_string(),
        });
        let body = Zeroizing::new(body.to_string());
        self.call("encrypt", &body, &|answer| {
            parse_encrypted(self.server.host(), &answer.body)
        })
    }

    fn unwrap(&self, wrapped: &[u8]) -> Result<Secret, Error> {
        let body = json!({
            "ciphertext": STANDARD.encode(wrapped),
            "ciphertextCrc32c": crc32c(wrapped).to_string(),
            "additionalAuthenticatedData": STANDARD.encode(CONTEXT),
            "additionalAuthenticatedDataCrc32c": crc32c(CONTEXT).to_string(),
        });
        self.call("decrypt", &body.to_string(), &|answer| {
            parse_decrypted(self.server.host(), &answer.body)
        })
    }
}

impl Key {
    /// Returns the result of `read` for the successful answer to an operation.
    fn call<T>(
        &self,
        operation: &str,
        body: &str,
        read: &dyn Fn(&KmsResponse) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let caller = self.callers.caller()?;
        let (host, name) = (self.server.host(), &self.name);
        let mut fields = vec![
            ("accept", "application/json"),
            ("authorization", &**caller.authorization),
        ];
        let (method, path) = match (operation, name.rsplit_once('/')) {
            ("get", _) => ("GET", format!("/v1/{name}")),
            ("create", Some((keys, id))) => ("POST", format!("/v1/{keys}?cryptoKeyId={id}")),
            _ => ("POST", format!("/v1/{name}:{operation}")),
        };
        if !body.is_empty() {
            fields.push(("content-type", "application/json"));
        }
        patiently(|| {
            let answer = self.server.send(method, &path, &fields, body.as_bytes())?;
            if answer.status == 200 {
                return read(&answer);
            }
            let (status, message) = (answer.status, message_of(&answer.body).unwrap_or_default());
            let text = format!(
                "{host}: {operation} {name}: status {status}{}",
                said(&message)
            );
            Err(refusal(status, &message, text, operation, &caller.origin))
        })
    }
}

/// Returns the error for a status and a message, with what to do.
fn refusal(status: u16, message: &str, text: String, operation: &str, origin: &str) -> Error {
    let refused = |next: &str| Error::Refused(format!("{text}; {next}"));
    match status {
        408 | 429 | 500.. => Error::Busy(text),
        401 => Error::Credentials(format!("{text}; the token of {origin} is not accepted")),
        403 if message.contains("API has not been used") || message.contains("disabled") => {
            refused("enable the API cloudkms.googleapis.com in the project")
        }
        403 if message.contains("insufficient authentication scopes") => {
            refused("give the instance the scope cloud-platform")
        }
        403 => {
            let permission = match operation {
                "get" => "cryptoKeys.get",
                "create" => "cryptoKeys.create",
                "encrypt" => "cryptoKeyVersions.useToEncrypt",
                _ => "cryptoKeyVersions.useToDecrypt",
            };
            refused(&format!(
                "{origin} needs the permission cloudkms.{permission} on the key or on its key ring (docs/kms.md), or there is no such key"
            ))
        }
        404 if operation == "get" => Error::Missing(format!(
            "{text}; is it the right project, location and key ring? --create-key makes a missing key in an existing key ring"
        )),
        404 => refused("is it the right project, location and key ring?"),
        400 if message.contains("not enabled") || message.contains("DISABLED") => {
            refused("enable that version of the key, or restore it")
        }
        400 if message.contains("checksum") || message.contains("crc32c") => Error::Busy(text),
        400 if operation == "decrypt" => {
            refused("this key did not wrap this file, or the file is damaged")
        }
        _ => Error::Refused(text),
    }
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::super::error::check_refusals;
    use super::super::uri::Author;
    use super::*;

    const NAME: &str = "projects/own/locations/europe-west3/keyRings/ring/cryptoKeys/firstlight";

    fn open_uri(uri: &str) -> Result<Box<dyn KeyEncryptionKey>, Error> {
        open(super::super::uri::parse(uri, "kms://", Author::Operator)?.1)
    }

    #[test]
    fn a_token_goes_to_google_alone_and_a_name_is_that_of_a_key() {
        assert!(open_uri(&format!("kms://gcp-kms?keyName={NAME}")).is_ok());
        for (good, host) in [(true, "127.0.0.1:8443"), (true, "CloudKMS.googleapis.com")]
            .into_iter()
            .chain(
                [
                    "cloudkms.googleapis.com.example",
                    "own.storage.googleapis.com",
                    "10.0.0.1",
                ]
                .map(|host| (false, host)),
            )
        {
            let opened = open_uri(&format!(
                "kms://gcp-kms?keyName={NAME}&endpoint=https://{host}"
            ));
            assert_eq!(opened.is_ok(), good, "{host}");
        }
        for bad in [
            "firstlight",
            &format!("{NAME}/cryptoKeyVersions/1"),
            &NAME.replace("own", ".."),
            &NAME.replace("own", "a?b"),
            &format!("{NAME}:decrypt"),
        ] {
            let error = open_uri(&format!("kms://gcp-kms?keyName={bad}"))
                .err()
                .unwrap();
            assert!(
                error.to_string().contains("is not the name of a key"),
                "{error}"
            );
        }
        assert!(is_key(&NAME.replace("own", "example.com:own")));
    }

    #[test]
    fn checksums_are_those_of_the_standard() {
        // RFC 3720 appendix B.4, and the check value of CRC-32C
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn each_status_says_what_to_do_and_whether_to_wait() {
        let of =
            |status, message: &str| refusal(status, message, "text".into(), "decrypt", "ORIGIN");
        let passing = [408, 429, 500, 503].map(|status| (status, ""));
        let created = refusal(403, "", "text".into(), "create", "ORIGIN").to_string();
        assert!(created.contains("cloudkms.cryptoKeys.create"), "{created}");
        let missing = refusal(404, "", "text".into(), "get", "ORIGIN");
        assert!(matches!(&missing, Error::Missing(why) if why.contains("--create-key")));
        let lasting = [
            (401, "", "token of ORIGIN"),
            (
                403,
                "Permission denied",
                "ORIGIN needs the permission cloudkms.cryptoKeyVersions.useToDecrypt",
            ),
            (403, "API has not been used in project 1", "enable the API"),
            (403, "insufficient authentication scopes.", "cloud-platform"),
            (404, "", "key ring"),
            (400, "1 is not enabled", "enable that version"),
            (400, "Decryption failed", "did not wrap this file"),
            (412, "", "text"),
        ];
        check_refusals(of, &passing, &lasting);
    }

    #[test]
    fn answers_are_read_or_refused_and_never_shown() {
        let sum = crc32c(&[1; 32]);
        let decrypted = format!(
            r#"{{"plaintext":"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=","plaintextCrc32c":"{sum}","usedPrimary":true}}"#
        );
        let sum = crc32c(&[1; 4]);
        let encrypted = format!(
            r#"{{"name":"a","ciphertext":"AQEBAQ==","ciphertextCrc32c":"{sum}","verifiedPlaintextCrc32c":true,"verifiedAdditionalAuthenticatedDataCrc32c":true}}"#
        );
        let described = r#"{"name":"a","purpose":"ENCRYPT_DECRYPT","primary":{"state":"ENABLED"}}"#;
        assert_eq!(
            parse_decrypted("h", decrypted.as_bytes()).unwrap().expose(),
            [1; 32]
        );
        assert_eq!(parse_encrypted("h", encrypted.as_bytes()).unwrap(), [1; 4]);
        check_key("h", NAME, described.as_bytes()).unwrap();
        for (from, to, expected) in [
            (
                "ENABLED",
                "DISABLED",
                "no primary version that is enabled (DISABLED)",
            ),
            ("primary", "other", "no primary version"),
            (
                "ENCRYPT_DECRYPT",
                "MAC",
                "does not encrypt symmetrically (MAC)",
            ),
        ] {
            let body = described.replace(from, to);
            let error = check_key("h", NAME, body.as_bytes())
                .unwrap_err()
                .to_string();
            assert!(error.contains(expected), "{error}");
        }
        for (from, to) in [
            ("AQEBAQ==", "AQEBAg=="),
            ("Plaintext", "Nothing"),
            ("DataCrc32c\":true", "DataCrc32c\":false"),
        ] {
            let body = encrypted.replace(from, to);
            let error = parse_encrypted("h", body.as_bytes()).unwrap_err();
            assert!(
                error.may_pass() && error.to_string().contains("checksum"),
                "{error}"
            );
        }
        for body in mutations(decrypted.as_bytes(), 10_000) {
            match parse_decrypted("h", &body) {
                Ok(key) => assert_eq!(key.expose(), [1; 32]),
                Err(error) => assert!(!error.to_string().contains("AQEBAQ"), "{error}"),
            }
        }
        for body in mutations(encrypted.as_bytes(), 5000) {
            let _ = parse_encrypted("h", &body);
        }
        for body in mutations(described.as_bytes(), 5000) {
            let _ = (check_key("h", NAME, &body), message_of(&body));
        }
    }
}
