//! `firstlight man`: the manual page in mdoc(7), made from the same tables as `--help`.

use crate::shell::{
    error::Error,
    usage::{CONFIG, Command, Program},
};
use base::options::Opt;

/// Date of the page's last change; a constant, because the page must not differ between builds.
const DATE: &str = "November 22, 2026";

/// The command and its options.
pub const COMMAND: Command = Command {
    name: "man",
    summary: "print the manual page",
    about: &["The output has the format mdoc(7)."],
    operand: None,
    options: &[],
    examples: &["firstlight man > firstlight.1 && man ./firstlight.1"],
    run: |given| run(given.program()),
};

/// Runs the command.
pub fn run(program: &Program) -> Result<(), Error> {
    crate::shell::output::say_all(&page(program))
}

fn page(program: &Program) -> String {
    let name = program.name;
    let mut text = format!(
        ".Dd {DATE}\n.Dt {} 1\n.Os\n.Sh NAME\n.Nm {name}\n.Nd {}\n.Sh SYNOPSIS\n",
        name.to_uppercase(),
        line(program.summary)
    );
    for command in program.commands {
        text.push_str(&format!(".Nm\n.Cm {}\n", command.name));
        text.extend(command.operand.iter().map(|operand| {
            if operand.is_needed {
                format!(".Ar {}\n", line(operand.value))
            } else {
                format!(".Op Ar {}\n", line(operand.value))
            }
        }));
        for option in command.options.iter().filter(|option| option.is_needed) {
            text.push_str(&macro_of(option));
        }
        if command.options.iter().any(|option| !option.is_needed) {
            text.push_str(".Op Ar OPTION ...\n");
        }
    }
    text.push_str(&format!(
        ".Sh DESCRIPTION\n.Nm\n{}.\nThe commands:\n.Bl -tag -width Ds\n",
        line(program.summary)
    ));
    for command in program.commands {
        text.push_str(&format!(
            ".It Cm {}\n{}.\n",
            command.name,
            line(command.summary)
        ));
    }
    text.push_str(
        ".El\n.Pp\nResults go to standard output, everything else to standard error.\nOptions:\n",
    );
    text.push_str(&list(program.options.iter().chain([&CONFIG])));
    for command in program.commands {
        text.push_str(&section(name, command));
    }
    text.push_str(".Sh EXIT STATUS\n.Bl -tag -width Ds\n");
    for (code, what) in program.exit_codes {
        text.push_str(&format!(".It {code}\n{}\n", line(what)));
    }
    text.push_str(&format!(
        ".El\n.Sh EXAMPLES\nA cluster, {}:\n",
        line(program.examples.0)
    ));
    text.push_str(&literal(program.examples.1));
    text
}

/// Returns a command's part of the description.
fn section(program: &str, command: &Command) -> String {
    let mut text = format!(".Ss {program} {}\n", command.name);
    for (number, paragraph) in command.about.iter().enumerate() {
        let separator = if number > 0 { ".Pp\n" } else { "" };
        // one sentence on each line, as roff(7) requires
        let sentences = paragraph
            .split_inclusive(". ")
            .map(|sentence| format!("{}\n", line(sentence.trim())));
        text.push_str(separator);
        text.extend(sentences);
    }
    if let Some(operand) = &command.operand {
        text.push_str(&format!(
            ".Pp\n.Ar {}\nis {}.\n",
            line(operand.value),
            line(operand.help)
        ));
    }
    if !command.options.is_empty() {
        text.push_str(&list(command.options));
    }
    text.push_str(".Pp\nFor example:\n");
    text.push_str(&literal(command.examples));
    text
}

fn list<'a>(options: impl IntoIterator<Item = &'a Opt>) -> String {
    let items = options.into_iter().map(|option| {
        let item = macro_of(option);
        format!(".It {}{}\n", &item[1..], line(&option.description()))
    });
    format!(".Bl -tag -width Ds\n{}.El\n", items.collect::<String>())
}

/// Returns the macro of an option, such as `.Fl -policy Ar FILE`; mdoc puts a dash before the name.
fn macro_of(option: &Opt) -> String {
    let value = match option.value {
        "" => String::new(),
        value => format!(" Ar {}", line(value)),
    };
    let short = option
        .short
        .map(|letter| format!("{letter} , "))
        .unwrap_or_default();
    format!(".Fl {short}\\-{}{value}\n", line(option.name))
}

fn literal(lines: &[&str]) -> String {
    let lines: String = lines.iter().map(|it| format!("{}\n", line(it))).collect();
    format!(".Bd -literal -offset indent\n{lines}.Ed\n")
}

/// Escapes a line of text, so that roff(7) reads no request in it and prints dashes that can be
/// copied to a shell.
fn line(text: &str) -> String {
    let escaped = text.replace('\\', "\\e").replace('-', "\\-");
    if escaped.starts_with(['.', '\'']) {
        format!("\\&{escaped}")
    } else {
        escaped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_be_taken_for_a_request() {
        assert_eq!(line(".so /etc/passwd"), "\\&.so /etc/passwd");
        assert_eq!(line("'a' -b \\n"), "\\&'a' \\-b \\en");
    }
}
