//! KMIP: PyKMIP serves it, and its own client makes the keys.

use std::fs;
use std::path::PathBuf;

use super::{
    Env, Peer, check_same_keys, key_service, replace_wrapped_key, text, unwrap, workspace, wrap,
};

/// PyKMIP's server.
pub(super) struct Service {
    pub(super) peer: Peer,
    folder: PathBuf,
}

impl Service {
    pub(super) fn start() -> Service {
        let peer = Peer::python("kmip_server.py");
        Service {
            folder: peer.folder.path().to_owned(),
            peer,
        }
    }

    pub(super) fn uri(&self, key: &str) -> String {
        let key = self.peer.found["keys"][key].as_str().unwrap_or(key);
        let address = text(&self.peer.found["address"]);
        let folder = self.folder.display();
        format!("kms://kmip?address={address}&keyId={key}&caFile={folder}/ca.pem")
    }

    /// Returns the variables of a client.
    pub(super) fn client(&self, name: &str) -> [(&'static str, String); 2] {
        let file = |end| format!("{}/{name}.{end}", self.folder.display());
        [
            ("KMIP_CLIENT_CERTIFICATE", file("pem")),
            ("KMIP_CLIENT_KEY", file("key")),
        ]
    }
}

pub(super) fn env<'a>(variables: &'a [(&'static str, String); 2]) -> [(&'static str, &'a str); 2] {
    [0, 1].map(|i| (variables[i].0, &*variables[i].1))
}

#[test]
fn a_key_of_the_server_gives_the_same_keys_in_each_version() {
    let (mut service, dir) = (Service::start(), workspace());
    let operator = service.client("operator");
    for versions in ["2.0,1.4", "1.4"] {
        service.peer.ask(&format!("versions {versions}"));
        let _ = fs::remove_file(dir.path().join("wrapped.json"));
        wrap(dir.path(), &env(&operator), &service.uri("firstlight"), &[]).unwrap();
        unwrap(dir.path(), &env(&operator)).unwrap();
        check_same_keys(dir.path(), &env(&operator));
    }
}

#[test]
fn each_refusal_names_what_is_missing() {
    let (mut service, dir) = (Service::start(), workspace());
    let operator = service.client("operator");
    let refused = |env: Env<'_>, uri: &str, more: &[&str], expected: &str| {
        let said = wrap(dir.path(), env, uri, more).unwrap_err();
        assert!(said.contains(expected), "{expected}: {said}");
        assert!(!dir.path().join("wrapped.json").exists());
    };
    let own = service.uri("firstlight");
    refused(
        &[],
        &own,
        &[],
        "KMIP_CLIENT_CERTIFICATE and KMIP_CLIENT_KEY name the files",
    );
    refused(
        &env(&operator),
        &own,
        &["--create-key"],
        "--create-key makes no keys by KMIP",
    );
    refused(
        &env(&operator),
        &service.uri("99"),
        &[],
        "there is no key 99",
    );
    refused(
        &env(&operator),
        &service.uri("inactive"),
        &[],
        "does not permit Encrypt with the key",
    );
    refused(
        &env(&operator),
        &service.uri("signing"),
        &[],
        "The Encrypt bit must be set",
    );
    let stranger = service.client("stranger");
    refused(
        &env(&stranger),
        &own,
        &[],
        "does not permit Encrypt with the key",
    );
    // a client of another authority, and a server of one
    let foreign = service.client("foreign");
    refused(
        &env(&foreign),
        &own,
        &[],
        "name the client's certificate and key",
    );
    let other = own.replace("/ca.pem", "/clients.pem");
    refused(
        &env(&operator),
        &other,
        &[],
        "caFile the server's authorities",
    );
    service.peer.ask("versions 1.2");
    refused(&env(&operator), &own, &[], "1.4");
}

#[test]
fn another_key_does_not_open_the_file_and_a_server_that_is_away_is_waited_for() {
    let (mut service, dir) = (Service::start(), workspace());
    let operator = service.client("operator");
    wrap(dir.path(), &env(&operator), &service.uri("another"), &[]).unwrap();
    let path = dir.path().join("wrapped.json");
    let file: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let of_another = text(&file["wrappedKey"]).to_owned();
    fs::remove_file(&path).unwrap();
    wrap(dir.path(), &env(&operator), &service.uri("firstlight"), &[]).unwrap();
    let own = fs::read(&path).unwrap();
    replace_wrapped_key(dir.path(), &of_another);
    let said = unwrap(dir.path(), &env(&operator)).unwrap_err();
    assert!(said.contains("does not open"), "{said}");

    fs::write(&path, own).unwrap();
    service.peer.ask("destroy firstlight");
    let said = unwrap(dir.path(), &env(&operator)).unwrap_err();
    assert!(said.contains("there is no key"), "{said}");
    service.peer.ask("stop");
    let secret = ["--master-secret", "wrapped.json"];
    let waiting = key_service(dir.path(), &env(&operator), &secret);
    waiting.expect("Connection refused");
    waiting.expect("trying again");
}
