//! `gcp-sev-es`: the key of Google's template, its certificate, the names of the metadata service, and what the firmware measures.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base::der::{self, context, element};
use base::x509::Certificate;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bootstrapper::trust::evidence::Attester;
use bootstrapper::trust::service_trust::{self, ServiceTrust};
use common::evidence::{self, Bringing};
use hardware::{Cause, Unavailable};
use proto::attested::Collateral;
use rcgen::{CertificateParams, CustomExtension, KeyUsagePurpose};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use serde_json::{Value, json};
use services::join_service::evidence::RemoteIssuer;
use support::foreign::go_module;
use tpm::{KeySource, Tpm};
use verifier::ak_certificate::{self, AkRoot};
use verifier::gcp_sev_es::{
    CERTIFICATE_INDEX, GoogleFirmware, GoogleMachine, ROOTS, VARIANT, instance,
};
use verifier::instance::CloudRequirements;
use verifier::quote::{Attest, Hierarchy};
use verifier::sources::Sources;
use verifier::{Evidence, Issuer, Refusal, event_log, vtpm};

use crate::authority::{Alter, Authority, PublicKey, WRONG_TIMES, of_attestation_key};
use crate::cloud_tpm::{ATTRIBUTES_OF_GCE, CloudTpm, NONCE, USER_DATA};
use crate::host::Host;
use crate::meeting::{Correct, prove, proven, refused, validator, validator_with};
use crate::sev_snp::with;

const KEY: KeySource = KeySource::Template(0x01c1_0001);

fn sha256(parts: &[&[u8]]) -> Vec<u8> {
    let all = parts.concat();
    ring::digest::digest(&ring::digest::SHA256, &all)
        .as_ref()
        .into()
}

/// The events of Google's firmware in PCR 0: type and data.
pub fn events(version: &str, technology: u8) -> Vec<(u32, Vec<u8>)> {
    let name = format!("GCE Virtual Firmware v{version}\0");
    let name = name.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let info = [&b"GCE NonHostInfo\0"[..], &[technology], &[0; 15]].concat();
    vec![(8, name), (0x11, info), (4, vec![0; 4])]
}

/// Returns a crypto-agile log with the SHA-256 bank.
pub fn log_of(events: &[(u32, Vec<u8>)]) -> Vec<u8> {
    let spec = [
        &b"Spec ID Event03\0"[..],
        &[0, 0, 0, 0, 0, 2, 0, 2],
        &[1, 0, 0, 0, 0x0b, 0, 32, 0, 0],
    ]
    .concat();
    let number = |value: usize| (value as u32).to_le_bytes();
    let mut log = [
        &number(0)[..],
        &number(3),
        &[0; 20],
        &number(spec.len()),
        &spec,
    ]
    .concat();
    for (kind, data) in events {
        let head = [number(0), kind.to_le_bytes(), number(1)].concat();
        log.extend([&head, &[0x0b, 0][..], &sha256(&[data])].concat());
        log.extend([&number(data.len())[..], data].concat());
    }
    log
}

/// A machine whose firmware has measured these events.
pub struct Machine {
    pub cloud: CloudTpm,
    pub host: Host,
}

impl Machine {
    pub fn start(events: &[(u32, Vec<u8>)]) -> Machine {
        let cloud = CloudTpm::gce();
        for (_, data) in events {
            let digest: String = sha256(&[data])
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect();
            cloud
                .tpm
                .tool("tpm2_pcrextend", &[&format!("0:sha256={digest}")]);
        }
        fs::write(cloud.path("log"), log_of(events)).unwrap();
        let host = Host::start();
        for (name, value) in [
            ("instance/zone", "projects/7/zones/europe-west3-b\n"),
            ("project/project-id", "example"),
            ("instance/name", "node-1"),
        ] {
            host.set(&format!("GET /computeMetadata/v1/{name}"), value.as_bytes());
        }
        Machine { cloud, host }
    }

