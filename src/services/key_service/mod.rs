//! The key service: derives data keys from the master secret for the services of a control plane
//! (`/kms.API/GetDataKey`).
//!
//! It keeps only the master secret and its salt, which it reads once. Every key of the cluster is
//! derived here. Therefore each caller authenticates itself, and gets only the classes of keys that
//! are granted to it ([`grants`]). There are three ways ([`Clients`]):
//!
//! ```text
//! attested   TLS; each end proves by its TPM which machine of this cluster it is ([`members`])      services on the hosts
//! token      the token of a Kubernetes service account, verified by the API server ([`tokens`])     pods
//! any        no authentication, as clients of Constellation expect                                  old clients
//! ```
//!
//! A caller with access to keys of volumes only ([`Class::Volume`]) is refused the keys of state
//! disks ([`disks`]).
//!
//! Clients need to authenticate the key service, too. An attacker who poses as the key service
//! chooses the keys of disks and the seed of the SSH certificate authorities of every new node.
//! Attestation authenticates both ends. Tokens authenticate only the client, and are sent with the
//! keys in plaintext. They need an encrypted network with trusted name resolution, such as a
//! cluster's pod network. So without TLS the service listens on loopback addresses only, unless the
//! operator declares the network as trusted (`--allow-plaintext`).
//!
//! An id consists of at most 128 letters, digits, `.`, `_` and `-`. A UUID must be in lower case:
//! ids are compared byte by byte, and the upper-case form would give another key than the disk's. A
//! key has 1 to 64 bytes. Each decision is a log line that begins with `audit`.

pub mod disks;
pub mod grants;
pub mod master_secret;
pub mod members;
pub mod tokens;

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::serving::{Addresses, Api, Refused, Serving};
use crate::{peer, policy_file, shared_metrics};
use base::crypto::{
    Dek, KEY_LEN, MEASUREMENT_SALT_LEN, MEASUREMENT_SECRET_ID, SSH_USER_CA_PUBLIC_ID,
    SSH_USER_CA_SEED_ID, Secret, cluster_id,
};
use base::stop::Stop;
use base::sync::lock;
use booted_base::uuid::Uuid;
use booted_proto::kms::{GET_DATA_KEY, MAX_REQUEST};
use booted_proto::kms::{GetDataKeyRequest, GetDataKeyResponse};
use collateral::Fetching;
use disks::Disks;
use grants::{ANYONE, Class, Grants, LOCAL, MEMBER};
use kms::ClusterKms;
use kubernetes::client::{self, Client};
use kubernetes::services::{JOIN_SERVICE_ACCOUNT, JOIN_SERVICE_GRANT};
use members::Members;
use metrics::{Counter, Histogram, Labelled, Registry};
use rpc::grpc::{Call, Code, Limits, Router, Status};
use tokens::Reviewer;
use transport::Accept;
use verifier::sources::Sources;
use verifier::{Claims, ClusterRegister, IssueError, Variant};
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
/// The maximum length of a key. Clients ask for at most 32 bytes; 64 are sufficient for XTS or HMAC
/// with SHA-512.
const MAX_KEY_LEN: u32 = 64;

/// The configuration of the service.
pub struct Config {
    /// The address to listen on. Port 0 selects a free port.
    pub listen: SocketAddr,
    /// How callers authenticate themselves.
    pub clients: Clients,
    /// Access to the API server. It is required for tokens, and for the records of state disks if
    /// keys of volumes are granted.
    pub api: Option<Box<client::Config>>,
    /// The grants; [`Clients::default_grants`] if `None`.
    pub grants: Option<Grants>,
    /// Whether keys and tokens may be sent in plaintext to other machines.
    pub allow_plaintext: bool,
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
    /// No authentication.
    Any,
}

