//! The messages between a machine and AWS's hypervisor about attestation documents, in CBOR (the
//! crate aws-nitro-enclaves-nsm-api 0.5):
//!
//! ```text
//! request = { "Attestation": { "user_data": null, "nonce": bytes, "public_key": bytes } }, each of at most 1024 bytes
//! answer  = { "Attestation": { "document": bytes } } or { "Error": name }, and then bytes without a meaning, which may be those of the request
//! ```
//!
//! The hypervisor may write each map and string with definite or indefinite length ([`cbor`]).
//! Bytes after the document or the error name are not read.

use base::text::quoted;
use minicbor::{Decoder, Encoder};

use crate::{IssueError, cbor};

/// Maximum length of nonce and key in bytes.
const MAX_GIVEN: usize = 1024;
/// Bytes that the heads and names in a request need.
const AROUND: usize = 64;
/// Maximum length of the name of an error in bytes: the longest known one has 16.
const MAX_NAME: usize = 40;

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NsmResponse {
    /// The document.
    Document(Vec<u8>),
    /// The name of an error.
    Error(String),
}

/// Encodes the request for a document with this nonce and this key.
pub fn attestation_request(nonce: &[u8], public_key: &[u8]) -> Result<Vec<u8>, IssueError> {
    if let Some(len) = [nonce.len(), public_key.len()]
        .into_iter()
        .find(|len| *len > MAX_GIVEN)
    {
        let most = "a document can have at most";
        let why = format!("{most} {MAX_GIVEN} bytes of nonce or key, got {len}");
        return Err(IssueError::new(why));
    }
    let mut bytes = vec![0; nonce.len() + public_key.len() + AROUND];
    let room = bytes.len();
    let mut writer = Encoder::new(&mut bytes[..]);
    let written = (|| {
        writer.map(1)?.str("Attestation")?.map(3)?;
        writer.str("user_data")?.null()?;
        writer.str("nonce")?.bytes(nonce)?;
        writer.str("public_key")?.bytes(public_key)?;
        Ok::<_, minicbor::encode::Error<_>>(writer.writer().len())
    })();
    let left = written.map_err(|_| IssueError::new("the request is too long"))?;
    bytes.truncate(room - left);
    Ok(bytes)
}

impl NsmResponse {
    /// Reads the answer at the beginning of these bytes.
    pub fn parse(bytes: &[u8]) -> Result<NsmResponse, IssueError> {
        let read = match read(&mut Decoder::new(bytes)) {
            Ok(read) => read,
            Err(error) => Err(format!("it is not CBOR of the expected form: {error}")),
        };
        read.map_err(|why| {
            IssueError::new(format!(
                "the answer of AWS's hypervisor cannot be read: {why}"
            ))
        })
    }
}

/// The outer error: this is not CBOR, or has another type than expected. The inner error is the
/// hypervisor's.
type Read = Result<Result<NsmResponse, String>, minicbor::decode::Error>;

fn read(reader: &mut Decoder<'_>) -> Read {
    if reader.map()?.is_some_and(|count| count != 1) {
        return Ok(Err("expected one answer".into()));
    }
    let kind = cbor::text(reader)?;
    Ok(match &*kind {
        "Attestation" => {
            let is_more = reader.map()?.is_some_and(|count| count != 1);
            if is_more || cbor::text(reader)? != "document" {
                return Ok(Err("expected a document and nothing else".into()));
            }
            Ok(NsmResponse::Document(cbor::bytes(reader)?))
        }
        "Error" => match cbor::text(reader)? {
            name if name.len() <= MAX_NAME
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric()) =>
            {
                Ok(NsmResponse::Error(name))
            }
            name => Err(format!("the error {} has no name", quoted(name, 40))),
        },
        _ => Err(format!(
            "expected Attestation or Error, got {}",
            quoted(kind, 40)
        )),
    })
}

#[cfg(test)]
mod tests {
    use support::mutation::mutations;

    use super::*;

