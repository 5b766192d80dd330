//! Asks the operator before a change.

use std::io::{self, BufRead, IsTerminal};

use crate::shell::error::Error;

/// Asks on the terminal. Anything but `yes` is an error. `how` says where to see the plan without a change.
pub fn ask(question: &str, how: &str) -> Result<(), Error> {
    if !io::stdin().is_terminal() {
        return Err(Error::Usage(format!(
            "standard input is no terminal, so nobody can be asked: give --yes, or look at the plan with {how}"
        )));
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
