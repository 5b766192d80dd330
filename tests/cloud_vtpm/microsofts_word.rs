//! `azure-sev-snp` with firmware whose signer the policy does not name: the verifier asks Microsoft's attestation service (MAA). A
//! server of the tests answers as its REST reference says.

use std::net::TcpListener;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use collateral::{FetchSettings, Fetching, Microsoft};
use hardware::snp::report::Report;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::{Value, json};
use verifier::sources::{Sources, offline};
use verifier::{Evidence, Validator};

use crate::azure_sev_snp::{Machine, judge, pem};
use crate::cloud_tpm::{NONCE, USER_DATA};
use crate::collateral_server::{Answer, Server};
use crate::forged_snp::Hierarchy;
use crate::meeting::refused;

/// Microsoft's attestation service, with the claims of its token.
struct Maa {
    server: Server,
    claims: Arc<Mutex<Value>>,
}

impl Maa {
    /// Starts a service whose token confirms the report in a document.
    fn vouching_for(document: &[u8]) -> Maa {
        let claims = Arc::new(Mutex::new(Value::Null));
        let shared = claims.clone();
        let server = Server::start(move |_| token(&shared));
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
        self.fetching()
    }

    fn fetching(&self) -> Arc<Fetching> {
        Fetching::new(self.settings()).unwrap()
    }

    fn settings(&self) -> FetchSettings {
        FetchSettings {
            kds: None,
            pcs: None,
            maa: Some(Microsoft {
                ca: Some(self.server.ca()),
            }),
            ..FetchSettings::default()
        }
    }

    /// Returns the validator of a policy that asks the service about other signers.
    fn judge(&self) -> Arc<dyn Validator> {
        judge(&self.policy("MAAFallback"), &self.sources()).unwrap()
    }

    /// Returns how often the service was asked.
    fn requests(&self) -> usize {
        self.server.heads().len()
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

/// Returns a correct machine, its document, and a service that confirms it.
fn start() -> (Machine, Vec<u8>, Maa) {
    let machine = Machine::start(|_| (), |_| ());
    let document = machine.issuer().issue(USER_DATA, NONCE).unwrap();
    let maa = Maa::vouching_for(&document);
    (machine, document, maa)
}

/// Returns an answer with a token that has these claims.
fn token(claims: &Mutex<Value>) -> Answer {
    let claims = URL_SAFE_NO_PAD.encode(claims.lock().unwrap().to_string());
    let token = json!({"token": format!("eyJhbGciOiJSUzI1NiJ9.{claims}.c2ln")});
    Answer::ok("application/json; charset=utf-8", token.to_string())
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
    let (_, document, maa) = start();
    let judge = maa.judge();
    let identified = judge.judge(&Evidence::new(&document, NONCE)).unwrap();
    assert!(identified.is_endorsed && !judge.properties().believes_any_tpm);
    let claims = identified.platform.unwrap();
    let by = format!("; the firmware is Azure's by {}", maa.server.url());
    assert!(claims.signed_by.ends_with(&by), "{}", claims.signed_by);
    judge.judge(&Evidence::new(&document, NONCE)).unwrap();

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
    let chain = decoded(&report["VcekCertChain"]);
    let chain: Vec<_> = CertificateDer::pem_slice_iter(&chain)
        .map(Result::unwrap)
        .collect();
    let names = ["vcek", "ask", "ark"];
    assert_eq!(chain, names.map(|name| Hierarchy::get().certificate(name)));
    let data = &question["runtimeData"];
    assert_eq!(
        decoded(&data["data"]),
        sent(&document, "/Azure/RuntimeData")
    );
    assert_eq!(data["dataType"], "JSON");
}

#[test]
fn a_word_of_microsoft_that_is_wrong_in_one_claim_counts_for_nothing() {
    let (_, document, maa) = start();
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
        let judge = maa.judge();
        let error = refused(&judge, &document);
        let why = match claim {
            "exp" => "the token has expired",
            claim => &format!("has not confirmed it: {claim} is"),
        };
        assert!(error.contains(why), "{error}, expected {why}");
    }
}

#[test]
fn microsoft_is_asked_only_about_a_machine_that_is_accepted_by_all_else() {
    let (_, document, maa) = start();
    let fallback = maa.policy("MAAFallback");
    let refusal = |policy: &Value, document: &[u8], sources: &Arc<dyn Sources>| {
        let judge = judge(policy, sources).unwrap();
        refused(&judge, document)
    };
    let forged = Machine::start(|_| (), |report| report[32 + 0x90] ^= 1);
    let forged = forged.issuer().issue(USER_DATA, NONCE).unwrap();
    let with = |member: &str, value: Value| {
        let mut policy = fallback.clone();
        policy[member] = value;
        policy
    };
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
            &with("firmwareSignerConfig", nobody),
            &document,
            maa.sources(),
            "the service to ask",
        ),
        (&fallback, &document, offline(), "this program does not ask"),
        (
            &fallback,
            &document,
            maa.fetching().at_hand(),
            "requests are disabled",
        ),
        (
            &fallback,
            &document,
            Arc::new(maa.fetching().without_verdicts()),
            "requests are disabled",
        ),
    ] {
        let error = refusal(policy, document, &sources);
        assert!(error.contains(why), "{error}, expected {why}");
    }
    let mut named = fallback.clone();
    named["firmwareSignerConfig"]["acceptedKeyDigests"] = json!(["cc".repeat(48)]);
    judge(&named, &maa.sources())
        .unwrap()
        .judge(&Evidence::new(&document, NONCE))
        .unwrap();
    assert_eq!(maa.requests(), 0);
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
    let judge = maa.judge();
    for _ in 0..2 {
        let error = refused(&judge, &document);
        assert!(
            error.contains("status 400") && error.contains("HCL unknown"),
            "{error}"
        );
    }
    assert_eq!(maa.requests(), 1);
}

