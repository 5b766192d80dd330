//! A fresh node joins: the shipped program, a real TPM, and a join service with the test's answers. The kubeadm here only records
//! its arguments; `make kubeadm` tests the real one.

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use base::crypto::{Secret, cluster_id};
use disk::luks::{self, Probe};
use proto::init::INIT;
use proto::join::ControlPlaneCertOrKey;
use ring::digest::{SHA256, digest};
use rpc::grpc::{Code, Status};
use serde_json::{Value, json};

use crate::joining::{DISK_KEY, MEASUREMENT_SALT, MEASUREMENT_SECRET, TOKEN, assert_no_token};
use crate::program::Program;
use crate::setting::{INIT_SECRET, MASTER_KEY, Setting, end_of_member};

fn mode(path: &Path) -> u32 {
    fs::metadata(path)
        .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        .permissions()
        .mode()
        & 0o7777
}

fn json(path: &Path) -> Value {
    serde_json::from_str(
        &fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display())),
    )
    .unwrap()
}

/// Checks that the disk belongs to a node of a cluster, and that the ticket's key opens it.
fn assert_committed(disk: &Path) {
    let mut device = fs::File::open(disk).unwrap();
    let Probe::Luks(header) = luks::probe(&mut device).unwrap() else {
        panic!("no state disk")
    };
    header
        .unlock(&mut device, &Secret::new(DISK_KEY.to_vec()))
        .unwrap();
}

/// Checks that PCR 15 shows the node as a member of the tickets' cluster.
fn assert_measured(setting: &Setting) {
    let id = cluster_id(&Secret::new(MEASUREMENT_SECRET.to_vec()), &MEASUREMENT_SALT);
    let extended = digest(&SHA256, &[&[0; 32], digest(&SHA256, &id).as_ref()].concat());
    let expected: String = extended
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let pcr = setting
        .tpm
        .tool("tpm2_pcrread", &["sha256:15"])
        .to_lowercase();
    assert!(pcr.contains(&expected), "{pcr}");
}

/// Checks that the node has made no change that only a reboot could undo.
fn assert_fresh(setting: &Setting, node: &Program) {
    assert!(!node.output().contains("locked:"), "{}", node.output());
    let pcr = setting.tpm.tool("tpm2_pcrread", &["sha256:15"]);
    assert!(pcr.contains(&"0".repeat(64)), "{pcr}");
    assert!(!setting.in_node("etc/kubernetes").exists() && !setting.in_node("run/state").exists());
}

