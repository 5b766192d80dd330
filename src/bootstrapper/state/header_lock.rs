//! The lock of a LUKS2 header. cryptsetup takes the same lock. The booted system has cryptsetup,
//! and an operator can change the state disk's keyslots at any time. If two programs write the
//! header at once, the change of one is lost.
//!
//! cryptsetup 2 locks a file beside the device with flock(2): `/run/cryptsetup/L_MAJOR:MINOR` for a block device, and the file
//! itself for a disk image (lib/utils_device_locking.c). The last user removes the file, so a lock has an effect only while the
//! locked file still has this name.

use std::fmt;
use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use sys::block;

/// The directory of cryptsetup's locks.
const FOLDER: &str = "/run/cryptsetup";
/// How long to wait for the lock: cryptsetup holds it while it reads or writes a header.
const LIMIT: Duration = Duration::from_secs(30);
/// The pause between two tries.
const PAUSE: Duration = Duration::from_millis(20);

/// The lock, until it is dropped.
pub struct HeaderLock(#[expect(dead_code, reason = "it is locked until it is closed")] File);

impl HeaderLock {
    /// Locks the header of a device, or of a disk image.
    pub fn take(device: &Path) -> Result<HeaderLock, Error> {
        HeaderLock::take_within(device, LIMIT)
    }

    fn take_within(device: &Path, limit: Duration) -> Result<HeaderLock, Error> {
        let path = match block::number(device) {
            Ok((major, minor)) => Path::new(FOLDER).join(format!("L_{major}:{minor}")),
            Err(_) => PathBuf::from(device),
        };
        let end = Instant::now() + limit;
        let failed = |error| Error::Io(path.clone(), error);
        loop {
            let file = open(&path, path != device).map_err(failed)?;
            match file.try_lock() {
                Ok(()) if has_name(&file, &path).map_err(failed)? => return Ok(HeaderLock(file)),
                Ok(()) | Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => return Err(failed(error)),
            }
            if Instant::now() >= end {
                return Err(Error::Held {
                    device: device.into(),
                    limit,
                    path,
                });
            }
            thread::sleep(PAUSE);
        }
    }
}

/// Why a header is not locked.
#[derive(Debug)]
pub enum Error {
    /// Another program holds the lock.
    Held {
        /// The device with the header.
        device: PathBuf,
        /// How long this program waited.
        limit: Duration,
        /// The lock file.
        path: PathBuf,
    },
    /// The lock file cannot be opened or locked.
    Io(PathBuf, io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Held {
                device,
                limit,
                path,
            } => write!(
                f,
                "another program has locked the header of {} for {} s (lock file {}): end that program, usually cryptsetup",
                device.display(),
                limit.as_secs(),
                path.display()
            ),
            Error::Io(path, error) => write!(f, "cannot lock {}: {error}", path.display()),
        }
    }
}

impl std::error::Error for Error {}

/// Opens the lock file. cryptsetup may not have created it yet, so this creates it.
fn open(path: &Path, is_made: bool) -> io::Result<File> {
    if is_made {
        let mut folder = DirBuilder::new();
        match folder.mode(0o700).create(FOLDER) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(is_made).mode(0o600);
    options.open(path)
}

/// Returns whether the file still has its name.
fn has_name(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    match path.metadata() {
        Ok(named) => Ok((named.dev(), named.ino()) == (own.dev(), own.ino())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::{Command, Stdio};

    use base::crypto::{KEY_LEN, Secret};
    use disk::luks::{self, MIN_DEVICE_SIZE, VOLUME_KEY_LEN};

    use super::*;

    /// Makes a disk image with our header.
    fn image(folder: &Path) -> PathBuf {
        let path = folder.join("disk");
        let options = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path);
        let mut disk = options.unwrap();
        disk.set_len(MIN_DEVICE_SIZE).unwrap();
        let (volume_key, key) = (Secret::random(VOLUME_KEY_LEN), Secret::random(KEY_LEN));
        luks::format(&mut disk, &volume_key, &key).unwrap();
        path
    }

    /// The real cryptsetup waits for our lock, and works after it.
    #[test]
    fn cryptsetup_waits_for_our_lock() {
        let folder = tempfile::tempdir().unwrap();
        let disk = image(folder.path());
        let lock = HeaderLock::take(&disk).unwrap();
        let mut cryptsetup = Command::new("/sbin/cryptsetup")
            .args(["config", "--label", "ours"])
            .arg(&disk)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        thread::sleep(Duration::from_millis(500));
        assert!(cryptsetup.try_wait().unwrap().is_none(), "it does not wait");
        drop(lock);
        assert!(cryptsetup.wait().unwrap().success());
        assert!(
            fs::read(&disk).unwrap()[..4096]
                .windows(4)
                .any(|it| it == b"ours")
        );
    }

    #[test]
    fn a_lock_of_another_program_is_waited_for_and_named() {
        let folder = tempfile::tempdir().unwrap();
        let disk = image(folder.path());
        let other = File::open(&disk).unwrap();
        other.lock().unwrap();
        let refused = HeaderLock::take_within(&disk, Duration::ZERO).map(drop);
        assert!(matches!(refused, Err(Error::Held { .. })));
        thread::scope(|scope| {
            let waiting = scope.spawn(|| HeaderLock::take(&disk).map(drop));
            thread::sleep(Duration::from_millis(100));
            assert!(!waiting.is_finished());
            drop(other);
            waiting.join().unwrap().unwrap();
        });
    }

    /// A lock on a removed file has no effect.
    #[test]
    fn a_lock_file_without_its_name_does_not_count() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("L_7:0");
        let file = File::create(&path).unwrap();
        assert!(has_name(&file, &path).unwrap());
        fs::remove_file(&path).unwrap();
        assert!(!has_name(&file, &path).unwrap());
        File::create(&path).unwrap();
        assert!(!has_name(&file, &path).unwrap());
    }
}
