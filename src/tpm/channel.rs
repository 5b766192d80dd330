//! The connection to a TPM: one command goes out as bytes, one response comes back (TPM 2.0 part 1
//! §18).

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use super::location::Location;
use super::response_code::ResponseCode;

/// The pauses before a command is repeated because the TPM is busy.
pub const PAUSES: [Duration; 6] = [
    Duration::from_millis(50),
    Duration::from_millis(100),
    Duration::from_millis(200),
    Duration::from_millis(400),
    Duration::from_millis(800),
    Duration::from_millis(1500),
];
/// Maximum length of a response in bytes: the limit of the kernel's driver (TPM_BUFSIZE).
const MAX_RESPONSE: usize = 4096;
/// The length of the header of a command or response: tag, size, code (part 1 §18.2).
const HEADER: usize = 10;
/// How long a software TPM may take for a response. The driver of a device has its own limit, two
/// minutes for a command that it does not know, and until then no other program can use the TPM
/// (TPM2_DURATION_DEFAULT in Linux).
const PATIENCE: Duration = Duration::from_secs(20);
/// TPM_CC_FlushContext (part 2 §6.5.2).
const FLUSH_CONTEXT: u32 = 0x165;

/// Tags of commands (part 2 §6.9).
#[derive(Clone, Copy)]
pub enum Tag {
    /// TPM_ST_NO_SESSIONS
    NoSessions = 0x8001,
    /// TPM_ST_SESSIONS
    Sessions = 0x8002,
}

/// Why a command has no result.
#[derive(Debug, Clone)]
pub enum CommandError {
    /// The TPM refused the command.
    Refused(ResponseCode),
    /// The TPM has not answered on this connection: the reason.
    NoAnswer(String),
    /// The TPM answered before, but does not answer any more: the reason.
    Lost(String),
    /// The parameters of the response cannot be read.
    Malformed,
}

impl CommandError {
    /// Returns whether the TPM refused the command with this code.
    pub fn is(&self, code: u32) -> bool {
        matches!(self, CommandError::Refused(got) if got.kind() == code)
    }

    /// Returns whether the TPM may have run the command although its answer is lost. Linux gives up
    /// on a command after a time for its kind, some after 0.75 s (ETIME), and a busy host needs longer.
    pub fn is_lost(&self) -> bool {
        matches!(self, CommandError::NoAnswer(_) | CommandError::Lost(_))
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CommandError::Refused(code) => code.fmt(f),
            CommandError::NoAnswer(why) => {
                write!(f, "it does not answer, or it is not a TPM 2.0: {why}")
            }
            CommandError::Lost(why) => write!(
                f,
                "it does not answer any more: it was removed, or its driver or its host failed: {why}"
            ),
            CommandError::Malformed => f.write_str("its response cannot be read"),
        }
    }
}

/// The result of a command.
pub type Result<T> = std::result::Result<T, CommandError>;

/// Encodes a command: header and parts.
fn command(tag: Tag, code: u32, parts: &[&[u8]]) -> Vec<u8> {
    let len = HEADER + parts.iter().map(|part| part.len()).sum::<usize>();
    let mut command = (tag as u16).to_be_bytes().to_vec();
    command.extend((len as u32).to_be_bytes());
    command.extend(code.to_be_bytes());
    parts.iter().for_each(|part| command.extend(*part));
    command
}

/// Reads the header of a response; returns its response code, and the bytes after the header.
/// Error: a clause.
pub fn parse_response(response: &[u8]) -> std::result::Result<(u32, &[u8]), &'static str> {
    let Some(([_, _, s0, s1, s2, s3, c0, c1, c2, c3], rest)) =
        response.split_first_chunk::<HEADER>()
    else {
        return Err("its response is shorter than a header");
    };
    if u32::from_be_bytes([*s0, *s1, *s2, *s3]) as usize == response.len() {
        Ok((u32::from_be_bytes([*c0, *c1, *c2, *c3]), rest))
    } else {
        Err("its response has another length than it says")
    }
}

/// A connection to a TPM. On drop it removes the keys that it created and did not flush, since a
/// device without a resource manager keeps them.
pub struct TpmChannel {
    stream: Stream,
    /// The handles of the keys and sessions that the TPM has created on this connection.
    pub created: Vec<u32>,
    has_answered: bool,
    /// The connection failed, so a later response could belong to an earlier command: no further
    /// command is sent.
    has_failed: bool,
}

enum Stream {
    Device(File),
    Network(TcpStream),
}

