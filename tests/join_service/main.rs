//! Tests of join tickets: the join service over attested TLS with real (software) TPMs, the key service's program, and a real
//! kube-apiserver with a real etcd. The service has the account and permissions of the chart (`make kubernetes-api`).

use common::forger;
use common::join_setup as setup;
use common::joining;
use common::kube_apiserver;
use common::setting;
use support::program;
use support::swtpm;

mod client_certificates;
mod cloud_controller;
mod cluster_api;
mod deleted_machines;
mod faults;
mod operators;
mod renewal;
mod results;
mod rights;
mod rollout;
mod watch;

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use ::services::join_service::{Config, JoinService};
use base::time;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use forger::Forger;
use kube_apiserver::{Cluster, PATIENCE};
use kubernetes::client::{
    CONFIG_MAPS, Client, JOINING_NODES, NODE_VERSIONS, NODES, Resource, SECRETS,
};
use kubernetes::services::migration::Migration;
use program::Program;
use proto::join::ISSUE_JOIN_TICKET;
use proto::join::ISSUE_REJOIN_TICKET;
use proto::join::{
    IssueJoinTicketRequest, IssueJoinTicketResponse, IssueRejoinTicketRequest,
    IssueRejoinTicketResponse,
};
use rpc::grpc::{Code, Status};
use serde_json::json;
use swtpm::Swtpm;

use setup::*;

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_worker_gets_all_that_it_needs_and_its_token_goes_when_its_node_comes() {
    let (_alone, cluster, setup) = Setup::shared();
    let tpm = Swtpm::start();
    let node_files = setup.dir.path().join("node-files");
    fs::create_dir(&node_files).unwrap();
    fs::write(node_files.join("token"), vec![b'x'; 256 << 10]).unwrap();
    let status = refused(setup.join(&tpm, &worker()));
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert!(setup.tokens().is_empty() && setup.records().is_empty());
    fs::write(node_files.join("token"), "of an agent").unwrap();
    let ticket = setup.join(&tpm, &worker()).unwrap();
    let files = ticket.node_files.iter();
    let files: Vec<_> = files.map(|file| (&*file.name, &file.data[..])).collect();
    assert_eq!(files, [("token", &b"of an agent"[..])]);
    assert_eq!(
        (ticket.state_disk_key.len(), ticket.measurement_secret.len()),
        (32, 32)
    );
    assert_eq!(ticket.measurement_salt, [7; 32]);
    assert_eq!(ticket.api_server_endpoint, "127.42.0.2:6443");
    assert_eq!(ticket.kubernetes_version, "v1.34.4");
    assert_eq!(
        ticket.kubernetes_components[0].install_path,
        "/run/state/bin/kubelet"
    );
    assert!(ticket.control_plane_files.is_empty());
    assert_eq!(ticket.cluster_ca, cluster.ca().0.into_bytes());
    assert!(
        ticket.authorized_ca_public_key.starts_with(b"ssh-ed25519 ")
            && ticket.host_certificate.ends_with(b"\n")
    );
    check_certificates(&setup, &ticket, "worker-0", "127.42.2.100");

    // The token authenticates, but cannot sign.
    let (id, _) = ticket.token.split_once('.').unwrap();
    assert_eq!(
        bearer(cluster, &ticket.token),
        Some(format!("system:bootstrap:{id}"))
    );
    assert_eq!(setup.tokens(), [id]);
    let secret = SECRETS
        .in_namespace("kube-system")
        .named(&format!("bootstrap-token-{id}"));
    let secret = setup.admin.get(&secret).unwrap();
    assert!(secret["data"].get("usage-bootstrap-signing").is_none());
    assert_eq!(secret["metadata"]["labels"]["firstlight/node"], "worker-0");
    let expiration = BASE64_STANDARD
        .decode(secret["data"]["expiration"].as_str().unwrap())
        .unwrap();
    let left = time::parse(str::from_utf8(&expiration).unwrap())
        .unwrap()
        .duration_since(SystemTime::now())
        .unwrap();
    assert!((800..=900).contains(&left.as_secs()), "{left:?}");
    assert_eq!(setup.waiting(), "1");

    setup.make_node("other");
    setup.make_node("worker-0");
    eventually("the token is gone", || setup.tokens().is_empty());
    // The API server caches authentications for 10 s.
    eventually("the token is refused", || {
        bearer(cluster, &ticket.token).is_none()
    });
    assert_eq!(
        (setup.waiting().as_str(), setup.count("join", "given")),
        ("0", 1)
    );
    let metrics = format!("http://{}/metrics", setup.service().metrics_addr().unwrap());
    let metrics = ureq::get(metrics)
        .call()
        .unwrap()
        .body_mut()
        .read_to_string()
        .unwrap();
    assert!(
        metrics.contains("firstlight_join_step_seconds_count{step=\"token\"} 1"),
        "{metrics}"
    );
    setup.eventually_event("TicketGiven");
}

