//! `firstlight components`: makes and checks lists of the programs that a node installs.

mod check;
mod list;
mod published;

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::output::say;
use base::program::Failure;
pub use check::check;
use kubernetes::parameters::Version;
use list::Entry;
pub use list::{DOWNLOADS, read};
use proto::components::Component;
pub use published::{REGISTRY, Servers};

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// What to do.
    pub action: Action,
    /// The limit for the whole command.
    pub timeout: Duration,
}

/// What the command does.
#[derive(Debug)]
pub enum Action {
    /// Prints the list for a version, from the files that its project publishes.
    Make {
        /// The version of Kubernetes.
        version: Version,
        /// Where the programs are published.
        servers: Servers,
    },
    /// Checks a list without a network.
    Check {
        /// The file with the list.
        list: PathBuf,
        /// The folder with the downloaded files of the list.
        files: Option<PathBuf>,
    },
}

/// Returns the list for a new node: from the operator's file, or without a file from the servers that publish Kubernetes.
pub fn of(
    version: &Version,
    file: Option<&Path>,
    limit: Duration,
) -> Result<Vec<Component>, Failure> {
    let Some(file) = file else {
        return published::list(version, &Servers::default(), limit).map_err(|failure| match failure {
            Failure::Failed(code, text) => Failure::Failed(
                code,
                format!("{text}; give a list with --components, as `firstlight components` makes it where that server is reached"),
            ),
            other => other,
        });
    };
    read(file).map_err(Failure::failed)
}

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Failure> {
    match &options.action {
        Action::Make { version, servers } => {
            let list = published::list(version, servers, options.timeout)?;
            let entries: Vec<Entry> = list.into_iter().map(Entry::from).collect();
            let json = serde_json::to_value(entries).map_err(Failure::failed)?;
            say(format_args!("{json:#}"))
        }
        Action::Check { list, files } => say(check(list, files.as_deref())?),
    }
}
