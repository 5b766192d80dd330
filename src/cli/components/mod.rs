//! `firstlight components`: makes and checks lists of the programs that a node installs.

mod check;
mod list;
mod published;

use std::path::PathBuf;
use std::time::Duration;

use super::output::say;
use base::program::Failure;
pub use check::check;
use kubernetes::parameters::Version;
use list::Entry;
pub use list::{DOWNLOADS, of};
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
