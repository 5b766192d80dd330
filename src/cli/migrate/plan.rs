//! Says what a move would change, what stays, what cannot be kept, and what blocks it.

use std::fmt::{self, Write};
use std::time::SystemTime;

use kubernetes::constellation::node_version::{
    CLUSTER_VERSION, COMPONENTS, IMAGE, IMAGE_VERSION, NodeVersion,
};
use kubernetes::parameters::KubernetesVersion;
use kubernetes::services::Maker;
use serde_json::{Value, json};
use verifier::sources::offline;
use verifier::{Policy, RegisterNames, Variant};

use super::facts::{ClusterNode, Facts};
use super::parts::{self, FoundPart};
use super::wanted::Wanted;
use super::workspace::Workspace;
use crate::cluster::apply::undecided;
use crate::shell::{
    error::Error,
    output::{Output, say_all},
    progress::printable,
};
use crate::trust::policy::found;

/// The minor version of Kubernetes from which the nodes of Firstlight can join.
const OLDEST_MINOR: u32 = 31;

/// What stands in the way, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    what: String,
    then: String,
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.then)
    }
}

/// The plan of a move.
pub struct Plan<'a> {
    facts: &'a Facts,
    changes: Vec<String>,
    stays: Vec<FoundPart>,
    lost: Vec<String>,
    notes: Vec<String>,
    missing: Vec<String>,
    blocks: Vec<Block>,
}

/// Makes the plan of a move to what the operator wants.
pub fn plan<'a>(facts: &'a Facts, workspace: &Workspace, wanted: &Wanted) -> Plan<'a> {
    Plan {
        facts,
        changes: changes(facts, wanted),
        stays: parts::found(&facts.workloads, &facts.old_clients.drivers),
        lost: lost(facts, workspace),
        notes: notes(facts, workspace),
        missing: wanted.missing(facts),
        blocks: blocks(facts, workspace, wanted),
    }
}

fn changes(facts: &Facts, wanted: &Wanted) -> Vec<String> {
    let given = |value: &Option<String>, option: &str| match value {
        Some(value) => value.clone(),
        None => format!("the one of {option}"),
    };
    let nodes = facts.nodes.len();
    let node_image = given(&wanted.node_image, "--node-image");
    let old_image = facts.node_version.as_ref().map(|it| it.field(IMAGE));
    let moved = match (facts.operator_moves_nodes(), old_image) {
        (true, Some(image)) => format!(
            "nodes: NodeVersion's image becomes {node_image} (now {image}), and Constellation's node operator replaces {nodes} nodes, \
             one at a time, control planes first; its pod no longer needs the upgrade agent, which nodes of Firstlight do not have"
        ),
        _ => format!(
            "nodes: you start {nodes} nodes with the new image, one after the other; the command says which are left"
        ),
    };
    let old_clients = match &wanted.old_clients {
        Some(until) if until.to_string().is_empty() => "clients without a token get no keys".into(),
        Some(until) => format!(
            "clients without a token get keys of volumes through {until}, and of state disks that have no record yet"
        ),
        None => {
            "clients without a token get keys of volumes through the day of --old-clients-until"
                .to_owned()
        }
    };
    vec![
        "save: everything that the move changes goes into firstlight-migration.json in this folder (mode 600) and into the Secret \
         kube-system/firstlight-migration, and the cluster's measurement salt into firstlight-state.json"
            .into(),
        format!(
            "services: the DaemonSets join-service, key-service and member-controller run {}, with their Services, accounts and roles; {old_clients}",
            given(&wanted.image, "--image")
        ),
        "policy: join-config also accepts the new image, beside the present one".into(),
        moved,
        "end, only with --end: clients without a token get no keys, disks without a record stay closed, and join-config accepts only \
         the new image"
            .into(),
    ]
}

fn lost(facts: &Facts, workspace: &Workspace) -> Vec<String> {
    let mut lost = vec![
        "Constellation's command: its `apply` and `upgrade` would put Constellation's services back, and its `recover` does not send \
         the measurement salt, without which nodes of Firstlight do not open their disks. Keep its files, and use `firstlight`"
            .to_owned(),
        "kubelets' serving certificates no longer prove a client, and SSH host certificates get an authority of their own \
         (docs/migration.md)"
            .into(),
    ];
    if facts.node_version.is_some() {
        lost.push(
            "upgrades of Kubernetes by the node operator: nodes of Firstlight have no upgrade agent. `firstlight upgrade` drives \
             NodeVersion instead"
                .into(),
        );
    }
    if workspace.has_terraform {
        lost.push(
            "Constellation's command as the driver of constellation-terraform: keep the folder, and change the cloud's resources with \
             Terraform itself. `constellation terminate` still deletes all of them"
                .into(),
        );
    }
    lost
}

