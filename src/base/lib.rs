//! Code that several programs share. A module that only one program needs does not belong here.

pub mod backoff;
pub mod boot;
pub mod bytes;
pub mod child_process;
pub mod crypto;
pub mod der;
pub mod file;
pub mod logger;
pub mod machines;
pub mod master_secret;
pub mod network;
pub mod options;
pub mod program;
pub mod stop;
pub mod sync;
pub mod table;
pub mod text;
pub mod time;
pub mod uuid;
pub mod x509;
