//! Fetches collateral from servers that answer like AMD's and Intel's, with genuine content from packages of others, and from
//! servers that answer wrongly.

mod server;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use base::der::{OBJECT_IDENTIFIER, SEQUENCE, element};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use collateral::parsers::{self, Item};
use collateral::{Cause, FetchSettings, Fetching, Kept, Unavailable, Update};
use hardware::snp;
use hardware::snp::chain::{Chain, Fetched};
use hardware::snp::report::{Report, ReportSigner};
use hardware::snp::requirements::SnpRequirements;
use hardware::snp::tcb::Product;
use hardware::tdx::tcb::TcbStatus;
use hardware::tdx::{TdxCollateral, TdxQuote, Verifier};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CustomExtension, DnType,
    IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, SerialNumber,
};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::UnixTime;
use rustls_pki_types::pem::PemObject;
use serde_json::json;
use server::{Answer, Fault, Server};
use support::foreign::rust_crate;
use support::mutation::mutations;
use support::program::built;
use verifier::sources::Sources;

/// 2025-07-01: all contents are valid.
const JULY_2025: u64 = 1_751_328_000;
/// 2025-08-01: Intel's collateral has ended.
const AUGUST_2025: u64 = 1_754_006_400;
const DER: &str = "application/octet-stream";

/// Returns the folder of the package `sev`, which contains genuine evidence of AMD's chips.
fn sev() -> PathBuf {
    rust_crate("sev", "sev")
}

fn amd(name: &str) -> Vec<u8> {
    fs::read(sev().join("tests/certs_data").join(name)).unwrap()
}

fn amd_pem(product: &str, name: &str) -> String {
    let folder = sev().join("src/certs/snp/builtin").join(product);
    fs::read_to_string(folder.join(format!("{name}.pem"))).unwrap()
}

fn amd_der(product: &str, name: &str) -> Vec<u8> {
    let pem = amd_pem(product, name);
    CertificateDer::from_pem_slice(pem.as_bytes())
        .unwrap()
        .to_vec()
}

/// The genuine report of a Milan.
fn milan() -> Report {
    Report::parse(&milan_bytes()).unwrap()
}

fn milan_bytes() -> Vec<u8> {
    let digits = String::from_utf8(amd("report_milan.hex")).unwrap();
    let digits = digits.trim();
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    (0..digits.len()).step_by(2).map(byte).collect()
}

/// A report of another Milan, whose certificate no server has.
fn other_milan(number: u8) -> Report {
    let mut bytes = milan_bytes();
    bytes[0x1a0] ^= number;
    Report::parse(&bytes).unwrap()
}

/// A report with chip and TCB of the Turin whose certificate the package contains. No genuine report of it is known.
fn turin() -> Report {
    let mut bytes = milan_bytes();
    bytes[0x1a0..0x1e0].fill(0);
    bytes[0x1a0..0x1a8].copy_from_slice(&[0x1e, 0x55, 0x0a, 0x8e, 0xe5, 0xcf, 0x9f, 0x4d]);
    for tcb in [0x38, 0x180, 0x1e0, 0x1f0] {
        bytes[tcb..tcb + 8].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 9]);
    }
    Report::parse(&bytes).unwrap()
}

/// Returns a list of revoked authorities of a product that ends at 2030-01-01. No package contains a genuine one.
fn list(product: &str) -> Vec<u8> {
    let mut issuer = CertificateParams::default();
    issuer
        .distinguished_name
        .push(DnType::CommonName, format!("ARK-{product}"));
    issuer.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    issuer.key_usages = vec![KeyUsagePurpose::CrlSign];
    let issuer = Issuer::new(issuer, KeyPair::generate().unwrap());
    let list = CertificateRevocationListParams {
        this_update: rcgen::date_time_ymd(2025, 1, 1),
        next_update: rcgen::date_time_ymd(2030, 1, 1),
        crl_number: SerialNumber::from(1),
        issuing_distribution_point: None,
        revoked_certs: vec![],
        key_identifier_method: KeyIdMethod::Sha256,
    };
    list.signed_by(&issuer).unwrap().der().to_vec()
}

/// Answers as AMD's service does.
fn kds(target: &str) -> Answer {
    // generated once, so that all answers are the same
    static LISTS: LazyLock<[Vec<u8>; 2]> = LazyLock::new(|| [list("Milan"), list("Turin")]);
    let milan_chip = snp_hex(&milan().chip_id);
    match target {
        "/vcek/v1/Milan/crl" => Answer::ok(DER, LISTS[0].clone()),
        "/vcek/v1/Turin/crl" => Answer::ok(DER, LISTS[1].clone()),
        "/vcek/v1/Turin/1e550a8ee5cf9f4d?fmcSPL=0&blSPL=0&teeSPL=0&snpSPL=0&ucodeSPL=9" => {
            Answer::ok(DER, amd("vcek_turin.der"))
        }
        other
            if other
                == format!(
                    "/vcek/v1/Milan/{milan_chip}?blSPL=3&teeSPL=0&snpSPL=8&ucodeSPL=115"
                ) =>
        {
            Answer::ok(DER, amd("vcek_milan.der"))
        }
        _ => Answer::status("404 Not Found"),
    }
}

fn snp_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A genuine quote with its collateral, from the package `dcap-qvl`.
fn tdx() -> (Vec<u8>, TdxCollateral) {
    let samples = rust_crate("dcap_qvl", "dcap-qvl").join("sample");
    let collateral = fs::read(samples.join("tdx_quote_collateral.json")).unwrap();
    let quote = fs::read(samples.join("tdx_quote")).unwrap();
    (quote, serde_json::from_slice(&collateral).unwrap())
}

