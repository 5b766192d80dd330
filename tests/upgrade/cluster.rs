//! The objects of a cluster: `firstlight apply` of both releases with a real kube-apiserver.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::thread;

use base::stop::Stop;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use common::join_setup::OTHERS;
use common::kube_apiserver::{Cluster, build, play_controller};
use common::previous::Release::{self, Previous, Today};
use kubernetes::client::{Client, DAEMON_SETS, Object, Resource, SECRETS, Selector};
use serde_json::{Value, json};
use support::foreign::fetched;
use support::program::built;
use tempfile::TempDir;

const NAMESPACE: &str = "kube-system";
const POLICY: &str = r#"{"measurements":{"4":{"expected":"1111111111111111111111111111111111111111111111111111111111111111"},"15":{"expected":"0000000000000000000000000000000000000000000000000000000000000000"}}}"#;
/// The Secret in which the previous release keeps the master secret.
pub const PLAIN: &str = "constellation-mastersecret";

const UPGRADE: &str = include_str!("../../docs/day-two/upgrade.md");

/// The operator's files.
pub struct Operator(pub TempDir);

impl Operator {
    pub fn new(kubeconfig: &str) -> Operator {
        let folder = TempDir::new().unwrap();
        let base64 = |byte| BASE64_STANDARD.encode([byte; 32]);
        let secret = json!({"key": base64(2), "salt": base64(3)}).to_string();
        let state = json!({"version": 1, "measurementSalt": base64(7)}).to_string();
        for (name, content) in [
            ("policy.json", POLICY),
            ("firstlight-mastersecret.json", &secret),
            ("firstlight-state.json", &state),
            ("firstlight-admin.conf", kubeconfig),
        ] {
            let path = folder.path().join(name);
            fs::write(&path, content).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        }
        Operator(folder)
    }

    /// Runs `firstlight apply` of a release, with its image.
    fn try_apply(&self, release: Release, arguments: &[&str]) -> Output {
        let image = format!("example.com/firstlight:{release:?}");
        let mut command = Command::new(release.run(|| built("firstlight")));
        command.args(["apply", "--policy", "policy.json", "--image", &image]);
        command.args(arguments).current_dir(self.0.path());
        command.output().unwrap()
    }

    /// Runs commands of a page, with the programs of today.
    pub fn shell(&self, commands: &str) {
        let folder = self.0.path();
        let programs = [built("firstlight"), fetched("helm.sh"), kubectl()];
        let folders = programs.map(|program| program.parent().unwrap().display().to_string());
        let path = format!("{}:/usr/bin:/bin", folders.join(":"));
        let mut bash = Command::new("bash");
        bash.args(["-euxo", "pipefail", "-c", commands])
            .env("PATH", path);
        bash.env("KUBECONFIG", folder.join("firstlight-admin.conf"));
        bash.env("HELM_CACHE_HOME", folder.join("helm"));
        let output = bash.current_dir(folder).output().unwrap();
        let (said, errors) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{said}{errors}");
    }

    /// Runs it, and returns what it prints.
    fn apply(&self, release: Release, arguments: &[&str]) -> (String, String) {
        let output = self.try_apply(release, arguments);
        let (said, errors) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{release:?}: {said}{errors}");
        (said, errors)
    }
}

fn kubectl() -> PathBuf {
    build(&["kubectl"]).join("kubectl")
}