impl TpmChannel {
    /// Connects to the TPM.
    pub fn open(location: &Location) -> io::Result<TpmChannel> {
        let stream = match location {
            Location::Device(path) => Stream::Device(open_when_free(|| {
                File::options().read(true).write(true).open(path)
            })?),
            Location::Swtpm(host, port) => {
                let address = SocketAddr::from((*host, *port));
                let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                stream.set_write_timeout(Some(PATIENCE))?;
                Stream::Network(stream)
            }
            Location::Tdx(_) | Location::Snp(_) => return Err(io::ErrorKind::Unsupported.into()),
        };
        Ok(TpmChannel {
            stream,
            created: vec![],
            has_answered: false,
            has_failed: false,
        })
    }

    /// Runs a command; returns the bytes after the header of its response.
    pub fn run(&mut self, tag: Tag, code: u32, parts: &[&[u8]]) -> Result<Vec<u8>> {
        if self.has_failed {
            return Err(CommandError::Lost("the command before failed".into()));
        }
        let response = self.exchange(&command(tag, code, parts));
        let parsed = match &response {
            Ok(response) => parse_response(response).map_err(str::to_owned),
            Err(error) => Err(text_of(error)),
        };
        match parsed {
            Ok((code, parameters)) => {
                self.has_answered = true;
                match code {
                    0 => Ok(parameters.to_vec()),
                    _ => Err(CommandError::Refused(ResponseCode(code))),
                }
            }
            Err(why) => {
                self.has_failed = true;
                Err(if self.has_answered {
                    CommandError::Lost(why)
                } else {
                    CommandError::NoAnswer(why)
                })
            }
        }
    }

    fn exchange(&mut self, command: &[u8]) -> io::Result<Vec<u8>> {
        let mut response = vec![0; MAX_RESPONSE];
        let len = match &mut self.stream {
            Stream::Device(device) => {
                device.write_all(command)?;
                device.read(&mut response)?
            }
            Stream::Network(stream) => {
                stream.write_all(command)?;
                stream.read_exact(&mut response[..HEADER])?;
                let size = [response[2], response[3], response[4], response[5]];
                let len = (u32::from_be_bytes(size) as usize).clamp(HEADER, MAX_RESPONSE);
                stream.read_exact(&mut response[HEADER..len])?;
                len
            }
        };
        response.truncate(len);
        Ok(response)
    }

    /// Removes a transient key or a session (TPM2_FlushContext).
    pub fn flush(&mut self, handle: u32) -> Result<()> {
        self.created.retain(|created| *created != handle);
        self.run(Tag::NoSessions, FLUSH_CONTEXT, &[&handle.to_be_bytes()])
            .map(drop)
    }
}

impl Drop for TpmChannel {
    fn drop(&mut self) {
        for handle in std::mem::take(&mut self.created) {
            if let Err(why) = self.flush(handle) {
                log::debug!("cannot flush key {handle:#x} of the TPM: {why}");
            }
        }
    }
}

fn text_of(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            format!("it did not answer within {} s", PATIENCE.as_secs())
        }
        _ => error.to_string(),
    }
}

/// Opens a device, and tries again for some seconds while another program has it open.
pub fn open_when_free(open: impl Fn() -> io::Result<File>) -> io::Result<File> {
    for pause in PAUSES {
        match open() {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => thread::sleep(pause),
            result => return result,
        }
    }
    open()
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use std::cell::Cell;

    use super::*;

    #[test]
    fn responses_of_another_length_are_refused_without_a_panic() {
        let good = command(Tag::NoSessions, 0, &[&[0x02, 0, 0, 1], &[7; 64]]);
        let (code, parameters) = parse_response(&good).unwrap();
        assert_eq!((code, parameters.len()), (0, 68));
        for bad in [
            &good[..9],
            &good[..good.len() - 1],
            &[&good[..], &[0]].concat(),
        ] {
            parse_response(bad).unwrap_err();
        }
        for altered in mutations(&good, 2_000) {
            if let Ok((_, parameters)) = parse_response(&altered) {
                assert_eq!(parameters.len(), altered.len() - HEADER);
            }
        }
    }

    #[test]
    fn a_device_that_another_program_has_open_is_tried_again_for_some_seconds() {
        let tried = |busy: usize, then: fn() -> io::Result<File>| {
            let tries = Cell::new(0);
            let result = open_when_free(|| {
                tries.set(tries.get() + 1);
                if tries.get() <= busy {
                    Err(io::ErrorKind::ResourceBusy.into())
                } else {
                    then()
                }
            });
            (result.map(drop).map_err(|error| error.kind()), tries.get())
        };
        assert_eq!(tried(2, || File::open("/dev/null")), (Ok(()), 3));
        let missing = || Err(io::ErrorKind::NotFound.into());
        assert_eq!(tried(0, missing), (Err(io::ErrorKind::NotFound), 1));
        let all = PAUSES.len() + 1;
        assert_eq!(
            tried(usize::MAX, missing),
            (Err(io::ErrorKind::ResourceBusy), all)
        );
    }
}
