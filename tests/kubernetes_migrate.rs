//! Tests of `firstlight migrate` and of `firstlight upgrade` in clusters of Constellation, with a real kube-apiserver, a real etcd, and
//! the custom resources of Constellation (`make kubernetes-api`).

use common::{constellation, kube_apiserver};

use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use base::stop::Stop;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use common::volumes;
use kube_apiserver::Cluster;
use kubernetes::client::{
    CLUSTER_ROLE_BINDINGS, CONFIG_MAPS, Client, DAEMON_SETS, DEPLOYMENTS, LEASES, NODES, Object,
    PODS, Resource, SECRETS, SERVICE_ACCOUNTS, SERVICES, Selector, VALIDATING_ADMISSION_POLICIES,
    VALIDATING_ADMISSION_POLICY_BINDINGS,
};
use kubernetes::constellation::node_version;
use kubernetes::objects::RbacBinding;
use kubernetes::removed_nodes;
use kubernetes::services::kubeadm_bindings;
use ring::{hkdf, hmac};
use serde_json::{Value, json};
use support::foreign::go_program;
use support::program::Program;
use tempfile::TempDir;
use verifier::Policy;

/// The UUID of a volume of Constellation, and its key with a master secret and a salt of zeros.
const VOLUME: &str = "00000000-0000-0000-0000-000000000000";
const KEY: &str = "2b5c829f691bfd4232f8aac464bccc07e605c7c8e82cbca09837e86d0b6d0665";
/// The policy of the new image.
const NEW_POLICY: &str = r#"{"require":"strong","measurements":{"4":{"expected":"4444444444444444444444444444444444444444444444444444444444444444","warnOnly":false},"11":{"expected":"1111111111111111111111111111111111111111111111111111111111111111","warnOnly":false},"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000","warnOnly":false}}}"#;
const NEW_IMAGE: &str = "ami-0new";

/// The version of the API server of the tests.
fn version(client: &Client) -> String {
    client.version().unwrap()
}

/// A cluster of Constellation, and the folder of its operator.
struct Old {
    client: Client,
    folder: TempDir,
    cluster: Cluster,
}

impl Old {
    fn new(in_known_cloud: bool) -> Old {
        let (cluster, client) = Cluster::started();
        constellation::define(&client);
        constellation::make(&client, &version(&client), in_known_cloud);
        let folder = tempfile::tempdir().unwrap();
        constellation::write_workspace(folder.path(), &cluster.kubeconfig());
        Old {
            client,
            folder,
            cluster,
        }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        Command::new(support::program::built("firstlight"))
            .args(arguments)
            .current_dir(self.folder.path())
            .env_remove("KUBECONFIG")
            .output()
            .unwrap()
    }

    /// Returns the plan, and whether the command succeeded.
    fn plan(&self, arguments: &[&str]) -> (Value, bool) {
        let all = [&["migrate", "plan", "-o", "json"], arguments].concat();
        let output = self.run(&all);
        let plan = serde_json::from_slice(&output.stdout);
        (
            plan.unwrap_or_else(|error| panic!("{error}: {}", text(&output.stderr))),
            output.status.success(),
        )
    }

    /// Runs a command that must succeed. Returns what it says.
    fn done(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let said = format!("{}{}", text(&output.stderr), text(&output.stdout));
        assert!(output.status.success(), "{arguments:?}: {said}");
        said
    }

    /// Runs a command that must fail. Returns what it says.
    fn failed(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let said = text(&output.stderr).to_owned();
        // 4: in the time that it has
        let code = output.status.code();
        assert!(
            matches!(code, Some(1 | 4)),
            "{arguments:?}: {code:?}: {said}"
        );
        said
    }

    /// Runs the command line of the key service's DaemonSet on loopback, as its pod would run.
    fn key_service(&self) -> KeyService {
        let set = self
            .client
            .get(&kube_system(DAEMON_SETS, "key-service"))
            .unwrap();
        let container = &set["spec"]["template"]["spec"]["containers"][0];
        let words = |field: &str| container[field].as_array().into_iter().flatten();
        let words = words("command")
            .chain(words("args"))
            .map(|word| word.as_str().unwrap());
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in [("mastersecret", &[0; 32][..]), ("salt", &[0; 32])] {
            fs::write(dir.path().join(name), content).unwrap();
        }
        let mut command = Command::new(support::program::built("key-service"));
        command
            .args(["--master-secret", "mastersecret", "--salt=salt"])
            .current_dir(dir.path());
        let is_ours = container["command"].is_array();
        // a port that was free a moment ago: Constellation's service has no other way to choose one
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        for word in words.filter(|word| *word != "/key-service") {
            match word {
                "--port=9000" => command.arg(format!("--port={port}")),
                "*:9000" | "*:9443" | "*:9092" => command.arg("127.0.0.1:0"),
                word => command.arg(word),
            };
        }
        if is_ours {
            fs::write(
                dir.path().join("kubeconfig"),
                self.kubeconfig_of_key_service(),
            )
            .unwrap();
            command.args(["--kubeconfig", "kubeconfig", "--listen-old", "127.0.0.1:0"]);
        }
        let program = Program::start(&mut command);
        let is_off = words_after(container, "--old-clients-until") == Some("");
        let old = match (is_ours, is_off) {
            (false, _) => SocketAddr::from(([127, 0, 0, 1], port)),
            (true, false) => address_in(&program.expect("CLIENTS WITHOUT A TOKEN")),
            // only the ports for clients with tokens are open
            (true, true) => address_in(&program.expect("serving data keys")),
        };
        if !is_ours {
            program.expect("serving data keys");
        }
        KeyService {
            old,
            _program: program,
            _dir: dir,
        }
    }

