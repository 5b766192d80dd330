//! Tokens for services of Google Cloud. They are those of a service account, whose key is in the file that the variable
//! `GOOGLE_APPLICATION_CREDENTIALS` names, or those of the instance's service account.
//!
//! API: "Using OAuth 2.0 for Server to Server Applications".

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use cloud_api::gcp::GcpClient;
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_SHA256, RsaKeyPair};
use serde::Deserialize;
use serde_json::json;
use zeroize::{Zeroize, Zeroizing};

use super::error::{Error, said};
use super::https::KmsServer;
use super::oauth;
use super::variable::variable;

/// The endpoint of tokens: signatures are sent only to it.
const TOKENS: &str = "oauth2.googleapis.com";
const GRANT: &str = "urn:ietf:params:oauth:grant-type:jwt-bearer";
/// Seconds that a signature is valid.
const LIFETIME: u64 = 600;
/// The variables that Google's own programs read.
const CREDENTIALS: &str = "GOOGLE_APPLICATION_CREDENTIALS";
const METADATA: &str = "GCE_METADATA_HOST";
/// Maximum bytes of the file of a service account.
const MAX_FILE: u64 = 16 << 10;

/// Gets tokens.
pub struct GcpTokens {
    /// The scope of the token of a service account with a key. The token of an instance has the instance's scopes.
    pub scope: &'static str,
    /// The file with the certificates of the authorities that may certify the endpoint.
    pub ca: Option<String>,
}

/// A token and its owner.
pub struct GcpToken {
    /// The field `Authorization`.
    pub authorization: Zeroizing<String>,
    /// The owner of the token, for errors.
    pub origin: String,
}

/// Returns whether a server is Google's server with this name, or on this machine.
pub fn is_googles(server: &KmsServer, name: &str) -> bool {
    server.name().eq_ignore_ascii_case(name) || server.is_loopback()
}

/// Returns the message of an error of an API: `{"error": {"message": ".."}}`.
pub fn message_of(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Answer {
        error: Inner,
    }
    #[derive(Deserialize)]
    struct Inner {
        message: String,
    }
    let answer: Answer = serde_json::from_slice(body).ok()?;
    Some(answer.error.message)
}

impl GcpTokens {
    /// Gets a token.
    pub fn caller(&self) -> Result<GcpToken, Error> {
        let (token, origin) = match variable(CREDENTIALS)? {
            Some(path) => {
                let account = Account::read(&path).map_err(|why| {
                    Error::Credentials(format!("the file {} of {CREDENTIALS} {why}", *path))
                })?;
                let token = account.token(self.scope, self.ca.as_deref())?;
                (token, format!("the account {}", account.client_email))
            }
            None => (instance_token()?, "the instance's service account".into()),
        };
        Ok(GcpToken {
            authorization: Zeroizing::new(format!("Bearer {}", *token)),
            origin,
        })
    }
}

/// Gets a token of the instance's service account.
fn instance_token() -> Result<Zeroizing<String>, Error> {
    let host = variable(METADATA)?;
    let url = host.map(|host| format!("http://{}", *host));
    let client = GcpClient::new(url.as_deref())
        .map_err(|error| Error::Credentials(format!("{METADATA}: {error}")))?;
    let token = client.token().map_err(|error| {
        // the metadata service of an instance that has just started may not answer yet
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

/// Why the file of a service account cannot be used. The text follows the name of the file in a sentence, and
/// contains nothing from the file.
#[derive(Debug)]
pub enum AccountError {
    /// It cannot be read.
    Unreadable(io::Error),
    /// It is not JSON of a service account.
    Malformed,
    /// It has credentials of this type; empty if the type may be anything.
    Type(String),
    /// It has no private key.
    NoKey,
    /// The key cannot sign.
    Unsigned,
}

impl fmt::Display for AccountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AccountError::Unreadable(error) => write!(f, "cannot be read: {error}"),
            AccountError::Malformed => f.write_str("is not JSON of a service account"),
            AccountError::Type(kind) => write!(
                f,
                "has credentials of another type{} than service_account",
                said(kind)
            ),
            AccountError::NoKey => f.write_str("has no private key of RSA in PEM (PKCS #8)"),
            AccountError::Unsigned => f.write_str("its private key cannot sign"),
        }
    }
}

impl std::error::Error for AccountError {}

impl Account {
    fn read(path: &str) -> Result<Account, AccountError> {
        let mut content = Zeroizing::new(Vec::with_capacity(MAX_FILE as usize + 1));
        File::open(path)
            .and_then(|file| file.take(MAX_FILE).read_to_end(&mut content))
            .map_err(AccountError::Unreadable)?;
        Account::parse(&content)
    }

    /// Parses the file.
    pub fn parse(content: &[u8]) -> Result<Account, AccountError> {
        let account: Account =
            serde_json::from_slice(content).map_err(|_| AccountError::Malformed)?;
        if account.kind != "service_account" {
            // the text of an unknown type could be a secret
            let is_type = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
            let kind = Some(&*account.kind).filter(|kind| kind.bytes().all(is_type));
            return Err(AccountError::Type(kind.unwrap_or_default().to_owned()));
        }
        account.key().map(|_| account)
    }

    fn key(&self) -> Result<RsaKeyPair, AccountError> {
        let base64 = self
            .private_key
            .split("-----")
            .skip_while(|part| *part != "BEGIN PRIVATE KEY")
            .nth(1)
            .ok_or(AccountError::NoKey)?;
        let mut der = Zeroizing::new(Vec::with_capacity(base64.len()));
        let base64: Zeroizing<String> = Zeroizing::new(base64.split_whitespace().collect());
        STANDARD
            .decode_vec(&*base64, &mut der)
            .map_err(|_| AccountError::NoKey)?;
        RsaKeyPair::from_pkcs8(&der).map_err(|_| AccountError::NoKey)
    }

    /// Gets a token in exchange for a signature (RFC 7523 §2.1).
    fn token(&self, scope: &str, ca: Option<&str>) -> Result<Zeroizing<String>, Error> {
        let fault = |why: &dyn fmt::Display| Error::Credentials(format!("{CREDENTIALS}: {why}"));
        let address = self.token_uri.strip_suffix("/token");
        let server = KmsServer::new(address.unwrap_or_default(), ca)
            .ok()
            .filter(|server| is_googles(server, TOKENS))
            .ok_or_else(|| fault(&format_args!("its token_uri is not https://{TOKENS}/token")))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.unwrap_or_default().as_secs();
        let assertion = self.assertion(scope, now).map_err(|why| fault(&why))?;
        let form = [("grant_type", GRANT), ("assertion", &**assertion)];
        oauth::token(&server, "/token", &form, &self.client_email)
    }

    /// Returns a JSON web token (RFC 7519) of this time, signed by RS256 (RFC 7518 §3.3).
    fn assertion(&self, scope: &str, now: u64) -> Result<Zeroizing<String>, AccountError> {
        let header = json!({"alg": "RS256", "typ": "JWT", "kid": self.private_key_id});
        let claims = json!({
            "iss": self.client_email,
            "scope": scope,
            // always Google's own URL, even if the endpoint is another one
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
        .map_err(|_| AccountError::Unsigned)?;
        let signature = URL_SAFE_NO_PAD.encode(signature);
        Ok(Zeroizing::new(format!("{signed}.{signature}")))
    }
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

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
            let error = error.unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        }
        for file in mutations(file.as_bytes(), 10_000) {
            let error = Account::parse(&file).err().unwrap().to_string();
            assert!(!error.contains("Tm8ga2V5") && error.len() < 1000, "{error}");
        }
    }
}
