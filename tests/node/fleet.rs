//! `firstlight recover --all`: several nodes wait, each in its own network with its own TPM, and some of them do not come back.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use base::boot::timeline::Timeline;
use base::machines::Cloud;
use base::stop::Stop;
use base64::Engine;
use bootstrapper::members::operator::{MemberMachine, OperatorService};
use bootstrapper::state::generation::Generations;
use proto::recoverproto::{
    RECOVER, RecoverMessage, RecoverResponse, STATUS, StatusRequest, StatusResponse,
};
use rpc::grpc::{Call, Code, Limits, Router, Server, Status};
use serde_json::{Value, json};
use support::swtpm::PCR_4;
use tempfile::TempDir;
use tpm::Tpm;
use verifier::qemu_vtpm;

use crate::json::assert_documented;
use crate::mutual::{hex, own_cluster};
use crate::program::Program;
use crate::setting::{MASTER_KEY, MEASUREMENT_SALT, Setting, wait_for_port};

/// A node that has booted and proves that it is a member.
pub struct Member {
    stop: Stop,
    server: Option<JoinHandle<()>>,
}

impl Drop for Member {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

/// Has the node continue its boot, which ended when the key had opened the disk: there is no device-mapper here.
pub fn boots(node: &Setting) -> Member {
    let location: tpm::Location = node.tpm.location().parse().unwrap();
    let mut tpm = Tpm::open(&location).unwrap();
    tpm.measure_cluster_id(&own_cluster()).unwrap();
    drop(tpm);
    let (stop, address) = (Stop::new(), node.node(9000));
    let issuer = Arc::new(qemu_vtpm::issuer(location, None));
    let (until, timeline) = (stop.clone(), Timeline::new("run"));
    let operators = OperatorService::new(MemberMachine {
        update_keys: vec![],
        root: node.path("mount"),
        files: node.path("files"),
        disk: Some(node.path("disk")),
        cloud: Cloud::Qemu,
        timeline,
        stop: stop.clone(),
    });
    let server = std::thread::spawn(move || {
        let root = TempDir::new().unwrap();
        let generations = Arc::new(Generations::open(root.path()));
        bootstrapper::members::member::serve(
            address,
            issuer,
            &generations,
            &operators,
            &until,
            &timeline,
        );
    });
    wait_for_port(address);
    Member {
        stop,
        server: Some(server),
    }
}

/// A node in the state file: its name, its role, and its machine.
pub type Listed<'a> = (&'a str, &'a str, &'a Setting);

/// Writes the operator's state file, as `firstlight status` leaves it, the policy, and the master secret. Returns the policy.
pub fn workspace(operator: &Setting, nodes: &[Listed]) -> PathBuf {
    let node = |(name, role, setting): &Listed| {
        json!({
            "name": name,
            "role": role,
            "addresses": [setting.host(2).to_string()],
            "key": setting.key_name().to_string(),
        })
    };
    let state = json!({
        "version": 1,
        "measurementSalt": base64::engine::general_purpose::STANDARD.encode(MEASUREMENT_SALT),
        "clusterID": hex(&own_cluster()),
        "nodesListed": "2026-11-20T03:00:00Z",
        "nodes": nodes.iter().map(node).collect::<Vec<Value>>(),
    });
    operator.file("firstlight-state.json", state.to_string());
    operator.master_secret(MASTER_KEY);
    operator.policy_of(&[(15, [0; 32]), (4, PCR_4)])
}

fn recover(operator: &Setting, policy: &Path, more: &[&str]) -> Program {
    let mut command = operator.firstlight(&["recover", "--all", "--policy"]);
    command
        .arg(policy)
        .args(["--master-secret", "master-secret.json"]);
    Program::start(command.args(more))
}

/// Returns the report, which is the JSON on stdout.
fn report(run: &Program) -> Value {
    assert_documented("recover --all", &run.stdout())
}

/// Returns a node of the report.
fn of<'a>(report: &'a Value, name: &str) -> &'a Value {
    let nodes = report["nodes"].as_array().unwrap();
    nodes.iter().find(|node| node["name"] == name).unwrap()
}

/// Waits until the node has got its key.
fn expect_key(node: &Program, by: &str) {
    let line = node.expect("key-slot:");
    assert!(line.contains(by), "{line}");
}

