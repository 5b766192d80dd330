//! The key service: derives data keys from the master secret for the services of a control plane
//! (`/kms.API/GetDataKey`).
//!
//! It keeps only the master secret and its salt, which it reads once. Every key of the cluster is
//! derived here. Therefore each caller authenticates itself, and gets only the classes of keys that
//! are granted to it ([`grants`]). There are four ways ([`Clients`]):
//!
//! ```text
//! attested   TLS; each end proves by its TPM which machine of this cluster it is ([`members`])      services on the hosts
//! token      the token of a Kubernetes service account, verified by the API server ([`tokens`])     pods
//! secret     TLS; both ends know a secret ([`shared_secret`])                                         services without Kubernetes
//! any        no authentication, as clients of Constellation expect                                  old clients
//! ```
//!
//! A caller with access to keys of volumes only ([`Class::Volume`]) is refused the keys of state
//! disks ([`disks`]). If it shows a token, it gets the keys of the volumes of its own node
//! ([`volumes`]).
//!
//! A service has up to three addresses ([`Entrance`]):
//!
//! ```text
//! main   TLS with `attested`; else plaintext, which in a pod serves only pods of the same node
//! TLS    with `token`: a certificate that clients verify ([`certificate`])                       the join service, pods
//! old    plaintext without a token, through a day: keys of volumes ([`constellation`])           drivers of Constellation
//! ```
//!
//! Clients need to authenticate the key service, too. An attacker who poses as the key service
//! chooses the keys of disks and the seed of the SSH certificate authorities of every new node.
//! Attestation authenticates both ends, and so do a token and the certificate. In plaintext, tokens
//! authenticate only the client. So without TLS the service listens on loopback addresses only,
//! unless the operator declares the network as trusted (`--allow-plaintext`).
//!
//! An id consists of at most 128 letters, digits, `.`, `_` and `-`. A UUID must be in lower case:
//! ids are compared byte by byte, and the upper-case form would give another key than the disk's. A
//! key has 1 to 64 bytes. Each decision is a log line that begins with `audit`.

pub mod certificate;
pub mod constellation;
pub mod control_planes;
pub mod disks;
pub mod grants;
pub mod master_secret;
pub mod members;
pub mod shared_secret;
pub mod tokens;
pub mod volumes;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::metrics::{Counter, Histogram, Labelled, Registry};
use crate::serving::{Addresses, Api, CannotListen, Serving};
use crate::{peer, policy_file, shared_metrics};
use base::crypto::{
    CLUSTER_ID_LEN, Dek, KEY_LEN, MEASUREMENT_SALT_LEN, MEASUREMENT_SECRET_ID,
    SSH_USER_CA_PUBLIC_ID, SSH_USER_CA_SEED_ID, Secret, cluster_id,
};
use base::master_secret::MasterSecret;
use base::stop::Stop;
use base::sync::lock;
use base::uuid::Uuid;
use certificate::Tls;
use collateral::Fetching;
use constellation::{OldClient, OldClients};
use control_planes::ControlPlaneList;
use disks::Disks;
use grants::{ANYONE, Class, Grants, LOCAL, MEMBER};
use kubernetes::client::{self, Client};
use kubernetes::services::migration::Migration;
use kubernetes::services::{JOIN_SERVICE_ACCOUNT, JOIN_SERVICE_GRANT, MEMBER_CONTROLLER_ACCOUNT};
use kubernetes::wrapping_key;
use members::Members;
use proto::kms::{GET_DATA_KEY, MAX_REQUEST};
use proto::kms::{GetDataKeyRequest, GetDataKeyResponse};
use rpc::grpc::{Call, Code, Limits, Router, Server, Status};
use shared_secret::SharedSecret;
use tokens::{Reviewer, TokenNode, TokenOwner};
use transport::Accept;
use verifier::sources::Sources;
use verifier::{Claims, ClusterRegister, IssueError, NamedRegister, Variant};
use volumes::{CsiVolume, Volumes};
use zeroize::Zeroizing;

/// The default directory of the cluster's `join-config`, with the attestation policy and the
/// measurement salt.
pub const CONFIG_DIR: &str = "/var/config";

/// How long running calls may still take when the service stops. A call takes microseconds.
pub const GRACE: Duration = Duration::from_secs(5);

/// The measurement salt, raw bytes, in the configuration directory. The cluster's ID is derived
/// from it and the measurement secret.
const MEASUREMENT_SALT_FILE: &str = "measurementSalt";
const MAX_ID_LEN: usize = 128;
/// The maximum length of a volume's handle, and of its driver's name. Clouds have handles of about
/// 200 characters.
const MAX_HANDLE_LEN: usize = 1024;
/// The maximum length of a key. Clients ask for at most 32 bytes; 64 are sufficient for XTS or HMAC
/// with SHA-512.
const MAX_KEY_LEN: u32 = 64;

