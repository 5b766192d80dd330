//! `firstlight completions`: completions of our command lines for shells, made from the same declarations as `--help`.

use clap::{Arg, Args, Command, ValueHint};
use clap_complete::Shell;

use crate::shell::{error::Error, output::say_all};

/// Print the completions of these commands for a shell
///
/// The running shell can read the output at once, or from a file when it starts.
#[derive(Args)]
#[command(after_help = "Examples:
  source <(firstlight completions bash)
  firstlight completions zsh > ~/.zfunc/_firstlight
  firstlight completions fish > ~/.config/fish/completions/firstlight.fish")]
pub struct Options {
    /// The shell
    shell: Shell,
}

/// Runs the command.
pub fn run(options: &Options, program: Command) -> Result<(), Error> {
    // only for files does clap's function for bash keep names with spaces together
    let mut program = program.mut_subcommands(|command| {
        command.mut_args(|arg| match arg.get_value_hint() {
            ValueHint::AnyPath => arg.value_hint(ValueHint::FilePath),
            _ => arg,
        })
    });
    let (name, mut text) = (program.get_name().to_owned(), vec![]);
    clap_complete::generate(options.shell, &mut program, &name, &mut text);
    let mut text = String::from_utf8_lossy(&text).into_owned();
    if options.shell == Shell::Fish {
        text.push_str(&operands(&program));
    }
    say_all(&text)
}

/// Returns fish's completions of operands that are words, which clap's function for fish leaves out.
fn operands(program: &Command) -> String {
    let mut text = String::new();
    for command in program.get_subcommands() {
        let values = command.get_positionals().flat_map(Arg::get_possible_values);
        for value in values {
            text.push_str(&format!(
                "complete -c {0} -n \"__fish_{0}_using_subcommand {1}\" -f -a {2}\n",
                program.get_name(),
                command.get_name(),
                value.get_name()
            ));
        }
    }
    text
}
