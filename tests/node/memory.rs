//! No part of a secret stays in the memory of a node that refused it. The tests read the node's memory as the kernel shows it to
//! root (`/proc/PID/mem`). They also read it while the node has the secret, to prove that the search finds it.

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use base::crypto::{Dek, KEY_LEN, MEASUREMENT_SECRET_ID, Secret, derive_key};
use base::master_secret::{MasterSecret, NO_STORE};
use common::area_key::area_keys;
use disk::luks::{Probe, probe};
use proto::join::{
    IssueJoinTicketRequest, IssueJoinTicketResponse, IssueRejoinTicketRequest,
    IssueRejoinTicketResponse,
};
use proto::recoverproto::{RecoverMessage, RecoverResponse};
use rpc::grpc::{Call, CallOptions, Channel, Code, Router, Sender, Server, Status};

use crate::program::{PATIENCE, Program};
use crate::setting::{MASTER_SALT, Setting, wait_for_port};
use crate::unlock::{fresh, old_join_service};
use support::secrets::{Secrets, list};

/// How long a thread may take to wipe a secret that it has refused.
const MOMENT: Duration = Duration::from_millis(500);

fn searched(name: &str, secret: &[u8]) -> Secrets {
    let mut secrets = Secrets::default();
    secrets.add(name, secret);
    secrets
}

#[track_caller]
fn assert_known(program: &Program, name: &str, secret: &[u8]) {
    let (secrets, end) = (searched(name, secret), Instant::now() + PATIENCE);
    while secrets.in_process(program.id()).is_empty() {
        assert!(
            Instant::now() < end,
            "the search does not find the {name} while the program has it"
        );
    }
}

#[track_caller]
fn assert_wiped(program: &Program, name: &str, secret: &[u8]) {
    thread::sleep(MOMENT);
    let hits = searched(name, secret).in_process(program.id());
    assert!(hits.is_empty(), "copies are left: {}", list(&hits));
}

/// A join service whose first ticket is complete, but whose call ends only on the test's signal; it refuses further calls.
fn join_service_that_waits<Q, R>(
    setting: &Setting,
    method: &str,
    ticket: R,
) -> (Server, mpsc::Sender<()>)
where
    Q: prost::Message + Default + 'static,
    R: prost::Message + Clone + 'static,
{
    let (end, ends) = mpsc::channel();
    let first = std::sync::Mutex::new(Some(ends));
    let handler = move |_: &Call, _: Q, answer: &mut Sender<R>| {
        let Some(ends) = first.lock().unwrap().take() else {
            return Err(Status::new(Code::Unavailable, "one ticket was enough"));
        };
        answer.send(&ticket)?;
        ends.recv_timeout(PATIENCE)
            .map_err(|_| Status::new(Code::Aborted, "the test is over"))
    };
    let router = Router::new().server_streaming(method, handler);
    (old_join_service(setting, router), end)
}

#[test]
fn a_rejoin_ticket_that_does_not_open_the_disk_leaves_nothing_behind() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    setting.set_control_planes(&[3]);
    let (key, secret) = (Secret::random(32), Secret::random(32));
    let mut ticket = IssueRejoinTicketResponse::default();
    (ticket.state_disk_key, ticket.measurement_secret) =
        (key.expose().to_vec(), secret.expose().to_vec());
    let method = "/join.API/IssueRejoinTicket";
    let (_service, end) =
        join_service_that_waits::<IssueRejoinTicketRequest, _>(&setting, method, ticket);
    let node = Program::start(&mut setting.unlock(&disk));
    assert_known(&node, "disk key", key.expose());
    assert_known(&node, "measurement secret", secret.expose());
    end.send(()).unwrap();
    node.expect("was not accepted: the key does not open this disk");
    assert_wiped(&node, "disk key", key.expose());
    assert_wiped(&node, "key of the keyslot", &area_keys(&disk, &key)[0]);
    assert_wiped(&node, "measurement secret", secret.expose());
}