/// The configuration of the service.
pub struct KeyServiceConfig {
    /// The address to listen on. Port 0 selects a free port.
    pub listen: SocketAddr,
    /// How callers authenticate themselves.
    pub clients: Clients,
    /// Access to the API server. It is required for tokens, and for the records of state disks if
    /// keys of volumes are granted.
    pub api: Option<Box<client::ApiAccess>>,
    /// The grants; [`Clients::default_grants`] if `None`.
    pub grants: Option<Grants>,
    /// Whether keys and tokens may be sent in plaintext to other machines.
    pub allow_plaintext: bool,
    /// The node of this pod, if known: then the plaintext address serves only pods of this node.
    pub node: Option<String>,
    /// The address for TLS with [`Clients::Token`].
    pub listen_tls: Option<SocketAddr>,
    /// The address for clients without a token, and the last day on which they are served.
    pub old_clients: Option<(SocketAddr, Migration)>,
    /// The address of a plaintext server with `grpc.health.v1` only, for clients that cannot attest
    /// themselves.
    pub health: Option<SocketAddr>,
    /// The address of the HTTP server for metrics.
    pub metrics: Option<SocketAddr>,
}

/// How callers authenticate themselves.
pub enum Clients {
    /// By their TPM. The service attests itself to them in the same way.
    Attested {
        /// The attestation variant of the cluster's nodes.
        variant: &'static Variant,
        /// The TPM of this machine.
        tpm: tpm::Location,
        /// The directory with the files of [`CONFIG_DIR`].
        config_dir: PathBuf,
        /// Where the certificates of chips and the collateral of platforms come from; `None` if
        /// machines must send them.
        collateral: Option<Arc<Fetching>>,
    },
    /// By the token of a service account, which the API server verifies.
    Token,
    /// By the secret in this file, which both ends know.
    Secret(PathBuf),
    /// No authentication.
    Any,
}

impl Clients {
    /// Returns the default grants: what the join service needs, and everything if callers are not
    /// authenticated.
    pub fn default_grants(&self) -> Grants {
        let text = match self {
            Clients::Attested { .. } => format!("{LOCAL}={JOIN_SERVICE_GRANT}"),
            // no disk of a machine without Kubernetes has an SSH certificate
            Clients::Secret(_) => format!("{LOCAL}=disk,measurement"),
            Clients::Token => format!("{JOIN_SERVICE_ACCOUNT}={JOIN_SERVICE_GRANT}"),
            Clients::Any => format!("{ANYONE}={JOIN_SERVICE_GRANT},ssh-users,other"),
        };
        text.parse().expect("a grant of constants")
    }

    /// Returns the grants of the operator, else the default. Fails if they name a caller that cannot exist.
    fn granted(&self, grants: Option<Grants>, has_old_clients: bool) -> Result<Grants, Error> {
        let grants = grants.unwrap_or_else(|| self.default_grants());
        // `apply --old-clients-until never` keeps the grants
        let can_have = |caller: &str| self.can_have(caller) || caller == ANYONE;
        if !has_old_clients
            && !self.can_have(ANYONE)
            && grants.callers().any(|caller| caller == ANYONE)
        {
            log::warn!(
                "--grant for anyone has no effect without --old-clients-until: clients without a token get no keys"
            );
        }
        if let Some(caller) = grants.callers().find(|caller| !can_have(caller)) {
            return Err(Error::Grant(caller.to_owned()));
        }
        Ok(grants)
    }

    /// Returns whether a caller with this name can exist.
    fn can_have(&self, caller: &str) -> bool {
        match self {
            Clients::Attested { .. } => [LOCAL, MEMBER].contains(&caller),
            Clients::Secret(_) => caller == LOCAL,
            Clients::Token => caller.contains('/'),
            Clients::Any => caller == ANYONE,
        }
    }
}

/// The running service.
pub struct KeyService {
    serving: Serving,
    others: Others,
    /// Stops the requests to the API server.
    stop: Stop,
    awaited: Arc<Awaited>,
    /// The thread that publishes the certificate.
    publishing: Mutex<Option<JoinHandle<()>>>,
    membership: Option<Membership>,
    /// The addresses and the clients of the service.
    said: String,
}

/// The servers of the other addresses.
struct Others {
    servers: Vec<Server>,
    /// The certificate, and where it is published.
    tls: Option<(Arc<Tls>, Client)>,
}

impl Others {
    /// Opens the addresses for TLS and for clients without a token, as far as they are wanted.
    fn open(
        listen_tls: Option<SocketAddr>,
        old_clients: Option<(SocketAddr, Migration)>,
        handler: &Arc<Handler>,
        api: Option<&Client>,
        registry: &Registry,
    ) -> Result<Others, Error> {
        let (mut servers, mut tls) = (Vec::new(), None);
        let mut open = |name, at, accept, entrance| {
            let router = handler.clone().router(entrance);
            let server = TcpListener::bind(at)
                .and_then(|listener| Server::start(name, listener, accept, router, limits()))
                .map_err(|error| Error::Listen(at, error))?;
            shared_metrics::server(registry, name, &server);
            let address = server.local_addr();
            servers.push(server);
            Ok::<_, Error>(address)
        };
        if let (Some(at), Some(api)) = (listen_tls, api) {
            let accept = Arc::new(Tls::default());
            let address = open("key-service-tls", at, accept.clone(), Entrance::Tls)?;
            log::info!("serving TLS on {address}");
            tls = Some((accept, api.clone()));
        }
        if let Some((at, until)) = old_clients {
            let address = open("key-service-old", at, plain(), Entrance::Old)?;
            log::warn!(
                "CLIENTS WITHOUT A TOKEN GET KEYS OF VOLUMES IN PLAINTEXT on {address}, as in Constellation, through {until} \
                 (--old-clients-until): this service knows a client's node only by its address, which hosts outside the cluster can forge"
            );
        }
        Ok(Others { servers, tls })
    }
}

