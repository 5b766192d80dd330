//! The fields of a certificate (RFC 5280 §4.1) that chain verification does not return: validity,
//! subject, key, extensions. Nothing is verified.

use crate::der::{
    BIT_STRING, BOOLEAN, DerReader, INTEGER, Malformed, OBJECT_IDENTIFIER, OCTET_STRING, SEQUENCE,
    SET, context,
};

use crate::time::of_der;

/// commonName, 2.5.4.3: the content of the OID.
const COMMON_NAME: &[u8] = &[0x55, 0x04, 0x03];
/// keyUsage, 2.5.29.15 (§4.2.1.3): the content of the OID.
const KEY_USAGE: &[u8] = &[0x55, 0x1d, 0x0f];

/// digitalSignature (0): a bit of [`Certificate::key_usage`], counted from the highest one.
pub const DIGITAL_SIGNATURE: u8 = 0x80;
/// keyEncipherment (2).
pub const KEY_ENCIPHERMENT: u8 = 0x80 >> 2;
/// keyAgreement (4).
pub const KEY_AGREEMENT: u8 = 0x80 >> 4;
/// keyCertSign (5).
pub const KEY_CERT_SIGN: u8 = 0x80 >> 5;

/// Returns whether a certificate (DER) is a CA's according to its key usage, which the library that
/// verifies chains does not check. Without the extension, it may be one (§4.2.1.3).
pub fn may_certify(der: &[u8]) -> bool {
    Certificate::parse(der).is_ok_and(|certificate| {
        let usage = certificate.key_usage();
        usage.is_none_or(|usage| usage & KEY_CERT_SIGN != 0)
    })
}

/// A certificate, borrowed from its DER.
#[derive(Debug, Clone, Copy)]
pub struct Certificate<'a> {
    serial: &'a [u8],
    issuer: &'a [u8],
    validity: &'a [u8],
    subject: &'a [u8],
    key: &'a [u8],
    extensions: &'a [u8],
}

impl<'a> Certificate<'a> {
    /// Parses a certificate. Nothing may follow it.
    pub fn parse(der: &'a [u8]) -> Result<Certificate<'a>, Malformed> {
        let mut outer = DerReader::new(der);
        let certificate = outer.expect(SEQUENCE)?;
        outer.end()?;
        let mut fields = DerReader::new(DerReader::new(certificate).expect(SEQUENCE)?);
        fields.expect(context(0))?; // version
        let serial = fields.expect(INTEGER)?;
        fields.expect(SEQUENCE)?; // signature
        let issuer = fields.expect(SEQUENCE)?;
        let validity = fields.expect(SEQUENCE)?;
        let (subject, key) = (fields.expect(SEQUENCE)?, fields.expect_whole(SEQUENCE)?);
        let mut extensions = &[][..];
        while !fields.is_empty() {
            let (tag, content) = fields.read()?;
            if tag == context(3) {
                extensions = DerReader::new(content).expect(SEQUENCE)?;
            }
        }
        Ok(Certificate {
            serial,
            issuer,
            validity,
            subject,
            key,
            extensions,
        })
    }

    /// Returns the first and the last second of its validity since 1970.
    pub fn validity(&self) -> Result<(u64, u64), Malformed> {
        let mut times = DerReader::new(self.validity);
        let (from, until) = (of_der(times.read()?)?, of_der(times.read()?)?);
        times.end()?;
        Ok((from, until))
    }

    /// Returns the SubjectPublicKeyInfo, DER.
    pub fn key(&self) -> &'a [u8] {
        self.key
    }

    /// Returns the serial number (the content of its DER).
    pub fn serial(&self) -> &'a [u8] {
        self.serial
    }

    /// Returns the subject (the content of its DER).
    pub fn subject(&self) -> &'a [u8] {
        self.subject
    }

    /// Returns the first common name of the subject.
    pub fn common_name(&self) -> Option<&'a str> {
        common_name(self.subject)
    }

    /// Returns the first common name of the issuer.
    pub fn issuer(&self) -> Option<&'a str> {
        common_name(self.issuer)
    }

    /// Returns all extensions (the content of their DER); empty if there are none.
    pub fn extensions(&self) -> &'a [u8] {
        self.extensions
    }

    /// Returns the value of the first extension with this OID (its content).
    pub fn extension(&self, oid: &[u8]) -> Option<&'a [u8]> {
        let mut extensions = DerReader::new(self.extensions);
        loop {
            let mut extension = DerReader::new(extensions.expect(SEQUENCE).ok()?);
            if extension.expect(OBJECT_IDENTIFIER).ok()? != oid {
                continue;
            }
            if extension.peek() == Some(BOOLEAN) {
                extension.read().ok()?; // critical
            }
            return extension.expect(OCTET_STRING).ok();
        }
    }

    /// Returns the first byte of the bits of the key usage; `None` if the certificate has no such
    /// extension.
    pub fn key_usage(&self) -> Option<u8> {
        let bits = DerReader::new(self.extension(KEY_USAGE)?).expect(BIT_STRING);
        // the first byte is the number of unused bits
        bits.ok()?.get(1).copied()
    }
}

