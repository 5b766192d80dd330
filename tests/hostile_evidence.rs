//! Evidence of attackers: every field of genuine documents altered, and structures that a program without a TPM signs correctly. Each
//! is refused, for the reason that the case is about, with little memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::process::Command;
use std::sync::{Arc, LazyLock};

use attest::attestation::{Issuer, Measurement, Policy, Validator, qemu_vtpm};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::digest::{SHA256, digest};
use ring::rand::SystemRandom;
use ring::rsa::KeyPair as RsaKeyPair;
use ring::signature::{KeyPair, RSA_PKCS1_SHA256, RsaPublicKeyComponents};
use serde_json::{Value, json};
use support::swtpm::Swtpm;

const USER_DATA: &[u8] = &[5; 32];
const NONCE: &[u8] = &[6; 32];

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

/// Counts the memory that a thread holds.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(bytes: isize) {
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = MOST.try_with(|most| most.set(most.get().max(held.get())));
    });
}

// SAFETY: all work is done by the system's allocator
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as of the caller
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as of the caller
        unsafe { System.dealloc(at, layout) }
    }
}

fn policy() -> Policy {
    let zero = Measurement {
        expected: [0; 32],
        warn_only: false,
    };
    Policy::new(BTreeMap::from([(4, zero.clone()), (15, zero)])).unwrap()
}

/// Returns why a document is refused. It may need a few times its own memory; the constant is for the policy and the texts.
fn refusal(what: &str, document: &[u8]) -> Option<String> {
    let validator = qemu_vtpm::validator(Arc::new(policy()));
    let before = HELD.get();
    MOST.set(before);
    let judged = validator.validate(document, NONCE);
    let held = (MOST.get() - before) as usize;
    assert!(
        held <= 8 * document.len() + (64 << 10),
        "{what}: {held} bytes for a document of {}",
        document.len()
    );
    match judged {
        Ok(user_data) => {
            assert_eq!(user_data, USER_DATA, "{what}");
            None
        }
        Err(why) => Some(why.to_string()),
    }
}

fn expect(what: &str, document: &[u8], reason: &str) {
    match refusal(what, document) {
        None => panic!("{what}: accepted"),
        Some(why) => assert!(
            why.contains(reason),
            "{what}: expected {reason:?}, got: {why}"
        ),
    }
}

fn genuine(tpm: &Swtpm) -> Value {
    let issuer = qemu_vtpm::issuer(tpm.location().parse().unwrap(), None);
    let mut document: Value =
        serde_json::from_slice(&issuer.issue(USER_DATA, NONCE).unwrap()).unwrap();
    // the other banks are ignored
    let quotes = document["Attestation"]["quotes"].as_array_mut().unwrap();
    quotes.retain(|quote| quote["pcrs"]["hash"] == 11);
    document
}

/// Returns the place of each value in a tree.
fn places(value: &Value, place: &str, found: &mut Vec<String>) {
    found.push(place.to_owned());
    match value {
        Value::Object(fields) => fields
            .iter()
            .for_each(|(name, value)| places(value, &format!("{place}/{name}"), found)),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .for_each(|(index, value)| places(value, &format!("{place}/{index}"), found)),
        _ => {}
    }
}

/// Returns the reasons of which one must be given if this place does not have what the TPM signed.
fn reasons(place: &str) -> &'static [&'static str] {
    const UNREADABLE: &str = "cannot be read";
    match place {
        "/UserData" => &[
            UNREADABLE,
            "made for another connection",
            "user data of the document",
        ],
        "/InstanceInfo" => &[UNREADABLE, "made for another connection"],
        "/Attestation/ak_pub" => &[UNREADABLE, "attestation key", "not signed"],
        "/Attestation/quotes/0/quote" | "/Attestation/quotes/0/raw_sig" => {
            &[UNREADABLE, "not signed by the attestation key"]
        }
        "/Attestation/quotes/0/pcrs/hash" => &[UNREADABLE, "no quote of the SHA-256 bank"],
        "/Attestation/quotes" => &[UNREADABLE, "no quote of the SHA-256 bank"],
        _ if place.starts_with("/Attestation/quotes/0/pcrs") => &[
            UNREADABLE,
            "not the values that the TPM signed",
            "a PCR that does not exist",
        ],
        _ => &[UNREADABLE],
    }
}

