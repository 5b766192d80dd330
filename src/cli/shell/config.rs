//! The file with default values of options: `firstlight.toml` in the current folder, or the file
//! that `--config` names.
//!
//! ```toml
//! # for every command that has the option
//! policy = "policy.json"
//!
//! # for one command
//! [init]
//! endpoint = "10.42.1.100"
//! apiserver-san = ["api.example.com", "203.0.113.7"]
//! ```
//!
//! Keys are the long names of options. The command line overrides the values in the file.

use std::ffi::OsString;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::slice;

use sys::process;
use toml::{Table, Value};

use crate::shell::{
    error::Error,
    files::{self, FileError},
    usage::{Command, FILE, Given, Program, Values, suggestion},
};

/// The file's name in the current folder.
const NAME: &str = "firstlight.toml";
/// The commands that need a node. An `endpoint` at the top of the file applies only to these
/// commands. Without a named node, the other commands ask all nodes or judge a file.
const NEED_A_NODE: [&str; 2] = ["init", "recover"];
/// Options that a person must decide each time: they weaken protection, or replace a file.
const EACH_TIME: [&str; 3] = ["trust-any-tpm", "migrate", "overwrite"];

/// Returns the file's values for this command; none if there is no file and `--config` names none.
pub fn defaults(given: &Given) -> Result<Values, Error> {
    let named = given.value("config").map(PathBuf::from);
    let path = named.clone().unwrap_or_else(|| NAME.into());
    let text = match read(&path) {
        Ok(text) => text,
        Err(FileError::Io(_, _, error))
            if named.is_none() && error.kind() == ErrorKind::NotFound =>
        {
            return Ok(vec![]);
        }
        Err(error) => return Err(error.into()),
    };
    let folder = path.parent().unwrap_or(Path::new(""));
    values(given.program(), given.command(), &text, folder)
        .map_err(|why| FileError::Content(path, why.to_string()).into())
}

/// Reads the file. Refuses a file that another user can change: it names the policy by which nodes
/// get the master secret.
fn read(path: &Path) -> Result<String, FileError> {
    let open = |error| FileError::Io("open", path.into(), error);
    let file = File::open(path).map_err(open)?;
    let metadata = file.metadata().map_err(open)?;
    if ![0, process::user()].contains(&metadata.uid()) || metadata.mode() & 0o022 != 0 {
        let text = format!(
            "other users can change it (owner {}, mode {:04o}): check its content, then run `chown $USER {2}; chmod go-w {2}`",
            metadata.uid(),
            metadata.mode() & 0o7777,
            path.display()
        );
        return Err(FileError::Content(path.into(), text));
    }
    let content = files::read_open(path, file)?;
    String::from_utf8(content.to_vec())
        .map_err(|_| FileError::Content(path.into(), "it is not UTF-8".into()))
}

/// Returns the values for a command. The whole file must be valid, so that the first command that
/// reads it finds any error.
fn values(
    program: &Program,
    command: &Command,
    text: &str,
    folder: &Path,
) -> Result<Values, Error> {
    let file = text.parse::<Table>();
    // the error message shows the line
    let file = file.map_err(|error| format!("it is not TOML:\n{error}"))?;
    let (mut own, mut general) = (Values::new(), Values::new());
    for (name, value) in &file {
        let Value::Table(section) = value else {
            general.extend(option_values(program.commands, name, value, folder)?);
            continue;
        };
        let of = program.commands.iter().find(|of| of.name == name);
        let of = of.ok_or_else(|| {
            let names = program.commands.iter().map(|command| command.name);
            let similar = suggestion("", name, names);
            format!("[{name}]: there is no such command{similar}")
        })?;
        for (name, value) in section {
            let values = option_values(slice::from_ref(of), name, value, folder)
                .map_err(|error| format!("[{}]: {error}", of.name))?;
            if of.name == command.name {
                own.extend(values);
            }
        }
    }
    let is_own = |name: &str| own.iter().any(|(own, _)| *own == name);
    let is_known = |name: &str| command.options.iter().any(|option| option.name == name);
    let is_for_it = |name: &str| name != "endpoint" || NEED_A_NODE.contains(&command.name);
    general.retain(|(name, _)| is_known(name) && !is_own(name) && is_for_it(name));
    own.extend(general);
    Ok(own)
}

