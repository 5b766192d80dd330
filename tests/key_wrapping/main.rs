//! The master secret, wrapped by an external key management service. The operator's command and the key service are its clients.
//! The services are real servers or emulators where they exist, otherwise servers that follow the published API and check each
//! request.

mod aws_kms;
mod azure_kms;
mod cluster;
mod gcp_kms;
mod kmip;
mod stores;
mod vault;

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};

use common::attested::{plain_channel, within};
use proto::kms::{GET_DATA_KEY, GetDataKeyRequest, GetDataKeyResponse};
use serde_json::{Value, json};
use support::ROOT;
use support::foreign::python;
use support::program::Program;
use tempfile::TempDir;

const KEY: [u8; 32] = [1; 32];
const SALT: [u8; 32] = [2; 32];

/// Variables of the environment.
type Env<'a> = &'a [(&'a str, &'a str)];

/// A folder with the master secret, as the operator and as the key service have it.
fn workspace() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let kms = base::master_secret::MasterSecret::new(
        base::crypto::Secret::new(KEY.to_vec()),
        base::crypto::Secret::new(SALT.to_vec()),
    );
    let base64 = |bytes: &[u8]| {
        use base64::Engine;
        base64::engine::general_purpose::STANDARD.encode(bytes)
    };
    let kms = kms.unwrap();
    let json = json!({"key": base64(kms.key().expose()), "salt": base64(kms.salt().expose())});
    let file = dir.path().join("plain.json");
    fs::write(&file, json.to_string()).unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    fs::write(dir.path().join("key"), KEY).unwrap();
    fs::write(dir.path().join("salt"), SALT).unwrap();
    dir
}

fn firstlight(dir: &Path, env: Env<'_>, args: &[&str]) -> Output {
    Command::new(support::program::built("firstlight"))
        .args(args)
        .current_dir(dir)
        .envs(env.iter().copied())
        .output()
        .unwrap()
}

fn wrap(dir: &Path, env: Env<'_>, uri: &str, more: &[&str]) -> Result<(), String> {
    let args = [
        "wrap",
        "--kms",
        uri,
        "--master-secret",
        "plain.json",
        "--out",
        "wrapped.json",
    ];
    let output = firstlight(dir, env, &[&args, more].concat());
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8(output.stderr).unwrap())
    }
}

fn key_service(dir: &Path, env: Env<'_>, secret: &[&str]) -> Program {
    let mut command = Command::new(support::program::built("key-service"));
    command
        .args(["--clients", "any", "--listen", "127.0.0.1:0"])
        .args(secret)
        .current_dir(dir)
        .envs(env.iter().copied());
    Program::start(&mut command)
}

/// Returns a key that the service gives.
fn key(service: &Program) -> Vec<u8> {
    let line = service.expect("serving data keys on");
    let address = line
        .split(|c: char| c.is_whitespace() || c == ',')
        .find_map(|word| word.parse().ok());
    let request = GetDataKeyRequest {
        data_key_id: "s3proxy-kek".into(),
        length: 32,
        ..GetDataKeyRequest::default()
    };
    let answer: GetDataKeyResponse = plain_channel(address.unwrap())
        .unary(GET_DATA_KEY, &request, &within(60))
        .unwrap();
    answer.data_key.clone()
}

/// A service that a program in this folder serves over TLS. It ends with its standard input, and thus with this process.
struct Peer {
    /// The first line of its output.
    found: Value,
    /// The folder with `ca.pem`.
    folder: TempDir,
    _process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Starts the script with the folder of the policies, a certificate and its key.
    fn python(script: &str) -> Peer {
        Peer::python_with(script, &[])
    }

    /// The same with variables.
    fn python_with(script: &str, env: Env<'_>) -> Peer {
        let mut command = python();
        command
            .arg(format!("{ROOT}/tests/key_wrapping/{script}"))
            .envs(env.iter().copied());
        Peer::start(command)
    }

    fn start(mut command: Command) -> Peer {
        let folder = tempfile::tempdir().unwrap();
        let own = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).unwrap();
        let (certificate, key) = (folder.path().join("ca.pem"), folder.path().join("key.pem"));
        fs::write(&certificate, own.cert.pem()).unwrap();
        fs::write(&key, own.signing_key.serialize_pem()).unwrap();
        let mut process = command
            .arg(format!("{ROOT}/docs/clouds"))
            .args([&certificate, &key])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut peer = Peer {
            found: Value::Null,
            folder,
            input: process.stdin.take().unwrap(),
            output: BufReader::new(process.stdout.take().unwrap()),
            _process: process,
        };
        while !peer.found.is_object() {
            peer.found = serde_json::from_str(&peer.line()).unwrap_or_default();
        }
        peer
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        let len = self.output.read_line(&mut line).unwrap();
        assert!(len > 0, "the server has ended");
        line.trim().to_owned()
    }

    /// Returns the answer to a line.
    fn ask(&mut self, line: &str) -> String {
        writeln!(self.input, "{line}").unwrap();
        self.line()
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// Runs `firstlight unwrap`; the error is its message.
fn unwrap(dir: &Path, env: Env<'_>) -> Result<(), String> {
    let _ = fs::remove_file(dir.join("back.json"));
    let args = [
        "unwrap",
        "--master-secret",
        "wrapped.json",
        "--out",
        "back.json",
    ];
    let output = firstlight(dir, env, &args);
    if output.status.success() {
        Ok(())
    } else {
        Err(String::from_utf8(output.stderr).unwrap())
    }
}

/// Replaces the wrapped secret by another secret that the service wrapped.
fn replace_wrapped_key(dir: &Path, base64: &str) {
    let path = dir.join("wrapped.json");
    let mut file: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    file["wrappedKey"] = base64.into();
    fs::write(&path, file.to_string()).unwrap();
}

/// Checks that the key service gives the same keys with the wrapped secret as with the plain one.
fn check_same_keys(dir: &Path, env: Env<'_>) {
    check_same_keys_of(dir, env, "wrapped.json");
}

/// The same with this file.
fn check_same_keys_of(dir: &Path, env: Env<'_>, file: &str) {
    let plain = key_service(dir, &[], &["--master-secret", "key", "--salt", "salt"]);
    let unwrapped = key_service(dir, env, &["--master-secret", file]);
    assert_eq!(key(&plain), key(&unwrapped));
}