#[test]
fn a_worker_joins_and_is_a_member_from_then_on() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    setting.set_control_planes(&[3]);
    let cluster = setting.cluster("echo joining with $(grep -o 'oken.*' $3)");
    let tickets = cluster.clone();
    let _service = setting.join_service_that(3, move |_, request, _| {
        assert!(
            !request.is_control_plane
                && request.accepts_cluster_ca
                && request.has_client_key
                && request.disk_uuid.len() == 36
        );
        let mut ticket = tickets.ticket(&request);
        ticket.node_files = vec![ControlPlaneCertOrKey {
            name: ".dockerconfigjson".into(),
            data: b"{}".to_vec(),
        }];
        Ok(ticket)
    });
    let mut node = Program::start(&mut setting.joining(&disk, "Worker"));
    assert!(end_of_member(&mut node).success(), "{}", node.output());
    for event in [
        "ticket: from join service",
        "which sent no evidence (the setting require=strong would refuse it)",
        "locked:",
        "committed:",
        "phase: node files",
        "phase: kubeadm join",
        "complete:",
    ] {
        node.expect(event);
    }
    node.expect("joining with oken\": \"[token]");
    assert_no_token(&node);
    assert_committed(&disk);
    // the next boot asks these addresses
    let known = bootstrapper::state::state_disk::peers(&disk).unwrap();
    assert_eq!(known.control_planes, [2, 3].map(|n| setting.host(n)));
    assert!(known.load_balancer.is_some());
    assert_measured(&setting);
    assert!(
        !setting.path("state.key").exists(),
        "the passphrase of the first boot is still there"
    );
    assert_eq!(
        json(&setting.path("mount/constellation/node_state.json"))["Role"],
        "Worker"
    );

    let file = setting.path("mount/firstlight/files/.dockerconfigjson");
    assert_eq!(
        (mode(&file), fs::read(&file).unwrap()),
        (0o600, b"{}".to_vec())
    );

    // kubeadm was called once, and found all files
    assert_eq!(
        setting.kubeadm_calls(),
        "join --config /run/firstlight/kubeadm-join.yaml\n"
    );
    let seen = setting.path("kubeadm/1/firstlight");
    let join = json(&seen.join("kubeadm-join.yaml"));
    assert_eq!(mode(&seen.join("kubeadm-join.yaml")), 0o600);
    assert_eq!(join["nodeRegistration"]["name"], "node-2");
    let arguments = &join["nodeRegistration"]["kubeletExtraArgs"];
    let provider_id = json!({"name": "provider-id", "value": "qemu:///Node_2"});
    assert!(
        arguments.as_array().unwrap().contains(&provider_id),
        "{arguments}"
    );
    assert_eq!(join["discovery"]["tlsBootstrapToken"], TOKEN);
    assert_eq!(
        join["discovery"]["file"]["kubeConfigPath"],
        "/run/firstlight/cluster.conf"
    );
    assert_eq!(join.get("controlPlane"), None);
    assert_eq!(mode(&seen.join("cluster.conf")), 0o600);
    let known = &json(&seen.join("cluster.conf"))["clusters"][0]["cluster"];
    // the load balancer is this machine itself, so the ticket's API server is used
    assert_eq!(known["server"], "https://10.42.1.100:6443");
    use base64::Engine;
    let authority = base64::engine::general_purpose::STANDARD.encode(cluster.authority());
    assert_eq!(known["certificate-authority-data"], json!(authority));

    // the files that stay, and those that are removed
    for (certificate, key) in kubernetes::kubeadm::KUBELET_CERTIFICATES {
        assert_eq!(
            (
                mode(&setting.in_node(certificate)),
                mode(&setting.in_node(key))
            ),
            (0o600, 0o600)
        );
    }
    // with it, the kubelet requests none by the token
    let client = setting.in_node(kubernetes::kubeadm::KUBELET_CLIENT_CERTIFICATE);
    assert!(fs::symlink_metadata(&client).unwrap().is_symlink());
    let serving_key = setting.in_node(kubernetes::kubeadm::KUBELET_CERTIFICATES[0].1);
    let kept = fs::read_to_string(client.with_file_name("kubelet-client-firstlight.pem")).unwrap();
    assert!(kept.ends_with(&fs::read_to_string(serving_key).unwrap()));
    assert!(
        !setting.in_node("etc/kubernetes/pki").exists(),
        "a worker has none of the cluster's keys"
    );
    assert_eq!(
        fs::read_dir(setting.in_node("run/firstlight"))
            .unwrap()
            .count(),
        0,
        "the token is still there"
    );
    let authority = fs::read_to_string(setting.path("mount/ssh/ssh_ca.pub")).unwrap();
    assert!(
        authority.starts_with("ssh-ed25519 ")
            && setting.path("mount/ssh/ssh_host_cert.pub").exists()
    );

    // when the program starts again in this boot, the node is a member, and its header follows the cloud
    setting.set_control_planes(&[3, 4]);
    let mut again = Program::start(&mut setting.joining(&disk, "Worker"));
    again.expect("peers: the disk's header names 3 control planes and ");
    let known = bootstrapper::state::state_disk::peers(&disk).unwrap();
    assert_eq!(known.control_planes, [2, 3, 4].map(|n| setting.host(n)));
    assert!(end_of_member(&mut again).success(), "{}", again.output());
    again.expect("a member of its cluster");
    assert_eq!(setting.kubeadm_calls().lines().count(), 1);
}

