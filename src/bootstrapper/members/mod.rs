//! The work of a member: it answers the operator, renews certificates, installs a new image or version, restores
//! etcd.

pub mod authorities;
pub mod member;
pub mod operator;
pub mod renew;
pub mod restore;
pub mod update;
pub mod upgrade;
