//! What a rollout does next, from its record and from what the cluster is like. Nothing here asks the cluster.
//!
//! ```text
//! policy with both images ─► one node after the other: cordon ─► drain ─► change ─► reboot ─► return ─► uncordon
//!                                       │ no node is left                              │ not back, or back with the old image
//!                                       ▼                                              ▼
//!                            only the new image in the policy                     stop: the others stay as they are
//! ```
//!
//! An image comes to the workers first: a bad one then costs a worker, and no member of etcd. A version of Kubernetes comes to the control
//! planes first, because no kubelet may be newer than its API server.

use super::record::{Current, Goal, NodeStep, RolloutRecord, RolloutState, RolloutWish, Way};

/// A node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// The name.
    pub name: String,
    /// The UID of the Node.
    pub uid: String,
    /// Whether it is a control plane by its record.
    pub is_control_plane: bool,
    /// Whether its Node has the label of control planes, which proves nothing.
    pub is_labelled: bool,
    /// Whether its kubelet says that it is ready.
    pub is_ready: bool,
    /// Whether it takes no new pods.
    pub is_cordoned: bool,
    /// The ID of the image that it proved to a join service at its last ticket, or to this command; empty if unknown.
    pub image: String,
    /// The version of its kubelet.
    pub kubelet: String,
    /// The ID of its boot.
    pub boot: String,
    /// The last sign of life of its kubelet.
    pub renewed: String,
}

/// What the cluster is like.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterFacts {
    /// The nodes, sorted by name.
    pub nodes: Vec<Seen>,
    /// The IDs of the images that the policy accepts.
    pub accepted: Vec<String>,
    /// Machines that got a ticket a short time ago and have no Node yet: name, and ID of the image.
    pub joining: Vec<(String, String)>,
    /// The members of etcd in pods of kubeadm; none with an external etcd.
    pub members: usize,
    /// Those of them that are ready.
    pub ready_members: usize,
    /// Why no node is known as a control plane, if that is so.
    pub unrecorded: Option<&'static str>,
}

/// What is done next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// The policy accepts the new image, too, and each join service has this policy.
    Extend,
    /// This node is taken as the next one.
    Begin(String),
    /// This step of the present node.
    Do(NodeStep),
    /// The present node has proved the image: its next sign of life shows that its kubelet runs.
    Proved(String),
    /// Nothing, until the cluster is like this.
    Wait(String),
    /// The rollout stops for this reason.
    Stop(String),
    /// These images leave the policy.
    Retire(Vec<String>),
    /// The rollout waits until somebody continues it.
    Pause,
    /// Every node has what was wanted.
    Done,
}

impl Goal {
    /// Returns whether a node has it.
    pub fn is_reached(&self, node: &Seen) -> bool {
        match self {
            Goal::Image { ids, .. } => ids.contains(&node.image),
            Goal::Kubernetes { version, .. } => node.kubelet == *version,
        }
    }

    /// Returns whether control planes come first.
    fn begins_with_control_planes(&self) -> bool {
        matches!(self, Goal::Kubernetes { .. })
    }
}

impl RolloutRecord {
    /// Returns the nodes that are left, in the order of their changes.
    pub fn left<'a>(&self, cluster: &'a ClusterFacts) -> Vec<&'a Seen> {
        let first = self.goal.begins_with_control_planes();
        let is_left = |node: &&Seen| {
            let is_unsure = !first && self.unsure.contains(&node.name);
            !self.goal.is_reached(node) || is_unsure
        };
        let mut left: Vec<_> = cluster.nodes.iter().filter(is_left).collect();
        // those that are ready come first within their role
        left.sort_by_key(|node| (node.is_control_plane != first, !node.is_ready));
        left
    }

    /// Returns the present node if this step takes away it or its member of etcd: its reboot, unless it has rebooted already, or its
    /// upgrade. Control planes are never replaced by a rollout.
    pub fn leaves_at(&self, step: NodeStep, cluster: &ClusterFacts) -> Option<String> {
        let node = self.node.as_ref()?;
        let seen = cluster.nodes.iter().find(|it| it.name == node.name)?;
        let leaves_at = match (&self.way, &self.goal) {
            (Way::Replaced, _) => return None,
            (_, Goal::Kubernetes { .. }) => NodeStep::Change,
            (_, Goal::Image { .. }) => NodeStep::Reboot,
        };
        let stays = seen.uid == node.uid && seen.boot == node.boot;
        (stays && step == leaves_at).then(|| node.name.clone())
    }

    /// Returns why a rollout cannot go on by itself: what was reached is lost, or a node runs an image that is not accepted any more.
    fn lost(&self, cluster: &ClusterFacts) -> Option<String> {
        let is_lost =
            |node: &&Seen| self.changed.contains(&node.name) && !self.goal.is_reached(node);
        if let Some(node) = cluster.nodes.iter().find(is_lost) {
            let what = match self.goal {
                Goal::Image { .. } => format!("the image {}", shown(&node.image)),
                Goal::Kubernetes { .. } => format!("the kubelet {}", shown(&node.kubelet)),
            };
            return Some(format!(
                "{} was done, and has {what} now: find out why it went back; `firstlight rollout continue` changes it again",
                node.name
            ));
        }
        let Goal::Image { old, .. } = &self.goal else {
            return None;
        };
        let is_refused =
            |node: &&Seen| old.contains(&node.image) && !cluster.accepted.contains(&node.image);
        let node = cluster.nodes.iter().find(is_refused)?;
        Some(format!(
            "the policy does not accept the image {} any more, which {} has, so that it would not come back: add that image again with \
             `firstlight apply`, and continue",
            node.image, node.name
        ))
    }
}

