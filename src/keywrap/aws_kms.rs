//! A key of AWS Key Management Service.
//!
//! ```text
//! kms://aws-kms?keyName=KEY[&region=REGION][&endpoint=https://HOST[:PORT]][&caFile=FILE]
//! ```
//!
//! KEY is the ARN of a key or an alias, which has the region, or the ID of a key or `alias/NAME`. The credentials are those of the
//! variables `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`, or those of the instance's role (IMDSv2).
//!
//! API: AWS Key Management Service API Reference (`TrentService`).

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use cloud::aws;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use zeroize::{Zeroize, Zeroizing};

use base::crypto::Secret;

use super::aws_credentials::{Callers, Signer, check_region};
use super::error::{Error, said};
use super::https::{Answer, Server};
use super::patience::patiently;
use super::service::{KeyEncryptionKey, Service};
use super::uri::Query;

/// The service's line in the table.
pub const SERVICE: Service = Service {
    name: "aws-kms",
    parameters: PARAMETERS,
    open,
};

const PARAMETERS: &str = "keyName=ARN[&region=REGION][&endpoint=https://HOST[:PORT]][&caFile=FILE]";

/// The encryption context: additional data that AWS logs, and on which a policy can insist.
pub const CONTEXT: (&str, &str) = ("purpose", "firstlight master secret");

struct Key {
    server: Server,
    name: String,
    region: String,
    callers: Callers,
}

fn open(mut query: Query) -> Result<Box<dyn KeyEncryptionKey>, Error> {
    let name = query.need("keyName")?;
    let region = query.take("region");
    let endpoint = query.take("endpoint");
    let ca = query.take("caFile");
    query.finish(PARAMETERS)?;
    let region = region_of(&name, region)?;
    let endpoint =
        endpoint.unwrap_or_else(|| format!("https://kms.{region}.{}", aws::domain(&region)));
    Ok(Box::new(Key {
        server: Server::new(&endpoint, ca.as_deref())?,
        name,
        region,
        callers: Callers::new()?,
    }))
}

