//! An emulation of AWS's NitroTPM: swtpm, and the functions that swtpm lacks. This program is between swtpm and its clients, and
//! answers these commands itself:
//!
//! * commands on NV indices of more than 2048 bytes, which swtpm does not have: there is room for one
//! * HMAC sessions, because commands on these indices carry them. A session can be salted with the endorsement key: the clients see another
//!   one, whose private part the emulation has
//! * the vendor command 0x20000001, whose document the hypervisor of the tests signs, with the SHA-384 PCRs of swtpm
//!
//! Each proof of an authorization is verified as a TPM does it. All other commands go to swtpm unchanged.

pub mod device;
mod session;

use std::collections::BTreeMap;
use std::io::{Read, Write, copy};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use tpm::Location;

use self::session::{Authorization, CONTINUE, DECRYPT, SaltKey, Session, hash};
use crate::aws_nitro_tpm::{BYTES, Hypervisor, MAP, TEXT, bytes, head, text};
use crate::cloud_tpm::CloudTpm;

/// Command codes (part 2 §6.5.2), and that of AWS.
const EVICT_CONTROL: u32 = 0x0120;
const NV_UNDEFINE_SPACE: u32 = 0x0122;
const NV_DEFINE_SPACE: u32 = 0x012a;
const CREATE_PRIMARY: u32 = 0x0131;
const NV_WRITE: u32 = 0x0137;
const NV_READ: u32 = 0x014e;
const FLUSH_CONTEXT: u32 = 0x0165;
const NV_READ_PUBLIC: u32 = 0x0169;
const START_AUTH_SESSION: u32 = 0x0176;
const READ_PUBLIC: u32 = 0x0173;
const GET_CAPABILITY: u32 = 0x017a;
const PCR_READ: u32 = 0x017e;
pub const NSM_REQUEST: u32 = 0x2000_0001;

/// Response codes (part 2 §6.6).
pub const RC_BAD_AUTH: u32 = 0x09a2;
pub const RC_AUTH_FAIL: u32 = 0x098e;
pub const RC_COMMAND_CODE: u32 = 0x0143;
/// The layer of response codes that the kernel's resource manager makes (TSS2_RESMGR_TPM_RC_LAYER).
const RESOURCE_MANAGER: u32 = 0x000b_0000;
const RC_AUTH_TYPE: u32 = 0x0124;
const RC_HANDLE: u32 = 0x018b;
const RC_NV_AUTHORIZATION: u32 = 0x0149;
const RC_NV_DEFINED: u32 = 0x014c;
const RC_NV_RANGE: u32 = 0x0146;
const RC_NV_SPACE: u32 = 0x014b;
const RC_NV_UNINITIALIZED: u32 = 0x014a;
const RC_SESSION_HANDLES: u32 = 0x0905;

const NO_SESSIONS: u16 = 0x8001;
const SESSIONS: u16 = 0x8002;
const RH_OWNER: u32 = 0x4000_0001;
const RH_NULL: u32 = 0x4000_0007;
const RS_PASSWORD: u32 = 0x4000_0009;
const RH_ENDORSEMENT: u32 = 0x4000_000b;
/// Attributes of NV indices (part 2 §13.4).
const AUTH_WRITE: u32 = 1 << 2;
const AUTH_READ: u32 = 1 << 18;
const WRITTEN: u32 = 1 << 29;
/// The maximum size of an index of swtpm, and of the data in one command.
const SIZE_OF_SWTPM: usize = 2048;
const CHUNK: usize = 1024;
/// The first handle of the emulation's sessions; swtpm counts from 0x02000000.
const FIRST_SESSION: u32 = 0x02ff_0000;
/// The number of loaded sessions for which a TPM has room.
const MAX_SESSIONS: usize = 3;

/// The fault of the emulated TPM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// The TPM is older than the vendor command.
    UnknownCommand,
    /// The kernel's resource manager does not know the vendor command, because the TPM does not list it.
    UnlistedCommand,
    /// The TPM has no index of this size.
    SmallIndices,
    /// The hypervisor refuses the request.
    Refusal,
    /// The hypervisor does not answer.
    NoAnswer,
    /// The answer is not CBOR.
    Garbage,
    /// The answer says that it is longer than the index.
    Oversize,
    /// The vendor command never ends.
    Hang,
    /// The TPM is busy twice.
    Busy(u32),
}

