//! The operator's files.

use base::text::hex;
use sys::process;

use super::super::diagnosis::Diagnosis;
use super::super::gathered::Gathered;

const GROUP_AND_OTHERS: u32 = 0o077;
const MAY_WRITE: u32 = 0o022;

/// Nobody else can read the operator's secrets, or change the policy.
pub fn files(facts: &Gathered) -> Vec<Diagnosis> {
    let mut found = vec![];
    for file in &facts.folder.files {
        let path = file.path.display().to_string();
        let mode = file.mode;
        if file.is_secret && mode & GROUP_AND_OTHERS != 0 {
            found.push(Diagnosis::error(
                &path,
                format!("other users may read or change it (mode {mode:04o}, expected 0600)"),
                format!(
                    "chmod 600 {path}, and consider who may have read it (docs/day-two/secrets.md)"
                ),
            ));
        } else if mode & MAY_WRITE != 0 {
            found.push(Diagnosis::error(
                &path,
                format!("other users may change it (mode {mode:04o}), and it decides who gets the keys of the cluster"),
                format!("check its content: firstlight policy show {path}; then chmod go-w {path}"),
            ));
        }
        if ![0, process::user()].contains(&file.owner) {
            found.push(Diagnosis::warning(
                &path,
                format!("it belongs to the user {}, who may change it", file.owner),
                format!("check its content, then chown $USER {path}"),
            ));
        }
    }
    for (path, why) in &facts.folder.unusable {
        found.push(Diagnosis::error(
            path.display().to_string(),
            why,
            "take it from your backup, or make it again (docs/day-two/secrets.md#other-files-are-lost)",
        ));
    }
    if !facts.folder.has_master_secret {
        found.push(Diagnosis::note(
            "the master secret",
            "its file is not here, so this was not compared with the cluster",
            "nothing, if you keep it elsewhere or as shares: without it a cluster whose nodes were all off is lost (docs/day-two/secrets.md)",
        ));
    }
    found
}

/// The state file and the master secret are of this cluster.
pub fn state(facts: &Gathered) -> Vec<Diagnosis> {
    let folder = &facts.folder;
    let mut found = vec![];
    if let (Some(derived), Some(cluster)) = (folder.derived, folder.cluster)
        && derived != cluster
    {
        found.push(Diagnosis::error(
            "the master secret",
            format!(
                "with the salt in the state file it makes the cluster {}, and not the cluster {}: it recovers no node of the latter",
                hex(&derived),
                hex(&cluster)
            ),
            "find the right file now: the cluster gives the master secret to nobody (docs/day-two/secrets.md#the-master-secret-is-lost)",
        ));
    }
    if folder.cluster.is_none() {
        let what = if folder.has_state {
            "it does not have the ID of the cluster"
        } else {
            "it does not exist"
        };
        found.push(Diagnosis::warning(
            "the state file",
            format!("{what}, so no node can prove that it is a member of yours"),
            "give --state or --cluster-id, or make the file again (docs/day-two/secrets.md#other-files-are-lost)",
        ));
    }
    let in_cluster = facts.view.objects.salt.as_deref();
    if let (Some(own), Some(in_cluster)) = (folder.salt.as_deref(), in_cluster)
        && own != in_cluster
    {
        found.push(Diagnosis::error(
            "the state file",
            "its measurement salt is not that of the ConfigMap kube-system/join-config: the file is of another cluster",
            "use the folder of this cluster, or make the file again (docs/day-two/secrets.md#other-files-are-lost)",
        ));
    }
    found
}
