//! Frees space on the state disk: deletes journals of earlier boots, rotated logs of containers, and images that no container uses. The
//! report also says what takes the rest.
//!
//! The kubelet deletes images and old logs too, but not while it does not run; and until a journal is a month old, nothing else deletes it.
//! The API server limits its audit log itself; it stays.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use kubernetes::kubeadm::CONTAINERD;

use super::OperatorService;
use super::logs::JOURNALS;
use base::child_process::{self, ChildFailure};

/// Where the kubelet has logs of containers: `NAMESPACE_POD_UID/CONTAINER/0.log`.
const POD_LOGS: &str = "/var/log/pods";
/// Time limit of one program.
const LIMIT: Duration = Duration::from_secs(2 * 60);
/// Maximum number of folders in the report.
const FOLDERS: usize = 20;

/// Files that were deleted.
#[derive(Default)]
struct Deleted {
    files: u64,
    bytes: u64,
}

impl Deleted {
    fn line(&self, what: &str) -> String {
        format!("{what}: {} files, {} MiB", self.files, self.bytes >> 20)
    }
}

impl OperatorService {
    /// Returns the report, one fact a line.
    pub(super) fn clean(&self) -> String {
        let mut report = vec![
            self.delete_journals().line("deleted journals"),
            self.delete_rotated_logs()
                .line("deleted rotated logs of containers"),
            self.delete_images(),
        ];
        let root = self.machine.root.as_os_str();
        let mut free = Command::new("df");
        free.args(["--human-readable", "--output=size,avail,pcent,ipcent"]);
        report.extend(self.lines(free.arg(root)));
        report.push("the largest folders, in MiB:".into());
        report.extend(self.largest());
        report.join("\n")
    }

    /// Deletes the journals of other boots, and what journald does not write to any more.
    fn delete_journals(&self) -> Deleted {
        let mut deleted = Deleted::default();
        let own = self.machine.id();
        if own.is_empty() {
            // the journal of this boot could be any
            return deleted;
        }
        let folders = fs::read_dir(self.machine.file(JOURNALS)).into_iter();
        for folder in folders.flatten().flatten() {
            let name = folder.file_name().to_string_lossy().into_owned();
            let is_own = name.starts_with(&own);
            delete(&folder.path(), 0, &mut deleted, &|file| {
                // journald adds the first to the name of a file that it has finished, the second to that of a broken one
                !is_own || file.contains('@') || file.ends_with('~')
            });
            // it stays if it is not empty
            let _ = fs::remove_dir(folder.path());
        }
        deleted
    }

    /// Deletes what the kubelet has rotated: `0.log.20261129-023000.gz`.
    fn delete_rotated_logs(&self) -> Deleted {
        let mut deleted = Deleted::default();
        let folder = self.machine.file(POD_LOGS);
        delete(&folder, 2, &mut deleted, &|file| file.contains(".log."));
        deleted
    }

    fn delete_images(&self) -> String {
        let crictl = self.machine.root.join("bin/crictl");
        if !crictl.exists() {
            return "images: this node has no crictl, so only the kubelet deletes unused ones"
                .into();
        }
        let mut count = 0;
        let mut prune = Command::new(crictl);
        prune.args(["--runtime-endpoint", CONTAINERD, "--timeout", "60s"]);
        prune.args(["rmi", "--prune"]);
        let tell = &mut |line: &str| count += u64::from(line.starts_with("Deleted: "));
        match child_process::run(&mut prune, Stdio::null(), LIMIT, &self.machine.stop, tell) {
            Ok(()) => format!("deleted images that no container uses: {count}"),
            Err(error) => format!("images: {error}"),
        }
    }

    /// Returns the largest folders with their size, the largest first, and the pod to which one belongs. A folder is omitted if nearly all
    /// of its content is in one of the folders in it.
    fn largest(&self) -> Vec<String> {
        let pods: Vec<_> = fs::read_dir(self.machine.file(POD_LOGS))
            .into_iter()
            .flatten()
            .flatten()
            .map(|it| it.file_name().to_string_lossy().into_owned())
            .collect();
        let mut usage = Command::new("du");
        usage.args(["--one-file-system", "--block-size=1M", "--threshold=16M"]);
        usage.args(["--max-depth=8"]).arg(&self.machine.root);
        let lines = self.lines(&mut usage);
        let sized = |line: &String| {
            // a tab stands between them, which is no visible character
            let (size, path) = line.split_at(line.find('/')?);
            Some((size.trim().parse::<u64>().ok()?, path.to_owned()))
        };
        let all: Vec<_> = lines.iter().filter_map(sized).collect();
        let is_in_one = |(size, path): &&(u64, String)| {
            let is_inner = |inner: &str| {
                inner
                    .strip_prefix(path)
                    .is_some_and(|it| it.starts_with('/'))
            };
            all.iter()
                .any(|(of, inner)| is_inner(inner) && of * 10 >= size * 9)
        };
        let mut shown: Vec<_> = all.iter().filter(|it| !is_in_one(it)).collect();
        shown.sort_by_key(|(size, _)| std::cmp::Reverse(*size));
        let with_pod = |(size, path): &(u64, String)| {
            let of = |name: &&String| name.rsplit('_').next().is_some_and(|it| path.contains(it));
            match pods.iter().find(of).and_then(|it| it.rsplit_once('_')) {
                Some((pod, _)) => format!("{size} {path} (pod {})", pod.replace('_', "/")),
                None => format!("{size} {path}"),
            }
        };
        shown.into_iter().take(FOLDERS).map(with_pod).collect()
    }

    /// Returns what a program prints, or why it does not.
    fn lines(&self, command: &mut Command) -> Vec<String> {
        let mut lines = vec![];
        command.env("LC_ALL", "C.UTF-8").env_remove("LANGUAGE");
        let tell = &mut |line: &str| lines.push(line.to_owned());
        match child_process::run(command, Stdio::null(), LIMIT, &self.machine.stop, tell) {
            // du also fails if a folder was deleted meanwhile
            Err(error) if !matches!(error.cause, ChildFailure::Failed(_)) => {
                vec![error.to_string()]
            }
            _ => lines,
        }
    }
}

/// Deletes the files with such names in a folder and the folders in it, so many levels deep. Follows no symbolic link.
fn delete(folder: &Path, levels: u32, deleted: &mut Deleted, is_it: &dyn Fn(&str) -> bool) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(kind) = entry.file_type() else {
            continue;
        };
        if kind.is_dir() {
            if levels > 0 {
                delete(&entry.path(), levels - 1, deleted, is_it);
            }
        } else if is_it(&entry.file_name().to_string_lossy()) {
            let bytes = entry.metadata().map_or(0, |it| it.blocks() * 512);
            if fs::remove_file(entry.path()).is_ok() {
                deleted.files += 1;
                deleted.bytes += bytes;
            }
        }
    }
}