/// Answers as Intel's service and its caching service do, with the same evaluation for both updates.
fn pcs(target: &str) -> Answer {
    let (_, collateral) = tdx();
    let signed = |name: &str, value: &str, signature: &[u8]| {
        let signature = snp_hex(signature);
        Answer::ok(
            "application/json; charset=utf-8",
            format!("{{\"{name}\":{value},\"signature\":\"{signature}\"}}"),
        )
    };
    let encoded = |pem: &str| -> String {
        let encode = |byte: u8| match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' => char::from(byte).to_string(),
            other => format!("%{other:02X}"),
        };
        pem.bytes().map(encode).collect()
    };
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    match (path, query) {
        (
            "/tdx/certification/v4/tcb",
            "fmspc=B0C06F000000&update=early" | "fmspc=B0C06F000000&update=standard",
        ) => signed(
            "tcbInfo",
            &collateral.tcb_info,
            &collateral.tcb_info_signature.0,
        )
        .with(
            "TCB-Info-Issuer-Chain",
            &encoded(&collateral.tcb_info_issuer_chain),
        ),
        ("/tdx/certification/v4/qe/identity", "update=early" | "update=standard") => signed(
            "enclaveIdentity",
            &collateral.qe_identity,
            &collateral.qe_identity_signature.0,
        )
        .with(
            "SGX-Enclave-Identity-Issuer-Chain",
            &encoded(&collateral.qe_identity_issuer_chain),
        ),
        ("/sgx/certification/v4/pckcrl", "ca=platform&encoding=der") => {
            let chain = if collateral.pck_crl_issuer_chain.is_empty() {
                &collateral.qe_identity_issuer_chain
            } else {
                &collateral.pck_crl_issuer_chain
            };
            Answer::ok("application/pkix-crl", collateral.pck_crl.0.clone())
                .with("SGX-PCK-CRL-Issuer-Chain", &encoded(chain))
        }
        // as a PCCS does: in digits
        ("/sgx/certification/v4/rootcacrl", "") => Answer::ok(
            "text/html; charset=utf-8",
            snp_hex(&collateral.root_ca_crl.0),
        ),
        _ => Answer::status("404 Not Found"),
    }
}

/// Returns settings that use one server for everything.
fn settings(server: &Server) -> FetchSettings {
    FetchSettings {
        kds: Some(server.url()),
        pcs: Some(server.url()),
        issuers: Some(server.url()),
        ca: Some(server.ca()),
        time: Duration::from_secs(60),
        clock: || JULY_2025,
        ..FetchSettings::default()
    }
}

fn kept(server: &Server, folder: &Path) -> FetchSettings {
    FetchSettings {
        kept: Kept::Directory(folder.into()),
        ..settings(server)
    }
}

fn offline(kept: Kept) -> FetchSettings {
    FetchSettings {
        kds: None,
        pcs: None,
        issuers: None,
        kept,
        clock: || JULY_2025,
        ..FetchSettings::default()
    }
}

fn fetching(settings: FetchSettings) -> Arc<Fetching> {
    Fetching::new(settings).unwrap()
}

/// Checks that certificates lead from the genuine report to AMD.
fn verify_milan(fetched: &Fetched) {
    let (report, root) = (milan(), amd_der("milan", "ark"));
    let chain = Chain {
        leaf: fetched.leaf.as_ref().unwrap(),
        intermediate: &fetched.intermediate,
        root: &root,
        revoked: None,
    };
    let now = UnixTime::since_unix_epoch(Duration::from_secs(JULY_2025));
    let certificate = chain.verify(report.signer().unwrap(), now).unwrap();
    certificate.verify_signature(&report).unwrap();
    let _ = snp::verify(&report, &chain, &SnpRequirements::default(), now);
}

fn tdx_collateral(sources: &Fetching) -> Result<Arc<TdxCollateral>, Unavailable> {
    let (quote, _) = tdx();
    sources.tdx_collateral(&TdxQuote::parse(&quote).unwrap())
}

/// Waits until a condition holds; the limit is long enough for a machine under load.
fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let limit = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < limit, "{what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// The bucket in which Google publishes its authority of 2024, and another one.
const BUCKET: &str = "privateca-content-65d1688e-0000-2203-850e-30fd381456f8";
const OTHER_BUCKET: &str = "privateca-content-00000000-0000-0000-0000-000000000000";

/// Makes an authority, and the certificate of a key that says that its issuer is published at `place`. Both are in DER.
fn published_at(place: &str) -> [Vec<u8>; 2] {
    let mut params = CertificateParams::default();
    params
        .distinguished_name
        .push(DnType::CommonName, "EK/AK CA Intermediate");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.not_after = rcgen::date_time_ymd(2060, 1, 1);
    let key = KeyPair::generate().unwrap();
    let authority = params.self_signed(&key).unwrap().der().to_vec();
    let issuer = Issuer::new(params, key);
    let mut params = CertificateParams::default();
    params.use_authority_key_identifier_extension = true;
    let access = element(
        SEQUENCE,
        &[&element(
            SEQUENCE,
            &[
                &element(OBJECT_IDENTIFIER, &[&[0x2b, 6, 1, 5, 5, 7, 0x30, 2]]),
                &element(0x86, &[place.as_bytes()]),
            ],
        )],
    );
    let access = CustomExtension::from_oid_content(&[1, 3, 6, 1, 5, 5, 7, 1, 1], access);
    params.custom_extensions = vec![access];
    let key = KeyPair::generate().unwrap();
    let leaf = params.signed_by(&key, &issuer).unwrap().der().to_vec();
    [authority, leaf]
}

/// The documents of Google's machines name the URL of their authority, and do not contain the authority.
#[test]
fn the_authority_of_a_machine_of_google_is_fetched_once_and_kept() {
    let place = format!("http://{BUCKET}.storage.googleapis.com/1/ca.crt");
    let [authority, leaf] = published_at(&place);
    let published = authority.clone();
    let server = Server::start(move |target| match target {
        target if target == format!("/{BUCKET}/1/ca.crt") => {
            Answer::ok("application/pkix-cert", published.clone())
        }
        _ => Answer::status("404 Not Found"),
    });
    let folder = tempfile::tempdir().unwrap();
    let sources = fetching(kept(&server, folder.path()));
    for _ in 0..3 {
        assert_eq!(sources.issuer(&leaf), Ok(Some(authority.clone())));
    }
    assert_eq!(server.targets(), [format!("/{BUCKET}/1/ca.crt")]);
    // an attacker can publish an authority: only one that a validator has verified is kept
    let names = || fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(names(), 0);
    for _ in 0..2 {
        sources.keep_issuer(&leaf);
        assert_eq!(names(), 1);
    }
    // another key at the same URL is another item: an unauthenticated peer can name any key and URL
    let [_, stranger] = published_at(&place);
    let error = sources.issuer(&stranger).unwrap_err();
    assert_eq!(error.cause, Cause::Mismatch, "{error}");
    assert_eq!(sources.issuer(&leaf), Ok(Some(authority.clone())));
    // a cached authority needs no network
    let without = fetching(offline(Kept::Directory(folder.path().into())));
    assert_eq!(without.issuer(&leaf), Ok(Some(authority.clone())));
    let error = without.issuer(&stranger).unwrap_err();
    assert_eq!(error.cause, Cause::Offline, "{error}");
    // the service publishes PEM, too
    let pem = format!(
        "-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n",
        STANDARD.encode(&authority)
    );
    let server = Server::start(move |_| Answer::ok("application/x-pem-file", pem.clone()));
    let sources = fetching(settings(&server));
    assert_eq!(sources.issuer(&leaf), Ok(Some(authority)));
}

