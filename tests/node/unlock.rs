//! Rejoin and recovery of an initialized disk.

use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base::crypto::Secret;
use base::master_secret::{MasterSecret, NO_STORE};
use common::cloud_server::{self, Answer};
use disk::luks::Peers;
use proto::join::{IssueRejoinTicketRequest, IssueRejoinTicketResponse};
use proto::recoverproto::{RecoverMessage, RecoverResponse};
use rpc::grpc::{Call, CallOptions, Channel, Code, Limits, Router, Server, Status};
use socket2::{Domain, Socket, Type};
use support::program::built;
use verifier::{Measurement, Policy, Validator, qemu_vtpm};

use crate::program::{PATIENCE, Program};
use crate::setting::{MASTER_KEY, MEASUREMENT_SALT, Setting, wait_for_port};

/// Here the boot ends after the key: there may be no device-mapper, and if there is, it does not accept a disk in a file.
fn expect_opened(node: &mut Program, by: &str) {
    let line = node.expect("key-slot:");
    assert!(line.contains(by), "{line}");
    assert!(!node.exit().success());
    let error = node.expect("error:");
    assert!(
        error.contains("/dev/mapper/control") || error.contains("not a block device"),
        "{error}"
    );
}

#[test]
fn an_attested_node_gets_its_key_from_a_join_service() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    setting.set_control_planes(&[3]);
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let _join = setting.join_service(3, keys, &setting.policy());
    let mut node = Program::start(&mut setting.unlock(&disk));
    node.expect("quote:");
    node.expect("ticket:");
    expect_opened(&mut node, &setting.host(3).to_string());
}

#[test]
fn a_host_that_marks_a_members_disk_as_new_does_not_make_the_node_format_it() {
    let setting = Setting::new();
    setting.set_control_planes(&[3]);
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let _join = setting.join_service(3, keys, &setting.policy());
    let disk = setting.initialized_disk();
    let token = |arguments: &[&str]| {
        let mut command = Command::new("/sbin/cryptsetup");
        command.args(["token", arguments[0], "--token-id", "0"]);
        let done = command.args(&arguments[1..]).arg(&disk).output().unwrap();
        assert!(done.status.success(), "{done:?}");
    };
    let new = r#"{"type":"constellation-state-disk","keyslots":[],"diskIsInitialized":false}"#;
    let new = setting.file("token", new);
    token(&["remove"]);
    for is_marked in [false, true] {
        if is_marked {
            token(&["import", "--json-file", new.to_str().unwrap()]);
        }
        let mut node = Program::start(&mut setting.unlock(&disk));
        node.expect("names a cluster, but token 0 says that the disk is new");
        expect_opened(&mut node, &setting.host(3).to_string());
    }
}

/// The part of a disk before its data, which a host can copy and bring back.
fn header_of(disk: &Path) -> Vec<u8> {
    let mut header = fs::read(disk).unwrap();
    header.truncate(16 << 20);
    header
}

fn bring_back(header: &[u8], disk: &Path) {
    let disk = fs::File::options().write(true).open(disk).unwrap();
    disk.write_all_at(header, 0).unwrap();
}

/// Runs cryptsetup with the disk as its last argument.
fn cryptsetup(arguments: &[&str], disk: &Path) {
    let mut command = Command::new("/sbin/cryptsetup");
    let done = command.args(arguments).arg(disk).output().unwrap();
    assert!(done.status.success(), "{done:?}");
}

#[test]
fn an_older_header_from_before_init_has_the_disk_formatted() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let before = header_of(&disk);
    let uuid = luks_uuid(&disk);
    bring_back(&header_of(&setting.initialized_disk()), &disk);
    let members = header_of(&disk);
    let node = Program::start(&mut setting.unlock(&disk));
    node.expect("of a cluster's node");
    node.terminate();

    bring_back(&before, &disk);
    let mut node = Program::start(&mut setting.unlock(&disk));
    node.expect("formatted before, but never part of a cluster: formatting it");
    node.expect("formatted:");
    assert!(!node.exit().success());
    let after = header_of(&disk);
    assert_ne!(luks_uuid(&disk), uuid);
    // nothing is left of either keyslot, each in an area of its own behind the copies of the header
    for old in [&before, &members] {
        let blocks = old.chunks(4096).zip(after.chunks(4096)).skip(8);
        let mut used = blocks.filter(|(old, _)| old.iter().any(|byte| *byte != 0));
        assert!(used.all(|(old, after)| old != after));
    }
}

