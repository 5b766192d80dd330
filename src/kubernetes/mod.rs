//! What makes a machine a Kubernetes node: the programs it needs ([`components`]).

pub mod components;