#[test]
fn an_authority_is_fetched_from_googles_buckets_only() {
    let server = Server::start(|_| Answer::status("404 Not Found"));
    let sources = fetching(settings(&server));
    for place in [
        "http://169.254.169.254/latest/meta-data",
        "http://localhost/ca.crt",
        &format!("http://{BUCKET}.storage.googleapis.com.example/1/ca.crt"),
        "ldap://directory/ca",
    ] {
        let error = sources.issuer(&published_at(place)[1]).unwrap_err();
        assert_eq!(error.cause, Cause::Unknown, "{error}");
    }
    assert!(server.targets().is_empty());
    // a built-in authority is not fetched: that of the certificate of a machine of 2026
    let path = format!("{}/tests/data/gcp-ak-2026.pem", support::ROOT);
    let genuine = CertificateDer::from_pem_file(path).unwrap();
    let known = sources.issuer(&genuine).unwrap().unwrap();
    assert_eq!(known, roots_of_google()[1]);
    assert!(server.targets().is_empty());
    // a certificate that names no URL, and bytes that are no certificate
    assert_eq!(sources.issuer(&known).map(|_| ()), Ok(()));
    assert_eq!(sources.issuer(&[]), Ok(None));

    // an unauthenticated peer cannot make this program send many requests
    let mut refused = 0;
    for number in 0..40 {
        let place = format!("http://{OTHER_BUCKET}.storage.googleapis.com/{number}/ca.crt");
        let error = sources.issuer(&published_at(&place)[1]).unwrap_err();
        refused += usize::from(error.cause == Cause::Limited);
    }
    assert!(refused > 0 && server.targets().len() + refused == 40);
}

fn roots_of_google() -> Vec<Vec<u8>> {
    let between = |name: &str| {
        let path = format!("{}/src/roots/google/{name}.der", support::ROOT);
        fs::read(path).unwrap()
    };
    vec![
        between("ek-ak-intermediate"),
        between("ek-ak-intermediate-2024-0f21"),
    ]
}

#[test]
fn the_requests_to_the_kds_are_those_that_amd_publishes() {
    let server = Server::start(kds);
    let sources = fetching(settings(&server));
    let fetched = sources.snp_certificates(&milan(), Product::Milan).unwrap();
    verify_milan(&fetched);
    assert!(fetched.revoked.is_ok());
    let of_turin = sources.snp_certificates(&turin(), Product::Turin).unwrap();
    assert_eq!(of_turin.leaf.as_deref(), Some(&amd("vcek_turin.der")[..]));
    let targets = server.targets();
    assert_eq!(targets.len(), 4, "{targets:?}");
    assert!(server.contents().is_empty());
    let head = &server.heads()[0].to_lowercase();
    for expected in [
        &format!("\r\nhost: {}\r\n", &server.url()[8..])[..],
        "\r\nuser-agent: firstlight/",
        "application/octet-stream",
    ] {
        assert!(head.contains(expected), "{head}");
    }
    // both chips are known now
    for (report, product, before) in [
        (milan(), Product::Milan, &fetched),
        (turin(), Product::Turin, &of_turin),
    ] {
        assert_eq!(&sources.snp_certificates(&report, product).unwrap(), before);
    }
    assert_eq!(server.targets().len(), 4);
    let statistics = sources.statistics();
    assert_eq!((statistics.fetched, statistics.failed), (4, 0));
    assert_eq!(statistics.oldest, Some(0));
}

#[test]
fn the_requests_to_a_pccs_are_those_that_intel_publishes() {
    for (update, query) in [
        (Update::Early, "update=early"),
        (Update::Standard, "update=standard"),
    ] {
        let server = Server::start(pcs);
        let sources = fetching(FetchSettings {
            pcs: Some(server.url() + "/sgx/certification/v4/"),
            update,
            ..settings(&server)
        });
        let (bytes, genuine) = tdx();
        let quote = TdxQuote::parse(&bytes).unwrap();
        let fetched = sources.tdx_collateral(&quote).unwrap();
        assert_eq!(fetched.tcb_info, genuine.tcb_info);
        assert_eq!(fetched.root_ca_crl, genuine.root_ca_crl);
        let verified = Verifier::of_intel().unwrap().verify(
            TdxQuote::parse(&bytes).unwrap(),
            &fetched,
            JULY_2025,
        );
        assert_eq!(verified.unwrap().status(), TcbStatus::UpToDate);
        assert_eq!(
            server.targets(),
            [
                format!("/tdx/certification/v4/tcb?fmspc=B0C06F000000&{query}"),
                format!("/tdx/certification/v4/qe/identity?{query}"),
                "/sgx/certification/v4/pckcrl?ca=platform&encoding=der".into(),
                "/sgx/certification/v4/rootcacrl".into(),
            ]
        );
        sources.tdx_collateral(&quote).unwrap();
        assert_eq!(server.targets().len(), 4);
    }
}

/// A part of the target of a request, its answer, and the refusal.
type Wrong<F> = (&'static str, F, &'static str);
type Altered = fn(Answer) -> Answer;

