//! A name server (RFC 1035) over UDP and TCP that is broken in a given way for each type of record.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, UdpSocket};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// The types of records.
pub const A: u16 = 1;
pub const AAAA: u16 = 28;

/// What the server does with a query.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Answers with this machine's address.
    Good,
    /// Answers with this response code and without records. 0: the name has no such record.
    Code(u8),
    /// Gives no answer.
    Dropped,
    /// Answers after this number of milliseconds.
    Slow(u64),
    /// Answers over TCP only.
    Truncated,
    /// Answers with another ID.
    WrongId,
    /// Answers with bytes that are no message behind the header.
    Garbage,
}

/// The server, on port 53 of 127.0.0.1.
#[derive(Clone)]
pub struct NameServer(Arc<Mutex<State>>);

struct State {
    modes: [Mode; 2],
    /// How often each name was asked for, by the type.
    asked: BTreeMap<(String, u16), usize>,
}

impl NameServer {
    pub fn start() -> NameServer {
        let server = NameServer(Arc::new(Mutex::new(State {
            modes: [Mode::Good; 2],
            asked: BTreeMap::new(),
        })));
        let udp = UdpSocket::bind("127.0.0.1:53").unwrap();
        let tcp = TcpListener::bind("127.0.0.1:53").unwrap();
        let over_udp = server.clone();
        thread::spawn(move || {
            let mut query = [0; 512];
            while let Ok((length, client)) = udp.recv_from(&mut query) {
                let (server, udp) = (over_udp.clone(), udp.try_clone().unwrap());
                let query = query[..length].to_vec();
                thread::spawn(move || {
                    if let Some(answer) = server.answer(&query, false) {
                        let _ = udp.send_to(&answer, client);
                    }
                });
            }
        });
        let over_tcp = server.clone();
        thread::spawn(move || {
            for mut client in tcp.incoming().flatten() {
                let mut length = [0; 2];
                let _ = client.read_exact(&mut length);
                let mut query = vec![0; u16::from_be_bytes(length).into()];
                let _ = client.read_exact(&mut query);
                if let Some(answer) = over_tcp.answer(&query, true) {
                    let length = (answer.len() as u16).to_be_bytes();
                    let _ = client.write_all(&[&length, &answer[..]].concat());
                }
            }
        });
        server
    }

    /// Sets what the server does with queries of the types A and AAAA, and forgets the queries so far.
    pub fn set(&self, a: Mode, aaaa: Mode) {
        let mut state = self.0.lock().unwrap();
        state.modes = [a, aaaa];
        state.asked.clear();
    }

    /// Returns how often this name was asked for.
    pub fn asked(&self, name: &str, kind: u16) -> usize {
        let state = self.0.lock().unwrap();
        state
            .asked
            .get(&(name.to_owned(), kind))
            .copied()
            .unwrap_or_default()
    }

    fn answer(&self, query: &[u8], is_tcp: bool) -> Option<Vec<u8>> {
        let (name, kind, end) = question(query)?;
        let mode = {
            let mut state = self.0.lock().unwrap();
            *state.asked.entry((name, kind)).or_default() += 1;
            state.modes[usize::from(kind == AAAA)]
        };
        let address: IpAddr = match kind {
            A => [127, 0, 0, 1].into(),
            _ => [0, 0, 0, 0, 0, 0, 0, 1].into(),
        };
        let good = message(query, end, 0, Some(address));
        match mode {
            Mode::Good => Some(good),
            Mode::Code(code) => Some(message(query, end, code, None)),
            Mode::Dropped => None,
            Mode::Slow(time) => {
                thread::sleep(Duration::from_millis(time));
                Some(good)
            }
            Mode::Truncated if is_tcp => Some(good),
            Mode::Truncated => {
                let mut cut = message(query, end, 0, None);
                cut[2] |= 2;
                Some(cut)
            }
            Mode::WrongId => Some([&[!good[0], good[1]], &good[2..]].concat()),
            Mode::Garbage => Some([&good[..12], &[0xff; 30]].concat()),
        }
    }
}

/// Returns the name and the type that a query asks for, and where its question ends.
fn question(query: &[u8]) -> Option<(String, u16, usize)> {
    let mut labels = vec![];
    let mut at = 12;
    loop {
        match *query.get(at)? as usize {
            0 => break,
            length => labels.push(str::from_utf8(query.get(at + 1..at + 1 + length)?).ok()?),
        }
        at += 1 + labels.last()?.len();
    }
    let kind = u16::from_be_bytes(*query.get(at + 1..)?.first_chunk()?);
    Some((labels.join("."), kind, at + 5))
}

fn message(query: &[u8], end: usize, code: u8, address: Option<IpAddr>) -> Vec<u8> {
    let count = u8::from(address.is_some());
    let head = [
        query[0],
        query[1],
        0x81,
        0x80 | code,
        0,
        1,
        0,
        count,
        0,
        0,
        0,
        0,
    ];
    let mut message = [&head[..], &query[12..end]].concat();
    let (kind, address) = match address {
        Some(IpAddr::V4(address)) => (A, address.octets().to_vec()),
        Some(IpAddr::V6(address)) => (AAAA, address.octets().to_vec()),
        None => return message,
    };
    // the name is that of the question
    message.extend([
        0xc0,
        12,
        0,
        kind as u8,
        0,
        1,
        0,
        0,
        0,
        60,
        0,
        address.len() as u8,
    ]);
    message.extend(address);
    message
}
