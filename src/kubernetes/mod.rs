//! What makes a machine a Kubernetes node: the programs it needs ([`components`]), what kubeadm is told ([`kubeadm`]), and
//! the kubelet's serving certificate ([`kubelet_certificate`]; [`kubelet_request`] and [`certificate_request`] where another
//! node has the CA); the [`client`] of its API, the administrator's [`kubeconfig`], and the [`services`] that control planes run. [`parameters`] has the types
//! whose values were checked: whatever Kubernetes would refuse halfway is refused before anything is changed. [`time`] has
//! the API's form of an instant.

pub mod certificate_request;
pub mod client;
pub mod components;
pub mod kubeadm;
pub mod kubeconfig;
pub mod kubelet_certificate;
pub mod kubelet_request;
pub mod parameters;
pub mod services;
pub mod yaml;
