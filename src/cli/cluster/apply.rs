//! `firstlight apply`: installs or upgrades the services of the control planes in a cluster.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use crate::cluster::addons::{self, AddonStage, Addons, How};
use crate::shell::{
    error::Error,
    files, interrupt,
    output::{Output, say},
    progress::Progress,
};
use crate::trust::policy;
use crate::workspace::{
    connect::and_known,
    keeping::{Wish, check_named},
    known_nodes, kubeconfig,
    kubeconfig::KubeconfigOption,
    master_secret::{SecretOptions, SecretSource},
    options::{MetadataOptions, VariantOption, time},
    state::{STATE_FILE, State},
};
use base::text::hex;
use clap::Args;
use kubernetes::client::Client;
use kubernetes::constellation::outside;
use kubernetes::services::grants::{self, ANYONE, LOCAL, MEMBER};
use kubernetes::services::migration::Migration;
use kubernetes::services::{
    self, Applied, InstallProgress, JOIN_SERVICE_ACCOUNT, JOIN_SERVICE_GRANT, MetadataService,
    Phase, RefusedOldClients, ServiceSettings, SignedPolicy,
};
use serde_json::{Value, json};
use verifier::sources::offline;
use verifier::variant::DEFAULT;
use verifier::{KeyName, Policy, Variant};

/// What is granted to Constellation's S3 proxy: the only key for which it asks.
const S3_PROXY_KEY: &str = "id:s3proxy-kek";

