//! The life of a cluster: from its first node to its status, and the return of its machines.

pub(crate) mod addons;
pub(crate) mod apply;
pub mod chart;
pub(crate) mod cluster_api;
pub(crate) mod cluster_id;
pub(crate) mod init;
pub(crate) mod metadata;
pub(crate) mod recover;
pub(crate) mod status;
pub mod timeline;
