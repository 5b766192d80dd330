//! The services of a cluster's control planes, brought into it: join service, key service, and what belongs to them.
//!
//! ```text
//!  render            the manifests ([`manifests`]), from the templates of charts/firstlight
//!    ▼
//!  try               every object by a dry run: what the server would refuse is told before anything is changed
//!    ▼
//!  save              what is there, into a dated folder; secrets are left out
//!    ▼
//!  apply             server-side, one after the other ──────── refused ──┐
//!    ▼                                                                   ▼
//!  wait              until every control plane runs both ──── time up ► roll back: as it was before, and new ones gone
//! ```
//!
//! Without a wait nothing is rolled back but a refusal: the operator keeps access to a cluster whose services never get ready.
//! A stop (the client's) leaves things as they are; the same command later goes on.
//!
//! Of the Kubernetes API the key service asks whose the token of a caller is, which is all that its account may; that of the join
//! service may do what a ticket needs.

pub mod migration;
mod owned;
mod render;

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use super::NAMESPACE;
use super::client::{self, Client, DAEMON_SETS, FIELD_MANAGER, Object, PODS, Selector};
use base::time;
use kms::ClusterKms;
use owned::owned;

pub use render::manifests;

/// The group of bootstrap tokens of tickets. Its members may ask for client certificates of kubelets, which the join service
/// approves for the ticket's node. Not kubeadm's group (NodeBootstrapTokenAuthGroup): for that Kubernetes approves the name of any
/// node. The chart gives it what a joining kubeadm reads, and lets the join service make tokens of no other.
pub const TICKET_GROUP: &str = "system:bootstrappers:firstlight:join-ticket";
/// Whom a service account's token must be made for with which the key service is asked.
pub const KEY_SERVICE_AUDIENCE: &str = "key-service";
/// The join service's account.
pub const JOIN_SERVICE_ACCOUNT: &str = "kube-system/join-service";
/// The classes of keys that the join service needs, and all that it has by default.
pub const JOIN_SERVICE_GRANT: &str = "disk,ssh,measurement";

/// What is mounted into the join service.
const JOIN_CONFIG: &str = "join-config";
/// Its key with the attestation policy; the value of before is kept beside it.
const ATTESTATION_CONFIG: &str = "attestationConfig";
const ATTESTATION_CONFIG_BACKUP: &str = "attestationConfig_backup";
/// How often readiness is looked at.
const INTERVAL: Duration = Duration::from_millis(500);
/// For each call of a roll-back, so that it happens although the time is up.
const ROLL_BACK_TIME: Duration = Duration::from_secs(30);

/// What the services are told.
pub struct Settings {
    /// A container image with `/join-service` and `/key-service`.
    pub image: String,
    /// The attestation variant of the cluster's nodes.
    pub variant: String,
    /// The attestation policy that nodes must meet, JSON.
    pub policy: String,
    /// What goes into the cluster ID beside the master secret: 32 bytes.
    pub measurement_salt: Vec<u8>,
    /// The master secret.
    pub kms: ClusterKms,
    /// [`NODE_PORT`], unless nodes were told otherwise.
    pub node_port: u16,
    /// The last day on which the join service opens disks that have no record, as `2027-01-31`; empty for never.
    pub migrate_until: String,
    /// What tells the join service which machines there are.
    pub metadata: MetadataService,
}

/// A cloud's metadata service, as [`Metadata::of`](cloud::Metadata::of) takes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetadataService {
    /// The cloud's name in lower case; none for no service: then machines of any name are let in, but no control planes.
    pub cloud: Option<String>,
    /// Where it is, as the control planes' pods reach it; none for its usual place.
    pub url: Option<String>,
}

impl Default for MetadataService {
    /// The one beside QEMU, at its usual place.
    fn default() -> MetadataService {
        MetadataService {
            cloud: Some("qemu".into()),
            url: None,
        }
    }
}

impl Settings {
    /// As values of the chart.
    fn values(&self) -> Value {
        let base64 = |bytes: &[u8]| BASE64_STANDARD.encode(bytes);
        json!({
            "image": self.image,
            "attestationVariant": self.variant,
            "attestationPolicy": self.policy,
            "measurementSalt": base64(&self.measurement_salt),
            "masterSecret": {"key": base64(self.kms.key().expose()), "salt": base64(self.kms.salt().expose())},
            "cloudProvider": self.metadata.cloud.as_deref().unwrap_or_default(),
            "joinService": {
                "nodePort": self.node_port,
                "migrateUntil": self.migrate_until,
                "metadata": self.metadata.url.as_deref().unwrap_or_default(),
            },
        })
    }
}

