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

use clap::parser::ValueSource;
use clap::{Arg, Command, ValueHint};
use sys::process;
use toml::{Table, Value};

use crate::shell::{
    error::Error,
    files::{self, FileError},
    output::OUTPUT,
};

/// The file's name in the current folder.
const NAME: &str = "firstlight.toml";
/// The option that names another file.
pub const CONFIG: &str = "config";
/// The commands that need a node. An `endpoint` at the top of the file applies only to these
/// commands. Without a named node, the other commands ask all nodes or judge a file.
const NEED_A_NODE: [&str; 2] = ["init", "recover"];
/// Options that a person must decide each time: they weaken protection, or replace a file.
const EACH_TIME: [&str; 4] = ["trust-any-tpm", "migrate", "overwrite", "accept-components"];
/// Minimum similarity of a known word that is suggested for an unknown one, by Jaro and Winkler: 1
/// means equal.
const ALIKE: f64 = 0.8;

/// Options by name, with their values; a flag has none.
type Values = Vec<(String, Option<OsString>)>;

/// Appends the options that the arguments do not give, from before the command's name and from the file.
pub fn complete(program: &Command, arguments: &mut Vec<OsString>) -> Result<(), Error> {
    // the parser of the completed arguments says what is wrong with them
    let lenient = program.clone().ignore_errors(true);
    let Ok(all) = lenient.try_get_matches_from(&*arguments) else {
        return Ok(());
    };
    let Some((name, given)) = all.subcommand() else {
        return Ok(());
    };
    let Some(command) = program.find_subcommand(name) else {
        return Ok(());
    };
    let named = given.get_one::<PathBuf>(CONFIG);
    let is_given =
        |arg: &Arg| given.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
    let has = |name: &str| options_of(command).any(|(long, arg)| long == name && is_given(arg));
    // the operand on the command line, or `--all`, replaces the file's `endpoint`
    let has_nodes = command.get_positionals().any(is_given) || has("all");
    let mut values = Values::new();
    if all.value_source(OUTPUT) == Some(ValueSource::CommandLine) && !has(OUTPUT) {
        let form = all.get_raw(OUTPUT).and_then(Iterator::last);
        values.extend(form.map(|form| (OUTPUT.into(), Some(form.into()))));
    }
    let file = defaults(program, command, named.map(PathBuf::as_path))?;
    let is_absent = |(name, _): &(String, _)| {
        !has(name) && (name != "endpoint" || !has_nodes) && (name != OUTPUT || values.is_empty())
    };
    let file: Values = file.into_iter().filter(is_absent).collect();
    values.extend(file);
    let arguments_of = |(name, value): (String, Option<OsString>)| {
        let mut argument = OsString::from(format!("--{name}"));
        if let Some(value) = value {
            argument.push("=");
            argument.push(value);
        }
        argument
    };
    // after `--` there are only operands
    let end = arguments.iter().position(|it| it == "--");
    let end = end.unwrap_or(arguments.len());
    arguments.splice(end..end, values.into_iter().map(arguments_of));
    Ok(())
}

/// Returns the options of a command with their names.
fn options_of(command: &Command) -> impl Iterator<Item = (&str, &Arg)> {
    let options = command.get_arguments();
    options.filter_map(|arg| Some((arg.get_long()?, arg)))
}

/// Returns the file's values for this command; none if there is no file and `named` is none.
fn defaults(program: &Command, command: &Command, named: Option<&Path>) -> Result<Values, Error> {
    let path = named.unwrap_or(Path::new(NAME));
    let text = match read(path) {
        Ok(text) => text,
        Err(FileError::Io(_, _, error))
            if named.is_none() && error.kind() == ErrorKind::NotFound =>
        {
            return Ok(vec![]);
        }
        Err(error) => return Err(error.into()),
    };
    let folder = path.parent().unwrap_or(Path::new(""));
    values(program, command, &text, folder)
        .map_err(|why| FileError::Content(path.into(), why.to_string()).into())
}

