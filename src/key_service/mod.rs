//! The key service: derives data keys from the master secret for the services of a control plane, `/kms.API/GetDataKey`.
//!
//! It keeps nothing but the master secret and its salt, which it reads once. Callers of the old system speak plaintext and
//! prove nothing, and whoever may ask may have every key: so it listens on loopback addresses only, unless it is told that
//! the network around it is the cluster's own, encrypted one (`--allow-plaintext`).
//!
//! What it takes: ids of letters, digits, `.`, `_` and `-`, at most 128 of them; a UUID in lower case, since ids are
//! compared byte for byte and the upper-case form would give another key than the disk's; lengths of 1 to 64 bytes.

use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use zeroize::Zeroizing;

use crate::crypto::{Dek, Secret};
use crate::grpc::{Call, Code, Limits, Router, Server, Status, Transport};
use crate::kms::{ClusterKms, Uuid};
use crate::logger::peer;
use crate::proto::kms::{GetDataKeyRequest, GetDataKeyResponse};

/// Where callers expect it.
pub const PORT: u16 = 9000;
/// The gRPC method.
pub const GET_DATA_KEY: &str = "/kms.API/GetDataKey";
/// The master secret, raw bytes, where the cluster's Secret is mounted.
pub const MASTER_SECRET_FILE: &str = "/var/config/mastersecret";
/// Its salt, raw bytes, in the same place.
pub const SALT_FILE: &str = "/var/config/salt";

/// How long callers may still take when the service stops: each call takes microseconds.
pub const GRACE: Duration = Duration::from_secs(5);

/// The old key service starts with no shorter master secret: bytes.
const MIN_MASTER_SECRET_LEN: usize = 16;
/// As [`MIN_MASTER_SECRET_LEN`], of the salt.
const MIN_SALT_LEN: usize = 32;
/// More than either file may have: what is larger was mistaken for it.
const MAX_FILE_LEN: u64 = 4096;
const MAX_ID_LEN: usize = 128;
/// No caller asks for more than 32; room for a key of XTS or HMAC with SHA-512.
const MAX_KEY_LEN: u32 = 64;
/// Ids are short: a request that is larger is none.
const MAX_REQUEST: usize = 1024;

/// What the service is started with.
#[derive(Debug, Clone)]
pub struct Config {
    /// Port 0 takes a free one.
    pub listen: SocketAddr,
    /// File of the master secret, at least 16 bytes.
    pub master_secret: PathBuf,
    /// File of the salt, at least 32 bytes.
    pub salt: PathBuf,
    /// Whether keys may leave the machine unencrypted.
    pub allow_plaintext: bool,
}

/// Reads the secret and serves until the server is stopped.
pub fn start(config: &Config) -> Result<Server, Error> {
    if !config.listen.ip().is_loopback() && !config.allow_plaintext {
        return Err(Error::Exposed(config.listen.ip()));
    }
    let kms = Arc::new(read_kms(config)?);
    let listener = TcpListener::bind(config.listen).map_err(|error| Error::Listen(config.listen, error))?;
    let limits = Limits { message_bytes: MAX_REQUEST, ..Limits::default() };
    let plain = |socket: TcpStream, _: Instant| Transport::plain(socket);
    let server = Server::start("key-service", listener, Arc::new(plain), router(kms), limits)
        .map_err(|error| Error::Listen(config.listen, error))?;
    let exposed = if config.listen.ip().is_loopback() { "" } else { ", in plaintext to whoever reaches it" };
    log::info!("serving data keys on {}{exposed}", server.local_addr());
    Ok(server)
}

/// Its one method.
pub fn router(kms: Arc<ClusterKms>) -> Router {
    Router::new().unary(GET_DATA_KEY, move |call: &Call, request: GetDataKeyRequest| {
        let key = data_key(&kms, &request).inspect_err(|status| {
            // what is no id may be long: MAX_REQUEST bounds it
            log::warn!("{}: no key {:?}: {status}", peer(call.peer()), request.data_key_id)
        })?;
        log::debug!("{}: key {:?}, {} bytes", peer(call.peer()), request.data_key_id, request.length);
        Ok(GetDataKeyResponse { data_key: key.expose().to_vec() })
    })
}

/// The key, or the status that the caller gets.
fn data_key(kms: &ClusterKms, request: &GetDataKeyRequest) -> Result<Secret, Status> {
    let invalid = |message: String| Err(Status::new(Code::InvalidArgument, message));
    let id = request.data_key_id.as_str();
    if !(1..=MAX_KEY_LEN).contains(&request.length) {
        return invalid(format!("length: expected 1 to {MAX_KEY_LEN} bytes, got {}", request.length));
    }
    if id.is_empty() {
        return invalid("data_key_id: it is empty".into());
    }
    if id.len() > MAX_ID_LEN {
        return invalid(format!("data_key_id: expected at most {MAX_ID_LEN} characters, got {}", id.len()));
    }
    if !id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)) {
        return invalid("data_key_id: expected letters, digits, '.', '_' and '-' only".into());
    }
    if Uuid::parse(id).is_some_and(|uuid| uuid.as_str() != id) {
        return invalid("data_key_id: a UUID must be in lower case".into());
    }
    kms.dek(&Dek::named(id), request.length as usize).map_err(|error| Status::new(Code::Internal, error.to_string()))
}

