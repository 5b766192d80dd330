//! Everything about Kubernetes that Firstlight needs: the programs of a node ([`components`]),
//! kubeadm's configuration ([`kubeadm`]), the kubelet's serving certificate
//! ([`kubelet_certificate`], or [`certificate_request`] if another node has
//! the CA), the [`client`] of the Kubernetes API, the administrator's [`kubeconfig`], and the
//! [`services`] of control planes. [`machine_record`] records which machine has which disk and
//! name, [`removed_nodes`] which nodes an operator has removed, [`control_planes`] says which nodes
//! are control planes by these records, [`wrapping_key`] encrypts the master secret in the API,
//! [`etcd_signature`] signs snapshots, [`objects`] has the objects of the API as types, [`rbac`] says which accounts may take over the
//! cluster, and [`constellation`] is for clusters of it that have not moved yet. [`parameters`] contains types with validated values, so
//! that a value that Kubernetes would refuse later is refused before any change.

pub mod authority;
pub mod certificate_request;
pub mod client;
pub mod client_certificate;
pub mod components;
pub mod constellation;
pub mod control_planes;
pub mod etcd_signature;
pub mod kubeadm;
pub mod kubeconfig;
pub mod kubelet_certificate;
pub mod machine_record;
pub mod node_files;
pub mod parameters;
pub mod rbac;
pub mod readiness;
pub mod removed_nodes;
pub mod services;
pub mod wrapping_key;
pub mod yaml;

pub use client::objects;

/// The namespace of the services and all their objects, as in Constellation.
pub const NAMESPACE: &str = "kube-system";
/// The namespace of kubelets' Leases. A kubelet renews its Lease every ten seconds, as a sign of life.
pub const KUBELET_LEASES: &str = "kube-node-lease";
