//! Keeps a new version of the image, or goes back to the old one.
//!
//! systemd-boot counts the tries of a new version in the name of its file, and takes the old version when none is left. A version is
//! kept when the machine has been a member of its cluster, with a healthy kubelet, for some time without a break. Otherwise the machine
//! restarts. A host can rename the file itself, and so keep a bad version or end a good one: it could as well switch the machine off,
//! and each version that boots is measured.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use image::slots::Slots;

use super::error::Error;
use super::place::{ImageDisk, open};
use crate::members::upgrade;
use base::boot::timeline::Timeline;
use base::stop::Stop;

/// How often the machine is looked at.
const PAUSE: Duration = Duration::from_secs(5);
/// The kubelet of a node of Kubernetes has this file.
const KUBELET_CONFIG: &str = "etc/kubernetes/kubelet.conf";
/// An event of the record of the boot: `bootstrapper` has made the machine a member, and serves it.
const MEMBER: &str = " member: ";

/// The rules of a trial.
pub struct Trial<'a> {
    /// The folder of all files: `/`.
    pub files: &'a Path,
    /// The record of this boot.
    pub record: &'a Path,
    /// How long the machine must be healthy.
    pub healthy: Duration,
    /// How long it may take until then.
    pub limit: Duration,
}

/// How a trial ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrialEnd {
    /// The running version is not on trial.
    None,
    /// The version is kept.
    Kept,
    /// The machine is not healthy, and has to restart.
    Refused,
    /// The program was stopped.
    Stopped,
}

impl Trial<'_> {
    /// Watches the machine until the end of the trial.
    pub fn run(&self, stop: &Stop, timeline: &Timeline) -> Result<TrialEnd, Error> {
        let place = ImageDisk::find(self.files)?;
        self.run_at(&place, stop, timeline, &|| self.is_healthy())
    }

    pub(super) fn run_at(
        &self,
        place: &ImageDisk,
        stop: &Stop,
        timeline: &Timeline,
        is_healthy: &dyn Fn() -> bool,
    ) -> Result<TrialEnd, Error> {
        let version = place.running.version.to_string();
        let mut esp = open(&place.esp.0)?;
        let tries = Slots::read(&mut esp, place.esp.1)?
            .of(&version)
            .and_then(|slot| slot.tries);
        let Some(tries) = tries else {
            return Ok(TrialEnd::None);
        };
        timeline.event(
            "trial",
            format_args!(
                "version {version} must be healthy for {} s within {} s, tries left after this one: {tries}",
                self.healthy.as_secs(),
                self.limit.as_secs()
            ),
        );
        let begun = Instant::now();
        let mut healthy_since = None;
        loop {
            healthy_since = if is_healthy() {
                healthy_since.or_else(|| Some(Instant::now()))
            } else {
                None
            };
            if healthy_since.is_some_and(|since| since.elapsed() >= self.healthy) {
                break;
            }
            if begun.elapsed() >= self.limit {
                timeline.event("trial", "not healthy in time: the machine restarts");
                return Ok(TrialEnd::Refused);
            }
            if stop.wait(PAUSE.min(self.healthy)) {
                return Ok(TrialEnd::Stopped);
            }
        }
        Slots::read(&mut esp, place.esp.1)?.bless(&mut esp, &version)?;
        timeline.event("trial", format_args!("version {version} is kept"));
        Ok(TrialEnd::Kept)
    }

    fn is_healthy(&self) -> bool {
        let record = fs::read_to_string(self.record).unwrap_or_default();
        let is_member = record.lines().any(|line| line.contains(MEMBER));
        let has_kubelet = self.files.join(KUBELET_CONFIG).exists();
        is_member && (!has_kubelet || upgrade::is_healthy().unwrap_or_default())
    }
}
