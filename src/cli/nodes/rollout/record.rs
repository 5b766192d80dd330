//! The state of a rollout: the ConfigMap `kube-system/firstlight-rollout`, which each step changes by compare-and-set.
//!
//! Whoever can write this object can also write `join-config` beside it, the attestation policy itself. So the record has no seal of
//! its own; a rollout that is continued shows what the record says before it changes anything.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use base::text::printable;
use base::time::seconds;
use kubernetes::NAMESPACE;
use kubernetes::client::{CONFIG_MAPS, Client, Object, version_of};
use kubernetes::objects::ConfigMap;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::shell::error::Error;

/// The name of the ConfigMap.
const NAME: &str = "firstlight-rollout";
/// The key of the record in the ConfigMap.
const KEY: &str = "rollout.json";
/// The default for what brings an image to a node: it goes into the slot that does not run.
pub const UPDATE: &str = "/usr/bin/bootstrapper update";
/// The version of the form.
const VERSION: u32 = 1;
/// How often a change is tried again if the record was changed meanwhile.
const TRIES: usize = 8;

/// What the nodes are brought to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Goal {
    /// An image.
    Image {
        /// Its IDs ([`verifier::Image::id`]): one, or one for each firmware that TDX machines may have.
        ids: Vec<String>,
        /// Its name in the policy.
        name: String,
        /// The policy of its maker, of which only the images count.
        policy: String,
        /// The IDs of the images that the policy accepted before, which leave it at the end.
        old: Vec<String>,
        /// Whether the policy accepted the new image before, too: then nodes may have it that have not said so.
        was_accepted: bool,
    },
    /// A version of Kubernetes.
    Kubernetes {
        /// The version, as `v1.35.4`.
        version: String,
        /// The ConfigMap with the list of its components.
        components: String,
        /// Whether nodes are drained: if the minor version changes.
        drains: bool,
    },
}

/// How a node gets the image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Way {
    /// The node runs this command, a word each, and reboots. A rollout of Kubernetes has its own command and no reboot.
    InPlace(Vec<String>),
    /// Another party replaces the node's machine. The command that asks for it is not part of the record, because it runs on the
    /// operator's machine: the cluster does not choose what runs there.
    Replaced,
}

/// A step of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum NodeStep {
    /// No new pods.
    Cordon,
    /// Its pods go.
    Drain,
    /// It gets the image, the programs, or its replacement is asked for.
    Change,
    /// It is told to reboot.
    Reboot,
    /// It, or its replacement, comes back.
    Return,
    /// It ends its trial of the image. The record has [`NodeStep::Return`] meanwhile.
    Keep,
    /// It takes pods again.
    Uncordon,
}

impl NodeStep {
    /// Returns what has happened when the step is done, a phrase that follows the node's name.
    pub fn done(self) -> &'static str {
        match self {
            NodeStep::Cordon => "cordoned",
            NodeStep::Drain => "drained",
            NodeStep::Change => "changed",
            NodeStep::Reboot => "reboots",
            NodeStep::Return => "is back",
            NodeStep::Keep => "keeps the image",
            NodeStep::Uncordon => "done",
        }
    }

    /// Returns what happens in the step, a phrase that follows the node's name.
    pub fn phrase(self) -> &'static str {
        match self {
            NodeStep::Cordon => "is cordoned",
            NodeStep::Drain => "is drained",
            NodeStep::Change => "is changed",
            NodeStep::Reboot => "reboots",
            NodeStep::Return => "comes back",
            NodeStep::Keep => "tries the image",
            NodeStep::Uncordon => "takes pods again",
        }
    }
}

/// The node that is being changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Current {
    /// Its name.
    pub name: String,
    /// The UID of its Node: a replacement may have the same name.
    pub uid: String,
    /// Whether it is a control plane.
    pub is_control_plane: bool,
    /// The step that is done next.
    pub step: NodeStep,
    /// Whether it was cordoned before, and stays so.
    pub was_cordoned: bool,
    /// The ID of its boot before the change.
    pub boot: String,
    /// Whether it ran the image before, so that only a reboot shows that it still boots it.
    pub had_it: bool,
    /// How many other nodes of its role were ready before, and had the image.
    pub others_had_it: usize,
    /// How many nodes of its role were ready before.
    pub ready_before: usize,
    /// The kubelet's last sign of life when the node had proved the image; empty before that.
    pub renewed: String,
    /// How often its change was begun.
    pub tries: u32,
}

/// What another operator asks the driver of the rollout to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RolloutWish {
    /// Stop when the present node is done.
    Pause,
    /// Stop at once.
    Abort,
}

/// Where the rollout is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RolloutState {
    /// An operator drives it, or it was cut off.
    Running,
    /// It was paused.
    Paused,
    /// It has stopped for this reason.
    Stopped(String),
    /// It was ended before all nodes were changed.
    Aborted,
    /// Every node has what was wanted.
    Done,
}

