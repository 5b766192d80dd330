//! The two nonces and where TLS carries them.
//!
//! The client's is the server name (RFC 6066 §3) of its ClientHello, the server's the common name of the only authority that
//! it says to accept in its CertificateRequest; both as standard base64. Neither field is meant for that: the old system
//! put them there, and its programs know no other place.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::ServerName;

use super::der::{self, Malformed, Reader};

/// Fewest bytes of a nonce: half of the old system's 32, still beyond guessing and repeating.
pub const MIN_LEN: usize = 16;
/// Most bytes of a nonce: it enters a hash, longer ones bring nothing.
pub const MAX_LEN: usize = 64;
/// Bytes of the server's nonce, as the old system's.
const SERVER_LEN: usize = 32;
/// Bytes of the client's nonce: a multiple of three, so that base64 has no padding (see [`client`]).
const CLIENT_LEN: usize = 33;

/// Object identifier 2.5.4.3, id-at-commonName (RFC 5280, appendix A.1), with tag and length.
pub const COMMON_NAME: &[u8] = &[der::OBJECT_IDENTIFIER, 0x03, 0x55, 0x04, 0x03];

/// A fresh client nonce, and the name that carries it.
///
/// Base64 is no host name in general, and rustls sends nothing else. So the nonce is drawn until its base64 has neither
/// `+` nor `/` nor padding: the 44 letters and digits are then a legal label that is sent as it is, case and all. It
/// takes four draws on average ((62/64)^44 = 0.25) and leaves 262 bits of randomness. Receivers take any length.
pub fn client() -> (Vec<u8>, ServerName<'static>) {
    loop {
        let nonce = crate::crypto::random::<CLIENT_LEN>();
        let name = STANDARD.encode(nonce);
        if name.bytes().any(|byte| byte == b'+' || byte == b'/') {
            continue;
        }
        // fails for a name of digits only, which might be an address
        if let Ok(name) = ServerName::try_from(name) {
            return (nonce.to_vec(), name);
        }
    }
}

/// A fresh server nonce.
pub fn server() -> [u8; SERVER_LEN] {
    crate::crypto::random()
}

/// The client's nonce from the server name it sent, if it sent one. The error is a clause about the client.
pub fn from_server_name(name: Option<&[u8]>) -> Result<Vec<u8>, String> {
    match name {
        None | Some([]) => {
            Err("its ClientHello has no nonce (no server name), so no attestation would be fresh".into())
        }
        Some(name) => decode(name).map_err(|what| format!("the nonce in its server name {what}")),
    }
}

/// The name (RFC 5280 §4.1.2.4, DER) that carries the server's nonce.
pub fn to_distinguished_name(nonce: &[u8]) -> Vec<u8> {
    common_name(STANDARD.encode(nonce).as_bytes())
}

/// A name of one attribute, the common name, whose bytes must be of PrintableString's alphabet (as base64 is).
pub fn common_name(value: &[u8]) -> Vec<u8> {
    let value = der::element(der::PRINTABLE_STRING, &[value]);
    let attribute = der::element(der::SEQUENCE, &[COMMON_NAME, &value]);
    der::element(der::SEQUENCE, &[&der::element(der::SET, &[&attribute])])
}

/// The server's nonce from the authorities that its CertificateRequest names. The error is a clause about the server.
pub fn from_distinguished_names(names: &[&[u8]]) -> Result<Vec<u8>, String> {
    let [name] = names else {
        return Err(format!("its CertificateRequest names {} authorities instead of one, the nonce", names.len()));
    };
    let value = find_common_name(name)
        .map_err(|Malformed| "the authority's name in its CertificateRequest is malformed".to_string())?
        .ok_or("the authority's name in its CertificateRequest has no common name, where the nonce should be")?;
    decode(value).map_err(|what| format!("the nonce in its CertificateRequest {what}"))
}

/// The first common name of a Name, if it is of a string type whose bytes are ASCII for base64.
fn find_common_name(name: &[u8]) -> Result<Option<&[u8]>, Malformed> {
    const UTF8_STRING: u8 = 0x0c;
    const NUMERIC_STRING: u8 = 0x12;
    const T61_STRING: u8 = 0x14;
    const IA5_STRING: u8 = 0x16;

    let mut outer = Reader::new(name);
    let mut rdns = Reader::new(outer.expect(der::SEQUENCE)?);
    outer.end()?;
    while !rdns.is_empty() {
        let mut attributes = Reader::new(rdns.expect(der::SET)?);
        while !attributes.is_empty() {
            let mut attribute = Reader::new(attributes.expect(der::SEQUENCE)?);
            let oid = attribute.expect_whole(der::OBJECT_IDENTIFIER)?;
            let (tag, value) = attribute.next()?;
            attribute.end()?;
            if oid == COMMON_NAME {
                return match tag {
                    der::PRINTABLE_STRING | UTF8_STRING | IA5_STRING | T61_STRING | NUMERIC_STRING => Ok(Some(value)),
                    _ => Err(Malformed),
                };
            }
        }
    }
    Ok(None)
}

fn decode(text: &[u8]) -> Result<Vec<u8>, String> {
    if text.len() > MAX_LEN.div_ceil(3) * 4 {
        return Err(format!("has more than {MAX_LEN} bytes"));
    }
    let nonce = STANDARD.decode(text).map_err(|error| format!("is no base64: {error}"))?;
    match nonce.len() {
        MIN_LEN..=MAX_LEN => Ok(nonce),
        len => Err(format!("has {len} bytes, not {MIN_LEN} to {MAX_LEN}")),
    }
}
