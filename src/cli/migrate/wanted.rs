//! The options of the command line, and to what a cluster moves.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ValueEnum;
use kubernetes::constellation::node_version::NodeVersion;
use kubernetes::services::migration::Migration;

use super::facts::Facts;
use crate::shell::{error::Error, files, output::Output};
use crate::workspace::master_secret::SecretSource;

/// What is done: say what a move changes, move, or restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Task {
    Plan,
    Apply,
    Undo,
}

/// The options of the command line.
#[derive(Debug)]
pub struct Options {
    /// What is done.
    pub action: Task,
    /// To what the cluster moves.
    pub wanted: Wanted,
    /// The administrator's kubeconfigs; `$KUBECONFIG` may name several.
    pub kubeconfig: Vec<PathBuf>,
    /// The source of the master secret.
    pub master_secret: SecretSource,
    /// Nodes without a record that are control planes.
    pub control_planes: Vec<String>,
    /// Whether to do the last step, too.
    pub end: bool,
    /// Whether every node was started with the image, as the operator says.
    pub nodes_moved: bool,
    /// The form of the output.
    pub output: Output,
    /// The limit until the services are ready, and for the node operator to move one node.
    pub timeout: Duration,
}

/// To what a cluster moves. `None` is what the operator has not said.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    /// The policy of the new image.
    pub policy: Option<WantedPolicy>,
    /// The container image of the services.
    pub image: Option<String>,
    /// The image of the nodes, as the cloud names it.
    pub node_image: Option<String>,
    /// The last day on which disks without a record open.
    pub migration: Option<Migration>,
    /// The last day on which clients without a token get keys of volumes.
    pub old_clients: Option<Migration>,
    /// The keys that each client of the key service may get.
    pub grants: Option<String>,
}

/// A policy in a file.
#[derive(Debug, Clone)]
pub struct WantedPolicy {
    /// The file.
    pub path: PathBuf,
    /// Its content.
    pub text: String,
}

impl WantedPolicy {
    /// Reads the file.
    pub fn read(path: &Path) -> Result<WantedPolicy, Error> {
        let content = files::read(path)?;
        let text = str::from_utf8(&content)
            .map_err(|error| Error::content(format!("{}: {error}", path.display())))?;
        Ok(WantedPolicy {
            path: path.into(),
            text: text.into(),
        })
    }
}

impl Wanted {
    /// Returns which options a move of this cluster still needs, with the reasons.
    pub fn missing(&self, facts: &Facts) -> Vec<String> {
        let mut missing = Vec::new();
        let mut need = |is_given: bool, text: &str| {
            if !is_given {
                missing.push(text.to_owned());
            }
        };
        need(
            self.policy.is_some(),
            "--policy: the policy of the new image (firstlight measure IMAGE > policy.json)",
        );
        need(
            self.image.is_some(),
            "--image: the container image of the services",
        );
        let has_images = (facts.node_version.as_ref()).is_some_and(NodeVersion::names_an_image);
        need(
            self.node_image.is_some() || !has_images,
            "--node-image: the new image as the cloud names it, for NodeVersion",
        );
        need(
            self.migration.is_some(),
            "--migrate-until: a day by which every node runs the new image; a node of Constellation that restarts before has a disk \
             without a record",
        );
        missing
    }
}
