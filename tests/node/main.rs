//! A node without its own kernel: the shipped programs talk to each other on loopback, with a TPM (swtpm) and a disk in a file.
//! `tests/boot` tests the parts that need device-mapper; here a boot ends when its key has opened the disk.
//!
//! Each test has its own loopback network, 127.a.b.0/24: `.1` is the metadata service, `.2` the node, `.3` and up are
//! control planes with their fixed ports.

use common::forger;
use support::cut_off;
use support::program;

mod absence;
mod bad_input;
mod cluster_status;
mod doctor;
mod fleet;
mod hostile_texts;
mod init;
mod join;
mod json;
use common::joining;
mod memory;
mod mutual;
mod operator;
use common::setting;
mod status;
mod strong;
mod trust;
mod unlock;
mod verification;
mod waits;
