//! Values of the previous chart with the chart of today (a real Helm).

use std::fs;
use std::os::unix::fs::symlink;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;

use base::stop::Stop;
use common::kube_apiserver::{Cluster, play_controller};
use common::previous::{self, Release::Today};
use kubernetes::yaml;
use serde_json::{Value, json};
use support::ROOT;
use support::foreign::fetched;
use tempfile::TempDir;

use crate::cluster::{Operator, PLAIN, block, missing, secrets};

const POLICY: &str = r#"{"measurements":{"4":{"expected":"1111111111111111111111111111111111111111111111111111111111111111"},"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000"}}}"#;
const SALT: &str = "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=";

/// Runs `helm template` on a chart with these files of values.
fn template(chart: &Path, values: &[&Value]) -> Output {
    let folder = TempDir::new().unwrap();
    let mut helm = Command::new(fetched("helm.sh"));
    helm.args(["template", "firstlight", "--namespace", "kube-system"]);
    helm.arg(chart).args(["--kube-version", "1.34.4"]);
    for (number, values) in values.iter().enumerate() {
        let path = folder.path().join(format!("{number}.json"));
        fs::write(&path, values.to_string()).unwrap();
        helm.arg("--values").arg(path);
    }
    helm.env("HELM_CACHE_HOME", folder.path());
    helm.output().unwrap()
}

/// The values that an operator gave to the previous chart.
fn given() -> Value {
    json!({
        "image": "example.com/firstlight:1",
        "attestationPolicy": POLICY,
        "measurementSalt": SALT,
        "masterSecret": {"key": SALT, "salt": SALT},
    })
}

fn chart_of_before() -> PathBuf {
    previous::folder().join("source/charts/firstlight")
}

fn chart() -> PathBuf {
    Path::new(ROOT).join("charts/firstlight")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The commands of the chart's README, for a release that the previous chart made.
#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn a_release_of_the_previous_chart_moves_by_the_commands_of_the_readme() {
    let cluster = Cluster::start();
    let client = cluster.client(&Stop::new());
    let operator = Operator::new(&cluster.kubeconfig());
    let folder = operator.0.path();
    let secret = fs::read_to_string(folder.join("firstlight-mastersecret.json")).unwrap();
    let mut values = given();
    values["masterSecret"] = serde_json::from_str(&secret).unwrap();
    fs::write(folder.join("given.json"), values.to_string()).unwrap();
    symlink(chart_of_before(), folder.join("previous-chart")).unwrap();
    symlink(Path::new(ROOT).join("charts"), folder.join("charts")).unwrap();
    let readme = fs::read_to_string(chart().join("README.md")).unwrap();
    let move_it = block(&readme, "## A release of an earlier version");
    let stop = Stop::new();
    thread::scope(|scope| {
        let (client, stop) = (&client, &stop);
        scope.spawn(move || play_controller(client, stop));
        let moved = panic::catch_unwind(AssertUnwindSafe(|| {
            operator.shell("helm install firstlight previous-chart --namespace kube-system --values given.json");
            assert_eq!(secrets(client), [PLAIN]);
            operator.shell("firstlight wrap --for-control-planes");
            operator.shell(&move_it);
        }));
        stop.stop();
        moved.unwrap();
    });
    assert_eq!(missing(&client, Today), Vec::<String>::new());
    let kept = secrets(&client);
    assert!(kept.len() == 1 && kept[0] != PLAIN, "{kept:?}");
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn values_with_a_plain_master_secret_are_refused() {
    let before = template(&chart_of_before(), &[&given()]);
    assert!(before.status.success(), "{}", text(&before.stderr));
    let refused = template(&chart(), &[&given()]);
    let why = text(&refused.stderr);
    let gone = "at '/masterSecret': additional properties";
    assert!(!refused.status.success() && why.contains(gone), "{why}");
}

/// All defaults of the previous chart, as an operator has them who keeps a whole copy of its values.yaml.
#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn each_value_of_the_previous_chart_but_the_master_secret_is_known() {
    let values = fs::read_to_string(chart_of_before().join("values.yaml")).unwrap();
    let mut values = yaml::documents(&values).unwrap().remove(0);
    values.as_object_mut().unwrap().remove("masterSecret");
    let mut given = given();
    given["masterSecret"] = json!({"existingSecret": "constellation-mastersecret"});
    let made = template(&chart(), &[&values, &given]);
    assert!(made.status.success(), "{}", text(&made.stderr));
}