/// Install or upgrade the services of the control planes in a cluster
///
/// Installs the join service and the key service, with the master secret and the attestation policy. The objects are
/// those of the Helm chart in charts/firstlight. Run it again to change the image or the policy: settings that no
/// option names keep their values in the cluster, as Helm or an earlier run has set them, and the command lists them.
/// It first saves the present manifests into a folder named after the date. If the new ones are refused, or the
/// services are not ready in time, it restores the previous state.
///
/// If POLICY.statement and POLICY.signatures are beside the policy, they come into the cluster with it: its operators
/// have signed the policy (`firstlight policy`).
#[derive(Debug, Args)]
#[command(mut_arg("kms", |it| it.help(KMS_MEANS)), after_help = concat!(
    "Examples:\n  firstlight apply --policy policy.json --image registry.example.com/firstlight:",
    env!("CARGO_PKG_VERSION"),
    "\n  firstlight apply --policy policy.json --image example.com/firstlight:",
    env!("CARGO_PKG_VERSION"),
    " --kms 'kms://cluster-kms' --dry-run\n  firstlight apply --policy policy.json --image registry.example.com/firstlight:",
    env!("CARGO_PKG_VERSION"),
    " --skip-wait\n  firstlight apply --policy policy-upgrade.json --skip-phases services",
))]
pub(crate) struct CommandLine {
    /// The attestation policy that nodes must meet (JSON)
    #[arg(long, value_name = "FILE")]
    policy: PathBuf,
    #[command(flatten)]
    variant: VariantOption,
    /// A container image with /join-service, /key-service and /member-controller
    #[arg(long, value_name = "IMAGE", required_unless_present = "skip_phases")]
    image: Option<String>,
    /// Do not change these: policy, services; without services no image is needed
    #[arg(long, value_name = "PHASE,..", value_delimiter = ',', value_parser = phase)]
    skip_phases: Vec<Phase>,
    /// A list (YAML) of charts and manifests to install, such as the network plugin; needs Helm (docs/addons.md)
    #[arg(long, value_name = "FILE")]
    addons: Option<PathBuf>,
    /// The new lists of operators with their signatures, JSON (docs/day-two/signed-policies.md); by default as the
    /// cluster has them
    #[arg(long, value_name = "FILE")]
    operator_changes: Option<PathBuf>,
    /// With strong, refuse nodes of the old form of attested TLS, which all nodes of Constellation use; the policy's own
    /// field `"require": "strong"` does the same; with any, admit them, unless the policy has that field; by
    /// default as the cluster has it, and strong in a new one
    #[arg(long, value_name = "FORM", value_parser = ["strong", "any"])]
    require: Option<String>,
    #[command(flatten)]
    kubeconfig: KubeconfigOption,
    #[command(flatten)]
    secret: SecretOptions,
    #[command(flatten)]
    wish: Wish,
    /// The state file, which has the measurement salt
    #[arg(long, value_name = "FILE", default_value = STATE_FILE)]
    state: PathBuf,
    /// The join service's port on every control plane; by default as the cluster has it, and 30090 in a new one
    #[arg(long, value_name = "PORT")]
    node_port: Option<u16>,
    #[command(flatten)]
    metadata: MetadataOptions,
    /// The last day, as 2027-01-31, on which the join service opens disks without a record, such as those of
    /// Constellation, or never; by default as the cluster has it, and never in a new one
    #[arg(long, value_name = "DATE", value_parser = until)]
    migrate_until: Option<Migration>,
    /// The last day, as 2027-01-31, on which the key service gives keys of volumes to CSI drivers of Constellation,
    /// which show no token, or never; by default as the cluster has it, and never in a new one
    #[arg(long, value_name = "DATE", value_parser = until)]
    old_clients_until: Option<Migration>,
    /// How often each member is asked for fresh evidence, in seconds, 60 to 86400, or never; its Node shows the result
    /// (docs/watch.md); by default as the cluster has it, and never in a new one
    #[arg(long, value_name = "SECONDS", value_parser = watch)]
    watch: Option<String>,
    /// What happens to a node that is refused then; by default as the cluster has it, and report in a new one
    #[arg(long, value_name = "WORD", value_parser = ["report", "taint", "cordon"])]
    watch_action: Option<String>,
    /// Publish the result of each accepted node as a signed token that OpenID Connect relying parties verify, at
    /// https://HOST[:PORT][/PATH] (docs/watch.md), or none; by default as the cluster has it, and none in a new one
    #[arg(long, value_name = "URL", value_parser = issuer)]
    watch_issuer: Option<String>,
    /// The keys that each client of the key service may get (docs/services.md); by default as the cluster has them,
    /// and in a new one those of the join service
    #[arg(long, value_name = "CALLER=CLASS,..;..", value_parser = grants_of)]
    grants: Option<String>,
    /// Record that this node is a control plane, if it has no record because it joined before records existed; may be
    /// repeated
    #[arg(long, value_name = "NODE")]
    record_control_plane: Vec<String>,
    /// The folder for the folders with saved manifests
    #[arg(long, value_name = "FILE", default_value = ".")]
    backups: PathBuf,
    /// Return as soon as the API server has accepted the services; do not roll back if they never get ready
    #[arg(long, alias = "skip-helm-wait")]
    skip_wait: bool,
    /// The limit until the services are ready, as 90s, 10m or 1h
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "10m")]
    timeout: Duration,
    /// Ask the API server and the KMS whether they would accept all of it, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Only print the manifests (JSON, with the encrypted master secret), without a cluster
    #[arg(long)]
    print: bool,
    #[command(flatten)]
    output: Output,
}

/// The help text of `--kms`.
const KMS_MEANS: &str = "Keep the master secret in the cluster only as the key of this external KMS wraps it (docs/kms.md), or plain: kms://cluster-kms; the previous form is deleted when all key services run with the new one; by default the form stays as it is";

