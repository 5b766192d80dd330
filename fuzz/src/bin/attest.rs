//! The TPM's structures in a document: TPMT_PUBLIC, TPMS_ATTEST, TPMT_SIGNATURE. In a document they are in base64, and a signature
//! covers one of them.
#![no_main]

use std::sync::LazyLock;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use endorsement::attestation_key;
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

use verifier::quote::{Attest, Hierarchy, Key, Signed};

/// Structures that a software TPM made.
struct Genuine {
    key: Vec<u8>,
    attest: Vec<u8>,
    signature: Vec<u8>,
}

static GENUINE: LazyLock<Genuine> = LazyLock::new(|| {
    let document = include_bytes!("../../../tests/data/attestation-document");
    let document: Value = serde_json::from_slice(document).expect("it is genuine");
    let evidence = &document["Attestation"];
    let quotes = evidence["quotes"].as_array().expect("a list");
    let sha256 = quotes.iter().find(|quote| quote["pcrs"]["hash"] == 11);
    let bytes = |value: &Value| {
        STANDARD
            .decode(value.as_str().expect("a text"))
            .expect("base64")
    };
    let quote = sha256.expect("a quote of the bank SHA-256");
    Genuine {
        key: bytes(&evidence["ak_pub"]),
        attest: bytes(&quote["quote"]),
        signature: bytes(&quote["raw_sig"]),
    }
});

fuzz_target!(|input: &[u8]| {
    let genuine = &*GENUINE;
    let key = Key::parse(&genuine.key).expect("it is genuine");
    // no mutation finds another valid signature of the message, or another message for the signature
    assert_eq!(
        key.signed(&genuine.attest, input),
        input == genuine.signature
    );
    assert_eq!(
        key.signed(input, &genuine.signature),
        input == genuine.attest
    );

    if let Ok(key) = Key::parse(input) {
        // with a byte more or less it is not a key
        assert!(Key::parse(&input[..input.len() - 1]).is_err());
        assert!(Key::parse(&[input, &[0]].concat()).is_err());
        // a key with the same modulus verifies the quote, even if its encoding is another one
        if key.signed(&genuine.attest, &genuine.signature) {
            assert!(input.ends_with(&genuine.key[genuine.key.len() - 256..]));
            let attest = Attest::parse(&genuine.attest).expect("it is genuine");
            assert_eq!(attest.hierarchy_of(input).is_some(), input == genuine.key);
        }
    }
    let _ = attestation_key::check(input);

    if let Some(attest) = Attest::parse(input) {
        assert!(attest.pcrs.len() <= 32 && attest.pcrs.is_sorted());
        assert_eq!(attest.firmware_version(Hierarchy::Owner), None);
        let version = attest.firmware_version(Hierarchy::Endorsement).expect("it is shown");
        assert!(input.windows(8).any(|window| window == version.to_be_bytes()));
        // the compared values are parts of the signed bytes
        for part in [attest.extra_data, attest.pcr_digest] {
            assert!(part.is_empty() || input.windows(part.len()).any(|window| window == part));
        }
        assert!(Attest::parse(&input[..input.len() - 1]).is_none());
        assert!(Attest::parse(&[input, &[0]].concat()).is_none());
    }
});