#[test]
fn control_planes_get_the_key_first_workers_come_back_by_themselves_and_a_cut_off_run_is_continued()
{
    let [one, two, worker] = [Setting::new(), Setting::new(), Setting::new()];
    worker.set_control_planes(&[3]);
    let nodes = [
        ("worker-0", "worker", &worker),
        ("cp-0", "control-plane", &one),
        ("cp-1", "control-plane", &two),
    ];
    let policy = workspace(&one, &nodes);
    let machine = |setting: &Setting| {
        let unlock = Program::start(&mut setting.unlock(&setting.initialized_disk()));
        wait_for_port(setting.node(9999));
        unlock
    };
    let (waiting_one, waiting_worker) = (machine(&one), machine(&worker));

    let mut cut_off = recover(&one, &policy, &["--timeout", "170s"]);
    cut_off.expect("3 nodes, as the API server listed them at 2026-11-20T03:00:00Z");
    cut_off.expect("cp-0 127.");
    expect_key(&waiting_one, "the operator at");
    cut_off.expect("9999: opened");
    cut_off.expect("worker-0 127.");
    cut_off.expect("verified: it waits for its cluster: 1 of 2 control planes have opened their disks, 2 are needed");
    cut_off.terminate();
    assert_eq!(cut_off.exit().code(), Some(143));
    cut_off.expect("run the same command again to continue");
    let first = cut_off.output();
    assert!(
        !first.contains("worker-0 127.0.0.1:9999: key-sent"),
        "{first}"
    );

    // the machine that was off is on, and the recovered one has booted
    let _member_one = boots(&one);
    let waiting_two = machine(&two);
    let mut run = recover(&one, &policy, &["--timeout", "170s", "-o", "json"]);
    expect_key(&waiting_two, "the operator at");
    run.expect("verified: its cluster should open its disk; otherwise it gets the key 5 min after the control planes");
    let _member_two = boots(&two);
    // with both control planes, there is a join service again
    let (_keys, keys) = worker.key_service(3, MASTER_KEY);
    let _join = worker.join_service(3, keys, &worker.policy());
    expect_key(&waiting_worker, &worker.host(3).to_string());
    let _member_worker = boots(&worker);
    assert_eq!(run.exit().code(), Some(0), "{}", run.output());
    let report = report(&run);
    assert_eq!(report["cluster"], hex(&own_cluster()));
    let sent = ["cp-0", "cp-1", "worker-0"].map(|name| {
        let node = of(&report, name);
        assert_eq!(node["state"], "member", "{report}");
        node["sent"].as_bool().unwrap()
    });
    assert_eq!(sent, [false, true, false]);

    // nothing is left to do
    let mut again = recover(&one, &policy, &["--timeout", "170s"]);
    assert_eq!(again.exit().code(), Some(0), "{}", again.output());
    again.expect("All nodes are back");
}

#[test]
fn a_dry_run_sends_nothing_and_says_what_is_wrong_with_each_node() {
    let [good, altered, stranger] = [Setting::new(), Setting::new(), Setting::new()];
    let mut tpm = Tpm::open(&altered.tpm.location().parse().unwrap()).unwrap();
    tpm.pcr_event(4, b"another boot loader").unwrap();
    drop(tpm);
    let machines = [&good, &altered, &stranger].map(|setting| {
        let unlock = Program::start(&mut setting.unlock(&setting.initialized_disk()));
        wait_for_port(setting.node(9999));
        unlock
    });
    let nodes = [
        ("cp-0", "control-plane", &good),
        ("cp-1", "control-plane", &altered),
    ];
    let policy = workspace(&good, &nodes);
    // accepts connections, and never answers
    let stalled = SocketAddr::new(good.host(5), 9999);
    let _stalled = TcpListener::bind(stalled).unwrap();
    let [host, off, other, unknown] = [
        good.host(2),
        good.host(9),
        altered.host(2),
        stranger.host(2),
    ];
    let list = format!("{host},{other},{unknown},{},{off}", stalled.ip());
    let more = [
        "--nodes",
        &list,
        "--dry-run",
        "--timeout",
        "25s",
        "-o",
        "json",
    ];
    let mut run = recover(&good, &policy, &more);
    assert_eq!(run.exit().code(), Some(3), "{}", run.output());
    let all = report(&run);
    assert_eq!(all["dryRun"], true);
    let state = |at: usize| all["nodes"][at]["state"].as_str().unwrap().to_owned();
    let states: Vec<String> = (0..5).map(state).collect();
    let expected = [
        "verified",
        "refused",
        "refused",
        "unreachable",
        "unreachable",
    ];
    assert_eq!(states, expected, "{all}");
    assert!(
        all["nodes"]
            .as_array()
            .unwrap()
            .iter()
            .all(|node| node["sent"] == false)
    );
    // register, expected, got, event
    let refused = of(&all, "cp-1");
    let wrong = &refused["refusals"][0];
    assert_eq!(
        (&wrong["field"], &wrong["expected"]),
        (&json!("PCR 4"), &json!(hex(&PCR_4)))
    );
    assert_eq!(wrong["got"].as_str().unwrap().len(), 64);
    let reason = refused["reason"].as_str().unwrap();
    let said = format!(
        "PCR 4: expected {}, got {}; ",
        hex(&PCR_4),
        wrong["got"].as_str().unwrap()
    );
    assert!(
        reason.contains(&said) && reason.contains("event log"),
        "{reason}"
    );
    // a machine of which the state file knows nothing
    let unknown = all["nodes"][2]["reason"].as_str().unwrap();
    assert!(
        unknown.contains(&stranger.key_name().to_string()),
        "{unknown}"
    );
    run.expect("4 of 5 nodes would not get the key: cp-1 (refused), ");

    // in a network, only the nodes that wait are found
    let network = format!("{}/29", good.host(0));
    let more = ["--nodes", &network, "--dry-run", "--timeout", "60s"];
    let mut run = recover(&good, &policy, &more);
    assert_eq!(run.exit().code(), Some(0), "{}", run.output());
    run.expect("found 1 nodes that wait");
    let row = run.expect(&format!("{host}:9999  control-plane  verified"));
    assert!(row.contains("cp-0"), "{row}");
    run.expect("Nothing was sent");

    // the master secret of another cluster is refused before a node is asked
    good.master_secret([9; 32]);
    let mut run = recover(&good, &policy, &[]);
    assert_eq!(run.exit().code(), Some(1), "{}", run.output());
    run.expect("this master secret makes the cluster");
    for machine in machines {
        let output = machine.output();
        assert!(!output.contains("does not open"), "{output}");
        machine.terminate();
    }
}

