//! `firstlight wrap` and `firstlight unwrap`: wraps the master secret with a key of an external key
//! management service.

use std::path::{Path, PathBuf};

use base::master_secret::MasterSecret;
use keywrap::Wrapped;
use kubernetes::wrapping_key;
use zeroize::Zeroizing;

use crate::shell::{error::Error, output::Output};
use crate::workspace::master_secret::{
    self, MASTER_SECRET_FILE, SecretOptions, WRAPPED_SECRET_FILE,
};
use clap::Args;
use serde_json::json;

/// The default file of a master secret that is encrypted for control planes.
const ENCRYPTED_SECRET_FILE: &str = "firstlight-mastersecret.encrypted.json";

/// Wrap the master secret for a key management service or for control planes
///
/// The service encrypts a random key, which encrypts the master secret. Every command takes the file that this one
/// writes as --master-secret: the service then decrypts the key at each use, if the user who runs the command has the
/// permission. The file is useless without the service's key.
///
/// The URI names the service and its key, without credentials; quote it in a shell.
/// kms://vault?address=https://HOST:PORT&keyName=NAME is a key of the engine transit of Vault or OpenBao,
/// kms://aws-kms?keyName=ARN a key of AWS KMS, kms://azure-kms?address=https://VAULT.vault.azure.net&keyName=NAME one
/// of Azure Key Vault, kms://gcp-kms?keyName=projects/.. one of Google Cloud KMS, and
/// kms://kmip?address=HOST:PORT&keyId=IDENTIFIER one of a KMIP server. docs/kms.md has the parameters, and the
/// permissions that the services need.
///
/// A file that is wrapped already can be wrapped for another service.
///
/// With --for-control-planes the file is the value masterSecret.encrypted of the Helm chart: only the key service of
/// a control plane can read it, by the wrapping key on the control plane's state disk. `firstlight apply` makes it
/// itself.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firstlight wrap --kms 'kms://vault?address=https://vault:8200&keyName=firstlight'
  firstlight wrap --kms 'kms://aws-kms?keyName=ARN' --out 'storage://aws?bucket=own&region=eu-central-1'
  firstlight wrap --for-control-planes")]
pub struct Options {
    /// The service and its key; with --for-control-planes, none is needed
    #[arg(
        long,
        value_name = "URI",
        required_unless_present = "for_control_planes"
    )]
    kms: Option<String>,
    /// Encrypt the result with the wrapping key of the cluster's control planes
    #[arg(long)]
    for_control_planes: bool,
    /// Have the service make the key if it is missing
    #[arg(long, requires = "kms")]
    create_key: bool,
    #[command(flatten)]
    secret: SecretOptions,
    /// The file to write, or storage://.. for an object in a store of a cloud (docs/kms.md); must not exist
    /// [default: firstlight-mastersecret.wrapped.json; with --for-control-planes firstlight-mastersecret.encrypted.json]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    output: Output,
}

/// Runs `firstlight wrap`.
pub fn wrap(options: &Options) -> Result<(), Error> {
    let out = options.out.clone().unwrap_or_else(|| {
        let encrypts = options.for_control_planes;
        let file = if encrypts {
            ENCRYPTED_SECRET_FILE
        } else {
            WRAPPED_SECRET_FILE
        };
        file.into()
    });
    let secret = options
        .secret
        .source()
        .read_wrapped(options.kms.as_deref())?;
    let wrapped = match &options.kms {
        None => None,
        Some(kms) => {
            let key = keywrap::open(kms)?;
            key.prepare(options.create_key)?;
            Some((kms, Wrapped::wrap(&secret, kms, &*key)?.text()))
        }
    };
    let (kms, content) = match wrapped {
        _ if options.for_control_planes => {
            return encrypt(&out, options.output, &secret, wrapped.map(|(_, text)| text));
        }
        None => return Err(Error::Usage("--kms is missing".into())),
        Some(wrapped) => wrapped,
    };
    let written = write(&out, content.as_bytes(), &secret, Some(kms))?;
    options
        .output
        .json(&json!({"wrapped": written, "kms": kms}))?;
    options.output.say(format_args!(
        "{} has the master secret, wrapped by {}. Give it as --master-secret in place of the plain one, and keep the plain one where no other person can read it, or destroy it: without both the service's key and the plain one the cluster cannot be recovered.",
        written.display(),
        kms
    ))
}

/// Writes the value `masterSecret.encrypted` of the chart: the master secret, or its wrapped form.
fn encrypt(
    out: &Path,
    output: Output,
    secret: &MasterSecret,
    wrapped: Option<String>,
) -> Result<(), Error> {
    let form = wrapped.map_or_else(|| secret.uri(), Zeroizing::new);
    let content = wrapping_key::encrypt(form.as_bytes(), &wrapping_key::of(secret));
    let content = content.map_err(Error::failed)?;
    let written = master_secret::write(out, content.as_bytes())?;
    output.json(&json!({"encrypted": written}))?;
    output.say(format_args!(
        "{} has the master secret, encrypted for the control planes of its cluster: the value masterSecret.encrypted of the chart. No \
         command reads it: keep the plain or the wrapped one, too",
        written.display()
    ))
}

/// Write the plain master secret of a wrapped one
///
/// The service that the file names must decrypt its key. It is not needed afterwards.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  firstlight unwrap")]
pub struct Unwrap {
    /// The wrapped master secret, or storage://.. of an object in a store (docs/kms.md)
    #[arg(long, value_name = "FILE", default_value = WRAPPED_SECRET_FILE)]
    master_secret: PathBuf,
    /// The file to write; must not exist
    #[arg(long, value_name = "FILE", default_value = MASTER_SECRET_FILE)]
    out: PathBuf,
    #[command(flatten)]
    output: Output,
}

/// Runs `firstlight unwrap`: writes the plain master secret to a file that must not exist.
pub fn unwrap(options: &Unwrap) -> Result<(), Error> {
    let (out, output) = (&options.out, options.output);
    let secret = master_secret::read(&options.master_secret)?;
    write(out, master_secret::text(&secret).as_bytes(), &secret, None)?;
    output.json(&json!({"masterSecret": out}))?;
    output.say(format_args!(
        "{} has the plain master secret",
        out.display()
    ))
}

/// Writes the file, which was wrapped with the key in the URI `kms`, and reads it again. Returns
/// its path, or the URI in a store.
fn write(
    out: &Path,
    content: &[u8],
    secret: &MasterSecret,
    kms: Option<&str>,
) -> Result<PathBuf, Error> {
    let written = master_secret::write(out, content)?;
    let read = master_secret::read_wrapped(&written, kms)?;
    if read == *secret {
        Ok(written)
    } else {
        Err(Error::failed(format!(
            "{} was written and does not have the master secret: keep the old file, and check the disk",
            out.display()
        )))
    }
}
