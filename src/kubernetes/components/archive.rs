//! Extracts a tar archive (POSIX.1-2017 pax, ustar, GNU; plain or gzip, RFC 1952) into an empty directory.
//!
//! The archive is treated as hostile, even if its hash is correct. It may contain directories, regular files, symbolic links to
//! targets inside, and hard links to its own regular files. Any other entry ends the extraction with an error, and the caller
//! deletes the directory. Owners and times are ignored. A file keeps its mode, without write permission for group and others.
//!
//! No entry gets outside: a name has no `..` and no leading `/`, and each directory on its path is checked to be a directory and
//! not a link. The target of a link is relative. It has `..` only at its beginning, and at most as many as the depth of the link. A
//! `..` after a name could follow another link to the outside. At the beginning it starts in a known directory.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, Read, Seek, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Component as Part, Path, PathBuf};
use std::rc::Rc;

use flate2::read::MultiGzDecoder;
use tar::EntryType;

use base::stop::Stop;

/// The maximum number of entries and directories together. CNI plugins have about 20.
const MAX_ENTRIES: usize = 10_000;
/// The maximum number of bytes of all files. Kubernetes' server binaries have less than half of this number.
const MAX_UNPACKED: u64 = 2 << 30;
/// The maximum ratio of extracted to compressed bytes. Go binaries have 2 to 4; DEFLATE reaches 1032.
const MAX_RATIO: u64 = 100;
/// Additional bytes for padding of small archives: a tar ends with two empty blocks in a record of 10 KiB.
const FREE: u64 = 1 << 20;
/// The maximum number of bytes between the data of two files: a header, and the long names and pax records before it.
const MAX_HEADER: u64 = 64 << 10;
/// The maximum number of bytes in a name. PATH_MAX is 4096, including the directory.
const MAX_NAME: usize = 1024;

/// Why an archive was not extracted.
#[derive(Debug)]
pub enum Error {
    /// The archive is invalid or contains something that is not permitted; a clause.
    Refused(String),
    /// Writing to this path failed.
    Io(PathBuf, io::Error),
    /// The caller stopped the extraction.
    Stopped,
}

/// The extracted entries, as paths relative to the directory. A directory sorts before its contents.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Unpacked {
    pub directories: BTreeSet<PathBuf>,
    /// Regular files and links.
    pub files: BTreeSet<PathBuf>,
}

/// Extracts `archive` into `root`, an empty directory. When this returns, the contents of files are
/// synced to disk, but directory entries may not be.
pub fn unpack(mut archive: File, root: &Path, stop: &Stop) -> Result<Unpacked, Error> {
    let unreadable = |error: io::Error| Error::Refused(format!("it cannot be read: {error}"));
    let packed = archive.metadata().map_err(unreadable)?.len();
    let mut magic = Vec::new();
    (&mut archive)
        .take(2)
        .read_to_end(&mut magic)
        .map_err(unreadable)?;
    archive.rewind().map_err(unreadable)?;
    let archive = BufReader::new(archive);
    let limit = packed
        .saturating_mul(MAX_RATIO)
        .saturating_add(FREE)
        .min(MAX_UNPACKED);
    // ID1 and ID2 (RFC 1952 §2.3.1).
    if magic == [0x1f, 0x8b] {
        unpack_tar(MultiGzDecoder::new(archive), limit, root, stop)
    } else {
        unpack_tar(archive, limit, root, stop)
    }
}

fn unpack_tar(reader: impl Read, limit: u64, root: &Path, stop: &Stop) -> Result<Unpacked, Error> {
    let allowance = Rc::new(Cell::new(MAX_HEADER));
    let mut archive = tar::Archive::new(Metered {
        reader,
        allowance: allowance.clone(),
    });
    let malformed =
        |error: io::Error| Error::Refused(format!("it is not a valid tar archive: {error}"));

    let mut tree = Tree {
        root,
        made: Unpacked::default(),
    };
    let mut unpacked: u64 = 0;
    for (number, entry) in archive.entries().map_err(malformed)?.enumerate() {
        if stop.is_stopped() {
            return Err(Error::Stopped);
        }
        let mut entry = entry.map_err(malformed)?;
        unpacked = unpacked.saturating_add(entry.size());
        if unpacked > limit {
            return refuse(format!(
                "it extracts to more than {limit} bytes, which is {MAX_RATIO} times its size or the maximum"
            ));
        }
        if number + tree.made.directories.len() > MAX_ENTRIES {
            return refuse(format!("it has more than {MAX_ENTRIES} entries"));
        }
        allowance.set(MAX_HEADER + entry.size());
        tree.make(&mut entry, stop)?;
        // Each header has its own limit.
        io::copy(&mut entry, &mut io::sink()).map_err(malformed)?;
        allowance.set(MAX_HEADER);
    }
    Ok(tree.made)
}

