//! `aws-sev-snp` and `gcp-sev-snp`: a report that a chip of the tests has signed, under a root that the policy names (`amdRootKey`).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hardware::snp::chain::Fetched;
use hardware::snp::report::{Report, ReportSigner};
use hardware::snp::tcb::Product;
use hardware::{Cause, Unavailable};
use serde_json::{Value, json};
use verifier::aws_hypervisor::Documents;
use verifier::aws_sev_snp::AwsSnpMachine;
use verifier::gcp_sev_snp::GoogleSnpMachine;
use verifier::snp::Reporter;
use verifier::sources::Sources;
use verifier::{Evidence, IssueError, Issuer, Policy, Variant, aws_sev_snp, gcp_sev_snp, vtpm};

use crate::authority::Authority;
use crate::aws_nitro_tpm::{self, Hypervisor};
use crate::cloud_tpm::{CloudTpm, NONCE, USER_DATA};
use crate::forged_snp::{CLOUD, Hierarchy, correct_report, sign_by_the_cloud};
use crate::gcp_sev_es::{self, events, good};
use crate::meeting::{Correct, assert_no_replay, prove, proven, refused, validator};

/// GUIDs of the certificate table: VCEK, VLEK, ASK.
const VCEK: u128 = 0x63da758d_e664_4564_adc5_f4b93be8accd;
const VLEK: u128 = 0xa8074bc2_a25a_483e_aae6_39c045a0b8a1;
pub const ASK: u128 = 0x4ab7b379_bbac_4fe4_a02f_05aef327c782;

pub fn pem(name: &str) -> String {
    let text = STANDARD.encode(Hierarchy::get().certificate(name));
    format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
}

