//! Moves the pods away from a node, as `kubectl drain --ignore-daemonsets` does: by the eviction API, which honours
//! PodDisruptionBudgets. The order is [`cordon`], [`drain`], and [`uncordon`] if the node stays.

use std::time::{Duration, Instant};

use clap::Args;
use kubernetes::client::{Client, NAMESPACES, NODES, PODS, Selector};
use kubernetes::objects::{AnyObject, NodeObject, Pod};
use serde_json::{Value, json};

use crate::shell::{
    error::Error,
    progress::{Progress, human, printable},
};
use crate::workspace::options::time;

/// The annotation of a static pod.
const STATIC: &str = "kubernetes.io/config.mirror";
/// The pause between two looks at the pods.
const PAUSE: Duration = Duration::from_secs(1);
/// When the eviction of a pod is tried again after a refusal, as in kubectl.
const RETRY: Duration = Duration::from_secs(5);

/// Which pods may be evicted besides those that a controller makes again and that lose no data.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct Permitted {
    /// Also evict pods with emptyDir volumes, whose data is lost
    #[arg(long = "delete-emptydir-data")]
    pub empty_dir: bool,
    /// Also evict pods that no controller makes again elsewhere (kubectl drain: --force)
    #[arg(long = "delete-unmanaged-pods")]
    pub unmanaged: bool,
}

/// How the pods of a node are moved away.
#[derive(Debug, Args)]
pub struct DrainOptions {
    /// Which pods may be evicted.
    #[command(flatten)]
    pub permitted: Permitted,
    /// How long the pods of a node may take to end
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "10m")]
    pub drain_timeout: Duration,
}

/// How a drain ended.
#[must_use]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drained {
    /// The evicted pods have ended.
    Empty,
    /// The node's kubelet is silent, or its Node is deleted: nobody says whether its pods have ended.
    Silent,
}

/// What happens with a pod.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    /// It ends with its node: it belongs to a DaemonSet, or is static.
    Stays,
    Evicted,
    /// The operator has to permit it, for this reason.
    Refused(&'static str),
}

/// Returns what happens with a pod, by the rules of `kubectl drain --ignore-daemonsets`. A pod that somebody has deleted already is only
/// waited for, also if it is the pod of an earlier command of ours.
fn fate(pod: &Pod, permitted: Permitted) -> Fate {
    let controller = pod.metadata.controller();
    let mut volumes = pod.spec.volumes.iter();
    if pod.metadata.annotation(STATIC).is_some() {
        Fate::Stays
    } else if pod.has_ended() {
        Fate::Evicted
    } else if controller.is_some_and(|it| it.kind == "DaemonSet") {
        Fate::Stays
    } else if pod.metadata.is_ending() {
        Fate::Evicted
    } else if !permitted.empty_dir && volumes.any(|it| it.empty_dir.is_some()) {
        Fate::Refused(
            "it has data in an emptyDir, which is lost: --delete-emptydir-data permits it",
        )
    } else if !permitted.unmanaged && controller.is_none() {
        Fate::Refused("no controller makes it again elsewhere: --delete-unmanaged-pods permits it")
    } else {
        Fate::Evicted
    }
}

/// The pods of a node by what happens with them.
#[derive(Debug, Default)]
pub struct Pods {
    /// Those that are evicted.
    pub evicted: Vec<Pod>,
    /// The number of those that end with the node.
    pub staying: usize,
    /// A sentence about each pod that the operator has to permit.
    pub refused: Vec<String>,
}

impl Pods {
    /// Lists the pods of a node.
    pub fn of(client: &Client, node: &str, permitted: Permitted) -> Result<Pods, Error> {
        let selector = Selector::fields(&format!("spec.nodeName={node}"));
        let mut pods = Pods::default();
        for pod in client.list_as(&PODS.all(), &selector)?.items {
            match fate(&pod, permitted) {
                Fate::Stays => pods.staying += 1,
                Fate::Evicted => pods.evicted.push(pod),
                Fate::Refused(why) => pods.refused.push(format!("{}: {why}", name_of(&pod))),
            }
        }
        Ok(pods)
    }

