//! The members of etcd, as etcd itself lists them, and which of them can be removed.
//!
//! etcd listens in the network of the control planes, which the operator's machine need not reach, and its clients need a
//! certificate of the control planes. So `etcdctl` runs in a pod on a control plane that stays: in the image of etcd's own
//! static pod, with its certificates, for some seconds. The API server is all that the command must reach.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use base::crypto::random;
use base::text::hex;
use kubernetes::NAMESPACE;
use kubernetes::client::{Client, Object, PODS, Selector};
use kubernetes::control_planes::{ControlPlane, ControlPlanes, StaticPod};
use kubernetes::objects::Pod;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::shell::{
    error::Error,
    progress::{Progress, printable},
};

/// The program whose static pods are etcd.
pub const ETCD: &str = "etcd";
/// The labels that kubeadm gives these pods. Each kubelet may give them to a pod of its own node, so they only find pods that are named in
/// a warning.
const LABELS: &str = "component=etcd,tier=control-plane";
/// How long one run of etcdctl may take, with the start of its pod.
const LIMIT: Duration = Duration::from_secs(120);
/// How long etcdctl waits for etcd.
const ETCDCTL_LIMIT: &str = "10s";
const PAUSE: Duration = Duration::from_millis(500);
/// Why a container does not start, as the kubelet names it.
const NOT_STARTED: [&str; 7] = [
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
];
/// The maximum number of characters of a log in an error.
const MAX_SHOWN: usize = 600;

/// A member of etcd.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Member {
    /// The identifier.
    pub id: u64,
    /// The name, which kubeadm makes that of the node. A member that never started has none.
    pub name: String,
    /// The hosts at which other members reach it.
    pub hosts: Vec<String>,
    /// Whether it has no vote yet.
    pub is_learner: bool,
    /// Why it does not answer; `None` if it does.
    pub fault: Option<String>,
}

impl Member {
    /// Returns the identifier as etcdctl takes it.
    pub fn id(&self) -> String {
        format!("{:x}", self.id)
    }

    /// Returns whether this is the member of a node at these addresses. Before its first start a member has only its address, and clouds
    /// give the address of a deleted machine to another one at once: then it may be that of another node.
    pub fn is_of(&self, node: &str, addresses: &[IpAddr]) -> bool {
        if !self.name.is_empty() {
            self.name == node
        } else {
            self.is_at(addresses)
        }
    }

    /// Returns whether other members reach it at one of these addresses.
    pub fn is_at(&self, addresses: &[IpAddr]) -> bool {
        let own = self.hosts.iter().filter_map(|host| host.parse().ok());
        own.into_iter().any(|own| addresses.contains(&own))
    }
}

/// How many members with a vote etcd has, how many of them answer, and how many must.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quorum {
    /// The members with a vote.
    pub voters: usize,
    /// Those of them that answer.
    pub healthy: usize,
    /// How many of them are a majority.
    pub needed: usize,
}

impl Quorum {
    /// Counts the members.
    pub fn of<'a>(members: impl IntoIterator<Item = &'a Member>) -> Quorum {
        let voters: Vec<_> = members.into_iter().filter(|it| !it.is_learner).collect();
        Quorum {
            voters: voters.len(),
            healthy: voters.iter().filter(|it| it.fault.is_none()).count(),
            needed: voters.len() / 2 + 1,
        }
    }

    fn is_kept(self) -> bool {
        self.voters > 0 && self.healthy >= self.needed
    }
}

/// Returns the members of these identifiers in the order in which they are removed, those that do not answer first. Refuses
/// if etcd has no majority at the beginning, or would have none after one of the steps.
pub fn removal(members: &[Member], gone: &[u64]) -> Result<Vec<Member>, Error> {
    let is_gone = |it: &&Member| gone.contains(&it.id);
    let silent = members.iter().filter(|it| it.fault.is_some());
    let others = members.iter().filter(|it| it.fault.is_none());
    let order: Vec<_> = silent.chain(others).filter(is_gone).cloned().collect();
    let mut left = members.to_vec();
    if order.is_empty() {
        return Ok(order);
    }
    let now = Quorum::of(members);
    if !now.is_kept() {
        return Err(Error::Refused(format!(
            "etcd has no majority: {} of its {} members with a vote answer, and {} are needed{}. Without a majority no member \
             can be removed: start the machines of the others again; if they are lost, see docs/day-two/etcd.md",
            now.healthy,
            now.voters,
            now.needed,
            faults(members)
        )));
    }
    if left
        .iter()
        .filter(|it| !is_gone(it))
        .all(|it| it.is_learner)
    {
        return Err(Error::Refused(
            "no member of etcd with a vote would be left, and with the last one the data of the cluster is lost: a cluster \
             needs a control plane"
                .into(),
        ));
    }
    for one in &order {
        left.retain(|it| it.id != one.id);
        let after = Quorum::of(&left);
        if !after.is_kept() {
            return Err(Error::Refused(format!(
                "etcd would lose its majority: without {}, {} of its {} members with a vote answer, and {} are needed{}. \
                 Start the machines again that do not answer, or, if one is lost, remove its node first",
                shown(one),
                after.healthy,
                after.voters,
                after.needed,
                faults(&left)
            )));
        }
    }
    Ok(order)
}

