//! The operator's files: only the operator may read them, and each is written completely or not at
//! all.

use std::fmt;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use base::file::sync_directory;
use zeroize::Zeroizing;

const PRIVATE: u32 = 0o600;
const OTHERS: u32 = 0o077;
/// Maximum bytes of a file; no file of the operator needs more.
const MAX_LEN: usize = 1 << 20;

/// The fault of a file, and what to do about it.
#[derive(Debug)]
pub enum FileError {
    /// This operation on the file failed.
    Io(&'static str, PathBuf, io::Error),
    /// Users other than the owner may read or write the file, which has this mode.
    Loose(PathBuf, u32),
    /// The file is larger than any file of its kind.
    TooLarge(PathBuf),
    /// The content is wrong, for this reason.
    Content(PathBuf, String),
}

impl FileError {
    /// Returns the kind of the system's error, by which a caller recognizes a missing or an
    /// existing file.
    pub fn kind(&self) -> Option<io::ErrorKind> {
        match self {
            FileError::Io(_, _, error) => Some(error.kind()),
            _ => None,
        }
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FileError::Io(action, path, error) => {
                write!(f, "cannot {action} {}: {error}", path.display())
            }
            FileError::Loose(path, mode) => write!(
                f,
                "{0} may be read by others (mode {mode:04o}, expected {PRIVATE:04o}): run `chmod 600 {0}`, and consider \
                 who may have read it",
                path.display()
            ),
            FileError::TooLarge(path) => {
                write!(f, "{} is larger than {MAX_LEN} bytes", path.display())
            }
            FileError::Content(path, what) => write!(f, "{}: {what}", path.display()),
        }
    }
}

impl std::error::Error for FileError {}

/// The byte order mark that editors of Windows write at the beginning of a text.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// Reads a whole file, whatever its mode, without a byte order mark.
pub fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>, FileError> {
    read_open(
        path,
        File::open(path).map_err(|error| FileError::Io("open", path.into(), error))?,
    )
}

/// Reads a whole file of any size, byte for byte.
pub fn read_bytes(path: &Path) -> Result<Vec<u8>, FileError> {
    fs::read(path).map_err(|error| FileError::Io("read", path.into(), error))
}

/// Reads a whole file; refuses a file that users other than its owner may read.
pub fn read_private(path: &Path) -> Result<Zeroizing<Vec<u8>>, FileError> {
    let file = File::open(path).map_err(|error| FileError::Io("open", path.into(), error))?;
    let metadata = file
        .metadata()
        .map_err(|error| FileError::Io("read the mode of", path.into(), error))?;
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & OTHERS != 0 {
        return Err(FileError::Loose(path.into(), mode));
    }
    read_open(path, file)
}

/// Reads a secret: standard input for `-`, else a file as [`read_private`] does. So a program that
/// stores secrets, such as age, can pass one without a plaintext file.
pub fn read_secret(path: &Path) -> Result<Zeroizing<Vec<u8>>, FileError> {
    if is_standard_input(path) {
        read_open(Path::new("standard input"), io::stdin().lock())
    } else {
        read_private(path)
    }
}

/// Returns whether an option's value means standard input.
pub fn is_standard_input(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Reads a whole stream of at most [`MAX_LEN`] bytes, without a byte order mark; `path` is for the
/// error.
pub fn read_open(path: &Path, stream: impl Read) -> Result<Zeroizing<Vec<u8>>, FileError> {
    // allocates for the whole content, since a vector that grows leaves copies behind
    let mut content = Zeroizing::new(Vec::with_capacity(MAX_LEN + 1));
    stream
        .take(MAX_LEN as u64 + 1)
        .read_to_end(&mut content)
        .map_err(|error| FileError::Io("read", path.into(), error))?;
    if content.starts_with(MARK) {
        content.drain(..MARK.len());
    }
    match content.len() {
        0..=MAX_LEN => Ok(content),
        _ => Err(FileError::TooLarge(path.into())),
    }
}

/// Creates a file with mode 0600, which is durable on return. Fails if the file exists. A failure
/// leaves no file.
pub fn create_private(path: &Path, content: &[u8]) -> Result<(), FileError> {
    create(path, content, PRIVATE)
}

fn create(path: &Path, content: &[u8], mode: u32) -> Result<(), FileError> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(PRIVATE)
        .open(path);
    let mut file = file.map_err(|error| FileError::Io("create", path.into(), error))?;
    let written = file
        .set_permissions(Permissions::from_mode(mode))
        .and_then(|()| file.write_all(content))
        .and_then(|()| file.sync_all())
        .and_then(|()| sync_directory(path));
    written.map_err(|error| {
        // half a secret is worse than none; an error of this removal is less important than the
        // error of the write
        let _ = fs::remove_file(path);
        FileError::Io("write", path.into(), error)
    })
}