/// Returns the first common name of a Name (the content of its DER).
pub fn common_name(name: &[u8]) -> Option<&str> {
    let mut sets = DerReader::new(name);
    loop {
        let mut names = DerReader::new(sets.expect(SET).ok()?);
        let mut name = DerReader::new(names.expect(SEQUENCE).ok()?);
        if name.expect(OBJECT_IDENTIFIER).ok()? == COMMON_NAME {
            return std::str::from_utf8(name.read().ok()?.1).ok();
        }
    }
}

/// An extension, borrowed from the DER of its certificate.
pub struct Extension<'a> {
    /// The OID with tag and length.
    pub oid: &'a [u8],
    /// The content of its value.
    pub value: &'a [u8],
}

/// Returns the extensions of a certificate in order. Nothing may follow the certificate.
pub fn extensions(certificate: &[u8]) -> Result<Vec<Extension<'_>>, Malformed> {
    let mut outer = DerReader::new(certificate);
    let mut body = DerReader::new(DerReader::new(outer.expect(SEQUENCE)?).expect(SEQUENCE)?);
    outer.end()?;
    let mut found = Vec::new();
    while !body.is_empty() {
        // no other field has this tag
        let (tag, content) = body.read()?;
        if tag != context(3) {
            continue;
        }
        let mut extensions = DerReader::new(DerReader::new(content).expect(SEQUENCE)?);
        while !extensions.is_empty() {
            let mut extension = DerReader::new(extensions.expect(SEQUENCE)?);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::der::{PRINTABLE_STRING, element};
    use crate::time::to_der;

    /// Returns a certificate of the first second of 1970 with a common name and the key usage
    /// digitalSignature.
    fn certificate() -> Vec<u8> {
        let oid = |content: &[u8]| element(OBJECT_IDENTIFIER, &[content]);
        let name = |text: &[u8]| {
            let text = element(PRINTABLE_STRING, &[text]);
            let name = element(SEQUENCE, &[&oid(COMMON_NAME), &text]);
            element(SEQUENCE, &[&element(SET, &[&name])])
        };
        let usage = element(
            OCTET_STRING,
            &[&element(BIT_STRING, &[&[7, DIGITAL_SIGNATURE]])],
        );
        let usage = element(
            SEQUENCE,
            &[&oid(KEY_USAGE), &element(BOOLEAN, &[&[0xff]]), &usage],
        );
        let empty = element(SEQUENCE, &[]);
        let fields = [
            element(context(0), &[&element(INTEGER, &[&[2]])]),
            element(INTEGER, &[&[1]]),
            empty,
            name(b"root"),
            element(SEQUENCE, &[&to_der(0), &to_der(1)]),
            name(b"leaf"),
            element(SEQUENCE, &[b"key"]),
            element(context(3), &[&element(SEQUENCE, &[&usage])]),
        ];
        let tbs = element(SEQUENCE, &[&fields.concat()]);
        element(SEQUENCE, &[&tbs])
    }

    #[test]
    fn validity_name_key_and_extensions_are_found() {
        let der = certificate();
        let read = Certificate::parse(&der).unwrap();
        assert_eq!(read.validity(), Ok((0, 1)));
        assert_eq!(read.common_name(), Some("leaf"));
        assert_eq!(read.issuer(), Some("root"));
        assert_eq!(read.serial(), [1]);
        assert_eq!(common_name(read.subject()), Some("leaf"));
        assert_eq!(read.key(), element(SEQUENCE, &[b"key"]));
        assert_eq!(read.key_usage(), Some(DIGITAL_SIGNATURE));
        assert!(!may_certify(&der));
        assert_eq!(read.extension(&[1]), None);
        let followed = [&der[..], &[0]].concat();
        assert!(Certificate::parse(&followed).is_err());
        for end in 0..der.len() {
            assert!(Certificate::parse(&der[..end]).is_err());
        }
    }
}
