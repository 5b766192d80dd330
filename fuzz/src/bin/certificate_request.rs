//! A kubelet's request for a certificate. The input is used twice: as the whole request, and as subject and attributes of a request
//! with a valid signature. The programs sign the parsed content without a further check, so its name must be a node's, and written
//! again it must parse to the same content.
#![no_main]

use std::sync::LazyLock;

use kubernetes::certificate_request::CertificateRequest;
use kubernetes::parameters::NodeName;
use libfuzzer_sys::fuzz_target;
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair};

const ECDSA_WITH_SHA256: &[u8] = &[
    0x30, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02,
];
/// The SubjectPublicKeyInfo of a P-256 key, before its point.
const P256: &[u8] = b"\x30\x59\x30\x13\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07\x03\x42\0";

static KEY: LazyLock<EcdsaKeyPair> = LazyLock::new(|| {
    let (algorithm, random) = (&ECDSA_P256_SHA256_ASN1_SIGNING, SystemRandom::new());
    let pkcs8 = EcdsaKeyPair::generate_pkcs8(algorithm, &random).expect("random numbers");
    EcdsaKeyPair::from_pkcs8(algorithm, pkcs8.as_ref(), &random).expect("its own form")
});

fn element(tag: u8, parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    let len = content.len();
    let mut out = match len {
        0..0x80 => vec![tag, len as u8],
        0x80..0x100 => vec![tag, 0x81, len as u8],
        _ => vec![tag, 0x82, (len >> 8) as u8, len as u8],
    };
    out.extend(content);
    out
}

/// Subject and attributes, signed.
fn signed(subject: &[u8], attributes: &[u8]) -> Vec<u8> {
    let key = [P256, KEY.public_key().as_ref()].concat();
    let info = element(
        0x30,
        &[
            &[2, 1, 0],
            &element(0x30, &[subject]),
            &key,
            &element(0xa0, &[attributes]),
        ],
    );
    let signature = KEY.sign(&SystemRandom::new(), &info).expect("it signs");
    element(
        0x30,
        &[
            &info,
            ECDSA_WITH_SHA256,
            &element(3, &[&[0], signature.as_ref()]),
        ],
    )
}

fn check(der: &[u8]) {
    if let Ok(request) = CertificateRequest::parse_with_names(der) {
        assert_eq!(
            NodeName::from_machine(request.node.as_str()).as_ref(),
            Ok(&request.node)
        );
        assert!(request.addresses.len() <= 16 && request.names.len() <= 16);
        assert_eq!(
            CertificateRequest::parse(der).is_ok(),
            request.names.is_empty()
        );
    }
}

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    // the rest of the longest request
    if let Some((&at, rest)) = bytes.split_first()
        && rest.len() < 3500
    {
        let (subject, attributes) = rest.split_at(usize::from(at).min(rest.len()));
        check(&signed(subject, attributes));
    }
});
