//! Installs the services of a cluster's control planes: the join service, the key service, and
//! their further objects.
//!
//! ```text
//!  render            the manifests ([`manifests`]), from the templates of charts/firstlight
//!    ▼
//!  dry run           of every object: what the server refuses is reported before any change
//!    ▼
//!  back up           the present objects into a dated folder, without secrets
//!    ▼
//!  apply             server-side, one after the other ──────── refused ──┐
//!    ▼                                                                   ▼
//!  wait              until every control plane runs both ─── timeout ─► roll back: restore the present objects, and
//!    ▼                                                                   delete new ones
//!  clean up          delete Secrets that have the master secret in another form than wanted, and kubeadm's bindings
//!                    by which kube-controller-manager approves certificates of kubelets
//! ```
//!
//! A cluster whose master secret is not encrypted runs through the picture twice ([`master_secret`]).
//!
//! Without a wait, only a refusal causes a rollback: the operator keeps access to a cluster whose
//! services never become ready. A stop of the client leaves everything as it is; the same command
//! can continue later.
//!
//! The account of the key service may ask the API server for the owner of a caller's token, and on
//! which node a volume is. The account of the join service may do what a ticket needs.

mod before;
pub mod grants;
mod kept;
pub mod kubeadm_bindings;
pub mod master_secret;
pub mod migration;
mod owned;
mod render;
mod role_records;

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;

use super::NAMESPACE;
use super::client::{
    self, CONFIG_MAPS, Client, DAEMON_SETS, FIELD_MANAGER, NODES, Object, PODS, Selector,
    VALIDATING_ADMISSION_POLICIES, VALIDATING_ADMISSION_POLICY_BINDINGS,
};
use super::objects::{ConfigMap, NodeObject, ObjectMeta, Workload};
use super::readiness;
use super::wrapping_key::Undecipherable;
use base::master_secret::MasterSecret;
use base::time;
use master_secret::{MasterSecretStorage, Stored};
use owned::owned;

/// The group of the bootstrap tokens of tickets. Its members may request client certificates of
/// kubelets, which the member controller approves for the ticket's node. It is not kubeadm's group
/// (NodeBootstrapTokenAuthGroup), because Kubernetes approves any node's name for that. The chart
/// gives the group the read access that a joining kubeadm needs, and permits the join service to
/// create tokens of this group only.
pub const TICKET_GROUP: &str = "system:bootstrappers:firstlight:join-ticket";
/// The audience of the service account tokens for the key service.
pub const KEY_SERVICE_AUDIENCE: &str = "key-service";
/// The join service's account.
pub const JOIN_SERVICE_ACCOUNT: &str = "kube-system/join-service";
/// The member controller's account.
pub const MEMBER_CONTROLLER_ACCOUNT: &str = "kube-system/member-controller";
/// The classes of keys that the join service needs. By default, it gets no others.
pub const JOIN_SERVICE_GRANT: &str = "disk,ssh,measurement";

/// The admission policies of the chart, each with what is open without it. The first two limit accounts of our own.
const OPEN_WITHOUT: [(&str, &str); 14] = [
    (
        "join-service",
        "every ConfigMap of kube-system (to the account of the join service)",
    ),
    (
        "member-controller",
        "every ConfigMap of kube-system (to the account of the member controller)",
    ),
    (
        "firstlight-objects",
        "the Services, Leases and rollouts of Firstlight",
    ),
    (
        "firstlight-controllers",
        "tokens of Kubernetes' controllers",
    ),
    (
        "firstlight-nodes",
        "the role, the attestation and the addresses of nodes, and with a role every disk key",
    ),
    ("firstlight-pods", "pods with the labels of the services"),
    (
        "firstlight-deletions",
        "the deletion of the services' pods, and of Nodes of control planes",
    ),
    (
        "firstlight-workers",
        "pods of etcd on workers, which stop kubeadm",
    ),
    ("firstlight-endpoints", "the endpoints of the services"),
    (
        "firstlight-accounts",
        "tokens and roles of the services' accounts",
    ),
    (
        "firstlight-records",
        "records of nodes, and bootstrap tokens",
    ),
    (
        "firstlight-volumes",
        "the annotation by which a volume gets the key of another one",
    ),
    (
        "firstlight-addresses",
        "connections to the addresses and ports of nodes",
    ),
    ("firstlight-removed-nodes", "the return of removed nodes"),
];
/// The names of the policies that limit everybody.
pub const ADMISSION_POLICIES: [&str; 12] = {
    let mut names = [""; 12];
    let mut index = 0;
    while index < names.len() {
        names[index] = OPEN_WITHOUT[index + 2].0;
        index += 1;
    }
    names
};

