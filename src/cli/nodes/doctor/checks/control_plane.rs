//! The API servers, etcd and the versions of Kubernetes.

use std::collections::BTreeSet;

use kubernetes::kubeadm;
use kubernetes::parameters::KubernetesVersion;
use kubernetes::readiness;

use super::super::diagnosis::Diagnosis;
use super::super::gathered::Gathered;
use crate::cluster::{
    status::objects::ObjectList,
    status::served::{Served, ServedError},
    status::view::{ListFailure, NodeView},
};
use crate::nodes::upgrade::{ETCD_ADVICE, ETCD_STEP, is_before_etcd_3_6};

/// How many minor versions a kubelet may be older than an API server (Kubernetes, "Version Skew
/// Policy").
const KUBELET_SKEW: u32 = 3;
/// How many days before its end a version of Kubernetes is reported.
const NOTICE: u64 = 60;
/// The components of a control plane besides etcd and the API server.
const CONTROLLERS: [&str; 2] = ["kube-controller-manager", "kube-scheduler"];
/// The port of an endpoint without one.
const API_SERVER_PORT: u16 = 6443;

/// The API server answers through the kubeconfig, and on each control plane.
pub fn api_server(facts: &Gathered) -> Vec<Diagnosis> {
    if let Some((cause, why)) = &facts.unlisted {
        return vec![unlisted(*cause, why, facts)];
    }
    let control_planes = || {
        facts
            .view
            .nodes
            .iter()
            .filter(|it| it.listed.is_control_plane)
    };
    let asked: Vec<(&NodeView, &Result<Served, ServedError>)> = control_planes()
        .filter_map(|node| Some((node, node.servers.api_server.as_ref()?)))
        .collect();
    if !asked.is_empty() && asked.iter().all(|(_, served)| served.is_err()) {
        return vec![Diagnosis::note(
            "control planes",
            "no API server answers this machine at its own address, only through the kubeconfig",
            "nothing, if a firewall permits only the load balancer: run the command where the addresses of the nodes can be reached to \
             check each control plane",
        )];
    }
    asked
        .into_iter()
        .filter_map(|(node, served)| of_api_server(&node.listed.name, served))
        .collect()
}

/// Returns what to do if the API server does not list the nodes.
fn unlisted(cause: ListFailure, why: &str, facts: &Gathered) -> Diagnosis {
    let file = facts.policy_file.display();
    let advice = match cause {
        ListFailure::Kubeconfig => {
            "give the right file by --kubeconfig, or copy /etc/kubernetes/admin.conf of a control plane \
             (docs/day-two/secrets.md#other-files-are-lost)"
                .into()
        }
        ListFailure::Credentials => {
            "the credentials in the kubeconfig have ended, or are of another cluster: copy /etc/kubernetes/admin.conf of a control plane \
             (docs/day-two/certificates.md)"
                .into()
        }
        ListFailure::Rights => {
            "the credentials are good, and their user may not do this: use the administrator's kubeconfig".into()
        }
        ListFailure::Certificate => format!(
            "do not use this server before you know why: the kubeconfig is of another cluster, the certificate has ended or does not \
             name this address, or another machine answers; ask a control plane what it is: firstlight status HOST --policy {file}"
        ),
        ListFailure::NoTls => {
            "another program answers there: correct the address in the kubeconfig, or where the load balancer leads to".into()
        }
        ListFailure::NoConnection => format!(
            "check the address in the kubeconfig, the load balancer and the firewall, then ask a control plane: firstlight status HOST \
             --policy {file}"
        ),
        ListFailure::Refused => {
            "run the command again; if the error stays, look at the log of the API server on a control plane (docs/boot.md)".into()
        }
    };
    Diagnosis::error("the API server of the kubeconfig", why, advice)
}