    /// Returns a kubeconfig of the key service's own account, which has the permissions that a move has installed.
    fn kubeconfig_of_key_service(&self) -> String {
        let at = kube_system(SERVICE_ACCOUNTS, "key-service").subresource("token");
        let request = json!({"spec": {"audiences": ["https://kubernetes.default.svc"], "expirationSeconds": 600}});
        let answer = self.client.create_subresource(&at, &request).unwrap();
        let token = answer["status"]["token"].as_str().unwrap();
        let admin = self.cluster.kubeconfig();
        let kept = admin
            .lines()
            .filter(|line| !line.contains("client-certificate") && !line.contains("client-key"));
        format!(
            "{}\n    token: {token}\n",
            kept.collect::<Vec<_>>().join("\n")
        )
    }

    /// Gives a worker the address from which the test asks, and attaches a volume to it.
    fn attach_volume(&self) {
        let nodes = self
            .client
            .list(&NODES.all(), &Selector::default())
            .unwrap()
            .items;
        let name = |node: &Value| node["metadata"]["name"].as_str().unwrap().to_owned();
        let worker = nodes
            .iter()
            .map(name)
            .find(|name| name.starts_with("worker"))
            .unwrap();
        let status =
            json!({"status": {"addresses": [{"type": "InternalIP", "address": "127.0.0.1"}]}});
        self.client
            .merge(&NODES.named(&worker).subresource("status"), &status)
            .unwrap();
        // the driver of OpenStack is on the network of its host
        let driver = volumes::CINDER;
        volumes::add_csi_driver(&self.client, driver);
        volumes::add_driver(&self.client, driver, &worker, None);
        volumes::attach_to(&self.client, driver, "data", &worker, true);
    }

    /// Returns whether a policy was in force, while this was done, that accepts both images and evidence of the old form.
    fn admits_the_old_form_during(&self, work: impl FnOnce()) -> bool {
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            let watching = scope.spawn(|| {
                let mut found = false;
                while !is_done.load(Ordering::Relaxed) {
                    let map = self.client.find(&kube_system(CONFIG_MAPS, "join-config"));
                    let text = map.ok().flatten().unwrap_or_default()["data"]["attestationConfig"]
                        .as_str()
                        .unwrap_or_default()
                        .to_owned();
                    let policy = Policy::from_json(&text);
                    found |= policy.is_ok_and(|it| it.images().len() == 2 && !it.requires_strong());
                    thread::sleep(Duration::from_millis(10));
                }
                found
            });
            work();
            is_done.store(true, Ordering::Relaxed);
            watching.join().unwrap()
        })
    }

    fn policy_images(&self) -> Vec<String> {
        let map = self
            .client
            .get(&kube_system(CONFIG_MAPS, "join-config"))
            .unwrap();
        let policy = map["data"]["attestationConfig"].as_str().unwrap();
        let policy: Value = serde_json::from_str(policy).unwrap();
        let mut images = vec![&policy];
        images.extend(policy["alsoAccepted"].as_array().into_iter().flatten());
        let first = |image: &&Value| {
            let pcr = image["measurements"]["4"]["expected"].as_str().unwrap();
            pcr[..4].to_owned()
        };
        images.iter().map(first).collect()
    }

    /// Returns the images of all nodes, without repetition.
    fn node_images(&self) -> Vec<String> {
        let nodes = self
            .client
            .list(&NODES.all(), &Selector::default())
            .unwrap()
            .items;
        let image = |node: &Value| {
            let annotations = &node["metadata"]["annotations"];
            annotations[node_version::IMAGE_ANNOTATION]
                .as_str()
                .unwrap_or_default()
                .to_owned()
        };
        let mut images: Vec<_> = nodes.iter().map(image).collect();
        images.sort();
        images.dedup();
        images
    }

    /// Returns the specifications of the objects that a move replaces.
    fn specifications(&self) -> Vec<Value> {
        let object = |resource, name: &str| self.client.get(&kube_system(resource, name)).unwrap();
        let mut all = vec![object(CONFIG_MAPS, "join-config")["data"].clone()];
        for (resource, name) in [
            (DAEMON_SETS, "join-service"),
            (DAEMON_SETS, "key-service"),
            (DEPLOYMENTS, "constellation-operator-controller-manager"),
            (SERVICES, "join-service"),
            (SERVICES, "key-service"),
        ] {
            all.push(object(resource, name)["spec"].clone());
        }
        all.push(self.client.get(&node_version::place()).unwrap()["spec"].clone());
        all.push(
            self.client
                .get(&CLUSTER_ROLE_BINDINGS.named("key-service"))
                .unwrap()["roleRef"]
                .clone(),
        );
        all
    }

    /// Returns what the kubelet checks before it starts the node operator's pod.
    fn agent_check(&self) -> Value {
        let at = kube_system(DEPLOYMENTS, "constellation-operator-controller-manager");
        let volumes = self.client.get(&at).unwrap()["spec"]["template"]["spec"]["volumes"].clone();
        volumes[1]["hostPath"]["type"].clone()
    }

    /// Makes what the services and `firstlight node remove` make while they run.
    fn make_objects_of_running_services(&self) {
        let leases = LEASES.in_namespace("kube-system");
        for name in ["join-watch", "join-control-plane"] {
            let lease = json!({"metadata": {"name": name}});
            self.client.create(&leases, &lease).unwrap();
        }
        let maps = CONFIG_MAPS.in_namespace("kube-system");
        let map = json!({"metadata": {"name": "join-collateral"}});
        self.client.create(&maps, &map).unwrap();
        removed_nodes::add(&self.client, "worker-9", "").unwrap();
    }

    /// Makes the record of the move that of an earlier version, which made no admission policies.
    fn forget_policies(&self) {
        let path = self.folder.path().join("firstlight-migration.json");
        let mut record: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        record.as_object_mut().unwrap().remove("mac").unwrap();
        let absent = record["before"]["absent"].as_array_mut().unwrap();
        let count = absent.len();
        absent.retain(|it| !it["kind"].as_str().unwrap().contains("AdmissionPolicy"));
        assert_ne!(absent.len(), count, "policies and bindings");
        // the seal, with a master secret and a salt of zeros
        let root = hkdf::Salt::new(hkdf::HKDF_SHA256, &[0; 32]).extract(&[0; 32]);
        let label = [&b"firstlight migration record"[..]];
        let key = root.expand(&label, hmac::HMAC_SHA256).unwrap();
        let mac = hmac::sign(&key.into(), record.to_string().as_bytes());
        record["mac"] = base::text::hex(mac.as_ref()).into();
        let text = format!("{record:#}\n");
        fs::write(&path, &text).unwrap();
        let at = kube_system(SECRETS, "firstlight-migration");
        let change = |secret: &mut Value| {
            secret["data"]["record"] = BASE64_STANDARD.encode(&text).into();
            true
        };
        self.client.modify(&at, change).unwrap();
    }

    /// Returns the objects of Firstlight that the cluster of Constellation did not have, of those that `undo` deletes.
    fn added(&self) -> Vec<String> {
        let mut added = vec![];
        for resource in [
            VALIDATING_ADMISSION_POLICIES,
            VALIDATING_ADMISSION_POLICY_BINDINGS,
            CONFIG_MAPS,
            LEASES,
        ] {
            let all = self.client.list(&resource.all(), &Selector::default());
            let all = all.unwrap().items;
            let names = all
                .iter()
                .map(|it| it["metadata"]["name"].as_str().unwrap());
            let ours = names.filter(|it| {
                let is_record = it.starts_with("join-node-") || *it == "join-config";
                (it.starts_with("join-") || it.starts_with("firstlight-")) && !is_record
            });
            added.extend(ours.map(str::to_owned));
        }
        added
    }

    /// Returns the versions of all objects that a move changes.
    fn versions(&self) -> Vec<String> {
        let mut all = Vec::new();
        for resource in [CONFIG_MAPS, DAEMON_SETS, DEPLOYMENTS, SECRETS, NODES] {
            let found = self.client.list(&resource.all(), &Selector::default());
            all.extend(found.unwrap().items.iter().map(|object| {
                let metadata = &object["metadata"];
                format!("{} {}", metadata["name"], metadata["resourceVersion"])
            }));
        }
        let version = self.client.get(&node_version::place()).unwrap();
        all.push(version["metadata"]["resourceVersion"].to_string());
        all
    }
}