#[test]
fn a_provider_id_that_systemd_would_split_into_arguments_of_the_kubelet_stops_the_join() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    setting.set_control_planes(&[3]);
    let cluster = setting.cluster("");
    let _service = setting.join_service_that(3, move |_, request, _| Ok(cluster.ticket(&request)));
    let mut command = setting.joining(&disk, "Worker");
    let me = setting
        .instance("Node_2", 2)
        .replace("ControlPlane", "Worker");
    let lie = me.replace("qemu:///Node_2", "qemu:///Node_2 --anonymous-auth=true");
    setting.metadata.set_self(&lie);
    let node = Program::start(&mut command);
    node.expect("\"qemu:///Node_2 --anonymous-auth=true\" cannot be a provider ID");
    assert_fresh(&setting, &node);
    assert_eq!(setting.kubeadm_calls(), "");
}

#[test]
fn a_control_plane_joins_an_old_service_and_tries_again_with_all_its_files_what_can_pass() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    setting.set_control_planes(&[3]);
    setting.metadata.set_endpoint(&setting.host(3).to_string());
    // a reset removes the keys, as with the real kubeadm
    let cluster = setting.cluster(&format!(
        "case $1 in
           reset) rm -rf /etc/kubernetes/pki /var/lib/kubelet /run/state/kubelet; exit 0 ;;
         esac
         [ $n != 1 ] || {{ echo 'dial tcp: connect: connection refused, {TOKEN}' >&2; exit 1; }}"
    ));
    let _service = setting.join_service_that(3, move |_, request, _| {
        assert!(request.is_control_plane);
        let mut ticket = cluster.ticket(&request);
        ticket.cluster_ca.clear();
        Ok(ticket)
    });
    let mut node = Program::start(&mut setting.joining(&disk, "ControlPlane"));
    assert!(end_of_member(&mut node).success(), "{}", node.output());
    node.expect("kubeadm join failed; the next try is in");
    assert_no_token(&node);
    let join = "join --config /run/firstlight/kubeadm-join.yaml\n";
    let reset = "reset --force --cri-socket unix:///run/containerd/containerd.sock\n";
    assert_eq!(setting.kubeadm_calls(), format!("{join}{reset}{join}"));
    for call in [1, 3] {
        let seen = setting.path(&format!("kubeadm/{call}"));
        let join = json(&seen.join("firstlight/kubeadm-join.yaml"));
        let discovery = &join["discovery"]["bootstrapToken"];
        assert_eq!(discovery["token"], TOKEN);
        assert!(
            discovery["caCertHashes"][0]
                .as_str()
                .unwrap()
                .starts_with("sha256:")
        );
        // the load balancer in the metadata is preferred to the ticket's API server
        assert_eq!(
            discovery["apiServerEndpoint"],
            format!("{}:6443", setting.host(3))
        );
        assert_eq!(
            join["controlPlane"]["localAPIEndpoint"]["advertiseAddress"],
            setting.host(2).to_string()
        );
        assert!(!seen.join("firstlight/cluster.conf").exists());
        for (name, expected) in [
            ("ca.key", 0o600),
            ("etcd/ca.key", 0o600),
            ("ca.crt", 0o644),
            ("sa.pub", 0o644),
        ] {
            assert_eq!(
                mode(&seen.join("kubernetes/pki").join(name)),
                expected,
                "{name}"
            );
        }
        assert_eq!(
            fs::read_to_string(seen.join("kubernetes/pki/sa.key")).unwrap(),
            "-----BEGIN sa.key-----\n"
        );
    }
    assert_eq!(
        json(&setting.path("mount/constellation/node_state.json"))["Role"],
        "ControlPlane"
    );
}

