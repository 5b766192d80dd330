//! Tests of the services' manifests with a real kube-apiserver and a real etcd (`make kubernetes-api`).

use common::kube_apiserver;
use common::manifests;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use base::crypto::Secret;
use base::master_secret::MasterSecret;
use base::stop::Stop;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use kube_apiserver::{Cluster, play_controller};
use kubernetes::client::{
    CLUSTER_ROLE_BINDINGS, CLUSTER_ROLES, CONFIG_MAPS, Client, DAEMON_SETS, DEPLOYMENTS,
    NAMESPACES, NODES, Object, Resource, SECRETS, SERVICES, Selector,
};
use kubernetes::services::kubeadm_bindings;
use kubernetes::services::{
    self, Applied, Error, InstallProgress, MetadataService, Options, ServiceSettings, master_secret,
};
use kubernetes::wrapping_key;
use serde_json::{Value, json};

const POLICY: &str = r#"{"measurements":{"4":{"expected":"1111111111111111111111111111111111111111111111111111111111111111"},"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000"}}}"#;

/// Locked by each test, because all of them use the same objects.
static ALONE: Mutex<()> = Mutex::new(());

fn settings(image: &str) -> ServiceSettings {
    ServiceSettings {
        image: image.into(),
        measurement_salt: vec![1; 32],
        kms: MasterSecret::new(Secret::new(vec![2; 32]), Secret::new(vec![3; 32])).unwrap(),
        ..manifests::settings(POLICY)
    }
}

fn set(name: &str) -> Object {
    DAEMON_SETS.in_namespace("kube-system").named(name)
}

fn image_of(client: &Client, name: &str) -> String {
    let image = "/spec/template/spec/containers/0/image";
    client
        .get(&set(name))
        .unwrap()
        .pointer(image)
        .unwrap()
        .as_str()
        .unwrap()
        .to_owned()
}

fn all(settings: &ServiceSettings) -> Vec<Object> {
    services::manifests(settings)
        .unwrap()
        .iter()
        .map(|object| Object::of(object).unwrap())
        .collect()
}

/// Returns the name of the Secret that the key service mounts.
fn secret_of(client: &Client) -> String {
    master_secret::present(client).unwrap().unwrap().secret
}

/// Returns the names of the Secrets with a master secret.
fn with_master_secret(client: &Client) -> Vec<String> {
    let secrets = SECRETS.in_namespace("kube-system");
    let all = client.list(&secrets, &Selector::default()).unwrap().items;
    let names = all
        .iter()
        .map(|it| it["metadata"]["name"].as_str().unwrap());
    let names = names.filter(|name| name.contains("mastersecret"));
    names.map(str::to_owned).collect()
}

/// Waits for the other tests. Returns the cluster without the services.
fn alone() -> (MutexGuard<'static, ()>, Client) {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    (alone, empty())
}

/// Returns the cluster without the services.
fn empty() -> Client {
    let client = Cluster::shared().client(&Stop::new());
    for name in with_master_secret(&client) {
        let secret = SECRETS.in_namespace("kube-system").named(&name);
        client.delete_if_there(&secret).unwrap();
    }
    for object in all(&settings("x")) {
        client.delete_if_there(&object).unwrap();
    }
    client
}

fn without_wait(backups: &Path) -> Options<'_> {
    Options {
        skip: &[],
        backups,
        wait: None,
        is_dry_run: false,
        keeps_superseded: false,
        control_planes: &[],
    }
}

fn apply(client: &Client, settings: &ServiceSettings, options: &Options) -> Result<Applied, Error> {
    services::apply(client, settings, options, &mut |_| {})
}

