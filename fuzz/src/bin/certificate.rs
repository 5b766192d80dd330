//! The peer's certificate, and the nonces in TLS names. The input is used twice: as the whole certificate, and as the fields after
//! the key in a certificate with a valid signature.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[allow(dead_code)] // this fuzzer does not use everything in the files
#[path = "../../../src/atls"]
mod atls {
    mod error;
    mod nonce;

    use std::sync::{Arc, LazyLock};

    pub use error::Error;
    use ring::digest::{SHA256, digest};
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair};

    use base::der;
    use verifier::refusal::Kind;
    use verifier::{
        CredentialChallenge, Evidence, Identified, MachineIdentity, Oid, Properties, Refusal,
        Refused, Validator,
    };

    /// Accepts the document `ok` for [`KEY`]'s certificates.
    struct Dummy;

    const OID: Oid = &[0x06, 0x05, 0x2b, 0xcd, 0x2c, 0x05, 0x01];
    const ECDSA_WITH_SHA256: &[u8] = &[
        0x30, 0x0a, 0x06, 0x08, 0x2a, 0x86, 0x48, 0xce, 0x3d, 0x04, 0x03, 0x02,
    ];
    /// The SubjectPublicKeyInfo of a P-256 key, before its point.
    const P256: &[u8] =
        b"\x30\x59\x30\x13\x06\x07\x2a\x86\x48\xce\x3d\x02\x01\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07\x03\x42\0";

    static KEY: LazyLock<EcdsaKeyPair> = LazyLock::new(|| {
        let (kind, random) = (&ECDSA_P256_SHA256_ASN1_SIGNING, &SystemRandom::new());
        let document = EcdsaKeyPair::generate_pkcs8(kind, random).expect("a key");
        EcdsaKeyPair::from_pkcs8(kind, document.as_ref(), random).expect("a key")
    });

    impl Validator for Dummy {
        fn properties(&self) -> Properties {
            Properties::of_any_tpm(OID)
        }

        fn challenge(&self, _: &MachineIdentity) -> Result<Option<CredentialChallenge>, Refusal> {
            Ok(None)
        }

        fn judge(&self, evidence: &Evidence<'_>) -> Result<Identified, Refusal> {
            if evidence.document != b"ok" {
                return Err(Kind::Unproven.because("refused"));
            }
            Ok(Identified {
                user_data: digest(&SHA256, &public_key()).as_ref().to_vec(),
                ..Identified::default()
            })
        }

        fn of_connection(&self) -> Option<Arc<dyn Validator>> {
            None
        }
    }

    fn public_key() -> Vec<u8> {
        [P256, KEY.public_key().as_ref()].concat()
    }

    fn signed(rest: &[u8]) -> Vec<u8> {
        let name = nonce::common_name(b"x");
        let validity = b"\x17\x0d200101000000Z\x17\x0d400101000000Z";
        let body = der::element(
            der::SEQUENCE,
            &[
                &[0xa0, 3, 2, 1, 2, 2, 1, 1], // version 3, serial number 1
                ECDSA_WITH_SHA256,
                &name,
                &der::element(der::SEQUENCE, &[validity]),
                &name,
                &public_key(),
                rest,
            ],
        );
        let signature = KEY.sign(&SystemRandom::new(), &body).expect("a signature");
        let signature = der::element(der::BIT_STRING, &[&[0], signature.as_ref()]);
        der::element(der::SEQUENCE, &[&body, ECDSA_WITH_SHA256, &signature])
    }

    fn verify(certificate: &[u8]) -> Result<(), Refused> {
        let judge = verifier::judge(Arc::new(Dummy));
        judge.certificate(certificate, b"").map(drop)
    }

    pub fn check(input: &[u8]) {
        assert!(verify(input).is_err());
        if verify(&signed(input)).is_ok() {
            let document = der::element(der::OCTET_STRING, &[b"ok"]);
            assert!(
                input
                    .windows(document.len())
                    .any(|window| window == document)
            );
        }
        for nonce in [
            nonce::from_server_name(Some(input)),
            nonce::from_distinguished_names(&[input]),
        ] {
            assert!(nonce.is_err() || nonce.is_ok_and(|nonce| (16..=64).contains(&nonce.len())));
        }
    }
}

fuzz_target!(|input: &[u8]| atls::check(input));
