//! Tests of `firstlight migrate` and of `firstlight upgrade` in clusters of Constellation, with a real kube-apiserver, a real etcd, and
//! the custom resources of Constellation (`make kubernetes-api`).

use common::{constellation, kube_apiserver};

use std::fs;
use std::process::{Command, Output};

use base::stop::Stop;
use kube_apiserver::Cluster;
use kubernetes::client::{
    CONFIG_MAPS, Client, DAEMON_SETS, DEPLOYMENTS, NODES, Object, Resource, SECRETS, Selector,
};
use kubernetes::node_version;
use serde_json::{Value, json};
use tempfile::TempDir;

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
        let cluster = Cluster::start();
        let client = cluster.client(&Stop::new());
        client
            .within(kube_apiserver::PATIENCE)
            .wait_ready(&mut |_| {})
            .unwrap();
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
    fs::remove_file(old.folder.path().join("constellation-mastersecret.json")).unwrap();
    let (plan, is_free) = old.plan(&decided);
    assert!(
        !is_free && blocks(&plan)[0].contains("constellation-mastersecret.json"),
        "{plan:#}"
    );
    assert!(old.cluster.server().starts_with("https://"));
}
