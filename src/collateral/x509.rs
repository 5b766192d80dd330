//! What the cache must know of certificates and revocation lists (RFC 5280): names and ends. The validator verifies them.

use std::time::UNIX_EPOCH;

use base::der::{
    BIT_STRING, GENERALIZED_TIME, INTEGER, Malformed, OBJECT_IDENTIFIER, Reader, SEQUENCE, SET,
    UTC_TIME, context,
};

/// commonName, 2.5.4.3.
const COMMON_NAME: &[u8] = &[0x55, 4, 3];

/// A certificate. Nothing says yet who signed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Certificate {
    /// The common name of the subject.
    pub subject: String,
    /// The common name of the issuer.
    pub issuer: String,
    /// The last second of its validity since 1970.
    pub until: u64,
}

/// A list of revoked certificates. Nothing says yet who signed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RevocationList {
    /// The common name of the issuer.
    pub issuer: String,
    /// The last second of its validity since 1970.
    pub until: u64,
}

impl Certificate {
    /// Reads the DER of exactly one certificate.
    pub fn parse(der: &[u8]) -> Result<Certificate, String> {
        Certificate::read(der).map_err(|Malformed| "it is not a certificate".into())
    }

    fn read(der: &[u8]) -> Result<Certificate, Malformed> {
        let mut tbs = Reader::new(signed(der)?);
        tbs.expect(context(0))?;
        tbs.expect(INTEGER)?;
        tbs.expect(SEQUENCE)?;
        let issuer = common_name(tbs.expect(SEQUENCE)?)?;
        let mut validity = Reader::new(tbs.expect(SEQUENCE)?);
        validity.read()?;
        let until = time(validity.read()?)?;
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
    pub fn parse(der: &[u8]) -> Result<RevocationList, String> {
        RevocationList::read(der)
            .map_err(|Malformed| "it is not a list of revoked certificates".into())
    }

    fn read(der: &[u8]) -> Result<RevocationList, Malformed> {
        let mut tbs = Reader::new(signed(der)?);
        // version 1 has no extensions, so no number either; nobody publishes it
        tbs.expect(INTEGER)?;
        tbs.expect(SEQUENCE)?;
        let issuer = common_name(tbs.expect(SEQUENCE)?)?;
        tbs.read()?;
        let until = time(tbs.read()?)?;
        Ok(RevocationList { issuer, until })
    }
}

/// Returns the signed part of SEQUENCE { signed part, algorithm, signature }, which nothing follows.
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

/// Returns the seconds since 1970 of a UTCTime or GeneralizedTime in the only form that RFC 5280 §4.1.2.5 allows.
fn time((tag, text): (u8, &[u8])) -> Result<u64, Malformed> {
    let text = std::str::from_utf8(text).map_err(|_| Malformed)?;
    let (year, rest) = match tag {
        UTC_TIME => {
            let (year, rest) = text.split_at_checked(2).ok_or(Malformed)?;
            let century = if year < "50" { "20" } else { "19" };
            (format!("{century}{year}"), rest)
        }
        GENERALIZED_TIME => {
            let (year, rest) = text.split_at_checked(4).ok_or(Malformed)?;
            (year.to_owned(), rest)
        }
        _ => return Err(Malformed),
    };
    let part = |from: usize| rest.get(from..from + 2).ok_or(Malformed);
    let (month, day, hour) = (part(0)?, part(2)?, part(4)?);
    let (minute, second, end) = (part(6)?, part(8)?, rest.get(10..).ok_or(Malformed)?);
    let time = base::time::parse(&format!(
        "{year}-{month}-{day}T{hour}:{minute}:{second}{end}"
    ));
    let since = time.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.map(|since| since.as_secs()).ok_or(Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_a_time_are_read_and_no_other() {
        for seconds in [0, 951_782_400, 1_795_240_800, 2_524_607_999, 2_524_608_000] {
            let der = base::der::time(seconds);
            assert_eq!(time(Reader::new(&der).read().unwrap()), Ok(seconds));
        }
        for bad in [
            &b""[..],
            b"2611210600Z",
            b"261121060000",
            b"261121060000+0100",
            b"261321060000Z",
            b"2\xc3\xa4121060000Z",
        ] {
            assert_eq!(time((UTC_TIME, bad)), Err(Malformed));
        }
        assert_eq!(time((0x04, b"261121060000Z")), Err(Malformed));
    }
}
