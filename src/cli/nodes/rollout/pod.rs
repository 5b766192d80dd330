//! Runs one program of a node's own system on that node, by a pod that lives for as long as the program.
//!
//! The pod needs no image of its own, no shell and no registry: it is made of the image of a container of kube-system that runs on the
//! node already, and of the node's own `/usr`. Its program is the node's `systemd-run`, which asks the node's systemd to run the
//! command as a unit. So the command runs outside of the pod, with the whole system around it, and goes on if the pod ends.

use std::time::{Duration, Instant};

use kubernetes::NAMESPACE;
use kubernetes::client::{self, Client, Object, PODS, Selector};
use kubernetes::objects::Pod;
use serde_json::{Value, json};

use crate::shell::{
    error::Error,
    progress::{block, printable},
};

/// The pause between two looks at the pod.
const PAUSE: Duration = Duration::from_secs(1);
/// How long a pod may take to start its container.
const START: Duration = Duration::from_secs(180);
/// The most characters of a log in an error: its end.
const MAX_SHOWN: usize = 1500;
/// The annotation that says for which try the pod was made.
const TRY: &str = "firstlight/rollout";
/// The name of the container.
const CONTAINER: &str = "run";
/// The name of the volume with the list of components.
const LIST: &str = "components";
/// The unit of `bootstrapper upgrade`, of which a node runs one at a time.
pub const UPGRADE_UNIT: &str = "firstlight-upgrade";
/// The program that upgrades a node.
pub const BOOTSTRAPPER: &str = "/usr/bin/bootstrapper";
/// The unit of the command that brings an image to a node.
pub const IMAGE_UNIT: &str = "firstlight-rollout";

/// What a pod runs on a node.
pub struct PodJob<'a> {
    /// The node.
    pub node: &'a str,
    /// A word that differs between the jobs of a node.
    pub name: &'a str,
    /// The program of the node and its arguments.
    pub words: Vec<String>,
    /// A ConfigMap that the pod mounts as [`list_path`].
    pub list: Option<&'a str>,
    /// Differs between two tries: a pod of an earlier one is deleted, and one of the same try goes on.
    pub attempt: String,
    /// How long to wait for its end.
    pub limit: Duration,
    /// Whether the kubelet ends the pod after this time, too. A node that loses the state of its containers when it reboots would start
    /// a pod again that has rebooted it.
    pub is_ended: bool,
}

/// How a pod has ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Ended {
    /// Its program has succeeded.
    Done,
    /// Its program has failed: what the kubelet says, and the end of the program's log.
    Failed {
        /// What the kubelet says.
        why: String,
        /// The end of the log; empty if it said nothing.
        log: String,
    },
    /// It has not ended within the limit, and still runs.
    Running,
    /// The pod is gone, and nobody knows how its program has ended.
    Gone,
}

/// Returns the command by which systemd runs a command of the node as this unit.
pub fn as_unit(unit: &str, words: &[String]) -> Vec<String> {
    let unit = format!("--unit={unit}");
    let run = [
        "/usr/bin/systemd-run",
        "--quiet",
        "--wait",
        "--pipe",
        "--collect",
        &unit,
        "--",
    ];
    let run = run.iter().map(|word| (*word).to_owned());
    run.chain(words.iter().cloned()).collect()
}

/// Returns the path in the node of the list in the ConfigMap that a job mounts. The kubelet puts the pod's UID in its place.
pub fn list_path() -> String {
    format!("/var/lib/kubelet/pods/$(POD_UID)/volumes/kubernetes.io~configmap/{LIST}/components")
}

