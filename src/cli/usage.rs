//! The command line as tables. The same tables parse the arguments and produce `--help`, the manual
//! page and the shells' completions, so these always agree.

use std::ffi::OsString;
use std::fmt::{Display, Write};
use std::path::PathBuf;

use lexopt::Arg;

use base::program::{self, Failure};

/// Maximum columns of the help text.
const WIDTH: usize = 110;

/// A program with several commands.
pub struct Program {
    /// The program's name on the command line.
    pub name: &'static str,
    /// What the program does, a phrase: `makes a Kubernetes cluster of confidential virtual
    /// machines`.
    pub summary: &'static str,
    /// The commands, in the order of an operator's work.
    pub commands: &'static [Command],
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
    pub run: fn(&Given) -> Result<(), Failure>,
}

/// A value without the name of an option before it.
pub struct Operand {
    /// The kind of value.
    pub value: Value,
    /// Whether the operand is required.
    pub is_needed: bool,
    /// The operand's meaning.
    pub help: &'static str,
}

impl Operand {
    /// Returns the operand as a command line shows it: `SHELL`, `[IMAGE]`.
    pub fn synopsis(&self) -> String {
        match self.is_needed {
            true => self.value.name().to_owned(),
            false => format!("[{}]", self.value.name()),
        }
    }
}

/// An option.
pub struct Opt {
    /// The name without the dashes.
    pub name: &'static str,
    /// The one-letter form, if there is one.
    pub short: Option<char>,
    /// An alias of the option: its name in other programs, or in earlier versions.
    pub was: Option<&'static str>,
    /// The kind of value; `None` for a flag.
    pub value: Option<Value>,
    /// Whether the option is required.
    pub is_needed: bool,
    /// The default value.
    pub default: Option<&'static str>,
    /// The option's meaning; lower case, no full stop.
    pub help: &'static str,
}

