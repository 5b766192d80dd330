//! Puts components into place, as a whole or not at all. New files are created in a staging directory beside the place, synced to
//! disk, and then renamed. A power failure leaves the old or the new component, and at worst the staging directory.
//!
//! An extracted archive leaves a list behind, `.sha256-<hash of the archive>`, in the format of sha256sum(1). If all files still
//! match the list, the archive is not fetched again. The list is put into place last. An image's builder can write it as well.

use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use ring::digest::{Context, SHA256};

use super::archive::Unpacked;
use super::digest::Digest;
use super::error::Error;
use base::text::hex;

/// The mode of a component that is a single file, as in Constellation.
const MODE: u32 = 0o544;
/// The maximum size of a list. It has room for ten times the permitted number of files.
const MAX_LIST: u64 = 16 << 20;

/// A staging directory beside the place of a component. It is removed when dropped.
pub struct Staging(PathBuf);

impl Staging {
    /// Creates a staging directory in `directory`, which is created if absent. `number` distinguishes concurrent ones.
    pub fn new(directory: &Path, number: usize) -> Result<Staging, Error> {
        fs::create_dir_all(directory).map_err(|error| Error::io("make", directory, error))?;
        let path = directory.join(format!(".firstlight-{number}.new"));
        // An interrupted run may have left this directory.
        if path.symlink_metadata().is_ok() {
            fs::remove_dir_all(&path).map_err(|error| Error::io("remove", &path, error))?;
        }
        fs::create_dir(&path).map_err(|error| Error::io("make", &path, error))?;
        Ok(Staging(path))
    }

    /// Returns the path for the downloaded bytes.
    pub fn download(&self) -> PathBuf {
        self.0.join("download")
    }

    /// Creates a new directory for an extracted archive.
    pub fn tree(&self) -> Result<PathBuf, Error> {
        let path = self.0.join("tree");
        fs::create_dir(&path).map_err(|error| Error::io("make", &path, error))?;
        Ok(path)
    }

    /// Moves the downloaded file to `place`.
    pub fn publish_file(&self, place: &Path) -> Result<(), Error> {
        let new = self.download();
        let finish = || {
            let file = File::open(&new)?;
            file.set_permissions(Permissions::from_mode(MODE))?;
            file.sync_all()
        };
        finish().map_err(|error| Error::io("write", &new, error))?;
        rename(&new, place)?;
        sync(place.parent().unwrap_or(place))
    }

    /// Moves the extracted files into `directory`. Then writes the list of files, if the component has a hash.
    pub fn publish_tree(
        &self,
        unpacked: &Unpacked,
        directory: &Path,
        archive: Option<&Digest>,
    ) -> Result<(), Error> {
        let tree = self.0.join("tree");
        let list = self.0.join("list");
        if let Some(hash) = archive {
            fs::write(&list, checksums(&tree, unpacked)?)
                .and_then(|()| File::open(&list)?.sync_all())
                .map_err(|error| Error::io("write", &list, error))?;
            // An old list no longer describes the files.
            let _ = fs::remove_file(list_of(directory, hash));
        }
        for name in &unpacked.directories {
            let path = directory.join(name);
            match fs::create_dir(&path) {
                Err(error)
                    if error.kind() == io::ErrorKind::AlreadyExists && is_directory(&path) => {}
                made => made.map_err(|error| Error::io("make", &path, error))?,
            }
        }
        for name in &unpacked.files {
            rename(&tree.join(name), &directory.join(name))?;
        }
        sync(directory)?;
        for name in &unpacked.directories {
            sync(&directory.join(name))?;
        }
        match archive {
            None => Ok(()),
            Some(hash) => {
                rename(&list, &list_of(directory, hash))?;
                sync(directory)
            }
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // If the removal fails, the next run removes the directory.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Returns whether the file at `path` has this SHA-256. `false` if there is none.
pub fn is_file(path: &Path, expected: &Digest) -> bool {
    path.symlink_metadata()
        .is_ok_and(|metadata| metadata.is_file())
        && digest(path).is_ok_and(|got| got == *expected)
}

/// Returns whether all files of this archive are in `directory`, unchanged.
pub fn is_unpacked(directory: &Path, archive: &Digest) -> bool {
    let mut list = String::new();
    let read = File::open(list_of(directory, archive))
        .and_then(|file| file.take(MAX_LIST).read_to_string(&mut list));
    let holds = |line: &str| {
        line.split_once("  ").is_some_and(|(sum, name)| {
            digest(&directory.join(name))
                .is_ok_and(|digest| hex(&digest) == sum.to_ascii_lowercase())
        })
    };
    read.is_ok() && !list.is_empty() && list.lines().all(holds)
}

fn list_of(directory: &Path, archive: &Digest) -> PathBuf {
    directory.join(format!(".sha256-{}", hex(archive)))
}

/// Builds the list with the hash of each file, read through links. A link to nothing or to a directory is omitted.
fn checksums(tree: &Path, unpacked: &Unpacked) -> Result<String, Error> {
    let mut list = String::new();
    for name in &unpacked.files {
        let path = tree.join(name);
        if path.metadata().is_ok_and(|metadata| metadata.is_file()) {
            let sum = digest(&path).map_err(|error| Error::io("read", &path, error))?;
            list += &format!("{}  {}\n", hex(&sum), name.display());
        }
    }
    Ok(list)
}

/// Returns the SHA-256 of a file's contents.
pub fn digest(path: &Path) -> io::Result<Digest> {
    let mut file = File::open(path)?;
    let mut context = Context::new(&SHA256);
    let mut buffer = vec![0; 64 << 10];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            count => context.update(&buffer[..count]),
        }
    }
    Ok(finish(context))
}

/// Returns the digest of all data that the context received.
pub fn finish(context: Context) -> Digest {
    let mut digest = Digest::default();
    digest.copy_from_slice(context.finish().as_ref());
    digest
}

fn is_directory(path: &Path) -> bool {
    path.symlink_metadata()
        .is_ok_and(|metadata| metadata.is_dir())
}

fn rename(from: &Path, to: &Path) -> Result<(), Error> {
    fs::rename(from, to).map_err(|error| Error::io("put into place", to, error))
}

fn sync(directory: &Path) -> Result<(), Error> {
    File::open(directory)
        .and_then(|file| file.sync_all())
        .map_err(|error| Error::io("write", directory, error))
}