fn shown(text: &str) -> &str {
    match text {
        "" => "unknown",
        text => text,
    }
}

/// Returns what is done next.
pub fn next(record: &RolloutRecord, cluster: &ClusterFacts) -> Next {
    // a control plane that is taken for a worker would go without a look at etcd
    if let Some(why) = cluster.unrecorded {
        return Next::Stop(why.into());
    }
    if let Goal::Image { ids, .. } = &record.goal {
        let is_accepted = ids.iter().all(|id| cluster.accepted.contains(id));
        match (is_accepted, record.is_in_force) {
            (true, true) => {}
            (_, false) => return Next::Extend,
            (false, true) => {
                return Next::Stop(
                    "the policy in force does not accept the new image any more: somebody has changed it since. `firstlight rollout \
                     continue` adds the image again"
                        .into(),
                );
            }
        }
    }
    if let Some(node) = &record.node {
        return next_of(node, record, cluster);
    }
    if record.wish.is_some() {
        return Next::Pause;
    }
    if let Some(why) = record.lost(cluster) {
        return Next::Stop(why);
    }
    let goal = &record.goal;
    let is_back = |node: &&Seen| record.changed.contains(&node.name) && goal.is_reached(node);
    let mut changed = cluster.nodes.iter().filter(is_back);
    if let Some(node) = changed.find(|node| !node.is_ready) {
        return Next::Wait(format!(
            "{}, which was changed before, to be Ready",
            node.name
        ));
    }
    let left = record.left(cluster);
    match (left.first(), goal) {
        (Some(node), _) => begin(node, record, cluster),
        (None, _) if cluster.nodes.is_empty() => Next::Stop("the cluster has no node".into()),
        (None, Goal::Image { old, .. }) => {
            if let Some((name, _)) = cluster.joining.iter().find(|(_, id)| old.contains(id)) {
                return Next::Wait(format!("{name}, which joins with the old image"));
            }
            let is_there = |id: &&String| cluster.accepted.contains(id);
            let old: Vec<_> = old.iter().filter(is_there).cloned().collect();
            if old.is_empty() {
                Next::Done
            } else {
                Next::Retire(old)
            }
        }
        (None, Goal::Kubernetes { .. }) => Next::Done,
    }
}

/// Returns whether this node may be changed now.
fn begin(node: &Seen, record: &RolloutRecord, cluster: &ClusterFacts) -> Next {
    if !node.is_ready {
        return Next::Stop(format!(
            "{} is not Ready and was not changed: repair it, or remove it from the cluster; the policy keeps accepting its image",
            node.name
        ));
    }
    if node.is_control_plane && record.way == Way::Replaced {
        return Next::Stop(format!(
            "{0} is a control plane, whose member of etcd goes with its machine: run `firstlight node remove {0}`, start its replacement with \
             the new image, and run `firstlight rollout continue` when that is Ready",
            node.name
        ));
    }
    may_go(node, record, cluster).unwrap_or_else(|| Next::Begin(node.name.clone()))
}