    const DOCUMENT: &[u8] = b"\xa1\x6bAttestation\xa1\x68document\x43abc";

    /// The bytes are those of RFC 8949 for this value.
    #[test]
    fn a_request_has_the_fields_in_the_order_of_aws() {
        let request = attestation_request(&[1, 2], &[3; 24]).unwrap();
        let expected =
            b"\xa1\x6bAttestation\xa3\x69user_data\xf6\x65nonce\x42\x01\x02\x6apublic_key\x58\x18";
        assert_eq!(request, [&expected[..], &[3; 24]].concat());
        let longest = attestation_request(&[1; 1024], &[2; 1024]).unwrap();
        assert!(longest.len() > 2048 && longest.ends_with(&[2; 1024]));
        attestation_request(&[1; 1025], &[]).unwrap_err();
        attestation_request(&[], &[1; 1025]).unwrap_err();
    }

    #[test]
    fn an_answer_ends_where_it_says() {
        let in_an_index = [DOCUMENT, &[0xff; 100]].concat();
        let document = Some(NsmResponse::Document(b"abc".to_vec()));
        // maps and strings that a break ends
        let broken =
            b"\xbf\x7f\x6bAttestation\xff\xbf\x68document\x5f\x41a\x42bc\xff\xff\xff\xff\xff";
        for bytes in [DOCUMENT, &in_an_index, broken] {
            assert_eq!(NsmResponse::parse(bytes).ok(), document, "{bytes:02x?}");
        }
        let error = Some(NsmResponse::Error("InvalidArgument".into()));
        for bytes in [
            &b"\xa1\x65Error\x6fInvalidArgument\xff"[..],
            b"\xbf\x65Error\x7f\x67Invalid\x68Argument\xff\xff",
        ] {
            assert_eq!(NsmResponse::parse(bytes).ok(), error, "{bytes:02x?}");
        }
    }

    #[test]
    fn other_answers_are_refused_by_name_without_a_panic() {
        let request = attestation_request(&[1; 32], &[2; 294]).unwrap();
        let too_long =
            b"\xa1\x6bAttestation\xa1\x68document\x5b\xff\xff\xff\xff\xff\xff\xff\xffabc";
        for (bytes, why) in [
            (&[][..], "not CBOR"),
            (&[0xff; 100], "not CBOR"),
            (&[0; 100], "not CBOR"),
            (&[0x81; 8192], "not CBOR"),
            (b"\xa2\x65Error\x61x\x65Error\x61x", "expected one answer"),
            (b"\xbf\xff", "not CBOR"),
            (b"\xbf\x65Error\xff", "not CBOR"),
            (b"\x7f\x65Error\xff", "not CBOR"),
            (b"\xa1\x69DescribeX\xa0", "got \"DescribeX\""),
            (b"\xa1\x65Error\x63a\nb", "has no name"),
            (b"\xa1\x65Error\x01", "not CBOR"),
            (
                b"\xa1\x6bAttestation\xa1\x65other\x43abc",
                "expected a document",
            ),
            (
                b"\xa1\x6bAttestation\xa1\x68document\x83\x01\x02\x03",
                "not CBOR",
            ),
            (&DOCUMENT[..DOCUMENT.len() - 1], "not CBOR"),
            (too_long, "not CBOR"),
            // if the hypervisor did not answer, the buffer still has the request
            (&request, "expected a document"),
        ] {
            let error = NsmResponse::parse(bytes).unwrap_err().to_string();
            assert!(error.contains(why), "{bytes:02x?}: {error}, expected {why}");
        }
        // the name is written to a log
        let of_control_characters = [b"\xa1\x78\x78", &[6; 120][..]].concat();
        let altered = mutations(DOCUMENT, 5_000);
        for bytes in altered.into_iter().chain([of_control_characters]) {
            if let Err(error) = NsmResponse::parse(&bytes) {
                assert!(error.to_string().len() < 450, "{error}");
            }
        }
    }
}
