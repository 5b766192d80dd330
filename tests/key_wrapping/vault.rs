//! A real Vault server, which takes two minutes to build.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use base::stop::Stop;
use common::kube_apiserver::Cluster;
use kubernetes::client::{CLUSTER_ROLE_BINDINGS, SERVICE_ACCOUNTS};
use serde_json::{Value, json};
use support::program::Program;
use tempfile::TempDir;
use ureq::Agent;
use ureq::tls::{Certificate, RootCerts, TlsConfig};

use super::{key, workspace};

/// A Vault server on this machine, initialized and unsealed, with the engine transit.
struct Vault {
    child: Child,
    address: SocketAddr,
    agent: Agent,
    folder: TempDir,
    root: String,
    unseal_key: String,
}

impl Drop for Vault {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Vault {
    fn start() -> Vault {
        let program = support::foreign::go_program("vault_go", env!("CARGO_TARGET_TMPDIR"));
        let folder = tempfile::tempdir().unwrap();
        let own = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let (certificate, key) = (folder.path().join("ca.pem"), folder.path().join("key.pem"));
        fs::write(&certificate, own.cert.pem()).unwrap();
        fs::write(&key, own.signing_key.serialize_pem()).unwrap();
        let mut child = Command::new(program)
            .args([&certificate, &key])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut output = BufReader::new(child.stdout.take().unwrap());
        output.read_line(&mut line).unwrap();
        let authority = Certificate::from_der(own.cert.der()).to_owned();
        let tls = TlsConfig::builder()
            .root_certs(RootCerts::from(vec![authority]))
            .unversioned_rustls_crypto_provider(tls::provider())
            .build();
        let config = Agent::config_builder()
            .tls_config(tls)
            .http_status_as_error(false);
        let mut vault = Vault {
            child,
            address: line.trim().parse().unwrap(),
            agent: config.build().into(),
            folder,
            root: String::new(),
            unseal_key: String::new(),
        };
        let shares = json!({"secret_shares": 1, "secret_threshold": 1});
        let made = vault.call("PUT", "sys/init", shares);
        vault.root = made["root_token"].as_str().unwrap().into();
        vault.unseal_key = made["keys"][0].as_str().unwrap().into();
        vault.unseal();
        vault.call("POST", "sys/mounts/transit", json!({"type": "transit"}));
        vault
    }

