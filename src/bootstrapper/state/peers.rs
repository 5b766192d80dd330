//! Keeps the addresses of the cluster's join services in the header of a member's state disk
//! current. The next boot asks these addresses for the disk's key.
//!
//! This process lives as long as the member: it answers `firstlight status`. So this work needs
//! only a thread of it, and no timer that starts a program that opens the disk. It asks the
//! metadata service when it starts (at init, at join and at each boot), and then once an hour. It
//! writes only what has changed, so the header is written at most once an hour.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crate::state::{header_lock::HeaderLock, state_disk};
use base::boot::timeline::Timeline;
use base::machines::{Cloud, Role};
use base::stop::Stop;
use cloud_api::CloudMetadata;
use disk::luks::Peers;
use disk::state_disk::device;
use node::ending::Ending;

/// The pause after a successful answer. It also limits how often the header is written.
const EVERY: Duration = Duration::from_secs(3600);
/// The pause after an answer of the metadata service without an address.
const AGAIN: Duration = Duration::from_secs(300);
/// The number of separate requests to the metadata service.
const PARTS: usize = 2;

/// The answer of a metadata service about join services.
pub struct KnownJoinServices {
    /// Their addresses.
    pub peers: Peers,
    /// The errors of the requests that failed.
    pub errors: Vec<base::machines::Error>,
}

/// Asks the metadata service for the addresses of the join services. If a request fails, its part
/// keeps its old value.
pub fn known(metadata: &dyn CloudMetadata, before: Peers) -> KnownJoinServices {
    let (mut peers, mut errors) = (before, vec![]);
    match metadata.load_balancer_endpoint() {
        Ok(host) => peers.load_balancer = Some(host),
        Err(error) => errors.push(error),
    }
    match metadata.peers() {
        Ok(all) => {
            let planes = all.iter().filter(|one| one.role == Role::ControlPlane);
            let planes: Vec<_> = planes.filter_map(|one| one.vpc_ip).collect();
            // every cluster has a control plane, so an empty list is wrong
            if !planes.is_empty() {
                peers.control_planes = planes;
            }
        }
        Err(error) => errors.push(error),
    }
    KnownJoinServices { peers, errors }
}

/// The inputs of the thread.
pub struct Keeper {
    /// The metadata service.
    pub metadata: Arc<dyn CloudMetadata>,
    /// The state disk; `None` finds it by its serial number.
    pub disk: Option<PathBuf>,
    /// The cloud of this machine.
    pub cloud: Cloud,
    /// Ends the thread.
    pub stop: Stop,
    /// Prints events on the console.
    pub timeline: Timeline,
}

impl Keeper {
    /// Starts the thread. A member works without it, so an error is only logged. If the program
    /// ends during a write, the disk has the old header or the new one.
    pub fn start(self) -> Option<Ending> {
        let thread = Ending::start("peers", move || self.run());
        thread
            .inspect_err(|error| {
                log::warn!(
                    "cannot start the thread that saves the join services' addresses: {error}"
                )
            })
            .ok()
    }

    fn run(self) {
        let disk = self.disk.as_deref();
        let found = device::find(disk, self.cloud, &self.stop, &self.timeline);
        let disk = match found {
            Ok(disk) => disk,
            Err(error) => {
                return log::warn!("cannot update the join services' addresses on disk: {error}");
            }
        };
        let mut pause = Duration::ZERO;
        while !self.stop.wait(pause) {
            pause = self.renew(&disk).unwrap_or_else(|error| {
                log::warn!("cannot update the join services' addresses on disk: {error}");
                EVERY
            });
        }
    }