/// The record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutRecord {
    version: u32,
    /// What the nodes are brought to.
    pub goal: Goal,
    /// How.
    pub way: Way,
    /// Whether the cluster may be without its API server while a control plane restarts.
    pub accepts_downtime: bool,
    /// Whether pods whose data in an emptyDir is lost are evicted.
    pub deletes_empty_dir: bool,
    /// Whether pods that no controller makes again are evicted.
    pub deletes_unmanaged: bool,
    /// Where it is.
    pub state: RolloutState,
    /// What another operator wants.
    pub wish: Option<RolloutWish>,
    /// Whether each join service had the policy with both images in force.
    pub is_in_force: bool,
    /// The node that is being changed.
    pub node: Option<Current>,
    /// The nodes that were changed, in this order.
    pub changed: Vec<String>,
    /// Nodes of an aborted rollout that may boot another image than they run.
    pub unsure: BTreeSet<String>,
    /// The nodes that proved the new image to this command instead of a join service, each with the ID of its boot.
    pub proved: BTreeMap<String, String>,
    /// How often an operator began to drive it.
    pub run: u32,
    /// When it was begun.
    pub begun: String,
    /// The resourceVersion that was read or written last.
    #[serde(skip)]
    object_version: Option<String>,
}

impl RolloutRecord {
    /// Returns a record that is not saved yet.
    pub fn new(goal: Goal, way: Way) -> RolloutRecord {
        RolloutRecord {
            version: VERSION,
            goal,
            way,
            accepts_downtime: false,
            deletes_empty_dir: false,
            deletes_unmanaged: false,
            state: RolloutState::Running,
            wish: None,
            is_in_force: false,
            node: None,
            changed: vec![],
            unsure: BTreeSet::new(),
            proved: BTreeMap::new(),
            run: 0,
            begun: seconds(SystemTime::now()),
            object_version: None,
        }
    }

    /// Returns the record of the cluster; `None` if there was no rollout.
    pub fn find(client: &Client) -> Result<Option<RolloutRecord>, Error> {
        let Some(map) = client.find_as::<ConfigMap>(&place())? else {
            return Ok(None);
        };
        let mut record = RolloutRecord::parse(map.text(KEY)).map_err(|error| {
            let error = printable(&error.to_string(), 200);
            Error::content(format!(
                "{}: {error}. If no rollout is going on, delete it",
                place()
            ))
        })?;
        record.object_version = Some(map.metadata.resource_version);
        Ok(Some(record))
    }

    fn parse(text: &str) -> Result<RolloutRecord, Error> {
        let value: Value = serde_json::from_str(text).map_err(Error::content)?;
        if value["version"] != VERSION {
            return Err(Error::content(format!(
                "a record of version {}, expected {VERSION}",
                value["version"]
            )));
        }
        serde_json::from_value(value).map_err(Error::content)
    }

    /// Returns whether this is the rollout that was shown to the operator.
    pub fn is_same(&self, other: &RolloutRecord) -> bool {
        (&self.begun, &self.goal, &self.way) == (&other.begun, &other.goal, &other.way)
    }

    fn is_same_run(&self, other: &RolloutRecord) -> bool {
        (self.run, &self.begun) == (other.run, &other.begun)
    }

    /// Returns whether the rollout is over, so that another one may begin.
    pub fn is_over(&self) -> bool {
        matches!(self.state, RolloutState::Aborted | RolloutState::Done)
    }

    /// Returns the step after this one.
    pub fn step_after(&self, step: NodeStep) -> NodeStep {
        let reboots = matches!(
            (&self.goal, &self.way),
            (Goal::Image { .. }, Way::InPlace(_))
        );
        match step {
            NodeStep::Cordon => NodeStep::Drain,
            NodeStep::Drain => NodeStep::Change,
            NodeStep::Change if reboots => NodeStep::Reboot,
            NodeStep::Change | NodeStep::Reboot => NodeStep::Return,
            NodeStep::Return | NodeStep::Keep | NodeStep::Uncordon => NodeStep::Uncordon,
        }
    }

    /// Returns whether nodes go back to the old image by themselves: what `bootstrapper update` has brought, they try first.
    pub fn has_trial(&self) -> bool {
        let is_image = matches!(self.goal, Goal::Image { .. });
        let is_own = |words: &[String]| words.join(" ").starts_with(UPDATE);
        is_image && matches!(&self.way, Way::InPlace(words) if is_own(words))
    }