#[test]
fn a_service_whose_url_is_wrong_is_named_when_the_policy_is_read_or_when_it_answers() {
    for url in [
        "http://x.weu.attest.azure.net",
        "x.weu.attest.azure.net",
        "https://",
        "https:///attest",
        "https://user:word@x",
        "https://x?y",
        "https://x/path",
        "https://:443",
        "https://x:port",
        "https://x y",
    ] {
        let signer = |enforcement: &str| json!({"firmwareSignerConfig": {"enforcementPolicy": enforcement, "maaURL": url}});
        let error = judge(&signer("MAAFallback"), &offline()).err().unwrap();
        assert!(
            error.contains("maaURL: expected https://") && !error.contains("word"),
            "{error}"
        );
        judge(&signer("Equal"), &offline()).unwrap();
    }
    for url in ["", "HTTPS://X.weu.attest.azure.net/", "https://x:443"] {
        let signer = json!({"enforcementPolicy": "MAAFallback", "maaURL": url});
        judge(&json!({"firmwareSignerConfig": signer}), &offline()).unwrap();
    }

    let machine = Machine::start(|_| (), |_| ());
    let document = machine.issuer().issue(USER_DATA, NONCE).unwrap();
    let maa = Maa {
        server: Server::start(|_| Answer::status("404 Not Found")),
        claims: Arc::default(),
    };
    let judge = maa.judge();
    for _ in 0..2 {
        let error = refused(&judge, &document);
        assert!(error.contains("(status 404): is maaURL right?"), "{error}");
    }
    assert_eq!(maa.requests(), 1);
}

