//! Hides the server name in a ClientHello (RFC 8446 §4.1.2) from a TLS stack that accepts only host
//! names.
//!
//! Old clients send base64 with `+`, `/` and `=` as server name, which rustls 0.23 refuses. The
//! filter changes the type of the `server_name` extension to one that IANA reserves for private
//! use. rustls ignores it like any unknown extension, and the transcript hashes (`provider.rs`)
//! change it back. This preserves the length, needs no state, and is exactly reversible. A
//! ClientHello that already has the private type is refused: otherwise an attacker on the path
//! could change the type, and the transcript would still match.
//!
//! [`HelloFilter`] changes the bytes of a connection. It has no I/O: it takes bytes from the client
//! and returns bytes for rustls.
//!
//! ```text
//!            ClientHello            ClientHello again: HelloRetryRequest
//! [First] --------------> [Between] ------------------------------------> [Second] ---+
//!                           |    ^ |                             (same name and ALPN) |
//!                           |    +-+ change_cipher_spec                               v
//!                           +---------------- anything else -----------------------> [Open]: bytes pass as they are
//! ```

use std::ops::Range;

use transport::strangers;

/// Maximum size of a ClientHello in bytes: the limit of rustls for a handshake message. Real ones
/// have 200 to 2000 bytes.
pub const MAX_HELLO: usize = 64 * 1024;

/// IANA "TLS ExtensionType Values": server_name (RFC 6066).
const SERVER_NAME: [u8; 2] = [0x00, 0x00];
/// application_layer_protocol_negotiation (RFC 7301).
const ALPN: [u8; 2] = [0x00, 0x10];
/// A type in the private-use range 0xff00-0xffff of the same registry, except 0xff01
/// (renegotiation_info) and 0xffa5 (a QUIC draft).
const HIDDEN_NAME: [u8; 2] = [0xff, 0x53];

/// RFC 8446 §4: HandshakeType client_hello.
const CLIENT_HELLO: u8 = 1;
/// Length in bytes of a handshake header: type and 24-bit length.
const MESSAGE_HEADER: usize = 4;
/// RFC 8446 §5.1: ContentType.
const CHANGE_CIPHER_SPEC: u8 = 20;
const HANDSHAKE: u8 = 22;
/// Length in bytes of a record header: type, version, 16-bit length.
const RECORD_HEADER: usize = 5;
/// Maximum length in bytes of the fragment of a plaintext record (RFC 8446 §5.1).
const MAX_FRAGMENT: usize = 1 << 14;

/// Why the first bytes of a client were refused; the text is a clause.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HelloError {
    /// The bytes do not begin with a TLS handshake record.
    NotTls(String),
    /// The bytes begin with TLS, but the ClientHello is malformed or violates this protocol.
    Malformed(&'static str),
}

/// Changes the type of `server_name` in a complete ClientHello (with its four-byte header). Returns
/// the name; `None` if there is none.
pub fn hide_server_name(hello: &mut [u8]) -> Result<Option<Vec<u8>>, HelloError> {
    let found = find(hello).ok_or(HelloError::Malformed("its ClientHello is malformed"))?;
    if found.hidden.is_some() {
        return Err(HelloError::Malformed(
            "its ClientHello has an extension of type 0xff53, which is used internally",
        ));
    }
    let Some((at, body)) = found.server_name else {
        return Ok(None);
    };
    let name = host_name(&hello[body]).ok_or(HelloError::Malformed(
        "the server name in its ClientHello is malformed",
    ))?;
    let name = name.to_vec();
    hello[at..at + 2].copy_from_slice(&HIDDEN_NAME);
    Ok(Some(name))
}

/// Reverts [`hide_server_name`] in every ClientHello of a sequence of complete handshake messages;
/// `None` if nothing is to be changed.
pub fn reveal_server_name(messages: &[u8]) -> Option<Vec<u8>> {
    let mut revealed = None;
    let mut at = 0;
    while let Some(len) = message_len(&messages[at..]) {
        let Some(message) = messages[at..].get(..len) else {
            break;
        };
        if message[0] == CLIENT_HELLO
            && let Some(Extensions {
                hidden: Some(offset),
                ..
            }) = find(message)
        {
            let copy = revealed.get_or_insert_with(|| messages.to_vec());
            copy[at + offset..at + offset + 2].copy_from_slice(&SERVER_NAME);
        }
        at += len;
    }
    revealed
}

