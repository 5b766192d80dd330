//! AWS KMS: moto serves it, and checks signatures and permitted actions. The instance metadata service, and what moto cannot do
//! (throttling), are servers of this file.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use common::cloud_server::{self as server, Answer, Request};
use serde_json::{Value, json};
use support::ROOT;
use tempfile::TempDir;

use super::{
    Peer, check_same_keys, firstlight, key, key_service, replace_wrapped_key, text, unwrap,
    workspace, wrap,
};

/// A policy that any node meets.
const POLICY: &str = r#"{"exceptions":["any-image"],"measurements":{"11":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false}}}"#;

/// moto with keys in it.
pub struct Moto(pub Peer);

impl Moto {
    /// Starts one with a bucket that the caller changes.
    pub fn start() -> Moto {
        Moto(Peer::python("aws_kms.py"))
    }

    /// Returns the server that all tests share.
    fn get() -> &'static Moto {
        static MOTO: LazyLock<Moto> = LazyLock::new(Moto::start);
        &MOTO
    }

    /// Returns the URI of a key.
    pub fn uri(&self, key: &str) -> String {
        let (url, folder) = (text(&self.0.found["url"]), self.0.folder.path().display());
        format!("kms://aws-kms?keyName={key}&endpoint={url}&caFile={folder}/ca.pem")
    }

    /// Returns the environment of a program with these credentials.
    pub fn env(&self, role: &str) -> [(&str, &str); 3] {
        let given = &self.0.found["credentials"][role];
        [
            ("AWS_ACCESS_KEY_ID", text(&given["AccessKeyId"])),
            ("AWS_SECRET_ACCESS_KEY", text(&given["SecretAccessKey"])),
            ("AWS_SESSION_TOKEN", text(&given["Token"])),
        ]
    }
}

/// Starts the metadata service of an instance with this role, version 2 only ("Use the Instance Metadata Service to access instance
/// metadata" in the EC2 User Guide).
pub fn imds(role: &'static str, credentials: Value) -> String {
    const ROLES: &str = "/latest/meta-data/iam/security-credentials/";
    server::start(move |request| match (&*request.method, &*request.path) {
        ("PUT", "/latest/api/token") => {
            let ttl = request.field("x-aws-ec2-metadata-token-ttl-seconds");
            assert!(ttl.unwrap().parse::<u32>().unwrap() <= 21_600);
            Answer::text(200, "token==")
        }
        ("GET", _) if request.field("x-aws-ec2-metadata-token") != Some("token==") => {
            Answer::text(401, "")
        }
        ("GET", ROLES) if credentials.is_object() => Answer::text(200, role),
        ("GET", path) if path.strip_prefix(ROLES) == Some(role) => {
            Answer::text(200, credentials.to_string())
        }
        _ => Answer::text(404, ""),
    })
}

#[test]
fn a_key_in_moto_gives_the_same_keys_with_the_permissions_of_the_docs() {
    let (moto, dir) = (Moto::get(), workspace());
    let arn = text(&moto.0.found["keys"][0]);
    wrap(dir.path(), &moto.env("operator"), &moto.uri(arn), &[]).unwrap();
    let wrapped = fs::read_to_string(dir.path().join("wrapped.json")).unwrap();
    assert!(wrapped.contains(arn) && !wrapped.contains("AQEBAQEB"));
    unwrap(dir.path(), &moto.env("operator")).unwrap();
    // the key service has the role of its instance, and no variable
    let imds = imds(
        "key-service",
        moto.0.found["credentials"]["key-service"].clone(),
    );
    let env = [("AWS_EC2_METADATA_SERVICE_ENDPOINT", &*imds)];
    check_same_keys(dir.path(), &env);

    let dir = workspace();
    let alias = moto.uri("alias/firstlight&region=eu-central-1");
    wrap(dir.path(), &moto.env("operator"), &alias, &[]).unwrap();
    check_same_keys(dir.path(), &env);
}

