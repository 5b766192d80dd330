//! No part of a secret stays in the memory of a node that refused it. The tests read the node's memory as the kernel shows it to
//! root (`/proc/PID/mem`). They also read it while the node has the secret, to prove that the search finds it.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use base::crypto::Secret;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE;
use booted_proto::join::{
    IssueJoinTicketRequest, IssueJoinTicketResponse, IssueRejoinTicketRequest,
    IssueRejoinTicketResponse,
};
use kms::{ClusterKms, NO_STORE};
use proto::recoverproto::{RecoverMessage, RecoverResponse};
use rpc::grpc::{Call, CallOptions, Channel, Code, Limits, Router, Server, Status};
use streaming::{Sender, StreamingMethods};
use verifier::{Measurement, Policy, Validator, qemu_vtpm};

use crate::program::{PATIENCE, Program};
use crate::setting::{Setting, wait_for_port};

/// How long a thread may take to wipe a secret that it has refused.
const MOMENT: Duration = Duration::from_millis(500);

/// Counts each half of `secret` in the process's writable memory: a copy may be incomplete.
fn occurrences(process: u32, secret: &[u8]) -> usize {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    let memory = File::open(format!("/proc/{process}/mem")).unwrap();
    let halves = [&secret[..secret.len() / 2], &secret[secret.len() / 2..]];
    let mut found = 0;
    for line in maps.lines().filter(|line| {
        line.split(' ')
            .nth(1)
            .is_some_and(|mode| mode.starts_with("rw"))
    }) {
        let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
        let [from, to] = [from, to].map(|address| u64::from_str_radix(address, 16).unwrap());
        let mut content = vec![0; (to - from) as usize];
        // a region may have been unmapped meanwhile
        if memory.read_exact_at(&mut content, from).is_ok() {
            found += halves
                .iter()
                .map(|half| count(&content, half))
                .sum::<usize>();
        }
    }
    found
}

fn count(content: &[u8], needle: &[u8]) -> usize {
    let mut found = 0;
    let mut rest = content;
    while let Some(at) = rest.iter().position(|byte| *byte == needle[0]) {
        rest = &rest[at..];
        found += usize::from(rest.starts_with(needle));
        rest = &rest[1..];
    }
    found
}

#[track_caller]
fn assert_known(node: &Program, secret: &[u8]) {
    let end = Instant::now() + PATIENCE;
    while occurrences(node.id(), secret) == 0 {
        assert!(
            Instant::now() < end,
            "the search does not find the secret while the node has it"
        );
    }
}

#[track_caller]
fn assert_wiped(node: &Program, secret: &[u8]) {
    thread::sleep(MOMENT);
    assert_eq!(
        occurrences(node.id(), secret),
        0,
        "copies of the secret are left"
    );
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
    let listener = TcpListener::bind(SocketAddr::new(setting.host(3), 30090)).unwrap();
    let fresh = Measurement {
        expected: vec![0; 32],
        warn_only: false,
    };
    let policy = Arc::new(Policy::new([(15, fresh)].into()).unwrap());
    // as Constellation's, which proves nothing
    let tls = atls::Server::new(
        None,
        Some(verifier::judge(Arc::new(qemu_vtpm::validator(policy)))),
    )
    .only_old();
    (
        Server::start("join", listener, Arc::new(tls), router, Limits::default()).unwrap(),
        end,
    )
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
    assert_known(&node, key.expose());
    assert_known(&node, secret.expose());
    end.send(()).unwrap();
    node.expect("was not accepted: the key does not open this disk");
    assert_wiped(&node, key.expose());
    assert_wiped(&node, secret.expose());
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
    assert_known(&node, key.expose());
    end.send(()).unwrap();
    node.expect("join service");
    assert_wiped(&node, key.expose());
    assert_wiped(&node, secret.expose());
}

#[test]
fn a_wrong_master_secret_leaves_nothing_behind() {
    let setting = Setting::new();
    let disk = setting.initialized_disk();
    let node = Program::start(&mut setting.unlock(&disk));
    wait_for_port(setting.node(9999));
    let bring = |key: &[u8]| {
        let fresh = Measurement {
            expected: vec![0; 32],
            warn_only: false,
        };
        let policy = Arc::new(Policy::new([(15, fresh)].into()).unwrap());
        let validator: Arc<dyn Validator> = Arc::new(qemu_vtpm::validator(policy));
        let socket = TcpStream::connect(setting.node(9999)).unwrap();
        let deadline = Instant::now() + PATIENCE;
        let transport = atls::Client::new(None, Some(verifier::judge(validator)))
            .connect(socket, deadline)
            .unwrap();
        let kms = ClusterKms::new(Secret::new(key.to_vec()), Secret::new(vec![2; 32])).unwrap();
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
    let text = URL_SAFE.encode(key.expose());
    thread::scope(|scope| {
        // the second secret waits for the delay after the first
        let second = scope.spawn(|| bring(key.expose()));
        assert_known(&node, text.as_bytes());
        assert_eq!(second.join().unwrap().code(), Code::FailedPrecondition);
    });
    assert_wiped(&node, key.expose());
    assert_wiped(&node, text.as_bytes());
}
