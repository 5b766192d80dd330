//! The kubelet's systemd unit. The bootstrapper starts it on a node that is already a member.
//! During init and join kubeadm starts it, and the bootstrapper watches it while kubeadm waits for
//! it.

use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::steps::{error::Error, job::Job, setup};
use base::boot::timeline::Timeline;
use base::child_process;
use base::stop::Stop;

const UNIT: &str = "kubelet.service";
/// Time limit for starting the unit, including its dependencies.
const LIMIT: Duration = Duration::from_secs(10 * 60);
/// How often this program asks systemd for the unit's state. A slow machine needs half a second for
/// each answer.
const LOOK: Duration = Duration::from_secs(5);
/// Time limit for one answer of systemd or of the journal.
const ANSWER: Duration = Duration::from_secs(10);
/// A kubelet that exits this often will not stay up; kubeadm itself would wait 4 minutes for it.
const ENDS: u32 = 3;
/// Number of lines of the kubelet's log that are reported.
const LAST_WORDS: &str = "5";

/// Starts the kubelet's unit and waits for the result. The unit is not enabled: only a node whose
/// disk its cluster opened may run it. This uses systemctl, which is part of systemd; our own D-Bus
/// client would gain nothing.
pub fn start(stop: &Stop, timeline: &Timeline) -> Result<(), child_process::Error> {
    timeline.waiting_for(format!("systemd to start {UNIT}"), || {
        child_process::run(
            &mut systemctl(&["start", UNIT]),
            Stdio::null(),
            LIMIT,
            stop,
            &mut |line| log::info!("systemctl: {line}"),
        )
    })
}

/// Restarts the kubelet's unit, or starts it.
pub fn restart<T: Clone>(stop: &Stop, job: &Job<T>) -> Result<(), Error> {
    setup::run(&mut systemctl(&["restart", UNIT]), LIMIT, stop, job)
}

/// Calls `run`, which waits for the kubelet. `run` gets a Stop. It is triggered when `stop` is, or
/// when the kubelet exited too often. Reports each exit of the kubelet at once, with the last lines
/// of its log.
pub fn watched<T: Clone + Send>(
    stop: &Stop,
    job: &Job<T>,
    run: impl FnOnce(&Stop) -> Result<(), Error>,
) -> Result<(), Error> {
    let (given_up, over) = (Stop::new(), Stop::new());
    let stopped = given_up.clone();
    let _told = stop.on_stop(move || stopped.stop());
    thread::scope(|scope| {
        let watch = || watch(&over, &given_up, job);
        // without this thread, only kubeadm's own time limit ends the wait
        let watch = thread::Builder::new()
            .name("kubelet-watch".into())
            .spawn_scoped(scope, watch);
        let ended = over.stop_on_drop();
        let result = run(&given_up);
        drop(ended);
        let words = watch.ok().and_then(|watch| watch.join().ok()).flatten();
        match (result, words) {
            (Err(_), Some(words)) => Err(Error::Kubelet(words)),
            (result, _) => result,
        }
    })
}

/// Watches the kubelet until `over` is set. If it ends too often, stops `given_up` and returns its
/// last lines.
fn watch<T: Clone>(over: &Stop, given_up: &Stop, job: &Job<T>) -> Option<Vec<String>> {
    let (mut seen, mut ends) = (times_ended(over)?, 0);
    while !over.wait(LOOK) {
        let now = times_ended(over)?;
        // systemd resets its counter when the unit is started again
        let more = now.saturating_sub(seen);
        seen = now;
        if more == 0 {
            continue;
        }
        ends += more;
        let words = last_words(over);
        job.line(&format!(
            "the kubelet exited, and systemd restarts it; its last lines: {}",
            words.join(" | ")
        ));
        if ends >= ENDS {
            given_up.stop();
            return Some(words);
        }
    }
    None
}

/// Returns how often the unit has exited since it was started; `None` if systemd does not answer.
fn times_ended(over: &Stop) -> Option<u32> {
    let mut said = vec![];
    let mut show = systemctl(&["show", UNIT, "--property=NRestarts,SubState"]);
    child_process::run(&mut show, Stdio::null(), ANSWER, over, &mut |line| {
        said.push(line.to_owned())
    })
    .ok()?;
    ended(&said)
}

/// Returns the number of exits from the unit's properties. systemd counts a restart when it
/// restarts the unit, some seconds after the exit.
fn ended(properties: &[String]) -> Option<u32> {
    let value = |name: &str| {
        properties
            .iter()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
    };
    let restarts: u32 = value("NRestarts")?.parse().ok()?;
    Some(restarts + u32::from(value("SubState")? == "auto-restart"))
}

fn last_words(over: &Stop) -> Vec<String> {
    let mut said = vec![];
    let mut command = Command::new("journalctl");
    command.args([
        "--unit",
        UNIT,
        "--identifier",
        "kubelet",
        "--lines",
        LAST_WORDS,
        "--output",
        "cat",
        "--no-pager",
    ]);
    let read = child_process::run(&mut command, Stdio::null(), ANSWER, over, &mut |line| {
        said.push(line.to_owned())
    });
    if let Err(error) = read {
        log::debug!("cannot read the kubelet's log: {error}");
    }
    said
}

fn systemctl(arguments: &[&str]) -> Command {
    let mut command = Command::new("systemctl");
    command.args(arguments);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_counts_before_its_restart_and_once() {
        let ended = |text: &str| ended(&text.lines().map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(ended("NRestarts=0\nSubState=running"), Some(0));
        assert_eq!(ended("NRestarts=0\nSubState=auto-restart"), Some(1));
        assert_eq!(ended("NRestarts=1\nSubState=running"), Some(1));
        assert_eq!(ended("SubState=dead\nNRestarts=2"), Some(2));
        for nonsense in [
            "",
            "NRestarts=0",
            "NRestarts=x\nSubState=dead",
            "NRestarts=-1\nSubState=dead",
        ] {
            assert_eq!(ended(nonsense), None, "{nonsense}");
        }
    }
}
