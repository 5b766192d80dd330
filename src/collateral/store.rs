//! Stores for fetched items: a directory, or one file of collateral. A store's content is trusted no more than a server's answer.

use std::borrow::Cow;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hardware::{Cause, Unavailable};

use crate::item::{Item, MAX_COLLATERAL, chip_of};

/// Maximum number of files in a directory. A further file replaces the oldest certificate of a chip: strangers can name any chips.
const MAX_FILES: usize = 4096;
/// The beginning of the names of files that are being written.
const TEMPORARY: &str = ".writing-";

/// A store. Its errors are logged and not returned, because a validation succeeds without it.
pub trait Store: Send + Sync {
    /// Returns the stored entry of an item.
    fn load(&self, item: &Item) -> Option<Stored>;
    /// Stores an item.
    fn save(&self, item: &Item, bytes: &[u8]);
}

/// A stored entry.
pub struct Stored {
    /// The bytes, which may be anything.
    pub bytes: Vec<u8>,
    /// When they were fetched, in seconds since 1970; 0 if that is not known.
    pub fetched: u64,
}

/// Stores nothing.
pub struct Nowhere;

impl Store for Nowhere {
    fn load(&self, _item: &Item) -> Option<Stored> {
        None
    }

    fn save(&self, _item: &Item, _bytes: &[u8]) {}
}

/// A directory with a file for each entry.
pub struct Directory(PathBuf);

impl Directory {
    /// Uses a directory. If it does not exist, it is made, and only this user may read it.
    pub fn new(path: &Path) -> Result<Directory, Unavailable> {
        match DirBuilder::new().recursive(true).mode(0o700).create(path) {
            Ok(()) => Ok(Directory(path.into())),
            Err(error) => {
                let why = format!("cannot make {}: {error}", path.display());
                Err(Cause::Setting.because(why))
            }
        }
    }

    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        // two programs, and two threads of one, may share the directory
        static LAST: AtomicU64 = AtomicU64::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed);
        let temporary = format!("{TEMPORARY}{}-{number}", std::process::id());
        let temporary = self.0.join(temporary);
        let written = File::create(&temporary)
            .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
            .and_then(|()| fs::rename(&temporary, self.0.join(name)));
        if written.is_err() {
            // return the error of the write, not that of the removal
            let _ = fs::remove_file(&temporary);
        }
        written
    }

    /// Deletes the files beyond [`MAX_FILES`], and temporary files that a killed program left behind.
    fn tidy(&self) -> io::Result<()> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.0)? {
            let entry = entry?;
            let modified = entry.metadata().and_then(|data| data.modified());
            let modified = modified.unwrap_or(UNIX_EPOCH);
            let is_temporary = entry.file_name().to_string_lossy().starts_with(TEMPORARY);
            let age = SystemTime::now().duration_since(modified);
            if is_temporary && age.is_ok_and(|age| age > Duration::from_secs(3600)) {
                fs::remove_file(entry.path())?;
            } else if !is_temporary && is_of_a_cache(&entry.path()) {
                files.push((modified, entry.path()));
            }
        }
        files.sort_by_cached_key(|(modified, path): &(SystemTime, PathBuf)| {
            (chip_of(&file_name(path)).is_none(), *modified)
        });
        let surplus = files.len().saturating_sub(MAX_FILES);
        files[..surplus]
            .iter()
            .try_for_each(|(_, path)| fs::remove_file(path))
    }
}

/// Returns whether a file's name is one that [`Item::name`] makes.
fn is_of_a_cache(path: &Path) -> bool {
    let name = file_name(path);
    // earlier versions stored the authorities, too
    let starts = ["vcek-", "vlek-", "ask-", "asvk-", "tdx-", "issuer-"];
    starts.iter().any(|start| name.starts_with(start))
}

fn file_name(path: &Path) -> Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}

impl Store for Directory {
    fn load(&self, item: &Item) -> Option<Stored> {
        load(&self.0.join(item.name()))
    }

    fn save(&self, item: &Item, bytes: &[u8]) {
        let written = self.write(&item.name(), bytes).and_then(|()| self.tidy());
        if let Err(error) = written {
            log::warn!("{}: cannot store {item}: {error}", self.0.display());
        }
    }
}

/// One file with the collateral of one kind of platform, which is never written.
pub struct CollateralFile(pub PathBuf);

impl Store for CollateralFile {
    fn load(&self, item: &Item) -> Option<Stored> {
        matches!(item, Item::Tdx { .. }).then(|| load(&self.0))?
    }

    fn save(&self, _item: &Item, _bytes: &[u8]) {}
}

fn load(path: &Path) -> Option<Stored> {
    let read = || -> io::Result<Stored> {
        let file = File::open(path)?;
        let modified = file.metadata()?.modified()?;
        let mut bytes = Vec::new();
        file.take(MAX_COLLATERAL as u64 + 1)
            .read_to_end(&mut bytes)?;
        let since = modified.duration_since(UNIX_EPOCH);
        let fetched = since.map_or(0, |since| since.as_secs());
        Ok(Stored { bytes, fetched })
    };
    match read() {
        Ok(stored) => Some(stored),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            log::warn!("cannot read {}: {error}", path.display());
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use hardware::snp::report::ReportSigner;
    use hardware::snp::tcb::{Product, Tcb};

    use super::*;

    #[test]
    fn certificates_of_chips_remove_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let store = Directory::new(folder.path()).unwrap();
        let list = Item::Revoked(Product::Milan, ReportSigner::Vcek);
        store.save(&list, b"list");
        let file = File::options()
            .append(true)
            .open(folder.path().join(list.name()));
        file.unwrap().set_modified(UNIX_EPOCH).unwrap();
        for number in 0..MAX_FILES {
            let name = format!("vcek-milan-{number:0128x}-0.0.0.0.0.der");
            File::create(folder.path().join(name)).unwrap();
        }
        let chip = Item::Vcek {
            product: Product::Milan,
            chip: vec![0xff; 64],
            tcb: Tcb::default(),
        };
        store.save(&chip, b"chip");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), MAX_FILES);
        assert_eq!(store.load(&list).unwrap().bytes, b"list");
        assert_eq!(store.load(&chip).unwrap().bytes, b"chip");
    }
}
