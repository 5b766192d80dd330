//! The extensions of a certificate (RFC 5280 §4.1). Nothing is verified.

use crate::der::{BOOLEAN, Malformed, OBJECT_IDENTIFIER, OCTET_STRING, Reader, SEQUENCE, context};

/// An extension, borrowed from the DER of its certificate.
pub struct Extension<'a> {
    /// The OID with tag and length.
    pub oid: &'a [u8],
    /// The content of its value.
    pub value: &'a [u8],
}

/// Returns the extensions of a certificate in order. Nothing may follow the certificate.
pub fn extensions(certificate: &[u8]) -> Result<Vec<Extension<'_>>, Malformed> {
    let mut outer = Reader::new(certificate);
    let mut body = Reader::new(Reader::new(outer.expect(SEQUENCE)?).expect(SEQUENCE)?);
    outer.end()?;
    let mut found = Vec::new();
    while !body.is_empty() {
        // no other field has this tag
        let (tag, content) = body.read()?;
        if tag != context(3) {
            continue;
        }
        let mut extensions = Reader::new(Reader::new(content).expect(SEQUENCE)?);
        while !extensions.is_empty() {
            let mut extension = Reader::new(extensions.expect(SEQUENCE)?);
            let oid = extension.expect_whole(OBJECT_IDENTIFIER)?;
            if extension.peek() == Some(BOOLEAN) {
                extension.expect(BOOLEAN)?; // critical
            }
            let value = extension.expect(OCTET_STRING)?;
            extension.end()?;
            found.push(Extension { oid, value });
        }
        body.end()?;
    }
    Ok(found)
}
