//! Folders of sysfs, in which the kernel lists devices.

use std::fs;
use std::path::Path;

/// Returns the sorted names in `folder`; none if it cannot be read, as where the kernel has no
/// driver for that kind of device.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    names
}
