//! What every program shares, and nothing that only one of them needs.

pub mod backoff;
pub mod crypto;
pub mod der;
pub mod logger;
pub mod network;
pub mod pool;
pub mod program;
pub mod stop;
pub mod sync;
pub mod time;
pub mod timeline;
pub mod turns;
