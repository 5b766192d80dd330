//! Runs other programs, such as kubeadm, systemctl and mke2fs. No other module of the shipped
//! programs starts a child process.
//!
//! Each call has a time limit and a [`Stop`](crate::stop::Stop). Both end the program and its process group, and no
//! process of the group is left when a call returns. Each line of output is reported at once; an
//! error contains the last lines. Every user of the machine can read the arguments of a process
//! (proc(5)), so secrets go into files or into the standard input, never into arguments.

mod output;
mod run;

pub use output::{in_foreground, output};
pub use run::{ChildFailure, Error, MAX_WAITING, Running, name, run, send_lines};