/// An NV index.
struct Index {
    algorithm: u16,
    attributes: u32,
    auth: Vec<u8>,
    data: Vec<u8>,
}

impl Index {
    /// TPMS_NV_PUBLIC
    fn public(&self, handle: u32) -> Vec<u8> {
        [
            &handle.to_be_bytes()[..],
            &self.algorithm.to_be_bytes(),
            &self.attributes.to_be_bytes(),
            &[0, 0], // no policy
            &(self.data.len() as u16).to_be_bytes(),
        ]
        .concat()
    }

    fn name(&self, handle: u32) -> Vec<u8> {
        let public = hash(self.algorithm, &self.public(handle));
        [&self.algorithm.to_be_bytes(), &public[..]].concat()
    }
}

pub struct Engine {
    swtpm: SocketAddr,
    hypervisor: Hypervisor,
    pub fault: Fault,
    indices: BTreeMap<u32, Index>,
    sessions: BTreeMap<u32, Session>,
    started: u32,
    salt_key: Option<SaltKey>,
    /// The endorsement key and its Name that clients see in place of swtpm's.
    replaced: Vec<(Vec<u8>, Vec<u8>)>,
    /// The codes of all commands.
    pub seen: Vec<u32>,
}

/// A running emulation. Its threads end with the process.
pub struct NitroTpm {
    pub engine: Arc<Mutex<Engine>>,
    port: u16,
    /// The port of the kernel's resource manager.
    manager: u16,
    _cloud: CloudTpm,
}