fn luks_uuid(disk: &Path) -> String {
    let mut command = Command::new("/sbin/cryptsetup");
    let output = command.arg("luksUUID").arg(disk).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[test]
fn an_older_header_of_a_member_opens_with_the_same_key() {
    let setting = Setting::new();
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let _join = setting.join_service(3, keys, &setting.policy());
    let (metadata, _) = metadata_with_tag(Some(setting.host(3).to_string()));
    let disk = setting.disk_that_knows(&[4]);
    let older = header_of(&disk);
    let peers = Peers {
        load_balancer: None,
        control_planes: vec![setting.host(3)],
    };
    assert!(bootstrapper::state::state_disk::set_peers(&disk, &peers).unwrap());
    assert_ne!(header_of(&disk), older);
    bring_back(&older, &disk);
    let mut command = setting.unlock(&disk);
    let mut node = Program::start(command.args(["--csp", "aws", "--metadata", &metadata]));
    expect_opened(&mut node, &setting.host(3).to_string());
    // it has asked the older address
    let asked = format!("{}", setting.host(4));
    assert!(node.output().contains(&asked), "{}", node.output());
}

#[test]
fn swapped_keyslots_of_two_members_open_with_no_key() {
    let setting = Setting::new();
    setting.set_control_planes(&[3]);
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let _join = setting.join_service(3, keys, &setting.policy());
    let uuid = luks_uuid(&setting.initialized_disk());
    // the header of another member, with the UUID of this one
    let disk = setting.initialized_disk();
    cryptsetup(&["luksUUID", "--batch-mode", "--uuid", &uuid], &disk);
    let node = Program::start(&mut setting.unlock(&disk));
    node.expect("was not accepted: the key does not open this disk");
    assert!(!node.output().contains("key-slot:"));
}

/// The commands of docs/state-disk.md, as they are there.
#[test]
fn the_operator_adds_a_recovery_key_and_the_node_still_opens_its_disk() {
    let setting = Setting::new();
    setting.set_control_planes(&[3]);
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let _join = setting.join_service(3, keys, &setting.policy());
    let disk = setting.initialized_disk();
    let folder = disk.parent().unwrap();
    fs::rename(
        setting.master_secret(MASTER_KEY),
        folder.join("firstlight-mastersecret.json"),
    )
    .unwrap();

    let page = include_str!("../../docs/state-disk.md");
    let section = page.split("## A recovery key").nth(1).unwrap();
    let commands = section.split("```sh\n").nth(1).unwrap();
    let (commands, _) = commands.split_once("```").unwrap();
    let (first, commands) = commands.split_once('\n').unwrap();
    assert_eq!(first, "DISK=/dev/disk/by-id/virtio-state");
    let mut shell = Command::new("bash");
    let done = shell
        .args(["-ec", commands])
        .env("DISK", &disk)
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .current_dir(folder)
        .output()
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    assert!(!folder.join("disk.key").exists());

    let recovery_key = folder.join("recovery.key");
    let recovery_key = recovery_key.to_str().unwrap();
    let try_key = ["open", "--test-passphrase", "--key-file", recovery_key];
    cryptsetup(&try_key, &disk);
    let mut node = Program::start(&mut setting.unlock(&disk));
    expect_opened(&mut node, &setting.host(3).to_string());
}

/// The node reads the list itself, or asks `firstlight metadata serve`.
#[test]
fn a_list_of_machines_takes_the_place_of_a_clouds_metadata() {
    let setting = Setting::new();
    // the metadata service of the other clouds lists no control plane
    setting.set_control_planes(&[]);
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let _join = setting.join_service(3, keys, &setting.policy());
    let join_service = setting.host(3).to_string();
    let list = format!(
        r#"{{"self":"control-plane-0","machines":[{{"name":"control-plane-0","role":"control-plane","address":"127.0.0.1"}},
             {{"name":"control-plane-1","role":"control-plane","address":"{join_service}"}}]}}"#
    );
    let list = setting.file("machines.json", list);
    let server = SocketAddr::new(setting.host(1), 8081);
    let mut serve = Command::new(built("firstlight"));
    serve
        .args(["metadata", "serve", "--machines"])
        .arg(&list)
        .args(["--listen", &server.to_string()]);
    let _served = Program::start(&mut serve);
    wait_for_port(server);
    for (cloud, place) in [
        ("static", format!("file:{}", list.display())),
        ("qemu", format!("http://{server}")),
    ] {
        let disk = setting.initialized_disk();
        let mut command = setting.unlock(&disk);
        let mut node = Program::start(command.args(["--csp", cloud, "--metadata", &place]));
        expect_opened(&mut node, &join_service);
        // the load balancer leads nowhere: the same listing has asked for the control planes, too
        let output = node.output();
        assert!(!output.contains("no key yet"), "{cloud}: {output}");
    }
}

