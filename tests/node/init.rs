//! The operator's init, complete except for the mount, for which this machine's kernel has no device-mapper.

use std::fs;
use std::net::TcpStream;
use std::path::Path;
use std::time::Instant;

use base::crypto::Secret;
use base::master_secret::{MasterSecret, NO_STORE};
use proto::init::init_response::Kind;
use proto::init::{INIT, InitRequest, InitResponse};
use rpc::grpc::{CallOptions, Channel, Status};

use crate::json::assert_documented;
use crate::program::{PATIENCE, Program};
use crate::setting::{INIT_SECRET, Setting, end_of_member, set_private, wait_for_port};

pub fn init(setting: &Setting, secret: &str, policy: &Path) -> Program {
    init_with(setting, secret, policy, &[])
}

fn init_with(setting: &Setting, secret: &str, policy: &Path, more: &[&str]) -> Program {
    let secret = setting.file("init-secret", secret);
    set_private(&secret);
    let endpoint = setting.node(9000).to_string();
    let mut command = setting.firstlight(&["init", "--endpoint", &endpoint, "--timeout", "30s"]);
    Program::start(
        command
            .arg("--policy")
            .arg(policy)
            .arg("--init-secret")
            .arg(secret)
            .arg("--require=any")
            .args(more),
    )
}

/// The image can name its cluster before that exists: `firstlight cluster-id` makes the files that init then uses.
#[test]
fn a_node_accepts_the_init_of_the_cluster_in_its_image_and_no_other() {
    let mut setting = Setting::new();
    let disk = setting.new_disk();
    let ask = |setting: &Setting, args: &[&str]| {
        let mut command = setting.firstlight(&[&["cluster-id"], args].concat());
        let output = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let (said, errors) = (text(output.stdout), text(output.stderr));
        (output.status.code().unwrap(), said, errors)
    };
    let (code, id, errors) = ask(&setting, &[]);
    assert_eq!(code, 0, "{errors}");
    assert!(
        errors.contains("a new master secret is in firstlight-mastersecret.json"),
        "{errors}"
    );
    let again = ask(&setting, &[]);
    assert_eq!(again, (0, id.clone(), String::new()));
    let (_, json, _) = ask(&setting, &["-o", "json"]);
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json, serde_json::json!({"clusterID": id.trim()}));

    let mut node = Program::start(
        setting
            .bootstrapper(&disk)
            .args(["--cluster-id", id.trim()]),
    );
    node.expect("ready:");
    let policy = setting.policy();
    let other = [
        "--master-secret",
        "other.json",
        "--state",
        "other-state.json",
    ];
    let mut operator = init_with(&setting, INIT_SECRET, &policy, &other);
    assert_eq!(operator.exit().code(), Some(1), "{}", operator.output());
    operator.expect("image is for the cluster ");
    assert!(
        operator.output().contains(id.trim()),
        "{}",
        operator.output()
    );

    let mut operator = init(&setting, INIT_SECRET, &policy);
    assert!(operator.exit().success(), "{}", operator.output());
    operator.expect(&format!("Cluster ID: {}", id.trim()));
    assert!(end_of_member(&mut node).success());
    // files of two clusters
    let (code, _, errors) = ask(&setting, &["--master-secret", "other.json"]);
    assert!(
        code == 1 && errors.contains("one of the two files belongs to another cluster"),
        "{errors}"
    );
    setting.tpm.reboot();
}

/// A dry run checks the node and the files, and leaves both as they are.
fn rehearse(setting: &Setting, policy: &Path, key: &str) {
    let files = || {
        let mut files: Vec<_> = fs::read_dir(setting.path("."))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        files.sort();
        files
    };
    // writes the init secret
    let dry_run = ["--dry-run", "--attestation-key", key];
    let mut operator = init_with(setting, INIT_SECRET, policy, &dry_run);
    assert!(operator.exit().success(), "{}", operator.output());
    operator.expect("It would get a new master secret, written to firstlight-mastersecret.json");
    operator.expect("Nothing was sent or written");
    let before = files();
    let mut operator = init_with(setting, INIT_SECRET, policy, &["--dry-run"]);
    assert_eq!(operator.exit().code(), Some(3), "{}", operator.output());
    assert_eq!(files(), before);
    assert!(!setting.path("firstlight-mastersecret.json").exists());
    assert!(!setting.path("firstlight-state.json").exists());
}

