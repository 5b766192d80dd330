//! A key of Google Cloud Key Management Service.
//!
//! ```text
//! kms://gcp-kms?keyName=projects/PROJECT/locations/LOCATION/keyRings/RING/cryptoKeys/KEY[&endpoint=https://HOST[:PORT]][&caFile=FILE]
//! ```
//!
//! The token is that of a service account, whose key is in the file that the variable `GOOGLE_APPLICATION_CREDENTIALS` names, or that of
//! the instance's service account.
//!
//! API: Cloud KMS API v1, `cryptoKeys`, with the checksums of "Verifying end-to-end data integrity"; for tokens "Using OAuth 2.0 for
//! Server to Server Applications".

use std::fs::File;
use std::io::Read;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use cloud::gcp::Client;
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use zeroize::{Zeroize, Zeroizing};

use base::crypto::Secret;

use super::error::{Error, said};
use super::https::{Answer, Server};
use super::oauth;
use super::patience::patiently;
use super::service::{KeyEncryptionKey, Service};
use super::uri::Query;
use super::variable::variable;

/// The service's line in the table.
pub const SERVICE: Service = Service {
    name: "gcp-kms",
    parameters: PARAMETERS,
    open,
};

const PARAMETERS: &str = "keyName=projects/PROJECT/locations/LOCATION/keyRings/RING/cryptoKeys/KEY[&endpoint=https://HOST[:PORT]][&caFile=FILE]";

/// The API, and the endpoint of tokens: a token and a signature go to these alone.
const API: &str = "cloudkms.googleapis.com";
const TOKENS: &str = "oauth2.googleapis.com";
const SCOPE: &str = "https://www.googleapis.com/auth/cloudkms";
const GRANT: &str = "urn:ietf:params:oauth:grant-type:jwt-bearer";
/// Seconds that a signature is valid.
const LIFETIME: u64 = 600;
/// Additional data of each encryption, so that what another program encrypted with the same key is not taken.
const CONTEXT: &[u8] = b"firstlight master secret";
/// The variables of Google's own programs.
const CREDENTIALS: &str = "GOOGLE_APPLICATION_CREDENTIALS";
const METADATA: &str = "GCE_METADATA_HOST";
/// Maximum bytes of the file of a service account.
const MAX_FILE: u64 = 16 << 10;

struct Key {
    server: Server,
    name: String,
    ca: Option<String>,
}

/// A token, and whose it is.
struct Caller {
    authorization: Zeroizing<String>,
    origin: String,
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
    let server = Server::new(&endpoint, ca.as_deref())?;
    if !is_googles(&server, API) {
        return Err(Error::Uri(format!(
            "the endpoint {endpoint:?} is not that of Cloud KMS, and a token goes nowhere else: expected https://{API}"
        )));
    }
    Ok(Box::new(Key { server, name, ca }))
}

fn is_googles(server: &Server, name: &str) -> bool {
    server.name().eq_ignore_ascii_case(name) || server.is_loopback()
}

/// Returns whether text is the name of a key, which becomes a path.
fn is_key(name: &str) -> bool {
    let is_part = |part: &str| {
        // a project may be that of a domain: example.com:name
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
        match self.0.parse() == Ok(crc32c(data)) {
            true => Ok(()),
            false => Err(damaged(host, operation)),
        }
    }
}

fn damaged(host: &str, operation: &str) -> Error {
    Error::Busy(format!(
        "{host}: {operation}: a checksum is wrong, so data were damaged on the way"
    ))
}

