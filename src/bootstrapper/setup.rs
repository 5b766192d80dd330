//! What init and join have in common after the node lock: the disk's commit, the components, kubeadm, and what they are told
//! of this machine.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use std::{env, fmt};

use super::command;
use super::job::Job;
use attest::attestation::Issuer;
use base::crypto::Secret;
use base::stop::Stop;
use base::timeline::Timeline;
use cloud::{Instance, Metadata};
use disk::state_disk::{self, Handover, NewDisk, NodeState, mark_begun, mark_complete};
use kubernetes::components::{self, Component, Settings, Step};
use kubernetes::kubelet_certificate::KubeletCertificate;
use kubernetes::parameters::{Invalid, NodeName};
use kubernetes::{client, kubeadm, kubelet_certificate};
use sys::file;

/// Where components put programs; before the image's own.
pub const PROGRAMS: &str = "/run/state/bin";
const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// A progress line about a download at most so often.
const TELL_EVERY: u64 = 16 << 20;

/// What a set-up needs of the node.
pub struct Node {
    /// Who it is.
    pub metadata: Arc<Metadata>,
    /// Where the state disk is mounted.
    pub root: PathBuf,
    /// Which disk, and the passphrase of this boot.
    pub disk: Handover,
    /// Proves what this machine runs.
    pub issuer: Arc<dyn Issuer>,
    /// What components may ask for.
    pub policy: components::Policy,
    /// How they are fetched.
    pub settings: components::Settings,
    /// Tells the console.
    pub timeline: Timeline,
}

impl Node {
    /// The commit: marks the set-up as begun, gives the disk the key that `key_of` derives for its UUID, which is returned, and
    /// ties it to the cluster of this measurement secret.
    pub fn commit_disk(
        &self,
        state: &NodeState,
        measurement_secret: &Secret,
        key_of: impl FnOnce(&str) -> Result<Secret, String>,
    ) -> Result<String, String> {
        let failed = |error: state_disk::Error| format!("setting up the state disk: {error}");
        let disk = NewDisk::open(&self.disk)
            .map_err(|error| format!("opening the state disk: {error}"))?;
        let uuid = disk.uuid();
        let key = key_of(&uuid)?;
        mark_begun(&self.root)
            .map_err(state_disk::Error::NodeState)
            .map_err(failed)?;
        disk.commit(&self.root, state, &key, measurement_secret)
            .map_err(failed)?;
        self.timeline
            .event("committed", "the state disk has its permanent key");
        Ok(uuid)
    }

    /// The set-up has ended well: from here on the node comes back by itself.
    pub fn complete(&self) -> Result<(), String> {
        mark_complete(&self.root).map_err(|error| format!("finishing: {error}"))?;
        self.timeline
            .event("complete", "this node comes back by itself after a reboot");
        Ok(())
    }
}

/// Which step failed, and why.
#[derive(Debug)]
pub enum Error {
    /// A component was not installed.
    Components(components::Error),
    /// A program failed.
    Command(command::Error),
    /// The kubelet ends again and again; its last words.
    Kubelet(Vec<String>),
    /// The kubelet's certificate.
    Certificate(kubelet_certificate::Error),
    /// The cluster's API.
    Api(client::Error),
    /// A file of the set-up.
    Io(PathBuf, io::Error),
    /// This machine is told to stop.
    Stopped,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Components(error) => write!(f, "installing the components: {error}"),
            Error::Command(error) => error.fmt(f),
            Error::Kubelet(words) => {
                write!(
                    f,
                    "the kubelet ends again and again; its last words:\n{}",
                    words.join("\n")
                )
            }
            Error::Certificate(error) => error.fmt(f),
            Error::Api(error) => write!(f, "after kubeadm init: {error}"),
            Error::Io(path, error) => write!(f, "{}: {error}", path.display()),
            Error::Stopped => f.write_str("this node was told to stop in the middle of its set-up"),
        }
    }
}

impl std::error::Error for Error {}

impl From<client::Error> for Error {
    fn from(error: client::Error) -> Error {
        Error::Api(error)
    }
}

/// Why this machine cannot be a node of a cluster as it is; a sentence.
#[derive(Debug)]
pub enum Refused {
    /// A value of the request or the metadata service.
    Value(Invalid),
    /// A component.
    Component(components::Error),
    /// The metadata service knows no address of this machine.
    NoAddress(String),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::Value(error) => error.fmt(f),
            Refused::Component(error) => error.fmt(f),
            Refused::NoAddress(name) => {
                write!(
                    f,
                    "the metadata service knows no address of this machine ({name}) in the cluster's network yet"
                )
            }
        }
    }
}