/// Signs a report after a change, and returns it with a table of these entries.
pub struct Chip {
    pub change: fn(&mut [u8]),
    pub table: Vec<(u128, &'static str)>,
}

impl Chip {
    pub fn new(change: fn(&mut [u8])) -> Arc<Chip> {
        let table = vec![(VCEK, "vcek"), (ASK, "ask")];
        Arc::new(Chip { change, table })
    }
}

impl Reporter for Chip {
    fn report(&self, report_data: &[u8; 64]) -> Result<(Vec<u8>, Vec<u8>), IssueError> {
        let mut report = correct_report();
        report[0x50..0x90].copy_from_slice(report_data);
        (self.change)(&mut report);
        Hierarchy::get().sign(&mut report);
        let (mut head, mut contents) = (vec![], vec![]);
        for (guid, name) in &self.table {
            let content = Hierarchy::get().certificate(name);
            let offset = 24 * (self.table.len() + 1) + contents.len();
            head.extend_from_slice(&guid.to_be_bytes());
            head.extend_from_slice(&(offset as u32).to_le_bytes());
            head.extend_from_slice(&(content.len() as u32).to_le_bytes());
            contents.extend_from_slice(&content);
        }
        Ok((report, [head, vec![0; 24], contents, vec![0; 64]].concat()))
    }
}

pub fn aws(cloud: &CloudTpm, chip: Arc<Chip>) -> Arc<dyn Issuer> {
    aws_with(cloud, chip, None)
}

/// The same with documents of AWS's hypervisor.
pub fn aws_with(
    cloud: &CloudTpm,
    chip: Arc<Chip>,
    documents: Option<Arc<dyn Documents>>,
) -> Arc<dyn Issuer> {
    let machine = Arc::new(AwsSnpMachine::new(chip, documents));
    Arc::new(vtpm::TpmIssuer::new(cloud.location(), None, machine))
}

fn google(machine: &gcp_sev_es::Machine, chip: Arc<Chip>) -> Arc<dyn Issuer> {
    let log = Some(machine.cloud.path("log").into());
    let location = machine.cloud.location();
    let machine = Arc::new(GoogleSnpMachine::new(machine.host.url(), chip));
    Arc::new(vtpm::TpmIssuer::new(location, log, machine))
}

/// The root of the tests, as a policy of Constellation names one.
pub fn ours() -> Value {
    json!({"bootloaderVersion": 4, "teeVersion": 1, "snpVersion": 24, "microcodeVersion": 219, "amdRootKey": pem("ark"), "amdSigningKey": ""})
}

pub fn with(mut policy: Value, further: &Value) -> Value {
    for (name, value) in further.as_object().unwrap() {
        policy[name] = value.clone();
    }
    policy
}

fn refusal(variant: &Variant, policy: &Value, document: &[u8]) -> String {
    refused(&validator(variant, policy), document)
}

/// Returns a correct machine of AWS.
pub fn correct_of_aws() -> Correct {
    let cloud = CloudTpm::start();
    let issuer = aws(&cloud, Chip::new(|_| ()));
    Correct::new(&aws_sev_snp::VARIANT, issuer, ours(), cloud)
}

/// Returns a correct machine of AWS whose hypervisor signs documents.
pub fn correct_of_aws_with_documents() -> Correct {
    let (cloud, authority) = (CloudTpm::start(), Authority::new());
    let hypervisor = Hypervisor::new(&authority, &aws_nitro_tpm::good(), |_| ());
    let issuer = aws_with(&cloud, Chip::new(|_| ()), Some(Arc::new(hypervisor)));
    let policy = with(ours(), &aws_nitro_tpm::demands(&authority, "0"));
    Correct::new(&aws_sev_snp::VARIANT, issuer, policy, cloud)
}

/// Returns a correct machine of Google.
pub fn correct_of_google() -> Correct {
    let authority = Authority::new();
    let machine = gcp_sev_es::Machine::start(&events("1", 4));
    machine.certify(&authority, &good());
    let policy = with(ours(), &json!({"cloud": {"roots": [authority.root_pem()]}}));
    let issuer = google(&machine, Chip::new(|_| ()));
    Correct::new(&gcp_sev_snp::VARIANT, issuer, policy, machine)
}

#[test]
fn a_machine_of_aws_is_proved_by_the_report_over_its_key() {
    let cloud = CloudTpm::start();
    let issuer = aws(&cloud, Chip::new(|_| ()));
    prove(issuer.clone(), validator(&aws_sev_snp::VARIANT, &ours())).unwrap();
    let document = issuer.issue(USER_DATA, NONCE).unwrap();
    let judge = validator(&aws_sev_snp::VARIANT, &ours());
    let claims = proven(&judge, &document);
    assert_eq!(claims.technology, "AMD SEV-SNP (Milan)");
    assert_eq!(claims.bound, ["attestation key: SHA-512 in REPORT_DATA"]);
    assert_no_replay(&judge, &document);
    // Constellation's fields, base64 of PEM
    let read: Value = serde_json::from_slice(&document).unwrap();
    let info = STANDARD.decode(read["InstanceInfo"].as_str().unwrap());
    let info: Value = serde_json::from_slice(&info.unwrap()).unwrap();
    let text = |name: &str| STANDARD.decode(info[name].as_str().unwrap()).unwrap();
    assert!(text("ReportSigner").starts_with(b"-----BEGIN CERTIFICATE-----\n"));
    assert_eq!(text("AttestationReport").len(), 0x4a0);
    assert!(info["Azure"].is_null() && info["GCP"].is_null());
    for (policy, why) in [
        (json!({}), "does not lead to the root"),
        (
            with(ours(), &json!({"amdRootKey": pem("vcek")})),
            "does not lead to the root",
        ),
        (
            with(ours(), &json!({"bootloaderVersion": 5})),
            "bootloader is 4, below the minimum 5",
        ),
        (
            with(ours(), &json!({"teeVersion": 2})),
            "tee is 1, below the minimum 2",
        ),
        (
            with(ours(), &json!({"snpVersion": 25})),
            "snp is 24, below the minimum 25",
        ),
        (
            with(ours(), &json!({"microcodeVersion": 220})),
            "microcode is 219, below the minimum 220",
        ),
        (
            with(ours(), &json!({"snp": {"chips": ["00".repeat(64)]}})),
            "is not accepted",
        ),
    ] {
        let error = refusal(&aws_sev_snp::VARIANT, &policy, &document);
        assert!(error.contains(why), "{error}, expected {why}");
    }
}

/// Machines on shared hosts have the key of the cloud. Machines on dedicated hosts have the key of the chip.
#[test]
fn a_machine_of_aws_is_proved_by_the_key_of_the_cloud() {
    let cloud = CloudTpm::start();
    let table = vec![(VLEK, "vlek"), (ASK, "asvk")];
    let change = sign_by_the_cloud;
    let issuer = aws(&cloud, Arc::new(Chip { change, table }));
    let policy = |cloud: &str| with(ours(), &json!({"snp": {"clouds": [cloud]}}));
    let variant = &aws_sev_snp::VARIANT;
    prove(issuer.clone(), validator(variant, &policy(CLOUD))).unwrap();
    let document = issuer.issue(USER_DATA, NONCE).unwrap();
    let claims = proven(&validator(variant, &policy(CLOUD)), &document);
    assert_eq!(claims.chip, None);
    let error = refusal(variant, &policy("CN=elsewhere"), &document);
    assert!(error.contains("the cloud of the VLEK is"), "{error}");
    // the certificate of one chip with the report of the cloud
    let table = vec![(VLEK, "vcek"), (ASK, "asvk")];
    let document = aws(&cloud, Arc::new(Chip { change, table })).issue(USER_DATA, NONCE);
    let error = refusal(variant, &policy(CLOUD), &document.unwrap());
    assert!(
        error.contains("signed by a VLEK, but the certificate"),
        "{error}"
    );
}

/// A change of a report before it is signed.
type Change = fn(&mut [u8]);

#[test]
fn a_report_with_one_fault_is_refused_by_name() {
    let cloud = CloudTpm::start();
    let cases: [(Change, &str); 6] = [
        (|report| report[0x50] ^= 1, "made for another one"),
        (|report| report[0x8f] ^= 1, "made for another one"),
        (|report| report[0xa] |= 8, "allows debugging"),
        (|report| report[0x1a0] ^= 1, "of another chip"),
        (|report| report[0x30] = 1, "VMPL 1"),
        (|report| report[0x189] = 0x11, "no root of a Genoa counts"),
    ];
    for (change, why) in cases {
        let document = aws(&cloud, Chip::new(change)).issue(USER_DATA, NONCE);
        let error = refusal(&aws_sev_snp::VARIANT, &ours(), &document.unwrap());
        let swapped = why.contains("Genoa") && error.contains("is of a Genoa");
        assert!(swapped || error.contains(why), "{error}, expected {why}");
    }
}

/// A program that fetches, with this list of AMD's or the reason why it has none.
struct OfAmd(Result<Vec<u8>, Unavailable>);

impl Sources for OfAmd {
    fn fetches(&self) -> bool {
        true
    }

