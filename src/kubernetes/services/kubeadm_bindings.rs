//! The bindings by which kubeadm lets kube-controller-manager approve client certificates of kubelets. They decide by
//! user and group only, and the first decision counts. So they let a kubelet renew its certificate that
//! `firstlight node remove` has removed, or whose machine was refused, and a bearer of any token of kubeadm become any node.
//! The member controller approves what members need, so both are deleted. `kubeadm init` and `kubeadm upgrade apply` make
//! them.

use serde_json::{Value, json};

use super::super::client::{self, CLUSTER_ROLE_BINDINGS, Client, Object};
use super::super::objects::RbacBinding;

/// The bindings of kubeadm, and the group of each.
const BINDINGS: [(&str, &str, &str); 2] = [
    (
        "kubeadm:node-autoapprove-certificate-rotation",
        RENEWAL,
        "system:nodes",
    ),
    (
        "kubeadm:node-autoapprove-bootstrap",
        FIRST,
        "system:bootstrappers:kubeadm:default-node-token",
    ),
];
/// The ClusterRole of those whose kubelets may renew their certificates without a record.
const RENEWAL: &str = "system:certificates.k8s.io:certificatesigningrequests:selfnodeclient";
/// The ClusterRole of those who get the certificate of any node.
const FIRST: &str = "system:certificates.k8s.io:certificatesigningrequests:nodeclient";

/// Returns the objects as kubeadm makes them.
pub fn manifests() -> Vec<Value> {
    let manifest = |(name, role, group): &(&str, &str, &str)| {
        json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": group}],
        })
    };
    BINDINGS.iter().map(manifest).collect()
}

/// Deletes them. Returns those that existed.
pub fn delete(client: &Client) -> Result<Vec<Object>, client::Error> {
    let mut deleted = Vec::new();
    for (name, ..) in BINDINGS {
        let at = CLUSTER_ROLE_BINDINGS.named(name);
        if client.delete_if_there(&at)? {
            deleted.push(at);
        }
    }
    Ok(deleted)
}

/// Returns whether a ClusterRoleBinding, of any name, lets kube-controller-manager approve certificates of kubelets.
pub fn approves_kubelets(binding: &RbacBinding) -> bool {
    [RENEWAL, FIRST].contains(&binding.role_ref.name.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_binding_is_known_by_its_role_and_not_by_its_name() {
        for manifest in manifests() {
            let mut binding: RbacBinding = serde_json::from_value(manifest).unwrap();
            assert!(approves_kubelets(&binding));
            binding.metadata.name = "other".into();
            assert!(approves_kubelets(&binding));
            binding.role_ref.name = "system:node-bootstrapper".into();
            assert!(!approves_kubelets(&binding));
        }
    }
}