    pub fn certify(&self, authority: &Authority, params: &CertificateParams) {
        let key = PublicKey::of_tpm(&self.cloud.key(KEY));
        self.store(&authority.certify_as_root(params, &key));
    }

    fn store(&self, certificate: &[u8]) {
        self.cloud
            .store(CERTIFICATE_INDEX, certificate, ATTRIBUTES_OF_GCE, None);
    }

    pub fn issuer(&self) -> Arc<dyn Issuer> {
        let machine = Arc::new(GoogleMachine::new(self.host.url()));
        let log = Some(PathBuf::from(self.cloud.path("log")));
        Arc::new(vtpm::TpmIssuer::new(self.cloud.location(), log, machine))
    }
}

/// Returns the extension with the instance.
fn of_instance(zone: &str, is_production: bool) -> CustomExtension {
    of_instance_in("example", zone, is_production)
}

fn of_instance_in(project: &str, zone: &str, is_production: bool) -> CustomExtension {
    let text = |text: &str| element(der::UTF8_STRING, &[text.as_bytes()]);
    let number = |bytes: &[u8]| element(der::INTEGER, &[bytes]);
    let truth = if is_production { 0xff } else { 0 };
    let properties = element(
        der::SEQUENCE,
        &[
            &element(context(0), &[&number(&[0])]),
            &element(context(1), &[&element(der::BOOLEAN, &[&[truth]])]),
            &element(context(2), &[&element(der::BOOLEAN, &[&[0]])]),
        ],
    );
    let fields = [
        text(zone),
        number(&[7]),
        text(project),
        number(&[0, 0x80, 0, 0, 0, 0, 0, 0, 1]),
        text("node-1"),
        element(context(0), &[&properties]),
    ];
    let content = element(der::SEQUENCE, &[&fields.concat()]);
    CustomExtension::from_oid_content(&[1, 3, 6, 1, 4, 1, 11129, 2, 1, 21], content)
}

pub fn good() -> CertificateParams {
    good_in("example")
}

/// Returns a good certificate of an instance in this project.
pub fn good_in(project: &str) -> CertificateParams {
    let mut params = of_attestation_key("9223372036854775809", None);
    params.custom_extensions = vec![of_instance_in(project, "europe-west3-b", true)];
    params
}

fn roots(authority: &Authority) -> Value {
    json!({"cloud": {"roots": [authority.root_pem()]}})
}

/// Returns a correct machine.
pub fn correct() -> Correct {
    let (authority, machine) = (Authority::new(), Machine::start(&events("1", 1)));
    machine.certify(&authority, &good());
    let issuer = machine.issuer();
    Correct::new(&VARIANT, issuer, roots(&authority), machine)
}

/// The certificate has only the modulus and the exponent of the key. The machine's name depends on the key's other fields, too.
#[test]
fn a_machine_has_one_name_however_it_encodes_its_key() {
    let machine = correct();
    let (document, judge) = machine.sample();
    judge.judge(&Evidence::new(&document, NONCE)).unwrap();
    let read: Value = serde_json::from_slice(&document).unwrap();
    let key = read["Attestation"]["ak_pub"].as_str().unwrap();
    let key = STANDARD.decode(key).unwrap();
    let renamed = |change: &dyn Fn(&mut [u8])| {
        let (mut read, mut key) = (read.clone(), key.clone());
        change(&mut key);
        read["Attestation"]["ak_pub"] = STANDARD.encode(key).into();
        judge.judge(&Evidence::new(read.to_string().as_bytes(), NONCE))
    };
    // TPMT_PUBLIC has the attributes behind type and nameAlg, and the exponent before the modulus with its length
    for bit in 0..32 {
        let error = renamed(&|key| key[4 + bit / 8] ^= 0x80 >> (bit % 8)).unwrap_err();
        let error = error.to_string();
        let is_named = error.contains("attributes") || error.contains("Qualified Name differs");
        assert!(is_named, "attribute {}: {error}", 31 - bit);
    }
    let explicit = renamed(&|key| key[18..22].copy_from_slice(&[0, 1, 0, 1]));
    let error = explicit.unwrap_err().to_string();
    assert!(error.contains("Qualified Name differs"), "{error}");
}

