//! `firstlight status` of a node in each of its states.

use std::process::Command;

use crate::program::Program;
use crate::setting::{MASTER_KEY, Setting, wait_for_port};

/// Exit code and output, of the node with the policy in the file.
fn status(setting: &Setting, address: &str, policy: &str) -> (i32, String) {
    let mut command = setting.firstlight(&["status", address, "--policy", policy, "--timeout", "20s"]);
    let output = command.output().unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    (output.status.code().unwrap(), text)
}

fn expect(said: &(i32, String), code: i32, parts: &[&str]) {
    let (exit, text) = said;
    assert!(
        *exit == code && parts.iter().all(|part| text.contains(part)),
        "expected {code}, {parts:?}; got {exit}:\n{text}"
    );
}

#[test]
fn a_node_that_waits_for_its_key_says_for_which_and_whom_it_asked() {
    let setting = Setting::new();
    let disk = setting.initialised_disk();
    let _node = Program::start(&mut setting.bootstrapper("unlock", &disk));
    wait_for_port(setting.node(9999));
    let policy = setting.policy().display().to_string();
    let host = setting.host(2).to_string();
    let said = status(&setting, &host, &policy);
    let attested = format!("{host}:9999 (recovery server): attested, meets the policy");
    let elsewhere = [format!("{host}:9000 (InitServer): no answer"), format!("{host}:30090 (join service): no answer")];
    let uuid = Command::new("cryptsetup").arg("luksUUID").arg(&disk).output().unwrap();
    let uuid = String::from_utf8(uuid.stdout).unwrap();
    assert!(!uuid.is_empty());
    let facts = ["Node:        in its initramfs, waiting for the key", uuid.trim(), "Since:"];
    expect(&said, 0, &[&attested, &elsewhere[0], &elsewhere[1], facts[0], facts[1], facts[2]]);

    let other = setting.policy_of(&[(15, [0; 32]), (4, [7; 32])]).display().to_string();
    expect(&status(&setting, &host, &other), 3, &["attestation refused", "PCR 4: expected 0707", "got "]);
}

#[test]
fn a_node_that_waits_for_its_init_says_so() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let _node = Program::start(&mut setting.bootstrapper("run", &disk));
    wait_for_port(setting.node(9000));
    let policy = setting.policy().display().to_string();
    let host = setting.host(2).to_string();
    let attested = format!("{host}:9000 (InitServer): attested, meets the policy");
    expect(
        &status(&setting, &host, &policy),
        0,
        &[&attested, "waiting for `firstlight init`", "9999 (recovery server): no"],
    );
    // one server of it, and nothing of the others
    let said = status(&setting, &format!("{host}:9000"), &policy);
    expect(&said, 0, &[&attested]);
    assert!(!said.1.contains("9999"), "{}", said.1);
}

#[test]
fn a_join_service_wants_proof_and_gives_none() {
    let setting = Setting::new();
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let policy = setting.policy();
    let _join = setting.join_service(3, keys, &policy);
    let host = setting.host(3).to_string();
    let guarded = format!("{host}:30090 (join service): proves nothing itself, and wants proof of callers");
    let said = status(&setting, &host, &policy.display().to_string());
    // the key service there speaks no TLS
    expect(&said, 0, &[&guarded, "it seems, a member of a cluster", ":9000 (InitServer): no answer: "]);
}

#[test]
fn nobody_at_all_is_4_and_nonsense_is_2() {
    let setting = Setting::new();
    let policy = setting.policy().display().to_string();
    expect(&status(&setting, &setting.host(9).to_string(), &policy), 4, &["nobody answers", "refused"]);
    expect(&status(&setting, "http://node", &policy), 2, &["is no endpoint"]);
    expect(&status(&setting, &setting.host(9).to_string(), "absent.json"), 1, &["absent.json"]);
}
