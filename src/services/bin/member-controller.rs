//! The member controller: works on members that have joined, with an account of its own.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use base::logger;
use base::options::{self, HELP, Opt, Table, VERSION, put, take};
use base::program::{self, Failure, parsed, text};
use base::stop::Stop;
use kubernetes::client;
use kubernetes::services::migration::Migration;
use kubernetes::wrapping_key;
use services::cluster::keys::{self, KeyClient, KeyServiceFlags};
use services::cluster::own_node;
use services::cluster::secrets::Secrets;
use services::member_controller::watch::{Judging, flags};
use services::member_controller::{MemberController, Options};
use services::{CONFIG_DIR, GRACE};
use sys::keeping::WipingAllocator;
use verifier::{Variant, variant};

/// Wipes freed memory, so that no copy of a secret stays in a buffer of a library.
#[global_allocator]
static ALLOCATOR: WipingAllocator = WipingAllocator::new();

/// Returns the help text.
fn help() -> String {
    let groups = [
        options::of(OPTIONS),
        options::of(keys::OPTIONS),
        options::of(flags::OPTIONS),
        options::of(collateral::OPTIONS),
        vec![&HELP, &VERSION],
    ];
    let options = options::help(&groups.concat());
    format!(
        "\
member-controller: works on the members of a cluster, after they have joined

Approves the certificates of their kubelets, deletes the records of machines that no longer exist, and with --watch asks them for fresh
evidence.

Usage: member-controller [OPTION]..

{options}
Exit codes: 0 after SIGTERM or SIGINT; 1 failed; 2 invalid arguments.

Example:
  member-controller --kubeconfig /etc/kubernetes/admin.conf --cloud-provider qemu
"
    )
}

fn main() -> ExitCode {
    program::main("member-controller", &help(), run)
}

fn run(args: lexopt::Parser) -> Result<(), Failure> {
    let given = Given::parse(args)?;
    let level = services::level_of_verbosity(given.verbosity);
    let signals = services::prepare_service(level, given.log_format)?;
    if given.kubeconfig.is_none() {
        let api = client::Client::new(given.access()?, &Stop::new());
        if !own_node::wait_until_control_plane(&api, &signals)? {
            return Ok(());
        }
    }
    let controller = MemberController::start(given.options()?).map_err(Failure::failed)?;
    services::wait_until_stopped(&signals, GRACE)?;
    controller.stop();
    Ok(())
}

/// The options of the command line. The chart passes each of its options, and an empty value means that the option is not set.
struct Given {
    verbosity: i32,
    log_format: logger::Format,
    keys: KeyServiceFlags,
    watch: flags::WatchFlags,
    collateral: collateral::Flags,
    health: Option<SocketAddr>,
    metrics: Option<SocketAddr>,
    config_dir: PathBuf,
    variant: String,
    cloud: String,
    metadata_url: String,
    kubeconfig: Option<PathBuf>,
    migration: Migration,
    wrapping_key_dir: PathBuf,
}

impl Default for Given {
    fn default() -> Given {
        Given {
            verbosity: 0,
            log_format: logger::Format::default(),
            keys: KeyServiceFlags::default(),
            watch: flags::WatchFlags::default(),
            collateral: collateral::Flags::default(),
            health: None,
            metrics: None,
            config_dir: CONFIG_DIR.into(),
            variant: variant::DEFAULT.into(),
            cloud: String::new(),
            metadata_url: String::new(),
            kubeconfig: None,
            migration: Migration::default(),
            wrapping_key_dir: wrapping_key::DIRECTORY.into(),
        }
    }
}