/// Returns the commands below a heading of a page.
pub fn block(page: &str, heading: &str) -> String {
    let (_, section) = page.split_once(heading).unwrap();
    let begin = section.find("```").unwrap();
    let (_, commands) = section[begin..].split_once('\n').unwrap();
    let (commands, _) = commands.split_once("```").unwrap();
    commands.to_owned()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the objects of a release.
fn manifests(release: Release) -> Vec<Value> {
    let (printed, _) = Operator::new("").apply(release, &["--print"]);
    let list: Value = serde_json::from_str(&printed).unwrap();
    list["items"].as_array().unwrap().clone()
}

/// Does what docs/day-two/upgrade.md says before a roll-back of the services: deletes the bindings of all admission policies.
fn delete_bindings(client: &Client) {
    let group = "admissionregistration.k8s.io";
    let bindings = Resource::cluster(group, "v1", "validatingadmissionpolicybindings");
    let ours = Selector::labels("app.kubernetes.io/component=admission");
    for binding in client.list(&bindings.all(), &ours).unwrap().items {
        let name = binding["metadata"]["name"].as_str().unwrap();
        client.delete(&bindings.named(name)).unwrap();
    }
}

/// Gives the services the accounts, roles and admission policies of a release, without their pods.
pub fn install_accounts(release: Release, client: &Client) {
    if release == Previous {
        delete_bindings(client);
    }
    for object in manifests(release) {
        if !OTHERS.iter().any(|kind| object["kind"] == *kind) {
            client
                .apply(&Object::of(&object).unwrap(), &object)
                .unwrap();
        }
    }
}

/// Applies the services of a release while a controller makes their pods ready.
fn apply_and_wait(
    operator: &Operator,
    client: &Client,
    release: Release,
    more: &[&str],
) -> (String, String) {
    let stop = Stop::new();
    thread::scope(|scope| {
        let (client, stop) = (client, &stop);
        scope.spawn(move || play_controller(client, stop));
        let applied = operator.try_apply(release, &[&["--timeout=60s"], more].concat());
        stop.stop();
        let (said, errors) = (text(&applied.stdout), text(&applied.stderr));
        assert!(applied.status.success(), "{release:?}: {said}{errors}");
        (said, errors)
    })
}

pub fn secrets(client: &Client) -> Vec<String> {
    let all = SECRETS.in_namespace(NAMESPACE);
    let all = client.list(&all, &Selector::default()).unwrap().items;
    let names = all
        .iter()
        .map(|it| it["metadata"]["name"].as_str().unwrap());
    let names = names.filter(|name| name.contains("mastersecret"));
    names.map(str::to_owned).collect()
}

fn pods_of(client: &Client, name: &str) -> Value {
    let set = DAEMON_SETS.in_namespace(NAMESPACE).named(name);
    client.get(&set).unwrap()["spec"]["template"]["spec"].clone()
}

/// Returns the objects of a release that are not in the cluster.
pub fn missing(client: &Client, release: Release) -> Vec<String> {
    let objects = manifests(release);
    let objects = objects.iter().map(|object| Object::of(object).unwrap());
    objects
        .filter(|object| client.find(object).unwrap().is_none())
        .map(|object| object.to_string())
        .collect()
}

#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn todays_apply_upgrades_the_previous_services_and_keeps_their_settings() {
    let cluster = Cluster::start();
    let client = cluster.client(&Stop::new());
    let operator = Operator::new(&cluster.kubeconfig());
    operator.apply(Previous, &["--skip-wait", "--watch=600"]);
    assert_eq!(secrets(&client), [PLAIN]);
    // the pods of the previous release are ready
    apply_and_wait(&operator, &client, Previous, &[]);

    let (_, errors) = apply_and_wait(&operator, &client, Today, &[]);
    assert!(
        errors.contains("stays as it is: joinService.watch \"600\""),
        "{errors}"
    );
    assert_eq!(missing(&client, Today), Vec::<String>::new());
    let kept = secrets(&client);
    assert!(kept.len() == 1 && kept[0] != PLAIN, "{kept:?}");
    for name in ["join-service", "key-service"] {
        let image = &pods_of(&client, name)["containers"][0]["image"];
        assert_eq!(image, "example.com/firstlight:Today");
    }
    let (said, _) = apply_and_wait(&operator, &client, Today, &[]);
    assert_eq!(said, "nothing had to be changed\n");
}

/// docs/day-two/upgrade.md, "Roll-back".
#[test]
#[ignore = "needs the previous release: make test-upgrade"]
fn the_previous_apply_brings_its_services_back() {
    let cluster = Cluster::start();
    let client = cluster.client(&Stop::new());
    let operator = Operator::new(&cluster.kubeconfig());
    operator.apply(Previous, &["--skip-wait", "--watch=600"]);
    apply_and_wait(&operator, &client, Previous, &[]);
    let names = ["join-service", "key-service"];
    let before = names.map(|name| pods_of(&client, name));
    let (_, errors) = apply_and_wait(&operator, &client, Today, &[]);
    let (_, saved) = errors.split_once("firstlight-manifests-").unwrap();
    let saved: String = saved
        .chars()
        .take_while(|c| c.is_ascii_alphanumeric())
        .collect();
    let saved = format!("firstlight-manifests-{saved}");
    assert!(!secrets(&client).contains(&PLAIN.to_owned()));

    operator.shell(&block(UPGRADE, "## Roll-back").replace("firstlight-manifests-DATE", &saved));
    for (name, before) in names.iter().zip(before) {
        assert_eq!(pods_of(&client, name), before, "{name}");
    }
    assert_eq!(missing(&client, Previous), Vec::<String>::new());
    // its own command works again, and changes only the Secret that was made by hand: its labels, and that it is immutable
    let (said, errors) = apply_and_wait(&operator, &client, Previous, &[]);
    assert_eq!(said, "1 object is new or changed\n");
    let changed = format!("secrets kube-system/{PLAIN}: changed");
    assert!(errors.contains(&changed), "{errors}");
}
