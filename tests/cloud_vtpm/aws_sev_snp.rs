//! `aws-sev-snp` with a NitroTPM: in addition to the chip's report, a machine sends an attestation document of AWS's hypervisor.
//! The chip and the hypervisor are of the tests; the NitroTPM is an emulation ([`crate::nitro_tpm`]).

use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde_json::{Value, json};
use tpm::{Bank, Tpm};
use verifier::aws_hypervisor::{Documents, NitroTpm as OfTpm};
use verifier::aws_sev_snp::{AwsSnpMachine, VARIANT};
use verifier::nitro_document::{MAX_DOCUMENT, NitroDocument};
use verifier::sources::Sources;
use verifier::{Evidence, IssueError, Issuer, vtpm};

use crate::authority::Authority;
use crate::aws_nitro_tpm::{
    Draft, Hypervisor, INSTANCE, SAID_BY_EC2, bytes, demands, ec2, good, text, with_list,
};
use crate::cloud_tpm::{CloudTpm, NONCE, USER_DATA};
use crate::gcp_sev_es::log_of;
use crate::meeting::{prove, proven, refused, validator, validator_with};
use crate::nitro_machine::sent;
use crate::nitro_tpm::{Fault, NSM_REQUEST, NitroTpm};
use crate::sev_snp::{ASK, Asked, Chip, aws, aws_with, ours, with};

/// The requirements of a policy on a machine with this value of PCR 4.
fn policy(authority: &Authority, digit: &str) -> Value {
    with(ours(), &demands(authority, digit))
}

/// Returns the documents of a hypervisor that alters them.
fn signed(authority: &Authority, alter: fn(&mut Draft)) -> Option<Arc<dyn Documents>> {
    Some(Arc::new(Hypervisor::new(authority, &good(), alter)))
}

fn issuer(nitro: &NitroTpm) -> Arc<dyn Issuer> {
    let machine = AwsSnpMachine::new(Chip::new(|_| ()), Some(Arc::new(OfTpm::default())));
    Arc::new(vtpm::TpmIssuer::new(
        nitro.location(),
        None,
        Arc::new(machine),
    ))
}

#[test]
fn a_machine_is_proved_by_its_chip_and_by_the_registers_of_its_nitro_tpm() {
    let authority = Authority::new();
    let nitro = NitroTpm::start(Hypervisor::new(&authority, &good(), |_| ()));
    let issuer = issuer(&nitro);
    let judge = validator(&VARIANT, &policy(&authority, "0"));
    prove(issuer.clone(), judge.clone()).unwrap();
    assert_eq!(nitro.count(NSM_REQUEST), 3, "one for each handshake");
    assert_eq!(nitro.left(), (0, 0));

    assert!(!judge.properties().believes_any_tpm);
    let document = issuer.issue(USER_DATA, NONCE).unwrap();
    let identified = judge.judge(&Evidence::new(&document, NONCE)).unwrap();
    assert!(identified.is_endorsed);
    let claims = identified.platform.unwrap();
    assert_eq!(claims.technology, "AMD SEV-SNP (Milan)");
    assert_eq!(claims.chip, Some("c5".repeat(64)));
    let bound = [
        "attestation key: SHA-512 in REPORT_DATA",
        "attestation key: public_key",
        "nonce of the connection: nonce",
    ];
    assert_eq!(claims.bound, bound);

    // the hypervisor signs the values in the registers, not those that a policy expects
    let mut tpm = Tpm::open(&nitro.location()).unwrap();
    tpm.pcr_event(4, b"another boot loader").unwrap();
    let value = tpm.pcrs(Bank::Sha384).unwrap().remove(&4).unwrap();
    drop(tpm);
    let error = prove(issuer.clone(), judge).unwrap_err();
    assert!(error.contains("SHA-384 PCR 4: expected 0000"), "{error}");
    let mut other = policy(&authority, "0");
    let digits: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
    other["cloud"]["sha384"]["4"] = digits.into();
    prove(issuer, validator(&VARIANT, &other)).unwrap();
}