fn limits() -> Limits {
    Limits {
        message_bytes: MAX_REQUEST,
        ..Limits::default()
    }
}

/// The master secret, when it is available.
struct Awaited {
    secret: OnceLock<MasterSecret>,
    /// Why it is not available yet.
    reason: Mutex<String>,
}

impl Awaited {
    /// Returns the master secret, or the reason for callers.
    fn get(&self) -> Result<&MasterSecret, Status> {
        self.secret.get().ok_or_else(|| {
            let reason = lock(&self.reason);
            Status::new(Code::FailedPrecondition, reason.as_str())
        })
    }
}

/// The cluster of this machine, as its TPM shows it.
struct Membership {
    /// The identity of this machine.
    own: Arc<str>,
    register: ClusterRegister,
    salt: Zeroizing<Vec<u8>>,
}

impl KeyService {
    /// Starts to serve, until [`KeyService::stop`]. Each call gets FAILED_PRECONDITION until
    /// [`KeyService::provide`], and the health is NOT_SERVING. Fails if the configuration is
    /// contradictory or the policy, the TPM or an address cannot be used.
    pub fn start(config: KeyServiceConfig) -> Result<KeyService, Error> {
        let is_plain = matches!(config.clients, Clients::Token | Clients::Any);
        if is_plain && !config.listen.ip().is_loopback() && !config.allow_plaintext {
            return Err(Error::Exposed(config.listen.ip()));
        }
        let (listen_tls, old_clients) = (config.listen_tls, config.old_clients);
        let grants = config
            .clients
            .granted(config.grants, old_clients.is_some())?;
        let (registry, stop) = (Registry::new(), Stop::new());
        let api = config.api.map(|api| Client::new(*api, &stop));
        if (grants.have_volumes() || old_clients.is_some()) && api.is_none() {
            return Err(Error::NoApi("keys of volumes are granted"));
        }
        if listen_tls.is_some() && !matches!(config.clients, Clients::Token) {
            return Err(Error::TlsWithoutTokens);
        }
        if let Clients::Any = config.clients {
            log::warn!(
                "PLAINTEXT, AND CALLERS ARE NOT AUTHENTICATED, as in Constellation (--clients any): any client that reaches {} \
                 gets every granted key ({grants})",
                config.listen
            );
        }
        let Authentication {
            accept,
            authority,
            membership,
        } = Authentication::of(config.clients, api.as_ref(), &registry)?;
        let addresses = Addresses::open(config.listen, config.health, config.metrics)?;
        log::info!("grants: {grants}");
        let who = authority.callers();
        let awaited = Arc::new(Awaited {
            secret: OnceLock::new(),
            reason: Mutex::new("the key service has not read the master secret yet".into()),
        });
        let old = (api.as_ref().zip(old_clients))
            .map(|(api, (_, until))| OldClients::new(api, until, grants.drivers()));
        let handler = Arc::new(Handler {
            own_node: config.node,
            old,
            ..Handler::new(awaited.clone(), authority, grants, api.as_ref(), &registry)
        });
        let main = Api {
            accept,
            router: handler.clone().router(Entrance::Main),
            limits: limits(),
        };
        let known = awaited.clone();
        let ready = move || known.secret.get().is_some();
        let serving = Serving::start("key-service", addresses, main, ready, &registry)?;
        let others = Others::open(listen_tls, old_clients, &handler, api.as_ref(), &registry)?;
        handler.count_old(&registry);
        let address = serving.local_addr();
        log::info!("listening on {address}");
        if let Some(health) = serving.health_addr() {
            log::info!("serving health checks on {health}");
        }
        let exposed = if is_plain && !address.ip().is_loopback() {
            ", in plaintext"
        } else {
            ""
        };
        Ok(KeyService {
            serving,
            others,
            stop,
            awaited,
            publishing: Mutex::default(),
            membership,
            said: format!("{address} for {who}{exposed}"),
        })
    }

    /// Accepts TLS already, with the certificate of this wrapping key.
    pub fn prove(&self, key: &Secret) {
        if let Some((tls, _)) = &self.others.tls {
            tls.provide(&certificate::seed_of(key));
        }
    }

    /// Tells callers why the master secret is not available yet.
    pub fn waits(&self, reason: &str) {
        let mut told = lock(&self.awaited.reason);
        reason.clone_into(&mut told);
    }

    /// Serves keys of this master secret from now on. Fails if this machine is in another cluster.
    pub fn provide(&self, kms: MasterSecret) -> Result<(), Error> {
        if let Some(Membership { register, salt, .. }) = &self.membership {
            // Otherwise each client would refuse this machine without a clear reason.
            if !register.is_of(&id_with(&kms, salt).map_err(Error::Secret)?) {
                return Err(Error::NoMember { is_fresh: false });
            }
        }
        if let Some((tls, api)) = &self.others.tls {
            let pem = tls.provide(&certificate::seed_of(&wrapping_key::of(&kms)));
            let publishing = certificate::publish(api, pem).map_err(Error::Thread)?;
            *lock(&self.publishing) = Some(publishing);
        }
        // a second master secret has no effect
        let _ = self.awaited.secret.set(kms);
        log::info!("serving data keys on {}", self.said);
        Ok(())
    }