#[test]
fn a_machine_is_proved_by_its_certificate_and_its_firmware() {
    let authority = Authority::new();
    let machine = Machine::start(&events("1", 1));
    machine.certify(&authority, &good());
    let issuer = machine.issuer();
    prove(issuer.clone(), validator(&VARIANT, &roots(&authority))).unwrap();
    let requests = machine.host.requests();
    assert_eq!(requests.len(), 3, "the names are asked for once");
    assert!(
        requests
            .iter()
            .all(|request| request.contains("\nmetadata-flavor: google\n"))
    );

    let document = issuer.issue(USER_DATA, NONCE).unwrap();
    let judge = validator(&VARIANT, &roots(&authority));
    let claims = proven(&judge, &document);
    assert_eq!(claims.technology, "Google shielded VM with AMD SEV");
    assert_eq!(claims.chip.as_deref(), Some("9223372036854775809"));
    let read: Value = serde_json::from_slice(&document).unwrap();
    assert!(read["Attestation"]["ak_cert"].is_string());

    for (cloud, why) in [
        (json!({}), "leads to none of the accepted roots"),
        (
            json!({"roots": ["google-2022"]}),
            "leads to none of the accepted roots",
        ),
        (
            json!({"roots": [authority.root_pem()], "projects": ["other"]}),
            "project of the machine is \"example\"",
        ),
        (
            json!({"roots": [authority.root_pem()], "zones": ["us-east1-a"]}),
            "zone of the machine is \"europe-west3-b\"",
        ),
        (
            json!({"roots": [authority.root_pem()], "instances": ["1"]}),
            "instance of the machine is \"9223372036854775809\"",
        ),
    ] {
        let judge = validator(&VARIANT, &json!({"cloud": cloud}));
        let error = refused(&judge, &document);
        assert!(error.contains(why), "{error}, expected {why}");
    }
    let narrow =
        json!({"roots": [authority.root_pem()], "projects": ["7"], "zones": ["europe-west3-b"]});
    let judge = validator(&VARIANT, &json!({"cloud": narrow}));
    judge.judge(&Evidence::new(&document, NONCE)).unwrap();

    // fields that the quote covers, and fields that it does not cover
    for (member, why) in [
        ("InstanceInfo", "another connection"),
        ("ak_cert", "no certificate"),
    ] {
        let mut altered = read.clone();
        match member {
            "ak_cert" => drop(
                altered["Attestation"]
                    .as_object_mut()
                    .unwrap()
                    .remove(member),
            ),
            _ => altered[member] = Value::Null,
        }
        let error = refused(&judge, altered.to_string().as_bytes());
        assert!(error.contains(why), "{error}, expected {why}");
    }
    let mut without_log = read.clone();
    without_log["Attestation"]["event_log"] = Value::from("");
    let error = refused(&judge, without_log.to_string().as_bytes());
    assert!(error.contains("does not explain PCR 0"), "{error}");
}

