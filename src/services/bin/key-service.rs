//! The key service: derives data keys for the services of a control plane.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use base::backoff::Backoff;
use base::logger;
use base::master_secret::MasterSecret;
use base::network;
use base::options::{self, HELP, Opt, Table, VERSION, put, take};
use base::program::{self, Failure, parsed, text};
use base::stop::Stop;
use base::text::hex;
use collateral::Fetching;
use kubernetes::client;
use kubernetes::services::migration::Migration;
use kubernetes::wrapping_key;
use services::cluster::keys::SECRET_FILE;
use services::key_service::grants::Grants;
use services::key_service::master_secret::{self, MasterSecretFiles};
use services::key_service::{self, Clients, KeyService, KeyServiceConfig, tokens};
use sys::keeping::WipingAllocator;
use sys::signal::StopSignals;
use tpm::Location;
use verifier::{Variant, variant};

/// Wipes freed memory, so that no copy of a secret stays in a buffer of a library. Keeps some wiped
/// blocks for later allocations.
#[global_allocator]
static ALLOCATOR: WipingAllocator = WipingAllocator::new();

/// The first and the longest pause between attempts to have the master secret unwrapped.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The default port for clients without a token.
const OLD_PORT: u16 = 9001;

/// Returns the help text.
fn help() -> String {
    let groups = [
        options::of(OPTIONS),
        options::of(collateral::OPTIONS),
        vec![&HELP, &VERSION],
    ];
    let options = options::help(&groups.concat());
    format!(
        "\
key-service: derives data keys from the master secret for the services of a control plane

Each caller authenticates itself and gets only the classes of keys that are granted to it:
  disk         keys of state disks and volumes (ids that are UUIDs); of all service accounts, only the join service's
               gets keys of state disks
  volume       keys of volumes only: for a token, of those that are attached to the node of its pod; else of UUIDs that no
               record of the join service names as a state disk
  ssh          the parts of the SSH authorities that join tickets need
  ssh-users    the seed of the SSH authority for users
  measurement  the measurement secret
  other        all other keys
  id:NAME      the key of this name

Usage: key-service [OPTION]..

{options}
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

fn run(args: lexopt::Parser) -> Result<(), Failure> {
    let given = Given::parse(args)?;
    let (level, format) = (
        services::level_of_verbosity(given.verbosity),
        given.log_format,
    );
    // before the first message of the configuration
    let signals = services::prepare_service(level, format)?;
    if given.print_cluster_id {
        return given.print_id();
    }
    let (config, secret) = given.config()?;
    let service = KeyService::start(config).map_err(Failure::failed)?;
    // the join service reaches a key service that waits for the master secret, too
    if let Ok(Some(key)) = wrapping_key::read(&secret.wrapping_key) {
        service.prove(&key);
    }
    let Some(secret) = read(&secret, &service, &signals)? else {
        return Ok(());
    };
    service.provide(secret).map_err(Failure::failed)?;
    services::wait_until_stopped(&signals, key_service::GRACE)?;
    service.stop(key_service::GRACE);
    Ok(())
}

/// The options of the command line.
struct Given {
    verbosity: i32,
    log_format: logger::Format,
    /// How callers authenticate themselves.
    how: Option<String>,
    grants: Option<Grants>,
    clients_secret: PathBuf,
    listen: Option<SocketAddr>,
    port: Option<u16>,
    allow_plaintext: bool,
    listen_tls: Option<SocketAddr>,
    listen_old: Option<SocketAddr>,
    old_clients: Migration,
    master_secret: PathBuf,
    print_cluster_id: bool,
    salt: PathBuf,
    wrapping_key: PathBuf,
    place_wrapping_key: bool,
    config_dir: PathBuf,
    variant: String,
    tpm: Option<Location>,
    collateral: collateral::Flags,
    kubeconfig: Option<PathBuf>,
    health: Option<SocketAddr>,
    metrics: Option<SocketAddr>,
}

/// The options of this program, without those about collateral.
const OPTIONS: &Table<Given> = &[
    (Opt::value("clients", "HOW", "how callers authenticate themselves: attested: TLS in which both ends prove by their TPM that they are machines of this cluster; token: by a service account's token for the audience key-service, which the API server verifies; secret: by TLS in which both ends show that they know a secret, without Kubernetes; any: not at all, for callers of Constellation").or("attested"),
     |it, _, value| put(&mut it.how, text(value).map(Some))),
    (Opt::value("clients-secret", "FILE", "with secret: the file of that secret, at least 32 bytes").or(SECRET_FILE),
     |it, _, value| put(&mut it.clients_secret, Ok(value.into()))),
    (Opt::value("grant", "GRANTS", "the grants, CALLER=CLASS,CLASS;CALLER=..; CALLER is NAMESPACE/NAME with token; with attested, it is local (a program of this machine) or member (another machine of the cluster, which never gets ssh, ssh-users or measurement); with secret, it is local; with any, it is anyone [what the join service needs; with any, everything]"),
     |it, name, value| put(&mut it.grants, parsed(name, value).map(Some))),
    (Opt::value("listen", "ADDRESS:PORT", "the address to listen on; *:PORT: all addresses, of IPv6 and IPv4 [127.0.0.1:9000]"),
     |it, name, value| put(&mut it.listen, services::listen(name, value).map(Some))),
    (Opt::value("port", "PORT", "the port only; without --clients and --listen, this is the option of the old key service and means --clients any --listen *:PORT --allow-plaintext"),
     |it, name, value| put(&mut it.port, parsed(name, value).map(Some))),
    (Opt::flag("allow-plaintext", "with --clients token and any: permit other than loopback addresses, because that network is encrypted and trusted"),
     |it, _, _| put(&mut it.allow_plaintext, Ok(true))),
    (Opt::value("listen-tls", "ADDRESS:PORT", "with --clients token: the address on which pods of other nodes are served by TLS; the ConfigMap key-service-ca has its certificate [none]"),
     |it, name, value| put(&mut it.listen_tls, services::listen(name, value).map(Some))),
    (Opt::value("old-clients-until", "DATE", "through the end of this day in UTC, also give keys of volumes to clients without a token, such as the CSI drivers of Constellation; for example 2027-01-31 [off]"),
     |it, name, value| put(&mut it.old_clients, parsed(name, value))),
    (Opt::value("listen-old", "ADDRESS:PORT", "the address for these clients, in plaintext").or("*:9001"),
     |it, name, value| put(&mut it.listen_old, services::listen(name, value).map(Some))),
    (Opt::value("master-secret", "FILE", "the master secret: raw (at least 16 bytes), the output of `firstlight wrap`, or the URI of the store that has this output; each also encrypted for control planes. If an external KMS must unwrap it, the service waits while KMS or store cannot be reached").or(master_secret::KEY_FILE),
     |it, _, value| put(&mut it.master_secret, Ok(value.into()))),
    (Opt::flag("print-cluster-id", "serves nothing: prints the ID that machines know this master secret and the measurementSalt of --config by, and ends"),
     |it, _, _| put(&mut it.print_cluster_id, Ok(true))),
    (Opt::value("salt", "FILE", "its salt, raw, at least 32 bytes; a wrapped master secret contains it").or(master_secret::SALT_FILE),
     |it, _, value| put(&mut it.salt, Ok(value.into()))),
    (Opt::value("wrapping-key", "DIR", "the directory of the control plane's wrapping key, for a master secret that is encrypted for control planes").or(wrapping_key::DIRECTORY),
     |it, _, value| put(&mut it.wrapping_key, Ok(value.into()))),
    (Opt::flag("place-wrapping-key", "write the wrapping key into the directory of --wrapping-key if it is missing; the master secret can be encrypted with it then"),
     |it, _, _| put(&mut it.place_wrapping_key, Ok(true))),
    (Opt::value("config", "DIR", "with --clients attested: directory with attestationConfig (the policy, JSON) and measurementSalt").or(key_service::CONFIG_DIR),
     |it, _, value| put(&mut it.config_dir, Ok(value.into()))),
    (Opt::value("attestation-variant", "VARIANT", "with --clients attested: the attestation variant").one_of(&variant::NAMES).or(variant::DEFAULT),
     |it, _, value| put(&mut it.variant, text(value))),
    (Opt::value("tpm", "LOCATION", "with attested: device:PATH, swtpm:host=ADDRESS,port=PORT, tdx:FOLDER or snp:FILE [/dev/tpmrm0, else /dev/tpm0]"),
     |it, name, value| put(&mut it.tpm, parsed(name, value).map(Some))),
    (Opt::value("kubeconfig", "FILE", "with token, or if volume is granted: access to the Kubernetes API [the pod's service account]"),
     |it, _, value| put(&mut it.kubeconfig, Ok(Some(value.into())))),
    (Opt::value("health", "ADDRESS:PORT", "the address of a plaintext gRPC health server; with token and any, the port of the keys answers health checks too [none]"),
     |it, name, value| put(&mut it.health, services::listen(name, value).map(Some))),
    (Opt::value("metrics", "ADDRESS:PORT", "the address of an HTTP server for Prometheus' metrics, path /metrics [none]"),
     |it, name, value| put(&mut it.metrics, services::listen(name, value).map(Some))),
    (services::LOG_FORMAT, |it, name, value| put(&mut it.log_format, parsed(name, value))),
    (services::VERBOSITY, |it, name, value| put(&mut it.verbosity, parsed(name, value))),
];

impl Given {
    fn parse(args: lexopt::Parser) -> Result<Given, Failure> {
        let mut given = Given {
            verbosity: 0,
            log_format: logger::Format::default(),
            how: None,
            grants: None,
            clients_secret: SECRET_FILE.into(),
            listen: None,
            port: None,
            allow_plaintext: false,
            listen_tls: None,
            listen_old: None,
            old_clients: Migration::default(),
            master_secret: master_secret::KEY_FILE.into(),
            print_cluster_id: false,
            salt: master_secret::SALT_FILE.into(),
            wrapping_key: wrapping_key::DIRECTORY.into(),
            place_wrapping_key: false,
            config_dir: key_service::CONFIG_DIR.into(),
            variant: variant::DEFAULT.into(),
            tpm: None,
            collateral: collateral::Flags::default(),
            kubeconfig: None,
            health: None,
            metrics: None,
        };
        options::parse(args, |name, args| {
            Ok(take(OPTIONS, name, args, &mut given)?.is_some()
                || take(collateral::OPTIONS, name, args, &mut given.collateral)?.is_some())
        })?;
        Ok(given)
    }

    /// Returns where the master secret is.
    fn secret(&self) -> MasterSecretFiles {
        MasterSecretFiles {
            key: self.master_secret.clone(),
            salt: self.salt.clone(),
            wrapping_key: self.wrapping_key.clone(),
            places_wrapping_key: self.place_wrapping_key,
        }
    }

    /// Prints the cluster's ID.
    fn print_id(self) -> Result<(), Failure> {
        let kms = self.secret().read().map_err(Failure::failed)?;
        let id = key_service::id_of(&kms, &self.config_dir).map_err(Failure::failed)?;
        println!("{}", hex(&id));
        Ok(())
    }

    /// Returns the configuration of the service, and where the master secret is.
    fn config(mut self) -> Result<(KeyServiceConfig, MasterSecretFiles), Failure> {
        let secret = self.secret();
        let mut listen = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), proto::kms::PORT);
        // Constellation's chart gives no other option.
        if self.port.is_some() && self.how.is_none() && self.listen.is_none() {
            self.how = Some("any".into());
            listen.set_ip(network::any_address());
            self.allow_plaintext = true;
        }
        listen = self.listen.unwrap_or(listen);
        if let Some(port) = self.port {
            listen.set_port(port);
        }
        let kubeconfig = self.kubeconfig.take();
        let api = || match &kubeconfig {
            Some(file) => client::ApiAccess::from_kubeconfig_file(file),
            None => client::ApiAccess::in_cluster(),
        };
        let clients = match self.how.as_deref().unwrap_or("attested") {
            "attested" => attested(
                self.variant,
                self.tpm,
                self.config_dir,
                self.collateral,
                api,
            )?,
            "token" => Clients::Token,
            "secret" => Clients::Secret(self.clients_secret),
            "any" => Clients::Any,
            other => {
                return Err(Failure::Usage(format!(
                    "--clients {other:?}: expected attested, token, secret or any"
                )));
            }
        };
        let has_old_clients = self.old_clients != Migration::default();
        let needs_api = matches!(clients, Clients::Token)
            || has_old_clients
            || self.grants.as_ref().is_some_and(Grants::have_volumes);
        let api = if needs_api {
            Some(Box::new(api().map_err(Failure::failed)?))
        } else {
            None
        };
        // A pod of Kubernetes learns its node from its own token.
        let node = kubeconfig.is_none().then(tokens::own_node).flatten();
        if needs_api && kubeconfig.is_none() && node.is_none() {
            log::warn!(
                "PODS OF EVERY NODE GET KEYS IN PLAINTEXT, also a join service on a worker: the token of this pod does not name its node"
            );
        }
        let config = KeyServiceConfig {
            listen,
            clients,
            api,
            grants: self.grants,
            allow_plaintext: self.allow_plaintext,
            node,
            listen_tls: self.listen_tls,
            old_clients: has_old_clients.then(|| {
                let any = SocketAddr::new(network::any_address(), OLD_PORT);
                (self.listen_old.unwrap_or(any), self.old_clients)
            }),
            health: self.health,
            metrics: self.metrics,
        };
        Ok((config, secret))
    }
}

