//! Each check finds its faults in an otherwise healthy cluster, and finds nothing in a healthy one.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use base::crypto::Secret;
use base::master_secret::MasterSecret;
use base::time;
use kubernetes::machine_record::MachineRecord;
use kubernetes::objects::{Container, Workload};
use kubernetes::rbac::PrivilegedAccount;
use kubernetes::services::master_secret::MasterSecretStorage;
use kubernetes::services::{self, ServiceSettings};
use rpc::grpc::{Code, Status};
use serde_json::{Value, from_value, json};
use verifier::refusal::Kind;
use verifier::{KeyName, OTHER_VARIANT, Policy, Refusal, Variant};

use super::super::diagnosis::Severity::{self, Error, Note, Warning};
use super::super::folder::{Folder, OwnFile};
use super::super::gathered::Gathered;
use super::CHECKS;
use crate::cluster::{
    status::answer::{SERVICES, ServerAnswer},
    status::listed::Listed,
    status::objects::{
        Claim, ControlPlanePod, Expiration, Fate, Joining, ObjectList, Objects, SigningRequest,
        UNINITIALIZED, WaitingToken,
    },
    status::report::StatusReport,
    status::served::{Served, ServedError, Validity},
    status::view::{ListFailure, NodeServers, NodeView, View},
};
use crate::commands;
use crate::workspace::connect::{ClusterMembership, Endpoint, Unreached};

const DAY: u64 = 24 * 60 * 60;
const NAMES: [&str; 4] = ["cp-0", "cp-1", "cp-2", "worker-a"];

fn now() -> SystemTime {
    time::parse("2026-08-01T12:00:00Z").unwrap()
}

fn in_days(days: u64) -> SystemTime {
    now() + Duration::from_secs(days * DAY)
}

fn days_ago(days: u64) -> SystemTime {
    now() - Duration::from_secs(days * DAY)
}

/// Returns the validity of a certificate of a year that ends in so many days.
fn ends_in(days: u64) -> Validity {
    let until = in_days(days);
    let from = until - Duration::from_secs(365 * DAY);
    Validity { from, until }
}

fn policy_text() -> String {
    let mut measurements = json!({"15": {"expected": "00".repeat(32), "warnOnly": false}});
    for index in ["4", "7", "8", "9", "11", "12", "13"] {
        measurements[index] = json!({"expected": "11".repeat(32), "warnOnly": false});
    }
    json!({
        "variant": "qemu-vtpm", "require": "strong", "measurements": measurements,
        "attestationKeys": [KeyName::of(b"a").to_string()],
    })
    .to_string()
}

fn served(days: u64, answer: Option<(u16, &str)>) -> Option<Result<Served, ServedError>> {
    Some(Ok(Served {
        validity: Some(ends_in(days)),
        distrust: None,
        ahead: Some(0),
        answer: answer.map(|(status, text)| (status, text.into())),
    }))
}

fn unreachable(why: &str) -> Option<Result<Served, ServedError>> {
    Some(Err(ServedError::Unreachable(why.into())))
}

fn verified(name: &str) -> ServerAnswer {
    ServerAnswer::Verified {
        standing: ClusterMembership::Member,
        image: None,
        services: vec![],
        key: Some(KeyName::of(name.as_bytes())),
        waiting: None,
        record: Err(Status::new(Code::Unimplemented, "")),
        has_set_clock: Some(true),
    }
}

/// Returns the report of a node that answers that no program listens.
fn closed() -> StatusReport {
    report(ServerAnswer::Nobody(Unreached {
        text: "refused".into(),
        is_closed: true,
        is_nameless: false,
    }))
}

fn refused(why: Refusal) -> StatusReport {
    report(ServerAnswer::Refused(why))
}

fn of_other_variant() -> Refusal {
    let why = "it has no attestation document of an accepted variant (expected OID 01, got 02)";
    Kind::Unproven.because(why).of(OTHER_VARIANT)
}

fn report(answer: ServerAnswer) -> StatusReport {
    let endpoint = Endpoint::parse("10.0.0.1", 9000).unwrap();
    StatusReport {
        address: "10.0.0.1".into(),
        answers: vec![(endpoint, answer)],
        cluster: Some([7; 32]),
        names_no_keys: false,
        exceptions: Default::default(),
    }
}

fn node(index: usize) -> NodeView {
    let name = NAMES[index];
    let is_control_plane = index < 3;
    let address = format!("10.0.0.{index}");
    NodeView {
        listed: Listed {
            name: name.into(),
            address: address.clone(),
            internal: vec![address],
            is_control_plane,
            is_labelled: is_control_plane,
            is_ready: true,
            version: "v1.34.4".into(),
            ..Listed::default()
        },
        report: report(verified(name)),
        servers: NodeServers {
            kubelet: served(300, Some((401, "Unauthorized"))),
            api_server: is_control_plane
                .then(|| served(300, Some((200, "ok"))))
                .flatten(),
            etcd: is_control_plane.then(|| served(300, None)).flatten(),
            etcd_peer: is_control_plane.then(|| served(300, None)).flatten(),
        },
    }
}

fn record(index: usize) -> MachineRecord {
    let name = NAMES[index];
    MachineRecord {
        name: format!("join-node-{name}"),
        node: name.into(),
        disk: format!("00000000-0000-0000-0000-00000000000{index}"),
        addresses: vec![format!("10.0.0.{index}").parse().unwrap()],
        token: "abcdef".into(),
        control_plane: index < 3,
        issued: Some(days_ago(30)),
        ..MachineRecord::default()
    }
}

/// Returns the DaemonSets as they are installed, all of their pods ready.
fn sets(image: &str) -> Vec<Workload> {
    let settings = ServiceSettings {
        image: image.into(),
        variant: "qemu-vtpm".into(),
        policy: policy_text(),
        measurement_salt: vec![1; 32],
        kms: MasterSecret::new(Secret::new(vec![2; 32]), Secret::new(vec![3; 32])).unwrap(),
        keeping: MasterSecretStorage::default(),
        node_port: None,
        migrate_until: None,
        old_clients_until: None,
        grants: None,
        metadata: None,
        require_strong: None,
        watch: None,
        watch_action: None,
        watch_issuer: None,
        signed: Default::default(),
    };
    let objects = services::manifests(&settings).unwrap().into_iter();
    let sets = objects.filter(|it| it["kind"] == "DaemonSet");
    let mut sets: Vec<Workload> = sets.map(|it| from_value(it).unwrap()).collect();
    for set in &mut sets {
        set.status.desired_number_scheduled = 3;
        set.status.updated_number_scheduled = 3;
        set.status.number_available = 3;
    }
    sets
}

