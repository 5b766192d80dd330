//! Checks a list without a network: as a node will read it, and against downloaded files.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use ring::digest::{Context, SHA256};

use super::list::read;
use crate::shell::{error::Error, files::FileError};
use base::text::hex;
use clap::{Args, ValueEnum};
use kubernetes::components::{ComponentPolicy, KubernetesComponent};
use proto::components::Component as Wire;

/// The programs that a node starts; each needs its own entry.
const NEEDED: [&str; 3] = ["kubelet", "kubeadm", "kubectl"];

/// A fault of a list that some images make up for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ListFault {
    /// An entry without a hash, for images with the setting allow-unverified-components
    Unverified,
    /// No entry for kubelet, kubeadm or kubectl, for images that have them
    MissingPrograms,
}

/// The faults that a list may have.
#[derive(Debug, Clone, Default, Args)]
pub struct ListExceptions {
    /// Take a list with these faults, which is refused otherwise
    #[arg(long, value_name = "FAULT,..", value_delimiter = ',')]
    pub accept_components: Vec<ListFault>,
}

impl ListExceptions {
    fn permit(&self, fault: ListFault) -> bool {
        self.accept_components.contains(&fault)
    }
}

/// Checks the list in a file, and those files in the folder that belong to it. Returns a sentence for people.
pub fn check(
    list: &Path,
    folder: Option<&Path>,
    exceptions: &ListExceptions,
) -> Result<String, Error> {
    let entries = read(list)?;
    check_entries(&list.display(), &entries, exceptions)?;
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

/// Fails if a node would refuse the list, or would lack a program that it starts. `source` is where the list comes from.
pub fn check_entries(
    source: &dyn fmt::Display,
    entries: &[Wire],
    exceptions: &ListExceptions,
) -> Result<(), Error> {
    let fault = |error: &dyn fmt::Display| Error::content(format!("{source}: {error}"));
    for entry in entries {
        let parse = |allow_unverified| {
            let policy = ComponentPolicy {
                allow_unverified,
                ..ComponentPolicy::default()
            };
            KubernetesComponent::parse(entry, &policy)
        };
        parse(true).map_err(|error| fault(&error))?;
        if !exceptions.permit(ListFault::Unverified) {
            parse(false).map_err(|error| {
                fault(&format_args!(
                    "{error}: add its hash, or --accept-components unverified if the image has the setting allow-unverified-components"
                ))
            })?;
        }
    }
    let is_there = |name: &str| {
        let mut places = entries.iter().map(|entry| file_name(&entry.install_path));
        places.any(|place| place == name)
    };
    match NEEDED.into_iter().find(|name| !is_there(name)) {
        Some(missing) if !exceptions.permit(ListFault::MissingPrograms) => {
            Err(fault(&format_args!(
                "no component is installed as {missing}: add it, or --accept-components missing-programs if the image has it"
            )))
        }
        _ => Ok(()),
    }
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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;
    use crate::trust::components::of;

    fn entry(name: &str) -> Value {
        let hash = format!("sha256:{}", "00".repeat(32));
        json!({"url": format!("https://a/{name}"), "hash": hash, "install_path": format!("/run/state/bin/{name}")})
    }

    /// Each row: a change of a complete list, the fault that permits it, and the reason of the refusal.
    #[test]
    fn init_takes_the_lists_that_the_check_accepts() {
        type Change = fn(&mut Vec<Value>);
        let rows: [(Change, Option<ListFault>, &str); 8] = [
            (|_| {}, None, ""),
            (
                |list| drop(list[0].as_object_mut().unwrap().remove("hash")),
                Some(ListFault::Unverified),
                "it has no hash, and unverified components are not allowed: add its hash, or --accept-components unverified",
            ),
            (
                |list| drop(list.remove(2)),
                Some(ListFault::MissingPrograms),
                "no component is installed as kubectl: add it, or --accept-components missing-programs",
            ),
            (
                |list| list.clear(),
                Some(ListFault::MissingPrograms),
                "no component is installed as kubelet",
            ),
            (
                |list| list[1]["install_path"] = "/etc/kubeadm".into(),
                None,
                "not in an allowed directory",
            ),
            (
                |list| list[1]["install_path"] = "/run/state/bin/../kubeadm".into(),
                None,
                "is not an absolute path",
            ),
            (
                |list| list[1]["hash"] = "sha256:00".into(),
                None,
                "is not sha256: and 64 hex digits",
            ),
            (
                |list| list[1]["url"] = "ftp://a/kubeadm".into(),
                None,
                "expected http, https, file or data",
            ),
        ];
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("components.json");
        let all = [ListFault::Unverified, ListFault::MissingPrograms];
        for (change, permitted_by, why) in rows {
            let mut list = ["kubelet", "kubeadm", "kubectl"].map(entry).to_vec();
            change(&mut list);
            fs::write(&path, Value::from(list).to_string()).unwrap();
            let judged = |faults: &[ListFault]| {
                let exceptions = ListExceptions {
                    accept_components: faults.to_vec(),
                };
                let checked = check(&path, None, &exceptions).map(drop);
                let version = "v1.36.4".parse().unwrap();
                let taken = of(&version, Some(&path), &exceptions, Duration::ZERO).map(drop);
                let text = |result: Result<(), Error>| result.map_err(|error| error.to_string());
                let (checked, taken) = (text(checked), text(taken));
                assert_eq!(checked, taken, "{why}");
                taken.err().unwrap_or_default()
            };
            let refused = judged(&[]);
            assert!(
                refused.contains(why) && refused.is_empty() == why.is_empty(),
                "{why}: {refused}"
            );
            for fault in all.into_iter().filter(|it| permitted_by != Some(*it)) {
                assert_eq!(judged(&[fault]), refused);
            }
            // an exception permits its own fault, and nothing that no image makes up for
            let is_permitted = permitted_by.is_some() || why.is_empty();
            assert_eq!(judged(&all).is_empty(), is_permitted, "{why}");
        }
    }
}
