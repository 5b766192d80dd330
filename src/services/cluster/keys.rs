//! The client of the key service. All calls share one connection, which is made again after it
//! fails.
//!
//! [`Auth`] is how the two services authenticate each other; [`crate::key_service`] explains each
//! way. [`OPTIONS`] are the command line options for it.

use std::ffi::OsString;
use std::fs;
use std::net::{Ipv6Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use zeroize::Zeroizing;

use crate::key_service::certificate;
use crate::key_service::members::Members;
use crate::key_service::shared_secret::SharedSecret;
use crate::shared_metrics;
use base::crypto::{KEY_LEN, MEASUREMENT_SECRET_ID, Secret};
use base::options::{Opt, Table, put};
use base::program::{Failure, parsed, text};
use base::sync::lock;
use collateral::Fetching;
use kubernetes::wrapping_key;
use proto::kms::GET_DATA_KEY;
use proto::kms::{GetDataKeyRequest, GetDataKeyResponse};
use rpc::grpc::{CallOptions, Channel, Code, Metadata, Status};
use tpm::Location;
use transport::Transport;
use transport::dial;
use verifier::{NamedRegister, Variant};

/// The default file of a pod's token for the key service.
pub const TOKEN_FILE: &str = "/var/run/secrets/firstlight/key-service/token";
/// The default file of the secret that both services know.
pub const SECRET_FILE: &str = "/etc/firstlight/broker/services-secret";

/// The timeout of a call. The key service derives a key within microseconds.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// The timeout of a TCP connection. A lost SYN is sent again after 1 second (RFC 6298 §2.1).
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// The timeout of an attested handshake. It needs two quotes: a hardware TPM takes up to a second
/// for each, and may be busy.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How often the token's file is read. The kubelet replaces a token some minutes before it expires.
const TOKEN_INTERVAL: Duration = Duration::from_secs(20);
/// When a token is sent again that did not arrive.
const TOKEN_RETRY: Duration = Duration::from_secs(2);
/// How long calls fail at once after a failed connection, so that waiting calls do not try again
/// one after the other.
const RECONNECT_PAUSE: Duration = Duration::from_secs(1);

/// Why there is no connection to the key service. For callers each reason is temporary; only the log
/// shows it.
type Unreachable = Box<dyn std::error::Error>;

/// Why there is no key. The text is for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// A temporary failure: the service is down, slow or busy.
    Temporary(String),
    /// The service has no master secret yet. The text is the service's reason; callers may see it.
    Waiting(String),
    /// A permanent failure: the service refused the request, or its answer is not valid.
    Permanent(String),
}

/// How this service and the key service authenticate each other.
#[derive(Debug, Clone)]
pub enum Auth {
    /// Both prove by their TPM that they are machines of this cluster.
    Attested {
        /// The attestation variant of the cluster's nodes.
        variant: &'static Variant,
        /// The TPM of this machine.
        tpm: Location,
        /// The directory with `attestationConfig`, the policy that the key service must meet.
        config_dir: PathBuf,
        /// As in the configuration of the join service.
        collateral: Option<Arc<Fetching>>,
    },
    /// The client sends a token.
    Token {
        /// Its file. It is read for each call, because the token is replaced regularly.
        file: PathBuf,
        /// The directory of the wrapping key, by which the client authenticates the key service over
        /// TLS. If `None`, the client does not authenticate it.
        wrapping_key: Option<PathBuf>,
    },
    /// Both know the secret in this file. It is read for each call and connection.
    Secret(PathBuf),
    /// No authentication.
    None,
}

