//! A snapshot of etcd is restored by the command of docs/day-two/etcd.md, which the test takes from the page, under a real
//! kube-apiserver (`make kubernetes-api`). etcd and its tools are built from the same version.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use base::stop::Stop;
use common::kube_apiserver::{Cluster, PATIENCE};
use kubernetes::client::{CONFIG_MAPS, Client};
use serde_json::{Value, json};
use support::ROOT;
use support::boot_image::run;
use support::foreign::fetched;

/// Returns the arguments of the page's only command with these words, which begin with them.
fn arguments(words: &[&str]) -> Vec<String> {
    let page = fs::read_to_string(Path::new(ROOT).join("docs/day-two/etcd.md")).unwrap();
    let text = page.replace("\\\n", " ");
    let lines = text.lines().filter_map(|line| {
        let mut line = line.split_whitespace().map(str::to_owned);
        line.by_ref()
            .find(|word| word.rsplit('/').next() == Some(words[0]))?;
        let line: Vec<_> = line.collect();
        words[1..]
            .iter()
            .all(|word| line.iter().any(|other| other == word))
            .then_some(line)
    });
    let found: Vec<_> = lines.collect();
    let [arguments] = &found[..] else {
        panic!("{words:?}: {found:?}");
    };
    arguments.clone()
}

/// Runs the page's command, with these words in place of the page's, and without certificates: the etcd of the test has no TLS.
fn from_page(words: &[&str], replaced: &[(&str, &str)]) {
    let mut command = Command::new(fetched("etcd-tools.sh").join(words[0]));
    let mut arguments = arguments(words).into_iter();
    while let Some(mut word) = arguments.next() {
        if ["--cacert", "--cert", "--key"].contains(&&*word) {
            arguments.next();
            continue;
        }
        for (from, to) in replaced {
            word = word.replace(from, to);
        }
        command.arg(word);
    }
    run(&mut command);
}

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
        let restore = [
            ("/run/state/snapshot.db", snapshot),
            ("/run/state/restored", folder.to_str().unwrap()),
            ("https://ADDRESS:2380", &*peer),
            ("NODE", "default"),
        ];
        from_page(&["etcdutl", "restore"], &restore);
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