#[test]
fn a_certificate_that_does_not_endorse_the_key_is_refused_by_name() {
    let cases: [(Alter, &str); 5] = [
        (
            |params| {
                params.extended_key_usages =
                    of_attestation_key("", Some(&[2, 23, 133, 8, 3])).extended_key_usages
            },
            "extended key usage",
        ),
        (
            |params| params.key_usages = vec![KeyUsagePurpose::KeyEncipherment],
            "not for signatures",
        ),
        (
            |params| params.custom_extensions.clear(),
            "names no instance",
        ),
        (
            |params| params.custom_extensions = vec![of_instance("europe-west3-b", false)],
            "not of Google's production",
        ),
        (
            |params| params.custom_extensions = vec![of_instance("us-east1-a", true)],
            "names another instance",
        ),
    ];
    let authority = Authority::new();
    let machine = Machine::start(&events("1", 1));
    let issuer = machine.issuer();
    let judge = validator(&VARIANT, &roots(&authority));
    let refusal = || {
        let document = issuer.issue(USER_DATA, NONCE).unwrap();
        machine
            .cloud
            .tpm
            .tool("tpm2_nvundefine", &["-C", "p", "0x1c10000"]);
        refused(&judge, &document)
    };
    for (alter, why) in WRONG_TIMES.into_iter().chain(cases) {
        let mut params = good();
        alter(&mut params);
        machine.certify(&authority, &params);
        let error = refusal();
        assert!(error.contains(why), "{error}, expected {why}");
    }
    machine.store(&authority.certify_as_root(&good(), &PublicKey::rsa(&[0xab; 256])));
    let error = refusal();
    assert!(error.contains("is of another key"), "{error}");
    machine.certify(&Authority::new(), &good());
    let error = refusal();
    assert!(error.contains("a signature is wrong"), "{error}");
    let document = issuer.issue(USER_DATA, NONCE).unwrap();
    let error = refused(&judge, &document);
    assert!(
        error.contains("no certificate of the attestation key"),
        "{error}"
    );
}

#[test]
fn a_host_that_does_not_encrypt_the_memory_is_refused_by_name() {
    let authority = Authority::new();
    let mut unmeasured = events("1", 1);
    unmeasured.swap(1, 2); // behind the separator
    let mut twice = events("1", 1);
    twice.insert(1, events("1", 0)[1].clone());
    for (events, why) in [
        (events("1", 0), "encrypts the memory with nothing"),
        (events("1", 3), "encrypts the memory with Intel TDX"),
        (events("0", 1), "older than version 1"),
        (events("1.5", 1), "not that of Google's firmware"),
        (unmeasured, "does not show"),
        (twice, "does not show"),
    ] {
        let machine = Machine::start(&events);
        machine.certify(&authority, &good());
        let document = machine.issuer().issue(USER_DATA, NONCE).unwrap();
        let judge = validator(&VARIANT, &roots(&authority));
        let error = refused(&judge, &document);
        assert!(error.contains(why), "{error}, expected {why}");
    }
}

/// Returns the value of PCR 0 after these events: those of type 3 extend nothing.
fn pcr_0(events: &[(u32, Vec<u8>)]) -> Vec<u8> {
    let extended = events.iter().filter(|(kind, _)| *kind != 3);
    extended.fold(vec![0; 32], |value, (_, data)| {
        sha256(&[&value, &sha256(&[data])])
    })
}

