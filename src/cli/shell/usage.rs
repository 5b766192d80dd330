//! The command line as tables. The same tables parse the arguments and produce `--help`, the manual
//! page and the shells' completions, so these always agree.

use crate::shell::error::Error;
use std::ffi::OsString;
use std::fmt::Display;
use std::path::PathBuf;

use base::options::{Opt, table, wrapped};
use base::program;
use lexopt::Arg;

/// A program with several commands.
pub struct Program {
    /// The program's name on the command line.
    pub name: &'static str,
    /// What the program does, a phrase: `makes a Kubernetes cluster of confidential virtual
    /// machines`.
    pub summary: &'static str,
    /// The commands, in the order of an operator's work.
    pub commands: &'static [Command],
    /// The groups of commands in `--help`: the first command of each, and its title.
    pub groups: &'static [(&'static str, &'static str)],
    /// The options that stand before a command.
    pub options: &'static [Opt],
    /// The exit codes, each with its meaning.
    pub exit_codes: &'static [(u8, &'static str)],
    /// What the examples show together, and their command lines.
    pub examples: (&'static str, &'static [&'static str]),
}

/// A command: the word after the program's name.
pub struct Command {
    /// The command's name, one word.
    pub name: &'static str,
    /// What the command does, an imperative: `write the attestation policy that a machine meets`.
    pub summary: &'static str,
    /// The paragraphs of the description.
    pub about: &'static [&'static str],
    /// The operand.
    pub operand: Option<Operand>,
    /// The options in the order of the help text, without those that every command has
    /// ([`COMMON`]).
    pub options: &'static [Opt],
    /// Command lines that work with the operator's own files and addresses.
    pub examples: &'static [&'static str],
    /// Runs the command.
    pub run: fn(&Given) -> Result<(), Error>,
}

/// A value without the name of an option before it.
pub struct Operand {
    /// The value's name in the help text, as `FILE`. If it ends with `..`, further operands may follow;
    /// with `words`, the first operand is an action.
    pub value: &'static str,
    /// The words of which the value is one; none: any text.
    pub words: &'static [&'static str],
    /// Whether the operand is required.
    pub is_needed: bool,
    /// The operand's meaning.
    pub help: &'static str,
}

impl Operand {
    /// Returns the operand as a command line shows it: `SHELL`, `[IMAGE]`.
    pub fn synopsis(&self) -> String {
        if self.is_needed {
            self.value.to_owned()
        } else {
            format!("[{}]", self.value)
        }
    }

    /// Returns whether further operands may follow.
    pub fn is_action(&self) -> bool {
        self.value.ends_with("..")
    }
}

/// The help option of the program and of each command.
pub const HELP: Opt = Opt::flag(
    "help",
    "print this text; after a command, print the command's own",
)
.short('h');
/// The version option of the program.
pub const VERSION: Opt = Opt::flag("version", "print the version").short('V');
/// The option of each command that names the file with defaults.
pub const CONFIG: Opt = Opt::value(
    "config",
    FILE,
    "a file with defaults of these options; by default firstlight.toml in the present folder, if it exists",
);
/// The value of an option that names a file.
pub const FILE: &str = "FILE";
/// The options that every command has.
pub const COMMON: [Opt; 2] = [CONFIG, HELP];
/// Minimum similarity of a known word that is suggested for an unknown one, by Jaro and Winkler: 1
/// means equal.
const ALIKE: f64 = 0.8;

/// Returns the end of an error about an unknown word: `; did you mean init?`, or nothing if no
/// known word is similar. `prefix` stands before each word.
pub fn suggestion<'a>(
    prefix: &str,
    unknown: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> String {
    known
        .into_iter()
        .map(|word| (strsim::jaro_winkler(unknown, word), word))
        .filter(|(likeness, _)| *likeness >= ALIKE)
        .max_by(|(one, _), (other, _)| one.total_cmp(other))
        .map(|(_, word)| format!("; did you mean {prefix}{word}?"))
        .unwrap_or_default()
}