/// The positions of the extensions in a ClientHello that matter here.
#[derive(Default)]
struct Extensions {
    /// The positions of the type and the body.
    server_name: Option<(usize, Range<usize>)>,
    /// The position of the type.
    hidden: Option<usize>,
    /// The position of the body.
    alpn: Option<Range<usize>>,
}

/// Parses a complete ClientHello strictly; `None` if it is malformed or contains one of these
/// extensions twice.
fn find(hello: &[u8]) -> Option<Extensions> {
    if *hello.first()? != CLIENT_HELLO || message_len(hello)? != hello.len() {
        return None;
    }
    let mut found = Extensions::default();
    let mut cursor = Cursor {
        bytes: hello,
        at: MESSAGE_HEADER,
    };
    cursor.skip(2 + 32)?; // legacy_version, random
    cursor.vector8()?; // legacy_session_id
    cursor.vector16()?; // cipher_suites
    cursor.vector8()?; // legacy_compression_methods
    if cursor.at == hello.len() {
        return Some(found); // TLS 1.2 allows a ClientHello without extensions
    }
    let extensions = cursor.vector16()?;
    if cursor.at != hello.len() {
        return None;
    }
    cursor = Cursor {
        bytes: &hello[..extensions.end],
        at: extensions.start,
    };
    while cursor.at < extensions.end {
        let at = cursor.at;
        let kind = cursor.skip(2)?;
        let body = cursor.vector16()?;
        match [hello[kind.start], hello[kind.start + 1]] {
            SERVER_NAME if found.server_name.is_none() => found.server_name = Some((at, body)),
            HIDDEN_NAME if found.hidden.is_none() => found.hidden = Some(at),
            ALPN if found.alpn.is_none() => found.alpn = Some(body),
            SERVER_NAME | HIDDEN_NAME | ALPN => return None,
            _ => {}
        }
    }
    Some(found)
}

/// Returns the name of a ServerNameList (RFC 6066 §3) that has exactly one entry of type host_name
/// (0).
fn host_name(body: &[u8]) -> Option<&[u8]> {
    let mut cursor = Cursor { bytes: body, at: 0 };
    let list = cursor.vector16()?;
    if list.end != body.len() {
        return None;
    }
    cursor.at = list.start;
    let kind = cursor.skip(1)?;
    let name = cursor.vector16()?;
    (body[kind.start] == 0 && name.end == body.len()).then_some(&body[name])
}

/// Returns the length of the handshake message at the start of `bytes`, including its header.
fn message_len(bytes: &[u8]) -> Option<usize> {
    match bytes {
        [_, a, b, c, ..] => {
            Some(MESSAGE_HEADER + (usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c)))
        }
        _ => None,
    }
}

/// Reads the length-prefixed vectors of TLS. Every returned range lies within `bytes`.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn skip(&mut self, len: usize) -> Option<Range<usize>> {
        let range = self.at..self.at.checked_add(len)?;
        self.bytes.get(range.clone())?;
        self.at = range.end;
        Some(range)
    }

    fn vector8(&mut self) -> Option<Range<usize>> {
        let len = self.skip(1)?;
        self.skip(usize::from(self.bytes[len.start]))
    }

    fn vector16(&mut self) -> Option<Range<usize>> {
        let len = self.skip(2)?;
        self.skip(usize::from(u16::from_be_bytes([
            self.bytes[len.start],
            self.bytes[len.start + 1],
        ])))
    }
}

/// Hides the server name in the bytes of a client.
pub struct HelloFilter {
    stage: Stage,
    /// Received bytes that are not processed yet: less than one record.
    pending: Vec<u8>,
    /// The received part of the ClientHello, without record headers.
    hello: Vec<u8>,
    server_name: Option<Vec<u8>>,
    /// The protocols that the first ClientHello offers, as they were sent.
    alpn: Option<Vec<u8>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    First,
    Between,
    Second,
    Open,
}

impl HelloFilter {
    /// Returns the filter for a new connection.
    #[allow(clippy::new_without_default)] // it is a state, not a value
    pub fn new() -> Self {
        HelloFilter {
            stage: Stage::First,
            pending: Vec::new(),
            hello: Vec::new(),
            server_name: None,
            alpn: None,
        }
    }