    fn snp_authority(&self, _: Product, _: ReportSigner) -> Result<Arc<Fetched>, Unavailable> {
        Ok(Arc::new(Fetched {
            leaf: None,
            intermediate: Hierarchy::get().certificate("ask").to_vec(),
            revoked: self.0.clone(),
        }))
    }
}

#[test]
fn a_program_that_fetches_demands_the_list_of_revoked_certificates() {
    let cloud = CloudTpm::start();
    let document = aws(&cloud, Chip::new(|_| ())).issue(USER_DATA, NONCE);
    let document = document.unwrap();
    let judge = |further: Value, list: Result<Vec<u8>, Unavailable>| {
        let mut policy = with(ours(), &further);
        policy["measurements"] = json!({"15": {"expected": "00".repeat(32)}});
        let sources: Arc<dyn Sources> = Arc::new(OfAmd(list));
        let policy = Policy::from_json(&policy.to_string()).unwrap();
        let judge = aws_sev_snp::VARIANT
            .validator_for(policy, &sources)
            .unwrap();
        let judged = judge.judge(&Evidence::new(&document, NONCE));
        judged.map(drop).map_err(|error| error.to_string())
    };
    let list = |serials: &[&str]| {
        let (from, until) = ("20250101000000Z", "20490101000000Z");
        Hierarchy::get().list("ark", serials, from, until)
    };
    let optional = || json!({"snp": {"revocationList": "optional"}});
    judge(json!({}), Ok(list(&[]))).unwrap();
    let why = judge(json!({}), Err(Cause::Unreachable.because("nobody answers"))).unwrap_err();
    assert!(
        why.contains("revoked certificates is missing") && why.contains("nobody answers"),
        "{why}"
    );
    let required = json!({"snp": {"revocationList": "required"}});
    assert!(judge(required, Err(Cause::Unreachable.because(""))).is_err());
    judge(
        optional(),
        Err(Cause::Unreachable.because("nobody answers")),
    )
    .unwrap();
    // the list that is there counts, whatever the policy says
    for policy in [json!({}), optional()] {
        let why = judge(policy, Ok(list(&["09"]))).unwrap_err();
        assert!(why.contains("is revoked"), "{why}");
    }
}

/// Counts how often it is asked for a chip's certificate, and has none.
#[derive(Default)]
pub struct Asked(pub AtomicUsize);

impl Sources for Asked {
    fn snp_certificates(&self, _: &Report, _: Product) -> Result<Arc<Fetched>, Unavailable> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Err(Cause::Unreachable.because("nothing is here"))
    }
}

