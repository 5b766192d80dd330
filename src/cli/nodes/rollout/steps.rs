//! Does what [`decide`](super::decide) says, step by step, and records each step before the next one. Each step can be repeated.

use std::fmt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use base::child_process;
use base::stop::Stop;
use base::text::hex;
use kubernetes::NAMESPACE;
use kubernetes::client::{Client, DAEMON_SETS, NODES, PODS, Selector};
use kubernetes::control_planes::{ControlPlane, ControlPlanes, has_owner};
use kubernetes::objects::{NodeObject, Pod, Workload};
use kubernetes::services;
use ring::digest::{SHA256, digest};
use verifier::Variant;
use verifier::variant::DEFAULT;

use super::decide::{self, ClusterFacts, Next, Seen};
use super::options::Options;
use super::pod::{self, Ended, IMAGE_UNIT, PodJob, UPGRADE_UNIT, as_unit, pause};
use super::proof::Prover;
use super::record::{Current, Goal, NodeStep, RolloutRecord, RolloutState, RolloutWish, Way};
use super::view;
use crate::nodes::{
    drain::{self, Drained, Permitted, Pods},
    etcd_members::{Etcd, EtcdPlace, Member, Quorum, shown},
    lock::Lock,
};
use crate::shell::{
    error::Error,
    progress::{Progress, block, human, printable},
};
use crate::trust::policy::{both_images, only_images};

/// The pause between two looks at the cluster, at least; in a large cluster it is longer.
const PAUSE: Duration = Duration::from_secs(2);
/// How long a join service may take until a changed policy is in force: the kubelet updates its file within about a minute.
const IN_FORCE: Duration = Duration::from_secs(300);
/// How long a node may take to begin its reboot.
const REBOOT: Duration = Duration::from_secs(60);
/// Waits until a trial is over, in which a node keeps a new image or restarts; does nothing without one.
const TRIAL: [&str; 4] = [
    "/usr/bin/systemctl",
    "start",
    "--wait",
    "firstlight-trial.service",
];
/// What the policy must accept that the operators sign, before and after the change of the nodes.
const ACCEPTS_BOTH: &str =
    "The file must accept both images. Then run `firstlight rollout continue`";
const ACCEPTS_ONE: &str = "The file must accept only the image that the nodes keep. Then run `firstlight rollout continue`";
/// The DaemonSet of the join service, and the container in its pods.
const JOIN_SERVICE: &str = "join-service";

/// A rollout that this command drives.
pub struct Rollout<'a> {
    /// The cluster.
    pub client: &'a Client,
    /// The options of the command line.
    pub options: &'a Options,
    /// Shows the progress.
    pub progress: &'a Progress,
    /// Shows that nobody else drives it.
    pub lock: &'a Lock,
}

/// What one look at the cluster led to.
enum Turn {
    /// Something was done.
    Done,
    /// Nothing, until the cluster is like this.
    Wait(String),
    /// The rollout is over, or paused.
    Over,
}