    /// Refuses pods that the operator has to permit.
    pub fn check(&self, node: &str) -> Result<(), Error> {
        if self.refused.is_empty() {
            Ok(())
        } else {
            Err(Error::Refused(format!(
                "{} of the pods on {node} must not be evicted: {}",
                self.refused.len(),
                self.refused.join("; ")
            )))
        }
    }
}

fn name_of(pod: &Pod) -> String {
    printable(&pod.metadata.place())
}

/// Keeps new pods away from a node.
pub fn cordon(client: &Client, node: &str) -> Result<(), Error> {
    set_unschedulable(client, node, Value::Bool(true))
}

/// Lets new pods come to a node again.
pub fn uncordon(client: &Client, node: &str) -> Result<(), Error> {
    set_unschedulable(client, node, Value::Null)
}

fn set_unschedulable(client: &Client, node: &str, value: Value) -> Result<(), Error> {
    let patch = json!({"spec": {"unschedulable": value}});
    client.merge(&NODES.named(node), &patch)?;
    Ok(())
}

/// A pod that the server does not evict yet.
struct Refusal {
    uid: String,
    /// When the server was asked.
    at: Instant,
    why: String,
}

/// Evicts the pods of a cordoned node, and waits until they have ended, at most for `limit`. An error leaves the node cordoned, and says
/// so.
pub fn drain(
    client: &Client,
    node: &str,
    permitted: Permitted,
    limit: Duration,
    progress: &Progress,
) -> Result<Drained, Error> {
    let end = Instant::now() + limit;
    let mut refused: Vec<Refusal> = Vec::new();
    loop {
        let pods = Pods::of(client, node, permitted)?;
        if pods.evicted.is_empty() && pods.refused.is_empty() {
            return Ok(Drained::Empty);
        }
        let found = client.find_as(&NODES.named(node))?;
        if found.as_ref().is_none_or(NodeObject::is_silent) {
            return Ok(Drained::Silent);
        }
        if !pods.refused.is_empty() {
            return Err(unfinished(node, "", &pods.refused));
        }
        for pod in &pods.evicted {
            let uid = &pod.metadata.uid;
            let was_asked = |it: &Refusal| it.uid == *uid && it.at.elapsed() < RETRY;
            if pod.metadata.is_ending() || refused.iter().any(was_asked) {
                continue;
            }
            refused.retain(|it| it.uid != *uid);
            if let Some(why) = evict(client, pod)? {
                progress.line(format!("{} is not evicted yet: {why}", name_of(pod)));
                let (uid, at) = (uid.clone(), Instant::now());
                refused.push(Refusal { uid, at, why });
            }
        }
        if Instant::now() >= end {
            let left = pods.evicted.iter().map(|pod| state(pod, &refused));
            let left: Vec<_> = left.collect();
            let after = format!(" after {} (--drain-timeout)", human(limit));
            return Err(unfinished(node, &after, &left));
        }
        if client.stopped_within(PAUSE) {
            return Err(kubernetes::client::Error::Stopped.into());
        }
    }
}

/// Returns why a pod is still there.
fn state(pod: &Pod, refused: &[Refusal]) -> String {
    match refused.iter().find(|it| it.uid == pod.metadata.uid) {
        Some(refusal) => format!(
            "{}: {}",
            name_of(pod),
            printable(refusal.why.trim_end_matches('.'))
        ),
        None => format!("{} has not ended", name_of(pod)),
    }
}

/// Returns the error after which a node stays cordoned.
fn unfinished(node: &str, after: &str, left: &[String]) -> Error {
    Error::Failed(format!(
        "pods are still on {node}{after}: {}. Other pods may have been evicted, and the node stays cordoned: run the command \
         again, which goes on, or let pods come back: kubectl uncordon {node}",
        left.join("; ")
    ))
}

