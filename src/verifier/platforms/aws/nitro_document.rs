//! The attestation document of a NitroTPM: AWS's hypervisor signs the PCRs of the TPM, and data
//! from the machine.
//!
//! ```text
//! COSE_Sign1 (RFC 9052 §4.2) = [ {1: -35 (ES384)}, {}, payload, signature ], without a tag
//! payload = { module_id, timestamp, digest: "SHA384", nitrotpm_pcrs: {0: 48 bytes, ..}, certificate, cabundle: [root, ..],
//!             public_key, user_data, nonce }
//! ```
//!
//! The fields are those of the EC2 User Guide ("Validate a NitroTPM Attestation Document"). Since
//! 2025 the hypervisor writes the payload with indefinite length; both forms are accepted
//! ([`cbor`]). No name occurs twice.

use std::collections::BTreeMap;

use base::der;
use base::text;
use base::x509::Certificate;
use minicbor::data::Type;
use minicbor::{Decoder, Encoder};
use ring::signature::{ECDSA_P384_SHA384_FIXED, UnparsedPublicKey};
use rustls::pki_types::UnixTime;
use webpki::KeyUsage;

use crate::ak_certificate::{AkRoot, root_of};
use crate::cbor;
use crate::refusal::{Kind, Refusal};

/// The protected header {1: -35}: ECDSA with SHA-384.
const ES384: &[u8] = &[0xa1, 0x01, 0x38, 0x22];
/// The length of ECDSA signatures on P-384 in bytes.
const SIGNATURE: usize = 96;
/// Maximum size of a document in bytes: twice the size of genuine ones.
pub const MAX_DOCUMENT: usize = 16 << 10;
/// Maximum number of certificates, and of PCRs.
const MAX_CHAIN: usize = 8;
const MAX_PCRS: u32 = 32;
/// The length of a value of the SHA-384 bank in bytes.
const VALUE: usize = 48;
/// Maximum length of the name of a module.
const MAX_NAME: usize = 256;

/// A document that is parsed but not verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NitroDocument {
    /// The instance ID, `-tpm` and a number.
    pub module: String,
    /// Milliseconds since 1970.
    pub timestamp: u64,
    /// The values of the SHA-384 bank.
    pub pcrs: BTreeMap<u32, Vec<u8>>,
    /// The key that the machine asked the hypervisor to sign; `None` if it gave none.
    pub public_key: Option<Vec<u8>>,
    /// As `public_key`.
    pub user_data: Option<Vec<u8>>,
    /// As `public_key`.
    pub nonce: Option<Vec<u8>>,
    certificate: Vec<u8>,
    chain: Vec<Vec<u8>>,
    payload: Vec<u8>,
    signature: Vec<u8>,
}

/// The fields of the payload that have been read so far.
#[derive(Default)]
struct Fields {
    module: Option<String>,
    timestamp: Option<u64>,
    digest: Option<String>,
    pcrs: Option<BTreeMap<u32, Vec<u8>>>,
    certificate: Option<Vec<u8>>,
    chain: Option<Vec<Vec<u8>>>,
    /// `Some(None)`: the field is present, and null.
    given: [Option<Option<Vec<u8>>>; 3],
}

impl NitroDocument {
    /// Parses a document. Nothing may follow it.
    pub fn parse(bytes: &[u8]) -> Result<NitroDocument, Refusal> {
        if bytes.len() > MAX_DOCUMENT {
            let len = bytes.len();
            return Err(Kind::Malformed.because(format!(
                "it has {len} bytes, expected at most {MAX_DOCUMENT}"
            )));
        }
        let (payload, signature) = envelope(bytes)?;
        let fields = Fields::read(&payload)?;
        Ok(fields.document(payload, signature)?)
    }