/// The clouds whose peers only an API knows.
const WITH_API: [&str; 5] = ["aws", "gcp", "azure", "openstack", "stackit"];

/// Starts the metadata service of a machine, whose tag names this host; `None` if it has no tag. Returns its URL and the paths that it
/// was asked for.
fn metadata_with_tag(host: Option<String>) -> (String, Arc<Mutex<Vec<String>>>) {
    let asked = Arc::new(Mutex::new(vec![]));
    let paths = asked.clone();
    let url = cloud_server::start(move |request| {
        paths.lock().unwrap().push(request.path.clone());
        let is_token = request.method == "PUT";
        let is_allowed = match &*request.path {
            "/latest/api/token" => is_token,
            path if path.starts_with("/latest/") => {
                request.field("x-aws-ec2-metadata-token") == Some("token")
            }
            path if path.starts_with("/computeMetadata/") => {
                request.field("metadata-flavor") == Some("Google")
            }
            path if path.starts_with("/metadata/") => request.field("metadata") == Some("true"),
            _ => true,
        };
        match (&*request.path, &host) {
            _ if !is_allowed => Answer::text(401, ""),
            ("/latest/api/token", _) => Answer::text(200, "token"),
            ("/metadata/instance/compute/tagsList", None) => Answer::json(200, "[]"),
            (_, None) => Answer::text(404, ""),
            ("/latest/meta-data/tags/instance/firstlight-peers", Some(host))
            | ("/computeMetadata/v1/instance/attributes/firstlight-peers", Some(host)) => {
                Answer::text(200, host)
            }
            ("/metadata/instance/compute/tagsList", Some(host)) => {
                let tag = serde_json::json!({"name": "firstlight-peers", "value": host});
                Answer::json(200, serde_json::json!([{"name": "a", "value": "b"}, tag]))
            }
            ("/openstack/2018-08-27/user_data", Some(host)) => {
                let data = serde_json::json!({"openstack-load-balancer-endpoint": host});
                Answer::json(200, data)
            }
            _ => Answer::text(404, ""),
        }
    });
    (url, asked)
}

#[test]
fn a_reboot_in_each_cloud_needs_the_header_and_no_request_to_the_cloud() {
    let setting = Setting::new();
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let _join = setting.join_service(3, keys, &setting.policy());
    for cloud in WITH_API {
        let (metadata, asked) = metadata_with_tag(None);
        let disk = setting.disk_that_knows(&[3]);
        let mut command = setting.unlock(&disk);
        let mut node = Program::start(command.args(["--csp", cloud, "--metadata", &metadata]));
        expect_opened(&mut node, &setting.host(3).to_string());
        assert!(asked.lock().unwrap().is_empty(), "{cloud}");
    }
}

#[test]
fn the_tag_of_a_machine_leads_where_the_header_does_not() {
    let setting = Setting::new();
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let _join = setting.join_service(3, keys, &setting.policy());
    let join_service = setting.host(3).to_string();
    for cloud in WITH_API {
        let (metadata, asked) = metadata_with_tag(Some(join_service.clone()));
        let disk = setting.initialized_disk();
        let mut command = setting.unlock(&disk);
        let mut node = Program::start(command.args(["--csp", cloud, "--metadata", &metadata]));
        expect_opened(&mut node, &join_service);
        // two for AWS: the token, and the tag
        let asked = asked.lock().unwrap();
        assert!((1..=2).contains(&asked.len()), "{cloud}: {asked:?}");
    }
    // the setting comes first
    let (metadata, asked) = metadata_with_tag(None);
    let disk = setting.disk_that_knows(&[4]);
    let mut command = setting.unlock(&disk);
    command.args([
        "--csp",
        "aws",
        "--metadata",
        &metadata,
        "--peers",
        &join_service,
    ]);
    let mut node = Program::start(&mut command);
    expect_opened(&mut node, &join_service);
    assert!(!node.output().contains(&setting.host(4).to_string()));
    assert!(asked.lock().unwrap().is_empty());
}

