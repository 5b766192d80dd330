//! Restores what a move has changed, the last step first.

use kubernetes::constellation::node_version::{COMPONENTS, NodeVersion};
use kubernetes::parameters::KubernetesVersion;
use kubernetes::services::{self, InstallProgress, Phase, master_secret};
use serde_json::Value;

use super::facts;
use super::nodes;
use super::record::{MigrationRecord, MoveStep, Texts};
use super::steps::{Move, check_day, moves_nodes};
use crate::cluster::apply;
use crate::shell::{error::Error, interrupt};
use crate::trust::policy::both_images;

impl Move<'_> {
    /// Restores the cluster. Returns what stays.
    pub fn undo(&self) -> Result<Vec<&'static str>, Error> {
        let Some(mut record) = self.record()? else {
            return Err(Error::blocked(
                "no move of this cluster has begun, or it was undone: there is nothing to undo",
            ));
        };
        self.take_days(&mut record)?;
        self.check_version(&record)?;
        self.check_options()?;
        self.adopt_state()?;
        let wanted = &record.wanted;
        let manifests = self.services(wanted, &record.before.policy, vec![Phase::Policy])?;
        let manifests = apply::manifests(&manifests, self.client)?;
        if let Some(stranger) = record.before.objects.stranger(&manifests) {
            return Err(Error::content(format!(
                "the record of the move names an object that is none of the services: {} {}. Nothing was changed",
                stranger["kind"], stranger["metadata"]["name"]
            )));
        }
        interrupt::means("what is restored stays so; run the same command again");
        record.is_undone = true;
        record.save(self.client, &self.seal)?;
        let begun = record.begun;
        if begun >= MoveStep::Nodes {
            check_day(&record.wanted)?;
            if begun >= MoveStep::End {
                self.progress.line("the old forms are accepted again");
                self.step(MoveStep::Services, &record)?;
                let present = services::present_policy(self.client)?.unwrap_or_default();
                let both = both_images(&record.before.policy, &present)?;
                self.accept(&both, &record.wanted)?;
            }
            self.move_back(&record)?;
            record.begun = MoveStep::Services;
            record.save(self.client, &self.seal)?;
        }
        self.restore(&record, &manifests)?;
        MigrationRecord::remove(self.client)?;
        let mut stays = vec![
            "the Secret firstlight-mastersecret-… with the encrypted master secret, and its key in /etc/kubernetes/firstlight of each \
             control plane, which Constellation ignores",
            "the ConfigMaps join-node-… and join-disk-… with the records of machines, which Constellation ignores",
            "firstlight-state.json and the saved manifests in this folder",
        ];
        if begun >= MoveStep::Nodes {
            stays.push(
                "nodes that were replaced: they are other machines, with other names and disks",
            );
        }
        Ok(stays)
    }

    /// Takes the days that are given, and refuses other options: nothing of them would be done.
    fn take_days(&self, record: &mut MigrationRecord) -> Result<(), Error> {
        let given = Texts::of(&self.options.wanted);
        let days = Texts {
            migrate_until: given.migrate_until.clone(),
            old_clients_until: given.old_clients_until.clone(),
            ..Texts::default()
        };
        if given != days {
            return Err(Error::Usage(
                "undo takes --migrate-until and --old-clients-until, and no other option of a move"
                    .into(),
            ));
        }
        record.wanted = record.merged(&self.options.wanted);
        Ok(())
    }

    /// Refuses to restore what no longer fits the version of Kubernetes.
    fn check_version(&self, record: &MigrationRecord) -> Result<(), Error> {
        let before = &record.before;
        if let Some([.., components]) = &before.node_version {
            let Some(version) = NodeVersion::find(self.client)? else {
                return Err(Error::blocked(
                    "NodeVersion was deleted since the move began: without it, Constellation's join service admits no node. Nothing was \
                     changed. Make it again, with the components of the present version of Kubernetes",
                ));
            };
            if version.field(COMPONENTS) != components {
                return Err(too_late(&format!(
                    "NodeVersion has the components {}, before {components}",
                    version.field(COMPONENTS)
                )));
            }
        }
        let versions = [
            ("the API server", self.client.version()?, &before.kubernetes),
            (
                "kubeadm-config",
                facts::kubeadm_version(self.client)?,
                &before.kubeadm,
            ),
        ];
        if let Some((what, now, before)) = versions.iter().find(|(_, now, before)| now != *before) {
            return Err(too_late(&format!("{what} has {now}, before {before}")));
        }
        let parsed = |version: &str| version.parse::<KubernetesVersion>().ok();
        let later = facts::nodes(self.client)?;
        let later = later.iter().find(|node| {
            let (kubelet, before) = (parsed(&node.kubelet), parsed(&before.kubernetes));
            matches!((kubelet, before), (Some(kubelet), Some(before)) if before < kubelet)
        });
        match later {
            None => Ok(()),
            Some(node) => Err(too_late(&format!(
                "the kubelet of {} has {}",
                node.name, node.kubelet
            ))),
        }
    }

    /// Brings the nodes back to Constellation's image.
    fn move_back(&self, record: &MigrationRecord) -> Result<(), Error> {
        let saved = record.before.node_version.as_ref();
        if let (Some([image, version, _]), true) = (saved, moves_nodes(self.client)?) {
            let set = (image.as_str(), version.as_str());
            nodes::by_operator(self.client, set, self.options.timeout, self.progress)?;
        } else if !self.options.nodes_moved {
            return Err(Error::blocked(
                "start each node with Constellation's image again, one after the other, and wait until each is Ready: the policy accepts \
                 both images. Constellation's nodes prove nothing to this command, so then run it again with --nodes-moved",
            ));
        } else if let Some([image, version, _]) = saved {
            nodes::settle(self.client, Some(image), version)?;
        }
        match &record.before.agent_check {
            Some(kind) => Ok(nodes::check_agent(self.client, kind)?),
            None => Ok(()),
        }
    }

    fn restore(&self, record: &MigrationRecord, manifests: &[Value]) -> Result<(), Error> {
        let mut report = |report| match report {
            InstallProgress::Phase(text) => self.progress.phase(text),
            InstallProgress::Line(text) => self.progress.line(text),
        };
        // the last step of a move deletes it
        let secret = self.options.master_secret.read()?;
        master_secret::restore_plain(self.client, &secret)?;
        let (objects, time) = (&record.before.objects, self.options.timeout);
        let restored = objects.restore(self.client, manifests, time, &mut report);
        restored.map_err(Error::from)
    }
}

fn too_late(why: &str) -> Error {
    Error::blocked(format!(
        "Kubernetes was upgraded since the move began ({why}): an API server cannot go back, and Constellation's nodes may not join it. The \
         move cannot be undone any more. Nothing was changed"
    ))
}
