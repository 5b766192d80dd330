//! `azure-sev-snp` with firmware whose signer the policy does not name: Microsoft's attestation service (MAA) is asked. A server of the tests
//! answers as its REST reference says.

use std::sync::{Arc, Mutex};

use attest::attestation::sources::{Sources, offline};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use collateral::{Fetching, Settings};
use hardware::snp::report::Report;
use serde_json::{Value, json};

use crate::azure_sev_snp::{Machine, judge, pem};
use crate::cloud_tpm::{NONCE, USER_DATA};
use crate::collateral_server::{Answer, Server};

/// Microsoft's attestation service, with the claims of its token.
struct Maa {
    server: Server,
    claims: Arc<Mutex<Value>>,
}

impl Maa {
    /// Starts a service that vouches for the report in a document.
    fn vouching_for(document: &[u8]) -> Maa {
        let claims = Arc::new(Mutex::new(Value::Null));
        let shared = claims.clone();
        let server = Server::start(move |_| {
            let claims = URL_SAFE_NO_PAD.encode(shared.lock().unwrap().to_string());
            let token = json!({"token": format!("eyJhbGciOiJSUzI1NiJ9.{claims}.c2ln")});
            Answer::ok("application/json; charset=utf-8", token.to_string())
        });
        let report = Report::parse(&sent(document, "/AttestationReport")).unwrap();
        let hex = |bytes: &[u8]| -> String { bytes.iter().map(|it| format!("{it:02x}")).collect() };
        *claims.lock().unwrap() = json!({
            "exp": 4_000_000_000u64,
            "iss": server.url(),
            "x-ms-attestation-type": "sevsnpvm",
            "x-ms-compliance-status": "azure-compliant-cvm",
            "x-ms-sevsnpvm-authorkeydigest": hex(&report.author_key_digest),
            "x-ms-sevsnpvm-hostdata": hex(&report.host_data),
            "x-ms-sevsnpvm-idkeydigest": hex(&report.id_key_digest),
            "x-ms-sevsnpvm-is-debuggable": false,
            "x-ms-sevsnpvm-launchmeasurement": hex(&report.measurement),
            "x-ms-sevsnpvm-reportdata": hex(&report.report_data),
            "x-ms-sevsnpvm-vmpl": 0,
        });
        Maa { server, claims }
    }

    /// Returns the sources of a program that may ask the service, and has asked nothing yet.
    fn sources(&self) -> Arc<dyn Sources> {
        let settings = Settings {
            kds: None,
            pcs: None,
            ca: Some(self.server.ca()),
            ..Settings::default()
        };
        Fetching::new(settings).unwrap()
    }

    /// Returns a policy that names another signer of the firmware, and this service.
    fn policy(&self, enforcement: &str) -> Value {
        json!({
            "firmwareSignerConfig": {
                "acceptedKeyDigests": ["ee".repeat(48)], "enforcementPolicy": enforcement, "maaURL": self.server.url(),
            },
            "snp": {"revocationList": "optional"},
        })
    }
}

/// Returns the bytes of a member of the instance info.
fn sent(document: &[u8], member: &str) -> Vec<u8> {
    let decoded = |value: &Value| STANDARD.decode(value.as_str().unwrap()).unwrap();
    let document: Value = serde_json::from_slice(document).unwrap();
    let info: Value = serde_json::from_slice(&decoded(&document["InstanceInfo"])).unwrap();
    decoded(info.pointer(member).unwrap())
}

#[test]
fn firmware_of_another_signer_is_accepted_if_microsoft_vouches_for_its_report() {
    let machine = Machine::start(|_| (), |_| ());
    let document = machine.issuer().issue(USER_DATA, NONCE).unwrap();
    let maa = Maa::vouching_for(&document);
    let judge = judge(&maa.policy("MAAFallback"), &maa.sources()).unwrap();
    let claims = judge.identify(&document, NONCE).unwrap().platform.unwrap();
    let by = format!("; the firmware is Azure's by {}", maa.server.url());
    assert!(claims.signed_by.ends_with(&by), "{}", claims.signed_by);
    judge.identify(&document, NONCE).unwrap();

    let [content] = &maa.server.contents()[..] else {
        panic!("one question is enough for a report")
    };
    let head = &maa.server.heads()[0];
    assert!(head.starts_with("POST /attest/SevSnpVm?api-version=2022-08-01 HTTP/1.1\r\n"));
    assert!(
        head.to_lowercase()
            .contains("\r\ncontent-type: application/json\r\n")
    );
    let decoded = |value: &Value| URL_SAFE_NO_PAD.decode(value.as_str().unwrap()).unwrap();
    let question: Value = serde_json::from_slice(content).unwrap();
    let report: Value = serde_json::from_slice(&decoded(&question["report"])).unwrap();
    assert_eq!(
        decoded(&report["SnpReport"]),
        sent(&document, "/AttestationReport")
    );
    let chain = String::from_utf8(decoded(&report["VcekCertChain"])).unwrap();
    let certificates = [pem("vcek"), pem("ask"), pem("ark")].concat();
    assert_eq!(chain, certificates.trim());
    let data = &question["runtimeData"];
    assert_eq!(
        decoded(&data["data"]),
        sent(&document, "/Azure/RuntimeData")
    );
    assert_eq!(data["dataType"], "JSON");
}

