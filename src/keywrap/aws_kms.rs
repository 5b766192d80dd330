//! A key of AWS Key Management Service.
//!
//! ```text
//! kms://aws-kms?keyName=KEY[&region=REGION][&endpoint=https://HOST[:PORT]][&caFile=FILE]
//! ```
//!
//! KEY is the ARN of a key or an alias, which contains the region, or the ID of a key or `alias/NAME`. The credentials are those of
//! the variables `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`, or those of the instance's role (IMDSv2).
//!
//! API: AWS Key Management Service API Reference (`TrentService`).

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use cloud_api::aws::credentials::AwsSigner;
use serde::Deserialize;
use serde_json::json;
use zeroize::{Zeroize, Zeroizing};

use base::crypto::Secret;

use super::answer::{decoded, parsed};
use super::aws_credentials::{AwsCredentials, check_region, check_server, send};
use super::error::{Error, said};
use super::https::{KmsResponse, KmsServer};
use super::patience::patiently;
use super::service::{KeyEncryptionKey, KmsKind};
use super::uri::Query;

/// This service's entry in the table of all services.
pub const SERVICE: KmsKind = KmsKind {
    name: "aws-kms",
    parameters: PARAMETERS,
    open,
};

const PARAMETERS: &str = "keyName=ARN[&region=REGION][&endpoint=https://HOST[:PORT]][&caFile=FILE]";

/// The encryption context: additional data that AWS logs, and that a policy of AWS can require.
pub const CONTEXT: (&str, &str) = ("purpose", "firstlight master secret");

/// The usage and the spec of a key that encrypts symmetrically.
const USAGE: &str = "ENCRYPT_DECRYPT";
const SPEC: &str = "SYMMETRIC_DEFAULT";
/// Variables with the address of the API, which AWS' own programs read too.
pub const ENDPOINT: [&str; 2] = ["AWS_ENDPOINT_URL_KMS", "AWS_ENDPOINT_URL"];

struct Key {
    server: KmsServer,
    name: String,
    region: String,
    callers: AwsCredentials,
}

