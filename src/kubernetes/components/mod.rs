//! Installs the programs and files that a node needs before kubeadm runs: kubelet, kubeadm, kubectl, CNI plugins, crictl, patches.
//!
//! A [`KubernetesComponent`] has a source, a SHA-256 and a place. [`install`] installs all of them, several at once, each as a whole or not
//! at all. A component that is in place with the expected hash is kept, and one that the image contains is copied from there; both
//! work without a network. `component` parses the list, `download` fetches, `archive` extracts possibly hostile archives, and
//! `place` moves files into place.
//!
//! ```text
//! Component::parse ─► in place with this hash? ──yes──► Present
//!                            │no
//!                            ├─ data: URL, file: URL, image ─┐
//!                            └─ http(s): retries, resumes ───┴─► hash ─► extract? ─► rename ─► Installed
//! ```

mod archive;
mod component;
mod digest;
mod download;
mod error;
mod place;
mod settings;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use base::stop::Stop;
use component::ComponentSource;
pub use component::{
    CONFIG_MAP_PREFIX, ComponentPolicy, DIRECTORIES, KubernetesComponent, config_map, list_hash,
    list_json, read_list, version_in,
};
pub use digest::Digest;
use digest::digest_of;
use download::Download;
pub use error::Error;
use place::Staging;
pub use settings::{InstallSettings, Step};

/// How often a stop is checked.
const TICK: Duration = Duration::from_millis(50);

/// Installs all `components`. Calls `report` on the calling thread with each step and the component's index. The first error ends
/// the installation and is returned. `stop` ends it as well, at once or after the present connection attempt (4 s at most).
pub fn install(
    components: &[KubernetesComponent],
    settings: &InstallSettings,
    stop: &Stop,
    report: &mut dyn FnMut(usize, Step),
) -> Result<(), Error> {
    let (client, has_roots) = download::client(settings);
    // Stops the threads, either by the caller's stop or after the first error.
    let end = Stop::new();
    let next = AtomicUsize::new(0);
    let (steps, arriving) = mpsc::channel();
    let work = |steps: mpsc::Sender<(usize, Result<Step, Error>)>| {
        while let Some((number, component)) = take(components, &next)
            && !end.is_stopped()
        {
            // Sending cannot fail: the receiver lives longer than the threads.
            let tell = |step: Result<Step, Error>| drop(steps.send((number, step)));
            let one = One {
                number,
                component,
                client: &client,
                has_roots,
                settings,
                stop: &end,
            };
            tell(one.install(&|step| tell(Ok(step))));
        }
    };
    thread::scope(|scope| {
        let mut outcome = Ok(());
        for number in 0..settings.at_once.clamp(1, components.len().max(1)) {
            let (steps, work) = (steps.clone(), &work);
            let thread = thread::Builder::new().name(format!("component-{number}"));
            if let Err(error) = thread.spawn_scoped(scope, move || work(steps)) {
                outcome = outcome.and(Err(Error::io(
                    "start a thread for",
                    Path::new("components"),
                    error,
                )));
                end.stop();
            }
        }
        drop(steps);
        loop {
            if outcome.is_ok() && stop.is_stopped() {
                outcome = Err(Error::Stopped);
            }
            if outcome.is_err() && !end.is_stopped() {
                end.stop();
                client.shutdown();
            }
            match arriving.recv_timeout(TICK) {
                Ok((number, Ok(step))) => report(number, step),
                Ok((_, Err(error))) => outcome = outcome.and(Err(error)),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return outcome,
            }
        }
    })
}

fn take<'a>(
    components: &'a [KubernetesComponent],
    next: &AtomicUsize,
) -> Option<(usize, &'a KubernetesComponent)> {
    let number = next.fetch_add(1, Ordering::Relaxed);
    Some((number, components.get(number)?))
}

/// The installation of one component.
struct One<'a> {
    number: usize,
    component: &'a KubernetesComponent,
    client: &'a http::Client,
    has_roots: bool,
    settings: &'a InstallSettings,
    stop: &'a Stop,
}

