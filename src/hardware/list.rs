//! Lists of revoked certificates (CRL, RFC 5280 §5): the checks that the library for lookups does
//! not do.

use base::der::{BIT_STRING, DerReader, INTEGER, SEQUENCE};
use base::time;
use webpki::{BorrowedCertRevocationList, CertRevocationList};

use crate::refusal::{Kind, Refusal};

/// Maximum size of a list in bytes.
const MAX_LIST: usize = 256 << 10;

/// The fields of a list of revoked certificates (RFC 5280 §5.1).
pub(crate) struct List<'a> {
    /// The name of its issuer, the content of the SEQUENCE.
    pub issuer: &'a [u8],
    /// When it was issued, in seconds since 1970.
    pub issued: u64,
    /// The last second of its validity, in seconds since 1970.
    pub until: u64,
    /// The signed bytes, with tag and length.
    pub signed: &'a [u8],
    /// The algorithm of the signature, the content of the SEQUENCE.
    pub algorithm: &'a [u8],
    /// The signature.
    pub signature: &'a [u8],
}

impl<'a> List<'a> {
    /// Reads a list whose validity has begun; also returns it in the form of the library for
    /// lookups. Its expiry and its signature are not checked. `name` is the list's name in
    /// messages.
    pub fn read(
        der: &'a [u8],
        name: &str,
        now: u64,
    ) -> Result<(List<'a>, CertRevocationList<'a>), Refusal> {
        if der.len() > MAX_LIST {
            let len = der.len();
            let text = format!("the {name} has {len} bytes, expected at most {MAX_LIST}");
            return Err(Kind::Malformed.because(text));
        }
        let list = BorrowedCertRevocationList::from_der(der);
        let unreadable = || {
            let text = format!("the {name} cannot be read: expected a complete CRL of version 2");
            Kind::Malformed.because(text)
        };
        let list = list.map_err(|_| unreadable())?;
        let head = List::parse(der).ok_or_else(unreadable)?;
        if head.issued <= now {
            Ok((head, CertRevocationList::Borrowed(list)))
        } else {
            Err(Kind::Expired.because(format!(
                "the {name} is not valid yet: is the clock of this machine right?"
            )))
        }
    }

    /// Reads the DER of a list of version 2.
    fn parse(der: &'a [u8]) -> Option<List<'a>> {
        let mut whole = DerReader::new(DerReader::new(der).expect(SEQUENCE).ok()?);
        let signed = whole.expect_whole(SEQUENCE).ok()?;
        let algorithm = whole.expect(SEQUENCE).ok()?;
        // no unused bits
        let signature = whole.expect(BIT_STRING).ok()?.strip_prefix(&[0])?;
        let mut tbs = DerReader::new(DerReader::new(signed).expect(SEQUENCE).ok()?);
        tbs.expect(INTEGER).ok()?;
        tbs.expect(SEQUENCE).ok()?; // the algorithm of the signature
        let issuer = tbs.expect(SEQUENCE).ok()?;
        let mut time = || time::of_der(tbs.read().ok()?).ok();
        Some(List {
            issuer,
            issued: time()?,
            until: time()?,
            signed,
            algorithm,
            signature,
        })
    }
}
