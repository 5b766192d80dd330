//! `firstlight apply`: installs or upgrades the services of the control planes in a cluster.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::addons::{self, Addons, Stage};
use super::connect::and_known;
use super::keeping::{Wish, check_named};
use super::master_secret::Source;
use super::output::Output;
use super::progress::Progress;
use super::state::State;
use super::{files, interrupt, kubeconfig, say};
use base::program::Failure;
use kubernetes::client::Client;
use kubernetes::services::migration::Migration;
use kubernetes::services::{self, Applied, MetadataService, Phase, Report, Settings};
use serde_json::{Value, json};
use verifier::sources::offline;
use verifier::variant::DEFAULT;
use verifier::{Policy, Variant};

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// The administrator's kubeconfigs; `$KUBECONFIG` may name several.
    pub kubeconfig: Vec<PathBuf>,
    /// The attestation policy that nodes must meet.
    pub policy: PathBuf,
    /// Whether the policy must refuse nodes of the old form of attested TLS, even if its file does
    /// not say so; if `None`, unchanged.
    pub require_strong: Option<bool>,
    /// The attestation variant of the nodes; if `None`, unchanged.
    pub variant: Option<&'static Variant>,
    /// The container image of the services; empty if the services are skipped.
    pub image: String,
    /// The list of add-ons; if `None`, they stay as they are.
    pub addons: Option<PathBuf>,
    /// The parts that are not changed.
    pub skip_phases: Vec<Phase>,
    /// The source of the master secret.
    pub master_secret: Source,
    /// How the cluster must store it.
    pub wish: Wish,
    /// The state file, which has the measurement salt.
    pub state: PathBuf,
    /// The port of the join service on each control plane; if `None`, unchanged. The same applies
    /// to the next ones.
    pub node_port: Option<u16>,
    /// The time until which the join service opens disks that have no record.
    pub migration: Option<Migration>,
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
    /// The form of the output.
    pub output: Output,
    /// The time limit until everything is ready.
    pub timeout: Duration,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Failure> {
    if options.print {
        let settings = settings(options, None)?;
        let objects = services::manifests_without(&settings, &options.skip_phases)
            .map_err(Failure::failed)?;
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
pub fn apply(options: &Options) -> Result<Applied, Failure> {
    bring_in(&kubeconfig::client(&options.kubeconfig)?, options)
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
fn settings(options: &Options, client: Option<&Client>) -> Result<Settings, Failure> {
    let policy = files::read(&options.policy).map_err(Failure::failed)?;
    let unusable = |error: &dyn std::fmt::Display| {
        Failure::failed(format!("{}: {error}", options.policy.display()))
    };
    let policy = str::from_utf8(&policy).map_err(|error| unusable(&error))?;
    let kms = options
        .master_secret
        .read_wrapped(options.wish.kms.as_deref())
        .map_err(Failure::failed)?;
    let state = State::open(&options.state).map_err(Failure::failed)?;
    // checked here: if the service cannot read the new policy, it keeps the previous one, and the
    // operator would not notice
    let read = Policy::from_json(policy).map_err(|error| unusable(&error))?;
    let mut wanted = and_known(read.clone(), state.attestation_keys.clone())?;
    if requires_strong(options, &read, client)? {
        wanted = wanted.requiring_strong();
    }
    let policy = if wanted == read {
        policy.into()
    } else {
        super::policy::text(&wanted)
    };
    let variant = variant(options, client)?;
    // without a cluster the variant is unknown, and may be another one
    if client.is_some() || options.variant.is_some() || options.print {
        endorsement::validator(variant, wanted, &offline()).map_err(|error| unusable(&error))?;
    }
    let keeping = options.wish.keeping(&kms, &state, client)?;
    Ok(Settings {
        image: options.image.clone(),
        variant: variant.name.into(),
        policy,
        measurement_salt: state.measurement_salt.to_vec(),
        kms,
        keeping,
        node_port: options.node_port,
        migrate_until: options.migration.map(|until| until.to_string()),
        metadata: options.metadata.clone(),
        // the policy has this requirement; a value of the chart has the same effect, and `--require
        // any` removes it
        require_strong: options.require_strong.filter(|strong| !strong),
    })
}

/// Returns the attestation variant from the options or the policy; if neither has it, the cluster's
/// present one.
fn variant(options: &Options, client: Option<&Client>) -> Result<&'static Variant, Failure> {
    if let Some(variant) = options.variant {
        return Ok(variant);
    }
    let present = client.map(services::present_variant).transpose();
    let present = present.map_err(kubeconfig::failed)?.flatten();
    Variant::named(present.as_deref().unwrap_or(DEFAULT)).map_err(Failure::failed)
}

/// Returns whether to add the requirement of the strong form to a policy without it: as the options
/// say, or else as in the cluster.
fn requires_strong(
    options: &Options,
    read: &Policy,
    client: Option<&Client>,
) -> Result<bool, Failure> {
    let (Some(client), None, false) = (client, options.require_strong, read.requires_strong())
    else {
        return Ok(options.require_strong.unwrap_or_default());
    };
    let present = services::present_policy(client).map_err(kubeconfig::failed)?;
    // a policy that cannot be read, such as one of Constellation, requires nothing
    let present = present.and_then(|text| Policy::from_json(&text).ok());
    let is_strong = present.is_some_and(|present| present.requires_strong());
    if is_strong {
        log::warn!(
            "the policy in force requires the strong form, and {} does not: the requirement stays, and --require any removes it",
            options.policy.display()
        );
    }
    Ok(is_strong)
}

fn bring_in(client: &Client, options: &Options) -> Result<Applied, Failure> {
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
        .map_err(Failure::failed)?;
    let progress = Progress::on_stderr();
    progress.phase(format!("waiting for the API server {}", client.server()));
    client
        .within(options.timeout)
        .wait_ready(&mut |why| progress.line(why))
        .map_err(kubeconfig::failed)?;
    if let Some(addons) = &addons {
        let version = client.version().map_err(kubeconfig::failed)?;
        addons.check(&version).map_err(Failure::failed)?;
    }
    if !options.is_dry_run {
        interrupt::means(
            "what was applied stays, and nothing is rolled back; run the same command again",
        );
    }
    let wait = (!options.skip_wait).then_some(options.timeout);
    let install = |stage| match &addons {
        Some(addons) => addons
            .install(stage, client, wait, options.is_dry_run, &progress)
            .map_err(addon_failed),
        None => Ok(vec![]),
    };
    let mut changed = install(Stage::BeforeServices)?;
    let services = match has_services {
        true => bring_services(client, options, wait, &progress)?,
        false => Applied::default(),
    };
    changed.extend(services.changed);
    changed.extend(install(Stage::AfterServices)?);
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
    wait: Option<Duration>,
    progress: &Progress,
) -> Result<Applied, Failure> {
    if options.wish.kms.is_none() && !options.skip_phases.contains(&Phase::Services) {
        check_named(client)?;
    }
    let settings = settings(options, Some(client))?;
    let how = services::Options {
        skip: &options.skip_phases,
        backups: Path::new(&options.backups),
        wait,
        is_dry_run: options.is_dry_run,
    };
    services::apply(client, &settings, &how, &mut |report| match report {
        Report::Phase(text) => progress.phase(text),
        Report::Line(text) => progress.line(text),
    })
    .map_err(|error| match &error {
        services::Error::Api(cause) => {
            Failure::Failed(kubeconfig::exit_code(cause), error.to_string())
        }
        _ => Failure::failed(error),
    })
}

fn addon_failed(error: addons::Error) -> Failure {
    match &error {
        addons::Error::Api(cause) => {
            Failure::Failed(kubeconfig::exit_code(cause), error.to_string())
        }
        _ => Failure::failed(error),
    }
}