    /// Takes bytes of the client and appends the bytes for rustls to `output`. After an error the
    /// connection must be closed.
    pub fn push(&mut self, input: &[u8], output: &mut Vec<u8>) -> Result<(), HelloError> {
        if self.stage == Stage::Open {
            output.extend_from_slice(input);
            return Ok(());
        }
        let mut pending = std::mem::take(&mut self.pending);
        pending.extend_from_slice(input);
        let mut done = 0;
        while let Some(used) = self.step(&pending[done..], output)? {
            done += used;
        }
        pending.drain(..done);
        self.pending = pending;
        Ok(())
    }

    /// Returns whether the first ClientHello is complete; then [`HelloFilter::server_name`] is
    /// final.
    pub fn has_hello(&self) -> bool {
        self.stage != Stage::First
    }

    /// Returns the server name of the first ClientHello exactly as it was sent.
    pub fn server_name(&self) -> Option<&[u8]> {
        self.server_name.as_deref()
    }

    /// Returns whether the first ClientHello offers this protocol (RFC 7301 §3.1).
    pub fn offers(&self, protocol: &[u8]) -> bool {
        let bytes = self.alpn.as_deref().unwrap_or_default();
        let mut list = Cursor { bytes, at: 2 };
        std::iter::from_fn(|| list.vector8()).any(|name| bytes[name] == *protocol)
    }

    /// Processes the front of `input` and returns the number of processed bytes; `None` if more
    /// bytes are needed.
    fn step(&mut self, input: &[u8], output: &mut Vec<u8>) -> Result<Option<usize>, HelloError> {
        match self.stage {
            Stage::First | Stage::Second => {
                let Some(record) = hello_record(input)? else {
                    return Ok(None);
                };
                self.hello.extend_from_slice(&record[RECORD_HEADER..]);
                self.finish_hello([record[1], record[2]], output)?;
                Ok(Some(record.len()))
            }
            Stage::Between => match input {
                [HANDSHAKE, _, _, _, _, CLIENT_HELLO, ..] => {
                    self.stage = Stage::Second;
                    Ok(Some(0))
                }
                // one byte (RFC 8446 §5); rustls limits their number
                [CHANGE_CIPHER_SPEC, _, _, 0, 1, _, ..] => {
                    output.extend_from_slice(&input[..RECORD_HEADER + 1]);
                    Ok(Some(RECORD_HEADER + 1))
                }
                [HANDSHAKE | CHANGE_CIPHER_SPEC, rest @ ..] if rest.len() < RECORD_HEADER => {
                    Ok(None)
                }
                [] => Ok(None),
                _ => {
                    self.stage = Stage::Open;
                    Ok(Some(0))
                }
            },
            Stage::Open => {
                output.extend_from_slice(input);
                Ok((!input.is_empty()).then_some(input.len()))
            }
        }
    }

    /// If the ClientHello is complete, hides its server name and appends it to `output` in records
    /// of `version`.
    fn finish_hello(&mut self, version: [u8; 2], output: &mut Vec<u8>) -> Result<(), HelloError> {
        if self.hello.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
            return Err(HelloError::Malformed(
                "its first handshake message is not a ClientHello",
            ));
        }
        let Some(len) = message_len(&self.hello) else {
            return Ok(());
        };
        if len > MAX_HELLO {
            return Err(HelloError::Malformed(
                "its ClientHello is longer than 64 KiB",
            ));
        }
        if self.hello.len() < len {
            return Ok(());
        }
        if self.hello.len() > len {
            return Err(HelloError::Malformed(
                "it sent handshake data behind its ClientHello",
            ));
        }
        let mut hello = std::mem::take(&mut self.hello);
        let server_name = hide_server_name(&mut hello)?;
        let alpn = find(&hello).and_then(|found| Some(hello[found.alpn?].to_vec()));
        if self.stage == Stage::First {
            self.server_name = server_name;
            self.alpn = alpn;
            self.stage = Stage::Between;
        } else {
            // RFC 8446 §4.1.2: the second ClientHello is equal except for listed extensions
            if self.server_name != server_name {
                return Err(HelloError::Malformed(
                    "its second ClientHello has another server name",
                ));
            }
            // otherwise the second hello could change what the server decided by the first one
            if self.alpn != alpn {
                return Err(HelloError::Malformed(
                    "its second ClientHello offers other protocols",
                ));
            }
            self.stage = Stage::Open;
        }
        for fragment in hello.chunks(MAX_FRAGMENT) {
            output.extend_from_slice(&[HANDSHAKE, version[0], version[1]]);
            output.extend_from_slice(&(fragment.len() as u16).to_be_bytes());
            output.extend_from_slice(fragment);
        }
        Ok(())
    }
}

