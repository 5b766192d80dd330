//! The attestation keys that clouds prepare, and the bytes that Azure's paravisor stores.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use crate::cloud_tpm::{
    AZURE, CloudTpm, NONCE, TEMPLATES, USER_DATA, hcl_report, runtime_data, unhex,
};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustls::pki_types::SubjectPublicKeyInfoDer;
use rustls::pki_types::pem::PemObject;
use serde_json::Value;
use support::foreign::rust_crate;
use tpm::{Bank, KeySource, Tpm};
use verifier::hcl::{self, HardwareReport, HclReport, RuntimeData};
use verifier::quote::{Attest, Hierarchy, Key};
use verifier::refusal::Kind;
use verifier::vtpm::{self, PlatformVerifier, Quoted, VariantData};
use verifier::{
    Identified, IssueError, KeyName, Measurement, Oid, PlatformClaims, Policy, Refusal, Validator,
};

/// A machine with a prepared key and nothing that endorses it.
struct Prepared(KeySource);

impl VariantData for Prepared {
    fn oid(&self) -> Oid {
        &[]
    }

    fn key_source(&self) -> KeySource {
        self.0
    }
}

/// A machine of Azure: its instance info is the report of the paravisor.
struct Azure;

impl VariantData for Azure {
    fn oid(&self) -> Oid {
        &[]
    }

    fn key_source(&self) -> KeySource {
        AZURE
    }

    fn instance_info(
        &self,
        tpm: &mut Tpm,
        _extra_data: &[u8; 32],
    ) -> Result<Option<Vec<u8>>, IssueError> {
        tpm.nv(hcl::INDEX)
            .map_err(|error| IssueError::new(error.to_string()))
    }
}

impl PlatformVerifier for Azure {
    fn oid(&self) -> Oid {
        &[]
    }

    fn endorses_keys(&self) -> bool {
        false
    }

    /// Accepts the report of the hardware without a check of its signature, which other tests check.
    fn verify(&self, quoted: &Quoted<'_>) -> Result<Option<PlatformClaims>, Refusal> {
        let report = HclReport::parse(quoted.instance_info);
        let report = report.map_err(|why| Kind::Malformed.because(why))?;
        let HardwareReport::Snp(hardware) = report.hardware else {
            return Err(Kind::Malformed.because("no report of SEV-SNP"));
        };
        let report_data = &hardware[0x50..0x90];
        let data = RuntimeData::verify(report.runtime_data, report_data, &quoted.spki)?;
        assert_eq!(data.configuration["secure-boot"], "true");
        Ok(None)
    }
}

impl PlatformVerifier for Prepared {
    fn oid(&self) -> Oid {
        &[]
    }

    fn endorses_keys(&self) -> bool {
        false
    }

    fn verify(&self, _quoted: &Quoted<'_>) -> Result<Option<PlatformClaims>, Refusal> {
        Ok(None)
    }
}

fn identify(
    verifier: impl PlatformVerifier + 'static,
    document: &[u8],
    nonce: &[u8],
) -> Result<Identified, String> {
    let zero = Measurement {
        expected: vec![0; 32],
        warn_only: false,
    };
    let policy = Policy::new(BTreeMap::from([(15, zero)])).unwrap();
    vtpm::VtpmValidator::new(Arc::new(policy), Arc::new(verifier))
        .judge(&verifier::Evidence::new(document, nonce))
        .map_err(|error| error.to_string())
}

#[test]
fn the_keys_of_gces_templates_quote_and_are_the_same_each_time() {
    let mut cloud = CloudTpm::gce();
    for (index, template) in TEMPLATES {
        let source = KeySource::Template(index);
        let document = cloud.issue(Prepared(source));
        let identified = identify(Prepared(source), &document, NONCE).unwrap();
        assert_eq!(identified.user_data, USER_DATA);
        assert!(identify(Prepared(source), &document, b"another").is_err());
        let key = Tpm::open(&cloud.location())
            .unwrap()
            .attestation_key(source)
            .unwrap();
        // TPMT_PUBLIC starts with the template, up to its field unique
        assert!(key.starts_with(&unhex(template)[..20]));
        assert_eq!(
            *KeyName::of(&key).digest(),
            *identified.machine.unwrap().as_ref()
        );
        cloud.tpm.reboot();
    }
}

/// go-tpm-tools hashes the values of a quote with the hash of the signature.
#[test]
fn an_altered_signature_of_an_ecc_key_is_refused() {
    let cloud = CloudTpm::gce();
    let source = KeySource::Template(0x01c1_0003);
    let document: Value = serde_json::from_slice(&cloud.issue(Prepared(source))).unwrap();
    let quotes = document["Attestation"]["quotes"].as_array().unwrap();
    let sha256 = quotes
        .iter()
        .position(|quote| quote["pcrs"]["hash"] == Bank::Sha256 as u16)
        .unwrap();
    let signature = STANDARD
        .decode(quotes[sha256]["raw_sig"].as_str().unwrap())
        .unwrap();
    for at in [0, 2, 4, 10, signature.len() - 1] {
        let mut altered = signature.clone();
        altered[at] ^= 1;
        let mut document = document.clone();
        document["Attestation"]["quotes"][sha256]["raw_sig"] = STANDARD.encode(altered).into();
        let error = identify(Prepared(source), document.to_string().as_bytes(), NONCE).unwrap_err();
        assert!(
            error.contains("not signed by the attestation key"),
            "{error}"
        );
    }
}

