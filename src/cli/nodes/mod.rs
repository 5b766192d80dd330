//! Changes of a running cluster and of its nodes.

pub(crate) mod doctor;
pub mod drain;
pub(crate) mod etcd;
pub mod etcd_members;
pub(crate) mod lock;
pub mod node;
pub(crate) mod operator;
pub(crate) mod rollout;
pub(crate) mod upgrade;