    /// Returns the address of the gRPC server.
    pub fn local_addr(&self) -> SocketAddr {
        self.serving.local_addr()
    }

    /// Returns the addresses for TLS and for clients without a token, as far as they exist.
    pub fn more_addrs(&self) -> Vec<SocketAddr> {
        self.others.servers.iter().map(Server::local_addr).collect()
    }

    /// Returns the address of the separate health server, if there is one.
    pub fn health_addr(&self) -> Option<SocketAddr> {
        self.serving.health_addr()
    }

    /// Returns the address of the metrics server, if there is one.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.serving.metrics_addr()
    }

    /// Accepts no further calls, and waits up to `grace` until the running ones end.
    pub fn stop(&self, grace: Duration) {
        for server in &self.others.servers {
            server.stop(Duration::ZERO);
        }
        self.serving.stop(grace);
        self.stop.stop();
        if let Some(publishing) = lock(&self.publishing).take() {
            // A panic of the thread is already in the log.
            let _ = publishing.join();
        }
    }
}

/// Returns the ID of the cluster with this master secret and the measurement salt in this directory.
pub fn id_of(
    kms: &MasterSecret,
    config_dir: &Path,
) -> Result<[u8; CLUSTER_ID_LEN], master_secret::Error> {
    id_with(kms, &measurement_salt(config_dir)?)
}

fn id_with(kms: &MasterSecret, salt: &[u8]) -> Result<[u8; CLUSTER_ID_LEN], master_secret::Error> {
    let secret = kms.dek(&Dek::named(MEASUREMENT_SECRET_ID), KEY_LEN);
    let secret = secret.map_err(master_secret::Error::Kms)?;
    Ok(cluster_id(&secret, salt))
}

fn measurement_salt(config_dir: &Path) -> Result<Zeroizing<Vec<u8>>, master_secret::Error> {
    let path = config_dir.join(MEASUREMENT_SALT_FILE);
    let lengths = MEASUREMENT_SALT_LEN..=MEASUREMENT_SALT_LEN;
    master_secret::read(&path, "measurement salt", lengths)
}

/// How the service accepts connections, and identifies their callers.
struct Authentication {
    accept: Arc<dyn Accept>,
    authority: Authority,
    /// `None` if callers do not attest themselves.
    membership: Option<Membership>,
}

impl Authentication {
    /// Prepares what these clients need: the proof of this machine, or the verification of tokens.
    fn of(
        clients: Clients,
        api: Option<&Client>,
        registry: &Registry,
    ) -> Result<Authentication, Error> {
        let plain = |authority| Authentication {
            accept: plain(),
            authority,
            membership: None,
        };
        match clients {
            Clients::Attested {
                variant,
                tpm,
                config_dir,
                collateral,
            } => {
                shared_metrics::collateral(registry, collateral.as_ref());
                let sources = shared_metrics::sources(&collateral);
                let (accept, membership) = attested(variant, &tpm, &config_dir, sources, registry)?;
                let own = membership.own.clone();
                Ok(Authentication {
                    accept,
                    authority: Authority::Members { own },
                    membership: Some(membership),
                })
            }
            Clients::Token => {
                let api = api.ok_or(Error::NoApi("callers show tokens"))?;
                let reviewer = Reviewer::new(api, registry);
                Ok(plain(Authority::Tokens(Box::new(reviewer))))
            }
            Clients::Secret(file) => {
                let secret = SharedSecret::read(&file).map_err(Error::Secret)?;
                Ok(Authentication {
                    accept: Arc::new(secret.acceptor()),
                    authority: Authority::Secret(secret),
                    membership: None,
                })
            }
            Clients::Any => Ok(plain(Authority::Anyone)),
        }
    }
}

/// Returns the acceptor of connections without TLS.
fn plain() -> Arc<dyn Accept> {
    Arc::new(|socket: TcpStream, _: Instant| transport::plain::transport(socket))
}

/// Creates the TLS acceptor in which both ends prove that they are machines of the cluster that this machine is a member of. Also
/// returns its membership.
fn attested(
    variant: &'static Variant,
    tpm: &tpm::Location,
    config_dir: &Path,
    sources: Arc<dyn Sources>,
    registry: &Registry,
) -> Result<(Arc<dyn Accept>, Membership), Error> {
    let salt = measurement_salt(config_dir).map_err(Error::Secret)?;
    let register = verifier::cluster_register(tpm).map_err(|error| Error::Tpm(error.into()))?;
    if register.is_fresh() {
        return Err(Error::NoMember { is_fresh: true });
    }
    let members =
        Members::new(variant, config_dir, register.clone(), sources).map_err(Error::Policy)?;
    let members = Arc::new(members);
    shared_metrics::any_tpm(registry, &members);
    let issuer = (variant.issuer)(tpm);
    let own = issuer.machine().map_err(Error::Tpm)?.unwrap_or_default();
    // No client of Constellation uses this, so TLS 1.3 can be required. It does not reveal the
    // documents to the network.
    Ok((
        Arc::new(atls::Server::new(Some(issuer), Some(verifier::judge(members))).require_strong()),
        Membership {
            own,
            register,
            salt,
        },
    ))
}