#[test]
fn a_missing_key_is_made_with_its_alias_and_the_permissions_of_the_docs() {
    let (moto, dir) = (Moto::get(), workspace());
    let uri = moto.uri("alias/team/made&region=eu-central-1");
    let creator = moto.env("creator");
    let said = wrap(dir.path(), &creator, &uri, &[]).unwrap_err();
    assert!(said.contains("--create-key makes a missing key"), "{said}");
    wrap(dir.path(), &creator, &uri, &["--create-key"]).unwrap();
    unwrap(dir.path(), &moto.env("operator")).unwrap();
    // the key is there now, and is used
    let (first, dir) = (dir, workspace());
    wrap(dir.path(), &moto.env("operator"), &uri, &["--create-key"]).unwrap();
    check_same_keys(first.path(), &moto.env("key-service"));
    // the ARN of an alias
    let dir = workspace();
    let arn = "arn:aws:kms:eu-central-1:123456789012:alias/by-arn";
    wrap(dir.path(), &creator, &moto.uri(arn), &["--create-key"]).unwrap();
    check_same_keys(dir.path(), &moto.env("key-service"));
}

#[test]
fn each_refusal_names_what_is_missing() {
    let (moto, dir) = (Moto::get(), workspace());
    let operator = moto.env("operator");
    let arn = text(&moto.0.found["keys"][0]);
    let refused = |env: &[(&str, &str)], key: &str, more: &[&str], expected: &str| {
        let said = wrap(dir.path(), env, &moto.uri(key), more).unwrap_err();
        assert!(said.contains(expected), "{expected}: {said}");
    };
    let missing = arn.replace(":key/", ":key/0");
    refused(
        &operator,
        &missing,
        &[],
        "is it the right region and account?",
    );
    refused(
        &operator,
        &missing,
        &["--create-key"],
        "--create-key needs an alias",
    );
    refused(
        &operator,
        "alias/new&region=eu-central-1",
        &["--create-key"],
        "AWS_ACCESS_KEY_ID needs the permission kms:CreateKey to make the key",
    );
    refused(
        &operator,
        text(&moto.0.found["signing"]),
        &[],
        "does not encrypt",
    );
    refused(&operator, text(&moto.0.found["disabled"]), &[], "enable it");
    refused(&operator, "alias/firstlight", &[], "has no region");
    let service = moto.env("key-service");
    let needed = format!("AWS_ACCESS_KEY_ID needs the permission kms:DescribeKey on {arn}");
    refused(&service, arn, &[], &needed);
    let mut forged = operator;
    forged[1].1 = "another";
    refused(
        &forged,
        arn,
        &[],
        "the secret key of AWS_ACCESS_KEY_ID is wrong",
    );
    forged[0].1 = "ASIAUNKNOWN";
    refused(
        &forged,
        arn,
        &[],
        "the credentials of AWS_ACCESS_KEY_ID are wrong",
    );
    refused(
        &operator[..1],
        arn,
        &[],
        "only one of AWS_ACCESS_KEY_ID and",
    );
    let untrusted = format!(
        "kms://aws-kms?keyName={arn}&endpoint={}",
        text(&moto.0.found["url"])
    );
    let said = wrap(dir.path(), &operator, &untrusted, &[]).unwrap_err();
    assert!(said.contains("certificate"), "{said}");

    wrap(dir.path(), &operator, &moto.uri(arn), &[]).unwrap();
    replace_wrapped_key(dir.path(), text(&moto.0.found["ofOtherContext"]));
    let said = unwrap(dir.path(), &operator).unwrap_err();
    assert!(said.contains("this key did not wrap this file"), "{said}");
    replace_wrapped_key(dir.path(), text(&moto.0.found["ofOtherKey"]));
    let said = unwrap(dir.path(), &operator).unwrap_err();
    assert!(
        said.contains("this key must have wrapped the file"),
        "{said}"
    );
}

