//! A key of the transit engine of Vault or OpenBao.
//!
//! ```text
//! kms://vault?address=https://HOST:PORT&keyName=NAME[&mount=transit][&namespace=NS][&role=ROLE[&authMount=kubernetes]][&caFile=FILE]
//! ```
//!
//! The token is that of the variables `VAULT_TOKEN` or `BAO_TOKEN`, as in Vault's own program. Without them, a pod whose URI has
//! `role` logs in as its service account (auth method Kubernetes), by a token whose audience is Vault. Elsewhere the token is the
//! content of `~/.vault-token`. So the operator, who wraps, and the key service can use the same URI.
//!
//! The unknown author of a wrapped master secret's file has chosen the address in it. A token is sent to this address only if the
//! operator has named it too, in `VAULT_ADDR` or `BAO_ADDR`.
//!
//! API: Vault's documentation, "Transit secrets engine" and "Kubernetes auth method". Paths begin with `/v1/`.

use std::path::Path;
use std::{env, fs};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use zeroize::{Zeroize, Zeroizing};

use base::crypto::Secret;

use super::answer::parsed;
use super::error::{self, Error};
use super::https::{KmsResponse, KmsServer};
use super::named;
use super::service::{KeyEncryptionKey, KmsKind};
use super::uri::Query;

/// This service's entry in the table of all services.
pub const SERVICE: KmsKind = KmsKind {
    name: "vault",
    parameters: PARAMETERS,
    open,
};

const PARAMETERS: &str = "address=https://HOST:PORT&keyName=NAME[&mount=PATH][&namespace=NAME][&role=NAME][&authMount=PATH][&caFile=FILE]";

/// Where the engines are mounted unless the URI says otherwise.
const TRANSIT: &str = "transit";
const KUBERNETES: &str = "kubernetes";
/// The token of a pod's service account for Vault: its audience is the chart's `keyService.kms.audience`, so the API server refuses it.
const POD_TOKEN: &str = "/var/run/secrets/vault/token";
/// Variables with the address of the server.
pub const ADDRESS: [&str; 2] = ["VAULT_ADDR", "BAO_ADDR"];
/// The variables, and the file in the home folder, that contain a token.
const TOKEN_VARIABLES: [&str; 2] = ["VAULT_TOKEN", "BAO_TOKEN"];
const TOKEN_FILE: &str = ".vault-token";
/// Maximum bytes of a token.
const MAX_TOKEN: usize = 8 << 10;
/// Additional data of each encryption, so that a ciphertext that another program made with the same key is refused.
const CONTEXT: &[u8] = b"firstlight master secret";

struct Transit {
    server: KmsServer,
    mount: String,
    key: String,
    namespace: Option<String>,
    login: Option<Login>,
}

/// How a pod logs in.
struct Login {
    mount: String,
    role: String,
}

fn open(mut query: Query) -> Result<Box<dyn KeyEncryptionKey>, Error> {
    let address = query.need("address")?;
    let key = query.path("keyName")?;
    let key = key.ok_or_else(|| Error::Uri("the parameter keyName is missing".into()))?;
    let mount = query.path("mount")?.unwrap_or_else(|| TRANSIT.into());
    let namespace = query.path("namespace")?;
    let auth_mount = query.path("authMount")?;
    let login = query.take("role").map(|role| Login {
        mount: auth_mount.unwrap_or_else(|| KUBERNETES.into()),
        role,
    });
    let ca = query.take("caFile");
    let author = query.author;
    query.finish(PARAMETERS)?;
    let server = KmsServer::new(&address, ca.as_deref())?;
    named::check(&server, author, &ADDRESS)?;
    Ok(Box::new(Transit {
        server,
        mount,
        key,
        namespace,
        login,
    }))
}

/// The JSON object around every answer.
#[derive(Deserialize)]
struct Data<T> {
    data: T,
}

#[derive(Deserialize)]
struct Encrypted {
    ciphertext: String,
}

#[derive(Deserialize, Zeroize)]
#[zeroize(drop)]
struct Decrypted {
    plaintext: String,
}

#[derive(Deserialize)]
struct Key {
    supports_encryption: bool,
    supports_decryption: bool,
    exportable: bool,
    allow_plaintext_backup: bool,
}

