//! `azure-sev-snp`: the paravisor's report in the TPM, the chip's certificate from Azure's service; an authority of the tests has
//! signed the certificate.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hardware::snp::chain::Fetched;
use hardware::snp::report::Report;
use hardware::snp::tcb::Product;
use hardware::{Cause, Unavailable};
use serde_json::{Value, json};
use support::foreign::rust_crate;
use verifier::azure_sev_snp::{AzureSnpMachine, VARIANT};
use verifier::prepared::Prepared;
use verifier::sources::{Sources, offline};
use verifier::{Evidence, Issuer, Policy, Validator, hcl, vtpm};

use crate::cloud_tpm::{CloudTpm, NONCE, USER_DATA, hcl_report, runtime_data};
use crate::forged_snp::{CHIP, Hierarchy, correct_report};
use crate::host::Host;
use crate::meeting::{Correct, assert_no_replay, property, prove, proven, refused};

/// REPORT_DATA in the report of the paravisor.
const REPORT_DATA: std::ops::Range<usize> = 32 + 0x50..32 + 0x90;

/// Makes the report of the paravisor one with a report of the chip, which the chip has signed after a change.
fn sign(report: &mut [u8], change: fn(&mut [u8])) {
    let mut of_chip = correct_report();
    of_chip[0x50..0x90].copy_from_slice(&report[REPORT_DATA]);
    change(&mut of_chip);
    Hierarchy::get().sign(&mut of_chip);
    report[32..32 + 1184].copy_from_slice(&of_chip);
}

pub fn pem(name: &str) -> String {
    let der = Hierarchy::get().certificate(name);
    let text = STANDARD.encode(&der);
    format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
}

pub struct Machine {
    pub cloud: CloudTpm,
    host: Host,
}

impl Machine {
    /// Starts a machine whose chip signs its report after `change`; `after` alters the stored report.
    pub fn start(change: fn(&mut [u8]), after: fn(&mut Vec<u8>)) -> Machine {
        let cloud = CloudTpm::azure(|report| {
            sign(report, change);
            after(report);
        });
        let host = Host::start();
        let machine = Machine { cloud, host };
        machine.certify(&pem("vcek"));
        machine
    }

    /// Makes Azure's service return this certificate of the chip.
    pub fn certify(&self, vcek: &str) {
        let answer = json!({"vcekCert": vcek, "certificateChain": pem("ask") + &pem("ark"), "tcbm": "DB18000000000104"});
        let request = "GET /metadata/THIM/amd/certification";
        self.host.set(request, answer.to_string().as_bytes());
    }

    pub fn issuer(&self) -> Arc<dyn Issuer> {
        let machine = Arc::new(Prepared::new(AzureSnpMachine::new(self.host.url())));
        Arc::new(vtpm::TpmIssuer::new(self.cloud.location(), None, machine))
    }

    fn refusal(&self, further: &Value) -> String {
        let document = self.issuer().issue(USER_DATA, NONCE).unwrap();
        refused(&judge(further, &offline()).unwrap(), &document)
    }
}

fn policy(further: &Value) -> Result<Policy, String> {
    let mut policy =
        json!({"exceptions": ["any-image"], "measurements": {"15": {"expected": "00".repeat(32)}}});
    for (name, value) in further.as_object().unwrap() {
        policy[name] = value.clone();
    }
    Policy::from_json(&policy.to_string()).map_err(|error| error.to_string())
}

/// Returns the validator under the root of the tests, unless the policy names another one.
pub fn judge(further: &Value, sources: &Arc<dyn Sources>) -> Result<Arc<dyn Validator>, String> {
    let mut further = further.clone();
    if further["amdRootKey"]
        .as_str()
        .unwrap_or_default()
        .is_empty()
    {
        further["amdRootKey"] = pem("ark").into();
    }
    let made = VARIANT.validator_for(policy(&further)?, sources);
    made.map_err(|error| error.to_string())
}

/// Returns a correct machine.
pub fn correct() -> Correct {
    let machine = Machine::start(|_| (), |_| ());
    let policy = json!({"amdRootKey": pem("ark"), "snp": {"idKeys": ["cc".repeat(48)]}});
    Correct::new(&VARIANT, machine.issuer(), policy, machine)
}

#[test]
fn a_machine_is_proved_by_the_report_of_its_chip() {
    let machine = Machine::start(|_| (), |_| ());
    prove(machine.issuer(), judge(&json!({}), &offline()).unwrap()).unwrap();
    let requests = machine.host.requests();
    assert_eq!(requests.len(), 1, "the certificate is asked for once");
    assert!(requests[0].contains("\nmetadata: true\n"));
    let document = machine.issuer().issue(USER_DATA, NONCE).unwrap();
    let judge = judge(&json!({}), &offline()).unwrap();
    let claims = proven(&judge, &document);
    assert_eq!(claims.technology, "AMD SEV-SNP (Milan)");
    assert_eq!(
        claims.bound,
        ["attestation key: runtime data in REPORT_DATA"]
    );
    assert_eq!(property(&claims, "secure-boot"), Some("true"));
    assert_no_replay(&judge, &document);
    // AMD's root did not sign this
    let amd = VARIANT
        .validator_for(policy(&json!({})).unwrap(), &offline())
        .unwrap();
    let error = refused(&amd, &document);
    assert!(error.contains("does not lead to the root"), "{error}");
}

