//! A key of Azure Key Vault or of an Azure Managed HSM.
//!
//! ```text
//! kms://azure-kms?address=https://NAME.vault.azure.net&keyName=NAME[&caFile=FILE]
//! ```
//!
//! [`super::azure_credentials`] says where the token comes from.
//!
//! The key is an RSA key. The ciphertext does not contain the version of the key that encrypted it, so the stored result does:
//! `VERSION.VALUE`, as text.
//!
//! API: Azure Key Vault REST API reference, `keys`, version 7.4; Microsoft identity platform, client credentials flow.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Deserialize;
use serde_json::json;
use zeroize::{Zeroize, Zeroizing};

use base::crypto::Secret;

use super::answer::parsed;
use super::azure_credentials::{
    AzureToken, AzureTokens, CHINA_LOGIN, GOVERNMENT_LOGIN, PUBLIC_LOGIN, is_name,
};
use super::error::{Error, said};
use super::https::{KmsResponse, KmsServer};
use super::patience::patiently;
use super::service::{KeyEncryptionKey, KmsKind};
use super::uri::Query;

/// This service's entry in the table of all services.
pub const SERVICE: KmsKind = KmsKind {
    name: "azure-kms",
    parameters: PARAMETERS,
    open,
};

const PARAMETERS: &str = "address=https://NAME.vault.azure.net&keyName=NAME[&caFile=FILE]";

/// The domains of the vaults: tokens are sent only to these. For each, whether it is for Managed HSMs, and the endpoint of tokens
/// in its cloud.
const DOMAINS: [(&str, bool, &str); 6] = [
    ("vault.azure.net", false, PUBLIC_LOGIN),
    ("managedhsm.azure.net", true, PUBLIC_LOGIN),
    ("vault.usgovcloudapi.net", false, GOVERNMENT_LOGIN),
    ("managedhsm.usgovcloudapi.net", true, GOVERNMENT_LOGIN),
    ("vault.azure.cn", false, CHINA_LOGIN),
    ("managedhsm.azure.cn", true, CHINA_LOGIN),
];
const VERSION: &str = "7.4";
const ALGORITHM: &str = "RSA-OAEP-256";
/// The bits of a new key (NIST SP 800-57 part 1, table 2: a strength of 128 bits).
const SIZE: u32 = 3072;

struct Key {
    server: KmsServer,
    name: String,
    is_hsm: bool,
    callers: AzureTokens,
}

/// An operation of the API.
#[derive(Clone, Copy)]
struct Operation {
    /// The name, for errors.
    name: &'static str,
    /// The permissions that the operation needs: the end of the role's data action for a vault, the same for a Managed HSM, and the
    /// permission in an access policy.
    action: &'static str,
    hsm_action: &'static str,
    permission: &'static str,
}

const GET: Operation = Operation {
    name: "get",
    action: "read",
    hsm_action: "read/action",
    permission: "Get",
};
const CREATE: Operation = Operation {
    name: "create",
    action: "create/action",
    hsm_action: "create",
    permission: "Create",
};
const WRAP: Operation = Operation {
    name: "wrapkey",
    action: "wrap/action",
    hsm_action: "wrap/action",
    permission: "Wrap Key",
};
const UNWRAP: Operation = Operation {
    name: "unwrapkey",
    action: "unwrap/action",
    hsm_action: "unwrap/action",
    permission: "Unwrap Key",
};

fn open(mut query: Query) -> Result<Box<dyn KeyEncryptionKey>, Error> {
    let address = query.need("address")?;
    let name = query.need("keyName")?;
    let ca = query.take("caFile");
    query.finish(PARAMETERS)?;
    if !is_name(&name, 127) {
        return Err(Error::Uri(format!(
            "keyName={name} is not the name of a key: expected letters, digits and hyphens, without the version"
        )));
    }
    let server = KmsServer::new(&address, ca.as_deref())?;
    let found = DOMAINS
        .iter()
        .find(|(domain, ..)| server.is_below(domain))
        .or(server.is_loopback().then_some(&DOMAINS[0]));
    let &(domain, is_hsm, login) = found.ok_or_else(|| {
        let known = DOMAINS.map(|(domain, ..)| domain).join(", ");
        Error::Uri(format!(
            "the address {address:?} is not that of a vault, and the program sends its token only to a vault: expected https://NAME. and one of {known}"
        ))
    })?;
    Ok(Box::new(Key {
        server,
        name,
        is_hsm,
        callers: AzureTokens {
            login,
            resource: format!("https://{domain}"),
            ca,
        },
    }))
}

