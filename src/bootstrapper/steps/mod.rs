//! What init and join have in common: jobs, the set-up of a node, kubelet and etcd.

pub mod clock;
pub mod error;
pub mod etcd;
pub mod job;
pub mod kubelet;
pub mod setup;
pub mod static_pods;
