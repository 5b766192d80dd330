//! The variant `qemu-snp`: documents of a machine whose reports a hierarchy of our own signs, and its register of the cluster ID.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bootstrapper::trust::evidence::Attester;
use bootstrapper::trust::service_trust::{ServiceTrust, read_policy};
use common::{attested, evidence};
use node::service_trust::{ClusterId, TrustSettings};
use serde_json::{Value, json};
use services::join_service::evidence::RemoteIssuer;
use tpm::Location;
use verifier::snp::{InstanceInfo, Reporter};
use verifier::sources::offline;
use verifier::{
    Evidence, Identified, IssueError, Issuer, NamedRegister, Policy, Stage, Validator, Variant,
    aws_sev_snp, azure_sev_snp, gcp_sev_snp, qemu_snp,
};

use super::forged::{CLOUD, sign_by_the_cloud};
use super::*;

const CLUSTER: [u8; 32] = [7; 32];
const USER_DATA: &[u8] = b"key";
const NONCE: &[u8] = b"nonce";
/// GUIDs of the certificate table: VCEK, VLEK.
const VCEK: u128 = 0x63da758d_e664_4564_adc5_f4b93be8accd;
const VLEK: u128 = 0xa8074bc2_a25a_483e_aae6_39c045a0b8a1;

/// A change of a report before it is signed.
type Change = fn(&mut [u8]);

