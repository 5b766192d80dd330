//! `aws-nitro-tpm`: the identity of the instance, and attestation documents. An authority of the tests signs them in the place of AWS's
//! hypervisor; how a machine asks for them is in `nitro_machine`.

use std::net::TcpListener;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use collateral::{Ec2Caller, FetchSettings, Fetching};
use common::cloud_server::{self, Answer};
use rcgen::{CertificateParams, KeyPair, PKCS_ECDSA_P384_SHA384};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P384_SHA384_FIXED_SIGNING, EcdsaKeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use serde_json::{Value, json};
use support::foreign::rust_crate;
use support::mutation::mutations;
use support::random::Random;
use tpm::Tpm;
use verifier::ak_certificate::AkRoot;
use verifier::aws_hypervisor::{Documents, ROOTS};
use verifier::aws_nitro_tpm::{AwsMachine, VARIANT};
use verifier::instance::CloudRequirements;
use verifier::nitro_document::{MAX_DOCUMENT, NitroDocument};
use verifier::refusal::Kind;
use verifier::sources::Sources;
use verifier::{Evidence, IssueError, Issuer, vtpm};

use crate::authority::{Authority, PublicKey, WRONG_TIMES, of_attestation_key};
use crate::cloud_tpm::{CloudTpm, NONCE, USER_DATA};
use crate::host::Host;
use crate::meeting::{Correct, prove, proven, refused, validator, validator_with};

pub const INSTANCE: &str = "i-0123456789abcdef0";

/// What EC2 says about the instance, as properties of the platform.
pub const SAID_BY_EC2: [(&str, &str); 4] = [
    ("instance", INSTANCE),
    ("account", "123456789012"),
    ("zone", "eu-central-1b"),
    ("image", "ami-1"),
];

/// Types of CBOR (RFC 8949 §3.1).
pub const BYTES: u8 = 2;
pub const TEXT: u8 = 3;
const ARRAY: u8 = 4;
pub const MAP: u8 = 5;

pub fn head(kind: u8, count: usize) -> Vec<u8> {
    match count {
        0..24 => vec![kind << 5 | count as u8],
        24..0x100 => vec![kind << 5 | 24, count as u8],
        _ => [&[kind << 5 | 25], &(count as u16).to_be_bytes()[..]].concat(),
    }
}

pub fn bytes(content: &[u8]) -> Vec<u8> {
    [head(BYTES, content.len()), content.to_vec()].concat()
}

pub fn text(content: &str) -> Vec<u8> {
    [head(TEXT, content.len()), content.into()].concat()
}

/// The document that the hypervisor of the tests signs: the fields in order, with encoded values.
#[derive(Clone)]
pub struct Draft {
    fields: Vec<(&'static str, Vec<u8>)>,
    protected: Vec<u8>,
}

impl Draft {
    pub fn set(&mut self, name: &str, value: Vec<u8>) {
        let field = self.fields.iter_mut().find(|(known, _)| *known == name);
        field.unwrap().1 = value;
    }

    fn payload(&self) -> Vec<u8> {
        let fields = self.fields.iter();
        let fields: Vec<_> = fields
            .map(|(name, value)| [text(name), value.clone()].concat())
            .collect();
        [head(MAP, fields.len()), fields.concat()].concat()
    }

