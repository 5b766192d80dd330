//! etcd's priority for disk I/O. etcd depends on fast writes: a member whose writes wait for those
//! of other pods loses its leadership.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use base::boot::timeline::Timeline;
use base::stop::Stop;
use sys::process;

/// The manifest of etcd's static pod; only control planes have it.
pub const MANIFEST: &str = "/etc/kubernetes/manifests/etcd.yaml";
/// Longest search for the process. It begins after `kubeadm init`; after a reboot the kubelet takes
/// some time to start etcd.
const SEARCH: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(200);
/// How long the search under a new kubelet goes on after it last found another process of etcd.
const SETTLED: Duration = Duration::from_secs(20);

/// Gives all threads of etcd the highest I/O priority, as soon as etcd runs. A failure is only
/// logged, since the node works without it. Returns at once on a worker.
pub fn prioritize_io(stop: &Stop, timeline: &Timeline) {
    wait("etcd to start", Duration::ZERO, stop, timeline);
}

/// Does the same after another version of the kubelet has started. This may replace etcd's pod a
/// few seconds later, because the UID of a static pod is a hash of the kubelet's own representation
/// of its manifest.
pub fn prioritize_io_under_new_kubelet(stop: &Stop, timeline: &Timeline) {
    let what = "the new kubelet to keep or replace etcd";
    wait(what, SETTLED, stop, timeline);
}

fn wait(what: &str, settled: Duration, stop: &Stop, timeline: &Timeline) {
    if Path::new(MANIFEST).exists() {
        timeline.waiting_for(what, || {
            prioritize_when_settled(&|| find(Path::new("/proc")), settled, stop);
        });
    }
}

/// Gives the priority to each process that is found, until the same ones have been found for
/// `settled`, or [`SEARCH`] is over.
fn prioritize_when_settled(find: &dyn Fn() -> Vec<u32>, settled: Duration, stop: &Stop) {
    let begin = Instant::now();
    let (mut known, mut since) = (Vec::<u32>::new(), begin);
    loop {
        let found = find();
        if found != known {
            let new = found.iter().filter(|process| !known.contains(process));
            new.copied().for_each(prioritize);
            (known, since) = (found, Instant::now());
        }
        if !known.is_empty() && since.elapsed() >= settled {
            return;
        }
        if begin.elapsed() >= SEARCH {
            break;
        }
        if stop.wait(PAUSE) {
            return;
        }
    }
    if known.is_empty() {
        log::warn!(
            "etcd has not started within {} s, so this program cannot raise etcd's I/O priority",
            SEARCH.as_secs()
        );
    }
}

/// Returns the processes whose program is called `etcd`.
fn find(proc: &Path) -> Vec<u32> {
    let is_etcd = |process: &u32| {
        let program = fs::read_link(proc.join(process.to_string()).join("exe"));
        program.is_ok_and(|program| program.file_name().is_some_and(|name| name == "etcd"))
    };
    let mut processes: Vec<_> = numbers(proc).into_iter().filter(is_etcd).collect();
    processes.sort_unstable();
    processes
}

/// Sets the priority of each thread. I/O priority belongs to a thread; threads that it starts later
/// inherit it.
fn prioritize(process: u32) {
    let tasks = Path::new("/proc").join(process.to_string()).join("task");
    let lacks = |thread: &u32| {
        let priority = process::io_priority(*thread);
        priority.is_ok_and(|it| it != process::HIGHEST_IO_PRIORITY)
    };
    loop {
        let threads = numbers(&tasks);
        let count = threads.len();
        let left: Vec<_> = threads.into_iter().filter(lacks).collect();
        if left.is_empty() {
            log::info!("etcd (process {process}): {count} threads have real-time I/O priority");
            return;
        }
        for thread in left {
            if let Err(error) = process::prioritize_io(thread) {
                log::warn!("cannot raise etcd's I/O priority: {error}");
                return;
            }
        }
    }
}

fn numbers(directory: &Path) -> Vec<u32> {
    let Ok(entries) = fs::read_dir(directory) else {
        return vec![];
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::os::unix::fs::symlink;
    use std::process::Command;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    fn assert_priority(thread: u32) {
        if support::is_root("set a real-time I/O priority") {
            let priority = process::io_priority(thread).unwrap();
            assert_eq!(priority, process::HIGHEST_IO_PRIORITY);
        }
    }

    #[test]
    fn etcd_is_found_by_its_program() {
        let proc = tempfile::tempdir().unwrap();
        for (number, program) in [
            ("7", "/usr/local/bin/etcd"),
            ("8", "/usr/bin/etcdctl"),
            ("9", "/bin/etcd (deleted)"),
        ] {
            fs::create_dir(proc.path().join(number)).unwrap();
            symlink(program, proc.path().join(number).join("exe")).unwrap();
        }
        fs::create_dir(proc.path().join("self")).unwrap();
        assert_eq!(find(proc.path()), [7]);
    }

    #[test]
    fn a_process_that_follows_under_a_new_kubelet_gets_the_priority_too() {
        let start = || Command::new("sleep").arg("60").spawn().unwrap();
        let (mut before, mut after) = (start(), start());
        let searches = Cell::new(0);
        let find = || {
            searches.set(searches.get() + 1);
            match searches.get() {
                ..=3 => vec![before.id()],
                4..=6 => vec![],
                _ => vec![after.id()],
            }
        };
        let settled = PAUSE * 4;
        prioritize_when_settled(&find, settled, &Stop::new());
        assert!(searches.get() >= 8, "it does not wait for the next process");
        for process in [&mut before, &mut after] {
            assert_priority(process.id());
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    #[test]
    fn every_thread_gets_the_priority_while_others_end() {
        let stop = Stop::new();
        // each of them starts and ends threads all the time
        let restless: Vec<_> = (0..4)
            .map(|_| {
                let stop = stop.clone();
                thread::spawn(move || {
                    while !stop.wait(Duration::ZERO) {
                        thread::spawn(|| ()).join().unwrap();
                    }
                })
            })
            .collect();
        let lasting: Vec<_> = (0..4)
            .map(|_| {
                let (stop, (send, number)) = (stop.clone(), mpsc::channel());
                let thread = thread::spawn(move || {
                    // PROCESS/task/THREAD
                    send.send(fs::read_link("/proc/thread-self").unwrap())
                        .unwrap();
                    stop.wait(Duration::from_secs(60));
                });
                let number = number.recv().unwrap();
                let number = number.file_name().unwrap().to_str().unwrap();
                (number.parse().unwrap(), thread)
            })
            .collect();
        prioritize(std::process::id());
        for (number, _) in &lasting {
            assert_priority(*number);
        }
        stop.stop();
        restless.into_iter().for_each(|it| it.join().unwrap());
        lasting.into_iter().for_each(|(_, it)| it.join().unwrap());
    }
}
