//! `firstlight ssh`: certifies the operator's key for a day, and writes the known-hosts line with
//! which ssh recognizes the cluster's nodes.
//!
//! Both of the cluster's SSH certificate authorities ([`ssh`]) are derived from the master secret.
//! The command sends no request, so it works even when the cluster does not.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::shell::{error::Error, files, output::Output};
use crate::workspace::master_secret::SecretOptions;
use base::crypto::{Dek, KEY_LEN, SSH_HOST_CA_SEED_ID, SSH_USER_CA_SEED_ID};
use base::master_secret::MasterSecret;
use clap::Args;
use serde_json::json;
use ssh::{Authority, PublicKey, USER, USER_VALIDITY};

/// Certify your SSH key for the nodes of a cluster
///
/// The cluster's two SSH certificate authorities, for users and for hosts, are derived from the master secret. This
/// command certifies your key for root on every node, for a day, and writes a known-hosts line by which ssh
/// recognizes the nodes' certificates. It needs no connection to a node. The machines' network decides whether port
/// 22 can be reached.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  firstlight ssh --key ~/.ssh/id_ed25519.pub
  firstlight ssh --key ~/.ssh/id_ed25519.pub --certificate ~/.ssh/id_ed25519-cert.pub --overwrite")]
pub struct Options {
    /// Your public key, as ~/.ssh/id_ed25519.pub; any type that can be certified
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
    #[command(flatten)]
    secret: SecretOptions,
    /// The file for the certificate; must not exist
    #[arg(long, value_name = "FILE", default_value = "firstlight-ssh-cert.pub")]
    certificate: PathBuf,
    /// The file that gets the line for the nodes, unless it has it
    #[arg(long, value_name = "FILE", default_value = "firstlight-known_hosts")]
    known_hosts: PathBuf,
    /// Also recognize nodes of Constellation, whose host certificates are from the authority for users
    #[arg(long)]
    old_hosts: bool,
    /// Replace an existing certificate
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    output: Output,
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    let kms = options.secret.source().read()?;
    let key = read_key(&options.key)?;
    let users = authority(&kms, SSH_USER_CA_SEED_ID)?;
    let hosts = authority(&kms, SSH_HOST_CA_SEED_ID)?;
    write_certificate(options, &users.user_certificate(&key, SystemTime::now()))?;
    let mut is_new = add_known_hosts(&options.known_hosts, &hosts)?;
    if options.old_hosts {
        is_new |= add_known_hosts(&options.known_hosts, &users)?;
    }

    let output = options.output;
    output.json(&json!({
        "certificate": options.certificate,
        "knownHosts": options.known_hosts,
        "isNewAuthority": is_new,
        "user": USER,
        "validSeconds": USER_VALIDITY.as_secs(),
    }))?;
    let (certificate, known_hosts) = (options.certificate.display(), options.known_hosts.display());
    let hours = USER_VALIDITY.as_secs() / 3600;
    output.say(format_args!(
        "A certificate for {USER}, valid for {hours} hours, is in {certificate}"
    ))?;
    output.say(if is_new {
        format!("The cluster's authority for hosts is in {known_hosts}")
    } else {
        format!("The cluster's authority for hosts was already in {known_hosts}")
    })?;
    let private = if options.key.extension().is_some_and(|it| it == "pub") {
        options.key.with_extension("")
    } else {
        "KEY".into()
    };
    output.say(format_args!(
        "\nReach a node by:\n  ssh -i {} -o CertificateFile={certificate} -o UserKnownHostsFile={known_hosts} {USER}@NODE",
        private.display()
    ))
}

/// Reads the file of a public key.
pub fn read_key(path: &Path) -> Result<PublicKey, files::FileError> {
    let content = files::read(path)?;
    PublicKey::from_line(&String::from_utf8_lossy(&content))
        .map_err(|error| files::FileError::Content(path.into(), error.to_string()))
}

/// Returns the authority whose seed has this ID.
pub fn authority(kms: &MasterSecret, id: &str) -> Result<Authority, Error> {
    let seed = kms.dek(&Dek::named(id), KEY_LEN).map_err(Error::failed)?;
    Authority::from_seed(&seed).map_err(Error::failed)
}

fn write_certificate(options: &Options, line: &str) -> Result<(), Error> {
    let (path, content) = (&options.certificate, format!("{line}\n"));
    let written = if options.overwrite {
        files::replace_private(path, content.as_bytes())
    } else {
        files::create_private(path, content.as_bytes())
    };
    written.map_err(|error| match error.kind() {
        Some(io::ErrorKind::AlreadyExists) => Error::blocked(format!(
            "{} exists: --overwrite replaces it, --certificate names another file",
            path.display()
        )),
        _ => Error::from(error),
    })
}

/// Adds the authority's line to the known-hosts file, and keeps the other lines. Returns whether
/// the line is new.
fn add_known_hosts(path: &Path, authority: &Authority) -> Result<bool, files::FileError> {
    let line = format!("@cert-authority * {}", authority.public_line());
    let before = match files::read(path) {
        Ok(content) => content,
        Err(error) if error.kind() == Some(io::ErrorKind::NotFound) => Default::default(),
        Err(error) => return Err(error),
    };
    if before
        .split(|byte| *byte == b'\n')
        .any(|there| there.trim_ascii() == line.as_bytes())
    {
        return Ok(false);
    }
    let separator = if before.is_empty() || before.ends_with(b"\n") {
        ""
    } else {
        "\n"
    };
    let mut file = files::append_private(path)?;
    let written = file
        .write_all(format!("{separator}{line}\n").as_bytes())
        .and_then(|()| file.sync_all());
    written
        .map_err(|error| files::FileError::Io("write", path.into(), error))
        .map(|()| true)
}