#[test]
fn an_answer_that_is_not_what_was_asked_for_is_refused_by_name() {
    let cases: [Wrong<fn() -> Answer>; 10] = [
        (
            "?blSPL",
            || Answer::status("404 Not Found"),
            "does not know /vcek/v1/Milan/",
        ),
        (
            "?blSPL",
            || Answer::status("301 Moved Permanently").with("Location", "https://localhost/"),
            "it redirects (status 301)",
        ),
        ("?blSPL", || Answer::status("403 Forbidden"), "status 403"),
        (
            "?blSPL",
            || Answer::ok("text/html", amd("vcek_milan.der")),
            "the type \"text/html\", expected",
        ),
        (
            "?blSPL",
            || Answer {
                fault: Fault::Endless,
                ..Answer::ok(DER, [])
            },
            "the answer has more than 8192 bytes",
        ),
        ("?blSPL", || Answer::ok(DER, []), "it is not a certificate"),
        (
            "?blSPL",
            || Answer::ok(DER, [amd("vcek_milan.der"), vec![0]].concat()),
            "it is not a certificate",
        ),
        (
            "?blSPL",
            || Answer::ok(DER, amd("vcek_turin.der")),
            "it is the VCEK of a Turin, expected the VCEK of a Milan",
        ),
        (
            "?blSPL",
            || Answer::ok(DER, altered(&amd("vcek_milan.der"), &milan().chip_id)),
            "it is the certificate of another chip",
        ),
        (
            "?blSPL",
            || Answer::ok(DER, altered(&amd("vcek_milan.der"), &[3, 8, 4, 2, 1, 0x73])),
            "it is for the TCB",
        ),
    ];
    for (target, answer, why) in cases {
        let server = Server::start(move |asked| {
            if asked.contains(target) {
                answer()
            } else {
                kds(asked)
            }
        });
        let sources = fetching(settings(&server));
        for _ in 0..2 {
            let error = sources
                .snp_certificates(&milan(), Product::Milan)
                .unwrap_err();
            assert!(error.to_string().contains(why), "{why}: {error}");
        }
        // the second validation did not ask again
        assert_eq!(server.count(target), 1, "{why}");
    }
}

/// Returns a certificate in which the last byte of a value is another.
fn altered(der: &[u8], value: &[u8]) -> Vec<u8> {
    let mut der = der.to_vec();
    match der.windows(value.len()).position(|window| window == value) {
        Some(at) => der[at + value.len() - 1] ^= 1,
        // the microcode's version 115: extension 3.8
        None => {
            let oid = [0x9c, 0x78, 0x01, 0x03, 0x08];
            let at = der.windows(5).position(|window| window == oid).unwrap();
            let version = der[at..].iter().position(|byte| *byte == 115).unwrap();
            der[at + version] = 116;
        }
    }
    der
}

#[test]
fn collateral_that_is_not_what_was_asked_for_is_refused_by_name() {
    let cases: [Wrong<Altered>; 9] = [
        (
            "/tcb",
            |_| Answer::status("404 Not Found"),
            "does not know /tdx/certification/v4/tcb",
        ),
        (
            "/tcb",
            |it| Answer {
                fields: vec![("Content-Type", "application/json".into())],
                ..it
            },
            "no field TCB-Info-Issuer-Chain",
        ),
        (
            "/tcb",
            |it| Answer {
                body: b"{\"tcbInfo\":{}}".into(),
                ..it
            },
            "the answer is not {\"tcbInfo\":{..},\"signature\":\"..\"}",
        ),
        (
            "/tcb",
            |it| Answer {
                body: it.body[..it.body.len() - 2].into(),
                ..it
            },
            "the answer is not {\"tcbInfo\"",
        ),
        (
            "/tcb",
            |it| Answer {
                body: replaced(it.body, "B0C06F000000", "A0C06F000000"),
                ..it
            },
            "with FMSPC A0C06F000000, expected",
        ),
        (
            "/qe/identity",
            |it| Answer {
                body: replaced(it.body, "TD_QE", "QE"),
                ..it
            },
            "the identity is of \"QE\"",
        ),
        (
            "/qe/identity",
            |it| {
                let mut fields = it.fields;
                let chain = &mut fields[1].1;
                chain.truncate(chain.len() / 2);
                Answer { fields, ..it }
            },
            "SGX-Enclave-Identity-Issuer-Chain",
        ),
        (
            "/pckcrl",
            |it| Answer {
                body: it.body[1..].into(),
                ..it
            },
            "the PCK CRL: it is not a list",
        ),
        (
            "/rootcacrl",
            |it| Answer {
                body: b"<html>".into(),
                ..it
            },
            "the root CRL: it is not a list",
        ),
    ];
    for (target, change, why) in cases {
        let server = Server::start(move |asked| {
            if asked.contains(target) {
                change(pcs(asked))
            } else {
                pcs(asked)
            }
        });
        let error = tdx_collateral(&fetching(settings(&server))).unwrap_err();
        assert!(error.to_string().contains(why), "{why}: {error}");
    }
    let server = Server::start(pcs);
    let late = FetchSettings {
        clock: || AUGUST_2025,
        ..settings(&server)
    };
    let error = tdx_collateral(&fetching(late)).unwrap_err();
    assert_eq!(error.cause, Cause::Expired);
    let end = "it expired at 2025-07-19T";
    assert!(error.to_string().contains(end), "{error}");
}

fn replaced(body: Vec<u8>, old: &str, new: &str) -> Vec<u8> {
    String::from_utf8(body)
        .unwrap()
        .replace(old, new)
        .into_bytes()
}

#[test]
fn a_server_whose_certificate_is_not_trusted_gets_no_request() {
    let (server, other) = (Server::start(kds), Server::start(kds));
    let sources = fetching(FetchSettings {
        ca: Some(other.ca()),
        time: Duration::from_secs(1),
        ..settings(&server)
    });
    assert!(sources.snp_certificates(&milan(), Product::Milan).is_err());
    assert_eq!(server.targets(), Vec::<String>::new());
}

#[test]
fn a_pause_that_the_server_demands_is_kept() {
    let asked = AtomicUsize::new(0);
    let server = Server::start(move |target| match asked.fetch_add(1, Ordering::SeqCst) {
        0 => Answer::status("429 Too Many Requests").with("Retry-After", "2"),
        _ => kds(target),
    });
    let sources = fetching(settings(&server));
    let started = Instant::now();
    verify_milan(&sources.snp_certificates(&milan(), Product::Milan).unwrap());
    assert!(started.elapsed() >= Duration::from_secs(2));
    assert_eq!(server.count("?blSPL"), 2);
}