/// Returns the certificate of the chip, as AMD's service does.
struct OfAmd;

impl Sources for OfAmd {
    fn snp_certificates(
        &self,
        report: &Report,
        product: Product,
    ) -> Result<Arc<Fetched>, Unavailable> {
        assert_eq!((report.chip_id, product), (CHIP, Product::Milan));
        let der = |name| Hierarchy::get().certificate(name).to_vec();
        Ok(Arc::new(Fetched {
            leaf: Some(der("vcek")),
            intermediate: der("ask"),
            revoked: Err(Cause::Unreachable.because("nobody answers")),
        }))
    }
}

#[test]
fn a_certificate_that_the_machine_lacks_is_fetched() {
    let machine = Machine::start(|_| (), |_| ());
    machine
        .host
        .set("GET /metadata/THIM/amd/certification", b"{}");
    let error = machine.refusal(&json!({}));
    assert!(
        error.contains("fetches no certificates of AMD's chips"),
        "{error}"
    );
    let sources: Arc<dyn Sources> = Arc::new(OfAmd);
    prove(machine.issuer(), judge(&json!({}), &sources).unwrap()).unwrap();
}

#[test]
fn evidence_with_one_fault_is_refused_by_name() {
    let unchanged: fn(&mut [u8]) = |_| ();
    let as_is: fn(&mut Vec<u8>) = |_| ();
    type Case = (fn(&mut [u8]), fn(&mut Vec<u8>), &'static str);
    let cases: [Case; 9] = [
        (unchanged, |report| report[1250] ^= 1, "other runtime data"),
        (|report| report[0x50] ^= 1, as_is, "other runtime data"),
        (|report| report[0x8f] ^= 1, as_is, "other runtime data"),
        (
            unchanged,
            |report| {
                *report = hcl_report(&runtime_data(&[0xab; 256]));
                sign(report, |_| ());
            },
            "not the HCLAkPub",
        ),
        (
            unchanged,
            |report| report[32 + 0x90] ^= 1,
            "not signed by the key",
        ),
        (|report| report[0xa] |= 8, as_is, "allows debugging"),
        (|report| report[0x1a0] ^= 1, as_is, "of another chip"),
        (|report| report[0x30] = 1, as_is, "VMPL 1"),
        (|report| report[0x48] |= 4, as_is, "signed by a VLEK"),
    ];
    for (change, after, why) in cases {
        let error = Machine::start(change, after).refusal(&json!({}));
        assert!(error.contains(why), "{error}, expected {why}");
    }
    let machine = Machine::start(unchanged, |report| report[1224] = 4);
    let error = machine
        .issuer()
        .issue(USER_DATA, NONCE)
        .unwrap_err()
        .to_string();
    assert!(error.contains("not of SEV-SNP"), "{error}");
}

#[test]
fn what_a_policy_of_the_old_system_demands_is_read_and_written() {
    let digest = "cc".repeat(48);
    let text = format!(
        r#"{{"measurements":{{"15":{{"expected":"{}","warnOnly":false}}}},"bootloaderVersion":4,"teeVersion":1,"snpVersion":24,"microcodeVersion":219,"firmwareSignerConfig":{{"acceptedKeyDigests":["{digest}"],"enforcementPolicy":"MAAFallback","maaURL":"https://x.attest.azure.net"}},"amdRootKey":"","amdSigningKey":""}}"#,
        "00".repeat(32)
    );
    let written = cli::trust::policy::text(&Policy::from_json(&text).unwrap());
    let [read, written] = [&text, &written].map(|it| serde_json::from_str::<Value>(it).unwrap());
    assert_eq!(written, read);
    let machine = Machine::start(|_| (), |_| ());
    let document = machine.issuer().issue(USER_DATA, NONCE).unwrap();
    let mut all = read.clone();
    all["amdRootKey"] = pem("ark").into();
    all["snp"] = json!({"launchMeasurements": ["aa".repeat(48)], "chips": ["c5".repeat(64)], "hostData": ["bb".repeat(32)], "minimumGuestSvn": 7, "refuseSmt": true});
    let policy = policy(&all).unwrap();
    assert_eq!(
        Policy::from_json(&cli::trust::policy::text(&policy)).unwrap(),
        policy
    );
    judge(&all, &offline())
        .unwrap()
        .judge(&Evidence::new(&document, NONCE))
        .unwrap();
    let other = |policy: &str| json!({"firmwareSignerConfig": {"acceptedKeyDigests": ["ee".repeat(48)], "enforcementPolicy": policy}});
    judge(&other("WarnOnly"), &offline())
        .unwrap()
        .judge(&Evidence::new(&document, NONCE))
        .unwrap();
    for (demand, why) in [
        (
            json!({"bootloaderVersion": 5}),
            "bootloader is 4, below the minimum 5",
        ),
        (json!({"teeVersion": 2}), "tee is 1, below the minimum 2"),
        (json!({"snpVersion": 25}), "snp is 24, below the minimum 25"),
        (
            json!({"microcodeVersion": 220}),
            "microcode is 219, below the minimum 220",
        ),
        (other("Equal"), "firmwareSignerConfig does not name"),
        (
            other("MAAFallback"),
            "maaURL does not name the service to ask",
        ),
        (
            json!({"snp": {"launchMeasurements": ["00".repeat(48)]}}),
            "MEASUREMENT is",
        ),
        (
            json!({"snp": {"chips": ["00".repeat(64)]}}),
            "is not accepted",
        ),
        (
            json!({"snp": {"hostData": ["00".repeat(32)]}}),
            "HOST_DATA is",
        ),
        (json!({"snp": {"minimumGuestSvn": 8}}), "GUEST_SVN is 7"),
    ] {
        let error = machine.refusal(&demand);
        assert!(error.contains(why), "{error}, expected {why}");
    }
    for (demand, why) in [
        (
            json!({"snpVersion": "latest"}),
            "snpVersion: \"latest\" is not a version",
        ),
        (json!({"snpVersion": 256}), "256"),
        (json!({"snp": {"chip": []}}), "unknown field"),
        (json!({"snp": {"chips": ["00"]}}), "a chip has 128"),
        (json!({"snp": {"chips": []}}), "is empty or null"),
        (
            json!({"snp": {"launchMeasurements": []}}),
            "is empty or null",
        ),
        (json!({"snp": {"hostData": []}}), "is empty or null"),
        (
            json!({"firmwareSignerConfig": {"acceptedKeyDigests": ["00"], "enforcementPolicy": "Equal"}}),
            "expected 96 hexadecimal digits",
        ),
        (
            json!({"firmwareSignerConfig": {"enforcementPolicy": "Never"}}),
            "Never",
        ),
        (
            json!({"amdRootKey": "another"}),
            "amdRootKey: expected a certificate",
        ),
    ] {
        let error = judge(&demand, &offline()).err().unwrap();
        assert!(error.contains(why), "{error}, expected {why}");
    }
}

/// The certificate in the same file belongs to another chip, so the signature of this report cannot be verified.
#[test]
fn a_genuine_report_of_azure_is_read_and_the_certificate_of_another_chip_refused() {
    let folder = rust_crate("az_cvm_vtpm", "az-cvm-vtpm").join("test");
    let stored = std::fs::read(folder.join("hcl-report-snp.bin")).unwrap();
    let report = hcl::HclReport::parse(&stored).unwrap();
    let hcl::HardwareReport::Snp(of_chip) = report.hardware else {
        panic!("no report of SEV-SNP")
    };
    let of_chip = Report::parse(of_chip).unwrap();
    assert_eq!((of_chip.version, of_chip.vmpl), (2, 0));
    let key = hcl::RuntimeData::parse(report.runtime_data)
        .unwrap()
        .attestation_key;
    hcl::RuntimeData::verify(report.runtime_data, &of_chip.report_data, &key).unwrap();
    let pem = std::fs::read(folder.join("certs.pem")).unwrap();
    use rustls::pki_types::pem::PemObject;
    let certificates = rustls::pki_types::CertificateDer::pem_slice_iter(&pem);
    let leaf = certificates
        .map(|one| one.unwrap())
        .find(|one| hardware::snp::certificate::ChipCertificate::parse(one).is_ok())
        .unwrap();
    let amd = rust_crate("sev", "sev").join("src/certs/snp/builtin/milan");
    let amd =
        |name: &str| rustls::pki_types::CertificateDer::from_pem_file(amd.join(name)).unwrap();
    let (ask, ark) = (amd("ask.pem"), amd("ark.pem"));
    let chain = hardware::snp::chain::Chain {
        leaf: &leaf,
        intermediate: &ask,
        root: &ark,
        revoked: None,
    };
    // 2024-01-01
    let time = std::time::Duration::from_secs(1_704_067_200);
    let time = rustls::pki_types::UnixTime::since_unix_epoch(time);
    let demands = hardware::snp::requirements::SnpRequirements::default();
    let refused = hardware::snp::verify(&of_chip, &chain, &demands, time);
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("not signed by the key"), "{error}");
}
