//! Checks a list without a network: as a node will read it, and against downloaded files.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use ring::digest::{Context, SHA256};

use super::list::read;
use crate::shell::{error::Error, files::FileError};
use base::text::hex;
use kubernetes::components::{ComponentPolicy, KubernetesComponent};
use proto::components::Component as Wire;

/// The programs that a node starts; each needs its own entry.
const NEEDED: [&str; 3] = ["kubelet", "kubeadm", "kubectl"];

/// Checks the list, and those files in the folder that belong to it. Returns a sentence for people.
pub fn check(list: &Path, folder: Option<&Path>) -> Result<String, Error> {
    let entries = read(list)?;
    let fault =
        |error: &dyn std::fmt::Display| Error::content(format!("{}: {error}", list.display()));
    for entry in &entries {
        KubernetesComponent::parse(entry, &ComponentPolicy::default())
            .map_err(|error| fault(&error))?;
    }
    for name in NEEDED {
        if !entries
            .iter()
            .any(|entry| file_name(&entry.install_path) == name)
        {
            return Err(fault(&format_args!("no component is installed as {name}")));
        }
    }
    let mut checked = 0;
    for entry in &entries {
        let Some(folder) = folder else { continue };
        let path = folder.join(file_name(&entry.url));
        // those of data: the list has URLs
        if entry.url.starts_with("data:") || !path.exists() {
            continue;
        }
        compare(entry, &path)?;
        checked += 1;
    }
    let count = entries.len();
    Ok(match folder {
        None => format!(
            "{}: {count} components, each in the form that a node requires",
            list.display()
        ),
        Some(folder) => format!(
            "{}: {count} components, each in the form that a node requires; {checked} files in {} have the hash of the list",
            list.display(),
            folder.display()
        ),
    })
}

fn compare(entry: &Wire, path: &Path) -> Result<(), Error> {
    let fault = |error| FileError::Io("read", path.into(), error);
    let mut file = File::open(path).map_err(fault)?;
    let (mut hash, mut chunk) = (Context::new(&SHA256), [0; 64 << 10]);
    loop {
        match file.read(&mut chunk).map_err(fault)? {
            0 => break,
            count => hash.update(&chunk[..count]),
        }
    }
    let got = format!("sha256:{}", hex(hash.finish().as_ref()));
    if got == entry.hash {
        Ok(())
    } else {
        Err(Error::content(format!(
            "{}: expected {} for {}, got {got}",
            path.display(),
            entry.hash,
            entry.url
        )))
    }
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}
