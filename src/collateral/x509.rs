//! Reads names and ends of validity from certificates and revocation lists (RFC 5280), for the cache. The validator verifies them.

use base::der::{BIT_STRING, DerReader, INTEGER, Malformed, SEQUENCE};
use base::time::of_der;
use base::x509;
use hardware::Unavailable;

/// A certificate whose signature is not verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnverifiedCertificate {
    /// The common name of the subject.
    pub subject: String,
    /// The common name of the issuer.
    pub issuer: String,
    /// The last second of its validity since 1970.
    pub until: u64,
}

/// A list of revoked certificates whose signature is not verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RevocationList {
    /// The common name of the issuer.
    pub issuer: String,
    /// The last second of its validity since 1970.
    pub until: u64,
}

impl UnverifiedCertificate {
    /// Reads the DER of exactly one certificate.
    pub fn parse(der: &[u8]) -> Result<UnverifiedCertificate, Unavailable> {
        UnverifiedCertificate::read(der)
            .ok_or_else(|| Unavailable::malformed("it is not a certificate"))
    }

    fn read(der: &[u8]) -> Option<UnverifiedCertificate> {
        let fields = x509::Certificate::parse(der).ok()?;
        Some(UnverifiedCertificate {
            subject: fields.common_name()?.into(),
            issuer: fields.issuer()?.into(),
            until: fields.validity().ok()?.1,
        })
    }
}

impl RevocationList {
    /// Reads the DER of exactly one list.
    pub fn parse(der: &[u8]) -> Result<RevocationList, Unavailable> {
        RevocationList::read(der)
            .map_err(|Malformed| Unavailable::malformed("it is not a list of revoked certificates"))
    }

    fn read(der: &[u8]) -> Result<RevocationList, Malformed> {
        let mut tbs = DerReader::new(signed(der)?);
        // a list of version 1 has no extensions and so no number; no authority publishes such lists
        tbs.expect(INTEGER)?;
        tbs.expect(SEQUENCE)?;
        let issuer = x509::common_name(tbs.expect(SEQUENCE)?).ok_or(Malformed)?;
        tbs.read()?;
        let until = of_der(tbs.read()?)?;
        Ok(RevocationList {
            issuer: issuer.into(),
            until,
        })
    }
}

/// Returns the signed part of SEQUENCE { signed part, algorithm, signature }. No bytes may follow.
fn signed(der: &[u8]) -> Result<&[u8], Malformed> {
    let mut outer = DerReader::new(der);
    let mut parts = DerReader::new(outer.expect(SEQUENCE)?);
    outer.end()?;
    let signed = parts.expect(SEQUENCE)?;
    parts.expect(SEQUENCE)?;
    parts.expect(BIT_STRING)?;
    parts.end()?;
    Ok(signed)
}