/// The ConfigMap in kube-system with the collateral that the join services have fetched.
pub const COLLATERAL: &str = "join-collateral";
/// The Lease in kube-system of the member controller that watches the nodes.
pub const WATCH: &str = "join-watch";
/// Where the master secret may still be after its plain Secret was deleted.
const STILL_PLAIN: &str = "warning: the master secret is still in plaintext in backups of etcd from before, in etcd's file until you \
    defragment it, and in Helm's Secrets sh.helm.release.v1.… of earlier releases: destroy these copies \
    (docs/services.md#the-master-secret-in-the-cluster)";
/// The ConfigMap that is mounted into the join service.
const JOIN_CONFIG: &str = "join-config";
/// Its key with the attestation policy. The previous policy is kept under the second key.
const ATTESTATION_CONFIG: &str = "attestationConfig";
const ATTESTATION_CONFIG_BACKUP: &str = "attestationConfig_backup";
/// Its keys with what the operators of the cluster have signed. The values of the chart have the same names.
const POLICY_STATEMENT: &str = "policyStatement";
const POLICY_SIGNATURES: &str = "policySignatures";
const OPERATOR_CHANGES: &str = "operatorChanges";
/// Its binary key with the measurement salt.
const MEASUREMENT_SALT: &str = "measurementSalt";
/// How often a change of the policy is tried again if somebody else has changed it.
const POLICY_TRIES: usize = 8;
/// How often readiness is checked.
const INTERVAL: Duration = Duration::from_millis(500);
/// The timeout of each call of a rollback. It starts even if the deadline has passed.
const ROLL_BACK_TIME: Duration = Duration::from_secs(30);

/// The settings of the services.
pub struct ServiceSettings {
    /// A container image with `/join-service`, `/key-service` and `/member-controller`.
    pub image: String,
    /// The attestation variant of the cluster's nodes.
    pub variant: String,
    /// The attestation policy of nodes, JSON.
    pub policy: String,
    /// The measurement salt, 32 bytes. The cluster ID is derived from it and the master secret.
    pub measurement_salt: Vec<u8>,
    /// The master secret.
    pub kms: MasterSecret,
    /// How the cluster stores it.
    pub keeping: MasterSecretStorage,
    /// The node port of the join service. If this value or one of the next ones is `None`, the
    /// cluster keeps its present value, and a new cluster gets the chart's.
    pub node_port: Option<u16>,
    /// The last day on which the join service opens disks without a record, such as `2027-01-31`.
    /// Empty for never.
    pub migrate_until: Option<String>,
    /// The last day on which the key service gives keys of volumes to clients without a token. Empty
    /// for never.
    pub old_clients_until: Option<String>,
    /// The keys that each client of the key service may get.
    pub grants: Option<String>,
    /// The metadata service that lists the machines for the join service.
    pub metadata: Option<MetadataService>,
    /// Whether the join service refuses nodes of the old form of attested TLS, whatever the policy
    /// says.
    pub require_strong: Option<bool>,
    /// In how many seconds each member is asked for fresh evidence. Empty for never.
    pub watch: Option<String>,
    /// What happens to a node that is refused then: `report`, `taint` or `cordon`.
    pub watch_action: Option<String>,
    /// The URL of the issuer of attestation results. Empty for none.
    pub watch_issuer: Option<String>,
    /// What the operators of the cluster have signed.
    pub signed: SignedPolicy,
}

/// What the operators of a cluster have signed (docs/day-two/signed-policies.md). The texts are empty in a cluster without operators.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SignedPolicy {
    /// The statement that names the policy.
    pub statement: String,
    /// The signatures of the statement.
    pub signatures: String,
    /// The changes of the list of operators: a JSON list.
    pub operator_changes: String,
}

/// A cloud's metadata service, with the arguments of `cloud_api::metadata`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetadataService {
    /// The cloud's name in lower case. If `None`, a worker may have any name, and no control plane
    /// can join.
    pub cloud: Option<String>,
    /// The URL as the control planes' pods reach it. If `None`, the cloud's default.
    pub url: Option<String>,
}

impl Default for MetadataService {
    /// Returns QEMU's metadata service at its default URL.
    fn default() -> MetadataService {
        MetadataService {
            cloud: Some(base::machines::DEFAULT.name().into()),
            url: None,
        }
    }
}

