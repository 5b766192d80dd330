//! A snapshot of etcd is restored under a real kube-apiserver by etcdutl, with the arguments that `bootstrapper restore-etcd` gives it
//! (`make kubernetes-api`). etcd and its tools are built from the same version.

use std::path::{Path, PathBuf};
use std::process::Command;

use base::stop::Stop;
use bootstrapper::restore::etcdutl_arguments;
use common::kube_apiserver::{Cluster, PATIENCE};
use kubernetes::client::{CONFIG_MAPS, Client};
use serde_json::{Value, json};
use support::boot_image::run;
use support::foreign::fetched;

fn wait_ready(cluster: &Cluster) -> Client {
    let client = cluster.client(&Stop::new()).within(PATIENCE);
    client.wait_ready(&mut |_| {}).unwrap();
    client
}

fn version(object: &Value) -> u64 {
    let version = object["metadata"]["resourceVersion"].as_str();
    version.unwrap().parse().unwrap()
}

#[test]
#[ignore = "needs a kube-apiserver: make kubernetes-api"]
fn a_backup_of_etcd_brings_back_the_objects_and_no_old_version() {
    let mut cluster = Cluster::start();
    let client = wait_ready(&cluster);
    let maps = CONFIG_MAPS.in_namespace("default");
    let map = |name: &str, value: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"key": value}});
    client.create(&maps, &map("kept", "saved")).unwrap();
    client.create(&maps, &map("deleted", "saved")).unwrap();

    let snapshot: PathBuf = cluster.path("snapshot.db");
    let snapshot = snapshot.to_str().unwrap();
    let [url, peer] = cluster.etcd_urls();
    let mut save = Command::new(fetched("etcd-tools.sh").join("etcdctl"));
    run(save.args(["--endpoints", &url, "snapshot", "save", snapshot]));

    client.delete(&maps.named("deleted")).unwrap();
    client.create(&maps, &map("later", "lost")).unwrap();
    let last = version(
        &client
            .merge(&maps.named("kept"), &json!({"data": {"key": "changed"}}))
            .unwrap(),
    );

    cluster.replace_etcd(|folder| {
        let arguments = etcdutl_arguments(Path::new(snapshot), folder, "default", &peer, 1);
        run(Command::new(fetched("etcd-tools.sh").join("etcdutl")).args(arguments));
    });
    let client = wait_ready(&cluster);
    for name in ["kept", "deleted"] {
        let found = client.get(&maps.named(name)).unwrap();
        assert_eq!(found["data"]["key"], "saved", "{name}");
    }
    assert!(client.find(&maps.named("later")).unwrap().is_none());
    // programs that remember a version of before do not take an older object for a newer one
    let new = version(&client.create(&maps, &map("new", "1")).unwrap());
    assert!(new > last, "{new} after {last}");
}
