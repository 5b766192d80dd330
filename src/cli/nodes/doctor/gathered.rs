//! What the checks of `firstlight doctor` judge.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use kubernetes::objects::Workload;
use kubernetes::services::command_line;
use verifier::{KeyName, Policy, Variant};

use super::folder::Folder;
use crate::cluster::{
    status::ends::day_from,
    status::view::{ListFailure, View},
};

/// Everything that was gathered.
pub struct Gathered {
    /// The time of this machine.
    pub now: SystemTime,
    /// Why the nodes could not be listed. Then the view has only what the kubeconfig says.
    pub unlisted: Option<(ListFailure, String)>,
    /// The cluster.
    pub view: View,
    /// The policy in the operator's file.
    pub policy: Policy,
    /// The attestation keys in the state file, which `apply` adds to that policy.
    pub known: Vec<KeyName>,
    /// The file.
    pub policy_file: PathBuf,
    /// The attestation variant of the nodes.
    pub variant: &'static Variant,
    /// The operator's files.
    pub folder: Folder,
}

impl Gathered {
    /// Returns the time since `at`; zero if `at` is in the future.
    pub fn age(&self, at: SystemTime) -> Duration {
        self.now.duration_since(at).unwrap_or_default()
    }

    /// Returns the command that installs the services again with these options, of the image that they have.
    pub fn apply(&self, options: &str) -> String {
        let of_firstlight = |set: &&Workload| command_line(set).contains(&"--log-format");
        let set = self.view.objects.service("join-service");
        let image = set.filter(of_firstlight).map_or("IMAGE", image_of);
        let file = self.policy_file.display();
        let command = format!("firstlight apply --policy {file} --image {image} {options}");
        command.trim_end().to_owned()
    }

    /// Returns the command that puts the operator's policy in force, with these options.
    pub fn apply_policy(&self, options: &str) -> String {
        self.apply_without("services", options)
    }

    /// Returns the command without these phases.
    pub fn apply_without(&self, phases: &str, options: &str) -> String {
        let file = self.policy_file.display();
        let command = format!("firstlight apply --policy {file} --skip-phases {phases} {options}");
        command.trim_end().to_owned()
    }

    /// Returns a day and its distance from today: `2027-01-31, in 66 days`.
    pub fn day(&self, at: SystemTime) -> String {
        day_from(at, self.now)
    }
}

/// Returns the container image of a DaemonSet.
pub fn image_of(set: &Workload) -> &str {
    set.container().map_or("", |container| &container.image)
}