fn open(mut query: Query) -> Result<Box<dyn KeyEncryptionKey>, Error> {
    let name = query.need("keyName")?;
    let region = query.take("region");
    let endpoint = query.take("endpoint");
    let ca = query.take("caFile");
    let author = query.author;
    query.finish(PARAMETERS)?;
    let region = region_of(&name, region)?;
    let endpoint = endpoint
        .unwrap_or_else(|| format!("https://kms.{region}.{}", cloud_api::aws::domain(&region)));
    let server = KmsServer::new(&endpoint, ca.as_deref())?;
    check_server(&server, ("kms", &region), author, &ENDPOINT)?;
    Ok(Box::new(Key {
        server,
        name,
        region,
        callers: AwsCredentials::new()?,
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
struct Created {
    key_metadata: Identity,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Identity {
    arn: String,
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
    let encrypted: Encrypted = parsed(host, "Encrypt", body)?;
    decoded(host, "Encrypt", &encrypted.ciphertext_blob)
}

/// Parses the answer of `Decrypt`: the key.
pub fn parse_decrypted(host: &str, body: &[u8]) -> Result<Secret, Error> {
    let decrypted: Decrypted = parsed(host, "Decrypt", body)?;
    decoded(host, "Decrypt", &decrypted.plaintext).map(Secret::new)
}

/// Checks by the answer of `DescribeKey` that the key encrypts.
pub fn check_key(host: &str, name: &str, body: &[u8]) -> Result<(), Error> {
    let Described { key_metadata: key } = parsed(host, "DescribeKey", body)?;
    let (usage, spec, state) = (&*key.key_usage, &*key.key_spec, &*key.key_state);
    let got = said(&format!("{usage}, {spec}, {state}"));
    match (usage, spec, state) {
        (USAGE, SPEC, "Enabled") => Ok(()),
        (USAGE, SPEC, _) => Err(Error::Refused(format!(
            "{host}: the key {name} is not enabled{got}: enable it"
        ))),
        _ => Err(Error::Refused(format!(
            "{host}: the key {name} does not encrypt symmetrically{got}: expected one of usage {USAGE} and spec {SPEC}"
        ))),
    }
}

/// Parses the answer of `CreateKey`: the ARN of the new key.
pub fn parse_created(host: &str, body: &[u8]) -> Result<String, Error> {
    let Created { key_metadata: key } = parsed(host, "CreateKey", body)?;
    let is_key = key.arn.contains(":key/") && region_of(&key.arn, None).is_ok();
    if is_key {
        Ok(key.arn)
    } else {
        Err(Error::Answer(format!(
            "{host}: the answer to CreateKey has{} in place of the ARN of a key",
            said(&key.arn)
        )))
    }
}

/// Returns the name `alias/NAME`, if the text names a key by an alias.
fn alias_of(name: &str) -> Option<&str> {
    let own = name.rsplit(':').next().unwrap_or(name);
    own.starts_with("alias/").then_some(own)
}

impl KeyEncryptionKey for Key {
    fn prepare(&self, create: bool) -> Result<(), Error> {
        match self.check() {
            Err(Error::Missing(why)) if create => self.create(&why),
            other => other,
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
    /// Checks that the key exists and encrypts.
    fn check(&self) -> Result<(), Error> {
        let body = json!({"KeyId": self.name}).to_string();
        let answer = self.call("DescribeKey", &body)?;
        check_key(self.server.host(), &self.name, &answer.body)
    }

    /// Makes a key with the account's default key policy, and the alias that names it. `missing` is the error that says that the
    /// key does not exist.
    fn create(&self, missing: &str) -> Result<(), Error> {
        let Some(alias) = alias_of(&self.name) else {
            return Err(Error::Refused(format!(
                "{missing}; AWS chooses the ID of a new key, so --create-key needs an alias: give keyName=alias/NAME"
            )));
        };
        let wanted = json!({
            "Description": "wraps the master secret of a Firstlight cluster",
            "KeyUsage": USAGE,
            "KeySpec": SPEC,
        });
        let answer = self.call("CreateKey", &wanted.to_string())?;
        let arn = parse_created(self.server.host(), &answer.body)?;
        let named = json!({"AliasName": alias, "TargetKeyId": arn}).to_string();
        self.call("CreateAlias", &named)
            // the servers of a region know a new key and a new alias only after some seconds ("AWS KMS eventual consistency")
            .and_then(|_| {
                patiently(|| match self.check() {
                    Err(Error::Missing(why)) => Err(Error::Busy(why)),
                    other => other,
                })
            })
            .map_err(|error| {
                Error::Refused(format!(
                    "{error}; the new key {arn} exists: use it as keyName, or schedule its deletion"
                ))
            })
    }

    /// Returns the successful answer to an operation.
    fn call(&self, operation: &str, body: &str) -> Result<KmsResponse, Error> {
        let signer = self.callers.signer()?;
        patiently(|| {
            let target = format!("TrentService.{operation}");
            let fields = [
                ("content-type", "application/x-amz-json-1.1"),
                ("x-amz-target", &*target),
            ];
            let place = ("kms", &*self.region);
            let (server, post) = (&self.server, ("POST", "/"));
            let answer = send(&signer, server, place, post, &fields, body.as_bytes())?;
            match answer.status {
                200 => Ok(answer),
                _ => Err(self.refusal(&signer, operation, &answer)),
            }
        })
    }

    fn refusal(&self, signer: &AwsSigner, operation: &str, answer: &KmsResponse) -> Error {
        let (code, message) = cloud_api::aws::parse_error(&answer.body);
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
    let is_create = matches!(operation, "CreateKey" | "CreateAlias");
    match code {
        "ThrottlingException"
        | "Throttling"
        | "RequestLimitExceeded"
        | "KMSInternalException"
        | "DependencyTimeoutException"
        | "KeyUnavailableException" => Error::Busy(text),
        "AccessDeniedException" | "AccessDenied" if is_create => refused(format!(
            "{origin} needs the permission kms:{operation} to make the key (docs/kms.md)"
        )),
        "AccessDeniedException" | "AccessDenied" => refused(format!(
            "{origin} needs the permission kms:{operation} on {name} with the encryption context {}={:?} (docs/kms.md), and this key must \
             have wrapped the file",
            CONTEXT.0, CONTEXT.1
        )),
        "NotFoundException" if operation == "DescribeKey" => Error::Missing(format!(
            "{text}; is it the right region and account? --create-key makes a missing key"
        )),
        "NotFoundException" => refused("is it the right region and account?".into()),
        "AlreadyExistsException" => {
            refused("another program made the alias at the same time".into())
        }
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
            "{text}; the secret key of {origin} is wrong, or this machine's clock is"
        )),
        _ if cloud_api::aws::is_of_credentials(code) || code == "MissingAuthenticationToken" => {
            Error::Credentials(format!(
                "{text}; the credentials of {origin} are wrong or have expired"
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
    fn only_an_alias_names_a_key_that_is_not_there_yet() {
        assert_eq!(alias_of("alias/team/a"), Some("alias/team/a"));
        let arn = "arn:aws:kms:eu-central-1:111122223333:alias/a";
        assert_eq!(alias_of(arn), Some("alias/a"));
        assert_eq!(alias_of(ARN), None);
        assert_eq!(alias_of("1234abcd-12ab-34cd-56ef-1234567890ab"), None);
    }

    #[test]
    fn each_code_says_what_to_do_and_whether_to_wait() {
        let of = |status, code: &str| {
            let error = refusal(status, code, "text".into(), "Decrypt", ARN, KEY_ID);
            (error.may_pass(), error.to_string())
        };
        let described = |code| refusal(400, code, "text".into(), "DescribeKey", "alias/a", KEY_ID);
        let missing = described("NotFoundException");
        assert!(matches!(&missing, Error::Missing(why) if why.contains("--create-key")));
        let denied = refusal(
            400,
            "AccessDeniedException",
            "text".into(),
            "CreateKey",
            "alias/a",
            KEY_ID,
        );
        assert_eq!(
            denied.to_string(),
            "text; AWS_ACCESS_KEY_ID needs the permission kms:CreateKey to make the key (docs/kms.md)"
        );
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
            ("NotFoundException", "region and account?"),
            ("AlreadyExistsException", "at the same time"),
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
        let created =
            format!(r#"{{"KeyMetadata":{{"KeyId":"b","Arn":"{ARN}","KeyState":"Enabled"}}}}"#);
        assert_eq!(parse_created("h", created.as_bytes()).unwrap(), ARN);
        for (from, to) in [(":key/", ":alias/"), ("arn:", "a\\nb:"), ("Arn", "Name")] {
            let other = created.replace(from, to);
            let error = parse_created("h", other.as_bytes()).unwrap_err();
            assert!(matches!(error, Error::Answer(_)), "{error}");
        }
        for body in mutations(created.as_bytes(), 5000) {
            match parse_created("h", &body) {
                Ok(arn) => assert!(arn.starts_with("arn:") && arn.len() <= 2048),
                Err(error) => assert!(error.to_string().len() < 1000),
            }
        }
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