/// The command line options of a program that uses a key service.
pub const OPTIONS: &Table<KeyServiceFlags> = &[
    (Opt::value("key-service", "HOST:PORT[,HOST:PORT]..", "the addresses of the key service, of which the first that can be reached is used"),
     |it, _, value| it.set_endpoint(value, false)),
    (Opt::value("key-service-endpoint", "HOST:PORT", "the same option under its old name; it sets --key-service-auth none as the default"),
     |it, _, value| it.set_endpoint(value, true)),
    (Opt::value("key-service-auth", "HOW", "authentication between the two services: attested (both by their TPM), token-tls (this service by its token, the key service by the control plane's wrapping key), token (this service by its token, in plaintext), secret (both know one, without Kubernetes), or none").or("attested"),
     |it, _, value| put(&mut it.auth, text(value).map(Some))),
    (Opt::value("key-service-token", "FILE", "with --key-service-auth token and token-tls: the file of the token").or(TOKEN_FILE),
     |it, _, value| put(&mut it.token, Ok(Some(value.into())))),
    (Opt::value("key-service-secret", "FILE", "with --key-service-auth secret: the file of the secret that both services know, at least 32 bytes").or(SECRET_FILE),
     |it, _, value| put(&mut it.secret, Ok(Some(value.into())))),
    (Opt::value("tpm", "LOCATION", "with --key-service-auth attested: the TPM: device:PATH, swtpm:host=ADDRESS,port=PORT, tdx:FOLDER or snp:FILE [/dev/tpmrm0, else /dev/tpm0]"),
     |it, name, value| put(&mut it.tpm, parsed(name, value).map(Some))),
];

/// The values of [`OPTIONS`].
#[derive(Debug, Default)]
pub struct KeyServiceFlags {
    endpoint: Option<String>,
    /// Whether the endpoint was given by its old option.
    is_old: bool,
    auth: Option<String>,
    token: Option<PathBuf>,
    secret: Option<PathBuf>,
    tpm: Option<Location>,
}

impl KeyServiceFlags {
    fn set_endpoint(&mut self, value: OsString, is_old: bool) -> Result<(), Failure> {
        let given = text(value)?;
        let endpoints = given.split(',').map(endpoint);
        self.endpoint = Some(endpoints.collect::<Result<Vec<_>, _>>()?.join(","));
        self.is_old = is_old;
        Ok(())
    }

    /// Returns the key service's addresses, `HOST:PORT[,HOST:PORT]..`, and the authentication. The
    /// machines of the cluster attest as `variant`, and `config_dir` contains their policy.
    /// `wrapping_key` is the directory of the wrapping key. Fails if an option is missing or not valid, or if the machine has no TPM and attestation is used.
    pub fn finish(
        self,
        variant: &'static Variant,
        config_dir: &Path,
        wrapping_key: &Path,
        collateral: Option<&Arc<Fetching>>,
    ) -> Result<(String, Auth), Failure> {
        let endpoint = self
            .endpoint
            .ok_or_else(|| Failure::Usage("--key-service is missing".into()))?;
        // The old option is for Constellation's key service, which has no authentication.
        let auth = match self.auth.as_deref().unwrap_or(if self.is_old {
            "none"
        } else {
            "attested"
        }) {
            "attested" => {
                let tpm = self.tpm.map_or_else(variant.location, Ok).map_err(|error| {
                    Failure::failed(format!(
                        "{error}: this machine cannot prove itself to the key service; see --key-service-auth"
                    ))
                })?;
                Auth::Attested {
                    variant,
                    tpm,
                    config_dir: config_dir.into(),
                    collateral: collateral.cloned(),
                }
            }
            how @ ("token" | "token-tls") => Auth::Token {
                file: self.token.unwrap_or_else(|| TOKEN_FILE.into()),
                wrapping_key: (how == "token-tls").then(|| wrapping_key.into()),
            },
            "secret" => Auth::Secret(self.secret.unwrap_or_else(|| SECRET_FILE.into())),
            "none" => Auth::None,
            other => {
                let expected = "expected attested, token-tls, token, secret or none";
                return Err(Failure::Usage(format!(
                    "--key-service-auth {other:?}: {expected}"
                )));
            }
        };
        Ok((endpoint, auth))
    }
}

/// Parses `HOST:PORT`. An IPv6 address may lack its brackets, as in the variables that Kubernetes
/// sets for a Service. The kubelet leaves `$(NAME)` unchanged if the Service did not exist when the
/// container started; such a host is refused.
fn endpoint(text: &str) -> Result<String, Failure> {
    let refused = || Failure::Usage(format!("--key-service {text:?}: expected HOST:PORT"));
    let (host, port) = text.rsplit_once(':').ok_or_else(refused)?;
    let port: u16 = port.parse().map_err(|_| refused())?;
    if let Ok(address) = host.trim_matches(['[', ']']).parse::<Ipv6Addr>() {
        return Ok(SocketAddr::from((address, port)).to_string());
    }
    let is_of_host = |c: char| c.is_ascii_alphanumeric() || ['-', '.', '_'].contains(&c);
    if !host.is_empty() && host.chars().all(is_of_host) {
        Ok(text.to_owned())
    } else {
        Err(refused())
    }
}