/// Returns the member's name for people.
pub fn shown(member: &Member) -> String {
    if !member.name.is_empty() {
        printable(&member.name)
    } else {
        format!("{} ({})", member.id(), printable(&member.hosts.join(", ")))
    }
}

fn faults(members: &[Member]) -> String {
    let voters = members.iter().filter(|it| !it.is_learner);
    let faults = voters.filter_map(|it| {
        let fault = it.fault.as_ref()?;
        Some(format!("{}: {}", shown(it), printable(fault)))
    });
    let faults: Vec<_> = faults.collect();
    if faults.is_empty() {
        String::new()
    } else {
        format!(" ({})", faults.join("; "))
    }
}

/// The control plane on which etcdctl runs.
pub struct Etcd<'a> {
    client: &'a Client,
    plane: ControlPlane,
    /// etcd's static pod on it, also whole.
    pod: Pod,
    whole: Value,
}

/// Where etcd runs.
pub enum EtcdPlace<'a> {
    /// On control planes, of which this one stays.
    There(Box<Etcd<'a>>),
    /// Only on the nodes that are removed, or where its pod is not ready: their names.
    OnlyOn(Vec<String>),
    /// In no pod of kubeadm: the cluster uses another etcd.
    Elsewhere,
}

impl<'a> Etcd<'a> {
    /// Returns a control plane other than these whose etcd is ready. It is one by its record, and the API server reaches its machine.
    /// What else claims to be etcd or a control plane is named in a warning.
    pub fn find(client: &'a Client, except: &[String]) -> Result<EtcdPlace<'a>, Error> {
        let planes = ControlPlanes::read(client)?;
        if let Some(why) = planes.unrecorded() {
            return Err(Error::Refused(why.into()));
        }
        warn_of_others(client, &planes)?;
        let mut nodes = vec![];
        for plane in &planes.proven {
            let pod = match plane.static_pod(client, ETCD)? {
                StaticPod::Absent => continue,
                StaticPod::Real(pod, whole) => Some((*pod, whole)),
                StaticPod::False(why) => {
                    log::warn!("{}", printable(&why));
                    None
                }
            };
            nodes.push(plane.name.clone());
            let is_candidate = |pod: &Pod| !except.contains(&plane.name) && pod.is_ready();
            let Some((pod, whole)) = pod.filter(|(pod, _)| is_candidate(pod)) else {
                continue;
            };
            match plane.refusal() {
                Some(why) => log::warn!("skipping etcd on {}: {why}", plane.name),
                None => {
                    let plane = plane.clone();
                    return Ok(EtcdPlace::There(Box::new(Etcd {
                        client,
                        plane,
                        pod,
                        whole,
                    })));
                }
            }
        }
        Ok(if nodes.is_empty() {
            EtcdPlace::Elsewhere
        } else {
            EtcdPlace::OnlyOn(nodes)
        })
    }

    /// Asks etcd for its members, and each member whether it answers.
    pub fn members(&self, progress: &Progress) -> Result<Vec<Member>, Error> {
        let members = ["member", "list", "--write-out", "json"];
        let health = ["endpoint", "health", "--cluster", "--write-out", "json"];
        let ran = self.run(progress, &[("members", &members), ("health", &health)])?;
        let [listed, health] = &ran[..] else {
            return Err(Error::refused("expected the logs of two containers"));
        };
        read(&listed.log, &health.log).ok_or_else(|| self.failed("list its members", listed))
    }

    /// Removes a member. One that is no longer there counts as removed.
    pub fn remove(&self, progress: &Progress, member: &Member) -> Result<(), Error> {
        let ran = self.run(progress, &[("remove", &["member", "remove", &member.id()])])?;
        match ran.first() {
            Some(ran) if ran.is_done || ran.log.contains("member not found") => Ok(()),
            Some(ran) => Err(self.failed(&format!("remove the member {}", shown(member)), ran)),
            None => Err(Error::refused("expected the log of a container")),
        }
    }

    /// Returns the name of the control plane.
    pub fn node(&self) -> &str {
        &self.plane.name
    }

    /// Returns the control plane.
    pub fn plane(&self) -> &ControlPlane {
        &self.plane
    }

    /// Refuses if the API server would now ask another machine than this control plane's. What reads from the kubelet calls this before
    /// and after it.
    pub fn check(&self) -> Result<(), Error> {
        match self.plane.refusal_now(self.client)? {
            None => Ok(()),
            Some(why) => Err(Error::Refused(printable(&why))),
        }
    }

    /// Returns the error for what etcdctl did not do: a clause such as `list its members`.
    pub fn failed(&self, what: &str, ran: &Ran) -> Error {
        // etcdctl's log is JSON, and its last line says why it ended
        let said: String = ran.log.trim().chars().rev().take(MAX_SHOWN).collect();
        let said: String = said.chars().rev().collect();
        Error::Refused(format!(
            "etcd on {} did not {what}: etcdctl says: {}",
            self.node(),
            printable(&said)
        ))
    }

    /// Returns the specification of a pod that runs etcdctl with each of these arguments, in a container of this name each.
    pub fn pod_spec(&self, commands: &[(&str, &[&str])]) -> Result<Value, Error> {
        spec(self.node(), (&self.pod, &self.whole), commands)
    }

    /// Runs etcdctl with each of these arguments, in a container of this name each.
    fn run(&self, progress: &Progress, commands: &[(&str, &[&str])]) -> Result<Vec<Ran>, Error> {
        let name = format!("firstlight-etcd-{}", hex(&random::<4>()));
        let pods = PODS.in_namespace(NAMESPACE);
        progress.phase(format!(
            "asking etcd on {}, by the pod {NAMESPACE}/{name}",
            self.node()
        ));
        let labels = json!({"app.kubernetes.io/part-of": "firstlight"});
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "spec": self.pod_spec(commands)?,
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels},
        });
        self.client.create(&pods, &pod)?;
        let at = pods.named(&name);
        let containers: Vec<_> = commands.iter().map(|(container, _)| *container).collect();
        let ran = self
            .wait(&at, LIMIT)
            .and_then(|pod| self.ran(&pod, &containers));
        // a pod that stays ends by itself
        if let Err(error) = self.client.delete_if_there(&at) {
            log::warn!("{error}: delete the pod yourself");
        }
        ran
    }

    /// Returns what these containers of a pod that has ended did.
    pub fn ran(&self, pod: &Pod, containers: &[&str]) -> Result<Vec<Ran>, Error> {
        let at = PODS.in_namespace(NAMESPACE).named(&pod.metadata.name);
        self.check()?;
        let each = containers.iter().map(|container| {
            let code = exit_code(pod, container);
            Ok(Ran {
                is_done: code == Some(0),
                // a container that did not start has no log
                log: match code {
                    Some(_) => self.client.pod_log(&at, container)?,
                    None => String::new(),
                },
            })
        });
        let ran = each.collect::<Result<_, Error>>()?;
        self.check()?;
        Ok(ran)
    }

    /// Waits until a pod has ended.
    pub fn wait(&self, at: &Object, limit: Duration) -> Result<Pod, Error> {
        let end = Instant::now() + limit;
        loop {
            let pod: Pod = self.client.get_as(at)?;
            if pod.has_ended() {
                return Ok(pod);
            }
            let mut waiting = pod.containers().filter_map(|it| it.state.waiting.as_ref());
            let why = match waiting.find(|it| NOT_STARTED.contains(&it.reason.as_str())) {
                Some(waiting) => format!("{}: {}", waiting.reason, waiting.message),
                None if Instant::now() >= end => format!(
                    "its phase is {:?} after {} s: is the kubelet of {} running?",
                    pod.status.phase,
                    limit.as_secs(),
                    self.node()
                ),
                None => {
                    self.client.stopped_within(PAUSE);
                    continue;
                }
            };
            return Err(Error::Refused(format!(
                "the pod {NAMESPACE}/{}, which asks etcd, does not run: {}",
                at.name(),
                printable(&why)
            )));
        }
    }
}