impl CommandLine {
    /// Returns the options that the command line gives.
    pub fn options(self) -> Result<Options, Error> {
        let skips_services = self.skip_phases.contains(&Phase::Services);
        if self.image.is_none() && !skips_services {
            return Err(Error::Usage("--image is missing".into()));
        }
        if self.wish.create_key && self.dry_run {
            return Err(Error::Usage(
                "--create-key makes a key, and --dry-run changes nothing: give one of them".into(),
            ));
        }
        if self.wish.kms.is_some() && skips_services {
            return Err(Error::Usage(
                "--kms changes the key service: --skip-phases services contradicts it".into(),
            ));
        }
        Ok(Options {
            kubeconfig: self.kubeconfig.paths(),
            variant: self.variant.named(Some(&self.policy)),
            policy: self.policy,
            policy_text: None,
            require_strong: self.require.map(|form| form == "strong"),
            image: self.image.unwrap_or_default(),
            addons: self.addons,
            operator_changes: self.operator_changes,
            skip_phases: self.skip_phases,
            master_secret: self.secret.source(),
            wish: self.wish,
            state: self.state,
            node_port: self.node_port,
            migration: self.migrate_until,
            old_clients: self.old_clients_until,
            watch: self.watch,
            watch_action: self.watch_action,
            watch_issuer: self.watch_issuer,
            grants: self.grants,
            metadata: self.metadata.service()?,
            backups: self.backups,
            skip_wait: self.skip_wait,
            print: self.print,
            is_dry_run: self.dry_run,
            keeps_superseded: false,
            control_planes: self.record_control_plane,
            output: self.output,
            timeout: self.timeout,
        })
    }
}

fn phase(name: &str) -> Result<Phase, &'static str> {
    Phase::parse(name).ok_or("expected policy, services")
}

/// Parses the last day of something; `never` is a day that is always over.
pub fn until(text: &str) -> Result<Migration, <Migration as FromStr>::Err> {
    match text {
        "never" => Ok(Migration::default()),
        date => date.parse(),
    }
}

/// Parses the seconds of `--watch`, with the limits of the join service; empty for `never`.
fn watch(text: &str) -> Result<String, &'static str> {
    match text.parse() {
        _ if text == "never" => Ok(String::new()),
        Ok(60..=86_400_u32) => Ok(text.into()),
        _ => Err("expected 60 to 86400 seconds, or never"),
    }
}

/// Parses the URL of `--watch-issuer`; empty for `none`. The member controller checks it completely.
fn issuer(text: &str) -> Result<String, &'static str> {
    match text {
        "none" => Ok(String::new()),
        url if url.starts_with("https://") && !url.ends_with('/') => Ok(url.into()),
        _ => Err("expected https://HOST[:PORT][/PATH] without a slash at its end, or none"),
    }
}