#[test]
fn an_initialized_node_comes_back_by_the_operators_master_secret_file() {
    let mut setting = Setting::new();
    let disk = setting.new_disk();
    let mut node = Program::start(&mut setting.bootstrapper(&disk));
    node.expect("ready:");
    // the console shows the name of the TPM's key
    let console = node.expect("attestation-key: ");
    let (_, name) = console.rsplit_once(' ').unwrap();
    assert_eq!(name, setting.key_name().to_string());
    let policy = setting.policy_of(&[(15, [0; 32])]);
    rehearse(&setting, &policy, name);
    let key = ["--attestation-key", name, "-o", "json"];
    let mut operator = init_with(&setting, INIT_SECRET, &policy, &key);
    assert!(operator.exit().success(), "{}", operator.output());
    let output = operator.output();
    let (_, made) = output.split_once("\n{").unwrap();
    let (made, _) = made.rsplit_once('}').unwrap();
    let made = assert_documented("init", &format!("{{{made}}}"));
    assert_eq!(made["key"], name);
    let kept = fs::read_to_string(setting.path("firstlight-state.json")).unwrap();
    assert!(kept.contains(name), "{kept}");
    assert!(end_of_member(&mut node).success());
    node.expect("committed:");
    node.expect("complete:");
    assert!(
        !setting.path("state.key").exists(),
        "the passphrase of the first boot is still there"
    );
    let state = fs::read_to_string(setting.path("mount/constellation/node_state.json")).unwrap();
    assert!(
        state.starts_with("{\n\t\"Role\": \"ControlPlane\",\n\t\"MeasurementSalt\": \""),
        "{state}"
    );

    // when the program starts again in this boot, the node is a member
    let mut again = Program::start(&mut setting.bootstrapper(&disk));
    assert!(end_of_member(&mut again).success());
    again.expect("a member of its cluster");

    // reboot
    setting.tpm.reboot();
    let master: serde_json::Value = serde_json::from_str(
        &fs::read_to_string(setting.path("firstlight-mastersecret.json")).unwrap(),
    )
    .unwrap();
    let recovered = recover_with(&setting, &disk);
    assert!(
        master["key"].is_string() && recovered.contains("key-slot:"),
        "{recovered}"
    );
}

/// Boots the disk and opens it with the operator's own master secret file; the state file knows the node's key.
fn recover_with(setting: &Setting, disk: &Path) -> String {
    let mut node = Program::start(&mut setting.unlock(disk));
    let mut command = setting.recovery(&setting.policy_of(&[(15, [0; 32])]));
    command.args(["--timeout", "30s"]);
    let mut operator =
        Program::start(command.args(["--master-secret", "firstlight-mastersecret.json"]));
    assert!(operator.exit().success(), "{}", operator.output());
    node.exit();
    node.output()
}

#[test]
fn a_wrong_secret_gets_one_short_refusal_and_changes_nothing() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let before = fs::read(&disk).unwrap();
    let node = Program::start(&mut setting.bootstrapper(&disk));
    node.expect("ready:");
    let mut operator = init(&setting, "wrong", &setting.policy());
    assert!(!operator.exit().success());
    operator.expect("invalid init secret");
    assert!(
        !setting.path("firstlight-cluster.log").exists(),
        "the node disclosed its log"
    );
    assert!(fs::read(&disk).unwrap() == before);
}

/// After a few wrong secrets the delay is longer than a second: the right secret waits for its end, and passes.
#[test]
fn a_right_secret_passes_however_soon_it_comes_after_wrong_ones() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let mut node = Program::start(&mut setting.bootstrapper(&disk));
    node.expect("ready:");
    for _ in 0..3 {
        let mut hasty = init(&setting, "wrong", &setting.policy());
        assert!(!hasty.exit().success());
        hasty.expect("invalid init secret");
    }
    let mut right = init(&setting, INIT_SECRET, &setting.policy());
    assert!(right.exit().success(), "{}", right.output());
    assert!(
        !right.output().contains("too many callers wait"),
        "{}",
        right.output()
    );
    assert!(end_of_member(&mut node).success());
}