/// Returns the name of the Secret that the key service of [`sets`] reads.
fn used_secret() -> String {
    let sets = sets("example.com/a:1");
    let volumes = sets.iter().flat_map(|set| &set.spec.template.spec.volumes);
    let mut names = volumes.map(|volume| &volume.secret.secret_name);
    names.find(|name| !name.is_empty()).unwrap().clone()
}

pub fn healthy() -> Gathered {
    let components = [
        "kube-apiserver",
        "etcd",
        "kube-controller-manager",
        "kube-scheduler",
    ];
    let pods = components.into_iter().flat_map(|component| {
        NAMES[..3].iter().map(move |node| ControlPlanePod {
            component: component.into(),
            node: (*node).into(),
            version: if component == "etcd" {
                "3.6.6-0"
            } else {
                "v1.34.4"
            }
            .into(),
            is_ready: true,
            address: None,
            permits_external_ips: false,
        })
    });
    let policy = Policy::from_json(&policy_text()).unwrap();
    Gathered {
        now: now(),
        unlisted: None,
        view: View {
            server: "https://lb.example:6443".into(),
            version: Some("v1.34.4".into()),
            operator: Some(ends_in(300)),
            authorities: vec![(
                "authority of the cluster",
                Validity {
                    from: days_ago(365),
                    until: in_days(9 * 365),
                },
            )],
            nodes: (0..4).map(node).collect(),
            objects: Objects {
                records: (0..4).map(record).collect(),
                policy: Some(policy_text()),
                salt: Some("c2FsdA==".into()),
                cluster_configuration: json!({"kubernetesVersion": "v1.34.4", "controlPlaneEndpoint": "lb.example"}),
                services: sets("example.com/a:1"),
                control_plane: pods.collect(),
                master_secrets: vec![(used_secret(), true)],
                policies: services::ADMISSION_POLICIES.map(str::to_owned).into(),
                ..Objects::default()
            },
        },
        policy,
        known: vec![],
        policy_file: "policy.json".into(),
        variant: Variant::named("qemu-vtpm").unwrap(),
        folder: Folder {
            files: vec![OwnFile {
                path: "secret.json".into(),
                mode: 0o600,
                owner: sys::process::user(),
                is_secret: true,
            }],
            salt: Some("c2FsdA==".into()),
            cluster: Some([7; 32]),
            derived: Some([7; 32]),
            unusable: vec![],
            has_state: true,
            has_master_secret: true,
        },
    }
}

/// Returns the findings as `SEVERITY CHECK: OBJECT: TEXT`.
fn found(facts: &Gathered) -> Vec<(Severity, &'static str, String)> {
    let each = CHECKS.iter();
    each.flat_map(|check| {
        let findings = check.run(facts).into_iter();
        findings.map(|it| {
            assert!(!it.advice.is_empty() && !it.advice.ends_with('.'), "{it:?}");
            assert_exists(&it.advice);
            (
                it.severity,
                check.name,
                format!("{}: {}", it.object, it.text),
            )
        })
    })
    .collect()
}

#[test]
fn nothing_is_found_in_a_healthy_cluster() {
    assert_eq!(found(&healthy()), []);
}

/// Checks that an advice leads to a page, a chapter, a command and options that exist.
fn assert_exists(advice: &str) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for word in advice.split([' ', '(', ')', ',', ';']) {
        let (page, chapter) = word.split_once('#').unwrap_or((word, ""));
        if !page.ends_with(".md") {
            continue;
        }
        let text = fs::read_to_string(folder.join(page));
        let text = text.unwrap_or_else(|error| panic!("{advice}: {page}: {error}"));
        let heads = text.lines().filter(|line| line.starts_with('#'));
        let mut anchors = heads.map(|line| {
            let line = line.trim_start_matches('#').trim().to_lowercase();
            let kept = line
                .chars()
                .filter(|it| it.is_alphanumeric() || " -".contains(*it));
            kept.collect::<String>().replace(' ', "-")
        });
        assert!(
            chapter.is_empty() || anchors.any(|it| it == chapter),
            "{advice}: {page} has no chapter {chapter}"
        );
    }
    for part in advice.split("firstlight ").skip(1) {
        let end = part.find([';', ',', '(', ')']).unwrap_or(part.len());
        let mut words = part[..end].split_whitespace();
        let name = words.next().unwrap();
        let program = commands::declared();
        let Some(command) = program.find_subcommand(name) else {
            panic!("{advice}: there is no command {name:?}");
        };
        let options = || command.get_arguments().filter(|it| it.get_long().is_some());
        let given: Vec<&str> = words.filter_map(|word| word.strip_prefix("--")).collect();
        for option in &given {
            assert!(
                options().any(|it| it.get_long() == Some(option)),
                "{advice}: {name} has no option --{option}"
            );
        }
        let mut needed = options().filter(|it| it.is_required_set());
        assert!(
            given.is_empty() || needed.all(|it| given.contains(&it.get_long().unwrap())),
            "{advice}: an option that {name} needs is missing"
        );
    }
}

/// A fault: all findings, a part of the text of the first one, and what makes the fault.
type Fault = (
    &'static [(&'static str, Severity)],
    &'static str,
    fn(&mut Gathered),
);

fn option(facts: &mut Gathered, service: usize, name: &str, value: &str) {
    let words = &mut container(facts, service).command;
    match words.iter().position(|word| word == name) {
        Some(at) => words[at + 1] = value.into(),
        None => words.extend([name.into(), value.into()]),
    }
}

fn container(facts: &mut Gathered, service: usize) -> &mut Container {
    &mut facts.view.objects.services[service]
        .spec
        .template
        .spec
        .containers[0]
}

/// Returns the place of a service in the list.
fn place(facts: &Gathered, name: &str) -> usize {
    let mut sets = facts.view.objects.services.iter();
    sets.position(|set| set.metadata.name == name).unwrap()
}

fn set_option(facts: &mut Gathered, service: &str, name: &str, value: &str) {
    let at = place(facts, service);
    option(facts, at, name, value);
}

fn pod<'a>(facts: &'a mut Gathered, component: &str, node: &str) -> &'a mut ControlPlanePod {
    let mut pods = facts.view.objects.control_plane.iter_mut();
    pods.find(|pod| pod.component == component && pod.node == node)
        .unwrap()
}

/// Adds a Deployment of which so many of two pods are ready.
fn add_deployment(facts: &mut Gathered, ready: u64) {
    let deployment = json!({
        "kind": "Deployment", "metadata": {"name": "coredns"}, "spec": {"replicas": 2},
        "status": {"availableReplicas": ready, "updatedReplicas": 2, "replicas": 2},
    });
    let workloads = &mut facts.view.objects.workloads;
    workloads.push(from_value(deployment).unwrap());
}