/// Options by name, with their values; the value of a flag is empty.
pub type Values = Vec<(&'static str, OsString)>;

/// The values of a command line.
pub struct Given {
    program: &'static Program,
    command: &'static Command,
    values: Values,
    operand: Option<OsString>,
    /// The operands of an action.
    further: Vec<OsString>,
}

impl Command {
    /// Returns the command's options in the order of the help text.
    pub fn all_options(&self) -> impl Iterator<Item = &'static Opt> {
        self.options.iter().chain(&COMMON)
    }

    /// Parses the arguments after the command's name; `before` has the options before it. If an
    /// option is given several times, the last value is used, unless the option may be repeated.
    /// `defaults` returns the values of options that are not given.
    pub fn parse(
        &'static self,
        program: &'static Program,
        before: Values,
        mut args: lexopt::Parser,
        defaults: impl FnOnce(&Given) -> Result<Values, Error>,
    ) -> Result<Given, Error> {
        let mut given = Given {
            program,
            command: self,
            values: before,
            operand: None,
            further: vec![],
        };
        let known = |name: &str| self.all_options().any(|option| option.name == name);
        if let Some((name, _)) = given.values.iter().find(|(name, _)| !known(name)) {
            return Err(Error::Usage(format!("there is no option --{name}")));
        }
        while let Some(arg) = args.next()? {
            let name = name(&arg);
            let found = name.as_deref().and_then(|name| self.option(name));
            match (found, arg) {
                (Some(Opt { name: "help", .. }), _) => {
                    return Err(Error::Help(self.help(program)));
                }
                (Some(Opt { name, value, .. }), _) => {
                    let value = if value.is_empty() {
                        OsString::new()
                    } else {
                        args.value()?
                    };
                    given.values.push((name, value));
                }
                (None, Arg::Value(value)) if self.operand.is_some() && given.operand.is_none() => {
                    given.operand = Some(value);
                }
                (None, Arg::Value(value)) if self.takes_further() => given.further.push(value),
                (None, Arg::Long(unknown)) => {
                    let known = self.all_options().map(|option| option.name);
                    let suggestion = suggestion("--", unknown, known);
                    let text = format!("there is no option --{unknown}{suggestion}");
                    return Err(Error::Usage(text));
                }
                (None, other) => return Err(other.unexpected().into()),
            }
        }
        let defaults = defaults(&given)?;
        // the operand on the command line, or `--all`, replaces the file's `endpoint`
        let has_nodes = given.has_operand() || given.has("all");
        let absent = |(name, _): &(&'static str, OsString)| {
            !given.has(name) && (*name != "endpoint" || !has_nodes)
        };
        let defaults: Values = defaults.into_iter().filter(absent).collect();
        given.values.extend(defaults);
        let operand = self.operand.as_ref().filter(|operand| operand.is_needed);
        if let Some(operand) = operand.filter(|_| given.operand.is_none()) {
            let name = operand.value;
            return Err(Error::Usage(match operand.words {
                [] => format!("{name} is missing"),
                [word] => format!("the word {word:?} is missing"),
                words => format!("{name} is missing: expected {}", words.join(", ")),
            }));
        }
        match self
            .options
            .iter()
            .find(|option| option.is_needed && !given.has(option.name))
        {
            Some(missing) => Err(Error::Usage(format!("--{} is missing", missing.name))),
            None => Ok(given),
        }
    }

    /// Returns the option with this name, which has its dashes.
    fn option(&self, name: &str) -> Option<&'static Opt> {
        self.all_options().find(|option| option.is(name))
    }

    fn takes_further(&self) -> bool {
        self.operand.as_ref().is_some_and(Operand::is_action)
    }

    /// Returns the command line's form: `firstlight init --endpoint HOST[:PORT] [OPTION]..`
    pub fn synopsis(&self, program: &Program) -> String {
        let mut text = format!("{} {}", program.name, self.name);
        let needed = self
            .options
            .iter()
            .filter(|option| option.is_needed)
            .map(Opt::synopsis);
        let operand = self.operand.iter().map(Operand::synopsis);
        let more = self
            .options
            .iter()
            .any(|option| !option.is_needed)
            .then(|| "[OPTION]..".to_owned());
        for part in operand.chain(needed).chain(more) {
            text.push(' ');
            text.push_str(&part);
        }
        text
    }

    /// Returns the text that `--help` prints after the command.
    pub fn help(&self, program: &Program) -> String {
        let mut text = format!("{} {}: {}\n", program.name, self.name, self.summary);
        for paragraph in self.about {
            text.push_str(&format!("\n{}", wrapped(paragraph, 0)));
        }
        text.push_str(&format!("\nUsage: {}\n\n", self.synopsis(program)));
        let operand = self
            .operand
            .iter()
            .map(|it| (it.value.to_owned(), it.help.to_owned()));
        let options = self
            .all_options()
            .map(|option| (option.synopsis(), option.description()));
        text.push_str(&table(operand.chain(options)));
        text.push_str(&examples(self.examples));
        text
    }
}