#[test]
fn a_node_with_other_software_gets_no_secret() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let node = Program::start(&mut setting.bootstrapper(&disk));
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
    let mut node = Program::start(&mut setting.bootstrapper(&disk));
    node.expect("ready:");
    let mut operator = init(&setting, INIT_SECRET, &setting.policy());
    assert!(operator.exit().success(), "{}", operator.output());
    end_of_member(&mut node);
    // as if the power had failed between the commit and the end of the cluster's set-up
    fs::remove_file(setting.path("mount/firstlight/complete")).unwrap();
    let mut next = Program::start(&mut setting.bootstrapper(&disk));
    assert_eq!(next.exit().code(), Some(3));
    next.expect("starts over");
    let mut after = Program::start(&mut setting.unlock(&disk));
    after.expect("formatted before, but never part of a cluster");
    after.exit();
}

#[test]
fn sigterm_while_waiting_for_the_operator_ends_the_server() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let mut node = Program::start(&mut setting.bootstrapper(&disk));
    wait_for_port(setting.node(9000));
    node.terminate();
    assert_eq!(node.exit().code(), Some(143));
}

#[test]
fn a_metadata_service_without_a_hash_is_asked_again() {
    let setting = Setting::new();
    setting
        .metadata
        .set_init_secret_hash("<html>not a hash</html>");
    let disk = setting.new_disk();
    let node = Program::start(&mut setting.bootstrapper(&disk));
    node.expect("bcrypt hash");
    setting
        .metadata
        .set_init_secret_hash(&bcrypt::hash(INIT_SECRET, 4).unwrap());
    node.expect("ready:");
}

#[test]
fn what_cannot_become_a_cluster_is_refused_before_the_lock_and_the_node_stays_fresh() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let mut node = Program::start(&mut setting.bootstrapper(&disk));
    node.expect("ready:");
    let unverified =
        r#"[{"url": "https://mirror.example/kubelet", "install_path": "/run/state/bin/kubelet"}]"#;
    let elsewhere = r#"[{"url": "data:,x", "install_path": "/etc/passwd"}]"#;
    let (unverified, elsewhere) = (
        setting.file("unverified.json", unverified),
        setting.file("elsewhere.json", elsewhere),
    );
    let empty = setting.file("empty.json", "[]");
    let (unverified, elsewhere) = (unverified.to_str().unwrap(), elsewhere.to_str().unwrap());
    let empty = [
        "--components",
        empty.to_str().unwrap(),
        "--accept-components=missing-programs",
    ];
    let with = |version: &'static str, more: &[&'static str]| {
        [&["--kubernetes-version", version], more].concat()
    };
    let refused = |arguments: &[&str], why: &str| {
        let mut operator = init_with(&setting, INIT_SECRET, &setting.policy(), arguments);
        let code = operator.exit().code();
        // 2: the operator's program refuses it before it connects
        let is_usage = operator.output().contains("Usage: firstlight init ");
        let expected = if is_usage { 2 } else { 1 };
        assert_eq!(code, Some(expected), "{}", operator.output());
        assert!(
            operator.output().contains(why),
            "{why} is not in {}",
            operator.output()
        );
        assert!(!node.output().contains("locked:"), "{arguments:?}");
    };
    for (arguments, why) in [
        (with("v1.29.0", &[]), "expected v1.31 to v1.37"),
        (with("v1.34.x", &[]), "is not a version of Kubernetes"),
        (
            with("v1.34.4", &["--cluster-name", "A b"]),
            "cannot be named",
        ),
        (
            with("v1.34.4", &["--service-cidr", "10.0.0.1/8"]),
            "is an address in a network",
        ),
        (
            with("v1.34.4", &["--pod-cidr", "nonsense"]),
            "is not a network",
        ),
        (
            with(
                "v1.34.4",
                &["--service-cidr", "10.1.0.0/16", "--pod-cidr", "10.1.2.0/24"],
            ),
            "overlap",
        ),
        (
            with("v1.34.4", &["--pod-cidr", "127.0.0.0/8"]),
            "has addresses of 127.0.0.0/8",
        ),
        (
            with("v1.34.4", &["--pod-cidr", "10.244.0.0/25"]),
            "each node gets a /24",
        ),
        // only the node knows its address
        (
            with("v1.34.4", &["--service-cidr", "fd02::/112"]),
            "requires an IPv4 network",
        ),
        (
            with("v1.34.4", &["--apiserver-san", "https://a"]),
            "cannot be a name in a certificate",
        ),
    ] {
        refused(&[&arguments[..], &empty].concat(), why);
    }
    let version = ["--kubernetes-version", "v1.34.4", "--components"];
    // the node judges by its own settings
    let accepted = "--accept-components=unverified,missing-programs";
    refused(
        &[&version[..], &[unverified, accepted]].concat(),
        "has no hash",
    );
    refused(
        &[&version[..], &[elsewhere]].concat(),
        "is not in an allowed directory",
    );

    // another program than `firstlight` may send the request, so the node also refuses it
    let cases: [(Spoil, &str); 7] = [
        (
            |it| it.kubernetes_version = "v1.29.0".into(),
            "expected v1.31 to v1.37",
        ),
        (
            |it| it.kubernetes_version = "1.34.4".into(),
            "is not a version of Kubernetes",
        ),
        (|it| it.cluster_name = "A b".into(), "cannot be named"),
        (
            |it| it.policy_operators = r#"{"required":1,"operators":[]}"#.into(),
            "policy_operators: the list has 0 operators",
        ),
        (
            |it| it.service_cidr = "10.0.0.1/8".into(),
            "is an address in a network",
        ),
        (|it| it.pod_cidr = "nonsense".into(), "is not a network"),
        (
            |it| it.apiserver_cert_sans = vec!["https://a".into()],
            "cannot be a name in a certificate",
        ),
    ];
    for (alter, why) in cases {
        let said = asked_directly(&setting, alter);
        assert!(said.contains(why), "{why} is not in {said}");
        assert!(!node.output().contains("locked:"), "{why}");
    }

    // the machine's metadata
    setting
        .metadata
        .set_self(&setting.instance("control_plane-0_", 2));
    refused(&[&version[..2], &empty].concat(), "rename the machine");
    setting
        .metadata
        .set_self(r#"{"Name":"node","Role":"ControlPlane","VPCIP":""}"#);
    refused(
        &[&version[..2], &empty].concat(),
        "does not have the address of this machine",
    );
    setting.metadata.set_self(
        &setting
            .instance("node", 2)
            .replace("ControlPlane", "Worker"),
    );
    refused(&[], "is a worker");
    setting.metadata.set_down(true);
    refused(&[], "does not know its own identity");
    setting.metadata.set_down(false);

    // the node is still fresh
    setting.metadata.set_self(&setting.instance("node", 2));
    let mut operator = init(&setting, INIT_SECRET, &setting.policy());
    assert!(operator.exit().success(), "{}", operator.output());
    assert!(end_of_member(&mut node).success());
}

