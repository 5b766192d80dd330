//! `azure-trustedlaunch`: the key at its persistent handle, the certificate at its NV index, the chain at the address in the certificate.

use std::sync::Arc;

use rcgen::{IsCa, KeyUsagePurpose};
use serde_json::{Value, json};
use support::mutation::mutations;
use verifier::azure_trustedlaunch::{AzureMachine, CERTIFICATE_INDEX, VARIANT, is_of_microsoft};
use verifier::prepared::Prepared;
use verifier::{Evidence, Issuer, vtpm};

use crate::authority::{
    Alter, Authority, PublicKey, WRONG_TIMES, of_attestation_key, published_at,
};
use crate::cloud_tpm::{ATTRIBUTES_OF_AZURE, AZURE, CloudTpm, NONCE, USER_DATA};
use crate::host::Host;
use crate::meeting::{Correct, assert_no_replay, prove, proven, refused, validator};

const NAME: &str = "0123456789ab.TrustedVM.Azure.windows.net";
/// tcg-kp-AIKCertificate.
const USAGE: &[u64] = &[2, 23, 133, 8, 3];

/// Returns a machine with a certificate that contains the address of its issuer's certificate.
fn machine(host: &Host, authority: &Authority) -> CloudTpm {
    let place = format!("{}/ca/cert.cer", host.url());
    host.set("GET /ca/cert.cer", authority.between());
    let mut params = of_attestation_key(NAME, Some(USAGE));
    params.custom_extensions = vec![published_at(&place)];
    let cloud = CloudTpm::azure_key();
    let key = PublicKey::of_tpm(&cloud.key(AZURE));
    store(&cloud, authority.certify(&params, &key));
    cloud
}

/// Zeros follow the certificate, as on Azure.
fn store(cloud: &CloudTpm, mut certificate: Vec<u8>) {
    certificate.resize(2048, 0);
    cloud.store(
        CERTIFICATE_INDEX,
        &certificate,
        ATTRIBUTES_OF_AZURE,
        Some("hcl"),
    );
}

/// The host of the tests is in Microsoft's place.
fn issuer(cloud: &CloudTpm) -> Arc<dyn Issuer> {
    issuer_that_asks(cloud, |place| place.starts_with("http://127.0.0.1:"))
}

fn issuer_that_asks(cloud: &CloudTpm, is_allowed: fn(&str) -> bool) -> Arc<dyn Issuer> {
    let machine = Arc::new(Prepared::new(AzureMachine(is_allowed)));
    Arc::new(vtpm::TpmIssuer::new(cloud.location(), None, machine))
}

fn roots(authority: &Authority) -> Value {
    json!({"cloud": {"roots": [authority.root_pem()]}})
}

/// Returns a correct machine.
pub fn correct() -> Correct {
    let (host, authority) = (Host::start(), Authority::new());
    let cloud = machine(&host, &authority);
    let issuer = issuer(&cloud);
    Correct::new(&VARIANT, issuer, roots(&authority), (cloud, host))
}

#[test]
fn a_machine_is_proved_by_the_certificate_of_its_key() {
    let (host, authority) = (Host::start(), Authority::new());
    let cloud = machine(&host, &authority);
    let issuer = issuer(&cloud);
    prove(issuer.clone(), validator(&VARIANT, &roots(&authority))).unwrap();
    assert_eq!(host.requests().len(), 1, "the chain is fetched once");

    let document = issuer.issue(USER_DATA, NONCE).unwrap();
    let judge = validator(&VARIANT, &roots(&authority));
    let claims = proven(&judge, &document);
    assert_eq!(claims.technology, "Azure trusted launch");
    assert_eq!(claims.chip.as_deref(), Some("0123456789ab"));
    assert_no_replay(&judge, &document);

    for (cloud, why) in [
        (json!({}), "leads to none of the accepted roots"),
        (
            json!({"roots": ["azure-2023"]}),
            "leads to none of the accepted roots",
        ),
        (
            json!({"roots": [Authority::new().root_pem()]}),
            "a signature is wrong",
        ),
        (
            json!({"roots": [authority.root_pem()], "instances": ["ba9876543210"]}),
            "the instance of the machine is \"0123456789ab\"",
        ),
    ] {
        let error = prove(
            issuer.clone(),
            validator(&VARIANT, &json!({"cloud": cloud})),
        );
        assert!(error.clone().unwrap_err().contains(why), "{error:?}");
    }
}

/// The host writes the certificate in the TPM, so the host chooses the address.
#[test]
fn a_place_that_is_not_microsofts_is_not_asked() {
    let (host, authority) = (Host::start(), Authority::new());
    let cloud = machine(&host, &authority);
    let issuer = issuer_that_asks(&cloud, is_of_microsoft);
    let error = prove(issuer, validator(&VARIANT, &roots(&authority))).unwrap_err();
    assert!(
        error.contains("leads to none of the accepted roots"),
        "{error}"
    );
    assert_eq!(host.requests(), [""; 0]);
    // the same machine, when the address is allowed
    let issuer = self::issuer(&cloud);
    prove(issuer, validator(&VARIANT, &roots(&authority))).unwrap();
    assert_eq!(host.requests().len(), 1);
}

