//! Where the values of a node's options come from. A later source overrides an earlier one:
//!
//! 1. the default in the tables of options ([`crate::options::OPTIONS`] and those of the programs),
//! 2. the variables `CONSTEL_CSP` and `CONSTEL_ATTESTATION_VARIANT` of the environment,
//! 3. the arguments of the program,
//! 4. the file [`FILE`] of the initrd and of the booted system, a line `name=value` for each,
//! 5. the kernel command line, `firstlight.name=value`,
//! 6. or as Constellation's images have it: `constel.csp=`, `constel.attestation-variant=`. Of
//!    words on the kernel command line, the last one counts.
//!
//! The last three are the settings of the image. A program reads them if an argument says so.
//! docs/images/settings.md lists them.

use std::fs;
use std::io;

use base::boot;
use base::options::Opt;

/// The file of settings.
pub const FILE: &str = "/etc/firstlight/node.conf";
/// The source of values from variables.
pub const ENVIRONMENT: &str = "environment";
/// The source of the program's own arguments.
pub const ARGUMENTS: &str = "arguments";
const KERNEL: &str = "kernel command line";
/// The kernel command line, with our settings and those of Constellation's images.
const COMMAND_LINE: &str = "/proc/cmdline";
const PREFIX: &str = "firstlight.";
const OLD: [(&str, &str); 2] = [
    ("constel.csp=", "csp"),
    ("constel.attestation-variant=", "variant"),
];
/// The settings that only `unlock` or only `bootstrapper` has, with `=` if they have a value. The
/// other program ignores them. tests/tables.rs compares them with the tables of the programs.
pub const OF_ONE_PROGRAM: [&str; 13] = [
    "peers=",
    "timeout=",
    "onfail=",
    "service-policy=",
    "components=",
    "kubeadm-timeout=",
    "allow-unverified-components",
    "cloud-controller-manager=",
    "time-servers=",
    "update-key=",
    "update-url=",
    "trial-healthy=",
    "trial-limit=",
];

/// An option `--name=value`, or why a setting is wrong or a source cannot be read.
type Setting = Result<String, String>;

/// Returns the settings of a program with these options, in the order in which they apply, each with
/// its source. A missing file is empty.
pub fn read(options: &[&Opt]) -> Vec<(&'static str, Setting)> {
    let file = match fs::read_to_string(FILE) {
        Ok(text) => in_file(options, &text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => vec![],
        Err(error) => vec![Err(format!("{FILE}: {error}"))],
    };
    let command_line = match fs::read(COMMAND_LINE) {
        Ok(bytes) => on_command_line(options, &String::from_utf8_lossy(&bytes)),
        Err(error) => vec![Err(format!("{COMMAND_LINE}: {error}"))],
    };
    let file = file.into_iter().map(|it| (FILE, it));
    file.chain(command_line.into_iter().map(|it| (KERNEL, it)))
        .collect()
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

fn in_file(options: &[&Opt], text: &str) -> Vec<Setting> {
    // editors of Windows write a byte order mark
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let lines = text.lines().map(str::trim).enumerate();
    let settings = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    settings
        .filter_map(|(number, line)| {
            option(options, line)
                .map_err(|error| format!("{FILE}, line {}: {error}", number + 1))
                .transpose()
        })
        .collect()
}

/// Removes quotes around a value or a whole word, as the kernel does.
fn on_command_line(options: &[&Opt], text: &str) -> Vec<Setting> {
    let words = text.split_whitespace().map(|word| word.replace('"', ""));
    let ours = words.filter_map(|word| {
        let old = |(old, name)| Some(format!("{name}={}", word.strip_prefix(old)?));
        match word.strip_prefix(PREFIX) {
            Some(setting) => Some(setting.to_owned()),
            None => OLD.into_iter().find_map(old),
        }
    });
    ours.filter_map(|setting| {
        option(options, &setting)
            .map_err(|error| format!("{KERNEL}: {PREFIX}{error}"))
            .transpose()
    })
    .collect()
}

/// Returns `--name=value` for `name=value`, and `None` for a setting of the other program. The
/// error begins with the setting's name.
fn option(options: &[&Opt], setting: &str) -> Result<Option<String>, String> {
    let (name, value) = match setting.split_once('=') {
        Some((name, value)) => (name.trim(), Some(value.trim())),
        None => (setting, None),
    };
    let mut own = options.iter().filter(|it| it.is_setting);
    let known = own.clone().find(|it| it.is(&format!("--{name}")));
    let other = OF_ONE_PROGRAM
        .into_iter()
        .find(|it| it.trim_end_matches('=') == name);
    let has_value = match (known, other) {
        (Some(known), _) => !known.value.is_empty(),
        (None, Some(other)) => other.ends_with('='),
        (None, None) => {
            let names: Vec<&str> = own.by_ref().map(|it| it.name).collect();
            let names = names.join(", ");
            return Err(format!("{name} is not a setting; expected one of {names}"));
        }
    };
    let option = match value {
        Some(value) if has_value && !value.is_empty() => format!("--{name}={value}"),
        None if !has_value => format!("--{name}"),
        _ if has_value => return Err(format!("{name} has no value")),
        _ => return Err(format!("{name} takes no value")),
    };
    Ok(known.map(|_| option))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::all;
    use base::options::Table;

    const OF_UNLOCK: &Table<()> = &[(Opt::value("onfail", "ACTION", "").setting(), |_, _, _| {
        Ok(())
    })];
    const OF_BOOTSTRAPPER: &Table<()> = &[
        (Opt::value("components", "DIR", "").setting(), |_, _, _| {
            Ok(())
        }),
        (
            Opt::flag("allow-unverified-components", "").setting(),
            |_, _, _| Ok(()),
        ),
    ];

    fn on_command_line(text: &str) -> Vec<Setting> {
        super::on_command_line(&all(OF_UNLOCK), text)
    }

    fn in_file<T>(own: &'static Table<T>, text: &str) -> Vec<Setting> {
        super::in_file(&all(own), text)
    }

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
        let text = "# a comment\n\ncloud-provider = qemu\n  debug\nattestation-variant=qemu-vtpm\n";
        let expected = [
            "--cloud-provider=qemu",
            "--debug",
            "--attestation-variant=qemu-vtpm",
        ];
        for text in [text, &format!("\u{feff}{text}")] {
            assert_eq!(
                in_file(OF_UNLOCK, text),
                expected.map(|option| Ok(option.to_owned()))
            );
        }
    }

    #[test]
    fn a_program_ignores_the_settings_of_the_other_one_but_not_their_faults() {
        let text =
            "csp=qemu\nonfail=wait\ncomponents=/opt/components\nallow-unverified-components\n";
        let of = |own| -> Vec<String> {
            let options = in_file(own, text).into_iter();
            options.map(Result::unwrap).collect()
        };
        assert_eq!(of(OF_UNLOCK), ["--csp=qemu", "--onfail=wait"]);
        assert_eq!(
            of(OF_BOOTSTRAPPER),
            [
                "--csp=qemu",
                "--components=/opt/components",
                "--allow-unverified-components"
            ]
        );
        assert!(in_file(OF_BOOTSTRAPPER, "onfail")[0].is_err());
        assert!(in_file(OF_UNLOCK, "components=")[0].is_err());
    }

    #[test]
    fn a_wrong_setting_is_named_with_its_place() {
        let error = in_file(OF_UNLOCK, "csp=qemu\n\nonfial=wait")[1]
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
            let error = on_command_line(words)[0].clone().unwrap_err();
            assert!(error.contains(expected), "{words}: {error}");
        }
    }
}