/// An attacker can write a report that names any chip.
#[test]
fn the_certificate_of_a_chip_is_fetched_only_if_it_could_lead_to_acceptance() {
    let cloud = CloudTpm::start();
    let nothing: Change = |_| ();
    let digits = |byte: &str, count| json!([byte.repeat(count)]);
    let signer = json!({"acceptedKeyDigests": digits("11", 48), "enforcementPolicy": "equal"});
    let of_azure =
        json!({"enforcementPolicy": "MAAFallback", "maaURL": "https://x.weu.attest.azure.net"});
    for (change, further, why) in [
        (nothing, json!({}), "nothing is here"),
        (nothing, json!({"snpVersion": 25}), "below the minimum 25"),
        (
            nothing,
            json!({"snp": {"chips": digits("00", 64)}}),
            "is not accepted",
        ),
        (
            nothing,
            json!({"snp": {"launchMeasurements": digits("11", 48)}}),
            "MEASUREMENT is",
        ),
        (
            nothing,
            json!({"snp": {"idKeys": digits("11", 48)}}),
            "ID_KEY_DIGEST is",
        ),
        (
            nothing,
            json!({"firmwareSignerConfig": signer}),
            "which firmwareSignerConfig does not name",
        ),
        (
            nothing,
            json!({"firmwareSignerConfig": of_azure}),
            "knows only machines of Azure",
        ),
        (
            nothing,
            json!({"snp": {"clouds": ["CN=somewhere"]}}),
            "the cloud of the VLEK is none",
        ),
        (|it| it[0xa] |= 8, json!({}), "allows debugging"),
        (|it| it[0x30] = 1, json!({}), "VMPL 1"),
        (|it| it[0x1a0..0x1e0].fill(0), json!({}), "masks the chip"),
        (|it| it[0x50] ^= 1, json!({}), "made for another one"),
    ] {
        let table = vec![(ASK, "ask")];
        let document = aws(&cloud, Arc::new(Chip { change, table })).issue(USER_DATA, NONCE);
        let mut policy = with(ours(), &further);
        policy["measurements"] = json!({"15": {"expected": "00".repeat(32)}});
        let policy = Policy::from_json(&policy.to_string()).unwrap();
        let asked = Arc::new(Asked::default());
        let sources: Arc<dyn Sources> = asked.clone();
        let judge = aws_sev_snp::VARIANT
            .validator_for(policy, &sources)
            .unwrap();
        let error = refused(&judge, &document.unwrap());
        assert!(error.contains(why), "{error}, expected {why}");
        let times = usize::from(why == "nothing is here");
        assert_eq!(asked.0.load(Ordering::SeqCst), times, "{why}");
    }
}