#[test]
fn init_writes_a_new_master_secret_only_as_the_key_wraps_it() {
    let (moto, dir) = (Moto::get(), workspace());
    let file = |name: &str, content: &str| {
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    };
    file("init-secret", "secret");
    file("policy.json", POLICY);
    let uri = moto.uri(text(&moto.0.found["keys"][0]));
    let init = |env: &[(&str, &str)], more: &[&str]| {
        // no server listens there: the command writes the master secret before it sends the first packet
        let args = [
            "init",
            "--endpoint",
            "127.0.0.1:1",
            "--policy",
            "policy.json",
            "--init-secret",
            "init-secret",
            "--require=any",
            "--trust-any-tpm",
            "--timeout",
            "1s",
            "--master-secret",
            "new.json",
            "--kms",
            &uri,
        ];
        let output = firstlight(dir.path(), env, &[&args, more].concat());
        assert!(!output.status.success());
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
    };
    let new = dir.path().join("new.json");
    let said = init(&moto.env("key-service"), &[]);
    assert!(said.contains("kms:DescribeKey") && !new.exists(), "{said}");
    let said = init(&moto.env("key-service"), &["--dry-run"]);
    assert!(said.contains("kms:DescribeKey") && !new.exists(), "{said}");
    let said = init(&moto.env("operator"), &[]);
    assert!(
        said.contains("A new master secret is in new.json"),
        "{said}"
    );
    let wrapped = fs::read_to_string(&new).unwrap();
    assert!(
        wrapped.contains("wrappedKey") && wrapped.contains("aws-kms"),
        "{wrapped}"
    );
    let said = init(&moto.env("operator"), &[]);
    assert!(
        said.contains("Using the master secret in new.json"),
        "{said}"
    );
    assert_eq!(fs::read_to_string(&new).unwrap(), wrapped);
    fs::rename(&new, dir.path().join("wrapped.json")).unwrap();
    unwrap(dir.path(), &moto.env("operator")).unwrap();
}

#[test]
fn an_instance_without_a_role_is_told_so() {
    let (moto, dir) = (Moto::get(), workspace());
    let env = [(
        "AWS_EC2_METADATA_SERVICE_ENDPOINT",
        &*imds("none", Value::Null),
    )];
    let uri = moto.uri(text(&moto.0.found["keys"][0]));
    let said = wrap(dir.path(), &env, &uri, &[]).unwrap_err();
    assert!(
        said.contains("there are no credentials: AWS_ACCESS_KEY_ID") && said.contains("no role"),
        "{said}"
    );
}

/// A service that is busy for the first requests, and whose key is a mask.
#[derive(Default)]
struct Busy {
    left: AtomicUsize,
    requests: Mutex<Vec<Request>>,
}

impl Busy {
    /// Returns it with the URI of its key.
    fn start(dir: &TempDir) -> (Arc<Busy>, String) {
        let busy = Arc::new(Busy::default());
        let serving = busy.clone();
        let (url, certificate) = server::start_tls(move |request| serving.answer(request));
        let ca = dir.path().join("busy.pem");
        fs::write(&ca, certificate).unwrap();
        let name = "arn:aws:kms:eu-central-1:111122223333:key/a";
        let uri = format!(
            "kms://aws-kms?keyName={name}&endpoint={url}&caFile={}",
            ca.display()
        );
        (busy, uri)
    }

