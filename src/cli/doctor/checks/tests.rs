//! Each check finds its faults in an otherwise healthy cluster, and finds nothing in a healthy one.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use base::crypto::Secret;
use booted_base::time;
use kms::ClusterKms;
use kubernetes::machine_record::MachineRecord;
use kubernetes::services::master_secret::Keeping;
use kubernetes::services::{self, Settings};
use rpc::grpc::{Code, Status};
use serde_json::{Value, json};
use verifier::{KeyName, Policy, Variant};

use super::super::diagnosis::Severity;
use super::super::folder::{Folder, OwnFile};
use super::super::gathered::Gathered;
use super::CHECKS;
use crate::connect::{Endpoint, Standing};
use crate::status::answer::Answer;
use crate::status::listed::Listed;
use crate::status::objects::{
    ControlPlanePod, Fate, Joining, List, Objects, Request, Token, UNINITIALIZED,
};
use crate::status::report::Report;
use crate::status::served::{Served, ServedError, Validity};
use crate::status::view::{NodeServers, NodeView, View};

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

fn verified(name: &str) -> Answer {
    Answer::Verified {
        standing: Standing::Member,
        image: None,
        services: vec![],
        key: Some(KeyName::of(name.as_bytes())),
        waiting: None,
        record: Err(Status::new(Code::Unimplemented, "")),
    }
}