impl One<'_> {
    /// Installs the component and returns its last step.
    fn install(&self, report: &dyn Fn(Step)) -> Result<Step, Error> {
        let component = self.component;
        if component.is_present() {
            return Ok(Step::Present);
        }
        self.check_place()?;
        let staging = Staging::new(component.parent(), self.number)?;
        self.fetch(&staging.download(), report)?;
        if component.extract {
            let tree = staging.tree()?;
            let path = staging.download();
            let archive = File::open(&path).map_err(|error| Error::io("read", &path, error))?;
            let unpacked =
                archive::unpack(archive, &tree, self.stop).map_err(|error| match error {
                    archive::Error::Refused(why) => Error::Archive {
                        what: component.name(),
                        why,
                    },
                    archive::Error::Io(path, error) => Error::io("write", &path, error),
                    archive::Error::Stopped => Error::Stopped,
                })?;
            staging.publish_tree(&unpacked, &component.place, component.sha256.as_ref())?;
        } else {
            staging.publish_file(&component.place)?;
        }
        Ok(Step::Installed)
    }

    /// Checks that no link below the allowed directory leads out of it. The path to that directory may contain links.
    fn check_place(&self) -> Result<(), Error> {
        let parent = self.component.parent();
        fs::create_dir_all(&self.component.directory)
            .map_err(|error| Error::io("make", &self.component.directory, error))?;
        // Missing directories are created later, so only existing ones can be links.
        let there = parent
            .ancestors()
            .find(|path| path.symlink_metadata().is_ok())
            .unwrap_or(parent);
        let real = |path: &Path| {
            path.canonicalize()
                .map_err(|error| Error::io("follow", path, error))
        };
        let allowed = real(&self.component.directory)?;
        if real(there)?.starts_with(&allowed) {
            Ok(())
        } else {
            Err(Error::Refused {
                what: self.component.name(),
                why: format!(
                    "a link in its install path {} leads out of {}",
                    parent.display(),
                    allowed.display()
                ),
            })
        }
    }

    /// Writes the component's bytes to a new file at `path`, and checks their hash.
    fn fetch(&self, path: &Path, report: &dyn Fn(Step)) -> Result<(), Error> {
        let expected = self.component.sha256.as_ref();
        match &self.component.source {
            ComponentSource::Data(bytes) => {
                fs::write(path, bytes).map_err(|error| Error::io("write", path, error))?;
                self.check(digest_of(bytes))
            }
            ComponentSource::File(file) => self.check(copy(file, path, self.settings.max_len)?),
            ComponentSource::Web(url) => {
                if let Some(file) = self.in_image(url) {
                    return self.check(copy(&file, path, self.settings.max_len)?);
                }
                if download::is_tls(url) && !self.has_roots {
                    return Err(Error::NoRoots(self.settings.ca_bundles.clone()));
                }
                let (settings, stop) = (self.settings, self.stop);
                Download {
                    client: self.client,
                    url,
                    expected,
                    settings,
                    stop,
                    report,
                }
                .to(path)
            }
        }
    }

    fn check(&self, got: Digest) -> Result<(), Error> {
        match self.component.sha256 {
            Some(expected) if expected != got => Err(Error::Hash {
                what: self.component.name(),
                expected,
                got,
            }),
            _ => Ok(()),
        }
    }

    /// Returns the image's copy of this URL's file, if it has the right hash.
    fn in_image(&self, url: &str) -> Option<PathBuf> {
        let name = url.split(['?', '#']).next()?.rsplit('/').next()?;
        let file = self.settings.image.as_ref()?.join(name);
        place::is_file(&file, self.component.sha256.as_ref()?).then_some(file)
    }
}

/// Copies a local file, and returns the hash of the copied bytes.
fn copy(from: &Path, to: &Path, limit: u64) -> Result<Digest, Error> {
    let open = |path: &Path| File::open(path).map_err(|error| Error::io("read", path, error));
    let source = open(from)?;
    let mut target = File::create_new(to).map_err(|error| Error::io("make", to, error))?;
    let len = io::copy(&mut source.take(limit.saturating_add(1)), &mut target)
        .map_err(|error| Error::io("write", to, error))?;
    if len > limit {
        Err(Error::TooLong {
            what: from.display().to_string(),
            limit,
        })
    } else {
        place::digest(to).map_err(|error| Error::io("read", to, error))
    }
}