/// The options of this program, without those about the key service, the watch and collateral.
const OPTIONS: &Table<Given> = &[
    (Opt::value("health", "ADDRESS:PORT", "the address of a plaintext gRPC health server for the kubelet's probes [none]"),
     |it, name, value| put(&mut it.health, services::listen(name, value).map(Some))),
    (Opt::value("metrics", "ADDRESS:PORT", "the address of an HTTP server for Prometheus' metrics, path /metrics [none]"),
     |it, name, value| put(&mut it.metrics, services::listen(name, value).map(Some))),
    (Opt::value("config", "DIR", "with --watch: directory with attestationConfig (the policy, JSON) and measurementSalt").or(CONFIG_DIR),
     |it, _, value| put(&mut it.config_dir, Ok(value.into()))),
    (Opt::value("attestation-variant", "VARIANT", "attestation variant of the nodes").one_of(&variant::NAMES).or(variant::DEFAULT),
     |it, _, value| put(&mut it.variant, text(value))),
    (Opt::value("cloud-provider", "CLOUD", "the cloud whose metadata service lists the machines; without it, records of deleted machines stay").one_of(&base::machines::NAMES),
     |it, _, value| put(&mut it.cloud, text(value))),
    (Opt::value("metadata", "URL", "the URL of the metadata service [the cloud's default]"),
     |it, _, value| put(&mut it.metadata_url, text(value))),
    (Opt::value("kubeconfig", "FILE", "access to the Kubernetes API [the pod's service account]"),
     |it, _, value| put(&mut it.kubeconfig, Ok(Some(value.into())))),
    (Opt::value("migrate-until", "DATE", "kubelets of nodes without a record renew their certificates through the end of this day in UTC; for example 2027-01-31 [off]"),
     |it, name, value| put(&mut it.migration, parsed(name, value))),
    (Opt::value("wrapping-key", "DIR", "with --watch: directory with the wrapping key").or(wrapping_key::DIRECTORY),
     |it, _, value| put(&mut it.wrapping_key_dir, Ok(value.into()))),
    (services::LOG_FORMAT, |it, name, value| put(&mut it.log_format, parsed(name, value))),
    (services::VERBOSITY, |it, name, value| put(&mut it.verbosity, parsed(name, value))),
];

impl Given {
    fn parse(args: lexopt::Parser) -> Result<Given, Failure> {
        let mut given = Given::default();
        options::parse(args, |name, args| {
            Ok(take(OPTIONS, name, args, &mut given)?.is_some()
                || take(keys::OPTIONS, name, args, &mut given.keys)?.is_some()
                || take(flags::OPTIONS, name, args, &mut given.watch)?.is_some()
                || take(collateral::OPTIONS, name, args, &mut given.collateral)?.is_some())
        })?;
        Ok(given)
    }

    /// Returns the access to the Kubernetes API.
    fn access(&self) -> Result<client::ApiAccess, Failure> {
        services::kubernetes(self.kubeconfig.as_deref())?.ok_or_else(|| {
            Failure::Usage("--kubeconfig is missing: this program does not run in a pod".into())
        })
    }

    fn options(self) -> Result<Options, Failure> {
        let access = self.access()?;
        let variant = Variant::named(&self.variant).map_err(Failure::failed)?;
        let kubeconfig = self.kubeconfig.as_deref();
        let cloud = (self.cloud.as_str(), self.metadata_url.as_str());
        let (metadata, collateral) =
            services::metadata_and_collateral(cloud, self.collateral, kubeconfig)?;
        let (config_dir, wrapping_key_dir) = (self.config_dir, self.wrapping_key_dir);
        let judging = |watch| {
            let fetching = Some(&collateral);
            let (address, auth) =
                self.keys
                    .finish(variant, &config_dir, &wrapping_key_dir, fetching)?;
            let keys = KeyClient::new(&address, auth);
            let judging = Judging {
                variant,
                sources: collateral.clone(),
                secrets: Secrets::new(keys, config_dir.clone()),
                config_dir,
                wrapping_key_dir,
            };
            Ok::<_, Failure>((watch, judging))
        };
        Ok(Options {
            health: self.health,
            metrics: self.metrics,
            kubernetes: access,
            metadata,
            migration: self.migration,
            deleted_machines: Default::default(),
            watch: self.watch.finish()?.map(judging).transpose()?,
            collateral: Some(collateral),
        })
    }
}
