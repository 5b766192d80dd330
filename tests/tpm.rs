//! The TPM and its documents, against swtpm and tpm2-tools.

#[path = "common/swtpm.rs"]
mod swtpm;

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use firstlight::attestation::{Issuer, Measurement, Policy, ValidateError, Validator, qemu_vtpm};
use firstlight::attestation::{is_marked, pcr15_after};
use firstlight::tpm::{Bank, Location, Tpm};
use serde_json::{Value, json};
use swtpm::Swtpm;

const USER_DATA: &[u8] = b"the hash of a certificate's key.";
const NONCE: &[u8] = b"the verifier's own random number";

fn location(tpm: &Swtpm) -> Location {
    tpm.location().parse().unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn policy(registers: &[(u32, [u8; 32])]) -> Policy {
    let enforced =
        |(index, expected): &(u32, [u8; 32])| (*index, Measurement { expected: *expected, warn_only: false });
    Policy::new(registers.iter().map(enforced).collect()).unwrap()
}

fn validate(registers: &[(u32, [u8; 32])], document: &[u8], nonce: &[u8]) -> Result<Vec<u8>, ValidateError> {
    qemu_vtpm::Validator::new(Arc::new(policy(registers))).validate(document, nonce)
}

fn issue(tpm: &Swtpm) -> Vec<u8> {
    qemu_vtpm::Issuer::new(location(tpm), None).issue(USER_DATA, NONCE).unwrap()
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

#[test]
fn the_document_has_the_old_systems_form() {
    let tpm = Swtpm::start();
    let text = String::from_utf8(issue(&tpm)).unwrap();
    assert!(text.starts_with(r#"{"Attestation":{"ak_pub":""#), "{text:.80}");
    assert!(text.contains(r#""TeeAttestation":null},"InstanceInfo":null,"UserData":""#));
    assert!(text.contains(r#""pcrs":{"hash":11,"pcrs":{"0":""#), "{text}");
    let document = as_json(text.as_bytes());
    let key = bytes(&document["Attestation"]["ak_pub"]);
    // TPMT_PUBLIC: RSA, SHA-256, attributes, no policy, no symmetric algorithm, RSASSA with SHA-256, 2048 bits
    assert_eq!(hex(&key[..24]), "0001000b000500720000001000140 00b0800000000000100".replace(' ', ""));
    assert_eq!(key.len(), 280);
}

#[test]
fn tpm2_tools_verify_the_quote_and_read_the_same_registers() {
    let tpm = Swtpm::start();
    let document = as_json(&issue(&tpm));
    let quotes = document["Attestation"]["quotes"].as_array().unwrap();
    let quote = quotes.iter().find(|quote| quote["pcrs"]["hash"] == 11).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (message, signature) = (file("quote", &bytes(&quote["quote"])), file("signature", &bytes(&quote["raw_sig"])));
    let key = dir.path().join("key.pem").to_str().unwrap().to_owned();
    tpm.tool("tpm2_readpublic", &["-c", "0x81008f01", "-f", "pem", "-o", &key]);
    let extra = [USER_DATA, NONCE].concat();
    let sha256 = |data: &[u8]| ring::digest::digest(&ring::digest::SHA256, data);
    let nonce = hex(sha256(sha256(&extra).as_ref()).as_ref());
    tpm.tool("tpm2_checkquote", &["-u", &key, "-m", &message, "-s", &signature, "-g", "sha256", "-q", &nonce]);

    let read = tpm.tool("tpm2_pcrread", &["sha256"]);
    for (index, value) in Tpm::open(&location(&tpm)).unwrap().pcrs(Bank::Sha256).unwrap() {
        let value = format!("0x{}", hex(&value).to_uppercase());
        let line = read.lines().find(|line| {
            line.trim().starts_with(&format!("{index} ")) || line.trim().starts_with(&format!("{index}:"))
        });
        assert!(line.unwrap().contains(&value), "PCR {index}: {value} against {line:?}");
    }
}

#[test]
fn an_event_is_measured_as_tpm2_pcrevent_does_it() {
    let (ours, theirs) = (Swtpm::start(), Swtpm::start());
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    fs::write(&data, [7; 32]).unwrap();
    Tpm::open(&location(&ours)).unwrap().pcr_event(15, &[7; 32]).unwrap();
    theirs.tool("tpm2_pcrevent", &["15", data.to_str().unwrap()]);
    let all = "sha1:15+sha256:15+sha384:15+sha512:15";
    assert_eq!(ours.tool("tpm2_pcrread", &[all]), theirs.tool("tpm2_pcrread", &[all]));
    let value = Tpm::open(&location(&ours)).unwrap().pcrs(Bank::Sha256).unwrap()[&15].clone();
    assert_eq!(value, pcr15_after(&[7; 32]));
}

#[test]
fn a_node_is_marked_from_the_event_to_the_reboot() {
    let mut tpm = Swtpm::start();
    assert!(!is_marked(&location(&tpm)).unwrap());
    Tpm::open(&location(&tpm)).unwrap().pcr_event(15, &[1; 32]).unwrap();
    assert!(is_marked(&location(&tpm)).unwrap());
    tpm.reboot();
    assert!(!is_marked(&location(&tpm)).unwrap());
}

#[test]
fn a_marked_node_is_no_fresh_one_but_a_member_of_its_cluster() {
    let tpm = Swtpm::start();
    Tpm::open(&location(&tpm)).unwrap().pcr_event(15, &[1; 32]).unwrap();
    let document = issue(&tpm);
    let refusal = validate(ZERO_15, &document, NONCE).unwrap_err().to_string();
    let (expected, got) = ("0".repeat(64), hex(&pcr15_after(&[1; 32])));
    let why = "the machine has joined a cluster since it started; restart it to have it judged afresh";
    assert_eq!(refusal, format!("PCR 15: expected {expected}, got {got}; {why}"));
    let member = policy(ZERO_15).expecting_cluster(&[1; 32]);
    assert!(qemu_vtpm::Validator::new(Arc::new(member)).validate(&document, NONCE).is_ok());
}

#[test]
fn the_attestation_key_survives_a_reboot() {
    let mut tpm = Swtpm::start();
    let first = as_json(&issue(&tpm))["Attestation"]["ak_pub"].clone();
    tpm.reboot();
    assert_eq!(as_json(&issue(&tpm))["Attestation"]["ak_pub"], first);
}

#[test]
fn another_key_at_the_handle_is_replaced() {
    let tpm = Swtpm::start();
    let dir = tempfile::tempdir().unwrap();
    let context = dir.path().join("key").to_str().unwrap().to_owned();
    tpm.tool("tpm2_createprimary", &["-C", "o", "-G", "ecc", "-c", &context]);
    tpm.tool("tpm2_evictcontrol", &["-C", "o", "-c", &context, "0x81008f01"]);
    assert!(validate(ZERO_15, &issue(&tpm), NONCE).is_ok());
}

#[test]
fn a_document_for_another_nonce_or_other_user_data_is_refused() {
    let tpm = Swtpm::start();
    let document = issue(&tpm);
    assert!(validate(ZERO_15, &document, b"another").unwrap_err().to_string().contains("another connection"));
    let mut swapped = as_json(&document);
    swapped["UserData"] = json!(STANDARD.encode("somebody else's key"));
    let swapped = serde_json::to_vec(&swapped).unwrap();
    assert!(validate(ZERO_15, &swapped, NONCE).unwrap_err().to_string().contains("another connection"));
}

#[test]
fn every_mismatching_register_is_named_and_warn_only_ones_pass() {
    let tpm = Swtpm::start();
    let document = issue(&tpm);
    let refusal = validate(&[(4, [1; 32]), (9, [2; 32]), (15, [0; 32])], &document, NONCE).unwrap_err().to_string();
    assert!(refusal.contains("PCR 4: expected 0101") && refusal.contains("PCR 9: expected 0202"), "{refusal}");
    assert!(!refusal.contains("PCR 15"), "{refusal}");
    let mixed = BTreeMap::from([
        (4, Measurement { expected: [1; 32], warn_only: true }),
        (15, Measurement { expected: [0; 32], warn_only: false }),
    ]);
    let validator = qemu_vtpm::Validator::new(Arc::new(Policy::new(mixed).unwrap()));
    assert!(validator.validate(&document, NONCE).is_ok());
}

/// A genuine quote of another bank beside values of the SHA-256 bank that nobody signed: the old system's validator checks
/// the one and compares the other.
#[test]
fn values_of_a_bank_that_was_not_verified_are_never_compared() {
    let tpm = Swtpm::start();
    Tpm::open(&location(&tpm)).unwrap().pcr_event(15, &[1; 32]).unwrap();
    let genuine = as_json(&issue(&tpm));
    let quotes = genuine["Attestation"]["quotes"].as_array().unwrap();
    let of_bank = |bank: u16| quotes.iter().find(|quote| quote["pcrs"]["hash"] == bank).unwrap().clone();
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
fn documents_with_holes_are_refused() {
    let tpm = Swtpm::start();
    let genuine = issue(&tpm);
    for text in
        ["", "null", "{}", r#"{"Attestation":null}"#, r#"{"Attestation":{"ak_pub":null,"quotes":null}}"#, "[[[["]
    {
        assert!(validate(ZERO_15, text.as_bytes(), NONCE).is_err(), "{text}");
    }
    for field in ["ak_pub", "quotes"] {
        let mut document = as_json(&genuine);
        document["Attestation"].as_object_mut().unwrap().remove(field);
        assert!(validate(ZERO_15, &serde_json::to_vec(&document).unwrap(), NONCE).is_err(), "{field}");
    }
    let deep = "[".repeat(100_000);
    assert!(validate(ZERO_15, deep.as_bytes(), NONCE).is_err());
}

/// Anybody can connect: what they send must not fill the log of whoever refuses it.
#[test]
fn a_refusal_of_a_long_document_is_short() {
    let tpm = Swtpm::start();
    let mut long_data = as_json(&issue(&tpm));
    long_data["UserData"] = json!(STANDARD.encode([0; 1025]));
    for (text, why) in [
        (format!(r#"{{"Attestation":"{}"}}"#, "\u{1b}".repeat(100_000)), "cannot be read"),
        (format!(r#"{{"Attestation":{{"ak_pub":"","quotes":["{}"]}}}}"#, "x".repeat(100_000)), "cannot be read"),
        (" ".repeat(300_000), "more than 262144"),
        (long_data.to_string(), "user data has 1025 bytes"),
    ] {
        let refusal = validate(ZERO_15, text.as_bytes(), NONCE).unwrap_err().to_string();
        assert!(refusal.contains(why) && refusal.len() < 250, "{} bytes: {refusal:.300}", refusal.len());
    }
}

#[test]
fn what_other_issuers_add_is_passed_over() {
    let tpm = Swtpm::start();
    let mut document = as_json(&issue(&tpm));
    document["Attestation"]["TeeAttestation"] = json!({"SevSnpAttestation": {"report": {"version": 2}}});
    document["Attestation"]["intermediate_certs"] = json!(["AAAA"]);
    document["Attestation"]["event_log"] = json!("AAAA");
    document["More"] = json!(1);
    assert!(validate(ZERO_15, &serde_json::to_vec(&document).unwrap(), NONCE).is_ok());
}

/// The same numbers in each run, each below what is asked.
fn xorshift() -> impl FnMut(usize) -> usize {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    move |below| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random as usize % below
    }
}

/// Every change of a genuine document is refused, or changes nothing that was checked; none panics.
#[test]
fn hostile_documents_are_refused_without_a_panic() {
    let tpm = Swtpm::start();
    let genuine = issue(&tpm);
    let mut next = xorshift();
    let validator = qemu_vtpm::Validator::new(Arc::new(policy(&[(15, [1; 32])])));
    for _ in 0..3000 {
        let mut document = genuine.clone();
        for _ in 0..1 + next(3) {
            let at = next(document.len());
            match next(3) {
                0 => document[at] = next(256) as u8,
                1 => drop(document.remove(at)),
                _ => document.truncate(at.max(1)),
            }
        }
        // the policy wants another value of PCR 15: whatever is accepted here was forged
        assert!(validator.validate(&document, NONCE).is_err());
    }
}

#[test]
fn hostile_quotes_and_keys_are_refused_without_a_panic() {
    let tpm = Swtpm::start();
    let genuine = as_json(&issue(&tpm));
    let mut next = xorshift();
    let validator = qemu_vtpm::Validator::new(Arc::new(policy(ZERO_15)));
    let quotes = genuine["Attestation"]["quotes"].as_array().unwrap();
    let quote = quotes.iter().position(|quote| quote["pcrs"]["hash"] == 11).unwrap();
    for field in [
        "/Attestation/ak_pub".to_owned(),
        format!("/Attestation/quotes/{quote}/quote"),
        format!("/Attestation/quotes/{quote}/raw_sig"),
    ] {
        for _ in 0..300 {
            let mut document = genuine.clone();
            let place = document.pointer_mut(&field).unwrap();
            let mut value = bytes(place);
            let at = next(value.len());
            // attributes, name hash and trailing bytes of the key are not the signature's business
            if next(3) == 0 {
                value.truncate(at)
            } else {
                value[at] ^= 1 << next(8)
            }
            *place = json!(STANDARD.encode(value));
            let _ = validator.validate(&serde_json::to_vec(&document).unwrap(), NONCE);
            if !field.ends_with("ak_pub") {
                assert!(validator.validate(&serde_json::to_vec(&document).unwrap(), NONCE).is_err(), "{field} {at}");
            }
        }
    }
}

#[test]
fn a_tpm_that_is_not_there_is_named_and_why() {
    for (location, why) in [
        ("device:/nonexistent/tpm0", "No such file or directory"),
        ("device:/", "Is a directory"),
        ("device:/dev/null", "it does not answer, or is no TPM 2.0"),
        ("swtpm:host=127.0.0.1,port=1", "it does not answer, or is no TPM 2.0"),
    ] {
        let error = Tpm::open(&location.parse().unwrap()).err().unwrap().to_string();
        assert!(error.starts_with(&format!("cannot open the TPM at {location}: {why}")), "{error}");
    }
    let nobody: Location = "device:/nonexistent/tpm0".parse().unwrap();
    let error = qemu_vtpm::Issuer::new(nobody, None).issue(USER_DATA, NONCE).unwrap_err().to_string();
    assert!(error.contains("/nonexistent/tpm0: No such file"), "{error}");
}

#[test]
fn a_tpm_whose_owner_has_a_password_says_so() {
    let tpm = Swtpm::start();
    tpm.tool("tpm2_changeauth", &["-c", "owner", "secret"]);
    let error = qemu_vtpm::Issuer::new(location(&tpm), None).issue(USER_DATA, NONCE).unwrap_err().to_string();
    assert!(error.contains("owner hierarchy has a password"), "{error}");
}
