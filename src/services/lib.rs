//! The services of a control plane: [`join_service`] admits nodes to the cluster, and
//! [`key_service`] derives keys. [`check`] asks them for their health.

pub mod check;
pub mod join_service;
pub mod key_service;
mod observed;