#[test]
fn a_machine_that_makes_no_document_proves_what_its_chip_signs() {
    let authority = Authority::new();
    let nitro = NitroTpm::start(Hypervisor::new(&authority, &good(), |_| ()));
    for fault in [Fault::UnknownCommand, Fault::SmallIndices, Fault::Refusal] {
        nitro.set(fault);
        let issuer = issuer(&nitro);
        let document = issuer.issue(USER_DATA, NONCE).unwrap();
        assert_eq!(sent(&document), None, "{fault:?}");
        let chip = validator(&VARIANT, &ours());
        prove(issuer.clone(), chip.clone()).unwrap();
        assert!(chip.properties().believes_any_tpm);
        // each of these needs the document
        let cloud = &demands(&authority, "0")["cloud"];
        for demanded in [
            json!({"sha384": cloud["sha384"]}),
            json!({"roots": cloud["roots"]}),
            json!({"instances": [INSTANCE]}),
            json!({"accounts": ["123456789012"]}),
            json!({"zones": ["eu-central-1b"]}),
        ] {
            let policy = with(ours(), &json!({"cloud": demanded}));
            let judge = validator(&VARIANT, &policy);
            let error = refused(&judge, &document);
            for why in [
                "sent no attestation document of its NitroTPM",
                "remove cloud from the policy, and name its key (attestationKeys)",
            ] {
                assert!(error.contains(why), "{demanded}: {error}, expected {why}");
            }
        }
    }
}

#[test]
fn a_document_that_nothing_demands_is_ignored() {
    let (cloud, authority) = (CloudTpm::start(), Authority::new());
    let documents = signed(&authority, |draft| draft.set("nonce", bytes(&[7; 32])));
    let document = aws_with(&cloud, Chip::new(|_| ()), documents).issue(USER_DATA, NONCE);
    let document = document.unwrap();
    assert!(sent(&document).is_some());
    let judge = validator(&VARIANT, &ours());
    let claims = proven(&judge, &document);
    assert_eq!(claims.bound, ["attestation key: SHA-512 in REPORT_DATA"]);
    let judge = validator(&VARIANT, &policy(&authority, "0"));
    assert!(judge.judge(&Evidence::new(&document, NONCE)).is_err());
}

/// Sends the document of another machine, or of another connection.
struct Replayed(Vec<u8>);

impl Documents for Replayed {
    fn document(&self, _: &mut Tpm, _: &[u8], _: &[u8]) -> Result<Option<Vec<u8>>, IssueError> {
        Ok(Some(self.0.clone()))
    }
}

#[test]
fn a_document_of_another_machine_connection_or_authority_is_refused() {
    let (cloud, authority) = (CloudTpm::start(), Authority::new());
    let good_documents = || signed(&authority, |_| ());
    let right = aws_with(&cloud, Chip::new(|_| ()), good_documents());
    let replayed = |nonce: &[u8]| -> Option<Arc<dyn Documents>> {
        let document = sent(&right.issue(USER_DATA, nonce).unwrap()).unwrap();
        Some(Arc::new(Replayed(document)))
    };
    let own = CloudTpm::start();
    let chip = || Chip::new(|_| ());
    let pinned = policy(&authority, "0");
    let of_instance = |id: &str| with_list(pinned.clone(), "instances", id);
    for (tpm, chip, documents, policy, why) in [
        (&cloud, chip(), replayed(NONCE), &pinned, ""),
        (&cloud, chip(), good_documents(), &of_instance(INSTANCE), ""),
        // a software TPM of an attacker, with the document of a machine whose registers are right
        (
            &own,
            chip(),
            replayed(NONCE),
            &pinned,
            "names another key than the one that signed the quote",
        ),
        (
            &cloud,
            chip(),
            replayed(b"another nonce"),
            &pinned,
            "was made for another connection",
        ),
        (
            &cloud,
            chip(),
            good_documents(),
            &of_instance("i-1"),
            "instance of the machine is \"i-0123456789abcdef0\"",
        ),
        (
            &cloud,
            chip(),
            signed(&authority, |draft| draft.set("module_id", text("i-1-enc0"))),
            &pinned,
            "it is from i-1-enc0, which is no NitroTPM",
        ),
        (
            &cloud,
            chip(),
            good_documents(),
            &self::policy(&authority, "1"),
            "SHA-384 PCR 4: expected 1111",
        ),
        (
            &cloud,
            chip(),
            signed(&Authority::new(), |_| ()),
            &pinned,
            "a signature is wrong",
        ),
        (
            &cloud,
            chip(),
            good_documents(),
            &with(
                pinned.clone(),
                &json!({"cloud": {"sha384": pinned["cloud"]["sha384"]}}),
            ),
            "leads to none of the accepted roots",
        ),
        // a document of the hypervisor does not replace the chip's report
        (
            &cloud,
            Chip::new(|report| report[0x50] ^= 1),
            good_documents(),
            &pinned,
            "the report was made for another one",
        ),
        (
            &cloud,
            chip(),
            good_documents(),
            &with(pinned.clone(), &json!({"snpVersion": 25})),
            "snp is 24, below the minimum 25",
        ),
    ] {
        let document = aws_with(tpm, chip, documents).issue(USER_DATA, NONCE);
        let judged = validator(&VARIANT, policy).judge(&Evidence::new(&document.unwrap(), NONCE));
        let said = judged.map_or_else(|error| error.to_string(), |_| String::new());
        let is_so = if why.is_empty() {
            said.is_empty()
        } else {
            said.contains(why)
        };
        assert!(is_so, "{said}, expected {why}");
    }
}

