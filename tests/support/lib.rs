//! Support for tests: a software TPM, a metadata service, running programs, hostile inputs, files
//! and programs of other projects, pseudo-random numbers, a search of memory for secrets, bounds of elapsed time.

use std::fs;
use std::os::unix::fs::MetadataExt;

pub mod boot_image;
pub mod cut_off;
pub mod foreign;
pub mod memory;
pub mod metadata;
pub mod mutation;
pub mod openssl;
pub mod program;
pub mod promptly;
pub mod random;
pub mod secrets;
pub mod swtpm;

/// The directory of the project.
pub const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Returns whether the test runs as root. If not, prints what only root could test, which the test leaves out.
pub fn is_root(to: &str) -> bool {
    let is_root = fs::metadata("/proc/self").unwrap().uid() == 0;
    if !is_root {
        eprintln!("left out: only root may {to}");
    }
    is_root
}