/// Changes a good request to one that a node must refuse.
type Spoil = fn(&mut InitRequest);

/// Asks the node for an init with a request that `alter` has changed; returns the refusal.
fn asked_directly(setting: &Setting, alter: Spoil) -> String {
    let mut request = good_request();
    alter(&mut request);
    let (channel, options) = connect(setting);
    let answer = channel.server_streaming(INIT, &request, &options);
    refusal(answer.and_then(|mut answer| answer.one()))
}

/// A request that a fresh node accepts.
pub fn good_request() -> InitRequest {
    let kms = MasterSecret::new(Secret::random(32), Secret::random(32)).unwrap();
    let mut request = InitRequest::default();
    request.kms_uri = kms.uri().to_string();
    request.storage_uri = NO_STORE.into();
    request.measurement_salt = vec![1; 32];
    request.kubernetes_version = "v1.34.4".into();
    request.init_secret = INIT_SECRET.into();
    request
}

/// Connects to the node's init server.
pub fn connect(setting: &Setting) -> (Channel, CallOptions) {
    let socket = TcpStream::connect(setting.node(9000)).unwrap();
    let client = atls::Client::new(None, None);
    let transport = client.connect(socket, Instant::now() + PATIENCE).unwrap();
    let options = CallOptions {
        timeout: Some(PATIENCE),
        ..CallOptions::default()
    };
    (Channel::new(transport, "node").unwrap(), options)
}

/// Returns why the node refuses.
pub fn refusal(answer: Result<InitResponse, Status>) -> String {
    match answer {
        Ok(InitResponse {
            kind: Some(Kind::InitFailure(failure)),
        }) => failure.error,
        Ok(_) => "no refusal".into(),
        Err(status) => status.to_string(),
    }
}