#[test]
fn every_field_of_a_document_matters_and_each_alteration_is_refused_by_its_name() {
    let (one, other) = (Swtpm::start(), Swtpm::start());
    let (document, foreign) = (genuine(&one), genuine(&other));
    assert_eq!(refusal("genuine", document.to_string().as_bytes()), None);
    let mut found = vec![];
    places(&document, "", &mut found);
    // evidence of confidential machines, which this variant does not read
    found.retain(|place| !place.ends_with("/TeeAttestation"));
    assert!(found.len() > 30, "{found:?}");
    let huge = "A".repeat(200 << 10);
    let deep: Value = serde_json::from_str(&("[".repeat(100) + &"]".repeat(100))).unwrap();
    let mut cases = 0;
    for place in &found {
        let original = document.pointer(place).unwrap();
        let mut altered: Vec<(&str, Value)> = [
            ("null", Value::Null),
            ("a number", json!(7)),
            ("a large number", json!(1e300)),
            ("a boolean", json!(true)),
            ("an object", json!({})),
            ("a list", json!([])),
            ("a deep list", deep.clone()),
            ("an empty text", json!("")),
            ("no base64", json!("*")),
            ("a long text", json!(huge)),
        ]
        .into_iter()
        .filter(|(_, value)| value != original)
        .collect();
        if let Some(text) = original.as_str() {
            let bytes = STANDARD.decode(text).unwrap();
            let encoded = |bytes: &[u8]| json!(STANDARD.encode(bytes));
            altered.push(("a byte less", encoded(&bytes[..bytes.len() - 1])));
            altered.push(("a byte more", encoded(&[&bytes[..], &[0]].concat())));
            // without names of keys, the policy accepts a key with other attributes: the cases of the key's fields are below
            let every = if place.ends_with("/ak_pub") { 64 } else { 1 };
            for at in (0..bytes.len()).step_by(every) {
                let mut changed = bytes.clone();
                changed[at] ^= 1 << (at % 8);
                altered.push(("another bit", encoded(&changed)));
            }
        }
        let taken = foreign.pointer(place).unwrap();
        if taken != original && !place.is_empty() && place != "/Attestation" {
            // a quotes' list of another machine is that machine's whole evidence but its key
            altered.push(("of another machine", taken.clone()));
        }
        for (what, value) in altered {
            // a field that the protocol lets out
            if place == "/InstanceInfo" && value == json!("") {
                continue;
            }
            let what = format!("{place}: {what}");
            let mut hostile = document.clone();
            *hostile.pointer_mut(place).unwrap() = value;
            let why = refusal(&what, hostile.to_string().as_bytes());
            let why = why.unwrap_or_else(|| panic!("{what}: accepted"));
            let mut expected = reasons(place).to_vec();
            if what.ends_with("of another machine") {
                expected.push("not signed by the attestation key");
            }
            assert!(
                expected.iter().any(|reason| why.contains(reason)),
                "{what}: {why}"
            );
            assert!(why.len() < 400, "{what}: {why:.500}");
            cases += 1;
        }
        // without the field
        if let Some((parent, name)) = place.rsplit_once('/')
            && let Some(fields) = document.pointer(parent).unwrap().as_object()
            && place != "/InstanceInfo"
        {
            let mut hostile = document.clone();
            let without = hostile
                .pointer_mut(parent)
                .unwrap()
                .as_object_mut()
                .unwrap();
            without.remove(name).unwrap();
            let what = format!("{place}: missing");
            assert!(
                refusal(&what, hostile.to_string().as_bytes()).is_some(),
                "{what}"
            );
            // and twice with the genuine value
            let text = document.to_string();
            let field = format!("\"{name}\":{}", fields[name]);
            let twice = text.replacen(&field, &format!("{field},{field}"), 1);
            if twice != text {
                expect(
                    &format!("{place}: twice"),
                    twice.as_bytes(),
                    "cannot be read",
                );
            }
            cases += 2;
        }
    }
    let text = document.to_string();
    for (what, hostile) in [
        ("bytes after it", format!("{text} x")),
        ("another document after it", format!("{text}{text}")),
        ("deep nesting", "[".repeat(200_000)),
        ("no text", "\u{0}".into()),
    ] {
        expect(what, hostile.as_bytes(), "cannot be read");
    }
    let long = format!("{text}{}", " ".repeat(256 << 10));
    expect("too long", long.as_bytes(), "at most");
    assert!(cases > 1500, "{cases}");
    println!("{cases} altered documents");
}

