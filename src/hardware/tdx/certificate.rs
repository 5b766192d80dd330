//! The fields of Intel's certificates that a verifier reads, in addition to verifying their chain
//! (Intel SGX PCK Certificate and Certificate Revocation List Profile Specification).

use base::der::{DerReader, INTEGER, OBJECT_IDENTIFIER, OCTET_STRING, SEQUENCE, SET};
use base::text;
use base::x509::{self, DIGITAL_SIGNATURE, KEY_CERT_SIGN};

use super::tcb::PckPlatform;
use crate::refusal::{Kind, Refusal};

/// commonName, 2.5.4.3, and organizationName, 2.5.4.10.
const COMMON_NAME: &[u8] = &[0x55, 4, 3];
const ORGANIZATION: &[u8] = &[0x55, 4, 10];
/// 1.2.840.113741.1.13.1: the extension of a PCK certificate that names the platform.
const SGX: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf8, 0x4d, 0x01, 0x0d, 0x01];

/// The role of a certificate: all of Intel's certificates are under one root, and one must not
/// serve as another.
pub(super) struct Role {
    /// The common names of its subject.
    subjects: &'static [&'static str],
    /// The key usage that it must have (RFC 5280 §4.2.1.3), as a bit of the first byte.
    usage: u8,
}

impl Role {
    /// The key of a platform, which signs the report of its quoting enclave.
    pub const PCK: Role = Role {
        subjects: &["Intel SGX PCK Certificate"],
        usage: DIGITAL_SIGNATURE,
    };
    /// The CAs for platforms with several processors, and with one.
    pub const PCK_AUTHORITY: Role = Role {
        subjects: &["Intel SGX PCK Platform CA", "Intel SGX PCK Processor CA"],
        usage: KEY_CERT_SIGN,
    };
    /// The signer of TCB information and identities.
    pub const TCB_SIGNING: Role = Role {
        subjects: &["Intel SGX TCB Signing"],
        usage: DIGITAL_SIGNATURE,
    };

    /// Checks that a certificate has this role. `name` is the list's name in messages.
    pub fn check(&self, name: &str, certificate: &Certificate<'_>) -> Result<(), Refusal> {
        let subject = certificate.attribute(COMMON_NAME).unwrap_or_default();
        if !self.subjects.iter().any(|it| it.as_bytes() == subject)
            || certificate.attribute(ORGANIZATION) != Some(b"Intel Corporation")
        {
            return Err(Kind::Certificate.because(format!(
                "the {name} certificate is of {}, expected {} of Intel Corporation",
                text::quoted(String::from_utf8_lossy(subject), 60),
                self.subjects.join(" or ")
            )));
        }
        match certificate.fields.key_usage() {
            Some(usage) if usage & self.usage != 0 => Ok(()),
            _ => Err(Kind::Certificate.because(format!(
                "the key usage of the {name} certificate does not allow this use"
            ))),
        }
    }
}

/// A certificate (RFC 5280 §4.1).
pub(super) struct Certificate<'a> {
    /// The encoded serial number.
    pub serial: &'a [u8],
    /// The name of its subject: the content of the SEQUENCE.
    pub subject: &'a [u8],
    fields: x509::Certificate<'a>,
}

impl<'a> Certificate<'a> {
    /// Reads the DER of a certificate of version 3.
    pub fn parse(der: &'a [u8]) -> Option<Certificate<'a>> {
        let fields = x509::Certificate::parse(der).ok()?;
        Some(Certificate {
            serial: fields.serial(),
            subject: fields.subject(),
            fields,
        })
    }

    /// Returns the text of an attribute that the subject has exactly once.
    fn attribute(&self, oid: &[u8]) -> Option<&'a [u8]> {
        let mut found = None;
        let mut sets = DerReader::new(self.subject);
        while !sets.is_empty() {
            let set = sets.expect(SET).ok()?;
            let mut attribute = DerReader::new(DerReader::new(set).expect(SEQUENCE).ok()?);
            if attribute.expect(OBJECT_IDENTIFIER).ok()? == oid {
                let (_, text) = attribute.read().ok()?;
                if found.replace(text).is_some() {
                    return None;
                }
            }
        }
        found
    }

    /// Returns the platform in a PCK certificate.
    pub fn platform(&self) -> Option<PckPlatform> {
        let entries = DerReader::new(self.fields.extension(SGX)?)
            .expect(SEQUENCE)
            .ok()?;
        let octets = |arc| entry(entries, &[arc], OCTET_STRING);
        let tcb = entry(entries, &[2], SEQUENCE)?;
        let svn = |arc| small(entry(tcb, &[2, arc], INTEGER)?);
        let mut cpu_svn = [0; 16];
        for (arc, component) in (1..).zip(&mut cpu_svn) {
            *component = svn(arc)?.try_into().ok()?;
        }
        Some(PckPlatform {
            cpu_svn,
            pce_svn: svn(17)?,
            ppid: octets(1)?.try_into().ok()?,
            pce_id: octets(3)?.try_into().ok()?,
            fmspc: octets(4)?.try_into().ok()?,
            // a platform with one processor does not have this value
            instance: octets(6).and_then(|id| id.try_into().ok()),
        })
    }
}

/// Returns the content of the value with these arcs below [`SGX`] in a SEQUENCE OF SEQUENCE {
/// OBJECT IDENTIFIER, value }.
fn entry<'a>(entries: &'a [u8], arcs: &[u8], tag: u8) -> Option<&'a [u8]> {
    let mut entries = DerReader::new(entries);
    while !entries.is_empty() {
        let mut entry = DerReader::new(entries.expect(SEQUENCE).ok()?);
        let oid = entry.expect(OBJECT_IDENTIFIER).ok()?;
        if oid.strip_prefix(SGX) == Some(arcs) {
            return entry.expect(tag).ok();
        }
    }
    None
}

/// Returns an INTEGER of at most 16 bits that is not negative.
fn small(content: &[u8]) -> Option<u16> {
    match content {
        [byte @ 0..0x80] => Some(u16::from(*byte)),
        [high @ 0..0x80, low] | [0, high, low] => Some(u16::from_be_bytes([*high, *low])),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_numbers_are_read() {
        for (content, number) in [
            (&[0][..], Some(0)),
            (&[0x7f], Some(0x7f)),
            (&[0, 0x80], Some(0x80)),
            (&[0x12, 0x34], Some(0x1234)),
            (&[0, 0xff, 0xff], Some(0xffff)),
            (&[], None),
            (&[0x80], None),
            (&[0xff, 0], None),
            (&[1, 0, 0], None),
        ] {
            assert_eq!(small(content), number, "{content:?}");
        }
    }
}