impl Clients {
    /// Returns the default grants: what the join service needs, and everything if callers are not
    /// authenticated.
    pub fn default_grants(&self) -> Grants {
        let text = match self {
            Clients::Attested { .. } => format!("{LOCAL}={JOIN_SERVICE_GRANT}"),
            Clients::Token => format!("{JOIN_SERVICE_ACCOUNT}={JOIN_SERVICE_GRANT}"),
            Clients::Any => format!("{ANYONE}={JOIN_SERVICE_GRANT},ssh-users,other"),
        };
        text.parse().expect("a grant of constants")
    }

    /// Returns the grants of the operator, else the default. Fails if they name a caller that cannot exist.
    fn granted(&self, grants: Option<Grants>) -> Result<Grants, Error> {
        let grants = grants.unwrap_or_else(|| self.default_grants());
        if let Some(caller) = grants.callers().find(|caller| !self.can_have(caller)) {
            return Err(Error::Grant(caller.to_owned()));
        }
        Ok(grants)
    }

    /// Returns whether a caller with this name can exist.
    fn can_have(&self, caller: &str) -> bool {
        match self {
            Clients::Attested { .. } => [LOCAL, MEMBER].contains(&caller),
            Clients::Token => caller.contains('/'),
            Clients::Any => caller == ANYONE,
        }
    }
}

/// The running service.
pub struct KeyService {
    serving: Serving,
    /// Stops the requests to the API server.
    stop: Stop,
    awaited: Arc<Awaited>,
    membership: Option<Membership>,
    /// The addresses and the clients of the service.
    said: String,
}

/// The master secret, when it is available.
struct Awaited {
    secret: OnceLock<ClusterKms>,
    /// Why it is not available yet.
    reason: Mutex<String>,
}

impl Awaited {
    /// Returns the master secret, or the reason for callers.
    fn get(&self) -> Result<&ClusterKms, Status> {
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
    pub fn start(config: Config) -> Result<KeyService, Error> {
        let is_plain = !matches!(config.clients, Clients::Attested { .. });
        if is_plain && !config.listen.ip().is_loopback() && !config.allow_plaintext {
            return Err(Error::Exposed(config.listen.ip()));
        }
        let grants = config.clients.granted(config.grants)?;
        let (registry, stop) = (Registry::new(), Stop::new());
        let api = config.api.map(|api| Client::new(*api, &stop));
        if grants.have_volumes() && api.is_none() {
            return Err(Error::NoApi("the class volume is granted"));
        }
        if let Clients::Any = config.clients {
            log::warn!(
                "PLAINTEXT, AND CALLERS ARE NOT AUTHENTICATED, as in Constellation (--clients any): any client that reaches {} \
                 gets every key of {grants}",
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
        let disks = api.map(|api| Disks::new(&api, &registry));
        let awaited = Arc::new(Awaited {
            secret: OnceLock::new(),
            reason: Mutex::new("the key service has not read the master secret yet".into()),
        });
        let handler = Handler::new(awaited.clone(), authority, grants, disks, &registry);
        let api = Api {
            accept,
            router: handler.router(),
            limits: Limits {
                message_bytes: MAX_REQUEST,
                ..Limits::default()
            },
        };
        let known = awaited.clone();
        let ready = move || known.secret.get().is_some();
        let serving = Serving::start("key-service", addresses, api, ready, &registry)?;
        let address = serving.local_addr();
        log::info!("listening on {address}");
        if let Some(health) = serving.health_addr() {
            log::info!("health on {health}");
        }
        let exposed = match is_plain && !address.ip().is_loopback() {
            true => ", in plaintext",
            false => "",
        };
        Ok(KeyService {
            serving,
            stop,
            awaited,
            membership,
            said: format!("{address} for {who}{exposed}"),
        })
    }

    /// Tells callers why the master secret is not available yet.
    pub fn waits(&self, reason: &str) {
        let mut told = lock(&self.awaited.reason);
        reason.clone_into(&mut told);
    }

    /// Serves keys of this master secret from now on. Fails if this machine is in another cluster.
    pub fn provide(&self, kms: ClusterKms) -> Result<(), Error> {
        if let Some(Membership { register, salt, .. }) = &self.membership {
            let secret = kms
                .dek(&Dek::named(MEASUREMENT_SECRET_ID), KEY_LEN)
                .map_err(|error| Error::Secret(master_secret::Error::Kms(error)))?;
            // Otherwise each client would refuse this machine without a clear reason.
            if !register.is_of(&cluster_id(&secret, salt)) {
                return Err(Error::NoMember { is_fresh: false });
            }
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
        self.serving.stop(grace);
        self.stop.stop();
    }
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
            accept: Arc::new(|socket: TcpStream, _: Instant| booted_base::plain::transport(socket)),
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
            Clients::Any => Ok(plain(Authority::Anyone)),
        }
    }
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
    let path = config_dir.join(MEASUREMENT_SALT_FILE);
    let lengths = MEASUREMENT_SALT_LEN..=MEASUREMENT_SALT_LEN;
    let salt = master_secret::read(&path, "measurement salt", lengths).map_err(Error::Secret)?;
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
        Arc::new(atls::Server::new(Some(issuer), vec![members]).require_strong()),
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
    /// Not at all.
    Anyone,
}

impl Authority {
    /// Says who the callers are.
    fn callers(&self) -> &'static str {
        match self {
            Authority::Members { .. } => "machines of this cluster",
            Authority::Tokens(_) => "service accounts with a token",
            Authority::Anyone => "anyone",
        }
    }

    /// Returns the caller's name in grants.
    fn caller(&self, call: &Call) -> Result<String, Status> {
        match self {
            Authority::Members { own } if call.identity() == Some(own) => Ok(LOCAL.into()),
            Authority::Members { .. } => Ok(MEMBER.into()),
            Authority::Tokens(reviewer) => {
                reviewer.account(call.metadata(), call.peer().map(|peer| peer.ip()))
            }
            Authority::Anyone => Ok(ANYONE.into()),
        }
    }
}

/// The handler of the API's only method.
struct Handler {
    kms: Arc<Awaited>,
    authority: Authority,
    grants: Grants,
    /// `None` if no keys of volumes are granted.
    disks: Option<Disks>,
    requests: Labelled<Counter, 2>,
    seconds: Histogram,
}

impl Handler {
    fn new(
        kms: Arc<Awaited>,
        authority: Authority,
        grants: Grants,
        disks: Option<Disks>,
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
            disks,
            requests,
            seconds,
        }
    }