/// The client of the key service at one address.
pub struct KeyClient {
    inner: Arc<Inner>,
    _token_sender: Option<TokenSender>,
}

struct Inner {
    /// The addresses, with commas between them.
    endpoint: String,
    auth: Auth,
    connection: Mutex<Connection>,
    /// Whether a key has arrived.
    has_answered: AtomicBool,
}

/// A thread that sends each new token to the key service soon, even if no key is needed. A key
/// service that has verified the token can serve this client while the API server is down, which is
/// when nodes may need their keys most. The thread ends when this is dropped.
struct TokenSender {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Connection {
    channel: Option<Channel>,
    /// The number of the present channel. A failed call discards the channel that it used, but not
    /// a newer one.
    number: u64,
    failed: Option<(Instant, String)>,
}

impl KeyClient {
    /// Creates a client of the service at `host:port[,host:port]..`. It connects at the first call,
    /// to the first address that can be reached.
    pub fn new(endpoint: &str, auth: Auth) -> KeyClient {
        if matches!(auth, Auth::None) {
            log::warn!(
                "KEYS COME IN PLAINTEXT FROM AN UNAUTHENTICATED SERVER at {endpoint}, as in Constellation (--key-service-auth none): \
                 an attacker in that network can read and choose the keys of disks"
            );
        }
        let inner = Arc::new(Inner {
            endpoint: endpoint.to_owned(),
            auth,
            connection: Mutex::default(),
            has_answered: AtomicBool::default(),
        });
        let token_sender = match &inner.auth {
            Auth::Token { file, .. } => TokenSender::start(inner.clone(), file.clone()),
            Auth::Attested { .. } | Auth::Secret(_) | Auth::None => None,
        };
        KeyClient {
            inner,
            _token_sender: token_sender,
        }
    }

    /// Returns whether the key service has given a key. With [`Auth::Token`], the client asks for one
    /// by itself; with the others it counts as answered from the beginning.
    pub fn has_answered(&self) -> bool {
        !matches!(self.inner.auth, Auth::Token { .. })
            || self.inner.has_answered.load(Ordering::Relaxed)
    }

    /// Returns the key `id` with `len` bytes. Ends before `deadline`, and always within a few
    /// seconds; with [`Auth::Attested`], a new connection takes some seconds more.
    pub fn data_key(
        &self,
        id: &str,
        len: usize,
        deadline: Option<Instant>,
    ) -> Result<Secret, Error> {
        self.inner.data_key(id, len, deadline)
    }
}

impl TokenSender {
    fn start(client: Arc<Inner>, file: PathBuf) -> Option<TokenSender> {
        let (stop, stopped) = mpsc::channel();
        let keep = move || {
            let mut sent = None;
            loop {
                // An unreadable file is reported by the call that needs the token.
                let present = fs::read(&file)
                    .ok()
                    .map(|token| sha256(&Zeroizing::new(token)));
                if present.is_some() && present != sent {
                    match client.data_key(MEASUREMENT_SECRET_ID, KEY_LEN, None) {
                        // The key service has accepted the token, or never will.
                        Ok(_) | Err(Error::Permanent(_)) => sent = present,
                        Err(Error::Temporary(error) | Error::Waiting(error)) => {
                            log::debug!("cannot send the new token to the key service: {error}")
                        }
                    }
                }
                let interval = if client.has_answered.load(Ordering::Relaxed) {
                    TOKEN_INTERVAL
                } else {
                    TOKEN_RETRY
                };
                if stopped.recv_timeout(interval) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        };
        match thread::Builder::new().name("key-token".into()).spawn(keep) {
            Ok(thread) => Some(TokenSender {
                stop: Some(stop),
                thread: Some(thread),
            }),
            Err(error) => {
                log::warn!(
                    "cannot start the thread that sends new tokens to the key service: {error}"
                );
                None
            }
        }
    }
}

impl Drop for TokenSender {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread is already in the log.
            let _ = thread.join();
        }
    }
}

