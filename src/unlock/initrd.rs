//! `unlock --initrd`: what happens in an initrd of dracut or initramfs-tools if the state disk
//! cannot be opened.

use std::fmt;
use std::str::FromStr;
use std::thread::sleep;
use std::time::Duration;

use base::boot::timeline::Timeline;
use sys::power;

/// How long the machine shows the reason of a failure before it restarts. If the failure stays,
/// this repeats.
const BEFORE_REBOOT: Duration = Duration::from_secs(10);
/// How long the machine waits before it powers off, so that the journal, through which systemd
/// prints on the console, can print the reason.
const BEFORE_POWER_OFF: Duration = Duration::from_secs(2);
/// How often a waiting machine repeats the reason, for people who look at its console later.
const REPEAT: Duration = Duration::from_secs(60);

/// What the machine does if the state disk cannot be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// Keeps running and repeats the reason.
    Wait,
    /// Restarts after a pause.
    Reboot,
    /// Switches itself off.
    PowerOff,
    /// Leaves the decision to the initrd, which may open a shell.
    Shell,
}

impl FromStr for OnFailure {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<OnFailure, &'static str> {
        match text {
            "wait" => Ok(OnFailure::Wait),
            "reboot" => Ok(OnFailure::Reboot),
            "poweroff" => Ok(OnFailure::PowerOff),
            "shell" => Ok(OnFailure::Shell),
            _ => Err("expected wait, reboot, poweroff or shell"),
        }
    }
}

impl fmt::Display for OnFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OnFailure::Wait => "it waits; correct the cause, then reset it",
            OnFailure::Reboot => "it restarts in 10 s",
            OnFailure::PowerOff => "it powers off",
            OnFailure::Shell => "the initrd decides",
        })
    }
}

impl OnFailure {
    /// Does it. Returns only for [`OnFailure::Shell`]: otherwise no later step of the initrd may
    /// run, and the operating system must not start.
    pub fn act(self, timeline: &Timeline, reason: &str) {
        timeline.event(
            "failed",
            format_args!("the state disk stays closed, so this machine does not boot: {self}"),
        );
        match self {
            OnFailure::Shell => return,
            OnFailure::Wait => {}
            OnFailure::Reboot => {
                sleep(BEFORE_REBOOT);
                let error = power::reboot();
                timeline.event("failed", format_args!("cannot restart: {error}"));
            }
            OnFailure::PowerOff => {
                sleep(BEFORE_POWER_OFF);
                let error = power::power_off();
                timeline.event("failed", format_args!("cannot power off: {error}"));
            }
        }
        loop {
            sleep(REPEAT);
            timeline.event("error", reason);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_four_words_say_what_a_failure_does() {
        assert_eq!("poweroff".parse(), Ok(OnFailure::PowerOff));
        assert!("Reboot".parse::<OnFailure>().is_err());
    }
}