const OF_CONTROL_PLANE: &[Fault] = &[
    (
        &[("control-plane", Error)],
        "cp-1: its kube-scheduler is not ready",
        |it| pod(it, "kube-scheduler", "cp-1").is_ready = false,
    ),
    (
        &[("control-plane", Error)],
        "cp-1: it is a control plane and has no kube-controller-manager",
        |it| {
            let pods = &mut it.view.objects.control_plane;
            pods.retain(|pod| pod.component != "kube-controller-manager" || pod.node != "cp-1");
        },
    ),
    (
        &[("system-pods", Warning)],
        "Deployment kube-system/coredns: coredns: 1 of 2 ready",
        |it| add_deployment(it, 1),
    ),
    (
        &[("system-pods", Error)],
        "Deployment kube-system/coredns: coredns: 0 of 2 ready",
        |it| add_deployment(it, 0),
    ),
    (
        &[("api-server", Error)],
        "its API server does not answer, those of other",
        |it| {
            it.view.nodes[1].servers.api_server = unreachable("refused");
        },
    ),
    (
        &[("api-server", Error)],
        "is not ready: etcd, ping failed",
        |it| {
            it.view.nodes[1].servers.api_server = served(
                300,
                Some((
                    500,
                    "[+]a ok\n[-]etcd failed: reason withheld\n[-]ping failed\n",
                )),
            );
        },
    ),
    (
        &[("api-server", Error)],
        "its API server gives no answer",
        |it| {
            it.view.nodes[1].servers.api_server = served(300, None);
        },
    ),
    (
        &[("api-server", Note)],
        "only through the kubeconfig",
        |it| {
            for node in &mut it.view.nodes[..3] {
                node.servers.api_server = unreachable("filtered");
            }
        },
    ),
    (
        &[("endpoint", Warning)],
        "leads only to the control plane cp-1",
        |it| {
            it.view.server = "https://10.0.0.1:6443".into();
        },
    ),
    (
        &[("endpoint", Note)],
        "the endpoint of the cluster is https://lb.example:6443",
        |it| {
            it.view.server = "https://tunnel.example:6443".into();
        },
    ),
    (
        &[("etcd", Error)],
        "cp-2: it is a control plane and has no pod of etcd",
        |it| {
            it.view
                .objects
                .control_plane
                .retain(|pod| pod.component != "etcd" || pod.node != "cp-2");
        },
    ),
    (
        &[("etcd", Error)],
        "cp-2: its member of etcd is not ready: 2 of 3 are, and 2 are needed, so the next failure stops the cluster",
        |it| {
            it.view
                .objects
                .control_plane
                .iter_mut()
                .rfind(|pod| pod.component == "etcd")
                .unwrap()
                .is_ready = false;
        },
    ),
    (
        &[("etcd", Warning)],
        "it has 2 members, which survive the loss of 0, as 1 would",
        |it| {
            it.view
                .objects
                .control_plane
                .retain(|pod| pod.node != "cp-2");
            it.view.nodes.remove(2);
            it.view.objects.records.remove(2);
        },
    ),
    (
        &[("etcd", Note)],
        "etcd 3.6, which comes with Kubernetes v1.34, may follow only 3.5.26 or later: cp-1 (3.5.24-0)",
        |it| {
            let mut pods = it.view.objects.control_plane.iter_mut();
            let pod = pods.find(|pod| pod.component == "etcd" && pod.node == "cp-1");
            pod.unwrap().version = "3.5.24-0".into();
        },
    ),
    (&[("etcd", Note)], "it has one member", |it| {
        it.view
            .objects
            .control_plane
            .retain(|pod| pod.node == "cp-0");
        it.view.nodes.drain(1..3);
        it.view.objects.records.drain(1..3);
    }),
    (
        // each kubelet is newer than the oldest API server
        &[
            ("versions", Error),
            ("versions", Error),
            ("versions", Error),
            ("versions", Error),
            ("versions", Error),
        ],
        "v1.33.1 and v1.35.0, more than one minor version apart",
        |it| {
            it.view.objects.control_plane[0].version = "v1.33.1".into();
            it.view.objects.control_plane[1].version = "v1.35.0".into();
        },
    ),
    (
        &[("versions", Warning)],
        "API servers: they have v1.34.4 and v1.34.5",
        |it| {
            it.view.objects.control_plane[0].version = "v1.34.5".into();
        },
    ),
    (
        &[("versions", Warning)],
        "it has v1.34.3, and the API server is v1.34.4",
        |it| {
            it.view.objects.cluster_configuration["kubernetesVersion"] = "v1.34.3".into();
        },
    ),
    (
        &[("versions", Error)],
        "worker-a: its kubelet is v1.35.0, and the oldest API server v1.34.4",
        |it| {
            it.view.nodes[3].listed.version = "v1.35.0".into();
        },
    ),
    (
        &[("versions", Error)],
        "its kubelet is v1.30.0, more than 3 minor",
        |it| {
            it.view.nodes[3].listed.version = "v1.30.0".into();
        },
    ),
    (
        &[("versions", Warning)],
        "its kubelet is v1.34.3, and the oldest",
        |it| {
            it.view.nodes[3].listed.version = "v1.34.3".into();
        },
    ),
    (
        &[("end-of-life", Warning)],
        "v1.34 gets no more security updates since 2026-10-27",
        |it| {
            it.now = time::parse("2026-10-28T00:00:00Z").unwrap();
        },
    ),
    (
        &[("end-of-life", Warning)],
        "v1.34 gets its last security updates until 2026-10-27, in 57 days",
        |it| {
            it.now = time::parse("2026-08-31T00:00:00Z").unwrap();
        },
    ),
    (
        &[("end-of-life", Note)],
        "this version of firstlight does not know its version v1.99.0",
        |it| {
            let new = || "v1.99.0".to_owned();
            it.view.version = Some(new());
            it.view.objects.cluster_configuration["kubernetesVersion"] = new().into();
            for pod in &mut it.view.objects.control_plane {
                pod.version = new();
            }
            for node in &mut it.view.nodes {
                node.listed.version = new();
            }
        },
    ),
    (&[("unread", Note)], "list secrets: forbidden", |it| {
        it.view
            .objects
            .unread
            .push((ObjectList::Tokens, "list secrets: forbidden".into()));
    }),
];

