//! `azure-tdx`: the paravisor's report in the TPM, the quote from Azure's service; an authority of the tests has signed the quote.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use common::at::At;
use hardware::tdx::TdxCollateral;
use hardware::tdx::quote::TdxQuote;
use hardware::{Cause, Unavailable};
use serde_json::{Value, json};
use support::mutation::mutations;
use verifier::azure_tdx::{AzureTdxMachine, VARIANT, validator};
use verifier::prepared::Prepared;
use verifier::sources::Sources;
use verifier::{Evidence, Issuer, Policy, Validator, hcl, td, vtpm};

use crate::cloud_tpm::{CloudTpm, NONCE, USER_DATA, hcl_report, runtime_data};
use crate::forged_tdx::{Parts, Signed};
use crate::host::Host;
use crate::meeting::{Correct, Sample, assert_no_replay, policy, property, prove, proven, refused};

/// A time at which the collateral of the tests is valid.
const JULY_2025: u64 = 1_751_328_000;
/// REPORTDATA in a TDREPORT, and the TDREPORT in the report of the paravisor.
const REPORT_DATA: usize = 32 + 128;

/// Returns the collateral of the tests.
pub struct Collected(pub Arc<TdxCollateral>);

impl Sources for Collected {
    fn fetches(&self) -> bool {
        true
    }

    fn tdx_collateral_at_hand(&self, _quote: &TdxQuote<'_>) -> Option<Arc<TdxCollateral>> {
        Some(self.0.clone())
    }

    fn tdx_collateral(&self, _quote: &TdxQuote<'_>) -> Result<Arc<TdxCollateral>, Unavailable> {
        Ok(self.0.clone())
    }
}

/// Makes the report of the paravisor one of TDX.
pub fn of_tdx(report: &mut [u8]) {
    report.copy_within(32 + 0x50..32 + 0x90, REPORT_DATA);
    report[1224] = 4;
}

/// A machine, with the parts of its quote.
pub struct Machine {
    pub cloud: CloudTpm,
    host: Host,
    pub signed: Signed,
}

impl Machine {
    pub fn start(parts: &Parts, alter: impl Fn(&mut Vec<u8>)) -> Machine {
        let cloud = CloudTpm::azure(|report| {
            of_tdx(report);
            alter(report);
        });
        let report = hcl::stored(&cloud.location()).unwrap();
        let report_data = report[REPORT_DATA..REPORT_DATA + 64].try_into().unwrap();
        let signed = parts.sign(&report_data);
        let host = Host::start();
        let quote = URL_SAFE_NO_PAD.encode(&signed.quote);
        host.set(
            "POST /acc/tdquote",
            json!({"quote": quote}).to_string().as_bytes(),
        );
        Machine {
            cloud,
            host,
            signed,
        }
    }

    pub fn issuer(&self) -> Arc<dyn Issuer> {
        let machine = Arc::new(Prepared::new(AzureTdxMachine::new(self.host.url())));
        Arc::new(vtpm::TpmIssuer::new(self.cloud.location(), None, machine))
    }

    fn validator(&self, further: &Value) -> Arc<dyn Validator> {
        self.judge(self.trusting(&policy(further)))
    }

    /// Returns the policy with Intel's root of the tests.
    pub fn trusting(&self, policy: &Policy) -> Policy {
        self.signed.trusting(policy)
    }

    /// Returns the validator of a policy.
    pub fn judge(&self, policy: Policy) -> Arc<dyn Validator> {
        let collateral = Arc::new(self.signed.collateral.clone());
        judge_with(policy, Arc::new(Collected(collateral)))
    }

    fn refusal(&self, further: &Value) -> String {
        let document = self.issuer().issue(USER_DATA, NONCE).unwrap();
        refused(&self.validator(further), &document)
    }
}

/// Returns the validator of a policy at a time at which the collateral of the tests is valid.
fn judge_with(policy: Policy, sources: Arc<dyn Sources>) -> Arc<dyn Validator> {
    let policy = Arc::new(policy);
    let hardware = td::QuoteJudge::new(&policy, &sources).unwrap();
    Arc::new(At(JULY_2025, Arc::new(validator(policy, hardware))))
}

/// Returns a correct machine with its document.
pub fn machine() -> (Machine, Vec<u8>) {
    let machine = Machine::start(&Parts::default(), |_| ());
    let document = machine.issuer().issue(USER_DATA, NONCE).unwrap();
    (machine, document)
}

/// Returns a correct document with its validator.
pub fn sample() -> Sample {
    let (machine, document) = machine();
    (document, machine.validator(&json!({})))
}

