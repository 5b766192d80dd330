//! The certificate of the key that signs reports, with AMD's extensions (57230 §3): product,
//! versions, chip, cloud.

use base::der::{BIT_STRING, DerReader, INTEGER, SEQUENCE};
use base::text;
use base::x509;
use base::x509::{Extension, extensions};
use ring::signature::{ECDSA_P384_SHA384_FIXED, UnparsedPublicKey};

use super::report::{Report, ReportSigner};
use super::tcb::{Product, Tcb};
use crate::refusal::{Kind, Refusal};

/// IA5String.
const IA5_STRING: u8 = 0x16;
/// The arc of AMD's extensions: 1.3.6.1.4.1.3704.1.
const AMD: &[u8] = &[0x2b, 6, 1, 4, 1, 0x9c, 0x78, 1];
/// The beginning of an EC public key on P-384, before the point (RFC 5480): the two identifiers.
const P384: &[u8] = &[
    0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x02, 0x01, 0x06, 0x05, 0x2b, 0x81, 0x04, 0x00, 0x22,
];
/// Length in bytes of a point on P-384, with the first byte, which means "uncompressed".
const POINT: usize = 97;
/// Maximum length of the name of a cloud.
const MAX_CSP: usize = 128;

/// A VCEK or VLEK certificate. Its issuer is not verified yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChipCertificate {
    /// The kind of key that it certifies, by the name of its subject.
    pub signer: ReportSigner,
    /// The product, from the extension.
    pub product: Product,
    /// The versions for which the key was derived.
    pub tcb: Tcb,
    /// The chip: 64 bytes, of a Turin 8; `None` for a VLEK.
    pub chip: Option<Vec<u8>>,
    /// The cloud; only a VLEK has one.
    pub csp: Option<String>,
    /// The common name of the issuer.
    pub issuer: String,
    /// The point of the public key.
    key: [u8; POINT],
}

/// What is wrong with a certificate: a clause.
struct Wrong(String);

impl From<&str> for Wrong {
    fn from(why: &str) -> Wrong {
        Wrong(why.into())
    }
}

/// The extensions that have been read so far.
#[derive(Default)]
struct Extensions {
    product: Option<String>,
    versions: [Option<u8>; 10],
    chip: Option<Vec<u8>>,
    csp: Option<String>,
}

impl ChipCertificate {
    /// Reads the DER of a certificate.
    pub fn parse(der: &[u8]) -> Result<ChipCertificate, Refusal> {
        ChipCertificate::read(der).map_err(|Wrong(why)| {
            Kind::Malformed.because(format!("the certificate of the chip's key: {why}"))
        })
    }

    fn read(der: &[u8]) -> Result<ChipCertificate, Wrong> {
        let fields = x509::Certificate::parse(der).map_err(|_| "it is not a certificate")?;
        let all = extensions(der).map_err(|_| "its extensions cannot be read")?;
        let extensions = Extensions::parse(&all)?;
        let signer = match fields.common_name() {
            Some("SEV-VCEK") => ReportSigner::Vcek,
            Some("SEV-VLEK") => ReportSigner::Vlek,
            _ => return Err("its subject is neither SEV-VCEK nor SEV-VLEK".into()),
        };
        ChipCertificate {
            signer,
            product: extensions.product()?,
            tcb: extensions.tcb()?,
            chip: extensions.chip,
            csp: extensions.csp,
            issuer: fields
                .issuer()
                .ok_or("its issuer has no common name")?
                .into(),
            key: point(fields.key()).ok_or("its key is not on P-384")?,
        }
        .checked()
    }

    fn checked(self) -> Result<ChipCertificate, Wrong> {
        let len = match self.product {
            Product::Milan | Product::Genoa => 64,
            Product::Turin => 8,
        };
        match (self.signer, &self.chip, &self.csp) {
            (ReportSigner::Vcek, Some(chip), None) if chip.len() == len => Ok(self),
            (ReportSigner::Vlek, None, Some(_)) => Ok(self),
            (ReportSigner::Vcek, ..) => Err(Wrong(format!(
                "a VCEK of a {} must name a chip of {len} bytes and no cloud",
                self.product
            ))),
            (ReportSigner::Vlek, ..) => Err("a VLEK must name a cloud and no chip".into()),
        }
    }

