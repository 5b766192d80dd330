//! What the cluster needs when a machine goes away for a time: its pods move before, and come back after. Without an API server that
//! answers, nobody can move them, and the machine goes all the same: its restart may be the repair.

use std::time::{Duration, Instant};

use kubernetes::client::{Client, NODES};
use kubernetes::objects::NodeObject;

use crate::nodes::{
    drain::{self, DrainOptions, Drained, Permitted, Pods},
    lock::Lock,
    rollout::decide::{ClusterFacts, Seen, downtime, keeps_majority},
    rollout::view,
};
use crate::shell::{
    consent,
    error::Error,
    interrupt,
    output::Output,
    progress::{Progress, human},
};
use crate::workspace::kubeconfig::{self, ANSWER, KubeconfigOption};

/// The pause between two looks at a node.
const PAUSE: Duration = Duration::from_secs(2);

/// The cluster of machines that go away.
pub struct Absence<'a> {
    client: Client,
    output: &'a Output,
    permitted: Permitted,
    drain_limit: Duration,
    /// How long a machine may take to come back.
    limit: Duration,
    is_agreed: bool,
    /// Shows that no other command takes nodes away.
    _lock: Lock,
}

/// A node whose pods were moved away.
pub struct Moved {
    name: String,
    boot: String,
    /// Whether somebody else keeps pods away from it.
    was_cordoned: bool,
}

impl Moved {
    /// Returns a sentence for a node that does not come back by itself.
    pub fn stays_cordoned(&self) -> String {
        let name = &self.name;
        format!("{name}: takes no pods until kubectl uncordon {name}")
    }
}

impl<'a> Absence<'a> {
    /// Connects to the API server. `None` if none answers, of which the output tells. `limit` is how long a machine may
    /// take to come back.
    pub fn of(
        kubeconfig: &KubeconfigOption,
        drain: &DrainOptions,
        limit: Duration,
        is_agreed: bool,
        output: &'a Output,
    ) -> Result<Option<Absence<'a>>, Error> {
        let paths = kubeconfig.paths();
        let progress = Progress::on_stderr();
        let client = match kubeconfig::reach(&paths, &progress) {
            Ok(client) => client,
            Err(Error::Unreachable(why)) => {
                drop(progress);
                output.say(format_args!("pods stay where they are: {why}"))?;
                return Ok(None);
            }
            Err(error) => {
                return Err(error.with_text(|text| {
                    format!("pods cannot be moved away: {text}. With --skip-drain the machine stops without that")
                }));
            }
        };
        Ok(Some(Absence {
            _lock: Lock::take(&client, "node", &progress)?,
            client,
            output,
            permitted: drain.permitted,
            drain_limit: drain.drain_timeout,
            limit,
            is_agreed,
        }))
    }

    /// Moves the pods of a node away. `None` if they stay.
    pub fn before(&self, name: &str) -> Result<Option<Moved>, Error> {
        let progress = Progress::on_stderr();
        progress.phase("reading the nodes of the cluster");
        let cluster = view::read(&self.client)?;
        drop(progress);
        let Some(seen) = cluster.nodes.iter().find(|it| it.name == name) else {
            self.output.say(format_args!(
                "{name}: the cluster has no node of this name, so no pods are moved"
            ))?;
            return Ok(None);
        };
        self.check_control_plane(&cluster, seen)?;
        let mut others = cluster.nodes.iter().filter(|it| it.name != name);
        if !others.any(|it| it.is_ready && !it.is_cordoned) {
            self.output.say(format_args!(
                "{name}: no other node takes its pods, so they stop with it"
            ))?;
            return Ok(None);
        }
        Pods::of(&self.client, name, self.permitted)?.check(name)?;
        let progress = Progress::on_stderr();
        progress.phase(format!("moving the pods of {name} away"));
        interrupt::means(
            "the node stays cordoned (kubectl uncordon), and its machine may have stopped; pods may have been evicted",
        );
        drain::cordon(&self.client, name)?;
        let (permitted, limit) = (self.permitted, self.drain_limit);
        let drained = drain::drain(&self.client, name, permitted, limit, &progress)?;
        drop(progress);
        self.output.say(match drained {
            Drained::Empty => format!("{name}: its pods are moved away"),
            Drained::Silent => {
                format!("{name}: its kubelet is silent, so nobody knows about its pods")
            }
        })?;
        Ok(Some(Moved {
            name: name.into(),
            boot: seen.boot.clone(),
            was_cordoned: seen.is_cordoned,
        }))
    }

    /// Asks before the cluster loses its API server.
    fn check_control_plane(&self, cluster: &ClusterFacts, seen: &Seen) -> Result<(), Error> {
        if !seen.is_control_plane && !seen.is_labelled {
            return Ok(());
        }
        let name = &seen.name;
        let is_other = |it: &&Seen| it.name != *name && (it.is_control_plane || it.is_labelled);
        let mut others = cluster.nodes.iter().filter(is_other);
        if let Some(other) = others.find(|it| !it.is_ready) {
            return Err(Error::Refused(format!(
                "the control plane {} is not Ready: repair it before {name} stops, or etcd may lose its majority. --skip-drain looks at \
                 neither pods nor etcd",
                other.name
            )));
        }
        if keeps_majority(cluster.members) {
            return Ok(());
        }
        let downtime = downtime(cluster.members);
        self.output.say(format_args!("{name}: {downtime}"))?;
        if self.is_agreed {
            Ok(())
        } else {
            consent::ask(&format!("Stop {name} all the same?"), "firstlight status")
        }
    }

    /// Waits until a node is back from its restart, and lets pods come to it.
    pub fn after(&self, moved: &Moved) -> Result<(), Error> {
        let (name, end) = (&moved.name, Instant::now() + self.limit);
        let progress = Progress::on_stderr();
        progress.phase(format!("waiting until {name} is back"));
        let client = self.client.within(ANSWER);
        while !self.is_back(&client, moved, &progress)? {
            if Instant::now() >= end {
                return Err(Error::Failed(format!(
                    "{name} is not back after {} (--timeout). It stays cordoned: kubectl uncordon {name}, when it is back",
                    human(self.limit)
                )));
            }
            if client.stopped_within(PAUSE) {
                return Err(kubernetes::client::Error::Stopped.into());
            }
        }
        if !moved.was_cordoned {
            drain::uncordon(&self.client, name)?;
        }
        drop(progress);
        self.output.say(if moved.was_cordoned {
            format!("{name}: is back, and cordoned as before")
        } else {
            format!("{name}: is back, and takes pods")
        })
    }

    fn is_back(&self, client: &Client, moved: &Moved, progress: &Progress) -> Result<bool, Error> {
        let node = client.find_as::<NodeObject>(&NODES.named(&moved.name));
        match node.map_err(Error::from) {
            Ok(node) => Ok(node.is_some_and(|node| {
                node.status.node_info.boot_id != moved.boot && node.is_ready()
            })),
            // the machine that restarts may be the one that answers
            Err(Error::Unreachable(why)) => {
                progress.line(why);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}
