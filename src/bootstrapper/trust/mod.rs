//! What a fresh node demands of a join service, what a ticket has, and what this machine proves.

pub mod evidence;
pub mod platform;
pub mod service_trust;
pub mod ticket;