#[test]
fn a_server_that_refuses_delays_neither_known_chips_nor_other_servers() {
    for status in ["429 Too Many Requests", "503 Service Unavailable"] {
        let (refuses, refusing) = shared_flag();
        let amd = Server::start(move |target| {
            if refusing.load(Ordering::SeqCst) {
                Answer::status(status).with("Retry-After", "3000")
            } else {
                kds(target)
            }
        });
        let intel = Server::start(pcs);
        let both = amd_and_intel(&amd, &intel);
        let sources = fetching(both.0);
        sources.snp_certificates(&milan(), Product::Milan).unwrap();
        refuses.store(true, Ordering::SeqCst);
        let error = sources
            .snp_certificates(&turin(), Product::Turin)
            .unwrap_err();
        assert_eq!(error.cause, Cause::Busy, "{error}");
        let before = amd.targets().len();
        // no further request is sent to it, not even for another chip, and no caller waits
        for _ in 0..5 {
            let error = sources
                .snp_certificates(&other_milan(1), Product::Milan)
                .unwrap_err();
            assert_eq!(error.cause, Cause::Busy, "{error}");
        }
        assert_eq!(amd.targets().len(), before);
        verify_milan(&sources.snp_certificates(&milan(), Product::Milan).unwrap());
        tdx_collateral(&sources).unwrap();
    }
}

fn shared_flag() -> (Arc<AtomicBool>, Arc<AtomicBool>) {
    let flag = Arc::new(AtomicBool::new(false));
    (flag.clone(), flag)
}

/// Returns settings for two servers, and the folder of the file with the certificates of both.
fn amd_and_intel(amd: &Server, intel: &Server) -> (FetchSettings, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let ca = folder.path().join("ca.pem");
    let read = |server: &Server| fs::read_to_string(server.ca()).unwrap();
    fs::write(&ca, read(amd) + &read(intel)).unwrap();
    let settings = FetchSettings {
        kds: Some(amd.url()),
        pcs: Some(intel.url()),
        ca: Some(ca),
        ..settings(amd)
    };
    (settings, folder)
}

#[test]
fn a_slow_answer_delays_the_validations_of_its_chip_only() {
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let at_server = gate.clone();
    let slow = snp_hex(&other_milan(1).chip_id);
    let server = Server::start(move |target| {
        if target.contains(&slow) {
            let (open, changed) = &*at_server;
            let guard = open.lock().unwrap();
            drop(changed.wait_while(guard, |open| !*open).unwrap());
        }
        kds(target)
    });
    let sources = fetching(settings(&server));
    let waiting = thread::spawn({
        let sources = sources.clone();
        move || sources.snp_certificates(&other_milan(1), Product::Milan)
    });
    wait_until("the slow request arrives", || server.count("?blSPL") == 1);
    verify_milan(&sources.snp_certificates(&milan(), Product::Milan).unwrap());
    assert!(!waiting.is_finished());
    let hurried = fetching(FetchSettings {
        time: Duration::from_millis(200),
        ..settings(&server)
    });
    let error = hurried
        .snp_certificates(&other_milan(1), Product::Milan)
        .unwrap_err();
    assert_eq!(error.cause, Cause::Unreachable, "{error}");
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    let error = waiting.join().unwrap().unwrap_err();
    assert_eq!(error.cause, Cause::Unknown, "{error}");
}

#[test]
fn a_hundred_validations_of_one_chip_make_one_request() {
    let server = Server::start(|target| {
        thread::sleep(Duration::from_millis(300));
        kds(target)
    });
    let sources = fetching(settings(&server));
    let threads: Vec<_> = (0..100)
        .map(|_| {
            let sources = sources.clone();
            thread::spawn(move || sources.snp_certificates(&milan(), Product::Milan))
        })
        .collect();
    let mut accepted = 0;
    for thread in threads {
        match thread.join().unwrap() {
            Ok(fetched) => {
                assert_eq!(fetched.leaf, Some(amd("vcek_milan.der")));
                accepted += 1;
            }
            // a few wait, and the others try again
            Err(why) => assert_eq!(why.cause, Cause::Limited, "{why}"),
        }
    }
    assert!(accepted > 0);
    verify_milan(&sources.snp_certificates(&milan(), Product::Milan).unwrap());
    assert_eq!(server.targets().len(), 2, "{:?}", server.targets());
}

/// An unauthenticated peer names chips, and AMD's service is slow.
#[test]
fn unknown_chips_hold_up_a_few_validations_and_no_known_chip() {
    let gate = Arc::new((Mutex::new(true), Condvar::new()));
    let at_server = gate.clone();
    let server = Server::start(move |target| {
        if target.contains("?blSPL") {
            let (open, changed) = &*at_server;
            let guard = open.lock().unwrap();
            drop(changed.wait_while(guard, |open| !*open).unwrap());
        }
        kds(target)
    });
    let folder = tempfile::tempdir().unwrap();
    let first = fetching(kept(&server, folder.path()));
    verify_milan(&first.snp_certificates(&milan(), Product::Milan).unwrap());
    *gate.0.lock().unwrap() = false;
    // the chip is kept, but not in memory
    let sources = fetching(kept(&server, folder.path()));
    let mut waiting: Vec<_> = (1..=24)
        .map(|number| {
            let sources = sources.clone();
            let ask = move || sources.snp_certificates(&other_milan(number), Product::Milan);
            thread::spawn(move || ask().unwrap_err())
        })
        .collect();
    let refused = |all: &[thread::JoinHandle<Unavailable>]| {
        let done = all.iter().filter(|thread| thread.is_finished());
        done.count()
    };
    wait_until("8 of 24 are refused", || refused(&waiting) == 8);
    verify_milan(&sources.snp_certificates(&milan(), Product::Milan).unwrap());
    let list = sources
        .snp_authority(Product::Turin, ReportSigner::Vcek)
        .unwrap();
    assert!(list.revoked.is_ok());
    let (done, still): (Vec<_>, Vec<_>) = waiting.drain(..).partition(|it| it.is_finished());
    assert_eq!((done.len(), still.len()), (8, 16));
    for thread in done {
        let why = thread.join().unwrap();
        assert_eq!(why.cause, Cause::Limited, "{why}");
    }
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    for thread in still {
        let why = thread.join().unwrap();
        assert_eq!(why.cause, Cause::Unknown, "{why}");
    }
}