/// Names in warnings what has the labels of control planes or of etcd, and is ignored.
fn warn_of_others(client: &Client, planes: &ControlPlanes) -> Result<(), Error> {
    for sentence in planes.ignored() {
        log::warn!("{}", printable(&sentence));
    }
    let pods = client.list_as::<Pod>(&PODS.in_namespace(NAMESPACE), &Selector::labels(LABELS))?;
    let is_known = |pod: &Pod| {
        let mut planes = planes.proven.iter();
        planes.any(|plane| plane.has_static_pod(ETCD, pod))
    };
    for pod in pods.items.iter().filter(|pod| !is_known(pod)) {
        log::warn!(
            "the pod {NAMESPACE}/{} on {} is ignored: it has the labels of etcd, but is not the static pod of a recorded control plane",
            printable(&pod.metadata.name),
            printable(&pod.spec.node_name)
        );
    }
    Ok(())
}

/// What a container of the pod did.
pub struct Ran {
    /// Whether etcdctl succeeded.
    pub is_done: bool,
    /// What it printed.
    pub log: String,
}

fn exit_code(pod: &Pod, container: &str) -> Option<i64> {
    let status = pod.containers().find(|it| it.name == container)?;
    Some(status.state.terminated.as_ref()?.exit_code)
}

/// Makes the specification of a pod: the image, the user and the certificates of etcd's own pod, on the same node.
fn spec(
    node: &str,
    (etcd, whole): (&Pod, &Value),
    commands: &[(&str, &[&str])],
) -> Result<Value, Error> {
    let unknown = || Error::Refused(format!("the pod of etcd on {node} has no container"));
    let container = etcd.spec.containers.first().ok_or_else(unknown)?;
    let flag = |name: &str| {
        let prefix = format!("--{name}=");
        let values = container.words().filter_map(|it| it.strip_prefix(&*prefix));
        values.last()
    };
    let url = flag("listen-client-urls").and_then(|urls| urls.split(',').next());
    let url = url.unwrap_or("https://127.0.0.1:2379");
    let files = [
        ("--cacert", flag("trusted-ca-file")),
        ("--cert", flag("cert-file")),
        ("--key", flag("key-file")),
    ];
    let is_needed = |mount: &Value| {
        let path = mount["mountPath"].as_str().unwrap_or_default();
        let path = format!("{}/", path.trim_end_matches('/'));
        files
            .iter()
            .any(|(_, file)| file.is_some_and(|file| file.starts_with(&path)))
    };
    let spec = &whole["spec"];
    let list = |list: &Value| list.as_array().cloned().unwrap_or_default();
    let mut mounts = list(&spec["containers"][0]["volumeMounts"]);
    mounts.retain(is_needed);
    for mount in &mut mounts {
        mount["readOnly"] = true.into();
    }
    let mut volumes = list(&spec["volumes"]);
    volumes.retain(|volume| mounts.iter().any(|mount| mount["name"] == volume["name"]));
    let context = spec.get("securityContext");
    let containers = commands.iter().map(|(name, arguments)| {
        let mut command = vec!["etcdctl", "--endpoints", url, "--command-timeout", ETCDCTL_LIMIT];
        for (option, file) in files {
            command.extend(file.map(|file| [option, file]).into_iter().flatten());
        }
        command.extend(*arguments);
        json!({
            "name": name, "image": container.image, "imagePullPolicy": "IfNotPresent", "command": command,
            "volumeMounts": mounts,
            "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
        })
    });
    let mut spec = json!({
        "nodeName": node, "hostNetwork": true, "restartPolicy": "Never", "activeDeadlineSeconds": LIMIT.as_secs(),
        "terminationGracePeriodSeconds": 1, "automountServiceAccountToken": false, "enableServiceLinks": false,
        "priorityClassName": "system-node-critical", "tolerations": [{"operator": "Exists"}],
        "containers": containers.collect::<Vec<_>>(), "volumes": volumes,
    });
    if let Some(context) = context {
        spec["securityContext"] = context.clone();
    }
    Ok(spec)
}

