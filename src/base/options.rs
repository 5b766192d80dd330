//! The options of a command line as tables. A program has its table beside the code that uses the
//! values. The table parses the arguments and makes the help text and all other lists of options.

use std::ffi::OsString;

use lexopt::{Arg, Parser};

use crate::program::Failure;

/// Maximum columns of a help text.
const WIDTH: usize = 110;

/// An option.
#[derive(Clone, Copy)]
pub struct Opt {
    /// The name without the dashes.
    pub name: &'static str,
    /// The one-letter form, if there is one.
    pub short: Option<char>,
    /// An alias of the option: its name in other programs, or in earlier versions.
    pub was: Option<&'static str>,
    /// The value's name in the help text, as `FILE`; empty for a flag.
    pub value: &'static str,
    /// The permitted values; empty: any text.
    pub words: &'static [&'static str],
    /// Whether a node also takes the option as a setting of its image.
    pub is_setting: bool,
    /// The default value.
    pub default: Option<&'static str>,
    /// The option's meaning; lower case, no full stop.
    pub help: &'static str,
}

/// Stores the value of the option with this name; the value of a flag is empty.
pub type Set<T> = fn(&mut T, &'static str, OsString) -> Result<(), Failure>;
/// The options of a program, each with the function that stores its value in `T`.
pub type Table<T> = [(Opt, Set<T>)];

/// The help option.
pub const HELP: Opt = Opt::flag("help", "print this text").short('h');
/// The version option.
pub const VERSION: Opt = Opt::flag("version", "print the version");

impl Opt {
    /// Creates an option without a value.
    pub const fn flag(name: &'static str, help: &'static str) -> Opt {
        Opt::value(name, "", help)
    }

    /// Creates an option with a value.
    pub const fn value(name: &'static str, value: &'static str, help: &'static str) -> Opt {
        Opt {
            name,
            short: None,
            was: None,
            value,
            words: &[],
            is_setting: false,
            default: None,
            help,
        }
    }

    /// Makes the option a setting of a node's image too.
    pub const fn setting(mut self) -> Opt {
        self.is_setting = true;
        self
    }

    /// Sets the permitted values.
    pub const fn one_of(mut self, words: &'static [&'static str]) -> Opt {
        self.words = words;
        self
    }

    /// Sets the default.
    pub const fn or(mut self, default: &'static str) -> Opt {
        self.default = Some(default);
        self
    }

    /// Sets the one-letter form.
    pub const fn short(mut self, letter: char) -> Opt {
        self.short = Some(letter);
        self
    }

    /// Sets an alias, which the help text does not show.
    pub const fn was(mut self, name: &'static str) -> Opt {
        self.was = Some(name);
        self
    }

    /// Returns whether the option has this name, in the long or the one-letter form with dashes.
    pub fn is(&self, name: &str) -> bool {
        match name.strip_prefix("--") {
            Some(long) => self.name == long || self.was == Some(long),
            None => name.strip_prefix('-').map(str::parse) == self.short.map(Ok),
        }
    }

    /// Returns the option as the help text shows it: `-h, --help`, `--policy FILE`.
    pub fn synopsis(&self) -> String {
        let short = self.short.map(|letter| format!("-{letter}, "));
        let text = format!(
            "{}--{} {}",
            short.unwrap_or_default(),
            self.name,
            self.value
        );
        text.trim_end().to_owned()
    }

    /// Returns the option's meaning, its permitted values and its default.
    pub fn description(&self) -> String {
        let words = match self.words {
            [] => String::new(),
            words => format!(" ({})", words.join(", ")),
        };
        let default = self.default.map(|default| format!(" [{default}]"));
        [self.help, &words, &default.unwrap_or_default()].concat()
    }
}

