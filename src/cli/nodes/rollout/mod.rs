//! `firstlight rollout`: brings an image or a version of Kubernetes to the nodes of a cluster, one after the other.
//!
//! `options` has the command line, `record` the state in the cluster, and `view` reads what the cluster is like. From both, `decide` says
//! what comes next; `steps` does it: by `pod` on a node, and with `proof` where no join service has seen a node. `report` has the texts.

pub mod decide;
mod options;
mod pod;
mod proof;
mod record;
mod report;
mod steps;
pub mod view;

use std::io;
use std::path::Path;
use std::time::{Duration, Instant};

use kubernetes::client::{self, Client};
use kubernetes::constellation::node_version::NodeVersion;
use kubernetes::control_planes::ControlPlanes;
use kubernetes::services;
use verifier::sources::offline;
use verifier::{Policy, Variant};

use crate::migrate::moves_nodes;
use crate::nodes::{
    drain::{self, Pods},
    lock::{self, Lock},
    upgrade,
};
use crate::shell::{
    consent,
    error::Error,
    files, interrupt,
    progress::{Progress, printable},
};
use crate::trust::policy::both_images;
use crate::workspace::kubeconfig;
use decide::ClusterFacts;
pub(crate) use options::CommandLine;
use options::{NewGoal, Options, Verb};
use record::{Goal, NodeStep, RolloutRecord, RolloutState, RolloutWish, Way};
use report::{ImageNames, NodePods};
use steps::{Rollout, permitted};

/// The name of the command.
const NAME: &str = "rollout";
/// The time limit of a request to the API server.
const REQUEST: Duration = Duration::from_secs(60);
/// How long `abort` waits until the command that drives the rollout has stopped.
const STOP: Duration = Duration::from_secs(180);
/// What an interruption leaves behind.
const INTERRUPTED: &str = "what is done stays, and a node in the middle stays cordoned; `firstlight rollout continue` goes on, also on another \
                           machine, and `firstlight rollout abort` ends it";

/// Runs the command.
pub fn run(options: &Options) -> Result<(), Error> {
    let client = kubeconfig::client(&options.kubeconfig)?.within(REQUEST);
    let progress = Progress::on_stderr();
    progress.phase(format!("waiting for the API server {}", client.server()));
    client.wait_ready(&mut |why| progress.line(why))?;
    if let Verb::Plan | Verb::Start | Verb::Continue = options.action {
        for sentence in ControlPlanes::read(&client)?.ignored() {
            log::warn!("{}", printable(&sentence));
        }
    }
    let operation = Operation {
        client: &client,
        options,
    };
    match options.action {
        Verb::Plan => operation.plan(progress),
        Verb::Start => operation.start(progress),
        Verb::Continue => operation.go_on(progress),
        Verb::Status => operation.status(progress),
        Verb::Pause => operation.pause(progress),
        Verb::Abort => operation.abort(progress),
    }
}

/// The command in a cluster.
struct Operation<'a> {
    client: &'a Client,
    options: &'a Options,
}