fn read_kms(config: &Config) -> Result<ClusterKms, Error> {
    let key = read_secret(&config.master_secret, "master secret", MIN_MASTER_SECRET_LEN)?;
    let salt = read_secret(&config.salt, "salt of the master secret", MIN_SALT_LEN)?;
    ClusterKms::new(key, salt).map_err(Error::Kms)
}

/// Exactly the bytes of the file: no line break is taken off.
fn read_secret(path: &Path, what: &'static str, min: usize) -> Result<Secret, Error> {
    let failed = |error| Error::Read(what, path.into(), error);
    let file = fs::File::open(path).map_err(failed)?;
    // with room for all of it, since a vector that grows leaves copies behind
    let mut bytes = Zeroizing::new(Vec::with_capacity(MAX_FILE_LEN as usize + 1));
    file.take(MAX_FILE_LEN + 1).read_to_end(&mut bytes).map_err(failed)?;
    if !(min..=MAX_FILE_LEN as usize).contains(&bytes.len()) {
        return Err(Error::Size(what, path.into(), bytes.len(), min));
    }
    Ok(Secret::new(bytes.to_vec()))
}

/// Why the service does not start.
#[derive(Debug)]
pub enum Error {
    /// Keys would leave the machine unencrypted through this address.
    Exposed(IpAddr),
    /// The address cannot be listened on.
    Listen(SocketAddr, io::Error),
    /// The file of the named secret cannot be read.
    Read(&'static str, PathBuf, io::Error),
    /// The named secret's file has so many bytes, which is too few (the least is the last field) or too many.
    Size(&'static str, PathBuf, usize, usize),
    /// The secret is none.
    Kms(crate::kms::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Exposed(ip) => write!(
                f,
                "refusing to hand out keys in plaintext on {ip}: listen on a loopback address, or give \
                 --allow-plaintext if that network is encrypted and trusted"
            ),
            Error::Listen(address, error) => write!(f, "cannot listen on {address}: {error}"),
            Error::Read(what, path, error) => write!(f, "cannot read the {what} from {}: {error}", path.display()),
            Error::Size(what, path, len, min) => {
                write!(f, "the {what} in {}: expected {min} to {MAX_FILE_LEN} bytes, got {len}", path.display())
            }
            Error::Kms(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    fn zeros() -> ClusterKms {
        ClusterKms::new(Secret::new(vec![0; 32]), Secret::new(vec![0; 32])).unwrap()
    }

    fn ask(id: &str, length: u32) -> Result<Secret, Status> {
        data_key(&zeros(), &GetDataKeyRequest { data_key_id: id.into(), length })
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
    fn lengths_outside_1_to_64_are_invalid() {
        for length in [0, 65, 8160, u32::MAX] {
            assert_eq!(ask("measurementSecret", length).unwrap_err().code(), Code::InvalidArgument, "{length}");
        }
    }

    #[test]
    fn ids_that_are_none_are_invalid() {
        let long = "x".repeat(MAX_ID_LEN + 1);
        for id in ["", "a b", "../x", "a/b", "ü", "a\0", "key\n", &long] {
            assert_eq!(ask(id, 32).unwrap_err().code(), Code::InvalidArgument, "{id}");
        }
        assert!(ask(&long[1..], 32).is_ok());
    }

    #[test]
    fn an_upper_case_uuid_is_refused_for_its_case() {
        let status = ask("FFFFFFFF-ffff-ffff-ffff-ffffffffffff", 32).unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("lower case"), "{status}");
    }

    fn config(dir: &Path, secret: &[u8], salt: &[u8]) -> Config {
        let (master_secret, salt_file) = (dir.join("mastersecret"), dir.join("salt"));
        fs::write(&master_secret, secret).unwrap();
        fs::write(&salt_file, salt).unwrap();
        Config { listen: ([127, 0, 0, 1], 0).into(), master_secret, salt: salt_file, allow_plaintext: false }
    }

    #[test]
    fn short_long_and_missing_secrets_are_refused_with_the_file_named() {
        let dir = tempfile::tempdir().unwrap();
        for (secret, salt, wrong) in [
            (&[1; 15][..], &[2; 32][..], "mastersecret: expected 16 to 4096 bytes, got 15"),
            (&[1; 16], &[2; 31], "salt: expected 32 to 4096 bytes, got 31"),
            (&[1; 5000], &[2; 32], "mastersecret: expected 16 to 4096 bytes, got 4097"),
        ] {
            let error = read_kms(&config(dir.path(), secret, salt)).unwrap_err().to_string();
            assert!(error.ends_with(wrong), "{error}");
        }
        let mut missing = config(dir.path(), &[1; 16], &[2; 32]);
        assert!(read_kms(&missing).is_ok());
        missing.salt = dir.path().join("nothing");
        assert!(matches!(read_kms(&missing), Err(Error::Read(..))));
    }

    #[test]
    fn the_secret_is_the_file_byte_for_byte() {
        let dir = tempfile::tempdir().unwrap();
        let kms = read_kms(&config(dir.path(), b"0123456789abcdef\n", &[2; 32])).unwrap();
        assert_eq!(
            kms,
            ClusterKms::new(Secret::new(b"0123456789abcdef\n".to_vec()), Secret::new(vec![2; 32])).unwrap()
        );
    }

    #[test]
    fn plaintext_beyond_loopback_needs_the_flag() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = config(dir.path(), &[1; 16], &[2; 32]);
        config.listen = ([0, 0, 0, 0], 0).into();
        assert!(matches!(start(&config), Err(Error::Exposed(_))));
        config.allow_plaintext = true;
        assert!(start(&config).is_ok());
    }
}