/// An attacker can write a report that names any chip.
#[test]
fn no_certificate_is_fetched_for_a_machine_whose_document_is_refused() {
    let (cloud, authority) = (CloudTpm::start(), Authority::new());
    let refusal = |digit: &str| {
        let chip = Arc::new(Chip {
            change: |_| (),
            table: vec![(ASK, "ask")],
        });
        let document = aws_with(&cloud, chip, signed(&authority, |_| ())).issue(USER_DATA, NONCE);
        let asked = Arc::new(Asked::default());
        let sources: Arc<dyn Sources> = asked.clone();
        let judge = validator_with(&VARIANT, &policy(&authority, digit), &sources);
        let error = refused(&judge, &document.unwrap());
        (error, asked.0.load(Ordering::SeqCst))
    };
    let (error, asked) = refusal("1");
    assert!(
        error.contains("SHA-384 PCR 4") && asked == 0,
        "{asked}: {error}"
    );
    let (error, asked) = refusal("0");
    assert!(
        error.contains("nothing is here") && asked == 1,
        "{asked}: {error}"
    );
}

#[test]
fn ec2_says_the_account_of_the_machine_whose_instance_the_hypervisor_signed() {
    let (cloud, authority) = (CloudTpm::start(), Authority::new());
    let issuer = aws_with(&cloud, Chip::new(|_| ()), signed(&authority, |_| ()));
    let document = issuer.issue(USER_DATA, NONCE).unwrap();
    let own = with_list(policy(&authority, "0"), "accounts", "123456789012");
    // these programs may fetch, and send no request for AMD's list
    let own = with(own, &json!({"snp": {"revocationList": "optional"}}));
    let (sources, requests) = ec2("123456789012");
    let judge = validator_with(&VARIANT, &own, &sources);
    let claims = proven(&judge, &document);
    let of_ec2: Vec<_> = (claims.properties.iter())
        .map(|property| (property.name, &*property.value))
        .skip_while(|(name, _)| *name != "instance")
        .collect();
    assert_eq!(of_ec2, SAID_BY_EC2);
    assert_eq!(requests.load(Ordering::SeqCst), 1);
    let (sources, _) = ec2("210987654321");
    let judge = validator_with(&VARIANT, &own, &sources);
    let error = refused(&judge, &document);
    let why = "account of the machine is \"210987654321\"";
    assert!(error.contains(why), "{error}");
    // the chip names no instance, so no service could be asked about it
    let (sources, requests) = ec2("123456789012");
    let document = aws(&cloud, Chip::new(|_| ())).issue(USER_DATA, NONCE);
    let judge = validator_with(&VARIANT, &own, &sources);
    refused(&judge, &document.unwrap());
    assert_eq!(requests.load(Ordering::SeqCst), 0);
}

/// The event log fills the rest of the document, and the longest answer of the hypervisor has 8 KiB.
#[test]
fn the_longest_log_and_document_fit_attested_tls() {
    let (cloud, authority) = (CloudTpm::start(), Authority::new());
    let path = cloud.path("log");
    fs::write(&path, log_of(&[(8, vec![7; 24_000])])).unwrap();
    let documents = signed(&authority, |draft| {
        draft.set("user_data", bytes(&[7; 6000]));
    });
    let machine = AwsSnpMachine::new(Chip::new(|_| ()), documents);
    let issuer = vtpm::TpmIssuer::new(cloud.location(), Some(path.into()), Arc::new(machine));
    let document = issuer.issue(USER_DATA, NONCE).unwrap();
    let sent = sent(&document).unwrap();
    NitroDocument::parse(&sent).unwrap();
    assert!((7500..MAX_DOCUMENT).contains(&sent.len()), "{}", sent.len());
    let value: Value = serde_json::from_slice(&document).unwrap();
    let log = value["Attestation"]["event_log"].as_str().unwrap();
    assert!(log.len() > 32_000, "{}", log.len());
    prove(
        Arc::new(issuer),
        validator(&VARIANT, &policy(&authority, "0")),
    )
    .unwrap();
}
