//! What all programs use. A module that only one program needs does not belong here.

pub mod backoff;
pub mod boot;
pub mod bytes;
pub mod child_process;
pub mod crypto;
pub mod der;
pub mod logger;
pub mod network;
pub mod options;
pub mod pool;
pub mod program;
pub mod request;
pub mod resolver;
pub mod stop;
pub mod sync;
pub mod sysfs;
pub mod table;
pub mod text;
pub mod time;
pub mod timeline;
pub mod turns;
pub mod x509;
