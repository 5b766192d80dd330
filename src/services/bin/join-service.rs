//! The join service: admits nodes to the cluster that prove what software they run.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use base::logger;
use base::network;
use base::options::{self, HELP, Opt, Table, VERSION, put, take};
use base::program::{self, Failure, parsed, text};
use base::stop::Stop;
use base::uuid::Uuid;
use kubernetes::client;
use kubernetes::services::migration::Migration;
use kubernetes::wrapping_key;
use services::cluster::keys::{self, KeyServiceFlags};
use services::cluster::own_node;
use services::join_service::{self, Config, JoinService, file_records};
use services::{CONFIG_DIR, GRACE, check};
use sys::keeping::WipingAllocator;
use verifier::{Variant, variant};

/// Wipes freed memory, so that no copy of a secret stays in a buffer of a library. Keeps some wiped
/// blocks for later allocations.
#[global_allocator]
static ALLOCATOR: WipingAllocator = WipingAllocator::new();

/// How long `--check` waits until the servers are healthy.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns the help text.
fn help() -> String {
    let groups = [
        options::of(keys::OPTIONS),
        options::of(OPTIONS),
        options::of(collateral::OPTIONS),
        vec![&HELP, &VERSION],
    ];
    let options = options::help(&groups.concat());
    format!(
        "\
join-service: admits nodes to the cluster that prove what software they run

Callers prove themselves by attested TLS. They must meet the attestation policy, which is read again when its file changes.

Usage: join-service --key-service HOST:PORT [OPTION]..
       join-service --check HOST:PORT..
       join-service --accept UUID=MACHINE --records DIR

{options}
Exit codes: 0 after SIGTERM or SIGINT, all are healthy, or the disk is accepted; 1 failed; 2 invalid arguments.

Example:
  join-service --key-service 127.0.0.1:9000 --config ./config --listen '*:30090'
"
    )
}

fn main() -> ExitCode {
    program::main("join-service", &help(), run)
}

/// Parses an address. The chart passes an empty one if the option is not set.
fn optional(name: &str, address: OsString) -> Result<Option<SocketAddr>, Failure> {
    if address.is_empty() {
        Ok(None)
    } else {
        Ok(Some(services::listen(name, address)?))
    }
}

fn run(args: lexopt::Parser) -> Result<(), Failure> {
    let given = Given::parse(args)?;
    if !given.checked.is_empty() {
        return check(&given.checked);
    }
    if let Some((disk, machine)) = &given.accepted {
        return accept(given.records.as_deref(), disk, machine);
    }
    let has_verification = given.verification.or(given.verification_http).is_some();
    if has_verification && given.evidence.is_none() {
        return Err(Failure::Usage("--verification: it needs --evidence".into()));
    }
    let variant = Variant::named(&given.variant).map_err(Failure::failed)?;
    let level = services::level_of_verbosity(given.verbosity);
    let signals = services::prepare_service(level, given.log_format)?;
    if given.kubeconfig.is_none()
        && let Some(access) = services::kubernetes(None)?
        && !own_node::wait_until_control_plane(
            &client::Client::new(access, &Stop::new()),
            &signals,
        )?
    {
        return Ok(());
    }
    let service = JoinService::start(given.config(variant)?).map_err(Failure::failed)?;
    services::wait_until_stopped(&signals, GRACE)?;
    service.stop(GRACE);
    Ok(())
}

/// The options of the command line. The chart passes each of its options, and an empty value means that the option is not set.
struct Given {
    verbosity: i32,
    log_format: logger::Format,
    keys: KeyServiceFlags,
    collateral: collateral::Flags,
    listen: SocketAddr,
    health: Option<SocketAddr>,
    metrics: Option<SocketAddr>,
    /// The services to ask for their health, and serve nothing.
    checked: Vec<String>,
    config_dir: PathBuf,
    variant: String,
    cloud: String,
    metadata_url: String,
    kubeconfig: Option<PathBuf>,
    records: Option<PathBuf>,
    enrolling: Migration,
    /// The disk to give to this machine, and serve nothing.
    accepted: Option<(Uuid, String)>,
    migration: Migration,
    evidence: Option<PathBuf>,
    verification: Option<SocketAddr>,
    verification_http: Option<SocketAddr>,
    require_strong: bool,
    pki_dir: PathBuf,
    wrapping_key_dir: PathBuf,
    node_files_dir: PathBuf,
}