/// A key service, and the address at which it serves clients without a token.
struct KeyService {
    old: SocketAddr,
    _program: Program,
    _dir: TempDir,
}

impl KeyService {
    /// Asks for the volume's key as a CSI driver of Constellation does: with grpc-go, in plaintext, without a token.
    fn key(&self) -> Result<String, String> {
        let output = Command::new(go_program("csi_driver", env!("CARGO_TARGET_TMPDIR")))
            .args(["old", &self.old.to_string(), VOLUME])
            .output()
            .unwrap();
        if output.status.success() {
            Ok(text(&output.stdout).trim().into())
        } else {
            Err(text(&output.stderr).into())
        }
    }
}

fn words_after<'a>(container: &'a Value, option: &str) -> Option<&'a str> {
    let words: Vec<_> = container["command"]
        .as_array()?
        .iter()
        .filter_map(Value::as_str)
        .collect();
    let place = words.iter().position(|word| *word == option)?;
    words.get(place + 1).copied()
}

fn address_in(line: &str) -> SocketAddr {
    line.split(|c: char| c.is_whitespace() || c == ',')
        .find_map(|word| word.parse().ok())
        .unwrap()
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).unwrap()
}

fn kube_system(resource: Resource, name: &str) -> Object {
    resource.in_namespace("kube-system").named(name)
}