/// Applies the first version without a wait.
fn install(client: &Client, backups: &Path) -> Result<Applied, Error> {
    apply(client, &settings("example.com/a:1"), &without_wait(backups))
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn services_are_brought_in_and_again_without_a_change_and_upgraded() {
    let (_alone, client) = alone();
    let dir = tempfile::tempdir().unwrap();
    let first = install(&client, dir.path()).unwrap();
    assert_eq!(first.changed.len(), 77);
    assert_eq!(first.backup, None);
    // The API has the master secret only in encrypted form.
    let content = master_secret::content(&client).unwrap().unwrap();
    let kms = settings("x").kms;
    assert!(wrapping_key::is_encrypted(&content));
    let opened = master_secret::opened(&content, &kms).unwrap();
    assert_eq!(*opened, kms.key().expose());
    assert_eq!(with_master_secret(&client), [secret_of(&client)]);
    let join = client
        .get(&SERVICES.in_namespace("kube-system").named("join-service"))
        .unwrap();
    assert_eq!(join["spec"]["ports"][0]["nodePort"], 30090);

    let again = install(&client, dir.path()).unwrap();
    assert_eq!(again.changed, Vec::<String>::new());

    let policy = POLICY.replace("1111", "2222");
    let newer = ServiceSettings {
        policy: policy.clone(),
        ..settings("example.com/a:2")
    };
    let upgraded = apply(&client, &newer, &without_wait(dir.path())).unwrap();
    assert_eq!(
        upgraded.changed,
        [
            "configmaps kube-system/join-config",
            "daemonsets.apps kube-system/key-service",
            "daemonsets.apps kube-system/join-service",
            "daemonsets.apps kube-system/member-controller"
        ]
    );
    let config = client
        .get(&CONFIG_MAPS.in_namespace("kube-system").named("join-config"))
        .unwrap();
    assert_eq!(
        config["data"],
        json!({"attestationConfig": policy, "attestationConfig_backup": POLICY})
    );

    // The setting of the metadata service is in the pods of the programs that ask it.
    let metadata = MetadataService {
        url: Some("http://10.9.0.1:81".into()),
        ..MetadataService::default()
    };
    let elsewhere = ServiceSettings {
        metadata: Some(metadata),
        policy: policy.clone(),
        ..settings("example.com/a:2")
    };
    let moved = apply(&client, &elsewhere, &without_wait(dir.path())).unwrap();
    assert_eq!(
        moved.changed,
        [
            "daemonsets.apps kube-system/join-service",
            "daemonsets.apps kube-system/member-controller"
        ]
    );
    let told = client.get(&set("join-service")).unwrap()["spec"]["template"]["spec"]["containers"]
        [0]["command"]
        .to_string();
    assert!(
        told.contains(r#""--cloud-provider","qemu","--metadata","http://10.9.0.1:81""#),
        "{told}"
    );
    let variant = services::present_variant(&client).unwrap();
    assert_eq!(variant.as_deref(), Some("qemu-vtpm"));
    // The values that the next run does not name stay, and the run prints them.
    let mut said = vec![];
    let unnamed = ServiceSettings {
        policy: policy.clone(),
        ..settings("example.com/a:2")
    };
    let same = services::apply(
        &client,
        &unnamed,
        &without_wait(dir.path()),
        &mut |report| {
            said.push(format!("{report:?}"));
        },
    );
    assert_eq!(same.unwrap().changed, Vec::<String>::new());
    let stays = r#"stays as it is: joinService.metadata \"http://10.9.0.1:81\""#;
    assert!(said.iter().any(|line| line.contains(stays)), "{said:?}");

    // The backup contains what was applied before, and no secret.
    let backup = upgraded.backup.unwrap();
    assert_eq!(
        fs::metadata(&backup).unwrap().permissions().mode() & 0o777,
        0o700
    );
    let mut saved: Vec<Value> = fs::read_dir(&backup)
        .unwrap()
        .map(|entry| serde_json::from_slice(&fs::read(entry.unwrap().path()).unwrap()).unwrap())
        .collect();
    let mut expected = services::manifests(&settings("example.com/a:1")).unwrap();
    expected.retain(|object| object["kind"] != "Secret");
    let place = |object: &Value| Object::of(object).unwrap().to_string();
    saved.sort_by_key(place);
    expected.sort_by_key(place);
    assert_eq!(saved, expected);
}

/// Makes the services of an earlier version: their key service reads a Secret that is not encrypted.
fn install_earlier(client: &Client) {
    master_secret::restore_plain(client, &settings("x").kms).unwrap();
    for object in services::manifests(&settings("example.com/a:0")).unwrap() {
        let at = Object::of(&object).unwrap();
        let mut object = object;
        if at == set("key-service") {
            let volumes = object["spec"]["template"]["spec"]["volumes"].as_array_mut();
            for volume in volumes.unwrap() {
                if volume["name"] == "config" {
                    volume["secret"]["secretName"] = PLAIN.into();
                }
            }
        }
        if object["kind"] != "Secret" {
            client.apply(&at, &object).unwrap();
        }
    }
}

const PLAIN: &str = "constellation-mastersecret";

/// Returns whether the key service writes the wrapping key.
fn places_wrapping_key(client: &Client) -> bool {
    let set = client.get(&set("key-service")).unwrap();
    let container = &set["spec"]["template"]["spec"]["containers"][0];
    let mut command = container["command"].as_array().unwrap().iter();
    command.any(|argument| argument == "--place-wrapping-key")
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_master_secret_that_is_not_encrypted_moves_and_serves_at_each_step() {
    let (_alone, client) = alone();
    let dir = tempfile::tempdir().unwrap();
    install_earlier(&client);
    let impatient = Options {
        wait: Some(Duration::from_secs(1)),
        ..without_wait(dir.path())
    };
    let apply = |options: &Options| apply(&client, &settings("example.com/a:1"), options);
    // The pods of the first step do not become ready: the old ones go on with the old Secret.
    apply(&impatient).unwrap_err();
    assert_eq!(secret_of(&client), PLAIN);
    assert!(!places_wrapping_key(&client));
    // Without a wait, the second step has to wait for another run.
    apply(&without_wait(dir.path())).unwrap();
    assert_eq!(with_master_secret(&client), [PLAIN]);
    assert!(places_wrapping_key(&client) && secret_of(&client) == PLAIN);

    let stop = Stop::new();
    thread::scope(|scope| {
        let (client, stop) = (&client, &stop);
        scope.spawn(move || play_controller(client, stop));
        let patient = Options {
            wait: Some(Duration::from_secs(60)),
            ..without_wait(dir.path())
        };
        // A move from Constellation can be undone until its last step.
        let keeps = Options {
            keeps_superseded: true,
            ..patient
        };
        let moved = apply(&keeps);
        let there = with_master_secret(client);
        // The command is interrupted before it deletes the old Secret, and repeated.
        let mut lines = vec![];
        let again = services::apply(
            client,
            &settings("example.com/a:1"),
            &patient,
            &mut |report| {
                if let InstallProgress::Line(line) = report {
                    lines.push(line);
                }
            },
        );
        stop.stop();
        moved.unwrap();
        assert_eq!(there, [PLAIN.to_owned(), secret_of(client)]);
        assert_eq!(
            again.unwrap().changed,
            [format!("secrets kube-system/{PLAIN}")]
        );
        let warned = |line: &String| line.contains("still in plaintext in backups of etcd");
        assert!(lines.iter().any(warned), "{lines:?}");
    });
    assert_eq!(with_master_secret(&client), [secret_of(&client)]);
    assert!(!places_wrapping_key(&client));
    let content = master_secret::content(&client).unwrap().unwrap();
    assert!(wrapping_key::is_encrypted(&content));
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn another_master_secret_is_refused_before_anything_is_changed() {
    let (_alone, client) = alone();
    let dir = tempfile::tempdir().unwrap();
    install(&client, dir.path()).unwrap();
    let kms = MasterSecret::new(Secret::new(vec![9; 32]), Secret::new(vec![3; 32])).unwrap();
    let other = ServiceSettings {
        kms,
        ..settings("example.com/a:2")
    };
    let error = apply(&client, &other, &without_wait(dir.path())).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("this is the master secret of another cluster"),
        "{error}"
    );
    assert_eq!(image_of(&client, "key-service"), "example.com/a:1");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn apply_waits_for_every_control_plane_and_reports_failures() {
    let (_alone, client) = alone();
    let dir = tempfile::tempdir().unwrap();
    let pods = Resource::namespaced("", "v1", "pods").in_namespace("kube-system");
    let accounts = Resource::namespaced("", "v1", "serviceaccounts").in_namespace("kube-system");
    client
        .create_if_absent(&accounts, &json!({"metadata": {"name": "default"}}))
        .unwrap();
    let pod = json!({"metadata": {"name": "join-service-1", "labels": {"k8s-app": "join-service"}},
        "spec": {"nodeName": "n", "containers": [{"name": "a", "image": "a"}]}});
    client.create(&pods, &pod).unwrap();
    let broken = json!({"status": {"containerStatuses": [{
        "name": "a", "image": "a", "imageID": "", "ready": false, "restartCount": 0,
        "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
    }]}});
    client
        .merge(&pods.named("join-service-1").subresource("status"), &broken)
        .unwrap();
    let stop = Stop::new();
    let mut reports = Vec::new();
    thread::scope(|scope| {
        let (client, stop) = (&client, &stop);
        scope.spawn(move || {
            stop.wait(Duration::from_secs(2));
            play_controller(client, stop);
        });
        let options = Options {
            wait: Some(Duration::from_secs(60)),
            ..without_wait(dir.path())
        };
        let settings = settings("example.com/a:1");
        services::apply(client, &settings, &options, &mut |report| {
            reports.push(report);
        })
        .unwrap();
        stop.stop();
    });
    client.delete(&pods.named("join-service-1")).unwrap();
    let expected = [
        InstallProgress::Phase(
            "waiting for key-service: the controller manager has not processed it yet, join-service: the controller manager has \
             not processed it yet, member-controller: the controller manager has not processed it yet"
                .into(),
        ),
        InstallProgress::Line("pod join-service-1 on n: ImagePullBackOff: no such image".into()),
    ];
    for report in &expected {
        assert!(reports.contains(report), "{report:?} of {reports:#?}");
    }
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn kubeadms_bindings_that_approve_kubelets_go_when_the_services_are_ready() {
    let (_alone, client) = alone();
    let dir = tempfile::tempdir().unwrap();
    let bindings = kubeadm_bindings::manifests();
    for binding in &bindings {
        let all = CLUSTER_ROLE_BINDINGS.all();
        client.create_if_absent(&all, binding).unwrap();
    }
    let left = || {
        let is_there = |binding: &&Value| {
            let at = Object::of(binding).unwrap();
            client.find(&at).unwrap().is_some()
        };
        bindings.iter().filter(is_there).count()
    };
    let wanted = settings("example.com/a:1");
    apply(&client, &wanted, &without_wait(dir.path())).unwrap();
    assert_eq!(left(), 2, "nobody knows whether a join service runs");
    let stop = Stop::new();
    let applied = thread::scope(|scope| {
        scope.spawn(|| play_controller(&client, &stop));
        let options = Options {
            wait: Some(Duration::from_secs(60)),
            ..without_wait(dir.path())
        };
        let applied = apply(&client, &wanted, &options);
        stop.stop();
        applied.unwrap()
    });
    assert_eq!(left(), 0);
    let named = applied.changed.iter();
    let named = named.filter(|it| it.contains("kubeadm:node-autoapprove"));
    assert_eq!(named.count(), 2, "{:?}", applied.changed);
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn services_that_do_not_become_ready_are_rolled_back() {
    let (_alone, client) = alone();
    let dir = tempfile::tempdir().unwrap();
    let impatient = Options {
        wait: Some(Duration::from_secs(1)),
        ..without_wait(dir.path())
    };
    let apply = |settings: &ServiceSettings, options: &Options| apply(&client, settings, options);
    // The first installation: no object exists before and after it.
    let error = apply(&settings("example.com/a:1"), &impatient).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("the services are not ready after 1 s: key-service: "),
        "{error}"
    );
    assert!(
        error.to_string().ends_with("; everything was restored"),
        "{error}"
    );
    for object in all(&settings("x")) {
        assert!(client.find(&object).unwrap().is_none(), "{object}");
    }

    // An upgrade.
    apply(&settings("example.com/a:1"), &without_wait(dir.path())).unwrap();
    let newer = ServiceSettings {
        policy: POLICY.replace("1111", "2222"),
        node_port: Some(30091),
        ..settings("example.com/a:2")
    };
    let error = apply(&newer, &impatient).unwrap_err();
    assert!(
        matches!(&error, Error::RolledBack { left, backup: Some(_), .. } if left.is_empty()),
        "{error}"
    );
    // Values and field ownership are restored, so the next run has nothing to do.
    assert_eq!(
        apply(&settings("example.com/a:1"), &without_wait(dir.path()))
            .unwrap()
            .changed,
        Vec::<String>::new()
    );
    let config = client
        .get(&CONFIG_MAPS.in_namespace("kube-system").named("join-config"))
        .unwrap();
    assert_eq!(config["data"], json!({"attestationConfig": POLICY}));
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_refusal_halfway_restores_objects_of_other_tools_too() {
    let (_alone, client) = alone();
    let dir = tempfile::tempdir().unwrap();
    // An object of another tool, with a field that is not ours.
    let maps = CONFIG_MAPS.in_namespace("kube-system");
    let theirs = json!({"metadata": {"name": "join-config", "labels": {"a": "b"}}, "data": {"attestationConfig": "{}", "x": "y"}});
    client.create(&maps, &theirs).unwrap();
    // Accepts a dry run, and refuses the real request.
    let policies = Resource::cluster(
        "admissionregistration.k8s.io",
        "v1",
        "validatingadmissionpolicies",
    );
    let bindings = Resource::cluster(
        "admissionregistration.k8s.io",
        "v1",
        "validatingadmissionpolicybindings",
    );
    let policy = json!({
        "metadata": {"name": "no-join-service"},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [
                {"apiGroups": ["apps"], "apiVersions": ["v1"], "resources": ["daemonsets"], "operations": ["CREATE", "UPDATE"]},
            ]},
            "validations": [{"expression": "request.dryRun || request.name != 'join-service'", "message": "not today"}],
        },
    });
    let binding = json!({
        "metadata": {"name": "no-join-service"}, "spec": {"policyName": "no-join-service", "validationActions": ["Deny"]},
    });
    client.create(&policies.all(), &policy).unwrap();
    client.create(&bindings.all(), &binding).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    // The server enforces the policy only after some time.
    let error = loop {
        match install(&client, dir.path()) {
            Err(error) => break error,
            Ok(_) => {
                assert!(Instant::now() < deadline);
                empty();
                client.create(&maps, &theirs).unwrap();
                thread::sleep(Duration::from_millis(500));
            }
        }
    };
    client.delete(&bindings.named("no-join-service")).unwrap();
    client.delete(&policies.named("no-join-service")).unwrap();
    assert!(error.to_string().contains("not today"), "{error}");
    assert!(
        error
            .to_string()
            .contains("; everything was restored (the previous manifests are in "),
        "{error}"
    );
    for object in all(&settings("x")) {
        assert_eq!(
            client.find(&object).unwrap().is_some(),
            object.name() == "join-config",
            "{object}"
        );
    }
    let restored = client.get(&maps.named("join-config")).unwrap();
    assert_eq!(restored["data"], theirs["data"]);
    assert_eq!(restored["metadata"]["labels"], json!({"a": "b"}));
    assert!(restored.get("binaryData").is_none());
    // The server enforces the policy for some time after its deletion.
    while let Err(error) = install(&client, dir.path()) {
        assert!(
            Instant::now() < deadline && error.to_string().contains("not today"),
            "{error}"
        );
        thread::sleep(Duration::from_millis(500));
    }
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn the_accounts_of_the_services_have_the_necessary_permissions_only() {
    let (_alone, client) = alone();
    let dir = tempfile::tempdir().unwrap();
    install(&client, dir.path()).unwrap();
    let reviews = Resource::cluster("authorization.k8s.io", "v1", "subjectaccessreviews").all();
    let review = |account: &str, request: Value| {
        let review = json!({"spec": {
            "user": format!("system:serviceaccount:kube-system:{account}"),
            "groups": ["system:serviceaccounts", "system:serviceaccounts:kube-system", "system:authenticated"],
            "resourceAttributes": request,
        }});
        client.create(&reviews, &review).unwrap()["status"]["allowed"].clone()
    };
    for account in ["join-service", "key-service", "member-controller"] {
        let (joins, works) = (account == "join-service", account == "member-controller");
        for (verb, resource, is_allowed) in [
            ("get", "secrets", false),
            ("list", "secrets", false),
            ("update", "secrets", false),
            ("create", "secrets", joins),
            ("list", "configmaps", true),
            ("create", "configmaps", joins || works),
            ("list", "nodes", true),
            ("update", "nodes", false),
            ("create", "pods", false),
        ] {
            let request = json!({"namespace": "kube-system", "verb": verb, "resource": resource});
            let allowed = review(account, request);
            assert_eq!(allowed, is_allowed, "{account}: {verb} {resource}");
        }
    }
    for (account, allowed) in [
        ("join-service", false),
        ("key-service", true),
        ("member-controller", false),
    ] {
        let request =
            json!({"group": "authentication.k8s.io", "verb": "create", "resource": "tokenreviews"});
        assert_eq!(review(account, request), allowed, "{account}");
    }
    assert!(
        client
            .list(
                &DAEMON_SETS.in_namespace("kube-system"),
                &Selector::default()
            )
            .unwrap()
            .items
            .len()
            >= 2
    );
}

/// Returns the operator's files, in a new directory.
struct Operator(tempfile::TempDir);

impl Operator {
    fn new() -> Operator {
        let dir = tempfile::tempdir().unwrap();
        let base64 = |byte| BASE64_STANDARD.encode([byte; 32]);
        let secret = json!({"key": base64(2), "salt": base64(3)}).to_string();
        for (name, content) in [
            ("policy.json", POLICY),
            ("firstlight-mastersecret.json", &secret),
            ("firstlight-admin.conf", &Cluster::shared().kubeconfig()),
            (
                "firstlight-state.json",
                &json!({"version": 1, "measurementSalt": base64(1)}).to_string(),
            ),
        ] {
            fs::write(dir.path().join(name), content).unwrap();
        }
        let private = fs::Permissions::from_mode(0o600);
        fs::set_permissions(dir.path().join("firstlight-mastersecret.json"), private).unwrap();
        Operator(dir)
    }

    fn apply(&self, arguments: &[&str]) -> Output {
        let apply = [
            "apply",
            "--policy",
            "policy.json",
            "--image",
            "example.com/a:1",
        ];
        self.run(&[&apply, arguments].concat())
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(support::program::built("firstlight"));
        command
            .args(arguments)
            .current_dir(self.0.path())
            .output()
            .unwrap()
    }
}

fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).unwrap()
}

/// Returns a DaemonSet with these arguments, such as one of Constellation.
fn of_constellation(name: &str, arguments: &[&str]) -> Value {
    let labels = json!({"k8s-app": name});
    json!({"metadata": {"name": name}, "spec": {"selector": {"matchLabels": labels}, "template": {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "a", "image": "a"}, {"name": "b", "image": "b", "args": arguments}]},
    }}})
}