/// Checks the text of `--grants`. Refuses one with which the key service would not start.
pub fn grants_of(text: &str) -> Result<String, Error> {
    let grants = grants::parse(text).map_err(|error| Error::Usage(error.to_string()))?;
    let of_tokens = |caller: &str| ![LOCAL, MEMBER].contains(&caller);
    match grants.iter().find(|(caller, _)| !of_tokens(caller)) {
        None => Ok(text.into()),
        Some((caller, _)) => Err(Error::Usage(format!(
            "{caller:?}: expected NAMESPACE/NAME or {ANYONE}, because the clients of this key service show tokens"
        ))),
    }
}

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// The administrator's kubeconfigs; `$KUBECONFIG` may name several.
    pub kubeconfig: Vec<PathBuf>,
    /// The attestation policy that nodes must meet.
    pub policy: PathBuf,
    /// Its text in place of the file's.
    pub policy_text: Option<String>,
    /// Whether the policy must refuse nodes of the old form of attested TLS, even if its file does
    /// not say so; if `None`, unchanged.
    pub require_strong: Option<bool>,
    /// In how many seconds members are asked for fresh evidence; if `None`, unchanged.
    pub watch: Option<String>,
    /// What happens to a node that is refused then; if `None`, unchanged.
    pub watch_action: Option<String>,
    /// The URL of the issuer of attestation results; if `None`, unchanged.
    pub watch_issuer: Option<String>,
    /// The attestation variant of the nodes; if `None`, unchanged.
    pub variant: Option<&'static Variant>,
    /// The container image of the services; empty if the services are skipped.
    pub image: String,
    /// The list of add-ons; if `None`, they stay as they are.
    pub addons: Option<PathBuf>,
    /// The changes of the list of operators; if `None`, they stay as they are.
    pub operator_changes: Option<PathBuf>,
    /// The parts that are not changed.
    pub skip_phases: Vec<Phase>,
    /// The source of the master secret.
    pub master_secret: SecretSource,
    /// How the cluster must store it.
    pub wish: Wish,
    /// The state file, which has the measurement salt.
    pub state: PathBuf,
    /// The port of the join service on each control plane; if `None`, unchanged. The same applies
    /// to the next ones.
    pub node_port: Option<u16>,
    /// The time until which the join service opens disks that have no record.
    pub migration: Option<Migration>,
    /// The time until which the key service serves clients without a token.
    pub old_clients: Option<Migration>,
    /// The keys that each client of the key service may get.
    pub grants: Option<String>,
    /// The metadata service from which the join service gets the list of machines.
    pub metadata: Option<MetadataService>,
    /// The folder in which folders with saved manifests are created.
    pub backups: PathBuf,
    /// Whether to return when the API server has accepted the objects.
    pub skip_wait: bool,
    /// Whether to only print the manifests, without a cluster.
    pub print: bool,
    /// Whether to check everything and change nothing.
    pub is_dry_run: bool,
    /// Whether other forms of the master secret stay in the cluster.
    pub keeps_superseded: bool,
    /// Nodes without a record that are control planes.
    pub control_planes: Vec<String>,
    /// The form of the output.
    pub output: Output,
    /// The time limit until everything is ready.
    pub timeout: Duration,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    if options.print {
        let settings = settings(options, None)?;
        let objects = services::manifests_without(&settings, &options.skip_phases)?;
        return say(format_args!(
            "{:#}",
            json!({"apiVersion": "v1", "kind": "List", "items": objects})
        ));
    }
    let applied = apply(options)?;
    options.output.json(&json(&applied))?;
    if options.is_dry_run {
        let changed: Vec<_> = applied
            .changed
            .iter()
            .map(|at| format!("would change {at}\n"))
            .collect();
        return options
            .output
            .say(format!("{}nothing was changed", changed.concat()));
    }
    options.output.say(summary(&applied))
}

/// Installs or upgrades the services.
pub fn apply(options: &Options) -> Result<Applied, Error> {
    let client = kubeconfig::client(&options.kubeconfig)?;
    let applied = bring_in(&client, options, &Progress::on_stderr())?;
    if !options.is_dry_run {
        known_nodes::keep(&client, &options.state);
    }
    Ok(applied)
}

/// Returns the objects that these options make in this cluster.
pub fn manifests(options: &Options, client: &Client) -> Result<Vec<Value>, Error> {
    Ok(services::manifests(&settings(options, Some(client))?)?)
}

/// Returns the result for people: the number of changed objects.
pub fn summary(applied: &Applied) -> String {
    match applied.changed.len() {
        0 => "nothing had to be changed".into(),
        1 => "1 object is new or changed".into(),
        count => format!("{count} objects are new or changed"),
    }
}

/// Returns the result for programs: the changed objects, and the folder with the previous ones.
pub fn json(applied: &Applied) -> Value {
    json!({"changed": applied.changed, "backup": applied.backup})
}