/// Returns what blocks the move, a sentence each.
fn blocks(plan: &Value) -> Vec<&str> {
    let blocks = plan["blocks"].as_array().unwrap().iter();
    blocks
        .map(|block| block["what"].as_str().unwrap())
        .collect()
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn the_plan_says_what_a_move_changes_and_what_blocks_it_and_changes_nothing() {
    let old = Old::new(true);
    let before = old.versions();
    let decided = ["--old-clients-until", "2099-12-31"];

    let (plan, is_free) = old.plan(&[]);
    assert!(!is_free);
    let found = blocks(&plan);
    assert!(
        found.len() == 1 && found[0].contains("kube-system/ebs-csi-node mount volumes"),
        "{plan:#}"
    );
    let (plan, is_free) = old.plan(&decided);
    assert!(is_free, "{plan:#}");
    assert_eq!(plan["blocks"], json!([]));
    let cluster = &plan["cluster"];
    assert_eq!(cluster["variant"], "qemu-vtpm");
    assert_eq!(cluster["kubernetes"], version(&old.client));
    assert_eq!(cluster["operatorMovesNodes"], true);
    assert_eq!(cluster["nodeVersion"]["image"], constellation::IMAGE);
    assert_eq!(cluster["nodes"][0]["name"], "plane-0");
    assert_eq!(cluster["nodes"][1]["role"], "worker");
    let stays: Vec<_> = plan["stays"]
        .as_array()
        .unwrap()
        .iter()
        .map(|part| part["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        stays,
        [
            "Cilium",
            "verification service",
            "node operator",
            "CSI driver"
        ]
    );
    assert_eq!(plan["missing"].as_array().unwrap().len(), 4, "{plan:#}");
    let image = "registry.example/firstlight:1";
    let (plan, _) = old.plan(
        &[
            &decided[..],
            &[
                "--image",
                image,
                "--node-image",
                "ami-1",
                "--migrate-until",
                "2099-12-31",
            ],
        ]
        .concat(),
    );
    assert_eq!(plan["missing"].as_array().unwrap().len(), 1);
    assert!(plan["changes"].to_string().contains(image), "{plan:#}");

    let output = old.run(&[&["migrate", "plan"], &decided[..]].concat());
    let said = text(&output.stdout);
    for line in [
        "What changes, in this order",
        "Policy: enforces PCR 4, PCR 8, PCR 9, PCR 11, PCR 12, PCR 13, PCR 15",
        "nobody patches Constellation's fork",
        "Nothing blocks the move. Nothing was changed.",
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }

    // the node operator and the operator's files
    let status = |status: Value| {
        let at = node_version::place().subresource("status");
        old.client.merge(&at, &json!({"status": status})).unwrap();
    };
    assert_eq!(old.versions(), before);
    status(json!({"activeclusterversionupgrade": true}));
    let (plan, is_free) = old.plan(&decided);
    assert!(
        !is_free && blocks(&plan)[0].contains("Kubernetes is being upgraded"),
        "{plan:#}"
    );
    status(json!({"activeclusterversionupgrade": false}));
    let latest = constellation::POLICY.replacen('{', r#"{"snpVersion":"latest","#, 1);
    let policy = |policy: &str| {
        let patch = json!({"data": {"attestationConfig": policy}});
        old.client
            .merge(&kube_system(CONFIG_MAPS, "join-config"), &patch)
            .unwrap();
    };
    policy(&latest);
    let (plan, is_free) = old.plan(&decided);
    assert!(
        !is_free && blocks(&plan)[0].contains("snpVersion: \"latest\" is not a version"),
        "{plan:#}"
    );
    policy(constellation::POLICY);
    let cilium = kube_system(CONFIG_MAPS, "cilium-config");
    let open = json!({"data": {"kube-proxy-replacement": "false"}});
    old.client.merge(&cilium, &open).unwrap();
    let (plan, is_free) = old.plan(&decided);
    assert!(
        !is_free && blocks(&plan)[0].contains("kube-proxy-replacement is \"false\""),
        "{plan:#}"
    );
    old.client.delete(&cilium).unwrap();
    let (_, is_free) = old.plan(&["--old-clients-until", "never"]);
    assert!(is_free, "nobody without a token is served");
    fs::remove_file(old.folder.path().join("constellation-mastersecret.json")).unwrap();
    let (plan, is_free) = old.plan(&["--old-clients-until", "never"]);
    assert!(
        !is_free && blocks(&plan)[0].contains("constellation-mastersecret.json"),
        "{plan:#}"
    );
    assert!(old.cluster.server().starts_with("https://"));
}

/// A record that would make a reader of it everybody's administrator, and delete the master secret.
const PLANTED: &str = r#"{"version":1,"begun":"services","done":"save","wanted":{"policy":"{}","image":"x"},"before":{"objects":[
    {"apiVersion":"rbac.authorization.k8s.io/v1","kind":"ClusterRoleBinding","metadata":{"name":"x"}}],"absent":[
    {"apiVersion":"v1","kind":"Secret","metadata":{"name":"constellation-mastersecret","namespace":"kube-system"}}]}}"#;
/// The options with which the moves of these tests begin.
const WANTED: [&str; 8] = [
    "--policy",
    "new.json",
    "--image",
    "registry.example/firstlight:1",
    "--migrate-until",
    "2099-12-31",
    "--old-clients-until",
    "2099-12-31",
];

