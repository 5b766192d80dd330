//! A node, its disk, and the operator's files: programs of both releases on loopback, with a TPM (swtpm) and a disk in a file.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::previous::Release::{self, Previous, Today};
use common::setting::{INIT_SECRET, MASTER_KEY, Setting, set_private, wait_for_port};
use disk::luks;
use serde_json::Value;
use support::boot_image;
use support::program::{Program, built};
use tempfile::TempDir;

/// Waits until the key has opened the disk. There the boot of these tests ends: the kernel maps no disk in a file.
fn expect_opened(node: &mut Program, by: &str) {
    let line = node.expect("key-slot:");
    assert!(line.contains(by), "{line}");
    assert!(!node.exit().success());
}

/// A reboot of a member: its `unlock` asks a join service, which asks a key service.
fn a_member_gets_its_key(unlock: Release, join: Release, keys: Release) {
    let setting = Setting::new();
    let disk = setting.disk_that_knows(&[3]);
    let (_keys, keys) = keys.run(|| setting.key_service(3, MASTER_KEY));
    let _join = join.run(|| setting.join_service(3, keys, &setting.policy()));
    // a cloud whose metadata names no peers: the address is in the header
    let mut command = unlock.run(|| setting.unlock(&disk));
    let mut node = Program::start(command.args(["--csp", "aws"]));
    node.expect("ticket:");
    expect_opened(&mut node, &setting.host(3).to_string());
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn todays_unlock_gets_its_key_from_a_previous_join_service() {
    a_member_gets_its_key(Today, Previous, Previous);
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn a_previous_unlock_reads_todays_header_and_gets_its_key_from_todays_join_service() {
    a_member_gets_its_key(Previous, Today, Today);
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn todays_join_service_gets_keys_from_a_previous_key_service() {
    a_member_gets_its_key(Today, Today, Previous);
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn a_previous_join_service_gets_keys_from_todays_key_service() {
    a_member_gets_its_key(Today, Previous, Today);
}

/// Starts the operator's command, in the folder with his files.
fn operate(setting: &Setting, operator: Release, policy: &Path, arguments: &[&str]) -> Program {
    let mut command = operator.run(|| setting.firstlight(arguments));
    Program::start(command.arg("--policy").arg(policy))
}

/// An init of a new disk, by which the operator gets the files of the cluster.
fn a_first_node(setting: &Setting, node: Release, operator: Release) -> PathBuf {
    let disk = setting.new_disk();
    let member = Program::start(&mut node.run(|| setting.bootstrapper(&disk)));
    member.expect("ready:");
    let secret = setting.file("init-secret", INIT_SECRET);
    set_private(&secret);
    let endpoint = setting.node(9000).to_string();
    let key = setting.key_name().to_string();
    let policy = setting.policy_of(&[(15, [0; 32])]);
    let init = [
        "init",
        "--endpoint",
        &endpoint,
        "--init-secret",
        "init-secret",
        "--timeout=60s",
        "--attestation-key",
        &key,
    ];
    // the previous command takes every policy
    let form: &[&str] = match operator {
        Today => &["--require=any"],
        Previous => &[],
    };
    let mut init = operate(setting, operator, &policy, &[&init, form].concat());
    assert!(init.exit().success(), "{}", init.output());
    member.expect("complete:");
    is_a_member(setting, member, operator);
    disk
}

/// Asks a member for its state, and ends it.
fn is_a_member(setting: &Setting, mut node: Program, operator: Release) {
    node.expect("member: `firstlight status` is answered");
    let address = setting.node(9000).to_string();
    let policy = setting.policy_of(&[(15, [0; 32])]);
    let status = ["status", &address, "--timeout=60s"];
    let mut status = operate(setting, operator, &policy, &status);
    assert!(status.exit().success(), "{}", status.output());
    node.terminate();
    assert!(node.exit().success(), "{}", node.output());
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn todays_command_initializes_a_previous_node_and_asks_for_its_state() {
    a_first_node(&Setting::new(), Previous, Today);
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn a_previous_command_initializes_a_node_of_today_and_asks_for_its_state() {
    a_first_node(&Setting::new(), Today, Previous);
}

/// All programs of one release make a cluster; after a reboot those of the other recover the disk, with the files of the first.
fn a_cluster_changes_its_release(before: Release, after: Release) {
    let mut setting = Setting::new();
    let disk = a_first_node(&setting, before, before);
    // the addresses in the header
    let known = bootstrapper::state::state_disk::peers(&disk).unwrap();
    assert_eq!(known.control_planes, [setting.host(2)]);
    // the bootstrapper starts again in the same boot
    let again = Program::start(&mut after.run(|| setting.bootstrapper(&disk)));
    is_a_member(&setting, again, after);

    setting.tpm.reboot();
    let mut node = Program::start(&mut after.run(|| setting.unlock(&disk)));
    let endpoint = setting.node(9999).to_string();
    let recover = ["recover", "--endpoint", &endpoint, "--timeout=60s"];
    let policy = setting.policy_of(&[(15, [0; 32])]);
    let mut operator = operate(&setting, after, &policy, &recover);
    assert!(operator.exit().success(), "{}", operator.output());
    node.expect("key-slot:");
    node.exit();
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn todays_programs_open_a_previous_disk_by_the_files_of_the_previous_command() {
    a_cluster_changes_its_release(Previous, Today);
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn previous_programs_open_a_disk_of_today_by_the_files_of_todays_command() {
    a_cluster_changes_its_release(Today, Previous);
}

/// Starts `unlock` with a disk that no cluster has; returns what it says.
fn boot_new(setting: &Setting, unlock: Release, disk: &Path) -> String {
    let mut node = Program::start(&mut unlock.run(|| setting.unlock(disk)));
    assert!(!node.exit().success());
    node.output()
}

/// A machine gets another image before its first init.
fn a_disk_that_was_only_formatted(before: Release, after: Release) {
    let setting = Setting::new();
    let disk = setting.blank_disk();
    let said = boot_new(&setting, before, &disk);
    assert!(said.contains("formatted:"), "{said}");
    let said = boot_new(&setting, after, &disk);
    let known = "formatted before, but never part of a cluster: formatting it";
    assert!(said.contains(known), "{said}");
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn todays_unlock_formats_a_disk_again_that_a_previous_one_formatted() {
    a_disk_that_was_only_formatted(Previous, Today);
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn a_previous_unlock_formats_a_disk_again_that_todays_formatted() {
    a_disk_that_was_only_formatted(Today, Previous);
}

/// What one release writes into the header, the other reads and replaces.
#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn todays_programs_read_and_replace_the_addresses_in_a_previous_header() {
    let setting = Setting::new();
    let disk = a_first_node(&setting, Previous, Previous);
    let hosts: Vec<IpAddr> = vec![setting.host(3), setting.host(4)];
    let peers = luks::Peers {
        load_balancer: None,
        control_planes: hosts.clone(),
    };
    assert!(bootstrapper::state::state_disk::set_peers(&disk, &peers).unwrap());
    let known = bootstrapper::state::state_disk::peers(&disk).unwrap();
    assert_eq!(known.control_planes, hosts);
}

/// An operator divided the master secret before.
fn shares_of_one_release_recover_with_the_other(before: Release, after: Release) {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    setting.master_secret(MASTER_KEY);
    let divide = [
        "share",
        "--master-secret",
        "master-secret.json",
        "--shares=3",
        "--threshold=2",
    ];
    let output = before.run(|| setting.firstlight(&divide)).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let mut node = Program::start(&mut after.run(|| setting.unlock(&disk)));
    wait_for_port(setting.node(9999));
    let mut recover = after.run(|| setting.recovery(&setting.policy()));
    for number in [1, 3] {
        let share = format!("firstlight-shares/share-{number}-of-3.txt");
        recover.args(["--share", &share]);
    }
    let mut operator = Program::start(recover.arg("--timeout=60s"));
    assert!(operator.exit().success(), "{}", operator.output());
    node.expect("key-slot:");
    node.exit();
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn todays_command_recovers_a_disk_by_shares_of_the_previous_one() {
    shares_of_one_release_recover_with_the_other(Previous, Today);
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn a_previous_command_recovers_a_disk_by_shares_of_todays() {
    shares_of_one_release_recover_with_the_other(Today, Previous);
}

/// Returns the policy of an image, as this release measures it.
fn measured(release: Release, folder: &Path, more: &[&str]) -> Value {
    let kernel = boot_image::kernel();
    fs::write(folder.join("initrd"), "an initrd").unwrap();
    let mut command = Command::new(release.run(|| built("firstlight")));
    command.current_dir(folder).args(["measure", "--kernel"]);
    command.arg(kernel).args(["--initrd", "initrd"]);
    let output = command.args(["--memory=4096"]).args(more);
    let output = output.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    serde_json::from_slice(&output.stdout).unwrap()
}

const FIRST: &str = "--cmdline=console=ttyS0 efi=noruntime";
const SECOND: &str = "--cmdline=console=ttyS1 efi=noruntime";

/// A policy of before is in force while nodes boot again, and no register of the same image may have another value.
#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn both_releases_measure_the_same_registers() {
    let folder = TempDir::new().unwrap();
    for variant in ["qemu-vtpm", "aws-nitro-tpm", "azure-tdx", "gcp-sev-snp"] {
        let of = |release| {
            measured(
                release,
                folder.path(),
                &[FIRST, "--attestation-variant", variant],
            )
        };
        let mut today = of(Today);
        // a policy of today requires the strong form besides
        let require = today.as_object_mut().unwrap().remove("require");
        assert_eq!(require, Some("strong".into()), "{variant}");
        assert_eq!(of(Previous), today, "{variant}");
    }
}

/// A policy that one release wrote is complete for the other one, which adds an image to it.
fn a_policy_is_read_and_extended(before: Release, after: Release) {
    let folder = TempDir::new().unwrap();
    let written = measured(before, folder.path(), &[FIRST, "--name=first"]);
    fs::write(folder.path().join("policy.json"), written.to_string()).unwrap();
    let mut check = Command::new(after.run(|| built("firstlight")));
    check.current_dir(folder.path());
    let checked = check.args(["policy", "check", "policy.json"]).output();
    let checked = checked.unwrap();
    assert!(checked.status.success(), "{checked:?}");
    let more = [SECOND, "--add-to=policy.json", "--name=second"];
    let both = measured(after, folder.path(), &more);
    let policy = verifier::Policy::from_json(&both.to_string()).unwrap();
    let names: Vec<_> = policy.images().iter().map(|image| image.name()).collect();
    assert_eq!(names, ["first", "second"]);
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn todays_command_extends_a_previous_policy() {
    a_policy_is_read_and_extended(Previous, Today);
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn a_previous_command_extends_a_policy_of_today() {
    a_policy_is_read_and_extended(Today, Previous);
}

/// The new calls of an operator need a node of today.
#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn todays_command_says_that_a_previous_node_answers_no_operator() {
    let setting = Setting::new();
    let disk = a_first_node(&setting, Previous, Previous);
    let member = Program::start(&mut Previous.run(|| setting.bootstrapper(&disk)));
    member.expect("member: `firstlight status` is answered");
    let address = setting.node(9000).to_string();
    let policy = setting.policy_of(&[(15, [0; 32])]);
    let mut logs = operate(
        &setting,
        Today,
        &policy,
        &["logs", &address, "--timeout=60s"],
    );
    assert_eq!(logs.exit().code(), Some(1), "{}", logs.output());
    logs.expect("does not know the call: its Firstlight is older");
}