/// Returns the values of an option that one of these commands has. A path is relative to `folder`.
fn option_values(
    commands: &[Command],
    name: &str,
    value: &Value,
    folder: &Path,
) -> Result<Values, Error> {
    let mut options = commands.iter().flat_map(|command| command.options);
    let Some(option) = options.find(|option| option.name == name) else {
        let names = commands.iter().flat_map(|command| command.options);
        let similar = suggestion("", name, names.map(|option| option.name));
        let text = format!("there is no option {name:?}{similar}");
        return Err(Error::Content(text));
    };
    if EACH_TIME.contains(&name) {
        return Err(format!("{name}: it has an effect only on the command line").into());
    }
    let all = match value {
        Value::Array(all) => all.as_slice(),
        one => slice::from_ref(one),
    };
    let mut values = Values::new();
    for value in all {
        let text = match (option.value, value) {
            ("", Value::Boolean(false)) => continue,
            ("", Value::Boolean(true)) => OsString::new(),
            ("", _) => return Err(format!("{name}: expected true or false").into()),
            // standard input
            (_, Value::String(text)) if text == "-" => text.into(),
            (FILE, Value::String(path)) => folder.join(path).into(),
            (_, Value::String(text)) => text.into(),
            (_, Value::Integer(number)) => number.to_string().into(),
            (_, _) => return Err(format!("{name}: expected a text in quotes").into()),
        };
        values.push((option.name, text));
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::PROGRAM;

    fn of(command: &str, text: &str) -> Result<Vec<(&'static str, String)>, String> {
        let mut commands = PROGRAM.commands.iter();
        let command = commands.find(|known| known.name == command).unwrap();
        let values = values(&PROGRAM, command, text, Path::new("folder"));
        let values = values.map_err(|error| error.to_string())?;
        let text = |value: OsString| value.into_string().unwrap();
        Ok(values
            .into_iter()
            .map(|(name, value)| (name, text(value)))
            .collect())
    }

    #[test]
    fn a_command_gets_the_values_of_its_options() {
        let file = "endpoint = 'h'\npolicy = 'p.json'\ntimeout = 90\nsvg = '/s.svg'\nverbose = true\nmigrate-until = '2027-01-31'\n\
                    [init]\ntimeout = '2m'\napiserver-san = ['a', 'b']\nskip-addons = false\ninit-secret = '-'\n[status]\n";
        let mut init = of("init", file).unwrap();
        init.sort();
        let expected = [
            ("apiserver-san", "a"),
            ("apiserver-san", "b"),
            ("endpoint", "h"),
            ("init-secret", "-"),
            ("policy", "folder/p.json"),
            ("timeout", "2m"),
            ("verbose", ""),
        ];
        assert_eq!(init, expected.map(|(name, value)| (name, value.to_owned())));
        let mut status = of("status", file).unwrap();
        status.sort();
        let expected = [
            ("policy", "folder/p.json"),
            ("svg", "/s.svg"),
            ("timeout", "90"),
        ];
        assert_eq!(
            status,
            expected.map(|(name, value)| (name, value.to_owned()))
        );
        assert_eq!(of("man", file).unwrap(), []);
    }

    #[test]
    fn what_is_wrong_is_named_whatever_the_command() {
        for (file, expected) in [
            ("policy", "not TOML"),
            (
                "polcy = 'p'",
                "there is no option \"polcy\"; did you mean policy?",
            ),
            ("policy = true", "policy: expected a text in quotes"),
            ("verbose = 'yes'", "verbose: expected true or false"),
            ("config = 'other'", "there is no option \"config\""),
            (
                "[inti]\n",
                "[inti]: there is no such command; did you mean init?",
            ),
            ("[init]\nsvg = 'x'", "[init]: there is no option \"svg\""),
            (
                "[recover]\nmigrate = true",
                "[recover]: migrate: it has an effect only on the command line",
            ),
            ("trust-any-tpm = true", "an effect only on the command line"),
        ] {
            let error = of("roots", file).unwrap_err();
            assert!(error.contains(expected), "{file}: {error}");
        }
    }

    #[test]
    fn every_option_for_the_command_line_exists() {
        for name in EACH_TIME {
            let mut options = PROGRAM.commands.iter().flat_map(|command| command.options);
            assert!(options.any(|option| option.name == name), "{name}");
        }
    }

    #[test]
    fn a_file_that_others_can_change_is_refused() {
        use std::fs::{self, Permissions};
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(NAME);
        fs::write(&path, "policy = 'p'").unwrap();
        for (mode, is_right) in [(0o600, true), (0o644, true), (0o664, false), (0o646, false)] {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert_eq!(read(&path).is_ok(), is_right, "{mode:o}");
        }
        assert!(read(&path).unwrap_err().to_string().contains("chmod go-w"));
    }

    #[test]
    fn altered_files_end_in_an_error_or_in_values() {
        let file = "policy = 'p.json'\ntimeout = 90\n[init]\napiserver-san = ['a', 'b']\nskip-addons = false\n";
        for bytes in support::mutation::mutations(file.as_bytes(), 2000) {
            // the parser must neither panic nor loop
            let _ = of("init", &String::from_utf8_lossy(&bytes));
        }
    }
}
