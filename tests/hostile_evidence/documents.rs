//! Documents of a software TPM of which one field is altered, and documents that are genuine for something else.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use support::swtpm::Swtpm;
use verifier::{Evidence, Issuer, Validator, qemu_vtpm};

use crate::{NONCE, USER_DATA, expect, policy, refusal};

fn genuine(tpm: &Swtpm) -> Value {
    let issuer = qemu_vtpm::issuer(tpm.location().parse().unwrap(), None);
    let mut document: Value =
        serde_json::from_slice(&issuer.issue(USER_DATA, NONCE).unwrap()).unwrap();
    // the other banks are ignored
    let quotes = document["Attestation"]["quotes"].as_array_mut().unwrap();
    quotes.retain(|quote| quote["pcrs"]["hash"] == 11);
    document
}

/// Returns the path of each value in a tree.
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

/// Returns the permitted reasons of a refusal when the value at this path is not the one that the TPM signed.
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
        "/Attestation/quotes/0/pcrs/hash" => &[UNREADABLE, "0 quotes of the SHA-256 bank"],
        "/Attestation/quotes" => &[UNREADABLE, "0 quotes of the SHA-256 bank"],
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
            // the list of quotes of another machine is all of that machine's evidence except its key
            altered.push(("of another machine", taken.clone()));
        }
        for (what, value) in altered {
            // a field that the protocol lets a sender leave out
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

/// Each document is complete and genuine, but was made for another purpose.
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
    let judged = validator.judge(&Evidence::new(&shifted, NONCE));
    assert!(judged.map_or(true, |identified| identified.user_data != USER_DATA));
    let named = policy()
        .believing([qemu_vtpm::VARIANT
            .key_name(&Swtpm::start().location().parse().unwrap())
            .unwrap()
            .unwrap()])
        .unwrap();
    let of_another = qemu_vtpm::validator(Arc::new(named));
    let why = of_another
        .judge(&Evidence::new(
            &issuer.issue(USER_DATA, NONCE).unwrap(),
            NONCE,
        ))
        .unwrap_err();
    assert!(
        why.to_string()
            .contains("not the one that the policy names")
    );
}