impl Rollout<'_> {
    /// Does the steps that are left. A failure is recorded.
    pub fn run(&self, record: &mut RolloutRecord) -> Result<(), Error> {
        let Err(error) = self.steps(record) else {
            return Ok(());
        };
        record.state = RolloutState::Stopped(error.to_string());
        Err(match record.save(self.client) {
            Ok(()) => error,
            Err(unsaved) => error.with_text(|text| {
                format!("{text}\nThe record of the rollout does not say so: {unsaved}")
            }),
        })
    }

    fn steps(&self, record: &mut RolloutRecord) -> Result<(), Error> {
        let mut waiting: Option<(String, Instant)> = None;
        let mut prover = Prover::new(&self.options.state);
        let mut is_unsaved = false;
        loop {
            let begun = Instant::now();
            let turn = self.turn(record, &mut prover, &mut is_unsaved);
            let pause = pause_after(&turn, begun.elapsed());
            let what = match turn {
                Ok(Turn::Over) => return Ok(()),
                Ok(Turn::Done) => {
                    waiting = None;
                    continue;
                }
                Ok(Turn::Wait(what)) => what,
                // the control plane that restarts may be the one that answers
                Err(Error::Unreachable(why)) => {
                    self.progress.line(why);
                    "the API server to answer".into()
                }
                Err(error) => return Err(error),
            };
            self.wait(record, what, &mut waiting)?;
            if self.client.stopped_within(pause) {
                return Err(kubernetes::client::Error::Stopped.into());
            }
        }
    }

    /// Looks at the cluster, and does what comes next. `is_unsaved`: whether the API server may not have got the record of an earlier turn.
    fn turn(
        &self,
        record: &mut RolloutRecord,
        prover: &mut Prover,
        is_unsaved: &mut bool,
    ) -> Result<Turn, Error> {
        let mut cluster = view::read(self.client)?;
        self.lock.check()?;
        record.refresh(self.client)?;
        if *is_unsaved {
            record.save(self.client)?;
            *is_unsaved = false;
        }
        prover.add(self.client, record, &mut cluster)?;
        match decide::next(record, &cluster) {
            Next::Wait(what) => Ok(Turn::Wait(what)),
            next => {
                *is_unsaved = true;
                let is_over = self.act(record, &cluster, next)?;
                *is_unsaved = false;
                Ok(if is_over { Turn::Over } else { Turn::Done })
            }
        }
    }

    /// Waits for this. Fails if nothing is done for too long.
    fn wait(
        &self,
        record: &RolloutRecord,
        what: String,
        waiting: &mut Option<(String, Instant)>,
    ) -> Result<(), Error> {
        let limit = self.options.node_limit;
        // a sentence that changes does not begin the time again
        let since = waiting
            .as_ref()
            .map_or_else(Instant::now, |(_, since)| *since);
        if since.elapsed() >= limit {
            let hint = self.hint(record);
            return Err(Error::Failed(format!(
                "waited {} (--node-timeout) for {what}{hint}",
                human(limit)
            )));
        }
        if waiting.as_ref().is_none_or(|(before, _)| *before != what) {
            self.progress
                .phase(format!("waiting for {}", printable(&what)));
        }
        *waiting = Some((what, since));
        Ok(())
    }

    /// Returns what an operator can look at if a node does not come back.
    fn hint(&self, record: &RolloutRecord) -> String {
        let Some(node) = record
            .node
            .as_ref()
            .filter(|node| node.step == NodeStep::Return)
            .filter(|_| matches!(record.goal, Goal::Image { .. }))
        else {
            return String::new();
        };
        let mut hint = format!(
            ". Look at the console of {}. With the old image it comes back, because the policy still accepts it",
            node.name
        );
        // it is only a help
        if let Ok(Some(record)) = last_refusal(self.client, &node.name) {
            hint += &format!(". A join service has refused it:\n    {}", block(&record));
        }
        hint
    }

    /// Does the next thing, and records it. Returns whether the rollout is over.
    fn act(
        &self,
        record: &mut RolloutRecord,
        cluster: &ClusterFacts,
        next: Next,
    ) -> Result<bool, Error> {
        match next {
            Next::Extend => {
                self.extend(record)?;
                record.is_in_force = true;
            }
            Next::Begin(name) => {
                self.check_etcd(record, cluster, &name)?;
                self.check_driver(record)?;
                self.begin(record, cluster, &name);
            }
            Next::Do(step) => {
                if let Some(name) = record.leaves_at(step, cluster) {
                    self.check_etcd(record, cluster, &name)?;
                    self.check_driver(record)?;
                }
                self.step(record, cluster, step)?;
                self.after(record, cluster, step);
            }
            Next::Proved(renewed) => {
                if let Some(node) = &mut record.node {
                    // any later sign of life differs from this one
                    node.renewed = if renewed.is_empty() {
                        "none".into()
                    } else {
                        renewed
                    };
                    self.progress
                        .line(format!("{}: has proved the new image", node.name));
                }
            }
            Next::Retire(old) => self.retire(&old)?,
            Next::Pause => {
                record.state = RolloutState::Paused;
                record.save(self.client)?;
                return Ok(true);
            }
            Next::Done => {
                record.state = RolloutState::Done;
                record.save(self.client)?;
                return Ok(true);
            }
            Next::Stop(why) => return Err(Error::Refused(why)),
            Next::Wait(_) => {}
        }
        record.save(self.client)?;
        Ok(false)
    }

    /// Asks etcd itself before a control plane goes: a member without a pod counts for the majority, too.
    fn check_etcd(
        &self,
        record: &RolloutRecord,
        cluster: &ClusterFacts,
        name: &str,
    ) -> Result<(), Error> {
        // a member whose record is lost counts, too; etcd says whether it is one
        let is_it = |it: &Seen| it.name == name && (it.is_control_plane || it.is_labelled);
        if !cluster.nodes.iter().any(is_it) {
            return Ok(());
        }
        // with members on no other node, `decide` has judged the only one
        let etcd = match Etcd::find(self.client, &[name.to_owned()])? {
            EtcdPlace::There(etcd) => etcd,
            EtcdPlace::OnlyOn(nodes) if nodes.iter().any(|it| it != name) => {
                return Err(Error::Refused(format!(
                    "of the pods of etcd on {} only that of {name} is ready: repair the others first",
                    printable(&nodes.join(", "))
                )));
            }
            _ => return Ok(()),
        };
        let members = etcd.members(self.progress)?;
        let is_other = |it: &&Member| it.name != name;
        let is_member = |name: &str| members.iter().any(|it| it.name == name);
        let mut planes = cluster.nodes.iter().filter(|it| it.is_control_plane);
        if let Some(other) = planes.find(|it| it.name != name && !is_member(&it.name)) {
            return Err(Error::Refused(format!(
                "etcd has no member of {}, which is a control plane by its record: wait until it has joined, or remove it with \
                 `firstlight node remove`",
                other.name
            )));
        }
        if members.iter().all(|it| is_other(&it)) {
            return Ok(());
        }
        if let Some(member) = members
            .iter()
            .filter(is_other)
            .find(|it| it.fault.is_some())
        {
            return Err(Error::Refused(format!(
                "the member {} of etcd does not answer: {}. Before a control plane goes, each member must answer: repair it, or remove its \
                 node with `firstlight node remove`",
                shown(member),
                printable(member.fault.as_deref().unwrap_or_default())
            )));
        }
        let Quorum {
            voters,
            healthy,
            needed,
        } = Quorum::of(&members);
        let left = Quorum::of(members.iter().filter(is_other)).healthy;
        let stays = matches!(record.goal, Goal::Kubernetes { .. });
        if left >= needed || stays || record.accepts_downtime {
            Ok(())
        } else {
            Err(Error::Refused(format!(
                "only {healthy} of {voters} members of etcd answer, and {needed} are needed: without {name} etcd loses its majority. To go \
             on nevertheless: `firstlight rollout continue --accept-downtime`"
            )))
        }
    }

    fn begin(&self, record: &mut RolloutRecord, cluster: &ClusterFacts, name: &str) {
        let Some(seen) = cluster.nodes.iter().find(|it| it.name == name) else {
            return;
        };
        let of_role = || {
            let nodes = cluster.nodes.iter();
            nodes.filter(|it| it.is_control_plane == seen.is_control_plane && it.is_ready)
        };
        record.node = Some(Current {
            name: seen.name.clone(),
            uid: seen.uid.clone(),
            is_control_plane: seen.is_control_plane,
            step: NodeStep::Cordon,
            was_cordoned: seen.is_cordoned,
            boot: seen.boot.clone(),
            had_it: record.goal.is_reached(seen),
            others_had_it: of_role()
                .filter(|it| it.name != name && record.goal.is_reached(it))
                .count(),
            ready_before: of_role().count(),
            renewed: String::new(),
            tries: 1,
        });
    }

    /// Records that a step is done.
    fn after(&self, record: &mut RolloutRecord, cluster: &ClusterFacts, step: NodeStep) {
        let next = record.step_after(step);
        let Some(node) = &mut record.node else {
            return;
        };
        self.progress
            .line(format!("{}: {}", node.name, step.done()));
        if step == NodeStep::Uncordon {
            let name = node.name.clone();
            record.unsure.remove(&name);
            record.changed.retain(|it| *it != name);
            // not one that was removed or replaced by another
            let is_it = |it: &Seen| it.name == name && record.goal.is_reached(it);
            if cluster.nodes.iter().any(is_it) {
                record.changed.push(name);
            }
            record.node = None;
        } else {
            node.step = next;
        }
    }

    fn step(
        &self,
        record: &mut RolloutRecord,
        cluster: &ClusterFacts,
        step: NodeStep,
    ) -> Result<(), Error> {
        let Some(node) = record.node.clone() else {
            return Ok(());
        };
        let name = node.name.as_str();
        self.progress.phase(format!("{name} {}", step.phrase()));
        match step {
            NodeStep::Cordon => drain::cordon(self.client, name),
            NodeStep::Drain => self.drain(record, cluster, name, &node.uid),
            NodeStep::Change => self.change(record, name, node.tries),
            NodeStep::Reboot => self.reboot(record, cluster, name, node.tries),
            // decided from what the cluster is like
            NodeStep::Return => Ok(()),
            NodeStep::Keep => self.keep(record, cluster, name, node.tries),
            NodeStep::Uncordon => match cluster.nodes.iter().find(|it| it.name == name) {
                Some(seen) if seen.is_cordoned && !node.was_cordoned && seen.uid == node.uid => {
                    drain::uncordon(self.client, name)
                }
                _ => Ok(()),
            },
        }
    }

    fn drain(
        &self,
        record: &RolloutRecord,
        cluster: &ClusterFacts,
        name: &str,
        uid: &str,
    ) -> Result<(), Error> {
        if let Goal::Kubernetes { drains: false, .. } = record.goal {
            return Ok(());
        }
        if cluster.nodes.len() == 1 {
            self.progress.line(format!(
                "{name}: not drained, because its pods have no other node: they start again with it"
            ));
            return Ok(());
        }
        let mut others = cluster.nodes.iter().filter(|it| it.name != name);
        if !others.any(|it| it.is_ready && !it.is_cordoned) {
            return Err(Error::Refused(format!(
                "no other node takes the pods of {name}: each is cordoned or not Ready. Repair or uncordon one, and continue"
            )));
        }
        let permitted = permitted(record);
        Pods::of(self.client, name, permitted)?.check(name)?;
        let limit = self.options.drain_limit;
        let end = Instant::now() + limit;
        let mut is_said = false;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match drain::drain(self.client, name, permitted, left, self.progress)? {
                Drained::Empty => return Ok(()),
                Drained::Silent if !self.is_there(name, uid)? => {
                    return Err(Error::Refused(format!(
                        "the Node {name} was deleted or replaced while its pods were moved away: nobody knows whether they have ended"
                    )));
                }
                Drained::Silent if left.is_zero() => {
                    return Err(Error::Refused(format!(
                        "the kubelet of {name} became silent while its pods were moved away: nobody knows whether they have ended. \
                         Look at its machine: `firstlight logs {name} --unit kubelet`"
                    )));
                }
                // the kubelet of a busy machine may come back, and report which pods have ended
                Drained::Silent => {
                    if !is_said {
                        self.progress.phase(format!(
                            "waiting at most {} for the kubelet of {name}, which is silent",
                            human(limit)
                        ));
                    }
                    is_said = true;
                    pause(self.client)?;
                }
            }
        }
    }

    /// Returns whether the Node is still the one of this UID.
    fn is_there(&self, name: &str, uid: &str) -> Result<bool, Error> {
        let found = self.client.find_as::<NodeObject>(&NODES.named(name))?;
        Ok(found.is_some_and(|it| it.metadata.uid == uid))
    }

    /// Brings the image or the programs to a node, or asks for its replacement.
    fn change(&self, record: &mut RolloutRecord, name: &str, tries: u32) -> Result<(), Error> {
        let (job, words, list) = match (&record.goal, &record.way) {
            (Goal::Image { .. }, Way::Replaced) => return self.replace(name),
            (Goal::Image { .. }, Way::InPlace(words)) => {
                ("image", as_unit(IMAGE_UNIT, words), None)
            }
            (Goal::Kubernetes { components, .. }, _) => {
                let words = [pod::BOOTSTRAPPER, "upgrade", &pod::list_path()];
                let words = words.map(str::to_owned);
                (
                    "upgrade",
                    as_unit(UPGRADE_UNIT, &words),
                    Some(components.clone()),
                )
            }
        };
        let job = PodJob {
            node: name,
            name: job,
            words,
            list: list.as_deref(),
            attempt: attempt(record, tries),
            limit: self.options.node_limit,
            is_ended: false,
        };
        let told = job.words.iter().skip_while(|word| *word != "--").skip(1);
        let told: Vec<_> = told.map(String::as_str).collect();
        match job.run(self.client, &mut |is_change| {
            if is_change {
                self.check_driver(record)
            } else {
                self.tick(record)
            }
        })? {
            Ended::Done => Ok(()),
            Ended::Failed { why, log } => Err(Error::Refused(format!(
                "on {name} `{}` failed: {why}{}\nIt stays cordoned. Correct the cause, and run `firstlight rollout continue`",
                told.join(" "),
                match log.as_str() {
                    "" => String::new(),
                    log => format!("; it said:\n    {log}"),
                }
            ))),
            Ended::Gone => Err(Error::Refused(format!(
                "somebody deleted the pod that ran `{}` on {name}: nobody knows whether it succeeded",
                told.join(" ")
            ))),
            Ended::Running => Err(Error::Failed(format!(
                "on {name} `{}` has not ended after {} (--node-timeout), and still runs: `firstlight rollout continue` waits for it",
                told.join(" "),
                human(self.options.node_limit)
            ))),
        }
    }

    /// Asks for the replacement of a node's machine.
    fn replace(&self, name: &str) -> Result<(), Error> {
        let words = self.options.replace_command.iter();
        let mut words = words.map(|word| word.replace("{node}", name));
        let Some(program) = words.next() else {
            self.progress.line(format!(
                "{name}: is drained. Replace its machine now by one with the new image, for example by deleting it in its group"
            ));
            return Ok(());
        };
        let mut command = Command::new(&program);
        command.args(words);
        let limit = self.options.node_limit;
        let mut tell = |line: &str| self.progress.line(format!("{name}: {}", printable(line)));
        let ran = child_process::run(&mut command, Stdio::null(), limit, &Stop::new(), &mut tell);
        ran.map_err(|error| {
            Error::Failed(format!(
                "--replace-command for {name}: {}",
                block(&error.to_string())
            ))
        })
    }

    fn reboot(
        &self,
        record: &mut RolloutRecord,
        cluster: &ClusterFacts,
        name: &str,
        tries: u32,
    ) -> Result<(), Error> {
        let boot = record.node.as_ref().map(|node| node.boot.clone());
        let seen = cluster.nodes.iter().find(|it| it.name == name);
        if seen.is_some_and(|seen| Some(&seen.boot) != boot.as_ref()) {
            // this command was cut off after the node had rebooted
            return Ok(());
        }
        let job = reboot_job(record, name, tries);
        let ended = job.run(self.client, &mut |is_change| {
            if is_change {
                self.check_driver(record)
            } else {
                self.tick(record)
            }
        });
        job.delete(self.client);
        match ended {
            // the node may be off before its kubelet has said how the pod ended
            Ok(Ended::Failed { log, why }) if !log.is_empty() => Err(Error::Refused(format!(
                "{name} does not reboot: {why}; systemctl said:\n    {log}"
            ))),
            ended => ended.map(drop),
        }
    }

    /// Waits for the end of the node's trial: before it, the node may still go back to the old image, which the policy must then accept.
    fn keep(
        &self,
        record: &mut RolloutRecord,
        cluster: &ClusterFacts,
        name: &str,
        tries: u32,
    ) -> Result<(), Error> {
        let job = PodJob {
            node: name,
            name: "trial",
            words: TRIAL.map(str::to_owned).to_vec(),
            list: None,
            attempt: attempt(record, tries),
            limit: self.options.node_limit,
            is_ended: false,
        };
        let ended = job.run(self.client, &mut |is_change| {
            if is_change {
                self.check_driver(record)
            } else {
                self.tick(record)
            }
        })?;
        // the API server of the only control plane has rebooted with it, and could not delete this pod
        reboot_job(record, name, tries).delete(self.client);
        // the pod may also have ended, or have begun again, because the node went back
        let node: NodeObject = self.client.get_as(&NODES.named(name))?;
        let boot = &node.status.node_info.boot_id;
        let stays = cluster
            .nodes
            .iter()
            .any(|it| it.name == name && it.boot == *boot);
        match ended {
            Ended::Done if stays => Ok(()),
            _ => Err(Error::Refused(format!(
                "{name} went back to its old image: see `firstlight logs {name} --unit firstlight-trial`, also with `--boot -1`. \
                 `firstlight rollout continue` looks again"
            ))),
        }
    }

    /// Checks right before a change that nobody else drives the rollout or removes nodes. What happens between this request and the
    /// next one is not seen.
    fn check_driver(&self, record: &mut RolloutRecord) -> Result<(), Error> {
        self.lock.check()?;
        record.refresh(self.client)
    }

    /// Looks whether this command may go on with what it waits for.
    fn tick(&self, record: &mut RolloutRecord) -> Result<(), Error> {
        let refreshed = self.check_driver(record);
        match refreshed {
            // the node may be the API server's own
            Err(Error::Unreachable(_)) => return Ok(()),
            refreshed => refreshed?,
        }
        match record.wish {
            Some(RolloutWish::Abort) => Err(Error::Refused("the rollout is aborted".into())),
            _ => Ok(()),
        }
    }

    /// Makes the policy accept the new image, too.
    fn extend(&self, record: &mut RolloutRecord) -> Result<(), Error> {
        let Goal::Image { ids, policy, .. } = record.goal.clone() else {
            return Ok(());
        };
        services::change_policy(self.client, |present| {
            let has_it = |text: &str| {
                let images = verifier::Policy::from_json(text).map_err(Error::content)?;
                let has = |id: &String| images.images().iter().any(|it| **it.id() == **id);
                Ok::<bool, Error>(ids.iter().all(has))
            };
            if has_it(present)? {
                Ok(None)
            } else {
                both_images(present, &policy).map(Some)
            }
        })
        .map_err(|error| if_signed(error, ACCEPTS_BOTH))?;
        self.progress.line("the policy accepts both images");
        self.await_in_force(record)
    }

    /// Removes these images from the policy.
    pub fn retire(&self, old: &[String]) -> Result<(), Error> {
        let variant = services::present_variant(self.client)?;
        let variant = Variant::named(variant.as_deref().unwrap_or(DEFAULT));
        let variant = variant.map_err(Error::content)?;
        services::change_policy(self.client, |present| {
            let new = only_images(present, variant, |it| {
                !old.iter().any(|id| **it.id() == **id)
            })?;
            Ok::<_, Error>((new != present).then_some(new))
        })
        .map_err(|error| if_signed(error, ACCEPTS_ONE))?;
        self.progress
            .line("the policy does not accept the old image any more");
        Ok(())
    }

    /// Waits until each join service says in its log that it judges by the policy in the cluster.
    fn await_in_force(&self, record: &mut RolloutRecord) -> Result<(), Error> {
        let end = Instant::now() + IN_FORCE;
        self.progress
            .phase("waiting until each join service says that the policy is in force");
        loop {
            let policy = services::present_policy(self.client)?.unwrap_or_default();
            let digest = hex(digest(&SHA256, policy.as_bytes()).as_ref());
            let sentence = format!("is in force (sha256 {digest}");
            let mut ready = join_services(self.client)?;
            ready.retain(|(_, pod)| pod.is_ready());
            let mut late = vec![];
            for (plane, pod) in &ready {
                let name = &pod.metadata.name;
                let said = log_of(self.client, plane, name);
                // the last one counts: a policy may come back
                let said = said.map(|log| {
                    let mut lines = log.lines().rev();
                    let last = lines.find(|line| line.contains("is in force (sha256 "));
                    last.is_some_and(|line| line.contains(&sentence))
                });
                match said {
                    Ok(true) => {}
                    Ok(false) => late.push(name.to_owned()),
                    Err(LogError::Api(error)) if !error.is_not_found() && !error.is_temporary() => {
                        return Err(error.into());
                    }
                    Err(error) => late.push(format!("{name} ({error})")),
                }
            }
            if late.is_empty() && !ready.is_empty() {
                return Ok(());
            }
            if Instant::now() >= end {
                return Err(Error::Failed(if ready.is_empty() {
                    "no join service runs in the cluster, so no node could come back from a reboot"
                        .into()
                } else {
                    format!(
                        "after {} these join services have not said that the policy is in force: {}. See their logs; an older version of \
                     the services does not say it: upgrade them first with `firstlight apply`. If a log has been rotated since, they \
                     say it again after `kubectl -n kube-system rollout restart daemonset/join-service`",
                        human(IN_FORCE),
                        printable(&late.join(", "))
                    )
                }));
            }
            self.tick(record)?;
            pause(self.client)?;
        }
    }
}