/// Creates a file with mode 0600 of what `write` writes to `part`, a new file in the same folder. The file exists only if `write` has
/// succeeded, and is durable on return; an existing one stays. A killed program leaves `part`.
pub fn create_private_by<T, E: From<FileError>>(
    path: &Path,
    part: &Path,
    write: impl FnOnce(&mut File) -> Result<T, E>,
) -> Result<T, E> {
    let mut options = OpenOptions::new();
    let opened = options
        .write(true)
        .create_new(true)
        .mode(PRIVATE)
        .open(part);
    let mut file = opened.map_err(|error| FileError::Io("create", part.into(), error))?;
    let written = write(&mut file).and_then(|value| {
        // a link never replaces a file
        let linked = file.sync_all().and_then(|()| fs::hard_link(part, path));
        match linked.and_then(|()| sync_directory(path)) {
            Ok(()) => Ok(value),
            Err(error) => Err(FileError::Io("write", path.into(), error).into()),
        }
    });
    if let Err(error) = fs::remove_file(part) {
        log::warn!(
            "cannot delete {}, which contains a secret: {error}; delete it yourself",
            part.display()
        );
    }
    written
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut path = path.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}

/// Removes a file that a killed run may have left.
fn remove(path: &Path) -> Result<(), FileError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(FileError::Io("remove", path.into(), error))
        }
        _ => Ok(()),
    }
}

/// Replaces the file's content, with mode 0600. A reader sees the old or the new content, even
/// after a power cut.
pub fn replace_private(path: &Path, content: &[u8]) -> Result<(), FileError> {
    replace_with(path, content, PRIVATE)
}

/// Replaces the content of a file that exists, and keeps its mode. A symbolic link is kept: the
/// file to which it points is replaced. A reader sees the old or the new content, even after a
/// power cut.
pub fn replace(path: &Path, content: &[u8]) -> Result<(), FileError> {
    let open = |error| FileError::Io("open", path.into(), error);
    let path = fs::canonicalize(path).map_err(open)?;
    let mode = fs::metadata(&path).map_err(open)?.permissions().mode();
    replace_with(&path, content, mode & 0o777)
}

fn replace_with(path: &Path, content: &[u8], mode: u32) -> Result<(), FileError> {
    let fresh = with_suffix(path, ".new");
    remove(&fresh)?;
    create(&fresh, content, mode)?;
    let moved = fs::rename(&fresh, path).and_then(|()| sync_directory(path));
    moved.map_err(|error| FileError::Io("write", path.into(), error))
}

/// Opens the file for appending, with mode 0600 whether it is new or not.
pub fn append_private(path: &Path) -> Result<File, FileError> {
    let file = OpenOptions::new()
        .append(true)
        .create(true)
        .mode(PRIVATE)
        .open(path);
    let file = file.map_err(|error| FileError::Io("open", path.into(), error))?;
    let private = file.set_permissions(Permissions::from_mode(PRIVATE));
    private.map_err(|error| FileError::Io("protect", path.into(), error))?;
    Ok(file)
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
    fn a_byte_order_mark_is_not_read_unless_the_file_is_signed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        for (content, expected) in [
            (&b"\xef\xbb\xbf{}"[..], &b"{}"[..]),
            (b"\xef\xbb\xbf", b""),
            (b"\xef\xbb{}", b"\xef\xbb{}"),
            (b"{}\xef\xbb\xbf", b"{}\xef\xbb\xbf"),
        ] {
            let _ = fs::remove_file(&path);
            create_private(&path, content).unwrap();
            for read in [read(&path), read_private(&path), read_secret(&path)] {
                assert_eq!(*read.unwrap(), expected);
            }
            assert_eq!(read_bytes(&path).unwrap(), content);
        }
    }

    #[test]
    fn a_replaced_file_is_private_whatever_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        fs::write(&path, "old").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        // a file that a killed run left behind
        fs::write(dir.path().join("state.new"), "half").unwrap();
        replace_private(&path, b"new").unwrap();
        assert_eq!(
            (mode(&path), read(&path).unwrap().as_slice()),
            (0o600, b"new".as_slice())
        );
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_changed_file_keeps_its_mode_and_a_link_stays() {
        let dir = tempfile::tempdir().unwrap();
        let (path, link) = (dir.path().join("policy"), dir.path().join("link"));
        fs::write(&path, "old").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        for (through, kept) in [(&path, 0o644), (&link, 0o640), (&link, 0o664)] {
            fs::set_permissions(&path, Permissions::from_mode(kept)).unwrap();
            replace(through, format!("{kept:o}").as_bytes()).unwrap();
            assert_eq!(mode(&path), kept);
            let content = fs::read_to_string(&path).unwrap();
            assert_eq!(content, format!("{kept:o}"));
        }
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        assert!(replace(&dir.path().join("none"), b"").is_err());
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
            Err(FileError::TooLarge(_))
        ));
    }
}
