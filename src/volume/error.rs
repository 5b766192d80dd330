//! Why a volume is not enrolled, or gets no key.

use std::fmt;
use std::io;
use std::path::PathBuf;

use base::child_process;

/// An error of this program.
#[derive(Debug)]
pub enum Error {
    /// A setting of a volume, or its name, is missing or wrong.
    Setting(String),
    /// A file cannot be read or written.
    File(PathBuf, io::Error),
    /// A line of this file is wrong, or missing.
    Line(PathBuf, Box<Error>),
    /// cryptsetup or blkid failed.
    Program(child_process::Error),
    /// The device is not what the command is for; the sentence says what to do.
    Device(String),
    /// This machine cannot attest itself.
    Attestation(String),
    /// A key does not open the volume, or opens another one.
    Key(String),
    /// The connection on standard input is not usable.
    Connection(io::Error),
    /// The other end of that connection is another program.
    Stranger,
    /// The recovery key cannot be shown.
    Output(io::Error),
    /// A thread cannot be started.
    Thread(io::Error),
    /// No key arrived in time; the text says what each host answered.
    Late(String),
    /// A signal has stopped the program.
    Stopped,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Setting(text)
            | Error::Device(text)
            | Error::Attestation(text)
            | Error::Key(text) => f.write_str(text),
            Error::File(path, error) => write!(f, "cannot access {}: {error}", path.display()),
            Error::Line(path, error) => write!(f, "{}: {error}", path.display()),
            Error::Program(error) => error.fmt(f),
            Error::Connection(error) => write!(f, "the connection on standard input: {error}"),
            Error::Stranger => f.write_str(
                "the other end of the connection is not systemd-cryptsetup: its socket does not name a volume",
            ),
            Error::Output(error) => write!(
                f,
                "the recovery key cannot be written to standard output: {error}; nothing was formatted"
            ),
            Error::Thread(error) => write!(f, "cannot start a thread: {error}"),
            Error::Late(answers) => write!(f, "no key arrived in time: {answers}"),
            Error::Stopped => f.write_str("stopped while waiting for the key"),
        }
    }
}

impl std::error::Error for Error {}

impl From<child_process::Error> for Error {
    fn from(error: child_process::Error) -> Error {
        Error::Program(error)
    }
}
