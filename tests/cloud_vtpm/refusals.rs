//! Tests how long the refusals of certificates and documents are.

use common::long_certificate::with_long_algorithm;
use rcgen::KeyPair;
use rustls::pki_types::UnixTime;
use serde_json::json;
use tpm::{EndorsementKind, KeyEndorsement};
use verifier::ak_certificate::{self, AkRoot};
use verifier::gcp_sev_es::{ROOTS, usage};
use verifier::instance::CloudRequirements;
use verifier::nitro_document::NitroDocument;
use verifier::refusal::Kind;

use crate::authority::{Authority, PublicKey, other_usage};
use crate::gcp_sev_es::good;

/// Each refusal goes to a log, and any peer that can reach a service can cause one. The certificates have almost the maximum length of 4 KiB.
#[test]
fn a_refusal_is_short_whatever_a_certificate_has() {
    let authority = Authority::new();
    let demands: CloudRequirements =
        serde_json::from_value(json!({"roots": [authority.root_pem()]})).unwrap();
    let roots = AkRoot::demanded(&demands, ROOTS).unwrap();
    let of_vendor = [endorsement::roots::TpmRoot::parse(authority.root_pem()).unwrap()];
    let pair = KeyPair::generate().unwrap();
    let key = PublicKey::of_pair(&pair);
    let now = UnixTime::now();
    let mut params = good();
    params.extended_key_usages = (0..200)
        .map(|number| other_usage(&[1, 3, 6, 1, 4, 1, 99999, number]))
        .collect();
    let usages = authority.certify_as_root(&params, &key);
    let algorithm = with_long_algorithm(&authority.certify_as_root(&good(), &key), 1500);
    for (what, certificate, why) in [
        ("usages", usages, "extended key usage"),
        ("algorithm", algorithm, "this program does not verify"),
    ] {
        let error = ak_certificate::root_of(&certificate, &[], &roots, usage(), now).unwrap_err();
        assert_eq!(error.kind, Kind::Certificate, "{what}");
        let error = error.to_string();
        assert!(error.contains(why) && error.len() < 1000, "{what}: {error}");
        let endorsement = KeyEndorsement {
            kind: EndorsementKind::P256,
            certificate,
            chain: vec![],
        };
        let error = endorsement::certificate::verify(&endorsement, &of_vendor, now);
        let error = error.unwrap_err().to_string();
        assert!(error.contains(why) && error.len() < 1000, "{what}: {error}");
    }

    // a document with one field, of an unknown name
    let name = [&[0x79, 0x30, 0][..], &[b'x'; 0x3000]].concat();
    let payload = [&[0xa1][..], &name, &[0xf6]].concat();
    let len = (payload.len() as u16).to_be_bytes();
    let head = [0x84, 0x44, 0xa1, 1, 0x38, 0x22, 0xa0, 0x59];
    let document = [&head[..], &len, &payload, &[0x58, 96], &[0; 96]].concat();
    let error = NitroDocument::parse(&document).unwrap_err().to_string();
    assert!(
        error.contains("unknown field \"xxx") && error.len() < 1000,
        "{error}"
    );
}