    fn answer(&self, request: &Request) -> Answer {
        self.requests.lock().unwrap().push(request.clone());
        let take = |left: usize| left.checked_sub(1);
        let left = self
            .left
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, take);
        if let Ok(left) = left {
            return match left % 2 {
                0 => Answer::json(
                    400,
                    json!({"__type": "ThrottlingException", "message": "Rate exceeded"}),
                ),
                _ => Answer::text(503, "<html>"),
            };
        }
        let body: Value = serde_json::from_str(&request.body).unwrap();
        match request.field("x-amz-target").unwrap() {
            "TrentService.DescribeKey" => Answer::json(
                200,
                json!({"KeyMetadata": {"KeyState": "Enabled", "KeyUsage": "ENCRYPT_DECRYPT", "KeySpec": "SYMMETRIC_DEFAULT"}}),
            ),
            "TrentService.Encrypt" => {
                Answer::json(200, json!({"CiphertextBlob": body["Plaintext"]}))
            }
            "TrentService.Decrypt" => {
                Answer::json(200, json!({"Plaintext": body["CiphertextBlob"]}))
            }
            other => panic!("{other}"),
        }
    }
}

const OWN: [(&str, &str); 2] = [
    ("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE"),
    ("AWS_SECRET_ACCESS_KEY", "secret"),
];

#[test]
fn a_service_that_throttles_is_asked_again_for_some_seconds() {
    let dir = workspace();
    let (busy, uri) = Busy::start(&dir);
    busy.left.store(3, Ordering::SeqCst);
    wrap(dir.path(), &OWN, &uri, &[]).unwrap();
    let requests = std::mem::take(&mut *busy.requests.lock().unwrap());
    // three requests were refused, and four were answered: the file is read again
    assert_eq!(requests.len(), 7);
    for request in requests {
        let signed = request.field("authorization").unwrap();
        assert!(
            signed.starts_with("AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/")
                && signed.contains("/eu-central-1/kms/aws4_request")
                && signed.contains("host;x-amz-date;x-amz-target"),
            "{signed}"
        );
        // the policies in the docs require the fields that each request has
        let body: Value = serde_json::from_str(&request.body).unwrap();
        let context = &body["EncryptionContext"];
        let target = request.field("x-amz-target").unwrap();
        let action = format!("kms:{}", target.strip_prefix("TrentService.").unwrap());
        for role in ["operator", "key-service"] {
            let policy = fs::read(format!("{ROOT}/docs/clouds/aws-kms-{role}.json")).unwrap();
            let policy: Value = serde_json::from_slice(&policy).unwrap();
            let statements = policy["Statement"].as_array().unwrap().iter();
            for statement in statements.filter(|one| one["Action"].to_string().contains(&action)) {
                if let Some(wanted) = statement["Condition"]["StringEquals"].as_object() {
                    let wanted = &wanted["kms:EncryptionContext:purpose"];
                    assert_eq!(&context["purpose"], wanted);
                    assert_eq!(context.as_object().unwrap().len(), 1);
                }
            }
        }
    }

    busy.left.store(usize::MAX, Ordering::SeqCst);
    let said = unwrap(dir.path(), &OWN).unwrap_err();
    assert!(said.contains("tried for 10 s"), "{said}");
}

#[test]
fn the_key_service_waits_for_a_service_that_is_away() {
    let dir = workspace();
    let (busy, uri) = Busy::start(&dir);
    wrap(dir.path(), &OWN, &uri, &[]).unwrap();
    busy.left.store(usize::MAX, Ordering::SeqCst);
    let secret = ["--master-secret", "wrapped.json"];
    let waiting = key_service(dir.path(), &OWN, &secret);
    let no_imds = [("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:1")];
    let without = key_service(dir.path(), &no_imds, &secret);
    without.expect("there are no credentials");
    without.expect("trying again in");
    waiting.expect("trying again in");
    busy.left.store(0, Ordering::SeqCst);
    assert_eq!(key(&waiting).len(), 32);

    let url = uri
        .split(['=', '&'])
        .find(|part| part.starts_with("https:"));
    let away = uri.replace(url.unwrap(), "https://127.0.0.1:1");
    let said = wrap(dir.path(), &OWN, &away, &[]).unwrap_err();
    assert!(
        said.contains("127.0.0.1:1") && said.contains("refused"),
        "{said}"
    );
}