/// Reads the settings of the services from the operator's files.
fn settings(options: &Options, client: Option<&Client>) -> Result<ServiceSettings, Error> {
    let policy = match &options.policy_text {
        Some(text) => text.clone().into_bytes().into(),
        None => files::read(&options.policy)?,
    };
    let unusable = |error: &dyn std::fmt::Display| {
        Error::content(format!("{}: {error}", options.policy.display()))
    };
    let policy = str::from_utf8(&policy).map_err(|error| unusable(&error))?;
    let kms = options
        .master_secret
        .read_wrapped(options.wish.kms.as_deref())?;
    let state = State::open(&options.state)?;
    // checked here: if the service cannot read the new policy, it keeps the previous one, and the
    // operator would not notice
    let read = Policy::from_json(policy).map_err(|error| unusable(&error))?;
    let is_strong = requires_strong(options, &read, client)?;
    let is_skipped = options.skip_phases.contains(&Phase::Policy);
    let signed = if is_skipped {
        SignedPolicy::default()
    } else {
        signed(options, policy, client)?
    };
    // a signed policy stays as it is; with roots it accepts the machines of this cluster without their keys
    let known = if signed.statement.is_empty() || read.endorsement_roots().is_empty() {
        state.attestation_keys.clone()
    } else {
        BTreeSet::new()
    };
    let wanted = policy_of(read.clone(), known, is_strong)?;
    if !signed.statement.is_empty() {
        policy::check_complete(&options.policy, &read, &wanted)?;
        if let Some(id) = &state.cluster_id {
            policy::check_cluster(&options.policy, &signed, &hex(id))?;
        }
    }
    let policy = if wanted == read {
        policy.into()
    } else {
        policy::text(&wanted)
    };
    let variant = variant(options, client)?;
    // without a cluster the variant is unknown, and may be another one
    if client.is_some() || options.variant.is_some() || options.print {
        endorsement::validator(variant, wanted, &offline()).map_err(|error| unusable(&error))?;
    }
    let keeping = options.wish.keeping(&kms, &state, client)?;
    Ok(ServiceSettings {
        image: options.image.clone(),
        variant: variant.name.into(),
        policy,
        measurement_salt: state.measurement_salt.to_vec(),
        kms,
        keeping,
        node_port: options.node_port,
        migrate_until: options.migration.map(|until| until.to_string()),
        old_clients_until: options.old_clients.map(|until| until.to_string()),
        grants: options.grants.clone(),
        metadata: options.metadata.clone(),
        // the policy has this requirement; a value of the chart has the same effect, and `--require
        // any` removes it
        require_strong: options.require_strong.filter(|strong| !strong),
        watch: options.watch.clone(),
        watch_action: options.watch_action.clone(),
        watch_issuer: options.watch_issuer.clone(),
        signed,
    })
}

/// Returns what operators have signed about the policy with this text. Refuses what the services of the cluster would not take.
fn signed(options: &Options, text: &str, client: Option<&Client>) -> Result<SignedPolicy, Error> {
    let mut signed = match options.policy_text {
        Some(_) => SignedPolicy::default(),
        None => policy::of_file(&options.policy, text)?,
    };
    if let Some(path) = &options.operator_changes {
        signed.operator_changes = policy::read_changes(path)?;
    }
    let Some(client) = client else {
        return Ok(signed);
    };
    let present = services::present_signed(client)?;
    policy::check_newer(&options.policy, &signed, &present)?;
    if options.operator_changes.is_none() {
        signed.operator_changes = present.operator_changes;
    }
    Ok(signed)
}

/// Returns the attestation variant from the options or the policy; if neither has it, the cluster's
/// present one.
fn variant(options: &Options, client: Option<&Client>) -> Result<&'static Variant, Error> {
    if let Some(variant) = options.variant {
        return Ok(variant);
    }
    let present = client.map(services::present_variant).transpose();
    let present = present?.flatten();
    Variant::named(present.as_deref().unwrap_or(DEFAULT)).map_err(Error::content)
}

/// Returns the policy that `apply` puts in force: that of the file, the keys of known nodes, and the strong form of attested TLS
/// if it is required besides.
pub fn policy_of(
    file: Policy,
    known: impl IntoIterator<Item = KeyName>,
    is_strong: bool,
) -> Result<Policy, Error> {
    let policy = and_known(file, known)?;
    Ok(if is_strong {
        policy.requiring_strong()
    } else {
        policy
    })
}

/// Returns whether `apply` keeps the requirement of the strong form, because the policy in force has it. A policy that cannot be
/// read, such as one of Constellation, requires nothing.
pub fn keeps_strong(in_force: &str) -> bool {
    Policy::from_json(in_force).is_ok_and(|policy| policy.requires_strong())
}

