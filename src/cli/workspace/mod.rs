//! The operator's side of a connection: the files of a cluster, and the ways to its nodes and to its API server.

pub(crate) mod connect;
pub(crate) mod keeping;
pub(crate) mod known_nodes;
pub(crate) mod kubeconfig;
pub(crate) mod master_secret;
pub(crate) mod options;
pub mod shares;
pub(crate) mod sources;
pub(crate) mod ssh_key;
pub(crate) mod state;