impl ServiceSettings {
    /// Returns the values that the operator has chosen; without them, the cluster's values stay.
    fn chosen(&self) -> kept::ChartValues {
        let mut values = kept::ChartValues::new();
        values.extend(self.node_port.map(|port| (kept::NODE_PORT, port.into())));
        let migrate_until = self.migrate_until.as_deref();
        values.extend(migrate_until.map(|day| (kept::MIGRATE_UNTIL, day.into())));
        let old_clients = self.old_clients_until.as_deref();
        values.extend(old_clients.map(|day| (kept::OLD_CLIENTS_UNTIL, day.into())));
        let grants = self.grants.as_deref();
        values.extend(grants.map(|grants| (kept::GRANTS, grants.into())));
        if let Some(MetadataService { cloud, url }) = &self.metadata {
            let text = |text: &Option<String>| text.as_deref().unwrap_or_default().into();
            values.extend([(kept::CLOUD, text(cloud)), (kept::METADATA, text(url))]);
        }
        let form = |strong| if strong { "strong" } else { "" };
        values.extend(
            self.require_strong
                .map(|strong| (kept::REQUIRE, form(strong).into())),
        );
        let watch = self.watch.as_deref();
        values.extend(watch.map(|seconds| (kept::WATCH, seconds.into())));
        let action = self.watch_action.as_deref();
        values.extend(action.map(|action| (kept::WATCH_ACTION, action.into())));
        // there are no results without a watch
        let is_off = watch == Some("");
        let issuer = self.watch_issuer.as_deref().or(is_off.then_some(""));
        values.extend(issuer.map(|url| (kept::WATCH_ISSUER, url.into())));
        values
    }

    /// Returns the settings as values of the chart. `kept` has those of the cluster that stay.
    fn values(&self, stored: &Stored, kept: kept::ChartValues) -> Value {
        let base64 = |bytes: &[u8]| BASE64_STANDARD.encode(bytes);
        let mut all = kept;
        all.extend(self.chosen());
        let mut values = kept::nested(&all);
        values["image"] = self.image.as_str().into();
        values["attestationVariant"] = self.variant.as_str().into();
        values["attestationPolicy"] = self.policy.as_str().into();
        values["measurementSalt"] = base64(&self.measurement_salt).into();
        values[POLICY_STATEMENT] = self.signed.statement.as_str().into();
        values[POLICY_SIGNATURES] = self.signed.signatures.as_str().into();
        values[OPERATOR_CHANGES] = self.signed.operator_changes.as_str().into();
        (values["masterSecret"], values["keyService"]["kms"]) = stored.values();
        values
    }

    /// Returns the objects of the services, in the order of their creation.
    fn objects(&self, stored: &Stored, kept: kept::ChartValues) -> Result<Vec<Value>, Error> {
        render::objects(self.values(stored, kept)).map_err(Error::Manifest)
    }
}

/// A part of the installation, which can be skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The attestation policy: ConfigMap `join-config`.
    Policy,
    /// Everything else.
    Services,
}

impl Phase {
    /// Parses `policy` or `services`; `attestationconfig` and `helm` are Constellation's names of
    /// them.
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

/// The options of an installation.
pub struct Options<'a> {
    /// The parts to skip.
    pub skip: &'a [Phase],
    /// The directory in which the backup folder is created.
    pub backups: &'a Path,
    /// How long to wait until the services are ready. If `None`, do not wait.
    pub wait: Option<Duration>,
    /// Whether only to ask the API server, and to change nothing.
    pub is_dry_run: bool,
    /// Whether a Secret that has the master secret in another form stays, because a move from
    /// Constellation can still be undone.
    pub keeps_superseded: bool,
    /// Nodes without a record that are control planes, as the operator says.
    pub control_planes: &'a [String],
}

/// A progress report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstallProgress {
    /// The present action, as a phrase.
    Phase(String),
    /// An event, as a line.
    Line(String),
}

/// The result of an installation.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// The objects that were created or changed.
    pub changed: Vec<String>,
    /// The backup folder, if there was anything to back up.
    pub backup: Option<PathBuf>,
}