/// Evicts a pod. Returns why the server does not do it now; `None` also if the pod is gone.
fn evict(client: &Client, pod: &Pod) -> Result<Option<String>, Error> {
    let pod = &pod.metadata;
    let at = PODS.in_namespace(&pod.namespace).named(&pod.name);
    match client.evict(&at, &pod.uid) {
        Ok(refused) => Ok(refused),
        // the next list shows what became of it
        Err(error) if error.is_not_found() || error.is_conflict() => Ok(None),
        // the namespace is being deleted, and with it the pod; or the server cannot answer now
        Err(error)
            if error.is_temporary()
                || error.code() == Some(403) && is_ending(client, &pod.namespace)? =>
        {
            Ok(Some(error.to_string()))
        }
        Err(error) => Err(error.into()),
    }
}

fn is_ending(client: &Client, namespace: &str) -> Result<bool, Error> {
    let found = client.find_as::<AnyObject>(&NAMESPACES.named(namespace))?;
    Ok(found.is_some_and(|namespace| namespace.metadata.is_ending()))
}

#[cfg(test)]
mod tests {
    use serde_json::from_value;

    use super::*;

    #[test]
    fn a_pod_that_is_deleted_already_needs_no_permission() {
        let deleted = json!({"deletionTimestamp": "2026-11-27T10:50:00Z"});
        let pod = |metadata: &Value| {
            let pod = json!({"metadata": metadata, "spec": {"volumes": [{"emptyDir": {}}]}});
            from_value(pod).unwrap()
        };
        assert_eq!(fate(&pod(&deleted), Permitted::default()), Fate::Evicted);
        assert!(matches!(
            fate(&pod(&json!({})), Permitted::default()),
            Fate::Refused(_)
        ));
    }

    #[test]
    fn pods_have_the_fates_that_kubectl_gives_them() {
        let owner = |kind: &str| json!([{"kind": kind, "controller": true}]);
        let pod = |owners: Value, volumes: Value, phase: &str| -> Pod {
            let pod = json!({"metadata": {"ownerReferences": owners}, "spec": {"volumes": volumes}, "status": {"phase": phase}});
            from_value(pod).unwrap()
        };
        let scratch = || json!([{"name": "a", "emptyDir": {}}]);
        let none = || json!([]);
        let strict = Permitted::default();
        let all = Permitted {
            empty_dir: true,
            unmanaged: true,
        };
        for (pod, by_strict, by_all) in [
            (
                pod(owner("ReplicaSet"), none(), "Running"),
                "evicted",
                "evicted",
            ),
            (
                pod(owner("ReplicaSet"), scratch(), "Running"),
                "refused",
                "evicted",
            ),
            (
                pod(owner("ReplicaSet"), scratch(), "Failed"),
                "evicted",
                "evicted",
            ),
            (
                pod(owner("DaemonSet"), scratch(), "Running"),
                "stays",
                "stays",
            ),
            (
                pod(owner("DaemonSet"), none(), "Succeeded"),
                "evicted",
                "evicted",
            ),
            (pod(none(), none(), "Running"), "refused", "evicted"),
            (pod(none(), none(), "Succeeded"), "evicted", "evicted"),
            // an owner that is no controller makes nothing again
            (
                pod(json!([{"kind": "Node"}]), none(), "Running"),
                "refused",
                "evicted",
            ),
        ] {
            let name = |fate: Fate| match fate {
                Fate::Stays => "stays",
                Fate::Evicted => "evicted",
                Fate::Refused(_) => "refused",
            };
            assert_eq!(name(fate(&pod, strict)), by_strict, "{pod:?}");
            assert_eq!(name(fate(&pod, all)), by_all, "{pod:?}");
            let mut own = pod;
            own.metadata.annotations.insert(STATIC.into(), "a".into());
            assert_eq!(fate(&own, all), Fate::Stays);
        }
    }
}
