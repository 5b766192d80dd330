//! A cluster of one control plane to which machines are added.

use crate::PATIENCE;
use crate::network::Network;
use crate::node::Node;
use crate::operator::Operator;

/// The cluster. Each further machine gets only the image and the settings of a launch template.
pub struct Growing {
    network: &'static Network,
    test: &'static str,
    /// The ID of the cluster.
    pub id: Vec<u8>,
}

impl Growing {
    /// Initializes `control-plane-0`, and removes the init secret from the metadata service. `test` names the machines' files.
    pub fn start(test: &'static str) -> (Growing, Node, Operator) {
        let network = Network::empty();
        let first = Node::boot(network, test, "control-plane-0", "ControlPlane");
        let image = first.import_services();
        first.start_bootstrapper();
        let operator = Operator::new();
        let mut init = operator.init_with_network(&first, &["--image", &image]);
        init.expect_within("objects are new or changed", PATIENCE);
        assert!(init.exit().success(), "{}", init.output());
        let id = operator.cluster_id();
        network.forget_init_secret();
        (Growing { network, test, id }, first, operator)
    }

    /// Starts a machine that joins.
    pub fn launch(&self, name: &str, role: &str) -> Node {
        let node = Node::boot(self.network, self.test, name, role);
        if role == "ControlPlane" {
            node.import_services();
        }
        node.start_as_member_of(&self.id);
        node
    }
}