/// Returns the end of an error about an unknown word: `; did you mean init?`, or nothing if no
/// known word is similar.
fn suggestion<'a>(unknown: &str, known: impl Iterator<Item = &'a str>) -> String {
    known
        .map(|word| (strsim::jaro_winkler(unknown, word), word))
        .filter(|(likeness, _)| *likeness >= ALIKE)
        .max_by(|(one, _), (other, _)| one.total_cmp(other))
        .map(|(_, word)| format!("; did you mean {word}?"))
        .unwrap_or_default()
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
    program: &Command,
    command: &Command,
    text: &str,
    folder: &Path,
) -> Result<Values, Error> {
    let file = text.parse::<Table>();
    // the error message shows the line
    let file = file.map_err(|error| format!("it is not TOML:\n{error}"))?;
    let (mut own, mut general) = (Values::new(), Values::new());
    let commands: Vec<&Command> = program.get_subcommands().collect();
    for (name, value) in &file {
        let Value::Table(section) = value else {
            general.extend(option_values(&commands, name, value, folder)?);
            continue;
        };
        let of = program.find_subcommand(name).ok_or_else(|| {
            let similar = suggestion(name, commands.iter().map(|it| it.get_name()));
            format!("[{name}]: there is no such command{similar}")
        })?;
        for (name, value) in section {
            let values = option_values(&[of], name, value, folder)
                .map_err(|error| format!("[{}]: {error}", of.get_name()))?;
            if of.get_name() == command.get_name() {
                own.extend(values);
            }
        }
    }
    let is_own = |name: &str| own.iter().any(|(own, _)| own == name);
    let is_known = |name: &str| options_of(command).any(|(long, _)| long == name);
    let is_for_it = |name: &str| name != "endpoint" || NEED_A_NODE.contains(&command.get_name());
    general.retain(|(name, _)| is_known(name) && !is_own(name) && is_for_it(name));
    own.extend(general);
    Ok(own)
}

/// Returns the values of an option that one of these commands has. A path is relative to `folder`.
fn option_values(
    commands: &[&Command],
    name: &str,
    value: &Value,
    folder: &Path,
) -> Result<Values, Error> {
    let options = || commands.iter().flat_map(|it| options_of(it));
    let Some((_, option)) = options().find(|(long, _)| *long == name) else {
        let similar = suggestion(name, options().map(|(long, _)| long));
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
    let is_flag = !option.get_action().takes_values();
    let is_path = option.get_value_hint() == ValueHint::AnyPath;
    let mut values = Values::new();
    for value in all {
        let text = match value {
            Value::Boolean(false) if is_flag => continue,
            Value::Boolean(true) if is_flag => None,
            _ if is_flag => return Err(format!("{name}: expected true or false").into()),
            // - is standard input
            Value::String(path) if is_path && path != "-" => Some(folder.join(path).into()),
            Value::String(text) => Some(text.into()),
            Value::Integer(number) => Some(number.to_string().into()),
            _ => return Err(format!("{name}: expected a text in quotes").into()),
        };
        values.push((name.into(), text));
    }
    Ok(values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands;

    fn of(command: &str, text: &str) -> Result<Vec<(String, String)>, String> {
        let program = commands::declared();
        let command = program.find_subcommand(command).unwrap();
        let values = values(&program, command, text, Path::new("folder"));
        let values = values.map_err(|error| error.to_string())?;
        let text = |value: Option<OsString>| value.unwrap_or_default().into_string().unwrap();
        let values = values.into_iter().map(|(name, value)| (name, text(value)));
        Ok(values.collect())
    }

    #[test]
    fn values_that_the_command_line_lacks_are_appended_before_operands() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.toml");
        let text = "output = 'text'\nendpoint = 'h'\npolicy = 'p'\n[init]\nverbose = true\napiserver-san = ['a', 'b']\n";
        std::fs::write(&file, text).unwrap();
        let completed = |args: &[&str]| {
            let config = format!("--config={}", file.display());
            let all = [&["firstlight"], args].concat();
            let mut all: Vec<OsString> = all.iter().map(OsString::from).collect();
            all.insert(2, config.into());
            complete(&commands::declared(), &mut all).unwrap();
            let all = all.into_iter().skip(3);
            all.map(|it| it.into_string().unwrap()).collect::<Vec<_>>()
        };
        let policy = format!("--policy={}", folder.path().join("p").display());
        assert_eq!(
            completed(&["init", "--apiserver-san", "c", "--", "x"]),
            [
                "--apiserver-san",
                "c",
                "--verbose",
                "--output=text",
                &policy,
                "--",
                "x"
            ]
        );
        assert_eq!(
            completed(&["recover", "-o", "json"]),
            ["-o", "json", "--endpoint=h", &policy]
        );
        assert_eq!(
            completed(&["recover", "--all", "--policy=q"]),
            ["--all", "--policy=q", "--output=text"]
        );
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
        assert_eq!(
            init,
            expected.map(|(name, value)| (name.to_owned(), value.to_owned()))
        );
        let mut status = of("status", file).unwrap();
        status.sort();
        let expected = [
            ("policy", "folder/p.json"),
            ("svg", "/s.svg"),
            ("timeout", "90"),
        ];
        assert_eq!(
            status,
            expected.map(|(name, value)| (name.to_owned(), value.to_owned()))
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
        let program = commands::declared();
        for name in EACH_TIME {
            let mut options = program.get_subcommands().flat_map(options_of);
            assert!(options.any(|(long, _)| long == name), "{name}");
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
