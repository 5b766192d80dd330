//! The kubelet's unit: started on a node that has been a member before this boot, and watched while kubeadm, which starts it
//! on the way to becoming one, waits for it.

use std::process::Command;
use std::thread;
use std::time::Duration;

use super::command;
use super::job::Job;
use super::setup::Error;
use base::stop::Stop;

const UNIT: &str = "kubelet.service";
/// For the unit's start, with what it waits for.
const LIMIT: Duration = Duration::from_secs(10 * 60);
/// How often systemd is asked, and how long it may take.
const LOOK: Duration = Duration::from_secs(1);
const ANSWER: Duration = Duration::from_secs(10);
/// A kubelet that has ended so often will not stay: kubeadm itself would wait 4 minutes for it.
const ENDS: u32 = 3;
/// Lines of its log that are told.
const LAST_WORDS: &str = "5";

/// Starts the kubelet's unit, which is not enabled: only a node whose disk its cluster opened runs it. By systemctl, which is
/// wherever systemd is, and waits for the result; a D-Bus client of our own would do no more.
pub fn start(stop: &Stop) -> Result<(), command::Error> {
    command::run(&mut systemctl(&["start", UNIT]), LIMIT, stop, &mut |line| {
        log::info!("systemctl: {line}")
    })
}

/// Runs what waits for the kubelet, until it is done, the stop that it gets comes, or the kubelet has ended too often. Each of
/// its ends is told at once, with its last words.
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
        // without the thread everything is as before, but later
        let watch = thread::Builder::new()
            .name("kubelet-watch".into())
            .spawn_scoped(scope, watch);
        let ended = StopOnDrop(&over);
        let result = run(&given_up);
        drop(ended);
        let words = watch.ok().and_then(|watch| watch.join().ok()).flatten();
        match (result, words) {
            (Err(_), Some(words)) => Err(Error::Kubelet(words)),
            (result, _) => result,
        }
    })
}

/// Also when what it was made for panics.
struct StopOnDrop<'a>(&'a Stop);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Until `over`, or until it stops `given_up`: then the kubelet's last words.
fn watch<T: Clone>(over: &Stop, given_up: &Stop, job: &Job<T>) -> Option<Vec<String>> {
    let (mut seen, mut ends) = (times_ended(over)?, 0);
    while !over.wait(LOOK) {
        let now = times_ended(over)?;
        // whoever starts the unit anew makes systemd count from zero
        let more = now.saturating_sub(seen);
        seen = now;
        if more == 0 {
            continue;
        }
        ends += more;
        let words = last_words(over);
        job.line(&format!(
            "the kubelet has ended, and is started again; its last words: {}",
            words.join(" | ")
        ));
        if ends >= ENDS {
            given_up.stop();
            return Some(words);
        }
    }
    None
}

/// How often the unit has ended since it was started; `None` where there is no systemd to ask.
fn times_ended(over: &Stop) -> Option<u32> {
    let mut said = vec![];
    let mut show = systemctl(&["show", UNIT, "--property=NRestarts,SubState"]);
    command::run(&mut show, ANSWER, over, &mut |line| {
        said.push(line.to_owned())
    })
    .ok()?;
    ended(&said)
}

/// systemd counts a restart when it comes, which is some seconds after the end that it is for.
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
    let read = command::run(&mut command, ANSWER, over, &mut |line| {
        said.push(line.to_owned())
    });
    if let Err(error) = read {
        log::debug!("the kubelet's log: {error}");
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