/// Why the installation failed.
#[derive(Debug)]
pub enum Error {
    /// A manifest cannot be rendered.
    Manifest(render::RenderError),
    /// These nodes have the label of control planes, and nothing proves that they are.
    Unproven(Vec<String>),
    /// The master secret is not that of the cluster.
    MasterSecret(Undecipherable),
    /// The API server refused a request or did not answer.
    Api(client::Error),
    /// The backup cannot be written.
    Backup(PathBuf, io::Error),
    /// The services did not become ready: what is missing, and how long it waited.
    NotReady(Vec<String>, Duration),
    /// An error after the first change. The changes were undone.
    RolledBack {
        /// The error.
        why: Box<Error>,
        /// What could not be undone. Empty if everything was.
        left: Vec<String>,
        /// The backup folder, if there was anything to back up.
        backup: Option<PathBuf>,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Manifest(problem) => write!(f, "a manifest cannot be rendered: {problem}"),
            Error::Unproven(nodes) => write!(
                f,
                "{} has the label of a control plane, and no record says that it is one: the services' pods would run there, and get \
                 every disk key. If it is none, remove the label: kubectl label node {} node-role.kubernetes.io/control-plane-. If it \
                 is one that joined before records existed, repeat the command with --record-control-plane {}",
                nodes.join(" and "),
                nodes.join(" "),
                nodes.join(" --record-control-plane "),
            ),
            Error::MasterSecret(why) => write!(
                f,
                "this is the master secret of another cluster, and would open no disk of this one: {why}"
            ),
            Error::Api(error) => error.fmt(f),
            Error::Backup(path, error) => write!(
                f,
                "cannot save the previous manifests: {}: {error}",
                path.display()
            ),
            Error::NotReady(missing, after) => {
                write!(
                    f,
                    "the services are not ready after {} s: {}",
                    (*after + Duration::from_millis(500)).as_secs(),
                    missing.join("; ")
                )
            }
            Error::RolledBack { why, left, backup } => {
                write!(f, "{why}; ")?;
                if left.is_empty() {
                    f.write_str("everything was restored")?
                } else {
                    write!(f, "some changes could not be undone: {}", left.join("; "))?
                }
                match backup {
                    Some(path) => write!(f, " (the previous manifests are in {})", path.display()),
                    None => Ok(()),
                }
            }
        }
    }
}

impl std::error::Error for Error {}

impl From<role_records::Error> for Error {
    fn from(error: role_records::Error) -> Error {
        match error {
            role_records::Error::Api(error) => Error::Api(error),
            role_records::Error::Unproven(nodes) => Error::Unproven(nodes),
        }
    }
}

impl From<master_secret::Error> for Error {
    fn from(error: master_secret::Error) -> Error {
        match error {
            master_secret::Error::Api(error) => Error::Api(error),
            master_secret::Error::Other(why) => Error::MasterSecret(why),
        }
    }
}

impl From<client::Error> for Error {
    fn from(error: client::Error) -> Error {
        Error::Api(error)
    }
}

/// A wanted object and the present one.
struct Change {
    at: Object,
    wanted: Value,
    before: Option<Value>,
    /// The answer of the dry run.
    after: Value,
    /// Whether the pods of a DaemonSet of another system are replaced as a whole: with fields of both systems, such as two kinds of one
    /// volume, no pod would start.
    replaces: bool,
}

impl Change {
    /// Returns whether the object would change. The record of field owners is not compared.
    fn is_needed(&self) -> bool {
        let bare = |object: &Value| {
            let mut object = object.clone();
            for field in ["managedFields", "resourceVersion", "generation"] {
                if let Some(metadata) = object["metadata"].as_object_mut() {
                    metadata.remove(field);
                }
            }
            object
        };
        (self.before.as_ref()).is_none_or(|before| bare(before) != bare(&self.after))
    }
}

/// Installs the services, or changes them to these settings. See the picture in the module's
/// documentation.
pub fn apply(
    client: &Client,
    settings: &ServiceSettings,
    options: &Options,
    report: &mut dyn FnMut(InstallProgress),
) -> Result<Applied, Error> {
    let (first, last) = settings.keeping.steps(client, &settings.kms)?;
    let has_services = !options.skip.contains(&Phase::Services);
    if has_services {
        let mut tell = |line| report(InstallProgress::Line(line));
        let dry = options.is_dry_run;
        role_records::write(client, options.control_planes, dry, &mut tell)?;
    }
    let moves = !options.is_dry_run && has_services;
    let Some(first) = first.filter(|_| moves) else {
        let mut applied = install(client, settings, &last, options, report)?;
        if moves {
            clean_up(client, options, &mut applied, report)?;
        }
        return Ok(applied);
    };
    report(InstallProgress::Line(
        "the master secret in the Kubernetes API is not encrypted: each control plane gets the wrapping key first".into(),
    ));
    let mut applied = install(client, settings, &first, options, report)?;
    if options.wait.is_none() {
        report(InstallProgress::Line(
            "the master secret stays as it is until `firstlight apply` runs without --skip-wait"
                .into(),
        ));
        return Ok(applied);
    }
    report(InstallProgress::Line(
        "each control plane has the wrapping key: the key service gets the encrypted master secret"
            .into(),
    ));
    let second = install(client, settings, &last, options, report)?;
    applied.changed.extend(second.changed);
    clean_up(client, options, &mut applied, report)?;
    Ok(applied)
}

