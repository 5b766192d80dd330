//! A cluster whose policies several operators sign.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use base::text::hex;
use ssh::operators::{Newest, POLICY_NAMESPACE, PolicyStatement, install, sha256_hex};
use support::swtpm::Swtpm;

use crate::kube_apiserver::Cluster;
use crate::setup::*;

const CLUSTER_ID: [u8; 32] = [5; 32];

/// Makes a key as operators do, and returns its public line.
fn key(folder: &Path, name: &str) -> String {
    let file = folder.join(name);
    let made = Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-C", name, "-f"])
        .arg(&file)
        .status();
    assert!(made.unwrap().success());
    let line = fs::read_to_string(file.with_extension("pub")).unwrap();
    line.trim().to_owned()
}

/// Signs a statement as operators do.
fn sign(folder: &Path, name: &str, statement: &str) -> String {
    let mut signer = Command::new("ssh-keygen")
        .args(["-q", "-Y", "sign", "-n", POLICY_NAMESPACE, "-f"])
        .arg(folder.join(name))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = signer.stdin.take().unwrap();
    input.write_all(statement.as_bytes()).unwrap();
    drop(input);
    let output = signer.wait_with_output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap()
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_changed_policy_comes_into_force_only_with_the_signatures_of_the_operators() {
    let _alone = alone();
    let cluster = Cluster::shared();
    let mut setup = Setup::new(cluster);
    let dir = setup.dir.path().to_owned();
    let keys = tempfile::tempdir().unwrap();
    let operators = ["anna", "ben"].map(|name| {
        let key = key(keys.path(), name);
        format!(r#"{{"name":"{name}","key":"{key}"}}"#)
    });
    let list = format!(r#"{{"required":2,"operators":[{}]}}"#, operators.join(","));
    install(
        &dir.join("firstlight"),
        &list,
        &CLUSTER_ID,
        &Newest::default(),
    )
    .unwrap();
    let statement = |number: u64, policy: &str| {
        let statement = PolicyStatement {
            cluster: hex(&CLUSTER_ID),
            number,
            policy: sha256_hex(policy.as_bytes()),
            previous: None,
            not_after: None,
        };
        statement.to_text()
    };
    let publish = |policy: &str, statement: &str, by: &[&str]| {
        let signatures: String = by
            .iter()
            .map(|name| sign(keys.path(), name, statement))
            .collect();
        fs::write(dir.join("policyStatement"), statement).unwrap();
        fs::write(dir.join("policySignatures"), signatures).unwrap();
        fs::write(dir.join("attestationConfig"), policy).unwrap();
    };
    let first = statement(1, POLICY);
    publish(POLICY, &first, &["anna", "ben"]);
    setup.start(cluster);
    let stale = |setup: &Setup| {
        let metrics = setup.service().metrics().render();
        metrics.contains("\nfirstlight_attestation_policy_stale 1\n")
    };
    assert!(!stale(&setup));

    // who can write the ConfigMap, alone and with one of the operators
    let forged = POLICY.replace("7a94ffe8", "00000000");
    assert_ne!(forged, POLICY);
    for (statement, by) in [
        (String::new(), &[][..]),
        (first.clone(), &["anna", "ben"][..]),
        (statement(2, &forged), &["anna"][..]),
    ] {
        publish(&forged, &statement, by);
        eventually("the forged policy is refused", || stale(&setup));
    }
    // a node that only the signed policy accepts; also by a service that starts now
    setup.start(cluster);
    assert!(stale(&setup));
    let worker = Swtpm::start();
    let ticket = setup.join(&worker, &request("worker-0", &["127.42.2.100"], 1, false));
    assert_eq!(ticket.unwrap().policy_operators, "");
    let plane = Swtpm::start();
    let ticket = setup.join(&plane, &request("plane-0", &["127.42.1.100"], 2, true));
    let ticket = ticket.unwrap();
    assert_eq!(ticket.policy_operators, list);
    assert_eq!(ticket.policy_number, 1);
    assert_eq!(ticket.policy_statement, sha256_hex(first.as_bytes()));

    publish(&forged, &statement(2, &forged), &["anna", "ben"]);
    eventually("the signed policy is in force", || !stale(&setup));
    publish(POLICY, &first, &["anna", "ben"]);
    eventually("the policy of before is refused", || stale(&setup));
}