/// Signs reports after a change. The host gives the certificate of this name.
struct Chip(Change, (u128, &'static str));

impl Reporter for Chip {
    fn report(&self, report_data: &[u8; 64]) -> Result<(Vec<u8>, Vec<u8>), IssueError> {
        let mut report = correct_report();
        report[0x50..0x90].copy_from_slice(report_data);
        (self.0)(&mut report);
        Hierarchy::get().sign(&mut report);
        let (guid, name) = self.1;
        let content = Hierarchy::get().certificate(name);
        let entry = [48, content.len() as u32].map(u32::to_le_bytes).concat();
        let table = [&guid.to_be_bytes()[..], &entry, &[0; 24], &content].concat();
        Ok((report, table))
    }
}

/// A machine: the folder of its register, and its chip.
struct Machine {
    folder: tempfile::TempDir,
    chip: Arc<Chip>,
}

impl Machine {
    fn new(change: Change) -> Machine {
        Machine {
            folder: tempfile::tempdir().unwrap(),
            chip: Arc::new(Chip(change, (VCEK, "vcek"))),
        }
    }

    fn register(&self) -> Location {
        // the folder does not exist yet
        let file = self.folder.path().join("run/cluster");
        format!("snp:{}", file.display()).parse().unwrap()
    }

    fn issuer(&self) -> Arc<qemu_snp::LaunchIssuer> {
        Arc::new(qemu_snp::LaunchIssuer::new(
            self.chip.clone(),
            self.register(),
        ))
    }

    fn document(&self) -> Vec<u8> {
        self.issuer().issue(USER_DATA, NONCE).unwrap()
    }
}

fn pem(name: &str) -> String {
    let text = STANDARD.encode(Hierarchy::get().certificate(name));
    format!("-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n")
}

/// Returns a policy for the machine, with these further members of `snp`.
fn policy(further: Value) -> Value {
    let mut policy = json!({
        "variant": "qemu-snp",
        "measurements": {"15": "00".repeat(32)},
        "amdRootKey": pem("ark"),
        "amdSigningKey": pem("ask"),
        "snp": {"launchMeasurements": ["aa".repeat(48)]},
    });
    for (name, value) in further.as_object().unwrap() {
        policy["snp"][name] = value.clone();
    }
    policy
}

fn read(policy: &Value) -> Policy {
    Policy::from_json(&policy.to_string()).unwrap()
}

fn validator(policy: &Value) -> Arc<dyn Validator> {
    let made = qemu_snp::VARIANT.validator_for(read(policy), &offline());
    made.unwrap()
}

fn judged(policy: &Value, document: &[u8]) -> Result<Identified, Refusal> {
    validator(policy).judge(&Evidence::new(document, NONCE))
}

fn refusal(policy: &Value, document: &[u8]) -> String {
    judged(policy, document).unwrap_err().to_string()
}

/// Connects two ends of attested TLS; returns why they refuse each other.
fn meet(client: atls::Client, server: atls::Server) -> Result<(), String> {
    let [client, server] = attested::meet(client, server);
    server.or(client).map_or(Ok(()), Err)
}

#[test]
fn a_machine_proves_itself_in_each_form_of_attested_tls_and_to_both_ends() {
    let machine = Machine::new(|_| ());
    let (issuer, judge) = (machine.issuer(), validator(&policy(json!({}))));
    for is_old in [false, true] {
        let client = atls::Client::new(None, Some(verifier::judge(judge.clone())));
        let client = if is_old { client.only_old() } else { client };
        meet(client, atls::Server::new(Some(issuer.clone()), None)).unwrap();
    }
    let client = atls::Client::new(Some(issuer), None);
    meet(
        client,
        atls::Server::new(None, Some(verifier::judge(judge))),
    )
    .unwrap();

    let identified = judged(&policy(json!({})), &machine.document()).unwrap();
    assert!(identified.is_endorsed && identified.machine.is_none());
    assert!(identified.cluster.unwrap().is_fresh());
    let claims = identified.platform.unwrap();
    assert_eq!(claims.technology, "AMD SEV-SNP (Milan)");
    assert_eq!(claims.signed_by, "amdRootKey, SEV-Milan, SEV-VCEK");
    assert_eq!(
        claims.bound,
        [
            "key and nonce of the connection: REPORT_DATA",
            "cluster ID, as software on the machine says: REPORT_DATA"
        ]
    );
}

/// Each demand of a policy, and each fault of a report.
#[test]
fn a_machine_that_fails_one_demand_is_refused_by_its_name() {
    let good: Change = |_| ();
    let digits = |byte: &str, count: usize| json!([byte.repeat(count)]);
    let cases: [(Change, Value, &str); 17] = [
        (
            good,
            json!({"launchMeasurements": digits("11", 48)}),
            "MEASUREMENT is aaaa",
        ),
        (
            good,
            json!({"hostData": digits("11", 32)}),
            "HOST_DATA is bbbb",
        ),
        (
            good,
            json!({"idKeys": digits("11", 48)}),
            "ID_KEY_DIGEST is cccc",
        ),
        (
            good,
            json!({"authorKeys": digits("11", 48)}),
            "AUTHOR_KEY_DIGEST is dddd",
        ),
        (good, json!({"chips": digits("11", 64)}), "is not accepted"),
        (
            good,
            json!({"minimumGuestSvn": 8}),
            "GUEST_SVN is 7, below the minimum 8",
        ),
        (
            good,
            json!({"minimumAbi": [2, 0]}),
            "demands an ABI below 2.0",
        ),
        (
            good,
            json!({"policyBits": "0x800000"}),
            "lacks the bits 0x800000",
        ),
        (
            good,
            json!({"floors": [{"product": "Milan", "minimum": {"snp": 25}}]}),
            "snp is 24, below the minimum 25",
        ),
        (
            |it| it[0xa] |= 1,
            json!({"refuseSmt": true}),
            "simultaneous multithreading",
        ),
        (|it| it[0xa] |= 8, json!({}), "allows debugging"),
        (|it| it[0xa] |= 4, json!({}), "allows a migration agent"),
        (|it| it[0x30] = 1, json!({}), "VMPL 1, above 0"),
        (
            |it| it[0x30..0x34].fill(0xff),
            json!({}),
            "the host requested the report",
        ),
        (|it| it[0x1a0] ^= 1, json!({}), "of another chip"),
        (|it| it[0x189] = 0x11, json!({}), "of a Genoa"),
        (
            |it| it[0x180] = 5,
            json!({}),
            "but the certificate of its chip is for",
        ),
    ];
    for (change, further, why) in cases {
        let document = Machine::new(change).document();
        let refused = refusal(&policy(further), &document);
        assert!(refused.contains(why), "{refused}, expected {why}");
    }
    let documents = [NONCE, b"other"].map(|nonce| {
        let machine = Machine::new(|_| ());
        machine.issuer().issue(USER_DATA, nonce).unwrap()
    });
    judged(&policy(json!({})), &documents[0]).unwrap();
    let refused = refusal(&policy(json!({})), &documents[1]);
    assert!(refused.contains("made for another one"), "{refused}");
}

#[test]
fn no_bit_of_a_report_can_be_changed_and_no_field_swapped() {
    let document: Value = serde_json::from_slice(&Machine::new(|_| ()).document()).unwrap();
    let report = document["InstanceInfo"]["AttestationReport"].as_str();
    let report = STANDARD.decode(report.unwrap()).unwrap();
    let with = |report: &[u8]| {
        let mut altered = document.clone();
        altered["InstanceInfo"]["AttestationReport"] = STANDARD.encode(report).into();
        judged(&policy(json!({})), altered.to_string().as_bytes())
    };
    with(&report).unwrap();
    for at in 0..report.len() {
        let mut altered = report.clone();
        altered[at] ^= 1 << (at % 8);
        assert!(with(&altered).is_err(), "{at:#x}");
    }
    // the user data and the certificate of something else
    let mut altered = document.clone();
    altered["UserData"] = STANDARD.encode(b"another key").into();
    let refused = refusal(&policy(json!({})), altered.to_string().as_bytes());
    assert!(refused.contains("made for another one"), "{refused}");
    let mut altered = document.clone();
    altered["InstanceInfo"]["ReportSigner"] = STANDARD.encode(pem("vlek")).into();
    refusal(&policy(json!({})), altered.to_string().as_bytes());
    for document in ["", "{}", "[]", r#"{"InstanceInfo":{},"UserData":""}"#] {
        let refused = refusal(&policy(json!({})), document.as_bytes());
        assert!(refused.contains("cannot be read"), "{refused}");
    }
    let long = vec![b' '; (256 << 10) + 1];
    let refused = refusal(&policy(json!({})), &long);
    assert!(
        refused.contains("262145 bytes, expected at most"),
        "{refused}"
    );
    for altered in mutations(document.to_string().as_bytes(), 3000) {
        if let Ok(identified) = judged(&policy(json!({})), &altered) {
            assert_eq!(identified.user_data, USER_DATA);
        }
    }
}

/// A report that another variant requests from the same chip, and a genuine one of a Milan, prove nothing here; and this variant's
/// document proves nothing there.
#[test]
fn a_report_of_another_variant_is_refused_and_the_reverse() {
    let chip = Chip(|_| (), (VCEK, "vcek"));
    let extra_data = verifier::sha256(&[USER_DATA, NONCE]);
    let of_azure = gcp_sev_snp::report_data(&verifier::sha256(&[b"runtime data"]));
    let document = |info: InstanceInfo| {
        let info = serde_json::to_value(&info).unwrap();
        json!({"InstanceInfo": info, "UserData": STANDARD.encode(USER_DATA)}).to_string()
    };
    for report_data in [
        aws_sev_snp::report_data(b"an attestation key"),
        gcp_sev_snp::report_data(&extra_data),
        of_azure,
    ] {
        let info = InstanceInfo::of(&chip, &report_data, None).unwrap();
        let refused = refusal(&policy(json!({})), document(info).as_bytes());
        assert!(
            refused.contains("a machine of another variant"),
            "{refused}"
        );
    }
    let mut info = InstanceInfo::of(&chip, &[0; 64], None).unwrap();
    info.attestation_report.0 = milan_report();
    let refused = refusal(&policy(json!({})), document(info).as_bytes());
    assert!(refused.contains("made for another one"), "{refused}");

    let own = Machine::new(|_| ()).document();
    for variant in [
        &aws_sev_snp::VARIANT,
        &gcp_sev_snp::VARIANT,
        &azure_sev_snp::VARIANT,
    ] {
        let mut policy = policy(json!({}));
        policy["variant"] = variant.name.into();
        let judge = variant.validator_for(read(&policy), &offline()).unwrap();
        let refused = judge.judge(&Evidence::new(&own, NONCE)).unwrap_err();
        assert!(refused.text.contains("cannot be read"), "{refused}");
    }
}

#[test]
fn a_machine_joins_one_cluster_and_its_register_survives_until_it_restarts() {
    let machine = Machine::new(|_| ());
    let register = machine.register();
    assert!(!bootstrapper::trust::evidence::is_marked(&register).unwrap());
    assert!(verifier::foreign_writer(&register).is_none());
    verifier::mark(&register, &CLUSTER).unwrap();
    assert!(bootstrapper::trust::evidence::is_marked(&register).unwrap());
    for id in [CLUSTER, [8; 32]] {
        let why = verifier::mark(&register, &id).unwrap_err().to_string();
        assert!(why.contains("exists"), "{why}");
    }
    assert!(
        verifier::cluster_register(&register)
            .unwrap()
            .is_of(&CLUSTER)
    );

    let document = machine.document();
    let refused = refusal(&policy(json!({})), &document);
    let expected = format!(
        "register of the cluster ID: expected {}, got ",
        "00".repeat(32)
    );
    assert!(refused.starts_with(&expected), "{refused}");
    let judge = |id: [u8; 32]| {
        let policy = read(&policy(json!({}))).expecting_cluster(&id);
        let judge = qemu_snp::VARIANT.validator_for(policy, &offline()).unwrap();
        judge.judge(&Evidence::new(&document, NONCE))
    };
    assert!(judge(CLUSTER).unwrap().cluster.unwrap().is_of(&CLUSTER));
    judge([8; 32]).unwrap_err();

    let measured = (qemu_snp::VARIANT.measure)(&register, Stage::Booted).unwrap();
    assert_eq!(measured.booted.keys().collect::<Vec<_>>(), [&15]);
    assert_eq!(measured.booted, measured.initramfs);
    // a file that was cut off belongs to no cluster and to none
    for length in [0, 31, 48] {
        fs::write(machine.folder.path().join("run/cluster"), vec![0; length]).unwrap();
        let why = bootstrapper::trust::evidence::is_marked(&register)
            .unwrap_err()
            .to_string();
        assert!(why.contains("expected 32 bytes"), "{why}");
        assert!(machine.issuer().issue(USER_DATA, NONCE).is_err());
    }
    let why = tpm::Tpm::open(&register).err().unwrap().to_string();
    assert!(why.contains("has no TPM"), "{why}");
}

#[test]
fn a_policy_must_say_what_boots() {
    let error = |policy: Value| {
        let made = qemu_snp::VARIANT.validator_for(read(&policy), &offline());
        made.err().unwrap().to_string()
    };
    let mut without = policy(json!({}));
    without["snp"] = json!({"chips": ["c5".repeat(64)]});
    let why = error(without.clone());
    assert!(why.contains("snp.launchMeasurements, snp.idKeys"), "{why}");
    for (name, length) in [
        ("idKeys", 48),
        ("authorKeys", 48),
        ("launchMeasurements", 48),
    ] {
        without["snp"] = json!({name: ["aa".repeat(length)]});
        validator(&without);
    }
    for (index, length) in [("4", 32), ("15", 48), ("0", 48)] {
        let mut other = policy(json!({}));
        other["measurements"] = json!({index: "11".repeat(length)});
        let why = error(other);
        assert!(why.contains("have only the register 15"), "{why}");
    }
    let mut other = policy(json!({}));
    other["attestationKeys"] = json!([format!("000b{}", "22".repeat(32))]);
    let why = error(other);
    assert!(
        why.contains("attestationKeys: the attestation variant qemu-snp cannot check"),
        "{why}"
    );
}

#[test]
fn the_key_of_a_cloud_counts_only_if_the_policy_names_the_cloud() {
    let machine = Machine {
        folder: tempfile::tempdir().unwrap(),
        chip: Arc::new(Chip(sign_by_the_cloud, (VLEK, "vlek"))),
    };
    let document = machine.document();
    let mut policy = policy(json!({}));
    policy["amdSigningKey"] = pem("asvk").into();
    let refused = refusal(&policy, &document);
    assert!(
        refused.contains("signed by a VLEK, the key of a cloud"),
        "{refused}"
    );
    policy["snp"]["clouds"] = json!([CLOUD]);
    judged(&policy, &document).unwrap();
    policy["snp"]["clouds"] = json!(["CN=elsewhere"]);
    let refused = refusal(&policy, &document);
    assert!(refused.contains("which is not accepted"), "{refused}");
}

/// The variant of a node with this launch digest, which the chips of the tests do not sign.
static OF_11: Variant = qemu_snp::VARIANT.launched_as(|| Ok([0x11; 48]));
/// The variant of a node with the launch digest of the chips of the tests.
static OF_AA: Variant = qemu_snp::VARIANT.launched_as(|| Ok([0xaa; 48]));

/// Connects a fresh node to a join service on this machine, whose host gives the evidence; the file is the setting `service-policy`.
fn join(variant: &'static Variant, file: &Path, service: &Machine) -> Result<(), String> {
    let settings = TrustSettings {
        cluster: Some(ClusterId(CLUSTER)),
        require_strong: true,
    };
    let policy = read_policy(file).map_err(|error| error.to_string())?;
    let node = Machine::new(|_| ()).register();
    let trust = ServiceTrust::new(settings, Some(policy), variant, node)
        .map_err(|error| error.to_string())?;
    let judge = trust.judge().map_err(|error| error.to_string())?;
    let client = atls::Client::new(None, None).verify_strong(Some(verifier::judge(judge)));
    let host = Attester {
        issuer: service.issuer(),
        tpm: service.register(),
    };
    let socket = service.folder.path().join("evidence");
    evidence::give(host, &socket);
    let issuer = RemoteIssuer::new(variant, socket);
    evidence::meet(&client.to_join_service(), Arc::new(issuer))
}

#[test]
fn a_fresh_node_accepts_a_service_with_its_own_launch_digest_or_one_of_the_setting() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("service-policy");
    let write = |snp: Value| {
        let mut policy = policy(json!({}));
        policy["snp"] = snp;
        fs::write(&file, policy.to_string()).unwrap();
    };
    let service = Machine::new(|_| ());
    let own = json!({"launchMeasurements": ["11".repeat(48)]});
    let both = json!({"launchMeasurements": ["11".repeat(48), "aa".repeat(48)]});
    write(own.clone());
    // a host gives no evidence before its machine is a member
    assert!(join(&OF_AA, &file, &service).is_err());
    verifier::mark(&service.register(), &CLUSTER).unwrap();
    join(&OF_AA, &file, &service).unwrap();
    let why = join(&OF_11, &file, &service).unwrap_err();
    assert!(why.contains("MEASUREMENT is aaaa"), "{why}");
    write(both);
    join(&OF_11, &file, &service).unwrap();
    // who signs launch digests is enough
    write(json!({"idKeys": ["cc".repeat(48)]}));
    join(&OF_11, &file, &service).unwrap();
    // a file that pins no launch accepts any image
    write(json!({"chips": ["c5".repeat(64)]}));
    let why = join(&OF_AA, &file, &service).unwrap_err();
    assert!(why.contains("no register is enforced"), "{why}");
    // a member of another cluster
    let other = Machine::new(|_| ());
    verifier::mark(&other.register(), &[8; 32]).unwrap();
    write(own);
    let why = join(&OF_AA, &file, &other).unwrap_err();
    assert!(why.contains("belongs to another cluster"), "{why}");
}

/// Runs `firstlight` in a folder; returns its exit code and what it says.
fn firstlight(folder: &Path, args: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(support::program::built("firstlight"));
    let output = command.current_dir(folder).args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (said, errors) = (text(output.stdout), text(output.stderr));
    (output.status.code().unwrap(), said, errors)
}

#[test]
fn firstlight_verifies_a_machine_and_explains_its_evidence() {
    let folder = tempfile::tempdir().unwrap();
    let machine = Machine::new(|_| ());
    let verify = |mut policy: Value, more: &[&str]| {
        // it fetches no list of AMD
        policy["snp"]["revocationList"] = "optional".into();
        fs::write(folder.path().join("policy.json"), policy.to_string()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let issuer = machine.issuer();
        let serving = thread::spawn(move || {
            let (socket, _) = listener.accept().unwrap();
            let soon = Instant::now() + Duration::from_secs(60);
            drop(atls::Server::new(Some(issuer), None).handshake(socket, soon));
        });
        let args = [
            "verify",
            &address,
            "--timeout=60s",
            "--offline",
            "--policy=policy.json",
        ];
        let said = firstlight(folder.path(), &[&args[..], more].concat());
        serving.join().unwrap();
        said
    };
    let (code, said, errors) = verify(policy(json!({})), &["--fresh"]);
    assert_eq!(code, 0, "{said}{errors}");
    for line in [
        "verdict:   proven",
        "cluster:   none",
        "AMD SEV-SNP (Milan)",
        "believed:  endorsed",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
    assert!(
        said.contains(&format!("MEASUREMENT         {}", "aa".repeat(48))),
        "{said}"
    );
    let wrong = json!({"launchMeasurements": ["11".repeat(48)]});
    let (code, said, errors) = verify(policy(wrong), &["--fresh"]);
    assert!(
        code == 3 && (said + &errors).contains("MEASUREMENT is aaaa"),
        "{code}: {errors}"
    );

    verifier::mark(&machine.register(), &CLUSTER).unwrap();
    let id = "07".repeat(32);
    let save = ["--cluster-id", &id, "--save=evidence.json"];
    let (code, said, errors) = verify(policy(json!({})), &save);
    assert_eq!(code, 0, "{said}{errors}");
    assert!(said.contains(&format!("cluster:   {id}")), "{said}");
    let (code, said, errors) = firstlight(folder.path(), &["explain", "evidence.json"]);
    assert_eq!(code, 0, "{said}{errors}");
    assert!(said.contains("PCR 15"), "{said}");

    let check = |policy: Value| {
        fs::write(folder.path().join("checked.json"), policy.to_string()).unwrap();
        firstlight(folder.path(), &["policy", "check", "checked.json"])
    };
    let (code, said, errors) = check(policy(json!({})));
    assert_eq!(code, 0, "{said}{errors}");
    assert!(
        said.contains("snp.floors") && !said.contains("PCR 4"),
        "{said}"
    );
    let mut without = policy(json!({}));
    without["snp"] = json!({"chips": ["c5".repeat(64)]});
    let (code, said, errors) = check(without);
    assert!(
        code == 1 && (said + &errors).contains("snp.launchMeasurements"),
        "{errors}"
    );
}
