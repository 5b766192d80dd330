//! Stores of the wrapped master secret: S3 as moto serves it, Azure Blob Storage as Azurite does, and Cloud Storage as
//! fake-gcs-server does. The KMS of the same cloud wraps. Servers of these tests check the permissions.

use std::fs;
use std::path::Path;
use std::sync::Mutex;

use tempfile::TempDir;

use super::aws_kms::{Moto, imds};
use super::azure_kms::Vault;
use super::gcp_kms::{CREDENTIALS, Service};
use super::{Env, check_same_keys_of, firstlight, text, workspace};

/// A store, and its users.
struct Store<'a> {
    /// The URI of the key that wraps.
    kms: String,
    /// Returns the URI of a file in the store.
    place: &'a dyn Fn(&str) -> String,
    operator: Env<'a>,
    key_service: Env<'a>,
    /// The URI of a key in another cloud, and who may wrap with it.
    other: (String, Env<'a>),
    /// Replaces a file, as a user with all permissions.
    replace: &'a dyn Fn(&str),
    /// Parts of the errors that name the permission to write, a missing file and a missing bucket.
    errors: [&'a str; 3],
}

/// Runs `firstlight wrap` and returns the URI that it prints.
fn wrap(dir: &Path, env: Env<'_>, kms: &str, out: &str) -> Result<String, String> {
    let args = [
        "wrap",
        "--kms",
        kms,
        "--master-secret",
        "plain.json",
        "--out",
        out,
    ];
    let output = firstlight(dir, env, &args);
    let [said, error] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    if output.status.success() {
        Ok(said.split_whitespace().next().unwrap().to_owned())
    } else {
        Err(error)
    }
}

/// Runs `firstlight unwrap` and returns the plain master secret.
fn unwrap(dir: &Path, env: Env<'_>, uri: &str) -> Result<String, String> {
    let back = dir.join("back.json");
    let _ = fs::remove_file(&back);
    let args = ["unwrap", "--master-secret", uri, "--out", "back.json"];
    let output = firstlight(dir, env, &args);
    if output.status.success() {
        Ok(fs::read_to_string(back).unwrap())
    } else {
        Err(String::from_utf8(output.stderr).unwrap())
    }
}

/// Makes the checks that are the same for all stores.
fn check(store: &Store<'_>) {
    let dir: TempDir = workspace();
    let (dir, place) = (dir.path(), (store.place)("cluster/firstlight.json"));
    let [no_permission, no_file, no_bucket] = store.errors;
    let refused = |got: Result<String, String>, expected: &str| {
        let said = got.unwrap_err();
        assert!(said.contains(expected), "{expected}: {said}");
    };
    let missing = format!("{place}&sha256={}", "0".repeat(64));
    refused(unwrap(dir, store.operator, &missing), no_file);
    let elsewhere = place.replace("=own&", "=missing&");
    refused(wrap(dir, store.operator, &store.kms, &elsewhere), no_bucket);
    // the role of the key service may not write
    let (other, operator) = &store.other;
    let mixed = [*operator, store.key_service].concat();
    refused(wrap(dir, &mixed, other, &place), no_permission);

    let uri = wrap(dir, store.operator, &store.kms, &place).unwrap();
    assert!(uri.starts_with(&format!("{place}&sha256=")), "{uri}");
    let plain = unwrap(dir, store.operator, &uri).unwrap();
    assert!(plain.contains("AQEBAQEB"), "{plain}");
    // the key service has a file with the URI, as in its Secret
    fs::write(dir.join("uri"), format!("{uri}\n")).unwrap();
    check_same_keys_of(dir, store.key_service, "uri");

    refused(
        wrap(dir, store.operator, &store.kms, &place),
        "a file with this name exists",
    );
    refused(
        wrap(dir, store.operator, &store.kms, &uri),
        "is only for an existing file",
    );
    assert_eq!(unwrap(dir, store.operator, &uri).unwrap(), plain);
    refused(
        unwrap(dir, store.operator, &place),
        "the parameter sha256 is missing",
    );
    let args = [
        "unwrap",
        "--master-secret",
        &uri,
        "--out",
        &(store.place)("plain.json"),
    ];
    let output = firstlight(dir, store.operator, &args);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("only a wrapped master secret may be written to a store"),
        "{said}"
    );

    (store.replace)("cluster/firstlight.json");
    refused(unwrap(dir, store.operator, &uri), "it was replaced");
}