impl NitroTpm {
    pub fn start(hypervisor: Hypervisor) -> NitroTpm {
        let cloud = CloudTpm::start();
        let Location::Swtpm(host, port) = cloud.location() else {
            unreachable!()
        };
        let engine = Arc::new(Mutex::new(Engine {
            swtpm: SocketAddr::from((host, port)),
            hypervisor,
            fault: Fault::None,
            indices: BTreeMap::new(),
            sessions: BTreeMap::new(),
            started: 0,
            salt_key: None,
            replaced: vec![],
            seen: vec![],
        }));
        let (data, control) = listeners();
        let manager = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let nitro = NitroTpm {
            engine: engine.clone(),
            port: data.local_addr().unwrap().port(),
            manager: manager.local_addr().unwrap().port(),
            _cloud: cloud,
        };
        for (listener, is_manager) in [(data, false), (manager, true)] {
            let engine = engine.clone();
            thread::spawn(move || {
                for client in listener.incoming().flatten() {
                    serve(client, &engine, is_manager);
                }
            });
        }
        let control_of_swtpm = SocketAddr::from((host, port + 1));
        thread::spawn(move || {
            for client in control.incoming().flatten() {
                let swtpm = TcpStream::connect(control_of_swtpm).unwrap();
                let pairs = [
                    (client.try_clone().unwrap(), swtpm.try_clone().unwrap()),
                    (swtpm, client),
                ];
                for (mut from, mut to) in pairs {
                    thread::spawn(move || {
                        let _ = copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        nitro
    }

    pub fn location(&self) -> Location {
        self.notation().parse().unwrap()
    }

    /// Returns the location as tpm2-tools writes it.
    pub fn notation(&self) -> String {
        format!("swtpm:host=127.0.0.1,port={}", self.port)
    }

    pub fn set(&self, fault: Fault) {
        self.engine.lock().unwrap().fault = fault;
    }

    /// Returns the numbers of indices and sessions.
    pub fn left(&self) -> (usize, usize) {
        let engine = self.engine.lock().unwrap();
        (engine.indices.len(), engine.sessions.len())
    }

    /// Returns how often a command was seen.
    pub fn count(&self, code: u32) -> usize {
        let engine = self.engine.lock().unwrap();
        engine.seen.iter().filter(|seen| **seen == code).count()
    }
}

/// Returns listeners on two consecutive ports.
fn listeners() -> (TcpListener, TcpListener) {
    let bind = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    loop {
        let data = bind(0).unwrap();
        let port = data.local_addr().unwrap().port();
        if let Some(Ok(control)) = port.checked_add(1).map(bind) {
            return (data, control);
        }
    }
}

/// Answers one client after the other, as swtpm does.
fn serve(mut client: TcpStream, engine: &Mutex<Engine>, is_manager: bool) {
    while let Ok(command) = read_message(&mut client) {
        let mut engine = engine.lock().unwrap();
        let is_unlisted = is_manager && engine.fault == Fault::UnlistedCommand;
        let answer = if is_unlisted && number(&command[6..]) == NSM_REQUEST {
            Some(error(RC_COMMAND_CODE | RESOURCE_MANAGER))
        } else {
            engine.run(&command)
        };
        drop(engine);
        match answer {
            Some(answer) if client.write_all(&answer).is_ok() => {}
            // until the client gives up
            None => drop(client.read(&mut [0])),
            _ => return,
        }
    }
}

/// Reads a command or a response.
fn read_message(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut message = vec![0; 10];
    stream.read_exact(&mut message)?;
    message.resize(number(&message[2..]) as usize, 0);
    stream.read_exact(&mut message[10..])?;
    Ok(message)
}

fn number(bytes: &[u8]) -> u32 {
    u32::from_be_bytes(bytes[..4].try_into().unwrap())
}

fn short(bytes: &[u8]) -> u16 {
    u16::from_be_bytes([bytes[0], bytes[1]])
}

/// Splits off bytes that follow their length (TPM2B).
fn sized(bytes: &[u8]) -> (&[u8], &[u8]) {
    bytes[2..].split_at(usize::from(short(bytes)))
}

pub fn with_size(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_be_bytes(), bytes].concat()
}

/// Encodes a command or a response: tag, code, and what follows.
pub fn message(tag: u16, code: u32, rest: &[u8]) -> Vec<u8> {
    let len = 10 + rest.len() as u32;
    [
        &tag.to_be_bytes()[..],
        &len.to_be_bytes(),
        &code.to_be_bytes(),
        rest,
    ]
    .concat()
}

fn error(code: u32) -> Vec<u8> {
    message(NO_SESSIONS, code, &[])
}

/// Removes trailing zeros, as a TPM does with authorization values.
fn trimmed(auth: &[u8]) -> &[u8] {
    let zeros = auth.iter().rev().take_while(|byte| **byte == 0).count();
    &auth[..auth.len() - zeros]
}

/// A command of a kind that the emulation understands.
struct Command {
    code: u32,
    handles: Vec<u32>,
    authorizations: Vec<Authorization>,
    parameters: Vec<u8>,
}

impl Command {
    fn parse(bytes: &[u8]) -> Option<Command> {
        let (tag, code) = (short(bytes), number(&bytes[6..]));
        let handles = match code {
            EVICT_CONTROL | NV_UNDEFINE_SPACE | NV_WRITE | NV_READ | NSM_REQUEST => 2,
            CREATE_PRIMARY | NV_DEFINE_SPACE | NV_READ_PUBLIC | READ_PUBLIC => 1,
            GET_CAPABILITY => 0,
            _ => return None,
        };
        let (numbers, mut rest) = bytes[10..].split_at(4 * handles);
        let mut authorizations = vec![];
        if tag == SESSIONS {
            let (mut area, parameters) = rest[4..].split_at(number(rest) as usize);
            while !area.is_empty() {
                let handle = number(area);
                let (nonce, after) = sized(&area[4..]);
                let (proof, after_proof) = sized(&after[1..]);
                authorizations.push(Authorization {
                    handle,
                    nonce: nonce.to_vec(),
                    attributes: after[0],
                    proof: proof.to_vec(),
                });
                area = after_proof;
            }
            rest = parameters;
        }
        Some(Command {
            code,
            handles: numbers.chunks(4).map(number).collect(),
            authorizations,
            parameters: rest.to_vec(),
        })
    }
}

impl Engine {
    /// Runs a command; `None` if it never ends.
    pub fn run(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        let code = number(&bytes[6..]);
        self.seen.push(code);
        match code {
            START_AUTH_SESSION => return Some(self.start_session(bytes)),
            FLUSH_CONTEXT if self.sessions.remove(&number(&bytes[10..])).is_some() => {
                return Some(message(NO_SESSIONS, 0, &[]));
            }
            NSM_REQUEST => match &mut self.fault {
                Fault::UnknownCommand => return Some(error(RC_COMMAND_CODE)),
                Fault::Hang => return None,
                Fault::Busy(count @ 1..) => {
                    *count -= 1;
                    return Some(error(0x0922)); // TPM_RC_RETRY
                }
                _ => {}
            },
            _ => {}
        }
        let Some(command) = Command::parse(bytes) else {
            return Some(self.of_swtpm(bytes));
        };
        Some(if self.is_ours(&command) {
            self.answer(command).unwrap_or_else(error)
        } else if code == CREATE_PRIMARY {
            self.create_primary(bytes)
        } else {
            self.of_swtpm(bytes)
        })
    }

    /// Has swtpm run a command that a session of the emulation has authorized: the owner has no password. Returns handle and parameters.
    fn of_swtpm_as_owner(&mut self, command: &Command) -> Result<(Vec<u8>, Vec<u8>), u32> {
        let password = [0x40, 0, 0, 9, 0, 0, CONTINUE, 0, 0];
        let handles: Vec<_> = command
            .handles
            .iter()
            .flat_map(|it| it.to_be_bytes())
            .collect();
        let rest = [&handles[..], &[0, 0, 0, 9], &password, &command.parameters].concat();
        let bytes = message(SESSIONS, command.code, &rest);
        let answer = match command.code {
            CREATE_PRIMARY => self.create_primary(&bytes),
            _ => self.of_swtpm(&bytes),
        };
        match number(&answer[6..]) {
            0 => {
                let handles = if command.code == CREATE_PRIMARY { 4 } else { 0 };
                let (handle, rest) = answer[10..].split_at(handles);
                let parameters = &rest[4..4 + number(rest) as usize];
                Ok((handle.to_vec(), parameters.to_vec()))
            }
            code => Err(code),
        }
    }

    /// Sends a command to swtpm; returns its answer as clients may see it.
    fn of_swtpm(&self, command: &[u8]) -> Vec<u8> {
        let mut swtpm = TcpStream::connect(self.swtpm).unwrap();
        swtpm.write_all(command).unwrap();
        self.as_clients_see(read_message(&mut swtpm).unwrap())
    }

    fn as_clients_see(&self, mut answer: Vec<u8>) -> Vec<u8> {
        for (old, new) in &self.replaced {
            if let Some(at) = answer.windows(old.len()).position(|part| part == old) {
                answer[at..at + new.len()].copy_from_slice(new);
            }
        }
        answer
    }

    fn is_ours(&self, command: &Command) -> bool {
        let sessions = command.authorizations.iter();
        let mut sessions = sessions.map(|authorization| authorization.handle);
        sessions.any(|handle| (FIRST_SESSION..RH_OWNER).contains(&handle))
            || match command.code {
                NV_DEFINE_SPACE => definition(&command.parameters).4 > SIZE_OF_SWTPM,
                NSM_REQUEST | GET_CAPABILITY => true,
                _ => command
                    .handles
                    .iter()
                    .any(|handle| self.indices.contains_key(handle)),
            }
    }

    fn start_session(&mut self, bytes: &[u8]) -> Vec<u8> {
        let (key, bind) = (number(&bytes[10..]), number(&bytes[14..]));
        let (nonce_caller, rest) = sized(&bytes[18..]);
        let (salt, rest) = sized(rest);
        let (kind, symmetric) = (rest[0], short(&rest[1..]));
        if kind != 0 || bind != RH_NULL {
            return self.of_swtpm(bytes);
        }
        let hash = short(&bytes[bytes.len() - 2..]);
        let salt = match key {
            RH_NULL => None,
            _ => Some(self.salt_key.as_ref().unwrap().decrypt(salt)),
        };
        if self.sessions.len() >= MAX_SESSIONS {
            return error(RC_SESSION_HANDLES);
        }
        let encrypts = symmetric != 0x10; // TPM_ALG_NULL
        let session = Session::start(hash, salt.as_deref(), nonce_caller, encrypts);
        let handle = FIRST_SESSION + self.started;
        self.started += 1;
        let nonce = with_size(&session.nonce_tpm);
        self.sessions.insert(handle, session);
        message(
            NO_SESSIONS,
            0,
            &[&handle.to_be_bytes(), &nonce[..]].concat(),
        )
    }

    /// Makes a primary key in swtpm; in the place of an endorsement key the client sees another one.
    fn create_primary(&mut self, bytes: &[u8]) -> Vec<u8> {
        let answer = self.of_swtpm(bytes);
        let is_endorsement = number(&bytes[10..]) == RH_ENDORSEMENT;
        if is_endorsement && number(&answer[6..]) == 0 && self.salt_key.is_none() {
            let (public, _) = sized(&answer[18..]);
            let key = SaltKey::generate();
            let ours = [&public[..public.len() - 256], &key.modulus].concat();
            let name = |public: &[u8]| [&[0, 0x0b], &hash(0x0b, public)[..]].concat();
            self.replaced = vec![
                (public[public.len() - 256..].to_vec(), key.modulus.clone()),
                (name(public), name(&ours)),
            ];
            self.salt_key = Some(key);
            return self.as_clients_see(answer);
        }
        answer
    }

    fn name(&self, handle: u32) -> Vec<u8> {
        match (self.indices.get(&handle), handle >> 24) {
            (Some(index), _) => index.name(handle),
            // transient and persistent objects
            (_, 0x80 | 0x81) => {
                let handle = handle.to_be_bytes();
                let answer = self.of_swtpm(&message(NO_SESSIONS, READ_PUBLIC, &handle));
                let (_public, name) = sized(&answer[10..]);
                sized(name).0.to_vec()
            }
            _ => handle.to_be_bytes().to_vec(),
        }
    }

    /// Verifies a command's authorizations, runs the command, and answers.
    fn answer(&mut self, mut command: Command) -> Result<Vec<u8>, u32> {
        // the authorization value of the first handle, if the command needs it
        let auth = match command.code {
            GET_CAPABILITY | NV_READ_PUBLIC | READ_PUBLIC => None,
            EVICT_CONTROL | NV_DEFINE_SPACE | NV_UNDEFINE_SPACE
                if command.handles[0] == RH_OWNER =>
            {
                Some(vec![])
            }
            CREATE_PRIMARY => Some(vec![]),
            NV_WRITE | NV_READ | NSM_REQUEST => {
                if command.handles[0] != command.handles[1] {
                    return Err(RC_NV_AUTHORIZATION);
                }
                let index = self.indices.get(&command.handles[0]);
                Some(trimmed(&index.ok_or(RC_HANDLE)?.auth).to_vec())
            }
            _ => return Err(RC_HANDLE),
        };
        if auth.is_some() && command.authorizations.is_empty() {
            return Err(RC_AUTH_TYPE);
        }
        let names: Vec<_> = command
            .handles
            .iter()
            .map(|handle| self.name(*handle))
            .collect();
        let encoded = command.parameters.clone();
        for (number, given) in command.authorizations.iter().enumerate() {
            let auth = if number == 0 { auth.as_deref() } else { None };
            if given.handle == RS_PASSWORD {
                // AWS's program never sends it a password
                if command.code == NSM_REQUEST {
                    return Err(RC_AUTH_TYPE);
                }
                if auth != Some(trimmed(&given.proof)) {
                    return Err(RC_BAD_AUTH);
                }
                continue;
            }
            let auth = auth.unwrap_or_default();
            let session = self.sessions.get(&given.handle).ok_or(RC_HANDLE)?;
            if !session.is_proved(given, auth, command.code, &names, &encoded) {
                return Err(RC_AUTH_FAIL);
            }
            if given.attributes & DECRYPT != 0 {
                session.decrypt(&mut command.parameters, auth, given);
            }
        }
        let (handle, mut parameters) = match command.code {
            CREATE_PRIMARY | EVICT_CONTROL => self.of_swtpm_as_owner(&command)?,
            _ => (vec![], self.execute(&command)?),
        };
        if command.authorizations.is_empty() {
            return Ok(message(NO_SESSIONS, 0, &parameters));
        }
        let auth = auth.unwrap_or_default();
        let auth_of = |number: usize| if number == 0 { &auth[..] } else { &[] };
        for (number, given) in command.authorizations.iter().enumerate() {
            if let Some(session) = self.sessions.get_mut(&given.handle) {
                session.answer(given, auth_of(number), &mut parameters);
            }
        }
        let mut area = vec![];
        for (number, given) in command.authorizations.iter().enumerate() {
            area.extend(match self.sessions.get(&given.handle) {
                Some(session) => {
                    session.proof_of_answer(given, auth_of(number), command.code, &parameters)
                }
                None => vec![0, 0, CONTINUE, 0, 0],
            });
            if given.attributes & CONTINUE == 0 {
                self.sessions.remove(&given.handle);
            }
        }
        let len = (parameters.len() as u32).to_be_bytes();
        Ok(message(
            SESSIONS,
            0,
            &[&handle, &len[..], &parameters, &area].concat(),
        ))
    }

    /// Runs a command that is authorized; returns the parameters of the answer.
    fn execute(&mut self, command: &Command) -> Result<Vec<u8>, u32> {
        let handle = *command.handles.last().unwrap_or(&0);
        let parameters = &command.parameters;
        match command.code {
            GET_CAPABILITY => Ok(self.capability(parameters)),
            READ_PUBLIC => {
                let answer =
                    self.of_swtpm(&message(NO_SESSIONS, READ_PUBLIC, &handle.to_be_bytes()));
                match number(&answer[6..]) {
                    0 => Ok(answer[10..].to_vec()),
                    code => Err(code),
                }
            }
            NV_DEFINE_SPACE => self.define(parameters).map(|()| vec![]),
            NV_UNDEFINE_SPACE => self
                .indices
                .remove(&handle)
                .map(|_| vec![])
                .ok_or(RC_HANDLE),
            NV_READ_PUBLIC => {
                let index = self.indices.get(&handle).ok_or(RC_HANDLE)?;
                let (public, name) = (index.public(handle), index.name(handle));
                Ok([with_size(&public), with_size(&name)].concat())
            }
            NV_WRITE => {
                let (data, rest) = sized(parameters);
                let index = self.indices.get_mut(&handle).ok_or(RC_HANDLE)?;
                index.may(AUTH_WRITE)?;
                let range = range(index, short(rest), data.len())?;
                index.data[range].copy_from_slice(data);
                index.attributes |= WRITTEN;
                Ok(vec![])
            }
            NV_READ => {
                let (len, offset) = (short(parameters), short(&parameters[2..]));
                let index = &self.indices[&handle];
                index.may(AUTH_READ | WRITTEN)?;
                let range = range(index, offset, len.into())?;
                Ok(with_size(&index.data[range]))
            }
            NSM_REQUEST => {
                let index = &self.indices[&handle];
                index.may(AUTH_READ | AUTH_WRITE | WRITTEN)?;
                let answer = self.nsm(&index.data);
                let index = self.indices.get_mut(&handle).unwrap();
                index.data[..answer.len()].copy_from_slice(&answer);
                Ok(vec![])
            }
            code => panic!("command {code:#x}"),
        }
    }

    fn define(&mut self, parameters: &[u8]) -> Result<(), u32> {
        let (auth, handle, algorithm, attributes, size) = definition(parameters);
        if self.fault == Fault::SmallIndices {
            return Err(0x02d5); // TPM_RC_SIZE, parameter 2
        }
        if self.indices.contains_key(&handle) {
            return Err(RC_NV_DEFINED);
        }
        if !self.indices.is_empty() {
            return Err(RC_NV_SPACE);
        }
        let index = Index {
            algorithm,
            attributes,
            auth: auth.into(),
            data: vec![0xff; size],
        };
        self.indices.insert(handle, index);
        Ok(())
    }

    /// swtpm's answer, with the emulation's indices among the handles.
    fn capability(&self, parameters: &[u8]) -> Vec<u8> {
        let answer = self.of_swtpm(&message(NO_SESSIONS, GET_CAPABILITY, parameters));
        let mut answer = answer[10..].to_vec();
        let (kind, first, count) = (
            number(parameters),
            number(&parameters[4..]),
            number(&parameters[8..]),
        );
        if kind == 1 && first >> 24 == 1 {
            let mut handles: Vec<u32> = answer[9..].chunks(4).map(number).collect();
            handles.extend(self.indices.range(first..).map(|(handle, _)| *handle));
            handles.sort_unstable();
            handles.truncate(count as usize);
            answer.truncate(5);
            answer.extend((handles.len() as u32).to_be_bytes());
            answer.extend(handles.into_iter().flat_map(u32::to_be_bytes));
        }
        answer
    }

    /// The hypervisor's answer to a request.
    fn nsm(&self, request: &[u8]) -> Vec<u8> {
        let answer = |name, value: Vec<u8>| [head(MAP, 1), text(name), value].concat();
        let document = |value| answer("Attestation", answer("document", value));
        match self.fault {
            Fault::NoAnswer => return vec![],
            Fault::Garbage => return vec![0xff; 100],
            Fault::Oversize => return document(vec![0x59, 0x23, 0x28, 1, 2, 3]), // 9000 bytes
            Fault::Refusal => return answer("Error", text("InvalidOperation")),
            _ => {}
        }
        let Some([user_data, nonce, public_key]) = given(request) else {
            return answer("Error", text("InvalidArgument"));
        };
        let mut draft = self.hypervisor.draft(&[], &[]);
        for (name, value) in [
            ("user_data", user_data),
            ("nonce", nonce),
            ("public_key", public_key),
        ] {
            draft.set(name, value.map_or(vec![0xf6], bytes));
        }
        let pcrs = self.pcrs();
        let values = pcrs.iter().enumerate();
        let values: Vec<_> = values
            .map(|(index, value)| [head(0, index), bytes(value)].concat())
            .collect();
        draft.set(
            "nitrotpm_pcrs",
            [head(MAP, values.len()), values.concat()].concat(),
        );
        document(bytes(&self.hypervisor.sign(draft)))
    }

    /// PCRs 0 to 15 of the SHA-384 bank.
    fn pcrs(&self) -> Vec<Vec<u8>> {
        let mut values = vec![];
        for selected in [[0xff, 0, 0], [0, 0xff, 0]] {
            let selection = [&[0, 0, 0, 1, 0, 0x0c, 3], &selected[..]].concat();
            let answer = self.of_swtpm(&message(NO_SESSIONS, PCR_READ, &selection));
            let mut digests = &answer[28..];
            while !digests.is_empty() {
                let (value, rest) = sized(digests);
                values.push(value.to_vec());
                digests = rest;
            }
        }
        assert_eq!(values.len(), 16);
        values
    }
}

impl Index {
    fn may(&self, attributes: u32) -> Result<(), u32> {
        match self.attributes & attributes {
            has if has == attributes => Ok(()),
            has if has | WRITTEN == attributes => Err(RC_NV_UNINITIALIZED),
            _ => Err(RC_NV_AUTHORIZATION),
        }
    }
}

fn range(index: &Index, offset: u16, len: usize) -> Result<std::ops::Range<usize>, u32> {
    let range = usize::from(offset)..usize::from(offset) + len;
    if range.end <= index.data.len() && len <= CHUNK {
        Ok(range)
    } else {
        Err(RC_NV_RANGE)
    }
}

/// The parameters of TPM2_NV_DefineSpace: authorization value, handle, nameAlg, attributes, size.
fn definition(parameters: &[u8]) -> (&[u8], u32, u16, u32, usize) {
    let (auth, rest) = sized(parameters);
    let (public, _) = sized(rest);
    (
        auth,
        number(public),
        short(&public[4..]),
        number(&public[6..]),
        short(&public[public.len() - 2..]).into(),
    )
}

/// Reads user data, nonce and key of a request.
fn given(mut request: &[u8]) -> Option<[Option<&[u8]>; 3]> {
    (item(&mut request)? == (MAP, 1, &[])).then_some(())?;
    (item(&mut request)? == (TEXT, 11, b"Attestation")).then_some(())?;
    (item(&mut request)? == (MAP, 3, &[])).then_some(())?;
    let mut given = [None; 3];
    for (place, name) in given.iter_mut().zip(["user_data", "nonce", "public_key"]) {
        (item(&mut request)? == (TEXT, name.len(), name.as_bytes())).then_some(())?;
        match item(&mut request)? {
            (BYTES, 0..=1024, content) => *place = Some(content),
            (7, 22, _) => {} // null
            _ => return None,
        }
    }
    Some(given)
}

/// Reads the head of an item of CBOR, and the content of a string: type, count, content.
fn item<'a>(bytes: &mut &'a [u8]) -> Option<(u8, usize, &'a [u8])> {
    let (first, rest) = bytes.split_first()?;
    let (count, rest) = match first & 31 {
        count @ 0..24 => (count.into(), rest),
        24 => (usize::from(*rest.first()?), &rest[1..]),
        25 => (usize::from(short(rest.get(..2)?)), &rest[2..]),
        _ => return None,
    };
    let len = if matches!(first >> 5, BYTES | TEXT) {
        count
    } else {
        0
    };
    let (content, rest) = rest.split_at_checked(len)?;
    *bytes = rest;
    Some((first >> 5, count, content))
}
