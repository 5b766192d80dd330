//! `firstlight apply`: installs or upgrades the services of the control planes in a cluster.

use std::path::{Path, PathBuf};
use std::time::Duration;

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
    /// The administrator's kubeconfigs, as `$KUBECONFIG` names several.
    pub kubeconfig: Vec<PathBuf>,
    /// The attestation policy that nodes must meet.
    pub policy: PathBuf,
    /// Whether the policy refuses nodes of the old form of attested TLS, also if the file does not say so; as before if `None`.
    pub require_strong: Option<bool>,
    /// The attestation variant of the nodes; as before if `None`.
    pub variant: Option<&'static Variant>,
    /// The services' container image; empty if the services are skipped.
    pub image: String,
    /// The parts that are not changed.
    pub skip_phases: Vec<Phase>,
    /// Where the master secret comes from.
    pub master_secret: Source,
    /// How the cluster is to keep it.
    pub wish: Wish,
    /// The state file, which has the measurement salt.
    pub state: PathBuf,
    /// The port of the join service on each control plane; as before if `None`, as are the next ones.
    pub node_port: Option<u16>,
    /// The end of the time in which the join service opens disks that have no record.
    pub migration: Option<Migration>,
    /// The metadata service that the join service asks for the machines.
    pub metadata: Option<MetadataService>,
    /// The folder for the folders with saved manifests.
    pub backups: PathBuf,
    /// Whether to return as soon as the API server has accepted the objects.
    pub skip_wait: bool,
    /// Whether to print the manifests only, without a cluster.
    pub print: bool,
    /// Whether to check everything and to change nothing.
    pub is_dry_run: bool,
    /// The form of the output.
    pub output: Output,
    /// The limit until everything is ready.
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

/// Returns the number of changed objects for people.
pub fn summary(applied: &Applied) -> String {
    match applied.changed.len() {
        0 => "nothing had to be changed".into(),
        1 => "1 object is new or changed".into(),
        count => format!("{count} objects are new or changed"),
    }
}

/// Returns the changed objects, and the folder with those before, for programs.
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
    // checked here, because the service keeps the old policy if it cannot read the new one, and the operator would not notice
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
    // without a cluster the variant is not known, and may be another one
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
        // the policy has it; a value of the chart has the same effect, and ends with --require any
        require_strong: options.require_strong.filter(|strong| !strong),
    })
}

/// Returns the attestation variant: what the options or the policy say, or else as before.
fn variant(options: &Options, client: Option<&Client>) -> Result<&'static Variant, Failure> {
    if let Some(variant) = options.variant {
        return Ok(variant);
    }
    let present = client.map(services::present_variant).transpose();
    let present = present.map_err(kubeconfig::failed)?.flatten();
    Variant::named(present.as_deref().unwrap_or(DEFAULT)).map_err(Failure::failed)
}

/// Returns whether to add the requirement of the strong form to a policy without it: as the options say, or else as in the cluster.
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
    // a policy that cannot be read, such as one of the old system, requires nothing
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
    // what is wrong with a file is said before the cluster is asked
    if options.wish.kms.is_none() {
        settings(options, None)?;
    }
    let progress = Progress::on_stderr();
    progress.phase(format!("waiting for the API server {}", client.server()));
    client
        .within(options.timeout)
        .wait_ready(&mut |why| progress.line(why))
        .map_err(kubeconfig::failed)?;
    if options.wish.kms.is_none() && !options.skip_phases.contains(&Phase::Services) {
        check_named(client)?;
    }
    let settings = settings(options, Some(client))?;
    if !options.is_dry_run {
        interrupt::means(
            "what was applied stays, and nothing is rolled back; run the same command again",
        );
    }
    let how = services::Options {
        skip: &options.skip_phases,
        backups: Path::new(&options.backups),
        wait: (!options.skip_wait).then_some(options.timeout),
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
