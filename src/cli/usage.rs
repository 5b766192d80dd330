//! What the command line is, as tables: the arguments are read by them, and `--help`, the man page and the shells'
//! completions are written from them, so that none can say what another does not.

use std::ffi::OsString;
use std::fmt::{Display, Write};
use std::path::PathBuf;

use lexopt::Arg;

use base::program::{self, Failure};

/// Help is wrapped to this many columns.
const WIDTH: usize = 110;

/// A program of several commands.
pub struct Program {
    /// As it is called.
    pub name: &'static str,
    /// What it does, a phrase: `makes confidential virtual machines a cluster`.
    pub summary: &'static str,
    /// In the order of an operator's work.
    pub commands: &'static [Command],
    /// Each with its meaning.
    pub exit_codes: &'static [(u8, &'static str)],
    /// What they show together, and the command lines.
    pub examples: (&'static str, &'static [&'static str]),
}

/// What comes after the program's name.
pub struct Command {
    /// One word.
    pub name: &'static str,
    /// What it does, an imperative: `write the attestation policy that a machine meets`.
    pub summary: &'static str,
    /// Paragraphs.
    pub about: &'static [&'static str],
    /// What is given without a name; needed.
    pub operand: Option<Operand>,
    /// In the order of help; `--help` is everybody's and not among them.
    pub options: &'static [Opt],
    /// Command lines that work when the files and addresses are the operator's.
    pub examples: &'static [&'static str],
    /// Does it.
    pub run: fn(&Given) -> Result<(), Failure>,
}

/// A value without an option's name before it.
pub struct Operand {
    /// What it is.
    pub value: Value,
    /// What it is for.
    pub help: &'static str,
}

/// An option.
pub struct Opt {
    /// Without the dashes.
    pub name: &'static str,
    /// One letter that stands for it.
    pub short: Option<char>,
    /// What it takes, if it takes anything.
    pub value: Option<Value>,
    /// Whether the command makes no sense without it.
    pub is_needed: bool,
    /// What it is when not given.
    pub default: Option<&'static str>,
    /// What it is for; lower case, no full stop.
    pub help: &'static str,
}

/// What an option or an operand takes.
#[derive(Clone, Copy)]
pub enum Value {
    /// The name of a file.
    File,
    /// Something else that help calls this.
    Text(&'static str),
    /// One of these words.
    OneOf(&'static str, &'static [&'static str]),
}

impl Value {
    /// As help calls it.
    pub fn name(self) -> &'static str {
        match self {
            Value::File => "FILE",
            Value::Text(name) | Value::OneOf(name, _) => name,
        }
    }
}

impl Opt {
    const fn new(name: &'static str, value: Option<Value>, help: &'static str) -> Opt {
        Opt {
            name,
            short: None,
            value,
            is_needed: false,
            default: None,
            help,
        }
    }

    /// Takes nothing.
    pub const fn flag(name: &'static str, help: &'static str) -> Opt {
        Opt::new(name, None, help)
    }

    /// May be left out.
    pub const fn value(name: &'static str, value: Value, help: &'static str) -> Opt {
        Opt::new(name, Some(value), help)
    }

    /// May not.
    pub const fn needed(name: &'static str, value: Value, help: &'static str) -> Opt {
        Opt {
            is_needed: true,
            ..Opt::new(name, Some(value), help)
        }
    }

    /// What it is when left out.
    pub const fn or(self, default: &'static str) -> Opt {
        Opt {
            default: Some(default),
            ..self
        }
    }

    /// A letter that stands for it.
    pub const fn short(self, letter: char) -> Opt {
        Opt {
            short: Some(letter),
            ..self
        }
    }

    /// `-h, --help`, `--policy FILE`.
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
            Arg::Long(name) => self.name == *name,
            Arg::Short(letter) => self.short == Some(*letter),
            Arg::Value(_) => false,
        }
    }

    /// What it is for, and its default.
    pub fn description(&self) -> String {
        match self.default {
            Some(default) => format!("{} [{default}]", self.help),
            None => self.help.to_owned(),
        }
    }
}

/// Everybody's.
pub const HELP: Opt = Opt::flag("help", "this text; after a command, that command's").short('h');
/// The program's.
pub const VERSION: Opt = Opt::flag("version", "the version");