/// A recovery server that takes the secret and dies: the connection ends without an answer.
fn dies_with_the_key(node: &Setting) -> (Server, std::sync::mpsc::Receiver<()>) {
    let (took, is_taken) = std::sync::mpsc::channel();
    let recover = move |call: &Call, _: RecoverMessage| {
        took.send(()).unwrap();
        while !call.is_cancelled() {
            std::thread::sleep(Duration::from_millis(10));
        }
        Err::<RecoverResponse, _>(Status::new(Code::Cancelled, "the machine is gone"))
    };
    let status = |_: &Call, _: StatusRequest| Ok(StatusResponse::default());
    let router = Router::new().unary(RECOVER, recover).unary(STATUS, status);
    let issuer = qemu_vtpm::issuer(node.tpm.location().parse().unwrap(), None);
    let tls = Arc::new(atls::Server::new(Some(Arc::new(issuer)), None));
    let listener = TcpListener::bind(node.node(9999)).unwrap();
    let server = Server::start("dying", listener, tls, router, Limits::default()).unwrap();
    (server, is_taken)
}

#[test]
fn a_node_that_dies_with_the_key_is_asked_again_and_a_worker_that_does_not_come_back_gets_the_key()
{
    let [plane, worker, foreign] = [Setting::new(), Setting::new(), Setting::new()];
    let nodes = [
        ("cp-0", "control-plane", &plane),
        ("worker-0", "worker", &worker),
        ("worker-1", "worker", &foreign),
    ];
    let policy = workspace(&plane, &nodes);
    let (dying, is_taken) = dies_with_the_key(&plane);
    let waiting_worker = Program::start(&mut worker.unlock(&worker.initialized_disk()));
    // its key fits, but its header names another cluster
    let waiting_foreign =
        Program::start(&mut foreign.unlock(&foreign.initialized_disk_of(&[9; 32])));
    wait_for_port(worker.node(9999));
    wait_for_port(foreign.node(9999));
    let more = ["--timeout", "170s", "--rejoin-within", "1s", "-o", "json"];
    let mut run = recover(&plane, &policy, &more);
    is_taken.recv_timeout(crate::program::PATIENCE).unwrap();
    drop(dying);
    run.expect("The key was sent before: it may have opened its disk and continued its boot");
    // it starts again, and waits again
    let waiting_plane = Program::start(&mut plane.unlock(&plane.initialized_disk()));
    expect_key(&waiting_plane, "the operator at");
    let _member = boots(&plane);
    expect_key(&waiting_worker, "the operator at");
    let _member_worker = boots(&worker);
    assert_eq!(run.exit().code(), Some(1), "{}", run.output());
    let report = report(&run);
    for name in ["cp-0", "worker-0"] {
        let node = of(&report, name);
        assert_eq!(
            (&node["state"], &node["sent"]),
            (&json!("member"), &json!(true)),
            "{report}"
        );
    }
    let rejected = of(&report, "worker-1");
    assert_eq!(rejected["state"], "rejected", "{report}");
    let reason = rejected["reason"].as_str().unwrap();
    let why = "the measurement secret sent with it is of another cluster than the disk's header";
    assert!(reason.contains(why), "{reason}");
    run.expect("1 of 3 nodes are not back: worker-1 (rejected)");
    waiting_foreign.terminate();
}