    /// Checks that the hypervisor signed the document: its certificate leads to one of the roots at
    /// this time.
    pub fn verify<'r>(&self, roots: &'r [AkRoot], now: UnixTime) -> Result<&'r str, Refusal> {
        let usage = KeyUsage::client_auth(); // AWS's certificates name no use
        let root = root_of(&self.certificate, &self.chain, roots, usage, now)
            .map_err(|refusal| refusal.reworded(|why| format!("its certificate {why}")))?;
        let certificate = Certificate::parse(&self.certificate);
        let certificate =
            certificate.map_err(|_| Kind::Malformed.because("its certificate cannot be read"))?;
        let point = point(certificate.key()).ok_or_else(|| {
            Kind::Certificate.because("the key of its certificate is not on P-384")
        })?;
        UnparsedPublicKey::new(&ECDSA_P384_SHA384_FIXED, point)
            .verify(&signed(&self.payload)?, &self.signature)
            .map_err(|_| Kind::Signature.because("its certificate's key did not sign it"))?;
        Ok(root)
    }
}

/// A clause that says why the bytes are not a document.
struct Malformed(String);

impl From<minicbor::decode::Error> for Malformed {
    fn from(error: minicbor::decode::Error) -> Malformed {
        Malformed(format!("it cannot be read: {}", text::of_error(error)))
    }
}

impl From<Malformed> for Refusal {
    fn from(malformed: Malformed) -> Refusal {
        Kind::Malformed.because(malformed.0)
    }
}

fn malformed<T>(why: impl Into<String>) -> Result<T, Malformed> {
    Err(Malformed(why.into()))
}

/// Reads the COSE_Sign1: payload and signature.
fn envelope(bytes: &[u8]) -> Result<(Vec<u8>, Vec<u8>), Malformed> {
    let reader = &mut Decoder::new(bytes);
    let parts = reader.array()?;
    if !matches!(parts, None | Some(4)) {
        return malformed("it is not a COSE_Sign1 with four parts");
    }
    if cbor::bytes(reader)? != ES384 {
        return malformed("its algorithm is not ES384");
    }
    let mut unprotected = reader.map()?;
    if has_next(reader, &mut unprotected)? {
        return malformed("it has unprotected header fields");
    }
    let (payload, signature) = (cbor::bytes(reader)?, cbor::bytes(reader)?);
    if signature.len() != SIGNATURE {
        return malformed(format!("its signature does not have {SIGNATURE} bytes"));
    }
    let is_more = parts.is_none() && has_next(reader, &mut None)?;
    if !is_more && reader.position() == bytes.len() {
        Ok((payload, signature))
    } else {
        malformed("bytes follow it")
    }
}

impl Fields {
    fn read(payload: &[u8]) -> Result<Fields, Malformed> {
        let reader = &mut Decoder::new(payload);
        let mut left = reader.map()?;
        let mut fields = Fields::default();
        // no field may occur twice, so their number is limited
        while has_next(reader, &mut left)? {
            let name = &*cbor::text(reader)?;
            let is_new = match name {
                "module_id" => fields.module.replace(cbor::text(reader)?).is_none(),
                "timestamp" => fields.timestamp.replace(reader.u64()?).is_none(),
                "digest" => fields.digest.replace(cbor::text(reader)?).is_none(),
                "nitrotpm_pcrs" => fields.pcrs.replace(pcrs(reader)?).is_none(),
                "certificate" => fields.certificate.replace(cbor::bytes(reader)?).is_none(),
                "cabundle" => fields.chain.replace(chain(reader)?).is_none(),
                "public_key" => fields.given[0].replace(given(reader)?).is_none(),
                "user_data" => fields.given[1].replace(given(reader)?).is_none(),
                "nonce" => fields.given[2].replace(given(reader)?).is_none(),
                _ => {
                    return malformed(format!(
                        "it has the unknown field {}",
                        text::quoted(name, 40)
                    ));
                }
            };
            if !is_new {
                return malformed(format!("its field {name} occurs twice"));
            }
        }
        if reader.position() == payload.len() {
            Ok(fields)
        } else {
            malformed("bytes follow its fields")
        }
    }