    /// Signs a payload.
    fn signed(&self, payload: &[u8], key: &EcdsaKeyPair) -> Vec<u8> {
        let parts = [bytes(&self.protected), bytes(&[]), bytes(payload)].concat();
        let message = [head(ARRAY, 4), text("Signature1"), parts].concat();
        let signature = key.sign(&SystemRandom::new(), &message).unwrap();
        [
            head(ARRAY, 4),
            bytes(&self.protected),
            head(MAP, 0),
            bytes(payload),
            bytes(signature.as_ref()),
        ]
        .concat()
    }
}

/// The hypervisor of the tests.
pub struct Hypervisor {
    key: EcdsaKeyPair,
    certificate: Vec<u8>,
    root: Vec<u8>,
    alter: fn(&mut Draft),
}

impl Hypervisor {
    pub fn new(
        authority: &Authority,
        certified: &CertificateParams,
        alter: fn(&mut Draft),
    ) -> Hypervisor {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P384_SHA384).unwrap();
        let certificate = authority.certify_as_root(certified, &PublicKey::of_pair(&key));
        let pkcs8 = key.serialize_der();
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P384_SHA384_FIXED_SIGNING, &pkcs8, &random);
        Hypervisor {
            key: key.unwrap(),
            certificate,
            root: CertificateDer::from_pem_slice(authority.root_pem().as_bytes())
                .unwrap()
                .to_vec(),
            alter,
        }
    }

    /// PCRs 0 to 15 of a TPM that was just started are zero.
    pub fn draft(&self, nonce: &[u8], public_key: &[u8]) -> Draft {
        let pcrs: Vec<_> = (0..16)
            .map(|index| [head(0, index), bytes(&[0; 48])].concat())
            .collect();
        Draft {
            fields: vec![
                (
                    "module_id",
                    text(&format!("{INSTANCE}-tpm0000000000000000")),
                ),
                ("digest", text("SHA384")),
                ("timestamp", head(0, 1_000)),
                ("nitrotpm_pcrs", [head(MAP, 16), pcrs.concat()].concat()),
                ("certificate", bytes(&self.certificate)),
                ("cabundle", [head(ARRAY, 1), bytes(&self.root)].concat()),
                ("public_key", bytes(public_key)),
                ("user_data", vec![0xf6]),
                ("nonce", bytes(nonce)),
            ],
            protected: vec![0xa1, 1, 0x38, 0x22],
        }
    }

    /// Signs a document, with the fault that the test wants.
    pub fn sign(&self, mut draft: Draft) -> Vec<u8> {
        (self.alter)(&mut draft);
        draft.signed(&draft.payload(), &self.key)
    }
}

impl Documents for Hypervisor {
    fn document(
        &self,
        _tpm: &mut Tpm,
        nonce: &[u8],
        public_key: &[u8],
    ) -> Result<Option<Vec<u8>>, IssueError> {
        Ok(Some(self.sign(self.draft(nonce, public_key))))
    }
}

pub fn good() -> CertificateParams {
    of_attestation_key("i-0123456789abcdef0.eu-central-1.aws.nitrotpm", None)
}

/// The metadata service of EC2.
pub fn host() -> Host {
    let host = Host::start();
    let identity = json!({"accountId": "123456789012", "imageId": "ami-1", "instanceId": INSTANCE, "region": "eu-central-1", "availabilityZone": "eu-central-1b", "privateIp": "10.7.0.1", "kernelId": null});
    host.set("PUT /latest/api/token", b"the-token");
    host.set(
        "GET /latest/dynamic/instance-identity/document",
        identity.to_string().as_bytes(),
    );
    host
}

fn issuer(cloud: &CloudTpm, host: &Host, documents: Option<Hypervisor>) -> Arc<dyn Issuer> {
    let documents = documents.map(|documents| Arc::new(documents) as Arc<dyn Documents>);
    let machine = Arc::new(AwsMachine::new(host.url(), documents));
    Arc::new(vtpm::TpmIssuer::new(cloud.location(), None, machine))
}

/// Returns requirements for the root of the tests and a value of PCR 4.
pub fn demands(authority: &Authority, digit: &str) -> Value {
    json!({"cloud": {"roots": [authority.root_pem()], "sha384": {"4": digit.repeat(96)}}})
}

/// Returns a correct machine.
pub fn correct() -> Correct {
    let (cloud, host, authority) = (CloudTpm::start(), host(), Authority::new());
    let hypervisor = Hypervisor::new(&authority, &good(), |_| ());
    let issuer = issuer(&cloud, &host, Some(hypervisor));
    Correct::new(&VARIANT, issuer, demands(&authority, "0"), (cloud, host))
}

