//! Commands as bytes: those that tpm2-tss does not know, and the session that authorizes them.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use base::crypto::{Secret, random};
use ring::{digest, hmac};

use super::{Location, open_when_free};

/// Maximum length of a response in bytes: that of the kernel's driver (TPM_BUFSIZE).
const MAX_RESPONSE: usize = 4096;
/// The length of the header of a command or response: tag, size, code (part 1 §18.2).
const HEADER: usize = 10;
/// How long a software TPM may take for an answer. The driver of a device has a limit of its own, two minutes for a command that it does
/// not know, and until then nobody else reaches the TPM (TPM2_DURATION_DEFAULT in Linux).
const PATIENCE: Duration = Duration::from_secs(20);
/// The length of nonces and authorization values in bytes: that of the session's hash.
pub const NONCE: usize = 64;

/// Tags of commands: TPM_ST_NO_SESSIONS, TPM_ST_SESSIONS (part 2 §6.9).
const NO_SESSIONS: u16 = 0x8001;
const SESSIONS: u16 = 0x8002;
/// TPM_CC_FlushContext, TPM_CC_StartAuthSession (part 2 §6.5.2).
const FLUSH_CONTEXT: u32 = 0x0165;
const START_AUTH_SESSION: u32 = 0x0176;
/// TPM_RH_NULL, TPM_ALG_NULL, TPM_ALG_SHA512, TPM_SE_HMAC.
const RH_NULL: u32 = 0x4000_0007;
const ALG_NULL: u16 = 0x0010;
const ALG_SHA512: u16 = 0x000d;
const SE_HMAC: u8 = 0;
/// The attribute continueSession: the session outlives its command. Whoever started it ends it, also after an error.
const CONTINUE_SESSION: u8 = 1;

/// Why a command has no result.
#[derive(Debug)]
pub enum Failure {
    /// The TPM refused it: its response code.
    Refused(u32),
    /// It failed on its way: a clause.
    Transport(String),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::Transport(match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                format!("it did not answer within {} s", PATIENCE.as_secs())
            }
            _ => error.to_string(),
        })
    }
}

/// A connection to a TPM.
pub enum Channel {
    /// A device node.
    Device(File),
    /// A software TPM.
    Network(TcpStream),
}

impl Channel {
    /// Connects to the TPM. No other connection of this process may be open, unless the kernel's resource manager is there.
    pub fn open(location: &Location) -> io::Result<Channel> {
        match location {
            Location::Device(path) => {
                open_when_free(|| File::options().read(true).write(true).open(path))
                    .map(Channel::Device)
            }
            Location::Swtpm(host, port) => {
                let address = SocketAddr::from((*host, *port));
                let stream = TcpStream::connect_timeout(&address, PATIENCE)?;
                stream.set_read_timeout(Some(PATIENCE))?;
                stream.set_write_timeout(Some(PATIENCE))?;
                Ok(Channel::Network(stream))
            }
            Location::Tdx(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Runs a command; returns what follows the header of its response.
    fn run(&mut self, command: &[u8]) -> Result<Vec<u8>, Failure> {
        let mut response = vec![0; MAX_RESPONSE];
        let len = match self {
            Channel::Device(device) => {
                device.write_all(command)?;
                device.read(&mut response)?
            }
            Channel::Network(stream) => {
                stream.write_all(command)?;
                stream.read_exact(&mut response[..HEADER])?;
                let len = size(&response).clamp(HEADER, MAX_RESPONSE);
                stream.read_exact(&mut response[HEADER..len])?;
                len
            }
        };
        match parse_response(&response[..len]) {
            Ok((0, parameters)) => Ok(parameters.to_vec()),
            Ok((code, _)) => Err(Failure::Refused(code)),
            Err(why) => Err(Failure::Transport(why.into())),
        }
    }
}

/// The size that a header names.
fn size(header: &[u8]) -> usize {
    number(header, 2) as usize
}

/// The number at this offset, big endian; 0 if the bytes end before.
fn number(bytes: &[u8], at: usize) -> u32 {
    let number = bytes.get(at..at + 4).and_then(|four| four.try_into().ok());
    number.map_or(0, u32::from_be_bytes)
}

/// Reads the header of a response; returns its response code, and what follows the header.
pub fn parse_response(response: &[u8]) -> Result<(u32, &[u8]), &'static str> {
    let (header, parameters) = response
        .split_at_checked(HEADER)
        .ok_or("its response is shorter than a header")?;
    match size(header) == response.len() {
        true => Ok((number(header, 6), parameters)),
        false => Err("its response has another length than it says"),
    }
}

/// Encodes a command of these parts.
fn command(tag: u16, code: u32, parts: &[&[u8]]) -> Vec<u8> {
    let len = HEADER + parts.iter().map(|part| part.len()).sum::<usize>();
    let header = [
        &tag.to_be_bytes()[..],
        &(len as u32).to_be_bytes(),
        &code.to_be_bytes(),
    ];
    [header.concat(), parts.concat()].concat()
}

/// Encodes bytes behind their length (TPM2B, part 2 §10.4.1).
fn sized(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_be_bytes(), bytes].concat()
}

/// An HMAC session over SHA-512, not salted and not bound: its key is the authorization value of the object that it uses. It ends on
/// drop.
pub struct Session<'a> {
    channel: &'a mut Channel,
    handle: u32,
    nonce_tpm: Vec<u8>,
    /// The connection has failed: it carries no further command.
    is_cut_off: bool,
}