/// A reader that fails at a limit. It is needed because the library reads everything between the data of two files into memory.
struct Metered<R> {
    reader: R,
    allowance: Rc<Cell<u64>>,
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let allowed = buffer
            .len()
            .min(usize::try_from(self.allowance.get()).unwrap_or(usize::MAX));
        if allowed == 0 && !buffer.is_empty() {
            return Err(io::Error::other(format!(
                "a header of more than {MAX_HEADER} bytes"
            )));
        }
        let count = self.reader.read(&mut buffer[..allowed])?;
        self.allowance.set(self.allowance.get() - count as u64);
        Ok(count)
    }
}

struct Tree<'a> {
    root: &'a Path,
    made: Unpacked,
}

impl Tree<'_> {
    fn make<R: Read>(&mut self, entry: &mut tar::Entry<'_, R>, stop: &Stop) -> Result<(), Error> {
        let kind = entry.header().entry_type();
        // This entry describes the archive and not a file: `git archive` stores the commit there.
        if kind == EntryType::XGlobalHeader {
            return Ok(());
        }
        // In archives from before POSIX, a directory is a file whose name ends with a slash.
        let is_old_directory = kind == EntryType::Regular && entry.path_bytes().ends_with(b"/");
        let name = entry
            .path()
            .map_err(|error| Error::Refused(format!("a name is invalid: {error}")))?;
        let name = clean(&name)?;
        if has_sparse_records(entry) {
            return refuse(format!("{} is a sparse file", name.display()));
        }
        if name.as_os_str().is_empty() && kind != EntryType::Directory && !is_old_directory {
            return refuse("a file has no name".into());
        }
        let link = || -> Result<PathBuf, Error> {
            let target = entry.link_name().ok().flatten();
            target
                .map(|target| target.into_owned())
                .ok_or_else(|| refusal(format!("{} links to nothing", name.display())))
        };
        match kind {
            _ if is_old_directory => self.make_directory(&name),
            EntryType::Directory => self.make_directory(&name),
            EntryType::Regular | EntryType::Continuous => self.make_file(&name, entry, stop),
            EntryType::Symlink => self.make_symlink(&name, &link()?),
            EntryType::Link => self.make_hard_link(&name, &link()?),
            other => refuse(format!(
                "{} is of type {:?}; expected a file, a directory or a link",
                name.display(),
                char::from(other.as_byte())
            )),
        }
    }

    /// Creates a directory and its parents, or checks that they are directories.
    fn make_directory(&mut self, name: &Path) -> Result<(), Error> {
        let mut path = PathBuf::new();
        for part in name.components() {
            path.push(part);
            if self.made.directories.contains(&path) {
                continue;
            }
            if self.made.files.contains(&path) {
                return refuse(format!(
                    "{} goes through {}, which is not a directory",
                    name.display(),
                    path.display()
                ));
            }
            let full = self.root.join(&path);
            fs::create_dir(&full).map_err(|error| Error::Io(full, error))?;
            self.made.directories.insert(path.clone());
        }
        Ok(())
    }

    /// Prepares the path of a file: creates its directory, and removes an earlier entry of the same name.
    fn make_room(&mut self, name: &Path) -> Result<PathBuf, Error> {
        self.make_directory(name.parent().unwrap_or(Path::new("")))?;
        let full = self.root.join(name);
        if self.made.directories.contains(name) {
            return refuse(format!("{} is both a directory and a file", name.display()));
        }
        if self.made.files.remove(name) {
            fs::remove_file(&full).map_err(|error| Error::Io(full.clone(), error))?;
        }
        Ok(full)
    }

    fn make_file<R: Read>(
        &mut self,
        name: &Path,
        entry: &mut tar::Entry<'_, R>,
        stop: &Stop,
    ) -> Result<(), Error> {
        let mode = entry.header().mode().unwrap_or(0) & 0o755 | 0o400;
        let full = self.make_room(name)?;
        let io = |error| Error::Io(full.clone(), error);
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&full)
            .map_err(io)?;
        let expected = entry.size();
        let mut buffer = vec![0; 64 << 10];
        let mut written = 0;
        loop {
            if stop.is_stopped() {
                return Err(Error::Stopped);
            }
            let count = entry.read(&mut buffer).map_err(|error| {
                Error::Refused(format!(
                    "it ends or breaks within {}: {error}",
                    name.display()
                ))
            })?;
            if count == 0 {
                break;
            }
            written += count as u64;
            file.write_all(&buffer[..count]).map_err(io)?;
        }
        if written != expected {
            return refuse(format!(
                "it ends within {}, after {written} of {expected} bytes",
                name.display()
            ));
        }
        // Sets the mode independently of the umask.
        file.set_permissions(fs::Permissions::from_mode(mode))
            .map_err(io)?;
        file.sync_all().map_err(io)?;
        self.made.files.insert(name.to_owned());
        Ok(())
    }

    fn make_symlink(&mut self, name: &Path, target: &Path) -> Result<(), Error> {
        let depth = name.components().count() - 1;
        if !stays_inside(target, depth) {
            return refuse(format!(
                "{} links to {}, which may be outside of the directory",
                name.display(),
                target.display()
            ));
        }
        let full = self.make_room(name)?;
        symlink(target, &full).map_err(|error| Error::Io(full, error))?;
        self.made.files.insert(name.to_owned());
        Ok(())
    }

    fn make_hard_link(&mut self, name: &Path, target: &Path) -> Result<(), Error> {
        let target = clean(target)?;
        let there = self.root.join(&target);
        let is_file = || fs::symlink_metadata(&there).is_ok_and(|metadata| metadata.is_file());
        if !self.made.files.contains(&target) || !is_file() || target == name {
            return refuse(format!(
                "{} is a hard link to {}, which is not another file of the archive",
                name.display(),
                target.display()
            ));
        }
        let full = self.make_room(name)?;
        fs::hard_link(&there, &full).map_err(|error| Error::Io(full, error))?;
        self.made.files.insert(name.to_owned());
        Ok(())
    }
}