/// A part of what is brought in, which can be left as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The attestation policy: ConfigMap `join-config`.
    Policy,
    /// All the rest.
    Services,
}

impl Phase {
    /// `policy`, `services`; `attestationconfig` and `helm` are the old system's names of them.
    pub fn parse(name: &str) -> Option<Phase> {
        match name {
            "policy" | "attestationconfig" => Some(Phase::Policy),
            "services" | "helm" => Some(Phase::Services),
            _ => None,
        }
    }

    fn of(object: &Value) -> Phase {
        if object["metadata"]["name"] == JOIN_CONFIG {
            Phase::Policy
        } else {
            Phase::Services
        }
    }
}

/// How they are brought in.
pub struct Options<'a> {
    /// What is left as it is.
    pub skip: &'a [Phase],
    /// Where the folder with the manifests of before is made.
    pub backups: &'a Path,
    /// How long to wait until all is ready; none for not at all.
    pub wait: Option<Duration>,
}

/// What happens, for whoever watches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// From now on this is done or waited for; a phrase.
    Phase(String),
    /// This happened; a line.
    Line(String),
}

/// What came of it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// The objects that are new or different now.
    pub changed: Vec<String>,
    /// Where the manifests of before are, if there were any.
    pub backup: Option<PathBuf>,
}

/// Why the services are not, or not all, there.
#[derive(Debug)]
pub enum Error {
    /// A manifest cannot be made.
    Manifest(String),
    /// The API server said no, or nothing.
    Api(client::Error),
    /// The manifests of before cannot be saved.
    Backup(PathBuf, io::Error),
    /// They did not get ready: what was missing, and how long was waited.
    NotReady(Vec<String>, Duration),
    /// A failure after something was changed, which was therefore undone.
    RolledBack {
        /// The failure.
        why: Box<Error>,
        /// What could not be undone; none for all was.
        left: Vec<String>,
        /// Where the manifests of before are, if there were any.
        backup: Option<PathBuf>,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Manifest(problem) => write!(f, "a manifest cannot be made: {problem}"),
            Error::Api(error) => error.fmt(f),
            Error::Backup(path, error) => write!(
                f,
                "cannot save the manifests of before: {}: {error}",
                path.display()
            ),
            Error::NotReady(missing, after) => {
                write!(
                    f,
                    "the services are not ready after {} s: {}",
                    after.as_secs(),
                    missing.join("; ")
                )
            }
            Error::RolledBack { why, left, backup } => {
                write!(f, "{why}; ")?;
                match left.is_empty() {
                    true => f.write_str("all is as it was before")?,
                    false => write!(f, "it could not all be undone: {}", left.join("; "))?,
                }
                match backup {
                    Some(path) => write!(f, " (the manifests of before are in {})", path.display()),
                    None => Ok(()),
                }
            }
        }
    }
}

impl std::error::Error for Error {}

impl From<client::Error> for Error {
    fn from(error: client::Error) -> Error {
        Error::Api(error)
    }
}

/// An object that is wanted, and the one that is there.
struct Change {
    at: Object,
    wanted: Value,
    before: Option<Value>,
}

/// Brings the services into the cluster, or to another state: see the module's picture.
pub fn apply(
    client: &Client,
    settings: &Settings,
    options: &Options,
    report: &mut dyn FnMut(Report),
) -> Result<Applied, Error> {
    report(Report::Phase(
        "asking the API server whether it would take the services".into(),
    ));
    let changes = plan(client, manifests_without(settings, options.skip)?)?;
    let backup = save(&changes, options.backups)?;
    if let Some(path) = &backup {
        report(Report::Line(format!(
            "the manifests of before are in {}",
            path.display()
        )));
    }
    let mut changed = Vec::new();
    let mut done = 0;
    let outcome = carry_out(client, &changes, &mut done, &mut changed, report).and_then(|()| {
        match options.wait {
            Some(time) => wait_ready(client, &changes, time, report),
            None => Ok(()),
        }
    });
    match outcome {
        Ok(()) => Ok(Applied { changed, backup }),
        Err(Error::Api(client::Error::Stopped)) => Err(client::Error::Stopped.into()),
        Err(why) => {
            report(Report::Phase("rolling back".into()));
            // the one that failed may have been carried out
            let touched = &changes[..changes.len().min(done + 1)];
            let left = roll_back(&client.within(ROLL_BACK_TIME), touched);
            Err(Error::RolledBack {
                why: Box::new(why),
                left,
                backup,
            })
        }
    }
}