#[test]
fn without_a_load_balancer_and_beside_services_that_hang_one_that_answers_is_enough() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    setting.set_control_planes(&[3, 4, 5]);
    setting.metadata.set("/endpoint", "");
    // one service accepts and never answers, the other takes the call and keeps it until the node has ended
    let _silent = TcpListener::bind(SocketAddr::new(setting.host(3), 30090)).unwrap();
    let cancelled = Arc::new(AtomicBool::new(false));
    let is_cancelled = cancelled.clone();
    let hangs = Arc::new(AtomicBool::new(false));
    let is_hanging = hangs.clone();
    let given = Arc::new(AtomicBool::new(false));
    let is_given = given.clone();
    let _hanging = setting.join_service_that(4, move |call, _, _| {
        hangs.store(true, Ordering::SeqCst);
        while !call.is_cancelled() {
            std::thread::sleep(Duration::from_millis(10));
        }
        cancelled.store(is_given.load(Ordering::SeqCst), Ordering::SeqCst);
        Err(Status::new(Code::Cancelled, "the node is gone"))
    });
    let cluster = setting.cluster("");
    let _service = setting.join_service_that(5, move |_, request, _| {
        if is_hanging.load(Ordering::SeqCst) {
            given.store(true, Ordering::SeqCst);
            Ok(cluster.ticket(&request))
        } else {
            Err(Status::new(Code::Unavailable, "not yet"))
        }
    });
    let mut node = Program::start(&mut setting.joining(&disk, "Worker"));
    node.expect(&format!("ticket: from join service {}", setting.host(5)));
    assert!(end_of_member(&mut node).success(), "{}", node.output());
    assert!(
        is_cancelled.load(Ordering::SeqCst),
        "the other call was cancelled before the ticket was given, or not at all"
    );
}

#[test]
fn a_refusal_is_told_and_asked_again_when_the_service_wants_it() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    setting.set_control_planes(&[3]);
    let cluster = setting.cluster("");
    let _service = setting.join_service_that(3, move |_, request, number| match number {
        0 => Err(Status::new(
            Code::PermissionDenied,
            "no machine Node_2 is known to this cluster",
        )
        .with_retry_after(Duration::from_millis(1500))),
        1 => Err(Status::new(
            Code::Unavailable,
            "another control plane is joining",
        )),
        _ => Ok(cluster.ticket(&request)),
    });
    let mut node = Program::start(&mut setting.joining(&disk, "Worker"));
    let refused = node.expect("refused: join service");
    assert!(
        refused.contains("PermissionDenied: no machine Node_2 is known")
            && refused.contains("correct the cause"),
        "{refused}"
    );
    let waiting = node.expect("another control plane is joining");
    assert!(waiting.contains("waiting: for a cluster"), "{waiting}");
    assert!(end_of_member(&mut node).success(), "{}", node.output());
}

#[test]
fn a_machine_with_other_software_is_told_that_its_attestation_is_refused() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    setting.set_control_planes(&[3]);
    let (_keys, keys) = setting.key_service(3, MASTER_KEY);
    let service = setting.join_service(
        3,
        keys,
        &setting.policy_of(&[(4, [0xab; 32]), (15, [0; 32])]),
    );
    let node = Program::start(&mut setting.joining(&disk, "Worker"));
    let refused = node.expect("refused: join service");
    assert!(
        refused.contains(
            "it refused this machine's attestation (its log says why); correct the cause"
        ),
        "{refused}"
    );
    assert!(service.expect("PCR 4").contains(&"ab".repeat(32)));
    assert_fresh(&setting, &node);
}

#[test]
fn a_bad_ticket_changes_nothing_and_a_good_one_is_still_taken() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    let before = fs::read(&disk).unwrap();
    setting.set_control_planes(&[3, 4]);
    let cluster = setting.cluster("");
    let liar = cluster.clone();
    let _liar = setting.join_service_that(3, move |_, request, _| {
        let mut ticket = liar.ticket(&request);
        ticket.kubernetes_components[0].install_path =
            "/run/state/bin/../../../etc/cron.d/x".into();
        Ok(ticket)
    });
    let is_honest = Arc::new(AtomicBool::new(false));
    let honest = is_honest.clone();
    let _service = setting.join_service_that(4, move |_, request, _| {
        if honest.load(Ordering::SeqCst) {
            Ok(cluster.ticket(&request))
        } else {
            Err(Status::new(Code::Unavailable, "starting"))
        }
    });
    let mut node = Program::start(&mut setting.joining(&disk, "Worker"));
    let refused = node.expect("refused: join service");
    assert!(refused.contains(&setting.host(3).to_string()), "{refused}");
    assert!(
        refused.contains("sent a ticket with the invalid field kubernetes_components:"),
        "{refused}"
    );
    assert_fresh(&setting, &node);
    assert!(fs::read(&disk).unwrap() == before);
    is_honest.store(true, Ordering::SeqCst);
    node.expect(&format!("ticket: from join service {}", setting.host(4)));
    assert!(end_of_member(&mut node).success(), "{}", node.output());
}

