//! Every raw system call and `unsafe` block of the crate (but the TPM bindings'), one file a subject. Each function is safe
//! to call, returns [`std::io::Error`] from `errno`, and names the manual page or kernel header that its constants come from.
#![allow(unsafe_code)]

pub mod clock;
pub mod net;
pub mod process;
pub mod signal;