/// The types of events are not measured, so a machine without encrypted memory can write any types.
#[test]
fn a_log_with_other_types_does_not_change_what_google_measured() {
    const EV_IPL: u32 = 0xd;
    let genuine = events("1", 0);
    // software extends PCR 0 as if the host encrypted the memory
    let pretended = events("1", 4)[1].clone();
    let all = [&genuine[..], std::slice::from_ref(&pretended)].concat();
    let typed = |kinds: &[u32]| {
        let events = kinds.iter().zip(&all);
        let events = events.map(|(kind, (_, data))| (*kind, data.clone()));
        events.collect::<Vec<_>>()
    };
    let value = pcr_0(&all);
    let judge = |kinds: &[u32]| GoogleFirmware::measured(&log_of(&typed(kinds)), &value);
    for kinds in [
        [8, 0x11, 4, 0x11],
        [8, EV_IPL, 4, 0x11],
        [EV_IPL, EV_IPL, 4, 0x11],
        [0x11, 8, 4, 4],
    ] {
        assert_eq!(judge(&kinds).unwrap().technology, 0, "{kinds:?}");
    }
    let expected = "expected 4 (EV_SEPARATOR) with the digest of a separator, got type";
    for kinds in [
        [8, EV_IPL, EV_IPL, 0x11],
        [8, 0x11, 0x11, 0x11],
        [8, 4, 4, 0x11],
        [4, 0x11, EV_IPL, 0x11],
    ] {
        let error = judge(&kinds).unwrap_err();
        assert!(error.text.contains(expected), "{kinds:?}: {error}");
    }

    // an event that extends no register proves nothing, and does not end the firmware's part
    let silent = |kind: usize, events: &[(u32, Vec<u8>)]| (3, events[kind].1.clone());
    let mut added = genuine.clone();
    added.insert(1, silent(1, &events("1", 4)));
    added.insert(0, silent(2, &genuine));
    let firmware = GoogleFirmware::measured(&log_of(&added), &pcr_0(&added)).unwrap();
    assert_eq!((firmware.version, firmware.technology), (1, 0));

    // each separator of the specification ends the firmware's part, and no other event does
    for (separator, ends) in [
        ([0; 4], true),
        ([0xff; 4], true),
        ([1, 0, 0, 0], true),
        ([2, 0, 0, 0], false),
    ] {
        for kind in [4, EV_IPL] {
            let mut events = all.clone();
            events[2] = (kind, separator.to_vec());
            let firmware = GoogleFirmware::measured(&log_of(&events), &pcr_0(&events));
            let is_accepted = firmware.as_ref().is_ok_and(|it| it.technology == 0);
            assert_eq!(
                is_accepted,
                ends && kind == 4,
                "{separator:?}: {firmware:?}"
            );
            assert!(is_accepted || firmware.is_err());
        }
    }
    let error = GoogleFirmware::measured(&log_of(&all[..2]), &pcr_0(&all[..2])).unwrap_err();
    assert!(error.text.contains("no separator"), "{error}");

    // the data of an event is accepted only if its hash is the measured digest
    let mut log = log_of(&genuine);
    let at = log.windows(16).position(|it| it == b"GCE NonHostInfo\0");
    log[at.unwrap() + 16] = 4;
    let error = GoogleFirmware::measured(&log, &pcr_0(&genuine)).unwrap_err();
    assert!(error.text.contains("does not show"), "{error}");
}

#[test]
fn a_machine_without_metadata_says_so() {
    let cloud = CloudTpm::gce();
    let host = Host::start();
    let machine = Arc::new(GoogleMachine::new(host.url()));
    let issuer = vtpm::TpmIssuer::new(cloud.location(), None, machine);
    let error = issuer.issue(USER_DATA, NONCE).unwrap_err().to_string();
    assert!(
        error.contains("/computeMetadata/v1/instance/zone: expected status 200, got 404"),
        "{error}"
    );
    host.set("GET /computeMetadata/v1/instance/zone", b"\x1b[2J");
    let error = issuer.issue(USER_DATA, NONCE).unwrap_err().to_string();
    assert!(error.contains("expected a name"), "{error}");
}