#[test]
fn an_init_wins_while_the_node_asks_for_a_ticket() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    setting.set_control_planes(&[3]);
    let _service = setting.join_service_that(3, move |call, _, _| {
        while !call.is_cancelled() {
            std::thread::sleep(Duration::from_millis(10));
        }
        Err(Status::new(Code::Cancelled, "the node is gone"))
    });
    let mut node = Program::start(&mut setting.joining(&disk, "ControlPlane"));
    node.expect("ready:");
    node.expect("quote:");
    let mut operator = crate::init::init(&setting, INIT_SECRET, &setting.policy());
    assert!(operator.exit().success(), "{}", operator.output());
    assert!(end_of_member(&mut node).success());
    node.expect("complete:");
    assert!(!node.output().contains("ticket:"), "{}", node.output());
}

#[test]
fn an_operator_who_comes_second_is_told_that_the_node_joins() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    setting.set_control_planes(&[3]);
    let cluster = setting.cluster("");
    let has_come = Arc::new(AtomicBool::new(false));
    let go = has_come.clone();
    let _service = setting.join_service_that(3, move |call, request, _| {
        while !go.load(Ordering::SeqCst) && !call.is_cancelled() {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(cluster.ticket(&request))
    });
    let mut node = Program::start(&mut setting.joining(&disk, "ControlPlane"));
    node.expect("ready:");
    // the operator's call begins before the join, and his request arrives after it
    let (channel, options) = crate::init::connect(&setting);
    let (mut request, mut answer) = channel.streaming(INIT, &options).unwrap();
    // its answer shows that the node has read the beginning of the call
    let other: Result<(), _> = channel.unary("/init.API/Other", &(), &options);
    assert_eq!(other.unwrap_err().code(), Code::Unimplemented);
    has_come.store(true, Ordering::SeqCst);
    node.expect("locked:");
    let sent = request.send(&crate::init::good_request());
    sent.and_then(|()| request.finish()).unwrap();
    let refusal = crate::init::refusal(answer.one());
    assert!(
        refusal.contains("node is already being activated: it joins a cluster"),
        "{refusal}"
    );
    assert!(end_of_member(&mut node).success(), "{}", node.output());
    node.expect("complete:");
}

#[test]
fn a_stop_before_the_ticket_leaves_the_node_fresh() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    setting.set_control_planes(&[3]);
    let _silent = TcpListener::bind(SocketAddr::new(setting.host(3), 30090)).unwrap();
    let mut node = Program::start(&mut setting.joining(&disk, "Worker"));
    node.expect("ready:");
    std::thread::sleep(Duration::from_millis(300));
    let asked = Instant::now();
    node.terminate();
    assert_eq!(node.exit().code(), Some(143));
    support::promptly::assert_no_wait(asked, Duration::from_secs(1));
    assert_fresh(&setting, &node);
}

/// Checks that the node's disk is marked, so that its next boot formats it.
fn assert_reset(setting: &Setting, disk: &Path, node: &mut Program) {
    assert_eq!(node.exit().code(), Some(3), "{}", node.output());
    node.expect("reset: the next boot formats the state disk");
    assert_no_token(node);
    assert_eq!(
        fs::read_dir(setting.in_node("run/firstlight"))
            .unwrap()
            .count(),
        0,
        "the token is still there"
    );
    let mut after = Program::start(&mut setting.unlock(disk));
    after.expect("formatted before, but never part of a cluster");
    after.exit();
}