#[test]
fn a_machine_is_proved_by_the_document_of_its_hypervisor() {
    let (cloud, host, authority) = (CloudTpm::start(), host(), Authority::new());
    let issuer = issuer(
        &cloud,
        &host,
        Some(Hypervisor::new(&authority, &good(), |_| ())),
    );
    prove(
        issuer.clone(),
        validator(&VARIANT, &demands(&authority, "0")),
    )
    .unwrap();
    let requests = host.requests();
    assert_eq!(
        requests.len(),
        2,
        "the identity is asked for once: {requests:?}"
    );
    assert!(requests[0].contains("\nx-aws-ec2-metadata-token-ttl-seconds: 60\n"));
    assert!(requests[1].contains("\nx-aws-ec2-metadata-token: the-token\n"));

    let judge = validator(&VARIANT, &demands(&authority, "0"));
    let document = issuer.issue(USER_DATA, NONCE).unwrap();
    let claims = proven(&judge, &document);
    assert_eq!(claims.chip.as_deref(), Some(INSTANCE));
    assert_eq!(claims.bound[0], "attestation key: public_key");
    assert!(!judge.properties().believes_any_tpm);
    // the document has the fields that Constellation's validator reads
    let read: Value = serde_json::from_slice(&document).unwrap();
    assert_eq!(read["Attestation"]["ak_cert"], Value::Null);

    for (further, why) in [
        (demands(&authority, "1"), "SHA-384 PCR 4: expected 1111"),
        (
            json!({"cloud": {"sha384": {"4": "0".repeat(96)}}}),
            "leads to none of the accepted roots",
        ),
        (
            json!({"cloud": {"roots": [authority.root_pem()], "instances": ["i-1"]}}),
            "instance of the machine is \"i-0123456789abcdef0\"",
        ),
    ] {
        let judge = validator(&VARIANT, &further);
        let error = refused(&judge, &document);
        assert!(error.contains(why), "{error}, expected {why}");
    }
    // without values of PCRs, the document proves no key
    let weak = json!({"cloud": {"roots": [authority.root_pem()]}, "attestationKeys": [format!("000b{}", "12".repeat(32))]});
    let error = refused(&validator(&VARIANT, &weak), &document);
    assert!(error.contains("its attestation key is"), "{error}");
}

/// The metadata service of an instance with a role.
pub fn host_with_role() -> Host {
    let host = host();
    let credentials = json!({
        "Code": "Success", "AccessKeyId": OF_ROLE, "SecretAccessKey": "secret", "Token": TOKEN_OF_ROLE, "Expiration": "2049-01-01T00:00:00Z",
    });
    let path = "GET /latest/meta-data/iam/security-credentials/";
    host.set(path, b"verifier");
    host.set(
        &format!("{path}verifier"),
        credentials.to_string().as_bytes(),
    );
    host
}

/// The access keys of an operator and of the role of an instance, and the token of the role's session.
const OF_OPERATOR: &str = "AKIDOPERATOR";
pub const OF_ROLE: &str = "ASIAROLE";
const TOKEN_OF_ROLE: &str = "session";

/// Starts a server in EC2's place. It answers a caller with this access key that the tests' instance has this owner. Returns its
/// URL and the number of its requests.
pub fn api(owner: &'static str, key: &'static str) -> (String, Arc<AtomicUsize>) {
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = requests.clone();
    let api = cloud_server::start(move |request| {
        counted.fetch_add(1, Ordering::SeqCst);
        assert_eq!(request.form("Action").as_deref(), Some("DescribeInstances"));
        assert_eq!(request.form("InstanceId.1").as_deref(), Some(INSTANCE));
        let signed = request.field("authorization").unwrap();
        assert!(
            signed.contains(&format!("Credential={key}/"))
                && signed.contains("/eu-central-1/ec2/aws4_request"),
            "{signed}"
        );
        let token = (key == OF_ROLE).then_some(TOKEN_OF_ROLE);
        assert_eq!(request.field("x-amz-security-token"), token);
        let body = format!(
            "<DescribeInstancesResponse xmlns=\"http://ec2.amazonaws.com/doc/2016-11-15/\"><reservationSet><item><ownerId>{owner}</ownerId>\
             <instancesSet><item><instanceId>{INSTANCE}</instanceId><imageId>ami-1</imageId><instanceState><name>running</name>\
             </instanceState><placement><availabilityZone>eu-central-1b</availabilityZone></placement></item></instancesSet></item>\
             </reservationSet></DescribeInstancesResponse>"
        );
        Answer::new(200, "text/xml;charset=UTF-8", body)
    });
    (api, requests)
}