/// A fresh node fetches nothing, and has the authorities that its version has built in: the join service brings the others.
#[test]
fn a_node_takes_the_authority_of_google_that_a_join_service_brings() {
    let (machine, node) = (Machine::start(&events("1", 1)), CloudTpm::gce());
    let (authority, strange) = (Authority::new(), Authority::new());
    let key = PublicKey::of_tpm(&machine.cloud.key(KEY));
    machine.store(&authority.certify(&good(), &key));
    Tpm::open(&machine.cloud.location())
        .unwrap()
        .measure_cluster_id(&[7; 32])
        .unwrap();
    let dir = tempfile::tempdir().unwrap();
    let policy = with(
        roots(&authority),
        &json!({"exceptions": ["any-image"], "measurements": {"8": "00".repeat(32)}}),
    );
    let file = dir.path().join("service-policy");
    fs::write(&file, policy.to_string()).unwrap();
    let policy = service_trust::read_policy(&file).unwrap();
    let trust = ServiceTrust::new(Default::default(), Some(policy), &VARIANT, node.location());
    let trust = trust.unwrap();
    let socket = dir.path().join("evidence");
    let host = Attester {
        issuer: machine.issuer(),
        tpm: machine.cloud.location(),
    };
    evidence::give(host, &socket);
    let service = Arc::new(RemoteIssuer::new(&VARIANT, socket));
    let join = |key_authority: Vec<u8>| {
        let client = atls::Client::new(None, None)
            .verify_strong(Some(verifier::judge(trust.judge().unwrap())))
            .to_join_service()
            .require_strong();
        let collateral = Collateral {
            key_authority,
            ..Collateral::default()
        };
        let issuer = Arc::new(Bringing {
            issuer: service.clone(),
            collateral,
        });
        evidence::meet(&client, issuer)
    };
    join(authority.between().to_vec()).unwrap();
    for (brought, why) in [
        (vec![], "leads to none of the accepted roots"),
        (strange.between().to_vec(), "a signature is wrong"),
        (vec![0x30; 5000], "longer than 4096 bytes"),
    ] {
        let refused = join(brought).unwrap_err();
        assert!(refused.contains(why), "{refused}, expected {why}");
    }
    // what the service brings: the authority that its sources have
    let document = machine.issuer().issue(USER_DATA, NONCE).unwrap();
    let published = Published::new(Ok(Some(authority.between().to_vec())));
    let find = VARIANT.collateral.unwrap();
    let brought = find(&document, &*published).unwrap();
    assert_eq!(brought.key_authority, authority.between());
    assert!(find(&document, &*Published::new(Ok(None))).is_none());
}

fn go_tpm_tools() -> PathBuf {
    go_module("event_logs_go", "github.com/google/go-tpm-tools").join("internal/test")
}

fn of_google() -> Vec<AkRoot> {
    AkRoot::demanded(&CloudRequirements::default(), ROOTS).unwrap()
}

/// Certificates of shielded VMs, of 2022. Those of endorsement keys differ in their key usage only.
#[test]
fn genuine_certificates_of_google_lead_to_its_roots_and_name_their_instances() {
    // 2024-01-01
    let time = UnixTime::since_unix_epoch(Duration::from_secs(1_704_067_200));
    for (file, root, name) in [
        ("uca", "google-2018", "cs-debug-uca"),
        ("pca", "google-2022", "cs-debug-pca"),
    ] {
        for algorithm in ["rsa", "ecc"] {
            let file = |usage| {
                let name = format!("certificates/{file}_tpm_{algorithm}_{usage}_cert.pem");
                CertificateDer::from_pem_file(go_tpm_tools().join(name)).unwrap()
            };
            let (sign, enc) = (file("sign"), file("enc"));
            let roots = of_google();
            let verify = |der: &[u8]| {
                let usage = verifier::gcp_sev_es::usage();
                let key = Certificate::parse(der).unwrap().key().to_vec();
                let certificate = ak_certificate::of_key(der, &key)?;
                let root = ak_certificate::verify(der, &[], &roots, usage, time)?;
                Ok::<_, Refusal>((root.to_owned(), instance(&certificate)?))
            };
            let (found, instance) = verify(&sign).unwrap();
            assert_eq!(found, root);
            assert!(
                instance.name.as_deref().unwrap().starts_with("cs-debug"),
                "{name}: {instance:?}"
            );
            assert!(verify(&enc).unwrap_err().text.contains("(key usage)"));
        }
    }
}

/// The certificate of the attestation key of a machine of 2026, whose issuer Google has had since 2024. It is part of the project vaportpm
/// (github.com/lockboot/vaportpm, MIT or Apache-2.0), which is no package.
#[test]
fn a_genuine_certificate_of_2026_leads_to_googles_root() {
    let path = format!("{}/tests/data/gcp-ak-2026.pem", support::ROOT);
    let der = CertificateDer::from_pem_file(path).unwrap();
    let time = UnixTime::since_unix_epoch(Duration::from_secs(1_893_456_000));
    let key = Certificate::parse(&der).unwrap().key().to_vec();
    let (roots, usage) = (of_google(), verifier::gcp_sev_es::usage());
    let certificate = ak_certificate::of_key(&der, &key).unwrap();
    let root = ak_certificate::verify(&der, &[], &roots, usage, time).unwrap();
    assert_eq!(root, "google-2022");
    let instance = instance(&certificate).unwrap();
    assert_eq!(instance.id.as_deref(), Some("2141209421113254303"));
    assert_eq!(instance.zone.as_deref(), Some("us-central1-a"));
}