    fn router(self) -> Router {
        Router::new().unary(
            GET_DATA_KEY,
            move |call: &Call, request: GetDataKeyRequest| {
                let key = self.seconds.time(|| self.answer(call, &request))?;
                Ok(GetDataKeyResponse {
                    data_key: key.expose().to_vec(),
                })
            },
        )
    }

    /// Decides on a request and logs the decision.
    fn answer(&self, call: &Call, request: &GetDataKeyRequest) -> Result<Secret, Status> {
        let (mut caller, mut class) = ("unknown".to_owned(), "none");
        let mut decide = || {
            caller = self.authority.caller(call)?;
            check(request)?;
            let id = &request.data_key_id;
            let granted = self.grants.allow(&caller, id);
            class = granted.unwrap_or_else(|| Class::of(id)).name();
            let denied = || {
                Status::new(
                    Code::PermissionDenied,
                    format!("{caller} has no grant for keys of the class {class}"),
                )
            };
            if granted.ok_or_else(denied)? == Class::Volume {
                let (disks, uuid) = (
                    self.disks.as_ref().ok_or_else(denied)?,
                    Uuid::parse(id).ok_or_else(denied)?,
                );
                disks.refuse_state_disk(&uuid)?;
            }
            data_key(self.kms.get()?, request)
        };
        let result = decide();
        self.requests.with([class, outcome(&result)]).inc();
        let (id, length, peer) = (&request.data_key_id, request.length, peer(call.peer()));
        // An invalid id may be long, but at most `MAX_REQUEST` bytes.
        let mut line =
            format!("peer={peer} caller={caller} class={class} id={id:?} length={length}");
        let claims = call.claims::<Claims>();
        if let Some(platform) = claims.and_then(|claims| claims.platform.as_ref()) {
            line += &format!(" platform={:?}", verifier::claims::line(platform));
        }
        match &result {
            Ok(_) => log::info!("audit result=given {line}"),
            Err(status) => log::warn!("audit result=refused {line}: {status}"),
        }
        result
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
fn check(request: &GetDataKeyRequest) -> Result<(), Status> {
    let invalid = |message: String| Err(Status::new(Code::InvalidArgument, message));
    let id = request.data_key_id.as_str();
    if !(1..=MAX_KEY_LEN).contains(&request.length) {
        return invalid(format!(
            "length: expected 1 to {MAX_KEY_LEN} bytes, got {}",
            request.length
        ));
    }
    if id.is_empty() {
        return invalid("data_key_id: expected an id, got an empty string".into());
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
            "data_key_id: this UUID has upper-case letters, so its key would be another one than that of the same volume: \
             ask for {}",
            uuid.as_str()
        ));
    }
    Ok(())
}