/// Returns what comes before a node may be taken away; `None` if it may be now.
fn may_go(node: &Seen, record: &RolloutRecord, cluster: &ClusterFacts) -> Option<Next> {
    if !node.is_control_plane {
        return None;
    }
    let others = |other: &&Seen| other.is_control_plane && other.name != node.name;
    if let Some(other) = cluster.nodes.iter().filter(others).find(|it| !it.is_ready) {
        return Some(Next::Wait(format!(
            "the control plane {} to be Ready, before {} may go",
            other.name, node.name
        )));
    }
    let (members, ready) = (cluster.members, cluster.ready_members);
    // in the middle of its change, its own member may be the one that is away; etcd itself is asked about the others
    if ready + usize::from(record.node.is_some()) < members {
        return Some(Next::Wait(format!(
            "all {members} members of etcd to be ready ({ready} are), before {} may go",
            node.name
        )));
    }
    // kubeadm restarts etcd in a moment
    let stays = matches!(record.goal, Goal::Kubernetes { .. });
    if record.accepts_downtime || stays || keeps_majority(members) {
        return None;
    }
    Some(Next::Stop(format!(
        "{}. To go on nevertheless: `firstlight rollout continue --accept-downtime`",
        downtime(members)
    )))
}

/// Returns whether etcd has a majority without one of so many members. An etcd outside of the cluster (0) does not depend on its nodes.
pub fn keeps_majority(members: usize) -> bool {
    members == 0 || members - 1 > members / 2
}

/// Returns what happens while one of so few members of etcd is away.
pub fn downtime(members: usize) -> String {
    let (many, only) = match members {
        1 => (
            "",
            ", and the disk of the only control plane opens only after `firstlight recover`",
        ),
        _ => ("s", ""),
    };
    format!(
        "etcd has {members} member{many}, and loses its majority while a control plane is away: the API server does not answer until it is \
         back{only}"
    )
}

/// Returns what is done with the node that is being changed.
fn next_of(node: &Current, record: &RolloutRecord, cluster: &ClusterFacts) -> Next {
    if record.wish == Some(RolloutWish::Abort) {
        return Next::Pause;
    }
    let seen = cluster.nodes.iter().find(|it| it.name == node.name);
    match node.step {
        NodeStep::Return | NodeStep::Keep => returned(node, seen, record, cluster),
        NodeStep::Uncordon => Next::Do(NodeStep::Uncordon),
        step => match seen {
            Some(seen) if seen.uid == node.uid => {
                // somebody let pods come back
                if step > NodeStep::Cordon && !seen.is_cordoned && seen.boot == node.boot {
                    return Next::Do(NodeStep::Cordon);
                }
                // others may have failed since this one was begun, unless it has rebooted already
                let goes = record.leaves_at(step, cluster).is_some();
                let before = goes.then(|| may_go(seen, record, cluster)).flatten();
                before.unwrap_or(Next::Do(step))
            }
            // a replacement under way, or an autoscaler that removed the node
            _ => Next::Do(NodeStep::Uncordon),
        },
    }
}

/// Returns whether the node is back, or its replacement is there.
fn returned(
    node: &Current,
    seen: Option<&Seen>,
    record: &RolloutRecord,
    cluster: &ClusterFacts,
) -> Next {
    let goal = &record.goal;
    if record.way == Way::Replaced {
        let is_replaced = seen.is_none_or(|seen| {
            // the same Node says that it is ready until its kubelet writes the ID of another boot
            seen.uid != node.uid || goal.is_reached(seen) && seen.boot != node.boot
        });
        let of_role = |it: &&Seen| it.is_control_plane == node.is_control_plane && it.is_ready;
        let ready = || cluster.nodes.iter().filter(of_role);
        let (count, with_it) = (ready().count(), ready().filter(|it| goal.is_reached(it)));
        let is_one_more = with_it.count() > node.others_had_it;
        return match (is_replaced, count >= node.ready_before && is_one_more) {
            (false, _) => Next::Wait(format!(
                "the machine of {} to be replaced by one with the new image",
                node.name
            )),
            (true, false) => Next::Wait(format!(
                "the replacement of {} to be Ready with the new image: {count} of {} nodes of its role are Ready",
                node.name, node.ready_before
            )),
            (true, true) => Next::Do(NodeStep::Uncordon),
        };
    }
    let Some(seen) = seen else {
        return Next::Stop(format!(
            "the Node {} was deleted while it was changed: if its machine is gone, `firstlight rollout continue` goes on without it",
            node.name
        ));
    };
    let is_rebooted = !seen.boot.is_empty() && seen.boot != node.boot;
    match goal.is_reached(seen) {
        true if matches!(goal, Goal::Kubernetes { .. }) && seen.is_ready => {
            Next::Do(NodeStep::Uncordon)
        }
        true if matches!(goal, Goal::Kubernetes { .. }) => {
            Next::Wait(format!("{} to be Ready", node.name))
        }
        true if node.had_it && !is_rebooted => Next::Wait(format!("{} to reboot", node.name)),
        true if node.renewed.is_empty() => Next::Proved(seen.renewed.clone()),
        true if seen.renewed == node.renewed => Next::Wait(format!(
            "the kubelet of {}, which proved the new image",
            node.name
        )),
        true if !seen.is_ready => Next::Wait(format!(
            "{}, which proved the new image, to be Ready",
            node.name
        )),
        true if record.has_trial() => Next::Do(NodeStep::Keep),
        true => Next::Do(NodeStep::Uncordon),
        false if is_rebooted && seen.is_ready && !matches!(goal, Goal::Kubernetes { .. }) => {
            Next::Stop(format!(
                "{} came back without the new image: the last image that it proved is {}",
                node.name,
                shown(&seen.image)
            ))
        }
        false => Next::Wait(match goal {
            Goal::Image { .. } => format!("{} to prove the new image", node.name),
            Goal::Kubernetes { version, .. } => {
                format!("{} to run the kubelet {version}", node.name)
            }
        }),
    }
}