fn key_service_of_constellation() -> Value {
    let mut set = of_constellation("key-service", &[]);
    set["spec"]["template"]["spec"]["containers"] =
        json!([{"name": "key-service", "image": "a", "args": ["--port=9000"]}]);
    set
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_key_service_of_constellation_is_replaced_only_when_it_is_decided_what_its_drivers_get() {
    let (_alone, client) = alone();
    let sets = DAEMON_SETS.in_namespace("kube-system");
    let driver = "csi-azuredisk-node";
    let arguments = ["--v=2", "--kms-addr=key-service.kube-system:9000"];
    for set in [
        key_service_of_constellation(),
        of_constellation(driver, &arguments),
        of_constellation("other", &["--v=2"]),
    ] {
        client.create(&sets, &set).unwrap();
    }
    let service = json!({"metadata": {"name": "key-service"}, "spec": {
        "selector": {"k8s-app": "key-service"},
        "ports": [{"name": "grpc", "protocol": "TCP", "port": 9000, "targetPort": 9000}],
    }});
    client
        .create(&SERVICES.in_namespace("kube-system"), &service)
        .unwrap();
    let operator = Operator::new();

    let refused = operator.apply(&["--skip-wait"]);
    let why = text(&refused.stderr);
    assert!(
        refused.status.code() == Some(1)
            && why.contains(
                "kube-system/csi-azuredisk-node mount volumes with keys of the present key service"
            )
            && !why.contains("kube-system/other")
            && why.contains("Nothing was changed. Give --old-clients-until DATE"),
        "{why}"
    );
    assert_eq!(image_of(&client, "key-service"), "a");

    // The drivers know port 9000 of the Service.
    let port = || {
        let at = SERVICES.in_namespace("kube-system").named("key-service");
        let ports = client.get(&at).unwrap()["spec"]["ports"].clone();
        let mut ports = ports.as_array().unwrap().iter();
        ports.find(|port| port["port"] == 9000).unwrap()["targetPort"].clone()
    };
    let until = || services::old_clients_until(&client).unwrap().unwrap();
    let serve = ["--skip-wait", "--old-clients-until", "2099-12-31"];
    let open = operator.apply(&serve);
    let why = text(&open.stderr);
    assert!(
        why.contains("there is no ConfigMap kube-system/cilium-config. Nothing was changed."),
        "{why}"
    );
    assert_eq!(image_of(&client, "key-service"), "a");
    let config = let_cilium_replace_kube_proxy(&client);
    let served = operator.apply(&serve);
    assert!(served.status.success(), "{}", text(&served.stderr));
    assert_eq!((until().as_str(), port()), ("2099-12-31", json!(9001)));

    let again = operator.apply(&["--skip-wait"]);
    assert!(
        text(&again.stderr).contains("stays as it is: keyService.oldClientsUntil \"2099-12-31\""),
        "{}",
        text(&again.stderr)
    );
    assert_eq!(until(), "2099-12-31");

    let ended = operator.apply(&["--skip-wait", "--old-clients-until", "never"]);
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    assert_eq!((until().as_str(), port()), ("", json!(9001)));
    for name in [driver, "other"] {
        client.delete(&sets.named(name)).unwrap();
    }
    client.delete(&config).unwrap();
}

/// Writes the settings of Cilium in a cluster of Constellation. Returns their object.
fn let_cilium_replace_kube_proxy(client: &Client) -> Object {
    let at = (CONFIG_MAPS.in_namespace("kube-system")).named("cilium-config");
    let data = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "cilium-config"}, "data": {"kube-proxy-replacement": "strict", "enable-bpf-masquerade": "true",
        "enable-wireguard": "true", "encrypt-node": "true"}});
    client.apply(&at, &data).unwrap();
    at
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_key_service_of_constellation_is_not_replaced_while_its_s3_proxy_would_lose_its_key() {
    let (_alone, client) = alone();
    let sets = DAEMON_SETS.in_namespace("kube-system");
    client
        .create(&sets, &key_service_of_constellation())
        .unwrap();
    let labels = json!({"app": "s3proxy"});
    let proxy = json!({"metadata": {"name": "s3proxy"}, "spec": {
        "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": {"containers": [
            {"name": "s3proxy", "image": "ghcr.io/edgelesssys/constellation/s3proxy:v2.16.0", "args": ["--level=-1"]},
        ]}},
    }});
    let proxies = DEPLOYMENTS.in_namespace("default");
    client.create(&proxies, &proxy).unwrap();
    // a tenant copies it
    let tenant = NAMESPACES.named("tenant-of-s3");
    let space = json!({"metadata": {"name": tenant.name()}});
    client.create(&NAMESPACES.all(), &space).unwrap();
    let copies = DEPLOYMENTS.in_namespace(tenant.name());
    client.create(&copies, &proxy).unwrap();
    let operator = Operator::new();

    let until = ["--old-clients-until", "2099-12-31"];
    for (more, advice) in [
        (&[][..], "Give --old-clients-until DATE"),
        (
            &until,
            "give --grants 'kube-system/join-service=disk,ssh,measurement;default/default=id:s3proxy-kek', or",
        ),
    ] {
        let refused = operator.apply(&[&["--skip-wait"], more].concat());
        let why = text(&refused.stderr);
        assert!(
            refused.status.code() == Some(1)
                && why.contains("tenant-of-s3/s3proxy would get no key either if it is")
                && why.contains(
                    "default/s3proxy (Constellation's S3 proxy) asks the present key service"
                )
                && why.contains("Nothing was changed. ")
                && why.contains(advice),
            "{why}"
        );
        assert_eq!(image_of(&client, "key-service"), "a");
    }
    let grants = "kube-system/join-service=disk,ssh,measurement;default/default=id:s3proxy-kek";
    let given = [&["--skip-wait", "--grants", grants], &until[..]].concat();
    let config = let_cilium_replace_kube_proxy(&client);
    let served = operator.apply(&given);
    assert!(served.status.success(), "{}", text(&served.stderr));
    let again = operator.apply(&["--skip-wait"]);
    let said = format!("stays as it is: keyService.grants \"{grants}\"");
    assert!(
        text(&again.stderr).contains(&said),
        "{}",
        text(&again.stderr)
    );
    client.delete(&proxies.named("s3proxy")).unwrap();
    client.delete(&copies.named("s3proxy")).unwrap();
    client.delete(&config).unwrap();
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn an_upgrade_of_kubernetes_is_checked_before_its_list_is_in_the_cluster() {
    let _alone = ALONE.lock().unwrap_or_else(|error| error.into_inner());
    let client = Cluster::shared().client(&Stop::new());
    let operator = Operator::new();
    let write =
        |name: &str, content: &str| fs::write(operator.0.path().join(name), content).unwrap();
    let list = |version: &str, hash: &str| {
        let component = |name: &str| {
            json!({
                "url": format!("https://dl.k8s.io/{version}/bin/linux/amd64/{name}"),
                "hash": format!("sha256:{}", hash.repeat(64)),
                "install_path": format!("/run/state/bin/{name}"),
            })
        };
        json!(["kubelet", "kubeadm", "kubectl"].map(component)).to_string()
    };
    let maps = CONFIG_MAPS.in_namespace("kube-system");
    let is_at = |version: &str| {
        let configuration =
            format!("controlPlaneEndpoint: lb.example\nkubernetesVersion: {version}\n");
        let map = json!({"metadata": {"name": "kubeadm-config"}, "data": {"ClusterConfiguration": configuration}});
        client
            .delete_if_there(&maps.named("kubeadm-config"))
            .unwrap();
        client.create(&maps, &map).unwrap();
    };
    let kubelet_is_at = |name: &str, role: &str, version: &str| {
        let labels = json!({format!("node-role.kubernetes.io/{role}"): ""});
        let node = json!({"metadata": {"name": name, "labels": labels}});
        client.create_if_absent(&NODES.all(), &node).unwrap();
        let info = json!({"status": {"nodeInfo": {"kubeletVersion": version}}});
        client
            .merge(&NODES.named(name).subresource("status"), &info)
            .unwrap();
    };
    is_at("v1.34.4");
    kubelet_is_at("cp-0", "control-plane", "v1.34.4");
    kubelet_is_at("a-worker", "worker", "v1.34.4");
    let upgrade = |version: &str, more: &[&str]| {
        let command = ["upgrade", version, "--components", "components.json"];
        operator.run(&[&command, more].concat())
    };
    let refused = |version: &str, says: &str| {
        let output = upgrade(version, &[]);
        assert_eq!(output.status.code(), Some(1), "{version}");
        assert!(
            text(&output.stderr).contains(says),
            "{}",
            text(&output.stderr)
        );
    };

    for (version, says) in [
        ("v1.34.3", "v1.34.3 is older than v1.34.4"),
        ("v1.36.0", "upgrade to v1.35 first"),
    ] {
        write("components.json", &list(version, "1"));
        refused(version, says);
    }
    refused(
        "v1.35.1",
        "expected the components of v1.35.1, got kubeadm v1.36.0",
    );
    write("components.json", "[]");
    refused("v1.35.1", "no component is installed as kubelet");
    assert_eq!(upgrade("v1.99.0", &[]).status.code(), Some(2));
    write("components.json", &list("v1.35.1", "1"));
    kubelet_is_at("a-worker", "worker", "v1.31.9");
    refused(
        "v1.35.1",
        "older than v1.32: upgrade or remove these nodes first: a-worker (v1.31.9)",
    );
    kubelet_is_at("a-worker", "worker", "v1.34.4");

    // The dry run changes nothing.
    let name = || -> String {
        let said = upgrade("v1.35.1", &["--dry-run", "-o", "json"]);
        let said: Value = serde_json::from_slice(&said.stdout).unwrap();
        said["components"].as_str().unwrap().to_owned()
    };
    let map = maps.named(&name());
    assert!(client.find(&map).unwrap().is_none());
    let output = upgrade("v1.35.1", &[]);
    let said = text(&output.stdout);
    assert!(
        said.starts_with("v1.34.4 -> v1.35.1\n") && said.contains(": new\n"),
        "{said}"
    );
    assert!(
        said.contains("join with v1.34.4 until the first control plane has v1.35.1"),
        "{said}"
    );
    let nodes: Vec<_> = said
        .lines()
        .filter(|line| line.ends_with("  v1.34.4"))
        .collect();
    assert!(
        nodes[0].contains("cp-0") && nodes[1].contains("a-worker") && nodes.len() == 2,
        "{said}"
    );
    let written = client.get(&map).unwrap();
    assert_eq!(written["data"]["cluster-version"], "v1.35.1");
    assert_eq!(written["immutable"], true);

    // Again, during the upgrade of the cluster, and at its end.
    is_at("v1.35.1");
    kubelet_is_at("cp-0", "control-plane", "v1.35.1");
    let output = upgrade("v1.35.1", &["-o", "json"]);
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["isNew"], false);
    let left = json!([{"name": "a-worker", "role": "worker", "kubelet": "v1.34.4"}]);
    assert_eq!(said["left"], left);
    kubelet_is_at("a-worker", "worker", "v1.35.1");
    let output = upgrade("v1.35.1", &[]);
    assert!(
        text(&output.stdout).ends_with("Every node has v1.35.1.\n"),
        "{}",
        text(&output.stdout)
    );

    // A list with the same programs, and another patch.
    let mut other: Vec<Value> = serde_json::from_str(&list("v1.35.1", "1")).unwrap();
    other.push(json!({"url": "data:,x", "install_path": "/opt/kubernetes/patches/etcd+json.json"}));
    write("components.json", &json!(other).to_string());
    refused("v1.35.1", "delete it, and run the command again");
    for object in [
        map,
        maps.named("kubeadm-config"),
        NODES.named("cp-0"),
        NODES.named("a-worker"),
    ] {
        client.delete(&object).unwrap();
    }
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn the_command_brings_them_in_by_the_operator_s_files() {
    let (_alone, client) = alone();
    let operator = Operator::new();
    let output = operator.apply(&["--skip-wait"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout), "77 objects are new or changed\n");
    assert!(
        text(&output.stderr).contains("\ndaemonsets.apps kube-system/join-service: new\n"),
        "{}",
        text(&output.stderr)
    );
    assert_eq!(
        text(&operator.apply(&["--skip-wait"]).stdout),
        "nothing had to be changed\n"
    );
    assert_eq!(image_of(&client, "join-service"), "example.com/a:1");

    // One phase without the other.
    let upgraded = operator.apply(&[
        "--skip-wait",
        "--skip-phases",
        "policy",
        "--image",
        "example.com/a:3",
    ]);
    assert_eq!(text(&upgraded.stdout), "3 objects are new or changed\n");
    fs::write(
        operator.0.path().join("policy.json"),
        POLICY.replace("00", "11"),
    )
    .unwrap();
    let mut command = Command::new(support::program::built("firstlight"));
    command
        .args([
            "apply",
            "--policy",
            "policy.json",
            "--skip-phases",
            "services",
        ])
        .current_dir(operator.0.path());
    assert_eq!(
        text(&command.output().unwrap().stdout),
        "1 object is new or changed\n"
    );
    assert_eq!(image_of(&client, "join-service"), "example.com/a:3");
    fs::write(operator.0.path().join("policy.json"), POLICY).unwrap();
    assert_eq!(
        text(&operator.apply(&["--skip-wait"]).stdout),
        "4 objects are new or changed\n"
    );

    let late = operator.apply(&["--timeout", "1s", "--image", "example.com/a:2"]);
    assert_eq!(late.status.code(), Some(1));
    assert!(
        text(&late.stderr).contains("; everything was restored (the previous manifests are in "),
        "{}",
        text(&late.stderr)
    );
    assert_eq!(image_of(&client, "join-service"), "example.com/a:1");

    let kubeconfig = Cluster::shared()
        .kubeconfig()
        .replace(&Cluster::shared().server(), "https://127.0.0.1:1");
    fs::write(operator.0.path().join("firstlight-admin.conf"), kubeconfig).unwrap();
    let nobody = operator.apply(&["--timeout", "1s"]);
    assert_eq!(nobody.status.code(), Some(4), "{}", text(&nobody.stderr));
    assert!(
        text(&nobody.stderr)
            .contains("does not answer: cannot connect to 127.0.0.1:1: Connection refused"),
        "{}",
        text(&nobody.stderr)
    );
}