impl PodJob<'_> {
    /// Runs the job, and calls `tick` all the while, and with true right before the pod is made. Goes on with a pod of the same attempt.
    pub fn run(
        &self,
        client: &Client,
        tick: &mut dyn FnMut(bool) -> Result<(), Error>,
    ) -> Result<Ended, Error> {
        let at = self.place();
        match client.find_as(&at)? {
            Some(pod) if self.is_ours(&pod) => {}
            found => {
                if found.is_some() {
                    self.remove(client, tick)?;
                }
                let manifest = self.manifest(&image(client, self.node)?);
                tick(true)?;
                client.create(&at.collection(), &manifest)?;
            }
        }
        let ended = self.wait(client, tick)?;
        if ended != Ended::Running {
            self.delete(client);
        }
        Ok(ended)
    }

    /// Deletes the pod. One that stays is deleted before the next try.
    pub fn delete(&self, client: &Client) {
        let _ = client.delete_if_there(&self.place());
    }

    fn place(&self) -> Object {
        // a pod's name may have as many characters as a node's
        let name = format!("firstlight-{}-{}", self.name, self.node);
        PODS.in_namespace(NAMESPACE)
            .named(&name[..name.len().min(253)])
    }

    fn is_ours(&self, pod: &Pod) -> bool {
        let attempt = pod.metadata.annotation(TRY);
        self.is_there(pod) && attempt == Some(&*self.attempt) && !pod.metadata.is_ending()
    }

    /// Returns whether a pod is on the node. The kubelet of another node may make a mirror pod of its own under this name.
    fn is_there(&self, pod: &Pod) -> bool {
        pod.spec.node_name == self.node
    }

    fn remove(
        &self,
        client: &Client,
        tick: &mut dyn FnMut(bool) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (at, end) = (self.place(), Instant::now() + START);
        client.delete_if_there(&at)?;
        while client.find(&at)?.is_some() {
            if Instant::now() >= end {
                return Err(Error::Failed(format!(
                    "{at} of an earlier try does not end: delete it with kubectl delete --force, and run the command again"
                )));
            }
            tick(false)?;
            pause(client)?;
        }
        Ok(())
    }

    fn wait(
        &self,
        client: &Client,
        tick: &mut dyn FnMut(bool) -> Result<(), Error>,
    ) -> Result<Ended, Error> {
        let (at, begun) = (self.place(), Instant::now());
        loop {
            tick(false)?;
            match client.find_as(&at) {
                Ok(None) => return Ok(Ended::Gone),
                Ok(Some(pod)) if !self.is_there(&pod) => return Ok(Ended::Gone),
                Ok(Some(pod)) => {
                    match &*pod.status.phase {
                        "Succeeded" => return Ok(Ended::Done),
                        "Failed" => {
                            return Ok(Ended::Failed {
                                why: why_failed(&pod),
                                log: self.log(client),
                            });
                        }
                        _ => {}
                    }
                    let mut statuses = pod.status.container_statuses.iter();
                    let has_begun = statuses.any(|it| it.state.waiting.is_none());
                    if !has_begun && begun.elapsed() >= START {
                        return Ok(Ended::Failed {
                            why: not_begun(&pod),
                            log: String::new(),
                        });
                    }
                }
                // the node may be the API server's own
                Err(error) if error.is_temporary() => {}
                Err(error) => return Err(error.into()),
            }
            if begun.elapsed() >= self.limit {
                return Ok(Ended::Running);
            }
            pause(client)?;
        }
    }

    /// Returns the end of the pod's log.
    fn log(&self, client: &Client) -> String {
        // the error is about the program, not about its log
        let log = client.pod_log(&self.place(), CONTAINER).unwrap_or_default();
        let log = log.trim();
        let skipped = log.chars().count().saturating_sub(MAX_SHOWN);
        block(&log.chars().skip(skipped).collect::<String>())
    }

    fn manifest(&self, image: &str) -> Value {
        // paths of the node, and where the dynamic loader of its programs finds them
        let mounts = [
            ("usr", "/usr", true),
            ("lib", "/lib", true),
            ("lib64", "/lib64", true),
            ("systemd", "/run/systemd", false),
            ("dbus", "/run/dbus", false),
        ];
        let volumes = mounts
            .iter()
            .map(|(name, path, _)| json!({"name": name, "hostPath": {"path": path}}));
        let list = (self.list).map(|map| json!({"name": LIST, "configMap": {"name": map}}));
        let volumes: Vec<Value> = volumes.chain(list.clone()).collect();
        let own = mounts.iter().map(|(name, path, is_read_only)| json!({"name": name, "mountPath": path, "readOnly": is_read_only}));
        let list =
            list.map(|_| json!({"name": LIST, "mountPath": "/components", "readOnly": true}));
        let own: Vec<Value> = own.chain(list).collect();
        json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": self.place().name(),
                "namespace": NAMESPACE,
                "labels": {"app.kubernetes.io/part-of": "firstlight"},
                "annotations": {TRY: self.attempt},
            },
            "spec": {
                "nodeName": self.node,
                "restartPolicy": "Never",
                "activeDeadlineSeconds": self.is_ended.then(|| self.limit.as_secs().max(1)),
                "terminationGracePeriodSeconds": 5,
                "automountServiceAccountToken": false,
                "enableServiceLinks": false,
                "hostNetwork": true,
                "priorityClassName": "system-node-critical",
                "tolerations": [{"operator": "Exists"}],
                "containers": [{
                    "name": CONTAINER,
                    "image": image,
                    // it runs on the node, so it is there
                    "imagePullPolicy": "IfNotPresent",
                    "command": self.words,
                    "env": [
                        {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
                        {"name": "PATH", "value": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"},
                        {"name": "LD_PRELOAD", "value": ""},
                        {"name": "LD_LIBRARY_PATH", "value": ""},
                    ],
                    "securityContext": {"privileged": true, "runAsUser": 0, "runAsGroup": 0},
                    "volumeMounts": own,
                }],
                "volumes": volumes,
            },
        })
    }
}

