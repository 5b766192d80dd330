//! The common code of init and join: jobs, the set-up of a node, kubelet and etcd.

pub mod clock;
pub mod error;
pub mod etcd;
pub mod job;
pub mod kubelet;
pub mod setup;
pub mod static_pods;