#[test]
fn a_join_that_fails_for_good_says_why_and_the_node_starts_over() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    setting.set_control_planes(&[3]);
    let cluster = setting.cluster(&format!("echo one word more, and {TOKEN} >&2; exit 1"));
    let _service = setting.join_service_that(3, move |_, request, _| Ok(cluster.ticket(&request)));
    let mut node = Program::start(&mut setting.joining(&disk, "Worker"));
    let failed = node.expect("failed:");
    assert!(
        failed.contains("kubeadm join failed with exit code 1"),
        "{failed}"
    );
    node.expect("one word more, and [token]");
    assert_reset(&setting, &disk, &mut node);
    assert_eq!(setting.kubeadm_calls().lines().count(), 1);
}

/// A reset would stop a member on which etcd counts.
#[test]
fn a_control_plane_that_etcd_knows_goes_on_without_a_reset() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    setting.set_control_planes(&[3]);
    let cluster = setting.cluster(
        "[ $n != 1 ] || {
           mkdir -p /etc/kubernetes/manifests; touch /etc/kubernetes/manifests/etcd.yaml
           echo 'error execution phase etcd-join: etcdserver: can only promote a learner member' >&2; exit 1
         }
         # no etcd runs here, and with its manifest the node would wait for it
         rm -f /etc/kubernetes/manifests/etcd.yaml",
    );
    let _service = setting.join_service_that(3, move |_, request, _| Ok(cluster.ticket(&request)));
    let mut node = Program::start(&mut setting.joining(&disk, "ControlPlane"));
    assert!(end_of_member(&mut node).success(), "{}", node.output());
    node.expect("continues with etcd, which already has this member");
    let join = "join --config /run/firstlight/kubeadm-join.yaml\n";
    assert_eq!(setting.kubeadm_calls(), join.repeat(2));
    for (call, skipped) in [
        (1, json!(["control-plane-prepare/download-certs"])),
        (
            2,
            json!([
                "preflight",
                "control-plane-prepare",
                "check-etcd",
                "kubelet-start"
            ]),
        ),
    ] {
        let seen = setting.path(&format!("kubeadm/{call}/firstlight/kubeadm-join.yaml"));
        assert_eq!(json(&seen)["skipPhases"], skipped);
    }
}

#[test]
fn a_control_plane_whose_join_fails_for_good_leaves_etcd() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    setting.set_control_planes(&[3]);
    let cluster = setting.cluster("[ $1 = join ] || exit 0; echo no; exit 1");
    let _service = setting.join_service_that(3, move |_, request, _| Ok(cluster.ticket(&request)));
    let mut node = Program::start(&mut setting.joining(&disk, "ControlPlane"));
    node.expect("kubeadm join failed with exit code 1");
    assert_reset(&setting, &disk, &mut node);
    let calls = setting.kubeadm_calls();
    let calls: Vec<_> = calls
        .lines()
        .filter_map(|it| it.split(' ').next())
        .collect();
    assert_eq!(calls, ["join", "reset"]);
}

#[test]
fn a_stop_in_the_middle_of_the_join_resets_the_node() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    setting.set_control_planes(&[3]);
    let cluster = setting.cluster("echo in the middle; sleep 3600");
    let _service = setting.join_service_that(3, move |_, request, _| Ok(cluster.ticket(&request)));
    let mut node = Program::start(&mut setting.joining(&disk, "Worker"));
    node.expect("in the middle");
    node.terminate();
    node.expect("kubeadm join was ended because this node is stopping");
    assert_reset(&setting, &disk, &mut node);
}

#[test]
fn a_node_that_does_not_know_what_it_is_for_says_so_and_joins_when_it_does() {
    let setting = Setting::new();
    let disk = setting.new_disk();
    setting.set_control_planes(&[3]);
    let cluster = setting.cluster("");
    let _service = setting.join_service_that(3, move |_, request, _| Ok(cluster.ticket(&request)));
    let mut node = Program::start(&mut setting.joining(&disk, "Nothing"));
    node.expect("does not say whether Node_2 is a control plane or a worker");
    assert_fresh(&setting, &node);
    setting.metadata.set_self(
        &setting
            .instance("Node_2", 2)
            .replace("ControlPlane", "Worker"),
    );
    assert!(end_of_member(&mut node).success(), "{}", node.output());
}