/// A key, as `get` describes it.
#[derive(Deserialize)]
struct Described {
    key: Jwk,
    #[serde(default)]
    attributes: Attributes,
}

#[derive(Deserialize)]
struct Jwk {
    kid: String,
    kty: String,
    #[serde(default)]
    key_ops: Vec<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Attributes {
    enabled: bool,
    exportable: bool,
}

/// The answer to an operation.
#[derive(Deserialize, Zeroize)]
#[zeroize(drop)]
struct Done {
    kid: String,
    value: String,
}

/// Checks by the answer of `get` that the key wraps; returns its version.
pub fn parse_key(host: &str, name: &str, body: &[u8]) -> Result<String, Error> {
    let Described { key, attributes } = parsed(host, GET.name, body)?;
    let version = version_of(host, name, &key.kid)?;
    let got = said(&format!("{}, {}", key.kty, key.key_ops.join(" ")));
    let does = |operation: &str| key.key_ops.iter().any(|own| own == operation);
    if !matches!(&*key.kty, "RSA" | "RSA-HSM") || !does("wrapKey") || !does("unwrapKey") {
        return Err(Error::Refused(format!(
            "{host}: the key {name} does not wrap keys{got}: expected one of the type RSA or RSA-HSM with the operations wrapKey and unwrapKey"
        )));
    }
    if !attributes.enabled {
        return Err(Error::Refused(format!(
            "{host}: the newest version of the key {name} is disabled: enable it"
        )));
    }
    if attributes.exportable {
        log::warn!(
            "{host}: the key {name} can be exported, so copies of it may exist outside this vault"
        );
    }
    Ok(version)
}

/// Parses the answer of `wrapkey`. Returns the version of the key and the wrapped value, which `unwrapkey` needs.
pub fn parse_wrapped(host: &str, name: &str, body: &[u8]) -> Result<Vec<u8>, Error> {
    let done: Done = parsed(host, WRAP.name, body)?;
    let version = version_of(host, name, &done.kid)?;
    decoded(host, WRAP, &done.value)?;
    Ok(format!("{version}.{}", done.value).into_bytes())
}

/// Parses the answer of `unwrapkey`: the key.
pub fn parse_unwrapped(host: &str, body: &[u8]) -> Result<Secret, Error> {
    let done: Done = parsed(host, UNWRAP.name, body)?;
    decoded(host, UNWRAP, &done.value).map(Secret::new)
}

/// Returns the version of a key: the last part of `https://VAULT/keys/NAME/VERSION`.
fn version_of(host: &str, name: &str, kid: &str) -> Result<String, Error> {
    let mut parts = kid.rsplit('/');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(version), Some(own), Some("keys"))
            if own.eq_ignore_ascii_case(name) && is_name(version, 64) =>
        {
            Ok(version.to_owned())
        }
        _ => Err(Error::Answer(format!(
            "{host}: the key {name} has the ID{}, which has no version",
            said(kid)
        ))),
    }
}

/// Splits what `parse_wrapped` returned into version and value.
pub fn split(wrapped: &[u8]) -> Result<(&str, &str), Error> {
    let text = std::str::from_utf8(wrapped).unwrap_or_default();
    text.split_once('.')
        .filter(|(version, value)| {
            is_name(version, 64) && URL_SAFE_NO_PAD.decode(value).is_ok_and(|v| !v.is_empty())
        })
        .ok_or_else(|| {
            Error::Format("wrappedKey is not VERSION.VALUE, as this service makes it".into())
        })
}

