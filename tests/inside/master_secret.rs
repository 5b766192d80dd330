//! The master secret is not in the Kubernetes API: not for a worker onto which Kubernetes puts our pods, not for a reader of Secrets,
//! and not for a thief of etcd's data.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use base::crypto::Secret;
use base::master_secret::MasterSecret;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kubernetes::client::{NODES, PODS, SECRETS, Selector, VALIDATING_ADMISSION_POLICY_BINDINGS};
use kubernetes::services::{ServiceSettings, master_secret};
use kubernetes::wrapping_key;
use serde_json::json;

use crate::attacker::{Inside, eventually, settings};

const KEY: &[u8; 32] = b"the master secret of the cluster";

fn kms() -> MasterSecret {
    MasterSecret::new(Secret::new(KEY.to_vec()), Secret::new(vec![3; 32])).unwrap()
}

fn inside() -> Inside {
    Inside::start(&ServiceSettings {
        kms: kms(),
        ..settings()
    })
}

/// Runs the key service's program with this Secret, and the wrapping key in this directory.
fn key_service(secret: &[u8], wrapping_key: &Path) -> Output {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("mastersecret");
    fs::write(&file, secret).unwrap();
    fs::write(dir.path().join("measurementSalt"), [1; 32]).unwrap();
    let mut command = Command::new(support::program::built("key-service"));
    command
        .arg("--print-cluster-id")
        .arg("--master-secret")
        .arg(&file)
        .arg("--config")
        .arg(dir.path())
        .arg("--wrapping-key")
        .arg(wrapping_key);
    command.output().unwrap()
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn a_worker_that_gets_a_pod_of_the_key_service_cannot_read_the_master_secret() {
    let inside = inside();
    // also where a cluster forbids admission policies
    let bindings = VALIDATING_ADMISSION_POLICY_BINDINGS.all();
    for binding in inside
        .admin
        .list(&bindings, &Selector::default())
        .unwrap()
        .items
    {
        let name = binding["metadata"]["name"].as_str().unwrap();
        let at = VALIDATING_ADMISSION_POLICY_BINDINGS.named(name);
        inside.admin.delete(&at).unwrap();
    }
    let worker = inside.worker("thief", "10.9.0.9");
    let flannel = inside.flannel_on(&worker);
    let role = json!({"metadata": {"labels": {"node-role.kubernetes.io/control-plane": ""}}});
    let status = NODES.named("thief").subresource("status");
    eventually("the role by flannel's account", || {
        flannel.merge(&status, &role).is_ok()
    });
    eventually("a pod of the key service for the worker", || {
        inside.nodes_of("key-service").contains(&"thief".to_owned())
    });
    let pods = PODS.in_namespace("kube-system");
    let selector = Selector::labels("k8s-app=key-service");
    for pod in inside.admin.list(&pods, &selector).unwrap().items {
        let name = pod["metadata"]["name"].as_str().unwrap();
        // as the scheduler does
        let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": "thief"}});
        let at = pods.named(name).subresource("binding");
        inside.admin.create_subresource(&at, &binding).unwrap();
    }
    let name = master_secret::present(&inside.admin)
        .unwrap()
        .unwrap()
        .secret;
    let at = SECRETS.in_namespace("kube-system").named(&name);
    eventually("the kubelet may read the Secret of the pod", || {
        worker.client.get(&at).is_ok()
    });
    let content = worker.client.get(&at).unwrap()["data"]["mastersecret"].clone();
    let content = BASE64_STANDARD.decode(content.as_str().unwrap()).unwrap();

    let on_worker = tempfile::tempdir().unwrap();
    let output = key_service(&content, on_worker.path());
    let told = String::from_utf8_lossy(&output.stderr);
    // the last line is in the status of the pod
    let error = told.lines().next_back().unwrap_or_default();
    assert!(
        !output.status.success() && error.contains("this machine has no wrapping key"),
        "{told}"
    );
    // on a control plane the same Secret is the cluster's
    let on_control_plane = tempfile::tempdir().unwrap();
    wrapping_key::place(on_control_plane.path(), &wrapping_key::of(&kms())).unwrap();
    let output = key_service(&content, on_control_plane.path());
    assert!(
        output.status.success() && output.stdout.len() == 65,
        "{output:?}"
    );
}

/// Returns whether a file below this folder has one of these forms.
fn is_below(folder: &Path, forms: &[Vec<u8>]) -> bool {
    let is_in = |path: &Path| {
        let content = fs::read(path).unwrap();
        let has = |form: &Vec<u8>| content.windows(form.len()).any(|it| it == form);
        forms.iter().any(has)
    };
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().path()).any(|path| {
        if path.is_dir() {
            is_below(&path, forms)
        } else {
            is_in(&path)
        }
    })
}

/// Returns the forms in which etcd or a Secret could have bytes.
fn forms(bytes: &[u8]) -> Vec<Vec<u8>> {
    let base64 = BASE64_STANDARD.encode(bytes);
    // without the last letters, which depend on what follows
    let begin = base64.trim_end_matches('=')[..base64.len() - 6].to_owned();
    let url = begin.replace('+', "-").replace('/', "_");
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    vec![bytes.to_vec(), begin.into(), url.into(), hex.into()]
}

#[test]
#[ignore = "needs a kube-apiserver: make test-inside"]
fn neither_a_reader_of_secrets_nor_a_thief_of_etcd_has_the_master_secret() {
    let inside = inside();
    let planted = b"a secret that the search must find";
    let secret =
        json!({"metadata": {"name": "planted"}, "data": {"a": BASE64_STANDARD.encode(planted)}});
    let secrets = SECRETS.in_namespace("kube-system");
    inside.admin.create(&secrets, &secret).unwrap();
    for secret in inside
        .admin
        .list(&secrets, &Selector::default())
        .unwrap()
        .items
    {
        for (name, value) in secret["data"].as_object().into_iter().flatten() {
            let value = BASE64_STANDARD.decode(value.as_str().unwrap()).unwrap();
            let has = |form: &Vec<u8>| value.windows(form.len()).any(|it| it == form);
            assert!(!forms(KEY).iter().any(has), "{name}");
        }
    }
    let etcd = inside.cluster.path("etcd");
    assert!(is_below(&etcd, &forms(planted)));
    assert!(!is_below(&etcd, &forms(KEY)));
}
