//! What an operator asks of a node without a shell on it: `firstlight logs`, `kubeconfig`, `support`, `node
//! reboot|shutdown|restart|clean|reset`,
//! and `operator certify|revoke|accept` for the certificates of other people.
//!
//! [`session`] connects to a node, verifies it, and proves the operator.

pub mod absence;
pub mod control;
pub mod kubeconfig;
pub mod logs;
pub mod people;
pub mod session;
pub mod support;
mod update;
