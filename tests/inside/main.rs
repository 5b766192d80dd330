//! Attacks from inside the cluster (`make test-inside`): root on a worker has the certificate of its kubelet and the tokens of the
//! pods there, a tenant has the role `edit` in a namespace. They attack a real kube-apiserver with the objects of `firstlight
//! apply`, with real controllers.
//!
//! The first run builds these programs from source, which takes minutes. So `cargo test` skips these tests.

mod accounts;
mod admission;
mod agents;
mod attacker;
mod charts;
mod deputies;
mod etcd;
mod harness;
mod master_secret;
mod objects;
mod ports;
