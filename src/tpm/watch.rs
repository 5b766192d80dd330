//! Logs a warning while the TPM does not answer. The driver of a device gives up by itself, after
//! up to five minutes for a command that creates a key (Linux, drivers/char/tpm). Until then
//! nothing can interrupt the thread. The warning says what the machine waits for.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use super::location::Location;

/// The time after which a warning is printed: a hardware TPM needs seconds to create a key.
const SLOW: Duration = Duration::from_secs(15);

/// The watch over one command. It ends on drop.
pub struct CommandWatch {
    /// The thread waits for the end of the channel.
    _end: Sender<()>,
}

/// Starts to watch a command, whose name is shown in the log.
pub fn begin(location: &Location, what: &'static str) -> CommandWatch {
    let location = location.clone();
    watch(SLOW, move |time| {
        let seconds = time.as_secs();
        log::warn!("the TPM at {location} has not answered for {seconds} s: {what}");
    })
}

/// Reports the time since the beginning, again after each further period.
fn watch(period: Duration, report: impl Fn(Duration) + Send + 'static) -> CommandWatch {
    let (sender, end) = mpsc::channel();
    let began = Instant::now();
    let thread = thread::Builder::new().name("tpm-watch".into());
    // without the thread there is no warning, but the command works
    let _ = thread.spawn(move || {
        while end.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
            report(began.elapsed());
        }
    });
    CommandWatch { _end: sender }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_without_an_answer_is_reported_again_and_again_until_it_ends() {
        let (sender, reports) = mpsc::channel();
        let period = Duration::from_millis(20);
        let watch = watch(period, move |time| sender.send(time).unwrap());
        let [first, second] = [(); 2].map(|()| reports.recv().unwrap());
        assert!(first >= period && second >= 2 * period);
        drop(watch);
        // the thread ends, and drops its end of the channel
        while reports.recv().is_ok() {}
    }
}