/// Starts EC2. Returns the sources of a verifier that asks it, and the number of its requests.
pub fn ec2(owner: &'static str) -> (Arc<dyn Sources>, Arc<AtomicUsize>) {
    let (api, requests) = api(owner, OF_OPERATOR);
    let sources = Fetching::new(FetchSettings {
        kds: None,
        pcs: None,
        ec2: Some(Ec2Caller {
            place: Some(format!("http://127.0.0.1:1,ec2={api}")),
            variables: |name| match name {
                "AWS_ACCESS_KEY_ID" => Some(OF_OPERATOR.into()),
                "AWS_SECRET_ACCESS_KEY" => Some("secret".into()),
                "AWS_REGION" => Some("eu-central-1".into()),
                _ => None,
            },
        }),
        ..FetchSettings::default()
    });
    (sources.unwrap(), requests)
}

/// Adds a list to the requirements for the cloud.
pub fn with_list(mut demands: Value, name: &str, entry: &str) -> Value {
    demands["cloud"][name] = json!([entry]);
    demands
}

#[test]
fn a_machine_is_of_the_account_and_the_zone_that_ec2_says() {
    let (cloud, host, authority) = (CloudTpm::start(), host(), Authority::new());
    let hypervisor = Hypervisor::new(&authority, &good(), |_| ());
    let issuer = issuer(&cloud, &host, Some(hypervisor));
    let demands = demands(&authority, "0");
    let own = with_list(demands.clone(), "accounts", "123456789012");
    let own = with_list(own, "zones", "eu-central-1b");

    let (sources, requests) = ec2("123456789012");
    let judge = validator_with(&VARIANT, &own, &sources);
    prove(issuer.clone(), judge.clone()).unwrap();
    // three connections, one request
    assert_eq!(requests.load(Ordering::SeqCst), 1);
    let document = issuer.issue(USER_DATA, NONCE).unwrap();
    let claims = proven(&judge, &document);
    let shown: Vec<_> = (claims.properties.iter())
        .map(|property| (property.name, &*property.value))
        .collect();
    assert_eq!(shown, SAID_BY_EC2);

    let refusal = |policy: &Value, sources: &Arc<dyn Sources>| {
        prove(issuer.clone(), validator_with(&VARIANT, policy, sources)).unwrap_err()
    };
    // a machine that its owner shares with the verifier's account
    let (shared, _) = ec2("210987654321");
    let error = refusal(&own, &shared);
    assert!(
        error.contains("account of the machine is \"210987654321\""),
        "{error}"
    );
    let elsewhere = with_list(demands.clone(), "zones", "eu-central-1a");
    let error = refusal(&elsewhere, &sources);
    assert!(
        error.contains("zone of the machine is \"eu-central-1b\""),
        "{error}"
    );
    // a node can have such a policy for services
    let error = prove(issuer.clone(), validator(&VARIANT, &own)).unwrap_err();
    assert!(error.contains("this program does not ask EC2"), "{error}");
}

#[test]
fn firstlight_verify_asks_ec2_with_the_variables_of_the_operator() {
    let (cloud, host, authority) = (CloudTpm::start(), host(), Authority::new());
    let hypervisor = Hypervisor::new(&authority, &good(), |_| ());
    let issuer = issuer(&cloud, &host, Some(hypervisor));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for machine in listener.incoming().flatten() {
            let soon = Instant::now() + Duration::from_secs(60);
            let _ = atls::Server::new(Some(issuer.clone()), None).handshake(machine, soon);
        }
    });
    let folder = tempfile::tempdir().unwrap();
    let policy = folder.path().join("policy.json");
    let mut own = with_list(demands(&authority, "0"), "accounts", "123456789012");
    own["measurements"] = json!({"15": {"expected": "00".repeat(32)}});
    own["exceptions"] = json!(["any-image", "zero-registers"]);
    std::fs::write(&policy, own.to_string()).unwrap();
    let verify = |owner, variables: &[(&str, &str)], more: &[&str]| {
        let (api, requests) = api(owner, OF_OPERATOR);
        let output = Command::new(support::program::built("firstlight"))
            .args([
                "verify",
                &address,
                "--fresh",
                "--attestation-variant",
                VARIANT.name,
                "--timeout",
                "2m",
            ])
            .arg("--policy")
            .arg(&policy)
            .args(more)
            .env("AWS_ENDPOINT_URL_EC2", api)
            .env("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:1")
            .env("AWS_REGION", "eu-central-1")
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        (
            output.status.code().unwrap(),
            text,
            requests.load(Ordering::SeqCst),
        )
    };
    let key = [
        ("AWS_ACCESS_KEY_ID", OF_OPERATOR),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
    ];
    let (code, said, requests) = verify("123456789012", &key, &[]);
    assert_eq!((code, requests), (0, 1), "{said}");
    for (owner, variables, more, why) in [
        (
            "210987654321",
            &key[..],
            &[][..],
            "account of the machine is \"210987654321\"",
        ),
        ("123456789012", &[], &[], "there are no credentials"),
        (
            "123456789012",
            &key,
            &["--offline"],
            "requests are disabled (offline)",
        ),
    ] {
        let (code, said, _) = verify(owner, variables, more);
        assert!(
            code == 3 && said.contains(why),
            "{code}, expected {why}:\n{said}"
        );
    }
    // a machine that is refused for its registers is shown, and EC2 is not asked
    own["measurements"]["4"] = json!({"expected": "11".repeat(32)});
    std::fs::write(&policy, own.to_string()).unwrap();
    let (code, said, requests) = verify("123456789012", &key, &[]);
    assert_eq!((code, requests), (3, 0), "{said}");
    assert!(said.contains("\nplatform:  AWS NitroTPM\n"), "{said}");
}