    /// Checks that this key signed a report.
    pub fn verify_signature(&self, report: &Report) -> Result<(), Refusal> {
        let key = UnparsedPublicKey::new(&ECDSA_P384_SHA384_FIXED, &self.key);
        let signature = report.signature();
        let signature =
            signature.ok_or_else(|| Kind::Malformed.because("the signature is malformed"))?;
        key.verify(report.signed(), &signature).map_err(|_| {
            Kind::Signature.because("the report is not signed by the key of the certificate")
        })
    }
}

impl Extensions {
    fn parse(extensions: &[Extension<'_>]) -> Result<Extensions, Wrong> {
        let mut found = Extensions::default();
        for Extension { oid, value } in extensions {
            // behind the tag and the length
            let Some(tail) = oid[2..].strip_prefix(AMD) else {
                continue;
            };
            found.add(tail, value).ok_or_else(|| {
                Wrong(format!(
                    "its extension 1.3.6.1.4.1.3704.1 {tail:?} is wrong"
                ))
            })?;
        }
        Ok(found)
    }

    /// Stores the value of an extension; `None` if it is malformed or a repetition.
    fn add(&mut self, tail: &[u8], value: &[u8]) -> Option<()> {
        let is_new = match *tail {
            // the version of this structure differs between products, and other extensions already
            // distinguish them
            [1] => true,
            [2] => self.product.replace(ia5(value)?).is_none(),
            [3, part] => {
                let slot = self.versions.get_mut(usize::from(part))?;
                slot.replace(integer(value)?).is_none()
            }
            [4] => self.chip.replace(value.to_vec()).is_none(),
            [5] => self.csp.replace(ia5(value)?).is_none(),
            _ => true,
        };
        is_new.then_some(())
    }

    fn product(&self) -> Result<Product, Wrong> {
        let name = self.product.as_deref().ok_or("it names no product")?;
        // a stepping can follow: Milan-B0
        let line = name.split('-').next().unwrap_or(name);
        Product::named(line).ok_or_else(|| {
            Wrong(format!(
                "its product {} is not known",
                text::quoted(name, 40)
            ))
        })
    }

    fn tcb(&self) -> Result<Tcb, Wrong> {
        let is_turin = self.product()? == Product::Turin;
        let part = |number: usize| {
            self.versions[number].ok_or_else(|| {
                Wrong(format!(
                    "it lacks the extension 3.{number}, the version of a part"
                ))
            })
        };
        if (4..=7).any(|reserved| self.versions[reserved].is_some_and(|version| version != 0)) {
            return Err("it has a version for a TCB component that is reserved".into());
        }
        if !is_turin && self.versions[9].is_some() {
            return Err("it has the version of a TCB component that only a Turin has".into());
        }
        Ok(Tcb {
            fmc: if is_turin { part(9)? } else { 0 },
            bootloader: part(1)?,
            tee: part(2)?,
            snp: part(3)?,
            microcode: part(8)?,
        })
    }
}

/// Returns the point of a SubjectPublicKeyInfo.
fn point(key: &[u8]) -> Option<[u8; POINT]> {
    let mut key = DerReader::new(DerReader::new(key).expect(SEQUENCE).ok()?);
    let algorithm = key.expect(SEQUENCE).ok()?;
    let bits = key.expect(BIT_STRING).ok()?;
    // the first byte is the number of unused bits
    (algorithm == P384).then(|| bits.strip_prefix(&[0])?.try_into().ok())?
}

fn ia5(value: &[u8]) -> Option<String> {
    let text = DerReader::new(value).expect(IA5_STRING).ok()?;
    let is_plain = text
        .iter()
        .all(|byte| *byte == b' ' || byte.is_ascii_graphic());
    let text = (is_plain && text.len() <= MAX_CSP).then_some(text)?;
    String::from_utf8(text.to_vec()).ok()
}

/// Returns an INTEGER of one byte; from 128 on it has a leading zero.
fn integer(value: &[u8]) -> Option<u8> {
    match DerReader::new(value).expect(INTEGER).ok()? {
        [value @ 0..128] => Some(*value),
        [0, value @ 128..=255] => Some(*value),
        _ => None,
    }
}
