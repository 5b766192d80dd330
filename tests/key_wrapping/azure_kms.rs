//! Azure Key Vault: `azure_kms.py` serves its API, and Azure's own clients check this server.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    Env, Peer, check_same_keys, key_service, replace_wrapped_key, text, unwrap, workspace, wrap,
};

pub struct Vault(pub Peer);

impl Vault {
    fn start() -> Vault {
        Vault(Peer::python("azure_kms.py"))
    }

    /// Starts the vault and, with its tokens, a storage account.
    pub fn with_storage() -> Vault {
        let azurite = support::foreign::fetched("azurite.sh");
        let env = [("AZURITE", azurite.to_str().unwrap())];
        Vault(Peer::python_with("azure_kms.py", &env))
    }

    pub fn uri(&self, key: &str) -> String {
        let (url, folder) = (text(&self.0.found["url"]), self.0.folder.path().display());
        format!("kms://azure-kms?address={url}&keyName={key}&caFile={folder}/ca.pem")
    }

    /// Returns the environment of an application with this role.
    pub fn application(&self, role: &str) -> [(&str, &str); 4] {
        let found = &self.0.found;
        let caller = &found["callers"][role];
        [
            ("AZURE_AUTHORITY_HOST", text(&found["url"])),
            ("AZURE_TENANT_ID", text(&found["tenant"])),
            ("AZURE_CLIENT_ID", text(&caller["clientId"])),
            ("AZURE_CLIENT_SECRET", text(&caller["secret"])),
        ]
    }

    /// Returns the environment of a machine that has an identity with this role, and others.
    pub fn identity(&self, role: &str) -> [(&str, &str); 2] {
        let found = &self.0.found;
        [
            ("AZURE_POD_IDENTITY_AUTHORITY_HOST", text(&found["imds"])),
            ("AZURE_CLIENT_ID", text(&found["callers"][role]["clientId"])),
        ]
    }
}

/// Returns the version of the key, and the value, which the file has.
fn wrapped_key(dir: &Path) -> (String, String) {
    let file = fs::read(dir.join("wrapped.json")).unwrap();
    let file: Value = serde_json::from_slice(&file).unwrap();
    let wrapped = STANDARD.decode(text(&file["wrappedKey"])).unwrap();
    let wrapped = String::from_utf8(wrapped).unwrap();
    let (version, value) = wrapped.split_once('.').unwrap();
    (version.to_owned(), value.to_owned())
}

#[test]
fn a_key_of_the_vault_gives_the_same_keys_with_the_roles_of_the_docs() {
    let (mut vault, dir) = (Vault::start(), workspace());
    let uri = vault.uri("firstlight");
    wrap(dir.path(), &vault.application("operator"), &uri, &[]).unwrap();
    let file = fs::read_to_string(dir.path().join("wrapped.json")).unwrap();
    for (name, value) in vault.application("operator") {
        assert!(name.ends_with("HOST") || !file.contains(value), "{name}");
    }
    check_same_keys(dir.path(), &vault.identity("key-service"));
    // a new version of the key still unwraps a secret that the old version wrapped
    let (old, _) = wrapped_key(dir.path());
    let new = vault.0.ask("rotate firstlight");
    unwrap(dir.path(), &vault.application("operator")).unwrap();
    check_same_keys(dir.path(), &vault.application("key-service"));
    let dir = workspace();
    wrap(dir.path(), &vault.identity("operator"), &uri, &[]).unwrap();
    assert!(wrapped_key(dir.path()).0 == new && old != new);

    // the client secret in a file
    let file = dir.path().join("secret");
    let mut env = vault.application("operator");
    fs::write(&file, format!("{}\n", env[3].1)).unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    env[3] = ("AZURE_CLIENT_SECRET_FILE", file.to_str().unwrap());
    unwrap(dir.path(), &env).unwrap();
}

#[test]
fn a_missing_key_is_made_with_the_role_of_the_docs() {
    let (vault, dir) = (Vault::start(), workspace());
    let uri = vault.uri("made");
    let creator = vault.application("creator");
    let said = wrap(dir.path(), &creator, &uri, &[]).unwrap_err();
    assert!(said.contains("--create-key makes a missing key"), "{said}");
    wrap(dir.path(), &creator, &uri, &["--create-key"]).unwrap();
    let (first, _) = wrapped_key(dir.path());
    check_same_keys(dir.path(), &vault.identity("key-service"));
    // the key is there now, and is used
    let operator = vault.application("operator");
    let dir = workspace();
    wrap(dir.path(), &operator, &uri, &["--create-key"]).unwrap();
    assert_eq!(wrapped_key(dir.path()).0, first);
}

