//! The TPM and its documents, against swtpm and tpm2-tools.

use support::mutation::mutations;
use support::random::Random;
use support::swtpm;

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bootstrapper::lock::node_lock::{Locking, NodeLock};
use bootstrapper::trust::evidence::is_marked;
use serde_json::{Value, json};
use swtpm::{Proxy, Swtpm, message};
use tpm::{Bank, Location, Tpm};
use verifier::refusal::Kind;
use verifier::{Evidence, Issuer, Measurement, Policy, Refusal, Session, Validator, qemu_vtpm};
use verifier::{MachineIdentity, PeerRole, session};
use verifier::{Registers, cluster_register};

const USER_DATA: &[u8] = b"the hash of a certificate's key.";
const NONCE: &[u8] = b"the verifier's own random number";

fn location(tpm: &Swtpm) -> Location {
    tpm.location().parse().unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn policy(registers: &[(u32, [u8; 32])]) -> Policy {
    let enforced = |(index, expected): &(u32, [u8; 32])| {
        (
            *index,
            Measurement {
                expected: expected.to_vec(),
                warn_only: false,
            },
        )
    };
    Policy::new(registers.iter().map(enforced).collect()).unwrap()
}

fn validate(
    registers: &[(u32, [u8; 32])],
    document: &[u8],
    nonce: &[u8],
) -> Result<Vec<u8>, Refusal> {
    let judged =
        qemu_vtpm::validator(Arc::new(policy(registers))).judge(&Evidence::new(document, nonce));
    judged.map(|identified| identified.user_data)
}

fn issue(tpm: &Swtpm) -> Vec<u8> {
    qemu_vtpm::issuer(location(tpm), None)
        .issue(USER_DATA, NONCE)
        .unwrap()
}

fn as_json(document: &[u8]) -> Value {
    serde_json::from_slice(document).unwrap()
}

fn bytes(value: &Value) -> Vec<u8> {
    STANDARD.decode(value.as_str().unwrap()).unwrap()
}

const ZERO_15: &[(u32, [u8; 32])] = &[(15, [0; 32])];

#[test]
fn a_genuine_document_gives_its_user_data() {
    let tpm = Swtpm::start();
    assert_eq!(validate(ZERO_15, &issue(&tpm), NONCE).unwrap(), USER_DATA);
}

/// Between a verifier and a machine, an attacker can pass the document on and change what no key has signed.
#[test]
fn a_refusal_names_the_machine_only_if_that_machine_itself_is_the_peer() {
    let tpm = Swtpm::start();
    let (digest, other) = ([1; 32], [2; 32]);
    let user_data = session::user_data(PeerRole::Server, &digest, &[]);
    let issuer = qemu_vtpm::issuer(location(&tpm), None);
    let document = issuer.issue(&user_data, NONCE).unwrap();
    let accepts = |registers| qemu_vtpm::validator(Arc::new(policy(registers)));
    let machine = accepts(ZERO_15).judge(&Evidence::new(&document, NONCE));
    let machine = machine.unwrap().machine;
    assert!(machine.is_some());
    let peer = MachineIdentity::default();
    let refusal = |document: &[u8], digest: Option<&[u8; 32]>| {
        let session = digest.map(|digest| Session {
            digest,
            secret: &[],
            peer: &peer,
            collateral: None,
        });
        let evidence = Evidence {
            session,
            ..Evidence::new(document, NONCE)
        };
        accepts(&[(4, [9; 32])]).judge(&evidence).unwrap_err()
    };
    assert_eq!(refusal(&document, Some(&digest)).machine, machine);
    assert_eq!(refusal(&document, Some(&other)).machine, None);
    assert_eq!(refusal(&document, None).machine, None);
    // the user data of this connection, which the key has not signed
    let mut changed = as_json(&issuer.issue(USER_DATA, NONCE).unwrap());
    changed["UserData"] = STANDARD.encode(user_data).into();
    let refusal = refusal(changed.to_string().as_bytes(), Some(&digest));
    assert_eq!((refusal.kind, &refusal.machine), (Kind::Nonce, &None));
}

/// The firmware extends another bank, so that a program of the machine decides what is in this one.
#[test]
fn a_machine_whose_firmware_does_not_extend_the_bank_is_refused_whatever_the_policy_says() {
    let mut tpm = Swtpm::start();
    tpm.reset();
    let zeros: &[&[(u32, [u8; 32])]] = &[ZERO_15, &[(4, [0; 32]), (9, [0; 32]), (15, [0; 32])]];
    for registers in zeros {
        let refusal = validate(registers, &issue(&tpm), NONCE);
        let refusal = refusal.unwrap_err().to_string();
        assert!(refusal.contains("tpm2_pcrallocate"), "{refusal}");
    }
    // as systemd-pcrosseparator does
    let word = "ab".repeat(32);
    let separators = [4, 7].map(|pcr| format!("{pcr}:sha256={word}"));
    tpm.tool("tpm2_pcrextend", &[&separators[0], &separators[1]]);
    let refusal = validate(ZERO_15, &issue(&tpm), NONCE);
    let refusal = refusal.unwrap_err().to_string();
    assert!(refusal.contains("tpm2_pcrallocate"), "{refusal}");
    tpm.reboot();
    assert!(validate(ZERO_15, &issue(&tpm), NONCE).is_ok());
}

#[test]
fn the_document_has_the_old_systems_form() {
    let tpm = Swtpm::start();
    let text = String::from_utf8(issue(&tpm)).unwrap();
    assert!(
        text.starts_with(r#"{"Attestation":{"ak_pub":""#),
        "{text:.80}"
    );
    assert!(text.contains(r#""TeeAttestation":null},"InstanceInfo":null,"UserData":""#));
    assert!(
        text.contains(r#""pcrs":{"hash":11,"pcrs":{"0":""#),
        "{text}"
    );
    let document = as_json(text.as_bytes());
    let key = bytes(&document["Attestation"]["ak_pub"]);
    // TPMT_PUBLIC: RSA, SHA-256, attributes, no policy, no symmetric algorithm, RSASSA with SHA-256, 2048 bits
    assert_eq!(
        hex(&key[..24]),
        "0001000b000500720000001000140 00b0800000000000100".replace(' ', "")
    );
    assert_eq!(key.len(), 280);
}

#[test]
fn power_cuts_do_not_lock_a_machine_out_of_its_quotes() {
    let mut tpm = Swtpm::start();
    let tries = tpm.tool("tpm2_getcap", &["properties-variable"]);
    let tries = tries
        .lines()
        .find_map(|line| line.trim().strip_prefix("TPM2_PT_MAX_AUTH_FAIL:"));
    let tries = u32::from_str_radix(tries.unwrap().trim().trim_start_matches("0x"), 16).unwrap();
    assert!((1..100).contains(&tries));
    for _ in 0..tries + 2 {
        assert_eq!(validate(ZERO_15, &issue(&tpm), NONCE).unwrap(), USER_DATA);
        // a node that belongs to a cluster does the same
        Tpm::open(&location(&tpm))
            .unwrap()
            .pcr_event(15, &[1; 32])
            .unwrap();
        tpm.reboot();
    }
    let counted = tpm.tool("tpm2_getcap", &["properties-variable"]);
    let counted = counted
        .lines()
        .find_map(|line| line.trim().strip_prefix("TPM2_PT_LOCKOUT_COUNTER:"));
    assert_eq!(counted.map(str::trim), Some("0x0"));
}

#[test]
fn tpm2_tools_verify_the_quote_and_read_the_same_registers() {
    let tpm = Swtpm::start();
    let document = as_json(&issue(&tpm));
    let quotes = document["Attestation"]["quotes"].as_array().unwrap();
    let quote = quotes
        .iter()
        .find(|quote| quote["pcrs"]["hash"] == 11)
        .unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (message, signature) = (
        file("quote", &bytes(&quote["quote"])),
        file("signature", &bytes(&quote["raw_sig"])),
    );
    let key = dir.path().join("key.pem").to_str().unwrap().to_owned();
    tpm.tool(
        "tpm2_readpublic",
        &["-c", "0x81008f01", "-f", "pem", "-o", &key],
    );
    let extra = [USER_DATA, NONCE].concat();
    let sha256 = |data: &[u8]| ring::digest::digest(&ring::digest::SHA256, data);
    let nonce = hex(sha256(sha256(&extra).as_ref()).as_ref());
    tpm.tool(
        "tpm2_checkquote",
        &[
            "-u", &key, "-m", &message, "-s", &signature, "-g", "sha256", "-q", &nonce,
        ],
    );

    let read = tpm.tool("tpm2_pcrread", &["sha256"]);
    for (index, value) in Tpm::open(&location(&tpm))
        .unwrap()
        .pcrs(Bank::Sha256)
        .unwrap()
    {
        let value = format!("0x{}", hex(&value).to_uppercase());
        let line = read.lines().find(|line| {
            line.trim().starts_with(&format!("{index} "))
                || line.trim().starts_with(&format!("{index}:"))
        });
        assert!(
            line.unwrap().contains(&value),
            "PCR {index}: {value} against {line:?}"
        );
    }
}

#[test]
fn an_event_is_measured_as_by_tpm2_pcrevent() {
    let (ours, theirs) = (Swtpm::start(), Swtpm::start());
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    fs::write(&data, [7; 32]).unwrap();
    Tpm::open(&location(&ours))
        .unwrap()
        .pcr_event(15, &[7; 32])
        .unwrap();
    theirs.tool("tpm2_pcrevent", &["15", data.to_str().unwrap()]);
    let all = "sha1:15+sha256:15+sha384:15+sha512:15";
    assert_eq!(
        ours.tool("tpm2_pcrread", &[all]),
        theirs.tool("tpm2_pcrread", &[all])
    );
    let value = Tpm::open(&location(&ours))
        .unwrap()
        .pcrs(Bank::Sha256)
        .unwrap()[&15]
        .clone();
    assert_eq!(value, Registers::Pcrs.after(&[7; 32]).as_ref());
}

/// A policy expects of a member one measurement from zero in every bank.
#[test]
fn the_node_lock_reads_back_what_it_measured() {
    let tpm = Swtpm::start();
    assert!(matches!(
        NodeLock::new(location(&tpm)).lock([7; 32]),
        Locking::Taken
    ));
    assert!(cluster_register(&location(&tpm)).unwrap().is_of(&[7; 32]));

    for bank in ["sha1", "sha256", "sha384", "sha512"] {
        let tpm = Swtpm::start();
        let length = match bank {
            "sha1" => 20,
            _ => bank[3..].parse::<usize>().unwrap() / 8,
        };
        tpm.tool(
            "tpm2_pcrextend",
            &[&format!("15:{bank}={}", "01".repeat(length))],
        );
        let lock = NodeLock::new(location(&tpm));
        let Locking::Failed(why) = lock.lock([7; 32]) else {
            panic!("{bank}: the lock was taken")
        };
        let expected = format!(
            "PCR 15 of the S{} bank is wrong after the cluster ID was measured",
            &bank[1..]
        );
        let why = why.to_string();
        assert!(why.contains(&expected), "{bank}: {why}");
        assert_eq!(
            lock.cluster(),
            None,
            "the node is good for nothing until it reboots"
        );
    }
}

#[test]
fn a_node_is_marked_from_the_event_to_the_reboot() {
    let mut tpm = Swtpm::start();
    assert!(!is_marked(&location(&tpm)).unwrap());
    Tpm::open(&location(&tpm))
        .unwrap()
        .pcr_event(15, &[1; 32])
        .unwrap();
    assert!(is_marked(&location(&tpm)).unwrap());
    tpm.reboot();
    assert!(!is_marked(&location(&tpm)).unwrap());
}

#[test]
fn a_marked_node_is_a_member_of_its_cluster_and_not_fresh() {
    let tpm = Swtpm::start();
    Tpm::open(&location(&tpm))
        .unwrap()
        .pcr_event(15, &[1; 32])
        .unwrap();
    let document = issue(&tpm);
    let refusal = validate(ZERO_15, &document, NONCE).unwrap_err().to_string();
    let (expected, got) = ("0".repeat(64), Registers::Pcrs.after(&[1; 32]).to_string());
    let why = "the machine has joined a cluster since it started: reboot it to attest again. If it belongs to none, its \
               console names the unit of systemd that measured into this register";
    assert_eq!(
        refusal,
        format!("PCR 15: expected {expected}, got {got}; {why}")
    );
    let member = policy(ZERO_15).expecting_cluster(&[1; 32]);
    assert!(
        qemu_vtpm::validator(Arc::new(member))
            .judge(&Evidence::new(&document, NONCE))
            .is_ok()
    );
}

#[test]
fn the_attestation_key_survives_a_reboot() {
    let mut tpm = Swtpm::start();
    let first = as_json(&issue(&tpm))["Attestation"]["ak_pub"].clone();
    tpm.reboot();
    assert_eq!(as_json(&issue(&tpm))["Attestation"]["ak_pub"], first);
}

/// Makes a primary key with tpm2-tools at the handle of the attestation key: by Constellation's template, or with further
/// attributes. Returns its Name in hexadecimal.
fn keep_key_of_tpm2_tools(tpm: &Swtpm, further: &str) -> String {
    let attributes =
        format!("fixedtpm|fixedparent|sensitivedataorigin|userwithauth|restricted|sign{further}");
    let dir = tempfile::tempdir().unwrap();
    let context = dir.path().join("key").to_str().unwrap().to_owned();
    let template = [
        "-C",
        "o",
        "-g",
        "sha256",
        "-G",
        "rsa2048:rsassa-sha256:null",
        "-a",
        &attributes,
    ];
    tpm.tool(
        "tpm2_createprimary",
        &[&template[..], &["-c", &context]].concat(),
    );
    tpm.tool(
        "tpm2_evictcontrol",
        &["-C", "o", "-c", &context, "0x81008f01"],
    );
    tpm.tool("tpm2_flushcontext", &["-t"]);
    name_of_kept_key(tpm)
}

fn name_of_kept_key(tpm: &Swtpm) -> String {
    let public = tpm.tool("tpm2_readpublic", &["-c", "0x81008f01"]);
    public
        .lines()
        .find_map(|line| line.strip_prefix("name: "))
        .unwrap()
        .to_owned()
}

/// `AttestationKeyRSA` of go-tpm-tools makes the same key in the same TPM.
#[test]
fn the_attestation_key_is_that_of_the_old_systems_template() {
    let tpm = Swtpm::start();
    issue(&tpm);
    let ours = name_of_kept_key(&tpm);
    tpm.tool("tpm2_evictcontrol", &["-C", "o", "-c", "0x81008f01"]);
    assert_eq!(keep_key_of_tpm2_tools(&tpm, ""), ours);
    issue(&tpm);
    assert_eq!(name_of_kept_key(&tpm), ours);
}

/// The key has noDA. Other machines identify this machine by it.
#[test]
fn a_key_that_an_earlier_version_made_stays_and_is_used() {
    let tpm = Swtpm::start();
    let earlier = keep_key_of_tpm2_tools(&tpm, "|noda");
    let machine = qemu_vtpm::validator(Arc::new(policy(ZERO_15)))
        .judge(&Evidence::new(&issue(&tpm), NONCE))
        .unwrap()
        .machine
        .unwrap();
    assert_eq!(
        (name_of_kept_key(&tpm), format!("000b{machine}")),
        (earlier.clone(), earlier)
    );
}

#[test]
fn a_machine_knows_the_name_that_a_validator_gives_it() {
    let mut tpm = Swtpm::start();
    let of_itself = |tpm: &Swtpm| qemu_vtpm::issuer(location(tpm), None).machine().unwrap();
    let validator = qemu_vtpm::validator(Arc::new(policy(ZERO_15)));
    let machine = validator
        .judge(&Evidence::new(&issue(&tpm), NONCE))
        .unwrap()
        .machine;
    assert!(machine.is_some() && of_itself(&tpm) == machine);
    tpm.reboot();
    assert_eq!(of_itself(&tpm), machine);
    assert_ne!(of_itself(&Swtpm::start()), machine);
}

#[test]
fn another_key_at_the_handle_is_replaced() {
    let tpm = Swtpm::start();
    let dir = tempfile::tempdir().unwrap();
    let context = dir.path().join("key").to_str().unwrap().to_owned();
    tpm.tool(
        "tpm2_createprimary",
        &["-C", "o", "-G", "ecc", "-c", &context],
    );
    tpm.tool(
        "tpm2_evictcontrol",
        &["-C", "o", "-c", &context, "0x81008f01"],
    );
    assert!(validate(ZERO_15, &issue(&tpm), NONCE).is_ok());
}

/// A machine must get its disk even if other objects fill its TPM.
#[test]
fn a_tpm_with_no_room_for_the_attestation_key_makes_it_each_time() {
    let tpm = Swtpm::start();
    let kept = as_json(&issue(&tpm))["Attestation"]["ak_pub"].clone();
    tpm.tool("tpm2_evictcontrol", &["-C", "o", "-c", "0x81008f01"]);
    let dir = tempfile::tempdir().unwrap();
    let context = dir.path().join("key").to_str().unwrap().to_owned();
    tpm.tool(
        "tpm2_createprimary",
        &["-C", "o", "-G", "ecc", "-c", &context],
    );
    tpm.tool("tpm2_flushcontext", &["-t"]);
    let fill = |handle: u32| {
        let mut evict = std::process::Command::new("tpm2_evictcontrol");
        evict
            .args(["-C", "o", "-c", &context, &format!("{handle:#x}")])
            .env("TPM2TOOLS_TCTI", tpm.location());
        let done = evict.output().unwrap().status.success();
        tpm.tool("tpm2_flushcontext", &["-t"]);
        done
    };
    assert!(!(0x8100_0000..0x8100_1000).all(fill), "it has an end");

    for _ in 0..4 {
        let document = issue(&tpm);
        assert!(validate(ZERO_15, &document, NONCE).is_ok());
        assert_eq!(as_json(&document)["Attestation"]["ak_pub"], kept);
    }
    assert_eq!(tpm.tool("tpm2_getcap", &["handles-transient"]).trim(), "");
}

#[test]
fn a_document_for_another_nonce_or_other_user_data_is_refused() {
    let tpm = Swtpm::start();
    let document = issue(&tpm);
    assert!(
        validate(ZERO_15, &document, b"another")
            .unwrap_err()
            .to_string()
            .contains("another connection")
    );
    let mut swapped = as_json(&document);
    swapped["UserData"] = json!(STANDARD.encode("somebody else's key"));
    let swapped = serde_json::to_vec(&swapped).unwrap();
    assert!(
        validate(ZERO_15, &swapped, NONCE)
            .unwrap_err()
            .to_string()
            .contains("another connection")
    );
}

#[test]
fn every_mismatching_register_is_named_and_warn_only_registers_pass() {
    let tpm = Swtpm::start();
    let document = issue(&tpm);
    let refusal = validate(
        &[(4, [1; 32]), (9, [2; 32]), (15, [0; 32])],
        &document,
        NONCE,
    )
    .unwrap_err()
    .to_string();
    assert!(
        refusal.contains("PCR 4: expected 0101") && refusal.contains("PCR 9: expected 0202"),
        "{refusal}"
    );
    assert!(!refusal.contains("PCR 15"), "{refusal}");
    let mixed = BTreeMap::from([
        (
            4,
            Measurement {
                expected: vec![1; 32],
                warn_only: true,
            },
        ),
        (
            15,
            Measurement {
                expected: vec![0; 32],
                warn_only: false,
            },
        ),
    ]);
    let validator = qemu_vtpm::validator(Arc::new(Policy::new(mixed).unwrap()));
    assert!(validator.judge(&Evidence::new(&document, NONCE)).is_ok());
}

/// A document has a genuine quote of another bank, and unsigned values of the SHA-256 bank. Constellation's validator verifies
/// the quote and compares the values.
#[test]
fn values_of_a_bank_that_was_not_verified_are_never_compared() {
    let tpm = Swtpm::start();
    Tpm::open(&location(&tpm))
        .unwrap()
        .pcr_event(15, &[1; 32])
        .unwrap();
    let genuine = as_json(&issue(&tpm));
    let quotes = genuine["Attestation"]["quotes"].as_array().unwrap();
    let of_bank = |bank: u16| {
        quotes
            .iter()
            .find(|quote| quote["pcrs"]["hash"] == bank)
            .unwrap()
            .clone()
    };
    let (sha256, sha384) = (of_bank(11), of_bank(12));
    let golden = STANDARD.encode([0; 32]);
    let forged = |mut quote: Value| {
        quote["pcrs"]["hash"] = json!(11);
        for value in quote["pcrs"]["pcrs"].as_object_mut().unwrap().values_mut() {
            *value = json!(golden);
        }
        quote
    };
    for quotes in [
        json!([sha384, forged(sha256.clone())]),
        json!([forged(sha384.clone())]),
        json!([sha384, {"quote": "", "raw_sig": "", "pcrs": {"hash": 11, "pcrs": {"15": golden}}}]),
        json!([sha256, forged(sha256.clone())]),
        json!([sha384]),
        json!([]),
    ] {
        let mut document = genuine.clone();
        document["Attestation"]["quotes"] = quotes;
        assert!(validate(ZERO_15, &serde_json::to_vec(&document).unwrap(), NONCE).is_err());
    }
}

#[test]
fn incomplete_documents_are_refused() {
    let tpm = Swtpm::start();
    let genuine = issue(&tpm);
    for text in [
        "",
        "null",
        "{}",
        r#"{"Attestation":null}"#,
        r#"{"Attestation":{"ak_pub":null,"quotes":null}}"#,
        "[[[[",
    ] {
        assert!(validate(ZERO_15, text.as_bytes(), NONCE).is_err(), "{text}");
    }
    for field in ["ak_pub", "quotes"] {
        let mut document = as_json(&genuine);
        document["Attestation"]
            .as_object_mut()
            .unwrap()
            .remove(field);
        assert!(
            validate(ZERO_15, &serde_json::to_vec(&document).unwrap(), NONCE).is_err(),
            "{field}"
        );
    }
    let deep = "[".repeat(100_000);
    assert!(validate(ZERO_15, deep.as_bytes(), NONCE).is_err());
}

/// Any program in the network can connect, so a refused document must not fill the log.
#[test]
fn a_refusal_of_a_long_document_is_short() {
    let tpm = Swtpm::start();
    let mut long_data = as_json(&issue(&tpm));
    long_data["UserData"] = json!(STANDARD.encode([0; 1025]));
    for (text, why) in [
        (
            format!(r#"{{"Attestation":"{}"}}"#, "\u{1b}".repeat(100_000)),
            "cannot be read",
        ),
        (
            format!(
                r#"{{"Attestation":{{"ak_pub":"","quotes":["{}"]}}}}"#,
                "x".repeat(100_000)
            ),
            "cannot be read",
        ),
        (" ".repeat(300_000), "at most 262144"),
        (
            long_data.to_string(),
            "user data of the document has 1025 bytes",
        ),
    ] {
        let refusal = validate(ZERO_15, text.as_bytes(), NONCE)
            .unwrap_err()
            .to_string();
        assert!(
            refusal.contains(why) && refusal.len() < 250,
            "{} bytes: {refusal:.300}",
            refusal.len()
        );
    }
}

#[test]
fn additional_fields_of_other_issuers_are_ignored() {
    let tpm = Swtpm::start();
    let mut document = as_json(&issue(&tpm));
    document["Attestation"]["TeeAttestation"] =
        json!({"SevSnpAttestation": {"report": {"version": 2}}});
    document["Attestation"]["intermediate_certs"] = json!(["AAAA"]);
    document["Attestation"]["event_log"] = json!("AAAA");
    document["More"] = json!(1);
    assert!(validate(ZERO_15, &serde_json::to_vec(&document).unwrap(), NONCE).is_ok());
}

/// A mutated document is refused and causes no panic.
#[test]
fn hostile_documents_are_refused_without_a_panic() {
    let tpm = Swtpm::start();
    let genuine = issue(&tpm);
    let validator = qemu_vtpm::validator(Arc::new(policy(&[(15, [1; 32])])));
    for document in mutations(&genuine, 3000) {
        // the policy expects another value of PCR 15, so an accepted document is a forgery
        assert!(validator.judge(&Evidence::new(&document, NONCE)).is_err());
    }
}

#[test]
fn hostile_quotes_and_keys_are_refused_without_a_panic() {
    let tpm = Swtpm::start();
    let genuine = as_json(&issue(&tpm));
    let mut random = Random::new(1);
    let validator = qemu_vtpm::validator(Arc::new(policy(ZERO_15)));
    let quotes = genuine["Attestation"]["quotes"].as_array().unwrap();
    let quote = quotes
        .iter()
        .position(|quote| quote["pcrs"]["hash"] == 11)
        .unwrap();
    for field in [
        "/Attestation/ak_pub".to_owned(),
        format!("/Attestation/quotes/{quote}/quote"),
        format!("/Attestation/quotes/{quote}/raw_sig"),
    ] {
        for _ in 0..300 {
            let mut document = genuine.clone();
            let place = document.pointer_mut(&field).unwrap();
            let mut value = bytes(place);
            let at = random.below(value.len());
            // the signature does not cover the other attributes of the key
            if random.below(3) == 0 {
                value.truncate(at)
            } else {
                value[at] ^= 1 << random.below(8)
            }
            *place = json!(STANDARD.encode(value));
            let _ = validator.judge(&Evidence::new(
                &serde_json::to_vec(&document).unwrap(),
                NONCE,
            ));
            if !field.ends_with("ak_pub") {
                assert!(
                    validator
                        .judge(&Evidence::new(
                            &serde_json::to_vec(&document).unwrap(),
                            NONCE
                        ))
                        .is_err(),
                    "{field} {at}"
                );
            }
        }
    }
}

/// Returns the nonce that the TPM quotes for [`USER_DATA`] and [`NONCE`].
fn qualifying() -> String {
    let sha256 = |data: &[u8]| ring::digest::digest(&ring::digest::SHA256, data);
    hex(sha256(sha256(&[USER_DATA, NONCE].concat()).as_ref()).as_ref())
}

/// Makes a document with tpm2-tools only, with an attestation key under the endorsement key.
fn document_of_tpm2_tools(tpm: &Swtpm, key: [&str; 2], attributes: &str) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (ak, public, quote, signature) =
        (path("ak"), path("public"), path("quote"), path("signature"));
    tpm.tool(
        "tpm2_createprimary",
        &["-C", "o", "-G", key[0], "-a", attributes, "-c", &ak],
    );
    tpm.tool("tpm2_flushcontext", &["-t"]);
    tpm.tool("tpm2_readpublic", &["-c", &ak, "-o", &public]);
    let signed = [
        "-c",
        &ak,
        "-l",
        "sha256:all",
        "-g",
        "sha256",
        "--scheme",
        key[1],
        "-q",
        &qualifying(),
    ];
    tpm.tool(
        "tpm2_quote",
        &[&signed[..], &["-m", &quote, "-s", &signature]].concat(),
    );
    tpm.tool("tpm2_flushcontext", &["-t"]);
    let base64 = |path: &str| STANDARD.encode(fs::read(path).unwrap());
    let pcrs = Tpm::open(&location(tpm))
        .unwrap()
        .pcrs(Bank::Sha256)
        .unwrap();
    let pcrs: BTreeMap<_, _> = pcrs
        .iter()
        .map(|(pcr, value)| (pcr.to_string(), STANDARD.encode(value)))
        .collect();
    let document = json!({
        "UserData": STANDARD.encode(USER_DATA),
        "Attestation": {
            // skips the length of a TPM2B_PUBLIC
            "ak_pub": STANDARD.encode(&fs::read(&public).unwrap()[2..]),
            "quotes": [{
                "quote": base64(&quote), "raw_sig": base64(&signature), "pcrs": {"hash": 11, "pcrs": pcrs},
            }],
        },
    });
    serde_json::to_vec(&document).unwrap()
}

#[test]
fn a_quote_made_by_tpm2_tools_is_accepted_if_its_key_signs_nothing_else() {
    const ATTESTATION: &str =
        "fixedtpm|fixedparent|sensitivedataorigin|userwithauth|restricted|sign";
    let tpm = Swtpm::start();
    let rsa = ["rsa2048:rsassa-sha256:null", "rsassa"];
    let document = document_of_tpm2_tools(&tpm, rsa, ATTESTATION);
    assert_eq!(validate(ZERO_15, &document, NONCE).unwrap(), USER_DATA);
    assert!(validate(ZERO_15, &document, b"another").is_err());

    let unrestricted = document_of_tpm2_tools(&tpm, rsa, &ATTESTATION.replace("restricted|", ""));
    let refusal = validate(ZERO_15, &unrestricted, NONCE)
        .unwrap_err()
        .to_string();
    assert!(
        refusal.contains("attributes of the attestation key"),
        "{refusal}"
    );
    let ecc = document_of_tpm2_tools(&tpm, ["ecc256:ecdsa-sha256:null", "ecdsa"], ATTESTATION);
    assert_eq!(validate(ZERO_15, &ecc, NONCE).unwrap(), USER_DATA);
}

#[test]
fn every_banks_quote_passes_tpm2_checkquote() {
    let tpm = Swtpm::start();
    let document = as_json(&issue(&tpm));
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (key, message, signature) = (path("key.pem"), path("quote"), path("signature"));
    tpm.tool(
        "tpm2_readpublic",
        &["-c", "0x81008f01", "-f", "pem", "-o", &key],
    );
    let quotes = document["Attestation"]["quotes"].as_array().unwrap();
    assert_eq!(
        quotes
            .iter()
            .map(|quote| &quote["pcrs"]["hash"])
            .collect::<Vec<_>>(),
        [4, 11, 12, 13]
    );
    for quote in quotes {
        fs::write(&message, bytes(&quote["quote"])).unwrap();
        fs::write(&signature, bytes(&quote["raw_sig"])).unwrap();
        let check = [
            "-u",
            &key,
            "-m",
            &message,
            "-s",
            &signature,
            "-g",
            "sha256",
            "-q",
            &qualifying(),
        ];
        tpm.tool("tpm2_checkquote", &check);
    }
}

/// A quote signs the concatenation of the values, which does not change if bytes move from one register to the next.
#[test]
fn bytes_do_not_move_from_one_register_to_the_next() {
    let tpm = Swtpm::start();
    let mut document = as_json(&issue(&tpm));
    let quotes = document["Attestation"]["quotes"].as_array_mut().unwrap();
    let pcrs = &mut quotes
        .iter_mut()
        .find(|quote| quote["pcrs"]["hash"] == 11)
        .unwrap()["pcrs"]["pcrs"];
    (pcrs["8"], pcrs["9"]) = (
        json!(STANDARD.encode([0; 16])),
        json!(STANDARD.encode([0; 48])),
    );
    let refusal = validate(ZERO_15, document.to_string().as_bytes(), NONCE)
        .unwrap_err()
        .to_string();
    assert!(
        refusal.contains("not the values that the TPM signed"),
        "{refusal}"
    );
}

/// Another process extends a register between the quote and the reading of the values.
#[test]
fn a_register_that_changes_during_the_quote_is_quoted_again() {
    let tpm = Swtpm::start();
    let meddled = meddler(&tpm, 1);
    let document = qemu_vtpm::issuer(location_of(&meddled), None)
        .issue(USER_DATA, NONCE)
        .unwrap();
    let value = Tpm::open(&location(&tpm))
        .unwrap()
        .pcrs(Bank::Sha256)
        .unwrap()[&15]
        .clone();
    assert_ne!(value, [0; 32]);
    assert!(validate(&[(15, value.try_into().unwrap())], &document, NONCE).is_ok());
}

#[test]
fn registers_that_never_stop_changing_are_an_error() {
    let tpm = Swtpm::start();
    let meddled = meddler(&tpm, usize::MAX);
    let error = qemu_vtpm::issuer(location_of(&meddled), None)
        .issue(USER_DATA, NONCE)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("another program extends PCRs continuously"),
        "{error}"
    );
}

/// Returns a proxy that extends SHA-256 PCR 15 after each of so many quotes of that bank.
fn meddler(tpm: &Swtpm, mut times: usize) -> Proxy {
    Proxy::between(tpm, move |client, server| {
        meddle(client, server, &mut times)
    })
}

fn location_of(proxy: &Proxy) -> Location {
    proxy.location().parse().unwrap()
}

fn meddle(mut client: TcpStream, mut server: TcpStream, left: &mut usize) {
    /// TPM2_PCR_Extend of PCR 15 with 32 bytes in the SHA-256 bank and the empty password.
    const EXTEND: &[u8] =
        b"\x80\x02\0\0\0\x41\0\0\x01\x82\0\0\0\x0f\0\0\0\x09\x40\0\0\x09\0\0\0\0\0\
        \0\0\0\x01\0\x0bthirty-two bytes for a register.";
    const QUOTE: [u8; 4] = 0x0000_0158_u32.to_be_bytes();
    while let Some(command) = message(&mut client) {
        server.write_all(&command).unwrap();
        client.write_all(&message(&mut server).unwrap()).unwrap();
        // the command ends with a selection of one bank, SHA-256: count, hash, size, three bytes of bits
        let of_sha256 =
            command.len() > 10 && command[command.len() - 10..].starts_with(&[0, 0, 0, 1, 0, 0x0b]);
        if command[6..10] == QUOTE && of_sha256 && *left > 0 {
            *left -= 1;
            server.write_all(EXTEND).unwrap();
            assert_eq!(
                message(&mut server).unwrap()[6..10],
                [0; 4],
                "TPM2_PCR_Extend succeeds"
            );
        }
    }
}

/// Answers that the TPM is busy, to so many commands.
fn be_busy(mut client: TcpStream, mut server: TcpStream, code: u32, left: &mut usize) {
    let busy = [&[0x80, 0x01, 0, 0, 0, 10][..], &code.to_be_bytes()].concat();
    while let Some(command) = message(&mut client) {
        if *left > 0 {
            *left -= 1;
            client.write_all(&busy).unwrap();
            continue;
        }
        server.write_all(&command).unwrap();
        client.write_all(&message(&mut server).unwrap()).unwrap();
    }
}

#[test]
fn a_busy_tpm_is_asked_again_for_some_seconds() {
    let tpm = Swtpm::start();
    // TPM_RC_RETRY, TPM_RC_TESTING, TPM_RC_YIELDED, TPM_RC_NV_RATE
    for code in [0x922, 0x90a, 0x908, 0x920] {
        let mut left = 3;
        let soon_ready = Proxy::between(&tpm, move |client, server| {
            be_busy(client, server, code, &mut left)
        });
        let mut opened = Tpm::open(&location_of(&soon_ready)).unwrap();
        let pcrs = opened.pcrs(Bank::Sha256).unwrap();
        assert_eq!(pcrs.len(), 24, "{code:#x}");
    }
    let never_ready = Proxy::between(&tpm, |client, server| {
        be_busy(client, server, 0x922, &mut usize::MAX.clone())
    });
    let mut opened = Tpm::open(&location_of(&never_ready)).unwrap();
    let error = opened.pcrs(Bank::Sha256).unwrap_err().to_string();
    assert!(error.contains("It stayed busy for seconds"), "{error}");
}

/// Whether a TPM runs the command whose answer is lost.
#[derive(Clone, Copy, PartialEq)]
enum LostAnswer {
    Ran,
    DidNotRun,
}

/// Returns a proxy that loses the answers to so many commands with this code, and ends those connections.
fn losing(tpm: &Swtpm, code: u32, mut times: usize, what: LostAnswer) -> Proxy {
    Proxy::between(tpm, move |mut client, mut server| {
        while let Some(command) = message(&mut client) {
            let is_lost = command[6..10] == code.to_be_bytes() && times > 0;
            if !is_lost || what == LostAnswer::Ran {
                server.write_all(&command).unwrap();
                let answer = message(&mut server).unwrap();
                if !is_lost {
                    client.write_all(&answer).unwrap();
                }
            }
            if is_lost {
                times -= 1;
                return;
            }
        }
    })
}

/// As the kernel's driver does on a busy host: the command ends with ETIME, and nobody knows what the TPM did.
#[test]
fn a_command_whose_answer_is_lost_is_repeated_if_it_changes_nothing() {
    let tpm = Swtpm::start();
    // TPM2_GetCapability, TPM2_PCR_Read
    for code in [0x17a, 0x17e] {
        let often = losing(&tpm, code, 3, LostAnswer::Ran);
        let pcrs = Tpm::open(&location_of(&often)).unwrap().pcrs(Bank::Sha256);
        assert_eq!(pcrs.unwrap().len(), 24, "{code:#x}");
        let always = losing(&tpm, code, usize::MAX, LostAnswer::Ran);
        let error = Tpm::open(&location_of(&always)).unwrap().pcrs(Bank::Sha256);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("it does not answer"), "{error}");
    }
}

#[test]
fn the_node_lock_is_measured_once_also_if_the_answer_is_lost() {
    for what in [LostAnswer::Ran, LostAnswer::DidNotRun] {
        let tpm = Swtpm::start();
        let proxy = losing(&tpm, 0x182, 1, what); // TPM2_PCR_Extend
        let lock = NodeLock::new(location_of(&proxy));
        assert!(matches!(lock.lock([7; 32]), Locking::Taken));
        assert!(cluster_register(&location(&tpm)).unwrap().is_of(&[7; 32]));
    }
    // another program's measurement before it is still found
    let tpm = Swtpm::start();
    tpm.tool(
        "tpm2_pcrextend",
        &[&format!("15:sha256={}", "01".repeat(32))],
    );
    for what in [LostAnswer::Ran, LostAnswer::DidNotRun] {
        let proxy = losing(&tpm, 0x182, 1, what);
        let locking = NodeLock::new(location_of(&proxy)).lock([7; 32]);
        let Locking::Failed(why) = locking else {
            panic!("the lock was taken")
        };
        let why = why.to_string();
        assert!(why.contains("PCR 15 of the Sha256 bank is wrong"), "{why}");
    }
}

#[test]
fn a_tpm_that_vanishes_during_a_quote_is_named_and_the_next_one_works() {
    let tpm = Swtpm::start();
    // connections that are still open afterwards are closed without an answer
    let mut left = 4;
    let vanishing = Proxy::between(&tpm, move |mut client, mut server| {
        while let Some(command) = message(&mut client).filter(|_| left > 0) {
            left -= 1;
            server.write_all(&command).unwrap();
            client.write_all(&message(&mut server).unwrap()).unwrap();
        }
    });
    let issuer = qemu_vtpm::issuer(location_of(&vanishing), None);
    let error = issuer.issue(USER_DATA, NONCE).unwrap_err().to_string();
    assert!(
        error.contains(&location_of(&vanishing).to_string())
            && error.contains("it does not answer"),
        "{error}"
    );
    issue(&tpm);
}

#[test]
fn a_tpm_that_was_reset_and_not_started_says_so() {
    let tpm = Swtpm::start();
    issue(&tpm);
    let Location::Swtpm(host, port) = location(&tpm) else {
        panic!("a Swtpm has ports");
    };
    // CMD_INIT of swtpm's control channel (swtpm_ioctls(3)): the reset line of the TPM, without TPM2_Startup
    let mut control = TcpStream::connect((host, port + 1)).unwrap();
    control.write_all(&[0, 0, 0, 2, 0, 0, 0, 0]).unwrap();
    let mut result = [1; 4];
    control.read_exact(&mut result).unwrap();
    assert_eq!(result, [0; 4]);
    drop(control);
    let issuer = qemu_vtpm::issuer(location(&tpm), None);
    let error = issuer.issue(USER_DATA, NONCE).unwrap_err().to_string();
    assert!(
        error.contains("It was reset and not started again"),
        "{error}"
    );
}

#[test]
fn a_tpm_in_lockout_says_how_it_ends() {
    let tpm = Swtpm::start();
    issue(&tpm);
    let limits = ["--max-tries=1", "--recovery-time=3600"];
    tpm.tool(
        "tpm2_dictionarylockout",
        &[&["--setup-parameters"][..], &limits].concat(),
    );
    let index = ["0x1500001", "--size=4", "--attributes=authread|authwrite"];
    tpm.tool(
        "tpm2_nvdefine",
        &[&index[..], &["--index-auth=right"]].concat(),
    );
    let wrong = std::process::Command::new("tpm2_nvread")
        .args(["0x1500001", "--auth=wrong"])
        .env("TPM2TOOLS_TCTI", tpm.location())
        .output()
        .unwrap();
    assert!(!wrong.status.success());
    let issuer = qemu_vtpm::issuer(location(&tpm), None);
    let error = issuer.issue(USER_DATA, NONCE).unwrap_err().to_string();
    assert!(
        error.contains("tpm2_dictionarylockout --clear-lockout"),
        "{error}"
    );
    tpm.tool("tpm2_dictionarylockout", &["--clear-lockout"]);
    issue(&tpm);
}

#[test]
fn the_error_of_a_missing_tpm_names_it_and_the_reason() {
    for (location, why) in [
        (
            "device:/nonexistent/tpm0",
            "cannot open the TPM at device:/nonexistent/tpm0: No such file or directory",
        ),
        (
            "device:/",
            "cannot open the TPM at device:/: Is a directory",
        ),
        (
            "device:/dev/null",
            "the TPM at device:/dev/null failed: GetCapability: it does not answer, or it is not a TPM 2.0",
        ),
        (
            "swtpm:host=127.0.0.1,port=1",
            "cannot open the TPM at swtpm:host=127.0.0.1,port=1: Connection refused",
        ),
    ] {
        let error = Tpm::open(&location.parse().unwrap())
            .and_then(|mut tpm| tpm.pcrs(Bank::Sha256))
            .unwrap_err()
            .to_string();
        assert!(error.starts_with(why), "{error}");
    }
    let nobody: Location = "device:/nonexistent/tpm0".parse().unwrap();
    let error = qemu_vtpm::issuer(nobody, None)
        .issue(USER_DATA, NONCE)
        .unwrap_err()
        .to_string();
    assert!(error.contains("/nonexistent/tpm0: No such file"), "{error}");
}

#[test]
fn the_error_of_a_tpm_with_an_owner_password_says_so() {
    let tpm = Swtpm::start();
    tpm.tool("tpm2_changeauth", &["-c", "owner", "secret"]);
    let error = qemu_vtpm::issuer(location(&tpm), None)
        .issue(USER_DATA, NONCE)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("owner or endorsement hierarchy has a password"),
        "{error}"
    );
}

/// Both machines are genuine and meet the policy, so only the name of the key tells them apart, in either form.
#[test]
fn a_connection_that_is_diverted_to_another_machine_is_refused_if_the_policy_names_the_key() {
    use atls::{Client, Server};
    let deadline = || std::time::Instant::now() + std::time::Duration::from_secs(60);
    let (called, other) = (Swtpm::start(), Swtpm::start());
    let key = qemu_vtpm::VARIANT
        .key_name(&location(&called))
        .unwrap()
        .unwrap();
    let named = policy(ZERO_15).believing([key]).unwrap();
    for (old, policy, is_accepted) in [
        (false, policy(ZERO_15), true),
        (true, policy(ZERO_15), true),
        (false, named.clone(), false),
        (true, named.clone(), false),
    ] {
        let issuer = qemu_vtpm::issuer(location(&other), None);
        let server = Server::new(Some(Arc::new(issuer)), None);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let far = listener.accept().unwrap().0;
        let server = std::thread::spawn(move || server.handshake(far, deadline()).map(drop));
        let validator = qemu_vtpm::validator(Arc::new(policy));
        let client = Client::new(None, Some(verifier::judge(Arc::new(validator))));
        let client = if old { client.only_old() } else { client };
        let reached = client.connect(near, deadline());
        if is_accepted {
            assert!(reached.is_ok())
        } else {
            let refused = reached.err().unwrap().to_string();
            assert!(
                refused.contains("not the one that the policy names"),
                "{refused}"
            );
        }
        let _ = server.join().unwrap();
    }
}

/// The first call, which a node makes before it has a network, may create the key and reads certificates. Then a proof needs as few
/// commands as possible: each command takes a TPM of hardware some hundredths of a second, and a signature some tenths.
#[test]
fn a_proof_after_the_first_call_asks_the_tpm_for_one_signature() {
    use verifier::session::{DocumentRequest, PeerRole};
    // TPM_CC (part 2 §6.5.2)
    const CREATE_PRIMARY: u32 = 0x131;
    const SHUTDOWN: u32 = 0x145;
    const QUOTE: u32 = 0x158;
    const READ_PUBLIC: u32 = 0x173;
    const GET_CAPABILITY: u32 = 0x17a;
    const PCR_READ: u32 = 0x17e;
    let tpm = Swtpm::start();
    let asked = Arc::new(Mutex::new(vec![]));
    let seen = asked.clone();
    let between = Proxy::between(&tpm, move |mut client, mut server| {
        while let Some(command) = message(&mut client) {
            let code = u32::from_be_bytes(command[6..10].try_into().unwrap());
            server.write_all(&command).unwrap();
            let answer = message(&mut server).unwrap();
            // swtpm answers TPM_RC_RETRY to the first command with an RSA key, and the command is repeated
            if answer[6..10] == [0; 4] {
                seen.lock().unwrap().push(code);
            }
            client.write_all(&answer).unwrap();
        }
    });
    let issuer = qemu_vtpm::issuer(location_of(&between), None);
    issuer.identity().unwrap();
    let first = std::mem::take(&mut *asked.lock().unwrap());
    assert!(first.contains(&CREATE_PRIMARY), "{first:x?}");
    let proof = |banks: &[Bank]| {
        let request = DocumentRequest {
            role: PeerRole::Client,
            session: &[1; 32],
            nonce: NONCE,
            banks,
            challenge: None,
            for_stranger: false,
        };
        issuer.prove(&request).unwrap();
        std::mem::take(&mut *asked.lock().unwrap())
    };
    let key = [READ_PUBLIC, GET_CAPABILITY];
    let bank = [QUOTE, PCR_READ, PCR_READ, PCR_READ];
    let expected = |banks: usize| [&key[..], &bank.repeat(banks), &[SHUTDOWN]].concat();
    assert_eq!(proof(&[Bank::Sha256]), expected(1));
    // an old peer gets all banks
    assert_eq!(proof(&[]), expected(4));
}

/// swtpm has four banks; each quote takes the TPM some time.
#[test]
fn a_proof_of_the_strong_form_has_only_the_banks_that_the_peer_compares() {
    use verifier::session::{DocumentRequest, PeerRole};
    let tpm = Swtpm::start();
    let issuer = qemu_vtpm::issuer(location(&tpm), None);
    let request = DocumentRequest {
        role: PeerRole::Server,
        session: &[1; 32],
        nonce: NONCE,
        banks: &[Bank::Sha256],
        challenge: None,
        for_stranger: false,
    };
    let document = as_json(&issuer.prove(&request).unwrap());
    let quotes = document["Attestation"]["quotes"].as_array().unwrap();
    assert_eq!(quotes.len(), 1);
    assert_eq!(quotes[0]["pcrs"]["hash"], Bank::Sha256 as u16);
    let user_data = validate(ZERO_15, &issuer.prove(&request).unwrap(), NONCE).unwrap();
    assert_eq!(user_data, request.user_data(&[]));
    assert!(
        as_json(&issue(&tpm))["Attestation"]["quotes"]
            .as_array()
            .unwrap()
            .len()
            > 1
    );
}