/// Adds to the error of a policy that only the operators of the cluster change what the file must have.
fn if_signed(error: Error, what: &str) -> Error {
    match error {
        Error::Blocked(text) => Error::Blocked(format!("{text}. {what}")),
        other => other,
    }
}

/// Returns which pods may be evicted.
pub fn permitted(record: &RolloutRecord) -> Permitted {
    Permitted {
        empty_dir: record.deletes_empty_dir,
        unmanaged: record.deletes_unmanaged,
    }
}

/// Returns how long to wait after a turn that took so long. In a large cluster a look takes long, and looks are rarer. A turn that ended
/// because no API server answers may have drained a node for minutes before.
fn pause_after(turn: &Result<Turn, Error>, took: Duration) -> Duration {
    match turn {
        Ok(Turn::Wait(_)) => PAUSE.max(took * 4),
        _ => PAUSE,
    }
}

/// Restarts the machine.
fn reboot_job<'a>(record: &RolloutRecord, node: &'a str, tries: u32) -> PodJob<'a> {
    PodJob {
        node,
        name: "reboot",
        words: ["/usr/bin/systemctl", "reboot"].map(str::to_owned).to_vec(),
        list: None,
        attempt: attempt(record, tries),
        limit: REBOOT,
        is_ended: true,
    }
}