/// The structures of a quote, as a program without a TPM makes them, with a key of its own.
struct Parts {
    key: Vec<(&'static str, Vec<u8>)>,
    attest: Vec<(&'static str, Vec<u8>)>,
    signature: [u8; 4],
    values: BTreeMap<u32, Vec<u8>>,
    digest: Option<Vec<u8>>,
}

static KEY: LazyLock<RsaKeyPair> = LazyLock::new(|| {
    const MAKE: &str = "openssl genrsa 2048 | openssl pkcs8 -topk8 -nocrypt -outform DER";
    let made = Command::new("sh").args(["-c", MAKE]).output().unwrap();
    RsaKeyPair::from_pkcs8(&made.stdout).unwrap()
});

fn sized(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u16).to_be_bytes()[..], bytes].concat()
}

fn sha256(bytes: &[u8]) -> Vec<u8> {
    digest(&SHA256, bytes).as_ref().to_vec()
}

impl Parts {
    fn new() -> Parts {
        let components: RsaPublicKeyComponents<Vec<u8>> = KEY.public_key().into();
        Parts {
            // TPMT_PUBLIC (TCG, "Trusted Platform Module Library", part 2, §12.2.4)
            key: vec![
                ("type", b"\0\x01".to_vec()),
                ("nameAlg", b"\0\x0b".to_vec()),
                ("attributes", b"\0\x05\0\x72".to_vec()),
                ("policy", sized(&[])),
                ("symmetric", b"\0\x10".to_vec()),
                ("scheme", b"\0\x14".to_vec()),
                ("hash", b"\0\x0b".to_vec()),
                ("bits", b"\x08\0".to_vec()),
                ("exponent", b"\0\0\0\0".to_vec()),
                ("modulus", sized(&components.n)),
            ],
            // TPMS_ATTEST (§10.12)
            attest: vec![
                ("magic", b"\xffTCG".to_vec()),
                ("type", b"\x80\x18".to_vec()),
                ("qualifiedSigner", sized(&[])),
                (
                    "extraData",
                    sized(&sha256(&sha256(&[USER_DATA, NONCE].concat()))),
                ),
                ("clockInfo", vec![0; 17]),
                ("firmwareVersion", vec![0; 8]),
                ("count", b"\0\0\0\x01".to_vec()),
                ("bank", b"\0\x0b".to_vec()),
                ("select", b"\x03\xff\xff\xff".to_vec()),
                ("digest", vec![]),
            ],
            signature: *b"\0\x14\0\x0b",
            values: (0..24).map(|pcr| (pcr, vec![0; 32])).collect(),
            digest: None,
        }
    }