fn notes(facts: &Facts, workspace: &Workspace) -> Vec<String> {
    let mut notes = Vec::new();
    let variant = (facts.variant.as_deref()).and_then(|name| Variant::named(name).ok());
    let policy = facts
        .policy
        .as_deref()
        .and_then(|text| Policy::from_json(text).ok());
    if variant.is_some_and(|variant| variant.judges("snp")) {
        notes.push(
            "the new services need AMD's list of revoked certificates, which Constellation never reads: let the control planes reach \
             kdsintf.amd.com, or give them a mirror (docs/collateral.md)"
                .to_owned(),
        );
    }
    if policy.is_some_and(|policy| policy.snp().asks_microsoft()) {
        notes.push("the policy asks Microsoft about unknown firmware: the control planes must reach the policy's maaURL".into());
    }
    if let Some(Ok(config)) = &workspace.config
        && let (Some(own), Some(there)) = (config.variant, &facts.variant)
        && own != there
    {
        notes.push(format!(
            "constellation-conf.yaml (image {}) is for {own}, and the cluster's nodes attest as {there}: the cluster counts",
            config.image
        ));
    }
    let planes = facts
        .nodes
        .iter()
        .filter(|node| node.is_control_plane)
        .count();
    if planes == 1 && !facts.operator_moves_nodes() {
        notes.push(
            "the only control plane gives no keys while it restarts: open its disk by `firstlight recover --migrate`".into(),
        );
    }
    if facts.operator.is_some_and(|operator| !operator.is_on) {
        notes.push(
            "the node operator is scaled to 0: it replaces no nodes, and you start them yourself"
                .into(),
        );
    }
    let tired: Vec<_> = facts
        .nodes
        .iter()
        .filter(|node| !node.is_ready && !node.is_control_plane)
        .collect();
    if !tired.is_empty() {
        notes.push(format!("not ready: {}", names(tired)));
    }
    notes
}

fn names<'a>(nodes: impl IntoIterator<Item = &'a ClusterNode>) -> String {
    let names: Vec<_> = nodes.into_iter().map(|node| node.name.as_str()).collect();
    names.join(", ")
}

/// What blocks a move that has not begun.
pub fn blocks(facts: &Facts, workspace: &Workspace, wanted: &Wanted) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut block = |what: String, then: &str| {
        blocks.push(Block {
            what,
            then: then.into(),
        });
    };
    match facts.maker {
        Some(Maker::Constellation) => {}
        Some(Maker::Firstlight) => block(
            "the key service is one of Firstlight".into(),
            "the services have moved already: continue with docs/migration.md, \"By hand\"",
        ),
        None => block(
            "there is no DaemonSet kube-system/key-service".into(),
            "this is no cluster of Constellation, or its key service was deleted: check the kubeconfig",
        ),
    }
    if let Err(error) = facts.version.parse::<KubernetesVersion>() {
        block(
            format!("Kubernetes: {error}"),
            &format!(
                "a version before v1.{OLDEST_MINOR} is upgraded with Constellation's command first, one minor version after the other; a \
                 later one needs a later firstlight"
            ),
        );
    }
    if let Some(version) = &facts.node_version {
        of_node_version(version, facts, &mut block);
    }
    let tired: Vec<_> = facts
        .nodes
        .iter()
        .filter(|node| !node.is_ready && node.is_control_plane)
        .collect();
    if !tired.is_empty() {
        block(
            format!("control planes are not ready: {}", names(tired)),
            "repair them first: etcd needs a majority while control planes are replaced",
        );
    }
    for (name, path) in &facts.foreign_files {
        block(
            format!(
                "kubeadm-config gives the API server the argument {name} with the file {path}, which no node of Firstlight has"
            ),
            "remove the argument and its volume: kubectl -n kube-system edit configmap kubeadm-config",
        );
    }
    of_policy(facts, wanted, &mut block);
    for what in workspace.contradictions(
        facts.salt.as_deref(),
        facts.master_secret.as_deref().map(Vec::as_slice),
    ) {
        block(
            what,
            "run the command in the folder of this cluster, or name the file by --master-secret",
        );
    }
    if facts.master_secret.is_none() {
        block(
            "the cluster has no Secret kube-system/constellation-mastersecret".into(),
            "restore it from the master secret of the cluster: no node could restart now",
        );
    }
    of_clients(facts, wanted, &mut block);
    blocks
}