#[test]
fn what_the_host_does_not_give_is_named() {
    let cloud = CloudTpm::start();
    let without = |change: fn(&mut [u8]), table: Vec<(u128, &'static str)>| {
        aws(&cloud, Arc::new(Chip { change, table })).issue(USER_DATA, NONCE)
    };
    let document = without(|_| (), vec![(ASK, "ask")]).unwrap();
    let error = refusal(&aws_sev_snp::VARIANT, &ours(), &document);
    assert!(error.contains("fetches no certificates"), "{error}");
    let document = without(|_| (), vec![(VCEK, "vcek")]).unwrap();
    let error = refusal(&aws_sev_snp::VARIANT, &ours(), &document);
    assert!(error.contains("accepts no root of a Milan"), "{error}");
    // Constellation's member has the certificate that is missing
    let policy = with(ours(), &json!({"amdSigningKey": pem("ask")}));
    let judge = validator(&aws_sev_snp::VARIANT, &policy);
    judge.judge(&Evidence::new(&document, NONCE)).unwrap();
    // signed by a VLEK, says the report
    let error = without(|report| report[0x48] |= 4, vec![(VCEK, "vcek")]).unwrap_err();
    assert!(
        error.to_string().contains("certificate of the VLEK"),
        "{error}"
    );
    let document = without(
        |report| report[0x48] |= 4,
        vec![(VLEK, "vcek"), (ASK, "ask")],
    );
    let error = refusal(&aws_sev_snp::VARIANT, &ours(), &document.unwrap());
    assert!(
        error.contains("signed by a VLEK, but the certificate"),
        "{error}"
    );
}

/// Another authority comes before or after the right one, from the policy or from the machine.
#[test]
fn the_refusal_is_the_one_under_the_right_authority() {
    let cloud = CloudTpm::start();
    for (of_policy, of_machine) in [("asvk", "ask"), ("ask", "asvk")] {
        let (change, table): (Change, _) = (|_| (), vec![(VCEK, "vcek"), (ASK, of_machine)]);
        let document = aws(&cloud, Arc::new(Chip { change, table })).issue(USER_DATA, NONCE);
        let document = document.unwrap();
        let policy = |version: u8| {
            with(
                ours(),
                &json!({"amdSigningKey": pem(of_policy), "snpVersion": version}),
            )
        };
        let judge = validator(&aws_sev_snp::VARIANT, &policy(24));
        judge.judge(&Evidence::new(&document, NONCE)).unwrap();
        let error = refusal(&aws_sev_snp::VARIANT, &policy(25), &document);
        assert!(
            error.contains("below the minimum 25"),
            "{of_policy}: {error}"
        );
    }
}

#[test]
fn a_machine_of_google_is_proved_by_its_report_and_its_certificate() {
    let authority = Authority::new();
    let machine = gcp_sev_es::Machine::start(&events("1", 4));
    machine.certify(&authority, &good());
    let policy = with(ours(), &json!({"cloud": {"roots": [authority.root_pem()]}}));
    let issuer = google(&machine, Chip::new(|_| ()));
    let variant = &gcp_sev_snp::VARIANT;
    prove(issuer.clone(), validator(variant, &policy)).unwrap();
    let document = issuer.issue(USER_DATA, NONCE).unwrap();
    let claims = proven(&validator(variant, &policy), &document);
    assert_eq!(claims.bound.len(), 3);
    assert!(claims.properties.iter().any(|one| one.name == "zone"));
    for (policy, why) in [
        (ours(), "leads to none of the accepted roots"),
        (
            json!({"cloud": policy["cloud"]}),
            "does not lead to the root",
        ),
        (
            with(policy.clone(), &json!({"snpVersion": 25})),
            "snp is 24, below the minimum 25",
        ),
    ] {
        let error = refusal(variant, &policy, &document);
        assert!(error.contains(why), "{error}, expected {why}");
    }
    // a report for another connection, which the TPM quotes in this one
    let replayed = google(&machine, Chip::new(|report| report[0x50] ^= 1));
    let error = refusal(variant, &policy, &replayed.issue(USER_DATA, NONCE).unwrap());
    assert!(error.contains("made for another one"), "{error}");
}

/// The TPM of a machine without SEV-SNP, with the report of another machine.
#[test]
fn a_tpm_whose_host_does_not_say_sev_snp_is_refused() {
    let authority = Authority::new();
    let machine = gcp_sev_es::Machine::start(&events("1", 2));
    machine.certify(&authority, &good());
    let policy = with(ours(), &json!({"cloud": {"roots": [authority.root_pem()]}}));
    let document = google(&machine, Chip::new(|_| ())).issue(USER_DATA, NONCE);
    let error = refusal(&gcp_sev_snp::VARIANT, &policy, &document.unwrap());
    assert!(
        error.contains("AMD SEV-ES, expected AMD SEV-SNP"),
        "{error}"
    );
}