impl Operation<'_> {
    /// Reads the cluster, with what nodes have proved to a command that drove this rollout.
    fn cluster(&self, record: &RolloutRecord) -> Result<ClusterFacts, Error> {
        let mut cluster = view::read(self.client)?;
        proof::add_proved(record, &mut cluster);
        Ok(cluster)
    }

    fn plan(&self, progress: Progress) -> Result<(), Error> {
        progress.phase("reading the cluster");
        let record = self.new_record(&progress, true)?;
        let cluster = self.cluster(&record)?;
        let names = names(self.client, &record)?;
        let (pods, blocks) = self.blocks(&record, &cluster)?;
        drop(progress);
        let output = self.options.output;
        output.json(&report::json(&record, &cluster, &pods, &names, &blocks))?;
        let command = &self.options.replace_command;
        output.say(report::plan(&record, command, &cluster, &pods, &names, &blocks).trim_end())?;
        if blocks.is_empty() {
            output.say("Nothing blocks it. Nothing was changed.")
        } else {
            Err(Error::blocked(format!(
                "{}. Nothing was changed",
                blocks.join("; ")
            )))
        }
    }

    fn start(&self, progress: Progress) -> Result<(), Error> {
        progress.phase("reading the cluster");
        let mut record = self.new_record(&progress, true)?;
        let cluster = self.cluster(&record)?;
        let names = names(self.client, &record)?;
        let (pods, blocks) = self.blocks(&record, &cluster)?;
        // its line on the terminal would overwrite the question
        drop(progress);
        let command = &self.options.replace_command;
        let shown = report::plan(&record, command, &cluster, &pods, &names, &blocks);
        self.options.output.say(shown.trim_end())?;
        if !blocks.is_empty() {
            return Err(Error::blocked(format!(
                "{}. Nothing was changed",
                blocks.join("; ")
            )));
        }
        self.ask("Start it?")?;
        let progress = Progress::on_stderr();
        let lock = Lock::take(self.client, NAME, &progress)?;
        let earlier = RolloutRecord::find(self.client)?;
        refuse_second(earlier.as_ref())?;
        interrupt::means(INTERRUPTED);
        if let Goal::Kubernetes { .. } = record.goal {
            record.goal = self.new_record(&progress, false)?.goal;
        }
        record.follow(earlier);
        record.save(self.client)?;
        self.drive(record, &progress, &lock)
    }

    fn go_on(&self, progress: Progress) -> Result<(), Error> {
        let record = RolloutRecord::needed(self.client)?;
        let command = &self.options.replace_command[..];
        if !command.is_empty() && record.way != Way::Replaced {
            return Err(Error::Usage(
                "the nodes of this rollout change in place: omit --replace-command".into(),
            ));
        }
        let (cluster, names) = self.show(&record, progress)?;
        let (pods, _) = self.pods(&record, &cluster)?;
        let shown = report::plan(&record, command, &cluster, &pods, &names, &[]);
        self.options.output.say(shown.trim_end())?;
        self.ask("Go on with it?")?;
        let progress = Progress::on_stderr();
        let lock = Lock::take(self.client, NAME, &progress)?;
        interrupt::means(INTERRUPTED);
        let mut record = shown_before(&record, RolloutRecord::needed(self.client)?)?;
        let cluster = self.cluster(&record)?;
        decide::resume(&mut record, &cluster);
        record.run += 1;
        record.accepts_downtime |= self.options.accepts_downtime;
        record.deletes_empty_dir |= self.options.permitted.empty_dir;
        record.deletes_unmanaged |= self.options.permitted.unmanaged;
        record.save(self.client)?;
        self.drive(record, &progress, &lock)
    }

    fn drive(
        &self,
        mut record: RolloutRecord,
        progress: &Progress,
        lock: &Lock,
    ) -> Result<(), Error> {
        let rollout = Rollout {
            client: self.client,
            options: self.options,
            progress,
            lock,
        };
        rollout.run(&mut record)?;
        let cluster = self.cluster(&record)?;
        let names = names(self.client, &record)?;
        let output = self.options.output;
        output.json(&report::json(&record, &cluster, &[], &names, &[]))?;
        output.say(match record.state {
            RolloutState::Done => format!("done: every node has {}", report::goal(&record)),
            _ => "paused: `firstlight rollout continue` goes on".to_owned(),
        })
    }

    fn status(&self, progress: Progress) -> Result<(), Error> {
        let Some(record) = RolloutRecord::find(self.client)? else {
            drop(progress);
            self.options.output.json(&serde_json::Value::Null)?;
            return self.options.output.say("there was no rollout");
        };
        let cluster = self.cluster(&record)?;
        let names = names(self.client, &record)?;
        let holder = lock::holder(self.client, NAME)?;
        drop(progress);
        let output = self.options.output;
        let mut json = report::json(&record, &cluster, &[], &names, &[]);
        json["driver"] = holder.clone().into();
        output.json(&json)?;
        output.say(report::status(&record, &cluster, holder.as_deref(), &names).trim_end())
    }

    fn pause(&self, progress: Progress) -> Result<(), Error> {
        RolloutRecord::needed(self.client)?;
        // a command that seems to be dead finds it, too
        RolloutRecord::leave(self.client, RolloutWish::Pause)?;
        let is_driven = lock::holder(self.client, NAME)?.is_some();
        let mut record = RolloutRecord::needed(self.client)?;
        if !is_driven && record.state == RolloutState::Running {
            record.state = RolloutState::Paused;
            record.save(self.client)?;
        }
        drop(progress);
        self.options.output.say(if is_driven {
            "it stops when the present node is done: see `firstlight rollout status`"
        } else {
            "nobody drives it: it stays as it is until `firstlight rollout continue`"
        })
    }

    fn abort(&self, progress: Progress) -> Result<(), Error> {
        let record = RolloutRecord::needed(self.client)?;
        let (_, names) = self.show(&record, progress)?;
        self.ask("End it here?")?;
        let progress = Progress::on_stderr();
        RolloutRecord::leave(self.client, RolloutWish::Abort)?;
        let end = Instant::now() + STOP;
        let lock = loop {
            match Lock::take(self.client, NAME, &progress) {
                Err(Error::Refused(_)) if Instant::now() < end => {}
                begun => break begun?,
            }
        };
        let mut record = shown_before(&record, RolloutRecord::needed(self.client)?)?;
        record.run += 1;
        record.wish = None;
        record.save(self.client)?;
        let cluster = self.cluster(&record)?;
        let left = self.put_down(&mut record, &cluster, &lock, &progress)?;
        record.state = RolloutState::Aborted;
        record.save(self.client)?;
        let cluster = self.cluster(&record)?;
        let names = report_names(names, &record);
        drop(progress);
        let output = self.options.output;
        output.json(&report::json(&record, &cluster, &[], &names, &[]))?;
        output.say(report::status(&record, &cluster, None, &names).trim_end())?;
        output.say(left)
    }

    /// Brings what is in the middle to an end. Returns what the operator has to know.
    fn put_down(
        &self,
        record: &mut RolloutRecord,
        cluster: &ClusterFacts,
        lock: &Lock,
        progress: &Progress,
    ) -> Result<String, Error> {
        let mut said = String::new();
        if let Some(node) = &record.node {
            let seen = cluster.nodes.iter().find(|it| it.name == node.name);
            let stays = seen.is_some_and(|it| it.uid == node.uid && it.is_cordoned);
            // one that is not Ready gets no pods anyway
            if stays && !node.was_cordoned {
                drain::uncordon(self.client, &node.name)?;
            }
            let is_image = matches!(record.goal, Goal::Image { .. });
            let is_in_place = matches!(record.way, Way::InPlace(_));
            if node.step >= NodeStep::Change && seen.is_some() && is_image && is_in_place {
                said += &format!(
                    "{} may boot either image: the next rollout changes it. ",
                    node.name
                );
                record.unsure.insert(node.name.clone());
            }
        }
        if decide::leaves_after_abort(record, cluster) {
            let rollout = Rollout {
                client: self.client,
                options: self.options,
                progress,
                lock,
            };
            if let Goal::Image { ids, .. } = &record.goal {
                rollout.retire(ids)?;
            }
            return Ok(
                said + "No node has the new image, and the policy does not accept it any more."
            );
        }
        Ok(said
            + match record.goal {
                Goal::Image { .. } => {
                    "The policy keeps accepting both images, because some nodes have, or may have, the new one. Go on with `firstlight \
                     rollout start` and the same policy, or go back: with a policy of the old image"
                }
                Goal::Kubernetes { .. } => {
                    "Nodes keep the version that they have. A control plane cannot go back (docs/day-two/upgrade.md)"
                }
            })
    }

    /// Returns the record of the rollout that the options want. `is_dry_run`: whether nothing may be changed.
    fn new_record(&self, progress: &Progress, is_dry_run: bool) -> Result<RolloutRecord, Error> {
        let goal = match &self.options.wanted {
            Some(NewGoal::Image(path)) => image_goal(self.client, path)?,
            Some(NewGoal::Kubernetes(version, components, exceptions)) => {
                let published = upgrade::publish(
                    &upgrade::Options {
                        version: *version,
                        components: components.clone(),
                        exceptions: exceptions.clone(),
                        kubeconfig: self.options.kubeconfig.clone(),
                        dry_run: is_dry_run,
                        output: self.options.output,
                        timeout: REQUEST,
                    },
                    self.client,
                    progress,
                )?;
                Goal::Kubernetes {
                    version: version.to_string(),
                    components: published.name,
                    drains: published.from.minor != version.minor,
                }
            }
            None => return Err(Error::Usage("expected --policy or --kubernetes".into())),
        };
        let way = match goal {
            Goal::Image { .. } => self.options.way.clone(),
            Goal::Kubernetes { .. } => {
                Way::InPlace(vec![pod::BOOTSTRAPPER.into(), "upgrade".into()])
            }
        };
        let mut record = RolloutRecord::new(goal, way);
        record.accepts_downtime = self.options.accepts_downtime;
        record.deletes_empty_dir = self.options.permitted.empty_dir;
        record.deletes_unmanaged = self.options.permitted.unmanaged;
        Ok(record)
    }

    /// Returns the pods of the nodes that are left, and what blocks the rollout.
    fn blocks(
        &self,
        record: &RolloutRecord,
        cluster: &ClusterFacts,
    ) -> Result<(Vec<NodePods>, Vec<String>), Error> {
        let mut blocks = vec![];
        if let Err(error) = refuse_second(RolloutRecord::find(self.client)?.as_ref()) {
            blocks.push(error.to_string());
        }
        let is_image = matches!(record.goal, Goal::Image { .. });
        if is_image && moves_nodes(self.client)? {
            blocks.push(
                "Constellation's node operator replaces nodes whose image is not that of NodeVersion: set the image there".into(),
            );
        }
        if !is_image && NodeVersion::find(self.client)?.is_some() {
            blocks.push(
                "the cluster has Constellation's NodeVersion: use `firstlight upgrade` (docs/day-two/upgrade.md)".into(),
            );
        }
        if let Goal::Image {
            was_accepted: false,
            ..
        } = record.goal
            && !services::present_signed(self.client)?.statement.is_empty()
        {
            blocks.push(
                "the policy of this cluster is signed by its operators, and does not accept the new image: first apply a policy that they \
                 have signed and that accepts both images (docs/day-two/signed-policies.md)"
                    .into(),
            );
        }
        blocks.extend(cluster.unrecorded.map(str::to_owned));
        let left = record.left(cluster);
        if is_image
            && record.way != Way::Replaced
            && !record.accepts_downtime
            && !decide::keeps_majority(cluster.members)
            && left.iter().any(|node| node.is_control_plane)
        {
            let downtime = decide::downtime(cluster.members);
            blocks.push(format!("{downtime}. --accept-downtime permits it"));
        }
        let (pods, refused) = self.pods(record, cluster)?;
        blocks.extend(refused);
        Ok((pods, blocks))
    }

    fn pods(
        &self,
        record: &RolloutRecord,
        cluster: &ClusterFacts,
    ) -> Result<(Vec<NodePods>, Vec<String>), Error> {
        let drains = !matches!(record.goal, Goal::Kubernetes { drains: false, .. });
        let (mut all, mut refused) = (vec![], vec![]);
        for node in record.left(cluster) {
            if !drains || cluster.nodes.len() == 1 {
                continue;
            }
            let pods = Pods::of(self.client, &node.name, permitted(record))?;
            if let Err(error) = pods.check(&node.name) {
                refused.push(error.to_string());
            }
            all.push(NodePods {
                node: node.name.clone(),
                evicted: pods.evicted.len(),
            });
        }
        Ok((all, refused))
    }

    /// Asks the operator, unless the command line has the answer.
    fn ask(&self, question: &str) -> Result<(), Error> {
        if self.options.is_agreed {
            Ok(())
        } else {
            consent::ask(question, "`firstlight rollout plan` or `status`")
        }
    }

    /// Shows where the rollout is. Returns what the cluster is like, and the names of images.
    fn show(
        &self,
        record: &RolloutRecord,
        progress: Progress,
    ) -> Result<(ClusterFacts, ImageNames), Error> {
        let cluster = self.cluster(record)?;
        let names = names(self.client, record)?;
        let holder = lock::holder(self.client, NAME)?;
        drop(progress);
        let shown = report::status(record, &cluster, holder.as_deref(), &names);
        self.options.output.say(shown.trim_end())?;
        Ok((cluster, names))
    }
}

