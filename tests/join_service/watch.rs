//! Members are asked for fresh evidence. The nodes are software TPMs, each with the server that a member runs.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ::services::member_controller::watch::{ElectionTimes, Options, Rules, WatchAction};
use ::services::member_controller::{self, MemberController};
use base::boot::timeline::Timeline;
use base::crypto::{Secret, cluster_id};
use base::machines::Cloud;
use base::stop::Stop;
use base::text::hex;
use bootstrapper::members::member;
use bootstrapper::members::operator::{MemberMachine, OperatorService};
use bootstrapper::state::generation::Generations;
use kubernetes::client::{CONFIG_MAPS, EVENTS, LEASES, NODES, Object, Selector};
use kubernetes::machine_record::MachineRecord;
use proto::join::IssueJoinTicketRequest;
use rpc::grpc::{Code, Limits, Router, Server};
use serde_json::{Value, json};
use tempfile::TempDir;
use tpm::Tpm;
use verifier::qemu_vtpm;

use crate::kube_apiserver::Cluster;
use crate::setup::*;
use crate::swtpm::{PCR_4, Swtpm};

const LABEL: &str = "firstlight.node-restriction.kubernetes.io/attested";

pub fn options() -> Options {
    Options {
        interval: Duration::from_secs(2),
        rules: Rules {
            action: WatchAction::Cordon,
            silence: Some(Duration::from_secs(20)),
            share: 60,
            close_disks: true,
        },
        issuer: None,
        times: ElectionTimes {
            renew: Duration::from_millis(300),
            hold: Duration::from_secs(6),
            duration: Duration::from_secs(8),
        },
    }
}

fn watching(setup: &Setup, cluster: &Cluster) -> member_controller::Options {
    member_controller::Options {
        watch: Some((options(), setup.judging())),
        ..setup.options(cluster)
    }
}

/// The server of a member, which `bootstrapper` runs.
pub struct Member {
    stop: Stop,
    thread: Option<JoinHandle<()>>,
}

impl Member {
    /// Starts the server of the machine whose state disk is mounted at `root`.
    pub fn start(tpm: &Swtpm, address: Ipv4Addr, root: &Path) -> Member {
        let generations = Arc::new(Generations::open(root));
        let issuer = Arc::new(qemu_vtpm::issuer(tpm.location().parse().unwrap(), None));
        let stop = Stop::new();
        let stopped = stop.clone();
        let address = SocketAddr::new(address.into(), 9000);
        let timeline = Timeline::new("member");
        let operators = OperatorService::new(MemberMachine {
            update_keys: vec![],
            root: root.into(),
            files: root.into(),
            disk: None,
            cloud: Cloud::Qemu,
            timeline,
            stop: stop.clone(),
        });
        let thread = thread::spawn(move || {
            member::serve(
                address,
                issuer,
                &generations,
                &operators,
                &stopped,
                &timeline,
            );
        });
        Member {
            stop,
            thread: Some(thread),
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.stop.stop();
        self.thread.take().unwrap().join().unwrap();
    }
}

/// A machine that has joined: its TPM, and what its kubelet has written.
pub struct Node {
    pub name: &'static str,
    pub address: Ipv4Addr,
    pub tpm: Swtpm,
    id: [u8; 32],
    /// Where its state disk is mounted.
    pub root: TempDir,
}

impl Node {
    pub fn join(setup: &Setup, name: &'static str, address: &'static str, disk: u8) -> Node {
        let tpm = Swtpm::start();
        let asked: IssueJoinTicketRequest = request(name, &[address], disk, false);
        let ticket = setup.join(&tpm, &asked).unwrap();
        let secret = Secret::new(ticket.measurement_secret.clone());
        let node = Node {
            name,
            address: address.parse().unwrap(),
            tpm,
            id: cluster_id(&secret, &ticket.measurement_salt),
            root: TempDir::new().unwrap(),
        };
        node.mark(&node.tpm);
        setup.make_node(name);
        let status = json!({"status": {
            "addresses": [{"type": "InternalIP", "address": address}], "nodeInfo": node_info("boot-1"),
        }});
        let at = NODES.named(name).subresource("status");
        setup.admin.merge(&at, &status).unwrap();
        node
    }

    /// Measures the cluster's ID, as a machine does when it becomes a member.
    pub fn mark(&self, tpm: &Swtpm) {
        let mut tpm = Tpm::open(&tpm.location().parse().unwrap()).unwrap();
        tpm.measure_cluster_id(&self.id).unwrap();
    }