/// Machines name an authority that is not known, and Google's service is slow.
#[test]
fn an_unknown_authority_holds_up_a_few_validations_and_no_known_chip() {
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let at_server = gate.clone();
    let server = Server::start(move |target| {
        if target.contains(BUCKET) {
            let (open, changed) = &*at_server;
            let guard = open.lock().unwrap();
            drop(changed.wait_while(guard, |open| !*open).unwrap());
        }
        kds(target)
    });
    let folder = tempfile::tempdir().unwrap();
    let sources = fetching(kept(&server, folder.path()));
    verify_milan(&sources.snp_certificates(&milan(), Product::Milan).unwrap());
    let [_, leaf] = published_at(&format!("http://{BUCKET}.storage.googleapis.com/1/ca.crt"));
    let waiting: Vec<_> = (0..24)
        .map(|_| {
            let (sources, leaf) = (sources.clone(), leaf.clone());
            thread::spawn(move || sources.issuer(&leaf).unwrap_err())
        })
        .collect();
    wait_until("8 of 24 are refused", || {
        waiting.iter().filter(|one| one.is_finished()).count() == 8
    });
    verify_milan(&sources.snp_certificates(&milan(), Product::Milan).unwrap());
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    let refused = waiting.into_iter().map(|one| one.join().unwrap());
    let (full, unknown): (Vec<_>, Vec<_>) = refused.partition(|why| why.cause == Cause::Limited);
    assert_eq!((full.len(), unknown.len()), (8, 16));
}

/// An unauthenticated peer names one chip after another.
#[test]
fn requests_for_chips_are_limited_and_nothing_else_is() {
    let (amd_server, intel) = (Server::start(kds), Server::start(pcs));
    let (settings, folder) = amd_and_intel(&amd_server, &intel);
    let settings = FetchSettings {
        kept: Kept::Directory(folder.path().join("cache")),
        ..settings
    };
    let first = fetching(settings.clone());
    verify_milan(&first.snp_certificates(&milan(), Product::Milan).unwrap());
    let sources = fetching(settings);
    let ask = |number| {
        let asked = sources.snp_certificates(&other_milan(number), Product::Milan);
        asked.unwrap_err()
    };
    let refused = (1..=250).find(|number| ask(*number).cause == Cause::Limited);
    // without a limit, all of them are asked for
    assert!(refused.is_some());
    assert!(amd_server.count("?blSPL") < 250);
    // a chip that is kept, a list, and the items of other publishers
    verify_milan(&sources.snp_certificates(&milan(), Product::Milan).unwrap());
    let list = sources
        .snp_authority(Product::Turin, ReportSigner::Vcek)
        .unwrap();
    assert!(list.revoked.is_ok());
    tdx_collateral(&sources).unwrap();
}

#[test]
fn a_pause_for_chips_is_none_for_lists() {
    let server = Server::start(|target| {
        if target.contains("?blSPL") {
            Answer::status("429 Too Many Requests").with("Retry-After", "3000")
        } else {
            kds(target)
        }
    });
    let sources = fetching(settings(&server));
    let error = sources
        .snp_certificates(&milan(), Product::Milan)
        .unwrap_err();
    assert_eq!(error.cause, Cause::Busy, "{error}");
    let list = sources
        .snp_authority(Product::Milan, ReportSigner::Vcek)
        .unwrap();
    assert!(list.revoked.is_ok());
}

#[test]
fn the_authority_is_there_and_a_kept_list_counts_while_the_server_is_away() {
    let folder = tempfile::tempdir().unwrap();
    let genuine = list("Milan");
    fs::write(folder.path().join("vcek-milan.crl"), &genuine).unwrap();
    let server = Server::start(kds);
    let sources = fetching(FetchSettings {
        kds: Some("https://localhost:1".into()),
        time: Duration::from_secs(2),
        ..kept(&server, folder.path())
    });
    let of_milan = sources
        .snp_authority(Product::Milan, ReportSigner::Vcek)
        .unwrap();
    assert_eq!(of_milan.intermediate, amd_der("milan", "ask"));
    assert_eq!(of_milan.revoked.as_ref(), Ok(&genuine));
    // no item of Turin is kept
    let of_turin = sources
        .snp_authority(Product::Turin, ReportSigner::Vcek)
        .unwrap();
    assert_eq!(of_turin.intermediate, amd_der("turin", "ask"));
    assert!(of_turin.revoked.is_err());
    for (product, name) in [
        (Product::Milan, "milan"),
        (Product::Genoa, "genoa"),
        (Product::Turin, "turin"),
    ] {
        let ask = snp::chain::authority(product, ReportSigner::Vcek).unwrap();
        assert_eq!(ask, amd_der(name, "ask"));
        assert!(snp::chain::authority(product, ReportSigner::Vlek).is_some_and(|asvk| asvk != ask));
    }
}

#[test]
fn a_list_that_cannot_be_had_delays_one_validation_at_most() {
    let server = Server::start(|target| {
        if target.ends_with("/crl") {
            Answer::status("500 Internal Server Error")
        } else {
            kds(target)
        }
    });
    let sources = fetching(FetchSettings {
        time: Duration::from_secs(2),
        ..settings(&server)
    });
    for _ in 0..3 {
        let fetched = sources.snp_certificates(&milan(), Product::Milan).unwrap();
        let why = fetched.revoked.as_ref().unwrap_err();
        // on a loaded machine the last answer may come too late
        let expected = [Cause::Busy, Cause::Unreachable];
        assert!(expected.contains(&why.cause), "{why}");
        verify_milan(&fetched);
    }
    assert!(server.count("/crl") <= 3);
}

#[test]
fn only_the_first_validation_waits_for_a_list_that_does_not_come() {
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let at_server = gate.clone();
    let server = Server::start(move |target| {
        let (open, changed) = &*at_server;
        let guard = open.lock().unwrap();
        drop(changed.wait_while(guard, |open| !*open).unwrap());
        kds(target)
    });
    let sources = fetching(FetchSettings {
        time: Duration::from_secs(2),
        ..settings(&server)
    });
    let has_list = || {
        let of_milan = sources.snp_authority(Product::Milan, ReportSigner::Vcek);
        of_milan.unwrap().revoked.is_ok()
    };
    assert!(!has_list());
    wait_until("it is asked for again", || {
        assert!(!has_list());
        server.count("/crl") == 2
    });
    *gate.0.lock().unwrap() = true;
    gate.1.notify_all();
    // a validation that waited would have given the second request up after its 2 seconds
    wait_until("the list is there", has_list);
    assert_eq!(server.count("/crl"), 2);
}

