//! The settings of an image, which `unlock` and `bootstrapper` share.
//!
//! A setting is an option of the programs under the same name: `name=value` in the file [`FILE`] of
//! the initrd and of the booted system, `firstlight.name=value` on the kernel command line.
//! docs/images/settings.md lists them.

use std::fs;
use std::io;

use base::boot;

/// The file of settings.
pub const FILE: &str = "/etc/firstlight/node.conf";
/// The kernel command line, with our settings and those of Constellation's images.
const COMMAND_LINE: &str = "/proc/cmdline";
const PREFIX: &str = "firstlight.";
const OLD: [(&str, &str); 2] = [
    ("constel.csp=", "csp"),
    ("constel.attestation-variant=", "variant"),
];

/// A program that reads settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// The program of the initramfs.
    Unlock,
    /// The program of the booted system.
    Bootstrapper,
}

struct Setting {
    name: &'static str,
    has_value: bool,
    /// The only program that has this option; the other one ignores the setting.
    only: Option<Program>,
}

/// The options that can be settings. The paths through which the initrd and the booted system
/// exchange files cannot.
const SETTINGS: [Setting; 19] = [
    both("cloud-provider"),
    both("csp"),
    both("attestation-variant"),
    both("variant"),
    both("metadata"),
    both("disk"),
    both("tpm"),
    both("listen"),
    both("cluster-id"),
    only(Program::Bootstrapper, "service-policy"),
    both("require"),
    both("events"),
    both("log-format"),
    only(Program::Unlock, "peers"),
    only(Program::Unlock, "timeout"),
    only(Program::Unlock, "onfail"),
    only(Program::Bootstrapper, "components"),
    Setting {
        has_value: false,
        ..only(Program::Bootstrapper, "allow-unverified-components")
    },
    Setting {
        has_value: false,
        ..both("debug")
    },
];

const fn both(name: &'static str) -> Setting {
    Setting {
        name,
        has_value: true,
        only: None,
    }
}

const fn only(program: Program, name: &'static str) -> Setting {
    Setting {
        only: Some(program),
        ..both(name)
    }
}

/// Returns the settings of `program` as options `--name=value`, in the order in which they apply:
/// the file, then the kernel command line. An error stands in place of a wrong setting, or of a
/// source that cannot be read. A missing file is empty.
pub fn read(program: Program) -> Vec<Result<String, String>> {
    let file = match fs::read_to_string(FILE) {
        Ok(text) => in_file(program, &text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => vec![],
        Err(error) => vec![Err(format!("{FILE}: {error}"))],
    };
    let command_line = match fs::read(COMMAND_LINE) {
        Ok(bytes) => on_command_line(program, &String::from_utf8_lossy(&bytes)),
        Err(error) => vec![Err(format!("{COMMAND_LINE}: {error}"))],
    };
    file.into_iter().chain(command_line).collect()
}

/// Returns why the host's ACPI tables are a danger to the running kernel, if they are.
pub fn trusted_acpi() -> Option<&'static str> {
    boot::trusted_acpi(&fs::read_to_string("/proc/version").unwrap_or_default())
}

/// Returns why the root file system that the kernel command line names is a danger, if it is.
pub fn unverified_root() -> Option<&'static str> {
    let bytes = fs::read(COMMAND_LINE).ok()?;
    boot::unverified_root(&String::from_utf8_lossy(&bytes))
}

fn in_file(program: Program, text: &str) -> Vec<Result<String, String>> {
    let lines = text.lines().map(str::trim).enumerate();
    let settings = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    settings
        .filter_map(|(number, line)| {
            option(program, line)
                .map_err(|error| format!("{FILE}, line {}: {error}", number + 1))
                .transpose()
        })
        .collect()
}

/// Removes quotes around a value or a whole word, as the kernel does.
fn on_command_line(program: Program, text: &str) -> Vec<Result<String, String>> {
    let words = text.split_whitespace().map(|word| word.replace('"', ""));
    let ours = words.filter_map(|word| {
        let old = |(old, name)| Some(format!("{name}={}", word.strip_prefix(old)?));
        match word.strip_prefix(PREFIX) {
            Some(setting) => Some(setting.to_owned()),
            None => OLD.into_iter().find_map(old),
        }
    });
    ours.filter_map(|setting| {
        option(program, &setting)
            .map_err(|error| format!("kernel command line: {PREFIX}{error}"))
            .transpose()
    })
    .collect()
}

/// Returns `--name=value` for `name=value`, and `None` for a setting of the other program. The
/// error begins with the setting's name.
fn option(program: Program, setting: &str) -> Result<Option<String>, String> {
    let (name, value) = match setting.split_once('=') {
        Some((name, value)) => (name.trim(), Some(value.trim())),
        None => (setting, None),
    };
    let Some(known) = SETTINGS.iter().find(|known| known.name == name) else {
        let names = SETTINGS.map(|known| known.name).join(", ");
        return Err(format!("{name} is not a setting; expected one of {names}"));
    };
    let option = match value {
        Some(value) if known.has_value && !value.is_empty() => format!("--{name}={value}"),
        None if !known.has_value => format!("--{name}"),
        _ if known.has_value => return Err(format!("{name} has no value")),
        _ => return Err(format!("{name} takes no value")),
    };
    let is_own = known.only.is_none_or(|only| only == program);
    Ok(is_own.then_some(option))
}

#[cfg(test)]
mod tests {
    use super::Program::{Bootstrapper, Unlock};
    use super::*;

    #[test]
    fn the_command_line_has_our_settings_and_those_of_the_old_system() {
        let options = on_command_line(
            Unlock,
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
        let text = "# a comment\n\ncloud-provider = qemu\n  debug\nattestation-variant=qemu-vtpm\n";
        let expected = [
            "--cloud-provider=qemu",
            "--debug",
            "--attestation-variant=qemu-vtpm",
        ];
        assert_eq!(
            in_file(Unlock, text),
            expected.map(|option| Ok(option.to_owned()))
        );
    }

    #[test]
    fn a_program_ignores_the_settings_of_the_other_one_but_not_their_faults() {
        let text =
            "csp=qemu\nonfail=wait\ncomponents=/opt/components\nallow-unverified-components\n";
        let of = |program| -> Vec<String> {
            let options = in_file(program, text).into_iter();
            options.map(Result::unwrap).collect()
        };
        assert_eq!(of(Unlock), ["--csp=qemu", "--onfail=wait"]);
        assert_eq!(
            of(Bootstrapper),
            [
                "--csp=qemu",
                "--components=/opt/components",
                "--allow-unverified-components"
            ]
        );
        assert!(in_file(Bootstrapper, "onfail")[0].is_err());
        assert!(in_file(Unlock, "components=")[0].is_err());
    }

    #[test]
    fn a_wrong_setting_is_named_with_its_place() {
        let error = in_file(Unlock, "csp=qemu\n\nonfial=wait")[1]
            .clone()
            .unwrap_err();
        assert!(
            error.starts_with("/etc/firstlight/node.conf, line 3: onfial is not a setting"),
            "{error}"
        );
        for (words, expected) in [
            ("firstlight.mount=/", "firstlight.mount is not a setting"),
            ("firstlight.onfail", "firstlight.onfail has no value"),
            ("firstlight.onfail=", "firstlight.onfail has no value"),
            ("firstlight.debug=1", "firstlight.debug takes no value"),
            ("firstlight.", "firstlight. is not a setting"),
        ] {
            let error = on_command_line(Unlock, words)[0].clone().unwrap_err();
            assert!(error.contains(expected), "{words}: {error}");
        }
    }
}
