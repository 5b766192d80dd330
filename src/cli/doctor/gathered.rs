//! What the checks of `firstlight doctor` judge.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use base::time::seconds;
use verifier::{Policy, Variant};

use super::folder::Folder;
use crate::status::view::View;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// Everything that was gathered.
pub struct Gathered {
    /// The time of this machine.
    pub now: SystemTime,
    /// Why the API server could not be asked. Then the view is empty.
    pub unreachable: Option<String>,
    /// The cluster.
    pub view: View,
    /// The policy in the operator's file.
    pub policy: Policy,
    /// The file.
    pub policy_file: PathBuf,
    /// The attestation variant of the nodes.
    pub variant: &'static Variant,
    /// The operator's files.
    pub folder: Folder,
}

impl Gathered {
    /// Returns how long ago something was; nothing if it is in the future.
    pub fn age(&self, at: SystemTime) -> Duration {
        self.now.duration_since(at).unwrap_or_default()
    }

    /// Returns a day and its distance from today: `2027-01-31, in 66 days`.
    pub fn day(&self, at: SystemTime) -> String {
        let day = seconds(at);
        let day = day.get(..10).unwrap_or(&day);
        let days = |time: Duration| match time.as_secs() / DAY.as_secs() {
            1 => "1 day".to_owned(),
            days => format!("{days} days"),
        };
        match at.duration_since(self.now) {
            Ok(left) if left < DAY => format!("{day}, in less than a day"),
            Ok(left) => format!("{day}, in {}", days(left)),
            Err(past) if past.duration() < DAY => format!("{day}, less than a day ago"),
            Err(past) => format!("{day}, {} ago", days(past.duration())),
        }
    }
}
