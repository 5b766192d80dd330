//! Public keys as certificates contain them: SubjectPublicKeyInfo (RFC 5280 §4.1.2.7), DER.

use base::der::{BIT_STRING, INTEGER, SEQUENCE, element};

/// Returns the SubjectPublicKeyInfo of a key with this algorithm, which is the content of its
/// AlgorithmIdentifier. `key` has the parts of the key's bytes.
pub fn spki(algorithm: &[u8], key: &[&[u8]]) -> Vec<u8> {
    let key = [&[&[0][..]], key].concat();
    element(
        SEQUENCE,
        &[&element(SEQUENCE, &[algorithm]), &element(BIT_STRING, &key)],
    )
}

/// Returns the SubjectPublicKeyInfo of an RSA key with this modulus and the exponent 65537, which
/// every RSA key of a TPM has. The first bit of the modulus must be set.
pub fn rsa_spki(modulus: &[u8]) -> Vec<u8> {
    // rsaEncryption, 1.2.840.113549.1.1.1, and NULL
    const RSA: &[u8] = b"\x06\x09\x2a\x86\x48\x86\xf7\x0d\x01\x01\x01\x05\x00";
    // a leading zero byte, so that the INTEGER is not negative
    let modulus = element(INTEGER, &[&[0], modulus]);
    let exponent = element(INTEGER, &[&[1, 0, 1]]);
    spki(RSA, &[&element(SEQUENCE, &[&modulus, &exponent])])
}
