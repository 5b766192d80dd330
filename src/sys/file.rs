//! Locks between programs.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use super::check;

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
    fn one_descriptor_has_the_lock_of_a_file_until_it_is_closed() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let [first, second] = [(); 2].map(|()| File::open(file.path()).unwrap());
        assert!(try_lock(&first).unwrap());
        assert!(!try_lock(&second).unwrap());
        drop(first);
        assert!(try_lock(&second).unwrap());
    }
}