/// Starts a vault, and wraps a master secret with its key.
fn wrapped() -> (Vault, TempDir) {
    let (vault, dir) = (Vault::start(), workspace());
    let (operator, uri) = (vault.application("operator"), vault.uri("firstlight"));
    wrap(dir.path(), &operator, &uri, &[]).unwrap();
    (vault, dir)
}

#[test]
fn each_refusal_names_what_is_missing() {
    let (mut vault, dir) = wrapped();
    vault.0.ask("disable firstlight");
    let said = unwrap(dir.path(), &vault.application("operator")).unwrap_err();
    assert!(said.contains("enable that version of the key"), "{said}");
    vault.0.ask("enable firstlight");

    let vault = vault;
    let operator = vault.application("operator");
    let refused = |env: Env<'_>, key: &str, more: &[&str], expected: &str| {
        let said = wrap(dir.path(), env, &vault.uri(key), more).unwrap_err();
        assert!(said.contains(expected), "{expected}: {said}");
        assert!(!said.contains(text(&vault.0.found["callers"]["operator"]["secret"])));
    };
    refused(&operator, "missing", &[], "there is no such key");
    refused(
        &operator,
        "missing",
        &["--create-key"],
        "needs the data action Microsoft.KeyVault/vaults/keys/create/action",
    );
    refused(
        &vault.application("creator"),
        "deleted",
        &["--create-key"],
        "a deleted key has this name",
    );
    refused(
        &operator,
        "signing",
        &[],
        "does not wrap keys (RSA, sign verify)",
    );
    refused(&operator, "disabled", &[], "is disabled: enable it");
    refused(
        &vault.application("key-service"),
        "firstlight",
        &[],
        "the application of AZURE_CLIENT_ID needs the data action Microsoft.KeyVault/vaults/keys/read",
    );
    let mut forged = operator;
    forged[3].1 = "another";
    refused(&forged, "firstlight", &[], "Invalid client secret");
    let mut forged = operator;
    forged[1].1 = "another.example";
    refused(&forged, "firstlight", &[], "Tenant not found");
    refused(
        &operator[..3],
        "firstlight",
        &[],
        "only some of AZURE_TENANT_ID",
    );
    refused(
        &vault.identity("operator")[..1],
        "firstlight",
        &[],
        "if it has several, name one by AZURE_CLIENT_ID",
    );
    let elsewhere = "kms://azure-kms?address=https://vault.example&keyName=firstlight";
    let said = wrap(dir.path(), &operator, elsewhere, &[]).unwrap_err();
    assert!(said.contains("the program sends its token only"), "{said}");

    // a secret that another key wrapped
    let (version, value) = wrapped_key(dir.path());
    let (of_other, other) = (
        &vault.0.found["ofOtherKey"],
        &vault.0.found["ofOtherVersion"],
    );
    let replace = |text: String| replace_wrapped_key(dir.path(), &STANDARD.encode(text));
    let fails = |expected: &str| {
        let said = unwrap(dir.path(), &operator).unwrap_err();
        assert!(said.contains(expected), "{said}");
    };
    replace(format!("{version}.{}", text(of_other)));
    fails("this key did not wrap this file");
    replace(format!("{}.{value}", text(other)));
    fails("its version was deleted");
    replace(format!("../{version}.{value}"));
    fails("is not VERSION.VALUE");
}

#[test]
fn the_key_service_waits_for_the_vault_and_for_tokens() {
    let (vault, dir) = wrapped();
    let secret = ["--master-secret", "wrapped.json"];
    let no_imds = [("AZURE_POD_IDENTITY_AUTHORITY_HOST", "http://127.0.0.1:1")];
    let without = key_service(dir.path(), &no_imds, &secret);
    without.expect("there are no credentials");
    without.expect("trying again in");
    let path = dir.path().join("wrapped.json");
    let mut file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let away = text(&file["kms"]).replace(text(&vault.0.found["url"]), "https://127.0.0.1:1");
    file["kms"] = json!(away);
    fs::write(&path, file.to_string()).unwrap();
    let waiting = key_service(dir.path(), &vault.identity("key-service"), &secret);
    waiting.expect("127.0.0.1:1");
    waiting.expect("trying again in");
}