/// Adds what is undecided about nodes and clients of Constellation.
fn of_clients(facts: &Facts, wanted: &Wanted, block: &mut impl FnMut(String, &str)) {
    let now = SystemTime::now();
    if wanted.migration.is_some_and(|until| !until.is_on(now)) {
        block(
            "the day of --migrate-until is over".into(),
            "name one by which every node runs the new image: a node of Constellation that restarts would get no key",
        );
    }
    if let Some(why) = &facts.open_network
        && wanted.old_clients.is_some_and(|until| until.is_on(now))
    {
        block(
            format!("clients without a token are not served, because {why}"),
            "let Cilium replace kube-proxy, or give --old-clients-until never (docs/storage.md)",
        );
    }
    let version = facts.node_version.as_ref();
    if wanted.node_image.is_some() && !version.is_some_and(NodeVersion::names_an_image) {
        block(
            "--node-image has no effect: NodeVersion names no image in this cloud".into(),
            "leave it out",
        );
    }
    if facts.maker != Some(Maker::Constellation) {
        return;
    }
    let grants = wanted.grants.as_deref();
    if let Some((what, then)) = undecided(&facts.old_clients, wanted.old_clients, grants) {
        block(what, &then);
    }
}

/// Adds what the node operator is doing.
fn of_node_version(version: &NodeVersion, facts: &Facts, block: &mut impl FnMut(String, &str)) {
    let wanted = version.field(CLUSTER_VERSION);
    if version.is_upgrading || wanted != facts.version && facts.operator_moves_nodes() {
        block(
            format!(
                "Kubernetes is being upgraded: NodeVersion has {wanted}, and the API server {}",
                facts.version
            ),
            "wait until both are the same, and NodeVersion's status has no active upgrade",
        );
    }
    if version.is_outdated || !facts.pending.is_empty() {
        block(
            format!(
                "the node operator replaces nodes: {}",
                if facts.pending.is_empty() {
                    "some differ from NodeVersion".to_owned()
                } else {
                    format!("it waits for {}", facts.pending.join(", "))
                }
            ),
            "wait until NodeVersion's condition Outdated is False and there is no PendingNode",
        );
    }
    if !facts.joining.is_empty() {
        block(
            format!(
                "nodes have tickets and have not joined: {}",
                facts.joining.join(", ")
            ),
            "wait until they are nodes, or delete the machine and its JoiningNode",
        );
    }
    let other: Vec<_> = facts
        .groups
        .iter()
        .filter(|group| {
            version.names_an_image() && !group.image.eq_ignore_ascii_case(version.field(IMAGE))
        })
        .map(|group| format!("{} ({})", group.id, group.image))
        .collect();
    if !other.is_empty() {
        block(
            format!(
                "groups of machines have another image than NodeVersion: {}",
                other.join(", ")
            ),
            "wait for the node operator, or look into its log",
        );
    }
}

/// Adds what is wrong with the policies.
fn of_policy(facts: &Facts, wanted: &Wanted, block: &mut impl FnMut(String, &str)) {
    let variant = match facts.variant.as_deref().map(Variant::named) {
        Some(Ok(variant)) => variant,
        Some(Err(error)) => {
            return block(
                error.to_string(),
                "a machine of this variant proves nothing, or is not known: it cannot be moved",
            );
        }
        None => {
            return block(
                "the DaemonSet kube-system/join-service has no --attestation-variant".into(),
                "restore Constellation's join service",
            );
        }
    };
    if facts.salt.as_deref().is_none_or(|salt| salt.len() != 32) {
        block(
            "join-config has no measurementSalt of 32 bytes".into(),
            "restore it from constellation-state.yaml: without it nodes do not find their cluster's ID",
        );
    }
    let judged = |text: &str| {
        let policy = Policy::from_json(text).map_err(Error::content)?;
        endorsement::validator(variant, policy, &offline())
            .map(drop)
            .map_err(Error::content)
    };
    match facts.policy.as_deref().map(judged) {
        None => block(
            "join-config has no attestationConfig".into(),
            "restore it: constellation apply",
        ),
        Some(Err(error)) => block(
            format!("the policy in join-config: {error}"),
            "correct it: kubectl -n kube-system edit configmap join-config; `firstlight verify --plain` shows a node's versions",
        ),
        Some(Ok(())) => {}
    }
    if let Some(policy) = &wanted.policy {
        let errors = match Policy::from_json(&policy.text) {
            Ok(policy) if policy.variant().is_some_and(|name| name != variant.name) => {
                vec![format!(
                    "it is for another attestation variant than {}, which the cluster's nodes have",
                    variant.name
                )]
            }
            Ok(policy) => found(&policy, variant).errors,
            Err(error) => vec![error.to_string()],
        };
        for error in errors {
            block(
                format!("{}: {error}", policy.path.display()),
                "make it of the new image: firstlight measure IMAGE (docs/measure.md)",
            );
        }
    }
}