/// All control planes have moved while the machine was off: the console says what an operator can do, and each way works.
#[test]
fn a_node_whose_control_planes_have_all_moved_says_what_to_do() {
    let setting = Setting::new();
    let moved = setting.disk_that_knows(&[4]);
    let (metadata, _) = metadata_with_tag(None);
    let mut command = setting.unlock(&moved);
    let node = Program::start(command.args(["--csp", "aws", "--metadata", &metadata]));
    // after the first report, which comes before the second listing
    for expected in [
        "if all control planes have moved, name one of them by the setting peers or in the machine's tag firstlight-peers, or run \
         `firstlight recover`",
        "this machine has no tag firstlight-peers: set it to",
        &setting.host(4).to_string(),
    ] {
        node.expect(expected);
    }
    node.terminate();
    // a disk without the token names the same ways
    let before = setting.initialized_disk();
    let mut command = setting.unlock(&before);
    let node = Program::start(command.args(["--csp", "aws", "--metadata", &metadata]));
    node.expect("disk header: it names no control plane: the disk is from Constellation or");
    node.terminate();
    let node = Program::start(&mut setting.unlock(&before));
    node.expect("disk header: it names no control plane");
    node.expect("if all control planes have moved, name one");
    node.terminate();
    // the next listing asks the tag, too
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let _join = setting.join_service(3, keys, &setting.policy());
    let (metadata, _) = metadata_with_tag(Some(setting.host(3).to_string()));
    let mut command = setting.unlock(&moved);
    let mut node = Program::start(command.args(["--csp", "aws", "--metadata", &metadata]));
    expect_opened(&mut node, &setting.host(3).to_string());
}

#[test]
fn the_operator_brings_the_key_when_no_join_service_is_there() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    let mut node = Program::start(&mut setting.unlock(&disk));
    let policy = setting.policy();
    // the node may be asked before it has read the header
    let asked = Instant::now();
    loop {
        let mut status = Program::start(setting.recovery(&policy).arg("--status"));
        assert!(status.exit().success(), "{}", status.output());
        if status.output().contains("it names no control plane") {
            break;
        }
        assert!(asked.elapsed() < PATIENCE, "{}", status.output());
    }
    let mut recover = Program::start(&mut setting.recover(MASTER_KEY));
    assert!(recover.exit().success(), "{}", recover.output());
    expect_opened(&mut node, "the operator at");
}

#[test]
fn a_wrong_master_secret_is_answered_and_the_node_waits_on() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    let mut node = Program::start(&mut setting.unlock(&disk));
    let mut wrong = Program::start(&mut setting.recover([9; 32]));
    assert!(!wrong.exit().success());
    wrong.expect("does not open disk");
    node.expect("does not open this disk");
    // a call during the delay after the wrong secret waits until the delay is over, and gets one answer
    let mut right = Program::start(&mut setting.recover(MASTER_KEY));
    assert!(right.exit().success(), "{}", right.output());
    assert!(
        !right.output().contains("your last secret was wrong"),
        "{}",
        right.output()
    );
    expect_opened(&mut node, "the operator at");
}

#[test]
fn a_join_service_with_a_wrong_key_does_not_stop_the_right_one() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    setting.set_control_planes(&[3]);
    let (_wrong_keys, wrong_keys) = setting.key_service(3, [7; 32]);
    let policy = setting.policy();
    let _wrong = setting.join_service(3, wrong_keys, &policy);
    let mut node = Program::start(&mut setting.unlock(&disk));
    node.expect("was not accepted: the key does not open this disk");
    let (_keys, keys) = setting.key_service(4, MASTER_KEY);
    let _join = setting.join_service(4, keys, &policy);
    setting.set_control_planes(&[3, 4]);
    expect_opened(&mut node, &setting.host(4).to_string());
}

/// No source is trusted: a DNS server or a metadata service can be spoofed.
#[test]
fn a_source_that_named_wrong_hosts_costs_time_only_while_it_does() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let _join = setting.join_service(3, keys, &setting.policy());
    // more than the list has room for
    setting.set_control_planes(&Vec::from_iter(100..=200));
    let mut node = Program::start(&mut setting.unlock(&disk));
    node.expect(&setting.host(100).to_string());
    setting.set_control_planes(&[3]);
    expect_opened(&mut node, &setting.host(3).to_string());
}