impl Session<'_> {
    /// Starts a session (part 3 §11.1).
    pub fn start(channel: &mut Channel) -> Result<Session<'_>, Failure> {
        let null = RH_NULL.to_be_bytes();
        let parameters = channel.run(&command(
            NO_SESSIONS,
            START_AUTH_SESSION,
            &[
                &null,
                &null,
                &sized(&random::<NONCE>()),
                &sized(&[]),
                &[SE_HMAC],
                &ALG_NULL.to_be_bytes(),
                &ALG_SHA512.to_be_bytes(),
            ],
        ))?;
        let (handle, nonce) = started(&parameters).map_err(|why| Failure::Transport(why.into()))?;
        Ok(Session {
            channel,
            handle,
            nonce_tpm: nonce.to_vec(),
            is_cut_off: false,
        })
    }

    /// Runs a command with these handles and no parameters. The session proves that the caller knows the authorization value of the
    /// first handle. `names` are the Names of the handles.
    pub fn run(
        &mut self,
        code: u32,
        handles: [u32; 2],
        names: [&[u8]; 2],
        auth: &Secret,
    ) -> Result<(), Failure> {
        let nonce = random::<NONCE>();
        let mut area = [
            &self.handle.to_be_bytes()[..],
            &sized(&nonce),
            &[CONTINUE_SESSION],
        ]
        .concat();
        // part 1 §18.7 and §19.6.5
        let parameters = digest::digest(
            &digest::SHA512,
            &[&code.to_be_bytes()[..], names[0], names[1]].concat(),
        );
        let mut proof = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA512, auth.expose()));
        for part in [
            parameters.as_ref(),
            &nonce,
            &self.nonce_tpm,
            &[CONTINUE_SESSION],
        ] {
            proof.update(part);
        }
        area.extend(sized(proof.sign().as_ref()));
        let handles = handles.map(u32::to_be_bytes);
        let len = (area.len() as u32).to_be_bytes();
        let command = command(SESSIONS, code, &[handles.as_flattened(), &len, &area]);
        let done = self.channel.run(&command).map(drop);
        self.is_cut_off = matches!(done, Err(Failure::Transport(_)));
        done
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        if self.is_cut_off {
            return;
        }
        let flush = command(NO_SESSIONS, FLUSH_CONTEXT, &[&self.handle.to_be_bytes()]);
        if let Err(why) = self.channel.run(&flush) {
            log::debug!("the TPM keeps a session until the device is closed: {why:?}");
        }
    }
}

/// Reads what TPM2_StartAuthSession returns: handle and nonce.
fn started(parameters: &[u8]) -> Result<(u32, &[u8]), &'static str> {
    let nonce = parameters.get(6..).unwrap_or_default();
    let len = parameters.get(4..6).unwrap_or_default();
    match len == (nonce.len() as u16).to_be_bytes() && !nonce.is_empty() {
        true => Ok((number(parameters, 0), nonce)),
        false => Err("its new session has no nonce"),
    }
}

/// The locations to which a command goes in turn until the TPM knows it: the kernel's resource manager refuses those that the TPM does not
/// list (TPM_CAP_COMMANDS), and the device without it does not ask.
pub fn ways(location: &Location) -> Vec<Location> {
    let mut ways = vec![location.clone()];
    if let Location::Device(path) = location {
        ways.extend(without_manager(path).map(Location::Device));
    }
    ways
}

/// Returns the device without a resource manager beside `/dev/tpmrmN`: `/dev/tpmN`.
pub fn without_manager(path: &Path) -> Option<PathBuf> {
    let number = path.file_name()?.to_str()?.strip_prefix("tpmrm")?;
    Some(path.with_file_name(format!("tpm{number}")))
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    #[test]
    fn the_device_without_the_resource_manager_is_asked_second() {
        let ways_of = |text: &str| {
            let ways = ways(&text.parse().unwrap());
            ways.iter().map(Location::to_string).collect::<Vec<_>>()
        };
        assert_eq!(
            ways_of("device:/dev/tpmrm1"),
            ["device:/dev/tpmrm1", "device:/dev/tpm1"]
        );
        for alone in ["device:/dev/tpm0", "swtpm:host=127.0.0.1,port=1"] {
            assert_eq!(ways_of(alone), [alone]);
        }
    }

    #[test]
    fn responses_of_another_length_are_refused_without_a_panic() {
        let good = command(NO_SESSIONS, 0, &[&[0x02, 0, 0, 1], &sized(&[7; NONCE])]);
        let (code, parameters) = parse_response(&good).unwrap();
        assert_eq!(code, 0);
        assert_eq!(started(parameters).unwrap(), (0x0200_0001, &[7; NONCE][..]));
        for bad in [
            &good[..9],
            &good[..good.len() - 1],
            &[&good[..], &[0]].concat(),
        ] {
            parse_response(bad).unwrap_err();
        }
        for bad in [&parameters[..6], &parameters[..20], &[]] {
            started(bad).unwrap_err();
        }
        for altered in mutations(&good, 2_000) {
            if let Ok((_, parameters)) = parse_response(&altered) {
                let _ = started(parameters);
            }
        }
    }
}
