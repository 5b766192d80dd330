//! Tests of faults around a ticket, one in each test: etcd is slow or gone, the service is killed
//! at each step, replicas have different policies or clocks, nodes die while they join, requests
//! are repeated or come from another machine.

mod webhook;

use std::collections::BTreeSet;
use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use ::services::join_service::cleaner::{Cleaner, CleanerTask};
use ::services::join_service::{Config, JoinService};
use base::stop::Stop;
use base::time;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kubernetes::client::{CONFIG_MAPS, Client, LEASES, Object, SECRETS};
use proto::join::ISSUE_JOIN_TICKET;
use proto::join::ISSUE_REJOIN_TICKET;
use proto::join::{
    IssueJoinTicketRequest, IssueJoinTicketResponse, IssueRejoinTicketRequest,
    IssueRejoinTicketResponse,
};
use rpc::grpc::{Channel, Code, Status};
use serde_json::{Value, json};
use support::random::Random;
use verifier::qemu_vtpm;

use crate::kube_apiserver::Cluster;
use crate::program::{Program, run};
use crate::setup::*;
use crate::swtpm::Swtpm;
use webhook::Webhook;

const MINUTE: Duration = Duration::from_secs(60);
pub const LONG_AGO: &str = "1970-01-01T00:00:00Z";
const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);

type Ticket = IssueJoinTicketResponse;

/// The addresses of the two control planes.
const PLANES: [&str; 2] = ["127.42.1.100", "127.42.1.101"];

fn plane(number: u8) -> IssueJoinTicketRequest {
    let at = usize::from(number);
    request(["plane-0", "Plane_1"][at], &[PLANES[at]], 10 + number, true)
}

/// Connects from the first of them.
fn plane_channel(tpm: &Swtpm, address: SocketAddr) -> Channel {
    channel_from(PLANES[0].parse().unwrap(), tpm, address)
}

/// Returns the request with this disk instead.
fn with_disk(request: &IssueJoinTicketRequest, number: u8) -> IssueJoinTicketRequest {
    IssueJoinTicketRequest {
        disk_uuid: disk(number),
        ..request.clone()
    }
}

fn id(ticket: &Ticket) -> String {
    ticket.token.split_once('.').unwrap().0.to_owned()
}

fn record(node: &str) -> Object {
    CONFIG_MAPS
        .in_namespace("kube-system")
        .named(&format!("join-node-{node}"))
}

fn token(id: &str) -> Object {
    SECRETS
        .in_namespace("kube-system")
        .named(&format!("bootstrap-token-{id}"))
}

/// Requests a ticket as a node does: again after each temporary refusal.
fn until_given(ask: impl Fn() -> Result<Ticket, Status>) -> Ticket {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        match ask() {
            Ok(ticket) => return ticket,
            Err(status) => {
                assert!(
                    status.code() == Code::Unavailable && Instant::now() < end,
                    "{status}"
                );
                thread::sleep(
                    status
                        .retry_after()
                        .unwrap()
                        .min(Duration::from_millis(200)),
                );
            }
        }
    }
}