impl Program {
    /// Returns the text that `--help` prints.
    pub fn help(&self) -> String {
        let name = self.name;
        let mut text = format!(
            "{name}: {}\n\nUsage: {name} COMMAND [OPTION]..\n",
            self.summary
        );
        let longest = self.commands.iter().map(|it| it.name.len()).max();
        let longest = longest.unwrap_or(0);
        for command in self.commands {
            let group = self.groups.iter().find(|(first, _)| *first == command.name);
            if let Some((_, title)) = group {
                text.push_str(&format!("\n{title}:\n"));
            }
            let name = format!("{:longest$}", command.name);
            text.push_str(&table([(name, command.summary.to_owned())]));
        }
        text.push_str("\nOptions:\n");
        text.push_str(&table(
            self.options
                .iter()
                .map(|option| (option.synopsis(), option.description())),
        ));
        text.push_str("\nExit codes:\n");
        text.push_str(&table(
            self.exit_codes
                .iter()
                .map(|(code, what)| (code.to_string(), (*what).to_owned())),
        ));
        text.push_str(&format!("\nExample, {}:\n", self.examples.0));
        for line in self.examples.1 {
            text.push_str(&format!("  {line}\n"));
        }
        text
    }
}

impl Given {
    /// Returns the program.
    pub fn program(&self) -> &'static Program {
        self.program
    }

    /// Returns the command.
    pub fn command(&self) -> &'static Command {
        self.command
    }

    /// Returns whether the option is given, on the command line or in the file with defaults.
    pub fn has(&self, name: &str) -> bool {
        self.values.iter().any(|(given, _)| *given == name)
    }

    /// Returns the option's value, or its default; `None` if there is neither.
    pub fn value(&self, name: &str) -> Option<OsString> {
        let given = self
            .values
            .iter()
            .rev()
            .find(|(given, _)| *given == name)
            .map(|(_, value)| value.clone());
        let option = self
            .command
            .all_options()
            .find(|option| option.name == name);
        debug_assert!(option.is_some(), "--{name} is in no table");
        given.or_else(|| option.and_then(|option| option.default).map(OsString::from))
    }

    /// Returns the value of an option that is required or has a default, as a path.
    pub fn path(&self, name: &str) -> PathBuf {
        self.value(name).unwrap_or_default().into()
    }

    /// Returns the option's value as text; empty if there is neither a value nor a default.
    pub fn text(&self, name: &str) -> Result<String, Error> {
        Ok(program::text(self.value(name).unwrap_or_default())?)
    }

    /// Returns the option's value, which must be one of these words; empty if there is neither a
    /// value nor a default.
    pub fn one_of(&self, name: &str, words: &[&str]) -> Result<String, Error> {
        let text = self.text(name)?;
        if text.is_empty() || words.contains(&text.as_str()) {
            Ok(text)
        } else {
            let words = words.join(", ");
            Err(Error::Usage(format!("--{name} {text:?}: expected {words}")))
        }
    }

    /// Returns all values of an option that may be repeated.
    pub fn texts(&self, name: &str) -> Result<Vec<String>, Error> {
        let given = self.values.iter().filter(|(given, _)| *given == name);
        given
            .map(|(_, value)| Ok(program::text(value.clone())?))
            .collect()
    }

    /// Parses the option's value with `parse`, whose error says what was expected.
    pub fn parsed<T, E: Display>(
        &self,
        name: &str,
        parse: impl Fn(&str) -> Result<T, E>,
    ) -> Result<T, Error> {
        let text = self.text(name)?;
        let words = || {
            let option = self
                .command
                .options
                .iter()
                .find(|option| option.name == name);
            option
                .map_or(&[][..], |option| option.words)
                .iter()
                .copied()
        };
        parse(&text).map_err(|error| {
            let suggestion = suggestion("", &text, words());
            Error::Usage(format!("--{name} {text:?}: {error}{suggestion}"))
        })
    }

    /// Parses all values of an option that may be repeated with `parse`.
    pub fn each_parsed<T, E: Display>(
        &self,
        name: &str,
        parse: impl Fn(&str) -> Result<T, E>,
    ) -> Result<Vec<T>, Error> {
        let parsed = |text: String| {
            parse(&text).map_err(|error| Error::Usage(format!("--{name} {text:?}: {error}")))
        };
        self.texts(name)?.into_iter().map(parsed).collect()
    }

    /// Returns whether the operand is given.
    pub fn has_operand(&self) -> bool {
        self.operand.is_some()
    }

    /// Returns the operand as text.
    pub fn operand(&self) -> Result<String, Error> {
        Ok(program::text(self.operand.clone().unwrap_or_default())?)
    }

    /// Returns the operands of an action.
    pub fn further(&self) -> &[OsString] {
        &self.further
    }
}