/// The [`manifests`] but for those of these phases.
pub fn manifests_without(settings: &Settings, skip: &[Phase]) -> Result<Vec<Value>, Error> {
    Ok(manifests(settings)?
        .into_iter()
        .filter(|object| !skip.contains(&Phase::of(object)))
        .collect())
}

/// What is there, and whether what is wanted would be taken.
fn plan(client: &Client, wanted: Vec<Value>) -> Result<Vec<Change>, Error> {
    let mut changes = Vec::new();
    for mut wanted in wanted {
        let at = Object::of(&wanted)?;
        let before = client.find(&at)?;
        if at.name() == JOIN_CONFIG {
            keep_policy(&mut wanted, before.as_ref());
        }
        client.try_apply(&at, &wanted)?;
        changes.push(Change { at, wanted, before });
    }
    Ok(changes)
}

/// A policy that is replaced stays beside the new one, where the old system has it too.
fn keep_policy(wanted: &mut Value, before: Option<&Value>) {
    let data = |key: &str| {
        before
            .and_then(|before| before.pointer(&format!("/data/{key}")))
            .cloned()
    };
    let kept = match data(ATTESTATION_CONFIG) {
        Some(policy) if policy != wanted["data"][ATTESTATION_CONFIG] => Some(policy),
        _ => data(ATTESTATION_CONFIG_BACKUP),
    };
    if let Some(policy) = kept {
        wanted["data"][ATTESTATION_CONFIG_BACKUP] = policy;
    }
}

fn carry_out(
    client: &Client,
    changes: &[Change],
    done: &mut usize,
    changed: &mut Vec<String>,
    report: &mut dyn FnMut(Report),
) -> Result<(), Error> {
    for change in changes {
        report(Report::Phase(format!("applying {}", change.at)));
        let after = client.apply(&change.at, &change.wanted)?;
        *done += 1;
        let version = |object: &Value| object["metadata"]["resourceVersion"].clone();
        let what = match &change.before {
            None => "new",
            Some(before) if version(before) != version(&after) => "changed",
            Some(_) => continue,
        };
        changed.push(change.at.to_string());
        report(Report::Line(format!("{}: {what}", change.at)));
    }
    Ok(())
}

/// Waits until each DaemonSet runs its newest pods on every node that it is for, and there is one.
fn wait_ready(
    client: &Client,
    changes: &[Change],
    time: Duration,
    report: &mut dyn FnMut(Report),
) -> Result<(), Error> {
    let started = Instant::now();
    let sets: Vec<_> = changes
        .iter()
        .filter(|change| *change.at.resource() == DAEMON_SETS)
        .collect();
    let mut said = BTreeSet::new();
    let mut phase = String::new();
    loop {
        let mut missing = Vec::new();
        for set in &sets {
            missing.extend(missing_of(set.at.name(), &client.get(&set.at)?));
        }
        if missing.is_empty() {
            return Ok(());
        }
        let troubles = troubles(client, &sets)?;
        for trouble in &troubles {
            if said.insert(trouble.clone()) {
                report(Report::Line(trouble.clone()));
            }
        }
        if started.elapsed() >= time {
            missing.extend(troubles);
            return Err(Error::NotReady(missing, started.elapsed()));
        }
        let text = format!("waiting for {}", missing.join(", "));
        if text != phase {
            report(Report::Phase(text.clone()));
            phase = text;
        }
        if client.stopped_within(INTERVAL) {
            return Err(client::Error::Stopped.into());
        }
    }
}

/// `join-service: 1 of 3 ready`, unless all is well.
fn missing_of(name: &str, set: &Value) -> Option<String> {
    let number = |pointer: &str| set.pointer(pointer).and_then(Value::as_u64).unwrap_or(0);
    if number("/status/observedGeneration") < number("/metadata/generation") {
        return Some(format!(
            "{name}: the controller manager has not seen it yet"
        ));
    }
    let wanted = number("/status/desiredNumberScheduled");
    let ready = number("/status/numberAvailable").min(number("/status/updatedNumberScheduled"));
    match wanted {
        0 => Some(format!("{name}: there is no control plane for it")),
        _ if ready < wanted => Some(format!("{name}: {ready} of {wanted} ready")),
        _ => None,
    }
}