/// Checks by the answer of `get` that the key encrypts.
pub fn check_key(host: &str, name: &str, body: &[u8]) -> Result<(), Error> {
    let Described { purpose, primary } = parse(host, "get", body)?;
    let state = primary.map(|version| version.state);
    let refused = |what: &str, got: &str, next: &str| {
        let got = said(got);
        Err(Error::Refused(format!(
            "{host}: the key {name} {what}{got}: {next}"
        )))
    };
    match (&*purpose, state.as_deref()) {
        ("ENCRYPT_DECRYPT", Some("ENABLED")) => Ok(()),
        ("ENCRYPT_DECRYPT", state) => refused(
            "has no primary version that is enabled",
            state.unwrap_or_default(),
            "enable it, or make a version and the primary one of it",
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
    let encrypted: Encrypted = parse(host, "encrypt", body)?;
    let ciphertext = decoded(host, "encrypt", &encrypted.ciphertext)?;
    encrypted
        .ciphertext_crc32c
        .check(host, "encrypt", &ciphertext)?;
    let is_verified = encrypted.verified_plaintext_crc32c
        && encrypted.verified_additional_authenticated_data_crc32c;
    match is_verified {
        true => Ok(ciphertext),
        false => Err(damaged(host, "encrypt")),
    }
}

/// Parses the answer of `decrypt`: the key.
pub fn parse_decrypted(host: &str, body: &[u8]) -> Result<Secret, Error> {
    let decrypted: Decrypted = parse(host, "decrypt", body)?;
    let key = Secret::new(decoded(host, "decrypt", &decrypted.plaintext)?);
    decrypted
        .plaintext_crc32c
        .check(host, "decrypt", key.expose())?;
    Ok(key)
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
        let checked = |answer: &Answer| check_key(self.server.host(), &self.name, &answer.body);
        match self.call("get", "", &checked) {
            Err(Error::Refused(why)) if create => Err(Error::Refused(format!(
                "{why}; --create-key makes no keys in this service"
            ))),
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
    /// Returns what `read` makes of the successful answer to an operation.
    fn call<T>(
        &self,
        operation: &str,
        body: &str,
        read: &dyn Fn(&Answer) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let caller = self.caller()?;
        let (host, name) = (self.server.host(), &self.name);
        let mut fields = vec![
            ("accept", "application/json"),
            ("authorization", &**caller.authorization),
        ];
        let (method, path) = match body {
            "" => ("GET", format!("/v1/{name}")),
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
            let (status, message) = (answer.status, words(&answer.body));
            let text = format!(
                "{host}: {operation} {name}: status {status}{}",
                said(&message)
            );
            Err(refusal(status, &message, text, operation, &caller.origin))
        })
    }

    fn caller(&self) -> Result<Caller, Error> {
        let (token, origin) = match variable(CREDENTIALS)? {
            Some(path) => {
                let account = Account::read(&path).map_err(|why| {
                    Error::Credentials(format!("the file {} of {CREDENTIALS} {why}", *path))
                })?;
                let token = account.token(self.ca.as_deref())?;
                (token, format!("the account {}", account.client_email))
            }
            None => (instance_token()?, "the instance's service account".into()),
        };
        Ok(Caller {
            authorization: Zeroizing::new(format!("Bearer {}", *token)),
            origin,
        })
    }
}

/// Gets a token of the instance's service account.
fn instance_token() -> Result<Zeroizing<String>, Error> {
    let host = variable(METADATA)?;
    let url = host.map(|host| format!("http://{}", *host));
    let client = Client::new(url.as_deref())
        .map_err(|error| Error::Credentials(format!("{METADATA}: {error}")))?;
    let token = client.token().map_err(|error| {
        // the service of an instance that has just started may still be away
        Error::Away(format!(
            "there are no credentials: {CREDENTIALS} is not set, and the instance gives none: {error}"
        ))
    })?;
    Ok(Zeroizing::new(token.value().to_owned()))
}

/// A service account with its key.
#[derive(Deserialize, Zeroize)]
#[zeroize(drop)]
pub struct Account {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    client_email: String,
    #[serde(default)]
    private_key_id: String,
    #[serde(default)]
    private_key: String,
    #[serde(default)]
    token_uri: String,
}

impl Account {
    fn read(path: &str) -> Result<Account, String> {
        let mut content = Zeroizing::new(Vec::with_capacity(MAX_FILE as usize + 1));
        File::open(path)
            .and_then(|file| file.take(MAX_FILE).read_to_end(&mut content))
            .map_err(|error| format!("cannot be read: {error}"))?;
        Account::parse(&content)
    }

    /// Parses the file. The error says as a clause what is wrong.
    pub fn parse(content: &[u8]) -> Result<Account, String> {
        let account: Account = serde_json::from_slice(content)
            .map_err(|_| "is not JSON of a service account".to_owned())?;
        if account.kind != "service_account" {
            // a text that is no type may be anything
            let is_type = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
            let kind = Some(&*account.kind).filter(|kind| kind.bytes().all(is_type));
            return Err(format!(
                "has credentials of another type{} than service_account",
                said(kind.unwrap_or_default())
            ));
        }
        account.key().map(|_| account)
    }

    fn key(&self) -> Result<RsaKeyPair, String> {
        let fault = || "has no private key of RSA in PEM (PKCS #8)".to_owned();
        let base64 = self
            .private_key
            .split("-----")
            .skip_while(|part| *part != "BEGIN PRIVATE KEY")
            .nth(1)
            .ok_or_else(fault)?;
        let mut der = Zeroizing::new(Vec::with_capacity(base64.len()));
        let base64: Zeroizing<String> = Zeroizing::new(base64.split_whitespace().collect());
        STANDARD
            .decode_vec(&*base64, &mut der)
            .map_err(|_| fault())?;
        RsaKeyPair::from_pkcs8(&der).map_err(|_| fault())
    }

    /// Gets a token for a signature (RFC 7523 §2.1).
    fn token(&self, ca: Option<&str>) -> Result<Zeroizing<String>, Error> {
        let fault = |why: String| Error::Credentials(format!("{CREDENTIALS}: {why}"));
        let address = self.token_uri.strip_suffix("/token");
        let server = Server::new(address.unwrap_or_default(), ca)
            .ok()
            .filter(|server| is_googles(server, TOKENS))
            .ok_or_else(|| fault(format!("its token_uri is not https://{TOKENS}/token")))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.unwrap_or_default().as_secs();
        let assertion = self.assertion(now).map_err(fault)?;
        let form = [("grant_type", GRANT), ("assertion", &**assertion)];
        oauth::token(&server, "/token", &form, &self.client_email)
    }

    /// Returns a JSON web token (RFC 7519) of this time, signed by RS256 (RFC 7518 §3.3).
    fn assertion(&self, now: u64) -> Result<Zeroizing<String>, String> {
        let header = json!({"alg": "RS256", "typ": "JWT", "kid": self.private_key_id});
        let claims = json!({
            "iss": self.client_email,
            "scope": SCOPE,
            // always this one, wherever the endpoint is
            "aud": format!("https://{TOKENS}/token"),
            "iat": now,
            "exp": now + LIFETIME,
        });
        let [header, claims] =
            [header, claims].map(|json| URL_SAFE_NO_PAD.encode(json.to_string()));
        let signed = format!("{header}.{claims}");
        let key = self.key()?;
        let mut signature = vec![0; key.public().modulus_len()];
        key.sign(
            &RSA_PKCS1_SHA256,
            &SystemRandom::new(),
            signed.as_bytes(),
            &mut signature,
        )
        .map_err(|_| "its key signs nothing".to_owned())?;
        let signature = URL_SAFE_NO_PAD.encode(signature);
        Ok(Zeroizing::new(format!("{signed}.{signature}")))
    }
}

/// Returns the message of an error: `{"error": {"message": ".."}}`.
fn words(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Answer {
        error: Inner,
    }
    #[derive(Deserialize)]
    struct Inner {
        message: String,
    }
    serde_json::from_slice(body)
        .map(|Answer { error }| error.message)
        .unwrap_or_default()
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
                "encrypt" => "cryptoKeyVersions.useToEncrypt",
                _ => "cryptoKeyVersions.useToDecrypt",
            };
            refused(&format!(
                "{origin} needs the permission cloudkms.{permission} on the key (docs/kms.md), or there is no such key"
            ))
        }
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

    use super::*;

    const NAME: &str = "projects/own/locations/europe-west3/keyRings/ring/cryptoKeys/firstlight";

    fn open_uri(uri: &str) -> Result<Box<dyn KeyEncryptionKey>, Error> {
        open(super::super::uri::parse(uri)?.1)
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
        let of = |status, message: &str| {
            let error = refusal(status, message, "text".into(), "decrypt", "ORIGIN");
            (error.may_pass(), error.to_string())
        };
        for status in [408, 429, 500, 503] {
            assert_eq!(of(status, ""), (true, "text".into()));
        }
        for (status, message, expected) in [
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
        ] {
            let (may_pass, text) = of(status, message);
            assert!(!may_pass && text.contains(expected), "{text}");
        }
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
            let _ = (check_key("h", NAME, &body), words(&body));
        }
    }

    #[test]
    fn the_file_of_an_account_is_refused_by_what_is_wrong_and_never_shown() {
        let file = r#"{"type":"service_account","client_email":"a@own.iam.gserviceaccount.com","private_key_id":"1","private_key":"-----BEGIN PRIVATE KEY-----\nTm8ga2V5\n-----END PRIVATE KEY-----\n","token_uri":"https://oauth2.googleapis.com/token"}"#;
        for (from, to, expected) in [
            ("", "", "has no private key of RSA in PEM"),
            ("BEGIN", "END", "has no private key of RSA in PEM"),
            (
                "service_account",
                "authorized_user",
                "type (authorized_user)",
            ),
            ("{", "[", "is not JSON"),
        ] {
            let error = Account::parse(file.replacen(from, to, 1).as_bytes()).err();
            assert!(error.as_ref().unwrap().contains(expected), "{error:?}");
        }
        for file in mutations(file.as_bytes(), 10_000) {
            let error = Account::parse(&file).err().unwrap();
            assert!(!error.contains("Tm8ga2V5") && error.len() < 1000, "{error}");
        }
    }
}