/// Returns whether to add the requirement of the strong form to a policy without it: as the options
/// say, or else as in the cluster. A cluster that has no policy yet is a new one, and requires it.
fn requires_strong(
    options: &Options,
    read: &Policy,
    client: Option<&Client>,
) -> Result<bool, Error> {
    let (Some(client), None, false) = (client, options.require_strong, read.requires_strong())
    else {
        return Ok(options.require_strong.unwrap_or_default());
    };
    let Some(present) = services::present_policy(client)? else {
        // without its policy, a cluster that has the join service is not new
        let is_new = services::present_variant(client)?.is_none();
        if is_new {
            log::info!(
                "the policy of this new cluster requires the strong form of attested TLS; --require any drops the requirement"
            );
        }
        return Ok(is_new);
    };
    let is_strong = keeps_strong(&present);
    if is_strong {
        log::warn!(
            "the policy in force requires the strong form, and {} does not: the requirement stays; remove it by --require any",
            options.policy.display()
        );
    }
    Ok(is_strong)
}

/// Installs or upgrades the services of this cluster.
pub fn bring_in(client: &Client, options: &Options, progress: &Progress) -> Result<Applied, Error> {
    // report errors in files before any request to the cluster
    let has_services = [Phase::Policy, Phase::Services]
        .iter()
        .any(|phase| !options.skip_phases.contains(phase));
    if has_services && options.wish.kms.is_none() {
        settings(options, None)?;
    }
    let addons = (options.addons.as_ref())
        .map(|list| Addons::read(list, &options.kubeconfig))
        .transpose()
        .map_err(addon_failed)?;
    progress.phase(format!("waiting for the API server {}", client.server()));
    client
        .within(options.timeout)
        .wait_ready(&mut |why| progress.line(why))?;
    if let Some(addons) = &addons {
        let version = client.version()?;
        addons.check(&version).map_err(Error::content)?;
    }
    if !options.is_dry_run {
        interrupt::means(
            "what was applied stays, and nothing is rolled back; run the same command again",
        );
    }
    let how = How {
        client,
        progress,
        limit: options.timeout,
        wait: !options.skip_wait,
        is_dry_run: options.is_dry_run,
    };
    let install = |stage| match &addons {
        Some(addons) => addons.install(stage, &how).map_err(addon_failed),
        None => Ok(vec![]),
    };
    if !options.skip_phases.contains(&Phase::Services) {
        check_old_clients(client, options)?;
        check_network(client, options)?;
    }
    let mut changed = install(AddonStage::BeforeServices)?;
    let services = if has_services {
        bring_services(client, options, progress)?
    } else {
        Applied::default()
    };
    changed.extend(services.changed);
    changed.extend(install(AddonStage::AfterServices)?);
    if let Some(addons) = &addons {
        for sentence in addons.no_longer_listed().map_err(addon_failed)? {
            progress.line(sentence);
        }
    }
    Ok(Applied {
        changed,
        backup: services.backup,
    })
}

fn bring_services(
    client: &Client,
    options: &Options,
    progress: &Progress,
) -> Result<Applied, Error> {
    let settings = settings(options, Some(client))?;
    if options.wish.kms.is_none() && !options.skip_phases.contains(&Phase::Services) {
        check_named(client, &settings.kms)?;
    }
    let how = services::Options {
        skip: &options.skip_phases,
        backups: Path::new(&options.backups),
        wait: (!options.skip_wait).then_some(options.timeout),
        is_dry_run: options.is_dry_run,
        keeps_superseded: options.keeps_superseded,
        control_planes: &options.control_planes,
    };
    services::apply(client, &settings, &how, &mut |report| match report {
        InstallProgress::Phase(text) => progress.phase(text),
        InstallProgress::Line(text) => progress.line(text),
    })
    .map_err(Error::from)
}