#[test]
fn a_join_service_that_hangs_does_not_delay_one_that_answers() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    setting.set_control_planes(&[3, 4]);
    // accepts, and never answers
    let _hanging = TcpListener::bind(SocketAddr::new(setting.host(3), 30090)).unwrap();
    let (_keys, keys) = setting.key_service(4, MASTER_KEY);
    let _join = setting.join_service(4, keys, &setting.policy());
    let start = Instant::now();
    let mut node = Program::start(&mut setting.unlock(&disk));
    expect_opened(&mut node, &setting.host(4).to_string());
    // the service that hangs would have delayed the node for 30 seconds
    support::promptly::assert_no_wait(start, Duration::from_millis(1250));
}

/// Returns the validator of machines that have joined no cluster.
pub fn fresh() -> Arc<dyn Validator> {
    let fresh = Measurement {
        expected: vec![0; 32],
        warn_only: false,
    };
    let policy = Policy::new([(15, fresh)].into()).unwrap();
    Arc::new(qemu_vtpm::validator(Arc::new(policy)))
}

/// Starts a join service like Constellation's, which proves nothing, on the third host.
pub fn old_join_service(setting: &Setting, router: Router) -> Server {
    let listener = TcpListener::bind(SocketAddr::new(setting.host(3), 30090)).unwrap();
    let tls = atls::Server::new(None, Some(verifier::judge(fresh()))).only_old();
    Server::start("join", listener, Arc::new(tls), router, Limits::default()).unwrap()
}

#[test]
fn a_join_service_that_hangs_after_the_handshake_does_not_delay_one_that_answers() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    setting.set_control_planes(&[3, 4]);
    // takes the call, and answers at the end of the test
    let (asked, is_asked) = std::sync::mpsc::channel();
    let handler = move |call: &Call, _: IssueRejoinTicketRequest| {
        asked.send(()).unwrap();
        while !call.is_cancelled() {
            std::thread::sleep(Duration::from_millis(10));
        }
        Err::<IssueRejoinTicketResponse, _>(Status::new(Code::Cancelled, "the node is gone"))
    };
    let router = Router::new().unary("/join.API/IssueRejoinTicket", handler);
    let _hanging = old_join_service(&setting, router);
    let mut node = Program::start(&mut setting.unlock(&disk));
    is_asked.recv_timeout(PATIENCE).unwrap();
    let (_keys, keys) = setting.key_service(4, MASTER_KEY);
    let _join = setting.join_service(4, keys, &setting.policy());
    expect_opened(&mut node, &setting.host(4).to_string());
}

#[test]
fn a_join_service_that_answers_with_an_error_is_named_and_asked_again() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    setting.set_control_planes(&[3]);
    // the address of its key service, which starts later
    let keys = SocketAddr::new(setting.host(3), 9000);
    let _join = setting.join_service(3, keys, &setting.policy());
    let mut node = Program::start(&mut setting.unlock(&disk));
    let refusal = node.expect(&format!("join service {}:30090: ", setting.host(3)));
    assert!(
        refusal.contains("the key service does not answer at the moment"),
        "{refusal}"
    );
    let (_keys, _) = setting.key_service(3, MASTER_KEY);
    expect_opened(&mut node, &setting.host(3).to_string());
}

/// A volume of the cluster's storage is also a disk without a record, and its key is of the same kind as a state disk's.
#[test]
fn a_disk_that_does_not_say_of_which_cluster_it_is_opens_only_while_the_cluster_is_migrating() {
    let setting = Setting::new();
    let disk = setting.disk_of_before();
    setting.set_control_planes(&[3]);
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let policy = setting.policy();
    // a day in the past has no effect
    let _strict = setting.join_service_with(3, keys, &policy, &["--migrate-until", "2026-01-01"]);
    let mut node = Program::start(&mut setting.unlock(&disk));
    let line = node.expect("was not accepted: ");
    assert!(
        line.contains("header names no cluster") && line.contains("--migrate-until"),
        "{line}"
    );
    let migrating = setting.join_service_with(4, keys, &policy, &["--migrate-until", "2099-12-31"]);
    migrating.expect("migration is on until 2100-01-01T00:00:00Z");
    setting.set_control_planes(&[3, 4]);
    expect_opened(&mut node, &setting.host(4).to_string());
    migrating.terminate();
}