impl From<Invalid> for Refused {
    fn from(error: Invalid) -> Refused {
        Refused::Value(error)
    }
}

/// This machine as kubeadm is told of it.
pub fn kubernetes_node(me: &Instance) -> Result<kubeadm::Node, Refused> {
    Ok(kubeadm::Node {
        name: NodeName::from_machine(&me.name)?,
        ip: me
            .vpc_ip
            .ok_or_else(|| Refused::NoAddress(me.name.clone()))?,
        provider_id: me.provider_id.clone(),
        external_cloud_provider: false,
    })
}

/// Installs them, and tells of each.
pub fn install_components<T: Clone>(
    components: &[Component],
    settings: &Settings,
    stop: &Stop,
    job: &Job<T>,
) -> Result<(), Error> {
    let mut told = vec![0; components.len()];
    let mut tell = |number: usize, step| {
        let name = components[number].name();
        match step {
            Step::Present => job.line(&format!("{name}: in place already")),
            Step::Installed => job.line(&format!("{name}: installed")),
            Step::Retrying { why, pause } => {
                job.line(&format!(
                    "{name}: {why}; trying again in {} s",
                    pause.as_secs().max(1)
                ));
            }
            Step::Received { bytes, total } if bytes - told[number] >= TELL_EVERY => {
                told[number] = bytes;
                let of = total
                    .map(|total| format!(" of {}", total >> 20))
                    .unwrap_or_default();
                job.line(&format!("{name}: {}{of} MiB", bytes >> 20));
            }
            Step::Received { .. } => {}
        }
    };
    components::install(components, settings, stop, &mut tell).map_err(Error::Components)
}

/// kubeadm with a configuration of ours, which may be secret.
pub struct Kubeadm(pub &'static str);

impl Kubeadm {
    /// Writes the configuration, and what kubeadm wants to be there.
    pub fn configure(&self, configuration: &str) -> Result<(), Error> {
        write(
            Path::new(kubeadm::AUDIT_POLICY_PATH),
            0o644,
            kubeadm::AUDIT_POLICY.as_bytes(),
        )?;
        make_directory(Path::new(kubeadm::PATCHES))?;
        write(Path::new(self.0), 0o600, configuration.as_bytes())
    }

    /// Runs `kubeadm` with these words and the configuration, and tells what it says.
    pub fn run<T: Clone>(
        &self,
        words: &[&str],
        options: &[&str],
        limit: Duration,
        stop: &Stop,
        job: &Job<T>,
    ) -> Result<(), Error> {
        run(self.command(words).args(options), limit, stop, job)
    }

    /// `kubeadm` with these words and the configuration.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = program("kubeadm");
        command.args(words).args(["--config", self.0]);
        command
    }
}

/// Runs a command, and tells what it says.
pub fn run<T: Clone>(
    command: &mut Command,
    limit: Duration,
    stop: &Stop,
    job: &Job<T>,
) -> Result<(), Error> {
    command::run(command, limit, stop, &mut |line| job.line(line)).map_err(Error::Command)
}

/// A program; found, as what it starts itself, among the components first.
pub fn program(name: &str) -> Command {
    let path = env::var("PATH").unwrap_or_else(|_| SYSTEM_PATH.into());
    let mut command = Command::new(name);
    command
        .env("PATH", format!("{PROGRAMS}:{path}"))
        .current_dir("/");
    command
}

/// Writes the kubelet's first serving certificate wherever a kubelet may be told to look for it.
pub fn write_certificate(certificate: &KubeletCertificate) -> Result<(), Error> {
    for (path, key) in kubeadm::KUBELET_CERTIFICATES {
        certificate
            .write(Path::new(path), Path::new(key))
            .map_err(Error::Certificate)?;
    }
    Ok(())
}

fn make_directory(path: &Path) -> Result<(), Error> {
    let made = fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(path);
    made.map_err(|error| Error::Io(path.into(), error))
}

/// Writes a file whole, with its directories.
pub fn write(path: &Path, mode: u32, content: &[u8]) -> Result<(), Error> {
    make_directory(path.parent().unwrap_or(Path::new("/")))?;
    file::replace(path, content, mode).map_err(|error| Error::Io(path.into(), error))
}