/// The answer of `etcdctl member list`.
#[derive(Deserialize)]
struct Listed {
    members: Vec<ListedMember>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ListedMember {
    #[serde(rename = "ID")]
    id: u64,
    name: String,
    #[serde(rename = "peerURLs")]
    peer_urls: Vec<String>,
    #[serde(rename = "clientURLs")]
    client_urls: Vec<String>,
    #[serde(rename = "isLearner")]
    is_learner: bool,
}

/// A line of the answer of `etcdctl endpoint health`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Health {
    endpoint: String,
    health: bool,
    error: String,
}

/// Reads the members from the logs of `etcdctl member list` and `etcdctl endpoint health`, which also have lines of etcdctl's
/// own log; `None` if there is no list of members.
pub fn read(listed: &str, health: &str) -> Option<Vec<Member>> {
    let listed: Listed = listed
        .lines()
        .find_map(|line| serde_json::from_str(line).ok())?;
    let health: Option<Vec<Health>> = health
        .lines()
        .find_map(|line| serde_json::from_str(line).ok());
    let health = health.unwrap_or_default();
    let fault = |member: &ListedMember| {
        let own = health
            .iter()
            .filter(|it| member.client_urls.contains(&it.endpoint));
        let own: Vec<_> = own.collect();
        match own.first() {
            _ if own.iter().any(|it| it.health) => None,
            Some(first) => Some(first.error.clone()),
            None if member.client_urls.is_empty() => Some("it has never started".into()),
            None => Some("etcdctl says nothing of it".into()),
        }
    };
    let members = listed.members.iter().map(|it| Member {
        id: it.id,
        name: it.name.clone(),
        hosts: it.peer_urls.iter().map(|url| host(url)).collect(),
        is_learner: it.is_learner,
        fault: fault(it),
    });
    Some(members.collect())
}