#[test]
fn the_operator_opens_a_disk_of_before_by_saying_so() {
    use base64::Engine;
    let setting = Setting::new();
    let disk = setting.disk_of_before();
    let mut node = Program::start(&mut setting.unlock(&disk));
    let salt = base64::engine::general_purpose::STANDARD.encode(MEASUREMENT_SALT);
    setting.file(
        "firstlight-state.json",
        format!(r#"{{"version": 1, "measurementSalt": "{salt}"}}"#),
    );
    let mut plain = Program::start(&mut setting.recover(MASTER_KEY));
    assert_eq!(plain.exit().code(), Some(1));
    plain.expect("--migrate of firstlight recover");
    let mut migrating = Program::start(setting.recover(MASTER_KEY).arg("--migrate"));
    assert!(migrating.exit().success(), "{}", migrating.output());
    expect_opened(&mut node, "the operator at");
}

#[test]
fn a_disk_that_is_of_another_cluster_by_its_own_word_stays_closed() {
    let setting = Setting::new();
    let disk = setting.initialized_disk_of(&[9; 32]);
    setting.set_control_planes(&[3]);
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let _join = setting.join_service_with(
        3,
        keys,
        &setting.policy(),
        &["--migrate-until", "2099-12-31"],
    );
    let node = Program::start(&mut setting.unlock(&disk));
    node.expect("was not accepted: the key opens this disk, but the measurement secret sent with it is of another cluster than the disk's header");
    assert!(!node.output().contains("key-slot:"));
}

#[test]
fn a_node_with_other_software_is_refused_and_only_the_service_learns_why() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    setting.set_control_planes(&[3]);
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let join = setting.join_service(
        3,
        keys,
        &setting.policy_of(&[(4, [0xab; 32]), (15, [0; 32])]),
    );
    let node = Program::start(&mut setting.unlock(&disk));
    let refusal = join.expect("PCR 4");
    assert!(refusal.contains(&"ab".repeat(32)), "{refusal}");
    let mut status = Program::start(setting.recovery(&setting.policy()).arg("--status"));
    assert!(status.exit().success());
    status.expect(&setting.host(3).to_string());
    assert!(
        !node.output().contains(&"ab".repeat(32)),
        "{}",
        node.output()
    );
    assert!(!node.output().contains("key-slot:"));
}

#[test]
fn the_operator_sends_no_secret_to_a_node_with_other_software() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    let node = Program::start(&mut setting.unlock(&disk));
    let policy = setting.policy_of(&[(9, [0xcd; 32]), (15, [0; 32])]);
    let mut command = setting.recovery(&policy);
    command.arg("--master-secret");
    let mut recover = Program::start(command.arg(setting.master_secret(MASTER_KEY)));
    assert_eq!(recover.exit().code(), Some(3));
    let refusal = recover.expect("PCR 9");
    assert!(refusal.contains(&"cd".repeat(32)), "{refusal}");
    assert!(!node.output().contains("key-slot:"));
}

#[test]
fn metadata_that_is_down_slow_or_nonsense_keeps_no_operator_away() {
    for spoil in [
        (|setting: &Setting| setting.metadata.set_down(true)) as fn(&Setting),
        |setting| setting.metadata.set_delay(Duration::from_secs(3600)),
        |setting| setting.metadata.set_peers("<html>"),
    ] {
        let setting = Setting::new();
        spoil(&setting);
        let disk = setting.initialized_disk();
        let mut node = Program::start(&mut setting.unlock(&disk));
        let mut recover = Program::start(&mut setting.recover(MASTER_KEY));
        assert!(recover.exit().success(), "{}", recover.output());
        expect_opened(&mut node, "the operator at");
    }
}

#[test]
fn metadata_that_hangs_does_not_delay_a_boot_whose_disk_is_open() {
    let setting = Setting::new();
    setting.metadata.set_delay(Duration::from_secs(3600));
    let disk = setting.initialized_disk();
    let node = Program::start(&mut setting.unlock(&disk));
    crate::setting::wait_for_port(setting.node(9999));
    let mut recover = Program::start(&mut setting.recover(MASTER_KEY));
    assert!(recover.exit().success(), "{}", recover.output());
    let opened = seconds(&node.expect("key-slot:"));
    // the next step, for which this machine has no device-mapper; each of three requests would have delayed it for ten seconds
    let went_on = seconds(&node.expect("error:"));
    assert!(went_on - opened < 8.0, "from {opened} s to {went_on} s");
}