impl Plan<'_> {
    /// Prints the plan. Fails if something blocks the move.
    pub fn print(&self, output: Output) -> Result<(), Error> {
        output.json(&self.json())?;
        if let Output::Text = output {
            say_all(&self.text())?;
        }
        match self.blocks.len() {
            0 => Ok(()),
            count => Err(Error::blocked(format!(
                "{count} {} the move: see the plan. Nothing was changed",
                if count == 1 {
                    "thing blocks"
                } else {
                    "things block"
                }
            ))),
        }
    }

    fn text(&self) -> String {
        let mut text = self.head();
        let mut section = |title: &str, lines: Vec<String>| {
            if lines.is_empty() {
                return;
            }
            // writing to a string does not fail
            let _ = writeln!(text, "\n{title}");
            for line in lines {
                let _ = writeln!(text, "  - {}", printable(&line));
            }
        };
        section("What changes, in this order", self.changes.clone());
        section(
            "What stays, and who patches it from now on",
            self.stays.iter().map(FoundPart::text).collect(),
        );
        section("What cannot be kept", self.lost.clone());
        section("Mind", self.notes.clone());
        section(
            "What `firstlight migrate apply` needs",
            self.missing.clone(),
        );
        let blocks = self.blocks.iter();
        section(
            "What blocks the move",
            blocks.map(ToString::to_string).collect(),
        );
        if self.blocks.is_empty() {
            text.push_str("\nNothing blocks the move. Nothing was changed.\n");
        }
        text
    }

    /// Returns what the cluster is. The API server has these texts from others, such as kubelets.
    fn head(&self) -> String {
        let facts = self.facts;
        let mut lines = vec![format!(
            "{}: Kubernetes {}, attestation variant {}",
            facts.server,
            facts.version,
            facts.variant.as_deref().unwrap_or("unknown")
        )];
        lines.extend(facts.node_version.as_ref().map(|version| {
            format!(
                "NodeVersion: image {} ({}), Kubernetes {}",
                version.field(IMAGE),
                version.field(IMAGE_VERSION),
                version.field(CLUSTER_VERSION)
            )
        }));
        if let Some(Ok(policy)) = facts.policy.as_deref().map(Policy::from_json) {
            lines.push(format!("Policy: {}", registers(&policy)));
        }
        lines.extend(facts.nodes.iter().map(|node| {
            let ready = if node.is_ready { "ready" } else { "not ready" };
            format!(
                "{}: {}, {}, {ready} {}",
                node.name,
                node.role(),
                node.kubelet,
                node.image
            )
        }));
        lines.iter().map(|line| printable(line) + "\n").collect()
    }

    fn json(&self) -> Value {
        let facts = self.facts;
        let nodes = facts.nodes.iter().map(|node| {
            json!({
                "name": node.name,
                "role": node.role(),
                "ready": node.is_ready,
                "kubelet": node.kubelet,
                "image": node.image,
            })
        });
        let version = facts.node_version.as_ref().map(|version| {
            json!({
                "image": version.field(IMAGE),
                "imageVersion": version.field(IMAGE_VERSION),
                "components": version.field(COMPONENTS),
                "kubernetes": version.field(CLUSTER_VERSION),
                "upgrading": version.is_upgrading,
                "outdated": version.is_outdated,
            })
        });
        let blocks = self.blocks.iter();
        json!({
            "cluster": {
                "server": facts.server,
                "kubernetes": facts.version,
                "variant": facts.variant,
                "nodeVersion": version,
                "operatorMovesNodes": facts.operator_moves_nodes(),
                "nodes": nodes.collect::<Vec<Value>>(),
            },
            "changes": self.changes,
            "stays": self.stays.iter().map(FoundPart::json).collect::<Vec<Value>>(),
            "lost": self.lost,
            "notes": self.notes,
            "missing": self.missing,
            "blocks": blocks.map(|block| json!({"what": block.what, "then": block.then})).collect::<Vec<Value>>(),
        })
    }
}