const OF_NODES: &[Fault] = &[
    (
        &[("attestation", Error), ("ready", Error)],
        "worker-a: unreachable: 10.0.0.1:9000 (InitServer): no answer: no route",
        |it| {
            it.view.nodes[3].report = report(ServerAnswer::Nobody("no route".into()));
            it.view.nodes[3].listed.is_ready = false;
        },
    ),
    (
        &[("attestation", Error)],
        "worker-a: it does not meet the policy: PCR 4: expected 1, got 2",
        |it| {
            it.view.nodes[3].report = refused(
                Kind::Measurement
                    .because("PCR 4: expected 1, got 2\nPCR 7: ..")
                    .of("PCR 4"),
            );
        },
    ),
    (
        &[("attestation", Note)],
        "worker-a: it could not be judged: there is no CRL",
        |it| it.view.nodes[3].report = refused(Kind::Collateral.because("there is no CRL")),
    ),
    (
        &[("attestation", Warning)],
        "worker-a: it could not be judged: it has no attestation document of an accepted variant",
        |it| it.view.nodes[3].report = refused(of_other_variant()),
    ),
    (
        // a register counts, whatever else is missing
        &[("attestation", Error)],
        "worker-a: it does not meet the policy: there is no CRL",
        |it| {
            let mut why = Kind::Collateral.because("there is no CRL");
            why.others = [Kind::Measurement.because("PCR 4")].into();
            it.view.nodes[3].report = refused(why);
        },
    ),
    (
        &[("attestation", Warning)],
        "all 4 nodes: none could be judged: cp-0: there is no CRL",
        |it| {
            for node in &mut it.view.nodes {
                node.report = refused(Kind::Collateral.because("there is no CRL"));
            }
        },
    ),
    (
        &[("attestation", Warning)],
        "all 4 nodes: none could be judged: cp-0: it has no attestation document",
        |it| {
            for node in &mut it.view.nodes {
                node.report = refused(of_other_variant());
            }
        },
    ),
    (
        &[("attestation", Warning)],
        "worker-a: unreachable: 10.0.0.1:9000 (InitServer): no answer: no route",
        |it| it.view.nodes[3].report = report(ServerAnswer::Nobody("no route".into())),
    ),
    (
        &[("attestation", Warning)],
        "worker-a: unreachable: 10.0.0.1:9000 (InitServer): no answer: refused",
        |it| it.view.nodes[3].report = closed(),
    ),
    (
        &[("attestation", Warning), ("records", Warning)],
        "worker-a: no program of Firstlight answers on it, and it has no record: it is probably a node of Constellation",
        |it| {
            it.view.nodes[3].report = closed();
            it.view.objects.records.truncate(3);
        },
    ),
    (
        &[
            ("attestation", Warning),
            ("records", Error),
            ("records", Warning),
            ("records", Warning),
            ("records", Warning),
            ("records", Warning),
        ],
        "all 4 nodes: no program of Firstlight answers on them",
        |it| {
            for node in &mut it.view.nodes {
                node.report = closed();
            }
            it.view.objects.records.clear();
        },
    ),
    (
        &[("attestation", Error)],
        "worker-a: waits-for-key: 10.0.0.1:9000 (recovery server): attested",
        |it| {
            let mut answer = verified("worker-a");
            if let ServerAnswer::Verified {
                standing, services, ..
            } = &mut answer
            {
                *standing = ClusterMembership::Fresh;
                services.push(&SERVICES[0]);
            }
            it.view.nodes[3].report = report(answer);
        },
    ),
    (
        &[("attestation", Error)],
        "worker-a: fresh: 10.0.0.1:9000 (InitServer): attested",
        |it| {
            let mut answer = verified("worker-a");
            if let ServerAnswer::Verified {
                standing, services, ..
            } = &mut answer
            {
                *standing = ClusterMembership::Fresh;
                services.push(&SERVICES[1]);
            }
            it.view.nodes[3].report = report(answer);
        },
    ),
    (
        &[("attestation", Warning)],
        "worker-a: only its join service answers",
        |it| {
            it.view.nodes[3].report = report(ServerAnswer::Guarded);
        },
    ),
    (&[("attestation", Error)], "worker-a: other-cluster", |it| {
        let mut answer = verified("worker-a");
        if let ServerAnswer::Verified { standing, .. } = &mut answer {
            *standing = ClusterMembership::Other;
        }
        it.view.nodes[3].report = report(answer);
    }),
    (
        &[("attestation", Error)],
        "cp-0, worker-a: one machine answers for these nodes",
        |it| {
            it.view.nodes[3].report = report(verified("cp-0"));
        },
    ),
    (
        &[("attestation", Error)],
        "all 4 nodes: none meets the policy in policy.json: cp-0: PCR 4",
        |it| {
            for node in &mut it.view.nodes {
                node.report = refused(Kind::Measurement.because("PCR 4"));
            }
        },
    ),
    (
        &[("attestation", Warning)],
        "all 4 nodes: none answers this machine",
        |it| {
            for node in &mut it.view.nodes {
                node.report = report(ServerAnswer::Nobody("filtered".into()));
            }
        },
    ),
    (
        &[("ready", Error)],
        "Kubernetes reports it as not ready: silent",
        |it| {
            it.view.nodes[3].listed.is_ready = false;
            it.view.nodes[3].listed.why_not = "silent".into();
        },
    ),
    (&[("ready", Warning)], "reports DiskPressure", |it| {
        it.view.nodes[3].listed.troubles = vec!["DiskPressure"];
    }),
    (&[("ready", Note)], "it is cordoned", |it| {
        it.view.nodes[3].listed.is_cordoned = true;
    }),
    (
        &[("network-plugin", Error)],
        "worker-a: no network plugin is installed",
        |it| {
            it.view.nodes[3].listed.is_ready = false;
            it.view.nodes[3].listed.no_network = Some("no network plugin is installed".into());
        },
    ),
    (
        &[("cloud-controller", Error)],
        "it waits for a cloud controller manager",
        |it| {
            it.view.nodes[3].listed.taints = vec![UNINITIALIZED.into()];
        },
    ),
    (
        &[("records", Warning)],
        "worker-a: no record says which machine it is",
        |it| {
            it.view.objects.records.truncate(3);
        },
    ),
    (
        &[("records", Warning)],
        "join-node-gone: a machine was admitted under this name",
        |it| {
            let mut old = record(3);
            (old.name, old.node, old.disk) =
                ("join-node-gone".into(), "gone".into(), String::new());
            it.view.objects.records.push(old);
        },
    ),
    (
        &[("records", Warning)],
        "its member of etcd may still count for the majority",
        |it| {
            let mut old = record(3);
            (old.name, old.node, old.disk) =
                ("join-node-gone".into(), "gone".into(), String::new());
            old.control_plane = true;
            it.view.objects.records.push(old);
        },
    ),
    (
        &[("records", Warning)],
        "cp-0, worker-a: these nodes have one state disk",
        |it| {
            it.view.objects.records[3].disk = it.view.objects.records[0].disk.clone();
        },
    ),
    (
        &[("records", Warning)],
        "it joined as a control plane, and its Node says that it is a worker",
        |it| {
            it.view.objects.records[3].control_plane = true;
        },
    ),
    (
        &[("records", Error)],
        "no record says which nodes are control planes",
        |it| {
            for record in &mut it.view.objects.records {
                (record.control_plane, record.token) = (false, String::new());
            }
        },
    ),
    (&[("records", Note)], "JoiningNode late", |it| {
        let deadline = Some(days_ago(1));
        it.view.objects.joining.push(Joining {
            node: "late".into(),
            deadline,
        });
    }),
    (
        &[("addresses", Warning)],
        "it has the address 10.9.9.9, and joined with 10.0.0.3",
        |it| {
            it.view.nodes[3].listed.internal.push("10.9.9.9".into());
        },
    ),
    (
        &[("clocks", Error)],
        "worker-a: its clock is 1 min 30 s ahead of most other nodes",
        |it| {
            let Some(Ok(kubelet)) = &mut it.view.nodes[3].servers.kubelet else {
                panic!();
            };
            kubelet.ahead = Some(90);
        },
    ),
    (
        &[("clocks", Error)],
        "worker-a: its clock is 1 h 0 min behind most",
        |it| {
            for node in &mut it.view.nodes {
                node.servers = NodeServers::default();
                let late = if node.listed.name == "worker-a" {
                    3600
                } else {
                    9
                };
                let beat = now() - Duration::from_secs(late);
                it.view
                    .objects
                    .heartbeats
                    .push((node.listed.name.clone(), beat));
            }
        },
    ),
    (
        &[("clocks", Warning)],
        "cp-0: no time service has set its clock",
        |it| {
            let ServerAnswer::Verified { has_set_clock, .. } =
                &mut it.view.nodes[0].report.answers[0].1
            else {
                panic!();
            };
            *has_set_clock = Some(false);
        },
    ),
    (
        &[("clocks", Warning)],
        "the clocks of the cluster are 1 min behind it",
        |it| {
            for node in &mut it.view.nodes {
                let Some(Ok(kubelet)) = &mut node.servers.kubelet else {
                    panic!();
                };
                kubelet.ahead = Some(-60);
            }
        },
    ),
];

