//! `unlock --initrd`: the settings that dracut and initramfs-tools share, and what happens there when the state disk stays closed.
//!
//! A setting is an option of the program under the same name: `name=value` in the file [`FILE`] of the initrd,
//! `firstlight.name=value` on the kernel command line. docs/images.md lists them.

use std::fmt;
use std::fs;
use std::io;
use std::str::FromStr;
use std::thread::sleep;
use std::time::Duration;

use base::timeline::Timeline;
use sys::power;

/// The file of settings in the initrd.
pub const FILE: &str = "/etc/firstlight/unlock.conf";
/// The kernel command line, and its settings: ours, and those of the old system's images.
const COMMAND_LINE: &str = "/proc/cmdline";
const PREFIX: &str = "firstlight.";
const OLD: [(&str, &str); 2] = [
    ("constel.csp=", "csp"),
    ("constel.attestation-variant=", "variant"),
];
/// The options that are settings. The paths by which the initrd and the booted system find each other are not among them.
const NAMES: [&str; 9] = [
    "csp", "variant", "metadata", "disk", "tpm", "listen", "events", "timeout", "onfail",
];
/// The setting without a value.
const DEBUG: &str = "debug";
/// How long the reason of a failure can be read before the machine restarts, in a loop if the failure lasts.
const BEFORE_REBOOT: Duration = Duration::from_secs(10);
/// How long the journal, through which systemd prints the reason on the console, has before the machine powers off.
const BEFORE_POWER_OFF: Duration = Duration::from_secs(2);
/// How often a machine that waits repeats the reason, for people who look at its console later.
const REPEAT: Duration = Duration::from_secs(60);

/// What the machine does when its state disk stays closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// Stays as it is and repeats the reason.
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
            OnFailure::Wait => "it waits; reset it when the reason is gone",
            OnFailure::Reboot => "it restarts in 10 s",
            OnFailure::PowerOff => "it powers off",
            OnFailure::Shell => "the initrd decides",
        })
    }
}

impl OnFailure {
    /// Does it. Returns only for [`OnFailure::Shell`]: in every other case nothing that follows in the initrd may run, and neither
    /// may the operating system.
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

/// Returns the settings as options `--name=value`, in the order in which they apply: the file, then the kernel command line. In
/// place of a wrong setting, and of a source that cannot be read, is an error. A missing file is empty.
pub fn settings() -> Vec<Result<String, String>> {
    let file = match fs::read_to_string(FILE) {
        Ok(text) => in_file(&text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => vec![],
        Err(error) => vec![Err(format!("{FILE}: {error}"))],
    };
    let command_line = match fs::read(COMMAND_LINE) {
        Ok(bytes) => on_command_line(&String::from_utf8_lossy(&bytes)),
        Err(error) => vec![Err(format!("{COMMAND_LINE}: {error}"))],
    };
    file.into_iter().chain(command_line).collect()
}

fn in_file(text: &str) -> Vec<Result<String, String>> {
    let lines = text.lines().map(str::trim).enumerate();
    let settings = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    settings
        .map(|(number, line)| {
            option(line).map_err(|error| format!("{FILE}, line {}: {error}", number + 1))
        })
        .collect()
}

/// As the kernel does, takes quotes around a value, or around the whole word, away.
fn on_command_line(text: &str) -> Vec<Result<String, String>> {
    let words = text.split_whitespace().map(|word| word.replace('"', ""));
    let ours = words.filter_map(|word| {
        let old = |(old, name)| Some(format!("{name}={}", word.strip_prefix(old)?));
        match word.strip_prefix(PREFIX) {
            Some(setting) => Some(setting.to_owned()),
            None => OLD.into_iter().find_map(old),
        }
    });
    ours.map(|setting| {
        option(&setting).map_err(|error| format!("kernel command line: {PREFIX}{error}"))
    })
    .collect()
}

/// Returns `--name=value` for `name=value`. The error begins with the setting's name.
fn option(setting: &str) -> Result<String, String> {
    let (name, value) = match setting.split_once('=') {
        Some((name, value)) => (name.trim(), Some(value.trim())),
        None => (setting, None),
    };
    match value {
        None if name == DEBUG => Ok(format!("--{DEBUG}")),
        Some(value) if NAMES.contains(&name) && !value.is_empty() => {
            Ok(format!("--{name}={value}"))
        }
        _ if name == DEBUG => Err(format!("{name} takes no value")),
        _ if NAMES.contains(&name) => Err(format!("{name} has no value")),
        _ => Err(format!(
            "{name} is not a setting; expected {} or {DEBUG}",
            NAMES.join(", ")
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_has_our_settings_and_those_of_the_old_system() {
        let options = on_command_line(
            "BOOT_IMAGE=/vmlinuz constel.csp=qemu constel.attestation-variant=qemu-vtpm quiet \
             firstlight.onfail=wait \"firstlight.disk=/dev/vdb\" firstlight.debug constel.console\n",
        );
        let expected = [
            "--csp=qemu",
            "--variant=qemu-vtpm",
            "--onfail=wait",
            "--disk=/dev/vdb",
            "--debug",
        ];
        assert_eq!(options, expected.map(|option| Ok(option.to_owned())));
    }

    #[test]
    fn the_file_has_a_setting_a_line_and_comments() {
        let options = in_file("# a comment\n\ncsp = qemu\n  debug\ntpm=device:/dev/tpmrm0\n");
        let expected = ["--csp=qemu", "--debug", "--tpm=device:/dev/tpmrm0"];
        assert_eq!(options, expected.map(|option| Ok(option.to_owned())));
    }

    #[test]
    fn a_wrong_setting_is_named_with_its_place() {
        let error = in_file("csp=qemu\n\nonfial=wait")[1].clone().unwrap_err();
        assert!(
            error.starts_with("/etc/firstlight/unlock.conf, line 3: onfial is not a setting"),
            "{error}"
        );
        for (words, expected) in [
            ("firstlight.mount=/", "firstlight.mount is not a setting"),
            ("firstlight.onfail", "firstlight.onfail has no value"),
            ("firstlight.onfail=", "firstlight.onfail has no value"),
            ("firstlight.debug=1", "firstlight.debug takes no value"),
            ("firstlight.", "firstlight. is not a setting"),
        ] {
            let error = on_command_line(words)[0].clone().unwrap_err();
            assert!(error.contains(expected), "{words}: {error}");
        }
    }

    #[test]
    fn only_four_words_say_what_a_failure_does() {
        assert_eq!("poweroff".parse(), Ok(OnFailure::PowerOff));
        assert!("Reboot".parse::<OnFailure>().is_err());
    }
}