#[test]
fn no_report_keeps_a_validator_from_the_list_of_a_machine_that_sends_its_certificate() {
    // the service has no certificate for a report with a masked chip ID
    let server = Server::start(|target| {
        if target.ends_with("/crl") {
            kds(target)
        } else {
            Answer::status("404 Not Found")
        }
    });
    let sources = fetching(settings(&server));
    let fetched = sources
        .snp_authority(Product::Milan, ReportSigner::Vcek)
        .unwrap();
    assert_eq!(fetched.leaf, None);
    assert!(fetched.revoked.is_ok());
    assert_eq!(server.targets().len(), 1, "{:?}", server.targets());
    // known now
    assert_eq!(
        sources
            .snp_authority(Product::Milan, ReportSigner::Vcek)
            .unwrap(),
        fetched
    );
    assert_eq!(server.targets().len(), 1, "{:?}", server.targets());
}

#[test]
fn what_was_fetched_outlives_the_program_and_the_servers() {
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    let (amd_server, intel) = (Server::start(kds), Server::start(pcs));
    let (settings, _ca) = amd_and_intel(&amd_server, &intel);
    let sources = fetching(FetchSettings {
        kept: Kept::Directory(cache.clone()),
        ..settings
    });
    let fetched = sources.snp_certificates(&milan(), Product::Milan).unwrap();
    let collateral = tdx_collateral(&sources).unwrap();
    drop((sources, amd_server, intel));
    let mode = fs::metadata(&cache).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    let mut names: Vec<_> = fs::read_dir(&cache)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let vcek = format!("vcek-milan-{}-0.3.0.8.115.der", snp_hex(&milan().chip_id));
    let tdx_file = "tdx-b0c06f000000-platform.json";
    assert_eq!(names, [tdx_file, &vcek, "vcek-milan.crl"]);

    let sources = fetching(offline(Kept::Directory(cache.clone())));
    assert_eq!(
        sources.snp_certificates(&milan(), Product::Milan).unwrap(),
        fetched
    );
    // with the list of revoked certificates, which is valid still
    assert!(fetched.revoked.is_ok());
    let list = sources.snp_authority(Product::Milan, ReportSigner::Vcek);
    assert_eq!(list.unwrap().revoked, fetched.revoked);
    assert_eq!(tdx_collateral(&sources).unwrap(), collateral);
    let error = sources
        .snp_certificates(&turin(), Product::Turin)
        .unwrap_err();
    assert_eq!(error.cause, Cause::Offline, "{error}");
    // the file is the one that machines send, so it can be supplied by itself
    let sources = fetching(offline(Kept::File(cache.join(tdx_file))));
    assert_eq!(tdx_collateral(&sources).unwrap(), collateral);
    // another chip's certificate under the name of this one is not used
    fs::write(cache.join(&vcek), amd("vcek_turin.der")).unwrap();
    let sources = fetching(offline(Kept::Directory(cache)));
    assert!(sources.snp_certificates(&milan(), Product::Milan).is_err());
}

#[test]
fn a_damaged_entry_is_fetched_again() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(kds);
    for damage in [&b""[..], b"junk", &amd("vcek_milan.der")[..700]] {
        let first = fetching(kept(&server, folder.path()));
        first.snp_certificates(&milan(), Product::Milan).unwrap();
        for entry in fs::read_dir(folder.path()).unwrap() {
            fs::write(entry.unwrap().path(), damage).unwrap();
        }
        let before = server.targets().len();
        let second = fetching(kept(&server, folder.path()));
        verify_milan(&second.snp_certificates(&milan(), Product::Milan).unwrap());
        assert_eq!(server.targets().len(), before + 2);
        let third = fetching(kept(&server, folder.path()));
        verify_milan(&third.snp_certificates(&milan(), Product::Milan).unwrap());
        assert_eq!(server.targets().len(), before + 2);
    }
}

#[test]
fn old_collateral_is_used_while_it_is_valid_and_renewed_in_the_background() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(pcs);
    tdx_collateral(&fetching(kept(&server, folder.path()))).unwrap();
    let file = folder.path().join("tdx-b0c06f000000-platform.json");
    let set_age = |seconds: u64| {
        let file = fs::File::options().append(true).open(&file).unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(JULY_2025 - seconds);
        file.set_modified(time).unwrap();
    };
    set_age(3600);
    tdx_collateral(&fetching(kept(&server, folder.path()))).unwrap();
    assert_eq!(server.targets().len(), 4);
    set_age(2 * 86_400);
    let sources = fetching(kept(&server, folder.path()));
    tdx_collateral(&sources).unwrap();
    assert!(sources.statistics().oldest >= Some(2 * 86_400) || server.targets().len() >= 8);
    wait_until("it is renewed", || sources.statistics().fetched == 1);
    tdx_collateral(&sources).unwrap();
    assert_eq!(server.targets().len(), 8);

    // the server does not answer: the old item is used until it ends, and no longer
    set_age(2 * 86_400);
    let away = |clock| {
        fetching(FetchSettings {
            pcs: Some("https://localhost:1".into()),
            time: Duration::from_secs(1),
            clock,
            ..kept(&server, folder.path())
        })
    };
    tdx_collateral(&away(|| JULY_2025)).unwrap();
    let error = tdx_collateral(&away(|| AUGUST_2025)).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("Intel's collateral of platforms with FMSPC b0c06f000000"),
        "{error}"
    );
}

#[test]
fn collateral_at_hand_makes_no_request_but_that_of_its_renewal() {
    static NOW: AtomicU64 = AtomicU64::new(JULY_2025);
    let server = Server::start(pcs);
    let sources = fetching(FetchSettings {
        clock: || NOW.load(Ordering::SeqCst),
        ..settings(&server)
    });
    let (quote, _) = tdx();
    let at_hand = || sources.tdx_collateral_at_hand(&TdxQuote::parse(&quote).unwrap());
    assert_eq!(at_hand(), None);
    let fetched = tdx_collateral(&sources).unwrap();
    assert_eq!(at_hand(), Some(fetched.clone()));
    assert_eq!(server.targets().len(), 4);
    NOW.fetch_add(2 * 86_400, Ordering::SeqCst);
    assert_eq!(at_hand(), Some(fetched));
    wait_until("it is renewed", || sources.statistics().fetched == 2);
    assert_eq!(server.targets().len(), 8);
}