/// What the kubelets say of containers that do not run.
fn troubles(client: &Client, sets: &[&Change]) -> Result<Vec<String>, Error> {
    let names: Vec<_> = sets.iter().map(|set| set.at.name()).collect();
    let selector = Selector::labels(&format!("k8s-app in ({})", names.join(",")));
    let pods = client.list(&PODS.in_namespace(NAMESPACE), &selector)?;
    Ok(pods.items.iter().flat_map(troubles_of).collect())
}

fn troubles_of(pod: &Value) -> Vec<String> {
    /// These pass by themselves.
    const NORMAL: [&str; 2] = ["ContainerCreating", "PodInitializing"];
    let text = |value: &Value, pointer: &str| {
        value
            .pointer(pointer)
            .and_then(Value::as_str)
            .unwrap_or("")
            .to_owned()
    };
    let (name, node) = (text(pod, "/metadata/name"), text(pod, "/spec/nodeName"));
    let mut troubles = Vec::new();
    for status in pod
        .pointer("/status/containerStatuses")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        let reason = text(status, "/state/waiting/reason");
        if reason.is_empty() || NORMAL.contains(&reason.as_str()) {
            continue;
        }
        let mut trouble = format!("pod {name} on {node}: {reason}");
        let message = [
            text(status, "/lastState/terminated/message"),
            text(status, "/state/waiting/message"),
        ];
        if let Some(message) = message.iter().find(|message| !message.is_empty()) {
            trouble += &format!(": {message:.500}");
        }
        if let Some(code) = status.pointer("/lastState/terminated/exitCode") {
            trouble += &format!(" (exit code {code})");
        }
        troubles.push(trouble);
    }
    for condition in pod
        .pointer("/status/conditions")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        if condition["type"] == "PodScheduled" && condition["status"] == "False" {
            troubles.push(format!("pod {name}: {}", text(condition, "/message")));
        }
    }
    troubles
}

/// Makes everything as it was, the last one first; what did not work.
fn roll_back(client: &Client, changes: &[Change]) -> Vec<String> {
    let mut left = Vec::new();
    for change in changes.iter().rev() {
        let undone = match &change.before {
            None => client.delete_if_there(&change.at).map(|_| ()),
            Some(before) => restore(client, &change.at, before),
        };
        if let Err(error) = undone {
            left.push(error.to_string());
        }
    }
    left
}

fn restore(client: &Client, at: &Object, before: &Value) -> Result<(), client::Error> {
    // what was ours is applied again, so that the server's record of it is right too; the rest was not touched
    if let Some(ours) = owned(before, FIELD_MANAGER) {
        return client.apply(at, &ours).map(|_| ());
    }
    let mut old = before.clone();
    if let Some(metadata) = old["metadata"].as_object_mut() {
        // whatever is there now
        metadata.remove("resourceVersion");
    }
    client.update(at, &old).map(|_| ())
}

/// Puts what is there into a folder of its own, as manifests that `kubectl apply --server-side` takes. No folder for nothing.
fn save(changes: &[Change], backups: &Path) -> Result<Option<PathBuf>, Error> {
    // the operator has the master secret in a file already
    let old = || {
        changes
            .iter()
            .filter(|change| change.wanted["kind"] != "Secret")
    };
    if old().all(|change| change.before.is_none()) {
        return Ok(None);
    }
    let folder = backups.join(format!("firstlight-manifests-{}", stamp(SystemTime::now())));
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |error| Error::Backup(path, error)
    };
    fs::create_dir_all(backups).map_err(failed(backups))?;
    let folder = make_folder(&folder).map_err(failed(&folder))?;
    for (number, change) in old().enumerate() {
        let Some(before) = &change.before else {
            continue;
        };
        let kind = change.wanted["kind"]
            .as_str()
            .unwrap_or_default()
            .to_lowercase();
        let path = folder.join(format!("{number:02}-{kind}-{}.json", change.at.name()));
        let manifest = format!(
            "{:#}\n",
            owned(before, FIELD_MANAGER).unwrap_or_else(|| without_status(before))
        );
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path);
        let written = file.and_then(|mut file| {
            file.write_all(manifest.as_bytes())
                .and_then(|()| file.sync_all())
        });
        written.map_err(failed(&path))?;
    }
    Ok(Some(folder))
}