const OF_CERTIFICATES: &[Fault] = &[
    (
        &[("certificates", Warning)],
        "cp-0: the certificate of its etcd for other members ends on 2026-08-26, in 25 days",
        |it| it.view.nodes[0].servers.etcd_peer = served(25, None),
    ),
    (
        &[("certificates", Error)],
        "the kubeconfig: the operator's certificate ended on 2026-07-31, 1 day ago",
        |it| {
            it.view.operator = Some(Validity {
                from: days_ago(366),
                until: days_ago(1),
            });
        },
    ),
    (
        &[("certificates", Warning)],
        "cp-1: the certificate of its API server ends on 2026-08-21, in 20 days",
        |it| {
            it.view.nodes[1].servers.api_server = served(20, Some((200, "ok")));
        },
    ),
    (
        &[("certificates", Error)],
        "worker-a: the certificate of its kubelet ends on 2026-08-06, in 5 days",
        |it| {
            it.view.nodes[3].servers.kubelet = served(5, Some((401, "")));
        },
    ),
    (
        &[("certificates", Error)],
        "cp-2: the certificate of its etcd ended on 2026-07-30, 2 days ago",
        |it| {
            let Some(Ok(etcd)) = &mut it.view.nodes[2].servers.etcd else {
                panic!();
            };
            etcd.validity = Some(Validity {
                from: days_ago(367),
                until: days_ago(2),
            });
        },
    ),
    (
        &[("certificates", Error)],
        "begins only on 2026-08-02, in 1 day",
        |it| {
            let Some(Ok(etcd)) = &mut it.view.nodes[2].servers.etcd else {
                panic!();
            };
            etcd.validity = Some(Validity {
                from: in_days(1),
                until: in_days(365),
            });
        },
    ),
    (
        &[("certificates", Warning)],
        "the kubeconfig: the operator's certificate ends",
        |it| {
            it.view.operator = Some(ends_in(29));
        },
    ),
    (
        &[("certificates", Error)],
        "does not vouch for its kubelet at this address: other name",
        |it| {
            let Some(Ok(kubelet)) = &mut it.view.nodes[3].servers.kubelet else {
                panic!();
            };
            kubelet.distrust = Some("other name".into());
        },
    ),
    (
        &[("certificates", Note)],
        "kubelets: none answers this machine",
        |it| {
            for node in &mut it.view.nodes {
                node.servers.kubelet = unreachable("filtered");
            }
        },
    ),
    (
        &[("authorities", Warning)],
        "the authority of the cluster ends on 2027-06-07, in 310 days",
        |it| {
            it.view.authorities[0].1 = Validity {
                from: days_ago(3650),
                until: in_days(310),
            };
        },
    ),
    (
        &[("authorities", Error)],
        "ends on 2026-10-20, in 80 days",
        |it| {
            it.view.authorities[0].1 = Validity {
                from: days_ago(3650),
                until: in_days(80),
            };
        },
    ),
    (
        &[("certificate-requests", Error)],
        "nobody has approved it for 60 minutes",
        |it| {
            it.view.objects.requests.push(request(60, Fate::Pending));
        },
    ),
    (
        &[("certificate-requests", Error)],
        "it is approved, but not signed after 6 minutes",
        |it| {
            it.view.objects.requests.push(request(6, Fate::Unsigned));
        },
    ),
    (
        &[("certificate-requests", Error)],
        "it was refused: address",
        |it| {
            it.view.objects.requests.push(request(9, Fate::Issued));
            it.view
                .objects
                .requests
                .push(request(1, Fate::Refused("address".into())));
        },
    ),
];

fn request(minutes: u64, fate: Fate) -> SigningRequest {
    SigningRequest {
        name: "csr-1".into(),
        user: "system:node:worker-a".into(),
        is_serving: true,
        made: Some(now() - Duration::from_secs(minutes * 60)),
        fate,
    }
}

const KUBEADM_GROUP: &str = "system:bootstrappers:kubeadm:default-node-token";