#[test]
fn one_question_about_a_report_is_enough_for_all_its_machine_sends_and_all_that_meet_it() {
    let (machine, document, maa) = start();
    let judge = maa.judge();
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| judge.judge(&Evidence::new(&document, NONCE)).unwrap());
        }
    });
    // the machine sends other bytes that mean the same certificates
    for number in 0..4 {
        machine.certify(&format!("text {number}\n{}", pem("vcek")));
        let document = machine.issuer().issue(USER_DATA, NONCE).unwrap();
        let signer = sent(&document, "/ReportSigner");
        assert!(signer.starts_with(b"text "));
        judge.judge(&Evidence::new(&document, NONCE)).unwrap();
    }
    assert_eq!(maa.requests(), 1);

    // for another report, the program asks the service again
    let another = Machine::start(|_| (), |_| ());
    let another = another.issuer().issue(USER_DATA, NONCE).unwrap();
    let error = refused(&judge, &another);
    assert!(error.contains("x-ms-sevsnpvm-reportdata is"), "{error}");
    assert_eq!(maa.requests(), 2);
}

#[test]
fn a_word_counts_no_longer_than_its_token() {
    let (_, document, maa) = start();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let end = now.as_secs() + 10;
    maa.claims.lock().unwrap()["exp"] = end.into();
    let judge = maa.judge();
    judge.judge(&Evidence::new(&document, NONCE)).unwrap();
    while SystemTime::now() < UNIX_EPOCH + Duration::from_secs(end) {
        thread::sleep(Duration::from_millis(100));
    }
    let error = refused(&judge, &document);
    assert!(error.contains("the token has expired"), "{error}");
    assert_eq!(maa.requests(), 2);
}

#[test]
fn the_authorities_of_other_servers_do_not_count_for_microsofts() {
    let (_, document, maa) = start();
    let another = Server::start(|_| Answer::status("404 Not Found"));
    let sources: Arc<dyn Sources> = Fetching::new(FetchSettings {
        ca: Some(maa.server.ca()),
        maa: Some(Microsoft {
            ca: Some(another.ca()),
        }),
        ..maa.settings()
    })
    .unwrap();
    let judge = judge(&maa.policy("MAAFallback"), &sources).unwrap();
    let error = refused(&judge, &document);
    assert!(error.contains("invalid peer certificate"), "{error}");
    assert_eq!(maa.requests(), 0);
}