/// Deletes what nothing needs any more when the pods of this version are ready: kubeadm's bindings,
/// because a member controller approves what members need, and other forms of the master secret.
fn clean_up(
    client: &Client,
    options: &Options,
    applied: &mut Applied,
    report: &mut dyn FnMut(InstallProgress),
) -> Result<(), Error> {
    // until the admission policies held, an agent could still write the label
    role_records::write(client, &[], true, &mut |_| {})?;
    if options.wait.is_none() {
        return Ok(());
    }
    let mut deleted = kubeadm_bindings::delete(client)?;
    if !options.keeps_superseded {
        deleted.extend(master_secret::delete_superseded(client)?);
    }
    for object in deleted {
        report(InstallProgress::Line(format!("{object}: deleted")));
        if object.name() == master_secret::PLAIN {
            report(InstallProgress::Line(STILL_PLAIN.into()));
        }
        applied.changed.push(object.to_string());
    }
    Ok(())
}

/// Does one step: the key service reads `stored` after it.
fn install(
    client: &Client,
    settings: &ServiceSettings,
    stored: &Stored,
    options: &Options,
    report: &mut dyn FnMut(InstallProgress),
) -> Result<Applied, Error> {
    report(InstallProgress::Phase(
        "asking the API server whether it accepts the services".into(),
    ));
    let mut kept = kept::present(client)?;
    let chosen = settings.chosen();
    kept.retain(|name, _| !chosen.contains_key(name));
    if !options.skip.contains(&Phase::Services) {
        for (name, value) in &kept {
            report(InstallProgress::Line(format!(
                "stays as it is: {name} {value}"
            )));
        }
    }
    let wanted = without(settings.objects(stored, kept)?, options.skip);
    let changes = plan(client, wanted, report)?;
    for change in &changes {
        let before = change.before.iter();
        for sentence in before.flat_map(|before| kept::from_chart(before, &change.after)) {
            report(InstallProgress::Line(sentence));
        }
    }
    if options.is_dry_run {
        let changed = changes.iter().filter(|change| change.is_needed());
        return Ok(Applied {
            changed: changed.map(|change| change.at.to_string()).collect(),
            backup: None,
        });
    }
    let backup = save(&changes, options.backups)?;
    if let Some(path) = &backup {
        report(InstallProgress::Line(format!(
            "the previous manifests are in {}",
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
            report(InstallProgress::Phase("rolling back".into()));
            // The API server may have executed the request that failed.
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

/// Returns the objects of the services of a new cluster, in the order of their creation.
pub fn manifests(settings: &ServiceSettings) -> Result<Vec<Value>, Error> {
    let stored = settings.keeping.of_new(&settings.kms);
    settings.objects(
        &stored.map_err(Error::MasterSecret)?,
        kept::ChartValues::new(),
    )
}

pub use before::Before;
pub use kept::{
    Maker, RefusedOldClients, all_old_clients, maker, old_clients, old_clients_until, option_of,
    variant as present_variant, words as command_line,
};
pub use render::RenderError;

/// Returns the attestation policy of a cluster, JSON; `None` if it has none.
pub fn present_policy(client: &Client) -> Result<Option<String>, client::Error> {
    Ok(join_config(client)?.data.remove(ATTESTATION_CONFIG))
}

fn join_config(client: &Client) -> Result<ConfigMap, client::Error> {
    let at = CONFIG_MAPS.in_namespace(NAMESPACE).named(JOIN_CONFIG);
    Ok(client.find_as(&at)?.unwrap_or_default())
}

/// Returns what the operators of a cluster have signed.
pub fn present_signed(client: &Client) -> Result<SignedPolicy, client::Error> {
    let at = CONFIG_MAPS.in_namespace(NAMESPACE).named(JOIN_CONFIG);
    let map = client.find(&at)?.unwrap_or_default();
    Ok(signed_in(&map))
}

fn signed_in(map: &Value) -> SignedPolicy {
    let text = |key: &str| map["data"][key].as_str().unwrap_or_default().to_owned();
    SignedPolicy {
        statement: text(POLICY_STATEMENT),
        signatures: text(POLICY_SIGNATURES),
        operator_changes: text(OPERATOR_CHANGES),
    }
}

/// The policy cannot be changed in the cluster, because the operators have signed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SignedByOperators;

impl fmt::Display for SignedByOperators {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "the policy of this cluster is signed by its operators, so no command changes it in the cluster: change the file, run \
             `firstlight policy propose` and `firstlight policy sign` with it, and then `firstlight apply`",
        )
    }
}

impl std::error::Error for SignedByOperators {}

/// Replaces the attestation policy of a cluster, and keeps the previous one under the second key, as [`apply`] does. `change` gets the
/// present policy and returns the new one, or `None` if nothing has to be changed. If the policy changes meanwhile, it is called again.
/// Fails if a signed policy has to be changed.
pub fn change_policy<E: From<client::Error> + From<SignedByOperators>>(
    client: &Client,
    change: impl Fn(&str) -> Result<Option<String>, E>,
) -> Result<(), E> {
    let at = CONFIG_MAPS.in_namespace(NAMESPACE).named(JOIN_CONFIG);
    for _ in 0..POLICY_TRIES {
        let present = client.get(&at)?;
        let Some(new) = changed_policy(&present, &change)? else {
            return Ok(());
        };
        // the fields that `apply` has applied stay ours
        let ours = owned(&present, FIELD_MANAGER);
        let mut wanted = ours.clone().unwrap_or_else(|| present.clone());
        wanted["data"][ATTESTATION_CONFIG] = new.into();
        keep_policy(&mut wanted, Some(&present));
        wanted["metadata"]["resourceVersion"] = client::version_of(&present).into();
        let written = match ours {
            Some(_) => client.apply(&at, &wanted),
            None => client.update(&at, &wanted),
        };
        match written {
            Err(error) if error.is_conflict() => {}
            written => return Ok(written.map(drop)?),
        }
    }
    Err(client::Error::Answer {
        request: format!("change {at}"),
        problem: "it changes all the time".into(),
    }
    .into())
}

/// Returns the policy that replaces the one in this ConfigMap, if it has to be changed.
fn changed_policy<E: From<SignedByOperators>>(
    map: &Value,
    change: impl Fn(&str) -> Result<Option<String>, E>,
) -> Result<Option<String>, E> {
    let policy = map["data"][ATTESTATION_CONFIG].as_str();
    let new = change(policy.unwrap_or_default())?;
    if new.is_some() && !signed_in(map).statement.is_empty() {
        return Err(SignedByOperators.into());
    }
    Ok(new)
}

/// Returns the measurement salt of a cluster; `None` if it has none.
pub fn present_salt(client: &Client) -> Result<Option<Vec<u8>>, client::Error> {
    let map = join_config(client)?;
    let text = map.binary_data.get(MEASUREMENT_SALT);
    Ok(text.and_then(|text| BASE64_STANDARD.decode(text).ok()))
}

/// Returns the [`manifests`] except those of these phases.
pub fn manifests_without(settings: &ServiceSettings, skip: &[Phase]) -> Result<Vec<Value>, Error> {
    Ok(without(manifests(settings)?, skip))
}

fn without(objects: Vec<Value>, skip: &[Phase]) -> Vec<Value> {
    let is_wanted = |object: &Value| !skip.contains(&Phase::of(object));
    objects.into_iter().filter(is_wanted).collect()
}

/// Returns what stays open if this object is refused; `None` if the services cannot do without it.
fn open_without(at: &Object) -> Option<&'static str> {
    let kinds = [
        VALIDATING_ADMISSION_POLICIES,
        VALIDATING_ADMISSION_POLICY_BINDINGS,
    ];
    let mut policies = OPEN_WITHOUT
        .iter()
        .filter(|_| kinds.contains(at.resource()));
    Some(policies.find(|(name, _)| *name == at.name())?.1)
}

/// Reads the present objects, and checks with a dry run that the wanted ones are accepted. Admission policies that the cluster or its
/// rights do not permit are left out, and reported with what stays open.
fn plan(
    client: &Client,
    wanted: Vec<Value>,
    report: &mut dyn FnMut(InstallProgress),
) -> Result<Vec<Change>, Error> {
    let mut changes = Vec::new();
    let mut refused = BTreeSet::new();
    for mut wanted in wanted {
        let at = Object::of(&wanted)?;
        let open = open_without(&at);
        if open.is_some() && refused.contains(at.name()) {
            continue;
        }
        let before = match (client.find(&at), open) {
            // who may not read it may not write it
            (Err(error), Some(_)) if error.code() == Some(403) => None,
            (before, _) => before?,
        };
        if at.name() == JOIN_CONFIG {
            keep_policy(&mut wanted, before.as_ref());
        }
        let whole = before.as_ref().and_then(|before| replaced(before, &wanted));
        let after = match &whole {
            Some(whole) => client.try_update(&at, whole),
            None => client.try_apply(&at, &wanted),
        };
        let after = match (after, open) {
            (Err(error), Some(open)) if matches!(error.code(), Some(403 | 404)) => {
                report(InstallProgress::Line(format!(
                    "{at} is left out: {error}; open to agents and tenants without it: {open} \
                     (charts/firstlight/README.md#admission)"
                )));
                refused.insert(at.name().to_owned());
                continue;
            }
            (after, _) => after?,
        };
        changes.push(Change {
            at,
            wanted,
            before,
            after,
            replaces: whole.is_some(),
        });
    }
    Ok(changes)
}

/// Returns the object with the wanted pods, if it is a DaemonSet of another system.
fn replaced(before: &Value, wanted: &Value) -> Option<Value> {
    if wanted["kind"] != "DaemonSet" || kept::is_of_chart(&ObjectMeta::of(before)) {
        return None;
    }
    let mut whole = before.clone();
    for field in ["template", "updateStrategy"] {
        whole["spec"][field] = wanted["spec"][field].clone();
    }
    Some(whole)
}

/// Keeps a replaced policy under a second key, as in Constellation.
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
    report: &mut dyn FnMut(InstallProgress),
) -> Result<(), Error> {
    for change in changes {
        report(InstallProgress::Phase(format!("applying {}", change.at)));
        if change.replaces {
            // controllers write its status at any time
            client.modify(&change.at, |present| {
                let whole = replaced(present, &change.wanted);
                let is_needed = whole.is_some();
                *present = whole.unwrap_or_default();
                is_needed
            })?;
        }
        let after = client.apply(&change.at, &change.wanted)?;
        *done += 1;
        let what = match &change.before {
            None => "new",
            Some(before) if client::version_of(before) != client::version_of(&after) => "changed",
            Some(_) => continue,
        };
        changed.push(change.at.to_string());
        report(InstallProgress::Line(format!("{}: {what}", change.at)));
    }
    Ok(())
}

/// Waits until each DaemonSet runs its newest pods on every eligible node, and there is at least
/// one such node.
fn wait_ready(
    client: &Client,
    changes: &[Change],
    time: Duration,
    report: &mut dyn FnMut(InstallProgress),
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
            missing.extend(missing_of(&client.get_as(&set.at)?));
        }
        if missing.is_empty() {
            return Ok(());
        }
        let mut troubles = troubles(client, &sets)?;
        if started.elapsed() >= readiness::NETWORK_GRACE {
            // only a hint: the services decide
            if let Ok(nodes) = client.list_as::<NodeObject>(&NODES.all(), &Selector::default()) {
                troubles.extend(readiness::without_network(&nodes.items));
            }
        }
        for trouble in &troubles {
            if said.insert(trouble.clone()) {
                report(InstallProgress::Line(trouble.clone()));
            }
        }
        if started.elapsed() >= time {
            missing.extend(troubles);
            return Err(Error::NotReady(missing, started.elapsed()));
        }
        let text = format!("waiting for {}", missing.join(", "));
        if text != phase {
            report(InstallProgress::Phase(text.clone()));
            phase = text;
        }
        if client.stopped_within(INTERVAL) {
            return Err(client::Error::Stopped.into());
        }
    }
}