#[test]
fn only_a_machine_that_is_accepted_by_all_else_causes_a_request() {
    let (cloud, host, authority) = (CloudTpm::start(), host(), Authority::new());
    let (sources, requests) = ec2("123456789012");
    let refusal = |documents: Option<Hypervisor>, policy: &Value| {
        let document = issuer(&cloud, &host, documents).issue(USER_DATA, NONCE);
        let judge = validator_with(&VARIANT, policy, &sources);
        let error = refused(&judge, &document.unwrap());
        assert_eq!(requests.load(Ordering::SeqCst), 0, "{error}");
        error
    };
    let hypervisor = |authority| Some(Hypervisor::new(authority, &good(), |_| ()));
    let own = |demands| with_list(demands, "accounts", "123456789012");
    let other_authority = Authority::new();
    let strange_key = json!([format!("000b{}", "12".repeat(32))]);
    let mut of_key = own(json!({"cloud": {"roots": [authority.root_pem()]}}));
    of_key["attestationKeys"] = strange_key;
    for (documents, policy, why) in [
        (
            None,
            own(demands(&authority, "0")),
            "sent no attestation document",
        ),
        (
            None,
            own(json!({"cloud": {}})),
            "sent no attestation document",
        ),
        (
            hypervisor(&other_authority),
            own(demands(&authority, "0")),
            "a signature is wrong",
        ),
        (
            hypervisor(&authority),
            own(demands(&authority, "1")),
            "SHA-384 PCR 4",
        ),
        (
            hypervisor(&authority),
            with_list(own(demands(&authority, "0")), "instances", "i-1"),
            "instance of the machine is",
        ),
        (hypervisor(&authority), of_key, "its attestation key is"),
    ] {
        let error = refusal(documents, &policy);
        assert!(error.contains(why), "{error}, expected {why}");
    }
    // with a policy without accounts and zones, no program asks EC2
    let document = issuer(&cloud, &host, hypervisor(&authority)).issue(USER_DATA, NONCE);
    let judge = validator_with(&VARIANT, &demands(&authority, "0"), &sources);
    judge
        .judge(&Evidence::new(&document.unwrap(), NONCE))
        .unwrap();
    assert_eq!(requests.load(Ordering::SeqCst), 0);
}

#[test]
fn a_machine_without_documents_proves_what_one_of_the_old_system_proves() {
    let (cloud, host, authority) = (CloudTpm::start(), host(), Authority::new());
    let issuer = issuer(&cloud, &host, None);
    let any = validator(&VARIANT, &json!({}));
    assert!(any.properties().believes_any_tpm);
    prove(issuer.clone(), any).unwrap();
    let error = prove(issuer, validator(&VARIANT, &demands(&authority, "0"))).unwrap_err();
    assert!(
        error.contains("sent no attestation document of its NitroTPM"),
        "{error}"
    );
}