    /// Asks the metadata service, writes the header if the addresses have changed, and returns the
    /// pause before the next request.
    fn renew(&self, disk: &Path) -> Result<Duration, Box<dyn std::error::Error>> {
        let before = state_disk::peers(disk)?;
        let known = known(&*self.metadata, before);
        for error in &known.errors {
            log::info!("cannot get all join services' addresses: {error}");
        }
        // on AWS and Google Cloud a worker may lack the permission to list the control planes
        if self.stop.is_stopped() || known.errors.len() == PARTS {
            return Ok(AGAIN);
        }
        let lock = HeaderLock::take(disk)?;
        let is_changed = state_disk::set_peers(disk, &known.peers);
        drop(lock);
        if is_changed? {
            let count = known.peers.control_planes.len();
            let balancer = known.peers.load_balancer.as_deref();
            let balancer = balancer.map_or(String::new(), |host| format!(" and {host}"));
            self.timeline.event(
                "peers",
                format_args!("the disk's header names {count} control planes{balancer}"),
            );
        }
        Ok(EVERY)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::Mutex;

    use base::crypto::{KEY_LEN, Secret};
    use base::machines::{Error, Instance};
    use disk::luks::{self, MIN_DEVICE_SIZE, VOLUME_KEY_LEN};

    use super::*;

    /// A service that answers what a test sets; `None` is an error.
    #[derive(Default)]
    struct Answers {
        load_balancer: Mutex<Option<&'static str>>,
        planes: Mutex<Option<Vec<u8>>>,
    }

    fn away() -> Error {
        Error::Refused("no answer".into())
    }

    impl CloudMetadata for Answers {
        fn own_instance(&self) -> Result<Instance, Error> {
            unreachable!("nobody asks")
        }
        fn peers(&self) -> Result<Vec<Instance>, Error> {
            let planes = self.planes.lock().unwrap().clone().ok_or_else(away)?;
            let machine = |(number, role): (u8, Role)| Instance {
                name: format!("machine-{number}"),
                provider_id: String::new(),
                role,
                vpc_ip: Some([10, 0, 0, number].into()),
            };
            let planes = planes
                .into_iter()
                .map(|number| (number, Role::ControlPlane));
            Ok(planes.chain([(99, Role::Worker)]).map(machine).collect())
        }
        fn load_balancer_endpoint(&self) -> Result<String, Error> {
            (*self.load_balancer.lock().unwrap())
                .map(str::to_owned)
                .ok_or_else(away)
        }
    }

    fn peers(load_balancer: Option<&str>, planes: &[u8]) -> Peers {
        Peers {
            load_balancer: load_balancer.map(str::to_owned),
            control_planes: planes.iter().map(|n| [10, 0, 0, *n].into()).collect(),
        }
    }

    #[test]
    fn the_header_follows_what_the_metadata_service_says() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let mut options = File::options();
        let options = options.read(true).write(true).create_new(true);
        let mut disk = options.open(&path).unwrap();
        disk.set_len(MIN_DEVICE_SIZE).unwrap();
        let (volume_key, key) = (Secret::random(VOLUME_KEY_LEN), Secret::random(KEY_LEN));
        luks::format(&mut disk, &volume_key, &key).unwrap();
        let answers = Arc::new(Answers::default());
        let keeper = Keeper {
            metadata: answers.clone(),
            disk: Some(path.clone()),
            cloud: Cloud::Qemu,
            stop: Stop::new(),
            timeline: Timeline::new("test"),
        };
        let mut sequence = || match luks::probe(&mut disk).unwrap() {
            luks::Probe::Luks(header) => header.sequence_id(),
            other => panic!("{other:?}"),
        };
        let set = |load_balancer, planes: Option<&[u8]>| {
            *answers.load_balancer.lock().unwrap() = load_balancer;
            *answers.planes.lock().unwrap() = planes.map(<[u8]>::to_vec);
        };
        let formatted = sequence();
        // each answer, the pause after it, the header after it, and how often the header has been
        // written so far
        for (load_balancer, planes, pause, expected, writes) in [
            (None, None, AGAIN, peers(None, &[]), 0),
            (None, Some(&[2, 1][..]), EVERY, peers(None, &[1, 2]), 1),
            (None, Some(&[1, 2]), EVERY, peers(None, &[1, 2]), 1),
            (
                Some("a"),
                Some(&[1, 2]),
                EVERY,
                peers(Some("a"), &[1, 2]),
                2,
            ),
            (
                Some("a"),
                Some(&[2, 1]),
                EVERY,
                peers(Some("a"), &[1, 2]),
                2,
            ),
            // a part whose request fails keeps its value
            (Some("b"), None, EVERY, peers(Some("b"), &[1, 2]), 3),
            (None, None, AGAIN, peers(Some("b"), &[1, 2]), 3),
            (
                Some("b"),
                Some(&[][..]),
                EVERY,
                peers(Some("b"), &[1, 2]),
                3,
            ),
        ] {
            set(load_balancer, planes);
            assert_eq!(
                keeper.renew(&path).unwrap(),
                pause,
                "{load_balancer:?} {planes:?}"
            );
            assert_eq!(state_disk::peers(&path).unwrap(), expected);
            assert_eq!(sequence(), formatted + writes);
        }
    }
}