    /// Measures other software.
    fn spoil(&self) {
        let digest = format!("4:sha256={}", "ab".repeat(32));
        self.tpm.tool("tpm2_pcrextend", &[&digest]);
    }

    /// Changes the address of its Node, as a network plugin's account may do.
    fn point_to(&self, setup: &Setup, address: &str) {
        let addresses = json!([{"type": "InternalIP", "address": address}]);
        let status = json!({"status": {"addresses": addresses}});
        let at = NODES.named(self.name).subresource("status");
        setup.admin.merge(&at, &status).unwrap();
    }

    pub fn serve(&self) -> Member {
        Member::start(&self.tpm, self.address, self.root.path())
    }

    fn object(&self, setup: &Setup) -> Value {
        setup.admin.get(&NODES.named(self.name)).unwrap()
    }

    /// Returns status, reason and message of the condition, separated by spaces.
    pub fn condition(&self, setup: &Setup) -> String {
        let node = self.object(setup);
        let conditions = node["status"]["conditions"].as_array();
        let mut conditions = conditions.into_iter().flatten();
        let found = conditions.find(|condition| condition["type"] == "Attested");
        found.map_or_else(String::new, |found| {
            let fields = ["status", "reason", "message"];
            fields.map(|field| found[field].as_str().unwrap()).join(" ")
        })
    }

    pub fn eventually(&self, setup: &Setup, condition: &str) {
        let what = format!("{} is {condition}", self.name);
        eventually_within(90, &what, || self.condition(setup).starts_with(condition));
    }

    /// Returns label, taint, and whether the node is cordoned.
    fn marks(&self, setup: &Setup) -> (String, String, bool) {
        let node = self.object(setup);
        let taints = node["spec"]["taints"].as_array();
        let mut taints = taints.into_iter().flatten();
        let taint = taints.find(|taint| taint["key"] == "firstlight/attestation");
        let taint = taint.map_or("", |taint| taint["value"].as_str().unwrap());
        let label = node["metadata"]["labels"][LABEL].as_str().unwrap_or("");
        let is_cordoned = node["spec"]["unschedulable"] == true;
        (label.into(), taint.into(), is_cordoned)
    }

    fn eventually_marked(&self, setup: &Setup, marks: (&str, &str, bool)) {
        let expected = (marks.0.to_owned(), marks.1.to_owned(), marks.2);
        let what = format!("{} is marked {marks:?}", self.name);
        eventually_within(60, &what, || self.marks(setup) == expected);
    }

    pub fn record(&self, setup: &Setup) -> MachineRecord {
        MachineRecord::read(&setup.admin.get_as(&self.record_at()).unwrap()).unwrap()
    }