fn token(groups: &str, expires: Expiration, authenticates: bool) -> WaitingToken {
    WaitingToken {
        id: "abcdef".into(),
        groups: groups.into(),
        expires,
        authenticates,
    }
}

fn add_token(facts: &mut Gathered, groups: &str, expires: Expiration) {
    let token = token(groups, expires, true);
    facts.view.objects.tokens.push(token);
}

const OF_SERVICES: &[Fault] = &[
    (
        &[("services", Error)],
        "join-service: it does not exist",
        |it| {
            let at = place(it, "join-service");
            it.view.objects.services.remove(at);
        },
    ),
    (
        &[("services", Error)],
        "member-controller: it does not exist: kubelets get no certificates",
        |it| {
            let at = place(it, "member-controller");
            it.view.objects.services.remove(at);
        },
    ),
    (
        &[("services", Error)],
        "key-service: 2 of 3 ready; pod a on cp-1: ImagePullBackOff",
        |it| {
            let at = place(it, "key-service");
            it.view.objects.services[at].status.number_available = 2;
            it.view.objects.services[at].metadata.uid = "u".into();
            let owner = json!([{"kind": "DaemonSet", "name": "key-service", "uid": "u"}]);
            let pod = json!({
                "metadata": {"name": "a", "ownerReferences": owner}, "spec": {"nodeName": "cp-1"},
                "status": {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
            });
            it.view.objects.pods.push(from_value(pod).unwrap());
        },
    ),
    (
        &[("services", Warning)],
        "it may run on 2 of 3 control planes",
        |it| {
            let at = place(it, "key-service");
            it.view.objects.services[at].status.desired_number_scheduled = 2;
        },
    ),
    (
        &[("services", Warning)],
        "the join service has the image example.com/a:1, the key service b",
        |it| {
            let at = place(it, "key-service");
            container(it, at).image = "b".into();
        },
    ),
    (&[("policy", Error)], "it has no attestation policy", |it| {
        it.view.objects.policy = None
    }),
    (
        &[("policy", Error)],
        "cannot be used, so the services keep the one before",
        |it| {
            it.view.objects.policy = Some("{".into());
        },
    ),
    (
        &[("policy", Warning)],
        "it differs from policy.json: the first image: PCR 11: in force 22221111",
        |it| {
            it.view.objects.policy = Some(policy_text().replacen("1111", "2222", 1));
        },
    ),
    (&[("policy", Note)], "any TPM is accepted", |it| {
        let mut policy: Value = serde_json::from_str(&policy_text()).unwrap();
        policy.as_object_mut().unwrap().remove("attestationKeys");
        it.policy = Policy::from_json(&policy.to_string()).unwrap();
        it.view.objects.policy = Some(policy.to_string());
    }),
    (
        &[("policy", Error), ("policy", Note)],
        "does not enforce PCR 4, so any image is accepted",
        |it| {
            let mut policy: Value = serde_json::from_str(&policy_text()).unwrap();
            for index in ["4", "11"] {
                policy["measurements"][index]["warnOnly"] = true.into();
            }
            it.policy = Policy::from_json(&policy.to_string()).unwrap();
            it.view.objects.policy = Some(policy.to_string());
        },
    ),
    (
        &[("policy", Note)],
        "it accepts 2 images: 1 node runs image 1.3, 3 nodes run the first image",
        |it| {
            let mut policy: Value = serde_json::from_str(&policy_text()).unwrap();
            let measurements = policy["measurements"].clone();
            policy["alsoAccepted"] = json!([{"name": "image 1.3", "measurements": measurements}]);
            it.policy = Policy::from_json(&policy.to_string()).unwrap();
            it.view.objects.policy = Some(policy.to_string());
            for (node, runs) in it.view.nodes.iter_mut().zip([0, 0, 1, 0]) {
                let name = ["the first image", "image 1.3"][runs];
                if let ServerAnswer::Verified { image, .. } = &mut node.report.answers[0].1 {
                    *image = Some(name.into());
                }
            }
        },
    ),
    (
        &[("old-clients", Warning)],
        "clients without a token get keys of volumes through 2026-09-01",
        |it| {
            set_option(it, "key-service", "--old-clients-until", "2026-09-01");
        },
    ),
    (
        &[("old-clients", Note)],
        "got keys of volumes through 2026-07-01",
        |it| {
            set_option(it, "key-service", "--old-clients-until", "2026-07-01");
        },
    ),
    (
        &[("migration", Warning)],
        "disks without a record are opened through 2026-09-01",
        |it| {
            set_option(it, "join-service", "--migrate-until", "2026-09-01");
        },
    ),
    (
        &[("migration", Note)],
        "were opened through 2026-07-01",
        |it| {
            set_option(it, "join-service", "--migrate-until", "2026-07-01");
        },
    ),
    (
        &[("plaintext", Error)],
        "it gives every key to every caller",
        |it| {
            set_option(it, "key-service", "--clients", "any");
        },
    ),
    (
        &[("plaintext", Error)],
        "it gives every key to every caller",
        |it| {
            let at = place(it, "key-service");
            let container = container(it, at);
            (container.command, container.args) = (vec![], vec!["--port=9000".into()]);
        },
    ),
    (
        &[("plaintext", Error)],
        "it takes keys in plaintext from any server",
        |it| {
            set_option(it, "join-service", "--key-service-auth", "none");
        },
    ),
    (
        &[("old-form", Note)],
        "it admits nodes by the old form",
        |it| {
            let mut policy: Value = serde_json::from_str(&policy_text()).unwrap();
            policy.as_object_mut().unwrap().remove("require");
            it.policy = Policy::from_json(&policy.to_string()).unwrap();
            it.view.objects.policy = Some(policy.to_string());
        },
    ),
    (
        &[("old-form", Warning)],
        "it does not prove its machine to nodes",
        |it| {
            set_option(it, "join-service", "--evidence", "");
        },
    ),
    (
        &[("collateral", Note)],
        "vcek-milan.crl was fetched on 2026-06-22, 40 days ago",
        |it| {
            it.view.objects.collateral = vec![
                ("vcek-milan-00.der".into(), days_ago(400)),
                ("vcek-milan.crl".into(), days_ago(40)),
            ];
        },
    ),
    (
        &[("master-secret", Error)],
        "the key service uses it, and it does not exist",
        |it| {
            it.view.objects.master_secrets.clear();
        },
    ),
    (&[("master-secret", Warning)], "it is not immutable", |it| {
        it.view.objects.master_secrets[0].1 = false;
    }),
    (
        &[("master-secret", Warning)],
        "constellation-mastersecret: it has the master secret too",
        |it| {
            it.view
                .objects
                .master_secrets
                .push(("constellation-mastersecret".into(), true));
        },
    ),
    (
        &[("master-secret", Warning)],
        "each reader of this Secret, and of a backup of etcd, has all keys of the cluster",
        |it| {
            let old = "constellation-mastersecret";
            let set = it.view.objects.services.iter_mut();
            for set in set.filter(|set| set.metadata.name == "key-service") {
                for volume in &mut set.spec.template.spec.volumes {
                    if volume.name == "config" {
                        volume.secret.secret_name = old.into();
                    }
                }
            }
            it.view.objects.master_secrets = vec![(old.into(), true)];
        },
    ),
    (
        &[("certificate-approval", Warning)],
        "ClusterRoleBinding a: by it, Kubernetes approves certificates of kubelets",
        |it| it.view.objects.approving.push("a".into()),
    ),
    (
        &[("bootstrap-tokens", Warning)],
        "a machine joins without attestation, for ever",
        |it| add_token(it, KUBEADM_GROUP, Expiration::Never),
    ),
    (
        &[("bootstrap-tokens", Note)],
        "it is valid for ever, and has the groups system:bootstrappers:other: what",
        |it| add_token(it, "system:bootstrappers:other", Expiration::Never),
    ),
    (
        &[("bootstrap-tokens", Note)],
        "it is valid until 2026-08-02, in 1 day, and has no group but system:bootstrappers: what",
        |it| add_token(it, "", Expiration::At(in_days(1))),
    ),
    (
        &[("bootstrap-tokens", Note)],
        "bootstrap-token-abcdef: its expiration is not a time",
        |it| add_token(it, KUBEADM_GROUP, Expiration::Unreadable),
    ),
];

/// A Service with an address of a node that takes connections to this port.
/// Returns an account that may read Secrets.
fn account(name: &str) -> PrivilegedAccount {
    PrivilegedAccount {
        name: name.into(),
        may: vec!["read the Secrets"],
        bindings: vec!["ClusterRoleBinding agent".into()],
        ..PrivilegedAccount::default()
    }
}

fn add_claim(facts: &mut Gathered, address: &str, port: u64) {
    facts.view.objects.claims.push(Claim {
        service: "tenant/p".into(),
        addresses: vec!["192.0.2.1".into(), address.into()],
        ports: vec![80, port],
    });
}

const OF_INSIDE: &[Fault] = &[
    (
        &[("ports", Error)],
        "Service tenant/p: its pods get the connections to port 30090 of cp-1",
        |it| add_claim(it, "10.0.0.1", 30_090),
    ),
    (
        &[("ports", Error)],
        "its pods get the connections to port 9000 of worker-a",
        |it| add_claim(it, "10.0.0.3", 9000),
    ),
    (
        &[("ports", Error)],
        "its pods get the connections to port 30100 of cp-0",
        |it| {
            it.view.objects.join_port = Some(30_100);
            // another port, and another address
            add_claim(it, "10.0.0.1", 30_090);
            add_claim(it, "192.0.2.2", 30_100);
            add_claim(it, "10.0.0.0", 30_100);
        },
    ),
    (
        &[("admission", Warning)],
        "not in force: firstlight-nodes, firstlight-records; without them, an agent",
        |it| {
            let missing = ["firstlight-nodes", "firstlight-records"];
            let policies = &mut it.view.objects.policies;
            policies.retain(|policy| !missing.contains(&policy.as_str()));
        },
    ),
    (
        &[("accounts", Warning)],
        "tenant/agent: it may read the Secrets",
        |it| it.view.objects.powerful = vec![account("tenant/agent")],
    ),
    (
        &[("accounts", Note)],
        "kube-system/cloud: it may read the Secrets",
        |it| {
            let cloud = PrivilegedAccount {
                is_cloud_controller: true,
                ..account("kube-system/cloud")
            };
            it.view.objects.powerful = vec![cloud];
        },
    ),
    (
        &[("accounts", Note)],
        "group admins: it may read the Secrets",
        |it| {
            let people = PrivilegedAccount {
                is_of_people: true,
                ..account("group admins")
            };
            it.view.objects.powerful = vec![people];
        },
    ),
    (
        &[("admission", Warning)],
        "cp-1: the API server runs without DenyServiceExternalIPs",
        |it| pod(it, "kube-apiserver", "cp-1").permits_external_ips = true,
    ),
];

const OF_FILES: &[Fault] = &[
    (
        &[("files", Error)],
        "secret.json: other users may read or change it (mode 0640",
        |it| {
            it.folder.files[0].mode = 0o640;
        },
    ),
    (
        &[("files", Error)],
        "other users may change it (mode 0664)",
        |it| {
            (it.folder.files[0].mode, it.folder.files[0].is_secret) = (0o664, false);
        },
    ),
    (&[("files", Warning)], "it belongs to the user 4242", |it| {
        it.folder.files[0].owner = 4242
    }),
    (&[("files", Error)], "state.json: not a state file", |it| {
        it.folder
            .unusable
            .push((PathBuf::from("state.json"), "not a state file".into()));
    }),
    (&[("files", Note)], "its file is not here", |it| {
        it.folder.has_master_secret = false
    }),
    (&[("state", Error)], "it makes the cluster 0909", |it| {
        it.folder.derived = Some([9; 32])
    }),
    (
        &[("state", Warning)],
        "it does not have the ID of the cluster",
        |it| {
            it.folder.cluster = None;
        },
    ),
    (&[("state", Warning)], "it does not exist", |it| {
        it.folder.cluster = None;
        it.folder.has_state = false;
    }),
    (
        &[("state", Error)],
        "its measurement salt is not that of",
        |it| {
            it.folder.salt = Some("b3RoZXI=".into());
        },
    ),
];

#[test]
fn each_fault_is_found_by_its_check() {
    let all = [
        OF_CONTROL_PLANE,
        OF_NODES,
        OF_CERTIFICATES,
        OF_SERVICES,
        OF_INSIDE,
        OF_FILES,
    ];
    let mut covered = BTreeSet::new();
    let mut wrong = String::new();
    for (expected, text, make) in all.into_iter().flatten() {
        let mut facts = healthy();
        make(&mut facts);
        let found = found(&facts);
        let (check, severity) = expected[0];
        let is_named = found
            .iter()
            .any(|(of, by, said)| *of == severity && *by == check && said.contains(text));
        let mut expected = expected.to_vec();
        let mut got: Vec<_> = found.iter().map(|(of, by, _)| (*by, *of)).collect();
        expected.sort_unstable();
        got.sort_unstable();
        if !is_named || got != expected {
            wrong += &format!("{text:?}: expected {expected:?}, got {found:#?}\n");
        }
        covered.insert(check);
    }
    assert!(wrong.is_empty(), "{wrong}");
    let known: BTreeSet<&str> = CHECKS.iter().map(|check| check.name).collect();
    assert_eq!(covered, known);
}

#[test]
fn without_the_api_server_only_that_the_kubeconfig_and_the_files_are_judged() {
    let mut advices = BTreeSet::new();
    for cause in [
        ListFailure::Kubeconfig,
        ListFailure::Credentials,
        ListFailure::Rights,
        ListFailure::Certificate,
        ListFailure::NoTls,
        ListFailure::NoConnection,
        ListFailure::Refused,
    ] {
        let facts = Gathered {
            unlisted: Some((cause, "why".into())),
            view: View {
                operator: Some(ends_in(29)),
                ..View::default()
            },
            ..healthy()
        };
        let found: Vec<_> = CHECKS.iter().flat_map(|check| check.run(&facts)).collect();
        let texts: Vec<_> = found
            .iter()
            .map(|it| format!("{}: {}", it.object, it.text))
            .collect();
        let expected = [
            "the API server of the kubeconfig: why",
            "the kubeconfig: the operator's certificate ends on 2026-08-30, in 29 days",
        ];
        assert_eq!(texts, expected, "{cause:?}");
        assert_exists(&found[0].advice);
        // each cause has its own
        assert!(advices.insert(found[0].advice.clone()), "{cause:?}");
    }
}

/// What apply adds to the operator's file is no difference.
#[test]
fn the_policy_is_compared_with_what_apply_would_put_in_force() {
    let mut facts = healthy();
    let policy: Value = serde_json::from_str(&policy_text()).unwrap();
    let mut file = policy.clone();
    file.as_object_mut().unwrap().remove("require");
    facts.policy = Policy::from_json(&file.to_string()).unwrap();
    let mut in_force = policy.clone();
    let keys = in_force["attestationKeys"].as_array_mut().unwrap();
    keys.push(KeyName::of(b"b").to_string().into());
    facts.view.objects.policy = Some(in_force.to_string());
    facts.known = vec![KeyName::of(b"b")];
    assert_eq!(found(&facts), []);
    // a key that nobody knows is one
    facts.known.clear();
    let found = found(&facts);
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(
        found[0].2.contains("differs from policy.json"),
        "{found:#?}"
    );
}

#[test]
fn what_is_on_its_way_is_no_finding() {
    let mut facts = healthy();
    let objects = &mut facts.view.objects;
    // a ticket of a moment ago, a request of a moment ago, an old refusal that was followed by a certificate
    let mut new = record(3);
    (new.name, new.node, new.disk) = ("join-node-new".into(), "new".into(), String::new());
    new.issued = Some(now() - Duration::from_secs(60));
    objects.records.push(new);
    objects.requests = vec![
        request(9, Fate::Refused("name".into())),
        request(2, Fate::Issued),
    ];
    let mut other = request(1, Fate::Pending);
    other.user = "system:node:cp-0".into();
    objects.requests.push(other);
    // tokens of tickets, and one that has ended
    let later = Expiration::At(in_days(1));
    for (groups, expires, authenticates) in [
        (services::TICKET_GROUP, later, true),
        (KUBEADM_GROUP, Expiration::At(days_ago(1)), true),
        (KUBEADM_GROUP, later, false),
    ] {
        objects.tokens.push(token(groups, expires, authenticates));
    }
    // certificates are valid for one day here, and the kubelet renews one when 70 % of this time is over
    let hour = |hours: u64| Duration::from_secs(hours * 3600);
    let validity = Validity {
        from: now() - hour(16),
        until: now() + hour(8),
    };
    let Some(Ok(kubelet)) = &mut facts.view.nodes[3].servers.kubelet else {
        panic!();
    };
    kubelet.validity = Some(validity);
    // a heartbeat of the pause between two
    facts.view.nodes[3].servers.kubelet = None;
    let beat = now() - Duration::from_secs(40);
    facts
        .view
        .objects
        .heartbeats
        .push(("worker-a".into(), beat));
    assert_eq!(found(&facts), []);
}

#[test]
fn a_list_that_could_not_be_read_is_a_note_and_nothing_else() {
    use ObjectList::*;
    for list in [
        Maps,
        Requests,
        Joining,
        DaemonSets,
        Deployments,
        Pods,
        ControlPlane,
        Leases,
        Tokens,
        MasterSecrets,
        Bindings,
        Roles,
        Services,
        Policies,
    ] {
        let mut facts = healthy();
        let objects = &mut facts.view.objects;
        match list {
            Maps => {
                objects.records.clear();
                (objects.policy, objects.salt) = (None, None);
                objects.cluster_configuration = Value::Null;
            }
            DaemonSets => objects.services.clear(),
            ControlPlane => objects.control_plane.clear(),
            MasterSecrets => objects.master_secrets.clear(),
            Policies => objects.policies.clear(),
            Requests | Joining | Deployments | Pods | Leases | Tokens | Bindings | Roles
            | Services => {}
        }
        objects.unread.push((list, "forbidden".into()));
        let found = found(&facts);
        let expected = (
            Severity::Note,
            "unread",
            "not checked: forbidden".to_owned(),
        );
        assert_eq!(found, [expected], "{list:?}");
    }
}

#[test]
fn without_the_id_of_the_cluster_no_node_is_told_to_be_removed() {
    let mut facts = healthy();
    facts.folder.cluster = None;
    for node in &mut facts.view.nodes {
        node.report.cluster = None;
        if let ServerAnswer::Verified { standing, .. } = &mut node.report.answers[0].1 {
            *standing = ClusterMembership::Other;
        }
    }
    let found = found(&facts);
    let checks: Vec<&str> = found.iter().map(|(_, check, _)| *check).collect();
    assert_eq!(checks, ["state"], "{found:#?}");
}

#[test]
fn a_server_that_is_not_of_the_cluster_is_not_believed() {
    let mut facts = healthy();
    let Some(Ok(api_server)) = &mut facts.view.nodes[1].servers.api_server else {
        panic!();
    };
    api_server.distrust = Some("another authority".into());
    (api_server.ahead, api_server.answer) = (Some(9999), Some((500, "[-]etcd failed".into())));
    facts.view.nodes[1].servers.kubelet = None;
    let found = found(&facts);
    let checks: Vec<&str> = found.iter().map(|(_, check, _)| *check).collect();
    assert_eq!(checks, ["certificates"], "{found:#?}");
}