    fn part<'a>(parts: &'a mut [(&'static str, Vec<u8>)], name: &str) -> &'a mut Vec<u8> {
        &mut parts.iter_mut().find(|part| part.0 == name).unwrap().1
    }

    fn key(mut self, name: &str, bytes: &[u8]) -> Parts {
        *Self::part(&mut self.key, name) = bytes.to_vec();
        self
    }

    fn attest(mut self, name: &str, bytes: &[u8]) -> Parts {
        *Self::part(&mut self.attest, name) = bytes.to_vec();
        self
    }

    /// Returns the document, with a good signature over what is in it.
    fn document(mut self) -> Vec<u8> {
        let values: Vec<u8> = self.values.values().flatten().copied().collect();
        let digest = self.digest.take().unwrap_or_else(|| sha256(&values));
        *Self::part(&mut self.attest, "digest") = sized(&digest);
        let join = |parts: &[(&str, Vec<u8>)]| -> Vec<u8> {
            parts.iter().flat_map(|part| part.1.clone()).collect()
        };
        let (key, attest) = (join(&self.key), join(&self.attest));
        let mut signature = vec![0; KEY.public().modulus_len()];
        let random = SystemRandom::new();
        KEY.sign(&RSA_PKCS1_SHA256, &random, &attest, &mut signature)
            .unwrap();
        let signature = [&self.signature[..], &sized(&signature)].concat();
        let pcrs: BTreeMap<String, String> = self
            .values
            .iter()
            .map(|(pcr, value)| (pcr.to_string(), STANDARD.encode(value)))
            .collect();
        let document = json!({
            "Attestation": {
                "ak_pub": STANDARD.encode(key),
                "quotes": [{
                    "quote": STANDARD.encode(attest), "raw_sig": STANDARD.encode(signature),
                    "pcrs": {"hash": 11, "pcrs": pcrs},
                }],
            },
            "InstanceInfo": null,
            "UserData": STANDARD.encode(USER_DATA),
        });
        document.to_string().into_bytes()
    }
}

/// The signature is good in each case, so the refusal is about the field itself.
#[test]
fn every_field_of_a_quote_and_of_its_key_is_checked_by_itself() {
    let new = Parts::new;
    assert_eq!(refusal("unchanged", &new().document()), None);
    let size = "modulus has a wrong size";
    let generated = "its TPM did not generate";
    let quote = "not a quote of one bank";
    let values = "not the values that the TPM signed";
    let sign = "does not sign with RSASSA and SHA-256";
    let modulus = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut parts = new();
        change(Parts::part(&mut parts.key, "modulus"));
        parts
    };
    for (what, parts, reason) in [
        ("an ECC key", new().key("type", b"\0\x23"), "not an RSA key"),
        (
            "a symmetric key",
            new().key("type", b"\0\x25"),
            "not an RSA key",
        ),
        ("nameAlg SHA-1", new().key("nameAlg", b"\0\x04"), "nameAlg"),
        ("nameAlg null", new().key("nameAlg", b"\0\x10"), "nameAlg"),
        (
            "not restricted",
            new().key("attributes", b"\0\x04\0\x72"),
            generated,
        ),
        (
            "not fixedTPM",
            new().key("attributes", b"\0\x05\0\x70"),
            generated,
        ),
        (
            "does not sign",
            new().key("attributes", b"\0\x01\0\x72"),
            generated,
        ),
        (
            "decrypts too",
            new().key("attributes", b"\0\x07\0\x72"),
            generated,
        ),
        (
            "a policy",
            new().key("policy", &sized(&[1; 32])),
            "authorization policy",
        ),
        (
            "a symmetric cipher",
            new().key("symmetric", b"\0\x06"),
            sign,
        ),
        ("RSAPSS", new().key("scheme", b"\0\x16"), sign),
        ("no scheme", new().key("scheme", b"\0\x10"), sign),
        ("SHA-1", new().key("hash", b"\0\x04"), sign),
        ("1024 bits", new().key("bits", b"\x04\0"), size),
        ("more bits than it has", new().key("bits", b"\x0c\0"), size),
        (
            "exponent 3",
            new().key("exponent", b"\0\0\0\x03"),
            "exponent",
        ),
        (
            "exponent 1",
            new().key("exponent", b"\0\0\0\x01"),
            "exponent",
        ),
        (
            "a short modulus",
            modulus(&|it| it.truncate(130)),
            "truncated",
        ),
        ("a modulus of zeros", modulus(&|it| it[2..].fill(0)), size),
        (
            "bytes after the key",
            modulus(&|it| it.push(0)),
            "bytes follow",
        ),
        (
            "an endless length",
            modulus(&|it| it[..2].fill(0xff)),
            "truncated",
        ),
        ("another modulus", modulus(&|it| it[100] ^= 1), "not signed"),
        ("not of a TPM", new().attest("magic", b"\xffTCX"), quote),
        ("a certification", new().attest("type", b"\x80\x17"), quote),
        ("a clock", new().attest("type", b"\x80\x19"), quote),
        (
            "a long signer",
            new().attest("qualifiedSigner", b"\xff\xff"),
            quote,
        ),
        (
            "another nonce",
            new().attest("extraData", &sized(&[0; 32])),
            "another connection",
        ),
        (
            "no nonce",
            new().attest("extraData", &sized(&[])),
            "another connection",
        ),
        (
            "a longer nonce",
            new().attest("extraData", &sized(&[0; 64])),
            "another connection",
        ),
        ("no bank", new().attest("count", b"\0\0\0\0"), quote),
        ("two banks", new().attest("count", b"\0\0\0\x02"), quote),
        (
            "endless banks",
            new().attest("count", b"\xff\xff\xff\xff"),
            quote,
        ),
        ("SHA-1 registers", new().attest("bank", b"\0\x04"), values),
        ("SHA-384 registers", new().attest("bank", b"\0\x0c"), values),
        (
            "fewer registers",
            new().attest("select", b"\x03\xff\xff\x7f"),
            values,
        ),
        (
            "no registers",
            new().attest("select", b"\x03\0\0\0"),
            values,
        ),
        (
            "more registers",
            new().attest("select", b"\x04\xff\xff\xff\x01"),
            values,
        ),
        (
            "an endless bitmap",
            new().attest("select", b"\xff\xff\xff\xff"),
            quote,
        ),
        ("no bitmap", new().attest("select", b"\0"), values),
        ("a short clock", new().attest("clockInfo", &[0; 16]), quote),
    ] {
        expect(what, &parts.document(), reason);
    }
    for (what, change, reason) in [
        ("ECDSA", *b"\0\x18\0\x0b", "not signed"),
        ("RSAPSS", *b"\0\x16\0\x0b", "not signed"),
        ("SHA-1", *b"\0\x14\0\x04", "not signed"),
        ("HMAC", *b"\0\x05\0\x0b", "not signed"),
    ] {
        let mut parts = new();
        parts.signature = change;
        expect(&format!("a signature by {what}"), &parts.document(), reason);
    }
    let mut parts = new();
    parts.digest = Some(vec![0; 32]);
    expect("another digest", &parts.document(), values);
    let mut parts = new();
    parts.digest = Some(vec![]);
    expect("no digest", &parts.document(), values);
    // the boundary between two values moves: their concatenation, which is signed, stays the same
    let mut parts = new();
    parts.values.get_mut(&4).unwrap().push(0);
    parts.values.get_mut(&5).unwrap().pop();
    expect("a moved boundary", &parts.document(), values);
    let mut parts = new();
    parts.values.insert(4, vec![7; 32]);
    expect(
        "another register",
        &parts.document(),
        "PCR 4: expected 0000",
    );
    let mut parts = new().attest("select", b"\x03\xef\xff\xff");
    parts.values.remove(&4);
    expect("a register less", &parts.document(), "PCR 4: expected");
}

/// Each is complete and genuine, but for something else.
#[test]
fn genuine_evidence_for_something_else_is_refused() {
    let tpm = Swtpm::start();
    let issuer = qemu_vtpm::issuer(tpm.location().parse().unwrap(), None);
    let replayed = issuer.issue(USER_DATA, &[7; 32]).unwrap();
    expect("another nonce", &replayed, "another connection");
    let validator = qemu_vtpm::validator(Arc::new(policy()));
    // the same concatenation of user data and nonce, cut elsewhere, is another pair for the connection that asked
    let shifted = issuer
        .issue(&[USER_DATA, &NONCE[..1]].concat(), &NONCE[1..])
        .unwrap();
    let judged = validator.validate(&shifted, NONCE);
    assert!(judged.map_or(true, |user_data| user_data != USER_DATA));
    let named = policy()
        .believing([qemu_vtpm::key_name(&Swtpm::start().location().parse().unwrap()).unwrap()])
        .unwrap();
    let of_another = qemu_vtpm::validator(Arc::new(named));
    let why = of_another
        .validate(&issuer.issue(USER_DATA, NONCE).unwrap(), NONCE)
        .unwrap_err();
    assert!(
        why.to_string()
            .contains("not the one that the policy names")
    );
}
