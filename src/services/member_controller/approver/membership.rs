//! Whether a node is a member of the cluster, so that its kubelet may have a certificate. It is one while
//! it has a record that is not closed: by its name alone, a kubelet that was removed could renew its
//! certificate for ever.

use std::sync::Arc;

use super::request::Judgement::Leave;
use super::request::{Judgement, deny};
use crate::cluster::Cluster;
use base::time;
use kubernetes::NAMESPACE;
use kubernetes::machine_record::{self, MachineRecord};
use kubernetes::removed_nodes::{CONFIG_MAP, RemovedNode};

/// What the cluster knows of a node.
#[derive(Default)]
pub struct Membership {
    /// The record of its machine.
    pub record: Option<Arc<MachineRecord>>,
    /// Whether its Node object exists.
    pub has_node: bool,
    /// Its entry among the removed nodes.
    pub removed: Option<RemovedNode>,
}

impl Membership {
    /// Reads what is known of the node of this name.
    pub fn of(cluster: &Cluster, node: &str) -> Membership {
        Membership {
            record: cluster.record(&machine_record::name_of_node(node)),
            has_node: cluster.node(node).is_some(),
            removed: cluster.removed(node),
        }
    }

    /// Returns the record of the node, unless the node was removed. A record of another node under
    /// this name, which only an administrator can write, is none.
    pub fn record(&self, node: &str) -> Result<Option<&MachineRecord>, Judgement> {
        if let Some(removed) = &self.removed {
            return deny(
                "removed",
                format!(
                    "`firstlight node remove` has removed {node} ({}), according to ConfigMap {NAMESPACE}/{CONFIG_MAP}",
                    removed.since
                ),
            );
        }
        Ok(self.record.as_deref().filter(|record| record.node == node))
    }

    /// Returns the record of the node, which must be open.
    pub fn open_record(&self, node: &str) -> Result<&MachineRecord, Judgement> {
        let Some(record) = self.record(node)? else {
            return Err(no_record(node));
        };
        check_open(record)?;
        Ok(record)
    }

    /// Leaves a request of a node that does not exist.
    pub fn check_node(&self, node: &str) -> Result<(), Judgement> {
        if self.has_node {
            Ok(())
        } else {
            Err(Leave("no-node", format!("there is no node {node}")))
        }
    }
}

/// Leaves a request of a machine whose evidence was refused.
pub fn check_open(record: &MachineRecord) -> Result<(), Judgement> {
    match record.refused {
        None => Ok(()),
        // not denied: evidence that is accepted opens the record again
        Some(since) => Err(Leave(
            "refused-before",
            format!(
                "the evidence of this machine has been refused since {}; if it may stay, remove the field `refused` of \
                 ConfigMap {NAMESPACE}/{}",
                time::seconds(since),
                record.name
            ),
        )),
    }
}

fn no_record(node: &str) -> Judgement {
    Leave(
        "no-record",
        format!(
            "there is no ConfigMap {NAMESPACE}/{}: the join of {node} is not recorded. If it is a member, record its machine \
             (docs/watch.md#nodes-without-a-record), let it join again, or approve the request by hand",
            machine_record::name_of_node(node)
        ),
    )
}

#[cfg(test)]
pub mod tests {
    use std::time::SystemTime;

    use super::super::request::Judgement::Deny;
    use super::super::request::tests::reason;
    use super::*;

    /// A node with this record.
    pub fn member(record: Option<&MachineRecord>) -> Membership {
        Membership {
            record: record.cloned().map(Arc::new),
            has_node: true,
            removed: None,
        }
    }

    #[test]
    fn a_node_is_a_member_while_its_record_is_open() {
        let record = MachineRecord {
            node: "n".into(),
            name: "join-node-n".into(),
            ..MachineRecord::default()
        };
        let judged = |membership: &Membership, node: &str| match membership.open_record(node) {
            Ok(_) => "member",
            Err(judgement) => reason(judgement),
        };
        assert_eq!(judged(&member(Some(&record)), "n"), "member");
        assert_eq!(judged(&member(Some(&record)), "m"), "no-record");
        assert_eq!(judged(&member(None), "n"), "no-record");
        let closed = MachineRecord {
            refused: Some(SystemTime::UNIX_EPOCH),
            ..record.clone()
        };
        assert_eq!(judged(&member(Some(&closed)), "n"), "refused-before");
        let removed = Membership {
            removed: Some(RemovedNode::default()),
            ..member(Some(&record))
        };
        assert!(matches!(removed.open_record("n"), Err(Deny("removed", _))));
    }
}