impl Default for Given {
    fn default() -> Given {
        Given {
            verbosity: 0,
            log_format: logger::Format::default(),
            keys: KeyServiceFlags::default(),
            collateral: collateral::Flags::default(),
            listen: SocketAddr::new(network::any_address(), proto::join::PORT),
            health: None,
            metrics: None,
            checked: Vec::new(),
            config_dir: CONFIG_DIR.into(),
            variant: variant::DEFAULT.into(),
            cloud: String::new(),
            metadata_url: String::new(),
            kubeconfig: None,
            records: None,
            enrolling: Migration::default(),
            accepted: None,
            migration: Migration::default(),
            evidence: None,
            verification: None,
            verification_http: None,
            require_strong: false,
            pki_dir: join_service::PKI_DIR.into(),
            wrapping_key_dir: wrapping_key::DIRECTORY.into(),
            node_files_dir: join_service::NODE_FILES_DIR.into(),
        }
    }
}

/// The options of this program, without those about the key service and collateral.
const OPTIONS: &Table<Given> = &[
    (Opt::value("listen", "ADDRESS:PORT", "the address to listen on; *:PORT: all addresses, of IPv6 and IPv4 [*:9090]"),
     |it, name, value| put(&mut it.listen, services::listen(name, value))),
    (Opt::value("health", "ADDRESS:PORT", "the address of a plaintext gRPC health server for the kubelet's probes [none]"),
     |it, name, value| put(&mut it.health, services::listen(name, value).map(Some))),
    (Opt::value("check", "HOST:PORT", "serves nothing: asks all servers at the addresses of this name for their health, at most for 30 s, and ends; repeat it for further names"),
     |it, _, value| { it.checked.push(text(value)?); Ok(()) }),
    (Opt::value("metrics", "ADDRESS:PORT", "the address of an HTTP server for Prometheus' metrics, path /metrics [none]"),
     |it, name, value| put(&mut it.metrics, services::listen(name, value).map(Some))),
    (Opt::value("config", "DIR", "directory with attestationConfig (the policy, JSON) and measurementSalt").or(CONFIG_DIR),
     |it, _, value| put(&mut it.config_dir, Ok(value.into()))),
    (Opt::value("attestation-variant", "VARIANT", "attestation variant of the nodes").one_of(&variant::NAMES).or(variant::DEFAULT),
     |it, _, value| put(&mut it.variant, text(value))),
    (Opt::value("evidence", "SOCKET", "unix socket at which the host proves this machine to nodes: /run/firstlight/evidence/socket; without it, this service proves nothing [none]"),
     |it, _, value| put(&mut it.evidence, Ok(Some(value).filter(|it| !it.is_empty()).map(PathBuf::from)))),
    (Opt::value("verification", "ADDRESS:PORT", "answers there like Constellation's verification service: evidence for every caller, without TLS, by --evidence, gRPC [none]"),
     |it, name, value| put(&mut it.verification, optional(name, value))),
    (Opt::value("verification-http", "ADDRESS:PORT", "the same over HTTP [none]"),
     |it, name, value| put(&mut it.verification_http, optional(name, value))),
    (Opt::value("require", "FORM", "refuses nodes of the old form of attested TLS, as those of Constellation; off by default").one_of(&["strong"]),
     |it, name, value| put(&mut it.require_strong, strong(name, value))),
    (Opt::value("cloud-provider", "CLOUD", "the cloud whose metadata service lists the machines; without it, machines of any name are admitted as workers, and control planes cannot join").one_of(&base::machines::NAMES),
     |it, _, value| put(&mut it.cloud, text(value))),
    (Opt::value("metadata", "URL", "the URL of the metadata service [the cloud's default]"),
     |it, _, value| put(&mut it.metadata_url, text(value))),
    (Opt::value("kubeconfig", "FILE", "access to the Kubernetes API [the pod's service account; without access, no new node can join, and --records says which machine has which disk; without both, any machine that meets the policy gets the key of any disk]"),
     |it, _, value| put(&mut it.kubeconfig, Ok(Some(value.into())))),
    (Opt::value("records", "DIR", "without Kubernetes: the folder of the records of disks, one file UUID.json for each; a disk opens only in the machine of its record [none]"),
     |it, _, value| put(&mut it.records, Ok(Some(value.into())))),
    (Opt::value("enroll-until", "DATE", "with --records: records each new disk for the machine that asks first, through the end of this day in UTC [off]"),
     |it, name, value| put(&mut it.enrolling, parsed(name, value))),
    (Opt::value("accept", "UUID=MACHINE", "serves nothing: gives this disk to this machine in the records of --records, and ends"),
     |it, name, value| put(&mut it.accepted, owner(name, value).map(Some))),
    (Opt::value("migrate-until", "DATE", "also open disks without a record, such as those of Constellation, through the end of this day in UTC; for example 2027-01-31 [off]"),
     |it, name, value| put(&mut it.migration, parsed(name, value))),
    (Opt::value("pki", "DIR", "directory with the cluster's CA and the files for control planes").or(join_service::PKI_DIR),
     |it, _, value| put(&mut it.pki_dir, Ok(value.into()))),
    (Opt::value("wrapping-key", "DIR", "directory with the wrapping key, which new control planes get").or(wrapping_key::DIRECTORY),
     |it, _, value| put(&mut it.wrapping_key_dir, Ok(value.into()))),
    (Opt::value("node-files", "DIR", "directory with the operator's files for new nodes; it need not exist").or(join_service::NODE_FILES_DIR),
     |it, _, value| put(&mut it.node_files_dir, Ok(value.into()))),
    (services::LOG_FORMAT, |it, name, value| put(&mut it.log_format, parsed(name, value))),
    (services::VERBOSITY, |it, name, value| put(&mut it.verbosity, parsed(name, value))),
];

