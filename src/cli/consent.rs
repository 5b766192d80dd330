//! Asks the operator before a change.

use std::io::{self, BufRead, IsTerminal};

use super::error::Error;

/// Asks on the terminal. Anything but `yes` is an error.
pub fn ask(question: &str) -> Result<(), Error> {
    if !io::stdin().is_terminal() {
        return Err(Error::Usage(
            "standard input is no terminal, so nobody can be asked: give --yes, or look at the plan with --dry-run".into(),
        ));
    }
    eprint!("{question} Type yes: ");
    let mut answer = String::new();
    let read = io::stdin().lock().read_line(&mut answer);
    read.map_err(|error| Error::failed(format!("standard input: {error}")))?;
    match answer.trim() {
        "yes" => Ok(()),
        _ => Err(Error::Failed("nothing was changed".into())),
    }
}