#[test]
fn a_document_with_one_fault_is_refused_by_name() {
    type Alter = fn(&mut Draft);
    let cases: [(Alter, &str); 12] = [
        (
            |draft| draft.set("nonce", bytes(&[7; 32])),
            "another connection",
        ),
        (|draft| draft.set("nonce", vec![0xf6]), "another connection"),
        (
            |draft| draft.set("public_key", bytes(&[7; 294])),
            "names another key",
        ),
        (
            |draft| draft.set("public_key", vec![0xf6]),
            "names another key",
        ),
        (
            |draft| draft.set("module_id", text("i-1-tpm0")),
            "it is from i-1-tpm0",
        ),
        (
            |draft| draft.set("module_id", text("i-0123456789abcdef0-enc0")),
            "it is from i-0123456789abcdef0-enc0",
        ),
        (
            |draft| draft.set("digest", text("SHA256")),
            "digest is not SHA384",
        ),
        (
            |draft| {
                draft.set(
                    "nitrotpm_pcrs",
                    [head(MAP, 1), head(0, 4), bytes(&[1; 48])].concat(),
                )
            },
            "its PCR 4 is not the one that the TPM quoted",
        ),
        (
            |draft| draft.set("nitrotpm_pcrs", head(MAP, 0)),
            "SHA-384 PCR 4: expected 0000",
        ),
        (
            |draft| draft.set("cabundle", [head(ARRAY, 9), bytes(&[]).repeat(9)].concat()),
            "it has more than 8 certificates",
        ),
        (
            |draft| draft.protected = vec![0xa1, 1, 0x26],
            "algorithm is not ES384",
        ),
        (|draft| drop(draft.fields.remove(4)), "no field certificate"),
    ];
    let (cloud, host, authority) = (CloudTpm::start(), host(), Authority::new());
    let judge = validator(&VARIANT, &demands(&authority, "0"));
    let refusal = |hypervisor: Hypervisor| {
        let document = issuer(&cloud, &host, Some(hypervisor))
            .issue(USER_DATA, NONCE)
            .unwrap();
        refused(&judge, &document)
    };
    for (alter, why) in cases {
        let error = refusal(Hypervisor::new(&authority, &good(), alter));
        assert!(error.contains(why), "{error}, expected {why}");
    }
    let with = |alter: fn(&mut CertificateParams)| {
        let mut params = good();
        alter(&mut params);
        Hypervisor::new(&authority, &params, |_| ())
    };
    let times = WRONG_TIMES.map(|(alter, why)| (with(alter), why));
    let others = [
        (
            with(|params| {
                params.extended_key_usages =
                    of_attestation_key("", Some(&[1, 3, 6, 1, 5, 5, 7, 3, 3])).extended_key_usages
            }),
            "extended key usage",
        ),
        (
            Hypervisor::new(&Authority::new(), &good(), |_| ()),
            "a signature is wrong",
        ),
    ];
    for (hypervisor, why) in times.into_iter().chain(others) {
        let error = refusal(hypervisor);
        assert!(error.contains(why), "{error}, expected {why}");
    }
}