fn of_api_server(node: &str, served: &Result<Served, ServedError>) -> Option<Diagnosis> {
    let advice = format!(
        "look at its log: kubectl -n kube-system logs kube-apiserver-{node}, or the console of the node (docs/boot.md)"
    );
    match served {
        // another machine answers there: the check of the certificates says so
        Ok(served) if served.distrust.is_some() => None,
        Err(why) => Some(Diagnosis::error(
            node,
            format!("its API server does not answer, those of other control planes do: {why}"),
            advice,
        )),
        Ok(served) => match &served.answer {
            // an API server may know no anonymous callers
            Some((200 | 401 | 403, _)) => None,
            None => Some(Diagnosis::error(
                node,
                "its API server gives no answer",
                advice,
            )),
            Some((status, text)) => {
                let failed = text.lines().filter_map(|line| line.strip_prefix("[-]"));
                let failed: Vec<&str> = failed
                    .filter_map(|line| line.split_whitespace().next())
                    .collect();
                let text = if failed.is_empty() {
                    format!("its API server is not ready (status {status})")
                } else {
                    format!("its API server is not ready: {} failed", failed.join(", "))
                };
                Some(Diagnosis::error(node, text, advice))
            }
        },
    }
}

/// The kubeconfig leads to the endpoint of the cluster.
pub fn endpoint(facts: &Gathered) -> Vec<Diagnosis> {
    let server = &facts.view.server;
    let configuration = &facts.view.objects.cluster_configuration;
    let Some(endpoint) = configuration["controlPlaneEndpoint"].as_str() else {
        return vec![];
    };
    let has_port = endpoint
        .rsplit_once(':')
        .is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    let expected = if has_port && !endpoint.ends_with(']') {
        format!("https://{endpoint}")
    } else {
        format!("https://{endpoint}:{API_SERVER_PORT}")
    };
    if *server == expected {
        return vec![];
    }
    let host = http::name(server);
    let is_one = |node: &&NodeView| {
        node.listed.is_control_plane && node.listed.internal.iter().any(|it| it == host)
    };
    let count = facts
        .view
        .nodes
        .iter()
        .filter(|it| it.listed.is_control_plane);
    let text = format!("its server is {server}, and the endpoint of the cluster is {expected}");
    match facts.view.nodes.iter().find(is_one) {
        Some(node) if count.count() > 1 => vec![Diagnosis::warning(
            "the kubeconfig",
            format!(
                "{text}: it leads only to the control plane {}",
                node.listed.name
            ),
            format!(
                "set the server in the kubeconfig to {expected}, which survives the loss of a control plane"
            ),
        )],
        _ => vec![Diagnosis::note(
            "the kubeconfig",
            text,
            "nothing, if it is another way to the same load balancer; otherwise set the server in the kubeconfig",
        )],
    }
}

/// The controller manager and the scheduler of each control plane run.
pub fn control_plane(facts: &Gathered) -> Vec<Diagnosis> {
    let pods = &facts.view.objects.control_plane;
    let mut found = vec![];
    for component in CONTROLLERS {
        let all: Vec<_> = pods
            .iter()
            .filter(|pod| pod.component == component)
            .collect();
        // without kubeadm, this program may run in no pod at all
        if all.is_empty() {
            continue;
        }
        for node in facts.view.nodes.iter().map(|node| &node.listed) {
            let pod = all.iter().find(|pod| pod.node == node.name);
            let text = match pod {
                Some(pod) if pod.is_ready => continue,
                Some(_) => format!("its {component} is not ready"),
                None if node.is_control_plane => {
                    format!("it is a control plane and has no {component}")
                }
                None => continue,
            };
            let name = &node.name;
            let advice = format!(
                "look at its log: kubectl -n kube-system logs {component}-{name}, then at /etc/kubernetes/manifests on the node"
            );
            found.push(Diagnosis::error(name, text, advice));
        }
    }
    found
}