/// Returns what is missing of a DaemonSet, or `None` if it is ready. At least one control plane must be eligible for it.
fn missing_of(set: &Workload) -> Option<String> {
    let (name, nodes) = (&set.metadata.name, set.status.desired_number_scheduled);
    readiness::missing_of(set)
        .or_else(|| (nodes == 0).then(|| format!("{name}: no control plane is available for it")))
}

/// Returns what the kubelets report about containers that do not run.
fn troubles(client: &Client, sets: &[&Change]) -> Result<Vec<String>, Error> {
    let names: Vec<_> = sets.iter().map(|set| set.at.name()).collect();
    let selector = Selector::labels(&format!("k8s-app in ({})", names.join(",")));
    let pods = client.list_as(&PODS.in_namespace(NAMESPACE), &selector)?;
    Ok(pods.items.iter().flat_map(readiness::troubles_of).collect())
}

/// Restores all objects, the last change first. Returns what failed.
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
    // An object that we had applied is applied again, so that the server's record of field
    // ownership is restored as well. The others are unchanged.
    if let Some(ours) = owned(before, FIELD_MANAGER) {
        return client.apply(at, &ours).map(|_| ());
    }
    let mut old = before.clone();
    if let Some(metadata) = old["metadata"].as_object_mut() {
        // The update does not depend on the present version.
        metadata.remove("resourceVersion");
    }
    client.update(at, &old).map(|_| ())
}

