//! Certificates that make the errors of libraries long.

use base::der::{self, DerReader, element};

/// Returns a certificate with an algorithm of this many bytes in place of its own. Its signature is wrong.
pub fn with_long_algorithm(certificate: &[u8], len: usize) -> Vec<u8> {
    let mut parts = DerReader::new(DerReader::new(certificate).expect(der::SEQUENCE).unwrap());
    let mut fields = DerReader::new(parts.expect(der::SEQUENCE).unwrap());
    parts.expect(der::SEQUENCE).unwrap();
    let signature = element(der::BIT_STRING, &[parts.expect(der::BIT_STRING).unwrap()]);
    let identifier = element(der::OBJECT_IDENTIFIER, &[&vec![0x2a; len]]);
    let algorithm = element(der::SEQUENCE, &[&identifier]);
    let mut signed = vec![];
    // version, serial number, algorithm
    for place in 0.. {
        let Ok((tag, value)) = fields.read() else {
            break;
        };
        match place {
            2 => signed.extend(&algorithm),
            _ => signed.extend(element(tag, &[value])),
        }
    }
    let signed = element(der::SEQUENCE, &[&signed]);
    element(der::SEQUENCE, &[&signed, &algorithm, &signature])
}