/// Returns the time of a node's event, in seconds of its own clock.
fn seconds(event: &str) -> f64 {
    let (_, rest) = event.split_once(']').unwrap();
    rest.split_once("s ").unwrap().0.trim().parse().unwrap()
}

#[test]
fn sigterm_ends_the_wait_and_leaves_the_disk_as_it_was() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    let before = std::fs::read(&disk).unwrap();
    let mut node = Program::start(&mut setting.unlock(&disk));
    node.expect("disk:");
    crate::setting::wait_for_port(setting.node(9999));
    node.terminate();
    assert_eq!(node.exit().code(), Some(143));
    assert!(std::fs::read(&disk).unwrap() == before);
}

/// Unauthenticated peers make TLS handshakes, each of which costs a quote, leave some of them incomplete, and send wrong master
/// secrets, from many addresses.
#[test]
fn strangers_keep_no_operator_away_and_fill_no_memory() {
    const MOST_OVER_IDLE: usize = 16 << 10; // KiB
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    let mut node = Program::start(&mut setting.unlock(&disk));
    crate::setting::wait_for_port(setting.node(9999));
    node.expect("it names no control plane");
    let resident = |name: &str| {
        let status = std::fs::read_to_string(format!("/proc/{}/status", node.id())).unwrap();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap()
            .to_owned();
        line.split_whitespace()
            .next()
            .unwrap()
            .parse::<usize>()
            .unwrap()
    };
    let idle = resident("VmRSS:");
    let over = AtomicBool::new(false);
    let (recovered, peak, wrong) = std::thread::scope(|scope| {
        let strangers: Vec<_> = (0..8)
            .map(|number| {
                let (setting, over) = (&setting, &over);
                scope.spawn(move || strangers(setting, number, over))
            })
            .collect();
        std::thread::sleep(Duration::from_secs(5));
        let mut recover = Program::start(&mut setting.recover(MASTER_KEY));
        let peak = resident("VmHWM:");
        let recovered = recover.exit().success();
        over.store(true, Ordering::SeqCst);
        let wrong: usize = strangers
            .into_iter()
            .map(|stranger| stranger.join().unwrap())
            .sum();
        (recovered.then_some(()).ok_or(recover.output()), peak, wrong)
    });
    recovered.unwrap();
    assert!(wrong > 0, "nobody brought a wrong secret");
    assert!(
        peak - idle < MOST_OVER_IDLE,
        "{} KiB over idle",
        peak - idle
    );
    expect_opened(&mut node, "the operator at");
}

/// Makes calls, each from a new address of the test's network. Returns how many wrong secrets were answered.
fn strangers(setting: &Setting, number: u8, over: &AtomicBool) -> usize {
    let (mut wrong, mut half_open) = (0, std::collections::VecDeque::new());
    for turn in (0u8..=249).cycle() {
        if over.load(Ordering::SeqCst) {
            break;
        }
        let source = SocketAddr::new(setting.host(20 + number * 25 + turn % 25), 0);
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&source.into()).unwrap();
        if socket
            .connect_timeout(&setting.node(9999).into(), Duration::from_secs(5))
            .is_err()
        {
            continue;
        }
        let socket = TcpStream::from(socket);
        if turn % 2 == 0 {
            half_open.push_back(socket);
            half_open.truncate(200);
            continue;
        }
        let client = atls::Client::new(None, None);
        let Ok(transport) = client.connect(socket, Instant::now() + Duration::from_secs(5)) else {
            continue;
        };
        let Ok(channel) = Channel::new(transport, "node") else {
            continue;
        };
        let kms = MasterSecret::new(Secret::random(32), Secret::random(32)).unwrap();
        let (kms_uri, storage_uri) = (kms.uri().to_string(), NO_STORE.into());
        let message = RecoverMessage {
            kms_uri,
            storage_uri,
            measurement_salt: vec![],
        };
        let options = CallOptions {
            timeout: Some(Duration::from_secs(2)),
            ..CallOptions::default()
        };
        let answer =
            channel.unary::<_, RecoverResponse>("/recoverproto.API/Recover", &message, &options);
        wrong += usize::from(answer.is_err_and(|status| status.code() == Code::FailedPrecondition));
    }
    wrong
}
