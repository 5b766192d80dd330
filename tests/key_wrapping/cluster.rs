//! `firstlight apply --kms` with a real API server and a real KMIP server: a cluster moves its master secret to a KMS and back.

use std::fs;
use std::process::Output;
use std::thread;

use base::crypto::{Dek, KEY_LEN, MEASUREMENT_SECRET_ID, Secret, cluster_id};
use base::stop::Stop;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use common::kube_apiserver::{Cluster, play_controller};
use kubernetes::client::{CONFIG_MAPS, Client, DAEMON_SETS, NETWORK_POLICIES, SECRETS};
use kubernetes::wrapping_key;
use serde_json::{Value, json};

use super::kmip::{Service, env};
use super::{KEY, SALT, key, key_service, workspace};

const POLICY: &str = r#"{"exceptions":["any-image"],"measurements":{"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000"}}}"#;

/// Returns the name of the Secret that the key service mounts.
fn mounted(client: &Client) -> String {
    let set = DAEMON_SETS.in_namespace("kube-system").named("key-service");
    let set = client.get(&set).unwrap();
    let volumes = set["spec"]["template"]["spec"]["volumes"].as_array();
    let config = volumes
        .unwrap()
        .iter()
        .find(|volume| volume["name"] == "config");
    config.unwrap()["secret"]["secretName"]
        .as_str()
        .unwrap()
        .to_owned()
}

/// Returns the names of the Secrets with a master secret.
fn secrets(client: &Client) -> Vec<String> {
    let all = client
        .list(&SECRETS.in_namespace("kube-system"), &Default::default())
        .unwrap();
    let names = all
        .items
        .iter()
        .map(|secret| secret["metadata"]["name"].as_str().unwrap().to_owned());
    names.filter(|name| name.contains("mastersecret")).collect()
}

/// Ends the controller with the scope, also if a check failed.
struct Ends<'a>(&'a Stop);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Returns the attestation policy of the cluster.
fn policy(client: &Client) -> String {
    let at = CONFIG_MAPS.in_namespace("kube-system").named("join-config");
    let map = client.get(&at).unwrap();
    map["data"]["attestationConfig"]
        .as_str()
        .unwrap()
        .to_owned()
}