fn data_key(kms: &ClusterKms, request: &GetDataKeyRequest) -> Result<Secret, Status> {
    let internal = |error: &dyn fmt::Display| Status::new(Code::Internal, error.to_string());
    let key = |id: &str, len| {
        kms.dek(&Dek::named(id), len)
            .map_err(|error| internal(&error))
    };
    match request.data_key_id.as_str() {
        // A join ticket contains only the public key of this authority.
        SSH_USER_CA_PUBLIC_ID => {
            let authority = ssh::Authority::from_seed(&key(SSH_USER_CA_SEED_ID, KEY_LEN)?);
            let blob = authority
                .map_err(|error| internal(&error))?
                .public()
                .blob()
                .to_vec();
            match request.length as usize == blob.len() {
                true => Ok(Secret::new(blob)),
                false => Err(Status::new(
                    Code::InvalidArgument,
                    format!(
                        "length: the public key has {} bytes, got {}",
                        blob.len(),
                        request.length
                    ),
                )),
            }
        }
        id => key(id, request.length as usize),
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
            Error::Grant(caller) => {
                write!(f, "--grant: {caller:?} cannot be a caller here: expected NAMESPACE/NAME with --clients token, ")?;
                write!(f, "{LOCAL} or {MEMBER} with attested, {ANYONE} with any")
            }
        }
    }
}

impl std::error::Error for Error {}

impl From<Refused> for Error {
    fn from((address, error): Refused) -> Error {
        Error::Listen(address, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeros() -> ClusterKms {
        ClusterKms::new(Secret::new(vec![0; 32]), Secret::new(vec![0; 32])).unwrap()
    }

    fn ask(id: &str, length: u32) -> Result<Secret, Status> {
        let request = GetDataKeyRequest {
            data_key_id: id.into(),
            length,
        };
        check(&request)?;
        data_key(&zeros(), &request)
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

    fn config() -> Config {
        Config {
            listen: ([127, 0, 0, 1], 0).into(),
            clients: Clients::Any,
            api: None,
            grants: None,
            allow_plaintext: false,
            health: None,
            metrics: None,
        }
    }

    #[test]
    fn plaintext_beyond_loopback_needs_the_flag() {
        let start = |allow_plaintext| {
            let exposed = Config {
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
        let config = Config { grants, ..config() };
        let error = KeyService::start(config).err().unwrap();
        assert!(matches!(error, Error::NoApi(_)), "{error}");
    }

    #[test]
    fn a_grant_to_an_impossible_caller_is_refused() {
        let grants = Some("kube-system/join-service=disk".parse().unwrap());
        let config = Config { grants, ..config() };
        let error = KeyService::start(config).err().unwrap();
        let error = error.to_string();
        assert!(
            error.contains("\"kube-system/join-service\" cannot be a caller"),
            "{error}"
        );
    }
}