impl KeyEncryptionKey for Transit {
    fn prepare(&self, create: bool) -> Result<(), Error> {
        let token = self.token()?;
        let path = self.path("keys");
        let answer = self.send(&token, "GET", &path, &[])?;
        let key: Data<Key> = match answer.status {
            // for a missing key Vault sends no message; for a missing engine it sends one about a route
            404 if !said(&answer.body).is_empty() => self.answer(&answer, "GET", &path)?,
            404 if create => {
                let wanted = json!({"type": "aes256-gcm96"}).to_string();
                let made = self.send(&token, "POST", &path, wanted.as_bytes())?;
                self.check(&made, "POST", &path)?;
                self.answer(&self.send(&token, "GET", &path, &[])?, "GET", &path)?
            }
            404 => {
                return Err(Error::Missing(format!(
                    "{}: there is no key {path}; make it, or have it made by --create-key",
                    self.server.host()
                )));
            }
            _ => self.answer(&answer, "GET", &path)?,
        };
        let key = key.data;
        if !key.supports_encryption || !key.supports_decryption {
            return Err(Error::Refused(format!(
                "{}: the key {path} does not encrypt: expected one of type aes256-gcm96",
                self.server.host()
            )));
        }
        if key.exportable || key.allow_plaintext_backup {
            log::warn!(
                "{}: the key {path} can be exported, so copies of it may exist outside this service",
                self.server.host()
            );
        }
        Ok(())
    }

    fn wrap(&self, key: &Secret) -> Result<Vec<u8>, Error> {
        let plaintext = Zeroizing::new(STANDARD.encode(key.expose()));
        let body = Zeroizing::new(
            json!({"plaintext": *plaintext, "associated_data": STANDARD.encode(CONTEXT)})
                .to_string(),
        );
        let path = self.path("encrypt");
        let answer = self.send(&self.token()?, "POST", &path, body.as_bytes())?;
        let encrypted: Data<Encrypted> = self.answer(&answer, "POST", &path)?;
        Ok(encrypted.data.ciphertext.into_bytes())
    }

    fn unwrap(&self, wrapped: &[u8]) -> Result<Secret, Error> {
        let ciphertext = std::str::from_utf8(wrapped)
            .map_err(|_| Error::Format("wrappedKey was not made by this service".into()))?;
        let body = json!({"ciphertext": ciphertext, "associated_data": STANDARD.encode(CONTEXT)});
        let path = self.path("decrypt");
        let body = body.to_string();
        let answer = self.send(&self.token()?, "POST", &path, body.as_bytes())?;
        let decrypted: Data<Decrypted> = self.answer(&answer, "POST", &path)?;
        let plain = STANDARD.decode(&decrypted.data.plaintext);
        plain.map(Secret::new).map_err(|_| {
            Error::Answer(format!(
                "{}: the plaintext is not base64",
                self.server.host()
            ))
        })
    }
}

impl Transit {
    fn path(&self, operation: &str) -> String {
        format!("{}/{operation}/{}", self.mount, self.key)
    }

    fn token(&self) -> Result<Zeroizing<String>, Error> {
        if let Some(token) = token_of_variable()? {
            return Ok(token);
        }
        let pod = Path::new(POD_TOKEN);
        let Some(Login { mount, role }) = self.login.as_ref().filter(|_| pod.exists()) else {
            return token_of_home();
        };
        let jwt = read_token(pod)?;
        let path = format!("auth/{mount}/login");
        let body = Zeroizing::new(json!({"role": role, "jwt": *jwt}).to_string());
        #[derive(Deserialize)]
        struct LoggedIn {
            auth: Auth,
        }
        #[derive(Deserialize, Zeroize)]
        #[zeroize(drop)]
        struct Auth {
            client_token: String,
        }
        let answer = self.send("", "POST", &path, body.as_bytes())?;
        let logged_in: LoggedIn = self.answer(&answer, "POST", &path)?;
        Ok(Zeroizing::new(logged_in.auth.client_token.clone()))
    }

    fn send(
        &self,
        token: &str,
        method: &str,
        path: &str,
        body: &[u8],
    ) -> Result<KmsResponse, Error> {
        // Vault can require this field, so that a web page cannot make a browser send such a request
        let mut fields = vec![("X-Vault-Request", "true")];
        if !token.is_empty() {
            fields.push(("X-Vault-Token", token));
        }
        if let Some(namespace) = &self.namespace {
            fields.push(("X-Vault-Namespace", namespace));
        }
        if !body.is_empty() {
            fields.push(("Content-Type", "application/json"));
        }
        self.server
            .send(method, &format!("/v1/{path}"), &fields, body)
    }

    fn answer<T: DeserializeOwned>(
        &self,
        answer: &KmsResponse,
        method: &str,
        path: &str,
    ) -> Result<T, Error> {
        self.check(answer, method, path)?;
        let operation = format!("{method} {path}");
        parsed(self.server.host(), &operation, &answer.body)
    }