/// Returns the name of an option in the arguments, with its dashes.
fn name(arg: &Arg) -> Option<String> {
    match arg {
        Arg::Short(letter) => Some(format!("-{letter}")),
        Arg::Long(name) => Some(format!("--{name}")),
        Arg::Value(_) => None,
    }
}

fn examples(lines: &[&str]) -> String {
    let mut text = if lines.len() == 1 {
        "\nExample:\n".to_owned()
    } else {
        "\nExamples:\n".to_owned()
    };
    for line in lines {
        text.push_str(&format!("  {line}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const COPY: Command = Command {
        name: "copy",
        summary: "copy a thing",
        about: &["It copies."],
        operand: Some(Operand {
            value: "THING",
            words: &[],
            is_needed: true,
            help: "the thing",
        }),
        options: &[
            Opt::needed("to", FILE, "where to"),
            Opt::value("mode", "MODE", "how").or("fast"),
            Opt::flag("force", "even so").short('f'),
        ],
        examples: &["tool copy x --to y"],
        run: |_| Ok(()),
    };
    const TOOL: Program = Program {
        name: "tool",
        summary: "does things",
        commands: &[COPY],
        groups: &[("copy", "Things")],
        options: &[HELP, VERSION],
        exit_codes: &[(0, "done")],
        examples: ("all of it", &["tool copy x --to y"]),
    };

    fn parse(args: &[&str]) -> Result<Given, Error> {
        TOOL.commands[0].parse(&TOOL, vec![], lexopt::Parser::from_args(args), |_| {
            Ok(vec![("mode", "slow".into())])
        })
    }

    #[test]
    fn values_defaults_and_flags_are_found_by_name() {
        let given = parse(&["--to=a", "thing", "--to", "b", "-f"]).unwrap();
        assert_eq!(
            (given.path("to"), given.operand().unwrap()),
            ("b".into(), "thing".into())
        );
        assert_eq!(given.texts("to").unwrap(), ["a", "b"]);
        assert_eq!(
            (
                given.text("mode").unwrap(),
                given.has("mode"),
                given.has("force")
            ),
            ("slow".into(), true, true)
        );
    }

    #[test]
    fn what_is_missing_or_too_much_is_named() {
        for (args, expected) in [
            (&["thing"][..], "--to is missing"),
            (&["--to", "b"], "THING is missing"),
            (&["--to", "b", "thing", "more"], "more"),
            (&["--to", "b", "thing", "--fast"], "no option --fast"),
            (&["--to", "b", "--forec"], "did you mean --force?"),
            (&["thing", "--to"], "--to"),
            (&["thing", "--force=yes", "--to", "b"], "--force"),
        ] {
            match parse(args).err() {
                Some(Error::Usage(text)) => assert!(text.contains(expected), "{text}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn help_is_written_from_the_table() {
        let Err(Error::Help(text)) = parse(&["--help"]) else {
            panic!()
        };
        assert_eq!(
            text,
            "tool copy: copy a thing\n\nIt copies.\n\nUsage: tool copy THING --to FILE [OPTION]..\n\n  THING          the thing\n  \
             --to FILE      where to\n  --mode MODE    how [fast]\n  -f, --force    even so\n  --config FILE  a file with defaults \
             of these options; by default firstlight.toml in the present folder, if\n                 it exists\n  -h, --help     \
             print this text; after a command, print the command's own\n\nExample:\n  tool copy x --to y\n"
        );
    }
}