/// How a caller is identified.
enum Authority {
    /// By the identity of its connection. `own` is this machine.
    Members {
        own: Arc<str>,
    },
    Tokens(Box<Reviewer>),
    /// By the token of a secret that both ends know.
    Secret(SharedSecret),
    /// Not at all.
    Anyone,
}

impl Authority {
    /// Says who the callers are.
    fn callers(&self) -> &'static str {
        match self {
            Authority::Members { .. } => "machines of this cluster",
            Authority::Tokens(_) => "service accounts with a token",
            Authority::Secret(_) => "programs that know the secret of --clients-secret",
            Authority::Anyone => "anyone",
        }
    }

    /// Returns the caller.
    fn caller(&self, call: &Call) -> Result<Caller, Status> {
        Ok(match self {
            Authority::Members { own } if call.identity() == Some(own) => Caller::named(LOCAL),
            Authority::Members { .. } => Caller::named(MEMBER),
            Authority::Tokens(reviewer) => {
                let account =
                    reviewer.account(call.metadata(), call.peer().map(|peer| peer.ip()))?;
                Caller {
                    name: account.name.clone(),
                    account: Some(account),
                    ..Caller::default()
                }
            }
            Authority::Secret(secret) if secret.is_shown(call.metadata()) => Caller::named(LOCAL),
            Authority::Secret(_) => {
                let text = "the caller does not know the secret of --clients-secret";
                return Err(Status::new(Code::Unauthenticated, text));
            }
            Authority::Anyone => Caller::named(ANYONE),
        })
    }
}

/// A caller, as far as it is known.
#[derive(Default)]
struct Caller {
    /// Its name in grants.
    name: String,
    /// The owner of its token.
    account: Option<TokenOwner>,
    /// The client, if it has no token.
    old: Option<OldClient>,
}

impl Caller {
    fn named(name: &str) -> Caller {
        Caller {
            name: name.into(),
            ..Caller::default()
        }
    }

    fn node(&self) -> Option<&TokenNode> {
        self.account.as_ref()?.node.as_ref()
    }
}

/// The address at which a call arrived.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Entrance {
    Main,
    Tls,
    /// For clients without a token.
    Old,
}

/// The handler of the API's only method.
struct Handler {
    kms: Arc<Awaited>,
    authority: Authority,
    grants: Grants,
    own_node: Option<String>,
    control_planes: Option<ControlPlaneList>,
    /// `None` if no keys of volumes are granted.
    disks: Option<Disks>,
    volumes: Option<Volumes>,
    old: Option<OldClients>,
    requests: Labelled<Counter, 2>,
    seconds: Histogram,
}

impl Handler {
    fn new(
        kms: Arc<Awaited>,
        authority: Authority,
        grants: Grants,
        api: Option<&Client>,
        registry: &Registry,
    ) -> Handler {
        let help = "Number of requested keys by class and result; the class is `none` if it was not determined.";
        let requests =
            registry.labelled("firstlight_key_requests_total", help, ["class", "result"]);
        let seconds = registry.add(
            "firstlight_key_request_seconds",
            "Time from a request to its answer.",
        );
        Handler {
            kms,
            authority,
            grants,
            own_node: None,
            control_planes: api.map(ControlPlaneList::new),
            disks: api.map(|api| Disks::new(api, registry)),
            volumes: api.map(Volumes::new),
            old: None,
            requests,
            seconds,
        }
    }

    fn router(self: Arc<Self>, entrance: Entrance) -> Router {
        Router::new().unary(
            GET_DATA_KEY,
            move |call: &Call, request: GetDataKeyRequest| {
                let key = self
                    .seconds
                    .time(|| self.answer(entrance, call, &request))?;
                Ok(GetDataKeyResponse {
                    data_key: key.expose().to_vec(),
                })
            },
        )
    }

    /// Adds the metric that shows whether clients without a token are served.
    fn count_old(self: &Arc<Self>, registry: &Registry) {
        let handler = Arc::downgrade(self);
        let help =
            "1 while clients without a token get keys of volumes (--old-clients-until), else 0.";
        registry.gauge_of("firstlight_key_old_clients", help, &[], move || {
            let handler = handler.upgrade()?;
            let are_served = handler.old.as_ref().is_some_and(OldClients::are_served);
            Some(f64::from(u8::from(are_served)))
        });
    }