/// Returns a text that differs from that of any other try of this or of another rollout.
fn attempt(record: &RolloutRecord, tries: u32) -> String {
    let goal = match &record.goal {
        Goal::Image { ids, .. } => ids.first(),
        Goal::Kubernetes { version, .. } => Some(version),
    };
    let goal = goal.map_or("", String::as_str);
    format!("{goal} {} {tries}", record.begun)
}

/// Returns the records of a log: further lines of a record are indented.
fn records(log: &str) -> Vec<String> {
    let mut records: Vec<String> = vec![];
    for line in log.lines() {
        match records.last_mut() {
            Some(record) if line.starts_with(' ') => *record += &format!("\n{line}"),
            _ => records.push(line.to_owned()),
        }
    }
    records
}

/// Returns the pods of the join service with their control planes: those that the DaemonSet owns and that run on a node whose record says
/// that it is a control plane. Each kubelet may give the label to a pod of its own, so it only shortens the list.
fn join_services(client: &Client) -> Result<Vec<(ControlPlane, Pod)>, Error> {
    let set = DAEMON_SETS.in_namespace(NAMESPACE).named(JOIN_SERVICE);
    let set = client.find_as::<Workload>(&set)?.unwrap_or_default();
    let uid = set.metadata.uid;
    let planes = ControlPlanes::read(client)?;
    let selector = Selector::labels(&format!("k8s-app={JOIN_SERVICE}"));
    let pods = client.list_as(&PODS.in_namespace(NAMESPACE), &selector)?;
    let own = pods
        .items
        .into_iter()
        .filter(|pod| has_owner(pod, "DaemonSet", JOIN_SERVICE, &uid));
    let placed = own.filter_map(|pod| {
        let plane = planes.find(&pod.spec.node_name)?;
        Some((plane.clone(), pod))
    });
    Ok(placed.collect())
}