    /// Returns the answer of a successful request; waits while Vault becomes active.
    fn call(&self, method: &str, path: &str, body: Value) -> Value {
        for _ in 0..100 {
            let request = ureq::http::Request::builder()
                .method(method)
                .uri(format!("https://{}/v1/{path}", self.address))
                .header("X-Vault-Token", &self.root);
            let mut response = match &body {
                Value::Null => self.agent.run(request.body(()).unwrap()).unwrap(),
                body => self
                    .agent
                    .run(request.body(body.to_string()).unwrap())
                    .unwrap(),
            };
            let status = response.status().as_u16();
            let text = response.body_mut().read_to_string().unwrap();
            if status == 500 || status == 503 {
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
            assert!(
                matches!(status, 200 | 204),
                "{method} {path}: {status} {text}"
            );
            return serde_json::from_str(&text).unwrap_or_default();
        }
        panic!("Vault does not become active");
    }

    fn unseal(&self) {
        self.call("PUT", "sys/unseal", json!({"key": self.unseal_key}));
        // active only after a moment
        self.call("GET", "sys/health", Value::Null);
    }

    fn seal(&self) {
        self.call("PUT", "sys/seal", json!({}));
    }

    /// Returns a token with only this policy (HCL).
    fn token(&self, name: &str, policy: &str) -> String {
        let path = format!("sys/policies/acl/{name}");
        self.call("PUT", &path, json!({"policy": policy}));
        let wanted = json!({"policies": [name], "no_default_policy": true});
        let made = self.call("POST", "auth/token/create", wanted);
        made["auth"]["client_token"].as_str().unwrap().into()
    }

    /// Returns its address, as `VAULT_ADDR` has it.
    fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    /// Runs `firstlight` for an operator who has named this server.
    fn firstlight(&self, dir: &Path, args: &[&str]) -> Output {
        let url = self.url();
        let env = [("VAULT_TOKEN", &*self.root), ("VAULT_ADDR", &*url)];
        super::firstlight(dir, &env, args)
    }

    /// Starts the key service, whose operator has named this server.
    fn key_service(&self, dir: &Path, token: &str, secret: &[&str]) -> Program {
        let url = self.url();
        let env = [("VAULT_TOKEN", token), ("VAULT_ADDR", &*url)];
        super::key_service(dir, &env, secret)
    }

    /// Returns the URI of a key.
    fn uri(&self, key: &str) -> String {
        let (address, folder) = (self.address, self.folder.path().display());
        format!("kms://vault?address=https://{address}&keyName={key}&caFile={folder}/ca.pem")
    }
}

fn wrap(dir: &Path, token: &str, uri: &str, more: &[&str]) -> Result<(), String> {
    super::wrap(dir, &[("VAULT_TOKEN", token)], uri, more)
}

#[test]
fn a_wrapped_secret_gives_the_same_keys_as_the_plain_one() {
    let (vault, dir) = (Vault::start(), workspace());
    let uri = vault.uri("firstlight");
    wrap(dir.path(), &vault.root, &uri, &["--create-key"]).unwrap();
    let wrapped = fs::read_to_string(dir.path().join("wrapped.json")).unwrap();
    assert!(
        wrapped.contains("vault:v1:") || wrapped.contains("dmF1bHQ6djE6"),
        "{wrapped}"
    );
    assert!(!wrapped.contains("AQEBAQEB"));

    let plain = vault.key_service(
        dir.path(),
        "",
        &["--master-secret", "key", "--salt", "salt"],
    );
    let unwrapped = vault.key_service(
        dir.path(),
        &vault.root,
        &["--master-secret", "wrapped.json"],
    );
    assert_eq!(key(&plain), key(&unwrapped));

    // to another key, and back to no key
    let second = vault.uri("second");
    let args = ["wrap", "--kms", &second, "--create-key"];
    let files = ["--master-secret", "wrapped.json", "--out", "moved.json"];
    let output = vault.firstlight(dir.path(), &[&args[..], &files].concat());
    assert!(output.status.success(), "{output:?}");
    let args = [
        "unwrap",
        "--master-secret",
        "moved.json",
        "--out",
        "back.json",
    ];
    let output = vault.firstlight(dir.path(), &args);
    assert!(output.status.success(), "{output:?}");
    let back: Value =
        serde_json::from_slice(&fs::read(dir.path().join("back.json")).unwrap()).unwrap();
    let first: Value =
        serde_json::from_slice(&fs::read(dir.path().join("plain.json")).unwrap()).unwrap();
    assert_eq!(back, first);

    // a rotated key still unwraps a secret that an older version wrapped, until Vault forbids that version
    vault.call("POST", "transit/keys/second/rotate", json!({}));
    let again = [
        "unwrap",
        "--master-secret",
        "moved.json",
        "--out",
        "again.json",
    ];
    assert!(vault.firstlight(dir.path(), &again).status.success());
    let minimum = json!({"min_decryption_version": 2});
    vault.call("POST", "transit/keys/second/config", minimum);
    let late = [
        "unwrap",
        "--master-secret",
        "moved.json",
        "--out",
        "late.json",
    ];
    let output = vault.firstlight(dir.path(), &late);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && said.contains("too old"),
        "{said}"
    );
}

#[test]
fn each_refusal_names_what_is_missing() {
    let (vault, dir) = (Vault::start(), workspace());
    let uri = vault.uri("firstlight");
    let refused =
        |token: &str, uri: &str, more: &[&str]| wrap(dir.path(), token, uri, more).unwrap_err();
    let said = refused(&vault.root, &uri, &[]);
    assert!(
        said.contains("there is no key transit/keys/firstlight") && said.contains("--create-key"),
        "{said}"
    );
    let elsewhere = format!("{uri}&mount=elsewhere");
    let said = refused(&vault.root, &elsewhere, &[]);
    assert!(
        said.contains("is the transit engine mounted there?"),
        "{said}"
    );
    let said = refused("hvs.wrong", &uri, &["--create-key"]);
    assert!(said.contains("status 403 (permission denied)"), "{said}");

    let read = "path \"transit/keys/firstlight\" { capabilities = [\"read\"] }";
    let encrypt = "path \"transit/encrypt/firstlight\" { capabilities = [\"update\"] }";
    let decrypt = "path \"transit/decrypt/firstlight\" { capabilities = [\"update\"] }";
    let reader = vault.token("reader", read);
    let said = refused(&reader, &uri, &["--create-key"]);
    assert!(
        said.contains("needs the capability \"create\" on transit/keys/firstlight"),
        "{said}"
    );
    vault.call(
        "POST",
        "transit/keys/firstlight",
        json!({"type": "aes256-gcm96"}),
    );
    let said = refused(&reader, &uri, &[]);
    assert!(
        said.contains("needs the capability \"update\" on transit/encrypt/firstlight"),
        "{said}"
    );
    let writer = vault.token("writer", &format!("{read}\n{encrypt}"));
    let said = refused(&writer, &uri, &[]);
    assert!(
        said.contains("needs the capability \"update\" on transit/decrypt/firstlight"),
        "{said}"
    );
    // the policies of docs/kms.md for the operator and for the key service
    let operator = vault.token("operator", &format!("{read}\n{encrypt}\n{decrypt}"));
    wrap(dir.path(), &operator, &uri, &[]).unwrap();
    let said = refused(&operator, &uri, &[]);
    assert!(said.contains("cannot create wrapped.json"), "{said}");
    let service = vault.token("service", decrypt);
    let service = vault.key_service(dir.path(), &service, &["--master-secret", "wrapped.json"]);
    service.expect("serving data keys on");

    let signing = json!({"type": "ed25519"});
    vault.call("POST", "transit/keys/signer", signing);
    let said = refused(&vault.root, &vault.uri("signer"), &[]);
    assert!(
        said.contains("transit/keys/signer does not encrypt"),
        "{said}"
    );
    let (untrusted, _) = uri.split_once("&caFile").unwrap();
    let said = refused(&vault.root, untrusted, &[]);
    assert!(said.contains("certificate"), "{said}");
}

/// Starts Vault, and wraps a master secret with a new key in it.
fn wrapped() -> (Vault, TempDir) {
    let (vault, dir) = (Vault::start(), workspace());
    let uri = vault.uri("firstlight");
    wrap(dir.path(), &vault.root, &uri, &["--create-key"]).unwrap();
    (vault, dir)
}

#[test]
fn the_key_service_waits_for_a_sealed_vault_and_ends_when_asked_to() {
    let (vault, dir) = wrapped();
    vault.seal();
    let start = || {
        vault.key_service(
            dir.path(),
            &vault.root,
            &["--master-secret", "wrapped.json"],
        )
    };
    let (waiting, mut stopped) = (start(), start());
    for service in [&waiting, &stopped] {
        service.expect("(Vault is sealed); unseal it; trying again in");
    }
    stopped.terminate();
    assert_eq!(stopped.exit().code(), Some(0));
    vault.unseal();
    assert_eq!(key(&waiting).len(), 32);
}

#[test]
fn what_another_program_encrypted_with_the_same_key_does_not_open() {
    let (vault, dir) = wrapped();
    let other = json!({"plaintext": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="});
    let other = vault.call("POST", "transit/encrypt/firstlight", other);
    let path = dir.path().join("wrapped.json");
    let mut file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let other = other["data"]["ciphertext"].as_str().unwrap();
    file["wrappedKey"] = {
        use base64::Engine;
        base64::engine::general_purpose::STANDARD
            .encode(other)
            .into()
    };
    fs::write(&path, file.to_string()).unwrap();
    let args = [
        "unwrap",
        "--master-secret",
        "wrapped.json",
        "--out",
        "x.json",
    ];
    let output = vault.firstlight(dir.path(), &args);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("POST transit/decrypt/firstlight"), "{said}");
    assert!(!dir.path().join("x.json").exists());
}

/// The file of a wrapped master secret contains an address. No command sends credentials to that address: neither the token of a
/// variable nor the one in the home folder.
#[test]
fn a_token_goes_only_to_a_server_that_the_operator_named() {
    let (vault, dir) = (Vault::start(), workspace());
    // the operator names it by --kms
    let uri = vault.uri("firstlight");
    wrap(dir.path(), &vault.root, &uri, &["--create-key"]).unwrap();

    // the author of this file gets a connection from each command, and would get the token
    let thief = TcpListener::bind("127.0.0.1:0").unwrap();
    thief.set_nonblocking(true).unwrap();
    let file = fs::read_to_string(dir.path().join("wrapped.json")).unwrap();
    let own = thief.local_addr().unwrap().to_string();
    let stolen = file.replace(&vault.address.to_string(), &own);
    fs::write(dir.path().join("stolen.json"), stolen).unwrap();
    fs::set_permissions(
        dir.path().join("stolen.json"),
        fs::Permissions::from_mode(0o600),
    )
    .unwrap();
    fs::write(dir.path().join(".vault-token"), &vault.root).unwrap();
    let (home, url) = (dir.path().to_str().unwrap(), vault.url());
    let url = &*url;
    let in_variable = ("VAULT_TOKEN", &*vault.root);
    for env in [
        &[in_variable][..],
        &[in_variable, ("VAULT_ADDR", url)],
        &[in_variable, ("BAO_ADDR", url)],
        &[("HOME", home)],
        &[("HOME", home), ("VAULT_ADDR", url)],
    ] {
        let file = ["--master-secret", "stolen.json"];
        let args = [&["unwrap", "--out", "stolen.txt"][..], &file].concat();
        let output = super::firstlight(dir.path(), env, &args);
        let said = String::from_utf8(output.stderr).unwrap();
        let expected = format!("if it is yours, set VAULT_ADDR=https://{own}");
        assert!(
            !output.status.success() && said.contains(&expected),
            "{said}"
        );
        let mut service = super::key_service(dir.path(), env, &file);
        service.expect(&expected);
        assert!(!service.exit().success());
    }
    assert!(thief.accept().is_err(), "a program has connected");

    // if either variable names the server, the command asks it
    for name in ["VAULT_ADDR", "BAO_ADDR"] {
        let env = [("HOME", home), (name, url)];
        let out = format!("{name}.json");
        let args = ["unwrap", "--master-secret", "wrapped.json", "--out", &out];
        let output = super::firstlight(dir.path(), &env, &args);
        assert!(output.status.success(), "{output:?}");
    }
}

/// Starts the key service with this token as that of its pod for Vault. The pod has one for the API server, too.
fn key_service_of_pod(vault: &Vault, dir: &Path, token: &str) -> Program {
    fs::write(dir.join("token"), token).unwrap();
    let mut command = Command::new("unshare");
    let pod = "mount -t tmpfs none /run && mkdir -p /run/secrets/vault && cp token /run/secrets/vault && exec \"$@\"";
    command
        .args(["--map-root-user", "--mount", "sh", "-c", pod, "sh"])
        .arg(support::program::built("key-service"))
        .args(["--clients", "any", "--listen", "127.0.0.1:0"])
        .args(["--master-secret", "wrapped.json"])
        .current_dir(dir)
        .env("VAULT_ADDR", vault.url())
        .env_remove("VAULT_TOKEN");
    Program::start(&mut command)
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_pod_logs_in_as_its_service_account_and_no_other_one_does() {
    let (vault, dir) = (Vault::start(), workspace());
    let cluster = Cluster::shared();
    let client = cluster.client(&Stop::new());
    let accounts = SERVICE_ACCOUNTS.in_namespace("kube-system");
    let token_for = |name: &str, spec: Value| {
        let account = json!({"metadata": {"name": name}});
        client.create_if_absent(&accounts, &account).unwrap();
        let wanted =
            json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec});
        let account = accounts.named(name).subresource("token");
        let made = client.create_subresource(&account, &wanted).unwrap();
        made["status"]["token"].as_str().unwrap().to_owned()
    };
    let for_vault = |name: &str| token_for(name, json!({"audiences": ["vault"]}));
    let for_api = |name: &str| token_for(name, json!({}));
    let delegator = json!({
        "metadata": {"name": "vault"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:auth-delegator"},
        "subjects": [{"kind": "ServiceAccount", "name": "vault", "namespace": "kube-system"}],
    });
    client
        .create_if_absent(&CLUSTER_ROLE_BINDINGS.all(), &delegator)
        .unwrap();
    vault.call("POST", "sys/auth/kubernetes", json!({"type": "kubernetes"}));
    let config = json!({
        "kubernetes_host": cluster.server(),
        "kubernetes_ca_cert": cluster.ca().0,
        "token_reviewer_jwt": for_api("vault"),
        "disable_local_ca_jwt": true,
    });
    vault.call("POST", "auth/kubernetes/config", config);
    let policy = r#"path "transit/decrypt/firstlight" { capabilities = ["update"] }"#;
    vault.call("PUT", "sys/policies/acl/unwrap", json!({"policy": policy}));
    let role = json!({
        "bound_service_account_names": "key-service",
        "bound_service_account_namespaces": "kube-system",
        "audience": "vault",
        "token_policies": "unwrap",
    });
    vault.call("POST", "auth/kubernetes/role/firstlight", role);

    // one URI for the operator, who has a token, and for the pod
    let uri = vault.uri("firstlight") + "&role=firstlight";
    wrap(dir.path(), &vault.root, &uri, &["--create-key"]).unwrap();
    let plain = vault.key_service(
        dir.path(),
        "",
        &["--master-secret", "key", "--salt", "salt"],
    );
    let pod = key_service_of_pod(&vault, dir.path(), &for_vault("key-service"));
    assert_eq!(key(&pod), key(&plain));
    for token in [for_vault("default"), for_api("key-service")] {
        let other = key_service_of_pod(&vault, dir.path(), &token);
        other.expect("the role must allow this pod's service account");
    }
    let forged = key_service_of_pod(&vault, dir.path(), "a.b.c");
    forged.expect("the role must allow this pod's service account");
}