/// The kind of value of an option or an operand.
#[derive(Clone, Copy)]
pub enum Value {
    /// The name of a file.
    File,
    /// Any other text; its name in the help text.
    Text(&'static str),
    /// One of these words; its name in the help text.
    OneOf(&'static str, &'static [&'static str]),
    /// One of these words, followed by the operands of that word; their form in the help text. Only
    /// for an operand.
    Action(&'static str, &'static [&'static str]),
}

impl Value {
    /// Returns the value's name in the help text.
    pub fn name(self) -> &'static str {
        match self {
            Value::File => "FILE",
            Value::Text(name) | Value::OneOf(name, _) | Value::Action(name, _) => name,
        }
    }
}

impl Opt {
    const fn new(name: &'static str, value: Option<Value>, help: &'static str) -> Opt {
        Opt {
            name,
            short: None,
            was: None,
            value,
            is_needed: false,
            default: None,
            help,
        }
    }

    /// Creates an option without a value.
    pub const fn flag(name: &'static str, help: &'static str) -> Opt {
        Opt::new(name, None, help)
    }

    /// Creates an optional option with a value.
    pub const fn value(name: &'static str, value: Value, help: &'static str) -> Opt {
        Opt::new(name, Some(value), help)
    }

    /// Creates a required option.
    pub const fn needed(name: &'static str, value: Value, help: &'static str) -> Opt {
        Opt {
            is_needed: true,
            ..Opt::new(name, Some(value), help)
        }
    }

    /// Sets the default.
    pub const fn or(self, default: &'static str) -> Opt {
        Opt {
            default: Some(default),
            ..self
        }
    }

    /// Sets the one-letter form.
    pub const fn short(self, letter: char) -> Opt {
        Opt {
            short: Some(letter),
            ..self
        }
    }

    /// Sets an alias, which the help text does not show.
    pub const fn was(self, name: &'static str) -> Opt {
        Opt {
            was: Some(name),
            ..self
        }
    }

    /// Returns the option as the help text shows it: `-h, --help`, `--policy FILE`.
    pub fn synopsis(&self) -> String {
        let short = self
            .short
            .map(|letter| format!("-{letter}, "))
            .unwrap_or_default();
        let value = self
            .value
            .map(|value| format!(" {}", value.name()))
            .unwrap_or_default();
        format!("{short}--{}{value}", self.name)
    }

    fn is(&self, arg: &Arg) -> bool {
        match arg {
            Arg::Long(name) => self.name == *name || self.was == Some(*name),
            Arg::Short(letter) => self.short == Some(*letter),
            Arg::Value(_) => false,
        }
    }

    /// Returns the option's meaning and its default.
    pub fn description(&self) -> String {
        match self.default {
            Some(default) => format!("{} [{default}]", self.help),
            None => self.help.to_owned(),
        }
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
    Value::File,
    "a file with defaults of these options; by default firstlight.toml in the present folder, if it exists",
);
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
        program: &Program,
        before: Values,
        mut args: lexopt::Parser,
        defaults: impl FnOnce(&Given) -> Result<Values, Failure>,
    ) -> Result<Given, Failure> {
        let mut given = Given {
            command: self,
            values: before,
            operand: None,
            further: vec![],
        };
        let known = |name: &str| self.all_options().any(|option| option.name == name);
        if let Some((name, _)) = given.values.iter().find(|(name, _)| !known(name)) {
            return Err(Failure::Usage(format!("there is no option --{name}")));
        }
        while let Some(arg) = args.next()? {
            if HELP.is(&arg) {
                return Err(Failure::HelpOn(self.help(program)));
            }
            match (self.all_options().find(|option| option.is(&arg)), arg) {
                (
                    Some(Opt {
                        name,
                        value: Some(_),
                        ..
                    }),
                    _,
                ) => given.values.push((name, args.value()?)),
                (Some(Opt { name, .. }), _) => given.values.push((name, OsString::new())),
                (None, Arg::Value(value)) if self.operand.is_some() && given.operand.is_none() => {
                    given.operand = Some(value);
                }
                (None, Arg::Value(value)) if self.takes_further() => given.further.push(value),
                (None, Arg::Long(unknown)) => {
                    let known = self.all_options().map(|option| option.name);
                    let suggestion = suggestion("--", unknown, known);
                    let text = format!("there is no option --{unknown}{suggestion}");
                    return Err(Failure::Usage(text));
                }
                (None, other) => return Err(other.unexpected().into()),
            }
        }
        let defaults = defaults(&given)?;
        // the operand on the command line replaces the file's `endpoint`
        let absent = |(name, _): &(&'static str, OsString)| {
            !given.has(name) && (*name != "endpoint" || !given.has_operand())
        };
        let defaults: Values = defaults.into_iter().filter(absent).collect();
        given.values.extend(defaults);
        let operand = self.operand.as_ref().filter(|operand| operand.is_needed);
        if let Some(operand) = operand.filter(|_| given.operand.is_none()) {
            return Err(Failure::Usage(match operand.value {
                Value::OneOf(_, [word]) => format!("the word {word:?} is missing"),
                Value::OneOf(name, words) | Value::Action(name, words) => {
                    format!("{name} is missing: expected {}", words.join(", "))
                }
                other => format!("{} is missing", other.name()),
            }));
        }
        match self
            .options
            .iter()
            .find(|option| option.is_needed && !given.has(option.name))
        {
            Some(missing) => Err(Failure::Usage(format!("--{} is missing", missing.name))),
            None => Ok(given),
        }
    }

    /// Returns whether the operand is an action, which has its own operands.
    fn takes_further(&self) -> bool {
        let value = self.operand.as_ref().map(|operand| operand.value);
        matches!(value, Some(Value::Action(..)))
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
            .map(|it| (it.value.name().to_owned(), it.help.to_owned()));
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
            "{name}: {}\n\nUsage: {name} COMMAND [OPTION]..\n\nCommands:\n",
            self.summary
        );
        text.push_str(&table(
            self.commands
                .iter()
                .map(|it| (it.name.to_owned(), it.summary.to_owned())),
        ));
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
    pub fn text(&self, name: &str) -> Result<String, Failure> {
        program::text(self.value(name).unwrap_or_default())
    }

    /// Returns the option's value, which must be one of these words; empty if there is neither a
    /// value nor a default.
    pub fn one_of(&self, name: &str, words: &[&str]) -> Result<String, Failure> {
        let text = self.text(name)?;
        match text.is_empty() || words.contains(&text.as_str()) {
            true => Ok(text),
            false => {
                let words = words.join(", ");
                Err(Failure::Usage(format!(
                    "--{name} {text:?}: expected {words}"
                )))
            }
        }
    }

    /// Returns all values of an option that may be repeated.
    pub fn texts(&self, name: &str) -> Result<Vec<String>, Failure> {
        let given = self.values.iter().filter(|(given, _)| *given == name);
        given
            .map(|(_, value)| program::text(value.clone()))
            .collect()
    }

    /// Parses the option's value with `parse`, whose error says what was expected.
    pub fn parsed<T, E: Display>(
        &self,
        name: &str,
        parse: impl Fn(&str) -> Result<T, E>,
    ) -> Result<T, Failure> {
        let text = self.text(name)?;
        parse(&text).map_err(|error| Failure::Usage(format!("--{name} {text:?}: {error}")))
    }

    /// Parses all values of an option that may be repeated with `parse`.
    pub fn each_parsed<T, E: Display>(
        &self,
        name: &str,
        parse: impl Fn(&str) -> Result<T, E>,
    ) -> Result<Vec<T>, Failure> {
        let parsed = |text: String| {
            parse(&text).map_err(|error| Failure::Usage(format!("--{name} {text:?}: {error}")))
        };
        self.texts(name)?.into_iter().map(parsed).collect()
    }

    /// Returns whether the operand is given.
    pub fn has_operand(&self) -> bool {
        self.operand.is_some()
    }

    /// Returns the operand as text.
    pub fn operand(&self) -> Result<String, Failure> {
        program::text(self.operand.clone().unwrap_or_default())
    }

    /// Returns the operands of an action.
    pub fn further(&self) -> &[OsString] {
        &self.further
    }
}

/// Returns a table with names on the left and their meaning on the right.
fn table(rows: impl IntoIterator<Item = (String, String)>) -> String {
    let rows: Vec<_> = rows.into_iter().collect();
    let left = rows
        .iter()
        .map(|(name, _)| name.len())
        .max()
        .unwrap_or_default();
    let indent = left + 4;
    let row =
        |(name, what): &(String, String)| format!("  {name:left$}  {}", wrapped(what, indent));
    rows.iter().map(row).collect()
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

/// Wraps a text to [`WIDTH`] columns; lines after the first are indented.
fn wrapped(text: &str, indent: usize) -> String {
    let mut out = String::new();
    let mut column = indent;
    for word in text.split_whitespace() {
        if column > indent && column + 1 + word.len() > WIDTH {
            // writing to a string does not fail
            let _ = write!(out, "\n{:indent$}", "");
            column = indent;
        } else if column > indent {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += word.len();
    }
    out.push('\n');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const COPY: Command = Command {
        name: "copy",
        summary: "copy a thing",
        about: &["It copies."],
        operand: Some(Operand {
            value: Value::Text("THING"),
            is_needed: true,
            help: "the thing",
        }),
        options: &[
            Opt::needed("to", Value::File, "where to"),
            Opt::value("mode", Value::Text("MODE"), "how").or("fast"),
            Opt::flag("force", "even so").short('f'),
        ],
        examples: &["tool copy x --to y"],
        run: |_| Ok(()),
    };
    const TOOL: Program = Program {
        name: "tool",
        summary: "does things",
        commands: &[COPY],
        options: &[HELP, VERSION],
        exit_codes: &[(0, "done")],
        examples: ("all of it", &["tool copy x --to y"]),
    };

    fn parse(args: &[&str]) -> Result<Given, Failure> {
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
                Some(Failure::Usage(text)) => assert!(text.contains(expected), "{text}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn help_is_written_from_the_table() {
        let Err(Failure::HelpOn(text)) = parse(&["--help"]) else {
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

    #[test]
    fn long_texts_are_wrapped_below_their_beginning() {
        let text = table([("a".into(), "word ".repeat(50))]);
        assert!(
            text.lines().all(|line| line.len() <= WIDTH) && text.lines().count() == 3,
            "{text}"
        );
        assert!(
            text.lines()
                .skip(1)
                .all(|line| line.starts_with("     word")),
            "{text}"
        );
    }
}