#[test]
fn a_bucket_of_s3_keeps_what_was_written_first() {
    let (moto, google) = (Moto::start(), Service::start());
    let peer = Mutex::new(moto);
    let moto = peer.lock().unwrap();
    let found = moto.0.found.clone();
    let (url, folder) = (
        text(&found["url"]).to_owned(),
        moto.0.folder.path().to_owned(),
    );
    let kms = moto.uri(text(&found["keys"][0]));
    let account = google.account("operator");
    let key_service = imds("key-service", found["credentials"]["key-service"].clone());
    let given = &found["credentials"]["operator"];
    let operator = [
        ("AWS_ACCESS_KEY_ID", text(&given["AccessKeyId"])),
        ("AWS_SECRET_ACCESS_KEY", text(&given["SecretAccessKey"])),
        ("AWS_SESSION_TOKEN", text(&given["Token"])),
    ];
    drop(moto);
    check(&Store {
        kms,
        place: &|name| {
            format!(
                "storage://aws?bucket=own&region=eu-central-1&key={name}&endpoint={url}&caFile={}/ca.pem",
                folder.display()
            )
        },
        operator: &operator,
        key_service: &[("AWS_EC2_METADATA_SERVICE_ENDPOINT", &*key_service)],
        other: (google.uri("firstlight"), &[(CREDENTIALS, &*account)]),
        replace: &|name| assert_eq!(peer.lock().unwrap().0.ask(name), "replaced"),
        errors: [
            "the instance's role needs the permission s3:PutObject on arn:aws:s3:::own/cluster/firstlight.json",
            "there is no such file",
            "make the bucket",
        ],
    });
}

#[test]
fn a_container_of_azure_keeps_what_was_written_first() {
    let (vault, moto) = (Vault::with_storage(), Moto::start());
    let found = vault.0.found.clone();
    let (url, folder) = (
        text(&found["url"]).to_owned(),
        vault.0.folder.path().to_owned(),
    );
    let kms = vault.uri("firstlight");
    let callers = &found["callers"];
    let operator = [
        ("AZURE_AUTHORITY_HOST", &*url),
        ("AZURE_TENANT_ID", text(&found["tenant"])),
        ("AZURE_CLIENT_ID", text(&callers["operator"]["clientId"])),
        ("AZURE_CLIENT_SECRET", text(&callers["operator"]["secret"])),
    ];
    let key_service = [
        ("AZURE_POD_IDENTITY_AUTHORITY_HOST", text(&found["imds"])),
        ("AZURE_CLIENT_ID", text(&callers["key-service"]["clientId"])),
    ];
    let peer = Mutex::new(vault);
    check(&Store {
        kms,
        place: &|name| {
            format!(
                "storage://azure?account=devstoreaccount1&container=own&name={name}&endpoint={url}&caFile={}/ca.pem",
                folder.display()
            )
        },
        operator: &operator,
        key_service: &key_service,
        other: (
            moto.uri(text(&moto.0.found["keys"][0])),
            &moto.env("operator"),
        ),
        replace: &|name| {
            assert_eq!(
                peer.lock().unwrap().0.ask(&format!("replace {name}")),
                "201"
            )
        },
        errors: [
            "the managed identity needs the data action Microsoft.Storage/storageAccounts/blobServices/containers/blobs/add/action",
            "there is no such file",
            "make the container",
        ],
    });
}

#[test]
fn a_bucket_of_google_keeps_what_was_written_first() {
    let (google, moto) = (Service::with_storage(), Moto::start());
    let account = google.account("operator");
    check(&Store {
        kms: google.uri("firstlight"),
        place: &|name| {
            let (url, folder) = (&google.url, google.folder.display());
            format!("storage://gcp?bucket=own&name={name}&endpoint={url}&caFile={folder}/ca.pem")
        },
        operator: &[(CREDENTIALS, &*account)],
        key_service: &[("GCE_METADATA_HOST", &*google.metadata)],
        other: (
            moto.uri(text(&moto.0.found["keys"][0])),
            &moto.env("operator"),
        ),
        replace: &|name| assert_eq!(google.peer.lock().unwrap().ask(name), "200"),
        errors: [
            "the instance's service account needs the permission storage.objects.create",
            "no such file",
            "there is no such bucket",
        ],
    });
}
