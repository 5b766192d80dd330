//! The two nonces, and the TLS fields that contain them.
//!
//! The client's nonce is the server name (RFC 6066 §3) in its ClientHello. The server's nonce is
//! the common name of the only authority in its CertificateRequest. Both are standard base64. The
//! fields have another purpose, but Constellation's programs use them for nonces.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::ServerName;

use super::Error;
use base::der::{self, DerReader, Malformed};

/// Minimum length of a nonce in bytes: half of Constellation's 32, which still prevents guesses and
/// repetitions.
pub const MIN_LEN: usize = 16;
/// Maximum length of a nonce in bytes. The nonce is hashed, so a longer one has no benefit.
pub const MAX_LEN: usize = 64;
/// Length of the server's nonce in bytes, as in Constellation.
const SERVER_LEN: usize = 32;
/// Length of the client's nonce in bytes: a multiple of three, so that base64 has no padding (see
/// [`client`]).
const CLIENT_LEN: usize = 33;

/// Object identifier 2.5.4.3, id-at-commonName (RFC 5280, appendix A.1), with tag and length.
pub const COMMON_NAME: &[u8] = &[der::OBJECT_IDENTIFIER, 0x03, 0x55, 0x04, 0x03];

/// Returns a new client nonce and the server name that contains it.
///
/// Base64 is not always a host name, and rustls sends only host names. So nonces are drawn until
/// the base64 has no `+`, `/` or padding: the 44 letters and digits are then a valid label, which
/// is sent unchanged. This takes four draws on average ((62/64)^44 = 0.25) and leaves 262 bits of
/// randomness. Receivers accept any length.
pub fn client() -> (Vec<u8>, ServerName<'static>) {
    loop {
        let nonce = base::crypto::random::<CLIENT_LEN>();
        let name = STANDARD.encode(nonce);
        if name.bytes().any(|byte| byte == b'+' || byte == b'/') {
            continue;
        }
        // fails for a name that consists only of digits
        if let Ok(name) = ServerName::try_from(name) {
            return (nonce.to_vec(), name);
        }
    }
}

/// Returns a new server nonce.
pub fn server() -> [u8; SERVER_LEN] {
    base::crypto::random()
}

/// Returns the client's nonce from its server name. The error is a clause about the client.
pub fn from_server_name(name: Option<&[u8]>) -> Result<Vec<u8>, Error> {
    match name {
        None | Some([]) => Err(Error::Misbehaved(
            "its ClientHello has no server name, which carries the nonce".into(),
        )),
        Some(name) => decode("server name", name),
    }
}

/// Returns the name (RFC 5280 §4.1.2.4, DER) that contains the server's nonce.
pub fn to_distinguished_name(nonce: &[u8]) -> Vec<u8> {
    common_name(STANDARD.encode(nonce).as_bytes())
}

/// Returns a name with one attribute, the common name. Its bytes must be in the alphabet of
/// PrintableString, as base64 is.
pub fn common_name(value: &[u8]) -> Vec<u8> {
    let value = der::element(der::PRINTABLE_STRING, &[value]);
    let attribute = der::element(der::SEQUENCE, &[COMMON_NAME, &value]);
    der::element(der::SEQUENCE, &[&der::element(der::SET, &[&attribute])])
}

/// Returns the server's nonce from the authorities in its CertificateRequest. The error is a clause
/// about the server.
pub fn from_distinguished_names(names: &[&[u8]]) -> Result<Vec<u8>, Error> {
    let [name] = names else {
        return Err(Error::Misbehaved(format!(
            "its CertificateRequest names {} authorities, expected one with the nonce",
            names.len()
        )));
    };
    let wrong = |what| {
        let name = "the authority's name in its CertificateRequest";
        Error::Misbehaved(format!("{name} {what}"))
    };
    let value = find_common_name(name)
        .map_err(|Malformed| wrong("is malformed"))?
        .ok_or_else(|| wrong("has no common name, which should contain the nonce"))?;
    decode("CertificateRequest", value)
}

/// Returns the first common name of a Name if its string type represents base64 as ASCII.
fn find_common_name(name: &[u8]) -> Result<Option<&[u8]>, Malformed> {
    const UTF8_STRING: u8 = 0x0c;
    const NUMERIC_STRING: u8 = 0x12;
    const T61_STRING: u8 = 0x14;
    const IA5_STRING: u8 = 0x16;

    let mut outer = DerReader::new(name);
    let mut rdns = DerReader::new(outer.expect(der::SEQUENCE)?);
    outer.end()?;
    while !rdns.is_empty() {
        let mut attributes = DerReader::new(rdns.expect(der::SET)?);
        while !attributes.is_empty() {
            let mut attribute = DerReader::new(attributes.expect(der::SEQUENCE)?);
            let oid = attribute.expect_whole(der::OBJECT_IDENTIFIER)?;
            let (tag, value) = attribute.read()?;
            attribute.end()?;
            if oid == COMMON_NAME {
                return match tag {
                    der::PRINTABLE_STRING
                    | UTF8_STRING
                    | IA5_STRING
                    | T61_STRING
                    | NUMERIC_STRING => Ok(Some(value)),
                    _ => Err(Malformed),
                };
            }
        }
    }
    Ok(None)
}