/// Returns the image of a container of kube-system that runs on this node. An image of a user would bring its environment and the
/// settings of its dynamic loader into a privileged pod.
fn image(client: &Client, node: &str) -> Result<String, Error> {
    let selector = Selector::fields(&format!("spec.nodeName={node}"));
    let pods = client.list_as::<Pod>(&PODS.in_namespace(NAMESPACE), &selector)?;
    let images = pods.items.iter().flat_map(|pod| {
        let running = pod.status.container_statuses.iter();
        let running = running.filter(|it| it.state.running.is_some());
        running.filter_map(move |status| {
            let mut containers = pod.spec.containers.iter();
            let container = containers.find(|it| it.name == status.name)?;
            Some(&container.image)
        })
    });
    let image = images.min().cloned();
    image.ok_or_else(|| {
        Error::Refused(format!(
            "no container of {NAMESPACE} runs on {node}, and a pod on it needs an image that is there: is its container runtime all right?"
        ))
    })
}

fn why_failed(pod: &Pod) -> String {
    let status = pod.status.container_statuses.first();
    match status.and_then(|it| it.state.terminated.as_ref()) {
        Some(ended) => format!("exit code {}", ended.exit_code),
        None => printable(&format!("{} {}", pod.status.reason, pod.status.message)),
    }
}

fn not_begun(pod: &Pod) -> String {
    let status = pod.status.container_statuses.first();
    let waiting = status.and_then(|it| it.state.waiting.clone());
    let waiting = waiting.unwrap_or_default();
    printable(&format!(
        "its container did not start within {} s: {} {}",
        START.as_secs(),
        waiting.reason,
        waiting.message
    ))
}

/// Waits for a moment. Fails when the command is stopped.
pub fn pause(client: &Client) -> Result<(), Error> {
    if client.stopped_within(PAUSE) {
        Err(client::Error::Stopped.into())
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(words: Vec<String>, list: Option<&str>) -> Value {
        let job = PodJob {
            node: "n",
            name: "upgrade",
            words,
            list,
            attempt: "1".into(),
            limit: START,
            is_ended: false,
        };
        job.manifest("registry.example/proxy:1")
    }

    #[test]
    fn a_pod_runs_on_its_node_whatever_keeps_others_away_and_has_no_account() {
        let pod = job(as_unit("u", &["a".into(), "b c".into()]), None);
        let spec = &pod["spec"];
        assert_eq!(spec["nodeName"], "n");
        assert_eq!(spec["tolerations"], json!([{"operator": "Exists"}]));
        assert_eq!(spec["automountServiceAccountToken"], false);
        assert_eq!(spec["restartPolicy"], "Never");
        let command = "/usr/bin/systemd-run --quiet --wait --pipe --collect --unit=u -- a";
        let words: Vec<_> = command.split(' ').chain(["b c"]).collect();
        assert_eq!(spec["containers"][0]["command"], json!(words));
        assert!(!spec.to_string().contains("configMap"));
    }

    #[test]
    fn a_pod_of_another_node_is_not_taken_for_ours() {
        let job = PodJob {
            node: "n",
            name: "reboot",
            words: vec![],
            list: None,
            attempt: "1".into(),
            limit: START,
            is_ended: false,
        };
        let ours: Pod = serde_json::from_value(job.manifest("i")).unwrap();
        assert!(job.is_ours(&ours));
        let mut other = ours.clone();
        other.spec.node_name = "worker".into();
        assert!(!job.is_ours(&other) && !job.is_there(&other));
        let mut earlier = ours;
        let annotations = &mut earlier.metadata.annotations;
        annotations.insert(TRY.into(), "0".into());
        assert!(!job.is_ours(&earlier));
    }

    #[test]
    fn a_list_is_mounted_for_the_node_to_read() {
        let pod = job(vec![list_path()], Some("k8s-components-a"));
        let spec = &pod["spec"];
        let volumes = spec["volumes"].as_array().unwrap();
        assert!(
            volumes.contains(&json!({"name": LIST, "configMap": {"name": "k8s-components-a"}}))
        );
        let container = &spec["containers"][0];
        // the name of the variable in the path is that of the pod's UID
        assert_eq!(container["env"][0]["name"], "POD_UID");
        let path = container["command"][0].as_str().unwrap();
        assert!(path.contains("/$(POD_UID)/") && path.ends_with("/components/components"));
    }
}