#[test]
fn a_join_ticket_that_is_refused_leaves_nothing_behind() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    setting.set_control_planes(&[3]);
    let (key, secret) = (Secret::random(32), Secret::random(32));
    let mut ticket = IssueJoinTicketResponse::default();
    // without salt, certificate and token the ticket is refused as a whole
    (ticket.state_disk_key, ticket.measurement_secret) =
        (key.expose().to_vec(), secret.expose().to_vec());
    let method = "/join.API/IssueJoinTicket";
    let (_service, end) =
        join_service_that_waits::<IssueJoinTicketRequest, _>(&setting, method, ticket);
    let node = Program::start(&mut setting.joining(&disk, "Worker"));
    assert_known(&node, "disk key", key.expose());
    end.send(()).unwrap();
    node.expect("join service");
    assert_wiped(&node, "disk key", key.expose());
    assert_wiped(&node, "measurement secret", secret.expose());
}

#[test]
fn a_wrong_master_secret_leaves_nothing_behind() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    let node = Program::start(&mut setting.unlock(&disk));
    wait_for_port(setting.node(9999));
    let bring = |key: &[u8]| {
        let socket = TcpStream::connect(setting.node(9999)).unwrap();
        let deadline = Instant::now() + PATIENCE;
        let transport = atls::Client::new(None, Some(verifier::judge(fresh())))
            .connect(socket, deadline)
            .unwrap();
        let kms = MasterSecret::new(Secret::new(key.to_vec()), Secret::new(vec![2; 32])).unwrap();
        let message = RecoverMessage {
            kms_uri: kms.uri().to_string(),
            storage_uri: NO_STORE.into(),
            measurement_salt: vec![],
        };
        let channel = Channel::new(transport, "node").unwrap();
        let options = CallOptions {
            timeout: Some(PATIENCE),
            ..CallOptions::default()
        };
        channel
            .unary::<_, RecoverResponse>("/recoverproto.API/Recover", &message, &options)
            .err()
            .unwrap()
    };
    assert_eq!(bring(&[9; 32]).code(), Code::FailedPrecondition);
    let key = Secret::random(32);
    let is_found = AtomicBool::new(false);
    thread::scope(|scope| {
        // each try waits for the delay after the one before, unless this machine is so busy that the delay is over by then
        let tries = scope.spawn(|| {
            for _ in 0..8 {
                assert_eq!(bring(key.expose()).code(), Code::FailedPrecondition);
                if is_found.load(Ordering::SeqCst) {
                    break;
                }
            }
        });
        assert_known(&node, "master secret", key.expose());
        is_found.store(true, Ordering::SeqCst);
        tries.join().unwrap();
    });
    assert_wiped(&node, "master secret", key.expose());
}

#[test]
fn a_ticket_leaves_nothing_behind_in_the_services() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    setting.set_control_planes(&[3]);
    let mut master = [0; 32];
    master.copy_from_slice(Secret::random(32).expose());
    let (keys, address) = setting.key_service(3, master);
    let join = setting.join_service(3, address, &setting.policy());
    let mut node = Program::start(&mut setting.unlock(&disk));
    // the disk is one of another cluster
    node.expect("was not accepted: the key does not open this disk");
    node.terminate();
    node.exit();
    let header = std::fs::File::open(&disk).unwrap();
    let Probe::Luks(header) = probe(&mut &header).unwrap() else {
        panic!("the disk has no header");
    };
    let derived = |dek: Dek| derive_key(&master, &MASTER_SALT, dek.info(), KEY_LEN).unwrap();
    let disk_key = derived(Dek::disk(&header.uuid()));
    let secret = derived(Dek::named(MEASUREMENT_SECRET_ID));
    assert_wiped(&keys, "disk key", disk_key.expose());
    assert_wiped(&keys, "measurement secret", secret.expose());
    assert_wiped(&join, "disk key", disk_key.expose());
    assert_wiped(&join, "master secret", &master);
    // what the services keep for their next request: one copy, which is found as two halves
    for (service, name, kept) in [
        (&keys, "master secret", &master[..]),
        (&join, "measurement secret", secret.expose()),
    ] {
        let hits = searched(name, kept).in_process(service.id());
        let is_plain = hits.iter().all(|hit| hit.form == "plain");
        assert!(hits.len() == 2 && is_plain, "{name}: {}", list(&hits));
    }
}