/// Converts a name to a relative path. It is empty for the root itself.
fn clean(name: &Path) -> Result<PathBuf, Error> {
    let bytes = name.as_os_str().as_bytes();
    if bytes.len() > MAX_NAME {
        return refuse(format!(
            "a name has {} bytes, more than {MAX_NAME}",
            bytes.len()
        ));
    }
    if bytes.iter().any(u8::is_ascii_control) {
        return refuse(format!("the name {name:?} has control characters"));
    }
    let mut path = PathBuf::new();
    for part in name.components() {
        match part {
            Part::Normal(part) => path.push(part),
            Part::CurDir => {}
            _ => return refuse(format!("the name {name:?} leads outside of the directory")),
        }
    }
    Ok(path)
}

/// Returns whether the target of a link at this `depth` of directories stays inside, whatever other entries exist.
fn stays_inside(target: &Path, depth: usize) -> bool {
    let mut ups = 0;
    let mut names = 0;
    for part in target.components() {
        match part {
            Part::ParentDir if names == 0 => ups += 1,
            Part::CurDir => {}
            Part::Normal(_) => names += 1,
            _ => return false,
        }
    }
    let bytes = target.as_os_str().as_bytes();
    !bytes.is_empty()
        && bytes.len() <= MAX_NAME
        && !bytes.iter().any(u8::is_ascii_control)
        && ups <= depth
}

/// A sparse file of GNU tar in pax format looks like a regular file. It contains a map of its holes, and the blocks between them.
fn has_sparse_records<R: Read>(entry: &mut tar::Entry<'_, R>) -> bool {
    let records = entry.pax_extensions().ok().flatten();
    records.is_some_and(|mut records| {
        records
            .any(|record| record.is_ok_and(|record| record.key_bytes().starts_with(b"GNU.sparse.")))
    })
}

fn refusal(why: String) -> Error {
    Error::Refused(why)
}

fn refuse<T>(why: String) -> Result<T, Error> {
    Err(refusal(why))
}
