//! The operator's init: the whole of it but the mount, which this machine has no kernel for.

use std::fs;
use std::path::Path;

use crate::program::Program;
use crate::setting::{INIT_SECRET, Setting, set_private, wait_for_port};

pub fn init(setting: &Setting, secret: &str, policy: &Path) -> Program {
    let secret = setting.file("init-secret", secret);
    set_private(&secret);
    let endpoint = setting.node(9000).to_string();
    let mut command = setting.firstlight(&["init", "--endpoint", &endpoint, "--timeout", "30s"]);
    Program::start(command.arg("--policy").arg(policy).arg("--init-secret").arg(secret))
}

#[test]
fn an_initialised_node_comes_back_by_the_operators_master_secret_file() {
    let mut setting = Setting::new();
    let disk = setting.new_disk();
    let mut node = Program::start(&mut setting.bootstrapper("run", &disk));
    node.expect("ready:");
    let mut operator = init(&setting, INIT_SECRET, &setting.policy());
    assert!(operator.exit().success(), "{}", operator.output());
    operator.expect("no cluster was set up");
    assert!(node.exit().success());
    node.expect("committed:");
    node.expect("complete:");
    assert!(!setting.path("state.key").exists(), "the passphrase of the first boot is still there");
    let state = fs::read_to_string(setting.path("mount/constellation/node_state.json")).unwrap();
    assert!(state.starts_with("{\n\t\"Role\": \"ControlPlane\",\n\t\"MeasurementSalt\": \""), "{state}");

    // the same node started once more in this boot is a member, and ends at once
    let mut again = Program::start(&mut setting.bootstrapper("run", &disk));
    assert!(again.exit().success());
    again.expect("a member of its cluster");

    // reboot
    setting.tpm.reboot();
    let master: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(setting.path("firstlight-mastersecret.json")).unwrap()).unwrap();
    let recovered = recover_with(&setting, &disk);
    assert!(master["key"].is_string() && recovered.contains("key-slot:"), "{recovered}");
}

/// Boots the disk and opens it with the operator's own master secret file.
fn recover_with(setting: &Setting, disk: &Path) -> String {
    let mut node = Program::start(&mut setting.bootstrapper("unlock", disk));
    let endpoint = setting.node(9999).to_string();
    let mut command = setting.firstlight(&["recover", "--endpoint", &endpoint, "--timeout", "30s", "--policy"]);
    let mut operator =
        Program::start(command.arg(setting.policy()).args(["--master-secret", "firstlight-mastersecret.json"]));
    assert!(operator.exit().success(), "{}", operator.output());
    node.exit();
    node.output()
}

#[test]
fn a_wrong_secret_gets_one_short_refusal_and_changes_nothing() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let before = fs::read(&disk).unwrap();
    let node = Program::start(&mut setting.bootstrapper("run", &disk));
    node.expect("ready:");
    let mut operator = init(&setting, "wrong", &setting.policy());
    assert!(!operator.exit().success());
    operator.expect("invalid init secret");
    assert!(!setting.path("firstlight-cluster.log").exists(), "the node disclosed its log");
    assert!(fs::read(&disk).unwrap() == before);
    // the delay doubles: before long it outlasts the time that the next try takes to get there, and even the right
    // secret has to wait
    let delayed = (0..8).any(|_| {
        let mut hasty = init(&setting, "wrong", &setting.policy());
        assert!(!hasty.exit().success());
        hasty.output().contains("try again in")
    });
    assert!(delayed, "{}", node.output());
    let mut right = init(&setting, INIT_SECRET, &setting.policy());
    let waited = !right.exit().success();
    assert!(waited == right.output().contains("try again in"), "{}", right.output());
}

#[test]
fn a_node_with_other_software_gets_no_secret() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let node = Program::start(&mut setting.bootstrapper("run", &disk));
    node.expect("ready:");
    let policy = setting.policy_of(&[(4, [0xab; 32]), (15, [0; 32])]);
    let mut operator = init(&setting, INIT_SECRET, &policy);
    assert_eq!(operator.exit().code(), Some(3));
    let refusal = operator.expect("PCR 4");
    assert!(refusal.contains(&"ab".repeat(32)), "{refusal}");
    assert!(!node.output().contains("locked:"));
}

#[test]
fn a_node_that_was_interrupted_after_the_lock_is_reset_by_its_next_boot() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let mut node = Program::start(&mut setting.bootstrapper("run", &disk));
    node.expect("ready:");
    let mut operator = init(&setting, INIT_SECRET, &setting.policy());
    assert!(operator.exit().success(), "{}", operator.output());
    node.exit();
    // as if the power had gone between the commit and the end of the cluster's set-up
    fs::remove_file(setting.path("mount/firstlight/complete")).unwrap();
    let mut next = Program::start(&mut setting.bootstrapper("run", &disk));
    assert_eq!(next.exit().code(), Some(3));
    next.expect("starts over");
    let mut after = Program::start(&mut setting.bootstrapper("unlock", &disk));
    after.expect("formatted before, but never part of a cluster");
    after.exit();
}

#[test]
fn sigterm_while_waiting_for_the_operator_ends_the_server() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let mut node = Program::start(&mut setting.bootstrapper("run", &disk));
    wait_for_port(setting.node(9000));
    node.terminate();
    assert_eq!(node.exit().code(), Some(143));
}

#[test]
fn a_metadata_service_without_a_hash_is_asked_again() {
    let setting = Setting::new();
    setting.metadata.set_init_secret_hash("<html>not a hash</html>");
    let disk = setting.new_disk();
    let node = Program::start(&mut setting.bootstrapper("run", &disk));
    node.expect("no bcrypt hash");
    setting.metadata.set_init_secret_hash(&bcrypt::hash(INIT_SECRET, 4).unwrap());
    node.expect("ready:");
}
