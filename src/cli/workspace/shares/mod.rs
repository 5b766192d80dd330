//! The master secret as shares: `scheme` splits and joins it, `code` is a share as text, `ask`
//! reads shares that people type.

mod ask;
mod code;
mod scheme;

use std::path::PathBuf;

use crate::shell::{error, files};
use base::master_secret::MasterSecret;

pub use code::{code, lines, parse};
pub use scheme::{Error, Named, Share, join, split};

impl From<Error> for error::Error {
    fn from(error: Error) -> error::Error {
        error::Error::Content(error.to_string())
    }
}

/// Reads shares from files, and then, if one of the paths is `-`, asks for the others on the
/// terminal. Restores the master secret.
pub fn read(paths: &[PathBuf]) -> Result<MasterSecret, error::Error> {
    let mut shares = vec![];
    let is_terminal = |path: &&PathBuf| path.as_os_str() == "-";
    for path in paths.iter().filter(|path| !is_terminal(path)) {
        let text = files::read_private(path)?;
        let name = path.display().to_string();
        let share = parse(&text).map_err(|what| format!("{name} is not a whole share: {what}"))?;
        shares.push(Named { name, share });
    }
    if paths.iter().any(|path| is_terminal(&path)) {
        ask::for_missing(&mut shares)?;
    }
    Ok(join(&shares)?)
}
