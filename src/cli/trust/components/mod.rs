//! `firstlight components`: makes and checks lists of the programs that a node installs.

mod check;
mod list;
mod published;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::shell::{error::Error, output::say, progress::Progress};
use crate::workspace::options::time;
use base::text::quoted;
use check::check_entries;
pub use check::{ListExceptions, check};
use clap::Args;
use kubernetes::parameters::KubernetesVersion;
use list::ListedComponent;
pub use list::{DOWNLOADS, read};
use proto::components::Component;
pub use published::{REGISTRY, Servers};

/// List the programs of a version of Kubernetes, with their hashes, for the nodes
///
/// Prints the list that `firstlight init --components` takes (JSON). The hashes of kubelet, kubeadm and kubectl, and
/// the digests of the control plane's images, are those that Kubernetes publishes now. Read the list, and keep it:
/// nodes install nothing with another hash.
///
/// With --check it checks a list without a network, as init and a node will: each entry has a hash and a permitted
/// place. With --files it also compares downloaded files with their hashes.
#[derive(Debug, Args)]
#[command(mut_arg("accept_components", |it| it.requires("check")), after_help = "Examples:
  firstlight components v1.36 > components.json
  firstlight components v1.34.4 --etcd 3.6.4-0 > components.json
  firstlight components --check components.json --files ./downloads")]
pub(crate) struct CommandLine {
    /// The version of Kubernetes, as v1.36.4; v1.36 is its newest patch
    #[arg(required_unless_present = "check")]
    version: Option<String>,
    /// The tag of etcd's image, as 3.6.4-0, whose digest is pinned then; `kubeadm config images list` names it
    #[arg(long, value_name = "TAG")]
    etcd: Option<String>,
    /// The server of Kubernetes' programs, or a mirror of it, from which the nodes download them too
    #[arg(long, value_name = "URL", default_value = DOWNLOADS)]
    downloads: String,
    /// The registry of Kubernetes' images, which is asked for their digests
    #[arg(long, value_name = "URL", default_value = REGISTRY)]
    registry: String,
    /// The authorities of these servers' certificates (PEM); without it, those of this machine
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Check this list, and make none
    #[arg(long, value_name = "FILE", conflicts_with = "version")]
    check: Option<PathBuf>,
    /// With --check: a folder with downloaded files of the list
    #[arg(long, value_name = "FILE", requires = "check")]
    files: Option<PathBuf>,
    #[command(flatten)]
    exceptions: ListExceptions,
    /// The limit for the whole command, as 90s, 10m or 1h
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "2m")]
    timeout: Duration,
}

impl CommandLine {
    /// Returns the options that the command line gives.
    pub fn options(self) -> Result<Options, Error> {
        let servers = Servers {
            downloads: self.downloads,
            registry: self.registry,
            etcd: self.etcd,
            authorities: self.ca,
        };
        let action = match (self.check, self.version) {
            (Some(list), _) => ComponentsAction::Check {
                list,
                files: self.files,
                exceptions: self.exceptions,
            },
            (None, named) => ComponentsAction::Make {
                version: version(&named.unwrap_or_default(), None, &servers, self.timeout)?,
                servers,
            },
        };
        Ok(Options {
            action,
            timeout: self.timeout,
        })
    }
}

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// What to do.
    pub action: ComponentsAction,
    /// The limit for the whole command.
    pub timeout: Duration,
}

/// What the command does.
#[derive(Debug)]
pub enum ComponentsAction {
    /// Prints the list for a version, from the files that its project publishes.
    Make {
        /// The version of Kubernetes.
        version: KubernetesVersion,
        /// Where the programs are published.
        servers: Servers,
    },
    /// Checks a list without a network.
    Check {
        /// The file with the list.
        list: PathBuf,
        /// The folder with the downloaded files of the list.
        files: Option<PathBuf>,
        /// The faults that the list may have.
        exceptions: ListExceptions,
    },
}

/// Returns the version of Kubernetes that an operator names, with or without `v`. `v1.36` stands for its newest patch: that of the list
/// of components in the file, or without a file the newest one that Kubernetes has published.
pub fn version(
    text: &str,
    list: Option<&Path>,
    servers: &Servers,
    limit: Duration,
) -> Result<KubernetesVersion, Error> {
    let parsed = |text: &str| {
        text.parse::<KubernetesVersion>()
            .map_err(|error| Error::Usage(error.to_string()))
    };
    let with_v = format!("v{text}");
    let text = if text.starts_with("1.") {
        &with_v
    } else {
        text
    };
    if text.matches('.').count() != 1 {
        return parsed(text);
    }
    parsed(&format!("{text}.0"))?;
    let (newest, source) = match list {
        Some(file) => (
            kubernetes::components::version_in(&read(file)?)
                .unwrap_or_default()
                .to_owned(),
            file.display().to_string(),
        ),
        None => published::newest(text, servers, limit)?,
    };
    if newest
        .strip_prefix(text)
        .is_some_and(|it| it.starts_with('.'))
    {
        Progress::on_stderr().line(format!("{text}: the newest patch is {newest}"));
        parsed(&newest)
    } else {
        Err(Error::content(format!(
            "{source}: expected a patch of {text}, got {}",
            quoted(newest, 40)
        )))
    }
}

/// Returns the list for a new node: from the operator's file, or without a file from the servers that publish Kubernetes. Fails if a
/// node would refuse it.
pub fn of(
    version: &KubernetesVersion,
    file: Option<&Path>,
    exceptions: &ListExceptions,
    limit: Duration,
) -> Result<Vec<Component>, Error> {
    let Some(file) = file else {
        let hint = |text: String| {
            format!(
                "{text}; make a list with `firstlight components` on a machine that reaches that server, and give it with --components"
            )
        };
        let list = published::list(version, &Servers::default(), limit);
        return list.map_err(|error| match error {
            Error::Unreachable(text) => Error::Unreachable(hint(text)),
            Error::Failed(text) => Error::Failed(hint(text)),
            other => other,
        });
    };
    let entries = read(file)?;
    check_entries(&file.display(), &entries, exceptions)?;
    Ok(entries)
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    match &options.action {
        ComponentsAction::Make { version, servers } => {
            let list = published::list(version, servers, options.timeout)?;
            let entries: Vec<ListedComponent> =
                list.into_iter().map(ListedComponent::from).collect();
            let json = serde_json::to_value(entries).map_err(Error::failed)?;
            say(format_args!("{json:#}"))
        }
        ComponentsAction::Check {
            list,
            files,
            exceptions,
        } => say(check(list, files.as_deref(), exceptions)?),
    }
}
