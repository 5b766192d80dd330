//! Unpacks a tar archive (POSIX.1-2017 pax, ustar, GNU; plain or gzip, RFC 1952) into an empty directory of ours.
//!
//! The archive is hostile until proven otherwise, hash or not. What it may make: directories, regular files, symbolic links
//! that stay inside, hard links to regular files that it made. Everything else ends the extraction with an error, and the
//! caller throws the directory away. Owners and times are not taken over; of a file's mode, what others may not write.
//!
//! Why nothing gets outside: no name has `..` or a leading `/`, and each directory on the way to a name is checked to be one
//! and no link. A link's target is relative and has `..` only at its beginning, no more of them than the link's own depth:
//! a `..` after a name might leave through another link, one before all names starts in a directory that is known.

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

/// Entries and directories together; CNI plugins have some 20.
const MAX_ENTRIES: usize = 10_000;
/// Bytes of all files; the whole of Kubernetes' server binaries has less than half of it.
const MAX_UNPACKED: u64 = 2 << 30;
/// Unpacked bytes a packed one. Go binaries have 2 to 4, DEFLATE reaches 1032.
const MAX_RATIO: u64 = 100;
/// Padding of small archives: two empty blocks of a tar's end in a record of 10 KiB, and more.
const FREE: u64 = 1 << 20;
/// Bytes between two files' data: a header, and the long names and pax records that describe it.
const MAX_HEADER: u64 = 64 << 10;
/// Bytes in a name. PATH_MAX is 4096, with the directory's own.
const MAX_NAME: usize = 1024;

/// Why an archive was not unpacked.
#[derive(Debug)]
pub enum Error {
    /// It asks for what it may not have, or is no archive; a clause.
    Refused(String),
    /// Writing failed, there.
    Io(PathBuf, io::Error),
    /// Stopped from outside.
    Stopped,
}

/// What was unpacked, as paths below the directory; each directory comes before what is in it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Unpacked {
    pub directories: BTreeSet<PathBuf>,
    /// Regular files and links.
    pub files: BTreeSet<PathBuf>,
}

/// Unpacks `archive` into `root`, an empty directory. Files are on the disk when this returns, names may not be yet.
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
    // RFC 1952 §2.3.1: ID1, ID2
    match magic == [0x1f, 0x8b] {
        true => unpack_tar(MultiGzDecoder::new(archive), limit, root, stop),
        false => unpack_tar(archive, limit, root, stop),
    }
}

fn unpack_tar(reader: impl Read, limit: u64, root: &Path, stop: &Stop) -> Result<Unpacked, Error> {
    let allowance = Rc::new(Cell::new(MAX_HEADER));
    let mut archive = tar::Archive::new(Metered {
        reader,
        allowance: allowance.clone(),
    });
    let malformed =
        |error: io::Error| Error::Refused(format!("it is no proper tar archive: {error}"));

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
                "it unpacks to more than {limit} bytes, {MAX_RATIO} times its own size or too many"
            ));
        }
        if number + tree.made.directories.len() > MAX_ENTRIES {
            return refuse(format!("it has more than {MAX_ENTRIES} entries"));
        }
        allowance.set(MAX_HEADER + entry.size());
        tree.make(&mut entry, stop)?;
        // the next header starts with an allowance of its own
        io::copy(&mut entry, &mut io::sink()).map_err(malformed)?;
        allowance.set(MAX_HEADER);
    }
    Ok(tree.made)
}

/// A reader that gives no more than it is allowed: what lies between two files' data is read into memory whole.
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
        // describes the archive, not a file: `git archive` puts its commit there
        if kind == EntryType::XGlobalHeader {
            return Ok(());
        }
        // before POSIX a directory was a file whose name ends so
        let is_old_directory = kind == EntryType::Regular && entry.path_bytes().ends_with(b"/");
        let name = entry
            .path()
            .map_err(|error| Error::Refused(format!("a name is unusable: {error}")))?;
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

    /// Makes it and those above it, or finds them to be directories.
    fn make_directory(&mut self, name: &Path) -> Result<(), Error> {
        let mut path = PathBuf::new();
        for part in name.components() {
            path.push(part);
            if self.made.directories.contains(&path) {
                continue;
            }
            if self.made.files.contains(&path) {
                return refuse(format!(
                    "{} goes through {}, which is no directory",
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

    /// The place for a file: its directory is there, and no earlier entry of its name, which this one replaces.
    fn make_room(&mut self, name: &Path) -> Result<PathBuf, Error> {
        self.make_directory(name.parent().unwrap_or(Path::new("")))?;
        let full = self.root.join(name);
        if self.made.directories.contains(name) {
            return refuse(format!("{} is a directory and a file", name.display()));
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
        // not by umask
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
                "{} links to {}, which may be outside",
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
                "{} is a hard link to {}, no other file of it",
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

/// A name as a path below the root: empty for the root itself.
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
            _ => return refuse(format!("the name {name:?} leads outside")),
        }
    }
    Ok(path)
}

/// Whether a link that lies `depth` directories deep leads to something inside, whatever else is there.
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

/// GNU tar's sparse files in pax form come as regular files whose content is a map and the blocks between holes.
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