/// The other workloads of Kubernetes' own namespace run: the cluster's DNS, kube-proxy, the network plugin.
pub fn system_pods(facts: &Gathered) -> Vec<Diagnosis> {
    let workloads = facts.view.objects.workloads.iter();
    workloads
        .filter_map(|workload| {
            let missing = readiness::missing_of(workload)?;
            let (kind, name) = (&workload.kind, &workload.metadata.name);
            let object = format!("{kind} kube-system/{name}");
            let advice = format!(
                "kubectl -n kube-system describe {} {name} shows why; if you have just changed it, wait",
                kind.to_lowercase()
            );
            let diagnosis = if missing.contains(": 0 of ") {
                Diagnosis::error
            } else {
                Diagnosis::warning
            };
            Some(diagnosis(object, missing, advice))
        })
        .collect()
}

/// etcd keeps its majority if one more member fails.
pub fn etcd(facts: &Gathered) -> Vec<Diagnosis> {
    let nodes = facts.view.nodes.iter();
    let nodes: Vec<&NodeView> = nodes.filter(|node| node.listed.is_control_plane).collect();
    let pods = &facts.view.objects.control_plane;
    let members: Vec<_> = pods.iter().filter(|pod| pod.component == "etcd").collect();
    let ready = members.iter().filter(|pod| pod.is_ready).count();
    let needed = members.len() / 2 + 1;
    let mut found = vec![];
    for node in &nodes {
        let name = &node.listed.name;
        if !members.is_empty() && !members.iter().any(|pod| pod.node == *name) {
            found.push(Diagnosis::error(
                name,
                "it is a control plane and has no pod of etcd",
                "look at /etc/kubernetes/manifests/etcd.yaml and the log of its kubelet; an etcd outside of the cluster needs nothing",
            ));
        }
    }
    for pod in members.iter().filter(|pod| !pod.is_ready) {
        let count = members.len();
        let mut text = format!(
            "its member of etcd is not ready: {ready} of {count} are, and {needed} are needed"
        );
        if ready == needed {
            text += ", so the next failure stops the cluster";
        }
        let advice = format!(
            "bring it back before anything else: kubectl -n kube-system logs etcd-{}, then docs/day-two/etcd.md",
            pod.node
        );
        found.push(Diagnosis::error(&pod.node, text, advice));
    }
    let old: Vec<_> = (members.iter())
        .filter(|pod| is_before_etcd_3_6(&pod.version))
        .map(|pod| format!("{} ({})", pod.node, pod.version))
        .collect();
    if !old.is_empty() {
        found.push(Diagnosis::note(
            "etcd",
            format!(
                "etcd 3.6, which comes with Kubernetes v1.34, may follow only {ETCD_STEP} or later: {}",
                old.join(", ")
            ),
            ETCD_ADVICE,
        ));
    }
    match members.len() {
        1 => found.push(Diagnosis::note(
            "etcd",
            "it has one member: the cluster stops with this machine, and its data are lost with the disk",
            "let two more control planes join, and make snapshots (docs/day-two/etcd.md)",
        )),
        // otherwise a member is missing, which was said
        count if count % 2 == 0 && count == nodes.len() => found.push(Diagnosis::warning(
            "etcd",
            format!(
                "it has {count} members, which survive the loss of {}, as {} would",
                (count - 1) / 2,
                count - 1
            ),
            "let one more control plane join, or remove one: firstlight node remove NAME (docs/day-two/remove-node.md)",
        )),
        _ => {}
    }
    found
}

fn version(text: &str) -> Option<(u32, u32)> {
    // a fork's version has a suffix, such as -eks-1
    let text = text.trim_start_matches('v').split(['-', '+']).next()?;
    let mut parts = text.split('.');
    let (major, minor, patch) = (parts.next()?, parts.next()?, parts.next()?);
    (major == "1").then_some(())?;
    Some((minor.parse().ok()?, patch.parse().ok()?))
}