fn decoded(host: &str, operation: Operation, text: &str) -> Result<Vec<u8>, Error> {
    URL_SAFE_NO_PAD.decode(text).map_err(|_| {
        Error::Answer(format!(
            "{host}: the answer to {} has a value that is not base64url",
            operation.name
        ))
    })
}

impl KeyEncryptionKey for Key {
    fn prepare(&self, create: bool) -> Result<(), Error> {
        let caller = self.callers.caller()?;
        match self.newest(&caller) {
            Err(Error::Missing(_)) if create => self.create(&caller),
            other => other.map(|_| ()),
        }
    }

    fn wrap(&self, key: &Secret) -> Result<Vec<u8>, Error> {
        let caller = self.callers.caller()?;
        let version = self.newest(&caller)?;
        let value = Zeroizing::new(URL_SAFE_NO_PAD.encode(key.expose()));
        let answer = self.operate(&caller, WRAP, &version, &value)?;
        parse_wrapped(self.server.host(), &self.name, &answer.body)
    }

    fn unwrap(&self, wrapped: &[u8]) -> Result<Secret, Error> {
        let (version, value) = split(wrapped)?;
        let answer = self.operate(&self.callers.caller()?, UNWRAP, version, value)?;
        parse_unwrapped(self.server.host(), &answer.body)
    }
}

impl Key {
    /// Checks the newest version of the key, and returns it.
    fn newest(&self, caller: &AzureToken) -> Result<String, Error> {
        let path = format!("/keys/{}?api-version={VERSION}", self.name);
        let answer = self.call(caller, GET, "GET", &path, "")?;
        parse_key(self.server.host(), &self.name, &answer.body)
    }

    /// Makes the key: it wraps and unwraps, and cannot be exported.
    fn create(&self, caller: &AzureToken) -> Result<(), Error> {
        let kind = if self.is_hsm { "RSA-HSM" } else { "RSA" };
        let wanted = json!({"kty": kind, "key_size": SIZE, "key_ops": ["wrapKey", "unwrapKey"]});
        let path = format!("/keys/{}/create?api-version={VERSION}", self.name);
        let answer = self.call(caller, CREATE, "POST", &path, &wanted.to_string())?;
        parse_key(self.server.host(), &self.name, &answer.body).map(|_| ())
    }

    fn operate(
        &self,
        caller: &AzureToken,
        operation: Operation,
        version: &str,
        value: &str,
    ) -> Result<KmsResponse, Error> {
        let (name, does) = (&self.name, operation.name);
        let path = format!("/keys/{name}/{version}/{does}?api-version={VERSION}");
        let body = Zeroizing::new(json!({"alg": ALGORITHM, "value": value}).to_string());
        self.call(caller, operation, "POST", &path, &body)
    }

    /// Returns the successful answer to a request.
    fn call(
        &self,
        caller: &AzureToken,
        operation: Operation,
        method: &str,
        path: &str,
        body: &str,
    ) -> Result<KmsResponse, Error> {
        let mut fields = vec![
            ("accept", "application/json"),
            ("authorization", &**caller.authorization),
        ];
        if !body.is_empty() {
            fields.push(("content-type", "application/json"));
        }
        patiently(|| {
            let answer = self.server.send(method, path, &fields, body.as_bytes())?;
            match answer.status {
                200 => Ok(answer),
                status => {
                    let (code, message) = parse_error(&answer.body);
                    let said = said(&format!("{code}: {message}"));
                    let (host, name) = (self.server.host(), &self.name);
                    let text = format!(
                        "{host}: {} of the key {name}: status {status}{said}",
                        operation.name
                    );
                    Err(refusal(
                        status,
                        &code,
                        text,
                        operation,
                        self.is_hsm,
                        caller.origin,
                    ))
                }
            }
        })
    }
}