/// Sources that have the certificate of one authority.
struct Published {
    authority: Result<Option<Vec<u8>>, Unavailable>,
    /// How often it was requested, and kept.
    requested: AtomicUsize,
    kept: AtomicUsize,
}

impl Published {
    fn new(authority: Result<Option<Vec<u8>>, Unavailable>) -> Arc<Published> {
        Arc::new(Published {
            authority,
            requested: AtomicUsize::new(0),
            kept: AtomicUsize::new(0),
        })
    }

    /// Returns how often the authority's certificate was requested, and how often it was kept.
    fn counts(&self) -> (usize, usize) {
        let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
        (count(&self.requested), count(&self.kept))
    }
}

impl Sources for Published {
    fn issuer(&self, certificate: &[u8]) -> Result<Option<Vec<u8>>, Unavailable> {
        assert!(Certificate::parse(certificate).is_ok());
        self.requested.fetch_add(1, Ordering::Relaxed);
        self.authority.clone()
    }

    fn keep_issuer(&self, _certificate: &[u8]) {
        self.kept.fetch_add(1, Ordering::Relaxed);
    }
}

/// Google has replaced the authority that issues the certificates before. A verifier has the root, and fetches the other certificates.
#[test]
fn a_machine_of_an_authority_that_is_not_built_in_is_proved() {
    let machine = Machine::start(&events("1", 1));
    let authority = Authority::new();
    let key = PublicKey::of_tpm(&machine.cloud.key(KEY));
    machine.store(&authority.certify(&good(), &key));
    let judge_of = |project: &str, published: &Arc<Published>| {
        let sources: Arc<dyn Sources> = published.clone();
        let demands = json!({"cloud": {"roots": [authority.root_pem()], "projects": [project]}});
        prove(
            machine.issuer(),
            validator_with(&VARIANT, &demands, &sources),
        )
    };
    let judge = |published: &Arc<Published>| judge_of("example", published);
    let published = Published::new(Ok(Some(authority.between().to_vec())));
    judge(&published).unwrap();
    let before = published.counts();
    assert!(before.0 > 0 && before.0 == before.1, "{before:?}");
    // no certificate is requested for a machine that is refused anyway
    let error = judge_of("other", &published).unwrap_err();
    assert!(error.contains("project of the machine is"), "{error}");
    assert_eq!(published.counts(), before);
    let strange = Authority::new().between().to_vec();
    for (published, why) in [
        (Ok(None), "leads to none of the accepted roots"),
        (Ok(Some(strange)), "a signature is wrong"),
        (
            Ok(Some(vec![0; 100])),
            "the certificate of the attestation key",
        ),
        (
            Err(Cause::Unreachable.because("its issuer cannot be had")),
            "; its issuer cannot be had",
        ),
    ] {
        let published = Published::new(published);
        let error = judge(&published).unwrap_err();
        assert!(error.contains(why), "{error}, expected {why}");
        let (requested, kept) = published.counts();
        assert!(requested > 0 && kept == 0);
    }
    // another issuer does not help a certificate that is refused for another reason
    let published = Published::new(Ok(Some(authority.between().to_vec())));
    machine
        .cloud
        .tpm
        .tool("tpm2_nvundefine", &["-C", "p", "0x1c10000"]);
    machine.store(&authority.certify(&good(), &PublicKey::rsa(&[0xab; 256])));
    let error = judge(&published).unwrap_err();
    assert!(error.contains("is of another key"), "{error}");
    assert_eq!(published.counts(), (0, 0));
}