/// Runs `body` while DaemonSets become ready, and, if `operator` says so, Constellation's node operator replaces nodes.
fn with_controllers<T>(old: &Old, operator: bool, body: impl FnOnce() -> T) -> T {
    let stop = Stop::new();
    thread::scope(|scope| {
        scope.spawn(|| kube_apiserver::play_controller(&old.client, &stop));
        if operator {
            scope.spawn(|| constellation::play_node_operator(&old.client, &stop));
        }
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        stop.stop();
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_cluster_moves_continues_after_a_failure_ends_by_another_operator_and_goes_back() {
    let old = Old::new(true);
    let folder = old.folder.path();
    fs::write(folder.join("new.json"), NEW_POLICY).unwrap();
    let before = old.specifications();
    assert_eq!(
        old.key_service().key().unwrap(),
        KEY,
        "Constellation's key service"
    );

    // what blocks the plan blocks the move, and nothing is changed
    let versions = old.versions();
    let refused = old.failed(
        &[
            &["migrate", "apply", "--node-image", NEW_IMAGE],
            &WANTED[..6],
        ]
        .concat(),
    );
    assert!(
        refused.contains("mount volumes") && refused.contains("Nothing was changed"),
        "{refused}"
    );
    let usage = old.run(&[&["migrate", "apply"], &WANTED[..]].concat());
    assert_eq!(usage.status.code(), Some(2));
    assert!(
        text(&usage.stderr).contains("give --node-image"),
        "{}",
        text(&usage.stderr)
    );
    assert_eq!(old.versions(), versions);

    // a record that was planted is not obeyed
    let planted =
        json!({"metadata": {"name": "firstlight-migration"}, "stringData": {"record": PLANTED}});
    let secrets = SECRETS.in_namespace("kube-system");
    old.client.create(&secrets, &planted).unwrap();
    let options = [&["--node-image", NEW_IMAGE], &WANTED[..]].concat();
    for action in ["apply", "undo"] {
        let refused = old.failed(&[&["migrate", action], &options[..]].concat());
        assert!(
            refused.contains("it was not written with the master secret of this cluster"),
            "{refused}"
        );
    }
    old.client
        .delete(&secrets.named("firstlight-migration"))
        .unwrap();
    assert_eq!(old.specifications(), before);
    let over = options.iter().map(|word| {
        if *word == "2099-12-31" {
            "2026-01-31"
        } else {
            word
        }
    });
    let refused = old.failed(&[vec!["migrate", "apply"], over.collect()].concat());
    assert!(
        refused.contains("the day of --migrate-until is over"),
        "{refused}"
    );

    for binding in kubeadm_bindings::manifests() {
        let bindings = CLUSTER_ROLE_BINDINGS.all();
        old.client.create(&bindings, &binding).unwrap();
    }
    let bindings = || {
        let all = old
            .client
            .list_as::<RbacBinding>(&CLUSTER_ROLE_BINDINGS.all(), &Selector::default());
        let all = all.unwrap().items;
        all.iter()
            .filter(|it| kubeadm_bindings::approves_kubelets(it))
            .count()
    };
    // the node operator does not move the nodes
    let begin = [
        &[
            "migrate",
            "apply",
            "--timeout",
            "5s",
            "--node-image",
            NEW_IMAGE,
        ],
        &WANTED[..],
    ]
    .concat();
    let stuck = with_controllers(&old, false, || old.failed(&begin));
    assert!(
        stuck.contains("the step nodes is not done: the nodes have not changed for 5 s: with another image: plane-0, worker-0"),
        "{stuck}"
    );
    let set = old
        .client
        .get(&kube_system(DAEMON_SETS, "join-service"))
        .unwrap();
    let pod = &set["spec"]["template"]["spec"];
    assert_eq!(pod["containers"][0]["image"], WANTED[3]);
    assert_eq!(
        pod["containers"][0]["args"],
        Value::Null,
        "arguments of both systems would be a usage error"
    );
    assert!(
        pod["volumes"]
            .as_array()
            .unwrap()
            .iter()
            .all(|volume| volume["name"] != "kubeadm")
    );
    assert_eq!(old.policy_images(), ["5198", "4444"]);
    assert_eq!(old.agent_check(), "");
    assert_eq!(mode(&folder.join("firstlight-migration.json")), 0o600);
    let state: Value =
        serde_json::from_slice(&fs::read(folder.join("firstlight-state.json")).unwrap()).unwrap();
    assert_eq!(
        state["clusterID"],
        "823267d1276b940d1f04b9fac150721f196bf1090e125684d4efd8416a691588"
    );
    assert!(
        old.client
            .find(&CLUSTER_ROLE_BINDINGS.named("key-service"))
            .unwrap()
            .is_none()
    );
    assert_eq!(bindings(), 0);
    old.attach_volume();
    assert_eq!(old.key_service().key().unwrap(), KEY, "during the move");

    // somebody else writes the record at the same time
    let raced = with_controllers(&old, true, || {
        let stop = Stop::new();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut number = 0;
                while !stop.wait(Duration::from_millis(100)) {
                    number += 1;
                    let at = kube_system(SECRETS, "firstlight-migration");
                    old.client
                        .annotate(&at, &[("other", &number.to_string())])
                        .unwrap();
                }
            });
            let output = old.run(&["migrate", "apply", "--timeout", "2m"]);
            stop.stop();
            output
        })
    });
    assert_eq!(raced.status.code(), Some(1));
    assert!(
        text(&raced.stderr).contains("another operator moves this cluster"),
        "{}",
        text(&raced.stderr)
    );

    // it moves them, and the same command continues
    let moved = with_controllers(&old, true, || {
        old.done(&["migrate", "apply", "--timeout", "2m"])
    });
    assert!(
        !moved.contains("step services") && moved.contains("all 2 nodes have the image ami-0new"),
        "{moved}"
    );
    assert_eq!(old.node_images(), [NEW_IMAGE]);
    let moved = old.versions();
    old.done(&["migrate", "apply"]);
    assert_eq!(old.versions(), moved, "everything is done");

    // no step is the last one while a node has another image
    let worker = old
        .client
        .list(&NODES.all(), &Selector::default())
        .unwrap()
        .items;
    let worker = worker[1]["metadata"]["name"].as_str().unwrap().to_owned();
    let give = |image: &str| {
        let annotation = [(node_version::IMAGE_ANNOTATION, image)];
        old.client
            .annotate(&NODES.named(&worker), &annotation)
            .unwrap();
    };
    give(constellation::IMAGE);
    let refused = old.failed(&["migrate", "apply", "--end"]);
    assert!(
        refused.contains(&format!("with another image: {worker}")),
        "{refused}"
    );
    assert_eq!(old.policy_images(), ["5198", "4444"]);
    give(NEW_IMAGE);

    // another operator, with the kubeconfig and the master secret only
    let other = tempfile::tempdir().unwrap();
    for name in [
        "constellation-admin.conf",
        "constellation-mastersecret.json",
    ] {
        fs::copy(folder.join(name), other.path().join(name)).unwrap();
    }
    let mut end = Command::new(support::program::built("firstlight"));
    end.args(["migrate", "apply", "--end", "--timeout", "1m"])
        .current_dir(other.path())
        .env_remove("KUBECONFIG");
    let ended = with_controllers(&old, false, || end.output().unwrap());
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    assert!(text(&ended.stderr).contains("kube-system/ebs-csi-node gets no key from now on"));
    assert_eq!(old.policy_images(), ["4444"]);
    let record = kube_system(CONFIG_MAPS, &format!("join-node-{worker}"));
    assert_eq!(old.client.get(&record).unwrap()["data"]["node"], *worker);
    let refused = old.key_service().key().unwrap_err();
    assert!(refused.contains("Unauthenticated"), "{refused}");

    for (arguments, expected) in [
        (
            ["migrate", "apply", "--image", "other:1"],
            "give them to `firstlight apply`",
        ),
        (
            ["migrate", "undo", "--image", "other:1"],
            "no other option of a move",
        ),
    ] {
        let refused = old.run(&arguments);
        assert_eq!(refused.status.code(), Some(2));
        assert!(
            text(&refused.stderr).contains(expected),
            "{}",
            text(&refused.stderr)
        );
    }

    // back, although the move was complete
    let undone = with_controllers(&old, true, || {
        old.done(&["migrate", "undo", "--timeout", "1m"])
    });
    assert!(
        undone.contains("the move is undone") && undone.contains("nodes that were replaced"),
        "{undone}"
    );
    assert_eq!(old.specifications(), before);
    assert_eq!(bindings(), 2, "kubelets of Constellation need them");
    assert_eq!(old.agent_check(), "Socket");
    assert_eq!(old.node_images(), [constellation::IMAGE]);
    assert!(
        old.client
            .find(&kube_system(SECRETS, "firstlight-migration"))
            .unwrap()
            .is_none()
    );
    assert_eq!(
        old.key_service().key().unwrap(),
        KEY,
        "Constellation's key service again"
    );
    let nothing = old.failed(&["migrate", "undo"]);
    assert!(nothing.contains("there is nothing to undo"), "{nothing}");
    let (plan, is_free) = old.plan(&["--old-clients-until", "never"]);
    assert!(is_free, "{plan:#}");
}