/// Returns the options of a table.
pub fn of<T>(table: &'static Table<T>) -> Vec<&'static Opt> {
    table.iter().map(|(opt, _)| opt).collect()
}

/// Parses all arguments. `take` gets the name of each option with its dashes, and returns whether a
/// table has it; see [`take()`].
pub fn parse(
    mut args: Parser,
    mut take: impl FnMut(&str, &mut Parser) -> Result<bool, Failure>,
) -> Result<(), Failure> {
    while let Some(arg) = args.next()? {
        let name = match &arg {
            Arg::Short(letter) => format!("-{letter}"),
            Arg::Long(name) => format!("--{name}"),
            Arg::Value(_) => return Err(arg.unexpected().into()),
        };
        if HELP.is(&name) {
            return Err(Failure::Help);
        } else if VERSION.is(&name) {
            return Err(Failure::Version);
        } else if !take(&name, &mut args)? {
            return Err(Failure::Usage(format!("invalid option '{name}'")));
        }
    }
    Ok(())
}

/// Stores the value of an option of the table in `into`. Returns the option's name, or `None` if the
/// table does not have it.
pub fn take<T>(
    table: &Table<T>,
    name: &str,
    args: &mut Parser,
    into: &mut T,
) -> Result<Option<&'static str>, Failure> {
    let Some((opt, set)) = table.iter().find(|(opt, _)| opt.is(name)) else {
        return Ok(None);
    };
    let value = match opt.value {
        "" => OsString::new(),
        _ => args.value()?,
    };
    set(into, opt.name, value).map(|()| Some(opt.name))
}

/// Stores the value of an option, if it is valid.
pub fn put<T>(place: &mut T, value: Result<T, Failure>) -> Result<(), Failure> {
    *place = value?;
    Ok(())
}

/// Returns the lines of a help text about options.
pub fn help(options: &[&Opt]) -> String {
    let rows = options.iter();
    table(rows.map(|option| (option.synopsis(), option.description())))
}

/// Returns a table with names on the left and their meaning on the right.
pub fn table(rows: impl IntoIterator<Item = (String, String)>) -> String {
    let rows: Vec<_> = rows.into_iter().collect();
    let left = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let row =
        |(name, what): &(String, String)| format!("  {name:left$}  {}", wrapped(what, left + 4));
    rows.iter().map(row).collect()
}

/// Wraps a text to 110 columns; lines after the first are indented.
fn wrapped(text: &str, indent: usize) -> String {
    let mut lines: Vec<String> = vec![];
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if indent + line.len() + word.len() < WIDTH => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines.join(&format!("\n{:indent$}", "")) + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program;

    #[derive(Default)]
    struct Given {
        port: u16,
        loud: bool,
    }

    const TABLE: &Table<Given> = &[
        (
            Opt::value("port", "PORT", "the port").was("p").or("0"),
            |it, name, value| put(&mut it.port, program::parsed(name, value)),
        ),
        (Opt::flag("loud", "say more").short('l'), |it, _, _| {
            put(&mut it.loud, Ok(true))
        }),
    ];

    fn parsed(args: &[&str]) -> Result<Given, Failure> {
        let mut given = Given::default();
        parse(Parser::from_args(args), |name, args| {
            take(TABLE, name, args, &mut given).map(|found| found.is_some())
        })?;
        Ok(given)
    }

    #[test]
    fn a_table_stores_the_values_of_its_options() {
        let given = parsed(&["--port=1", "-l", "--p", "2"]).unwrap();
        assert_eq!((given.port, given.loud), (2, true));
    }

    #[test]
    fn what_no_table_has_is_refused() {
        for (args, expected) in [
            (&["--prot", "1"][..], "invalid option '--prot'"),
            (&["-p", "1"], "invalid option '-p'"),
            (&["--l"], "invalid option '--l'"),
            (&["--port", "x"], "--port \"x\""),
            (&["--port"], "--port"),
            (&["--loud=1"], "--loud"),
            (&["word"], "word"),
        ] {
            match parsed(args).err() {
                Some(Failure::Usage(text)) => assert!(text.contains(expected), "{text}"),
                other => panic!("{args:?}: {other:?}"),
            }
        }
        assert_eq!(parsed(&["-h"]).err(), Some(Failure::Help));
        assert_eq!(parsed(&["--version"]).err(), Some(Failure::Version));
    }

    #[test]
    fn the_help_text_is_written_from_the_table() {
        let more = Opt::value("form", "FORM", "the form").one_of(&["a", "b"]);
        assert_eq!(
            help(&[&TABLE[0].0, &TABLE[1].0, &more]),
            "  --port PORT  the port [0]\n  -l, --loud   say more\n  --form FORM  the form (a, b)\n"
        );
    }

    #[test]
    fn long_texts_are_wrapped_below_their_beginning() {
        let text = table([("a".into(), "word ".repeat(50))]);
        assert!(
            text.lines().all(|line| line.len() <= WIDTH) && text.lines().count() == 3,
            "{text}"
        );
        let mut more = text.lines().skip(1);
        assert!(more.all(|line| line.starts_with("     word")), "{text}");
    }
}