/// Parses the value of `--accept`.
fn owner(name: &str, value: OsString) -> Result<(Uuid, String), Failure> {
    let value = text(value)?;
    let (disk, machine) = value.split_once('=').unwrap_or((&value, ""));
    let is_word = !machine.is_empty() && machine.bytes().all(|byte| byte.is_ascii_alphanumeric());
    match (Uuid::parse(disk), is_word) {
        (Some(disk), true) => Ok((disk, machine.into())),
        _ => Err(Failure::Usage(format!(
            "--{name} {value:?}: expected the UUID of a disk, '=', and the machine as the log names it"
        ))),
    }
}

/// Parses the value of `--require`. The chart passes an empty one if the option is not set.
fn strong(name: &str, value: OsString) -> Result<bool, Failure> {
    match text(value)?.as_str() {
        "" => Ok(false),
        "strong" => Ok(true),
        other => {
            let text = format!("--{name} {other:?}: expected strong");
            Err(Failure::Usage(text))
        }
    }
}

impl Given {
    fn parse(args: lexopt::Parser) -> Result<Given, Failure> {
        let mut given = Given::default();
        options::parse(args, |name, args| {
            Ok(take(OPTIONS, name, args, &mut given)?.is_some()
                || take(keys::OPTIONS, name, args, &mut given.keys)?.is_some()
                || take(collateral::OPTIONS, name, args, &mut given.collateral)?.is_some())
        })?;
        Ok(given)
    }

    /// Refuses options about records that contradict each other.
    fn check_records(&self, has_cluster: bool) -> Result<(), Failure> {
        let is_enrolling = self.enrolling != Migration::default();
        let text = match (&self.records, has_cluster) {
            (Some(_), true) => {
                "--records: the records of a cluster are in its API server; remove --records, or --kubeconfig"
            }
            (None, _) if is_enrolling => "--enroll-until: it needs --records",
            (Some(_), _) if self.migration != Migration::default() => {
                "--migrate-until is for disks of Constellation; new disks with --records: --enroll-until"
            }
            _ => return Ok(()),
        };
        Err(Failure::Usage(text.into()))
    }

    /// Returns the configuration of the service.
    fn config(self, variant: &'static Variant) -> Result<Config, Failure> {
        let kubeconfig = self.kubeconfig.as_deref();
        self.check_records(services::has_cluster(kubeconfig))?;
        let access = services::kubernetes(kubeconfig)?;
        let cloud = (self.cloud.as_str(), self.metadata_url.as_str());
        let (metadata, collateral) =
            services::metadata_and_collateral(cloud, self.collateral, kubeconfig)?;
        let (key_service, key_auth) = self.keys.finish(
            variant,
            &self.config_dir,
            &self.wrapping_key_dir,
            Some(&collateral),
        )?;
        Ok(Config {
            listen: self.listen,
            key_service,
            key_auth,
            config_dir: self.config_dir,
            health: self.health,
            metrics: self.metrics,
            variant,
            evidence: self.evidence,
            verification: self.verification,
            verification_http: self.verification_http,
            require_strong: self.require_strong,
            kubernetes: access,
            records: self.records.map(|dir| (dir, self.enrolling)),
            metadata,
            pki_dir: self.pki_dir,
            wrapping_key_dir: self.wrapping_key_dir,
            node_files_dir: self.node_files_dir,
            migration: self.migration,
            collateral: Some(collateral),
        })
    }
}

/// Gives a disk to a machine in the records of a folder.
fn accept(records: Option<&Path>, disk: &Uuid, machine: &str) -> Result<(), Failure> {
    let records = records.ok_or_else(|| Failure::Usage("--accept: it needs --records".into()))?;
    let path = file_records::accept(records, disk, machine).map_err(|error| {
        Failure::failed(format!("cannot write to {}: {error}", records.display()))
    })?;
    println!(
        "{} gives the disk {disk} to the machine {machine}",
        path.display()
    );
    Ok(())
}

/// Asks services for their health, and prints which addresses answered.
fn check(names: &[String]) -> Result<(), Failure> {
    for name in names {
        for address in check::health(name, PATIENCE).map_err(Failure::failed)? {
            println!("{name}: {address} is healthy");
        }
    }
    Ok(())
}