/// Moves the cluster of each release in this cloud: a step that fails restores everything, and `undo` goes back after the end.
fn each_release_moves_and_goes_back(cloud: &str) {
    let platform = constellation::PLATFORMS.iter().find(|it| it.cloud == cloud);
    let platform = platform.unwrap();
    let mut old = Old::new(platform.has_operator);
    let driver = format!("kube-system/{}", platform.driver);
    let mut options = WANTED.to_vec();
    if platform.has_operator {
        options.extend(["--node-image", NEW_IMAGE]);
    }
    let moved: &[&str] = if platform.has_operator {
        &[]
    } else {
        &["--nodes-moved"]
    };
    let run = |old: &Old, words: &[&str]| {
        let all = [&["migrate"], words, &["--timeout", "1m"], moved].concat();
        with_controllers(old, platform.has_operator, || old.done(&all))
    };
    for release in &constellation::RELEASES {
        let name = release.name;
        constellation::install(&old.client, release, platform);
        old.folder = tempfile::tempdir().unwrap();
        constellation::write_workspace(old.folder.path(), &old.cluster.kubeconfig());
        fs::write(old.folder.path().join("new.json"), NEW_POLICY).unwrap();
        let before = old.specifications();

        // the driver loses its access to keys, and the operator decides about it first
        let (plan, is_free) = old.plan(&[]);
        assert!(!is_free, "{cloud} {name}: {plan:#}");
        let blocks = blocks(&plan);
        assert!(
            matches!(&blocks[..], [one] if one.contains(&driver)),
            "{cloud} {name}: {blocks:?}"
        );

        let failing = [&["migrate", "apply", "--timeout", "1s"], &options[..]].concat();
        let failed = old.failed(&failing);
        assert!(
            failed.contains("everything was restored"),
            "{cloud} {name}: {failed}"
        );
        assert_eq!(old.specifications(), before, "{cloud} {name}: restored");

        run(&old, &[&["apply"], &options[..]].concat());
        assert_eq!(old.policy_images(), ["5198", "4444"], "{cloud} {name}");
        let ended = run(&old, &["apply", "--end"]);
        assert!(ended.contains(&driver), "{cloud} {name}: {ended}");
        assert_eq!(old.policy_images(), ["4444"], "{cloud} {name}");
        // the nodes that go back prove themselves in the old form only
        let admits = old.admits_the_old_form_during(|| drop(run(&old, &["undo"])));
        assert!(admits, "{cloud} {name}: undo");
        assert_eq!(old.specifications(), before, "{cloud} {name}: undone");
    }
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn each_release_in_aws_moves_and_goes_back() {
    each_release_moves_and_goes_back("AWS");
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn each_release_in_azure_moves_and_goes_back() {
    each_release_moves_and_goes_back("Azure");
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn each_release_in_google_cloud_moves_and_goes_back() {
    each_release_moves_and_goes_back("GCP");
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn each_release_in_openstack_moves_and_goes_back() {
    each_release_moves_and_goes_back("OpenStack");
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn without_a_node_operator_the_command_says_which_nodes_the_operator_starts() {
    let old = Old::new(false);
    fs::write(old.folder.path().join("new.json"), NEW_POLICY).unwrap();
    let before = old.specifications();
    let begin = [&["migrate", "apply", "--timeout", "2s"], &WANTED[..]].concat();

    // no service becomes ready: the step restores what it has changed
    let failed = old.failed(&begin);
    assert!(
        failed.contains("the step services is not done: the services are not ready after 2 s")
            && failed.contains("everything was restored"),
        "{failed}"
    );
    assert_eq!(old.specifications(), before);
    // options that are not given are those of the first run
    let stopped = with_controllers(&old, false, || {
        old.failed(&["migrate", "apply", "--timeout", "1m"])
    });
    for line in [
        "Start these nodes with the image, one after the other",
        "plane-0 (control-plane): no server answers",
        "worker-0 (worker): no server answers",
        "with --nodes-moved",
    ] {
        assert!(stopped.contains(line), "{line}: {stopped}");
    }
    // another image in the middle: none that nodes may run is dropped
    fs::write(
        old.folder.path().join("other.json"),
        NEW_POLICY.replace("4444", "5555"),
    )
    .unwrap();
    with_controllers(&old, false, || {
        old.done(&[
            "migrate",
            "apply",
            "--nodes-moved",
            "--policy",
            "other.json",
            "--timeout",
            "1m",
        ])
    });
    assert_eq!(old.policy_images(), ["5198", "4444", "5555"]);
    let refused = old.failed(&["migrate", "apply", "--end"]);
    assert!(
        refused.contains("Start these nodes with the image"),
        "{refused}"
    );
    let version = old.client.get(&node_version::place()).unwrap();
    assert_eq!(version["spec"]["image"], "unsupportedCSP");
    assert_eq!(version["spec"]["imageVersion"], "firstlight");

    let refused = old.failed(&["migrate", "undo"]);
    assert!(
        refused.contains("start each node with Constellation's image again"),
        "{refused}"
    );
    old.make_objects_of_running_services();
    old.forget_policies();
    assert!(!old.added().is_empty());
    with_controllers(&old, false, || {
        old.done(&["migrate", "undo", "--nodes-moved", "--timeout", "1m"])
    });
    assert_eq!(old.specifications(), before);
    assert_eq!(old.added(), [""; 0], "left over");
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_node_operator_that_is_stopped_would_replace_no_node_when_it_starts_again() {
    let old = Old::new(true);
    fs::write(old.folder.path().join("new.json"), NEW_POLICY).unwrap();
    let operator = kube_system(DEPLOYMENTS, "constellation-operator-controller-manager");
    old.client
        .merge(&operator, &json!({"spec": {"replicas": 0}}))
        .unwrap();
    let before = old.specifications();
    let image = || {
        let version = old.client.get(&node_version::place()).unwrap();
        version["spec"]["image"].as_str().unwrap().to_owned()
    };

    let begin = [
        &[
            "migrate",
            "apply",
            "--nodes-moved",
            "--timeout",
            "1m",
            "--node-image",
            NEW_IMAGE,
        ],
        &WANTED[..],
    ]
    .concat();
    with_controllers(&old, false, || old.done(&begin));
    assert_eq!(
        (image().as_str(), old.node_images()),
        (NEW_IMAGE, vec![NEW_IMAGE.to_owned()])
    );
    with_controllers(&old, false, || {
        old.done(&["migrate", "undo", "--nodes-moved", "--timeout", "1m"])
    });
    assert_eq!(old.specifications(), before);
    assert_eq!(
        (image().as_str(), old.node_images()),
        (constellation::IMAGE, vec![constellation::IMAGE.to_owned()])
    );

    // where it runs, nobody else moves nodes
    old.client
        .merge(&operator, &json!({"spec": {"replicas": 1}}))
        .unwrap();
    let refused = with_controllers(&old, false, || old.run(&begin));
    assert!(
        text(&refused.stderr).contains("would replace those that you start"),
        "{}",
        text(&refused.stderr)
    );
}

/// Makes the mirror pod of etcd on the first control plane, as its kubelet does.
fn set_etcd(client: &Client, image: &str) {
    let pods = PODS.in_namespace("kube-system");
    let node = client.get(&NODES.named("plane-0")).unwrap();
    let pod = json!({
        "metadata": {
            "name": "etcd-plane-0", "annotations": {"kubernetes.io/config.mirror": "00"}, "labels": {"component": "etcd"},
            "ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "plane-0", "uid": node["metadata"]["uid"], "controller": true}],
        },
        "spec": {"nodeName": "plane-0", "hostNetwork": true, "containers": [{"name": "etcd", "image": image}]},
    });
    let at = pods.named("etcd-plane-0");
    if client.find(&at).unwrap().is_some() {
        let change = json!({"spec": {"containers": [{"name": "etcd", "image": image}]}});
        client.merge(&at, &change).unwrap();
    } else {
        client.create(&pods, &pod).unwrap();
    }
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn an_upgrade_of_kubernetes_drives_node_version_as_the_nodes_can_follow() {
    let old = Old::new(true);
    let (client, folder) = (&old.client, old.folder.path());
    fs::copy(
        folder.join("constellation-admin.conf"),
        folder.join("firstlight-admin.conf"),
    )
    .unwrap();
    let from = version(client);
    let (minor, patch) = from.rsplit_once('.').unwrap();
    let later = |by: u32| format!("{minor}.{}", patch.parse::<u32>().unwrap() + by);
    let upgrade = |to: &str, more: &[&str]| {
        let component = |name: &str| {
            json!({"url": format!("https://dl.k8s.io/{to}/bin/linux/amd64/{name}"), "hash": format!("sha256:{}", "1".repeat(64)),
                "install_path": format!("/run/state/bin/{name}")})
        };
        let mut list: Vec<_> = ["kubelet", "kubeadm", "kubectl"].map(component).into();
        // the hash of a list covers the hashes of its programs only
        list[0]["hash"] = format!("sha256:{}", &to.replace(['v', '.'], "").repeat(64)[..64]).into();
        fs::write(folder.join("components.json"), json!(list).to_string()).unwrap();
        old.run(&[&["upgrade", to, "--components", "components.json"], more].concat())
    };
    let said = |output: Output| -> Value {
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let spec = || client.get(&node_version::place()).unwrap()["spec"].clone();
    let status = |condition: &str| {
        let now = "2026-11-21T00:00:00Z";
        let condition = json!({"type": "Outdated", "status": condition, "reason": "R", "message": "", "lastTransitionTime": now});
        let at = node_version::place().subresource("status");
        client
            .merge(&at, &json!({"status": {"conditions": [condition]}}))
            .unwrap();
    };

    // an upgrade would make it impossible to undo a move
    let record = json!({"metadata": {"name": "firstlight-migration"}, "stringData": {"record": r#"{"done":"nodes"}"#}});
    let secrets = SECRETS.in_namespace("kube-system");
    client.create(&secrets, &record).unwrap();
    let output = upgrade(&later(1), &[]);
    assert!(
        text(&output.stderr).contains("a move from Constellation is not complete"),
        "{}",
        text(&output.stderr)
    );
    client
        .delete(&secrets.named("firstlight-migration"))
        .unwrap();

    // etcd 3.6 may not follow each etcd 3.5: refused before a change
    let lists = || {
        let maps = client.list(
            &CONFIG_MAPS.in_namespace("kube-system"),
            &Selector::default(),
        );
        maps.unwrap().items.len()
    };
    let before = lists();
    set_etcd(client, "registry.example/etcd:3.5.25-0");
    let output = upgrade(&later(1), &[]);
    let refused = text(&output.stderr);
    assert!(
        refused.contains("may follow only etcd 3.5.26 or later: plane-0 (3.5.25-0)")
            && refused.contains("Nothing was changed")
            && !output.status.success(),
        "{refused}"
    );
    assert_eq!(lists(), before);
    set_etcd(client, "registry.example/etcd:3.5.26-0");

    // nodes of Constellation have upgrade agents
    let before = spec();
    status("True");
    let output = upgrade(&later(1), &[]);
    assert!(
        text(&output.stderr).contains("replaces nodes: wait until it is done"),
        "{}",
        text(&output.stderr)
    );
    status("False");
    let dry = said(upgrade(&later(1), &["--dry-run", "-o", "json"]));
    assert_eq!((dry["nodeVersion"].as_str(), spec()), (Some("set"), before));
    let set = said(upgrade(&later(1), &["-o", "json"]));
    assert_eq!(spec()["kubernetesComponentsReference"], set["components"]);
    assert_eq!(spec()["kubernetesClusterVersion"], later(1));
    assert_eq!(spec()["image"], constellation::IMAGE);

    // nodes of Firstlight have none: the operator upgrades the first control plane
    node_version::set(client, &[(node_version::IMAGE_VERSION, "firstlight")]).unwrap();
    let before = spec();
    let output = upgrade(&later(2), &[]);
    assert!(
        text(&output.stdout)
            .contains("NodeVersion stays as it is until the first control plane has"),
        "{}",
        text(&output.stdout)
    );
    assert_eq!(spec(), before);
    let configuration = format!("kubernetesVersion: {}\n", later(2));
    let map = json!({"data": {"ClusterConfiguration": configuration}});
    client
        .merge(&kube_system(CONFIG_MAPS, "kubeadm-config"), &map)
        .unwrap();
    let kubelet = json!({"status": {"nodeInfo": {"kubeletVersion": later(2)}}});
    client
        .merge(&NODES.named("plane-0").subresource("status"), &kubelet)
        .unwrap();
    let set = said(upgrade(&later(2), &["-o", "json"]));
    assert_eq!(set["nodeVersion"], "set");
    assert_eq!(spec()["kubernetesComponentsReference"], set["components"]);
    assert_eq!(spec()["kubernetesClusterVersion"], later(2));
    let components = |name: &str| {
        let node = client.get(&NODES.named(name)).unwrap();
        node["metadata"]["annotations"][node_version::COMPONENTS_ANNOTATION].clone()
    };
    assert_eq!(
        components("plane-0"),
        set["components"],
        "it is not replaced"
    );
    assert_eq!(components("worker-0"), Value::Null);
}
