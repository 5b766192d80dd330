//! What several of the tests share that knows our crates: attested peers, a real API server, a machine on loopback with all that
//! is around it.

pub mod attested;
pub mod forger;
pub mod joining;
pub mod kube_apiserver;
pub mod setting;
