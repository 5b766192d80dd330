//! A peer's statements about its TPM: the certificate of an endorsement key, its SubjectPublicKeyInfo, the attestation key.
#![no_main]

use std::sync::LazyLock;
use std::time::Duration;

use endorsement::attestation_key::check;
use endorsement::certificate::verify;
use endorsement::credential::EndorsementKey;
use endorsement::model;
use endorsement::roots::{TpmRoot, names};
use libfuzzer_sys::fuzz_target;
use rustls::pki_types::UnixTime;
use tpm::{EndorsementKind, KeyEndorsement};

static ROOTS: LazyLock<Vec<TpmRoot>> = LazyLock::new(|| {
    let parse = |name| TpmRoot::parse(name).expect("it is built in");
    names().map(parse).collect()
});

fuzz_target!(|input: &[u8]| {
    let time = UnixTime::since_unix_epoch(Duration::from_secs(1_704_067_200));
    // half of the input is a certificate of the chain
    let (certificate, chain) = input.split_at(input.len() / 2);
    for kind in EndorsementKind::ALL {
        for (certificate, chain) in [(input, vec![]), (certificate, vec![chain.to_vec()])] {
            let endorsement = KeyEndorsement {
                kind,
                certificate: certificate.to_vec(),
                chain,
            };
            // no mutation makes a valid signature by these roots
            if let Ok((key, _)) = verify(&endorsement, &ROOTS, time) {
                assert!(key.make_credential(&[0; 34], &[0; 32]).is_ok());
            }
        }
        if let Ok(key) = EndorsementKey::parse(kind, input) {
            let _ = key.make_credential(&[0; 34], &[0; 32]);
        }
    }
    let _ = check(input);
    if let Some(tpm) = model::named(input) {
        assert!(tpm.to_string().bytes().all(|byte| (b' '..0x7f).contains(&byte)));
    }
    if let Ok(text) = std::str::from_utf8(input) {
        let _ = TpmRoot::parse(text);
    }
});