/// Returns the region of a key.
fn region_of(name: &str, region: Option<String>) -> Result<String, Error> {
    let fault = |why: &str| Err(Error::Uri(format!("keyName={name} {why}")));
    let is_named = |byte: u8| byte.is_ascii_alphanumeric() || b"-_/:".contains(&byte);
    if name.len() > 2048 || !name.bytes().all(is_named) {
        return fault("is not the name of a key: expected arn:aws:kms:REGION:ACCOUNT:key/ID");
    }
    let parts: Vec<_> = name.split(':').collect();
    let region = match (&*parts, region) {
        (["arn", _, "kms", own, _, key], region)
            if key.starts_with("key/") || key.starts_with("alias/") =>
        {
            if region.is_some_and(|region| region != *own) {
                return fault("is in another region than the parameter region says");
            }
            (*own).to_owned()
        }
        ([_], Some(region)) => region,
        ([_], None) => return fault("has no region: give the ARN of the key, or &region=REGION"),
        _ => return fault("is not the ARN of a key or an alias"),
    };
    check_region(region)
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Encrypted {
    ciphertext_blob: String,
}

#[derive(Deserialize, Zeroize)]
#[serde(rename_all = "PascalCase")]
#[zeroize(drop)]
struct Decrypted {
    plaintext: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Described {
    key_metadata: Metadata,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Metadata {
    key_state: String,
    key_usage: String,
    key_spec: String,
}

/// Parses the answer of `Encrypt`: the encrypted key.
pub fn parse_encrypted(host: &str, body: &[u8]) -> Result<Vec<u8>, Error> {
    let encrypted: Encrypted = parse(host, "Encrypt", body)?;
    decoded(host, "Encrypt", &encrypted.ciphertext_blob)
}

/// Parses the answer of `Decrypt`: the key.
pub fn parse_decrypted(host: &str, body: &[u8]) -> Result<Secret, Error> {
    let decrypted: Decrypted = parse(host, "Decrypt", body)?;
    decoded(host, "Decrypt", &decrypted.plaintext).map(Secret::new)
}

/// Checks by the answer of `DescribeKey` that the key encrypts.
pub fn check_key(host: &str, name: &str, body: &[u8]) -> Result<(), Error> {
    let Described { key_metadata: key } = parse(host, "DescribeKey", body)?;
    let (usage, spec, state) = (&*key.key_usage, &*key.key_spec, &*key.key_state);
    let got = said(&format!("{usage}, {spec}, {state}"));
    match (usage, spec, state) {
        ("ENCRYPT_DECRYPT", "SYMMETRIC_DEFAULT", "Enabled") => Ok(()),
        ("ENCRYPT_DECRYPT", "SYMMETRIC_DEFAULT", _) => Err(Error::Refused(format!(
            "{host}: the key {name} is not enabled{got}: enable it"
        ))),
        _ => Err(Error::Refused(format!(
            "{host}: the key {name} does not encrypt symmetrically{got}: expected one of usage ENCRYPT_DECRYPT and spec SYMMETRIC_DEFAULT"
        ))),
    }
}

fn parse<T: DeserializeOwned>(host: &str, operation: &str, body: &[u8]) -> Result<T, Error> {
    serde_json::from_slice(body).map_err(|error| {
        // the position alone: the answer may contain a key
        let (line, column) = (error.line(), error.column());
        Error::Answer(format!(
            "{host}: the answer to {operation} is not what this API publishes (line {line}, column {column})"
        ))
    })
}

fn decoded(host: &str, operation: &str, text: &str) -> Result<Vec<u8>, Error> {
    STANDARD.decode(text).map_err(|_| {
        Error::Answer(format!(
            "{host}: the answer to {operation} has a value that is not base64"
        ))
    })
}

impl KeyEncryptionKey for Key {
    fn prepare(&self, create: bool) -> Result<(), Error> {
        let body = json!({"KeyId": self.name}).to_string();
        match self.call("DescribeKey", &body) {
            Ok(answer) => check_key(self.server.host(), &self.name, &answer.body),
            Err(Error::Refused(why)) if create => Err(Error::Refused(format!(
                "{why}; --create-key makes no keys in this service, because a key there needs a policy"
            ))),
            Err(error) => Err(error),
        }
    }

    fn wrap(&self, key: &Secret) -> Result<Vec<u8>, Error> {
        let plaintext = Zeroizing::new(STANDARD.encode(key.expose()));
        let body = json!({"KeyId": self.name, "Plaintext": *plaintext, "EncryptionContext": {CONTEXT.0: CONTEXT.1}});
        let body = Zeroizing::new(body.to_string());
        let answer = self.call("Encrypt", &body)?;
        parse_encrypted(self.server.host(), &answer.body)
    }

    fn unwrap(&self, wrapped: &[u8]) -> Result<Secret, Error> {
        let body = json!({
            "KeyId": self.name,
            "CiphertextBlob": STANDARD.encode(wrapped),
            "EncryptionContext": {CONTEXT.0: CONTEXT.1},
        });
        let answer = self.call("Decrypt", &body.to_string())?;
        parse_decrypted(self.server.host(), &answer.body)
    }
}

impl Key {
    /// Returns the successful answer to an operation.
    fn call(&self, operation: &str, body: &str) -> Result<Answer, Error> {
        let signer = self.callers.signer()?;
        patiently(|| {
            let target = format!("TrentService.{operation}");
            let fields = [
                ("content-type", "application/x-amz-json-1.1"),
                ("x-amz-target", &*target),
            ];
            let place = ("kms", &*self.region);
            let answer =
                signer.send(&self.server, place, ("POST", "/"), &fields, body.as_bytes())?;
            match answer.status {
                200 => Ok(answer),
                _ => Err(self.refusal(&signer, operation, &answer)),
            }
        })
    }

    fn refusal(&self, signer: &Signer, operation: &str, answer: &Answer) -> Error {
        let (code, message) = aws::parse_error(&answer.body);
        let (host, name, status) = (self.server.host(), &self.name, answer.status);
        let said = said(&format!("{code}: {message}"));
        let text = format!("{host}: {operation} {name}: status {status}{said}");
        refusal(status, &code, text, operation, name, signer.origin())
    }
}

/// Returns the error for a status and a code ("Common Errors", and the errors of each operation in the API Reference), with what to do.
fn refusal(
    status: u16,
    code: &str,
    text: String,
    operation: &str,
    name: &str,
    origin: &str,
) -> Error {
    let refused = |next: String| Error::Refused(format!("{text}; {next}"));
    match code {
        "ThrottlingException"
        | "Throttling"
        | "RequestLimitExceeded"
        | "KMSInternalException"
        | "DependencyTimeoutException"
        | "KeyUnavailableException" => Error::Busy(text),
        "AccessDeniedException" | "AccessDenied" => refused(format!(
            "{origin} needs the permission kms:{operation} on {name} with the encryption context {}={:?} (docs/kms.md), and the file must be that of this key",
            CONTEXT.0, CONTEXT.1
        )),
        "NotFoundException" => refused("is it the right region and account?".into()),
        "DisabledException" => refused("enable the key".into()),
        "KMSInvalidStateException" => {
            refused("the key must be enabled; cancel its deletion if that is pending".into())
        }
        "IncorrectKeyException" => refused("another key wrapped this file".into()),
        "InvalidCiphertextException" => {
            refused("this key did not wrap this file, or the file is damaged".into())
        }
        "InvalidSignatureException"
        | "SignatureDoesNotMatch"
        | "IncompleteSignature"
        | "RequestTimeTooSkewed" => Error::Credentials(format!(
            "{text}; the secret key of {origin} is wrong, or this machine's clock"
        )),
        _ if aws::is_of_credentials(code) || code == "MissingAuthenticationToken" => {
            Error::Credentials(format!(
                "{text}; the credentials of {origin} are wrong or have ended"
            ))
        }
        _ if status == 429 || status >= 500 => Error::Busy(text),
        _ => Error::Refused(text),
    }
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    const KEY_ID: &str = "AWS_ACCESS_KEY_ID";

    const ARN: &str =
        "arn:aws:kms:eu-central-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab";

    #[test]
    fn the_region_is_that_of_the_key() {
        let region = |name: &str, region: Option<&str>| region_of(name, region.map(str::to_owned));
        assert_eq!(region(ARN, None).unwrap(), "eu-central-1");
        assert_eq!(region(ARN, Some("eu-central-1")).unwrap(), "eu-central-1");
        assert_eq!(region("alias/a", Some("us-east-1")).unwrap(), "us-east-1");
        let alias = "arn:aws-cn:kms:cn-north-1:111122223333:alias/team/a_b";
        assert_eq!(region(alias, None).unwrap(), "cn-north-1");
        for (name, given, expected) in [
            (ARN, Some("us-east-1"), "in another region"),
            ("alias/a", None, "has no region"),
            ("arn:aws:s3:::bucket", None, "is not the ARN of a key"),
            ("arn:aws:kms:a:b:secret/c", None, "is not the ARN of a key"),
            (
                "alias/a",
                Some("a.evil.org/"),
                "is not the name of a region",
            ),
            ("alias/a", Some(""), "is not the name of a region"),
            ("arn:aws:kms::1:key/a", None, "is not the name of a region"),
            ("a\"b", Some("us-east-1"), "is not the name of a key"),
        ] {
            let error = region(name, given).unwrap_err().to_string();
            assert!(error.contains(expected), "{name}: {error}");
        }
    }

    #[test]
    fn each_code_says_what_to_do_and_whether_to_wait() {
        let of = |status, code: &str| {
            let error = refusal(status, code, "text".into(), "Decrypt", ARN, KEY_ID);
            (error.may_pass(), error.to_string())
        };
        for (status, code) in [
            (400, "ThrottlingException"),
            (500, "KMSInternalException"),
            (503, ""),
            (429, ""),
        ] {
            assert_eq!(of(status, code), (true, "text".into()), "{code}");
        }
        for (code, expected) in [
            (
                "AccessDeniedException",
                "needs the permission kms:Decrypt on arn:aws:kms:",
            ),
            ("NotFoundException", "region and account"),
            ("DisabledException", "enable the key"),
            ("KMSInvalidStateException", "cancel its deletion"),
            ("IncorrectKeyException", "another key wrapped"),
            ("InvalidCiphertextException", "did not wrap this file"),
            ("InvalidSignatureException", "this machine's clock"),
            ("ExpiredTokenException", "credentials of AWS_ACCESS_KEY_ID"),
            ("ValidationException", "text"),
        ] {
            let (may_pass, text) = of(400, code);
            assert!(!may_pass && text.contains(expected), "{text}");
        }
    }

    #[test]
    fn answers_are_read_or_refused_and_never_shown() {
        let key = br#"{"Plaintext":"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=","KeyId":"arn:aws:kms:a:1:key/b","EncryptionAlgorithm":"SYMMETRIC_DEFAULT"}"#;
        let encrypted = br#"{"CiphertextBlob":"AQEBAQ==","KeyId":"arn:aws:kms:a:1:key/b"}"#;
        let described = br#"{"KeyMetadata":{"KeyState":"Enabled","KeyUsage":"ENCRYPT_DECRYPT","KeySpec":"SYMMETRIC_DEFAULT"}}"#;
        assert_eq!(parse_decrypted("h", key).unwrap().expose(), [1; 32]);
        assert_eq!(parse_encrypted("h", encrypted).unwrap(), [1; 4]);
        check_key("h", ARN, described).unwrap();
        for (from, to, expected) in [
            (
                "Enabled",
                "PendingDeletion",
                "is not enabled (ENCRYPT_DECRYPT, SYMMETRIC_DEFAULT, PendingDeletion)",
            ),
            ("ENCRYPT_DECRYPT", "SIGN_VERIFY", "does not encrypt"),
            ("SYMMETRIC_DEFAULT", "RSA_2048", "does not encrypt"),
        ] {
            let other = String::from_utf8_lossy(described).replace(from, to);
            let error = check_key("h", ARN, other.as_bytes())
                .unwrap_err()
                .to_string();
            assert!(error.contains(expected), "{error}");
        }
        for body in mutations(key, 10_000) {
            if let Err(error) = parse_decrypted("h", &body) {
                assert!(!error.to_string().contains("AQEBAQ"), "{error}");
            }
        }
        for body in mutations(encrypted, 5000) {
            let _ = parse_encrypted("h", &body);
        }
        for body in mutations(described, 5000) {
            if let Err(error) = check_key("h", ARN, &body) {
                assert!(error.to_string().len() < 1000);
            }
        }
    }
}
