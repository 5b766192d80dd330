//! The previous release, which `tools/previous.sh` builds.

use std::path::PathBuf;

use support::foreign::fetched;
use support::program::with_programs_of;

/// Which programs a part of a test runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Release {
    Previous,
    Today,
}

impl Release {
    /// Calls `make`, whose programs are those of this release.
    pub fn run<T>(self, make: impl FnOnce() -> T) -> T {
        match self {
            Release::Today => make(),
            Release::Previous => with_programs_of(&folder().join("bin"), make),
        }
    }
}

/// Returns the folder of the previous release: `bin` has its programs, `source` its sources.
pub fn folder() -> PathBuf {
    fetched("previous.sh")
}