/// Returns the values of a field of a protocol buffer: numbers as bytes.
fn fields(mut message: &[u8], wanted: u8) -> Vec<Vec<u8>> {
    let number = |message: &mut &[u8]| {
        let mut value = 0;
        for shift in (0..).step_by(7) {
            let byte = message[0];
            *message = &message[1..];
            value |= usize::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        value
    };
    let mut found = vec![];
    while !message.is_empty() {
        let tag = number(&mut message);
        let value = match tag & 7 {
            0 => number(&mut message).to_le_bytes().to_vec(),
            _ => {
                let len = number(&mut message);
                let (value, rest) = message.split_at(len);
                message = rest;
                value.to_vec()
            }
        };
        if tag >> 3 == usize::from(wanted) {
            found.push(value);
        }
    }
    found
}

/// Attestations of machines of 2021: the key has the certificate, and PCR 0 is the one that the TPM signed.
#[test]
fn genuine_attestations_of_google_have_the_certified_key_and_googles_firmware() {
    for file in ["gce-cos-85-no-nonce.pb", "gce-cos-85-nonce9009.pb"] {
        let message = fs::read(go_tpm_tools().join("attestations").join(file)).unwrap();
        let one = |field| fields(&message, field).remove(0);
        let (key, log, certificate) = (one(1), one(3), one(6));
        let roots = of_google();
        let fields_of = Certificate::parse(&certificate).unwrap();
        let modulus = &key[key.len() - 256..];
        assert!(fields_of.key().windows(256).any(|window| window == modulus));
        for quote in fields(&message, 2) {
            let attest = fields(&quote, 1).remove(0);
            let attest = Attest::parse(&attest).unwrap();
            let hierarchy = attest.hierarchy_of(&key).unwrap();
            // so the TPM shows the version of its firmware
            assert_eq!(hierarchy, Hierarchy::Endorsement);
            let version = attest.firmware_version(hierarchy);
            assert_eq!(version, Some(0x2016_0511_0016_2800));
        }
        let usage = verifier::gcp_sev_es::usage();
        let now = UnixTime::now();
        ak_certificate::verify(&certificate, &[], &roots, usage, now).unwrap();
        assert!(instance(&fields_of).unwrap().id.is_some());
        let pcrs = fields(&message, 2)
            .into_iter()
            .map(|quote| fields(&quote, 3).remove(0));
        let sha256 = pcrs
            .into_iter()
            .find(|pcrs| fields(pcrs, 1)[0][0] == 0x0b)
            .unwrap();
        let is_0 = |entry: &Vec<u8>| fields(entry, 1).first().is_none_or(|index| index[0] == 0);
        let pcr_0 = fields(&sha256, 2).into_iter().find(is_0).unwrap();
        let firmware = GoogleFirmware::measured(&log, &fields(&pcr_0, 2)[0]).unwrap();
        assert!(firmware.version >= 1, "{firmware:?}");
    }
}

#[test]
fn genuine_logs_of_google_say_what_encrypts_the_memory() {
    for (file, technology) in [
        ("cos-85-amd-sev.bin", 1),
        ("cos-93-amd-sev.bin", 1),
        ("cos-101-amd-sev.bin", 1),
        ("ubuntu-1804-amd-sev.bin", 1),
        ("ubuntu-2404-amd-sevsnp.bin", 4),
        ("rhel8-uefi.bin", 0),
    ] {
        let log = fs::read(go_tpm_tools().join("eventlogs").join(file)).unwrap();
        let mut pcr_0 = vec![0; 32];
        for event in event_log::parse(&log).events {
            if event.pcr == 0 && event.kind != 3 {
                pcr_0 = sha256(&[&pcr_0, event.sha256.unwrap()]);
            }
        }
        let firmware = GoogleFirmware::measured(&log, &pcr_0).unwrap();
        assert_eq!(firmware.technology, technology, "{file}");
        pcr_0[0] ^= 1;
        assert!(GoogleFirmware::measured(&log, &pcr_0).is_err());
    }
}