/// Returns a correct machine with collateral of today. Its policy does not know the paravisor.
pub fn correct() -> Correct {
    let machine = Machine::start(&Parts::of_today(), |_| ());
    let collateral = serde_json::to_string(&machine.signed.collateral).unwrap();
    let policy = json!({"intelRootKey": machine.signed.root_in_pem});
    let mut correct = Correct::new(&VARIANT, machine.issuer(), policy, machine);
    correct.collateral = Some(collateral);
    correct
}

#[test]
fn a_machine_is_proved_by_the_quote_of_its_hardware() {
    let machine = Machine::start(&Parts::default(), |_| ());
    prove(machine.issuer(), machine.validator(&json!({}))).unwrap();
    let requests = machine.host.requests();
    assert_eq!(requests.len(), 1, "one quote is enough until the next boot");
    let report = hcl::stored(&machine.cloud.location()).unwrap();
    let tdreport = URL_SAFE_NO_PAD.encode(&report[32..32 + 1024]);
    assert!(requests[0].ends_with(&format!("\n{{\"report\":\"{tdreport}\"}}")));
    assert!(requests[0].contains("\ncontent-type: application/json\n"));
    assert!(requests[0].contains("\nmetadata: true\n"));

    let document = machine.issuer().issue(USER_DATA, NONCE).unwrap();
    let judge = machine.validator(&json!({}));
    let claims = proven(&judge, &document);
    assert_eq!(
        claims.bound,
        ["attestation key: runtime data in REPORTDATA"]
    );
    assert_eq!(property(&claims, "secure-boot"), Some("true"));
    assert_no_replay(&judge, &document);
    // Intel's root did not sign this
    let intel = machine.judge(policy(&json!({})));
    let error = refused(&intel, &document);
    assert!(error.contains("does not lead to the root"), "{error}");
}

#[test]
fn evidence_with_one_fault_is_refused_by_name() {
    let usual = Parts::default;
    for (machine, why) in [
        (
            Machine::start(&usual(), |report| report[1250] ^= 1),
            "other runtime data",
        ),
        (
            Machine::start(&usual(), |report| report[REPORT_DATA] ^= 1),
            "other runtime data",
        ),
        (
            Machine::start(&usual(), |report| report[REPORT_DATA + 63] ^= 1),
            "other runtime data",
        ),
        (
            Machine::start(&usual(), |report| {
                *report = hcl_report(&runtime_data(&[0xab; 256]));
                of_tdx(report);
            }),
            "not the HCLAkPub",
        ),
        (
            Machine::start(
                &Parts {
                    status: "OutOfDate",
                    ..usual()
                },
                |_| (),
            ),
            "OutOfDate",
        ),
        (
            Machine::start(
                &Parts {
                    other_attestation_key: true,
                    ..usual()
                },
                |_| (),
            ),
            "signed",
        ),
    ] {
        let error = machine.refusal(&json!({}));
        assert!(error.contains(why), "{error}, expected {why}");
    }
}

/// Counts requests, and has no collateral.
#[derive(Default)]
struct Asked(AtomicBool);

impl Sources for Asked {
    fn fetches(&self) -> bool {
        true
    }

    fn tdx_collateral(&self, _quote: &TdxQuote<'_>) -> Result<Arc<TdxCollateral>, Unavailable> {
        self.0.store(true, Ordering::SeqCst);
        Err(Cause::Unreachable.because("nothing is here"))
    }
}

#[test]
fn collateral_is_fetched_only_for_a_platform_that_signed_what_meets_the_policy() {
    let usual = Parts::default;
    let forged = Parts {
        other_pck: true,
        ..usual()
    };
    for (parts, demands, why) in [
        (usual(), json!({}), "nothing is here"),
        (forged, json!({}), "is not signed by the platform's key"),
        (usual(), json!({"qeSVN": 65535}), "qeSVN is"),
        (
            usual(),
            json!({"tdx": {"platforms": ["00".repeat(16)]}}),
            "(PPID, platform instance)",
        ),
    ] {
        let machine = Machine::start(&parts, |_| ());
        let document = machine.issuer().issue(USER_DATA, NONCE).unwrap();
        let asked = Arc::new(Asked::default());
        let judge = judge_with(machine.trusting(&policy(&demands)), asked.clone());
        let error = refused(&judge, &document);
        assert!(error.contains(why), "{error}, expected {why}");
        let is_asked = asked.0.load(Ordering::SeqCst);
        assert_eq!(is_asked, why == "nothing is here", "{why}");
    }
}