/// Requests a ticket until it has to wait for another control plane. Returns that one's name.
fn waits_for(setup: &Setup, tpm: &Swtpm, request: &IssueJoinTicketRequest) -> String {
    let end = Instant::now() + MINUTE;
    loop {
        let status = refused(setup.join(tpm, request));
        assert!(
            status.code() == Code::Unavailable && Instant::now() < end,
            "{status}"
        );
        if let Some((_, whose)) = status.message().split_once("the turn of ") {
            assert_eq!(status.retry_after(), Some(Duration::from_secs(10)));
            return whose.split_once(':').unwrap().0.to_owned();
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Changes a record as if the ticket had been issued at that time by another replica's clock.
pub fn set_issued(setup: &Setup, node: &str, issued: &str) {
    setup
        .admin
        .merge(&record(node), &json!({"data": {"issued": issued}}))
        .unwrap();
}

/// Changes the Lease as if no control plane had asked for more than ten minutes.
fn age_lease(setup: &Setup) {
    let long_ago = time::micros(SystemTime::now() - 11 * MINUTE);
    setup
        .admin
        .merge(
            &lease(),
            &json!({"spec": {"acquireTime": long_ago, "renewTime": long_ago}}),
        )
        .unwrap();
}

/// Returns the Lease as another replica would have written it: the holder, its times, and the
/// queue.
fn put_lease(setup: &Setup, holder: &str, renewed: &str, line: &Value) {
    setup.admin.delete_if_there(&lease()).unwrap();
    let lease = json!({
        "metadata": {"name": "join-control-plane", "annotations": {"firstlight/waiting": line.to_string()}},
        "spec": {
            "holderIdentity": holder, "leaseDurationSeconds": 600, "acquireTime": renewed, "renewTime": renewed,
            "leaseTransitions": 1,
        },
    });
    setup
        .admin
        .create(&LEASES.in_namespace("kube-system"), &lease)
        .unwrap();
}

fn is_about(at: SystemTime, expected: SystemTime) -> bool {
    at >= expected - 2 * MINUTE && at <= expected + 2 * MINUTE
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_replica_with_a_wrong_clock_delays_others_at_most_for_the_validity_of_a_ticket() {
    let (_alone, _, setup) = Setup::shared();
    let (tpm, other) = (Swtpm::start(), Swtpm::start());
    let now = SystemTime::now;
    setup.join(&tpm, &worker()).unwrap();
    // The machine itself never has to wait.
    for issued in [
        time::seconds(now() + 10 * MINUTE),
        time::seconds(now() - 10 * MINUTE),
        time::seconds(now() + YEAR),
        "9999-12-31T23:59:59Z".into(),
        LONG_AGO.into(),
        "soon".into(),
    ] {
        set_issued(&setup, "worker-0", &issued);
        let ticket = until_given(|| setup.join(&tpm, &worker()));
        eventually("one token", || setup.tokens() == [id(&ticket)]);
    }
    // Another machine has to wait as long as after a ticket of now.
    let theirs = with_disk(&worker(), 2);
    for issued in [now() + 10 * MINUTE, now() - 10 * MINUTE] {
        set_issued(&setup, "worker-0", &time::seconds(issued));
        let status = refused(setup.join(&other, &theirs));
        assert_eq!(
            (status.code(), status.retry_after()),
            (Code::Unavailable, Some(MINUTE)),
            "{status}"
        );
    }
    set_issued(&setup, "worker-0", &time::seconds(now() + YEAR));
    until_given(|| setup.join(&other, &theirs));

    // When another node sees the turn of a control plane.
    for renewed in [
        time::micros(now() + YEAR),
        "9999-12-31T23:59:59.000000Z".into(),
    ] {
        put_lease(&setup, "plane-9", &renewed, &json!([]));
        assert_eq!(waits_for(&setup, &tpm, &plane(0)), "plane-9");
        let seen = setup.admin.get(&lease()).unwrap();
        for field in ["acquireTime", "renewTime"] {
            assert!(
                is_about(
                    time::parse(seen["spec"][field].as_str().unwrap()).unwrap(),
                    now()
                ),
                "{seen}"
            );
        }
    }
    age_lease(&setup);
    setup.join(&tpm, &plane(0)).unwrap();
    // The node keeps its own turn.
    put_lease(&setup, "plane-0", &time::micros(now() + YEAR), &json!([]));
    set_issued(&setup, "plane-0", LONG_AGO);
    until_given(|| setup.join(&tpm, &plane(0)));
    // A turn from a clock that is behind ends earlier.
    for renewed in [
        time::micros(now() - 10 * MINUTE - 2 * MINUTE),
        "1970-01-01T00:00:00.000000Z".into(),
    ] {
        put_lease(&setup, "plane-9", &renewed, &json!([]));
        set_issued(&setup, "plane-0", LONG_AGO);
        until_given(|| setup.join(&tpm, &plane(0)));
        assert_eq!(setup.holder(), "plane-0");
    }
    // A place in the queue.
    let ahead = (now() + YEAR)
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap()
        .as_secs();
    put_lease(
        &setup,
        "",
        &time::micros(now()),
        &json!([["plane-8", ahead], ["plane-7", u64::MAX]]),
    );
    assert_eq!(waits_for(&setup, &other, &plane(1)), "plane-8");
    let line =
        setup.admin.get(&lease()).unwrap()["metadata"]["annotations"]["firstlight/waiting"].clone();
    let line: Vec<(String, u64)> = serde_json::from_str(line.as_str().unwrap()).unwrap();
    let names: Vec<_> = line.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["plane-8", "plane-7", "plane-1"]);
    assert!(
        line.iter().all(|(_, asked)| is_about(
            SystemTime::UNIX_EPOCH + Duration::from_secs(*asked),
            now()
        ))
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_control_plane_that_is_lost_during_its_turn_is_waited_for_ten_minutes_and_has_to_wait_when_it_is_back()
 {
    let (_alone, _, setup) = Setup::shared();
    let (first, second) = (Swtpm::start(), Swtpm::start());
    // Its Node object never appears.
    setup.join(&first, &plane(0)).unwrap();
    assert_eq!(waits_for(&setup, &second, &plane(1)), "plane-0");
    age_lease(&setup);
    // A node in the queue comes before others, even if it is the lost one.
    set_issued(&setup, "plane-0", LONG_AGO);
    assert_eq!(waits_for(&setup, &first, &plane(0)), "plane-1");
    setup.join(&second, &plane(1)).unwrap();
    assert_eq!(setup.holder(), "plane-1");
    assert_eq!(waits_for(&setup, &first, &plane(0)), "plane-1");

    // Its Node object appears, but is never Ready.
    setup.make_node("plane-1");
    setup.make_ready("plane-1", "False");
    assert_eq!(waits_for(&setup, &first, &plane(0)), "plane-1");
    age_lease(&setup);
    setup.join(&first, &plane(0)).unwrap();
    assert_eq!(setup.holder(), "plane-0");
    set_issued(&setup, "plane-1", LONG_AGO);
    assert_eq!(waits_for(&setup, &second, &plane(1)), "plane-0");
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_node_that_dies_after_its_ticket_leaves_a_token_that_ends_and_comes_back_with_another_disk() {
    let (_alone, cluster, setup) = Setup::shared();
    let (mut tpm, other) = (Swtpm::start(), Swtpm::start());
    let first = setup.join(&tpm, &worker()).unwrap();
    // The token expires by its date, even if no controller deletes it.
    let over = BASE64_STANDARD.encode(time::seconds(SystemTime::now() - Duration::from_secs(1)));
    let with_end = |end: &Value| {
        setup
            .admin
            .merge(&token(&id(&first)), &json!({"data": {"expiration": end}}))
            .unwrap();
    };
    let end = setup.admin.get(&token(&id(&first))).unwrap()["data"]["expiration"].clone();
    with_end(&json!(over));
    eventually("the token is refused", || {
        bearer(cluster, &first.token).is_none()
    });
    with_end(&end);
    eventually("the token is valid again", || {
        bearer(cluster, &first.token).is_some()
    });

    // The machine is reset: a new disk, the same TPM.
    tpm.reboot();
    let second = until_given(|| setup.join(&tpm, &with_disk(&worker(), 2)));
    eventually("the old token is gone", || setup.tokens() == [id(&second)]);
    let map = setup.admin.get(&record("worker-0")).unwrap();
    assert_eq!(
        (&map["data"]["disk"], &map["data"]["token"]),
        (&json!(disk(2)), &json!(id(&second)))
    );
    assert_eq!(setup.records(), ["join-node-worker-0"]);

    // The machine is replaced by another one.
    let theirs = with_disk(&worker(), 3);
    set_issued(
        &setup,
        "worker-0",
        &time::seconds(SystemTime::now() - 14 * MINUTE),
    );
    let status = refused(setup.join(&other, &theirs));
    assert_eq!(
        (status.code(), status.retry_after()),
        (Code::Unavailable, Some(MINUTE)),
        "{status}"
    );
    set_issued(
        &setup,
        "worker-0",
        &time::seconds(SystemTime::now() - 16 * MINUTE),
    );
    let third = until_given(|| setup.join(&other, &theirs));
    eventually("the old token is gone", || setup.tokens() == [id(&third)]);
    assert_ne!(third.state_disk_key, second.state_disk_key);
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_request_that_comes_twice_at_once_gives_one_ticket_and_one_that_another_machine_repeats_gives_none()
 {
    let (_alone, cluster, setup) = Setup::shared();
    let (tpm, thief) = (Swtpm::start(), Swtpm::start());
    let original = worker();
    let own = "127.42.2.100".parse().unwrap();
    let channels = [(); 2].map(|()| channel_from(own, &tpm, setup.service().local_addr()));
    let answers = ask_at_once(&channels, &original);
    let (given, why): (Vec<_>, Vec<_>) = answers.into_iter().partition(Result::is_ok);
    let [Ok(ticket)] = &given[..] else {
        panic!("{} tickets", given.len())
    };
    let why = why.into_iter().next().unwrap().err().unwrap();
    assert_eq!(
        (why.code(), setup.count("join", "just-made")),
        (Code::Unavailable, 1),
        "{why}"
    );
    assert!(
        why.retry_after()
            .is_some_and(|pause| pause <= Duration::from_secs(5)),
        "{why}"
    );
    assert_eq!(
        (setup.tokens(), setup.records()),
        (vec![id(ticket)], vec!["join-node-worker-0".to_owned()])
    );
    assert!(bearer(cluster, &ticket.token).is_some());

    // The very same bytes, and the same request for another disk: while the machine joins, when its
    // ticket is old, and when its node exists.
    let own_disk = with_disk(&original, 2);
    let refuses = |word: &str, request: &IssueJoinTicketRequest, code: Code| {
        let before = setup.count("join", word);
        let status = refused(setup.join(&thief, request));
        assert_eq!(
            (status.code(), setup.count("join", word)),
            (code, before + 1),
            "{word}: {status}"
        );
    };
    refuses("disk-of-other", &original, Code::PermissionDenied);
    refuses("name-is-joining", &own_disk, Code::Unavailable);
    assert_eq!(setup.tokens(), [id(ticket)]);
    setup.make_node("worker-0");
    setup.make_ready("worker-0", "True");
    eventually("the token is gone", || setup.tokens().is_empty());
    refuses("disk-of-other", &original, Code::PermissionDenied);
    refuses("name-of-other", &own_disk, Code::PermissionDenied);
    set_issued(&setup, "worker-0", LONG_AGO);
    refuses("disk-of-other", &original, Code::PermissionDenied);
    refuses("name-of-other", &own_disk, Code::PermissionDenied);
    assert_eq!((setup.tokens().len(), setup.records().len()), (0, 1));
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn the_cleanup_of_a_ticket_does_not_affect_a_later_one() {
    let (_alone, cluster, setup) = Setup::shared();
    let tpm = Swtpm::start();
    let first = setup.join(&tpm, &worker()).unwrap();
    let second = setup.join_again(&tpm, &worker());
    let stop = Stop::new();
    let account = setup.account(cluster, JOIN_SERVICE);
    let (cleaner, running) = Cleaner::start(&Client::new(account, &stop)).unwrap();
    let name = "join-node-worker-0".to_owned();
    cleaner.add(CleanerTask::MachineRecord(name.clone(), id(&first)));
    cleaner.add(CleanerTask::MachineRecord(
        "join-node-worker-9".into(),
        id(&first),
    ));
    cleaner.add(CleanerTask::Token(id(&first)));
    cleaner.finish(MINUTE);
    assert_eq!(
        (setup.records(), setup.tokens()),
        (vec![name.clone()], vec![id(&second)])
    );
    cleaner.add(CleanerTask::MachineRecord(name, id(&second)));
    cleaner.add(CleanerTask::Token(id(&second)));
    cleaner.finish(MINUTE);
    assert!(setup.records().is_empty() && setup.tokens().is_empty());
    stop.stop();
    drop(running);
}

/// Returns whether a machine is accepted at all: whether it gets the key of this disk.
fn lets_in(tpm: &Swtpm, address: SocketAddr, disk_number: u8) -> bool {
    let issuer: Arc<dyn verifier::Issuer> =
        Arc::new(qemu_vtpm::issuer(tpm.location().parse().unwrap(), None));
    let client = atls::Client::new(Some(issuer), None);
    let socket = TcpStream::connect(address).unwrap();
    // In TLS 1.3, a client learns of its refusal only when it reads.
    let Ok(transport) = client.connect(socket, Instant::now() + Duration::from_secs(20)) else {
        return false;
    };
    let request = IssueRejoinTicketRequest {
        disk_uuid: disk(disk_number),
    };
    let answer: Result<IssueRejoinTicketResponse, _> = Channel::new(transport, "x")
        .and_then(|channel| channel.unary(ISSUE_REJOIN_TICKET, &request, &within(20)));
    answer.is_ok()
}

/// Creates a directory as the kubelet mounts a ConfigMap: its files are links through a link that
/// is replaced.
pub struct Mount(pub PathBuf);

impl Mount {
    pub fn new(path: PathBuf, policy: &str) -> Mount {
        fs::create_dir(&path).unwrap();
        let mount = Mount(path);
        mount.replace("..1", policy);
        for file in ["attestationConfig", "measurementSalt"] {
            symlink(Path::new("..data").join(file), mount.0.join(file)).unwrap();
        }
        mount
    }

    pub fn replace(&self, version: &str, policy: &str) {
        let directory = self.0.join(version);
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("attestationConfig"), policy).unwrap();
        fs::write(directory.join("measurementSalt"), [7; 32]).unwrap();
        symlink(version, self.0.join("..data_tmp")).unwrap();
        fs::rename(self.0.join("..data_tmp"), self.0.join("..data")).unwrap();
    }
}

/// Returns the output of `firstlight measure` on a machine.
fn measure(tpm: &Swtpm, arguments: &[&str]) -> String {
    let mut command = Command::new(support::program::built("firstlight"));
    command.args(["measure", "--tpm", &tpm.location()]);
    String::from_utf8(run(command.args(arguments)).stdout).unwrap()
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn while_an_image_is_rolled_out_each_replica_goes_by_its_policy_and_takes_the_new_one_without_a_restart()
 {
    let (_alone, cluster, setup) = Setup::shared();
    let (old, new) = (Swtpm::start(), Swtpm::start());
    old.tool(
        "tpm2_pcrextend",
        &[&format!("4:sha256={}", "aa".repeat(32))],
    );
    new.tool(
        "tpm2_pcrextend",
        &[&format!("4:sha256={}", "bb".repeat(32))],
    );
    let before = measure(&old, &["--pcrs=4,15"]);
    let file = setup.dir.path().join("before.json");
    fs::write(&file, &before).unwrap();
    let both = measure(
        &new,
        &["--add-to", file.to_str().unwrap(), "--name=image 2"],
    );

    setup.record_disk(1);
    let behind_at = Mount::new(setup.dir.path().join("behind"), &before);
    let ahead_at = Mount::new(setup.dir.path().join("ahead"), &both);
    let (behind, address) = service_program(&setup, cluster, &behind_at.0);
    let metrics = behind.expect("metrics on http://");
    let metrics = metrics
        .split_whitespace()
        .find(|word| word.starts_with("http://"))
        .unwrap()
        .to_owned();
    let is_stale = || {
        let text = ureq::get(&metrics)
            .call()
            .unwrap()
            .body_mut()
            .read_to_string()
            .unwrap();
        text.contains("firstlight_attestation_policy_stale 1\n")
    };
    let ahead = JoinService::start(Config {
        config_dir: ahead_at.0.clone(),
        ..setup.config(cluster)
    })
    .unwrap();

    assert!(lets_in(&old, address, 1) && lets_in(&old, ahead.local_addr(), 1));
    assert!(!lets_in(&new, address, 2));
    behind.expect("PCR 4");
    let ticket: Ticket = channel(&new, ahead.local_addr())
        .unary(ISSUE_JOIN_TICKET, &with_disk(&worker(), 2), &within(30))
        .unwrap();
    assert_eq!(setup.tokens(), [id(&ticket)]);

    // An invalid policy keeps the old one in force, and the metric shows it.
    assert!(!is_stale());
    behind_at.replace("..2", &both[..both.len() / 2]);
    eventually("the metric shows it", is_stale);
    behind.expect("the old policy stays in force");
    assert!(lets_in(&old, address, 1) && !lets_in(&new, address, 2));
    behind_at.replace("..3", &both);
    eventually("the new machine is admitted", || lets_in(&new, address, 2));
    assert!(lets_in(&old, address, 1) && !is_stale());
    // The old image is removed from the policy.
    behind_at.replace("..4", &measure(&new, &["--pcrs=4,15"]));
    eventually("the old machine is refused", || !lets_in(&old, address, 1));
    assert!(lets_in(&new, address, 2) && lets_in(&old, ahead.local_addr(), 1));
}

/// Returns everything that a ticket leaves behind.
fn forget_tickets(setup: &Setup) {
    setup.admin.delete_if_there(&lease()).unwrap();
    for name in setup.records() {
        setup
            .admin
            .delete_if_there(&CONFIG_MAPS.in_namespace("kube-system").named(&name))
            .unwrap();
    }
    for id in setup.tokens() {
        setup.admin.delete_if_there(&token(&id)).unwrap();
    }
}

fn ask(channel: &Channel, request: &IssueJoinTicketRequest) -> Result<Ticket, Status> {
    channel.unary(ISSUE_JOIN_TICKET, request, &within(30))
}

/// Sends a request over all of these connections at once.
pub fn ask_at_once(
    channels: &[Channel],
    request: &IssueJoinTicketRequest,
) -> Vec<Result<Ticket, Status>> {
    thread::scope(|scope| {
        let asking: Vec<_> = channels
            .iter()
            .map(|channel| scope.spawn(move || ask(channel, request)))
            .collect();
        let answers = asking.into_iter().map(|thread| thread.join().unwrap());
        answers.collect()
    })
}

/// Checks that this ticket is complete, and that nothing else was left behind.
fn assert_only(setup: &Setup, cluster: &Cluster, ticket: &Ticket) {
    eventually("only its token is left", || setup.tokens() == [id(ticket)]);
    assert_eq!(
        (setup.records(), setup.holder()),
        (vec!["join-node-plane-0".to_owned()], "plane-0".to_owned())
    );
    assert_eq!(
        setup.admin.get(&record("plane-0")).unwrap()["data"]["token"],
        id(ticket)
    );
    assert!(bearer(cluster, &ticket.token).is_some());
}

/// Returns when a token of the join service expires, as a duration from now.
fn ends_within(setup: &Setup, id: &str) -> Duration {
    let end = setup.admin.get(&token(id)).unwrap()["data"]["expiration"].clone();
    let end = BASE64_STANDARD.decode(end.as_str().unwrap()).unwrap();
    time::parse(str::from_utf8(&end).unwrap())
        .unwrap()
        .duration_since(SystemTime::now())
        .unwrap()
}

fn signal(process: u32, signal: &str) {
    assert!(
        Command::new("kill")
            .args([signal, &process.to_string()])
            .status()
            .unwrap()
            .success()
    );
}

/// Waits until all its threads are stopped: one thread handles the signal and then stops the
/// others.
fn freeze(process: u32) {
    signal(process, "-STOP");
    eventually("all threads are stopped", || {
        let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap();
        threads.flatten().all(|thread| {
            // proc_pid_stat(5): the state follows the name, which is in parentheses.
            let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            stat.rsplit_once(") ")
                .is_some_and(|(_, state)| state.starts_with('T'))
        })
    });
}

/// Returns the object of a write.
fn object_of(write: &Value) -> Object {
    let text = |pointer: &str| {
        write
            .pointer(pointer)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let resource = [CONFIG_MAPS, SECRETS, LEASES]
        .into_iter()
        .find(|one| one.to_string().starts_with(&text("/resource/resource")));
    let name = [text("/name"), text("/object/metadata/name")]
        .into_iter()
        .find(|name| !name.is_empty());
    resource
        .unwrap()
        .in_namespace("kube-system")
        .named(&name.unwrap())
}

/// Requests a control plane's ticket from the program, and kills it at its write of this number:
/// before the API server executes the write, or after it, when the program has not received the
/// answer. Returns what it was about to write.
fn kill_at(
    setup: &Setup,
    webhook: &Webhook,
    tpm: &Swtpm,
    service: (Program, SocketAddr),
    at: usize,
    done: bool,
) -> Value {
    let (mut program, address) = service;
    let (process, mut count) = (program.id(), 0);
    let (tell, told) = mpsc::channel();
    webhook.set(move |write| {
        count += 1;
        if count == at {
            if done {
                freeze(process)
            } else {
                signal(process, "-KILL")
            }
            tell.send(write.clone()).unwrap();
        }
        count < at || done
    });
    let channel = plane_channel(tpm, address);
    let write = thread::scope(|scope| {
        let asking = scope.spawn(|| ask(&channel, &plane(0)));
        let write = told.recv_timeout(MINUTE).unwrap();
        if done {
            let object = object_of(&write);
            let before = &write["oldObject"]["metadata"]["resourceVersion"];
            eventually("the write is executed", || {
                let now = setup.admin.find(&object).unwrap();
                now.is_some_and(|now| now["metadata"]["resourceVersion"] != *before)
            });
            signal(process, "-KILL");
        }
        program.exit();
        let answer = asking.join().unwrap();
        assert!(
            answer.is_err(),
            "a ticket although the service was killed at write {at}, {done}: {write}"
        );
        write
    });
    webhook.set(|_| true);
    write
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_service_that_is_killed_at_any_write_of_a_ticket_gives_the_node_one_when_it_is_back() {
    let (_alone, cluster, setup) = Setup::shared();
    let tpm = Swtpm::start();
    let webhook = Webhook::start(&setup.admin);
    let start = || service_program(&setup, cluster, setup.dir.path());
    wait_until_asked(&setup, cluster, &webhook);
    for (at, kind) in ["leases", "configmaps", "secrets"].into_iter().enumerate() {
        for done in [false, true] {
            forget_tickets(&setup);
            let write = kill_at(&setup, &webhook, &tpm, start(), at + 1, done);
            assert_eq!(
                (&write["operation"], &write["resource"]["resource"]),
                (&json!("CREATE"), &json!(kind))
            );
            let is = |step| usize::from(at > step || at == step && done);
            let left = [
                usize::from(!setup.holder().is_empty()),
                setup.records().len(),
                setup.tokens().len(),
            ];
            assert_eq!(left, [is(0), is(1), is(2)]);
            // The next instance of the program finds what the killed one left.
            let (_program, address) = start();
            let (since, channel) = (Instant::now(), plane_channel(&tpm, address));
            let ticket = until_given(|| ask(&channel, &plane(0)));
            support::promptly::assert_no_wait(since, Duration::from_secs(1));
            assert_only(&setup, cluster, &ticket);
        }
    }
    // If a ticket was to replace another one, the other's token may be in no record until it
    // expires.
    forget_tickets(&setup);
    let (first, address) = start();
    let given = ask(&plane_channel(&tpm, address), &plane(0)).unwrap();
    set_issued(&setup, "plane-0", LONG_AGO);
    let write = kill_at(&setup, &webhook, &tpm, (first, address), 2, true);
    assert_eq!(
        (&write["operation"], &write["resource"]["resource"]),
        (&json!("UPDATE"), &json!("configmaps"))
    );
    assert_eq!(setup.tokens(), [id(&given)]);
    let (_program, address) = start();
    let channel = plane_channel(&tpm, address);
    let ticket = until_given(|| ask(&channel, &plane(0)));
    let left = || {
        setup
            .tokens()
            .into_iter()
            .filter(|left| *left != id(&ticket))
            .collect::<Vec<_>>()
    };
    assert!(
        left()
            .iter()
            .all(|left| ends_within(&setup, left) <= 15 * MINUTE),
        "{:?}",
        left()
    );
    assert_eq!(
        setup.admin.get(&record("plane-0")).unwrap()["data"]["token"],
        id(&ticket)
    );
    assert_eq!(
        (setup.records().len(), setup.holder().as_str()),
        (1, "plane-0")
    );
    setup.make_node("plane-0");
    setup.make_ready("plane-0", "True");
    eventually("the last token is gone", || {
        !setup.tokens().contains(&id(&ticket))
    });
}

/// Waits until every part of the API server has learned of the webhook.
fn wait_until_asked(setup: &Setup, cluster: &Cluster, webhook: &Webhook) {
    let is_asked = Arc::new(AtomicBool::new(false));
    let asked = is_asked.clone();
    webhook.set(move |_| {
        asked.store(true, Ordering::Relaxed);
        true
    });
    let account = setup.account(cluster, JOIN_SERVICE);
    let client = Client::new(account, &Stop::new());
    let map = json!({"metadata": {"name": "join-node-probe"}});
    setup
        .admin
        .create(&CONFIG_MAPS.in_namespace("kube-system"), &map)
        .unwrap();
    eventually("the webhook is asked", || {
        let probe = CONFIG_MAPS
            .in_namespace("kube-system")
            .named("join-node-probe");
        let data = json!({"at": time::micros(SystemTime::now())});
        client
            .update(
                &probe,
                &json!({"metadata": {"name": "join-node-probe"}, "data": data}),
            )
            .unwrap();
        is_asked.load(Ordering::Relaxed)
    });
}

/// Writes at the start of a service are not part of a ticket.
fn know_the_cluster(channel: &Channel) {
    assert_eq!(
        refused(ask(channel, &request("worker-9", &[], 9, false))).code(),
        Code::PermissionDenied
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_service_that_is_killed_at_any_moment_of_a_ticket_gives_the_node_one_when_it_is_back() {
    let (_alone, cluster, setup) = Setup::shared();
    let tpm = Swtpm::start();
    let start = || service_program(&setup, cluster, setup.dir.path());
    // The duration of a ticket of a service that knows the cluster.
    let mut took = Duration::ZERO;
    for _ in 0..3 {
        forget_tickets(&setup);
        let (_program, address) = start();
        let channel = plane_channel(&tpm, address);
        know_the_cluster(&channel);
        let since = Instant::now();
        ask(&channel, &plane(0)).unwrap();
        took = took.max(since.elapsed());
    }
    let (mut random, mut cut_off, mut left) = (Random::new(5), 0, BTreeSet::new());
    for _ in 0..20 {
        forget_tickets(&setup);
        let (mut program, address) = start();
        let first = plane_channel(&tpm, address);
        know_the_cluster(&first);
        let moment = took.mul_f64(random.below(800) as f64 / 1000.0);
        thread::scope(|scope| {
            let asking = scope.spawn(|| ask(&first, &plane(0)));
            thread::sleep(moment);
            signal(program.id(), "-KILL");
            program.exit();
            cut_off += usize::from(asking.join().unwrap().is_err());
        });
        left.insert((setup.holder(), setup.records().len(), setup.tokens().len()));
        if !setup.records().is_empty() {
            set_issued(&setup, "plane-0", LONG_AGO);
        }
        let (_program, address) = start();
        let channel = plane_channel(&tpm, address);
        let ticket = until_given(|| ask(&channel, &plane(0)));
        assert_only(&setup, cluster, &ticket);
    }
    println!("a ticket took {took:?}; {cut_off} of 20 were cut off; left over: {left:?}");
    assert!(cut_off > 0);
}

/// The addresses of the machines.
const ADDRESSES: [&str; 5] = [
    "127.42.1.100",
    "127.42.1.101",
    "127.42.2.100",
    "127.42.2.101",
    "127.0.0.1",
];

/// Five machines, each with its TPM and its request. One is to be a control plane.
fn machines() -> Vec<(Swtpm, IssueJoinTicketRequest)> {
    let names = [
        "plane-0",
        "Plane_1",
        "worker-0",
        "worker-1.example",
        "worker-2",
    ];
    let request = |(number, name): (u8, &str)| request(name, &[], number, number == 0);
    (0..)
        .zip(names)
        .map(request)
        .map(|request| (Swtpm::start(), request))
        .collect()
}

/// Continues etcd when dropped.
struct Frozen<'a>(&'a Cluster);

impl Frozen<'_> {
    fn new(cluster: &Cluster) -> Frozen<'_> {
        cluster.freeze_etcd(true);
        Frozen(cluster)
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.0.freeze_etcd(false);
    }
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn an_etcd_that_stops_in_the_middle_of_tickets_leaves_nothing_behind_and_one_that_is_slow_delays_them()
 {
    let _alone = alone();
    let cluster = &Cluster::started().0;
    let (setup, machines) = (Setup::new(cluster), machines());
    let node = |request: &IssueJoinTicketRequest| {
        let names = [
            "plane-0",
            "plane-1",
            "worker-0",
            "worker-1.example",
            "worker-2",
        ];
        names[usize::from_str_radix(&request.disk_uuid[34..], 16).unwrap()]
    };
    let connect = |((tpm, _), address): (&(Swtpm, _), &str)| {
        channel_from(address.parse().unwrap(), tpm, setup.service().local_addr())
    };
    let channels: Vec<_> = machines.iter().zip(ADDRESSES).map(connect).collect();
    let asking = || {
        channels
            .iter()
            .zip(&machines)
            .map(|(channel, (_, request))| (channel, request))
    };

    // Etcd is stopped: two tickets are finished before, others are in progress, and the last one
    // starts after it.
    forget_tickets(&setup);
    let since = Instant::now();
    let answers: Vec<_> = thread::scope(|scope| {
        let mut asked = Vec::new();
        let mut frozen = None;
        for (number, (channel, request)) in asking().enumerate() {
            if number == 4 {
                frozen = Some(Frozen::new(cluster));
            }
            // The last caller has less time than the service has for an API call.
            let options = within(if number == 4 { 4 } else { 30 });
            let ask = move || {
                (
                    channel.unary(ISSUE_JOIN_TICKET, request, &options),
                    Instant::now(),
                )
            };
            asked.push((request, scope.spawn(ask)));
            thread::sleep(Duration::from_millis(10));
        }
        let answers = asked
            .into_iter()
            .map(|(request, thread)| (request, thread.join()))
            .collect();
        drop(frozen);
        answers
    });
    let (mut tokens, mut nodes) = (BTreeSet::new(), BTreeSet::new());
    for (request, answer) in answers {
        let (answer, at) = answer.unwrap();
        assert!(at - since < Duration::from_secs(25), "{:?}", at - since);
        match answer {
            Ok(ticket) => {
                tokens.insert(id(&ticket));
                nodes.insert(format!("join-node-{}", node(request)));
            }
            Err(status) => {
                assert_eq!(status.code(), Code::Unavailable, "{status}");
                assert!(
                    status.retry_after().is_some() && !status.message().contains("etcd"),
                    "{status}"
                );
            }
        }
    }
    assert!(nodes.len() < 5, "it stopped too late");
    println!("{} of 5 got a ticket before it stopped", nodes.len());
    let set = |list: Vec<String>| list.into_iter().collect::<BTreeSet<_>>();
    let holder = if nodes.contains("join-node-plane-0") {
        "plane-0"
    } else {
        ""
    };
    let left = || (set(setup.tokens()), set(setup.records()), setup.holder());
    let expected = (tokens.clone(), nodes.clone(), holder.to_owned());
    eventually(&format!("{expected:?}, but {:?}", left()), || {
        left() == expected
    });
    // The machines without a ticket get one.
    for (channel, request) in asking() {
        if !nodes.contains(&format!("join-node-{}", node(request))) {
            tokens.insert(id(&until_given(|| ask(channel, request))));
        }
    }
    eventually("each machine has one token", || {
        set(setup.tokens()) == tokens
    });
    assert_eq!(
        (setup.records().len(), setup.holder().as_str()),
        (5, "plane-0")
    );

    // Etcd runs for a fifth of the time. New tickets replace the earlier ones.
    let is_over = AtomicBool::new(false);
    let tickets: Vec<_> = thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let frozen = Frozen::new(cluster);
                thread::sleep(Duration::from_millis(400));
                drop(frozen);
                thread::sleep(Duration::from_millis(100));
            }
        });
        let asking: Vec<_> = asking()
            .map(|(channel, request)| scope.spawn(move || until_given(|| ask(channel, request))))
            .collect();
        let tickets = asking.into_iter().map(|thread| thread.join()).collect();
        is_over.store(true, Ordering::Relaxed);
        tickets
    });
    let given: BTreeSet<_> = tickets
        .into_iter()
        .map(|ticket: thread::Result<_>| id(&ticket.unwrap()))
        .collect();
    eventually("each machine has one token", || {
        set(setup.tokens()) == given
    });
    assert_eq!(
        (setup.records().len(), setup.holder().as_str()),
        (5, "plane-0")
    );
}
