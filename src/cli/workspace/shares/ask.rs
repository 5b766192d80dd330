//! Asks for shares on the terminal, without showing the typed text.

use std::io;

use sys::terminal::Hidden;
use zeroize::Zeroizing;

use super::code::parse;
use super::scheme::{Named, check};
use crate::shell::error::Error;

/// How many wrong inputs of a share are allowed.
const TRIES: usize = 5;
/// Maximum bytes of a line at a terminal (termios(3)), and of a code.
const MAX_LINE: usize = 4096;

/// Asks for shares until there are enough to restore the secret. Asks again for a wrong share.
pub fn for_missing(shares: &mut Vec<Named>) -> Result<(), Error> {
    let failed = |error: io::Error| {
        Error::failed(format!("cannot ask for a share on the terminal: {error}"))
    };
    let mut terminal = None;
    let mut wrong = 0;
    let mut typed = 1;
    // before the first share the threshold is unknown, but it is at least 2
    while shares.len()
        < shares
            .first()
            .map_or(1, |first| first.share.threshold.into())
    {
        let terminal = match &mut terminal {
            Some(terminal) => terminal,
            none => none.insert(Hidden::open().map_err(failed)?),
        };
        let name = format!("the share typed as number {typed}");
        let fault = match parse(&type_code(terminal, shares).map_err(failed)?) {
            Ok(share) => {
                shares.push(Named { name, share });
                match check(shares) {
                    Ok(()) => {
                        typed += 1;
                        continue;
                    }
                    Err(error) => {
                        shares.pop();
                        error.to_string()
                    }
                }
            }
            Err(what) => format!("{name}: {what}"),
        };
        wrong += 1;
        if wrong == TRIES {
            return Err(Error::Content(fault));
        }
        eprintln!("{fault}. Type it again.");
    }
    Ok(())
}

/// Reads the lines of a code up to an empty line.
fn type_code(terminal: &mut Hidden, shares: &[Named]) -> io::Result<Zeroizing<Vec<u8>>> {
    let which = match shares.first() {
        None => "Share 1".to_owned(),
        Some(first) => format!("Share {} of {}", shares.len() + 1, first.share.threshold),
    };
    eprintln!("{which}: type its code, which is not shown; an empty line ends it.");
    let mut code = Zeroizing::new(Vec::with_capacity(2 * MAX_LINE));
    let mut line = Zeroizing::new(vec![0; MAX_LINE]);
    for number in 1.. {
        let len = terminal.ask(&format!("line {number}: "), &mut line)?;
        let line = &line[..len];
        code.extend(line);
        if line.trim_ascii().is_empty() || code.len() > MAX_LINE {
            break;
        }
    }
    Ok(code)
}