/// Refuses to replace the key service of Constellation while clients use it that would lose access to their keys, unless
/// the options say what such clients get.
fn check_old_clients(client: &Client, options: &Options) -> Result<(), Error> {
    let present = services::old_clients(client)?;
    match undecided(&present, options.old_clients, options.grants.as_deref()) {
        None => Ok(()),
        Some((loss, advice)) => Err(Error::blocked(format!(
            "{loss}. Nothing was changed. {advice} (docs/migration.md)"
        ))),
    }
}

/// Returns what clients without a token would lose, and which option is missing that decides it; `None` if it is decided, or if there
/// are no such clients.
pub fn undecided(
    clients: &RefusedOldClients,
    until: Option<Migration>,
    grants: Option<&str>,
) -> Option<(String, String)> {
    let RefusedOldClients {
        drivers,
        s3_proxies,
        s3_accounts,
        maybe_s3_proxies,
    } = clients;
    let mut sentences = Vec::new();
    if !drivers.is_empty() {
        sentences.push(format!(
            "{} mount volumes with keys of the present key service, and ask without a token: with the new key service they could \
             mount none",
            drivers.join(", ")
        ));
    }
    if !s3_proxies.is_empty() {
        sentences.push(format!(
            "{} (Constellation's S3 proxy) asks the present key service for its key without a token: with the new key service it \
             would get none",
            s3_proxies.join(", ")
        ));
    }
    if !maybe_s3_proxies.is_empty() {
        sentences.push(format!(
            "{} would get no key either if it is Constellation's S3 proxy: its image or port says so, which each user with the role \
             edit in that namespace can write. Grant {S3_PROXY_KEY} to the account of its pods only if you installed it",
            maybe_s3_proxies.join(", ")
        ));
    }
    let granted = grants.and_then(|text| grants::parse(text).ok());
    let has_grant = |account: &String| {
        let mut granted = granted.iter().flatten();
        granted.any(|(caller, items)| {
            (*caller == ANYONE || caller == account) && items.contains(&S3_PROXY_KEY)
        })
    };
    let is_granted = s3_accounts.iter().all(has_grant);
    let advice = match until {
        _ if sentences.is_empty() => return None,
        None => "Give --old-clients-until DATE to serve them through that day, or never".to_owned(),
        Some(until) if !s3_proxies.is_empty() && !is_granted && until.is_on(SystemTime::now()) => {
            let own = s3_accounts
                .iter()
                .map(|account| format!(";{account}={S3_PROXY_KEY}"))
                .collect::<String>();
            format!(
                "The S3 proxy also needs a grant for the service account of its pods, which each pod with this account gets: give \
                 --grants '{JOIN_SERVICE_ACCOUNT}={JOIN_SERVICE_GRANT}{own}', or remove the proxy"
            )
        }
        Some(_) => return None,
    };
    Some((sentences.join("; "), advice))
}

/// Refuses to serve clients without a token where packets from outside of the cluster can have a node's address.
fn check_network(client: &Client, options: &Options) -> Result<(), Error> {
    let until = match options.old_clients {
        None => services::old_clients_until(client)?.and_then(|kept| kept.parse().ok()),
        given => given,
    };
    let Some(until) = until.filter(|until: &Migration| until.is_on(SystemTime::now())) else {
        return Ok(());
    };
    match outside::why_open(client)? {
        None => Ok(()),
        Some(why) => Err(Error::blocked(format!(
            "with --old-clients-until {until}, the key service would still serve nobody without a token, because that is safe only \
             where Cilium replaces kube-proxy and drops packets from outside of the cluster: {why}. Nothing was changed. Let Cilium \
             do that, or give --old-clients-until never (docs/storage.md)"
        ))),
    }
}

fn addon_failed(error: addons::Error) -> Error {
    match &error {
        addons::Error::Api(cause) => Error::of_api(cause, error.to_string()),
        _ => Error::failed(error),
    }
}
