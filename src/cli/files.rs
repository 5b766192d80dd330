//! The operator's files: nobody else may read them, and none is there half written.

use std::fmt;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

const PRIVATE: u32 = 0o600;
const OTHERS: u32 = 0o077;
/// More than any file that the operator hands us needs.
const MAX_LEN: usize = 1 << 20;

/// What is wrong with a file, and what to do about it.
#[derive(Debug)]
pub enum Error {
    /// The system said no to the named action on it.
    Io(&'static str, PathBuf, io::Error),
    /// Others than its owner may read or write it: the mode.
    Loose(PathBuf, u32),
    /// Larger than any file of its kind.
    TooLarge(PathBuf),
    /// Its content is not what it should be: what is wrong.
    Content(PathBuf, String),
}

impl Error {
    /// Whether the file is there already, or is not there, where the opposite was wanted.
    pub fn kind(&self) -> Option<io::ErrorKind> {
        match self {
            Error::Io(_, _, error) => Some(error.kind()),
            _ => None,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io(action, path, error) => {
                write!(f, "cannot {action} {}: {error}", path.display())
            }
            Error::Loose(path, mode) => write!(
                f,
                "{0} may be read by others (mode {mode:04o}, expected {PRIVATE:04o}): run `chmod 600 {0}`, and think \
                 about who has read it",
                path.display()
            ),
            Error::TooLarge(path) => write!(f, "{} is larger than {MAX_LEN} bytes", path.display()),
            Error::Content(path, what) => write!(f, "{}: {what}", path.display()),
        }
    }
}

impl std::error::Error for Error {}

/// All of a file that anybody may read.
pub fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>, Error> {
    read_open(
        path,
        File::open(path).map_err(|error| Error::Io("open", path.into(), error))?,
    )
}

/// All of a file that only its owner may read.
pub fn read_private(path: &Path) -> Result<Zeroizing<Vec<u8>>, Error> {
    let file = File::open(path).map_err(|error| Error::Io("open", path.into(), error))?;
    let metadata = file
        .metadata()
        .map_err(|error| Error::Io("look at", path.into(), error))?;
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & OTHERS != 0 {
        return Err(Error::Loose(path.into(), mode));
    }
    read_open(path, file)
}

/// All of what a stream gives, up to [`MAX_LEN`]; `path` is for the error.
pub fn read_open(path: &Path, stream: impl Read) -> Result<Zeroizing<Vec<u8>>, Error> {
    // with room for all of it, since a vector that grows leaves copies behind
    let mut content = Zeroizing::new(Vec::with_capacity(MAX_LEN + 1));
    stream
        .take(MAX_LEN as u64 + 1)
        .read_to_end(&mut content)
        .map_err(|error| Error::Io("read", path.into(), error))?;
    match content.len() {
        0..=MAX_LEN => Ok(content),
        _ => Err(Error::TooLarge(path.into())),
    }
}

/// A new file with mode 0600, durable when this returns; never one that exists. On failure there is none.
pub fn create_private(path: &Path, content: &[u8]) -> Result<(), Error> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(PRIVATE)
        .open(path);
    let mut file = file.map_err(|error| Error::Io("create", path.into(), error))?;
    let written = file
        .write_all(content)
        .and_then(|()| file.sync_all())
        .and_then(|()| sync_directory(path));
    written.map_err(|error| {
        // half a secret is worse than none; what was asked has failed in any case
        let _ = fs::remove_file(path);
        Error::Io("write", path.into(), error)
    })
}

/// The file with new content and mode 0600: whoever reads it, after a power cut too, sees the old or the new one.
pub fn replace_private(path: &Path, content: &[u8]) -> Result<(), Error> {
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(".new");
    let fresh = PathBuf::from(fresh);
    match fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(Error::Io("remove", fresh, error));
        }
        _ => {}
    }
    create_private(&fresh, content)?;
    let moved = fs::rename(&fresh, path).and_then(|()| sync_directory(path));
    moved.map_err(|error| Error::Io("write", path.into(), error))
}

/// The file, open for adding at its end, with mode 0600 whether it is new or not.
pub fn append_private(path: &Path) -> Result<File, Error> {
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(PRIVATE)
        .open(path);
    let file = file.map_err(|error| Error::Io("open", path.into(), error))?;
    let private = file.set_permissions(Permissions::from_mode(PRIVATE));
    private.map_err(|error| Error::Io("protect", path.into(), error))?;
    Ok(file)
}

/// Makes a directory entry durable (fsync(2): the file's own fsync need not).
fn sync_directory(of: &Path) -> io::Result<()> {
    let parent = of.parent().filter(|parent| !parent.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_created_file_is_private_and_never_overwrites() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        create_private(&path, b"first").unwrap();
        assert_eq!(mode(&path), 0o600);
        let error = create_private(&path, b"second").unwrap_err();
        assert_eq!(error.kind(), Some(io::ErrorKind::AlreadyExists));
        assert_eq!(*read_private(&path).unwrap(), b"first");
    }

    #[test]
    fn a_replaced_file_is_private_whatever_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        // left over from a run that was killed
        fs::write(dir.path().join("state.new"), "half").unwrap();
        replace_private(&path, b"new").unwrap();
        assert_eq!(
            (mode(&path), read(&path).unwrap().as_slice()),
            (0o600, b"new".as_slice())
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_log_is_added_to_and_private() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        fs::write(&path, "a").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        append_private(&path).unwrap().write_all(b"b").unwrap();
        assert_eq!(
            (mode(&path), fs::read(&path).unwrap().as_slice()),
            (0o600, b"ab".as_slice())
        );
    }

    #[test]
    fn a_secret_that_others_may_read_is_refused_with_the_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        for loose in [0o644, 0o640, 0o604, 0o620, 0o666] {
            fs::write(&path, "x").unwrap();
            fs::set_permissions(&path, Permissions::from_mode(loose)).unwrap();
            let error = read_private(&path).unwrap_err().to_string();
            assert!(
                error.contains(&format!("{loose:04o}")) && error.contains("chmod 600"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_file_without_end_is_refused() {
        assert!(matches!(
            read(Path::new("/dev/zero")),
            Err(Error::TooLarge(_))
        ));
    }
}
