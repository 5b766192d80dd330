//! Google Cloud KMS: `gcp_kms.py` serves its API, and Google's own client checks this server.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Mutex;

use super::{
    Env, Peer, check_same_keys, key_service, replace_wrapped_key, text, unwrap, workspace, wrap,
};

pub const CREDENTIALS: &str = "GOOGLE_APPLICATION_CREDENTIALS";

pub struct Service {
    pub peer: Mutex<Peer>,
    pub url: String,
    keys: String,
    pub metadata: String,
    pub folder: PathBuf,
}

impl Service {
    /// Starts the service.
    pub fn start() -> Service {
        Service::of(Peer::python("gcp_kms.py"))
    }

    /// Starts the service and, with its tokens, a storage service.
    pub fn with_storage() -> Service {
        let program = support::foreign::go_program("gcs_go", env!("CARGO_TARGET_TMPDIR"));
        let env = [("STORAGE", program.to_str().unwrap())];
        Service::of(Peer::python_with("gcp_kms.py", &env))
    }

    fn of(peer: Peer) -> Service {
        let found = |name: &str| text(&peer.found[name]).to_owned();
        for (role, account) in peer.found["accounts"].as_object().unwrap() {
            let path = peer.folder.path().join(role);
            fs::write(&path, account.to_string()).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        }
        Service {
            url: found("url"),
            keys: found("keys"),
            metadata: found("metadata"),
            folder: peer.folder.path().to_owned(),
            peer: Mutex::new(peer),
        }
    }

    pub fn uri(&self, key: &str) -> String {
        let (url, keys, folder) = (&self.url, &self.keys, self.folder.display());
        format!("kms://gcp-kms?keyName={keys}/{key}&endpoint={url}&caFile={folder}/ca.pem")
    }

    /// Returns the path of an account's file.
    pub fn account(&self, role: &str) -> String {
        self.folder.join(role).to_str().unwrap().to_owned()
    }

    fn found(&self, name: &str) -> String {
        text(&self.peer.lock().unwrap().found[name]).to_owned()
    }
}

#[test]
fn a_key_of_the_service_gives_the_same_keys_with_the_roles_of_the_docs() {
    let (service, dir) = (Service::start(), workspace());
    let account = service.account("operator");
    let operator = [(CREDENTIALS, &*account)];
    wrap(dir.path(), &operator, &service.uri("firstlight"), &[]).unwrap();
    unwrap(dir.path(), &operator).unwrap();
    // the account of the instance, and one with a file
    let instance = [("GCE_METADATA_HOST", &*service.metadata)];
    check_same_keys(dir.path(), &instance);
    service.peer.lock().unwrap().ask("firstlight");
    let account = service.account("key-service");
    check_same_keys(dir.path(), &[(CREDENTIALS, &account)]);
}

#[test]
fn a_missing_key_is_made_with_the_role_of_the_docs() {
    let (service, dir) = (Service::start(), workspace());
    let account = service.account("creator");
    let creator = [(CREDENTIALS, &*account)];
    let uri = service.uri("made");
    let said = wrap(dir.path(), &creator, &uri, &[]).unwrap_err();
    assert!(said.contains("--create-key makes a missing key"), "{said}");
    let elsewhere = uri.replace("keyRings/ring", "keyRings/other");
    let said = wrap(dir.path(), &creator, &elsewhere, &["--create-key"]).unwrap_err();
    assert!(said.contains("KeyRing projects/own"), "{said}");
    wrap(dir.path(), &creator, &uri, &["--create-key"]).unwrap();
    check_same_keys(dir.path(), &[("GCE_METADATA_HOST", &*service.metadata)]);
    // the key is there now, and is used
    let (account, dir) = (service.account("operator"), workspace());
    let operator = [(CREDENTIALS, &*account)];
    wrap(dir.path(), &operator, &uri, &["--create-key"]).unwrap();
    unwrap(dir.path(), &operator).unwrap();
}

#[test]
fn each_refusal_names_what_is_missing() {
    let (service, dir) = (Service::start(), workspace());
    let account = service.account("operator");
    let operator = [(CREDENTIALS, &*account)];
    let refused = |env: Env<'_>, key: &str, more: &[&str], expected: &str| {
        let said = wrap(dir.path(), env, &service.uri(key), more).unwrap_err();
        assert!(said.contains(expected), "{expected}: {said}");
        assert!(!said.contains("PRIVATE KEY"), "{said}");
    };
    refused(&operator, "missing", &[], "right project, location");
    refused(
        &operator,
        "missing",
        &["--create-key"],
        "operator@own.iam.gserviceaccount.com needs the permission cloudkms.cryptoKeys.create",
    );
    refused(
        &operator,
        "signing",
        &[],
        "does not encrypt symmetrically (ASYMMETRIC_SIGN)",
    );
    refused(
        &operator,
        "disabled",
        &[],
        "no primary version that is enabled",
    );
    refused(&operator, "bent", &[], "a checksum is wrong");
    let other = service.account("key-service");
    refused(
        &[(CREDENTIALS, &other)],
        "firstlight",
        &[],
        "key-service@own.iam.gserviceaccount.com needs the permission cloudkms.cryptoKeys.get",
    );
    // an account with the key of another one
    let stolen = fs::read_to_string(&other).unwrap();
    let forged = service.account("forged");
    fs::write(&forged, stolen.replace("key-service", "operator")).unwrap();
    refused(
        &[(CREDENTIALS, &forged)],
        "firstlight",
        &[],
        "Invalid JWT Signature",
    );
    let elsewhere = stolen.replace(&service.url, "https://tokens.example");
    fs::write(&forged, elsewhere).unwrap();
    refused(
        &[(CREDENTIALS, &forged)],
        "firstlight",
        &[],
        "its token_uri is not https://oauth2.googleapis.com/token",
    );
    refused(
        &[(CREDENTIALS, "/nonexistent")],
        "firstlight",
        &[],
        "the file /nonexistent of GOOGLE_APPLICATION_CREDENTIALS cannot be read",
    );

    wrap(dir.path(), &operator, &service.uri("firstlight"), &[]).unwrap();
    for name in ["ofOtherKey", "ofOtherContext"] {
        replace_wrapped_key(dir.path(), &service.found(name));
        let said = unwrap(dir.path(), &operator).unwrap_err();
        assert!(said.contains("this key did not wrap this file"), "{said}");
    }
}

#[test]
fn the_key_service_waits_for_the_metadata_server() {
    let (service, dir) = (Service::start(), workspace());
    let account = service.account("operator");
    let uri = service.uri("firstlight");
    wrap(dir.path(), &[(CREDENTIALS, &account)], &uri, &[]).unwrap();
    let nobody = [("GCE_METADATA_HOST", "127.0.0.1:1")];
    let waiting = key_service(dir.path(), &nobody, &["--master-secret", "wrapped.json"]);
    waiting.expect("there are no credentials");
    waiting.expect("trying again in");
}