/// Refuses another rollout than the one that the operator has seen.
fn shown_before(shown: &RolloutRecord, now: RolloutRecord) -> Result<RolloutRecord, Error> {
    if shown.is_same(&now) {
        Ok(now)
    } else {
        Err(Error::Refused(
            "another operator has begun another rollout meanwhile: run the command again".into(),
        ))
    }
}

/// Refuses a rollout while another one is not over.
fn refuse_second(earlier: Option<&RolloutRecord>) -> Result<(), Error> {
    match earlier {
        Some(record) if !record.is_over() => Err(Error::Refused(format!(
            "a rollout of {} is not over: `firstlight rollout continue` goes on, and `firstlight rollout abort` ends it",
            report::goal(record)
        ))),
        _ => Ok(()),
    }
}

/// Returns the goal of a rollout of the image in this policy.
fn image_goal(client: &Client, path: &Path) -> Result<Goal, Error> {
    let wrong =
        |error: &dyn std::fmt::Display| Error::content(format!("{}: {error}", path.display()));
    let text = if path.as_os_str() == "-" {
        let mut text = String::new();
        io::Read::read_to_string(&mut io::stdin(), &mut text)
            .map_err(|error| Error::failed(format!("standard input: {error}")))?;
        text
    } else {
        String::from_utf8_lossy(&files::read(path)?).into_owned()
    };
    let new = Policy::from_json(&text).map_err(|error| wrong(&error))?;
    let present = services::present_policy(client)?.unwrap_or_default();
    let variant = services::present_variant(client)?.unwrap_or_default();
    let variant = Variant::named(&variant).map_err(Error::content)?;
    let unusable = |error| {
        Error::content(format!(
            "the policy in force: {error}. `firstlight apply --policy` puts a corrected one in force"
        ))
    };
    let in_force = Policy::from_json(&present).map_err(unusable)?;
    endorsement::validator(variant, in_force.clone(), &offline()).map_err(unusable)?;
    let both = both_images(&present, &text).map_err(|error| wrong(&error))?;
    let both = Policy::from_json(&both).map_err(|error| wrong(&error))?;
    // a service keeps its old policy if it cannot use the new one
    endorsement::validator(variant, both.clone(), &offline()).map_err(|error| wrong(&error))?;
    let ids: Vec<_> = new.images().iter().map(|it| it.id().to_string()).collect();
    let old = in_force.images().iter().map(|it| it.id().to_string());
    let name_of = |id: &String| both.images().iter().find(|it| **it.id() == **id);
    let name = ids.first().and_then(name_of).map(ToString::to_string);
    let (same, old): (Vec<_>, Vec<_>) = old.partition(|id| ids.contains(id));
    if !same.is_empty() && same.len() < ids.len() {
        return Err(wrong(
            &"some of its images are accepted already, and others are not: give only the new image",
        ));
    }
    Ok(Goal::Image {
        old,
        was_accepted: !same.is_empty(),
        ids,
        name: name.unwrap_or_default(),
        policy: text,
    })
}

/// Returns the names of the images that are known.
fn names(client: &Client, record: &RolloutRecord) -> Result<ImageNames, client::Error> {
    let present = services::present_policy(client)?.unwrap_or_default();
    let present = Policy::from_json(&present).ok();
    let images = present.iter().flat_map(|policy| policy.images());
    let names = images.map(|it| (it.id().to_string(), it.to_string()));
    Ok(report_names(names.collect(), record))
}

/// Adds the name of the new image.
fn report_names(mut names: ImageNames, record: &RolloutRecord) -> ImageNames {
    if let Goal::Image { ids, name, .. } = &record.goal {
        names.extend(ids.iter().map(|id| (id.clone(), name.clone())));
    }
    names
}
