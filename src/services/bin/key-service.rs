//! The key service: derives data keys for the services of a control plane.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use base::backoff::Backoff;
use base::logger;
use base::network;
use base::program::{self, Failure};
use base::stop::Stop;
use collateral::Fetching;
use kms::ClusterKms;
use kubernetes::client;
use lexopt::prelude::*;
use services::key_service::grants::Grants;
use services::key_service::master_secret::{self, MasterSecret};
use services::key_service::{self, Clients, Config, KeyService};
use sys::signal::StopSignals;
use sys::wiping::Wiping;
use tpm::Location;
use verifier::{Variant, variant};

/// Wipes freed memory, so that no copies of secrets remain in buffers of libraries.
#[global_allocator]
static ALLOCATOR: Wiping = Wiping;

/// The first and the longest pause between attempts to have the master secret unwrapped.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Returns the help text.
fn help() -> String {
    let (variants, default) = (variant::NAMES.join(", "), variant::DEFAULT);
    let collateral = collateral::HELP;
    format!(
        "\
key-service: derives data keys from the master secret for the services of a control plane

Each caller authenticates itself and gets only the classes of keys that are granted to it:
  disk         keys of state disks and volumes (ids that are UUIDs); of all service accounts, only the join service's
               gets keys of state disks
  volume       keys of volumes only: UUIDs that no record of the join service names as a state disk
  ssh          the parts of the SSH authorities that join tickets need
  ssh-users    the seed of the SSH authority for users
  measurement  the measurement secret
  other        all other keys
  id:NAME      the key of this name

Usage: key-service [OPTION]..

  --clients HOW          how callers authenticate themselves [attested]:
                           attested  TLS in which both ends prove by their TPM that they are machines of this cluster
                           token     by a service account's token for the audience key-service, which the API server
                                     verifies
                           any       not at all, for callers of Constellation
  --grant GRANTS         the grants, CALLER=CLASS,CLASS;CALLER=..; CALLER is NAMESPACE/NAME with token; with attested, it
                         is local (a program of this machine) or member (another machine of the cluster, which never
                         gets ssh, ssh-users or measurement); with any, it is anyone
                         [what the join service needs; with any, everything]
  --listen ADDRESS:PORT  the address to listen on; *:PORT: all addresses, of IPv6 and IPv4 [127.0.0.1:9000]
  --port PORT            the port only; without --clients and --listen, this is the option of the old key service and means
                         --clients any --listen *:PORT --allow-plaintext
  --allow-plaintext      with token and any: permit other than loopback addresses, because that network is encrypted and
                         trusted
  --master-secret FILE   the master secret, raw, at least 16 bytes; or as `firstlight wrap` made it, or the URI of the store that
                         has it: then the external KMS must unwrap it, and the service waits while one of them is away
                         [/var/config/mastersecret]
  --salt FILE            its salt, raw, at least 32 bytes; a wrapped master secret contains it [/var/config/salt]
  --config DIR           with attested: directory with attestationConfig (the policy, JSON) and measurementSalt
                         [/var/config]
  --attestation-variant VARIANT
                         with attested: the attestation variant: {variants} [{default}]
  --tpm LOCATION         with attested: device:PATH, swtpm:host=ADDRESS,port=PORT or tdx:FOLDER [/dev/tpmrm0, else /dev/tpm0]
{collateral}  --kubeconfig FILE      with token, or if volume is granted: access to the Kubernetes API [the pod's service account]
  --health ADDRESS:PORT  the address of a plaintext gRPC health server; with token and any, the port of the keys
                         answers health checks too [none]
  --metrics ADDRESS:PORT the address of an HTTP server for Prometheus' metrics, path /metrics [none]
  --log-format FORMAT    text, or json: one object a line with ts, level, logger, msg, uptime [text]
  -v LEVEL               -1 debug, 0 info, 1 warnings, 2 errors [0]
  -h, --help             print this help
      --version          print the version

Exit codes: 0 after SIGTERM or SIGINT, 1 failed, 2 invalid arguments.

Examples:
  key-service --master-secret ./mastersecret --salt ./salt --config ./config
  key-service --clients token --listen '*:9000' --allow-plaintext \\
    --grant 'kube-system/join-service=disk,ssh,measurement;default/s3proxy=id:s3proxy-kek'
"
    )
}

fn main() -> ExitCode {
    program::main("key-service", &help(), run)
}

fn run(mut args: lexopt::Parser) -> Result<(), Failure> {
    let (mut verbosity, mut log_format) = (0, logger::Format::default());
    let (mut how, mut listen, mut port): (Option<String>, Option<SocketAddr>, Option<u16>) =
        (None, None, None);
    let mut config_dir = PathBuf::from(key_service::CONFIG_DIR);
    let mut variant = variant::DEFAULT.to_owned();
    let (mut tpm, mut kubeconfig): (Option<Location>, Option<PathBuf>) = (None, None);
    let mut key = PathBuf::from(master_secret::KEY_FILE);
    let mut salt = PathBuf::from(master_secret::SALT_FILE);
    let mut config = Config {
        listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), booted_proto::kms::PORT),
        clients: Clients::Any,
        api: None,
        grants: None,
        allow_plaintext: false,
        health: None,
        metrics: None,
    };
    let mut collateral = collateral::Flags::default();
    while let Some(arg) = args.next()? {
        match arg {
            Long(name) if collateral::Flags::has(name) => {
                let name = name.to_owned();
                collateral.set(&name, args.value()?)?;
            }
            Long("clients") => how = Some(program::text(args.value()?)?),
            Long("grant") => config.grants = Some(program::parsed("grant", args.value()?)?),
            Long("listen") => listen = Some(services::listen("listen", args.value()?)?),
            Long("port") => port = Some(program::parsed("port", args.value()?)?),
            Long("allow-plaintext") => config.allow_plaintext = true,
            Long("master-secret") => key = args.value()?.into(),
            Long("salt") => salt = args.value()?.into(),
            Long("config") => config_dir = args.value()?.into(),
            Long("attestation-variant") => variant = program::text(args.value()?)?,
            Long("tpm") => tpm = Some(program::parsed("tpm", args.value()?)?),
            Long("kubeconfig") => kubeconfig = Some(args.value()?.into()),
            Long("health") => config.health = Some(services::listen("health", args.value()?)?),
            Long("metrics") => config.metrics = Some(services::listen("metrics", args.value()?)?),
            Long("log-format") => log_format = program::parsed("log-format", args.value()?)?,
            Short('v') => verbosity = program::parsed("v", args.value()?)?,
            Long("help") | Short('h') => return Err(Failure::Help),
            Long("version") => return Err(Failure::Version),
            other => return Err(other.unexpected().into()),
        }
    }
    // Constellation's chart has only this option.
    if port.is_some() && how.is_none() && listen.is_none() {
        how = Some("any".into());
        config.listen.set_ip(network::any_address());
        config.allow_plaintext = true;
    }
    config.listen = listen.unwrap_or(config.listen);
    if let Some(port) = port {
        config.listen.set_port(port);
    }
    config.clients = match how.as_deref().unwrap_or("attested") {
        "attested" => {
            let variant = Variant::named(&variant).map_err(Failure::failed)?;
            let collateral = collateral.finish(|| {
                let api = match &kubeconfig {
                    Some(file) => client::Config::from_kubeconfig_file(file),
                    None => client::Config::in_cluster(),
                };
                Some(client::Client::new(api.ok()?, &Stop::new()))
            })?;
            Clients::Attested {
                variant,
                tpm: tpm
                    .map_or_else(variant.location, Ok)
                    .map_err(Failure::failed)?,
                config_dir,
                collateral: Some(Fetching::new(collateral).map_err(Failure::failed)?),
            }
        }
        "token" => Clients::Token,
        "any" => Clients::Any,
        other => {
            return Err(Failure::Usage(format!(
                "--clients {other:?}: expected attested, token or any"
            )));
        }
    };
    if matches!(config.clients, Clients::Token)
        || config.grants.as_ref().is_some_and(Grants::have_volumes)
    {
        let api = match kubeconfig {
            Some(file) => client::Config::from_kubeconfig_file(&file),
            None => client::Config::in_cluster(),
        };
        config.api = Some(Box::new(api.map_err(Failure::failed)?));
    }
    let signals = program::prepare_service(logger::level_of_verbosity(verbosity), log_format)?;
    let service = KeyService::start(config).map_err(Failure::failed)?;
    let Some(secret) = read(&MasterSecret { key, salt }, &service, &signals)? else {
        return Ok(());
    };
    service.provide(secret).map_err(Failure::failed)?;
    program::wait_until_stopped(&signals, key_service::GRACE)?;
    service.stop(key_service::GRACE);
    Ok(())
}

/// Returns the master secret. Waits while the external KMS is unavailable; meanwhile the service
/// tells callers why; `None` if a signal asks to stop.
fn read(
    secret: &MasterSecret,
    service: &KeyService,
    signals: &StopSignals,
) -> Result<Option<ClusterKms>, Failure> {
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    loop {
        match secret.read() {
            Err(error) if error.may_pass() => {
                service.waits(&error.to_string());
                let pause = backoff.pause();
                log::warn!("{error}; trying again in {} s", pause.as_secs() + 1);
                let waited = signals.wait_for(pause).map_err(Failure::failed)?;
                if let Some(signal) = waited {
                    log::info!("{signal}: stopped without the master secret");
                    return Ok(None);
                }
            }
            other => return other.map(Some).map_err(Failure::failed),
        }
    }
}