    /// The place of its record.
    pub fn record_at(&self) -> Object {
        let maps = CONFIG_MAPS.in_namespace("kube-system");
        maps.named(&format!("join-node-{}", self.name))
    }
}

fn node_info(boot: &str) -> Value {
    json!({
        "bootID": boot, "machineID": "m", "systemUUID": "s", "kernelVersion": "6", "osImage": "o", "containerRuntimeVersion": "c",
        "kubeletVersion": "v1.34.4", "kubeProxyVersion": "", "operatingSystem": "linux", "architecture": "amd64",
    })
}

pub fn policy(pcr_4: &str) -> String {
    let zeros = "00".repeat(32);
    json!({"measurements": {
        "4": {"expected": pcr_4, "warnOnly": false}, "15": {"expected": zeros, "warnOnly": false},
    }})
    .to_string()
}

pub fn metric(controller: &MemberController, line: &str) -> Option<f64> {
    let metrics = controller.metrics().render();
    let mut lines = metrics.lines();
    lines.find_map(|found| found.strip_prefix(line)?.trim().parse().ok())
}

/// Returns how many events say that a node was accepted, refused, and unknown. Other tests have a node of the same name.
fn events_of(setup: &Setup, node: &str) -> [usize; 3] {
    let events = setup
        .admin
        .list(&EVENTS.in_namespace("default"), &Selector::default());
    let events = events.unwrap().items;
    ["Accepted", "Refused", "Unknown"].map(|word| {
        let is_one = |event: &&Value| {
            event["reason"] == format!("Attestation{word}") && event["regarding"]["name"] == node
        };
        events.iter().filter(is_one).count()
    })
}

/// Sets up a cluster in which the watch may be on.
fn watched() -> Shared {
    let shared = Setup::shared();
    shared.2.permit_watch();
    shared
}

/// Two workers join.
pub fn two_workers(setup: &Setup) -> [Node; 2] {
    [
        Node::join(setup, "worker-0", "127.42.2.100", 1),
        Node::join(setup, "worker-1.example", "127.42.2.101", 2),
    ]
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_members_node_shows_what_its_machine_proves_now() {
    let (_alone, cluster, mut setup) = watched();
    let before = events_of(&setup, "worker-0");
    let nodes = two_workers(&setup);
    let [first, second] = &nodes;
    let (mut server, _other) = (Some(first.serve()), second.serve());
    let file = setup.dir.path().join("attestationConfig");
    std::fs::write(&file, policy(&hex(&PCR_4))).unwrap();
    setup.start_controller(watching(&setup, cluster));
    for node in &nodes {
        node.eventually(&setup, "True Accepted");
        node.eventually_marked(&setup, ("true", "", false));
    }
    let controller = setup.controller();
    assert_eq!(metric(controller, "firstlight_watch_leader"), Some(1.0));
    let accepted = "firstlight_watch_nodes{result=\"accepted\"}";
    assert_eq!(metric(controller, accepted), Some(2.0));
    assert!(metric(controller, "firstlight_watch_oldest_seconds").unwrap() < 60.0);

    // a policy that no machine meets: it is shown, and nothing else follows
    std::fs::write(&file, policy(&"11".repeat(32))).unwrap();
    for node in &nodes {
        node.eventually(&setup, "False Measurement");
        let said = node.condition(&setup);
        assert!(
            said.contains("PCR 4")
                && said.contains(&"11".repeat(32))
                && said.contains(&hex(&PCR_4)),
            "{said}"
        );
        node.eventually_marked(&setup, ("false", "", false));
    }
    eventually("the refusal is known to be one of all", || {
        metric(setup.controller(), "firstlight_watch_mass_refusal") == Some(1.0)
    });
    for node in &nodes {
        assert_eq!(node.marks(&setup), ("false".into(), String::new(), false));
    }
    std::fs::write(&file, policy(&hex(&PCR_4))).unwrap();
    for node in &nodes {
        node.eventually(&setup, "True Accepted");
        node.eventually_marked(&setup, ("true", "", false));
    }

    // an older copy of the state disk
    let at = first.root.path().join("firstlight/generations");
    let recorded = || first.record(&setup).generation;
    eventually("its generation is recorded", || {
        recorded().starts_with("1-")
    });
    let copy = std::fs::read(&at).unwrap();
    server.take();
    server = Some(first.serve());
    eventually("the generation of the second boot is recorded", || {
        recorded().starts_with("2-")
    });
    let expected = recorded();
    server.take();
    std::fs::write(&at, copy).unwrap();
    server = Some(first.serve());
    first.eventually(
        &setup,
        "False OldDisk the state disk is an older copy: it does not know generation 2-",
    );
    assert!(
        first.condition(&setup).contains(&expected),
        "{}",
        first.condition(&setup)
    );
    first.eventually_marked(&setup, ("false", "refused", true));
    eventually("its disk stays closed", || {
        first.record(&setup).refused.is_some()
    });
    assert_eq!(recorded(), expected);
    // the operator accepts it
    let accepted = json!({"data": {"generation": null}});
    setup.admin.merge(&first.record_at(), &accepted).unwrap();
    first.eventually(&setup, "True Accepted");
    first.eventually_marked(&setup, ("true", "", false));
    eventually("its own generation is recorded", || {
        recorded().starts_with("2-") && recorded() != expected
    });
    assert_eq!(first.record(&setup).refused, None);

    // an older copy with its image, of a version that knows no generations
    server.take();
    let issuer = qemu_vtpm::issuer(first.tpm.location().parse().unwrap(), None);
    let listener = TcpListener::bind((first.address, 9000)).unwrap();
    let accept = Arc::new(atls::Server::new(Some(Arc::new(issuer)), None));
    let earlier = Server::start("old", listener, accept, Router::new(), Limits::default()).unwrap();
    first.eventually(
        &setup,
        "False OldDisk the node runs an earlier version, which knows no generations",
    );
    earlier.stop(Duration::ZERO);
    server = Some(first.serve());
    first.eventually(&setup, "True Accepted");

    // a machine that no longer answers
    server.take();
    first.eventually(&setup, "Unknown Unreachable 127.42.2.100:9000");
    first.eventually(&setup, "Unknown Silent 127.42.2.100:9000");
    first.eventually_marked(&setup, ("unknown", "silent", true));
    assert_eq!(first.record(&setup).refused, None, "silence closes no disk");
    server = Some(first.serve());
    first.eventually(&setup, "True Accepted");
    first.eventually_marked(&setup, ("true", "", false));

    // another member's machine at its address
    server.take();
    let thief = Swtpm::start();
    first.mark(&thief);
    let other = Member::start(&thief, first.address, setup.dir.path());
    first.eventually(&setup, "False OtherMachine");
    let machine = first.record(&setup).machine;
    assert!(
        first
            .condition(&setup)
            .contains(&format!("expected {machine}, got "))
    );
    first.eventually_marked(&setup, ("false", "refused", true));
    let closed = || first.record(&setup).refused.is_some();
    thread::sleep(Duration::from_secs(5));
    assert!(!closed(), "it says nothing about the machine in the record");

    // the machine itself runs other software
    drop(other);
    first.spoil();
    server = Some(first.serve());
    first.eventually(&setup, "False Measurement");
    eventually("the disk is closed", closed);
    // a refused machine that becomes silent stays refused
    drop(server);
    thread::sleep(Duration::from_secs(10));
    assert!(first.condition(&setup).starts_with("False Measurement"));

    // the machine restarts, and gets no key; then the operator permits it
    let mut nodes = nodes;
    let first = &mut nodes[0];
    first.tpm.reboot();
    let refused = setup.rejoin(&first.tpm, &disk(1)).err().expect("a refusal");
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    assert!(
        refused.message().contains("has been refused since"),
        "{refused}"
    );
    assert_eq!(setup.count("rejoin", "refused-before"), 1);
    first.mark(&first.tpm);
    let _server = first.serve();
    let booted = json!({"status": {"nodeInfo": node_info("boot-2")}});
    let at = NODES.named(first.name).subresource("status");
    setup.admin.merge(&at, &booted).unwrap();
    first.eventually(&setup, "True Accepted");
    first.eventually_marked(&setup, ("true", "", false));
    eventually("the disk is open", || {
        first.record(&setup).refused.is_none()
    });

    // an event for each change, and no further ones
    let after = events_of(&setup, "worker-0");
    let new = [0, 1, 2].map(|at| after[at] - before[at]);
    assert_eq!(new, [6, 5, 2]);
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_node_is_asked_where_its_machine_joined_whatever_address_its_node_object_has() {
    let (_alone, cluster, mut setup) = watched();
    let nodes = two_workers(&setup);
    let [first, second] = &nodes;
    let _servers = [first.serve(), second.serve()];
    // each Node points to the machine of the other one
    first.point_to(&setup, "127.42.2.101");
    second.point_to(&setup, "127.42.2.100");
    setup.start_controller(watching(&setup, cluster));
    for node in &nodes {
        node.eventually(&setup, "True Accepted");
    }
    let answers = |result: &str, reason: &str| {
        let labels = format!("result=\"{result}\",reason=\"{reason}\"");
        let line = format!("firstlight_watch_answers_total{{{labels}}}");
        metric(setup.controller(), &line).unwrap_or(0.0)
    };
    eventually("both were asked several times", || {
        answers("accepted", "Accepted") > 6.0
    });
    assert_eq!(answers("foreign", "OtherMachine"), 0.0);

    // it has another address since it joined, where its evidence proves which machine it is
    let moved = json!({"data": {"addresses": "127.42.2.77"}});
    setup.admin.merge(&first.record_at(), &moved).unwrap();
    first.point_to(&setup, "127.42.2.100");
    thread::sleep(Duration::from_secs(5));
    let before = answers("accepted", "Accepted");
    eventually("it is accepted there", || {
        answers("accepted", "Accepted") > before + 6.0
    });
    assert!(first.condition(&setup).starts_with("True Accepted"));
    // another machine at that address proves nothing about it
    first.point_to(&setup, "127.42.2.101");
    first.eventually(&setup, "Unknown Unreachable 127.42.2.77:9000");
    assert_eq!(first.marks(&setup).1, "");
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_worker_that_answers_for_others_lifts_no_closure_of_its_own() {
    let (_alone, cluster, mut setup) = watched();
    let nodes = [
        Node::join(&setup, "worker-0", "127.42.2.100", 1),
        Node::join(&setup, "worker-1.example", "127.42.2.101", 2),
        Node::join(&setup, "plane-0", "127.42.1.100", 3),
    ];
    let [attacker, others @ ..] = &nodes;
    let mut servers: Vec<_> = others.iter().map(Node::serve).collect();
    let own = attacker.serve();
    let file = setup.dir.path().join("attestationConfig");
    std::fs::write(&file, policy(&hex(&PCR_4))).unwrap();
    setup.start_controller(watching(&setup, cluster));
    for node in &nodes {
        node.eventually(&setup, "True Accepted");
    }
    drop(own);
    attacker.spoil();
    let _own = attacker.serve();
    attacker.eventually_marked(&setup, ("false", "refused", true));
    let is_closed = |node: &Node| node.record(&setup).refused.is_some();
    eventually("its disk is closed", || is_closed(attacker));

    // it answers at the addresses of the others: more than the share is bad
    servers.clear();
    let tpm = &attacker.tpm;
    let _posing: Vec<_> = others
        .iter()
        .map(|node| Member::start(tpm, node.address, setup.dir.path()))
        .collect();
    for node in others {
        node.eventually(&setup, "False Measurement the server at");
    }
    eventually("there is a mass", || {
        metric(setup.controller(), "firstlight_watch_mass_refusal") == Some(1.0)
    });
    thread::sleep(Duration::from_secs(8));
    let expected = ("false".to_owned(), "refused".to_owned(), true);
    assert_eq!(attacker.marks(&setup), expected);
    assert!(is_closed(attacker));
    for node in others {
        assert!(!is_closed(node), "{}", node.name);
    }
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_node_without_a_record_or_an_address_is_neither_accepted_nor_refused() {
    let (_alone, cluster, mut setup) = watched();
    let node = Node::join(&setup, "worker-0", "127.42.2.100", 1);
    let _server = node.serve();
    setup.make_node("plane-0");
    let nameless = json!({"data": {"machine": ""}});
    setup.admin.merge(&node.record_at(), &nameless).unwrap();
    setup.start_controller(watching(&setup, cluster));
    node.eventually(&setup, "Unknown NoRecord");
    let other = Node {
        name: "plane-0",
        ..node
    };
    other.eventually(&setup, "Unknown NoAddress");
    assert_eq!(other.marks(&setup).1, "");
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn one_replica_asks_and_another_takes_over_when_it_dies_or_stops() {
    let (_alone, cluster, mut setup) = watched();
    let node = Node::join(&setup, "worker-0", "127.42.2.100", 1);
    let _server = node.serve();
    drop(setup.controller.take());
    let start = || MemberController::start(watching(&setup, cluster)).unwrap();
    let leads = |it: &MemberController| metric(it, "firstlight_watch_leader") == Some(1.0);
    let answers = |it: &MemberController| {
        let line = "firstlight_watch_answers_total{result=\"accepted\",reason=\"Accepted\"}";
        metric(it, line).unwrap_or(0.0)
    };
    let first = start();
    eventually("the first one asks", || {
        leads(&first) && answers(&first) > 0.0
    });
    let second = start();
    let before = answers(&first);
    eventually("the first one goes on", || answers(&first) > before + 1.0);
    assert!(!leads(&second) && answers(&second) == 0.0);
    assert_eq!(
        metric(&second, "firstlight_watch_nodes{result=\"accepted\"}"),
        None
    );

    // it dies: nobody gives the Lease back
    drop(first);
    assert!(!leads(&second));
    eventually_within(60, "the second one asks", || {
        leads(&second) && answers(&second) > 0.0
    });
    // one that stops gives it back
    let third = start();
    thread::sleep(Duration::from_secs(1));
    second.stop();
    let lease = LEASES.in_namespace("kube-system").named("join-watch");
    eventually_within(4, "the third one leads", || {
        let lease = setup.admin.get(&lease).unwrap();
        lease["spec"]["holderIdentity"] != "" && leads(&third)
    });
    drop(second);
    eventually("the third one asks", || answers(&third) > 0.0);

    // without the API server's answer to a renewal it stops by itself
    cluster.freeze_api_server(true);
    eventually_within(30, "it stops", || !leads(&third));
    cluster.freeze_api_server(false);
    eventually_within(60, "it leads again", || leads(&third));
    node.eventually(&setup, "True Accepted");
}