#[test]
fn azures_key_is_bound_to_the_report_of_the_hardware() {
    let cloud = CloudTpm::azure(|_| {});
    let document = cloud.issue(Azure);
    assert_eq!(
        identify(Azure, &document, NONCE).unwrap().user_data,
        USER_DATA
    );
    let error = identify(Azure, &document, b"another").unwrap_err();
    assert!(error.contains("another connection"), "{error}");
    // the report of one machine with the key of another
    let other: Value = serde_json::from_slice(&CloudTpm::azure(|_| {}).issue(Azure)).unwrap();
    let mut swapped: Value = serde_json::from_slice(&document).unwrap();
    swapped["InstanceInfo"] = other["InstanceInfo"].clone();
    let error = identify(Azure, swapped.to_string().as_bytes(), NONCE).unwrap_err();
    assert!(error.contains("another connection"), "{error}");
}

#[test]
fn a_report_of_azure_that_does_not_endorse_the_key_is_refused() {
    type Alter = fn(&mut Vec<u8>);
    let cases: [(Alter, &str); 4] = [
        (|report| report[1250] ^= 1, "other runtime data"),
        (|report| report[32 + 0x50] ^= 1, "other runtime data"),
        (|report| report[32 + 0x8f] ^= 1, "other runtime data"),
        (
            |report| *report = hcl_report(&runtime_data(&[0xab; 256])),
            "not the HCLAkPub",
        ),
    ];
    for (alter, why) in cases {
        let document = CloudTpm::azure(alter).issue(Azure);
        let error = identify(Azure, &document, NONCE).unwrap_err();
        assert!(error.contains(why), "{error}, expected {why}");
    }
}

#[test]
fn a_machine_without_the_clouds_key_says_so() {
    let cloud = CloudTpm::start();
    let mut tpm = Tpm::open(&cloud.location()).unwrap();
    for source in [AZURE, KeySource::Template(0x01c1_0001)] {
        let error = tpm.attestation_key(source).unwrap_err().to_string();
        assert!(error.contains("loading the attestation key"), "{error}");
    }
}

/// Returns a file of the test data of the crate `az-cvm-vtpm`.
fn genuine(name: &str) -> Vec<u8> {
    fs::read(
        rust_crate("az_cvm_vtpm", "az-cvm-vtpm")
            .join("test")
            .join(name),
    )
    .unwrap()
}

/// Azure certifies the key without its attributes, but the TPM signs its Name: with noDA, and with the default exponent.
#[test]
fn a_genuine_quote_of_azure_has_the_name_of_its_key() {
    let (file, pem) = (genuine("quote.bin"), genuine("akpub.pem"));
    // the signature and the signed bytes, each after its length
    let part = |rest: &[u8]| {
        let (length, rest) = rest.split_at(8);
        let length = u64::from_le_bytes(length.try_into().unwrap()) as usize;
        (rest[..length].to_vec(), rest[length..].to_vec())
    };
    let (_, rest) = part(&file);
    let attest = part(&rest).0;
    let spki = SubjectPublicKeyInfoDer::from_pem_slice(&pem).unwrap();
    // the modulus is before the exponent, 65537
    let modulus = &spki[spki.len() - 5 - 256..spki.len() - 5];
    let signed_by = |attributes: [u8; 4], exponent: [u8; 4]| {
        let before = [
            &b"\0\x01\0\x0b"[..],
            &attributes,
            b"\0\0\0\x10\0\x14\0\x0b\x08\0",
            &exponent,
            b"\x01\0",
        ];
        let key = [&before.concat(), modulus].concat();
        Key::parse(&key).unwrap();
        Attest::parse(&attest).unwrap().hierarchy_of(&key)
    };
    let hierarchy = signed_by([0, 5, 4, 0x72], [0; 4]).unwrap();
    assert_eq!(signed_by([0, 5, 0, 0x72], [0; 4]), None);
    assert_eq!(signed_by([0, 5, 4, 0x72], [0, 1, 0, 1]), None);
    // so the TPM shows the version of its firmware
    assert_eq!(hierarchy, Hierarchy::Endorsement);
    let version = Attest::parse(&attest).unwrap().firmware_version(hierarchy);
    assert_eq!(version, Some(0x2020_0312_0012_0003));
}

/// The firmware of 2023 names another operation for the key than today's firmware.
#[test]
fn genuine_machines_of_azure_have_signed_their_runtime_data() {
    for name in ["hcl-report-snp.bin", "hcl-report-tdx.bin"] {
        let bytes = genuine(name);
        let report = HclReport::parse(&bytes).unwrap();
        let report_data = match report.hardware {
            HardwareReport::Snp(report) => &report[0x50..0x90],
            HardwareReport::Tdx(report) => &report[128..192],
            HardwareReport::None => panic!("{name}: no hardware"),
        };
        let key = RuntimeData::parse(report.runtime_data)
            .unwrap()
            .attestation_key;
        let data = RuntimeData::verify(report.runtime_data, report_data, &key).unwrap();
        assert!(data.configuration.contains_key("secure-boot"), "{name}");
        for at in 0..report.runtime_data.len() {
            let mut altered = report.runtime_data.to_vec();
            altered[at] ^= 1;
            let error = RuntimeData::verify(&altered, report_data, &key).unwrap_err();
            assert!(error.text.contains("other runtime data"), "{name}: {error}");
        }
    }
}