    /// Makes an error of a status other than success. The error says what to do.
    fn check(&self, answer: &KmsResponse, method: &str, path: &str) -> Result<(), Error> {
        let host = self.server.host();
        if matches!(answer.status, 200 | 204) {
            return Ok(());
        }
        let said = said(&answer.body);
        let text = format!("{host}: {method} {path}: status {}{said}", answer.status);
        Err(match answer.status {
            429 | 472 | 473 | 500 | 502 | 503 | 504 => Error::Away(if said.contains("sealed") {
                format!("{text}; unseal it")
            } else {
                text
            }),
            400 | 403 if self.login.is_some() && path.starts_with("auth/") => {
                Error::Refused(format!(
                    "{text}; the role must allow this pod's service account, and have the audience of its token (docs/kms.md)"
                ))
            }
            403 => {
                let capability = match (method, path.contains("/keys/")) {
                    ("GET", _) => "read",
                    (_, true) => "create",
                    _ => "update",
                };
                Error::Refused(format!(
                    "{text}; the token needs the capability {capability:?} on {path}"
                ))
            }
            404 => Error::Refused(format!("{text}; is the transit engine mounted there?")),
            _ => Error::Refused(text),
        })
    }
}

/// Returns the messages in the service's answer: `{"errors": [..]}`.
fn said(body: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Errors {
        errors: Vec<String>,
    }
    let errors: Errors = match serde_json::from_slice(body) {
        Ok(errors) => errors,
        Err(_) => return String::new(),
    };
    error::said(&errors.errors.join("; "))
}

fn token_of_variable() -> Result<Option<Zeroizing<String>>, Error> {
    for variable in TOKEN_VARIABLES {
        if let Ok(token) = env::var(variable) {
            let token =
                valid(token).map_err(|why| Error::Credentials(format!("{variable} {why}")))?;
            return Ok(Some(token));
        }
    }
    Ok(None)
}

fn token_of_home() -> Result<Zeroizing<String>, Error> {
    let file = env::home_dir().map(|home| home.join(TOKEN_FILE));
    let missing = || {
        Error::Credentials(format!(
            "there is no token: set {}, or log in so that ~/{TOKEN_FILE} exists, or, in a pod, name a role in the key URI",
            TOKEN_VARIABLES.join(" or ")
        ))
    };
    let file = file.filter(|file| file.exists()).ok_or_else(missing)?;
    read_token(&file)
}

fn read_token(file: &Path) -> Result<Zeroizing<String>, Error> {
    let text = fs::read_to_string(file)
        .map_err(|error| Error::Credentials(format!("cannot read {}: {error}", file.display())))?;
    valid(text).map_err(|why| Error::Credentials(format!("{} {why}", file.display())))
}

/// Checks that a token can be a header field.
fn valid(text: String) -> Result<Zeroizing<String>, &'static str> {
    let text = Zeroizing::new(text);
    let token = text.trim();
    match token.len() {
        0 => Err("is empty"),
        MAX_TOKEN.. => Err("is too long for a token"),
        _ if !token.bytes().all(|b| b.is_ascii_graphic()) => Err("is not a token"),
        _ => Ok(Zeroizing::new(token.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::super::uri::Author;
    use super::*;

    fn open_uri(uri: &str) -> Result<Box<dyn KeyEncryptionKey>, Error> {
        open(super::super::uri::parse(uri, "kms://", Author::Operator)?.1)
    }

    #[test]
    fn a_key_uri_says_all_but_the_credentials() {
        let full = "kms://vault?address=https://vault:8200&keyName=firstlight&mount=kms/transit&namespace=team&role=key-service&authMount=k8s";
        assert!(open_uri(full).is_ok());
        for (bad, expected) in [
            ("kms://vault?keyName=a", "address is missing"),
            ("kms://vault?address=https://a", "keyName is missing"),
            (
                "kms://vault?address=http://a&keyName=a",
                "does not begin with https://",
            ),
            (
                "kms://vault?address=https://a&keyName=../sys",
                "keyName is not a path",
            ),
            (
                "kms://vault?address=https://a&keyName=a&token=b",
                "\"token\" is unknown",
            ),
        ] {
            let error = open_uri(bad).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn an_address_out_of_a_file_is_refused_before_a_token_is_looked_for() {
        let uri = "kms://vault?address=https://vault.example:8200&keyName=firstlight";
        let query = super::super::uri::parse(uri, "kms://", Author::File)
            .unwrap()
            .1;
        let error = open(query).err().unwrap().to_string();
        let expected = "set VAULT_ADDR=https://vault.example:8200";
        assert!(error.contains(expected), "{error}");
    }

    #[test]
    fn what_the_service_says_is_shortened_and_stays_on_its_line() {
        assert_eq!(
            said(br#"{"errors":["1 error occurred:\n\t* permission denied\n\n"]}"#),
            " (1 error occurred: * permission denied)"
        );
        assert_eq!(said(br#"{"errors":[]}"#), "");
        assert_eq!(said(b"<html>"), "");
        let long = format!(r#"{{"errors":["{}"]}}"#, "x".repeat(5000));
        assert_eq!(said(long.as_bytes()).len(), error::SHOWN + 3);
    }

    #[test]
    fn a_token_is_one_word() {
        assert_eq!(valid("hvs.abc\n".into()).unwrap().as_str(), "hvs.abc");
        for bad in ["", "\n", "a b", "a\nb", "ä"] {
            assert!(valid(bad.into()).is_err());
        }
    }
}