/// Returns which registers a policy enforces.
fn registers(policy: &Policy) -> String {
    let image = &policy.images()[0];
    let named = |is_warning: bool| -> Vec<String> {
        let of = image.measurements().iter();
        let of = of.filter(|(_, it)| it.warn_only == is_warning);
        of.map(|(index, _)| policy.registers().name(*index))
            .collect()
    };
    let images = match policy.images().len() {
        1 => String::new(),
        count => format!("{count} images, "),
    };
    match named(true)[..] {
        [] => format!("{images}enforces {}", named(false).join(", ")),
        ref warned => format!(
            "{images}enforces {}; only warns of {}",
            named(false).join(", "),
            warned.join(", ")
        ),
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::migrate::facts::{FoundWorkload, Group, NodeOperator};
    use base::crypto::Secret;
    use base::master_secret::MasterSecret;
    use kubernetes::services::RefusedOldClients;
    use zeroize::Zeroizing;

    const POLICY: &str = r#"{"measurements":{"4":{"expected":"1111111111111111111111111111111111111111111111111111111111111111","warnOnly":false},"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false}}}"#;

    fn node(name: &str, is_control_plane: bool) -> ClusterNode {
        ClusterNode {
            name: name.into(),
            is_control_plane,
            is_ready: true,
            kubelet: "v1.31.13".into(),
            image: "ami-old".into(),
        }
    }

    fn version(spec: Value, status: Value) -> NodeVersion {
        NodeVersion::of(&json!({"spec": spec, "status": status}))
    }

    fn facts() -> Facts {
        let spec = json!({"image": "ami-old", "imageVersion": "v2.16.4", "kubernetesClusterVersion": "v1.31.13"});
        Facts {
            server: "https://192.0.2.1:6443".into(),
            version: "v1.31.13".into(),
            maker: Some(Maker::Constellation),
            variant: Some("qemu-vtpm".into()),
            policy: Some(POLICY.into()),
            salt: Some(vec![7; 32]),
            master_secret: Some(Zeroizing::new(vec![0; 32])),
            node_version: Some(version(spec, json!({}))),
            groups: vec![Group {
                id: "g".into(),
                image: "AMI-OLD".into(),
            }],
            pending: vec![],
            joining: vec![],
            operator: Some(NodeOperator {
                is_on: true,
                needs_agent: true,
            }),
            nodes: vec![node("plane-0", true), node("worker-0", false)],
            old_clients: RefusedOldClients::default(),
            workloads: vec![],
            open_network: None,
            foreign_files: vec![],
        }
    }

    fn workspace() -> Workspace {
        let secret = || Secret::new(vec![0; 32]);
        Workspace {
            master_secret: Ok(MasterSecret::new(secret(), secret()).unwrap()),
            state: None,
            config: None,
            has_terraform: false,
        }
    }

    #[test]
    fn no_text_of_the_cluster_makes_a_line_of_the_plan() {
        const FORGED: &str = "v1\nNothing blocks the move. Nothing was changed.\x1b[2J";
        let mut facts = facts();
        for node in &mut facts.nodes {
            (node.kubelet, node.image) = (FORGED.into(), FORGED.into());
            (node.name, node.is_ready) = (FORGED.into(), false);
        }
        let spec =
            json!({"image": FORGED, "imageVersion": FORGED, "kubernetesClusterVersion": FORGED});
        facts.node_version = Some(version(spec, json!({})));
        facts.groups[0].id = FORGED.into();
        facts.pending = vec![FORGED.into()];
        facts.workloads = vec![FoundWorkload {
            place: FORGED.into(),
            name: "cilium".into(),
            image: FORGED.into(),
        }];
        let text = plan(&facts, &workspace(), &Wanted::default()).text();
        assert!(text.contains("v1\\u000aNothing"), "{text}");
        let forged = |line: &str| line.starts_with("Nothing") || line.contains('\x1b');
        assert!(!text.lines().any(forged), "{text}");
    }

    #[test]
    fn each_thing_that_blocks_a_move_is_named_and_only_that() {
        let of = |facts: &Facts| blocks(facts, &workspace(), &Wanted::default());
        assert_eq!(of(&facts()), []);
        type Change = fn(&mut Facts);
        let cases: [(Change, &str); 17] = [
            (
                |it| it.maker = Some(Maker::Firstlight),
                "is one of Firstlight",
            ),
            (|it| it.maker = None, "no DaemonSet kube-system/key-service"),
            (
                |it| {
                    it.version = "v1.30.14".into();
                    it.node_version = None;
                },
                "Kubernetes v1.30.14 is not supported",
            ),
            (
                |it| it.version = "v1.32.9".into(),
                "is being upgraded: NodeVersion has v1.31.13, and the API server v1.32.9",
            ),
            (
                |it| it.node_version.as_mut().unwrap().is_upgrading = true,
                "is being upgraded",
            ),
            (
                |it| it.node_version.as_mut().unwrap().is_outdated = true,
                "replaces nodes: some differ",
            ),
            (|it| it.pending = vec!["n".into()], "it waits for n"),
            (|it| it.joining = vec!["n".into()], "have not joined: n"),
            (|it| it.groups[0].image = "ami-1".into(), "g (ami-1)"),
            (
                |it| it.nodes[0].is_ready = false,
                "control planes are not ready: plane-0",
            ),
            (
                |it| {
                    it.foreign_files = vec![(
                        "egress-selector-config-file".into(),
                        "/etc/kubernetes/e.yaml".into(),
                    )]
                },
                "egress-selector-config-file",
            ),
            (|it| it.variant = Some("dummy".into()), "dummy"),
            (|it| it.variant = None, "--attestation-variant"),
            (
                |it| it.salt = Some(vec![7; 31]),
                "measurementSalt of 32 bytes",
            ),
            (|it| it.policy = None, "no attestationConfig"),
            (
                |it| it.master_secret = None,
                "no Secret kube-system/constellation-mastersecret",
            ),
            (
                |it| it.old_clients.drivers = vec!["kube-system/csi".into()],
                "kube-system/csi mount volumes",
            ),
        ];
        for (change, expected) in cases {
            let mut changed = facts();
            change(&mut changed);
            let found = of(&changed);
            assert!(
                found.len() == 1 && found[0].what.contains(expected),
                "{expected}: {found:?}"
            );
        }
    }

    #[test]
    fn dates_that_are_over_and_a_network_that_is_open_block_a_move() {
        let day = |day: &str| Some(day.parse().unwrap());
        let (over, later) = (day("2026-01-31"), day("2099-12-31"));
        let mut open = facts();
        open.open_network = Some("there is no ConfigMap".into());
        for (facts, migration, old_clients, expected) in [
            (&facts(), later, later, None),
            (&facts(), over, None, Some("--migrate-until is over")),
            (&facts(), day(""), None, Some("--migrate-until is over")),
            (&open, later, later, Some("because there is no ConfigMap")),
            (&open, later, day(""), None),
        ] {
            let wanted = Wanted {
                migration,
                old_clients,
                ..Wanted::default()
            };
            let found = blocks(facts, &workspace(), &wanted);
            assert_eq!(found.len(), usize::from(expected.is_some()), "{found:?}");
            if let Some(expected) = expected {
                assert!(found[0].what.contains(expected), "{found:?}");
            }
        }
    }

    #[test]
    fn a_version_that_nobody_has_resolved_blocks_a_move() {
        let mut changed = facts();
        changed.variant = Some("gcp-sev-snp".into());
        let latest = r#"{"bootloaderVersion":"latest","teeVersion":"latest","snpVersion":"latest","microcodeVersion":"latest","#;
        changed.policy = Some(POLICY.replacen('{', latest, 1));
        let found = blocks(&changed, &workspace(), &Wanted::default());
        assert!(
            found.len() == 1
                && found[0]
                    .what
                    .contains("bootloaderVersion: \"latest\" is not a version"),
            "{found:?}"
        );
    }

    #[test]
    fn nodes_are_moved_by_the_node_operator_only_where_it_knows_the_cloud_and_runs() {
        let told = |facts: &Facts| changes(facts, &Wanted::default())[3].clone();
        assert!(told(&facts()).contains("(now ami-old)"));
        let mut other = facts();
        other.operator.as_mut().unwrap().is_on = false;
        assert!(told(&other).contains("you start 2 nodes"));
        let mut other = facts();
        other.node_version = Some(version(json!({"image": "unsupportedCSP"}), json!({})));
        assert!(told(&other).contains("you start 2 nodes"));
    }
}