fn report(answer: Answer) -> Report {
    let endpoint = Endpoint::parse("10.0.0.1", 9000).unwrap();
    Report {
        address: "10.0.0.1".into(),
        answers: vec![(endpoint, answer)],
        cluster: Some([7; 32]),
        names_no_keys: false,
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
fn sets(image: &str) -> Vec<Value> {
    let settings = Settings {
        image: image.into(),
        variant: "qemu-vtpm".into(),
        policy: policy_text(),
        measurement_salt: vec![1; 32],
        kms: ClusterKms::new(Secret::new(vec![2; 32]), Secret::new(vec![3; 32])).unwrap(),
        keeping: Keeping::default(),
        node_port: None,
        migrate_until: None,
        old_clients_until: None,
        grants: None,
        metadata: None,
        require_strong: None,
    };
    let objects = services::manifests(&settings).unwrap().into_iter();
    let mut sets: Vec<Value> = objects.filter(|it| it["kind"] == "DaemonSet").collect();
    for set in &mut sets {
        set["status"] =
            json!({"desiredNumberScheduled": 3, "updatedNumberScheduled": 3, "numberAvailable": 3});
    }
    sets
}

fn healthy() -> Gathered {
    let pods = ["kube-apiserver", "etcd"]
        .into_iter()
        .flat_map(|component| {
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
            })
        });
    let policy = Policy::from_json(&policy_text()).unwrap();
    Gathered {
        now: now(),
        unreachable: None,
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
                master_secrets: vec![("constellation-mastersecret".into(), true)],
                ..Objects::default()
            },
        },
        policy,
        policy_file: "policy.json".into(),
        variant: Variant::named("qemu-vtpm").unwrap(),
        folder: Folder {
            files: vec![OwnFile {
                path: "secret.json".into(),
                mode: 0o600,
                owner: booted_sys::process::user(),
                is_secret: true,
            }],
            salt: Some("c2FsdA==".into()),
            cluster: Some([7; 32]),
            derived: Some([7; 32]),
            unusable: vec![],
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

/// A fault: the check that finds it, how urgent it is, a part of the text, and what makes it.
type Fault = (&'static str, Severity, &'static str, fn(&mut Gathered));

fn option(facts: &mut Gathered, service: usize, name: &str, value: &str) {
    let container =
        &mut facts.view.objects.services[service]["spec"]["template"]["spec"]["containers"][0];
    let words = container["command"].as_array_mut().unwrap();
    match words.iter().position(|word| word == name) {
        Some(at) => words[at + 1] = value.into(),
        None => words.extend([name.into(), value.into()]),
    }
}

/// Returns the place of a service in the list.
fn place(facts: &Gathered, name: &str) -> usize {
    let mut sets = facts.view.objects.services.iter();
    sets.position(|set| set["metadata"]["name"] == name)
        .unwrap()
}

fn set_option(facts: &mut Gathered, service: &str, name: &str, value: &str) {
    let at = place(facts, service);
    option(facts, at, name, value);
}

const OF_CONTROL_PLANE: &[Fault] = &[
    (
        "api-server",
        Severity::Error,
        "its API server does not answer, those of other",
        |it| {
            it.view.nodes[1].servers.api_server = unreachable("refused");
        },
    ),
    (
        "api-server",
        Severity::Error,
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
        "api-server",
        Severity::Error,
        "closes the connection",
        |it| {
            it.view.nodes[1].servers.api_server = served(300, None);
        },
    ),
    (
        "api-server",
        Severity::Note,
        "only through the kubeconfig",
        |it| {
            for node in &mut it.view.nodes[..3] {
                node.servers.api_server = unreachable("filtered");
            }
        },
    ),
    (
        "endpoint",
        Severity::Warning,
        "leads only to the control plane cp-1",
        |it| {
            it.view.server = "https://10.0.0.1:6443".into();
        },
    ),
    (
        "endpoint",
        Severity::Note,
        "the endpoint of the cluster is https://lb.example:6443",
        |it| {
            it.view.server = "https://tunnel.example:6443".into();
        },
    ),
    (
        "etcd",
        Severity::Error,
        "cp-2: it is a control plane and has no pod of etcd",
        |it| {
            it.view
                .objects
                .control_plane
                .retain(|pod| pod.component != "etcd" || pod.node != "cp-2");
        },
    ),
    (
        "etcd",
        Severity::Error,
        "2 of 3 members are ready: the next failure stops",
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
        "etcd",
        Severity::Warning,
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
    ("etcd", Severity::Note, "it has one member", |it| {
        it.view
            .objects
            .control_plane
            .retain(|pod| pod.node == "cp-0");
        it.view.nodes.drain(1..3);
        it.view.objects.records.drain(1..3);
    }),
    (
        "versions",
        Severity::Error,
        "v1.33.1 and v1.35.0, more than one minor version apart",
        |it| {
            it.view.objects.control_plane[0].version = "v1.33.1".into();
            it.view.objects.control_plane[1].version = "v1.35.0".into();
        },
    ),
    (
        "versions",
        Severity::Warning,
        "API servers: they have v1.34.4 and v1.34.5",
        |it| {
            it.view.objects.control_plane[0].version = "v1.34.5".into();
        },
    ),
    (
        "versions",
        Severity::Warning,
        "it has v1.34.3, and the API server is v1.34.4",
        |it| {
            it.view.objects.cluster_configuration["kubernetesVersion"] = "v1.34.3".into();
        },
    ),
    (
        "versions",
        Severity::Error,
        "worker-a: its kubelet is v1.35.0, and the oldest API server v1.34.4",
        |it| {
            it.view.nodes[3].listed.version = "v1.35.0".into();
        },
    ),
    (
        "versions",
        Severity::Error,
        "its kubelet is v1.30.0, more than 3 minor",
        |it| {
            it.view.nodes[3].listed.version = "v1.30.0".into();
        },
    ),
    (
        "versions",
        Severity::Warning,
        "its kubelet is v1.34.3, and the oldest",
        |it| {
            it.view.nodes[3].listed.version = "v1.34.3".into();
        },
    ),
    (
        "end-of-life",
        Severity::Warning,
        "v1.34 gets no more security updates since 2026-10-27",
        |it| {
            it.now = time::parse("2026-10-28T00:00:00Z").unwrap();
        },
    ),
    (
        "end-of-life",
        Severity::Warning,
        "v1.34 gets its last security updates until 2026-10-27, in 57 days",
        |it| {
            it.now = time::parse("2026-08-31T00:00:00Z").unwrap();
        },
    ),
    (
        "end-of-life",
        Severity::Note,
        "its version v1.99.0 is none that",
        |it| {
            it.view.version = Some("v1.99.0".into());
        },
    ),
    ("unread", Severity::Note, "list secrets: forbidden", |it| {
        it.view
            .objects
            .unread
            .push((List::Tokens, "list secrets: forbidden".into()));
    }),
];

const OF_NODES: &[Fault] = &[
    (
        "attestation",
        Severity::Error,
        "worker-a: unreachable: 10.0.0.1:9000 (InitServer): no answer: no route",
        |it| {
            it.view.nodes[3].report = report(Answer::Nobody("no route".into()));
        },
    ),
    (
        "attestation",
        Severity::Error,
        "worker-a: it does not meet the policy: PCR 4: expected 1, got 2",
        |it| {
            it.view.nodes[3].report = report(Answer::Refused("PCR 4: expected 1, got 2".into()));
        },
    ),
    (
        "attestation",
        Severity::Warning,
        "worker-a: only its join service answers",
        |it| {
            it.view.nodes[3].report = report(Answer::Guarded);
        },
    ),
    (
        "attestation",
        Severity::Error,
        "worker-a: other-cluster",
        |it| {
            let mut answer = verified("worker-a");
            if let Answer::Verified { standing, .. } = &mut answer {
                *standing = Standing::Other;
            }
            it.view.nodes[3].report = report(answer);
        },
    ),
    (
        "attestation",
        Severity::Error,
        "cp-0, worker-a: one machine answers for these nodes",
        |it| {
            it.view.nodes[3].report = report(verified("cp-0"));
        },
    ),
    (
        "attestation",
        Severity::Error,
        "all nodes: none meets the policy in your file",
        |it| {
            for node in &mut it.view.nodes {
                node.report = report(Answer::Refused("PCR 4".into()));
            }
        },
    ),
    (
        "attestation",
        Severity::Warning,
        "all nodes: none answers this machine",
        |it| {
            for node in &mut it.view.nodes {
                node.report = report(Answer::Nobody("filtered".into()));
            }
        },
    ),
    (
        "ready",
        Severity::Error,
        "Kubernetes takes it for not ready: silent",
        |it| {
            it.view.nodes[3].listed.is_ready = false;
            it.view.nodes[3].listed.why_not = "silent".into();
        },
    ),
    ("ready", Severity::Warning, "reports DiskPressure", |it| {
        it.view.nodes[3].listed.troubles = vec!["DiskPressure"];
    }),
    ("ready", Severity::Note, "it is cordoned", |it| {
        it.view.nodes[3].listed.is_cordoned = true;
    }),
    (
        "network-plugin",
        Severity::Error,
        "worker-a: no network plugin is installed",
        |it| {
            it.view.nodes[3].listed.is_ready = false;
            it.view.nodes[3].listed.no_network = Some("no network plugin is installed".into());
        },
    ),
    (
        "cloud-controller",
        Severity::Error,
        "it waits for a cloud controller manager",
        |it| {
            it.view.nodes[3].listed.taints = vec![UNINITIALIZED.into()];
        },
    ),
    (
        "records",
        Severity::Warning,
        "worker-a: no record says which machine it is",
        |it| {
            it.view.objects.records.truncate(3);
        },
    ),
    (
        "records",
        Severity::Warning,
        "join-node-gone: a machine was admitted under this name",
        |it| {
            let mut old = record(3);
            (old.name, old.node, old.disk) =
                ("join-node-gone".into(), "gone".into(), String::new());
            it.view.objects.records.push(old);
        },
    ),
    (
        "records",
        Severity::Warning,
        "cp-0, worker-a: these nodes have one state disk",
        |it| {
            it.view.objects.records[3].disk = it.view.objects.records[0].disk.clone();
        },
    ),
    (
        "records",
        Severity::Warning,
        "it joined as a control plane, and its Node says that it is a worker",
        |it| {
            it.view.objects.records[3].control_plane = true;
        },
    ),
    ("records", Severity::Note, "JoiningNode late", |it| {
        let deadline = Some(days_ago(1));
        it.view.objects.joining.push(Joining {
            node: "late".into(),
            deadline,
        });
    }),
    (
        "addresses",
        Severity::Warning,
        "it has the address 10.9.9.9, and joined with 10.0.0.3",
        |it| {
            it.view.nodes[3].listed.internal.push("10.9.9.9".into());
        },
    ),
    (
        "clocks",
        Severity::Error,
        "worker-a: its clock is 1 min 30 s ahead of most other nodes",
        |it| {
            let Some(Ok(kubelet)) = &mut it.view.nodes[3].servers.kubelet else {
                panic!();
            };
            kubelet.ahead = Some(90);
        },
    ),
    (
        "clocks",
        Severity::Error,
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
        "clocks",
        Severity::Warning,
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
        "certificates",
        Severity::Warning,
        "cp-1: the certificate of its API server ends on 2026-08-21, in 20 days",
        |it| {
            it.view.nodes[1].servers.api_server = served(20, Some((200, "ok")));
        },
    ),
    (
        "certificates",
        Severity::Error,
        "worker-a: the certificate of its kubelet ends on 2026-08-06, in 5 days",
        |it| {
            it.view.nodes[3].servers.kubelet = served(5, Some((401, "")));
        },
    ),
    (
        "certificates",
        Severity::Error,
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
        "certificates",
        Severity::Error,
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
        "certificates",
        Severity::Warning,
        "the kubeconfig: the operator's certificate ends",
        |it| {
            it.view.operator = Some(ends_in(29));
        },
    ),
    (
        "certificates",
        Severity::Error,
        "does not vouch for its kubelet at this address: other name",
        |it| {
            let Some(Ok(kubelet)) = &mut it.view.nodes[3].servers.kubelet else {
                panic!();
            };
            kubelet.distrust = Some("other name".into());
        },
    ),
    (
        "certificates",
        Severity::Note,
        "kubelets: none answers this machine",
        |it| {
            for node in &mut it.view.nodes {
                node.servers.kubelet = unreachable("filtered");
            }
        },
    ),
    (
        "authorities",
        Severity::Warning,
        "the authority of the cluster ends on 2027-06-07, in 310 days",
        |it| {
            it.view.authorities[0].1 = Validity {
                from: days_ago(3650),
                until: in_days(310),
            };
        },
    ),
    (
        "authorities",
        Severity::Error,
        "ends on 2026-10-20, in 80 days",
        |it| {
            it.view.authorities[0].1 = Validity {
                from: days_ago(3650),
                until: in_days(80),
            };
        },
    ),
    (
        "certificate-requests",
        Severity::Error,
        "nobody has approved it for 60 minutes",
        |it| {
            it.view.objects.requests.push(request(60, Fate::Pending));
        },
    ),
    (
        "certificate-requests",
        Severity::Error,
        "nobody has signed it for 6 minutes",
        |it| {
            it.view.objects.requests.push(request(6, Fate::Unsigned));
        },
    ),
    (
        "certificate-requests",
        Severity::Error,
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

fn request(minutes: u64, fate: Fate) -> Request {
    Request {
        name: "csr-1".into(),
        user: "system:node:worker-a".into(),
        is_serving: true,
        made: Some(now() - Duration::from_secs(minutes * 60)),
        fate,
    }
}

const OF_SERVICES: &[Fault] = &[
    (
        "services",
        Severity::Error,
        "join-service: it does not exist",
        |it| {
            let at = place(it, "join-service");
            it.view.objects.services.remove(at);
        },
    ),
    (
        "services",
        Severity::Error,
        "key-service: 2 of 3 ready; pod a on cp-1: ImagePullBackOff",
        |it| {
            let at = place(it, "key-service");
            it.view.objects.services[at]["status"]["numberAvailable"] = 2.into();
            it.view.objects.pods.push(json!({
            "metadata": {"name": "a", "labels": {"k8s-app": "key-service"}}, "spec": {"nodeName": "cp-1"},
            "status": {"containerStatuses": [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}]},
        }));
        },
    ),
    (
        "services",
        Severity::Warning,
        "it may run on 2 of 3 control planes",
        |it| {
            let at = place(it, "key-service");
            it.view.objects.services[at]["status"]["desiredNumberScheduled"] = 2.into();
        },
    ),
    (
        "services",
        Severity::Warning,
        "the join service has the image example.com/a:1, the key service b",
        |it| {
            let at = place(it, "key-service");
            it.view.objects.services[at]["spec"]["template"]["spec"]["containers"][0]["image"] =
                "b".into();
        },
    ),
    (
        "policy",
        Severity::Error,
        "it has no attestation policy",
        |it| it.view.objects.policy = None,
    ),
    (
        "policy",
        Severity::Error,
        "cannot be used, so the services keep the one before",
        |it| {
            it.view.objects.policy = Some("{".into());
        },
    ),
    (
        "policy",
        Severity::Warning,
        "it differs from policy.json: ",
        |it| {
            it.view.objects.policy = Some(policy_text().replacen("1111", "2222", 1));
        },
    ),
    ("policy", Severity::Warning, "any TPM is accepted", |it| {
        let mut policy: Value = serde_json::from_str(&policy_text()).unwrap();
        policy.as_object_mut().unwrap().remove("attestationKeys");
        it.policy = Policy::from_json(&policy.to_string()).unwrap();
        it.view.objects.policy = Some(policy.to_string());
    }),
    (
        "policy",
        Severity::Error,
        "neither PCR 4 nor PCR 11 is enforced",
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
        "policy",
        Severity::Note,
        "it accepts 2 images: 1 node runs image 1.3, 3 nodes run the first image",
        |it| {
            let mut policy: Value = serde_json::from_str(&policy_text()).unwrap();
            let measurements = policy["measurements"].clone();
            policy["alsoAccepted"] = json!([{"name": "image 1.3", "measurements": measurements}]);
            it.policy = Policy::from_json(&policy.to_string()).unwrap();
            it.view.objects.policy = Some(policy.to_string());
            for (node, runs) in it.view.nodes.iter_mut().zip([0, 0, 1, 0]) {
                let name = ["the first image", "image 1.3"][runs];
                if let Answer::Verified { image, .. } = &mut node.report.answers[0].1 {
                    *image = Some(name.into());
                }
            }
        },
    ),
    (
        "old-clients",
        Severity::Warning,
        "clients without a token get keys of volumes through 2026-09-01",
        |it| {
            set_option(it, "key-service", "--old-clients-until", "2026-09-01");
        },
    ),
    (
        "old-clients",
        Severity::Note,
        "got keys of volumes through 2026-07-01",
        |it| {
            set_option(it, "key-service", "--old-clients-until", "2026-07-01");
        },
    ),
    (
        "migration",
        Severity::Warning,
        "disks without a record are opened through 2026-09-01",
        |it| {
            set_option(it, "join-service", "--migrate-until", "2026-09-01");
        },
    ),
    (
        "migration",
        Severity::Note,
        "were opened through 2026-07-01",
        |it| {
            set_option(it, "join-service", "--migrate-until", "2026-07-01");
        },
    ),
    (
        "plaintext",
        Severity::Error,
        "it gives every key to every caller",
        |it| {
            set_option(it, "key-service", "--clients", "any");
        },
    ),
    (
        "plaintext",
        Severity::Error,
        "it gives every key to every caller",
        |it| {
            let at = place(it, "key-service");
            let container =
                &mut it.view.objects.services[at]["spec"]["template"]["spec"]["containers"][0];
            (container["command"], container["args"]) = (Value::Null, json!(["--port=9000"]));
        },
    ),
    (
        "plaintext",
        Severity::Error,
        "it takes keys in plaintext from any server",
        |it| {
            set_option(it, "join-service", "--key-service-auth", "none");
        },
    ),
    (
        "old-form",
        Severity::Note,
        "it admits nodes by the old form",
        |it| {
            let mut policy: Value = serde_json::from_str(&policy_text()).unwrap();
            policy.as_object_mut().unwrap().remove("require");
            it.policy = Policy::from_json(&policy.to_string()).unwrap();
            it.view.objects.policy = Some(policy.to_string());
        },
    ),
    (
        "old-form",
        Severity::Warning,
        "it does not prove its machine to nodes",
        |it| {
            set_option(it, "join-service", "--evidence", "");
        },
    ),
    (
        "collateral",
        Severity::Note,
        "vcek-milan.crl was fetched on 2026-06-22, 40 days ago",
        |it| {
            it.view.objects.collateral = vec![
                ("vcek-milan-00.der".into(), days_ago(400)),
                ("vcek-milan.crl".into(), days_ago(40)),
            ];
        },
    ),
    (
        "master-secret",
        Severity::Error,
        "the key service uses it, and it does not exist",
        |it| {
            it.view.objects.master_secrets.clear();
        },
    ),
    (
        "master-secret",
        Severity::Warning,
        "it is not immutable",
        |it| {
            it.view.objects.master_secrets[0].1 = false;
        },
    ),
    (
        "master-secret",
        Severity::Warning,
        "firstlight-mastersecret-00: it has the master secret too",
        |it| {
            it.view
                .objects
                .master_secrets
                .push(("firstlight-mastersecret-00".into(), true));
        },
    ),
    (
        "bootstrap-tokens",
        Severity::Warning,
        "a machine joins without attestation, for ever",
        |it| {
            let groups = "system:bootstrappers:kubeadm:default-node-token".into();
            it.view.objects.tokens.push(Token {
                id: "abcdef".into(),
                groups,
                expires: None,
                authenticates: true,
            });
        },
    ),
];

const OF_FILES: &[Fault] = &[
    (
        "files",
        Severity::Error,
        "secret.json: other users may read or change it (mode 0640",
        |it| {
            it.folder.files[0].mode = 0o640;
        },
    ),
    (
        "files",
        Severity::Error,
        "other users may change it (mode 0664)",
        |it| {
            (it.folder.files[0].mode, it.folder.files[0].is_secret) = (0o664, false);
        },
    ),
    (
        "files",
        Severity::Warning,
        "it belongs to the user 4242",
        |it| it.folder.files[0].owner = 4242,
    ),
    (
        "files",
        Severity::Error,
        "state.json: not a state file",
        |it| {
            it.folder
                .unusable
                .push((PathBuf::from("state.json"), "not a state file".into()));
        },
    ),
    ("files", Severity::Note, "its file is not here", |it| {
        it.folder.has_master_secret = false
    }),
    (
        "state",
        Severity::Error,
        "it makes the cluster 0909",
        |it| it.folder.derived = Some([9; 32]),
    ),
    (
        "state",
        Severity::Warning,
        "it does not have the ID of the cluster",
        |it| it.folder.cluster = None,
    ),
    (
        "state",
        Severity::Error,
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
        OF_FILES,
    ];
    let mut covered = BTreeSet::new();
    for (check, severity, text, make) in all.into_iter().flatten() {
        let mut facts = healthy();
        make(&mut facts);
        let found = found(&facts);
        let is_it = |(of, by, said): &&(Severity, &str, String)| {
            of == severity && by == check && said.contains(text)
        };
        assert!(
            found.iter().any(|it| is_it(&it)),
            "{check}: {text:?} is not in {found:#?}"
        );
        covered.insert(*check);
    }
    let known: BTreeSet<&str> = CHECKS.iter().map(|check| check.name).collect();
    assert_eq!(covered, known);
}

#[test]
fn without_the_api_server_only_that_and_the_files_are_judged() {
    let facts = Gathered {
        unreachable: Some("no route".into()),
        view: View::default(),
        ..healthy()
    };
    let found: Vec<String> = CHECKS
        .iter()
        .flat_map(|check| check.run(&facts))
        .map(|it| format!("{}: {}", it.object, it.text))
        .collect();
    assert_eq!(found, ["the API server of the kubeconfig: no route"]);
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
    let group = "system:bootstrappers:kubeadm:default-node-token";
    for (groups, expires) in [
        (services::TICKET_GROUP, Some(in_days(1))),
        (group, Some(days_ago(1))),
    ] {
        let groups = groups.to_owned();
        objects.tokens.push(Token {
            id: "abcdef".into(),
            groups,
            expires,
            authenticates: true,
        });
    }
    // certificates of a day that are renewed after 70 % of it
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
    use List::*;
    for list in [
        Maps,
        Requests,
        Joining,
        Services,
        Pods,
        ControlPlane,
        Leases,
        Tokens,
        MasterSecrets,
    ] {
        let mut facts = healthy();
        let objects = &mut facts.view.objects;
        match list {
            Maps => {
                objects.records.clear();
                (objects.policy, objects.salt) = (None, None);
                objects.cluster_configuration = Value::Null;
            }
            Services => objects.services.clear(),
            ControlPlane => objects.control_plane.clear(),
            MasterSecrets => objects.master_secrets.clear(),
            Requests | Joining | Pods | Leases | Tokens => {}
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
        if let Answer::Verified { standing, .. } = &mut node.report.answers[0].1 {
            *standing = Standing::Other;
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
