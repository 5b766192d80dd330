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

fn run(mut args: lexopt::Parser) -> Result<(), Failure> {
    let (mut verbosity, mut log_format) = (0, logger::Format::default());
    let mut keys = Flags::default();
    let mut listen = SocketAddr::new(network::any_address(), proto::join::PORT);
    let (mut health, mut metrics) = (None, None);
    let mut config_dir: PathBuf = join_service::CONFIG_DIR.into();
    let mut variant = variant::DEFAULT.to_owned();
    let (mut cloud, mut metadata_url, mut kubeconfig) = (String::new(), String::new(), None);
    let (mut evidence, mut require_strong) = (PathBuf::new(), false);
    let (mut verification, mut verification_http) = (None, None);
    let mut pki_dir = PathBuf::from(join_service::PKI_DIR);
    let mut migration = Migration::default();
    let mut collateral = collateral::Flags::default();
    let mut checked = Vec::new();
    while let Some(arg) = args.next()? {
        match arg {
            Long(name) if Flags::has(name) => {
                let name = name.to_owned();
                keys.set(&name, args.value()?)?;
            }
            Long(name) if collateral::Flags::has(name) => {
                let name = name.to_owned();
                collateral.set(&name, args.value()?)?;
            }
            Long("listen") => listen = services::listen("listen", args.value()?)?,
            Long("health") => health = Some(services::listen("health", args.value()?)?),
            Long("check") => checked.push(program::text(args.value()?)?),
            Long("metrics") => metrics = Some(services::listen("metrics", args.value()?)?),
            Long("config") => config_dir = args.value()?.into(),
            Long("attestation-variant") => variant = program::text(args.value()?)?,
            Long("cloud-provider") => cloud = program::text(args.value()?)?,
            Long("metadata") => metadata_url = program::text(args.value()?)?,
            Long("kubeconfig") => kubeconfig = Some(PathBuf::from(args.value()?)),
            Long("migrate-until") => migration = program::parsed("migrate-until", args.value()?)?,
            Long("evidence") => evidence = args.value()?.into(),
            Long("verification") => verification = optional("verification", args.value()?)?,
            Long("verification-http") => {
                verification_http = optional("verification-http", args.value()?)?
            }
            Long("require") => {
                require_strong = match program::text(args.value()?)?.as_str() {
                    "" => false,
                    "strong" => true,
                    other => {
                        let text = format!("--require {other:?}: expected strong");
                        return Err(Failure::Usage(text));
                    }
                }
            }
            Long("pki") => pki_dir = args.value()?.into(),
            Long("log-format") => log_format = program::parsed("log-format", args.value()?)?,
            Short('v') => verbosity = program::parsed("v", args.value()?)?,
            Long("help") | Short('h') => return Err(Failure::Help),
            Long("version") => return Err(Failure::Version),
            other => return Err(other.unexpected().into()),
        }
    }
    if !checked.is_empty() {
        return check(&checked);
    }
    if (verification.or(verification_http)).is_some() && evidence.as_os_str().is_empty() {
        return Err(Failure::Usage("--verification: it needs --evidence".into()));
    }
    let variant = Variant::named(&variant).map_err(Failure::failed)?;
    let signals = program::prepare_service(logger::level_of_verbosity(verbosity), log_format)?;
    // The chart passes each of its options, and an empty value means that the option is not set.
    let url = Some(metadata_url.as_str()).filter(|url| !url.is_empty());
    let metadata = (!cloud.is_empty())
        .then(|| cloud_api::metadata(Cloud::named(&cloud)?, url))
        .transpose()
        .map_err(Failure::failed)?;
    let kubernetes = kubernetes(kubeconfig.as_deref())?;
    let mut collateral = collateral.finish(|| {
        let config = self::kubernetes(kubeconfig.as_deref()).ok()??;
        Some(client::Client::new(config, &Stop::new()))
    })?;
    // the service uses the same locations for its own collateral and for that of others
    if let Some(ec2) = &mut collateral.ec2 {
        ec2.take_place(&cloud, url);
    }
    let collateral = Fetching::new(collateral).map_err(Failure::failed)?;
    let (key_service, key_auth) = keys.finish(variant, &config_dir, Some(&collateral))?;
    let config = Config {
        listen,
        key_service,
        key_auth,
        config_dir,
        health,
        metrics,
        variant,
        evidence: (!evidence.as_os_str().is_empty()).then_some(evidence),
        verification,
        verification_http,
        require_strong,
        kubernetes,
        metadata,
        pki_dir,
        migration,
        collateral: Some(collateral),
    };
    let service = JoinService::start(config).map_err(Failure::failed)?;
    program::wait_until_stopped(&signals, join_service::GRACE)?;
    service.stop(join_service::GRACE);
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

/// Returns the access to the Kubernetes API, if there is any.
fn kubernetes(kubeconfig: Option<&Path>) -> Result<Option<client::Config>, Failure> {
    let config = match kubeconfig {
        Some(file) => client::Config::from_kubeconfig_file(file),
        None if env::var_os("KUBERNETES_SERVICE_HOST").is_some() => client::Config::in_cluster(),
        None => return Ok(None),
    };
    config.map(Some).map_err(Failure::failed)
}