impl Inner {
    fn data_key(&self, id: &str, len: usize, deadline: Option<Instant>) -> Result<Secret, Error> {
        let request = GetDataKeyRequest {
            data_key_id: id.to_owned(),
            length: len as u32,
            ..GetDataKeyRequest::default()
        };
        let started = Instant::now();
        let mut response = match self.call(&request, deadline) {
            // The service closes connections at their maximum age, and a kept connection may have
            // been broken for a long time; then a call fails at once. Trying again is safe, because
            // a repeated request changes nothing.
            CallOutcome {
                reused,
                result: Err(status),
            } if status.is_unprocessed()
                || reused
                    && status.code() == Code::Unavailable
                    && started.elapsed() < RECONNECT_PAUSE =>
            {
                self.call(&request, deadline).result
            }
            called => called.result,
        }
        .map_err(|status| self.error(id, &status))?;
        let key = Secret::new(std::mem::take(&mut response.data_key));
        if key.len() != len {
            return Err(Error::Permanent(format!(
                "key service {}: key {id}: expected {len} bytes, got {}",
                self.endpoint,
                key.len()
            )));
        }
        self.has_answered.store(true, Ordering::Relaxed);
        Ok(key)
    }

    fn call(&self, request: &GetDataKeyRequest, deadline: Option<Instant>) -> CallOutcome {
        let opened = self
            .metadata()
            .and_then(|metadata| Ok((metadata, self.channel(deadline)?)));
        let (metadata, (channel, number, reused)) = match opened {
            Ok(opened) => opened,
            Err(status) => {
                return CallOutcome {
                    reused: false,
                    result: Err(status),
                };
            }
        };
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let timeout = Some(left.map_or(CALL_TIMEOUT, |left| left.min(CALL_TIMEOUT)));
        let result = channel.unary(GET_DATA_KEY, request, &CallOptions { timeout, metadata });
        // After a timeout, the state of the connection is unknown. In TLS 1.3, the client learns
        // only from its first call that the server refused its certificate, and the server will
        // refuse it again. A service without the master secret may not be at the first address.
        if let Err(status) = &result
            && matches!(
                status.code(),
                Code::Unavailable | Code::DeadlineExceeded | Code::FailedPrecondition
            )
        {
            let is_refused =
                !reused && status.code() == Code::Unavailable && !status.is_unprocessed();
            self.discard(number, is_refused.then(|| status.to_string()));
        }
        CallOutcome { reused, result }
    }

    /// Builds the metadata of a call: the token, if one is used.
    fn metadata(&self) -> Result<Metadata, Status> {
        let mut metadata = Metadata::new();
        if let Auth::Token { file, .. } = &self.auth {
            let unusable = |error: &dyn std::fmt::Display| {
                Status::new(
                    Code::Unavailable,
                    format!("the token cannot be read from {}: {error}", file.display()),
                )
            };
            let token = Zeroizing::new(fs::read_to_string(file).map_err(|error| unusable(&error))?);
            let header = Zeroizing::new(format!("Bearer {}", token.trim()));
            metadata
                .insert("authorization", &header)
                .map_err(|_| unusable(&"it is not a valid header value"))?;
        }
        if let Auth::Secret(file) = &self.auth {
            let secret = SharedSecret::read(file)
                .map_err(|error| Status::new(Code::Unavailable, error.to_string()))?;
            secret.add_token(&mut metadata);
        }
        Ok(metadata)
    }

    /// Returns the channel, its number, and whether an earlier call has used it.
    fn channel(&self, deadline: Option<Instant>) -> Result<(Channel, u64, bool), Status> {
        let unavailable = |text: &str| Status::new(Code::Unavailable, text);
        // Calls that wait for this lock see the result of the connection attempt before them.
        let mut connection = self.lock();
        if let Some(channel) = &connection.channel {
            return Ok((channel.clone(), connection.number, true));
        }
        if let Some((at, error)) = &connection.failed
            && at.elapsed() < RECONNECT_PAUSE
        {
            return Err(unavailable(error));
        }
        let mut failures = Vec::new();
        let channel = self.endpoint.split(',').find_map(|endpoint| {
            let connected = self.connect(endpoint, deadline);
            connected
                .map_err(|error| failures.push(error.to_string()))
                .ok()
        });
        let channel = channel.ok_or_else(|| {
            let error = failures.join("; ");
            let status = unavailable(&error);
            connection.failed = Some((Instant::now(), error));
            status
        })?;
        connection.failed = None;
        connection.channel = Some(channel.clone());
        connection.number += 1;
        Ok((channel, connection.number, false))
    }

