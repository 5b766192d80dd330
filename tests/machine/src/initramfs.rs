//! The small initramfs, and the files that a test adds to it: a cpio archive in the `newc` format of the kernel's
//! Documentation/driver-api/early-userspace/buffer-format.rst, of which several may follow each other.

use super::{Context, Failure, Result, dist, script};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Files to add, by their path in the machine.
#[derive(Default)]
pub struct Overlay {
    files: BTreeMap<String, (u32, Vec<u8>)>,
}

impl Overlay {
    /// A file with these bytes; `mode` are its permission bits. `path` starts with a slash.
    pub fn file(&mut self, path: &str, mode: u32, content: impl Into<Vec<u8>>) -> &mut Overlay {
        self.files.insert(
            path.trim_start_matches('/').to_owned(),
            (0o100_000 | mode, content.into()),
        );
        self
    }

    /// A program of the host and the shared libraries that it names, each under the path that it has on the host.
    pub fn host_program(&mut self, name: &str) -> Result<&mut Overlay> {
        let found = ["/sbin", "/bin", "/usr/sbin", "/usr/bin", "/lib/systemd"]
            .iter()
            .map(|dir| Path::new(dir).join(name));
        let path = found
            .into_iter()
            .find(|path| path.is_file())
            .ok_or_else(|| Failure(format!("{name} is not installed")))?;
        let libraries = Command::new("ldd").arg(&path).output().context("run ldd")?;
        let libraries = String::from_utf8_lossy(&libraries.stdout).into_owned();
        let libraries = libraries
            .split_whitespace()
            .filter(|word| word.starts_with('/'))
            .map(PathBuf::from);
        // opened by name when a thread is cancelled, so no list of needed libraries has it
        let hidden = Path::new("/lib/x86_64-linux-gnu/libgcc_s.so.1");
        for file in libraries.chain([hidden.to_owned(), path.clone()]) {
            let content = std::fs::read(&file).context(&format!("read {}", file.display()))?;
            self.file(&file.to_string_lossy(), 0o755, content);
        }
        Ok(self)
    }

    /// The archive.
    fn to_cpio(&self) -> Vec<u8> {
        let mut entries: BTreeMap<String, (u32, &[u8])> = BTreeMap::new();
        for (path, (mode, content)) in &self.files {
            for (end, _) in path.match_indices('/') {
                entries.insert(path[..end].to_owned(), (0o040_755, &[]));
            }
            entries.insert(path.clone(), (*mode, content));
        }
        let mut out = Vec::new();
        for (inode, (path, (mode, content))) in entries.iter().enumerate() {
            entry(&mut out, inode + 1, path, *mode, content);
        }
        entry(&mut out, 0, "TRAILER!!!", 0, &[]);
        out.resize(out.len().next_multiple_of(512), 0);
        out
    }
}

/// One member: a header of 13 eight-digit hexadecimal numbers, the name, the content, each padded to four bytes.
fn entry(out: &mut Vec<u8>, inode: usize, path: &str, mode: u32, content: &[u8]) {
    let links = 1;
    let header = [
        inode,
        mode as usize,
        0,
        0,
        links,
        0,
        content.len(),
        0,
        0,
        0,
        0,
        path.len() + 1,
        0,
    ];
    out.extend_from_slice(b"070701");
    header
        .iter()
        .for_each(|field| out.extend_from_slice(format!("{field:08X}").as_bytes()));
    out.extend_from_slice(path.as_bytes());
    out.push(0);
    out.resize(out.len().next_multiple_of(4), 0);
    out.extend_from_slice(content);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// The initramfs with the named programs of `make build` in it, and `overlay` behind it, written to `out`.
pub fn build(out: &Path, programs: &[&str], overlay: &Overlay) -> Result<()> {
    let programs: Vec<PathBuf> = programs
        .iter()
        .map(|name| dist(name))
        .collect::<Result<_>>()?;
    let arguments: Vec<&Path> = std::iter::once(out)
        .chain(programs.iter().map(PathBuf::as_path))
        .collect();
    script("initramfs/build.sh", &arguments)?;
    append(out, overlay)
}

/// Appends `overlay` to the initramfs `out`.
pub fn append(out: &Path, overlay: &Overlay) -> Result<()> {
    if !overlay.files.is_empty() {
        let mut bytes = std::fs::read(out).context("read the initramfs")?;
        bytes.extend_from_slice(&overlay.to_cpio());
        std::fs::write(out, bytes).context("write the initramfs")?;
    }
    Ok(())
}

#[test]
fn the_archive_is_what_cpio_reads() {
    let folder = tempfile::tempdir().unwrap();
    let mut overlay = Overlay::default();
    overlay
        .file("/case", 0o755, *b"#!/bin/sh\n")
        .file("/usr/share/a/b", 0o600, *b"12345");
    let archive = folder.path().join("a.cpio");
    std::fs::write(&archive, overlay.to_cpio()).unwrap();
    let listing = Command::new("cpio")
        .args(["-itv", "--quiet", "-F"])
        .arg(&archive)
        .output()
        .unwrap();
    let listing = String::from_utf8(listing.stdout).unwrap();
    let members: Vec<(&str, &str)> = listing
        .lines()
        .map(|line| (&line[..10], line.rsplit(' ').next().unwrap()))
        .collect();
    let expected = [
        ("-rwxr-xr-x", "case"),
        ("drwxr-xr-x", "usr"),
        ("drwxr-xr-x", "usr/share"),
        ("drwxr-xr-x", "usr/share/a"),
        ("-rw-------", "usr/share/a/b"),
    ];
    assert_eq!(members, expected);
}