/// Prepares a record for another run: what had stopped is tried again.
pub fn resume(record: &mut RolloutRecord, cluster: &ClusterFacts) {
    let has_stopped = matches!(record.state, RolloutState::Stopped(_));
    record.state = RolloutState::Running;
    record.wish = None;
    if let Goal::Image { ids, .. } = &record.goal
        && !ids.iter().all(|id| cluster.accepted.contains(id))
    {
        record.is_in_force = false;
    }
    let goal = &record.goal;
    let has_it = |name: &String| {
        let mut nodes = cluster.nodes.iter();
        nodes.any(|it| it.name == *name && goal.is_reached(it))
    };
    record.changed.retain(has_it);
    let Some(node) = &mut record.node else {
        return;
    };
    let is_in_place = record.way != Way::Replaced;
    match cluster.nodes.iter().find(|it| it.name == node.name) {
        // without it, or without a replacement: the operator knows that none comes
        None if has_stopped || is_in_place => node.step = NodeStep::Uncordon,
        // a node that is away may still come back
        Some(seen)
            if node.step == NodeStep::Return
                && is_in_place
                && seen.is_ready
                && !goal.is_reached(seen) =>
        {
            node.step = NodeStep::Cordon;
            node.boot = seen.boot.clone();
            node.renewed.clear();
            node.tries += 1;
        }
        // pods may have come back; without them these steps do nothing
        Some(seen)
            if node.step < NodeStep::Return && seen.uid == node.uid && seen.boot == node.boot =>
        {
            node.step = NodeStep::Cordon;
        }
        _ => {}
    }
}