/// Returns the record at the front of `input`, which must belong to a ClientHello; `None` if it is
/// incomplete.
fn hello_record(input: &[u8]) -> Result<Option<&[u8]>, HelloError> {
    if let [kind, ..] = input
        && *kind != HANDSHAKE
    {
        let unknown = || format!("byte 0x{kind:02x} where a handshake record should begin");
        let known = strangers::protocol(input).map(str::to_owned);
        return Err(HelloError::NotTls(known.unwrap_or_else(unknown)));
    }
    if let [_, major, ..] = input
        && *major != 3
    {
        return Err(HelloError::NotTls(format!(
            "a record of major version {major}"
        )));
    }
    let Some(header) = input.first_chunk::<RECORD_HEADER>() else {
        return Ok(None);
    };
    match usize::from(u16::from_be_bytes([header[3], header[4]])) {
        0 => Err(HelloError::Malformed("it sent an empty handshake record")),
        len if len > MAX_FRAGMENT => {
            Err(HelloError::Malformed("it sent a record longer than 16 KiB"))
        }
        len => Ok(input.get(..RECORD_HEADER + len)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;
    use support::random::Random;

    /// Returns a ClientHello with these extensions.
    fn hello(extensions: &[(u16, &[u8])]) -> Vec<u8> {
        let mut list = Vec::new();
        for (kind, body) in extensions {
            list.extend_from_slice(&kind.to_be_bytes());
            list.extend_from_slice(&(body.len() as u16).to_be_bytes());
            list.extend_from_slice(body);
        }
        let mut body = vec![3, 3];
        body.extend_from_slice(&[7; 32]);
        body.extend_from_slice(&[4, 1, 2, 3, 4]); // legacy_session_id
        body.extend_from_slice(&[0, 4, 0x13, 0x01, 0x13, 0x02]); // cipher_suites
        body.extend_from_slice(&[1, 0]); // legacy_compression_methods
        body.extend_from_slice(&(list.len() as u16).to_be_bytes());
        body.extend_from_slice(&list);
        let mut message = vec![CLIENT_HELLO];
        message.extend_from_slice(&(body.len() as u32).to_be_bytes()[1..]);
        message.extend_from_slice(&body);
        message
    }

    fn name_list(name: &[u8]) -> Vec<u8> {
        let len = name.len() as u16;
        [&(len + 3).to_be_bytes()[..], &[0], &len.to_be_bytes(), name].concat()
    }

    /// Returns a ClientHello with this name between two other extensions.
    fn named(name: &[u8]) -> Vec<u8> {
        hello(&[
            (0x002b, &[2, 3, 4]),
            (0, &name_list(name)),
            (0x0010, &[0, 3, 2, b'h', b'2']),
        ])
    }

    fn records(message: &[u8], size: usize) -> Vec<u8> {
        let record = |part: &[u8]| {
            [
                &[HANDSHAKE, 3, 1][..],
                &(part.len() as u16).to_be_bytes(),
                part,
            ]
            .concat()
        };
        message.chunks(size).flat_map(record).collect()
    }

    /// Pushes `input` in pieces of `size`.
    fn filter(input: &[u8], size: usize) -> (HelloFilter, Result<Vec<u8>, HelloError>) {
        let mut filter = HelloFilter::new();
        let mut output = Vec::new();
        let result = input
            .chunks(size)
            .try_for_each(|part| filter.push(part, &mut output));
        (filter, result.map(|()| output))
    }

    const NONCE: &[u8] = b"ICEiIyQlJicoKSorLC0uLzAxMjM0NTY3ODk6Ozw9Pj8=";

    #[test]
    fn a_hidden_name_is_found_in_its_place_and_revealed_exactly() {
        let original = named(NONCE);
        let mut hidden = original.clone();
        assert_eq!(hide_server_name(&mut hidden), Ok(Some(NONCE.to_vec())));
        let changed: Vec<_> = (0..original.len())
            .filter(|i| original[*i] != hidden[*i])
            .collect();
        assert_eq!(changed.len(), 2);
        assert_eq!(reveal_server_name(&hidden), Some(original));
    }

    #[test]
    fn only_client_hellos_of_a_transcript_are_revealed() {
        let mut hidden = named(NONCE);
        hide_server_name(&mut hidden).unwrap();
        let other = [&[2, 0, 0, 2][..], &HIDDEN_NAME].concat();
        let transcript = [&other[..], &hidden, &other, &hidden].concat();
        let expected = [&other[..], &named(NONCE), &other, &named(NONCE)].concat();
        assert_eq!(reveal_server_name(&transcript), Some(expected));
        assert_eq!(reveal_server_name(&other), None);
        assert_eq!(reveal_server_name(&[]), None);
    }

    #[test]
    fn a_hello_without_a_name_stays_as_it_is() {
        let mut message = hello(&[(0x002b, &[2, 3, 4])]);
        let before = message.clone();
        assert_eq!(hide_server_name(&mut message), Ok(None));
        assert_eq!(message, before);
        assert_eq!(reveal_server_name(&message), None);
    }

    #[test]
    fn a_hello_against_the_rules_is_refused() {
        let list = name_list(NONCE);
        for (extensions, what) in [
            (&[(0xff53, &[][..])][..], "the private type on the wire"),
            (
                &[(0, &list), (0xff53, &[])],
                "the private type beside a name",
            ),
            (&[(0, &list), (0, &list)], "two names"),
            (&[(0x0010, &[]), (0x0010, &[])], "two offers of protocols"),
            (
                &[(0, &list[..list.len() - 1])],
                "a list longer than its extension",
            ),
            (
                &[(0, &[&list[..], &[0]].concat())],
                "an extension longer than its list",
            ),
            (&[(0, &[0, 3, 1, 0, 0])], "a name of another type"),
            (&[(0, &[0, 6, 0, 0, 0, 0, 0, 0])], "two names in the list"),
            (&[(0, &[])], "no list"),
        ] {
            let refused = hide_server_name(&mut hello(extensions));
            assert!(
                matches!(refused, Err(HelloError::Malformed(_))),
                "{what}: {refused:?}"
            );
        }
    }

    #[test]
    fn the_filter_hides_the_name_however_its_input_is_cut() {
        let mut expected = named(NONCE);
        hide_server_name(&mut expected).unwrap();
        for record_size in [1, 3, 4, 5, 50, 1000] {
            for piece in [1, 2, 7, 100, 10_000] {
                let input = [
                    records(&named(NONCE), record_size),
                    b"\x17\x03\x03\x00\x01x and more".to_vec(),
                ]
                .concat();
                let (filter, output) = filter(&input, piece);
                let expected = [
                    records(&expected, 1 << 14),
                    b"\x17\x03\x03\x00\x01x and more".to_vec(),
                ]
                .concat();
                assert_eq!(output.unwrap(), expected);
                assert_eq!(filter.server_name(), Some(NONCE));
            }
        }
    }

    #[test]
    fn the_filter_hides_the_name_of_the_second_hello_and_compares_it_and_the_protocols() {
        let ccs = [CHANGE_CIPHER_SPEC, 3, 3, 0, 1, 1];
        let mut hidden = named(NONCE);
        hide_server_name(&mut hidden).unwrap();
        for piece in [1, 6, 10_000] {
            let first = records(&named(NONCE), 1 << 14);
            let tail = b"anything";
            let (_, output) = filter(
                &[&first[..], &ccs, &records(&named(NONCE), 9), tail].concat(),
                piece,
            );
            let hidden = records(&hidden, 1 << 14);
            assert_eq!(output.unwrap(), [&hidden[..], &ccs, &hidden, tail].concat());
            let other_name = "its second ClientHello has another server name";
            let other_protocols = "its second ClientHello offers other protocols";
            let list = name_list(NONCE);
            for (second, why) in [
                (named(b"another"), other_name),
                (hello(&[]), other_name),
                (hello(&[(0, &list)]), other_protocols),
                (
                    hello(&[(0, &list), (0x0010, &[0, 3, 2, b'h', b'3'])]),
                    other_protocols,
                ),
            ] {
                let (_, output) = filter(
                    &[&first[..], &ccs, &records(&second, 1 << 14)].concat(),
                    piece,
                );
                assert_eq!(output, Err(HelloError::Malformed(why)));
            }
        }
    }

    #[test]
    fn what_is_no_tls_is_told_from_broken_tls() {
        for input in [
            &b"GET / HTTP/1.1\r\n"[..],
            b"PRI * HTTP/2.0",
            &[0x80, 0x2e],
            &[22, 2],
            &[21, 3, 3, 0, 2, 2, 40],
        ] {
            assert!(
                matches!(filter(input, 1).1, Err(HelloError::NotTls(_))),
                "{input:02x?}"
            );
        }
        for input in [
            &[22, 3, 1, 0, 0][..],                         // an empty record
            &[22, 3, 1, 0x40, 1],                          // a record of more than 2^14 bytes
            &[22, 3, 1, 0, 4, 2, 0, 0, 0],                 // a ServerHello
            &[22, 3, 1, 0, 4, 1, 1, 0, 0],                 // a ClientHello of more than 64 KiB
            &[22, 3, 1, 0, 5, 1, 0, 0, 0, 0],              // data behind the ClientHello
            &[22, 3, 1, 0, 4, 1, 0, 0, 0],                 // an empty ClientHello
            &[22, 3, 1, 0, 2, 1, 0, 23, 3, 3, 0, 1, 0, 0], // another record within the ClientHello
        ] {
            let end = filter(input, 1).1;
            assert!(end.is_err(), "{input:02x?}: {end:?}");
        }
    }

    #[test]
    fn the_filter_never_holds_more_than_a_hello_and_a_record() {
        let mut filter = HelloFilter::new();
        let mut output = Vec::new();
        // the longest allowed ClientHello, followed by more bytes
        filter
            .push(&[22, 3, 1, 0, 4, 1, 0, 0xff, 0xfc], &mut output)
            .unwrap();
        let record = [&[22, 3, 1, 0x40, 0][..], &[0; 1 << 14]].concat();
        let mut pushed = 0;
        while record
            .chunks(1000)
            .all(|part| filter.push(part, &mut output).is_ok())
        {
            assert!(filter.hello.len() + filter.pending.len() <= MAX_HELLO + record.len());
            pushed += 1;
        }
        assert_eq!(pushed, 3);
    }

    #[test]
    fn mutated_hellos_cause_no_panic_and_hide_and_reveal_stay_inverse() {
        let seeds = [
            named(NONCE),
            named(b"x"),
            hello(&[]),
            hello(&[(0xff53, b"x")]),
            hello(&[(0, &name_list(NONCE)[..]); 2]),
        ];
        let mut hidden = 0;
        for original in seeds.iter().flat_map(|seed| mutations(seed, 40_000)) {
            let mut message = original.clone();
            match hide_server_name(&mut message) {
                Ok(Some(_)) => {
                    hidden += 1;
                    assert_eq!(reveal_server_name(&message).as_ref(), Some(&original));
                }
                // without a name nothing changes in either direction
                Ok(None) => assert!(message == original && reveal_server_name(&message).is_none()),
                Err(_) => assert_eq!(message, original),
            }
            let _ = reveal_server_name(&original);
        }
        assert!(
            hidden > 1000,
            "only {hidden} mutations were still a ClientHello with a name"
        );
    }

    #[test]
    fn the_protocols_of_the_first_hello_are_known() {
        let protocols = |body: &[u8]| {
            let mut filter = HelloFilter::new();
            let hello = hello(&[(0x0010, body)]);
            filter.push(&records(&hello, 60), &mut Vec::new()).unwrap();
            ["h2", "h", "strong"].map(|protocol| filter.offers(protocol.as_bytes()))
        };
        assert_eq!(protocols(b"\0\x03\x02h2"), [true, false, false]);
        let both = b"\0\x0a\x06strong\x02h2";
        assert_eq!(protocols(both), [true, false, true]);
        for body in mutations(both, 5_000) {
            protocols(&body);
        }
        assert!(!HelloFilter::new().offers(b""));
    }

    #[test]
    fn mutated_connections_cause_no_panic_in_the_filter() {
        let ccs = [CHANGE_CIPHER_SPEC, 3, 3, 0, 1, 1];
        let again = records(&named(NONCE), 100);
        let seed = [
            &records(&named(NONCE), 60)[..],
            &ccs,
            &again,
            b"\x17\x03\x03\x00\x01x",
        ]
        .concat();
        let mut random = Random::new(2);
        for input in mutations(&seed, 50_000) {
            let piece = 1 + random.below(input.len().max(1));
            let (_, output) = filter(&input, piece);
            // records may be merged and so lose headers; the number of bytes never grows
            assert!(output.is_err() || output.is_ok_and(|output| output.len() <= input.len()));
        }
    }
}
