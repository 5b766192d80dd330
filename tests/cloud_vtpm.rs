//! The TPMs of clouds: swtpm is provisioned as each cloud provisions its own, with tpm2-tools.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use attest::attestation::hcl::{self, HardwareReport, HclReport, RuntimeData};
use attest::attestation::vtpm::{self, Endorser, Evidence, Machine};
use attest::attestation::{
    Identified, IssueError, Issuer, KeyName, Measurement, Oid, PlatformClaims, Policy, Validator,
};
use attest::tpm::{Bank, KeySource, Location, Tpm};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::{Value, json};
use support::foreign::rust_crate;
use support::swtpm::Swtpm;

const USER_DATA: &[u8] = b"the hash of a certificate's key.";
const NONCE: &[u8] = b"the verifier's own random number";
const ATTRIBUTES_OF_GCE: &str =
    "platformcreate|ppwrite|ppread|writedefine|ownerread|authread|no_da";
const ATTRIBUTES_OF_AZURE: &str = "platformcreate|authread|authwrite|ownerread|no_da";
/// The templates of GCE's attestation keys: TPMT_PUBLIC without the key.
const TEMPLATES: [(u32, &str); 2] = [
    (
        0x01c1_0001,
        "0001000b00050072000000100014000b0800000000000000",
    ),
    (
        0x01c1_0003,
        "0023000b00050072000000100018000b0003001000000000",
    ),
];

/// A TPM as a cloud provisions it.
struct CloudTpm {
    tpm: Swtpm,
    dir: tempfile::TempDir,
}