    /// Decides on a request and logs the decision.
    fn answer(
        &self,
        entrance: Entrance,
        call: &Call,
        request: &GetDataKeyRequest,
    ) -> Result<Secret, Status> {
        let (mut caller, mut class) = (Caller::named("unknown"), "none");
        let mut attached = vec![];
        let volume = CsiVolume::of(request);
        let id = match &volume {
            Some(volume) if request.data_key_id.is_empty() => volume.key_id(),
            _ => request.data_key_id.clone(),
        };
        let mut decide = || {
            // before the requests to the API server that a caller costs
            check(&id, request)?;
            caller = self.caller(entrance, call)?;
            self.check_control_plane(&caller)?;
            let granted = match Class::of(&id) {
                Class::Disk if entrance == Entrance::Old => Some(Class::OldVolume),
                class => self.grants.allow(&caller.name, &id).or_else(|| {
                    // an address is a weak proof: no other class of keys is given for it
                    let account = caller.old.as_ref()?.account()?;
                    let is_other = class == Class::Other;
                    is_other.then(|| self.grants.allow(account, &id))?
                }),
            };
            class = granted.unwrap_or_else(|| Class::of(&id)).name();
            let denied = || {
                let caller = &caller.name;
                Status::new(
                    Code::PermissionDenied,
                    format!("{caller} has no grant for keys of the class {class}"),
                )
            };
            if let Class::Volume | Class::OldVolume = granted.ok_or_else(denied)? {
                let uuid = Uuid::parse(&id);
                if let (Some(client), Some(old)) = (&caller.old, &self.old) {
                    attached = old.volumes(client)?;
                }
                if let Some(account) = &caller.account {
                    self.check_node(account, volume.as_ref(), uuid.as_ref(), &id)?;
                } else if uuid.is_none() {
                    return Err(denied());
                }
                if let Some(uuid) = &uuid {
                    let disks = self.disks.as_ref().ok_or_else(denied)?;
                    disks.refuse_state_disk(uuid)?;
                }
            }
            data_key(self.kms.get()?, &id, request.length)
        };
        let result = decide();
        self.requests.with([class, outcome(&result)]).inc();
        let (length, peer, name) = (request.length, peer(call.peer()), &caller.name);
        // An invalid id may be long, but at most `MAX_REQUEST` bytes.
        let mut line = format!("peer={peer} caller={name} class={class} id={id:?} length={length}");
        if let Some(volume) = &volume {
            line += &format!(" driver={:?} volume={:?}", volume.driver, volume.handle);
        }
        if let Some(node) = caller.node() {
            line += &format!(" node={:?}", node.name);
        }
        if let Some(old) = &caller.old {
            line += &format!("{old} attached={attached:?}");
        }
        let claims = call.claims::<Claims>();
        if let Some(platform) = claims.and_then(|claims| claims.platform.as_ref()) {
            line += &format!(" platform={:?}", verifier::claims::line(platform));
        }
        match &result {
            Ok(_) if entrance == Entrance::Old => {
                log::warn!("audit result=given WITHOUT A TOKEN {line}")
            }
            Ok(_) => log::info!("audit result=given {line}"),
            Err(status) => log::warn!("audit result=refused {line}: {status}"),
        }
        result
    }

    /// Returns the caller of this address.
    fn caller(&self, entrance: Entrance, call: &Call) -> Result<Caller, Status> {
        if let (Entrance::Old, Some(old)) = (entrance, &self.old) {
            return Ok(Caller {
                old: Some(old.identify(call.peer().map(|peer| peer.ip()))?),
                ..Caller::named(ANYONE)
            });
        }
        let caller = self.authority.caller(call)?;
        match &self.own_node {
            // A network plugin that ignores internalTrafficPolicy would send keys over the network.
            Some(own)
                if entrance == Entrance::Main
                    && caller.node().is_none_or(|node| node.name != *own) =>
            {
                Err(Status::new(
                    Code::PermissionDenied,
                    format!(
                        "only pods of the node {own} may use plaintext: use TLS, port 9443 of the Service key-service"
                    ),
                ))
            }
            _ => Ok(caller),
        }
    }

    /// Refuses the join service and the member controller of a node that is no control plane. A token of Kubernetes before
    /// v1.30 names no node: neither does that of this pod then, and it is accepted.
    fn check_control_plane(&self, caller: &Caller) -> Result<(), Status> {
        let of_planes = [JOIN_SERVICE_ACCOUNT, MEMBER_CONTROLLER_ACCOUNT];
        if caller.account.is_none() || !of_planes.contains(&&*caller.name) {
            return Ok(());
        }
        let denied = |why: &str| Status::new(Code::PermissionDenied, why);
        match caller.node() {
            Some(node) => {
                let planes = self.control_planes.as_ref();
                let planes =
                    planes.ok_or_else(|| denied("this service cannot check the caller's node"))?;
                planes.refuse_other(&node.name)
            }
            None if self.own_node.is_some() => Err(denied(&format!(
                "the token of {} names no node: expected that of a pod, from a projected volume",
                caller.name
            ))),
            None => Ok(()),
        }
    }

    /// Refuses a volume that is not on the node of the caller's token, and the `id` of another volume.
    fn check_node(
        &self,
        account: &TokenOwner,
        volume: Option<&CsiVolume<'_>>,
        uuid: Option<&Uuid>,
        id: &str,
    ) -> Result<(), Status> {
        let name = &account.name;
        let denied =
            |why: &str| Status::new(Code::PermissionDenied, format!("the token of {name} {why}"));
        let node = account.node.as_ref().ok_or_else(|| {
            denied("names no node: expected a pod's token, from a projected volume")
        })?;
        let volume = volume.ok_or_else(|| {
            Status::new(
                Code::InvalidArgument,
                "csi_driver, volume_handle: expected the volume, to check its node",
            )
        })?;
        if uuid.is_none() && volume.key_id() != id {
            return Err(Status::new(
                Code::InvalidArgument,
                "data_key_id: expected no id, or the LUKS UUID of the volume that csi_driver and volume_handle name",
            ));
        }
        let volumes = self
            .volumes
            .as_ref()
            .ok_or_else(|| denied("cannot be checked"))?;
        volumes.refuse_other(volume, node, uuid)
    }
}