/// Puts another wrapped master secret into a Secret, which is immutable.
fn replace(client: &Client, name: &str, wrapped: &Value, key: &Secret) {
    let all = SECRETS.in_namespace("kube-system");
    let mut secret = client.get(&all.named(name)).unwrap();
    client.delete(&all.named(name)).unwrap();
    let encrypted = wrapping_key::encrypt(wrapped.to_string().as_bytes(), key).unwrap();
    secret["data"]["mastersecret"] = STANDARD.encode(encrypted).into();
    for field in ["resourceVersion", "uid", "creationTimestamp"] {
        secret["metadata"].as_object_mut().unwrap().remove(field);
    }
    client.create(&all, &secret).unwrap();
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&*output.stdout, &*output.stderr].concat()).into_owned()
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_cluster_moves_its_master_secret_to_a_kms_and_back_also_if_the_kms_is_gone() {
    let (mut service, dir) = (Service::start(), workspace());
    let operator = service.client("operator");
    let client = Cluster::shared().client(&Stop::new());
    let write = |name: &str, text: String| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    };
    let kms = base::master_secret::MasterSecret::new(
        Secret::new(KEY.to_vec()),
        Secret::new(SALT.to_vec()),
    )
    .unwrap();
    let measurement = kms
        .dek(&Dek::named(MEASUREMENT_SECRET_ID), KEY_LEN)
        .unwrap();
    let id = cluster_id(&measurement, &[7; 32]);
    let id: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let state = json!({"version": 1, "measurementSalt": STANDARD.encode([7; 32]), "clusterID": id});
    write("state.json", state.to_string());
    write("policy.json", POLICY.into());
    write("admin.conf", Cluster::shared().kubeconfig());
    let other = json!({"key": STANDARD.encode([9; 32]), "salt": STANDARD.encode([9; 32])});
    write("other.json", other.to_string());
    let apply = |more: &[&str]| {
        let usual = [
            "apply",
            "--policy",
            "policy.json",
            "--image",
            "example.com/firstlight:1",
            "--kubeconfig",
            "admin.conf",
            "--state",
            "state.json",
            "--backups",
            "backups",
        ];
        let secret = ["--master-secret", "plain.json"];
        let secret = if more.contains(&"--master-secret") {
            &[][..]
        } else {
            &secret
        };
        super::firstlight(
            dir.path(),
            &env(&operator),
            &[&usual, secret, more].concat(),
        )
    };
    let (first, second) = (service.uri("firstlight"), service.uri("another"));
    // what the control planes have
    let wrapping_key = wrapping_key::of(&kms);
    wrapping_key::place(&dir.path().join("firstlight"), &wrapping_key).unwrap();

    let stop = Stop::new();
    thread::scope(|scope| {
        let (client, stop) = (&client, &stop);
        let _ends = Ends(stop);
        scope.spawn(move || play_controller(client, stop));
        let output = apply(&[]);
        assert!(output.status.success(), "{}", said(&output));
        let own = mounted(client);
        assert_eq!(secrets(client), [&*own]);

        let output = apply(&["--kms", &first, "--dry-run"]);
        assert!(output.status.success(), "{}", said(&output));
        let told = said(&output);
        assert!(
            told.contains("would change secrets kube-system/firstlight-mastersecret-")
                && told.contains("would change daemonsets.apps kube-system/key-service")
                && !told.contains("would change clusterroles"),
            "{told}"
        );
        assert_eq!(secrets(client), [&*own]);

        let output = apply(&["--kms", &first, "--master-secret", "other.json"]);
        assert!(
            said(&output).contains("the master secret of another cluster"),
            "{}",
            said(&output)
        );

        let output = apply(&["--kms", &first]);
        assert!(output.status.success(), "{}", said(&output));
        assert!(
            said(&output).contains(&format!("{own}: deleted")),
            "{}",
            said(&output)
        );
        assert_eq!(secrets(client), [mounted(client)]);
        let ports = client
            .get(
                &NETWORK_POLICIES
                    .in_namespace("kube-system")
                    .named("key-service"),
            )
            .unwrap();
        let port: Value = first
            .split("address=127.0.0.1:")
            .nth(1)
            .unwrap()
            .split('&')
            .next()
            .unwrap()
            .parse()
            .unwrap();
        assert_eq!(
            ports["spec"]["egress"][3]["ports"],
            json!([{"protocol": "TCP", "port": port}])
        );
        // the pod's file unwraps to the same keys
        let secret = SECRETS.in_namespace("kube-system").named(&mounted(client));
        let data = client.get(&secret).unwrap()["data"]["mastersecret"]
            .as_str()
            .map(str::to_owned);
        fs::write(
            dir.path().join("encrypted.json"),
            STANDARD.decode(data.unwrap()).unwrap(),
        )
        .unwrap();
        let of_pod = key_service(
            dir.path(),
            &env(&operator),
            &[
                "--master-secret",
                "encrypted.json",
                "--wrapping-key",
                "firstlight",
            ],
        );
        let plain = key_service(
            dir.path(),
            &[],
            &["--master-secret", "key", "--salt", "salt"],
        );
        assert_eq!(key(&of_pod), key(&plain));

        // without --kms, and with the same one, the form stays
        let before = mounted(client);
        for more in [&["--require", "strong"][..], &["--kms", &first]] {
            let output = apply(more);
            assert!(output.status.success(), "{}", said(&output));
            assert_eq!(secrets(client), [&*before]);
            assert_eq!(mounted(client), before);
            // and the requirement of the policy stays
            assert!(policy(client).contains("strong"), "{}", policy(client));
        }
        let output = apply(&["--require", "any"]);
        assert!(output.status.success(), "{}", said(&output));
        assert!(!policy(client).contains("strong"), "{}", policy(client));

        // a cluster of an earlier version, whose pods have no address of their Vault
        let wrapped = fs::read(dir.path().join("encrypted.json")).unwrap();
        let wrapped = wrapping_key::decrypt(&wrapped, &wrapping_key).unwrap();
        let vault = "kms://vault?address=https://vault.example:8200&keyName=a";
        let mut wrapped: Value = serde_json::from_slice(&wrapped).unwrap();
        let wrapped_by_kmip = wrapped.clone();
        wrapped["kms"] = vault.into();
        replace(client, &before, &wrapped, &wrapping_key);
        for more in [&[][..], &["--dry-run"]] {
            let output = apply(more);
            let told = said(&output);
            assert!(
                output.status.code() == Some(1)
                    && told.contains("VAULT_ADDR is not set")
                    && told.contains("Nothing was changed")
                    && told.contains(&format!("--kms '{vault}'")),
                "{told}"
            );
            assert_eq!(mounted(client), before);
        }
        replace(client, &before, &wrapped_by_kmip, &wrapping_key);
    });

    // no pod becomes ready with another key, and nothing has changed
    let before = mounted(&client);
    let output = apply(&["--kms", &second, "--timeout", "2s"]);
    assert!(
        !output.status.success() && said(&output).contains("everything was restored"),
        "{}",
        said(&output)
    );
    assert_eq!(
        (mounted(&client), secrets(&client)),
        (before.clone(), vec![before])
    );

    // back to the cluster's own form, without the KMS
    let before = mounted(&client);
    service.peer.ask("stop");
    let stop = Stop::new();
    thread::scope(|scope| {
        let (client, stop) = (&client, &stop);
        let _ends = Ends(stop);
        scope.spawn(move || play_controller(client, stop));
        let output = apply(&["--kms", &second]);
        assert!(!output.status.success(), "{}", said(&output));
        let output = apply(&["--kms", "kms://cluster-kms"]);
        assert!(output.status.success(), "{}", said(&output));
        assert_eq!(secrets(client), [mounted(client)]);
        assert_ne!(mounted(client), before);
    });
}