/// An administrator of everything but admission, as some providers of clusters give them.
#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn without_rights_to_policies_the_services_are_installed_and_what_stays_open_is_said() {
    let (_alone, admin) = alone();
    let groups = [
        "",
        "apps",
        "networking.k8s.io",
        "rbac.authorization.k8s.io",
        "authentication.k8s.io",
        // the policies of other tests may still hold
        "firstlight",
        "events.k8s.io",
    ];
    let role = json!({"metadata": {"name": "most"}, "rules": [
        {"apiGroups": groups, "resources": ["*"], "verbs": ["*"]},
    ]});
    admin.create(&CLUSTER_ROLES.all(), &role).unwrap();
    let binding = json!({
        "metadata": {"name": "most"}, "subjects": [{"kind": "User", "name": "most"}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "most"},
    });
    admin
        .create(&CLUSTER_ROLE_BINDINGS.all(), &binding)
        .unwrap();
    let client = Cluster::shared().client_of("most", "");
    let dir = tempfile::tempdir().unwrap();
    let mut said = vec![];
    let applied = services::apply(
        &client,
        &settings("example.com/a:1"),
        &without_wait(dir.path()),
        &mut |report| {
            said.push(format!("{report:?}"));
        },
    );
    // all but the policies and their bindings
    assert_eq!(applied.unwrap().changed.len(), 49);
    for (name, open) in [
        (
            "firstlight-nodes",
            "open to agents and tenants without it: the role, the attestation and the addresses of nodes",
        ),
        (
            "join-service",
            "open to agents and tenants without it: every ConfigMap of kube-system",
        ),
    ] {
        let line = said.iter().filter(|line| {
            line.contains(&format!("admissionregistration.k8s.io {name} is left out"))
        });
        let line: Vec<_> = line.collect();
        assert!(line.len() == 1 && line[0].contains(open), "{said:#?}");
    }
}