#[test]
fn a_request_that_fails_in_the_middle_is_repeated() {
    let asked = AtomicUsize::new(0);
    let server = Server::start(move |target| match asked.fetch_add(1, Ordering::SeqCst) {
        0 => Answer {
            fault: Fault::Cut,
            ..kds(target)
        },
        _ => kds(target),
    });
    let sources = fetching(settings(&server));
    verify_milan(&sources.snp_certificates(&milan(), Product::Milan).unwrap());
    assert_eq!(server.count("?blSPL"), 2);
}

#[test]
fn a_report_whose_chip_is_masked_makes_no_request() {
    let server = Server::start(kds);
    let mut bytes = milan_bytes();
    bytes[0x1a0..0x1e0].fill(0);
    let report = Report::parse(&bytes).unwrap();
    let error = fetching(settings(&server))
        .snp_certificates(&report, Product::Milan)
        .unwrap_err();
    assert!(error.to_string().contains("masks the chip"), "{error}");
    assert_eq!(server.targets(), Vec::<String>::new());
}

/// All bytes of servers and caches are parsed or refused without a panic, and no altered item is accepted.
#[test]
fn altered_contents_are_refused_or_are_what_was_asked_for() {
    let chip = milan().chip_id.to_vec();
    let vcek = Item::Vcek {
        product: Product::Milan,
        chip: chip.clone(),
        tcb: milan().tcbs(Product::Milan).unwrap().reported,
    };
    let (_, collateral) = tdx();
    let json = serde_json::to_vec(&collateral).unwrap();
    let of_platform = Item::Tdx {
        fmspc: [0xb0, 0xc0, 0x6f, 0, 0, 0],
        authority: parsers::PckAuthority::Platform,
    };
    for (item, genuine) in [
        (vcek, amd("vcek_milan.der")),
        (
            Item::Revoked(Product::Milan, ReportSigner::Vcek),
            list("Milan"),
        ),
        (of_platform, json),
    ] {
        item.read(&genuine).unwrap();
        for bytes in mutations(&genuine, 3000) {
            let _ = item.read(&bytes);
        }
    }
    let answer = pcs("/tdx/certification/v4/tcb?fmspc=B0C06F000000&update=early");
    let (value, signature) = parsers::signed("tcbInfo", &answer.body).unwrap();
    assert_eq!(
        (value, &signature),
        (collateral.tcb_info.clone(), &collateral.tcb_info_signature)
    );
    for bytes in mutations(&answer.body, 2000) {
        let _ = parsers::signed("tcbInfo", &bytes);
    }
    let field = &answer.fields[1].1;
    assert_eq!(
        parsers::issuer_chain(field).unwrap(),
        collateral.tcb_info_issuer_chain
    );
    for bytes in mutations(field.as_bytes(), 2000) {
        let _ = parsers::issuer_chain(&String::from_utf8_lossy(&bytes));
    }
}

/// A machine can send the output of `firstlight collateral`, and a verifier accepts it.
#[test]
fn the_operators_command_fetches_for_those_who_have_no_network() {
    let (amd_server, intel) = (Server::start(kds), Server::start(pcs));
    let (settings, folder) = amd_and_intel(&amd_server, &intel);
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    let (quote, _) = tdx();
    let quote = write("quote.bin", &quote);
    let report = write("report.bin", &milan_bytes());
    let run = |evidence: &Path, more: &[&str]| {
        let output = Command::new(built("firstlight"))
            .arg("collateral")
            .arg(evidence)
            .args([
                "--kds",
                &amd_server.url(),
                "--pcs",
                &intel.url(),
                "--collateral-ca",
            ])
            .arg(settings.ca.as_ref().unwrap())
            .args(more)
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (
            output.status.success(),
            text(output.stdout),
            text(output.stderr),
        )
    };
    // the genuine certificates of the Milan are valid until 2030, the genuine collateral has ended
    let (is_good, printed, said) = run(&report, &["--product", "Milan"]);
    assert!(is_good, "{said}");
    let printed: Vec<_> = CertificateDer::pem_slice_iter(printed.as_bytes())
        .map(|der| der.unwrap().to_vec())
        .collect();
    assert_eq!(printed, [amd("vcek_milan.der"), amd_der("milan", "ask")]);
    let (is_good, _, said) = run(&report, &[]);
    assert!(!is_good && said.contains("give --product"), "{said}");
    let (is_good, _, said) = run(&quote, &[]);
    assert!(
        !is_good && said.contains("it expired at 2025-07-19"),
        "{said}"
    );
    // evidence that no validator here would accept
    let evidence = |variant: &str| {
        let bytes = fs::read(&quote).unwrap();
        let document = json!({"RawQuote": STANDARD.encode(bytes), "UserData": ""}).to_string();
        let evidence = json!({
            "version": 1, "variant": variant, "source": "a test", "time": 0, "form": "old",
            "nonce": "", "document": STANDARD.encode(document),
        });
        write(variant, evidence.to_string().as_bytes())
    };
    for (variant, why) in [
        ("qemu-tdx", "it expired at 2025-07-19"),
        ("azure-tdx", "cannot be read"),
        ("aws-nitro-tpm", "needs no collateral"),
    ] {
        let (is_good, _, said) = run(&evidence(variant), &[]);
        assert!(!is_good && said.contains(why), "{said}, expected {why}");
    }
    let junk = write("junk", b"junk");
    let (is_good, _, said) = run(&junk, &[]);
    assert!(
        !is_good && said.contains("neither a TDX quote nor an SEV-SNP report"),
        "{said}"
    );

    let cache = folder.path().join("cache");
    let at = cache.to_str().unwrap();
    assert!(run(&report, &["--product", "Milan", "--collateral", at]).0);
    let before = amd_server.targets().len();
    assert!(
        run(
            &report,
            &["--product", "Milan", "--collateral", at, "--offline"]
        )
        .0
    );
    assert_eq!(amd_server.targets().len(), before);
}