/// A second run in the same second has a number.
fn make_folder(wanted: &Path) -> io::Result<PathBuf> {
    let mut path = wanted.to_owned();
    for number in 2.. {
        match DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < 100 => {}
            made => return made.map(|()| path),
        }
        path = PathBuf::from(format!("{}-{number}", wanted.display()));
    }
    Ok(path)
}

/// What the server adds is left out.
fn without_status(object: &Value) -> Value {
    let mut object = object.clone();
    if let Some(fields) = object.as_object_mut() {
        fields.remove("status");
    }
    if let Some(metadata) = object
        .pointer_mut("/metadata")
        .and_then(Value::as_object_mut)
    {
        for field in [
            "managedFields",
            "resourceVersion",
            "uid",
            "creationTimestamp",
            "generation",
        ] {
            metadata.remove(field);
        }
    }
    object
}

/// `20261121T115500Z`: ISO 8601, basic format, UTC.
fn stamp(at: SystemTime) -> String {
    time::seconds(at).replace(['-', ':'], "")
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::crypto::Secret;

    pub fn settings() -> Settings {
        Settings {
            image: "example.com/firstlight:1".into(),
            variant: "qemu-vtpm".into(),
            policy: r#"{"measurements":{"15":"00"}}"#.into(),
            measurement_salt: vec![1; 32],
            kms: ClusterKms::new(Secret::new(vec![2; 32]), Secret::new(vec![3; 32])).unwrap(),
            node_port: proto::join::NODE_PORT,
            migrate_until: String::new(),
            metadata: MetadataService::default(),
        }
    }

    #[test]
    fn a_date_is_that_of_the_calendar() {
        let at = |seconds| stamp(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "19700101T000000Z");
        assert_eq!(at(951_782_399), "20000228T235959Z");
        assert_eq!(at(951_782_400), "20000229T000000Z");
        assert_eq!(at(1_798_761_599), "20261231T235959Z");
        assert_eq!(at(4_107_542_400), "21000301T000000Z");
    }

    #[test]
    fn a_policy_that_is_replaced_is_kept_and_so_is_one_that_was_kept() {
        let kept = |before: Value| {
            let mut wanted = json!({"data": {"attestationConfig": "new"}});
            keep_policy(&mut wanted, Some(&before));
            wanted["data"]["attestationConfig_backup"].clone()
        };
        assert_eq!(
            kept(
                json!({"data": {"attestationConfig": "old", "attestationConfig_backup": "older"}})
            ),
            "old"
        );
        assert_eq!(
            kept(
                json!({"data": {"attestationConfig": "new", "attestationConfig_backup": "older"}})
            ),
            "older"
        );
        assert_eq!(
            kept(json!({"data": {"attestationConfig": "new"}})),
            Value::Null
        );
    }

    #[test]
    fn a_set_is_ready_when_every_node_has_its_newest_pod() {
        let missing = |generation, status: Value| {
            missing_of(
                "a",
                &json!({"metadata": {"generation": generation}, "status": status}),
            )
        };
        let status = |observed, desired, updated, available| {
            json!({"observedGeneration": observed, "desiredNumberScheduled": desired,
                "updatedNumberScheduled": updated, "numberAvailable": available})
        };
        assert_eq!(missing(2, status(2, 3, 3, 3)), None);
        assert!(
            missing(2, status(1, 3, 3, 3))
                .unwrap()
                .contains("has not seen it")
        );
        assert_eq!(missing(2, status(2, 3, 1, 3)).unwrap(), "a: 1 of 3 ready");
        assert_eq!(missing(2, status(2, 3, 3, 0)).unwrap(), "a: 0 of 3 ready");
        assert!(
            missing(2, status(2, 0, 0, 0))
                .unwrap()
                .contains("no control plane")
        );
    }

    #[test]
    fn trouble_is_said_with_its_reason() {
        let pod = json!({
            "metadata": {"name": "a-1"}, "spec": {"nodeName": "n"},
            "status": {
                "containerStatuses": [
                    {"state": {"waiting": {"reason": "ContainerCreating"}}},
                    {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}},
                    {"state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                        "lastState": {"terminated": {"exitCode": 1}}},
                ],
                "conditions": [{"type": "PodScheduled", "status": "False", "message": "no node"}],
            },
        });
        assert_eq!(
            troubles_of(&pod),
            [
                "pod a-1 on n: ImagePullBackOff: no such image",
                "pod a-1 on n: CrashLoopBackOff: back-off (exit code 1)",
                "pod a-1: no node"
            ]
        );
        assert!(troubles_of(&json!({})).is_empty());
    }
}
