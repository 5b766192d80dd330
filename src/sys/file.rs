//! Atomic replacement of files: a reader sees the old content or the new one, even after a power
//! failure. Locks between programs.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use super::check;

/// Replaces the file at `path` durably with this content and mode (fsync(2)). Its directory must
/// exist; the old file need not.
pub fn replace(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(".new");
    // A previous run that was interrupted may have left this file.
    match fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let write = || {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&fresh)?;
        file.set_permissions(Permissions::from_mode(mode))?; // independent of the umask
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&fresh, path)
    };
    write().inspect_err(|_| drop(fs::remove_file(&fresh)))?;
    sync_directory(path)
}

/// Makes the directory entry of `path` durable; fsync(2) of the file itself does not guarantee
/// this.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    let parent = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

/// Locks a file or device for this descriptor, until its last copy is closed (flock(2)). `false` if
/// another descriptor has the lock.
pub fn try_lock(file: &File) -> io::Result<bool> {
    // SAFETY: flock(2) takes only integers, and the descriptor is open.
    let locked = check(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) });
    match locked {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
        result => result.map(|_| true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replaced_file_has_its_mode_and_no_temporary_file_remains() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(dir.path().join("file.new"), "half").unwrap();
        for (content, mode) in [("one", 0o600), ("two", 0o666)] {
            replace(&path, content.as_bytes(), mode).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
            assert_eq!(
                fs::metadata(&path).unwrap().permissions().mode() & 0o7777,
                mode
            );
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn one_descriptor_has_the_lock_of_a_file_until_it_is_closed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let [first, second] = [(); 2].map(|()| File::open(file.path()).unwrap());
        assert!(try_lock(&first).unwrap());
        assert!(!try_lock(&second).unwrap());
        drop(first);
        assert!(try_lock(&second).unwrap());
    }
}
