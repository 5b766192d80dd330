//! Where components go: whole or not at all. What is new is made in a directory of ours beside its place, written to the
//! disk, and only then renamed into place; so a cut of power leaves the old or the new, and that directory at worst.
//!
//! Of an unpacked archive a list stays behind, `.sha256-<hash of the archive>` in the form of sha256sum(1): when all that it
//! names is still so, the archive need not be fetched again. It is the last to come into place, and an image's builder can
//! write it too.

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use ring::digest::{Context, SHA256};

use super::archive::Unpacked;
use super::{Digest, Error, hex};

/// Mode of a component that is one file, as the old system has it.
const MODE: u32 = 0o544;
/// A list of this length names ten times more files than an archive may have.
const MAX_LIST: u64 = 16 << 20;

/// A directory of ours beside the place of a component, removed when dropped.
pub struct Staging(PathBuf);

impl Staging {
    /// In `directory`, which is made if it is not there; `number` tells it from others made there at the same time.
    pub fn new(directory: &Path, number: usize) -> Result<Staging, Error> {
        fs::create_dir_all(directory).map_err(|error| Error::io("make", directory, error))?;
        let path = directory.join(format!(".firstlight-{number}.new"));
        // of a run that was cut off
        if path.symlink_metadata().is_ok() {
            fs::remove_dir_all(&path).map_err(|error| Error::io("remove", &path, error))?;
        }
        fs::create_dir(&path).map_err(|error| Error::io("make", &path, error))?;
        Ok(Staging(path))
    }

    /// Where the component's bytes go first.
    pub fn download(&self) -> PathBuf {
        self.0.join("download")
    }

    /// A new directory to unpack it into.
    pub fn tree(&self) -> Result<PathBuf, Error> {
        let path = self.0.join("tree");
        fs::create_dir(&path).map_err(|error| Error::io("make", &path, error))?;
        Ok(path)
    }

    /// Puts the downloaded file at `place`.
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

    /// Puts what was unpacked into `directory`, each file where it belongs, then the list if there is a hash.
    pub fn publish_tree(
        &self,
        unpacked: &Unpacked,
        directory: &Path,
        archive: Option<&Digest>,
    ) -> Result<(), Error> {
        let tree = self.0.join("tree");
        let list = self.0.join("list");
        let mut changed = BTreeSet::from([directory.to_owned()]);
        if let Some(hash) = archive {
            fs::write(&list, checksums(&tree, unpacked)?)
                .and_then(|()| File::open(&list)?.sync_all())
                .map_err(|error| Error::io("write", &list, error))?;
            // what it says of the old files is no longer true
            let _ = fs::remove_file(list_of(directory, hash));
        }
        for name in &unpacked.directories {
            let path = directory.join(name);
            match fs::create_dir(&path) {
                Err(error)
                    if error.kind() == io::ErrorKind::AlreadyExists && is_directory(&path) => {}
                made => made.map_err(|error| Error::io("make", &path, error))?,
            }
            changed.insert(path);
        }
        for name in &unpacked.files {
            rename(&tree.join(name), &directory.join(name))?;
        }
        for path in &changed {
            sync(path)?;
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
        // the next run removes it otherwise
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Whether the file at `path` has this SHA-256; an absent one has not.
pub fn is_file(path: &Path, expected: &Digest) -> bool {
    path.symlink_metadata()
        .is_ok_and(|metadata| metadata.is_file())
        && digest(path).is_ok_and(|got| got == *expected)
}

/// Whether all that this archive had is in `directory` as it was unpacked.
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

/// The list: what each file and link gives to whoever reads it. A link to nothing, or to a directory, is not in it.
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

/// SHA-256 of a file's content.
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

/// The digest of all that the context was given.
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