#[test]
fn a_word_of_microsoft_that_is_wrong_in_one_claim_counts_for_nothing() {
    let machine = Machine::start(|_| (), |_| ());
    let document = machine.issuer().issue(USER_DATA, NONCE).unwrap();
    let maa = Maa::vouching_for(&document);
    let right = maa.claims.lock().unwrap().clone();
    for (claim, wrong) in [
        ("iss", json!("https://another.weu.attest.azure.net")),
        ("exp", json!(1)),
        ("x-ms-attestation-type", json!("azurevm")),
        ("x-ms-compliance-status", json!("azure-compliant-uvm")),
        ("x-ms-sevsnpvm-authorkeydigest", json!("11".repeat(48))),
        ("x-ms-sevsnpvm-hostdata", json!("11".repeat(32))),
        ("x-ms-sevsnpvm-idkeydigest", json!("11".repeat(48))),
        ("x-ms-sevsnpvm-is-debuggable", json!(true)),
        ("x-ms-sevsnpvm-launchmeasurement", json!("11".repeat(48))),
        ("x-ms-sevsnpvm-reportdata", json!("11".repeat(64))),
        ("x-ms-sevsnpvm-vmpl", json!(1)),
    ] {
        let mut claims = right.clone();
        claims[claim] = wrong;
        *maa.claims.lock().unwrap() = claims;
        let judge = judge(&maa.policy("MAAFallback"), &maa.sources()).unwrap();
        let error = judge.identify(&document, NONCE).unwrap_err().to_string();
        let why = match claim {
            "exp" => "the token has ended",
            claim => &format!("does not vouch for it: {claim} is"),
        };
        assert!(error.contains(why), "{error}, expected {why}");
    }
}

#[test]
fn microsoft_is_asked_only_about_a_machine_that_is_accepted_by_all_else() {
    let machine = Machine::start(|_| (), |_| ());
    let document = machine.issuer().issue(USER_DATA, NONCE).unwrap();
    let maa = Maa::vouching_for(&document);
    let fallback = maa.policy("MAAFallback");
    let refusal = |policy: &Value, document: &[u8], sources: &Arc<dyn Sources>| {
        let judge = judge(policy, sources).unwrap();
        judge.identify(document, NONCE).unwrap_err().to_string()
    };
    let forged = Machine::start(|_| (), |report| report[32 + 0x90] ^= 1);
    let forged = forged.issuer().issue(USER_DATA, NONCE).unwrap();
    let with = |member: &str, value: Value| {
        let mut policy = fallback.clone();
        policy[member] = value;
        policy
    };
    let http = json!({"acceptedKeyDigests": [], "enforcementPolicy": "MAAFallback", "maaURL": "http://localhost:1"});
    let nobody = json!({"acceptedKeyDigests": [], "enforcementPolicy": "MAAFallback"});
    let other_key = json!([format!("000b{}", "11".repeat(32))]);
    for (policy, document, sources, why) in [
        (&fallback, &forged, maa.sources(), "not signed by the key"),
        (
            &maa.policy("Equal"),
            &document,
            maa.sources(),
            "does not name",
        ),
        (
            &with("snpVersion", json!(25)),
            &document,
            maa.sources(),
            "below the minimum",
        ),
        (
            &with("attestationKeys", other_key),
            &document,
            maa.sources(),
            "attestation key",
        ),
        (
            &with("firmwareSignerConfig", http),
            &document,
            maa.sources(),
            "does not begin with https://",
        ),
        (
            &with("firmwareSignerConfig", nobody),
            &document,
            maa.sources(),
            "whom to ask",
        ),
        (&fallback, &document, offline(), "this program does not ask"),
    ] {
        let error = refusal(policy, document, &sources);
        assert!(error.contains(why), "{error}, expected {why}");
    }
    let mut named = fallback.clone();
    named["firmwareSignerConfig"]["acceptedKeyDigests"] = json!(["cc".repeat(48)]);
    judge(&named, &maa.sources())
        .unwrap()
        .identify(&document, NONCE)
        .unwrap();
    assert!(maa.server.heads().is_empty());
}

#[test]
fn a_refusal_of_microsofts_service_is_shown_and_not_asked_for_again_at_once() {
    let machine = Machine::start(|_| (), |_| ());
    let document = machine.issuer().issue(USER_DATA, NONCE).unwrap();
    let server = Server::start(|_| {
        let why = r#"{"error":{"code":"InvalidParameter","message":"HCL unknown"}}"#;
        Answer {
            status: "400 Bad Request",
            ..Answer::ok("application/json", why)
        }
    });
    let claims = Arc::default();
    let maa = Maa { server, claims };
    let judge = judge(&maa.policy("MAAFallback"), &maa.sources()).unwrap();
    for _ in 0..2 {
        let error = judge.identify(&document, NONCE).unwrap_err().to_string();
        assert!(
            error.contains("status 400") && error.contains("HCL unknown"),
            "{error}"
        );
    }
    assert_eq!(maa.server.heads().len(), 1);
}
