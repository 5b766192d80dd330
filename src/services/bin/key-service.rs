//! Derives data keys for the services of a control plane.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use attest::attestation::qemu_vtpm;
use attest::tpm::Location;
use base::logger;
use base::program::{self, Failure};
use kubernetes::client;
use lexopt::prelude::*;
use services::key_service::grants::Grants;
use services::key_service::{self, Clients, Config, KeyService};
use sys::wiping::Wiping;

/// Copies of secrets do not outlive their use in buffers of libraries.
#[global_allocator]
static ALLOCATOR: Wiping = Wiping;

const HELP: &str = "\
key-service: derives data keys from the master secret for the services of a control plane

Callers say who they are, and have the classes of keys that they were granted: disk (ids that are UUIDs: state disks and
volumes; of service accounts only the join service's has those of state disks), volume (UUIDs that no record of the join
service says to be a state disk's, which the API server is asked), ssh (of the authorities for hosts and users what tickets need), ssh-users
(the seed of that for users), measurement, other; or id:NAME for the one key of that name.

Usage: key-service [OPTION]..

  --clients HOW          how callers prove who they are [attested]:
                           attested  TLS in which both ends prove by their TPM to be machines of this cluster
                           token     a service account's token for the audience key-service, by which the API server
                                     knows them
                           any       not at all, for callers of the old system
  --grant GRANTS         who may have what, CALLER=CLASS,CLASS;CALLER=..: a caller is NAMESPACE/NAME with token; with
                         attested local, a service of this machine, or member, another machine of the cluster, which never
                         has ssh, ssh-users, measurement; anyone with any [what the join service needs; with any, everything]
  --listen ADDRESS:PORT  where to listen [127.0.0.1:9000]
  --port PORT            the port alone; without --clients and --listen it is the old key service's option, and means
                         --clients any --listen 0.0.0.0:PORT --allow-plaintext
  --allow-plaintext      with token and any: listen on other than loopback addresses, since that network is encrypted and
                         trusted
  --master-secret FILE   raw bytes, at least 16 [/var/config/mastersecret]
  --salt FILE            raw bytes, at least 32 [/var/config/salt]
  --config DIR           with attested: holds attestationConfig, the policy (JSON), and measurementSalt [/var/config]
  --attestation-variant VARIANT
                         with attested: this version has qemu-vtpm alone [qemu-vtpm]
  --tpm LOCATION         with attested: device:PATH or swtpm:host=ADDRESS,port=PORT [/dev/tpmrm0, else /dev/tpm0]
  --kubeconfig FILE      with token, and where volume is granted: how to reach the API server [what a pod finds]
  --health ADDRESS:PORT  tell here, in plaintext, that it serves (grpc.health.v1); with token and any the port of the keys
                         tells it too [no]
  --metrics ADDRESS:PORT Prometheus' metrics over HTTP, at /metrics [no]
  -v LEVEL               -1 debug, 0 info, 1 warnings, 2 errors [0]
  -h, --help             this text
      --version          the version

Exit codes: 0 after SIGTERM or SIGINT, 1 failed, 2 the arguments make no sense.

Examples:
  key-service --master-secret ./mastersecret --salt ./salt --config ./config
  key-service --clients token --listen 0.0.0.0:9000 --allow-plaintext \\
    --grant 'kube-system/join-service=disk,ssh,measurement;default/s3proxy=id:s3proxy-kek'
";

fn main() -> ExitCode {
    program::main("key-service", HELP, run)
}

fn run(mut args: lexopt::Parser) -> Result<(), Failure> {
    let mut verbosity = 0;
    let (mut how, mut listen, mut port): (Option<String>, Option<SocketAddr>, Option<u16>) =
        (None, None, None);
    let mut config_dir = PathBuf::from(key_service::CONFIG_DIR);
    let mut variant = qemu_vtpm::VARIANT.to_owned();
    let (mut tpm, mut kubeconfig): (Option<Location>, Option<PathBuf>) = (None, None);
    let mut config = Config {
        listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), proto::kms::PORT),
        master_secret: key_service::MASTER_SECRET_FILE.into(),
        salt: key_service::SALT_FILE.into(),
        clients: Clients::Any,
        api: None,
        grants: None,
        allow_plaintext: false,
        health: None,
        metrics: None,
    };
    while let Some(arg) = args.next()? {
        match arg {
            Long("clients") => how = Some(program::text(args.value()?)?),
            Long("grant") => config.grants = Some(program::parsed("grant", args.value()?)?),
            Long("listen") => listen = Some(program::parsed("listen", args.value()?)?),
            Long("port") => port = Some(program::parsed("port", args.value()?)?),
            Long("allow-plaintext") => config.allow_plaintext = true,
            Long("master-secret") => config.master_secret = args.value()?.into(),
            Long("salt") => config.salt = args.value()?.into(),
            Long("config") => config_dir = args.value()?.into(),
            Long("attestation-variant") => variant = program::text(args.value()?)?,
            Long("tpm") => tpm = Some(program::parsed("tpm", args.value()?)?),
            Long("kubeconfig") => kubeconfig = Some(args.value()?.into()),
            Long("health") => config.health = Some(program::parsed("health", args.value()?)?),
            Long("metrics") => config.metrics = Some(program::parsed("metrics", args.value()?)?),
            Short('v') => verbosity = program::parsed("v", args.value()?)?,
            Long("help") | Short('h') => return Err(Failure::Help),
            Long("version") => return Err(Failure::Version),
            other => return Err(other.unexpected().into()),
        }
    }
    // which is all that the old system's chart says
    if port.is_some() && how.is_none() && listen.is_none() {
        how = Some("any".into());
        config.listen.set_ip(Ipv4Addr::UNSPECIFIED.into());
        config.allow_plaintext = true;
    }
    config.listen = listen.unwrap_or(config.listen);
    if let Some(port) = port {
        config.listen.set_port(port);
    }
    config.clients = match how.as_deref().unwrap_or("attested") {
        "attested" if variant != qemu_vtpm::VARIANT => {
            let expected = qemu_vtpm::VARIANT;
            return Err(Failure::failed(format!(
                "attestation variant {variant:?} is not supported by this version; expected {expected}"
            )));
        }
        "attested" => Clients::Attested {
            tpm: tpm
                .map_or_else(Location::default_device, Ok)
                .map_err(Failure::failed)?,
            config_dir,
        },
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
    let signals = program::prepare_service(logger::level_of_verbosity(verbosity))?;
    let service = KeyService::start(config).map_err(Failure::failed)?;
    program::wait_until_stopped(&signals, key_service::GRACE)?;
    service.stop(key_service::GRACE);
    Ok(())
}