#[test]
fn firstlight_verify_asks_microsoft_unless_the_machine_is_refused_or_nothing_may_be_asked() {
    let machine = Machine::start(|_| (), |_| ());
    // a handshake makes another document, but with the same report
    let maa = Maa::vouching_for(&machine.issuer().issue(USER_DATA, NONCE).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let issuer = machine.issuer();
    thread::spawn(move || {
        for caller in listener.incoming().flatten() {
            let soon = Instant::now() + Duration::from_secs(60);
            let _ = atls::Server::new(Some(issuer.clone()), None).handshake(caller, soon);
        }
    });
    let folder = tempfile::tempdir().unwrap();
    // AMD's list is given here, so it is not requested
    let list = Hierarchy::get().list("ark", &[], "20240101000000Z", "20490101000000Z");
    std::fs::write(folder.path().join("vcek-milan.crl"), list).unwrap();
    let verify = |pcr: &str, more: &[&str]| {
        let mut policy = maa.policy("MAAFallback");
        policy["amdRootKey"] = pem("ark").into();
        policy["measurements"] = json!({"9": {"expected": pcr.repeat(32)}});
        policy["exceptions"] = json!(["any-image", "zero-registers"]);
        std::fs::write(folder.path().join("policy.json"), policy.to_string()).unwrap();
        let output = Command::new(support::program::built("firstlight"))
            .current_dir(folder.path())
            .args(["verify", &address, "--fresh", "--policy=policy.json"])
            .args(["--attestation-variant=azure-sev-snp", "--collateral=."])
            .args(more)
            .env("SSL_CERT_FILE", maa.server.ca())
            .output()
            .unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    };
    let (code, said) = verify("11", &[]);
    assert_eq!((code, maa.requests()), (Some(3), 0), "{said}");
    // the proven values are shown, but nothing endorses the key
    for shown in [
        "PCR 9   differs",
        "\nbelieved:  any key\n",
        &format!("\nID_KEY_DIGEST       {}\n", "cc".repeat(48)),
    ] {
        assert!(said.contains(shown), "{shown}: {said}");
    }
    let (code, said) = verify("00", &["--offline"]);
    assert_eq!((code, maa.requests()), (Some(3), 0), "{said}");
    assert!(said.contains("requests are disabled (offline)"), "{said}");
    let (code, said) = verify("00", &[]);
    assert_eq!((code, maa.requests()), (Some(0), 1), "{said}");
    assert!(said.contains("\nbelieved:  endorsed\n"), "{said}");
}

#[test]
fn a_chip_with_many_reports_has_its_share_of_the_requests() {
    let machines: Vec<_> = (0..5)
        .map(|_| Machine::start(|_| (), |_| ()))
        .map(|machine| machine.issuer().issue(USER_DATA, NONCE).unwrap())
        .collect();
    let maa = Maa::vouching_for(&machines[0]);
    let judge = maa.judge();
    for document in &machines[1..] {
        let error = refused(&judge, document);
        assert!(error.contains("x-ms-sevsnpvm-reportdata is"), "{error}");
    }
    let error = refused(&judge, &machines[0]);
    assert!(
        error.contains("too many requests about machines on this chip"),
        "{error}"
    );
    assert_eq!(maa.requests(), 4);
}

#[test]
fn a_service_that_is_away_is_named_however_often_a_machine_tries_and_its_return_counts_at_once() {
    let machine = Machine::start(|_| (), |_| ());
    let document = machine.issuer().issue(USER_DATA, NONCE).unwrap();
    let good = Maa::vouching_for(&document);
    let (claims, is_away) = (good.claims.clone(), Arc::new(AtomicBool::new(true)));
    let away = is_away.clone();
    let shared = claims.clone();
    let server = Server::start(move |_| {
        if away.load(Ordering::SeqCst) {
            Answer::status("503 Service Unavailable").with("Retry-After", "2")
        } else {
            token(&shared)
        }
    });
    claims.lock().unwrap()["iss"] = server.url().into();
    let maa = Maa { server, claims };
    // shorter than the pause that the service demands, so that no call repeats its request
    let settings = FetchSettings {
        time: Duration::from_millis(1900),
        ..maa.settings()
    };
    let sources: Arc<dyn Sources> = Fetching::new(settings).unwrap();
    let judge = judge(&maa.policy("MAAFallback"), &sources).unwrap();
    let begin = Instant::now();
    // a failure is remembered for one second, so 8 s have more tries than the limit for one chip allows
    while begin.elapsed() < Duration::from_secs(8) {
        let error = refused(&judge, &document);
        // a busy machine may not get the answer in time
        assert!(
            error.contains("status 503") || error.contains("the timeout has passed"),
            "{error}"
        );
        thread::sleep(Duration::from_millis(200));
    }
    is_away.store(false, Ordering::SeqCst);
    let begin = Instant::now();
    while let Err(error) = judge.judge(&Evidence::new(&document, NONCE)) {
        assert!(begin.elapsed() < Duration::from_secs(60), "{error}");
        thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn a_wrong_list_of_authorities_matters_to_those_alone_who_ask_microsoft() {
    let (_, document, maa) = start();
    let sources: Arc<dyn Sources> = Fetching::new(FetchSettings {
        maa: Some(Microsoft {
            ca: Some("/no-cert-file.crt".into()),
        }),
        ..maa.settings()
    })
    .unwrap();
    let mut named = maa.policy("MAAFallback");
    let digests = &mut named["firmwareSignerConfig"]["acceptedKeyDigests"];
    *digests = json!(["cc".repeat(48)]);
    judge(&named, &sources)
        .unwrap()
        .judge(&Evidence::new(&document, NONCE))
        .unwrap();
    let judge = judge(&maa.policy("MAAFallback"), &sources).unwrap();
    // a request that is never sent does not count against the chip's limit
    for _ in 0..6 {
        let error = refused(&judge, &document);
        let why = "SSL_CERT_FILE: cannot read /no-cert-file.crt";
        assert!(error.contains(why), "{error}");
    }
}