impl CloudTpm {
    fn start() -> CloudTpm {
        CloudTpm {
            tpm: Swtpm::start(),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    /// Provides the templates of both attestation keys.
    fn gce() -> CloudTpm {
        let cloud = CloudTpm::start();
        for (index, template) in TEMPLATES {
            cloud.store(index, &unhex(template), ATTRIBUTES_OF_GCE, None);
        }
        cloud
    }

    /// Provides the attestation key and a report of the paravisor. The index is as long as swtpm allows, so zeros follow the report.
    fn azure(alter: impl Fn(&mut Vec<u8>)) -> CloudTpm {
        let cloud = CloudTpm::start();
        let context = cloud.path("ak");
        let key = "fixedtpm|fixedparent|sensitivedataorigin|userwithauth|noda|restricted|sign";
        let template = [
            "-G",
            "rsa2048:rsassa-sha256:null",
            "-g",
            "sha256",
            "-a",
            key,
        ];
        let make = [&["-C", "e", "-c", &context][..], &template].concat();
        cloud.tpm.tool("tpm2_createprimary", &make);
        let keep = ["-C", "o", "-c", &context, "0x81000003"];
        cloud.tpm.tool("tpm2_evictcontrol", &keep);
        cloud.tpm.tool("tpm2_flushcontext", &["-t"]);
        let mut tpm = Tpm::open(&cloud.location()).unwrap();
        let key = tpm.attestation_key(AZURE).unwrap();
        drop(tpm);
        // TPMT_PUBLIC ends with the modulus
        let mut report = hcl_report(&runtime_data(&key[key.len() - 256..]));
        alter(&mut report);
        report.resize(2048, 0);
        cloud.store(hcl::INDEX, &report, ATTRIBUTES_OF_AZURE, Some("hcl"));
        cloud
    }

    fn store(&self, index: u32, data: &[u8], attributes: &str, password: Option<&str>) {
        let (index, file) = (format!("{index:#x}"), self.path("data"));
        fs::write(&file, data).unwrap();
        let size = data.len().to_string();
        let mut define = vec!["-C", "p", &index, "-s", &size, "-a", attributes];
        define.extend(password.into_iter().flat_map(|password| ["-p", password]));
        self.tpm.tool("tpm2_nvdefine", &define);
        let write = match password {
            Some(password) => ["-C", &index, "-P", password, &index, "-i", &file].to_vec(),
            None => ["-C", "p", &index, "-i", &file].to_vec(),
        };
        self.tpm.tool("tpm2_nvwrite", &write);
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    fn location(&self) -> Location {
        self.tpm.location().parse().unwrap()
    }

    fn issue(&self, machine: impl Machine + 'static) -> Vec<u8> {
        vtpm::Issuer::new(self.location(), None, Arc::new(machine))
            .issue(USER_DATA, NONCE)
            .unwrap()
    }
}

const AZURE: KeySource = KeySource::Persistent(hcl::KEY_HANDLE);

fn unhex(text: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(byte).collect()
}

fn runtime_data(modulus: &[u8]) -> String {
    let n = URL_SAFE_NO_PAD.encode(modulus);
    json!({
        "keys": [{"kid": "HCLAkPub", "key_ops": ["sign"], "kty": "RSA", "e": "AQAB", "n": n}],
        "vm-configuration": {"secure-boot": true, "vmUniqueId": "0"},
    })
    .to_string()
}

/// Returns a report with an unsigned report of SEV-SNP whose REPORT_DATA is the hash of the runtime data.
fn hcl_report(runtime_data: &str) -> Vec<u8> {
    let hash = ring::digest::digest(&ring::digest::SHA256, runtime_data.as_bytes());
    let mut hardware = [0; 1184];
    hardware[0x50..0x70].copy_from_slice(hash.as_ref());
    let length = runtime_data.len() as u32;
    let numbers = [length + 20, 1, 2, 1, length].map(u32::to_le_bytes);
    [
        &b"HCLA"[..],
        &[0; 28],
        &hardware,
        numbers.as_flattened(),
        runtime_data.as_bytes(),
    ]
    .concat()
}

/// A machine with a prepared key and nothing that endorses it.
struct Prepared(KeySource);

impl Machine for Prepared {
    fn oid(&self) -> Oid {
        &[]
    }

    fn key_source(&self) -> KeySource {
        self.0
    }
}

/// A machine of Azure: its instance info is the report of the paravisor.
struct Azure;

impl Machine for Azure {
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
            .map_err(|error| IssueError(error.to_string()))
    }
}

impl Endorser for Azure {
    fn oid(&self) -> Oid {
        &[]
    }

    /// Believes the report of the hardware: its signature is not what these tests are about.
    fn endorse(&self, evidence: &Evidence<'_>) -> Result<Option<PlatformClaims>, String> {
        let report = HclReport::parse(evidence.instance_info)?;
        let HardwareReport::Snp(hardware) = report.hardware else {
            return Err("no report of SEV-SNP".into());
        };
        let report_data = &hardware[0x50..0x90];
        let data = RuntimeData::verify(report.runtime_data, report_data, &evidence.spki)?;
        assert_eq!(data.configuration["secure-boot"], "true");
        Ok(None)
    }
}

impl Endorser for Prepared {
    fn oid(&self) -> Oid {
        &[]
    }

    fn endorse(&self, _evidence: &Evidence<'_>) -> Result<Option<PlatformClaims>, String> {
        Ok(None)
    }
}

fn identify(
    endorser: impl Endorser + 'static,
    document: &[u8],
    nonce: &[u8],
) -> Result<Identified, String> {
    let zero = Measurement {
        expected: vec![0; 32],
        warn_only: false,
    };
    let policy = Policy::new(BTreeMap::from([(15, zero)])).unwrap();
    vtpm::Validator::new(Arc::new(policy), Arc::new(endorser))
        .identify(document, nonce)
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
        // TPMT_PUBLIC starts with the template, as far as its unique field
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
fn an_index_is_written_for_the_paravisor_and_read_again() {
    let cloud = CloudTpm::start();
    let mut tpm = Tpm::open(&cloud.location()).unwrap();
    assert_eq!(tpm.nv(hcl::USER_DATA_INDEX).unwrap(), None);
    for byte in [1, 2] {
        let data = [byte; hcl::USER_DATA_LEN];
        tpm.write_nv(hcl::USER_DATA_INDEX, &data).unwrap();
        assert_eq!(tpm.nv(hcl::USER_DATA_INDEX).unwrap().unwrap(), data);
    }
    drop(tpm);
    let public = cloud.tpm.tool("tpm2_nvreadpublic", &["0x1400002"]);
    assert!(public.contains("ownerwrite|ownerread") && public.contains("size: 64"));
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

/// The firmware of 2023 labels the key with another operation than that of today.
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
            assert!(error.contains("other runtime data"), "{name}: {error}");
        }
    }
}