    fn document(self, payload: Vec<u8>, signature: Vec<u8>) -> Result<NitroDocument, Malformed> {
        let missing = |name: &str| Malformed(format!("it has no field {name}"));
        if self.digest.as_deref() != Some("SHA384") {
            return malformed("its digest is not SHA384");
        }
        let module = self.module.ok_or_else(|| missing("module_id"))?;
        if module.len() > MAX_NAME || !module.bytes().all(|byte| byte.is_ascii_graphic()) {
            return malformed("its module_id is not a name");
        }
        let [public_key, user_data, nonce] = self.given.map(Option::flatten);
        Ok(NitroDocument {
            module,
            timestamp: self.timestamp.ok_or_else(|| missing("timestamp"))?,
            pcrs: self.pcrs.ok_or_else(|| missing("nitrotpm_pcrs"))?,
            public_key,
            user_data,
            nonce,
            certificate: self.certificate.ok_or_else(|| missing("certificate"))?,
            chain: self.chain.ok_or_else(|| missing("cabundle"))?,
            payload,
            signature,
        })
    }
}

fn pcrs(reader: &mut Decoder<'_>) -> Result<BTreeMap<u32, Vec<u8>>, Malformed> {
    let mut left = reader.map()?;
    let mut pcrs = BTreeMap::new();
    while has_next(reader, &mut left)? {
        let (index, value) = (reader.u32()?, cbor::bytes(reader)?);
        if index >= MAX_PCRS || value.len() != VALUE {
            return malformed(format!(
                "its PCR {index} does not exist, or does not have {VALUE} bytes"
            ));
        }
        if pcrs.insert(index, value).is_some() {
            return malformed(format!("its PCR {index} occurs twice"));
        }
    }
    Ok(pcrs)
}

fn chain(reader: &mut Decoder<'_>) -> Result<Vec<Vec<u8>>, Malformed> {
    let mut left = reader.array()?;
    let mut chain = vec![];
    while has_next(reader, &mut left)? {
        if chain.len() == MAX_CHAIN {
            return malformed(format!("it has more than {MAX_CHAIN} certificates"));
        }
        chain.push(cbor::bytes(reader)?);
    }
    Ok(chain)
}

/// Reads bytes or null.
fn given(reader: &mut Decoder<'_>) -> Result<Option<Vec<u8>>, Malformed> {
    match reader.datatype()? {
        Type::Null => Ok(reader.null().map(|()| None)?),
        _ => Ok(Some(cbor::bytes(reader)?)),
    }
}

/// Returns the signed bytes: the Sig_structure of RFC 9052 §4.4.
fn signed(payload: &[u8]) -> Result<Vec<u8>, Malformed> {
    let mut bytes = vec![0; payload.len() + 64];
    let room = bytes.len();
    let mut writer = Encoder::new(&mut bytes[..]);
    let written = (|| {
        writer.array(4)?.str("Signature1")?.bytes(ES384)?;
        writer.bytes(&[])?.bytes(payload)?;
        Ok::<_, minicbor::encode::Error<_>>(writer.writer().len())
    })();
    let left = written.map_err(|_| Malformed("its payload is too long".into()))?;
    bytes.truncate(room - left);
    Ok(bytes)
}

/// Returns the point of a key on P-384 (RFC 5480).
fn point(key: &[u8]) -> Option<&[u8]> {
    // id-ecPublicKey with secp384r1
    const P384: &[u8] = b"\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x05\x2b\x81\x04\x00\x22";
    let mut key = der::DerReader::new(der::DerReader::new(key).expect(der::SEQUENCE).ok()?);
    let algorithm = key.expect(der::SEQUENCE).ok()?;
    // the first byte is the number of unused bits
    let point = key.expect(der::BIT_STRING).ok()?.strip_prefix(&[0])?;
    (algorithm == P384).then_some(point)
}

/// Returns whether a map or an array has a further entry. `left` is the count in its head. Without
/// a count (`None`) a break code ends it; this function then consumes that code.
fn has_next(
    reader: &mut Decoder<'_>,
    left: &mut Option<u64>,
) -> Result<bool, minicbor::decode::Error> {
    let Some(left) = left else {
        return Ok(reader.datatype()? != Type::Break || reader.skip().map(|()| false)?);
    };
    let has_next = *left > 0;
    *left = left.saturating_sub(1);
    Ok(has_next)
}