/// Returns the settings of callers that attest themselves. `api` gives access to the Kubernetes API, if there is any.
fn attested<E>(
    variant: String,
    tpm: Option<Location>,
    config_dir: PathBuf,
    collateral: collateral::Flags,
    api: impl Fn() -> Result<client::ApiAccess, E>,
) -> Result<Clients, Failure> {
    let variant = Variant::named(&variant).map_err(Failure::failed)?;
    let collateral = collateral.finish(|| Some(client::Client::new(api().ok()?, &Stop::new())))?;
    let location = tpm.map_or_else(variant.location, Ok);
    Ok(Clients::Attested {
        variant,
        tpm: location.map_err(Failure::failed)?,
        config_dir,
        collateral: Some(Fetching::new(collateral).map_err(Failure::failed)?),
    })
}

/// Returns the master secret. Waits while the external KMS is away, and the service tells callers why; `None` if a signal asks to stop.
fn read(
    secret: &MasterSecretFiles,
    service: &KeyService,
    signals: &StopSignals,
) -> Result<Option<MasterSecret>, Failure> {
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    loop {
        match secret.read() {
            Err(error) if error.may_pass() => {
                service.waits(&error.to_string());
                let pause = backoff.pause();
                log::warn!("{error}; trying again in {} s", pause.as_secs() + 1);
                let waited = signals.wait_for(pause).map_err(Failure::failed)?;
                if let Some(signal) = waited {
                    log::info!("{signal}: stopping before the master secret could be read");
                    return Ok(None);
                }
            }
            other => return other.map(Some).map_err(Failure::failed),
        }
    }
}