/// Decodes the nonce in a field of the peer's message.
fn decode(field: &str, text: &[u8]) -> Result<Vec<u8>, Error> {
    let wrong = |what| Error::Misbehaved(format!("the nonce in its {field} {what}"));
    if text.len() > MAX_LEN.div_ceil(3) * 4 {
        return Err(wrong(format!("has more than {MAX_LEN} bytes")));
    }
    let nonce = STANDARD
        .decode(text)
        .map_err(|error| wrong(format!("is not base64: {error}")))?;
    match nonce.len() {
        MIN_LEN..=MAX_LEN => Ok(nonce),
        len => Err(wrong(format!(
            "has {len} bytes, expected {MIN_LEN} to {MAX_LEN}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use support::mutation::mutations;

    /// The bytes 0x20 to 0x3f.
    fn example() -> Vec<u8> {
        (0x20..0x40).collect()
    }

    #[test]
    fn client_nonces_are_fresh_and_legal_names_that_decode_to_them() {
        let mut seen = std::collections::HashSet::new();
        for _ in 0..500 {
            let (nonce, name) = client();
            let ServerName::DnsName(name) = name else {
                panic!("no host name: {name:?}")
            };
            assert_eq!(
                from_server_name(Some(name.as_ref().as_bytes())).unwrap(),
                nonce
            );
            assert!(seen.insert(nonce));
        }
    }

    #[test]
    fn the_server_nonce_s_name_is_the_old_system_s() {
        // from Go's encoding of a pkix.Name with this common name
        let expected: Vec<u8> = [
            &[
                0x30, 0x37, 0x31, 0x35, 0x30, 0x33, 0x06, 0x03, 0x55, 0x04, 0x03, 0x13, 0x2c,
            ][..],
            b"ICEiIyQlJicoKSorLC0uLzAxMjM0NTY3ODk6Ozw9Pj8=",
        ]
        .concat();
        assert_eq!(to_distinguished_name(&example()), expected);
        assert_eq!(from_distinguished_names(&[&expected]).unwrap(), example());
    }

    #[test]
    fn a_nonce_in_another_string_type_or_behind_other_attributes_is_read() {
        let text = STANDARD.encode(example());
        for tag in [0x0c, 0x12, 0x13, 0x14, 0x16] {
            let organization = [der::OBJECT_IDENTIFIER, 3, 0x55, 4, 0x0a];
            let attribute = |oid: &[u8], text: &str| {
                der::element(
                    der::SEQUENCE,
                    &[oid, &der::element(tag, &[text.as_bytes()])],
                )
            };
            let name = der::element(
                der::SEQUENCE,
                &[
                    &der::element(der::SET, &[&attribute(&organization, "somebody")]),
                    &der::element(der::SET, &[&attribute(COMMON_NAME, &text)]),
                ],
            );
            assert_eq!(
                from_distinguished_names(&[&name]).unwrap(),
                example(),
                "{tag:02x}"
            );
        }
    }

    #[test]
    fn unusable_names_are_refused() {
        let good = to_distinguished_name(&example());
        assert!(from_distinguished_names(&[]).is_err());
        assert!(from_distinguished_names(&[&good, &good]).is_err());
        assert!(from_distinguished_names(&[&der::element(der::SEQUENCE, &[])]).is_err());
        for bad in [
            &b"not base64"[..],
            &[b'A'; 20],
            &[b'A'; 92],
            &[b'A'; 43],
            b"",
        ] {
            assert!(
                from_distinguished_names(&[&common_name(bad)]).is_err(),
                "{bad:02x?}"
            );
            assert!(from_server_name(Some(bad)).is_err(), "{bad:02x?}");
        }
        assert!(from_server_name(None).is_err());
    }

    #[test]
    fn nonces_of_16_to_64_bytes_are_accepted() {
        for len in 0..100 {
            let text = STANDARD.encode(vec![1; len]);
            assert_eq!(
                from_server_name(Some(text.as_bytes())).is_ok(),
                (16..=64).contains(&len),
                "{len}"
            );
        }
    }

    #[test]
    fn mutated_names_cause_no_panic() {
        for name in mutations(&to_distinguished_name(&example()), 100_000) {
            if let Ok(nonce) = from_distinguished_names(&[&name]) {
                assert!((MIN_LEN..=MAX_LEN).contains(&nonce.len()));
            }
        }
    }
}