/// Returns the innermost code and the message of an error: `{"error": {"code", "message", "innererror": {"code"}}}`.
pub fn parse_error(body: &[u8]) -> (String, String) {
    #[derive(Deserialize)]
    struct Answer {
        error: Outer,
    }
    #[derive(Deserialize)]
    struct Outer {
        #[serde(default)]
        code: String,
        #[serde(default)]
        message: String,
        innererror: Option<Inner>,
    }
    #[derive(Deserialize)]
    struct Inner {
        code: String,
    }
    match serde_json::from_slice::<Answer>(body) {
        Ok(Answer { error }) => (
            error.innererror.map_or(error.code, |inner| inner.code),
            error.message,
        ),
        Err(_) => Default::default(),
    }
}

/// Returns the error for a status and a code (Azure Key Vault REST API error codes), with what to do.
fn refusal(
    status: u16,
    code: &str,
    text: String,
    operation: Operation,
    is_hsm: bool,
    origin: &str,
) -> Error {
    let refused = |next: &str| Error::Refused(format!("{text}; {next}"));
    match (status, code) {
        (408 | 429 | 500.., _) => Error::Busy(text),
        (401, _) => Error::Credentials(format!(
            "{text}; the vault does not accept the token of {origin}: is it of the vault's tenant?"
        )),
        (403, "ForbiddenByFirewall" | "ForbiddenByConnection") => refused(
            "the vault's firewall refuses this machine: permit its network, or give it a private endpoint",
        ),
        (403, "KeyDisabled") => refused("enable that version of the key"),
        (403, "KeyExpired" | "KeyNotYetValid") => {
            refused("make a new version of the key, or change the dates of this one")
        }
        (403, "KeyOperationForbidden") => refused(&format!(
            "the key does not permit what this needs: add {} to its operations",
            operation.name
        )),
        (403, _) => {
            let (kind, action) = if is_hsm {
                ("managedHsm", operation.hsm_action)
            } else {
                ("vaults", operation.action)
            };
            refused(&format!(
                "{origin} needs the data action Microsoft.KeyVault/{kind}/keys/{action} on the key (docs/kms.md); in a vault with access policies, the permission {:?}",
                operation.permission
            ))
        }
        (404, _) if operation.name == GET.name => Error::Missing(format!(
            "{text}; there is no such key: is it the right vault? --create-key makes a missing key"
        )),
        (409, "ObjectIsDeletedButRecoverable") => refused(
            "a deleted key has this name: recover it (az keyvault key recover), or give another name",
        ),
        (404, _) => refused(
            "there is no such key, or its version was deleted: is it the right vault? A deleted key can be recovered",
        ),
        (400, _) if operation.name == UNWRAP.name => {
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

    const KID: &str =
        "https://own.vault.azure.net/keys/firstlight/0123456789abcdef0123456789abcdef";

    fn open_uri(uri: &str) -> Result<Box<dyn KeyEncryptionKey>, Error> {
        open(super::super::uri::parse(uri, "kms://", Author::Operator)?.1)
    }

    #[test]
    fn a_token_goes_to_vaults_alone() {
        for good in [
            "https://own.vault.azure.net",
            "https://OWN.managedhsm.azure.net/",
            "https://own.vault.azure.cn:443",
            "https://127.0.0.1:8443",
            "https://[::1]:8443",
        ] {
            let uri = format!("kms://azure-kms?address={good}&keyName=firstlight");
            assert!(open_uri(&uri).is_ok(), "{good}");
        }
        for bad in [
            "https://own.vault.azure.net.example",
            "https://ownvault.azure.net",
            "https://vault.azure.net",
            "https://10.0.0.1",
            "https://localhost",
        ] {
            let uri = format!("kms://azure-kms?address={bad}&keyName=firstlight");
            let error = open_uri(&uri).err().unwrap().to_string();
            assert!(
                error.contains("the program sends its token only"),
                "{error}"
            );
        }
        let version = "kms://azure-kms?address=https://own.vault.azure.net&keyName=a/1";
        let error = open_uri(version).err().unwrap().to_string();
        assert!(error.contains("without the version"), "{error}");
    }

    #[test]
    fn each_code_says_what_to_do_and_whether_to_wait() {
        let of = |status, code: &str| refusal(status, code, "text".into(), UNWRAP, true, "ORIGIN");
        let passing = [408, 429, 500, 503].map(|status| (status, ""));
        let lasting = [
            (401, "", "token of ORIGIN"),
            (403, "ForbiddenByFirewall", "firewall"),
            (403, "KeyDisabled", "enable that version"),
            (
                403,
                "KeyOperationForbidden",
                "add unwrapkey to its operations",
            ),
            (
                403,
                "ForbiddenByRbac",
                "ORIGIN needs the data action Microsoft.KeyVault/managedHsm/keys/unwrap/action",
            ),
            (404, "KeyNotFound", "recovered"),
            (400, "BadParameter", "did not wrap this file"),
            (409, "ObjectIsDeletedButRecoverable", "recover it"),
            (405, "", "text"),
        ];
        check_refusals(of, &passing, &lasting);
    }

    #[test]
    fn a_vault_and_a_managed_hsm_have_actions_of_their_own() {
        let of = |status, operation, is_hsm| {
            refusal(status, "", "text".into(), operation, is_hsm, "ORIGIN")
        };
        for (operation, vault, hsm) in [
            (GET, "vaults/keys/read ", "managedHsm/keys/read/action "),
            (
                CREATE,
                "vaults/keys/create/action ",
                "managedHsm/keys/create ",
            ),
            (
                WRAP,
                "vaults/keys/wrap/action ",
                "managedHsm/keys/wrap/action ",
            ),
        ] {
            for (is_hsm, expected) in [(false, vault), (true, hsm)] {
                let said = of(403, operation, is_hsm).to_string();
                assert!(said.contains(expected), "{said}");
            }
        }
        let missing = of(404, GET, false);
        assert!(matches!(&missing, Error::Missing(why) if why.contains("--create-key")));
    }

    #[test]
    fn answers_are_read_or_refused_and_never_shown() {
        let version = &KID[KID.len() - 32..];
        let described = format!(
            r#"{{"key":{{"kid":"{KID}","kty":"RSA","key_ops":["wrapKey","unwrapKey"],"n":"AQAB","e":"AQAB"}},"attributes":{{"enabled":true,"exportable":false}}}}"#
        );
        let done =
            format!(r#"{{"kid":"{KID}","value":"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE"}}"#);
        let (described, done) = (described.as_bytes(), done.as_bytes());
        assert_eq!(parse_key("h", "firstlight", described).unwrap(), version);
        let wrapped = parse_wrapped("h", "firstlight", done).unwrap();
        assert_eq!(split(&wrapped).unwrap().0, version);
        assert_eq!(parse_unwrapped("h", done).unwrap().expose(), [1; 32]);
        assert!(parse_wrapped("h", "another", done).is_err());
        for (from, to, expected) in [
            ("RSA", "EC", "does not wrap keys (EC, wrapKey unwrapKey)"),
            ("\"unwrapKey\"", "\"sign\"", "does not wrap keys"),
            ("true", "false", "is disabled"),
            ("/firstlight/", "/firstlight", "has no version"),
        ] {
            let other = String::from_utf8_lossy(described).replace(from, to);
            let error = parse_key("h", "firstlight", other.as_bytes()).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
        for body in mutations(done, 10_000) {
            if let Err(error) = parse_unwrapped("h", &body) {
                assert!(!error.to_string().contains("AQEBAQ"), "{error}");
            }
            let _ = parse_wrapped("h", "firstlight", &body);
        }
        for body in mutations(described, 10_000) {
            if let Err(error) = parse_key("h", "firstlight", &body) {
                assert!(error.to_string().len() < 1000);
            }
        }
        for wrapped in mutations(&wrapped, 5000) {
            let _ = split(&wrapped);
        }
        let error = br#"{"error":{"code":"Forbidden","message":"Caller is not authorized","innererror":{"code":"ForbiddenByRbac"}}}"#;
        let (code, message) = parse_error(error);
        assert_eq!(
            (&*code, &*message),
            ("ForbiddenByRbac", "Caller is not authorized")
        );
        for body in mutations(error, 5000) {
            let _ = parse_error(&body);
        }
    }
}