/// Returns the host of a URL, without the brackets of an IPv6 address.
pub fn host(url: &str) -> String {
    let authority = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = authority.split('/').next().unwrap_or_default();
    let host = authority
        .rsplit_once(':')
        .map_or(authority, |(host, _)| host);
    host.trim_matches(['[', ']']).to_owned()
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    /// A member with a vote; `fault` is empty if it answers.
    fn member(name: &str, fault: &str) -> Member {
        Member {
            id: name.bytes().map(u64::from).sum(),
            name: name.into(),
            hosts: vec![format!("host-{name}")],
            is_learner: false,
            fault: Some(fault.to_owned()).filter(|it| !it.is_empty()),
        }
    }

    /// Returns the names in the order of their removal, or why it is refused. Members in capitals do not answer.
    fn order(all: &str, gone: &str) -> Result<String, String> {
        let fault = |name: &str| {
            if name.chars().all(char::is_uppercase) {
                "off"
            } else {
                ""
            }
        };
        let names = all.split_terminator(' ');
        let members: Vec<_> = names.map(|it| member(it, fault(it))).collect();
        let is_gone = |it: &&Member| gone.split(' ').any(|name| name == it.name);
        let gone: Vec<_> = members.iter().filter(is_gone).map(|it| it.id).collect();
        let order = removal(&members, &gone).map_err(|error| error.to_string())?;
        let names: Vec<_> = order.into_iter().map(|it| it.name).collect();
        Ok(names.join(" "))
    }

    #[test]
    fn a_member_is_removed_only_if_the_others_keep_the_majority() {
        for (all, gone, expected) in [
            ("a b c", "c", "c"),
            ("a b", "b", "b"),
            ("a b c", "b c", "b c"),
            ("a b c d e", "c d e", "c d e"),
            // those that do not answer are removed first: then the majority is smaller
            ("a b C", "b C", "C b"),
            ("a b c D E", "c D E", "D E c"),
            ("a b", "x", ""),
        ] {
            assert_eq!(
                order(all, gone).as_deref(),
                Ok(expected),
                "{all} without {gone}"
            );
        }
        for (all, gone, numbers) in [
            (
                "a b C",
                "b",
                "without b, 1 of its 2 members with a vote answer, and 2 are needed (C: off)",
            ),
            (
                "a b c D E",
                "c",
                "without c, 2 of its 4 members with a vote answer, and 3 are needed (D: off; E: off)",
            ),
            // also in between
            ("a b c D E", "b c D", "without c, 1 of its 2"),
            (
                "a B",
                "B",
                "etcd has no majority: 1 of its 2 members with a vote answer, and 2 are needed (B: off)",
            ),
            ("a", "a", "no member of etcd with a vote would be left"),
            ("a b", "a b", "no member of etcd with a vote would be left"),
        ] {
            match order(all, gone) {
                Err(why) if why.contains(numbers) => {}
                other => panic!("{all} without {gone}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_learner_does_not_count_and_can_be_removed() {
        let learner = Member {
            is_learner: true,
            ..member("c", "rpc not supported for learner")
        };
        let all = [member("a", ""), learner.clone()];
        let order = removal(&all, &[learner.id]).unwrap();
        assert_eq!(order.len(), 1);
        assert_eq!(order[0], learner);
        assert!(removal(&all, &[all[0].id]).is_err());
        assert_eq!(Quorum::of(&all).needed, 1);
    }

    const LISTED: &str = r#"{"header":{"cluster_id":1,"member_id":2,"raft_term":2},"members":[{"ID":17803684838274183961,"name":"a","peerURLs":["https://10.0.0.1:2380"],"clientURLs":["https://10.0.0.1:2379"]},{"ID":2,"name":"b","peerURLs":["https://[fd00::2]:2380"],"clientURLs":["https://[fd00::2]:2379"],"isLearner":true},{"ID":3,"name":"","peerURLs":["https://10.0.0.3:2380"],"clientURLs":[]}]}"#;
    const HEALTH: &str = "{\"level\":\"warn\",\"msg\":\"retrying\"}\n\
        [{\"endpoint\":\"https://10.0.0.1:2379\",\"health\":true,\"took\":\"9ms\"},{\"endpoint\":\"https://[fd00::2]:2379\",\"health\":false,\"took\":\"5s\",\"error\":\"context deadline exceeded\"}]\n\
        Error: unhealthy cluster\n";

    #[test]
    fn members_are_read_between_the_lines_of_a_log() {
        let members = read(&format!("{{\"level\":\"info\"}}\n{LISTED}\n"), HEALTH).unwrap();
        let faults: Vec<_> = members.iter().map(|it| it.fault.as_deref()).collect();
        assert_eq!(
            faults,
            [
                None,
                Some("context deadline exceeded"),
                Some("it has never started")
            ]
        );
        assert_eq!(members[0].id(), "f71365084e573319");
        assert!(members[1].is_learner && members[1].hosts == ["fd00::2"]);
        let at = |address: &str| [address.parse().unwrap()];
        assert!(members[2].is_of("c", &at("10.0.0.3")) && !members[2].is_of("c", &[]));
        assert!(members[0].is_of("a", &[]) && !members[0].is_of("c", &at("10.0.0.1")));
        assert!(
            members[1].is_at(&at("fd00:0::2")),
            "addresses are not compared as text"
        );
        // without an answer about its health no member counts as healthy
        assert!(
            read(LISTED, "Error: no endpoint")
                .unwrap()
                .iter()
                .all(|it| it.fault.is_some())
        );
        assert_eq!(read("Error: context deadline exceeded", HEALTH), None);
    }

    #[test]
    fn no_log_makes_the_reader_panic() {
        for listed in mutations(LISTED.as_bytes(), 3000) {
            read(&String::from_utf8_lossy(&listed), HEALTH);
        }
        for health in mutations(HEALTH.as_bytes(), 3000) {
            read(LISTED, &String::from_utf8_lossy(&health));
        }
    }

    #[test]
    fn the_pod_has_the_certificates_of_etcd_and_no_more() {
        let etcd = json!({"spec": {
            "securityContext": {"runAsUser": 7},
            "containers": [{"name": "etcd", "image": "i", "command": ["etcd", "--cert-file=/a/b/server.crt", "--key-file=/a/b/server.key",
                "--trusted-ca-file=/a/b/ca.crt", "--listen-client-urls=https://127.0.0.1:2379,https://10.0.0.1:2379"],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "certs", "mountPath": "/a/b"}]}],
            "volumes": [{"name": "data", "hostPath": {"path": "/data"}}, {"name": "certs", "hostPath": {"path": "/a/b"}}],
        }});
        let pod = serde_json::from_value(etcd.clone()).unwrap();
        let pod = spec("n", (&pod, &etcd), &[("list", &["member", "list"])]).unwrap();
        let container = &pod["containers"][0];
        let command = "etcdctl --endpoints https://127.0.0.1:2379 --command-timeout 10s --cacert /a/b/ca.crt --cert /a/b/server.crt \
                       --key /a/b/server.key member list";
        assert_eq!(
            container["command"],
            json!(command.split(' ').collect::<Vec<_>>())
        );
        assert_eq!(
            container["volumeMounts"],
            json!([{"name": "certs", "mountPath": "/a/b", "readOnly": true}])
        );
        assert_eq!(
            pod["volumes"],
            json!([{"name": "certs", "hostPath": {"path": "/a/b"}}])
        );
        assert_eq!(pod["securityContext"]["runAsUser"], 7);
        assert_eq!(pod["nodeName"], "n");
    }
}
