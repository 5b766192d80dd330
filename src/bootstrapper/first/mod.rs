//! How a machine becomes a node: init by an operator, or join by a ticket.

pub mod cluster;
pub mod init;
pub mod init_server;
pub mod join;
pub mod join_client;