/// Returns whether the new image leaves the policy when the rollout is aborted: no node may have it.
pub fn leaves_after_abort(record: &RolloutRecord, cluster: &ClusterFacts) -> bool {
    let Goal::Image {
        ids, was_accepted, ..
    } = &record.goal
    else {
        return false;
    };
    let is_touched = (record.node.as_ref()).is_some_and(|node| node.step >= NodeStep::Change);
    let may_have_it =
        |node: &Seen| record.goal.is_reached(node) || record.unsure.contains(&node.name);
    let joins = cluster.joining.iter().any(|(_, id)| ids.contains(id));
    // a node that has gone back may boot it again
    let was_changed = !record.changed.is_empty();
    let others = cluster.accepted.iter().any(|it| !ids.contains(it));
    let is_free = !was_accepted && !is_touched && !joins && !was_changed;
    others && is_free && !cluster.nodes.iter().any(may_have_it)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::rollout::record::{NodeStep::*, UPDATE};

    /// A node by its letter: an upper-case one is a control plane. `+` has the new image, `!` is not ready, `-` is cordoned.
    fn cluster(nodes: &str) -> ClusterFacts {
        let nodes: Vec<Seen> = nodes.split_whitespace().map(node).collect();
        let planes = || nodes.iter().filter(|it| it.is_control_plane);
        ClusterFacts {
            members: planes().count(),
            ready_members: planes().filter(|it| it.is_ready).count(),
            accepted: vec!["old".into(), "new".into()],
            joining: vec![],
            unrecorded: None,
            nodes,
        }
    }

    fn node(word: &str) -> Seen {
        let name = &word[..1];
        let is_new = word.contains('+');
        Seen {
            name: name.into(),
            uid: format!("uid of {name}"),
            is_control_plane: name.to_uppercase() == name,
            is_labelled: name.to_uppercase() == name,
            is_ready: !word.contains('!'),
            is_cordoned: word.contains('-'),
            image: if is_new { "new" } else { "old" }.into(),
            kubelet: if is_new { "v1.35.4" } else { "v1.34.4" }.into(),
            boot: "boot 1".into(),
            renewed: "at 1".into(),
        }
    }

    fn images() -> RolloutRecord {
        let goal = Goal::Image {
            ids: vec!["new".into()],
            name: "image 2".into(),
            policy: "{}".into(),
            old: vec!["old".into()],
            was_accepted: false,
        };
        let mut record = RolloutRecord::new(goal, Way::InPlace(vec!["/usr/bin/update".into()]));
        record.is_in_force = true;
        record
    }

    fn kubernetes() -> RolloutRecord {
        let goal = Goal::Kubernetes {
            version: "v1.35.4".into(),
            components: "k8s-components-a".into(),
            drains: true,
        };
        RolloutRecord::new(goal, Way::InPlace(vec![]))
    }

    fn at(mut record: RolloutRecord, name: &str, step: NodeStep) -> RolloutRecord {
        let seen = node(name);
        record.node = Some(Current {
            name: seen.name,
            uid: seen.uid,
            is_control_plane: seen.is_control_plane,
            step,
            was_cordoned: false,
            boot: seen.boot,
            had_it: false,
            others_had_it: 0,
            ready_before: 1,
            renewed: String::new(),
            tries: 1,
        });
        record
    }

    fn begins(record: &RolloutRecord, nodes: &str) -> String {
        match next(record, &cluster(nodes)) {
            Next::Begin(name) => name,
            other => format!("{other:?}"),
        }
    }

    #[test]
    fn the_policy_accepts_both_images_before_the_first_node_is_touched() {
        let mut record = images();
        record.is_in_force = false;
        assert_eq!(next(&record, &cluster("A B C d")), Next::Extend);
        record.is_in_force = true;
        let mut changed = cluster("A B C d");
        changed.accepted = vec!["old".into()];
        assert!(
            matches!(next(&record, &changed), Next::Stop(why) if why.contains("does not accept the new image"))
        );
        resume(&mut record, &changed);
        assert_eq!(next(&record, &changed), Next::Extend);
        // a version of Kubernetes changes no policy
        assert_eq!(begins(&kubernetes(), "A B C d"), "A");
    }

    #[test]
    fn images_come_to_workers_first_and_versions_to_control_planes() {
        assert_eq!(begins(&images(), "A B C d e"), "d");
        assert_eq!(begins(&images(), "A B C d+ e"), "e");
        assert_eq!(begins(&images(), "A B C d+ e+"), "A");
        assert_eq!(begins(&images(), "A+ B C d+ e+"), "B");
        assert_eq!(begins(&kubernetes(), "A B C d e"), "A");
        assert_eq!(begins(&kubernetes(), "A+ B+ C+ d e"), "d");
        // nodes that are ready come first
        assert_eq!(begins(&images(), "A B C d! e"), "e");
        assert!(begins(&images(), "A B C d! e+").contains("d is not Ready"));
    }

    #[test]
    fn a_control_plane_goes_only_while_etcd_keeps_its_majority_without_it() {
        for (nodes, expected) in [
            ("A B! C d+", "the control plane B to be Ready"),
            ("A d+", "etcd has 1 member, and loses its majority"),
            ("A B d+", "etcd has 2 members, and loses its majority"),
        ] {
            let got = begins(&images(), nodes);
            assert!(got.contains(expected), "{nodes}: {got}");
        }
        let mut accepting = images();
        accepting.accepts_downtime = true;
        assert_eq!(begins(&accepting, "A d+"), "A");
        assert_eq!(begins(&accepting, "A B d+"), "A");
        assert_eq!(begins(&kubernetes(), "A d"), "A");
        let mut starting = cluster("A B C d+");
        starting.ready_members = 2;
        assert!(
            matches!(next(&images(), &starting), Next::Wait(what) if what.contains("3 members of etcd"))
        );
        // an etcd of its own does not depend on the nodes
        (starting.members, starting.ready_members) = (0, 0);
        assert_eq!(next(&images(), &starting), Next::Begin("A".into()));
    }

    #[test]
    fn a_control_plane_does_not_go_if_another_one_has_failed_since_it_was_begun() {
        let waits = |record: &RolloutRecord| matches!(next(record, &cluster("A- B! C d+")), Next::Wait(what) if what.contains("B to be Ready"));
        let record = at(images(), "A", Reboot);
        assert_eq!(next(&record, &cluster("A- B C d+")), Next::Do(Reboot));
        assert!(waits(&record));
        // kubeadm restarts etcd
        let upgrade = at(kubernetes(), "A", Change);
        assert!(waits(&upgrade));
        assert_eq!(next(&upgrade, &cluster("A- B C d")), Next::Do(Change));
        // it may be changed meanwhile, and it may have rebooted before the command was cut off
        assert_eq!(
            next(&at(images(), "A", Change), &cluster("A- B! C")),
            Next::Do(Change)
        );
        assert_eq!(next(&record, &cluster("A-! B C d+")), Next::Do(Reboot));
        let mut rebooted = cluster("A- B! C d+");
        rebooted.nodes[0].boot = "boot 2".into();
        assert_eq!(next(&record, &rebooted), Next::Do(Reboot));
        // its own member may be the one that is away
        let mut own = cluster("A- B C d+");
        own.ready_members = 2;
        assert_eq!(next(&record, &own), Next::Do(Reboot));
    }

    #[test]
    fn no_option_lets_a_rollout_replace_the_machine_of_a_control_plane() {
        let mut record = images();
        record.way = Way::Replaced;
        record.accepts_downtime = true;
        for nodes in ["A d+", "A B d+", "A B C d+"] {
            let got = begins(&record, nodes);
            assert!(got.contains("firstlight node remove A"), "{nodes}: {got}");
        }
        assert_eq!(begins(&record, "A B C d"), "d");
    }

    #[test]
    fn a_node_is_cordoned_and_drained_again_if_somebody_let_pods_come_back() {
        for step in [Drain, Change, Reboot] {
            assert_eq!(
                next(&at(images(), "d", step), &cluster("A d")),
                Next::Do(Cordon)
            );
            assert_eq!(
                next(&at(images(), "d", step), &cluster("A d-")),
                Next::Do(step)
            );
        }
    }

    #[test]
    fn a_node_that_was_done_and_went_back_stops_the_rollout() {
        let mut record = images();
        record.changed = vec!["d".into()];
        for nodes in ["A d e", "A d! e"] {
            let got = begins(&record, nodes);
            assert!(
                got.contains("d was done, and has the image old now"),
                "{got}"
            );
        }
        resume(&mut record, &cluster("A d e"));
        assert_eq!(begins(&record, "A d e"), "d");
    }

    #[test]
    fn an_image_that_nodes_have_or_join_with_stays_in_the_policy() {
        let mut changed = cluster("A d");
        changed.accepted = vec!["new".into()];
        assert!(
            matches!(next(&images(), &changed), Next::Stop(why) if why.contains("does not accept the image old any more, which A has"))
        );
        let mut joining = cluster("A+ d+");
        joining.joining = vec![("e".into(), "old".into())];
        assert!(
            matches!(next(&images(), &joining), Next::Wait(what) if what.contains("e, which joins"))
        );
        joining.joining[0].1 = "new".into();
        assert!(matches!(next(&images(), &joining), Next::Retire(_)));
        let mut before = cluster("A d");
        before.joining = joining.joining;
        assert!(!leaves_after_abort(&images(), &before));
        let mut back = images();
        back.changed = vec!["d".into()];
        assert!(!leaves_after_abort(&back, &cluster("A d")));
    }

    #[test]
    fn nothing_is_begun_while_a_changed_node_is_not_ready() {
        let mut record = images();
        record.changed = vec!["d".into()];
        assert!(begins(&record, "A B C d+! e").contains("d, which was changed before"));
        // another one, which is new in the cluster
        assert_eq!(begins(&record, "A B C d+ e f+!"), "e");
    }

    #[test]
    fn a_node_that_an_autoscaler_adds_counts_by_its_image() {
        assert_eq!(begins(&images(), "A+ B+ C+ d+ e"), "e");
        assert_eq!(
            next(&images(), &cluster("A+ B+ C+ d+ e+")),
            Next::Retire(vec!["old".into()])
        );
    }

    #[test]
    fn the_old_images_leave_the_policy_last_and_no_others() {
        let mut all = cluster("A+ B+ C+ d+");
        all.accepted = vec!["old".into(), "of somebody else".into(), "new".into()];
        assert_eq!(next(&images(), &all), Next::Retire(vec!["old".into()]));
        all.accepted.remove(0);
        assert_eq!(next(&images(), &all), Next::Done);
        assert_eq!(next(&kubernetes(), &all), Next::Done);
        assert!(matches!(next(&images(), &cluster("")), Next::Stop(_)));
        let mut unknown = cluster("A+ B+ C+ d+");
        unknown.nodes[3].image.clear();
        assert_eq!(next(&images(), &unknown), Next::Begin("d".into()));
    }

    #[test]
    fn a_node_is_back_when_its_kubelet_lives_after_it_proved_the_image() {
        let mut record = at(images(), "d", Return);
        let is_waiting =
            |record: &RolloutRecord, nodes: &ClusterFacts, what: &str| match next(record, nodes) {
                Next::Wait(why) if why.contains(what) => {}
                other => panic!("{what}: {other:?}"),
            };
        is_waiting(&record, &cluster("A d"), "d to prove the new image");
        is_waiting(&record, &cluster("A d!"), "d to prove the new image");
        assert_eq!(next(&record, &cluster("A d+")), Next::Proved("at 1".into()));
        record.node.as_mut().unwrap().renewed = "at 1".into();
        // Kubernetes still takes it for ready
        is_waiting(&record, &cluster("A d+"), "the kubelet of d");
        let mut later = cluster("A d+!");
        later.nodes[1].renewed = "at 2".into();
        is_waiting(&record, &later, "to be Ready");
        later.nodes[1].is_ready = true;
        assert_eq!(next(&record, &later), Next::Do(Uncordon));
        let mut own = record.clone();
        own.way = Way::InPlace(UPDATE.split(' ').map(str::to_owned).collect());
        assert_eq!(next(&own, &later), Next::Do(Keep));
        // it has rebooted, and has the old image
        let mut old = cluster("A d");
        old.nodes[1].boot = "boot 2".into();
        assert!(
            matches!(next(&record, &old), Next::Stop(why) if why.contains("came back without the new image"))
        );
        old.nodes[1].is_ready = false;
        is_waiting(&record, &old, "d to prove the new image");
        assert!(
            matches!(next(&record, &cluster("A")), Next::Stop(why) if why.contains("was deleted"))
        );
        // a version of Kubernetes needs no proof
        let record = at(kubernetes(), "d", Return);
        is_waiting(&record, &cluster("A d+!"), "d to be Ready");
        assert_eq!(next(&record, &cluster("A d+")), Next::Do(Uncordon));
    }

    #[test]
    fn a_replacement_may_have_another_name_or_the_same_one() {
        let mut record = at(images(), "d", Return);
        record.way = Way::Replaced;
        record.node.as_mut().unwrap().ready_before = 2;
        let waits = |nodes: &ClusterFacts, what: &str| match next(&record, nodes) {
            Next::Wait(why) if why.contains(what) => {}
            other => panic!("{what}: {other:?}"),
        };
        waits(&cluster("A d e"), "the machine of d to be replaced");
        waits(
            &cluster("A e"),
            "the replacement of d to be Ready with the new image: 1 of 2",
        );
        waits(&cluster("A e f+!"), "1 of 2");
        // the template of the group has the old image: each replacement would be replaced again
        waits(&cluster("A e f"), "2 of 2");
        assert_eq!(next(&record, &cluster("A e f+")), Next::Do(Uncordon));
        let mut same = cluster("A d+ e");
        waits(&same, "the machine of d to be replaced");
        same.nodes[1].boot = "boot 2".into();
        assert_eq!(next(&record, &same), Next::Do(Uncordon));
        same = cluster("A d+ e");
        same.nodes[1].uid = "another".into();
        assert_eq!(next(&record, &same), Next::Do(Uncordon));
        // another node had it before
        let mut second = record.clone();
        second.node.as_mut().unwrap().others_had_it = 1;
        assert!(matches!(next(&second, &cluster("A e+ f")), Next::Wait(_)));
        assert_eq!(next(&second, &cluster("A e+ f+")), Next::Do(Uncordon));
        // an autoscaler removed it before it was changed
        for step in [Cordon, Drain, Change, Reboot] {
            let record = at(images(), "d", step);
            assert_eq!(next(&record, &cluster("A e")), Next::Do(Uncordon));
            assert_eq!(next(&record, &cluster("A d- e")), Next::Do(step));
            assert_eq!(next(&record, &same), Next::Do(Uncordon));
        }
    }

    #[test]
    fn a_node_that_may_boot_another_image_is_changed_although_it_runs_the_right_one() {
        let mut record = images();
        record.unsure.insert("d".into());
        assert_eq!(begins(&record, "A+ B+ C+ d+ e+"), "d");
        let mut record = at(record, "d", Return);
        record.node.as_mut().unwrap().had_it = true;
        let mut all = cluster("A+ d+");
        assert!(matches!(next(&record, &all), Next::Wait(what) if what == "d to reboot"));
        all.nodes[1].boot = "boot 2".into();
        assert!(matches!(next(&record, &all), Next::Proved(_)));
    }

    #[test]
    fn a_pause_comes_between_two_nodes_and_an_abort_at_once() {
        let mut record = at(images(), "d", Drain);
        record.wish = Some(RolloutWish::Pause);
        assert_eq!(next(&record, &cluster("A d-")), Next::Do(Drain));
        record.wish = Some(RolloutWish::Abort);
        assert_eq!(next(&record, &cluster("A d")), Next::Pause);
        record.node = None;
        record.wish = Some(RolloutWish::Pause);
        assert_eq!(next(&record, &cluster("A d")), Next::Pause);
    }

    #[test]
    fn a_rollout_that_goes_on_changes_a_node_again_that_came_back_as_it_was() {
        let resumed = |record: &RolloutRecord, nodes: &str| {
            let mut record = record.clone();
            record.state = RolloutState::Stopped("x".into());
            record.wish = Some(RolloutWish::Pause);
            resume(&mut record, &cluster(nodes));
            assert_eq!((&record.state, record.wish), (&RolloutState::Running, None));
            record.node.map(|node| (node.step, node.tries))
        };
        let record = at(images(), "d", Return);
        assert_eq!(resumed(&record, "A d"), Some((Cordon, 2)));
        assert_eq!(resumed(&record, "A d!"), Some((Return, 1)));
        assert_eq!(resumed(&record, "A d+"), Some((Return, 1)));
        assert_eq!(resumed(&record, "A"), Some((Uncordon, 1)));
        assert_eq!(
            resumed(&at(images(), "d", Change), "A d"),
            Some((Cordon, 1))
        );
        let mut replaced = record.clone();
        replaced.state = RolloutState::Running;
        replaced.way = Way::Replaced;
        assert_eq!(resumed(&replaced, "A d"), Some((Return, 1)));
        assert_eq!(resumed(&images(), "A d"), None);
        // nobody replaces it, and the operator goes on
        assert_eq!(resumed(&replaced, "A"), Some((Uncordon, 1)));
        resume(&mut replaced, &cluster("A"));
        assert_eq!(replaced.node.as_ref().map(|node| node.step), Some(Return));
    }

    #[test]
    fn after_an_abort_the_policy_accepts_each_image_that_a_node_may_have() {
        let leaves =
            |record: &RolloutRecord, nodes: &str| leaves_after_abort(record, &cluster(nodes));
        assert!(leaves(&images(), "A d"));
        assert!(leaves(&at(images(), "d", Drain), "A d"));
        for step in [Change, Reboot, Return, Uncordon] {
            assert!(!leaves(&at(images(), "d", step), "A d"), "{step:?}");
        }
        assert!(!leaves(&images(), "A d+"));
        // it was accepted before this rollout
        let mut back = images();
        if let Goal::Image { was_accepted, .. } = &mut back.goal {
            *was_accepted = true;
        }
        assert!(!leaves(&back, "A d"));
        // an earlier rollout of it was aborted in the middle of a node
        let mut again = images();
        again.unsure.insert("d".into());
        assert!(!leaves(&again, "A d") && leaves(&again, "A e"));
        assert!(!leaves(&kubernetes(), "A d"));
        let mut only = cluster("A d");
        only.accepted = vec!["new".into()];
        assert!(
            !leaves_after_abort(&images(), &only),
            "no image would be left"
        );
    }
}
