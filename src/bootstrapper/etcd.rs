//! etcd's priority for disk I/O. etcd depends on fast writes: a member whose writes wait for those
//! of other pods loses its leadership.

use std::fs;
use std::path::Path;
use std::time::Duration;

use base::stop::Stop;
use base::timeline::Timeline;
use booted_sys::process;

/// The manifest of etcd's static pod; only control planes have it.
const MANIFEST: &str = "/etc/kubernetes/manifests/etcd.yaml";
/// Number of times that this program looks for the process, over one minute. The search runs after
/// `kubeadm init`; after a reboot the kubelet takes some time to start etcd.
const TRIES: u32 = 300;
const PAUSE: Duration = Duration::from_millis(200);

/// Gives all threads of etcd the highest I/O priority, as soon as etcd runs. A failure is only
/// logged, since the node works without it. Returns at once on a worker.
pub fn prioritize_io(stop: &Stop, timeline: &Timeline) {
    if Path::new(MANIFEST).exists() {
        timeline.waiting_for("etcd to start", || prioritize_when_found(stop));
    }
}

fn prioritize_when_found(stop: &Stop) {
    for _ in 0..TRIES {
        let processes = find(Path::new("/proc"));
        if !processes.is_empty() {
            for process in processes {
                prioritize(process);
            }
            return;
        }
        if stop.wait(PAUSE) {
            return;
        }
    }
    log::warn!(
        "etcd does not run after {} s: its I/O priority is not changed",
        TRIES * PAUSE.as_millis() as u32 / 1000
    );
}

/// Returns the processes whose program is called `etcd`.
fn find(proc: &Path) -> Vec<u32> {
    let is_etcd = |process: &u32| {
        let program = fs::read_link(proc.join(process.to_string()).join("exe"));
        program.is_ok_and(|program| program.file_name().is_some_and(|name| name == "etcd"))
    };
    numbers(proc).into_iter().filter(is_etcd).collect()
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
                log::warn!("etcd's I/O priority: {error}");
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
    use std::os::unix::fs::symlink;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

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
            assert_eq!(
                process::io_priority(*number).unwrap(),
                process::HIGHEST_IO_PRIORITY
            );
        }
        stop.stop();
        restless.into_iter().for_each(|it| it.join().unwrap());
        lasting.into_iter().for_each(|(_, it)| it.join().unwrap());
    }
}