/// Returns the result as in the metrics.
fn outcome(result: &Result<Secret, Status>) -> &'static str {
    match result.as_ref().map_err(Status::code) {
        Ok(_) => "given",
        Err(Code::InvalidArgument) => "invalid",
        Err(Code::Unauthenticated) => "unauthenticated",
        Err(Code::PermissionDenied) => "denied",
        Err(Code::Unavailable | Code::ResourceExhausted) => "busy",
        Err(Code::FailedPrecondition) => "waiting",
        Err(_) => "failed",
    }
}

/// Validates a request.
fn check(id: &str, request: &GetDataKeyRequest) -> Result<(), Status> {
    let invalid = |message: String| Err(Status::new(Code::InvalidArgument, message));
    for (field, text) in [
        ("csi_driver", &request.csi_driver),
        ("volume_handle", &request.volume_handle),
    ] {
        if text.len() > MAX_HANDLE_LEN || text.contains('\0') {
            return invalid(format!(
                "{field}: expected at most {MAX_HANDLE_LEN} bytes, none of them null"
            ));
        }
    }
    if !(1..=MAX_KEY_LEN).contains(&request.length) {
        return invalid(format!(
            "length: expected 1 to {MAX_KEY_LEN} bytes, got {}",
            request.length
        ));
    }
    if id.is_empty() {
        return invalid(
            "data_key_id: expected an id, or a volume in both csi_driver and volume_handle".into(),
        );
    }
    if id.len() > MAX_ID_LEN {
        return invalid(format!(
            "data_key_id: expected at most {MAX_ID_LEN} characters, got {}",
            id.len()
        ));
    }
    if !id
        .bytes()
        .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    {
        return invalid("data_key_id: expected letters, digits, '.', '_' and '-' only".into());
    }
    if let Some(uuid) = Uuid::parse(id).filter(|uuid| uuid.as_str() != id) {
        return invalid(format!(
            "data_key_id: this UUID has upper-case letters, so its key would differ from the volume's key: ask for {}",
            uuid.as_str()
        ));
    }
    Ok(())
}

fn data_key(kms: &MasterSecret, id: &str, length: u32) -> Result<Secret, Status> {
    let internal = |error: &dyn fmt::Display| Status::new(Code::Internal, error.to_string());
    let key = |id: &str, len| {
        kms.dek(&Dek::named(id), len)
            .map_err(|error| internal(&error))
    };
    match id {
        // A join ticket contains only the public key of this authority.
        SSH_USER_CA_PUBLIC_ID => {
            let authority = ssh::Authority::from_seed(&key(SSH_USER_CA_SEED_ID, KEY_LEN)?);
            let blob = authority
                .map_err(|error| internal(&error))?
                .public()
                .blob()
                .to_vec();
            if length as usize == blob.len() {
                Ok(Secret::new(blob))
            } else {
                Err(Status::new(
                    Code::InvalidArgument,
                    format!(
                        "length: the public key has {} bytes, got {length}",
                        blob.len()
                    ),
                ))
            }
        }
        id => key(id, length as usize),
    }
}

/// The reason why the service cannot start.
#[derive(Debug)]
pub enum Error {
    /// Keys would be sent in plaintext through this address.
    Exposed(IpAddr),
    /// The service cannot listen on this address.
    Listen(SocketAddr, io::Error),
    /// The measurement salt is not readable, or the measurement secret cannot be derived.
    Secret(master_secret::Error),
    /// The TPM of this machine does not answer.
    Tpm(IssueError),
    /// This machine is not a member of the cluster with this master secret and measurement salt.
    NoMember {
        /// Whether it is a member of no cluster at all.
        is_fresh: bool,
    },
    /// The policy file cannot be used.
    Policy(policy_file::Error),
    /// The API server is required for this, but there is no access to it.
    NoApi(&'static str),
    /// A grant names a caller that cannot exist.
    Grant(String),
    /// There is an address for TLS, but callers show no tokens.
    TlsWithoutTokens,
    /// The thread that publishes the certificate cannot start.
    Thread(io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Exposed(ip) => write!(
                f,
                "refusing to send keys in plaintext on {ip}: listen on a loopback address, use --clients attested, or \
                 give --allow-plaintext if that network is encrypted and trusted"
            ),
            Error::Listen(address, error) => write!(f, "cannot listen on {address}: {error}"),
            Error::Secret(error) => error.fmt(f),
            Error::Tpm(error) => write!(f, "this machine cannot prove what it is: {error}"),
            Error::NoMember { is_fresh: true } => f.write_str(
                "this machine has joined no cluster since it started (PCR 15 is zero), so clients would not accept it; \
                 start the service after the node has joined, or see --clients",
            ),
            Error::NoMember { is_fresh: false } => f.write_str(
                "this machine's PCR 15 differs from that of the cluster with this master secret, salt and measurementSalt: \
                 one of them belongs to another cluster",
            ),
            Error::Policy(error) => error.fmt(f),
            Error::NoApi(why) => write!(f, "{why}, which requires access to the API server: use --kubeconfig, or run as a pod"),
            Error::TlsWithoutTokens => f.write_str("--listen-tls is for callers with tokens: use --clients token"),
            Error::Thread(error) => write!(f, "cannot start the thread that publishes the certificate: {error}"),
            Error::Grant(caller) => {
                write!(f, "--grant: {caller:?} cannot be a caller here: expected NAMESPACE/NAME with --clients token, ")?;
                write!(f, "{LOCAL} or {MEMBER} with attested, {LOCAL} with secret, {ANYONE} with any")
            }
        }
    }
}

