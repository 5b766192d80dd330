//! `firstlight wrap` and `firstlight unwrap`: wraps the master secret with a key of an external key
//! management service.

use std::path::{Path, PathBuf};

use base::program::Failure;
use keywrap::Wrapped;
use kms::ClusterKms;

use super::master_secret::{self, Source};
use super::output::Output;
use serde_json::json;

/// The task of `firstlight wrap`.
pub struct Options {
    /// The key of the service, `kms://..`.
    pub kms: String,
    /// Whether the service makes the key if it is missing.
    pub create_key: bool,
    /// The source of the master secret, plain or wrapped.
    pub master_secret: Source,
    /// The file to write, or the URI of a store; it must not exist.
    pub out: PathBuf,
    /// The form of the output.
    pub output: Output,
}

/// Runs `firstlight wrap`.
pub fn wrap(options: &Options) -> Result<(), Failure> {
    let secret = options.master_secret.read_wrapped(Some(&options.kms));
    let secret = secret.map_err(Failure::failed)?;
    let key = keywrap::open(&options.kms).map_err(Failure::failed)?;
    key.prepare(options.create_key).map_err(Failure::failed)?;
    let wrapped = Wrapped::wrap(&secret, &options.kms, &*key).map_err(Failure::failed)?;
    let (content, kms) = (wrapped.text(), Some(&*options.kms));
    let written = write(&options.out, content.as_bytes(), &secret, kms)?;
    options
        .output
        .json(&json!({"wrapped": written, "kms": options.kms}))?;
    options.output.say(format_args!(
        "{} has the master secret, wrapped by {}. Give it as --master-secret in place of the plain one, and keep that where nobody \
         reads it, or destroy it: without both the service's key and the plain one nobody can recover the cluster.",
        written.display(),
        options.kms
    ))
}

/// Runs `firstlight unwrap`: writes the plain master secret of the file `wrapped` to `out`, which
/// must not exist.
pub fn unwrap(wrapped: &Path, out: &Path, output: Output) -> Result<(), Failure> {
    let secret = master_secret::read(wrapped).map_err(Failure::failed)?;
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
    secret: &ClusterKms,
    kms: Option<&str>,
) -> Result<PathBuf, Failure> {
    let written = master_secret::write(out, content).map_err(Failure::failed)?;
    let read = master_secret::read_wrapped(&written, kms).map_err(Failure::failed)?;
    match read == *secret {
        true => Ok(written),
        false => Err(Failure::failed(format!(
            "{} was written and does not have the master secret: keep the old file, and check the disk",
            out.display()
        ))),
    }
}