    /// Writes the record. If another operator has only left a wish, takes it. Fails if another operator drives the rollout now.
    pub fn save(&mut self, client: &Client) -> Result<(), Error> {
        for _ in 0..TRIES {
            let mut map = json!({
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {
                    "name": NAME,
                    "namespace": NAMESPACE,
                    "labels": {"app.kubernetes.io/part-of": "firstlight"},
                },
                "data": {KEY: self.text()},
            });
            let saved = match &self.object_version {
                None => client.create(&place().collection(), &map),
                Some(version) => {
                    map["metadata"]["resourceVersion"] = version.as_str().into();
                    client.update(&place(), &map)
                }
            };
            match saved {
                Ok(saved) => {
                    self.object_version = Some(version_of(&saved).to_owned());
                    return Ok(());
                }
                Err(error) if error.is_conflict() || error.is_already_exists() => {
                    match RolloutRecord::find(client)? {
                        Some(other) if other.is_same_run(self) => {
                            self.wish = later(self.wish, other.wish);
                            self.object_version = other.object_version;
                        }
                        _ => break,
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Err(changed_by_another())
    }

    /// Reads what another operator wishes. Fails if another one drives the rollout now.
    pub fn refresh(&mut self, client: &Client) -> Result<(), Error> {
        match RolloutRecord::find(client)? {
            Some(other) if other.is_same_run(self) => {
                self.wish = other.wish;
                self.object_version = other.object_version;
                Ok(())
            }
            _ => Err(changed_by_another()),
        }
    }

    /// Leaves a wish for the operator who drives the rollout.
    pub fn leave(client: &Client, wish: RolloutWish) -> Result<(), Error> {
        let mut failed = None;
        client.modify_as(&place(), |map: ConfigMap, _| {
            let parsed = RolloutRecord::parse(map.text(KEY));
            let mut record = parsed.map_err(|error| failed = Some(error)).ok()?;
            record.wish = later(record.wish, Some(wish));
            Some(json!({"data": {KEY: record.text()}}))
        })?;
        failed.map_or(Ok(()), Err)
    }

    fn text(&self) -> String {
        format!("{:#}\n", json!(self))
    }

    /// Takes the place of the record of an earlier rollout.
    pub fn follow(&mut self, earlier: Option<RolloutRecord>) {
        self.run = 1;
        if let Some(earlier) = earlier {
            self.object_version = earlier.object_version;
            self.unsure = earlier.unsure;
        }
    }

    /// Returns the record of a rollout that is not over.
    pub fn needed(client: &Client) -> Result<RolloutRecord, Error> {
        match RolloutRecord::find(client)? {
            Some(record) if !record.is_over() => Ok(record),
            _ => Err(Error::blocked("there is no rollout that could go on")),
        }
    }
}

/// Returns which of two wishes counts: a pause does not take an abort back.
fn later(own: Option<RolloutWish>, other: Option<RolloutWish>) -> Option<RolloutWish> {
    match own {
        Some(RolloutWish::Abort) => own,
        _ => other.or(own),
    }
}

fn changed_by_another() -> Error {
    Error::Refused(format!(
        "{}: another operator has changed the rollout: see `firstlight rollout status`",
        place()
    ))
}

/// Returns the place of the record.
pub fn place() -> Object {
    CONFIG_MAPS.in_namespace(NAMESPACE).named(NAME)
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    fn record() -> RolloutRecord {
        let goal = Goal::Image {
            ids: vec!["ab".into()],
            name: "image 2".into(),
            policy: "{}".into(),
            old: vec!["cd".into()],
            was_accepted: false,
        };
        let mut record = RolloutRecord::new(goal, Way::InPlace(vec!["systemd-sysupdate".into()]));
        record.state = RolloutState::Stopped("x".into());
        record.wish = Some(RolloutWish::Pause);
        record.node = Some(Current {
            name: "n".into(),
            uid: "u".into(),
            is_control_plane: true,
            step: NodeStep::Return,
            was_cordoned: true,
            boot: "b".into(),
            had_it: false,
            others_had_it: 1,
            ready_before: 3,
            renewed: String::new(),
            tries: 1,
        });
        record
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let record = record();
        let text = json!(record).to_string();
        assert_eq!(RolloutRecord::parse(&text).unwrap(), record);
        let other = text.replace("\"version\":1", "\"version\":2");
        let error = RolloutRecord::parse(&other).unwrap_err().to_string();
        assert!(error.contains("version 2"), "{error}");
    }

    #[test]
    fn mutated_records_are_read_or_refused() {
        let text = json!(record()).to_string();
        for bytes in mutations(text.as_bytes(), 20_000) {
            let _ = RolloutRecord::parse(&String::from_utf8_lossy(&bytes));
        }
    }

    #[test]
    fn a_pause_does_not_take_an_abort_back() {
        let (pause, abort) = (Some(RolloutWish::Pause), Some(RolloutWish::Abort));
        assert_eq!(later(abort, pause), abort);
        assert_eq!(later(pause, abort), abort);
        assert_eq!(later(None, pause), pause);
        assert_eq!(later(pause, None), pause);
    }

    #[test]
    fn only_an_image_in_place_needs_a_reboot() {
        let mut record = record();
        assert_eq!(record.step_after(NodeStep::Change), NodeStep::Reboot);
        record.way = Way::Replaced;
        assert_eq!(record.step_after(NodeStep::Change), NodeStep::Return);
        record.way = Way::InPlace(vec![]);
        record.goal = Goal::Kubernetes {
            version: "v1.35.4".into(),
            components: "k8s-components-a".into(),
            drains: true,
        };
        assert_eq!(record.step_after(NodeStep::Change), NodeStep::Return);
    }
}