impl std::error::Error for Error {}

impl From<CannotListen> for Error {
    fn from((address, error): CannotListen) -> Error {
        Error::Listen(address, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeros() -> MasterSecret {
        MasterSecret::new(Secret::new(vec![0; 32]), Secret::new(vec![0; 32])).unwrap()
    }

    fn ask(id: &str, length: u32) -> Result<Secret, Status> {
        let request = GetDataKeyRequest {
            data_key_id: id.into(),
            length,
            ..GetDataKeyRequest::default()
        };
        check(id, &request)?;
        data_key(&zeros(), id, length)
    }

    #[test]
    fn the_ids_of_the_old_callers_are_served() {
        let disk = ask("00000000-0000-0000-0000-000000000000", 32).unwrap();
        assert_eq!(disk.expose()[..4], [0x2b, 0x5c, 0x82, 0x9f]);
        for id in ["measurementSecret", "ca_emergency_ssh", "s3proxy-kek"] {
            for length in [1, 32, 64] {
                assert_eq!(ask(id, length).unwrap().len(), length as usize);
            }
        }
    }

    #[test]
    fn of_the_authority_for_users_the_public_key_is_given_without_the_seed() {
        let seed = ask("ca_emergency_ssh", 32).unwrap();
        let authority = ssh::Authority::from_seed(&seed).unwrap();
        let given = ask("ca_emergency_ssh.pub", ssh::key::ED25519_BLOB_LEN as u32).unwrap();
        assert_eq!(given.expose(), authority.public().blob());
        for length in [32, 50, 52, 64] {
            assert_eq!(
                ask("ca_emergency_ssh.pub", length).unwrap_err().code(),
                Code::InvalidArgument
            );
        }
        assert_ne!(ask("ca_emergency_ssh_host", 32).unwrap(), seed);
    }

    #[test]
    fn lengths_outside_1_to_64_are_invalid() {
        for length in [0, 65, 8160, u32::MAX] {
            assert_eq!(
                ask("measurementSecret", length).unwrap_err().code(),
                Code::InvalidArgument,
                "{length}"
            );
        }
    }

    #[test]
    fn ids_that_are_none_are_invalid() {
        let long = "x".repeat(MAX_ID_LEN + 1);
        for id in ["", "a b", "../x", "a/b", "ü", "a\0", "key\n", &long] {
            assert_eq!(
                ask(id, 32).unwrap_err().code(),
                Code::InvalidArgument,
                "{id}"
            );
        }
        assert!(ask(&long[1..], 32).is_ok());
    }

    #[test]
    fn an_upper_case_uuid_is_refused_for_its_case() {
        let status = ask("FFFFFFFF-ffff-ffff-ffff-ffffffffffff", 32).unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        let end = "ask for ffffffff-ffff-ffff-ffff-ffffffffffff";
        assert!(
            status.message().contains("upper-case") && status.message().ends_with(end),
            "{status}"
        );
    }

    fn config() -> KeyServiceConfig {
        KeyServiceConfig {
            listen: ([127, 0, 0, 1], 0).into(),
            clients: Clients::Any,
            api: None,
            grants: None,
            allow_plaintext: false,
            node: None,
            listen_tls: None,
            old_clients: None,
            health: None,
            metrics: None,
        }
    }

    #[test]
    fn plaintext_beyond_loopback_needs_the_flag() {
        let start = |allow_plaintext| {
            let exposed = KeyServiceConfig {
                listen: ([0, 0, 0, 0], 0).into(),
                allow_plaintext,
                ..config()
            };
            KeyService::start(exposed)
        };
        assert!(matches!(start(false), Err(Error::Exposed(_))));
        assert!(start(true).is_ok());
    }

    #[test]
    fn without_the_records_of_state_disks_no_keys_of_volumes_are_issued() {
        let grants = Some("anyone=volume".parse().unwrap());
        let config = KeyServiceConfig { grants, ..config() };
        let error = KeyService::start(config).err().unwrap();
        assert!(matches!(error, Error::NoApi(_)), "{error}");
    }

    #[test]
    fn a_grant_to_an_impossible_caller_is_refused() {
        let grants = Some("kube-system/join-service=disk".parse().unwrap());
        let config = KeyServiceConfig { grants, ..config() };
        let error = KeyService::start(config).err().unwrap();
        let error = error.to_string();
        assert!(
            error.contains("\"kube-system/join-service\" cannot be a caller"),
            "{error}"
        );
    }

    #[test]
    fn a_grant_for_anyone_may_stay_when_old_clients_end() {
        for (grants, accepted) in [("anyone=id:a", true), ("anyone=id:a;local=disk", false)] {
            for has_old_clients in [false, true] {
                let grants = Some(grants.parse().unwrap());
                let granted = Clients::Token.granted(grants, has_old_clients);
                assert_eq!(granted.is_ok(), accepted, "{has_old_clients}");
            }
        }
    }
}
