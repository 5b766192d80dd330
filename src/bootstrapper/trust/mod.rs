//! Trust between nodes: the requirements on join services, the check of tickets, and this machine's
//! evidence.

pub mod evidence;
pub mod platform;
pub mod service_trust;
pub mod ticket;