#[test]
fn a_machine_of_another_variant_of_azure_says_so() {
    let machine = Machine::start(&Parts::default(), |report| report[1224] = 2);
    let error = machine
        .issuer()
        .issue(USER_DATA, NONCE)
        .unwrap_err()
        .to_string();
    assert!(error.contains("not of TDX"), "{error}");
    let cloud = CloudTpm::azure_key();
    let nowhere = Arc::new(Prepared::new(AzureTdxMachine::new(machine.host.url())));
    let issuer = vtpm::TpmIssuer::new(cloud.location(), None, nowhere);
    let error = issuer.issue(USER_DATA, NONCE).unwrap_err().to_string();
    assert!(
        error.contains("no HCL report at the NV index 0x1400001"),
        "{error}"
    );
}

#[test]
fn a_quoting_service_that_gives_no_quote_is_named() {
    let machine = Machine::start(&Parts::default(), |_| ());
    for answer in ["", "{}", r#"{"quote":7}"#, r#"{"quote":"+"}"#] {
        machine.host.set("POST /acc/tdquote", answer.as_bytes());
        let error = machine
            .issuer()
            .issue(USER_DATA, NONCE)
            .unwrap_err()
            .to_string();
        assert!(error.contains("/acc/tdquote: expected a quote"), "{error}");
    }
}

/// The members of a policy of Constellation, in its order.
#[test]
fn what_a_policy_of_the_old_system_demands_is_read_and_written() {
    let hex = |byte: &str, count| byte.repeat(count);
    let (versions, vendor) = (hex("05", 16), "939a7233f79c4ca9940a0db3957f0607");
    let text = format!(
        r#"{{"measurements":{{"15":{{"expected":"{}","warnOnly":false}}}},"qeSVN":0,"pceSVN":0,"teeTCBSVN":"{versions}","qeVendorID":"{vendor}","xfam":"{}","intelRootKey":""}}"#,
        hex("00", 32),
        "e702060000000000",
    );
    let written = cli::trust::policy::text(&Policy::from_json(&text).unwrap());
    let [read, written] = [&text, &written].map(|it| serde_json::from_str::<Value>(it).unwrap());
    assert_eq!(written, read);
    let machine = Machine::start(&Parts::default(), |_| ());
    let quote = TdxQuote::parse(&machine.signed.quote).unwrap();
    let digits = |bytes: &[u8]| {
        bytes
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    let genuine = json!({
        "teeTCBSVN": digits(&quote.body.tee_tcb_svn), "qeVendorID": vendor, "qeSVN": 0,
        "mrSeam": digits(&quote.body.mr_seam).to_uppercase(), "xfam": digits(&quote.body.xfam.to_le_bytes()),
    });
    let document = machine.issuer().issue(USER_DATA, NONCE).unwrap();
    machine
        .validator(&genuine)
        .judge(&Evidence::new(&document, NONCE))
        .unwrap();
    for (demand, why) in [
        (json!({"qeSVN": 65535}), "qeSVN is"),
        (json!({"pceSVN": 65535}), "pceSVN is"),
        (json!({"teeTCBSVN": hex("ff", 16)}), "teeTCBSVN is"),
        (json!({"qeVendorID": hex("00", 16)}), "qeVendorID is"),
        (json!({"mrSeam": hex("ee", 48)}), "mrSeam is"),
        (json!({"xfam": hex("ee", 8)}), "xfam is"),
    ] {
        let error = machine.refusal(&demand);
        assert!(error.contains(why), "{error}, expected {why}");
    }
    for (demand, why) in [
        (r#""qeSVN":"latest""#, "qeSVN: \"latest\" is not a version"),
        (r#""qeSVN":65536"#, "65536"),
        (r#""xfam":"e7""#, "xfam: expected 16 hex digits"),
        (
            r#""intelRootKey":"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n""#,
            "intelRootKey: the root cannot be read",
        ),
    ] {
        let text = text
            .replace(r#""qeSVN":0,"#, "")
            .replace(r#","intelRootKey":"""#, "");
        let text = text.replace(r#","xfam":"e702060000000000""#, "");
        let text = format!("{},{demand}}}", text.strip_suffix('}').unwrap());
        let error = Policy::from_json(&text).unwrap_err().to_string();
        assert!(error.contains(why), "{error}, expected {why}");
    }
}

#[test]
fn altered_instance_infos_are_refused_without_a_panic() {
    let machine = Machine::start(&Parts::default(), |_| ());
    let document = machine.issuer().issue(USER_DATA, NONCE).unwrap();
    let judge = machine.validator(&json!({}));
    let read: BTreeMap<String, Value> = serde_json::from_slice(&document).unwrap();
    let info = STANDARD
        .decode(read["InstanceInfo"].as_str().unwrap())
        .unwrap();
    for altered in mutations(&info, 200) {
        if altered != info {
            let mut document = read.clone();
            document.insert("InstanceInfo".into(), STANDARD.encode(altered).into());
            let document = serde_json::to_vec(&document).unwrap();
            assert!(judge.judge(&Evidence::new(&document, NONCE)).is_err());
        }
    }
}
