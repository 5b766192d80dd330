//! A node without a kernel of its own: the shipped programs against each other on loopback, with a real TPM (swtpm) and a
//! disk in a file. What needs device-mapper is left to `tests/boot`; here a boot ends when its key has opened the disk.
//!
//! Each test has a loopback network of its own, 127.a.b.0/24: `.1` is the metadata service, `.2` the node, `.3` and up are
//! control planes with their fixed ports.

use common::forger;
use support::cut_off;
use support::program;

mod bad_input;
mod init;
mod join;
use common::joining;
mod memory;
use common::setting;
mod status;
mod trust;
mod unlock;
