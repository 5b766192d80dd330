//! The join service: admits nodes to the cluster that prove what software they run.

use std::env;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use base::logger;
use base::network;
use base::program::{self, Failure};
use base::stop::Stop;
use collateral::Fetching;
use kubernetes::client;
use kubernetes::services::migration::Migration;
use lexopt::prelude::*;
use machines::Cloud;
use services::check;
use services::join_service::keys::Flags;
use services::join_service::{self, Config, JoinService};
use sys::wiping::Wiping;
use verifier::{Variant, variant};

/// Wipes freed memory, so that no copies of secrets remain in buffers of libraries.
#[global_allocator]
static ALLOCATOR: Wiping = Wiping;

/// How long `--check` waits until the servers are healthy.
const PATIENCE: Duration = Duration::from_secs(30);

/// Returns the help text.
fn help() -> String {
    let (variants, clouds) = (variant::NAMES.join(", "), machines::NAMES.join(", "));
    let (default, collateral) = (variant::DEFAULT, collateral::HELP);
    format!(
        "\
join-service: admits nodes to the cluster that prove what software they run

Callers prove themselves by attested TLS. They must meet the attestation policy, which is read again when its file changes.

Usage: join-service --key-service HOST:PORT [OPTION]..
       join-service --check HOST:PORT..

  --key-service HOST:PORT[,HOST:PORT]..
                                 the addresses of the key service, of which the first that can be reached is used
  --key-service-endpoint HOST:PORT
                                 the same option under its old name; it sets --key-service-auth none as the default
  --key-service-auth HOW         authentication between the two services [attested]: attested (both by their TPM), token
                                 (this service by its token), or none
  --key-service-token FILE       the file of the token, with token [/var/run/secrets/firstlight/key-service/token]
  --tpm LOCATION                 the TPM, with attested: device:PATH, swtpm:host=ADDRESS,port=PORT or tdx:FOLDER
                                 [/dev/tpmrm0, else /dev/tpm0]
  --listen ADDRESS:PORT          the address to listen on; *:PORT: all addresses, of IPv6 and IPv4 [*:9090]
  --health ADDRESS:PORT          the address of a plaintext gRPC health server for the kubelet's probes [none]
  --check HOST:PORT              serves nothing: asks all servers at the addresses of this name for their health, at most for
                                 30 s, and ends; repeat it for further names
  --metrics ADDRESS:PORT         the address of an HTTP server for Prometheus' metrics, path /metrics [none]
  --config DIR                   directory with attestationConfig (the policy, JSON) and measurementSalt [/var/config]
  --attestation-variant VARIANT  attestation variant of the nodes: {variants} [{default}]
  --evidence SOCKET              unix socket at which the host proves this machine to nodes: /run/firstlight/evidence/socket; without it,
                                 this service proves nothing [none]
  --verification ADDRESS:PORT    answers there like Constellation's verification service: evidence for whoever asks, without TLS, by
                                 --evidence, gRPC [none]
  --verification-http ADDRESS:PORT
                                 the same over HTTP [none]
{collateral}  --require strong               refuses nodes of the old form of attested TLS, as those of Constellation [off]
  --cloud-provider CLOUD         the cloud whose metadata service lists the machines: {clouds}; without it, machines
                                 of any name are admitted as workers, and control planes cannot join
  --metadata URL                 the URL of the metadata service [the cloud's default]
  --kubeconfig FILE              access to the Kubernetes API [the pod's service account; without access, no new node can
                                 join, and any machine that meets the policy gets the key of any disk]
  --migrate-until DATE           also open disks without a record, such as those of Constellation, through the end of
                                 this day in UTC; for example 2027-01-31 [off]
  --pki DIR                      directory with the cluster's CA and the files for control planes [/etc/kubernetes/pki]
  --log-format FORMAT            text, or json: one object a line with ts, level, logger, msg, uptime [text]
  -v LEVEL                       -1 debug, 0 info, 1 warnings, 2 errors [0]
  -h, --help                     print this help
      --version                  print the version

Exit codes: 0 after SIGTERM or SIGINT, or all are healthy; 1 failed; 2 invalid arguments.

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
    match address.is_empty() {
        true => Ok(None),
        false => Ok(Some(services::listen(name, address)?)),
    }
}

fn run(args: lexopt::Parser) -> Result<(), Failure> {
    let given = Given::parse(args)?;
    if !given.checked.is_empty() {
        return check(&given.checked);
    }
    let has_verification = given.verification.or(given.verification_http).is_some();
    if has_verification && given.evidence.is_none() {
        return Err(Failure::Usage("--verification: it needs --evidence".into()));
    }
    let variant = Variant::named(&given.variant).map_err(Failure::failed)?;
    let level = services::level_of_verbosity(given.verbosity);
    let signals = program::prepare_service(level, given.log_format)?;
    let service = JoinService::start(given.config(variant)?).map_err(Failure::failed)?;
    program::wait_until_stopped(&signals, join_service::GRACE)?;
    service.stop(join_service::GRACE);
    Ok(())
}

/// The options of the command line. The chart passes each of its options, and an empty value means that the option is not set.
struct Given {
    verbosity: i32,
    log_format: logger::Format,
    keys: Flags,
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
    migration: Migration,
    evidence: Option<PathBuf>,
    verification: Option<SocketAddr>,
    verification_http: Option<SocketAddr>,
    require_strong: bool,
    pki_dir: PathBuf,
}

impl Default for Given {
    fn default() -> Given {
        Given {
            verbosity: 0,
            log_format: logger::Format::default(),
            keys: Flags::default(),
            collateral: collateral::Flags::default(),
            listen: SocketAddr::new(network::any_address(), proto::join::PORT),
            health: None,
            metrics: None,
            checked: Vec::new(),
            config_dir: join_service::CONFIG_DIR.into(),
            variant: variant::DEFAULT.into(),
            cloud: String::new(),
            metadata_url: String::new(),
            kubeconfig: None,
            migration: Migration::default(),
            evidence: None,
            verification: None,
            verification_http: None,
            require_strong: false,
            pki_dir: join_service::PKI_DIR.into(),
        }
    }
}

impl Given {
    fn parse(mut args: lexopt::Parser) -> Result<Given, Failure> {
        let mut given = Given::default();
        while let Some(arg) = args.next()? {
            match arg {
                Long("help") | Short('h') => return Err(Failure::Help),
                Long("version") => return Err(Failure::Version),
                Short('v') => given.verbosity = program::parsed("v", args.value()?)?,
                Long(name) => {
                    let name = name.to_owned();
                    given.set(&name, &mut args)?;
                }
                other => return Err(other.unexpected().into()),
            }
        }
        Ok(given)
    }

    /// Sets the option `--name`, whose value is the next argument.
    fn set(&mut self, name: &str, args: &mut lexopt::Parser) -> Result<(), Failure> {
        match name {
            _ if Flags::has(name) => self.keys.set(name, args.value()?)?,
            _ if collateral::Flags::has(name) => self.collateral.set(name, args.value()?)?,
            "listen" => self.listen = services::listen(name, args.value()?)?,
            "health" => self.health = Some(services::listen(name, args.value()?)?),
            "check" => self.checked.push(program::text(args.value()?)?),
            "metrics" => self.metrics = Some(services::listen(name, args.value()?)?),
            "config" => self.config_dir = args.value()?.into(),
            "attestation-variant" => self.variant = program::text(args.value()?)?,
            "cloud-provider" => self.cloud = program::text(args.value()?)?,
            "metadata" => self.metadata_url = program::text(args.value()?)?,
            "kubeconfig" => self.kubeconfig = Some(args.value()?.into()),
            "migrate-until" => self.migration = program::parsed(name, args.value()?)?,
            "evidence" => {
                self.evidence =
                    Some(PathBuf::from(args.value()?)).filter(|it| !it.as_os_str().is_empty())
            }
            "verification" => self.verification = optional(name, args.value()?)?,
            "verification-http" => self.verification_http = optional(name, args.value()?)?,
            "require" => {
                self.require_strong = match program::text(args.value()?)?.as_str() {
                    "" => false,
                    "strong" => true,
                    other => {
                        let text = format!("--require {other:?}: expected strong");
                        return Err(Failure::Usage(text));
                    }
                }
            }
            "pki" => self.pki_dir = args.value()?.into(),
            "log-format" => self.log_format = program::parsed(name, args.value()?)?,
            _ => return Err(Long(name).unexpected().into()),
        }
        Ok(())
    }

    /// Returns the configuration of the service.
    fn config(self, variant: &'static Variant) -> Result<Config, Failure> {
        let url = Some(self.metadata_url.as_str()).filter(|url| !url.is_empty());
        let metadata = (!self.cloud.is_empty())
            .then(|| cloud_api::metadata(Cloud::named(&self.cloud)?, url))
            .transpose()
            .map_err(Failure::failed)?;
        let kubeconfig = self.kubeconfig.as_deref();
        let access = kubernetes(kubeconfig)?;
        let mut collateral = self.collateral.finish(|| {
            let config = kubernetes(kubeconfig).ok()??;
            Some(client::Client::new(config, &Stop::new()))
        })?;
        // the places are the same for what the service asks about itself and about others
        if let Some(ec2) = &mut collateral.ec2 {
            ec2.take_place(&self.cloud, url);
        }
        let collateral = Fetching::new(collateral).map_err(Failure::failed)?;
        let (key_service, key_auth) =
            self.keys
                .finish(variant, &self.config_dir, Some(&collateral))?;
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
            metadata,
            pki_dir: self.pki_dir,
            migration: self.migration,
            collateral: Some(collateral),
        })
    }
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

/// Returns the access to the Kubernetes API, if there is any.
fn kubernetes(kubeconfig: Option<&Path>) -> Result<Option<client::Config>, Failure> {
    let config = match kubeconfig {
        Some(file) => client::Config::from_kubeconfig_file(file),
        None if env::var_os("KUBERNETES_SERVICE_HOST").is_some() => client::Config::in_cluster(),
        None => return Ok(None),
    };
    config.map(Some).map_err(Failure::failed)
}