/// The other hierarchy of Azure has an issuer that verifiers know, and no address.
#[test]
fn a_certificate_of_the_root_itself_needs_no_chain() {
    let (cloud, authority) = (CloudTpm::azure_key(), Authority::new());
    let key = PublicKey::of_tpm(&cloud.key(AZURE));
    let params = of_attestation_key(NAME, Some(USAGE));
    store(&cloud, authority.certify_as_root(&params, &key));
    prove(issuer(&cloud), validator(&VARIANT, &roots(&authority))).unwrap();
}

#[test]
fn a_certificate_that_does_not_endorse_the_key_is_refused_by_name() {
    let cases: [(Alter, &str); 4] = [
        (
            |params| {
                params.extended_key_usages =
                    of_attestation_key("", Some(&[2, 23, 133, 8, 1])).extended_key_usages
            },
            "extended key usage",
        ),
        (
            |params| params.extended_key_usages.clear(),
            "extended key usage",
        ),
        (
            |params| params.key_usages = vec![KeyUsagePurpose::KeyEncipherment],
            "not for signatures",
        ),
        (
            |params| {
                params.distinguished_name =
                    of_attestation_key("0123.Evil.net", None).distinguished_name
            },
            "is of \"0123.Evil.net\"",
        ),
    ];
    let (cloud, authority) = (CloudTpm::azure_key(), Authority::new());
    let key = PublicKey::of_tpm(&cloud.key(AZURE));
    let judge = validator(&VARIANT, &roots(&authority));
    let refusal = |certificate: Vec<u8>| {
        cloud.tpm.tool("tpm2_nvundefine", &["-C", "p", "0x1c101d0"]);
        store(&cloud, certificate);
        let document = issuer(&cloud).issue(USER_DATA, NONCE).unwrap();
        refused(&judge, &document)
    };
    store(&cloud, vec![0x30, 0]);
    for (alter, why) in WRONG_TIMES.into_iter().chain(cases) {
        let mut params = of_attestation_key(NAME, Some(USAGE));
        alter(&mut params);
        let error = refusal(authority.certify_as_root(&params, &key));
        assert!(error.contains(why), "{error}, expected {why}");
    }
    let good = of_attestation_key(NAME, Some(USAGE));
    let other = PublicKey::rsa(&[0xab; 256]);
    let error = refusal(authority.certify_as_root(&good, &other));
    assert!(error.contains("is of another key"), "{error}");
    let error = refusal(authority.certify(&good, &key));
    assert!(
        error.contains("leads to none of the accepted roots"),
        "{error}"
    );
    let error = refusal(vec![0x30, 0]);
    assert!(error.contains("cannot be read"), "{error}");
}

#[test]
fn an_authority_that_may_not_certify_is_refused_by_name() {
    let no_authority = "is not a CA certificate";
    let cases: [(Alter, &str); 3] = [
        (|params| params.is_ca = IsCa::ExplicitNoCa, no_authority),
        (
            |params| params.key_usages = vec![KeyUsagePurpose::DigitalSignature],
            no_authority,
        ),
        (
            |params| params.extended_key_usages.truncate(1),
            "extended key usage",
        ),
    ];
    for (alter, why) in WRONG_TIMES.into_iter().chain(cases) {
        let (host, authority) = (Host::start(), Authority::altered(alter));
        let cloud = machine(&host, &authority);
        let document = issuer(&cloud).issue(USER_DATA, NONCE).unwrap();
        let judge = validator(&VARIANT, &roots(&authority));
        let error = refused(&judge, &document);
        assert!(error.contains(why), "{error}, expected {why}");
    }
}

#[test]
fn a_machine_without_a_certificate_says_so() {
    let cloud = CloudTpm::azure_key();
    let error = issuer(&cloud).issue(USER_DATA, NONCE).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("no certificate at the NV index 0x1c101d0"),
        "{error}"
    );
}

#[test]
fn altered_documents_are_refused_without_a_panic() {
    let (host, authority) = (Host::start(), Authority::new());
    let document = issuer(&machine(&host, &authority))
        .issue(USER_DATA, NONCE)
        .unwrap();
    let judge = validator(&VARIANT, &roots(&authority));
    let without_banks: Value = serde_json::from_slice(&document).unwrap();
    let twice = document.strip_suffix(b"}").unwrap();
    let twice = [twice, br#","InstanceInfo":null}"#].concat();
    assert!(judge.judge(&Evidence::new(&twice, NONCE)).is_err());
    let mut nothing = without_banks.clone();
    nothing["InstanceInfo"] = Value::Null;
    assert!(
        judge
            .judge(&Evidence::new(nothing.to_string().as_bytes(), NONCE))
            .is_err()
    );
    for altered in mutations(&document, 300) {
        if let Ok(identified) = judge.judge(&Evidence::new(&altered, NONCE)) {
            assert_eq!(identified.user_data, USER_DATA);
        }
    }
}