/// Writes the present objects into a new folder, as manifests for `kubectl apply --server-side`.
/// Creates no folder if there are none.
fn save(changes: &[Change], backups: &Path) -> Result<Option<PathBuf>, Error> {
    // The operator already has the master secret in a file.
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

/// A second run within the same second gets a number.
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

/// Removes the fields that the server adds.
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

/// Formats a time as `20261121T115500Z` (ISO 8601, basic format, UTC).
fn stamp(at: SystemTime) -> String {
    time::seconds(at).replace(['-', ':'], "")
}

#[cfg(test)]
mod tests {
    use super::*;
    use base::crypto::Secret;
    use serde_json::json;

    pub fn settings() -> ServiceSettings {
        ServiceSettings {
            image: "example.com/firstlight:1".into(),
            variant: "qemu-vtpm".into(),
            policy: r#"{"measurements":{"15":"00"}}"#.into(),
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
            signed: SignedPolicy::default(),
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
    fn what_the_operators_have_signed_is_beside_the_policy() {
        let data = |signed: &SignedPolicy| {
            let objects = manifests(&ServiceSettings {
                signed: signed.clone(),
                ..settings()
            });
            let objects = objects.unwrap();
            let is_it = |object: &&Value| {
                object["kind"] == "ConfigMap" && object["metadata"]["name"] == JOIN_CONFIG
            };
            objects.iter().find(is_it).unwrap()["data"].clone()
        };
        let unsigned = data(&SignedPolicy::default());
        assert_eq!(unsigned, json!({"attestationConfig": settings().policy}));
        let mut signed = SignedPolicy {
            statement: "{\"number\":1}\n".into(),
            signatures: "-----BEGIN SSH SIGNATURE-----\n".into(),
            operator_changes: String::new(),
        };
        for keys in [3, 4] {
            let data = data(&signed);
            assert_eq!(data.as_object().unwrap().len(), keys, "{data}");
            assert_eq!(signed_in(&json!({"data": data})), signed);
            signed.operator_changes = "[]".into();
        }
    }

    #[test]
    fn a_signed_policy_is_not_changed_in_the_cluster() {
        let changed = |statement: Option<&str>, new: Option<&str>| {
            let mut map = json!({"data": {"attestationConfig": "old"}});
            if let Some(statement) = statement {
                map["data"]["policyStatement"] = statement.into();
            }
            changed_policy(&map, |present| {
                assert_eq!(present, "old");
                Ok::<_, SignedByOperators>(new.map(str::to_owned))
            })
        };
        assert_eq!(changed(None, Some("new")), Ok(Some("new".into())));
        assert_eq!(changed(Some("{}"), None), Ok(None));
        assert_eq!(changed(Some("{}"), Some("new")), Err(SignedByOperators));
    }

    #[test]
    fn a_cluster_without_a_control_plane_is_not_ready() {
        let set = |desired: u64| {
            let set = json!({"kind": "DaemonSet", "metadata": {"name": "a"}, "status": {"desiredNumberScheduled": desired,
                "updatedNumberScheduled": desired, "numberAvailable": desired}});
            serde_json::from_value(set).unwrap()
        };
        assert!(
            missing_of(&set(0))
                .unwrap()
                .contains("no control plane is available")
        );
        assert_eq!(missing_of(&set(1)), None);
    }
}