#[test]
fn tricks_with_cbor_are_refused_without_a_panic() {
    let hypervisor = Hypervisor::new(&Authority::new(), &good(), |_| ());
    let draft = hypervisor.draft(&[1; 32], &[2; 32]);
    let good = draft.signed(&draft.payload(), &hypervisor.key);
    assert_eq!(NitroDocument::parse(&good).unwrap().pcrs.len(), 16);
    let with = |alter: fn(&mut Draft)| {
        let mut draft = draft.clone();
        alter(&mut draft);
        draft.signed(&draft.payload(), &hypervisor.key)
    };
    let payload = |payload: Vec<u8>| draft.signed(&payload, &hypervisor.key);
    let indefinite = |start: u8, rest: &[u8]| [&[start], rest, &[0xff]].concat();
    let nested = vec![0x81; MAX_DOCUMENT];
    for (bad, why) in [
        (vec![], "cannot be read"),
        (vec![0; MAX_DOCUMENT + 1], "at most"),
        ([&[0xd2], &good[..]].concat(), "cannot be read"),
        ([&good[..], &[0]].concat(), "bytes follow it"),
        (
            indefinite(0x9f, &[&good[1..], &[0]].concat()),
            "bytes follow it",
        ),
        ([&[0x9f], &good[1..]].concat(), "cannot be read"),
        (nested, "not a COSE_Sign1"),
        (good[..good.len() - 1].to_vec(), "cannot be read"),
        (
            payload([draft.payload(), vec![0]].concat()),
            "bytes follow its fields",
        ),
        (
            payload([&[0xbf], &draft.payload()[1..]].concat()),
            "cannot be read",
        ),
        (payload(indefinite(0xbf, &text("nonce"))), "cannot be read"),
        (
            payload([&[0xa1], &text("nonce")[..], &[0x81; 1000]].concat()),
            "cannot be read",
        ),
        (
            payload(vec![0xbb, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
            "cannot be read",
        ),
        (
            with(|draft| draft.fields.push(("nonce", bytes(&[3; 32])))),
            "nonce occurs twice",
        ),
        (
            with(|draft| draft.fields.push(("pcrs", head(MAP, 0)))),
            "unknown field \"pcrs\"",
        ),
        (
            with(|draft| {
                let pcr = [head(0, 4), bytes(&[0; 48])].concat();
                draft.set("nitrotpm_pcrs", [head(MAP, 2), pcr.clone(), pcr].concat());
            }),
            "PCR 4 occurs twice",
        ),
        (
            with(|draft| {
                draft.set(
                    "nitrotpm_pcrs",
                    [head(MAP, 1), head(0, 32), bytes(&[0; 48])].concat(),
                )
            }),
            "PCR 32 does not exist",
        ),
        (
            with(|draft| {
                draft.set(
                    "nitrotpm_pcrs",
                    [head(MAP, 1), head(0, 4), bytes(&[0; 32])].concat(),
                )
            }),
            "does not have 48 bytes",
        ),
        (
            with(|draft| draft.set("module_id", text("i-1 -tpm"))),
            "not a name",
        ),
        (
            with(|draft| draft.set("nonce", vec![0x5f, 0x41, 1, 0x61, 1, 0xff])),
            "cannot be read",
        ),
        (
            with(|draft| draft.set("nonce", vec![0x5f, 0x5f, 0x41, 1, 0xff, 0xff])),
            "cannot be read",
        ),
        (
            with(|draft| {
                let many = [&[0x9f][..], &[0x40; 9], &[0xff]].concat();
                draft.set("cabundle", many)
            }),
            "more than 8 certificates",
        ),
        (
            with(|draft| draft.protected = vec![0xa1, 1, 0x38, 0x23]),
            "not ES384",
        ),
        (
            with(|draft| draft.protected = vec![0xa2, 1, 0x38, 0x22, 4, 0]),
            "not ES384",
        ),
    ] {
        let error = NitroDocument::parse(&bad).unwrap_err();
        assert!(
            error.kind == Kind::Malformed && error.text.contains(why),
            "{error}, expected {why}"
        );
    }
    for altered in mutations(&good, 20_000) {
        let _ = NitroDocument::parse(&altered);
    }
}

/// Returns a value with a break in the place of its definite length. `content` is the number in its head.
fn broken(kind: u8, content: &[u8]) -> Vec<u8> {
    [&[kind << 5 | 31], content, &[0xff]].concat()
}

/// Returns a string in two chunks.
fn in_chunks(kind: u8, content: &[u8]) -> Vec<u8> {
    let (one, two) = content.split_at(content.len() / 2);
    let chunks = [one, two].map(|chunk| [head(kind, chunk.len()), chunk.into()].concat());
    broken(kind, &chunks.concat())
}

/// Each map, array and string of a document may have a definite length, or end with a break (RFC 8949 §3.2).
#[test]
fn a_document_of_indefinite_lengths_says_the_same() {
    let authority = Authority::new();
    let hypervisor = Hypervisor::new(&authority, &good(), |_| ());
    let draft = hypervisor.draft(&[1; 32], &[2; 32]);
    let definite = NitroDocument::parse(&draft.signed(&draft.payload(), &hypervisor.key)).unwrap();

    let mut other = draft.clone();
    let pcrs: Vec<_> = (0..16)
        .map(|index| [head(0, index), in_chunks(BYTES, &[0; 48])].concat())
        .collect();
    other.set("nitrotpm_pcrs", broken(MAP, &pcrs.concat()));
    other.set(
        "cabundle",
        broken(ARRAY, &in_chunks(BYTES, &hypervisor.root)),
    );
    other.set("certificate", in_chunks(BYTES, &hypervisor.certificate));
    other.set("digest", in_chunks(TEXT, b"SHA384"));
    other.set("module_id", in_chunks(TEXT, definite.module.as_bytes()));
    other.set("public_key", in_chunks(BYTES, &[2; 32]));
    other.set("nonce", in_chunks(BYTES, &[1; 32]));
    let fields = other.fields.iter();
    let fields: Vec<_> = fields
        .map(|(name, value)| [in_chunks(TEXT, name.as_bytes()), value.clone()].concat())
        .collect();
    let payload = broken(MAP, &fields.concat());
    let signed = other.signed(&payload, &hypervisor.key);
    let signature = &signed[signed.len() - 96..];
    let parts = [
        in_chunks(BYTES, &other.protected),
        broken(MAP, &[]),
        in_chunks(BYTES, &payload),
        in_chunks(BYTES, signature),
    ];
    let document = NitroDocument::parse(&broken(ARRAY, &parts.concat())).unwrap();

    assert_eq!(
        (&document.module, document.timestamp, &document.pcrs),
        (&definite.module, definite.timestamp, &definite.pcrs)
    );
    assert_eq!(
        (&document.nonce, &document.public_key, &document.user_data),
        (&definite.nonce, &definite.public_key, &definite.user_data)
    );
    let roots = CloudRequirements {
        roots: vec![authority.root_pem().to_owned()],
        ..CloudRequirements::default()
    };
    let roots = AkRoot::demanded(&roots, &[]).unwrap();
    for document in [document, definite] {
        document.verify(&roots, UnixTime::now()).unwrap();
    }
}

/// A document of a machine of AWS of 2026-02-02, in which payload and PCRs are maps of indefinite and definite length. It is part of the
/// project vaportpm (github.com/lockboot/vaportpm, MIT or Apache-2.0), which is no package.
#[test]
fn a_genuine_document_of_a_nitro_tpm_is_accepted_and_no_altered_one() {
    let bytes = include_bytes!("../data/nitro-tpm-document");
    assert_eq!(bytes[10], 0xbf, "the payload is a map of indefinite length");
    let roots = AkRoot::demanded(&CloudRequirements::default(), ROOTS).unwrap();
    let at = |seconds| UnixTime::since_unix_epoch(Duration::from_secs(seconds));
    let document = NitroDocument::parse(bytes).unwrap();
    let made = document.timestamp / 1000;
    assert_eq!(document.verify(&roots, at(made)), Ok("aws-nitro"));
    assert_eq!(document.module, "i-0082f89b039c97a0f-tpm0000000000000000");
    assert_eq!(document.pcrs.len(), 24);
    assert_eq!(document.pcrs[&17], [0xff; 48]);
    assert_eq!(
        document.nonce.as_ref().unwrap()[..4],
        [0x8e, 0xc2, 0x65, 0xe6]
    );
    let error = document.verify(&roots, at(made + 4 * 3600)).unwrap_err();
    assert!(
        error.kind == Kind::Expired && error.text.contains("has expired"),
        "{error}"
    );

    let mut random = Random::new(33);
    for _ in 0..600 {
        let mut altered = bytes.to_vec();
        let bit = random.below(8 * bytes.len());
        altered[bit / 8] ^= 1 << (bit % 8);
        let parsed = NitroDocument::parse(&altered);
        let verified = parsed.and_then(|one| one.verify(&roots, at(made)).map(drop));
        assert!(verified.is_err(), "bit {bit}");
    }
    for altered in mutations(bytes, 5_000) {
        let _ = NitroDocument::parse(&altered);
    }
}

/// The crate nitro_attest has a document of an enclave, in which all lengths are definite.
#[test]
fn a_genuine_document_of_an_enclave_is_refused_by_its_field() {
    let path = rust_crate("nitro_peer", "nitro_attest").join("tests/fixtures/attestation.cose");
    let bytes = std::fs::read(path).unwrap();
    let error = NitroDocument::parse(&bytes).unwrap_err();
    assert!(error.text.contains("unknown field \"pcrs\""), "{error}");
}