    /// Connects to the first address of `endpoint` that works.
    fn connect(&self, endpoint: &str, deadline: Option<Instant>) -> Result<Channel, Unreachable> {
        let mut failure = "no address".into();
        let until = Instant::now() + CALL_TIMEOUT;
        let until = deadline.map_or(until, |deadline| deadline.min(until));
        for address in dial::resolve_server(endpoint, until)? {
            let connected = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT)
                .map_err(Unreachable::from)
                .and_then(|socket| self.transport(socket, deadline))
                .and_then(|transport| Ok(Channel::new(transport, endpoint)?));
            match connected {
                Ok(channel) => return Ok(channel),
                Err(error) => failure = format!("{address}: {error}").into(),
            }
        }
        Err(failure)
    }

    fn transport(
        &self,
        socket: TcpStream,
        deadline: Option<Instant>,
    ) -> Result<Transport, Unreachable> {
        let own = Instant::now() + HANDSHAKE_TIMEOUT;
        let deadline = deadline.map_or(own, |deadline| deadline.min(own));
        let Auth::Attested {
            variant,
            tpm,
            config_dir,
            collateral,
        } = &self.auth
        else {
            return Ok(match &self.auth {
                Auth::Secret(file) => SharedSecret::read(file)?.connect(socket, deadline)?,
                Auth::Token {
                    wrapping_key: Some(directory),
                    ..
                } => {
                    let key = wrapping_key::read(directory)?;
                    let key = key.ok_or("this machine has no wrapping key yet")?;
                    certificate::connect(&certificate::seed_of(&key), socket, deadline)?
                }
                _ => transport::plain::transport(socket)?,
            });
        };
        let register = verifier::cluster_register(tpm)?;
        if register.is_fresh() {
            let register = register.name();
            let why =
                format!("this machine has joined no cluster since it started ({register} is zero)");
            return Err(why.into());
        }
        let members = Arc::new(Members::new(
            variant,
            config_dir,
            register,
            shared_metrics::sources(collateral),
        )?);
        let issuer = (variant.issuer)(tpm);
        let client =
            atls::Client::new(Some(issuer), Some(verifier::judge(members))).require_strong();
        Ok(client.connect(socket, deadline)?)
    }

    /// Discards a channel. If it never worked, `failure` is the reason, so that the next calls fail
    /// at once.
    fn discard(&self, number: u64, failure: Option<String>) {
        let mut connection = self.lock();
        if connection.number == number {
            connection.channel = None;
            connection.failed = failure.map(|failure| (Instant::now(), failure));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        lock(&self.connection)
    }

    fn error(&self, id: &str, status: &Status) -> Error {
        let text = format!("key service {}: key {id}: {status}", self.endpoint);
        match status.code() {
            Code::Unavailable
            | Code::DeadlineExceeded
            | Code::ResourceExhausted
            | Code::Cancelled
            | Code::Aborted => Error::Temporary(text),
            Code::FailedPrecondition => Error::Waiting(status.message().to_owned()),
            _ => Error::Permanent(text),
        }
    }
}

struct CallOutcome {
    /// Whether an earlier call has used the connection.
    reused: bool,
    result: Result<GetDataKeyResponse, Status>,
}

fn sha256(bytes: &[u8]) -> Vec<u8> {
    ring::digest::digest(&ring::digest::SHA256, bytes)
        .as_ref()
        .to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_host_and_a_port_also_as_kubernetes_tells_them() {
        for good in [
            "key-service:9000",
            "key-service.kube-system.svc:9000",
            "10.96.3.4:9000",
            "[fd00::1]:9000",
        ] {
            assert_eq!(endpoint(good).unwrap(), good);
        }
        assert_eq!(endpoint("fd00::1:9000").unwrap(), "[fd00::1]:9000");
        for bad in [
            "",
            "key-service",
            ":9000",
            "key-service:",
            "key-service:x",
            "$(KEY_SERVICE_SERVICE_HOST):9000",
            "a b:1",
        ] {
            assert!(endpoint(bad).is_err(), "{bad}");
        }
    }
}
