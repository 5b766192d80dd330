//! What makes a machine a Kubernetes node: the programs it needs ([`components`]), what kubeadm is told ([`kubeadm`]), and
//! the kubelet's serving certificate ([`kubelet_certificate`]; [`kubelet_request`] and [`certificate_request`] where another
//! node has the CA); the [`client`] of its API, the administrator's [`kubeconfig`], and the [`services`] that control planes run. [`machine_record`]
//! says which machine has which disk and name. [`parameters`] has the types whose values were checked: whatever Kubernetes would
//! refuse halfway is refused before anything is changed.

pub mod certificate_request;
pub mod client;
pub mod components;
pub mod kubeadm;
pub mod kubeconfig;
pub mod kubelet_certificate;
pub mod kubelet_request;
pub mod machine_record;
pub mod parameters;
pub mod services;
pub mod yaml;

/// Where the services and all their objects are, as those of the old system.
pub const NAMESPACE: &str = "kube-system";
