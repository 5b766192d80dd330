//! Reads names and ends of validity from certificates and revocation lists (RFC 5280), for the cache. The validator verifies them.

use base::der::{
    BIT_STRING, INTEGER, Malformed, OBJECT_IDENTIFIER, Reader, SEQUENCE, SET, context,
};
use booted_base::time::of_der;
use hardware::Unavailable;

/// commonName, 2.5.4.3.
const COMMON_NAME: &[u8] = &[0x55, 4, 3];

/// A certificate whose signature is not verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
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

impl Certificate {
    /// Reads the DER of exactly one certificate.
    pub fn parse(der: &[u8]) -> Result<Certificate, Unavailable> {
        Certificate::read(der)
            .map_err(|Malformed| Unavailable::malformed("it is not a certificate"))
    }

    fn read(der: &[u8]) -> Result<Certificate, Malformed> {
        let mut tbs = Reader::new(signed(der)?);
        tbs.expect(context(0))?;
        tbs.expect(INTEGER)?;
        tbs.expect(SEQUENCE)?;
        let issuer = common_name(tbs.expect(SEQUENCE)?)?;
        let mut validity = Reader::new(tbs.expect(SEQUENCE)?);
        validity.read()?;
        let until = of_der(validity.read()?)?;
        let subject = common_name(tbs.expect(SEQUENCE)?)?;
        Ok(Certificate {
            subject,
            issuer,
            until,
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
        let mut tbs = Reader::new(signed(der)?);
        // a list of version 1 has no extensions and so no number; nobody publishes such lists
        tbs.expect(INTEGER)?;
        tbs.expect(SEQUENCE)?;
        let issuer = common_name(tbs.expect(SEQUENCE)?)?;
        tbs.read()?;
        let until = of_der(tbs.read()?)?;
        Ok(RevocationList { issuer, until })
    }
}

/// Returns the signed part of SEQUENCE { signed part, algorithm, signature }. No bytes may follow.
fn signed(der: &[u8]) -> Result<&[u8], Malformed> {
    let mut outer = Reader::new(der);
    let mut parts = Reader::new(outer.expect(SEQUENCE)?);
    outer.end()?;
    let signed = parts.expect(SEQUENCE)?;
    parts.expect(SEQUENCE)?;
    parts.expect(BIT_STRING)?;
    parts.end()?;
    Ok(signed)
}

/// Returns the first common name of a name.
fn common_name(name: &[u8]) -> Result<String, Malformed> {
    let mut sets = Reader::new(name);
    loop {
        let mut attribute = Reader::new(Reader::new(sets.expect(SET)?).expect(SEQUENCE)?);
        if attribute.expect(OBJECT_IDENTIFIER)? == COMMON_NAME {
            let (_, text) = attribute.read()?;
            return String::from_utf8(text.to_vec()).map_err(|_| Malformed);
        }
    }
}