/// Checks the certificates with openssl(1) and ssh-keygen(1).
fn check_certificates(setup: &Setup, ticket: &IssueJoinTicketResponse, name: &str, address: &str) {
    let path = |name: &str| setup.dir.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("kubelet.pem"), &ticket.kubelet_cert).unwrap();
    fs::write(path("host-cert.pub"), &ticket.host_certificate).unwrap();
    let run = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output().unwrap();
        assert!(
            output.status.success(),
            "{program}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    };
    let (ca, kubelet) = (path("pki/ca.crt"), path("kubelet.pem"));
    run(
        "openssl",
        &[
            "verify",
            "-purpose",
            "sslserver",
            "-verify_ip",
            address,
            "-CAfile",
            &ca,
            &kubelet,
        ],
    );
    let text = run("openssl", &["x509", "-noout", "-subject", "-in", &kubelet]);
    assert!(
        text.contains(&format!("O = system:nodes, CN = system:node:{name}\n")),
        "{text}"
    );
    let pin = run(
        "sh",
        &[
            "-c",
            &format!(
                "openssl x509 -pubkey -noout -in {ca} | openssl pkey -pubin -outform DER | sha256sum"
            ),
        ],
    );
    assert_eq!(
        ticket.discovery_token_ca_cert_hash,
        format!("sha256:{}", pin.split(' ').next().unwrap())
    );
    let text = run("ssh-keygen", &["-L", "-f", &path("host-cert.pub")]);
    for name in ["10.1.2.3", "host-name"] {
        assert!(text.contains(&format!("  {name}\n")), "{text}");
    }
    assert!(
        text.contains("host certificate") && text.contains("Valid: before 20"),
        "{text}"
    );
    // Only control planes have the API server's names, and no wildcard among them.
    let is_of_api_server = text.contains("  lb.example\n") && text.contains("  127.0.0.1\n");
    let is_control_plane = !ticket.control_plane_files.is_empty();
    assert!(
        is_of_api_server == is_control_plane && !text.contains('*'),
        "{text}"
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn an_old_client_gets_a_token_that_signs_and_a_repetition_replaces_it() {
    let (_alone, cluster, setup) = Setup::shared();
    let tpm = Swtpm::start();
    let old = IssueJoinTicketRequest {
        accepts_cluster_ca: false,
        has_client_key: false,
        ..worker()
    };
    let first = setup.join(&tpm, &old).unwrap();
    assert!(first.cluster_ca.is_empty());
    let (id, _) = first.token.split_once('.').unwrap();
    let secret = SECRETS
        .in_namespace("kube-system")
        .named(&format!("bootstrap-token-{id}"));
    let signs = setup.admin.get(&secret).unwrap()["data"]["usage-bootstrap-signing"].clone();
    assert_eq!(signs, BASE64_STANDARD.encode("true"));
    // The very same request, as if the answer had been lost.
    let second = setup.join_again(&tpm, &old);
    assert_ne!(first.token, second.token);
    assert_eq!(first.state_disk_key, second.state_disk_key);
    eventually("only the second token is left", || {
        setup.tokens() == [second.token.split_once('.').unwrap().0]
    });
    assert_eq!(
        (bearer(cluster, &first.token), setup.records().len()),
        (None, 1)
    );
    // The same after a restart of the service.
    let mut setup = setup;
    setup.start(cluster);
    let third = setup.join_again(&tpm, &old);
    eventually("only the third token is left", || {
        setup.tokens() == [third.token.split_once('.').unwrap().0]
    });
    setup.start(cluster);
    setup.make_node("worker-0");
    // The Node comes while another replica runs, which did not issue the ticket.
    eventually("no token is left", || setup.tokens().is_empty());
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn whatever_is_wrong_is_refused_by_its_name_and_leaves_nothing_behind() {
    let (_alone, _, setup) = Setup::shared();
    let tpm = Swtpm::start();
    let with = |change: &dyn Fn(&mut IssueJoinTicketRequest)| {
        let mut request = worker();
        change(&mut request);
        request
    };
    let ip = "127.42.2.100";
    for (request, code, word, message) in [
        (
            with(&|r| r.disk_uuid = "ca_emergency_ssh".into()),
            Code::InvalidArgument,
            "disk-uuid",
            "disk_uuid",
        ),
        (
            with(&|r| r.certificate_request[40] ^= 1),
            Code::InvalidArgument,
            "certificate-request",
            "certificate_request",
        ),
        (
            request("a/b", &[ip], 1, false),
            Code::InvalidArgument,
            "certificate-request",
            "cannot be named",
        ),
        (
            request("kubernetes.default.svc", &[ip], 1, false),
            Code::InvalidArgument,
            "certificate-request",
            "the API server",
        ),
        (
            with(&|r| r.host_public_key.truncate(20)),
            Code::InvalidArgument,
            "host-key",
            "host_public_key",
        ),
        (
            with(&|r| r.host_certificate_principals = vec!["*".into()]),
            Code::InvalidArgument,
            "principals",
            "not a host name or address",
        ),
        (
            with(&|r| r.host_certificate_principals = vec!["a".into(); 65]),
            Code::InvalidArgument,
            "principals",
            "65 entries, expected at most 64",
        ),
        (
            with(&|r| r.host_certificate_principals.push("127.42.1.100".into())),
            Code::PermissionDenied,
            "principal-of-other",
            "is another machine",
        ),
        (
            with(&|r| r.host_certificate_principals.push("PLANE-0".into())),
            Code::PermissionDenied,
            "principal-of-other",
            "is another machine",
        ),
        (
            request("worker-9", &[ip], 1, false),
            Code::PermissionDenied,
            "unknown-machine",
            "knows no machine",
        ),
        (
            request("worker-0", &["127.42.2.99"], 1, false),
            Code::PermissionDenied,
            "address",
            "127.42.2.99 is not",
        ),
        (
            request("worker-2", &[ip], 1, false),
            Code::PermissionDenied,
            "address",
            "is not the address of worker-2",
        ),
        (
            request("worker-0", &[ip], 1, true),
            Code::PermissionDenied,
            "role",
            "its role in the cloud is Worker",
        ),
    ] {
        let before = setup.count("join", word);
        let status = refused(setup.join(&tpm, &request));
        assert_eq!(
            (status.code(), status.retry_after()),
            (code, None),
            "{word}: {status}"
        );
        assert!(status.message().contains(message), "{word}: {status}");
        assert_eq!(setup.count("join", word), before + 1, "{word}: {status}");
    }
    assert!(setup.tokens().is_empty() && setup.records().is_empty() && setup.holder().is_empty());
    // Names with upper case or dots are valid if the cloud's list has them.
    setup
        .join(
            &tpm,
            &request("Worker-1.Example", &["127.42.2.101"], 2, false),
        )
        .unwrap();
    // A control plane may join as a worker.
    setup
        .join(
            &Swtpm::start(),
            &request("Plane_1", &["127.42.1.101"], 3, false),
        )
        .unwrap();
    assert_eq!(
        (setup.tokens().len(), setup.records()),
        (
            2,
            vec![
                "join-node-plane-1".into(),
                "join-node-worker-1.example".into()
            ]
        )
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_machine_is_identified_by_its_source_address() {
    let (_alone, cluster, setup) = Setup::shared();
    let tpm = Swtpm::start();
    let address = |text: &str| text.parse::<IpAddr>().unwrap();
    let plane = request("plane-0", &["127.42.1.100"], 2, true);
    // An attacker on a worker, or on another control plane.
    for other in ["127.42.2.100", "127.42.1.101"] {
        for request in [
            &plane,
            &request("worker-1.example", &["127.42.2.101"], 1, false),
        ] {
            let status = refused(setup.join_from(address(other), &tpm, request));
            assert_eq!(
                (status.code(), status.retry_after()),
                (Code::PermissionDenied, None),
                "{status}"
            );
            assert!(status.message().contains("has the address of"), "{status}");
        }
    }
    assert_eq!(setup.count("join", "machine-of-other"), 4);
    // A load balancer hides the caller's address: no control plane gets its files, but a worker can
    // join.
    // A worker does not get a control plane's name or address either.
    for request in [&plane, &request("plane-0", &["127.42.1.100"], 2, false)] {
        let status = refused(setup.join_from(ELSEWHERE, &tpm, request));
        assert_eq!(status.code(), Code::Unavailable, "{status}");
        assert!(
            status
                .message()
                .contains("from its own address (127.42.1.100)"),
            "{status}"
        );
    }
    assert_eq!(setup.count("join", "not-direct"), 2);
    assert!(setup.tokens().is_empty() && setup.records().is_empty() && setup.holder().is_empty());
    let mut asked = worker();
    asked
        .host_certificate_principals
        .extend(["lb.example".into(), "127.0.0.1".into()]);
    let ticket = setup.join_from(ELSEWHERE, &tpm, &asked).unwrap();
    check_certificates(&setup, &ticket, "worker-0", "127.42.2.100");
    setup
        .join_from(address("127.42.1.100"), &Swtpm::start(), &plane)
        .unwrap();
    // This does not keep out the machine itself.
    let itself = Swtpm::start();
    let own = IssueJoinTicketRequest {
        disk_uuid: disk(5),
        ..worker()
    };
    assert_eq!(
        refused(setup.join_from(ELSEWHERE, &itself, &own)).code(),
        Code::Unavailable
    );
    setup
        .join_from(address("127.42.2.100"), &itself, &own)
        .unwrap();
    assert_eq!(
        refused(setup.join_from(ELSEWHERE, &tpm, &worker())).code(),
        Code::Unavailable
    );

    // Without a list, a machine has only its source address, and no machine gets the API server's
    // names.
    let service = JoinService::start(Config {
        metadata: None,
        ..setup.config(cluster)
    })
    .unwrap();
    let join = |source: &str,
                request: &IssueJoinTicketRequest|
     -> Result<IssueJoinTicketResponse, Status> {
        let channel = channel_from(address(source), &tpm, service.local_addr());
        channel.unary(ISSUE_JOIN_TICKET, request, &within(30))
    };
    let any = request("any", &["127.42.3.1"], 3, false);
    assert_eq!(
        refused(join("127.42.3.2", &any)).code(),
        Code::PermissionDenied
    );
    join("127.42.3.1", &any).unwrap();
    for name in ["lb.example", "LB.Example", "a.example.org"] {
        let status = refused(join(
            "127.42.3.1",
            &request(name, &["127.42.3.1"], 4, false),
        ));
        assert_eq!(status.code(), Code::PermissionDenied, "{status}");
        assert!(
            status
                .message()
                .contains("a name of the cluster's API server"),
            "{status}"
        );
    }
    let status = refused(join(
        "127.42.0.2",
        &request("lb", &["127.42.0.2"], 4, false),
    ));
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
    assert!(
        status
            .message()
            .contains("is the address of the cluster's API server"),
        "{status}"
    );
    join(
        "127.42.3.1",
        &request("a.b.example.org", &["127.42.3.1"], 4, false),
    )
    .unwrap();
    // The number of names is limited: this is the machine's third.
    for number in 3..=8 {
        join(
            "127.42.3.1",
            &request(&format!("any-{number}"), &[], 10 + number, false),
        )
        .unwrap();
    }
    let status = refused(join("127.42.3.1", &request("any-9", &[], 9, false)));
    assert!(
        status.code() == Code::PermissionDenied && status.message().contains("8 names"),
        "{status}"
    );
    assert_eq!(
        refused(join("127.42.1.100", &plane)).code(),
        Code::FailedPrecondition
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn control_planes_get_their_files_and_join_one_at_a_time_in_the_order_in_which_they_asked() {
    let (_alone, _, setup) = Setup::shared();
    let (first, second) = (Swtpm::start(), Swtpm::start());
    let plane_0 = request("plane-0", &["127.42.1.100"], 1, true);
    let plane_1 = request("Plane_1", &["127.42.1.101"], 2, true);
    // Both ask at the same time, and one of them gets the turn.
    let (a, b) = thread::scope(|scope| {
        let a = scope.spawn(|| setup.join(&first, &plane_0));
        let b = scope.spawn(|| setup.join(&second, &plane_1));
        (a.join().unwrap(), b.join().unwrap())
    });
    let ((ticket, has, tpm), (loser, waits, other)) = match (a, b) {
        (Ok(ticket), Err(status)) => (
            (ticket, ("plane-0", &plane_0), &first),
            (status, ("plane-1", &plane_1), &second),
        ),
        (Err(status), Ok(ticket)) => (
            (ticket, ("plane-1", &plane_1), &second),
            (status, ("plane-0", &plane_0), &first),
        ),
        (Ok(_), Ok(_)) => panic!("both got a ticket"),
        (Err(a), Err(b)) => panic!("neither got a ticket: {a}, {b}"),
    };
    let files: Vec<_> = ticket
        .control_plane_files
        .iter()
        .map(|file| file.name.as_str())
        .collect();
    assert_eq!(files, PKI);
    assert_eq!(ticket.control_plane_files[7].data, b"content of sa.pub\n");
    check_certificates(
        &setup,
        &ticket,
        has.0,
        if has.0 == "plane-0" {
            "127.42.1.100"
        } else {
            "127.42.1.101"
        },
    );
    assert_eq!(loser.code(), Code::Unavailable);
    assert!(
        loser.message().contains(&format!("the turn of {}", has.0)),
        "{loser}"
    );
    assert_eq!(loser.retry_after(), Some(Duration::from_secs(10)));
    assert_eq!(
        (
            setup.holder().as_str(),
            setup.tokens().len(),
            setup.records().len()
        ),
        (has.0, 1, 1)
    );

    // The holder may ask again, and the waiting node is refused again. A worker does not wait.
    setup.join_again(tpm, has.1);
    assert_eq!(
        refused(setup.join(other, waits.1)).code(),
        Code::Unavailable
    );
    setup
        .join(&Swtpm::start(), &request("worker-0", &[], 3, false))
        .unwrap();
    // The Node exists, but is not a member of etcd yet: kubeadm may need its token again.
    setup.make_node("worker-0");
    eventually("the worker's token is gone", || setup.tokens().len() == 1);
    setup.make_node(has.0);
    assert_eq!(
        refused(setup.join(other, waits.1)).code(),
        Code::Unavailable
    );
    let again = setup.join_again(tpm, has.1);
    eventually("only its new token is left", || {
        setup.tokens() == [again.token.split_once('.').unwrap().0]
    });
    setup.make_ready(has.0, "True");
    eventually("the token is gone", || setup.tokens().is_empty());
    eventually("the next one's turn", || setup.join(other, waits.1).is_ok());
    assert_eq!(setup.holder(), waits.0);
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn join_services_that_are_asked_at_once_give_one_ticket_and_its_token_stays_good() {
    let (_alone, cluster, setup) = Setup::shared();
    let tpm = Swtpm::start();
    let others: Vec<_> = (0..2)
        .map(|_| JoinService::start(setup.config(cluster)).unwrap())
        .collect();
    let addresses: Vec<_> = [setup.service()]
        .into_iter()
        .chain(&others)
        .map(JoinService::local_addr)
        .collect();
    // A TPM serves one connection at a time.
    for (own, request) in [
        ("127.42.2.100", worker()),
        (
            "127.42.1.100",
            request("plane-0", &["127.42.1.100"], 2, true),
        ),
    ] {
        let connect = |address: &SocketAddr| channel_from(own.parse().unwrap(), &tpm, *address);
        let channels: Vec<_> = addresses.iter().map(connect).collect();
        let answers = faults::ask_at_once(&channels, &request);
        let (given, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(Result::is_ok);
        let why: Vec<_> = refused
            .into_iter()
            .map(|status| status.err().unwrap())
            .collect();
        assert!(
            given.len() == 1 && why.iter().all(|status| status.code() == Code::Unavailable),
            "{why:?}"
        );
        // The service removes what the other attempts left, and nothing else.
        thread::sleep(Duration::from_secs(1));
        let token = given[0].as_ref().unwrap().token.clone();
        assert!(
            setup.tokens().iter().any(|id| token.starts_with(id))
                && bearer(cluster, &token).is_some()
        );
    }
    assert_eq!(
        (
            setup.tokens().len(),
            setup.records().len(),
            setup.holder().as_str()
        ),
        (2, 2, "plane-0")
    );
    for name in ["worker-0", "plane-0"] {
        setup.make_node(name);
        setup.make_ready(name, "True");
    }
    eventually("the tokens are gone", || setup.tokens().is_empty());
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_name_and_a_disk_are_the_machines_that_had_them_first() {
    let (_alone, cluster, mut setup) = Setup::shared();
    let (mut tpm, other) = (Swtpm::start(), Swtpm::start());
    let key = setup.join(&tpm, &worker()).unwrap().state_disk_key.clone();

    // While it joins.
    let thief = request("worker-0", &["127.42.2.100"], 2, false);
    let status = refused(setup.join(&other, &thief));
    assert_eq!(
        (status.code(), status.retry_after()),
        (Code::Unavailable, Some(Duration::from_secs(60))),
        "{status}"
    );
    // When its Node exists, and also after a restart of the service.
    setup.make_node("worker-0");
    setup.start(cluster);
    let status = refused(setup.join(&other, &thief));
    assert_eq!(
        (status.code(), setup.count("join", "name-of-other")),
        (Code::PermissionDenied, 1),
        "{status}"
    );
    // The key of the disk, by either request.
    let status = refused(setup.join(&other, &request("worker-2", &[], 1, false)));
    assert_eq!(
        (status.code(), setup.count("join", "disk-of-other")),
        (Code::PermissionDenied, 1),
        "{status}"
    );
    let status = setup.rejoin(&other, &disk(1)).err().unwrap();
    assert_eq!(
        (status.code(), setup.count("rejoin", "disk-of-other")),
        (Code::PermissionDenied, 1),
        "{status}"
    );
    assert_eq!(status.retry_after(), None);
    assert!(!status.message().contains("join-node"), "{status}");

    // The machine itself comes back and joins again with another disk.
    tpm.reboot();
    let back = setup.rejoin(&tpm, &disk(1)).unwrap();
    assert_eq!(back.state_disk_key, key);
    // It also gets a new certificate of its sshd's key for the earlier names.
    fs::write(
        setup.dir.path().join("renewed-cert.pub"),
        &back.host_certificate,
    )
    .unwrap();
    let shown = Command::new("ssh-keygen")
        .args(["-L", "-f"])
        .arg(setup.dir.path().join("renewed-cert.pub"))
        .output();
    let text = String::from_utf8(shown.unwrap().stdout).unwrap();
    assert!(
        text.contains("host certificate") && text.contains("Valid: before 20"),
        "{text}"
    );
    assert!(
        ["10.1.2.3", "host-name"]
            .iter()
            .all(|name| text.contains(&format!("  {name}\n"))),
        "{text}"
    );
    thread::sleep(Duration::from_secs(5));
    setup.join(&tpm, &thief).unwrap();
    assert_eq!(setup.records(), ["join-node-worker-0"]);

    // When the Node object is deleted and its ticket is old, another machine may have the name.
    setup.admin.delete(&NODES.named("worker-0")).unwrap();
    let record = CONFIG_MAPS
        .in_namespace("kube-system")
        .named("join-node-worker-0");
    let long_ago = time::seconds(SystemTime::now() - Duration::from_secs(3600));
    setup
        .admin
        .merge(&record, &json!({"data": {"issued": long_ago}}))
        .unwrap();
    let third = request("worker-0", &["127.42.2.100"], 3, false);
    eventually("the name is free", || setup.join(&other, &third).is_ok());
    assert_eq!(
        setup.join(&tpm, &worker()).err().unwrap().code(),
        Code::Unavailable
    );
    // The disk of the earlier machine stays protected.
    assert_eq!(
        setup.rejoin(&other, &disk(2)).err().unwrap().code(),
        Code::PermissionDenied
    );
    setup.rejoin(&tpm, &disk(2)).unwrap();
}

/// The policy contains no attestation keys, and the program calls from the node's own address.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_program_without_a_tpm_gets_nothing_of_a_machine_that_has_a_record() {
    let (_alone, _, setup) = Setup::shared();
    let (tpm, forger) = (Swtpm::start(), Arc::new(Forger::new()));
    assert!(
        setup
            .service()
            .metrics()
            .render()
            .contains("firstlight_attestation_any_tpm 1\n")
    );
    setup.join(&tpm, &worker()).unwrap();
    setup.make_node("worker-0");
    let channel = || {
        channel_of(
            "127.42.2.100".parse().unwrap(),
            forger.clone(),
            setup.service().local_addr(),
        )
    };
    eventually("the name is the machine's", || {
        let answer: Result<IssueJoinTicketResponse, _> = channel().unary(
            ISSUE_JOIN_TICKET,
            &request("worker-0", &["127.42.2.100"], 2, false),
            &within(30),
        );
        answer.err().unwrap().code() == Code::PermissionDenied
    });
    assert!(setup.count("join", "name-of-other") > 0);
    let rejoin = IssueRejoinTicketRequest { disk_uuid: disk(1) };
    let answer: Result<IssueRejoinTicketResponse, _> =
        channel().unary(ISSUE_REJOIN_TICKET, &rejoin, &within(30));
    assert_eq!(
        (
            answer.err().unwrap().code(),
            setup.count("rejoin", "disk-of-other")
        ),
        (Code::PermissionDenied, 1)
    );
    // A disk without a record belongs to no machine.
    let rejoin = IssueRejoinTicketRequest { disk_uuid: disk(9) };
    let answer: Result<IssueRejoinTicketResponse, _> =
        channel().unary(ISSUE_REJOIN_TICKET, &rejoin, &within(30));
    assert_eq!(
        (
            answer.err().unwrap().code(),
            setup.count("rejoin", "disk-unknown")
        ),
        (Code::PermissionDenied, 1)
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_disk_without_a_record_is_opened_only_while_migration_is_on_and_remembered() {
    let (_alone, cluster, mut setup) = Setup::shared();
    let (tpm, other) = (Swtpm::start(), Swtpm::start());
    let on: Migration = "2099-12-31".parse().unwrap();
    for migration in [Migration::default(), "2026-01-01".parse().unwrap()] {
        setup.migration = migration;
        setup.start(cluster);
        let status = setup.rejoin(&tpm, &disk(5)).err().unwrap();
        assert_eq!(
            (status.code(), setup.count("rejoin", "disk-unknown")),
            (Code::PermissionDenied, 1),
            "{status}"
        );
        assert!(
            setup
                .service()
                .metrics()
                .render()
                .contains("firstlight_join_migrating 0"),
            "{}",
            setup.service().metrics().render()
        );
    }
    assert!(setup.records().is_empty());
    // The operator releases a disk by a record without a machine. The next machine gets it.
    let record = setup.record_disk(5);
    eventually("the record counts", || setup.rejoin(&tpm, &disk(5)).is_ok());
    assert_eq!(
        setup.rejoin(&tpm, &disk(5)).unwrap().measurement_salt.len(),
        0
    );
    eventually("others are refused", || {
        setup
            .rejoin(&other, &disk(5))
            .is_err_and(|status| status.code() == Code::PermissionDenied)
    });
    let at = CONFIG_MAPS.in_namespace("kube-system").named(&record);
    eventually("the machine is recorded", || {
        setup.admin.get(&at).unwrap()["data"]["machine"] != json!(null)
    });

    setup.migration = on;
    setup.start(cluster);
    assert!(
        setup
            .service()
            .metrics()
            .render()
            .contains("firstlight_join_migrating 1"),
        "{}",
        setup.service().metrics().render()
    );
    let ticket = setup.rejoin(&tpm, &disk(6)).unwrap();
    assert_eq!(ticket.measurement_salt, MEASUREMENT_SALT);
    eventually("the disk is recorded", || {
        setup.records() == [record.clone(), format!("join-disk-{}", disk(6))]
    });
    eventually("others are refused", || {
        setup
            .rejoin(&other, &disk(6))
            .is_err_and(|status| status.code() == Code::PermissionDenied)
    });
    setup.rejoin(&tpm, &disk(6)).unwrap();
    // The number of disks of one machine is limited.
    for number in 100..106 {
        setup.rejoin(&tpm, &disk(number)).unwrap();
    }
    let status = setup.rejoin(&tpm, &disk(107)).err().unwrap();
    assert_eq!(
        (status.code(), setup.count("rejoin", "too-many-disks")),
        (Code::PermissionDenied, 1),
        "{status}"
    );
    setup.rejoin(&tpm, &disk(5)).unwrap();
    eventually("all are recorded", || setup.records().len() == 8);
    // Its name is in use while it is Ready.
    setup.make_node("worker-0");
    setup.make_ready("worker-0", "True");
    eventually("the name is in use", || {
        setup
            .join(&other, &worker())
            .is_err_and(|status| status.message().contains("is Ready"))
    });
    assert!(setup.tokens().is_empty());
    setup.make_ready("worker-0", "Unknown");
    eventually("the name is free", || setup.join(&other, &worker()).is_ok());
    // The token is for the new node, not for the one that existed before.
    thread::sleep(Duration::from_millis(500));
    assert_eq!(setup.tokens().len(), 1);
    setup.make_ready("worker-0", "True");
    eventually("the token is gone", || setup.tokens().is_empty());
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_node_of_constellation_before_v2_24_joins_only_while_migration_is_on() {
    let (_alone, cluster, mut setup) = Setup::shared();
    let (tpm, plane) = (Swtpm::start(), Swtpm::start());
    // the fields of the requests of v2.16.0 to v2.23.1
    let of_earlier_release = |request: IssueJoinTicketRequest| IssueJoinTicketRequest {
        disk_uuid: request.disk_uuid,
        certificate_request: request.certificate_request,
        is_control_plane: request.is_control_plane,
        ..IssueJoinTicketRequest::default()
    };
    let old = of_earlier_release(worker());
    for migration in [Migration::default(), "2026-01-01".parse().unwrap()] {
        setup.migration = migration;
        setup.start(cluster);
        let status = refused(setup.join(&tpm, &old));
        assert_eq!(
            (status.code(), setup.count("join", "host-key")),
            (Code::InvalidArgument, 1)
        );
        assert!(status.message().contains("--migrate-until"), "{status}");
    }
    setup.migration = "2099-12-31".parse().unwrap();
    setup.start(cluster);
    let ticket = setup.join(&tpm, &old).unwrap();
    let authority = str::from_utf8(&ticket.authorized_ca_public_key).unwrap();
    assert!(authority.starts_with("ssh-ed25519 ") && ticket.host_certificate.is_empty());
    assert_eq!(ticket.state_disk_key.len(), 32);
    // after a reboot with an image of Firstlight it still has none
    eventually("the disk is opened", || {
        setup
            .rejoin(&tpm, &disk(1))
            .is_ok_and(|ticket| ticket.host_certificate.is_empty())
    });
    let old = of_earlier_release(request("plane-0", &["127.42.1.100"], 2, true));
    let ticket = setup.join(&plane, &old).unwrap();
    assert_eq!(ticket.control_plane_files.len(), 8);
    assert!(ticket.host_certificate.is_empty());
    // a broken key is refused also now
    let broken = IssueJoinTicketRequest {
        host_public_key: vec![0],
        ..of_earlier_release(worker())
    };
    assert_eq!(
        refused(setup.join(&tpm, &broken)).code(),
        Code::InvalidArgument
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_key_service_that_is_gone_is_a_passing_failure_that_leaves_nothing_behind() {
    let (_alone, _, mut setup) = Setup::shared();
    let tpm = Swtpm::start();
    let plane = request("plane-0", &["127.42.1.100"], 1, true);
    let listen = address(&setup.keys.expect("serving data keys"));
    setup.keys.terminate();
    setup.keys.exit();
    let status = refused(setup.join(&tpm, &plane));
    assert_eq!(
        (status.code(), status.retry_after()),
        (Code::Unavailable, Some(Duration::from_secs(2))),
        "{status}"
    );
    assert!(setup.tokens().is_empty() && setup.records().is_empty() && setup.holder().is_empty());
    setup.keys = key_service(setup.dir.path(), &listen.to_string()).0;
    eventually("tickets are issued again", || {
        setup.join(&tpm, &plane).is_ok()
    });

    // The same with a metadata service that does not answer, and with a file that does not exist.
    setup.metadata.set_down(true);
    thread::sleep(Duration::from_secs(5));
    let status = refused(setup.join(&tpm, &worker()));
    assert_eq!(
        (status.code(), setup.count("join", "metadata")),
        (Code::Unavailable, 1),
        "{status}"
    );
    setup.metadata.set_down(false);
    // A failure is cached for a second.
    thread::sleep(Duration::from_millis(1100));
    fs::remove_file(setup.dir.path().join("pki/etcd/ca.key")).unwrap();
    let status = refused(setup.join(
        &Swtpm::start(),
        &request("Plane_1", &["127.42.1.101"], 2, true),
    ));
    assert_eq!(status.code(), Code::Internal);
    assert!(!status.message().contains("etcd"), "{status}");
    assert_eq!(
        (
            setup.holder().as_str(),
            setup.records().len(),
            setup.tokens().len()
        ),
        ("plane-0", 1, 1)
    );
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn an_api_server_that_stops_in_the_middle_leaves_nothing_behind_and_old_nodes_get_their_keys() {
    let _alone = alone();
    let (mut cluster, _) = Cluster::started();
    let (mut setup, tpm, other) = (Setup::new(&cluster), Swtpm::start(), Swtpm::start());
    setup.migration = "2099-12-31".parse().unwrap();
    setup.start(&cluster);
    setup.join(&tpm, &worker()).unwrap();
    setup.make_node("worker-0");
    eventually("the token is gone", || setup.tokens().is_empty());

    // The API server accepts the request and does not answer: it may still execute it.
    cluster.freeze_api_server(true);
    let status = refused(setup.join(&other, &request("plane-0", &["127.42.1.100"], 2, true)));
    assert_eq!(
        (status.code(), setup.count("join", "api")),
        (Code::Unavailable, 1),
        "{status}"
    );
    assert!(
        status.retry_after().is_some() && !status.message().contains("127.0.0.1"),
        "{status}"
    );
    let status = refused(setup.join(&other, &request("worker-1.example", &[], 3, false)));
    assert_eq!(status.code(), Code::Unavailable);
    cluster.freeze_api_server(false);
    eventually("every step is undone", || {
        setup.tokens().is_empty()
            && setup.records() == ["join-node-worker-0"]
            && setup.holder().is_empty()
    });

    cluster.kill_api_server();
    assert_eq!(
        refused(setup.join(&other, &request("worker-1.example", &[], 3, false))).code(),
        Code::Unavailable
    );
    // The known state is kept.
    setup.rejoin(&tpm, &disk(1)).unwrap();
    assert_eq!(
        setup.rejoin(&other, &disk(1)).err().unwrap().code(),
        Code::PermissionDenied
    );
    setup.rejoin(&other, &disk(7)).unwrap();
    // A service that starts now knows nothing, but a whole cluster may be waiting for it.
    let starting = JoinService::start(setup.config(&cluster)).unwrap();
    let request_of = IssueRejoinTicketRequest { disk_uuid: disk(8) };
    let ticket: IssueRejoinTicketResponse = channel(&other, starting.local_addr())
        .unary(ISSUE_REJOIN_TICKET, &request_of, &within(30))
        .unwrap();
    assert_eq!(ticket.state_disk_key.len(), 32);
    let new: Result<IssueJoinTicketResponse, _> =
        channel(&other, starting.local_addr()).unary(ISSUE_JOIN_TICKET, &worker(), &within(30));
    assert_eq!(refused(new).code(), Code::Unavailable);
    starting.stop(Duration::from_secs(1));
    drop(starting);
    cluster.start_api_server();
    setup
        .admin
        .within(PATIENCE)
        .wait_ready(&mut |_| {})
        .unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while let Err(status) = setup.join(&other, &request("worker-1.example", &[], 3, false)) {
        assert!(
            Instant::now() < end && status.code() == Code::Unavailable,
            "{status}"
        );
        thread::sleep(Duration::from_secs(1));
    }
    let mut records = [
        "join-node-worker-0".to_owned(),
        "join-node-worker-1.example".into(),
        format!("join-disk-{}", disk(7)),
    ];
    records.sort();
    eventually("the old disk is recorded", || setup.records() == records);
    assert_eq!(setup.tokens().len(), 1);
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn beside_the_old_operator_its_resources_are_made_and_heeded() {
    let _alone = alone();
    let (mut cluster, admin) = Cluster::started();
    let definitions =
        Resource::cluster("apiextensions.k8s.io", "v1", "customresourcedefinitions").all();
    for (plural, kind) in [
        ("joiningnodes", "JoiningNode"),
        ("nodeversions", "NodeVersion"),
    ] {
        let schema = json!({"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": true}});
        let definition = json!({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": format!("{plural}.update.edgeless.systems")},
            "spec": {
                "group": "update.edgeless.systems", "scope": "Cluster", "names": {"plural": plural, "kind": kind},
                "versions": [{"name": "v1alpha1", "served": true, "storage": true, "schema": schema}],
            },
        });
        admin.create(&definitions, &definition).unwrap();
    }
    let version = json!({
        "apiVersion": "update.edgeless.systems/v1alpha1", "kind": "NodeVersion",
        "metadata": {"name": "constellation-version"}, "spec": {"kubernetesComponentsReference": "k8s-components-sha256-0"},
    });
    let end = Instant::now() + Duration::from_secs(30);
    while let Err(error) = admin.create(&NODE_VERSIONS.all(), &version) {
        assert!(Instant::now() < end, "{error}");
        thread::sleep(Duration::from_millis(200));
    }
    let (setup, tpm, other) = (Setup::new(&cluster), Swtpm::start(), Swtpm::start());
    // The ConfigMap that the NodeVersion names does not exist.
    let status = refused(setup.join(&tpm, &worker()));
    assert_eq!(
        (status.code(), setup.count("join", "components")),
        (Code::FailedPrecondition, 1),
        "{status}"
    );
    let data = json!({"components": COMPONENTS, "cluster-version": "v1.33.1"});
    let maps = CONFIG_MAPS.in_namespace("kube-system");
    admin
        .create(
            &maps,
            &json!({"metadata": {"name": "k8s-components-sha256-0"}, "data": data}),
        )
        .unwrap();
    eventually("a ticket", || {
        setup
            .join(&tpm, &worker())
            .is_ok_and(|ticket| ticket.kubernetes_version == "v1.33.1")
    });
    let joining = admin.get(&JOINING_NODES.named("worker-0")).unwrap();
    assert_eq!(
        joining["metadata"]["managedFields"][0]["manager"],
        "join-service"
    );
    assert_eq!(joining["spec"]["name"], "worker-0");
    assert_eq!(
        joining["spec"]["componentsreference"],
        "k8s-components-sha256-0"
    );
    assert_eq!(joining["spec"]["iscontrolplane"], false);
    let deadline = time::parse(joining["spec"]["deadline"].as_str().unwrap()).unwrap();
    assert!(deadline > SystemTime::now() + Duration::from_secs(47 * 3600));

    // An old replica admits a control plane.
    let of_old = json!({
        "apiVersion": "update.edgeless.systems/v1alpha1", "kind": "JoiningNode", "metadata": {"name": "control-plane"},
        "spec": {"name": "plane-9", "iscontrolplane": true, "deadline": time::seconds(SystemTime::now() + Duration::from_secs(500))},
    });
    admin.create(&JOINING_NODES.all(), &of_old).unwrap();
    let plane = request("plane-0", &["127.42.1.100"], 2, true);
    let status = refused(setup.join(&other, &plane));
    assert!(
        status.code() == Code::Unavailable && status.message().contains("the turn of plane-9"),
        "{status}"
    );
    eventually("the reservation is given back", || {
        setup.holder().is_empty()
    });
    // The old operator has seen its node.
    admin.delete(&JOINING_NODES.named("control-plane")).unwrap();
    setup.join(&other, &plane).unwrap();
    assert_eq!(
        admin.get(&JOINING_NODES.named("control-plane")).unwrap()["spec"]["name"],
        "plane-0"
    );
    setup.join_again(&other, &plane);
    assert_eq!(setup.holder(), "plane-0");
    // No node waits for the deadline of a wrong clock.
    let in_a_year = time::seconds(SystemTime::now() + Duration::from_secs(365 * 24 * 60 * 60));
    let ahead = json!({"spec": {"name": "plane-9", "deadline": in_a_year}});
    admin
        .merge(&JOINING_NODES.named("control-plane"), &ahead)
        .unwrap();
    setup.join_again(&other, &plane);
    assert_eq!(
        admin.get(&JOINING_NODES.named("control-plane")).unwrap()["spec"]["name"],
        "plane-0"
    );
    drop(setup);
    cluster.kill_api_server();
}

/// The requests of a real kubeadm before it joins, with only a ticket's token and the chart's
/// roles.
fn let_kubeadm_in(admin: &Client, endpoint: &str) {
    let maps = CONFIG_MAPS.in_namespace("kube-system");
    let version = admin.version().unwrap();
    let configuration = format!(
        "apiVersion: kubeadm.k8s.io/v1beta4\nkind: ClusterConfiguration\nkubernetesVersion: {version}\ncontrolPlaneEndpoint: {endpoint}\n"
    );
    let patch = json!({"data": {"ClusterConfiguration": configuration}});
    admin.merge(&maps.named("kubeadm-config"), &patch).unwrap();
    let kubelet = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n";
    let map = json!({"metadata": {"name": "kubelet-config"}, "data": {"kubelet": kubelet}});
    admin.create_if_absent(&maps, &map).unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver and a kubeadm: make kubernetes-api"]
fn fresh_machines_of_both_roles_join_by_themselves_and_a_real_kubeadm_finds_the_cluster() {
    let (_alone, cluster, setup) = Setup::shared();
    // By a name, because a worker must not have the API server's address.
    let endpoint = cluster.server().replace("https://127.0.0.1", "localhost");
    let tool = Path::new(support::ROOT).join("tools/kubernetes.sh");
    let kubeadm = Command::new(tool).arg("kubeadm").output().unwrap();
    let kubeadm = format!(
        "{}/bin/kubeadm",
        str::from_utf8(&kubeadm.stdout).unwrap().trim()
    );
    for file in PKI
        .iter()
        .filter(|file| !["ca.crt", "ca.key"].contains(file))
    {
        fs::write(
            setup.dir.path().join("pki").join(file),
            format!("-----BEGIN {file}-----\n"),
        )
        .unwrap();
    }
    for role in ["Worker", "ControlPlane"] {
        let machine = setting::Setting::new();
        // The checks of a real kubeadm that concern the cluster and not this machine. As a control
        // plane, it would not accept the loopback address.
        let checks = match role {
            "Worker" => {
                format!(
                    "{kubeadm} join phase preflight --ignore-preflight-errors=all -v=1 --config $3 || exit 7"
                )
            }
            _ => "echo Fetching init configuration".to_owned(),
        };
        let node_side = machine.cluster(&checks);
        let_kubeadm_in(&setup.admin, &endpoint);
        let component = node_side.kubeadm();
        let components =
            json!([{"url": component.url, "install_path": component.install_path}]).to_string();
        let map = CONFIG_MAPS
            .in_namespace("kube-system")
            .named("k8s-components-sha256-1");
        setup
            .admin
            .merge(&map, &json!({"data": {"components": components}}))
            .unwrap();

        // The address from which a program of this machine calls.
        let me =
            json!({"Name": format!("Node_{role}"), "ProviderID": "", "Role": role, "VPCIP": ELSEWHERE}).to_string();
        machine.metadata.set_endpoint(&ELSEWHERE.to_string());
        machine
            .metadata
            .set_peers(&format!("[{me},{}]", machine.instance("plane-3", 3)));
        let metadata = cloud_api::metadata(
            base::machines::Cloud::Qemu,
            Some(&format!("http://{}", machine.metadata.address)),
        )
        .unwrap();
        let listen = SocketAddr::new(machine.host(3), 30090);
        let service = JoinService::start(Config {
            listen,
            metadata: Some(metadata),
            ..setup.config(cluster)
        })
        .unwrap();
        let disk = machine.new_disk();
        let mut command = machine.joining(&disk, role);
        machine.metadata.set_self(&me);
        let mut node = Program::start(&mut command);
        let ended = setting::end_of_member(&mut node);
        assert!(ended.success(), "{}", node.output());
        node.expect("Fetching init configuration");
        node.expect("complete:");
        joining::assert_no_token(&node);
        // Kubeadm finds no name server here, and logs it.
        let ours = |line: &&str| !line.contains("bootstrapper::steps::job");
        assert!(
            !node
                .output()
                .lines()
                .filter(ours)
                .any(|line| line.contains("refused")),
            "{}",
            node.output()
        );
        assert_eq!(
            machine.in_node("etc/kubernetes/pki/etcd/ca.key").exists(),
            role == "ControlPlane"
        );
        service.stop(Duration::ZERO);
        setup.admin.delete_if_there(&lease()).unwrap();
    }
}