/// Kubelets and control planes have versions that work together.
pub fn versions(facts: &Gathered) -> Vec<Diagnosis> {
    let view = &facts.view;
    let pods = view.objects.control_plane.iter();
    let servers = pods.filter(|pod| pod.component == "kube-apiserver");
    let mut all: BTreeSet<(u32, u32)> = servers.filter_map(|pod| version(&pod.version)).collect();
    all.extend(view.version.as_deref().and_then(version));
    let (Some(oldest), Some(newest)) = (all.first().copied(), all.last().copied()) else {
        return vec![];
    };
    let name = |(minor, patch): (u32, u32)| format!("v1.{minor}.{patch}");
    let mut found = vec![];
    if newest.0 - oldest.0 > 1 {
        found.push(Diagnosis::error(
            "API servers",
            format!(
                "they have {} and {}, more than one minor version apart",
                name(oldest),
                name(newest)
            ),
            "upgrade the older control planes now (docs/day-two/upgrade.md)",
        ));
    } else if newest != oldest {
        found.push(Diagnosis::warning(
            "API servers",
            format!("they have {} and {}", name(oldest), name(newest)),
            "finish the upgrade: firstlight upgrade names the nodes that are left (docs/day-two/upgrade.md)",
        ));
    }
    let recorded = view.objects.version().and_then(version);
    // without the pods, only one API server's version is known
    let knows_all = view.objects.has(ObjectList::ControlPlane);
    if let Some(recorded) = recorded.filter(|it| knows_all && !all.contains(it)) {
        found.push(Diagnosis::warning(
            format!("ConfigMap kube-system/{}", kubeadm::CONFIG_MAP),
            format!("it has {}, and the API server is {}: new nodes join with the former", name(recorded), name(newest)),
            "run the upgrade of the first control plane again, which records its version (docs/day-two/upgrade.md)",
        ));
    }
    for node in view.nodes.iter().map(|node| &node.listed) {
        let Some(kubelet) = version(&node.version) else {
            continue;
        };
        let text = format!(
            "its kubelet is {}, and the oldest API server {}",
            node.version,
            name(oldest)
        );
        if kubelet.0 > oldest.0 {
            found.push(Diagnosis::error(
                &node.name,
                format!("{text}: a kubelet must not be newer"),
                "upgrade the control planes first (docs/day-two/upgrade.md)",
            ));
        } else if kubelet.0 + KUBELET_SKEW < newest.0 {
            found.push(Diagnosis::error(
                &node.name,
                format!(
                    "its kubelet is {}, more than {KUBELET_SKEW} minor versions older than {}",
                    node.version,
                    name(newest)
                ),
                "upgrade the node, or replace it (docs/day-two/upgrade.md)",
            ));
        } else if kubelet < oldest {
            found.push(Diagnosis::warning(
                &node.name,
                text,
                "finish the upgrade: bootstrapper upgrade on this node (docs/day-two/upgrade.md)",
            ));
        }
    }
    found
}

/// The version of Kubernetes gets security updates.
pub fn end_of_life(facts: &Gathered) -> Vec<Diagnosis> {
    let Some(text) = facts.view.version.as_deref() else {
        return vec![];
    };
    let advice = "upgrade one minor version after the other (docs/day-two/upgrade.md)";
    let Ok(version) = text.parse::<KubernetesVersion>() else {
        return vec![Diagnosis::note(
            "the API server",
            format!("this version of firstlight does not know its version {text}"),
            "take a newer firstlight, or upgrade Kubernetes to a version that it supports (docs/support.md)",
        )];
    };
    let Some(end) = version.last_day() else {
        return vec![];
    };
    let minor = version.minor;
    match end.duration_since(facts.now) {
        Err(_) => vec![Diagnosis::warning(
            "Kubernetes",
            format!(
                "v1.{minor} gets no more security updates since {}",
                facts.day(end)
            ),
            advice,
        )],
        Ok(left) if left.as_secs() < NOTICE * 86_400 => vec![Diagnosis::warning(
            "Kubernetes",
            format!(
                "v1.{minor} gets its last security updates until {}",
                facts.day(end)
            ),
            advice,
        )],
        Ok(_) => vec![],
    }
}

/// What could not be read was not checked.
pub fn unread(facts: &Gathered) -> Vec<Diagnosis> {
    let each = facts.view.objects.unread.iter();
    each.map(|(_, why)| {
        Diagnosis::note(
            "not checked",
            why,
            "use the administrator's kubeconfig, which may read it, and run the command again",
        )
    })
    .collect()
}