/// Why a log is not read.
enum LogError {
    /// The API server has none.
    Api(kubernetes::client::Error),
    /// The API server would ask another machine.
    Other(String),
}

impl fmt::Display for LogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LogError::Api(error) => write!(f, "{error}"),
            LogError::Other(why) => f.write_str(why),
        }
    }
}

impl From<kubernetes::client::Error> for LogError {
    fn from(error: kubernetes::client::Error) -> LogError {
        LogError::Api(error)
    }
}

/// Returns the log of a join service, if the API server asks the machine of this control plane for it.
fn log_of(client: &Client, plane: &ControlPlane, pod: &str) -> Result<String, LogError> {
    let check = || match plane.refusal_now(client)? {
        Some(why) => Err(LogError::Other(why)),
        None => Ok(()),
    };
    check()?;
    let log = client.pod_log(&PODS.in_namespace(NAMESPACE).named(pod), JOIN_SERVICE)?;
    check()?;
    Ok(log)
}

/// Returns the last record in which a join service refuses the evidence of a node.
fn last_refusal(client: &Client, node: &str) -> Result<Option<String>, Error> {
    let node: NodeObject = client.get_as(&NODES.named(node))?;
    let internal = node.addresses("InternalIP");
    let callers: Vec<_> = internal.map(|it| format!("{it}:")).collect();
    let mut last = None;
    for (plane, pod) in join_services(client)? {
        // a machine that is not asked says nothing
        let Ok(log) = log_of(client, &plane, &pod.metadata.name) else {
            continue;
        };
        let is_refusal = |record: &String| {
            record.contains("refused") && callers.iter().any(|it| record.contains(it.as_str()))
        };
        last = records(&log).into_iter().rfind(is_refusal).or(last);
    }
    Ok(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_look_that_takes_long_makes_looks_rarer() {
        let looked = Ok(Turn::Wait("a node".into()));
        assert_eq!(
            pause_after(&looked, Duration::from_secs(3)),
            Duration::from_secs(12)
        );
        assert_eq!(pause_after(&looked, Duration::ZERO), PAUSE);
        let restarts = Err(Error::Unreachable("no answer".into()));
        let minutes = Duration::from_secs(600);
        assert_eq!(pause_after(&restarts, minutes), PAUSE);
    }
}
