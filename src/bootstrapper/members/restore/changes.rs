//! Which permissions and settings a snapshot changes, compared with the last known data of etcd on this
//! node: roles and their bindings, admission, aggregated APIs, and our own settings and records.
//!
//! Each object is stored by Kubernetes under `/registry`, and the key has its kind and its name. So keys
//! and hashes of values say what is new, what is gone and what is different. What an object says is
//! not shown: the operator reads it in the cluster afterwards.

use std::fmt;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use kubernetes::machine_record::{DISK_RECORD_PREFIX, NODE_RECORD_PREFIX};

use super::database::{self, StoredObjects};
use super::failed_check::{FailedCheck, failed_check};
use super::manifest::shown;

/// The keys by their beginning, and what people call such an object.
const KINDS: [(&str, &str); 13] = [
    ("/registry/clusterroles/", "ClusterRole"),
    ("/registry/clusterrolebindings/", "ClusterRoleBinding"),
    ("/registry/roles/", "Role"),
    ("/registry/rolebindings/", "RoleBinding"),
    (
        "/registry/validatingadmissionpolicies/",
        "ValidatingAdmissionPolicy",
    ),
    (
        "/registry/validatingadmissionpolicybindings/",
        "ValidatingAdmissionPolicyBinding",
    ),
    (
        "/registry/mutatingadmissionpolicies/",
        "MutatingAdmissionPolicy",
    ),
    (
        "/registry/mutatingadmissionpolicybindings/",
        "MutatingAdmissionPolicyBinding",
    ),
    (
        "/registry/validatingwebhookconfigurations/",
        "ValidatingWebhookConfiguration",
    ),
    (
        "/registry/mutatingwebhookconfigurations/",
        "MutatingWebhookConfiguration",
    ),
    (
        "/registry/apiregistration.k8s.io/apiservices/",
        "APIService",
    ),
    ("/registry/daemonsets/kube-system/", "DaemonSet"),
    (CONFIG_MAPS, "ConfigMap"),
];
const CONFIG_MAPS: &str = "/registry/configmaps/kube-system/";
/// The ConfigMap with the policy, and those whose programs new nodes run.
const JOIN_CONFIG: &str = "join-config";
const COMPONENTS: &str = "k8s-components-";

/// How an object changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// The snapshot has it, and the data on this node do not.
    Added,
    /// The data on this node have it, and the snapshot does not.
    Removed,
    /// Both have it, and it is not the same.
    Changed,
}

/// The changes, in the order of the keys.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes(pub Vec<(String, Change)>);

impl Changes {
    /// Compares a snapshot with a database of etcd. The error is a sentence.
    pub fn read(snapshot: &File, present: &Path) -> Result<Changes, FailedCheck> {
        let objects = |file: &File| database::objects(BufReader::new(file), &is_wanted);
        let snapshot = objects(snapshot).map_err(|why| failed_check!("the snapshot: {why}"))?;
        let here = File::open(present).map_err(|error| failed_check!("{error}"));
        let here = here.and_then(|file| objects(&file));
        let here = here.map_err(|why| failed_check!("{}: {why}", present.display()))?;
        Ok(Changes::of(&snapshot, &here))
    }

    fn of(snapshot: &StoredObjects, present: &StoredObjects) -> Changes {
        let added = snapshot.iter().filter_map(|(key, hash)| {
            let change = match present.get(key) {
                None => Change::Added,
                Some(before) if before != hash => Change::Changed,
                Some(_) => return None,
            };
            Some((key.clone(), change))
        });
        let removed = present.keys().filter(|key| !snapshot.contains_key(*key));
        let removed = removed.map(|key| (key.clone(), Change::Removed));
        let mut all: Vec<_> = added.chain(removed).collect();
        all.sort();
        Changes(all)
    }
}

/// The ConfigMaps that decide which machines and servers are trusted.
const OWN: [&str; 4] = [
    JOIN_CONFIG,
    "join-removed-nodes",
    "key-service-ca",
    "kubeadm-config",
];

fn is_wanted(key: &str) -> bool {
    match key.strip_prefix(CONFIG_MAPS) {
        Some(name) => {
            let own = [NODE_RECORD_PREFIX, DISK_RECORD_PREFIX, COMPONENTS];
            OWN.contains(&name) || own.iter().any(|prefix| name.starts_with(prefix))
        }
        None => KINDS.iter().any(|(prefix, _)| key.starts_with(prefix)),
    }
}

impl fmt::Display for Changes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str(
                "Compared with etcd's data on this node, it changes no role, binding, admission policy, webhook or record",
            );
        }
        f.write_str(
            "Compared with etcd's data on this node, it changes permissions and settings:",
        )?;
        for (prefix, kind) in KINDS {
            let of_kind = |(key, change): &(String, Change)| {
                Some((key.strip_prefix(prefix)?.to_owned(), *change))
            };
            for (name, change) in self.0.iter().filter_map(of_kind) {
                let how = match change {
                    Change::Added => "new",
                    Change::Removed => "gone",
                    Change::Changed => "different",
                };
                write!(f, "\n  {how}: {kind} {}", shown(&name))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_change_of_rights_is_named() {
        let objects = |names: &[(&str, u8)]| -> StoredObjects {
            let all = names.iter().filter(|(key, _)| is_wanted(key));
            all.map(|(key, byte)| ((*key).to_owned(), [*byte; 32]))
                .collect()
        };
        let present = objects(&[
            ("/registry/clusterroles/admin", 1),
            ("/registry/validatingadmissionpolicies/firstlight-nodes", 1),
            ("/registry/configmaps/kube-system/join-config", 1),
            ("/registry/configmaps/kube-system/join-node-a", 1),
            ("/registry/configmaps/default/join-config", 1),
            ("/registry/secrets/kube-system/a", 1),
        ]);
        let snapshot = objects(&[
            ("/registry/clusterroles/admin", 2),
            ("/registry/clusterrolebindings/attacker\u{1b}[2K", 1),
            ("/registry/rolebindings/kube-system/b", 1),
            ("/registry/configmaps/kube-system/join-config", 1),
            ("/registry/configmaps/kube-system/other", 1),
        ]);
        let said = Changes::of(&snapshot, &present).to_string();
        let lines: Vec<_> = said.lines().skip(1).map(str::trim).collect();
        assert_eq!(
            lines,
            [
                "different: ClusterRole admin",
                "new: ClusterRoleBinding attacker?[2K",
                "new: RoleBinding kube-system/b",
                "gone: ValidatingAdmissionPolicy firstlight-nodes",
                "gone: ConfigMap join-node-a",
            ]
        );
        let same = Changes::of(&present, &present);
        assert!(same.to_string().contains("changes no role"));
    }
}