/// What the command line gave.
pub struct Given {
    command: &'static Command,
    values: Vec<(&'static str, OsString)>,
    operand: Option<OsString>,
}

impl Command {
    /// Reads what follows the command's name. Of several values of an option the last counts, unless it may be
    /// repeated.
    pub fn parse(
        &'static self,
        program: &Program,
        mut args: lexopt::Parser,
    ) -> Result<Given, Failure> {
        let mut given = Given {
            command: self,
            values: vec![],
            operand: None,
        };
        while let Some(arg) = args.next()? {
            if HELP.is(&arg) {
                return Err(Failure::HelpOn(self.help(program)));
            }
            match (self.options.iter().find(|option| option.is(&arg)), arg) {
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
                (None, other) => return Err(other.unexpected().into()),
            }
        }
        if let Some(operand) = self.operand.as_ref().filter(|_| given.operand.is_none()) {
            return Err(Failure::Usage(format!(
                "{} is missing",
                operand.value.name()
            )));
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

    /// `firstlight init --endpoint HOST[:PORT] [OPTION]..`
    pub fn synopsis(&self, program: &Program) -> String {
        let mut text = format!("{} {}", program.name, self.name);
        let needed = self
            .options
            .iter()
            .filter(|option| option.is_needed)
            .map(Opt::synopsis);
        let operand = self
            .operand
            .iter()
            .map(|operand| operand.value.name().to_owned());
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

    /// What `--help` after the command prints.
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
            .options
            .iter()
            .chain([&HELP])
            .map(|option| (option.synopsis(), option.description()));
        text.push_str(&table(operand.chain(options)));
        text.push_str(&examples(self.examples));
        text
    }
}

impl Program {
    /// What `--help` prints.
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
            [HELP, VERSION].map(|option| (option.synopsis(), option.description())),
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
    /// Whether the option is there.
    pub fn has(&self, name: &str) -> bool {
        self.values.iter().any(|(given, _)| *given == name)
    }

    /// The option's value, or its default; `None` where there is neither.
    pub fn value(&self, name: &str) -> Option<OsString> {
        let given = self
            .values
            .iter()
            .rev()
            .find(|(given, _)| *given == name)
            .map(|(_, value)| value.clone());
        let option = self
            .command
            .options
            .iter()
            .find(|option| option.name == name);
        debug_assert!(option.is_some(), "--{name} is in no table");
        given.or_else(|| option.and_then(|option| option.default).map(OsString::from))
    }

    /// The value of an option that is needed or has a default.
    pub fn path(&self, name: &str) -> PathBuf {
        self.value(name).unwrap_or_default().into()
    }

    /// The same as text; empty where there is neither value nor default.
    pub fn text(&self, name: &str) -> Result<String, Failure> {
        program::text(self.value(name).unwrap_or_default())
    }

    /// Each value of an option that may be repeated.
    pub fn texts(&self, name: &str) -> Result<Vec<String>, Failure> {
        let given = self.values.iter().filter(|(given, _)| *given == name);
        given
            .map(|(_, value)| program::text(value.clone()))
            .collect()
    }

    /// The same as what `parse` makes of it; its error says what was expected.
    pub fn parsed<T, E: Display>(
        &self,
        name: &str,
        parse: impl Fn(&str) -> Result<T, E>,
    ) -> Result<T, Failure> {
        let text = self.text(name)?;
        parse(&text).map_err(|error| Failure::Usage(format!("--{name} {text:?}: {error}")))
    }

    /// The same of each value of an option that may be repeated.
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

    /// The operand as text.
    pub fn operand(&self) -> Result<String, Failure> {
        program::text(self.operand.clone().unwrap_or_default())
    }
}

/// Names on the left, what they are on the right.
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

/// Wrapped to [`WIDTH`]; lines after the first are indented.
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
        exit_codes: &[(0, "done")],
        examples: ("all of it", &["tool copy x --to y"]),
    };

    fn parse(args: &[&str]) -> Result<Given, Failure> {
        TOOL.commands[0].parse(&TOOL, lexopt::Parser::from_args(args))
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
            ("fast".into(), false, true)
        );
    }

    #[test]
    fn what_is_missing_or_too_much_is_named() {
        for (args, expected) in [
            (&["thing"][..], "--to is missing"),
            (&["--to", "b"], "THING is missing"),
            (&["--to", "b", "thing", "more"], "more"),
            (&["--to", "b", "thing", "--fast"], "--fast"),
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
            "tool copy: copy a thing\n\nIt copies.\n\nUsage: tool copy THING --to FILE [OPTION]..\n\n  THING        the thing\n  \
             --to FILE    where to\n  --mode MODE  how [fast]\n  -f, --force  even so\n  -h, --help   this text; after a \
             command, that command's\n\nExample:\n  tool copy x --to y\n"
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
