//! Lets nodes in that prove what they run.

use std::env;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;

use attest::attestation::qemu_vtpm;
use base::logger;
use base::program::{self, Failure};
use cloud::Metadata;
use kubernetes::client;
use kubernetes::services::migration::Migration;
use lexopt::prelude::*;
use services::join_service::keys::Flags;
use services::join_service::{self, Config, JoinService};
use sys::wiping::Wiping;

/// Copies of secrets do not outlive their use in buffers of libraries.
#[global_allocator]
static ALLOCATOR: Wiping = Wiping;

const HELP: &str = "\
join-service: lets nodes in that prove what they run

Callers prove themselves by attested TLS; the policy that they must meet is read from a file, and again when it changes.

Usage: join-service --key-service HOST:PORT [OPTION]..

  --key-service HOST:PORT        where keys come from
  --key-service-endpoint HOST:PORT
                                 the same by the old system's option, with --key-service-auth none unless that is given
  --key-service-auth HOW         how the two know each other [attested]: attested, by the TPMs of both; token, by ours;
                                 none, for a key service that asks for no proof
  --key-service-token FILE       with token [/var/run/secrets/firstlight/key-service/token]
  --tpm LOCATION                 with attested: device:PATH or swtpm:host=ADDRESS,port=PORT [/dev/tpmrm0, else /dev/tpm0]
  --listen ADDRESS:PORT          where to listen [0.0.0.0:9090]
  --health ADDRESS:PORT          tell a kubelet's grpc probes here, in plaintext, that it serves [no]
  --metrics ADDRESS:PORT         Prometheus' metrics over HTTP, at /metrics [no]
  --config DIR                   holds attestationConfig, the policy (JSON), and measurementSalt [/var/config]
  --attestation-variant VARIANT  of the nodes; this version has qemu-vtpm alone [qemu-vtpm]
  --cloud-provider CLOUD         whose metadata service says which machines there are: qemu; without one, machines of
                                 any name are let in, but no control planes
  --metadata URL                 where that is [its usual place]
  --kubeconfig FILE              how to reach the cluster's API [what a pod finds; without, no new node is let in,
                                 and any machine that meets the policy gets the key of any disk]
  --migrate-until DATE           also open disks that have no record, as those of the old system, up to and with this day in
                                 UTC, as 2027-01-31 [no]
  --pki DIR                      has the cluster's CA and the files of control planes [/etc/kubernetes/pki]
  -v LEVEL                       -1 debug, 0 info, 1 warnings, 2 errors [0]
  -h, --help                     this text
      --version                  the version

Exit codes: 0 after SIGTERM or SIGINT, 1 failed, 2 the arguments make no sense.

Example:
  join-service --key-service 127.0.0.1:9000 --config ./config --listen 0.0.0.0:30090
";

fn main() -> ExitCode {
    program::main("join-service", HELP, run)
}

fn run(mut args: lexopt::Parser) -> Result<(), Failure> {
    let mut verbosity = 0;
    let mut keys = Flags::default();
    let mut listen = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), proto::join::PORT);
    let (mut health, mut metrics) = (None, None);
    let mut config_dir: PathBuf = join_service::CONFIG_DIR.into();
    let mut variant = qemu_vtpm::VARIANT.to_owned();
    let (mut cloud, mut metadata_url, mut kubeconfig) = (String::new(), String::new(), None);
    let mut pki_dir = PathBuf::from(join_service::PKI_DIR);
    let mut migration = Migration::default();
    while let Some(arg) = args.next()? {
        match arg {
            Long(name) if Flags::has(name) => {
                let name = name.to_owned();
                keys.set(&name, args.value()?)?;
            }
            Long("listen") => listen = program::parsed("listen", args.value()?)?,
            Long("health") => health = Some(program::parsed("health", args.value()?)?),
            Long("metrics") => metrics = Some(program::parsed("metrics", args.value()?)?),
            Long("config") => config_dir = args.value()?.into(),
            Long("attestation-variant") => variant = program::text(args.value()?)?,
            Long("cloud-provider") => cloud = program::text(args.value()?)?,
            Long("metadata") => metadata_url = program::text(args.value()?)?,
            Long("kubeconfig") => kubeconfig = Some(PathBuf::from(args.value()?)),
            Long("migrate-until") => migration = program::parsed("migrate-until", args.value()?)?,
            Long("pki") => pki_dir = args.value()?.into(),
            Short('v') => verbosity = program::parsed("v", args.value()?)?,
            Long("help") | Short('h') => return Err(Failure::Help),
            Long("version") => return Err(Failure::Version),
            other => return Err(other.unexpected().into()),
        }
    }
    let (key_service, key_auth) = keys.finish(&config_dir)?;
    let signals = program::prepare_service(logger::level_of_verbosity(verbosity))?;
    // a chart has a value for each of its options; an empty one is none
    let url = Some(metadata_url.as_str()).filter(|url| !url.is_empty());
    let metadata = (!cloud.is_empty())
        .then(|| Metadata::of(&cloud, url))
        .transpose()
        .map_err(Failure::failed)?;
    let kubernetes = match kubeconfig {
        Some(file) => Some(client::Config::from_kubeconfig_file(&file).map_err(Failure::failed)?),
        None if env::var_os("KUBERNETES_SERVICE_HOST").is_some() => {
            Some(client::Config::in_cluster().map_err(Failure::failed)?)
        }
        None => None,
    };
    let config = Config {
        listen,
        key_service,
        key_auth,
        config_dir,
        health,
        metrics,
        variant,
        kubernetes,
        metadata,
        pki_dir,
        migration,
    };
    let service = JoinService::start(config).map_err(Failure::failed)?;
    program::wait_until_stopped(&signals, join_service::GRACE)?;
    service.stop(join_service::GRACE);
    Ok(())
}
