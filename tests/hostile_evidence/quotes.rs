//! The structures of a quote with one field altered, by a program without a TPM, which signs them correctly with a key of its own.

use common::forger::{Parts, sized};

use crate::{FORGER, NONCE, USER_DATA, expect, refusal};

/// The signature is good in each case, so the refusal is about the field itself.
#[test]
fn every_field_of_a_quote_and_of_its_key_is_checked_by_itself() {
    let new = || FORGER.parts(USER_DATA, NONCE);
    assert_eq!(refusal("unchanged", &new().document()), None);
    let size = "modulus has a wrong size";
    let generated = "attributes of the attestation key";
    let quote = "not a quote of one bank";
    let values = "not the values that the TPM signed";
    let sign = "does not sign with RSASSA or ECDSA and SHA-256";
    let modulus = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut parts = new();
        change(Parts::part(&mut parts.key, "modulus"));
        parts
    };
    for (what, parts, reason) in [
        (
            "an ECC key",
            new().key("type", b"\0\x23"),
            "does not sign with RSASSA or ECDSA",
        ),
        (
            "a symmetric key",
            new().key("type", b"\0\x25"),
            "neither an RSA nor an ECC key",
        ),
        ("nameAlg SHA-1", new().key("nameAlg", b"\0\x04"), "nameAlg"),
        ("nameAlg null", new().key("nameAlg", b"\0\x10"), "nameAlg"),
        (
            "not restricted",
            new().key("attributes", b"\0\x04\0\x72"),
            generated,
        ),
        (
            "not fixedTPM",
            new().key("attributes", b"\0\x05\0\x70"),
            generated,
        ),
        (
            "does not sign",
            new().key("attributes", b"\0\x01\0\x72"),
            generated,
        ),
        (
            "decrypts too",
            new().key("attributes", b"\0\x07\0\x72"),
            generated,
        ),
        (
            "a reserved bit",
            new().key("attributes", b"\x80\x05\0\x72"),
            generated,
        ),
        (
            "a policy",
            new().key("policy", &sized(&[1; 32])),
            "authorization policy",
        ),
        (
            "a symmetric cipher",
            new().key("symmetric", b"\0\x06"),
            sign,
        ),
        ("RSAPSS", new().key("scheme", b"\0\x16"), sign),
        ("no scheme", new().key("scheme", b"\0\x10"), sign),
        ("SHA-1", new().key("hash", b"\0\x04"), sign),
        ("1024 bits", new().key("bits", b"\x04\0"), size),
        ("more bits than it has", new().key("bits", b"\x0c\0"), size),
        (
            "exponent 3",
            new().key("exponent", b"\0\0\0\x03"),
            "exponent",
        ),
        (
            "exponent 1",
            new().key("exponent", b"\0\0\0\x01"),
            "exponent",
        ),
        (
            "a short modulus",
            modulus(&|it| it.truncate(130)),
            "truncated",
        ),
        ("a modulus of zeros", modulus(&|it| it[2..].fill(0)), size),
        (
            "bytes after the key",
            modulus(&|it| it.push(0)),
            "bytes follow",
        ),
        (
            "an endless length",
            modulus(&|it| it[..2].fill(0xff)),
            "truncated",
        ),
        ("another modulus", modulus(&|it| it[100] ^= 1), "not signed"),
        ("not of a TPM", new().attest("magic", b"\xffTCX"), quote),
        ("a certification", new().attest("type", b"\x80\x17"), quote),
        ("a clock", new().attest("type", b"\x80\x19"), quote),
        (
            "a long signer",
            new().attest("qualifiedSigner", b"\xff\xff"),
            quote,
        ),
        (
            "no signer",
            new().attest("qualifiedSigner", &sized(&[])),
            "Qualified Name differs",
        ),
        (
            "another signer",
            new().attest("qualifiedSigner", &sized(&[0; 34])),
            "Qualified Name differs",
        ),
        (
            "another nonce",
            new().attest("extraData", &sized(&[0; 32])),
            "another connection",
        ),
        (
            "no nonce",
            new().attest("extraData", &sized(&[])),
            "another connection",
        ),
        (
            "a longer nonce",
            new().attest("extraData", &sized(&[0; 64])),
            "another connection",
        ),
        ("no bank", new().attest("count", b"\0\0\0\0"), quote),
        ("two banks", new().attest("count", b"\0\0\0\x02"), quote),
        (
            "endless banks",
            new().attest("count", b"\xff\xff\xff\xff"),
            quote,
        ),
        ("SHA-1 registers", new().attest("bank", b"\0\x04"), values),
        ("SHA-384 registers", new().attest("bank", b"\0\x0c"), values),
        (
            "fewer registers",
            new().attest("select", b"\x03\xff\xff\x7f"),
            values,
        ),
        (
            "no registers",
            new().attest("select", b"\x03\0\0\0"),
            values,
        ),
        (
            "more registers",
            new().attest("select", b"\x04\xff\xff\xff\x01"),
            values,
        ),
        (
            "an endless bitmap",
            new().attest("select", b"\xff\xff\xff\xff"),
            quote,
        ),
        ("no bitmap", new().attest("select", b"\0"), values),
        ("a short clock", new().attest("clockInfo", &[0; 16]), quote),
    ] {
        expect(what, &parts.document(), reason);
    }
    // a certificate of a cloud covers the modulus and the exponent: the TPM signs how the key is encoded
    for (what, name, bytes) in [
        ("noDA", "attributes", &b"\0\x05\x04\x72"[..]),
        ("an explicit exponent", "exponent", b"\0\x01\0\x01"),
    ] {
        let signer = new().signer();
        let other = new().key(name, bytes);
        assert_eq!(refusal(what, &other.document()), None);
        let other = new().key(name, bytes).attest("qualifiedSigner", &signer);
        expect(what, &other.document(), "Qualified Name differs");
    }
    for (what, change, reason) in [
        ("ECDSA", *b"\0\x18\0\x0b", "not signed"),
        ("RSAPSS", *b"\0\x16\0\x0b", "not signed"),
        ("SHA-1", *b"\0\x14\0\x04", "not signed"),
        ("HMAC", *b"\0\x05\0\x0b", "not signed"),
    ] {
        let mut parts = new();
        parts.signature = change;
        expect(&format!("a signature by {what}"), &parts.document(), reason);
    }
    let mut parts = new();
    parts.digest = Some(vec![0; 32]);
    expect("another digest", &parts.document(), values);
    let mut parts = new();
    parts.digest = Some(vec![]);
    expect("no digest", &parts.document(), values);
    // the boundary between two values moves: their concatenation, which is signed, stays the same
    let mut parts = new();
    parts.values.get_mut(&4).unwrap().push(0);
    parts.values.get_mut(&5).unwrap().pop();
    expect("a moved boundary", &parts.document(), values);
    let mut parts = new();
    parts.values.insert(4, vec![9; 32]);
    expect(
        "another register",
        &parts.document(),
        "PCR 4: expected 7a94",
    );
    let mut parts = new().attest("select", b"\x03\xef\xff\xff");
    parts.values.remove(&4);
    expect(
        "a register less",
        &parts.document(),
        "PCR 4 and 7 are zero, equal or missing",
    );
}
